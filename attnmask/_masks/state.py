"""The state of a `MaskInfo`: its program, and the arrays that go with it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnmask._common.arguments import (
    AxisName,
    allocate,
    axis_name,
    describe,
    flag,
    frozen,
    integers,
    mask_array,
)
from attnmask._common.loading import _core
from attnmask._common.types import Arguments, Array, DType, Given
from attnmask._faces.habits import ask
from attnmask._masks.program import Program, Shape, Terms, agree, arrays, cropped, extents, words
from attnmask._masks.terms import (
    Crop,
    Extent,
    Node,
    PerRow,
    band,
    dense,
    equal,
    ids_of_sequences,
    tokens_extent,
)

_T = TypeVar("_T")
Ids: TypeAlias = NDArray[np.int32]
MaybeIds: TypeAlias = Ids | None

BOOL = np.dtype(bool)
QUERIES = ("[B, Q]", "[B, H, Q]")
KEYS = ("[B, K]", "[B, H, K]")
FLAGS = {  # what can be baked in, and the argument that says so
    "causal": "causal_mask_baked_in",
    "sliding_window": "sliding_window_baked_in",
    "chunked": "chunked_mask_baked_in",
    "token_type_ids": "token_type_ids_baked_in",
}
AXES = ("batch_axis_name", "qheads_axis_name", "kvheads_axis_name", "sequence_axis_name")
POSITIONS = {"q_positions": QUERIES, "kv_positions": KEYS}
ARRAYS = ("attention_mask", "q_segment_ids", "kv_segment_ids", "cu_seqlens_q", "cu_seqlens_kv")
DETAILS = (*POSITIONS, *FLAGS.values(), *AXES)


class Labels:
    """Segment ids of queries and keys, present or computed on request. Either may be missing.

    `noun` is what they number: "segment" or "chunk".
    """

    __slots__ = ("_compute", "_ids", "noun", "shapes")

    def __init__(self, q_ids: MaybeIds = None, kv_ids: MaybeIds = None, noun: str = "segment") -> None:
        self._ids: tuple[MaybeIds, MaybeIds] | None = (q_ids, kv_ids)
        self._compute: Callable[[], tuple[MaybeIds, MaybeIds]] | None = None
        self.shapes: list[tuple[int, ...] | None] = [None if ids is None else ids.shape for ids in self._ids]
        self.noun = noun

    @classmethod
    def later(
        cls,
        shapes: list[tuple[int, ...] | None],
        compute: Callable[[], tuple[MaybeIds, MaybeIds]],
        noun: str = "segment",
    ) -> "Labels":
        labels = cls(noun=noun)
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
            self._compute = None  # this frees the arrays that it refers to
        return self._ids

    def map(
        self,
        queries: Callable[[Ids], Ids],
        keys: Callable[[Ids], Ids],
        q_len: int,
        kv_len: int,
        lead: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda shape: shape[:-1],
        noun: str = "",
    ) -> "Labels":
        """Return labels made from these, for so many tokens; `lead` gives the axes before tokens. They number what
        these do, if no `noun` is given.
        """
        noun = noun or self.noun

        def compute() -> tuple[MaybeIds, MaybeIds]:
            q_ids, kv_ids = self.get()
            new_q_ids = None if q_ids is None else queries(q_ids)
            if kv_ids is q_ids and keys is queries:
                return new_q_ids, new_q_ids
            return new_q_ids, None if kv_ids is None else keys(kv_ids)

        if self._ids is not None:
            return Labels(*compute(), noun)
        lengths = zip(self.shapes, (q_len, kv_len), strict=True)
        return Labels.later([old and (*lead(old), length) for old, length in lengths], compute, noun)

    def for_batch(self, batch: int) -> "Labels":
        """Repeat what one row has for all rows."""

        def repeated(ids: Ids) -> Ids:
            return frozen(np.broadcast_to(ids, (batch, *ids.shape[1:])).copy())

        if all(shape is None or shape[0] == batch for shape in self.shapes):
            return self
        q_ids, kv_ids = (None if ids is None else repeated(ids) for ids in self.get())
        return Labels(q_ids, kv_ids, self.noun)


def ids_of_tokens(valid: ArrayLike) -> Ids:
    """Return 0 for tokens and -1 for padding."""
    ids: Ids = np.subtract(valid, 1, out=allocate(np.shape(valid), np.int32, "padding"), casting="unsafe")
    return frozen(ids)


def padding_of(shape: Shape, program: Program) -> Labels:
    """Return, on request, 0 for queries and keys with a live pair in any head, and -1 for the others."""

    def compute() -> tuple[Ids, Ids]:
        q_live, k_live = _core.mask_any(shape, program)
        return ids_of_tokens(q_live.any(axis=1)), ids_of_tokens(k_live.any(axis=1))

    return Labels.later([(shape[0], shape[2]), (shape[0], shape[3])], compute)


def _shape_of(array: Array | None) -> tuple[int, ...] | None:
    return None if array is None else array.shape


_NO_TERMS, _NO_LABELS = Terms(), Labels()


@dataclass(slots=True, eq=False)  # frozen=True would double the time to add a term
class State:
    """An immutable state; what was derived from it is kept in `cache`."""

    base: Node | None = None
    terms: Terms = _NO_TERMS
    extent: Extent = (None, None, None, None)  # has no None if there is a base
    segment_based: bool = False  # whether the base tells segments: see `base_ids`
    dtype: DType = BOOL  # of the mask as an array
    labels: Labels = _NO_LABELS
    cu_seqlens_q: Array | None = None
    cu_seqlens_kv: Array | None = None
    q_positions: MaybeIds = None
    kv_positions: MaybeIds = None
    baked: frozenset[str] = (
        frozenset()
    )  # the names in FLAGS of what was applied, or is said to be in the array
    axes: tuple[AxisName, ...] = (("dp", "fsdp"), "tp", "tp", "sp")
    cache: Arguments = field(default_factory=dict, init=False)
    kept: tuple[Shape, Node] | None = field(default=None, init=False)

    def prepared(self, shape: Shape, program: Program) -> Node:
        """Return the mask's `program` for a shape as one term that the core has already read. That of the last shape is
        kept.
        """
        kept = self.kept
        if kept is None or kept[0] != shape:
            ask("mask", self, shape[0])
            kept = self.kept = (shape, _core.mask_prepare(shape, program))
        return kept[1]

    def allows_future_alone(self) -> bool:
        """Return whether this is a square mask that allows pairs, but none on or below the diagonal."""
        batch, heads, queries, keys = self.shape("look at it")
        if not 2 <= queries == keys or self.dtype != BOOL:
            return False
        kinds = {node if isinstance(node, str) else node[0] for node in self.program}
        if kinds.isdisjoint(("dense", "not", "tiles")):
            return False

        def allows(program: Program, q_len: int = queries, kv_len: int = keys) -> bool:
            return bool(_core.mask_count((batch, heads, q_len, kv_len), program).any())

        def part(crop: Crop) -> bool:
            return allows(cropped(self.program, crop), crop.q_len, crop.kv_len)

        if part(Crop(queries - 1, 1, 0, keys)) or part(Crop(0, queries, 0, 1)):  # the usual case
            return False
        return allows(self.program) and not allows((*self.program, band(None, 0, 0), "and"))

    def once(self, key: str, compute: Callable[[], _T]) -> _T:
        """Return what `compute` gives, computed once: if two threads compute it, one result is kept."""
        if key not in self.cache:
            self.cache.setdefault(key, compute())
        value: _T = self.cache[key]
        return value

    def shape(self, to_do: str) -> Shape:
        """Return the shape of the mask, which must exist."""
        if self.base is None:
            raise ValueError(
                f"cannot {to_do}: the MaskInfo must have an attention_mask, or segment ids of queries and keys, "
                f"got MaskInfo({self})"
            )
        return self.extent  # type: ignore[return-value]

    def described(self, to_do: str) -> tuple[Shape, Program]:
        """Return the mask as the core takes it."""
        return self.shape(to_do), self.program

    @property
    def program(self) -> Program:
        return () if self.base is None else (self.base, *self.terms.nodes)

    @property
    def base_array(self) -> Array | None:
        """Return the dense array that the mask begins with."""
        return self.base[1] if isinstance(self.base, tuple) and self.base[0] == "dense" else None

    @property
    def held(self) -> dict[str, tuple[int, ...] | None]:
        """Return the shape of each array that the state holds, or None. Ids may still have to be computed."""
        return {
            "attention_mask": _shape_of(self.base_array),
            "q_segment_ids": self.labels.shapes[0],
            "kv_segment_ids": self.labels.shapes[1],
            "cu_seqlens_q": _shape_of(self.cu_seqlens_q),
            "cu_seqlens_kv": _shape_of(self.cu_seqlens_kv),
            "q_positions": _shape_of(self.q_positions),
            "kv_positions": _shape_of(self.kv_positions),
        }

    @property
    def array(self) -> Array | None:
        """Return the mask if it is already an array of the right type and shape."""
        array = self.base_array
        if array is None or self.terms or array.dtype != self.dtype:
            return None
        assert isinstance(self.base, tuple)
        unmoved = all(isinstance(shift, int) and shift == 0 for shift in self.base[2:])
        fits = all(length in (1, size) for length, size in zip(array.shape, self.extent, strict=True))
        if not (unmoved and fits):
            return None
        return array if array.shape == self.extent else np.broadcast_to(array, self.extent)  # type: ignore[arg-type]

    def __str__(self) -> str:
        """Describe in words what is held and cached; nothing is computed."""
        parts = [
            f"{name}={size}"
            for name, size in zip(("batch_size", "heads", "q_len", "kv_len"), self.extent, strict=True)
            if size is not None
        ]
        if self.base is not None:
            base, terms = words(self.program, self.segment_based)
            parts += [f"base={base}", f"terms=[{', '.join(terms)}]"]
            if self.dtype != BOOL:
                parts.append(f"dtype={self.dtype}")
        parts.append(f"holds=[{', '.join(name for name, shape in self.held.items() if shape is not None)}]")
        parts.append(f"cached=[{', '.join(sorted(self.cache))}]")
        return ", ".join(parts)


def segments(q_ids: Ids, kv_ids: Ids) -> Node:
    """Return the base of a mask that segment ids describe."""
    if q_ids.shape[0] != kv_ids.shape[0]:
        raise ValueError(
            f"kv_segment_ids must have as many batch rows as q_segment_ids, {q_ids.shape[0]}, got {describe(kv_ids)}"
        )
    return equal(q_ids, kv_ids)


def array_extents(state: State) -> Iterator[tuple[str, Extent]]:
    """Return what each array says about the mask's shape."""
    held = state.held
    for name, side in (("q_segment_ids", 2), ("kv_segment_ids", 3), ("q_positions", 2), ("kv_positions", 3)):
        shape = held[name]
        if shape is not None:
            batch, _, queries, keys = tokens_extent(shape, side)
            yield name, (batch, None, queries, keys)
    yield from extents(state.program)


def fitted(state: State, *fixed: tuple[str, Extent]) -> State:
    """Return `state` with the shape that its arrays and what is `fixed` agree on."""
    named = [*fixed, *array_extents(state)]
    batch, heads, queries, keys = agree(named)
    if batch is None and named:
        batch = 1
    if state.base is not None:
        assert batch is not None
        heads, queries, keys = (1 if size is None else size for size in (heads, queries, keys))
        return replace(state, extent=(batch, heads, queries, keys), labels=state.labels.for_batch(batch))
    for cu_seqlens in (state.cu_seqlens_q, state.cu_seqlens_kv):
        if batch is None and cu_seqlens is not None:
            batch = max(len(cu_seqlens) - 1, 0)
    return replace(state, extent=(batch, None, queries, keys))


def four_dimensions(mask: Array) -> Array:
    return mask if mask.ndim == 4 else mask[:, None]


def with_details(state: State, positions: tuple[ArrayLike | None, ...], axes: tuple[AxisName, ...]) -> State:
    """Return `state` with positions of queries and keys, and axis names, which seldom say anything new."""
    names = tuple(map(axis_name, axes, AXES))
    if names == state.axes and all(each is None for each in positions):
        return state
    return changed(state, dict(zip((*POSITIONS, *AXES), (*positions, *names), strict=True)))


def changed(state: State, given: Given) -> State:
    """Return `state` with the arguments `given` replaced. None counts only for details."""
    changes: Arguments = {
        name: None if given[name] is None else integers(given[name], name, layouts)
        for name, layouts in POSITIONS.items()
        if name in given
    }
    said = {kind: flag(given.get(name, kind in state.baked), name) for kind, name in FLAGS.items()}
    changes["baked"] = frozenset(compress(said, said.values()))
    axes = zip(AXES, state.axes, strict=True)
    changes["axes"] = tuple(axis_name(given.get(name, old), name) for name, old in axes)
    fixed: list[tuple[str, Extent]] = []
    new = [
        None if given.get(name) is None else integers(given[name], name, layouts)
        for name, layouts in (("q_segment_ids", QUERIES), ("kv_segment_ids", KEYS))
    ]
    relabelled = any(ids is not None for ids in new)
    held = state.labels.get() if relabelled else (None, None)
    if relabelled:
        q_ids, kv_ids = (_first(*pair) for pair in zip(new, held, strict=True))
        changes["labels"] = Labels(q_ids, kv_ids)
    attention_mask = given.get("attention_mask")
    if attention_mask is not None:
        mask = four_dimensions(mask_array(attention_mask, "attention_mask", ("[B, Q, K]", "[B, H, Q, K]")))
        fixed.append(("attention_mask", tuple(None if size == 1 else size for size in mask.shape)))  # type: ignore[arg-type]
        changes |= {"base": dense(mask), "terms": Terms(), "segment_based": False, "dtype": mask.dtype}
    elif relabelled and (state.segment_based or state.base is None):
        old = held if state.base is None else base_ids(state)
        q_ids, kv_ids = (_first(*pair) for pair in zip(new, old, strict=True))
        if kv_ids is not None and q_ids is not None:
            changes |= {"base": segments(q_ids, kv_ids), "segment_based": True}
    rebuilt = relabelled and state.segment_based and not arrays(state.terms.nodes)
    if state.base is not None and attention_mask is None and not rebuilt:
        batch, _, queries, keys = state.extent
        fixed.append(("the mask", (batch, None, queries, keys)))
    if attention_mask is not None or relabelled:
        changes |= {"cu_seqlens_q": None, "cu_seqlens_kv": None}
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        if given.get(name) is not None:
            changes[name] = integers(given[name], name, ("[entries]",))
    made = fitted(replace(state, **changes), *fixed)
    if made.baked != state.baked:
        _check_flags(made, state.baked)
    return made


def _check_flags(state: State, before: frozenset[str]) -> None:
    """Check that flags speak of an array of pairs: of other masks it is known what is in them."""
    of_an_array = isinstance(state.base, tuple) and state.base[0] in ("dense", "tiles")
    for kind in sorted(before ^ state.baked):
        name, added = FLAGS[kind], kind in state.baked
        if not added and (state.terms or not of_an_array):
            raise ValueError(f"{name} must be True for a mask that apply_{kind} has made, got False")
        if added and not of_an_array:
            raise ValueError(
                f"{name} must be False for a mask without an array of pairs, got True; write apply_{kind}(...)"
            )
        if added and kind == "causal" and _sees_ahead(state):
            raise ValueError(
                f"{name} must be False for an attention_mask that allows keys after their query, got True; "
                "write apply_causal()"
            )


def _sees_ahead(state: State) -> bool:
    """Return whether pairs are allowed beyond the diagonals of the first tokens and of the last ones."""
    shape, program = state.described("look at it")
    ahead = band(max(shape[3] - shape[2], 0) + 1, None, 0), "and"
    return bool(_core.mask_count(shape, (*program, *ahead)).any())


def base_ids(state: State) -> tuple[Ids, Ids]:
    """Return the ids that a base of segments is made of; or 0 for tokens and -1 for padding if it needs none."""
    assert isinstance(state.base, tuple)
    kind, *parts = state.base
    if kind == "sequences":
        return ids_of_sequences(*parts[:2])
    if kind == "equal":
        return parts[0], parts[1]
    size, *shifts = parts if kind == "chunk" else (0, 0, 0)
    batch, _, queries, keys = state.extent
    ids = [
        _first_tokens((batch, length), length if kind == "all" else size - shift)  # type: ignore[arg-type]
        for length, shift in zip((queries, keys), shifts, strict=True)
    ]
    alike = queries == keys and np.array_equal(*shifts)
    return ids[0], ids[0] if alike else ids[1]


def _first_tokens(shape: tuple[int, int], counts: PerRow) -> Ids:
    """Return 0 for the first tokens of each row, and -1 for the rest."""
    ids = allocate(shape, np.int32, "segment ids", np.zeros)
    if not isinstance(counts, int) or counts < shape[1]:
        ids[np.broadcast_to(np.arange(shape[1]) >= np.reshape(counts, (-1, 1)), shape)] = -1
    return frozen(ids)


def _first(new: MaybeIds, old: MaybeIds) -> MaybeIds:
    return old if new is None else new
