"""Convert between padded batches and packed sequences, as arrays, PyTorch tensors or JAX arrays::

x         a b c . .       pack       a b c d e f g h        cu_seqlens 0 3 4 8
          d . . . .       ->
          e f g h .       <- unpack
"""

from __future__ import annotations

import operator
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnmask._attention.problem import starts_of
from attnmask._common.arguments import as_array, describe, integer, integer_array, is_floating, mask_array
from attnmask._common.array_kinds import any_array, cast, like, put, taken
from attnmask._common.types import Array
from attnmask._sequences import packed as packing

_Array = TypeVar("_Array")
_Scalar = TypeVar("_Scalar", bound=np.generic)


@overload
def pack(x: NDArray[_Scalar], lengths: ArrayLike) -> tuple[NDArray[_Scalar], NDArray[np.int32]]: ...
@overload
def pack(x: _Array, lengths: ArrayLike) -> tuple[_Array, _Array]: ...
def pack(x: Any, lengths: ArrayLike) -> Any:
    """Remove the padding of a batch, and lay its tokens end to end.

    Parameters
    ----------
    x : array_like, Tensor or jax.Array, shape [B, T, ...]
        Anything with one entry per token: ids, embeddings, queries, keys.
    lengths : array_like of integers, shape [B], or of bool or numbers, shape [B, T]
        The number of tokens in each row, before its padding; or a padding mask, nonzero for tokens, wherever they are.

    Returns
    -------
    packed : ndarray, Tensor or jax.Array, shape [total, ...]
        A copy. Gradients of PyTorch and JAX flow through it.
    cu_seqlens : ndarray, Tensor or jax.Array of int32, shape [B + 1]
        Where each row starts and ends in it.

    See Also
    --------
    unpack : the inverse.
    MaskInfo.from_lengths : the mask of the padded batch itself.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> x = np.array([[1, 2, 3, 0, 0], [4, 0, 0, 0, 0], [5, 6, 7, 8, 0]])
    >>> packed, cu_seqlens = attnmask.pack(x, [3, 1, 4])
    >>> packed, cu_seqlens
    (array([1, 2, 3, 4, 5, 6, 7, 8]), array([0, 3, 4, 8], dtype=int32))
    >>> attnmask.unpack(packed, cu_seqlens, 5)
    array([[1, 2, 3, 0, 0],
           [4, 0, 0, 0, 0],
           [5, 6, 7, 8, 0]])
    """
    array = any_array(x, "x")
    if array.ndim < 2:
        raise ValueError(f"x must be [B, T, ...], got {describe(array)}")
    rows, tokens = (int(length) for length in array.shape[:2])
    given = as_array(lengths, "lengths")
    if given.ndim == 2:
        starts, places = _of_mask(given, (rows, tokens))
    else:
        starts, places = _of_lengths(lengths, (rows, tokens))
    if type(array) is np.ndarray and not array.flags.c_contiguous:  # read in place, whatever its strides
        return np.ascontiguousarray(array[np.divmod(places, max(tokens, 1))]), starts
    return taken(array.reshape(rows * tokens, *array.shape[2:]), places, 0), like(array, starts)


def _of_mask(mask: Array, shape: tuple[int, int]) -> tuple[Array, NDArray[np.int64]]:
    """Return the cu_seqlens, and the positions of the tokens over all rows."""
    if mask.shape != shape:
        raise ValueError(f"lengths must be a mask of shape {shape} as x, or [B], got {describe(mask)}")
    live = mask_array(mask, "lengths") != 0
    return packing.prepare_cu_seqlens_from_mask(live), np.flatnonzero(live)


def _of_lengths(lengths: ArrayLike, shape: tuple[int, int]) -> tuple[Array, NDArray[np.int64]]:
    rows, tokens = shape
    given = integer_array(lengths, "lengths").copy()
    if given.shape != (rows,):
        raise ValueError(
            f"lengths must be of shape ({rows},), or a mask of shape {shape}, got {describe(given)}"
        )
    outside = (given < 0) | (given > tokens)
    if outside.any():
        index = int(outside.argmax())
        limit = "at least 0" if given[index] < 0 else f"at most {tokens}, the tokens of x"
        raise ValueError(f"lengths must be {limit}, got {given[index]} at index {index}")
    starts = np.append(0, np.cumsum(given, dtype=np.int64))
    if starts[-1] > np.iinfo(np.int32).max:
        raise OverflowError(f"cu_seqlens do not fit int32: there are {starts[-1]} tokens")
    return starts.astype(np.int32), _places(starts, tokens)


def _places(starts: NDArray[np.int64], tokens: int) -> NDArray[np.int64]:
    """Return where packed tokens lie in rows of `tokens` each."""
    before = np.arange(len(starts) - 1) * tokens - starts[:-1]
    return np.arange(starts[-1]) + np.repeat(before, np.diff(starts))


@overload
def unpack(
    packed: NDArray[_Scalar], cu_seqlens: ArrayLike, max_len: int, fill: complex | np.number = 0
) -> NDArray[_Scalar]: ...
@overload
def unpack(packed: _Array, cu_seqlens: ArrayLike, max_len: int, fill: complex | np.number = 0) -> _Array: ...
def unpack(packed: Any, cu_seqlens: ArrayLike, max_len: int, fill: Any = 0) -> Any:
    """Return a padded batch with one row per packed sequence.

    Parameters
    ----------
    packed : array_like, Tensor or jax.Array, shape [total, ...]
    cu_seqlens : array_like of integers, shape [B + 1]
        Where sequences start and end.
    max_len : int
        The length of a row; ValueError if a sequence is longer.
    fill : number
        The value of padding; ValueError if the type of `packed` cannot hold it.

    Returns
    -------
    ndarray, Tensor or jax.Array, shape [B, max_len, ...]
        A copy. Gradients of PyTorch and JAX flow through it.

    See Also
    --------
    pack : the inverse.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> attnmask.unpack(np.array([1, 2, 3, 4]), [0, 3, 4], max_len=3, fill=-1)
    array([[ 1,  2,  3],
           [ 4, -1, -1]])
    """
    array = any_array(packed, "packed")
    if array.ndim < 1:
        raise ValueError(f"packed must be [total, ...], got {describe(array)}")
    starts = starts_of(cu_seqlens, "cu_seqlens", int(array.shape[0])).astype(np.int64)
    room, lengths = integer(max_len, "max_len", 0), np.diff(starts)
    if lengths.size and lengths.max() > room:
        index = int(lengths.argmax())
        raise ValueError(
            f"max_len must be at least {lengths[index]}, the length of sequence {index}, got {room}"
        )
    number = held(fill, array)
    rows = len(lengths)
    if rows * room >= 2**63:
        raise MemoryError(f"{rows} rows of {describe(room)} tokens do not fit in memory: max_len")
    padded = put(array, _places(starts, room), rows * room, number)
    return padded.reshape(rows, room, *array.shape[1:])


def _number(value: Any) -> Any:
    """Return a Python number."""
    if isinstance(value, (bool, float, complex)):
        return value
    try:
        return operator.index(value)
    except TypeError:
        given = as_array(value, "fill")
    if given.ndim or not (given.dtype.kind in "biufc" or is_floating(given.dtype)):
        raise TypeError(f"fill must be a number, got {describe(value)}")
    return given.item()


def held(fill: Any, array: Any) -> Any:
    """Return `fill`, a number that the type of `array` can hold, at least rounded."""
    number = _number(fill)
    try:
        result = cast(array, number)
    except (RuntimeError, ValueError, OverflowError, TypeError):
        result = None
    if result == number or (result != result and number != number):
        return number
    rounded = isinstance(result, (float, complex)) and np.isfinite(result)
    if not (rounded and (isinstance(number, int) or np.isfinite(number))):
        name = str(array.dtype).removeprefix("torch.")
        raise ValueError(f"fill must be a number that {name} holds, got {describe(number)}")
    return number
