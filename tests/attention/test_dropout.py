"""Dropout follows its keep mask, and the keep mask is random."""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
import reference_flash as ref
from flash_cases import F64, FLOATS, tensors
from flash_expected import attend

import attnmask

pytestmark = pytest.mark.levels("turns", "amx")

# The result


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("packing", [None, "packed", "flat"])
@pytest.mark.parametrize("seed", [None, 0, 1, 2**31, 2**32 + 1, 2**62])
def test_the_keep_mask_is_the_one_used(isa, dtype, packing, seed):
    """With equal weights and the identity for values, the result is the mask; for dout, the gradient of values is."""
    prob, (batch, heads, queries, keys) = 0.25, (1 if packing else 2, 4, 33, 64)
    more, live = {}, np.ones((queries, keys), bool)
    if packing:
        more = {"cum_seqlens_q": [0, 10, 11, 33], "cum_seqlens_k": [0, 16, 32, 64]}
        live = ref.live_pairs((1, 1, queries, keys), **more)[0, 0]
    tensors = [np.zeros((batch, queries, heads, 8)), np.zeros((batch, keys, heads, 8))]
    for tokens in (keys, queries):  # for values, and for dout
        shape = batch, tokens, heads, tokens
        tensors.append(np.broadcast_to(np.eye(tokens)[None, :, None], shape))
    tensors = [x.astype(dtype)[0] if packing == "flat" else x.astype(dtype) for x in tensors]
    query, key, value, dout = tensors
    more |= {"dropout_prob": prob, "dropout_seed": seed}
    out = attnmask.flash_attention(query, key, value, **more).reshape(batch, queries, heads, keys)
    ones = np.ones((*key.shape[:-1], queries), dtype)
    gradient = attnmask.flash_attention_vjp(query, key, ones, **more)[1](dout).value
    keep = attnmask.dropout_keep_mask(0 if seed is None else seed, prob, (batch, heads, queries, keys))
    assert (keep.shape, keep.dtype) == ((batch, heads, queries, keys), bool)
    weights = np.where(keep & live, 1 / live.sum(axis=1, keepdims=True) / (1 - prob), 0)
    # Weights of gradients are computed from lse, and so have its error.
    eps, logit = float(ml_dtypes.finfo(dtype).eps), np.log(keys)
    near = [2 * eps + 1e-6 * (dtype != F64), 2 * (1 + logit) * eps + 1e-6 * (dtype != F64)]
    got = out.swapaxes(1, 2), gradient.reshape(batch, keys, heads, queries).transpose(0, 2, 3, 1)
    for weight, rounding in zip(got, near, strict=True):
        np.testing.assert_array_equal(weight != 0, keep & live)
        np.testing.assert_allclose(weight.astype(np.float64), weights, rtol=rounding)


def test_dropout_that_hardly_ever_drops(isa):
    """Kept weights grow by a tiny factor, in the result as in its gradient."""
    x = np.ones((1, 2, 1, 4))
    plain, plain_vjp = attnmask.flash_attention_vjp(x, x, x)
    out, vjp = attnmask.flash_attention_vjp(x, x, x, dropout_prob=1e-10)
    np.testing.assert_allclose(out / plain - 1, 1e-10, rtol=1e-4)
    np.testing.assert_allclose(vjp(x).value / plain_vjp(x).value - 1, 1e-10, rtol=1e-4)


def test_a_nan_whose_weight_is_dropped(isa):
    """The pair is live: the row's greatest logit is NaN, and so are all weights relative to it."""
    query, key, value = np.ones((1, 1, 1, 4)), np.ones((1, 2, 1, 4)), np.ones((1, 2, 1, 4))
    key[0, 1] = np.nan
    kept = [attnmask.dropout_keep_mask(seed, 0.5, (1, 1, 1, 2)).ravel().tolist() for seed in range(20)]
    dropout = {"dropout_prob": 0.5, "dropout_seed": kept.index([True, False])}
    for normalize in (True, False):
        out = attnmask.flash_attention(query, key, value, **dropout, normalize_output=normalize)
        assert np.isnan(out).all()


def test_dropout_keeps_the_mean(isa):
    """The mean of the outputs over many seeds is that without dropout; lse does not change."""
    arguments = tensors(4, 30, batch=1)
    plain, lse = attend(arguments)
    several = [attend(arguments, dropout_prob=0.5, dropout_seed=seed) for seed in range(400)]
    assert all(np.array_equal(one_lse, lse) for _, one_lse in several)
    np.testing.assert_allclose(np.mean([out for out, _ in several], axis=0), plain, atol=0.12)


# The keep mask


def test_the_keep_mask_of_a_part_is_part_of_the_keep_mask(isa, set_threads):
    whole = attnmask.dropout_keep_mask(11, 0.3, (3, 4, 130, 257))
    assert whole.flags.c_contiguous
    for shape in [
        (1, 1, 1, 1),
        (3, 4, 130, 256),
        (2, 4, 129, 257),
        (3, 1, 7, 33),
        (1, 4, 130, 5),
        (0, 4, 3, 3),
    ]:
        part = tuple(slice(length) for length in shape)
        for threads in (1, 3):
            set_threads(threads)
            got = attnmask.dropout_keep_mask(11, 0.3, shape)
            np.testing.assert_array_equal(got, whole[part], err_msg=repr(shape))
    assert attnmask.dropout_keep_mask(11, 0.0, (2, 3, 4, 5)).all()


@pytest.mark.parametrize("prob", [0.05, 0.1, 0.5, 0.9, 0.95])
def test_the_keep_mask_is_random(prob):
    """The mean is right, and neighbours along every axis and masks of other seeds are uncorrelated.

    Mean and correlation of n independent pairs stay within five standard deviations; the seeds are fixed.
    """
    shape = (4, 4, 64, 256)
    masks = [attnmask.dropout_keep_mask(seed, prob, shape) for seed in (0, 1, 2, 3, 2**32, 2**40)]
    deviation = math.sqrt(prob * (1 - prob))
    scaled = [(mask - (1 - prob)) / deviation for mask in masks]
    count = math.prod(shape)
    for mask in scaled:
        assert abs(mask.mean()) < 5 / math.sqrt(count)
        for axis, lag in itertools.product(range(4), (1, 2, 3)):
            ahead = np.moveaxis(mask, axis, 0)
            product = ahead[lag:] * ahead[:-lag]
            assert abs(product.mean()) < 5 / math.sqrt(product.size), (axis, lag)
        for one, other in ((0, 1), (2, 3)):  # b and h exchanged, or q and k
            turned = np.moveaxis(mask, (one, other), (0, 1))[:64, :64]
            below = np.tri(len(turned), k=-1, dtype=bool)
            product = (turned * turned.swapaxes(0, 1))[below]
            assert abs(product.mean()) < 5 / math.sqrt(product.size), (one, other)
        for axes in itertools.combinations(range(4), 3):  # along each axis, no index has more than others
            sums = mask.sum(axis=axes) / math.sqrt(count / mask.shape[({0, 1, 2, 3} - set(axes)).pop()])
            assert np.abs(sums).max() < 6, axes
    for one, other in itertools.combinations(scaled, 2):
        assert abs((one * other).mean()) < 5 / math.sqrt(count)


def test_the_keep_mask_of_a_shape_as_an_array():
    keep = attnmask.dropout_keep_mask(3, 0.4, np.array([1, 2, 3, 4]))
    np.testing.assert_array_equal(keep, attnmask.dropout_keep_mask(3, 0.4, (1, 2, 3, 4)))


def test_dropout_takes_up_to_two_to_the_32_keys():
    """It numbers them by 32 bits: the keys behind would be dropped together with those at the front."""
    keys = 2**32 + 1
    query, many = np.zeros((1, 1, 1, 1), np.float32), np.broadcast_to(np.float32(0), (1, keys, 1, 1))
    words = rf"dropout takes up to 2\*\*32 keys, got {keys}"
    with pytest.raises(ValueError, match=f"^dropout_prob: {words}"):
        attnmask.flash_attention(query, many, many, dropout_prob=0.5)
    with pytest.raises(ValueError, match=f"^shape: {words}"):
        attnmask.dropout_keep_mask(0, 0.5, (1, 1, 1, keys))
