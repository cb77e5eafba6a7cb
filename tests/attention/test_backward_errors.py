"""Invalid arguments of the gradients raise an error that names the argument."""

import pytest
from flash_bad_input import BAD, DV, GOOD, PACKED, TQ, B, H, zeros
from flash_cases import F64

import attnmask

# Results

OUT, LSE = zeros(B, TQ, H, DV), zeros(B, H, TQ)
ROWS = {"dout": OUT, "out": OUT, "lse": LSE, "dlse": LSE}


def raises(error, function, *args, **kwargs) -> str:
    with pytest.raises(error) as raised:
        function(*args, **kwargs)
    return str(raised.value)


@pytest.mark.parametrize("name", ROWS)
def test_bad_results(name):
    """The error names the argument, what was expected and what came, for a pullback as well."""
    _, vjp = attnmask.flash_attention_vjp(**GOOD)
    right = ROWS[name]
    for bad in (right.astype(F64), right.astype(int), right.swapaxes(1, 2), right[0], right[..., None]):
        rows = ROWS | {name: bad}
        message = raises((TypeError, ValueError), attnmask.flash_attention_bwd, **rows, **GOOD)
        assert message.startswith(f"{name} must be "), (name, bad, message)
        assert ", got " in message
        if name in ("dout", "dlse"):
            assert raises((TypeError, ValueError), vjp, rows["dout"], rows["dlse"]) == message


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


# Arguments


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    """The gradients refuse what the forward pass refuses."""
    good, bad = BAD[name]
    rows = ROWS if good["query"].shape[0] == B else {key: array[:1] for key, array in ROWS.items()}
    errors = (TypeError, ValueError)
    for value in bad:
        given = good | {name: value}
        message = raises(errors, attnmask.flash_attention, **given)
        assert raises(errors, attnmask.flash_attention_vjp, **given) == message
        with pytest.raises(errors):  # the error may be that the results do not fit the inputs
            attnmask.flash_attention_bwd(**rows, **given)


@pytest.mark.parametrize("name", ["bias", "softmax_aux"])
def test_the_gradient_of_what_is_not_there(name):
    message = f"grad_{name} must be False without {name}, got True"
    assert raises(ValueError, attnmask.flash_attention_vjp, **GOOD, **{f"grad_{name}": True}) == message
    assert (
        raises(ValueError, attnmask.flash_attention_bwd, **ROWS, **GOOD, **{f"grad_{name}": True}) == message
    )
