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
FACE = """
a: {array} = face.flash_attention(x, x, x, causal=True, softmax_aux=x[0, 0], causal_offset={integers})
b: tuple[{array}, {array}] = face.flash_attention(x, x, x, return_lse=True)
c: {array} = face.ring_attention(x, x, x, {ring}layout="contiguous", dropout_prob=0.5, dropout_seed=3)
e: {array} = face.linear_attention(x, x, x, decay=x[..., 0])
f: tuple[{array}, {array}] = face.short_convolution(x[0], x[0, 0], return_state=True)
flag = bool(x.sum())
g: {array} | tuple[{array}, {array}] = face.flash_attention(x, x, x, return_lse=flag)
g = face.ring_attention(x, x, x, {ring}return_lse=flag)
g = face.linear_attention(x, x, x, return_state=flag)
g = face.short_convolution(x[0], x[0, 0], return_state=flag)
# wrong:
face.flash_attention(x, x, x, causal_offset="bottom-rigt")
face.flash_attention(x, x, x, is_causal=True)
face.flash_attention(x, x, x, return_lse=True).sum()
face.flash_attention_with_kvcache(x, x, x, scale=1.0)
face.linear_attention(x, x, x, return_state=True).sum()
face.short_convolution(x[0], x[0, 0], activation="relu")
face.ring_attention(x, x, x, {ring}layout="zigzig")
face.flash_attention(x, x, x, return_lse=flag).sum()
face.ring_attention(x, x, x, {ring}return_lse=flag).sum()
face.linear_attention(x, x, x, return_state=flag).sum()
face.short_convolution(x[0], x[0, 0], return_state=flag).sum()
"""
TORCH = """
import torch
import attnmask.torch as face

x = torch.zeros(1, 4, 2, 8)
flag = bool(x.sum())
d: torch.Tensor = face.flash_attention(x, x, x, torch.ones(4, 4), x, causal_offset=x.int())
d = face.flash_attention_with_kvcache(x, x, x, cache_seqlens=torch.tensor([1]))
h: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = face.flash_attention_with_kvcache(x, x, x, return_lse=flag)
"""
TORCH += FACE.format(array="torch.Tensor", integers="torch.tensor([1])", ring="")
TORCH += """face.ring_attention(x, x, x, cum_seqlens_q=[0, 4])
face.flash_attention_with_kvcache(x, x, x, return_lse=flag).sum()
"""
JAX = """
import jax
import jax.numpy as jnp
import attnmask.jax as face

x = jnp.zeros((1, 4, 2, 8))
d: jax.Array = face.flash_attention_with_kvcache(x, x, x, cache_seqlens=jnp.array([1])).out
"""
JAX += FACE.format(array="jax.Array", integers="jnp.array([1])", ring='axis_name="ring", ')


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
