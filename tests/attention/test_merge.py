"""Merging partial attention results, and its gradients: values, accuracy, layouts, dead parts, threads, errors."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts import LAYOUTS, arrange

import attnmask

BF16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = (np.dtype("float16"), BF16, np.dtype("float32"), np.dtype("float64"))
ROUNDING = {FLOATS[0]: 2.0**-11, BF16: 2.0**-8, FLOATS[2]: 2.0**-24, FLOATS[3]: 2.0**-53}


def merged(outs, lses):
    """The definition in float64, row by row."""
    outs = [np.asarray(out, np.float64) for out in outs]
    lses = [np.asarray(lse, np.float64) for lse in lses]
    out, lse = np.zeros(outs[0].shape), np.full(lses[0].shape, -np.inf)
    for *batch, head, token in np.ndindex(lse.shape):
        row, place = (*batch, token, head), (*batch, head, token)
        live = [i for i, part in enumerate(lses) if not np.isinf(part[place])]
        if not live:
            continue
        logits = np.array([lses[i][place] for i in live])
        lse[place] = logits.max() + np.log(np.exp(logits - logits.max()).sum())
        out[row] = sum(np.exp(lses[i][place] - lse[place]) * outs[i][row] for i in live)
    return out, lse


def wide(dtype):
    return np.dtype("float64" if dtype == np.float64 else "float32")


def parts(seed, count, shape, dtype, dead=0.2, spread=3.0):
    """Random outs and lses; the out of a dead part, whose lse is infinite with either sign, is NaN."""
    rng = np.random.default_rng(seed)
    *batch, tokens, heads, _ = shape
    outs = rng.standard_normal((count, *shape))
    lses = rng.standard_normal((count, *batch, heads, tokens)) * spread
    dead_parts = rng.random(lses.shape) < dead
    lses[dead_parts] = rng.choice([-np.inf, np.inf], dead_parts.sum())
    outs[np.swapaxes(dead_parts, -1, -2)] = np.nan
    return outs.astype(dtype), lses.astype(wide(dtype))


def check(outs, lses, dtype, case):
    got_out, got_lse = attnmask.merge_attention_states(outs, lses)
    out, lse = merged(outs, lses)
    assert (got_out.dtype, got_lse.dtype) == (dtype, wide(dtype)), case
    assert (got_out.shape, got_lse.shape) == (out.shape, lse.shape), case
    assert got_out.flags.c_contiguous, case
    assert got_lse.flags.c_contiguous, case
    step = ROUNDING[wide(dtype)]
    largest = max((np.nanmax(np.abs(np.asarray(part, np.float64)), initial=0) for part in outs), default=0)
    largest_lse = np.max(np.abs(lse[np.isfinite(lse)]), initial=1)
    error = largest * (ROUNDING[dtype] + step * (8 + 2 * len(outs) + 4 * largest_lse))
    error += 2.0**-25 if dtype == np.float16 else 0  # half of the smallest number of float16
    np.testing.assert_allclose(np.asarray(got_out, np.float64), out, rtol=0, atol=error, err_msg=repr(case))
    np.testing.assert_allclose(
        got_lse, lse, rtol=0, atol=step * (8 + len(outs) + 2 * largest_lse), err_msg=repr(case)
    )


PARTS = {
    "seed": st.integers(0, 2**32 - 1),
    "count": st.integers(1, 6),
    "batch": st.none() | st.integers(0, 3),
    "tokens": st.integers(0, 9),
    "heads": st.integers(0, 4),
    "channels": st.sampled_from([0, 1, 5, 64, 256, 300, 777]),
    "dtype": st.sampled_from(FLOATS),
    "layout": st.sampled_from(LAYOUTS),
}


def test_stacked_and_single():
    outs, lses = parts(2, 3, (2, 5, 3, 8), np.float32)
    stacked = attnmask.merge_attention_states(outs, lses)
    for sequence in (list, tuple):
        one_by_one = attnmask.merge_attention_states(sequence(outs), sequence(lses))
        for a, b in zip(stacked, one_by_one, strict=True):
            np.testing.assert_array_equal(a, b)
    nested = attnmask.merge_attention_states([[[[1.0]]], [[[3.0]]]], [[[0.0]], [[0.0]]])
    assert (nested[0].item(), nested[0].dtype) == (2.0, np.float64)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_part_is_itself(dtype):
    outs, lses = parts(3, 1, (2, 5, 3, 300), dtype, dead=0)
    outs[..., 0] = -0.0
    out, lse = attnmask.merge_attention_states(outs, lses)
    assert out.tobytes() == outs[0].tobytes()
    assert lse.tobytes() == lses[0].tobytes()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_comes_through_beside_parts_without_keys(dtype):
    outs = np.ones((4, 1, 1, 1), dtype)
    for place in range(4):
        lses = np.array([np.inf, -np.inf, np.inf, 0.0], wide(dtype)).reshape(4, 1, 1)
        lses[place] = np.nan
        for got in attnmask.merge_attention_states(outs, lses):
            assert np.isnan(np.asarray(got, np.float64)).all()
        douts, dlses = attnmask.merge_attention_states_vjp(outs, lses)[1](outs[0])
        live = np.isnan(lses.ravel()) | (lses.ravel() == 0)
        for got in (douts, dlses):
            numbers = np.asarray(got, np.float64).ravel()
            assert np.array_equal(np.isnan(numbers), live)
            assert not numbers[~live].any()


def test_live_nan_and_distant_lses():
    outs = np.array([np.nan, 2.0, 3.0]).reshape(3, 1, 1, 1)
    out, lse = attnmask.merge_attention_states(outs, np.array([-1e9, 0.0, 1e9]).reshape(3, 1, 1))
    assert np.isnan(out).all()  # its weight is tiny, but not zero
    assert lse.item() == 1e9
    out, lse = attnmask.merge_attention_states(outs[1:], np.array([np.nan, 0.0]).reshape(2, 1, 1))
    assert np.isnan(out).all()
    assert np.isnan(lse).all()
    out, lse = attnmask.merge_attention_states(outs[1:], np.array([-1e30, -1e30]).reshape(2, 1, 1))
    assert (out.item(), lse.item()) == (2.5, -1e30)


@pytest.mark.parametrize("lse_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_lses_of_another_type(dtype, lse_dtype):
    outs, lses = parts(6, 3, (2, 5, 3, 8), dtype)
    lses = lses.astype(lse_dtype)
    got = attnmask.merge_attention_states(outs, lses)
    expected = attnmask.merge_attention_states(outs, lses.astype(wide(dtype)))
    for a, b in zip(got, expected, strict=True):
        assert (a.dtype, a.tobytes()) == (b.dtype, b.tobytes())


OUT, LSE = np.zeros((1, 3, 2, 4), np.float32), np.zeros((1, 2, 3), np.float32)


@pytest.mark.parametrize(("outs", "lses", "error", "message"), [
    ([], [], ValueError, r"^outs must be one array or more, got none"),
    (OUT[0, 0, 0, 0], [LSE], TypeError, r"^outs must be a sequence of arrays, got "),
    ([OUT], None, TypeError, r"^lses must be a sequence of arrays, got None"),
    ([OUT[0, 0]], [LSE[0]], ValueError, r"^outs\[0\] must be \[B, T, H, D\] or \[T, H, D\], got .*\(2, 4\)"),
    ([OUT, OUT[:, 1:]], [LSE] * 2, ValueError, r"^outs\[1\] must be like outs\[0\], .*\(1, 2, 2, 4\)$"),
    ([OUT, OUT[0]], [LSE] * 2, ValueError, r"^outs\[1\] must be like outs\[0\], .*\(3, 2, 4\)$"),
    ([OUT, OUT.astype("f8")], [LSE] * 2, TypeError, r"^outs\[1\] must be like outs\[0\], float32.* float64 "),
])  # fmt: skip
def test_errors(outs, lses, error, message):
    with pytest.raises(error, match=message):
        attnmask.merge_attention_states(outs, lses)


# Gradients


def pulled_back(outs, lses, dout, dlse):
    """The definition in float64, row by row; and the sizes of what is summed for each dlse."""
    outs, lses = (np.asarray(parts).astype(np.longdouble) for parts in (outs, lses))
    dout, dlse = np.asarray(dout, np.float64), np.zeros(lses.shape[1:]) if dlse is None else dlse
    douts, dlses, sizes = np.zeros_like(outs), np.zeros_like(lses), np.zeros_like(lses)
    for *batch, head, token in np.ndindex(lses.shape[1:]):
        row, place = (*batch, token, head), (*batch, head, token)
        live = [i for i, part in enumerate(lses) if not np.isinf(part[place])]
        top = max((lses[i][place] for i in live), default=0)
        total = sum(np.exp(lses[i][place] - top) for i in live)
        weights = {i: np.exp(lses[i][place] - top) / total for i in live}
        mean = sum(weights[i] * outs[i][row] for i in live)
        mean_size = sum(weights[i] * abs(outs[i][row]) for i in live)
        for i, weight in weights.items():
            douts[i][row] = weight * dout[row]
            dlses[i][place] = weight * (dout[row] @ (outs[i][row] - mean) + dlse[place])
            size = abs(dout[row]) @ (abs(outs[i][row]) + mean_size) + abs(dlse[place])
            sizes[i][place] = weight * size
    return douts, dlses, sizes


def check_vjp(outs, lses, dout, dlse, dtype, case):
    states, vjp = attnmask.merge_attention_states_vjp(outs, lses)
    for one, other in zip(states, attnmask.merge_attention_states(outs, lses), strict=True):
        assert one.tobytes() == other.tobytes(), case
    got = vjp(dout) if dlse is None else vjp(dout, dlse)
    *right, sizes = pulled_back(outs, lses, dout, dlse)
    step = ROUNDING[wide(dtype)]
    finite = [np.asarray(lse, np.float64) for lse in lses]
    largest = max((np.max(np.abs(lse[np.isfinite(lse)]), initial=1) for lse in finite), default=1)
    steps = step * (16 + 2 * len(outs) + 4 * largest)
    smallest = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    for parts, exact, kind in zip(got, right, (dtype, wide(dtype)), strict=True):
        assert len(parts) == len(outs), case
        for part, wanted in zip(parts, exact, strict=True):
            assert (part.dtype, part.shape) == (kind, wanted.shape), case
            assert part.flags.c_contiguous, case
    douts, dlses = (np.array([np.asarray(part, np.float64) for part in parts]) for parts in got)
    near = (steps + ROUNDING[dtype]) * np.abs(right[0]) + smallest
    assert (np.abs(douts - right[0]) <= near).all(), case
    assert (np.abs(dlses - right[1]) <= steps * sizes + np.finfo(wide(dtype)).tiny).all(), case


@given(**PARTS, other_layout=st.sampled_from(LAYOUTS), with_dlse=st.booleans())
def test_values_and_gradients(
    seed, count, batch, tokens, heads, channels, dtype, layout, other_layout, with_dlse
):
    case = (seed, count, batch, tokens, heads, channels, dtype, layout, other_layout, with_dlse)
    shape = (*([] if batch is None else [batch]), tokens, heads, channels)
    outs, lses = parts(seed, count, shape, dtype)
    (dout,), (dlse,) = parts(seed + 1, 1, shape, dtype, dead=0)
    outs, lses = [arrange(out, layout) for out in outs], [arrange(lse, other_layout) for lse in lses]
    dout, dlse = arrange(dout, other_layout), arrange(dlse, layout) if with_dlse else None
    given = [each for each in (*outs, *lses, dout, dlse) if each is not None]
    before = [array.tobytes() for array in given]
    check(outs, lses, dtype, case)
    check_vjp(outs, lses, dout, dlse, dtype, case)
    assert [array.tobytes() for array in given] == before, case


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_levels(isa, dtype):
    outs, lses = parts(1, 3, (2, 30, 3, 100), dtype)
    (dout,), (dlse,) = parts(2, 1, (2, 30, 3, 100), dtype, dead=0)
    check(outs, lses, dtype, (isa, dtype))
    check_vjp(outs, lses, dout, dlse, dtype, (isa, dtype))


def test_gradients_have_the_form_of_the_parts():
    outs, lses = parts(2, 3, (2, 5, 3, 8), np.float32, dead=0)
    dout, dlse = outs[0], lses[0]
    stacked = attnmask.merge_attention_states_vjp(outs, lses)[1](dout, dlse)
    assert [type(each) for each in stacked] == [np.ndarray] * 2
    for sequence in (list, tuple):
        one_by_one = attnmask.merge_attention_states_vjp(sequence(outs), sequence(lses))[1](dout, dlse)
        assert [type(each) for each in one_by_one] == [tuple] * 2
        for a, b in zip(stacked, one_by_one, strict=True):
            np.testing.assert_array_equal(a, b)
    douts, dlses = attnmask.merge_attention_states_vjp([outs[0]], [lses[0]])[1](dout, dlse)
    assert douts[0].tobytes() == dout.tobytes()
    np.testing.assert_allclose(dlses[0], dlse, rtol=1e-6)


@pytest.mark.parametrize("no_keys", [-np.inf, np.inf])
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dead_parts_do_not_matter(dtype, garbage, no_keys):
    """Their gradients are zeros; the dout of a row that is dead in all parts has no effect."""
    outs, lses = parts(5, 3, (1, 4, 2, 9), dtype, dead=0)
    (dout,), (dlse,) = parts(6, 1, (1, 4, 2, 9), dtype, dead=0)
    state, right_vjp = attnmask.merge_attention_states_vjp(outs[[0, 2]], lses[[0, 2]])
    outs[1], lses[1] = garbage, no_keys
    same, vjp = attnmask.merge_attention_states_vjp(outs, lses)
    got = vjp(dout, dlse)
    for one, other in zip(same, state, strict=True):
        assert one.tobytes() == other.tobytes()
    for one, other in zip(got, right_vjp(dout, dlse), strict=True):
        assert one[[0, 2]].tobytes() == other.tobytes()
        assert one[1].tobytes() == bytes(one[1].nbytes)
    lses[:, 0, 1, 2], dout[0, 2, 1], dlse[0, 1, 2] = no_keys, garbage, garbage
    for one, other in zip(attnmask.merge_attention_states_vjp(outs, lses)[1](dout, dlse), got, strict=True):
        row = (slice(None), 0, 1, 2) if one.ndim == 4 else (slice(None), 0, 2, 1)
        assert not one[row].astype(np.float64).any()
        other[row] = 0
        assert one.tobytes() == other.tobytes()
    lses[...] = no_keys
    out, lse = attnmask.merge_attention_states(outs, lses)
    assert not np.asarray(out, np.float64).any()
    assert (lse == -np.inf).all()


def test_live_nan_reaches_the_gradients():
    outs, lses = parts(7, 2, (1, 3, 1, 5), np.float32, dead=0)
    dout = np.ones((1, 3, 1, 5), np.float32)
    outs[1, 0, 0, 0, 2] = np.nan
    douts, dlses = attnmask.merge_attention_states_vjp(outs, lses)[1](dout)
    assert np.isnan(dlses[:, 0, 0, 0]).all()
    assert np.isfinite(dlses[:, 0, 0, 1:]).all()
    assert np.isfinite(douts).all()
    lses[0, 0, 0, 1] = dout[0, 2] = np.nan
    douts, dlses = attnmask.merge_attention_states_vjp(outs, lses)[1](dout)
    assert np.isnan(dlses).all()
    assert np.isnan(douts[:, 0, 1:]).all()
    assert np.isfinite(douts[:, 0, 0]).all()


def test_no_parts_have_no_gradient():
    with pytest.raises(ValueError, match=r"^outs must be one array or more, got none"):
        attnmask.merge_attention_states_vjp([], [])
    _, vjp = attnmask.merge_attention_states_vjp([OUT, OUT], [LSE, LSE])
    with pytest.raises(TypeError, match=r"^dout must be like outs\[0\], float32.* float64 "):
        vjp(OUT.astype("f8"))
