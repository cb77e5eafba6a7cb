"""Checks of the kernels of short convolutions."""

import ml_dtypes
import numpy as np
from kernel_checks import COUNTS, pick
from kernel_table import CONSTANTS, Kernel, Memory, structure

WIDTHS = (0, 1, 2, 3, 4, 5, 9)


def dtype_of(kernel: Kernel) -> np.dtype:
    return np.dtype(np.float64 if "f64" in kernel.slot else np.float32)


STORED = {
    CONSTANTS["AM_FLOAT16"]: np.dtype(np.float16),
    CONSTANTS["AM_BFLOAT16"]: np.dtype(ml_dtypes.bfloat16),
    CONSTANTS["AM_FLOAT32"]: np.dtype(np.float32),
    CONSTANTS["AM_FLOAT64"]: np.dtype(np.float64),
}


def silu(z: np.ndarray) -> np.ndarray:
    return z / (1 + np.exp(-z))


def windows(src: np.ndarray, steps: int, width: int) -> np.ndarray:
    """[width][steps][lanes]"""
    rows = [src[j : j + steps] for j in range(width)]
    return np.array(rows, np.float64).reshape(width, steps, src.shape[1])


def draw_tile(rng, memory: Memory, most: int, dtype: np.dtype) -> tuple[dict, np.ndarray]:
    """The sizes of a tile of fewer steps than `most`, as its fields, and the rows that it reads."""
    steps, lanes, width = pick(rng, range(most)), pick(rng, [n for n in COUNTS if n < 200]), pick(rng, WIDTHS)
    rows = rng.standard_normal((max(steps + width - 1, 0), lanes)).astype(dtype)
    src = memory.read(rows, lanes + pick(rng, [0, 5]), 1)
    fields = {"steps": steps, "lanes": lanes, "width": width}
    return fields | {"src_stride": src.strides[0] // dtype.itemsize}, src


def check_conv(kernel: Kernel, rng) -> None:
    dtype, stored = dtype_of(kernel), STORED[kernel.index]
    for _ in range(150):
        memory = Memory()
        fields, src = draw_tile(rng, memory, 20, stored)
        steps, lanes, width, _stride = fields.values()
        stream, activated, biased = (bool(rng.random() < 0.5) for _ in range(3))
        line, case = 64 // stored.itemsize, fields | {"stream": stream, "silu": activated}
        dst_stride = -(-lanes // line) * line if stream else lanes + pick(rng, [0, 3])
        weight = memory.read(rng.standard_normal((width, lanes)).astype(dtype), lanes + pick(rng, [0, 2]), 1)
        bias = memory.read(rng.standard_normal(lanes).astype(dtype), shift=1) if biased else None
        dst = memory.written(np.zeros((steps, lanes), stored), dst_stride, shift=0 if stream else 1)
        weights = {"weight": weight, "weight_stride": weight.strides[0] // dtype.itemsize, "bias": bias}
        kernel(dst, src, structure("am_conv_tile", **case, **weights, dst_stride=dst_stride))
        memory.check(case)
        z = (windows(src, steps, width) * weight[:, None].astype(np.float64)).sum(0) + (bias if biased else 0)
        tolerance = np.finfo(dtype).eps * 8 * (width + 2)
        tolerance += float(ml_dtypes.finfo(stored).eps) if stored != dtype else 0
        np.testing.assert_allclose(
            dst.astype(np.float64), silu(z) if activated else z, tolerance, tolerance, err_msg=repr(case)
        )


def check_silu_gradient(kernel: Kernel, rng) -> None:
    dtype = dtype_of(kernel)
    for count in COUNTS:
        memory = Memory()
        before = (rng.standard_normal(count) * 10).astype(dtype)
        z = memory.written(before, shift=1)
        dout = memory.read(rng.standard_normal(count).astype(dtype), shift=1)
        kernel(z, dout, count)
        memory.check(count)
        wide = before.astype(np.float64)
        s = 1 / (1 + np.exp(-wide))
        tolerance = np.finfo(dtype).eps * 32
        np.testing.assert_allclose(
            z, dout * s * (1 + wide * (1 - s)), tolerance, tolerance, err_msg=repr(count)
        )


def check_sums(kernel: Kernel, rng) -> None:
    dtype = dtype_of(kernel)
    for _ in range(60):
        memory = Memory()
        fields, src = draw_tile(rng, memory, 40, dtype)
        steps, lanes, width, _stride = fields.values()
        dz = memory.read(rng.standard_normal((steps, lanes)).astype(dtype), lanes + pick(rng, [0, 5]), 1)
        before = np.zeros((width + 1, -(-lanes // 16) * 16))
        before[:, :lanes] = rng.standard_normal((width + 1, lanes))
        sums = memory.written(before)
        kernel(sums, dz, src, structure("am_conv_tile", **fields, dst_stride=dz.strides[0] // dtype.itemsize))
        memory.check(fields)
        wide = dz.astype(np.float64)
        expected = before.copy()
        expected[:width, :lanes] += (windows(src, steps, width) * wide).sum(1)
        expected[width, :lanes] += wide.sum(0)
        tolerance = np.finfo(dtype).eps * 8 * (steps + 2)
        np.testing.assert_allclose(sums, expected, tolerance, tolerance, err_msg=repr(fields))


def check_split(kernel: Kernel, rng) -> None:
    dtype = np.dtype(f"uint{kernel.slot.split('_')[-1]}")
    for rows in range(1, CONSTANTS["AM_MOST_SPLIT"] + 1):
        for count in COUNTS:
            memory, step = Memory(), count + pick(rng, [0, 3])
            values = rng.integers(1 << 16, size=(rows, count)).astype(dtype)
            if "split" in kernel.slot:
                src = memory.read(values.T.ravel(), shift=1)
                dst = memory.written(np.zeros_like(values), step, 1)
                kernel(dst, step, src, count, rows)
                expected = values
            else:
                src = memory.read(values, step, 1)
                dst = memory.written(np.zeros(values.size, dtype), shift=1)
                kernel(dst, src, step, count, rows)
                expected = values.T.ravel()
            memory.check((rows, count))
            np.testing.assert_array_equal(dst, expected)


CHECKS = {
    "am_join": check_split,
    "am_split": check_split,
    "am_conv": check_conv,
    "am_conv_sums": check_sums,
    "am_silu_gradient": check_silu_gradient,
}
