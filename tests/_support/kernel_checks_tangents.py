"""Compares the forward step with tangents over a tile of keys with plain NumPy."""

from dataclasses import dataclass, replace

import numpy as np
from kernel_checks import numbers, pick
from kernel_checks_rows import DEPTHS, TILE, Arithmetic, arithmetic_of
from kernel_checks_step import (
    ROW_COUNTS,
    STEPS,
    Problem,
    block_of,
    check_dead_pairs,
    draw,
    draw_columns,
    draw_state,
    is_finite,
    tile_in,
    whole_rows,
    wide,
)
from kernel_table import Kernel, Memory, structure
from reference_kernels import Bounded, State, Terms, check_maxima, forward, packed_keys, packed_values


@dataclass
class Tangents:
    """Those of queries, keys, values and the bias; None: 0."""

    q: np.ndarray | None
    k: np.ndarray | None
    v: np.ndarray | None
    bias: np.ndarray | None

    def clean(self) -> "Tangents":
        k, v = (None if x is None else np.where(np.isfinite(x), x, 0) for x in (self.k, self.v))
        return replace(self, k=k, v=v)


def draw_tangents(rng, arithmetic: Arithmetic, p: Problem) -> Tangents:
    t = [numbers(rng, x.shape, arithmetic.dtype) if rng.random() < 0.7 else None for x in (p.q, p.k, p.v)]
    hidden = ~(np.isfinite(p.k).all(1) & np.isfinite(p.v).all(1))
    if p.terms.live is not None:
        hidden &= ~p.terms.live[:, : p.columns].any(0)
        for x in t[1:]:
            if x is not None:
                x[hidden] = np.nan
    biased = p.terms.bias is not None and rng.random() < 0.6
    return Tangents(*t, numbers(rng, (len(p.q), TILE), arithmetic.dtype) if biased else None)


def run(kernel: Kernel, rng, arithmetic: Arithmetic, p: Problem, t: Tangents, old: State) -> State:
    memory, panel, size = Memory(), arithmetic.panel, arithmetic.size
    rows, depth = p.q.shape
    block, mine = block_of(memory, arithmetic, p, old, depth, None, rows)
    moved = np.zeros_like(p.q) if t.q is None else t.q
    stride = 3 * depth + pick(rng, [0, 3])
    queries = memory.read(np.concatenate([p.q, moved, p.q], 1), stride)
    block.q, block.q_stride = queries.ctypes.data, stride
    keys = p.k if t.k is None else np.concatenate([p.k, t.k], 1)
    k, v = structure("am_rows"), structure("am_rows")
    k.data = memory.read(packed_keys(keys, panel)).ctypes.data
    v.data = memory.read(packed_values(p.v, panel)).ctypes.data
    tile = tile_in(memory, rng, p.terms, "AM_PACKED", k, v, finite=is_finite(p.v))
    tangents = structure(
        "am_flash_tangents",
        first=depth if t.q is None else 0,
        length=depth * ((t.q is not None) + (t.k is not None)),
        key_dim=keys.shape[1],
        v=None if t.v is None else memory.read(packed_values(t.v, panel)),
        v_finite=t.v is not None and is_finite(t.v),
        bias=None if t.bias is None else memory.read(t.bias),
        logits=memory.written(np.full((rows, TILE), np.nan, arithmetic.dtype)),
        columns=(old.out.shape[1] - panel // 2) // 2,
    )
    tangents.q = queries.ctypes.data + depth * size * (2 if t.q is None else 1)
    kernel(block, tile, tangents)
    memory.check(p)
    return mine


def tangents_of_logits(p: Problem, t: Tangents, size: int) -> Bounded:
    """In one product, of what is side by side."""
    a, b = ([] for _ in range(2))
    if t.q is not None:
        a, b = [t.q], [whole_rows(p.k)]
    if t.k is not None:
        a, b = [*a, p.q], [*b, whole_rows(t.k)]
    made = Bounded.exact(np.zeros((len(p.q), TILE)), size)
    if a:
        a, b = (Bounded.exact(wide(np.concatenate(x, 1)), size) for x in (a, b))
        made = a.dot(b.T)
    if t.bias is not None:
        made += Bounded.exact(t.bias, size)
    if p.terms.cap:
        q, k = (Bounded.exact(wide(x), size) for x in (p.q, whole_rows(p.k)))
        plain = Terms(p.terms.factor, p.terms.unit, bias=p.terms.bias)
        bent, one = p.terms.bent(plain.logits(q, k)), q.constant(1)
        made *= (one - bent) * (one + bent)
    return made


def check(p: Problem, t: Tangents, old: State, new: State, size: int, columns: int) -> None:
    q, k, v = (Bounded.exact(wide(x), size) for x in (p.q, whole_rows(p.k), whole_rows(p.v)))
    s, depth, live = p.terms.logits(q, k), p.v.shape[1], p.terms.live
    check_maxima(old, new, s, p.terms, p)
    base = Bounded.exact(np.maximum(new.running_max, np.finfo(new.running_max.dtype).min), size)
    powers = ((s - base[:, None]) * s.constant(p.terms.unit)).exp2()
    weights = powers * tangents_of_logits(p, t, size)
    weights = weights if live is None else weights.where(live)
    kept = weights if p.terms.kept is None else weights.where(p.terms.kept)

    def summed(some: slice, values: np.ndarray | None) -> State:
        """The sums of some columns after the step; without values they are only rescaled."""
        terms = p.terms if values is not None else replace(p.terms, live=np.zeros(s.value.shape, bool))
        values = np.zeros((TILE, len(range(*some.indices(old.out.shape[1]))))) if values is None else values
        held = Bounded.exact(wide(values), size)
        return forward(replace(old, out=old.out[:, some]), new.running_max, s, held, terms, None, False)

    first = summed(slice(depth), whole_rows(p.v))
    first.sum.check(new.sum, ("sum", p))
    first.out.check(new.out[:, :depth], ("out", p))
    behind = slice(columns, columns + depth)
    second = summed(behind, None if t.v is None else whole_rows(t.v)).out
    if t.bias is not None or (p.q.shape[1] > 0 and not (t.q is None and t.k is None)):
        second = kept.dot(v, live, second)
    second.check(new.out[:, behind], ("tangent", p))
    lanes = summed(slice(2 * columns, None), None).out.sum() + weights.sum()
    lanes.check(wide(new.out[:, 2 * columns :]).sum(1), ("sum of tangents", p))


def check_tangent_step(kernel: Kernel, rng) -> None:
    arithmetic = arithmetic_of(kernel)
    half = arithmetic.panel // 2
    for _ in range(STEPS):
        shape = (pick(rng, ROW_COUNTS), pick(rng, DEPTHS), pick(rng, DEPTHS), draw_columns(rng, arithmetic))
        p = draw(rng, arithmetic, shape, [1.0])
        t, columns = draw_tangents(rng, arithmetic, p), -(-shape[2] // half) * half
        old = draw_state(rng, arithmetic, shape[0], 2 * columns + half, False)
        old.row_max = None
        new = run(kernel, rng, arithmetic, p, t, old)
        check(p, t, old, new, arithmetic.size, columns)
        clean = run(kernel, rng, arithmetic, p.clean(), t.clean(), old)
        check_dead_pairs(p.untouched_rows(), new, clean, p)
