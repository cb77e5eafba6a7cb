"""attnmask.jax under jax.vmap: what a loop over the calls gives, whatever is mapped."""

import itertools

import numpy as np
import pytest

from attnmask import MaskInfo
from attnmask._attention.arguments import LEARNED

jax = pytest.importorskip("jax")
import attnmask.jax  # noqa: E402

CALLS, Q, K, H, HKV = 3, 5, 6, 4, 2
rng = np.random.default_rng(2)


def normal(*shape):
    return rng.standard_normal(shape).astype(np.float32)


def mapped_arguments():
    """Each with an axis for the calls in front."""
    shapes = (CALLS, 2, Q, H, 8), (CALLS, 2, K, HKV, 8), (CALLS, 2, K, HKV, 4)
    return {name: normal(*shape) for name, shape in zip(LEARNED[:3], shapes, strict=True)}


def taken(tree, call):
    return jax.tree.map(lambda x: x[call], tree)


def compare(arguments, mapped, **fixed):
    """Results and gradients, mapped over some of the arguments and in a loop; others are those of the first call."""
    arguments = {name: x if name in mapped else taken(x, 0) for name, x in arguments.items()}
    axes = {name: 0 if name in mapped else None for name in arguments}

    def attend(arguments):
        return attnmask.jax.flash_attention(**arguments, **fixed, return_lse=True)

    def gradients(arguments):
        def loss(learned):
            out, lse = attend(arguments | learned)
            return (out**2).sum() + lse.sum(where=lse > -jax.numpy.inf)

        return jax.grad(loss)({name: arguments[name] for name in LEARNED[:3]})

    for f in (attend, gradients):
        got = jax.jit(jax.vmap(f, in_axes=(axes,)))(arguments)
        for call in range(CALLS):
            one = {name: taken(x, call) if name in mapped else x for name, x in arguments.items()}
            jax.tree.map(np.testing.assert_array_equal, taken(got, call), jax.jit(f)(one))


@pytest.mark.parametrize("mapped", [("query",), ("query", "key", "value"), ("attention_mask",)], ids=str)
@pytest.mark.parametrize("by_head", [False, True])
def test_masks(mapped, by_head):
    shape = (CALLS, 2, H) if by_head else (CALLS, 2)
    ids = rng.integers(-1, 2, (*shape, Q)), rng.integers(-1, 2, (*shape, K))
    infos = [MaskInfo.from_segments(*pair).apply_causal(np.array([1, 2])) for pair in zip(*ids, strict=True)]
    mask = jax.tree.map(lambda *x: np.stack(x), *infos)
    compare(mapped_arguments() | {"attention_mask": mask}, mapped, sliding_window=3)


@pytest.mark.parametrize("mapped", [("query",), ("dropout_seed",), ("query", "dropout_seed")], ids=str)
def test_dropout(mapped):
    """Each call drops the same as it does alone."""
    compare(mapped_arguments() | {"dropout_seed": np.arange(CALLS)}, mapped, dropout_prob=0.4)


@pytest.mark.parametrize("mapped", [LEARNED[:3], (*LEARNED[:3], "bias"), ("alibi_slopes",)], ids=str)
def test_terms_of_batch_rows(mapped):
    """Also where all calls share their numbers."""
    terms = {"bias": normal(CALLS, 2, H, Q, K), "alibi_slopes": normal(CALLS, 2, H)}
    compare(mapped_arguments() | terms, mapped)


def test_nested():
    """Two axes, and each tensor along one or both of them, at any place."""
    query, key, value = normal(2, 3, 1, Q, H, 8), normal(1, K, 3, HKV, 8), normal(1, K, HKV, 2, 8)
    attend = lambda query, key, value: attnmask.jax.flash_attention(query, key, value, causal=True)  # noqa: E731
    mapped = jax.vmap(jax.vmap(attend, in_axes=(0, 2, None)), in_axes=(0, None, 3))
    got = jax.jit(mapped)(query, key, value)
    for i, j in itertools.product(range(2), range(3)):
        right = attnmask.flash_attention(query[i, j], key[:, :, j], value[..., i, :], causal=True)
        np.testing.assert_array_equal(got[i, j], right)


def test_calls_are_rows_of_one():
    """In the compiled program there is one call."""
    x = normal(CALLS, 2, Q, H, 8)
    text = jax.jit(jax.vmap(attnmask.jax.flash_attention)).lower(x, x, x).as_text()
    assert text.count("@attnmask_flash_forward") == 1
    assert "while" not in text
    assert jax.vmap(attnmask.jax.flash_attention)(x[:0], x[:0], x[:0]).shape == (0, 2, Q, H, 8)
