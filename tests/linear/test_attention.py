"""Linear attention against its definition, a recurrence in float64."""

import itertools
import zlib

import ml_dtypes
import numpy as np
import pytest
from reference_linear import Linear

import attnmask

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
OUT = {"float32": 2e-5, "float64": 1e-11, "float16": 4e-3, "bfloat16": 2e-2}
GRADIENT = {"float32": 1e-4, "float64": 1e-10, "float16": 1e-2, "bfloat16": 5e-2}
DECAYS = (None, "H", "BTH", "BTHK")
NAMES = ("query", "key", "value", "decay", "beta", "initial_state")


def random_of(case) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(case).encode()))


def make(
    case,
    tokens=70,
    batch=1,
    heads=2,
    key_heads=1,
    rows=24,
    channels=17,
    dtype="float32",
    decay="BTH",
    beta=True,
    low=-3.0,
    same=None,
    initial=True,
    cu_seqlens=None,
    **more,
):
    """Arguments of a call; keys have a norm of about 1, as those of models have where there is beta."""
    random = random_of(case)
    dtype = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    wide = np.float64 if dtype == np.float64 else np.float32
    query = random.standard_normal((batch, tokens, key_heads, rows)).astype(dtype)
    key = (random.standard_normal((batch, tokens, key_heads, rows)) / np.sqrt(rows)).astype(dtype)
    value = random.standard_normal((batch, tokens, heads, channels)).astype(dtype)
    shape = {None: None, "H": (heads,), "BTH": (batch, tokens, heads), "BTHK": (batch, tokens, heads, rows)}[
        decay
    ]
    given = dict(more)
    if shape is not None:
        # Many decays near 0, some of them far below.
        given["decay"] = (low * random.random(shape) ** 3 if same is None else np.full(shape, same)).astype(
            wide
        )
    if beta:
        given["beta"] = random.random((batch, tokens, heads)).astype(wide)
    if cu_seqlens is not None:
        given["cu_seqlens"] = np.array(cu_seqlens)
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    if initial:
        given["initial_state"] = random.standard_normal((sequences, heads, rows, channels)).astype(wide)
    return (query, key, value), given


def reference(arrays, given):
    given = {name: value for name, value in given.items() if name != "chunk_size"}
    return Linear(*arrays, **given)


def assert_near(got, expected, tolerance, what, size=None):
    got, expected = np.asarray(got).astype(np.float64), np.asarray(expected)
    assert got.shape == expected.shape, (what, got.shape, expected.shape)
    if expected.size == 0:
        return
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(expected), err_msg=str(what))
    finite = np.isfinite(expected)
    size = max(np.abs(expected[finite]).max(initial=0), size or 0)
    error = np.abs(np.where(finite, got - expected, 0)).max()
    assert error <= tolerance * size, (what, error / size if size else error)


def check(arrays, given):
    dtype = arrays[0].dtype.name
    expected, expected_state = reference(arrays, given).forward()
    out, state = attnmask.linear_attention(*arrays, **given, return_state=True)
    assert out.dtype == arrays[0].dtype
    assert state.dtype == (np.float64 if dtype == "float64" else np.float32)
    assert_near(out, expected, OUT[dtype], "out")
    assert_near(state, expected_state, OUT[dtype], "state", np.abs(expected).max(initial=0))


def assert_gradients_near(grads, expected, arrays, given, tolerance):
    of_arguments = dict(zip(NAMES, arrays, strict=False)) | given
    for name in NAMES:
        got = getattr(grads, name)
        assert (got is None) == (expected[name] is None), name
        if got is not None:
            assert got.dtype == of_arguments[name].dtype, name
            size = 0.1 * expected["decay_size"] if name == "decay" else None
            assert_near(got, expected[name], tolerance, name, size)


def check_gradients(arrays, given, with_state=True, tolerance=None):
    dtype = arrays[0].dtype.name
    random = random_of("gradients")
    problem = reference(arrays, given)
    (out, state), vjp = attnmask.linear_attention_vjp(*arrays, **given, return_state=True)
    again, again_state = attnmask.linear_attention(*arrays, **given, return_state=True)
    assert out.tobytes() == again.tobytes()
    assert state.tobytes() == again_state.tobytes()
    dout = random.standard_normal(out.shape).astype(out.dtype)
    dstate = random.standard_normal(state.shape).astype(state.dtype) if with_state else None
    expected = problem.backward(dout, dstate)
    assert_gradients_near(vjp(dout, dstate), expected, arrays, given, tolerance or GRADIENT[dtype])


BY_TOKEN, GATED, KINDS = ("BTH", "BTHK"), ("float32", "float64"), ("float32", "bfloat16")
SHORT = (0, 1, 4, 5, 15, 16, 17, 31, 63, 64, 65, 129)
SIZES = ((1, 1), (16, 64), (33, 5), (128, 128), (130, 70), (0, 3), (3, 0))
SMALL = {"rows": 16, "channels": 16}


def product(**levels) -> list[dict]:
    """Arguments of `make`, each level of one beside each of the others."""
    rows = itertools.product(*levels.values())
    return [dict(zip(levels, row, strict=True)) for row in rows]


CASES = [
    *product(decay=DECAYS, beta=(False, True), normalize_qk=(False, True), dtype=OUT),
    *({"batch": 2} | case for case in product(tokens=SHORT, decay=DECAYS, beta=(False, True))),
    *(
        # Errors are compared with the largest number, and a gradient that is one number may be near 0.
        {"rows": size[0], "channels": size[1], "batch": 8 if size == (1, 1) else 1} | case
        for size in SIZES
        for case in product(decay=BY_TOKEN, heads=(1, 3), dtype=KINDS)
    ),
    *(
        {"tokens": 300} | case
        for case in product(chunk_size=(16, 32, 64, 128, 256), decay=BY_TOKEN, dtype=KINDS)
    ),
    *({"heads": 6, "key_heads": 2, "batch": 2} | case for case in product(decay=DECAYS)),
    # Decays of all sizes, and growth
    *(
        {"tokens": 260} | SMALL | case
        for case in product(low=(-30.0, -1e-4, -1.0), decay=BY_TOKEN, dtype=GATED, initial=(False, True))
    ),
    *({"tokens": 150} | SMALL | case for case in product(decay=BY_TOKEN, same=(-30.0, -5.0, -1.0))),
    *({"tokens": 100, "low": 0.05, "beta": False} | SMALL | case for case in product(decay=BY_TOKEN)),
]


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_by_the_recurrence(isa, case):
    arrays, given = make(str(case), **case)
    check(arrays, given)
    check_gradients(arrays, given)


@pytest.mark.parametrize("case", CASES[::3], ids=range(0, len(CASES), 3))
def test_plain_by_the_recurrence(plain, case):
    arrays, given = make(str(case), **case)
    check(arrays, given)
    check_gradients(arrays, given)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("beta", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
def test_bfloat16_loses_little(isa, decay, beta, normalize):
    """Products of bfloat16 lose no more than a few roundings of results, whatever the scale."""
    case = {"tokens": 300, "rows": 64, "channels": 64, "dtype": "bfloat16", "low": -0.2, "scale": 0.3}
    arrays, given = make((decay, beta), decay=decay, beta=beta, normalize_qk=normalize, **case)
    expected, expected_state = reference(arrays, given).forward()
    out, state = attnmask.linear_attention(*arrays, **given, return_state=True)
    assert_near(out, expected, 6e-3, "out")
    assert_near(state, expected_state, 6e-3, "state")
    check_gradients(arrays, given, tolerance=6e-3)


@pytest.mark.parametrize("rows", [16, 24, 32])
@pytest.mark.parametrize("decay", ["BTH", "BTHK"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_among_others(rows, decay, dtype):
    """Rows that lie one behind the other are read in place, and nothing that lies between rows."""
    sizes = {"heads": 1, "tokens": 150, "rows": rows, "channels": 16}
    arrays, given = make("among", decay=decay, dtype=dtype, normalize_qk=True, **sizes)

    def among(x, step, shift=0):
        memory = np.full(x[..., 0].size * step * x.itemsize + shift, 255, np.uint8)  # NaN
        wide = memory[shift:].view(x.dtype).reshape(*x.shape[:-1], step)
        wide[..., : x.shape[-1]] = x
        return wide[..., : x.shape[-1]]

    expected = attnmask.linear_attention(*arrays, **given)
    for step, shift in ((32, 0), (40, 0), (rows, 2)):  # behind each other if padded; apart; at odd places
        given["decay"] = among(given["decay"], step) if decay == "BTHK" else given["decay"]
        places = [among(x, max(step, x.shape[-1]), shift) for x in arrays]
        assert attnmask.linear_attention(*places, **given).tobytes() == expected.tobytes()


@pytest.mark.parametrize("decay", DECAYS)
def test_packed(decay):
    starts = [0, 0, 3, 70, 70, 71, 200, 200]
    arrays, given = make("packed", tokens=200, decay=decay, cu_seqlens=starts)
    check(arrays, given)
    check_gradients(arrays, given)
    out, state = attnmask.linear_attention(*arrays, **given, return_state=True)
    for s, (begin, end) in enumerate(itertools.pairwise(starts)):
        own = {
            name: x[s : s + 1] if name == "initial_state" else x[:, begin:end] if x.ndim > 1 else x
            for name, x in given.items()
            if name != "cu_seqlens"
        }
        alone = [x[:, begin:end] for x in arrays]
        own_out, own_state = attnmask.linear_attention(*alone, **own, return_state=True)
        assert own_out.tobytes() == out[:, begin:end].tobytes()
        assert own_state.tobytes() == state[s : s + 1].tobytes()


@pytest.mark.parametrize("decay", DECAYS)
def test_batch_invariance_and_threads(decay, set_threads):
    arrays, given = make(
        "batch", batch=3, heads=4, key_heads=2, tokens=150, decay=decay, rows=64, channels=64
    )
    results = []
    for threads in (1, 2, 3):
        set_threads(threads)
        (out, state), vjp = attnmask.linear_attention_vjp(*arrays, **given, return_state=True)
        results.append([out, state, *vjp(np.ones_like(out), np.ones_like(state))])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert a is b or a.tobytes() == b.tobytes()
    alone = {name: x[1:2] if x.ndim > 1 else x for name, x in given.items()}
    (out, state), vjp = attnmask.linear_attention_vjp(*(x[1:2] for x in arrays), **alone, return_state=True)
    grads = vjp(np.ones_like(out), np.ones_like(state))
    for name, a, b in zip(("out", "state", *NAMES), [out, state, *grads], results[0], strict=True):
        if a is not None and not (name == "decay" and decay == "H"):
            assert a.tobytes() == b[1:2].tobytes(), name


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("beta", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
def test_few_heads_and_many_threads(decay, beta, bad, set_threads):
    """Channels are cut into slices, and gradients of states are found before those of chunks."""
    for heads, channels, starts in ((1, 70, None), (1, 128, [0, 0, 200]), (2, 64, None), (2, 16, None)):
        arrays, given = make(
            channels, tokens=200, heads=heads, channels=channels, decay=decay, beta=beta, cu_seqlens=starts
        )
        if bad:  # of one channel, in one of the slices
            arrays[2][:, 80, 0, 3] = np.nan
        results = []
        for threads in (1, 2, 3, 4, 16):
            set_threads(threads)
            (out, state), vjp = attnmask.linear_attention_vjp(*arrays, **given, return_state=True)
            dout = random_of("dout").standard_normal(out.shape).astype(np.float32)
            plain = attnmask.linear_attention(*arrays, **given)
            results.append([plain, out, state, *vjp(dout, state)])
        for other in results[1:]:
            for a, b in zip(results[0], other, strict=True):
                assert a is b or a.tobytes() == b.tobytes()


@pytest.mark.parametrize("decay", ["BTH", "BTHK"])
@pytest.mark.parametrize("beta", [False, True])
def test_minus_infinity_forgets(decay, beta):
    arrays, given = make(("forget", beta), tokens=140, decay=decay, beta=beta)
    for t in (0, 5, 64, 65, 100):
        given["decay"][:, t] = -np.inf
    check(arrays, given)
    check_gradients(arrays, given)
    _, vjp = attnmask.linear_attention_vjp(*arrays, **given)
    grads = vjp(np.ones(arrays[2].shape, np.float32))
    assert (grads.decay[:, [0, 5, 64, 65, 100]] == 0).all()
    # NaN and Inf before it are forgotten, too, and gradients do not pass it.
    for bad in (np.nan, np.inf):
        arrays[2][:, 90], arrays[1][:, 95] = bad, bad
        with np.errstate(all="ignore"):
            expected, expected_state = reference(arrays, given).forward()
        out, state = attnmask.linear_attention(*arrays, **given, return_state=True)
        assert np.isfinite(out[:, 100:]).all()
        assert np.isfinite(out[:, :90]).all()
        assert_near(out[:, 100:], expected[:, 100:], 2e-5, "out")
        assert_near(out[:, :90], expected[:, :90], 2e-5, "out")
        assert_near(state, expected_state, 2e-5, "state")
        grads = attnmask.linear_attention_vjp(*arrays, **given)[1](np.ones_like(out))
        for name in ("query", "key", "value", "decay", "beta"):
            got = getattr(grads, name)
            if got is not None:
                assert np.isfinite(got[:, :65]).all(), name
                assert np.isfinite(got[:, 100:]).all(), name


def test_minus_infinity_by_channel_forgets_a_row():
    arrays, given = make("row", tokens=40, decay="BTHK", beta=False, heads=1, rows=4, channels=3)
    given["initial_state"][0, 0, 2] = np.nan
    given["decay"][0, 20, 0, 2] = -np.inf
    out, state = attnmask.linear_attention(*arrays, **given, return_state=True)
    assert np.isnan(out[0, :20]).all()
    assert np.isfinite(out[0, 20:]).all()
    assert np.isfinite(state).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nan_reaches_what_follows_in_its_sequence(dtype):
    arrays, given = make("nan", tokens=150, cu_seqlens=[0, 100, 150], decay="BTH", dtype=dtype)
    clean, clean_state = attnmask.linear_attention(*arrays, **given, return_state=True)
    for i in range(3):
        bad = [x.copy() for x in arrays]
        bad[i][0, 40] = np.nan
        out, state = attnmask.linear_attention(*bad, **given, return_state=True)
        assert_near(out[:, :40], clean[:, :40].astype(np.float64), OUT[dtype], i)
        assert np.isnan(out[:, 40]).all()
        assert out[:, 100:].tobytes() == clean[:, 100:].tobytes()
        assert state[1].tobytes() == clean_state[1].tobytes()
        if i == 0:
            assert_near(out[:, 41:], clean[:, 41:].astype(np.float64), OUT[dtype], i)
        else:
            assert np.isnan(out[:, 41:100]).all()


def test_long_sequence():
    arrays, given = make("long", tokens=4096, heads=1, rows=32, channels=32, low=-0.2, initial=False)
    check(arrays, given)
    check_gradients(arrays, given, with_state=False)


@pytest.mark.parametrize("beta", [False, True])
@pytest.mark.parametrize("decay", DECAYS[1:])
@pytest.mark.parametrize("limits", [(-1e-5,), (-1e-4,), (-1e-3,), (-1e-2,), (-1e-4, -10.0), (1e-5,), (1e-3,)])
def test_equal_decays_of_many_tokens(each_isa, limits, decay, beta):
    """Where a factor is that of all tokens, its rounding is, too, and must not add up from token to token."""
    heads, rows = 3, 16
    random = random_of((limits, decay))
    sizes = random.uniform(*np.log(np.abs([limits[0], limits[-1]])), (heads, rows))
    same = np.sign(limits[0]) * np.exp(sizes if decay == "BTHK" else sizes[:, 0])
    case = {"tokens": 4096, "heads": heads, "rows": rows, "channels": 16, "initial": False}
    arrays, given = make("equal", decay=decay, beta=beta, same=same, **case)
    problem = reference(arrays, given)
    expected, expected_state = problem.forward()
    dout = random.standard_normal(expected.shape).astype(np.float32)
    gradients = problem.backward(dout)
    for isa in each_isa():
        (out, state), vjp = attnmask.linear_attention_vjp(*arrays, **given, return_state=True)
        assert_near(out, expected, 1.2e-5, (isa, "out"))
        assert_near(state, expected_state, 1.2e-5, (isa, "state"), np.abs(expected).max())
        assert_gradients_near(vjp(dout), gradients, arrays, given, GRADIENT["float32"])


def test_gradients_of_the_reference():
    """The reverse recurrence against differences."""
    arrays, given = make("differences", tokens=5, rows=3, channels=2, dtype="float64", decay="BTHK")
    random = random_of("d")
    problem = reference(arrays, given)
    out, state = problem.forward()
    dout, dstate = random.standard_normal(out.shape), random.standard_normal(state.shape)
    grads = problem.backward(dout, dstate)
    everything = dict(zip(NAMES, arrays, strict=False)) | given
    for name, x in everything.items():
        for index in list(np.ndindex(x.shape))[:12]:
            sums = []
            for h in (1e-6, -1e-6):
                moved = x.copy()
                moved[index] += h
                changed = everything | {name: moved}
                positional = [changed.pop(n) for n in NAMES[:3]]
                a, b = Linear(*positional, **changed).forward()
                sums.append((a * dout).sum() + (b * dstate).sum())
            assert abs((sums[0] - sums[1]) / 2e-6 - grads[name][index]) < 1e-7, (name, index)


# --- One token ---


@pytest.mark.parametrize("dtype", OUT)
@pytest.mark.parametrize("decay", DECAYS)
def test_step(isa, decay, dtype):
    for beta, channels in itertools.product((False, True), (16, 19)):
        arrays, given = make(
            ("step", decay), tokens=6, batch=3, decay=decay, beta=beta, dtype=dtype, channels=channels
        )
        expected, expected_state = reference(arrays, given).forward()
        state = given.pop("initial_state").copy()
        for t in range(6):
            now = {name: x if x.ndim == 1 else x[:, t] for name, x in given.items()}
            out = attnmask.linear_attention_step(*(x[:, t] for x in arrays), state, **now)
            assert_near(out, expected[:, t], OUT[dtype], "out", np.abs(expected).max())
        assert_near(state, expected_state, OUT[dtype], "state")


def test_step_slots():
    arrays, given = make("slots", tokens=1, batch=3, heads=2, channels=32)
    given.pop("initial_state")
    query, key, value = (x[:, 0] for x in arrays)
    now = {name: x[:, 0] for name, x in given.items()}
    states = random_of("s").standard_normal((5, 2, 24, 32)).astype(np.float32)
    before = states.copy()
    out = attnmask.linear_attention_step(query, key, value, states, **now, state_indices=[4, -1, 0])
    assert (out[1] == 0).all()
    np.testing.assert_array_equal(states[1:4], before[1:4])
    for row, slot in ((0, 4), (2, 0)):
        alone = before[slot : slot + 1].copy()
        own = {name: x[row : row + 1] for name, x in now.items()}
        single = attnmask.linear_attention_step(
            *(x[row : row + 1] for x in (query, key, value)), alone, **own
        )
        assert single.tobytes() == out[row : row + 1].tobytes()
        assert alone.tobytes() == states[slot : slot + 1].tobytes()
    with pytest.raises(ValueError, match="state_indices must name each slot once, got 3 again at index 2"):
        attnmask.linear_attention_step(query, key, value, states, **now, state_indices=[3, 1, 3])
    with pytest.raises(IndexError, match="state_indices must be from -1 to 4, got 5 at index 1"):
        attnmask.linear_attention_step(query, key, value, states, **now, state_indices=[3, 5, 2])
    with pytest.raises(ValueError, match="state must have 3 slots"):
        attnmask.linear_attention_step(query, key, value, states, **now)


# --- Bad input ---

BAD = [
    ({"key": np.zeros((1, 5, 1, 4), np.float32)}, TypeError, "key must be"),
    ({"query": np.zeros((1, 5, 3, 4)), "key": np.zeros((1, 5, 3, 4))}, ValueError, "value must have a multiple"),
    ({"decay": np.zeros(2, np.int64)}, TypeError,
     r"decay must be .*got int64 array of shape \(2,\); write decay.astype\(query.dtype\)"),
    ({"scale": float("nan")}, ValueError, "scale must be"),
    ({"cu_seqlens": [0, 4]}, ValueError, "cu_seqlens must end at"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input(change, error, message):
    given = {
        "query": np.zeros((1, 5, 1, 4)),
        "key": np.zeros((1, 5, 1, 4)),
        "value": np.zeros((1, 5, 2, 3)),
        "out": np.ones((1, 5, 2, 3)),
    } | change
    positional = [given.pop(name) for name in NAMES[:3]]
    with pytest.raises(error, match=message):
        attnmask.linear_attention(*positional, **given)
    assert (given["out"] == 0).all() or (given["out"] == 1).all()
    with pytest.raises(error, match=message):
        attnmask.linear_attention_vjp(*positional, **given)


def test_a_state_that_is_read_only():
    arrays, given = make("alias", heads=1, rows=4, channels=4)
    frozen = given.pop("initial_state")
    frozen.setflags(write=False)
    now = {name: x[:, 0] for name, x in given.items()}
    with pytest.raises(ValueError, match="state must be writeable"):
        attnmask.linear_attention_step(*(x[:, 0] for x in arrays), frozen, **now)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("narrow", [np.dtype(np.float16), BFLOAT16], ids=str)
def test_states_of_16_bits(narrow, dtype):
    """They are taken in the type of sums, with gradients in their own."""
    arrays, given = make("narrow", tokens=9, dtype=dtype)
    state = given["initial_state"].astype(narrow)
    given |= {"return_state": True}
    wide = {**given, "initial_state": state.astype(given["initial_state"].dtype)}
    given["initial_state"] = state
    results = attnmask.linear_attention(*arrays, **given)
    (expected, vjp), (got, own_vjp) = (attnmask.linear_attention_vjp(*arrays, **x) for x in (wide, given))
    for one, other, last in zip(results, got, expected, strict=True):
        np.testing.assert_array_equal(one, last, strict=True)
        np.testing.assert_array_equal(other, last, strict=True)
    for dstate in ((), (expected[1],)):
        right, found = vjp(expected[0], *dstate), own_vjp(expected[0], *dstate)
        right = right._replace(initial_state=right.initial_state.astype(narrow))
        for one, other in zip(found, right, strict=True):
            np.testing.assert_array_equal(one, other, strict=True)
    for wrong in (state[:, :1], state[0], state.astype(np.int16), state.astype(bool)):
        with pytest.raises((TypeError, ValueError), match="initial_state must be"):
            attnmask.linear_attention(*arrays, **given | {"initial_state": wrong})


def test_a_gradient_of_no_state():
    arrays, given = make("bad", tokens=5)
    out, vjp = attnmask.linear_attention_vjp(*arrays, **given)
    with pytest.raises(ValueError, match="dstate must be None"):
        vjp(out, given["initial_state"])


EMPTY = list(itertools.product(("batch", "tokens", "heads", "rows", "channels"), DECAYS, (False, True)))


def check_nothing(axis, decay, initial):
    """An axis of length 0: what the result does not depend on has gradients of 0."""
    arrays, given = make("empty", **{"key_heads": 2, "decay": decay, "initial": initial} | {axis: 0})
    out, vjp = attnmask.linear_attention_vjp(*arrays, **given)
    spoiled = [np.full(n, np.nan, np.float32) for n in (1, 2, 4, 8) for _ in range(8)]
    del spoiled  # so that gradients get such memory
    for name, gradient in vjp(out)._asdict().items():
        assert gradient is None or not gradient.any(), name


@pytest.mark.parametrize("case", EMPTY, ids=str)
def test_gradients_of_nothing_are_zero(isa, case):
    check_nothing(*case)


@pytest.mark.parametrize("case", EMPTY, ids=str)
def test_plain_gradients_of_nothing_are_zero(plain, case):
    check_nothing(*case)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("delta", [False, True])
def test_small_gradients_of_strong_decays(isa, delta, by_channel):
    """Each is precise by itself, though it is a millionth of what its neighbors add up to."""
    rng = np.random.default_rng(0)
    query, key, value, dout = rng.standard_normal((4, 1, 200, 3, 32))
    beta = rng.random((1, 200, 3)) if delta else None
    decay = np.full((1, 200, 3), [-0.5, -12, -25])
    if by_channel:
        decay = decay[..., None] * np.linspace(0.9, 1.1, 32)
    grads = []
    for dtype in (np.float32, np.float64):
        arrays = [x.astype(dtype) for x in (query, key, value)]
        gates = {"decay": decay.astype(dtype), "beta": None if beta is None else beta.astype(dtype)}
        _, vjp = attnmask.linear_attention_vjp(*arrays, **gates, normalize_qk=True)
        grads.append(vjp(dout.astype(dtype)).decay)
    error, size = (
        np.moveaxis(abs(x), 2, 0).reshape(3, -1).max(axis=1) for x in (grads[0] - grads[1], grads[1])
    )
    assert (error < 1e-5 * size).all(), error / size
