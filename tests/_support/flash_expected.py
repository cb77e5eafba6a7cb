"""The expected results and gradients of attention, the errors that they may have, and functions that call for them."""

import functools
import itertools
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import reference_flash as ref
from flash_cases import (
    BF16,
    F16,
    F64,
    FACTORS,
    LAYOUTS,
    Case,
    accumulator,
    all_pairs,
    bits_of,
    lse_dtype,
    worst,
)
from layouts import arrange

import attnmask
from attnmask import FlashAttentionGrads

NAMES = FlashAttentionGrads._fields


# Accuracy


@dataclass(frozen=True)
class Expected:
    """The expected results of a call, and the errors that they may have."""

    out: np.ndarray
    lse: np.ndarray
    out_size: np.ndarray
    lse_size: np.ndarray
    out_error: float
    lse_error: float
    case: object

    def check(self, out, lse=None) -> None:
        same_nan = np.isnan(out.astype(np.float64)) == np.isnan(self.out.astype(np.float64))
        assert same_nan.all(), f"NaN at other places, {np.argwhere(~same_nan)[:3].tolist()}: {self.case}"
        assert out.shape == self.out.shape, (out.shape, self.case)
        self._near(out, self.out, self.out_size, self.out_error, "out")
        if lse is None:
            return
        assert lse.dtype == lse_dtype(out.dtype), (lse.dtype, self.case)
        assert lse.shape == self.lse.shape, (lse.shape, self.case)
        np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(self.lse), err_msg=repr(self.case))
        finite = np.isfinite(self.lse)
        self._near(lse[finite], self.lse[finite], self.lse_size[finite], self.lse_error, "lse")

    def _near(self, got, exact, size, allowed, name) -> None:
        finite = np.isfinite(exact.astype(np.float64))
        got, exact, size = got[finite], exact[finite], size[finite]
        error = worst(got, exact, size, got.dtype)
        assert error <= allowed, (
            f"{name} is off by {error:.3g} of its size, allowed {allowed:.3g}: {self.case}"
        )


def expected(arguments: dict, keep=None, case=None) -> Expected:
    """Results in at least float64, and the errors that they may have."""
    dtype = arguments["query"].dtype.newbyteorder("=") if arguments["query"].dtype != BF16 else BF16
    return expected_by(functools.partial(ref.flash_attention, **arguments, keep=keep), dtype, case)


def expected_by(attention, dtype, case=None) -> Expected:
    """The results of `attention(dtype=...)`, which computes in that type; their error may be twice that of naive
    attention in the type of the query.

    With few pairs the naive result is sometimes exact by luck: a weight is exactly 1, or logits need no rounding. So
    the error of a few roundings is always allowed: one of the result, relative to the size of what was summed; in the
    accumulator a few of weights and sums; and two of the logits (one of the scaled logit, one of its conversion to the
    base of the exponential), which the exponential turns from absolute into relative errors.
    """
    wide = accumulator(dtype)
    exact = attention(dtype=np.longdouble if dtype == F64 else np.float64)
    naive = attention(dtype=wide)
    with np.errstate(over="ignore"):
        rounded = naive.out.astype(dtype)
    logits = float(np.max(exact.logit_size, initial=0, where=np.isfinite(exact.logit_size)))
    steps = (8 + 2 * logits) * float(np.finfo(wide).eps)
    result = 0.0 if dtype == wide else float(ml_dtypes.finfo(dtype).eps)
    lse_size = np.ones_like(exact.lse)
    finite = np.isfinite(exact.out.astype(np.float64)) & np.isfinite(rounded.astype(np.float64))
    finite_lse = np.isfinite(exact.lse)
    return Expected(
        exact.out,
        exact.lse,
        exact.out_size,
        lse_size,
        2 * worst(rounded[finite], exact.out[finite], exact.out_size[finite], dtype) + steps + result,
        2 * worst(naive.lse[finite_lse], exact.lse[finite_lse], lse_size[finite_lse], wide) + steps,
        case,
    )


# Calls

CASES = [Case(**levels, seed=index) for index, levels in enumerate(all_pairs(FACTORS, 0))]


def run(case: Case, arguments: dict):
    """The package's out and lse (or None), after checks of what all results have in common."""
    more = {}
    if case.out_layout is not None:
        shape = (*arguments["query"].shape[:-1], case.value_depth)
        more["out"] = arrange(np.full(shape, 77).astype(case.dtype), case.out_layout)
    before = bits_of(arguments)
    got = attnmask.flash_attention(**arguments, **case.hints(), return_lse=case.return_lse, **more)
    assert bits_of(arguments) == before, case
    out, lse = got if case.return_lse else (got, None)
    assert type(out) is np.ndarray, case
    assert out.dtype == case.dtype, (out.dtype, case)
    if more:
        assert out is more["out"], case
    else:
        assert out.flags.c_contiguous, case
    assert lse is None or (type(lse) is np.ndarray and lse.flags.c_contiguous), case
    return out, lse


@functools.lru_cache(maxsize=8)
def expected_of(case: Case) -> Expected:
    return expected(case.arguments(), case.keep(), case)


def attend(arguments: dict, **more):
    return attnmask.flash_attention(**(arguments | more), return_lse=True)


# Gradients


@dataclass(frozen=True)
class ExpectedGradients:
    """The expected gradients of a call, and the errors that they may have, relative to the sizes of what was summed."""

    exact: ref.Gradients
    sizes: ref.Gradients
    errors: ref.Gradients
    case: object

    def check(self, got: FlashAttentionGrads) -> None:
        for name, gradient in got._asdict().items():
            if gradient is None:
                continue
            exact, size = (np.asarray(getattr(each, name)) for each in (self.exact, self.sizes))
            assert gradient.shape == exact.shape, (name, gradient.shape, self.case)
            # A gradient that exceeds the range of its type may be infinite or as large as possible.
            fits = np.isfinite(rounded(exact, gradient.dtype))
            assert np.isfinite(gradient[fits].astype(F64)).all(), (name, self.case)
            error, allowed = (
                worst(gradient[fits], exact[fits], size[fits], gradient.dtype),
                getattr(self.errors, name),
            )
            assert error <= allowed, (
                f"d {name} is off by {error:.3g} of its size, allowed {allowed:.3g}: {self.case}"
            )


def rounded(array, dtype) -> np.ndarray:
    with np.errstate(over="ignore"):
        return array.astype(dtype).astype(F64)


def native(dtype) -> np.dtype:
    return dtype if dtype == BF16 else dtype.newbyteorder("=")


def expected_gradients(arguments: dict, dout, dlse=None, keep=None, case=None) -> ExpectedGradients:
    """Gradients in at least float64; their error may be twice that of the naive gradients in the same dtype.

    With few pairs the naive gradients are sometimes exact by luck. So, as in the test of the forward pass, the error of
    a few roundings is always allowed; that of logits and sinks counts as the relative error that the exponential makes
    of it. Results of 16 bits are rounded twice: as the output, from which a part of the gradient is computed, and as
    the gradient.
    """
    dtype = native(arguments["query"].dtype)
    wide = accumulator(dtype)
    most = np.longdouble if dtype == F64 else np.float64
    limits = np.finfo(wide)
    least = {"least": limits.tiny / limits.eps, "least_out": float(ml_dtypes.finfo(dtype).tiny)}
    exact, sizes = ref.flash_attention_vjp(dout, dlse, **arguments, keep=keep, dtype=most, **least)
    naive, _ = ref.flash_attention_vjp(dout, dlse, **arguments, keep=keep, dtype=wide)
    logits = ref.flash_attention(**arguments, keep=keep, dtype=wide).logit_size
    largest = float(np.max(logits, initial=0, where=np.isfinite(logits)))
    sinks = np.asarray(0 if arguments.get("softmax_aux") is None else arguments["softmax_aux"]).astype(F64)
    largest += float(np.max(abs(sinks), initial=0, where=np.isfinite(sinks)))
    steps = (8 + 2 * largest) * float(limits.eps)

    def error(name):
        right = getattr(exact, name)
        if right is None:
            return None
        right, size, kind = np.asarray(right), np.asarray(getattr(sizes, name)), kind_of(name, arguments)
        near = rounded(np.asarray(getattr(naive, name)), kind)
        fits = np.isfinite(near) & np.isfinite(right.astype(F64))
        halves = float(ml_dtypes.finfo(dtype).eps) if dtype != wide else 0.0
        own = float(ml_dtypes.finfo(kind).eps) if kind in (F16, BF16) else 0.0
        return 2 * worst(near[fits], right[fits], size[fits], kind) + steps + max(halves, own)

    return ExpectedGradients(exact, sizes, ref.Gradients(*map(error, NAMES)), case)


def kind_of(name: str, arguments: dict) -> np.dtype:
    return native(np.asarray(arguments[name]).dtype)


# Calls


@dataclass(frozen=True, repr=False)
class GradientCase(Case):
    dout_layout: str = "contiguous"
    with_dlse: bool = False
    wanted: tuple[bool, bool] = (True, True)  # whether gradients of the bias, and of the sinks, are requested
    bwd_blocks: tuple[int, int] | None = None

    def cotangents(self):
        rng = np.random.default_rng(self.seed + 1)
        shape = (self.rows, self.queries, self.heads[0], self.value_depth)
        dout = rng.standard_normal(shape).astype(self.dtype)
        dlse = rng.standard_normal(self.pairs[:3]).astype(lse_dtype(self.dtype))
        if self.flat:
            dout, dlse = dout[0], dlse[0]
        dlse = arrange(dlse, ("contiguous", "fortran", "reversed", "strided")[self.seed % 4])
        return arrange(dout, self.dout_layout), dlse if self.with_dlse else None

    def hints(self) -> dict:
        blocks = None if self.bwd_blocks is None else attnmask.BwdParams(*self.bwd_blocks)
        return super().hints() | {"bwd_params": blocks}

    def flags(self) -> dict:
        return {
            "grad_bias": self.bias is not None and self.wanted[0],
            "grad_softmax_aux": self.sinks is not None and self.wanted[1],
        }


def check_form(got: FlashAttentionGrads, arguments: dict, flags: dict, case) -> None:
    assert type(got) is FlashAttentionGrads
    for name, gradient in got._asdict().items():
        if not flags.get(f"grad_{name}", name not in ("bias", "softmax_aux", "relative_bias", "grid_bias")):
            assert gradient is None, (name, case)
            continue
        given = np.asarray(arguments[name])
        assert type(gradient) is np.ndarray, (name, case)
        assert (gradient.shape, gradient.dtype) == (given.shape, native(given.dtype)), (name, case)
        assert gradient.flags.c_contiguous, (name, case)
        assert gradient.flags.writeable, (name, case)


def run_gradients(case: GradientCase, arguments: dict) -> FlashAttentionGrads:
    """The package's gradients, after checks of what all gradients have in common."""
    dout, dlse = case.cotangents()
    given = arguments | {"dout": dout, "dlse": dlse}
    before = bits_of(given)
    _, vjp = attnmask.flash_attention_vjp(**arguments, **case.hints(), **case.flags())
    got = vjp(dout) if dlse is None else vjp(dout, dlse)
    assert bits_of(given) == before, case
    check_form(got, arguments, case.flags(), case)
    return got


@functools.lru_cache(maxsize=8)
def expected_gradients_of(case: GradientCase) -> ExpectedGradients:
    return expected_gradients(case.arguments(), *case.cotangents(), case.keep(), case)


def gradients(arguments: dict, dout=None, dlse=None, **more) -> FlashAttentionGrads:
    """Includes gradients of the bias and the sinks, if there are any."""
    arguments = arguments | more
    flags = {f"grad_{name}": arguments.get(name) is not None for name in ("bias", "softmax_aux")}
    _, vjp = attnmask.flash_attention_vjp(**arguments, **flags)
    return vjp(dout_of(arguments) if dout is None else dout, dlse)


def dout_of(arguments: dict) -> np.ndarray:
    shape = (*arguments["query"].shape[:-1], arguments["value"].shape[-1])
    return np.random.default_rng(9).standard_normal(shape).astype(arguments["query"].dtype)


def assert_equal_bits(one: FlashAttentionGrads, other: FlashAttentionGrads, case) -> None:
    for name, a, b in zip(NAMES, one, other, strict=True):
        assert (a is None) == (b is None), (name, case)
        assert a is None or (a.dtype == b.dtype and a.tobytes() == b.tobytes()), (name, case)


# All pairs of arguments

LENGTHS = (64, 17, 0, 1, 63, 65, 127, 128, 129)

DEPTHS = (16, 64, 1, 7, 17, 33, 80, 129)

CHANGED = {
    "queries": LENGTHS,
    "keys": LENGTHS,
    "depth": DEPTHS,
    "value_depth": DEPTHS,
    "batch": (2, 1),
    "heads": ((2, 2), (4, 2), (1, 1), (3, 1)),
    "dout_layout": LAYOUTS,
    "with_dlse": (False, True),
    "wanted": tuple(itertools.product((True, False), repeat=2)),
    "bwd_blocks": (None, (1, 1), (16, 64), (100, 7)),
}

OF_THE_RESULT = ("return_lse", "out_layout")

GRADIENT_FACTORS = {name: levels for name, levels in FACTORS.items() if name not in OF_THE_RESULT} | CHANGED

GRADIENT_CASES = [
    GradientCase(**levels, seed=index) for index, levels in enumerate(all_pairs(GRADIENT_FACTORS, 2))
]


def check(case: Case) -> tuple:
    """The gradients of a case that is about them, else the result and its lse, which are right."""
    if isinstance(case, GradientCase):
        got = run_gradients(case, case.arguments())
        expected_gradients_of(case).check(got)
    else:
        got = run(case, case.arguments())
        expected_of(case).check(*got)
    return got


def check_by_threads(case: Case, set_threads, *counts: int) -> None:
    """The same bits for these numbers of threads, and right."""
    seen = set()
    for threads in counts:
        set_threads(threads)
        seen.add(tuple(x if x is None else x.tobytes() for x in check(case)))
    assert len(seen) == 1, case


def name_of(case: Case) -> str:
    return f"{type(case).__name__} {case.seed}"
