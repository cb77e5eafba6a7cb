"""attnmask.operations: both operators for all pairs of arguments, the registry, and the helpers compared with NumPy."""

import math
import pickle
import sys

import ml_dtypes
import numpy as np
import pytest
from environment import SANITIZED, python
from flash_bad_input import BAD, GOOD
from flash_cases import BF16, F16, F32, F64, FLOATS, NO_PAIR, limits, live_of, tensors
from flash_expected import CASES, expected, expected_of
from layouts import LAYOUTS, arrange

import attnmask
from attnmask import MaskInfo
from attnmask.operations import (
    FlashAttention,
    OperationImpl,
    OperationMetadata,
    OperationOutput,
    OperationRegistry,
    VanillaAttention,
)

BOTH = ("flash", "vanilla")
RNG = np.random.default_rng(0)


def attend(name: str, arguments: dict, metadata=None) -> OperationOutput:
    """The output of an operator for the arguments of `attnmask.flash_attention`."""
    arguments = dict(arguments)
    mask = arguments.pop("attention_mask", None)
    return OperationRegistry.create(name, metadata)(mask=mask, **arguments)


def wide(array) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


# Both operators


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("case", CASES[::20] if SANITIZED else CASES[::2], ids=lambda case: str(case.seed))
def test_all_pairs_of_arguments(case, name):
    """The error is within that of the kernels, whether scale and dropout are arguments or metadata."""
    arguments = case.arguments()
    metadata = OperationMetadata()
    if case.seed % 2:
        said = {key: arguments.pop(key) for key in ("softmax_scale", "dropout_prob")}
        metadata = OperationMetadata(**said, runtime_softmax_dtype=case.logits_dtype)
    result = attend(name, arguments | case.hints(), metadata)
    expected_of(case).check(result.attention_outputs, result.lse)
    assert all(array is None or type(array) is np.ndarray for array in result)
    assert result.attention_outputs.flags.c_contiguous
    assert result.attention_outputs.dtype == case.dtype


@pytest.mark.parametrize("case", CASES[:: 20 if SANITIZED else 5], ids=lambda case: str(case.seed))
def test_weights(case):
    """Weights of dead pairs are zero; without sinks and dropout rows sum to one; the output is the weighted sum."""
    arguments = case.arguments()
    out, weights, lse = attend("vanilla", arguments)
    assert attend("flash", arguments).attention_weights is None
    assert weights.dtype == case.dtype
    assert weights.shape == case.pairs[case.flat :]
    query, key, value = (wide(arguments[name]) for name in ("query", "key", "value"))
    live = live_of(arguments, case.pairs) if case.packing is None else np.ones(case.pairs, bool)
    assert (weights.reshape(case.pairs)[~live] == 0).all()

    near = {"rtol": 0, "atol": 40 * float(ml_dtypes.finfo(case.dtype).eps)}
    if case.normalize and not case.sinks and not case.dropout:
        sums = wide(weights).sum(axis=-1)
        np.testing.assert_allclose(sums, np.where(np.isneginf(lse), 0, 1), **near)
    assert query.shape[-2] % key.shape[-2] == 0
    values = value.repeat(query.shape[-2] // key.shape[-2], axis=-2).swapaxes(-3, -2)
    sums = (wide(weights) @ values).swapaxes(-3, -2)
    near["atol"] *= max(1, float(np.max(abs(wide(weights)) @ abs(values), initial=0)))
    np.testing.assert_allclose(wide(out), sums, **near)


@pytest.mark.repeats
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", ["causal", "padding mask", "segment info", "dense info", "bias", "window"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("name", BOTH)
def test_dead_pairs_have_no_influence(name, poison, kind, dtype):
    shape = (2, 4, 37, 45)
    arguments = tensors(37, 45, dtype=dtype) | limits(kind, shape)
    live = live_of(arguments, shape)
    clean = attend(name, arguments)
    bad = np.random.default_rng(1).random((2, 45, 2)) < 0.1  # [B, Tk, Hkv]
    touched = (live & bad.swapaxes(1, 2).repeat(2, axis=1)[:, :, None]).any(axis=3)
    assert touched.any()
    assert not touched.all()
    for tensor in ("key", "value"):
        poisoned = arguments[tensor].copy()
        poisoned[bad] = poison
        got = attend(name, arguments | {tensor: poisoned})
        rows = ~touched.swapaxes(1, 2)
        near = 4 * float(ml_dtypes.finfo(dtype).eps)
        np.testing.assert_allclose(
            wide(got.attention_outputs)[rows], wide(clean.attention_outputs)[rows], rtol=near, atol=near
        )
        if tensor == "value" and math.isnan(poison):
            assert np.isnan(wide(got.attention_outputs)[~rows]).all()


@pytest.mark.repeats
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", NO_PAIR)
@pytest.mark.parametrize("name", BOTH)
def test_a_row_without_a_live_pair(name, kind, dtype):
    arguments = tensors(40, 70, dtype=dtype) | NO_PAIR[kind](17, (2, 4, 40, 70))
    for more in ({}, {"softmax_aux": np.array([0.5, -1.0])}):
        result = attend(name, arguments | more)
        assert (result.attention_outputs[:, 17] == 0).all()
        assert name == "flash" or (result.attention_weights[:, :, 17] == 0).all()
        expected(arguments | more).check(result.attention_outputs, result.lse)


@pytest.mark.parametrize("at", range(7))
@pytest.mark.parametrize("name", BOTH)
def test_an_axis_of_length_zero(name, at):
    sizes = [2, 3, 4, 2, 5, 8, 6]
    sizes[at] = 0
    batch, queries, keys, groups, kv_heads, depth, value_depth = sizes
    heads = groups * kv_heads
    out, weights, lse = OperationRegistry.create(name)(
        np.ones((batch, queries, heads, depth)),
        np.ones((batch, keys, kv_heads, depth)),
        np.ones((batch, keys, kv_heads, value_depth)),
    )
    assert out.shape == (batch, queries, heads, value_depth)
    assert (out == (keys > 0)).all()
    assert lse.shape == (batch, heads, queries)
    assert weights is None or weights.shape == (batch, heads, queries, keys)


@pytest.mark.parametrize("runtime", FLOATS, ids=str)
@pytest.mark.parametrize("name", BOTH)
def test_runtime_dtype(name, runtime):
    """Inputs of any dtypes are converted to one, which is that of the results."""
    inputs = tensors(9, 11, dtype=F64) | {"bias": RNG.standard_normal((9, 11))}
    mixed = inputs | {"query": inputs["query"].astype(F16), "key": inputs["key"].astype(BF16)}
    result = attend(name, mixed, OperationMetadata(runtime_dtype=runtime))
    assert result.attention_outputs.dtype == runtime
    assert result.lse.dtype == (F64 if runtime == F64 else F32)
    converted = {key: mixed[key].astype(runtime) for key in ("query", "key", "value")}
    expected(mixed | converted).check(result.attention_outputs, result.lse)
    huge = inputs | {"value": np.full(inputs["value"].shape, 1e300)}
    assert np.isposinf(wide(attend(name, huge, OperationMetadata("float16")).attention_outputs)).all()


def test_runtime_softmax_dtype():
    """Wider logits bring float32 close to exact results; narrower ones do not make results worse."""
    arguments = tensors(50, 60, dtype=F32)
    exact = attend("vanilla", {key: wide(array) for key, array in arguments.items()}).attention_outputs
    usual = attend("vanilla", arguments)
    wider = attend("vanilla", arguments, OperationMetadata(runtime_softmax_dtype=np.float64))
    np.testing.assert_array_equal(wider.attention_outputs, exact.astype(F32))
    assert (usual.attention_outputs != wider.attention_outputs).any()
    assert (wider.attention_weights.dtype, wider.lse.dtype) == (F32, F32)
    for narrow in (F16, BF16, "bfloat16", F32):
        same = attend("vanilla", arguments, OperationMetadata(runtime_softmax_dtype=narrow))
        np.testing.assert_array_equal(same.attention_outputs, usual.attention_outputs)
        again = attend("vanilla", arguments | {"logits_dtype": np.float64}, OperationMetadata(F32, narrow))
        np.testing.assert_array_equal(again.attention_outputs, wider.attention_outputs)


@pytest.mark.parametrize("name", BOTH)
def test_a_call_goes_before_the_metadata(name):
    arguments = tensors(9, 11)
    metadata = OperationMetadata(softmax_scale=9.0, dropout_prob=0.9)
    got = attend(name, arguments | {"softmax_scale": 0.1, "dropout_prob": 0.0}, metadata)
    expected(arguments | {"softmax_scale": 0.1}).check(got.attention_outputs, got.lse)


@pytest.mark.parametrize("name", BOTH)
def test_heads_of_the_keys(name):
    """A mask and a bias with the two heads of the keys, for four heads of queries."""
    arguments = tensors(9, 11)
    mask, bias = RNG.random((2, 2, 9, 11)) < 0.5, RNG.standard_normal((1, 2, 1, 11))
    got = attend(name, arguments | {"attention_mask": mask, "bias": bias})
    each = {"attention_mask": mask.repeat(2, axis=1), "bias": bias.repeat(2, axis=1)}
    expected(arguments | each).check(got.attention_outputs, got.lse)


@pytest.mark.parametrize("name", BOTH)
def test_lists_and_positions(name):
    query = [[[[0.0]], [[0.0]]]]
    result = OperationRegistry.create(name)(query, query, [[[[1.0]], [[3.0]]]], [[1, 1], [0, 1]], None, True)
    np.testing.assert_allclose(result.attention_outputs.ravel(), [1, 3])


@pytest.mark.parametrize("argument", BAD)
@pytest.mark.parametrize("name", BOTH)
def test_bad_input(name, argument):
    """Both operators refuse what flash attention refuses, with the same error."""
    good, bad = BAD[argument]
    for value in bad:
        with pytest.raises(Exception, match=" must ") as error:
            attnmask.flash_attention(**good | {argument: value})
        with pytest.raises(
            type(error.value), match=rf"\b(query|key|value|cum_seqlens_[qk]|{argument})\b.* must"
        ):
            attend(name, good | {argument: value})


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(("unknown", "advice"), [
    ("out", ""), ("return_lse", ""), ("nonsense", ""),
    ("attention_mask", "; write mask=$"), ("is_causal", "; write causal=$"), ("scale", "; write softmax_scale=$"),
])  # fmt: skip
def test_unknown_arguments(name, unknown, advice):
    with pytest.raises(TypeError, match=rf"more must be of .*sliding_window.*, got '{unknown}'{advice}"):
        OperationRegistry.create(name)(**GOOD, **{unknown: None})


# Metadata and output


def test_metadata():
    default = OperationMetadata()
    assert (default.runtime_dtype, default.backend, default.dropout_prob) == (None, None, 0.0)
    given = OperationMetadata(">f2", "bfloat16", np.float32(0.5), 0, "cpu", {"dp": 2})
    assert given.runtime_dtype == F16
    assert given.runtime_dtype.isnative
    assert given.runtime_softmax_dtype == BF16
    assert (type(given.softmax_scale), type(given.dropout_prob)) == (float, float)
    assert pickle.loads(pickle.dumps(given)) == given != default
    with pytest.raises(AttributeError):
        given.mesh = None


BAD_METADATA = [
    (ValueError, "runtime_dtype", [int, bool, complex, object, "S4", np.longdouble]),
    (ValueError, "runtime_softmax_dtype", [np.int32]),
    (ValueError, "softmax_scale", [math.nan]),
    (TypeError, "backend", [3, b"cpu", object()]),
    (TypeError, "mesh", [3, "dp", ("dp", 2), {"dp": 1.5}]),
    (ValueError, "mesh", [{"dp": 0}]),
]


@pytest.mark.parametrize(("error", "name", "values"), BAD_METADATA)
def test_bad_metadata(error, name, values):
    for value in values:
        with pytest.raises(error, match=rf"^{name}\b.* must .*got"):
            OperationMetadata(**{name: value})


@pytest.mark.parametrize("name", BOTH)
def test_a_scale_that_is_not_finite(name):
    with pytest.raises(ValueError, match="softmax_scale must be finite"):
        attend(name, GOOD, OperationMetadata(softmax_scale=math.inf))


def test_bfloat16_by_its_name():
    """NumPy knows the name once any module has imported ml_dtypes."""
    make = "from attnmask.operations import *; print(OperationMetadata('bfloat16').runtime_dtype)"
    assert python(make).stdout == "bfloat16\n"
    without = f"""
import sys
sys.modules['ml_dtypes'] = None
try:
    {make}
except ImportError as error:
    print(error)
"""
    expected = "runtime_dtype is of bfloat16, for which NumPy needs ml_dtypes: pip install ml_dtypes\n"
    assert python(without).stdout == expected


def test_import_attnmask_does_without():
    code = "import sys, attnmask; print('attnmask.operations' in sys.modules)"
    assert python(code).stdout == "False\n"


# Registry and dispatch


@pytest.fixture
def registry(monkeypatch):
    """The registry; what a test adds is removed afterwards."""
    monkeypatch.setattr(OperationRegistry, "_operations", dict(OperationRegistry._operations))
    return OperationRegistry


def operator(*names, **methods) -> type[OperationImpl]:
    """An operator of a third party, which returns the arguments that it was called with."""

    class Third(OperationImpl):
        @classmethod
        def get_impl_name(cls):
            return names[0] if len(names) == 1 else names

        def forward_native(self, query, key, value, mask=None, bias=None, causal=False, **more):
            return OperationOutput(("native", query, key, value, mask, bias, causal, more))

    return type("Third", (Third,), methods)


def test_registry():
    assert OperationRegistry.list() == BOTH
    assert OperationRegistry.get("flash") is FlashAttention
    assert OperationRegistry.get("vanilla") is VanillaAttention
    metadata = OperationMetadata(softmax_scale=2.0)
    assert OperationRegistry.create("flash", metadata).metadata is metadata
    assert OperationRegistry.create("vanilla").metadata == OperationMetadata()


def test_a_third_partys_operator(registry):
    third = operator("third", "drei")
    assert registry.register(third) is third
    assert registry.list() == ("drei", "flash", "third", "vanilla")
    op = registry.create("drei")
    assert type(op) is third
    assert op(1, 2, 3).attention_outputs == ("native", 1, 2, 3, None, None, False, {})
    called = op(1, 2, 3, 4, 5, True, six=6).attention_outputs
    assert called == ("native", 1, 2, 3, 4, 5, True, {"six": 6})
    assert op(query=1, key=2, value=3, causal=True, mask=4).attention_outputs[4:] == (4, None, True, {})


def test_backends():
    """Each backend has a method; that of the CPU is the native one unless the operator has another."""

    def forward(*names):
        return {
            f"forward_{name}": lambda self, *args, name=name, **more: OperationOutput((name, more))
            for name in names
        }

    plain, both, third = operator("a"), operator("b", **forward("cpu")), operator("c", **forward("npu"))
    for kind, backend, answer in [
        (plain, None, "native"),
        (plain, "cpu", "native"),
        (plain, "native", "native"),
        (both, None, "cpu"),
        (both, "cpu", "cpu"),
        (both, "native", "native"),
        (third, None, "native"),
        (third, "npu", "npu"),
    ]:
        op = kind(OperationMetadata(backend=backend))
        assert op(1, 2, 3, more=4).attention_outputs[0] == answer
    for name in BOTH:
        attend(name, GOOD, OperationMetadata(backend="native"))
        with pytest.raises(ValueError, match=r"backend must be one .*Attention, 'cpu', 'native', got 'gpu'"):
            OperationRegistry.create(name, OperationMetadata(backend="gpu"))
    with pytest.raises(TypeError, match=r"metadata must be OperationMetadata or None, got an object of type"):
        FlashAttention({"softmax_scale": 1.0})


BAD_OPERATORS = [
    (TypeError, "operation must be a subclass of OperationImpl, got", [3, None, int, OperationOutput]),
    (TypeError, "operation must be a subclass of OperationImpl, got", [lambda: 0, "flash"]),
    (TypeError, "must have forward_native, get_impl_name, got OperationImpl", [OperationImpl]),
    (TypeError, "get_impl_name must return a name", [operator(3), operator("a", 3), operator(None)]),
    (TypeError, "get_impl_name must return a name", [operator(b"a"), operator({"a"})]),
    (ValueError, "get_impl_name must return a name", [operator(), operator(""), operator("a", "")]),
    (ValueError, "names that differ", [operator("a", "a")]),
    (ValueError, "operation must have a new name, got 'flash'.* FlashAttention", [operator("flash")]),
    (ValueError, "new name, got 'vanilla'.* VanillaAttention", [operator("new", "vanilla"), VanillaAttention]),
]  # fmt: skip


@pytest.mark.parametrize(("error", "match", "operations"), BAD_OPERATORS)
def test_bad_operators(registry, error, match, operations):
    """None of their names is registered afterwards."""
    for operation in operations:
        with pytest.raises(error, match=match):
            registry.register(operation)
    assert registry.list() == BOTH


def test_unknown_names(registry):
    registry.register(operator("third"))
    for ask in (registry.get, registry.create):
        with pytest.raises(
            ValueError, match=r"impl_name must be one of 'flash', 'third', 'vanilla', got 'x'"
        ):
            ask("x")
        with pytest.raises(TypeError, match="impl_name must be a name, got 3"):
            ask(3)


# Helpers

OP = OperationRegistry.create("flash")


def test_get_mode():
    for shape, tokens_first, heads_first in [
        ((2, 1, 8, 64), "decode", "train"),
        ((2, 8, 1, 64), "train", "decode"),
        ((2, 1, 1, 64), "decode", "decode"),
        ((2, 5, 8, 64), "train", "train"),
        ((1, 0, 0, 1), "train", "train"),
    ]:
        query = np.empty(shape)
        assert OP.get_mode(query) == OP.get_mode(query, True) == OP.get_mode(query, BTHD=True) == tokens_first
        assert OP.get_mode(query, BTHD=False) == OP.get_mode(query, False) == heads_first
    assert OP.get_mode([[[[0.0]], [[0.0]]]]) == "train"
    for bad in (np.empty((1, 8, 64)), 3.0, np.empty((1, 1, 1, 1, 1))):
        with pytest.raises(ValueError, match=r"query must be \[B, T, H, D\], got shape"):
            OP.get_mode(bad)
        with pytest.raises(ValueError, match=r"query must be \[B, H, T, D\], got shape"):
            OP.get_mode(bad, False)
    with pytest.raises(TypeError, match="BTHD must be True or False, got 2"):
        OP.get_mode(np.empty((1, 1, 1, 1)), 2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [bool, np.int8, np.int64, F32, BF16, np.longdouble], ids=str)
@pytest.mark.parametrize("shape", [(4, 5), (2, 4, 5), (2, 3, 4, 5), (2, 1, 1, 5), (0, 3, 4, 5), (2, 3, 0, 5)])
def test_split_attention_mask(shape, dtype, layout):
    pairs = np.random.default_rng(1).random(shape) < 0.3
    q_mask, kv_mask = OperationImpl.split_attention_mask(arrange((pairs * 2).astype(dtype), layout))
    if len(shape) == 4:
        pairs = pairs[:, -1]
    np.testing.assert_array_equal(q_mask, pairs.any(-1))
    np.testing.assert_array_equal(kv_mask, pairs.any(-2))
    assert q_mask.dtype == kv_mask.dtype == bool


def test_split_a_mask_info():
    """As for its array, but without computing the array of a long mask."""
    segments = MaskInfo.from_segments(RNG.integers(-1, 3, (2, 3, 7)), RNG.integers(-1, 3, (2, 3, 9)))
    for info in (segments, segments.apply_causal(), ~segments, MaskInfo(RNG.random((2, 4, 4)) < 0.3)):
        got, expected = OP.split_attention_mask(info), OP.split_attention_mask(info.attention_mask)
        for ours, theirs in zip(got, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)
            assert ours.flags.owndata
    tokens = 2**17
    ids = np.where(np.arange(tokens) < 5, -1, 0)[None]
    for part in OP.split_attention_mask(MaskInfo.from_segments(ids).apply_causal()):
        assert part.sum() == tokens - 5


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("q_shape", "kv_shape", "shape"), [
    ((4,), (5,), (4, 5)),
    ((2, 4), (2, 5), (2, 4, 5)),
    ((2, 4), (1, 5), (2, 4, 5)),
    ((4,), (2, 5), (2, 4, 5)),
    ((2, 4), (2, 1, 5), (2, 4, 5)),
    ((2, 4, 1), (2, 5), (2, 4, 5)),
    ((2, 3, 4, 1), (2, 1, 1, 5), (2, 3, 4, 5)),
    ((0, 4), (0, 5), (0, 4, 5)),
])  # fmt: skip
def test_combine_query_kv_masks(q_shape, kv_shape, shape, layout):
    queries, keys = (np.random.default_rng(2).integers(-1, 2, size) for size in (q_shape, kv_shape))
    got = OP.combine_query_kv_masks(arrange(queries, layout), arrange(keys != 0, layout))
    assert (got.shape, got.dtype) == (shape, bool)
    columns = np.expand_dims(queries, -1) if len(q_shape) < 3 else queries
    rows = np.expand_dims(keys, -2) if len(kv_shape) < 3 else keys
    np.testing.assert_array_equal(got, (columns * rows) != 0)


@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 64, 300, np.int32(5)])
def test_create_causal_mask(tokens):
    mask = OP.create_causal_mask(tokens)
    np.testing.assert_array_equal(mask, np.tri(tokens, dtype=bool))
    assert mask.dtype == bool
    assert mask.flags.writeable


@pytest.mark.parametrize("dtype", [*FLOATS, np.dtype(int)], ids=str)
@pytest.mark.parametrize("reps", [0, 1, 3])
def test_repeat_kv_heads(reps, dtype):
    k, v = RNG.standard_normal((2, 5, 2, 4)).astype(dtype), RNG.standard_normal((2, 6, 3, 1)).astype(dtype)
    for got, array in zip(OP.repeat_kv_heads(k, v, reps), (k, v), strict=True):
        assert (got.shape, got.dtype) == ((*array.shape[:2], array.shape[2] * reps, array.shape[3]), dtype)
        assert not np.shares_memory(got, array)
        for head in range(got.shape[2]):
            np.testing.assert_array_equal(got[:, :, head], array[:, :, head // reps])


def test_handle_kvhead():
    assert OP.handle_kvhead(None, 8, 2) is None
    for heads in (1, 8):
        array = RNG.standard_normal((2, heads, 3, 4))
        assert OP.handle_kvhead(array, 8, 2) is array
    array = RNG.standard_normal((2, 2, 3, 4))
    got = OP.handle_kvhead(array, 8, 2)
    assert got.shape == (2, 8, 3, 4)
    for head in range(8):
        np.testing.assert_array_equal(got[:, head], array[:, head // 4])
    assert OP.handle_kvhead(array.tolist(), 2, 1).shape == array.shape


def test_the_other_names():
    for name in ("split_attention_mask", "combine_query_kv_masks", "create_causal_mask", "handle_kvhead"):
        assert getattr(OperationImpl, f"_{name}") is getattr(OperationImpl, name)
    assert OP._create_causal_mask(2).tolist() == [[True, False], [True, True]]
    assert OP._handle_kvhead(None, 1, 1) is None


HEADS = np.ones((2, 3, 4, 5))
TOO_MANY = [2**50, 2**62 + 1, 2**63 // 3 + 1, 2**64 // 3 + 1, 2**70]  # some times 3 are small in 64 bits
BAD_CALLS = [
    (ValueError, r"attn_mask must be \[Q, K\] or", lambda: OP.split_attention_mask([1, 0])),
    (ValueError, r"attn_mask must be \[Q, K\] or", lambda: OP.split_attention_mask(HEADS[None])),
    (ValueError, "attn_mask must have a head", lambda: OP.split_attention_mask(np.ones((2, 0, 4, 5)))),
    (ValueError, "attn_mask must have a head", lambda: OP.split_attention_mask(MaskInfo(np.ones((2, 0, 4, 5))))),
    (ValueError, "cannot split attn_mask", lambda: OP.split_attention_mask(MaskInfo())),
    (ValueError, "q_mask must have an axis", lambda: OP.combine_query_kv_masks(1, [1])),
    (ValueError, "kv_mask must have an axis", lambda: OP.combine_query_kv_masks([1], True)),
    (ValueError, r"kv_mask must broadcast with", lambda: OP.combine_query_kv_masks(np.ones((2, 4)), np.ones((3, 5)))),
    (MemoryError, "2147483647", lambda: OP.create_causal_mask(2**31 - 1)),
    (MemoryError, "qseq", lambda: OP.create_causal_mask(2**70)),
    (ValueError, r"array must be \[B, H, Q, K\]", lambda: OP.handle_kvhead(HEADS[0], 8, 2)),
    (ValueError, r"array must have 8, 2 or 1 heads, got .* \(2, 3, 4, 5\)", lambda: OP.handle_kvhead(HEADS, 8, 2)),
    (ValueError, "num_q_heads must be a multiple of .*3, got 8", lambda: OP.handle_kvhead(HEADS, 8, 3)),
    (ValueError, "num_q_heads must be a multiple", lambda: OP.handle_kvhead(HEADS[:, :0], 8, 0)),
    *((MemoryError, "num_reps", lambda n=n: OP.repeat_kv_heads(HEADS, HEADS, n)) for n in TOO_MANY),
    *((MemoryError, "num_q_heads", lambda n=n: OP.handle_kvhead(HEADS, 3 * n, 3)) for n in TOO_MANY),
]  # fmt: skip


@pytest.mark.parametrize(("error", "match", "call"), BAD_CALLS)
def test_bad_calls(error, match, call):
    with pytest.raises(error, match=match):
        call()


# Sharding

MESH = {"dp": 2, "fsdp": 3, "tp": 4}


@pytest.fixture(params=["tuples", "jax"])
def sharded(request, monkeypatch):
    """An operator without a mesh, one with a mesh, and the type of specs that they return."""
    mesh, spec = MESH, lambda *names: names
    if request.param == "jax":
        jax = pytest.importorskip("jax")
        mesh, spec = jax.sharding.AbstractMesh(tuple(MESH.values()), tuple(MESH)), jax.sharding.PartitionSpec
    else:
        monkeypatch.setitem(sys.modules, "jax", None)
        monkeypatch.setitem(sys.modules, "jax.sharding", None)
    return OP, OperationRegistry.create("vanilla", OperationMetadata(mesh=mesh)), spec


def test_create_stable_sharding(sharded):
    plain, meshed, spec = sharded
    state = spec(("dp", "fsdp"), None, "tp", None)
    other = spec("fsdp", "tp", "dp", None)
    for op in (plain, meshed):
        assert op.create_stable_sharding() is None
        assert op.create_stable_sharding(None, [0], other) is None
        assert op.create_stable_sharding(state, dep=None) is None
        for dep in (True, False, state):
            assert op.create_stable_sharding(state, dep=dep) is state
        assert op.create_stable_sharding(state, clone_ps=other) is state
        for kept, want in [
            ([], spec(None, None, None, None)),
            ([0], spec(("dp", "fsdp"), None, None, None)),
            ((1, 2), spec(None, None, "tp", None)),
            ([-2], spec(None, None, "tp", None)),
            (np.array([0, 2, 2]), spec(("dp", "fsdp"), None, "tp", None)),
        ]:
            assert op.create_stable_sharding(state, kept) == want
        assert op.create_stable_sharding(state, [1, 2], other) == spec(None, "tp", "dp", None)
        assert op.create_stable_sharding(list(state), [2]) == spec(None, None, "tp", None)


def test_create_stable_sharding_of_a_tensor(sharded):
    """Axes that do not divide the tensor are dropped if the mesh is known."""
    plain, meshed, spec = sharded
    state = spec(("dp", "fsdp"), None, "tp", None)
    whole = np.broadcast_to(np.float32(0), (6, 5, 8, 7))
    assert plain.create_stable_sharding(state, tensor=whole) is state
    assert plain.create_stable_sharding(state, [2], tensor=whole[:, :, :3]) == spec(None, None, "tp", None)
    for shape, want in [
        ((6, 5, 8, 7), state),
        ((12, 5, 4, 7), state),
        ((4, 5, 8, 7), spec(None, None, "tp", None)),
        ((6, 5, 6, 7), spec(("dp", "fsdp"), None, None, None)),
        ((1, 5, 6, 7), spec()),
        ((6, 5, 8, 7, 2), spec(("dp", "fsdp"), None, "tp", None, None)),
        ((0, 0, 0, 0), state),
    ]:
        assert meshed.create_stable_sharding(state, tensor=np.broadcast_to(0, shape)) == want
    assert meshed.create_stable_sharding(state, [2], tensor=whole) == spec(None, None, "tp", None)
    clone = spec("fsdp", "tp", "dp", None)
    kept = meshed.create_stable_sharding(state, [1, 2], clone, tensor=whole)
    assert kept == spec(None, None, "dp", None)
    assert meshed.create_stable_sharding(spec("tp"), tensor=[0] * 8) == spec("tp")


BAD_SHARDINGS = [
    (TypeError, "state_ps must be a PartitionSpec or a tuple, got 'dp'", {"state_ps": "dp"}),
    (TypeError, "state_ps must be a PartitionSpec or a tuple, got 3", {"state_ps": 3}),
    (TypeError, "state_ps must be a PartitionSpec or a tuple", {"state_ps": {"dp": 1}}),
    (TypeError, "state_ps must be a PartitionSpec or a tuple", {"state_ps": {"dp", "tp"}}),
    (TypeError, r"state_ps\[1\] must be a name", {"state_ps": ("dp", 3)}),
    (TypeError, "clone_ps must be a PartitionSpec", {"preserved_indices": [0], "clone_ps": 3}),
    (TypeError, r"clone_ps\[0\] must be a name", {"preserved_indices": [0], "clone_ps": [["dp", 1]]}),
    (TypeError, "preserved_indices must be an integer", {"preserved_indices": [0.5]}),
    (TypeError, "preserved_indices must be integers", {"preserved_indices": 0}),
    (TypeError, "preserved_indices must be integers", {"preserved_indices": "0"}),
    (IndexError, "preserved_indices must be .* 2 .*, got 2", {"preserved_indices": [0, 2]}),
    (IndexError, "preserved_indices must be .*, got -3", {"preserved_indices": [-3]}),
    (IndexError, "preserved_indices .* 1 .*, got 1", {"preserved_indices": [0, 1], "clone_ps": ("dp",)}),
    (ValueError, r"tensor must have 2 dimensions as state_ps, got shape \(3,\)", {"tensor": np.ones(3)}),
    (ValueError, r"state_ps\[0\] must name axes of the mesh", {"state_ps": ("x",), "tensor": np.ones(3)}),
    (
        ValueError,
        r"clone_ps\[0\] must name axes of the mesh.* got 'x'",
        {"preserved_indices": [0], "clone_ps": ("x", None), "tensor": np.ones((2, 2))},
    ),
]


@pytest.mark.parametrize(("error", "match", "arguments"), BAD_SHARDINGS)
def test_bad_shardings(error, match, arguments):
    op = FlashAttention(OperationMetadata(mesh=MESH))
    with pytest.raises(error, match=match):
        op.create_stable_sharding(**({"state_ps": ("dp", "tp")} | arguments))


def test_a_spec_names_an_axis_once(sharded):
    """An axis name that is dropped may occur elsewhere."""
    _, meshed, spec = sharded
    double, long = spec(("dp", "tp"), None, "dp"), np.zeros((8, 1, 2))
    with pytest.raises(ValueError, match=r"state_ps\[0\] and state_ps\[2\] must name .* got 'dp' twice"):
        meshed.create_stable_sharding(double, tensor=long)
    with pytest.raises(ValueError, match=r"^clone_ps\[1\] must name .* got 'dp' twice"):
        meshed.create_stable_sharding((None, None), [1], (None, ("dp", "dp")), tensor=np.zeros((1, 4)))
    assert meshed.create_stable_sharding(double, tensor=long[:4]) == spec(None, None, "dp")
    assert meshed.create_stable_sharding(double, tensor=long[..., :1]) == spec(("dp", "tp"), None, None)


def test_a_mesh_of_devices():
    """Arrays can be placed with the spec."""
    jax = pytest.importorskip("jax")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("dp", "tp"))
    op = OperationRegistry.create("flash", OperationMetadata(mesh=mesh))
    tensor = jax.numpy.ones((2, 3, 4))
    spec = op.create_stable_sharding(jax.sharding.PartitionSpec("dp", None, "tp"), [0], tensor=tensor)
    assert spec == jax.sharding.PartitionSpec("dp", None, None)
    assert jax.jit(lambda x: OP.get_mode(x[None]) == "train")(tensor)
    assert jax.device_put(tensor, jax.sharding.NamedSharding(mesh, spec)).sharding.spec == spec
