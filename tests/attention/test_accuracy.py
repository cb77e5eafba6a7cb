"""The error of attention and its gradients is about that of the naive formula in the same type."""

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
    padding,
    tensors,
    thinned,
    worst,
)
from flash_expected import (
    CASES,
    GRADIENT_CASES,
    GRADIENT_FACTORS,
    NAMES,
    GradientCase,
    assert_equal_bits,
    attend,
    check,
    check_form,
    dout_of,
    expected,
    expected_gradients,
    gradients,
    name_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import arrange

import attnmask
from attnmask import FlashAttentionGrads

pytestmark = pytest.mark.levels("turns", "amx")

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


@pytest.mark.levels("all", "amx")
@pytest.mark.parametrize("case", [*thinned(CASES, 3), *thinned(GRADIENT_CASES, 5)], ids=name_of)
def test_all_pairs_of_arguments(isa, set_threads, case):
    set_threads(case.threads)
    check(case)


@st.composite
def random_cases(draw, kind, factors, deepest):
    levels = {name: draw(st.sampled_from(choices)) for name, choices in factors.items()}
    levels |= {name: draw(st.integers(0, 140)) for name in ("queries", "keys")}
    levels |= {name: draw(st.integers(1, deepest)) for name in ("depth", "value_depth")}
    return kind(**levels, seed=draw(st.integers(0, 2**20)))


@given(case=random_cases(Case, FACTORS, 70))
def test_any_arguments(isa, set_threads, case):
    set_threads(case.threads)
    check(case)


@settings(max_examples=5 if SANITIZED else 20)
@given(case=random_cases(GradientCase, GRADIENT_FACTORS, 40))
def test_gradients_of_any_arguments(isa, set_threads, case):
    set_threads(case.threads)
    check(case)


@pytest.mark.levels("all", "amx")
@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
@pytest.mark.parametrize("kind", [Case, GradientCase])
def test_each_number_of_channels_and_keys(isa, kind, dtype):
    """Wherever vectors, halves of them and panels end."""
    for n in range(1, 74):
        check(kind(dtype, queries=13, keys=n, depth=n, value_depth=74 - n, batch=1, heads=(1, 1)))


# Logits of any size


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("scale", [1e-60, -1e-60, 0.0])
@pytest.mark.parametrize(
    "more", [{}, {"normalize": False}, {"soft_cap": 3.0}][: 1 if SANITIZED else 3], ids=str
)
def test_a_scale_that_is_nothing(isa, dtype, scale, more):
    """The scale is too small for the type of the logits: all live pairs have the same weight, dead ones none."""
    case = Case(dtype, 70, 70, 24, 40, 1, (2, 1), causal=True, scale=scale, **more)
    check(case)


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
    expected_gradients(arguments, dout_of(arguments)).check(gradients(arguments))
    rising = np.arange(80, dtype=F32) * 200  # a new maximum with every key
    for bias in (rising, rising[::-1], np.full(80, -3e38, F32), np.full(80, 3e38, F32)):
        got = attend(arguments, bias=bias, softmax_scale=0.0)
        assert np.isfinite(got[0]).all()
        assert np.isfinite(got[1]).all()
        given = arguments | {"bias": bias, "softmax_scale": 0.0}
        np.testing.assert_allclose(got[0], ref.flash_attention(**given).out, rtol=1e-5, atol=1e-6)
        grads, (exact, _) = gradients(given), ref.flash_attention_vjp(dout_of(given), **given)
        for name in ("query", "key", "value", "bias"):
            np.testing.assert_allclose(getattr(grads, name), getattr(exact, name), rtol=1e-4, atol=1e-4)


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
    """A tiny one makes all weights equal, and a huge one bends huge logits alone. Gradients are as finite as in a wider
    type.
    """
    for cap in CAPS[accumulator(dtype)]:
        arguments = tensors(queries, 80, dtype=dtype) | {"logits_soft_cap": cap}
        expected(arguments, case=(isa, dtype, cap)).check(*attend(arguments))
        expected_gradients(arguments, dout_of(arguments), case=(isa, dtype, cap)).check(gradients(arguments))
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


# Gradients of the bias and the sinks


@pytest.mark.parametrize("broadcast", list(itertools.product((True, False), repeat=4)), ids=str)
def test_bias_that_is_broadcast(isa, broadcast):
    """The gradient is summed over the axes of length 1, and over those that the bias does not have."""
    lengths = (2, 4, 40, 70)
    shape = tuple(1 if one else length for one, length in zip(broadcast, lengths, strict=True))
    rng = np.random.default_rng(1)
    for dtype, more in ((F32, {"causal": True, "causal_offset": 30}), (BF16, {"logits_soft_cap": 3.0})):
        arguments = tensors(40, 70, dtype=dtype) | more
        arguments["bias"] = rng.standard_normal(shape).astype(dtype)
        dout = dout_of(arguments)
        got = gradients(arguments, dout)
        expected_gradients(arguments, dout, case=(shape, dtype)).check(got)
        while arguments["bias"].ndim > 1 and arguments["bias"].shape[0] == 1:
            arguments["bias"] = arguments["bias"][0]
            fewer = gradients(arguments, dout).bias
            assert fewer.shape == arguments["bias"].shape
            assert fewer.tobytes() == got.bias.tobytes()


@pytest.mark.parametrize("bias_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bias_of_another_dtype(isa, dtype, bias_dtype):
    arguments = tensors(9, 11, depth=1, dtype=dtype)
    rng = np.random.default_rng(0)
    for shape, layout in (((2, 4, 9, 11), "strided"), ((4, 1, 11), "reversed"), ((9, 1), "swapped")):
        arguments["bias"] = arrange(rng.standard_normal(shape).astype(bias_dtype), layout)
        got = gradients(arguments)
        check_form(got, arguments, {"grad_bias": True}, (shape, layout))
        expected_gradients(arguments, dout_of(arguments)).check(got)
        expected(arguments).check(*attend(arguments))


def test_bias_that_repeats_itself(isa):
    """The gradient of a view with strides of zero has the shape of the view."""
    arguments = tensors(9, 11)
    row = np.random.default_rng(0).standard_normal(11).astype(F32)
    whole = gradients(arguments, bias=np.broadcast_to(row, (2, 4, 9, 11))).bias
    assert whole.shape == (2, 4, 9, 11)
    np.testing.assert_allclose(
        whole.sum(axis=(0, 1, 2)), gradients(arguments, bias=row).bias, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_bias_of_minus_infinity_has_no_gradient(isa, dtype):
    arguments = tensors(40, 70, dtype=dtype)
    live = padding(np.random.default_rng(3), 2, 40, 70, 4)
    arguments["bias"] = np.where(live, 0.5, -np.inf).astype(F32)
    got = gradients(arguments)
    assert (got.bias[~live] == 0).all()
    expected_gradients(arguments, dout_of(arguments)).check(got)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("normalize", [True, False])
def test_sinks(isa, dtype, normalize):
    arguments = tensors(9, 20, dtype=dtype) | {"causal": True, "normalize_output": normalize}
    dlse = np.random.default_rng(1).standard_normal((2, 4, 9)).astype(lse_dtype(dtype))
    rng = np.random.default_rng(2)
    for shape, kind in itertools.product(((3,), (4, 3), (1,), (4, 1)), (*FLOATS, np.dtype(int))):
        sinks = (3 * rng.standard_normal(shape)).astype(kind)
        got = gradients(arguments, dlse=dlse, softmax_aux=sinks).softmax_aux
        assert (got.shape, got.dtype) == (shape, F64 if kind.kind == "i" else kind)
        given = arguments | {"softmax_aux": sinks.astype(got.dtype)}
        expected_gradients(given, dout_of(arguments), dlse).check(
            FlashAttentionGrads(None, None, None, None, got)
        )


@pytest.mark.parametrize("queries", [1, 700, 3000])
def test_many_sinks(isa, set_threads, queries):
    """Their sums over queries are divided, in the same way for any number of threads."""
    rng = np.random.default_rng(queries)
    query, key, value, dout = (rng.standard_normal((1, n, 2, 8)) for n in (queries, 20, 20, queries))
    sinks = rng.standard_normal((2, 90))
    got = []
    for threads in (1, 2, 3):
        set_threads(threads)
        (out, lse), vjp = attnmask.flash_attention_vjp(
            query, key, value, softmax_aux=sinks, return_lse=True, grad_softmax_aux=True
        )
        got.append(vjp(dout).softmax_aux)
    weights = np.exp(sinks[:, None] - lse[0, :, :, None])
    wanted = -(weights * (dout * out).sum(axis=3)[0].T[:, :, None]).sum(axis=1)
    np.testing.assert_allclose(got[0], wanted, rtol=1e-10, atol=1e-11)
    assert got[0].tobytes() == got[1].tobytes() == got[2].tobytes()


def test_sinks_that_are_none_or_nothing(isa):
    arguments = tensors(9, 11)
    for shape in ((0,), (4, 0)):
        got = gradients(arguments, softmax_aux=np.zeros(shape, F32))
        assert (got.softmax_aux.shape, got.softmax_aux.dtype) == (shape, F32)
        assert_equal_bits(got._replace(softmax_aux=None), gradients(arguments), shape)
    got = gradients(arguments, softmax_aux=np.array([-np.inf, 1, -np.inf], F32)).softmax_aux
    assert got[1] != 0
    assert (got[[0, 2]] == 0).all()


# Logits of any size


def test_the_largest_logits_share_the_maximum(isa):
    """Unnormalized: the gradient of the maximum is shared evenly by equal logits and sinks."""
    arguments = tensors(5, 70) | {"softmax_scale": 0.0, "normalize_output": False}
    for sinks in (None, np.array([2.0, 1.0], F32), np.array([3.0, -1.0], F32), np.array([2.0, 2.0], F32)):
        bias = np.where(np.arange(70) % 23 == 1, 2, np.arange(70) % 2).astype(F32)
        given = arguments | {"bias": bias, "softmax_aux": sinks}
        expected_gradients(given, dout_of(given), case=sinks).check(gradients(given))


NEAR = {F32: 1e-5, F64: 1e-13}
SHIFTED = [
    {},
    {"causal": True, "causal_offset": 30},
    {"sliding_window": (9, 40), "dropout_prob": 0.3},
    {"softmax_aux": np.array([1.0, -3.0])},
    {"softmax_aux": np.array([1.0, -3.0]), "normalize_output": False},
]


@pytest.mark.parametrize("more", SHIFTED, ids=str)
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_what_all_logits_of_a_row_share_does_not_count(isa, dtype, more):
    """A bias that is the same for a whole row has no effect if it is added exactly, as here to integers.

    lse then has hardly a correct digit after the decimal point.
    """
    arguments = {
        name: np.rint(array) if name != "value" else array
        for name, array in tensors(20, 80, dtype=dtype).items()
    }
    arguments |= more | {"softmax_scale": 1.0}
    dlse = np.random.default_rng(1).standard_normal((2, 4, 20)).astype(dtype)
    plain = gradients(arguments, dlse=dlse, bias=np.zeros((20, 1), dtype))
    for size in np.array([1, -1], dtype) / np.finfo(dtype).eps / 4:
        given = arguments | {"bias": np.full((20, 1), size)}
        if "softmax_aux" in more:
            given["softmax_aux"] = more["softmax_aux"] + size
        for name, one, other in zip(NAMES, gradients(given, dlse=dlse), plain, strict=True):
            if one is not None:
                np.testing.assert_allclose(one, other, rtol=NEAR[dtype], atol=10 * NEAR[dtype], err_msg=name)


SWALLOWED = [
    *SHIFTED[:3],
    {"softmax_aux": np.array([1.0, -3.0])},
    {"logits_soft_cap": 1e30},
    {"normalize_output": False},
]


@pytest.mark.parametrize("more", SWALLOWED, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_bias_beside_which_products_are_nothing(isa, dtype, more):
    """A bias so large that adding q k does not change it makes all logits of a row equal."""
    arguments = tensors(40, 80, dtype=dtype) | more
    wide = accumulator(dtype)
    keep = attnmask.dropout_keep_mask(0, 0.3, (2, 4, 40, 80)) if "dropout_prob" in more else None
    dout, dlse = dout_of(arguments), np.random.default_rng(1).standard_normal((2, 4, 40)).astype(wide)
    large = np.arange(40) % 5 == 2
    plain = gradients(arguments, dout, dlse, bias=np.zeros((40, 1), wide))
    for size in (np.finfo(wide).min, np.finfo(wide).max, 1e37, -1e37):
        given = arguments | {"bias": np.where(large[:, None], wide(size), 0)}
        if size > 0 and "softmax_aux" in more:
            given["softmax_aux"] = np.array([size, -3.0])
        got = gradients(given, dout, dlse)
        exact, sizes = ref.flash_attention_vjp(dout, dlse, **given, keep=keep, dtype=wide)
        for name in ("query", "key", "value", "bias", "softmax_aux"):
            gradient, right, scale = (getattr(each, name) for each in (got, exact, sizes))
            if gradient is None:
                continue
            limit = 2 * float(ml_dtypes.finfo(dtype).eps) + (8e-15 if dtype == F64 else 8e-5)
            error = worst(gradient, right, scale, gradient.dtype)
            assert error <= limit, (name, size, error)
        if "softmax_aux" not in given:
            assert got.query[:, ~large].tobytes() == plain.query[:, ~large].tobytes()


def test_a_huge_soft_cap_of_large_logits(isa):
    """Their quotients are below the least normal number, where numbers are flushed to zero for gradients."""
    query = np.full((1, 4, 1, 8), -10, F32)
    key = np.full((1, 4, 1, 8), 10, F32) + np.arange(4, dtype=F32)[None, :, None, None] / 100
    for cap in (1e30, 1e38):
        arguments = {"query": query, "key": key, "value": query, "logits_soft_cap": cap}
        expected_gradients(arguments, dout_of(arguments)).check(gradients(arguments))


# Merging


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("sinks", [False, True])
def test_the_gradient_of_merged_parts_is_that_of_the_whole(isa, dtype, sinks):
    """Gradients pass through out and lse of each part, one of which is dead for some rows."""
    arguments = tensors(20, 90, dtype=dtype) | {"causal": True}
    aux = {"softmax_aux": np.array([0.3, 1.0], dtype)} if sinks else {}
    dout = dout_of(arguments)
    dlse = np.random.default_rng(1).standard_normal((2, 4, 20)).astype(dtype)
    whole = gradients(arguments, dout, dlse, causal_offset=50, **aux)
    results, vjps = [], []
    cuts = list(itertools.pairwise((0, 13, 60, 90)))
    for start, end in cuts:
        part = arguments | {name: arguments[name][:, start:end] for name in ("key", "value")}
        more = aux | {"grad_softmax_aux": True} if sinks and not start else {}
        result, vjp = attnmask.flash_attention_vjp(**part, causal_offset=50 - start, return_lse=True, **more)
        results.append(result)
        vjps.append(vjp)
    _, merge_vjp = attnmask.merge_attention_states_vjp(*zip(*results, strict=True))
    parts = [vjp(*each) for vjp, *each in zip(vjps, *merge_vjp(dout, dlse), strict=True)]
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == F32 else {"rtol": 1e-12, "atol": 1e-12}
    np.testing.assert_allclose(sum(part.query for part in parts), whole.query, **near)
    for name in ("key", "value"):
        joined = np.concatenate([getattr(part, name) for part in parts], axis=1)
        np.testing.assert_allclose(joined, getattr(whole, name), **near)
    if sinks:
        np.testing.assert_allclose(parts[0].softmax_aux, whole.softmax_aux, **near)


@pytest.mark.parametrize("shift", [0, 2000, -2000])
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_parts_of_the_keys_with_the_lse_of_all(isa, dtype, shift):
    """As in ring attention: gradients of the queries add up if each part gets the out and lse of all keys."""
    arguments = tensors(40, 90, dtype=dtype)
    dout, shift = dout_of(arguments), np.full((1, 1), shift, dtype)
    whole = gradients(arguments, dout)
    out, lse = attnmask.flash_attention_fwd(**arguments, bias=shift)
    parts = []
    for keys in (slice(0, 30), slice(30, 31), slice(31, 90)):
        part = {name: array if name == "query" else array[:, keys] for name, array in arguments.items()}
        parts.append(attnmask.flash_attention_bwd(dout, **part, out=out, lse=lse, bias=shift))
    rounding = 4 * np.finfo(dtype).eps * max(1, abs(shift).item())  # of lse, and so of weights
    near = {"rtol": rounding + 1e-13, "atol": 50 * rounding}
    np.testing.assert_allclose(sum(part.query for part in parts), whole.query, **near)
    for name in ("key", "value"):
        joined = np.concatenate([getattr(part, name) for part in parts], axis=1)
        np.testing.assert_allclose(joined, getattr(whole, name), **near)


# Other libraries


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_beside_torch(isa, causal, dtype):
    torch = pytest.importorskip("torch")
    arguments = tensors(50, 50, dtype=np.dtype(dtype))
    dout = dout_of(arguments)
    inputs = [torch.from_numpy(array).requires_grad_() for array in arguments.values()]
    heads_first = [array.transpose(1, 2) for array in inputs]
    heads_first[1:] = [array.repeat_interleave(2, dim=1) for array in heads_first[1:]]
    out = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=causal).transpose(1, 2)
    ours = attnmask.flash_attention(**arguments, causal=causal)
    np.testing.assert_allclose(ours, out.detach().numpy(), rtol=1e-5, atol=2e-6)
    theirs = torch.autograd.grad(out, inputs, torch.from_numpy(dout))
    for one, other in zip(gradients(arguments, dout, causal=causal), theirs, strict=False):
        np.testing.assert_allclose(one, other.numpy(), rtol=1e-4, atol=1e-5)
