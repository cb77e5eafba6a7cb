"""Make masks from masks: with terms that remove pairs or add some, with operators, and as an array.

Each function returns a new state, or the one that it was given if there is nothing to change.
"""

from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from attnmask._common.arguments import (
    FARTHEST,
    TOP_LEFT,
    Limit,
    describe,
    flag,
    frozen,
    integer,
    integers,
    is_bottom_right,
    number_dtype,
    one_of,
    per_row,
    windows,
)
from attnmask._common.loading import _core
from attnmask._common.types import Arguments, Array
from attnmask._faces.habits import ask
from attnmask._masks.derived import labels_of_tokens, mask_of_dtype, segment_ids
from attnmask._masks.program import Shape, Terms, agree, axis_length, cropped, extents, fill, join, same
from attnmask._masks.state import BOOL, Ids, Labels, State
from attnmask._masks.terms import (
    ALL_PLACES,
    Crop,
    Extent,
    Node,
    PerRow,
    band,
    chunk,
    dense,
    diagonal,
    equal,
    first_keys,
)

_INT32_MAX = int(np.iinfo(np.int32).max)


def _with_terms(state: State, *nodes: Node, kind: str | None = None, **changes: Any) -> State:
    """Add one term or more; the result is no longer the mask that came with lengths and a dtype."""
    baked = state.baked if kind is None else state.baked | {kind}
    changes = {"terms": state.terms.plus(*nodes), "baked": baked, **changes}
    return replace(state, **changes, dtype=BOOL, cu_seqlens_q=None, cu_seqlens_kv=None)


def _cropped(state: State, crop: Crop) -> State:
    """Return the rectangle of each batch row, with everything that goes along."""
    base, *terms = cropped(state.program, crop)
    batch, heads = crop.lead((*state.extent[:2], 0))  # type: ignore[arg-type]
    return replace(
        state,
        base=base,
        terms=Terms(*terms),
        extent=(batch, heads, crop.q_len, crop.kv_len),
        labels=state.labels.map(crop.queries, crop.keys, crop.q_len, crop.kv_len, crop.lead),
        q_positions=None if state.q_positions is None else crop.queries(state.q_positions),
        kv_positions=None if state.kv_positions is None else crop.keys(state.kv_positions),
    )


def sliced(state: State, index: object) -> State:
    """Return ``mask[rows, heads, queries, keys]``."""
    shape = state.shape("slice it")
    parts = [
        None if axis == 1 and size == 1 else part  # heads that share a mask share it still
        for axis, (part, size) in enumerate(zip(_parts(index, shape), shape, strict=True))
    ]
    rows, heads, queries, keys = (
        None if part is None or part == slice(0, size) else part
        for part, size in zip(parts, shape, strict=True)
    )
    if rows is heads is queries is keys is None:
        return state
    queries, keys = (
        slice(0, size) if part is None else part
        for part, size in zip((queries, keys), shape[2:], strict=True)
    )
    crop = Crop(queries.start, queries.stop - queries.start, keys.start, keys.stop - keys.start, rows, heads)
    return replace(_cropped(state, crop), cu_seqlens_q=None, cu_seqlens_kv=None)


_SLICED = ("rows", "heads", "queries", "keys")
_INDEX = f"mask[{', '.join(_SLICED)}]"


def _parts(index: object, shape: Shape) -> list[slice]:
    """Return a slice per axis, with nonnegative start and stop."""
    entries = list(index) if isinstance(index, tuple) else [index]
    dots = [place for place, entry in enumerate(entries) if entry is Ellipsis]
    if len(dots) > 1:
        raise IndexError("the index must have at most one ellipsis, got 2 or more")
    if len(entries) > len(shape) + len(dots):
        raise IndexError(f"the index must be {_INDEX}, got {len(entries)} entries")
    if len(entries) < len(shape) and not dots:
        raise ValueError(
            f"the index must be {_INDEX}, got {len(entries)} entries; write ... for the missing ones"
        )
    if dots:
        entries[dots[0] : dots[0] + 1] = [slice(None)] * (len(shape) - len(entries) + 1)
    return [_slice(*of_axis) for of_axis in zip(entries, _SLICED, shape, strict=True)]


def _slice(entry: object, name: str, size: int) -> slice:
    if isinstance(entry, slice):
        if entry.step is not None and integer(entry.step, f"the step of {name}") != 1:
            raise ValueError(f"the step of {name} must be 1, got {describe(entry.step)}")
        bounds = (entry.start, "start"), (entry.stop, "stop")
        known = (None if bound is None else integer(bound, f"the {word} of {name}") for bound, word in bounds)
        start, stop, _ = slice(*known).indices(size)
        return slice(start, max(start, stop))
    try:
        number = integer(entry, name)
    except TypeError:
        raise TypeError(f"the index of {name} must be an integer or a slice, got {describe(entry)}") from None
    if name == "heads" and size == 1:
        return slice(0, 1)  # of heads that share a mask each one has it
    if not -size <= number < size:
        raise IndexError(f"the index of {name} must be from {-size} to {size - 1}, got {number}")
    return slice(number % size, number % size + 1)


def _clipped(value: PerRow, low: int, high: int) -> PerRow:
    return min(max(value, low), high) if isinstance(value, int) else np.clip(value, low, high)


def _kept_labels(state: State) -> Labels:
    """Return the labels to keep when the base is replaced, which may define segments without ids."""
    return labels_of_tokens(state) if state.segment_based else state.labels


# As an array


def to_dtype(state: State, dtype: DTypeLike) -> State:
    wanted = number_dtype(dtype)
    state.shape("convert the mask")
    return state if wanted == state.dtype else materialized(state, wanted)


def materialized(state: State, dtype: DTypeLike) -> State:
    wanted, array = number_dtype(dtype), state.array
    if array is not None and array.dtype == wanted:
        return state
    mask = mask_of_dtype(state, wanted)
    labels = _kept_labels(state)
    return replace(state, base=dense(mask), terms=Terms(), segment_based=False, labels=labels, dtype=wanted)


def with_segment_ids(state: State, per_head: bool) -> State:
    each_head = flag(per_head, "per_head")
    if state.labels.complete:
        return state
    return replace(
        state, labels=Labels(*segment_ids(state, each_head)), cu_seqlens_q=None, cu_seqlens_kv=None
    )


# Operators


def inverted(state: State) -> State:
    state.shape("invert it")
    return _with_terms(state, "not", baked=frozenset(), labels=Labels(), segment_based=False)


def joined(left: State, right: State, operator: str) -> State:
    """Return the pairs that both allow, or that either does; ids and positions come from the left one if it has any."""
    left.shape("combine masks")
    right_shape = right.shape("combine masks")
    named = (
        (name, (None if b == 1 else b, None if h == 1 else h, q, k))
        for name, (b, h, q, k) in (("the left mask", left.extent), ("the right mask", right.extent))
    )
    batch, heads, queries, keys = agree(named)
    batch = 1 if batch is None else batch
    assert left.base is not None
    assert right.base is not None
    if left.terms.length == right.terms.length and same(left.program, right.program):
        base, terms, in_order = left.base, left.terms, True
    else:
        base, terms, in_order = join(
            (left.base, left.terms), (right.base, right.terms), operator, right_shape
        )
    labels = _joined_labels(left, right, in_order)
    return replace(
        left,
        base=base,
        terms=terms,
        extent=(batch, 1 if heads is None else heads, queries, keys),
        segment_based=left.segment_based and in_order,
        labels=labels.for_batch(batch),
        dtype=BOOL,
        baked=left.baked | right.baked if operator == "and" else left.baked & right.baked,
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        q_positions=right.q_positions if left.q_positions is None else left.q_positions,
        kv_positions=right.kv_positions if left.kv_positions is None else left.kv_positions,
    )


def _joined_labels(left: State, right: State, in_order: bool) -> Labels:
    """Return the first held labels; otherwise what a base says, to be held unless it stays the base."""
    for state in (left, right):
        if state.labels.complete:
            return state.labels
    if left.segment_based and in_order:
        return left.labels
    for state in (left, right):
        if state.segment_based:
            return labels_of_tokens(state)
    return right.labels


# Terms


def _held_segments(state: State) -> tuple[Ids, Ids]:
    if not (state.labels.complete or state.segment_based):
        raise ValueError("within_segments must be False for a mask without segment ids, got True")
    return segment_ids(state)


def _near(
    state: State, limits: tuple[Limit, Limit], offset: object, within_segments: bool
) -> tuple[Node, ...]:
    """Return the terms for keys within `limits` of the diagonal, each with its operator."""
    batch, _, queries, keys = state.extent
    assert batch is not None
    bottom_right = is_bottom_right(offset, "offset")
    shift = 0 if bottom_right or offset is TOP_LEFT else per_row(offset, "offset", batch)
    apart = flag(within_segments, "within_segments")
    lengths = map(np.diff, _starts(state)) if apart and _is_packed(state) else (queries, keys)
    differ = not apart and have_other_starts(state)
    ask("diagonal", differ, offset is TOP_LEFT and limits == (None, 0), *lengths, offset="offset")
    if apart and not _is_one_segment(state):
        q_ids, kv_ids = _held_segments(state)
        return equal(q_ids, kv_ids), "and", _within(q_ids, kv_ids, limits, shift, bottom_right), "and"
    if bottom_right:
        assert queries is not None
        assert keys is not None
        shift = keys - queries
    return band(*limits, shift), "and"


def _is_one_segment(state: State) -> bool:
    """Return whether all tokens of a row are in one segment, so that its diagonal is the row's."""
    kind = state.base[0] if state.segment_based and state.base is not None else None
    return kind == "all" and not state.labels.complete


def _is_packed(state: State) -> bool:
    return isinstance(state.base, tuple) and state.base[0] == "sequences"


def _starts(state: State) -> tuple[Any, Any]:
    """Return where sequences of queries and keys start, or None; or pairs, one for each batch row."""
    if not _is_packed(state):
        return state.cu_seqlens_q, state.cu_seqlens_kv
    _, q_starts, k_starts, *_ = state.base  # type: ignore[misc, str-unpack]
    return q_starts, k_starts


def have_other_starts(state: State) -> bool:
    """Return whether queries and keys are packed and some sequence starts at different positions in both."""
    if not _is_packed(state) and state.extent[0] != 1:  # they are pairs, one for each batch row
        return False
    one, other = _starts(state)
    return one is not other and not (one is None or other is None or np.array_equal(one[:-1], other[:-1]))


def _within(q_ids: Ids, kv_ids: Ids, limits: tuple[Limit, Limit], shift: PerRow, bottom_right: bool) -> Node:
    """Return the term for keys within `limits` of the diagonal of their own segment."""
    if q_ids is kv_ids:  # each segment has its diagonal where the row has it
        return band(*limits, shift)
    if q_ids.shape[-1] + kv_ids.shape[-1] > _INT32_MAX:
        raise ValueError("within_segments must be False for 2**31 tokens and more, got True")
    at = _core.queries_among_keys(q_ids, kv_ids, bottom_right)
    return band(*limits, shift) if at is None else diagonal(*limits, shift, frozen(at))


def _extent_with(state: State, nodes: tuple[Node, ...]) -> Extent:
    """Return the mask's extent with more terms, which may have heads where it has one for all."""
    batch, heads, queries, keys = state.extent
    named = ("the mask", (batch, None if heads == 1 else heads, queries, keys))
    heads = agree([named, *extents(nodes)])[1]
    return batch, 1 if heads is None else heads, queries, keys


def causal(state: State, offset: object, within_segments: bool) -> State:
    state.shape("apply a causal term")
    near = _near(state, (None, 0), offset, within_segments)
    extent = state.extent if len(near) == 2 else _extent_with(state, near)
    return _with_terms(state, *near, kind="causal", extent=extent)


def sliding_window(
    state: State,
    sliding_window: object,
    offset: object,
    mode: str | None,
    index: ArrayLike | None,
    within_segments: bool,
) -> State:
    one_of(mode, "mode", (None, "default", "decode", "prefill"))
    batch, heads, queries, keys = state.shape("apply a sliding window")
    left, right = windows(sliding_window, heads)
    if index is None and mode == "decode":
        raise ValueError("index must be given with mode='decode', got None")
    places = 0 if index is None else per_row(index, "index", batch, -FARTHEST)
    near = _near(state, (None if left is None else -left, right), offset, within_segments)
    state = _with_terms(state, *near, kind="sliding_window", extent=_extent_with(state, near))
    if mode not in ("decode", "prefill"):
        return state
    left, right = (None if side is None else int(np.max(side, initial=0)) for side in (left, right))
    width = keys if left is None or right is None else min(left + right + 1, keys)
    if mode == "prefill":
        if not isinstance(sliding_window, (tuple, list)) and left is not None:
            width = min(left, keys)
        return _cropped(state, Crop(0, queries, keys - width, width))
    if queries == 0:
        raise ValueError("mode must not be 'decode' for a mask without queries")
    query = _clipped(places, 0, queries - 1)
    first = 0 if left is None else _clipped(query - left, 0, keys - width)
    return _cropped(state, Crop(query, 1, first, width))


def reject_window(given: tuple[object, ...]) -> NoReturn:
    """Refuse several positional arguments, the first two of which may be meant as a pair."""
    pair = all(side is None or type(side) is int for side in given[:2])
    sides = ", ".join(map(describe, given[:2]))
    hint = f"apply_sliding_window(({sides}))" if pair else "offset=, mode= or index="
    raise TypeError(f"apply_sliding_window() takes 1 positional argument, got {len(given)}; write {hint}")


def prefix(state: State, lengths: ArrayLike) -> State:
    given = per_row(lengths, "lengths", state.shape("apply a prefix")[0], 0)
    q_ids, kv_ids = labels_of_tokens(state).get()
    assert q_ids is not None
    assert kv_ids is not None
    length = np.reshape(given, (-1, *(1,) * (kv_ids.ndim - 1)))
    first = equal(q_ids, frozen(np.where(_core.count_earlier_tokens(kv_ids) < length, kv_ids, np.int32(-1))))
    return _with_terms(state, first, "or", extent=_extent_with(state, (first,)))


def chunked(state: State, chunk_size: int, offset: ArrayLike, within_segments: bool) -> State:
    size = integer(chunk_size, "chunk_size", 1)
    shape = state.shape("apply chunks")
    shift = per_row(offset, "offset", shape[0])
    up_to = None, 0
    if flag(within_segments, "within_segments"):
        ids = _held_segments(state)
        chunks = _chunks_of_segments(*ids, size, shift)
        nodes: tuple[Node, ...] = equal(*chunks), "and", _within(*ids, up_to, shift, False), "and"
        labels, extent = Labels(*chunks, "chunk"), _extent_with(state, nodes)
        return _with_terms(state, *nodes, kind="chunked", labels=labels, extent=extent)
    ask("diagonal", have_other_starts(state), False, shape[2], shape[3])

    def numbered(ids: Ids) -> Ids:
        number = np.arange(ids.shape[-1], dtype=np.int32) // np.int32(min(size, _INT32_MAX)) + np.int32(1)
        return frozen(np.where(ids < 0, np.int32(-1), number))

    def moved(ids: Ids) -> Ids:
        number = np.arange(ids.shape[-1]) + np.reshape(shift, (-1, *(1,) * (ids.ndim - 1)))
        number //= min(size, ALL_PLACES)
        number += 1
        number[number < 1] = -1
        return frozen(np.where(ids < 0, np.int32(-1), number.clip(max=_INT32_MAX).astype(np.int32)))

    still = isinstance(shift, int) and shift == 0
    labels = labels_of_tokens(state).map(
        numbered if still else moved, numbered, shape[2], shape[3], noun="chunk"
    )
    return _with_terms(
        state, chunk(size, shift), "and", band(*up_to, shift), "and", kind="chunked", labels=labels
    )


def _chunks_of_segments(q_ids: Ids, kv_ids: Ids, size: int, shift: PerRow) -> tuple[Ids, Ids]:
    """Number the chunks of each row's segments from 1, counted from each segment's start; -1 for padding.

    Queries are moved by `shift` positions; one that leaves the chunks of its segment gets -1, too.
    """
    same = q_ids is kv_ids and isinstance(shift, int) and shift == 0
    shifts = np.atleast_1d(np.asarray(shift, np.int64))
    chunks, kv_chunks = _core.chunks_of_segments(q_ids, None if same else kv_ids, size, shifts)
    chunks = frozen(chunks)
    return chunks, chunks if same else frozen(kv_chunks)


def token_type_ids(
    state: State,
    token_type_ids: ArrayLike | tuple[ArrayLike, ArrayLike],
    combine: str,
    zero_policy: str,
    update_segment_ids: bool | None,
) -> State:
    if isinstance(token_type_ids, tuple):
        if len(token_type_ids) != 2:
            raise ValueError(f"token_type_ids must be an array or two, got {len(token_type_ids)}")
        names = "token_type_ids[0]", "token_type_ids[1]"
        q_types, kv_types = map(integers, token_type_ids, names, (("[B, Q]",), ("[B, K]",)))
    else:
        names = "token_type_ids", "token_type_ids"
        q_types = kv_types = integers(token_type_ids, names[0], ("[B, Q]",))
    one_of(combine, "combine", ("union", "intersect", "replace"))
    one_of(zero_policy, "zero_policy", ("q", "kv", "both", "none"))
    batch, _, queries, keys = state.shape("apply token types")
    for types, name, length in zip((q_types, kv_types), names, (queries, keys), strict=True):
        if types.shape != (batch, length):
            raise ValueError(f"{name} must be of shape {(batch, length)} for this mask, got {types.shape}")
    term = equal(q_types, kv_types, zero_policy != "none")
    changes: Arguments = {"kind": "token_type_ids"}
    updates = update_segment_ids
    if combine != "union" if updates is None else flag(updates, "update_segment_ids"):
        q_ids = frozen(np.where(q_types == 0, np.int32(-1), q_types))
        kv_ids = q_ids if kv_types is q_types else frozen(np.where(kv_types == 0, np.int32(-1), kv_types))
        changes["labels"] = Labels(q_ids, kv_ids)
    if combine == "replace":
        extent = (batch, 1, queries, keys)
        changes = {"labels": _kept_labels(state), **changes}
        return _with_terms(state, base=term, terms=Terms(), extent=extent, segment_based=False, **changes)
    return _with_terms(state, term, "or" if combine == "union" else "and", **changes)


def kv_lengths(state: State, kv_lengths: ArrayLike, q_len: int | None, sliding_window: int | None) -> State:
    batch, _, queries, keys = state.shape("apply key lengths")
    lengths = per_row(kv_lengths, "kv_lengths", batch, 0)
    kept_queries = queries if q_len is None else integer(q_len, "q_len", 0)
    if kept_queries > queries:
        raise ValueError(f"q_len must be at most {queries}, the number of queries, got {kept_queries}")
    kept_keys = keys if sliding_window is None else min(integer(sliding_window, "sliding_window", 0), keys)
    state = _with_terms(state, first_keys(lengths), "and")
    if (kept_queries, kept_keys) == (queries, keys):
        return state
    q_start = 0 if kept_queries == queries else _clipped(lengths - kept_queries, 0, queries - kept_queries)
    k_start = 0 if kept_keys == keys else _clipped(lengths - kept_keys, 0, keys - kept_keys)
    return _cropped(state, Crop(q_start, kept_queries, k_start, kept_keys))


def chunked_array(
    chunk_size: int, q_len: int, kv_len: int | None, offset: int, dtype: DTypeLike, out: Array | None
) -> Array:
    size, queries = integer(chunk_size, "chunk_size", 1), axis_length(q_len, "q_len")
    keys = queries if kv_len is None else axis_length(kv_len, "kv_len")
    shift = per_row(offset, "offset", 1)
    program = (chunk(size, shift), band(None, 0, shift), "and")
    wanted = number_dtype(dtype)
    if out is None:
        return fill((1, 1, queries, keys), program, wanted, 1, 0).reshape(queries, keys)
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out must be an array, got {describe(out)}")
    target = np.asarray(out)
    if target.shape != (queries, keys) or target.dtype != wanted:
        raise ValueError(
            f"out must be an array of {wanted} of shape {(queries, keys)}, got {describe(target)}"
        )
    fill((1, 1, queries, keys), program, wanted, 1, 0, target[None, None])
    return out
