"""Attention with first and second derivatives in both modes, from four calls of C.

The tangent of the result is linear in the tangents of the inputs. The transpose of this map is the gradient, which is
linear in the gradients of the results. Both maps depend on query, key and value. Second derivatives say how they change
when these inputs move:

* The change of the gradient is a map for forward mode, and its transpose for reverse mode. Second derivatives are
  symmetric, so both are one call of C, ``flash_backward_vjp``.
* The change of the tangent is a map that only has a transpose: this call again.

The result and its logsumexp are functions of query, key and value. So they do not move when they are residuals.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import jax

from attnmask._attention.arguments import LEARNED, MOVED
from attnmask._common.types import AnyFunction
from attnmask.jax import _call as call
from attnmask.jax._arguments import Spec
from attnmask.jax._maps import Map
from attnmask.jax._types import ByName, Results

_INPUTS, _OF_RESULT = LEARNED[:3], ("dout", "dlse")
_FUNCTION = "attnmask.jax.flash_attention"
_Moved = tuple[Sequence[jax.Array], Sequence[Any]]


def attend(
    spec: Spec, learned: ByName, others: Any, count: int, more: Any = (), forward: AnyFunction = call.forward
) -> Sequence[jax.Array]:
    """Return the first `count` of: the result, its logsumexp, the result before it is rounded to 16 bits.

    `forward` computes them from all of these, and from the arrays `more`.
    """

    def compute(residuals: Any, _: ByName) -> Results:
        learned, others, more = residuals
        found: Results = forward(spec, learned, others, count, *more)
        return found

    def differentiate(residuals: Any, _: ByName, moved: ByName, __: ByName) -> _Moved:
        # The result before it is rounded to 16 bits, or it would be the largest error of gradients.
        learned, others, more = residuals
        count_kept = 3 if learned["query"].dtype.itemsize == 2 else 2
        results = attend(spec, learned, others, count_kept, more, forward)
        kept = [results[-1 if len(results) == 3 else 0], results[1]]
        found = _tangent(spec, moved)((learned, others, kept), moved)
        return results[:count], [*found, None][:count]

    return Map(compute, refuse, differentiate)((learned, others, more), {})


def refuse(*_: object) -> NoReturn:
    raise NotImplementedError(f"{_FUNCTION} has first and second derivatives, but none of order three")


def _no_second(spec: Spec, names: Iterable[str]) -> str:
    """Return why there are no second derivatives along these arguments, or nothing."""
    if not spec.normalize:
        return f"normalize_output must be True, got False: {_FUNCTION} then has no second derivatives"
    terms = [name for name in names if name not in _INPUTS]
    return f"{terms[0]}: {_FUNCTION} has gradients of {terms[0]}, but no second derivatives" if terms else ""


def _check_second(spec: Spec, names: Iterable[str]) -> None:
    if why := _no_second(spec, names):
        raise NotImplementedError(why)


def _of_result(residuals: Any, dout: jax.Array | None = None, dlse: jax.Array | None = None) -> Results:
    """Return what calls of C take of the result: its gradient, which is always there, and the rest of `backward`."""
    learned, _, kept = residuals
    dout = jax.numpy.zeros_like(kept[0], learned["query"].dtype) if dout is None else dout
    return (dout, *kept) if dlse is None else (dout, *kept, dlse)


def _given(names: Iterable[str], arrays: Iterable[Any]) -> ByName:
    return {name: x for name, x in zip(names, arrays, strict=True) if x is not None}


def _sum(one: Sequence[jax.Array], other: Sequence[jax.Array]) -> list[jax.Array]:
    return [x + y for x, y in zip(one, other, strict=True)]


def _like_result(residuals: Any, _: ByName) -> tuple[Any, Any]:
    learned, _, (out, lse) = residuals
    return out.update(dtype=learned["query"].dtype), lse


def _tangent(spec: Spec, names: Iterable[str]) -> Map:
    """Return the map from tangents of learned arrays, these, to those of the result and its logsumexp."""

    def compute(residuals: Any, arrays: ByName) -> Results:
        learned, others, _ = residuals
        return call.jvp(spec, learned, others, arrays)

    def transpose(residuals: Any, names: tuple[str, ...], cotangents: Sequence[Any]) -> list[jax.Array]:
        dout, dlse = cotangents
        dout, *_ = _of_result(residuals, dout)
        return _gradient(spec, names)(residuals, _given(_OF_RESULT, (dout, dlse)))

    def differentiate(residuals: Any, arrays: ByName, moved: ByName, moved_arrays: ByName) -> _Moved:
        _check_second(spec, (*moved, *arrays))
        found = _tangent_as_inputs_move(spec, residuals, arrays, moved)
        more = tangent(residuals, moved_arrays) if moved_arrays else ()
        return tangent(residuals, arrays), _sum(found, more) if more else found

    refused = [name for name in names if name not in MOVED]
    why = f"{refused[0]}: {_FUNCTION} has gradients of {refused[0]}, but no tangents" if refused else ""
    if not spec.normalize:
        why = f"normalize_output must be True, got False: {_FUNCTION} then has no tangents"
    tangent = Map(compute, transpose, differentiate, _like_result, why)
    return tangent


def _gradient(spec: Spec, wanted: tuple[str, ...]) -> Map:
    """Return the map from gradients of the result and its logsumexp to those of learned arrays."""

    def compute(residuals: Any, arrays: ByName) -> Results:
        learned, others, _ = residuals
        return call.backward(spec, learned, others, wanted, _of_result(residuals, **arrays))

    def transpose(residuals: Any, names: tuple[str, ...], cotangents: Sequence[Any]) -> list[jax.Array]:
        given = _given(wanted, cotangents)
        found = dict(zip(_OF_RESULT, _tangent(spec, given)(residuals, given), strict=True))
        return [found[name] for name in names]

    def differentiate(residuals: Any, arrays: ByName, moved: ByName, moved_arrays: ByName) -> _Moved:
        _check_second(spec, moved)
        found = _gradient_as_inputs_move(spec, wanted, residuals, arrays, moved | moved_arrays)
        return gradient(residuals, arrays), found

    def like(residuals: Any, _: ByName) -> list[Any]:
        return [residuals[0][name] for name in wanted]

    gradient = Map(compute, transpose, differentiate, like)
    return gradient


def _second(spec: Spec, residuals: Any, of_result: ByName, cotangents: ByName) -> ByName:
    """Return the gradients of inputs, and of the gradients of results, from those of gradients of inputs."""
    _check_second(spec, cotangents)
    learned, others, kept = residuals
    names, of, along_names = (*_INPUTS, *_OF_RESULT), tuple(of_result), tuple(cotangents)

    def compute(residuals: Any, _: ByName) -> list[jax.Array]:
        first, others, _ = residuals
        given = {name: first[name] for name in of}
        along = {name: first[f"{name}_cotangent"] for name in along_names}
        found = call.backward_vjp(spec, first, others, _of_result(residuals, **given), along)
        return [found[name] for name in names]

    first = learned | of_result | {f"{name}_cotangent": x for name, x in cotangents.items()}
    found = dict(zip(names, Map(compute, refuse, refuse)((first, others, kept), {}), strict=True))
    return found | {"dout": found["dout"].astype(learned["query"].dtype)}


def _gradient_as_inputs_move(
    spec: Spec, wanted: tuple[str, ...], residuals: Any, of_result: ByName, moved: ByName
) -> list[jax.Array]:
    """Return how the gradients of inputs move as inputs, and the gradients of results, do."""

    def compute(residuals: Any, arrays: ByName) -> Sequence[jax.Array]:
        tangents = {name: x for name, x in arrays.items() if name in _INPUTS}
        more = {name: x for name, x in arrays.items() if name not in tangents}
        found = residuals[0] | _second(spec, residuals, given(residuals), tangents)  # of terms it is refused
        second = [found[name] for name in wanted]
        return _sum(second, _gradient(spec, wanted)(residuals, more)) if more else second

    def transpose(residuals: Any, names: tuple[str, ...], cotangents: Sequence[Any]) -> list[jax.Array]:
        found = _second(spec, residuals, given(residuals), _given(wanted, cotangents))
        return [found[name] for name in names]

    def given(residuals: Any) -> ByName:
        return {name: residuals[0][name] for name in of}

    of = tuple(of_result)
    learned, *more = residuals
    return Map(compute, transpose, refuse, refused=_no_second(spec, wanted))(
        (learned | of_result, *more), moved
    )


def _tangent_as_inputs_move(spec: Spec, residuals: Any, tangents: ByName, moved: ByName) -> list[jax.Array]:
    """Return how the tangents of results move as inputs do: a map that can only be transposed."""

    def transpose(residuals: Any, names: tuple[str, ...], cotangents: Sequence[Any]) -> list[jax.Array]:
        along = {name: residuals[0][f"{name}_tangent"] for name in moving}
        dout, *_ = _of_result(residuals, cotangents[0])
        found = _second(spec, residuals, _given(_OF_RESULT, (dout, cotangents[1])), along)
        return [found[name] for name in names]

    def compute(residuals: Any, arrays: ByName) -> Results:  # tells the shapes and types of the results
        learned, others, _ = residuals
        return call.jvp(spec, learned, others, arrays)

    moving = tuple(tangents)
    why = f"{_FUNCTION} has no tangents of tangents: for second derivatives write jax.jvp of jax.grad"
    learned, *more = residuals
    first = learned | {f"{name}_tangent": x for name, x in tangents.items()}
    return Map(compute, transpose, refuse, refused=why)((first, *more), moved)
