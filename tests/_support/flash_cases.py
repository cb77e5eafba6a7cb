"""Cases that the tests of attention and of its gradients share: arguments, layouts, dead pairs."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

import ml_dtypes
import numpy as np
import reference_flash as ref
from environment import SANITIZED
from layouts import arrange

import attnmask
from attnmask import MaskInfo

F16, BF16, F32, F64 = (np.dtype(d) for d in ("float16", ml_dtypes.bfloat16, "float32", "float64"))
FLOATS = (F16, BF16, F32, F64)
LAYOUTS = (
    "contiguous", "heads first", "sliced", "reversed", "strided", "fortran", "misaligned", "swapped",
    "constant along -2",
)  # fmt: skip
LENGTHS = (64, 17, 0, 1, 2, 5, 6, 7, 15, 16, 63, 65, 127, 128, 129)
DEPTHS = (16, 64, 1, 2, 7, 8, 9, 15, 17, 31, 32, 33, 80, 96, 128, 129, 256, 512)


# Accuracy


def accumulator(dtype) -> type:
    return np.float64 if dtype == F64 else np.float32


def lse_dtype(dtype) -> np.dtype:
    return np.dtype(accumulator(dtype))


# Soft caps near either end of the range of logits.
CAPS = {
    np.float32: (1e-39, 1e-38, 1e-37, 1e-30, 1e30, 2e30, 3e30, 1e32, 1e37, 1e38, 3.4e38),
    np.float64: (1e-309, 1e-308, 1e-307, 1e-300, 1e290, 1e291, 1e293, 1e307, 1e308, 1.7e308),
}


def tiny(dtype) -> float:
    return float(ml_dtypes.finfo(dtype).smallest_subnormal)


def worst(got, exact, size, dtype) -> float:
    """The largest error relative to the size of what was summed; where that is 0, the error must be 0 too."""
    got, exact = got.astype(np.float64), exact.astype(np.float64)
    error = np.maximum(np.abs(got - exact) - tiny(dtype), 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(error == 0, 0, error / size.astype(np.float64))
    return float(np.max(shares, initial=0))


# All pairs of arguments

FACTORS: dict[str, tuple] = {
    "dtype": FLOATS,
    "queries": LENGTHS,
    "keys": LENGTHS,
    "depth": DEPTHS,
    "value_depth": DEPTHS,
    "batch": (2, 1, 3),
    "heads": ((2, 2), (4, 2), (1, 1), (3, 1), (6, 2)),
    "q_layout": LAYOUTS,
    "kv_layout": LAYOUTS,
    "mask": (
        None, "[B, H, Tq, Tk] bool", "[B, 1, Tq, Tk] bool", "[B, 1, 1, Tk] int32", "[1, H, Tq, 1] int8",
        "[Tq, Tk] float32", "segments", "segments of heads, causal", "window", "chunks", "dense", "dense or causal",
    ),
    "bias": (
        None, "[B, H, Tq, Tk]", "[1, H, Tq, Tk]", "[B, 1, 1, Tk]", "[H, 1, Tk]", "[Tq, Tk]", "[1, 1, 1, 1]", "[1]",
        "[B, H, Tq, Tk] with -inf", "[B, 1, 1, Tk] with -inf",
    ),
    "segments": (False, True),
    "packing": (None, "packed", "flat"),
    "causal": (False, True),
    "offset": (0, 3, -2, "per row", "bottom-right"),
    "window": (None, 5, (20, 0), (0, 9), (40, 70)),
    "soft_cap": (None, 2.0, 30.0),
    "sinks": (None, "[S]", "[H, S]", "[S] with -inf"),
    "dropout": (0.0, 0.3, 0.9),
    "normalize": (True, False),
    "scale": (None, 0.3, -0.05, 0.0),
    "spread": (1.0, 3.0),
    "return_lse": (True, False),
    "out_layout": (None, "contiguous", "heads first", "strided", "reversed", "sliced"),
    "threads": (1, 2, 3, 8),
    "blocks": (None, (1, 1), (16, 64), (100, 7), (2**40, 1024)),
    "precision": (None, "highest"),
    "logits_dtype": (None, np.float32),
}  # fmt: skip


def all_pairs(factors: dict[str, tuple], seed: int) -> Iterator[dict]:
    """Rows of levels in which any two levels of any two factors occur together; built greedily, row by row."""
    rng = np.random.default_rng(seed)
    names = list(factors)
    open_pairs = {
        (a, b): {(i, j) for i in range(len(factors[a])) for j in range(len(factors[b]))}
        for a, b in itertools.combinations(names, 2)
    }
    place = {name: index for index, name in enumerate(names)}

    def covers(name: str, level: int, row: dict[str, int]) -> int:
        count = 0
        for other, chosen in row.items():
            if place[name] < place[other]:
                count += (level, chosen) in open_pairs[name, other]
            else:
                count += (chosen, level) in open_pairs[other, name]
        return count

    while any(open_pairs.values()):
        (a, b), left = max(open_pairs.items(), key=lambda item: len(item[1]))
        i, j = min(left)
        row = {a: i, b: j}
        for name in rng.permutation([name for name in names if name not in row]).tolist():
            gains = [covers(name, level, row) for level in range(len(factors[name]))]
            # The first level of a factor is the plain case, and is chosen where no other covers more pairs.
            row[name] = int(np.argmax(gains))
        for a, b in open_pairs:
            open_pairs[a, b].discard((row[a], row[b]))
        yield {name: factors[name][row[name]] for name in names}


class Told:
    """Has a repr, which a failure shows, that is enough to repeat the call."""

    def __repr__(self) -> str:
        said = (f for f in fields(self) if repr(getattr(self, f.name)) != repr(f.default))
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in said)})"


@dataclass(frozen=True, repr=False)
class Case(Told):
    """One call."""

    dtype: np.dtype = F32
    queries: int = 64
    keys: int = 64
    depth: int = 16
    value_depth: int = 16
    batch: int = 2
    heads: tuple[int, int] = (2, 2)
    q_layout: str = "contiguous"
    kv_layout: str = "contiguous"
    mask: str | None = None
    bias: str | None = None
    segments: bool = False
    packing: str | None = None
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # of sequences or segments
    causal: bool = False
    offset: int | str = 0
    window: int | tuple[int, int] | None = None
    soft_cap: float | None = None
    sinks: str | None = None
    dropout: float = 0.0
    normalize: bool = True
    scale: float | None = None
    spread: float = 1.0
    return_lse: bool = True
    out_layout: str | None = None
    threads: int = 1
    blocks: tuple[int, int] | None = None
    precision: str | None = None
    logits_dtype: type | None = None
    seed: int = 0

    @property
    def rows(self) -> int:
        return self.batch if self.packing is None else 1

    @property
    def flat(self) -> bool:
        return self.packing == "flat"

    @property
    def pairs(self) -> tuple[int, int, int, int]:
        return self.rows, self.heads[0], self.queries, self.keys

    def shape_of(self, name: str) -> tuple[int, ...]:
        sizes = {"1": 1} | dict(zip(("B", "H", "Tq", "Tk"), self.pairs, strict=True))
        return tuple(sizes[axis] for axis in name[1 : name.index("]")].split(", ") if axis)

    def arguments(self) -> dict:
        """All arguments except hints, for the package as well as the reference."""
        rng = np.random.default_rng(self.seed)
        rows, (heads, kv_heads), dtype = self.rows, self.heads, self.dtype

        def tensor(layout, *shape):
            values = (rng.standard_normal(shape) * self.spread).astype(dtype)
            return arrange(values[0] if self.flat else values, layout)

        arguments = {
            "query": tensor(self.q_layout, rows, self.queries, heads, self.depth),
            "key": tensor(self.kv_layout, rows, self.keys, kv_heads, self.depth),
            "value": tensor(self.kv_layout, rows, self.keys, kv_heads, self.value_depth),
            "softmax_scale": self.scale,
            "causal": self.causal,
            "sliding_window": self.window,
            "logits_soft_cap": self.soft_cap,
            "dropout_prob": self.dropout,
            "dropout_seed": self.seed if self.seed % 3 else None,
            "normalize_output": self.normalize,
        }
        if self.mask is not None:
            arguments["attention_mask"] = self._mask(rng)
        if self.bias is not None:
            bias = rng.standard_normal(self.shape_of(self.bias))
            if "-inf" in self.bias:
                bias[rng.random(bias.shape) < 0.3] = -np.inf
                bias[:, :, : bias.shape[2] // 4] = -np.inf if bias.shape[2] > 1 else 0
            bias = bias.astype(dtype if self.seed % 2 else F32)
            layout = ("contiguous", "fortran", "reversed", "strided")[self.seed % 4]
            arguments["bias"] = arrange(bias, layout) if bias.ndim else bias
        if self.segments and not self.flat:
            for i, (name, length) in enumerate((("q", self.queries), ("kv", self.keys))):
                ids = np.sort(rng.integers(-1, 2, (rows, length)), axis=1)
                if self.lengths:  # in another order in each row
                    turns = [np.roll(self.lengths[i], row) for row in range(rows)]
                    ids = np.array([np.repeat(np.arange(len(turn)), turn) for turn in turns])
                arguments[f"{name}_segment_ids"] = ids.astype((np.int32, np.int64)[self.seed % 2])
        sequences = rows
        if self.packing is not None:
            sequences = len(self.lengths[0]) if self.lengths else 4
            for i, (name, length) in enumerate((("q", self.queries), ("k", self.keys))):
                cuts = np.sort(rng.integers(0, length + 1, sequences - 1))
                if self.lengths:
                    cuts = np.cumsum(self.lengths[i])[:-1]
                ends = np.array([0, *cuts, length], (np.int32, np.int64)[self.seed % 2])
                arguments[f"cum_seqlens_{name}"] = ends
        per_row = self.offset == "per row"
        arguments["causal_offset"] = rng.integers(-9, 30, sequences) if per_row else self.offset
        if self.sinks is not None:
            shape = (heads, 2) if self.sinks.startswith("[H") else (1, 3) if heads == 3 else (3,)
            sinks = rng.standard_normal(shape) * 2
            if "-inf" in self.sinks:
                sinks[..., 1:] = -np.inf
            arguments["softmax_aux"] = sinks.astype(dtype if self.seed % 2 else F32)
        return arguments

    def _mask(self, rng: np.random.Generator):
        rows, heads, queries, keys = self.pairs
        if self.mask.startswith("["):
            live = rng.random(self.shape_of(self.mask)) < 0.8
            live[..., live.shape[-2] // 3 : live.shape[-2] // 2, :] = False
            dtype = self.mask.split()[-1]
            numbers = live * rng.choice([1, 3, 100], live.shape) if dtype != "bool" else live
            return arrange(numbers.astype(dtype), ("contiguous", "fortran", "strided")[self.seed % 3])

        def segments(*shape):
            return [np.sort(rng.integers(-1, 3, (*shape, length))) for length in (queries, keys)]

        if self.mask == "segments":
            return MaskInfo.from_segments(*segments(rows))
        if self.mask == "segments of heads, causal":
            return MaskInfo.from_segments(*segments(rows, heads)).apply_causal(keys - queries)
        everything = MaskInfo.from_segments(np.zeros((rows, queries), int), np.zeros((rows, keys), int))
        if self.mask == "window":
            return everything.apply_sliding_window((30, 10), offset=rng.integers(-5, 20, rows))
        if self.mask == "chunks":
            return everything.apply_chunked(48)
        dense = MaskInfo.from_attention_mask(rng.random((rows, heads, queries, keys)) < 0.4)
        return dense if self.mask == "dense" else dense | everything.apply_causal()

    def hints(self) -> dict:
        blocks = None if self.blocks is None else attnmask.FwdParams(*self.blocks)
        return {"fwd_params": blocks, "precision": self.precision, "logits_dtype": self.logits_dtype}

    def keep(self):
        if not self.dropout:
            return None
        return attnmask.dropout_keep_mask(self.seed if self.seed % 3 else 0, self.dropout, self.pairs)


def thinned(cases: list[Case], step: int) -> list[Case]:
    """All cases; under a sanitizer, for time, only some and those of bfloat16, whose products are emulated there."""
    return [case for i, case in enumerate(cases) if not SANITIZED or i % step == 0 or case.dtype == BF16]


def tensors(queries=40, keys=50, heads=4, kv_heads=2, depth=16, dtype=F32, batch=2, seed=0) -> dict:
    case = Case(dtype, queries, keys, depth, depth + 3, batch, (heads, kv_heads), seed=seed)
    arguments = case.arguments()
    return {name: arguments[name] for name in ("query", "key", "value")}


def bits_of(arguments: dict) -> dict:
    return {name: value.tobytes() for name, value in arguments.items() if isinstance(value, np.ndarray)}


# Dead pairs


def padding(rng, batch, queries, keys, heads):
    """A random mask in which the last keys and some queries have no live pair."""
    live = rng.random((batch, heads, queries, keys)) < 0.7
    live[..., keys - keys // 4 :] = False
    live[:, :, queries // 5 : queries // 3] = False
    return live


def limits(kind: str, shape: tuple[int, int, int, int]) -> dict:
    """Arguments under which most keys are dead for many queries."""
    batch, heads, queries, keys = shape
    rng = np.random.default_rng(len(kind))
    q_ids, kv_ids = (np.sort(rng.integers(-1, 4, (batch, length))) for length in (queries, keys))
    live = padding(rng, batch, queries, keys, heads)
    return {
        "causal": {"causal": True, "causal_offset": 0},
        "causal, bottom-right": {"causal": True, "causal_offset": "bottom-right"},
        "window": {"sliding_window": (6, 3), "causal_offset": keys - queries},
        "segments": {"q_segment_ids": q_ids, "kv_segment_ids": kv_ids},
        "segments, sinks": {"q_segment_ids": q_ids, "kv_segment_ids": kv_ids, "softmax_aux": np.ones(2, F32)},
        "bool mask": {"attention_mask": live},
        "padding mask": {"attention_mask": np.arange(keys)[None, None, None] < keys // 2},
        "int mask": {"attention_mask": live[:, :1].astype(np.int32)},
        "segment info": {"attention_mask": MaskInfo.from_segments(q_ids, kv_ids).apply_causal()},
        "dense info": {"attention_mask": MaskInfo.from_attention_mask(live)},
        "bias": {"bias": np.where(live, 0.5, -np.inf).astype(F32)},
        "bias, soft cap": {"bias": np.where(live, 0.5, -np.inf).astype(F32), "logits_soft_cap": 4.0},
        "causal, soft cap": {"causal": True, "causal_offset": 0, "logits_soft_cap": 4.0},
        "causal, unnormalized": {"causal": True, "causal_offset": 0, "normalize_output": False},
        "bias of the keys": {"bias": np.where(np.arange(keys) < keys // 3, 0, -np.inf).astype(F32)},
        "causal, dropout": {"causal": True, "causal_offset": 0, "dropout_prob": 0.4, "dropout_seed": 3},
    }[kind]


LIMITS = (
    "causal", "causal, bottom-right", "window", "segments", "segments, sinks", "bool mask", "padding mask",
    "int mask", "segment info", "dense info", "bias", "bias, soft cap", "causal, soft cap",
    "causal, unnormalized", "bias of the keys", "causal, dropout",
)  # fmt: skip
POISON = [math.nan, math.inf, -math.inf, "huge"]
SIZES = ((1, 70), (37, 45), (32, 200), (130, 140))
LIVE = (
    "attention_mask", "bias", "causal", "sliding_window", "q_segment_ids", "kv_segment_ids", "causal_offset",
)  # fmt: skip


def poison_of(dtype, kind) -> float:
    return float(ml_dtypes.finfo(dtype).max) if kind == "huge" else kind


def live_of(arguments: dict, shape) -> np.ndarray:
    return ref.live_pairs(shape, **{name: arguments[name] for name in LIVE if name in arguments})


NO_PAIR = {
    "mask": lambda row, shape: {"attention_mask": np.arange(shape[2])[:, None] != row},
    "mask info": lambda row, shape: {
        "attention_mask": MaskInfo.from_attention_mask(
            np.broadcast_to((np.arange(shape[2]) != row)[:, None], (shape[0], *shape[2:]))
        )
    },
    "bias": lambda row, shape: {
        "bias": np.where(np.arange(shape[2])[:, None] == row, -np.inf, 0).astype(F32)
    },
    "segments": lambda row, shape: {
        "q_segment_ids": np.where(np.arange(shape[2]) == row, -1, 0)[None].repeat(shape[0], 0),
        "kv_segment_ids": np.zeros((shape[0], shape[3]), int),
    },
    "other segments": lambda row, shape: {
        "q_segment_ids": np.where(np.arange(shape[2]) == row, 5, 0)[None].repeat(shape[0], 0),
        "kv_segment_ids": np.zeros((shape[0], shape[3]), int),
    },
}


# The numbers of queries and keys of sequences, around the sizes of blocks and tiles.

SEQUENCES = {
    "one query each": ((1,) * 9, (3, 64, 65, 200, 1, 128, 63, 300, 40)),
    "few queries": ((3, 16, 1, 8, 20, 2, 16), (70, 16, 64, 130, 20, 9, 300)),
    "few and many queries": ((1, 70, 1, 2, 65, 1), (200, 70, 100, 2, 130, 64)),
    "up to a block": ((64, 40, 63, 1), (65, 150, 63, 70)),
    "short": ((5, 9, 30) * 4, (5, 9, 30) * 4),
    "some empty": ((0, 5, 0, 0, 64, 7, 0, 33), (10, 0, 5, 0, 3, 70, 64, 33)),
}


def of_lengths(name: str, dtype, heads: tuple[int, int], segments: bool, **more) -> Case:
    """The sequences packed in one row; or as segments of two rows, in a different order in each."""
    lengths = SEQUENCES[name]
    batch, how = (2, {"segments": True}) if segments else (1, {"packing": "packed"})
    sizes = sum(lengths[0]), sum(lengths[1]), 24, 40, batch
    return Case(dtype, *sizes, heads, lengths=lengths, **how, **more)


# The same bits


STEADY = [
    Case(F32, 300, 350, 32, 48, 2, (4, 2), causal=True, offset="bottom-right"),
    Case(F32, 1, 3000, 64, 64, 1, (8, 2)),
    Case(BF16, 1, 1500, 64, 64, 2, (20, 20), mask="[B, H, Tq, Tk] bool"),
    Case(F16, 3, 2000, 64, 64, 2, (4, 4), causal=True, offset="bottom-right"),
    Case(BF16, 260, 500, 64, 64, 1, (2, 1), mask="dense", dropout=0.2),
    Case(F64, 200, 300, 16, 16, 3, (2, 2), window=(30, 5), sinks="[H, S]"),
    Case(F32, 400, 400, 16, 16, 1, (4, 1), packing="flat", causal=True, bias="[H, 1, Tk]", normalize=False),
    Case(F32, 300, 300, 16, 16, 2, (4, 2), mask="segments of heads, causal", soft_cap=5.0),
    Case(F32, 130, 190, 8, 24, 8, (16, 16), q_layout="heads first"),
    Case(BF16, 330, 330, 8, 8, 4, (16, 16), causal=True, window=(50, 0), dropout=0.3, sinks="[H, S]"),
    Case(F64, 190, 150, 5, 7, 8, (16, 16), mask="[B, H, Tq, Tk] bool", bias="[H, 1, Tk]"),
    Case(BF16, 64, 64, 64, 64, 8, (8, 8), mask="segments of heads, causal"),  # heads are contiguous
    Case(F32, 20, 200, 24, 40, 3, (24, 12), dropout=0.2, sinks="[H, S]", bias="[H, 1, Tk]", normalize=False),
    Case(F32, 70, 200, 16, 64, 7, (50, 25), causal=True),  # not all heads are packed at once
    Case(F32, 640, 640, 8, 8, 1, (6, 6), window=(0, 0)),  # few tasks on one thread; keys are split
    *(of_lengths(name, F32, (8, 4), segments=True, causal=True) for name in SEQUENCES),
    *(of_lengths(name, BF16, (4, 4), segments=False) for name in SEQUENCES),
]
