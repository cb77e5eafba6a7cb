"""The weights of attention, and what they tell: beside the dense formula in float64.

Random masks, with NaN where no pair needs a number, are in test_random_masks.py.
"""

import itertools

import numpy as np
import pytest
import reference_flash as ref
from derivative_cases import LENGTHS, TERMS, drawn, terms
from flash_cases import BF16, F16, F32, F64

import attnmask

ALL = ("key_sum", "entropy", "max_logit", ("top_keys", 5))
NAMES = ("key_sum", "entropy", "max_logit", "top_keys")


@pytest.fixture
def rng():
    return np.random.default_rng(7)


def drawn_pair(rng, dtype, *shape):
    arrays = drawn(rng, dtype, *shape)
    return arrays["query"], arrays["key"]


def near(got, exact, dtype):
    tolerance = 1e-9 if dtype == F64 else 1e-4
    np.testing.assert_allclose(got, exact, rtol=tolerance, atol=tolerance)


def compare(query, key, given, right, queries=None, heads="query"):
    weights, logits = ref.attention_weights(query.astype(F64), key.astype(F64), **right)
    chosen = slice(None) if queries is None else queries
    weights, logits, dtype = weights[:, :, chosen], logits[:, :, chosen], query.dtype
    mine = attnmask.attention_weights(query, key, queries=queries, **given)
    assert mine.dtype == (F64 if dtype == F64 else F32)
    near(mine, weights, dtype)
    found = attnmask.attention_statistics(query, key, of=ALL, queries=queries, heads=heads, **given)
    (batch, heads_of_query, _, keys), kv_heads = weights.shape, key.shape[2]
    sums = weights.sum(axis=2)
    near(
        found.key_sum,
        sums if heads == "query" else sums.reshape(batch, kv_heads, heads_of_query // kv_heads, keys).sum(2),
        dtype,
    )
    with np.errstate(all="ignore"):
        near(found.entropy, -np.where(weights > 0, weights * np.log(weights), 0).sum(axis=3), dtype)
    near(found.max_logit, logits.max(axis=3, initial=-np.inf), dtype)
    ranks = np.argsort(-mine.astype(F64) + 2 * (logits == -np.inf), axis=3, kind="stable")[..., :5]
    ranked = np.take_along_axis(mine, ranks, 3)
    fewer = np.take_along_axis(logits, ranks, 3) == -np.inf
    expected = np.full((*weights.shape[:3], 5), -1)
    expected[..., : ranks.shape[3]] = np.where(fewer, -1, ranks)
    np.testing.assert_array_equal(found.top_keys, expected)
    np.testing.assert_array_equal(found.top_weights[..., : ranks.shape[3]], np.where(fewer, 0, ranked))


@pytest.mark.parametrize("dtype", [F64, F32, F16, BF16])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths(isa, rng, dtype, lengths):
    for heads, depths in ((4, 2), (24, 1)), ((3, 1), (64, 1)), ((1, 1), (130, 1)), ((8, 1), (1, 1)):
        for by in "query", "key":
            compare(*drawn_pair(rng, dtype, *lengths, heads, depths), {}, {}, heads=by)


PAIRS = [*itertools.combinations([name for name in TERMS if name != "dropout"], 2)]


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_terms_by_pairs(isa, rng, names):
    for dtype in F64, F32:
        compare(*drawn_pair(rng, dtype), *terms(rng, names, dtype, 2, 4, 70, 65), heads="key")


@pytest.mark.parametrize(
    ("queries", "chosen"),
    [
        (-8, np.arange(142, 150)),
        (np.int64(-200), np.arange(150)),
        (slice(60, 70), np.arange(60, 70)),
        (slice(None, None, -40), np.arange(149, -1, -40)),
        (slice(3, None, 7), np.arange(3, 150, 7)),
        ([3, 140, 65, -1, 0], [3, 140, 65, 149, 0]),
        ([], np.zeros(0, int)),
    ],
)
def test_chosen_queries(isa, rng, queries, chosen):
    query, key = drawn_pair(rng, F32, 150, 70)
    given = {"causal": True, "causal_offset": -60}
    compare(query, key, given, given, np.asarray(chosen, int))
    whole = attnmask.attention_weights(query, key, **given)
    np.testing.assert_array_equal(
        attnmask.attention_weights(query, key, queries=queries, **given), whole[:, :, chosen]
    )


def test_a_given_lse_saves_a_pass(isa, rng):
    query, key = drawn_pair(rng, F32, 70, 130)
    _, lse = attnmask.flash_attention_fwd(query, key, key)
    for queries in None, [5, 1, 69]:
        whole, mine = (
            attnmask.attention_statistics(query, key, of=ALL, queries=queries, lse=x) for x in (None, lse)
        )
        for a, b in zip(whole, mine, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    half = attnmask.attention_statistics(query, key, of="key_sum", lse=lse + np.log(2).astype(F32)).key_sum
    np.testing.assert_allclose(half * 2, whole.key_sum if queries is None else half * 2, rtol=1e-5)


def test_packed_sequences_batch_axes_and_strides(isa, rng):
    starts_q, starts_k = np.array([0, 70, 70, 100]), np.array([0, 3, 80, 145])
    query, key = drawn_pair(rng, F32, 100, 145, (4, 2), (24, 1), 1)
    limits = {"cum_seqlens_q": starts_q, "cum_seqlens_k": starts_k}
    compare(query, key, limits, limits)
    flat = attnmask.attention_statistics(query[0], key[0], of=ALL, **limits)
    for a, b in zip(flat, attnmask.attention_statistics(query, key, of=ALL, **limits), strict=True):
        np.testing.assert_array_equal(a, b[0])
    query, key = drawn_pair(rng, F64, 9, 70, (4, 2), (24, 1), 6)
    whole = attnmask.attention_statistics(query, key, of=ALL)
    apart = (np.repeat(x, 2, 3)[..., ::2].reshape(2, 3, *x.shape[1:]) for x in (query, key))
    for a, b in zip(attnmask.attention_statistics(*apart, of=ALL), whole, strict=True):
        np.testing.assert_array_equal(a, b.reshape(2, 3, *b.shape[1:]))


def test_neither_threads_nor_the_rest_of_the_batch_change_a_bit(isa, rng, set_threads):
    query, key = drawn_pair(rng, F32, 700, 500, (4, 2), (64, 1), 3)
    right = attnmask.attention_statistics(query, key, of=ALL, causal=True, causal_offset=0)
    for threads in 1, 2, 5:
        set_threads(threads)
        got = attnmask.attention_statistics(query, key, of=ALL, causal=True, causal_offset=0)
        for a, b in zip(got, right, strict=True):
            np.testing.assert_array_equal(a, b)
    alone = attnmask.attention_statistics(query[1:2], key[1:2], of=ALL, causal=True, causal_offset=0)
    for a, b in zip(alone, right, strict=True):
        np.testing.assert_array_equal(a, b[1:2])


def test_more_top_keys_than_keys(isa, rng):
    query, key = drawn_pair(rng, F32, 3, 5)
    for keys in 0, 1, 5:
        found = attnmask.attention_statistics(query, key[:, :keys], of=("top_keys", 40))
        assert (np.sort(found.top_keys[..., :keys], axis=3) == np.arange(keys)).all()
        assert (found.top_keys[..., keys:] == -1).all()
        assert not found.top_weights[..., keys:].any()


def test_only_what_is_asked_for_is_there(rng):
    query, key = drawn_pair(rng, F32)
    for of, names in (
        ("entropy", {"entropy"}),
        (("top_keys", 3), {"top_keys", "top_weights"}),
        (["key_sum", ("top_keys", 3)], {"key_sum", "top_keys", "top_weights"}),
    ):
        found = attnmask.attention_statistics(query, key, of=of)._asdict()
        assert {name for name, x in found.items() if x is not None} == names


BAD = [
    ({"of": "sum"}, ValueError, "of must be one of 'key_sum', 'entropy', 'max_logit', 'top_keys', got"),
    ({"of": ("entropy", 3)}, ValueError, "of must be one of"),
    ({"of": "top_keys"}, ValueError, r"of must say how many top_keys.*write \(\"top_keys\", 16\)"),
    ({"of": ("top_keys", 0)}, ValueError, "of must ask for at least 1 of top_keys"),
    ({"heads": "all"}, ValueError, "heads must be one of 'query', 'key'"),
    ({"queries": 8}, ValueError, r"queries must be \[8\] for that one, or -8 for the last 8, got 8"),
    ({"queries": [1, 70]}, ValueError, "queries must be below 70, the number of queries, got 70 at index 1"),
    ({"queries": [1, -71]}, ValueError, "queries must be below 70.*got -71"),
    ({"queries": [1, 1]}, ValueError, "queries must name each query once"),
    ({"queries": [[1]]}, ValueError, "queries must be one axis of indices"),
    ({"queries": [0.5]}, TypeError, "queries must be"),
    ({"lse": np.zeros((2, 4, 69), F32)}, ValueError, "lse must be of shape"),
    ({"lse": np.zeros((2, 4, 70))}, TypeError, "lse must be float32"),
    ({"dropout_prob": 0.5}, TypeError, "attention_statistics.*dropout_prob"),
]


@pytest.mark.parametrize(("given", "kind", "message"), BAD)
def test_bad_input_is_named(rng, given, kind, message):
    query, key = drawn_pair(rng, F32)
    with pytest.raises(kind, match=message):
        attnmask.attention_statistics(query, key, **{"of": "entropy"} | given)
