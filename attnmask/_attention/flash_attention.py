"""The public functions of attention. Type checkers read their signatures in the file beside this one, which
``.ci/make_signatures.py`` makes from the table of arguments.
"""

from collections.abc import Sequence  # noqa: F401 (of annotations, as the next ones)
from typing import Literal, SupportsIndex  # noqa: F401

from numpy.typing import ArrayLike, DTypeLike  # noqa: F401

from attnmask._attention import weights
from attnmask._attention.arguments import (
    ATTENTION_STATISTICS,
    ATTENTION_WEIGHTS,
    FLASH_ATTENTION,
    FLASH_ATTENTION_BWD,
    FLASH_ATTENTION_BWD_VJP,
    FLASH_ATTENTION_FWD,
    FLASH_ATTENTION_JVP,
    FLASH_ATTENTION_VJP,
    Diagonal,  # noqa: F401
)
from attnmask._attention.backward import Vjp, attend_backward, attend_with_vjp  # noqa: F401
from attnmask._attention.forward import attend
from attnmask._attention.hints import BwdParams, FwdParams, Precision  # noqa: F401
from attnmask._attention.jvp import attend_backward_vjp, attend_with_tangents
from attnmask._attention.problem import FlashAttentionGrads, FlashAttentionSecondGrads  # noqa: F401
from attnmask._attention.weights import AttentionStatistics, Queries, Statistic  # noqa: F401
from attnmask._common.loading import _core
from attnmask._common.types import Array  # noqa: F401
from attnmask._masks.info import MaskInfo  # noqa: F401

_NAMES, _NAMES_FWD = FLASH_ATTENTION.names, FLASH_ATTENTION_FWD.names


@FLASH_ATTENTION
def flash_attention(*args, **given):
    """Return softmax attention of queries over the keys that they may attend to.

    ::

        logit[q, k] = soft_cap(query[q] · key[k] · softmax_scale + biases[q, k])
        out[q] = Σ_k softmax_k(logit[q, k]) · value[k]      over allowed pairs
        soft_cap(x) = c · tanh(x / c)

    A pair (q, k) is allowed if every given condition allows it: `attention_mask`, equal segment ids, the same packed
    sequence, ``k <= q + causal_offset`` if `causal`, ``-left <= k - q - causal_offset <= right`` with a window. For 3
    queries and 5 keys, then for 5 queries and 3 keys::

        causal          causal,         window 1        window (1, 0),
                        bottom-right                    bottom-right

          k 0 1 2 3 4     k 0 1 2 3 4     k 0 1 2 3 4     k 0 1 2 3 4
        q 0 # . . . .   q 0 # # # . .   q 0 # # . . .   q 0 . # # . .
          1 # # . . .     1 # # # # .     1 # # # . .     1 . . # # .
          2 # # # . .     2 # # # # #     2 . # # # .     2 . . . # #

          k 0 1 2         k 0 1 2
        q 0 # . .       q 0 . . .
          1 # # .         1 . . .
          2 # # #         2 # . .
          3 # # #         3 # # .
          4 # # #         4 # # #

    Packed sequences, ``cum_seqlens_q = [0, 2, 5]`` and ``cum_seqlens_k = [0, 3, 5]``, count from their own starts::

        not causal      causal          causal,         causal_offset
                                        bottom-right    = [0, -1]

          k 0 1 2 3 4     k 0 1 2 3 4     k 0 1 2 3 4     k 0 1 2 3 4
        q 0 # # # . .   q 0 # . . . .   q 0 # # . . .   q 0 # . . . .
          1 # # # . .     1 # # . . .     1 # # # . .     1 # # . . .
          2 . . . # #     2 . . . # .     2 . . . . .     2 . . . . .
          3 . . . # #     3 . . . # #     3 . . . # .     3 . . . # .
          4 . . . # #     4 . . . # #     4 . . . # #     4 . . . # #

    A masked pair has no influence, whatever its numbers: a NaN in padding, in another sequence or in the future spreads
    nowhere. A logit of -inf masks its pair too. A fully masked query gets zeros.

    In place of B, `query`, `key` and `value` may have several batch axes, which results then have, too. Triangle
    attention is ``[B, N, T, H, D]`` with a bias ``[B, 1, H, T, T]``. Arrays with one entry per batch row have the same
    axes; a `MaskInfo` has one axis of all rows. These are copied: `query`, `key` or `value` if no single stride steps
    through their batch axes, for example after ``swapaxes``; a bias that broadcasts along a batch axis, but not along
    the last one; a mask array that broadcasts along some batch axes, but not all.

    Parameters
    ----------
    query : array_like, shape [B, Tq, H, D], or [Tq, H, D] with `cum_seqlens_q` or `cum_seqlens_k`
        float16, bfloat16, float32 or float64, like `key` and `value`. All are read in place, whatever their strides:
        pass ``[B, H, T, D]`` as ``query.swapaxes(1, 2)``.
    key : array_like, shape [B, Tk, Hkv, D], or [Tk, Hkv, D]
        H is a multiple of Hkv.
    value : array_like, shape [B, Tk, Hkv, Dv], or [Tk, Hkv, Dv]
        Dv may differ from D.
    attention_mask : array_like or MaskInfo, optional
        An array of bool or numbers that broadcasts to [B, H, Tq, Tk]; nonzero means allowed. (Pass numbers to add to
        logits, such as 0 and -inf, as `bias`; floats below 0 are refused here.) A `MaskInfo` must have Tq queries and
        Tk keys, and is never written out.
    bias : array_like of floats, broadcasts to [B, H, Tq, Tk], optional
        Added to the logits, before the soft cap.
    softmax_scale : float, optional
        Defaults to ``1 / sqrt(D)``.
    dropout_prob : float
        The probability that a weight is dropped, at least 0 and below 1. The others grow by ``1 / (1 - dropout_prob)``.
    causal : bool
        Hide keys that come after their query; `causal_offset` moves the diagonal.
    dropout_seed : int, optional
        Any integer, taken modulo 2**64; defaults to 0, under which every call drops the same weights.
        `dropout_keep_mask` returns what is kept.
    cum_seqlens_q, cum_seqlens_k : array_like of integers, shape [sequences + 1], optional
        Starts of packed sequences in the one batch row, from 0 to Tq (Tk), never decreasing. Sequence i of the queries
        attends to sequence i of the keys. One argument is enough if both sides are equally long.
    sliding_window : int or tuple of two, optional
        The number of keys to the left and to the right, or to either side; None means all.
    fwd_params, bwd_params : FwdParams, BwdParams, optional
        Hints for the sizes of blocks.
    logits_soft_cap : float, optional
        ``c`` above; 0 and infinity mean no cap.
    softmax_aux : array_like, shape [S], [1, S] or [H, S], optional
        Sinks: extra logits in each softmax, used as they are, without a value. All heads share [S] and [1, S]; one sink
        per head is [H, 1].
    normalize_output : bool
        If False, weights are ``exp(logit - the row's largest logit or sink)``.
    precision : {None, "default", "high", "highest"}, int from 0 to 2 or jax.lax.Precision
        Accepted without effect: float32 is always multiplied as float32.
    logits_dtype : dtype, optional
        Accepted without effect: logits are float32, or float64 for float64 inputs.
    q_segment_ids, kv_segment_ids : array_like of integers, shape [B, Tq] ([B, Tk]), optional
        Tokens attend to tokens with the same id; negative ids are padding. One argument is enough if both sides are
        equally long.
    causal_offset : int, array_like of integers, or "bottom-right"
        Moves the diagonal of `causal` and the window to the right: one number, one per batch row, or one per packed
        sequence. ``"bottom-right"`` aligns the last query with the last key: an offset of Tk - Tq.
    alibi_slopes : array_like, shape [H] or [B, H], optional
        ALiBi: adds ``-slope · |k - q - causal_offset|`` to each logit, before the soft cap. For packed sequences, [n,
        H] has one row per sequence, whose positions count from its own start.
    relative_bias : array_like, shape [H, L], optional
        Adds ``relative_bias[h, k - q - causal_offset - relative_low]``; its first and last column also apply to
        everything farther away.
    relative_low : int
        The distance that ``relative_bias[:, 0]`` applies to.
    grid_bias : array_like, shape [H, 2h - 1, 2w - 1], optional
        For tokens that are the points of a grid, h rows of w tokens, one row after the other, as in Swin: adds
        ``grid_bias[head, yk - yq + h - 1, xk - xq + w - 1]``. Positions count from the start of each batch row or
        packed sequence, those of queries from `causal_offset` on. There may be fewer tokens than points.
    return_lse : bool
        Also return the logsumexp of each row.
    out : ndarray, shape [B, Tq, H, Dv] or [Tq, H, Dv], optional
        Takes the result, and is returned. Same dtype as `query`; it must share no memory with the inputs. One stride
        must step through its batch axes.

    Returns
    -------
    out : ndarray, shape [B, Tq, H, Dv] or [Tq, H, Dv]
        Same dtype as `query`.
    lse : ndarray, shape [B, H, Tq] or [H, Tq]
        Only with `return_lse`: the natural logarithm of the sum of ``exp(logit)`` over allowed pairs and sinks; -inf if
        a row has neither. float32; float64 for float64 inputs.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> query, key = np.zeros((1, 3, 1, 8)), np.zeros((1, 5, 1, 8))  # all allowed keys weigh the same
    >>> value = np.arange(5.0).reshape(1, 5, 1, 1)
    >>> attnmask.flash_attention(query, key, value, causal=True, causal_offset=0).ravel()
    array([0. , 0.5, 1. ])
    >>> attnmask.flash_attention(query, key, value, causal=True, causal_offset="bottom-right").ravel()
    array([1. , 1.5, 2. ])
    >>> attnmask.flash_attention(query, key, value, sliding_window=(1, 0)).ravel()
    array([0. , 0.5, 1.5])

    Two batch axes, and a bias that the second one shares:

    >>> rows, bias = np.zeros((2, 4, 3, 1, 8)), np.zeros((2, 1, 1, 3, 3))
    >>> attnmask.flash_attention(rows, rows, rows, bias=bias).shape
    (2, 4, 3, 1, 8)

    Windows of 7 x 7 tokens with the relative position bias of Swin. Its table has a row for each distance, from the
    greatest to the least, and a column for each head:

    >>> window, table = np.zeros((2, 49, 3, 8)), np.ones((13 * 13, 3))
    >>> grid = table.T.reshape(3, 13, 13)[:, ::-1, ::-1]
    >>> attnmask.flash_attention(window, window, window, grid_bias=grid).shape
    (2, 49, 3, 8)

    Packed sequences have no batch axis:

    >>> packed = {"cum_seqlens_q": [0, 1, 3], "cum_seqlens_k": [0, 3, 5]}
    >>> out, lse = attnmask.flash_attention(query[0], key[0], value[0], **packed, return_lse=True)
    >>> out.ravel(), np.exp(lse).round(6)
    (array([1. , 3.5, 3.5]), array([[3., 2., 2.]]))
    """
    results = _core.flash_usual(_NAMES, args, given)
    if results is NotImplemented:
        given = FLASH_ATTENTION.bind(args, given)
        results = attend(given, given.pop("return_lse"))
    return results[0] if results[1] is None else results


@FLASH_ATTENTION_FWD
def flash_attention_fwd(*args, **given):
    """Return `flash_attention` and its logsumexp, which gradients and `merge_attention_states` need.

    Parameters
    ----------
    query, key, value, ...
        As in `flash_attention`, without `return_lse`.

    Returns
    -------
    out : ndarray, shape [B, Tq, H, Dv] or [Tq, H, Dv]
    lse : ndarray, shape [B, H, Tq] or [H, Tq]
        Both as `flash_attention` returns them with `return_lse`.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> x = np.zeros((1, 4, 1, 8), np.float32)
    >>> out, lse = attnmask.flash_attention_fwd(x, x, x, causal=True)
    >>> np.exp(lse).round(6)
    array([[[1., 2., 3., 4.]]], dtype=float32)
    """
    results = _core.flash_usual_fwd(_NAMES_FWD, args, given)
    return attend(FLASH_ATTENTION_FWD.bind(args, given), True) if results is NotImplemented else results


@FLASH_ATTENTION_BWD
def flash_attention_bwd(*args, **given):
    """Return the gradients of `flash_attention` from what `flash_attention_fwd` returned.

    `flash_attention_vjp` does both in one. Masked pairs have no influence here either: masked keys and fully masked
    queries get zeros.

    Weights are recomputed from `lse`, whose rounding is their relative error: 6e-8 per unit of its size (1e-16 in
    float64). If it is above 1,024 and belongs to these very keys, the row's logits are summed again instead. Given
    `out` and `lse` of all keys, parts of the keys return their parts of the gradients, if the output is normalized and
    there is no dropout.

    Parameters
    ----------
    dout : array_like, shape [B, Tq, H, Dv] or [Tq, H, Dv]
        The gradient of `out`, in the dtype of `query`.
    query, key, value, attention_mask, ...
        As passed to `flash_attention_fwd`.
    out : array_like, shape [B, Tq, H, Dv] or [Tq, H, Dv]
        The result of the forward pass, in the query's dtype. With 16-bit queries, float32 is also accepted: a result
        that was not rounded gives more precise gradients.
    lse : array_like, shape [B, H, Tq] or [H, Tq]
    grad_bias, grad_softmax_aux, grad_relative_bias, grad_grid_bias : bool
        Also return the gradients of these.
    dlse : array_like, shape [B, H, Tq] or [H, Tq], optional
        The gradient of `lse`, in its type.

    Returns
    -------
    FlashAttentionGrads

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> query, key = np.zeros((1, 3, 1, 8)), np.zeros((1, 5, 1, 8))  # all allowed keys weigh the same
    >>> value = np.arange(5.0).reshape(1, 5, 1, 1)
    >>> options = {"causal": True, "causal_offset": 0}
    >>> out, lse = attnmask.flash_attention_fwd(query, key, value, **options)
    >>> dout = np.ones_like(out)
    >>> grads = attnmask.flash_attention_bwd(dout, query, key, value, out, lse, **options)
    >>> grads.value.ravel().round(3)  # 1 + 1/2 + 1/3, 1/2 + 1/3, 1/3
    array([1.833, 0.833, 0.333, 0.   , 0.   ])
    """
    return attend_backward(args, given)


@FLASH_ATTENTION_VJP
def flash_attention_vjp(*args, **given):
    """Return `flash_attention` and its gradient function.

    Parameters
    ----------
    query, key, value, attention_mask, ..., causal_offset
        As in `flash_attention`. They and the result are kept, not copied: do not change them while you use `vjp`. For
        16-bit types a float32 copy of the result is kept, because gradients suffer most from its rounding: 4 bytes per
        number, O(T · D) in total.
    return_lse : bool
        Also return the logsumexp of each row.
    grad_bias, grad_softmax_aux, grad_relative_bias, grad_grid_bias : bool
        Let `vjp` also return the gradients of these.

    Returns
    -------
    out : ndarray, or tuple of two if `return_lse`
        The result of `flash_attention`.
    vjp : callable
        ``vjp(dout)`` takes the gradient of `out`, in its shape and type, and returns `FlashAttentionGrads`, a tuple of
        six: ``dq, dk, dv = vjp(dout)[:3]``. ``vjp(dout, dlse)`` also takes that of the logsumexp. You may call it any
        number of times.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> query, key = np.zeros((1, 3, 1, 8)), np.zeros((1, 5, 1, 8))  # all allowed keys weigh the same
    >>> value = np.arange(5.0).reshape(1, 5, 1, 1)
    >>> out, vjp = attnmask.flash_attention_vjp(
    ...     query, key, value, bias=np.zeros(5), causal=True, causal_offset=0, grad_bias=True
    ... )
    >>> grads = vjp(np.ones_like(out))
    >>> grads.value.ravel().round(3)  # 1 + 1/2 + 1/3, 1/2 + 1/3, 1/3
    array([1.833, 0.833, 0.333, 0.   , 0.   ])
    >>> grads.bias.round(3)
    array([-0.583,  0.25 ,  0.333,  0.   ,  0.   ])

    The logsumexp has a gradient too, for example when parts are merged:

    >>> (out, lse), vjp = attnmask.flash_attention_vjp(
    ...     query, key, value, bias=np.zeros(5), return_lse=True, grad_bias=True
    ... )
    >>> vjp(np.zeros_like(out), np.ones_like(lse)).bias.round(3)  # of three queries, a fifth each
    array([0.6, 0.6, 0.6, 0.6, 0.6])
    """
    return attend_with_vjp(args, given)


@FLASH_ATTENTION_JVP
def flash_attention_jvp(*args, **given):
    """Compute attention, and its tangent: how much the result changes along a direction of its inputs.

    It is the product of the Jacobian with that direction, in forward mode: one pass, and no memory for pairs. With the
    tangents of logits, ``dlogit = slope of the soft cap · ((dquery · key + query · dkey) · softmax_scale + dbias)``::

        dlse[q] = Σ_k softmax_k(logit[q, k]) · dlogit[q, k]
        dout[q] = Σ_k softmax_k(logit[q, k]) · ((dlogit[q, k] - dlse[q]) · value[k] + dvalue[k])

    Masked pairs have no influence here either, and a fully masked query has a tangent of zeros.

    Parameters
    ----------
    query, key, value, attention_mask, ..., return_lse
        As in `flash_attention`; `normalize_output` must be True. Dropout drops the same weights.
    query_tangent, key_tangent, value_tangent : array_like, optional
        The direction: arrays like `query`, `key` and `value`. One that is not given is zero, and costs no time.
    bias_tangent, softmax_aux_tangent : array_like, optional
        Those of `bias` and of `softmax_aux`, of the same shape. Other terms are held fixed.

    Returns
    -------
    out, out_tangent : ndarray
        Both as `flash_attention` returns `out`. float16 and bfloat16 are computed in float32.
    (out, lse), (out_tangent, lse_tangent) : tuples of ndarray
        With `return_lse`.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> query, key = np.ones((1, 1, 1, 4)), np.zeros((1, 3, 1, 4))  # all keys weigh the same
    >>> value, direction = np.arange(3.0).reshape(1, 3, 1, 1), np.zeros((1, 3, 1, 4))
    >>> direction[0, 2] = 1  # the last key becomes more like the query
    >>> out, tangent = attnmask.flash_attention_jvp(query, key, value, key_tangent=direction)
    >>> step = 1e-6
    >>> moved = attnmask.flash_attention(query, key + step * direction, value)
    >>> tangent.round(4).item(), ((moved - out) / step).round(4).item()
    (0.6667, 0.6667)
    """
    return attend_with_tangents(args, given)


@FLASH_ATTENTION_BWD_VJP
def flash_attention_bwd_vjp(*args, **given):
    """Compute second derivatives of attention: the gradients of what `flash_attention_bwd` returns.

    With ``dq, dk, dv = flash_attention_bwd(dout, query, key, value, ...)``, these are the gradients of the number
    ``Σ dq · query_cotangent + Σ dk · key_cotangent + Σ dv · value_cotangent`` for `dout`, `query`, `key` and `value`
    ("double backward"), without memory for pairs. As second derivatives are symmetric, those for query, key and value
    are also how dq, dk and dv change as inputs move along the cotangents: a product with the Hessian of
    ``Σ dout · out``. The one for `dout` is the tangent of `flash_attention_jvp` along them.

    Parameters
    ----------
    dout, query, key, value, out, lse, attention_mask, ..., dlse
        As in `flash_attention_bwd`; `out` and `lse` are those of the same keys. `normalize_output` must be True.
    query_cotangent, key_cotangent, value_cotangent : array_like, optional
        Arrays like `query`, `key` and `value`. One that is not given is zero, and costs no time.

    Returns
    -------
    FlashAttentionSecondGrads

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> rng = np.random.default_rng(0)
    >>> query, key, value, dout, direction = rng.standard_normal((5, 1, 3, 2, 8))
    >>> def gradients(query):
    ...     out, lse = attnmask.flash_attention_fwd(query, key, value)
    ...     return out, lse, attnmask.flash_attention_bwd(dout, query, key, value, out, lse)
    >>> out, lse, grads = gradients(query)
    >>> second = attnmask.flash_attention_bwd_vjp(
    ...     dout, query, key, value, out, lse, query_cotangent=direction
    ... )
    >>> step = 1e-6
    >>> moved = (gradients(query + step * direction)[2].key - grads.key) / step
    >>> bool(abs(moved - second.key).max() < 1e-5)
    True
    """
    return attend_backward_vjp(args, given)


@ATTENTION_WEIGHTS
def attention_weights(*args, **given):
    """Return the weights of attention of chosen queries: rows of the softmax.

    Each row sums to 1, or to less with sinks. A query without keys has weights of 0.

    Parameters
    ----------
    query, key, attention_mask, bias, softmax_scale, ..., grid_bias
        As in `flash_attention`, without what does not concern weights.
    queries : int, slice or array_like of integers, optional
        The queries to look at: ``-8`` means the last eight, ``[9]`` query 9 alone. Without it, all queries: the result
        then has a number for each pair.

    Returns
    -------
    ndarray, shape [B, H, n, Tk]
        float32, or float64 for float64.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> query, key = np.zeros((1, 4, 1, 8)), np.zeros((1, 4, 1, 8))  # all keys weigh the same
    >>> attnmask.attention_weights(query, key, causal=True, queries=-2).round(2).tolist()
    [[[[0.33, 0.33, 0.33, 0.0], [0.25, 0.25, 0.25, 0.25]]]]
    """
    return weights.weights(args, given)


@ATTENTION_STATISTICS
def attention_statistics(*args, **given):
    """Return what the weights of attention tell, without an array of all pairs.

    Parameters
    ----------
    query, key, attention_mask, bias, softmax_scale, ..., grid_bias
        As in `flash_attention`, without what does not concern weights.
    of : str, tuple, or sequence of these
        The statistics to return: ``"key_sum"``, ``"entropy"``, ``"max_logit"``, and ``("top_keys", 16)`` for the 16
        keys of the greatest weights.
    queries : int, slice or array_like of integers, optional
        The queries to look at: ``-8`` means the last eight, ``[9]`` query 9 alone. Without it, all queries.
    heads : {"query", "key"}
        ``"query"``: one `key_sum` for each query head. ``"key"``: their sum over the query heads that share a key head.
    lse : array_like, shape [B, H, Tq] or [H, Tq], optional
        That of an earlier call with the same arguments, which saves a pass.

    Returns
    -------
    AttentionStatistics

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> query, key = np.zeros((1, 4, 1, 8)), np.zeros((1, 4, 1, 8))  # all keys weigh the same
    >>> found = attnmask.attention_statistics(query, key, causal=True, of=("key_sum", ("top_keys", 2)))
    >>> found.key_sum.round(2).tolist()  # 1 + 1/2 + 1/3 + 1/4, ...
    [[[2.08, 1.08, 0.58, 0.25]]]
    >>> found.top_keys.tolist()  # of equal weights the first ones
    [[[[0, -1], [0, 1], [0, 1], [0, 1]]]]
    """
    return weights.statistics(args, given)
