"""KVCache.evict: pages that stay, full caches, what steps refuse, errors. test_kv_cache.py has any series of calls."""

import copy

import numpy as np
import pytest
import reference_flash as ref

from attnmask import KVCache

LAYERS, HEADS, PAGE_SIZE = 2, 2, 4


def cache_of(*lengths: int, pages: int = 8) -> tuple[KVCache, list[np.ndarray]]:
    """A cache, its sequences, and their tokens [layers, length, heads, channels], which serve as keys and values."""
    cache = KVCache(HEADS, 8, layers=LAYERS, pages=pages, page_size=PAGE_SIZE, dtype="float64")
    ids, rng = [cache.new_sequence() for _ in lengths], np.random.default_rng(0)
    tokens = rng.standard_normal((LAYERS, sum(lengths), HEADS, 8))
    with cache.step(ids, lengths) as step:
        for layer in range(LAYERS):
            step.attend(layer, *[tokens[layer]] * 3)
    return cache, np.split(tokens, np.cumsum(lengths)[:-1], axis=1)


def held(cache: KVCache, number: int) -> np.ndarray:
    keys = cache.k_pages[:, cache.block_table([number])[0]]
    assert np.array_equal(keys, cache.v_pages[:, cache.block_table([number])[0]])
    return keys.reshape(LAYERS, -1, *keys.shape[3:])[:, : cache.lengths([number])[0]]


def taken_from(tokens: np.ndarray, keep) -> np.ndarray:
    kept = np.sort(np.broadcast_to(np.array(keep, int), (LAYERS, HEADS, np.shape(keep)[-1])))
    return np.take_along_axis(tokens, kept.transpose(0, 2, 1)[..., None], axis=1)


WHOLE = np.broadcast_to(np.arange(4, 8), (LAYERS, HEADS, 4))


def but_one(layer: int, head: int, *rows: int) -> np.ndarray:
    keep = WHOLE.copy()
    keep[layer, head] = rows
    return keep


@pytest.mark.parametrize(("keep", "stay"), [
    (range(10), {0: 0, 1: 1, 2: 2}),
    (range(9), {0: 0, 1: 1, 2: 2}),
    ([0, 1, 6, 8, 9], {}),
    ([4, 5, 6, 7, 9], {0: 1}),
    ([3, 2, 1, 0, 8, 9], {0: 0, 1: 2}),
    ([8], {0: 2}),
    ([9], {}),
    ([], {}),
    (WHOLE, {0: 1}),
    (but_one(0, 0, 3, 5, 6, 7), {}),
    (but_one(1, 0, 3, 5, 6, 7), {}),
    (but_one(1, 1, 4, 5, 6, 8), {}),
    ([[4, 5, 6, 7, 8], [4, 5, 6, 7, 9]], {0: 1}),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("free", [5, 0])
def test_pages_that_stay(free, keep, stay):
    """By their new places, their old ones."""
    cache, (tokens,) = cache_of(10, pages=3 + free)
    (before,) = cache.block_table([0])
    cache.evict(0, keep)
    (after,) = cache.block_table([0])
    same = {new: old for new, page in enumerate(after) for old in np.flatnonzero(before == page)}
    assert stay.items() <= same.items()
    assert not free or stay == same
    assert cache.free_pages == 3 + free - len(after)
    np.testing.assert_array_equal(held(cache, 0), taken_from(tokens, keep))
    assert (cache.lengths([0])[0], cache.positions([0])[0]) == (np.shape(keep)[-1], 10)


@pytest.mark.parametrize("keep", [[0, 3, 5, 9], [2], [], [4, 5, 6, 7, 8]])
def test_forks_are_untouched(keep):
    cache, (tokens,) = cache_of(10, pages=5)
    fork = cache.fork(0)
    table = cache.block_table([fork])
    cache.evict(0, keep)
    np.testing.assert_array_equal(cache.block_table([fork]), table)
    np.testing.assert_array_equal(held(cache, fork), tokens)
    np.testing.assert_array_equal(held(cache, 0), taken_from(tokens, keep))
    assert cache.positions([0, fork]).tolist() == [10, 10]


def test_out_of_pages():
    """Of three shared pages, one stays, and the rows of another need a page that is not shared."""
    cache, (tokens,) = cache_of(10, pages=3)
    fork, keep = cache.fork(0), [0, 1, 2, 3, 9]
    with pytest.raises(MemoryError, match=r"^the cache is full: evict needs 1 pages and 0 of 3 are free$"):
        cache.evict(0, keep)
    assert (cache.lengths([0])[0], cache.positions([0])[0], cache.free_pages) == (10, 10, 0)
    np.testing.assert_array_equal(held(cache, 0), tokens)
    cache.free(fork)
    cache.evict(0, keep)
    np.testing.assert_array_equal(held(cache, 0), taken_from(tokens, keep))


def test_positions_go_on():
    cache, _ = cache_of(10)
    cache.evict(0, range(10))
    assert cache.positions([0]).tolist() == [10]
    cache.evict(0, [0, 2, 4, 6, 8, 9])
    cache.evict(0, [0, 4, 5])
    fork, x = cache.fork(0), np.ones((2, HEADS, 8))
    with cache.step([fork], 2) as step:
        assert cache.positions([fork]).tolist() == [10]
        for layer in range(LAYERS):
            step.attend(layer, x, x, x)
    for each in (cache, copy.deepcopy(cache)):
        assert each.positions([0, fork]).tolist() == [10, 12]
        each.truncate(fork, 4)
        assert each.positions([fork]).tolist() == [11]
    assert cache.positions([0]).dtype == np.int32


def test_masks_and_biases_count_what_is_kept():
    cache, (tokens,) = cache_of(10)
    keep, rng = np.array([[1, 0, 9], [2, 6, 7]]), np.random.default_rng(1)
    cache.evict(0, keep)
    mask, bias = rng.random((1, 1, 2, 5)) < 0.7, rng.standard_normal((1, HEADS, 2, 5))
    given = {
        "logits_soft_cap": 2.0,
        "softmax_aux": np.zeros((HEADS, 1)),
        "bias": bias,
        "attention_mask": mask,
    }
    new = rng.standard_normal((LAYERS, 2, HEADS, 8))
    with cache.step([0], 2) as step:
        outs = [
            step.attend(layer, *[new[layer]] * 3, sliding_window=(None, 0), **given)
            for layer in range(LAYERS)
        ]
    keys = np.concatenate([taken_from(tokens, keep), new], axis=1)
    for out, x, key in zip(outs, new, keys, strict=True):
        rows = {"query": x[None], "key": key[None], "value": key[None]} | given
        right = ref.flash_attention(**rows, causal=True, causal_offset="bottom-right")
        np.testing.assert_allclose(out, right.out[0], rtol=0, atol=1e-13)


@pytest.mark.parametrize("given", [
    {"sliding_window": 3}, {"sliding_window": (3, None)}, {"attention_chunk": 4}, {"alibi_slopes": np.ones(HEADS)},
    {"relative_bias": np.zeros((HEADS, 3)), "relative_low": -2}, {"grid_bias": np.zeros((HEADS, 5, 9))},
], ids=str)  # fmt: skip
def test_distances_are_refused(given):
    cache, _ = cache_of(10, 3)
    x = np.ones((2, 1, HEADS, 8))
    words = f"{next(iter(given))} must be None after tokens of a sequence were evicted, as distances to the kept ones"

    def attend(*ids):
        with cache.step(ids, 1) as step:
            for layer in range(LAYERS):
                step.attend(layer, *[x[: len(ids)]] * 3, **given)

    cache.evict(0, range(10))
    attend(0, 1)  # none is missing
    cache.evict(0, [1, 3])
    attend(1)
    with pytest.raises(ValueError, match=words):
        attend(1, 0)
    assert cache.lengths([0, 1]).tolist() == [2, 5]


@pytest.mark.parametrize(("keep", "error", "message"), [
    ([0, 10], ValueError, "keep must be at least 0 and below 10, the sequence's tokens, got 10"),
    ([[0, 1], [2, -1]], ValueError, "keep must be at least 0 and below 10, the sequence's tokens, got -1"),
    (np.array([2**63], np.uint64), ValueError, "below 10, the sequence's tokens, got 9223372036854775808"),
    ([1, 5, 1], ValueError, "keep must name each token once, got 1 twice"),
    (3, ValueError, r"keep must be \[n\], \[kv_heads, n\] or \[layers, kv_heads, n\], with 2 kv_heads and 2 layers, "),
    ([[1]], ValueError, r"keep must be \[n\], .* got int64 array of shape \(1, 1\)"),
    (np.zeros((1, 2, 1), int), ValueError, r"keep must be \[n\], .* got int64 array of shape \(1, 2, 1\)"),
    (np.zeros((1, 2, 2, 1), int), ValueError, r"keep must be \[n\], .* got int64 array of shape \(1, 2, 2, 1\)"),
    ([1.0], TypeError, "keep must be integers, got float64 array"),
    (np.ones(10, bool), TypeError, "keep must be integers, got bool array"),
    ([[1, 2], [3]], ValueError, "keep must be array_like"),
], ids=str)  # fmt: skip
def test_what_cannot_be_kept(keep, error, message):
    cache, (tokens,) = cache_of(10)
    with pytest.raises(error, match=message):
        cache.evict(0, keep)
    np.testing.assert_array_equal(held(cache, 0), tokens)
    assert (cache.positions([0])[0], cache.free_pages) == (10, 5)


def test_a_sequence_without_tokens():
    cache = cache_of(0)[0]
    with pytest.raises(ValueError, match="keep must be at least 0 and below 0, the sequence's tokens, got 0"):
        cache.evict(0, [0])
    cache.evict(0, np.zeros((LAYERS, HEADS, 0), int))
    assert cache.positions([0]).tolist() == [0]
