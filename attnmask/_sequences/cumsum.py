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

from typing import Any

from attnmask._faces import sums as rows
from attnmask._faces.arrays import numpy_face


@numpy_face(rows.CHUNK_LOCAL_CUMSUM)
def chunk_local_cumsum(*args: Any, **given: Any) -> Any:
    """Return running sums within chunks of `chunk_size` tokens.

    Parameters
    ----------
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


@numpy_face(rows.CHUNK_GLOBAL_CUMSUM)
def chunk_global_cumsum(*args: Any, **given: Any) -> Any:
    """Return running sums over whole sequences.

    The error of float32 sums stays below 1e-6 of the sum of absolute values, however long the sequence.

    Parameters
    ----------
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


@numpy_face(rows.CHUNK_LOCAL_CUMSUM_SCALAR)
def chunk_local_cumsum_scalar(*args: Any, **given: Any) -> Any:
    """Apply `chunk_local_cumsum` to one number per head: `g` is ``[B, T, H]``.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> attnmask.chunk_local_cumsum_scalar(np.ones((1, 3, 1)), 2).ravel()
    array([1., 2., 1.])
    """


@numpy_face(rows.CHUNK_LOCAL_CUMSUM_VECTOR)
def chunk_local_cumsum_vector(*args: Any, **given: Any) -> Any:
    """Apply `chunk_local_cumsum` to one vector per head: `g` is ``[B, T, H, S]``.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> attnmask.chunk_local_cumsum_vector(np.ones((1, 3, 1, 2)), 2)[0, :, 0].tolist()
    [[1.0, 1.0], [2.0, 2.0], [1.0, 1.0]]
    """


@numpy_face(rows.CHUNK_GLOBAL_CUMSUM_SCALAR)
def chunk_global_cumsum_scalar(*args: Any, **given: Any) -> Any:
    """Apply `chunk_global_cumsum` to one number per head: `s` is ``[B, T, H]``.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> attnmask.chunk_global_cumsum_scalar(np.ones((1, 3, 1)), reverse=True).ravel()
    array([3., 2., 1.])
    """


@numpy_face(rows.CHUNK_GLOBAL_CUMSUM_VECTOR)
def chunk_global_cumsum_vector(*args: Any, **given: Any) -> Any:
    """Apply `chunk_global_cumsum` to one vector per head: `s` is ``[B, T, H, S]``.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> attnmask.chunk_global_cumsum_vector(np.ones((1, 2, 1, 2)), softmax_scale=0.5)[0, :, 0].tolist()
    [[0.5, 0.5], [1.0, 1.0]]
    """


@numpy_face(rows.CHUNK_LOCAL_CUMSUM_VJP)
def chunk_local_cumsum_vjp(*args: Any, **given: Any) -> Any:
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


@numpy_face(rows.CHUNK_GLOBAL_CUMSUM_VJP)
def chunk_global_cumsum_vjp(*args: Any, **given: Any) -> Any:
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
