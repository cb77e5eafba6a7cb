"""The functions of attnmask in NumPy: written to be read, not to be fast.

Integers are Python's own, so nothing overflows on the way, and a result is checked once, when it is converted to its
dtype. Floating-point sums are taken in float64, one addition per step. The tests compare the package with these
functions, and a reader who wonders what a function means finds the answer here.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np


def native(dtype) -> np.dtype:
    """`dtype` in this machine's byte order, which all results have."""
    dtype = np.dtype(dtype)
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def fitted(values, dtype) -> np.ndarray:
    """`values`, which are exact Python integers, as an array of an integer dtype."""
    values, dtype = np.asarray(values, dtype=object), native(dtype)
    limits = np.iinfo(dtype)
    for index in map(tuple, np.argwhere((values < limits.min) | (values > limits.max))):
        raise OverflowError(f"{values[index]} at {index} does not fit {dtype}")
    return values.astype(dtype)


# Packed sequences: sequence i holds the tokens cu_seqlens[i] <= t < cu_seqlens[i + 1].


def cdiv(a, b):
    """a / b, rounded up. Two Python integers give a Python integer, anything else gives NumPy's kind."""
    if type(a) is int and type(b) is int:
        return -(-a // b)
    dtypes = [np.asarray(operand).dtype for operand in (a, b) if type(operand) is not int]
    a, b = np.asarray(a).astype(object), np.asarray(b).astype(object)
    return fitted(-(-a // b), np.result_type(*dtypes))[()]


def prepare_lens(cu_seqlens) -> np.ndarray:
    """The number of tokens of each sequence."""
    cu_seqlens = np.asarray(cu_seqlens)
    ends = cu_seqlens.tolist()
    return fitted([end - start for start, end in pairwise(ends)], cu_seqlens.dtype)


def prepare_position_ids(cu_seqlens) -> np.ndarray:
    """The position of each token in its own sequence."""
    places = [place for length in prepare_lens(cu_seqlens).tolist() for place in range(length)]
    return fitted(places, np.asarray(cu_seqlens).dtype)


def prepare_sequence_ids(cu_seqlens) -> np.ndarray:
    """The sequence of each token. A sequence of length zero keeps its index, which no token has."""
    ids = [index for index, length in enumerate(prepare_lens(cu_seqlens).tolist()) for _ in range(length)]
    return fitted(ids, np.asarray(cu_seqlens).dtype)


def prepare_token_indices(cu_seqlens) -> np.ndarray:
    """One row per token: its sequence, and its position there."""
    return np.stack([prepare_sequence_ids(cu_seqlens), prepare_position_ids(cu_seqlens)], axis=1)


def prepare_chunk_indices(cu_seqlens, chunk_size: int) -> np.ndarray:
    """One row per chunk: its sequence, and its position among the chunks of that sequence."""
    rows = [
        (index, chunk)
        for index, length in enumerate(prepare_lens(cu_seqlens).tolist())
        for chunk in range(cdiv(length, chunk_size))
    ]
    return fitted(rows, np.asarray(cu_seqlens).dtype).reshape(-1, 2)


def prepare_chunk_offsets(cu_seqlens, chunk_size: int) -> np.ndarray:
    """The number of chunks before each sequence, and at the end the number of all chunks."""
    offsets = [0]
    for length in prepare_lens(cu_seqlens).tolist():
        offsets.append(offsets[-1] + cdiv(length, chunk_size))
    return fitted(offsets, np.asarray(cu_seqlens).dtype)


def prepare_lens_from_mask(mask) -> np.ndarray:
    """The number of entries of each row that are not zero (NaN is not zero)."""
    return fitted([sum(entry != 0 for entry in row.tolist()) for row in np.asarray(mask)], np.int32)


def prepare_cu_seqlens_from_mask(mask, out_dtype=np.int32) -> np.ndarray:
    """The cumulative sums of the rows' counts, beginning with zero."""
    cu_seqlens = [0]
    for length in prepare_lens_from_mask(mask).tolist():
        cu_seqlens.append(cu_seqlens[-1] + length)
    return fitted(cu_seqlens, out_dtype)


def identity_dtype_convert(dtype) -> Callable:
    """Returns a function that changes nothing; only gradients that pass back through it are converted to `dtype`."""

    def identity(x):
        return x

    identity.vjp = lambda x: (x, lambda g: np.asarray(g).astype(dtype))
    return identity


# Cumulative sums along time: axis 1 of [B, T, H] and [B, T, H, S], axis 2 of [B, H, T] and [B, H, T, S].


def chunk_local_cumsum(
    g, chunk_size, reverse=False, softmax_scale=None, cu_seqlens=None, head_first=False, output_dtype=None
) -> np.ndarray:
    """Sums that restart at every sequence, and every `chunk_size` steps after a sequence's start."""
    steps = np.shape(g)[2 if head_first else 1]
    pieces = [
        (begin, min(begin + chunk_size, end))
        for start, end in _sequences(steps, cu_seqlens)
        for begin in range(start, end, chunk_size)
    ]
    return _sums(g, pieces, reverse, softmax_scale, head_first, output_dtype)


def chunk_global_cumsum(
    s, reverse=False, cu_seqlens=None, softmax_scale=None, head_first=False, output_dtype=None
) -> np.ndarray:
    """Sums that restart at every sequence only."""
    steps = np.shape(s)[2 if head_first else 1]
    return _sums(s, _sequences(steps, cu_seqlens), reverse, softmax_scale, head_first, output_dtype)


def chunk_local_cumsum_vjp(
    g, chunk_size, reverse=False, softmax_scale=None, cu_seqlens=None, head_first=False, output_dtype=None
) -> tuple[np.ndarray, Callable]:
    """The sums, and a function that turns their gradient into that of g.

    An entry of g is in every sum from its own step on, so its gradient is the sum of their gradients: the cumulative
    sum in the other direction.
    """
    shared = (softmax_scale, cu_seqlens, head_first)
    out = chunk_local_cumsum(g, chunk_size, reverse, *shared, output_dtype)
    return out, lambda dout: chunk_local_cumsum(dout, chunk_size, not reverse, *shared, np.asarray(g).dtype)


def chunk_global_cumsum_vjp(
    s, reverse=False, cu_seqlens=None, softmax_scale=None, head_first=False, output_dtype=None
) -> tuple[np.ndarray, Callable]:
    """As `chunk_local_cumsum_vjp`."""
    shared = (cu_seqlens, softmax_scale, head_first)
    out = chunk_global_cumsum(s, reverse, *shared, output_dtype)
    return out, lambda dout: chunk_global_cumsum(dout, not reverse, *shared, np.asarray(s).dtype)


def _sequences(steps: int, cu_seqlens) -> Iterator[tuple[int, int]]:
    ends = [0, steps] if cu_seqlens is None else np.asarray(cu_seqlens).tolist()
    return pairwise(ends)


def _sums(g, pieces, reverse: bool, scale: float | None, head_first: bool, output_dtype) -> np.ndarray:
    g = np.asarray(g)
    output_dtype = native(g.dtype if output_dtype is None else output_dtype)
    exact = g.dtype.kind in "iu"
    wide = g.astype(object if exact else np.float64)
    by_time = np.moveaxis(wide, 2 if head_first else 1, 0)
    sums = np.empty_like(by_time)
    for begin, end in pieces:
        piece = slice(begin, end)
        if reverse:
            sums[piece] = np.cumsum(by_time[piece][::-1], axis=0)[::-1]
        else:
            sums[piece] = np.cumsum(by_time[piece], axis=0)
    sums = np.moveaxis(sums, 0, 2 if head_first else 1)

    if exact:
        sums = fitted(sums, np.int64)
    if scale is not None:
        sums = sums.astype(np.float64) * float(scale)
    if output_dtype.kind in "iu":
        whole = np.vectorize(_whole, otypes=[object])
        return fitted(whole(sums) if sums.dtype.kind == "f" else sums, output_dtype)
    return sums.astype(output_dtype)


def _whole(value) -> int:
    if not np.isfinite(value):
        raise OverflowError(f"{value} is no integer")
    return int(value)
