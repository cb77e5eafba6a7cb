"""Compares the kernels that find weights, and rank them, with plain NumPy."""

from dataclasses import replace

import numpy as np
from kernel_checks import numbers, pick
from kernel_checks_backward import backward_structures, draw_backward
from kernel_checks_rows import TILE, arithmetic_of
from kernel_checks_step import STEPS, whole_rows, wide
from kernel_table import CONSTANTS, Kernel, Memory, structure
from reference_kernels import Bounded


def check_find_weights(kernel: Kernel, rng) -> None:
    arithmetic = arithmetic_of(kernel)
    for _ in range(STEPS):
        p, b = draw_backward(rng, arithmetic)
        p.terms = replace(p.terms, kept=None)
        b.wants_bias = False
        memory, rows, size, t = Memory(), len(p.q), arithmetic.size, arithmetic.dtype
        wanted = rng.random(rows) < pick(rng, [0.5, 1])
        each, chosen = pick(rng, [rows, TILE, 1, 3]), np.flatnonzero(wanted)
        stats = [memory.read(b.stats[0]), None, None, None]
        block, tile, *_ = backward_structures(memory, rng, arithmetic, p, b, stats)
        p_of = memory.written(np.full((rows, TILE), np.nan, t))
        block.p = p_of.ctypes.data
        old = [numbers(rng, (-(-rows // each), TILE), t), *numbers(rng, (2, rows), t)]
        sums, highest, entropy = (memory.written(x.copy()) for x in old)
        weighed = structure(
            "am_weighed",
            rows=int(sum(1 << int(r) for r in chosen)),
            sums=sums if rng.random() < 0.8 else None,
            rows_of_sum=each,
            sum_stride=sums.strides[0] // size,
        )
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
            (Bounded.exact(old[2], size) + part.sum())[chosen].check(entropy[chosen], ("entropy", p))
        if weighed.sums:
            for i, first in enumerate(range(0, rows, each)):
                own = chosen[(chosen >= first) & (chosen < first + each)]
                before, ones = (
                    Bounded.exact(old[0][i][:, None], size),
                    Bounded.exact(np.ones((len(own), 1)), size),
                )
                weights[own].T.dot(ones, None, before)[:, 0].check(sums[i], ("sums", p))
        seen = Bounded(np.where(live, s.value, -np.inf), np.where(live, s.error, 0), size)
        for r in chosen[~np.isnan(seen.value[chosen]).any(1)] if tells else ():
            most = max(seen.value[r].max(initial=-np.inf), old[1][r])
            Bounded(most, seen.error[r].max(initial=0), size).check(highest[r], ("highest", r, p))


def check_rank_keys(kernel: Kernel, rng) -> None:
    t = arithmetic_of(kernel).dtype
    integers = np.int32 if t == np.float32 else np.int64
    for _ in range(STEPS):
        memory, count = Memory(), pick(rng, [1, 2, 16, 70])
        whole = CONSTANTS["AM_RANKS_BEFORE"] + -(-count // 16) * 16
        greatest, keys = (memory.written(np.full(whole, -1, of)) for of in (t, integers))
        greatest[: CONSTANTS["AM_RANKS_BEFORE"]] = np.inf
        places = [x[CONSTANTS["AM_RANKS_BEFORE"] :] for x in (greatest, keys)]
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
