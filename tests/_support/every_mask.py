"""A mask of every kind, of any sizes."""

import numpy as np

from attnmask import MaskInfo


def every_mask(queries: int, keys: int, batch: int = 2, heads: int = 4) -> dict[str, MaskInfo]:
    """Of so many rows and heads, or of one that all share."""
    rng = np.random.default_rng(queries + keys)

    def ids(*shape: int) -> np.ndarray:
        return np.sort(rng.integers(-1, 3, shape), axis=-1)

    def starts(tokens: int) -> list[int]:
        return [0, *np.sort(rng.integers(0, tokens + 1, 2)).tolist(), tokens]

    full = MaskInfo.full(queries, keys, batch)
    segments = MaskInfo.from_segments(ids(batch, queries), ids(batch, keys))
    by_head = MaskInfo.from_segments(ids(batch, heads, queries), ids(batch, heads, keys))
    packed = MaskInfo.from_cu_seqlens(starts(queries), cu_seqlens_kv=starts(keys), packed=True)
    long = MaskInfo.from_segments(ids(batch, queries + 60), ids(batch, keys + 60))
    dense, sizes, rows = (
        rng.random((batch, heads, queries, keys)) < 0.4,
        rng.integers(0, keys, heads),
        np.arange(batch),
    )
    types = rng.integers(0, 3, (batch, queries)), rng.integers(0, 3, (batch, keys))
    blocks = rng.random((batch, heads, -(-queries // 3), -(-keys // 20))) < 0.5
    tokens = max(queries, keys)
    return {
        "full": full,
        "lengths": MaskInfo.from_lengths(rng.integers(0, tokens, batch), tokens)[..., :queries, :keys],
        "key lengths": segments.apply_kv_lengths(1 + rows),
        "segments": segments.replace(q_positions=ids(batch, queries)),
        "segments of heads": by_head,
        "packed": packed,
        "causal": MaskInfo.causal(queries, keys),
        "causal by row": segments.apply_causal(rows),
        "window": segments.apply_sliding_window((3, 2), offset="bottom-right"),
        "window by head": full.apply_causal(keys - queries).apply_sliding_window((sizes, 5)),
        "within segments": segments.apply_causal("bottom-right", within_segments=True),
        "by head, within segments": by_head.apply_sliding_window((sizes, 2), within_segments=True),
        "within packed": packed.apply_causal("bottom-right", within_segments=True),
        "chunks": segments.apply_chunked(4, rows),
        "chunks within segments": segments.apply_chunked(3, within_segments=True),
        "prefix": segments.apply_causal().apply_prefix(1 + rows),
        "token types": segments.apply_causal().apply_token_type_ids(types),
        "dense": MaskInfo.from_attention_mask(dense).apply_sliding_window((9, 1)),
        "floats": MaskInfo(dense.astype(np.float64)),
        "blocks": MaskInfo.from_blocks(blocks, (3, 20), queries, keys),
        "function": MaskInfo.from_function(
            lambda b, h, q, k: (q + k + b) % 3 > h % 2, queries, keys, batch, heads
        ),
        "slice": long.apply_chunked(40).apply_sliding_window((40, 3))[..., 9 : 9 + queries, 33 : 33 + keys],
        "slice of a function": MaskInfo.from_function(
            lambda b, h, q, k: (q + k) % 3 > 0, queries + 63, keys + 9
        )[..., 63:, 9:],
        "step": long.apply_causal().apply_kv_lengths(queries + 9 + rows, q_len=queries)[..., :keys],
        "joined": ~segments.apply_causal() | MaskInfo.from_attention_mask(dense),
    }
