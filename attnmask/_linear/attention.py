"""Linear attention: one recurrence for a family of models, computed in chunks.

For each sequence and value head, with ``S = initial_state`` or 0, for each token::

    S ← exp(decay) S                     a number, or one for each row of S
    u ← value                            without beta
    u ← beta (value - Sᵀ key)            with beta: the delta rule
    S ← S + key ⊗ u
    out = scale · Sᵀ query
"""

from typing import Any

from attnmask._faces.arrays import numpy_face
from attnmask._faces.linear import LINEAR_ATTENTION, LINEAR_ATTENTION_STEP, LINEAR_ATTENTION_VJP


@numpy_face(LINEAR_ATTENTION)
def linear_attention(*args: Any, **given: Any) -> Any:
    """Linear attention with decays and the delta rule, in O(T) time.

    Parameters
    ----------
    <parameters>

    Returns
    -------
    out : ndarray, shape [B, T, H, V]
        In the dtype of `query`.
    state : ndarray, shape [N, H, K, V]
        If `return_state`. float32; float64 for float64.

    See Also
    --------
    linear_attention_vjp : with gradients.
    linear_attention_step : one token, with the states updated in place.

    Examples
    --------
    Keys that are orthogonal are a memory, from which a query reads the value of its key:

    >>> import numpy as np, attnmask
    >>> key = np.eye(3).reshape(1, 3, 1, 3)
    >>> value = np.array([10.0, 20.0, 30.0]).reshape(1, 3, 1, 1)
    >>> query = key[:, [0, 0, 1]]
    >>> attnmask.linear_attention(query, key, value, scale=1.0).ravel()
    array([10., 10., 20.])

    A decay of log(1/2) per token halves what is older:

    >>> attnmask.linear_attention(query, key, value, scale=1.0, decay=np.log([0.5])).ravel()
    array([10.,  5., 10.])

    With the delta rule a value replaces what its key led to, and is not added to it:

    >>> same = key[:, [0, 0, 0]]
    >>> attnmask.linear_attention(same, same, value, scale=1.0).ravel()
    array([10., 30., 60.])
    >>> attnmask.linear_attention(same, same, value, scale=1.0, beta=np.ones((1, 3, 1))).ravel()
    array([10., 20., 30.])

    The state goes on where a sequence was cut:

    >>> first, state = attnmask.linear_attention(
    ...     query[:, :2], key[:, :2], value[:, :2], scale=1.0, return_state=True
    ... )
    >>> attnmask.linear_attention(
    ...     query[:, 2:], key[:, 2:], value[:, 2:], scale=1.0, initial_state=state
    ... ).ravel()
    array([20.])
    """


@numpy_face(LINEAR_ATTENTION_VJP)
def linear_attention_vjp(*args: Any, **given: Any) -> Any:
    """`linear_attention` and its gradients.

    Chunks are computed again for the gradients. What is kept is the arguments, not copied, and one state per chunk:
    leave the arguments as they are while `vjp` is of use.

    Parameters
    ----------
    <parameters>

    Returns
    -------
    out : ndarray, or tuple of two if `return_state`
        The results of `linear_attention`.
    vjp : callable
        ``vjp(dout)``, or with `return_state` also ``vjp(dout, dstate)``, takes the gradients of the results and returns
        `LinearAttentionGrads`. It may be called any number of times. A decay of shape [H] gets the sum over tokens.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> query = key = value = np.ones((1, 3, 1, 1))
    >>> out, vjp = attnmask.linear_attention_vjp(query, key, value, decay=np.zeros(1))
    >>> out.ravel()
    array([1., 2., 3.])
    >>> grads = vjp(np.ones_like(out))
    >>> grads.value.ravel()  # each value is read by its own and all later queries
    array([3., 2., 1.])
    >>> grads.decay
    array([4.])
    """


@numpy_face(LINEAR_ATTENTION_STEP)
def linear_attention_step(*args: Any, **given: Any) -> Any:
    """Linear attention of one token per batch row, with the states updated in place.

    The result of a row is the same bits whatever it is computed with.

    Parameters
    ----------
    <parameters>

    Returns
    -------
    ndarray, shape [B, H, V]
        In the dtype of `query`.

    See Also
    --------
    linear_attention : many tokens, such as those of a prompt.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> state = np.zeros((1, 1, 2, 1), np.float32)
    >>> key = np.array([[[1, 0]]], np.float32)
    >>> for value in (10, 20):
    ...     out = attnmask.linear_attention_step(
    ...         key, key, np.full((1, 1, 1), value, np.float32), state, scale=1.0
    ...     )
    >>> out.ravel(), state.ravel()
    (array([30.], dtype=float32), array([30.,  0.], dtype=float32))
    """
