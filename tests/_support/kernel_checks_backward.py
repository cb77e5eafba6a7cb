"""Compares the backward steps of attention over a tile of keys with plain NumPy."""

from dataclasses import dataclass

import numpy as np
from kernel_checks import numbers, pick
from kernel_checks_rows import DEPTHS, TILE, Arithmetic, arithmetic_of
from kernel_checks_step import (
    ROW_COUNTS,
    STEPS,
    Problem,
    draw,
    draw_columns,
    is_finite,
    padded_columns,
    prefetch_of,
    terms_in,
    whole_rows,
    wide,
)
from kernel_table import CONSTANTS, Kernel, Memory, structure
from reference_kernels import Bounded, Terms, backward, lanes_of, packed_keys, packed_values


@dataclass
class Backward:
    """The arguments of a backward step that are not in its problem."""

    d_out: np.ndarray
    stats: list  # base, rest, add, share (which may be None)
    old: list  # d_q, d_k, d_v
    scale: float
    kept_factor: float
    wants_bias: bool


def draw_backward(rng, arithmetic: Arithmetic) -> tuple[Problem, Backward]:
    rows, columns = pick(rng, ROW_COUNTS), draw_columns(rng, arithmetic)
    depth, value_depth, t = pick(rng, DEPTHS), pick(rng, DEPTHS), arithmetic.dtype
    p = draw(rng, arithmetic, (rows, depth, value_depth, columns), [1.0, 0.4, -0.7])
    exact = rng.random() < 0.3
    if exact:  # small integers, so that logits may equal `base`
        p.q, p.k = (rng.integers(-2, 3, x.shape).astype(arithmetic.factors) for x in (p.q, p.k))
        p.strange, p.terms = "nothing", Terms(0.5, 1.0, live=p.terms.live, kept=p.terms.kept)
    if p.terms.kept is None and rng.random() < 0.3:
        p.terms.kept = rng.random((rows, TILE)) < 0.7
    s = p.terms.logits(*(Bounded.exact(wide(x), arithmetic.size) for x in (p.q, whole_rows(p.k))))
    live = True if p.terms.live is None else p.terms.live
    base = np.fmax.reduce(np.where(live, s.value, -np.inf), axis=1)  # logits hardly exceed it
    stats = [np.where(base > -np.inf, base, 0), *numbers(rng, (2, rows), t, 0.5), None]
    if exact:
        stats[3] = numbers(rng, rows, t)
    d_out = numbers(rng, (rows, value_depth), arithmetic.factors)
    if p.strange == "a query" and rng.random() < 0.5:
        d_out[rng.integers(rows), : value_depth // 2] = np.inf
    old = [numbers(rng, shape, t) for shape in ((rows, depth), (TILE, depth), (TILE, value_depth))]
    stats = [None if x is None else x.astype(t) for x in stats]
    return p, Backward(d_out, stats, old, pick(rng, [1.0, 0.3, -0.6]), 1 / 0.7, bool(rng.random() < 0.4))


def operand(memory: Memory, arithmetic: Arithmetic, values: np.ndarray, stride: int):
    """Queries or d_out as the step reads them: by rows, and as the factors that it multiplies by P or dS."""
    dim, panel = values.shape[1], arithmetic.panel
    if arithmetic.width == 2:
        lanes, packed = memory.read(lanes_of(values, 2)), packed_values(values, panel, 2)
        if arithmetic.by_channel:
            packed = np.ascontiguousarray(packed.reshape(-1, TILE // 2, panel).transpose(0, 2, 1)).ravel()
        packed = memory.read(packed)
    else:
        lanes = packed = memory.read(padded_columns(values, -(-dim // panel) * panel), stride)
    members = {"lanes": lanes, "packed": packed, "finite": is_finite(values)}
    return structure("am_backward_operand", dim=dim, stride=stride, **members)


def sum_of(memory: Memory, values: np.ndarray, stride: int, by_channel: bool) -> np.ndarray:
    """A sum in memory: rows, or channels, are ``stride`` apart."""
    if by_channel:
        return memory.written(np.ascontiguousarray(values.T), stride).T
    return memory.written(values, stride)


def sum_in(rng, memory: Memory, own: np.ndarray, old: np.ndarray, rows: int):
    """To what a step adds its products; and in memory, where that is added, if it is.

    The sum is ``old`` in some rows, or fresh: then these become 0. If it is added elsewhere, ``old`` is in one of both.
    """
    fresh, strides = bool(rng.random() < 0.3), [step // own.itemsize for step in own.strides]
    stride, by_channel = max(strides), strides[0] == 1
    onto = sum_of(memory, own.copy(), stride, by_channel) if rng.random() < 0.4 else None
    if onto is None:
        old[:rows] *= not fresh
        members = {}
    else:
        if not fresh:
            pick(rng, [own, onto])[:rows] = 0
        members = {"onto": onto, "onto_stride": stride}
    if fresh:
        own[:rows] = np.nan
    return structure("am_backward_sum", sum=own, fresh=fresh, **members), onto


def backward_structures(memory: Memory, rng, arithmetic: Arithmetic, p: Problem, b: Backward, stats: list):
    """The structures of the block and the tile, and the accumulators in memory: d_q, d_k, d_v and d_bias."""
    panel, width = arithmetic.panel, arithmetic.width
    (rows, depth), value_depth = p.q.shape, p.v.shape[1]
    columns, value_columns = (-(-d // panel) * panel for d in (depth, value_depth))
    stride, value_stride = (c + pick(rng, [0, 64 // arithmetic.size]) for c in (columns, value_columns))
    scratch_rows = TILE if arithmetic.by_channel else rows + rows % width
    scratch = [memory.written(np.full((scratch_rows, TILE), np.nan, arithmetic.dtype)) for _ in range(2)]
    by_channel = (False, arithmetic.by_channel, arithmetic.by_channel)
    sums = [
        sum_of(
            memory, padded_columns(values, count), CONSTANTS["AM_CHANNEL_STRIDE"] if turned else step, turned
        )
        for values, count, step, turned in zip(
            b.old, (columns, columns, value_columns), (stride, stride, value_stride), by_channel, strict=True
        )
    ]
    d_bias, d_bias_stride = None, pick(rng, [TILE, 3 * TILE])
    if b.wants_bias:
        d_bias = memory.written(np.ones((rows, TILE), arithmetic.dtype), d_bias_stride)
    to = [
        sum_in(rng, memory, own, old, count)
        for own, old, count in zip(sums, b.old, (rows, p.columns, p.columns), strict=True)
    ]
    sums = [onto if onto is not None else own for (_, onto), own in zip(to, sums, strict=True)]
    block = structure(
        "am_backward_rows",
        rows=rows,
        q=operand(memory, arithmetic, p.q, stride),
        d_out=operand(memory, arithmetic, b.d_out, value_stride),
        d_q=to[0][0],
        **dict(zip(("base", "rest", "add", "share", "p", "ds"), (*stats, *scratch), strict=True)),
        scale=b.scale,
        factor=p.terms.factor,
        cap=p.terms.cap,
        unit=p.terms.unit,
        kept_factor=b.kept_factor,
    )
    tile = structure(
        "am_backward_tile",
        k_columns=memory.read(packed_keys(p.k, panel, width)),
        v_columns=memory.read(packed_keys(p.v, panel, width)),
        k=memory.read(packed_values(p.k, panel, width)),
        k_finite=is_finite(p.k),
        d_k=to[1][0],
        d_v=to[2][0],
        terms=terms_in(memory, rng, p.terms),
        d_bias=d_bias,
        d_bias_stride=d_bias_stride,
        columns=p.columns,
        prefetch=prefetch_of(rng, memory),
    )
    return block, tile, sums, d_bias


def run_backward(kernel: Kernel, rng, arithmetic: Arithmetic, p: Problem, b: Backward) -> list:
    memory = Memory()
    stats = [None if x is None else memory.read(x) for x in b.stats]
    block, tile, sums, d_bias = backward_structures(memory, rng, arithmetic, p, b, stats)
    kernel(block, tile)
    memory.check(p)
    for values, before in zip(sums, b.old, strict=True):
        assert not (abs(values[:, before.shape[1] :]) > 0).any(), ("beyond the depth", p)
    d_q, d_k, d_v = (values[:, : before.shape[1]] for values, before in zip(sums, b.old, strict=True))
    return [d_bias, d_q, d_k, d_v]


def check_backward(kernel: Kernel, rng) -> None:
    arithmetic = arithmetic_of(kernel)
    for _ in range(STEPS):
        p, b = draw_backward(rng, arithmetic)
        d_bias, *gradients = run_backward(kernel, rng, arithmetic, p, b)
        q, k, v, d_out = (
            Bounded.exact(wide(x), arithmetic.size) for x in (p.q, whole_rows(p.k), whole_rows(p.v), b.d_out)
        )
        expected = backward(
            q, k, v, d_out, p.terms, b.stats, b.old, b.scale, b.kept_factor, arithmetic.width == 2
        )
        if d_bias is not None:
            expected.d_bias.check(d_bias, ("d_bias", p))
        expected.d_q.check(gradients[0], ("d_q", p))
        for name, got, before in zip(("d_k", "d_v"), gradients[1:], b.old[1:], strict=True):
            keys = slice(
                p.columns if arithmetic.by_channel else None
            )  # else those behind are left as they are
            getattr(expected, name)[keys].check(got[keys], (name, p))
            np.testing.assert_array_equal(
                got[keys][p.columns :], before[keys][p.columns :], err_msg=f"{name} {p}"
            )


def check_find_row_max(kernel: Kernel, rng) -> None:
    arithmetic = arithmetic_of(kernel)
    for _ in range(STEPS):
        p, b = draw_backward(rng, arithmetic)
        rows, t, memory = len(p.q), arithmetic.dtype, Memory()
        begun = rng.random(rows) < pick(rng, [0, 0.7])
        old = [np.where(begun, x, y).astype(t) for x, y in zip(b.stats[:3], (-np.inf, 0, 0), strict=True)]
        old[0][begun] += rng.integers(-3, 4, begun.sum())
        old[1], old[2] = abs(old[1]), np.where(begun, rng.integers(1, 5, rows), 0).astype(t)
        base, rest, share = (memory.written(x) for x in old)
        block, tile, *_ = backward_structures(memory, rng, arithmetic, p, b, [base, rest, None, share])
        tile.kept = tile.d_bias = None
        kernel(block, tile)
        memory.check(p)
        check_row_max(arithmetic, p, old, (base, rest, share))


def check_row_max(arithmetic: Arithmetic, p: Problem, old: list, new: tuple) -> None:
    """Rows that see a NaN or +Inf must get NaN; nothing else is required of them."""
    size = arithmetic.size
    s = p.terms.logits(*(Bounded.exact(wide(x), size) for x in (p.q, whole_rows(p.k))))
    live = np.ones(s.value.shape, bool) if p.terms.live is None else p.terms.live
    s = Bounded(np.where(live, s.value, -np.inf), np.where(live, s.error, 0), size)
    sound = ~np.isnan(s.value).any(1) & (s.value < np.inf).all(1)
    assert np.isnan(new[0])[~sound].all(), p
    base, rest, share = (x[sound] for x in new)
    before, s, live = [x[sound] for x in old], s[sound], live[sound]
    highest = np.maximum(s.value.max(1, initial=-np.inf), before[0])
    Bounded(highest, s.error.max(1, initial=0), size).check(base, ("base", p))
    start = Bounded.exact(np.where(base > -np.inf, base, 0), size)
    unit = s.constant(p.terms.unit)
    powers = ((s - start[:, None]) * unit).exp2().where(live)
    kept = (base == before[0]) | (before[0] == -np.inf)
    factor = ((Bounded.exact(np.where(kept, 0, before[0]), size) - start) * unit).exp2()
    factor = Bounded(np.where(kept, 1, factor.value), np.where(kept, 0, factor.error), size)
    (Bounded.exact(before[1], size) * factor + powers.sum()).check(rest, ("rest", p))
    # `exact` are logits that certainly equal the maximum, `near` those that may.
    near = live & (abs(s.value - base[:, None]) <= s.error)
    exact = live & (s.value == base[:, None]) & (s.error == 0) & (base > -np.inf)[:, None]
    earlier = np.where(base == before[0], before[2], 0)
    assert (share >= earlier + exact.sum(1)).all(), ("share", p)
    assert (share <= earlier + near.sum(1)).all(), ("share", p)
