"""Attention for JAX: the row `ATTENTION` as a function."""

from typing import Any

import jax
import numpy as np

from attnmask._attention.arguments import LEARNED
from attnmask._attention.batch import Batch, folded, one_batch, unfolded
from attnmask._common.arguments import is_floating
from attnmask._common.types import AnyFunction, Arguments
from attnmask._faces.attention import ATTENTION
from attnmask.jax import _call as call
from attnmask.jax._arguments import check, is_traced, known_flag, sinks_of, specify
from attnmask.jax._derivatives import attend
from attnmask.jax._faces import Function
from attnmask.jax._gradients import constant
from attnmask.jax._types import AnyByName, ByName, Results

IN_JAX = ATTENTION.with_own("""
callback : flag = False
    Let compiled functions call back into Python, for runtimes that cannot call C. This is slow, and with more devices
    than threads it may hang.
""")

_NO_SLOPES = (
    "attnmask.jax.flash_attention has no gradient of alibi_slopes: write jax.lax.stop_gradient(alibi_slopes), or train "
    "a relative_bias"
)


def four_axes(learned: ByName, batch: Batch) -> ByName:
    """Arrange learned arrays as the core takes them; JAX carries gradients back by itself."""
    arranged = {name: folded(x, batch) for name, x in learned.items() if name in LEARNED[:3]}
    if "bias" in learned:
        bias = learned["bias"]
        arranged["bias"] = one_batch(bias, batch or (1,), divides=True, broadcast_to=jax.numpy.broadcast_to)
    if "softmax_aux" in learned:
        arranged["softmax_aux"] = sinks_of(learned["softmax_aux"])
    tables = {name: x for name, x in learned.items() if name not in arranged}
    return arranged | {
        name: x if x.dtype.itemsize >= 4 else x.astype(np.float32) for name, x in tables.items()
    }


def attended(
    arrays: AnyByName, static: Arguments, count: int, more: Any = (), forward: AnyFunction = call.forward
) -> Results:
    """Return the first `count` results with all derivatives. `forward` is that of `_derivatives.attend`."""
    learned = {name: arrays[name] for name in LEARNED if isinstance(arrays.get(name), jax.Array)}
    slopes = arrays.get("alibi_slopes")
    if slopes is not None and is_traced(slopes) and is_floating(slopes.dtype):
        arrays = arrays | {"alibi_slopes": constant(slopes, _NO_SLOPES)}
    known = static | arrays
    problem, batch = check(known)
    spec, others = specify(known, problem, batch)
    spec = spec._replace(callback=known_flag(static["callback"], "callback"))
    found = attend(spec, four_axes(learned, batch), others, count, more, forward)
    return tuple(unfolded(x, batch) for x in found)


class Attention(Function):
    """The function of `IN_JAX`."""

    derivatives = """all but `relative_bias` and `grid_bias` have tangents (``jax.jvp``), and query, key and value have
second derivatives (``jax.hessian``, ``jax.jvp`` of ``jax.grad``, ``jax.grad`` of ``jax.grad``)"""

    def divided(self, given: Arguments) -> tuple[AnyByName, Arguments]:
        arrays, static = super().divided(given)
        for name in LEARNED[:3]:
            if name in arrays and arrays[name].ndim < 3:
                raise ValueError(f"{name} must have at least three axes, got shape {arrays[name].shape}")
        return arrays, static

    def traced(self, arrays: AnyByName, static: Arguments, with_all: bool) -> Any:
        results = attended(arrays, static, 1 + with_all)
        return results if with_all else results[0]
