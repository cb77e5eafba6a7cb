"""Written by .ci/make_signatures.py."""
# fmt: off

from typing import Literal, overload

from numpy.typing import ArrayLike

from attnmask._common.types import Array
from attnmask._linear.grads import LinearAttentionGrads, Vjp, VjpWithState

@overload
def linear_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, *, decay: ArrayLike | None = None,
    beta: ArrayLike | None = None, scale: float | None = None, initial_state: ArrayLike | None = None,
    cu_seqlens: ArrayLike | None = None, normalize_qk: bool = False, chunk_size: int = 64,
    return_state: Literal[False] = False, out: Array | None = None,
) -> Array: ...
@overload
def linear_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, *, decay: ArrayLike | None = None,
    beta: ArrayLike | None = None, scale: float | None = None, initial_state: ArrayLike | None = None,
    cu_seqlens: ArrayLike | None = None, normalize_qk: bool = False, chunk_size: int = 64,
    return_state: Literal[True], out: Array | None = None,
) -> tuple[Array, Array]: ...
@overload
def linear_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, *, decay: ArrayLike | None = None,
    beta: ArrayLike | None = None, scale: float | None = None, initial_state: ArrayLike | None = None,
    cu_seqlens: ArrayLike | None = None, normalize_qk: bool = False, chunk_size: int = 64,
    return_state: bool = False, out: Array | None = None,
) -> Array | tuple[Array, Array]: ...
@overload
def linear_attention_vjp(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, *, decay: ArrayLike | None = None,
    beta: ArrayLike | None = None, scale: float | None = None, initial_state: ArrayLike | None = None,
    cu_seqlens: ArrayLike | None = None, normalize_qk: bool = False, chunk_size: int = 64,
    return_state: Literal[False] = False, out: Array | None = None,
) -> tuple[Array, Vjp[LinearAttentionGrads]]: ...
@overload
def linear_attention_vjp(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, *, decay: ArrayLike | None = None,
    beta: ArrayLike | None = None, scale: float | None = None, initial_state: ArrayLike | None = None,
    cu_seqlens: ArrayLike | None = None, normalize_qk: bool = False, chunk_size: int = 64,
    return_state: Literal[True], out: Array | None = None,
) -> tuple[tuple[Array, Array], VjpWithState[LinearAttentionGrads]]: ...
@overload
def linear_attention_vjp(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, *, decay: ArrayLike | None = None,
    beta: ArrayLike | None = None, scale: float | None = None, initial_state: ArrayLike | None = None,
    cu_seqlens: ArrayLike | None = None, normalize_qk: bool = False, chunk_size: int = 64,
    return_state: bool = False, out: Array | None = None,
) -> tuple[Array | tuple[Array, Array], Vjp[LinearAttentionGrads] | VjpWithState[LinearAttentionGrads]]: ...
def linear_attention_step(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, state: Array, *, decay: ArrayLike | None = None,
    beta: ArrayLike | None = None, scale: float | None = None, normalize_qk: bool = False,
    state_indices: ArrayLike | None = None, out: Array | None = None,
) -> Array: ...
