"""Cases of linear attention: their arrays, the work that they need, and the float64 recurrence."""

import sys
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

sys.path.append(str(Path(__file__).parent.parent / "tests/_support"))
from reference_linear import Linear

CHUNK = 64
LONG = 10_000  # tokens: of so many, one head is compared
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """The rules are "gated delta rule", "KDA" and "Mamba-2". The lengths of packed sequences are equal."""

    rule: str = "gated delta rule"
    tokens: int = 2048
    heads: int = 16
    key_heads: int = 16
    depth: int = 128
    channels: int = 128
    dtype: str = "float32"
    grads: bool = False
    packed: int = 1
    is_step: bool = False

    def __str__(self) -> str:
        tokens = f"{self.packed} × {self.tokens // self.packed:,}" if self.packed > 1 else f"{self.tokens:,}"
        words = [self.rule, f"{tokens} tokens" if self.tokens > 1 else "one token", f"{self.heads} heads"]
        words += [self.dtype] * (self.dtype != "float32") + ["with gradients"] * self.grads
        return ", ".join(words).replace("1 heads", "1 head")

    @property
    def has_beta(self) -> bool:
        return self.rule != "Mamba-2"

    @property
    def scale(self) -> float:
        return self.depth**-0.5 if self.has_beta else 1.0

    @property
    def cu_seqlens(self) -> np.ndarray | None:
        if self.packed == 1:
            return None
        return np.arange(0, self.tokens + 1, self.tokens // self.packed, dtype=np.int32)

    @property
    def state_bytes(self) -> int:
        return 4 * self.heads * self.depth * self.channels

    @property
    def operations(self) -> int:
        """Products and sums of the forward pass in chunks of 64 tokens.

        The state is read for queries and written, and read for keys where there is a beta. Within a chunk half of
        Q Kᵀ and of its product with what is written count, and as much for K Kᵀ and the triangular system.
        """
        reads = 3 if self.has_beta else 2
        pairs = CHUNK // 2 * (self.depth + self.channels) * (reads - 1)
        return 2 * self.tokens * self.heads * (reads * self.depth * self.channels + pairs)

    def arrays(self) -> Arrays:
        """Those of the function; `x`, `dt` and `A` of Mamba-2, where value = x dt and decay = A dt; and `dout`."""
        rng = np.random.default_rng(0)
        dtype = np.dtype(ml_dtypes.bfloat16 if self.dtype == "bfloat16" else self.dtype)

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal((1, self.tokens, *shape), np.float32)

        query, key = normal(self.key_heads, self.depth), normal(self.key_heads, self.depth)
        for x in (query, key) if self.has_beta else ():
            x /= np.linalg.norm(x, axis=-1, keepdims=True)
        arrays = {"query": query, "key": key, "value": normal(self.heads, self.channels)}
        if self.has_beta:
            arrays["beta"] = rng.random((1, self.tokens, self.heads), np.float32)
            by = (self.depth,) if self.rule == "KDA" else ()
            arrays["decay"] = rng.random((1, self.tokens, self.heads, *by), np.float32)
            arrays["decay"] *= -0.2
        else:
            arrays["x"] = arrays["value"]
            arrays["dt"] = 0.01 + 0.1 * rng.random((1, self.tokens, self.heads), np.float32)
            arrays["A"] = -np.linspace(1, 16, self.heads, dtype=np.float32)
            arrays["value"] = arrays["x"] * arrays["dt"][..., None]
            arrays["decay"] = arrays["dt"] * arrays["A"]
        if self.grads:
            arrays["dout"] = normal(self.heads, self.channels)
        for name in ("query", "key", "value", "beta", "x", "dout"):
            if name in arrays:
                arrays[name] = arrays[name].astype(dtype, copy=False)
        if self.is_step:
            arrays["state"] = rng.standard_normal((1, self.heads, self.depth, self.channels), np.float32)
        return arrays

    @property
    def compared(self) -> list[int]:
        """Heads of values: heads do not meet, so a few suffice, but gradients of shared keys are sums over all."""
        if self.grads and self.key_heads < self.heads:
            return list(range(self.heads))
        return [0] if self.tokens > LONG else sorted({0, self.heads - 1})

    def expected(self) -> tuple[Arrays, float]:
        """Results of `compared` heads; and the size by which errors of the decay's gradient are judged."""
        arrays, heads = self.arrays(), self.compared
        keys = heads if self.key_heads == self.heads else [0]
        of = {name: arrays[name][:, :, keys] for name in ("query", "key")}
        of |= {name: arrays[name][:, :, heads] for name in ("value", "decay", "beta") if name in arrays}
        initial = arrays["state"][:, heads] if self.is_step else None
        problem = Linear(**of, scale=self.scale, initial_state=initial, cu_seqlens=self.cu_seqlens)
        if not self.grads:
            return {"out": problem.forward()[0]}, 0.0
        grads = problem.backward(arrays["dout"][:, :, heads])
        size = grads.pop("decay_size")
        return {name: grad for name, grad in grads.items() if grad is not None}, size

    def error(self, got: Arrays, expected: Arrays, size: float) -> float:
        """The largest difference, relative to the largest number of its array."""
        errors = [np.nan] if got.keys() - expected.keys() else []
        for name, grad in got.items():
            largest = max(np.abs(expected[name]).max(), 0.1 * size * (name == "decay"))
            errors.append(np.abs(grad.astype(np.float64) - expected[name]).max() / largest)
        return float(max(errors))
