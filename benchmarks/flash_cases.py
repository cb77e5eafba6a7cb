"""The cases of bench_flash.py, and ways to express them for a library that does not support all of their features."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

BLOCK = 128  # length of a side of a block of the dense mask
SHORT = 64  # with so few queries, heads of a group may become queries of one head

Parts = list[np.ndarray]
Grads = tuple[np.ndarray, np.ndarray, np.ndarray]


def dtype_of(name: str) -> np.dtype:
    if name == "bfloat16":
        from ml_dtypes import bfloat16

        return np.dtype(bfloat16)
    return np.dtype(name)


@dataclass(frozen=True)
class Case:
    name: str
    dtype: str = "float32"
    tokens: int = 2048  # keys; and queries, unless `queries` is given
    queries: int | None = None
    batch: int = 1
    heads: int = 16
    kv_heads: int | None = None
    channels: int = 64
    causal: bool = False  # bottom-right
    window: int | None = None  # keys that a query sees, including its own
    documents: int = 0
    by_mask_info: bool = False  # documents come as MaskInfo instead of cum_seqlens
    density: float | None = None  # share of live blocks in the dense mask
    bigbird: bool = False  # live blocks are those of BigBird instead, and come by MaskInfo.from_blocks
    bias: bool = False
    alibi: bool = False  # of attnmask alone
    backward: bool = False

    def shrunk(self, times: int) -> "Case":
        return replace(self, tokens=max(SHORT, self.tokens // times))

    @property
    def rows(self) -> int:
        return self.queries or self.tokens

    @property
    def group(self) -> int:
        return self.heads // (self.kv_heads or self.heads)

    @cached_property
    def arrays(self) -> Parts:
        """Queries, keys, values, and the gradient of the result, [B, T, H, D]."""
        rng = np.random.default_rng(0)

        def draw(tokens: int, heads: int) -> np.ndarray:
            shape = (self.batch, tokens, heads, self.channels)
            return rng.standard_normal(shape, np.float32).astype(dtype_of(self.dtype), copy=False)

        arrays = [draw(self.rows, self.heads)] + [draw(self.tokens, self.heads // self.group) for _ in "kv"]
        return arrays + ([draw(self.rows, self.heads)] if self.backward else [])

    @cached_property
    def starts(self) -> np.ndarray:
        """Where documents start, and where the last one ends."""
        cuts = np.random.default_rng(1).choice(np.arange(1, self.tokens), self.documents - 1, replace=False)
        return np.concatenate([[0], np.sort(cuts), [self.tokens]]).astype(np.int32)

    @cached_property
    def ids(self) -> np.ndarray:
        return np.repeat(np.arange(self.documents, dtype=np.int32), np.diff(self.starts))

    @cached_property
    def query_starts(self) -> np.ndarray:
        """Where the queries of documents start: all have the same number, unless every token is a query."""
        if self.rows == self.tokens:
            return self.starts
        return np.arange(0, self.rows + 1, self.rows // self.documents, dtype=np.int32)

    @cached_property
    def query_ids(self) -> np.ndarray:
        return np.repeat(np.arange(self.documents, dtype=np.int32), np.diff(self.query_starts))

    @cached_property
    def blocks(self) -> np.ndarray:
        """The live blocks of the dense mask, with the diagonal, so that every query has a key."""
        n = -(-self.tokens // BLOCK)
        live = np.eye(n, dtype=bool)
        if self.bigbird:  # neighbours, the first block for all, and three at random
            live |= np.eye(n, k=1, dtype=bool) | np.eye(n, k=-1, dtype=bool)
            live[0] = live[:, 0] = True
            for row in live:
                row[np.random.default_rng(2).choice(n, 3, replace=False)] = True
            return live
        dead = np.flatnonzero(~live)
        more = max(0, round(self.density * n * n) - n)
        live.flat[np.random.default_rng(2).choice(dead, more, replace=False)] = True
        return live

    @cached_property
    def live(self) -> np.ndarray:
        """Which pairs are live, [queries, keys]."""
        q = np.arange(self.tokens - self.rows, self.tokens, dtype=np.int32)[:, None]
        k = np.arange(self.tokens, dtype=np.int32)
        live = np.ones((self.rows, self.tokens), bool)
        if self.causal:
            live &= k <= q
        if self.window:
            live &= k > q - self.window
        if self.documents:
            live &= self.query_ids[:, None] == self.ids
        if self.has_blocks:
            live &= self.dense
        return live

    @cached_property
    def dense(self) -> np.ndarray:
        """The dense mask."""
        whole = self.blocks.repeat(BLOCK, 0).repeat(BLOCK, 1)
        return np.ascontiguousarray(whole[: self.tokens, : self.tokens])

    @cached_property
    def flops(self) -> int:
        """Operations of the products of live pairs: two products forward, five backward."""
        live = np.count_nonzero(self.live) if self.is_masked else self.rows * self.tokens
        return (10 if self.backward else 4) * int(live) * self.channels * self.batch * self.heads

    @property
    def has_blocks(self) -> bool:
        return self.bigbird or self.density is not None

    @property
    def is_masked(self) -> bool:
        return bool(self.causal or self.window or self.documents or self.has_blocks)

    @property
    def key_bytes(self) -> int:
        """The bytes of keys and values."""
        return 2 * self.batch * self.tokens * self.heads // self.group * self.channels * self.itemsize

    @property
    def itemsize(self) -> int:
        return dtype_of(self.dtype).itemsize


@dataclass
class Problem:
    """Attention by features that most libraries have: arrays [B, T, H, D], causal, or a mask."""

    arrays: Parts
    causal: bool = False  # needs as many queries as keys
    mask: np.ndarray | None = None  # bool, broadcasts to [B, H, Tq, Tk]
    case: Case | None = None  # if the problem is a whole case

    def bias(self, dtype: np.dtype) -> np.ndarray | None:
        return None if self.mask is None else np.where(self.mask, 0, -np.inf).astype(dtype)


@dataclass
class Form:
    """A way to express a case: as problems, whose results are joined to that of the case."""

    name: str
    problems: list[Problem]
    join: Callable[[Parts], np.ndarray]
    join_grads: Callable[[list[Grads]], Grads]


def whole(case: Case) -> Form:
    square = case.rows == case.tokens
    plain = case.causal and square and not (case.window or case.documents or case.has_blocks)
    mask = None if plain or case.live.all() else case.live[None, None]
    problem = Problem(case.arrays, plain, mask, case)
    return Form("", [problem], lambda parts: parts[0], lambda grads: grads[0])


def repeated(case: Case) -> Form:
    """Every query head has keys of its own, copied beforehand."""
    form, group = whole(case), case.group
    q, k, v, *dout = case.arrays
    form.problems[0].arrays = [q, k.repeat(group, 2), v.repeat(group, 2), *dout]

    def summed(grad: np.ndarray) -> np.ndarray:
        return grad.reshape(*grad.shape[:2], -1, group, grad.shape[3]).sum(3)

    return Form("repeated", form.problems, form.join, lambda grads: (grads[0][0], *map(summed, grads[0][1:])))


def folded(case: Case) -> Form:
    """The heads of a group become queries of one head."""
    q, k, v = case.arrays
    heads = case.heads // case.group
    fold = q.reshape(case.batch, case.rows, heads, case.group, case.channels).transpose(0, 3, 1, 2, 4)
    fold = np.ascontiguousarray(fold.reshape(case.batch, -1, heads, case.channels))
    mask = None if case.live.all() else np.tile(case.live, (case.group, 1))[None, None]

    def unfold(parts: Parts) -> np.ndarray:
        out = parts[0].reshape(case.batch, case.group, case.rows, heads, case.channels)
        return out.transpose(0, 2, 3, 1, 4).reshape(q.shape)

    return Form("folded", [Problem([fold, k, v], mask=mask)], unfold, lambda grads: grads[0])


def by_blocks(case: Case) -> Form:
    """A window: blocks of queries become batch rows, each with the keys of its block and of the block before."""
    assert case.batch == 1
    assert case.tokens % case.window == 0
    size, n = case.window, case.tokens // case.window

    def blocks(array: np.ndarray) -> np.ndarray:
        return array.reshape(n, size, *array.shape[2:])

    def pairs(array: np.ndarray) -> np.ndarray:
        own = blocks(array)
        before = np.concatenate([np.zeros_like(own[:1]), own[:-1]])
        return np.concatenate([before, own], 1)

    def spread(grad: np.ndarray) -> np.ndarray:
        own = grad[:, size:].copy()
        own[:-1] += grad[1:, :size]
        return own.reshape(1, case.tokens, *own.shape[2:])

    q, k, v, *dout = case.arrays
    rows, keys = np.arange(size)[:, None] + size, np.arange(2 * size)
    mask = np.repeat(((keys <= rows) & (keys > rows - size))[None, None], n, 0)
    mask[0, :, :, :size] = False
    problem = Problem([blocks(q), pairs(k), pairs(v), *map(blocks, dout)], mask=mask)
    return Form(
        "by blocks",
        [problem],
        lambda parts: parts[0].reshape(q.shape),
        lambda grads: (grads[0][0].reshape(q.shape), spread(grads[0][1]), spread(grads[0][2])),
    )


def by_documents(case: Case) -> Form:
    """Documents one after the other."""
    q, k, v, *dout = case.arrays
    of_queries, of_keys = (
        [slice(*ends) for ends in itertools.pairwise(starts)] for starts in (case.query_starts, case.starts)
    )
    parts = [
        [q[:, rows], k[:, keys], v[:, keys], *(each[:, rows] for each in dout)]
        for rows, keys in zip(of_queries, of_keys, strict=True)
    ]

    def join_grads(grads: list[Grads]) -> Grads:
        return tuple(np.concatenate(part, 1) for part in zip(*grads, strict=True))

    problems = [Problem(arrays, case.causal) for arrays in parts]
    return Form("by documents", problems, lambda outs: np.concatenate(outs, 1), join_grads)


def forms_of(case: Case, groups: bool = True, windows: bool = False, documents: bool = False) -> list[Form]:
    """The forms for a library that supports groups of heads, windows and documents, or not."""
    forms = []
    if case.documents:
        forms.append(by_documents(case))
    elif case.window:
        forms.append(by_blocks(case))
    elif case.group > 1:
        forms.append(folded(case) if case.rows <= SHORT else repeated(case))
    known = (not case.documents or documents) and (not case.window or windows)
    if known and (case.group == 1 or groups):
        forms.append(whole(case))
    return forms
