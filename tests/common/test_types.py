"""What a type checker says of calls: nothing of right ones, and of wrong words and keywords that they are wrong."""

import subprocess
import sys

import pytest

MASKS = """
import numpy as np
import attnmask
from attnmask import MaskInfo

mask = MaskInfo.causal(4, offset="bottom-right") & MaskInfo.full(4).apply_causal(np.int64(1))
mask = mask.apply_causal(np.array([1])).apply_causal([1]).apply_sliding_window((1, 0), offset="bottom-right")
lengths: MaskInfo = MaskInfo.from_lengths([1, 2], max_len=4)
padding: MaskInfo = MaskInfo.from_padding_mask(np.ones((2, 3)))
packed, starts = attnmask.pack(np.zeros((2, 3), np.float32), [1, 2])
total = packed.sum() + starts[-1]
padded = attnmask.unpack(packed, starts, 3, fill=-1).mean()
# wrong:
MaskInfo.causal(4, offset="bottom-rigt")
mask.apply_causal("bottom-rigt")
mask.apply_sliding_window((1, 0), offset="bottom-rigt")
mask.apply_sliding_window((1, 0), mode="decod")
MaskInfo.full("4")
mask.visualize(charset="latin")
mask.apply_token_type_ids([[1]], combine="unio")
"""


ATTENTION = """
from typing import Any
import numpy as np
from numpy.typing import NDArray
import attnmask

x = np.zeros((1, 4, 2, 8), np.float32)
a: NDArray[Any] = attnmask.flash_attention(x, x, x, None, None, 0.5, causal=True, causal_offset=[1])
b: tuple[NDArray[Any], NDArray[Any]] = attnmask.flash_attention(x, x, x, return_lse=True)
c = attnmask.flash_attention(x, x, x, return_lse=bool(x.sum()))
assert not isinstance(c, tuple)
out, vjp = attnmask.flash_attention_vjp(x, x, x, precision="highest", causal_offset="bottom-right")
grads = vjp(out.round())
bias = grads.query + grads.key
(out, lse), more = attnmask.flash_attention_vjp(x, x, x, return_lse=True)
more(out, lse).value.sum()
attnmask.flash_attention_bwd(out, x, x, x, *attnmask.flash_attention_fwd(x, x, x)).key.sum()
d: NDArray[Any] = attnmask.flash_attention_with_kvcache(x, x, x, cache_seqlens=[1], sliding_window=(2, None))
e: tuple[NDArray[Any], NDArray[Any]] = attnmask.flash_attention_with_kvcache(x, x, x, return_lse=True)
g: NDArray[Any] = attnmask.linear_attention(x, x, x, decay=x[..., 0], chunk_size=32)
h, back = attnmask.linear_attention_vjp(x, x, x)
decay = back(h.round()).decay
assert decay is not None
(h, state), with_state = attnmask.linear_attention_vjp(x, x, x, return_state=True)
with_state(h, state).value.sum()
i = attnmask.linear_attention(x, x, x, return_state=bool(x.sum()))
assert not isinstance(i, tuple)
blocks = range(attnmask.cdiv(130, 64))
counts = attnmask.cdiv(np.array([1, 2]), 64).tolist()
cache = attnmask.KVCache(2, 8, pages=4, dtype="float32")
f: NDArray[Any] = cache.step([0], 1).attend(0, x, x, x, sliding_window=4, attention_mask=x)
both: tuple[NDArray[Any], NDArray[Any]] = cache.step([0], 1).attend(0, x, x, return_lse=True)
either: NDArray[Any] | tuple[NDArray[Any], NDArray[Any]] = cache.step([0], 1).attend(0, x, x, return_lse=bool(x.sum()))
# wrong:
cache.step([0], 1).attend(0, x, x, x, causal="yes")
cache.step([0], 1).attend(0, x, x, x, return_lse=bool(x.sum())).sum()
attnmask.flash_attention(x, x, x, causal_offset="bottom-rigt")
attnmask.flash_attention(x, x, x, is_causal=True)
attnmask.flash_attention(x, x, x, precision="hihgest")
attnmask.flash_attention(x, x)
attnmask.flash_attention(x, x, x, return_lse=True).sum()
attnmask.flash_attention_vjp(x, x, x, grad_sinks=True)
attnmask.flash_attention_fwd(x, x, x, causal="yes")
attnmask.flash_attention_with_kvcache(x, x, x, scale=1.0)
attnmask.linear_attention(x, x, x, return_state=True).sum()
attnmask.linear_attention(x, x, x, softmax_scale=1.0)
attnmask.linear_attention_vjp(x, x, x)[1](x).q
back(h, state)
attnmask.cdiv(3, 2).tolist()
"""
TORCH = """
import torch
import attnmask.torch
from attnmask.torch import MaskTensors

x = torch.zeros(1, 4, 2, 8)
a: torch.Tensor = attnmask.torch.flash_attention(x, x, x, torch.ones(4, 4), x, causal=True, softmax_aux=x[0, 0])
b: tuple[torch.Tensor, torch.Tensor] = attnmask.torch.flash_attention(x, x, x, return_lse=True, causal_offset=x.int())
c: torch.Tensor = attnmask.torch.ring_attention(x, x, x, layout="contiguous", dropout_prob=0.5)
e: torch.Tensor = attnmask.torch.linear_attention(x, x, x, decay=x[..., 0])
f: tuple[torch.Tensor, torch.Tensor] = attnmask.torch.short_convolution(x[0], x[0, 0], return_state=True)
d: torch.Tensor = attnmask.torch.flash_attention_with_kvcache(x, x, x, cache_seqlens=torch.tensor([1]))
flag = bool(x.sum())
g: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = attnmask.torch.flash_attention(x, x, x, return_lse=flag)
g = attnmask.torch.flash_attention_with_kvcache(x, x, x, return_lse=flag)
g = attnmask.torch.ring_attention(x, x, x, return_lse=flag)
g = attnmask.torch.linear_attention(x, x, x, return_state=flag)
g = attnmask.torch.short_convolution(x[0], x[0, 0], return_state=flag)
# wrong:
attnmask.torch.flash_attention(x, x, x, causal_offset="bottom-rigt")
attnmask.torch.flash_attention(x, x, x, is_causal=True)
attnmask.torch.flash_attention(x, x, x, return_lse=True).sum()
attnmask.torch.flash_attention_with_kvcache(x, x, x, scale=1.0)
attnmask.torch.linear_attention(x, x, x, return_state=True).sum()
attnmask.torch.short_convolution(x[0], x[0, 0], activation="relu")
attnmask.torch.ring_attention(x, x, x, layout="zigzig")
attnmask.torch.ring_attention(x, x, x, cum_seqlens_q=[0, 4])
attnmask.torch.flash_attention(x, x, x, return_lse=flag).sum()
attnmask.torch.flash_attention_with_kvcache(x, x, x, return_lse=flag).sum()
attnmask.torch.ring_attention(x, x, x, return_lse=flag).sum()
attnmask.torch.linear_attention(x, x, x, return_state=flag).sum()
attnmask.torch.short_convolution(x[0], x[0, 0], return_state=flag).sum()
"""
JAX = """
import jax
import jax.numpy as jnp
import attnmask.jax

x = jnp.zeros((1, 4, 2, 8))
a: jax.Array = attnmask.jax.flash_attention(x, x, x, causal=True, softmax_aux=x[0, 0], causal_offset=jnp.array([1]))
b: tuple[jax.Array, jax.Array] = attnmask.jax.flash_attention(x, x, x, return_lse=True)
c: jax.Array = attnmask.jax.ring_attention(x, x, x, axis_name="ring", dropout_seed=3)
e: jax.Array = attnmask.jax.linear_attention(x, x, x, decay=x[..., 0])
f: tuple[jax.Array, jax.Array] = attnmask.jax.short_convolution(x[0], x[0, 0], return_state=True)
d = attnmask.jax.flash_attention_with_kvcache(x, x, x, cache_seqlens=jnp.array([1])).out
flag = bool(x.sum())
g: jax.Array | tuple[jax.Array, jax.Array] = attnmask.jax.flash_attention(x, x, x, return_lse=flag)
g = attnmask.jax.ring_attention(x, x, x, axis_name="ring", return_lse=flag)
g = attnmask.jax.linear_attention(x, x, x, return_state=flag)
g = attnmask.jax.short_convolution(x[0], x[0, 0], return_state=flag)
# wrong:
attnmask.jax.flash_attention(x, x, x, causal_offset="bottom-rigt")
attnmask.jax.flash_attention(x, x, x, is_causal=True)
attnmask.jax.flash_attention(x, x, x, return_lse=True).sum()
attnmask.jax.flash_attention_with_kvcache(x, x, x, scale=1.0)
attnmask.jax.linear_attention(x, x, x, return_state=True).sum()
attnmask.jax.short_convolution(x[0], x[0, 0], activation="relu")
attnmask.jax.ring_attention(x, x, x, axis_name="ring", layout="zigzig")
attnmask.jax.flash_attention(x, x, x, return_lse=flag).sum()
attnmask.jax.ring_attention(x, x, x, axis_name="ring", return_lse=flag).sum()
attnmask.jax.linear_attention(x, x, x, return_state=flag).sum()
attnmask.jax.short_convolution(x[0], x[0, 0], return_state=flag).sum()
"""


@pytest.mark.parametrize(
    ("text", "needed"),
    [(MASKS, "numpy"), (ATTENTION, "numpy"), (TORCH, "torch"), (JAX, "jax")],
    ids=["masks", "attention", "torch", "jax"],
)
def test_checked_by_mypy(tmp_path_factory, text, needed):
    """Every line after the one that says so is wrong, and no other."""
    pytest.importorskip("mypy")
    pytest.importorskip(needed)
    folder = tmp_path_factory.getbasetemp()
    file = folder / "user.py"
    file.write_text(text)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", folder / "types", file]
    result = subprocess.run(command, capture_output=True, text=True)
    lines = text.splitlines()
    errors = (line.split(":") for line in result.stdout.splitlines() if ": error:" in line)
    wrong = sorted({int(number) for where, number, *_ in errors if where == str(file)})
    assert wrong == list(range(lines.index("# wrong:") + 2, len(lines) + 1)), result.stdout + result.stderr
