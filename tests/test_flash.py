"""Flash attention, forward: values and accuracy over all pairs of arguments, dead pairs, dropout, the same bits."""

import functools
import itertools
import math
from dataclasses import dataclass, replace
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import reference_flash as ref
from conftest import SANITIZED
from flash_bad_input import (
    BAD,
    DV,
    GOOD,
    HKV,
    MESSAGES,
    NO_INTEGER,
    NO_NUMBER,
    PACKED,
    TK,
    TQ,
    B,
    D,
    H,
    zeros,
)
from flash_cases import (
    BF16,
    F16,
    F32,
    F64,
    FACTORS,
    FLOATS,
    LIMITS,
    POISON,
    SEQUENCES,
    SIZES,
    STEADY,
    Case,
    accumulator,
    all_pairs,
    bits_of,
    laid_out,
    limits,
    live_of,
    lse_dtype,
    of_lengths,
    padding,
    poison_of,
    tensors,
    thinned,
    worst,
)
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

import attnmask
from attnmask import MaskInfo

# Accuracy


@dataclass(frozen=True)
class Expected:
    """What a call should give, and the errors that it may have."""

    out: np.ndarray
    lse: np.ndarray
    out_size: np.ndarray
    lse_size: np.ndarray
    out_error: float
    lse_error: float
    case: object

    def check(self, out, lse=None) -> None:
        same_nan = np.isnan(out.astype(np.float64)) == np.isnan(self.out.astype(np.float64))
        assert same_nan.all(), f"NaN at other places, {np.argwhere(~same_nan)[:3].tolist()}: {self.case}"
        assert out.shape == self.out.shape, (out.shape, self.case)
        self._near(out, self.out, self.out_size, self.out_error, "out")
        if lse is None:
            return
        assert lse.dtype == lse_dtype(out.dtype), (lse.dtype, self.case)
        assert lse.shape == self.lse.shape, (lse.shape, self.case)
        np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(self.lse), err_msg=repr(self.case))
        finite = np.isfinite(self.lse)
        self._near(lse[finite], self.lse[finite], self.lse_size[finite], self.lse_error, "lse")

    def _near(self, got, exact, size, allowed, name) -> None:
        finite = np.isfinite(exact.astype(np.float64))
        got, exact, size = got[finite], exact[finite], size[finite]
        error = worst(got, exact, size, got.dtype)
        assert error <= allowed, (
            f"{name} is off by {error:.3g} of its size, allowed {allowed:.3g}: {self.case}"
        )


def expected(arguments: dict, keep=None, case=None) -> Expected:
    """At most twice the error of naive attention in the same dtype, both beside (at least) float64.

    With few pairs the naive version is sometimes right to the last bit by luck: one weight that is exactly 1, or
    logits that needed no rounding. So what a few roundings cost is allowed in any case: one of the result at the size
    of what was summed; in the accumulator a few of the weights and sums, and two of the logits (one when scaled, one
    on the way to the exponential's base), which the exponential turns from absolute into relative errors.
    """
    dtype = arguments["query"].dtype.newbyteorder("=") if arguments["query"].dtype != BF16 else BF16
    wide = accumulator(dtype)
    exact = ref.flash_attention(**arguments, keep=keep, dtype=np.longdouble if dtype == F64 else np.float64)
    naive = ref.flash_attention(**arguments, keep=keep, dtype=wide)
    with np.errstate(over="ignore"):
        rounded = naive.out.astype(dtype)
    logits = float(np.max(exact.logit_size, initial=0, where=np.isfinite(exact.logit_size)))
    steps = (8 + 2 * logits) * float(np.finfo(wide).eps)
    result = 0.0 if dtype == wide else float(ml_dtypes.finfo(dtype).eps)
    lse_size = np.ones_like(exact.lse)
    finite = np.isfinite(exact.out.astype(np.float64)) & np.isfinite(rounded.astype(np.float64))
    finite_lse = np.isfinite(exact.lse)
    return Expected(
        exact.out,
        exact.lse,
        exact.out_size,
        lse_size,
        2 * worst(rounded[finite], exact.out[finite], exact.out_size[finite], dtype) + steps + result,
        2 * worst(naive.lse[finite_lse], exact.lse[finite_lse], lse_size[finite_lse], wide) + steps,
        case,
    )


# All pairs of arguments

CASES = [Case(**levels, seed=index) for index, levels in enumerate(all_pairs(FACTORS, 0))]


def test_all_pairs_meet():
    """Of the cases as they are; and most of them have live pairs left to look at."""
    for a, b in itertools.combinations(FACTORS, 2):
        met = {(getattr(case, a), getattr(case, b)) for case in CASES}
        assert met == set(itertools.product(FACTORS[a], FACTORS[b])), (a, b)
    assert len(CASES) < 500
    names = ("attention_mask", "bias", "causal", "cum_seqlens_q", "cum_seqlens_k", "sliding_window")
    names += ("q_segment_ids", "kv_segment_ids", "causal_offset")
    live_rows = []
    for case in CASES:
        arguments = {name: value for name, value in case.arguments().items() if name in names}
        live_rows += ref.live_pairs(case.pairs, **arguments).any(axis=3).ravel().tolist()
    assert 0.3 < np.mean(live_rows) < 0.9, np.mean(live_rows)


def run(case: Case, arguments: dict):
    """The package's out and lse (or None), after a look at what every result has in common."""
    more = {}
    if case.out_layout is not None:
        shape = (*arguments["query"].shape[:-1], case.value_depth)
        more["out"] = laid_out(np.full(shape, 77).astype(case.dtype), case.out_layout)
    before = bits_of(arguments)
    got = attnmask.flash_attention(**arguments, **case.hints(), return_lse=case.return_lse, **more)
    assert bits_of(arguments) == before, case
    out, lse = got if case.return_lse else (got, None)
    assert type(out) is np.ndarray, case
    assert out.dtype == case.dtype, (out.dtype, case)
    if more:
        assert out is more["out"], case
    else:
        assert out.flags.c_contiguous, case
    assert lse is None or (type(lse) is np.ndarray and lse.flags.c_contiguous), case
    return out, lse


@functools.lru_cache(maxsize=8)
def expected_of(case: Case) -> Expected:
    return expected(case.arguments(), case.keep(), case)


@pytest.mark.parametrize("case", thinned(CASES, 3), ids=lambda case: str(case.seed))
def test_all_pairs_of_arguments(isa, set_threads, case):
    set_threads(case.threads)
    expected_of(case).check(*run(case, case.arguments()))


@st.composite
def random_cases(draw):
    levels = {name: draw(st.sampled_from(choices)) for name, choices in FACTORS.items()}
    levels |= {name: draw(st.integers(0, 140)) for name in ("queries", "keys")}
    levels |= {name: draw(st.integers(1, 70)) for name in ("depth", "value_depth")}
    return Case(**levels, seed=draw(st.integers(0, 2**20)))


@given(case=random_cases())
def test_any_arguments(isa, set_threads, case):
    set_threads(case.threads)
    expected_of(case).check(*run(case, case.arguments()))


@given(
    dtype=st.sampled_from(FLOATS),
    queries=st.sampled_from([*range(1, 9), 13, 16, 28, 32, 40, 60, 64]),
    keys=st.sampled_from([1, 31, 255, 256, 257, 1000, 3000]),
    heads=st.sampled_from([(8, 2), (4, 4), (8, 1), (6, 6), (18, 18), (12, 4), (14, 2)]),
    depth=st.sampled_from([64, 128, 40, 48, 7, 256]),
    layout=st.sampled_from(["contiguous", "heads first", "sliced", "reversed", "misaligned"]),
    more=st.sampled_from(
        [
            {},
            {"causal": True, "offset": "bottom-right"},
            {"causal": True, "offset": "bottom-right", "window": (300, 0), "sinks": "[H, S]"},
            {"mask": "[B, 1, 1, Tk] int32", "soft_cap": 20.0},
            {"mask": "[B, H, Tq, Tk] bool"},
            {"mask": "segments of heads, causal"},
            {"segments": True, "bias": "[H, 1, Tk]"},
            {"packing": "flat", "causal": True, "offset": "bottom-right"},
            {"normalize": False, "dropout": 0.3},
            {"scale": -0.05, "sinks": "[S]"},
        ]
    ),
)
def test_few_queries(isa, set_threads, dtype, queries, keys, heads, depth, layout, more):
    """Few queries over many keys, which may be split among threads."""
    case = Case(
        dtype, queries, keys, depth, depth, 2, heads, layout, layout, **more, seed=keys + queries, threads=3
    )
    set_threads(case.threads)
    expected_of(case).check(*run(case, case.arguments()))


# Queries of how many heads that share keys: as many rows as fill vectors, or hardly too few.
FULL_ROWS = [(8, 4), (27, 1), (13, 1), (14, 1), (28, 1), (47, 1), (64, 1), (4, 4)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rows", FULL_ROWS[:: 3 if SANITIZED else 1], ids=str)
@pytest.mark.parametrize(("depth", "value_depth"), [(1, 1), (33, 48), (128, 40)])
def test_rows_that_fill_vectors(isa, dtype, rows, depth, value_depth):
    """Queries are packed for these where all pairs of a tile are live; and each tile raises what rows count from."""
    queries, heads = rows
    for layout, normalize in (("contiguous", True), ("reversed", False)):
        more = {"causal": True, "offset": "bottom-right", "normalize": normalize}
        case = Case(dtype, queries, 200, depth, value_depth, 1, (heads, 1), layout, layout, **more)
        arguments = case.arguments()
        growing = np.linspace(0.2, 60, 200).reshape(200, 1, 1)
        arguments["key"] = laid_out((arguments["key"] * growing).astype(dtype), layout)
        expected(arguments, case=case).check(*run(case, arguments))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", list(SEQUENCES)[:: 2 if SANITIZED else 1])
@pytest.mark.parametrize(("heads", "segments"), [((2, 2), False), ((4, 1), False), ((4, 1), True)], ids=str)
def test_sequences_of_any_length(isa, set_threads, dtype, name, heads, segments):
    """Blocks and tiles begin where sequences do; those of few queries are each a block of their own."""
    offset = {} if segments else {"offset": "bottom-right"}
    some = [
        {"causal": True, **offset},
        {"window": (70, 3), "sinks": "[S]", "kv_layout": "heads first"},
        {"normalize": False, "dropout": 0.3, "bias": "[H, 1, Tk]"},
    ]
    set_threads(2)
    for more in some[: 1 if SANITIZED else 3]:
        case = of_lengths(name, dtype, heads, segments, **more)
        expected_of(case).check(*run(case, case.arguments()))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("heads", [(10, 2), (6, 1), (4, 4)][: 1 if SANITIZED else 3], ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(1, 300), (2, 700), (16, 129), (40, 100), (64, 200)])
def test_sequences_of_few_queries_are_as_batch_rows(isa, dtype, heads, queries, keys):
    """To the bit: so a packed batch decodes as one that is not."""
    case = Case(dtype, queries, keys, 24, 40, 5, heads)
    rows = case.arguments()
    out, lse = run(case, rows)
    packed = {name: rows[name].reshape(1, -1, *rows[name].shape[2:]) for name in ("query", "key", "value")}
    for name, length in (("q", queries), ("k", keys)):
        packed[f"cum_seqlens_{name}"] = np.arange(6) * length
    one, one_lse = attend(packed)
    assert one.tobytes() == out.tobytes()
    assert one_lse[0].tobytes() == lse.swapaxes(0, 1).tobytes()


def check_by_two_threads_and_one(case, set_threads):
    """The same bits."""
    set_threads(2)
    got = run(case, case.arguments())
    expected_of(case).check(*got)
    set_threads(1)
    assert bits_of(dict(enumerate(got))) == bits_of(dict(enumerate(run(case, case.arguments()))))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("keys", [769, 768, 1500][: 1 if SANITIZED else 3])
@pytest.mark.parametrize("mask", [None, "[B, H, Tq, Tk] bool"])
def test_many_heads_of_few_queries(isa, set_threads, dtype, keys, mask):
    """They are tasks enough, so their keys are split into longer parts; each may see other keys."""
    case = Case(dtype, 2, keys, 8, 8, 1, (40, 20), causal=True, offset="bottom-right", mask=mask)
    check_by_two_threads_and_one(case, set_threads)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("packing", [None, "flat"])
@pytest.mark.parametrize(
    ("queries", "heads"), [(28, (14, 2)), (64, (17, 1)), (33, (6, 2))][: 1 if SANITIZED else 3], ids=str
)
def test_heads_that_share_keys_meet_them_in_turn(isa, set_threads, dtype, packing, queries, heads):
    """They are too many rows for a block: one task has several, the last of fewer heads, and packs keys for all."""
    some = [
        {"dropout": 0.3, "bias": "[B, H, Tq, Tk]", "return_lse": False},
        {"mask": "segments of heads, causal", "sinks": "[H, S]"},
        {"normalize": False, "soft_cap": 5.0, "kv_layout": "misaligned"},
    ]
    for more in some[: 1 if SANITIZED else 3]:
        if packing and more.keys() & {"mask", "bias"}:
            more = {"dropout": 0.3, "causal": True, "offset": "bottom-right"}
        case = Case(dtype, queries, 150, 24, 40, 8, heads, packing=packing, **more)
        check_by_two_threads_and_one(case, set_threads)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("queries", [3, 50, 100])
def test_batch_rows_that_see_unlike_many_keys(isa, set_threads, dtype, queries):
    """Their keys are split unlike often; what each sees begins elsewhere."""
    case = Case(dtype, queries, 3000, 24, 40, 3, (2, 1))
    arguments = case.arguments()
    ids = np.full((3, 3000), 2, np.int32)
    ids[0, 100:], ids[1, 2300:2900] = 1, 1
    arguments |= {"q_segment_ids": np.ones((3, queries), np.int32), "kv_segment_ids": ids}
    set_threads(2)
    expected(arguments, case=case).check(*run(case, arguments))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_comes_next_sees_nothing(isa, dtype):
    """And what comes before sees keys from somewhere in the middle on."""
    case = Case(dtype, 200, 700, 24, 40, 1, (2, 2))
    arguments = case.arguments()
    q_ids, k_ids = np.ones((1, 200), np.int32), np.ones((1, 700), np.int32)
    q_ids[:, :100], k_ids[:, :500] = 7, 8
    arguments |= {"q_segment_ids": q_ids, "kv_segment_ids": k_ids}
    expected(arguments, case=case).check(*run(case, arguments))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("scale", [1e-60, -1e-60, 0.0])
@pytest.mark.parametrize(
    "more", [{}, {"normalize": False}, {"soft_cap": 3.0}][: 1 if SANITIZED else 3], ids=str
)
def test_a_scale_that_is_nothing(isa, dtype, scale, more):
    """Too small for the type of the logits; live pairs weigh the same, and dead ones nothing."""
    case = Case(dtype, 70, 70, 24, 40, 1, (2, 1), causal=True, scale=scale, **more)
    expected_of(case).check(*run(case, case.arguments()))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("beside", [(), (30, 300), (64, 2000)], ids=str)
def test_decoding_does_not_depend_on_what_is_beside(isa, dtype, beside):
    """Each sequence of one or two queries gets the bits that it gets alone, as far as tiles are its own."""
    lengths = [(1, 40), (2, 64), (1, 65), (1, 700), (2, 1500), (1, 333), (1, 257), *[beside] * bool(beside)]
    q_ends, k_ends = np.cumsum(lengths, axis=0).T
    case = Case(dtype, int(q_ends[-1]), int(k_ends[-1]), 24, 40, 1, (4, 1))
    rows = case.arguments()
    starts = {"cum_seqlens_q": [0, *q_ends], "cum_seqlens_k": [0, *k_ends]}
    out, lse = attend(rows | {name: np.array(ends) for name, ends in starts.items()})
    for (queries, keys), q_end, k_end in zip(lengths, q_ends, k_ends, strict=True):
        if queries > 2:
            continue
        q, k = slice(q_end - queries, q_end), slice(k_end - keys, k_end)
        one, one_lse = attend(
            {"query": rows["query"][:, q], "key": rows["key"][:, k], "value": rows["value"][:, k]}
        )
        assert one.tobytes() == out[:, q].tobytes(), keys
        assert one_lse.tobytes() == lse[..., q].tobytes(), keys


MANY = 330 if SANITIZED else 700


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("heads", [(5, 5), (20, 20), (8, 4), (21, 3)][: 2 if SANITIZED else 4], ids=str)
# Keys are used where they lie, or packed; and values are not, if their depth is such, nor queries for few keys.
@pytest.mark.parametrize(
    ("queries", "keys", "value_depth"),
    [
        (1, MANY, 40),
        (2, MANY, 40),
        (16, MANY, 40),
        (20, MANY, 40),
        (20, MANY, 48),
        (20, MANY, 64),
        (64, MANY, 64),
        (40, 100, 40),
    ],
)
def test_few_queries_give_the_same_bits_in_any_layout(isa, dtype, heads, queries, keys, value_depth):
    """Heads that lie side by side are read together."""
    window = (keys - 70, 0)
    first = Case(
        dtype, queries, keys, 22, value_depth, 2, heads, causal=True, offset="bottom-right", window=window
    )
    out, lse = run(first, first.arguments())
    for layout in ("heads first", "sliced", "reversed", "fortran", "swapped"):
        case = replace(first, q_layout=layout, kv_layout=layout)
        again = run(case, case.arguments())
        assert again[0].tobytes() == out.tobytes(), (isa, case)
        assert again[1].tobytes() == lse.tobytes(), (isa, case)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("queries", [1, 70])
def test_a_key_that_outweighs_all_others_gives_its_value(isa, dtype, queries):
    """Exactly, wherever it comes, though weights may be rounded and count from others that came before."""
    rng = np.random.default_rng(0)
    value = rng.standard_normal((1, 300, 2, 40)).astype(dtype)
    for place in (0, 31, 150, 299):
        key = rng.standard_normal((1, 300, 2, 16)).astype(dtype)
        key[0, place] = 32
        out = attnmask.flash_attention(np.ones((1, queries, 2, 16), dtype), key, value)
        assert (out == value[:, place : place + 1]).all(), place


def attend(arguments: dict, **more):
    return attnmask.flash_attention(**(arguments | more), return_lse=True)


# Forms and arguments


def test_positional_arguments(isa):
    """In the order of the seed; what it does not have comes by name only."""
    query, key, value = tensors().values()
    rng = np.random.default_rng(0)
    mask, bias = rng.random((2, 1, 40, 50)) < 0.7, rng.standard_normal((1, 4, 40, 50)).astype(F32)
    arguments = (query, key, value, mask, bias, 0.2, 0.25, True, 7, None, None, (9, 3))
    arguments += (attnmask.FwdParams(32, 32), attnmask.BwdParams(), 5.0, np.ones(2, F32), False, None, F32)
    by_name = {
        "attention_mask": mask,
        "bias": bias,
        "softmax_scale": 0.2,
        "dropout_prob": 0.25,
        "causal": True,
        "sliding_window": (9, 3),
        "logits_soft_cap": 5.0,
        "softmax_aux": np.ones(2, F32),
        "normalize_output": False,
    }
    keep = attnmask.dropout_keep_mask(7, 0.25, (2, 4, 40, 50))
    right = expected({"query": query, "key": key, "value": value, **by_name}, keep, "positional")
    right.check(attnmask.flash_attention(*arguments))
    by_name["dropout_seed"] = 7
    right.check(*attnmask.flash_attention_fwd(query, key, value, **by_name))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_flash_attention_fwd_gives_the_same(isa, dtype):
    for more in ({}, {"causal": True, "softmax_aux": np.ones(2, dtype)}, {"normalize_output": False}):
        arguments = tensors(dtype=dtype)
        both = attend(arguments, **more), attnmask.flash_attention_fwd(**arguments, **more)
        for one, other in zip(*both, strict=True):
            assert one.tobytes() == other.tobytes(), (isa, dtype, more)


def test_lists_subclasses_and_numpy_scalars(isa):
    class Subclass(np.ndarray):
        pass

    arguments = tensors(5, 6, dtype=F64)
    right = expected(arguments | {"causal": True, "softmax_scale": 0.5, "sliding_window": (3, 2)})
    for convert in (np.ndarray.tolist, lambda array: array.view(Subclass)):
        got = attend(
            {name: convert(array) for name, array in arguments.items()},
            causal=np.True_,
            softmax_scale=np.float32(0.5),
            sliding_window=(np.int64(3), np.int8(2)),
            causal_offset=np.int16(0),
        )
        assert type(got[0]) is np.ndarray
        right.check(*got)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("queries", [1, 70])
def test_hints_change_rounding_only(isa, dtype, queries):
    arguments = tensors(queries, 150, dtype=dtype) | {"causal": True, "causal_offset": 30}
    right = expected(arguments)
    for q_blocksize, kv_blocksize in itertools.product((None, 1, 3, 64, 2**40), repeat=2):
        blocks = attnmask.FwdParams(q_blocksize=q_blocksize, kv_blocksize=kv_blocksize)
        right.check(*attend(arguments, fwd_params=blocks))


@pytest.mark.parametrize("offset", [2**31, -(2**31), 2**59, -(2**59)])
@pytest.mark.parametrize("window", [None, (0, 0), (2**63 - 1, 3), (2, 2**63 - 1), 2**62])
@pytest.mark.parametrize("causal", [False, True])
def test_positions_far_away_do_not_wrap(isa, offset, window, causal):
    arguments = tensors(9, 11)
    got = attend(arguments, causal=causal, causal_offset=offset, sliding_window=window)
    left, right = window if isinstance(window, tuple) else (window, window)
    ahead = np.subtract.outer(np.arange(9), np.arange(11)).astype(object) * -1 - offset
    live = np.ones(ahead.shape, bool)
    if causal:
        live &= (ahead <= 0).astype(bool)
    if window is not None:
        live &= ((-left <= ahead) & (ahead <= right)).astype(bool)
    expected(arguments | {"attention_mask": live}, case=(offset, window, causal)).check(*got)


@pytest.mark.parametrize("sink", [-1e37, -1e20, -1e10, 1e10, 1e20, 1e37, "lowest", "highest"])
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_sinks_of_any_size(isa, dtype, sink):
    """One that is far below all logits is none; one far above is all there is."""
    sink = float({"lowest": np.finfo(dtype).min, "highest": np.finfo(dtype).max}.get(sink, sink))
    first_rows_have_no_key = {"causal": True, "causal_offset": -3}
    arguments = tensors(9, 11, dtype=dtype) | first_rows_have_no_key
    for count in (1, 2):
        out, lse = attend(arguments, softmax_aux=np.full(count, sink, dtype))
        alone = np.full_like(lse, sink)
        if sink > 0:
            np.testing.assert_array_equal(out, 0)
            np.testing.assert_allclose(lse, alone, rtol=1e-6)
            continue
        same, other = attend(arguments)
        np.testing.assert_allclose(out, same, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(lse, np.where(np.isneginf(other), alone, other), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sinks", [[np.inf], [1.0, np.inf], [np.nan], [np.nan, 1.0]], ids=str)
@pytest.mark.parametrize("queries", [1, 9, 70])
def test_sinks_that_are_no_numbers(isa, queries, sinks):
    """A row without a live pair is zero beside them too; an infinite one takes all that is live."""
    first_row_has_no_key = {"causal": True, "causal_offset": -1}
    out, lse = attend(tensors(queries, 80) | first_row_has_no_key, softmax_aux=sinks)
    assert (out[:, 0] == 0).all()
    if np.isnan(sinks).any():
        assert np.isnan(out[:, 1:]).all()
        assert np.isnan(lse).all()
    else:
        assert (out == 0).all()
        assert (lse == np.inf).all()


@pytest.mark.parametrize("bias_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bias_of_another_dtype(isa, dtype, bias_dtype):
    """Wider than the arithmetic or narrower, with steps, for heads of one channel and an odd number of keys."""
    arguments = tensors(9, 11, depth=1, dtype=dtype)
    bias = np.random.default_rng(0).standard_normal((9, 22)).astype(bias_dtype)[:, ::2]
    expected(arguments | {"bias": bias}).check(*attend(arguments, bias=bias))


def test_offsets_of_any_integer_dtype(isa):
    arguments = tensors(9, 11)
    right = expected(arguments | {"causal": True, "causal_offset": [3, 0]})
    for offsets in (
        [3, 0],
        (3, 0),
        *(np.array([3, 0], f"{kind}{size}") for kind in "iu" for size in (1, 2, 4)),
    ):
        right.check(*attend(arguments, causal=True, causal_offset=offsets))


def test_out_that_is_interleaved_with_the_input(isa):
    """Views of one buffer may lie between each other; nothing outside of `out` is written."""
    buffer = np.full((2, 20, 4, 3 * 16), 9, F32)
    query, out, rest = (buffer[..., index::3] for index in range(3))
    arguments = tensors(20, 30)
    arguments["value"] = arguments["value"][..., :16]
    query[...] = arguments["query"]
    plain = attnmask.flash_attention(**arguments)
    assert attnmask.flash_attention(**(arguments | {"query": query}), out=out) is out
    np.testing.assert_array_equal(query, arguments["query"])
    np.testing.assert_array_equal(rest, 9)
    np.testing.assert_array_equal(out, plain)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("at", [(axis,) for axis in range(7)] + [(5, 6)], ids=str)
# Queries: keys are used where they lie, or packed by a block, or for several.
@pytest.mark.parametrize("some", [3, 30, 70])
def test_axes_of_length_zero(isa, dtype, some, at):
    sizes = [2, some, 128, 2, 5, 8, 6]  # the weight of a key is exact
    for axis in at:
        sizes[axis] = 0
    batch, queries, keys, groups, kv_heads, depth, value_depth = sizes
    shapes = {
        "query": (batch, queries, groups * kv_heads, depth),
        "key": (batch, keys, kv_heads, depth),
        "value": (batch, keys, kv_heads, value_depth),
    }
    arguments = {name: np.ones(shape, dtype) for name, shape in shapes.items()}
    if groups * kv_heads == 0:  # no head, or none that a key's head could be for
        try:
            out, lse = attend(arguments)
        except ValueError:
            return
    else:
        out, lse = attend(arguments, softmax_scale=1.0)
    assert (out.shape, out.dtype) == ((batch, queries, groups * kv_heads, value_depth), dtype)
    assert lse.shape == (batch, groups * kv_heads, queries)
    if keys == 0:
        assert (out == 0).all()
        assert np.isneginf(lse).all()
    else:
        assert (out == 1).all()


# Rows without a live pair


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("queries", "heads"), [(20, (8, 8)), (20, (8, 4)), (70, (8, 8)), (1, (8, 8))], ids=str
)
def test_a_batch_row_that_sees_nothing(isa, dtype, queries, heads):
    """Among others, of which each gives what it gives alone, wherever in a line of memory its rows begin."""
    rng = np.random.default_rng(0)

    def tensor(tokens, heads):
        long = rng.standard_normal(8 * tokens * heads * 64 + 64).astype(dtype)
        begin = (16 - long.ctypes.data) % 64 // dtype.itemsize
        return long[begin : begin + 8 * tokens * heads * 64].reshape(8, tokens, heads, 64)

    query, key, value = (tensor(*size) for size in ((queries, heads[0]), (200, heads[1]), (200, heads[1])))
    live = np.ones((8, 1, 1, 200), bool)
    live[[3, 7]] = False
    out, lse = attend({"query": query, "key": key, "value": value, "attention_mask": live})
    for row in range(8):
        part = slice(row, row + 1)
        one = {"query": query[part], "key": key[part], "value": value[part], "attention_mask": live[part]}
        alone = attend(one)
        assert (out[part].tobytes(), lse[part].tobytes()) == (alone[0].tobytes(), alone[1].tobytes()), row
        assert (not out[row].any() and np.isneginf(lse[row]).all()) == (row in (3, 7)), row


NO_PAIR = {
    "mask": lambda row, shape: {"attention_mask": np.arange(shape[2])[:, None] != row},
    "mask info": lambda row, shape: {
        "attention_mask": MaskInfo.from_attention_mask(
            np.broadcast_to((np.arange(shape[2]) != row)[:, None], (shape[0], *shape[2:]))
        )
    },
    "bias": lambda row, shape: {
        "bias": np.where(np.arange(shape[2])[:, None] == row, -np.inf, 0).astype(F32)
    },
    "segments": lambda row, shape: {
        "q_segment_ids": np.where(np.arange(shape[2]) == row, -1, 0)[None].repeat(shape[0], 0),
        "kv_segment_ids": np.zeros((shape[0], shape[3]), int),
    },
    "other segments": lambda row, shape: {
        "q_segment_ids": np.where(np.arange(shape[2]) == row, 5, 0)[None].repeat(shape[0], 0),
        "kv_segment_ids": np.zeros((shape[0], shape[3]), int),
    },
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", NO_PAIR)
@pytest.mark.parametrize("more", [{}, {"logits_soft_cap": 3.0}, {"normalize_output": False}], ids=str)
def test_a_row_without_a_live_pair(isa, dtype, kind, more):
    """Exact zeros, and minus infinity or what its sinks sum up to."""
    for queries, row in ((1, 0), (40, 0), (40, 17), (40, 39)):
        arguments = tensors(queries, 70, dtype=dtype) | NO_PAIR[kind](row, (2, 4, queries, 70)) | more
        out, lse = attend(arguments)
        assert (out[:, row] == 0).all()
        assert np.isneginf(lse[..., row]).all()
        expected(arguments).check(out, lse)
        arguments["softmax_aux"] = np.array([[0.5, -1.0], [2.0, 3.0], [0, -np.inf], [-5, 1]], dtype)
        out, lse = attend(arguments)
        assert (out[:, row] == 0).all()
        with np.errstate(divide="ignore"):
            sums = np.log(np.exp(arguments["softmax_aux"].astype(np.float64)).sum(axis=1))
        np.testing.assert_allclose(lse[..., row], np.broadcast_to(sums, (2, 4)), rtol=1e-6, atol=1e-6)
        expected(arguments).check(out, lse)


def test_causal_rows_before_the_first_key(isa):
    """Bottom-right with more queries than keys: the first ones see nothing."""
    arguments = tensors(100, 30)
    out, lse = attend(arguments, causal=True, causal_offset="bottom-right")
    assert (out[:, :70] == 0).all()
    assert np.isneginf(lse[..., :70]).all()
    assert np.isfinite(lse[..., 70:]).all()


def test_extreme_logits(isa):
    """Large logits are exact by their differences, and what is far below the maximum counts nothing."""
    arguments = tensors(20, 80)
    arguments["bias"] = np.where(np.arange(80) % 7 == 0, 0, -1e4).astype(F32)
    expected(arguments).check(*attend(arguments))
    rising = np.arange(80, dtype=F32) * 200  # a new maximum with every key
    for bias in (rising, rising[::-1], np.full(80, -3e38, F32), np.full(80, 3e38, F32)):
        got = attend(arguments, bias=bias, softmax_scale=0.0)
        assert np.isfinite(got[0]).all()
        assert np.isfinite(got[1]).all()
        shares = ref.flash_attention(**(arguments | {"bias": bias, "softmax_scale": 0.0}))
        np.testing.assert_allclose(got[0], shares.out, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("scale", [0.5, -3.0])
@pytest.mark.parametrize("queries", [1, 40, 100])
def test_keys_near_the_greatest_number(isa, dtype, queries, scale):
    """No scale takes them out of range, however small the queries are that they meet."""
    arguments = tensors(queries, 100, heads=2, dtype=dtype)
    info = ml_dtypes.finfo(dtype)
    rng = np.random.default_rng(0)
    for name, size in (("query", 8 * float(info.smallest_normal)), ("key", 0.99 * float(info.max))):
        some = rng.uniform(0.5, 1, arguments[name].shape) * rng.choice([-1, 1], arguments[name].shape)
        arguments[name] = (size * some).astype(dtype)
    expected(arguments | {"softmax_scale": scale}).check(*attend(arguments, softmax_scale=scale))


# Dead pairs


def assert_same_bits(got, clean, rows, case) -> None:
    """In the rows [B, H, Tq] of out and lse."""
    out, lse = got
    clean_out, clean_lse = clean
    assert out.swapaxes(1, 2)[rows].tobytes() == clean_out.swapaxes(1, 2)[rows].tobytes(), case
    assert lse[rows].tobytes() == clean_lse[rows].tobytes(), case


@pytest.mark.parametrize("kind", LIMITS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dead_pairs_have_no_influence(isa, dtype, kind):
    """Poison in some keys, values and queries reaches the rows that have a live pair with it and no others."""
    for queries, keys in SIZES:
        shape = (2, 4, queries, keys)
        depth = 40 if queries < 3 else 16  # where keys are used as they lie, values of more than a panel
        arguments = tensors(queries, keys, depth=depth, dtype=dtype) | limits(kind, shape)
        live = live_of(arguments, shape)
        seen = live.reshape(2, 2, 2, queries, keys).any(axis=(2, 3))  # [B, Hkv, Tk]
        clean = attend(arguments)
        for poison in POISON:
            number = poison_of(dtype, poison)
            rng = np.random.default_rng(queries)
            case = (isa, dtype, kind, shape, poison)

            # Of each KV head some keys, and all that nobody looks at.
            bad = ~seen | (rng.random(seen.shape) < 3 / keys)
            for name, depth in (("key", 3), ("value", 5), ("key", slice(None)), ("value", slice(None))):
                poisoned = arguments[name].copy()
                poisoned[..., depth][bad.swapaxes(1, 2)] = number
                touched = (live & bad.repeat(2, axis=1)[:, :, None, :]).any(axis=3)
                got = attend(arguments | {name: poisoned})
                assert_same_bits(got, clean, ~touched, (*case, name))

            bad = rng.random((2, queries, 4)) < 0.2
            query = arguments["query"].copy()
            query[bad] = number
            got = attend(arguments | {"query": query})
            assert_same_bits(got, clean, ~bad.swapaxes(1, 2) | ~live.any(axis=3), (*case, "query"))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dead_keys_of_many_heads_have_no_influence(isa, dtype):
    """Heads that lie side by side take turns in the same memory, and values of live tiles stay where they lie."""
    rng = np.random.default_rng(0)
    shapes = {"query": (4, 20, 16, 64), "key": (4, 200, 16, 64), "value": (4, 200, 16, 64)}
    arguments = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    live = rng.random((4, 16, 1, 200)) < 0.7
    live[..., 64:128] = True
    live[1, 2] = False
    clean = attend(arguments, attention_mask=live)
    for name in ("key", "value"):
        for poison in (math.nan, math.inf):
            poisoned = arguments[name].copy()
            poisoned[~live[:, :, 0].swapaxes(1, 2)] = poison
            out, lse = attend(arguments | {name: poisoned}, attention_mask=live)
            assert out.tobytes() == clean[0].tobytes(), (name, poison)
            assert lse.tobytes() == clean[1].tobytes(), (name, poison)


@pytest.mark.parametrize("poison", [math.nan, "huge"], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("flat", [False, True])
def test_packed_sequences_do_not_reach_each_other(isa, dtype, poison, flat):
    q_ends, k_ends = np.array([0, 7, 7, 40, 90, 101]), np.array([0, 20, 33, 33, 90, 140])
    case = Case(dtype, 101, 140, 16, 20, 1, (4, 2), packing="flat" if flat else "packed")
    arguments = case.arguments() | {"cum_seqlens_q": q_ends, "cum_seqlens_k": k_ends}
    for more in ({}, {"causal": True, "causal_offset": "bottom-right"}, {"sliding_window": 4}):
        clean = attend(arguments | more)
        for index in range(5):
            keys = np.zeros(140, bool)
            keys[k_ends[index] : k_ends[index + 1]] = True
            others = np.ones(101, bool)
            others[q_ends[index] : q_ends[index + 1]] = False
            for name in ("key", "value"):
                poisoned = arguments[name].copy()
                poisoned[keys if flat else (slice(None), keys)] = poison_of(dtype, poison)
                got = attend(arguments | more | {name: poisoned})
                where = (isa, dtype, more, index, name)
                for one, other in zip(got, clean, strict=True):
                    one, other = (x if flat else x[0] for x in (one, other))
                    rows = others if one.ndim == 3 else (slice(None), others)
                    assert one[rows].tobytes() == other[rows].tobytes(), where


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_poison_in_a_dead_bias(isa, dtype):
    """A pair that a mask forbids may have any bias, NaN and infinity too."""
    arguments = tensors(40, 70, dtype=dtype)
    live = padding(np.random.default_rng(3), 2, 40, 70, 4)
    bias = np.random.default_rng(4).standard_normal((2, 4, 40, 70)).astype(dtype)
    clean = attend(arguments, attention_mask=live, bias=bias)
    for poison in POISON:
        poisoned = np.where(live, bias, np.array(poison_of(dtype, poison), dtype))
        for mask in (live, MaskInfo.from_attention_mask(live)):
            got = attend(arguments, attention_mask=mask, bias=poisoned)
            assert_same_bits(got, clean, np.ones((2, 4, 40), bool), (isa, dtype, poison))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_live_nan_comes_through(isa, dtype, soft_cap, sinks, normalize):
    """A NaN in a key or a query is one in all of the row; one in a value in its column only; +inf is +inf."""
    for queries, keys in SIZES:
        shape = (2, 4, queries, keys)
        arguments = tensors(queries, keys, dtype=dtype) | {
            "causal": True,
            "causal_offset": "bottom-right",
            "logits_soft_cap": soft_cap,
            "normalize_output": normalize,
            "softmax_aux": np.ones(1, dtype) if sinks else None,
        }
        clean = attend(arguments)
        for at in (0, keys // 2, keys - 1):
            touched = live_of(arguments, shape)[:, :2, :, at]
            touched[1] = False  # of batch row 0, and the first KV head, which two heads read
            for poison in (math.nan, math.inf):
                value = arguments["value"].copy()
                value[0, at, 0, 7] = poison
                out, lse = attend(arguments | {"value": value})
                column = np.zeros(out.shape, bool)
                column[:, :, :2, 7] = touched.swapaxes(1, 2)
                np.testing.assert_array_equal(out[column].astype(np.float64), poison)
                eps = max(4 * float(ml_dtypes.finfo(dtype).eps), 100 * float(np.finfo(lse.dtype).eps))
                rest, clean_rest = (x[~column].astype(np.float64) for x in (out, clean[0]))
                np.testing.assert_allclose(rest, clean_rest, rtol=eps, atol=eps)
                np.testing.assert_allclose(lse, clean[1], rtol=1e-5, atol=1e-5)
            key = arguments["key"].copy()
            key[0, at, 0, 7] = math.nan
            out, lse = attend(arguments | {"key": key})
            whole = np.zeros((2, 4, queries), bool)
            whole[:, :2] = touched
            assert np.isnan(out.swapaxes(1, 2)[whole].astype(F64)).all(), (isa, dtype, shape, at)
            assert np.isnan(lse[whole]).all(), (isa, dtype, shape, at)
            assert_same_bits((out, lse), clean, ~whole, (isa, dtype, shape, at))
        query = arguments["query"].copy()
        query[1, -1, 2, 0] = math.nan
        out, lse = attend(arguments | {"query": query})
        assert np.isnan(out[1, -1, 2].astype(F64)).all()
        assert np.isnan(lse[1, 2, -1])


# Dropout


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("packing", [None, "packed", "flat"])
@pytest.mark.parametrize("seed", [None, 0, 1, 2**31, 2**32 + 1, 2**62])
def test_the_keep_mask_is_the_one_used(isa, dtype, packing, seed):
    """With equal weights and the identity for values, the mask itself comes out."""
    prob, (batch, heads, queries, keys) = 0.25, (1 if packing else 2, 4, 33, 64)
    query = np.zeros((batch, queries, heads, 8), dtype)
    key = np.zeros((batch, keys, 2, 8), dtype)
    value = np.broadcast_to(np.eye(keys).astype(dtype)[None, :, None], (batch, keys, 2, keys))
    if packing == "flat":
        query, key, value = query[0], key[0], value[0]
    more = {}
    live = np.ones((queries, keys), bool)
    if packing:
        more = {"cum_seqlens_q": [0, 10, 11, 33], "cum_seqlens_k": [0, 16, 32, 64]}
        live = ref.live_pairs((1, 1, queries, keys), **more)[0, 0]
    out = attnmask.flash_attention(query, key, value, dropout_prob=prob, dropout_seed=seed, **more)
    keep = attnmask.dropout_keep_mask(0 if seed is None else seed, prob, (batch, heads, queries, keys))
    assert (keep.shape, keep.dtype) == ((batch, heads, queries, keys), bool)
    out = out.reshape(batch, queries, heads, keys).swapaxes(1, 2)
    np.testing.assert_array_equal(out != 0, keep & live)
    weights = np.where(keep & live, 1 / live.sum(axis=1, keepdims=True) / (1 - prob), 0)
    eps = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(out.astype(np.float64), weights, rtol=2 * eps + 1e-6 * (dtype != F64))


def test_the_keep_mask_of_a_part_is_part_of_the_keep_mask(isa, set_threads):
    whole = attnmask.dropout_keep_mask(11, 0.3, (3, 4, 130, 257))
    assert whole.flags.c_contiguous
    for shape in [
        (1, 1, 1, 1),
        (3, 4, 130, 256),
        (2, 4, 129, 257),
        (3, 1, 7, 33),
        (1, 4, 130, 5),
        (0, 4, 3, 3),
    ]:
        part = tuple(slice(length) for length in shape)
        for threads in (1, 3):
            set_threads(threads)
            got = attnmask.dropout_keep_mask(11, 0.3, shape)
            np.testing.assert_array_equal(got, whole[part], err_msg=repr(shape))
    assert attnmask.dropout_keep_mask(11, 0.0, (2, 3, 4, 5)).all()


def test_dropout_that_hardly_ever_drops(isa):
    """What is kept weighs more, however little, in the result as in its gradient."""
    x = np.ones((1, 2, 1, 4))
    plain, plain_vjp = attnmask.flash_attention_vjp(x, x, x)
    out, vjp = attnmask.flash_attention_vjp(x, x, x, dropout_prob=1e-10)
    np.testing.assert_allclose(out / plain - 1, 1e-10, rtol=1e-4)
    np.testing.assert_allclose(vjp(x).value / plain_vjp(x).value - 1, 1e-10, rtol=1e-4)


def test_a_nan_whose_weight_is_dropped(isa):
    """It is live: the row's greatest logit is NaN, and what counts from it."""
    query, key, value = np.ones((1, 1, 1, 4)), np.ones((1, 2, 1, 4)), np.ones((1, 2, 1, 4))
    key[0, 1] = np.nan
    kept = [attnmask.dropout_keep_mask(seed, 0.5, (1, 1, 1, 2)).ravel().tolist() for seed in range(20)]
    dropout = {"dropout_prob": 0.5, "dropout_seed": kept.index([True, False])}
    for normalize in (True, False):
        out = attnmask.flash_attention(query, key, value, **dropout, normalize_output=normalize)
        assert np.isnan(out).all()


@pytest.mark.parametrize("prob", [0.05, 0.1, 0.5, 0.9, 0.95])
def test_the_keep_mask_is_random(prob):
    """Its mean, and that neighbours along every axis and of other seeds know nothing of each other.

    Of n independent pairs the mean and the correlation stay within five standard deviations; the seeds are fixed.
    """
    shape = (4, 4, 64, 256)
    masks = [attnmask.dropout_keep_mask(seed, prob, shape) for seed in (0, 1, 2, 3, 2**32, 2**40)]
    deviation = math.sqrt(prob * (1 - prob))
    scaled = [(mask - (1 - prob)) / deviation for mask in masks]
    count = math.prod(shape)
    for mask in scaled:
        assert abs(mask.mean()) < 5 / math.sqrt(count)
        for axis, lag in itertools.product(range(4), (1, 2, 3)):
            ahead = np.moveaxis(mask, axis, 0)
            product = ahead[lag:] * ahead[:-lag]
            assert abs(product.mean()) < 5 / math.sqrt(product.size), (axis, lag)
        for one, other in ((0, 1), (2, 3)):  # b and h, or q and k, in each other's place
            turned = np.moveaxis(mask, (one, other), (0, 1))[:64, :64]
            below = np.tri(len(turned), k=-1, dtype=bool)
            product = (turned * turned.swapaxes(0, 1))[below]
            assert abs(product.mean()) < 5 / math.sqrt(product.size), (one, other)
        for axes in itertools.combinations(range(4), 3):  # no line is denser than others
            sums = mask.sum(axis=axes) / math.sqrt(count / mask.shape[({0, 1, 2, 3} - set(axes)).pop()])
            assert np.abs(sums).max() < 6, axes
    for one, other in itertools.combinations(scaled, 2):
        assert abs((one * other).mean()) < 5 / math.sqrt(count)


def test_dropout_keeps_the_mean(isa):
    """Over many seeds the outputs average to those without dropout; lse knows nothing of it."""
    arguments = tensors(4, 30, batch=1)
    plain, lse = attend(arguments)
    several = [attend(arguments, dropout_prob=0.5, dropout_seed=seed) for seed in range(400)]
    assert all(np.array_equal(one_lse, lse) for _, one_lse in several)
    np.testing.assert_allclose(np.mean([out for out, _ in several], axis=0), plain, atol=0.12)


# Merging


@given(
    dtype=st.sampled_from(FLOATS),
    cuts=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    causal=st.booleans(),
    sinks=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_parts_merge_into_the_whole(isa, dtype, cuts, causal, sinks, seed):
    """Of disjoint sets of keys, some of them empty or dead for some rows; sinks go with one of the parts."""
    arguments = tensors(20, 90, dtype=dtype, seed=seed) | {"causal": causal}
    aux = {"softmax_aux": np.array([0.3, 1.0], dtype)} if sinks else {}
    right = expected(arguments | {"causal_offset": 50} | aux, case=(isa, dtype, cuts, causal, sinks, seed))
    parts = []
    for start, end in itertools.pairwise([0, *sorted(cuts), 90]):
        keys = {name: arguments[name][:, start:end] for name in ("key", "value")}
        parts.append(attend(arguments, **keys, causal_offset=50 - start, **(aux if not start else {})))
        aux = {} if not start else aux
    outs, lses = ([part[index] for part in parts] for index in (0, 1))
    before = [array.tobytes() for array in (*outs, *lses)]
    out, lse = attnmask.merge_attention_states(outs, lses)
    assert [array.tobytes() for array in (*outs, *lses)] == before
    assert (out.dtype, lse.dtype) == (dtype, lse_dtype(dtype))
    near = 4 * float(ml_dtypes.finfo(dtype).eps)  # each part is rounded to dtype
    np.testing.assert_allclose(lse, right.lse.astype(F64), rtol=1e-5, atol=1e-5)
    error = worst(out, right.out, right.out_size, dtype)
    assert error <= right.out_error + near, (error, right.case)
    merged = ref.merge_attention_states(outs, lses)
    np.testing.assert_allclose(out.astype(F64), merged[0], rtol=near, atol=near)


def test_merging_what_has_no_live_pair(isa):
    zeros, nothing = np.zeros((1, 3, 2, 5), F32), np.full((1, 2, 3), -np.inf, F32)
    ones, some = np.ones((1, 3, 2, 5), F32), np.array([[[0, -np.inf, 200], [-300, 3, -np.inf]]], F32)
    out, lse = attnmask.merge_attention_states([zeros, zeros], [nothing, nothing])
    assert (out == 0).all()
    assert np.isneginf(lse).all()
    for outs, lses in (([ones, zeros], [some, nothing]), ([zeros, ones], [nothing, some]), ([ones], [some])):
        out, lse = attnmask.merge_attention_states(outs, lses)
        np.testing.assert_array_equal(lse, some)
        alive = np.isfinite(some).swapaxes(1, 2)
        np.testing.assert_allclose(out[alive], 1, rtol=1e-6)
    far = attnmask.merge_attention_states(
        [ones, 2 * ones], [np.full_like(some, 1e4), np.full_like(some, -1e4)]
    )
    np.testing.assert_allclose(far[0], 1)
    np.testing.assert_allclose(far[1], 1e4)


# The same bits


@pytest.mark.parametrize("case", STEADY, ids=str)
def test_any_number_of_threads_gives_the_same_bits(isa, set_threads, case):
    arguments = case.arguments()
    set_threads(1)
    out, lse = run(case, arguments)
    expected_of(case).check(out, lse)
    for threads in (3,) if SANITIZED else (1, 2, 3, 8, 8):
        set_threads(threads)
        again = run(case, arguments)
        assert again[0].tobytes() == out.tobytes(), (isa, threads, case)
        assert again[1].tobytes() == lse.tobytes(), (isa, threads, case)


@pytest.mark.parametrize("poison", [0, math.nan], ids=str)
def test_few_blocks_of_many_see_all_keys(isa, poison):
    """Where most blocks see two tiles, tasks keep two: those that see more, and other heads, take their places."""
    rng = np.random.default_rng(0)
    tokens, heads = 1280, 16
    query, key, value = (rng.standard_normal((1, tokens, heads, 4), F32) for _ in range(3))
    distance = np.arange(tokens)[:, None] - np.arange(tokens)
    mask = (distance >= 0) & (distance < 60)
    mask[[4 * 64 + 5, 9 * 64 + 1, 18 * 64]] = True
    value[0, 77:80] = poison
    whole = attnmask.flash_attention(query, key, value, mask)
    for head in range(heads):
        one = (slice(None), slice(None), slice(head, head + 1))
        alone = attnmask.flash_attention(query[one], key[one], value[one], mask)
        np.testing.assert_allclose(whole[one], alone, rtol=1e-5, atol=1e-6, err_msg=f"head {head}")
    seen = mask[:, 77:80].any(axis=1) & np.isnan(poison)
    np.testing.assert_array_equal(np.isnan(whole).any(axis=(0, 2, 3)), seen)


# Other libraries


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_beside_torch(isa, causal, dtype):
    torch = pytest.importorskip("torch")
    arguments = {
        name: torch.from_numpy(array) for name, array in tensors(50, 50, dtype=np.dtype(dtype)).items()
    }
    heads_first = [array.transpose(1, 2) for array in arguments.values()]
    heads_first[1:] = [array.repeat_interleave(2, dim=1) for array in heads_first[1:]]
    theirs = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=causal).transpose(1, 2)
    ours = attnmask.flash_attention(**arguments, causal=causal)
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_beside_jax(isa, causal):
    jax = pytest.importorskip("jax")
    arguments = {name: jax.numpy.asarray(array) for name, array in tensors(50, 50).items()}
    arguments["value"] = arguments["value"][..., :16]
    theirs = jax.nn.dot_product_attention(*arguments.values(), is_causal=causal)
    ours = attnmask.flash_attention(**arguments, causal=causal)
    np.testing.assert_allclose(ours, np.asarray(theirs), rtol=1e-5, atol=2e-6)


# Bad input


def test_the_good_arguments_are_good():
    for good, _ in BAD.values():
        out = attnmask.flash_attention(**good)
        assert out.shape == (*good["query"].shape[:-1], DV)


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_bad_input(name, error):
    good, bad = BAD[name]
    for value in bad.get(error, []):
        if name == "key" and np.shape(value) == (B, TK + 1, HKV, D):
            match = r"\b(key|value)\b"  # one of them is too long: who can tell which
        elif name in ("query", "key") and np.ndim(value) > 2:
            match = r"\b(query|key|value)\b"
        elif name.startswith("cum_seqlens"):
            match = r"\bcum_seqlens_[qk]\b"
        else:
            match = rf"\b{name}\b"
        try:
            with pytest.raises(error, match=match):
                attnmask.flash_attention(**(good | {name: value}))
        except BaseException as failure:
            failure.add_note(f"{name}={value!r}")
            raise


@pytest.mark.parametrize(("good", "name", "value", "message"), MESSAGES, ids=range(len(MESSAGES)))
def test_what_errors_say(good, name, value, message):
    if name == "q_segment_ids":
        good = good | {"kv_segment_ids": np.zeros(TK, int)}
    if name == "causal_offset":
        good = good | {"causal": True}
    with pytest.raises((TypeError, ValueError), match=message):
        attnmask.flash_attention(**(good | {name: value}))


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"causal_offset": [1, 2, 3]}, ValueError),
        ({"q_segment_ids": np.zeros((1, TQ + 1), int), "kv_segment_ids": np.zeros((1, TK), int)}, ValueError),
        ({"attention_mask": np.ones((2, 1, TQ, TK))}, ValueError),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_input_with_packed_rows(more, error):
    with pytest.raises(error, match=rf"\b{next(iter(more))}\b"):
        attnmask.flash_attention(**(PACKED | {"causal": True} | more))


def test_packed_rows_are_one_row():
    packed = {name: GOOD[name] for name in ("query", "key", "value")}
    with pytest.raises(ValueError, match=r"\b(query|cum_seqlens_q)\b"):
        attnmask.flash_attention(**packed, cum_seqlens_q=[0, 2, TQ], cum_seqlens_k=[0, 3, TK])


@pytest.mark.parametrize("name", ["query", "key", "value", "bias", "softmax_aux"])
def test_out_that_overlaps_an_input(name):
    """Refused, and nothing is written, even where only the last number is shared."""
    shape = {
        "query": (1, 4, 2, 8),
        "key": (1, 4, 2, 8),
        "value": (1, 4, 2, 8),
        "bias": (1, 2, 4, 4),
        "softmax_aux": (2, 3),
    }
    arguments = {each: np.ones(shape[each], F32) for each in ("query", "key", "value", name)}
    size = arguments[name].size
    buffer = np.ones(size + 64, F32)
    arguments[name] = buffer[:size].reshape(shape[name])
    for start in (0, size - 1):
        out = buffer[start : start + 64].reshape(1, 4, 2, 8)
        with pytest.raises(ValueError, match=r"\bout\b"):
            attnmask.flash_attention(**arguments, out=out)
        assert (buffer == 1).all()
    attnmask.flash_attention(**arguments, out=buffer[size:].reshape(1, 4, 2, 8))
    assert (buffer[:size] == 1).all()


@pytest.mark.parametrize("name", ["query", "key", "value", "attention_mask", "bias"])
def test_out_that_is_an_input_of_foreign_byte_order(name):
    """Only a copy of it is read, and yet it is not written to."""
    x = np.ones((1, 4, 4, 4), F32)
    given = x.astype(">f4")
    with pytest.raises(ValueError, match=rf"out must share no memory with {name}"):
        attnmask.flash_attention(**({"query": x, "key": x, "value": x} | {name: given}), out=given.view(F32))
    assert (given == 1).all()


def test_nothing_is_written_before_all_is_checked():
    out = np.full((B, TQ, H, DV), 77, F32)
    for more in ({"dropout_prob": 2.0}, {"causal_offset": [1, 2, 3]}, {"softmax_aux": zeros(H + 1, 2)}):
        with pytest.raises(ValueError, match=next(iter(more))):
            attnmask.flash_attention(**GOOD, **more, out=out)
    assert (out == 77).all()


def test_an_array_that_raises():
    class Raises:
        def __array__(self, dtype=None, copy=None):
            raise ZeroDivisionError("not today")

    for name in ("query", "key", "value", "attention_mask", "bias", "softmax_aux", "cum_seqlens_q"):
        with pytest.raises(ZeroDivisionError, match="not today"):
            attnmask.flash_attention(**(PACKED | {name: Raises()}))


def test_bad_out_of_packed_rows_is_told_without_the_batch():
    without = {name: PACKED[name][0] for name in ("query", "key", "value")}
    with pytest.raises(ValueError, match=rf"of float32 of shape \({TQ}, {H}, {DV}\), got float64 array"):
        attnmask.flash_attention(**(PACKED | without), out=np.zeros((TQ, H, DV)))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_an_axis_that_is_too_long(axis):
    shape = [1, 1, 1, 0]
    shape[axis] = 2**57
    endless = as_strided(np.zeros(1, F32), shape, (0, 0, 0, 0))
    with pytest.raises(ValueError, match="query must be of at most"):
        attnmask.flash_attention(endless, endless, endless)


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=lambda dtype: np.dtype(dtype).name)
def test_numbers_that_the_arithmetic_does_not_have(isa, dtype):
    """Caps and sinks are what they come closest to; of scales all are refused that would be infinite."""
    wide, narrow = (1.5e308, 1e-309) if dtype == F64 else (1e39, 1e-39)
    query, key = np.zeros((1, 5, 2, 8), dtype), np.ones((1, 7, 2, 8), dtype)
    value = np.arange(7).reshape(1, 7, 1, 1).repeat(2, 2).astype(dtype)
    mean = np.full((1, 5, 2, 1), 3.0)
    for cap in (wide, narrow, 5e-324, 1.7e308):
        got = attnmask.flash_attention(query, key, value, logits_soft_cap=cap)
        np.testing.assert_allclose(got.astype(F64), mean, rtol=1e-2)
    ones = attnmask.flash_attention(key, key, value, logits_soft_cap=wide)
    np.testing.assert_array_equal(ones, attnmask.flash_attention(key, key, value))
    with pytest.raises(ValueError, match=r"softmax_scale must be from -.*, got"):
        attnmask.flash_attention(query, key, value, softmax_scale=wide)
    if dtype == F64:
        return
    got, lse = attnmask.flash_attention_fwd(query, key, value, softmax_aux=[1e300])
    assert (got == 0).all()
    assert (lse == np.finfo(F32).max).all()
    got = attnmask.flash_attention(query, key, value, softmax_aux=[-1e300])
    np.testing.assert_allclose(got.astype(F64), mean, rtol=1e-2)


def test_any_kind_of_real_number():
    for scale in (
        Fraction(1, 2),
        np.float16(0.5),
        10**30,
        np.int8(2),
        ml_dtypes.bfloat16(0.5),
        np.array(0.5),
    ):
        got = attnmask.flash_attention(**GOOD, softmax_scale=scale)
        np.testing.assert_array_equal(got, attnmask.flash_attention(**GOOD, softmax_scale=float(scale)))


def test_floats_of_eight_bits():
    """As a mask they are zero or not, as numbers they are refused by name."""
    small = np.ones((TQ, TK), ml_dtypes.float8_e5m2)
    np.testing.assert_array_equal(
        attnmask.flash_attention(**GOOD, attention_mask=small), attnmask.flash_attention(**GOOD)
    )
    with pytest.raises(TypeError, match=r"bias must be float16, .*, got float8_e5m2 array"):
        attnmask.flash_attention(**GOOD, bias=small)
    with pytest.raises(ValueError, match=r"logits_dtype must be .*, got float8_e5m2"):
        attnmask.flash_attention(**GOOD, logits_dtype=small.dtype)


def test_the_keep_mask_into_any_strides():
    shape, memory = (3, 2, 5, 100), np.full((5, 3, 201, 2), 7, np.uint8).view(np.bool_)
    out = memory[::-1, :, 200:0:-2].transpose(1, 3, 0, 2)
    assert attnmask.dropout_keep_mask(3, 0.4, shape, out=out) is out
    np.testing.assert_array_equal(out, attnmask.dropout_keep_mask(3, 0.4, shape))
    assert (memory.view(np.uint8)[:, :, 1::2] == 7).all()


@pytest.mark.parametrize("name", ["seed", "prob", "shape"])
def test_bad_input_of_the_keep_mask(name):
    bad = {
        "seed": {TypeError: NO_INTEGER},
        "prob": {TypeError: [*NO_NUMBER, None], ValueError: [-0.1, 1.0, math.nan]},
        "shape": {
            TypeError: ["x", None, (1, 2, 3, 4.5)],
            ValueError: [(1, 2, 3), (1, 1, 1, 1, 1), (1, -1, 2, 2), (2**70, 1, 1, 1)],
        },
    }[name]
    for error, values in bad.items():
        for value in values:
            arguments = {"seed": 0, "prob": 0.5, "shape": (1, 1, 2, 2)} | {name: value}
            with pytest.raises(error, match=rf"\b{name}\b"):
                attnmask.dropout_keep_mask(*arguments.values())


def test_the_keep_mask_of_a_shape_as_an_array():
    keep = attnmask.dropout_keep_mask(3, 0.4, np.array([1, 2, 3, 4]))
    np.testing.assert_array_equal(keep, attnmask.dropout_keep_mask(3, 0.4, (1, 2, 3, 4)))


def test_a_keep_mask_that_is_too_large():
    for shape in [(2**31, 2**31, 2**31, 2**31), (1, 1, 2**45, 2**10)]:
        with pytest.raises((MemoryError, ValueError)):
            attnmask.dropout_keep_mask(0, 0.5, shape)


@pytest.mark.parametrize("name", ["outs", "lses"])
def test_bad_input_of_the_merge(name):
    out, lse = zeros(B, TQ, H, DV), zeros(B, H, TQ)
    bad = {
        "outs": {
            TypeError: [3, [None, None], [zeros(B, TQ, H, DV, dtype=int)] * 2, [out, out.astype(F64)]],
            ValueError: [[], [out], [out] * 3, [out, zeros(B, TQ, H, DV + 1)], [zeros(TQ), zeros(TQ)]],
        },
        "lses": {
            TypeError: [3, [None, None], [zeros(B, H, TQ, dtype=int)] * 2],
            ValueError: [[], [lse], [lse] * 3, [lse, zeros(B, H, TQ + 1)], [lse, zeros(B, TQ, H)]],
        },
    }[name]
    for error, values in bad.items():
        for value in values:
            arguments = {"outs": [out, out], "lses": [lse, lse]} | {name: value}
            with pytest.raises(error, match=r"\b(outs|lses)\b"):
                attnmask.merge_attention_states(*arguments.values())
