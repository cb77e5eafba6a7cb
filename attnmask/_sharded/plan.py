"""Which tokens of a sequence each process has.

A `ShardPlan` describes any layout: the sequence is cut at `starts` into chunks, and chunk i belongs to process
``owners[i]``, which keeps its tokens in sequence order::

    zigzag, 2 processes, 8 tokens      zigzag, 2 processes, cu_seqlens = [0, 4, 12]

    starts   0   2   4   6   8         starts   0 1 2 3 4   6   8   10   12
    owners     0   1   1   0           owners    0 1 1 0  0   1   1    0
    process 0: 0 1 6 7                 process 0: 0 3 4 5 10 11
    process 1: 2 3 4 5                 process 1: 1 2 6 7 8 9
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnmask._common.arguments import (
    as_array,
    check_form,
    describe,
    frozen,
    integer,
    integer_array,
    one_of,
    place,
)
from attnmask._common.loading import _core
from attnmask._common.types import Arguments

LAYOUTS = ("zigzag", "contiguous")
_FORM = 1  # of pickles


_MOST_PROCESSES = 2**20  # there are arrays of a number for each


def processes(world: int) -> int:
    count = integer(world, "world", 1)
    if count > _MOST_PROCESSES:
        raise ValueError(f"world must be at most {_MOST_PROCESSES} processes, got {describe(count)}")
    return count


@dataclass(frozen=True, eq=False)
class ShardPlan:
    """Which process has which tokens of a sequence: chunks and their owners.

    `plan_shards` makes one. Pass it as `layout` to `shard_sequence`, `unshard_sequence` and ``ring_attention``.

    Parameters
    ----------
    starts : array_like of integers, shape [chunks + 1]
        Where chunks begin, from 0 to the number of tokens, never decreasing.
    owners : array_like of integers, shape [chunks]
        The process that each chunk belongs to.
    world : int
        The number of processes.

    Examples
    --------
    >>> import attnmask
    >>> plan = attnmask.ShardPlan([0, 3, 4, 9], [1, 0, 1], world=2)
    >>> plan.tokens(1)
    array([0, 1, 2, 4, 5, 6, 7, 8])
    """

    starts: NDArray[np.int64]
    owners: NDArray[np.int64]
    world: int

    def __post_init__(self) -> None:
        world = processes(self.world)
        starts = _core.checked_starts(as_array(self.starts, "starts"), "starts")
        owners = integer_array(self.owners, "owners")
        if owners.shape != (len(starts) - 1,):
            raise ValueError(f"owners must be of shape {(len(starts) - 1,)}, got {describe(owners)}")
        wrong = (owners < 0) | (owners >= world)
        if wrong.any():
            index = int(wrong.argmax())
            raise ValueError(f"owners must be from 0 to {world - 1}, got {owners[index]} at index {index}")
        values = {"starts": frozen(starts.copy()), "owners": frozen(owners.astype(np.int64)), "world": world}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _as_tensors(self) -> Any:
        from attnmask.torch._states import of_graph

        return of_graph(self.starts), of_graph(self.owners)

    # PyTorch tensors, which torch.compile makes inputs of a graph.
    _tensors = property(_core.built_in(_as_tensors))

    def __getstate__(self) -> dict[str, object]:
        return {"version": _FORM, "starts": self.starts, "owners": self.owners, "world": self.world}

    def __setstate__(self, state: Arguments) -> None:
        check_form(state, _FORM, "the ShardPlan")
        ShardPlan.__init__(self, state["starts"], state["owners"], state["world"])

    def __repr__(self) -> str:
        return f"ShardPlan(world={self.world}, tokens={self.length}, chunks={len(self.owners)})"

    @property
    def length(self) -> int:
        """The number of tokens.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.ShardPlan([0, 3, 9], [1, 0], world=2).length
        9
        """
        return int(self.starts[-1])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each process.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.ShardPlan([0, 3, 9], [1, 0], world=2).lengths
        array([6, 3])
        """
        lengths = np.zeros(self.world, np.int64)
        np.add.at(lengths, self.owners, np.diff(self.starts))
        return lengths

    def ranges(self, rank: int) -> NDArray[np.int64]:
        """Return the tokens of one process as ranges.

        Parameters
        ----------
        rank : int

        Returns
        -------
        ndarray of int64, shape [ranges, 2]
            Start and end of each, in sequence order. No range is empty or touches the next.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.ShardPlan([0, 3, 4, 9], [1, 0, 1], world=2).ranges(1)
        array([[0, 3],
               [4, 9]])
        """
        chunks = np.flatnonzero(self.owners == place(rank, "rank", self.world))
        return joined_ranges(np.stack([self.starts[chunks], self.starts[chunks + 1]], axis=1))

    def tokens(self, rank: int) -> NDArray[np.int64]:
        """Return the tokens of one process one by one.

        Parameters
        ----------
        rank : int

        Returns
        -------
        ndarray of int64, shape [tokens]
            Their positions in the sequence.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.ShardPlan([0, 3, 4, 9], [1, 0, 1], world=2).tokens(0)
        array([3])
        """
        return places_in(self.ranges(rank))


def joined_ranges(ranges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the union of ranges [n, 2], sorted by start: ranges that touch or overlap become one."""
    ranges = ranges[ranges[:, 0] < ranges[:, 1]]
    if len(ranges) < 2:
        return ranges
    ends = np.maximum.accumulate(ranges[:, 1])
    first = np.append(True, ranges[1:, 0] > ends[:-1])
    return np.stack([ranges[first, 0], ends[np.append(first[1:], True)]], axis=1)


def places_in(ranges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return all numbers in ranges [n, 2], range by range."""
    lengths = ranges[:, 1] - ranges[:, 0]
    before = np.cumsum(lengths) - lengths
    places: NDArray[np.int64] = np.arange(lengths.sum()) + np.repeat(ranges[:, 0] - before, lengths)
    return places


def _cut(length: Any, count: int) -> Any:
    """Where `count` chunks of so many tokens, a number or an array [n, 1], begin and end: ``length * i // count``."""
    index = np.arange(count + 1, dtype=np.int64)
    return length // count * index + length % count * index // count  # a product with `length` might overflow


def check_world(plan: ShardPlan, world: int) -> None:
    if plan.world != world:
        raise ValueError(f"layout must be a plan for {world} processes, got one for {plan.world}")


def layout_plan(layout: object, length: int, world: int, starts: NDArray[np.int64] | None) -> ShardPlan:
    """Return the plan of a layout. `starts` are those of packed sequences."""
    if isinstance(layout, ShardPlan):
        check_world(layout, world)
        if layout.length != length:
            raise ValueError(f"layout must be a plan for {length} tokens, got one for {layout.length}")
        return layout
    if not isinstance(layout, str):
        raise TypeError(f"layout must be 'zigzag', 'contiguous' or a ShardPlan, got {describe(layout)}")
    one_of(layout, "layout", LAYOUTS)
    try:
        ranks = np.arange(world)
        owners = ranks if layout == "contiguous" else np.concatenate([ranks, ranks[::-1]])
        begins = np.array([0, length], np.int64) if starts is None else starts
        cuts = begins[:-1, None] + _cut(np.diff(begins)[:, None], len(owners))[:, :-1]
        return ShardPlan(np.append(cuts, length), np.tile(owners, len(cuts)), world)
    except (MemoryError, ValueError):
        raise MemoryError(f"a layout of {world} processes does not fit in memory: world") from None
