"""Invalid arguments of the gradients raise an error that names the argument."""

import numpy as np
import pytest
from flash_bad_input import BAD, DV, GOOD, NO_FLAG, PACKED, TK, TQ, B, D, H, zeros
from flash_cases import F16, F64

import attnmask

# Results

OUT, LSE = zeros(B, TQ, H, DV), zeros(B, H, TQ)
ROWS = {"dout": OUT, "out": OUT, "lse": LSE, "dlse": LSE}
NO_ROWS = ["x", OUT.astype(F64), OUT.astype(F16), OUT.astype(int), OUT.astype(complex), np.zeros((2, 3), F64)]
BAD_ROWS: dict[type, dict[str, list]] = {
    TypeError: {
        "dout": [*NO_ROWS, None],
        "out": [*NO_ROWS, None],
        "lse": [*NO_ROWS, None],
        "dlse": NO_ROWS,
    },
    ValueError: {
        "dout": [zeros(B, TQ, H, DV + 1), zeros(B, TQ, H, D), OUT[0], OUT.swapaxes(1, 2), zeros(1, *OUT.shape)],
        "out": [zeros(B, TQ, H, DV + 1), zeros(B, TQ + 1, H, DV), OUT[:1], OUT[0], zeros(1, *OUT.shape)],
        "lse": [LSE.swapaxes(1, 2), LSE[0], LSE[..., None], zeros(B, H, TQ + 1), zeros(1, H, TQ), OUT],
        "dlse": [LSE.swapaxes(1, 2), LSE[0], LSE[..., None], zeros(B, H, TQ + 1), zeros(1, H, TQ), zeros()],
    },
}  # fmt: skip


def raises(error, function, *args, **kwargs) -> str:
    with pytest.raises(error) as raised:
        function(*args, **kwargs)
    return str(raised.value)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("error", BAD_ROWS)
def test_bad_results(name, error):
    """The error names the argument, what was expected and what came."""
    _, vjp = attnmask.flash_attention_vjp(**GOOD)
    for bad in BAD_ROWS[error][name]:
        rows = ROWS | {name: bad}
        message = raises(error, attnmask.flash_attention_bwd, **rows, **GOOD)
        assert message.startswith(f"{name} must be "), (name, bad, message)
        assert ", got " in message
        if name in ("dout", "dlse"):
            assert raises(error, vjp, rows["dout"], rows["dlse"]) == message


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


def test_results_of_other_inputs():
    """The arguments differ in shape or dtype from those that the results belong to."""
    for more in (
        {"query": zeros(B, TQ + 1, H, D)},
        {"query": zeros(B, TQ, 2 * H, D)},
        {"value": zeros(B, TK, 2, DV + 1)},
        {name: GOOD[name].astype(F64) for name in ("query", "key", "value")},
    ):
        with pytest.raises((TypeError, ValueError), match=r"^(dout|out|lse) must be "):
            attnmask.flash_attention_bwd(**ROWS, **(GOOD | more))


# Arguments


@pytest.mark.parametrize("name", sorted(set(BAD) - {"out", "return_lse"}))
@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_bad_input(name, error):
    """The gradients refuse what the forward pass refuses."""
    good, bad = BAD[name]
    rows = ROWS if good["query"].shape[0] == B else {key: array[:1] for key, array in ROWS.items()}
    for value in bad.get(error, []):
        given = good | {name: value}
        message = raises(error, attnmask.flash_attention, **given)
        assert raises(error, attnmask.flash_attention_vjp, **given) == message
        with pytest.raises(error):  # the error may be that the results do not fit the inputs
            attnmask.flash_attention_bwd(**rows, **given)


@pytest.mark.parametrize("name", ["grad_bias", "grad_softmax_aux", "return_lse"])
def test_bad_flags(name):
    for flag in NO_FLAG:
        assert name in raises(TypeError, attnmask.flash_attention_vjp, **GOOD, **{name: flag})
        if name != "return_lse":
            assert name in raises(TypeError, attnmask.flash_attention_bwd, **ROWS, **GOOD, **{name: flag})


@pytest.mark.parametrize("name", ["bias", "softmax_aux"])
def test_the_gradient_of_what_is_not_there(name):
    message = f"grad_{name} must be False without {name}, got True"
    assert raises(ValueError, attnmask.flash_attention_vjp, **GOOD, **{f"grad_{name}": True}) == message
    assert (
        raises(ValueError, attnmask.flash_attention_bwd, **ROWS, **GOOD, **{f"grad_{name}": True}) == message
    )


def test_an_array_that_raises():
    class Raises:
        def __array__(self, dtype=None, copy=None):
            raise ZeroDivisionError("not today")

    for name in ROWS:
        with pytest.raises(ZeroDivisionError, match="not today"):
            attnmask.flash_attention_bwd(**(ROWS | {name: Raises()}), **GOOD)
