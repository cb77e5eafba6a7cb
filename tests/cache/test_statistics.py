"""What attention to a cache looked at: every format and option, beside the float64 twin."""

from dataclasses import replace

import numpy as np
import pytest
import reference_kvcache as twin
from flash_cases import BF16, F16, F32, F64
from kvcache_cases import Case, arguments_of, attend, every_format, for_twin

import attnmask

ALL = ("key_sum", "entropy", "max_logit", ("top_keys", 5))
UNASKED = ("v_cache", "v_scale", "key", "value", "cu_seqlens_k_new")
LARGE = 1e-2  # of logits whose queries are rounded to integers of sixteen bits


def look(given, **more):
    given = {name: x for name, x in given.items() if name not in UNASKED} | {"of": ALL} | more
    return attnmask.attention_statistics_with_kvcache(**given)


def expected(case, arguments, heads):
    """key_sum, entropy and max_logit, of all sequences in the shape of results."""
    longest = max(case.lengths, default=0)
    sums, entropies, maxima = [], [], []
    for weights, logits in twin.weights(**for_twin(case, arguments)):
        total = weights.sum(axis=1)
        if heads == "key":
            total = total.reshape(case.heads[1], case.heads[0] // case.heads[1], -1 if total.size else 0).sum(
                axis=1
            )
        sums.append(np.pad(total, [(0, 0), (0, longest - total.shape[1])]))
        with np.errstate(all="ignore"):
            entropies.append(-np.where(weights > 0, weights * np.log(weights), 0).sum(axis=2))
        maxima.append(logits.max(axis=2, initial=-np.inf))
    if case.packed:
        return np.stack(sums), *(np.concatenate(x, axis=1) for x in (entropies, maxima))
    return np.stack(sums), np.stack(entropies), np.stack(maxima)


@pytest.mark.levels("turns", "amx", "avx512vnni")
@pytest.mark.parametrize(
    "case",
    [replace(case, new=None) for case in every_format() if case.new is None],
    ids=lambda case: str(case.seed),
)
def test_by_the_twin(isa, set_threads, case):
    set_threads(case.threads)
    arguments, heads = arguments_of(case), ("query", "key")[case.seed % 2]
    found = look(arguments, heads=heads)
    error = 1e-9 if case.types[0] == F64 else LARGE if case.scaled else 2e-4
    right = expected(case, arguments, heads)
    for got, exact, name in zip(found, right, ALL, strict=False):
        scale = max(1, abs(exact[np.isfinite(exact)]).max(initial=0))
        np.testing.assert_allclose(got, exact, rtol=0, atol=error * scale, err_msg=name)
    in_order = -np.sort(-found.top_weights, axis=-1)
    np.testing.assert_array_equal(found.top_weights, in_order)
    assert ((found.top_keys >= 0) | (found.top_weights == 0)).all()


@pytest.mark.parametrize("kind", [F32, F16, BF16, *twin.QUANTIZED, "int4"], ids=str)
@pytest.mark.parametrize("query_type", [F32, BF16], ids=str)
@pytest.mark.parametrize("rows", [1, 12, 13, 16, 17, 24, 25, 64, 65])
def test_neither_pages_nor_the_rest_of_the_call_change_a_bit(isa, kind, query_type, rows):
    """Up to some number of rows keys are read where they lie, and else packed; also sequence by sequence."""
    case = Case((query_type, kind), (2, 2), (64, 64), rows, (208, 77), page_size=16, window=(150, None))
    right = look(arguments_of(replace(case, page_size=None)))
    packed = replace(case, queries=(rows, rows))
    for got in look(arguments_of(case)), look(arguments_of(case, [0])), look(arguments_of(packed)):
        for a, b in zip(got, right, strict=True):
            if got.entropy.ndim == 2 and a is not got.key_sum:
                a = a.reshape(2, 2, rows, *a.shape[2:]).swapaxes(0, 1)
            assert a.tobytes() == b[: len(a)].tobytes()


def test_the_lse_of_the_attention(isa):
    for queries, types in (1, (F32, F32)), (30, (F32, F32)), (1, (F32, "int4")), ((3, 1), (F64, F64)):
        case = Case(types, (4, 2), (64, 64), queries, (130, 70))
        given = arguments_of(case)
        _, lse = attend(given, return_lse=True)
        for a, b in zip(look(given), look(given, lse=lse), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-2)
        half = look(given, lse=lse + np.log(2).astype(lse.dtype))
        np.testing.assert_allclose(half.key_sum * 2, look(given).key_sum, atol=1e-2)


def test_a_mask_of_packed_sequences(isa):
    """Its keys are counted from the start of each; sequences of no queries and of no tokens are there as well."""
    rng = np.random.default_rng(0)
    case = Case((F32, F32), (4, 2), (16, 16), (3, 0, 1, 70), (70, 5, 0, 130), causal=False)
    given = arguments_of(case)
    given["attention_mask"] = rng.random((1, 1, 74, 200)) < 0.7
    right = expected(case, given, "query")
    for got, exact in zip(look(given), right, strict=False):
        np.testing.assert_allclose(got, exact, atol=1e-4)


BAD = [
    ({"of": "sum"}, ValueError, "of must be one of"),
    ({"heads": "both"}, ValueError, "heads must be one of"),
    ({"lse": np.zeros((2, 4, 3), F32)}, ValueError, r"lse must be of shape \(2, 4, 2\)"),
    ({"lse": np.zeros((2, 4, 2))}, TypeError, "lse must be float32"),
    ({"k_cache": np.zeros((2, 8, 2, 15), F32)}, ValueError, "query must have D = 15 as its cache"),
    ({"k_cache": np.zeros((2, 8, 2, 16), np.int8)}, ValueError, "k_scale must be given for a cache of int8"),
    ({"cache_seqlens": [9, 1]}, ValueError, "cache_seqlens must be tokens that the cache has room for"),
    ({"block_table": [[0], [1]]}, ValueError, "cache_seqlens must be given with block_table"),
    ({"v_cache": np.zeros(3)}, TypeError, "attention_statistics_with_kvcache.*v_cache"),
    ({"rotate": 1}, TypeError, "rotate must be"),
    ({"sliding_window": -1}, ValueError, "sliding_window"),
]


@pytest.mark.parametrize(("wrong", "error", "words"), BAD)
def test_bad_input_is_named(wrong, error, words):
    given = {"query": np.zeros((2, 2, 4, 16), F32), "k_cache": np.zeros((2, 8, 2, 16), F32), "of": "entropy"}
    with pytest.raises(error, match=words):
        attnmask.attention_statistics_with_kvcache(**given | wrong)
