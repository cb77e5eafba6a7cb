"""attnmask.ejkernel: ejKernel gives with it what it gives by itself."""

import importlib
import inspect
import sys
import types
import warnings
from unittest.mock import MagicMock

import numpy as np
import pytest

from attnmask import MaskInfo

jax = pytest.importorskip("jax")
jnp = jax.numpy
pytestmark = pytest.mark.filterwarnings("ignore")  # of ejKernel there are many


@pytest.fixture(scope="module")
def ejkernel(tmp_path_factory):
    """Its flash_attention, its own kernel, and that of this package. It writes to the home directory."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(action="ignore"):
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        if importlib.util.find_spec("triton") is None:  # which it only imports here
            for name in ("triton", "triton.language"):
                patch.setitem(sys.modules, name, MagicMock(__spec__=None))
        pytest.importorskip("ejkernel")
        kernels = importlib.import_module("ejkernel.kernels")
        (own,) = (
            spec.implementation
            for spec in kernels.kernel_registry.list_implementations("flash_attention")
            if spec.platform == kernels.Platform.XLA
        )
        adapter = importlib.import_module("attnmask.ejkernel")
        adapter.register()
        yield types.SimpleNamespace(
            attend=importlib.import_module("ejkernel.modules").flash_attention,
            own=own,
            kernel=adapter._flash_attention,
            registry=kernels.kernel_registry,
            kernels=kernels,
            adapter=adapter,
            mask_info=importlib.import_module("ejkernel.types").MaskInfo,
        )


def inputs():
    shapes = (2, 9, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8)
    return [
        jax.random.normal(seed, shape)
        for seed, shape in zip(jax.random.split(jax.random.key(0), 3), shapes, strict=True)
    ]


IDS = jnp.array([[0] * 4 + [1] * 5, [0] * 9])
MASK = np.random.default_rng(0).random((2, 1, 9, 9)) < 0.6
MASK |= np.eye(9, dtype=bool)
ARGUMENTS = {
    "plain": {},
    "causal": {"causal": True, "softmax_scale": 0.3},
    "window": {"causal": True, "sliding_window": (2, 0)},
    "one number for a window": {"sliding_window": 2},
    "soft cap": {"logits_soft_cap": 1.5},
    "segments": {"q_segment_ids": IDS, "kv_segment_ids": IDS, "causal": True},
    "mask": {"attention_mask": jnp.array(MASK)},
    "bias": {"bias": jnp.array(np.random.default_rng(1).random((2, 4, 9, 9)), jnp.float32)},
    "sinks": {"softmax_aux": jnp.array([0.3, -0.5, 1.0])},
    "sinks of heads": {"softmax_aux": jnp.array([[0.3], [-0.5], [1.0], [0.1]])},
    "precision": {"precision": jax.lax.Precision.HIGHEST, "logits_dtype": jnp.float32, "bwd_params": None},
}


@pytest.mark.parametrize("given", ARGUMENTS.values(), ids=ARGUMENTS)
def test_as_its_own(ejkernel, given):
    """Results, and gradients of query, key and value; sizes of blocks change nothing."""
    weights = jax.random.normal(jax.random.key(1), (2, 9, 4, 8))
    blocks = importlib.import_module("ejkernel.ops").FwdParams(q_blocksize=4, kv_blocksize=4)

    def both(kernel, compiled, **more):
        def attend(query, key, value):
            out = kernel(query=query, key=key, value=value, **given, **more)
            return (out * weights).sum(), out

        function = jax.value_and_grad(attend, (0, 1, 2), has_aux=True)
        (_, out), grads = (jax.jit(function) if compiled else function)(*inputs())
        return out, *grads

    later = "block_tables" in inspect.signature(ejkernel.own).parameters
    if later and getattr(given.get("softmax_aux"), "ndim", 0) == 2:
        pytest.skip("later versions of ejKernel take one axis of sinks")
    expected = both(ejkernel.own, True)
    for compiled in (False, True):
        for actual, wanted in zip(both(ejkernel.kernel, compiled, fwd_params=blocks), expected, strict=True):
            assert actual.dtype == wanted.dtype
            np.testing.assert_allclose(actual, wanted, atol=2e-5)


@pytest.mark.parametrize("way", ["eager", "jit", "grad"])
def test_it_is_chosen(ejkernel, monkeypatch, way):
    """Also while ejKernel tries sizes of blocks, which it does for a new shape."""
    calls = []
    real = ejkernel.adapter.attnmask_jax.flash_attention
    monkeypatch.setattr(
        ejkernel.adapter.attnmask_jax, "flash_attention", lambda **given: calls.append(given) or real(**given)
    )
    query, key, value = inputs()
    info = ejkernel.mask_info.from_segments(IDS)

    def attend(query):
        return ejkernel.attend(query, key, value, mask_info=info, causal=True)

    more = {"q_segment_ids": IDS, "kv_segment_ids": IDS, "causal": True}
    expected = ejkernel.own(query=query, key=key, value=value, **more)
    if way == "grad":
        grads = [
            jax.grad(lambda query, f=f: (f(query) ** 2).sum())(query)
            for f in (attend, lambda query: ejkernel.own(query=query, key=key, value=value, **more))
        ]
        np.testing.assert_allclose(*grads, atol=2e-5)
    else:
        out = jax.jit(attend)(query) if way == "jit" else attend(query)
        np.testing.assert_allclose(out, expected, atol=2e-5)
    assert calls


def test_dropout(ejkernel):
    """With numbers of its own, which the seed decides."""
    query, key, value = inputs()
    given = {"query": query, "key": key, "value": value, "dropout_prob": 0.5}
    first, again, other = (ejkernel.kernel(**given, dropout_seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


# Linear attention


def linear_inputs(batch=2, delta=False):
    shapes = [(batch, 70, 4, 8), (batch, 70, 4, 8), (batch, 70, 4, 8), (batch, 4, 8, 8)]
    draws = jax.random.split(jax.random.key(3), 6)
    q, k, v, state = (jax.random.normal(key, shape) for key, shape in zip(draws, shapes, strict=False))
    given = {"query": q, "key": k, "value": v, "initial_state": state}
    if delta:
        more = {"beta": jax.random.uniform(draws[4], (batch, 70, 4))}
        return given | more | {"decay": -jax.random.uniform(draws[5], (batch, 70, 4))}
    return given | {"g": -jax.random.uniform(draws[5], (batch, 70, 4, 8))}


BY_HEAD = jnp.array([-0.1, 0, -0.5, -2])
LINEAR = {
    "gla": ("gla", linear_inputs(), ("g",), {}),
    "gla, by heads": ("gla", linear_inputs(), (), {"g_gamma": BY_HEAD, "softmax_scale": 0.3}),
    "gla, both": ("gla", linear_inputs(), ("g",), {"g_gamma": BY_HEAD, "reverse": True}),
    "gla, of nothing": ("gla", linear_inputs(), (), {}),
    "lightning": ("lightning_attn", linear_inputs(), (), {"layer_idx": 1, "num_layers": 4}),
    "lightning, reverse": ("lightning_attn", linear_inputs(), (), {"layer_idx": 0, "num_layers": 2, "reverse": True}),
    "delta": ("kernel_delta_attention", linear_inputs(delta=True), ("beta", "decay"), {"chunk_size": 16}),
    "delta, as it is": ("kda", linear_inputs(delta=True), ("beta",),
        {"use_qk_l2norm": False, "softmax_scale": 0.1, "use_chunked": False}),
}  # fmt: skip


def linear_kernels(ejkernel, algorithm):
    """That of this package, which is chosen, and ejKernel's own."""
    specs = ejkernel.registry.list_implementations(algorithm)
    specs = [spec.implementation for spec in specs if spec.platform == ejkernel.kernels.Platform.XLA]
    ours, own = (inspect.unwrap(specs[0]), specs[1])
    assert ours is ejkernel.adapter._FUNCTIONS[algorithm]
    assert ejkernel.registry.get(algorithm, ejkernel.kernels.Platform.XLA) is specs[0]
    return specs[0], own


def token_by_token(kernel, given, more):
    """ejKernel's own kernel, with the gradients of a scan where it has none under ``jax.jit``."""
    if "beta" in given:
        return kernel(**given, **more)
    query, key, value = (given[name].astype(jnp.float32) for name in ("query", "key", "value"))
    heads, scale = query.shape[2], more.get("softmax_scale", query.shape[3] ** -0.5)
    by_head = more.get("g_gamma", jnp.zeros(heads))
    if "num_layers" in more:
        by_head = -(8 / heads * (1 - more["layer_idx"] / more["num_layers"])) * jnp.arange(heads)
    decay = given.get("g", jnp.zeros_like(query)).astype(jnp.float32) + by_head[:, None]

    def step(state, token):
        q, k, v, d = token
        state = state * jnp.exp(d)[..., None] + k[..., None] * v[..., None, :]
        return state, scale * (state * q[..., None]).sum(axis=-2)

    tokens = [x.swapaxes(0, 1) for x in (query, key, value, decay)]
    state, out = jax.lax.scan(step, given["initial_state"], tokens, reverse=more.get("reverse", False))
    return out.swapaxes(0, 1), state


@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.long)])
@pytest.mark.parametrize("case", LINEAR)
def test_linear_attention_as_its_own(ejkernel, case, dtype):
    """Results, states and gradients. Results are float32, as theirs."""
    algorithm, given, gates, more = LINEAR[case]
    given = {
        name: x for name, x in given.items() if name in ("query", "key", "value", "initial_state", *gates)
    }
    if "beta" in given:  # which wants small keys, unless they are normalized
        given["key"] = given["key"] / 4
    given = {name: x if name == "initial_state" else x.astype(dtype) for name, x in given.items()}
    ours, own = linear_kernels(ejkernel, algorithm)

    def loss(out, state):
        weights = jnp.cos(jnp.arange(out.size).reshape(out.shape))
        return (out * weights).sum() + (state**2).sum(), (out, state)

    (_, actual), grads = jax.jit(jax.value_and_grad(lambda x: loss(*ours(**x, **more)), has_aux=True))(given)
    (_, expected), wanted = jax.jit(
        jax.value_and_grad(lambda x: loss(*token_by_token(own, x, more)), has_aux=True)
    )(given)
    tolerance = 2e-5 if dtype == jnp.float32 else 2e-2
    for found, right in (
        *zip(actual, own(**given, **more), strict=True),
        *zip(jax.tree.leaves((actual, grads)), jax.tree.leaves((expected, wanted)), strict=True),
    ):
        assert found.dtype == right.dtype
        found, right = (x.astype(jnp.float32) for x in (found, right))
        np.testing.assert_allclose(found, right, rtol=0, atol=tolerance * float(jnp.abs(right).max()))
    np.testing.assert_array_equal(ours(**given, **more)[0], actual[0])


@pytest.mark.parametrize("reverse", [False, True])
def test_packed_linear_attention(ejkernel, reverse):
    """Each sequence as if it were alone, with gradients; key heads may be shared by queries."""
    kernel, _ = linear_kernels(ejkernel, "gla")
    given, states = linear_inputs(1), jax.random.normal(jax.random.key(5), (2, 4, 8, 8))
    del given["initial_state"]
    given |= {name: given[name][:, :, :2] for name in ("key", "value")}
    weights = jnp.cos(jnp.arange(given["query"].size)).reshape(given["query"].shape)

    def loss(arrays, tokens, **more):
        results = kernel(**arrays, reverse=reverse, **more)
        return (results[0] * weights[:, tokens]).sum(), results

    differentiate = jax.value_and_grad(loss, has_aux=True)
    more = {"initial_state": states, "cu_seqlens": jnp.array([0, 30, 70])}
    (_, (out, after)), grads = differentiate(given, slice(0, 70), **more)
    for i, tokens in enumerate((slice(0, 30), slice(30, 70))):
        alone = {name: x[:, tokens] for name, x in given.items()}
        (_, expected), wanted = differentiate(alone, tokens, initial_state=states[i : i + 1])
        alone |= {name: jnp.repeat(alone[name], 2, axis=2) for name in ("key", "value")}
        same, _ = kernel(**alone, initial_state=states[i : i + 1], reverse=reverse)
        for got, right in ((out[:, tokens], expected[0]), (same, expected[0]), (after[i], expected[1][0])):
            np.testing.assert_allclose(got, right, atol=1e-5)
        for name, right in wanted.items():
            np.testing.assert_allclose(grads[name][:, tokens], right, atol=1e-5, err_msg=name)


def test_algorithms_of_other_arguments_stay(ejkernel, monkeypatch):
    """And those that ejKernel does not have are not added."""
    registry = type(ejkernel.registry)()
    platform, backend = ejkernel.kernels.Platform.XLA, ejkernel.kernels.Backend.ANY
    registry.register("gla", platform, backend)(lambda query, key, value, unknown=None: None)
    registry.register("gated_delta_rule", platform, backend)(lambda query, key, value, beta, decay=None: None)
    monkeypatch.setattr(ejkernel.kernels, "kernel_registry", registry)
    ejkernel.adapter.register()
    assert len(registry.list_implementations("gla")) == 1
    assert not registry.list_implementations("kda")
    chosen = registry.get("gated_delta_rule", platform)
    assert inspect.unwrap(chosen) is ejkernel.adapter._FUNCTIONS["gated_delta_rule"]


def test_registered_once(ejkernel):
    ejkernel.adapter.register()
    ejkernel.adapter.register(5)
    held = ejkernel.registry.list_implementations("flash_attention")
    assert [inspect.unwrap(spec.implementation) for spec in held].count(ejkernel.kernel) == 1
    platform, backend = ejkernel.kernels.Platform, ejkernel.kernels.Backend
    for wanted in (backend.ANY, backend.CPU, None):
        chosen = ejkernel.registry.get("flash_attention", platform.XLA, wanted)
        assert inspect.unwrap(chosen) is ejkernel.kernel


def test_caches_in_pages(ejkernel, monkeypatch):
    """Later versions have them; ejKernel's own kernel goes on with them."""
    calls = []
    own = types.SimpleNamespace(
        platform=ejkernel.kernels.Platform.XLA, implementation=lambda **given: calls.append(given)
    )
    held = ejkernel.registry.list_implementations("flash_attention")
    ours = next(spec for spec in held if inspect.unwrap(spec.implementation) is ejkernel.kernel)
    monkeypatch.setattr(ejkernel.registry, "list_implementations", lambda _: [ours, own])
    ejkernel.kernel(query=1, block_tables=2)
    assert calls == [{"query": 1, "block_tables": 2, "fwd_params": None, "bwd_params": None}]


def test_other_backends_and_bad_priorities(ejkernel, monkeypatch):
    with pytest.raises(TypeError, match="priority must be an integer, got 'high'"):
        ejkernel.adapter.register("high")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(RuntimeError, match="default backend must be 'cpu', got 'gpu'"):
        ejkernel.adapter.register()


def test_imports_to_swap(ejkernel):
    """What the guide says can be imported from here in place of ejKernel is there, under the same name."""
    import attnmask

    for module in ("ejkernel.xla_utils", "ejkernel.types"):
        for name in importlib.import_module(module).__all__:
            assert hasattr(attnmask, name) or name in ("get_corrected_named_sharding", "reorder_sequence")
    ids = np.array(IDS)
    ours = MaskInfo.from_segments(ids).apply_causal().attention_mask
    np.testing.assert_array_equal(ours, ejkernel.mask_info.from_segments(IDS).apply_causal().attention_mask)
