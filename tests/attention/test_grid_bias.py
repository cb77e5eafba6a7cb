"""Biases by the points of a grid: packed sequences, offsets, infinite numbers, and what is refused."""

import numpy as np
import pytest
from reference_terms import grid_gradient, grid_terms, points

import attnmask

Q_LENS, K_LENS = (3, 70, 0, 16, 30, 5, 49), (5, 70, 4, 40, 63, 0, 49)
Q_STARTS, K_STARTS = np.cumsum([0, *Q_LENS]), np.cumsum([0, *K_LENS])


def packed_inputs(dtype=np.float64):
    rng = np.random.default_rng(0)
    counts = (sum(Q_LENS), sum(K_LENS), sum(K_LENS), sum(Q_LENS))
    return [
        rng.standard_normal((n, heads, 16)).astype(dtype)
        for n, heads in zip(counts, (4, 2, 2, 4), strict=True)
    ]


@pytest.mark.parametrize("offsets", [0, "bottom-right", np.array([1, 0, 6, 5, 14, 65, 21])], ids=str)
@pytest.mark.parametrize("width", [1, 7, 13, 64, 100])
def test_packed_sequences_count_from_their_own_starts(isa, width, offsets):
    """Several of them have queries in one block, and keys in one tile."""
    q, k, v, dout = packed_inputs()
    height = -(-70 // width)
    rng = np.random.default_rng(width)
    table = rng.standard_normal((4, 2 * height - 1, 2 * width - 1))
    given = {"cum_seqlens_q": Q_STARTS, "cum_seqlens_k": K_STARTS, "causal_offset": offsets}
    out, vjp = attnmask.flash_attention_vjp(q, k, v, grid_bias=table, grad_grid_bias=True, **given)
    grads, sums = vjp(dout), np.zeros(table.shape)
    for i, (queries, keys) in enumerate(zip(Q_LENS, K_LENS, strict=True)):
        of_q, of_k = slice(*Q_STARTS[i : i + 2]), slice(*K_STARTS[i : i + 2])
        offset = (
            keys - queries
            if isinstance(offsets, str)
            else offsets
            if isinstance(offsets, int)
            else offsets[i]
        )
        places = points(queries, keys, [offset], table.shape[1:])
        if not queries or not keys:
            places = places.clip(0, 0)  # of pairs that there are not
        alone, of_alone = attnmask.flash_attention_vjp(
            q[None, of_q], k[None, of_k], v[None, of_k], bias=grid_terms(table, places), grad_bias=True
        )
        right = of_alone(dout[None, of_q])
        np.testing.assert_allclose(out[of_q], alone[0], rtol=0, atol=1e-13)
        np.testing.assert_allclose(grads.query[of_q], right.query[0], rtol=0, atol=1e-12)
        np.testing.assert_allclose(grads.key[of_k], right.key[0], rtol=0, atol=1e-12)
        sums += grid_gradient(right.bias, places, table.shape)
    np.testing.assert_allclose(grads.grid_bias, sums, rtol=0, atol=1e-12)


def test_the_gradient_has_the_same_bits_for_any_number_of_threads(set_threads):
    rng = np.random.default_rng(1)
    q, k, v, dout = rng.standard_normal((4, 40, 49, 4, 16), np.float32)
    table, seen = rng.standard_normal((4, 13, 13), np.float32), set()
    for threads in (1, 2, 3):
        set_threads(threads)
        _, vjp = attnmask.flash_attention_vjp(q, k, v, grid_bias=table, grad_grid_bias=True)
        seen.add(vjp(dout).grid_bias.tobytes())
    assert len(seen) == 1


@pytest.mark.parametrize("more", [{}, {"bias": np.zeros((1, 64), np.float32)}])
def test_an_infinite_entry_makes_its_pairs_dead(isa, more):
    """As in a bias: a NaN there has no influence, and a row without another pair is zero."""
    rng = np.random.default_rng(2)
    q, k, v = rng.standard_normal((3, 1, 64, 2, 16), np.float32)
    table = np.zeros((2, 15, 15), np.float32)
    table[0] = -np.inf
    table[1, 8:] = -np.inf  # keys of later rows of the grid
    v[0, 56:] = np.nan
    out, lse = attnmask.flash_attention(q, k, v, grid_bias=table, return_lse=True, **more)
    assert (out[0, :, 0] == 0).all()
    assert np.isneginf(lse[0, 0]).all()
    assert np.isfinite(out[0, :56]).all()
    row = np.arange(64) // 8
    expected = attnmask.flash_attention(q, k, v, row <= row[:, None])
    np.testing.assert_allclose(out[0, :56, 1], expected[0, :56, 1], rtol=1e-5, atol=1e-6)


def test_the_table_of_swin():
    """Which counts from the query to the key's other side."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((2, 12, 3, 8))
    table = rng.standard_normal((5 * 7, 3))  # of 3 × 4 tokens
    y, column = np.divmod(np.arange(12), 4)
    index = (y[:, None] - y + 2) * 7 + column[:, None] - column + 3
    grid = table.T.reshape(3, 5, 7)[:, ::-1, ::-1]
    right = attnmask.flash_attention(x, x, x, bias=np.moveaxis(table[index], 2, 0))
    np.testing.assert_allclose(attnmask.flash_attention(x, x, x, grid_bias=grid), right, rtol=0, atol=1e-14)


X = np.zeros((1, 6, 2, 8), np.float32)
GRID = np.zeros((2, 3, 5), np.float32)  # of 2 × 3 tokens
FEW = "grid_bias must have a point of its grid for each query and key, got 2 × 3 points, and"
BAD = (
    ({"grid_bias": GRID.astype(int)}, TypeError, "grid_bias must be float16, bfloat16, float32 or float64, got"),
    ({"grid_bias": GRID[:, :2]}, ValueError, r"grid_bias must be \[H, 2h - 1, 2w - 1\] with H = 2 .*, got .*2, 2, 5"),
    ({"grid_bias": GRID[..., :0]}, ValueError, "grid_bias must be .*, got"),
    ({"grid_bias": GRID[:1]}, ValueError, "grid_bias must be .*, got"),
    ({"grid_bias": GRID.reshape(2, 15).T}, ValueError, r"; write table.T.reshape\(2, 2 \* h - 1, .* table of Swin"),
    ({"grid_bias": GRID[:, 1:2]}, ValueError, "got 1 × 3 points, and queries from 0 to 5 in row or sequence 0"),
    ({"grid_bias": GRID, "causal_offset": 1}, ValueError, f"{FEW} queries from 1 to 6 in row or sequence 0"),
    ({"grid_bias": GRID, "causal_offset": -1}, ValueError, f"{FEW} queries from -1 to 4 in row or sequence 0"),
    ({"grid_bias": GRID, "key": X.repeat(2, 1)}, ValueError, f"{FEW} keys from 0 to 11 in row or sequence 0"),
    (
        {"grid_bias": GRID[:, :, 1:4], "cum_seqlens_q": [0, 1, 6], "key": X},
        ValueError,
        "got 2 × 2 points, and queries from 0 to 4 in row or sequence 1",
    ),
    ({"grad_grid_bias": True}, ValueError, "grad_grid_bias must be False without grid_bias"),
)  # fmt: skip


@pytest.mark.parametrize(("given", "error", "words"), BAD)
def test_bad_input(given, error, words):
    for function in (attnmask.flash_attention, attnmask.flash_attention_vjp):
        if "grad_grid_bias" not in given or function is attnmask.flash_attention_vjp:
            key = given.get("key", X)
            with pytest.raises(error, match=words):
                function(**{"query": X, "key": key, "value": key} | given)
