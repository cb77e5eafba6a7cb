"""Tangents of attention: beside the dense formula in float64, and what they have in common with gradients.

Random masks, with NaN where no pair needs a number, are in test_random_masks.py.
"""

import itertools

import numpy as np
import pytest
import reference_flash as ref
from derivative_cases import INPUTS, LENGTHS, TERMS, TOLERANCE, drawn, near, tangents_of, terms
from flash_cases import BF16, F16, F32, F64

import attnmask


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def compare(arrays, moved, dtype, given, right):
    (out, lse), (d_out, d_lse) = attnmask.flash_attention_jvp(
        **arrays, **tangents_of(moved), **given, return_lse=True
    )
    exact = ref.flash_attention(**arrays, **right)
    near(out, exact.out, dtype)
    assert (np.isneginf(lse) == np.isneginf(exact.lse)).all()
    for mine, other in zip((d_out, d_lse), ref.flash_attention_jvp(moved, **arrays, **right), strict=True):
        assert mine.dtype == (dtype if mine is d_out else F64 if dtype == F64 else F32)
        near(mine, other, dtype)


@pytest.mark.parametrize("dtype", [F64, F32, F16, BF16])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths(isa, rng, dtype, lengths):
    for heads, depths in ((4, 2), (24, 17)), ((3, 1), (64, 64)), ((1, 1), (1, 130)):
        arrays, moved = (drawn(rng, dtype, *lengths, heads, depths) for _ in range(2))
        compare(arrays, moved, dtype, {}, {})


@pytest.mark.parametrize("names", [*itertools.combinations(TERMS, 2), ()], ids="-".join)
def test_terms_by_pairs(isa, rng, names):
    for dtype in F64, F32:
        arrays, moved = (drawn(rng, dtype) for _ in range(2))
        given, right = terms(rng, names, dtype, 2, 4, 70, 65)
        if "bias" in given:
            moved["bias"] = rng.standard_normal(given["bias"].shape).astype(dtype)
        if "softmax_aux" in given:
            moved["softmax_aux"] = rng.standard_normal(given["softmax_aux"].shape)
        compare(arrays, moved, dtype, given, right)


@pytest.mark.parametrize("names", [x for n in range(4) for x in itertools.combinations(INPUTS, n)])
def test_a_tangent_that_is_not_given_is_zero(isa, rng, names):
    arrays, moved = (drawn(rng, F32) for _ in range(2))
    some = {name: moved[name] for name in names}
    rest = {name: np.zeros_like(moved[name]) for name in INPUTS if name not in names}
    compare(arrays, some, F32, {}, {})
    _, mine = attnmask.flash_attention_jvp(**arrays, **tangents_of(some))
    _, other = attnmask.flash_attention_jvp(**arrays, **tangents_of(some | rest))
    near(mine, other.astype(np.float64), F32)
    if not names:
        assert not mine.any()


@pytest.mark.parametrize("bias", [(2, 4, 70, 65), (1, 4, 70, 65), (2, 1, 1, 65), (70, 1), (65,), (1, 1)])
def test_tangents_of_terms_broadcast_as_these_do(isa, rng, bias):
    arrays, moved = (drawn(rng, F64) for _ in range(2))
    for sinks in (3,), (1, 3), (4, 3):
        given = {"bias": rng.standard_normal(bias), "softmax_aux": rng.standard_normal(sinks)}
        moved |= {name: rng.standard_normal(x.shape) for name, x in given.items()}
        compare(arrays, moved, F64, given, given)


@pytest.mark.parametrize("dtype", [F64, F32])
def test_gradients_are_its_transpose(isa, rng, dtype):
    """<gradients of dout, tangents> = <dout, tangent of out>, and the same of lse."""
    arrays, moved = (drawn(rng, dtype, 130, 130) for _ in range(2))
    given, _ = terms(rng, ("causal", "cap", "bias", "sinks", "dropout"), dtype, 2, 4, 130, 130)
    (out, _), vjp = attnmask.flash_attention_vjp(**arrays, **given, return_lse=True)
    dout = rng.standard_normal(out.shape).astype(dtype)
    dlse = rng.standard_normal((2, 4, 130)).astype(dtype)
    grads = vjp(dout, dlse)
    _, (d_out, d_lse) = attnmask.flash_attention_jvp(**arrays, **tangents_of(moved), **given, return_lse=True)
    forward = (d_out.astype(F64) * dout).sum() + (d_lse.astype(F64) * dlse).sum()
    backward = sum((grad.astype(F64) * moved[name]).sum() for name, grad in zip(INPUTS, grads, strict=False))
    assert abs(forward - backward) <= TOLERANCE[dtype] * max(1, abs(forward)) * 10


def test_packed_sequences_and_strides(isa, rng):
    starts_q, starts_k = np.array([0, 70, 70, 100]), np.array([0, 3, 80, 145])
    arrays, moved = (drawn(rng, F32, 100, 145, batch=1) for _ in range(2))
    limits = {"cum_seqlens_q": starts_q, "cum_seqlens_k": starts_k}
    compare(arrays, moved, F32, limits, limits)
    flat, flat_moved = ({name: x[0] for name, x in part.items()} for part in (arrays, moved))
    compare(flat, flat_moved, F32, limits, limits)
    apart, apart_moved = (
        {name: np.repeat(x, 2, axis=3)[..., ::2] for name, x in part.items()} for part in (arrays, moved)
    )
    assert apart["query"].strides[-1] == 8
    for a, b in zip(
        attnmask.flash_attention_jvp(**arrays, **tangents_of(moved), **limits),
        attnmask.flash_attention_jvp(**apart, **tangents_of(apart_moved), **limits),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("shape", [(2, 1, 4, 9, 9), (1, 3, 1, 9, 9), (2, 3, 4, 9, 9), (9, 9)])
def test_several_batch_axes(isa, rng, shape):
    arrays, moved = (drawn(rng, F64, 9, 9, batch=6) for _ in range(2))
    bias, d_bias = rng.standard_normal((2, *shape))
    whole = {"bias": np.broadcast_to(bias, (2, 3, 4, 9, 9)).reshape(6, 4, 9, 9)}
    moved["bias"] = np.broadcast_to(d_bias, (2, 3, 4, 9, 9)).reshape(6, 4, 9, 9)
    _, right = attnmask.flash_attention_jvp(**arrays, **whole, **tangents_of(moved), return_lse=True)
    folded = [
        {name: part[name].reshape(2, 3, *part[name].shape[1:]) for name in INPUTS} for part in (arrays, moved)
    ]
    got = attnmask.flash_attention_jvp(
        **folded[0], bias=bias, **tangents_of(folded[1] | {"bias": d_bias}), return_lse=True
    )[1]
    for a, b in zip(got, right, strict=True):
        np.testing.assert_array_equal(a, b.reshape(2, 3, *b.shape[1:]))


def test_neither_threads_nor_the_rest_of_the_batch_change_a_bit(isa, rng, set_threads):
    arrays, moved = (drawn(rng, F32, 700, 500, batch=3) for _ in range(2))
    right = attnmask.flash_attention_jvp(**arrays, **tangents_of(moved))
    for threads in 1, 2, 5:
        set_threads(threads)
        for a, b in zip(attnmask.flash_attention_jvp(**arrays, **tangents_of(moved)), right, strict=True):
            np.testing.assert_array_equal(a, b)
    alone = [{name: x[1:2] for name, x in part.items()} for part in (arrays, moved)]
    for a, b in zip(attnmask.flash_attention_jvp(**alone[0], **tangents_of(alone[1])), right, strict=True):
        np.testing.assert_array_equal(a, b[1:2])


BAD = [
    ({"query_tangent": "short"}, "query_tangent must be of shape .* as query"),
    ({"key_tangent": "wide"}, "key_tangent must be float32 as key.*write key_tangent.astype"),
    ({"bias_tangent": "query"}, "bias_tangent must be None without bias"),
    ({"softmax_aux_tangent": "query"}, "softmax_aux_tangent must be None without softmax_aux"),
    ({"normalize_output": False}, "normalize_output must be True"),
]


@pytest.mark.parametrize(("given", "message"), BAD)
def test_bad_input_is_named(rng, given, message):
    arrays = drawn(rng, F32)
    made = {"short": arrays["query"][:, 1:], "wide": arrays["key"].astype(F64), "query": arrays["query"]}
    given = {name: made.get(x, x) if isinstance(x, str) else x for name, x in given.items()}
    with pytest.raises((TypeError, ValueError), match=message):
        attnmask.flash_attention_jvp(**arrays, **given)
    with pytest.raises(ValueError, match=r"bias_tangent must be of shape .* as bias"):
        attnmask.flash_attention_jvp(**arrays, bias=np.zeros((70, 65)), bias_tangent=np.zeros((65, 70)))
