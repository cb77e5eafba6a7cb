"""Biases by the points of a grid in compiled functions whose sequences and offsets are traced."""

import numpy as np
import pytest

import attnmask

jax = pytest.importorskip("jax")
pytest.importorskip("attnmask.jax")

import attnmask.jax  # noqa: E402

RNG = np.random.default_rng(0)
X = RNG.standard_normal((3, 14, 2, 8)).astype(np.float32)
GRID = RNG.standard_normal((2, 5, 7)).astype(np.float32)  # of 3 × 4 tokens
STARTS, OFFSETS = np.array([0, 4, 10, 14], np.int32), np.array([1, 2, 3], np.int32)


def attend(grid, starts, offsets):
    options = {"cum_seqlens_q": starts, "cum_seqlens_k": starts, "causal": True, "causal_offset": offsets}
    return attnmask.jax.flash_attention(*X, grid_bias=grid, **options)


def expected():
    options = {"cum_seqlens_q": STARTS, "cum_seqlens_k": STARTS, "causal": True, "causal_offset": OFFSETS}
    out, vjp = attnmask.flash_attention_vjp(*X, grid_bias=GRID, grad_grid_bias=True, **options)
    return out, vjp(2 * out).grid_bias


@pytest.mark.parametrize("traced", [(), (0,), (0, 1), (0, 2), (0, 1, 2)], ids=str)
def test_the_bits_of_numpy(isa, traced):
    out, d_grid = expected()
    given = (GRID, STARTS, OFFSETS)

    def call(*arrays):
        arguments = list(given)
        for i, x in zip(traced, arrays, strict=True):
            arguments[i] = x
        return attend(*arguments)

    def loss(*arrays):
        return (call(*arrays) ** 2).sum()

    arrays = [given[i] for i in traced]
    np.testing.assert_array_equal(jax.jit(call)(*arrays), out)
    if traced:
        np.testing.assert_array_equal(jax.jit(jax.grad(loss))(*arrays), d_grid)


def test_vmap():
    grids = RNG.standard_normal((3, *GRID.shape)).astype(np.float32)
    slope = jax.grad(lambda grid: (attend(grid, STARTS, OFFSETS) ** 2).sum())
    together, apart = jax.vmap(slope)(grids), [slope(grid) for grid in grids]
    np.testing.assert_array_equal(together, np.stack(apart))


def test_too_few_points():
    with pytest.raises(
        jax.errors.JaxRuntimeError,
        match="grid_bias must have a point of its grid for each query and key, got 3 × 4",
    ):
        jax.block_until_ready(jax.jit(attend)(GRID, STARTS, OFFSETS + 9))
