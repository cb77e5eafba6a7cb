"""Results and gradients are right for every division of the work, with the same bits for any number of threads."""

import itertools
import math

import numpy as np
import pytest
from environment import SANITIZED
from flash_cases import BF16, F32, F64, FLOATS, SEQUENCES, STEADY, Case, bits_of, of_lengths
from flash_expected import NAMES, GradientCase, check, check_by_threads, expected, run
from hypothesis import given
from hypothesis import strategies as st
from layouts import arrange

import attnmask

pytestmark = pytest.mark.levels("turns", "amx")

# Few queries


@given(
    dtype=st.sampled_from(FLOATS),
    queries=st.sampled_from([*range(1, 9), 13, 16, 28, 32, 40, 60, 64]),
    keys=st.sampled_from([1, 31, 255, 256, 257, 1000, 3000]),
    heads=st.sampled_from([(8, 2), (4, 4), (8, 1), (6, 6), (18, 18), (12, 4), (14, 2)]),
    depth=st.sampled_from([64, 128, 40, 48, 7, 256]),
    layout=st.sampled_from(["contiguous", "heads first", "sliced", "reversed", "misaligned"]),
    more=st.sampled_from(
        [
            {},
            {"causal": True, "offset": "bottom-right"},
            {"causal": True, "offset": "bottom-right", "window": (300, 0), "sinks": "[H, S]"},
            {"mask": "[B, 1, 1, Tk] int32", "soft_cap": 20.0},
            {"mask": "[B, H, Tq, Tk] bool"},
            {"mask": "segments of heads, causal"},
            {"segments": True, "bias": "[H, 1, Tk]"},
            {"packing": "flat", "causal": True, "offset": "bottom-right"},
            {"normalize": False, "dropout": 0.3},
            {"scale": -0.05, "sinks": "[S]"},
        ]
    ),
)
def test_few_queries(each_isa, set_threads, dtype, queries, keys, heads, depth, layout, more):
    """Few queries and many keys, which may be split among threads."""
    case = Case(
        dtype, queries, keys, depth, depth, 2, heads, layout, layout, **more, seed=keys + queries, threads=3
    )
    set_threads(case.threads)
    for _ in each_isa():
        check(case)


# Numbers of queries, and of heads that share keys: their rows fill vectors, or are just too few for that.
FULL_ROWS = [(8, 4), (27, 1), (13, 1), (14, 1), (28, 1), (47, 1), (64, 1), (4, 4)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rows", FULL_ROWS[:: 3 if SANITIZED else 1], ids=str)
@pytest.mark.parametrize(("depth", "value_depth"), [(1, 1), (33, 48), (128, 40)])
def test_rows_that_fill_vectors(isa, dtype, rows, depth, value_depth):
    """Tiles of these rows are transposed where all pairs are live; each tile raises the reference of the rows."""
    queries, heads = rows
    for layout, normalize in (("contiguous", True), ("reversed", False)):
        more = {"causal": True, "offset": "bottom-right", "normalize": normalize}
        case = Case(dtype, queries, 200, depth, value_depth, 1, (heads, 1), layout, layout, **more)
        arguments = case.arguments()
        growing = np.linspace(0.2, 60, 200).reshape(200, 1, 1)
        arguments["key"] = arrange((arguments["key"] * growing).astype(dtype), layout)
        expected(arguments, case=case).check(*run(case, arguments))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("keys", [769, 768, 1500][: 1 if SANITIZED else 3])
@pytest.mark.parametrize("mask", [None, "[B, H, Tq, Tk] bool"])
def test_many_heads_of_few_queries(isa, set_threads, dtype, keys, mask):
    """The heads are enough tasks, so keys are split into longer parts; heads may see different keys."""
    case = Case(dtype, 2, keys, 8, 8, 1, (40, 20), causal=True, offset="bottom-right", mask=mask)
    check_by_threads(case, set_threads, 2, 1)


@pytest.mark.repeats
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("packing", [None, "flat"])
@pytest.mark.parametrize(
    ("queries", "heads"), [(28, (14, 2)), (64, (17, 1)), (33, (6, 2))][: 1 if SANITIZED else 3], ids=str
)
def test_heads_that_share_keys_meet_them_in_turn(isa, set_threads, dtype, packing, queries, heads):
    """The rows do not fit one block: one task packs the keys for several blocks, the last of which has fewer heads."""
    some = [
        {"dropout": 0.3, "bias": "[B, H, Tq, Tk]", "return_lse": False},
        {"mask": "segments of heads, causal", "sinks": "[H, S]"},
        {"normalize": False, "soft_cap": 5.0, "kv_layout": "misaligned"},
    ]
    for more in some[: 1 if SANITIZED else 3]:
        if packing and more.keys() & {"mask", "bias"}:
            more = {"dropout": 0.3, "causal": True, "offset": "bottom-right"}
        case = Case(dtype, queries, 150, 24, 40, 8, heads, packing=packing, **more)
        check_by_threads(case, set_threads, 2, 1)


MANY = 330 if SANITIZED else 700


@pytest.mark.repeats
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("heads", [(5, 5), (20, 20), (8, 4), (21, 3)][: 2 if SANITIZED else 4], ids=str)
# Keys are packed or not; values are packed or not, depending on their depth; queries are not packed for few keys.
@pytest.mark.parametrize(("queries", "keys", "value_depth"), [
    (1, MANY, 40), (2, MANY, 40), (16, MANY, 40), (20, MANY, 40), (20, MANY, 48), (20, MANY, 64),
    (64, MANY, 64), (40, 100, 40),
])  # fmt: skip
def test_few_queries_give_the_same_bits_in_any_layout(each_isa, dtype, heads, queries, keys, value_depth):
    """Contiguous heads are read together."""
    more = {"causal": True, "offset": "bottom-right", "window": (keys - 70, 0)}
    first: dict[str, tuple] = {}
    for layout in ("contiguous", "heads first", "sliced", "reversed", "fortran", "swapped"):
        case = Case(dtype, queries, keys, 22, value_depth, 2, heads, layout, layout, **more)
        arguments = case.arguments()
        for isa in each_isa():
            out, lse = run(case, arguments)
            bits = out.tobytes(), lse.tobytes()
            assert first.setdefault(isa, bits) == bits, (isa, case)


# Sequences, and rows that see different numbers of keys


@pytest.mark.repeats
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", list(SEQUENCES)[:: 2 if SANITIZED else 1])
@pytest.mark.parametrize(("heads", "segments"), [((2, 2), False), ((4, 1), False), ((4, 1), True)], ids=str)
def test_sequences_of_any_length(isa, set_threads, dtype, name, heads, segments):
    """Blocks and tiles begin where sequences do; sequences of few queries have one block each."""
    offset = {} if segments else {"offset": "bottom-right"}
    some = [
        {"causal": True, **offset},
        {"window": (70, 3), "sinks": "[S]", "kv_layout": "heads first"},
        {"normalize": False, "dropout": 0.3, "bias": "[H, 1, Tk]"},
    ]
    set_threads(2)
    for more in some[: 1 if SANITIZED else 3]:
        case = of_lengths(name, dtype, heads, segments, **more)
        check(case)


@pytest.mark.repeats
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("queries", [3, 50, 100])
def test_batch_rows_that_see_unlike_many_keys(isa, set_threads, dtype, queries):
    """Their keys are split into different numbers of parts, and begin at different positions."""
    case = Case(dtype, queries, 3000, 24, 40, 3, (2, 1))
    arguments = case.arguments()
    ids = np.full((3, 3000), 2, np.int32)
    ids[0, 100:], ids[1, 2300:2900] = 1, 1
    arguments |= {"q_segment_ids": np.ones((3, queries), np.int32), "kv_segment_ids": ids}
    set_threads(2)
    expected(arguments, case=case).check(*run(case, arguments))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_comes_next_sees_nothing(isa, dtype):
    """The last queries see keys, but the first ones see none; visible keys begin in the middle."""
    case = Case(dtype, 200, 700, 24, 40, 1, (2, 2))
    arguments = case.arguments()
    q_ids, k_ids = np.ones((1, 200), np.int32), np.ones((1, 700), np.int32)
    q_ids[:, :100], k_ids[:, :500] = 7, 8
    arguments |= {"q_segment_ids": q_ids, "kv_segment_ids": k_ids}
    expected(arguments, case=case).check(*run(case, arguments))


# --- Gradients ---


# Sequences


@pytest.mark.repeats
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", list(SEQUENCES)[:: 2 if SANITIZED else 1])
@pytest.mark.parametrize("segments", [False, True])
def test_gradients_of_sequences_of_any_length(isa, set_threads, dtype, name, segments):
    more = {"causal": True} if segments else {"dropout": 0.3, "sinks": "[H, S]", "bias": "[H, 1, Tk]"}
    set_threads(2)
    check(GradientCase(**vars(of_lengths(name, dtype, (2, 1), segments, **more))))


# Blocks and threads

SHARED = (
    "[1, H, Tq, Tk]", "[1, 1, Tq, Tk]", "[B, 1, Tq, 1]", "[1, H, Tq, 1]", "[H, 1, Tk]", "[1, 1, 1, Tk]", "[1]",
)  # fmt: skip
SHARED_BIAS = [
    Case(dtype, 300, 350, 16, 16, 2, (4, 2), causal=True, offset=40, bias=shape, seed=1)
    for dtype, shape in zip(itertools.cycle([F32, BF16, F64]), SHARED, strict=False)
] + [  # several tiles of keys per task
    Case(dtype, 70, 2100, 7, 9, 2, (8, 4), causal=True, offset="bottom-right", bias=shape, seed=1)
    for dtype, shape in ((F32, "[H, 1, Tk]"), (BF16, "[H, 1, Tk]"), (BF16, "[1, 1, Tq, Tk]"))
]


PARTS = [  # parts of the blocks that see a key are summed up apart: by one task, or for many threads by one each
    GradientCase(dtype, *sizes, 2, heads, **more, with_dlse=True, seed=1)
    for dtype in FLOATS
    for sizes, heads, more in (
        ((500, 330, 16, 24), (2, 1), {}),
        ((700, 700, 33, 16), (2, 2), {"causal": True}),
        ((900, 900, 16, 16), (1, 1), {"window": (100, 30)}),
        ((260, 70, 16, 16), (4, 1), {"causal": True, "offset": "bottom-right"}),
    )
]


@pytest.mark.repeats
@pytest.mark.parametrize(
    "case",
    [*STEADY, *(GradientCase(**vars(case), with_dlse=True) for case in (*STEADY, *SHARED_BIAS)), *PARTS],
    ids=str,
)
def test_any_number_of_threads_gives_the_same_bits(isa, set_threads, case):
    check_by_threads(case, set_threads, *((1, 3) if SANITIZED else (1, 2, 3, 8, 16)))


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
