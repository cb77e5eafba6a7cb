"""Compares the kernels that find weights, and rank them, with plain NumPy."""

from dataclasses import replace

import numpy as np
from kernel_checks import numbers, pick
from kernel_checks_backward import backward_structures, draw_backward
from kernel_checks_rows import TILE, arithmetic_of
from kernel_checks_step import STEPS, whole_rows, wide
from kernel_table import Kernel, Memory, structure
from reference_kernels import Bounded


def check_find_weights(kernel: Kernel, rng) -> None:
    arithmetic = arithmetic_of(kernel)
    for _ in range(STEPS):
        p, b = draw_backward(rng, arithmetic)
        p.terms = replace(p.terms, kept=None)
        b.wants_bias = False
        memory, rows, size, t = Memory(), len(p.q), arithmetic.size, arithmetic.dtype
        chosen = np.flatnonzero(rng.random(rows) < pick(rng, [0.5, 1]))
        stats = [memory.read(b.stats[0]), None, None, None]
        block, tile, *_ = backward_structures(memory, rng, arithmetic, p, b, stats)
        p_of = memory.written(np.full((rows, TILE), np.nan, t))
        block.p = p_of.ctypes.data
        old = numbers(rng, (2, rows), t)
        highest, entropy = (memory.written(x.copy()) for x in old)
        weighed = structure("am_weighed", rows=int(sum(1 << int(r) for r in chosen)))
        tells = rng.random() < 0.8
        if tells:
            weighed.highest, weighed.entropy = highest.ctypes.data, entropy.ctypes.data
        kernel(block, tile, weighed)
        memory.check(p)

        q, k = (Bounded.exact(wide(x), size) for x in (p.q, whole_rows(p.k)))
        live = np.ones((rows, TILE), bool) if p.terms.live is None else p.terms.live
        s, base = p.terms.logits(q, k), Bounded.exact(b.stats[0], size)[:, None]
        weights = ((s - base) * q.constant(p.terms.unit)).exp2().where(live)
        weights[chosen].check(p_of[chosen], ("weights", p))
        part = (weights * (base - s)).where(live & (weights.value > 0))
        if tells:
            (Bounded.exact(old[1], size) + part.sum())[chosen].check(entropy[chosen], ("entropy", p))
        seen = Bounded(np.where(live, s.value, -np.inf), np.where(live, s.error, 0), size)
        for r in chosen[~np.isnan(seen.value[chosen]).any(1)] if tells else ():
            most = max(seen.value[r].max(initial=-np.inf), old[0][r])
            Bounded(most, seen.error[r].max(initial=0), size).check(highest[r], ("highest", r, p))


def check_sum_weights(kernel: Kernel, rng) -> None:
    arithmetic = arithmetic_of(kernel)
    for _ in range(STEPS):
        memory, rows = Memory(), pick(rng, [1, 3, 16, TILE])
        weights, old = numbers(rng, (rows, TILE), arithmetic.dtype), numbers(rng, (TILE,), arithmetic.dtype)
        chosen, live = rng.random(rows) < pick(rng, [0.5, 1]), rng.random((rows, TILE)) < pick(rng, [0.5, 1])
        begin, end = sorted(rng.integers(0, rows + 1, 2).tolist())
        weights[~live] = np.nan
        words = np.packbits(live, axis=1, bitorder="little").view(np.uint64)
        sums = memory.written(old.copy())
        bits = int(sum(1 << int(r) for r in np.flatnonzero(chosen)))
        terms = None if live.all() else memory.read(words)
        kernel(memory.read(weights), terms, bits, begin, end, sums.ctypes.data)
        memory.check(rows)
        ones = np.where(chosen & (np.arange(rows) >= begin) & (np.arange(rows) < end), 1, 0)
        own = Bounded.exact(np.where(live, weights, 0)[ones > 0].astype(np.float64), arithmetic.size)
        before = Bounded.exact(old[:, None], arithmetic.size)
        one = Bounded.exact(np.ones((int(ones.sum()), 1)), arithmetic.size)
        own.T.dot(one, None, before)[:, 0].check(sums, (rows, begin, end))


def check_rank_keys(kernel: Kernel, rng) -> None:
    t = arithmetic_of(kernel).dtype
    integers = np.int32 if t == np.float32 else np.int64
    for _ in range(STEPS):
        memory, count = Memory(), pick(rng, [1, 2, 8, 9, 16, 17, 31, 33, 48, 49, 64, 65, 70, 130])
        in_line = 64 // np.dtype(t).itemsize
        whole = -(-count // in_line) * in_line
        places = [memory.written(np.full(whole, -1, of)) for of in (t, integers)]
        found: list[tuple[float, int]] = []
        for first in (0, 64, 300):
            weights = rng.integers(0, pick(rng, [2, 9, 1000]), TILE).astype(t) / 8
            live = rng.random(TILE) < pick(rng, [0.0, 0.5, 1.0])
            bits = int(sum(1 << int(i) for i in np.flatnonzero(live)))
            kernel(memory.read(weights), bits, first, *(x.ctypes.data for x in places), count)
            found += [(-float(weights[i]), first + int(i)) for i in np.flatnonzero(live)]
        memory.check(count)
        right = sorted(found)[:count] + [(1.0, -1)] * (count - len(found))
        assert places[0][:count].tolist() == [-weight for weight, _ in right]
        assert places[1][:count].tolist() == [key for _, key in right]
