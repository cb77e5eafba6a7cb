"""The error of gradients is about that of the naive formula in the same type, for any arguments and logits."""

import itertools

import ml_dtypes
import numpy as np
import pytest
import reference_flash as ref
from environment import SANITIZED
from flash_backward_expected import (
    CASES,
    GRADIENT_FACTORS,
    NAMES,
    GradientCase,
    assert_equal_bits,
    check_form,
    dout_of,
    expected,
    expected_of,
    gradients,
    run,
)
from flash_cases import BF16, CAPS, F32, F64, FLOATS, accumulator, lse_dtype, padding, tensors, thinned, worst
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import arrange

import attnmask
from attnmask import FlashAttentionGrads

# All pairs of arguments


@pytest.mark.parametrize("case", thinned(CASES, 5), ids=lambda case: str(case.seed))
def test_all_pairs_of_arguments(isa, set_threads, case):
    set_threads(case.threads)
    expected_of(case).check(run(case, case.arguments()))


@st.composite
def random_cases(draw):
    levels = {name: draw(st.sampled_from(choices)) for name, choices in GRADIENT_FACTORS.items()}
    levels |= {name: draw(st.integers(0, 140)) for name in ("queries", "keys")}
    levels |= {name: draw(st.integers(1, 40)) for name in ("depth", "value_depth")}
    return GradientCase(**levels, seed=draw(st.integers(0, 2**20)))


@settings(max_examples=5 if SANITIZED else 20)
@given(case=random_cases())
def test_any_arguments(isa, set_threads, case):
    set_threads(case.threads)
    expected_of(case).check(run(case, case.arguments()))


# The bias and the sinks


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
        expected(arguments, dout, case=(shape, dtype)).check(got)
        while arguments["bias"].ndim and arguments["bias"].shape[0] == 1:
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
        expected(arguments, dout_of(arguments)).check(got)


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
    expected(arguments, dout_of(arguments)).check(got)


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
        expected(given, dout_of(arguments), dlse).check(FlashAttentionGrads(None, None, None, None, got))


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
        expected(given, dout_of(given), case=sinks).check(gradients(given))


def test_extreme_logits(isa):
    arguments = tensors(20, 80)
    arguments["bias"] = np.where(np.arange(80) % 7 == 0, 0, -1e4).astype(F32)
    expected(arguments, dout_of(arguments)).check(gradients(arguments))
    rising = np.arange(80, dtype=F32) * 200
    for bias in (rising, rising[::-1]):
        given = arguments | {"bias": bias, "softmax_scale": 0.0}
        got = gradients(given)
        exact, _ = ref.flash_attention_vjp(dout_of(given), **given)
        for name in ("query", "key", "value", "bias"):
            np.testing.assert_allclose(getattr(got, name), getattr(exact, name), rtol=1e-4, atol=1e-4)


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
    """In rows where the bias is, say, the lowest number of the type, all logits are equal and have the same weight."""
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


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_soft_caps_near_the_ends_of_the_range(isa, dtype):
    """Gradients are as finite as in a wider type, and as near to them as for any cap."""
    for cap in CAPS[accumulator(dtype)]:
        arguments = tensors(40, 80, dtype=dtype) | {"logits_soft_cap": cap}
        expected(arguments, dout_of(arguments), case=(isa, dtype, cap)).check(gradients(arguments))


def test_a_huge_soft_cap_of_large_logits(isa):
    """Their quotients are below the least normal number, where numbers are flushed to zero for gradients."""
    query = np.full((1, 4, 1, 8), -10, F32)
    key = np.full((1, 4, 1, 8), 10, F32) + np.arange(4, dtype=F32)[None, :, None, None] / 100
    for cap in (1e30, 1e38):
        arguments = {"query": query, "key": key, "value": query, "logits_soft_cap": cap}
        expected(arguments, dout_of(arguments)).check(gradients(arguments))


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
