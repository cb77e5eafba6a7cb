"""Several batch axes in JAX: as in NumPy, under jit, grad and vmap, with all arrays traced."""

import numpy as np
import pytest
from batch_axes import BATCH, BIASES, TK, TQ, H

import attnmask

jax = pytest.importorskip("jax")
import attnmask.jax  # noqa: E402


@pytest.fixture
def arrays():
    """Query, key and value."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((*BATCH, *x, 8), np.float32) for x in ((TQ, H), (TK, 2), (TK, 2))]


def options(rng) -> dict:
    return {
        "attention_mask": rng.random((2, 1, 1, TQ, TK)) < 0.8,
        "q_segment_ids": rng.integers(0, 2, (*BATCH, TQ)),
        "kv_segment_ids": rng.integers(0, 2, (*BATCH, TK)),
        "causal": True,
        "causal_offset": rng.integers(2, 7, BATCH),
        "alibi_slopes": rng.random((*BATCH, H), np.float32),
    }


@pytest.mark.parametrize("callback", [False, True])
@pytest.mark.parametrize("shape", BIASES.values(), ids=BIASES)
def test_results_and_gradients(arrays, shape, callback):
    rng = np.random.default_rng(1)
    bias, more = rng.standard_normal(shape, np.float32), options(rng)
    (out, lse), vjp = attnmask.flash_attention_vjp(
        *arrays, bias=bias, **more, return_lse=True, grad_bias=True
    )
    dout, dlse = (rng.standard_normal(x.shape, np.float32) for x in (out, lse))
    causal = more.pop("causal")

    def attend(query, key, value, bias, more):
        how = {"causal": causal, "return_lse": True, "callback": callback}
        return attnmask.jax.flash_attention(query, key, value, bias=bias, **more, **how)

    for function in (attend, jax.jit(attend)):
        for got, right in zip(function(*arrays, bias, more), (out, lse), strict=True):
            np.testing.assert_array_equal(got, right)
    _, pull = jax.vjp(lambda *x: attend(*x, more), *map(jax.numpy.asarray, (*arrays, bias)))
    for got, right in zip(pull((dout, dlse)), vjp(dout, dlse)[:4], strict=True):
        assert got.shape == right.shape
        np.testing.assert_allclose(got, right, atol=1e-5)


@pytest.mark.parametrize("shape", BIASES.values(), ids=BIASES)
def test_mapped(arrays, shape):
    query, key, value = arrays
    rng = np.random.default_rng(2)
    biases = rng.standard_normal((3, *shape), np.float32)
    queries = np.stack([query, 2 * query, -query])

    def attend(query, bias):
        return attnmask.jax.flash_attention(query, key, value, bias=bias)

    def one(query, bias):
        out, vjp = attnmask.flash_attention_vjp(query, key, value, bias=bias, grad_bias=True)
        return out, vjp(np.ones_like(out)).bias

    right = [one(*each) for each in zip(queries, biases, strict=True)]
    np.testing.assert_array_equal(jax.vmap(attend)(queries, biases), [out for out, _ in right])
    grads = jax.vmap(jax.grad(lambda bias, query: attend(query, bias).sum()))(biases, queries)
    np.testing.assert_allclose(grads, [grad for _, grad in right], atol=1e-5)
    for got, each in zip(jax.vmap(attend, (0, None))(queries, biases[0]), queries, strict=True):
        np.testing.assert_array_equal(got, one(each, biases[0])[0])


def test_bad_input(arrays):
    for attend in (attnmask.jax.flash_attention, jax.jit(attnmask.jax.flash_attention)):
        with pytest.raises(ValueError, match=r"bias must broadcast to .*; write bias\[:, None\]"):
            attend(*arrays, bias=np.zeros((2, H, TQ, TK), np.float32))
        with pytest.raises(ValueError, match=r"key must have batch axes \(2, 3\) as query"):
            attend(arrays[0], arrays[1][:, :1], arrays[2])
    packed = [x[:1, :1] for x in arrays]
    starts = {"cum_seqlens_q": np.array([0, 4, TQ]), "cum_seqlens_k": np.array([0, 6, TK])}
    got = jax.jit(attnmask.jax.flash_attention)(*packed, **starts)
    np.testing.assert_array_equal(got, attnmask.flash_attention(*packed, **starts))
