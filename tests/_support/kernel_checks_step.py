"""Compares the forward steps of attention over a tile of keys with plain NumPy, on random tiles of critical sizes."""

import ctypes
from dataclasses import dataclass, replace

import numpy as np
from kernel_checks import numbers, pick
from kernel_checks_rows import (
    DEPTHS,
    FLOAT8,
    TILE,
    Arithmetic,
    arithmetic_of,
    format_of,
    most_in_i16,
    packed_query_lanes,
    rows_in,
)
from kernel_table import CONSTANTS, TYPES, Kernel, Memory, structure
from reference_kernels import (
    EXP2_ERROR_BF16X2,
    Bounded,
    State,
    Terms,
    check_maxima,
    forward,
    lanes_of,
    packed_keys,
    packed_values,
)

LOG2_E = float(np.log2(np.e))
Q_FACTOR = 0.25  # of queries that are packed without a factor


def wide(values: np.ndarray) -> np.ndarray:
    """Converts to float64, since not all functions of NumPy support bfloat16."""
    return values.astype(np.float64)


def is_finite(values: np.ndarray) -> bool:
    return bool(np.isfinite(wide(values)).all())


@dataclass
class Problem:
    """A block of rows and a tile of keys, as plain numbers rather than in the layout of kernels."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    terms: Terms
    strange: str  # which numbers are NaN or Inf

    @property
    def columns(self) -> int:
        return len(self.k)

    def __repr__(self) -> str:
        t = self.terms
        have = [name for name in ("bias", "live", "kept") if getattr(t, name) is not None]
        shapes = (
            f"rows={len(self.q)} keys={self.columns} depth={self.k.shape[1]} value_depth={self.v.shape[1]}"
        )
        return f"{shapes} factor={t.factor} unit={t.unit} cap={t.cap} {have} strange={self.strange}"

    def clean(self) -> "Problem":
        k, v = (np.where(np.isfinite(wide(x)), x, np.zeros_like(x)) for x in (self.k, self.v))
        return replace(self, k=k, v=v)

    def untouched_rows(self) -> np.ndarray:
        """Rows that have no live pair with a key whose numbers are NaN or Inf."""
        strange = ~np.isfinite(wide(self.k)).all(1) | ~np.isfinite(wide(self.v)).all(1)
        live = np.ones((len(self.q), TILE), bool) if self.terms.live is None else self.terms.live
        return ~(live[:, : self.columns] & strange).any(1)


def draw_live(rng, rows: int, columns: int) -> np.ndarray | None:
    """The live pairs of a tile of `columns` keys, or None if all pairs of a whole tile are live."""
    kind = pick(rng, ["all", "random", "causal", "rows", "one", "few"])
    if kind == "all" and columns == TILE:
        return None
    r, c = np.arange(rows)[:, None], np.arange(TILE)[None]
    kinds = {
        "all": np.ones((rows, TILE), bool),
        "random": rng.random((rows, TILE)) < 0.5,
        "causal": c <= r + rng.integers(-1, TILE),
        "rows": np.broadcast_to(rng.random((rows, 1)) < 0.5, (rows, TILE)),
        "one": (c == rng.integers(columns)) & (r == rng.integers(rows)),
        "few": np.broadcast_to(abs(c - rng.integers(columns)) < 3, (rows, TILE)),
    }
    live = kinds[kind] & (c < columns)
    if not live.any():
        live[0, columns - 1] = True
    return live


def draw_terms(rng, rows: int, columns: int, arithmetic: Arithmetic, factors) -> Terms:
    """Terms under which logits are products times a factor; or with any of bias, soft cap and dropout."""
    terms = Terms(pick(rng, factors), 1.0, live=draw_live(rng, rows, columns))
    if rng.random() < 0.4:
        terms.factor = abs(terms.factor)
        return terms
    terms.unit = pick(rng, [1.0, LOG2_E])
    terms.cap = pick(rng, [0.0, 0.0, 2.5, 50.0])
    if rng.random() < 0.5:
        terms.bias = numbers(rng, (rows, TILE), arithmetic.dtype)
    if rng.random() < 0.5:
        terms.kept = rng.random((rows, TILE)) < 0.7
    return terms


def factors_of(arithmetic: Arithmetic) -> list[float]:
    """The factors of forward steps: where a lane holds one number, queries or keys are scaled beforehand."""
    return [1.0, 0.4, -0.7] if arithmetic.width == 2 else [1.0]


def draw(rng, arithmetic: Arithmetic, shape: tuple[int, int, int, int], factors, source=None) -> Problem:
    (rows, depth, value_depth, columns), source = shape, source or arithmetic.factors
    q = numbers(rng, (rows, depth), arithmetic.factors, 3 / max(depth, 1) ** 0.5)
    k, v = numbers(rng, (columns, depth), source), numbers(rng, (columns, value_depth), source)
    if (
        source != np.int8 and rng.random() < 0.2
    ):  # logits need no rounding, so that errors of powers are visible to the last digit
        q, k = (np.rint(8 * x.astype(np.float32)).astype(x.dtype) / x.dtype.type(8) for x in (q, k))
    terms = draw_terms(rng, rows, columns, arithmetic, factors)
    strange = pick(rng, ["nothing", "nothing", "dead keys", "dead pairs", "a query", "a key", "a value"])
    if source == np.int8:  # which is never strange
        strange = pick(rng, ["nothing", "a query"])
    c, special = rng.integers(columns), pick(rng, [np.nan, np.inf, -np.inf])
    if "dead" in strange and terms.live is not None and columns > 1:
        terms.live[rng.random(rows) < (2 if strange == "dead keys" else 0.5), c] = False
        terms.live[0, (c + 1) % columns] = True
        k[c, : None if strange == "dead keys" else 0] = special
        v[c, rng.random(value_depth) < 0.5] = np.nan
    elif strange == "a query":
        q[rng.integers(rows), : depth // 2] = np.nan
    elif strange == "a key":
        k[c, : depth // 2] = special
    elif strange == "a value":
        v[c, value_depth // 2 :] = special
    return Problem(q, k, v, terms, strange)


def prefetch_of(rng, memory: Memory) -> int:
    """The address of a plan to prefetch nothing, or some rows of memory."""
    plan = structure("am_prefetch_plan", steps=pick(rng, [1, 3]))
    if rng.random() < 0.5:
        plan.count = int(rng.integers(CONSTANTS["AM_PREFETCH_MOST"])) + 1
    address = memory.read(np.zeros((64, 256), np.float32)).ctypes.data
    for rows in plan.rows[: plan.count]:
        rows.at, rows.stride = address + int(rng.integers(64)), pick(rng, [1024, 1000, 24])
        rows.length, rows.rows = int(rng.integers(1, 600)), pick(rng, [1, 7, 64])
    memory.kept.append(plan)
    return ctypes.addressof(plan)


def draw_state(rng, arithmetic: Arithmetic, rows: int, out_depth: int, rounds: bool) -> State:
    """The accumulators of a block at the beginning, or later; rows whose keys were all dead are as at the beginning.
    The first column of the result is the sum, and stays so if all values of that column are 1. `rounds`: weights are
    rounded to bfloat16, so that there may be a second sum.
    """
    t = arithmetic.dtype
    state = State(np.zeros((rows, out_depth), t), np.full(rows, -np.inf, t), np.zeros(rows, t), None)
    begun = rng.random(rows) < pick(rng, [0, 0.8])
    state.out[begun] = numbers(rng, (begun.sum(), out_depth), t)
    state.running_max[begun] = numbers(rng, begun.sum(), t, 12)
    state.sum[begun] = 1 + rng.random(begun.sum())
    state.out[:, :1] = state.sum[:, None]
    if rounds and rng.random() < 0.5:
        state.exact_sum = (state.sum * rng.uniform(0.99, 1.01, rows)).astype(t)
    if rng.random() < 0.5:
        state.row_max = np.where(begun, state.running_max + rng.integers(0, 8), -np.inf).astype(t)
    return state


def block_of(
    memory: Memory,
    arithmetic: Arithmetic,
    p: Problem,
    state: State,
    q_stride: int,
    q_packed,
    scratch: int,
    float_weights: bool = False,
):
    """The structure of a block, and its accumulators in memory."""
    q, rows = lanes_of(p.q, arithmetic.width), len(p.q)
    mine = State(*(None if x is None else memory.written(x) for x in vars(state).values()))
    block = structure(
        "am_flash_rows",
        rows=rows,
        head_dim=q.shape[1],
        out_dim=state.out.shape[1],
        q=memory.read(q, q_stride),
        q_stride=q_stride,
        q_packed=q_packed,
        logits=memory.written(np.full((scratch, TILE), np.nan, arithmetic.dtype)),
        cap=p.terms.cap,
        factor=p.terms.factor,
        q_factor=Q_FACTOR,
        float_weights=float_weights,
        unit=p.terms.unit,
        **vars(mine),
    )
    return block, mine


def words_of(pairs: np.ndarray) -> np.ndarray:
    return np.packbits(pairs, axis=1, bitorder="little").view(np.uint64).ravel()


def terms_in(memory: Memory, rng, terms: Terms):
    """The structure of the terms of a tile, which are in memory."""
    words = {
        name: None if pairs is None else memory.read(words_of(pairs))
        for name, pairs in (("live", terms.live), ("kept", terms.kept))
    }
    step = pick(rng, [TILE, TILE + 5, -TILE - 1])
    bias = None if terms.bias is None else memory.read(terms.bias, step)
    return structure("am_logit_terms", **words, bias=bias, bias_stride=step)


def tile_in(memory: Memory, rng, terms: Terms, layout: str, k, v, **more):
    """The structure of a tile whose keys and values are in memory."""
    fields = {"prefetch": prefetch_of(rng, memory), "terms": terms_in(memory, rng, terms)}
    return structure("am_flash_tile", layout=CONSTANTS[layout], k=k, v=v, **fields, **more)


def whole_rows(values: np.ndarray) -> np.ndarray:
    """Pads with rows of zeros up to a whole tile."""
    return np.pad(values, ((0, TILE - len(values)), (0, 0)))


def padded_columns(values: np.ndarray, count: int) -> np.ndarray:
    return np.pad(values, ((0, 0), (0, count - values.shape[1])))


def check_state(
    arithmetic: Arithmetic,
    p: Problem,
    old: State,
    new: State,
    i16_scales=None,
    by_bf16: bool = False,
    float_weights: bool = False,
) -> None:
    """`i16_scales`: those of values, if queries and P become sixteen-bit integers; `by_bf16`: they become bfloat16;
    `float_weights`: P does not become bfloat16.
    """
    q, k, v = (Bounded.exact(wide(x), arithmetic.size) for x in (p.q, whole_rows(p.k), whole_rows(p.v)))
    if i16_scales is not None:
        q = q.to_i16(most_in_i16(p.q.shape[1]))
    elif by_bf16:
        q = q.to_bf16()
    s = p.terms.logits(q, k)
    check_maxima(old, new, s, p.terms, p)
    narrow = (arithmetic.width == 2 and not float_weights) or by_bf16
    rounding = EXP2_ERROR_BF16X2 if narrow else None
    columns = slice(p.v.shape[1])  # the others are not defined
    before = replace(old, out=old.out[:, columns])
    expected = forward(before, new.running_max, s, v, p.terms, rounding, narrow, i16_scales)
    expected.sum.check(new.sum, ("sum", p))
    if new.exact_sum is not None:
        expected.exact_sum.check(new.exact_sum, ("exact sum", p))
    expected.out.check(new.out[:, columns], ("out", p))


def check_ones(p: Problem, new: State) -> None:
    """Where all values are 1, the result is the sum: weights are added as they are multiplied."""
    if p.v.shape[1] and (p.v[:, 0] == 1).all() and p.terms.kept is None:
        np.testing.assert_allclose(new.out[:, 0], new.sum, rtol=1e-5, err_msg=repr(p))


def draw_columns(rng, arithmetic: Arithmetic) -> int:
    panel = arithmetic.panel
    return pick(rng, [1, 2, panel - 1, panel, panel + 1, 63, 64, 64, 64, 64])


# Numbers of rows around those of strips.
ROW_COUNTS = [1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 16, 17, 24, 31, 32, 33, 48, 63, 64]
STEPS = 60  # random tiles per kernel
LAYOUTS = {
    "packed": "AM_PACKED",
    "unpacked": "AM_PACKED_KEYS",
    "transposed": "AM_TRANSPOSED_PACKED_VALUES",
    "transposed unpacked": "AM_TRANSPOSED_ROWS",
}


def run_step(
    kernel: Kernel, rng, arithmetic: Arithmetic, p: Problem, old: State, kind: str, scales: tuple
) -> State:
    """Runs one step. `kind` is packed, unpacked (only values are), or transposed with packed or unpacked values."""
    memory, width, panel = Memory(), arithmetic.width, arithmetic.panel
    transposed, unpacked = kind.startswith("transposed"), kind.endswith("unpacked")
    run = pick(rng, [0, 8, 16, 32, 64]) if unpacked and p.columns == TILE else 0
    k, v = structure("am_rows"), structure("am_rows")
    q_packed = memory.read(packed_keys(p.q, panel, width)) if transposed else None
    if transposed:
        k, _k_runs = rows_in(memory, p.k, rng, width, run, plain=True)
    else:
        k.data = memory.read(packed_keys(p.k, panel, width)).ctypes.data
    if unpacked:
        v, _v_runs = rows_in(memory, p.v, rng, width, run, plain=True)
    else:
        v.data = memory.read(packed_values(p.v, panel, width)).ctypes.data
    depth = -(-p.q.shape[1] // width)
    scratch = CONSTANTS["AM_FLASH_ROWS"] if transposed else len(p.q)
    block, mine = block_of(memory, arithmetic, p, old, depth + pick(rng, [0, 3]), q_packed, scratch)
    given = {"k_scales": scales[0], "v_scales": scales[1], "finite": is_finite(p.v) and not unpacked}
    tile = tile_in(memory, rng, p.terms, LAYOUTS[kind], k, v, keys=p.columns, **given)
    tile.terms.all_keys = p.columns if p.terms.live is None or p.terms.live[:, : p.columns].all() else 0
    kernel(block, tile)
    memory.check(p)
    return mine


def draw_step(rng, arithmetic: Arithmetic) -> tuple[str, Problem, int]:
    """A kind for `run_step`, a problem, and the depth of the result."""
    width, panel = arithmetic.width, arithmetic.panel
    kinds = ["packed", "packed"] + ([] if arithmetic.packed_alone else ["unpacked"])
    kind = pick(rng, kinds + (["transposed", "transposed unpacked"] if arithmetic.can_transpose else []))
    out_depth = panel // 2 * int(rng.integers(6))
    value_depth = max(out_depth - int(rng.integers(panel // 2)), 0)
    if kind.endswith("unpacked"):
        value_depth = out_depth = out_depth // panel * panel if width == 2 else out_depth
    rows, depth, columns = pick(rng, ROW_COUNTS), pick(rng, DEPTHS), draw_columns(rng, arithmetic)
    if kind == "unpacked":
        columns = TILE
    if kind.startswith("transposed"):
        depth = max(-(-depth // width), 1) * width
        columns = max(columns // width * width, width) if kind.endswith("unpacked") else columns
    p = draw(rng, arithmetic, (rows, depth, value_depth, columns), factors_of(arithmetic))
    if kind.endswith("unpacked"):  # all pairs are live
        p.terms.live = None if columns == TILE else np.broadcast_to(np.arange(TILE) < columns, (rows, TILE))
    return kind, p, out_depth


def draw_scales(rng, arithmetic: Arithmetic) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Scales of the keys and of the values of a tile, which may have none."""
    if rng.random() < 0.7:
        return None, None
    return tuple(rng.uniform(0.5, 2, TILE).astype(arithmetic.dtype) for _ in range(2))


def check_step(kernel: Kernel, rng) -> None:
    """Only steps whose lanes hold two numbers multiply by scales; those of dead keys may be anything."""
    arithmetic = arithmetic_of(kernel)
    for _ in range(STEPS):
        kind, p, out_depth = draw_step(rng, arithmetic)
        old = draw_state(rng, arithmetic, len(p.q), out_depth, arithmetic.width == 2)
        p.v[:, :1] = pick(rng, [1, p.v[:, :1]])
        scales = None, None
        if arithmetic.width == 2 and kind == "packed" and not arithmetic.packed_alone:
            scales = draw_scales(rng, arithmetic)
        if scales[0] is not None and p.terms.live is not None:
            for some in scales:
                some[~p.terms.live.any(0)] = np.nan
        new = run_step(kernel, rng, arithmetic, p, old, kind, scales)
        check_state(arithmetic, scaled(p, scales), old, new)
        if scales[1] is None:
            check_ones(p, new)
        clean = run_step(kernel, rng, arithmetic, p.clean(), old, kind, scales)
        check_dead_pairs(p.untouched_rows(), new, clean, p)


def run_steps(kernel: Kernel, rng, arithmetic: Arithmetic, problems: list[Problem], old: State) -> State:
    """Runs one step over the tiles of several problems, which have the same queries."""
    memory, width, panel, first = Memory(), arithmetic.width, arithmetic.panel, problems[0]
    scratch = CONSTANTS["AM_STEP_ROWS"] * CONSTANTS["AM_STEP_TILES"]
    q_stride = -(-first.q.shape[1] // width) + pick(rng, [0, 3])
    block, mine = block_of(memory, arithmetic, first, old, q_stride, None, scratch)
    tiles = []
    for p in problems:
        k, v = structure("am_rows"), structure("am_rows")
        k.data = memory.read(packed_keys(p.k, panel, width)).ctypes.data
        v.data = memory.read(packed_values(p.v, panel, width)).ctypes.data
        tiles.append(tile_in(memory, rng, p.terms, "AM_PACKED", k, v, finite=is_finite(p.v)))
    kernel(block, (TYPES["am_flash_tile"] * len(tiles))(*tiles), len(tiles))
    memory.check(problems)
    return mine


def check_steps(kernel: Kernel, rng) -> None:
    """One tile as a step does; several as one step after the other, but for the rounding of weights."""
    arithmetic, step = arithmetic_of(kernel), Kernel(kernel.slot.replace("steps", "step"), kernel.table)
    for _ in range(STEPS):
        _, p, out_depth = draw_step(rng, arithmetic)
        rows, value_depth, factor = len(p.q), p.v.shape[1], abs(p.terms.factor)
        shapes = [
            (rows, p.q.shape[1], value_depth, draw_columns(rng, arithmetic))
            for _ in range(rng.integers(1, CONSTANTS["AM_STEP_TILES"] + 1))
        ]
        problems = [replace(draw(rng, arithmetic, shape, [1.0]), q=p.q) for shape in shapes]
        for tile in problems:
            tile.terms = Terms(factor, 1.0, live=tile.terms.live)
        old = draw_state(rng, arithmetic, rows, out_depth, True)
        old.row_max = None
        new = run_steps(kernel, rng, arithmetic, problems, old)
        if len(problems) == 1:
            check_state(arithmetic, problems[0], old, new)
        clean = run_steps(kernel, rng, arithmetic, [tile.clean() for tile in problems], old)
        apart = old
        for tile in problems:
            apart = run_step(step, rng, arithmetic, tile, apart, "packed", (None, None))
        same = np.all([tile.untouched_rows() for tile in problems], axis=0)
        check_dead_pairs(same, new, clean, problems)
        same &= np.isfinite(wide(p.q)).all(1) & (apart.sum > 0)
        one, other = (
            np.column_stack(
                [x.out[same, :value_depth] / x.sum[same, None], x.running_max[same] + np.log2(x.sum[same])]
            )
            for x in (new, apart)
        )
        np.testing.assert_allclose(one, other, rtol=0, atol=0.05, err_msg=repr(problems))


def check_dead_pairs(rows: np.ndarray, got: State, clean: State, case) -> None:
    """NaN and Inf that belong to no live pair of these rows must not change a bit of them."""
    for name in ("out", "sum", "running_max", "exact_sum"):
        if getattr(got, name) is None:
            continue
        one, other = getattr(got, name)[rows], getattr(clean, name)[rows]
        np.testing.assert_array_equal(one, other, err_msg=f"{name} depends on dead pairs: {case}")


def query_packer(kernel: Kernel) -> Kernel:
    """What packs queries for a step over unpacked keys; NULL if it takes them as they are."""
    return Kernel(kernel.slot.replace("step_unpacked", "pack_queries"), kernel.table)


def run_unpacked(
    kernel: Kernel,
    rng,
    arithmetic: Arithmetic,
    problems: list,
    states: list,
    run: int,
    scales: list,
    float_weights: bool,
    **groups: int,
) -> list[State]:
    """Runs one step of several heads, whose keys and values lie in runs of so many rows, unless that is 0. `scales`: of
    the keys and values of each head.
    """
    memory, width, blocks, tiles, mine = Memory(), arithmetic.width, [], [], []
    kept, packer = [], query_packer(kernel)
    for p, state, its_scales in zip(problems, states, scales, strict=True):
        q_packed, (rows, depth) = None, p.q.shape
        if packer.address:
            q_packed = memory.written(np.full((rows, packed_query_lanes(depth)), np.nan, np.float32))
            packer(q_packed, memory.read(p.q), depth, rows, depth)
        q_stride = -(-depth // width)
        block, accumulators = block_of(memory, arithmetic, p, state, q_stride, q_packed, rows, float_weights)
        k, k_runs = rows_in(memory, p.k, rng, width, run)
        v, v_runs = rows_in(memory, p.v, rng, width, run)
        if run and tiles:  # only the addresses of the first tile are its own
            for addresses in (k_runs, v_runs):
                addresses[addresses != 0] += np.uintp(4096)
        kept += [k_runs, v_runs, *its_scales]
        given = groups | {"k_scales": its_scales[0], "v_scales": its_scales[1]}
        given["value_bytes"] = p.v.shape[1] * p.v.itemsize
        tile = tile_in(memory, rng, p.terms, "AM_ROWS", k, v, **given)
        blocks, tiles, mine = [*blocks, block], [*tiles, tile], [*mine, accumulators]
    heads = len(problems)
    pointers = np.array([ctypes.addressof(block) for block in blocks], np.uintp)
    kernel(pointers, (TYPES["am_flash_tile"] * heads)(*tiles), heads)
    memory.check(problems)
    return mine


def scaled(p: Problem, scales: tuple) -> Problem:
    """The problem whose keys and values are multiplied by the scales of their rows."""
    if scales[0] is None:
        return p
    k, v = (wide(x) * scale[: len(x), None] for x, scale in zip((p.k, p.v), scales, strict=True))
    return replace(p, k=k, v=v)


def check_step_unpacked(kernel: Kernel, rng) -> None:
    arithmetic, source = arithmetic_of(kernel), format_of(kernel)
    by_bf16 = arithmetic.width == 2 and source == FLOAT8
    if source.itemsize == 1:  # no lanes but numbers are counted
        arithmetic = replace(arithmetic, width=1)
    half, width = arithmetic.panel // 2, arithmetic.width
    for _ in range(STEPS):
        rows, heads = pick(rng, ROW_COUNTS), int(rng.integers(1, 4))
        depth = pick(rng, [*DEPTHS, 1024])  # of several heads so many bytes are read in slices
        out_depth = half * int(rng.integers(6))
        value_depth = max(out_depth - pick(rng, [0, 0, 1, half - 1]), 0)
        depth, value_depth = depth + depth % width, min(value_depth + value_depth % width, out_depth)
        shape = (rows, depth, value_depth, draw_columns(rng, arithmetic))
        problems = [draw(rng, arithmetic, shape, factors_of(arithmetic), source) for _ in range(heads)]
        float_weights = width == 2 and rng.random() < 0.5
        rounds = by_bf16 or (width == 2 and not float_weights)
        old = [draw_state(rng, arithmetic, rows, out_depth, rounds) for _ in range(heads)]
        for p in problems:
            p.v[:, :1] = pick(rng, [1, p.v[:, :1]])
        run = pick(rng, [0, 0, 4, 8, 16, 64])
        scales = draw_scales(rng, arithmetic) if width == 1 else (None, None)
        options = run, [scales] * heads, float_weights
        new = run_unpacked(kernel, rng, arithmetic, problems, old, *options)
        clean = run_unpacked(kernel, rng, arithmetic, [p.clean() for p in problems], old, *options)
        by_i16 = source == np.int8 and query_packer(kernel).address
        for p, before, after, beside in zip(problems, old, new, clean, strict=True):
            i16_scales = None
            if by_i16:
                i16_scales = np.ones(TILE) if scales[1] is None else wide(scales[1])
            if by_bf16:  # which scales products
                p = replace(p, q=p.q * np.float32(Q_FACTOR))
            check_state(arithmetic, scaled(p, scales), before, after, i16_scales, by_bf16, float_weights)
            if scales[1] is None and not by_i16:
                check_ones(p, after)
            check_dead_pairs(p.untouched_rows(), after, beside, p)
