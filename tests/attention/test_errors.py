"""Bad input of attention and its gradients raises an error that names the argument, before anything is written."""

import re

import numpy as np
import pytest
from flash_bad_input import BAD, DV, GOOD, MESSAGES, PACKED, TQ, B, H, zeros
from flash_cases import F32, F64
from numpy.lib.stride_tricks import as_strided

import attnmask

# Arguments

OUT, LSE = zeros(B, TQ, H, DV), zeros(B, H, TQ)
ROWS = {"dout": OUT, "out": OUT, "lse": LSE, "dlse": LSE}
ERRORS = (TypeError, ValueError)


def raises(error, function, *args, **kwargs) -> str:
    with pytest.raises(error) as raised:
        function(*args, **kwargs)
    return str(raised.value)


def test_the_good_arguments_are_good():
    for good, _ in BAD.values():
        out = attnmask.flash_attention(**good)
        assert out.shape == (*good["query"].shape[:-1], DV)


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    """The gradients refuse what the forward pass refuses."""
    good, bad = BAD[name]
    rows = ROWS if good["query"].shape[0] == B else {key: array[:1] for key, array in ROWS.items()}
    # Who can tell which of two is too long?
    also = {"query": "|key|value", "key": "|query|value", "cum_seqlens_q": "|cum_seqlens_k"}.get(name, "")
    for value in bad:
        given = good | {name: value}
        message = raises(ERRORS, attnmask.flash_attention, **given)
        assert re.search(rf"\b({name}{also})\b", message)
        assert raises(ERRORS, attnmask.flash_attention_vjp, **given) == message
        raises(
            ERRORS, attnmask.flash_attention_bwd, **rows, **given
        )  # perhaps that results do not fit inputs


@pytest.mark.parametrize(("good", "name", "value", "message"), MESSAGES, ids=range(len(MESSAGES)))
def test_what_errors_say(good, name, value, message):
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


# Gradients


@pytest.mark.parametrize("name", ROWS)
def test_bad_results(name):
    """The error names the argument, what was expected and what came, for a pullback as well."""
    _, vjp = attnmask.flash_attention_vjp(**GOOD)
    right = ROWS[name]
    for bad in (right.astype(F64), right.astype(int), right.swapaxes(1, 2), right[0], right[..., None]):
        rows = ROWS | {name: bad}
        message = raises(ERRORS, attnmask.flash_attention_bwd, **rows, **GOOD)
        assert message.startswith(f"{name} must be "), (name, bad, message)
        assert ", got " in message
        if name in ("dout", "dlse"):
            assert raises(ERRORS, vjp, rows["dout"], rows["dlse"]) == message


def test_bad_results_without_a_batch():
    packed = PACKED | {name: PACKED[name][0] for name in ("query", "key", "value")}
    (out, lse), vjp = attnmask.flash_attention_vjp(**packed, return_lse=True)
    assert vjp(out, lse).query.shape == packed["query"].shape
    for bad in (out[None], out[:-1], out.swapaxes(0, 1)):
        assert raises(ValueError, vjp, bad).startswith(f"dout must be of shape {out.shape}, got ")
    for bad in (lse[None], lse.T):
        assert raises(ValueError, vjp, out, bad).startswith(f"dlse must be of shape {lse.shape}, got ")
    rows = {"dout": out, "out": out[None], "lse": lse}
    assert raises(ValueError, attnmask.flash_attention_bwd, **rows, **packed).startswith(
        "out must be of shape "
    )


@pytest.mark.parametrize("name", ["bias", "softmax_aux"])
def test_the_gradient_of_what_is_not_there(name):
    message = f"grad_{name} must be False without {name}, got True"
    assert raises(ValueError, attnmask.flash_attention_vjp, **GOOD, **{f"grad_{name}": True}) == message
    assert (
        raises(ValueError, attnmask.flash_attention_bwd, **ROWS, **GOOD, **{f"grad_{name}": True}) == message
    )
