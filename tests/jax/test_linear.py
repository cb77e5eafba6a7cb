"""attnmask.jax: linear attention, short convolutions and their steps, beyond what all functions have in common."""

from functools import partial

import numpy as np
import pytest
from doors import drawn

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


def attention_arrays(batch=B):
    return {
        "query": draw(batch, T, HK, K),
        "key": draw(batch, T, HK, K),
        "value": draw(batch, T, H, V),
        "decay": draw(batch, T, H, low=-1, high=0),
        "beta": draw(batch, T, H, low=0),
        "initial_state": draw(batch, H, K, V),
    }


def convolution_arrays():
    return {"x": draw(B, T, 7), "weight": draw(7, 4), "bias": draw(7), "initial_state": draw(B, 7, 3)}


def split(x, count):
    """Weights of results, for sums with gradients that all differ."""
    return np.cos(np.arange(x.size, dtype=np.float32) + count).reshape(x.shape).astype(x.dtype)


# vmap: calls become rows of one, or there is one after the other


def test_vmap_of_vmap_and_of_starts():
    arrays = attention_arrays(1)
    del arrays["initial_state"]  # of other sequences
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


@pytest.mark.parametrize(("name", "alike"), [
    ("linear_attention", ()),
    ("short_convolution", ("weight", "bias")),  # which all devices have, and whose gradients are added up
])  # fmt: skip
def test_shard_map(name, alike):
    """Rows on a mesh of one device, with gradients."""
    mesh, rows = jax.sharding.Mesh(jax.devices()[:1], "rows"), jax.sharding.PartitionSpec("rows")
    arrays = attention_arrays() if name == "linear_attention" else convolution_arrays()
    specs = {key: jax.sharding.PartitionSpec() if key in alike else rows for key in arrays}
    call = jax.shard_map(lambda x: getattr(ours, name)(**x), mesh=mesh, in_specs=(specs,), out_specs=rows)
    out, vjp = getattr(attnmask, f"{name}_vjp")(**arrays)
    np.testing.assert_array_equal(jax.jit(call)(arrays), out)
    grads, expected = jax.jit(jax.grad(lambda x: (call(x) * split(out, 0)).sum()))(arrays), vjp(split(out, 0))
    for key in arrays:
        np.testing.assert_array_equal(grads[key], getattr(expected, key), err_msg=key)


# Bad input


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
