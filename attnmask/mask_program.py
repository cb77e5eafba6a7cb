"""The description of a mask, as the core takes it: a tuple of terms and operators in postfix order.

``segments and (causal or types)``, a base with one term that is itself made of two, is::

    (segments, causal, types, "or", "and")

Operators stand for themselves. A term is a tuple; it speaks of query `q` and key `k` of batch row `b` and head `h`::

    ("all",)                               every pair
    ("band", low, high, offset)            low <= k - q - offset[b] <= high; None for no limit
    ("chunk", size, q_shift, k_shift)      (q + q_shift[b]) // size == (k + k_shift[b]) // size
    ("keys", begin, end)                   begin[b] <= k < end[b]
    ("equal", q_ids, k_ids, exclude_zero)  the ids [B, Q] or [B, H, Q] and those of the keys are the same, and not
                                           negative, and not zero if that is excluded
    ("dense", array, q_shift, k_shift)     array[b, h, q + q_shift[b], k + k_shift[b]] is not zero

One more term is known to attention only, for packed rows::

    ("sequences", q_starts, k_starts, low, high)   q and k lie in the same sequence s, and counted from its starts
                                                   low[s] <= k - q <= high[s]

Sequence s is from ``starts[s]`` to before ``starts[s + 1]``. Starts are int64 arrays that hold for all batch
rows; limits are such arrays too, or None for no limit.

What has an index ``[b]`` is an int for all rows or an int64 array of one each. Axes of ids and arrays that all batch
rows, heads, queries or keys share have the length 1. Arrays are read-only, so programs share them.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from attnmask import _core
from attnmask.arguments import frozen

Node: TypeAlias = tuple[Any, ...] | str
Program: TypeAlias = tuple[Node, ...]
PerRow: TypeAlias = int | NDArray[np.int64]
Shape: TypeAlias = tuple[int, int, int, int]
Extent: TypeAlias = tuple[
    int | None, int | None, int | None, int | None
]  # None: not known, or whatever others say

MAX_DEPTH = 16  # operands that the core lets wait
LONGEST = 2**56  # axis of a mask that the core takes
AXES = ("batch rows", "heads", "queries", "keys")
_SYMBOLS = {"and": "&", "or": "|", "xor": "^"}
_REPR_TERMS = 12


def band(low: int | None, high: int | None, offset: PerRow) -> Node:
    return ("band", low, high, offset)


def chunk(size: int) -> Node:
    return ("chunk", min(size, 2**62), 0, 0)  # one chunk holds everything from there on


def first_keys(end: PerRow) -> Node:
    return ("keys", 0, end)


def equal(q_ids: NDArray[np.int32], kv_ids: NDArray[np.int32], exclude_zero: bool = False) -> Node:
    return ("equal", q_ids, kv_ids, exclude_zero)


def dense(array: NDArray[Any]) -> Node:
    """The 4-D `array`."""
    return ("dense", array, 0, 0)


def sequences(
    q_starts: NDArray[np.int64],
    k_starts: NDArray[np.int64],
    low: NDArray[np.int64] | None,
    high: NDArray[np.int64] | None,
) -> Node:
    return ("sequences", q_starts, k_starts, low, high)


def extent_of(tokens: tuple[int, ...], side: int) -> Extent:
    """What ids or positions of the shape `tokens` say of the mask's; `side` is 2 for queries and 3 for keys."""
    batch, *heads, length = tokens
    leading = [None if size == 1 else size for size in (batch, *heads, 1)[:2]]
    return (leading[0], leading[1], length, None) if side == 2 else (leading[0], leading[1], None, length)


def extents(program: Program) -> Iterable[tuple[str, Extent]]:
    """What the arrays of each term say of the mask's shape. Dense ones may be larger than what is used of them."""
    for node in program:
        if isinstance(node, str):
            continue
        kind, *operands = node
        if kind == "equal":
            yield "the query ids", extent_of(operands[0].shape, 2)
            yield "the key ids", extent_of(operands[1].shape, 3)
            continue
        if kind == "dense":
            batch, heads = (None if length == 1 else length for length in operands.pop(0).shape[:2])
            yield "the attention mask", (batch, heads, None, None)
        for operand in operands:
            if isinstance(operand, np.ndarray):
                yield "an array of one value a batch row", (len(operand), None, None, None)


def has_arrays(program: Program) -> bool:
    return any(
        isinstance(operand, np.ndarray) for node in program if isinstance(node, tuple) for operand in node
    )


def agree(named: Iterable[tuple[str, Extent]]) -> Extent:
    """The shape that all of `named` have or broadcast to; None where none of them says anything."""
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


def cut_tokens(array: NDArray[Any], start: PerRow, length: int) -> NDArray[Any]:
    """`length` tokens of the last axis, from `start` on, which may differ among the rows of the first."""
    if isinstance(start, int):
        return array if length == array.shape[-1] else frozen(array[..., start : start + length].copy())
    index = start[:, None] + np.arange(length)
    array = np.broadcast_to(array, (len(start), *array.shape[1:]))
    return frozen(np.take_along_axis(array, index[:, None] if array.ndim == 3 else index, axis=-1))


def _plus(a: PerRow, b: PerRow) -> PerRow:
    return a + b if isinstance(a, int) and isinstance(b, int) else frozen(np.add(a, b))


def _minus(a: PerRow, b: PerRow) -> PerRow:
    return a - b if isinstance(a, int) and isinstance(b, int) else frozen(np.subtract(a, b))


class Cut:
    """A rectangle out of every batch row: `q_len` queries from `q_start` on, `kv_len` keys from `k_start` on."""

    def __init__(self, q_start: PerRow, q_len: int, k_start: PerRow, kv_len: int) -> None:
        self.q_start, self.q_len, self.k_start, self.kv_len = q_start, q_len, k_start, kv_len
        # Arrays that are shared stay so. Each is held beside what was taken of it: an id is its own only so long.
        self._taken: dict[tuple[str, int], tuple[NDArray[Any], NDArray[Any]]] = {}

    def queries(self, array: NDArray[Any]) -> NDArray[Any]:
        return self._take("queries", array, self.q_start, self.q_len)

    def keys(self, array: NDArray[Any]) -> NDArray[Any]:
        return self._take("keys", array, self.k_start, self.kv_len)

    def _take(self, side: str, array: NDArray[Any], start: PerRow, length: int) -> NDArray[Any]:
        key = (side, id(array))
        if key not in self._taken:
            self._taken[key] = array, cut_tokens(array, start, length)
        return self._taken[key][1]

    def program(self, program: Program) -> Program:
        """The same mask inside the rectangle: terms look further, ids are taken along."""
        return tuple(node if isinstance(node, str) else self._term(*node) for node in program)

    def _term(self, kind: str, *operands: Any) -> Node:
        if kind == "band":
            low, high, offset = operands
            return (kind, low, high, _minus(_plus(offset, self.q_start), self.k_start))
        if kind == "chunk":
            size, q_shift, k_shift = operands
            return (kind, size, _plus(q_shift, self.q_start), _plus(k_shift, self.k_start))
        if kind == "keys":
            begin, end = operands
            return (kind, _minus(begin, self.k_start), _minus(end, self.k_start))
        if kind == "equal":
            q_ids, kv_ids, exclude_zero = operands
            return (kind, self.queries(q_ids), self.keys(kv_ids), exclude_zero)
        if kind == "dense":
            array, q_shift, k_shift = operands
            if array.shape[2] != 1:  # else all queries share what is there
                q_shift = _plus(q_shift, self.q_start)
            if array.shape[3] != 1:
                k_shift = _plus(k_shift, self.k_start)
            return (kind, array, q_shift, k_shift)
        return (kind, *operands)


class Terms:
    """What comes after the base of a program, in order.

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
        """These and more: whole operands, each with its operator."""
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
    """The base and the terms of ``left operator right``, and whether it begins as `left` does.

    The core lets only so many operands wait. Where that is not enough `right`, of `right_shape`, is written out.
    """
    (base, terms), (other_base, other_terms) = left, right
    if max(terms.depth, other_terms.depth + 1) <= MAX_DEPTH:
        return base, terms.plus(other_base, other_terms, operator), True
    if max(other_terms.depth, terms.depth + 1) <= MAX_DEPTH:  # all operators are symmetric
        return other_base, other_terms.plus(base, terms, operator), False
    written = fill(right_shape, (other_base, *other_terms.nodes), np.dtype(bool), True, False)
    return base, terms.plus(dense(frozen(written)), operator), True


def fill(
    shape: Shape,
    program: Program,
    dtype: np.dtype[Any],
    live: float,
    dead: float,
    out: NDArray[Any] | None = None,
) -> NDArray[Any]:
    return _core.mask_fill(shape, program, dtype, live, dead, out)


def allocate(
    shape: tuple[int, ...], dtype: DTypeLike, names: str, make: Callable[..., NDArray[Any]] = np.empty
) -> NDArray[Any]:
    """A new array, not filled yet or made by `np.zeros`, of sizes that come from the arguments `names`."""
    try:
        return make(shape, dtype)
    except (MemoryError, ValueError, OverflowError):  # the last two are of sizes beyond all numbers
        raise MemoryError(f"an array of shape {shape} does not fit in memory: {names}") from None


def slabs(shape: tuple[int, ...], most: int = 2**22) -> Iterator[tuple[int | slice, ...]]:
    """Indices of the parts of an array, in order, of at most so many entries: NumPy sees no signals within one."""
    axis = 0
    while axis < len(shape) - 1 and math.prod(shape[axis + 1 :]) > most:
        axis += 1
    step = max(1, most // max(1, math.prod(shape[axis + 1 :])))
    for leading in np.ndindex(shape[:axis]):
        for begin in range(0, shape[axis], step):
            yield *leading, slice(begin, begin + step)


def same(left: Program, right: Program) -> bool:
    """Whether two programs are the same at a glance: made of the very same terms."""
    return len(left) == len(right) and all(
        a is b or (isinstance(a, str) and a == b) for a, b in zip(left, right, strict=True)
    )


class Leaf(NamedTuple):
    """Stands for an array in a program without its arrays."""

    place: int


def hollow(program: Program, leaves: list[Any]) -> Program:
    """`program` with its arrays moved to `leaves`, unless they are there already."""

    def moved(operand: Any) -> Any:
        if not isinstance(operand, np.ndarray):
            return operand
        for index, leaf in enumerate(leaves):
            if leaf is operand:
                return Leaf(index)
        leaves.append(operand)
        return Leaf(len(leaves) - 1)

    return tuple(node if isinstance(node, str) else tuple(map(moved, node)) for node in program)


def refill(program: Program, leaf: Callable[[str, int], Any]) -> Program:
    """What `hollow` was given, with arrays by ``leaf(kind of term, index)``."""
    return tuple(
        node
        if isinstance(node, str)
        else tuple(
            leaf("rows" if node[0] == "dense" and part > 1 else node[0], operand.place)
            if isinstance(operand, Leaf)
            else operand
            for part, operand in enumerate(node)
        )
        for node in program
    )


def _words_of_term(node: tuple[Any, ...]) -> str:
    kind, *operands = node
    if kind == "band":
        low, high, offset = operands
        shift = f"offset={offset}" if isinstance(offset, int) else "offset by row"
        more = [] if isinstance(offset, int) and offset == 0 else [shift]
        if low is None and high == 0:
            return f"causal({shift})" if more else "causal"
        return f"window({', '.join([str(None if low is None else -low), str(high), *more])})"
    if kind == "chunk":
        return f"chunks({operands[0]})"
    if kind == "keys":
        return "key lengths"
    if kind == "equal":
        return "equal ids"
    if kind == "dense":
        return f"dense {operands[0].dtype}{list(operands[0].shape)}"
    return "everything"


def _elided(parts: list[str]) -> list[str]:
    half = _REPR_TERMS // 2
    if len(parts) <= _REPR_TERMS:
        return parts
    return [*parts[:half], f"… {len(parts) - 2 * half} more …", *parts[-half:]]


def words(program: Program, segment_based: bool) -> tuple[str, list[str]]:
    """The base, and each term with its operator, as one would say them."""
    waiting: list[list[str]] = []
    for place, node in enumerate(program):
        if not isinstance(node, str):
            waiting.append(["segments" if place == 0 and segment_based else _words_of_term(node)])
            continue
        operand = waiting.pop()
        text = f"({' '.join(_elided(operand))})" if len(operand) > 1 else operand[0]
        if node == "not":
            waiting.append([f"~{text}"])
        else:
            waiting[-1].append(f"{_SYMBOLS[node]} {text}")
    base, *terms = waiting[0]
    return base, _elided(terms)
