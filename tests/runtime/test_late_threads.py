"""Threads that are late, in a build that lets them be (csrc/faults.c, `make faults`, `make sanitize`)."""

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
from environment import with_threads

import attnmask
from attnmask import _core

FIRST_PART_IS_KNOWN, PART_IS_KNOWN, TILES_END = range(3)  # as in csrc/faults.h


class Place(ctypes.Structure):
    _fields_ = [("passes", ctypes.c_long), ("microseconds", ctypes.c_long)]


core = ctypes.PyDLL(_core.__file__)
if not hasattr(core, "am_places"):
    pytest.skip("threads are late on request only in the build of `make faults`", allow_module_level=True)
places = (Place * 3).in_dll(core, "am_places")


@pytest.fixture(autouse=True)
def nobody_is_late() -> Iterator[None]:
    def reset() -> None:
        for place in places:
            place.passes = place.microseconds = 0

    reset()
    yield
    reset()


@with_threads
def test_one_thread_ends_a_tile(set_threads):
    """Parts of a tile's gradients are tasks. The thread that adds the last one ends the tile, though others then find
    all parts added, too: one that has told of its part and only now looks what has been added."""
    set_threads(8)
    rng = np.random.default_rng(0)
    query = rng.standard_normal((1, 4096, 4, 16), np.float32)
    key = rng.standard_normal((1, 128, 1, 16), np.float32)
    out, vjp = attnmask.flash_attention_vjp(query, key, key)
    right = vjp(out)
    parts = places[PART_IS_KNOWN].passes
    assert parts > places[FIRST_PART_IS_KNOWN].passes > 0
    for microseconds in (0, 300, 3000):
        for place in places:
            place.passes = 0
        places[PART_IS_KNOWN].microseconds = microseconds
        got = vjp(out)
        assert places[PART_IS_KNOWN].passes == parts
        assert places[TILES_END].passes == places[FIRST_PART_IS_KNOWN].passes
        np.testing.assert_array_equal(got.key, right.key)
        np.testing.assert_array_equal(got.value, right.value)
