"""Functions of arrays that know their derivatives. Both modes of differentiation are made of them.

JAX derives reverse mode from forward mode: it transposes the part that is linear in the tangents. So a call of C needs
a transpose that works under ``vmap`` and can be differentiated again. JAX has no public way to give it one.
``jax.custom_derivatives.linear_call`` does neither, and loops lose the rules of ``jax.custom_jvp`` when they are
differentiated. So there is one primitive, whose parameter is a function:

* computed, it is the call for forward mode;
* transposed, it is the call for reverse mode, and forward mode is never computed;
* differentiated, it is the primitive of the new tangents; if residuals move, it is also another function;
* mapped, it is the primitive of the mapped function, and all these rules hold again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from attnmask._common.types import AnyFunction
from attnmask.jax._call import alike
from attnmask.jax._types import ByName, Results


class Map(NamedTuple):
    """A map of residuals and of arrays by name. It is linear in the arrays; there may be none.

    Residuals are a tree whose first branch is a dict of arrays. Only these arrays move: other residuals have no
    derivatives, or are functions of them.

    ``compute(residuals, arrays)``
        Return the results.
    ``transpose(residuals, names, cotangents)``
        Return the cotangents of the arrays of these names. Cotangents of results are None where they are zero.
    ``differentiate(residuals, arrays, moved, moved_arrays)``
        Return the results and their tangents when some arrays move, also those of the first branch. A zero tangent may
        be None.
    ``like(residuals, arrays)``
        Return arrays with the shapes and types of the results. This is faster than tracing `compute`.
    """

    compute: AnyFunction
    transpose: AnyFunction
    differentiate: AnyFunction
    like: AnyFunction | None = None
    refused: str = ""  # why it cannot be computed, but only transposed

    def __call__(self, residuals: Any, arrays: ByName) -> list[jax.Array]:
        leaves, structure = jax.tree.flatten((residuals, arrays))
        found: list[jax.Array] = _map.bind(*alike(leaves), map=self, structure=structure)
        return found


_map = Primitive("attnmask_linear_map")
_map.multiple_results = True


def _compute(*leaves: Any, map: Map, structure: Any) -> Results:
    if map.refused:
        raise NotImplementedError(map.refused)
    return tuple(map.compute(*jax.tree.unflatten(structure, leaves)))


def _describe(*leaves: Any, map: Map, structure: Any) -> Any:
    if map.like:
        found = map.like(*jax.tree.unflatten(structure, leaves))
        return [x.update(weak_type=False) for x in found]
    compute = partial(_compute, map=map._replace(refused=""), structure=structure)
    return jax.make_jaxpr(compute)(*leaves).out_avals


def _zero_like(x: jax.Array) -> Any:
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def _moving(tree: ByName) -> ByName:
    return {name: x for name, x in tree.items() if type(x) is not ad.Zero}


def _differentiate(primals: Sequence[Any], tangents: Sequence[Any], *, map: Map, structure: Any) -> Any:
    residuals, arrays = jax.tree.unflatten(structure, primals)
    (first, *_), moved = jax.tree.unflatten(structure, tangents)
    if first := _moving(first):
        results, found = map.differentiate(residuals, arrays, first, _moving(moved))
    else:
        results, moved = map(residuals, arrays), _moving(moved)
        found = map(residuals, moved) if moved else [None] * len(results)
    return results, [_zero_like(y) if x is None else x for x, y in zip(found, results, strict=True)]


def _transpose(cotangents: Sequence[Any], *leaves: Any, map: Map, structure: Any) -> list[Any]:
    residuals, arrays = jax.tree.unflatten(structure, leaves)
    names = tuple(name for name, x in arrays.items() if ad.is_undefined_primal(x))
    given = [None if type(x) is ad.Zero else x for x in cotangents]
    found = dict(zip(names, map.transpose(residuals, names, given), strict=True))
    of_residuals = [None] * (len(leaves) - len(arrays))
    return of_residuals + [found.get(name) for name in arrays]


def _mapped(map: Map, of_residuals: Any, of_arrays: Mapping[str, int | None], size: int) -> Map:
    """Return the map of many calls, whose arrays have an axis for these. Results have it in front."""

    def axes(arrays: ByName, of: Any = of_arrays) -> dict[str, int | None]:
        return {name: of[name] for name in arrays}

    def compute(residuals: Any, arrays: ByName) -> Any:
        return jax.vmap(map.compute, (of_residuals, axes(arrays)), axis_size=size)(residuals, arrays)

    def transpose(residuals: Any, names: tuple[str, ...], cotangents: Sequence[Any]) -> list[Any]:
        one = jax.vmap(
            lambda residuals, cotangents: map.transpose(residuals, names, cotangents),
            (of_residuals, [None if x is None else 0 for x in cotangents]),
            axis_size=size,
        )
        of_names = (of_arrays[name] for name in names)
        return [
            x.sum(0) if axis is None else jax.numpy.moveaxis(x, 0, axis)
            for x, axis in zip(one(residuals, cotangents), of_names, strict=True)
        ]

    def differentiate(residuals: Any, arrays: ByName, moved: ByName, moved_arrays: ByName) -> Any:
        of = of_residuals, axes(arrays), axes(moved, of_residuals[0]), axes(moved_arrays)
        return jax.vmap(map.differentiate, of, axis_size=size)(residuals, arrays, moved, moved_arrays)

    return Map(compute, transpose, differentiate, refused=map.refused)


def _batch(leaves: Sequence[Any], axes: Sequence[int | None], *, map: Map, structure: Any) -> Any:
    size = next(x.shape[axis] for x, axis in zip(leaves, axes, strict=True) if axis is not None)
    of_residuals, of_arrays = jax.tree.unflatten(structure, axes)
    mapped = _mapped(map, of_residuals, of_arrays, size)
    found = mapped(*jax.tree.unflatten(structure, leaves))
    return found, [0] * len(found)


_map.def_impl(_compute)
_map.def_abstract_eval(_describe)
ad.primitive_jvps[_map] = _differentiate
ad.primitive_transposes[_map] = _transpose
batching.primitive_batchers[_map] = _batch
mlir.register_lowering(_map, mlir.lower_fun(_compute, multiple_results=True))
