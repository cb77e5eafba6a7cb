"""Masks to segment ids, ranges of tokens, and back; debug mode."""

import itertools
import logging
import math
import re
import time

import ml_dtypes
import numpy as np
import pytest
import reference_masks as ref
from environment import SANITIZED, python
from hypothesis import given
from hypothesis import strategies as st
from layouts import LAYOUTS, arrange, assert_same, outcome
from numpy.lib.stride_tricks import as_strided

import attnmask
from attnmask._common.debug import traced

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", ml_dtypes.bfloat16, "float32", "float64")
MASK_DTYPES = ("bool", *INTEGERS, *FLOATS)
READ_DTYPES = (*MASK_DTYPES, np.longdouble)  # dtypes of arguments
CONSTANT = [f"constant along {axis}" for axis in (-2, -1, 0)]
PLANE_LAYOUTS = [*LAYOUTS, *CONSTANT, "transposed", "backwards"]
LENGTHS = [0, 1, 2, 5, 63, 64, 65, 130]


def filled(live: np.ndarray, dtype, rng: np.random.Generator) -> np.ndarray:
    """Numbers of any size where `live` is true, and zeros of either sign elsewhere; zeros alone are not floats."""
    if dtype == "bool" or not (dtype in INTEGERS or live.any()):
        return live
    if dtype in INTEGERS:
        return (live * rng.integers(1, 128, live.shape)).astype(dtype)
    tiny = float(ml_dtypes.finfo(dtype).smallest_subnormal) or 5e-324
    numbers = rng.choice([1.0, 2.5, 3e4, tiny], live.shape)
    return np.where(live, numbers, rng.choice([0.0, -0.0], live.shape)).astype(dtype)


def laid_out(values: np.ndarray, layout: str) -> np.ndarray:
    """As `arrange`; floating-point zeros alone, of a constant layout, would be no mask."""
    made = arrange(values, layout)
    zeros = layout.startswith("constant") and made.dtype.kind not in "biu" and not made.any()
    return made != 0 if zeros else made


def some_live(shape: tuple[int, ...], kind: str, rng: np.random.Generator) -> np.ndarray:
    """Masks with many equal rows and columns, with few, and with rows that differ in a single pair."""
    queries, keys = shape[-2:]
    planes = np.zeros((math.prod(shape[:-2]), queries, keys), bool)
    for plane in planes:
        if not plane.size:
            continue
        if kind == "random":
            plane[:] = rng.random(plane.shape) < rng.choice([0.02, 0.5, 0.98])
        elif kind == "segments":
            q_ids, kv_ids = (np.sort(rng.integers(-1, 5, length)) for length in (queries, keys))
            plane[:] = ref.pairwise(q_ids, kv_ids)
        elif kind == "shuffled":
            plane[:] = ref.pairwise(rng.integers(-1, 4, queries), rng.integers(-1, 4, keys))
        elif kind == "few rows":
            few = rng.random((4, 4)) < 0.5
            plane[:] = few[rng.integers(0, 4, queries)][:, rng.integers(0, 4, keys)]
        elif kind == "near":
            plane[:] = rng.random(keys) < 0.5
            flipped = rng.integers(0, queries, queries // 2)
            plane[flipped, rng.integers(0, keys, len(flipped))] ^= True
        elif kind == "causal":
            plane[:] = np.tri(queries, keys, dtype=bool)
        elif kind == "stairs":  # all rows leave their class repeatedly
            for step in range(0, min(plane.shape), 3):
                plane[step:, step : step + 3] = rng.random(len(plane[0, step : step + 3])) < 0.5
                plane[step, step] ^= True
        elif kind == "full":
            plane[:] = True
    return planes.reshape(shape)


KINDS = ("random", "segments", "shuffled", "few rows", "near", "causal", "stairs", "full", "empty")


@st.composite
def masks(draw, ranks=(2, 3, 4)):
    rank, seed = draw(st.sampled_from(ranks)), draw(st.integers(0, 2**32))
    shape = tuple(draw(st.integers(0, 3)) for _ in range(rank - 2))
    shape += tuple(draw(st.one_of(st.sampled_from(LENGTHS), st.integers(0, 20))) for _ in range(2))
    rng = np.random.default_rng(seed)
    live = some_live(shape, draw(st.sampled_from(KINDS)), rng)
    values = filled(live, draw(st.sampled_from(READ_DTYPES)), rng)
    return laid_out(values, draw(st.sampled_from(PLANE_LAYOUTS)))


def described(mask) -> tuple:
    return mask.dtype, mask.shape, mask.strides, (np.asarray(mask) != 0).astype(int).tolist()


def assert_both(got, expected, case) -> None:
    assert isinstance(got, tuple), case
    assert len(got) == len(expected), case
    for one, other in zip(got, expected, strict=True):
        assert_same(one, other, case)
    assert not np.shares_memory(got[0], got[1]), case


def assert_outcomes(got, expected, case) -> None:
    """They are arrays, or both an OverflowError."""
    assert (got is OverflowError) == (expected is OverflowError), case
    if expected is not OverflowError:
        compare = assert_both if isinstance(expected, tuple) else assert_same
        compare(got, expected, case)


# mask_to_segment_ids


@given(mask=masks(), per_head=st.booleans())
def test_mask_to_segment_ids(isa, mask, per_head):
    case = (isa, per_head, *described(mask))
    before = mask.tobytes()
    if mask.ndim == 4 and not mask.shape[1] and not per_head:
        with pytest.raises(ValueError, match=r"\bmask\b"):
            attnmask.mask_to_segment_ids(mask)
        return
    expected = ref.mask_to_segment_ids(mask, per_head)
    assert_both(attnmask.mask_to_segment_ids(mask, per_head), expected, case)
    assert mask.tobytes() == before, case

    place = ref.first_ungrouped(mask, per_head)
    if place is None:
        assert_both(attnmask.mask_to_segment_ids(mask, per_head, strict=True), expected, case)
    else:
        with pytest.raises(ValueError, match=r"\bmask\b.*strict") as raised:
            attnmask.mask_to_segment_ids(mask, per_head, strict=True)
        told = eval(re.search(r"at index (\(.*\))", str(raised.value))[1])
        row = told[:-2] if per_head or mask.ndim < 4 else told[0]
        q, kv = (ids[row] for ids in expected)
        live = bool(mask[told] != 0)
        assert live != (q[told[-2]] == kv[told[-1]] >= 0), (told, case)
        assert f"got {int(live)} at" in str(raised.value)
        if mask.flags.c_contiguous:
            assert told == place, case


@pytest.mark.parametrize("kind", [*KINDS, "near the end", "one bit each", "repeated"])
def test_large_masks(isa, set_threads, kind):
    """Enough rows and columns for every part, tile and panel, on one and on several threads."""
    rng = np.random.default_rng(len(kind))
    for queries, keys in [(1300, 700), (90, 4500), (4500, 70)]:
        mask = some_live((queries, keys), kind, rng)
        if kind == "near the end":  # rows differ only at the end
            mask[:] = rng.random(keys) < 0.5
            mask[rng.integers(0, queries, 50), -1] ^= True
        elif kind == "one bit each":
            mask[np.arange(queries), np.arange(queries) % keys] ^= True
        elif kind == "repeated":
            mask[:] = (rng.random((50, keys)) < 0.5)[np.arange(queries) % 50]
        expected = ref.mask_to_segment_ids(mask)
        twins = mask, np.asfortranarray(mask), mask.astype(np.float32 if mask.any() else np.int32)
        for threads, values in [(1, mask), *((3, twin) for twin in twins)]:
            set_threads(threads)
            assert_both(attnmask.mask_to_segment_ids(values), expected, (isa, kind, queries, keys, threads))


def test_long_and_narrow_masks(isa):
    ids = np.random.default_rng(0).integers(-1, 3, 300_000)
    mask = np.stack([ids == 0, ids == 1, ids == 2, ids == 1], axis=1)
    seen = ids[np.sort(np.unique(ids, return_index=True)[1])]
    expected = np.full(5, -1, np.int32)
    expected[seen[seen >= 0]] = np.arange(3)
    for got in (
        attnmask.mask_to_segment_ids(mask),
        attnmask.mask_to_segment_ids(np.ascontiguousarray(mask.T))[::-1],
    ):
        np.testing.assert_array_equal(got[0], expected[ids])
        assert got[1].tolist() == [0, 1, 2, 1]


def test_many_rows_that_differ_in_a_bit(isa):
    """Rows are binary numbers, each twice, and columns repeat: hashes of few bits would collide."""
    numbers = np.arange(60_000) // 2
    mask = (numbers[:, None] >> np.arange(64) % 16 & 1).astype(bool)
    q_ids, kv_ids = attnmask.mask_to_segment_ids(mask)
    np.testing.assert_array_equal(q_ids, np.maximum(numbers - 1, -1))
    np.testing.assert_array_equal(kv_ids, np.where(np.arange(64) % 16 < 15, np.arange(64) % 16, -1))


def test_words_chosen_to_collide(isa):
    """Rows whose words have equal sums, products and exclusive ors, so that weak hashes collide."""
    rng = np.random.default_rng(3)
    words = rng.integers(0, 2**63, (40, 4), dtype=np.uint64)
    words = np.concatenate([words[:, order] for order in itertools.permutations(range(4))])
    words = np.concatenate(
        [words, words + np.uint64(1 << 63), words[:, ::-1], np.zeros_like(words), words[:7]]
    )
    mask = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little").astype(bool)
    assert_both(attnmask.mask_to_segment_ids(mask), ref.mask_to_segment_ids(mask), isa)
    assert_both(attnmask.mask_to_segment_ids(mask.T), ref.mask_to_segment_ids(mask.T), isa)


def test_masks_that_repeat_themselves(isa):
    """Along a stride of zero only one element is read, however long the axis is."""
    plane = np.tri(6, 5, dtype=bool)
    q_ids, kv_ids = attnmask.mask_to_segment_ids(np.broadcast_to(plane, (30_000, 4, 6, 5)), per_head=True)
    expected = ref.mask_to_segment_ids(plane)
    assert q_ids.shape == (30_000, 4, 6)
    assert (q_ids == expected[0]).all()
    assert (kv_ids == expected[1]).all()
    q_ids, kv_ids = attnmask.mask_to_segment_ids(
        np.broadcast_to([[True, False]], (10_000_000, 2)), strict=True
    )
    assert (q_ids == 0).all()
    assert kv_ids.tolist() == [0, -1]
    windows = as_strided(np.arange(5000) < 2500, (2500, 2500), (1, 1))  # both axes are contiguous
    assert_both(attnmask.mask_to_segment_ids(windows), ref.mask_to_segment_ids(windows), isa)


def test_bools_are_true_or_false_whatever_their_byte(isa):
    mask = np.tile(np.array([0, 1, 2, 128, 255], np.uint8), (3, 30)).view(bool)
    ids = [-1, 0, 0, 0, 0] * 30
    q_ids, kv_ids = attnmask.mask_to_segment_ids(mask)
    assert (q_ids.tolist(), kv_ids.tolist()) == ([0, 0, 0], ids)
    assert attnmask.attention_mask_to_padding_segment_ids(mask)[1].tolist() == [ids]
    assert attnmask.qkv_masks_to_cu_seqlens(mask)[0].tolist() == [1, 150] * 3
    assert attnmask.prepare_lens_from_mask(mask).tolist() == [120] * 3


# segment_ids_to_mask, segment_ids_to_qkv_masks

IDS_LAYOUTS = [*LAYOUTS, "constant along 0", "constant along -1"]


@st.composite
def ids_arrays(draw, shape: tuple[int, ...], highest: int = 3):
    dtype = draw(st.sampled_from(INTEGERS))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    low = 0 if dtype.startswith("u") else draw(st.sampled_from([-1, -3, -100]))
    ids = np.maximum(rng.integers(-2, highest + 1, shape), low)
    if draw(st.booleans()):
        ids = np.sort(ids)
    return laid_out(ids.astype(dtype), draw(st.sampled_from(IDS_LAYOUTS)))


@given(data=st.data())
def test_segment_ids_to_mask(isa, data):
    batch, heads = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    queries, keys = (data.draw(st.one_of(st.sampled_from(LENGTHS), st.integers(0, 9))) for _ in range(2))
    shapes = [
        (batch, length) if data.draw(st.booleans()) else (batch, heads, length) for length in (queries, keys)
    ]
    q_ids, kv_ids = (data.draw(ids_arrays(shape)) for shape in shapes)
    dtype = data.draw(st.sampled_from(MASK_DTYPES))
    case = (isa, dtype, q_ids.tolist(), q_ids.strides, kv_ids.tolist(), kv_ids.strides)
    expected = ref.segment_ids_to_mask(q_ids, kv_ids, dtype)
    tokens = (ref.token_mask(q_ids, dtype), ref.token_mask(kv_ids, dtype))
    assert_same(attnmask.segment_ids_to_mask((q_ids, kv_ids), dtype), expected, case)
    got = attnmask.segment_ids_to_mask((q_ids, kv_ids), dtype, return_separate_masks=True)
    assert_both(got, (*tokens, expected), case)
    assert_both(attnmask.segment_ids_to_qkv_masks(q_ids, kv_ids, dtype), (*tokens, expected), case)
    out = laid_out(np.full(expected.shape, 7).astype(dtype), data.draw(st.sampled_from(OUT_LAYOUTS)))
    assert attnmask.segment_ids_to_mask((q_ids, kv_ids), dtype, out=out) is out, case
    np.testing.assert_array_equal(out, expected, err_msg=repr(case))

    alone = ref.segment_ids_to_mask(q_ids, q_ids, dtype)
    assert_same(attnmask.segment_ids_to_mask(q_ids, dtype), alone, case)
    got = attnmask.segment_ids_to_qkv_masks(q_ids, dtype=dtype)
    assert_both(got, (tokens[0], tokens[0], alone), case)


OUT_LAYOUTS = ("contiguous", "fortran", "reversed", "strided", "transposed")


def test_ids_of_any_size():
    ids = np.array([[-(2**63), 2**31 - 1, -1, 2**31 - 1, -(2**40)]])
    expected = [[False] * 5, [False, True, False, True, False]] + [[False] * 5] * 3
    expected[3] = expected[1]
    assert attnmask.segment_ids_to_mask(ids)[0, 0].tolist() == expected
    for large in (2**31, 2**63 - 1, np.uint64(2**63), np.uint64(2**64 - 1)):
        bad = np.array([[0, 1], [int(large), 0]], np.uint64)
        where = rf"segment_ids.*{int(large)} at index \(1, 0\)"
        with pytest.raises(ValueError, match=where):
            attnmask.segment_ids_to_mask(bad)
        with pytest.raises(ValueError, match=where.replace("segment_ids", r"segment_ids\[1\]")):
            attnmask.segment_ids_to_mask((bad // 2**33, bad))
        with pytest.raises(ValueError, match=where.replace("segment_ids", "kv_segment_ids")):
            attnmask.segment_ids_to_qkv_masks(np.zeros((2, 3), int), bad)
        with pytest.raises(ValueError, match=where):
            attnmask.positions_from_segment_ids(bad)


# Padding


@given(mask=masks())
def test_attention_mask_to_padding_segment_ids(isa, mask):
    case = (isa, *described(mask))
    expected = ref.attention_mask_to_padding_segment_ids(mask)
    assert_both(attnmask.attention_mask_to_padding_segment_ids(mask), expected, case)


@pytest.mark.parametrize("dtype", ["bool", "float16", "float32", "int64"])
def test_padding_and_extents_of_large_masks(isa, set_threads, dtype):
    rng = np.random.default_rng(1)
    for shape in [(2, 3, 300, 500), (1, 20_000, 40), (20_000, 2, 3, 4), (1, 1, 3, 200_000)]:
        live = np.zeros(shape, bool)
        for _ in range(4):
            low, high = np.sort([rng.integers(0, np.array(shape) + 1) for _ in range(2)], axis=0)
            live[tuple(map(slice, low, high))] = rng.random() < 0.5 or rng.random(high - low) < 0.01
        mask = filled(live, dtype, rng)
        padding = ref.attention_mask_to_padding_segment_ids(mask)
        extents = ref.attention_mask_to_qkv_cu_seqlens(mask) if shape[0] < 9 else None
        for threads, layout in itertools.product((1, 3), ("contiguous", "transposed", "backwards")):
            set_threads(threads)
            values, case = laid_out(mask, layout), (isa, dtype, shape, threads, layout)
            assert_both(attnmask.attention_mask_to_padding_segment_ids(values), padding, case)
            if extents:
                assert_both(attnmask.attention_mask_to_qkv_cu_seqlens(values), extents, case)


# Ranges of tokens

REDUCTIONS = ("any", "all", "first")


@given(
    mask=masks(),
    reduce_heads=st.sampled_from(REDUCTIONS),
    out_dtype=st.sampled_from(["int32", "int64", "uint16", "int8"]),
)
def test_attention_mask_to_qkv_cu_seqlens(isa, mask, reduce_heads, out_dtype):
    case = (isa, reduce_heads, out_dtype, *described(mask))
    if mask.ndim == 4 and not mask.shape[1] and reduce_heads == "first":
        with pytest.raises(ValueError, match="attention_mask"):
            attnmask.attention_mask_to_qkv_cu_seqlens(mask, reduce_heads="first")
        return
    options = {"reduce_heads": reduce_heads, "out_dtype": out_dtype}
    expected = outcome(ref.attention_mask_to_qkv_cu_seqlens, mask, **options)
    assert_outcomes(outcome(attnmask.attention_mask_to_qkv_cu_seqlens, mask, **options), expected, case)


@given(data=st.data(), kind=st.sampled_from(KINDS), out_dtype=st.sampled_from(["int32", "int64", "uint8"]))
def test_qkv_masks_to_cu_seqlens(isa, data, kind, out_dtype):
    batch, seed = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 2**32))
    rng = np.random.default_rng(seed)
    layouts = st.sampled_from([*LAYOUTS, "constant along -1", "constant along 0", "transposed"])

    def drawn():
        live = some_live((batch, data.draw(st.sampled_from([*LENGTHS, 1100]))), kind, rng)
        return laid_out(filled(live, data.draw(st.sampled_from(READ_DTYPES)), rng), data.draw(layouts))

    q_mask, kv_mask = drawn(), drawn()
    case = (isa, kind, out_dtype, described(q_mask), described(kv_mask))
    expected = outcome(lambda: (ref.ranges_of(q_mask, out_dtype), ref.ranges_of(kv_mask, out_dtype)))
    got = outcome(attnmask.qkv_masks_to_cu_seqlens, q_mask, kv_mask, out_dtype=out_dtype)
    assert_outcomes(got, expected, case)
    alone = ref.ranges_of(q_mask, np.int64)
    assert_both(attnmask.qkv_masks_to_cu_seqlens(q_mask, out_dtype=np.int64), (alone, alone), case)


@st.composite
def pair_arrays(draw, batch: int, length: int):
    """Ranges within a row and beyond it, empty and reversed, in any integer dtype and layout."""
    dtype = draw(st.sampled_from(INTEGERS))
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    end = st.one_of(
        st.integers(0, length + 1),
        st.sampled_from([0, length]),
        st.sampled_from([low, high]),
        st.integers(low, high),
    ).map(lambda value: min(max(value, low), high))
    ends = draw(st.lists(end, min_size=2 * batch, max_size=2 * batch))
    return arrange(np.array(ends, dtype), draw(st.sampled_from(LAYOUTS)))


@given(data=st.data(), dtype=st.sampled_from(MASK_DTYPES), layout=st.sampled_from(OUT_LAYOUTS))
def test_cu_seqlens_to_masks(isa, data, dtype, layout):
    batch = data.draw(st.integers(0, 4))
    queries, keys = (data.draw(st.sampled_from([0, 1, 2, 5, 31, 64, 130])) for _ in range(2))
    q_pairs, kv_pairs = data.draw(pair_arrays(batch, queries)), data.draw(pair_arrays(batch, keys))
    case = isa, dtype, layout, queries, keys, repr(q_pairs), repr(kv_pairs)
    q_mask = ref.cu_seqlens_to_mask(q_pairs, queries, dtype)
    kv_mask = ref.cu_seqlens_to_mask(kv_pairs, keys, dtype)
    assert_same(attnmask.cu_seqlens_to_mask(q_pairs, queries, dtype), q_mask, case)
    out = laid_out(np.full(q_mask.shape, 7).astype(dtype), layout)
    assert attnmask.cu_seqlens_to_mask(q_pairs, queries, dtype, out) is out, case
    np.testing.assert_array_equal(out, q_mask, err_msg=repr(case))

    both = {"max_q_len": queries, "cu_seqlens_kv": kv_pairs, "max_kv_len": keys, "dtype": dtype}
    assert_both(attnmask.qkv_cu_seqlens_to_qkv_masks(q_pairs, **both), (q_mask, kv_mask), case)
    expected = ref.qkv_cu_seqlens_to_attention_mask(q_pairs, queries, kv_pairs, keys, dtype)
    assert_same(attnmask.qkv_cu_seqlens_to_attention_mask(q_pairs, **both), expected, case)
    out = laid_out(np.full(expected.shape, 7).astype(dtype), layout)
    assert attnmask.qkv_cu_seqlens_to_attention_mask(q_pairs, **both, out=out) is out, case
    np.testing.assert_array_equal(out, expected, err_msg=repr(case))

    expected = ref.qkv_cu_seqlens_to_attention_mask(q_pairs, queries, q_pairs, queries)
    assert_same(attnmask.qkv_cu_seqlens_to_attention_mask(q_pairs, max_q_len=queries), expected, case)
    expected = (ref.cu_seqlens_to_mask(q_pairs, queries), ref.cu_seqlens_to_mask(q_pairs, keys))
    got = attnmask.qkv_cu_seqlens_to_qkv_masks(q_pairs, max_q_len=queries, max_kv_len=keys)
    assert_both(got, expected, case)


def test_large_masks_from_ranges(isa, set_threads):
    pairs = [3, 880, 0, 900, 7, 7, -5, 10]
    expected = ref.qkv_cu_seqlens_to_attention_mask(pairs, 900, pairs, 900)
    for threads, dtype in itertools.product((1, 3), (bool, np.float32)):
        set_threads(threads)
        got = attnmask.qkv_cu_seqlens_to_attention_mask(pairs, max_q_len=900, dtype=dtype)
        assert_same(got, expected.astype(dtype), (isa, threads, dtype))
    wide = attnmask.cu_seqlens_to_mask([5, 1_999_995, 1_000_000, 1_000_001], 2_000_000, np.int16)
    assert wide.sum(axis=1).tolist() == [1_999_990, 1]
    assert wide[0, 5] == wide[0, 1_999_994] == wide[1, 1_000_000] == 1


@given(data=st.data())
def test_pairs_and_cu_seqlens(data):
    pairs = data.draw(pair_arrays(data.draw(st.integers(0, 5)), 100))
    case = (pairs.dtype, pairs.tolist())
    expected, got = outcome(ref.pairs_to_cu_seqlens, pairs), outcome(attnmask.pairs_to_cu_seqlens, pairs)
    assert_outcomes(got, expected, case)
    if expected is OverflowError:
        return
    cu_seqlens = arrange(expected, data.draw(st.sampled_from(LAYOUTS)))
    back = attnmask.cu_seqlens_to_pairs(cu_seqlens)
    assert_same(back, ref.cu_seqlens_to_pairs(cu_seqlens), case)
    assert_same(attnmask.pairs_to_cu_seqlens(back), expected, case)


def test_no_pairs():
    assert attnmask.pairs_to_cu_seqlens([]).tolist() == [0]
    assert attnmask.pairs_to_cu_seqlens([]).dtype == np.int64
    assert attnmask.cu_seqlens_to_mask([], 3).shape == (0, 3)
    with pytest.raises(OverflowError, match="pairs"):  # of many, their sum
        attnmask.pairs_to_cu_seqlens([0, 2**63 - 1, 0, 1])


# Properties of segment ids


@given(data=st.data(), out_dtype=st.sampled_from(["int32", "int64", "uint8", "int8"]))
def test_segment_ids_to_cu_seqlens(isa, data, out_dtype):
    rank = data.draw(st.integers(1, 3))
    outer = [data.draw(st.integers(0, 3)) for _ in range(rank - 1)]
    shape = (*outer, data.draw(st.sampled_from([*LENGTHS, 600])))
    ids = data.draw(ids_arrays(shape, data.draw(st.sampled_from([3, 100]))))
    case = (isa, out_dtype, ids.dtype, ids.strides, ids.tolist())
    for limit in (None, 128, 101):
        expected = outcome(ref.segment_ids_to_cu_seqlens, ids, out_dtype, limit)
        assert_outcomes(outcome(attnmask.segment_ids_to_cu_seqlens, ids, out_dtype, limit), expected, case)
    highest = max(ids.ravel().tolist(), default=-1)
    if highest >= 0:
        index = np.argwhere(ids == highest)[0].tolist()
        where = str(index[0]) if rank == 1 else str(tuple(index))
        words = f"max_segments = {highest}, got {highest} at index {where}"
        with pytest.raises(ValueError, match=re.escape(words)):
            attnmask.segment_ids_to_cu_seqlens(ids, out_dtype, highest)


def test_segment_ids_to_cu_seqlens_grows():
    assert_same(attnmask.segment_ids_to_cu_seqlens([-1, -1]), np.zeros(129, np.int32), "default")
    ids = np.array([[5, 5, 100_000, -7, 3]])
    got = attnmask.segment_ids_to_cu_seqlens(ids, np.int64, None)
    assert got.shape == (100_002,)
    assert got[[0, 3, 4, 5, 6, 100_000, 100_001]].tolist() == [0, 0, 1, 1, 3, 3, 4]
    assert attnmask.segment_ids_to_cu_seqlens([[-1]], max_segments=0).tolist() == [0]
    with pytest.raises(ValueError, match=r"segment_ids.*got 128 at index \(0, 1\)"):
        attnmask.segment_ids_to_cu_seqlens([[127, 128]])
    with pytest.raises(ValueError, match=r"got 18446744073709551615 at index 1"):
        attnmask.segment_ids_to_cu_seqlens(np.array([0, 2**64 - 1], np.uint64), max_segments=None)


@given(data=st.data(), pad_value=st.sampled_from([-1, 0, 7, 2**31 - 1, -(2**31), np.int64(3)]))
def test_positions_from_segment_ids(isa, data, pad_value):
    outer = data.draw(st.sampled_from([(0,), (1,), (3,), (2, 2), (2, 0), (1, 3)]))
    ids = data.draw(ids_arrays((*outer, data.draw(st.sampled_from([*LENGTHS, 600])))))
    case = (isa, pad_value, ids.dtype, ids.strides, ids.tolist())
    expected = ref.positions_from_segment_ids(ids, pad_value)
    assert_same(attnmask.positions_from_segment_ids(ids, pad_value=pad_value), expected, case)


def test_large_ids_arrays(isa, set_threads):
    ids = np.repeat(np.arange(-1, 299), 700).reshape(3, 70_000)
    counts = attnmask.segment_ids_to_cu_seqlens(ids, max_segments=None)
    assert counts.tolist() == [700 * i for i in range(300)]
    for threads in (1, 3):
        set_threads(threads)
        positions = attnmask.positions_from_segment_ids(ids)
        expected = np.tile(np.arange(700), 300).reshape(3, 70_000)
        expected[0, :700] = -1
        np.testing.assert_array_equal(positions, expected)
        q_mask, _, _ = attnmask.segment_ids_to_qkv_masks(ids, ids[:, :1], np.float64)
        np.testing.assert_array_equal(q_mask, ids >= 0)


# Wrong arguments: what they must be beside each other; test_every_function.py has the rest

IDS, ROW = np.zeros((2, 3), np.int32), [0, 1]
UNLIKE = [(), (IDS,), (IDS, IDS, IDS), (IDS, IDS[:1]), (IDS[:1], IDS), (IDS, IDS[0])]
UNLIKE += [(np.zeros((2, 2, 3), int), np.zeros((2, 3, 3), int))]
FEW_IDS = (0, np.int8(3), [[-1, 10**12]])
both, apart = attnmask.qkv_cu_seqlens_to_attention_mask, attnmask.qkv_cu_seqlens_to_qkv_masks
NO_PAIRS = [[0], [0, 1, 2], [[0, 1]], np.zeros((0, 2), int), 3, np.int64(4)]
BAD = [
    *((ValueError, "segment_ids", lambda x=x: attnmask.segment_ids_to_mask(x)) for x in UNLIKE),
    *((ValueError, "segment_ids", lambda x=x: attnmask.segment_ids_to_cu_seqlens(x)) for x in FEW_IDS),
    *((ValueError, "cu_seqlens", lambda x=x: attnmask.cu_seqlens_to_mask(x, 3)) for x in NO_PAIRS),
    *((ValueError, "pairs", lambda x=x: attnmask.pairs_to_cu_seqlens(x)) for x in NO_PAIRS),
    *((ValueError, "cu_seqlens_q", lambda x=x: both(x, max_q_len=3)) for x in NO_PAIRS),
    (ValueError, "cu_seqlens_kv", lambda: apart(ROW, max_q_len=3, cu_seqlens_kv=ROW * 2)),
    (ValueError, "cu_seqlens_kv", lambda: both(ROW * 2, max_q_len=3, cu_seqlens_kv=ROW)),
]  # fmt: skip


@pytest.mark.parametrize(("error", "name", "call"), BAD, ids=range(len(BAD)))
def test_bad_input(error, name, call):
    with pytest.raises(error, match=rf"\b{name}\b"):
        call()


# Sizes


def test_masks_too_long_to_number():
    long = np.broadcast_to(np.zeros(1, bool), (1, 2**33))
    endless = as_strided(np.zeros(2, bool), (2**32, 1), (1, 1))
    with pytest.raises((ValueError, MemoryError), match=r"mask|allocate"):
        attnmask.mask_to_segment_ids(endless)
    assert attnmask.attention_mask_to_qkv_cu_seqlens(long, out_dtype=np.int64)[0].tolist() == [0, 0]


# Memory


@pytest.mark.skipif(SANITIZED, reason="a sanitizer has its own memory")
def test_memory_of_grouping_is_that_of_the_sides():
    """The bits of the mask alone would take an eighth of its size."""
    code = """
import resource, numpy as np, attnmask
from numpy.lib.stride_tricks import as_strided
attnmask.mask_to_segment_ids(np.tri(2000, dtype=bool))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
size = 30_000
mask = as_strided(np.arange(2 * size) % 3 == 0, (size, size), (1, 1))
ids, _ = attnmask.mask_to_segment_ids(mask)
assert ids.max() == 2
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / (2 * size))
"""
    result = python(code)
    assert float(result.stdout) < 600, result.stderr  # bytes per row and column


# Debug mode


@pytest.fixture
def debug_mode(caplog):
    caplog.set_level(logging.DEBUG, logger="attnmask")
    attnmask.set_debug_mode(True)
    yield caplog
    attnmask.set_debug_mode(False)


class Traced:
    """Methods and functions that `traced` may decorate."""

    @traced
    def method(self, x, *, y=2):
        """A docstring."""
        return self, x, y

    @classmethod
    @traced
    def maker(cls, x):
        return cls, x

    @traced
    @staticmethod
    def function(x):
        return x

    @property
    @traced
    def inner(self):
        return 4

    @traced
    @property
    def answer(self):
        """Of everything."""
        return 42


def test_debug_mode(debug_mode):
    assert attnmask.get_debug_mode()
    attnmask.mask_to_segment_ids(np.ones((3, 3), np.float32), strict=True)
    attnmask.segment_ids_to_mask(([[0]], [[0]]), dtype=np.int8)
    with pytest.raises(ValueError, match="mask"):
        attnmask.mask_to_segment_ids(1)
    assert attnmask.MaskInfo.from_segments([[0, 0]]).apply_causal(offset=1).q_len == 2
    assert [record.getMessage() for record in debug_mode.records] == [
        "call mask_to_segment_ids(float32 array of shape (3, 3), strict=True)",
        "call segment_ids_to_mask(([[0]], [[0]]), dtype=int8)",
        "call mask_to_segment_ids(1)",
        "call MaskInfo.from_segments([[0, 0]])",
        "call MaskInfo.apply_causal(offset=1)",
        "read MaskInfo.q_len",
    ]
    assert {(record.name, record.levelno, record.funcName) for record in debug_mode.records} == {
        ("attnmask", logging.DEBUG, "test_debug_mode")
    }
    attnmask.set_debug_mode(False)
    attnmask.mask_to_segment_ids([[1]])
    assert len(debug_mode.records) == 6


def test_debug_mode_of_members(debug_mode):
    one = Traced()
    assert one.method(1, y=3) == (one, 1, 3)
    assert one.maker(range(9)) == (Traced, range(9))
    assert Traced.function([1] * 9) == [1] * 9
    assert one.answer == 42
    assert one.inner == 4
    assert [record.getMessage() for record in debug_mode.records] == [
        "call Traced.method(1, y=3)",
        "call Traced.maker(an object of type range)",
        "call Traced.function(a list of 9)",
        "read Traced.answer",
        "call Traced.inner()",
    ]
    assert Traced.method.__doc__ == "A docstring."
    assert Traced.answer.__doc__ == "Of everything."
    debug_mode.clear()
    logging.getLogger("attnmask").setLevel(logging.INFO)
    assert one.answer == 42
    assert not debug_mode.records


@pytest.mark.parametrize("value", ["1", "0", "", None, "yes"])
def test_debug_mode_from_the_environment(value, monkeypatch):
    monkeypatch.delenv("ATTNMASK_DEBUG", raising=False)
    code = """
import logging, sys
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout, format="%(name)s %(message)s")
import attnmask
attnmask.cu_seqlens_to_pairs([0, 2])
print(attnmask.get_debug_mode(), "logging" in sys.modules)
"""
    result = python(code, **({} if value is None else {"ATTNMASK_DEBUG": value}))
    logged = "attnmask call cu_seqlens_to_pairs([0, 2])\n" if value in ("1", "yes") else ""
    assert result.stdout == f"{logged}{bool(logged)} True\n", result.stderr


@pytest.mark.skipif(SANITIZED, reason="a sanitizer has its own time")
def test_debug_mode_costs_nothing_when_off():
    def plain(x):
        return x

    def seconds(call):
        begin = time.perf_counter()
        for _ in range(2000):
            call(1)
        return time.perf_counter() - begin

    wrapped = traced(plain)
    spent = min(seconds(wrapped) for _ in range(20)) - min(seconds(plain) for _ in range(20))
    assert spent / 2000 < 1e-6
