"""Cumulative sums: values, accuracy, dtypes, layouts, non-finite data, out=, gradients, reproducibility of bits."""

import functools
import math
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import pytest
import reference as ref
from flash_cases import BF16, FLOATS, Told
from hypothesis import given
from hypothesis import strategies as st
from layouts import CONSTANT, LAYOUTS, arrange, outcome

import attnmask

INTEGERS = tuple(np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))
SCOPES = ("local", "global")
OUT_LAYOUTS = (None, "contiguous", "fortran", "reversed", "strided")
SPECIAL = [math.nan, math.inf, -math.inf]
STEPS = st.integers(0, 40) | st.integers(0, 700)


@dataclass(frozen=True, repr=False)
class Case(Told):
    """One call."""

    scope: str  # "local" or "global"
    shape: tuple[int, ...]  # as passed: [B, H, T] if head_first
    dtype: np.dtype
    output_dtype: np.dtype | None = None
    reverse: bool = False
    head_first: bool = False
    chunk_size: int = 16
    softmax_scale: float | None = None
    cu_seqlens: tuple[int, ...] | None = None
    layout: str = "contiguous"
    out_layout: str | None = None
    special: bool = False
    seed: int = 0

    @property
    def result_dtype(self) -> np.dtype:
        return self.dtype if self.output_dtype is None else self.output_dtype

    @property
    def options(self) -> dict:
        names = ["reverse", "head_first", "softmax_scale", "output_dtype"]
        names += ["chunk_size"] if self.scope == "local" else []
        options = {name: getattr(self, name) for name in names}
        return options | {"cu_seqlens": None if self.cu_seqlens is None else np.array(self.cu_seqlens)}

    def data(self) -> np.ndarray:
        rng = np.random.default_rng(self.seed)
        if self.dtype in INTEGERS:
            low = 0 if self.dtype.kind == "u" else -9
            return arrange(rng.integers(low, 10, self.shape).astype(self.dtype), self.layout)
        values = rng.standard_normal(self.shape) * 10.0 ** rng.integers(-3, 3, self.shape)
        if self.special:
            values = np.where(rng.random(self.shape) < 0.05, rng.choice(SPECIAL, self.shape), values)
        return arrange(values.astype(self.dtype), self.layout)

    def call(self, module, values, **more):
        return getattr(module, f"chunk_{self.scope}_cumsum")(values, **(self.options | more))


@st.composite
def cases(draw, dtypes=FLOATS, output_dtypes=FLOATS, steps=STEPS):
    packed = draw(st.booleans())
    batch, heads = 1 if packed else draw(st.integers(0, 3)), draw(st.integers(0, 9) | st.integers(1, 70))
    length = draw(steps)
    head_first = draw(st.booleans())
    shape = (batch, heads, length) if head_first else (batch, length, heads)
    if draw(st.booleans()):
        shape += (draw(st.integers(0, 5) | st.integers(1, 35)),)
    cu_seqlens = None
    if packed:
        cuts = draw(st.lists(st.integers(0, length), max_size=8))
        cu_seqlens = (0, *sorted(cuts), length) if length or draw(st.booleans()) else (0,)
    return Case(
        scope=draw(st.sampled_from(SCOPES)),
        shape=shape,
        dtype=draw(st.sampled_from(dtypes)),
        output_dtype=draw(st.sampled_from([None, *output_dtypes])),
        reverse=draw(st.booleans()),
        head_first=head_first,
        chunk_size=2 ** draw(st.integers(0, 10)),
        softmax_scale=draw(st.sampled_from([None, None, 1, 0.125, -3.7, 0.0])),
        cu_seqlens=cu_seqlens,
        layout=draw(st.sampled_from(LAYOUTS + CONSTANT)),
        out_layout=draw(st.sampled_from(OUT_LAYOUTS)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def run(case: Case, values):
    """The package's result, after checks of what all results have in common."""
    before = values.tobytes()
    if case.out_layout is None:
        got = case.call(attnmask, values)
        assert got.flags.c_contiguous, (got.strides, case)
        assert not np.shares_memory(got, values), case
    else:
        out = arrange(np.full(case.shape, 77).astype(case.result_dtype), case.out_layout)
        got = case.call(attnmask, values, out=out)
        assert got is out, case
    assert type(got) is np.ndarray, case
    assert got.shape == case.shape, (got.shape, case)
    assert got.dtype == case.result_dtype, (got.dtype, case)
    assert values.tobytes() == before, case
    return got


def assert_close(got, values, case: Case) -> None:
    """The error is within what the accumulator's dtype allows, relative to the running sum of |values|.

    The exact result lies between two float64 numbers, and rounding to the result's dtype keeps the order, so the bounds
    are rounded too: half a unit of the result, its overflow and its underflow need no extra terms. (`ml_dtypes` rounds
    float64 twice, by way of float32; where that matters, both results are accepted.)
    """
    wide = case.dtype == np.float64 or (case.dtype == np.float32 and case.result_dtype == np.float64)
    steps = case.shape[2 if case.head_first else 1]
    if wide:
        share = (steps + 3) * 2.0**-53
    else:
        share = 1e-6 if case.dtype == np.float32 else max(1e-6, steps * 2.0**-24)
    scale = 1.0 if case.softmax_scale is None else abs(case.softmax_scale)
    underflow = 0.0 if case.softmax_scale is None else 2.0**-1074 if wide else 2.0**-149
    with np.errstate(all="ignore"):
        expected = case.call(ref, values, output_dtype=np.float64)
        sizes = np.abs(values.astype(np.float64))
        weight = case.call(ref, sizes, softmax_scale=scale, output_dtype=np.float64)
        slack = np.where(np.isfinite(weight), share * weight + underflow, 0.0)
        low, high = expected - slack, expected + slack
        if got.dtype == BF16:
            low, high = (
                np.nextafter(x.astype(np.float32), end) for x, end in ((low, -np.inf), (high, np.inf))
            )
        low, high = low.astype(got.dtype).astype(np.float64), high.astype(got.dtype).astype(np.float64)
        got = got.astype(np.float64)
    good = np.where(np.isnan(expected), np.isnan(got), (low <= got) & (got <= high))
    if not good.all():
        at = tuple(np.argwhere(~good)[0].tolist())
        pytest.fail(
            f"{case}\n{(~good).sum()} of {good.size} wrong, first at {at}: "
            f"got {got[at]!r}, expected {expected[at]!r} (from {low[at]!r} to {high[at]!r})"
        )


# Values


@given(case=cases())
def test_floats(isa, case):
    values = case.data()
    assert_close(run(case, values), values, case)


@given(case=cases(), special_out=st.sampled_from(FLOATS))
def test_nan_and_inf_stay_in_their_lane(isa, case, special_out):
    """+inf stays +inf over finite steps, and becomes NaN after -inf; earlier steps and other lanes are not affected."""
    case = replace(case, special=True, output_dtype=special_out)
    values = case.data()
    assert_close(run(case, values), values, case)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("lanes", [1, 16])
def test_a_finite_sum_that_overflows_is_inf_not_nan(isa, dtype, head_first, reverse, lanes):
    """A compensated sum, which subtracts infinities, would give NaN from there on."""
    huge = float(np.finfo(dtype).max) * 0.9
    line = np.array([1.0, huge, huge, huge, *[1.0] * 60], dtype)
    values = np.stack([line[::-1] if reverse else line] * lanes, axis=int(not head_first))[None]
    got = attnmask.chunk_global_cumsum(values, reverse=reverse, head_first=head_first)
    got = np.moveaxis(got[0], int(not head_first), 0)
    for lane in got:
        lane = lane[::-1] if reverse else lane
        assert lane[0] == 1, lane
        assert lane[1] == line[1], lane
        assert np.isposinf(lane[2:]).all(), lane


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("head_first", [False, True])
def test_subnormal_numbers_count(isa, dtype, head_first):
    tiny = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    values = np.full((1, 100, 100), tiny).astype(dtype)
    got = attnmask.chunk_global_cumsum(values, head_first=head_first).astype(np.float64) / tiny
    count = np.arange(1.0, 101.0)
    expected = np.broadcast_to(count[None, None, :] if head_first else count[None, :, None], got.shape)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_float64_is_rounded_to_float16_once(isa, head_first, layout):
    """If float64 were first rounded to float32, numbers slightly above a midpoint would become the midpoint."""
    middles = 1 + 2.0**-11 * np.arange(1, 400, 2)
    values = np.stack([middles + 2.0**-40, middles - 2.0**-40], axis=1)
    values = arrange(values.T[None] if head_first else values[None], layout)
    got = attnmask.chunk_local_cumsum(values, 1, head_first=head_first, output_dtype=np.float16)
    np.testing.assert_array_equal(got, values.astype(np.float16))


# Accuracy over a million steps

MILLION = 1_000_000


@functools.cache
def hard_lanes() -> np.ndarray:
    """[5, a million] float32: each lane makes a plain running sum lose digits in a different way."""
    rng = np.random.default_rng(0)
    step = np.arange(MILLION)
    lanes = [
        np.full(MILLION, 0.1),
        np.where(step % 2 == 0, 1e6, -1e6) + 0.37,
        rng.random(MILLION),
        np.where(step == 0, 1.0, 2.0**-25),
        rng.standard_normal(MILLION) * 10.0 ** rng.integers(-6, 6, MILLION),
    ]
    return np.stack(lanes).astype(np.float32)


@functools.cache
def hard_sums(reverse: bool, ends: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Their sums and the allowed errors, in float64 (whose own error is four thousand times smaller)."""
    values = hard_lanes().astype(np.float64)[None]
    options = {"reverse": reverse, "cu_seqlens": ends, "head_first": True}
    weight = ref.chunk_global_cumsum(np.abs(values), **options)
    return ref.chunk_global_cumsum(values, **options)[0], 1e-6 * weight[0]


@pytest.mark.repeats
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("ends", [(0, MILLION), (0, 7, 300_001, 300_001, MILLION)])
@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize("shape", ["one lane", "3-D", "4-D"])
def test_float32_over_a_million_steps(isa, reverse, ends, head_first, shape):
    options = {"reverse": reverse, "head_first": head_first}
    if len(ends) > 2:
        options["cu_seqlens"] = np.array(ends)
    sums, allowed = hard_sums(reverse, ends)
    every = slice(0, len(sums))
    for lanes in [slice(lane, lane + 1) for lane in range(len(sums))] if shape == "one lane" else [every]:
        values = hard_lanes()[lanes][None]
        if shape == "4-D":
            values = values[..., None] if head_first else values.swapaxes(1, 2)[:, :, None]
        elif not head_first:
            values = values.swapaxes(1, 2)
        values = np.ascontiguousarray(values)
        for name, got in {
            "global": attnmask.chunk_global_cumsum(values, **options),
            "local": attnmask.chunk_local_cumsum(values, 2**20, **options),
        }.items():
            by_lane = got.reshape(-1, MILLION) if head_first else got.reshape(MILLION, -1).T
            excess = by_lane - sums[lanes]
            np.abs(excess, out=excess)
            excess -= allowed[lanes]
            worst = np.unravel_index(np.argmax(excess), excess.shape)
            case = (isa, name, reverse, ends, head_first, shape, lanes)
            assert excess[worst] <= 0, (
                f"{case}: off by {excess[worst]} more than {allowed[lanes][worst]} at lane and step {worst}"
            )


# Integers


@given(case=cases(dtypes=INTEGERS, output_dtypes=INTEGERS + FLOATS))
def test_integers_are_exact(isa, case):
    values = case.data()
    expected, got = outcome(case.call, ref, values), outcome(run, case, values)
    assert type(got) is type(expected), (got, expected, case)
    if expected is OverflowError:
        return
    if case.result_dtype in FLOATS:
        # The sum may be rounded once, from int64, or twice, if it is converted to float64 first.
        sums = case.call(ref, values, output_dtype=np.float64)
        low, high = (np.nextafter(sums, end).astype(got.dtype) for end in (-1e300, 1e300))
        assert ((low <= got) & (got <= high)).all(), (case, got, expected)
    else:
        np.testing.assert_array_equal(got, expected, err_msg=repr(case))


@st.composite
def wild_integers(draw):
    """Values of the whole range, whose running sums come near the limits of int64 and sometimes exceed them."""
    dtype = draw(st.sampled_from(INTEGERS))
    limits = np.iinfo(dtype)
    ends = [limits.min, limits.max, limits.max - 1, limits.max // 2, 0, 1]
    values = st.sampled_from(ends) | st.integers(limits.min, limits.max)
    return np.array(draw(st.lists(values, max_size=20)), dtype)


@given(
    line=wild_integers(),
    output_dtype=st.sampled_from([None, *INTEGERS]),
    scale=st.sampled_from([None, None, 1.0, 0.5, -0.75, 1e300, math.inf, math.nan]),
    reverse=st.booleans(),
    head_first=st.booleans(),
    lanes=st.sampled_from([1, 2, 17]),
)
def test_integers_at_the_ends_of_their_range(isa, line, output_dtype, scale, reverse, head_first, lanes):
    """Partial sums that are no result may overflow; a result that does not fit must be reported."""
    values = np.stack([line] * lanes, axis=0 if head_first else 1)[None]
    options = {
        "reverse": reverse,
        "softmax_scale": scale,
        "head_first": head_first,
        "output_dtype": output_dtype,
    }
    case = (isa, line.tolist(), line.dtype, lanes, options)
    with np.errstate(all="ignore"):
        expected = outcome(ref.chunk_global_cumsum, values, **options)
    got = outcome(attnmask.chunk_global_cumsum, values, **options)
    assert type(got) is type(expected), (got, expected, case)
    if expected is not OverflowError:
        assert got.dtype == expected.dtype, case
        np.testing.assert_array_equal(got, expected, err_msg=repr(case))


@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize("at", [0, 1, 5_000, 99_999])
def test_an_overflow_far_into_a_large_input(isa, set_threads, head_first, at):
    """An overflow is reported wherever it happens and in whichever thread."""
    shape = (1, 4, 100_000) if head_first else (1, 100_000, 4)
    values = np.zeros(shape, np.int64)
    line = values[0, 2] if head_first else values[0, :, 2]
    line[at] = 2**40
    for threads in (1, 3):
        set_threads(threads)
        with pytest.raises(OverflowError, match=r"a sum of s, .*, does not fit int32"):
            attnmask.chunk_global_cumsum(values, head_first=head_first, output_dtype=np.int32)
        got = attnmask.chunk_global_cumsum(values, head_first=head_first)
        assert got.sum() == 2**40 * (100_000 - at), (isa, threads, at)


# Forms and arguments


@given(case=cases(steps=st.integers(0, 40)))
def test_scalar_and_vector_forms_are_the_same_function(case):
    values = case.data()
    form = "vector" if values.ndim == 4 else "scalar"
    direct = getattr(attnmask, f"chunk_{case.scope}_cumsum_{form}")(values, **case.options)
    assert direct.tobytes() == case.call(attnmask, values).tobytes(), case


def test_positional_arguments():
    """Their order differs between the forms, and only `chunk_local_cumsum` takes cu_seqlens by position."""
    values = np.arange(12.0).reshape(1, 3, 4)
    ends = np.array([0, 1, 4])
    tail = (True, np.float32)
    local = ref.chunk_local_cumsum(values, 2, True, 0.5, ends, *tail)
    unpacked = ref.chunk_local_cumsum(values, 2, True, 0.5, None, *tail)
    summed = ref.chunk_global_cumsum(values, True, ends, 0.5, *tail)
    deep = values[..., None]
    for got, expected in [
        (attnmask.chunk_local_cumsum(values, 2, True, 0.5, ends, *tail), local),
        (attnmask.chunk_local_cumsum_scalar(values, 2, True, 0.5, *tail), unpacked),
        (attnmask.chunk_local_cumsum_scalar(values, 2, True, 0.5, *tail, cu_seqlens=ends), local),
        (attnmask.chunk_local_cumsum_vector(deep, 2, True, 0.5, *tail)[..., 0], unpacked),
        (attnmask.chunk_local_cumsum_vjp(values, 2, True, 0.5, ends, *tail)[0], local),
        (attnmask.chunk_global_cumsum(values, True, ends, 0.5, *tail), summed),
        (attnmask.chunk_global_cumsum_scalar(values, True, ends, 0.5, *tail), summed),
        (attnmask.chunk_global_cumsum_vector(deep, True, ends, 0.5, *tail)[..., 0], summed),
        (attnmask.chunk_global_cumsum_vjp(values, True, ends, 0.5, *tail)[0], summed),
    ]:
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, expected)


def test_scalars_of_jax_as_arguments():
    numpy = pytest.importorskip("jax.numpy")
    values = np.arange(10.0).reshape(1, 10, 1)
    for scale in (numpy.float32(2), numpy.asarray(2), numpy.bfloat16(2)):
        got = attnmask.chunk_global_cumsum(values, softmax_scale=scale)
        np.testing.assert_array_equal(got, ref.chunk_global_cumsum(values, softmax_scale=2.0))


@pytest.mark.parametrize("bits", [20, 31, 32, 62, 63, 64, 100])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_chunk_longer_than_everything(bits, reverse):
    chunk_size = 2**bits
    values = np.arange(40, dtype=np.int64).reshape(1, 20, 2)
    for cu_seqlens in (None, [0, 7, 20]):
        got = attnmask.chunk_local_cumsum(values, chunk_size, reverse, cu_seqlens=cu_seqlens)
        np.testing.assert_array_equal(got, attnmask.chunk_global_cumsum(values, reverse, cu_seqlens))


# out=


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float64, np.int16], ids=str)
@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape", [(2, 37, 5), (1, 300, 40), (2, 9, 4, 3)])
def test_out_that_is_interleaved_with_the_input(isa, dtype, head_first, reverse, shape):
    """Input and `out` may be interleaved views of one buffer; nothing outside of `out` is written."""
    rng = np.random.default_rng(1)
    values = rng.integers(0, 5, shape).astype(dtype)
    expected = attnmask.chunk_global_cumsum(values, reverse, head_first=head_first)
    for axis in range(values.ndim):
        buffer = np.full([*shape[:axis], 3 * shape[axis], *shape[axis + 1 :]], 9).astype(dtype)
        first, second, third = (buffer[(slice(None),) * axis + (slice(i, None, 3),)] for i in range(3))
        first[...] = values
        case = (isa, dtype, head_first, reverse, shape, axis)
        assert attnmask.chunk_global_cumsum(first, reverse, head_first=head_first, out=second) is second
        np.testing.assert_array_equal(first, values, err_msg=repr(case))
        np.testing.assert_array_equal(second, expected, err_msg=repr(case))
        np.testing.assert_array_equal(third, np.full_like(third, 9), err_msg=repr(case))


@given(
    dtype=st.sampled_from(FLOATS + INTEGERS),
    shape=st.sampled_from([(1, 1, 1), (1, 5, 3), (2, 3, 2, 2), (1, 0, 4)]),
    start=st.integers(0, 40),
    step=st.sampled_from([1, 2, 3, -1, -2]),
)
def test_out_is_refused_just_when_it_shares_an_element(dtype, shape, start, step):
    """Two windows of one buffer are refused if NumPy finds that they share a byte; otherwise the result is right."""
    size = math.prod(shape)
    buffer = np.arange(200).astype(np.int8).astype(dtype)
    values = buffer[50 : 50 + 2 * size : 2].reshape(shape)
    out = buffer[48 + start :][: abs(step) * size][::step][:size].reshape(shape)
    assert size == 0 or (np.shares_memory(values, buffer) and np.shares_memory(out, buffer))
    before, case = buffer.copy(), (dtype, shape, start, step)
    if np.shares_memory(values, out):
        with pytest.raises(ValueError, match=r"\bout\b"):
            attnmask.chunk_global_cumsum(values, out=out)
        assert buffer.tobytes() == before.tobytes(), case
        return
    expected = outcome(attnmask.chunk_global_cumsum, values.copy())
    got = outcome(attnmask.chunk_global_cumsum, values, out=out)
    assert (got is OverflowError) if expected is OverflowError else (got is out), case
    if got is out:
        assert out.tobytes() == expected.tobytes(), case
        out[...] = np.ones(shape, dtype)
        again = before.copy()
        again[48 + start :][: abs(step) * size][::step][:size] = 1
        assert buffer.tobytes() == again.tobytes(), case


# Gradients


@given(
    case=cases(steps=st.integers(0, 100)),
    dout_dtype=st.sampled_from(FLOATS),
    dout_layout=st.sampled_from(LAYOUTS + CONSTANT),
)
def test_vjp(isa, case, dout_dtype, dout_layout):
    values = case.data()
    dout = replace(case, dtype=dout_dtype, layout=dout_layout, seed=case.seed + 1).data()
    more = {}
    if case.out_layout is not None:
        more["out"] = arrange(np.zeros(case.shape, case.result_dtype), case.out_layout)
    name = f"chunk_{case.scope}_cumsum_vjp"
    out, vjp = getattr(attnmask, name)(values, **case.options, **more)
    assert out is more.get("out", out), case
    assert_close(out, values, case)
    for _ in range(2):
        gradient = vjp(dout)
        assert type(gradient) is np.ndarray, case
        assert gradient.flags.c_contiguous, case
        # The gradient is itself a cumulative sum: of dout, with a result of g's dtype.
        back = replace(case, dtype=dout_dtype, output_dtype=case.dtype, reverse=not case.reverse)
        assert gradient.dtype == case.dtype, (gradient.dtype, case)
        assert gradient.shape == case.shape, (gradient.shape, case)
        assert_close(gradient, dout, back)


@given(case=cases(dtypes=FLOATS[3:], output_dtypes=FLOATS[3:], steps=st.integers(0, 100)))
def test_vjp_is_the_adjoint(case):
    """<f(x), y> = <x, vjp(y)> for a linear f, independently of how the gradient is computed."""
    case = replace(case, layout="contiguous")
    x, y = case.data(), replace(case, seed=case.seed + 1).data()
    out, vjp = getattr(attnmask, f"chunk_{case.scope}_cumsum_vjp")(x, **case.options)
    gradient = vjp(y)
    size = (np.abs(case.call(attnmask, np.abs(x))) * np.abs(y)).sum()
    assert abs((out * y).sum() - (x * gradient).sum()) <= 1e-12 * size, case


def test_vjp_does_not_follow_later_changes():
    """The gradient belongs to the call that was made, even if its arguments change afterwards."""
    values = np.ones((1, 8, 2), np.float32)
    dout = np.arange(16, dtype=np.float64).reshape(values.shape)
    ends = np.array([0, 3, 8])
    expected = ref.chunk_global_cumsum(dout, True, ends, output_dtype=np.float32)
    _, vjp = attnmask.chunk_global_cumsum_vjp(values, cu_seqlens=ends)
    values[...] = np.nan
    for later in ([0, 5, 8], [0, 10**12, 10**15]):
        ends[...] = later
        np.testing.assert_array_equal(vjp(dout), expected)


# The same bits


SPLIT = [
    Case("global", (3, 700, 37), FLOATS[2]),
    Case("local", (3, 700, 37), FLOATS[2], chunk_size=64),
    Case("global", (2, 37, 3000), FLOATS[2], head_first=True),
    Case("global", (2, 100, 5, 19), FLOATS[0], output_dtype=FLOATS[2]),
    Case("local", (2, 300, 5, 19), BF16, output_dtype=FLOATS[2], chunk_size=128),
    Case("global", (1, 5, 4000, 7), FLOATS[2], head_first=True, cu_seqlens=(0, 1, 1, 1700, 4000)),
    Case("global", (2, 1000, 33), FLOATS[3]),
    Case("global", (2, 500, 192), BF16),
    Case("local", (2, 48, 500), FLOATS[0], chunk_size=64, head_first=True),
]


@pytest.mark.parametrize("case", SPLIT, ids=str)
@pytest.mark.parametrize("reverse", [False, True])
def test_a_lane_does_not_depend_on_its_neighbours(isa, case, reverse):
    case = replace(case, reverse=reverse)
    values = case.data()
    whole = case.call(attnmask, values)
    time = 2 if case.head_first else 1
    for axis in (axis for axis in range(values.ndim) if axis != time and values.shape[axis] > 1):
        for part in (np.s_[:2], np.s_[-2:], np.s_[1::2], np.s_[2:19]):
            where = (slice(None),) * axis + (part,)
            for some in (values[where], np.ascontiguousarray(values[where])):
                got = case.call(attnmask, some)
                assert got.tobytes() == whole[where].tobytes(), (isa, where, some.strides, case)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("lanes", [15, 16, 17, 48, 63, 64, 65, 127, 128, 129, 144, 256, 272, 1024, 1040])
def test_rows_of_all_widths(isa, dtype, reverse, lanes):
    """Each lane has the same bits, however many lanes are summed together."""
    base = Case("global", (1, 45, lanes), dtype, reverse=reverse, cu_seqlens=(0, 17, 17, 45))
    for case in (base, replace(base, scope="local", chunk_size=16)):
        values = case.data()
        got = case.call(attnmask, values)
        assert_close(got, values, case)
        for first in (0, lanes // 2, lanes - 2):
            pair = case.call(attnmask, values[:, :, first : first + 2])
            assert pair.tobytes() == got[:, :, first : first + 2].tobytes(), (isa, first, case)


@pytest.mark.parametrize("dtype", [*FLOATS, np.dtype("int32"), np.dtype("int64")], ids=str)
@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize("lanes", [2, 7, 8, 9, 31, 33, 40])
@pytest.mark.parametrize("steps", [3, 15, 16, 17, 65, 130])
def test_input_or_out_in_the_other_order(isa, dtype, head_first, lanes, steps):
    """Tiles are transposed if time is contiguous in one array and lanes are in the other."""
    values = np.random.default_rng(0).integers(-9, 9, (2, steps, lanes)).astype(dtype)
    values = values.swapaxes(1, 2) if head_first else values
    transposed = np.ascontiguousarray(values.swapaxes(1, 2)).swapaxes(1, 2)
    for reverse in (False, True):
        options = {"reverse": reverse, "head_first": head_first}
        expected = ref.chunk_local_cumsum(values, 16, **options)
        for source, out in (
            (transposed, np.empty(values.shape, dtype)),
            (values.copy(), np.zeros_like(transposed)),
        ):
            got = attnmask.chunk_local_cumsum(source, 16, **options, out=out)
            np.testing.assert_array_equal(got, expected, err_msg=f"{isa} {reverse} {source.strides}")
        if dtype == np.float32:
            got = attnmask.chunk_local_cumsum(transposed, 16, **options, output_dtype=np.float64)
            np.testing.assert_array_equal(got, expected, err_msg=f"{isa} {reverse} to float64")


@pytest.mark.repeats
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("head_first", [False, True])
def test_results_larger_than_the_cache(isa, dtype, reverse, head_first):
    """They are written around the cache, in whole lines if `out` is aligned to one."""
    steps, lanes = 2048, (48 << 20) // dtype.itemsize // 2048
    shape = (1, lanes, steps) if head_first else (1, steps, lanes)
    line = np.arange(1, 65).astype(dtype)
    expected = np.tile(line[::-1] if reverse else line, steps // 64)
    values = np.ones(shape, dtype)
    buffer = np.empty(values.size + 64, dtype)
    for out in (None, buffer[:-64].reshape(shape), buffer[3:-61].reshape(shape)):
        got = attnmask.chunk_local_cumsum(values, 64, reverse, head_first=head_first, out=out)
        assert (got == (expected if head_first else expected[:, None])).all(), (isa, out is None)


LARGE = [
    Case("global", (1, 300_000, 1), FLOATS[2]),
    Case("global", (1, 1, 300_000), FLOATS[2], head_first=True),
    Case("global", (1, 60_000, 7), FLOATS[2], cu_seqlens=(0, 5, 31_000, 31_000, 60_000), softmax_scale=0.3),
    Case("global", (3, 5_000, 40), FLOATS[2]),
    Case("global", (2, 40, 5_000), FLOATS[2], head_first=True, softmax_scale=-2.5),
    Case("global", (2, 5_000, 8, 9), BF16, output_dtype=FLOATS[2]),
    Case("global", (2, 5_000, 8, 9), FLOATS[0]),
    Case("global", (1, 5_000, 320), FLOATS[0]),
    Case("global", (2, 40, 5_000), BF16, head_first=True),
    Case("global", (1, 2_000, 1_100), FLOATS[2]),
    Case("local", (1, 300_000, 1), FLOATS[2], chunk_size=2**17),
    Case("local", (2, 8, 5_000, 9), FLOATS[2], chunk_size=64, head_first=True),
    Case("local", (1, 60_000, 7), FLOATS[3], chunk_size=1024, cu_seqlens=(0, 5, 31_000, 31_000, 60_000)),
    Case("global", (1, 300_000, 1), FLOATS[3]),
    Case("global", (1, 100_000, 3), np.dtype("int32"), output_dtype=np.dtype("int64")),
]


@pytest.mark.repeats
@pytest.mark.parametrize("case", LARGE, ids=str)
@pytest.mark.parametrize("reverse", [False, True])
def test_any_number_of_threads_gives_the_same_bits(isa, set_threads, case, reverse):
    case = replace(case, reverse=reverse)
    values = case.data()
    set_threads(1)
    alone = case.call(attnmask, values)
    if case.dtype not in INTEGERS:
        assert_close(alone, values, case)
    for threads in (1, 2, 3, 4, 7):
        set_threads(threads)
        assert case.call(attnmask, values).tobytes() == alone.tobytes(), (isa, threads, case)


# Bad input: what an argument must be beside the others


@pytest.mark.parametrize("name", [f"chunk_{scope}_cumsum{vjp}" for scope in SCOPES for vjp in ("", "_vjp")])
def test_bad_input(name):
    first, more = ("g", {"chunk_size": 2}) if "local" in name else ("s", {})
    right = {first: np.ones((1, 5, 2), np.float32)} | more
    bad = [{"cu_seqlens": starts} for starts in ([0, 2, 4], [0, 2, 6], [0], [0, 10**12])]
    if more:
        bad += [{"chunk_size": size} for size in (3, 6, 2**31 - 1, 2**63 + 1, 2**70 + 1)]
    for shape, head_first in [((2, 5, 2), False), ((0, 5, 2), False), ((2, 3, 5), True)]:
        bad.append({"cu_seqlens": [0, 2, 5], first: np.ones(shape, np.float32), "head_first": head_first})
    for wrong in bad:
        with pytest.raises(ValueError, match=rf"\b{next(iter(wrong))}\b"):
            getattr(attnmask, name)(**right | wrong)
    for dtype in (bool, int) if "vjp" in name else (bool,):
        with pytest.raises(TypeError, match=rf"\b{first} must "):
            getattr(attnmask, name)(**right | {first: np.ones((1, 5, 2), dtype)})


def test_out_shares_no_memory_with_starts_of_another_kind():
    starts = np.array([0, 4], np.int64)
    out = starts.view(np.float32).reshape(1, 4, 1)
    for name, function in (("g", attnmask.chunk_local_cumsum_vjp), ("s", attnmask.chunk_global_cumsum_vjp)):
        given = {name: np.ones((1, 4, 1), np.float32), "cu_seqlens": memoryview(starts), "out": out}
        if name == "g":
            given["chunk_size"] = 2
        with pytest.raises(ValueError, match=r"^out must share no memory with cu_seqlens"):
            function(**given)
    np.testing.assert_array_equal(starts, [0, 4])
