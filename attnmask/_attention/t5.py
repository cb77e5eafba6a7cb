"""Relative biases from T5's tables, whose rows are buckets of distances."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnmask._common.arguments import FARTHEST, allocate, as_array, describe, flag, integer, is_floating
from attnmask._common.types import Array

__all__ = ["t5_relative_bias", "t5_relative_bias_vjp"]


def _bucket(distances: Array, count: int, bidirectional: bool, max_distance: int) -> NDArray[np.intp]:
    """Return the bucket of each distance from a query to a key. Short distances have their own, longer ones share
    buckets, and all from `max_distance` on have the last. Keys after the query have the second half of the buckets if
    `bidirectional`, otherwise the bucket of distance 0.
    """
    first = np.zeros(distances.shape, np.intp)
    if bidirectional:
        count //= 2
        first[distances > 0] = count
        far = np.abs(distances)
    else:
        far = np.maximum(-distances, 0)
    exact = count // 2  # buckets of one distance each
    ratio = np.log(np.maximum(far, 1).astype(np.float32) / exact) / np.float32(np.log(max_distance / exact))
    shared = exact + (ratio * (count - exact)).astype(np.intp)
    buckets: NDArray[np.intp] = first + np.where(far < exact, far, np.minimum(shared, count - 1))
    return buckets


def _buckets_and_low(
    table: ArrayLike, q_len: int, kv_len: int, bidirectional: bool, max_distance: int
) -> tuple[Array, NDArray[np.intp], int]:
    array = as_array(table, "table")
    if not is_floating(array.dtype) or array.ndim != 2:
        raise TypeError(f"table must be floating-point numbers of shape [buckets, H], got {describe(array)}")
    both = flag(bidirectional, "bidirectional")
    least = 4 if both else 2
    if len(array) < least:
        raise ValueError(f"table must have at least {least} buckets, got {describe(array)}")
    exact = len(array) // least
    q_len, kv_len = integer(q_len, "q_len", 0), integer(kv_len, "kv_len", 0)
    farthest = min(integer(max_distance, "max_distance", exact + 1), FARTHEST)
    low, high = -min(max(q_len - 1, 0), farthest), min(max(kv_len - 1, 0), farthest)
    distances = allocate((high + 1 - low,), np.int64, "q_len and kv_len", lambda *_: np.arange(low, high + 1))
    return array, _bucket(distances, len(array), both, farthest), low


def t5_relative_bias(
    table: ArrayLike, q_len: int, kv_len: int, *, bidirectional: bool = True, max_distance: int = 128
) -> tuple[Array, int]:
    """Return T5's bias as `relative_bias` and `relative_low` for `flash_attention`.

    T5 learns one number per head and bucket. A bucket covers one distance between query and key, or several: the
    farther, the more. The bias of a pair is that of its distance's bucket.

    Parameters
    ----------
    table : array_like, shape [buckets, H]
        The weights of ``relative_attention_bias``, floating-point.
    q_len, kv_len : int
    bidirectional : bool
        Distinguish keys after the query from keys before it, as encoders do and decoders do not.
    max_distance : int
        All distances from here on share one bucket.

    Returns
    -------
    relative_bias : ndarray, shape [H, L]
    relative_low : int
        The distance from query to key that ``relative_bias[:, 0]`` applies to.

    See Also
    --------
    t5_relative_bias_vjp : also return the gradient.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> table = np.arange(8.0)[:, None]  # eight buckets, one head
    >>> bias, low = attnmask.t5_relative_bias(table, 4, 4)
    >>> bias, low
    (array([[2., 2., 1., 0., 5., 6., 6.]]), -3)
    >>> x = np.ones((1, 4, 1, 8))
    >>> attnmask.flash_attention(x, x, x, relative_bias=bias, relative_low=low).shape
    (1, 4, 1, 8)
    """
    array, buckets, low = _buckets_and_low(table, q_len, kv_len, bidirectional, max_distance)
    return np.ascontiguousarray(array[buckets].T), low


def t5_relative_bias_vjp(
    table: ArrayLike, q_len: int, kv_len: int, *, bidirectional: bool = True, max_distance: int = 128
) -> tuple[tuple[Array, int], Callable[[ArrayLike], Array]]:
    """Return `t5_relative_bias` and its gradient function.

    Parameters
    ----------
    table, q_len, kv_len, bidirectional, max_distance
        As in `t5_relative_bias`.

    Returns
    -------
    relative_bias : tuple of ndarray and int
        What `t5_relative_bias` returns.
    vjp : callable
        Maps the gradient of ``relative_bias``, shape [H, L], to that of `table`.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> (bias, low), vjp = attnmask.t5_relative_bias_vjp(np.zeros((8, 1)), 4, 4)
    >>> vjp(np.ones_like(bias)).ravel()
    array([1., 1., 2., 0., 0., 1., 2., 0.])
    """
    array, buckets, low = _buckets_and_low(table, q_len, kv_len, bidirectional, max_distance)
    result = np.ascontiguousarray(array[buckets].T), low

    def vjp(dbias: ArrayLike) -> Array:
        given = as_array(dbias, "dbias")
        if given.shape != result[0].shape:
            raise ValueError(f"dbias must be of shape {result[0].shape}, got {describe(given)}")
        sums = np.zeros(array.shape)
        np.add.at(sums, buckets, given.T.astype(np.float64))
        return sums.astype(array.dtype)

    return result, vjp
