"""Make masks from segment ids, arrays of pairs, blocks or tokens, cu_seqlens, functions, and random numbers."""

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnmask._common.arguments import (
    allocate,
    as_array,
    block_sizes,
    describe,
    flag,
    frozen,
    integer,
    integer_array,
    integers,
    mask_array,
)
from attnmask._common.loading import _core
from attnmask._common.types import AnyFunction, Array
from attnmask._faces.habits import ask
from attnmask._masks.program import LONGEST, Shape, Terms, axis_length, fill
from attnmask._masks.state import (
    BOOL,
    KEYS,
    QUERIES,
    Ids,
    Labels,
    State,
    fitted,
    four_dimensions,
    ids_of_tokens,
    padding_of,
    segments,
)
from attnmask._masks.terms import (
    TILE,
    Node,
    dense,
    everything,
    first_keys,
    first_tokens,
    ids_of_sequences,
    sequences,
    tiles,
)
from attnmask._sequences import packed

_DRAWN = 2**20  # random numbers that are drawn at a time
_SLAB = 2**18  # pairs that a function is called with at a time


def _of_ids(q_ids: Ids, kv_ids: Ids) -> State:
    return fitted(State(base=segments(q_ids, kv_ids), segment_based=True, labels=Labels(q_ids, kv_ids)))


def _padding_ids(mask: ArrayLike, name: str, layouts: tuple[str, ...], valid: bool = True) -> Ids:
    """Return 0 for tokens and -1 for padding, from a mask that is nonzero, or zero, for tokens."""
    tokens = mask_array(mask, name, layouts)
    pairs = (tokens[:, None] if tokens.ndim == 2 else tokens)[:, :, None]  # a mask of one query
    ids = fill(pairs.shape, (dense(pairs),), np.dtype(np.int32), *((0, -1) if valid else (-1, 0)))
    return frozen(ids.reshape(tokens.shape))


def of_segments(q_segment_ids: ArrayLike, kv_segment_ids: ArrayLike | None, is_attn_mask: bool) -> State:
    ids_of = _padding_ids if flag(is_attn_mask, "is_attn_mask") else _segment_ids
    q_ids = ids_of(q_segment_ids, "q_segment_ids", QUERIES)
    return _of_ids(q_ids, q_ids if kv_segment_ids is None else ids_of(kv_segment_ids, "kv_segment_ids", KEYS))


def _segment_ids(ids: ArrayLike, name: str, layouts: tuple[str, ...]) -> Ids:
    return integers(ids, name, layouts, "; a padding mask goes with is_attn_mask=True")


def of_array(attention_mask: ArrayLike, mask_is_valid: bool) -> State:
    mask = mask_array(attention_mask, "attention_mask", ("[B, T]", "[B, Q, K]", "[B, H, Q, K]"))
    valid = flag(mask_is_valid, "mask_is_valid")
    if mask.ndim == 2:
        ids = _padding_ids(mask, "attention_mask", ("[B, T]",), valid)
        ask("mask of tokens", ids + 1)
        return _of_ids(ids, ids)
    mask = four_dimensions(mask)
    base, terms, dtype = dense(mask), Terms() if valid else Terms("not"), mask.dtype if valid else BOOL
    labels = padding_of(mask.shape, (base, *terms.nodes))
    return State(base=base, terms=terms, dtype=dtype, extent=mask.shape, labels=labels)


def of_all(q_len: int, kv_len: int | None, batch: int) -> State:
    """Allow every pair of so many tokens."""
    queries = axis_length(q_len, "q_len")
    keys = queries if kv_len is None else axis_length(kv_len, "kv_len")
    extent = (axis_length(batch, "batch"), 1, queries, keys)
    return State(base=everything(), extent=extent, segment_based=True)


def of_lengths(lengths: ArrayLike, max_len: int | None) -> State:
    """Make rows of so many tokens, with padding after them; hiding keys from padded queries takes two terms."""
    given = integer_array(lengths, "lengths")
    if given.ndim != 1:
        raise ValueError(f"lengths must be [B], got {describe(given)}")
    given = given.copy()
    tokens = max(given.tolist(), default=0) if max_len is None else axis_length(max_len, "max_len")
    outside = (given < 0) | (given > min(tokens, LONGEST))
    if outside.any():
        index = int(outside.argmax())
        limit = "2**56" if max_len is None else f"max_len, {tokens}"
        what = "at least 0" if given[index] < 0 else f"at most {limit}"
        raise ValueError(f"lengths must be {what}, got {given[index]} at index {index}")
    counts = int(given[0]) if len(given) == 1 else frozen(given.astype(np.int64))
    terms = Terms(first_keys(counts), "and")
    extent = (len(given), 1, tokens, tokens)
    return State(base=first_tokens(counts, tokens), terms=terms, extent=extent, segment_based=True)


def of_padding_mask(padding_mask: ArrayLike) -> State:
    ids = _padding_ids(padding_mask, "padding_mask", ("[B, T]",))
    return _of_ids(ids, ids)


def _pairs(cu_seqlens: ArrayLike, name: str, length: int | None, length_name: str) -> tuple[Ids, int]:
    """Return where each row's tokens start and end, and the length of a row."""
    pairs = integers(cu_seqlens, name, ("[2 B]",))
    if len(pairs) % 2:
        hint = "; write packed=True for cu_seqlens that start at 0"
        raise ValueError(f"{name} must be pairs of start and end, got {describe(pairs)}{hint}")
    if length is None:
        raise TypeError(f"{length_name} must be given unless packed=True, got None")
    return pairs, integer(length, length_name, 0)


def _row_ids(pairs: Ids, places: int, _: str) -> Ids:
    return ids_of_tokens(_core.cu_seqlens_to_mask(pairs, places, BOOL, None))


def _starts(cu_seqlens: ArrayLike, name: str, length: int | None, length_name: str) -> tuple[Ids, int]:
    """Return where the sequences of the one row start and end, and its length."""
    starts = integers(cu_seqlens, name, ("[sequences + 1]",))
    tokens = int(_core.checked_starts(starts, name)[-1])
    places = tokens if length is None else integer(length, length_name, 0)
    if places < tokens:
        raise ValueError(f"{length_name} must be at least {tokens}, the number of tokens, got {places}")
    return starts, places


def _padded_ids(starts: Ids, places: int, length_name: str) -> Ids:
    """Return the sequence number of each token, and -1 for padding after them."""
    numbers = packed.prepare_sequence_ids(starts)
    ids = allocate((1, places), np.int32, length_name)
    ids[0, : len(numbers)] = numbers
    ids[0, len(numbers) :] = -1
    return frozen(ids)


def _of_starts(q_cu: Ids, kv_cu: Ids) -> State:
    """Make sequences without padding from their starts, which stand for ids; ids are computed on request."""
    q_starts = frozen(q_cu.astype(np.int64))
    k_starts = q_starts if kv_cu is q_cu else frozen(kv_cu.astype(np.int64))
    shapes: list[tuple[int, ...] | None] = [(1, int(starts[-1])) for starts in (q_starts, k_starts)]
    labels = Labels.later(shapes, lambda: ids_of_sequences(q_starts, k_starts))
    return fitted(State(base=sequences(q_starts, k_starts), segment_based=True, labels=labels))


def of_cu_seqlens(
    cu_seqlens_q: ArrayLike,
    max_q_len: int | None,
    cu_seqlens_kv: ArrayLike | None,
    max_kv_len: int | None,
    packed: bool | None,
) -> State:
    read = _starts if packed is not None and flag(packed, "packed") else _pairs
    q_cu, q_len = read(cu_seqlens_q, "cu_seqlens_q", max_q_len, "max_q_len")
    if max_kv_len is not None:
        max_kv_len = integer(max_kv_len, "max_kv_len", 0)
    if max_kv_len in (None, max_q_len) and cu_seqlens_kv is None:
        kv_cu, kv_len = q_cu, q_len
    else:
        given = cu_seqlens_q if cu_seqlens_kv is None else cu_seqlens_kv
        if max_kv_len is None and not packed:
            max_kv_len = max_q_len
        kv_cu, kv_len = read(given, "cu_seqlens_kv", max_kv_len, "max_kv_len")
    if len(q_cu) != len(kv_cu):
        raise ValueError(
            f"cu_seqlens_kv must have {len(q_cu)} entries as cu_seqlens_q, got {describe(kv_cu)}"
        )
    if packed is None:
        instead = "Write packed=True for sequences laid end to end in one row, or packed=False for pairs"
        ask("pairs", q_cu, kv_cu, name="cu_seqlens_q", instead=instead)
    if packed and (q_len, kv_len) == (q_cu[-1], kv_cu[-1]):
        state = _of_starts(q_cu, kv_cu)
    else:
        ids_of = _padded_ids if packed else _row_ids
        q_ids = ids_of(q_cu, q_len, "max_q_len")
        state = _of_ids(q_ids, q_ids if kv_cu is q_cu else ids_of(kv_cu, kv_len, "max_kv_len"))
    return replace(state, cu_seqlens_q=q_cu, cu_seqlens_kv=kv_cu)


def _seed(value: object) -> Any:
    """Return a seed that is safe for NumPy, which calls into array subclasses and follows nested lists forever."""
    if isinstance(value, np.ndarray):
        return np.asarray(value)
    if isinstance(value, (list, tuple)):
        return [integer(each, "seed") for each in value]
    known = (int, np.integer, np.random.SeedSequence, np.random.BitGenerator, np.random.Generator)
    if value is not None and not isinstance(value, (*known, np.random.RandomState)):
        raise TypeError
    return value


def of_chance(batch_size: int, q_len: int, kv_len: int | None, sparsity: float, seed: object) -> State:
    batch_size, q_len = integer(batch_size, "batch_size", 0), integer(q_len, "q_len", 0)
    kv_len = q_len if kv_len is None else integer(kv_len, "kv_len", 0)
    if not isinstance(sparsity, (int, float, np.integer, np.floating)) or isinstance(
        sparsity, np.timedelta64
    ):
        raise TypeError(f"sparsity must be a number, got {describe(sparsity)}")
    if not 0 <= sparsity <= 1:
        raise ValueError(f"sparsity must be from 0 to 1, got {sparsity}")
    try:
        rng = np.random.default_rng(_seed(seed))
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"seed must be accepted by numpy.random.default_rng, got {describe(seed)}"
        ) from None
    mask = allocate((batch_size, 1, q_len, kv_len), bool, "batch_size, q_len and kv_len")
    pairs, live = mask.reshape(-1), 1 - sparsity
    for begin in range(0, pairs.size, _DRAWN):
        part = pairs[begin : begin + _DRAWN]
        np.less(rng.random(part.size, np.float32), live, out=part)
    return State(base=dense(frozen(mask)), extent=mask.shape)


def of_tokens(array: ArrayLike, name: str, layout: str) -> State:
    """Allow all pairs of the tokens on the first two axes."""
    shape = as_array(array, name).shape
    if len(shape) != layout.count(",") + 1:
        raise ValueError(f"{name} must be {layout}, got shape {shape}")
    ids = frozen(allocate(shape[:2], np.int32, name, np.zeros))
    return _of_ids(ids, ids)


def of_blocks(blocks: ArrayLike, block_size: object, q_len: int | None, kv_len: int | None) -> State:
    live = mask_array(blocks, "blocks", ("[B, H, Q blocks, K blocks]",))
    q_size, k_size = block_sizes(block_size)
    queries = _covered(q_len, "q_len", live.shape[2], q_size)
    keys = _covered(kv_len, "kv_len", live.shape[3], k_size)
    return _of_tiles(
        tiles(frozen((live != 0).astype(np.int32)), (q_size, k_size)), (*live.shape[:2], queries, keys)
    )


def _covered(length: int | None, name: str, blocks: int, size: int) -> int:
    """Return how many tokens the blocks cover; the last one may be cut."""
    most = blocks * size
    tokens = most if length is None else integer(length, name, 0)
    if not (blocks - 1) * size < tokens <= most and not tokens == most == 0:
        raise ValueError(
            f"{name} must be from {max((blocks - 1) * size + 1, 0)} to {most}, which {blocks} blocks of {size} cover, "
            f"got {tokens}"
        )
    if tokens > LONGEST:
        raise ValueError(f"{name} must be at most 2**56, got {tokens}")
    return tokens


def _of_tiles(base: Node, shape: Shape) -> State:
    return State(base=base, extent=shape, labels=padding_of(shape, (base,)))


def of_function(f: AnyFunction, q_len: int, kv_len: int, batch: int, heads: int) -> State:
    if not callable(f):
        raise TypeError(f"f must be a function of b, h, q and k, got {describe(f)}")
    queries, keys = integer(q_len, "q_len", 0), integer(kv_len, "kv_len", 0)
    rows, planes = integer(batch, "batch", 0), integer(heads, "heads", 1)
    grid = (-(-queries // TILE), -(-keys // TILE))
    places = allocate((1, 1, *grid), np.int32, "q_len and kv_len", np.zeros)
    known: dict[bytes, int] = {}  # the bits of mixed tiles, each once
    pairs = _SLAB // max(rows * planes, 1)
    columns = min(max(pairs // TILE, TILE) // TILE * TILE, max(grid[1] * TILE, 1))
    height = max(pairs // columns // TILE, 1) * TILE
    b, h, ask = _index(0, rows, 0), _index(0, planes, 1), _asker(f)
    for q in range(0, queries if rows else 0, height):
        for k in range(0, keys, columns):
            slab = (rows, planes, min(height, queries - q), min(columns, keys - k))
            live = _asked(ask, (b, h, _index(q, slab[2], 2), _index(k, slab[3], 3)), slab)
            for axis in range(2):  # until now it made no difference which row or head it was
                if live.shape[axis] > places.shape[axis]:
                    places = places.repeat(slab[axis], axis)
            found = _tiles_of(live, slab[2:], known)
            q_tile, k_tile = q // TILE, k // TILE
            places[:, :, q_tile : q_tile + found.shape[2], k_tile : k_tile + found.shape[3]] = found
    bits = np.frombuffer(b"".join(known), np.uint8).reshape(len(known), TILE, TILE // 8)
    return _of_tiles(tiles(frozen(places), bits=bits), (rows, places.shape[1], queries, keys))


def _index(begin: int, count: int, axis: int) -> NDArray[np.int64]:
    """Return read-only indices of a slab's rows, heads, queries or keys."""
    shape = [1, 1, 1, 1]
    shape[axis] = count
    name = ("batch", "heads", "q_len", "kv_len")[axis]
    return frozen(
        allocate(tuple(shape), np.int64, name, lambda *_: np.arange(begin, begin + count).reshape(shape))
    )


_Index: TypeAlias = tuple[NDArray[np.int64], ...]
# What functions of PyTorch raise that are given arrays. Writing to an array, or asking whether it is true, is none.
_WITHOUT_TENSORS = (TypeError, AttributeError, RuntimeError, Warning)


def _asker(f: AnyFunction) -> Callable[[_Index], object]:
    """Return `f` on index arrays, or on tensors once it has failed without them."""
    takes_tensors = False

    def ask(index: _Index) -> object:
        nonlocal takes_tensors
        if takes_tensors:
            return f(*_tensors(index))
        try:
            return f(*index)
        except Exception as error:
            if "torch" in sys.modules and isinstance(error, _WITHOUT_TENSORS):
                with suppress(Exception):
                    live = f(*_tensors(index))
                    takes_tensors = True
                    return live
            raise _failure(f, error) from error

    return ask


def _tensors(index: _Index) -> list[object]:
    return [sys.modules["torch"].from_numpy(part.copy()) for part in index]


def _failure(f: AnyFunction, error: Exception) -> Exception:
    """Return an error of the same kind that says what `f` was given."""
    name = getattr(f, "__name__", type(f).__name__)
    message = f"{name} failed: {error}; f(b, h, q, k) gets index arrays; write & and |, np.abs"
    try:
        return type(error)(message)
    except Exception:  # errors of this kind are not made of a text
        return RuntimeError(message)


def _asked(ask: Callable[[_Index], object], index: _Index, slab: Shape) -> Array:
    """Return what a function says about a slab, with four axes; axes along which it is constant may have length 1."""
    live = as_array(ask(index), "the result of f")
    if live.dtype.kind not in "biu":
        raise TypeError(f"the result of f must be bools or integers, got {describe(live)}")
    fits = live.ndim <= 4 and all(
        length in (1, size) for length, size in zip(live.shape[::-1], slab[::-1], strict=False)
    )
    if not fits:
        raise ValueError(f"the result of f must broadcast to shape {slab}, got {describe(live)}")
    return live.reshape((1,) * (4 - live.ndim) + live.shape)


def _tiles_of(live: Array, shape: tuple[int, int], known: dict[bytes, int]) -> NDArray[np.int32]:
    """Return 0 for each empty tile, 1 for each full one, and for others 2 plus their index in `known`, which new tiles
    are added to.
    """
    words = _packed(live, shape)
    full = np.bitwise_or.reduce(words ^ _whole(shape), axis=3) == 0
    mixed = np.nonzero((np.bitwise_or.reduce(words, axis=3) != 0) & ~full)
    places: NDArray[np.int32] = full.astype(np.int32)
    bits = words.swapaxes(3, 4)[mixed]
    places[mixed] = [2 + known.setdefault(tile.tobytes(), len(known)) for tile in bits]
    return places


def _packed(live: Array, shape: tuple[int, int]) -> NDArray[np.uint64]:
    """Return [B, H, tile rows, 64, tile columns]: one word per row of a tile. Bits outside of `shape` are 0."""
    rows, columns = (-(-length // TILE) for length in shape)
    whole = rows * TILE, columns * TILE
    if live.dtype != bool or live.shape[2:] != whole:
        pairs = np.zeros((*live.shape[:2], *whole), bool)
        pairs[:, :, : shape[0], : shape[1]] = live
        live = pairs
    words = np.packbits(live, axis=-1, bitorder="little").view(np.uint64)
    return words.reshape(*live.shape[:2], rows, TILE, columns)


def _whole(shape: tuple[int, int]) -> NDArray[np.uint64]:
    """Return full tiles of a shape."""
    rows, columns = (-(-length // TILE) for length in shape)
    row = np.full(columns, -1).astype(np.uint64)
    row[-1] >>= np.uint64(columns * TILE - shape[1])
    inside = np.arange(rows * TILE) < shape[0]
    return np.where(inside[:, None], row, np.uint64(0)).reshape(rows, TILE, columns)
