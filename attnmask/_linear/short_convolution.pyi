"""Written by .ci/make_signatures.py."""
# fmt: off

from typing import Literal, overload

from numpy.typing import ArrayLike

from attnmask._common.types import Array
from attnmask._linear.grads import ShortConvolutionGrads, Vjp, VjpWithState

@overload
def short_convolution(
    x: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None, *,
    activation: Literal['silu'] | None = None, cu_seqlens: ArrayLike | None = None,
    initial_state: ArrayLike | None = None, return_state: Literal[False] = False, out: Array | None = None,
) -> Array: ...
@overload
def short_convolution(
    x: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None, *,
    activation: Literal['silu'] | None = None, cu_seqlens: ArrayLike | None = None,
    initial_state: ArrayLike | None = None, return_state: Literal[True], out: Array | None = None,
) -> tuple[Array, Array]: ...
@overload
def short_convolution(
    x: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None, *,
    activation: Literal['silu'] | None = None, cu_seqlens: ArrayLike | None = None,
    initial_state: ArrayLike | None = None, return_state: bool = False, out: Array | None = None,
) -> Array | tuple[Array, Array]: ...
@overload
def short_convolution_vjp(
    x: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None, *,
    activation: Literal['silu'] | None = None, cu_seqlens: ArrayLike | None = None,
    initial_state: ArrayLike | None = None, return_state: Literal[False] = False, out: Array | None = None,
) -> tuple[Array, Vjp[ShortConvolutionGrads]]: ...
@overload
def short_convolution_vjp(
    x: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None, *,
    activation: Literal['silu'] | None = None, cu_seqlens: ArrayLike | None = None,
    initial_state: ArrayLike | None = None, return_state: Literal[True], out: Array | None = None,
) -> tuple[tuple[Array, Array], VjpWithState[ShortConvolutionGrads]]: ...
@overload
def short_convolution_vjp(
    x: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None, *,
    activation: Literal['silu'] | None = None, cu_seqlens: ArrayLike | None = None,
    initial_state: ArrayLike | None = None, return_state: bool = False, out: Array | None = None,
) -> tuple[Array | tuple[Array, Array], Vjp[ShortConvolutionGrads] | VjpWithState[ShortConvolutionGrads]]: ...
def short_convolution_step(
    x: ArrayLike, weight: ArrayLike, state: Array, bias: ArrayLike | None = None, *,
    activation: Literal['silu'] | None = None, state_indices: ArrayLike | None = None,
    out: Array | None = None,
) -> Array: ...
