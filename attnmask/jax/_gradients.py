"""Functions of arrays that have gradients, from what computes them."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from attnmask._common.types import AnyFunction, Arguments
from attnmask.jax._call import alike
from attnmask.jax._types import ByName, Results


def differentiable(forward: AnyFunction, backward: AnyFunction, count: int) -> AnyFunction:
    """Return a differentiable function of learned and other arrays that has `count` results.

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
