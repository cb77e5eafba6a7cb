"""Operations on NumPy arrays, PyTorch tensors and JAX arrays alike, each done by its own library, so that gradients
flow. Neither PyTorch nor JAX is imported here.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnmask._common.arguments import allocate, as_array, is_of, is_tensor
from attnmask._common.types import Array


def is_jax(x: object) -> bool:
    return is_of(x, "jax", "Array")


def any_array(x: Any, name: str) -> Any:
    """Return a PyTorch tensor or JAX array as it is, and anything else as a NumPy array."""
    return x if is_tensor(x) or is_jax(x) else as_array(x, name)


def like(x: Any, array: Array) -> Any:
    """Return `array` as the same kind as `x`; not traced, even if JAX traces `x`."""
    if is_tensor(x):
        return sys.modules["torch"].from_numpy(array).to(x.device)
    if is_jax(x):
        jax = sys.modules["jax"]
        with jax.ensure_compile_time_eval():
            return jax.numpy.asarray(array)
    return array


def taken(x: Any, places: NDArray[np.int64], axis: int) -> Any:
    """Return a copy of the entries at some places of an axis."""
    if is_tensor(x):
        return x.index_select(axis, like(x, places))
    if is_jax(x):
        return sys.modules["jax"].numpy.take(x, _small(places, x.shape[axis]), axis=axis)
    return np.take(x, places, axis=axis)


def put(x: Any, places: NDArray[np.int64], length: int, fill: Any) -> Any:
    """Return `length` rows with those of `x` at `places`, and `fill` elsewhere."""
    shape = (length, *x.shape[1:])
    try:
        if is_tensor(x):
            return x.new_full(shape, fill).index_copy(0, like(x, places), x)
        if is_jax(x):
            return sys.modules["jax"].numpy.full(shape, fill, x.dtype).at[_small(places, length)].set(x)
    except (RuntimeError, OverflowError, TypeError) as error:  # whatever they say of too large an array
        raise MemoryError(f"an array of shape {shape} does not fit in memory: {error}") from None
    rows: Array = allocate(shape, x.dtype, "max_len")
    rows[...] = fill
    rows[places] = x
    return rows


def _small(places: NDArray[np.int64], length: int) -> Array:
    """Use int32 where it suffices: JAX has no 64-bit integers by default."""
    return places.astype(np.int32) if length < 2**31 else places


def concatenated(parts: Sequence[Any], axis: int) -> Any:
    if is_tensor(parts[0]):
        return sys.modules["torch"].cat(parts, dim=axis)
    if any(map(is_jax, parts)):
        return sys.modules["jax"].numpy.concatenate(parts, axis=axis)
    return np.concatenate(parts, axis=axis)


def cast(x: Any, number: Any) -> Any:
    """Round `number` to the type of `x`, and return it as a Python number."""
    if is_tensor(x):
        return sys.modules["torch"].full((), number, dtype=x.dtype).item()
    if isinstance(number, complex) and x.dtype.kind != "c":
        raise TypeError
    with np.errstate(all="ignore"):
        return np.array(number).astype(x.dtype).item()
