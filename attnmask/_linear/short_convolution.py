"""The causal convolutions by channel that models have before linear attention.

With the usual width ``W = 4``, a token's result is made of its own number and the three before it::

    out[t] = bias + weight[0] x[t - 3] + weight[1] x[t - 2] + weight[2] x[t - 1] + weight[3] x[t]

for each channel by itself. What comes before a sequence is its state, ``W - 1`` tokens with the oldest first, or zeros.
A token reaches ``W`` results of its own sequence, and no other.
"""

from typing import Any

from attnmask._faces.arrays import numpy_face
from attnmask._faces.linear import SHORT_CONVOLUTION, SHORT_CONVOLUTION_STEP, SHORT_CONVOLUTION_VJP


@numpy_face(SHORT_CONVOLUTION)
def short_convolution(*args: Any, **given: Any) -> Any:
    """Convolve each channel with the last W tokens of its sequence.

    Parameters
    ----------
    <parameters>

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


@numpy_face(SHORT_CONVOLUTION_VJP)
def short_convolution_vjp(*args: Any, **given: Any) -> Any:
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


@numpy_face(SHORT_CONVOLUTION_STEP)
def short_convolution_step(*args: Any, **given: Any) -> Any:
    """Convolve one token of each sequence, and update the states in place.

    Parameters
    ----------
    <parameters>

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
