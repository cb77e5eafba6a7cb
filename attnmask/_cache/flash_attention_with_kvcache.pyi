"""Written by .ci/make_signatures.py."""
# fmt: off

from collections.abc import Sequence
from typing import Literal, SupportsIndex, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnmask._attention.weights import AttentionStatistics, Statistic
from attnmask._common.types import Array
from attnmask._masks.info import MaskInfo

@overload
def flash_attention_with_kvcache(
    query: ArrayLike, k_cache: Array, v_cache: Array, key: ArrayLike | None = None,
    value: ArrayLike | None = None, *, cache_seqlens: ArrayLike | None = None,
    block_table: ArrayLike | None = None, cu_seqlens_q: ArrayLike | None = None,
    cu_seqlens_k_new: ArrayLike | None = None, k_scale: NDArray[np.float32] | None = None,
    v_scale: NDArray[np.float32] | None = None, attention_mask: ArrayLike | MaskInfo | None = None,
    return_lse: Literal[False] = False, out: Array | None = None, prefix: SupportsIndex = 0,
    softmax_scale: float | None = None, causal: bool = True,
    sliding_window: int | tuple[int | None, int | None] | None = None, logits_soft_cap: float | None = None,
    softmax_aux: ArrayLike | None = None, alibi_slopes: ArrayLike | None = None,
    relative_bias: ArrayLike | None = None, relative_low: int = 0, grid_bias: ArrayLike | None = None,
    bias: ArrayLike | None = None, attention_chunk: int | None = None, rotate: bool = False,
) -> Array: ...
@overload
def flash_attention_with_kvcache(
    query: ArrayLike, k_cache: Array, v_cache: Array, key: ArrayLike | None = None,
    value: ArrayLike | None = None, *, cache_seqlens: ArrayLike | None = None,
    block_table: ArrayLike | None = None, cu_seqlens_q: ArrayLike | None = None,
    cu_seqlens_k_new: ArrayLike | None = None, k_scale: NDArray[np.float32] | None = None,
    v_scale: NDArray[np.float32] | None = None, attention_mask: ArrayLike | MaskInfo | None = None,
    return_lse: Literal[True], out: Array | None = None, prefix: SupportsIndex = 0,
    softmax_scale: float | None = None, causal: bool = True,
    sliding_window: int | tuple[int | None, int | None] | None = None, logits_soft_cap: float | None = None,
    softmax_aux: ArrayLike | None = None, alibi_slopes: ArrayLike | None = None,
    relative_bias: ArrayLike | None = None, relative_low: int = 0, grid_bias: ArrayLike | None = None,
    bias: ArrayLike | None = None, attention_chunk: int | None = None, rotate: bool = False,
) -> tuple[Array, Array]: ...
@overload
def flash_attention_with_kvcache(
    query: ArrayLike, k_cache: Array, v_cache: Array, key: ArrayLike | None = None,
    value: ArrayLike | None = None, *, cache_seqlens: ArrayLike | None = None,
    block_table: ArrayLike | None = None, cu_seqlens_q: ArrayLike | None = None,
    cu_seqlens_k_new: ArrayLike | None = None, k_scale: NDArray[np.float32] | None = None,
    v_scale: NDArray[np.float32] | None = None, attention_mask: ArrayLike | MaskInfo | None = None,
    return_lse: bool = False, out: Array | None = None, prefix: SupportsIndex = 0,
    softmax_scale: float | None = None, causal: bool = True,
    sliding_window: int | tuple[int | None, int | None] | None = None, logits_soft_cap: float | None = None,
    softmax_aux: ArrayLike | None = None, alibi_slopes: ArrayLike | None = None,
    relative_bias: ArrayLike | None = None, relative_low: int = 0, grid_bias: ArrayLike | None = None,
    bias: ArrayLike | None = None, attention_chunk: int | None = None, rotate: bool = False,
) -> Array | tuple[Array, Array]: ...
def attention_statistics_with_kvcache(
    query: ArrayLike, k_cache: Array, *, of: Statistic | Sequence[Statistic],
    heads: Literal["query", "key"] = 'query', lse: ArrayLike | None = None,
    cache_seqlens: ArrayLike | None = None, block_table: ArrayLike | None = None,
    cu_seqlens_q: ArrayLike | None = None, k_scale: NDArray[np.float32] | None = None,
    attention_mask: ArrayLike | MaskInfo | None = None, softmax_scale: float | None = None,
    causal: bool = True, sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None, softmax_aux: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None, relative_bias: ArrayLike | None = None, relative_low: int = 0,
    grid_bias: ArrayLike | None = None, bias: ArrayLike | None = None, attention_chunk: int | None = None,
    rotate: bool = False,
) -> AttentionStatistics: ...
