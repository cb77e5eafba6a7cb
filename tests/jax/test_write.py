"""attnmask.jax.write_kvcache writes the bytes of NumPy's function, in compiled functions and in place."""

import numpy as np
import pytest
from doors import drawn
from flash_cases import F32
from slot_cases import good

import attnmask

jax = pytest.importorskip("jax")
import attnmask.jax  # noqa: E402

NAMES = ("k_cache", "v_cache", "k_scale", "v_scale")


@pytest.mark.parametrize(
    ("given", "traced"), [(good(), False), (good(), True), (drawn("write_kvcache of four bits", 0), True)]
)
def test_keys_without_values(given, traced):
    """Of a latent cache, whose values are a view of the keys' channels: in JAX they are an array of their own."""
    channels, depth = given["value"].shape[-1], given["key"].shape[-1]
    words = rf"value must be given with key, got None; .* write value=key\[..., :{channels}\]"
    for name, more in (
        ("write_kvcache", {}),
        ("flash_attention_with_kvcache", {"query": np.ones((1, 1, 2, depth), F32)}),
    ):
        arguments = {name: x for name, x in given.items() if name != "slot_mapping" or not more} | more
        arguments.pop("rotate", None)
        call = lambda x, name=name: getattr(attnmask.jax, name)(**x | {"value": None})  # noqa: E731
        with pytest.raises(ValueError, match=words):
            (jax.jit(call) if traced else call)(arguments)
    if "k_scale" not in given:
        views = given | {"v_cache": given["k_cache"][..., :4], "value": given["key"][..., :4]}
        assert attnmask.jax.write_kvcache(**views)[1].shape == views["v_cache"].shape


def test_keys_alone():
    """A latent cache has its values in its keys: a view without channels takes none."""
    latent, key = jax.numpy.zeros((2, 4, 1, 24)), jax.numpy.ones((2, 1, 24))

    def write(latent):
        return attnmask.jax.write_kvcache(latent, latent[..., :0], key, key[..., :0], [5, -1])

    for run in (write, jax.jit(write)):
        assert np.argwhere(np.asarray(run(latent)[0]).any(axis=(2, 3))).tolist() == [[1, 1]]


# Bad input


@pytest.mark.parametrize("slots", [[19, -1, 20], [-2, -1, 0], [3, 5, 3]], ids=str)
def test_slots_that_are_wrong_when_it_runs(slots):
    """A later call on the same memory finds the cache as it was."""
    arguments = good() | {"slot_mapping": np.array(slots, np.int32)}
    caches = {name: jax.numpy.asarray(arguments.pop(name)) for name in NAMES[:2]}
    write = jax.jit(lambda given: attnmask.jax.write_kvcache(**caches, **given))
    with pytest.raises(jax.errors.JaxRuntimeError, match="slot_mapping must"):
        jax.block_until_ready(write(arguments))
    assert all((x == 7).all() for x in caches.values())
