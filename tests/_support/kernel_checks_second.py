"""Compares the backward step with tangents of its gradients, over a tile of keys, with plain NumPy."""

import numpy as np
from kernel_checks import numbers
from kernel_checks_backward import Backward, backward_structures, draw_backward, operand
from kernel_checks_rows import TILE, Arithmetic, arithmetic_of
from kernel_checks_step import STEPS, Problem, is_finite, whole_rows, wide
from kernel_checks_tangents import Tangents, draw_tangents
from kernel_table import Kernel, Memory, structure
from reference_kernels import Bounded, Terms, packed_keys, packed_values


def run(
    kernel: Kernel, rng, arithmetic: Arithmetic, p: Problem, b: Backward, t: Tangents, moved: list
) -> list:
    """`moved` are the tangents of lse, and of what d_out · out is."""
    memory, panel = Memory(), arithmetic.panel
    block, tile, sums, _ = backward_structures(
        memory, rng, arithmetic, p, b, [None if x is None else memory.read(x) for x in b.stats]
    )
    given = {}
    if t.k is not None:
        given = {
            "k_columns": memory.read(packed_keys(t.k, panel)),
            "k": memory.read(packed_values(t.k, panel)),
        }
    if t.v is not None:
        given["v_columns"] = memory.read(packed_keys(t.v, panel))
    lse, products = (memory.read(x) for x in moved)
    scratch = [
        memory.written(np.full((len(p.q), TILE), np.nan, arithmetic.dtype)) for _ in ("by_q", "by_k", "by_v")
    ]
    if t.q is not None:
        given["q"] = operand(memory, arithmetic, t.q, block.q.stride)
    tangents = structure(
        "am_backward_tangents",
        k_finite=t.k is not None and is_finite(t.k),
        lse=lse,
        moved=products,
        **dict(zip(("by_q", "by_k", "by_v"), scratch, strict=True)),
        **given,
    )
    kernel(block, tile, tangents)
    memory.check(p)
    return [values[:, : before.shape[1]] for values, before in zip(sums, b.old, strict=True)]


def expected(p: Problem, b: Backward, t: Tangents, moved: list, size: int) -> list[Bounded]:
    """What d_q, d_k and d_v become."""
    terms, live = p.terms, p.terms.live

    def exact(x, rows: int) -> Bounded:
        return Bounded.exact(np.zeros((rows, 1)) if x is None else wide(x), size)

    q, k, v, d_out = (exact(x, 0) for x in (p.q, whole_rows(p.k), whole_rows(p.v), b.d_out))
    d_k, d_v = (None if x is None else exact(whole_rows(x), 0) for x in (t.k, t.v))
    d_q = None if t.q is None else exact(t.q, 0)
    base, rest, add, lse, products = (exact(x, 0)[:, None] for x in (*b.stats[:3], *moved))
    s, one = terms.logits(q, k), q.constant(1)
    power = ((s - base) * q.constant(terms.unit) + rest).exp2()
    zeros = exact(np.zeros(s.value.shape), 0)
    of_logits = zeros if d_q is None else d_q.dot(k.T)
    of_logits = of_logits if d_k is None else of_logits + q.dot(d_k.T)
    of_logits *= q.constant(b.scale)
    dp, of_dp = d_out.dot(v.T), zeros if d_v is None else d_out.dot(d_v.T)
    slope = None
    if terms.cap:
        bent = terms.bent(Terms(terms.factor, terms.unit, bias=terms.bias).logits(q, k))
        slope = (one - bent) * (one + bent)
        of_logits *= slope
    of_power = power * (of_logits - lse)
    weights = of_power
    if terms.kept is not None:
        dp, of_dp, weights = ((x * q.constant(b.kept_factor)).where(terms.kept) for x in (dp, of_dp, weights))
    ds = power * (dp + add)
    of_ds = of_power * (dp + add) + power * (of_dp - products)
    if terms.cap:
        bend = s * q.constant(1 / terms.cap) * q.constant(-2 / terms.cap)
        ds, of_ds = ds * slope, of_ds * slope + ds * bend * of_logits
    if live is not None:
        ds, of_ds, weights = (x.where(live) for x in (ds, of_ds, weights))
    ds, of_ds = (x * q.constant(b.scale) for x in (ds, of_ds))
    across = None if live is None else live.T
    sums = [Bounded.exact(array, size) for array in b.old]
    sums[0] = of_ds.dot(k, live, sums[0])
    sums[1] = of_ds.T.dot(q, across, sums[1])
    if d_k is not None:
        sums[0] = ds.dot(d_k, live, sums[0])
    if d_q is not None:
        sums[1] = ds.T.dot(d_q, across, sums[1])
    return [*sums[:2], weights.T.dot(d_out, across, sums[2])]


def check_backward_tangents(kernel: Kernel, rng) -> None:
    arithmetic = arithmetic_of(kernel)
    for _ in range(STEPS):
        p, b = draw_backward(rng, arithmetic)
        b.stats[3], b.wants_bias = None, False
        t = draw_tangents(rng, arithmetic, p)
        moved = list(numbers(rng, (2, len(p.q)), arithmetic.dtype))
        got = run(kernel, rng, arithmetic, p, b, t, moved)
        right = expected(p, b, t, moved, arithmetic.size)
        for name, mine, other, count in zip(
            ("d_q", "d_k", "d_v"), got, right, (None, p.columns, p.columns), strict=True
        ):
            other[:count].check(mine[:count], (name, p))
