"""`MaskInfo` in NumPy: a mask is an array of all of its pairs, and every operation computes a new one.

Loops run over batch rows. The tests compare `attnmask.MaskInfo` with this class, and a reader who wonders what an
operation does finds the answer here.
"""

from collections.abc import Iterator

import numpy as np
from reference_masks import cells as cells
from reference_masks import number_rows, numbers_of_tokens
from reference_masks import positions_from_segment_ids as places
from reference_masks import segment_ids_to_mask as equal_ids

LAST = np.iinfo(np.int32).max  # the position of padding among keys


def per_row(value, batch: int) -> np.ndarray:
    return np.broadcast_to(np.asarray(value, np.int64), (batch,))


def both_per_head(q_ids: np.ndarray, kv_ids: np.ndarray) -> list[np.ndarray]:
    """Both with the same axes before that of tokens, among them one of heads if either has it."""
    if q_ids.ndim != kv_ids.ndim:
        q_ids, kv_ids = (ids if ids.ndim == 3 else ids[:, None] for ids in (q_ids, kv_ids))
    rows = np.broadcast_shapes(q_ids.shape[:-1], kv_ids.shape[:-1])
    return [np.broadcast_to(ids, (*rows, ids.shape[-1])) for ids in (q_ids, kv_ids)]


def distances(q_ids: np.ndarray, kv_ids: np.ndarray, last: bool) -> np.ndarray:
    """[B, H, Q, K]: how far each key is behind a query of the same segment, counted on both sides from its first token,
    or from its last one.
    """
    q_ids, kv_ids = (ids if ids.ndim == 3 else ids[:, None] for ids in both_per_head(q_ids, kv_ids))
    result = np.zeros((*q_ids.shape, kv_ids.shape[-1]), np.int64)
    for b, h, q, k in np.argwhere(equal_ids(q_ids, kv_ids)):
        q_origin, k_origin = (
            np.flatnonzero(ids[b, h] == q_ids[b, h, q])[-1 if last else 0] for ids in (q_ids, kv_ids)
        )
        result[b, h, q, k] = (k - k_origin) - (q - q_origin)
    return result


def labels_of(live: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """0 for tokens that have a live pair, and -1 for others."""
    return live.any(axis=(1, 3)).astype(np.int32) - 1, live.any(axis=(1, 2)).astype(np.int32) - 1


class Pairs:
    """A mask, and the arrays that belong to it."""

    def __init__(self, live, q_ids=None, kv_ids=None, q_positions=None, kv_positions=None):
        self.live = live
        self.q_ids, self.kv_ids = q_ids, kv_ids
        self.q_positions, self.kv_positions = q_positions, kv_positions
        self.baked: set[str] = set()
        self.held = True  # else ids are known without any that are held

    @classmethod
    def of_lengths(cls, q_lengths, kv_lengths, queries: int, keys: int) -> "Pairs":
        """Rows of so many tokens, and padding behind them."""
        sides = (q_lengths, queries), (kv_lengths, keys)
        ids = [
            np.where(np.arange(n) < np.reshape(each, (-1, 1)), 0, -1).astype(np.int32) for each, n in sides
        ]
        pairs = cls.of_ids(*ids)
        pairs.held = False
        return pairs

    @classmethod
    def of_ids(cls, q_ids, kv_ids) -> "Pairs":
        return cls(equal_ids(q_ids, kv_ids), q_ids, kv_ids)

    @classmethod
    def of_mask(cls, live) -> "Pairs":
        return cls(live, *labels_of(live))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.live.shape

    def grid(self) -> tuple[np.ndarray, np.ndarray]:
        return np.arange(self.shape[2])[:, None], np.arange(self.shape[3])[None, :]

    def keep(self, condition, flag: str | None = None) -> None:
        self.live = self.live & condition
        self.baked |= {flag} - {None}

    # Operations

    def distance(self, offset, within: bool) -> np.ndarray:
        """[B, H, Q, K]: how far keys are behind the diagonal."""
        q, k = self.grid()
        last = isinstance(offset, str)  # "bottom-right"
        distance = distances(self.q_ids, self.kv_ids, last) if within else k - q - last * (len(k[0]) - len(q))
        return distance - per_row(0 if last else offset, self.shape[0])[:, None, None, None]

    def causal(self, offset=0, within=False) -> None:
        self.keep(self.distance(offset, within) <= 0, "causal")
        if within:
            self.keep(equal_ids(self.q_ids, self.kv_ids))

    def window(self, left, right, offset=0, within=False) -> None:
        distance = self.distance(offset, within)
        inside = equal_ids(self.q_ids, self.kv_ids) if within else np.ones(distance.shape, bool)
        if left is not None:
            inside = inside & (distance >= -np.reshape(left, (-1, 1, 1)))  # of all heads, or of each
        if right is not None:
            inside = inside & (distance <= np.reshape(right, (-1, 1, 1)))
        self.keep(inside, "sliding_window")

    def decode(self, left, right, offset, index, within=False) -> None:
        batch, _, queries, keys = self.shape
        self.window(left, right, offset, within)
        width = keys if None in (left, right) else min(left + right + 1, keys)
        q_start = np.clip(per_row(index, batch), 0, queries - 1)
        k_start = np.clip(q_start - (keys + queries if left is None else left), 0, keys - width)
        self.cut(q_start, 1, k_start, width)

    def prefill(self, left, right, offset, width, within=False) -> None:
        batch, _, queries, keys = self.shape
        self.window(left, right, offset, within)
        width = keys if width is None else min(width, keys)
        self.cut(per_row(0, batch), queries, per_row(keys - width, batch), width)

    def kv_lengths(self, lengths, q_len=None, width=None) -> None:
        batch, _, queries, keys = self.shape
        lengths = per_row(lengths, batch)
        self.keep(np.arange(keys) < lengths[:, None, None, None])
        q_len = queries if q_len is None else q_len
        width = keys if width is None else min(width, keys)
        q_start, k_start = (
            np.clip(lengths - q_len, 0, queries - q_len),
            np.clip(lengths - width, 0, keys - width),
        )
        self.cut(q_start, q_len, k_start, width)

    def cut(self, q_start, q_len: int, k_start, kv_len: int) -> None:
        def taken(array, starts, length):
            if array is None:
                return None
            rows = [row[..., start : start + length] for row, start in zip(array, starts, strict=True)]
            return np.stack(rows) if rows else array[..., :length]

        live = taken(self.live, k_start, kv_len)
        self.live = np.swapaxes(taken(np.swapaxes(live, 2, 3), q_start, q_len), 2, 3)
        self.q_ids, self.kv_ids = taken(self.q_ids, q_start, q_len), taken(self.kv_ids, k_start, kv_len)
        self.q_positions = taken(self.q_positions, q_start, q_len)
        self.kv_positions = taken(self.kv_positions, k_start, kv_len)

    def chunked(self, size: int, offset=0) -> None:
        q, k = self.grid()
        if self.q_ids is None:
            self.q_ids, self.kv_ids = labels_of(self.live)
        self.held = True
        q = q + per_row(offset, self.shape[0])[:, None, None, None]  # [B, 1, Q, 1]
        self.keep((q // size == k // size) & (k <= q), "chunked")
        number = np.maximum(q[:, 0, :, 0] // size + 1, 0)
        number[number == 0] = -1
        number = number if self.q_ids.ndim == 2 else number[:, None]
        self.q_ids = np.where(self.q_ids < 0, -1, number).astype(np.int32)
        self.kv_ids = np.where(self.kv_ids < 0, -1, k[0] // size + 1).astype(np.int32)

    def chunked_within_segments(self, size: int, offset=0) -> None:
        upto, self.held = self.distance(offset, True) <= 0, True
        sides = both_per_head(self.q_ids, self.kv_ids)
        offsets, numbers = per_row(offset, self.shape[0]), [np.full(ids.shape, -1, np.int32) for ids in sides]
        for row in np.ndindex(sides[0].shape[:-1]):
            ids = (side[row].tolist() for side in sides)
            *_, numbers[0][row], numbers[1][row] = numbers_of_tokens(*ids, size, int(offsets[row[0]]))
        self.q_ids, self.kv_ids = numbers
        self.keep(equal_ids(self.q_ids, self.kv_ids) & upto, "chunked")

    def token_types(self, q_types, kv_types, combine: str, zero_policy: str, update: bool | None) -> None:
        q, k = q_types[:, None, :, None], kv_types[:, None, None, :]
        alike = (q == k) & (q >= 0)
        if zero_policy in ("q", "both"):
            alike = alike & (q != 0)
        if zero_policy in ("kv", "both"):
            alike = alike & (k != 0)
        self.live = {"union": self.live | alike, "intersect": self.live & alike, "replace": alike}[combine]
        self.baked |= {"token_type_ids"}
        self.held |= combine == "replace"
        if update or (update is None and combine != "union"):
            self.held = True
            self.q_ids, self.kv_ids = (
                np.where(q_types == 0, -1, q_types),
                np.where(kv_types == 0, -1, kv_types),
            )

    def prefix(self, lengths) -> None:
        q_ids, kv_ids = labels_of(self.live) if self.q_ids is None else (self.q_ids, self.kv_ids)
        first = kv_ids.copy()
        for row in np.ndindex(kv_ids.shape[:-1]):
            for t, segment in enumerate(kv_ids[row]):
                before = (kv_ids[row][:t] == segment).sum()
                if before >= per_row(lengths, self.shape[0])[row[0]]:
                    first[row][t] = -1
        self.live = self.live | equal_ids(q_ids, first)

    def sliced(self, rows: slice, heads: slice, queries: slice, keys: slice) -> None:
        def taken(array, tokens):
            if array is None:
                return None
            lead = (rows,) if array.ndim == 2 else (rows, heads if array.shape[1] != 1 else slice(None))
            return array[(*lead, tokens)]

        self.live = self.live[rows, heads if self.shape[1] != 1 else slice(None), queries, keys]
        self.q_ids, self.kv_ids = taken(self.q_ids, queries), taken(self.kv_ids, keys)
        self.q_positions, self.kv_positions = taken(self.q_positions, queries), taken(self.kv_positions, keys)

    def joined(self, other: "Pairs", union: bool) -> None:
        self.live = self.live | other.live if union else self.live & other.live
        self.baked = self.baked & other.baked if union else self.baked | other.baked
        if self.q_ids is None or (other.q_ids is not None and other.held > self.held):
            self.q_ids, self.kv_ids, self.held = other.q_ids, other.kv_ids, True

    def inverted(self) -> None:
        self.live, self.q_ids, self.kv_ids, self.baked = ~self.live, None, None, set()

    # Answers

    def ids(self) -> tuple[np.ndarray, np.ndarray]:
        if self.q_ids is not None:
            return self.q_ids, self.kv_ids
        batch, _, queries, keys = self.shape
        q_ids = [number_rows(np.ascontiguousarray(row[0])) for row in self.live]
        kv_ids = [number_rows(np.ascontiguousarray(row[0].T)) for row in self.live]
        return np.array(q_ids, np.int32).reshape(batch, queries), np.array(kv_ids, np.int32).reshape(
            batch, keys
        )

    def lens(self) -> Iterator[np.ndarray]:
        for ids in self.ids():
            ids = ids[:, 0] if ids.ndim == 3 else ids
            top = ids.max(initial=-1)
            segments = range(top + 1)
            counts = [(ids == s).sum() for s in segments] if top > 0 else (ids >= 0).sum(axis=-1)
            yield np.asarray(counts).astype(np.int32)

    def cu_seqlens(self) -> Iterator[np.ndarray]:
        if self.q_ids is None or not self.held:
            for live in (self.live.any(axis=(1, 3)), self.live.any(axis=(1, 2))):
                spans = [np.flatnonzero(row) for row in live]
                ends = [(span[0], span[-1] + 1) if len(span) else (0, 0) for span in spans]
                yield np.array(ends, np.int32).reshape(-1)
            return
        both = [ids[:, 0] if ids.ndim == 3 else ids for ids in (self.q_ids, self.kv_ids)]
        slots = max(128, *(int(ids.max(initial=-1)) + 1 for ids in both))
        for ids in both:
            yield np.cumsum([0, *((ids == s).sum() for s in range(slots))]).astype(np.int32)

    def positions(self) -> Iterator[np.ndarray]:
        held = self.q_positions, self.kv_positions
        for positions, ids, pad in zip(held, self.ids(), (-1, LAST), strict=True):
            yield places(ids, pad) if positions is None else positions
