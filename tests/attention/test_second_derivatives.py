"""Second derivatives of attention: beside the dense formula in float64, and what they have in common with first ones.

Random masks, with NaN where no pair needs a number, are in test_random_masks.py.
"""

import itertools

import numpy as np
import pytest
import reference_flash as ref
from derivative_cases import INPUTS, LENGTHS, TERMS, TOLERANCE, drawn, near, tangents_of, terms
from flash_cases import BF16, F16, F32, F64

import attnmask

FIELDS = ("dout", *INPUTS)


@pytest.fixture
def rng():
    return np.random.default_rng(6)


def cotangents_of(arrays):
    return {f"{name}_cotangent": x for name, x in arrays.items()}


def computed(arrays, moved, dout, given, **more):
    out, lse = attnmask.flash_attention_fwd(**arrays, **given)
    return attnmask.flash_attention_bwd_vjp(
        dout, **arrays, out=out, lse=lse, **cotangents_of(moved), **given, **more
    )


def drawn_rows(rng, arrays, dtype):
    """Gradients of the results."""
    *batch, queries, heads, _ = arrays["query"].shape
    dout = rng.standard_normal((*batch, queries, heads, arrays["value"].shape[-1])).astype(dtype)
    return dout, rng.standard_normal((*batch, heads, queries)).astype(F64 if dtype == F64 else F32)


def compare(rng, arrays, moved, dtype, given, right):
    dout, dlse = drawn_rows(rng, arrays, dtype)
    got = computed(arrays, moved, dout, given, dlse=dlse)
    exact = ref.flash_attention_bwd_vjp(dout, moved, dlse, **arrays, **right)
    for name, mine, other in zip(FIELDS, got, exact, strict=True):
        assert mine.dtype == dtype
        assert mine is getattr(got, name)
        near(mine, other, dtype)


@pytest.mark.parametrize("dtype", [F64, F32, F16, BF16])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths(isa, rng, dtype, lengths):
    for heads, depths in ((4, 2), (24, 17)), ((3, 1), (64, 64)), ((1, 1), (1, 130)):
        arrays, moved = (drawn(rng, dtype, *lengths, heads, depths) for _ in range(2))
        compare(rng, arrays, moved, dtype, {}, {})


@pytest.mark.parametrize("names", [*itertools.combinations(TERMS, 2), ()], ids="-".join)
def test_terms_by_pairs(isa, rng, names):
    for dtype in F64, F32:
        arrays, moved = (drawn(rng, dtype) for _ in range(2))
        compare(rng, arrays, moved, dtype, *terms(rng, names, dtype, 2, 4, 70, 65))


@pytest.mark.parametrize("names", [x for n in range(4) for x in itertools.combinations(INPUTS, n)])
def test_a_cotangent_that_is_not_given_is_zero(isa, rng, names):
    arrays, moved = (drawn(rng, F32) for _ in range(2))
    some = {name: moved[name] for name in names}
    rest = {name: np.zeros_like(moved[name]) for name in INPUTS if name not in names}
    compare(rng, arrays, some, F32, {"logits_soft_cap": 2.0}, {"logits_soft_cap": 2.0})
    dout, _ = drawn_rows(rng, arrays, F32)
    mine, other = (computed(arrays, x, dout, {}) for x in (some, some | rest))
    for a, b in zip(mine, other, strict=True):
        near(a, b.astype(F64), F32)
        assert names or not a.any()


ALL = ("causal", "cap", "bias", "sinks", "dropout")


@pytest.mark.parametrize("dtype", [F64, F32])
def test_it_is_symmetric(isa, rng, dtype):
    """<H x, y> = <x, H y>, and dout has the tangent of out."""
    arrays, x, y = (drawn(rng, dtype, 130, 130) for _ in range(3))
    given, _ = terms(rng, ALL, dtype, 2, 4, 130, 130)
    dout, dlse = drawn_rows(rng, arrays, dtype)
    of_x, of_y = (computed(arrays, z, dout, given, dlse=dlse) for z in (x, y))
    left, right = (
        sum((getattr(a, name).astype(F64) * b[name]).sum() for name in INPUTS)
        for a, b in ((of_x, y), (of_y, x))
    )
    assert abs(left - right) <= TOLERANCE[dtype] * max(1, abs(left)) * 10
    _, tangent = attnmask.flash_attention_jvp(**arrays, **tangents_of(x), **given)
    np.testing.assert_array_equal(of_x.dout, tangent)


def test_it_is_how_gradients_change(isa, rng):
    arrays, moved = (drawn(rng, F64, 9, 70) for _ in range(2))
    given, _ = terms(rng, ALL, F64, 2, 4, 9, 70)
    dout, dlse = drawn_rows(rng, arrays, F64)

    def gradients(step):
        there = {name: x + step * moved[name] for name, x in arrays.items()}
        return attnmask.flash_attention_vjp(**there, **given)[1](dout, dlse)[:3]

    second = computed(arrays, moved, dout, given, dlse=dlse)
    for ahead, behind, mine in zip(gradients(1e-5), gradients(-1e-5), second[1:], strict=True):
        np.testing.assert_allclose((ahead - behind) / 2e-5, mine, atol=1e-8 * max(1, abs(mine).max()))


def test_packed_sequences_and_strides(isa, rng):
    starts_q, starts_k = np.array([0, 70, 70, 100]), np.array([0, 3, 80, 145])
    arrays, moved = (drawn(rng, F32, 100, 145, batch=1) for _ in range(2))
    limits = {"cum_seqlens_q": starts_q, "cum_seqlens_k": starts_k}
    compare(rng, arrays, moved, F32, limits, limits)
    flat, flat_moved = ({name: x[0] for name, x in part.items()} for part in (arrays, moved))
    compare(rng, flat, flat_moved, F32, limits, limits)
    dout, _ = drawn_rows(rng, arrays, F32)
    apart = [
        {name: np.repeat(x, 2, axis=3)[..., ::2] for name, x in part.items()} for part in (arrays, moved)
    ]
    for a, b in zip(
        computed(arrays, moved, dout, limits),
        computed(*apart, np.repeat(dout, 2, 3)[..., ::2], limits),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_large_logits(isa, rng):
    """From where on the rounding of lse would cost digits."""
    arrays, moved = (drawn(rng, F64) for _ in range(2))
    compare(rng, arrays, moved, F64, {"bias": np.full(65, 1e6)}, {})


@pytest.mark.parametrize("axes", [(2, 3), ()])
def test_several_batch_axes(isa, rng, axes):
    arrays, moved = (drawn(rng, F64, 9, 9, batch=6 if axes else 1) for _ in range(2))
    dout, dlse = drawn_rows(rng, arrays, F64)
    right = computed(arrays, moved, dout, {}, dlse=dlse)
    folded = [{name: x.reshape(*axes, *x.shape[1:]) for name, x in part.items()} for part in (arrays, moved)]
    if axes:
        dout, dlse = (x.reshape(*axes, *x.shape[1:]) for x in (dout, dlse))
        for a, b in zip(computed(*folded, dout, {}, dlse=dlse), right, strict=True):
            np.testing.assert_array_equal(a, b.reshape(*axes, *b.shape[1:]))


def test_neither_threads_nor_the_rest_of_the_batch_change_a_bit(isa, rng, set_threads):
    arrays, moved = (drawn(rng, F32, 700, 500, batch=3) for _ in range(2))
    dout, _ = drawn_rows(rng, arrays, F32)
    right = computed(arrays, moved, dout, {})
    for threads in 1, 2, 5:
        set_threads(threads)
        for a, b in zip(computed(arrays, moved, dout, {}), right, strict=True):
            np.testing.assert_array_equal(a, b)
    alone = [{name: x[1:2] for name, x in part.items()} for part in (arrays, moved)]
    for a, b in zip(computed(*alone, dout[1:2], {}), right, strict=True):
        np.testing.assert_array_equal(a, b[1:2])


BAD = [
    ({"query_cotangent": "short"}, "query_cotangent must be of shape .* as query"),
    ({"key_cotangent": "wide"}, "key_cotangent must be float32 as key.*write key_cotangent.astype"),
    ({"dout": "short"}, "dout must be of shape"),
    ({"lse": "wide"}, "lse must be float32"),
    ({"normalize_output": False}, "normalize_output must be True"),
    ({"bias_cotangent": 1}, "flash_attention_bwd_vjp.*bias_cotangent"),
]


@pytest.mark.parametrize(("given", "message"), BAD)
def test_bad_input_is_named(rng, given, message):
    arrays = drawn(rng, F32)
    made = {"short": arrays["query"][:, 1:], "wide": arrays["key"].astype(F64)}
    out, lse = attnmask.flash_attention_fwd(**arrays)
    whole = arrays | {"out": out, "lse": lse, "dout": out}
    whole |= {name: made.get(x, x) if isinstance(x, str) else x for name, x in given.items()}
    with pytest.raises((TypeError, ValueError), match=message):
        attnmask.flash_attention_bwd_vjp(**whole)
