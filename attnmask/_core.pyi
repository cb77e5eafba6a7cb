"""The C core: every argument by position, documented where the package calls it."""

from collections.abc import Callable
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

def attention_mask_to_qkv_cu_seqlens(
    attention_mask: ArrayLike, reduce_heads: str, out_dtype: DTypeLike, /
) -> tuple[NDArray[Any], NDArray[Any]]: ...
def built_in(function: Callable[[Any], Any], /) -> Callable[[Any], Any]: ...
def cdiv(a: Any, b: Any, /) -> Any: ...
def checked_starts(cu_seqlens: ArrayLike, name: str, /) -> NDArray[np.int64]: ...
def chunk_global_cumsum(
    s: ArrayLike,
    reverse: bool,
    cu_seqlens: ArrayLike | None,
    softmax_scale: float | None,
    head_first: bool,
    output_dtype: DTypeLike | None,
    out: NDArray[Any] | None,
    /,
) -> NDArray[Any]: ...
def chunk_local_cumsum(
    g: ArrayLike,
    chunk_size: int,
    reverse: bool,
    softmax_scale: float | None,
    cu_seqlens: ArrayLike | None,
    head_first: bool,
    output_dtype: DTypeLike | None,
    out: NDArray[Any] | None,
    /,
) -> NDArray[Any]: ...
def config() -> dict[str, Any]: ...
def cu_seqlens_to_mask(
    cu_seqlens: ArrayLike, max_len: SupportsIndex, dtype: DTypeLike, out: NDArray[Any] | None, /
) -> NDArray[Any]: ...
def cu_seqlens_to_pairs(cu_seqlens: ArrayLike, /) -> NDArray[Any]: ...
def dropout_keep_mask(
    seed: int, prob: float, shape: tuple[int, int, int, int], out: NDArray[np.bool_] | None, /
) -> NDArray[np.bool_]: ...
def flash_backward(
    problem: tuple[Any, ...],
    dout: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    dlse: ArrayLike | None,
    wanted: tuple[str, ...],
    /,
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], dict[str, NDArray[Any]]]: ...
def term_names() -> tuple[str, ...]: ...
def attention_strategy(numbers: dict[str, Any], all: int, most: int, /) -> dict[str, Any]: ...
def attention_schedule(
    problem: tuple[Any, ...],
    threads: int,
    /,
) -> dict[str, Any]: ...
def backward_schedule(
    problem: tuple[Any, ...],
    threads: int,
    /,
) -> dict[str, Any]: ...
def flash_usual(names: tuple[str, ...], args: tuple[Any, ...], given: dict[str, Any], /) -> Any: ...
def flash_usual_fwd(names: tuple[str, ...], args: tuple[Any, ...], given: dict[str, Any], /) -> Any: ...
def flash_usual_vjp(names: tuple[str, ...], args: tuple[Any, ...], given: dict[str, Any], /) -> Any: ...
def flash_kvcache(
    names: tuple[str, ...], defaults: tuple[Any, ...], args: tuple[Any, ...], given: dict[str, Any], /
) -> Any: ...
def write_kvcache(
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    key: ArrayLike,
    value: ArrayLike | None,
    k_scale: ArrayLike | None,
    v_scale: ArrayLike | None,
    slot_mapping: NDArray[Any],
    /,
) -> None: ...
def check_kvcache(
    names: tuple[str, ...], defaults: tuple[Any, ...], args: tuple[Any, ...], given: dict[str, Any], /
) -> None: ...
def flash_forward(
    problem: tuple[Any, ...],
    return_lse: bool,
    out: NDArray[Any] | None,
    /,
) -> tuple[NDArray[Any], NDArray[Any] | None]: ...
def flash_forward_vjp(
    problem: tuple[Any, ...],
    /,
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]: ...
def get_num_threads() -> int: ...
def int32_copy(array: ArrayLike, name: str, /) -> NDArray[Any]: ...
def check_mask(array: ArrayLike, name: str, /) -> None: ...
def kernel_table(name: str, /) -> tuple[int, int]: ...
def mask_to_segment_ids(
    mask: ArrayLike, per_head: bool, strict: bool, /
) -> tuple[NDArray[Any], NDArray[Any]]: ...
def check_linear_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    decay: ArrayLike | None,
    beta: ArrayLike | None,
    scale: float | None,
    initial_state: ArrayLike | None,
    cu_seqlens: ArrayLike | None,
    normalize_qk: bool,
    chunk_size: SupportsIndex,
    /,
) -> tuple[int, int]: ...
def check_linear_attention_step(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    state: NDArray[Any],
    decay: ArrayLike | None,
    beta: ArrayLike | None,
    scale: float | None,
    normalize_qk: bool,
    state_indices: ArrayLike | None,
    out: NDArray[Any] | None,
    /,
) -> None: ...
def check_short_convolution(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None,
    silu: bool,
    cu_seqlens: ArrayLike | None,
    initial_state: ArrayLike | None,
    return_state: bool,
    out: NDArray[Any] | None,
    /,
) -> None: ...
def check_short_convolution_step(
    x: ArrayLike,
    weight: ArrayLike,
    state: NDArray[Any],
    bias: ArrayLike | None,
    silu: bool,
    state_indices: ArrayLike | None,
    out: NDArray[Any] | None,
    /,
) -> None: ...
def linear_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    decay: ArrayLike | None,
    beta: ArrayLike | None,
    scale: float | None,
    initial_state: ArrayLike | None,
    cu_seqlens: ArrayLike | None,
    normalize_qk: bool,
    chunk_size: SupportsIndex,
    return_state: bool,
    out: NDArray[Any] | None,
    /,
) -> Any: ...
def linear_attention_step(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    state: NDArray[Any],
    decay: ArrayLike | None,
    beta: ArrayLike | None,
    scale: float | None,
    normalize_qk: bool,
    state_indices: ArrayLike | None,
    out: NDArray[Any] | None,
    /,
) -> NDArray[Any]: ...
def linear_backward(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    decay: ArrayLike | None,
    beta: ArrayLike | None,
    scale: float | None,
    initial_state: ArrayLike | None,
    cu_seqlens: ArrayLike | None,
    normalize_qk: bool,
    chunk_size: SupportsIndex,
    kept: NDArray[Any],
    dout: ArrayLike,
    dstate: ArrayLike | None,
    /,
) -> tuple[Any, ...]: ...
def linear_forward_vjp(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    decay: ArrayLike | None,
    beta: ArrayLike | None,
    scale: float | None,
    initial_state: ArrayLike | None,
    cu_seqlens: ArrayLike | None,
    normalize_qk: bool,
    chunk_size: SupportsIndex,
    out: NDArray[Any] | None,
    /,
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]: ...
def merge_attention_states(
    outs: tuple[Any, ...] | NDArray[Any], lses: tuple[Any, ...] | NDArray[Any], /
) -> tuple[NDArray[Any], NDArray[Any]]: ...
def merge_backward(
    outs: tuple[Any, ...] | NDArray[Any],
    lses: tuple[Any, ...] | NDArray[Any],
    dout: ArrayLike,
    dlse: ArrayLike | None,
    /,
) -> tuple[NDArray[Any], NDArray[Any]]: ...
def padding_segment_ids(attention_mask: ArrayLike, /) -> tuple[NDArray[Any], NDArray[Any]]: ...
def pairs_to_cu_seqlens(pairs: ArrayLike, /) -> NDArray[Any]: ...
def positions_from_segment_ids(segment_ids: ArrayLike, pad_value: SupportsIndex, /) -> NDArray[Any]: ...
def mask_any(
    shape: tuple[int, int, int, int], nodes: tuple[Any, ...], /
) -> tuple[NDArray[Any], NDArray[Any]]: ...
def mask_count(shape: tuple[int, int, int, int], nodes: tuple[Any, ...], /) -> NDArray[Any]: ...
def mask_prepare(shape: tuple[int, int, int, int], nodes: tuple[Any, ...], /) -> Any: ...
def mask_fill(
    shape: tuple[int, int, int, int],
    nodes: tuple[Any, ...],
    dtype: DTypeLike,
    live: Any,
    dead: Any,
    out: NDArray[Any] | None,
    /,
) -> NDArray[Any]: ...
def mask_grid(
    shape: tuple[int, int, int, int],
    nodes: tuple[Any, ...],
    batch: int,
    head: int,
    q_cell: int,
    k_cell: int,
    /,
) -> NDArray[Any]: ...
def prepare_chunk_indices(cu_seqlens: ArrayLike, chunk_size: int, /) -> NDArray[Any]: ...
def prepare_chunk_offsets(cu_seqlens: ArrayLike, chunk_size: int, /) -> NDArray[Any]: ...
def prepare_cu_seqlens_from_mask(mask: ArrayLike, out_dtype: DTypeLike, /) -> NDArray[Any]: ...
def prepare_lens(cu_seqlens: ArrayLike, /) -> NDArray[Any]: ...
def prepare_lens_from_mask(mask: ArrayLike, /) -> NDArray[Any]: ...
def prepare_position_ids(cu_seqlens: ArrayLike, /) -> NDArray[Any]: ...
def prepare_sequence_ids(cu_seqlens: ArrayLike, /) -> NDArray[Any]: ...
def prepare_token_indices(cu_seqlens: ArrayLike, /) -> NDArray[Any]: ...
def qkv_cu_seqlens_to_attention_mask(
    cu_seqlens_q: ArrayLike,
    max_q_len: SupportsIndex,
    cu_seqlens_kv: ArrayLike,
    max_kv_len: SupportsIndex,
    dtype: DTypeLike,
    out: NDArray[Any] | None,
    /,
) -> NDArray[Any]: ...
def qkv_cu_seqlens_to_qkv_masks(
    cu_seqlens_q: ArrayLike,
    max_q_len: SupportsIndex,
    cu_seqlens_kv: ArrayLike,
    max_kv_len: SupportsIndex,
    dtype: DTypeLike,
    /,
) -> tuple[NDArray[Any], NDArray[Any]]: ...
def qkv_masks_to_cu_seqlens(
    q_mask: ArrayLike, kv_mask: ArrayLike | None, out_dtype: DTypeLike, /
) -> tuple[NDArray[Any], NDArray[Any]]: ...
def segment_ids(ids: ArrayLike, name: str, out: NDArray[Any] | None, /) -> NDArray[Any]: ...
def segment_ids_to_cu_seqlens(
    segment_ids: ArrayLike, out_dtype: DTypeLike, max_segments: SupportsIndex | None, /
) -> NDArray[Any]: ...
def segment_lens(ids: NDArray[Any], /) -> NDArray[Any]: ...
def segment_ids_to_token_mask(ids: NDArray[Any], dtype: DTypeLike, /) -> NDArray[Any]: ...
def short_convolution(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None,
    silu: bool,
    cu_seqlens: ArrayLike | None,
    initial_state: ArrayLike | None,
    return_state: bool,
    out: NDArray[Any] | None,
    /,
) -> NDArray[Any] | tuple[NDArray[Any], NDArray[Any]]: ...
def short_convolution_backward(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None,
    silu: bool,
    cu_seqlens: ArrayLike | None,
    initial_state: ArrayLike | None,
    dout: ArrayLike,
    dstate: ArrayLike | None,
    /,
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None, NDArray[Any] | None]: ...
def short_convolution_step(
    x: ArrayLike,
    weight: ArrayLike,
    state: NDArray[Any],
    bias: ArrayLike | None,
    silu: bool,
    state_indices: ArrayLike | None,
    out: NDArray[Any] | None,
    /,
) -> NDArray[Any]: ...
def set_num_threads(n: int, /) -> None: ...
def tensor_attention(exchange: object, other: Callable[..., Any], /) -> Callable[..., Any]: ...
def use(main_thread: int | None, /, **helpers: Callable[..., Any]) -> None: ...
def use_isa(name: str, /) -> str: ...
def xla_handlers() -> tuple[Any, ...]: ...
