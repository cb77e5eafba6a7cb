"""What a `MaskInfo` says: its program, the arrays that go along with it, and how both change together."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnmask import _core, masks
from attnmask.arguments import as_array, describe, flag, frozen, integers, mask_array, per_row, read_only
from attnmask.mask_program import (
    Cut,
    Extent,
    Node,
    PerRow,
    Program,
    Shape,
    Terms,
    agree,
    dense,
    equal,
    extent_of,
    extents,
    has_arrays,
    hollow,
    refill,
)
from attnmask.mask_sharding import AxisName, axis_name

Ids: TypeAlias = NDArray[np.int32]
MaybeIds: TypeAlias = Ids | None

BOOL = np.dtype(bool)
QUERY_IDS = ("[B, Q]", "[B, H, Q]")
KEY_IDS = ("[B, K]", "[B, H, K]")
FLAGS = ("causal", "sliding_window", "chunked", "token_type_ids")
FLAG_FIELDS = tuple(
    f"{what}_baked_in" for what in ("causal_mask", "sliding_window", "chunked_mask", "token_type_ids")
)
AXIS_FIELDS = ("batch_axis_name", "qheads_axis_name", "kvheads_axis_name", "sequence_axis_name")
AUX_FIELDS = len(AXIS_FIELDS) + len(FLAG_FIELDS) + 5  # of what `flatten` returns second
_POSITION_FIELDS = {"q_positions": QUERY_IDS, "kv_positions": KEY_IDS}


class Labels:
    """Segment ids of queries and keys: there, or to be found once somebody asks. Either may be missing."""

    __slots__ = ("_compute", "_ids", "shapes")

    def __init__(self, q_ids: MaybeIds = None, kv_ids: MaybeIds = None) -> None:
        self._ids: tuple[MaybeIds, MaybeIds] | None = (q_ids, kv_ids)
        self._compute: Callable[[], tuple[MaybeIds, MaybeIds]] | None = None
        self.shapes: list[tuple[int, ...] | None] = [None if ids is None else ids.shape for ids in self._ids]

    @classmethod
    def later(
        cls, shapes: list[tuple[int, ...] | None], compute: Callable[[], tuple[MaybeIds, MaybeIds]]
    ) -> "Labels":
        labels = cls()
        labels._ids, labels._compute, labels.shapes = None, compute, shapes
        return labels

    @property
    def complete(self) -> bool:
        return None not in self.shapes

    def get(self) -> tuple[MaybeIds, MaybeIds]:
        compute = self._compute  # read first: another thread may clear it once there are ids
        if self._ids is None:
            assert compute is not None
            self._ids = compute()
            self._compute = None  # with all that it holds
        return self._ids

    def map(
        self, queries: Callable[[Ids], Ids], keys: Callable[[Ids], Ids], q_len: int, kv_len: int
    ) -> "Labels":
        """The labels made of these, for as many tokens as said."""

        def compute() -> tuple[MaybeIds, MaybeIds]:
            q_ids, kv_ids = self.get()
            new_q_ids = None if q_ids is None else queries(q_ids)
            if kv_ids is q_ids and keys is queries:
                return new_q_ids, new_q_ids
            return new_q_ids, None if kv_ids is None else keys(kv_ids)

        if self._ids is not None:
            return Labels(*compute())
        lengths = zip(self.shapes, (q_len, kv_len), strict=True)
        return Labels.later([old and (*old[:-1], length) for old, length in lengths], compute)

    def for_batch(self, batch: int) -> "Labels":
        """What one row has for all rows, for each of them."""

        def repeated(ids: Ids) -> Ids:
            return frozen(np.broadcast_to(ids, (batch, *ids.shape[1:])).copy())

        if all(shape is None or shape[0] == batch for shape in self.shapes):
            return self
        return Labels(*(None if ids is None else repeated(ids) for ids in self.get()))


def ids_of_tokens(valid: Any) -> Ids:
    """0 for tokens and -1 for padding."""
    ids: Ids = np.subtract(valid, 1, dtype=np.int32)
    return frozen(ids)


def padding_of(shape: Shape, program: Program) -> Labels:
    """0 for the queries and keys that have a live pair in any head, -1 for the others; once somebody asks."""

    def compute() -> tuple[Ids, Ids]:
        q_live, k_live = _core.mask_any(shape, program)
        return ids_of_tokens(q_live.any(axis=1)), ids_of_tokens(k_live.any(axis=1))

    return Labels.later([(shape[0], shape[2]), (shape[0], shape[3])], compute)


class State(NamedTuple):
    base: Node | None = None
    terms: Terms = Terms()
    extent: Extent = (None, None, None, None)  # without a None if there is a base
    segment_based: bool = False  # the base is made of segment ids
    dtype: np.dtype[Any] = BOOL  # of the mask as an array
    labels: Labels = Labels()
    cu_seqlens_q: NDArray[Any] | None = None
    cu_seqlens_kv: NDArray[Any] | None = None
    q_positions: MaybeIds = None
    kv_positions: MaybeIds = None
    baked: tuple[bool, ...] = (False, False, False, False)
    axes: tuple[AxisName, ...] = (("dp", "fsdp"), "tp", "tp", "sp")

    @property
    def program(self) -> Program:
        return () if self.base is None else (self.base, *self.terms.nodes)

    @property
    def base_array(self) -> NDArray[Any] | None:
        """The dense array that the mask begins with."""
        return self.base[1] if isinstance(self.base, tuple) and self.base[0] == "dense" else None

    @property
    def array(self) -> NDArray[Any] | None:
        """The mask where it is an array already, of the right type and shape."""
        array = self.base_array
        if array is None or self.terms or array.dtype != self.dtype:
            return None
        assert isinstance(self.base, tuple)
        unmoved = all(isinstance(shift, int) and shift == 0 for shift in self.base[2:])
        fits = all(length in (1, size) for length, size in zip(array.shape, self.extent, strict=True))
        if not (unmoved and fits):
            return None
        return array if array.shape == self.extent else np.broadcast_to(array, self.extent)  # type: ignore[arg-type]


def segments(q_ids: Ids, kv_ids: Ids) -> Node:
    """The base of a mask that is told by segment ids."""
    if q_ids.shape[0] != kv_ids.shape[0]:
        raise ValueError(
            f"kv_segment_ids must have as many batch rows as q_segment_ids, {q_ids.shape[0]}, got {describe(kv_ids)}"
        )
    return equal(q_ids, kv_ids)


def fitted(state: State, *fixed: tuple[str, Extent]) -> State:
    """`state` with the shape that its arrays, and what is `fixed`, agree on."""
    named = list(fixed)
    tokens = {
        ("q_segment_ids", 2): state.labels.shapes[0],
        ("kv_segment_ids", 3): state.labels.shapes[1],
        ("q_positions", 2): None if state.q_positions is None else state.q_positions.shape,
        ("kv_positions", 3): None if state.kv_positions is None else state.kv_positions.shape,
    }
    for (name, side), shape in tokens.items():
        if shape is not None:
            batch, _, queries, keys = extent_of(shape, side)
            named.append((name, (batch, None, queries, keys)))
    named += extents(state.program)
    batch, heads, queries, keys = agree(named)
    if batch is None and named:
        batch = 1
    if state.base is not None:
        assert batch is not None
        heads, queries, keys = (1 if size is None else size for size in (heads, queries, keys))
        return state._replace(extent=(batch, heads, queries, keys), labels=state.labels.for_batch(batch))
    for cu_seqlens in (state.cu_seqlens_q, state.cu_seqlens_kv):
        if batch is None and cu_seqlens is not None:
            batch = max(len(cu_seqlens) - 1, 0)
    return state._replace(extent=(batch, None, queries, keys))


def four_dimensions(mask: NDArray[Any]) -> NDArray[Any]:
    return mask if mask.ndim == 4 else mask[:, None]


def changed(
    state: State,
    attention_mask: ArrayLike | None,
    q_segment_ids: ArrayLike | None,
    kv_segment_ids: ArrayLike | None,
    cu_seqlens_q: ArrayLike | None,
    cu_seqlens_kv: ArrayLike | None,
    others: Mapping[str, Any],
) -> State:
    """`state` with what is not None in place of what it has; None among `others` counts."""
    changes: dict[str, Any] = _changed_details(state, others)
    fixed: list[tuple[str, Extent]] = []
    given = (
        None if q_segment_ids is None else integers(q_segment_ids, "q_segment_ids", QUERY_IDS),
        None if kv_segment_ids is None else integers(kv_segment_ids, "kv_segment_ids", KEY_IDS),
    )
    relabelled = any(ids is not None for ids in given)
    held = state.labels.get() if relabelled else (None, None)
    if relabelled:
        q_ids, kv_ids = (old if new is None else new for new, old in zip(given, held, strict=True))
        changes["labels"] = Labels(q_ids, kv_ids)
    if attention_mask is not None:
        mask = four_dimensions(mask_array(attention_mask, "attention_mask", ("[B, Q, K]", "[B, H, Q, K]")))
        fixed.append(("attention_mask", tuple(None if size == 1 else size for size in mask.shape)))  # type: ignore[arg-type]
        changes |= {"base": dense(mask), "terms": Terms(), "segment_based": False, "dtype": mask.dtype}
    elif relabelled and (state.segment_based or state.base is None):
        old = (None, *held) if state.base is None else state.base
        q_ids, kv_ids = (new if new is not None else was for new, was in zip(given, old[1:3], strict=True))
        if kv_ids is not None and q_ids is not None:
            changes |= {"base": segments(q_ids, kv_ids), "segment_based": True}
    rebuilt = relabelled and state.segment_based and not has_arrays(state.terms.nodes)
    if state.base is not None and attention_mask is None and not rebuilt:
        batch, _, queries, keys = state.extent
        fixed.append(("the mask", (batch, None, queries, keys)))
    if attention_mask is not None or relabelled:
        changes |= {"cu_seqlens_q": None, "cu_seqlens_kv": None}
    for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_kv", cu_seqlens_kv)):
        if cu_seqlens is not None:
            changes[name] = integers(cu_seqlens, name, ("[entries]",))
    return fitted(state._replace(**changes), *fixed)


def _changed_details(state: State, others: Mapping[str, Any]) -> dict[str, Any]:
    """Positions, flags and axis names, as fields of a State."""
    flags, axes = list(state.baked), list(state.axes)
    changes: dict[str, Any] = {"baked": flags, "axes": axes}
    for name, value in others.items():
        if name in _POSITION_FIELDS:
            changes[name] = None if value is None else integers(value, name, _POSITION_FIELDS[name])
        elif name in FLAG_FIELDS:
            flags[FLAG_FIELDS.index(name)] = flag(value, name)
        elif name in AXIS_FIELDS:
            axes[AXIS_FIELDS.index(name)] = axis_name(value, name)
        else:
            raise TypeError(f"a MaskInfo has no {name!r} to replace")
    return {**changes, "baked": tuple(flags), "axes": tuple(axes)}


def cut_out(state: State, cut: Cut) -> State:
    """The rectangle of each batch row, with all that goes along."""
    base, *terms = cut.program(state.program)
    batch, heads, *_ = state.extent
    return state._replace(
        base=base,
        terms=Terms(*terms),
        extent=(batch, heads, cut.q_len, cut.kv_len),
        labels=state.labels.map(cut.queries, cut.keys, cut.q_len, cut.kv_len),
        q_positions=None if state.q_positions is None else cut.queries(state.q_positions),
        kv_positions=None if state.kv_positions is None else cut.keys(state.kv_positions),
    )


def _runs(ids: Ids) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.int64]]:
    """The runs of equal ids in each of the rows: their lengths, and of those that are no padding which they are and
    what tells their segments apart, which is the row and then the id.
    """
    begins = np.empty(ids.shape, bool)
    begins[:, :1] = True
    np.not_equal(ids[:, 1:], ids[:, :-1], out=begins[:, 1:])
    begin = np.flatnonzero(begins)
    segment = ids.reshape(-1)[begin]
    valid = np.flatnonzero(segment >= 0)
    row = begin[valid] // max(ids.shape[1], 1)
    return np.diff(begin, append=ids.size), valid, (row.astype(np.int64) << 31) + segment[valid]


def chunks_of_segments(q_ids: Ids, kv_ids: Ids, size: int) -> tuple[Ids, Ids]:
    """Numbers from 1 on for the chunks of each row's segments, counted from where each begins; -1 for padding."""
    if q_ids.ndim != kv_ids.ndim:
        q_ids, kv_ids = (ids if ids.ndim == 3 else ids[:, None] for ids in (q_ids, kv_ids))
    rows = np.broadcast_shapes(q_ids.shape[:-1], kv_ids.shape[:-1])
    sides = [
        np.broadcast_to(ids, (*rows, ids.shape[-1])).reshape(math.prod(rows), ids.shape[-1])
        for ids in ([q_ids] if kv_ids is q_ids else [q_ids, kv_ids])
    ]
    size = min(size, np.iinfo(np.int32).max)
    lengths, valid, keys = zip(*map(_runs, sides), strict=True)
    longest = np.concatenate([runs[live] for runs, live in zip(lengths, valid, strict=True)])
    segments, segment = np.unique(np.concatenate(keys), return_inverse=True)
    chunks = np.zeros(len(segments), np.int64)
    np.maximum.at(chunks, segment, -(-longest // size))
    before = np.cumsum(chunks) - chunks
    before -= before[np.searchsorted(segments, segments >> 31 << 31)]  # each row counts for itself
    firsts = np.split(before[segment] + 1, [len(valid[0])])
    results = []
    for ids, runs, live, first in zip(sides, lengths, valid, firsts, strict=False):
        number = np.zeros(len(runs), np.int32)
        number[live] = first
        # The place of padding is -1, and so is its chunk.
        numbers = masks.positions_from_segment_ids(ids) // np.int32(size)
        numbers += np.repeat(number, runs).reshape(ids.shape)
        results.append(frozen(numbers.reshape(*rows, ids.shape[-1])))
    return results[0], results[-1]


# As the leaves of a tree, for JAX and pickle


def flatten(state: State) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    leaves: list[Any] = [
        state.base_array,
        *state.labels.get(),
        state.cu_seqlens_q,
        state.cu_seqlens_kv,
        state.q_positions,
        state.kv_positions,
    ]
    program = hollow(state.program, leaves)
    _, _, queries, keys = state.extent
    aux = (*state.axes, *state.baked, queries, keys, state.dtype, state.segment_based, program)
    return tuple(leaves), aux


def restore(aux: tuple[Any, ...], leaves: tuple[Any, ...]) -> State:
    """What `flatten` was given, made of leaves that may be other arrays by now; checked like arguments."""
    *details, queries, keys, dtype, segment_based, hollow_program = aux
    restored: dict[int, Any] = {}

    def leaf(kind: str, index: int) -> Any:
        if index not in restored:
            if kind == "dense":
                restored[index] = mask_array(leaves[index], "attention_mask", ("[B, H, Q, K]",))
            elif kind == "equal":
                restored[index] = _shared(leaves[index], "segment ids", ("[B, T]", "[B, H, T]"))
            else:
                restored[index] = _rows(leaves[index])
        return restored[index]

    program = refill(hollow_program, leaf)
    for index, name in ((1, "q_segment_ids"), (2, "kv_segment_ids")):
        if leaves[index] is not None and index not in restored:
            restored[index] = _shared(leaves[index], name, ("[B, T]", "[B, H, T]"))
    cu_q, cu_kv, q_positions, kv_positions = (
        None if value is None else _shared(value, name, layouts)
        for value, name, layouts in zip(
            leaves[3:7],
            ("cu_seqlens_q", "cu_seqlens_kv", *_POSITION_FIELDS),
            (("[entries]",), ("[entries]",), *_POSITION_FIELDS.values()),
            strict=True,
        )
    )
    state = State(
        base=program[0] if program else None,
        terms=Terms(*program[1:]),
        segment_based=segment_based,
        dtype=dtype,
        labels=Labels(restored.get(1), restored.get(2)),
        cu_seqlens_q=cu_q,
        cu_seqlens_kv=cu_kv,
        q_positions=q_positions,
        kv_positions=kv_positions,
        axes=tuple(details[:4]),
        baked=tuple(details[4:]),
    )
    known = [("the mask", (None, None, queries, keys))] if (queries, keys) != (None, None) else []
    return fitted(state, *known)


def kept(leaf: Any) -> Any:
    """`leaf`, to be looked at later: what is an array may not change until then."""
    if not isinstance(leaf, np.ndarray) or not leaf.flags.writeable:
        return leaf
    return read_only(leaf) if leaf.ndim == 4 else frozen(leaf.copy())  # masks are large, and not copied


def _shared(value: ArrayLike, name: str, layouts: Iterable[str]) -> Ids:
    """Integers without a copy, where nobody writes to them."""
    array = as_array(value, name)
    layouts = tuple(layouts)
    taken = array.dtype == np.int32 and array.flags.c_contiguous and not array.flags.writeable
    fits = array.ndim in [layout.count(",") + 1 for layout in layouts]
    return array if taken and fits else integers(array, name, layouts)


def _rows(value: ArrayLike) -> PerRow:
    array = as_array(value, "an array of one value a batch row")
    return per_row(array, "an array of one value a batch row", len(array))
