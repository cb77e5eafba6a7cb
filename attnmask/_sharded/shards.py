"""Divide a sequence among processes and put it together again: NumPy arrays, PyTorch tensors and JAX arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnmask._attention.problem import starts_of
from attnmask._common.arguments import as_array, describe, integer, place
from attnmask._common.array_kinds import any_array, concatenated, taken
from attnmask._faces.habits import ask
from attnmask._masks.info import MaskInfo
from attnmask._sharded.plan import ShardPlan, layout_plan, processes

__all__ = ["ShardPlan", "plan_shards", "shard_sequence", "unshard_sequence"]

_Array = TypeVar("_Array")


def _array(x: Any, name: str) -> Any:
    if isinstance(x, MaskInfo):
        hint = "write mask[:, :, begin:end, :] for a part of its queries"
        raise ValueError(f"{name} must have an axis of tokens, got {describe(x)}; {hint}")
    return any_array(x, name)


def token_axis(x: Any, name: str, axis: int | None) -> int:
    """Return the axis of tokens, counted from 0."""
    axes: int = x.ndim
    if axes == 0:
        raise ValueError(f"{name} must have an axis of tokens, got {describe(x)}")
    if axis is None:
        return min(1, axes - 1)
    number = integer(axis, "axis")
    if not -axes <= number < axes:
        raise IndexError(f"axis must be from {-axes} to {axes - 1} as {name} has {axes}, got {number}")
    return number % axes


def shard_sequence(
    x: _Array,
    world: int,
    rank: int,
    layout: str | ShardPlan = "zigzag",
    cu_seqlens: ArrayLike | None = None,
    *,
    axis: int | None = None,
) -> _Array:
    """Return the tokens of one process out of several.

    ::

        contiguous, 2 processes            zigzag, 2 processes

        tokens   0 1 2 3 4 5 6 7           tokens   0 1 2 3 4 5 6 7
        process  0 0 0 0 1 1 1 1           process  0 0 1 1 1 1 0 0

    Contiguous: chunk i of `world` is from token ``T * i // world`` to before ``T * (i + 1) // world``, and process i
    has it. Zigzag: of ``2 * world`` chunks process i has two, i and ``2 * world - 1 - i``. Then all of them have the
    same work under a causal mask, where later queries see more keys.

    Parameters
    ----------
    x : array_like, Tensor or jax.Array
        Anything with one entry per token: embeddings, queries, keys, ids, positions, token masks.
    world : int
        The number of processes.
    rank : int
        The process, counted from 0.
    layout : {"zigzag", "contiguous"} or ShardPlan
    cu_seqlens : array_like of integers, shape [sequences + 1], optional
        Starts of packed sequences, each divided on its own: from 0 to T, never decreasing. A plan needs none.
    axis : int, optional
        The axis of tokens: defaults to 1, or to 0 if there is only one axis. Packed ``[total, H, D]`` needs ``axis=0``.

    Returns
    -------
    ndarray, Tensor or jax.Array
        A copy, in sequence order.

    See Also
    --------
    unshard_sequence : the inverse.
    plan_shards : make a layout for documents of different lengths.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> attnmask.shard_sequence(np.arange(8), 2, 0), attnmask.shard_sequence(np.arange(8), 2, 1)
    (array([0, 1, 6, 7]), array([2, 3, 4, 5]))
    >>> attnmask.shard_sequence(np.arange(8), 2, 0, "contiguous", cu_seqlens=[0, 2, 8])
    array([0, 2, 3, 4])
    >>> attnmask.shard_sequence(np.zeros((1, 8, 32)), 2, 0).shape  # embeddings
    (1, 4, 32)
    >>> attnmask.shard_sequence(np.zeros((8, 4, 32)), 2, 0, axis=0).shape  # packed queries
    (4, 4, 32)
    """
    array: Any = _array(x, "x")
    given = None if cu_seqlens is None else as_array(cu_seqlens, "cu_seqlens")
    ask("tokens to divide", tuple(array.shape), axis, given)
    tokens = token_axis(array, "x", axis)
    length = array.shape[tokens]
    count = processes(world)
    number = place(rank, "rank", count)
    starts = None if cu_seqlens is None else starts_of(cu_seqlens, "cu_seqlens", length)
    shard: _Array = taken(array, layout_plan(layout, length, count, starts).tokens(number), tokens)
    return shard


def unshard_sequence(
    shards: Sequence[_Array],
    layout: str | ShardPlan = "zigzag",
    cu_seqlens: ArrayLike | None = None,
    *,
    axis: int | None = None,
) -> _Array:
    """Put the shards of all processes back together.

    Parameters
    ----------
    shards : sequence of array_like, Tensor or jax.Array
        What `shard_sequence` returns for process 0, 1, and so on.
    layout, cu_seqlens, axis
        As in `shard_sequence`.

    Returns
    -------
    ndarray, Tensor or jax.Array

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> shards = [attnmask.shard_sequence(np.arange(7), 2, rank) for rank in range(2)]
    >>> shards
    [array([0, 5, 6]), array([1, 2, 3, 4])]
    >>> attnmask.unshard_sequence(shards)
    array([0, 1, 2, 3, 4, 5, 6])
    """
    parts = [_array(shard, f"shards[{rank}]") for rank, shard in enumerate(as_parts(shards))]
    tokens = shared_axis(parts, axis)
    lengths = [part.shape[tokens] for part in parts]
    length = sum(lengths)
    starts = None if cu_seqlens is None else starts_of(cu_seqlens, "cu_seqlens", length)
    plan = layout_plan(layout, length, len(parts), starts)
    for rank, expected in enumerate(plan.lengths):
        if lengths[rank] != expected:
            raise ValueError(f"shards[{rank}] must have {expected} tokens, got {describe(parts[rank])}")
    order = np.concatenate([plan.tokens(rank) for rank in range(len(parts))])
    whole: _Array = taken(concatenated(parts, tokens), np.argsort(order), tokens)
    return whole


def as_parts(shards: Sequence[_Array]) -> Sequence[_Array]:
    if not isinstance(shards, (list, tuple)):
        raise TypeError(f"shards must be a list or tuple of arrays, got {describe(shards)}")
    if not shards:
        raise ValueError("shards must hold one array per process, got none")
    return shards


def shared_axis(parts: Sequence[Any], axis: int | None) -> int:
    """Return the axis of tokens of shards, which must have the same type and all other axes."""

    def others(part: Any) -> tuple[Any, ...]:
        return part.dtype, part.ndim, *part.shape[:tokens], *part.shape[tokens + 1 :]

    tokens = token_axis(parts[0], "shards[0]", axis)
    for rank, part in enumerate(parts):
        if others(part) != others(parts[0]):
            expected = f"a {parts[0].dtype} array like shards[0] except for its tokens, {describe(parts[0])}"
            raise ValueError(f"shards[{rank}] must be {expected}, got {describe(part)}")
    return tokens


_PIECES = 16  # a process has about so many of long documents
_CELLS = 2**14  # live pairs are counted for so many ranges of queries, and divided evenly within


def plan_shards(mask: MaskInfo, world: int) -> ShardPlan:
    """Return a layout that gives each process nearly the same number of allowed pairs and of tokens.

    Zigzag does this for one causal sequence and for long packed ones. For short or unequal documents, and for other
    masks, this is better; and most documents stay in one process, which then needs no keys from the others. Shards may
    differ in length.

    Parameters
    ----------
    mask : MaskInfo
        The mask of the whole sequence, complete with causal masks and windows.
    world : int
        The number of processes.

    Returns
    -------
    ShardPlan
        The same in every process for the same arguments.

    Examples
    --------
    >>> import attnmask
    >>> mask = attnmask.MaskInfo.from_cu_seqlens([0, 6, 8, 11, 12], packed=True).apply_causal()
    >>> plan = attnmask.plan_shards(mask, 2)
    >>> plan.lengths
    array([6, 6])
    >>> attnmask.unshard_sequence([plan.tokens(0), plan.tokens(1)], plan)
    array([ 0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 11])
    """
    if not isinstance(mask, MaskInfo):
        raise TypeError(f"mask must be a MaskInfo, got {describe(mask)}")
    batch, heads, queries, keys = mask._state.shape("plan shards")
    if queries != keys:
        raise ValueError(f"mask must have as many keys as queries, {queries}, got {keys}")
    count = processes(world)
    cell = max(1, -(-queries // _CELLS))
    planes = ((b, h) for b in range(batch) for h in range(heads))
    live = sum((mask.grid(*plane, cell, max(keys, 1)).sum(axis=1) for plane in planes), np.zeros(1))
    edges, up_to = np.minimum(np.arange(len(live) + 1) * cell, queries), np.append(0, np.cumsum(live))

    def shares(starts: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the shares of all tokens and of all live pairs."""
        pairs = np.diff(np.interp(starts, edges, up_to))
        return np.stack([np.diff(starts) / max(queries, 1), pairs / max(up_to[-1], 1)], axis=1)

    documents = _documents(mask, queries)
    pieces = np.maximum(1, np.ceil(shares(documents).max(axis=1) * _PIECES * count)).astype(np.int64)
    which = np.repeat(np.arange(len(pieces)), pieces)
    index = np.arange(len(which)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = np.append(documents[which] + np.diff(documents)[which] * index // pieces[which], queries)
    weights = shares(starts)
    owners, loads = np.zeros(len(weights), np.int64), np.zeros((count, 2))
    for piece in np.argsort(
        -weights.max(axis=1), kind="stable"
    ):  # the largest first, to whom then has the least
        owners[piece] = owner = int((loads + weights[piece]).max(axis=1).argmin())
        loads[owner] += weights[piece]
    return ShardPlan(starts, owners, count)


def _documents(mask: MaskInfo, length: int) -> NDArray[np.int64]:
    """Return where segments begin in any batch row, if the mask says so, and where the last one ends."""
    labels = mask._state.labels
    ids = labels.get()[0] if labels.complete else None
    inner: Any = []
    if ids is not None and ids.size:
        rows = ids.reshape(-1, ids.shape[-1])
        inner = np.flatnonzero((rows[:, 1:] != rows[:, :-1]).any(axis=0)) + 1
    return np.concatenate([[0], inner, [length]]).astype(np.int64)
