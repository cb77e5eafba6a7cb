"""Gradients of flash attention: values and accuracy over all pairs of arguments, dead pairs, dropout, the same bits."""

import functools
import gc
import itertools
import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
import reference_flash as ref
from conftest import SANITIZED, arrange
from flash_bad_input import BAD, DV, GOOD, NO_FLAG, PACKED, TK, TQ, B, D, H, zeros
from flash_cases import (
    BF16,
    F16,
    F32,
    F64,
    FACTORS,
    FLOATS,
    LAYOUTS,
    LIMITS,
    POISON,
    SEQUENCES,
    SIZES,
    STEADY,
    Case,
    accumulator,
    all_pairs,
    bits_of,
    laid_out,
    limits,
    live_of,
    lse_dtype,
    of_lengths,
    padding,
    poison_of,
    tensors,
    thinned,
    worst,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import attnmask
from attnmask import FlashAttentionGrads, MaskInfo

NAMES = FlashAttentionGrads._fields

# Accuracy


@dataclass(frozen=True)
class Expected:
    """What a call should give, and the errors that it may have as shares of the sizes."""

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
            # What is too large for its type is infinite, or as large as can be.
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


def expected(arguments: dict, dout, dlse=None, keep=None, case=None) -> Expected:
    """At most twice the error of the naive gradients in the same dtype, both beside (at least) float64.

    With few pairs the naive version is sometimes right by luck, so that as in the forward's test a few roundings are
    allowed in any case, those of logits and sinks as the exponential turns them into relative errors. Where the result
    is rounded to 16 bits it is so twice: as the output, from which a part of the gradient is computed, and as the
    gradient.
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

    return Expected(exact, sizes, ref.Gradients(*map(error, NAMES)), case)


def kind_of(name: str, arguments: dict) -> np.dtype:
    return native(np.asarray(arguments[name]).dtype)


# All pairs of arguments


@dataclass(frozen=True, repr=False)
class GradientCase(Case):
    dout_layout: str = "contiguous"
    with_dlse: bool = False
    wanted: tuple[bool, bool] = (True, True)  # the bias, the sinks
    bwd_blocks: tuple[int, int] | None = None

    def cotangents(self):
        rng = np.random.default_rng(self.seed + 1)
        shape = (self.rows, self.queries, self.heads[0], self.value_depth)
        dout = rng.standard_normal(shape).astype(self.dtype)
        dlse = rng.standard_normal(self.pairs[:3]).astype(lse_dtype(self.dtype))
        if self.flat:
            dout, dlse = dout[0], dlse[0]
        dlse = arrange(dlse, ("contiguous", "fortran", "reversed", "strided")[self.seed % 4])
        return laid_out(dout, self.dout_layout), dlse if self.with_dlse else None

    def hints(self) -> dict:
        blocks = None if self.bwd_blocks is None else attnmask.BwdParams(*self.bwd_blocks)
        return super().hints() | {"bwd_params": blocks}

    def flags(self) -> dict:
        return {
            "grad_bias": self.bias is not None and self.wanted[0],
            "grad_softmax_aux": self.sinks is not None and self.wanted[1],
        }


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
CASES = [GradientCase(**levels, seed=index) for index, levels in enumerate(all_pairs(GRADIENT_FACTORS, 2))]


def check_form(got: FlashAttentionGrads, arguments: dict, flags: dict, case) -> None:
    assert type(got) is FlashAttentionGrads
    for name, gradient in got._asdict().items():
        if not flags.get(f"grad_{name}", name not in ("bias", "softmax_aux")):
            assert gradient is None, (name, case)
            continue
        given = np.asarray(arguments[name])
        assert type(gradient) is np.ndarray, (name, case)
        assert (gradient.shape, gradient.dtype) == (given.shape, native(given.dtype)), (name, case)
        assert gradient.flags.c_contiguous, (name, case)
        assert gradient.flags.writeable, (name, case)


def run(case: GradientCase, arguments: dict) -> FlashAttentionGrads:
    """The package's gradients, after a look at what all of them have in common."""
    dout, dlse = case.cotangents()
    given = arguments | {"dout": dout, "dlse": dlse}
    before = bits_of(given)
    _, vjp = attnmask.flash_attention_vjp(**arguments, **case.hints(), **case.flags())
    got = vjp(dout) if dlse is None else vjp(dout, dlse)
    assert bits_of(given) == before, case
    check_form(got, arguments, case.flags(), case)
    return got


@functools.lru_cache(maxsize=8)
def expected_of(case: GradientCase) -> Expected:
    return expected(case.arguments(), *case.cotangents(), case.keep(), case)


@pytest.mark.parametrize("case", thinned(CASES, 5), ids=lambda case: str(case.seed))
def test_all_pairs_of_arguments(isa, set_threads, case):
    set_threads(case.threads)
    expected_of(case).check(run(case, case.arguments()))


@st.composite
def random_cases(draw):
    levels = {name: draw(st.sampled_from(choices)) for name, choices in GRADIENT_FACTORS.items()}
    levels |= {name: draw(st.integers(0, 140)) for name in ("queries", "keys")}
    levels |= {name: draw(st.integers(1, 40)) for name in ("depth", "value_depth")}
    return GradientCase(**levels, seed=draw(st.integers(0, 2**20)))


@settings(max_examples=5 if SANITIZED else 20)
@given(case=random_cases())
def test_any_arguments(isa, set_threads, case):
    set_threads(case.threads)
    expected_of(case).check(run(case, case.arguments()))


def gradients(arguments: dict, dout=None, dlse=None, **more) -> FlashAttentionGrads:
    """Of the bias and the sinks too, where there are any."""
    arguments = arguments | more
    flags = {f"grad_{name}": arguments.get(name) is not None for name in ("bias", "softmax_aux")}
    _, vjp = attnmask.flash_attention_vjp(**arguments, **flags)
    return vjp(dout_of(arguments) if dout is None else dout, dlse)


def dout_of(arguments: dict) -> np.ndarray:
    shape = (*arguments["query"].shape[:-1], arguments["value"].shape[-1])
    return np.random.default_rng(9).standard_normal(shape).astype(arguments["query"].dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", list(SEQUENCES)[:: 2 if SANITIZED else 1])
@pytest.mark.parametrize("segments", [False, True])
def test_sequences_of_any_length(isa, set_threads, dtype, name, segments):
    more = {"causal": True} if segments else {"dropout": 0.3, "sinks": "[H, S]", "bias": "[H, 1, Tk]"}
    set_threads(2)
    case = of_lengths(name, dtype, (2, 1), segments, **more)
    arguments = case.arguments()
    dout = dout_of(arguments)
    expected(arguments, dout, keep=case.keep(), case=case).check(gradients(arguments, dout))


def assert_equal_bits(one: FlashAttentionGrads, other: FlashAttentionGrads, case) -> None:
    for name, a, b in zip(NAMES, one, other, strict=True):
        assert (a is None) == (b is None), (name, case)
        assert a is None or (a.dtype == b.dtype and a.tobytes() == b.tobytes()), (name, case)


# Forms and arguments

FORMS = [
    {},
    {"causal": True, "offset": "bottom-right", "sinks": "[H, S]", "bias": "[H, 1, Tk]"},
    {"packing": "flat", "window": 5, "sinks": "[S]", "bias": "[Tq, Tk]"},
    {"packing": "packed", "causal": True, "dropout": 0.3},
    {"normalize": False, "mask": "dense", "soft_cap": 2.0},
]


@pytest.mark.parametrize("more", FORMS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bwd_gives_the_same_as_vjp(isa, dtype, more):
    """From what `flash_attention_fwd` gives, however it lies."""
    for layout, with_dlse in (
        ("contiguous", False),
        ("strided", True),
        ("heads first", True),
        ("misaligned", False),
    ):
        case = GradientCase(dtype, 33, 70, 16, 19, with_dlse=with_dlse, **more, seed=5)
        arguments, flags, (dout, dlse) = case.arguments(), case.flags(), case.cotangents()
        both, vjp = attnmask.flash_attention_vjp(**arguments, return_lse=True, **flags)
        fwd = attnmask.flash_attention_fwd(**arguments)
        for one, other in zip(both, fwd, strict=True):
            assert one.tobytes() == other.tobytes(), case
        out, lse = laid_out(fwd[0], layout), arrange(fwd[1], "strided" if layout == "heads first" else layout)
        bwd = attnmask.flash_attention_bwd(dout=dout, out=out, lse=lse, dlse=dlse, **arguments, **flags)
        check_form(bwd, arguments, flags, case)
        assert_equal_bits(vjp(dout, dlse), bwd, case)


def test_positional_arguments(isa):
    """Those of `flash_attention` in its order."""
    query, key, value = tensors().values()
    rng = np.random.default_rng(0)
    mask, bias = rng.random((2, 1, 40, 50)) < 0.7, rng.standard_normal((1, 4, 40, 50)).astype(F32)
    rest = (mask, bias, 0.2, 0.25, True, 7, None, None, (9, 3), attnmask.FwdParams(32, 32))
    rest += (attnmask.BwdParams(), 5.0, np.ones(2, F32), False, None, F32)
    by_name = {
        "query": query,
        "key": key,
        "value": value,
        "attention_mask": mask,
        "bias": bias,
        "softmax_scale": 0.2,
        "dropout_prob": 0.25,
        "causal": True,
        "sliding_window": (9, 3),
        "logits_soft_cap": 5.0,
        "softmax_aux": np.ones(2, F32),
        "normalize_output": False,
    }
    keep, dout = attnmask.dropout_keep_mask(7, 0.25, (2, 4, 40, 50)), dout_of(by_name)
    flags = {"grad_bias": True, "grad_softmax_aux": True}
    out, vjp = attnmask.flash_attention_vjp(query, key, value, *rest, **flags)
    lse = attnmask.flash_attention_fwd(query, key, value, *rest)[1]
    right = expected(by_name, dout, None, keep, "positional")
    right.check(vjp(dout))
    right.check(attnmask.flash_attention_bwd(dout, query, key, value, out, lse, *rest, **flags))


def test_vjp_may_be_called_again(isa):
    """It keeps what it needs, and each call stands for itself."""
    arguments = tensors() | {"bias": np.zeros((40, 50), F32)}
    dout = dout_of(arguments)
    both, vjp = attnmask.flash_attention_vjp(**arguments, grad_bias=True, return_lse=True)
    first = vjp(dout)
    bits = [None if each is None else each.tobytes() for each in first]
    dlse = np.ones(both[1].shape, F32)
    vjp(np.zeros_like(dout), dlse)
    del arguments, both
    gc.collect()
    assert [None if each is None else each.tobytes() for each in first] == bits
    assert_equal_bits(first, vjp(dout), "again")
    only, nothing = vjp(0 * dout, dlse), vjp(0 * dout, 0 * dlse)
    assert only.query.any()
    assert not any(each.any() for each in nothing if each is not None)
    total = vjp(dout, dlse)
    for name in ("query", "key", "value", "bias"):
        parts = getattr(first, name) + getattr(only, name)
        np.testing.assert_allclose(getattr(total, name), parts, rtol=1e-4, atol=1e-4)


def test_lists_subclasses_and_numpy_scalars(isa):
    class Subclass(np.ndarray):
        pass

    arguments = tensors(5, 6, dtype=F64) | {"bias": np.ones((5, 6)), "softmax_aux": np.array([1.0, 2.0])}
    dout, dlse = dout_of(arguments), np.ones((2, 4, 5))
    right = expected(arguments | {"causal": True}, dout, dlse)
    flags = {"grad_bias": np.True_, "grad_softmax_aux": True, "causal": True}
    for convert in (np.ndarray.tolist, lambda array: array.view(Subclass)):
        given = {name: convert(array) for name, array in arguments.items()}
        (out, lse), vjp = attnmask.flash_attention_vjp(**given, **flags, return_lse=np.True_)
        assert type(out) is np.ndarray
        got = vjp(convert(dout), convert(dlse))
        check_form(got, arguments, flags, convert)
        right.check(got)
        rest = {"out": convert(out), "lse": convert(lse), "dlse": convert(dlse)}
        right.check(attnmask.flash_attention_bwd(convert(dout), **given, **rest, **flags))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_hints_change_rounding_only(isa, dtype):
    arguments = tensors(70, 150, dtype=dtype) | {"causal": True, "causal_offset": 30}
    right = expected(arguments, dout_of(arguments))
    for q_blocksize, kv_blocksize in itertools.product((None, 1, 64, 2**40), repeat=2):
        right.check(gradients(arguments, bwd_params=attnmask.BwdParams(q_blocksize, kv_blocksize)))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("at", range(7))
@pytest.mark.parametrize("normalize", [True, False])
def test_an_axis_of_length_zero(isa, dtype, normalize, at):
    sizes = [2, 3, 4, 2, 5, 8, 6]
    sizes[at] = 0
    batch, queries, keys, groups, kv_heads, depth, value_depth = sizes
    heads = groups * kv_heads
    shapes = {
        "query": (batch, queries, heads, depth),
        "key": (batch, keys, kv_heads, depth),
        "value": (batch, keys, kv_heads, value_depth),
    }
    arguments = {name: np.ones(shape, dtype) for name, shape in shapes.items()}
    arguments |= {
        "bias": np.zeros((queries, keys), dtype),
        "softmax_aux": np.ones(2, dtype),
        "softmax_scale": 1.0,
        "normalize_output": normalize,
    }
    if heads == 0:
        try:
            attnmask.flash_attention(**arguments)
        except ValueError:
            return
    dout = np.ones((batch, queries, heads, value_depth), dtype)
    got = gradients(arguments, dout)
    check_form(got, arguments, {"grad_bias": True, "grad_softmax_aux": True}, at)
    expected(arguments, dout).check(got)


# The bias and the sinks


@pytest.mark.parametrize("broadcast", list(itertools.product((True, False), repeat=4)), ids=str)
def test_bias_that_is_broadcast(isa, broadcast):
    """Summed over any set of axes, those of length 1 and those that are not there."""
    lengths = (2, 4, 40, 70)
    shape = tuple(1 if one else length for one, length in zip(broadcast, lengths, strict=True))
    rng = np.random.default_rng(1)
    for dtype, more in ((F32, {"causal": True, "causal_offset": 30}), (BF16, {"logits_soft_cap": 3.0})):
        arguments = tensors(40, 70, dtype=dtype) | more
        arguments["bias"] = rng.standard_normal(shape).astype(dtype)
        dout = dout_of(arguments)
        got = gradients(arguments, dout)
        expected(arguments, dout, case=(shape, dtype)).check(got)
        while arguments["bias"].ndim and arguments["bias"].shape[0] == 1:
            arguments["bias"] = arguments["bias"][0]
            fewer = gradients(arguments, dout).bias
            assert fewer.shape == arguments["bias"].shape
            assert fewer.tobytes() == got.bias.tobytes()


@pytest.mark.parametrize("bias_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bias_of_another_dtype(isa, dtype, bias_dtype):
    arguments = tensors(9, 11, depth=1, dtype=dtype)
    rng = np.random.default_rng(0)
    for shape, layout in (((2, 4, 9, 11), "strided"), ((4, 1, 11), "reversed"), ((9, 1), "swapped")):
        arguments["bias"] = arrange(rng.standard_normal(shape).astype(bias_dtype), layout)
        got = gradients(arguments)
        check_form(got, arguments, {"grad_bias": True}, (shape, layout))
        expected(arguments, dout_of(arguments)).check(got)


def test_bias_that_repeats_itself(isa):
    """A view with steps of zero is as large as it says, and so is its gradient."""
    arguments = tensors(9, 11)
    row = np.random.default_rng(0).standard_normal(11).astype(F32)
    whole = gradients(arguments, bias=np.broadcast_to(row, (2, 4, 9, 11))).bias
    assert whole.shape == (2, 4, 9, 11)
    np.testing.assert_allclose(
        whole.sum(axis=(0, 1, 2)), gradients(arguments, bias=row).bias, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_bias_of_minus_infinity_has_no_gradient(isa, dtype):
    arguments = tensors(40, 70, dtype=dtype)
    live = padding(np.random.default_rng(3), 2, 40, 70, 4)
    arguments["bias"] = np.where(live, 0.5, -np.inf).astype(F32)
    got = gradients(arguments)
    assert (got.bias[~live] == 0).all()
    expected(arguments, dout_of(arguments)).check(got)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("normalize", [True, False])
def test_sinks(isa, dtype, normalize):
    arguments = tensors(9, 20, dtype=dtype) | {"causal": True, "normalize_output": normalize}
    dlse = np.random.default_rng(1).standard_normal((2, 4, 9)).astype(lse_dtype(dtype))
    rng = np.random.default_rng(2)
    for shape, kind in itertools.product(((3,), (4, 3), (1,), (4, 1)), (*FLOATS, np.dtype(int))):
        sinks = (3 * rng.standard_normal(shape)).astype(kind)
        got = gradients(arguments, dlse=dlse, softmax_aux=sinks).softmax_aux
        assert (got.shape, got.dtype) == (shape, F64 if kind.kind == "i" else kind)
        given = arguments | {"softmax_aux": sinks.astype(got.dtype)}
        expected(given, dout_of(arguments), dlse).check(FlashAttentionGrads(None, None, None, None, got))


def test_sinks_that_are_none_or_nothing(isa):
    arguments = tensors(9, 11)
    for shape in ((0,), (4, 0)):
        got = gradients(arguments, softmax_aux=np.zeros(shape, F32))
        assert (got.softmax_aux.shape, got.softmax_aux.dtype) == (shape, F32)
        assert_equal_bits(got._replace(softmax_aux=None), gradients(arguments), shape)
    got = gradients(arguments, softmax_aux=np.array([-np.inf, 1, -np.inf], F32)).softmax_aux
    assert got[1] != 0
    assert (got[[0, 2]] == 0).all()


# Rows without a live pair, and keys


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("more", [{}, {"logits_soft_cap": 3.0}, {"normalize_output": False}], ids=str)
@pytest.mark.parametrize("sinks", [False, True])
def test_dead_rows_and_keys_get_zeros(isa, dtype, more, sinks):
    """Exact ones; and all that a row's sinks are good for then is its lse."""
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


def test_the_largest_logits_share_the_maximum(isa):
    """Unnormalized: equal logits do so evenly, sinks among them."""
    arguments = tensors(5, 70) | {"softmax_scale": 0.0, "normalize_output": False}
    for sinks in (None, np.array([2.0, 1.0], F32), np.array([3.0, -1.0], F32), np.array([2.0, 2.0], F32)):
        bias = np.where(np.arange(70) % 23 == 1, 2, np.arange(70) % 2).astype(F32)
        given = arguments | {"bias": bias, "softmax_aux": sinks}
        expected(given, dout_of(given), case=sinks).check(gradients(given))


def test_extreme_logits(isa):
    arguments = tensors(20, 80)
    arguments["bias"] = np.where(np.arange(80) % 7 == 0, 0, -1e4).astype(F32)
    expected(arguments, dout_of(arguments)).check(gradients(arguments))
    rising = np.arange(80, dtype=F32) * 200
    for bias in (rising, rising[::-1]):
        given = arguments | {"bias": bias, "softmax_scale": 0.0}
        got = gradients(given)
        exact, _ = ref.flash_attention_vjp(dout_of(given), **given)
        for name in ("query", "key", "value", "bias"):
            np.testing.assert_allclose(getattr(got, name), getattr(exact, name), rtol=1e-4, atol=1e-4)


NEAR = {F32: 1e-5, F64: 1e-13}
SHIFTED = [
    {},
    {"causal": True, "causal_offset": 30},
    {"sliding_window": (9, 40), "dropout_prob": 0.3},
    {"softmax_aux": np.array([1.0, -3.0])},
    {"softmax_aux": np.array([1.0, -3.0]), "normalize_output": False},
]


@pytest.mark.parametrize("more", SHIFTED, ids=str)
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_what_all_logits_of_a_row_share_does_not_count(isa, dtype, more):
    """As long as it can be added without rounding, as here to integers; though lse has hardly a digit left then."""
    arguments = {
        name: np.rint(array) if name != "value" else array
        for name, array in tensors(20, 80, dtype=dtype).items()
    }
    arguments |= more | {"softmax_scale": 1.0}
    dlse = np.random.default_rng(1).standard_normal((2, 4, 20)).astype(dtype)
    plain = gradients(arguments, dlse=dlse, bias=np.zeros((20, 1), dtype))
    for size in np.array([1, -1], dtype) / np.finfo(dtype).eps / 4:
        given = arguments | {"bias": np.full((20, 1), size)}
        if "softmax_aux" in more:
            given["softmax_aux"] = more["softmax_aux"] + size
        for name, one, other in zip(NAMES, gradients(given, dlse=dlse), plain, strict=True):
            if one is not None:
                np.testing.assert_allclose(one, other, rtol=NEAR[dtype], atol=10 * NEAR[dtype], err_msg=name)


SWALLOWED = [
    *SHIFTED[:3],
    {"softmax_aux": np.array([1.0, -3.0])},
    {"logits_soft_cap": 1e30},
    {"normalize_output": False},
]


@pytest.mark.parametrize("more", SWALLOWED, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_bias_beside_which_products_are_nothing(isa, dtype, more):
    """Rows with no other logits than, say, the least number of the type: all weigh the same."""
    arguments = tensors(40, 80, dtype=dtype) | more
    wide = accumulator(dtype)
    keep = attnmask.dropout_keep_mask(0, 0.3, (2, 4, 40, 80)) if "dropout_prob" in more else None
    dout, dlse = dout_of(arguments), np.random.default_rng(1).standard_normal((2, 4, 40)).astype(wide)
    large = np.arange(40) % 5 == 2
    plain = gradients(arguments, dout, dlse, bias=np.zeros((40, 1), wide))
    for size in (np.finfo(wide).min, np.finfo(wide).max, 1e37, -1e37):
        given = arguments | {"bias": np.where(large[:, None], wide(size), 0)}
        if size > 0 and "softmax_aux" in more:
            given["softmax_aux"] = np.array([size, -3.0])
        got = gradients(given, dout, dlse)
        exact, sizes = ref.flash_attention_vjp(dout, dlse, **given, keep=keep, dtype=wide)
        for name in ("query", "key", "value", "bias", "softmax_aux"):
            gradient, right, scale = (getattr(each, name) for each in (got, exact, sizes))
            if gradient is None:
                continue
            limit = 2 * float(ml_dtypes.finfo(dtype).eps) + (8e-15 if dtype == F64 else 8e-5)
            error = worst(gradient, right, scale, gradient.dtype)
            assert error <= limit, (name, size, error)
        if "softmax_aux" not in given:
            assert got.query[:, ~large].tobytes() == plain.query[:, ~large].tobytes()


# Dead pairs


def touched_by(live, rows):
    """The keys [B, Hkv, Tk] with a live pair in one of the rows [B, H, Tq]; two heads read each."""
    keys = (live & rows[..., None]).any(axis=2)
    return keys.reshape(keys.shape[0], -1, 2, keys.shape[2]).any(axis=2)


def assert_same_outside(got, clean, live, rows, case) -> None:
    """The gradients of all rows but these, and of keys that none of these has a live pair with."""
    keys = touched_by(live, rows)
    for name, gradient, other in zip(NAMES[:3], got, clean, strict=False):
        same = ~rows if name == "query" else ~keys
        one, other = (each.swapaxes(1, 2)[same] for each in (gradient, other))
        assert one.tobytes() == other.tobytes(), (*case, name)
    if got.bias is not None and got.bias.shape == live.shape:
        assert got.bias[~rows].tobytes() == clean.bias[~rows].tobytes(), (*case, "bias")


@pytest.mark.parametrize("kind", LIMITS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dead_pairs_have_no_influence(isa, dtype, kind):
    """Poison in keys, values, queries and dout reaches what it has a live pair with, by one step more than forward."""
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
    """A slope of infinity times what stands for poison would be NaN."""
    arguments = tensors(50, 50, dtype=dtype) | {"causal": True, "bias": np.zeros((1, 1, 1, 50), dtype)}
    arguments["bias"][..., 5] = -60  # a weight that keeps what follows out of the results
    arguments["value"][:, 5] = 1e10
    dout = dout_of(arguments)
    dout[:, 20, ::2] = 1e30  # of one of two heads that share keys, whose infinities might cancel out
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


@pytest.mark.parametrize("poison", [math.nan, "huge"], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("flat", [False, True])
def test_packed_sequences_do_not_reach_each_other(isa, dtype, poison, flat):
    q_ends, k_ends = np.array([0, 7, 7, 40, 90, 101]), np.array([0, 20, 33, 33, 90, 140])
    case = Case(dtype, 101, 140, 16, 20, 1, (4, 2), packing="flat" if flat else "packed")
    arguments = case.arguments() | {"cum_seqlens_q": q_ends, "cum_seqlens_k": k_ends}
    ends = {"query": q_ends, "key": k_ends, "value": k_ends, "dout": q_ends}
    dout = dout_of(arguments)
    for more in ({}, {"causal": True, "causal_offset": "bottom-right"}):
        clean = gradients(arguments, dout, **more)
        for index, name in itertools.product(range(5), ends):
            given = arguments | more | {"dout": dout}
            given[name] = given[name].copy()
            span = slice(ends[name][index], ends[name][index + 1])
            given[name][span if flat else (slice(None), span)] = poison_of(dtype, poison)
            got = gradients(given, given.pop("dout"))
            for field in ("query", "key", "value"):
                one, other = (
                    each if flat else each[0] for each in (getattr(got, field), getattr(clean, field))
                )
                rest = np.ones(len(one), bool)
                rest[ends[field][index] : ends[field][index + 1]] = False
                assert one[rest].tobytes() == other[rest].tobytes(), (isa, dtype, more, index, name, field)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_poison_in_a_dead_bias(isa, dtype):
    arguments = tensors(40, 70, dtype=dtype)
    live = padding(np.random.default_rng(3), 2, 40, 70, 4)
    bias = np.random.default_rng(4).standard_normal((2, 4, 40, 70)).astype(dtype)
    clean = gradients(arguments, attention_mask=live, bias=bias)
    for poison in POISON:
        poisoned = np.where(live, bias, np.array(poison_of(dtype, poison), dtype))
        for mask in (live, MaskInfo.from_attention_mask(live)):
            got = gradients(arguments, attention_mask=mask, bias=poisoned)
            assert_equal_bits(got, clean, (isa, dtype, poison))


@pytest.mark.parametrize("sinks", [None, [1.0]], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_poison_in_the_dlse_of_dead_rows(isa, dtype, sinks):
    """Whose lse is minus infinity, or depends on nothing but sinks."""
    arguments = tensors(40, 30, dtype=dtype) | {"causal": True, "causal_offset": "bottom-right"}
    arguments["softmax_aux"] = None if sinks is None else np.array(sinks, dtype)
    dlse = np.ones((2, 4, 40), lse_dtype(dtype))
    clean = gradients(arguments, dlse=dlse)
    for poison in (math.nan, math.inf):
        dlse[..., :10] = poison
        got = gradients(arguments, dlse=dlse)
        assert_equal_bits(got._replace(softmax_aux=None), clean._replace(softmax_aux=None), poison)
        assert sinks is None or not np.isfinite(got.softmax_aux.astype(F64)).any()


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
                rows[0, :2] = live[0, :2, :, at]  # two heads read it
            else:
                rows[0, 0, at] = live[0, 0, at].any()
            got = gradients(given, given.pop("dout"))
            case = (isa, dtype, shape, name, at)
            assert_same_outside(got, clean, live, rows, case)
            if not rows.any():
                continue
            assert np.isnan(got.query.swapaxes(1, 2)[rows].astype(F64)).all(), case
            if normalize or name in (
                "key",
                "query",
            ):  # else only the largest logit moves the rest, and no sink is it
                assert np.isnan(got.softmax_aux.astype(F64)).all(), case
            reached = touched_by(live, rows)
            if normalize:
                assert np.isnan(got.key.swapaxes(1, 2)[reached].astype(F64)).all(), case
            if name == "value":
                assert_same_outside(
                    got._replace(key=clean.key, query=clean.query), clean, live, np.zeros_like(rows), case
                )
            elif name == "dout":  # its own channel only
                column = got.value.swapaxes(1, 2)[reached].astype(F64)
                assert np.isnan(column[:, 7]).all(), case
                assert np.isfinite(np.delete(column, 7, axis=1)).all(), case
            else:
                assert np.isnan(got.value.swapaxes(1, 2)[reached].astype(F64)).all(), case


# Dropout


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("packing", [None, "flat"])
@pytest.mark.parametrize("seed", [None, 1, 2**32 + 1])
def test_dropout_is_that_of_the_forward(isa, dtype, packing, seed):
    """With equal weights and the identity for dout, the mask itself comes out as the gradient of the values."""
    prob, (batch, heads, queries, keys) = 0.25, (1 if packing else 2, 2, 33, 64)
    query = np.zeros((batch, queries, heads, 8), dtype)
    key, value = np.zeros((batch, keys, heads, 8), dtype), np.ones((batch, keys, heads, queries), dtype)
    dout = np.broadcast_to(np.eye(queries).astype(dtype)[None, :, None], (batch, queries, heads, queries))
    live, more = np.ones((queries, keys), bool), {}
    if packing:
        query, key, value, dout = query[0], key[0], value[0], dout[0]
        more = {"cum_seqlens_q": [0, 10, 11, 33], "cum_seqlens_k": [0, 16, 32, 64]}
        live = ref.live_pairs((1, 1, queries, keys), **more)[0, 0]
    _, vjp = attnmask.flash_attention_vjp(query, key, value, dropout_prob=prob, dropout_seed=seed, **more)
    keep = attnmask.dropout_keep_mask(seed, prob, (batch, heads, queries, keys))
    got = vjp(dout).value.reshape(batch, keys, heads, queries).transpose(0, 2, 3, 1)
    np.testing.assert_array_equal(got != 0, keep & live)
    weights = np.where(keep & live, 1 / live.sum(axis=1, keepdims=True) / (1 - prob), 0)
    eps = float(ml_dtypes.finfo(dtype).eps)
    logit = np.log(keys)  # weights come from lse: its rounding is theirs
    np.testing.assert_allclose(got.astype(F64), weights, rtol=2 * (1 + logit) * eps + 1e-6 * (dtype != F64))


# Merging


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("sinks", [False, True])
def test_the_gradient_of_merged_parts_is_that_of_the_whole(isa, dtype, sinks):
    """Through out and lse of each part, one of them dead for some rows."""
    arguments = tensors(20, 90, dtype=dtype) | {"causal": True}
    aux = {"softmax_aux": np.array([0.3, 1.0], dtype)} if sinks else {}
    dout = dout_of(arguments)
    dlse = np.random.default_rng(1).standard_normal((2, 4, 20)).astype(dtype)
    whole = gradients(arguments, dout, dlse, causal_offset=50, **aux)
    results, vjps = [], []
    cuts = list(itertools.pairwise((0, 13, 60, 90)))
    for start, end in cuts:
        part = arguments | {name: arguments[name][:, start:end] for name in ("key", "value")}
        more = aux | {"grad_softmax_aux": True} if sinks and not start else {}
        result, vjp = attnmask.flash_attention_vjp(**part, causal_offset=50 - start, return_lse=True, **more)
        results.append(result)
        vjps.append(vjp)
    _, merge_vjp = attnmask.merge_attention_states_vjp(*zip(*results, strict=True))
    parts = [vjp(*each) for vjp, *each in zip(vjps, *merge_vjp(dout, dlse), strict=True)]
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == F32 else {"rtol": 1e-12, "atol": 1e-12}
    np.testing.assert_allclose(sum(part.query for part in parts), whole.query, **near)
    for name in ("key", "value"):
        joined = np.concatenate([getattr(part, name) for part in parts], axis=1)
        np.testing.assert_allclose(joined, getattr(whole, name), **near)
    if sinks:
        np.testing.assert_allclose(parts[0].softmax_aux, whole.softmax_aux, **near)


@pytest.mark.parametrize("shift", [0, 2000, -2000])
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_parts_of_the_keys_with_the_lse_of_all(isa, dtype, shift):
    """As in ring attention: what all parts give to queries adds up, though no part sums up to lse."""
    arguments = tensors(40, 90, dtype=dtype)
    dout, shift = dout_of(arguments), np.full((1, 1), shift, dtype)
    whole = gradients(arguments, dout)
    out, lse = attnmask.flash_attention_fwd(**arguments, bias=shift)
    parts = []
    for keys in (slice(0, 30), slice(30, 31), slice(31, 90)):
        part = {name: array if name == "query" else array[:, keys] for name, array in arguments.items()}
        parts.append(attnmask.flash_attention_bwd(dout, **part, out=out, lse=lse, bias=shift))
    rounding = 4 * np.finfo(dtype).eps * max(1, abs(shift).item())  # of lse, and so of all weights
    near = {"rtol": rounding + 1e-13, "atol": 50 * rounding}
    np.testing.assert_allclose(sum(part.query for part in parts), whole.query, **near)
    for name in ("key", "value"):
        joined = np.concatenate([getattr(part, name) for part in parts], axis=1)
        np.testing.assert_allclose(joined, getattr(whole, name), **near)


# The same bits

SHARED = (
    "[1, H, Tq, Tk]",
    "[1, 1, Tq, Tk]",
    "[B, 1, Tq, 1]",
    "[1, H, Tq, 1]",
    "[H, 1, Tk]",
    "[1, 1, 1, Tk]",
    "[]",
)
SHARED_BIAS = [
    Case(dtype, 300, 350, 16, 16, 2, (4, 2), causal=True, offset=40, bias=shape, seed=1)
    for dtype, shape in zip(itertools.cycle([F32, BF16, F64]), SHARED, strict=False)
] + [  # some tiles of keys to a task
    Case(dtype, 70, 2100, 7, 9, 2, (8, 4), causal=True, offset="bottom-right", bias=shape, seed=1)
    for dtype, shape in ((F32, "[H, 1, Tk]"), (BF16, "[H, 1, Tk]"), (BF16, "[1, 1, Tq, Tk]"))
]


@pytest.mark.parametrize("steady", [*STEADY, *SHARED_BIAS], ids=str)
def test_any_number_of_threads_gives_the_same_bits(isa, set_threads, steady):
    case = GradientCase(
        **{name: getattr(steady, name) for name in steady.__dataclass_fields__}, with_dlse=True
    )
    arguments = case.arguments()
    set_threads(1)
    got = run(case, arguments)
    expected_of(case).check(got)
    for threads in (3,) if SANITIZED else (2, 3, 8):
        set_threads(threads)
        assert_equal_bits(run(case, arguments), got, (isa, threads, case))


@pytest.mark.parametrize("poison", [0, math.nan], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_tasks_of_many_tiles(isa, set_threads, dtype, poison):
    """Many heads of narrow masks go by 16 tiles at a time, one head alone by one; some rows see all keys, or none."""
    rng = np.random.default_rng(0)
    tokens, heads = 1280, 64
    query, key, value, dout = (rng.standard_normal((1, tokens, heads, 4)).astype(dtype) for _ in range(4))
    distance = np.arange(tokens)[:, None] - np.arange(tokens)
    mask = (distance >= 0) & (distance < 60)
    mask[[7 * 64 + 5, 9 * 64 + 1, 18 * 64]] = True
    mask[130:400] = False
    mask[:, 700:900] = False
    key[0, 77:80] = poison

    def gradient(heads):
        arguments = {"query": query, "key": key, "value": value}
        arguments = {name: array[:, :, heads] for name, array in arguments.items()}
        return gradients(arguments, dout[:, :, heads], attention_mask=mask)

    set_threads(1)
    whole = gradient(slice(None))
    for threads in (2, 5):
        set_threads(threads)
        assert_equal_bits(gradient(slice(None)), whole, (isa, threads))
    near = {F32: 1e-5, BF16: 2**-7}[dtype]
    for head in (0, 37, 63):
        for name, got, alone in zip(NAMES, whole, gradient(slice(head, head + 1)), strict=True):
            if got is None:
                continue
            one, other = got[:, :, head].astype(F32), alone[:, :, 0].astype(F32)
            size = np.nanmax(np.abs(other))  # of the sums, whose terms cancel in some places
            np.testing.assert_allclose(one, other, rtol=near, atol=near * size, err_msg=f"{name} of {head}")
    seen = mask[:, 77:80].any(axis=1) & np.isnan(poison)
    np.testing.assert_array_equal(np.isnan(whole.query.astype(F32)).any(axis=(0, 2, 3)), seen)
    reached = mask[seen].any(axis=0)
    np.testing.assert_array_equal(np.isnan(whole.value.astype(F32)).any(axis=(0, 2, 3)), reached)


# Other libraries


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_beside_torch(isa, causal, dtype):
    torch = pytest.importorskip("torch")
    arguments = tensors(50, 50, dtype=np.dtype(dtype))
    dout = dout_of(arguments)
    inputs = [torch.from_numpy(array).requires_grad_() for array in arguments.values()]
    heads_first = [array.transpose(1, 2) for array in inputs]
    heads_first[1:] = [array.repeat_interleave(2, dim=1) for array in heads_first[1:]]
    out = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=causal).transpose(1, 2)
    theirs = torch.autograd.grad(out, inputs, torch.from_numpy(dout))
    for one, other in zip(gradients(arguments, dout, causal=causal), theirs, strict=False):
        np.testing.assert_allclose(one, other.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_beside_jax(isa, causal):
    jax = pytest.importorskip("jax")
    arguments = tensors(50, 50)
    arguments["value"] = arguments["value"][..., :16]
    dout = dout_of(arguments)
    bias = np.random.default_rng(0).standard_normal((4, 50, 50)).astype(F32)

    def attend(query, key, value, bias):
        return jax.nn.dot_product_attention(query, key, value, bias=bias[None], is_causal=causal)

    _, vjp = jax.vjp(attend, *map(jax.numpy.asarray, (*arguments.values(), bias)))
    ours = gradients(arguments, dout, causal=causal, bias=bias)
    for one, other in zip(ours, vjp(jax.numpy.asarray(dout)), strict=False):
        np.testing.assert_allclose(one, np.asarray(other), rtol=1e-4, atol=1e-5)


# Bad input

OUT, LSE = zeros(B, TQ, H, DV), zeros(B, H, TQ)
ROWS = {"dout": OUT, "out": OUT, "lse": LSE, "dlse": LSE}
NO_ROWS = ["x", OUT.astype(F64), OUT.astype(F16), OUT.astype(int), OUT.astype(complex), np.zeros((2, 3), F64)]
BAD_ROWS: dict[type, dict[str, list]] = {
    TypeError: {
        "dout": [*NO_ROWS, None],
        "out": [*NO_ROWS, None],
        "lse": [*NO_ROWS, None],
        "dlse": NO_ROWS,
    },
    ValueError: {
        "dout": [zeros(B, TQ, H, DV + 1), zeros(B, TQ, H, D), OUT[0], OUT.swapaxes(1, 2), zeros(1, *OUT.shape)],
        "out": [zeros(B, TQ, H, DV + 1), zeros(B, TQ + 1, H, DV), OUT[:1], OUT[0], zeros(1, *OUT.shape)],
        "lse": [LSE.swapaxes(1, 2), LSE[0], LSE[..., None], zeros(B, H, TQ + 1), zeros(1, H, TQ), OUT],
        "dlse": [LSE.swapaxes(1, 2), LSE[0], LSE[..., None], zeros(B, H, TQ + 1), zeros(1, H, TQ), zeros()],
    },
}  # fmt: skip


def raises(error, function, *args, **kwargs) -> str:
    with pytest.raises(error) as raised:
        function(*args, **kwargs)
    return str(raised.value)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("error", BAD_ROWS)
def test_bad_results(name, error):
    """Named, with what is expected and what came."""
    _, vjp = attnmask.flash_attention_vjp(**GOOD)
    for bad in BAD_ROWS[error][name]:
        rows = ROWS | {name: bad}
        message = raises(error, attnmask.flash_attention_bwd, **rows, **GOOD)
        assert message.startswith(f"{name} must be "), (name, bad, message)
        assert ", got " in message
        if name in ("dout", "dlse"):
            assert raises(error, vjp, rows["dout"], rows["dlse"]) == message


def test_bad_results_without_a_batch():
    packed = PACKED | {name: PACKED[name][0] for name in ("query", "key", "value")}
    (out, lse), vjp = attnmask.flash_attention_vjp(**packed, return_lse=True)
    assert vjp(out, lse).query.shape == packed["query"].shape
    for bad in (out[None], out[:-1], out.swapaxes(0, 1)):
        assert raises(ValueError, vjp, bad).startswith(f"dout must be of shape {out.shape}, got ")
    for bad in (lse[None], lse.T):
        assert raises(ValueError, vjp, out, bad).startswith(f"dlse must be of shape {lse.shape}, got ")
    rows = {"dout": out, "out": out[None], "lse": lse}
    assert raises(ValueError, attnmask.flash_attention_bwd, **rows, **packed).startswith(
        "out must be of shape "
    )


@pytest.mark.parametrize("name", sorted(set(BAD) - {"out", "return_lse"}))
@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_bad_input(name, error):
    """What the forward refuses."""
    good, bad = BAD[name]
    rows = ROWS if good["query"].shape[0] == B else {key: array[:1] for key, array in ROWS.items()}
    for value in bad.get(error, []):
        given = good | {name: value}
        message = raises(error, attnmask.flash_attention, **given)
        assert raises(error, attnmask.flash_attention_vjp, **given) == message
        with pytest.raises(error):  # which may be that the result does not fit the inputs
            attnmask.flash_attention_bwd(**rows, **given)


@pytest.mark.parametrize("name", ["grad_bias", "grad_softmax_aux", "return_lse"])
def test_bad_flags(name):
    for flag in NO_FLAG:
        assert name in raises(TypeError, attnmask.flash_attention_vjp, **GOOD, **{name: flag})
        if name != "return_lse":
            assert name in raises(TypeError, attnmask.flash_attention_bwd, **ROWS, **GOOD, **{name: flag})


@pytest.mark.parametrize("name", ["bias", "softmax_aux"])
def test_the_gradient_of_what_is_not_there(name):
    message = f"grad_{name} must be False without {name}, got True"
    assert raises(ValueError, attnmask.flash_attention_vjp, **GOOD, **{f"grad_{name}": True}) == message
    assert (
        raises(ValueError, attnmask.flash_attention_bwd, **ROWS, **GOOD, **{f"grad_{name}": True}) == message
    )


def test_results_of_other_inputs():
    """Arguments that differ from the forward's in shape."""
    for more in (
        {"query": zeros(B, TQ + 1, H, D)},
        {"query": zeros(B, TQ, 2 * H, D)},
        {"value": zeros(B, TK, 2, DV + 1)},
        {name: GOOD[name].astype(F64) for name in ("query", "key", "value")},
    ):
        with pytest.raises((TypeError, ValueError), match=r"^(dout|out|lse) must be "):
            attnmask.flash_attention_bwd(**ROWS, **(GOOD | more))


def test_an_array_that_raises():
    class Raises:
        def __array__(self, dtype=None, copy=None):
            raise ZeroDivisionError("not today")

    for name in ROWS:
        with pytest.raises(ZeroDivisionError, match="not today"):
            attnmask.flash_attention_bwd(**(ROWS | {name: Raises()}), **GOOD)
