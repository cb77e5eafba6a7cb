"""Calls of many kinds."""

import ml_dtypes
import numpy as np

import attnmask


def some_calls() -> list:
    """Calls of every kind that are large enough for several threads, whose results are arrays."""
    rng = np.random.default_rng(0)
    ends = np.concatenate([[0], np.sort(rng.integers(0, 60_000, 500)), [60_000]])
    time_first = rng.standard_normal((1, 60_000, 8)).astype(np.float32)
    head_first = np.ascontiguousarray(time_first.swapaxes(1, 2)).astype(ml_dtypes.bfloat16)
    counts = rng.integers(0, 9, (1, 60_000, 3)).astype(np.int16)
    mask = rng.random((20, 30_000)) < 0.5
    query, key = (rng.standard_normal((1, tokens, 4, 64)).astype(np.float32) for tokens in (128, 1024))
    # The gradient of many queries is accumulated in float32 first.
    halves = [x.astype(np.float16) for x in (key, query, query)]
    return [
        lambda: attnmask.flash_attention(query, key, key),
        lambda: attnmask.flash_attention_vjp(*halves)[1](halves[0]).query,
        lambda: attnmask.chunk_global_cumsum(time_first, cu_seqlens=ends),
        lambda: attnmask.chunk_local_cumsum(head_first, 64, True, 0.5, head_first=True),
        lambda: attnmask.chunk_global_cumsum_vjp(time_first, output_dtype=np.float64)[1](time_first[::-1]),
        lambda: attnmask.chunk_global_cumsum(counts, output_dtype=np.int64),
        lambda: attnmask.prepare_token_indices(ends),
        lambda: attnmask.prepare_chunk_indices(ends, 3),
        lambda: attnmask.prepare_lens_from_mask(mask),
        lambda: attnmask.cdiv(ends, 7),
        lambda: attnmask.mask_to_segment_ids(mask[:, :1100])[0],
        lambda: attnmask.segment_ids_to_mask(counts[:, :400, 0]),
        lambda: attnmask.merge_attention_states([query, query + 1], [query[..., 0].swapaxes(1, 2)] * 2)[0],
    ]
