"""Linear attention's functions for tensors: what test_every_function.py does not ask of all functions."""

import numpy as np
import pytest
from doors import changed, drawn
from tensors import tensor

import attnmask
from attnmask._common.arguments import as_array

STEPS = ("linear_attention_step", "short_convolution_step")


def made(torch, name, seed=0):
    arguments = changed(drawn(name, seed), lambda x: tensor(torch, x.copy()))
    return arguments, getattr(attnmask.torch, name)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled_steps(torch, name, seed, backend):
    """The state is what it was before a step, and what it is behind it."""
    inputs, function = made(torch, name, seed)
    expected, _ = made(torch, name, seed)

    @torch.compile(backend=backend, fullgraph=True)
    def twice(inputs):
        before = inputs["state"] * 1
        return function(**inputs), inputs["state"] + 0, before, function(**inputs)

    first, after, before, second = twice(inputs)
    for got, right in (
        (before, expected["state"].clone()),
        (first, function(**expected)),
        (after, expected["state"].clone()),
        (second, function(**expected)),
        (inputs["state"], expected["state"]),
    ):
        torch.testing.assert_close(got, right, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", STEPS)
def test_vmap_of_steps(torch, name):
    inputs, function = made(torch, name)
    inputs = {
        key: x for key, x in inputs.items() if isinstance(x, torch.Tensor) and x.dtype.is_floating_point
    }
    inputs["state"] = inputs["state"][: len(next(iter(inputs.values())))]
    many = {key: torch.stack([x, x * 0.75], 1) for key, x in inputs.items()}

    def call(inputs):
        return function(**inputs)

    ones = [{key: x.select(1, i).clone() for key, x in many.items()} for i in range(2)]
    got = torch.func.vmap(call, (dict.fromkeys(many, 1),))(many)
    assert torch.equal(got, torch.stack([call(one) for one in ones]))
    assert torch.equal(many["state"], torch.stack([one["state"] for one in ones], 1))
    with pytest.raises(RuntimeError, match=r"^state must be mapped"):
        torch.func.vmap(call, (dict.fromkeys(inputs, 1) | {"state": None},))(
            many | {"state": inputs["state"]}
        )


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_state_that_autocast_would_copy(torch, dtype):
    """The copy would be updated, but not the state: it must be of the type of x, which is bfloat16 then."""
    x, weight, state = (torch.from_numpy(np.ones(shape, dtype)) for shape in ((3, 5), (5, 4), (3, 5, 3)))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=r"^state must be"):
        attnmask.torch.short_convolution_step(x, weight, state)


# NumPy's steps, of tensors


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("seed", range(4))
def test_steps_of_numpy_update_a_tensor(torch, name, seed):
    given, expected = drawn(name, seed), drawn(name, seed)
    state = tensor(torch, given["state"])
    out, right = (getattr(attnmask, name)(**x) for x in (given | {"state": state}, expected))
    np.testing.assert_array_equal(out, right)
    np.testing.assert_array_equal(as_array(state, "state"), expected["state"])


@pytest.mark.parametrize(
    ("name", "first"), [("linear_attention_step", "query"), ("short_convolution_step", "x")]
)
def test_wrong_states_of_steps_of_numpy(torch, name, first):
    function, given = getattr(attnmask, name), drawn(name, 1)
    held = given["state"].astype(given[first].dtype)
    given[first] = held.reshape(-1)[: given[first].size].reshape(given[first].shape)
    with pytest.raises(ValueError, match=f"^state must share no memory with {first}$"):
        function(**given | {"state": tensor(torch, held)})
    with pytest.raises(TypeError, match=r"^state must be a NumPy array or None, got .*list"):
        function(**given | {"state": [1.0]})


@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
def test_states_of_16_bits(torch, narrow):
    """They are taken as float32, with a gradient in their own type; steps write to them."""
    dtype = getattr(torch, narrow)
    rng = np.random.default_rng(0)
    query, key, value = (torch.from_numpy(rng.standard_normal((2, 9, 2, 8), np.float32)) for _ in range(3))
    state = torch.from_numpy(rng.standard_normal((2, 2, 8, 8), np.float32)).to(dtype).requires_grad_()
    wide = state.detach().float().requires_grad_()
    results = []
    for given in (state, wide):
        out, last = attnmask.torch.linear_attention(
            query, key, value, initial_state=given, chunk_size=4, return_state=True
        )
        (out.sum() + last.sum()).backward()
        results.append((out, last))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(state.grad, wide.grad.to(dtype))
    token = query[:, 0], key[:, 0], value[:, 0]
    state, wide = state.detach(), wide.detach().clone()
    for _ in range(2):
        before = state.float()
        out = attnmask.torch.linear_attention_step(*token, state, state_indices=[1, 0])
        assert torch.equal(out, attnmask.torch.linear_attention_step(*token, before, state_indices=[1, 0]))
        assert torch.equal(state, before.to(dtype))
    step = torch.compile(attnmask.torch.linear_attention_step, backend="aot_eager", fullgraph=True)
    other = state.clone()
    assert torch.equal(step(*token, other), attnmask.torch.linear_attention_step(*token, state))
    assert torch.equal(other, state)
    with pytest.raises(ValueError, match="state must be an array of float32"):
        attnmask.torch.linear_attention_step(*token, state.short())


def test_short_chunks(torch):
    """A hint below the shortest chunk is that."""
    query = torch.randn(1, 50, 2, 8)
    one, other = (attnmask.torch.linear_attention(query, query, query, chunk_size=size) for size in (4, 16))
    assert torch.equal(one, other)
    with pytest.raises(ValueError, match="chunk_size must be a power of two up to 256, got 12"):
        attnmask.torch.linear_attention(query, query, query, chunk_size=12)
