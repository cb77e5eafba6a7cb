"""Attention over caches of int8 and float8, by the float64 twin over the numbers that they stand for."""

import math

import numpy as np
import pytest
from flash_cases import BF16
from kvcache_cases import E4M3, E5M2
from numpy.lib.stride_tricks import as_strided
from reference_kvcache import QUANTIZED

import attnmask

pytestmark = pytest.mark.levels("turns", "amx", "avx512vnni")

FLOATS8 = [E4M3, E5M2]
H, HKV = 8, 2


def ones(caches):
    """Scales that leave the numbers as they are, as the error says that one writes them."""
    return {
        f"{side}_scale": np.ones((1, 1, *cache.shape[2:]), np.float32)
        for side, cache in zip("kv", caches, strict=True)
    }


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize("depth", [1024, 1025, 2100])  # rows of float8 are read unpacked up to some depth
def test_long_keys(isa, dtype, depth):
    rng = np.random.default_rng(0)
    query = rng.standard_normal((1, 1, H, depth), np.float32)
    caches = [(rng.standard_normal((1, 70, HKV, depth), np.float32) * 9).astype(dtype) for _ in range(2)]
    out = attnmask.flash_attention_with_kvcache(query, *caches, **ones(caches), softmax_scale=0.002)
    wide = [cache.astype(np.float32) for cache in caches]
    expected = attnmask.flash_attention_with_kvcache(query, *wide, softmax_scale=0.002)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_float64_beyond_float32_saturates(dtype, by_channel):
    key = np.zeros((1, 2, 1, 16))
    key[0, :, 0, ::2], key[0, :, 0, 1] = 1e300, -1e300
    caches = np.zeros((2, 1, 2, 1, 16), dtype)
    scales = np.ones((2, 1, 1, 1, 16) if by_channel else (2, 1, 2, 1, 1), np.float32)
    query, options = np.full((1, 1, 1, 16), 1e-38, np.float32), {"k_scale": scales[0], "v_scale": scales[1]}
    out = attnmask.flash_attention_with_kvcache(
        query, *caches, key, np.ones_like(key), cache_seqlens=0, **options
    )
    np.testing.assert_allclose(out, 1, rtol=1e-2)
    read = caches[0].astype(np.float64) * scales[0]
    most = ({"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344}[dtype.name] if by_channel
            else float(np.finfo(np.float32).max))  # fmt: skip
    np.testing.assert_allclose(read, key.clip(-most, most), rtol=1e-6)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_one_scale_for_all_tokens_takes_no_tokens(name):
    given = {each: np.zeros((1, 8, 1, 16), np.int8) for each in ("k_cache", "v_cache")}
    given |= {each: np.ones((1, 8, 1, 1), np.float32) for each in ("k_scale", "v_scale")}
    given[name] = as_strided(given[name], strides=(0, 0, 0, 0))
    x = np.ones((1, 1, 1, 16), np.float32)
    with pytest.raises(ValueError, match=f"{name} must not overlap itself"):
        attnmask.flash_attention_with_kvcache(x, **given, key=x, value=x, cache_seqlens=0)
    assert (given[name] == 1).all()


def test_read_only_scales_take_no_tokens():
    cache, scale = np.zeros((1, 4, 1, 8), np.int8), np.ones((1, 4, 1, 1), np.float32)
    scale.setflags(write=False)
    key = np.ones((1, 1, 1, 8), np.float32)
    given = {"k_scale": scale, "v_scale": scale.copy(), "cache_seqlens": 1}
    attnmask.flash_attention_with_kvcache(key, cache, cache.copy(), **given)
    with pytest.raises(ValueError, match="k_scale must be writeable"):
        attnmask.flash_attention_with_kvcache(key, cache, cache.copy(), key, key, **given)
    assert not cache.any()


@pytest.mark.parametrize("dtype", FLOATS8, ids=str)
@pytest.mark.parametrize("query_type", [np.float32, BF16])
def test_each_number_of_float8(isa, dtype, query_type):
    """Equal tokens weigh the same, so that their mean is one of them; a query of one 1 picks a number of the key."""
    numbers = np.arange(256, dtype=np.uint8).view(dtype)
    tokens = np.repeat(numbers[None, None, None], 64, axis=1)
    zeros = np.zeros_like(tokens)
    query = np.zeros((1, 1, 1, 256), query_type)
    scales = ones((tokens, tokens))
    out = attnmask.flash_attention_with_kvcache(query, zeros, tokens, **scales)
    np.testing.assert_array_equal(out[0, 0, 0].astype(np.float32), numbers.astype(np.float32))
    tokens[~np.isfinite(tokens)] = 0
    for i in range(256):
        query[:] = np.arange(256) == i
        options = {"softmax_scale": 1, "return_lse": True}
        _, lse = attnmask.flash_attention_with_kvcache(query, tokens, zeros, **scales, **options)
        expected = tokens[0, 0, 0, i].astype(np.float64) + np.log(64)
        np.testing.assert_allclose(lse.item(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("query_type", [np.float16, BF16], ids=str)
@pytest.mark.parametrize("depth", [2**16, 2**20])
def test_many_channels(isa, query_type, depth):
    """Where kernels round queries, a sum of int32 has room for fewer digits the more channels there are."""
    rng = np.random.default_rng(depth)
    query = rng.standard_normal((1, 1, 1, depth)).astype(query_type)
    query[..., 0] = 30
    keys = rng.integers(-127, 128, (1, 24, 1, depth), np.int8)
    values = rng.integers(-127, 128, (1, 24, 1, 8), np.int8)
    _, lse = attnmask.flash_attention_with_kvcache(
        query, keys, values, **ones((keys, values)), return_lse=True
    )
    products = keys[0, :, 0].astype(np.float64) * query[0, 0, 0].astype(np.float64) / math.sqrt(depth)
    logits = products.sum(axis=1)
    expected = logits.max() + np.log(np.exp(logits - logits.max()).sum())
    assert abs(lse.item() - expected) < 2**-20 * np.abs(products).sum(axis=1).max()
