"""How sequences may be divided among processes."""

import numpy as np
from hypothesis import strategies as st

from attnmask import ShardPlan


@st.composite
def layouts(draw, length, world):
    """A layout and `cu_seqlens`, or None."""
    inner = sorted(draw(st.lists(st.integers(0, length), max_size=5)))
    starts = [0, *inner, length]
    if draw(st.booleans()):
        owners = draw(st.lists(st.integers(0, world - 1), min_size=len(inner) + 1, max_size=len(inner) + 1))
        return ShardPlan(starts, owners, world), None
    return draw(st.sampled_from(["zigzag", "contiguous"])), draw(st.sampled_from([None, np.array(starts)]))
