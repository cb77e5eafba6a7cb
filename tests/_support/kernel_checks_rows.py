"""Compares the kernels of attention that read, write or pack rows with plain NumPy."""

import ctypes
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from environment import ARM_LEVELS, ISA_LEVELS
from kernel_checks import BF16, compare, numbers, pick, same
from kernel_table import CONSTANTS, Kernel, Memory, structure
from reference_kernels import MOST_I16, Bounded, packed_keys, packed_values, unwritten

TILE = CONSTANTS["AM_FLASH_TILE"]


@dataclass(frozen=True)
class Arithmetic:
    """The kernels of one arithmetic. Their arrays consist of lanes of `dtype`, each of which holds `width` numbers."""

    kernels: ctypes.Structure
    dtype: np.dtype
    width: int

    @property
    def size(self) -> int:
        return self.dtype.itemsize

    @property
    def panel(self) -> int:
        return self.kernels.panel

    @property
    def factors(self) -> np.dtype:
        """The dtype of the numbers that are multiplied."""
        return BF16 if self.width == 2 else self.dtype

    @property
    def packed_alone(self) -> bool:
        return self.kernels.packed_alone

    @property
    def by_channel(self) -> bool:
        return self.kernels.by_channel

    @property
    def can_transpose(self) -> bool:
        return not self.packed_alone


def arithmetic_of(kernel: Kernel) -> Arithmetic:
    kernels = getattr(kernel.table, kernel.slot.partition(".")[0])
    dtype = np.dtype(np.float64 if kernels.type == CONSTANTS["AM_FLOAT64"] else np.float32)
    return Arithmetic(kernels, dtype, kernels.width)


FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
FORMATS = {
    CONSTANTS["AM_FLOAT16"]: np.dtype(np.float16),
    CONSTANTS["AM_BFLOAT16"]: np.dtype(BF16),
    CONSTANTS["AM_FLOAT32"]: np.dtype(np.float32),
    CONSTANTS["AM_FLOAT64"]: np.dtype(np.float64),
    CONSTANTS["AM_INT8"]: np.dtype(np.int8),
    CONSTANTS["AM_FLOAT8_E4M3"]: FLOAT8,
}


def format_of(kernel: Kernel) -> np.dtype:
    """The element type in memory."""
    return FORMATS[kernel.index]


# Single rows

COUNTS = [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100]
SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0]


def some_special(rng, shape, dtype) -> np.ndarray:
    values = numbers(rng, shape, dtype)
    values[rng.random(shape) < 0.1] = rng.choice([-128, 127, 0] if dtype == np.int8 else SPECIAL)
    return values


def some_scales(rng, arithmetic: Arithmetic, memory: Memory) -> np.ndarray | None:
    """None, or a scale for each row of a tile, where a lane holds one number."""
    if arithmetic.width == 2 or rng.random() < 0.5:
        return None
    return memory.read(rng.uniform(0.1, 2, TILE).astype(arithmetic.dtype))


def check_merge(kernel: Kernel, rng) -> None:
    """Merges sums relative to their references; a row may have no keys in one of the two accumulators."""
    arithmetic = arithmetic_of(kernel)
    dtype, half = arithmetic.dtype, arithmetic.panel // 2
    eps = float(np.finfo(dtype).eps)
    for rows in (1, half - 1, half, half + 1, 63, 64):
        for depth, unit, has_max in ((half, 1.0, False), (3 * half, float(np.log2(np.e)), True)):
            memory, parts, given = Memory(), [], []
            for _ in range(2):
                running_max = rng.uniform(-15, 15, rows)
                running_max[rng.random(rows) < 0.2] = -np.inf
                seen = np.isfinite(running_max)
                out, total = rng.standard_normal((rows, depth)) * seen[:, None], rng.random(rows) * seen
                some = [x.astype(dtype) for x in (out, running_max, total, running_max + 0.5, 2 * total)]
                given.append([x.astype(np.float64) for x in some])
                parts.append([memory.written(x) for x in some])
            names = ["out", "running_max", "sum", *(["row_max", "exact_sum"] if has_max else [])]
            sizes = {"rows": rows, "out_dim": depth, "unit": unit}
            kernel(
                *(
                    structure("am_flash_rows", **sizes, **dict(zip(names, part, strict=False)))
                    for part in parts
                )
            )
            memory.check((rows, depth))
            (a_out, a_ref, a_sum, a_max, a_exact), (b_out, b_ref, b_sum, b_max, _) = given
            both = np.maximum(a_ref, b_ref)
            distance = np.where(np.isfinite(a_ref) & np.isfinite(b_ref), np.abs(a_ref - b_ref), 0) * unit
            a, b = (np.exp2((x - np.maximum(both, -1e30)) * unit) for x in (a_ref, b_ref))
            bound = (distance + 8) * eps  # the exponent and a few later steps are rounded
            got_out, got_ref, got_sum, got_max, got_exact = parts[0]
            assert (got_ref == both).all()
            assert (np.abs(got_sum - (a * a_sum + b * b_sum)) <= bound * (a * a_sum + b * b_sum)).all()
            assert (got_exact == (2 * got_sum if has_max else a_exact)).all()
            size = a[:, None] * np.abs(a_out) + b[:, None] * np.abs(b_out)
            expected = a[:, None] * a_out + b[:, None] * b_out
            assert (np.abs(got_out - expected) <= bound[:, None] * size).all(), (rows, depth)
            assert (got_max == (np.maximum(a_max, b_max) if has_max else a_max)).all()


def check_write(kernel: Kernel, rng) -> None:
    dtype, to = arithmetic_of(kernel).dtype, format_of(kernel)
    for count in COUNTS:
        for factor in (1.0, 0.37, 1e6, 1e-6):
            src = some_special(rng, count, dtype)
            compare(kernel, (src * dtype.type(factor)).astype(to), src, factor, count, shift=count % 3)


def check_read_bias(kernel: Kernel, rng) -> None:
    dtype = arithmetic_of(kernel).dtype
    for columns in [*COUNTS[:-2], 64]:
        for special in (0.0, -np.inf, np.nan, np.inf):
            rows = pick(rng, [1, 2, 5, 64])
            case = (columns, rows, special)
            memory, values = Memory(), numbers(rng, (rows, columns), format_of(kernel))
            values[rng.random(values.shape) < 0.2 / rows] = special
            src = memory.read(values, pick(rng, [columns, columns + 3, -columns - 1]), shift=1)
            dst = memory.written(np.ones((rows, TILE), dtype))
            any_infinite = kernel(dst, src, src.strides[0], rows, columns)
            memory.check(case)
            same(dst[:, :columns], values.astype(dtype), case)
            assert (dst[:, columns:] == 0).all(), case
            assert any_infinite == np.isneginf(values).any(), case
            if columns == TILE:
                assert kernel(None, src, src.strides[0], rows, columns) == any_infinite, case


def check_find_infinite(kernel: Kernel, rng) -> None:
    dtype = arithmetic_of(kernel).dtype
    for special in (0.0, -np.inf, np.nan, np.inf, np.finfo(dtype).min):
        for share in (0, 0.1, 1):
            memory, values = Memory(), numbers(rng, TILE, dtype)
            values[rng.random(TILE) < share] = special
            bits = kernel(memory.read(values, shift=1))
            memory.check((special, share))
            assert bits == sum(1 << i for i in range(TILE) if values[i] == -np.inf), (special, share)


DEPTHS = [0, 1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 128]


def check_load_rows(kernel: Kernel, rng) -> None:
    arithmetic = arithmetic_of(kernel)
    for depth in DEPTHS:
        for rows in (1, 2, 64):
            whole = -(-depth // arithmetic.panel) * arithmetic.panel
            for special in (0.0, np.nan, np.inf):
                case = (depth, rows, special)
                memory, values = Memory(), numbers(rng, (rows, depth), arithmetic.dtype)
                if depth:
                    values[-1, rng.integers(depth)] = special
                src = memory.read(values, pick(rng, [depth, depth + 3, -depth - 1]), shift=1)
                step = whole + pick(rng, [0, 8])
                dst = memory.written(np.ones((rows, step), arithmetic.dtype))
                finite = kernel(dst, step, src, src.strides[0] // src.itemsize, rows, depth)
                memory.check(case)
                same(dst[:, :depth], src, case)
                assert (dst[:, depth:whole] == 0).all(), case
                assert finite == np.isfinite(values).all(), case


def check_add_rows(kernel: Kernel, rng) -> None:
    dtype = arithmetic_of(kernel).dtype
    for depth in DEPTHS:
        for rows in (0, 1, 5):
            memory = Memory()
            src = memory.read(some_special(rng, (rows, depth), dtype), depth + 2, shift=1)
            dst = memory.written(numbers(rng, (rows, depth), dtype), depth + 1)
            expected = dst + src
            kernel(dst, depth + 1, src, depth + 2, rows, depth)
            memory.check((depth, rows))
            same(dst, expected, (depth, rows))


def check_dot_rows(kernel: Kernel, rng) -> None:
    arithmetic = arithmetic_of(kernel)
    for depth in DEPTHS:
        memory, a, b = Memory(), *numbers(rng, (2, 7, depth), arithmetic.dtype)
        b[1] = 0
        a[1, depth // 2 :], a[2, depth // 2 :], b[3, :1] = np.nan, np.inf, np.nan
        left, right = memory.read(a, depth + 1), memory.read(b, depth + 3, shift=1)
        dst = memory.written(np.ones(7, arithmetic.dtype))
        kernel(dst, left, depth + 1, right, depth + 3, 7, depth)
        memory.check(depth)
        x, y = (Bounded.exact(array, arithmetic.size) for array in (a, b))
        (x * y).sum().where((b != 0).any(1)).check(dst, depth)


# Packing


def strided(memory: Memory, values: np.ndarray, rng, width: int = 1, plain: bool = False):
    """Rows in memory, and the elements from one to the next.

    Plain rows are aligned to lanes and in increasing order. Others may begin at any number of a bf16x2 lane.
    """
    columns = values.shape[1]
    steps = [columns, columns + width, columns + 6 * width, -columns - 2 * width]
    step = pick(rng, steps[:3] if plain else steps)
    return memory.read(values, step, shift=pick(rng, [0, 2] if plain else [0, 1, 2])), step


def in_runs(
    memory: Memory, values: np.ndarray, rng, width: int, run: int, step: int
) -> tuple[np.ndarray, np.ndarray]:
    """Runs of rows that lie anywhere, and addresses as far from one another; of runs not there that of the first."""
    runs = [
        memory.read(values[i : i + run], step, shift=pick(rng, [0, width - 1]) * 2)
        for i in range(0, len(values), run)
    ]
    addresses = [array.ctypes.data for array in runs]
    addresses += addresses[:1] * (TILE // run - len(runs)) + [pick(rng, [0, addresses[0]])]
    return runs[0], np.array(addresses, np.uintp)


def rows_in(memory: Memory, values: np.ndarray, rng, width: int, run: int, plain: bool = False):
    """Rows as `am_rows`, and the addresses of their runs: in runs of so many, or one behind the other if that is 0."""
    runs = None
    if run:
        step = values.shape[1] + 2 * width
        data, runs = in_runs(memory, values, rng, width, run, step)
    else:
        data, step = strided(memory, values, rng, width, plain)
    return structure("am_rows", data=data, stride=step * values.itemsize, run=run, runs=runs), runs


def check_pack_keys(kernel: Kernel, rng) -> None:
    """If a lane holds two numbers, the factor is 1 and `depth` counts lanes."""
    arithmetic, source = arithmetic_of(kernel), format_of(kernel)
    panel, width, factors = arithmetic.panel, arithmetic.width, arithmetic.factors
    for depth in DEPTHS:
        for rows in {1, 2, panel - 1, panel, panel + 1, 63, 64}:
            for factor in (1.0, -0.3)[: 3 - width]:
                case, memory = (depth, rows, factor), Memory()
                values = some_special(rng, (rows, depth * width), source)
                src, _runs = rows_in(memory, values, rng, width, pick(rng, [0, 0, 16, 32, 64]))
                dst = memory.written(unwritten(TILE * depth, arithmetic.dtype))
                scales = some_scales(rng, arithmetic, memory)
                kernel(dst, src, rows, depth, factor, scales)
                memory.check(case)
                sizes = factors.type(abs(factor)) * (1 if scales is None else scales[:rows, None])
                expected = packed_keys(values.astype(factors) * sizes, panel, width).view(factors)
                same(dst.view(factors), expected * factors.type(np.sign(factor)), case)


def check_pack_values(kernel: Kernel, rng) -> None:
    arithmetic, source = arithmetic_of(kernel), format_of(kernel)
    panel, width, factors = arithmetic.panel, arithmetic.width, arithmetic.factors
    for depth in DEPTHS:
        for rows in {1, 2, panel - 1, panel, panel + 1, 63, 64}:
            for special in (0.0, np.nan, np.inf):
                case, memory, values = (depth, rows, special), Memory(), numbers(rng, (rows, depth), source)
                if depth and source != np.int8:
                    values[rng.integers(rows), rng.integers(depth)] = special
                src, _runs = rows_in(memory, values, rng, width, pick(rng, [0, 0, 16, 32, 64]))
                scales = some_scales(rng, arithmetic, memory)
                scaled = values.astype(factors) * (1 if scales is None else scales[:rows, None])
                expected = packed_values(scaled.astype(factors), panel, width)
                dst = memory.written(unwritten(expected.shape, expected.dtype))
                finite = kernel(dst, src, rows, depth, scales)
                memory.check(case)
                same(dst.view(factors), expected.view(factors), case)
                assert finite == np.isfinite(values.astype(factors)).all(), case


def check_widen_row(kernel: Kernel, rng) -> None:
    """Numbers of four bits, times the scale of their group, and its offset."""
    target = arithmetic_of(kernel).factors
    for group in (32, 64, 128):
        for groups in (1, 2, 3, 7):
            halves = rng.integers(0, 256, groups * group // 2, np.uint8)
            scales = some_special(rng, (groups, 2), np.dtype(np.float32))
            wide = np.stack([halves & 15, halves >> 4], axis=-1).reshape(groups, group).astype(np.float32)
            expected = (wide * scales[:, :1] + scales[:, 1:]).astype(target).ravel()
            compare(kernel, expected, halves, scales, group, groups * group, shift=0)


MOST_I4 = 127 * 256 + 127  # its bytes are both the greatest of int8


def most_in_i16(depth: int) -> float:
    """The greatest number of a row of queries that become sixteen-bit integers, whose sums have 32 bits."""
    return float(min(MOST_I16, (2**31 - 1) // (128 * max(depth, 1))))


def packed_query_lanes(depth: int) -> int:
    """The lanes of a row of packed queries: as many as numbers, up to a multiple of 32, and those of a vector."""
    return -(-depth // 32) * 32 + 16


def check_pack_queries(kernel: Kernel, rng) -> None:
    check, depths = PACKED_QUERIES[kernel.index]
    for depth in depths:
        rows, memory = pick(rng, [1, 2, 5, 64]), Memory()
        values = some_special(rng, (rows, depth), np.dtype(np.float32))
        values[rng.integers(rows)] *= pick(rng, [1, 0, 1e-20, 1e-40, 1e30])
        step = depth + pick(rng, [0, 3])
        dst = memory.written(unwritten((rows, packed_query_lanes(depth)), np.float32))
        kernel(dst, memory.read(values, step), step, rows, depth)
        memory.check(depth)
        check(dst, values, depth)


def check_units(dst: np.ndarray, values: np.ndarray, most: float) -> tuple[np.ndarray, np.ndarray]:
    """Rows that become integers have a unit, which is NaN if they have none; which have one, and these units."""
    greatest = abs(values).max(1)
    usual = np.isfinite(values).all(1) & ((greatest == 0) | (greatest > 2.0**-100))
    units = np.where(usual, (greatest / np.float32(most)).astype(np.float32), np.float32(np.nan))
    same(dst[:, -16], units, values.shape)
    return usual, units[usual, None]


def check_pack_i16x2(dst: np.ndarray, values: np.ndarray, depth: int) -> None:
    """Two integers a lane; on Arm their high bytes, and half a row behind their low ones, four a lane."""
    whole, halves = -(-depth // 32) * 32, ISA_LEVELS is ARM_LEVELS
    usual, units = check_units(dst, values, min(most_in_i16(depth), MOST_I4 if halves else MOST_I16))
    if halves:
        high, low = dst[usual].view(np.int8).reshape(-1, 2, 2 * dst.shape[1])[..., :whole].swapaxes(0, 1)
        packed = 256.0 * high + low
    else:
        packed = dst[usual].view(np.int16)[:, :whole].astype(np.float64)
    assert not packed[:, depth:].any(), depth
    assert (abs(packed[:, :depth] * units - values[usual]) <= 0.51 * units).all(), depth


def check_pack_for_halves(dst: np.ndarray, values: np.ndarray, depth: int) -> None:
    """For keys of four bits: integers of two bytes, and their sums up to each 32 channels.

    Eight channels lie as four high and four low bytes of the even ones, then as many of the odd ones.
    """
    usual, units = check_units(dst, values, MOST_I4)
    high, low = np.moveaxis(dst.view(np.int8)[usual, : 2 * depth].reshape(-1, depth // 8, 2, 2, 4), 3, 0)
    packed = (256.0 * high + low).swapaxes(2, 3).reshape(len(high), depth)
    assert (abs(packed * units - values[usual]) <= 0.51 * units).all(), depth
    sums = np.zeros((len(packed), depth // 32 + 1))
    sums[:, 1:] = packed.reshape(-1, depth // 32, 32).sum(-1).cumsum(-1)
    same(dst[usual, depth // 2 :][:, : depth // 32 + 1], sums.astype(np.float32), depth)


def check_pack_lines(dst: np.ndarray, values: np.ndarray, depth: int) -> None:
    """Of each 32 numbers, those at even places come first, unless the last 16 are missing, which become zero."""
    padded = np.pad(values, ((0, 0), (0, -depth % 32)))
    expected = padded.reshape(len(values), -1, 16, 2).swapaxes(2, 3).reshape(padded.shape)
    if 0 < depth % 32 <= 16:
        expected[:, -32:] = padded[:, -32:]
    same(dst[:, :-16], expected, depth)


def check_pack_bf16(dst: np.ndarray, values: np.ndarray, depth: int) -> None:
    """Subnormal numbers count as 0."""
    values = np.where(abs(values) < 2.0**-126, np.copysign(np.float32(0), values), values)
    padded = np.pad(values, ((0, 0), (0, -depth % 32)))
    same(dst.view(BF16)[:, : padded.shape[1]], padded.astype(BF16), depth)


ANY_DEPTH = (*DEPTHS[1:], 600, 1100)
PACKED_QUERIES = {
    CONSTANTS["AM_INT8"]: (check_pack_i16x2, ANY_DEPTH),
    CONSTANTS["AM_BFLOAT16"]: (check_pack_lines, ANY_DEPTH),
    CONSTANTS["AM_FLOAT8_E4M3"]: (check_pack_bf16, ANY_DEPTH),
    CONSTANTS["AM_INT4"]: (check_pack_for_halves, (32, 64, 96, 128, 160, 256, 544)),
}
CHECKS = {
    "am_add_rows": check_add_rows,
    "am_dot_rows": check_dot_rows,
    "am_flash_pack_keys": check_pack_keys,
    "am_flash_pack_queries": check_pack_queries,
    "am_flash_pack_values": check_pack_values,
    "am_flash_find_infinite": check_find_infinite,
    "am_flash_read_bias": check_read_bias,
    "am_flash_merge": check_merge,
    "am_flash_write": check_write,
    "am_load_rows": check_load_rows,
    "am_widen_row": check_widen_row,
}
