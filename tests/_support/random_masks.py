"""Random masks of every kind, most of them with queries and keys behind the last live pair."""

from collections.abc import Callable

import numpy as np

from attnmask import MaskInfo

Shape = tuple[int, int, int, int]  # batch rows, heads, queries, keys
Rng = np.random.Generator
LENGTHS = (1, 5, 12, 13, 16, 17, 20, 33, 63, 64, 65, 100, 127, 128, 129, 200, 257)


def planes(rng: Rng, shape: Shape) -> tuple[int, int]:
    """How many batch rows and heads an array has: all, or one that they share."""
    return int(rng.choice([1, shape[0]])), int(rng.choice([1, shape[1]]))


def rectangles(rng: Rng, shape: Shape) -> np.ndarray:
    """Of each plane some first queries and keys."""
    array = np.zeros((*planes(rng, shape), *shape[2:]), bool)
    for plane in array.reshape(-1, *shape[2:]):
        plane[: rng.integers(shape[2] + 1), : rng.integers(shape[3] + 1)] = True
    return array


def pairs(rng: Rng, shape: Shape) -> np.ndarray:
    return rng.random((*planes(rng, shape), *shape[2:])) < rng.choice([0.02, 0.3, 0.9])


def from_array(array: np.ndarray, shape: Shape) -> MaskInfo:
    return MaskInfo.from_attention_mask(np.broadcast_to(array, (shape[0], *array.shape[1:])))


def from_ids(rng: Rng, shape: Shape, disorder: bool, by_head: bool = False) -> MaskInfo:
    sides = []
    for tokens in shape[2:]:
        ids = rng.integers(0, rng.choice([1, 2, 3, 20]), (*shape[: 2 if by_head else 1], tokens))
        ids = ids if disorder else np.sort(ids)
        ids[rng.random(ids.shape) < 0.1] = -1
        ids[..., rng.integers(tokens + 1) :] = -1
        sides.append(ids)
    return MaskInfo.from_segments(*sides)


def from_function(rng: Rng, shape: Shape) -> MaskInfo:
    array = pairs(rng, shape) & rectangles(rng, shape)
    batch, heads = array.shape[:2]
    return MaskInfo.from_function(
        lambda b, h, q, k: array[np.minimum(b, batch - 1), np.minimum(h, heads - 1), q, k],
        *shape[2:],
        batch=shape[0],
        heads=heads,
    )


def from_blocks(rng: Rng, shape: Shape) -> MaskInfo:
    size = tuple(rng.choice([16, 32, 64, 128], 2).tolist())
    counts = [-(-length // side) for length, side in zip(shape[2:], size, strict=True)]
    blocks = rng.random((shape[0], int(rng.choice([1, shape[1]])), *counts)) < 0.5
    return MaskInfo.from_blocks(blocks, size, q_len=shape[2], kv_len=shape[3])


def full(shape: Shape) -> MaskInfo:
    return MaskInfo.full(*shape[2:], shape[0])


def from_lengths(rng: Rng, shape: Shape) -> MaskInfo:
    tokens = max(shape[2:])
    return MaskInfo.from_lengths(rng.integers(0, tokens + 1, shape[0]), tokens)[..., : shape[2], : shape[3]]


KINDS: dict[str, Callable[[Rng, Shape], MaskInfo]] = {
    "pairs": lambda rng, shape: from_array(pairs(rng, shape), shape),
    "padded pairs": lambda rng, shape: from_array(pairs(rng, shape) & rectangles(rng, shape), shape),
    "rectangles": lambda rng, shape: from_array(rectangles(rng, shape), shape),
    "padded triangles": lambda rng, shape: from_array(np.tri(*shape[2:], dtype=bool) & rectangles(rng, shape), shape),
    "keys": lambda rng, shape: full(shape).apply_kv_lengths(rng.integers(0, shape[3] + 1, shape[0])),
    "lengths": from_lengths,
    "lengths, causal": lambda rng, shape: from_lengths(rng, shape).apply_causal(rng.integers(-3, 4)),
    "all": lambda rng, shape: full(shape),
    "runs of ids": lambda rng, shape: from_ids(rng, shape, disorder=False),
    "ids in disorder": lambda rng, shape: from_ids(rng, shape, disorder=True),
    "ids of heads": lambda rng, shape: from_ids(rng, shape, disorder=True, by_head=True),
    "function": from_function,
    "blocks": from_blocks,
}  # fmt: skip


def with_terms(rng: Rng, mask: MaskInfo, shape: Shape) -> MaskInfo:
    """With up to three more terms."""
    for _ in range(int(rng.choice([0, 1, 1, 2, 3]))):
        term, other = int(rng.integers(7)), KINDS[str(rng.choice(list(KINDS)))](rng, shape)
        if term == 0:
            mask = mask.apply_causal(rng.integers(-30, 30, shape[0]))
        elif term == 1:
            mask = mask.apply_sliding_window(tuple(rng.integers(0, 80, 2).tolist()))
        elif term == 2:
            mask = mask.apply_sliding_window(rng.integers(0, 60, shape[1]))
        elif term == 3:
            mask = mask.apply_chunked(int(rng.choice([7, 16, 64, 100])))
        elif term == 4:
            mask = mask.apply_prefix(rng.integers(0, 50, shape[0]))
        else:
            mask = mask & other if term == 5 else mask | other
    return mask


def ends(mask: MaskInfo, row: int) -> tuple[int, int]:
    """One more than the last query of a batch row that sees a key, and than the last key that is seen; (0, 0) if there
    is no live pair."""
    live = np.asarray(mask.attention_mask)[row].any(axis=0)
    return tuple(int(np.flatnonzero(live.any(axis=side)).max(initial=-1)) + 1 for side in (1, 0))
