"""Compares the gradients of the reference with differences of its own results, in more digits than float64 has."""

import numpy as np
import pytest
import reference_flash as ref
from flash_cases import F64, FACTORS, Case, all_pairs

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


@pytest.mark.parametrize("normalize", [True, False])
def test_the_largest_logits_share_the_maximum(normalize):
    """Two logits, or a logit and a sink, are equal: the central difference is the mean of the one-sided derivatives."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((1, 4, 2, 3)) for _ in range(3))
    key[:, 3] = key[:, 1]
    bias = np.array([-20.0, 3, -20, 3])
    arguments = {"query": query, "key": key, "value": value, "bias": bias, "normalize_output": normalize}
    gradients, _ = ref.flash_attention_vjp(np.ones((1, 4, 2, 3)), **arguments)
    assert abs(gradients.bias[1]) > 1e-3
    check(arguments, 1, "two logits", 1e-5)
    sinks = {"softmax_scale": 0.0, "bias": np.array([2.0, 1, 0, -1]), "softmax_aux": np.array([2.0, 0])}
    check(arguments | sinks, 2, "a logit and a sink", 1e-5)


@pytest.mark.repeats
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("sinks", [None, [0.5, -np.inf], [-np.inf]], ids=str)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_dead_pairs_have_no_influence(normalize, sinks, poison):
    rng = np.random.default_rng(3)
    arguments = {
        "query": rng.standard_normal((1, 5, 2, 3)),
        "key": rng.standard_normal((1, 6, 1, 3)),
        "value": rng.standard_normal((1, 6, 1, 2)),
        "bias": np.zeros((1, 2, 5, 6)),
        "attention_mask": np.arange(6) != 3,
        "softmax_aux": sinks,
        "normalize_output": normalize,
        "logits_soft_cap": 2.0,
    }
    arguments["bias"][:, :, 2] = -np.inf
    dout = rng.standard_normal((1, 5, 2, 2))
    clean, _ = ref.flash_attention_vjp(dout, **arguments)
    dead = {name: arguments[name].copy() for name in ("query", "key", "value", "bias")}
    dead["query"][:, 2] = dead["key"][:, 3] = dead["value"][:, 3] = dead["bias"][..., 3] = poison
    dout[:, 2] = poison
    got, _ = ref.flash_attention_vjp(dout, **(arguments | dead))
    for name, one, other in zip(got._fields, got, clean, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-15, err_msg=name)
    assert not got.query[:, 2].any()
    assert not got.key[:, 3].any()
    assert not got.value[:, 3].any()
    assert not got.bias[:, :, 2].any()
    assert not got.bias[..., 3].any()


def test_summed_to():
    array = np.arange(24.0).reshape(2, 3, 4)
    assert ref.summed_to(array, ()) == array.sum()
    np.testing.assert_array_equal(ref.summed_to(array, (1, 3, 4)), array.sum(axis=0, keepdims=True))
    np.testing.assert_array_equal(ref.summed_to(array, (3, 1)), array.sum(axis=(0, 2))[:, None])
