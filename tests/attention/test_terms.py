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
