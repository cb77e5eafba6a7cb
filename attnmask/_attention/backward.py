"""Gradients of attention, from its result and logsumexp, computed tile by tile like the result itself."""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from attnmask._attention.arguments import FLASH_ATTENTION_BWD, FLASH_ATTENTION_VJP, LEARNED
from attnmask._attention.batch import Batch, folded, summed, unfolded
from attnmask._attention.problem import FlashAttentionGrads, Problem, read_problem
from attnmask._common.arguments import as_array, describe, flag, is_floating, wide_dtype
from attnmask._common.loading import _core
from attnmask._common.types import Arguments, Array, DType, Given


class Vjp(Protocol):
    def __call__(self, dout: ArrayLike, dlse: ArrayLike | None = None) -> FlashAttentionGrads: ...


Extras: TypeAlias = dict[str, Array | None]  # terms as given whose gradients are requested; None: are not


def _extras(given: Given) -> Extras:
    return {name: _wanted(given, name, f"grad_{name}") for name in LEARNED[3:]}


def _wanted(given: Given, name: str, key: str) -> Array | None:
    if not flag(given[key], key):
        return None
    if given[name] is None:
        raise ValueError(f"{key} must be False without {name}, got True")
    return as_array(given[name], name)


def of_result(
    array: ArrayLike, name: str, problem: Problem, batch: Batch, may_be_wide: bool = False
) -> Array:
    """Return an array like the result, with one batch axis."""
    shape, dtype = (*batch, *problem.query.shape[1:3], problem.value.shape[3]), problem.query.dtype
    array = as_array(array, name)
    if may_be_wide and dtype.itemsize == 2 and array.dtype == np.float32:
        dtype = array.dtype
    return of_rows(array, name, shape, dtype, batch)


def of_rows(array: ArrayLike, name: str, shape: tuple[int, ...], dtype: DType, batch: Batch) -> Array:
    """Return an array that goes with the result, with one batch axis."""
    given = as_array(array, name)
    if given.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {describe(given)}")
    if given.shape != shape:
        raise ValueError(f"{name} must be of shape {shape}, got {describe(given)}")
    if len(batch) == 1:
        return given
    one: Array = folded(given, batch)
    return one


def _backward(
    problem: Problem,
    batch: Batch,
    dout: ArrayLike,
    out: Array,
    lse: ArrayLike,
    dlse: ArrayLike | None,
    extras: Extras,
) -> FlashAttentionGrads:
    """Return all gradients; `out` has one batch axis."""
    _, queries, heads, _ = problem.query.shape
    rows, wide = (*batch, heads, queries), wide_dtype(problem.query.dtype)
    dquery, dkey, dvalue, of_terms = _core.flash_backward(
        problem,
        of_result(dout, "dout", problem, batch),
        out,
        of_rows(lse, "lse", rows, wide, batch),
        None if dlse is None else of_rows(dlse, "dlse", rows, wide, batch),
        tuple(name for name, array in extras.items() if array is not None),
    )
    if len(batch) != 1:
        dquery, dkey, dvalue = (unfolded(gradient, batch) for gradient in (dquery, dkey, dvalue))
        bias = extras["bias"]
        if bias is not None and "bias" in of_terms:
            of_terms["bias"] = summed(of_terms["bias"], bias, batch)
    return FlashAttentionGrads(
        dquery,
        dkey,
        dvalue,
        **{
            name: None if array is None else like_argument(of_terms.get(name), array)
            for name, array in extras.items()
        },
    )


def like_argument(gradient: Array | None, array: Array) -> Array:
    """Return a term's gradient in the shape and dtype of its argument `array`: summed over heads if these share it,
    float64 for integers, and 0 if `gradient` is None, because the term had no effect.
    """
    dtype = array.dtype if is_floating(array.dtype) else np.dtype(np.float64)
    if gradient is None:
        return np.zeros(array.shape, dtype)
    if gradient.dtype == dtype and gradient.size == array.size:
        return gradient.reshape(array.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        if gradient.size != array.size:
            gradient = gradient.reshape(-1, array.shape[-1]).sum(axis=0)
        return gradient.reshape(array.shape).astype(dtype)


def attend_backward(args: tuple[object, ...], given: Arguments) -> FlashAttentionGrads:
    """Return what `flash_attention_bwd` returns."""
    given = FLASH_ATTENTION_BWD.bind(args, given)
    extras = _extras(given)
    problem, batch = read_problem(given)
    out = of_result(given["out"], "out", problem, batch, may_be_wide=True)
    return _backward(problem, batch, given["dout"], out, given["lse"], given["dlse"], extras)


def attend_with_vjp(args: tuple[object, ...], given: Arguments) -> tuple[Array | tuple[Array, Array], Vjp]:
    """Return what `flash_attention_vjp` returns."""
    given = FLASH_ATTENTION_VJP.bind(args, given)
    extras = _extras(given)
    with_lse = flag(given["return_lse"], "return_lse")
    problem, batch = read_problem(given)
    out, lse, wide_out = _core.flash_forward_vjp(problem)
    if len(batch) != 1:
        out, lse = unfolded(out, batch), unfolded(lse, batch)

    def vjp(dout: ArrayLike, dlse: ArrayLike | None = None) -> FlashAttentionGrads:
        return _backward(problem, batch, dout, wide_out, lse, dlse, extras)

    return (out, lse) if with_lse else out, vjp
