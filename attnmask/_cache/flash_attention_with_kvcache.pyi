"""Written by .ci/make_signatures.py."""

from typing import Any, Literal, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnmask._masks.info import MaskInfo

@overload
def flash_attention_with_kvcache(
    query: ArrayLike,
    k_cache: NDArray[Any],
    v_cache: NDArray[Any],
    key: ArrayLike | None = None,
    value: ArrayLike | None = None,
    *,
    cache_seqlens: ArrayLike | None = None,
    block_table: ArrayLike | None = None,
    cu_seqlens_q: ArrayLike | None = None,
    cu_seqlens_k_new: ArrayLike | None = None,
    k_scale: NDArray[np.float32] | None = None,
    v_scale: NDArray[np.float32] | None = None,
    attention_mask: ArrayLike | MaskInfo | None = None,
    return_lse: Literal[False] = False,
    out: NDArray[Any] | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_aux: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    relative_bias: ArrayLike | None = None,
    relative_low: int = 0,
    bias: ArrayLike | None = None,
    rotate: bool = False,
) -> NDArray[Any]: ...
@overload
def flash_attention_with_kvcache(
    query: ArrayLike,
    k_cache: NDArray[Any],
    v_cache: NDArray[Any],
    key: ArrayLike | None = None,
    value: ArrayLike | None = None,
    *,
    cache_seqlens: ArrayLike | None = None,
    block_table: ArrayLike | None = None,
    cu_seqlens_q: ArrayLike | None = None,
    cu_seqlens_k_new: ArrayLike | None = None,
    k_scale: NDArray[np.float32] | None = None,
    v_scale: NDArray[np.float32] | None = None,
    attention_mask: ArrayLike | MaskInfo | None = None,
    return_lse: Literal[True],
    out: NDArray[Any] | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_aux: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    relative_bias: ArrayLike | None = None,
    relative_low: int = 0,
    bias: ArrayLike | None = None,
    rotate: bool = False,
) -> tuple[NDArray[Any], NDArray[Any]]: ...
@overload
def flash_attention_with_kvcache(
    query: ArrayLike,
    k_cache: NDArray[Any],
    v_cache: NDArray[Any],
    key: ArrayLike | None = None,
    value: ArrayLike | None = None,
    *,
    cache_seqlens: ArrayLike | None = None,
    block_table: ArrayLike | None = None,
    cu_seqlens_q: ArrayLike | None = None,
    cu_seqlens_k_new: ArrayLike | None = None,
    k_scale: NDArray[np.float32] | None = None,
    v_scale: NDArray[np.float32] | None = None,
    attention_mask: ArrayLike | MaskInfo | None = None,
    return_lse: bool = False,
    out: NDArray[Any] | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_aux: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    relative_bias: ArrayLike | None = None,
    relative_low: int = 0,
    bias: ArrayLike | None = None,
    rotate: bool = False,
) -> NDArray[Any] | tuple[NDArray[Any], NDArray[Any]]: ...
