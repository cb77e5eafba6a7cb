"""The limits that docs/numbers.rst states hold up to exactly where it states them."""

import platform

import ml_dtypes
import numpy as np
import pytest
from environment import multiplies_bf16

import attnmask

BF16 = ml_dtypes.bfloat16


def errors(got, right) -> tuple[float, float]:
    """The largest error, and the root of the mean square."""
    difference = got.astype(float) - right
    return abs(difference).max(), (difference**2).mean() ** 0.5


# The table of gradients of query, key and value, with and without products of bfloat16: by a result that is kept, and
# by a rounded one.
STATED = {
    False: ([(0.008, 0.0014), (0.011, 0.0014), (0.015, 0.0012)], [(0.095, 0.0025), (0.095, 0.0025), (0.015, 0.0012)]),
    True: ([(0.023, 0.0023), (0.022, 0.0023), (0.022, 0.0016)], [(0.095, 0.0031), (0.095, 0.0031), (0.022, 0.0016)]),
}  # fmt: skip


@pytest.fixture(scope="module")
def normal() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((16, 128, 4, 32)).astype(BF16)


@pytest.fixture(scope="module")
def exact(normal) -> tuple:
    """Attention of these to themselves in float64, and its gradients."""
    wide = normal.astype(float)
    out, vjp = attnmask.flash_attention_vjp(wide, wide, wide)
    return out, vjp(wide)


def test_gradients_in_bfloat16(isa, normal, exact):
    """Their errors are those of the table, from the result that vjp keeps and from the rounded one."""
    _, vjp = attnmask.flash_attention_vjp(normal, normal, normal)
    out, lse = attnmask.flash_attention_fwd(normal, normal, normal)
    kept, rounded = vjp(normal), attnmask.flash_attention_bwd(normal, normal, normal, normal, out, lse)
    stated = STATED[multiplies_bf16(isa)]
    for gradients, limits in zip((kept, rounded), stated, strict=True):
        for one, right, (largest, rms) in zip(gradients, exact[1][:3], limits, strict=False):
            found = errors(one, right)
            assert found[0] < largest + 0.0005
            assert found[1] < rms + 0.00005
    for right, limits in zip(exact[1][:3], STATED[False][0], strict=True):
        for found, limit in zip(errors(right.astype(BF16), right), limits, strict=True):
            assert found > 0.95 * limit  # rounding alone


@pytest.mark.parametrize("causal", [False, True])
def test_errors_of_numbers_drawn_independently(isa, causal):
    rng = np.random.default_rng(1)
    arrays = rng.standard_normal((4, 2, 512, 4, 64)).astype(BF16)
    found, right = [], []
    for results, (*inputs, dout) in ((found, arrays), (right, arrays.astype(float))):
        (out, lse), vjp = attnmask.flash_attention_vjp(*inputs, causal=causal, return_lse=True)
        results += lse, out, *vjp(dout)[:3]
    assert errors(found[0], right[0])[0] < 3e-6
    for one, other in zip(found[1:], right[1:], strict=True):
        least = errors(other.astype(BF16), other)[1]
        assert errors(one, other)[1] < (1.5 if multiplies_bf16(isa) else 1.01) * least


def test_rounded_weights_do_not_scale_a_result(isa, normal, exact):
    """In bfloat16 it is off by little more than its own rounding; it was by 1.17 times as much."""
    out = attnmask.flash_attention(normal, normal, normal)
    assert errors(out, exact[0])[1] < 1.03 * errors(exact[0].astype(BF16), exact[0])[1]


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_decoding_keeps_the_weights(isa, heads):
    """In bfloat16 each element, also one near 0, is off by its own rounding; and by little else."""
    rng = np.random.default_rng(1)
    query, key = (
        rng.standard_normal((4, tokens, count, 576)).astype(BF16) for tokens, count in ((1, heads), (256, 1))
    )
    arrays = query, key, key[..., :512]
    right = attnmask.flash_attention(*(array.astype(float) for array in arrays))
    out = attnmask.flash_attention(*arrays)
    np.testing.assert_allclose(out.astype(float), right, rtol=1.01 * 2.0**-8, atol=2e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("keys", [1, 2, 64, 65, 1000, 5000])
def test_values_up_to_the_largest_number_divided_by_the_keys(isa, keys, dtype):
    """Their mean is right, for one query as for many: the sum before the division does not overflow."""
    largest = dtype(np.finfo(dtype).max * (1 - 1e-5) / keys)
    for queries in (1, 70):
        for signs in (np.ones(keys), np.resize([1, -1], keys)):
            query, key = np.zeros((1, queries, 1, 16), dtype), np.zeros((1, keys, 1, 16), dtype)
            value = np.broadcast_to((largest * signs).astype(dtype)[None, :, None, None], (1, keys, 1, 16))
            out = attnmask.flash_attention(query, key, value)
            np.testing.assert_allclose(
                out, float(largest) * signs.mean(), rtol=1e-5, atol=float(largest) * 1e-5
            )


def test_denormal_bfloat16(isa):
    """Kept where values are multiplied in float32; zero where the processor multiplies bfloat16."""
    tiny = BF16(1e-39)
    assert tiny != 0
    for queries in (1, 70):
        query, key = np.zeros((1, queries, 1, 16), BF16), np.zeros((1, 3, 1, 16), BF16)
        out = attnmask.flash_attention(query, key, np.full((1, 3, 1, 16), tiny))
        expected = 0 if isa in ("avx512bf16", "amx", "neonbf16") and queries > 12 else tiny
        np.testing.assert_array_equal(out.astype(np.float32), np.float32(expected))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_denormals_are_numbers(isa, dtype):
    """As values they come through, as queries and keys they make logits of 0."""
    info = np.finfo(dtype)
    tiny = np.array([info.smallest_subnormal, info.smallest_normal / 2, -info.smallest_subnormal], dtype)
    for queries in (1, 70):
        query, key = np.full((1, queries, 1, 16), tiny[1]), np.full((1, 200, 1, 16), tiny[1])
        for number in tiny:
            out = attnmask.flash_attention(query, key, np.full((1, 200, 1, 16), number))
            assert (out == number).all(), number
        value = np.zeros((1, 200, 1, 16), dtype)
        value[0, ::2] = 1
        assert (attnmask.flash_attention(query, key, value) == 0.5).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gradients_add_up_normal_numbers(isa, dtype):
    """On x86; elsewhere denormal ones as well."""
    query, value = np.zeros((1, 70, 1, 16), dtype), np.ones((1, 200, 1, 16), dtype)
    normal = np.finfo(dtype).smallest_normal
    _, vjp = attnmask.flash_attention_vjp(query, np.zeros_like(value), value)
    on_x86 = platform.machine().lower() in ("x86_64", "amd64")
    for size in (1, 100, 300):
        got, right = vjp(np.full_like(query, size * normal)).value, size * normal * (70 / 200)
        flushed = on_x86 and size < 200  # what is added up for each query is below the smallest normal number
        np.testing.assert_allclose(got, 0 if flushed else right, rtol=1e-5)


def test_float16_beyond_its_largest_number(isa):
    """Logits may be larger, and the mean of the largest values is right. A sum that is too large is infinite."""
    value = np.random.default_rng(0).standard_normal((1, 300, 2, 16)).astype(np.float16)
    largest = np.full_like(value, 65504)
    key = np.full((1, 300, 2, 64), 40, np.float16)
    key[0, :, :, 0] *= np.where(np.arange(300) == 123, 1, -1)[:, None]  # logits of 102,400 and 99,200
    for queries in (1, 40):
        query = np.full((1, queries, 2, 64), 40, np.float16)
        out = attnmask.flash_attention(query, key, value, softmax_scale=1.0)
        assert (out == value[:, 123:124]).all()
        assert (attnmask.flash_attention(0 * query, key, largest) == 65504).all()
        assert (attnmask.flash_attention(0 * query, key, largest, normalize_output=False) == np.inf).all()
    sums = attnmask.chunk_global_cumsum(largest, output_dtype=np.float16)
    assert (sums[:, 1:] == np.inf).all()


MILLION = 2**20


@pytest.fixture(scope="module")
def million() -> list[np.ndarray]:
    """Queries, and a million keys and values."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, tokens, 1, 8), np.float32) for tokens in (40, MILLION, MILLION)]


@pytest.mark.parametrize("queries", [1, 40])
def test_one_live_key_of_a_million(isa, million, queries):
    """The result is its value to the bit, and others have no gradient."""
    query, key, value = million[0][:, :queries], *million[1:]
    for place in (0, 777_777, MILLION - 1):
        mask = np.arange(MILLION) == place
        out, vjp = attnmask.flash_attention_vjp(query, key, value, mask)
        assert (out == value[:, place : place + 1]).all()
        found = vjp(np.ones_like(out))
        np.testing.assert_allclose(found.value[0, mask], queries, rtol=1e-6)
        for gradient in (found.key, found.value):
            assert not gradient[0, ~mask].any()
        for gradient in (found.key, found.query):
            np.testing.assert_allclose(gradient, 0, atol=1e-5)


@pytest.mark.parametrize("queries", [1, 40])
def test_a_million_live_keys(isa, million, queries):
    query, key, value = million[0][:, :queries], *million[1:]
    logits = query[0, :, 0].astype(np.float64) @ key[0, :, 0].astype(np.float64).T / np.sqrt(8)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    out, lse = attnmask.flash_attention(query, key, value, return_lse=True)
    mean = weights @ value[0, :, 0] / weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(out[0, :, 0], mean, rtol=0, atol=1e-6)
    exact = np.log(weights.sum(-1)) + logits.max(-1)
    np.testing.assert_allclose(lse[0, 0], exact, rtol=1e-6)
