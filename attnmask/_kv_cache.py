"""Keys and values in numbers of eight bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple
from numpy.typing import ArrayLike, DTypeLike, NDArray

from attnmask._arguments import (
    allocate,
    as_array,
    describe,
    integer,
    is_floating,
)

__all__ = ["quantize_kv"]

_LARGEST = {"int8": 127, "float8_e4m3fn": 448}  # magnitudes, by the names of the types


def _dtype_of(value: DTypeLike, floating: bool) -> np.dtype[Any]:
    """A type of eight bits, or any type that a cache can have."""
    if isinstance(value, str) and value in ("bfloat16", "float8_e4m3fn"):
        import ml_dtypes  # noqa: F401  # NumPy does not know these names without it
    try:
        dtype = None if value is None else np.dtype(value)  # np.dtype(None) is float64
    except (TypeError, ValueError):  # text that is not UTF-8 raises ValueError
        dtype = None
    if dtype is None or not (dtype.name in _LARGEST or (floating and is_floating(dtype))):
        expected = f"{'float16, bfloat16, float32, float64, ' if floating else ''}int8 or float8_e4m3fn"
        raise TypeError(f"dtype must be {expected}, got {value!r:.200}")
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def quantize_kv(
    x: ArrayLike, dtype: DTypeLike, axis: int | tuple[int, ...]
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Numbers of eight bits and their scales: ``x`` is about ``values * scale``.

    ::

        scale = largest |x| along the axis / 127        int8, to the nearest integer, ties to even
                largest |x| along the axis / 448        float8_e4m3fn

    Parameters
    ----------
    x : array_like of floats
        float16, bfloat16, float32 or float64. It is read as float32, in which all of it must be finite: NaN, infinity
        and what is beyond float32 raise a ValueError.
    dtype : dtype
        int8 or ``ml_dtypes.float8_e4m3fn``.
    axis : int or tuple of int
        The axes that share a scale. For ``[B, T, Hkv, D]``, -1 gives a scale to each token and head, and ``(0, 1)`` to
        each head and channel.

    Returns
    -------
    values : ndarray
        Of the shape of `x`; int8 from -127 to 127.
    scale : ndarray of float32
        Of the same number of axes; those of `axis` are of length 1. It is finite and positive, and 1 where all numbers
        are 0.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> values, scale = attnmask.quantize_kv(np.array([[1.0, -2.54, 0.03], [0.0, 0.0, 0.0]]), np.int8, axis=-1)
    >>> values
    array([[  50, -127,    2],
           [   0,    0,    0]], dtype=int8)
    >>> scale
    array([[0.02],
           [1.  ]], dtype=float32)
    """
    given, target = as_array(x, "x"), _dtype_of(dtype, floating=False)
    if not is_floating(given.dtype):
        raise TypeError(f"x must be of float16, bfloat16, float32 or float64, got {describe(given)}")
    axes = tuple(integer(each, "axis") for each in (axis if isinstance(axis, (tuple, list)) else (axis,)))
    axes = normalize_axis_tuple(axes, given.ndim, "axis")
    limit = np.float32(_LARGEST[target.name])
    with np.errstate(all="ignore"):
        wide = given.astype(np.float32, copy=False)
        largest = np.max(np.abs(wide), axis=axes, keepdims=True, initial=0)
        if not np.isfinite(largest).all():
            index = tuple(np.argwhere(~np.isfinite(wide))[0].tolist())
            raise ValueError(f"x must be finite in float32, got {given[index]} at index {index}")
        scale = np.array(largest / limit, np.float32, order="C")
        scale[scale == 0] = 1
        values = np.divide(wide, scale, out=allocate(wide.shape, np.float32, "x"))
    # The scale of numbers near the least ones of float32 is rounded so much that a quotient can be beyond the limit.
    np.clip(values, -limit, limit, out=values)
    if target.name == "int8":
        np.rint(values, out=values)
    return values.astype(target), scale
