"""short_convolution, its gradients and its steps, compared with plain float64 at each level."""

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import reference_short_convolution as reference
from environment import assert_heard, without_sanitizer
from layouts import arrange
from numpy.lib.stride_tricks import as_strided

import attnmask
from attnmask import _core

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float32), BFLOAT16, np.dtype(np.float16), np.dtype(np.float64)]
# Of the largest number of an array, which a result may differ from float64: forward, and gradients.
ERROR = {
    "float32": (2e-6, 1e-5),
    "bfloat16": (1e-2, 1e-2),
    "float16": (1e-3, 1e-3),
    "float64": (1e-14, 1e-13),
}
SHAPES = [  # batch, tokens, channels, width
    (2, 37, 24, 4), (1, 300, 17, 4), (3, 5, 1, 4), (2, 2, 33, 4), (1, 1, 16, 4), (2, 70, 40, 3), (2, 9, 20, 1),
    (1, 50, 19, 2), (2, 40, 21, 7), (1, 6, 18, 40), (2, 0, 5, 4), (0, 4, 5, 4), (2, 4, 0, 4),
]  # fmt: skip


def problem(shape, dtype, seed=0, bias=True, state=True, sequences=None):
    batch, tokens, channels, width = shape
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, tokens, channels)).astype(dtype)
    weight = rng.standard_normal((channels, width)).astype(dtype)
    count = batch if sequences is None else sequences
    return (
        x,
        weight,
        rng.standard_normal(channels).astype(dtype) if bias else None,
        rng.standard_normal((count, channels, width - 1)).astype(dtype) if state else None,
    )


def close(got, expected, dtype, gradient=False):
    assert got.dtype == dtype
    assert got.shape == expected.shape
    assert got.flags.c_contiguous
    if got.size:
        error = abs(got.astype(np.float64) - expected).max()
        assert error <= ERROR[dtype.name][gradient] * max(abs(expected).max(), 1e-3), (error, dtype)


def check(dtype, x, weight, bias, **options):
    """The result, the states at the end and all gradients beside float64, with and without states."""
    arguments = {"x": x, "weight": weight, "bias": bias} | options
    (out, after), vjp = attnmask.short_convolution_vjp(**arguments, return_state=True)
    expected, expected_after = reference.short_convolution(**arguments)
    close(out, expected, dtype)
    assert after.dtype == dtype
    np.testing.assert_array_equal(after.astype(np.float64), expected_after)
    for alone in (
        attnmask.short_convolution(**arguments),
        attnmask.short_convolution(**arguments, return_state=True)[0],
    ):
        np.testing.assert_array_equal(alone, out)
    rng = np.random.default_rng(1)
    dout, dstate = (rng.standard_normal(each.shape).astype(dtype) for each in (x, after))
    for given in (dstate, None):
        got = vjp(dout, given)
        assert isinstance(got, attnmask.ShortConvolutionGrads)
        for one, wanted in zip(got, reference.gradients(dout, given, **arguments), strict=True):
            assert (one is None) == (wanted is None)
            if one is not None:
                close(one, wanted, dtype, gradient=True)
    for one, other in zip(attnmask.short_convolution_vjp(**arguments)[1](dout), got, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_and_gradients(isa, shape, dtype):
    for activation, extras in ((None, False), (None, True), ("silu", False), ("silu", True)):
        x, weight, bias, state = problem(shape, dtype, bias=extras, state=extras)
        check(dtype, x, weight, bias, activation=activation, initial_state=state)


RAGGED = [[0, 5, 5, 6, 100, 102, 102, 105, 140], [0, 0, 3], [0, 0, 0], [0, 33], [0, 1, 2, 3, 4, 5, 6, 7]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("starts", RAGGED, ids=str)
def test_packed(isa, starts, dtype):
    for width in (4, 3, 1, 9):
        x, weight, bias, state = problem((1, starts[-1], 21, width), dtype, sequences=len(starts) - 1)
        options = {"cu_seqlens": np.array(starts, np.int32), "initial_state": state}
        check(dtype, x, weight, bias, activation="silu", **options)


@pytest.mark.repeats
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sequence_gets_the_bits_that_it_gets_alone(isa, dtype):
    starts = np.array([0, 40, 40, 41, 43, 300, 1000])
    x, weight, bias, state = problem((1, 1000, 35, 4), dtype, sequences=len(starts) - 1)
    options = {"activation": "silu", "return_state": True}
    (out, after), vjp = attnmask.short_convolution_vjp(
        x, weight, bias, cu_seqlens=starts, initial_state=state, **options
    )
    dx, *_, before = vjp(out, after)
    for n, (begin, end) in enumerate(pairwise(starts)):
        for batch in (1, 2):
            own = np.repeat(x[:, begin:end], batch, 0)
            states = np.repeat(state[n : n + 1], batch, 0)
            (alone, alone_after), alone_vjp = attnmask.short_convolution_vjp(
                own, weight, bias, initial_state=states, **options
            )
            alone_dx, *_, alone_before = alone_vjp(alone, alone_after)
            for row in range(batch):
                np.testing.assert_array_equal(alone[row], out[0, begin:end])
                np.testing.assert_array_equal(alone_after[row], after[n])
                np.testing.assert_array_equal(alone_dx[row], dx[0, begin:end])
                np.testing.assert_array_equal(alone_before[row], before[n])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_parts_with_the_state_between_are_the_whole(isa, dtype):
    for width in (4, 6, 1):
        x, weight, bias, _ = problem((2, 50, 19, width), dtype)
        whole, last = attnmask.short_convolution(x, weight, bias, activation="silu", return_state=True)
        for at in (0, 1, 2, 3, 25, 49, 50):
            first, state = attnmask.short_convolution(
                x[:, :at], weight, bias, activation="silu", return_state=True
            )
            second, end = attnmask.short_convolution(
                x[:, at:], weight, bias, activation="silu", initial_state=state, return_state=True
            )
            np.testing.assert_array_equal(np.concatenate([first, second], 1), whole)
            np.testing.assert_array_equal(end, last)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_channels_before_tokens(isa, dtype):
    x, weight, bias, _ = problem((2, 70, 40, 4), dtype)
    plain = attnmask.short_convolution(x, weight, bias)
    across = np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)
    out = np.empty_like(across, order="K")
    assert attnmask.short_convolution(across, weight, bias, out=out) is out
    np.testing.assert_array_equal(out, plain)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_in_another_layout_than_x(isa, dtype):
    for shape in ((1, 300, 40, 4), (2, 150, 17, 3), (1, 90, 600, 1)):
        x, weight, bias, _ = problem(shape, dtype)
        plain = attnmask.short_convolution(x, weight, bias)
        for layout in ("contiguous", "fortran", "strided", "reversed"):
            for out_layout in ("contiguous", "fortran", "strided", "reversed"):
                out = arrange(np.zeros_like(x), out_layout)
                attnmask.short_convolution(arrange(x, layout), weight, bias, out=out)
                np.testing.assert_array_equal(out, plain)


def test_weights_of_float32(isa):
    for dtype in DTYPES:
        x, weight, bias, _ = problem((2, 20, 18, 4), dtype)
        weight, bias = weight.astype(np.float32), bias.astype(np.float32)
        out, vjp = attnmask.short_convolution_vjp(x, weight, bias)
        close(out, reference.short_convolution(x, weight, bias)[0], dtype)
        grads = vjp(out)
        assert grads.x.dtype == dtype
        assert grads.weight.dtype == grads.bias.dtype == np.float32


def test_nan_reaches_what_comes_after_it_in_its_own_sequence(isa):
    starts = [0, 10, 30, 33]
    for dtype in DTYPES:
        x, weight, bias, _ = problem((1, 33, 20, 4), dtype)
        for bad in (np.nan, np.inf):
            for at in (0, 8, 9, 10, 15, 29):
                dirty = x.copy()
                dirty[0, at, 3] = bad
                out, state = attnmask.short_convolution(
                    dirty, weight, bias, activation="silu", cu_seqlens=starts, return_state=True
                )
                end = starts[np.searchsorted(starts, at, side="right")]
                expected = np.zeros(out.shape, bool)
                expected[0, at : min(at + 4, end), 3] = True
                wrong = ~np.isfinite(out.astype(np.float64))
                assert not (wrong & ~expected).any()
                if np.isnan(bad):
                    np.testing.assert_array_equal(wrong, expected)
                inside = np.zeros(state.shape, bool)
                if end - at <= 3:
                    inside[np.searchsorted(starts, at, side="right") - 1, 3, 3 - (end - at)] = True
                np.testing.assert_array_equal(~np.isfinite(state.astype(np.float64)), inside)


def test_nan_in_gradients_reaches_what_comes_before_it(isa):
    starts = [0, 10, 30, 33]
    x, weight, bias, state = problem((1, 33, 20, 4), np.float32, sequences=3)
    for activation in (None, "silu"):
        for at in (0, 2, 9, 10, 12, 29, 32):
            _, vjp = attnmask.short_convolution_vjp(
                x, weight, bias, activation=activation, cu_seqlens=starts, initial_state=state
            )
            dout = np.ones_like(x)
            dout[0, at, 3] = np.nan
            n = np.searchsorted(starts, at, side="right") - 1
            expected = np.zeros(x.shape, bool)
            expected[0, max(at - 3, starts[n]) : at + 1, 3] = True
            grads = vjp(dout)
            np.testing.assert_array_equal(np.isnan(grads.x), expected)
            place = at - starts[n]
            before = np.zeros(state.shape, bool)
            before[n, 3, place:] = True
            np.testing.assert_array_equal(np.isnan(grads.initial_state), before)


def test_infinite_weights_do_not_meet_what_is_behind_a_sequence(isa):
    """Terms that a gradient lacks near an end are left out: zeros times infinity would be NaN."""
    weight = np.array([[1, np.inf, 1, 1]], np.float32)
    _, vjp = attnmask.short_convolution_vjp(np.ones((1, 8, 1), np.float32), weight)
    np.testing.assert_array_equal(vjp(np.ones((1, 8, 1))).x.ravel(), [np.inf] * 6 + [2, 1])


def test_silu_of_any_number(isa):
    z = np.array([0, -0.0, 1, -1, 20, -20, 80, -80, 88, -88, 1000, -1000, 1e30, -1e30, np.inf, np.nan])
    for dtype in (np.float32, np.float64):
        x = np.tile(z.astype(dtype), 3).reshape(1, 1, -1)
        weight = np.ones((x.shape[2], 1), dtype)
        out, vjp = attnmask.short_convolution_vjp(x, weight, activation="silu")
        with np.errstate(all="ignore"):
            s = 1 / (1 + np.exp(-x.astype(np.float64)))
            slope = s * (1 + x * (1 - s))
            np.testing.assert_allclose(out, x * s, rtol=1e-6, atol=1e-35)
        finite = np.isfinite(slope)
        got = vjp(np.ones_like(x)).x
        np.testing.assert_allclose(got[finite], slope[finite], rtol=1e-5, atol=1e-7)
        assert np.isnan(got[np.isnan(x)]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps_give_the_bits_of_the_whole(isa, dtype):
    for width in (4, 3, 1, 9):
        x, weight, bias, state = problem((5, 12, 35, width), dtype)
        for activation in (None, "silu"):
            whole, after = attnmask.short_convolution(
                x, weight, bias, activation=activation, initial_state=state, return_state=True
            )
            for layout in ("contiguous", "fortran", "strided", "reversed"):
                own = arrange(state, layout)
                for t in range(12):
                    out = attnmask.short_convolution_step(
                        arrange(x[:, t], layout), weight, own, bias, activation=activation
                    )
                    np.testing.assert_array_equal(out, whole[:, t])
                    assert out.dtype == dtype
                np.testing.assert_array_equal(own, after)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps_at_indices(isa, dtype):
    x, weight, bias, _ = problem((1, 4, 300, 4), dtype)
    x = x[0]
    rng = np.random.default_rng(3)
    states = rng.standard_normal((7, 300, 3)).astype(dtype)
    for kind in (np.int32, np.int64, np.uint8):
        indices = np.array([5, -1, 0, 6] if kind != np.uint8 else [5, 1, 0, 6], kind)
        got = states.copy()
        out = np.full_like(x, 7)
        assert attnmask.short_convolution_step(x, weight, got, bias, state_indices=indices, out=out) is out
        for row, slot in enumerate(indices.tolist()):
            if slot < 0:
                assert (out[row] == 0).all()
                continue
            own = states[slot : slot + 1].copy()
            alone = attnmask.short_convolution_step(x[row : row + 1], weight, own, bias)
            np.testing.assert_array_equal(alone[0], out[row])
            np.testing.assert_array_equal(own[0], got[slot])
        untouched = [slot for slot in range(7) if slot not in indices]
        np.testing.assert_array_equal(got[untouched], states[untouched])


def test_a_row_that_is_left_out_is_not_read(isa):
    x, weight = np.full((2, 3), np.nan, np.float32), np.ones((3, 4), np.float32)
    state = np.zeros((1, 3, 3), np.float32)
    out = attnmask.short_convolution_step(x, weight, state, state_indices=[-1, -1])
    assert (out == 0).all()
    assert (state == 0).all()


@pytest.mark.repeats
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_any_number_of_threads_gives_the_same_bits(dtype, set_threads):
    x, weight, bias, state = problem((3, 700, 600, 4), dtype)
    results = []
    for threads in (1, 2, 5):
        set_threads(threads)
        out, vjp = attnmask.short_convolution_vjp(x, weight, bias, activation="silu", initial_state=state)
        results.append((out, *vjp(out)))
    for other in results[1:]:
        for one, wanted in zip(other, results[0], strict=True):
            np.testing.assert_array_equal(one, wanted)


@pytest.mark.repeats
@pytest.mark.parametrize("shift", [0, 1, 4, 15])
def test_results_larger_than_the_cache(shift, isa):
    x, weight, bias, _ = problem((1, 5000, 2048, 4), np.float32)
    memory = np.empty(x.size + 32, np.float32)
    begin = -memory.ctypes.data % 64 // 4 + shift
    out = memory[begin : begin + x.size].reshape(x.shape)
    memory[:] = 7
    attnmask.short_convolution(x, weight, bias, out=out)
    assert (memory[:begin] == 7).all()
    assert (memory[begin + x.size :] == 7).all()
    plain = attnmask.short_convolution(
        x[:, 2000:], weight, bias, initial_state=x[:, 1997:2000].swapaxes(1, 2)
    )
    np.testing.assert_array_equal(out[:, 2000:], plain)
    rows = [0, 1, 2, 3, 100, 127, 128, 129, 4999]
    for t in rows:
        window = np.zeros((4, 2048))
        window[max(3 - t, 0) :] = x[0, max(t - 3, 0) : t + 1]
        expected = (window * weight.T.astype(np.float64)).sum(0) + bias
        np.testing.assert_allclose(out[0, t], expected, atol=1e-5)


X, WEIGHT = np.ones((2, 5, 3), np.float32), np.ones((3, 4), np.float32)
STATE = np.zeros((2, 3, 3), np.float32)
READ_ONLY = np.zeros((2, 5, 3), np.float32)
READ_ONLY.setflags(write=False)

BAD: list = [
    ({"weight": WEIGHT[:, :0]}, ValueError, "W at least 1"),
    ({"weight": WEIGHT[:, None]}, ValueError, r"write weight\[:, 0\]"),
    ({"weight": WEIGHT.T}, ValueError, r"write weight\.T"),
    ({"x": X.swapaxes(1, 2)}, ValueError, r"write x\.swapaxes\(1, 2\)"),
    ({"weight": WEIGHT.astype(np.float64)}, TypeError, r"weight must be float32 as x, .*astype\(x\.dtype\)"),
    ({"cu_seqlens": [0, 5]}, ValueError, "x must have batch size 1 when cu_seqlens is given, got 2"),
    ({"x": X[:1], "cu_seqlens": [0, 4]}, ValueError, "cu_seqlens must end at the 5 tokens of x, got 4 at"),
]


@pytest.mark.parametrize(("changed", "error", "message"), BAD)
def test_bad_arguments(changed, error, message):
    arguments = {"x": X, "weight": WEIGHT} | changed
    for function in (attnmask.short_convolution, attnmask.short_convolution_vjp):
        with pytest.raises(error, match=message):
            function(**arguments)


def test_bad_gradients_of_states():
    (out, state), vjp = attnmask.short_convolution_vjp(X, WEIGHT, return_state=True)
    with pytest.raises(ValueError, match=r"dstate must be of shape \(2, 3, 3\), got"):
        vjp(out, state[0])
    out, vjp = attnmask.short_convolution_vjp(np.ones((1, 5, 2)), np.ones((2, 3)))
    with pytest.raises(ValueError, match="dstate must be None without return_state=True"):
        vjp(out, np.ones((1, 2, 2)))


BAD_STEPS: list = [
    ({"state": STATE.astype(">f4")}, ValueError, "state must be aligned and in native byte order"),
    ({"state": np.broadcast_to(STATE[:1], (2, 3, 3))}, ValueError, "state must be writeable"),
    ({"state": as_strided(STATE, STATE.shape, (4, 4, 4))}, ValueError, "state must not overlap itself"),
    ({"state_indices": [0, 0]}, ValueError, "state_indices must name each slot once, got 0 again at index 1"),
    ({"state_indices": [0, 2]}, IndexError, "state_indices must be from -1 to 1, got 2 at index 1"),
    ({"state_indices": [-2, 1]}, IndexError, "state_indices must be from -1 to 1, got -2 at index 0"),
]


@pytest.mark.parametrize(("changed", "error", "message"), BAD_STEPS)
def test_bad_steps(changed, error, message):
    arguments = {"x": X[:, 0], "weight": WEIGHT, "state": STATE} | changed
    with pytest.raises(error, match=message):
        attnmask.short_convolution_step(**arguments)
    assert (STATE == 0).all()


@without_sanitizer
def test_signals_are_heard_among_many_taps():
    x, weight = np.ones((1, 2**17, 16), np.float16), np.full((16, 2**15), 1e-3, np.float16)
    assert_heard(lambda: attnmask.short_convolution(x, weight, activation="silu"))
    few, state = x[:, :3000], np.zeros((1, 16, 2**15 - 1), np.float16)
    for these, before in ((few, state), (x, None)):
        problem = these, weight, None, "silu", None, before
        assert_heard(
            lambda problem=problem, dout=these: _core.short_convolution_backward(*problem, dout, None)
        )
