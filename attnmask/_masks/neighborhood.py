"""Masks of grids, whose points see those near them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from attnmask._common.arguments import describe, flag, frozen, integer
from attnmask._masks.program import LONGEST
from attnmask._masks.sources import of_all
from attnmask._masks.state import State
from attnmask._masks.terms import neighborhood

__all__ = ["of_neighborhood"]

_MOST_AXES, _NUMBERS = 3, 4  # the last one is a flag


def _positive(value: object, name: str) -> int:
    return integer(value, name, 1)


def _by_axis(value: Any, name: str, axes: int, read: Callable[[Any, str], int]) -> list[int]:
    """Return one value an axis."""
    if not isinstance(value, (tuple, list)):
        return [read(value, name)] * axes
    if len(value) != axes:
        raise ValueError(
            f"{name} must be one value, or one for each of the {axes} axes of shape, got {describe(value)}"
        )
    return [read(x, f"{name} of axis {i}") for i, x in enumerate(value)]


def _check_axis(axis: int, names: Sequence[str], numbers: Sequence[int]) -> None:
    length, kernel, stride, dilation, causal = numbers
    _, of_kernel, of_stride, of_dilation, _ = names
    if kernel > length:
        raise ValueError(f"{of_kernel} must be at most {length}, the length of axis {axis}, got {kernel}")
    if kernel % 2 == 0 and not causal:
        raise ValueError(
            f"{of_kernel} must be odd for axis {axis}, so that a window has a middle, or the axis causal, got {kernel}"
        )
    if stride > kernel:
        raise ValueError(
            f"{of_stride} must be at most {kernel}, the {of_kernel} of axis {axis}, got {stride}"
        )
    if kernel * dilation > length:
        raise ValueError(
            f"{of_dilation} must be at most {length // kernel} for axis {axis}, of length {length} and {of_kernel} "
            f"{kernel}, got {dilation}"
        )


def of_neighborhood(given: dict[str, Any], batch: int) -> State:
    """Return the mask of a shape, kernel, stride, dilation and causal, in this order under the names of the caller."""
    (of_shape, shape), *_ = given.items()
    if not isinstance(shape, (tuple, list)) or not 1 <= len(shape) <= _MOST_AXES:
        raise ValueError(f"{of_shape} must be a tuple of one to three lengths, got {describe(shape)}")
    columns = [
        _by_axis(value, name, len(shape), _positive if place < _NUMBERS else flag)
        for place, (name, value) in enumerate(given.items())
    ]
    for axis, numbers in enumerate(zip(*columns, strict=True)):
        _check_axis(axis, list(given), numbers)
    points = math.prod(columns[0])
    if points > LONGEST:
        raise ValueError(f"{of_shape} must have at most 2**56 points, got {describe(shape)}")
    grid = frozen(np.array(columns, np.int64).T.copy())
    everything = of_all(points, None, batch)
    return replace(everything, terms=everything.terms.plus(neighborhood(grid), "and"))
