"""Configurations of sequences that are computed alone and together with others: as batch rows, padded, or packed.

A configuration is some sequences and the arguments of attention. `differences` computes each sequence alone, and some
of them together in the way that a kind names, and tells the results whose bits differ.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from flash_cases import F32, F64, Told, lse_dtype
from layouts import arrange

import attnmask
from attnmask import MaskInfo, _core

HEADS = ((4, 2), (8, 8), (32, 8), (2, 2), (4, 1), (1, 1))
DEPTHS = ((16, 16), (64, 64), (128, 128), (33, 33), (64, 40), (24, 129))
LAYOUTS = ("contiguous", "contiguous", "heads first", "sliced", "reversed", "strided", "fortran")
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "causal, bottom-right": {"causal": True},
    "window": {"sliding_window": (37, 5)},
    "causal, window, bottom-right": {"causal": True, "sliding_window": (130, 0)},
    "dense": {},  # a mask of all pairs
}
MORE: tuple[dict[str, Any], ...] = (
    {},
    {"normalize_output": False},
    {"logits_soft_cap": 5.0},
    {"softmax_aux": 2},  # the number of sinks per head
    {"softmax_scale": 0.3},
    {"softmax_scale": -0.05, "dlse": True},
    {"bias": "of pairs"},
    {"bias": "of keys", "dlse": True},
    {"by distance": True},  # ALiBi and a relative bias
)
# How sequences are put together, and which argument separates them from each other and from padding.
KINDS = (
    ("alone, laid out otherwise", None), ("a batch row of many", None), ("padded", "ids"),
    ("padded", "MaskInfo of ids"), ("padded", "MaskInfo of cu_seqlens"), ("padded", "MaskInfo of kv lengths"),
    ("padded", "an array of pairs"), ("padded", "a MaskInfo of pairs"),
    ("padded", "a MaskInfo of a function"), ("packed", "cu_seqlens"), ("packed", "ids"),
    ("packed", "MaskInfo of ids"), ("packed", "MaskInfo of cu_seqlens"), ("packed in rows", "ids"),
    ("packed in rows", "MaskInfo of ids"),
)  # fmt: skip
MOST_PAIRS = 10**6  # of an array that tells sequences from padding
Kind = tuple[str, str | None]
Shape = tuple[int, int, int]  # batch rows, queries, keys


@dataclass(frozen=True, repr=False)
class Config(Told):
    """The numbers of queries and keys of each sequence, and the arguments that all of them share."""

    lengths: tuple[tuple[int, int], ...]
    isa: str = "baseline"
    dtype: np.dtype = F32
    heads: tuple[int, int] = (4, 2)
    depths: tuple[int, int] = (16, 16)
    mask: str = "full"
    more: tuple[tuple[str, Any], ...] = ()
    seed: int = 0

    @property
    def cost(self) -> float:
        """The number of products, including those for the gradients, weighted by how slow the kernels are."""
        slow = {"baseline": 4, "avx2": 1.5}.get(self.isa, 1) * (2 if self.dtype == F64 else 1)
        reach = 300 if "window" in self.mask else 10**6
        live = sum(q * min(k, reach) + 16 * k for q, k in self.lengths)
        return 5 * slow * live * self.heads[0] * sum(self.depths)

    def within(self, cost: float) -> "Config":
        """The same with fewer heads and channels if it costs more, and without arrays of all pairs of many tokens."""
        config = self
        for heads in (self.heads, (8, 8), (4, 2), (2, 2), (1, 1)):
            for depths in (self.depths, (24, 33), (16, 16)):
                smaller = heads[0] <= self.heads[0] and sum(depths) <= sum(self.depths)
                if config.cost > cost and smaller:
                    config = replace(self, heads=heads, depths=depths)
        if config.cost > 4 * cost:
            config = replace(config, mask="causal, window, bottom-right")
        queries, keys = np.sum(config.lengths, axis=0) + 100
        if config.heads[0] * queries * keys > 2e6:
            more = tuple(pair for pair in config.more if pair != ("bias", "of pairs"))
            config = replace(config, mask=config.mask.replace("dense", "full"), more=more)
        return config

    def offset(self, i: int) -> int:
        queries, keys = self.lengths[i]
        return keys - queries if "bottom-right" in self.mask else 0


class Place(NamedTuple):
    """The position of sequence `i`: its batch row, its first query and its first key."""

    i: int
    row: int = 0
    q: int = 0
    k: int = 0


# Which axes after the batch axis are queries (q) or keys (k), in the arguments and results of attention.
AXES = {"query": "q", "key": "k", "value": "k", "dout": "q", "dlse": "hq", "attention_mask": "hqk"}
BIAS_AXES = {"of pairs": "hqk", "of keys": "h1k"}
RESULTS = {"out": "q", "lse": "hq", "dq": "q", "dk": "k", "dv": "k"}


def part_of(array: np.ndarray, axes: str, place: Place, lengths: tuple[int, int]) -> np.ndarray:
    """The part of an array that belongs to a sequence, as a view."""
    tokens = {"q": slice(place.q, place.q + lengths[0]), "k": slice(place.k, place.k + lengths[1])}
    return array[place.row : place.row + 1, *(tokens.get(axis, slice(None)) for axis in axes)]


def tensors(config: Config, shape: Shape, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random arrays for all arguments that have an axis of tokens."""
    (batch, queries, keys), (heads, kv_heads), (depth, value_depth) = shape, config.heads, config.depths
    more = dict(config.more)
    shapes = {
        "query": (batch, queries, heads, depth),
        "key": (batch, keys, kv_heads, depth),
        "value": (batch, keys, kv_heads, value_depth),
        "dout": (batch, queries, heads, value_depth),
    }
    arrays = {name: rng.standard_normal(size, F32).astype(config.dtype) for name, size in shapes.items()}
    if "dlse" in more:
        arrays["dlse"] = rng.standard_normal((batch, heads, queries), lse_dtype(config.dtype))
    if "bias" in more:
        rows = queries if more["bias"] == "of pairs" else 1
        arrays["bias"] = rng.standard_normal((batch, heads, rows, keys), F32)
    if config.mask == "dense":
        arrays["attention_mask"] = rng.random((batch, heads, queries, keys), F32) < 0.7
    return arrays


@functools.lru_cache(maxsize=16)
def sequence(config: Config, i: int) -> dict[str, np.ndarray]:
    return tensors(config, (1, *config.lengths[i]), np.random.default_rng((config.seed, i)))


def together(
    config: Config, places: list[Place], shape: Shape, nan: bool, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """The sequences at their places in larger arrays of any layout; the rest of these is NaN or random numbers."""
    arrays = tensors(config, shape, rng)
    axes = AXES | {"bias": BIAS_AXES.get(dict(config.more).get("bias", ""), "")}
    for name, array in arrays.items():
        if nan and name != "attention_mask":
            array[...] = np.nan
        for p in places:
            part_of(array, axes[name], p, config.lengths[p.i])[...] = sequence(config, p.i)[name]
        if name in ("query", "key", "value", "dout"):
            arrays[name] = arrange(array, LAYOUTS[rng.integers(len(LAYOUTS))])
    return arrays


def placed(config: Config, kind: Kind, rng: np.random.Generator) -> tuple[list[Place], Shape]:
    """Places for some of the sequences, in random order, and the shape that holds them."""
    how, tell = kind
    some = rng.permutation(len(config.lengths)).tolist()
    if how != "packed" or rng.random() < 0.2:
        some = some[: rng.integers(1, len(some) + 1)]
    lengths = config.lengths[some[0]]
    if tell is None:
        batch = 1 if how.startswith("alone") else int(rng.choice([2, 3, 5, 17]))
        return [Place(some[0], int(rng.integers(batch)))], (batch, *lengths)
    padding = int(rng.choice([0, 1, 30, 64, 100]))
    if tell == "MaskInfo of kv lengths":  # only keys can be padded
        some = [i for i in some if config.lengths[i][0] == lengths[0]]
        keys = max(config.lengths[i][1] for i in some) + padding
        return [Place(i, row) for row, i in enumerate(some)], (len(some), lengths[0], keys)
    rows = {"padded": len(some), "packed": 1, "packed in rows": 3}[how]
    ends, places = np.zeros((rows, 2), int), []
    for n, i in enumerate(some):
        row = n if how == "padded" else int(rng.integers(rows))
        places.append(Place(i, row, *ends[row].tolist()))
        between = padding if "ids" in tell and how != "padded" and rng.random() < 0.2 else 0
        ends[row] += np.array(config.lengths[i]) + between
    behind = 0 if tell == "cu_seqlens" else padding
    return places, (rows, *(ends.max(axis=0) + behind).tolist())


def limits(
    config: Config, kind: Kind, places: list[Place], shape: Shape, rng: np.random.Generator
) -> dict | None:
    """Arguments under which each sequence attends as it does alone, or None if no arguments can express that."""
    (how, tell), (batch, queries, keys) = kind, shape
    arguments = dict(MASKS[config.mask])
    offsets = [config.offset(p.i) for p in places]
    if tell is None:
        return arguments | {"causal_offset": offsets[0]}
    starts = np.array([(p.q, p.k) for p in places])
    ends = starts + np.array([config.lengths[p.i] for p in places])
    pairs = how == "padded" and tell.endswith(("pairs", "function"))
    if pairs and batch * queries * keys > MOST_PAIRS:
        return None
    q_cu, k_cu = np.append(np.zeros((1, 2), int), ends, axis=0).T
    q_ids, k_ids = np.full((batch, queries), -1, np.int32), np.full((batch, keys), -1, np.int32)
    for p, (q_end, k_end), number in zip(places, ends, rng.permutation(len(places)), strict=True):
        q_ids[p.row, p.q : q_end] = k_ids[p.row, p.k : k_end] = number
    if np.array_equal(q_ids, k_ids) and rng.random() < 0.5:
        k_ids = k_cu = None  # one array serves for both
    if tell == "cu_seqlens":
        offset = "bottom-right" if "bottom-right" in config.mask and rng.random() < 0.5 else offsets
        return arguments | {"cum_seqlens_q": q_cu, "cum_seqlens_k": k_cu, "causal_offset": offset}

    by_distance = "by distance" in dict(config.more)
    by_row: list[set[int]] = [set() for _ in range(batch)]
    for p, offset in zip(places, offsets, strict=True):
        if 0 not in config.lengths[p.i]:
            by_row[p.row].add(p.k - p.q + offset)
    if (arguments or by_distance) and max(map(len, by_row)) > 1:
        return None  # a batch row has only one diagonal
    row_offsets = np.array([min(row, default=0) for row in by_row])
    if tell == "ids":
        return arguments | {"q_segment_ids": q_ids, "kv_segment_ids": k_ids, "causal_offset": row_offsets}
    if pairs:
        q_ends, k_ends = ends.T

        def is_live(b, h, q, k):
            return (q < q_ends[b]) & (k < k_ends[b])

        if tell == "a MaskInfo of a function":
            info = MaskInfo.from_function(is_live, queries, keys, batch=batch)
        else:
            array = is_live(*np.ix_(range(batch), [0], range(queries), range(keys)))
            if tell == "an array of pairs":
                return arguments | {"attention_mask": array, "causal_offset": row_offsets}
            info = MaskInfo.from_attention_mask(array)
    elif tell == "MaskInfo of ids":
        info = MaskInfo.from_segments(q_ids, k_ids)
    elif tell == "MaskInfo of kv lengths":
        info = MaskInfo.from_segments(np.zeros((batch, queries), int), np.zeros((batch, keys), int))
        info = info.apply_kv_lengths(ends[:, 1])
    else:
        if how == "padded":
            q_cu, k_cu = np.stack([starts, ends], axis=1).reshape(-1, 2).T
        more = {} if k_cu is None else {"cu_seqlens_kv": k_cu, "max_kv_len": keys}
        info = MaskInfo.from_cu_seqlens(q_cu, max_q_len=queries, packed=how == "packed", **more)
    if rng.random() < 0.5:
        return arguments | {"attention_mask": info, "causal_offset": row_offsets}
    if "causal" in arguments:
        info = info.apply_causal(row_offsets)
    if "sliding_window" in arguments:
        info = info.apply_sliding_window(arguments["sliding_window"], offset=row_offsets)
    return {"attention_mask": info} | ({"causal_offset": row_offsets} if by_distance else {})


def attend(config: Config, arrays: dict[str, np.ndarray], limits: dict) -> dict[str, np.ndarray]:
    options = dict(config.more)
    if "softmax_aux" in options:
        options["softmax_aux"] = np.random.default_rng(0).standard_normal(
            (config.heads[0], options["softmax_aux"])
        )
    if options.pop("by distance", False):
        rng, heads = np.random.default_rng(1), config.heads[0]
        options |= {
            "alibi_slopes": rng.random(heads),
            "relative_bias": rng.standard_normal((heads, 33)),
            "relative_low": -16,
        }
    arguments = options | arrays | limits
    if "attention_mask" in arrays and "attention_mask" in limits:
        limit, own = limits["attention_mask"], arrays["attention_mask"]
        arguments["attention_mask"] = limit & (
            own if isinstance(limit, np.ndarray) else MaskInfo.from_attention_mask(own)
        )
    dout, dlse = arguments.pop("dout"), arguments.pop("dlse", None)
    previous = _core.use_isa(config.isa)
    try:
        (out, lse), vjp = attnmask.flash_attention_vjp(**arguments, return_lse=True)
        grads = vjp(dout, dlse)
    finally:
        _core.use_isa(previous)
    return {"out": out, "lse": lse, "dq": grads.query, "dk": grads.key, "dv": grads.value}


@functools.lru_cache(maxsize=16)
def alone(config: Config, i: int) -> dict[str, np.ndarray]:
    return attend(config, sequence(config, i), MASKS[config.mask] | {"causal_offset": config.offset(i)})


def unlike_results(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> list[str]:
    """The names of those whose bits differ, and how."""
    found = {name: difference(got[name], wanted[name]) for name in wanted}
    return [f"{name}: {words}" for name, words in found.items() if words]


def difference(got: np.ndarray, wanted: np.ndarray) -> str:
    """How the bits of elements differ, or nothing."""
    bits = np.dtype(f"u{got.itemsize}")
    unlike = np.ascontiguousarray(got).view(bits) != np.ascontiguousarray(wanted).view(bits)
    if not unlike.any():
        return ""
    a, b = got[unlike].astype(F64), wanted[unlike].astype(F64)
    with np.errstate(invalid="ignore"):
        error, size = np.abs(np.where(a == b, 0, a - b)).max(), np.abs(wanted.astype(F64)).max()
    first = np.argwhere(unlike)[0].tolist()
    return f"{unlike.sum()} of {unlike.size} differ, by up to {error:.2g}, of up to {size:.2g}; the first at {first}"


def differences(config: Config, kind: Kind) -> Iterator[str]:
    """Compares each of the sequences that a kind puts together with the same sequence alone."""
    rng = np.random.default_rng((config.seed, KINDS.index(kind)))
    places, shape = placed(config, kind, rng)
    arguments = limits(config, kind, places, shape, rng)
    if arguments is None:
        return
    nan = bool(rng.random() < 0.2)
    results = attend(config, together(config, places, shape, nan, rng), arguments)
    beside = f"among {[config.lengths[p.i] for p in places]}{' and NaN' * nan}"
    for p in places:
        lengths = config.lengths[p.i]
        parts = {name: part_of(array, RESULTS[name], p, lengths) for name, array in results.items()}
        for words in unlike_results(parts, alone(config, p.i)):
            yield f"sequence {p.i}, {lengths}, {kind}, {tuple(p[1:])} in {shape}, {beside}: {words}"
