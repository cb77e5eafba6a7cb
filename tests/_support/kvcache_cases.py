"""Cases that the tests of attention over caches share: sequences, and caches of any layout that hold them.

What a sequence has is random by the seed of the case and the number of the sequence alone. So the same sequences can be
put into batch rows or one after the other, into contiguous caches or pages, in any order, some or all of them.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
import reference_kvcache as twin
from flash_cases import BF16, F16, F32, F64, Told, all_pairs, bits_of
from flash_expected import Expected, expected_by
from layouts import arrange

import attnmask
from attnmask import MaskInfo
from attnmask._cache.quantize import rotated

INT8, E4M3, E5M2 = map(np.dtype, ("int8", ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))
CACHES = ("k_cache", "v_cache", "k_scale", "v_scale")
SHARED = 1000  # stands for the number of a sequence where all of them have the same
GARBAGE = (-1, 2**31 - 1, -(2**31), 12345)  # entries of a table that nobody looks at
PAGE_SIZES = (None, 1, 2, 7, 16, 48, 64, 100, 256)  # None: the cache is contiguous
# "heads first": as vLLM's [pages, Hkv, page_size, D]; "keys beside values": both in one array; the last one is without
# new tokens.
LAYOUTS = (
    "contiguous", "heads first", "keys beside values", "reversed", "sliced", "tokens apart", "strided", "fortran",
    "misaligned",
)  # fmt: skip
FACTORS: dict[str, tuple] = {
    "types": (
        (F32, F32), (F16, F16), (BF16, BF16), (F64, F64), (F32, F16), (F32, BF16),
        (F16, F32), (F16, BF16), (BF16, F32), (BF16, F16),
    ),
    "heads": ((8, 8), (8, 2), (4, 1), (1, 1)),
    "depths": ((16, 16), (64, 64), (33, 33), (64, 40), (24, 129), (7, 5), (128, 128)),
    "queries": (1, 2, 3, 17, 64, 65, (1, 17, 0, 64, 3, 2), (1, 1, 65, 1), (0, 2)),
    "lengths": ((0, 1, 63), (64, 65, 200), (200, 0), (63,), (65, 1, 64, 0, 200, 63), (1, 2)),
    "new": (None, "as many", "more", "fewer", "packed"),
    "page_size": PAGE_SIZES,
    "layout": LAYOUTS,
    "token_layout": ("contiguous", "heads first", "strided", "reversed", "misaligned"),
    "causal": (True, False),
    "window": (None, 5, (20, 0), (0, 9), (70, None), (None, 3), (None, None)),
    "chunk": (None, 1, 7, 64, 100, 2**62),
    "soft_cap": (None, 2.0, 30.0),
    "sinks": (None, "[S]", "[H, S]", "[S] with -inf"),
    "slopes": (None, "[H]", "[B, H]", "[1, H]"),
    "bias": (None, "[B, H, Tq, K]", "[1, 1, Tq, K]", "[1, H, 1, K]", "[B, 1, Tq, 1]", "[1, 1, 1, K] with -inf"),
    "relative": (None, (30, -20), (1, 0), (200, -190), (9, -4)),
    "mask": (
        None, "[B, H, Tq, K] bool", "[B, 1, 1, K] int32", "[1, H, Tq, K] float32", "[1, 1, Tq, 1] bool",
        "info of [B, H, Tq, K]", "info of [1, 1, Tq, K]", "info of segments [B]", "info of segments [1]",
    ),
    "scale": (None, 0.3, -0.05),
    "return_lse": (True, False),
    "out_layout": (None, "contiguous", "heads first", "strided", "reversed", "sliced"),
    "threads": (1, 2, 3),
    "grid": (None, 1, 7, 64, 400),
}  # fmt: skip


@dataclass(frozen=True, repr=False)
class Case(Told):
    """One call."""

    # Of queries and of caches; these may be "int4", "int4 of float16" (its scales are), or "int8 by channel".
    types: tuple[np.dtype, np.dtype | str] = (F32, F32)
    heads: tuple[int, int] = (4, 2)
    depths: tuple[int, int] = (16, 16)
    # New queries per sequence. Several numbers are taken in turn, and their queries are packed.
    queries: int | tuple[int, ...] = 1
    lengths: tuple[int, ...] = (0, 1, 63)  # before the call
    new: str | None = None
    page_size: int | None = None
    layout: str = "contiguous"
    token_layout: str = "contiguous"
    causal: bool = True
    window: int | tuple[int | None, int | None] | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    sinks: str | None = None
    slopes: str | None = None
    bias: str | None = None
    relative: tuple[int, int] | None = None  # the length of the table, and its least distance
    grid: int | None = None  # its width, if no sequence has more queries than tokens
    mask: str | None = None
    scale: float | None = None
    return_lse: bool = True
    out_layout: str | None = None
    threads: int = 1
    seed: int = 0
    order: int = 0  # the seed of what must not matter: of the table, and of types of integers
    fill: float = np.nan  # where caches of floating-point numbers hold no tokens
    groups: tuple[int, int] = (32, 32)  # channels of four bits that share a scale
    rotate: bool = False
    latent: bool = False

    @property
    def dtype(self) -> np.dtype:
        """bfloat16 if anything is, since some levels of instruction sets have kernels for that alone."""
        return BF16 if BF16 in self.types else self.types[0]

    @property
    def halves(self) -> bool:
        return isinstance(self.types[1], str) and self.types[1].startswith("int4")

    @property
    def cache_dtype(self) -> np.dtype:
        kind = self.types[1]
        return kind if isinstance(kind, np.dtype) else np.dtype(np.uint8) if self.halves else INT8

    @property
    def scaled(self) -> bool:
        return self.halves or self.cache_dtype in twin.QUANTIZED

    @property
    def channels_of_values(self) -> slice:
        """Among those of the keys, in a latent cache."""
        depth, value_depth = self.depths
        first = (depth - value_depth) // self.groups[0] * self.groups[0]
        return slice(first, first + value_depth)

    @property
    def packed(self) -> bool:
        return isinstance(self.queries, tuple)

    @property
    def counts(self) -> list[int]:
        """Queries of each sequence."""
        return list(islice(cycle(self.queries if self.packed else [self.queries]), len(self.lengths)))

    @property
    def new_counts(self) -> list[int]:
        """New tokens of each sequence: as many as packed queries, unless they are packed by themselves."""
        if self.new is None:
            return [0] * len(self.lengths)
        if self.new == "packed":
            return list(islice(cycle((2, 0, 70, 1, 17)), self.seed % 3, self.seed % 3 + len(self.lengths)))
        if self.packed or self.new == "as many":
            return self.counts
        return [self.queries + 3 if self.new == "more" else self.queries // 2] * len(self.lengths)

    @property
    def after(self) -> list[int]:
        return [length + count for length, count in zip(self.lengths, self.new_counts, strict=True)]

    @property
    def offsets(self) -> list[int]:
        return [length - count for length, count in zip(self.after, self.counts, strict=True)]

    @property
    def mask_keys(self) -> int:
        return max(self.after) + 10 * (self.seed % 3)


CASES = [Case(**levels, seed=i, order=i) for i, levels in enumerate(all_pairs(FACTORS, 0))]


class Tokens(NamedTuple):
    """What one sequence has."""

    query: np.ndarray  # [Tq, H, D]
    old: tuple[np.ndarray, np.ndarray]  # keys and values that are there before the call, [T, Hkv, D]
    new: tuple[np.ndarray, np.ndarray]
    slopes: np.ndarray  # [H]


def tokens_of(case: Case, s: int) -> Tokens:
    rng = np.random.default_rng((case.seed, s))
    (heads, kv_heads), dtype = case.heads, case.types[0]
    cache_dtype = F32 if case.scaled else case.cache_dtype
    new_dtype = dtype if case.seed % 2 else F64 if dtype == F64 else F32

    def draw(count, heads, depth, dtype):
        return rng.standard_normal((count, heads, depth)).astype(dtype)

    query = draw(case.counts[s], heads, case.depths[0], dtype)
    old, new = (
        tuple(draw(count, kv_heads, depth, dtype) for depth in case.depths)
        for count, dtype in ((case.lengths[s], cache_dtype), (case.new_counts[s], new_dtype))
    )
    return Tokens(query, old, new, rng.random(heads))


def mask_of(case: Case, some: Sequence[int]):
    """The mask of some sequences. A row that all of them share is that of the first."""
    packed, keys, heads = case.packed, case.mask_keys, case.heads[0]
    one_row = not packed and "[1" in case.mask

    def rng_of(s, shared):
        return np.random.default_rng((case.seed, SHARED if shared else s, 1))

    if "segments" in case.mask:
        q_ids = [np.sort(rng_of(s, one_row).integers(-1, 3, case.counts[s])) for s in some]
        kv_ids = [np.sort(rng_of(s, packed or one_row).integers(-1, 3, keys)) for s in some]
        if packed or one_row:
            return MaskInfo.from_segments(
                np.concatenate(q_ids if packed else q_ids[:1])[None], kv_ids[0][None]
            )
        return MaskInfo.from_segments(np.stack(q_ids), np.stack(kv_ids)).apply_sliding_window((150, 100))

    axes = case.mask[case.mask.index("[") + 1 : case.mask.index("]")].split(", ")
    shared = one_row or (packed and "Tq" not in axes)
    rows = []
    for s in some:
        sizes = {"1": 1, "H": heads, "Tq": case.counts[s], "K": keys}
        live = rng_of(s, shared).random([sizes[axis] for axis in axes[1:]]) < 0.8
        live[:, live.shape[1] // 3 : live.shape[1] // 2] = False
        rows.append(live)
    mask = rows[0][None] if shared else np.concatenate(rows, axis=1)[None] if packed else np.stack(rows)
    if "info" in case.mask:
        return MaskInfo.from_attention_mask(mask)
    dtype = case.mask.split()[-1]
    return mask if dtype == "bool" else (mask * 3).astype(dtype)


def bias_of(case: Case, some: Sequence[int]) -> np.ndarray:
    """The bias of some sequences. A row that all of them share is that of the first."""
    axes = case.bias[1 : case.bias.index("]")].split(", ")
    shared = axes[0] == "1" if not case.packed else "Tq" not in axes
    rows = []
    for s in some:
        sizes = {"1": 1, "H": case.heads[0], "Tq": case.counts[s], "K": case.mask_keys}
        rng = np.random.default_rng((case.seed, SHARED if shared else s, 3))
        row = rng.standard_normal([sizes[axis] for axis in axes[1:]])
        rows.append(np.where(rng.random(row.shape) < 0.2, -np.inf, row) if "-inf" in case.bias else row)
    bias = rows[0][None] if shared else np.concatenate(rows, axis=1)[None] if case.packed else np.stack(rows)
    return arrange(
        bias.astype(case.types[0] if case.seed % 2 else F32), ("contiguous", "strided")[case.seed % 2]
    )


def table_of(case: Case, some: Sequence[int]) -> np.ndarray:
    """Pages in any order, with garbage behind those of each sequence; some pages belong to nobody."""
    rng = np.random.default_rng((case.order, 2))
    used = [-(-case.after[s] // case.page_size) for s in some]
    table = rng.choice(GARBAGE, (len(some), max(used) + case.order % 3))
    pages = iter(rng.permutation(sum(used) + 3).tolist())
    for row, count in enumerate(used):
        table[row, :count] = list(islice(pages, count))
    return arrange(
        table.astype((np.int32, np.int64)[case.order % 2]), ("contiguous", "strided")[case.order % 2]
    )


def scale_of(case: Case, side: int, rows: tuple[int, int]) -> np.ndarray | None:
    """Of keys or values, where they have any."""
    heads, depth, kind = case.heads[1], case.depths[side], case.types[1]
    if case.halves:
        dtype = F16 if "float16" in kind else F32
        return np.full((*rows, heads, depth // case.groups[side], 2), np.nan, dtype)
    if kind == "int8 by channel" and case.seed % 3 in (0, side + 1):  # of both, or of one of them
        rng = np.random.default_rng((case.seed, SHARED, 5 + side))
        step = 2 if case.layout == "strided" else 1
        return rng.uniform(0.02, 0.04, (1, 1, heads, step * depth)).astype(F32)[..., ::step]
    return np.full((*rows, heads, 1), np.nan, F32) if case.scaled else None


def caches_of(case: Case, some: Sequence[int], table: np.ndarray | None, tokens: list[Tokens]) -> dict:
    """The caches before the call, and their scales; what they do not hold is `case.fill` or as bad as can be."""
    if table is None:
        rows = len(some), max(case.after[s] for s in some) + (0, 5)[case.order % 2]
    else:
        rows = sum(-(-case.after[s] // case.page_size) for s in some) + 3, case.page_size
    caches, scales, dtype = [], [], case.cache_dtype
    worst = np.iinfo(dtype).max if dtype.kind in "iu" else case.fill
    for i, depth in enumerate(case.depths):
        cache = np.full((*rows, case.heads[1], depth // (1 + case.halves)), worst).astype(dtype)
        scale = scale_of(case, i, rows)
        for row in range(len(some)):
            old = tokens[row].old[i]
            twin.append(cache, scale, table, row, 0, rotated(old) if case.rotate else old)
        caches.append(cache)
        scales.append(scale)
    layout = case.layout if case.layout != "misaligned" or not case.new else "contiguous"
    made = dict(zip(CACHES, (*cache_layout(*caches, layout), *scales), strict=True))
    if case.latent:
        less = 1 + case.halves  # channels in an element
        view = slice(case.channels_of_values.start // less, case.channels_of_values.stop // less)
        made |= {"v_cache": made["k_cache"][..., view], "v_scale": None}
    return made


def empty(shape, dtype) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.full(shape, np.nan).astype(dtype)


def cache_layout(k: np.ndarray, v: np.ndarray, layout: str) -> tuple[np.ndarray, np.ndarray]:
    """Both caches in memory as `layout` says; the memory between tokens holds NaN, or what that is as an integer."""
    if layout == "keys beside values":
        pages, size, heads = k.shape[:3]
        both = empty((pages, 2, size, heads, max(k.shape[3], v.shape[3])), k.dtype)
        views = both[:, 0, ..., : k.shape[3]], both[:, 1, ..., : v.shape[3]]
    elif layout == "tokens apart":
        views = tuple(empty((len(x), 3 * x.shape[1] + 1, *x.shape[2:]), x.dtype)[:, 1::3] for x in (k, v))
    elif layout == "misaligned":
        views = tuple(np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape) for x in (k, v))
    else:
        return arrange(k, layout), arrange(v, layout)
    for view, values in zip(views, (k, v), strict=True):
        view[...] = values
    return views


def arguments_of(case: Case, some: Sequence[int] | None = None) -> dict:
    """Arguments for the package as well as the reference, with caches of their own, of all sequences or of some."""
    some = range(len(case.lengths)) if some is None else some
    tokens = [tokens_of(case, s) for s in some]
    table = None if case.page_size is None else table_of(case, some)
    caches = caches_of(case, some, table, tokens)

    def joined(arrays, packed=case.packed):
        return arrange(np.concatenate(arrays) if packed else np.stack(arrays), case.token_layout)

    packed = case.packed or case.new == "packed"
    new = [joined([those.new[i] for those in tokens], packed) for i in (0, 1)] if case.new else [None, None]
    if case.latent:
        new[1] = None
    before = np.array([case.lengths[s] for s in some], (np.int32, np.int64)[case.order % 2])
    arguments = {
        "query": joined([those.query for those in tokens]),
        **caches,
        "key": new[0],
        "value": new[1],
        "cache_seqlens": before if case.order % 3 else before.tolist(),
        "block_table": table,
        "cu_seqlens_q": None,
        "softmax_scale": case.scale,
        "causal": case.causal,
        "sliding_window": case.window,
        "logits_soft_cap": case.soft_cap,
        "softmax_aux": None,
        "alibi_slopes": None,
        "attention_mask": None if case.mask is None else mask_of(case, some),
    }
    if case.packed:
        arguments["cu_seqlens_q"] = np.cumsum([0, *(case.counts[s] for s in some)]).astype(before.dtype)
    if case.new == "packed":
        arguments["cu_seqlens_k_new"] = np.cumsum([0, *(case.new_counts[s] for s in some)]).astype(
            before.dtype
        )
    if case.slopes == "[B, H]":
        arguments["alibi_slopes"] = np.stack([those.slopes for those in tokens])
    elif case.slopes:
        slopes = tokens_of(case, 0).slopes
        arguments["alibi_slopes"] = slopes[None] if case.slopes == "[1, H]" else slopes.astype(F32)
    if case.chunk is not None:
        arguments["attention_chunk"] = case.chunk
    if case.rotate:
        arguments["rotate"] = True
    if case.bias is not None:
        arguments["bias"] = bias_of(case, some)
    if case.relative is not None:
        length, arguments["relative_low"] = case.relative
        table = np.random.default_rng((case.seed, SHARED, 4)).standard_normal((case.heads[0], length))
        arguments["relative_bias"] = table.astype(case.types[0])
    if case.grid is not None and all(new <= all_ for new, all_ in zip(case.counts, case.after, strict=True)):
        shape = (2 * -(-max(*case.after, 1) // case.grid) - 1, 2 * case.grid - 1)
        table = np.random.default_rng((case.seed, SHARED, 5)).standard_normal((case.heads[0], *shape))
        arguments["grid_bias"] = table.astype(case.types[0])
    if case.sinks is not None:
        shape = (case.heads[0], 2) if case.sinks.startswith("[H") else (3,)
        sinks = np.random.default_rng((case.seed, SHARED)).standard_normal(shape) * 2
        if "-inf" in case.sinks:
            sinks[..., 1:] = -np.inf
        arguments["softmax_aux"] = sinks.astype(case.types[0] if case.seed % 2 else F32)
    return arguments


# Every format with every option


KINDS = (F32, "int4", *twin.QUANTIZED, BF16, "int8 by channel", "int4 of float16", F16, F64)
EVERY_FORMAT = {
    "kind": KINDS,
    "query_type": (F32, BF16, F16),
    "heads": ((8, 2), (2, 2), (10, 1)),
    "depths": ((64, 32), (128, 64), (64, 64), (256, 384), (33, 7)),
    "groups": ((32, 32), (64, 32), (128, 64)),
    "queries": (1, 3, 20, 70, (1, 17, 0, 5, 2), (64, 2)),  # of each sequence; several: packed
    "new": (None, "as many", "packed"),
    "page_size": (None, 16, 1, 7, 64),
    "layout": ("contiguous", "strided", "keys beside values", "tokens apart"),
    "lengths": ((0, 70, 200, 64, 1), (300,), (63, 65)),
    "rotate": (False, True),
    "latent": (False, True),
    "chunk": (None, 50, 1, 64, 2**62),
    "slopes": (None, "[H]"),
    "bias": (None, "[1, H, 1, K]", "[B, 1, Tq, K]"),
    "relative": (None, (90, -80)),
    "soft_cap": (None, 5.0),
    "sinks": (None, "[H, S]"),
    "window": (None, (40, None), (9, 3)),
    "mask": (None, "[B, 1, Tq, K] bool", "info of [B, 1, Tq, K]"),
    "causal": (True, False),
    "scale": (None, 0.1),
    "threads": (1, 2, 3),
    "grid": (None, 20),
}


def possible(case: Case) -> Case:
    """The nearest case that can be: halves, rotated and latent tokens go with some channels alone."""
    case = replace(case, latent=case.latent and not case.rotate)
    if case.latent and case.types[1] == "int8 by channel":
        case = replace(case, types=(case.types[0], INT8))
    if case.depths[1] > case.depths[0] and (case.rotate or case.latent):
        case = replace(case, depths=(128, 64))
    if case.rotate and any(depth & (depth - 1) for depth in case.depths):
        case = replace(case, depths=(64, 32))
    if any(depth % 32 for depth in case.depths) and (case.halves or case.rotate or case.latent):
        case = replace(case, depths=(64, 32))
    groups = case.groups[:1] * 2 if case.latent else case.groups
    if any(depth % group for depth, group in zip(case.depths, groups, strict=True)):
        groups = (32, 32)
    return replace(case, groups=groups)


def every_format():
    for seed, levels in enumerate(all_pairs(EVERY_FORMAT, 0)):
        kind, query_type = levels.pop("kind"), levels.pop("query_type")
        yield possible(Case((F64 if kind == F64 else query_type, kind), **levels, seed=seed, order=seed))


# Calls


def memory(array: np.ndarray) -> np.ndarray:
    """All of the memory that an array is a view of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def bits_of_memory(arguments: dict) -> dict[str, bytes]:
    return {name: memory(x).tobytes() for name, x in arguments.items() if isinstance(x, np.ndarray)}


def attend(arguments: dict, **more):
    return attnmask.flash_attention_with_kvcache(**(arguments | more))


def refused(arguments: dict, error, message: str, call=attend) -> None:
    """The call fails, and nothing is written."""
    before = bits_of_memory(arguments)
    with pytest.raises(error, match=message):
        call(arguments)
    after = bits_of_memory(arguments)
    assert [name for name in before if before[name] != after[name]] == []


class Right(NamedTuple):
    """What a call has to give: results, and the bits of the caches after it."""

    results: Expected
    caches: dict[str, bytes]


def for_twin(case: Case, arguments: dict) -> dict:
    """The same for the twin, which rotates nothing, and takes the scales of values by themselves."""
    given = {name: x for name, x in arguments.items() if name != "rotate"}
    if case.rotate:
        tokens = ("query", "key", "value")
        given |= {name: rotated(given[name]) for name in tokens if given[name] is not None}
    if case.latent and given["k_scale"] is not None:
        begin, end = (
            at // case.groups[0] for at in (case.channels_of_values.start, case.channels_of_values.stop)
        )
        scale = given["k_scale"]
        given["v_scale"] = scale[..., begin:end, :] if case.halves else scale
    return given


# Errors of results over numbers of eight bits or fewer, by the size of queries, and over rotated ones.
ERRORS = {8: 1e-9, 4: 2e-4, 2: 3e-2}


def right(arguments, case: Case) -> Right:
    """`arguments()` makes them anew."""
    made = []

    def attention(dtype):
        made.append(arguments())
        return twin.attention(**for_twin(case, made[-1]), dtype=dtype)

    if not case.scaled and not case.rotate:
        results = expected_by(attention, case.types[0], case)
    else:
        out, lse, *_ = attention(F64.type)
        out, error = rotated(out) if case.rotate else out, ERRORS[case.types[0].itemsize]
        results = Expected(out, lse, 2 + abs(out), 1 + abs(lse), error, error, case)
    return Right(results, bits_of_memory({name: made[-1][name] for name in CACHES}))


@functools.lru_cache(maxsize=8)
def right_of(case: Case) -> Right:
    return right(functools.partial(arguments_of, case), case)


def check(case: Case, wanted: Right, arguments: dict) -> None:
    """Calls the function, and compares its results and all memory that it could have written to."""
    more = {}
    if case.out_layout is not None:
        shape = (*arguments["query"].shape[:-1], case.depths[1])
        more["out"] = arrange(np.full(shape, 77).astype(case.types[0]), case.out_layout)
    inputs = {name: x for name, x in arguments.items() if name not in CACHES}
    before = bits_of(inputs)
    got = attend(arguments, return_lse=case.return_lse, **more)
    out, lse = got if case.return_lse else (got, None)
    assert bits_of(inputs) == before, case
    for name, bits in wanted.caches.items():
        assert memory(arguments[name]).tobytes() == bits, (name, case)
    assert type(out) is np.ndarray, case
    assert out.dtype == case.types[0], (out.dtype, case)
    if more:
        assert out is more["out"], case
    else:
        assert out.flags.c_contiguous, case
    assert lse is None or (type(lse) is np.ndarray and lse.flags.c_contiguous), case
    wanted.results.check(out, lse)
