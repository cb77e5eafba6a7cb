"""Tangents of attention and of its gradients: how these move when inputs do."""

from typing import TypeAlias

import numpy as np

from attnmask._attention.arguments import (
    FLASH_ATTENTION_BWD_VJP,
    FLASH_ATTENTION_JVP,
    LEARNED,
    MOVED,
    Function,
)
from attnmask._attention.backward import of_result, of_rows
from attnmask._attention.batch import folded, four_axes, unfolded
from attnmask._attention.problem import FlashAttentionSecondGrads, read_problem
from attnmask._common.arguments import as_array, describe, flag, is_number, wide_dtype
from attnmask._common.loading import _core
from attnmask._common.types import Arguments, Array, Given


def _tangent(given: Given, of: str, kind: str = "tangent") -> Array | None:
    """Return the tangent of an argument, or the cotangent of its gradient, which is like it."""
    name = f"{of}_{kind}"
    if given[name] is None:
        return None
    if given[of] is None:
        raise ValueError(f"{name} must be None without {of}, got {describe(given[name])}")
    array, primal = as_array(given[name], name), as_array(given[of], of)
    if of == "softmax_aux":  # which may be of any type
        if not is_number(array.dtype):
            raise TypeError(f"{name} must be real numbers, got {describe(array)}")
    elif array.dtype != primal.dtype:
        hint = f"; write {name}.astype({of}.dtype)" if is_number(array.dtype) else ""
        raise TypeError(f"{name} must be {primal.dtype} as {of}, got {describe(array)}{hint}")
    if array.shape != primal.shape:
        raise ValueError(f"{name} must be of shape {primal.shape} as {of}, got {describe(array)}")
    return array


def _check_normalized(given: Given, function: Function) -> None:
    if not flag(given["normalize_output"], "normalize_output"):
        raise ValueError(
            f"normalize_output must be True, got False; {function.name} has no other derivatives"
        )


_Results: TypeAlias = Array | tuple[Array, Array]


def attend_with_tangents(args: tuple[object, ...], given: Arguments) -> tuple[_Results, _Results]:
    """Return what `flash_attention_jvp` returns."""
    given = FLASH_ATTENTION_JVP.bind(args, given)
    with_lse = flag(given["return_lse"], "return_lse")
    _check_normalized(given, FLASH_ATTENTION_JVP)
    problem, batch = read_problem(given)
    query, key, value, bias, sinks = (_tangent(given, name) for name in MOVED)
    _, queries, heads, _ = problem.query.shape
    if bias is not None:
        pairs = (*(batch or (1,)), heads, queries, problem.key.shape[1])
        bias = four_axes(bias, "bias_tangent", pairs, divides=True)
    if sinks is not None:
        term = problem.term("softmax_aux")
        shape = (heads, sinks.shape[-1])
        sinks = None if term is None else np.array(np.broadcast_to(sinks, shape), np.float64, order="C")
    if len(batch) != 1:
        query, key, value = (None if x is None else folded(x, batch) for x in (query, key, value))
    bias = bias if problem.term("bias") else None
    results = _core.flash_jvp(problem, query, key, value, bias, sinks)
    out, lse, out_tangent, lse_tangent = (unfolded(array, batch) for array in results)
    return ((out, lse), (out_tangent, lse_tangent)) if with_lse else (out, out_tangent)


def attend_backward_vjp(args: tuple[object, ...], given: Arguments) -> FlashAttentionSecondGrads:
    """Return what `flash_attention_bwd_vjp` returns."""
    return FlashAttentionSecondGrads(*second_gradients(args, given)[:-1])


def second_gradients(args: tuple[object, ...], given: Arguments) -> list[Array]:
    """Return the same gradients, and that of dlse."""
    given = FLASH_ATTENTION_BWD_VJP.bind(args, given)
    _check_normalized(given, FLASH_ATTENTION_BWD_VJP)
    problem, batch = read_problem(given)
    _, queries, heads, _ = problem.query.shape
    rows, dtype, dlse = (*batch, heads, queries), problem.query.dtype, given["dlse"]
    cotangents = [_tangent(given, name, "cotangent") for name in LEARNED[:3]]
    if len(batch) != 1:
        cotangents = [None if x is None else folded(x, batch) for x in cotangents]
    grads = _core.flash_backward_vjp(
        problem,
        of_result(given["dout"], "dout", problem, batch),
        of_result(given["out"], "out", problem, batch, may_be_wide=True),
        of_rows(given["lse"], "lse", rows, wide_dtype(dtype), batch),
        None if dlse is None else of_rows(dlse, "dlse", rows, wide_dtype(dtype), batch),
        *cotangents,
    )
    return [unfolded(x, batch) for x in (grads[0].astype(dtype, copy=False), *grads[1:])]
