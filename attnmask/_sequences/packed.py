"""Lengths, positions and chunks of packed sequences: several sequences laid end to end in one row of tokens.

``cu_seqlens``, the running sum of their lengths, says where they start and end::

    tokens       a b c d e f g h i        three sequences: abc, de, fghi
    lengths      3     2   4
    cu_seqlens   0     3   5       9      one more entry than sequences

    positions    0 1 2 0 1 0 1 2 3        prepare_position_ids
    sequences    0 0 0 1 1 2 2 2 2        prepare_sequence_ids

An empty sequence keeps its number. Results have the integer type of ``cu_seqlens``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from attnmask._common.arguments import as_array, describe
from attnmask._common.loading import _core
from attnmask._common.types import Array, DType

_T = TypeVar("_T")


@overload
def cdiv(a: int, b: int) -> int: ...
@overload
def cdiv(a: ArrayLike, b: ArrayLike) -> NDArray[np.integer]: ...
def cdiv(a: ArrayLike, b: ArrayLike) -> int | NDArray[np.integer]:
    """Divide integers and round up: how many blocks of `b` cover `a`.

    Parameters
    ----------
    a : int or array_like of integers
        May be negative; -7 / 2 rounds up to -3.
    b : int or array_like of integers
        Positive. The two broadcast against each other.

    Returns
    -------
    int or ndarray
        An int of any size for two ints, otherwise an array of the type that NumPy gives the pair. Nothing overflows on
        the way.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> attnmask.cdiv(130, 64)
    3
    >>> attnmask.cdiv(np.array([-3, 0, 64, 65]), 64)
    array([0, 0, 1, 2])
    """
    if type(b) is int:
        if b < 1:
            raise ValueError(f"b must be positive, got {b}")
        if type(a) is int:
            return -(-a // b)
        b = min(b, 2**64 - 1)  # for the numbers of an array a larger divisor gives the same
    if type(a) is int and not -(2**63) <= a < 2**64:  # no integer type of NumPy holds it
        divisors = as_array(b, "b")
        _core.cdiv(0, divisors)  # raises if they are not positive integers
        quotients = [-(-a // int(divisor)) for divisor in divisors.flat]
        limits = np.iinfo(divisors.dtype)
        for index, quotient in enumerate(quotients):
            if not limits.min <= quotient <= limits.max:
                raise OverflowError(
                    f"a and b must have quotients that fit {divisors.dtype}, got {describe(quotient)} at index {index}"
                )
        return np.array(quotients, divisors.dtype).reshape(divisors.shape)[()]
    return _core.cdiv(a, b)


def prepare_lens(cu_seqlens: ArrayLike) -> NDArray[np.integer]:
    """Return the lengths of the sequences.

    Parameters
    ----------
    cu_seqlens : array_like of integers, shape [sequences + 1]
        Starts at 0 and never decreases.

    Returns
    -------
    ndarray, shape [sequences]

    Examples
    --------
    >>> import attnmask
    >>> attnmask.prepare_lens([0, 3, 5, 9])
    array([3, 2, 4])
    """
    return _core.prepare_lens(cu_seqlens)


def prepare_lens_from_mask(mask: ArrayLike) -> NDArray[np.int32]:
    """Return the number of tokens that a padding mask keeps in each row.

    Parameters
    ----------
    mask : array_like, shape [batch, length]
        bool, or numbers; nonzero marks a token. Read in place.

    Returns
    -------
    ndarray of int32, shape [batch]

    See Also
    --------
    prepare_cu_seqlens_from_mask : the running sum of these lengths.

    Examples
    --------
    >>> import attnmask
    >>> attnmask.prepare_lens_from_mask([[1, 1, 0], [1, 1, 1]])
    array([2, 3], dtype=int32)
    """
    return _core.prepare_lens_from_mask(mask)


def prepare_cu_seqlens_from_mask(mask: ArrayLike, out_dtype: DTypeLike = np.int32) -> NDArray[np.integer]:
    """Return where the rows of a padded batch start once they are packed without padding.

    Parameters
    ----------
    mask : array_like, shape [batch, length]
        bool, or numbers; nonzero marks a token. Read in place.
    out_dtype : dtype
        An integer type. OverflowError if the total does not fit it.

    Returns
    -------
    ndarray, shape [batch + 1]

    See Also
    --------
    MaskInfo.from_attention_mask : attention in the padded batch itself.

    Examples
    --------
    >>> import attnmask
    >>> attnmask.prepare_cu_seqlens_from_mask([[1, 1, 0], [1, 1, 1]])
    array([0, 2, 5], dtype=int32)
    """
    return _core.prepare_cu_seqlens_from_mask(mask, out_dtype)


def prepare_position_ids(cu_seqlens: ArrayLike) -> NDArray[np.integer]:
    """Return the position of each token in its own sequence, from 0.

    Parameters
    ----------
    cu_seqlens : array_like of integers, shape [sequences + 1]
        Starts at 0 and never decreases.

    Returns
    -------
    ndarray, shape [tokens]

    See Also
    --------
    positions_from_segment_ids : the same from segment ids.

    Examples
    --------
    >>> import attnmask
    >>> attnmask.prepare_position_ids([0, 3, 5, 9])
    array([0, 1, 2, 0, 1, 0, 1, 2, 3])
    """
    return _core.prepare_position_ids(cu_seqlens)


def prepare_sequence_ids(cu_seqlens: ArrayLike) -> NDArray[np.integer]:
    """Return the number of the sequence that each token belongs to.

    Parameters
    ----------
    cu_seqlens : array_like of integers, shape [sequences + 1]
        Starts at 0 and never decreases. Sequence ``i`` runs from ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]``; empty
        sequences are counted.

    Returns
    -------
    ndarray, shape [tokens]

    See Also
    --------
    segment_ids_to_cu_seqlens : the inverse.
    MaskInfo.from_cu_seqlens : the mask of the sequences.

    Examples
    --------
    >>> import attnmask
    >>> attnmask.prepare_sequence_ids([0, 2, 2, 5])
    array([0, 0, 2, 2, 2])
    """
    return _core.prepare_sequence_ids(cu_seqlens)


def prepare_token_indices(cu_seqlens: ArrayLike) -> NDArray[np.integer]:
    """Return the sequence number and the position in it, for each token.

    Parameters
    ----------
    cu_seqlens : array_like of integers, shape [sequences + 1]
        Starts at 0 and never decreases.

    Returns
    -------
    ndarray, shape [tokens, 2]
        Columns as in `prepare_sequence_ids` and `prepare_position_ids`.

    See Also
    --------
    prepare_chunk_indices : the same for chunks.

    Examples
    --------
    >>> import attnmask
    >>> attnmask.prepare_token_indices([0, 2, 5]).tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1], [1, 2]]
    """
    return _core.prepare_token_indices(cu_seqlens)


def prepare_chunk_indices(cu_seqlens: ArrayLike, chunk_size: int) -> NDArray[np.integer]:
    """Return the sequence number and the position in it, for each chunk.

    Each sequence is cut into chunks of `chunk_size` tokens from its start; its last chunk may be shorter.

    Parameters
    ----------
    cu_seqlens : array_like of integers, shape [sequences + 1]
        Starts at 0 and never decreases.
    chunk_size : int
        Tokens per chunk, at least 1.

    Returns
    -------
    ndarray, shape [chunks, 2]

    See Also
    --------
    prepare_chunk_offsets : where the chunks of each sequence start.

    Examples
    --------
    >>> import attnmask
    >>> attnmask.prepare_chunk_indices([0, 5, 7], 2).tolist()
    [[0, 0], [0, 1], [0, 2], [1, 0]]
    """
    return _core.prepare_chunk_indices(cu_seqlens, chunk_size)


def prepare_chunk_offsets(cu_seqlens: ArrayLike, chunk_size: int) -> NDArray[np.integer]:
    """Return the number of chunks before each sequence, and the total.

    Parameters
    ----------
    cu_seqlens : array_like of integers, shape [sequences + 1]
        Starts at 0 and never decreases.
    chunk_size : int
        Tokens per chunk, at least 1.

    Returns
    -------
    ndarray, shape [sequences + 1]
        The ``cu_seqlens`` of the chunks.

    See Also
    --------
    prepare_chunk_indices : the sequence number of each chunk.

    Examples
    --------
    >>> import attnmask
    >>> attnmask.prepare_chunk_offsets([0, 5, 7], 2)
    array([0, 3, 4])
    """
    return _core.prepare_chunk_offsets(cu_seqlens, chunk_size)


class _IdentityDtypeConvert(Generic[_T]):
    """What `identity_dtype_convert` returns."""

    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype

    def __call__(self, x: _T) -> _T:
        """Return `x` itself."""
        return x

    def vjp(self, x: _T) -> tuple[_T, Callable[[ArrayLike], Array]]:
        """Return `x` itself, and a function that casts a gradient to the chosen type."""

        def pullback(gradient: ArrayLike) -> Array:
            given = as_array(gradient, "gradient")
            try:
                return given.astype(self.dtype, copy=False)
            except (TypeError, ValueError, OverflowError):  # the last one for an integer of many digits
                raise TypeError(f"gradient must be numbers, got {describe(given)}") from None

        return x, pullback

    def __repr__(self) -> str:
        return f"identity_dtype_convert({self.dtype})"


def identity_dtype_convert(dtype: DTypeLike) -> _IdentityDtypeConvert[Any]:
    """Return a function that leaves its input alone and casts the gradient to `dtype`.

    Parameters
    ----------
    dtype : dtype
        dtype of the gradient.

    Returns
    -------
    callable
        ``f(x)`` returns `x`. ``f.vjp(x)`` returns `x` and a pullback that casts its argument to `dtype`.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> to_float32 = attnmask.identity_dtype_convert(np.float32)
    >>> x, pullback = to_float32.vjp(np.ones(2, np.float16))
    >>> x.dtype, pullback(x).dtype
    (dtype('float16'), dtype('float32'))
    """
    try:
        if dtype is not None:  # np.dtype(None) is float64
            return _IdentityDtypeConvert(np.dtype(dtype))
    except (TypeError, ValueError, SyntaxError):
        pass
    raise TypeError(f"dtype must be a dtype, got {dtype!r}")
