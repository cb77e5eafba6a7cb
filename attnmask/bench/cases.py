"""The functions that are measured. Each has arrays, a call of attnmask, one of PyTorch, a right result, and its work.

Results are compared for one head of one row: what `ours` and `by_torch` return is cut by `sample`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np

import attnmask
from attnmask._common.arguments import bfloat16
from attnmask._common.types import Array, DType

Results = Sequence[Array]
Call = Callable[[], Any]

TYPES = ("float32", "float64", "bfloat16", "float16")
TOLERANCE = {"float64": 1e-11, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2, "int8": 1e-4}
SHRINK = 8  # times less work with --quick


def known(kind: str) -> bool:
    """Whether NumPy can have arrays of a type here."""
    return kind != "bfloat16" or importlib.util.find_spec("ml_dtypes") is not None


def dtype_of(kind: str) -> DType:
    return bfloat16("--json") if kind == "bfloat16" else np.dtype(kind)


def draw(kind: str, *shape: int) -> Array:
    rng = np.random.default_rng(shape)
    return rng.standard_normal(shape, np.float32).astype(dtype_of(kind), copy=False)


def tensor(array: Array) -> Any:
    """A tensor of the same type, with heads before tokens, as PyTorch wants it."""
    import torch

    integers = torch.from_numpy(array.view(f"i{array.itemsize}"))
    return integers.view(getattr(torch, array.dtype.name)).transpose(1, 2).contiguous()


def dense(query: Array, key: Array, value: Array, causal: bool = False, dout: Array | None = None) -> Results:
    """Attention of one head in float64 by its definition, and its gradients if `dout` is given."""
    query, key, value = (x.astype(np.float64) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5
    logits = scale * query @ key.T
    if causal:
        logits[np.triu_indices(len(logits), 1)] = -np.inf
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = weights @ value
    if dout is None:
        return [out]
    dout = dout.astype(np.float64)
    dlogits = weights * (dout @ value.T - (dout * out).sum(-1, keepdims=True))
    return [out, scale * dlogits @ key, scale * dlogits.T @ query, weights.T @ dout]


class Function(Protocol):
    """A row of `FUNCTIONS`."""

    unit: ClassVar[str]
    types: ClassVar[tuple[str, ...]]

    @property
    def about(self) -> str: ...

    def arrays(self, kind: str) -> list[Array]:
        """Return the arguments of its calls."""

    def ours(self, *arrays: Array) -> Call: ...

    def by_torch(self, *arrays: Array) -> Call | None:
        """PyTorch's own function, or None where it has none."""

    def sample(self, results: Any) -> Results:
        """Return the last head of the last row of each result, in float64."""

    def expected(self, *arrays: Array) -> Results: ...

    def work(self, kind: str) -> float:
        """Operations, or bytes that have to be read."""

    def smaller(self) -> Function: ...


@dataclass(frozen=True)
class Attention:
    """Arrays are query, key, value, and the gradient of the result."""

    tokens: int
    heads: int = 8
    batch: int = 1
    causal: bool = False
    gradients: bool = False
    channels: int = 64
    unit: ClassVar[str] = "GFLOP/s"
    types: ClassVar[tuple[str, ...]] = TYPES

    @property
    def about(self) -> str:
        rows = f"{self.batch} sequences of " if self.batch > 1 else ""
        return f"{rows}{self.tokens:,} tokens, {self.heads} x {self.channels} channels"

    def arrays(self, kind: str) -> list[Array]:
        return list(draw(kind, 3 + self.gradients, self.batch, self.tokens, self.heads, self.channels))

    def ours(self, *arrays: Array) -> Call:
        query, key, value, *dout = arrays
        if not self.gradients:
            return lambda: [attnmask.flash_attention(query, key, value, causal=self.causal)]

        def training() -> list[Array]:
            out, vjp = attnmask.flash_attention_vjp(query, key, value, causal=self.causal)
            return [out, *vjp(*dout)[:3]]

        return training

    def by_torch(self, *arrays: Array) -> Call | None:
        import torch

        *inputs, last = map(tensor, arrays)
        attend = torch.nn.functional.scaled_dot_product_attention
        if not self.gradients:

            def forward() -> list[Any]:
                with torch.no_grad():
                    return [attend(*inputs, last, is_causal=self.causal)]

            return forward
        for each in inputs:
            each.requires_grad_()

        def training() -> list[Any]:
            out = attend(*inputs, is_causal=self.causal)
            return [out, *torch.autograd.grad(out, inputs, last)]

        return training

    def sample(self, results: Any) -> Results:
        return [last_head(each) for each in results]

    def expected(self, *arrays: Array) -> Results:
        query, key, value, *dout = (x[-1, :, -1] for x in arrays)
        return dense(query, key, value, self.causal, *dout)

    def work(self, kind: str) -> float:
        pairs = self.tokens * (self.tokens + 1) // 2 if self.causal else self.tokens**2
        products = 7 if self.gradients else 2  # two forward, five backward
        return 2.0 * products * pairs * self.channels * self.heads * self.batch

    def smaller(self) -> Attention:
        if self.batch > 1:
            return replace(self, batch=self.batch // SHRINK)
        return replace(self, tokens=self.tokens // 2, heads=max(1, 2 * self.heads // SHRINK))


def last_head(result: Any) -> Array:
    """Return the last head of the last row. NumPy has `[B, T, H, D]`, PyTorch heads before tokens."""
    if isinstance(result, np.ndarray):
        return result[-1, :, -1].astype(np.float64)
    head: Array = result.detach()[-1, -1].double().numpy()
    return head


@dataclass(frozen=True)
class Decoding:
    """One query per sequence. Arrays are queries and caches; int8 has scales after them."""

    tokens: int
    batch: int = 4
    heads: int = 32
    kv_heads: int = 8
    channels: int = 128
    unit: ClassVar[str] = "GB/s"
    types: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "float16", "int8")

    @property
    def about(self) -> str:
        return (
            f"one query for each of {self.batch} sequences of {self.tokens:,} tokens, {self.heads} heads on "
            f"{self.kv_heads} x {self.channels} channels"
        )

    def arrays(self, kind: str) -> list[Array]:
        floats = "float32" if kind == "int8" else kind
        query = draw(floats, self.batch, 1, self.heads, self.channels)
        caches = [draw(floats, part, self.tokens, self.kv_heads, self.channels)[-1:] for part in (1, 2)]
        if kind != "int8":
            return [query, *(cache.repeat(self.batch, 0) for cache in caches)]
        pairs = [attnmask.quantize_kv(cache, np.int8, -1) for cache in caches]
        return [query, *(part.repeat(self.batch, 0) for parts in zip(*pairs, strict=True) for part in parts)]

    def ours(self, *arrays: Array) -> Call:
        query, key, value, *scales = arrays
        k_scale, v_scale = scales or (None, None)
        return lambda: attnmask.flash_attention_with_kvcache(
            query, key, value, k_scale=k_scale, v_scale=v_scale
        )

    def by_torch(self, *arrays: Array) -> Call | None:
        """The heads that share keys are queries of one head: PyTorch takes longest with `enable_gqa`."""
        import torch

        if len(arrays) > 3:
            return None
        query, key, value = map(tensor, arrays)
        folded = query.reshape(self.batch, self.kv_heads, -1, self.channels)
        attend = torch.nn.functional.scaled_dot_product_attention

        def decode() -> Any:
            with torch.no_grad():
                return attend(folded, key, value).reshape(query.shape)

        return decode

    def sample(self, results: Any) -> Results:
        return [last_head(results)]

    def expected(self, *arrays: Array) -> Results:
        query, *caches = (x[-1, :, -1] for x in arrays[:3])
        scales = [x[-1, :, -1] for x in arrays[3:]] or [np.ones(1), np.ones(1)]
        key, value = (x.astype(np.float64) * scale for x, scale in zip(caches, scales, strict=True))
        return dense(query, key, value)

    def work(self, kind: str) -> float:
        return 2.0 * self.batch * self.tokens * self.kv_heads * self.channels * dtype_of(kind).itemsize

    def smaller(self) -> Decoding:
        return replace(self, tokens=self.tokens // SHRINK)


@dataclass(frozen=True)
class Linear:
    """The gated delta rule. Arrays are query, key, value, beta, decay."""

    tokens: int
    heads: int = 8
    channels: int = 128
    unit: ClassVar[str] = "GFLOP/s"
    types: ClassVar[tuple[str, ...]] = TYPES

    @property
    def about(self) -> str:
        return f"gated delta rule, {self.tokens:,} tokens, {self.heads} x {self.channels} channels"

    def arrays(self, kind: str) -> list[Array]:
        query, key, value = draw("float32", 3, 1, self.tokens, self.heads, self.channels)
        key /= np.linalg.norm(key, axis=-1, keepdims=True)
        beta, decay = np.random.default_rng(0).random((2, 1, self.tokens, self.heads), np.float32)
        arrays = [x.astype(dtype_of(kind), copy=False) for x in (query, key, value, beta)]
        return [*arrays, np.asarray(-0.2 * decay, np.float64 if kind == "float64" else np.float32)]

    def ours(self, *arrays: Array) -> Call:
        query, key, value, beta, decay = arrays
        return lambda: attnmask.linear_attention(query, key, value, beta=beta, decay=decay)

    def by_torch(self, *arrays: Array) -> Call | None:
        return None

    def sample(self, results: Any) -> Results:
        return [last_head(results)]

    def expected(self, *arrays: Array) -> Results:
        query, key, value, beta, decay = (x[-1, :, -1].astype(np.float64) for x in arrays)
        state, out = np.zeros((self.channels, self.channels)), np.empty_like(value)
        for t in range(self.tokens):
            state *= np.exp(decay[t])
            state += np.outer(beta[t] * key[t], value[t] - key[t] @ state)
            out[t] = self.channels**-0.5 * query[t] @ state
        return [out]

    def work(self, kind: str) -> float:
        """Count operations. A token reads the state twice and writes it once. In its chunk of 64 tokens it meets
        half of them, in four products.
        """
        per_token = 3 * self.channels**2 + 2 * 32 * 2 * self.channels
        return 2.0 * self.tokens * self.heads * per_token

    def smaller(self) -> Linear:
        return replace(self, tokens=self.tokens // SHRINK)


FUNCTIONS: dict[str, Function] = {
    "attention": Attention(1024),
    "causal attention": Attention(2048, heads=4, causal=True),
    "causal attention and gradients": Attention(1024, heads=4, causal=True, gradients=True),
    "short sequences": Attention(64, batch=128),
    "decoding": Decoding(4096),
    "linear attention": Linear(2048),
}
