"""Masks of every kind, one of each or random ones, most of them with queries and keys behind the last live pair."""

from collections.abc import Callable

import numpy as np

from attnmask import MaskInfo

Shape = tuple[int, int, int, int]  # batch rows, heads, queries, keys
Rng = np.random.Generator
LENGTHS = (1, 5, 12, 13, 16, 17, 20, 33, 63, 64, 65, 72, 79, 100, 127, 128, 129, 200, 257)


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


def points(rng: Rng, shape: Shape) -> np.ndarray:
    """A few pairs."""
    array = np.zeros((*planes(rng, shape), *shape[2:]), bool)
    flat = array.reshape(-1)
    flat[rng.integers(flat.size, size=rng.integers(1, 9))] = True
    return array


def band(rng: Rng, shape: Shape) -> np.ndarray:
    """Of each plane the pairs near a diagonal."""
    low = rng.integers(-80, 40, (*planes(rng, shape), 1, 1))
    distance = np.arange(shape[3]) - np.arange(shape[2])[:, None]
    return (low <= distance) & (distance <= low + rng.integers(0, 80))


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


def from_runs(rng: Rng, shape: Shape, by_head: bool = False) -> MaskInfo:
    """Segments of a few runs each, so that one begins before another ends."""
    lead, size = shape[: 2 if by_head else 1], int(rng.choice([2, 4, 8, 30]))
    most = -(-max(shape[2:]) // size)
    ids = rng.integers(-1, rng.choice([1, 2, 3]), (*lead, most)).repeat(size, axis=-1)
    return MaskInfo.from_segments(ids[..., : shape[2]], ids[..., : shape[3]])


def packed(rng: Rng, shape: Shape) -> MaskInfo:
    """Sequences laid end to end in one row, some of no tokens; of several rows, their ids in runs."""
    if shape[0] > 1:
        return from_ids(rng, shape, disorder=False)
    count = int(rng.integers(1, 5))
    ends = [np.sort(rng.integers(0, tokens + 1, count - 1)) for tokens in shape[2:]]
    starts = [[0, *own.tolist(), tokens] for own, tokens in zip(ends, shape[2:], strict=True)]
    return MaskInfo.from_cu_seqlens(starts[0], cu_seqlens_kv=starts[1], packed=True)


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


def grid_of(rng: Rng, points: int) -> dict[str, list]:
    """A grid of at least so many points, and a neighborhood in it."""
    axes, last = int(rng.integers(1, 4)), int(rng.choice([1, 2, 7, 13, 32, 56, 64, 70, 150]))
    shape = [int(rng.integers(1, 6)) for _ in range(axes - 1)] + [last]
    shape[0] = max(shape[0], -(-points // max(int(np.prod(shape[1:])), 1)), 1)
    sides: dict[str, list] = {"kernel": [], "stride": [], "dilation": [], "causal": []}
    for length in shape:
        causal, dilation = bool(rng.random() < 0.3), int(rng.choice([1, 1, 2, 3]))
        dilation = min(dilation, length)
        kernel = int(rng.integers(1, min(length // dilation, int(rng.choice([3, 9, 100]))) + 1))
        kernel -= kernel % 2 == 0 and not causal
        numbers = (kernel, int(rng.integers(1, kernel + 1)), dilation, causal)
        for side, number in zip(sides.values(), numbers, strict=True):
            side.append(number)
    return {"shape": shape} | sides


def neighborhood(rng: Rng, shape: Shape) -> MaskInfo:
    """Some queries and keys of a grid."""
    starts = [int(rng.choice([0, 0, 5])) for _ in range(2)]
    ends = [start + tokens for start, tokens in zip(starts, shape[2:], strict=True)]
    info = MaskInfo.neighborhood(**grid_of(rng, max(ends)), batch=shape[0])
    return info[..., starts[0] : ends[0], starts[1] : ends[1]]


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
    "neighborhood": neighborhood,
    "packed": packed,
    "points": lambda rng, shape: from_array(points(rng, shape), shape),
    "bands": lambda rng, shape: from_array(band(rng, shape), shape),
    "runs that return": from_runs,
    "runs of heads": lambda rng, shape: from_runs(rng, shape, by_head=True),
    "causal within segments": lambda rng, shape: from_runs(rng, shape).apply_causal(
        any_of(rng, (0, 3, "bottom-right")), within_segments=True
    ),
    "windows within segments": lambda rng, shape: from_runs(rng, shape).apply_sliding_window(
        window(rng), within_segments=True
    ),
    "windows of heads within segments": lambda rng, shape: from_runs(rng, shape, by_head=True).apply_sliding_window(
        windows_of_heads(rng, shape), within_segments=True
    ),
    "chunks within segments": lambda rng, shape: from_runs(rng, shape).apply_chunked(
        int(rng.choice([3, 16, 70])), rng.integers(-3, 4, shape[0]), within_segments=True
    ),
}  # fmt: skip


def any_of(rng: Rng, options: tuple):
    return options[rng.integers(len(options))]


def window(rng: Rng) -> tuple[int | None, int | None]:
    most = rng.choice([3, 20, 80])
    left, right = (None if rng.random() < 0.1 else int(rng.integers(0, most)) for _ in range(2))
    return left, right


def windows_of_heads(rng: Rng, shape: Shape):
    left, right = (rng.integers(0, 60, shape[1]) for _ in range(2))
    return any_of(rng, (left, (left, right), (left, 5), (None, right)))


def types_of(rng: Rng, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Of queries and keys: token by token, or in runs."""
    size = int(rng.choice([1, 8, 30]))
    types = rng.integers(-1, 3, (shape[0], -(-max(shape[2:]) // size))).repeat(size, axis=-1)
    return types[:, : shape[2]], types[:, : shape[3]]


def any_mask(rng: Rng, shape: Shape) -> MaskInfo:
    return KINDS[str(rng.choice(list(KINDS)))](rng, shape)


TERMS: dict[str, Callable[[Rng, MaskInfo, Shape], MaskInfo]] = {
    "causal": lambda rng, mask, shape: mask.apply_causal(rng.integers(-30, 30, shape[0])),
    "window": lambda rng, mask, shape: mask.apply_sliding_window(window(rng)),
    "windows of heads": lambda rng, mask, shape: mask.apply_sliding_window(windows_of_heads(rng, shape)),
    "chunks": lambda rng, mask, shape: mask.apply_chunked(int(rng.choice([3, 7, 16, 64, 100]))),
    "prefix": lambda rng, mask, shape: mask.apply_prefix(rng.integers(0, 50, shape[0])),
    "token types": lambda rng, mask, shape: mask.apply_token_type_ids(
        types_of(rng, shape), combine=any_of(rng, ("union", "intersect"))
    ),
    "key lengths": lambda rng, mask, shape: mask.apply_kv_lengths(rng.integers(0, shape[3] + 1, shape[0])),
    "and": lambda rng, mask, shape: mask & any_mask(rng, shape),
    "or": lambda rng, mask, shape: mask | any_mask(rng, shape),
    "not": lambda rng, mask, shape: ~mask,
}  # fmt: skip


def every_mask(queries: int, keys: int, batch: int = 2, heads: int = 4) -> dict[str, MaskInfo]:
    """A mask of every kind and one with every term; of some rows and heads, or of one that all share."""
    rng, shape = np.random.default_rng(queries + keys), (batch, heads, queries, keys)
    masks = {kind: make(rng, shape) for kind, make in KINDS.items()}
    segments, one_row = masks["runs of ids"], packed(rng, (1, *shape[1:]))
    masks |= {term: apply(rng, segments, shape) for term, apply in TERMS.items()}
    long = from_ids(rng, (batch, heads, queries + 60, keys + 60), disorder=False)
    return masks | {
        "floats": MaskInfo(np.maximum(pairs(rng, shape), np.eye(queries, keys))),
        "packed in one row": one_row,
        "within packed": one_row.apply_causal("bottom-right", within_segments=True),
        "positions": segments.replace(q_positions=np.arange(batch * queries).reshape(batch, queries)),
        "slice": long.apply_chunked(40).apply_sliding_window((40, 3))[..., 9 : 9 + queries, 33 : 33 + keys],
        "slice of a function": from_function(rng, (batch, heads, queries + 63, keys + 9))[..., 63:, 9:],
        "step": long.apply_causal(0).apply_kv_lengths(queries + 9 + np.arange(batch), q_len=queries)[
            ..., :keys
        ],
    }


def with_terms(rng: Rng, mask: MaskInfo, shape: Shape) -> MaskInfo:
    """With up to three more terms."""
    for _ in range(int(rng.choice([0, 1, 1, 2, 3]))):
        mask = TERMS[str(rng.choice(list(TERMS)))](rng, mask, shape)
    return mask


def expression(rng: Rng, shape: Shape, depth: int = 2) -> MaskInfo:
    """Any mask with any terms; or a part of a larger one, or two of them joined."""
    batch, heads, queries, keys = shape
    kind = rng.random()
    if depth == 0 or kind < 0.6:
        return with_terms(rng, any_mask(rng, shape), shape)
    if kind < 0.8:
        one, other = (expression(rng, shape, depth - 1) for _ in range(2))
        return one & other if kind < 0.7 else one | other
    q, k = (int(rng.integers(0, 100)) for _ in range(2))
    larger = expression(rng, (batch, heads, queries + q, keys + k), depth - 1)
    if kind < 0.85:
        lengths = rng.integers(0, keys + 1, batch)
        return larger.apply_kv_lengths(lengths, q_len=queries)[..., :keys]
    return larger[..., q:, k:]


def ends(mask: MaskInfo, row: int) -> tuple[int, int]:
    """One more than the last query of a batch row that sees a key, and than the last key that is seen; (0, 0) if there
    is no live pair."""
    live = np.asarray(mask.attention_mask)[row].any(axis=0)
    return tuple(int(np.flatnonzero(live.any(axis=side)).max(initial=-1)) + 1 for side in (1, 0))
