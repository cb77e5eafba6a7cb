"""Attention with a cache of keys and values in NumPy, which complements `reference_flash`: written to be read.

`attention` is the readable twin of `attnmask.flash_attention_with_kvcache`: one sequence at a time, in float64, over
the numbers that the cache stands for. Nothing is checked.
"""

from collections.abc import Iterator
from itertools import pairwise

import ml_dtypes
import numpy as np
import reference_flash as ref
from reference_terms import dense_terms, distances, grid_terms, points

LARGEST = {
    "int8": 127,
    "float8_e4m3fn": 448,
    "float8_e5m2": 57344,
}  # magnitudes of quantized numbers, by the names of their types
QUANTIZED = tuple(np.dtype(getattr(ml_dtypes, name, name)) for name in LARGEST)
FAR = 2**60


def sequences(
    query, k_cache, v_cache, key, value, cache_seqlens, block_table, cu_seqlens_q, k_scale, v_scale,
    softmax_scale, causal, sliding_window, logits_soft_cap, softmax_aux, alibi_slopes, attention_mask,
    bias=None, relative_bias=None, relative_low=0, grid_bias=None, cu_seqlens_k_new=None,
    attention_chunk=None, dtype=np.float64,
) -> Iterator[dict]:  # fmt: skip
    """Appends `key` and `value` to the caches, and yields what `reference_flash` takes for each sequence."""
    starts, flat = packed(query, cu_seqlens_q)
    there = np.broadcast_to(k_cache.shape[1] if cache_seqlens is None else cache_seqlens, len(starts) - 1)
    spans = [slice(*span) for span in pairwise(starts)]
    lengths = [int(length) for length in there]
    if key is not None:
        starts = cu_seqlens_q if cu_seqlens_k_new is None else cu_seqlens_k_new
        for row in range(len(spans)):
            length, own = lengths[row], row if starts is None else slice(*starts[row : row + 2])
            append(k_cache, k_scale, block_table, row, length, np.asarray(key)[own])
            if value is not None:  # else values are channels of the keys
                append(v_cache, v_scale, block_table, row, length, np.asarray(value)[own])
            lengths[row] += len(np.asarray(key)[own])

    for row, (span, length) in enumerate(zip(spans, lengths, strict=True)):
        yield {
            "query": flat[None, span],
            "key": tokens(k_cache, k_scale, block_table, row, length)[None],
            "value": tokens(v_cache, v_scale, block_table, row, length)[None],
            "attention_mask": both(
                mask_of(attention_mask, row, None if cu_seqlens_q is None else span, length),
                chunks(attention_chunk, span.stop - span.start, length),
            ),
            "bias": added(
                mask_of(bias, row, None if cu_seqlens_q is None else span, length),
                by_distance(alibi_slopes, relative_bias, relative_low, row, span.stop - span.start, length),
                by_point(grid_bias, span.stop - span.start, length),
            ),
            "softmax_scale": softmax_scale,
            "causal": causal,
            "causal_offset": "bottom-right",
            "sliding_window": window(sliding_window),
            "logits_soft_cap": logits_soft_cap if logits_soft_cap and np.isfinite(logits_soft_cap) else None,
            "softmax_aux": softmax_aux,
            "dtype": dtype,
        }


def attention(query, k_cache, v_cache, *args, **given) -> ref.Attention:
    """Appends `key` and `value` to the caches, and lets the queries attend to all tokens of their sequences.

    Computed in `dtype`, with the sizes of what was summed, to which rounding errors are proportional.
    """
    own = sequences(query, k_cache, v_cache, *args, **given)
    return joined([ref.flash_attention(**each) for each in own], query, v_cache)


def weights(**given) -> list[tuple[np.ndarray, np.ndarray]]:
    """The weights and logits of each sequence, [H, Tq, length], by `reference_flash.attention_weights`."""
    own = ({name: x for name, x in each.items() if name != "value"} for each in sequences(**given))
    return [tuple(x[0] for x in ref.attention_weights(**each)) for each in own]


def packed(query, cu_seqlens_q):
    """Where the queries of sequences start and end, and the queries one after another."""
    if cu_seqlens_q is None:
        starts = [row * query.shape[1] for row in range(query.shape[0] + 1)]
    else:
        starts = np.asarray(cu_seqlens_q).tolist()
    return starts, np.asarray(query).reshape(-1, *np.shape(query)[-2:])


def joined(parts, query, v_cache) -> ref.Attention:
    """The results of all sequences, in the shape of the query."""
    heads, depth = query.shape[-2], v_cache.shape[-1] * (2 if v_cache.dtype == np.uint8 else 1)
    out = np.concatenate([np.zeros((0, heads, depth)), *(part.out[0] for part in parts)])
    out_size = np.concatenate([np.zeros((0, heads, depth)), *(part.out_size[0] for part in parts)])
    lse = np.concatenate([np.zeros((heads, 0)), *(part.lse[0] for part in parts)], axis=1)
    size = np.concatenate([np.zeros((heads, 0)), *(part.logit_size[0] for part in parts)], axis=1)
    if query.ndim == 4:
        out, out_size = (array.reshape(*query.shape[:3], depth) for array in (out, out_size))
        lse, size = (array.reshape(heads, *query.shape[:2]).swapaxes(0, 1).copy() for array in (lse, size))
    return ref.Attention(out, lse, out_size, size)


# The cache


def places(cache, block_table, row, start, end) -> tuple[np.ndarray, np.ndarray]:
    """Where the tokens of a sequence from `start` to `end` lie: the first two indices of a cache."""
    positions = np.arange(start, end)
    if block_table is None:
        return np.full(len(positions), row), positions
    page_size = cache.shape[1]
    return np.asarray(block_table)[row, positions // page_size], positions % page_size


def tokens(cache, scale, block_table, row, length) -> np.ndarray:
    """The first tokens of one sequence, [length, Hkv, D]: the numbers that the cache stands for."""
    where = places(cache, block_table, row, 0, length)
    if cache.dtype == np.uint8:
        return of_halves(cache[where], scale[where])
    numbers = cache[where].astype(np.float64)
    if scale is None:
        return numbers
    return numbers * np.broadcast_to(scale, (*cache.shape[:3], scale.shape[3]))[where].astype(np.float64)


def of_halves(halves, scale) -> np.ndarray:
    """Numbers of four bits, [..., D / 2], times the scales of their groups, and their offsets, [..., D / group, 2]."""
    numbers = np.stack([halves & 15, halves >> 4], axis=-1)
    groups = numbers.reshape(*scale.shape[:-1], 2 * halves.shape[-1] // scale.shape[-2]).astype(np.float64)
    wide = scale.astype(np.float64)
    return (groups * wide[..., :1] + wide[..., 1:]).reshape(*halves.shape[:-1], 2 * halves.shape[-1])


def to_halves(new, groups, dtype) -> tuple[np.ndarray, np.ndarray]:
    """What `of_halves` reads, for scales and offsets of that type. A group with a number that is not finite is NaN, and
    what the type cannot hold becomes the nearest number that it can.
    """
    parts = new.astype(np.float32).reshape(*new.shape[:-1], groups, new.shape[-1] // groups)
    low, high = parts.min(axis=-1, keepdims=True), parts.max(axis=-1, keepdims=True)
    with np.errstate(all="ignore"):
        wrong = np.where(np.isfinite(parts).all(axis=-1, keepdims=True), np.float32(0), np.float32(np.nan))
        top = np.finfo(np.float32).max * np.float32(1 - 2**-20)
        most = min(np.float32(np.finfo(dtype).max), top)
        widest = most if dtype == np.float16 else top / np.float32(15)
        least = np.clip(low, -most, most)
        scale = (((np.minimum(high, top) - least) / np.float32(15)).clip(0, widest) + wrong).astype(dtype)
        offset = (least + wrong).astype(dtype)
        scale[scale == 0] = 1
        numbers = np.clip((parts - offset.astype(np.float32)) / scale.astype(np.float32), 0, 15)
    numbers = np.rint(np.where(np.isnan(numbers), 0, numbers)).astype(np.uint8).reshape(new.shape)
    return numbers[..., ::2] | numbers[..., 1::2] << 4, np.concatenate([scale, offset], axis=-1)


def append(cache, scale, block_table, row, length, new) -> None:
    """Writes tokens [T, Hkv, D] behind the first `length` of a sequence."""
    where = places(cache, block_table, row, length, length + len(new))
    if cache.dtype == np.uint8:
        cache[where], scale[where] = to_halves(new, scale.shape[-2], scale.dtype)
        return
    with np.errstate(over="ignore"):
        if cache.dtype.name not in LARGEST:
            cache[where] = new.astype(cache.dtype)
            return
        new = new.astype(np.float32)
        if scale is not None and scale.shape == (*cache.shape[:3], 1):  # a token and head
            scale[where] = own_scale(new, cache.dtype)
        scales = 1 if scale is None else np.broadcast_to(scale, (*cache.shape[:3], scale.shape[3]))[where]
        cache[where] = quantized(new / scales, cache.dtype)


def own_scale(new, dtype) -> np.ndarray:
    scale = abs(new).max(axis=-1, keepdims=True) / np.float32(LARGEST[dtype.name])
    return np.where(scale == 0, np.float32(1), scale)


def quantized(numbers, dtype) -> np.ndarray:
    """To the nearest number of the type, ties to even; too large ones become the largest."""
    clipped = np.clip(numbers, -LARGEST[dtype.name], LARGEST[dtype.name])
    return (np.rint(clipped) if dtype.kind == "i" else clipped).astype(dtype)


# What goes into logits


def window(sliding_window):
    if sliding_window is None:
        return None
    sides = sliding_window if isinstance(sliding_window, (tuple, list)) else (sliding_window,) * 2
    return tuple(FAR if side is None else side for side in sides)


def mask_of(attention_mask, row, span, length):
    """The mask or bias of one sequence, [1, H, Tq, length], of one that broadcasts to [B, H, Tq, K], [1, H, total, K].

    `span` says which of packed queries are the sequence's; K may be longer than the sequence.
    """
    if attention_mask is None:
        return None
    mask = np.asarray(getattr(attention_mask, "attention_mask", attention_mask))
    mask = mask[(None,) * (4 - mask.ndim)]
    if span is not None:
        mask = mask[:, :, span] if mask.shape[2] > 1 else mask
    elif len(mask) > 1:
        mask = mask[row : row + 1]
    return mask[..., :length]


def chunks(size, queries, keys):
    """Which keys are in the chunk of each of the last queries of a sequence, [1, 1, Tq, K]."""
    if size is None:
        return None
    places = np.arange(keys - queries, keys)
    return (places[:, None] // size == np.arange(keys) // size)[None, None]


def both(mask, other):
    if mask is None or other is None:
        return other if mask is None else mask
    return (mask != 0) & other


def by_distance(slopes, table, low, row, queries, keys):
    """What ALiBi and a relative bias add to the logits of one sequence, [1, H, Tq, K]."""
    if slopes is None and table is None:
        return None
    if slopes is not None:
        slopes = np.atleast_2d(np.asarray(slopes, np.float64))
        slopes = slopes[row if len(slopes) > 1 else 0]
    table = None if table is None else np.asarray(table).astype(np.float64)
    return dense_terms(distances(queries, keys, [keys - queries]), slopes, table, low)


def by_point(table, queries, keys):
    """What a grid bias adds to the logits of one sequence, [1, H, Tq, K]."""
    if table is None:
        return None
    table = np.asarray(table).astype(np.float64)
    return grid_terms(table, points(queries, keys, [keys - queries], table.shape[1:]))


def added(*terms):
    """The sum of those that there are."""
    given = [term.astype(np.float64) for term in terms if term is not None]
    return sum(given) if given else None
