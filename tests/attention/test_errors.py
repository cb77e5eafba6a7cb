"""Bad input raises an error that names the argument, and nothing is written before."""

import math

import numpy as np
import pytest
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
from flash_cases import F32, F64
from numpy.lib.stride_tricks import as_strided

import attnmask

# Arguments


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


def test_an_array_that_raises():
    class Raises:
        def __array__(self, dtype=None, copy=None):
            raise ZeroDivisionError("not today")

    for name in ("query", "key", "value", "attention_mask", "bias", "softmax_aux", "cum_seqlens_q"):
        with pytest.raises(ZeroDivisionError, match="not today"):
            attnmask.flash_attention(**(PACKED | {name: Raises()}))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_an_axis_that_is_too_long(axis):
    shape = [1, 1, 1, 0]
    shape[axis] = 2**57
    endless = as_strided(np.zeros(1, F32), shape, (0, 0, 0, 0))
    with pytest.raises(ValueError, match="query must be of at most"):
        attnmask.flash_attention(endless, endless, endless)


# The output


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


def test_bad_out_of_packed_rows_is_told_without_the_batch():
    without = {name: PACKED[name][0] for name in ("query", "key", "value")}
    with pytest.raises(ValueError, match=rf"of float32 of shape \({TQ}, {H}, {DV}\), got float64 array"):
        attnmask.flash_attention(**(PACKED | without), out=np.zeros((TQ, H, DV)))


# The keep mask and the merge


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
