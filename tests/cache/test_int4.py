"""Attention over caches of four bits, by the float64 twin over the numbers that they stand for."""

import ml_dtypes
import numpy as np
import pytest
import reference_kvcache as twin
from flash_cases import BF16, F16, F32
from kvcache_bad_input import good
from kvcache_cases import Case, arguments_of, attend, for_twin, refused

import attnmask

pytestmark = pytest.mark.levels("turns", "amx", "avx512vnni")

H, HKV = 8, 2
LENGTHS = (0, 70, 200, 64, 1)
TYPES = [F32, BF16, F16]


def case_of(dtype, queries=1, **more) -> Case:
    return Case((dtype, "int4"), (H, HKV), (64, 128), queries, LENGTHS, page_size=16, groups=(64, 32), **more)


@pytest.mark.parametrize("size", [1e-38, 1e-20, 1e30])
@pytest.mark.parametrize("side", ["k_scale", "v_scale"])
@pytest.mark.parametrize("dtype", TYPES)
def test_groups_of_any_size(isa, dtype, side, size):
    """Every other token's groups are much smaller or larger than the others'; what is rounded is in proportion."""
    case = case_of(dtype)
    given = arguments_of(case)
    given[side][:, ::2] *= np.float32(size)
    if side == "k_scale" and size > 1:
        given[side] *= np.float32(1e-30)
    out = attend(given).astype(np.float64)
    right = twin.attention(**for_twin(case, given)).out
    largest = abs(right).max(-1, keepdims=True)
    error = 2e-4 if dtype == np.float32 else 3e-2
    with np.errstate(invalid="ignore"):
        close = abs(out - right) <= error * largest + 1e-7  # a float16
    assert (close | (np.isinf(out) & (abs(right) > 3e4))).all()  # beyond float16


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("number", [1e-30, 1e-36, np.inf, np.nan])
def test_queries_of_any_size(isa, dtype, number):
    """Those that are too small or too large to be integers; infinite ones are NaN where they meet zero."""
    case = case_of(dtype)
    given = arguments_of(case)
    clean, query = attend(given), given["query"]
    query[2, 0, 3] = np.full(64, number).astype(dtype) * query[2, 0, 3]
    out = attend(given)
    changed = np.zeros(out.shape, bool)
    changed[2, 0, 3] = True
    assert out[~changed].tobytes() == clean[~changed].tobytes()
    if np.isfinite(number):
        mean = twin.attention(**for_twin(case, given)).out[2, 0, 3]
        np.testing.assert_allclose(out[2, 0, 3].astype(np.float64), mean, rtol=3e-2, atol=3e-2)
    else:
        assert np.isnan(out[2, 0, 3].astype(np.float64)).all()


@pytest.mark.parametrize("worst", [np.nan, np.inf, -np.inf])
def test_new_numbers_that_are_not_finite(isa, worst):
    """Their group is NaN, and no other."""
    given = arguments_of(case_of(F32, new="as many"))
    given["value"][1, 0, 1, 40] = worst
    out = attend(given)
    wrong = np.zeros(out.shape, bool)
    wrong[1, 0, H // HKV :, 32:64] = True
    np.testing.assert_array_equal(np.isnan(out), wrong)


def test_memory_that_is_shared():
    given = good("int4")
    given["v_scale"] = given["k_scale"]
    refused(given, ValueError, r"_scale must share no memory with ._scale")
    attend(given, key=None, value=None)  # only reads


def test_no_channels():
    caches = {f"{side}_cache": np.zeros((1, 4, 2, 0), np.uint8) for side in "kv"}
    scales = {f"{side}_scale": np.ones((1, 4, 2, 0, 2), F32) for side in "kv"}
    out = attnmask.flash_attention_with_kvcache(np.zeros((1, 1, 4, 0), F32), **caches, **scales)
    assert out.shape == (1, 1, 4, 0)


# Rotation


@pytest.mark.parametrize("scales", [np.float16, F32])
@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (F16, 65504),
        *((dtype, size) for dtype in (F32, BF16) for size in (1e5, 2e6, 3.3e38)),
        (np.float64, 1e300),
    ],
)
def test_finite_numbers_have_finite_scales(isa, dtype, size, scales):
    """What scales of that type cannot hold becomes the nearest number that they can, and queries see all tokens."""
    shapes = np.linspace(-1, 1, 64), np.linspace(0, 1, 64), np.ones(64), -np.ones(64), np.eye(64)[3]
    key = (size * np.array(shapes)[None, :, None]).astype(dtype)
    halves, scale = (
        np.zeros((2, 1, len(shapes), 1, 32), np.uint8),
        np.zeros((2, 1, len(shapes), 1, 2, 2), scales),
    )
    query, value = np.full((1, 1, 1, 64), 1e-38, F32), np.ones_like(key)
    options = {"k_scale": scale[0], "v_scale": scale[1], "cache_seqlens": 0, "causal": False}
    out = attnmask.flash_attention_with_kvcache(query, *halves, key, value, **options)
    np.testing.assert_allclose(out, 1, rtol=1e-5)
    limits = np.finfo(F32)
    wide = key.astype(np.float64).clip(limits.min, limits.max)
    for mine, other in zip((halves[0], scale[0]), twin.to_halves(wide, 2, scales), strict=True):
        np.testing.assert_array_equal(mine, other)
    read = twin.of_halves(halves[0], scale[0])
    assert np.isfinite(read.astype(F32)).all()
    low, high = (-65504, 16 * 65504) if scales == np.float16 else (limits.min, limits.max)
    np.testing.assert_allclose(read[0, 2:4], wide[0, 2:4].clip(low, high), rtol=1e-3)


def sylvester(n):
    matrix = np.ones((1, 1))
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(n)


def test_rotating_is_a_product_with_sylvesters_matrix():
    rng = np.random.default_rng(0)
    for n in (1, 2, 64, 256):
        cache = np.zeros((2, 1, 3, 1, n), F32)
        x = rng.standard_normal((1, 3, 1, n), F32)
        attnmask.flash_attention_with_kvcache(x, *cache, x, 2 * x, cache_seqlens=0, rotate=True)
        np.testing.assert_allclose(cache[0], x @ sylvester(n), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(cache[1], 2 * x @ sylvester(n), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float64, *TYPES])
@pytest.mark.parametrize("packed", [False, True])
def test_rotated_caches_give_the_same_results(dtype, packed):
    rng = np.random.default_rng(0)
    sizes = (4, 64), (2, 64), (2, 32)
    tokens = [rng.standard_normal((2, 5, *size)).astype(dtype) for size in sizes]
    given = {"cache_seqlens": [0, 3], "sliding_window": (4, None), "softmax_aux": np.ones((4, 1))}
    if packed:
        tokens = [x.reshape(10, *x.shape[2:]) for x in tokens]
        given["cu_seqlens_q"] = [0, 4, 10]
    query, *new = tokens
    results = []
    for rotate in (False, True):
        caches = np.zeros((2, 9, 2, 64), dtype), np.zeros((2, 9, 2, 32), dtype)
        out = np.zeros((*query.shape[:-1], 32), dtype)
        options = given | {"rotate": rotate, "return_lse": True, "out": out}
        got = attnmask.flash_attention_with_kvcache(query, *caches, *new, **options)
        assert got[0] is out
        results.append((*got, *(x @ sylvester(x.shape[-1]) if rotate else x for x in caches)))
    error = {8: 1e-12, 4: 1e-5, 2: 3e-2}[np.dtype(dtype).itemsize]
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one.astype(np.float64), other.astype(np.float64), rtol=error, atol=error)


def test_rotating_spreads_outliers():
    """A few channels of large numbers make the others' groups coarse, unless they are spread."""
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 1, 200, 1, 128), F32)
    key[..., [5, 70]] *= 20
    query[..., [5, 70]] /= 20
    right = attnmask.flash_attention(query, key, value, causal=True)
    errors = []
    for rotate in (False, True):
        caches = np.zeros((2, 1, 200, 1, 64), np.uint8)
        k_scale, v_scale = np.zeros((2, 1, 200, 1, 2, 2), F32)
        options = {"k_scale": k_scale, "v_scale": v_scale, "cache_seqlens": 0, "rotate": rotate}
        out = attnmask.flash_attention_with_kvcache(query, *caches, key, value, **options)
        errors.append(np.sqrt(np.mean((out - right) ** 2)))
    assert errors[1] < 0.6 * errors[0]


# quantize_kv


@pytest.mark.parametrize("group", [None, 32, 64, 128])
@pytest.mark.parametrize("dtype", [*TYPES, np.float64])
def test_quantize_kv(group, dtype):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((3, 5, 2, 256)) * 10 ** rng.uniform(-3, 3, (3, 5, 2, 1))).astype(dtype)[:, ::-1]
    values, scale = attnmask.quantize_kv(x, "int4", **({} if group is None else {"group": group}))
    for mine, other in zip((values, scale), twin.to_halves(x, 256 // (group or 64), F32), strict=True):
        assert mine.dtype == other.dtype
        np.testing.assert_array_equal(mine, other)
    wide = x.astype(np.float64)
    unit = np.repeat(scale[..., 0], group or 64, axis=-1)
    assert (abs(twin.of_halves(values, scale) - wide) <= 0.5001 * unit + 1e-6 * abs(wide)).all()


def test_quantize_kv_of_equal_numbers_and_of_none():
    values, scale = attnmask.quantize_kv(np.full((2, 32), -3.5), ml_dtypes.int4, group=32)
    assert not values.any()
    assert scale.tolist() == [[[1, -3.5]]] * 2
    values, scale = attnmask.quantize_kv(np.zeros((0, 64), np.float16), "int4", -1)
    assert (values.shape, scale.shape) == ((0, 32), (0, 1, 2))


# Latent caches


def test_values_that_are_channels_of_the_keys(isa):
    rng = np.random.default_rng(0)
    x, query = (
        rng.standard_normal((1, 70, 1, 128), np.float32),
        rng.standard_normal((1, 2, 4, 128), np.float32),
    )
    cache, scale = np.zeros((1, 80, 1, 64), np.uint8), np.zeros((1, 80, 1, 4, 2), np.float32)
    for values in (slice(0, 32), slice(16, 48)):
        given = {"k_cache": cache, "v_cache": cache[..., values], "k_scale": scale, "cache_seqlens": 0}
        attnmask.flash_attention_with_kvcache(x, key=x, **given)
        given |= {"cache_seqlens": 70}
        out = attnmask.flash_attention_with_kvcache(query, **given)
        begin, end = values.start // 16, values.stop // 16
        apart = {"v_cache": cache[..., values].copy(), "v_scale": scale[..., begin:end, :].copy()}
        assert out.tobytes() == attnmask.flash_attention_with_kvcache(query, **given | apart).tobytes()
    with pytest.raises(
        ValueError, match="v_cache must be whole groups of 32 channels of k_cache, got 64 from channel 16"
    ):
        attnmask.flash_attention_with_kvcache(query, **given | {"v_cache": cache[..., 8:40]})
    with pytest.raises(ValueError, match="rotate must be False where v_cache is channels of k_cache"):
        attnmask.flash_attention_with_kvcache(query, key=query[:, :, :1], **given, rotate=True)
