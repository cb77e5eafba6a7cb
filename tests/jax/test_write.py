"""attnmask.jax.write_kvcache writes the bytes of NumPy's function, in compiled functions and in place."""

import numpy as np
import pytest
from flash_cases import F32, F64
from slot_cases import FORMATS, D, cache_of, copied, good, tokens_of

import attnmask

jax = pytest.importorskip("jax")
import attnmask.jax  # noqa: E402

NAMES = ("k_cache", "v_cache", "k_scale", "v_scale")
KINDS = [*((kind, False) for kind in FORMATS), (np.dtype(np.int8), True)]
SLOTS = np.array([19, -1, 3, 4, 0])


def made(kind, by_channel=False) -> dict:
    rng = np.random.default_rng(0)
    new = tokens_of(rng, len(SLOTS), F64 if kind == F64 else F32)
    return cache_of(rng, kind, by_channel) | new | {"slot_mapping": SLOTS}


def same(got, wanted) -> None:
    for name, x in zip(NAMES, got, strict=True):
        assert (x is None) == (name not in wanted), name
        if x is not None:
            assert isinstance(x, jax.Array)
            assert np.asarray(x).dtype == wanted[name].dtype, name
            assert np.asarray(x).tobytes() == wanted[name].tobytes(), name


@pytest.mark.parametrize(
    ("kind", "by_channel", "rotate"),
    [*((*kind, False) for kind in KINDS), (F32, False, True), ("int4", False, True)],
    ids=str,
)
def test_the_bytes_of_numpy(kind, by_channel, rotate):
    """All traced, with slots that are known, and eager."""
    with jax.enable_x64(kind == F64):
        arguments = made(kind, by_channel)
        wanted = copied(arguments)
        attnmask.write_kvcache(**wanted, rotate=rotate)
        rest = {name: x for name, x in arguments.items() if name != "slot_mapping"}
        write = lambda given, **more: attnmask.jax.write_kvcache(**given, **more, rotate=rotate)  # noqa: E731
        same(jax.jit(write)(arguments), wanted)
        for slots in (SLOTS, SLOTS.tolist(), SLOTS.astype(np.int8)):
            same(jax.jit(lambda given, slots=slots: write(given, slot_mapping=slots))(rest), wanted)
        same(write(arguments), wanted)
        for name, x in made(kind, by_channel).items():  # they are as they were
            assert arguments[name].tobytes() == x.tobytes()


@pytest.mark.parametrize(("kind", "traced"), [(F32, False), (F32, True), ("int4", True)], ids=str)
def test_keys_without_values(kind, traced):
    """Of a latent cache, whose values are a view of the keys' channels: in JAX they are an array of their own."""
    given = made(kind)
    channels = given["value"].shape[-1]
    words = rf"value must be given with key, got None; .* write value=key\[..., :{channels}\]"
    for name, more in (
        ("write_kvcache", {}),
        ("flash_attention_with_kvcache", {"query": np.ones((1, 1, 2, D), F32)}),
    ):
        arguments = {name: x for name, x in given.items() if name != "slot_mapping" or not more} | more
        call = lambda x, name=name: getattr(attnmask.jax, name)(**x | {"value": None})  # noqa: E731
        with pytest.raises(ValueError, match=words):
            (jax.jit(call) if traced else call)(arguments)
    with_views = given | {"v_cache": given["k_cache"][..., :4], "value": given["key"][..., :4]}
    if kind == F32:
        assert attnmask.jax.write_kvcache(**with_views)[1].shape == with_views["v_cache"].shape


def test_keys_alone():
    """A latent cache has its values in its keys: a view without channels takes none."""
    latent, key = jax.numpy.zeros((2, 4, 1, 24)), jax.numpy.ones((2, 1, 24))

    def write(latent):
        return attnmask.jax.write_kvcache(latent, latent[..., :0], key, key[..., :0], np.array([5, -1]))

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
