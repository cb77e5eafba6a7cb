"""Gradients are right for every division of the work, with the same bits for any number of threads."""

import itertools
import math

import numpy as np
import pytest
from environment import SANITIZED
from flash_backward_expected import (
    NAMES,
    GradientCase,
    assert_equal_bits,
    dout_of,
    expected,
    expected_of,
    gradients,
    run,
)
from flash_cases import BF16, F32, F64, FLOATS, SEQUENCES, STEADY, Case, bits_of, of_lengths

import attnmask

# Sequences


@pytest.mark.repeats
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", list(SEQUENCES)[:: 2 if SANITIZED else 1])
@pytest.mark.parametrize("segments", [False, True])
def test_sequences_of_any_length(isa, set_threads, dtype, name, segments):
    more = {"causal": True} if segments else {"dropout": 0.3, "sinks": "[H, S]", "bias": "[H, 1, Tk]"}
    set_threads(2)
    case = of_lengths(name, dtype, (2, 1), segments, **more)
    arguments = case.arguments()
    dout = dout_of(arguments)
    expected(arguments, dout, keep=case.keep(), case=case).check(gradients(arguments, dout))


# Blocks and threads

SHARED = (
    "[1, H, Tq, Tk]", "[1, 1, Tq, Tk]", "[B, 1, Tq, 1]", "[1, H, Tq, 1]", "[H, 1, Tk]", "[1, 1, 1, Tk]", "[]",
)  # fmt: skip
SHARED_BIAS = [
    Case(dtype, 300, 350, 16, 16, 2, (4, 2), causal=True, offset=40, bias=shape, seed=1)
    for dtype, shape in zip(itertools.cycle([F32, BF16, F64]), SHARED, strict=False)
] + [  # several tiles of keys per task
    Case(dtype, 70, 2100, 7, 9, 2, (8, 4), causal=True, offset="bottom-right", bias=shape, seed=1)
    for dtype, shape in ((F32, "[H, 1, Tk]"), (BF16, "[H, 1, Tk]"), (BF16, "[1, 1, Tq, Tk]"))
]


@pytest.mark.repeats
@pytest.mark.parametrize("steady", [*STEADY, *SHARED_BIAS], ids=str)
def test_any_number_of_threads_gives_the_same_bits(isa, set_threads, steady):
    case = GradientCase(
        **{name: getattr(steady, name) for name in steady.__dataclass_fields__}, with_dlse=True
    )
    arguments = case.arguments()
    set_threads(1)
    got = run(case, arguments)
    expected_of(case).check(got)
    for threads in (3,) if SANITIZED else (2, 3, 8):
        set_threads(threads)
        assert_equal_bits(run(case, arguments), got, (isa, threads, case))


PARTS = [  # (queries, keys, head_dim, value_dim, heads), and what is seen
    (500, 330, 16, 24, (2, 1), {}),
    (700, 700, 33, 16, (2, 2), {"causal": True}),
    (900, 900, 16, 16, (1, 1), {"window": (100, 30)}),
    (260, 70, 16, 16, (4, 1), {"causal": True, "offset": "bottom-right"}),
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("case", PARTS, ids=str)
def test_keys_whose_sums_have_parts(isa, set_threads, dtype, case):
    """Parts of the blocks that see a key are summed up apart: by one task, or for many threads by one each."""
    q, k, head_dim, value_dim, heads, more = case
    steady = GradientCase(dtype, q, k, head_dim, value_dim, 2, heads, with_dlse=True, seed=1, **more)
    arguments = steady.arguments()
    set_threads(1)
    got = run(steady, arguments)
    expected_of(steady).check(got)
    for threads in (2, 16):
        set_threads(threads)
        assert_equal_bits(run(steady, arguments), got, (isa, threads, case))


@pytest.mark.repeats
@pytest.mark.parametrize("poison", [0, math.nan], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_tasks_of_many_tiles(isa, set_threads, dtype, poison):
    """Tasks take 16 tiles if a narrow mask has many heads, but one for a single head; rows may see all keys or none.

    Most blocks see two tiles, so tasks of results keep two; blocks that see more, and other heads, replace them.
    """
    rng = np.random.default_rng(0)
    tokens, heads = 1280, 64
    query, key, value, dout = (rng.standard_normal((1, tokens, heads, 4)).astype(dtype) for _ in range(4))
    distance = np.arange(tokens)[:, None] - np.arange(tokens)
    mask = (distance >= 0) & (distance < 60)
    mask[[7 * 64 + 5, 9 * 64 + 1, 18 * 64]] = True
    mask[130:400] = False
    mask[:, 700:900] = False
    key[0, 77:80] = poison

    def results(heads):
        out, vjp = attnmask.flash_attention_vjp(*(x[:, :, heads] for x in (query, key, value)), mask)
        return {"out": out} | dict(zip(NAMES[:3], vjp(dout[:, :, heads]), strict=False))

    set_threads(1)
    whole = results(slice(None))
    for threads in (2, 5):
        set_threads(threads)
        assert bits_of(results(slice(None))) == bits_of(whole), (isa, threads)
    near = {F32: 1e-5, BF16: 2**-7}[dtype]
    for head in (0, 37, 63):
        for name, alone in results(slice(head, head + 1)).items():
            one, other = whole[name][:, :, head].astype(F32), alone[:, :, 0].astype(F32)
            size = np.nanmax(np.abs(other))  # relative to the largest, since terms of some sums cancel
            np.testing.assert_allclose(one, other, rtol=near, atol=near * size, err_msg=f"{name} of {head}")
    seen = mask[:, 77:80].any(axis=1) & np.isnan(poison)
    for name, nan in (("out", seen), ("query", seen), ("value", mask[seen].any(axis=0))):
        np.testing.assert_array_equal(np.isnan(whole[name].astype(F32)).any(axis=(0, 2, 3)), nan)
