"""Random masks, as `MaskInfo` and as arrays of all pairs."""

import numpy as np
import reference_mask_info as ref
from hypothesis import strategies as st
from layouts import LAYOUTS, arrange
from reference_masks import neighborhood

from attnmask import MaskInfo

LENGTHS = st.one_of(*[st.integers(0, 2)] * 3, *[st.integers(1, 9)] * 4, st.sampled_from([63, 64, 65, 130]))


def ids_of(draw, batch: int, heads: int | None, length: int) -> np.ndarray:
    shape = (batch, length) if heads is None else (batch, heads, length)
    kind = draw(st.sampled_from(["any", "sorted", "padded", "zeros"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    ids = rng.integers(-2, 4, shape)
    if kind == "sorted":
        ids = np.sort(ids, axis=-1)
    elif kind == "padded":
        ids = np.broadcast_to(
            np.where(np.arange(length) < rng.integers(0, length + 1, (*shape[:-1], 1)), 0, -1), shape
        )
    elif kind == "zeros":
        ids = np.zeros(shape)
    return ids.astype(np.int32)


def mask_of(draw, batch: int, heads: int, queries: int, keys: int) -> np.ndarray:
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    return rng.random((batch, heads, queries, keys)) < draw(st.sampled_from([0.1, 0.5, 0.9]))


BASES = [
    "segments", "segments", "per head", "mask", "inverted", "padding", "random", "packed", "blocks", "function", "full",
    "lengths", "grid",
]  # fmt: skip


@st.composite
def bases(draw, shape=None):
    """A `MaskInfo`, the same mask as an array of all pairs, and a description of how it was made."""
    kind = draw(st.sampled_from(BASES))
    batch, heads, queries, keys = shape or (
        1 if kind == "packed" else draw(st.sampled_from([1, 2, 0, 3])),
        draw(st.sampled_from([1, 1, 2])),
        draw(LENGTHS),
        draw(LENGTHS),
    )
    if kind == "segments":
        q_ids, kv_ids = ids_of(draw, batch, None, queries), ids_of(draw, batch, None, keys)
        info, pairs = MaskInfo.from_segments(q_ids, kv_ids), ref.Pairs.of_ids(q_ids, kv_ids)
    elif kind == "per head":
        q_ids = ids_of(draw, batch, heads, queries)
        kv_ids = ids_of(draw, batch, draw(st.sampled_from([heads, 1, None])), keys)
        info, pairs = MaskInfo.from_segments(q_ids, kv_ids), ref.Pairs.of_ids(q_ids, kv_ids)
    elif kind == "padding" and queries == keys:
        mask = mask_of(draw, 1, 1, batch, queries)[0, 0]
        ids = mask.astype(np.int32) - 1
        info, pairs = MaskInfo.from_attention_mask(mask), ref.Pairs.of_ids(ids, ids)
    elif kind == "full":
        info = MaskInfo.full(queries, keys, batch)
        pairs = ref.Pairs.of_lengths([queries] * batch, [keys] * batch, queries, keys)
    elif kind == "lengths" and queries == keys:
        lengths = draw(st.lists(st.integers(0, queries), min_size=batch, max_size=batch))
        info = MaskInfo.from_lengths(np.array(lengths, int), queries)
        pairs = ref.Pairs.of_lengths(lengths, lengths, queries, keys)
    elif kind == "packed" and batch == 1:
        q_ids, kv_ids = (np.sort(ids_of(draw, 1, None, n).clip(0), axis=-1) for n in (queries, keys))
        q_cu, kv_cu = (np.searchsorted(ids[0], np.arange(5)) for ids in (q_ids, kv_ids))
        info = MaskInfo.from_cu_seqlens(q_cu, cu_seqlens_kv=kv_cu, packed=True)
        pairs = ref.Pairs.of_ids(q_ids, kv_ids)
        info = info.apply_causal(queries + keys)  # the mask is no longer packed causal
        pairs.baked |= {"causal"}
    elif kind == "random":
        mask = mask_of(draw, batch, heads, queries, keys)
        info, pairs = MaskInfo(mask), ref.Pairs(mask)
    elif kind == "blocks":
        sizes = draw(st.sampled_from([(1, 1), (2, 3), (64, 64), (65, 30), (200, 7)]))
        counts = [-(-length // size) for length, size in zip((queries, keys), sizes, strict=True)]
        blocks = mask_of(draw, batch, heads, *counts)
        live = blocks.repeat(sizes[0], 2).repeat(sizes[1], 3)[:, :, :queries, :keys]
        info, pairs = MaskInfo.from_blocks(blocks, sizes, queries, keys), ref.Pairs.of_mask(live)
    elif kind == "grid" and queries == keys > 0:
        shape = draw(st.sampled_from([(queries,), (1, queries)] + [(2, queries // 2)] * (queries % 2 == 0)))
        kernel = [draw(st.integers(0, (length - 1) // 2)) * 2 + 1 for length in shape]
        causal = draw(st.booleans())
        info = MaskInfo.neighborhood(shape, kernel, causal=causal, batch=batch)
        pairs = ref.Pairs.of_lengths([queries] * batch, [keys] * batch, queries, keys)
        pairs.live = pairs.live & neighborhood(shape, kernel, causal=causal)
    elif kind == "function":
        live = mask_of(draw, batch, heads, queries, keys)
        asked = live.astype(draw(st.sampled_from([bool, np.int64, np.uint8])))
        info = MaskInfo.from_function(
            lambda b, h, q, k: asked[b, h, q, k], queries, keys, batch=batch, heads=heads
        )
        pairs = ref.Pairs.of_mask(live)
        if live.size == 0:  # then nothing is asked
            pairs.live = live[:, :1]
    else:
        live = mask_of(draw, batch, heads, queries, keys)
        valid = kind != "inverted"
        mask = arrange(live if valid else ~live, draw(st.sampled_from(LAYOUTS)))
        info, pairs = MaskInfo.from_attention_mask(mask, mask_is_valid=valid), ref.Pairs.of_mask(live)
    if draw(st.booleans()):
        pairs.q_positions = np.arange(batch * queries, dtype=np.int32).reshape(batch, queries) * 7 % 11
        pairs.kv_positions = np.arange(batch * keys, dtype=np.int32).reshape(batch, keys) * 5 % 13
        info = info.replace(q_positions=pairs.q_positions, kv_positions=pairs.kv_positions)
        kind += " with positions"
    return info, pairs, [f"{kind} {info.shape}"]


def offset_of(draw, batch: int, low: int = -4, high: int = 6):
    """A number for all batch rows, or one for each."""
    if draw(st.booleans()):
        return draw(st.integers(low, high))
    numbers = draw(st.lists(st.integers(low, high), min_size=batch, max_size=batch))
    return np.array(numbers, draw(st.sampled_from([np.int64, np.int32, np.int16])))


def diagonal_of(draw, batch: int):
    return draw(st.sampled_from(["bottom-right", None])) or offset_of(draw, batch)


OPERATIONS = [
    "causal", "window", "window by head", "prefix", "slice", "decode", "prefill", "chunked", "within",
    "types", "lengths", "and", "or", "not", "dtype", "materialize", "segments", "relabel",
]  # fmt: skip


def change(draw, info: MaskInfo, pairs: ref.Pairs, words: list[str]) -> MaskInfo:
    """Applies the same operation to both."""
    batch, heads, queries, keys = pairs.shape
    operation = draw(st.sampled_from(OPERATIONS))
    args: tuple = ()
    within = pairs.q_ids is not None and draw(st.booleans())
    if operation == "causal":
        args = diagonal_of(draw, batch), within
        info = info.apply_causal(args[0], within_segments=within)
        pairs.causal(*args)
    elif operation in ("window", "decode", "prefill"):
        side = st.one_of(st.none(), st.integers(0, 5))
        window = draw(st.one_of(st.integers(0, 5), st.tuples(side, side)))
        left, right = window if isinstance(window, tuple) else (window, window)
        more = {"offset": diagonal_of(draw, batch), "within_segments": within}
        offset = more["offset"]
        args = window, offset, within
        if operation == "window":
            info = info.apply_sliding_window(window, mode=draw(st.sampled_from([None, "default"])), **more)
            pairs.window(left, right, offset, within)
        elif operation == "decode" and queries:
            args = window, offset, offset_of(draw, batch, -2, 10), within
            info = info.apply_sliding_window(window, mode="decode", index=args[2], **more)
            pairs.decode(left, right, offset, args[2], within)
        elif operation == "prefill":
            width = window if isinstance(window, int) else None if None in window else left + right + 1
            info = info.apply_sliding_window(window, mode="prefill", **more)
            pairs.prefill(left, right, offset, width, within)
    elif operation == "window by head":
        count = heads if heads != 1 else draw(st.integers(1, 3))
        numbers = st.lists(st.integers(0, 5), min_size=count, max_size=count).map(np.array)
        window = draw(
            st.one_of(numbers, st.tuples(st.none(), numbers), st.tuples(numbers, st.integers(0, 5)))
        )
        left, right = window if isinstance(window, tuple) else (window, window)
        args = window, diagonal_of(draw, batch), within
        info = info.apply_sliding_window(window, offset=args[1], within_segments=within)
        pairs.window(left, right, *args[1:])
    elif operation == "prefix":
        args = (offset_of(draw, batch, 0),)
        info = info.apply_prefix(*args)
        pairs.prefix(*args)
    elif operation == "slice":
        bound = st.one_of(st.none(), st.integers(-12, 12))
        parts = list(draw(st.tuples(*[st.builds(slice, bound, bound)] * 4)))
        if not range(heads)[parts[1]]:  # masks of no heads have a test of their own
            parts[1] = slice(None)
        args = parts = tuple(parts)
        info = info[parts]
        pairs.sliced(*parts)
    elif operation == "chunked":
        args = draw(st.integers(1, 6)), offset_of(draw, batch)
        info = info.apply_chunked(*args)
        pairs.chunked(*args)
    elif operation == "within" and pairs.q_ids is not None:
        args = draw(st.integers(1, 4)), offset_of(draw, batch)
        info = info.apply_chunked(*args, within_segments=True)
        pairs.chunked_within_segments(*args)
    elif operation == "types":
        types = ids_of(draw, batch, None, queries), ids_of(draw, batch, None, keys)
        combine = draw(st.sampled_from(["union", "intersect", "replace"]))
        policy, update = (
            draw(st.sampled_from(["q", "kv", "both", "none"])),
            draw(st.sampled_from([None, True, False])),
        )
        args = combine, policy, update
        info = info.apply_token_type_ids(
            types, combine=combine, zero_policy=policy, update_segment_ids=update
        )
        pairs.token_types(*types, *args)
    elif operation == "lengths":
        width = draw(st.one_of(st.none(), st.integers(0, keys + 1)))
        args = offset_of(draw, batch, 0, keys + 2), draw(st.one_of(st.none(), st.integers(0, queries))), width
        info = info.apply_kv_lengths(args[0], q_len=args[1], sliding_window=width)
        pairs.kv_lengths(*args)
    elif operation in ("and", "or"):
        other_info, other, other_words = draw(
            bases((batch, draw(st.sampled_from([1, heads])), queries, keys))
        )
        args = tuple(other_words)
        info = info & other_info if operation == "and" else info | other_info
        pairs.joined(other, operation == "or")
        pairs.q_positions = other.q_positions if pairs.q_positions is None else pairs.q_positions
        pairs.kv_positions = other.kv_positions if pairs.kv_positions is None else pairs.kv_positions
    elif operation == "not":
        info = ~info
        pairs.inverted()
    elif operation == "dtype":
        args = (draw(st.sampled_from(["float32", "int8", "bool"])),)
        info = info.to_dtype(*args).to_dtype("bool")
        pairs.held |= args != ("bool",)
    elif operation == "materialize":
        info, pairs.held = info.materialize_attention_mask(), True
    elif operation == "segments":
        info = info.materialize_segment_ids()
        pairs.q_ids, pairs.kv_ids = pairs.ids()
        pairs.held = True
    elif operation == "relabel" and info.tree_flatten()[0][0] is not None:  # ids of an array are labels
        pairs.q_ids, pairs.kv_ids = ids_of(draw, batch, None, queries), ids_of(draw, batch, None, keys)
        info, pairs.held = info.replace(q_segment_ids=pairs.q_ids, kv_segment_ids=pairs.kv_ids), True
    words.append(f"{operation} {args}")
    return info


@st.composite
def programs(draw, longest: int = 5):
    info, pairs, words = draw(bases())
    for _ in range(draw(st.integers(0, longest))):
        info = change(draw, info, pairs, words)
    return info, pairs, words
