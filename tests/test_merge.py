"""Merging of partial attention results: values, accuracy, dtypes, layouts, dead parts, threads, errors."""

import threading

import ml_dtypes
import numpy as np
import pytest
from conftest import LAYOUTS, arrange
from hypothesis import given
from hypothesis import strategies as st

import attnmask

BF16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = (np.dtype("float16"), BF16, np.dtype("float32"), np.dtype("float64"))
ROUNDING = {FLOATS[0]: 2.0**-11, BF16: 2.0**-8, FLOATS[2]: 2.0**-24, FLOATS[3]: 2.0**-53}


def merged(outs, lses):
    """The definition in float64, a row after the other."""
    outs = [np.asarray(out, np.float64) for out in outs]
    lses = [np.asarray(lse, np.float64) for lse in lses]
    out, lse = np.zeros(outs[0].shape), np.full(lses[0].shape, -np.inf)
    for *batch, head, token in np.ndindex(lse.shape):
        row, place = (*batch, token, head), (*batch, head, token)
        live = [i for i, part in enumerate(lses) if part[place] != -np.inf]
        if not live:
            continue
        logits = np.array([lses[i][place] for i in live])
        lse[place] = logits.max() + np.log(np.exp(logits - logits.max()).sum())
        out[row] = sum(np.exp(lses[i][place] - lse[place]) * outs[i][row] for i in live)
    return out, lse


def wide(dtype):
    return np.dtype("float64" if dtype == np.float64 else "float32")


def parts(seed, count, shape, dtype, dead=0.2, spread=3.0):
    """As many outs and lses; a dead part's out is NaN."""
    rng = np.random.default_rng(seed)
    *batch, tokens, heads, _ = shape
    outs = rng.standard_normal((count, *shape))
    lses = rng.standard_normal((count, *batch, heads, tokens)) * spread
    lses[rng.random(lses.shape) < dead] = -np.inf
    outs[np.swapaxes(lses, -1, -2) == -np.inf] = np.nan
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
    error += 2.0**-25 if dtype == np.float16 else 0  # half of its smallest number
    np.testing.assert_allclose(np.asarray(got_out, np.float64), out, rtol=0, atol=error, err_msg=repr(case))
    np.testing.assert_allclose(
        got_lse, lse, rtol=0, atol=step * (8 + len(outs) + 2 * largest_lse), err_msg=repr(case)
    )


@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 6),
    batch=st.none() | st.integers(0, 3),
    tokens=st.integers(0, 9),
    heads=st.integers(0, 4),
    channels=st.sampled_from([0, 1, 5, 64, 256, 300, 777]),
    dtype=st.sampled_from(FLOATS),
    layout=st.sampled_from(LAYOUTS),
    lse_layout=st.sampled_from(LAYOUTS),
)
def test_values(seed, count, batch, tokens, heads, channels, dtype, layout, lse_layout):
    case = (seed, count, batch, tokens, heads, channels, dtype, layout, lse_layout)
    shape = (*([] if batch is None else [batch]), tokens, heads, channels)
    outs, lses = parts(seed, count, shape, dtype)
    outs = [arrange(out, layout) for out in outs]
    lses = [arrange(lse, lse_layout) for lse in lses]
    before = [array.tobytes() for array in (*outs, *lses)]
    check(outs, lses, dtype, case)
    assert [array.tobytes() for array in (*outs, *lses)] == before, case


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_isa(isa, dtype):
    outs, lses = parts(1, 3, (2, 30, 3, 100), dtype)
    check(outs, lses, dtype, (isa, dtype))


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


def test_merging_is_attention():
    """Parts of the keys, merged, are all of them; in any order, and of parts already merged."""
    rng = np.random.default_rng(4)
    logits, values = rng.standard_normal((6, 40)) * 5, rng.standard_normal((40, 7))

    def attend(keys):
        weights = np.exp(logits[:, keys])
        out = weights @ values[keys] / weights.sum(axis=1, keepdims=True)
        return out[:, None], np.log(weights.sum(axis=1))[None]

    whole = attend(slice(None))
    states = [attend(slice(*cut)) for cut in ((0, 3), (3, 4), (4, 30), (30, 40))]
    flat = attnmask.merge_attention_states(*zip(*states, strict=True))
    first = attnmask.merge_attention_states(*zip(*states[2:], strict=True))
    tree = attnmask.merge_attention_states(*zip(first, states[1], states[0], strict=True))
    for got in (flat, tree):
        for a, b in zip(got, whole, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-13)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dead_parts_do_not_matter(dtype, garbage):
    outs, lses = parts(5, 3, (1, 4, 2, 9), dtype, dead=0)
    expected = attnmask.merge_attention_states(outs[[0, 2]], lses[[0, 2]])
    outs[1], lses[1] = garbage, -np.inf
    for got, wanted in zip(attnmask.merge_attention_states(outs, lses), expected, strict=True):
        assert got.tobytes() == wanted.tobytes()
    lses[...] = -np.inf
    out, lse = attnmask.merge_attention_states(outs, lses)
    assert not np.asarray(out, np.float64).any()
    assert (lse == -np.inf).all()


def test_live_nan_and_distant_lses():
    outs = np.array([np.nan, 2.0, 3.0]).reshape(3, 1, 1, 1)
    out, lse = attnmask.merge_attention_states(outs, np.array([-1e9, 0.0, 1e9]).reshape(3, 1, 1))
    assert np.isnan(out).all()  # it has a weight, if a small one
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


def test_same_bits_for_any_number_of_threads(set_threads):
    outs, lses = parts(7, 3, (2, 400, 5, 70), np.float32)
    results = []
    for count in (1, 2, 3, 8):
        set_threads(count)
        results.append([array.tobytes() for array in attnmask.merge_attention_states(outs, lses)])
    assert results.count(results[0]) == len(results)


def test_calls_from_many_threads():
    outs, lses = parts(8, 2, (1, 300, 4, 64), np.float32)
    expected = attnmask.merge_attention_states(outs, lses)[0].tobytes()
    same = []

    def merge():
        same.append(attnmask.merge_attention_states(outs, lses)[0].tobytes() == expected)

    threads = [threading.Thread(target=merge) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same == [True] * 8


OUT, LSE = np.zeros((1, 3, 2, 4), np.float32), np.zeros((1, 2, 3), np.float32)


@pytest.mark.parametrize(
    ("outs", "lses", "error", "message"),
    [
        ([], [], ValueError, r"^outs must be one array or more, got none"),
        (OUT[0, 0, 0, 0], [LSE], TypeError, r"^outs must be a sequence of arrays, got "),
        ([OUT], None, TypeError, r"^lses must be a sequence of arrays, got None"),
        ([OUT, OUT], [LSE], ValueError, r"^lses must be 2 arrays as outs, got 1"),
        (
            [OUT[0, 0]],
            [LSE[0]],
            ValueError,
            r"^outs\[0\] must be \[B, T, H, D\] or \[T, H, D\], got .*\(2, 4\)",
        ),
        ([OUT.astype(int)], [LSE], TypeError, r"^outs\[0\] must be a floating-point array, got int64"),
        ([OUT, OUT[:, 1:]], [LSE] * 2, ValueError, r"^outs\[1\] must be like outs\[0\], .*\(1, 2, 2, 4\)$"),
        ([OUT, OUT[0]], [LSE] * 2, ValueError, r"^outs\[1\] must be like outs\[0\], .*\(3, 2, 4\)$"),
        (
            [OUT, OUT.astype("f8")],
            [LSE] * 2,
            TypeError,
            r"^outs\[1\] must be like outs\[0\], float32.* float64 ",
        ),
        ([OUT], [LSE.swapaxes(1, 2)], ValueError, r"^lses\[0\] must be of shape \(1, 2, 3\) as outs, got "),
        ([OUT[0]], [LSE], ValueError, r"^lses\[0\] must be of shape \(2, 3\) as outs, got .*\(1, 2, 3\)$"),
        ([OUT] * 2, [LSE, LSE > 0], TypeError, r"^lses\[1\] must be a floating-point array, got bool"),
        (["a"], [LSE], TypeError, r"^outs\[0\] must be an array of "),
    ],
)
def test_errors(outs, lses, error, message):
    with pytest.raises(error, match=message):
        attnmask.merge_attention_states(outs, lses)


def test_axes_that_only_seem_large():
    """Strides of zero hold huge shapes in a few bytes: what does not fit in memory is refused."""
    out = np.broadcast_to(np.float32(0), (1 << 40, 1 << 15, 1, 0))
    with pytest.raises((MemoryError, ValueError)):
        attnmask.merge_attention_states([out], [np.broadcast_to(np.float32(0), (1 << 40, 1, 1 << 15))])
