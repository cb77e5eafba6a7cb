"""Written by .ci/make_signatures.py."""
# fmt: off

from typing import Generic, Literal, TypeVar, Unpack, overload

import jax
import numpy.typing as npt
from jax.typing import ArrayLike

from attnmask._attention.arguments import Call
from attnmask._masks.info import MaskInfo
from attnmask.jax._types import KVCacheResult

_Flag = TypeVar("_Flag", bound=bool)

class _Call(Call[_Flag], Generic[_Flag], total=False):
    callback: bool


@overload
def flash_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike,
    attention_mask: npt.ArrayLike | MaskInfo | None = None, bias: npt.ArrayLike | None = None,
    **more: Unpack[_Call[Literal[False]]],
) -> jax.Array: ...
@overload
def flash_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike,
    attention_mask: npt.ArrayLike | MaskInfo | None = None, bias: npt.ArrayLike | None = None,
    **more: Unpack[_Call[Literal[True]]],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def flash_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike,
    attention_mask: npt.ArrayLike | MaskInfo | None = None, bias: npt.ArrayLike | None = None,
    **more: Unpack[_Call[bool]],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
def flash_attention_with_kvcache(
    query: ArrayLike, k_cache: ArrayLike, v_cache: ArrayLike, key: ArrayLike | None = None,
    value: ArrayLike | None = None, *, cache_seqlens: npt.ArrayLike | None = None,
    block_table: npt.ArrayLike | None = None, cu_seqlens_q: npt.ArrayLike | None = None,
    cu_seqlens_k_new: npt.ArrayLike | None = None, k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None, attention_mask: npt.ArrayLike | MaskInfo | None = None,
    bias: npt.ArrayLike | None = None, softmax_scale: float | None = None, causal: bool = True,
    sliding_window: int | tuple[int | None, int | None] | None = None, logits_soft_cap: float | None = None,
    softmax_aux: npt.ArrayLike | None = None, alibi_slopes: npt.ArrayLike | None = None,
    relative_bias: npt.ArrayLike | None = None, relative_low: int = 0, grid_bias: npt.ArrayLike | None = None,
    attention_chunk: int | None = None, prefix: int = 0, rotate: bool = False, return_lse: bool = False,
) -> KVCacheResult: ...
def write_kvcache(
    k_cache: ArrayLike, v_cache: ArrayLike, key: ArrayLike, value: ArrayLike | None,
    slot_mapping: npt.ArrayLike, *, k_scale: ArrayLike | None = None, v_scale: ArrayLike | None = None,
    rotate: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]: ...
@overload
def linear_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, *, decay: ArrayLike | None = None,
    beta: ArrayLike | None = None, scale: float | None = None, initial_state: ArrayLike | None = None,
    cu_seqlens: npt.ArrayLike | None = None, normalize_qk: bool = False, chunk_size: int = 64,
    return_state: Literal[False] = False,
) -> jax.Array: ...
@overload
def linear_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, *, decay: ArrayLike | None = None,
    beta: ArrayLike | None = None, scale: float | None = None, initial_state: ArrayLike | None = None,
    cu_seqlens: npt.ArrayLike | None = None, normalize_qk: bool = False, chunk_size: int = 64,
    return_state: Literal[True],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def linear_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, *, decay: ArrayLike | None = None,
    beta: ArrayLike | None = None, scale: float | None = None, initial_state: ArrayLike | None = None,
    cu_seqlens: npt.ArrayLike | None = None, normalize_qk: bool = False, chunk_size: int = 64,
    return_state: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
def linear_attention_step(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, state: ArrayLike, *, decay: ArrayLike | None = None,
    beta: ArrayLike | None = None, scale: float | None = None, normalize_qk: bool = False,
    state_indices: npt.ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def short_convolution(
    x: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None, *,
    activation: Literal['silu'] | None = None, cu_seqlens: npt.ArrayLike | None = None,
    initial_state: ArrayLike | None = None, return_state: Literal[False] = False,
) -> jax.Array: ...
@overload
def short_convolution(
    x: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None, *,
    activation: Literal['silu'] | None = None, cu_seqlens: npt.ArrayLike | None = None,
    initial_state: ArrayLike | None = None, return_state: Literal[True],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def short_convolution(
    x: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None, *,
    activation: Literal['silu'] | None = None, cu_seqlens: npt.ArrayLike | None = None,
    initial_state: ArrayLike | None = None, return_state: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
def short_convolution_step(
    x: ArrayLike, weight: ArrayLike, state: ArrayLike, bias: ArrayLike | None = None, *,
    activation: Literal['silu'] | None = None, state_indices: npt.ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]: ...
def chunk_local_cumsum(
    g: ArrayLike, chunk_size: int, reverse: bool = False, softmax_scale: float | None = None,
    cu_seqlens: npt.ArrayLike | None = None, head_first: bool = False,
    output_dtype: npt.DTypeLike | None = None,
) -> jax.Array: ...
def chunk_local_cumsum_scalar(
    g: ArrayLike, chunk_size: int, reverse: bool = False, softmax_scale: float | None = None,
    head_first: bool = False, output_dtype: npt.DTypeLike | None = None, *,
    cu_seqlens: npt.ArrayLike | None = None,
) -> jax.Array: ...
def chunk_local_cumsum_vector(
    g: ArrayLike, chunk_size: int, reverse: bool = False, softmax_scale: float | None = None,
    head_first: bool = False, output_dtype: npt.DTypeLike | None = None, *,
    cu_seqlens: npt.ArrayLike | None = None,
) -> jax.Array: ...
def chunk_global_cumsum(
    s: ArrayLike, reverse: bool = False, cu_seqlens: npt.ArrayLike | None = None,
    softmax_scale: float | None = None, head_first: bool = False, output_dtype: npt.DTypeLike | None = None,
) -> jax.Array: ...
def chunk_global_cumsum_scalar(
    s: ArrayLike, reverse: bool = False, cu_seqlens: npt.ArrayLike | None = None,
    softmax_scale: float | None = None, head_first: bool = False, output_dtype: npt.DTypeLike | None = None,
) -> jax.Array: ...
def chunk_global_cumsum_vector(
    s: ArrayLike, reverse: bool = False, cu_seqlens: npt.ArrayLike | None = None,
    softmax_scale: float | None = None, head_first: bool = False, output_dtype: npt.DTypeLike | None = None,
) -> jax.Array: ...
