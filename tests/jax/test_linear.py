"""attnmask.jax: linear attention, short convolutions and their steps, beyond what all functions have in common."""

from functools import partial

import numpy as np
import pytest
from doors import drawn

import attnmask

jax = pytest.importorskip("jax")
jnp = jax.numpy

import attnmask.jax as ours  # noqa: E402

HK, H, K, V = 2, 4, 5, 6


# vmap: calls become rows of one, or there is one after the other


def test_vmap_of_vmap_and_of_starts():
    rng, starts = np.random.default_rng(0), jnp.array([[0, 3, 70], [0, 30, 70]])
    shapes = {"query": (HK, K), "key": (HK, K), "value": (H, V), "decay": (H,), "beta": (H,)}
    arrays = {name: -rng.random((1, 70, *shape), np.float32) for name, shape in shapes.items()}
    attend = jax.vmap(jax.vmap(lambda x, s: ours.linear_attention(**x, cu_seqlens=s), (None, 0)), (0, None))
    twice = {name: np.stack([x, x / 2]) for name, x in arrays.items()}
    out = jax.jit(attend)(twice, starts)
    for i in range(2):
        for j in range(2):
            given = {name: x[i] for name, x in twice.items()}
            expected = attnmask.linear_attention(**given, cu_seqlens=np.asarray(starts[j]))
            np.testing.assert_array_equal(out[i, j], expected)


# Steps


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["linear_attention_step", "short_convolution_step"])
def test_steps_in_a_loop(name, seed):
    """Also where slots are known, and mapped over states alone."""
    rest = drawn(name, seed)
    state, slots = rest.pop("state"), rest.pop("state_indices", None)
    with jax.enable_x64(state.dtype == np.float64):
        arrays = {key: x for key, x in rest.items() if isinstance(x, np.ndarray)}
        step = partial(getattr(ours, name), **{key: x for key, x in rest.items() if key not in arrays})
        held = state.copy()
        for _ in range(3):
            getattr(attnmask, name)(**rest, state=held, state_indices=slots)
        for known in (slots, None if slots is None else jnp.asarray(slots)):
            looped = jax.jit(
                lambda state, arrays, slots=known: jax.lax.fori_loop(
                    0, 3, lambda _, state: step(**arrays, state=state, state_indices=slots)[1], state
                )
            )
            np.testing.assert_array_equal(looped(state, arrays), held)
            both = jax.vmap(looped, (0, None))(jnp.stack([state, state * 0]), arrays)
            np.testing.assert_array_equal(both[0], held)
