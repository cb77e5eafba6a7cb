"""NaN and infinities only reach the gradients that depend on them; gradients without a live pair are zero."""

import itertools
import math

import numpy as np
import pytest
from flash_backward_expected import NAMES, assert_equal_bits, dout_of, expected, gradients
from flash_cases import (
    BF16,
    F32,
    F64,
    FLOATS,
    LIMITS,
    POISON,
    SIZES,
    limits,
    live_of,
    lse_dtype,
    poison_of,
    tensors,
)

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
        expected(arguments, dout, dlse).check(got)
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
def test_dead_pairs_have_no_influence(isa, dtype, kind):
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
def test_live_nan_comes_through(isa, dtype, soft_cap, normalize):
    for queries, keys in SIZES:
        shape = (2, 4, queries, keys)
        arguments = tensors(queries, keys, dtype=dtype) | {
            "causal": True,
            "causal_offset": "bottom-right",
            "logits_soft_cap": soft_cap,
            "normalize_output": normalize,
            "softmax_aux": np.ones(1, dtype),
        }
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
