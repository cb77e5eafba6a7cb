"""The terms of the logits: arguments that add to logits, cap them, drop weights, or add to the denominator.

Each has a row in `TERMS`; what the core does with a term is in its row of ``csrc/core/attention/terms/kinds.h``.
"""

from collections.abc import Callable
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnmask._attention.arguments import DEFAULTS
from attnmask._attention.batch import Batch, Pairs, four_axes
from attnmask._common.arguments import (
    FARTHEST,
    allocate,
    as_array,
    describe,
    integer,
    is_floating,
    is_number,
    real,
)
from attnmask._common.types import Array, DType, Given
from attnmask._faces.habits import ask
from attnmask._masks.info import MaskInfo

__all__ = [
    "BY_DISTANCE",
    "BY_POINT",
    "TERMS",
    "Places",
    "Range",
    "Sizes",
    "Term",
    "by_head",
    "dropout_of",
    "numbers_of",
    "terms_of",
]


class Range(NamedTuple):
    """The range of the arithmetic: the smallest positive number with a reciprocal, and the largest number."""

    least: float
    greatest: float


_FLOAT32, _FLOAT64 = (
    Range(float(info.tiny), float(info.max)) for info in (np.finfo(np.float32), np.finfo(np.float64))
)


def numbers_of(dtype: DType) -> Range:
    """Return the range of logits for queries of this type."""
    return _FLOAT64 if dtype == np.float64 else _FLOAT32


class Term(NamedTuple):
    """One term, as the core takes it."""

    name: str  # of its argument
    array: Array | None = (
        None  # [B or sequences, H, Tq, Tk]; 1 along axes that are shared; of a bias, B may be less
    )
    number: float = 0.0
    integer: int = 0


class Places(NamedTuple):
    """Where queries are among the keys: the distance of a pair is k - q - offset."""

    offsets: NDArray[np.intp]  # of all batch rows, or of each; of packed sequences, of each
    starts: NDArray[np.intp] | None  # of packed sequences
    key_starts: NDArray[np.intp] | None


class Sizes(NamedTuple):
    """The sizes that terms are checked against."""

    shape: Pairs
    rows: Batch  # batch rows or sequences
    row: str  # what messages call these axes
    numbers: Range


def _bias(bias: ArrayLike, sizes: Sizes, _: Given) -> Term:
    given = bias if isinstance(bias, MaskInfo) else as_array(bias, "bias")  # whose array may be too large
    if not isinstance(given, MaskInfo) and given.ndim == 0:
        ask("axes", 0, "bias", describe(bias))
    if isinstance(given, MaskInfo) or not is_floating(given.dtype):
        hint = ""
        if isinstance(given, MaskInfo) or given.dtype.kind in "biu":
            hint = "; write attention_mask= for a mask of allowed pairs, or bias.astype(np.float32)"
        raise TypeError(f"bias must be float16, bfloat16, float32 or float64, got {describe(given)}{hint}")
    return Term("bias", four_axes(given, "bias", sizes.shape, divides=True))


def dropout_of(prob: object, seed: object, names: tuple[str, str]) -> tuple[float, int]:
    """Return the probability that a weight is dropped, and the seed as 64 bits."""
    chance = real(prob, names[0])
    if not 0 <= chance < 1:
        hint = "; write 0.1 to drop one weight of ten"
        raise ValueError(f"{names[0]} must be at least 0 and below 1, got {chance}{hint}")
    return chance, 0 if seed is None else integer(seed, names[1]) % 2**64


def _dropout(dropout_prob: object, _: Sizes, given: Given) -> Term | None:
    names = ("dropout_prob", "dropout_seed")
    chance, seed = dropout_of(dropout_prob, given["dropout_seed"], names)
    if not chance:
        return None
    ask("dropout", chance, given["dropout_seed"])
    return Term(names[0], number=chance, integer=seed)


def _soft_cap(logits_soft_cap: object, sizes: Sizes, _: Given) -> Term | None:
    cap = real(logits_soft_cap, "logits_soft_cap")
    if cap < 0:
        raise ValueError(f"logits_soft_cap must not be negative, got {cap}")
    if cap == 0 or cap > sizes.numbers.greatest:
        return None
    return Term("logits_soft_cap", number=max(cap, sizes.numbers.least))


def _sinks(softmax_aux: ArrayLike, sizes: Sizes, _: Given) -> Term | None:
    heads = sizes.shape[-3]
    array = as_array(softmax_aux, "softmax_aux")
    if array.dtype.kind == "b" or not is_number(array.dtype):
        raise TypeError(f"softmax_aux must be real numbers, got {describe(array)}")
    if array.ndim not in (1, 2) or (array.ndim == 2 and array.shape[0] not in (1, heads)):
        hint = ""
        if array.size == heads:
            hint = f"; write np.reshape(softmax_aux, ({heads}, 1)) for one sink per head"
        elif array.ndim == 2 and array.shape[1] == heads:
            hint = "; write np.transpose(softmax_aux) for [S, H]"
        expected = f"[S], [1, S] or [H, S] with H = {heads}"
        raise ValueError(f"softmax_aux must be {expected}, got {describe(array)}{hint}")
    if array.shape[-1] == 0:
        return None
    ask("sinks", array.shape, heads)
    sinks = allocate(array.shape, np.float64, "softmax_aux")
    sinks[...] = array
    most = sizes.numbers.greatest
    np.clip(sinks, -most, most, out=sinks, where=np.isfinite(sinks))
    return Term("softmax_aux", sinks.reshape(1, -1, 1, array.shape[-1]))


def by_head(value: ArrayLike, name: str, sizes: Sizes) -> Term:
    """Return a term of numbers, one per head, or per batch row or sequence and head."""
    heads, row = sizes.shape[-3], sizes.row
    array = as_array(value, name)
    if array.dtype.kind == "b" or not is_number(array.dtype):
        raise TypeError(f"{name} must be real numbers, got {describe(array)}")
    if array.shape not in ((heads,), (1, heads), (*sizes.rows, heads)):
        raise ValueError(f"{name} must be [H] or [{row}, H] with H = {heads}, got {describe(array)}")
    numbers = np.array(array, np.float64, ndmin=2, order="C")
    numbers = numbers if numbers.ndim == 2 else numbers.reshape(prod(sizes.rows), heads)
    return Term(name, numbers[:, :, None, None])


def _relative_bias(relative_bias: ArrayLike, sizes: Sizes, given: Given) -> Term:
    heads = sizes.shape[-3]
    low = integer(given["relative_low"], "relative_low")
    if abs(low) > FARTHEST:
        raise ValueError(f"relative_low must be from -2**59 to 2**59, got {describe(low)}")
    array = as_array(relative_bias, "relative_bias")
    if not is_floating(array.dtype):
        raise TypeError(f"relative_bias must be float16, bfloat16, float32 or float64, got {describe(array)}")
    if array.ndim != 2 or array.shape[0] != heads or array.shape[1] == 0:
        raise ValueError(f"relative_bias must be [H, L] with H = {heads} and L > 0, got {describe(array)}")
    return Term("relative_bias", np.array(array, np.float64, order="C")[None, :, None], integer=low)


def _relative_low(relative_low: object, _: Sizes, given: Given) -> None:
    if given["relative_bias"] is None and integer(relative_low, "relative_low") != 0:
        raise ValueError(f"relative_low must be 0 without relative_bias, got {describe(relative_low)}")


def _grid_bias(grid_bias: ArrayLike, sizes: Sizes, _: Given) -> Term:
    heads = sizes.shape[-3]
    array = as_array(grid_bias, "grid_bias")
    if not is_floating(array.dtype):
        raise TypeError(f"grid_bias must be float16, bfloat16, float32 or float64, got {describe(array)}")
    if array.ndim != 3 or array.shape[0] != heads or not all(length % 2 for length in array.shape[1:]):
        expected = f"[H, 2h - 1, 2w - 1] with H = {heads} for a grid of h rows of w tokens"
        raise ValueError(f"grid_bias must be {expected}, got {describe(array)}{_grid_hint(array, heads)}")
    numbers = np.array(array, np.float64, order="C").reshape(1, heads, 1, -1)
    return Term("grid_bias", numbers, integer=array.shape[2])


def _grid_hint(array: Array, heads: int) -> str:
    """Return how to make a grid bias of Swin's table."""
    if array.ndim != 2 or array.shape[1] != heads:
        return ""
    return f"; write table.T.reshape({heads}, 2 * h - 1, 2 * w - 1)[:, ::-1, ::-1] for the table of Swin"


BY_DISTANCE = ("alibi_slopes", "relative_bias")  # of the terms, whose numbers follow from k - q
BY_POINT = ("grid_bias",)  # whose numbers follow from where q and k are in their row or sequence
# Functions that check one argument, given all of them, and return its term, or None if it has no effect.
TERMS: dict[str, Callable[..., Term | None]] = {
    "bias": _bias,
    "logits_soft_cap": _soft_cap,
    "softmax_aux": _sinks,
    "dropout_prob": _dropout,
    "alibi_slopes": lambda slopes, sizes, _: by_head(slopes, "alibi_slopes", sizes),
    "relative_bias": _relative_bias,
    "relative_low": _relative_low,
    "grid_bias": _grid_bias,
}


_ROWS = [(name, make, DEFAULTS[name]) for name, make in TERMS.items()]


def terms_of(given: Given, sizes: Sizes) -> tuple[Term, ...]:
    """Return the terms of a call that has some of these arguments."""
    terms: list[Term] = []  # in a loop: Python 3.11 loses references where a closure fits no memory
    for name, make, default in _ROWS:
        value = given.get(name, default)
        term = None if value is default else make(value, sizes, given)  # a default asks for nothing
        if term is not None:
            terms.append(term)
    return tuple(terms)
