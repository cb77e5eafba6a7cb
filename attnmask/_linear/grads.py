"""The gradients of linear attention and short convolutions, whose types a program can read as they stand here."""

from typing import NamedTuple, Protocol, TypeVar

from numpy.typing import ArrayLike

from attnmask._common.arguments import fields_in_a_line
from attnmask._common.types import Array


class LinearAttentionGrads(NamedTuple):
    """The gradients of `linear_attention`, each in the shape and dtype of its argument; None for what was not given.

    Examples
    --------
    >>> import attnmask
    >>> attnmask.LinearAttentionGrads._fields
    ('query', 'key', 'value', 'decay', 'beta', 'initial_state')
    """

    query: Array
    key: Array
    value: Array
    decay: Array | None
    beta: Array | None
    initial_state: Array | None

    def __repr__(self) -> str:
        return fields_in_a_line(self)


class ShortConvolutionGrads(NamedTuple):
    """The gradients of `short_convolution`, each in the shape and the type of the argument that it is named after.

    Parameters
    ----------
    x, weight : ndarray
    bias, initial_state : ndarray or None
        None for what was not given.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> x = np.ones((1, 3, 1), np.float32)
    >>> out, vjp = attnmask.short_convolution_vjp(x, np.ones((1, 2), np.float32))
    >>> grads = vjp(np.ones_like(out))
    >>> grads.weight, grads.bias
    (array([[2., 3.]], dtype=float32), None)
    """

    x: Array
    weight: Array
    bias: Array | None = None
    initial_state: Array | None = None

    def __repr__(self) -> str:
        return fields_in_a_line(self)


_Grads = TypeVar("_Grads", covariant=True)


class Vjp(Protocol[_Grads]):
    def __call__(self, dout: ArrayLike) -> _Grads: ...


class VjpWithState(Protocol[_Grads]):
    def __call__(self, dout: ArrayLike, dstate: ArrayLike | None) -> _Grads: ...
