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
    many = rng.standard_normal((3, 2, 300, 4, 64), np.float32)

    def merged():
        return attnmask.merge_attention_states_vjp(many, many[..., 0].swapaxes(2, 3))

    def distant():
        x = many
        more = {"relative_bias": x[0, 0, :4, 0], "relative_low": -3, "grad_relative_bias": True}
        more |= {"grid_bias": x[0, 0, :39, :, :29].swapaxes(0, 1), "grad_grid_bias": True}
        return attnmask.flash_attention_vjp(x[0], x[1, :, :, :2], x[2, :, :, :2], causal=True, **more)

    return [
        lambda: attnmask.flash_attention(query, key, key),
        lambda: attnmask.flash_attention_vjp(*halves)[1](halves[0]).query,
        lambda: attnmask.chunk_global_cumsum(time_first, cu_seqlens=ends),
        lambda: attnmask.chunk_local_cumsum(head_first, 64, True, 0.5, head_first=True),
        lambda: attnmask.chunk_global_cumsum_vjp(time_first, output_dtype=np.float64)[1](time_first[::-1]),
        lambda: attnmask.chunk_global_cumsum(counts, output_dtype=np.int64),
        lambda: merged()[0][0],
        lambda: merged()[1](many[0])[0],
        lambda: distant()[1](many[0]).relative_bias,
        lambda: attnmask.prepare_token_indices(ends),
        lambda: attnmask.prepare_chunk_indices(ends, 3),
        lambda: attnmask.prepare_lens_from_mask(mask),
        lambda: attnmask.cdiv(ends, 7),
        lambda: attnmask.mask_to_segment_ids(mask[:, :1100])[0],
        lambda: attnmask.segment_ids_to_mask(counts[:, :400, 0]),
    ]
