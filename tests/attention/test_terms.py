"""Each term of the logits beside each other one: forward, backward and in caches."""

from itertools import combinations

import ml_dtypes
import numpy as np
import pytest
from flash_backward_expected import expected as expected_gradients
from flash_cases import worst
from flash_expected import expected as expected_results
from reference_terms import dense_terms, distances, table_gradient

import attnmask
from attnmask import _core
from attnmask._attention.arguments import FLASH_ATTENTION_WITH_KVCACHE

HEADS, KV_HEADS, DEPTH, LOW = 4, 2, 16, -20


def arguments_of(names, batch, queries, keys, dtype, rng) -> dict:
    """Arguments for these terms; the bias has a number for each pair."""
    terms = {
        "bias": rng.standard_normal((batch, HEADS, queries, keys)).astype(dtype),
        "alibi_slopes": rng.random((batch, HEADS)) / 4,
        "relative_bias": rng.standard_normal((HEADS, 30)).astype(dtype),
        "logits_soft_cap": 3.0,
        "dropout_prob": 0.25,
        "softmax_aux": rng.standard_normal((HEADS, 2)).astype(dtype),
    }
    assert terms.keys() == set(_core.term_names()), "a kind of term has no case here"
    more = {"relative_low": LOW} if "relative_bias" in names else {}
    return {name: terms[name] for name in names} | more


PAIRS = (*combinations(_core.term_names(), 2), _core.term_names())


@pytest.mark.parametrize("dtype", [np.float64, np.float32, ml_dtypes.bfloat16], ids=lambda x: x.__name__)
@pytest.mark.parametrize("sizes", [(1, 200), (70, 140), (9, 90)], ids=str)
@pytest.mark.parametrize("names", PAIRS, ids="+".join)
def test_two_terms(each_isa, names, sizes, dtype):
    """Beside the float64 twin, to which what is added by distance is a dense bias."""
    (queries, keys), batch, dtype = sizes, 2, np.dtype(dtype)
    rng = np.random.default_rng(PAIRS.index(names))
    q, k, v, dout = (
        rng.standard_normal((batch, *shape)).astype(dtype)
        for shape in (
            (queries, HEADS, DEPTH),
            (keys, KV_HEADS, DEPTH),
            (keys, KV_HEADS, DEPTH),
            (queries, HEADS, DEPTH),
        )
    )
    given = arguments_of(names, batch, queries, keys, dtype, rng)
    seen = {"causal": True, "causal_offset": keys - queries, "dropout_seed": 3}
    wanted = {f"grad_{name}": True for name in names if name in ("bias", "softmax_aux", "relative_bias")}

    distance = distances(queries, keys, [keys - queries] * batch)
    slopes, table = given.get("alibi_slopes"), given.get("relative_bias")
    dense = np.zeros((batch, HEADS, queries, keys))
    if slopes is not None or table is not None:
        dense = dense_terms(distance, slopes, None if table is None else table.astype(float), LOW)
    dense = dense + given.get("bias", np.zeros((), dtype)).astype(float)
    twin = {"query": q, "key": k, "value": v, "bias": dense, "causal": True, "causal_offset": keys - queries}
    twin |= {
        name: given[name] for name in ("logits_soft_cap", "softmax_aux", "dropout_prob") if name in given
    }
    keep = None
    if "dropout_prob" in given:
        keep = attnmask.dropout_keep_mask(3, 0.25, dense.shape)
    right = expected_results(twin, keep), expected_gradients(twin, dout, keep=keep)
    for _ in each_isa():
        (out, lse), vjp = attnmask.flash_attention_vjp(q, k, v, return_lse=True, **given, **seen, **wanted)
        right[0].check(out, lse)
        grads = vjp(dout)
        right[1].check(grads._replace(bias=None, relative_bias=None))
        for name, sums in (
            ("bias", lambda x: x.bias),
            ("relative_bias", lambda x: table_gradient(x.bias, distance, table.shape, LOW)),
        ):
            if name in names:
                exact, size = sums(right[1].exact), sums(right[1].sizes)
                allowed = right[1].errors.bias + 2 * float(ml_dtypes.finfo(dtype).eps)
                assert worst(getattr(grads, name), exact, size, dtype) <= allowed, name


CACHED = [name for name in _core.term_names() if name in FLASH_ATTENTION_WITH_KVCACHE.names]


@pytest.mark.parametrize("names", [*combinations(CACHED, 2), CACHED], ids="+".join)
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
def test_two_terms_in_caches(each_isa, names, paged):
    """As attention to each sequence alone."""
    rng = np.random.default_rng(5)
    lengths, queries, page = np.array([3, 90, 128]), 2, 16
    q = rng.standard_normal((3, queries, HEADS, DEPTH))
    k, v = rng.standard_normal((2, 3, 128, KV_HEADS, DEPTH))
    given = arguments_of(names, 3, queries, 128, q.dtype, rng)
    cache = {"k_cache": k, "v_cache": v}
    if paged:
        table = rng.permutation(3 * 128 // page).astype(np.int32)
        pages = {name: np.empty((table.size, page, *x.shape[2:])) for name, x in cache.items()}
        for name, x in cache.items():
            pages[name][table] = x.reshape(table.size, page, *x.shape[2:])
        cache = pages | {"block_table": table.reshape(3, -1)}
    packed = q.reshape(-1, HEADS, DEPTH), {"cu_seqlens_q": np.arange(4) * queries}
    for _ in each_isa():
        for query, starts in ((q, {}), packed):
            bias = given.get("bias")
            if bias is not None and starts:  # a row a token
                bias = np.swapaxes(bias, 0, 1).reshape(1, HEADS, -1, 128)
            out, lse = attnmask.flash_attention_with_kvcache(
                query, **cache, cache_seqlens=lengths, return_lse=True, **starts, **given | {"bias": bias}
            )
            out = out.reshape(q.shape)
            for row, length in enumerate(lengths):
                alone = {name: x[row : row + 1] if name == "alibi_slopes" else x for name, x in given.items()}
                if "bias" in names:
                    alone["bias"] = given["bias"][row : row + 1, :, :, :length]
                part = np.s_[row : row + 1, :length]
                right, right_lse = attnmask.flash_attention_fwd(
                    q[row : row + 1], k[part], v[part], causal=True, causal_offset=length - queries, **alone
                )
                np.testing.assert_allclose(out[row], right[0], rtol=1e-9, atol=1e-12)
                of_row = lse[row] if lse.ndim == 3 else lse[:, row * queries : (row + 1) * queries]
                np.testing.assert_allclose(of_row, right_lse[0], rtol=1e-9, atol=1e-12)
