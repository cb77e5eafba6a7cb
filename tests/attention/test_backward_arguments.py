"""Gradients for arguments of any form, from both functions, and from repeated calls."""

import gc

import numpy as np
import pytest
from flash_backward_expected import GradientCase, assert_equal_bits, check_form, dout_of, expected
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
