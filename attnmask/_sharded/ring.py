"""Attention over a sequence shared by several processes: who computes what, and who sends which keys to whom.

The path of one call, on each of W processes::

    arguments, shard plan                    the same on each process
      ▼
    Ring          for any two processes, the rectangles of pairs (queries of one, keys of the other) in which
      │           something may be live: chunk by chunk, narrowed by the diagonal, the window, the documents and
      │           the mask. No process has to ask another.
      ▼
    W rounds      in round d, process r computes with those keys of process r - d that its queries see, and sends
      │           its own to process r + d; messages travel while earlier rounds are computed.
      ▼
    calls         the rectangles of a round in few calls of `flash_attention`: as packed sequences, each with its
      │           own diagonal offset, or one by one as slices of a mask
      ▼
    merge         the results of the calls by their logsumexp, which starts as that of the sinks

Backward runs the same rounds. From the merged result and logsumexp, the gradients of each rectangle come out as its
share of the whole. The gradients of keys and values return to the process that the keys came from, while the next round
is computed, and are summed there in the order of the rounds.

In PyTorch a round is cut into parts of few heads and, if there are not enough heads, of some keys. This bounds what is
received at a time, and how many results wait to be summed. A call with few keys takes 10 % longer; one with few heads
does not. All processes have the same number of parts, because each waits for the other before the next one.

Two designs were considered. In a ring of whole shards, each process passes on to its neighbour what it got from the
other, and gradients travel with the keys. Keys that nobody needs any more travel on, unless everybody knows what is
needed later, and a window or documents save little. Here, keys go straight from their owner to those who see them. Over
a switch this takes the same time for a full mask and no more code, and only what is live is ever sent: under a causal
mask with zigzag shards 25 % less, under a window only its edges, of whole documents nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnmask._attention.arguments import ARRAYS, LEARNED, NUMBERS, RING_DEFAULTS, RingOptions
from attnmask._attention.problem import distances, starts_of
from attnmask._attention.terms import BY_DISTANCE, TERMS, Sizes, numbers_of, terms_of
from attnmask._common.arguments import describe
from attnmask._common.keywords import Keywords, types_of
from attnmask._common.loading import _core
from attnmask._common.types import AnyFunction, Arguments, Given
from attnmask._masks.info import MaskInfo
from attnmask._sharded.plan import ShardPlan, joined_ranges, layout_plan

Table = NDArray[np.int64]


class Conditions(NamedTuple):
    """The conditions for a pair of tokens to be live, besides the mask, and how its logits are computed."""

    low: int | None  # limits of k - q, None for none
    high: int | None
    by_distance: bool  # whether logits depend on k - q
    one_by_one: bool  # whether each rectangle is a call of its own


class Call(NamedTuple):
    """One attention call: tokens of the process, tokens among the round's keys, and further arguments."""

    queries: slice
    keys: slice
    arguments: Arguments
    rows: Any  # of each of its sequences the batch row, or the document; of one rectangle, an index
    place: tuple[int, int] | None  # of one rectangle, its first query and its first key in the sequence

    def in_blocks(self, most: int) -> Iterator[Call]:
        """Yield the same call in parts of at most `most` queries, whose results take less memory at a time."""
        if self.queries.stop - self.queries.start <= most:
            yield self
            return
        for begin in range(self.queries.start, self.queries.stop, most):
            block = slice(begin, min(begin + most, self.queries.stop))
            cut = slice(block.start - self.queries.start, block.stop - self.queries.start)
            if self.place is not None:
                place = self.place[0] + cut.start, self.place[1]
                arguments = self.arguments | {"causal_offset": place[0] - place[1]}
                if "attention_mask" in arguments:
                    arguments["attention_mask"] = arguments["attention_mask"][:, :, cut, :]
                yield Call(block, self.keys, arguments, self.rows, place)
                continue
            q_starts, k_starts = self.arguments["cum_seqlens_q"], self.arguments["cum_seqlens_k"]
            clipped = np.clip(q_starts, cut.start, cut.stop)
            seen = np.flatnonzero(np.diff(clipped))
            first, last = seen[0], seen[-1] + 1
            keys = slice(self.keys.start + int(k_starts[first]), self.keys.start + int(k_starts[last]))
            if keys.start == keys.stop:
                continue
            arguments = self.arguments | {
                "cum_seqlens_q": clipped[first : last + 1] - cut.start,
                "cum_seqlens_k": k_starts[first : last + 1] - k_starts[first],
                "causal_offset": (self.arguments["causal_offset"] + (clipped - q_starts)[:-1])[first:last],
            }
            yield Call(block, keys, arguments, self.rows[first:last], None)


class Ring:
    """The work of each process, for given shards of a sequence and conditions of live pairs.

    Arguments `queries` and `keys` are the processes that own them; None means the keys of all processes.
    """

    def __init__(
        self, shards: ShardPlan, documents: Table | None, mask: MaskInfo | None, conditions: Conditions
    ) -> None:
        self.shards, self.mask, self.conditions = shards, mask, conditions
        self.packed = documents is not None
        self.documents = np.array([0, shards.length]) if documents is None else documents
        self._chunks: dict[int | None, Table] = {}
        self._rectangles: dict[tuple[int, int | None], Table] = {}

    def chunks(self, rank: int | None) -> Table:
        """Return the tokens of a process, or of all, as rows of start, end, document."""
        if rank not in self._chunks:
            whole = np.array([[0, self.shards.length]])
            begin, end = (whole if rank is None else self.shards.ranges(rank)).T
            first, last = (np.searchsorted(self.documents, at, "right") - 1 for at in (begin, end - 1))
            which, document = _counted(first, last + 1 - first)
            cut = np.maximum(begin[which], self.documents[document])
            until = np.minimum(end[which], self.documents[document + 1])
            table = np.stack([cut, until, document], axis=1)
            self._chunks[rank] = table[cut < until]
        return self._chunks[rank]

    def rectangles(self, queries: int, keys: int | None) -> Table:
        """Return what may be live, as sorted rows of query start and end, key start and end."""
        if (queries, keys) not in self._rectangles:
            self._rectangles[queries, keys] = self._narrowed(
                _of_same_documents(self.chunks(queries), self.chunks(keys))
            )
        return self._rectangles[queries, keys]

    def _narrowed(self, table: Table) -> Table:
        q_begin, q_end, k_begin, k_end = table.T
        low, high = self.conditions.low, self.conditions.high
        if low is not None:
            k_begin, q_end = np.maximum(k_begin, q_begin + low), np.minimum(q_end, k_end - low)
        if high is not None:
            k_end, q_begin = np.minimum(k_end, q_end + high), np.maximum(q_begin, table[:, 2] - high)
        table = np.stack([q_begin, q_end, k_begin, k_end], axis=1)
        table = table[(q_begin < q_end) & (k_begin < k_end)]
        if self.mask is None:
            return table
        live = [row for row in (self._of_mask(*row) for row in table.tolist()) if row is not None]
        return np.array(live, np.int64).reshape(-1, 4)

    def _of_mask(self, q_begin: int, q_end: int, k_begin: int, k_end: int) -> tuple[int, ...] | None:
        """Trim queries and keys without a live pair off a rectangle's edges; None if nothing is left."""
        assert self.mask is not None
        part = self.mask[:, :, q_begin:q_end, k_begin:k_end]
        sides = _core.mask_any(*part._state.described("divide it"))
        q_live, k_live = (np.flatnonzero(side.any(axis=(0, 1))) for side in sides)
        if not len(q_live):
            return None
        return (
            q_begin + int(q_live[0]),
            q_begin + int(q_live[-1]) + 1,
            k_begin + int(k_live[0]),
            k_begin + int(k_live[-1]) + 1,
        )

    def sent(self, queries: int, keys: int) -> Table:
        """Return the tokens whose keys and values one sends the other, as ranges of the sequence."""
        ranges = self.rectangles(queries, keys)[:, 2:]
        return joined_ranges(ranges[np.argsort(ranges[:, 0], kind="stable")])

    def sent_places(self, queries: int, keys: int) -> Table:
        """Return the same as ranges of the sender's own tokens."""
        ranges = self.sent(queries, keys)
        begin = _local(self.shards.ranges(keys), ranges[:, 0])
        return joined_ranges(np.stack([begin, begin + ranges[:, 1] - ranges[:, 0]], axis=1))

    def live_pairs(self, queries: int, keys: int | None) -> int:
        """Count live pairs over all heads that the mask distinguishes."""
        table = self.rectangles(queries, keys)
        if self.mask is None:
            low, high = self.conditions.low, self.conditions.high
            q_count, k_count = table[:, 1] - table[:, 0], table[:, 3] - table[:, 2]
            count = q_count * k_count if high is None else _pairs_up_to(table, high)
            return int((count if low is None else count - _pairs_up_to(table, low - 1)).sum())
        total = 0
        for q_begin, q_end, k_begin, k_end in table.tolist():
            part = self.mask[:, :, q_begin:q_end, k_begin:k_end]
            total += int(_core.mask_count(*part._state.described("count live pairs")).sum())
        return total

    def calls(self, queries: int, keys: int, rows: int = 1, part: slice | None = None) -> list[Call]:
        """Return what `queries` computes with the keys it has from `keys`, or with part of them. They lie one after the
        other as they were `sent`, its own as it has them. Unless rectangles go one by one, `rows` batch rows lie one
        after the other too.
        """
        table = self.rectangles(queries, keys)
        if not len(table):
            return []
        mine = self.shards.ranges(queries)
        theirs = mine if queries == keys else self.sent(queries, keys)
        # Positions in the shards of the process, and how far the diagonal is moved there.
        blocks = table.copy()
        blocks[:, :2] += (_local(mine, table[:, 0]) - table[:, 0])[:, None]
        blocks[:, 2:] += (_local(theirs, table[:, 2]) - table[:, 2])[:, None]
        counts = [int((ranges[:, 1] - ranges[:, 0]).sum()) for ranges in (mine, theirs)]
        offsets = table[:, 0] - table[:, 2]
        documents = np.searchsorted(self.documents, table[:, 0], "right") - 1
        low, high, by_distance, one_by_one = self.conditions
        if low is None and high in (None, 0) and not by_distance and not one_by_one:
            if queries == keys and high == 0:  # the order of tokens is all that matters
                first = np.append(True, documents[1:] != documents[:-1])
                begin, end = blocks[first, 0], np.maximum.reduceat(blocks[:, 1], np.flatnonzero(first))
                blocks, offsets = np.stack([begin, end, begin, end], axis=1), np.zeros(len(begin), np.int64)
                documents = documents[first]
            else:
                full = np.full(len(table), True) if high is None else table[:, 3] - 1 <= table[:, 0]
                blocks, offsets, documents = _joined(blocks, offsets, documents, full)
        if part is not None:
            counts[1] = part.stop - part.start
            clipped = np.clip(blocks[:, 2:], part.start, part.stop)
            offsets = offsets + blocks[:, 2] - clipped[:, 0]
            there = clipped[:, 0] < clipped[:, 1]
            blocks = np.concatenate([blocks[:, :2], clipped - part.start], axis=1)[there]
            offsets, documents, table = (
                offsets[there],
                documents[there],
                table[there] if one_by_one else table,
            )
        if not len(blocks):
            return []
        if one_by_one:
            first_queries = table[:, 0].tolist()
            each = zip(first_queries, offsets.tolist(), blocks.tolist(), documents.tolist(), strict=True)
            return [self._slice(*of_one) for of_one in each]
        return [
            self._packed(blocks[chain], offsets[chain], documents[chain], counts, rows)
            for chain in _chains(blocks)
        ]

    def _band(self) -> Arguments:
        low, high = self.conditions.low, self.conditions.high
        if low is None and high in (None, 0):
            return {"causal": high == 0}
        return {"sliding_window": (None if low is None else -low, high)}

    def _slice(self, q_begin: int, offset: int, block: list[int], document: int) -> Call:
        k_begin, (q_count, k_count) = q_begin - offset, (block[1] - block[0], block[3] - block[2])
        arguments: Arguments = {"causal_offset": offset}
        if self.mask is None:
            arguments |= self._band()
        else:
            arguments["attention_mask"] = self.mask[
                :, :, q_begin : q_begin + q_count, k_begin : k_begin + k_count
            ]
        row = slice(document, document + 1) if self.packed else slice(None)
        return Call(slice(*block[:2]), slice(*block[2:]), arguments, row, (q_begin, k_begin))

    def _packed(self, blocks: Table, offsets: Table, documents: Table, counts: list[int], rows: int) -> Call:
        """Return blocks, in each row, as packed sequences; between them are some without keys or queries."""
        step = np.arange(rows)[:, None, None] * np.repeat(counts, 2)
        q_begin, q_end, k_begin, k_end = (blocks + step).reshape(-1, 4).T
        before = np.append(k_begin[:1], k_end[:-1])
        q_cuts = np.stack([q_begin, q_begin, q_end], axis=1).ravel()
        k_cuts = np.stack([before, k_begin, k_end], axis=1).ravel()
        numbers = np.zeros((2, rows, len(blocks), 3), np.int64)
        numbers[0] = offsets[:, None]
        numbers[1] = documents[:, None] if self.packed else np.arange(rows)[:, None, None]
        starts = [np.append(cuts[0], cuts) - cuts[0] for cuts in (q_cuts, k_cuts)]
        there = np.append(True, (np.diff(starts[0]) > 0) | (np.diff(starts[1]) > 0))
        arguments = self._band() | {
            "cum_seqlens_q": starts[0][there],
            "cum_seqlens_k": starts[1][there],
            "causal_offset": numbers[0].ravel()[there[1:]],
        }
        queries, keys = slice(int(q_begin[0]), int(q_end[-1])), slice(int(k_begin[0]), int(k_end[-1]))
        return Call(queries, keys, arguments, numbers[1].ravel()[there[1:]], None)


def _counted(first: Table, counts: Table) -> tuple[Table, Table]:
    """Return ``first[i], first[i] + 1, ...``, ``counts[i]`` of them, each with its i."""
    which = np.repeat(np.arange(len(first)), counts)
    return which, np.arange(len(which)) + np.repeat(first - (np.cumsum(counts) - counts), counts)


def _of_same_documents(queries: Table, keys: Table) -> Table:
    """Return rectangles of all query chunks by all key chunks of the same document."""
    first, last = (np.searchsorted(keys[:, 2], queries[:, 2], side) for side in ("left", "right"))
    q, k = _counted(first, last - first)
    return np.concatenate([queries[q, :2], keys[k, :2]], axis=1)


def _local(ranges: Table, places: Table) -> Table:
    """Return where tokens of the sequence lie if the tokens of `ranges` lie one after the other."""
    lengths = ranges[:, 1] - ranges[:, 0]
    which = np.searchsorted(ranges[:, 0], places, "right") - 1
    local: Table = (np.cumsum(lengths) - lengths)[which] + places - ranges[which, 0]
    return local


def _pairs_up_to(table: Table, limit: int) -> Table:
    """Count the pairs of each rectangle with k - q <= limit: sum over queries how many keys are that near."""
    q_begin, q_end, k_begin, k_end = table.T

    def sums(first: Table) -> Table:
        """Of ``max(0, x)`` for as many x from `first` on as there are queries."""
        before, last = (np.maximum(x, 0) for x in (first - 1, first + q_end - q_begin - 1))
        total: Table = last * (last + 1) // 2 - before * (before + 1) // 2
        return total

    near = q_begin + limit + 1 - k_begin
    return sums(near) - sums(near - (k_end - k_begin))


def _joined(
    blocks: Table, offsets: Table, documents: Table, full: NDArray[np.bool_]
) -> tuple[Table, Table, Table]:
    """Join full blocks that are neighbours along one side and equal along the other: first neighbouring queries, then
    neighbouring keys. The diagonal of a full one is moved out of the way.
    """
    offsets = np.where(full, blocks[:, 3] - blocks[:, 2], offsets)
    for begin, end, other in ((0, 1, slice(2, 4)), (2, 3, slice(0, 2))):
        order = np.lexsort((blocks[:, begin], blocks[:, other.start], documents))
        blocks, offsets, documents, full = blocks[order], offsets[order], documents[order], full[order]
        joins = (
            (documents[1:] == documents[:-1])
            & (blocks[1:, other] == blocks[:-1, other]).all(axis=1)
            & (blocks[1:, begin] == blocks[:-1, end])
            & full[1:]
            & full[:-1]
        )
        first, last = np.append(True, ~joins), np.append(~joins, True)
        ends = blocks[last, end]
        blocks, offsets, documents, full = blocks[first], offsets[first], documents[first], full[first]
        blocks[:, end] = ends
        offsets = np.where(full, blocks[:, 3] - blocks[:, 2], offsets)
    order = np.lexsort((blocks[:, 2], blocks[:, 0]))
    return blocks[order], offsets[order], documents[order]


def _chains(blocks: Table) -> list[Any]:
    """Group blocks into few lists of indices, along each of which both queries and keys increase."""
    if ((blocks[1:, 0] >= blocks[:-1, 1]) & (blocks[1:, 2] >= blocks[:-1, 3])).all():
        return [slice(None)]
    chains: list[list[int]] = []
    ends: list[tuple[int, int]] = []
    for index, (q_begin, q_end, k_begin, k_end) in enumerate(blocks.tolist()):
        fits = (i for i, (q_last, k_last) in enumerate(ends) if q_last <= q_begin and k_last <= k_begin)
        chain = next(fits, len(chains))
        if chain == len(chains):
            chains.append([])
            ends.append((0, 0))
        chains[chain].append(index)
        ends[chain] = q_end, k_end
    return chains


_KEPT = 32  # rings that are kept, as each layer asks for the same
_without_mask: dict[object, Ring] = {}


def ring_of(
    layout: str | ShardPlan,
    length: int,
    world: int,
    starts: Table | None,
    mask: MaskInfo | None,
    conditions: Conditions,
) -> Ring:
    """Return the ring for these arguments. It is kept, with the mask if there is one."""
    rings: dict[object, Ring] = _without_mask if mask is None else mask._state.once("rings", dict)
    asked = layout, length, world, None if starts is None else starts.tobytes(), conditions
    ring = rings.get(asked)
    if ring is None:
        if mask is not None:
            low, high, *_ = conditions
            conditions = conditions._replace(one_by_one=True)
            if (low, high) != (None, None):
                mask = mask.apply_sliding_window((None if low is None else -low, high))
        ring = Ring(layout_plan(layout, length, world, starts), starts, mask, conditions)
        if len(rings) >= _KEPT:
            rings.clear()
        rings[asked] = ring
    return ring


# Arguments of `ring_attention`, by their names


class RingArguments(RingOptions, total=False):
    layout: Literal["zigzag", "contiguous"] | ShardPlan
    cu_seqlens: ArrayLike | None
    attention_mask: MaskInfo | None


_WHOLE = {"layout": "zigzag", "cu_seqlens": None, "attention_mask": None}
_SEGMENT_IDS = ("q_segment_ids", "kv_segment_ids")
KEYWORDS = Keywords(_WHOLE | RING_DEFAULTS, types_of(RingArguments, ""))
OPTIONS = tuple(name for name in NUMBERS if name in RING_DEFAULTS and name != "causal")  # of each call
BY_HEAD = tuple(name for name in TERMS if name in RING_DEFAULTS and name in ARRAYS and name not in LEARNED)
LEARNED_TERMS = ("softmax_aux", "relative_bias")  # that PyTorch and JAX compute in rings
_COMPUTED = {*_WHOLE, *OPTIONS, *BY_HEAD, *LEARNED_TERMS, "causal", "sliding_window", *_SEGMENT_IDS}


def arguments_of(function: AnyFunction, own: Given, more: Given) -> tuple[Arguments, Arguments]:
    """Return the learned terms of a call, and its other arguments. Refuse what rings would leave out."""
    given = KEYWORDS.complete(function, own, more)
    for name, default in RING_DEFAULTS.items():
        if name not in _COMPUTED and given[name] is not default:
            raise NotImplementedError(
                f"{name} must be {default!r} in ring_attention, which does not compute it, got {describe(given[name])}"
            )
    return {name: given.pop(name) for name in LEARNED_TERMS}, given


def check_whole(given: Given, batch: int) -> None:
    """Check the arguments that describe the whole sequence."""
    mask = given["attention_mask"]
    if mask is not None and not isinstance(mask, MaskInfo):
        hint = "; write MaskInfo.from_attention_mask(array) with the mask of the whole sequence"
        raise TypeError(f"attention_mask must be a MaskInfo or None, got {describe(mask)}{hint}")
    if given["cu_seqlens"] is not None and batch != 1:
        raise ValueError(f"query must have batch size 1 with cu_seqlens, got {batch}")
    for name in _SEGMENT_IDS:
        if given[name] is not None and mask is not None:
            raise ValueError(
                f"{name} must be None with an attention_mask; write MaskInfo.from_segments(ids) & mask"
            )


def _whole_mask(given: Given, batch: int, heads: int, length: int) -> MaskInfo | None:
    mask: MaskInfo | None = given["attention_mask"]
    ids = [given[name] for name in _SEGMENT_IDS if given[name] is not None]
    if ids:
        mask = MaskInfo.from_segments(*ids)
    if mask is None:
        return None
    rows, planes, *sides = mask._state.shape("attend by it")
    if sides != [length, length] or rows not in (1, batch) or planes not in (1, heads):
        expected = f"of {batch} batch rows, {heads} heads, {length} queries and keys in the whole sequence"
        raise ValueError(f"attention_mask must be {expected}, got {(rows, planes, *sides)}")
    return mask


class _Array(Protocol):
    """An array of PyTorch or JAX."""

    @property
    def shape(self) -> Sequence[int]: ...
    def reshape(self, *shape: int) -> Self: ...
    def swapaxes(self, one: int, other: int, /) -> Self: ...


_X = TypeVar("_X", bound=_Array)


@dataclass
class Described:
    """The part of a `ring_attention` call that is the same in all processes. Unless rectangles go one by one, batch
    rows lie end to end in one row.
    """

    ring: Ring
    batch: int
    options: Arguments  # more arguments of each call of attention
    by_row: dict[str, NDArray[np.float64]]  # those that differ among batch rows or documents, [rows, H]

    @property
    def world(self) -> int:
        return self.ring.shards.world

    def in_row(self, x: _X) -> _X:
        """Return [B, T, ...] as calls have it."""
        return x if self.ring.conditions.one_by_one else x.reshape(1, x.shape[0] * x.shape[1], *x.shape[2:])

    def stats_in_row(self, x: _X) -> _X:
        """Return [B, H, T] as calls have it."""
        if self.ring.conditions.one_by_one:
            return x
        batch, heads, tokens = x.shape
        return x.swapaxes(0, 1).reshape(1, heads, batch * tokens)

    def stats(self, in_row: _X) -> _X:
        """Return [B, H, T] again."""
        if self.ring.conditions.one_by_one:
            return in_row
        heads, tokens = in_row.shape[1], in_row.shape[2] // max(self.batch, 1)
        return in_row.reshape(heads, self.batch, tokens).swapaxes(0, 1)


def described(given: Given, shape: tuple[int, int, int], world: int, by_distance: bool) -> Described:
    """Describe a call on the whole [batch, heads, length]; `by_distance` if learned terms are."""
    batch, heads, length = shape
    starts = None if given["cu_seqlens"] is None else starts_of(given["cu_seqlens"], "cu_seqlens", length)
    mask = _whole_mask(given, *shape)
    options = {name: given[name] for name in OPTIONS}
    by_row: dict[str, NDArray[np.float64]] = {}
    arrays = {name: given[name] for name in BY_HEAD if given[name] is not None}
    rows, row = ((batch,), "B") if starts is None else ((len(starts) - 1,), "sequences")
    for term in terms_of(
        arrays, Sizes((batch, heads, length, length), rows, row, numbers_of(np.dtype(float)))
    ):
        assert term.array is not None
        numbers = term.array[:, :, 0, 0]
        (options if len(numbers) == 1 else by_row)[term.name] = numbers
    conditions = Conditions(
        *distances(given),
        by_distance or bool(arrays),
        mask is not None or given["dropout_prob"] > 0 or not arrays.keys() <= set(BY_DISTANCE),
    )
    return Described(
        ring_of(given["layout"], length, world, starts, mask, conditions), batch, options, by_row
    )
