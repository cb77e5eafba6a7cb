"""Flash attention: memory is O(tokens), and fully masked tiles are skipped.

Arrays are ``[B, T, H, D]``: batch, tokens, heads, head_dim; or ``[T, H, D]`` for packed sequences; or they have more
batch axes. Keys and values may have fewer heads than queries, which then share them: query head ``h`` reads head
``h // (H // Hkv)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, SupportsIndex, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnmask._attention.arguments import FOR_GRADIENTS
from attnmask._attention.batch import Batch, folded, unfolded
from attnmask._attention.problem import Problem, check_out, read_problem
from attnmask._attention.terms import dropout_of
from attnmask._common.arguments import FARTHEST, as_array, describe, flag, integer
from attnmask._common.loading import _core
from attnmask._common.types import Arguments, Array


def _one_batch(out: ArrayLike, problem: Problem, batch: Batch) -> Array:
    """Return a view of `out` with one batch axis."""
    shape, dtype = (*batch, *problem.query.shape[1:3], problem.value.shape[3]), problem.query.dtype
    target: Array = np.asarray(out)
    if target.shape != shape or target.dtype.newbyteorder("=") != dtype:
        raise ValueError(f"out must be an array of {dtype} of shape {shape}, got {describe(target)}")
    view: Array = folded(target, batch)
    if target.size and not np.may_share_memory(view, target):
        expected = f"batch axes {batch} that one stride can step through"
        raise ValueError(
            f"out must have {expected}, got strides {target.strides}; leave it out for a new array"
        )
    return view


def attend(given: Arguments, return_lse: bool) -> tuple[Array, Array | None]:
    """Return attention and, if `return_lse`, the logsumexp. ``given["out"]`` takes the result unless it is None."""
    problem, batch = read_problem(given)
    return_lse = flag(return_lse, "return_lse")
    out = given["out"]
    if out is not None:
        check_out(out, given)
    if len(batch) == 1:
        return _core.flash_forward(problem, return_lse, out)
    result, lse = _core.flash_forward(
        problem, return_lse, None if out is None else _one_batch(out, problem, batch)
    )
    return unfolded(result, batch) if out is None else out, None if lse is None else unfolded(lse, batch)


Results: TypeAlias = tuple[Array, Array, Array]


def attend_for_gradients(given: Arguments) -> Results:
    """Return the results of `flash_attention_fwd`, and the result as gradients should take it: for 16-bit inputs a
    float32 copy that was not rounded, otherwise the same array.
    """
    usual: Results = _core.flash_usual_vjp(FOR_GRADIENTS.names, (), given)
    if usual is not NotImplemented:
        return usual
    problem, batch = read_problem(FOR_GRADIENTS.bind((), given))
    out, lse, wide_out = _core.flash_forward_vjp(problem)
    result = unfolded(out, batch)
    return result, unfolded(lse, batch), result if wide_out is out else unfolded(wide_out, batch)


def dropout_keep_mask(
    seed: int | None, prob: float, shape: tuple[SupportsIndex, ...], *, out: NDArray[np.bool_] | None = None
) -> NDArray[np.bool_]:
    """Return which weights `flash_attention` keeps under dropout.

    Each weight is drawn independently, from the seed and its position: a larger shape begins like a smaller one, and
    neither block sizes nor threads nor processors matter. In packed sequences, positions count from the start of the
    row.

    Parameters
    ----------
    seed : int or None
        `dropout_seed` of `flash_attention`.
    prob : float
        Its `dropout_prob`, at least 0 and below 1.
    shape : tuple of four int
        [B, H, Tq, Tk]
    out : ndarray of bool, optional
        Write the result here, and return it.

    Returns
    -------
    ndarray of bool, shape [B, H, Tq, Tk]

    Examples
    --------
    >>> import attnmask
    >>> keep = attnmask.dropout_keep_mask(7, 0.25, (1, 2, 100, 100))
    >>> bool(abs(keep.mean() - 0.75) < 0.02)
    True
    """
    chance, number = dropout_of(prob, seed, ("prob", "seed"))
    if not isinstance(shape, (tuple, list)) and not (isinstance(shape, np.ndarray) and shape.ndim == 1):
        raise TypeError(f"shape must be four integers, got {describe(shape)}")
    if len(shape) != 4:
        raise ValueError(f"shape must be four integers, got {len(shape)}")
    b, h, q, k = (integer(length, "shape", 0) for length in shape)
    if max(b, h, q, k) > FARTHEST:
        raise ValueError(f"shape must be at most {FARTHEST} along each axis, got {(b, h, q, k)}")
    return _core.dropout_keep_mask(number, chance, (b, h, q, k), out)


Parts: TypeAlias = Sequence[ArrayLike] | Array  # one a part, or a stack of them
Stacked: TypeAlias = tuple[Array, ...] | Array


def _parts(arrays: Parts, name: str) -> tuple[ArrayLike, ...] | Array:
    """Return a sequence of arrays as a tuple, or a stack of them as it is."""
    if isinstance(arrays, (tuple, list)):
        return tuple(arrays)
    stack = as_array(arrays, name)
    if stack.ndim == 0:
        raise TypeError(f"{name} must be a sequence of arrays, got {describe(arrays)}")
    return stack


def merge_attention_states(outs: Parts, lses: Parts) -> tuple[Array, Array]:
    """Merge attention over parts of the keys into attention over all of them.

    ::

        lse = log Σ_i exp(lse_i)          out = Σ_i exp(lse_i - lse) · out_i

    A part whose lse is -inf, or +inf as FlashAttention returns it, has no keys: its `out` is ignored, whatever it
    holds. NaN stays NaN. Parts must be normalized. Give sinks to one part only, or each part counts them.

    Parameters
    ----------
    outs : sequence of array_like, each of shape [B, T, H, D] or [T, H, D]; or an array of one axis more
        Results of `flash_attention` for each part, of one floating-point type.
    lses : sequence of array_like, each of shape [B, H, T] or [H, T]; or an array of one axis more
        One per part.

    Returns
    -------
    out : ndarray, shape [B, T, H, D] or [T, H, D]
        Same type as `outs`. Sums are computed in float32, or in float64 for float64.
    lse : ndarray, shape [B, H, T] or [H, T]
        float32, or float64 if `outs` are. Where all parts are -inf, it is -inf and `out` is zero.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> outs = np.array([1.0, 4.0]).reshape(2, 1, 1, 1)  # two parts, with two keys and one
    >>> lses = np.log([2.0, 1.0]).reshape(2, 1, 1)
    >>> out, lse = attnmask.merge_attention_states(outs, lses)
    >>> out.round(6).item(), np.exp(lse).round(6).item()
    (2.0, 3.0)
    """
    return _core.merge_attention_states(_parts(outs, "outs"), _parts(lses, "lses"))


class _MergeVjp(Protocol):
    def __call__(self, dout: ArrayLike, dlse: ArrayLike | None = None) -> tuple[Stacked, Stacked]: ...


def merge_attention_states_vjp(outs: Parts, lses: Parts) -> tuple[tuple[Array, Array], _MergeVjp]:
    """Return `merge_attention_states` and its gradient function.

    With each part's share, w_i = exp(lse_i - lse)::

        d out_i = w_i · d out          d lse_i = w_i · (d out · (out_i - out) + d lse)

    A part without keys, whose lse is -inf or +inf, gets zeros.

    Parameters
    ----------
    outs, lses
        As in `merge_attention_states`. They are kept, not copied: do not change them while you use `vjp`.

    Returns
    -------
    (out, lse) : tuple of two ndarray
        What `merge_attention_states` returns.
    vjp : callable
        ``vjp(dout)`` takes the gradient of `out`, in its type; ``vjp(dout, dlse)`` also takes that of `lse`. It returns
        the gradients of `outs` and `lses` in the types of `out` and `lse`: tuples with one array per part, or one
        stacked array if a stack was given.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> outs = np.array([1.0, 4.0]).reshape(2, 1, 1, 1)
    >>> lses = np.log([2.0, 1.0]).reshape(2, 1, 1)
    >>> (out, lse), vjp = attnmask.merge_attention_states_vjp(outs, lses)
    >>> douts, dlses = vjp(np.ones_like(out))
    >>> douts.ravel().round(3), dlses.ravel().round(3)
    (array([0.667, 0.333]), array([-0.667,  0.667]))
    """
    parts, weights = _parts(outs, "outs"), _parts(lses, "lses")
    merged = _core.merge_attention_states(parts, weights)

    def vjp(dout: ArrayLike, dlse: ArrayLike | None = None) -> tuple[Stacked, Stacked]:
        douts, dlses = _core.merge_backward(parts, weights, dout, dlse)
        return (
            tuple(douts) if isinstance(outs, (tuple, list)) else douts,
            tuple(dlses) if isinstance(lses, (tuple, list)) else dlses,
        )

    return merged, vjp
