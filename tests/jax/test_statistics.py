"""What attention to a cache looked at, beside NumPy: the same bits, compiled as well."""

import numpy as np
import pytest

import attnmask

jax = pytest.importorskip("jax")
import attnmask.jax  # noqa: E402

ALL = ("key_sum", "entropy", "max_logit", ("top_keys", 3))
F32 = np.float32
look = attnmask.jax.attention_statistics_with_kvcache


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(F32)


def same(found, right) -> None:
    for name, got, expected in zip(right._fields, found, right, strict=True):
        assert isinstance(got, jax.Array)
        got = np.asarray(got)
        if name == "key_sum":
            assert not got[..., expected.shape[-1] :].any()
            got = np.ascontiguousarray(got[..., : expected.shape[-1]])
        assert got.tobytes() == expected.astype(got.dtype).tobytes()


CASES = [
    {}, {"heads": "key", "sliding_window": 3}, {"cache_seqlens": np.array([5, 9])}, {"rotate": True},
    {"attention_mask": np.arange(24).reshape(2, 1, 1, 12) % 5 > 0}, {"lse": draw(2, 4, 2)},
    {"block_table": np.array([[1], [0]], np.int32), "cache_seqlens": 7},
    {"cu_seqlens_q": np.array([0, 1, 4]), "query": draw(4, 4, 16), "cache_seqlens": 8},
]  # fmt: skip


@pytest.mark.parametrize("more", CASES, ids=lambda more: "-".join(more))
def test_the_same_as_in_numpy(more):
    given = {"query": draw(2, 2, 4, 16), "k_cache": draw(2, 12, 2, 16)} | more
    right = attnmask.attention_statistics_with_kvcache(**given, of=ALL)
    arrays = {name: jax.numpy.asarray(x) for name, x in given.items() if isinstance(x, np.ndarray)}
    static = {name: x for name, x in given.items() if name not in arrays} | {"of": ALL}
    same(look(**arrays, **static), right)
    same(jax.jit(lambda arrays: look(**arrays, **static))(arrays), right)


def test_transforms():
    query, k_cache = draw(3, 2, 1, 2, 16), draw(2, 8, 2, 16)
    entropy = lambda query: look(query, k_cache, of="entropy").entropy  # noqa: E731
    right = np.stack(
        [attnmask.attention_statistics_with_kvcache(x, k_cache, of="entropy").entropy for x in query]
    )
    assert np.asarray(jax.vmap(entropy)(query)).tobytes() == right.tobytes()
    beside = jax.grad(lambda x: ((x**2).sum(), entropy(x))[0])(jax.numpy.asarray(query[0]))
    np.testing.assert_array_equal(beside, 2 * query[0])
    with pytest.raises(NotImplementedError, match=r"attention_statistics_with_kvcache has no gradients"):
        jax.grad(lambda x: entropy(x).sum())(query[0])


@pytest.mark.parametrize(("wrong", "error", "words"), [
    ({"of": "sum"}, ValueError, "of must be one of"),
    ({"query": draw(2, 4, 16)}, ValueError, "query must have 4 axes"),
    ({"k_cache": draw(2, 4)}, ValueError, "k_cache must have 4 axes"),
    ({"window": 3}, TypeError, "attention_statistics_with_kvcache.*window"),
    ({"cache_seqlens": 99}, ValueError, "cache_seqlens must be tokens that the cache has room for"),
])  # fmt: skip
def test_bad_input_is_named(wrong, error, words):
    given = {"query": draw(2, 2, 4, 16), "k_cache": draw(2, 12, 2, 16), "of": "entropy"} | wrong
    with pytest.raises(error, match=words):
        look(**{name: jax.numpy.asarray(x) if isinstance(x, np.ndarray) else x for name, x in given.items()})
