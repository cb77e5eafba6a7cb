"""ALiBi and relative biases: terms of the logits that follow from the distance of a pair. test_terms.py has more."""

import numpy as np
import pytest
from flash_expected import expected as expected_results
from flash_expected import expected_gradients
from reference_terms import dense_terms, distances

import attnmask
from attnmask import MaskInfo


@pytest.mark.parametrize("offset", [0, 150, 1000, -500])
@pytest.mark.parametrize("causal", [False, True])
def test_many_tiles_around_the_nearest_key(each_isa, causal, offset):
    """Wherever that is: before, among or behind the keys; far keys whose weights vanish, and slopes below 0."""
    rng = np.random.default_rng(8)
    q, k, v, dout = (rng.standard_normal((1, n, 4, 8), np.float32) for n in (70, 330, 330, 70))
    slopes = np.array([3, 0.4, 1e-3, -0.1])
    given = {"causal": causal, "causal_offset": offset}
    dense = dense_terms(distances(70, 330, [offset]), slopes)
    arguments = {"query": q, "key": k, "value": v, "bias": dense, **given}
    right, right_gradients = expected_results(arguments), expected_gradients(arguments, dout)
    for _ in each_isa():
        results, vjp = attnmask.flash_attention_vjp(q, k, v, alibi_slopes=slopes, return_lse=True, **given)
        right.check(*results)
        right_gradients.check(vjp(dout))


@pytest.mark.parametrize("offset", [0, "bottom-right", "of sequences"])
def test_packed_sequences_count_from_their_own_starts(isa, offset):
    """Each has the bits that it has alone; with a row of slopes a sequence, too."""
    rng = np.random.default_rng(2)
    q_lens, k_lens = (3, 70, 0, 16, 130, 5), (5, 70, 4, 40, 200, 0)
    q_starts, k_starts = np.cumsum([0, *q_lens]), np.cumsum([0, *k_lens])
    q, k, v = (rng.standard_normal((n, 4, 16), np.float32) for n in (sum(q_lens), *[sum(k_lens)] * 2))
    slopes, table = rng.random((6, 4)), rng.standard_normal((4, 90))
    offsets = np.arange(6) if offset == "of sequences" else offset
    given = {"causal": True, "relative_bias": table, "relative_low": -50}
    packed = attnmask.flash_attention(
        q, k, v, cum_seqlens_q=q_starts, cum_seqlens_k=k_starts,
        alibi_slopes=slopes, causal_offset=offsets, **given,
    )  # fmt: skip
    for i in range(6):
        (q0, q1), (k0, k1) = q_starts[i : i + 2], k_starts[i : i + 2]
        alone = attnmask.flash_attention(
            q[None, q0:q1], k[None, k0:k1], v[None, k0:k1],
            alibi_slopes=slopes[i], causal_offset=i if offset == "of sequences" else offset, **given,
        )  # fmt: skip
        assert alone[0].tobytes() == packed[q0:q1].tobytes(), i


@pytest.mark.parametrize("queries", [1, 3, 11, 16, 40])
def test_one_channel(each_isa, queries):
    """Numbers of a term by distance take more memory than a row of keys; blocks of several heads share packed keys."""
    rng = np.random.default_rng(4)
    q, k, v, dout = (
        rng.standard_normal((16, n, h, 1)) for n, h in ((queries, 8), (50, 1), (50, 1), (queries, 8))
    )
    slopes, table = rng.random(8), rng.standard_normal((8, 90))
    dense = dense_terms(distances(queries, 50, [0] * 16), slopes, table, -40)
    arguments = {"query": q, "key": k, "value": v, "bias": dense}
    right, right_gradients = expected_results(arguments), expected_gradients(arguments, dout)
    given = {"alibi_slopes": slopes, "relative_bias": table, "relative_low": -40}
    for _ in each_isa():
        results, vjp = attnmask.flash_attention_vjp(q, k, v, return_lse=True, **given)
        right.check(*results)
        right_gradients.check(vjp(dout))


def test_segments_in_a_mask_keep_the_positions_of_the_row(isa):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((1, 90, 2, 16), np.float32)
    info = MaskInfo.from_cu_seqlens([0, 7, 60, 90], packed=True).apply_causal()
    slopes = np.array([0.5, 0.03])
    dense = dense_terms(distances(90, 90, [0]), slopes).astype(np.float32)
    got = attnmask.flash_attention(x, x, x, info, alibi_slopes=slopes)
    right = attnmask.flash_attention(x, x, x, info, bias=dense)
    np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-6)


def test_an_infinite_entry_makes_its_pairs_dead(isa):
    """As in a bias: a NaN there has no influence, and a row without another pair is zero."""
    rng = np.random.default_rng(4)
    q, k, v = rng.standard_normal((3, 1, 80, 2, 16), np.float32)
    table = np.zeros((2, 5))
    table[0, :] = -np.inf
    table[1, 2:] = -np.inf  # keys from the query's own on
    v[0, -1] = np.nan
    out, lse = attnmask.flash_attention(q, k, v, relative_bias=table, relative_low=-2, return_lse=True)
    assert (out[0, :, 0] == 0).all()
    assert np.isneginf(lse[0, 0]).all()
    assert np.isfinite(out).all()
    expected = attnmask.flash_attention(q, k, v, causal=True, causal_offset=-1)
    np.testing.assert_allclose(out[0, :, 1], expected[0, :, 1], rtol=1e-5, atol=1e-6)


X = np.zeros((1, 4, 2, 8), np.float32)
BAD = (
    ({"alibi_slopes": [0.5, np.nan]}, ValueError, "alibi_slopes must be finite, got nan"),
    ({"alibi_slopes": [np.inf, 1.0]}, ValueError, "alibi_slopes must be finite, got inf"),
    ({"relative_bias": np.zeros((2, 0))}, ValueError, "relative_bias must be"),
    ({"relative_low": 3}, ValueError, "relative_low must be 0 without relative_bias, got 3"),
    ({"relative_bias": np.zeros((2, 5)), "relative_low": 2**60}, ValueError, "relative_low must be from"),
    ({"grad_relative_bias": True}, ValueError, "grad_relative_bias must be False without relative_bias"),
)


@pytest.mark.parametrize(("given", "error", "words"), BAD)
def test_bad_terms(given, error, words):
    for function in (attnmask.flash_attention, attnmask.flash_attention_vjp):
        if "grad_relative_bias" not in given or function is attnmask.flash_attention_vjp:
            with pytest.raises(error, match=words):
                function(X, X, X, **given)


# T5


def t5_bucket(distance: int, count: int, bidirectional: bool, max_distance: int) -> int:
    """One by one, as T5 defines them, in exact arithmetic where logarithms are whole numbers."""
    first = 0
    if bidirectional:
        count //= 2
        first, far = (count if distance > 0 else 0), abs(distance)
    else:
        far = max(-distance, 0)
    exact = count // 2
    if far < exact:
        return first + far
    shared = np.float32(np.log(np.float32(far / exact))) / np.log(max_distance / exact) * (count - exact)
    return first + min(exact + int(np.float32(shared)), count - 1)


@pytest.mark.parametrize(
    ("bidirectional", "count", "max_distance"), [(True, 32, 128), (False, 32, 128), (True, 8, 20)]
)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (300, 300), (5, 200), (0, 3)])
def test_t5_relative_bias(bidirectional, count, max_distance, queries, keys):
    table = np.random.default_rng(7).standard_normal((count, 3)).astype(np.float32)
    bias, low = attnmask.t5_relative_bias(
        table, queries, keys, bidirectional=bidirectional, max_distance=max_distance
    )
    assert bias.dtype == table.dtype
    got = dense_terms(distances(queries, keys, [0]), table=bias.astype(np.float64), low=low)[0]
    for query in range(queries):
        for key in range(keys):
            bucket = t5_bucket(key - query, count, bidirectional, max_distance)
            assert (got[:, query, key] == table[bucket]).all(), (query, key)


def test_t5_relative_bias_vjp():
    """The pullback is the transpose: <d, B(t)> = <Bᵀ(d), t>."""
    rng = np.random.default_rng(8)
    table = rng.standard_normal((32, 2))
    (bias, low), vjp = attnmask.t5_relative_bias_vjp(table, 150, 90)
    assert (bias == attnmask.t5_relative_bias(table, 150, 90)[0]).all()
    assert low == -128
    dbias = rng.standard_normal(bias.shape)
    assert np.isclose((dbias * bias).sum(), (vjp(dbias) * table).sum())
    with pytest.raises(ValueError, match="dbias must be of shape"):
        vjp(dbias[:1])


@pytest.mark.parametrize(("arguments", "words"), [
    ({"table": np.zeros((3, 2))}, "at least 4 buckets"),
    ({"q_len": -1}, "q_len must be at least 0"),
    ({"max_distance": 2}, "max_distance must be at least 3"),
])  # fmt: skip
def test_bad_t5_tables(arguments, words):
    with pytest.raises(ValueError, match=words):
        attnmask.t5_relative_bias(**{"table": np.zeros((8, 2)), "q_len": 3, "kv_len": 3} | arguments)
