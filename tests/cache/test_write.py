"""write_kvcache: what is written to slots of every format, what is not, errors."""

import contextlib
import threading
import time

import numpy as np
import pytest
from flash_cases import F16, F32, F64
from kvcache_cases import memory
from kvcache_cases import refused as refused_by
from layouts import arrange
from slot_cases import BAD, FORMATS, PAGES, SIZE, SLOTS, D, cache_of, copied, good, tokens_of, write_by_twin

import attnmask

pytestmark = pytest.mark.levels("turns", "amx")


@pytest.mark.parametrize("kind", FORMATS, ids=str)
@pytest.mark.parametrize(
    "layout", ["contiguous", "heads first", "keys beside values", "reversed", "tokens apart"]
)
@pytest.mark.parametrize("by_channel", [False, True])
def test_slots_of_every_format(isa, set_threads, kind, layout, by_channel):
    rng = np.random.default_rng(0)
    for count, threads, token_layout in (
        (1, 1, "contiguous"),
        (7, 2, "strided"),
        (20, 3, "reversed"),
        (0, 1, "sliced"),
    ):
        set_threads(threads)
        cache = cache_of(rng, kind, by_channel, layout)
        new = {
            name: arrange(x, token_layout)
            for name, x in tokens_of(rng, count, F64 if kind == F64 else F32).items()
        }
        slots = rng.permutation(PAGES * SIZE)[:count]
        slots[rng.random(count) < 0.3] = -1
        before, expected = copied(cache), copied(cache)
        write_by_twin(**new, slot_mapping=slots, **expected)
        whole = {name: memory(x).copy() for name, x in cache.items()}
        assert attnmask.write_kvcache(**cache, **new, slot_mapping=slots) is None
        for name in cache:
            np.testing.assert_array_equal(cache[name].astype(F64), expected[name].astype(F64))
        for name in cache:
            cache[name][...] = before[name]
        for name in cache:  # nothing else was written, as between strided tokens
            assert memory(cache[name]).tobytes() == whole[name].tobytes(), name


@pytest.mark.parametrize("kind", FORMATS, ids=str)
@pytest.mark.parametrize("rotate", [False, True])
def test_attention_to_what_was_written(isa, kind, rotate):
    """The bits of a call that appends the same tokens."""
    rng = np.random.default_rng(2)
    dtype = F64 if kind == F64 else F32
    cache, new = cache_of(rng, kind), tokens_of(rng, 5, dtype)
    table, before, starts = np.array([[3, 1], [0, 4]], np.int32), np.array([2, 0]), np.array([0, 2, 5])
    query = rng.standard_normal((5, 4, D)).astype(dtype)
    options = {"block_table": table, "cu_seqlens_q": starts, "rotate": rotate}
    other = copied(cache)
    right = attnmask.flash_attention_with_kvcache(query, **other, **new, cache_seqlens=before, **options)
    slots = [3 * SIZE + 2, 3 * SIZE + 3, 0, 1, 2]
    attnmask.write_kvcache(**cache, **new, slot_mapping=slots, rotate=rotate)
    out = attnmask.flash_attention_with_kvcache(query, **cache, cache_seqlens=[4, 3], **options)
    assert out.tobytes() == right.tobytes()
    for name in cache:
        assert cache[name].tobytes() == other[name].tobytes(), name


def test_latent_and_contiguous_caches():
    rng = np.random.default_rng(3)
    latent, key = np.zeros((2, 6, 1, 24), F32), rng.standard_normal((3, 1, 24)).astype(F32)
    attnmask.write_kvcache(latent, latent[..., :16], key, None, [7, 0, 11])
    assert [tuple(at) for at in np.argwhere(latent.any(axis=(2, 3)))] == [(0, 0), (1, 1), (1, 5)]
    assert latent[1, 1].tobytes() == key[0].tobytes()
    with pytest.raises(
        ValueError, match="value must be None with a latent cache, as key contains the values"
    ):
        attnmask.write_kvcache(latent, latent[..., :16], key, key[..., :16], [7, 0, 11])
    with pytest.raises(ValueError, match="value must be given with key and rotate=True, got None"):
        attnmask.write_kvcache(latent, latent[..., :16], key, None, [7, 0, 11], rotate=True)


def test_many_tokens_in_any_order(set_threads):
    set_threads(3)
    rng = np.random.default_rng(4)
    caches = [np.zeros((500, 16, 2, 8), F16) for _ in "kv"]
    key, value = rng.standard_normal((2, 6000, 2, 8)).astype(F16)
    slots = rng.permutation(8000)[:6000]
    attnmask.write_kvcache(*caches, key, value, slots)
    for cache, tokens in zip(caches, (key, value), strict=True):
        wanted = np.zeros((8000, 2, 8), F16)
        wanted[slots] = tokens
        assert cache.tobytes() == wanted.tobytes()


def test_tensors(torch):
    """They are written to in place."""
    caches = [torch.zeros(3, 4, 1, 8) for _ in "kv"]
    attnmask.write_kvcache(*caches, torch.ones(2, 1, 8), torch.ones(2, 1, 8), torch.tensor([5, -1]))
    assert caches[0].flatten(0, 1).any(-1).flatten().nonzero().tolist() == [[5]]
    with pytest.raises(ValueError, match="k_cache must be writeable"):
        attnmask.write_kvcache(torch._neg_view(caches[0]), caches[1], *torch.ones(2, 1, 1, 8), [5])


def refused(arguments, error, message) -> None:
    refused_by(arguments, error, message, lambda given: attnmask.write_kvcache(**given))


def test_the_good_arguments_are_good():
    arguments = good()
    attnmask.write_kvcache(**arguments)
    assert (arguments["k_cache"] == 0).any()


@pytest.mark.parametrize(("wrong", "error", "message"), BAD)
def test_bad_input(wrong, error, message):
    refused(good() | wrong, error, message)


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("kind", FORMATS, ids=str)
def test_bad_slots_of_every_format(kind, rotate):
    rng = np.random.default_rng(0)
    right = cache_of(rng, kind) | tokens_of(rng, 3, F64 if kind == F64 else F32)
    right |= {"slot_mapping": [19, -1, 0], "rotate": rotate}
    for wrong, error, message in SLOTS:
        refused(right | wrong, error, message)
    attnmask.write_kvcache(**right)


def test_a_cache_that_overlaps_itself():
    one = np.lib.stride_tricks.as_strided(np.full(64, 7, F32), good()["k_cache"].shape, (0, 64, 32, 4))
    refused(good() | {"k_cache": one}, ValueError, "k_cache must not overlap itself")


def test_the_other_function_names_this_one():
    cache = good()
    query = np.zeros((1, 3, 4, 8), F32)
    with pytest.raises(TypeError, match=r"'slot_mapping'; .*attnmask\.write_kvcache"):
        attnmask.flash_attention_with_kvcache(
            query, cache["k_cache"], cache["v_cache"], slot_mapping=[0, 1, 2]
        )


def test_slots_are_those_that_were_looked_at():
    """Another thread writes slots that are nowhere while calls read them: an error, or the old slots."""
    arguments, slots, end = good(), np.array([1, 2, 3]), threading.Event()
    wanted = good()
    attnmask.write_kvcache(**wanted | {"slot_mapping": slots.copy()})

    def rewrite():
        while not end.is_set():
            slots[:] = 10**12
            slots[:] = 1, 2, 3

    thread = threading.Thread(target=rewrite)
    thread.start()
    try:
        until, done = time.monotonic() + 3, 0
        while time.monotonic() < until and done < 50:
            with contextlib.suppress(IndexError):
                attnmask.write_kvcache(**arguments | {"slot_mapping": slots})
                done += 1
            assert memory(arguments["k_cache"]).tobytes() in (
                wanted["k_cache"].tobytes(),
                good()["k_cache"].tobytes(),
            )
    finally:
        end.set()
        thread.join()
