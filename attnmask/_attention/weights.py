"""The weights of attention, and what they tell: of chosen queries, without an array of all pairs."""

from __future__ import annotations

from typing import Literal, NamedTuple, SupportsIndex, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnmask._attention.arguments import (
    ATTENTION_STATISTICS,
    ATTENTION_WEIGHTS,
    DEFAULTS,
)
from attnmask._attention.backward import of_rows
from attnmask._attention.batch import unfolded
from attnmask._attention.problem import Problem, read_problem
from attnmask._common.arguments import (
    as_array,
    describe,
    fields_in_a_line,
    integer,
    integer_array,
    one_of,
    wide_dtype,
)
from attnmask._common.loading import _core
from attnmask._common.types import Arguments, Array

Queries: TypeAlias = SupportsIndex | slice | ArrayLike | None
Statistic: TypeAlias = Literal["key_sum", "entropy", "max_logit"] | tuple[Literal["top_keys"], int]

_OF = ("key_sum", "entropy", "max_logit", "top_keys")


class AttentionStatistics(NamedTuple):
    """Statistics of the weights of attention. A field is None unless `of` names it.

    Parameters
    ----------
    key_sum : ndarray or None, shape [B, H, Tk]
        The weight that each key gets from the chosen queries; [B, Hkv, Tk] with ``heads="key"``.
    entropy : ndarray or None, shape [B, H, n]
        The entropy of each query's weights, in nats.
    max_logit : ndarray or None, shape [B, H, n]
        The greatest logit of each query; -inf where it has no key.
    top_keys : ndarray of int64 or None, shape [B, H, n, count]
        The keys of the greatest weights, the greatest first, of equal ones the lower key; -1 where there are fewer.
    top_weights : ndarray or None, shape [B, H, n, count]
        Their weights; 0 where there are fewer.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> x = np.ones((1, 2, 1, 8))
    >>> attnmask.attention_statistics(x, x, of="entropy").entropy.round(3).tolist()
    [[[0.693, 0.693]]]
    """

    key_sum: Array | None = None
    entropy: Array | None = None
    max_logit: Array | None = None
    top_keys: NDArray[np.int64] | None = None
    top_weights: Array | None = None

    def __repr__(self) -> str:
        return fields_in_a_line(self)


def as_slice(queries: object) -> slice | None:
    """Return the slice that an integer stands for, or None; None if `queries` are an array."""
    if queries is None or isinstance(queries, slice):
        return queries or slice(None)
    is_integer = isinstance(queries, int)
    if not is_integer and not isinstance(queries, np.ndarray) and hasattr(queries, "__index__"):
        is_integer = len(getattr(queries, "shape", ())) == 0  # a tensor may have it
    if not is_integer:
        return None
    first = integer(queries, "queries")
    if first >= 0:
        raise ValueError(
            f"queries must be [{first}] for that one, or -{first} for the last {first}, got {queries}"
        )
    return slice(first, None)


def chosen_queries(queries: object, count: int) -> NDArray[np.int64]:
    """Return the indices of the chosen queries, as they are given."""
    part = as_slice(queries)
    if part is not None:
        return np.arange(count)[part]
    array = integer_array(queries, "queries")
    if array.ndim != 1:
        raise ValueError(f"queries must be one axis of indices, got {describe(array)}")
    chosen = np.where(array < 0, array + count, array).astype(np.int64)
    beyond = np.flatnonzero((chosen < 0) | (chosen >= count))
    if beyond.size:
        raise ValueError(
            f"queries must be below {count}, the number of queries, got {array[beyond[0]]} at index {beyond[0]}"
        )
    if np.unique(chosen).size != chosen.size:
        raise ValueError(f"queries must name each query once, got {describe(array)}")
    return chosen


def wanted(of: object) -> tuple[tuple[str, ...], int]:
    """Return the names of statistics, and the number of top keys."""
    several = isinstance(of, (tuple, list)) and not (len(of) == 2 and isinstance(of[1], SupportsIndex))
    names, top = [], 0
    for one in of if several else (of,):  # type: ignore[attr-defined]
        name, count = one if isinstance(one, (tuple, list)) and len(one) == 2 else (one, None)
        one_of(name, "of", _OF)
        if count is not None:
            one_of(name, "of", _OF[3:])
            top = integer(count, "of")
        elif name == "top_keys":
            raise ValueError('of must say how many top_keys, got "top_keys"; write ("top_keys", 16)')
        if name == "top_keys" and top < 1:
            raise ValueError(f'of must ask for at least 1 of top_keys, got ("top_keys", {top})')
        names.append(str(name))
    return tuple(names), top


def asked(given: Arguments) -> tuple[tuple[str, ...], int, bool]:
    """Return the names of statistics, the number of top keys, and whether sums are by key head."""
    one_of(given["heads"], "heads", ("query", "key"))
    return *wanted(given["of"]), given["heads"] == "key"


def _found(
    problem: Problem,
    lse: Array | None,
    chosen: NDArray[np.int64],
    names: tuple[str, ...],
    top: int,
    by_key: bool,
) -> list[Array | None]:
    """Return weights, key_sum, entropy, max_logit, top_keys and top_weights; queries are in the order of `chosen`."""
    rising = chosen.size < 2 or bool((chosen[1:] > chosen[:-1]).all())
    order = None if rising else np.argsort(chosen)
    in_order = np.ascontiguousarray(chosen if order is None else chosen[order])
    if lse is not None:
        lse = np.ascontiguousarray(lse if in_order.size == lse.shape[2] else lse[:, :, in_order])
    found = _core.flash_weights(problem, lse, in_order, names, top, by_key)
    if order is None:
        return list(found)
    places, of_keys = np.argsort(order), 1
    return [x if x is None or i == of_keys else np.take(x, places, axis=2) for i, x in enumerate(found)]


def _read(given: Arguments) -> tuple[Problem, tuple[int, ...], NDArray[np.int64]]:
    """Return the problem without values, its batch axes and the chosen queries."""
    key = as_array(given["key"], "key")
    problem, batch = read_problem(DEFAULTS | given | {"value": key[..., :0] if key.ndim else key})
    return problem, batch, chosen_queries(given["queries"], problem.query.shape[1])


def weights(args: tuple[object, ...], given: Arguments) -> Array:
    """Return what `attention_weights` returns."""
    given = ATTENTION_WEIGHTS.bind(args, given)
    problem, batch, chosen = _read(given)
    found: Array = unfolded(_found(problem, None, chosen, ("weights",), 0, False)[0], batch)
    return found


def statistics(args: tuple[object, ...], given: Arguments) -> AttentionStatistics:
    """Return what `attention_statistics` returns."""
    given = ATTENTION_STATISTICS.bind(args, given)
    names, top, by_key = asked(given)
    problem, batch, chosen = _read(given)
    lse = given["lse"]
    if lse is not None:
        rows = *batch, problem.query.shape[2], problem.query.shape[1]
        lse = of_rows(lse, "lse", rows, wide_dtype(problem.query.dtype), batch)
    found = _found(problem, lse, chosen, names, top, by_key)[1:]
    return AttentionStatistics(*(None if x is None else unfolded(x, batch) for x in found))
