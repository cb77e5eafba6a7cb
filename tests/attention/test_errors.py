"""Bad input raises an error that names the argument, and nothing is written before."""

import numpy as np
import pytest
from flash_bad_input import BAD, DV, GOOD, MESSAGES, TK, TQ, B, H, zeros
from flash_cases import F32
from numpy.lib.stride_tricks import as_strided

import attnmask

# Arguments


def test_the_good_arguments_are_good():
    for good, _ in BAD.values():
        out = attnmask.flash_attention(**good)
        assert out.shape == (*good["query"].shape[:-1], DV)


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    good, bad = BAD[name]
    # Who can tell which of two is too long?
    also = {"query": "|key|value", "key": "|query|value", "cum_seqlens_q": "|cum_seqlens_k"}.get(name, "")
    for value in bad:
        with pytest.raises((TypeError, ValueError), match=rf"\b({name}{also})\b"):
            attnmask.flash_attention(**(good | {name: value}))


@pytest.mark.parametrize(("good", "name", "value", "message"), MESSAGES, ids=range(len(MESSAGES)))
def test_what_errors_say(good, name, value, message):
    if name == "q_segment_ids":
        good = {"kv_segment_ids": np.zeros(TK, int)} | good
    if name == "causal_offset":
        good = good | {"causal": True}
    with pytest.raises((TypeError, ValueError), match=message):
        attnmask.flash_attention(**(good | {name: value}))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_an_axis_that_is_too_long(axis):
    shape = [1, 1, 1, 0]
    shape[axis] = 2**57
    endless = as_strided(np.zeros(1, F32), shape, (0, 0, 0, 0))
    with pytest.raises(ValueError, match="query must be of at most"):
        attnmask.flash_attention(endless, endless, endless)


# The output


def test_nothing_is_written_before_all_is_checked():
    out = np.full((B, TQ, H, DV), 77, F32)
    for more in ({"dropout_prob": 2.0}, {"causal_offset": [1, 2, 3]}, {"softmax_aux": zeros(H + 1, 2)}):
        with pytest.raises(ValueError, match=next(iter(more))):
            attnmask.flash_attention(**GOOD, **more, out=out)
    assert (out == 77).all()


# The keep mask


def test_a_keep_mask_that_is_too_large():
    for shape in [(2**31, 2**31, 2**31, 2**31), (1, 1, 2**45, 2**10)]:
        with pytest.raises((MemoryError, ValueError)):
            attnmask.dropout_keep_mask(0, 0.5, shape)
