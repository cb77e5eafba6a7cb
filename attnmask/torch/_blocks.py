"""Convert a `MaskInfo` to a BlockMask of FlexAttention, and back."""

from collections.abc import Callable
from typing import Any, TypeAlias

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

Place: TypeAlias = torch.Tensor  # of batch rows, heads, queries or keys
PerRow: TypeAlias = int | torch.Tensor


def to_block_mask(state: State, block_size: int | tuple[int, int]) -> BlockMask:
    (batch, heads, queries, keys), program = state.described("make a BlockMask of it")
    q_size, k_size = block_sizes(block_size)
    live = np.stack([[derived.grid(state, b, h, q_size, k_size) for h in range(heads)] for b in range(batch)])
    full = live == q_size * k_size
    blocks: list[torch.Tensor] = []
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


def _at(array: torch.Tensor, *places: Place) -> torch.Tensor:
    """Return an entry; axes of length 1 are shared. FlexAttention may ask beyond the end and ignore the answer."""
    return array[
        tuple(0 if size == 1 else place % size for size, place in zip(array.shape, places, strict=True))
    ]


def _of(value: PerRow, place: Place) -> PerRow:
    """Select one batch row or head."""
    return value if isinstance(value, int) else value[place]


def _ids_at(ids: torch.Tensor, b: Place, h: Place, token: Place) -> torch.Tensor:
    return _at(ids, b, token) if ids.ndim == 2 else _at(ids, b, h, token)


def _all(b: Place, h: Place, q: Place, k: Place) -> torch.Tensor:
    return q >= 0


def _band(
    b: Place, h: Place, q: Place, k: Place, low: PerRow | None, high: PerRow | None, offset: PerRow
) -> torch.Tensor:
    place = k - q - _of(offset, b)
    least, most = -(2**62) if low is None else low, 2**62 if high is None else high
    return (place >= _of(least, h)) & (place <= _of(most, h))


def _diagonal(
    b: Place,
    h: Place,
    q: Place,
    k: Place,
    low: PerRow | None,
    high: PerRow | None,
    offset: PerRow,
    at: torch.Tensor,
) -> torch.Tensor:
    return _band(b, h, _ids_at(at, b, h, q), k, low, high, offset)


def _chunk(
    b: Place, h: Place, q: Place, k: Place, size: int, q_shift: PerRow, k_shift: PerRow
) -> torch.Tensor:
    chunks = ((q + _of(q_shift, b)), (k + _of(k_shift, b)))
    one, other = (torch.div(place, size, rounding_mode="floor") for place in chunks)
    return one == other


def _keys(b: Place, h: Place, q: Place, k: Place, begin: PerRow, end: PerRow) -> torch.Tensor:
    return (k >= _of(begin, b)) & (k < _of(end, b))


def _equal(
    b: Place, h: Place, q: Place, k: Place, q_ids: torch.Tensor, k_ids: torch.Tensor, exclude_zero: bool
) -> torch.Tensor:
    one = _ids_at(q_ids, b, h, q)
    return (one == _ids_at(k_ids, b, h, k)) & (one >= 0) & ((one != 0) | (not exclude_zero))


def _dense(
    b: Place, h: Place, q: Place, k: Place, array: torch.Tensor, q_shift: PerRow, k_shift: PerRow
) -> torch.Tensor:
    return _at(array, b, h, q + _of(q_shift, b), k + _of(k_shift, b)) != 0


def _tiles(
    b: Place,
    h: Place,
    q: Place,
    k: Place,
    places: torch.Tensor,
    q_size: int,
    k_size: int,
    bits: torch.Tensor,
    q_shift: PerRow,
    k_shift: PerRow,
) -> torch.Tensor:
    q, k = q + _of(q_shift, b), k + _of(k_shift, b)
    tile = [torch.div(place, size, rounding_mode="floor") for place, size in ((q, q_size), (k, k_size))]
    place = _at(places, b, h, *tile)
    if not len(bits):
        return place == 1
    byte = bits[torch.clamp(place - 2, min=0), q % TILE, k % TILE // 8]
    return (place == 1) | ((place > 1) & ((byte >> (k % 8)) & 1 == 1))


_TERMS = {
    "all": _all,
    "band": _band,
    "diagonal": _diagonal,
    "chunk": _chunk,
    "keys": _keys,
    "equal": _equal,
    "dense": _dense,
    "tiles": _tiles,
}


def _mask_mod(program: Program) -> Callable[..., torch.Tensor]:
    """Return the program as a function of batch row, head, query and key."""

    def held(operand: Any) -> Any:
        return to_tensor(operand.copy()) if isinstance(operand, np.ndarray) else operand

    nodes = [
        ("equal", *ids_of_sequences(*node[1:3]), False) if node[0] == "sequences" else node
        for node in program
    ]
    terms = [node if isinstance(node, str) else (_TERMS[node[0]], *map(held, node[1:])) for node in nodes]

    def mask_mod(b: Place, h: Place, q: Place, k: Place) -> torch.Tensor:
        waiting: list[torch.Tensor] = []
        for term in terms:
            if not isinstance(term, str):
                waiting.append(term[0](b, h, q, k, *term[1:]))
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

    def blocks(counts: torch.Tensor, indices: torch.Tensor | None) -> State:
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

    def live(*index: NDArray[np.intp]) -> torch.Tensor:
        return mask_mod(*(torch.from_numpy(part.ravel().copy()) for part in index))

    batch, heads = block_mask.kv_num_blocks.shape[:2]
    mask = sources.of_function(live, queries, keys, batch, heads)
    mask = transforms.joined(mask, blocks(block_mask.kv_num_blocks, block_mask.kv_indices), "and")
    if block_mask.full_kv_num_blocks is None:
        return mask
    full = blocks(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    return transforms.joined(mask, full, "or")
