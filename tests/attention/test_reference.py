"""Compares the gradients of the reference with differences of its own results, in more digits than float64 has."""

import numpy as np
import pytest
import reference_flash as ref
from flash_cases import F64, FACTORS, Case, all_pairs

pytestmark = pytest.mark.levels("once")

STEP = np.longdouble(2.0**-18)

SMALL = FACTORS | {
    "dtype": (F64,),
    "queries": (5, 1, 0, 8),
    "keys": (6, 1, 0, 9),
    "depth": (3, 1),
    "value_depth": (3, 2),
    "batch": (2, 1),
    "heads": ((2, 2), (4, 2), (3, 1)),
    "window": (None, 2, (3, 0), (0, 2)),
    "spread": (1.0,),
    "seed": tuple(range(3)),
}
NO_RESULT = (
    "q_layout", "kv_layout", "return_lse", "out_layout", "threads", "blocks", "precision", "logits_dtype",
)  # fmt: skip
SMALL = {name: levels for name, levels in SMALL.items() if name not in NO_RESULT}
CASES = [Case(**levels) for levels in all_pairs(SMALL, 1)]


def slopes(dout, dlse, arguments: dict, moves: dict) -> np.longdouble:
    """The derivative of Σ dout · out + Σ dlse · lse in the direction `moves`, by a central difference."""

    def total(step):
        moved = {name: arguments[name] + step * move for name, move in moves.items()}
        result = ref.flash_attention(**(arguments | moved), dtype=np.longdouble)
        return (dout * result.out).sum() + (dlse * np.where(np.isneginf(result.lse), 0, result.lse)).sum()

    return (total(STEP) - total(-STEP)) / (2 * STEP)


def check(arguments: dict, seed: int, case, near: float = 1e-7) -> None:
    """Checks each gradient in a few random directions, and all gradients together in one."""
    rng = np.random.default_rng(seed)
    arguments = arguments | {
        name: np.asarray(arguments[name], np.longdouble)
        for name in ("query", "key", "value", "bias", "softmax_aux")
        if arguments.get(name) is not None
    }
    result = ref.flash_attention(**arguments)
    dout, dlse = rng.standard_normal(result.out.shape), rng.standard_normal(result.lse.shape)
    got, sizes = ref.flash_attention_vjp(dout, dlse, **arguments, dtype=np.longdouble)
    gradients = {name: value for name, value in got._asdict().items() if value is not None}
    for name, gradient in gradients.items():
        assert gradient.shape == arguments[name].shape, (name, case)
        assert (abs(gradient) <= getattr(sizes, name) * (1 + 1e-9)).all(), (name, case)
    for names in [*([name] for name in gradients for _ in range(3)), list(gradients)]:
        moves = {name: rng.standard_normal(arguments[name].shape) for name in names}
        slope = slopes(dout, dlse, arguments, moves)
        sums = sum((gradients[name] * move).sum() for name, move in moves.items())
        message = f"{names}: {case}"
        np.testing.assert_allclose(float(sums), float(slope), rtol=near, atol=near, err_msg=message)


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(CASES.index(case)))
def test_any_arguments(case):
    check(case.arguments() | {"keep": case.keep()}, case.seed, case)
