"""Steps of decoding: the last tokens of sequences come to a cache, and attend to all that is there."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

HEADS, KV_HEADS, DEPTH = 32, 8, 128
TYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int8": np.dtype(np.int8),
    "float8": np.dtype(ml_dtypes.float8_e4m3fn),
}


def in_lines(array: np.ndarray) -> np.ndarray:
    """A copy that begins where a line of the processor's cache does, as tensors and the pages of KVCache do."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    begin = -memory.__array_interface__["data"][0] % 64
    copy = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def paged(cache: np.ndarray, size: int, order: np.ndarray) -> np.ndarray:
    """The same tokens in pages that lie in this order."""
    pages = cache.reshape(len(order), size, *cache.shape[2:])
    return in_lines(pages[np.argsort(order)])


@dataclass(frozen=True)
class Step:
    """`queries` new tokens of each sequence, which has `keys` tokens then, in a cache of type `name`."""

    batch: int
    keys: int
    queries: int
    name: str

    def __str__(self) -> str:
        return f"{self.batch} × {self.keys:,}, {self.queries} new, {self.name}"

    @property
    def cache_type(self) -> np.dtype:
        return TYPES[self.name]

    @property
    def is_quantized(self) -> bool:
        return self.cache_type.itemsize == 1

    @property
    def dtype(self) -> np.dtype:
        """The type of queries and results."""
        return TYPES[{"int8": "float32", "float8": "bfloat16"}.get(self.name, self.name)]

    @property
    def cache_bytes(self) -> int:
        return 2 * self.batch * self.keys * KV_HEADS * DEPTH * self.cache_type.itemsize

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Queries, and the keys and values of all tokens, [B, T, H, D]."""
        rng = np.random.default_rng(0)
        tokens, heads = (self.queries, self.keys, self.keys), (HEADS, KV_HEADS, KV_HEADS)
        query, key, value = (
            rng.standard_normal((self.batch, t, h, DEPTH), np.float32).astype(self.dtype)
            for t, h in zip(tokens, heads, strict=True)
        )
        return query, key, value

    def new(self, array: np.ndarray) -> np.ndarray:
        """Those of the new tokens."""
        return np.ascontiguousarray(array[:, -self.queries :])

    def pages(self, size: int) -> np.ndarray:
        """A table of shuffled pages, [B, pages]."""
        order = np.random.default_rng(1).permutation(self.batch * self.keys // size)
        return order.reshape(self.batch, -1).astype(np.int32)


CHANNELS, VALUES = 576, 512  # of the latents of DeepSeek and Kimi, and how many of them are values


@dataclass(frozen=True)
class Latent(Step):
    """One new token of each sequence, in a latent cache: values are channels of the keys."""

    heads: int = 16

    def __str__(self) -> str:
        return f"{self.batch} × {self.keys:,}, {self.heads} heads, {self.name}"

    @property
    def cache_bytes(self) -> int:
        return self.batch * self.keys * CHANNELS * self.cache_type.itemsize

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Queries [B, 1, heads, 576], the latents of all tokens [B, T, 1, 576], and their values."""
        rng = np.random.default_rng(0)
        query, latent = (
            rng.standard_normal((self.batch, tokens, heads, CHANNELS), np.float32).astype(self.dtype)
            for tokens, heads in ((1, self.heads), (self.keys, 1))
        )
        return query, latent, latent[..., :VALUES]
