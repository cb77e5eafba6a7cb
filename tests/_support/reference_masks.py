"""Masks in NumPy, which complement `reference`: written to be read, not to be fast.

A pair (query, key) is live where the mask is not zero. Negative ids are padding.
"""

from collections import Counter

import numpy as np
from reference import fitted

# From masks to segment ids and back


def number_rows(rows: np.ndarray) -> np.ndarray:
    """Gives equal rows the same number, in order of first appearance; rows without a live pair get -1."""
    seen: dict[bytes, int] = {}
    return np.array(
        [seen.setdefault(row.tobytes(), len(seen)) if row.any() else -1 for row in rows], np.int32
    )


def mask_to_segment_ids(mask, per_head: bool = False) -> tuple[np.ndarray, np.ndarray]:
    live = np.asarray(mask) != 0
    if live.ndim == 2:
        return number_rows(live), number_rows(np.ascontiguousarray(live.T))
    if live.ndim == 4 and not per_head:
        live = live[:, 0]
    planes = [mask_to_segment_ids(plane, per_head) for plane in live]
    *outer, queries, keys = live.shape
    q_ids = np.array([q for q, _ in planes], np.int32).reshape(*outer, queries)
    kv_ids = np.array([kv for _, kv in planes], np.int32).reshape(*outer, keys)
    return q_ids, kv_ids


def pairwise(q_ids, kv_ids) -> np.ndarray:
    """Which pairs have equal and valid ids: bool [..., Q, K]."""
    q_ids, kv_ids = np.asarray(q_ids)[..., :, None], np.asarray(kv_ids)[..., None, :]
    return (q_ids == kv_ids) & (q_ids >= 0)


def segment_ids_to_mask(q_ids, kv_ids, dtype=bool) -> np.ndarray:
    """[B, 1, Q, K], or [B, H, Q, K] if an id array has heads."""
    q_ids, kv_ids = (
        ids if ids.ndim == 3 else ids[:, None] for ids in (np.asarray(q_ids), np.asarray(kv_ids))
    )
    return pairwise(q_ids, kv_ids).astype(dtype)


def token_mask(ids, dtype=bool) -> np.ndarray:
    return (np.asarray(ids) >= 0).astype(dtype)


def first_ungrouped(mask, per_head: bool = False) -> tuple[int, ...] | None:
    """The first position where a mask differs from the one that its segment ids imply."""
    live = np.asarray(mask) != 0
    expected = pairwise(*mask_to_segment_ids(mask, per_head))
    if live.ndim == 4 and not per_head:
        expected = expected[:, None]
    wrong = np.argwhere(live != expected)
    return tuple(wrong[0].tolist()) if len(wrong) else None


def attention_mask_to_padding_segment_ids(mask) -> tuple[np.ndarray, np.ndarray]:
    live = np.asarray(mask) != 0
    live = live.reshape((1,) * (live.ndim == 2) + live.shape)
    if live.ndim == 4:
        live = live.any(axis=1)
    return live.any(axis=2).astype(np.int32) - np.int32(1), live.any(axis=1).astype(np.int32) - np.int32(1)


# Properties of segment ids


def segment_ids_to_cu_seqlens(ids, out_dtype=np.int32, max_segments: int | None = 128) -> np.ndarray:
    """Entry i is the number of tokens with ids below i, whether or not these ids occur."""
    counts = Counter(i for i in np.asarray(ids).ravel().tolist() if i >= 0)
    slots = max(counts, default=-1) + 1 if max_segments is None else max_segments
    sums = [0]
    for index in range(slots):
        sums.append(sums[-1] + counts[index])
    return fitted(sums, out_dtype)


def positions_from_segment_ids(ids, pad_value: int = -1) -> np.ndarray:
    """Counts up while the id stays the same."""
    ids = np.asarray(ids)
    positions = np.empty(ids.shape, np.int32)
    for *row, token in np.ndindex(ids.shape):
        here, before = (*row, token), (*row, token - 1)
        if ids[here] < 0:
            positions[here] = pad_value
        else:
            goes_on = token > 0 and ids[here] == ids[before]
            positions[here] = positions[before] + 1 if goes_on else 0
    return positions


# Ranges of tokens, [start0, end0, start1, end1, …]


def ranges_of(tokens, out_dtype=np.int32) -> np.ndarray:
    """The range of each row: from its first token to one after its last."""
    ends = []
    for row in np.asarray(tokens) != 0:
        places = np.flatnonzero(row).tolist()
        ends += [places[0], places[-1] + 1] if places else [0, 0]
    return fitted(ends, out_dtype)


def attention_mask_to_qkv_cu_seqlens(mask, reduce_heads: str = "any", out_dtype=np.int32) -> tuple:
    live = np.asarray(mask) != 0
    if live.ndim == 4:
        live = {"any": live.any, "all": live.all, "first": lambda axis: live[:, 0]}[reduce_heads](axis=1)
    if live.ndim == 2:
        return ranges_of(live, out_dtype), ranges_of(live, out_dtype)
    return ranges_of(live.any(axis=2), out_dtype), ranges_of(live.any(axis=1), out_dtype)


def cu_seqlens_to_mask(pairs, max_len: int, dtype=bool) -> np.ndarray:
    pairs = [int(end) for end in np.asarray(pairs).tolist()]
    rows = [
        [start <= token < end for token in range(max_len)]
        for start, end in zip(*[iter(pairs)] * 2, strict=True)
    ]
    return np.array(rows, bool).reshape(len(rows), max_len).astype(dtype)


def qkv_cu_seqlens_to_attention_mask(
    q_pairs, max_q_len: int, kv_pairs, max_kv_len: int, dtype=bool
) -> np.ndarray:
    q_mask, kv_mask = cu_seqlens_to_mask(q_pairs, max_q_len), cu_seqlens_to_mask(kv_pairs, max_kv_len)
    return (q_mask[:, None, :, None] & kv_mask[:, None, None, :]).astype(dtype)


def pairs_to_cu_seqlens(pairs) -> np.ndarray:
    pairs = np.asarray(pairs)
    if pairs.size and pairs.max() > 2**63 - 1:
        raise OverflowError("beyond int64")
    sums = [0]
    for start, end in zip(*[iter(pairs.tolist())] * 2, strict=True):
        sums.append(sums[-1] + max(end - max(start, 0), 0))
    return fitted(sums, pairs.dtype)


def cu_seqlens_to_pairs(cu_seqlens) -> np.ndarray:
    ends = np.asarray(cu_seqlens)
    return np.stack([ends[:-1], ends[1:]], axis=1).ravel().astype(ends.dtype.newbyteorder("="))


def numbers_of_tokens(q_ids, kv_ids, size, shift):
    """Earlier tokens of a row's queries, their positions by the first and last tokens, and chunks of both sides."""
    runs = []
    for side, ids in enumerate((q_ids, kv_ids)):
        for place, segment in enumerate(ids):
            if place == 0 or segment != ids[place - 1]:
                runs.append((segment, side, []))
            runs[-1][2].append(place)
    earlier, first, last = np.full(len(q_ids), -1), *np.tile(np.arange(len(q_ids)), (2, 1))
    chunks = np.full(len(q_ids), -1), np.full(len(kv_ids), -1)
    next_chunk = 1
    for segment in sorted({segment for segment, *_ in runs if segment >= 0}):
        own = [(side, places) for other, side, places in runs if other == segment]
        queries, keys = ([place for one, places in own if one == side for place in places] for side in (0, 1))
        earlier[queries] = np.arange(len(queries))
        if queries and keys:
            first[queries] += keys[0] - queries[0]
            last[queries] += keys[-1] - queries[-1]
        count = max((len(places) + size - 1) // size for _, places in own)
        for side, places in own:
            for i, place in enumerate(places):
                chunk = (i + (0 if side else shift)) // size
                chunks[side][place] = next_chunk + chunk if 0 <= chunk < count else -1
        next_chunk += count
    return earlier, first, last, *chunks


def cells(plane: np.ndarray, q_cell: int, k_cell: int) -> np.ndarray:
    """How many pairs of each cell of so many queries and keys are live."""
    starts = [np.arange(0, length, cell) for length, cell in zip(plane.shape, (q_cell, k_cell), strict=True)]
    if not plane.size:
        return np.zeros(list(map(len, starts)), np.int64)
    return np.add.reduceat(np.add.reduceat(plane.astype(np.int64), starts[0], axis=0), starts[1], axis=1)


def seen_along(
    length: int, kernel: int, stride: int = 1, dilation: int = 1, causal: bool = False
) -> np.ndarray:
    """Which points of one axis see which, by NATTEN's rules: each phase of a dilated axis is an axis of its own."""
    seen = np.zeros((length, length), bool)
    for phase in range(dilation):
        points = np.arange(phase, length, dilation)
        for place, point in enumerate(points):
            group = points[place // stride * stride :][:stride]
            if causal:
                last = place // stride * stride + stride - 1
                last = min(last, len(points) - 1)
                window = points[max(last - kernel + 1, 0) : place + 1]
            else:
                middle = place // stride * stride + min(stride // 2, len(group) - 1)
                begin = sorted((0, middle - kernel // 2, len(points) - kernel))[1]
                window = points[begin : begin + kernel]
            seen[point, window] = True
    return seen


def neighborhood(shape, kernel, stride=1, dilation=1, causal=False) -> np.ndarray:
    """The pairs ``[Q, K]`` of the points of a grid."""
    axes = [np.broadcast_to(value, len(shape)).tolist() for value in (kernel, stride, dilation, causal)]
    pairs = np.ones((1, 1), bool)
    for length, *along in zip(shape, *axes, strict=True):
        pairs = np.kron(pairs, seen_along(length, *along))
    return pairs
