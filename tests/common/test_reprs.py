"""What objects say they are: a line with sizes, and no array written out."""

import numpy as np
import pytest

import attnmask
from attnmask.operations import OperationOutput

X = np.ones((1, 3, 2, 8), np.float32)
_, VJP = attnmask.flash_attention_vjp(X, X, X, bias=np.zeros((1, 1, 3, 3), np.float32), grad_bias=True)
CONVOLUTION = attnmask.short_convolution_vjp(X[..., 0], np.ones((2, 4), np.float32))[1](X[..., 0])
CACHE = attnmask.KVCache(2, 8, pages=4, page_size=16, dtype="int8", value_head_dim=4)
CACHE.new_sequence()

REPRS = {
    "gradients": (
        VJP(X),
        "FlashAttentionGrads(query=float32[1, 3, 2, 8], key=float32[1, 3, 2, 8], value=float32[1, 3, 2, 8], "
        "bias=float32[1, 1, 3, 3], softmax_aux=None, relative_bias=None, grid_bias=None)",
    ),
    "statistics": (
        attnmask.attention_statistics(X, X, of=("entropy", ("top_keys", 1))),
        "AttentionStatistics(key_sum=None, entropy=float32[1, 2, 3], max_logit=None, top_keys=int64[1, 2, 3, 1], "
        "top_weights=float32[1, 2, 3, 1])",
    ),
    "second gradients": (
        attnmask.FlashAttentionSecondGrads(X, X, X, X),
        "FlashAttentionSecondGrads(dout=float32[1, 3, 2, 8], query=float32[1, 3, 2, 8], "
        "key=float32[1, 3, 2, 8], value=float32[1, 3, 2, 8])",
    ),
    "gradients of linear attention": (
        attnmask.linear_attention_vjp(X, X, X)[1](X),
        "LinearAttentionGrads(query=float32[1, 3, 2, 8], key=float32[1, 3, 2, 8], value=float32[1, 3, 2, 8], "
        "decay=None, beta=None, initial_state=None)",
    ),
    "gradients of a convolution": (
        CONVOLUTION,
        "ShortConvolutionGrads(x=float32[1, 3, 2], weight=float32[2, 4], bias=None, initial_state=None)",
    ),
    "output of an operation": (OperationOutput(X),
        "OperationOutput(attention_outputs=float32[1, 3, 2, 8], attention_weights=None, lse=None)"),
    "cache": (
        CACHE,
        "KVCache(kv_heads=2, head_dim=8, value_head_dim=4, layers=1, pages=4, page_size=16, dtype=int8, sequences=1, "
        "free_pages=4, nbytes=2560)",
    ),
    "step": (CACHE.step([0], 2), "KVCacheStep(sequences=1, tokens=2, not begun, 0 of 1 layers attended)"),
    "plan of shards": (attnmask.ShardPlan(np.arange(1001), np.zeros(1000, int), 2),
        "ShardPlan(world=2, tokens=1000, chunks=1000)"),
    "mask": (
        attnmask.MaskInfo.causal(131_072),
        "MaskInfo(batch_size=1, heads=1, q_len=131072, kv_len=131072, base=full, terms=[& causal], holds=[], "
        "cached=[])",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REPRS)
def test_repr(name):
    value, expected = REPRS[name]
    assert repr(value) == expected
    assert str(value) == expected or name == "mask"


def test_repr_of_mask_tensors():
    pytest.importorskip("torch")
    import attnmask.torch

    made = attnmask.torch.mask_tensors(attnmask.MaskInfo.from_segments([[0] * 500]))
    assert repr(made).endswith(", tensors=(int32[1, 500],))")
    assert repr(made).startswith("MaskTensors(specification='[")
    assert len(repr(made)) < 150


def test_repr_of_a_cache_of_transformers():
    pytest.importorskip("transformers")
    from transformers import LlamaConfig

    import attnmask.transformers

    config = LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    cache = attnmask.transformers.PagedCache(config, pages=8, page_size=16)
    assert repr(cache) == f"PagedCache(layers=2, rows=0, kv={cache.kv!r})"
    assert cache.kv._repr_html_().startswith("<svg ")


def test_repr_of_results_of_jax():
    jnp = pytest.importorskip("jax.numpy")
    import attnmask.jax

    x, cache = jnp.ones((1, 1, 1, 8)), jnp.zeros((1, 4, 1, 8))
    result = attnmask.jax.flash_attention_with_kvcache(x, cache, cache, x, x, cache_seqlens=2)
    assert repr(result).startswith(
        "KVCacheResult(out=float32[1, 1, 1, 8], lse=None, k_cache=float32[1, 4, 1, 8], "
    )
