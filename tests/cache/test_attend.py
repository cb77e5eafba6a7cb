"""Attention over caches of keys and values: accuracy, equal bits, what has no influence, what is written, errors."""

import contextlib
import functools
import itertools
import math
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import reference_kvcache as twin
from environment import run_apart
from flash_cases import BF16, F16, F32, F64, FLOATS, POISON, poison_of, thinned
from hypothesis import given
from hypothesis import strategies as st
from kvcache_bad_input import BAD, BAD_TO_READ, HKV, KINDS, TQ, B, D, good
from kvcache_cases import (
    CASES,
    FACTORS,
    GARBAGE,
    Case,
    arguments_of,
    attend,
    check,
    memory,
    refused,
    right,
    right_of,
    tokens_of,
)
from layouts import arrange
from numpy.lib.stride_tricks import as_strided

import attnmask
from attnmask import MaskInfo, _core
from attnmask._attention.arguments import FLASH_ATTENTION_WITH_KVCACHE

pytestmark = pytest.mark.levels("turns", "amx")
OF_INTEGERS = pytest.mark.levels("turns", "amx", "avx512vnni")

# Accuracy


def test_each_term_of_the_logits_is_among_the_factors():
    terms = {
        "slopes": "[H]",
        "bias": "[1, H, 1, K]",
        "relative": (1, 0),
        "grid": 1,
        "soft_cap": 2.0,
        "sinks": "[S]",
    }
    every = Case(new="as many", **terms)
    given = {name for name, value in arguments_of(every).items() if value is not None}
    assert {*_core.term_names()} & {*FLASH_ATTENTION_WITH_KVCACHE.names} <= given


@pytest.mark.levels("all", "amx")
@pytest.mark.parametrize("case", thinned(CASES, 3), ids=lambda case: str(case.seed))
def test_all_pairs_of_arguments(isa, set_threads, case):
    set_threads(case.threads)
    check(case, right_of(case), arguments_of(case))


@st.composite
def random_cases(draw):
    """Small ones, in which half of the options are left out."""
    plain = st.booleans()
    levels = {
        name: choices[0] if draw(plain) else draw(st.sampled_from(choices))
        for name, choices in FACTORS.items()
    }
    count = st.integers(0, 20)
    levels["queries"] = draw(st.one_of(count, st.lists(count, min_size=1, max_size=4).map(tuple)))
    levels["lengths"] = tuple(draw(st.lists(st.integers(0, 80), min_size=1, max_size=4)))
    levels["page_size"] = draw(st.one_of(st.none(), st.integers(1, 90)))
    levels["depths"] = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    if levels["window"] is not None:
        levels["window"] = tuple(draw(st.one_of(st.none(), st.integers(0, 60))) for _ in range(2))
    return Case(**levels, seed=draw(st.integers(0, 2**20)), order=draw(st.integers(0, 2**20)))


@given(case=random_cases())
def test_any_arguments(each_isa, set_threads, case):
    wanted = right(functools.partial(arguments_of, case), case)
    set_threads(case.threads)
    for _ in each_isa():
        check(case, wanted, arguments_of(case))


def test_lengths_for_all_sequences():
    """They may be one number, and are those of the cache if there is none."""
    rng = np.random.default_rng(0)
    query, cache = rng.standard_normal((3, 2, 4, 8)), rng.standard_normal((3, 9, 2, 8))
    of_all = attend({"query": query, "k_cache": cache, "v_cache": cache})
    same = attnmask.flash_attention(query, cache, cache, causal=True, causal_offset="bottom-right")
    assert of_all.tobytes() == same.tobytes()
    for length in (7, np.int8(7), [7, 7, 7], np.full(3, 7, ">i4")):
        some = attend({"query": query, "k_cache": cache, "v_cache": cache}, cache_seqlens=length)
        same = attend({"query": query, "k_cache": cache[:, :7], "v_cache": cache[:, :7]})
        assert some.tobytes() == same.tobytes()


def test_empty_lists_as_tables():
    """They are of float64 to NumPy."""
    caches = {"k_cache": np.ones((6, 4, 2, 8), F32), "v_cache": np.ones((6, 4, 2, 8), F32)}
    given = {"query": np.ones((2, 1, 4, 8), F32), "cache_seqlens": [0, 0]} | caches
    assert not attend(given, block_table=[[], []]).any()
    for table in ([], ()):
        with pytest.raises(ValueError, match=r"block_table must be of shape \(2, max_pages\)"):
            attend(given, block_table=table)


# The same bits

VARIANTS = (
    {},
    {"layout": "tokens apart", "threads": 3},
    {"page_size": 1, "layout": "reversed", "threads": 2},
    {"page_size": 2, "layout": "fortran", "threads": 2},
    {"page_size": 7, "layout": "sliced"},
    {"page_size": 8, "threads": 2},
    {"page_size": 16, "threads": 3},
    {"page_size": 32, "layout": "keys beside values", "threads": 2},
    {"page_size": 48, "layout": "heads first"},
    {"page_size": 64, "layout": "keys beside values", "threads": 2},
    {"page_size": 100, "layout": "strided"},
    {"page_size": 256, "threads": 3},
)
STEADY = (
    Case((F32, F32), (8, 2), (64, 64), 1, (0, 1, 63, 64, 65, 200, 700), "as many"),
    Case((F32, F32), (8, 8), (33, 40), 17, (0, 63, 64, 200), "more", causal=False, sinks="[H, S]", slopes="[B, H]"),
    Case((F32, F32), (4, 1), (16, 16), (1, 17, 0, 64, 3), (200, 64, 65, 0, 1), "as many", window=(70, 0)),
    Case((F32, F32), (4, 4), (16, 24), (1, 17, 0, 64, 3), (200, 64, 65, 0, 1), "as many", slopes="[B, H]"),
    Case((F32, F32), (4, 2), (16, 16), (2, 65, 1), (3, 300, 70), mask="[B, H, Tq, K] bool", soft_cap=5.0),
    Case((F32, F32), (4, 2), (16, 16), (2, 65, 1), (3, 300, 70), mask="info of segments [B]", slopes="[H]"),
    Case((F32, F32), (4, 2), (16, 16), 3, (3, 300, 70), "as many", mask="info of segments [B]", sinks="[S]"),
    Case((F32, F32), (4, 2), (16, 16), 65, (3, 300, 70), "fewer", mask="[1, H, Tq, K] float32"),
    Case((BF16, BF16), (8, 2), (64, 64), 1, (300, 1500, 65), "as many", slopes="[H]"),
    Case((BF16, BF16), (8, 8), (64, 64), 65, (0, 64, 200), "as many", window=(100, 0), sinks="[H, S]"),
    Case((BF16, BF16), (4, 1), (33, 33), (1, 64, 2, 17), (130, 64, 0, 200), "as many", slopes="[B, H]"),
    # Few rows of many keys, whose kernels read them, or values, where they lie
    Case((F32, F32), (8, 2), (64, 64), 8, (0, 64, 200, 700), "as many"),
    Case((BF16, BF16), (8, 2), (128, 128), 8, (200, 700), "as many"),
    Case((BF16, BF16), (8, 2), (64, 96), 5, (200, 700), "as many"),
    Case((F64, F64), (8, 2), (64, 64), 4, (130, 300), "as many"),
    Case((F32, F32), (8, 2), (64, 48), 6, (200, 700), "as many", sinks="[H, S]"),
    Case((F16, F16), (8, 8), (128, 128), 3, (200, 64, 1), scale=0.3, soft_cap=20.0),
    Case((F16, F16), (4, 2), (24, 129), (1, 1, 70, 0), (65, 128, 64, 9), "as many", causal=False),
    Case((F64, F64), (4, 2), (16, 16), (1, 17, 0, 64, 3), (200, 64, 65, 0, 1), "as many", mask="[B, H, Tq, K] bool"),
    Case((F32, BF16), (8, 2), (64, 64), 1, (0, 1, 63, 64, 65, 200, 700), "as many"),
    Case((F32, F16), (8, 2), (64, 64), (1, 70, 3), (65, 0, 200), "as many", window=(70, 0)),
    Case((BF16, F32), (4, 4), (40, 64), 2, (65, 128, 3), "as many"),
    # Packed new tokens, more or fewer than queries
    Case((F32, F32), (4, 2), (16, 16), 3, (3, 0, 70, 200, 64), "packed", slopes="[B, H]"),
    Case((BF16, BF16), (8, 2), (64, 64), (1, 17, 0, 64, 3), (200, 64, 65, 0, 1), "packed", window=(70, 0)),
    Case((F64, F64), (4, 2), (16, 24), (2, 65, 1), (3, 300, 70), "packed", mask="[B, H, Tq, K] bool", seed=1),
    # Of one byte, and of halves of one
    *(
        Case(types, (8, 2), (64, 128), queries, (0, 70, 200, 64, 1))
        for types in itertools.product((F32, BF16), (*twin.QUANTIZED, "int4"))
        for queries in (1, 5, 20, 70)
    ),
    # Chunks
    Case((F32, F32), (8, 2), (64, 64), 1, (0, 1, 63, 64, 65, 200, 700), "as many", chunk=100),
    Case((F32, F32), (4, 2), (16, 16), (1, 17, 0, 64, 3), (200, 64, 65, 0, 1), "as many", chunk=64, slopes="[B, H]"),
    Case((BF16, BF16), (8, 2), (64, 64), 70, (300, 1500, 65), "as many", chunk=70, causal=False),
    # What is added to logits
    Case((F32, F32), (8, 2), (64, 64), 1, (0, 1, 63, 64, 65, 200, 700), "as many", relative=(60, -50)),
    Case((F32, F32), (4, 2), (16, 16), 3, (3, 300, 70), "as many", bias="[B, H, Tq, K]", slopes="[B, H]", seed=1),
    Case((BF16, BF16), (8, 2), (64, 64), (1, 17, 64, 3), (200, 64, 0, 1), "as many", bias="[B, H, Tq, K]", seed=1),
    Case((F64, F64), (4, 1), (16, 24), (1, 70, 1, 2), (130, 64, 1, 200), bias="[1, H, 1, K]", relative=(9, -4)),
    Case((F32, F32), (4, 2), (16, 16), (2, 65, 1), (3, 300, 70), mask="[B, H, Tq, K] bool", bias="[B, 1, Tq, 1]"),
)  # fmt: skip


def same_bits(got, wanted) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(got, wanted, strict=True))


def alone(case: Case, s: int):
    """The sequence in arrays of its own: by `flash_attention`, which takes arrays of one type, else in a contiguous
    cache."""
    case = replace(case, page_size=None, layout="contiguous", order=0)
    arguments = arguments_of(case, [s])
    if len(set(case.types)) > 1 or case.chunk:
        out, lse = attend(arguments, return_lse=True)
        return (out, lse) if case.packed else (out[0], lse[0])
    those, mask = tokens_of(case, s), arguments["attention_mask"]
    names = ("softmax_scale", "causal", "sliding_window", "logits_soft_cap", "softmax_aux", "alibi_slopes")
    names += ("relative_bias", "relative_low", "grid_bias")
    bias = arguments.get("bias")
    out, lse = attnmask.flash_attention(
        those.query[None],
        *(
            np.concatenate([old, new.astype(old.dtype)])[None]
            for old, new in zip(those.old, those.new, strict=True)
        ),
        None if mask is None else mask[..., : case.after[s]],
        None if bias is None else bias[..., : case.after[s]],
        **{name: arguments[name] for name in names if name in arguments},
        causal_offset="bottom-right",
        return_lse=True,
    )
    return out[0], lse[0]


def parts_of(case: Case, some, out, lse):
    """The results of each sequence."""
    if not case.packed:
        return list(zip(out, lse, strict=True))
    ends = np.cumsum([0, *(case.counts[s] for s in some)])
    return [(out[a:b], lse[:, a:b]) for a, b in itertools.pairwise(ends.tolist())]


@pytest.mark.repeats
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=OF_INTEGERS) if case.cache_dtype.itemsize == 1 else case
        for case in thinned(STEADY, 2)
    ],
    ids=range(len(thinned(STEADY, 2))),
)
def test_a_sequence_gets_the_bits_that_it_gets_alone(isa, set_threads, case):
    """Contiguous or in pages, of any size and anywhere, beside any others, by any number of threads."""
    everyone = range(len(case.lengths))
    wanted = [alone(case, s) for s in everyone]
    for order, variant in enumerate(VARIANTS):
        other = replace(case, **variant, order=order)
        set_threads(other.threads)
        for some in (everyone, ([order % len(everyone)], everyone[::-1], everyone[1::2])[order % 3]):
            results = attend(arguments_of(other, some), return_lse=True)
            for s, part in zip(some, parts_of(other, some, *results), strict=True):
                assert same_bits(part, wanted[s]), (s, list(some), other)


@pytest.mark.repeats
@pytest.mark.parametrize("case", [
    Case((F32, F32), (16, 4), (64, 64), 1, (5000, 3000, 100, 0), "as many"),
    Case((BF16, BF16), (16, 16), (64, 64), 130, (1000, 700, 1), "as many", window=(300, 0)),
    Case((F16, F16), (8, 8), (64, 64), (1, 200, 1, 64), (3000, 100, 2000, 700), "as many", sinks="[S]"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("page_size", [None, 16])
def test_any_number_of_threads_gives_the_same_bits(set_threads, case, page_size):
    case, seen = replace(case, page_size=page_size), set()
    for threads in (1, 2, 3):
        set_threads(threads)
        arguments = arguments_of(case)
        results = attend(arguments, return_lse=True)
        caches = (memory(arguments[name]) for name in ("k_cache", "v_cache"))
        seen.add(tuple(x.tobytes() for x in (*results, *caches)))
    assert len(seen) == 1


@pytest.mark.levels("all", "amx")
@pytest.mark.parametrize("page_size", [8, 16, 24, 32, 64])
@pytest.mark.parametrize("queries", [5, 13, 32, 64])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_any_number_of_tokens_in_pages_anywhere(isa, dtype, queries, page_size):
    """Bits are those of a contiguous cache, wherever a run of rows ends."""
    rng, most = np.random.default_rng(0), 72
    pages = -(-most // page_size)
    table = rng.permutation(most * pages).reshape(most, pages).astype(np.int32)
    caches = [rng.standard_normal((most * pages, page_size, 1, 64)).astype(dtype) for _ in "kv"]
    query = rng.standard_normal((most, queries, 1, 64)).astype(dtype)
    lengths = np.arange(1, most + 1)
    given = {"query": query, "cache_seqlens": lengths, "attention_mask": np.ones((1, 1, 1, 1), bool)}
    in_pages, in_rows = (
        attnmask.flash_attention_with_kvcache(k_cache=k, v_cache=v, block_table=t, causal=False, **given)
        for (k, v), t in ((caches, table), ([x[table].reshape(most, -1, 1, 64) for x in caches], None))
    )
    wrong = (in_pages != in_rows).any(axis=(1, 2, 3))
    assert not wrong.any(), f"of {lengths[wrong]} tokens"


def test_pages_that_sequences_share(isa):
    """A prefix lies in the cache once. One sequence may write to a page that another only reads."""
    rng = np.random.default_rng(0)
    pages = [rng.standard_normal((5, 16, 2, 8)).astype(F32) for _ in "kv"]
    query, key, value = (rng.standard_normal((2, 1, heads, 8)).astype(F32) for heads in (4, 2, 2))
    table = np.array([[3, 1, 4], [3, 1, 0]], np.int32)
    rows = [cache[table].reshape(2, 48, 2, 8) for cache in pages]
    new = {"query": query, "key": key, "value": value}
    for lengths in ([40, 35], [40, 31]):  # at last the second one overwrites a token of the first
        got = attend(new, k_cache=pages[0], v_cache=pages[1], block_table=table, cache_seqlens=lengths)
        if lengths[1] == 31:
            rows[0][0, 31], rows[1][0, 31] = key[1, 0], value[1, 0]
        wanted = attend(new, k_cache=rows[0], v_cache=rows[1], cache_seqlens=lengths)
        assert got.tobytes() == wanted.tobytes()


@pytest.mark.long
def test_a_bias_beside_more_packed_keys_than_are_divided(isa):
    """Beyond 2**24 keys, tiles may have keys of two sequences; each has numbers of its own bias."""
    length, page = 2**23 + 33, 256
    rng = np.random.default_rng(0)
    pages = rng.standard_normal((2, 1, page, 1, 4)).astype(F16)
    query, bias = rng.standard_normal((2, 1, 4)).astype(F16), np.full((1, 1, 2, length), -np.inf, F16)
    seen = np.r_[:20, length - 40 : length]  # by their bias
    bias[..., seen] = rng.standard_normal((2, 60))
    table = np.zeros((2, -(-length // page)), np.int32)
    out = attend(
        {"query": query, "k_cache": pages[0], "v_cache": pages[1], "block_table": table},
        cache_seqlens=length, cu_seqlens_q=[0, 1, 2], bias=bias,
    )  # fmt: skip
    tokens = [np.tile(x[:, seen % page], (2, 1, 1, 1)) for x in pages]
    wanted = attnmask.flash_attention(query[:, None], *tokens, bias=bias[0, 0][:, None, None, seen])
    np.testing.assert_allclose(out.astype(F32), wanted[:, 0].astype(F32), atol=2e-3)


# What has no influence

SEEN = (
    Case((F32, F32), (4, 2), (16, 24), 1, (0, 64, 65, 200), "as many", window=(20, 0)),
    Case((F32, F32), (4, 2), (16, 24), 17, (30, 64, 200), None, window=(5, None), causal=False),
    Case((F32, F32), (4, 2), (16, 24), (1, 64, 0, 3), (200, 64, 65, 130), "as many", window=(20, 0)),
    Case((F32, F32), (4, 2), (16, 24), (1, 64, 0, 3), (200, 64, 65, 130), mask="[B, H, Tq, K] bool", window=20),
    Case((F32, F32), (4, 2), (16, 24), 3, (200, 64, 65), "as many", mask="info of [B, H, Tq, K]", window=(20, 0)),
    Case((BF16, BF16), (8, 2), (64, 64), 1, (0, 64, 65, 200), "as many", window=(20, 0)),
    Case((BF16, BF16), (8, 2), (64, 64), (1, 64, 0, 3), (200, 64, 65, 130), "as many", window=(20, 0)),
    Case((F16, F16), (8, 8), (33, 7), 65, (0, 64, 65, 200), "as many", window=(20, 0)),
    Case((F64, F64), (4, 2), (16, 16), 2, (0, 64, 65, 200), "as many", window=(20, 0)),
    Case((F32, F16), (4, 2), (16, 16), 1, (0, 64, 65, 200), "as many", window=(20, 0)),
    Case((F32, F32), (4, 2), (16, 24), (1, 64, 0, 3), (200, 64, 65, 130), bias="[B, H, Tq, K]", window=20, seed=2),
    Case((F32, F32), (4, 2), (16, 24), 1, (0, 64, 65, 200, 299), "as many", chunk=50),
    Case((BF16, BF16), (8, 2), (64, 64), (1, 3, 0, 70), (200, 64, 65, 130), "as many", chunk=64),
    Case((F32, F32), (4, 2), (16, 24), (1, 3, 0, 70), (200, 64, 65, 130), mask="[B, H, Tq, K] bool", chunk=30),
)  # fmt: skip


def put(case: Case, arguments: dict, row: int, tokens, number: float) -> None:
    """Overwrites some tokens of a sequence, a range of them or a boolean for each."""
    tokens = np.flatnonzero(tokens) if isinstance(tokens, np.ndarray) else np.asarray(tokens, int)
    for name in ("k_cache", "v_cache"):
        pages, inside = twin.places(arguments[name], arguments["block_table"], row, 0, case.lengths[row])
        arguments[name][pages[tokens], inside[tokens]] = number


def unseen(case: Case) -> list[int]:
    """How many tokens of each sequence no query sees, since they are left of the window or in earlier chunks."""
    left = case.window[0] if isinstance(case.window, tuple) else case.window
    counts = []
    for offset, length in zip(case.offsets, case.lengths, strict=True):
        first = max(
            0 if left is None else offset - left, offset // case.chunk * case.chunk if case.chunk else 0
        )
        counts.append(min(max(first, 0), length))
    return counts


def in_pages(case: Case):
    """The case in a contiguous cache, and in pages of several sizes."""
    for page_size, layout in ((None, "contiguous"), (7, "heads first"), (16, "contiguous"), (64, "sliced")):
        yield replace(case, page_size=page_size, layout=layout)


@pytest.mark.parametrize("case", SEEN, ids=range(len(SEEN)))
def test_what_no_query_sees_has_no_influence(isa, case):
    """Free pages and those of others, what is behind the end of a sequence, and what is left of the window."""
    for paged in in_pages(case):
        wanted = attend(arguments_of(replace(paged, fill=0.0)), return_lse=True)
        for poison in POISON:
            number = poison_of(case.types[1], poison)
            arguments = arguments_of(replace(paged, fill=number))
            for row, count in enumerate(unseen(case)):
                put(paged, arguments, row, range(count), number)
            got = attend(arguments, return_lse=True)
            assert same_bits(got, wanted), (poison, paged)


def attend_with_garbage_left_of_the_window() -> None:
    """Pages of which no query sees a token are nowhere."""
    for isa, case in itertools.product(attnmask.show_config(mode="dict")["isa_available"], SEEN):
        _core.use_isa(isa)
        for paged in in_pages(case):
            if paged.page_size is None:
                continue
            arguments = arguments_of(paged)
            wanted = attend(arguments_of(paged), return_lse=True)
            for row, count in enumerate(unseen(case)):
                pages = arguments["block_table"][row, : count // paged.page_size]
                pages[...] = np.resize(GARBAGE, len(pages))
            got = attend(arguments, return_lse=True)
            assert same_bits(got, wanted), (isa, paged)


def test_pages_left_of_the_window_are_not_read():
    run_apart(attend_with_garbage_left_of_the_window)


@pytest.mark.parametrize("page_size", [None, 1, 16, 100])
@pytest.mark.parametrize("queries", [1, 17, (1, 70, 3, 0)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_other_sequences_have_no_influence(isa, dtype, queries, page_size):
    case = Case((dtype, dtype), lengths=(70, 130, 64, 5), queries=queries, page_size=page_size, new="as many")
    arguments = arguments_of(case)
    for row in (0, 2):
        put(case, arguments, row, range(case.lengths[row]), np.nan)
    got, wanted = (
        parts_of(case, range(4), *attend(those, return_lse=True)) for those in (arguments, arguments_of(case))
    )
    assert not same_bits(got[0], wanted[0])
    assert same_bits(got[1], wanted[1])
    assert same_bits(got[3], wanted[3])


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_tokens_that_a_mask_forbids_have_no_influence(isa, dtype, poison):
    case = Case((dtype, dtype), lengths=(70, 200), queries=3, mask="[B, 1, 1, K] int32", page_size=16)
    arguments, other = arguments_of(case), arguments_of(case)
    for row, length in enumerate(case.lengths):
        dead = arguments["attention_mask"][row, 0, 0, :length] == 0
        assert dead.any()
        put(case, other, row, dead, poison_of(dtype, poison))
    got, wanted = (attend(those, return_lse=True) for those in (other, arguments))
    assert same_bits(got, wanted)


@pytest.mark.repeats
@pytest.mark.parametrize("page_size", [None, 7, 64])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_live_nan_comes_through(isa, dtype, page_size):
    """To the queries that see it, and to no others."""
    sizes = {"queries": (9, 1, 70), "lengths": (200, 63, 100), "page_size": page_size, "window": (30, 0)}
    case = Case((dtype, dtype), **sizes)

    def arguments():
        those = arguments_of(case)
        put(case, those, 0, [195], np.nan)
        put(case, those, 2, [10, 64], np.nan)
        return those

    wanted = right(arguments, case)
    assert 0 < np.isnan(wanted.results.out).any(axis=(1, 2)).sum() < 80
    check(case, wanted, arguments())


# A table that changes while a call reads it

NOWHERE = 10**8  # a page


@contextlib.contextmanager
def rewritten(array: np.ndarray, states: list[np.ndarray]):
    """In the block, another thread writes each of the states to the array, in turn and again and again."""
    end = threading.Event()

    def write():
        while not end.is_set():
            for state in states:
                array[...] = state

    interval, thread = sys.getswitchinterval(), threading.Thread(target=write)
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
        sys.setswitchinterval(interval)


def attend_while_the_table_changes() -> None:
    """A call sees the old table, the new table or an error: also where it writes."""
    rng = np.random.default_rng(0)
    pages, length = 40, 300
    caches = [rng.standard_normal((pages, 16, 2, 64), np.float32) for _ in "kv"]
    query, key, value = (rng.standard_normal((2, 1, heads, 64), np.float32) for heads in (8, 2, 2))
    states = [rng.permutation(pages)[:38].reshape(2, 19).astype(np.int32) for _ in range(2)]
    bad = np.full_like(states[0], NOWHERE)

    def call(table, new: bool, window=None):
        mine = [cache.copy() for cache in caches]
        more = {"key": key, "value": value} if new else {}
        out = attend({"query": query, "k_cache": mine[0], "v_cache": mine[1], "block_table": table} | more,
                     cache_seqlens=length - new, sliding_window=window)  # fmt: skip
        return [x.tobytes() for x in (out, *mine)]

    for new, window, dtype, columns in (
        (False, None, np.int32, 19),
        (True, None, np.int32, 19),
        (True, (40, 0), np.int32, 38),  # strided
        (True, None, np.int64, 19),
    ):
        wanted, seen = [call(state, new, window) for state in states], 0
        table = np.zeros((2, columns), dtype)[:, :: columns // 19]
        table[...] = states[0]
        until = time.monotonic() + 5
        with rewritten(table, [*states, *states, bad]):
            while seen < 50 and time.monotonic() < until:
                with contextlib.suppress(IndexError):
                    assert call(table, new, window) in wanted
                    seen += 1
        assert seen


def attend_by_a_mask_that_changes_the_table() -> None:
    """Python code of the caller runs while arguments are read."""
    cache = np.random.default_rng(0).standard_normal((4, 8, 1, 16), np.float32)
    arguments = {"query": cache[:, 0], "k_cache": cache, "v_cache": cache, "cache_seqlens": [9, 10]}
    arguments["cu_seqlens_q"] = [0, 2, 4]
    states = [np.array(rows, np.int32) for rows in ([[0, 1], [2, 3]], [[3, 2], [0, 1]], [[NOWHERE] * 2] * 2)]
    wanted = [attend(arguments, block_table=state).tobytes() for state in states[:2]]
    for order in itertools.permutations(states):
        table, later = order[0].copy(), iter(order[1:])

        class Mask:
            def __array__(self, dtype=None, copy=None, table=table, later=later):
                table[...] = next(later)
                return np.ones((1, 1, 4, 16), bool)

        with contextlib.suppress(IndexError):
            assert attend(arguments, block_table=table, attention_mask=Mask()).tobytes() in wanted


def append_to_pages_that_are_nowhere() -> None:
    """There are more new tokens than queries, and these see the last ones alone."""
    table = np.array([[NOWHERE, NOWHERE + 1, 2, 0, 1]], np.int32)
    arguments = {name: np.zeros((4, 4, 1, 16), F32) for name in ("k_cache", "v_cache")}
    arguments |= {name: np.ones((1, 20, 1, 16), F32) for name in ("key", "value")}
    arguments |= {"query": np.ones((1, 1, 1, 16), F32), "cache_seqlens": 0, "block_table": table}
    for window in (None, (2, 0)):
        message = rf"block_table must be from 0 to 3, got {NOWHERE} at index \(0, 0\)"
        refused(arguments | {"sliding_window": window}, IndexError, message)


def test_pages_are_those_that_were_looked_at():
    run_apart(
        append_to_pages_that_are_nowhere,
        attend_by_a_mask_that_changes_the_table,
        attend_while_the_table_changes,
    )


# What is written

# 65520 is between the greatest float16 and infinity; the last ones are between two neighbours, or next to that.
NUMBERS = (
    0.0, -0.0, 1.0, -1.5, 65519.0, 65520.0, 1e30, 1e300, 1e-8, 6e-8, 2.0**-25, 1e-40, 1e-46, math.inf, -math.inf,
    math.nan, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-11 + 2.0**-40, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-24,
)  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("cache_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "strided", "swapped", "misaligned"])
def test_new_tokens_are_converted_as_numpy_does(isa, dtype, cache_dtype, layout):
    with np.errstate(all="ignore"):
        rows = np.resize(np.array(NUMBERS).astype(dtype), (2, 3, 2, 300))
        converted = rows.astype(cache_dtype)
    key, value = arrange(rows, layout), arrange(rows[..., :5], layout)
    for cache_layout in ("contiguous", "strided"):
        caches = [arrange(np.full((2, 9, 2, depth), 7, cache_dtype), cache_layout) for depth in (300, 5)]
        query = np.zeros((2, 1, 2, 300), F64 if cache_dtype == F64 else F32)
        arguments = {"query": query, "k_cache": caches[0], "v_cache": caches[1], "cache_seqlens": [1, 6]}
        attend(arguments, key=key, value=value)
        for cache, depth in zip(caches, (300, 5), strict=True):
            wanted = np.full((2, 9, 2, depth), 7, cache_dtype)
            wanted[0, 1:4], wanted[1, 6:9] = converted[..., :depth]
            np.testing.assert_array_equal(cache.astype(F64), wanted.astype(F64))
            assert (np.signbit(cache) == np.signbit(wanted))[cache == 0].all()


@pytest.mark.parametrize("page_size", [None, 1, 16, 100])
def test_many_new_tokens(set_threads, page_size):
    """More than one thread writes, and nothing but the new tokens."""
    set_threads(3)
    case = Case((F16, F16), (2, 2), (64, 40), (700, 0, 1500, 1), (100, 5, 0, 37), "as many", page_size)
    arguments, other = arguments_of(case), arguments_of(case)
    attend(arguments)
    for row, (length, end) in enumerate(zip(case.lengths, case.after, strict=True)):
        for i, name in enumerate(("k_cache", "v_cache")):
            where = twin.places(other[name], other["block_table"], row, length, end)
            other[name][where] = tokens_of(case, row).new[i]
    for name in ("k_cache", "v_cache"):
        assert memory(arguments[name]).tobytes() == memory(other[name]).tobytes(), name


def test_caches_in_a_file(tmp_path):
    """What is a view of memory elsewhere is written to there."""
    caches = [np.memmap(tmp_path / name, F32, "w+", shape=(2, 9, 2, 8)) for name in "kv"]
    rows = np.random.default_rng(0).standard_normal((2, 3, 2, 8)).astype(F32)
    attend({"query": rows, "k_cache": caches[0], "v_cache": caches[1]}, key=rows, value=rows, cache_seqlens=2)
    for name in "kv":
        np.testing.assert_array_equal(np.fromfile(tmp_path / name, F32).reshape(2, 9, 2, 8)[:, 2:5], rows)


def test_caches_that_are_read_alone():
    """They may be lists, read-only, of foreign byte order or misaligned, share memory, and be what queries lie in."""
    rng = np.random.default_rng(0)
    cache = rng.standard_normal((2, 9, 2, 8)).astype(F32)
    query = cache[:, 7:]
    wanted = attend({"query": query.copy(), "k_cache": cache, "v_cache": cache.copy()}).tobytes()
    before = cache.tobytes()
    cache.flags.writeable = False
    for layout in ("contiguous", "swapped", "misaligned"):
        other = arrange(cache, layout)
        other.flags.writeable = False
        assert attend({"query": query, "k_cache": other, "v_cache": cache}).tobytes() == wanted
        assert attend({"query": query, "k_cache": cache, "v_cache": other}).tobytes() == wanted
    assert attend({"query": query, "k_cache": cache, "v_cache": cache}).tobytes() == wanted
    assert cache.tobytes() == before
    lists = attend({name: cache.tolist() for name in ("k_cache", "v_cache")} | {"query": query.tolist()})
    np.testing.assert_allclose(lists.astype(F32), np.frombuffer(wanted, F32).reshape(lists.shape), rtol=1e-5)


# Axes without an entry

EMPTY = {
    "no sequence": {"batch": 0},
    "no query": {"queries": 0},
    "no token in a cache": {"tokens": 0, "length": 0},
    "no page": {"pages": 0, "length": 0},
    "no token in a page": {"tokens": 0, "length": 0, "pages": 3},
    "no page of a sequence": {"most": 0, "length": 0, "pages": 3},
    "no head": {"heads": 0},
    "no channel of keys": {"depths": (0, 5)},
    "no channel of values": {"depths": (8, 0)},
    "no packed sequence": {"batch": 0, "packed": True, "pages": 3},
    "packed sequences of no token": {"queries": 0, "packed": True},
}


@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", EMPTY)
def test_axes_without_an_entry(isa, name, masked, new):
    """No new tokens, or as many as are possible: one, where there are pages for it."""
    sizes = {"batch": 2, "queries": 2, "tokens": 4, "length": 3, "heads": 2, "depths": (8, 5)} | EMPTY[name]
    batch, queries, heads, packed = sizes["batch"], sizes["queries"], sizes["heads"], "packed" in sizes
    paged, depths, length = "pages" in sizes, sizes["depths"], sizes["length"]
    room = sizes["tokens"] * sizes.get("pages", 1) * sizes.get("most", 1)
    count = queries if packed else min(1, room - length)

    def zeros(*shape):
        return np.zeros(shape, F32)

    def tokens(count, depth):
        return zeros(batch * count, heads, depth) if packed else zeros(batch, count, heads, depth)

    caches = [zeros(sizes.get("pages", batch), sizes["tokens"], heads, depth) for depth in depths]
    arguments = {"query": tokens(queries, depths[0]), "k_cache": caches[0], "v_cache": caches[1]}
    arguments["cache_seqlens"] = [length] * batch
    if paged:
        table = np.arange(batch * sizes.get("most", 1)) % max(sizes["pages"], 1)
        arguments["block_table"] = table.reshape(batch, sizes.get("most", 1))
    if packed:
        arguments["cu_seqlens_q"] = np.arange(batch + 1) * queries
    if new:
        arguments |= {"key": tokens(count, depths[0]), "value": tokens(count, depths[1])}
    if masked:
        rows = batch * queries if packed else queries
        arguments["attention_mask"] = np.ones((1, 1, rows, length + 5), bool)
    out, lse = attend(arguments, return_lse=True)
    assert out.shape == (*arguments["query"].shape[:-1], depths[1])
    assert not out.any()
    assert lse.shape == ((heads, batch * queries) if packed else (batch, heads, queries))
    seen = length + (count if new else 0)
    if not seen:
        assert np.isneginf(lse).all()
    elif not packed and lse.size:
        np.testing.assert_allclose(lse, np.broadcast_to(np.log([seen - 1, seen]), lse.shape), rtol=1e-6)


# Errors


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("kind", [*KINDS, "int8", "int4"])
def test_the_good_arguments_are_good(kind, new):
    arguments = good(kind, new)
    out = arguments["out"]
    assert attend(arguments) is out
    assert not (out == 77).any()
    assert (arguments["k_cache"] != good(kind)["k_cache"]).any() == new


@pytest.mark.parametrize(
    ("kind", "wrong", "error", "message"),
    BAD,
    ids=[f"{i}, {' and '.join(case[1])}" for i, case in enumerate(BAD)],
)
def test_bad_input(kind, wrong, error, message):
    refused(good(kind) | wrong, error, message)


@pytest.mark.parametrize(("kind", "wrong", "error", "message"), BAD_TO_READ)
def test_bad_input_without_new_tokens(kind, wrong, error, message):
    refused(good(kind, new=False) | wrong, error, message)


class Once:
    """A mask that is told once."""

    def __init__(self, mask):
        self.mask, self.asked = mask, 0

    def __array__(self, dtype=None, copy=None):
        self.asked += 1
        if self.asked > 1:
            raise ZeroDivisionError("not again")
        return self.mask


@pytest.mark.parametrize("shape", [(1, 4, 6, 12), (6, 14), (1, 12), (4, 6, 1)], ids=str)
@pytest.mark.parametrize("dtype", [bool, np.float32, np.longdouble])
@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_is_read_once(kind, dtype, shape):
    """Before anything is written."""
    shape = (*shape[:-2], 3 if shape[-2] == 6 and "packed" not in kind else shape[-2], shape[-1])
    mask = (np.random.default_rng(0).random(shape) < 0.5).astype(dtype)
    wanted = attend(good(kind), attention_mask=mask).tobytes()
    assert attend(good(kind), attention_mask=Once(mask)).tobytes() == wanted


def test_too_many_queries():
    for depth, count, error, message in (
        (0, 2**57, ValueError, "query must be of at most"),
        (8, 2**53, MemoryError, "allocate|memory"),
    ):
        endless = as_strided(np.zeros(1, F32), (2, count, 4, depth), (0, 0, 0, 0))
        caches = {"k_cache": np.zeros((2, 12, 2, depth), F32), "v_cache": np.zeros((2, 12, 2, 5), F32)}
        with pytest.raises(error, match=message):
            attend({"query": endless} | caches)


# Memory that two arguments share


@pytest.mark.parametrize("kind", KINDS)
def test_out_that_overlaps_the_array_of_a_mask(kind):
    arguments, shape = good(kind), (1, 1, 6, 12) if "packed" in kind else (1, 1, TQ, 11)  # keys as there are
    out, count = arguments["out"], math.prod(shape)
    memory = np.ones(count - 1 + out.size, F32)
    arguments["out"] = memory[count - 1 :].reshape(out.shape)
    arguments["attention_mask"] = MaskInfo(memory[:count].reshape(shape))
    refused(arguments, ValueError, "out must share no memory with attention_mask")


ROW = 4 * HKV * D  # bytes
STRIDES = {
    "one row for all sequences": (0, ROW, 4 * D, 4),
    "one token in a row": (12 * ROW, 0, 4 * D, 4),
    "one head": (12 * ROW, ROW, 0, 4),
    "one channel": (12 * ROW, ROW, 4 * D, 0),
    "rows that overlap": (11 * ROW, ROW, 4 * D, 4),
    "rows that overlap, backwards": (11 * ROW, -ROW, 4 * D, 4),
    "tokens that overlap": (12 * ROW, ROW - 4, 4 * D, 4),
    "heads that overlap": (12 * ROW, ROW, 4, 4),
}


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
@pytest.mark.parametrize("strides", STRIDES.values(), ids=STRIDES)
def test_caches_whose_rows_are_the_same_memory(strides, name):
    """They take no new tokens, and may be read."""
    arguments = good("rows") | {"value": np.zeros((B, TQ, HKV, D), F32), "out": None}
    arguments["v_cache"] = np.zeros_like(arguments["k_cache"])
    start = 12 * ROW // 4
    arguments[name] = as_strided(np.full(4 * start, 7, F32)[start:], (B, 12, HKV, D), strides)
    refused(
        arguments, ValueError, f"{name} must not overlap itself, got strides that lead to one element twice"
    )
    attend(arguments, key=None, value=None)


def test_caches_that_are_lists():
    """There is nothing to write to."""
    arguments = {name: x.astype(F64) for name, x in good("rows").items() if x.dtype == F32} | {"out": None}
    lists = {name: arguments[name].tolist() for name in ("k_cache", "v_cache")}
    refused(arguments | lists | {"cache_seqlens": 4}, ValueError, "k_cache must be an aligned array")


def test_caches_that_are_the_same():
    """They hold the keys as values, too: a latent cache, which takes keys alone."""
    arguments = good("paged")
    arguments |= {"v_cache": arguments["k_cache"], "value": arguments["key"], "out": None}
    refused(arguments, ValueError, "value must be None with a latent cache, as key contains the values")
