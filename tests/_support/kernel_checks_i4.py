"""Compares the kernels for keys and values of four bits with plain NumPy."""

from dataclasses import dataclass, replace

import numpy as np
from kernel_checks import pick
from kernel_checks_rows import MOST_I4, TILE, arithmetic_of
from kernel_checks_step import (
    ROW_COUNTS,
    STEPS,
    check_dead_pairs,
    draw,
    draw_columns,
    draw_state,
    run_unpacked,
    whole_rows,
    wide,
)
from kernel_table import Kernel
from reference_kernels import Bounded, check_maxima, forward


def in_memory(scales: np.ndarray) -> np.ndarray:
    """With a line behind them, which kernels may read."""
    memory = np.full(scales.size + 16, np.nan, np.float32)
    memory[:-16] = scales.ravel()
    return memory[:-16].reshape(scales.shape)


@dataclass
class Groups:
    """Numbers of four bits of a tile, and the scales and offsets of their groups as kernels take them."""

    halves: np.ndarray
    scales: np.ndarray  # [groups, 2, TILE]
    group: int

    def of(self, which: int) -> np.ndarray:
        """The scales, or the offsets, of all numbers."""
        return wide(self.scales[:, which]).repeat(self.group, axis=0).T[: len(self.halves)]

    def finite(self) -> "Groups":
        return replace(self, scales=in_memory(np.where(np.isfinite(self.scales), self.scales, 1)))

    def products(self) -> np.ndarray:
        return self.of(0) * np.stack([self.halves & 15, self.halves >> 4], axis=-1).reshape(
            len(self.halves), -1
        )


def draw_groups(rng, columns: int, groups: int, group: int, dead: np.ndarray) -> Groups:
    halves = rng.integers(0, 256, (columns, groups * group // 2), np.uint8)
    scales = in_memory(np.zeros((groups, 2, TILE)))
    scales[:, 0] = rng.uniform(-0.1, 0.3, (groups, TILE)) * 10 ** rng.uniform(-2, 1, TILE)
    scales[:, 1] = rng.uniform(-1, 1, (groups, TILE))
    scales[..., dead] = pick(rng, [0.0, np.nan, np.inf])
    return Groups(halves, scales, group)


def check_step_unpacked(kernel: Kernel, rng) -> None:
    arithmetic = replace(arithmetic_of(kernel), width=1)
    for _ in range(STEPS):
        rows, heads, columns = pick(rng, ROW_COUNTS), int(rng.integers(1, 4)), draw_columns(rng, arithmetic)
        k_group, v_group = pick(rng, [32, 64, 128]), pick(rng, [32, 64, 128])
        depth, value_depth = k_group * int(rng.integers(1, 5)), v_group * int(rng.integers(5))
        shape = rows, depth, value_depth, columns
        problems = [draw(rng, arithmetic, shape, [1.0], np.dtype(np.int8)) for _ in range(heads)]
        live = [np.ones((rows, TILE), bool) if p.terms.live is None else p.terms.live for p in problems]
        sides = [
            [draw_groups(rng, columns, n // group, group, ~some.any(0)) for some in live]
            for n, group in ((depth, k_group), (value_depth, v_group))
        ]
        problems = [replace(p, k=k.halves, v=v.halves) for p, k, v in zip(problems, *sides, strict=True)]
        old = [draw_state(rng, arithmetic, rows, value_depth, False) for _ in range(heads)]
        run = pick(rng, [0, 0, 2, 4, 16, 64])
        groups = {"k_group": k_group, "v_group": v_group}
        finite = [[side.finite() for side in of_heads] for of_heads in sides]
        scales = [[(k.scales, v.scales) for k, v in zip(*some, strict=True)] for some in (sides, finite)]
        given = kernel, rng, arithmetic, problems, old, run
        new, clean = (run_unpacked(*given, some, False, **groups) for some in scales)
        for p, before, after, beside, k, v in zip(problems, old, new, clean, *finite, strict=True):
            check_state(p, before, after, k, v)
            check_dead_pairs(p.untouched_rows(), after, beside, p)


def check_state(p, old, new, k: Groups, v: Groups) -> None:
    """Logits are two sums of products, with the numbers times scales and with the offsets; and so are results."""
    q = Bounded.exact(wide(np.concatenate([p.q, p.q], axis=1)), 4).to_i16(MOST_I4)
    keys = Bounded.exact(whole_rows(np.concatenate([k.products(), k.of(1)], axis=1)), 4)
    s = p.terms.logits(q, keys)
    check_maxima(old, new, s, p.terms, p)
    for begin in range(0, 2 * p.v.shape[1], v.group) or [0]:
        columns = slice(begin, begin + v.group)
        numbers, offsets = (Bounded.exact(whole_rows(x[:, columns]), 4) for x in (v.products(), v.of(1)))
        before = replace(old, out=old.out[:, columns])
        scales = wide(v.scales[begin // v.group, 0]) if len(v.scales) else np.ones(TILE)
        expected = forward(before, new.running_max, s, numbers, p.terms, None, False, abs(scales), offsets)
        expected.sum.check(new.sum, ("sum", p))
        expected.out.check(new.out[:, columns], ("out", p))
