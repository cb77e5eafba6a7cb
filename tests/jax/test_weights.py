"""The weights of attention in JAX: queries in any form, and beside a loss. tests/common/test_doors.py has bits."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import attnmask.jax  # noqa: E402
from attnmask import AttentionStatistics  # noqa: E402

OF = ("key_sum", "entropy", ("top_keys", 3))


@pytest.fixture
def pair():
    rng = np.random.default_rng(0)
    return [jax.numpy.asarray(rng.standard_normal((2, 70, heads, 16), np.float32)) for heads in (4, 2)]


def assert_equal(got, right):
    assert type(got) is type(right)
    for one, other in zip(*map(jax.tree.leaves, (got, right)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("queries", [
    None, -3, -99, slice(3, 9), slice(None, None, -2), [3, -1], (5,), [], np.array([5, 2]), "array",
], ids=str)  # fmt: skip
def test_queries(pair, queries):
    queries = jax.numpy.array([5, 2]) if isinstance(queries, str) else queries
    given = {"causal": True, "queries": queries}
    more = {"of": OF, "heads": "key"}
    right = attnmask.attention_weights(*pair, **given), attnmask.attention_statistics(*pair, **given, **more)

    def look(query, key):
        return (
            jax.numpy.asarray(attnmask.jax.attention_weights(query, key, **given)),
            attnmask.jax.attention_statistics(query, key, **given, **more),
        )

    for got in (look(*pair), jax.jit(look)(*pair)):
        assert got[1].max_logit is None
        assert got[1].top_keys.dtype == np.int32
        assert_equal(got, right)


def test_nothing_is_wanted(pair):
    assert jax.jit(lambda *x: attnmask.jax.attention_statistics(*x, of=()))(*pair) == AttentionStatistics()


def look(query, key):
    return (
        attnmask.jax.attention_weights(query, key, queries=-9),
        attnmask.jax.attention_statistics(query, key, of=OF),
    )


def loss(query, key):
    return (attnmask.jax.flash_attention(query, key, key, causal=True) ** 2).mean(), look(query, key)


@pytest.mark.parametrize("change", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_beside_a_loss(pair, change):
    """It has its gradients; those of weights are errors, where something asks for them."""
    right = jax.grad(lambda *x: loss(*x)[0])(*pair)
    got, beside = change(jax.grad(loss, has_aux=True))(*pair)
    np.testing.assert_array_equal(got, right)
    assert_equal(beside, look(*pair))
    told = {
        "weights": lambda x: attnmask.jax.attention_weights(x, pair[1], queries=-9),
        "statistics": lambda x: attnmask.jax.attention_statistics(x, pair[1], of="entropy").entropy,
        "statistics ": lambda x: attnmask.jax.attention_statistics(x, pair[1], of=OF).top_weights,
    }
    many = jax.numpy.stack([pair[0], -pair[0]])
    for name, tell in told.items():
        norm = lambda x, tell=tell: loss(x, pair[1])[0] + (tell(x) ** 2).sum()  # noqa: E731
        asked = (
            lambda norm=norm: change(jax.grad(norm))(pair[0]),
            lambda norm=norm: change(jax.vmap(jax.grad(norm)))(many),
            lambda tell=tell: change(lambda x: jax.jvp(tell, (x,), (x,)))(pair[0]),
            lambda norm=norm: change(jax.grad(lambda x: jax.grad(norm)(x).sum()))(pair[0]),
        )
        for ask in asked:
            with pytest.raises(
                NotImplementedError, match=rf"jax.attention_{name.strip()} has no gradients: use it in"
            ):
                ask()
    stopped = lambda x: loss(x, pair[1])[0] + told["weights"](jax.lax.stop_gradient(x)).sum()  # noqa: E731
    np.testing.assert_allclose(change(jax.grad(stopped))(pair[0]), right, rtol=1e-6)


def test_large_calls_in_many_rows(pair):
    """A vmap is one call, also where some arrays are the same for all, and inside of another."""
    query, key = pair
    many = jax.numpy.stack([jax.numpy.stack([query, -query]), jax.numpy.stack([2 * query, query / 2])])
    lse = attnmask.flash_attention_fwd(*map(np.asarray, (query, key, key)), causal=True)[1]
    tell = lambda *x: attnmask.jax.attention_statistics(x[0], x[1], of=OF, lse=x[2], queries=-4)  # noqa: E731
    got = jax.jit(jax.vmap(jax.vmap(tell, (0, None, None)), (0, None, None)))(many, key, lse)
    for i in range(2):
        for j in range(2):
            assert_equal(jax.tree.map(lambda x, i=i, j=j: x[i, j], got), tell(many[i, j], key, lse))


@pytest.mark.parametrize(("given", "error", "message"), [
    ({"queries": 3}, ValueError, r"queries must be \[3\] for that one, or -3 for the last 3, got 3"),
    ({"queries": [0, 70]}, ValueError, "queries must be below 70, the number of queries, got 70 at index 1"),
    ({"queries": "traced"}, TypeError, "queries must be known at compile time, got a traced value"),
    ({"of": "top_keys"}, ValueError, "of must say how many top_keys"),
    ({"heads": "value"}, ValueError, "heads must be one of"),
    ({"lse": "traced"}, ValueError, r"lse must be of shape \(2, 4, 70\), got float32 array of shape \(3,\)"),
    ({"dropout_prob": 0.5}, TypeError, "unexpected keyword argument 'dropout_prob'"),
], ids=str)  # fmt: skip
def test_errors(pair, given, error, message):
    x = jax.numpy.ones(3)

    def tell(query, key, x):
        more = {"of": OF} | {name: x if value == "traced" else value for name, value in given.items()}
        return attnmask.jax.attention_statistics(query, key, **more)

    with pytest.raises(error, match=message):
        jax.jit(tell)(*pair, x)
