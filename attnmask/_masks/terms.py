"""The kinds of terms that masks are made of, as Python knows them. The core computes their answers.

A term is a tuple of its kind and its operands. It is about query `q` and key `k` of batch row `b` and head `h`::

    ("all",)                               every pair
    ("band", low, high, offset)            low[h] <= k - q - offset[b] <= high[h]; None for no limit
    ("diagonal", low, high, offset, at)    low[h] <= k - at[b, h, q] - offset[b] <= high[h]
    ("chunk", size, q_shift, k_shift)      (q + q_shift[b]) // size == (k + k_shift[b]) // size
    ("keys", begin, end)                   begin[b] <= k < end[b]
    ("equal", q_ids, k_ids, exclude_zero)  the ids [B, Q] or [B, H, Q] and those of the keys are the same, and not
                                           negative, and not zero if that is excluded
    ("dense", array, q_shift, k_shift)     array[b, h, q + q_shift[b], k + k_shift[b]] is not zero
    ("sequences", q_starts, k_starts, low, high)   q and k lie in the same sequence s, and counted from its starts
                                                   low[s] <= k - q <= high[s]
    ("tiles", places, q_size, k_size, bits, q_shift, k_shift)   the tile that (q + q_shift[b], k + k_shift[b]) lies
                                                                in is live, or has a bit for the pair that is set
    ("neighborhood", grid, q_shift, k_shift)   point k + k_shift[b] of a grid is near point q + q_shift[b]

Sequence s has the tokens from ``starts[s]`` to ``starts[s + 1] - 1``. Starts are int64 arrays that hold for all batch
rows. Limits are such arrays too, or None for no limit. Only attention has limits of sequences.

``at`` ``[B, Q]`` or ``[B, H, Q]`` is int32: the keys on the diagonals of queries. They may lie beyond both ends.

Places ``[B, H, Q tiles, K tiles]`` are int32: 0 for a tile of dead pairs, 1 for a tile of live pairs, and 2 + i for a
mixed tile. ``bits[i]`` are its pairs: 64 rows of 8 bytes, the lowest bit first. A mask with mixed tiles has tiles of
64 × 64 pairs.

A grid ``[axes, 5]`` is int64: the length, kernel, stride and dilation of each axis, and 1 if it is causal. Points are
in row-major order.

An operand with an index ``[b]`` or ``[h]`` is one int for all, or an int64 array. Ids and arrays have the length 1
along axes that all batch rows, heads, queries or keys share. Arrays are read-only, so programs share them.

A new kind is a constructor and a line of `KINDS` here, and a term in the core.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnmask._common.arguments import (
    FARTHEST,
    Limit,
    as_array,
    describe,
    frozen,
    integer_array,
    is_floating,
    mask_array,
    per_row,
    read_only,
    shared_integers,
)
from attnmask._common.loading import _core
from attnmask._common.types import AnyFunction, Array

Node: TypeAlias = tuple[Any, ...] | str  # a term or an operator
PerRow: TypeAlias = int | NDArray[np.int64]
# The shape of a mask. None is a length that is not known, or that broadcasts to those of others.
Extent: TypeAlias = tuple[int | None, int | None, int | None, int | None]

ALL_PLACES = 2**59 + 2**57  # one chunk of so many holds every key, and every query at the furthest offset
TILE = 64  # pairs along each side of a tile with bits
_NO_BITS = frozen(np.zeros((0, TILE, TILE // 8), np.uint8))


def everything() -> Node:
    return ("all",)


def band(low: Limit, high: Limit, offset: PerRow) -> Node:
    return ("band", low, high, offset)


def diagonal(low: Limit, high: Limit, offset: PerRow, at: NDArray[np.int32]) -> Node:
    return ("diagonal", low, high, offset, at)


def chunk(size: int, offset: PerRow = 0) -> Node:
    """Return the chunks of keys, and of queries that are `offset` positions further.

    The core adds only nonnegative numbers to positions. For a negative offset, both sides are therefore moved on by as
    many chunks as bring query 0 back to 0 or more. Offsets stop at -2**57: there no query shares a chunk with a key.
    """
    size = min(size, ALL_PLACES)
    if isinstance(offset, int):
        offset = max(offset, -(2**57))
        moved = max(-(offset // size), 0) * size
        return ("chunk", size, offset + moved, moved)
    offset = np.maximum(offset, -(2**57))
    chunks = np.maximum(-(offset // size), 0) * size
    return ("chunk", size, frozen(offset + chunks), frozen(chunks))


def first_keys(end: PerRow) -> Node:
    return ("keys", 0, end)


def first_tokens(count: PerRow, tokens: int) -> Node:
    """Return, as two chunks, the pairs of the first `count` of `tokens` tokens of each row, and those of the others."""
    size = max(tokens, 1)
    before = size - count if isinstance(count, int) else frozen(size - count)
    return ("chunk", size, before, before)


def equal(q_ids: NDArray[np.int32], kv_ids: NDArray[np.int32], exclude_zero: bool = False) -> Node:
    return ("equal", q_ids, kv_ids, exclude_zero)


def dense(array: Array) -> Node:
    """Return the term of a 4-D `array`."""
    return ("dense", array, 0, 0)


def tiles(
    places: NDArray[np.int32],
    size: tuple[int, int] = (TILE, TILE),
    bits: NDArray[np.uint8] = _NO_BITS,
    q_shift: PerRow = 0,
    k_shift: PerRow = 0,
) -> Node:
    q_size, k_size = (min(length, 2**55) for length in size)
    return ("tiles", places, q_size, k_size, bits, q_shift, k_shift)


def neighborhood(grid: NDArray[np.int64]) -> Node:
    return ("neighborhood", grid, 0, 0)


def sequences(
    q_starts: NDArray[np.int64],
    k_starts: NDArray[np.int64],
    low: NDArray[np.int64] | None = None,
    high: NDArray[np.int64] | None = None,
) -> Node:
    return ("sequences", q_starts, k_starts, low, high)


def ids_of_sequences(
    q_starts: NDArray[np.int64], k_starts: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the segment ids that say the same: the numbers of the sequences."""
    q_ids = _sequence_ids(q_starts)
    return q_ids, q_ids if k_starts is q_starts else _sequence_ids(k_starts)


def _sequence_ids(starts: NDArray[np.int64]) -> NDArray[np.int32]:
    return frozen(_core.prepare_sequence_ids(_core.int32_copy(starts, "cu_seqlens"))[None])


# Fields


class Field(NamedTuple):
    """An operand that may be an array."""

    words: str  # name the array in errors
    extent: Callable[[Array], Extent]  # gives the lengths of the mask that follow from the array
    check: AnyFunction  # checks what comes out of a tree, which may be any object


def tokens_extent(shape: tuple[int, ...], side: int) -> Extent:
    """Return what ids or positions of this shape say about the mask's; `side` is 2 for queries and 3 for keys."""
    batch, *heads, length = shape
    rows, planes = (None if size == 1 else size for size in (batch, *heads, 1)[:2])
    return (rows, planes, length, None) if side == 2 else (rows, planes, None, length)


def _dense_extent(array: Array) -> Extent:
    """Return the shape in use: the array may be larger."""
    batch, heads = (None if size == 1 else size for size in array.shape[:2])
    return batch, heads, None, None


def _checked_rows(value: ArrayLike) -> PerRow:
    # Slices and chunks move offsets on, to beyond what a caller may give.
    return per_row(value, ROWS.words, np.size(value), -4 * FARTHEST, maximum=4 * FARTHEST)


def _checked_ids(value: object) -> NDArray[np.int32]:
    return shared_integers(value, "segment ids", ("[B, T]", "[B, H, T]"))


def _checked_diagonals(value: object) -> NDArray[np.int32]:
    return shared_integers(value, DIAGONALS.words, ("[B, Q]", "[B, H, Q]"))


def _checked_mask(value: object) -> Array:
    array = as_array(value, "attention_mask")
    if (
        array.ndim == 4 and is_floating(array.dtype) and not array.any()
    ):  # such as a mask that has got this type
        return read_only(array)
    return mask_array(value, "attention_mask", ("[B, H, Q, K]",))


def _checked_starts(value: object) -> NDArray[np.int64]:
    return frozen(_core.checked_starts(as_array(value, "cu_seqlens"), "cu_seqlens"))


def _checked_heads(value: ArrayLike) -> PerRow:
    return per_row(value, HEADS.words, np.size(value), row="head")


def _checked_places(value: object) -> NDArray[np.int32]:
    array = integer_array(value, PLACES.words)
    if array.ndim != 4:
        raise ValueError(f"{PLACES.words} must be [B, H, Q, K], got {describe(array)}")
    planes = array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])
    return shared_integers(planes, PLACES.words, ("[B * H, Q, K]",)).reshape(array.shape)


def _checked_bits(value: object) -> NDArray[np.uint8]:
    bits = as_array(value, BITS.words)
    if bits.dtype != np.uint8 or bits.shape[1:] != _NO_BITS.shape[1:]:
        raise ValueError(f"{BITS.words} must be uint8 of shape [n, 64, 8], got {describe(bits)}")
    return read_only(np.ascontiguousarray(bits))


def _checked_grid(value: object) -> NDArray[np.int64]:
    array = integer_array(value, GRID.words)
    if array.ndim != 2 or not 1 <= len(array) <= 3 or array.shape[1] != 5:
        raise ValueError(f"{GRID.words} must be [axes, 5], got {describe(array)}")
    return frozen(array.astype(np.int64))


ROWS = Field("an array of one value a batch row", lambda array: (len(array), None, None, None), _checked_rows)
HEADS = Field("an array of one value a head", lambda array: (None, len(array), None, None), _checked_heads)
PLACES = Field("the tiles", _dense_extent, _checked_places)
BITS = Field("the bits of tiles", lambda array: (None, None, None, None), _checked_bits)
GRID = Field("the grid of a neighborhood", lambda array: (None, None, None, None), _checked_grid)
QUERY_IDS = Field("the query ids", lambda array: tokens_extent(array.shape, 2), _checked_ids)
KEY_IDS = Field("the key ids", lambda array: tokens_extent(array.shape, 3), _checked_ids)
DIAGONALS = Field("the diagonals", lambda array: tokens_extent(array.shape, 2), _checked_diagonals)
PAIRS = Field("the attention mask", _dense_extent, _checked_mask)
QUERY_STARTS = Field("the query starts", lambda array: (None, None, int(array[-1]), None), _checked_starts)
KEY_STARTS = Field("the key starts", lambda array: (None, None, None, int(array[-1])), _checked_starts)


# A rectangle of a mask


class Crop:
    """A rectangle cut out of each batch row: `q_len` queries from `q_start` on, `kv_len` keys from `k_start` on.

    `rows` and `heads` are slices with a start and a stop that choose some of them; None means all.
    """

    def __init__(
        self,
        q_start: PerRow,
        q_len: int,
        k_start: PerRow,
        kv_len: int,
        rows: slice | None = None,
        heads: slice | None = None,
    ) -> None:
        self.q_start, self.q_len, self.k_start, self.kv_len = q_start, q_len, k_start, kv_len
        self.rows, self.heads = rows, heads
        # An array that several terms share is cropped once. It is kept, because its id() is unique only while it lives.
        self._taken: dict[tuple[str, int], tuple[Array, Array]] = {}

    def queries(self, array: Array) -> Array:
        """Crop ids or positions of the queries."""
        return self._take("queries", array, self.q_start, self.q_len)

    def keys(self, array: Array) -> Array:
        return self._take("keys", array, self.k_start, self.kv_len)

    def _take(self, side: str, array: Array, start: PerRow, length: int) -> Array:
        key = (side, id(array))
        if key not in self._taken:
            self._taken[key] = array, _tokens(self.planes(array, array.ndim - 1), start, length)
        return self._taken[key][1]

    def planes(self, array: Array, axes: int = 2) -> Array:
        """Crop rows, and with two axes the heads."""
        parts = zip((self.rows, self.heads)[:axes], array.shape, strict=False)
        return array[tuple(_within(part, size) for part, size in parts)]

    def lead(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the axes before tokens that ids of this shape have here."""
        parts = zip((self.rows, self.heads), shape[:-1], strict=False)
        return tuple(len(range(size)[_within(part, size)]) for part, size in parts)

    def of_rows(self, value: PerRow) -> PerRow:
        return _part(value, self.rows)

    def of_heads(self, value: Limit) -> Limit:
        return None if value is None else _part(value, self.heads)

    def node(self, node: Node) -> Node:
        """Return the same inside the rectangle: terms look further, ids are cropped."""
        return node if isinstance(node, str) else KINDS[node[0]].crop(self, *node[1:])


def _within(part: slice | None, size: int) -> slice:
    """Return the part of an axis that exists, or length 1 if it is shared."""
    if part is None or (size == 1 and part.start < part.stop):
        return slice(None)
    return part


def _part(value: PerRow, part: slice | None) -> PerRow:
    if isinstance(value, int) or part is None:
        return value
    values = value[part]
    return int(values[0]) if len(values) == 1 else frozen(values.copy())


def _tokens(array: Array, start: PerRow, length: int) -> Array:
    """Return `length` tokens of the last axis from `start`, which may differ between the rows of the first."""
    if isinstance(start, int):
        return array if length == array.shape[-1] else frozen(array[..., start : start + length].copy())
    index = start[:, None] + np.arange(length)
    array = np.broadcast_to(array, (len(start), *array.shape[1:]))
    return frozen(np.take_along_axis(array, index[:, None] if array.ndim == 3 else index, axis=-1))


def _sum(a: PerRow, b: PerRow) -> PerRow:
    return a + b if isinstance(a, int) and isinstance(b, int) else frozen(np.add(a, b))


def _difference(a: PerRow, b: PerRow) -> PerRow:
    return a - b if isinstance(a, int) and isinstance(b, int) else frozen(np.subtract(a, b))


def _crop_band(crop: Crop, low: Limit, high: Limit, offset: PerRow) -> Node:
    offset = _difference(_sum(crop.of_rows(offset), crop.q_start), crop.k_start)
    return band(crop.of_heads(low), crop.of_heads(high), offset)


def _crop_diagonal(crop: Crop, low: Limit, high: Limit, offset: PerRow, at: Array) -> Node:
    offset = _difference(crop.of_rows(offset), crop.k_start)
    return diagonal(crop.of_heads(low), crop.of_heads(high), offset, crop.queries(at))


def _crop_chunk(crop: Crop, size: int, q_shift: PerRow, k_shift: PerRow) -> Node:
    q_shift, k_shift = map(crop.of_rows, (q_shift, k_shift))
    return ("chunk", size, _sum(q_shift, crop.q_start), _sum(k_shift, crop.k_start))


def _crop_keys(crop: Crop, begin: PerRow, end: PerRow) -> Node:
    begin, end = map(crop.of_rows, (begin, end))
    return ("keys", _difference(begin, crop.k_start), _difference(end, crop.k_start))


def _crop_equal(crop: Crop, q_ids: Array, k_ids: Array, exclude_zero: bool) -> Node:
    return equal(crop.queries(q_ids), crop.keys(k_ids), exclude_zero)


def _crop_dense(crop: Crop, array: Array, q_shift: PerRow, k_shift: PerRow) -> Node:
    """Crop a dense array; an axis that all queries or keys share stays."""
    array = read_only(crop.planes(array))
    sides = (
        (crop.of_rows(q_shift), crop.q_start, crop.q_len),
        (crop.of_rows(k_shift), crop.k_start, crop.kv_len),
    )
    shifts: list[PerRow] = []
    for axis, (shift, start, length) in enumerate(sides, 2):
        moved = shift if array.shape[axis] == 1 else _sum(shift, start)
        if array.shape[axis] != 1 and isinstance(moved, int):
            part = slice(moved, moved + length)
            array, moved = array[:, :, part] if axis == 2 else array[:, :, :, part], 0
        shifts.append(moved)
    return ("dense", array, *shifts)


def _crop_tiles(
    crop: Crop, places: Array, q_size: int, k_size: int, bits: Array, q_shift: PerRow, k_shift: PerRow
) -> Node:
    places = frozen(crop.planes(places).copy())
    q_shift, k_shift = _sum(crop.of_rows(q_shift), crop.q_start), _sum(crop.of_rows(k_shift), crop.k_start)
    return tiles(places, (q_size, k_size), bits, q_shift, k_shift)


def _crop_neighborhood(crop: Crop, grid: Array, q_shift: PerRow, k_shift: PerRow) -> Node:
    q_shift, k_shift = _sum(crop.of_rows(q_shift), crop.q_start), _sum(crop.of_rows(k_shift), crop.k_start)
    return ("neighborhood", grid, q_shift, k_shift)


def _crop_sequences(crop: Crop, q_starts: Array, k_starts: Array, *_: None) -> Node:
    """Crop sequences; rows may then begin in different ones, so ids of tokens replace them."""
    q_ids = _ids_within(q_starts, crop.q_start, crop.q_len)
    k_ids = _ids_within(k_starts, crop.k_start, crop.kv_len)
    return equal(crop.planes(q_ids, 1), crop.planes(k_ids, 1))


def _ids_within(starts: NDArray[np.int64], start: PerRow, length: int) -> NDArray[np.int32]:
    if isinstance(start, int):  # then starts are enough, and ids are made for the crop alone
        return _sequence_ids(np.minimum(np.maximum(starts, start), start + length) - start)
    return _tokens(_sequence_ids(starts), start, length)


# Words


def _band_words(low: Limit, high: Limit, offset: PerRow) -> str:
    shift = f"offset={offset}" if isinstance(offset, int) else "offset by row"
    more = [] if isinstance(offset, int) and offset == 0 else [shift]
    if isinstance(low, np.ndarray) or isinstance(high, np.ndarray):
        return f"window({', '.join(['by head', *more])})"
    if low is None and high == 0:
        return f"causal({shift})" if more else "causal"
    return f"window({', '.join([str(None if low is None else -low), str(high), *more])})"


def _diagonal_words(low: Limit, high: Limit, offset: PerRow, at: Array) -> str:
    return f"{_band_words(low, high, offset)} within segments"


def _dense_words(array: Array, *_: PerRow) -> str:
    return f"dense {array.dtype}{list(array.shape)}"


def _tile_words(places: Array, q_size: int, k_size: int, bits: Array, *_: PerRow) -> str:
    return f"tiles({q_size} x {k_size}{f', {len(bits)} patterns' if len(bits) else ''})"


def _neighborhood_words(grid: Array, *_: PerRow) -> str:
    shape, kernel, stride, dilation, causal = (" x ".join(map(str, x)) for x in grid.T.tolist())
    parts = {"stride": stride, "dilation": dilation}
    more = [f"{name}={value}" for name, value in parts.items() if set(value.split(" x ")) != {"1"}]
    if grid[:, 4].any():
        more.append("causal" if grid[:, 4].all() else f"causal={causal}")
    return f"neighborhood({', '.join([shape, f'kernel={kernel}', *more])})"


# The table


class Kind(NamedTuple):
    fields: dict[str, Field | None]  # the operands in their order; None for one that is not an array
    words: Callable[..., str]  # describes a term, from its operands
    crop: Callable[..., Node]  # makes the term of a `Crop` of the mask, from that and the operands


KINDS = {
    "all": Kind({}, lambda: "everything", lambda crop: ("all",)),
    "band": Kind({"low": HEADS, "high": HEADS, "offset": ROWS}, _band_words, _crop_band),
    "diagonal": Kind(
        {"low": HEADS, "high": HEADS, "offset": ROWS, "at": DIAGONALS}, _diagonal_words, _crop_diagonal
    ),
    "chunk": Kind(
        {"size": None, "q_shift": ROWS, "k_shift": ROWS}, lambda size, *_: f"chunks({size})", _crop_chunk
    ),
    "keys": Kind({"begin": ROWS, "end": ROWS}, lambda *_: "key lengths", _crop_keys),
    "equal": Kind(
        {"q_ids": QUERY_IDS, "k_ids": KEY_IDS, "exclude_zero": None}, lambda *_: "equal ids", _crop_equal
    ),
    "dense": Kind({"array": PAIRS, "q_shift": ROWS, "k_shift": ROWS}, _dense_words, _crop_dense),
    "tiles": Kind(
        {"places": PLACES, "q_size": None, "k_size": None, "bits": BITS, "q_shift": ROWS, "k_shift": ROWS},
        _tile_words,
        _crop_tiles,
    ),
    "sequences": Kind(
        {"q_starts": QUERY_STARTS, "k_starts": KEY_STARTS, "low": None, "high": None},
        lambda *_: "sequences",
        _crop_sequences,
    ),
    "neighborhood": Kind(
        {"grid": GRID, "q_shift": ROWS, "k_shift": ROWS}, _neighborhood_words, _crop_neighborhood
    ),
}


def operands(node: Node) -> Iterator[tuple[Field | None, Any]]:
    """Return the operands of a term, each with its field; an operator has none."""
    if not isinstance(node, str):
        yield from zip(KINDS[node[0]].fields.values(), node[1:], strict=True)
