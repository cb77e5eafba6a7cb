"""Attention under random masks in a function that JAX compiles, and its gradients, beside dense attention."""

import masked_attention
import numpy as np
import pytest

import attnmask

jax = pytest.importorskip("jax")
import attnmask.jax  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::attnmask.AttnmaskWarning")


def by_vjp_of_jax(given, dout, dlse):
    def attend(query, key, value, mask):
        return attnmask.jax.flash_attention(query, key, value, mask, return_lse=True, **more)

    def both(arrays, mask, dout, dlse):
        results, pullback = jax.vjp(lambda *arrays: attend(*arrays, mask), *arrays)
        return *results, *pullback((dout, dlse))

    names = ("query", "key", "value")
    more = {name: x for name, x in given.items() if name not in (*names, "attention_mask")}
    results = jax.jit(both)([given[name] for name in names], given["attention_mask"], dout, dlse)
    return [np.asarray(x) for x in results]


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_attention_under_random_masks(first):
    with jax.enable_x64(True):
        for number in range(first, first + 25):
            case = masked_attention.Case(3, number)
            case.levels = [case.levels[number % len(case.levels)]]
            masked_attention.check_gradients(case, by_vjp_of_jax)
