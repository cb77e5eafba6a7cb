"""attnmask.torch.KVCache: attnmask.KVCache of tensors, also where steps are compiled."""

import copy
import pickle

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import attnmask.torch  # noqa: E402

KINDS = [
    {"dtype": torch.float32},
    {"dtype": torch.bfloat16},
    {"dtype": torch.int8},
    {"dtype": torch.float8_e5m2},
    {"dtype": "int4", "group": 32},
    {"dtype": torch.float32, "latent": True, "value_head_dim": 16},
]


def caches(**more):
    given = {"kv_heads": 2, "head_dim": 32, "layers": 2, "pages": 16, "page_size": 4} | more
    both = attnmask.torch.KVCache(**given), attnmask.KVCache(**given)
    for cache in both:
        cache.new_sequence(), cache.new_sequence()
    return both


def a_step(ours, right, ids, counts, **more):
    """Of each layer: the same bits."""
    tokens = (len(ids), counts) if isinstance(counts, int) else (sum(counts),)
    with ours.step(torch.tensor(ids), counts) as step, right.step(ids, counts) as expected:
        for layer in range(2):
            x = torch.randn(*tokens, 2, 32)
            value = None if right.latent else x
            out = step.attend(layer, x, x, value, **more)
            told = expected.attend(layer, *(None if a is None else a.numpy() for a in (x, x, value)), **more)
            for one, other in zip(*(a if more else (a,) for a in (out, told)), strict=True):
                assert torch.is_tensor(one)
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_like_numpy(kind):
    ours, right = caches(**kind)
    assert repr(ours) == repr(right)
    a_step(ours, right, [0, 1], 3)
    for cache in (ours, right):
        cache.fork(0)
        cache.truncate(1, 2)
        cache.evict(0, torch.tensor([2, 0]))
        cache.evict(2, [[0, 1], [2, 1]])
    for cache in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        twin = copy.deepcopy(right)
        a_step(cache, twin, [0, 2, 1], [1, 2, 5], return_lse=True)  # copies a page
        for name in ("lengths", "positions", "block_table"):
            one, other = getattr(cache, name)([2, 1]), getattr(twin, name)([2, 1])
            assert one.dtype == torch.int32
            np.testing.assert_array_equal(one, other)
        for name in ("k_pages", "v_pages", "k_scales", "v_scales"):
            one, other = getattr(cache, name), getattr(twin, name)
            assert (one is None) == (other is None)
            if one is not None:
                assert torch.is_tensor(one)
                assert one.untyped_storage().nbytes() >= other.nbytes
                np.testing.assert_array_equal(one.float(), other.astype(np.float32))


def test_in_graphs():
    """All layers in one graph; the next token needs no other."""
    torch.compiler.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    def layers(step, x):
        return step.attend(0, x, x, x) + step.attend(1, x + 1, x, x)

    (ours, _), (twin, _) = caches(**KINDS[1]), caches(**KINDS[1])
    compiled = torch.compile(layers, backend=backend, fullgraph=True)
    for counts in (5, 1, 1, 1, 1, 1, 1):
        x = torch.randn(2, counts, 2, 32)
        with ours.step([0, 1], counts) as step, twin.step([0, 1], counts) as expected:
            assert torch.equal(compiled(step, x), layers(expected, x))
    assert torch.equal(ours.k_pages, twin.k_pages)
    assert len(graphs) <= 4
    with pytest.raises(ValueError, match="query must be"), ours.step([0], 1) as step:
        torch.compile(layers, backend="eager")(step, torch.ones(2, 2, 32))


@pytest.mark.parametrize(("wrong", "error", "message"), [
    ({"query": np.ones((1, 2, 32), np.float32)}, TypeError, "query must be a tensor"),
    ({"key": torch.ones(2, 2, 32)}, ValueError, "key must be "),
    ({"value": None}, TypeError, "value must be given"),
    ({"query": torch.ones(1, 2, 32, requires_grad=True)}, RuntimeError, "no gradient with key, and query requires"),
])  # fmt: skip
def test_wrong_arguments(wrong, error, message):
    ours, x = caches(dtype=torch.float32)[0], torch.ones(1, 2, 32)
    with pytest.raises(error, match=message), ours.step([0], 1) as step:
        step.attend(0, **{"query": x, "key": x, "value": x} | wrong)
    assert ours.lengths([0]).tolist() == [0]
    with pytest.raises(TypeError, match=r"dtype must be .* got 'int32'"):
        attnmask.torch.KVCache(1, 8, pages=1, dtype=torch.int32)


def test_forks_attend_to_what_they_share():
    """Once for all, also compiled, with NumPy's bits."""
    cache = attnmask.torch.KVCache(2, 16, pages=16, page_size=4, dtype=torch.float32)
    first, x = cache.new_sequence(), torch.randn(9, 2, 16)
    with cache.step([first], 9) as step:
        step.attend(0, x, x, x)
    ids, x = [first, cache.fork(first)], torch.randn(2, 1, 2, 16)
    with cache.step(ids, 1) as step:
        out = step.attend(0, x, x, x, prefix=8)
    given = {"k_cache": cache.k_pages[0], "v_cache": cache.v_pages[0]}
    given |= {"block_table": cache.block_table(ids), "cache_seqlens": cache.lengths(ids)}
    right = attnmask.flash_attention_with_kvcache(
        x.numpy(), **{n: t.numpy() for n, t in given.items()}, prefix=8
    )
    assert out.numpy().tobytes() == right.tobytes()
    compiled = torch.compile(attnmask.torch.flash_attention_with_kvcache, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, **given, prefix=8), out)
    with pytest.raises(ValueError, match="prefix must be whole pages of 4 tokens"):
        attnmask.torch.flash_attention_with_kvcache(x, **given, prefix=7)
