"""Cumulative sums over time that restart at every chunk or sequence.

With ``T = 8``, ``chunk_size = 4`` and two packed sequences, ``cu_seqlens = [0, 5, 8]``::

    g                1 1 1 1 1 1 1 1
    global           1 2 3 4 5 6 7 8
    global, packed   1 2 3 4 5│1 2 3
    local            1 2 3 4│1 2 3 4
    local, packed    1 2 3 4│1│1 2 3     chunks count from the start of each sequence
    local, reverse   4 3 2 1│4 3 2 1

Arrays are ``[B, T, H]`` or ``[B, T, H, S]``, or with ``head_first`` ``[B, H, T]`` or ``[B, H, T, S]``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from attnmask._common.arguments import as_array, check_apart, flag
from attnmask._common.docstrings import with_parameters
from attnmask._common.loading import _core
from attnmask._common.types import Array

_PARAMETERS = """
    reverse : bool
        Sum from the end of each chunk or sequence to its start.
    softmax_scale : float, optional
        Multiply the sums by this.
    cu_seqlens : array_like of integers, shape [sequences + 1], optional
        The batch is one row of packed sequences, and sums restart at each. From 0 to T, never decreasing.
    head_first : bool
        Time is the third axis instead of the second.
    output_dtype : dtype, optional
        dtype of the result; defaults to the input's. float16 and bfloat16 are summed in float32, integers in int64. A
        result that does not fit is an OverflowError, and `out` then holds some of the sums.
    out : ndarray, optional
        Write the result here, and return it. It must have the result's shape and type, and share no memory with the
        inputs.
"""


def _check_rank(array: ArrayLike, name: str, rank: int, head_first: bool) -> None:
    # A subclass may override what np.ndim asks it for.
    ndim = np.ndarray.ndim.__get__(array) if isinstance(array, np.ndarray) else as_array(array, name).ndim
    if ndim != rank and ndim in (3, 4):  # the core refuses all other ranks
        layout = ("[B, H, T" if flag(head_first, "head_first") else "[B, T, H") + (
            ", S]" if rank == 4 else "]"
        )
        raise ValueError(f"{name} must be {layout}, got {ndim} dimensions")


@with_parameters(_PARAMETERS)
def chunk_local_cumsum(
    g: ArrayLike,
    chunk_size: int,
    reverse: bool = False,
    softmax_scale: float | None = None,
    cu_seqlens: ArrayLike | None = None,
    head_first: bool = False,
    output_dtype: DTypeLike | None = None,
    *,
    out: Array | None = None,
) -> Array:
    """Return running sums within chunks of `chunk_size` tokens.

    Parameters
    ----------
    g : array_like, shape [B, T, H] or [B, T, H, S]
        Read in place, whatever its strides.
    chunk_size : int
        A power of two. The last chunk of a sequence may be shorter.
    <parameters>

    Returns
    -------
    ndarray
        Same shape as `g`.

    See Also
    --------
    chunk_global_cumsum : sum over whole sequences.
    chunk_local_cumsum_vjp : also return the gradient.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> g = np.ones((1, 8, 1))
    >>> attnmask.chunk_local_cumsum(g, 4).ravel()
    array([1., 2., 3., 4., 1., 2., 3., 4.])
    >>> attnmask.chunk_local_cumsum(g, 4, reverse=True, cu_seqlens=[0, 5, 8]).ravel()
    array([4., 3., 2., 1., 1., 3., 2., 1.])
    """
    return _core.chunk_local_cumsum(
        g, chunk_size, reverse, softmax_scale, cu_seqlens, head_first, output_dtype, out
    )


@with_parameters(_PARAMETERS)
def chunk_global_cumsum(
    s: ArrayLike,
    reverse: bool = False,
    cu_seqlens: ArrayLike | None = None,
    softmax_scale: float | None = None,
    head_first: bool = False,
    output_dtype: DTypeLike | None = None,
    *,
    out: Array | None = None,
) -> Array:
    """Return running sums over whole sequences.

    The error of float32 sums stays below 1e-6 of the sum of absolute values, however long the sequence.

    Parameters
    ----------
    s : array_like, shape [B, T, H] or [B, T, H, S]
        Read in place, whatever its strides.
    <parameters>

    Returns
    -------
    ndarray
        Same shape as `s`.

    See Also
    --------
    chunk_local_cumsum : sum within chunks.
    chunk_global_cumsum_vjp : also return the gradient.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> s = np.arange(5).reshape(1, 5, 1)
    >>> attnmask.chunk_global_cumsum(s).ravel()
    array([ 0,  1,  3,  6, 10])
    >>> attnmask.chunk_global_cumsum(s, cu_seqlens=[0, 3, 5]).ravel()
    array([0, 1, 3, 3, 7])
    """
    return _core.chunk_global_cumsum(s, reverse, cu_seqlens, softmax_scale, head_first, output_dtype, out)


def chunk_local_cumsum_scalar(
    g: ArrayLike,
    chunk_size: int,
    reverse: bool = False,
    softmax_scale: float | None = None,
    head_first: bool = False,
    output_dtype: DTypeLike | None = None,
    *,
    cu_seqlens: ArrayLike | None = None,
    out: Array | None = None,
) -> Array:
    """Apply `chunk_local_cumsum` to one number per head: `g` is ``[B, T, H]``.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> attnmask.chunk_local_cumsum_scalar(np.ones((1, 3, 1)), 2).ravel()
    array([1., 2., 1.])
    """
    _check_rank(g, "g", 3, head_first)
    return _core.chunk_local_cumsum(
        g, chunk_size, reverse, softmax_scale, cu_seqlens, head_first, output_dtype, out
    )


def chunk_local_cumsum_vector(
    g: ArrayLike,
    chunk_size: int,
    reverse: bool = False,
    softmax_scale: float | None = None,
    head_first: bool = False,
    output_dtype: DTypeLike | None = None,
    *,
    cu_seqlens: ArrayLike | None = None,
    out: Array | None = None,
) -> Array:
    """Apply `chunk_local_cumsum` to one vector per head: `g` is ``[B, T, H, S]``.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> attnmask.chunk_local_cumsum_vector(np.ones((1, 3, 1, 2)), 2)[0, :, 0].tolist()
    [[1.0, 1.0], [2.0, 2.0], [1.0, 1.0]]
    """
    _check_rank(g, "g", 4, head_first)
    return _core.chunk_local_cumsum(
        g, chunk_size, reverse, softmax_scale, cu_seqlens, head_first, output_dtype, out
    )


def chunk_global_cumsum_scalar(
    s: ArrayLike,
    reverse: bool = False,
    cu_seqlens: ArrayLike | None = None,
    softmax_scale: float | None = None,
    head_first: bool = False,
    output_dtype: DTypeLike | None = None,
    *,
    out: Array | None = None,
) -> Array:
    """Apply `chunk_global_cumsum` to one number per head: `s` is ``[B, T, H]``.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> attnmask.chunk_global_cumsum_scalar(np.ones((1, 3, 1)), reverse=True).ravel()
    array([3., 2., 1.])
    """
    _check_rank(s, "s", 3, head_first)
    return _core.chunk_global_cumsum(s, reverse, cu_seqlens, softmax_scale, head_first, output_dtype, out)


def chunk_global_cumsum_vector(
    s: ArrayLike,
    reverse: bool = False,
    cu_seqlens: ArrayLike | None = None,
    softmax_scale: float | None = None,
    head_first: bool = False,
    output_dtype: DTypeLike | None = None,
    *,
    out: Array | None = None,
) -> Array:
    """Apply `chunk_global_cumsum` to one vector per head: `s` is ``[B, T, H, S]``.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> attnmask.chunk_global_cumsum_vector(np.ones((1, 2, 1, 2)), softmax_scale=0.5)[0, :, 0].tolist()
    [[0.5, 0.5], [1.0, 1.0]]
    """
    _check_rank(s, "s", 4, head_first)
    return _core.chunk_global_cumsum(s, reverse, cu_seqlens, softmax_scale, head_first, output_dtype, out)


def _floating(array: ArrayLike, name: str) -> Array:
    """Return `array` as an array; its type must have gradients."""
    array = as_array(array, name)
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        raise TypeError(f"{name} must be floating-point for gradients, got {array.dtype}")
    return array


def _pullback(sum_back: Callable[..., Array], primal: Array, name: str) -> Callable[[ArrayLike], Array]:
    """Return the gradient function of running sums: `sum_back` sums the incoming gradient in the other direction."""
    shape, dtype = primal.shape, primal.dtype.newbyteorder("=")

    def vjp(dout: ArrayLike) -> Array:
        dout = _floating(dout, "dout")
        if dout.shape != shape:
            raise ValueError(f"dout must have the shape {shape} of {name}, got {dout.shape}")
        return sum_back(dout, dtype)

    return vjp


def chunk_local_cumsum_vjp(
    g: ArrayLike,
    chunk_size: int,
    reverse: bool = False,
    softmax_scale: float | None = None,
    cu_seqlens: ArrayLike | None = None,
    head_first: bool = False,
    output_dtype: DTypeLike | None = None,
    *,
    out: Array | None = None,
) -> tuple[Array, Callable[[ArrayLike], Array]]:
    """Return `chunk_local_cumsum` and its gradient function.

    Parameters
    ----------
    g, chunk_size, reverse, softmax_scale, cu_seqlens, head_first, output_dtype, out
        As in `chunk_local_cumsum`; `g` must be floating-point.

    Returns
    -------
    out : ndarray
    vjp : callable
        Maps the gradient of `out` to that of `g`: the same sums in the other direction.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> out, vjp = attnmask.chunk_local_cumsum_vjp(np.ones((1, 4, 1)), 2)
    >>> vjp(np.ones((1, 4, 1))).ravel()
    array([2., 1., 2., 1.])
    """
    check_apart(out, (("g", g), ("cu_seqlens", cu_seqlens)))
    g = _floating(g, "g")
    if cu_seqlens is not None:
        # vjp may be called after the caller's array has changed.
        cu_seqlens = as_array(cu_seqlens, "cu_seqlens").copy()
    result = chunk_local_cumsum(
        g, chunk_size, reverse, softmax_scale, cu_seqlens, head_first, output_dtype, out=out
    )

    def sum_back(dout: ArrayLike, dtype: DTypeLike) -> Array:
        return chunk_local_cumsum(dout, chunk_size, not reverse, softmax_scale, cu_seqlens, head_first, dtype)

    return result, _pullback(sum_back, g, "g")


def chunk_global_cumsum_vjp(
    s: ArrayLike,
    reverse: bool = False,
    cu_seqlens: ArrayLike | None = None,
    softmax_scale: float | None = None,
    head_first: bool = False,
    output_dtype: DTypeLike | None = None,
    *,
    out: Array | None = None,
) -> tuple[Array, Callable[[ArrayLike], Array]]:
    """Return `chunk_global_cumsum` and its gradient function.

    Parameters
    ----------
    s, reverse, cu_seqlens, softmax_scale, head_first, output_dtype, out
        As in `chunk_global_cumsum`; `s` must be floating-point.

    Returns
    -------
    out : ndarray
    vjp : callable
        Maps the gradient of `out` to that of `s`: the same sums in the other direction.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> out, vjp = attnmask.chunk_global_cumsum_vjp(np.ones((1, 3, 1)))
    >>> vjp(np.ones((1, 3, 1))).ravel()
    array([3., 2., 1.])
    """
    check_apart(out, (("s", s), ("cu_seqlens", cu_seqlens)))
    s = _floating(s, "s")
    if cu_seqlens is not None:
        # vjp may be called after the caller's array has changed.
        cu_seqlens = as_array(cu_seqlens, "cu_seqlens").copy()
    result = chunk_global_cumsum(s, reverse, cu_seqlens, softmax_scale, head_first, output_dtype, out=out)

    def sum_back(dout: ArrayLike, dtype: DTypeLike) -> Array:
        return chunk_global_cumsum(dout, not reverse, cu_seqlens, softmax_scale, head_first, dtype)

    return result, _pullback(sum_back, s, "s")
