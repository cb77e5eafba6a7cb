"""Masks of grids, whose points see those near them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnmask._common.arguments import describe, flag, frozen, integer
from attnmask._masks.program import LONGEST
from attnmask._masks.sources import of_all
from attnmask._masks.state import State
from attnmask._masks.terms import neighborhood

__all__ = ["of_neighborhood"]

_MOST_AXES = 3


def _by_axis(value: Any, name: str, axes: int, read: Callable[[Any, str], int]) -> list[int]:
    """Return one value an axis."""
    if not isinstance(value, (tuple, list)):
        return [read(value, name)] * axes
    if len(value) != axes:
        raise ValueError(
            f"{name} must be one value, or one for each of the {axes} axes of shape, got {describe(value)}"
        )
    return [read(x, f"{name} of axis {i}") for i, x in enumerate(value)]


def _check_axis(axis: int, length: int, kernel: int, stride: int, dilation: int, causal: int) -> None:
    if kernel > length:
        raise ValueError(f"kernel must be at most {length}, the length of axis {axis}, got {kernel}")
    if kernel % 2 == 0 and not causal:
        raise ValueError(
            f"kernel must be odd for axis {axis}, so that a window has a middle, or the axis causal, got {kernel}"
        )
    if stride > kernel:
        raise ValueError(f"stride must be at most {kernel}, the kernel of axis {axis}, got {stride}")
    if kernel * dilation > length:
        raise ValueError(
            f"dilation must be at most {length // kernel} for axis {axis}, of length {length} and kernel {kernel}, "
            f"got {dilation}"
        )


def _grid(
    shape: object, kernel: object, stride: object, dilation: object, causal: object
) -> NDArray[np.int64]:
    if not isinstance(shape, (tuple, list)) or not 1 <= len(shape) <= _MOST_AXES:
        raise ValueError(f"shape must be a tuple of one to three lengths, got {describe(shape)}")
    axes = len(shape)

    def positive(value: object, name: str) -> int:
        return integer(value, name, 1)

    columns = [
        _by_axis(shape, "shape", axes, positive),
        _by_axis(kernel, "kernel", axes, positive),
        _by_axis(stride, "stride", axes, positive),
        _by_axis(dilation, "dilation", axes, positive),
        _by_axis(causal, "causal", axes, flag),
    ]
    for axis, numbers in enumerate(zip(*columns, strict=True)):
        _check_axis(axis, *numbers)
    points = 1
    for length in columns[0]:
        points *= length
    if points > LONGEST:
        raise ValueError(f"shape must have at most 2**56 points, got {describe(shape)}")
    return frozen(np.array(columns, np.int64).T.copy())


def of_neighborhood(
    shape: object, kernel: object, stride: object, dilation: object, causal: object, batch: int
) -> State:
    grid = _grid(shape, kernel, stride, dilation, causal)
    everything = of_all(int(grid[:, 0].prod()), None, batch)
    return replace(everything, terms=everything.terms.plus(neighborhood(grid), "and"))
