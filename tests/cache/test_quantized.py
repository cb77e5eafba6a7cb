"""Attention over caches of int8 and float8, by the float64 twin over the numbers that they stand for."""

import inspect
import math

import ml_dtypes
import numpy as np
import pytest
import reference_kvcache as twin
from kvcache_cases import OPTIONS_OF_8_HEADS
from numpy.lib.stride_tricks import as_strided

import attnmask

pytestmark = pytest.mark.of_integers

INT8, FLOATS8 = np.dtype(np.int8), [np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)]
BF16 = np.dtype(ml_dtypes.bfloat16)
FORMATS = [INT8, *FLOATS8]
H, HKV, D, DV = 8, 2, 64, 40
LENGTHS = np.array([0, 70, 200, 64, 1])


def cache_of(rng, dtype, scale, page_size):
    """Caches in shuffled pages with room for 70 more tokens, and their scales; what is free is as bad as can be."""
    batch = len(LENGTHS)
    per_row = -(-(int(LENGTHS.max()) + 70) // page_size)
    table = rng.permutation(batch * per_row + 3)[: batch * per_row].reshape(batch, per_row).astype(np.int32)
    pages = batch * per_row + 3
    caches, scales = [], []
    for depth in (D, DV):
        worst = 127 if dtype == INT8 else np.nan
        cache = np.full((pages, page_size, HKV, depth), worst, np.float32).astype(dtype)
        sizes = np.full((pages, page_size, HKV, 1), np.nan, np.float32)
        tokens = rng.standard_normal((batch, int(LENGTHS.max()), HKV, depth)) * rng.uniform(
            0.1, 3, (1, 1, HKV, depth)
        )
        if scale == "channels":
            values, sizes = attnmask.quantize_kv(tokens, dtype, (0, 1))
        elif scale == "tokens":
            values, own = attnmask.quantize_kv(tokens, dtype, -1)
        else:
            values = (tokens * 9).round().clip(-127, 127).astype(dtype)
            sizes = np.ones((1, 1, HKV, depth), np.float32)
        for b, length in enumerate(LENGTHS):
            for t in range(length):
                at = table[b, t // page_size], t % page_size
                cache[at] = values[b, t]
                if scale == "tokens":
                    sizes[at] = own[b, t]
        caches.append(cache)
        scales.append(sizes)
    return table, caches, scales


def everything(**given):
    """All arguments of the twin but the type that it computes in."""
    names = [name for name in inspect.signature(twin.attention).parameters if name != "dtype"]
    return {name: given.get(name, True if name == "causal" else None) for name in names}


@pytest.mark.repeats
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("scale", ["tokens", "channels", "ones"])
@pytest.mark.parametrize("queries", [1, 20, 70])
@pytest.mark.parametrize("page_size", [7, 16, 128])
def test_over_the_numbers_that_they_stand_for(isa, dtype, scale, queries, page_size):
    rng = np.random.default_rng(queries)
    for i, options in enumerate(OPTIONS_OF_8_HEADS):
        if (i + queries + page_size) % 2:  # half of the options with each shape
            continue
        table, (k_cache, v_cache), (k_scale, v_scale) = cache_of(rng, dtype, scale, page_size)
        query_type = [np.float32, BF16, np.float16][i % 3]
        query = rng.standard_normal((len(LENGTHS), queries, H, D)).astype(query_type)
        key, value = (
            rng.standard_normal((len(LENGTHS), queries, HKV, d)).astype(np.float32) for d in (D, DV)
        )
        options = options | {"k_scale": k_scale, "v_scale": v_scale}
        mine = {"k_cache": k_cache.copy(), "v_cache": v_cache.copy()}
        others = {"k_cache": k_cache, "v_cache": v_cache}
        if scale == "tokens":
            mine |= {"k_scale": k_scale.copy(), "v_scale": v_scale.copy()}
        given = {"query": query, "key": key, "value": value, "cache_seqlens": LENGTHS, "block_table": table}
        out, lse = attnmask.flash_attention_with_kvcache(**given | options | mine, return_lse=True)
        expected = twin.attention(**everything(**given | options | others))
        error = 2e-4 if query_type == np.float32 else 2e-2  # of a result that is rounded to sixteen bits
        np.testing.assert_allclose(out.astype(np.float64), expected.out, rtol=error, atol=error * 10)
        np.testing.assert_allclose(lse, expected.lse, rtol=2e-4, atol=2e-3)
        for name in ("k_cache", "v_cache"):
            assert mine[name].tobytes() == others[name].tobytes(), "what is written"
        if scale == "tokens":
            for name in ("k_scale", "v_scale"):
                np.testing.assert_array_equal(mine[name], options[name])


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("axes", [(-1, -1), (-1, (0, 1)), ((0, 1), -1), ((0, 1), (0, 1))])
@pytest.mark.parametrize("depth", [7, 33, 64])
@pytest.mark.parametrize("gap", [1, 2])
def test_any_depth_and_strides_with_scales_of_either_kind(isa, dtype, axes, depth, gap):
    """Numbers and scales may lie apart, and rows be of an odd length. Few queries are multiplied unpacked, more
    are packed."""
    rng = np.random.default_rng(depth)
    given, dequantized = {}, {}
    for side, axis, count in zip("kv", axes, (depth, 5), strict=True):
        tokens = rng.standard_normal((2, 130, HKV, count), np.float32)
        values, scales = attnmask.quantize_kv(tokens, dtype, axis)
        apart = np.zeros((2, 130, HKV, gap * count + 1), dtype)
        apart[..., : gap * count : gap] = values
        scales_apart = np.full((*scales.shape[:3], gap * scales.shape[3]), np.nan, np.float32)[..., ::gap]
        scales_apart[:] = scales
        given[f"{side}_cache"], given[f"{side}_scale"] = apart[..., : gap * count : gap], scales_apart
        dequantized[f"{side}_cache"] = values.astype(np.float64) * scales
    for queries in (1, 3, 8, 40, 130):
        query = rng.standard_normal((2, queries, H, depth), np.float32).astype(BF16)
        out = attnmask.flash_attention_with_kvcache(query, **given, causal=True)
        expected = twin.attention(**everything(query=query, **dequantized)).out
        np.testing.assert_allclose(out.astype(np.float64), expected, rtol=2e-2, atol=4e-2)


@pytest.mark.parametrize(
    ("dtype", "query_type"),
    [(t, q) for t in FORMATS for q in (np.float32, np.float16, BF16)]
    + [(t, t) for t in (np.dtype(np.float32), np.dtype(np.float16), BF16)],
    ids=str,
)
@pytest.mark.parametrize("depth", [64, 128])
@pytest.mark.parametrize("rows", [12, 13, 16, 17, 24, 25, 33, 64])
def test_numbers_of_rows_on_both_sides_of_each_bound(isa, dtype, query_type, depth, rows):
    """Up to some number of rows keys are read where they lie, and else packed; in pages with the same bits."""
    rng = np.random.default_rng(rows)
    given, dequantized = {"cache_seqlens": np.array([208, 77])}, {}
    table = rng.permutation(26).reshape(2, 13).astype(np.int32)
    paged = {"cache_seqlens": given["cache_seqlens"], "block_table": table}
    for side in "kv":
        tokens = rng.standard_normal((2, 208, HKV, depth), np.float32)
        arrays = {f"{side}_cache": tokens.astype(dtype)}
        dequantized[f"{side}_cache"] = arrays[f"{side}_cache"].astype(np.float64)
        if dtype in FORMATS:
            values, scales = attnmask.quantize_kv(tokens, dtype, -1)
            arrays = {f"{side}_cache": values, f"{side}_scale": scales}
            dequantized[f"{side}_cache"] = values.astype(np.float64) * scales
        given |= arrays
        for name, array in arrays.items():
            paged[name] = np.empty((26, 16, HKV, array.shape[3]), array.dtype)
            paged[name][table.ravel()] = array.reshape(26, 16, HKV, array.shape[3])
    query = rng.standard_normal((2, rows, HKV, depth), np.float32).astype(query_type)
    options = {"query": query, "sliding_window": (150, None), "causal": True}
    out = attnmask.flash_attention_with_kvcache(**given, **options)
    expected = twin.attention(
        **everything(cache_seqlens=given["cache_seqlens"], **dequantized, **options)
    ).out
    error = 2e-4 if query_type == np.float32 else 2e-2
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=error, atol=error * 2)
    assert attnmask.flash_attention_with_kvcache(**paged, **options).tobytes() == out.tobytes()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("queries", [1, 20, 70])
@pytest.mark.parametrize("query_type", [np.float32, BF16])
def test_same_bits_contiguous_and_paged(isa, dtype, queries, query_type):
    rng = np.random.default_rng(0)
    table, caches, scales = cache_of(rng, dtype, "tokens", 16)
    query = rng.standard_normal((len(LENGTHS), queries, H, D)).astype(query_type)
    paged = attnmask.flash_attention_with_kvcache(
        query, *caches, k_scale=scales[0], v_scale=scales[1], cache_seqlens=LENGTHS, block_table=table
    )
    rows = [array[table].reshape(len(table), -1, *array.shape[2:]) for array in (*caches, *scales)]
    contiguous = attnmask.flash_attention_with_kvcache(
        query, *rows[:2], k_scale=rows[2], v_scale=rows[3], cache_seqlens=LENGTHS
    )
    assert paged.tobytes() == contiguous.tobytes()


def ones(caches):
    """Scales that leave the numbers as they are, as the error says that one writes them."""
    return {
        f"{side}_scale": np.ones((1, 1, *cache.shape[2:]), np.float32)
        for side, cache in zip("kv", caches, strict=True)
    }


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("depth", [1024, 1025, 2100])  # rows of float8 are read unpacked up to some depth
def test_long_keys(isa, dtype, depth):
    rng = np.random.default_rng(0)
    query = rng.standard_normal((1, 1, H, depth), np.float32)
    caches = [(rng.standard_normal((1, 70, HKV, depth), np.float32) * 9).astype(dtype) for _ in range(2)]
    out = attnmask.flash_attention_with_kvcache(query, *caches, **ones(caches), softmax_scale=0.002)
    wide = [cache.astype(np.float32) for cache in caches]
    expected = attnmask.flash_attention_with_kvcache(query, *wide, softmax_scale=0.002)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("side", ["k_scale", "v_scale"])
@pytest.mark.parametrize(("queries", "token"), [(1, 190), (2, 199), (20, 190), (70, 190)])
@pytest.mark.parametrize("query_type", [np.float32, BF16])
def test_a_scale_that_is_nan_reaches_what_sees_its_token(isa, dtype, side, queries, token, query_type):
    rng = np.random.default_rng(0)
    table, caches, scales = cache_of(rng, dtype, "tokens", 16)
    query = rng.standard_normal((len(LENGTHS), queries, H, D)).astype(query_type)
    given = {"cache_seqlens": LENGTHS, "block_table": table, "sliding_window": (30, 0)}
    clean = attnmask.flash_attention_with_kvcache(
        query, *caches, k_scale=scales[0], v_scale=scales[1], **given
    )
    scales[side == "v_scale"][table[2, token // 16], token % 16, 1] = np.nan  # of one head of keys
    out = attnmask.flash_attention_with_kvcache(query, *caches, k_scale=scales[0], v_scale=scales[1], **given)
    places = LENGTHS[2] - queries + np.arange(queries)
    sees = np.zeros(out.shape, bool)
    sees[2, (places >= token) & (places <= token + 30), H // HKV :] = True
    assert np.isnan(out[sees].astype(np.float32)).all()
    assert out[~sees].tobytes() == clean[~sees].tobytes()


def one_of_ones(shape, number):
    """Ones but for one number, that is neither the first nor the last."""
    array = np.ones(shape, np.float32)
    array[..., -1, -4] = number
    return array


@pytest.mark.parametrize(("change", "error", "words"), [
    ({"k_scale": None}, ValueError, "k_scale must be given for a cache of int8, got None; write k_scale=np.ones"),
    ({"v_scale": None}, ValueError, r"write v_scale=np.ones\(\(1, 1, 2, 8\), np.float32\) for scales of 1"),
    ({"k_scale": np.ones((3, 4, 2, 1))}, TypeError, "k_scale must be float32"),
    ({"k_scale": np.ones((3, 4, 1, 8), np.float32)}, ValueError, "k_scale must be of shape"),
    ({"v_scale": np.ones((4, 2, 1), np.float32)}, ValueError, "v_scale must be of shape"),
    ({"v_scale": np.zeros((1, 1, 2, 8), np.float32)}, ValueError, "finite and positive for each channel, got 0"),
    ({"k_scale": np.full((1, 1, 2, 8), -1, np.float32)}, ValueError, "finite and positive"),
    ({"k_scale": np.full((1, 1, 2, 8), np.nan, np.float32)}, ValueError, "finite and positive"),
    ({"k_scale": np.full((1, 1, 2, 8), np.inf, np.float32)}, ValueError, "finite and positive"),
    ({"k_scale": one_of_ones((1, 1, 2, 8), -3)}, ValueError, "for each channel, got -3"),
    ({"v_scale": one_of_ones((1, 1, 2, 16), np.nan)[..., ::2]}, ValueError, "for each channel, got nan"),
    ({"k_scale": np.ones((3, 1, 2, 1), np.float32)}, ValueError, "to take new tokens"),
    ({"query": np.zeros((1, 1, 4, 8))}, TypeError, "query must be"),
])  # fmt: skip
def test_bad_scales(change, error, words):
    def given():
        caches = {name: np.zeros((3, 4, 2, 8), np.int8) for name in ("k_cache", "v_cache")}
        scales = {name: np.ones((3, 4, 2, 1), np.float32) for name in ("k_scale", "v_scale")}
        key = np.ones((1, 1, 2, 8), np.float32)
        query = np.zeros((1, 1, 4, 8), np.float32)
        more = {"cache_seqlens": [3], "block_table": [[1]], "key": key, "value": key, "query": query}
        return caches | scales | more

    arguments = given() | change
    with pytest.raises(error, match=words):
        attnmask.flash_attention_with_kvcache(**arguments)
    for name, before in given().items():
        if name not in change:
            np.testing.assert_array_equal(arguments[name], before, err_msg=f"{name} was written to")


def overlapping(shape, other, dtype=np.float32):
    """Two arrays, of which the second begins in the last number of the first."""
    first = math.prod(shape)
    memory = np.ones(first + math.prod(other), dtype)
    return memory[:first].reshape(shape), memory[first - 1 : -1].reshape(other)


@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize(
    "what", ["one array", "overlapping", "k_scale in v_cache", "v_scale in v_cache", "in k_cache"]
)
def test_scales_that_share_memory_take_no_tokens(by_token, what):
    shape = (1, 16, 2, 1) if by_token else (1, 1, 2, 16)
    caches = {name: np.ones((1, 16, 2, 16), np.int8) for name in ("k_cache", "v_cache")}
    scales = {name: np.ones(shape, np.float32) for name in ("k_scale", "v_scale")}
    if what == "one array":
        scales["v_scale"] = scales["k_scale"]
    elif what == "overlapping":
        scales["k_scale"], scales["v_scale"] = overlapping(shape, shape)
    else:
        name, cache = what.split(" in ") if " in " in what else ("k_scale", "k_cache")
        scales[name] = caches[cache].reshape(-1)[:128].view(np.float32).reshape(shape)
        scales[name][...] = 1
    x = np.ones((1, 1, 2, 16), np.float32)
    given = caches | scales
    before = {name: array.tobytes() for name, array in given.items()}
    with pytest.raises(ValueError, match=r"^[kv]_(scale|cache) must share no memory with [kv]_scale"):
        attnmask.flash_attention_with_kvcache(x, **given, key=100 * x, value=x, cache_seqlens=0)
    assert {name: array.tobytes() for name, array in given.items()} == before
    attnmask.flash_attention_with_kvcache(x, **given)  # only reads


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_one_scale_for_all_tokens_takes_no_tokens(name):
    given = {each: np.zeros((1, 8, 1, 16), np.int8) for each in ("k_cache", "v_cache")}
    given |= {each: np.ones((1, 8, 1, 1), np.float32) for each in ("k_scale", "v_scale")}
    given[name] = as_strided(given[name], strides=(0, 0, 0, 0))
    x = np.ones((1, 1, 1, 16), np.float32)
    with pytest.raises(ValueError, match=f"{name} must not overlap itself"):
        attnmask.flash_attention_with_kvcache(x, **given, key=x, value=x, cache_seqlens=0)
    assert (given[name] == 1).all()


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_tokens_that_share_memory_with_scales(name):
    given = {each: np.zeros((1, 8, 1, 16), np.int8) for each in ("k_cache", "v_cache")}
    given |= {each: np.ones((1, 1, 1, 16), np.float32) for each in ("query", "key", "value")}
    given |= {each: np.ones((1, 8, 1, 1), np.float32) for each in ("k_scale", "v_scale")}
    given["v_scale"], given[name] = overlapping((1, 8, 1, 1), (1, 1, 1, 16))
    with pytest.raises(ValueError, match=f"^v_scale must share no memory with {name}"):
        attnmask.flash_attention_with_kvcache(**given, cache_seqlens=0)
    assert (given["v_scale"] == 1).all()


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
