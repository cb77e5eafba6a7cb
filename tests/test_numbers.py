"""The limits that docs/numbers.rst states hold up to exactly where it states them."""

import ml_dtypes
import numpy as np
import pytest

import attnmask

BF16 = ml_dtypes.bfloat16


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("keys", [1, 2, 64, 65, 1000, 5000])
def test_values_up_to_the_largest_number_divided_by_the_keys(isa, keys, dtype):
    """Their mean is right, for one query as for many: the sum before the division does not overflow."""
    largest = dtype(np.finfo(dtype).max * (1 - 1e-5) / keys)
    for queries in (1, 70):
        for signs in (np.ones(keys), np.resize([1, -1], keys)):
            query, key = np.zeros((1, queries, 1, 16), dtype), np.zeros((1, keys, 1, 16), dtype)
            value = np.broadcast_to((largest * signs).astype(dtype)[None, :, None, None], (1, keys, 1, 16))
            out = attnmask.flash_attention(query, key, value)
            np.testing.assert_allclose(
                out, float(largest) * signs.mean(), rtol=1e-5, atol=float(largest) * 1e-5
            )


def test_denormal_bfloat16(isa):
    """Kept at levels that compute in float32; zero where the processor multiplies bfloat16."""
    tiny = BF16(1e-39)
    assert tiny != 0
    for queries in (1, 70):
        query, key = np.zeros((1, queries, 1, 16), BF16), np.zeros((1, 3, 1, 16), BF16)
        out = attnmask.flash_attention(query, key, np.full((1, 3, 1, 16), tiny))
        expected = 0 if isa in ("avx512bf16", "amx") else tiny
        np.testing.assert_array_equal(out.astype(np.float32), np.float32(expected))
