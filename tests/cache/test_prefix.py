"""Sequences that begin with the same pages, which are attended to once for all."""

import numpy as np
import pytest
import reference_kvcache as twin
from flash_cases import BF16, F16, F32, F64

import attnmask
from attnmask import KVCache, quantize_kv

H, HKV, SIZE, PAGES = 4, 2, 16, 5  # tokens of a page, and pages that are shared
PREFIX = SIZE * PAGES
ERROR = {F64: 1e-12, F32: 1e-5, F16: 4e-3, BF16: 3e-2}


def call(rng, dtype=F32, kind=None, lengths=(99, 81, 130), queries=1, depths=(64, 32)):
    """A call of queries and new tokens, whose caches have NaN where nothing is read."""
    batch, own = len(lengths), 12
    table = np.concatenate(
        [np.tile(rng.permutation(PAGES), (batch, 1)), PAGES + np.arange(batch * own).reshape(batch, own)],
        axis=1,
    )
    given = {"block_table": table.astype(np.int32), "cache_seqlens": np.array(lengths)}
    for side, depth in zip(("key", "value"), depths, strict=True):
        x = rng.standard_normal((PAGES + batch * own, SIZE, HKV, depth)).astype(F32)
        if kind is None:
            cache = x.astype(dtype)
            for row, length in enumerate(lengths):
                for i in range(length, SIZE * (PAGES + own)):
                    cache[table[row, i // SIZE], i % SIZE] = np.nan
        else:
            cache, given[f"{side[0]}_scale"] = (
                quantize_kv(x, kind, group=32) if kind == "int4" else quantize_kv(x, kind, axis=-1)
            )
        given[f"{side[0]}_cache"] = cache
        given[side] = rng.standard_normal((batch, queries, HKV, depth)).astype(dtype)
    return given | {"query": rng.standard_normal((batch, queries, H, depths[0])).astype(dtype)}


def copied(given):
    return {name: x.copy() if isinstance(x, np.ndarray) else x for name, x in given.items()}


def attend(given, prefix=PREFIX, **more):
    return attnmask.flash_attention_with_kvcache(
        **copied(given) | {"prefix": prefix, "return_lse": True, **more}
    )


def some(given, rows):
    """The call of some sequences."""
    of_rows = ("query", "key", "value", "block_table", "cache_seqlens")
    return given | {name: given[name][rows] for name in of_rows}


@pytest.mark.parametrize("dtype", [F64, F32, F16, BF16], ids=str)
@pytest.mark.parametrize("queries", [1, 2, 70])
@pytest.mark.parametrize("more", [
    {}, {"softmax_aux": np.ones((3, H), F32)}, {"logits_soft_cap": 2.0, "softmax_scale": 0.5}, {"causal": False},
], ids=("plain", "sinks", "cap", "full"))  # fmt: skip
def test_by_the_call_without_a_prefix(isa, rng, dtype, queries, more):
    more = {name: x.T.astype(dtype) if name == "softmax_aux" else x for name, x in more.items()}
    given = call(rng, dtype, queries=queries)
    wide = {
        name: x.astype(F64) if name != "cache_seqlens" and x.dtype == dtype else x
        for name, x in given.items()
    }
    for got, exact in zip(attend(given, **more), attend(wide, 0, **more), strict=True):
        np.testing.assert_allclose(
            got.astype(F64), exact, rtol=0, atol=ERROR[dtype] * max(1, abs(exact).max())
        )


@pytest.mark.parametrize("kind", [*twin.QUANTIZED, "int4"], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_quantized_caches(isa, rng, kind, dtype):
    given = call(rng, dtype, kind)
    for got, other in zip(attend(given), attend(given, 0), strict=True):
        np.testing.assert_allclose(got.astype(F64), other.astype(F64), rtol=0, atol=3e-2)


@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
@pytest.mark.parametrize("queries", [1, 3, 33])
def test_neither_other_sequences_nor_threads_change_a_bit(isa, rng, set_threads, dtype, queries):
    given = call(rng, dtype, lengths=(99, 81, 130, 80, 100, 170, 90, 91) * 3, queries=queries)
    whole = attend(given)
    for rows in [0], [5], [3, 1], np.arange(24) % 7 > 0:
        for got, right in zip(attend(some(given, rows)), whole, strict=True):
            assert got.tobytes() == right[rows].tobytes()
    for threads in 1, 2, 5:
        set_threads(threads)
        assert attend(given)[0].tobytes() == whole[0].tobytes()


def test_packed_sequences_strides_and_places(isa, rng):
    """Packed queries of unequal numbers; queries of any strides; results in `out`; tokens are appended as ever."""
    given = call(rng, queries=3)
    out, lse = attend(given)
    packed = {name: given[name].reshape(-1, *given[name].shape[2:]) for name in ("query", "key", "value")}
    got, got_lse = attend(given | packed | {"cu_seqlens_q": [0, 3, 6, 9]})
    assert got.tobytes() == out.tobytes()
    np.testing.assert_array_equal(got_lse.reshape(H, 3, 3).swapaxes(0, 1), lse)
    apart = np.repeat(np.concatenate([given["query"]] * 2, axis=1), 2, axis=3)[:, 3:, :, ::2]
    target = np.full((3, 3, H, 64), np.nan, F32)[..., ::2]
    assert attend(given | {"query": apart}, out=target)[0] is target
    assert target.tobytes() == out.tobytes()
    written, plain = copied(given), copied(given)
    attnmask.flash_attention_with_kvcache(**written, prefix=PREFIX)
    attnmask.flash_attention_with_kvcache(**plain)
    for name in "k_cache", "v_cache":
        assert written[name].tobytes() == plain[name].tobytes()
    for prefix in 0, SIZE:
        np.testing.assert_allclose(attend(given, prefix)[0], out, atol=1e-5)


def test_forks_in_a_step(rng):
    cache = KVCache(HKV, 16, pages=40, page_size=4, dtype="float32")
    a = cache.new_sequence()
    x = rng.standard_normal((18, H, 16)).astype(F32)
    with cache.step([a], 18) as step:
        step.attend(0, x, x[:, :HKV], x[:, :HKV])
    b = cache.fork(a)
    with cache.step([a, b], 2) as step:
        q, k = (rng.standard_normal((2, 2, heads, 16)).astype(F32) for heads in (H, HKV))
        outs = [step.attend(0, q, k, k, prefix=prefix) for prefix in (16, 0)]
    np.testing.assert_allclose(*outs, atol=1e-5)


BAD = [
    ({"prefix": PREFIX + 1}, ValueError, "prefix must be whole pages of 16 tokens, got 81"),
    ({"prefix": 18 * SIZE}, ValueError, "prefix must be tokens that all .* up to 99 for sequence 0, got 288"),
    ({"prefix": 18 * SIZE, "cache_seqlens": [300] * 3}, ValueError, "prefix must be tokens of the 17 pages of block_t"),
    ({"prefix": -16}, ValueError, "prefix must be a non-negative integer, got -16"),
    ({"prefix": 1.5}, TypeError, "prefix must be a non-negative integer, got 1.5"),
    ({"prefix": PREFIX + SIZE, "cache_seqlens": [99, 97, 130]}, ValueError, ".* share, up to 80 for .* 1, got"),
    ({"cache_seqlens": [99, 79, 130]}, ValueError, "prefix must be tokens that .* to 79 for .* 1, got 80"),
    ({"cache_seqlens": [99, 80, 272]}, ValueError, "cache_seqlens must be tokens .* 272 per .*got 272 and 1 new"),
    ({"block_table": None}, ValueError, "prefix must be 0 without block_table, got 80"),
    ({"sliding_window": 9}, ValueError, "sliding_window must be None with prefix, got 9; leave prefix out"),
    ({"attention_chunk": 9}, ValueError, "attention_chunk must be None with prefix"),
    ({"alibi_slopes": np.ones(H)}, ValueError, "alibi_slopes must be None with prefix"),
    ({"bias": np.zeros((1, 1, 1, 200), F32)}, ValueError, "bias must be None with prefix"),
    ({"attention_mask": np.ones((1, 1, 1, 200), bool)}, ValueError, "attention_mask must be None with prefix"),
]  # fmt: skip


def test_errors_of_a_step_name_what_it_takes(rng):
    """The lengths, the pages and the caches are the step's."""
    cache = KVCache(HKV, 64, pages=16, page_size=16, dtype="float32")
    ids = [cache.new_sequence() for _ in range(2)]
    q, k = (rng.standard_normal((70, heads, 64)).astype(F32) for heads in (H, HKV))
    for i in ids:
        with cache.step([i], 70) as step:
            step.attend(0, q, k, k)
    wrongs = [
        (
            {"prefix": 80},
            "prefix must be tokens that all sequences have in the cache, up to 70 for sequence 0",
        ),
        ({"prefix": 17}, "prefix must be whole pages of 16 tokens, got 17"),
        (
            {"prefix": 32},
            "prefix must be tokens whose pages all sequences share, up to 0 for sequence 1, got 32",
        ),
        ({"query": q[:4, :3]}, "query must have a multiple of its cache's 2 heads, got"),
        ({"query": q[:4, :, :9]}, "query must have D = 64 as its cache, got"),
    ]
    for wrong, words in wrongs:
        given = {"query": q[:4], "key": k[:4], "value": k[:4]} | wrong
        with pytest.raises(ValueError, match=f"^{words}"), cache.step(ids, [1, 3]) as step:
            step.attend(0, **given)


@pytest.mark.parametrize(("wrong", "error", "words"), BAD)
def test_bad_input_writes_nothing(rng, wrong, error, words):
    given = call(rng) | {"prefix": PREFIX} | wrong
    if given["block_table"] is None:
        given |= {name: given[name][:3] for name in ("k_cache", "v_cache")} | {"cache_seqlens": 1}
    before = [given[name].tobytes() for name in ("k_cache", "v_cache")]
    with pytest.raises(error, match=words):
        attnmask.flash_attention_with_kvcache(**given)
    assert [given[name].tobytes() for name in ("k_cache", "v_cache")] == before


def test_pages_that_are_wrong(rng):
    given = call(rng)
    given["block_table"][1, 2] = 99
    with pytest.raises(IndexError, match=r"block_table must be from 0 to 40, got 99 at index \(1, 2\)"):
        attend(given)
    given["block_table"][1] = [*range(5), *[99] * 12]
    given["block_table"][0, :5] = given["block_table"][2, :5] = np.arange(5)
    with pytest.raises(IndexError, match=r"block_table must be from 0 to 40, got 99 at index \(1, 5\)"):
        attend(given)
    early = {name: x for name, x in call(rng).items() if name not in ("key", "value")}
    early["query"] = np.zeros((3, 3, H, 64), F32)
    early["cache_seqlens"] = [99, 82, 130]
    with pytest.raises(
        ValueError, match="prefix must be tokens before the queries, up to 79 for sequence 1, got 80"
    ):
        attend(early)


@pytest.fixture
def rng():
    return np.random.default_rng(11)
