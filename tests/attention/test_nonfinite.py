"""NaN and infinities reach the results and gradients that depend on them, and no others."""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from flash_cases import (
    BF16,
    F16,
    F32,
    F64,
    FLOATS,
    LIMITS,
    POISON,
    SIZES,
    Case,
    limits,
    live_of,
    lse_dtype,
    padding,
    poison_of,
    tensors,
)
from flash_expected import NAMES, assert_equal_bits, attend, dout_of, expected_gradients, gradients

import attnmask
from attnmask import MaskInfo

pytestmark = pytest.mark.levels("turns", "amx")

# Dead pairs


def assert_same_bits(got, clean, rows, case) -> None:
    """Compares the rows [B, H, Tq] of out and lse."""
    out, lse = got
    clean_out, clean_lse = clean
    assert out.swapaxes(1, 2)[rows].tobytes() == clean_out.swapaxes(1, 2)[rows].tobytes(), case
    assert lse[rows].tobytes() == clean_lse[rows].tobytes(), case


@pytest.mark.repeats
@pytest.mark.parametrize("kind", LIMITS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dead_pairs_have_no_influence(isa, dtype, kind):
    """NaN and Inf in keys, values and queries reach only the rows that have a live pair with them."""
    for queries, keys in SIZES:
        shape = (2, 4, queries, keys)
        depth = 40 if queries < 3 else 16  # if keys are unpacked: values of more than a panel
        arguments = tensors(queries, keys, depth=depth, dtype=dtype) | limits(kind, shape)
        live = live_of(arguments, shape)
        seen = live.reshape(2, 2, 2, queries, keys).any(axis=(2, 3))  # [B, Hkv, Tk]
        clean = attend(arguments)
        for poison in POISON:
            number = poison_of(dtype, poison)
            rng = np.random.default_rng(queries)
            case = (isa, dtype, kind, shape, poison)

            # Some keys of each KV head, and all keys that no query sees.
            bad = ~seen | (rng.random(seen.shape) < 3 / keys)
            for name, depth in (("key", 3), ("value", 5), ("key", slice(None)), ("value", slice(None))):
                poisoned = arguments[name].copy()
                poisoned[..., depth][bad.swapaxes(1, 2)] = number
                touched = (live & bad.repeat(2, axis=1)[:, :, None, :]).any(axis=3)
                got = attend(arguments | {name: poisoned})
                assert_same_bits(got, clean, ~touched, (*case, name))

            bad = rng.random((2, queries, 4)) < 0.2
            query = arguments["query"].copy()
            query[bad] = number
            got = attend(arguments | {"query": query})
            assert_same_bits(got, clean, ~bad.swapaxes(1, 2) | ~live.any(axis=3), (*case, "query"))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dead_keys_of_many_heads_have_no_influence(isa, dtype):
    """Contiguous heads use the same memory one after the other, and values of full tiles are not packed."""
    rng = np.random.default_rng(0)
    shapes = {"query": (4, 20, 16, 64), "key": (4, 200, 16, 64), "value": (4, 200, 16, 64)}
    arguments = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    live = rng.random((4, 16, 1, 200)) < 0.7
    live[..., 64:128] = True
    live[1, 2] = False
    clean = attend(arguments, attention_mask=live)
    for name in ("key", "value"):
        for poison in (math.nan, math.inf):
            poisoned = arguments[name].copy()
            poisoned[~live[:, :, 0].swapaxes(1, 2)] = poison
            out, lse = attend(arguments | {name: poisoned}, attention_mask=live)
            assert out.tobytes() == clean[0].tobytes(), (name, poison)
            assert lse.tobytes() == clean[1].tobytes(), (name, poison)


@pytest.mark.parametrize("poison", [math.nan, "huge"], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("flat", [False, True])
def test_packed_sequences_do_not_reach_each_other(isa, dtype, poison, flat):
    """Neither their results nor their gradients."""
    q_ends, k_ends = np.array([0, 7, 7, 40, 90, 101]), np.array([0, 20, 33, 33, 90, 140])
    case = Case(dtype, 101, 140, 16, 20, 1, (4, 2), packing="flat" if flat else "packed")
    arguments = case.arguments() | {"cum_seqlens_q": q_ends, "cum_seqlens_k": k_ends}
    ends = {"query": q_ends, "key": k_ends, "value": k_ends, "dout": q_ends}
    dout = dout_of(arguments)

    def results(given, dout):
        out, lse = attend(given)
        lse = lse.swapaxes(-1, -2)  # [T, H], as other arrays begin
        grads = gradients(given, dout)
        return {"out": out, "lse": lse, "query": grads.query, "key": grads.key, "value": grads.value}

    for more in ({}, {"causal": True, "causal_offset": "bottom-right"}, {"sliding_window": 4}):
        clean = results(arguments | more, dout)
        for index, name in itertools.product(range(5), ends):
            given = arguments | more | {"dout": dout}
            given[name] = given[name].copy()
            span = slice(ends[name][index], ends[name][index + 1])
            given[name][span if flat else (slice(None), span)] = poison_of(dtype, poison)
            for field, got in results(given, given.pop("dout")).items():
                one, other = (each if flat else each[0] for each in (got, clean[field]))
                own = k_ends if field in ("key", "value") else q_ends
                rest = np.ones(len(one), bool)
                rest[own[index] : own[index + 1]] = False
                assert one[rest].tobytes() == other[rest].tobytes(), (isa, dtype, more, index, name, field)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_poison_in_a_dead_bias(isa, dtype):
    """The bias of a pair that a mask forbids may be any number, even NaN and infinity."""
    arguments = tensors(40, 70, dtype=dtype)
    live = padding(np.random.default_rng(3), 2, 40, 70, 4)
    bias = np.random.default_rng(4).standard_normal((2, 4, 40, 70)).astype(dtype)
    clean = attend(arguments, attention_mask=live, bias=bias)
    slopes = gradients(arguments, attention_mask=live, bias=bias)
    for poison in POISON:
        poisoned = np.where(live, bias, np.array(poison_of(dtype, poison), dtype))
        for mask in (live, MaskInfo.from_attention_mask(live)):
            case, more = (isa, dtype, poison), {"attention_mask": mask, "bias": poisoned}
            assert_same_bits(attend(arguments, **more), clean, np.ones((2, 4, 40), bool), case)
            assert_equal_bits(gradients(arguments, **more), slopes, case)


# Live pairs


def seen_to_the_end(
    queries: int, keys: int, dtype: np.dtype, soft_cap: float | None, normalize: bool, sinks: bool
) -> dict:
    """Arguments whose last query sees all keys."""
    return tensors(queries, keys, dtype=dtype) | {
        "causal": True,
        "causal_offset": "bottom-right",
        "logits_soft_cap": soft_cap,
        "normalize_output": normalize,
        "softmax_aux": np.ones(1, dtype) if sinks else None,
    }


@pytest.mark.repeats
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_live_nan_comes_through(isa, dtype, soft_cap, sinks, normalize):
    """NaN in a key or a query makes the whole row NaN; NaN in a value only its column; +inf gives +inf."""
    for queries, keys in SIZES:
        shape = (2, 4, queries, keys)
        arguments = seen_to_the_end(queries, keys, dtype, soft_cap, normalize, sinks)
        clean = attend(arguments)
        for at in (0, keys // 2, keys - 1):
            touched = live_of(arguments, shape)[:, :2, :, at]
            touched[1] = False  # only batch row 0 and the first KV head, which two heads share
            for poison in (math.nan, math.inf):
                value = arguments["value"].copy()
                value[0, at, 0, 7] = poison
                out, lse = attend(arguments | {"value": value})
                column = np.zeros(out.shape, bool)
                column[:, :, :2, 7] = touched.swapaxes(1, 2)
                np.testing.assert_array_equal(out[column].astype(np.float64), poison)
                eps = max(4 * float(ml_dtypes.finfo(dtype).eps), 100 * float(np.finfo(lse.dtype).eps))
                rest, clean_rest = (x[~column].astype(np.float64) for x in (out, clean[0]))
                np.testing.assert_allclose(rest, clean_rest, rtol=eps, atol=eps)
                np.testing.assert_allclose(lse, clean[1], rtol=1e-5, atol=1e-5)
            key = arguments["key"].copy()
            key[0, at, 0, 7] = math.nan
            out, lse = attend(arguments | {"key": key})
            whole = np.zeros((2, 4, queries), bool)
            whole[:, :2] = touched
            assert np.isnan(out.swapaxes(1, 2)[whole].astype(F64)).all(), (isa, dtype, shape, at)
            assert np.isnan(lse[whole]).all(), (isa, dtype, shape, at)
            assert_same_bits((out, lse), clean, ~whole, (isa, dtype, shape, at))
        query = arguments["query"].copy()
        query[1, -1, 2, 0] = math.nan
        out, lse = attend(arguments | {"query": query})
        assert np.isnan(out[1, -1, 2].astype(F64)).all()
        assert np.isnan(lse[1, 2, -1])


@pytest.mark.parametrize("sinks", [[np.inf], [1.0, np.inf], [np.nan], [np.nan, 1.0]], ids=str)
@pytest.mark.parametrize("queries", [1, 9, 70])
def test_sinks_that_are_no_numbers(isa, queries, sinks):
    """A row without a live pair is zero with any sinks; an infinite sink takes all of the weight."""
    first_row_has_no_key = {"causal": True, "causal_offset": -1}
    out, lse = attend(tensors(queries, 80) | first_row_has_no_key, softmax_aux=sinks)
    assert (out[:, 0] == 0).all()
    if np.isnan(sinks).any():
        assert np.isnan(out[:, 1:]).all()
        assert np.isnan(lse).all()
    else:
        assert (out == 0).all()
        assert (lse == np.inf).all()


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=lambda dtype: np.dtype(dtype).name)
def test_numbers_that_the_arithmetic_does_not_have(isa, dtype):
    """Caps and sinks are rounded to finite numbers; scales that would become infinite are refused."""
    wide, narrow = (1.5e308, 1e-309) if dtype == F64 else (1e39, 1e-39)
    query, key = np.zeros((1, 5, 2, 8), dtype), np.ones((1, 7, 2, 8), dtype)
    value = np.arange(7).reshape(1, 7, 1, 1).repeat(2, 2).astype(dtype)
    mean = np.full((1, 5, 2, 1), 3.0)
    for cap in (wide, narrow, 5e-324, 1.7e308):
        got = attnmask.flash_attention(query, key, value, logits_soft_cap=cap)
        np.testing.assert_allclose(got.astype(F64), mean, rtol=1e-2)
    ones = attnmask.flash_attention(key, key, value, logits_soft_cap=wide)
    np.testing.assert_array_equal(ones, attnmask.flash_attention(key, key, value))
    with pytest.raises(ValueError, match=r"softmax_scale must be from -.*, got"):
        attnmask.flash_attention(query, key, value, softmax_scale=wide)
    if dtype == F64:
        return
    got, lse = attnmask.flash_attention_fwd(query, key, value, softmax_aux=[1e300])
    assert (got == 0).all()
    assert (lse == np.finfo(F32).max).all()
    got = attnmask.flash_attention(query, key, value, softmax_aux=[-1e300])
    np.testing.assert_allclose(got.astype(F64), mean, rtol=1e-2)


# --- Gradients ---


# Dead pairs


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("more", [{}, {"logits_soft_cap": 3.0}, {"normalize_output": False}], ids=str)
@pytest.mark.parametrize("sinks", [False, True])
def test_dead_rows_and_keys_get_zeros(isa, dtype, more, sinks):
    """The zeros are exact; the sinks of a dead row affect nothing but its lse."""
    for queries, keys in SIZES[:2]:
        live = np.ones((2, 4, queries, keys), bool)
        live[:, :, queries // 2] = live[..., keys // 3 : keys // 2] = live[0] = False
        arguments = tensors(queries, keys, dtype=dtype) | {"attention_mask": live} | more
        arguments["bias"] = np.ones((2, 4, queries, keys), dtype)
        if sinks:
            arguments["softmax_aux"] = np.array([[0.5, -1.0], [2.0, 3.0], [0, -np.inf], [-5, 1]], dtype)
        dout = dout_of(arguments)
        dlse = np.ones((2, 4, queries), lse_dtype(dtype))
        got = gradients(arguments, dout, dlse)
        expected_gradients(arguments, dout, dlse).check(got)
        for dead in (got.query[0], got.key[0], got.value[0], got.query[:, queries // 2], got.bias[~live]):
            assert (dead == 0).all()
        for gradient in (got.key, got.value):
            assert (gradient[:, keys // 3 : keys // 2] == 0).all()


def touched_by(live, rows):
    """The keys [B, Hkv, Tk] that have a live pair in one of the rows [B, H, Tq]; two heads share each key head."""
    keys = (live & rows[..., None]).any(axis=2)
    return keys.reshape(keys.shape[0], -1, 2, keys.shape[2]).any(axis=2)


def assert_same_outside(got, clean, live, rows, case) -> None:
    """Compares the gradients of all other rows, and of the keys that have no live pair with these rows."""
    keys = touched_by(live, rows)
    for name, gradient, other in zip(NAMES[:3], got, clean, strict=False):
        same = ~rows if name == "query" else ~keys
        one, other = (each.swapaxes(1, 2)[same] for each in (gradient, other))
        assert one.tobytes() == other.tobytes(), (*case, name)
    if got.bias is not None and got.bias.shape == live.shape:
        assert got.bias[~rows].tobytes() == clean.bias[~rows].tobytes(), (*case, "bias")


@pytest.mark.repeats
@pytest.mark.parametrize("kind", LIMITS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dead_pairs_have_no_influence_on_gradients(isa, dtype, kind):
    """NaN and Inf in keys, values, queries and dout reach only rows with a live pair to them, and the keys of these."""
    for place, (queries, keys) in enumerate(SIZES, LIMITS.index(kind)):
        poison = POISON[place % len(POISON)]
        shape = (2, 4, queries, keys)
        arguments = tensors(queries, keys, dtype=dtype) | limits(kind, shape)
        live, dout = live_of(arguments, shape), dout_of(arguments)
        clean = gradients(arguments, dout)
        number = poison_of(dtype, poison)
        rng = np.random.default_rng(queries)
        case = (isa, dtype, kind, shape, poison)

        seen = live.reshape(2, 2, 2, queries, keys).any(axis=(2, 3))  # [B, Hkv, Tk]
        for bad in (~seen, ~seen | (rng.random(seen.shape) < 2 / keys)):
            for name, channels in (("key", slice(None)), ("value", 5)):
                poisoned = arguments[name].copy()
                poisoned[..., channels][bad.swapaxes(1, 2)] = number
                touched = (live & bad.repeat(2, axis=1)[:, :, None, :]).any(axis=3)
                got = gradients(arguments | {name: poisoned}, dout)
                assert_same_outside(got, clean, live, touched, (*case, name))

        unseeing = ~live.any(axis=3)
        for bad in (unseeing, unseeing | (rng.random((2, 4, queries)) < 2 / queries)):
            for name, array in (("query", arguments["query"]), ("dout", dout)):
                poisoned = array.copy()
                poisoned[bad.swapaxes(1, 2)] = number
                given = (arguments | {"query": poisoned}, dout) if name == "query" else (arguments, poisoned)
                got = gradients(*given)
                assert_same_outside(got, clean, live, bad & ~unseeing, (*case, name))
                if not (bad & ~unseeing).any() and got.softmax_aux is not None:
                    assert got.softmax_aux.tobytes() == clean.softmax_aux.tobytes(), (*case, name)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_dead_pairs_have_no_influence_on_what_is_infinite(isa, dtype):
    """An infinite dS times the number that replaces NaN would be NaN."""
    arguments = tensors(50, 50, dtype=dtype) | {"causal": True, "bias": np.zeros((1, 1, 1, 50), dtype)}
    arguments["bias"][..., 5] = -60  # so small a weight keeps these values out of the results
    arguments["value"][:, 5] = 1e10
    dout = dout_of(arguments)
    dout[:, 20, ::2] = 1e30  # only in one of two heads that share keys: infinities could cancel
    live = np.tile(np.tri(50, dtype=bool), (2, 4, 1, 1))
    clean = gradients(arguments, dout)
    assert np.isinf(clean.query[:, 20, ::2].astype(F32)).all()
    assert np.isinf(clean.key[:, 5].astype(F32)).all()
    for name, token in itertools.product(("key", "query", "dout"), (2, 30, 49)):
        poisoned = (dout if name == "dout" else arguments[name]).copy()
        poisoned[:, token] = math.nan
        given = (arguments, poisoned) if name == "dout" else (arguments | {name: poisoned}, dout)
        row = np.broadcast_to(np.arange(50) == token, live.shape[:3])
        touched = live[..., token] if name == "key" else row
        assert_same_outside(gradients(*given), clean, live, touched, (isa, dtype, name, token))


@pytest.mark.parametrize("sinks", [None, [1.0]], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_poison_in_the_dlse_of_dead_rows(isa, dtype, sinks):
    """The lse of such rows is -inf, or depends on sinks only."""
    arguments = tensors(40, 30, dtype=dtype) | {"causal": True, "causal_offset": "bottom-right"}
    arguments["softmax_aux"] = None if sinks is None else np.array(sinks, dtype)
    dlse = np.ones((2, 4, 40), lse_dtype(dtype))
    clean = gradients(arguments, dlse=dlse)
    for poison in (math.nan, math.inf):
        dlse[..., :10] = poison
        got = gradients(arguments, dlse=dlse)
        assert_equal_bits(got._replace(softmax_aux=None), clean._replace(softmax_aux=None), poison)
        assert sinks is None or not np.isfinite(got.softmax_aux.astype(F64)).any()


# Live pairs


@pytest.mark.repeats
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("normalize", [False, True])
def test_live_nan_comes_through_to_gradients(isa, dtype, soft_cap, normalize):
    for queries, keys in SIZES:
        shape = (2, 4, queries, keys)
        arguments = seen_to_the_end(queries, keys, dtype, soft_cap, normalize, sinks=True)
        live, dout = live_of(arguments, shape), dout_of(arguments)
        clean = gradients(arguments, dout)
        for name, at in itertools.product(("key", "value", "query", "dout"), (0, -1)):
            given = arguments | {"dout": dout}
            given[name] = given[name].copy()
            given[name][0, at, 0, 7] = math.nan
            rows = np.zeros(shape[:3], bool)
            if name in ("key", "value"):
                rows[0, :2] = live[0, :2, :, at]  # two heads share the key head
            else:
                rows[0, 0, at] = live[0, 0, at].any()
            got = gradients(given, given.pop("dout"))
            case = (isa, dtype, shape, name, at)
            assert_same_outside(got, clean, live, rows, case)
            if not rows.any():
                continue
            assert np.isnan(got.query.swapaxes(1, 2)[rows].astype(F64)).all(), case
            if normalize or name in ("key", "query"):  # unnormalized, the sinks are not the maximum
                assert np.isnan(got.softmax_aux.astype(F64)).all(), case
            reached = touched_by(live, rows)
            if normalize:
                assert np.isnan(got.key.swapaxes(1, 2)[reached].astype(F64)).all(), case
            if name == "value":
                assert_same_outside(
                    got._replace(key=clean.key, query=clean.query), clean, live, np.zeros_like(rows), case
                )
            elif name == "dout":  # only in its channel
                column = got.value.swapaxes(1, 2)[reached].astype(F64)
                assert np.isnan(column[:, 7]).all(), case
                assert np.isfinite(np.delete(column, 7, axis=1)).all(), case
            else:
                assert np.isnan(got.value.swapaxes(1, 2)[reached].astype(F64)).all(), case
