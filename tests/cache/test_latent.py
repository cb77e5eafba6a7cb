"""Latent caches: values that are channels of the keys, appended once. test_combinations.py has their twin."""

import numpy as np
import pytest
from flash_cases import BF16, F16, F32, F64
from kvcache_cases import E4M3, INT8, Case, arguments_of, attend, refused
from tensors import tensor

import attnmask

pytestmark = pytest.mark.levels("turns", "amx", "avx512vnni")

TYPES = (F16, F32, F64, INT8, BF16, E4M3)
D, DV = 24, 16
FORMS = {
    "first channels": {},
    "last channels": {"groups": (1, 1)},
    "pages": {"page_size": 16, "groups": (1, 1)},
    "short pages": {"page_size": 3},
    "packed": {"queries": (5, 1, 2)},
    "packed pages": {"queries": (5, 1, 2), "page_size": 16, "heads": (8, 2)},
}


def given_of(dtype, form="first channels") -> tuple[dict, slice]:
    """Arguments of a call with new tokens over a cache with 3 sequences, and which channels are values."""
    sizes = {"heads": (4, 1), "depths": (D, DV), "queries": 4, "lengths": (0, 3, 9), "order": 1} | FORMS[form]
    types = F32 if dtype.itemsize == 1 else dtype, dtype
    case = Case(types, new="as many", latent=True, **sizes)
    return arguments_of(case), case.channels_of_values


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_the_same_as_with_values_of_their_own(isa, form, dtype):
    """The same cache, and the same bits; with a scale per channel, which does not depend on the others."""
    given, channels = given_of(dtype, form)
    if dtype.itemsize == 1:
        shape = 1, 1, *given["k_cache"].shape[2:]
        given["k_scale"] = np.random.default_rng(0).uniform(0.01, 0.05, shape).astype(F32)
    apart = {name: x.copy() if isinstance(x, np.ndarray) else x for name, x in given.items()}
    apart["value"] = given["key"][..., channels]
    if dtype.itemsize == 1:
        apart["v_scale"] = given["k_scale"][..., channels].copy()
    assert attend(given).tobytes() == attend(apart).tobytes()
    assert given["k_cache"].tobytes() == apart["k_cache"].tobytes()


def test_bad_input():
    given, quantized = given_of(F32)[0], given_of(INT8)[0]
    cache, scale, value = given["k_cache"], quantized["k_scale"], given["key"][..., :DV]

    def refuses(given, message, **more):
        refused(given | more, ValueError, message)

    refuses(given, "value must be None with a latent cache, as key contains the values", value=value)
    refuses(given, "key must be given with value", key=None, value=value)
    # Backwards, every second one, of other tokens, and of other rows: these are no channels of the keys, so values have
    # to be given, and may not lie there.
    for view in (cache[..., DV - 1 :: -1], cache[..., ::2], cache[:, ::-1, :, :DV], cache[::-1, ..., :DV]):
        refuses(given, "value must be given with key", v_cache=view)
        value = np.zeros((3, 4, 1, view.shape[-1]), np.float32)
        refuses(given, "k_cache must share no memory with v_cache", v_cache=view, value=value)
    for own in (scale.copy(), scale[::-1]):
        refuses(quantized, "v_scale must be None or k_scale itself", v_scale=own)
    refuses(quantized, "k_scale must be given", k_scale=None, v_scale=scale)
    refuses(given, "v_scale must be None", v_scale=scale)
    assert attend(quantized, v_scale=scale).tobytes() == attend(given_of(INT8)[0]).tobytes()
    cache.flags.writeable = False
    refuses(given, "k_cache must be writeable", v_cache=cache[..., :DV])


def test_scales_of_their_own_where_nothing_is_written():
    """As for any two arrays that are only read."""
    given, _ = given_of(INT8)
    out, half = (attend(given, key=None, v_scale=scale) for scale in (2 * given["k_scale"], None))
    np.testing.assert_allclose(out, 2 * half, rtol=1e-6)


# KVCache


def test_bad_input_of_caches():
    x = np.zeros((1, 1, D), np.float32)
    caches = (
        attnmask.KVCache(1, D, value_head_dim=DV, latent=latent, layers=2, pages=2, dtype="float32")
        for latent in (False, True)
    )
    cache = next(caches)
    with cache.step([cache.new_sequence()], 1) as step:
        with pytest.raises(TypeError, match="value must be given, as the cache is not latent, got None"):
            step.attend(0, x, x)
        for layer in range(2):
            step.attend(layer, x, x, x[..., :DV])
    cache = next(caches)
    with cache.step([cache.new_sequence()], 1) as step:
        with pytest.raises(
            ValueError, match="value must be None with a latent cache, as key contains the values"
        ):
            step.attend(0, x, x, x[..., :DV])
        for layer in range(2):
            step.attend(layer, x, x)


# PyTorch


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_tensors(dtype):
    torch = pytest.importorskip("torch")
    at = pytest.importorskip("attnmask.torch")
    given, channels = given_of(dtype)
    again = {name: tensor(torch, x) for name, x in given_of(dtype)[0].items()}
    out = at.flash_attention_with_kvcache(**again | {"v_cache": again["k_cache"][..., channels]})
    assert tensor(torch, attend(given)).equal(out)
    assert tensor(torch, given["k_cache"]).nan_to_num().equal(again["k_cache"].nan_to_num())


@pytest.mark.parametrize("dtype", [F32, INT8], ids=str)
@pytest.mark.parametrize("form", ["first channels", "packed pages"])
def test_graphs(dtype, form):
    """Values that are taken from the keys in the graph share their memory."""
    torch = pytest.importorskip("torch")
    at = pytest.importorskip("attnmask.torch")
    given, channels = given_of(dtype, form)
    again = {name: tensor(torch, x) for name, x in given_of(dtype, form)[0].items() if x is not None}
    del again["v_cache"]

    @torch.compile(backend="aot_eager", fullgraph=True)
    def attend_in_graph(k_cache, **again):
        out = at.flash_attention_with_kvcache(**again, k_cache=k_cache, v_cache=k_cache[..., channels])
        return out, k_cache.nan_to_num().sum()

    torch._dynamo.reset()
    out, total = attend_in_graph(**again)
    assert tensor(torch, attend(given)).equal(out)
    cache = tensor(torch, given["k_cache"]).nan_to_num()
    assert cache.equal(again["k_cache"].nan_to_num())
    assert total == cache.sum()
