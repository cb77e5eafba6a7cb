"""The C core: every argument by position, documented where the package calls it."""

from typing import Any, SupportsIndex, TypeVar

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from attnmask._attention.problem import Problem
from attnmask._common.types import AnyFunction, Arguments, Array
from attnmask._masks.program import Program

_Function = TypeVar("_Function", bound=AnyFunction)

def attention_mask_to_qkv_cu_seqlens(
    attention_mask: ArrayLike, reduce_heads: str, out_dtype: DTypeLike, /
) -> tuple[Array, Array]: ...
def built_in(function: _Function, /) -> _Function: ...
def cdiv(a: ArrayLike, b: ArrayLike, /) -> Array: ...
def checked_starts(cu_seqlens: ArrayLike, name: str, /) -> NDArray[np.int64]: ...
def chunk_global_cumsum(
    s: ArrayLike,
    reverse: bool,
    cu_seqlens: ArrayLike | None,
    softmax_scale: float | None,
    head_first: bool,
    output_dtype: DTypeLike | None,
    out: Array | None,
    /,
) -> Array: ...
def chunk_local_cumsum(
    g: ArrayLike,
    chunk_size: int,
    reverse: bool,
    softmax_scale: float | None,
    cu_seqlens: ArrayLike | None,
    head_first: bool,
    output_dtype: DTypeLike | None,
    out: Array | None,
    /,
) -> Array: ...
def config() -> Arguments: ...
def cu_seqlens_to_mask(
    cu_seqlens: ArrayLike, max_len: SupportsIndex, dtype: DTypeLike, out: Array | None, /
) -> Array: ...
def cu_seqlens_to_pairs(cu_seqlens: ArrayLike, /) -> Array: ...
def dropout_keep_mask(
    seed: int, prob: float, shape: tuple[int, int, int, int], out: NDArray[np.bool_] | None, /
) -> NDArray[np.bool_]: ...
def flash_backward(
    problem: Problem,
    dout: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
    dlse: ArrayLike | None,
    wanted: tuple[str, ...],
    /,
) -> tuple[Array, Array, Array, dict[str, Array]]: ...
def term_names() -> list[str]: ...
def attention_strategy(numbers: Arguments, all: int, most: int, /) -> Arguments: ...
def attention_schedule(problem: Problem, threads: int, /) -> Arguments: ...
def backward_schedule(problem: Problem, threads: int, /) -> Arguments: ...
def flash_usual(names: tuple[str, ...], args: tuple[object, ...], given: Arguments, /) -> Any: ...
def flash_usual_fwd(names: tuple[str, ...], args: tuple[object, ...], given: Arguments, /) -> Any: ...
def flash_usual_vjp(names: tuple[str, ...], args: tuple[object, ...], given: Arguments, /) -> Any: ...
def flash_kvcache(
    names: tuple[str, ...], defaults: tuple[object, ...], args: tuple[object, ...], given: Arguments, /
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
def check_write_kvcache(
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
    names: tuple[str, ...], defaults: tuple[object, ...], args: tuple[object, ...], given: Arguments, /
) -> None: ...
def flash_forward(problem: Problem, return_lse: bool, out: Array | None, /) -> tuple[Array, Array | None]: ...
def flash_forward_vjp(problem: Problem, /) -> tuple[Array, Array, Array]: ...
def get_num_threads() -> int: ...
def int32_copy(array: ArrayLike, name: str, /) -> Array: ...
def check_mask(array: ArrayLike, name: str, /) -> None: ...
def best_isa(highest: str, intel: bool, /) -> str: ...
def chosen_kernels(level: str, query: str, key: str, /) -> dict[str, str | None]: ...
def kernel_table(name: str, /) -> tuple[int, int]: ...
def mask_to_segment_ids(mask: ArrayLike, per_head: bool, strict: bool, /) -> tuple[Array, Array]: ...
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
    state: Array,
    decay: ArrayLike | None,
    beta: ArrayLike | None,
    scale: float | None,
    normalize_qk: bool,
    state_indices: ArrayLike | None,
    out: Array | None,
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
    out: Array | None,
    /,
) -> None: ...
def check_short_convolution_step(
    x: ArrayLike,
    weight: ArrayLike,
    state: Array,
    bias: ArrayLike | None,
    silu: bool,
    state_indices: ArrayLike | None,
    out: Array | None,
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
    out: Array | None,
    /,
) -> Array | tuple[Array, Array]: ...
def linear_attention_step(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    state: Array,
    decay: ArrayLike | None,
    beta: ArrayLike | None,
    scale: float | None,
    normalize_qk: bool,
    state_indices: ArrayLike | None,
    out: Array | None,
    /,
) -> Array: ...
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
    kept: Array,
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
    out: Array | None,
    /,
) -> tuple[Array, Array, Array]: ...
def merge_attention_states(
    outs: tuple[ArrayLike, ...] | Array, lses: tuple[ArrayLike, ...] | Array, /
) -> tuple[Array, Array]: ...
def merge_backward(
    outs: tuple[ArrayLike, ...] | Array,
    lses: tuple[ArrayLike, ...] | Array,
    dout: ArrayLike,
    dlse: ArrayLike | None,
    /,
) -> tuple[Array, Array]: ...
def padding_segment_ids(attention_mask: ArrayLike, /) -> tuple[Array, Array]: ...
def pairs_to_cu_seqlens(pairs: ArrayLike, /) -> Array: ...
def positions_from_segment_ids(segment_ids: ArrayLike, pad_value: SupportsIndex, /) -> Array: ...
def mask_any(shape: tuple[int, int, int, int], nodes: Program, /) -> tuple[Array, Array]: ...
def mask_count(shape: tuple[int, int, int, int], nodes: Program, /) -> Array: ...
def mask_nodes() -> list[str]: ...
def mask_prepare(shape: tuple[int, int, int, int], nodes: Program, /) -> Any: ...
def mask_fill(
    shape: tuple[int, int, int, int],
    nodes: Program,
    dtype: DTypeLike,
    live: object,
    dead: object,
    out: Array | None,
    /,
) -> Array: ...
def mask_grid(
    shape: tuple[int, int, int, int], nodes: Program, batch: int, head: int, q_cell: int, k_cell: int, /
) -> Array: ...
def prepare_chunk_indices(cu_seqlens: ArrayLike, chunk_size: int, /) -> Array: ...
def prepare_chunk_offsets(cu_seqlens: ArrayLike, chunk_size: int, /) -> Array: ...
def prepare_cu_seqlens_from_mask(mask: ArrayLike, out_dtype: DTypeLike, /) -> Array: ...
def prepare_lens(cu_seqlens: ArrayLike, /) -> Array: ...
def prepare_lens_from_mask(mask: ArrayLike, /) -> Array: ...
def prepare_position_ids(cu_seqlens: ArrayLike, /) -> Array: ...
def prepare_sequence_ids(cu_seqlens: ArrayLike, /) -> Array: ...
def prepare_token_indices(cu_seqlens: ArrayLike, /) -> Array: ...
def qkv_cu_seqlens_to_attention_mask(
    cu_seqlens_q: ArrayLike,
    max_q_len: SupportsIndex,
    cu_seqlens_kv: ArrayLike,
    max_kv_len: SupportsIndex,
    dtype: DTypeLike,
    out: Array | None,
    /,
) -> Array: ...
def qkv_cu_seqlens_to_qkv_masks(
    cu_seqlens_q: ArrayLike,
    max_q_len: SupportsIndex,
    cu_seqlens_kv: ArrayLike,
    max_kv_len: SupportsIndex,
    dtype: DTypeLike,
    /,
) -> tuple[Array, Array]: ...
def qkv_masks_to_cu_seqlens(
    q_mask: ArrayLike, kv_mask: ArrayLike | None, out_dtype: DTypeLike, /
) -> tuple[Array, Array]: ...
def quantize(x: Array, values: Array, scales: NDArray[np.float32], /) -> None: ...
def segment_ids(ids: ArrayLike, name: str, out: Array | None, /) -> Array: ...
def segment_ids_to_cu_seqlens(
    segment_ids: ArrayLike, out_dtype: DTypeLike, max_segments: SupportsIndex | None, /
) -> Array: ...
def segment_lens(ids: Array, /) -> Array: ...
def count_earlier_tokens(q_ids: NDArray[np.int32], /) -> NDArray[np.int32]: ...
def queries_among_keys(
    q_ids: NDArray[np.int32], kv_ids: NDArray[np.int32], last: bool, /
) -> NDArray[np.int32] | None: ...
def chunks_of_segments(
    q_ids: NDArray[np.int32],
    kv_ids: NDArray[np.int32] | None,
    size: SupportsIndex,
    shifts: NDArray[np.int64],
    /,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]: ...
def segment_ids_to_token_mask(ids: Array, dtype: DTypeLike, /) -> Array: ...
def short_convolution(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None,
    silu: bool,
    cu_seqlens: ArrayLike | None,
    initial_state: ArrayLike | None,
    return_state: bool,
    out: Array | None,
    /,
) -> Array | tuple[Array, Array]: ...
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
) -> tuple[Array, Array, Array | None, Array | None]: ...
def short_convolution_step(
    x: ArrayLike,
    weight: ArrayLike,
    state: Array,
    bias: ArrayLike | None,
    silu: bool,
    state_indices: ArrayLike | None,
    out: Array | None,
    /,
) -> Array: ...
def set_num_threads(n: int, /) -> None: ...
def tensor_attention(exchange: object, other: AnyFunction, /) -> AnyFunction: ...
def use(main_thread: int | None, /, **helpers: AnyFunction) -> None: ...
def use_isa(name: str, /) -> str: ...
def xla_handlers() -> dict[str, Any]: ...
def xla_words() -> dict[str, dict[str, int]]: ...
