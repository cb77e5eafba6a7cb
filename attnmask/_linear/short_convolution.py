"""The causal convolutions by channel that models have before linear attention.

With the usual width ``W = 4``, a token's result is made of its own number and the three before it::

    out[t] = bias + weight[0] x[t - 3] + weight[1] x[t - 2] + weight[2] x[t - 1] + weight[3] x[t]

for each channel by itself. What comes before a sequence is its state, ``W - 1`` tokens with the oldest first, or zeros.
A token reaches ``W`` results of its own sequence, and no other.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, Unpack, overload

from numpy.typing import ArrayLike

from attnmask._common.arguments import as_array, check_apart, flag, one_of
from attnmask._common.loading import _core
from attnmask._common.types import Arguments, Array
from attnmask._linear.grads import ShortConvolutionGrads, Vjp, VjpWithState
from attnmask._linear.options import Activation, ConvolutionInto

__all__ = ["ShortConvolutionGrads", "short_convolution", "short_convolution_step", "short_convolution_vjp"]


_PROBLEM = ("x", "weight", "bias", "silu", "cu_seqlens", "initial_state")  # in the order of the core
_Vjp: TypeAlias = Vjp[ShortConvolutionGrads]
_VjpWithState: TypeAlias = VjpWithState[ShortConvolutionGrads]


def is_silu(activation: object) -> bool:
    one_of(activation, "activation", (None, "silu"))
    return activation is not None


@overload
def short_convolution(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    **more: Unpack[ConvolutionInto[Literal[False]]],
) -> Array: ...
@overload
def short_convolution(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    **more: Unpack[ConvolutionInto[Literal[True]]],
) -> tuple[Array, Array]: ...
@overload
def short_convolution(
    x: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None, **more: Unpack[ConvolutionInto[bool]]
) -> Array | tuple[Array, Array]: ...
def short_convolution(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: Activation = None,
    cu_seqlens: ArrayLike | None = None,
    initial_state: ArrayLike | None = None,
    return_state: bool = False,
    out: Array | None = None,
) -> Array | tuple[Array, Array]:
    """Convolve each channel with the last W tokens of its sequence.

    Parameters
    ----------
    x : array_like, shape [B, T, C]
        float16, bfloat16, float32 or float64, read in place whatever its strides. Sums are float32, or float64 for
        float64.
    weight : array_like, shape [C, W]
        Of the type of `x`, or float32. The last one is that of the token itself.
    bias : array_like, shape [C], optional
        Of the type of `x`, or float32.
    activation : {None, "silu"}
        "silu" makes a result z into ``z / (1 + exp(-z))``.
    cu_seqlens : array_like of integers, shape [N + 1], optional
        The batch is one row of N packed sequences. From 0 to T, never decreasing.
    initial_state : array_like, shape [N, C, W - 1], optional
        What comes before each sequence (each batch row, without `cu_seqlens`), the oldest first; of the type of `x`.
        Zeros if not given.
    return_state : bool
        Return the state at the end of each sequence as well: its last W - 1 tokens, and those of `initial_state` if
        it is shorter.
    out : ndarray, optional
        Takes the result, and is returned. Of the shape and type of `x`, sharing no memory with the inputs.

    Returns
    -------
    out : ndarray, shape [B, T, C]
        Of the type of `x`.
    state : ndarray, shape [N, C, W - 1]
        Only with `return_state`.

    See Also
    --------
    short_convolution_step : one token of each sequence, with the state updated in place.
    short_convolution_vjp : with gradients.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> x = np.arange(1.0, 6).reshape(1, 5, 1)
    >>> weight = np.array([[100.0, 10, 1]])
    >>> attnmask.short_convolution(x, weight).ravel()
    array([  1.,  12., 123., 234., 345.])

    Packed sequences do not see each other:

    >>> attnmask.short_convolution(x, weight, cu_seqlens=[0, 2, 5]).ravel()
    array([  1.,  12.,   3.,  34., 345.])

    A long sequence in two parts:

    >>> first, state = attnmask.short_convolution(x[:, :3], weight, return_state=True)
    >>> attnmask.short_convolution(x[:, 3:], weight, initial_state=state).ravel()
    array([234., 345.])
    """
    return _core.short_convolution(
        x, weight, bias, is_silu(activation), cu_seqlens, initial_state, return_state, out
    )


@overload
def short_convolution_vjp(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    **more: Unpack[ConvolutionInto[Literal[False]]],
) -> tuple[Array, _Vjp]: ...
@overload
def short_convolution_vjp(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    **more: Unpack[ConvolutionInto[Literal[True]]],
) -> tuple[tuple[Array, Array], _VjpWithState]: ...
@overload
def short_convolution_vjp(
    x: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None, **more: Unpack[ConvolutionInto[bool]]
) -> tuple[Array | tuple[Array, Array], _Vjp | _VjpWithState]: ...
def short_convolution_vjp(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    activation: Activation = None,
    cu_seqlens: ArrayLike | None = None,
    initial_state: ArrayLike | None = None,
    return_state: bool = False,
    out: Array | None = None,
) -> tuple[Array | tuple[Array, Array], _Vjp | _VjpWithState]:
    """`short_convolution` and its gradients.

    Parameters
    ----------
    x, weight, bias, activation, cu_seqlens, initial_state, return_state, out
        As of `short_convolution`. Do not change arrays before the gradients are computed: they are not copied.

    Returns
    -------
    out : ndarray, or a pair of ndarrays with `return_state`
    vjp : callable
        Takes the gradient of `out`, and with `return_state` that of the state (None for zeros); returns
        `ShortConvolutionGrads`. The gradients of weights and bias are sums over all tokens, in an order that depends
        on shapes alone.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> x, weight = np.ones((1, 4, 1)), np.array([[100.0, 10, 1]])
    >>> out, vjp = attnmask.short_convolution_vjp(x, weight)
    >>> grads = vjp(np.ones_like(x))
    >>> grads.x.ravel(), grads.weight
    (array([111., 111.,  11.,   1.]), array([[2., 3., 4.]]))
    """
    silu, with_state = is_silu(activation), flag(return_state, "return_state")
    arrays = {"x": x, "weight": weight, "bias": bias}
    arrays |= {"initial_state": initial_state, "cu_seqlens": cu_seqlens}
    check_apart(out, arrays.items())
    given: Arguments = {name: x if x is None else as_array(x, name) for name, x in arrays.items()}
    if cu_seqlens is not None:
        given["cu_seqlens"] = given["cu_seqlens"].copy()  # vjp may be called after it has changed
    core: Any = _core
    problem = [(given | {"silu": silu})[name] for name in _PROBLEM]
    result = core.short_convolution(*problem, with_state, out)

    def vjp(dout: ArrayLike, dstate: ArrayLike | None = None) -> ShortConvolutionGrads:
        if dstate is not None and not with_state:
            raise ValueError("dstate must be None without return_state=True")
        return ShortConvolutionGrads(*core.short_convolution_backward(*problem, dout, dstate))

    return result, vjp


def short_convolution_step(
    x: ArrayLike,
    weight: ArrayLike,
    state: Array,
    bias: ArrayLike | None = None,
    *,
    activation: Activation = None,
    state_indices: ArrayLike | None = None,
    out: Array | None = None,
) -> Array:
    """Convolve one token of each sequence, and update the states in place.

    Parameters
    ----------
    x : array_like, shape [B, C]
    weight : array_like, shape [C, W]
    state : ndarray, shape [slots, C, W - 1]
        The last W - 1 tokens of each sequence, the oldest first, of the type of `x`. It is written to: the oldest
        token goes, and `x` comes in. Without `state_indices` there are B slots, one for each row.
    bias : array_like, shape [C], optional
    activation : {None, "silu"}
    state_indices : array_like of integers, shape [B], optional
        The slot of each row; two rows may not share one. -1 leaves the row out, and its result is 0.
    out : ndarray, optional
        Takes the result, and is returned.

    Returns
    -------
    ndarray, shape [B, C]
        The bits that `short_convolution` gives for the same tokens, whatever the batch.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> weight, state = np.array([[100.0, 10, 1]]), np.zeros((1, 1, 2))
    >>> [attnmask.short_convolution_step([[token]], weight, state).item() for token in (1.0, 2.0, 3.0)]
    [1.0, 12.0, 123.0]
    >>> state
    array([[[2., 3.]]])
    """
    return _core.short_convolution_step(x, weight, state, bias, is_silu(activation), state_indices, out)
