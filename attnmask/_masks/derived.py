"""Derive arrays, segment ids, lengths and positions from a mask, on request."""

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from attnmask._common.arguments import frozen, integer, is_floating, number_dtype, place
from attnmask._common.loading import _core
from attnmask._common.types import Array, DType
from attnmask._masks import convert as masks
from attnmask._masks.program import Shape, fill, join, same
from attnmask._masks.state import Ids, Labels, MaybeIds, State, base_ids, fitted, padding_of
from attnmask._masks.terms import equal
from attnmask._masks.tree import flatten
from attnmask._sequences import packed

_NO_KEY = int(np.iinfo(np.int32).max)  # padding among keys has this position, later than every query
_LOWEST_BFLOAT16 = float.fromhex("-0x1.fep+127")
_SEGMENTS = 128  # cu_seqlens have room for at least so many
_LABELLED_PAIRS = 2**24  # a picture shows no ids for an array with more: finding them takes a pass over it


# The mask as an array


def _filled(state: State, dtype: DType, live: float, dead: float, out: Array | None) -> Array:
    array = fill(*state.described("write out the mask"), dtype, live, dead, out)
    return frozen(array) if out is None else array


def mask_array(state: State) -> Array:
    array = state.array
    if array is not None:
        return array
    return state.once("attention_mask", lambda: _filled(state, state.dtype, 1, 0, None))


def mask_of_dtype(state: State, dtype: DTypeLike, out: Array | None = None) -> Array:
    wanted = number_dtype(dtype)
    return mask_array(state) if out is None and wanted == state.dtype else _filled(state, wanted, 1, 0, out)


def array_protocol(state: State, dtype: DTypeLike | None, copy: bool | None) -> Array:
    """Return what ``__array__`` returns: the mask itself unless another type or a copy is requested."""
    array = mask_array(state)
    wanted = array.dtype if dtype is None else np.dtype(dtype)
    if copy is False and wanted != array.dtype:
        raise ValueError(f"copy must be True or None for a mask of {array.dtype} as {wanted}, got False")
    return array.astype(wanted, copy=bool(copy))


def bias(state: State, dtype: DTypeLike, out: Array | None) -> Array:
    try:
        wanted = number_dtype(dtype)
    except TypeError:
        wanted = np.dtype(bool)
    if not is_floating(wanted):
        raise TypeError(f"dtype must be float16, bfloat16, float32 or float64, got {dtype!r}")
    lowest = float(np.finfo(wanted).min) if wanted.kind == "f" else _LOWEST_BFLOAT16
    if out is None and wanted == np.float32:
        return state.once("bias", lambda: _filled(state, wanted, 0.0, lowest, None))
    return _filled(state, wanted, 0.0, lowest, out)


# Segment ids, lengths and positions


def segment_ids(state: State, per_head: bool = False) -> tuple[Ids, Ids]:
    """Return the held segment ids; otherwise those the base implies, or those of equal rows and columns of the mask."""
    q_ids, kv_ids = state.labels.get()
    if q_ids is None or kv_ids is None:
        state.shape("tell segment ids")
        if state.segment_based:
            found = state.once("segment ids", lambda: base_ids(state))
        else:
            name = "per-head segment ids" if per_head else "segment ids"
            found = state.once(name, lambda: _alike(state, per_head))
        q_ids = found[0] if q_ids is None else q_ids
        kv_ids = found[1] if kv_ids is None else kv_ids
    return q_ids, kv_ids


def labels_of_tokens(state: State) -> Labels:
    """Return the segment ids held or implied by the base; otherwise 0 for tokens with a live pair, -1 for others."""
    if state.labels.complete:
        return state.labels
    shape, program = state.described("tell segment ids")
    if state.segment_based:
        return Labels.later([(shape[0], shape[2]), (shape[0], shape[3])], lambda: segment_ids(state))
    return padding_of(shape, program)


def _alike(state: State, per_head: bool) -> tuple[Ids, Ids]:
    mask = mask_array(state)
    known = (
        mask if mask.dtype.kind in "biu" else mask != 0
    )  # floating-point zeros alone would look like a bias
    q_ids, kv_ids = masks.mask_to_segment_ids(known, per_head)
    return frozen(q_ids), frozen(kv_ids)


def side_ids(state: State, side: int) -> Ids:
    """Return the ids of one side, 0 for queries and 1 for keys; it is enough if these are held."""
    held = state.labels.get()[side]
    return segment_ids(state)[side] if held is None else held


def _first_head(ids: Ids) -> Ids:
    if ids.ndim == 2:
        return ids
    return ids[:, 0] if ids.shape[1] else np.full((len(ids), ids.shape[2]), -1, np.int32)


def is_multi_sequence(state: State) -> np.bool:
    q_ids, kv_ids = state.labels.get()
    ids = kv_ids if q_ids is None else q_ids
    return np.bool(ids is not None and _first_head(ids).max(initial=-1) > 0)


def lens(state: State, side: int) -> NDArray[np.int32] | None:
    if state.labels.shapes[side] is None and state.base is None:
        return None
    ids = _first_head(side_ids(state, side))
    of_segments = _core.segment_lens(ids)
    if len(of_segments) > 1:
        return frozen(of_segments)
    padding = packed.prepare_lens_from_mask(ids)  # all ids are 0 or negative
    return frozen(ids.shape[-1] - padding)


def cu_seqlens(state: State, out_dtype: DTypeLike, max_segments: int | None) -> tuple[Array, Array]:
    dtype = number_dtype(out_dtype, "out_dtype")
    if dtype.kind not in "iu":
        raise TypeError(f"out_dtype must be an integer type, got {dtype}")
    if max_segments is not None:
        max_segments = integer(max_segments, "max_segments", 0)
    held = [cu for cu in (state.cu_seqlens_q, state.cu_seqlens_kv) if cu is not None]
    if held:
        return _converted(held[0], dtype), _converted(held[-1], dtype)
    if state.labels.complete:
        both = [_first_head(ids) for ids in segment_ids(state)]
        if max_segments is None:
            max_segments = max(_SEGMENTS, *(int(ids.max(initial=-1)) + 1 for ids in both))
        q_cu, kv_cu = (masks.segment_ids_to_cu_seqlens(ids, dtype, max_segments) for ids in both)
    else:
        live = _core.mask_any(*state.described("tell cu_seqlens"))
        q_cu, kv_cu = masks.qkv_masks_to_cu_seqlens(*(tokens.any(axis=1) for tokens in live), out_dtype=dtype)
    return frozen(q_cu), frozen(kv_cu)


def cu_seqlens_of_int32(state: State) -> tuple[Array, Array]:
    return state.once("cu_seqlens", lambda: cu_seqlens(state, np.int32, None))


def _converted(cu: Array, dtype: DType) -> Array:
    limits = np.iinfo(dtype)
    if cu.size and not limits.min <= cu.min() <= cu.max() <= limits.max:
        raise OverflowError(f"cu_seqlens do not fit {dtype}: they are up to {cu.max()}")
    return cu if cu.dtype == dtype else frozen(cu.astype(dtype))


def position_ids(state: State, side: int, pad: int = -1) -> Ids:
    return frozen(masks.positions_from_segment_ids(side_ids(state, side), pad_value=pad))


def positions(state: State) -> tuple[MaybeIds, MaybeIds]:
    told = state.base is not None or state.labels.complete
    q_positions, kv_positions = state.q_positions, state.kv_positions
    if told and q_positions is None:
        q_positions = position_ids(state, 0)
    if told and kv_positions is None:
        kv_positions = position_ids(state, 1, _NO_KEY)
    return q_positions, kv_positions


def qkv_masks(state: State, dtype: DTypeLike) -> tuple[Array, Array, Array]:
    wanted = number_dtype(dtype)
    q_ids, kv_ids = segment_ids(state)
    program = (equal(q_ids, kv_ids),)
    shape: Shape = fitted(State(base=program[0], labels=Labels(q_ids, kv_ids))).extent  # type: ignore[assignment]
    pairs = frozen(fill(shape, program, wanted, 1, 0))
    return frozen((q_ids >= 0).astype(wanted)), frozen((kv_ids >= 0).astype(wanted)), pairs


# What it is


def is_self_attention(state: State) -> bool:
    q_ids, kv_ids = state.labels.get()
    if kv_ids is not None and q_ids is not None:
        return q_ids is kv_ids or np.array_equal(q_ids, kv_ids)
    if state.base is not None:
        return state.extent[2] == state.extent[3]
    q_cu, kv_cu = state.cu_seqlens_q, state.cu_seqlens_kv
    return q_cu is not None and kv_cu is not None and np.array_equal(q_cu, kv_cu)


def density(state: State) -> float:
    return state.once("density", lambda: _density(state))


def _density(state: State) -> float:
    shape, program = state.described("count live pairs")
    pairs = shape[0] * shape[1] * shape[2] * shape[3]
    return int(_core.mask_count(shape, program).sum()) / pairs if pairs else 0.0


def grid(state: State, batch: int, head: int, q_cell: int, k_cell: int) -> NDArray[np.int64]:
    shape, program = state.described("count live pairs")
    plane = place(batch, "batch", shape[0]), place(head, "head", shape[1])
    cells = integer(q_cell, "q_cell", 1), integer(k_cell, "k_cell", 1)
    return frozen(_core.mask_grid(shape, program, *plane, *cells))


def plane_labels(state: State, batch: int, head: int) -> tuple[Ids, Ids] | None:
    shape = state.shape("tell segment ids")
    batch, head = place(batch, "batch", shape[0]), place(head, "head", shape[1])
    told = state.labels.complete or state.segment_based
    if not told and shape[1] * shape[2] * shape[3] > _LABELLED_PAIRS:
        return None
    labels = segment_ids(state, per_head=shape[1] > 1)
    if any(ids.ndim == 3 and ids.shape[1] == 0 for ids in labels):
        return None
    q_ids, kv_ids = (
        ids[batch] if ids.ndim == 2 else ids[batch, min(head, ids.shape[1] - 1)] for ids in labels
    )
    return q_ids, kv_ids


def are_equal(one: State, other: State) -> bool:
    """Return whether the same pairs are live; heads broadcast."""
    if one.base is None or other.base is None:
        return one.base is other.base and _same_leaves(flatten(one)[0], flatten(other)[0])
    (b, h, q, k), left = one.described("compare")
    other_shape, right = other.described("compare")
    other_b, other_h, other_q, other_k = other_shape
    if (b, q, k) != (other_b, other_q, other_k) or (h != other_h and 1 not in (h, other_h)):
        return False
    if same(left, right):
        return True
    base, terms, _ = join((one.base, one.terms), (other.base, other.terms), "xor", other_shape)
    return not _core.mask_count((b, other_h if h == 1 else h, q, k), (base, *terms.nodes)).any()


def _same_leaves(mine: tuple[ArrayLike, ...], others: tuple[ArrayLike, ...]) -> bool:
    return all(
        a is b or (a is not None and b is not None and np.array_equal(a, b))
        for a, b in zip(mine, others, strict=True)
    )
