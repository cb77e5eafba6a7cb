"""The weights of attention for tensors: queries in any form, in graphs, and gradients that are errors.

Beside NumPy's bits, other arguments are in tests/common/test_doors.py and test_every_function.py.
"""

import numpy as np
import pytest

import attnmask

pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning")
OF = ("key_sum", "entropy", ("top_keys", 3))


@pytest.fixture
def pair(torch):
    torch.manual_seed(0)
    return torch.randn(2, 70, 4, 16), torch.randn(2, 70, 2, 16)


def assert_equal(torch, got, right):
    for a, b in zip(got, right, strict=True):
        assert a is b is None or torch.equal(a, b)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "queries",
    [None, -3, -99, slice(3, 9), slice(None, None, -2), [3, -1], (5,), [], np.array([5, 2]), "tensor"],
)
def test_queries(torch, pair, queries, dynamic):
    """In graphs too, whose lengths may differ from call to call."""
    queries = torch.tensor([5, 2]) if isinstance(queries, str) else queries
    torch._dynamo.reset()

    def weights(query, key):
        return attnmask.torch.attention_weights(query, key, causal=True, queries=queries)

    def statistics(query, key):
        return attnmask.torch.attention_statistics(
            query, key, causal=True, queries=queries, of=OF, heads="key"
        )

    compiled = [
        torch.compile(x, fullgraph=True, backend="aot_eager", dynamic=dynamic) for x in (weights, statistics)
    ]
    for count in (70, 65, 64) if dynamic else (70,):
        given = [x[:, :count] for x in pair]
        numpy = attnmask.attention_weights(*(x.numpy() for x in given), causal=True, queries=queries)
        whole = weights(*given)
        np.testing.assert_array_equal(whole.numpy(), numpy)
        assert torch.equal(compiled[0](*given), whole)
        found = compiled[1](*given)
        assert isinstance(found, attnmask.AttentionStatistics)
        assert found.max_logit is None
        assert_equal(torch, found, statistics(*given))


def loss(query, key):
    """Beside statistics, which need no gradient."""
    out = attnmask.torch.flash_attention(query, key, key, causal=True).square().mean()
    return (
        out,
        attnmask.torch.attention_weights(query, key, queries=-9),
        attnmask.torch.attention_statistics(query, key, of=OF),
    )


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_gradients_beside_them(torch, pair, backend):
    """The loss has its gradient; one of the weights is an error."""
    torch._dynamo.reset()
    query, key = pair
    call = loss if backend is None else torch.compile(loss, fullgraph=True, backend=backend)
    query.requires_grad_()
    (right,) = torch.autograd.grad(
        attnmask.torch.flash_attention(query, key, key, causal=True).square().mean(), query
    )
    (got,) = torch.autograd.grad(call(query, key)[0], query)
    assert torch.equal(got, right)
    with torch.no_grad():
        alone = loss(query, key)
    for a, b in zip(call(query, key)[1:], alone[1:], strict=True):
        assert_equal(torch, a, b)
    with pytest.raises(RuntimeError, match=r"torch.attention_weights has no gradient: .*\.detach\(\)"):
        call(query, key)[1].sum().backward()
    for name in ("key_sum", "entropy", "top_weights"):
        out, _, found = call(query, key)
        with pytest.raises(RuntimeError, match=r"torch.attention_statistics has no gradient: .*\.detach\(\)"):
            (out + getattr(found, name).sum()).backward()
    assert not found.top_keys.requires_grad
    assert query.grad is None


def test_transforms(torch, pair):
    """vmap makes one call; grad and jvp are errors by name, but for what is returned beside a loss."""
    query, key = pair

    def beside(x):
        out, weights, found = loss(x, key)
        return out, (weights, found.entropy)

    grad, beside_it = torch.func.grad(beside, has_aux=True)(query)
    assert torch.equal(beside_it[0], loss(query, key)[1])
    assert grad.abs().max() > 0
    tells = {"weights": lambda x: loss(x, key)[1], "statistics": lambda x: loss(x, key)[2].entropy}
    for name, tell in tells.items():
        with pytest.raises(RuntimeError, match=f"attention_{name} has no gradient"):
            torch.func.grad(lambda x, tell=tell: tell(x).square().sum())(query)
        with pytest.raises(RuntimeError, match="has no forward-mode derivative: query must have no tangent"):
            torch.func.jvp(tell, (query,), (query,))
    many = torch.randn(3, *query.shape)
    for dims in ((0, None), (None, 0)):
        given = (many, key) if dims[1] is None else (query, torch.stack([key, -key, 2 * key]))
        tell = lambda *x: tuple(attnmask.torch.attention_statistics(*x, of=OF, queries=-4)[:2])  # noqa: E731
        got = torch.func.vmap(tell, dims)(*given)
        for i in range(3):
            right = tell(*(x if dim is None else x[i] for x, dim in zip(given, dims, strict=True)))
            assert_equal(torch, [x[i] for x in got], right)


@pytest.mark.parametrize(
    ("error", "message", "given"),
    [
        (ValueError, r"queries must be \[3\] for that one, or -3 for the last 3, got 3", {"queries": 3}),
        (
            ValueError,
            "queries must be below 70, the number of queries, got 70 at index 1",
            {"queries": [0, 70]},
        ),
        (TypeError, "queries must be integers", {"queries": "floats"}),
        (ValueError, "of must say how many top_keys", {"of": "top_keys"}),
        (ValueError, "heads must be", {"heads": "value"}),
        (ValueError, "lse must be of shape", {"lse": "floats"}),
    ],
)
def test_errors(torch, pair, error, message, given):
    """NumPy's, also in graphs."""
    torch._dynamo.reset()
    given = {"of": "entropy"} | {name: torch.ones(3) if x == "floats" else x for name, x in given.items()}
    call = lambda *x: attnmask.torch.attention_statistics(*x, **given)  # noqa: E731
    for function in (call, torch.compile(call, backend="aot_eager")):
        with pytest.raises(error, match=message):
            function(*pair)


def test_arrays_are_refused(torch, pair):
    with pytest.raises(TypeError, match="query must be a tensor, got"):
        attnmask.torch.attention_weights(pair[0].numpy(), pair[1])
