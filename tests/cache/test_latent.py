"""Latent caches: values that are channels of the keys, appended once."""

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest
from tensors import tensor

import attnmask

pytestmark = pytest.mark.of_integers

BF16, FP8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
TYPES = (*map(np.dtype, ("float16", "float32", "float64", "int8")), BF16, FP8)
D, DV, HEADS = 24, 16, 4


def of_queries(dtype) -> np.dtype:
    return np.dtype("float32") if dtype in (np.int8, FP8) else dtype


class Call:
    """Arguments of one call with new tokens, over a cache with 3 sequences."""

    def __init__(self, dtype, *, first=0, page_size=None, packed=False, by_channel=False, kv_heads=1):
        rng = np.random.default_rng(7)
        self.channels = np.s_[..., first : first + DV]
        counts, self.before = ([4, 4, 4] if not packed else [5, 1, 2]), np.array([0, 3, 9], np.int32)
        rows = (3, 40) if page_size is None else (3 * -(-40 // page_size), page_size)
        self.latent = rng.standard_normal((*rows, kv_heads, D)).astype(np.float32)
        self.latent = self.latent.astype(dtype) if dtype != np.int8 else (self.latent * 30).astype(dtype)
        self.scale = None
        if dtype in (np.int8, FP8):
            shape = (1, 1, kv_heads, D) if by_channel else (*rows, kv_heads, 1)
            self.scale = rng.uniform(0.01, 0.05, shape).astype(np.float32)
        tokens = (sum(counts),) if packed else (3, 4)
        query, key = (
            rng.standard_normal((*tokens, n, D)).astype(of_queries(dtype))
            for n in (HEADS * kv_heads, kv_heads)
        )
        self.given = {"query": query, "key": key, "cache_seqlens": self.before}
        if page_size is not None:
            self.given["block_table"] = rng.permutation(rows[0]).astype(np.int32).reshape(3, -1)
        if packed:
            self.given["cu_seqlens_q"] = np.cumsum([0, *counts])

    def arguments(self, **more):
        """With a view as values."""
        caches = {"k_cache": self.latent, "v_cache": self.latent[self.channels], "k_scale": self.scale}
        return self.given | caches | more

    def separate(self):
        """With values of their own that are the same numbers; and what the call appends to them."""
        scale = None if self.scale is None else self.scale.copy()
        by_channel = scale is not None and scale.shape[3] > 1
        return self.given | {
            "value": self.given["key"][self.channels],
            "k_cache": self.latent.copy(),
            "v_cache": self.latent[self.channels].copy(),
            "k_scale": scale,
            "v_scale": scale[self.channels].copy() if by_channel else None if scale is None else scale.copy(),
        }


FORMS = {
    "first channels": {},
    "last channels": {"first": D - DV},
    "pages": {"page_size": 16, "first": 3},
    "short pages": {"page_size": 3},
    "packed": {"packed": True},
    "packed pages": {"packed": True, "page_size": 16, "kv_heads": 2},
}


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_the_same_as_with_values_of_their_own(isa, form, dtype):
    """The same cache, and the same bits; with a scale per token where that is computed over the same channels."""
    call = Call(dtype, **FORMS[form], by_channel=dtype in (np.int8, FP8))
    separate = call.separate()
    expected = attnmask.flash_attention_with_kvcache(**separate)
    out = attnmask.flash_attention_with_kvcache(**call.arguments())
    assert call.latent.tobytes() == separate["k_cache"].tobytes()
    assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [np.dtype("int8"), FP8], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("named", [False, True])
def test_one_scale_per_token_serves_both(isa, form, dtype, named):
    """The latent is quantized once, over all of its channels."""
    call = Call(dtype, **FORMS[form])
    arguments = call.arguments(**({"v_scale": call.scale} if named else {}))
    out = attnmask.flash_attention_with_kvcache(**arguments)
    values = np.ascontiguousarray(call.latent[call.channels])
    counts = np.diff(call.given.get("cu_seqlens_q", [0, 4, 8, 12]))
    held = arguments | {"key": None, "v_cache": values, "v_scale": call.scale.copy()}
    held["cache_seqlens"] = call.before + counts
    assert out.tobytes() == attnmask.flash_attention_with_kvcache(**held).tobytes()


def refused(call, error, message, **more):
    before = call.latent.tobytes(), None if call.scale is None else call.scale.tobytes()
    with pytest.raises(error, match=message):
        attnmask.flash_attention_with_kvcache(**call.arguments(**more))
    assert before == (call.latent.tobytes(), None if call.scale is None else call.scale.tobytes())


def test_bad_input():
    call, quantized = Call(np.dtype("float32")), Call(np.dtype("int8"))
    value = call.given["key"][..., :DV]
    refused(call, ValueError, "value must be None where v_cache is channels of k_cache", value=value)
    refused(call, ValueError, "key must be given with value", key=None, value=value)
    # These are no channels of the keys, so values have to be given, and may not lie there.
    others = {
        "backwards": call.latent[..., DV - 1 :: -1],
        "every second": call.latent[..., ::2],
        "other tokens": call.latent[:, ::-1, :, :DV],
        "other rows": call.latent[::-1, ..., :DV],
    }
    for view in others.values():
        refused(call, ValueError, "value must be given with key", v_cache=view)
        value = np.zeros((3, 4, 1, view.shape[-1]), np.float32)
        refused(call, ValueError, "k_cache must share no memory with v_cache", v_cache=view, value=value)
    own = quantized.scale.copy()
    refused(quantized, ValueError, "v_scale must be None or k_scale itself", v_scale=own)
    refused(quantized, ValueError, "v_scale must be None or k_scale itself", v_scale=quantized.scale[::-1])
    refused(quantized, ValueError, "k_scale must be given", k_scale=None, v_scale=own)
    refused(call, ValueError, "v_scale must be None", v_scale=own)
    call.latent.flags.writeable = False
    refused(call, ValueError, "k_cache must be writeable")


def test_scales_of_their_own_where_nothing_is_written():
    """As for any two arrays that are only read."""
    call = Call(np.dtype("int8"))
    out = attnmask.flash_attention_with_kvcache(**call.arguments(key=None, v_scale=2 * call.scale))
    half = attnmask.flash_attention_with_kvcache(**call.arguments(key=None))
    np.testing.assert_allclose(out, 2 * half, rtol=1e-6)


# KVCache


def latent_cache(dtype="float32", **more) -> attnmask.KVCache:
    sizes = {"value_depth": DV, "latent": True, "layers": 2, "page_size": 4, "pages": 24} | more
    return attnmask.KVCache(1, D, dtype=dtype, **sizes)


def steps(cache, rng) -> list[np.ndarray]:
    """A prompt, a fork, tokens for both, and one token less."""
    results = []

    def step(ids, counts):
        with cache.step(ids, counts) as step:
            for layer in range(2):
                query, key = rng.standard_normal((2, sum(counts), HEADS, D)).astype(np.float32)
                key = key[:, :1]
                value = () if cache.latent else (key[..., :DV],)
                results.append(step.attend(layer, query, key, *value))

    one = cache.new_sequence()
    step([one], [6])
    other = cache.fork(one)
    step([one, other], [3, 1])
    cache.truncate(one, 7)
    step([other, one], [2, 2])
    return results


@pytest.mark.parametrize("dtype", [np.dtype("float32"), BF16], ids=str)
def test_a_latent_cache_gives_the_bits_of_two_arrays(dtype):
    latent, both = latent_cache(dtype), latent_cache(dtype, latent=False)
    for one, other in zip(*(steps(cache, np.random.default_rng(0)) for cache in (latent, both)), strict=True):
        assert one.tobytes() == other.tobytes()
    assert np.shares_memory(latent.v_pages, latent.k_pages)
    assert f"nbytes={latent.k_pages.nbytes}" in repr(latent)
    assert "latent=True" in repr(latent)


@pytest.mark.parametrize("dtype", [np.dtype("float32"), np.dtype("int8"), FP8], ids=str)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_copies_are_latent_and_independent(dtype, copied):
    rng = np.random.default_rng(0)
    cache = latent_cache(dtype)
    steps(cache, rng)
    other = copied(cache)
    assert other.k_pages.tobytes() == cache.k_pages.tobytes()
    assert np.shares_memory(other.v_pages, other.k_pages)
    assert not np.shares_memory(other.k_pages, cache.k_pages)
    assert other.v_scales is other.k_scales
    assert other.v_pages.shape == cache.v_pages.shape
    for one, two in zip(*(steps(each, np.random.default_rng(1)) for each in (cache, other)), strict=True):
        assert one.tobytes() == two.tobytes()


def test_bad_input_of_caches():
    x = np.zeros((1, 1, D), np.float32)
    cache = latent_cache(latent=False)
    with cache.step([cache.new_sequence()], 1) as step:
        with pytest.raises(TypeError, match="value must be given, as the cache is not latent, got None"):
            step.attend(0, x, x)
        for layer in range(2):
            step.attend(layer, x, x, x[..., :DV])
    cache = latent_cache()
    with cache.step([cache.new_sequence()], 1) as step:
        with pytest.raises(ValueError, match="value must be None where v_cache is channels of k_cache"):
            step.attend(0, x, x, x[..., :DV])
        for layer in range(2):
            step.attend(layer, x, x)


# PyTorch


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors(dtype):
    torch = pytest.importorskip("torch")
    at = pytest.importorskip("attnmask.torch")
    call = Call(BF16 if dtype == "bfloat16" else np.dtype(dtype))
    expected = attnmask.flash_attention_with_kvcache(**call.arguments())
    again = Call(BF16 if dtype == "bfloat16" else np.dtype(dtype))

    given = {name: tensor(torch, x) for name, x in again.given.items()}
    latent = tensor(torch, again.latent)
    out = at.flash_attention_with_kvcache(**given, k_cache=latent, v_cache=latent[again.channels])
    assert tensor(torch, expected).equal(out)
    assert again.latent.tobytes() == call.latent.tobytes()


@pytest.mark.parametrize("dtype", [np.dtype("float32"), np.dtype("int8")], ids=str)
@pytest.mark.parametrize("form", ["first channels", "packed pages"])
def test_graphs(dtype, form):
    """Values that are taken from the keys in the graph share their memory."""
    torch = pytest.importorskip("torch")
    at = pytest.importorskip("attnmask.torch")
    call, again = Call(dtype, **FORMS[form]), Call(dtype, **FORMS[form])
    expected = attnmask.flash_attention_with_kvcache(**call.arguments())

    @torch.compile(backend="aot_eager", fullgraph=True)
    def attend(latent, scale, **given):
        values = latent[..., :DV]
        out = at.flash_attention_with_kvcache(**given, k_cache=latent, v_cache=values, k_scale=scale)
        return out, latent.sum()

    torch._dynamo.reset()
    scale = None if again.scale is None else tensor(torch, again.scale)
    given = {name: tensor(torch, x) for name, x in again.given.items()}
    out, total = attend(tensor(torch, again.latent), scale, **given)
    assert tensor(torch, expected).equal(out)
    assert again.latent.tobytes() == call.latent.tobytes()
    assert total == tensor(torch, call.latent).sum()
