"""Gradients for arguments of any form, from both functions, and from repeated calls."""

import gc
import itertools

import numpy as np
import pytest
from flash_backward_expected import GradientCase, assert_equal_bits, check_form, dout_of, expected, gradients
from flash_cases import F32, F64, FLOATS, laid_out, tensors
from layouts import arrange

import attnmask
from attnmask._attention.forward import attend_for_gradients

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
    for layout, with_dlse in (
        ("contiguous", False),
        ("strided", True),
        ("heads first", True),
        ("misaligned", False),
    ):
        case = GradientCase(dtype, 33, 70, 16, 19, with_dlse=with_dlse, **more, seed=5)
        arguments, flags, (dout, dlse) = case.arguments(), case.flags(), case.cotangents()
        both, vjp = attnmask.flash_attention_vjp(**arguments, return_lse=True, **flags)
        fwd = attnmask.flash_attention_fwd(**arguments)
        for one, other in zip(both, fwd, strict=True):
            assert one.tobytes() == other.tobytes(), case
        out, lse = laid_out(fwd[0], layout), arrange(fwd[1], "strided" if layout == "heads first" else layout)
        bwd = attnmask.flash_attention_bwd(dout=dout, out=out, lse=lse, dlse=dlse, **arguments, **flags)
        check_form(bwd, arguments, flags, case)
        if dtype in (F32, F64):
            assert_equal_bits(vjp(dout, dlse), bwd, case)
            continue
        right = expected(arguments, dout, dlse, case.keep(), case)
        right.check(bwd)
        right.check(vjp(dout, dlse))
        wide = attend_for_gradients(arguments)[2]
        assert wide.dtype == F32
        np.testing.assert_array_equal(wide.astype(dtype), fwd[0])
        unrounded = {"out": laid_out(wide, layout), "lse": lse, "dlse": dlse}
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


def test_positional_arguments(isa):
    """The arguments of `flash_attention`, in its order."""
    query, key, value = tensors().values()
    rng = np.random.default_rng(0)
    mask, bias = rng.random((2, 1, 40, 50)) < 0.7, rng.standard_normal((1, 4, 40, 50)).astype(F32)
    rest = (mask, bias, 0.2, 0.25, True, 7, None, None, (9, 3), attnmask.FwdParams(32, 32))
    rest += (attnmask.BwdParams(), 5.0, np.ones(2, F32), False, None, F32)
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
    flags = {"grad_bias": True, "grad_softmax_aux": True}
    out, vjp = attnmask.flash_attention_vjp(query, key, value, *rest, **flags)
    lse = attnmask.flash_attention_fwd(query, key, value, *rest)[1]
    right = expected(by_name, dout, None, keep, "positional")
    right.check(vjp(dout))
    right.check(attnmask.flash_attention_bwd(dout, query, key, value, out, lse, *rest, **flags))


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


def test_lists_subclasses_and_numpy_scalars(isa):
    class Subclass(np.ndarray):
        pass

    arguments = tensors(5, 6, dtype=F64) | {"bias": np.ones((5, 6)), "softmax_aux": np.array([1.0, 2.0])}
    dout, dlse = dout_of(arguments), np.ones((2, 4, 5))
    right = expected(arguments | {"causal": True}, dout, dlse)
    flags = {"grad_bias": np.True_, "grad_softmax_aux": True, "causal": True}
    for convert in (np.ndarray.tolist, lambda array: array.view(Subclass)):
        given = {name: convert(array) for name, array in arguments.items()}
        (out, lse), vjp = attnmask.flash_attention_vjp(**given, **flags, return_lse=np.True_)
        assert type(out) is np.ndarray
        got = vjp(convert(dout), convert(dlse))
        check_form(got, arguments, flags, convert)
        right.check(got)
        rest = {"out": convert(out), "lse": convert(lse), "dlse": convert(dlse)}
        right.check(attnmask.flash_attention_bwd(convert(dout), **given, **rest, **flags))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_hints_change_rounding_only(isa, dtype):
    arguments = tensors(70, 150, dtype=dtype) | {"causal": True, "causal_offset": 30}
    right = expected(arguments, dout_of(arguments))
    for q_blocksize, kv_blocksize in itertools.product((None, 1, 64, 2**40), repeat=2):
        right.check(gradients(arguments, bwd_params=attnmask.BwdParams(q_blocksize, kv_blocksize)))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("at", range(7))
@pytest.mark.parametrize("normalize", [True, False])
def test_an_axis_of_length_zero(isa, dtype, normalize, at):
    sizes = [2, 3, 4, 2, 5, 8, 6]
    sizes[at] = 0
    batch, queries, keys, groups, kv_heads, depth, value_depth = sizes
    heads = groups * kv_heads
    shapes = {
        "query": (batch, queries, heads, depth),
        "key": (batch, keys, kv_heads, depth),
        "value": (batch, keys, kv_heads, value_depth),
    }
    arguments = {name: np.ones(shape, dtype) for name, shape in shapes.items()}
    arguments |= {
        "bias": np.zeros((queries, keys), dtype),
        "softmax_aux": np.ones(2, dtype),
        "softmax_scale": 1.0,
        "normalize_output": normalize,
    }
    if heads == 0:
        try:
            attnmask.flash_attention(**arguments)
        except ValueError:
            return
    dout = np.ones((batch, queries, heads, value_depth), dtype)
    got = gradients(arguments, dout)
    check_form(got, arguments, {"grad_bias": True, "grad_softmax_aux": True}, at)
    expected(arguments, dout).check(got)
