"""Each term of the logits alone and beside each other one: forward and backward, on shapes of every kind."""

from itertools import combinations

import ml_dtypes
import numpy as np
import pytest
from flash_cases import FLOATS, worst
from flash_expected import expected, expected_gradients
from layouts import arrange
from reference_terms import dense_terms, distances, grid_gradient, grid_terms, points, table_gradient

import attnmask
from attnmask import _core

SHAPES = (  # batch, queries, keys, heads, key heads, depth, the table's length and least distance
    (1, 1, 100, 4, 4, 64, 50, -60),
    (2, 1, 700, 8, 2, 64, 3000, -2999),
    (1, 7, 300, 4, 1, 33, 10, -3),
    (3, 64, 64, 2, 2, 16, 127, -63),
    (1, 100, 257, 2, 1, 64, 1500, -400),
    (2, 130, 130, 2, 1, 65, 9, -4),
    (1, 40, 300, 4, 4, 128, 1, 0),
    (1, 70, 70, 6, 2, 40, 5, -600),
    (1, 0, 5, 2, 1, 8, 3, -1),
    (1, 5, 0, 2, 1, 8, 3, -1),
)
LEARNED = ("bias", "softmax_aux", "relative_bias", "grid_bias")
TERMS = (*combinations(_core.term_names(), 1), *combinations(_core.term_names(), 2), _core.term_names())


def grid_of(queries, keys) -> tuple[int, int]:
    """The shape of a table of a grid for these tokens, of which queries may come later by up to five."""
    width = {1: 1, 7: 3, 64: 8, 100: 200, 130: 7}.get(queries, 13)
    return 2 * -(-(max(queries, keys) + 5) // width) - 1, 2 * width - 1


def arguments_of(names, shape, dtype, rng) -> dict:
    """Arguments for these terms; the bias has a number for each pair."""
    batch, queries, keys, heads, _, _, length, low = shape
    terms = {
        "bias": rng.standard_normal((batch, heads, queries, keys)).astype(dtype),
        "alibi_slopes": rng.random((batch, heads)) / 4,
        "relative_bias": rng.standard_normal((heads, length)).astype(dtype),
        "logits_soft_cap": 3.0,
        "dropout_prob": 0.25,
        "softmax_aux": rng.standard_normal((heads, 2)).astype(dtype),
        "grid_bias": rng.standard_normal((heads, *grid_of(queries, keys))).astype(dtype),
    }
    assert terms.keys() == set(_core.term_names()), "a kind of term has no case here"
    more = {"relative_low": low} if "relative_bias" in names else {}
    return {name: terms[name] for name in names} | more


@pytest.mark.repeats
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("names", TERMS, ids="+".join)
def test_terms(each_isa, names, shape):
    """Beside the float64 twin, to which what is added by distance is a dense bias."""
    batch, queries, keys, heads, kv_heads, depth, _, low = shape
    place = TERMS.index(names) + SHAPES.index(shape)
    rng, dtype = np.random.default_rng(place), FLOATS[place % 4]
    q, k, v, dout = (
        arrange(rng.standard_normal((batch, *size, depth)).astype(dtype), layout)
        for size, layout in (
            ((queries, heads), "heads first"),
            ((keys, kv_heads), "sliced"),
            ((keys, kv_heads), "contiguous"),
            ((queries, heads), "contiguous"),
        )
    )
    given = arguments_of(names, shape, dtype, rng)
    offsets = keys - queries + rng.integers(-5, 6, batch)
    if "grid_bias" in names:
        offsets = offsets.clip(0)  # all queries are points of the grid
    seen = {"causal": len(names) > 1, "causal_offset": offsets}
    seen |= {} if len(names) > 1 else {"sliding_window": (90, 40)}
    wanted = {f"grad_{name}": True for name in names if name in LEARNED}

    distance = distances(queries, keys, offsets)
    slopes, table = given.get("alibi_slopes"), given.get("relative_bias")
    dense = np.zeros((batch, heads, queries, keys))
    if slopes is not None or table is not None:
        dense = dense_terms(distance, slopes, None if table is None else table.astype(float), low)
    grid = given.get("grid_bias")
    if grid is not None:
        places = points(queries, keys, offsets, grid.shape[1:])
        dense = dense + grid_terms(grid.astype(float), places)
    dense = dense + given.get("bias", np.zeros((), dtype)).astype(float)
    own = ("logits_soft_cap", "softmax_aux", "dropout_prob")
    twin = {"query": q, "key": k, "value": v, "bias": dense, **seen}
    twin |= {name: given[name] for name in own if name in given}
    keep = attnmask.dropout_keep_mask(3, 0.25, dense.shape) if "dropout_prob" in given else None
    right, right_gradients = expected(twin, keep), expected_gradients(twin, dout, keep=keep)
    for _ in each_isa():
        (out, lse), vjp = attnmask.flash_attention_vjp(
            q, k, v, return_lse=True, dropout_seed=3, **given, **seen, **wanted
        )
        right.check(out, lse)
        grads = vjp(dout)
        right_gradients.check(grads._replace(bias=None, relative_bias=None, grid_bias=None))
        for name, sums in (
            ("bias", lambda x: x.bias),
            ("relative_bias", lambda x: table_gradient(x.bias, distance, table.shape, low)),
            ("grid_bias", lambda x: grid_gradient(x.bias, places, grid.shape)),
        ):
            if name not in names:
                assert getattr(grads, name) is None
                continue
            exact, size = sums(right_gradients.exact), sums(right_gradients.sizes)
            allowed = right_gradients.errors.bias + 2 * float(ml_dtypes.finfo(dtype).eps)
            assert (getattr(grads, name).dtype, getattr(grads, name).shape) == (dtype, exact.shape)
            assert worst(getattr(grads, name), exact, size, dtype) <= allowed, name
