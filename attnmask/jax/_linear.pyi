"""Written by .ci/make_signatures.py."""
# fmt: off

from typing import Literal, overload

import jax
import numpy.typing as npt
from jax.typing import ArrayLike

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
