"""Right arguments are drawn from rows: of each argument a value, or how to draw one (rows_of_functions.py)."""

import warnings
import zlib
from collections.abc import Callable
from inspect import Parameter
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import random_masks

from attnmask import MaskInfo
from attnmask._faces.rows import Kind, Row, _size, axes_of

Rng = np.random.Generator
Arguments = dict[str, Any]
Sizes = dict[str, int]  # what the letters of layouts stand for in a call
FLOATS = [np.float16, np.float32, np.float64, ml_dtypes.bfloat16]


def coin(rng: Rng, chance: float = 0.5) -> bool:
    return bool(rng.random() < chance)


def pick(rng: Rng, values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def floats(rng: Rng, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def wide_of(dtype: Any) -> Any:
    return np.float64 if dtype == np.float64 else np.float32


# Rows


class Draw(NamedTuple):
    """How to draw a value, and how often it is given."""

    make: Callable[[Rng, Sizes], Any]
    chance: float = 1


def value_of(value: Any, rng: Rng, sizes: Sizes) -> Any:
    if isinstance(value, Draw):
        return value.make(rng, sizes)
    return value.copy() if isinstance(value, (list, dict)) else value  # calls may alter them


def draw(rng: Rng, *rows: Any, chance: float = 1, **sizes: int) -> Arguments:
    """Draw arguments from rows: dicts of names and values, or draws of such dicts. Each is kept with this chance."""
    found: Arguments = {}
    for row in rows:
        for name, value in value_of(row, rng, sizes).items():
            if coin(rng, chance * (value.chance if isinstance(value, Draw) else 1)):
                found[name] = value_of(value, rng, sizes)
    return found


def one(*values: Any) -> Draw:
    return Draw(lambda rng, sizes: value_of(pick(rng, values), rng, sizes))


def maybe(value: Any, chance: float = 0.25) -> Draw:
    return Draw(lambda rng, sizes: value_of(value, rng, sizes), chance)


def made(make: Callable[[Rng], Any]) -> Draw:
    return Draw(lambda rng, sizes: make(rng))


FLAG = one(False, True)


# Arrays. A layout is text such as "2, H, n"; the size of a letter is drawn where it first occurs


def shape_of(layout: str, rng: Rng, sizes: Sizes) -> tuple[int, ...]:
    axes = layout.split(", ")
    return tuple(int(x) if x.isdecimal() else sizes.setdefault(x, int(rng.integers(1, 9))) for x in axes)


def arrays(make: Callable[..., np.ndarray], layouts: tuple[str, ...]) -> Draw:
    return Draw(lambda rng, sizes: make(rng, *shape_of(pick(rng, layouts), rng, sizes)))


def reals(*layouts: str, dtype: Any = (np.float32,)) -> Draw:
    return arrays(lambda rng, *shape: floats(rng, *shape, dtype=pick(rng, dtype)), layouts)


def zeros(layout: str, dtype: Any = bool) -> Draw:
    return arrays(lambda rng, *shape: np.zeros(shape, dtype), (layout,))


def ids(rng: Rng, *shape: int) -> np.ndarray:
    return np.sort(rng.integers(-1, 4, shape), axis=-1).astype(pick(rng, [np.int32, np.int64, np.int8]))


def mask(rng: Rng, *shape: int) -> np.ndarray:
    live = rng.random(shape) < 0.7
    live[(slice(1),) * live.ndim] = True  # of floating-point numbers, zeros alone are no mask
    return live.astype(pick(rng, [np.bool_, np.int32, np.float32, np.uint8]))


def starts(rng: Rng, total: int) -> np.ndarray:
    inner = np.sort(rng.integers(0, total + 1, int(rng.integers(0, 4))))
    return np.array([0, *inner, total], pick(rng, [np.int32, np.int64, np.uint16]))


def ids_of(*layouts: str) -> Draw:
    return arrays(ids, layouts)


def mask_of(*layouts: str) -> Draw:
    return arrays(mask, layouts)


def starts_of(total: int) -> Draw:
    return made(lambda rng: starts(rng, total))


def integers(*values: Any, dtype: Any = np.int64) -> Draw:
    """An array of these numbers."""
    return made(lambda rng: np.array(values, dtype))


def any_mask(rng: Rng, batch: int, queries: int, keys: int) -> MaskInfo:
    """A MaskInfo of this shape without heads, of any kind, which may have computed its array."""
    with warnings.catch_warnings():  # some are packed with sides that differ
        warnings.simplefilter("ignore")
        info = random_masks.expression(rng, (batch, 1, queries, keys))
    if coin(rng, 0.2):
        info.get_or_compute_attention_mask()
    return info


# Functions of which the package has a row


OTHERS = {Kind.SCALE: [0.5], Kind.SIZE: [16, 32, 256], Kind.FLAG: [True], Kind.ALL: [False, True]}


def of_row(rng: Rng, row: Row) -> Arguments:
    """Draw arrays of any of their layouts, and half of what may be left out. No argument alters another's draw."""
    linear, step = "attention" in row.name, bool(row.of(Kind.STATE))
    dtype = pick(rng, FLOATS)
    sizes = {axis: int(rng.integers(1, 40 if axis in "KV" else 20)) for axis in "KVC"} | {
        "B": int(rng.integers(1, 6 if step else 3)),
        "T": int(rng.integers(1, 70 if linear else 20)),
        "Hk": int(rng.integers(1, 4)),
        "W": pick(rng, [1, 2, 3, 4, 4, 6]),
    }
    sizes |= {"H": sizes["Hk"] * int(rng.integers(1, 3)), "slots": sizes["B"] + 2 * coin(rng)}
    packed = starts(rng, sizes["T"]) if sizes["B"] == 1 and coin(rng) else None
    sizes["N"] = sizes["B"] if packed is None else len(packed) - 1
    found: Arguments = {}
    seed = int(rng.integers(2**32))
    for argument in row.arguments:
        name, kind = argument.name, argument.kind
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        shown = argument.default is Parameter.empty or kind in (Kind.ALL, Kind.CHOICE)
        if kind is Kind.STARTS:
            shown = packed is not None
        elif kind is Kind.SLOTS and sizes["slots"] != sizes["B"]:
            shown = True
        if not shown and (kind is Kind.STARTS or coin(rng)):
            continue
        if kind in (Kind.LEARNED, Kind.STATE):
            shape = [_size(axis, sizes) for axis in pick(rng, axes_of(argument.layout))]
            is_wide = linear and name not in ("query", "key", "value")
            found[name] = numbers_of(rng, name, shape).astype(wide_of(dtype) if is_wide else dtype)
        elif kind is Kind.OUT:
            found[name] = np.zeros([sizes[axis] for axis in axes_of(row.results[0].layout)[0]], dtype)
        elif kind is Kind.SLOTS:
            found[name] = rng.permutation(sizes["slots"])[: sizes["B"]].astype(
                pick(rng, [np.int32, np.int64])
            )
        else:
            found[name] = packed if kind is Kind.STARTS else pick(rng, OTHERS.get(kind) or argument.choices)
    return found


def numbers_of(rng: Rng, name: str, shape: list[int]) -> np.ndarray:
    x = rng.standard_normal(shape)
    return {"key": x / 8, "decay": -abs(x), "beta": rng.random(shape)}.get(name, x)
