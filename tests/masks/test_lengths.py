"""Masks that are made of lengths alone: `full`, `causal`, `from_lengths`, and `from_padding_mask` beside them."""

import pickle
import tracemalloc

import numpy as np
import pytest

import attnmask
from attnmask import MaskInfo

LENGTHS = np.array([5, 0, 3])
TOKENS = np.arange(6) < LENGTHS[:, None]
LONG = 131_072


def zeros(batch: int, queries: int, keys: int) -> MaskInfo:
    """The same as `full`, of segment ids."""
    return MaskInfo.from_segments(np.zeros((batch, queries), int), np.zeros((batch, keys), int))


MADE = {
    "full": (MaskInfo.full(6), zeros(1, 6, 6)),
    "full of a batch": (MaskInfo.full(4, 7, 2), zeros(2, 4, 7)),
    "full without tokens": (MaskInfo.full(0), zeros(1, 0, 0)),
    "full without rows": (MaskInfo.full(2, 3, 0), zeros(0, 2, 3)),
    "causal": (MaskInfo.causal(6), zeros(1, 6, 6).apply_causal()),
    "causal, more keys": (MaskInfo.causal(4, 7, "bottom-right"), zeros(1, 4, 7).apply_causal("bottom-right")),
    "causal, fewer keys": (MaskInfo.causal(7, 4, "bottom-right", 2), zeros(2, 7, 4).apply_causal(-3)),
    "causal, offsets": (MaskInfo.causal(4, 6, [1, -2], batch=2), zeros(2, 4, 6).apply_causal([1, -2])),
    "lengths": (MaskInfo.from_lengths(LENGTHS, 6), MaskInfo.from_padding_mask(TOKENS)),
    "lengths, causal": (MaskInfo.from_lengths([5, 0, 3]).apply_causal(),
        MaskInfo.from_padding_mask(TOKENS[:, :5]).apply_causal()),
    "one length": (MaskInfo.from_lengths([2], 4), MaskInfo.from_padding_mask([[1, 1, 0, 0]])),
    "no lengths": (MaskInfo.from_lengths([], 4), MaskInfo.from_segments(np.zeros((0, 4), int))),
    "lengths of nothing": (MaskInfo.from_lengths([0, 0]), MaskInfo.from_segments(np.zeros((2, 0), int))),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_what_ids_would_say(name):
    """test_info.py looks at all that is told of them."""
    made, expected = MADE[name]
    assert made == expected
    assert (made.shape, made.heads) == (expected.shape, expected.heads)
    assert made.baked_in_masks == expected.baked_in_masks


@pytest.mark.parametrize("name", MADE)
def test_nothing_is_held(name):
    made, _ = MADE[name]
    assert "holds=[]" in repr(made)
    assert not any(child is not None for child in made.tree_flatten()[0][:7])
    assert made[:, :, :2, :].tree_flatten()[0][:7] == (None,) * 7
    assert set(made.get_shardings(mesh={"dp": 1, "fsdp": 1, "tp": 1, "sp": 1})) == {None}


@pytest.mark.parametrize("make", [
    lambda: MaskInfo.full(LONG),
    lambda: MaskInfo.causal(LONG, offset="bottom-right", batch=64),
    lambda: MaskInfo.from_lengths([LONG, 5] * 32),
    lambda: MaskInfo.causal(LONG)[..., 5:-5, :] & MaskInfo.full(LONG)[..., 5:-5, :],
], ids=["full", "causal", "lengths", "slices"])  # fmt: skip
def test_long_ones_cost_nothing(make):
    make()
    tracemalloc.start()
    mask = make()
    repr(mask), mask.tree_flatten(), pickle.loads(pickle.dumps(mask))
    assert tracemalloc.get_traced_memory()[1] < 20_000
    tracemalloc.stop()


def test_repr_says_what_they_are_made_of():
    assert "base=full, terms=[]," in repr(MaskInfo.full(3))
    assert "base=full, terms=[& causal(offset=2)]" in repr(MaskInfo.causal(3, 5, "bottom-right"))
    assert "base=lengths, terms=[& key lengths, & causal]" in repr(MaskInfo.from_lengths([2]).apply_causal())


def test_ids_in_place_of_all_pairs():
    """As of a mask of segments: terms stay."""
    ids = [[0, 0, 1, 1]]
    expected = MaskInfo.from_segments(ids).apply_causal()
    assert MaskInfo.causal(4).replace(q_segment_ids=ids, kv_segment_ids=ids) == expected
    assert MaskInfo.causal(4) & MaskInfo.from_segments(ids) == expected
    np.testing.assert_array_equal((MaskInfo.causal(4) & MaskInfo.from_segments(ids)).q_segment_ids, ids)


def test_ids_after_operators():
    """Where neither side holds ids, they are what one of them says without."""
    dense, made = MaskInfo(np.ones((1, 4, 4), bool)), MaskInfo.from_lengths([3], 4)
    for joined in (made & dense, dense & made, made | dense, dense | made):
        np.testing.assert_array_equal(joined.q_segment_ids, [[0, 0, 0, -1]])
    deep = made
    for _ in range(20):
        deep = MaskInfo(np.ones((1, 4, 4), bool)) & (deep | dense)
    np.testing.assert_array_equal(deep.q_segment_ids, [[0, 0, 0, -1]])
    assert (~made).tree_flatten()[0][1] is None


@pytest.mark.parametrize("causal", [False, True])
def test_attention_has_the_bits_of_other_ways(causal):
    query, key, value = np.random.default_rng(3).standard_normal((3, 3, 70, 2, 16)).astype(np.float32)
    whole = MaskInfo.causal(70) if causal else MaskInfo.full(70, batch=3)
    np.testing.assert_array_equal(
        attnmask.flash_attention(query, key, value, whole),
        attnmask.flash_attention(query, key, value, causal=causal),
    )


def test_lengths_and_masks_are_copied():
    lengths, tokens = LENGTHS.copy(), TOKENS.copy()
    masks = MaskInfo.from_lengths(lengths, 6), MaskInfo.from_padding_mask(tokens)
    lengths[:], tokens[:] = 1, False
    for mask in masks:
        np.testing.assert_array_equal(mask.q_lens, LENGTHS)


@pytest.mark.parametrize("dtype", ["bool", "int8", "float32"])
def test_types_of_padding_masks(dtype):
    np.testing.assert_array_equal(MaskInfo.from_padding_mask(TOKENS.astype(dtype)).q_lens, LENGTHS)
    assert MaskInfo.from_padding_mask(np.tri(4)).shape == (
        4,
        4,
        4,
    )  # without a warning: it is said what it is


@pytest.mark.parametrize(("error", "match", "wrong"), [
    (ValueError, r"q_len must be at most 2\*\*56", lambda: MaskInfo.full(2**57)),
    (ValueError, r"kv_len must be at most 2\*\*56", lambda: MaskInfo.causal(2, 10**400)),
    (ValueError, "batch must be at least 0", lambda: MaskInfo.full(2, batch=-1)),
    (ValueError, "did you mean 'bottom-right'", lambda: MaskInfo.causal(2, 3, "bottom-rigt")),
    (ValueError, r"offset must be an integer or of shape \(2,\)", lambda: MaskInfo.causal(2, 3, [1] * 3, 2)),
    (ValueError, r"lengths must be \[B\]", lambda: MaskInfo.from_lengths(3)),
    (ValueError, "lengths must be at least 0, got -1 at index 1", lambda: MaskInfo.from_lengths([2, -1])),
    (ValueError, "lengths must be at most max_len, 4, got 5 at index 1", lambda: MaskInfo.from_lengths([2, 5], 4)),
    (ValueError, "got 18446744073709551615", lambda: MaskInfo.from_lengths(np.array([2**64 - 1], "u8"), 4)),
    (ValueError, r"at most 2\*\*56", lambda: MaskInfo.from_lengths(np.array([2**60]))),
    (ValueError, r"max_len must be at most 2\*\*56", lambda: MaskInfo.from_lengths([2], 2**57)),
    (ValueError, r"padding_mask must be \[B, T\]", lambda: MaskInfo.from_padding_mask([1, 1, 0])),
    (ValueError, "bias", lambda: MaskInfo.from_padding_mask([[0.0, -np.inf]])),
])  # fmt: skip
def test_wrong_arguments(error, match, wrong):
    with pytest.raises(error, match=match):
        wrong()
