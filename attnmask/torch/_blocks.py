"""Convert a `MaskInfo` to a BlockMask of FlexAttention, and back."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch.nn.attention.flex_attention import BlockMask

from attnmask._common.arguments import block_sizes, describe
from attnmask._masks import derived, sources, transforms
from attnmask._masks.program import Program
from attnmask._masks.state import State
from attnmask._masks.terms import TILE, ids_of_sequences
from attnmask.torch._import import torch
from attnmask.torch._states import to_tensor

Tensor: TypeAlias = torch.Tensor
PerRow: TypeAlias = int | Tensor


class Pair(NamedTuple):
    """Pairs of a query and a key: their batch rows, heads, queries and keys."""

    b: Tensor
    h: Tensor
    q: Tensor
    k: Tensor


def to_block_mask(state: State, block_size: int | tuple[int, int]) -> BlockMask:
    (batch, heads, queries, keys), program = state.described("make a BlockMask of it")
    q_size, k_size = block_sizes(block_size)
    live = np.stack([[derived.grid(state, b, h, q_size, k_size) for h in range(heads)] for b in range(batch)])
    full = live == q_size * k_size
    blocks: list[Tensor] = []
    for kind in ((live > 0) & ~full, full):
        counts = torch.from_numpy(kind.sum(-1, dtype=np.int32))
        blocks += counts, torch.from_numpy(np.argsort(~kind, axis=-1, kind="stable").astype(np.int32))
    count, index, full_count, full_index = blocks
    return BlockMask.from_kv_blocks(
        count,
        index,
        full_count,
        full_index,
        BLOCK_SIZE=(q_size, k_size),
        mask_mod=_mask_mod(program),
        seq_lengths=(queries, keys),
    )


def _at(array: Tensor, *places: Tensor) -> Tensor:
    """Return an entry; axes of length 1 are shared. FlexAttention may ask beyond the end and ignore the answer."""
    return array[
        tuple(0 if size == 1 else place % size for size, place in zip(array.shape, places, strict=True))
    ]


def _of(value: PerRow, place: Tensor) -> PerRow:
    """Select one batch row or head."""
    return value if isinstance(value, int) else value[place]


def _ids_at(ids: Tensor, at: Pair, token: Tensor) -> Tensor:
    return _at(ids, at.b, token) if ids.ndim == 2 else _at(ids, at.b, at.h, token)


def _shifted(at: Pair, q_shift: PerRow, k_shift: PerRow) -> tuple[Tensor, Tensor]:
    return at.q + _of(q_shift, at.b), at.k + _of(k_shift, at.b)


def _floor(place: Tensor, size: int) -> Tensor:
    return torch.div(place, size, rounding_mode="floor")


def _all(at: Pair) -> Tensor:
    return at.q >= 0


def _band(at: Pair, low: PerRow | None, high: PerRow | None, offset: PerRow) -> Tensor:
    place = at.k - at.q - _of(offset, at.b)
    least, most = -(2**62) if low is None else low, 2**62 if high is None else high
    return (place >= _of(least, at.h)) & (place <= _of(most, at.h))


def _diagonal(at: Pair, low: PerRow | None, high: PerRow | None, offset: PerRow, places: Tensor) -> Tensor:
    return _band(at._replace(q=_ids_at(places, at, at.q)), low, high, offset)


def _chunk(at: Pair, size: int, *shifts: PerRow) -> Tensor:
    q, k = _shifted(at, *shifts)
    return _floor(q, size) == _floor(k, size)


def _keys(at: Pair, begin: PerRow, end: PerRow) -> Tensor:
    return (at.k >= _of(begin, at.b)) & (at.k < _of(end, at.b))


def _equal(at: Pair, q_ids: Tensor, k_ids: Tensor, exclude_zero: bool) -> Tensor:
    one = _ids_at(q_ids, at, at.q)
    return (one == _ids_at(k_ids, at, at.k)) & (one >= 0) & ((one != 0) | (not exclude_zero))


def _dense(at: Pair, array: Tensor, *shifts: PerRow) -> Tensor:
    return _at(array, at.b, at.h, *_shifted(at, *shifts)) != 0


def _tiles(at: Pair, places: Tensor, q_size: int, k_size: int, bits: Tensor, *shifts: PerRow) -> Tensor:
    q, k = _shifted(at, *shifts)
    place = _at(places, at.b, at.h, _floor(q, q_size), _floor(k, k_size))
    if not len(bits):
        return place == 1
    byte = bits[torch.clamp(place - 2, min=0), q % TILE, k % TILE // 8]
    return (place == 1) | ((place > 1) & ((byte >> (k % 8)) & 1 == 1))


def _neighborhood(at: Pair, grid: list[list[int]], *shifts: PerRow) -> Tensor:
    """Ask each axis of the grid, from the last one on."""
    rest_q, rest_k = _shifted(at, *shifts)
    near = at.q >= 0
    for length, kernel, stride, dilation, causal in reversed(grid):
        q, k = rest_q % length, rest_k % length
        rest_q, rest_k = _floor(rest_q, length), _floor(rest_k, length)
        place, key, phase = _floor(q, dilation), _floor(k, dilation), q % dilation
        places = _floor(length - phase + dilation - 1, dilation)
        leader = _floor(place, stride) * stride + (stride - 1 if causal else stride // 2)
        leader = torch.minimum(leader, places - 1)
        begin = torch.clamp(leader - kernel + 1 if causal else leader - kernel // 2, min=0)
        if not causal:
            begin = torch.minimum(begin, places - kernel)
        near = near & (k % dilation == phase) & (key >= begin) & (key < begin + kernel)
        if causal:
            near = near & (key <= place)
    return near


_TERMS = {
    "all": _all,
    "band": _band,
    "diagonal": _diagonal,
    "chunk": _chunk,
    "keys": _keys,
    "equal": _equal,
    "dense": _dense,
    "tiles": _tiles,
    "neighborhood": _neighborhood,
}


def _mask_mod(program: Program) -> Callable[..., Tensor]:
    """Return the program as a function of batch row, head, query and key."""

    def held(operand: Any) -> Any:
        return to_tensor(operand.copy()) if isinstance(operand, np.ndarray) else operand

    def known(node: Any) -> Any:
        """Return sequences as ids, and a grid as a list, so that the graph knows the numbers."""
        if node[0] == "sequences":
            return ("equal", *ids_of_sequences(*node[1:3]), False)
        return (node[0], node[1].tolist(), *node[2:]) if node[0] == "neighborhood" else node

    nodes = map(known, program)
    terms = [node if isinstance(node, str) else (_TERMS[node[0]], *map(held, node[1:])) for node in nodes]

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        waiting: list[Tensor] = []
        for term in terms:
            if not isinstance(term, str):
                waiting.append(term[0](Pair(b, h, q, k), *term[1:]))
            elif term == "not":
                waiting.append(~waiting.pop())
            else:
                right, left = waiting.pop(), waiting.pop()
                waiting.append(left & right if term == "and" else left | right)
        return waiting[0]

    return mask_mod


def from_block_mask(block_mask: object) -> State:
    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask must be a BlockMask, got {describe(block_mask)}")
    (queries, keys), (q_size, k_size) = block_mask.seq_lengths, block_mask.BLOCK_SIZE

    def blocks(counts: Tensor, indices: Tensor | None) -> State:
        """Return the listed blocks."""
        assert indices is not None
        listed = torch.arange(indices.shape[-1]) < counts[..., None]
        columns = -(-keys // k_size)
        live = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool)
        # The last column takes the entries that are not listed.
        live.scatter_(-1, torch.where(listed, indices, columns).long(), True)
        return sources.of_blocks(live[..., :-1].numpy(), (q_size, k_size), queries, keys)

    mask_mod = block_mask.mask_mod
    for axis in (3, 2, 1, 0):
        mask_mod = torch.vmap(mask_mod, tuple(0 if i == axis else None for i in range(4)))

    def live(*index: NDArray[np.intp]) -> Tensor:
        return mask_mod(*(torch.from_numpy(part.ravel().copy()) for part in index))

    batch, heads = block_mask.kv_num_blocks.shape[:2]
    mask = sources.of_function(live, queries, keys, batch, heads)
    mask = transforms.joined(mask, blocks(block_mask.kv_num_blocks, block_mask.kv_indices), "and")
    if block_mask.full_kv_num_blocks is None:
        return mask
    full = blocks(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    return transforms.joined(mask, full, "or")
