"""Linear attention: one recurrence for a family of models, computed in chunks.

For each sequence and value head, with ``S = initial_state`` or 0, for each token::

    S ← exp(decay) S                     a number, or one for each row of S
    u ← value                            without beta
    u ← beta (value - Sᵀ key)            with beta: the delta rule
    S ← S + key ⊗ u
    out = scale · Sᵀ query
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, Unpack, overload

from numpy.typing import ArrayLike

from attnmask._common.arguments import as_array, check_apart, flag
from attnmask._common.docstrings import with_parameters
from attnmask._common.loading import _core
from attnmask._common.types import Arguments, Array
from attnmask._linear.grads import LinearAttentionGrads, Vjp, VjpWithState
from attnmask._linear.options import PROBLEM, LinearInto

_Vjp: TypeAlias = Vjp[LinearAttentionGrads]
_VjpWithState: TypeAlias = VjpWithState[LinearAttentionGrads]
_PARAMETERS = """
    query, key : array_like, shape [B, T, Hk, K]
        Read in place, whatever their strides. float16, bfloat16, float32 or float64.
    value : array_like, shape [B, T, H, V]
        Same dtype as `query`. `H` is a multiple of `Hk`: value head `h` uses key head ``h // (H // Hk)``.
    decay : array_like, shape [H], [B, T, H] or [B, T, H, K], optional
        The logarithm of what the state is multiplied by before each token: per head, per token, or per token and row
        of the state. ``-inf`` forgets all that came before. float32, or the dtype of `query`.
    beta : array_like, shape [B, T, H], optional
        The strength of the delta rule. Without it the values themselves are added. float32, or the dtype of `query`.
    scale : float, optional
        Multiplied into the queries; ``1 / sqrt(K)`` if not given.
    initial_state : array_like, shape [N, H, K, V], optional
        The state before each of `N` sequences (the batch rows, without `cu_seqlens`). float32; float64 for float64.
    cu_seqlens : array_like of integers, shape [N + 1], optional
        The batch is one row of packed sequences. Each starts from its own state.
    normalize_qk : bool
        Divide each query and key by ``sqrt(sum(x**2) + 1e-6)`` first.
    chunk_size : int
        A hint, a power of two from 16 to 256. It changes rounding only.
"""


@overload
def linear_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, **more: Unpack[LinearInto[Literal[False]]]
) -> Array: ...
@overload
def linear_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, **more: Unpack[LinearInto[Literal[True]]]
) -> tuple[Array, Array]: ...
@overload
def linear_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, **more: Unpack[LinearInto[bool]]
) -> Array | tuple[Array, Array]: ...
@with_parameters(_PARAMETERS)
def linear_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    decay: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    scale: float | None = None,
    initial_state: ArrayLike | None = None,
    cu_seqlens: ArrayLike | None = None,
    normalize_qk: bool = False,
    chunk_size: int = 64,
    return_state: bool = False,
    out: Array | None = None,
) -> Array | tuple[Array, Array]:
    """Linear attention with decays and the delta rule, in O(T) time.

    Parameters
    ----------
    <parameters>
    return_state : bool
        Return the state after each sequence as well.
    out : ndarray, optional
        Takes the result, and is returned. Of the result's shape and dtype, sharing no memory with the inputs.

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
    return _core.linear_attention(
        query,
        key,
        value,
        decay,
        beta,
        scale,
        initial_state,
        cu_seqlens,
        normalize_qk,
        chunk_size,
        return_state,
        out,
    )


@overload
def linear_attention_vjp(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, **more: Unpack[LinearInto[Literal[False]]]
) -> tuple[Array, _Vjp]: ...
@overload
def linear_attention_vjp(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, **more: Unpack[LinearInto[Literal[True]]]
) -> tuple[tuple[Array, Array], _VjpWithState]: ...
@overload
def linear_attention_vjp(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, **more: Unpack[LinearInto[bool]]
) -> tuple[Array | tuple[Array, Array], _Vjp | _VjpWithState]: ...
@with_parameters(_PARAMETERS)
def linear_attention_vjp(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    decay: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    scale: float | None = None,
    initial_state: ArrayLike | None = None,
    cu_seqlens: ArrayLike | None = None,
    normalize_qk: bool = False,
    chunk_size: int = 64,
    return_state: bool = False,
    out: Array | None = None,
) -> tuple[Array | tuple[Array, Array], _Vjp | _VjpWithState]:
    """`linear_attention` and its gradients.

    Chunks are computed again for the gradients. What is kept is the arguments, not copied, and one state per chunk:
    leave the arguments as they are while `vjp` is of use.

    Parameters
    ----------
    <parameters>
    return_state : bool
        Return the state after each sequence as well.
    out : ndarray, optional
        Takes the result, and is returned.

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
    with_state = flag(return_state, "return_state")
    arrays = {"query": query, "key": key, "value": value, "decay": decay, "beta": beta}
    arrays |= {"initial_state": initial_state, "cu_seqlens": cu_seqlens}
    check_apart(out, arrays.items())
    given: Arguments = {name: x if x is None else as_array(x, name) for name, x in arrays.items()}
    if cu_seqlens is not None:
        given["cu_seqlens"] = given["cu_seqlens"].copy()  # vjp may be called after it has changed
    given |= {"scale": scale, "normalize_qk": normalize_qk, "chunk_size": chunk_size}
    core: Any = _core
    problem = [given[name] for name in PROBLEM]
    result, state, kept = core.linear_forward_vjp(*problem, out)

    def vjp(dout: ArrayLike, dstate: ArrayLike | None = None) -> LinearAttentionGrads:
        if dstate is not None and not with_state:
            raise ValueError("dstate must be None without return_state=True")
        return LinearAttentionGrads(*core.linear_backward(*problem, kept, dout, dstate))

    return (result, state) if with_state else result, vjp


def linear_attention_step(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    state: Array,
    *,
    decay: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    scale: float | None = None,
    normalize_qk: bool = False,
    state_indices: ArrayLike | None = None,
    out: Array | None = None,
) -> Array:
    """Linear attention of one token per batch row, with the states updated in place.

    The result of a row is the same bits whatever it is computed with.

    Parameters
    ----------
    query, key : array_like, shape [B, Hk, K]
        float16, bfloat16, float32 or float64.
    value : array_like, shape [B, H, V]
        Same dtype as `query`. Value head `h` uses key head ``h // (H // Hk)``.
    state : ndarray, shape [slots, H, K, V]
        Updated in place. float32; float64 for float64.
    decay : array_like, shape [H], [B, H] or [B, H, K], optional
        See `linear_attention`.
    beta : array_like, shape [B, H], optional
        See `linear_attention`.
    scale : float, optional
        ``1 / sqrt(K)`` if not given.
    normalize_qk : bool
        Divide each query and key by ``sqrt(sum(x**2) + 1e-6)`` first.
    state_indices : array_like of integers, shape [B], optional
        The slot of each batch row, each at most once. -1 leaves a row out: its result is 0. Without them there are as
        many slots as batch rows.
    out : ndarray, optional
        Takes the result, and is returned.

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
    return _core.linear_attention_step(
        query, key, value, state, decay, beta, scale, normalize_qk, state_indices, out
    )
