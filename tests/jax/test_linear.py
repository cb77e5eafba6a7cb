"""attnmask.jax: linear attention, short convolutions and their steps give in traced functions what NumPy's give."""

from functools import partial

import numpy as np
import pytest

import attnmask

jax = pytest.importorskip("jax")
jnp = jax.numpy

import attnmask.jax as ours  # noqa: E402
from attnmask.jax import _call as call  # noqa: E402
from attnmask.jax import _linear  # noqa: E402

B, T, HK, H, K, V = 2, 70, 2, 4, 5, 6
rng = np.random.default_rng(0)


def draw(*shape, low=-1.0, high=1.0):
    return rng.uniform(low, high, shape).astype(np.float32)


def attention_arrays(batch=B, decay="token", delta=True, state=True, sequences=None):
    shapes = {None: None, "head": (H,), "token": (batch, T, H), "channel": (batch, T, H, K)}
    given = {
        "query": draw(batch, T, HK, K),
        "key": draw(batch, T, HK, K),
        "value": draw(batch, T, H, V),
        "decay": shapes[decay] and draw(*shapes[decay], low=-1, high=0),
        "beta": draw(batch, T, H, low=0) if delta else None,
        "initial_state": draw(sequences or batch, H, K, V) if state else None,
    }
    return {name: x for name, x in given.items() if x is not None}


def convolution_arrays(batch=B, bias=True, state=True, sequences=None):
    given = {
        "x": draw(batch, T, 7),
        "weight": draw(7, 4),
        "bias": draw(7) if bias else None,
        "initial_state": draw(sequences or batch, 7, 3) if state else None,
    }
    return {name: x for name, x in given.items() if x is not None}


@pytest.mark.parametrize("channels", [1, 2, 3, 32])
def test_the_default_scale_has_the_bits_of_numpys(channels):
    """In float64 another formula shows."""
    q, k, v = np.random.default_rng(channels).standard_normal((3, 1, 20, 1, channels))
    with jax.enable_x64(True):
        out = jax.jit(ours.linear_attention)(q, k, v)
    np.testing.assert_array_equal(out, attnmask.linear_attention(q, k, v))


def split(x, count):
    """Weights of results, for sums with gradients that all differ."""
    return np.cos(np.arange(x.size, dtype=np.float32) + count).reshape(x.shape).astype(x.dtype)


@pytest.mark.parametrize("name", ["linear_attention", "short_convolution"])
def test_gradients_of_one_of_two_results(name):
    arrays = attention_arrays() if name == "linear_attention" else convolution_arrays()
    for result in (0, 1):

        def chosen(arrays, result=result):
            return (getattr(ours, name)(**arrays, return_state=True)[result] ** 2).sum()

        (out, state), vjp = getattr(attnmask, f"{name}_vjp")(**arrays, return_state=True)
        douts = [np.zeros_like(out), np.zeros_like(state)]
        douts[result] = 2 * (out, state)[result]
        for of, expected in zip(arrays, vjp(*douts), strict=False):
            np.testing.assert_allclose(jax.grad(chosen)(arrays)[of], expected, rtol=1e-5, atol=1e-6)


# vmap: calls become rows of one, or there is one after the other


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ["linear_attention", "short_convolution"])
def test_vmap_of_a_pullback(name, batch):
    """As Jacobians take it: the calls share all but the gradient of the result."""
    arrays = (attention_arrays if name == "linear_attention" else convolution_arrays)(batch)
    out, vjp = jax.vjp(jax.jit(lambda x: getattr(ours, name)(**x)), arrays)
    douts = np.stack([split(out, i) for i in range(3)])
    (found,) = jax.jit(jax.vmap(vjp))(douts)
    for i, dout in enumerate(douts):
        for of, expected in vjp(dout)[0].items():
            np.testing.assert_allclose(found[of][i], expected, rtol=1e-5, atol=1e-6, err_msg=of)


def test_vmap_of_vmap_and_of_starts():
    arrays = attention_arrays(1, state=False)
    starts = jnp.array([[0, 3, T], [0, 30, T]])
    attend = jax.vmap(jax.vmap(lambda x, s: ours.linear_attention(**x, cu_seqlens=s), (None, 0)), (0, None))
    twice = {name: np.stack([x, x / 2]) for name, x in arrays.items()}
    out = jax.jit(attend)(twice, starts)
    for i in range(2):
        for j in range(2):
            given = {name: x[i] for name, x in twice.items()}
            expected = attnmask.linear_attention(**given, cu_seqlens=np.asarray(starts[j]))
            np.testing.assert_array_equal(out[i, j], expected)


# Steps


def step_arrays(name):
    if name == "linear_attention_step":
        return {
            "query": draw(3, HK, K),
            "key": draw(3, HK, K),
            "value": draw(3, H, V),
            "decay": draw(3, H, K, high=0),
            "beta": draw(3, H, low=0),
            "state": draw(5, H, K, V),
        }
    return {"x": draw(3, 7), "weight": draw(7, 4), "bias": draw(7), "state": draw(5, 7, 3)}


@pytest.mark.parametrize("slots", [[4, -1, 0], None])
@pytest.mark.parametrize("name", ["linear_attention_step", "short_convolution_step"])
def test_steps(name, slots):
    """In place in donated states, and in loops."""
    arrays = step_arrays(name)
    if slots is None:
        arrays["state"] = arrays["state"][:3]
    state = arrays["state"].copy()
    expected = getattr(attnmask, name)(**arrays | {"state": state}, state_indices=slots)
    indices = None if slots is None else jnp.array(slots)
    for function in (getattr(ours, name), jax.jit(getattr(ours, name))):
        out, after = function(**arrays, state_indices=indices)
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(after, state)
    out, after = jax.jit(partial(getattr(ours, name), state_indices=slots))(**arrays)
    np.testing.assert_array_equal(after, state)
    function = getattr(ours, name)
    step = jax.jit(lambda state, x: function(**x, state=state, state_indices=indices), donate_argnums=0)
    rest = {k: x for k, x in arrays.items() if k != "state"}
    given = jnp.asarray(arrays["state"]) * 1  # memory of JAX's own
    place = given.unsafe_buffer_pointer()
    assert step(given, rest)[1].unsafe_buffer_pointer() == place
    looped = jax.jit(lambda state: jax.lax.fori_loop(0, 3, lambda _, s: step(s, rest)[1], state))(
        arrays["state"]
    )
    held = arrays["state"].copy()
    for _ in range(3):
        getattr(attnmask, name)(**rest, state=held, state_indices=slots)
    np.testing.assert_array_equal(looped, held)
    several = jax.vmap(lambda s: getattr(ours, name)(**rest, state=s, state_indices=indices))(
        jnp.stack([arrays["state"], arrays["state"] / 2])
    )
    np.testing.assert_array_equal(several[1][0], state)


def test_no_tokens_and_no_channels():
    for shape in ((0, 4, H, V), (2, 0, H, V), (2, 4, H, 0), (2, 4, 0, V)):
        query = jnp.zeros((*shape[:2], min(HK, shape[2]), K))
        out, state = jax.jit(partial(ours.linear_attention, return_state=True))(
            query, query, jnp.zeros(shape)
        )
        assert out.shape == shape
        assert not state.any()
        grads = jax.grad(lambda q, shape=shape: ours.linear_attention(q, q, jnp.zeros(shape)).sum())(query)
        assert not grads.any()
    x = jnp.zeros((2, 0, 3))
    out, state = jax.jit(partial(ours.short_convolution, return_state=True))(x, jnp.ones((3, 4)))
    assert out.shape == x.shape
    assert not state.any()


def test_shard_map():
    """Rows on a mesh of one device, with gradients."""
    mesh = jax.sharding.Mesh(jax.devices()[:1], "rows")
    spec = jax.sharding.PartitionSpec("rows")
    arrays = attention_arrays(decay="token")
    attend = jax.shard_map(lambda x: ours.linear_attention(**x), mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_array_equal(jax.jit(attend)(arrays), attnmask.linear_attention(**arrays))
    grads = jax.jit(jax.grad(lambda x: (attend(x) * split(x["value"], 0)).sum()))(arrays)
    out, vjp = attnmask.linear_attention_vjp(**arrays)
    np.testing.assert_array_equal(grads["beta"], vjp(split(out, 0)).beta)


def test_shard_map_of_convolutions():
    """All devices have the weights, whose gradients are added up."""
    mesh = jax.sharding.Mesh(jax.devices()[:1], "rows")
    rows, alike = jax.sharding.PartitionSpec("rows"), jax.sharding.PartitionSpec()
    arrays = convolution_arrays()
    specs = {name: alike if name in ("weight", "bias") else rows for name in arrays}
    convolve = jax.shard_map(
        lambda x: ours.short_convolution(**x), mesh=mesh, in_specs=(specs,), out_specs=rows
    )
    np.testing.assert_array_equal(jax.jit(convolve)(arrays), attnmask.short_convolution(**arrays))
    grads = jax.jit(jax.grad(lambda x: (convolve(x) * split(x["x"], 0)).sum()))(arrays)
    out, vjp = attnmask.short_convolution_vjp(**arrays)
    expected = vjp(split(out, 0))
    for name in arrays:
        np.testing.assert_array_equal(grads[name], getattr(expected, name), err_msg=name)


# Bad input


def test_steps_have_no_gradients():
    given = step_arrays("linear_attention_step")
    given["state"] = given["state"][:3]
    grads = jax.grad(lambda x: ours.linear_attention_step(**given | {"query": x})[0].sum())
    with pytest.raises(NotImplementedError, match="linear_attention has them"):
        grads(given["query"])


def test_handlers_refuse_what_does_not_fit():
    """Other callers, such as exported programs that were changed: no handler reads beyond a buffer."""
    call.registered()
    random = np.random.default_rng(1)
    shapes = {
        "attention": [(B, T, HK, K), (B, T, HK, K), (B, T, H, V), (B, T, H), (B, T, H), (B, H, K, V)],
        "step": [(B, 1, HK, K), (B, 1, HK, K), (B, 1, H, V), (B, 1, H), (B, 1, H), (B, H, K, V)],
        "convolution": [(B, T, 7, 1), (7, 4), (7,), (B, 7, 3)],
        "convolution step": [(B, 1, 7, 1), (7, 4), (7,), (B, 7, 3)],
    }
    out, state, kept = (B, T, H, V), (B, H, K, V), (B, 2 * H * 2, K * 16)
    calls = [
        ("linear_forward", "attention", [], 7, [out, state]),
        ("linear_forward", "attention", [], 7 | 32, [out, state, kept]),
        ("linear_backward", "attention", [kept, out, state], 7 | 64, shapes["attention"]),
        ("linear_step", "step", [], 3, [(B, 1, H, V), state]),
        ("convolution_forward", "convolution", [], 4 | 128, [(B, T, 7, 1), (B, 7, 3)]),
        (
            "convolution_backward",
            "convolution",
            [(B, T, 7, 1), (B, 7, 3)],
            4 | 64 | 128,
            shapes["convolution"],
        ),
        ("convolution_step", "convolution step", [], 128, [(B, 1, 7, 1), (B, 7, 3)]),
    ]
    refused = 0
    for target, kind, more, flags, results in calls:
        for trial in range(16):
            arguments, given = [*shapes[kind], *more], list(results)
            words = _linear._words(flags)
            if trial % 4 == 0:
                words[random.integers(4)] += random.integers(1, 100)
            lists = arguments if trial % 4 in (1, 3) else given
            if trial % 4 and trial > 3:
                i = random.integers(len(lists))
                shape = list(lists[i])
                if trial % 2:
                    shape[random.integers(len(shape))] -= 1
                else:
                    shape = shape[1:]
                lists[i] = tuple(shape)
            if trial % 5 == 4:
                lists.pop()
            aliases = (
                {len(arguments) - 1: 1}
                if "step" in kind and len(given) > 1 and arguments[-1] == given[1]
                else {}
            )
            run = jax.ffi.ffi_call(
                f"attnmask_{target}",
                [jax.ShapeDtypeStruct(shape, np.float32) for shape in given],
                input_output_aliases=aliases,
            )
            try:
                jax.block_until_ready(run(*[jnp.zeros(shape) for shape in arguments], words=words))
            except jax.errors.JaxRuntimeError as error:
                refused += "INVALID_ARGUMENT" in str(error)
    assert refused > 60
