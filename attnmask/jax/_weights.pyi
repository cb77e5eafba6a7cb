"""Written by .ci/make_signatures.py."""
# fmt: off

from collections.abc import Sequence
from typing import Literal

import jax
import numpy.typing as npt
from jax.typing import ArrayLike

from attnmask._attention.arguments import Diagonal
from attnmask._attention.weights import AttentionStatistics, Queries, Statistic
from attnmask._masks.info import MaskInfo

def attention_weights(
    query: ArrayLike, key: ArrayLike, attention_mask: npt.ArrayLike | MaskInfo | None = None, *,
    queries: Queries | None = None, bias: npt.ArrayLike | None = None, softmax_scale: float | None = None,
    causal: bool = False, cum_seqlens_q: npt.ArrayLike | None = None,
    cum_seqlens_k: npt.ArrayLike | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None, logits_soft_cap: float | None = None,
    softmax_aux: npt.ArrayLike | None = None, q_segment_ids: npt.ArrayLike | None = None,
    kv_segment_ids: npt.ArrayLike | None = None, causal_offset: Diagonal = 0,
    alibi_slopes: npt.ArrayLike | None = None, relative_bias: npt.ArrayLike | None = None,
    relative_low: int = 0, grid_bias: npt.ArrayLike | None = None,
) -> jax.Array: ...
def attention_statistics(
    query: ArrayLike, key: ArrayLike, attention_mask: npt.ArrayLike | MaskInfo | None = None, *,
    of: Statistic | Sequence[Statistic], queries: Queries | None = None,
    heads: Literal['query', 'key'] = 'query', lse: npt.ArrayLike | None = None,
    bias: npt.ArrayLike | None = None, softmax_scale: float | None = None, causal: bool = False,
    cum_seqlens_q: npt.ArrayLike | None = None, cum_seqlens_k: npt.ArrayLike | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None, logits_soft_cap: float | None = None,
    softmax_aux: npt.ArrayLike | None = None, q_segment_ids: npt.ArrayLike | None = None,
    kv_segment_ids: npt.ArrayLike | None = None, causal_offset: Diagonal = 0,
    alibi_slopes: npt.ArrayLike | None = None, relative_bias: npt.ArrayLike | None = None,
    relative_low: int = 0, grid_bias: npt.ArrayLike | None = None,
) -> AttentionStatistics: ...
