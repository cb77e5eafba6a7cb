"""Batch axes: a call may have several, which are folded into the one axis that the core has, and results get them back.

Masks and biases that broadcast are arranged to four axes here, too.
"""

from collections.abc import Sequence
from itertools import permutations
from math import prod
from typing import Any, TypeAlias

import numpy as np

from attnmask._common.arguments import describe, wide_dtype
from attnmask._common.types import AnyFunction, Array

Batch: TypeAlias = tuple[int, ...]  # the lengths of the batch axes; packed sequences may have none
Pairs: TypeAlias = tuple[int, ...]  # [*batch, H, Tq, Tk]

# For arrays of NumPy, PyTorch and JAX alike


def folded(array: Any, batch: Batch) -> Any:
    """Return an array with one axis in place of its first ones, which are `batch`: a view if strides allow it."""
    return array if len(batch) == 1 else array.reshape(prod(batch), *array.shape[len(batch) :])


def unfolded(array: Any, batch: Batch) -> Any:
    """Return an array with the axes `batch` in place of its first one."""
    return array if len(batch) == 1 else array.reshape(*batch, *array.shape[1:])


def one_shape(shape: Pairs) -> tuple[int, int, int, int]:
    """Return [*batch, H, Tq, Tk] with one batch axis."""
    return shape if len(shape) == 4 else (prod(shape[:-3]), *shape[-3:])  # type: ignore[return-value]


def _divided(sizes: Batch, batch: Batch) -> int:
    """Return how many of the batch axes an array has that broadcasts: all up to the last one that it does not share."""
    missing = len(batch) - len(sizes)
    return max((missing + i + 1 for i, size in enumerate(sizes) if size != 1), default=0)


def one_batch(array: Any, batch: Batch, divides: bool, broadcast_to: AnyFunction = np.broadcast_to) -> Any:
    """Return an array that broadcasts to [*batch, H, Tq, Tk] with four axes.

    It is a view if the batch shares none of its axes, or all of them. With `divides`, neighbouring batch rows may share
    a row of the array. Then it is a view, too, if the batch shares only the last axes.
    """
    missing = len(batch) + 3 - array.ndim
    array = array.reshape(*[1] * missing, *array.shape) if missing > 0 else array
    if len(batch) == 1:
        return array
    count = _divided(array.shape[:-3], batch)
    count = count if divides or not count else len(batch)
    return broadcast_to(array, (*batch[:count], *[1] * (len(batch) - count), *array.shape[-3:])).reshape(
        prod(batch[:count]), *array.shape[-3:]
    )


def summed(gradient: Array, array: Array, batch: Batch) -> Array:
    """Return the gradient of what `one_batch` made of an array, summed over the batch axes that it had repeated."""
    sizes = array.shape[:-3]
    count = _divided(sizes, batch)
    sizes = ((1,) * (len(batch) - len(sizes)) + sizes)[:count]
    repeated = tuple(i for i in range(count) if sizes[i] != batch[i])
    if not repeated:
        return gradient
    whole: Array = unfolded(gradient, batch[:count])
    return np.sum(whole, axis=repeated, dtype=wide_dtype(gradient.dtype))


# Masks and biases


def layout_hint(axes: int) -> str:
    """Return how to transpose queries, keys and values of so many axes."""
    names = {3: "", 4: "batch, "}.get(axes, "*batch, ")
    swap = (axes - 3, axes - 2) if axes <= 4 else (-3, -2)
    return f"; axes are [{names}tokens, heads, head_dim]: write x.swapaxes{swap} for arrays with heads before tokens"


def heads_first_hint(tokens: Sequence[int], shape: Pairs) -> str:
    """Return how to transpose queries, keys and values, where the mask has as many tokens as these have heads."""
    heads, *sides = shape[-3:]
    heads_first = heads > 1 and heads not in sides and tokens[-1] == heads and {*tokens} <= {1, heads}
    return layout_hint(len(shape)) if heads_first else ""


def broadcasts(sizes: Sequence[int], shape: Pairs) -> bool:
    return all(size in (1, wanted) for size, wanted in zip(sizes[::-1], shape[::-1], strict=False))


def _index_of(sizes: Sequence[int], shape: Pairs) -> str | None:
    """Return the index that adds the batch axes that are missing behind the first ones; "" if none has to be added."""
    if broadcasts(sizes, shape):
        return ""
    missing = len(shape) - len(sizes)
    for first in range(1, len(sizes) - 2):
        if broadcasts([*sizes[:first], *[1] * missing, *sizes[first:]], shape):
            return f"[{', '.join([':'] * first + ['None'] * missing)}]"
    return None


def _axes_hint(array: Array, name: str, shape: Pairs) -> str:
    """Return how to arrange the axes of a mask or bias that does not broadcast."""
    *batch, _, queries, keys = shape
    rows = ", ".join(":" for _ in batch)
    added = {
        (*batch, queries): f"[{rows}, None, :, None]",
        (*batch, keys): f"[{rows}, None, None, :]",
        (*batch, queries, keys): f"[{rows}, None]",
    }
    if array.shape in added:
        return f"; write {name}{added[array.shape]}"
    heads_first = heads_first_hint(array.shape[-2:], shape) if array.ndim > 1 else ""
    if heads_first:
        return heads_first
    for order in permutations(range(array.ndim)) if array.ndim <= min(len(shape), 6) else ():
        index = _index_of([array.shape[axis] for axis in order], shape)
        if index is not None:
            in_order = list(order) == sorted(order)
            return f"; write {name if in_order else f'np.transpose({name}, {order})'}{index}"
    if array.ndim > len(shape):
        return "; it has more batch axes than query"
    return ""


def four_axes(array: Array, name: str, shape: Pairs, divides: bool = False) -> Array:
    """Return an array that broadcasts to [*batch, H, Tq, Tk] with four axes: see `one_batch`."""
    if array.ndim > len(shape) or not broadcasts(array.shape, shape):
        axes = "B" if len(shape) == 4 else "*batch"
        expected = f"broadcast to [{axes}, H, Tq, Tk] = {shape}"
        raise ValueError(f"{name} must {expected}, got {describe(array)}{_axes_hint(array, name, shape)}")
    if len(shape) == 4:  # the usual case, in less time
        return array if array.ndim == 4 else array[(None,) * (4 - array.ndim) + (...,)]
    four: Array = one_batch(array, shape[:-3], divides)
    return four
