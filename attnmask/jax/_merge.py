"""`merge_attention_states` for JAX."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from attnmask._attention import forward as attention
from attnmask._common.arguments import as_array, describe, wide_dtype
from attnmask._common.loading import _core
from attnmask.jax import _call as call
from attnmask.jax._arguments import is_traced, like
from attnmask.jax._gradients import with_derivatives
from attnmask.jax._types import ByName, Results, Shaped

_Parts: TypeAlias = Sequence[jax.typing.ArrayLike] | jax.typing.ArrayLike
_FLAGS = call.WORDS["sums"]


def _parts(arrays: Any, name: str) -> Any:
    """Return a sequence of arrays as a list, or a stack of them as it is."""
    if isinstance(arrays, (tuple, list)):
        return [x if isinstance(x, jax.Array) else as_array(x, name) for x in arrays]
    stack = arrays if isinstance(arrays, jax.Array) else as_array(arrays, name)
    if stack.ndim == 0:
        raise TypeError(f"{name} must be a sequence of arrays, got {describe(stack)}")
    return stack


def _known(parts: Any, name: str) -> Any:
    """Return what stands for parts when types and shapes are checked."""
    if isinstance(parts, list):
        return tuple(_known(part, name) for part in parts)
    return like(parts) if is_traced(parts) else as_array(parts, name)


def merge_attention_states(outs: _Parts, lses: _Parts) -> tuple[jax.Array, jax.Array]:
    """Merge attention over parts of the keys into attention over all of them.

    As `attnmask.merge_attention_states`, under ``jit``, ``grad`` and ``vmap``. `outs` and `lses` have
    derivatives of any order, in both modes.

    Parameters
    ----------
    outs : sequence of array, each of shape [B, T, H, D] or [T, H, D]; or a stack of them
    lses : sequence of array, each of shape [B, H, T] or [H, T]; or a stack of them

    Returns
    -------
    out : array, shape [B, T, H, D] or [T, H, D]
    lse : array, shape [B, H, T] or [H, T]

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import attnmask.jax
    >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 8, 2, 16))
    >>> parts = [
    ...     attnmask.jax.flash_attention(query, key[:, part], value[:, part], return_lse=True)
    ...     for part in (slice(0, 3), slice(3, 8))
    ... ]
    >>> out, lse = jax.jit(attnmask.jax.merge_attention_states)(*zip(*parts))
    >>> bool(jnp.allclose(out, attnmask.jax.flash_attention(query, key, value), atol=1e-5))
    True
    """
    given = _parts(outs, "outs"), _parts(lses, "lses")
    known = [_known(parts, name) for parts, name in zip(given, ("outs", "lses"), strict=True)]
    if any(map(is_traced, jax.tree.leaves(given))):
        _core.check_merge(*known)
        return _merged(*jax.tree.map(jax.numpy.asarray, given))
    merged: tuple[jax.Array, jax.Array] = call.to_jax(attention.merge_attention_states(*known))
    return merged


def _merged(*given: Any) -> tuple[jax.Array, jax.Array]:
    outs, lses = ([x[None] for x in parts] if isinstance(parts, list) else [parts] for parts in given)
    (_, *shape), dtype, count = outs[0].shape, outs[0].dtype, sum(map(len, outs))
    wide, batched = wide_dtype(dtype), len(shape) == 4
    batch, tokens, heads, channels = shape if batched else (1, *shape)
    shapes = (batch, tokens, heads, channels), (batch, heads, tokens)
    # Those of a stack stay together: [parts, B, T, H, D] and [parts, B, H, T].
    stacks = [x.reshape(len(x), *shapes[0]) for x in outs]
    stacks += [x.astype(wide).reshape(len(x), *shapes[1]) for x in lses]

    def run(target: str, learned: ByName, more: Sequence[jax.Array], flags: int, parts: int) -> Results:
        words = np.array([_FLAGS["version"], flags, count], np.int64)
        made: list[Shaped] = [
            ((parts * batch, *shape[1:]), dtype) for shape, dtype in zip(shapes, (dtype, wide), strict=True)
        ]
        arrays = [part for stack in learned.values() for part in stack]
        return call.call_handler(f"attnmask_merge_{target}", words, [*arrays, *more], made, "")

    def forward(learned: ByName, others: object, for_gradients: bool) -> Results:
        return run("forward", learned, (), 0, 1)

    def backward(
        learned: ByName, others: object, wanted: Sequence[str], kept: object, of_results: Sequence[Any]
    ) -> list[jax.Array]:
        more = [x for x in of_results if x is not None]
        found = run("backward", learned, more, _FLAGS["dlse"] if len(more) > 1 else 0, count)
        parts = [part for x, shape in zip(found, shapes, strict=True) for part in x.reshape(count, *shape)]
        grads = {name: jax.numpy.stack([parts.pop(0) for _ in stack]) for name, stack in learned.items()}
        return [grads[name] for name in wanted]

    def plain(learned: ByName, others: object) -> Results:
        stacks = [*learned.values()]
        all_outs, all_lses = map(jax.numpy.concatenate, (stacks[: len(outs)], stacks[len(outs) :]))
        live, zero = all_lses > -np.inf, jax.numpy.zeros((), wide)
        largest = jax.lax.stop_gradient(all_lses.max(axis=0))
        largest = jax.numpy.where(largest > -np.inf, largest, zero)
        weights = jax.numpy.where(live, jax.numpy.exp(jax.numpy.where(live, all_lses, zero) - largest), zero)
        total = weights.sum(axis=0)
        divisor = jax.numpy.where(total > 0, total, 1)
        weights, live = ((x.swapaxes(2, 3)[..., None]) for x in (weights / divisor, live))
        out = (weights * jax.numpy.where(live, all_outs, 0)).sum(axis=0)
        return out.astype(dtype), jax.numpy.where(total > 0, jax.numpy.log(divisor) + largest, -np.inf)

    learned = {f"{i:06}": stack for i, stack in enumerate(stacks)}  # in an order that JAX keeps
    out, lse = with_derivatives("merge_attention_states", forward, backward, 2, plain)(learned, ())
    return (out, lse) if batched else (out[0], lse[0])
