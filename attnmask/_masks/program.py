"""The description of a mask, as the core takes it: a tuple of terms and operators in postfix order.

``segments and (causal or types)``, a base with one term that is itself made of two, is::

    (segments, causal, types, "or", "and")

Operators stand for themselves; `mask_terms` has the kinds of terms.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from attnmask._common.arguments import describe, frozen, integer
from attnmask._common.loading import _core
from attnmask._common.types import Array, DType
from attnmask._masks.terms import KINDS, Crop, Extent, Node, dense, operands

Program: TypeAlias = tuple[Node, ...]
Shape: TypeAlias = tuple[int, int, int, int]

MAX_DEPTH = 16  # the core's stack has room for so many operands
LONGEST = 2**56  # the core takes no longer axis of a mask
AXES = ("batch rows", "heads", "queries", "keys")
_SYMBOLS = {"and": "&", "or": "|", "xor": "^"}
_REPR_TERMS = 12


def axis_length(value: object, name: str) -> int:
    """Return the length of a mask axis."""
    length = integer(value, name, 0)
    if length > LONGEST:
        raise ValueError(f"{name} must be at most 2**56, got {describe(length)}")
    return length


def extents(program: Program) -> Iterable[tuple[str, Extent]]:
    """Return what the arrays of each term say about the mask's shape."""
    for node in program:
        for field, operand in operands(node):
            if field is not None and isinstance(operand, np.ndarray):
                yield field.words, field.extent(operand)


def arrays(program: Program) -> list[Array]:
    return [operand for node in program for _, operand in operands(node) if isinstance(operand, np.ndarray)]


def agree(named: Iterable[tuple[str, Extent]]) -> Extent:
    """Return the shape that all of `named` have or broadcast to; None for unknown axes."""
    sizes: list[int | None] = [None, None, None, None]
    names = ["", "", "", ""]
    for name, extent in named:
        for axis, size in enumerate(extent):
            if size is None:
                continue
            known = sizes[axis]
            if known is not None and known != size:
                raise ValueError(f"{name} must have {known} {AXES[axis]} as {names[axis]}, got {size}")
            sizes[axis], names[axis] = size, name
    return tuple(sizes)  # type: ignore[return-value]


def cropped(program: Program, crop: Crop) -> Program:
    """Return the same mask inside the rectangle."""
    return tuple(map(crop.node, program))


class Terms:
    """The terms after the base of a program, in order.

    One that is made of others refers to them, so that n terms are joined in n steps; it is written out once somebody
    reads it. `depth` says how many operands wait at once while the core evaluates the base and these.
    """

    __slots__ = ("_flat", "_parts", "depth", "length")

    length: int
    depth: int

    def __init__(self, *parts: "Node | Terms") -> None:
        self._parts, self._flat = parts, True
        length, depth, waiting = 0, 1, 1
        for part in parts:
            if isinstance(part, Terms):
                self._flat = False
                length += part.length
                depth = max(depth, waiting - 1 + part.depth)
                continue
            length += 1
            if isinstance(part, tuple):
                waiting += 1
                depth = max(depth, waiting)
            elif part != "not":
                waiting -= 1
        self.length, self.depth = length, depth

    def __bool__(self) -> bool:
        return self.length > 0

    def plus(self, *parts: "Node | Terms") -> "Terms":
        """Return these terms plus whole operands, each with its operator."""
        return Terms(self, *parts)

    @property
    def nodes(self) -> Program:
        if not self._flat:
            nodes: list[Node] = []
            waiting: list[Node | Terms] = [self]
            while waiting:
                part = waiting.pop()
                if isinstance(part, Terms):
                    waiting += reversed(part._parts)
                else:
                    nodes.append(part)
            self._parts = tuple(nodes)
            self._flat = True
        return self._parts  # type: ignore[return-value]


def join(
    left: tuple[Node, Terms], right: tuple[Node, Terms], operator: str, right_shape: Shape
) -> tuple[Node, Terms, bool]:
    """Return the base and terms of ``left operator right``, and whether it begins as `left` does.

    If the program would need more than MAX_DEPTH waiting operands, `right`, of `right_shape`, is written out.
    """
    (base, terms), (other_base, other_terms) = left, right
    if max(terms.depth, other_terms.depth + 1) <= MAX_DEPTH:
        return base, terms.plus(other_base, other_terms, operator), True
    if max(other_terms.depth, terms.depth + 1) <= MAX_DEPTH:  # all operators are symmetric
        return other_base, other_terms.plus(base, terms, operator), False
    written = fill(right_shape, (other_base, *other_terms.nodes), np.dtype(bool), True, False)
    return base, terms.plus(dense(frozen(written)), operator), True


def fill(
    shape: Shape, program: Program, dtype: DType, live: float, dead: float, out: Array | None = None
) -> Array:
    return _core.mask_fill(shape, program, dtype, live, dead, out)


def same(left: Program, right: Program) -> bool:
    """Return whether two programs are made of the very same terms."""
    return len(left) == len(right) and all(
        a is b or (isinstance(a, str) and a == b) for a, b in zip(left, right, strict=True)
    )


class Leaf(NamedTuple):
    """A placeholder for an array in a program without its arrays."""

    place: int


def mapped(program: Program, change: Callable[[Any], object]) -> Program:
    """Return a program with its operands changed."""
    return tuple(node if isinstance(node, str) else (node[0], *map(change, node[1:])) for node in program)


def hollow(program: Program, leaves: list[Array | None]) -> Program:
    """Return `program` with its arrays moved to `leaves`, unless they are there already."""

    def moved(operand: object) -> object:
        if not isinstance(operand, np.ndarray):
            return operand
        for index, leaf in enumerate(leaves):
            if leaf is operand:
                return Leaf(index)
        leaves.append(operand)
        return Leaf(len(leaves) - 1)

    return mapped(program, moved)


def refill(program: Program, leaves: tuple[object, ...], checked: dict[int, object]) -> Program:
    """Undo `hollow` with the current `leaves`, which are `checked` like arguments, each by its index."""

    def filled(field: Any, operand: object) -> object:
        if not isinstance(operand, Leaf):
            plain = field is None or operand is None or isinstance(operand, int)
            return operand if plain else field.check(operand)
        if operand.place not in checked:
            checked[operand.place] = field.check(leaves[operand.place])
        return checked[operand.place]

    return tuple(
        node if isinstance(node, str) else (node[0], *(filled(*operand) for operand in operands(node)))
        for node in program
    )


def _elided(parts: list[str]) -> list[str]:
    half = _REPR_TERMS // 2
    if len(parts) <= _REPR_TERMS:
        return parts
    return [*parts[:half], f"… {len(parts) - 2 * half} more …", *parts[-half:]]


_BASES = {"all": "full", "chunk": "lengths"}  # that tell segments without ids


def words(program: Program, segment_based: bool) -> tuple[str, list[str]]:
    """Return the base, and each term with its operator, in words."""
    waiting: list[list[str]] = []
    for place, node in enumerate(program):
        if not isinstance(node, str):
            is_base = place == 0 and segment_based
            waiting.append([_BASES.get(node[0], "segments") if is_base else KINDS[node[0]].words(*node[1:])])
            continue
        operand = waiting.pop()
        text = f"({' '.join(_elided(operand))})" if len(operand) > 1 else operand[0]
        if node == "not":
            waiting.append([f"~{text}"])
        else:
            waiting[-1].append(f"{_SYMBOLS[node]} {text}")
    base, *terms = waiting[0]
    return base, _elided(terms)
