"""Quantize keys and values: formats with scales, and a rotation that spreads outliers."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple
from numpy.typing import ArrayLike, DTypeLike, NDArray

from attnmask._common.arguments import (
    FLOAT8,
    allocate,
    as_array,
    check_apart,
    describe,
    integer,
    is_floating,
    is_of,
    of_ml_dtypes,
)
from attnmask._common.loading import _core
from attnmask._common.types import AnyFunction, Array, DType, Given, JaxArray

__all__ = ["quantize_kv"]

# The largest magnitudes of formats with a scale for each row, by the names of their types.
_LARGEST = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344}
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_GROUPS = (32, 64, 128)


class Format(NamedTuple):
    """How a cache holds numbers."""

    name: str
    dtype: DType  # of its arrays
    per_element: int = 1  # channels in an element of these
    group: int = 0  # channels that share a scale and an offset; 0: there are no groups

    @property
    def scaled(self) -> bool:
        return self.name in _LARGEST or self.group > 0

    def elements(self, channels: int) -> int:
        """Return the length of the last axis of pages."""
        return channels // self.per_element

    def channels(self, pages: Array) -> int:
        elements: int = pages.shape[-1]
        return elements * self.per_element

    def scales(self, channels: int) -> tuple[int, ...]:
        """Return the last axes of scales."""
        return (channels // self.group, 2) if self.group else (1,)

    def check_channels(self, channels: int, name: str) -> None:
        if self.group and (channels == 0 or channels % self.group):
            raise ValueError(f"{name} must be a multiple of group={self.group}, got {describe(channels)}")


def format_of(value: DTypeLike, group: object, floating: bool) -> Format:
    """Return the format of a dtype: quantized ones and, if `floating`, floating-point ones."""
    if is_of(value, "torch", "dtype"):
        value = str(value).removeprefix("torch.")
    if isinstance(value, str) and (value in FLOAT8 or (floating and value == "bfloat16")):
        of_ml_dtypes(value, "dtype")  # NumPy does not know these names without the package
    is_int4 = isinstance(value, str) and value == "int4"
    try:
        dtype = None if value is None else np.dtype("uint8" if is_int4 else value)
    except (TypeError, ValueError):  # np.dtype(None) is float64, and text that is not UTF-8 raises ValueError
        dtype = None
    if dtype is not None and (is_int4 or dtype.name == "int4"):
        size = 64 if group is None else integer(group, "group")
        if size not in _GROUPS:
            raise ValueError(f"group must be 32, 64 or 128, got {describe(size)}")
        return Format("int4", np.dtype(np.uint8), 2, size)
    if dtype is None or not (dtype.name in _LARGEST or (floating and is_floating(dtype))):
        expected = ", ".join((*(_FLOATS if floating else ()), *_LARGEST))
        raise TypeError(f"dtype must be {expected} or int4, got {value!r:.200}")
    if group is not None:
        raise ValueError(f"group must be None for {dtype}, got {describe(group)}")
    return Format(dtype.name, dtype if dtype.isnative else dtype.newbyteorder("="))


def dequantized(numbers: Array, scale: Array | None) -> Array:
    """Return the numbers that arrays of a cache stand for."""
    if scale is None:
        return numbers
    if numbers.dtype != np.uint8:
        product: Array = numbers.astype(np.float32) * scale
        return product
    wide = np.stack([numbers & 15, numbers >> 4], axis=-1).astype(np.float32)
    groups = wide.reshape(*scale.shape[:-1], -1)
    whole: Array = groups * scale[..., :1].astype(np.float32) + scale[..., 1:].astype(np.float32)
    return whole.reshape(*numbers.shape[:-1], -1)


def quantize_kv(
    x: ArrayLike, dtype: DTypeLike, axis: int | tuple[int, ...] | None = None, *, group: int | None = None
) -> tuple[Array, NDArray[np.float32]]:
    """Quantize to 8 or 4 bits: return values and scales with ``x ≈ values * scale``, or ``values * scale + offset``.

    ::

        scale = largest |x| along the axis / 127        int8, to the nearest integer, ties to even
                largest |x| along the axis / 448        float8_e4m3fn
                largest |x| along the axis / 57344      float8_e5m2
                (largest - least x of a group) / 15     int4, whose offset is the least

    Parameters
    ----------
    x : array_like of floats
        float16, bfloat16, float32 or float64. It is read as float32 and must be finite there: NaN, infinity and
        anything beyond float32 raise a ValueError.
    dtype : dtype
        int8, ``ml_dtypes.float8_e4m3fn``, ``ml_dtypes.float8_e5m2`` or ``"int4"``.
    axis : int or tuple of int
        The axes that share a scale. For ``[B, T, Hkv, D]``, -1 makes one scale per token and head, and ``(0, 1)`` one
        per head and channel. Groups of int4 are along the last axis, so leave it out.
    group : int, optional
        The neighboring channels that share a scale and an offset in int4: 32, 64 (the default) or 128.

    Returns
    -------
    values : ndarray
        Same shape as `x`; int8 from -127 to 127. For int4 uint8 of shape ``[..., D / 2]``, which hold two numbers each:
        channel ``2 * j`` in the lower half of byte ``j``, and ``2 * j + 1`` in the upper.
    scale : ndarray of float32
        Same number of axes; those of `axis` have length 1. Finite and positive, and 1 where all numbers are 0. For int4
        ``[..., D / group, 2]``: scales and offsets.

    See Also
    --------
    KVCache : quantizes on append.

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
    >>> halves, scale = attnmask.quantize_kv(np.arange(64.0), "int4", group=32)
    >>> halves.shape, scale.tolist()
    ((32,), [[2.066666603088379, 0.0], [2.066666603088379, 32.0]])
    """
    given, target = as_array(x, "x"), format_of(dtype, group, floating=False)
    if not is_floating(given.dtype):
        raise TypeError(f"x must be of float16, bfloat16, float32 or float64, got {describe(given)}")
    if target.group:
        return _grouped(given, axis, target)
    axes = tuple(integer(each, "axis") for each in (axis if isinstance(axis, (tuple, list)) else (axis,)))
    axes = tuple(max(-given.ndim - 1, min(each, given.ndim)) for each in axes)  # NumPy takes 32 bits
    axes = normalize_axis_tuple(axes, given.ndim, "axis")
    if axes == (given.ndim - 1,):
        return _rows(given, given.shape, target, (*given.shape[:-1], 1))
    limit = np.float32(_LARGEST[target.name])
    with np.errstate(all="ignore"):
        wide = given.astype(np.float32, copy=False)
        largest = np.max(np.abs(wide), axis=axes, keepdims=True, initial=0)
        scale = np.array(largest / limit, np.float32, order="C")
        _check_finite(given, scale)
        scale[scale == 0] = 1
        values = np.divide(wide, scale, out=allocate(wide.shape, np.float32, "x"))
    # The scale of numbers near the least ones of float32 is rounded so much that a quotient can be beyond the limit.
    np.clip(values, -limit, limit, out=values)
    if target.dtype.kind == "i":
        np.rint(values, out=values)
    return values.astype(target.dtype), scale


def _check_finite(given: Array, scales: Array) -> None:
    if np.isfinite(scales).all():
        return
    wrong = np.argwhere(~np.isfinite(given.astype(np.float32)))
    if not len(wrong):
        raise ValueError("x must have numbers whose differences within a group fit float32")
    index = tuple(wrong[0].tolist())
    raise ValueError(f"x must be finite in float32, got {given[index]} at index {index}")


def _rows(
    given: Array, shape: tuple[int, ...], target: Format, of_scales: tuple[int, ...]
) -> tuple[Array, NDArray[np.float32]]:
    """Return values, and scales of rows along the last axis or of their groups."""
    values = allocate(shape, target.dtype, "x")
    scales: NDArray[np.float32] = allocate(of_scales, np.float32, "x")
    _core.quantize(given, values, scales)
    with np.errstate(all="ignore"):
        _check_finite(given, scales)
    return values, scales


def _grouped(given: Array, axis: object, target: Format) -> tuple[Array, NDArray[np.float32]]:
    """Return pairs of numbers of four bits, and scales and offsets."""
    if axis is not None and integer(axis, "axis") not in (-1, given.ndim - 1):
        raise ValueError(f"axis must be -1 or None for int4, got {describe(axis)}")
    channels = given.shape[-1] if given.ndim else 0
    target.check_channels(channels, "the last axis of x")
    *rows, _ = given.shape
    return _rows(given, (*rows, channels // 2), target, (*rows, *target.scales(channels)))


# Rotation


def check_rotates(channels: int, name: str) -> None:
    if channels < 1 or channels & (channels - 1):
        raise ValueError(f"{name} must be a power of two to be rotated, got {describe(channels)}")


def check_tokens_rotate(query: Array | JaxArray, v_cache: Array | JaxArray) -> None:
    """Check the channels of arrays, also of JAX's."""
    halves = 1 + (v_cache.dtype == np.uint8)
    for x, name, numbers in ((query, "query", 1), (v_cache, "v_cache", halves)):
        if x.ndim:
            check_rotates(x.shape[-1] * numbers, f"the channels of {name}")


def check_written(given: Given) -> None:
    """Check that outputs share no memory with tokens. The core sees rotated copies, and could not notice."""
    tokens = [(name, given[name]) for name in ("query", "key", "value") if given.get(name) is not None]
    for name in ("out", "k_cache", "v_cache", "k_scale", "v_scale") if given["key"] is not None else ("out",):
        written = given.get(name)
        if written is None or (name == "out" and not isinstance(written, np.ndarray)):
            continue
        array = as_array(written, name)
        if any(np.may_share_memory(array, x) for _, x in tokens):
            check_apart(array, tokens, name)


def check_not_latent(k_cache: Array, v_cache: Array) -> None:
    """Check that values are not some of the keys' channels, which rotating has mixed with the others."""
    if k_cache.ndim != 4 or v_cache.ndim != 4 or k_cache.shape[-1] == v_cache.shape[-1]:
        return
    begin, other = (x.__array_interface__["data"][0] for x in (k_cache, v_cache))
    axes = zip(k_cache.strides[:3], v_cache.strides[:3], k_cache.shape, strict=False)
    end = begin + k_cache.shape[-1] * k_cache.strides[-1]
    if min(begin, end) <= other < max(begin, end) and all(a == b for a, b, length in axes if length > 1):
        raise ValueError(
            "rotate must be False where v_cache is channels of k_cache, which are rotated together"
        )


def rotated(x: Array) -> Array:
    """Multiply the last axis by Sylvester's Hadamard matrix, divided by the root of its length: its own inverse.

    Sums are taken in pairs, so that a row has the same bits whatever else is in the array. Arrays that are not floats,
    or whose last axis is not a power of two, are returned unchanged.
    """
    if not (x.size and x.ndim and is_floating(x.dtype)) or x.shape[-1] & (x.shape[-1] - 1):
        return x
    channels, half = x.shape[-1], 1
    wide = np.float64 if x.dtype == np.float64 else np.float32
    sums: Array = np.array(x.reshape(-1, channels).T, wide, order="C")  # channels first: long vectors
    other, rows = np.empty_like(sums), sums.shape[1]
    while half < channels:
        pairs, both = (each.reshape(-1, 2, half * rows) for each in (sums, other))
        np.add(pairs[:, 0], pairs[:, 1], out=both[:, 0])
        np.subtract(pairs[:, 0], pairs[:, 1], out=both[:, 1])
        sums, other, half = other, sums, 2 * half
    sums *= wide(1 / math.sqrt(channels))
    return sums.T.astype(x.dtype, order="C").reshape(x.shape)


def rotated_tokens(key: Any, value: Any, rotate: AnyFunction) -> tuple[Any, Any]:
    """Return new keys and values, arrays or None, rotated by `rotate` without a query to compare them with."""
    if value is None:
        raise ValueError("value must be given with key and rotate=True, got None")
    for x, name in ((key, "key"), (value, "value")):
        if x is not None and x.ndim:
            check_rotates(x.shape[-1], f"the channels of {name}")
    return key if key is None else rotate(key), rotate(value)
