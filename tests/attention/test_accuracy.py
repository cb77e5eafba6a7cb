"""The error of attention is about that of the naive formula in the same type, for any arguments and logits."""

import itertools

import ml_dtypes
import numpy as np
import pytest
import reference_flash as ref
from environment import SANITIZED
from flash_cases import (
    BF16,
    CAPS,
    F32,
    F64,
    FACTORS,
    FLOATS,
    Case,
    accumulator,
    lse_dtype,
    tensors,
    thinned,
    worst,
)
from flash_expected import CASES, attend, expected, expected_of, run
from hypothesis import given
from hypothesis import strategies as st

import attnmask

# All pairs of arguments


def test_all_pairs_meet():
    """Any two levels occur together in CASES, and most of these have live pairs."""
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


# Logits of any size


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("scale", [1e-60, -1e-60, 0.0])
@pytest.mark.parametrize(
    "more", [{}, {"normalize": False}, {"soft_cap": 3.0}][: 1 if SANITIZED else 3], ids=str
)
def test_a_scale_that_is_nothing(isa, dtype, scale, more):
    """The scale is too small for the type of the logits: all live pairs have the same weight, dead ones none."""
    case = Case(dtype, 70, 70, 24, 40, 1, (2, 1), causal=True, scale=scale, **more)
    expected_of(case).check(*run(case, case.arguments()))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("queries", [1, 70])
def test_a_key_that_outweighs_all_others_gives_its_value(isa, dtype, queries):
    """The result is exact wherever that key is, although weights are rounded and relative to earlier keys."""
    rng = np.random.default_rng(0)
    value = rng.standard_normal((1, 300, 2, 40)).astype(dtype)
    for place in (0, 31, 150, 299):
        key = rng.standard_normal((1, 300, 2, 16)).astype(dtype)
        key[0, place] = 32
        out = attnmask.flash_attention(np.ones((1, queries, 2, 16), dtype), key, value)
        assert (out == value[:, place : place + 1]).all(), place


def test_extreme_logits(isa):
    """Differences of large logits are exact, and logits far below the maximum have no weight."""
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
    """Keys times the scale would overflow, but no scale makes products with small queries overflow."""
    arguments = tensors(queries, 100, heads=2, dtype=dtype)
    info = ml_dtypes.finfo(dtype)
    rng = np.random.default_rng(0)
    for name, size in (("query", 8 * float(info.smallest_normal)), ("key", 0.99 * float(info.max))):
        some = rng.uniform(0.5, 1, arguments[name].shape) * rng.choice([-1, 1], arguments[name].shape)
        arguments[name] = (size * some).astype(dtype)
    expected(arguments | {"softmax_scale": scale}).check(*attend(arguments, softmax_scale=scale))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("queries", [1, 40])
def test_soft_caps_near_the_ends_of_the_range(isa, dtype, queries):
    """A tiny one makes all weights equal, and a huge one bends huge logits alone."""
    for cap in CAPS[accumulator(dtype)]:
        arguments = tensors(queries, 80, dtype=dtype) | {"logits_soft_cap": cap}
        expected(arguments, case=(isa, dtype, cap)).check(*attend(arguments))
        if cap < 1:
            continue
        bias = np.linspace(-1, 1, 80).astype(accumulator(dtype)) * cap
        out, lse = attend(arguments, bias=bias)
        assert (out == arguments["value"][:, -1:].repeat(2, 2)).all(), cap
        np.testing.assert_allclose(lse, cap * np.tanh(1.0), rtol=1e-6, err_msg=str(cap))


@pytest.mark.parametrize("sink", [-1e37, -1e20, -1e10, 1e10, 1e20, 1e37, "lowest", "highest"])
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_sinks_of_any_size(isa, dtype, sink):
    """A sink far below all logits has no effect; one far above them takes all of the weight."""
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


# Merging


@given(
    dtype=st.sampled_from(FLOATS),
    cuts=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    causal=st.booleans(),
    sinks=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_parts_merge_into_the_whole(isa, dtype, cuts, causal, sinks, seed):
    """The parts are disjoint sets of keys, some of them empty or dead for some rows; one part has the sinks."""
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
