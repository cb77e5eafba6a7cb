"""The expected results of attention, the errors that they may have, and a function that calls it for the tests."""

import functools
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import reference_flash as ref
from flash_cases import BF16, F64, FACTORS, Case, accumulator, all_pairs, bits_of, laid_out, lse_dtype, worst

import attnmask

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
        more["out"] = laid_out(np.full(shape, 77).astype(case.dtype), case.out_layout)
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
