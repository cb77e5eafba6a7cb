"""Functions of arrays that have gradients, from what computes them."""

from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero

from attnmask._common.types import AnyFunction, Arguments
from attnmask.jax._call import alike
from attnmask.jax._maps import Map
from attnmask.jax._types import ByName, Results


def differentiable(forward: AnyFunction, backward: AnyFunction, count: int) -> AnyFunction:
    """Return a function of learned and other arrays that has `count` results and gradients, for what talks to other
    devices, which a `Map` cannot.

    ``forward(learned, others, for_gradients)``
        Return the results, followed by what `backward` needs if `for_gradients`.
    ``backward(learned, others, wanted, kept, of_results)``
        Return the gradients of the learned arrays named in `wanted`. `kept` is what `forward` added to the results, and
        `of_results` are the gradients of the results. Only the first is always there; the others may be None.
    """

    @jax.custom_vjp
    def compute(learned: ByName, others: Any) -> Results:
        results: Results = forward(learned, others, False)
        return results

    def remember(learned: Any, others: Any) -> tuple[Results, Any]:
        # The keys of a dict, because tracing leaves them alone.
        wanted = {name: () for name, x in learned.items() if x.perturbed}
        learned, others = jax.tree.map(lambda x: x.value, (learned, others))
        found = forward(learned, others, True)
        return tuple(found[:count]), (wanted, learned, others, tuple(found[count:]))

    def differentiate(residuals: Any, cotangents: Sequence[Any]) -> tuple[Arguments, None]:
        wanted, learned, others, kept = residuals
        of_results = [None if isinstance(x, SymbolicZero) else x for x in cotangents]
        if of_results[0] is None:
            of_results[0] = jax.numpy.zeros(cotangents[0].shape, cotangents[0].dtype)
        found = backward(learned, others, tuple(wanted), kept, of_results)
        return dict.fromkeys(learned) | dict(zip(wanted, found, strict=True)), None

    compute.defvjp(remember, differentiate, symbolic_zeros=True)

    def call(learned: ByName, others: Any) -> Results:
        leaves, structure = jax.tree.flatten((learned, others))
        results: Results = compute(*jax.tree.unflatten(structure, alike(leaves)))
        return results

    return call


def with_derivatives(
    name: str, forward: AnyFunction, backward: AnyFunction, count: int, plain: AnyFunction | None = None
) -> AnyFunction:
    """Return a function of the same arrays, results and gradients, made of calls of C.

    ``plain(learned, others)`` returns the results as well, in operations of JAX, which have all derivatives. Without it
    there are gradients alone, and errors that name the function.
    """
    of_results = [f"result{i}" for i in range(count)]
    in_jax: AnyFunction = plain or forward

    def compute(learned: ByName, others: Any, for_gradients: bool = False) -> Any:
        def run(residuals: Any, _: ByName) -> Results:
            found: Results = forward(*residuals, for_gradients)
            return found

        def differentiate(residuals: Any, _: ByName, moved: ByName, __: ByName) -> Any:
            learned, others = residuals
            found = compute(learned, others, True)
            made = count if not for_gradients else len(found)
            found_tangents = tangent([jax.typeof(x) for x in found[:count]])(
                (*residuals, tuple(found[count:])), moved
            )
            return found[:made], [*found_tangents, *[None] * (made - count)]

        return Map(run, refuse, differentiate)((learned, others), {})

    def refuse(*_: object) -> NoReturn:
        raise NotImplementedError(f"attnmask.jax.{name} has gradients, but no gradients of these")

    def move(residuals: Any, arrays: ByName) -> Any:
        learned, others, _ = residuals
        moved = {n: learned[n] for n in arrays}
        return jax.jvp(lambda x: in_jax(learned | x, others), (moved,), (arrays,))[1]

    def tangent(like: Sequence[Any]) -> Map:
        def transpose(residuals: Any, names: tuple[str, ...], cotangents: Sequence[Any]) -> Any:
            given = {n: x for n, x in zip(of_results, cotangents, strict=True) if x is not None}
            if of_results[0] not in given:
                given[of_results[0]] = jax.numpy.zeros(like[0].shape, like[0].dtype)
            return gradient(like, names)(residuals, given)

        def zeros(residuals: Any, _: ByName) -> Results:
            found = [jax.numpy.zeros(x.shape, x.dtype) for x in like]
            return tuple(alike([*found, *jax.tree.leaves(residuals)])[:count])

        if plain:
            return Map(move, transpose, moving(move), lambda *_: like)
        why = f"attnmask.jax.{name} has gradients, but no tangents (jax.jvp, jax.linearize, jax.jacfwd)"
        return Map(zeros, transpose, refuse, lambda *_: like, why)

    def gradient(like: Sequence[Any], wanted: tuple[str, ...]) -> Map:
        def run(residuals: Any, arrays: ByName) -> Any:
            learned, others, kept = residuals
            given = [arrays.get(n) for n in of_results]
            if given[0] is None:
                given[0] = jax.numpy.zeros(like[0].shape, like[0].dtype)
            return backward(learned, others, wanted, kept, given)

        def transpose(residuals: Any, names: tuple[str, ...], cotangents: Sequence[Any]) -> Any:
            given = {n: x for n, x in zip(wanted, cotangents, strict=True) if x is not None}
            found = dict(zip(of_results, tangent(like)(residuals, given), strict=True))
            return [found[n] for n in names]

        def pull(residuals: Any, arrays: ByName) -> Any:
            learned, others, _ = residuals
            results, back = jax.vjp(lambda x: in_jax(learned | x, others), {n: learned[n] for n in wanted})
            given = [arrays.get(n, jax.numpy.zeros_like(x)) for n, x in zip(of_results, results, strict=True)]
            found = back(tuple(given))[0]
            return [found[n] for n in wanted]

        def like_wanted(residuals: Any, _: ByName) -> list[Any]:
            return [residuals[0][n] for n in wanted]

        return Map(run, transpose, moving(pull) if plain else refuse, like_wanted)

    return compute


def without_derivatives(name: str, compute: AnyFunction) -> AnyFunction:
    """Return a function of the same arrays by name that may stand beside a loss.

    Its derivatives are errors, but only where something asks for them.
    """
    why = f"attnmask.jax.{name} has no gradients: use it in no loss, or write jax.lax.stop_gradient"

    def run(residuals: Any, _: ByName) -> Results:
        found: Results = compute(*residuals)
        return found

    def differentiate(residuals: Any, _: ByName, moved: ByName, __: ByName) -> Any:
        results = Map(run, refuse, differentiate)(residuals, {})
        like = [jax.typeof(x) for x in results]
        floating = [jax.numpy.issubdtype(x.dtype, np.floating) for x in like]

        def zeros(residuals: Any, moved: ByName) -> Results:
            made = [jax.numpy.zeros(x.shape, x.dtype) for x, true in zip(like, floating, strict=True) if true]
            return tuple(alike([*made, *jax.tree.leaves((residuals, moved))])[: len(made)])

        found = iter(Map(zeros, refuse, refuse, refused=why)(residuals, moved))
        return results, [next(found) if true else None for true in floating]

    def refuse(*_: object) -> NoReturn:
        raise NotImplementedError(why)

    return lambda arrays: Map(run, refuse, differentiate)((arrays,), {})


def constant(x: jax.Array, why: str) -> jax.Array:
    """Return an array without derivatives: to ask for one is an error that says why."""

    def refuse(*_: object) -> NoReturn:
        raise NotImplementedError(why)

    return Map(lambda residuals, _: (residuals[0]["x"],), refuse, refuse)(({"x": x},), {})[0]


def moving(compute: AnyFunction) -> AnyFunction:
    """Return the rule of a map that operations of JAX compute."""

    def differentiate(residuals: Any, arrays: ByName, moved: ByName, moved_arrays: ByName) -> Any:
        first, *more = residuals

        def move(x: ByName, y: ByName) -> Any:
            return compute((first | x, *more), arrays | y)

        primals = {n: first[n] for n in moved}, {n: arrays[n] for n in moved_arrays}
        return jax.jvp(move, primals, (moved, moved_arrays))

    return differentiate
