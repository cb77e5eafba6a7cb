"""Flash attention: memory is O(tokens), and fully masked tiles are skipped.

Arrays are ``[B, T, H, D]``: batch, tokens, heads, head_dim; or ``[T, H, D]`` for packed sequences. Keys and values may
have fewer heads than queries, which then share them: query head ``h`` reads head ``h // (H // Hkv)``.
"""

from __future__ import annotations

from inspect import signature
from operator import itemgetter
from typing import Any, Protocol, SupportsIndex, Unpack

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from attnmask._attention.problem import (
    BwdParams,
    FwdParams,
    Problem,
    attention_function,
    check_apart,
    dropout_of,
    read_problem,
)
from attnmask._common.arguments import FARTHEST, as_array, describe, flag, integer
from attnmask._common.keywords import NoKeywords, reject_unknown
from attnmask._common.loading import _core
from attnmask._masks.info import MaskInfo

__all__ = [
    "BwdParams",
    "FwdParams",
    "dropout_keep_mask",
    "flash_attention",
    "flash_attention_fwd",
    "merge_attention_states",
    "merge_attention_states_vjp",
]


def _without_batch(out: Any, problem: Problem) -> NDArray[Any]:
    """Return the `out` of packed sequences with the batch axis it lacks."""
    shape, dtype = (*problem.query.shape[1:3], problem.value.shape[3]), problem.query.dtype
    target: NDArray[Any] = np.asarray(out)
    if target.shape != shape or target.dtype.newbyteorder("=") != dtype:
        raise ValueError(f"out must be an array of {dtype} of shape {shape}, got {describe(target)}")
    return target[None]


# What the core takes without looks at it in Python; all arguments from the mask on have to be None.
_USUAL = itemgetter(
    "query", "key", "value", "softmax_scale", "causal", "causal_offset", "out", "normalize_output", "dropout_prob",
    "relative_low", "attention_mask", "bias", "dropout_seed", "cum_seqlens_q", "cum_seqlens_k", "sliding_window",
    "fwd_params", "bwd_params", "logits_soft_cap", "softmax_aux", "precision", "logits_dtype", "q_segment_ids",
    "kv_segment_ids", "alibi_slopes", "relative_bias",
)  # fmt: skip


def _attend(given: dict[str, Any], return_lse: bool) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Attend into `out` of `given`, which may be None and must share no memory with the other arguments."""
    usual = _core.flash_usual(return_lse, *_USUAL(given))
    if usual is not NotImplemented:
        return usual  # type: ignore[no-any-return]
    problem, batched = read_problem(given)
    return_lse = flag(return_lse, "return_lse")
    out = given["out"]
    if out is not None:
        check_apart(out, given)
    if batched:
        return _core.flash_forward(*problem, return_lse, out)
    result, lse = _core.flash_forward(
        *problem, return_lse, None if out is None else _without_batch(out, problem)
    )
    return result[0] if out is None else out, None if lse is None else lse[0]


def attend_for_gradients(given: dict[str, Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """The results of `flash_attention_fwd`, and what its gradients take best as the result: of sixteen bits a copy that
    is not rounded to them, and else the same array.
    """
    given = _DEFAULTS | given
    if len(given) > len(_DEFAULTS):
        reject_unknown(flash_attention, given.keys() - _DEFAULTS.keys())
    usual = _core.flash_usual_vjp(True, *_USUAL(given))
    if usual is not NotImplemented:
        return usual  # type: ignore[no-any-return]
    problem, batched = read_problem(given)
    results = _core.flash_forward_vjp(*problem)
    return results if batched else (results[0][0], results[1][0], results[2][0])


# Each signature lists all arguments, in the same order, and `locals()` passes them on by name. Only in wrong calls is
# there anything in `unknown`.


@attention_function
def flash_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attention_mask: ArrayLike | MaskInfo | None = None,
    bias: ArrayLike | None = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    causal: bool = False,
    dropout_seed: int | None = None,
    cum_seqlens_q: ArrayLike | None = None,
    cum_seqlens_k: ArrayLike | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    fwd_params: FwdParams | None = None,
    bwd_params: BwdParams | None = None,
    logits_soft_cap: float | None = None,
    softmax_aux: ArrayLike | None = None,
    normalize_output: bool = True,
    precision: Any = None,
    logits_dtype: DTypeLike | None = None,
    *,
    q_segment_ids: ArrayLike | None = None,
    kv_segment_ids: ArrayLike | None = None,
    causal_offset: ArrayLike = 0,
    alibi_slopes: ArrayLike | None = None,
    relative_bias: ArrayLike | None = None,
    relative_low: int = 0,
    return_lse: bool = False,
    out: NDArray[Any] | None = None,
    **unknown: Unpack[NoKeywords],
) -> Any:
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

    Parameters
    ----------
    query : array_like, shape [B, Tq, H, D], or [Tq, H, D] with `cum_seqlens_q` or `cum_seqlens_k`
        float16, bfloat16, float32 or float64, like `key` and `value`. All are read in place, whatever their strides:
        pass ``[B, H, T, D]`` as ``query.swapaxes(1, 2)``.
    key : array_like, shape [B, Tk, Hkv, D], or [Tk, Hkv, D]
        H is a multiple of Hkv.
    value : array_like, shape [B, Tk, Hkv, Dv], or [Tk, Hkv, Dv]
    attention_mask : array_like or MaskInfo, optional
        An array of bool or numbers that broadcasts to [B, H, Tq, Tk]; nonzero means allowed. (Pass numbers to add to
        logits, such as 0 and -inf, as `bias`; floats below 0 are refused here.) A `MaskInfo` must have Tq queries and
        Tk keys, and is never written out.
    bias : array_like of floats, broadcasts to [B, H, Tq, Tk], optional
    softmax_scale : float, optional
        Defaults to ``1 / sqrt(D)``.
    dropout_prob : float
        The probability that a weight is dropped, at least 0 and below 1. The others grow by ``1 / (1 - dropout_prob)``.
    causal : bool
    dropout_seed : int, optional
        Any integer, taken modulo 2**64; defaults to 0. `dropout_keep_mask` returns what is kept.
    cum_seqlens_q, cum_seqlens_k : array_like of integers, shape [sequences + 1], optional
        Starts of packed sequences in the one batch row, from 0 to Tq (Tk), never decreasing. Sequence i of the queries
        attends to sequence i of the keys. One argument is enough if both sides are equally long.
    sliding_window : int or tuple of two, optional
        The number of keys to the left and to the right, or to either side; None means all.
    fwd_params, bwd_params : FwdParams, BwdParams, optional
        Hints.
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
    return_lse : bool
        Also return the logsumexp of each row.
    out : ndarray, shape [B, Tq, H, Dv] or [Tq, H, Dv], optional
        Write the result here, and return it. It must have the query's type and share no memory with the inputs.

    Returns
    -------
    out : ndarray, shape [B, Tq, H, Dv] or [Tq, H, Dv]
        Of the query's type.
    lse : ndarray, shape [B, H, Tq] or [H, Tq]
        Only with `return_lse`: the natural logarithm of the sum of ``exp(logit)`` over allowed pairs and sinks, or -inf
        if there are none. Its dtype is float64 for float64 inputs, and else float32.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> query, key = np.zeros((1, 3, 1, 8)), np.zeros((1, 5, 1, 8))  # all allowed keys weigh the same
    >>> value = np.arange(5.0).reshape(1, 5, 1, 1)
    >>> attnmask.flash_attention(query, key, value, causal=True).ravel()
    array([0. , 0.5, 1. ])
    >>> attnmask.flash_attention(query, key, value, causal=True, causal_offset="bottom-right").ravel()
    array([1. , 1.5, 2. ])
    >>> attnmask.flash_attention(query, key, value, sliding_window=(1, 0)).ravel()
    array([0. , 0.5, 1.5])

    Packed sequences have no batch axis:

    >>> packed = {"cum_seqlens_q": [0, 1, 3], "cum_seqlens_k": [0, 3, 5]}
    >>> out, lse = attnmask.flash_attention(query[0], key[0], value[0], **packed, return_lse=True)
    >>> out.ravel(), np.exp(lse).round(6)
    (array([1. , 3.5, 3.5]), array([[3., 2., 2.]]))
    """
    given = locals()
    if unknown:
        reject_unknown(flash_attention, unknown)
    both = _attend(given, return_lse)
    return both if return_lse else both[0]


@attention_function
def flash_attention_fwd(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attention_mask: ArrayLike | MaskInfo | None = None,
    bias: ArrayLike | None = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    causal: bool = False,
    dropout_seed: int | None = None,
    cum_seqlens_q: ArrayLike | None = None,
    cum_seqlens_k: ArrayLike | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    fwd_params: FwdParams | None = None,
    bwd_params: BwdParams | None = None,
    logits_soft_cap: float | None = None,
    softmax_aux: ArrayLike | None = None,
    normalize_output: bool = True,
    precision: Any = None,
    logits_dtype: DTypeLike | None = None,
    *,
    q_segment_ids: ArrayLike | None = None,
    kv_segment_ids: ArrayLike | None = None,
    causal_offset: ArrayLike = 0,
    alibi_slopes: ArrayLike | None = None,
    relative_bias: ArrayLike | None = None,
    relative_low: int = 0,
    out: NDArray[Any] | None = None,
    **unknown: Unpack[NoKeywords],
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return `flash_attention` and its logsumexp, which gradients and `merge_attention_states` need.

    Parameters
    ----------
    query, key, value, ...
        As in `flash_attention`, without `return_lse`.

    Returns
    -------
    out : ndarray, shape [B, Tq, H, Dv] or [Tq, H, Dv]
    lse : ndarray, shape [B, H, Tq] or [H, Tq]

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> x = np.zeros((1, 4, 1, 8), np.float32)
    >>> out, lse = attnmask.flash_attention_fwd(x, x, x, causal=True)
    >>> np.exp(lse).round(6)
    array([[[1., 2., 3., 4.]]], dtype=float32)
    """
    given = locals()
    if unknown:
        reject_unknown(flash_attention_fwd, unknown)
    return _attend(given, True)  # type: ignore[return-value]


_DEFAULTS: dict[str, Any] = {
    name: parameter.default for name, parameter in signature(flash_attention_fwd).parameters.items()
}


def _schedule(threads: int, /, **arguments: Any) -> dict[str, Any]:
    """Return as plain data how a call of `flash_attention` is divided among threads:

    groups
        What is computed by itself, a sequence or a batch row: a dict of its ``row``, ``queries`` and ``keys`` (begin
        and end), ``tiles`` of keys, ``strategy``, the most ``block_rows``, ``items`` of each of its ``splits``, and
        ``task_items``.
    tasks
        For each the index of its group, and the rows and tiles of its items.
    waves
        For each parallel loop the number of its tasks, and how many of them one thread begins with.
    scratch
        Bytes of memory beside the results.
    """
    bound = signature(flash_attention).bind(**arguments)
    bound.apply_defaults()
    return _core.attention_schedule(*read_problem(bound.arguments)[0], threads)


def dropout_keep_mask(
    seed: int | None, prob: float, shape: tuple[SupportsIndex, ...], *, out: NDArray[np.bool_] | None = None
) -> NDArray[np.bool_]:
    """Return which weights `flash_attention` keeps under dropout.

    Each weight is drawn independently, from the seed and its position: a larger shape begins like a smaller one, and
    neither block sizes nor threads nor processors matter. In packed sequences, positions count from the start of the
    row.

    Parameters
    ----------
    seed : int or None
        `dropout_seed` of `flash_attention`.
    prob : float
        Its `dropout_prob`, at least 0 and below 1.
    shape : tuple of four int
        [B, H, Tq, Tk]
    out : ndarray of bool, optional
        Write the result here, and return it.

    Returns
    -------
    ndarray of bool, shape [B, H, Tq, Tk]

    Examples
    --------
    >>> import attnmask
    >>> keep = attnmask.dropout_keep_mask(7, 0.25, (1, 2, 100, 100))
    >>> bool(abs(keep.mean() - 0.75) < 0.02)
    True
    """
    chance, number = dropout_of(prob, seed, ("prob", "seed"))
    if not isinstance(shape, (tuple, list)) and not (isinstance(shape, np.ndarray) and shape.ndim == 1):
        raise TypeError(f"shape must be four integers, got {describe(shape)}")
    if len(shape) != 4:
        raise ValueError(f"shape must be four integers, got {len(shape)}")
    b, h, q, k = (integer(length, "shape", 0) for length in shape)
    if max(b, h, q, k) > FARTHEST:
        raise ValueError(f"shape must be at most {FARTHEST} along each axis, got {(b, h, q, k)}")
    return _core.dropout_keep_mask(number, chance, (b, h, q, k), out)


def _parts(arrays: Any, name: str) -> Any:
    """Return a sequence of arrays as a tuple, or a stack of them as it is."""
    if isinstance(arrays, (tuple, list)):
        return tuple(arrays)
    stack = as_array(arrays, name)
    if stack.ndim == 0:
        raise TypeError(f"{name} must be a sequence of arrays, got {describe(arrays)}")
    return stack


def merge_attention_states(outs: Any, lses: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Merge attention over parts of the keys into attention over all of them.

    ::

        lse = log Σ_i exp(lse_i)          out = Σ_i exp(lse_i - lse) · out_i

    A part whose lse is -inf, or +inf as FlashAttention returns it, has no keys: its `out` is ignored, whatever it
    holds. NaN stays NaN. Parts must be normalized. Give sinks to one part only, or each part counts them.

    Parameters
    ----------
    outs : sequence of array_like, each of shape [B, T, H, D] or [T, H, D]; or an array of one axis more
        Results of `flash_attention` for each part, of one floating-point type.
    lses : sequence of array_like, each of shape [B, H, T] or [H, T]; or an array of one axis more
        One per part.

    Returns
    -------
    out : ndarray, shape [B, T, H, D] or [T, H, D]
        Same type as `outs`. Sums are computed in float32, or in float64 for float64.
    lse : ndarray, shape [B, H, T] or [H, T]
        float32, or float64 if `outs` are. Where all parts are -inf, it is -inf and `out` is zero.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> outs = np.array([1.0, 4.0]).reshape(2, 1, 1, 1)  # two parts, with two keys and one
    >>> lses = np.log([2.0, 1.0]).reshape(2, 1, 1)
    >>> out, lse = attnmask.merge_attention_states(outs, lses)
    >>> out.round(6).item(), np.exp(lse).round(6).item()
    (2.0, 3.0)
    """
    return _core.merge_attention_states(_parts(outs, "outs"), _parts(lses, "lses"))


class _MergeVjp(Protocol):
    def __call__(self, dout: ArrayLike, dlse: ArrayLike | None = None) -> tuple[Any, Any]: ...


def merge_attention_states_vjp(outs: Any, lses: Any) -> tuple[tuple[NDArray[Any], NDArray[Any]], _MergeVjp]:
    """Return `merge_attention_states` and its gradient function.

    With each part's share, w_i = exp(lse_i - lse)::

        d out_i = w_i · d out          d lse_i = w_i · (d out · (out_i - out) + d lse)

    A part without keys, whose lse is -inf or +inf, gets zeros.

    Parameters
    ----------
    outs, lses
        As in `merge_attention_states`. They are kept, not copied: do not change them while you use `vjp`.

    Returns
    -------
    (out, lse) : tuple of two ndarray
        What `merge_attention_states` returns.
    vjp : callable
        ``vjp(dout)`` takes the gradient of `out`, in its type; ``vjp(dout, dlse)`` also takes that of `lse`. It returns
        the gradients of `outs` and `lses` in the types of `out` and `lse`: tuples with one array per part, or one
        stacked array if a stack was given.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> outs = np.array([1.0, 4.0]).reshape(2, 1, 1, 1)
    >>> lses = np.log([2.0, 1.0]).reshape(2, 1, 1)
    >>> (out, lse), vjp = attnmask.merge_attention_states_vjp(outs, lses)
    >>> douts, dlses = vjp(np.ones_like(out))
    >>> douts.ravel().round(3), dlses.ravel().round(3)
    (array([0.667, 0.333]), array([-0.667,  0.667]))
    """
    parts, weights = _parts(outs, "outs"), _parts(lses, "lses")
    merged = _core.merge_attention_states(parts, weights)

    def vjp(dout: ArrayLike, dlse: ArrayLike | None = None) -> tuple[Any, Any]:
        douts, dlses = _core.merge_backward(parts, weights, dout, dlse)
        return (
            tuple(douts) if isinstance(outs, (tuple, list)) else douts,
            tuple(dlses) if isinstance(lses, (tuple, list)) else dlses,
        )

    return merged, vjp
