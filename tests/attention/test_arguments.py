"""Attention takes its arguments in any form, type and shape, and gives the same for the same numbers."""

import gc
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from flash_bad_input import GOOD, TK, TQ
from flash_cases import F32, F64, FLOATS, tensors
from flash_expected import (
    GradientCase,
    assert_equal_bits,
    attend,
    check_form,
    dout_of,
    expected,
    expected_gradients,
    gradients,
)
from layouts import arrange

import attnmask
from attnmask._attention import forward as _flash
from attnmask._attention.forward import attend_for_gradients

pytestmark = pytest.mark.levels("turns", "amx")

# Forms


def test_positional_arguments(isa):
    """In the order of the seed; what it does not have comes by name only. Gradients take them in this order, too."""
    query, key, value = tensors().values()
    rng = np.random.default_rng(0)
    mask, bias = rng.random((2, 1, 40, 50)) < 0.7, rng.standard_normal((1, 4, 40, 50)).astype(F32)
    rest = (mask, bias, 0.2, 0.25, True, 7, None, None, (9, 3))
    rest += (attnmask.FwdParams(32, 32), attnmask.BwdParams(), 5.0, np.ones(2, F32), False, None, F32)
    by_name = {
        "query": query,
        "key": key,
        "value": value,
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
    keep, dout = attnmask.dropout_keep_mask(7, 0.25, (2, 4, 40, 50)), dout_of(by_name)
    right = expected(by_name, keep, "positional")
    right.check(attnmask.flash_attention(query, key, value, *rest))
    right.check(*attnmask.flash_attention_fwd(**by_name, dropout_seed=7))
    flags = {"grad_bias": True, "grad_softmax_aux": True}
    out, vjp = attnmask.flash_attention_vjp(query, key, value, *rest, **flags)
    lse = attnmask.flash_attention_fwd(query, key, value, *rest)[1]
    right = expected_gradients(by_name, dout, None, keep, "positional")
    right.check(vjp(dout))
    right.check(attnmask.flash_attention_bwd(dout, query, key, value, out, lse, *rest, **flags))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_calls_that_the_core_takes_by_itself(monkeypatch, dtype):
    """The usual ones are not looked at in Python, and give the same as the others."""
    arguments = tensors(dtype=dtype)
    cases = [
        {},
        {"causal": True, "causal_offset": 0},
        {"causal": True, "causal_offset": 7, "softmax_scale": 0.3},
        {"causal": True, "causal_offset": -(2**40)},
        {"causal": True, "causal_offset": "bottom-right"},
        {"softmax_scale": 0.0},
    ]
    subclass = {name: array.view(np.recarray) for name, array in arguments.items()}
    expected_ones = [attend(subclass, **more) for more in cases]
    monkeypatch.setattr(_flash, "read_problem", None)
    for more, right in zip(cases, expected_ones, strict=True):
        out = np.empty_like(right[0])
        both = attend(arguments, **more), attend(arguments, **more, out=out)
        assert both[1][0] is out
        for got in both:
            assert [x.tobytes() for x in got] == [x.tobytes() for x in right], more


# Types


def test_any_kind_of_real_number():
    for scale in (Fraction(1, 2), 10**30):
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


# Memory and shapes


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
    if groups * kv_heads:
        check_gradients_of_length_zero(arguments, queries, keys)


def check_gradients_of_length_zero(arguments, queries, keys):
    dtype = arguments["query"].dtype
    more = {"bias": np.zeros((queries, keys), dtype), "softmax_aux": np.ones(2, dtype), "softmax_scale": 1.0}
    for normalize in (True, False):
        given = arguments | more | {"normalize_output": normalize}
        dout = dout_of(given)
        got = gradients(given, dout)
        check_form(got, given, {"grad_bias": True, "grad_softmax_aux": True}, normalize)
        expected_gradients(given, dout).check(got)


# --- Gradients ---


FORMS = [
    {},
    {"causal": True, "offset": "bottom-right", "sinks": "[H, S]", "bias": "[H, 1, Tk]"},
    {"packing": "flat", "window": 5, "sinks": "[S]", "bias": "[Tq, Tk]"},
    {"packing": "packed", "causal": True, "dropout": 0.3},
    {"normalize": False, "mask": "dense", "soft_cap": 2.0},
]


@pytest.mark.parametrize("more", FORMS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bwd_gives_the_same_as_vjp(isa, dtype, more):
    """Given the results of `flash_attention_fwd`, in any layout; but for their rounding, which vjp does without."""
    layouts = {"contiguous": False, "strided": True, "heads first": True, "misaligned": False}
    for layout, with_dlse in layouts.items():
        case = GradientCase(dtype, 33, 70, 16, 19, with_dlse=with_dlse, **more, seed=5)
        arguments, flags, (dout, dlse) = case.arguments(), case.flags(), case.cotangents()
        both, vjp = attnmask.flash_attention_vjp(**arguments, return_lse=True, **flags)
        fwd = attnmask.flash_attention_fwd(**arguments)
        for one, other in zip(both, fwd, strict=True):
            assert one.tobytes() == other.tobytes(), case
        out, lse = arrange(fwd[0], layout), arrange(fwd[1], "strided" if layout == "heads first" else layout)
        bwd = attnmask.flash_attention_bwd(dout=dout, out=out, lse=lse, dlse=dlse, **arguments, **flags)
        check_form(bwd, arguments, flags, case)
        if dtype in (F32, F64):
            assert_equal_bits(vjp(dout, dlse), bwd, case)
            continue
        right = expected_gradients(arguments, dout, dlse, case.keep(), case)
        right.check(bwd)
        right.check(vjp(dout, dlse))
        wide = attend_for_gradients(arguments)[2]
        assert wide.dtype == F32
        np.testing.assert_array_equal(wide.astype(dtype), fwd[0])
        unrounded = {"out": arrange(wide, layout), "lse": lse, "dlse": dlse}
        bwd = attnmask.flash_attention_bwd(dout=dout, **unrounded, **arguments, **flags)
        assert_equal_bits(vjp(dout, dlse), bwd, case)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_types_of_a_result(dtype):
    """Its own, and float32 in the place of sixteen bits."""
    arguments = tensors(5, 6, dtype=dtype)
    out, lse = attnmask.flash_attention_fwd(**arguments)
    for other in {np.dtype(each) for each in FLOATS} - {out.dtype}:
        given = {"out": out.astype(other), "lse": lse, **arguments}
        if other == F32 and out.itemsize == 2:
            attnmask.flash_attention_bwd(out, **given)
        else:
            with pytest.raises(TypeError, match=f"out must be {out.dtype}, got"):
                attnmask.flash_attention_bwd(out, **given)


def test_vjp_may_be_called_again(isa):
    """It keeps what it needs, and calls do not affect each other."""
    arguments = tensors() | {"bias": np.zeros((40, 50), F32)}
    dout = dout_of(arguments)
    both, vjp = attnmask.flash_attention_vjp(**arguments, grad_bias=True, return_lse=True)
    first = vjp(dout)
    bits = [None if each is None else each.tobytes() for each in first]
    dlse = np.ones(both[1].shape, F32)
    vjp(np.zeros_like(dout), dlse)
    del arguments, both
    gc.collect()
    assert [None if each is None else each.tobytes() for each in first] == bits
    assert_equal_bits(first, vjp(dout), "again")
    only, nothing = vjp(0 * dout, dlse), vjp(0 * dout, 0 * dlse)
    assert only.query.any()
    assert not any(each.any() for each in nothing if each is not None)
    total = vjp(dout, dlse)
    for name in ("query", "key", "value", "bias"):
        parts = getattr(first, name) + getattr(only, name)
        np.testing.assert_allclose(getattr(total, name), parts, rtol=1e-4, atol=1e-4)
