"""The reference of attention with a cache says the same as attention of each sequence by itself."""

import ml_dtypes
import numpy as np
import pytest
import reference_kvcache as twin

import attnmask

HEADS, KV_HEADS, DEPTH = 4, 2, 8


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_the_twin(paged, packed):
    """`flash_attention` of each sequence by itself, with its tokens put together."""
    rng, lengths, counts = np.random.default_rng(0), [3, 0, 9], [2, 3, 0] if packed else [2, 2, 2]
    mask, slopes = rng.random((3, HEADS, max(counts), 14)) < 0.7, rng.random((3, HEADS))
    bias = rng.standard_normal(mask.shape)
    more = {
        "softmax_aux": rng.standard_normal((HEADS, 2)),
        "sliding_window": (5, None),
        "logits_soft_cap": 3.0,
        "relative_bias": rng.standard_normal((HEADS, 5)),
        "relative_low": -3,
    }
    old = [rng.standard_normal((2, length, KV_HEADS, DEPTH)) for length in lengths]
    query, new_k, new_v = (
        rng.standard_normal((sum(counts), heads, DEPTH)) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    starts = np.cumsum([0, *counts])

    table = rng.permutation(12).reshape(3, 4) if paged else None
    caches = np.full((2, 12, 4, KV_HEADS, DEPTH) if paged else (2, 3, 16, KV_HEADS, DEPTH), np.nan)
    for row, numbers in enumerate(old):
        where = twin.places(caches[0], table, row, 0, lengths[row])
        caches[0][where], caches[1][where] = numbers

    expected, expected_lse = [], []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        span = slice(starts[row], starts[row + 1])
        key, value = (
            np.concatenate([there, new[span]])[None]
            for there, new in zip(old[row], (new_k, new_v), strict=True)
        )
        out, lse = attnmask.flash_attention(
            query[None, span], key, value, mask[row, :, :count, : length + count], causal=True,
            causal_offset="bottom-right", alibi_slopes=slopes[row], return_lse=True, **more,
            bias=bias[row, :, :count, : length + count],
        )  # fmt: skip
        expected.append(out[0])
        expected_lse.append(lse[0])
    expected, expected_lse = np.concatenate(expected), np.concatenate(expected_lse, axis=1)

    more |= {"cache_seqlens": lengths, "block_table": table, "alibi_slopes": slopes, "return_lse": True}
    if packed:
        more |= {"cu_seqlens_q": starts}
        for name, whole in (("attention_mask", mask), ("bias", bias)):
            rows = [whole[row, :, :count] for row, count in enumerate(counts)]
            more[name] = np.concatenate(rows, axis=1)[None]
        arrays = query, *caches, new_k, new_v
    else:
        more |= {"attention_mask": mask, "bias": bias}
        query, new_k, new_v = (array.reshape(3, 2, -1, DEPTH) for array in (query, new_k, new_v))
        arrays = query, *caches, new_k, new_v
        expected = expected.reshape(query.shape)
        expected_lse = expected_lse.reshape(HEADS, 3, 2).swapaxes(0, 1)
    out, lse = twin.flash_attention_with_kvcache(*arrays, **more)
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", ["int8", ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2], ids=str)
@pytest.mark.parametrize("scales", ["token", "channel", None])
def test_numbers_of_eight_bits(dtype, scales):
    """What is appended is read again, up to rounding: by its own scales, or clipped by those that are given."""
    rng, table = np.random.default_rng(0), np.array([[3, 1, 4]])
    limit = twin.LARGEST[np.dtype(dtype).name]
    cache, new = np.zeros((5, 4, KV_HEADS, DEPTH), dtype), rng.standard_normal((7, KV_HEADS, DEPTH))
    if scales == "token":
        scale = np.full((5, 4, KV_HEADS, 1), np.nan, np.float32)
    elif scales == "channel":
        scale = rng.uniform(0.5, 1, (1, 1, KV_HEADS, DEPTH)).astype(np.float32) / limit
    else:
        scale, new = None, new * limit
    twin.append(cache, scale, table, 0, 2, new)
    got = twin.tokens(cache, scale, table, 0, 9)[2:]
    if scales == "token":
        unit = abs(new).max(axis=-1, keepdims=True) / limit
        assert np.isfinite(scale).all(axis=(2, 3)).sum() == len(new)
    else:
        unit = 1 if scale is None else scale[0]
        assert (abs(new) > unit * limit).any()
    wanted = np.clip(new, -unit * limit, unit * limit)
    digits, least = (
        (2, 16) if dtype == ml_dtypes.float8_e5m2 else (3, 9)
    )  # behind the point, and of the least number
    relative, absolute = abs(wanted) / 2 ** (digits + 1), unit / 2 ** (least + 1)
    error = unit / 2 if dtype == "int8" else np.maximum(relative, absolute)
    assert (abs(got - wanted) <= error * 1.0001).all()
