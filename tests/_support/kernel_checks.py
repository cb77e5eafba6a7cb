"""Compares each kernel other than those of attention with plain NumPy: sums, conversions, tokens, rows of masks.

A check draws its cases from `rng_of(kernel)`, which is the same at every level, so levels are compared with each other,
too. Sizes are those of vectors, blocks and words, and one more or less.
"""

import itertools

import ml_dtypes
import numpy as np
from kernel_table import CONSTANTS, SLOTS, UNTOUCHED, Kernel, Memory, structure
from reference_kernels import WIDE, Bounded

BF16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = {"f16": np.dtype(np.float16), "bf16": BF16, "f32": np.dtype(np.float32), "f64": np.dtype(np.float64)}
COUNTS = [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 511, 512, 513, 700]
WORD = 64


def rng_of(kernel: Kernel) -> np.random.Generator:
    return np.random.default_rng([*kernel.slot.encode()])


def pick(rng, values):
    return values[rng.integers(len(values))]


def numbers(rng, shape, dtype, scale: float = 1) -> np.ndarray:
    values = scale * rng.standard_normal(shape)
    return (np.rint(2 * values).clip(-127, 127) if dtype == np.int8 else values).astype(dtype)


def suffix(kernel: Kernel) -> str:
    return kernel.slot.rpartition("_")[2]


def integer(kernel: Kernel) -> np.dtype:
    return np.dtype(f"int{suffix(kernel)}")


def same(got: np.ndarray, expected: np.ndarray, case) -> None:
    """Equal in every bit, except for those of NaN."""
    bits = f"u{got.itemsize}"
    is_nan = (got != got) & (expected != expected)
    differ = (np.ascontiguousarray(got).view(bits) != np.ascontiguousarray(expected).view(bits)) & ~is_nan
    assert got.dtype == expected.dtype
    assert not differ.any(), (f"{differ.sum()} differ", np.argwhere(differ)[:3], got, expected, case)


def compare(kernel: Kernel, expected: np.ndarray, *sources, shift: int = 1, step: int | None = None):
    """Runs a kernel that writes an array, and reads arrays and numbers: `sources`. Compares the bits that it wrote,
    unless its result is false; and returns that.
    """
    memory, before = Memory(), np.empty_like(expected)
    before.view(np.uint8)[...] = UNTOUCHED
    dst = memory.written(before, shift=shift)
    given = [memory.read(x, step, shift) if isinstance(x, np.ndarray) else x for x in sources]
    result = kernel(dst, *given)
    memory.check(sources)
    if result is not False:
        same(dst, expected, sources)
    return result


# Running sums

SUM_ROUNDINGS = 11  # table.h promises 10; the multiplication by scale adds one


def running_sums(values, carry, period: int, reverse: bool) -> tuple[np.ndarray, np.ndarray]:
    """The sums and the last sum of a segment; `values` have a wide type."""
    steps = len(values)
    order = slice(None, None, -1 if reverse else 1)
    sums, begins = np.empty_like(values), range(0, steps, period or steps)[order]
    for begin in begins:
        segment = slice(begin, begin + (period or steps))
        start = carry if period == 0 else np.zeros_like(carry)
        run = np.concatenate([start[None], values[segment][order]]).cumsum(0)
        sums[segment] = run[1:][order]
    return sums, run[-1]


def check_cumsum(kernel: Kernel, rng) -> None:
    dtype = [*FLOATS.values()][kernel.index - CONSTANTS["AM_FLOAT16"]]
    scan = "scan" in kernel.slot
    size, pad = max(dtype.itemsize, 4), CONSTANTS["AM_CUMSUM_PAD"]
    for _ in range(120):
        steps, lanes = pick(rng, [n for n in COUNTS if 0 < n < 300]), 1 if scan else pick(rng, COUNTS[1:])
        period, scale = pick(rng, [0, 0, 1, 3, 8, 64, steps, steps + 5]), pick(rng, [1.0, 0.5, -0.3])
        reverse, stream, exact = (bool(rng.random() < 0.5) for _ in range(3))
        fields = {"steps": steps, "lanes": lanes, "period": period, "reverse": reverse, "stream": stream}
        case, values = fields | {"scale": scale}, numbers(rng, (steps, lanes), dtype)
        if exact:
            values = rng.integers(-3, 4, (steps, lanes)).astype(dtype)
        if rng.random() < 0.2:
            values[rng.integers(steps), rng.integers(lanes)] = pick(rng, [np.nan, np.inf, -np.inf])
        start = rng.integers(-9, 9, lanes).astype(np.float64)  # ignored if there is a period
        line = 64 // dtype.itemsize
        step = -(-lanes // line) * line if stream else lanes + pick(rng, [0, 3])
        memory = Memory()
        src = memory.read(values, 1 if scan else lanes + pick(rng, [0, 5]), shift=pick(rng, [0, 1]))
        dst = memory.written(np.zeros_like(values), 1 if scan else step, shift=0 if stream else 1)
        carry = memory.written(np.concatenate([start, np.zeros(pad)]))
        strides = {
            f"{name}_stride": x.strides[0] // dtype.itemsize for name, x in (("dst", dst), ("src", src))
        }
        tile = structure("am_cumsum_tile", **fields, **strides)
        kernel(dst, src, tile, carry, scale)
        memory.check(case)
        assert (carry[lanes:] == 0).all(), case
        check_sums(
            values, start, period, reverse, scale, size, exact and scale != -0.3, dst, carry[:lanes], case
        )


def check_sums(values, start, period, reverse, scale, size, exact, dst, carry, case) -> None:
    wide = values.astype(WIDE[size])
    sums, last = running_sums(wide, start.astype(wide.dtype), period, reverse)
    sizes, last_size = running_sums(abs(wide), abs(start).astype(wide.dtype), period, reverse)
    if exact:  # integers or halves: only the conversion to the result's type rounds
        same(dst, (scale * sums).astype(dst.dtype), case)
        same(carry, last.astype(np.float64), case)
        return
    rounding = Bounded(last, np.zeros_like(last), size).unit
    carries = (len(values) // 8 + 5) * 2.0**-53  # `carry` rounds per block, and at the end
    narrowed = 0.0 if dst.itemsize >= 4 else float(ml_dtypes.finfo(dst.dtype).eps) / 2
    error = (SUM_ROUNDINGS * rounding + carries) * abs(scale) * sizes
    error += narrowed * (abs(scale * sums) + error) + (2.0**-25 if dst.dtype == np.float16 else 0)
    Bounded(scale * sums, error, size).check(dst, case)
    Bounded(last, (SUM_ROUNDINGS * rounding + carries) * last_size, size).check(carry, case)


# Conversions


def check_transpose(kernel: Kernel, rng) -> None:
    dtype = np.dtype(f"uint{suffix(kernel)}")
    for rows in (0, 1, 3, 7, 8, 9, 16, 17, 33):
        for columns in (0, 1, 2, 4, 5, 8, 15, 16, 31, 64):
            case, memory = (rows, columns), Memory()
            src = memory.read(
                rng.integers(1 << 32, size=(rows, columns), dtype=dtype), columns + pick(rng, [0, 3, 90])
            )
            dst = memory.written(np.zeros((columns, rows), dtype), rows + pick(rng, [0, 3, 90]), shift=1)
            kernel(
                dst, dst.strides[0] // dtype.itemsize, src, src.strides[0] // dtype.itemsize, rows, columns
            )
            memory.check(case)
            same(dst, src.T, case)


def check_widen(kernel: Kernel, rng) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(FLOATS[suffix(kernel)])
    for values in [every, *(rng.choice(every, count) for count in COUNTS)]:
        compare(kernel, values.astype(np.float32), values, values.size)


def check_narrow(kernel: Kernel, rng) -> None:
    dtype = FLOATS[suffix(kernel)]
    near = np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float32)
    ties = (near + np.roll(near, 1)) / 2  # halfway between neighbours; their neighbours follow
    every = np.concatenate([near, ties, np.nextafter(ties, np.inf), np.nextafter(ties, -np.inf)])
    every = np.concatenate(
        [every, numbers(rng, 1000, np.float32, 1e30), np.float32([1e38, -1e38, 1e-45, 65520, 65519])]
    )
    for values in [every, *(rng.choice(every, count) for count in COUNTS)]:
        compare(kernel, values.astype(dtype), values, values.size)


# Packed sequences


def starts_of(rng, sequences: int, dtype) -> np.ndarray:
    """Short, long and empty sequences."""
    lens = rng.integers(0, 40, sequences) * (rng.random(sequences) < 0.8)
    lens[rng.random(sequences) < 0.1] *= 9
    return np.concatenate([[0], lens.cumsum()]).astype(dtype)


def check_fill_tokens(kernel: Kernel, rng) -> None:
    dtype = integer(kernel)
    for _ in range(60):
        starts = starts_of(rng, int(rng.integers(1, 30)), np.intp)
        begin, end = sorted(rng.integers(0, starts[-1] + 1, 2).tolist())
        tokens = np.arange(begin, end)
        owner = np.searchsorted(starts, tokens, side="right") - 1
        position = tokens - starts[owner]
        expected = {
            "positions": position,
            "sequences": owner,
            "pairs": np.stack([owner, position], 1).ravel(),
        }
        expected = expected[kernel.slot.split("_")[1]].astype(dtype)
        sequence = int(np.searchsorted(starts, begin, side="right")) - 1
        compare(kernel, expected, starts, sequence, begin, end)


def check_lens(kernel: Kernel, rng) -> None:
    dtype = integer(kernel)
    for count in COUNTS:
        for falls in (False, True):
            starts = starts_of(rng, count, dtype)
            if falls and count:
                starts[rng.integers(1, count + 1)] = pick(rng, [-1, np.iinfo(dtype).min])
            rise = compare(kernel, np.diff(starts), starts, count)
            assert rise == (not falls or count == 0), (count, starts)


def check_chunk_offsets(kernel: Kernel, rng) -> None:
    dtype = integer(kernel)
    for count in COUNTS:
        for chunk in (1, 2, 3, 7, 64, 100, 2**31 - 1, 2**31, 2**40 + 1, 2**62):
            for falls in (False, False, True):
                starts = starts_of(rng, count, dtype)
                if falls and count:
                    starts[rng.integers(1, count + 1)] = -1
                elif count:
                    starts[-1] = pick(rng, [starts[-1], np.iinfo(dtype).max])
                chunks = np.concatenate([[0], cdiv(np.diff(starts), chunk)]).cumsum().astype(dtype)
                rise = compare(kernel, chunks, starts, count, chunk)
                assert rise == (not falls or count == 0), (count, chunk, falls, starts)


def cdiv(a: np.ndarray, b: int) -> np.ndarray:
    """The quotients in Python's integers, which do not overflow."""
    return np.array([-(-int(x) // b) for x in a], np.int64)


DIVISORS = (
    1, 2, 3, 5, 7, 64, 100, 641, 2**16 + 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32 + 3, 2**62 + 1, 2**63 - 1,
)  # fmt: skip


def check_divide(kernel: Kernel, rng) -> None:
    dtype = integer(kernel)
    least, top = np.iinfo(dtype).min, np.iinfo(dtype).max
    edges = [x for x in (-1, 0, 1, 2**31 - 1, 2**31, -(2**31), 2**32, least, top) if least <= x <= top]
    shifts = [0, 16, 30, 31, 32] if dtype.itemsize == 8 else [0, 8, 16]
    for b, shift in itertools.product(DIVISORS, shifts):
        for count in COUNTS[::3]:
            values = rng.integers(-top, top, count).astype(dtype) >> shift
            # Blocks of small numbers are faster.
            values[rng.random(count) < pick(rng, [0, 0.05])] = pick(rng, edges)
            compare(kernel, cdiv(values, b).astype(dtype), values, count, b)


# Rows of masks

LANES = ("u1", "u2", "u4", "u8", "f2", "f4", "f8")  # am_lane; bfloat16 has the same bits that count
MANY = 33_000  # more than 8-bit counters can count


def draw_mask(rng, count: int, dtype: np.dtype) -> np.ndarray:
    """A mask of mostly zeros or mostly non-zeros, which have only one bit set; zeros are of either sign."""
    bit = np.uint64(1) << rng.integers(0, 8 * dtype.itemsize - (dtype.kind == "f"), count).astype(np.uint64)
    values = np.where(rng.random(count) < pick(rng, [0, 0.003, 0.5, 0.99, 1]), bit, 0)
    values = values.astype(f"u{dtype.itemsize}").view(dtype)
    if dtype.kind == "f":
        values[(values == 0) & (rng.random(count) < 0.5)] = -0.0
        values[rng.random(count) < 0.001] = np.nan
    return values


def masks_of(kernel: Kernel, rng, counts):
    """Masks of each count, and where they are not zero."""
    dtype = np.dtype(LANES[kernel.index])
    for count in counts:
        for _ in range(4):
            values = draw_mask(rng, count, dtype)
            yield count, values, values != 0


def word_of(live: np.ndarray) -> int:
    return sum(1 << int(i) for i in np.flatnonzero(live))


TOLD = {  # of masks of these lengths
    "am_count_nonzero": ([*COUNTS, MANY], lambda kernel, live: live.sum()),
    "am_find_nonzero": (
        [*COUNTS, 5000],
        lambda kernel, live: (
            np.flatnonzero(live)[0 if ".first[" in kernel.slot else -1] if live.any() else -1
        ),
    ),
    "am_nonzero_bits": (range(WORD + 1), lambda kernel, live: word_of(live)),
}


def check_told(kernel: Kernel, rng) -> None:
    counts, told = TOLD[SLOTS[kernel.slot]]
    for count, values, live in masks_of(kernel, rng, counts):
        assert kernel(Memory().read(values, shift=1), count) == told(kernel, live), count


def check_pack_bits(kernel: Kernel, rng) -> None:
    for count, values, live in masks_of(kernel, rng, COUNTS):
        expected = np.zeros(-(-count // WORD), np.uint64)
        expected.view(np.uint8)[: -(-count // 8)] = np.packbits(live, bitorder="little")
        compare(kernel, expected, values, count, shift=0)


def check_collect(kernel: Kernel, rng) -> None:
    for count, values, live in masks_of(kernel, rng, COUNTS):
        memory = Memory()
        before = draw_mask(rng, count, values.dtype)
        seen = memory.written(before, shift=1)
        assert kernel(seen, memory.read(values, shift=1), count) == live.any(), count
        memory.check(count)
        np.testing.assert_array_equal(seen != 0, live | (before != 0), err_msg=repr(count))


def check_equal_bits(kernel: Kernel, rng) -> None:
    for count in range(WORD + 1):
        for wanted in (0, -1, 7):
            memory, ids = Memory(), rng.choice(np.int32([0, -1, 7, 7 + (1 << 16)]), count)
            assert kernel(memory.read(ids, shift=1), wanted, count) == word_of(ids == wanted), (count, wanted)


def check_expand_bits(kernel: Kernel, rng) -> None:
    size = np.dtype(LANES[kernel.index]).itemsize
    for count in range(WORD + 1):
        bits, live, dead = (int(x) for x in rng.integers(1 << 64, size=3, dtype=np.uint64))
        is_live = np.array([bits >> i & 1 for i in range(count)], bool)
        expected = np.where(is_live, np.uint64(live), np.uint64(dead)).astype(f"u{size}")
        compare(kernel, expected, bits, count, live, dead)


def check_fill_bytes(kernel: Kernel, rng) -> None:
    for size in (1, 2, 4, 8):
        for count in COUNTS:
            for stream in (False, True):
                element = rng.integers(1, 1 << 8 * size, dtype=np.uint64).astype(f"u{size}")
                pattern = int(np.full(8 // size, element).view(np.uint64)[0])
                shift = pick(rng, [0, 1, 3])
                compare(kernel, np.full(count, element), pattern, count * size, stream, shift=shift)


def check_transpose_bits(kernel: Kernel, rng) -> None:
    tiles = CONSTANTS["AM_TRANSPOSE_TILES"]
    for step in (tiles, tiles + 1, 3 * tiles):
        src = rng.integers(1 << 64, size=(WORD, tiles), dtype=np.uint64)
        bits = np.unpackbits(src.view(np.uint8), axis=1, bitorder="little").reshape(WORD, tiles, WORD)
        columns = np.ascontiguousarray(np.packbits(bits.transpose(2, 1, 0), axis=2, bitorder="little"))
        compare(kernel, columns.view(np.uint64)[..., 0], src, step, step=step)


def check_unlike_bits(kernel: Kernel, rng) -> None:
    for count in range(WORD + 1):
        memory, begin, lines = Memory(), int(rng.integers(70)), 200
        words = memory.read(rng.integers(0, 3, lines).astype(np.uint64) << np.uint64(63), shift=1)
        twin = memory.read(rng.integers(0, lines, lines, np.int32), shift=1)
        unlike = (words != words[twin])[begin : begin + count]
        assert kernel(words, twin, begin, count) == word_of(unlike), (begin, count)


def check_keep_bits(kernel: Kernel, rng) -> None:
    for threshold in (0, 1, 1 << 31, 0xE0000000, (1 << 32) - 1):
        for first in (0, 1, 64, 1 << 31, (1 << 32) - 40):  # counters may wrap around
            key = int(rng.integers(1 << 64, dtype=np.uint64))
            kept = kept_of(key, first) >= threshold
            assert kernel(key, first, threshold) == word_of(kept), (key, first, threshold)


def kept_of(key: int, first: int) -> np.ndarray:
    x = (np.arange(first, first + WORD, dtype=np.uint64) + np.uint64(key & 0xFFFFFFFF)).astype(np.uint32)
    x = (x ^ x >> 16) * np.uint32(0x7FEB352D)
    x = (x ^ x >> 15) * np.uint32(0x846CA68B)
    x = (x ^ x >> 16) + np.uint32(key >> 32)
    x = (x ^ x >> 17) * np.uint32(0xED5AD4BB)
    x = (x ^ x >> 11) * np.uint32(0xAC4C1B51)
    return x ^ x >> 15


CHECKS = {
    "am_chunk_offsets_32": check_chunk_offsets,
    "am_chunk_offsets_64": check_chunk_offsets,
    "am_collect_nonzero": check_collect,
    "am_count_nonzero": check_told,
    "am_cumsum_rows": check_cumsum,
    "am_cumsum_scan": check_cumsum,
    "am_divide_32": check_divide,
    "am_divide_64": check_divide,
    "am_equal_bits": check_equal_bits,
    "am_expand_bits": check_expand_bits,
    "am_fill_bytes": check_fill_bytes,
    "am_fill_tokens_32": check_fill_tokens,
    "am_fill_tokens_64": check_fill_tokens,
    "am_find_nonzero": check_told,
    "am_keep_bits": check_keep_bits,
    "am_lens_32": check_lens,
    "am_lens_64": check_lens,
    "am_narrow_16": check_narrow,
    "am_nonzero_bits": check_told,
    "am_pack_bits": check_pack_bits,
    "am_transpose": check_transpose,
    "am_transpose_bits": check_transpose_bits,
    "am_unlike_bits": check_unlike_bits,
    "am_widen_16": check_widen,
}
