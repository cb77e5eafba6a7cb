"""attnmask.ejkernel: ejKernel gives with it what it gives by itself."""

import importlib
import inspect
import subprocess
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


def test_versions_and_none():
    code = "import sys, types\n{}\ntry:\n    import attnmask.ejkernel\nexcept ImportError as error:\n    print(error)"
    for made, said in (
        ("None", "attnmask.ejkernel needs ejkernel, which cannot be imported"),
        (
            "types.SimpleNamespace(__version__='0.0.30')",
            "attnmask.ejkernel needs ejkernel 0.0.31 or later, got 0.0.30",
        ),
    ):
        command = [sys.executable, "-c", code.format(f"sys.modules['ejkernel'] = {made}")]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith(said)
