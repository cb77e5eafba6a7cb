"""Gradients of attention, from its result and logsumexp, computed tile by tile like the result itself."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, Unpack

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from attnmask._attention.problem import (
    BwdParams,
    FlashAttentionGrads,
    FwdParams,
    Problem,
    attention_function,
    read_problem,
)
from attnmask._common.arguments import as_array, describe, flag, is_floating
from attnmask._common.keywords import NoKeywords, reject_unknown
from attnmask._common.loading import _core
from attnmask._masks.info import MaskInfo

__all__ = ["FlashAttentionGrads", "flash_attention_bwd", "flash_attention_vjp"]


class _Vjp(Protocol):
    def __call__(self, dout: ArrayLike, dlse: ArrayLike | None = None) -> FlashAttentionGrads: ...


class _Extras(NamedTuple):
    """The bias, sinks and relative bias as given, if their gradients are requested."""

    bias: NDArray[Any] | None
    softmax_aux: NDArray[Any] | None
    relative_bias: NDArray[Any] | None


def _wanted(array: ArrayLike | None, wanted: Any, name: str) -> NDArray[Any] | None:
    if not flag(wanted, f"grad_{name}"):
        return None
    if array is None:
        raise ValueError(f"grad_{name} must be False without {name}, got True")
    return as_array(array, name)


def _of_result(
    array: ArrayLike, name: str, problem: Problem, batched: bool, may_be_wide: bool = False
) -> NDArray[Any]:
    """Return an array like the result, with a batch axis."""
    shape, dtype = (*problem.query.shape[:3], problem.value.shape[3]), problem.query.dtype
    array = as_array(array, name)
    if may_be_wide and dtype.itemsize == 2 and array.dtype == np.float32:
        dtype = array.dtype
    return _of_rows(array, name, shape, dtype, batched)


def _of_rows(
    array: ArrayLike, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], batched: bool
) -> NDArray[Any]:
    """Return an array that goes with the result, with a batch axis."""
    given = as_array(array, name)
    if given.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {describe(given)}")
    expected = shape if batched else shape[1:]
    if given.shape != expected:
        raise ValueError(f"{name} must be of shape {expected}, got {describe(given)}")
    return given if batched else given[None]


def _backward(
    problem: Problem,
    batched: bool,
    dout: ArrayLike,
    out: NDArray[Any],
    lse: ArrayLike,
    dlse: ArrayLike | None,
    extras: _Extras,
) -> FlashAttentionGrads:
    """Return all gradients; `out` has a batch axis."""
    batch, queries, heads, _ = problem.query.shape
    wide = np.dtype(np.float64 if problem.query.dtype == np.float64 else np.float32)
    rows = (batch, heads, queries)
    dquery, dkey, dvalue, dbias, dsinks, dtable = _core.flash_backward(
        *problem,
        _of_result(dout, "dout", problem, batched),
        out,
        _of_rows(lse, "lse", rows, wide, batched),
        None if dlse is None else _of_rows(dlse, "dlse", rows, wide, batched),
        extras.bias is not None,
        extras.softmax_aux is not None and problem.sinks is not None,
        extras.relative_bias is not None and problem.relative is not None,
    )
    if not batched:
        dquery, dkey, dvalue = dquery[0], dkey[0], dvalue[0]
    return FlashAttentionGrads(
        dquery,
        dkey,
        dvalue,
        None if extras.bias is None or dbias is None else dbias.reshape(extras.bias.shape),
        None if extras.softmax_aux is None else like_sinks(dsinks, extras.softmax_aux),
        None if extras.relative_bias is None else like_table(dtable, extras.relative_bias),
    )


def like_sinks(dsinks: NDArray[np.float64] | None, softmax_aux: NDArray[Any]) -> NDArray[Any]:
    """Return the gradient of `softmax_aux` from the sums of each head; None means that there are no sinks."""
    dtype = softmax_aux.dtype if is_floating(softmax_aux.dtype) else np.dtype(np.float64)
    if dsinks is None:
        return np.zeros(softmax_aux.shape, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        shared = softmax_aux.shape != dsinks.shape
        return (dsinks.sum(axis=0).reshape(softmax_aux.shape) if shared else dsinks).astype(dtype)


def like_table(dtable: NDArray[np.float64] | None, relative_bias: NDArray[Any]) -> NDArray[Any]:
    """Return the gradient of `relative_bias`; None means that there are no sequences."""
    if dtable is None:
        return np.zeros_like(relative_bias)
    with np.errstate(over="ignore"):
        return dtable.astype(relative_bias.dtype)


@attention_function
def flash_attention_bwd(
    dout: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    out: ArrayLike,
    lse: ArrayLike,
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
    grad_bias: bool = False,
    grad_softmax_aux: bool = False,
    grad_relative_bias: bool = False,
    dlse: ArrayLike | None = None,
    **unknown: Unpack[NoKeywords],
) -> FlashAttentionGrads:
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
        The gradient of `out`, of the query's type.
    query, key, value, attention_mask, ...
        As passed to `flash_attention_fwd`.
    out : array_like, shape [B, Tq, H, Dv] or [Tq, H, Dv]
        The result of the forward pass, in the query's dtype. With 16-bit queries, float32 is also accepted: a result
        that was not rounded gives more precise gradients.
    lse : array_like, shape [B, H, Tq] or [H, Tq]
    grad_bias, grad_softmax_aux, grad_relative_bias : bool
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
    >>> out, lse = attnmask.flash_attention_fwd(query, key, value, causal=True)
    >>> dout = np.ones_like(out)
    >>> grads = attnmask.flash_attention_bwd(dout, query, key, value, out, lse, causal=True)
    >>> grads.value.ravel().round(3)  # 1 + 1/2 + 1/3, 1/2 + 1/3, 1/3
    array([1.833, 0.833, 0.333, 0.   , 0.   ])
    """
    given = locals()
    if unknown:
        reject_unknown(flash_attention_bwd, unknown)
    extras = _Extras(
        _wanted(bias, grad_bias, "bias"),
        _wanted(softmax_aux, grad_softmax_aux, "softmax_aux"),
        _wanted(relative_bias, grad_relative_bias, "relative_bias"),
    )
    problem, batched = read_problem(given)
    out = _of_result(out, "out", problem, batched, may_be_wide=True)
    return _backward(problem, batched, dout, out, lse, dlse, extras)


@attention_function
def flash_attention_vjp(
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
    grad_bias: bool = False,
    grad_softmax_aux: bool = False,
    grad_relative_bias: bool = False,
    **unknown: Unpack[NoKeywords],
) -> tuple[Any, _Vjp]:
    """Return `flash_attention` and its gradient function.

    Parameters
    ----------
    query, key, value, attention_mask, ..., causal_offset
        As in `flash_attention`. They and the result are kept, not copied: do not change them while you use `vjp`. For
        16-bit types a float32 copy of the result is kept, because gradients suffer most from its rounding: 4 bytes per
        number, O(T · D) in total.
    return_lse : bool
        Also return the logsumexp of each row.
    grad_bias, grad_softmax_aux, grad_relative_bias : bool
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
    ...     query, key, value, bias=np.zeros(5), causal=True, grad_bias=True
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
    given = locals()
    if unknown:
        reject_unknown(flash_attention_vjp, unknown)
    extras = _Extras(
        _wanted(bias, grad_bias, "bias"),
        _wanted(softmax_aux, grad_softmax_aux, "softmax_aux"),
        _wanted(relative_bias, grad_relative_bias, "relative_bias"),
    )
    with_lse = flag(return_lse, "return_lse")
    problem, batched = read_problem(given)
    out, lse, wide_out = _core.flash_forward_vjp(*problem)
    if not batched:
        out, lse = out[0], lse[0]

    def vjp(dout: ArrayLike, dlse: ArrayLike | None = None) -> FlashAttentionGrads:
        return _backward(problem, batched, dout, wide_out, lse, dlse, extras)

    return (out, lse) if with_lse else out, vjp
