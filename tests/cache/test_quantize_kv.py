"""quantize_kv: values and scales of all types, axes and layouts, extremes, errors."""

import sys

import ml_dtypes
import numpy as np
import pytest
from layouts import LAYOUTS, arrange
from reference_kvcache import LARGEST, QUANTIZED

from attnmask._cache.pages import KVCache
from attnmask._cache.quantize import quantize_kv
from attnmask._common.loading import _core

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOATS = tuple(map(np.dtype, ("float16", ml_dtypes.bfloat16, "float32", "float64")))


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize("given", FLOATS, ids=str)
@pytest.mark.parametrize("axis", [-1, 1, (0, 1), (2, 0), (0, 1, 2), ()])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantize_kv(dtype, given, axis, layout):
    rng = np.random.default_rng(0)
    x = arrange((rng.standard_normal((5, 6, 7)) * 10 ** rng.uniform(-3, 3, (5, 6, 1))).astype(given), layout)
    values, scale = quantize_kv(x, dtype, axis)
    limit = LARGEST[dtype.name]
    wide = x.astype(np.float64)
    np.testing.assert_allclose(scale, abs(wide).max(axis, keepdims=True) / limit, rtol=2**-22)
    for array, wanted in ((values, dtype), (scale, np.float32)):
        assert array.dtype == wanted
        assert array.flags.c_contiguous
        assert array.flags.writeable
    assert values.shape == x.shape
    assert abs(values.astype(np.float64)).max() == limit
    digits, whole = 2 if dtype.name == "float8_e5m2" else 3, dtype.kind == "i"
    nearest = np.rint(wide / scale) if whole else (wide / scale).astype(np.float32).astype(dtype)
    off = abs(values.astype(np.float64) - nearest.astype(np.float64))
    assert (off <= (1 if whole else abs(wide / scale) / 2**digits)).all()
    assert (off > 0).mean() < 0.01  # as quotients are rounded before


def test_quantize_kv_ties_go_to_even():
    values, scale = quantize_kv(np.array([127, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5]), np.int8, 0)
    assert values.tolist() == [127, 0, 2, 2, 0, -2, -126]
    assert scale.tolist() == [1]
    # Of float8_e4m3fn from 16 to 32, each second integer is there.
    values, _ = quantize_kv(np.array([448.0, 17, 19, 21, -17]), FP8, 0)
    assert values.astype(float).tolist() == [448, 16, 20, 20, -16]


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize("given", FLOATS, ids=str)
def test_quantize_kv_of_extremes(dtype, given):
    """Zeros, and the least and the greatest numbers; what is too small for float32 counts as zero."""
    info = ml_dtypes.finfo(given)
    greatest = min(float(info.max), 3e38)
    for number in (0.0, -0.0, float(info.smallest_subnormal), float(info.tiny), greatest):
        x = np.array([[number, -number, 0], [1, 2, 3]], given)
        values, scale = quantize_kv(x, dtype, -1)
        assert np.isfinite(scale).all()
        assert (scale > 0).all()
        assert np.isfinite(values.astype(np.float32)).all()
        assert (values[0].astype(float) == -values[0, [1, 0, 2]].astype(float)).all()
        if float(np.float32(number)) == 0:
            assert scale[0] == 1
            assert not values[0].astype(float).any()


@pytest.mark.parametrize(("dtype", "largest"), [("int8", 127), (FP8, 448)], ids=str)
def test_quantize_kv_clips_what_a_rounded_scale_puts_beyond_the_limit(dtype, largest):
    """Near zero, float32 has so few numbers that one and a half become one."""
    least = np.finfo(np.float32).smallest_subnormal
    values, scale = quantize_kv(np.array([1.49 * largest, -1.49 * largest, 1]) * float(least), dtype, 0)
    assert scale.tolist() == [least]
    assert values.astype(float).tolist() == [largest, -largest, 1]


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_quantize_kv_of_nothing(dtype):
    for shape, axis in (((0, 3), 0), ((2, 0), 1), ((2, 0), 0), ((), ())):
        values, scale = quantize_kv(np.zeros(shape, np.float16), dtype, axis)
        assert (type(values), type(scale)) == (np.ndarray, np.ndarray)
        assert values.shape == shape
        assert scale.shape == tuple(1 if i == axis else length for i, length in enumerate(shape))
        assert (scale == 1).all()


@pytest.mark.parametrize(("arguments", "error", "message"), [
    (([1.0, np.nan], "int8", 0), ValueError, r"x must be finite in float32, got nan at index \(1,\)"),
    (([[1.0], [-np.inf]], "int8", 0), ValueError, r"x must be finite .* got -inf at index \(1, 0\)"),
    (([1e39, 1.0], FP8, 0), ValueError, r"x must be finite in float32, got 1e\+39 at index \(0,\)"),
    (([1.0], "float32", 0), TypeError, "dtype must be int8, float8_e4m3fn, float8_e5m2 or int4, got 'float32'"),
    (([1.0], "int8", 1), ValueError, "axis: axis 1 is out of bounds"),
    (([1.0], "int8", 1), IndexError, "axis: axis 1 is out of bounds"),
    (([1.0], "int8", (0, -1)), ValueError, "repeated axis in `axis`"),
    ((np.zeros((2, 96)), "int4"), ValueError, "the last axis of x must be a multiple of group=64, got 96"),
    ((np.zeros((2, 0)), "int4"), ValueError, "the last axis of x must be a multiple of group=64, got 0"),
    ((np.zeros(()), "int4"), ValueError, "the last axis of x must be a multiple of group=64, got 0"),
    ((np.zeros((64, 64)), "int4", 0), ValueError, "axis must be -1 or None for int4, got 0"),
    ((np.zeros((64, 64)), "int4", (0, 1)), TypeError, "axis must be an integer"),
    ((np.zeros(64), "int4", -1, 16), ValueError, "group must be 32, 64 or 128, got 16"),
    ((np.zeros(64), "int8", -1, 64), ValueError, "group must be None for int8, got 64"),
    ((np.zeros(64, int), "int4"), TypeError, "x must be of float16"),
    ((np.array([0.0] * 63 + [np.nan]), "int4"), ValueError, r"x must be finite in float32, got nan at index \(63,\)"),
    ((np.array([-3e38] * 63 + [3e38]), "int4"), ValueError, "differences within a group fit float32"),
], ids=repr)  # fmt: skip
def test_numbers_that_cannot_be_quantized(arguments, error, message):
    with pytest.raises(error, match=message):
        quantize_kv(*arguments[:3], **dict(zip(["group"], arguments[3:], strict=False)))


@pytest.mark.parametrize(
    "make",
    [lambda dtype: quantize_kv([1.0], dtype, 0), lambda dtype: KVCache(2, 8, pages=4, dtype=dtype)],
    ids=["quantize_kv", "KVCache"],
)
def test_float8_without_ml_dtypes(monkeypatch, make):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ImportError, match="dtype is of float8_e4m3fn, for which NumPy needs ml_dtypes"):
        make("float8_e4m3fn")


def test_a_type_that_cannot_be_is_told_before_a_package_that_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(
        TypeError, match="dtype must be int8, float8_e4m3fn, float8_e5m2 or int4, got 'bfloat16'"
    ):
        quantize_kv([1.0], "bfloat16", 0)
    with pytest.raises(ImportError, match="dtype is of bfloat16, for which NumPy needs ml_dtypes"):
        KVCache(2, 8, pages=4, dtype="bfloat16")


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
@pytest.mark.parametrize("given", FLOATS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_quantized_in_c_as_in_numpy(dtype, given, layout):
    """Scales along any other axis are NumPy's. Rows are longer than what is converted at a time, and many."""
    rng = np.random.default_rng(0)
    x = arrange(
        (rng.standard_normal((3, 50, 700)) * 10 ** rng.uniform(-3, 3, (3, 50, 1))).astype(given), layout
    )
    x[0, :2] = 0
    values, scale = quantize_kv(x, dtype, -1)
    expected, scales = quantize_kv(x[..., None], dtype, -2)
    assert values.tobytes() == expected.tobytes()
    assert scale.tobytes() == scales.tobytes()


def test_the_core_refuses_arrays_that_do_not_fit():
    x, values, scales = np.ones((2, 64)), np.empty((2, 64), np.int8), np.empty((2, 1), np.float32)
    halves, groups = np.empty((2, 32), np.uint8), np.empty((2, 2, 2), np.float32)
    _core.quantize(x, values, scales)
    _core.quantize(x, halves, groups)
    for wrong in (
        (x[:1], values, scales),
        (x, values[:, ::2], scales),
        (x, np.asfortranarray(values), scales),
        (x, values, scales[0]),
        (x, values, scales.astype(np.float64)),
        (x, values, np.empty((2, 64), np.float32)),
        (x, values.astype(np.int32), scales),
        (x, halves, scales),
        (x, halves, np.empty((2, 3, 2), np.float32)),
        (x, halves, np.empty((2, 0, 2), np.float32)),
        (x, halves, np.empty((2, 4, 2), np.float32)),
        (x.astype(int), values, scales),
        (x[0, 0], values[0, 0], scales[0, 0]),
    ):
        with pytest.raises(ValueError, match="values must be made for x and scales, got"):
            _core.quantize(*wrong)
    for frozen in (values, scales):
        frozen.setflags(write=False)
        with pytest.raises(ValueError, match="values must be made"):
            _core.quantize(x, values, scales)
        frozen.setflags(write=True)
