"""Neighborhoods of grids, beside the rules of NATTEN written out axis by axis."""

import pickle
import tracemalloc

import numpy as np
import pytest
from random_masks import grid_of
from reference_masks import neighborhood, seen_along

import attnmask
from attnmask import MaskInfo

GRIDS = [
    {"shape": (1,), "kernel": 1},
    {"shape": (6,), "kernel": 3, "stride": 2},
    {"shape": (7,), "kernel": 3, "stride": 3},
    {"shape": (200,), "kernel": 65},
    {"shape": (200,), "kernel": 150, "causal": True, "stride": 4},
    {"shape": (199,), "kernel": 31, "dilation": 6, "stride": 5},
    {"shape": (130,), "kernel": 2, "dilation": 65, "causal": True},
    {"shape": (14, 14), "kernel": 7},
    {"shape": (9, 56), "kernel": (3, 7), "stride": (2, 3)},
    {"shape": (56, 3), "kernel": (9, 1), "dilation": (5, 2), "causal": (True, False)},
    {"shape": (3, 130), "kernel": (3, 5), "dilation": (1, 26)},
    {"shape": (64, 2), "kernel": (4, 2), "causal": True},
    {"shape": (70, 1), "kernel": (3, 1)},
    {"shape": (4, 5, 6), "kernel": 3, "stride": (3, 1, 2), "causal": (True, False, False)},
    {"shape": (5, 6, 7), "kernel": (1, 3, 3), "dilation": (2, 2, 1)},
]


def drawn(row: np.ndarray) -> str:
    return "".join(np.where(row, "#", "."))


def array_of(mask: MaskInfo) -> np.ndarray:
    return np.asarray(mask)[0, 0]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_pairs(grid):
    mask, expected = MaskInfo.neighborhood(**grid), neighborhood(**grid)
    np.testing.assert_array_equal(array_of(mask), expected)
    assert mask.density() == expected.mean()
    assert mask.shape == (1, *expected.shape)
    np.testing.assert_array_equal(array_of(pickle.loads(pickle.dumps(mask))), expected)
    leaves, rest = mask.tree_flatten()
    np.testing.assert_array_equal(array_of(MaskInfo.tree_unflatten(rest, leaves)), expected)
    np.testing.assert_array_equal(array_of(~mask), ~expected)
    np.testing.assert_array_equal(array_of(mask.apply_causal()), np.tril(expected))


def test_random_grids():
    rng = np.random.default_rng(0)
    for _ in range(60):
        grid = grid_of(rng, int(rng.integers(1, 300)))
        mask, expected = MaskInfo.neighborhood(**grid), neighborhood(**grid)
        np.testing.assert_array_equal(array_of(mask), expected, err_msg=str(grid))
        rows, columns = (slice(*sorted(rng.integers(0, len(expected) + 1, 2).tolist())) for _ in range(2))
        part = mask[..., rows, columns]
        np.testing.assert_array_equal(array_of(part), expected[rows, columns], err_msg=str(grid))


def test_the_rules():
    """All queries see as many keys; the drawing of the documentation; each phase of a dilated axis by itself."""
    assert (neighborhood((5, 9), (3, 5), (2, 4)).sum(-1) == 15).all()
    assert drawn(seen_along(6, 3, stride=2)[2]) == "..###."
    assert drawn(seen_along(6, 3, causal=True)[3]) == ".###.."
    dilated = seen_along(11, 3, dilation=3)
    for phase in range(3):
        size = len(range(phase, 11, 3))
        np.testing.assert_array_equal(dilated[phase::3, phase::3], seen_along(size, 3))


def test_each_batch_row_from_its_own_query():
    """Rows that are at different places of a sequence have shifts of their own."""
    mask = MaskInfo.neighborhood((12, 6), 3, batch=2).apply_kv_lengths([30, 72], q_len=4)
    expected = neighborhood((12, 6), 3)
    for row, end in enumerate((30, 72)):
        pairs = expected[end - 4 : end] & (np.arange(72) < end)
        np.testing.assert_array_equal(np.asarray(mask)[row, 0], pairs)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_attention(isa, grid):
    rng = np.random.default_rng(0)
    mask, pairs = MaskInfo.neighborhood(**grid), neighborhood(**grid)
    query, key, value = (rng.standard_normal((1, len(pairs), heads, 16)) for heads in (4, 2, 2))
    results = []
    for given in (mask, MaskInfo(pairs[None, None])):
        (out, lse), vjp = attnmask.flash_attention_vjp(query, key, value, given, return_lse=True)
        grads = vjp(np.cos(out), np.sin(lse))
        results.append([out, lse, grads.query, grads.key, grads.value])
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


def test_a_video_needs_no_array_of_pairs():
    grid = {"shape": (16, 32, 32), "kernel": (3, 7, 7)}
    tokens = 16 * 32 * 32
    tracemalloc.start()
    mask = MaskInfo.neighborhood(**grid)
    assert mask.density() == 3 * 7 * 7 / tokens
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert array_of(mask[..., 1000:1001, :]).sum() == 147


def test_words():
    assert "neighborhood(6, kernel=3)" in repr(MaskInfo.neighborhood((6,), 3))
    mask = MaskInfo.neighborhood((6, 8), (3, 5), stride=(1, 2), dilation=(2, 1), causal=(True, False))
    assert "neighborhood(6 x 8, kernel=3 x 5, stride=1 x 2, dilation=2 x 1, causal=1 x 0)" in repr(mask)
    assert "causal)" in repr(MaskInfo.neighborhood((6,), 3, causal=True))


def made(shape=(9, 12), kernel=3, **more):
    return MaskInfo.neighborhood(shape, kernel, **more)


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (ValueError, "kernel must be at most 9, the length of axis 0, got 11", lambda: made(kernel=(11, 3))),
        (ValueError, "kernel must be odd for axis 1.*or the axis causal, got 4", lambda: made(kernel=(3, 4))),
        (ValueError, "stride must be at most 3, the kernel of axis 1, got 4", lambda: made(stride=(3, 4))),
        (ValueError, "dilation must be at most 3 for axis 0, .*got 4", lambda: made(dilation=4)),
        (ValueError, "kernel must be at least 1, got 0", lambda: made(kernel=0)),
        (ValueError, "stride of axis 1 must be at least 1, got 0", lambda: made(stride=(1, 0))),
        (TypeError, "dilation must be an integer, got 1.5", lambda: made(dilation=1.5)),
        (TypeError, "causal must be True or False, got 1", lambda: made(causal=1)),
        (ValueError, "kernel must be one value, or one for each of the 2 axes of shape", lambda: made(kernel=(3,))),
        (ValueError, "shape must be a tuple of one to three lengths, got 9", lambda: made(shape=9)),
        (ValueError, "shape must be a tuple of one to three lengths", lambda: made(shape=(9,) * 4)),
        (ValueError, "shape of axis 1 must be at least 1, got 0", lambda: made(shape=(9, 0))),
        (ValueError, r"shape must have at most 2\*\*56 points", lambda: made(shape=(2**40, 2**40))),
        (ValueError, "batch must be at least 0, got -1", lambda: made(batch=-1)),
    ],
)  # fmt: skip
def test_bad_input(error, words, call):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize(
    "grid",
    [
        np.array([[9, 3, 1, 1]]),
        np.array([[9, 11, 1, 1, 0]]),
        np.array([[9, 3, 4, 1, 0]]),
        np.array([[9, 3, 1, 4, 0]]),
        np.array([[9, 3, 0, 1, 0]]),
        np.array([[0, 1, 1, 1, 0]]),
        np.array([[2**40, 3, 1, 1, 0]] * 3),
        np.array([[8, 3, 1, 1, 0]]),
        np.array([[9.0, 3, 1, 1, 0]]),
        np.ones((4, 5), int),
    ],
)
def test_trees_that_are_wrong(grid):
    """Leaves are any arrays: the core checks them."""
    leaves, rest = MaskInfo.neighborhood((9,), 3).tree_flatten()
    leaves = [grid if x is not None and np.shape(x) == (1, 5) else x for x in leaves]
    with pytest.raises((ValueError, TypeError), match="grid"):
        np.asarray(MaskInfo.tree_unflatten(rest, leaves))
