"""Every public function takes the arrays of other libraries as it takes NumPy's, and returns NumPy's."""

import sys

import ml_dtypes
import numpy as np
import pytest

import attnmask
from attnmask import MaskInfo

STARTS = np.array([0, 2, 5], np.int32)
IDS = np.array([[0, 0, 1, 1, -1]], np.int32)
MASK = (IDS[:, :, None] == IDS[:, None]) & (IDS >= 0)[..., None]
PADDING = np.array([[True, True, False], [True, False, False]])
PAIRS = np.array([0, 2, 0, 1], np.int32)
SUMS = np.arange(10, dtype=np.float32).reshape(1, 5, 2)
RNG = np.random.default_rng(0)
QUERY, KEY, VALUE = (RNG.standard_normal((1, 5, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
OUT, LSE = attnmask.flash_attention_fwd(QUERY, KEY, VALUE)
BIAS, SINKS = np.ones((5, 5), np.float32), np.ones(2, np.float32)
TABLE = np.arange(16, dtype=np.float32).reshape(8, 2)
CONV, CONV_STATE = np.ones((2, 4), np.float32), np.ones((2, 2, 3), np.float32)
LINEAR_STATE = np.ones((2, 4, 8, 8), np.float32)
PARTS = np.stack([OUT, OUT + 1]), np.stack([LSE, LSE - 1])


def both_ways(vjp_of):
    """The result of a function with gradients, and the gradients for that result as cotangent."""
    result, vjp = vjp_of
    return result, vjp(*result) if isinstance(result, tuple) else vjp(result)


def t5_both_ways(bias_and_vjp, x):
    """A relative bias without its least distance, and the gradient for that bias as cotangent."""
    (bias, _), vjp = bias_and_vjp
    return bias, vjp(x(bias))


def written(x):
    """Caches with tokens at some of their slots."""
    caches = np.zeros((2, 1, 8, 2, 8), np.float32)
    attnmask.write_kvcache(*caches, x(KEY[0]), x(VALUE[0]), x(np.array([4, -1, 0, 7, 2])))
    return caches


# Functions that take arrays, by name
CALLS = {
    "cdiv": lambda x: attnmask.cdiv(x(STARTS), x(STARTS + 1)),
    "prepare_lens": lambda x: attnmask.prepare_lens(x(STARTS)),
    "prepare_position_ids": lambda x: attnmask.prepare_position_ids(x(STARTS)),
    "prepare_sequence_ids": lambda x: attnmask.prepare_sequence_ids(x(STARTS)),
    "prepare_token_indices": lambda x: attnmask.prepare_token_indices(x(STARTS)),
    "prepare_chunk_indices": lambda x: attnmask.prepare_chunk_indices(x(STARTS), 2),
    "prepare_chunk_offsets": lambda x: attnmask.prepare_chunk_offsets(x(STARTS), 2),
    "prepare_lens_from_mask": lambda x: attnmask.prepare_lens_from_mask(x(PADDING)),
    "prepare_cu_seqlens_from_mask": lambda x: attnmask.prepare_cu_seqlens_from_mask(x(PADDING)),
    "identity_dtype_convert": lambda x: attnmask.identity_dtype_convert("float64").vjp(1)[1](x(SUMS)),
    "chunk_local_cumsum": lambda x: attnmask.chunk_local_cumsum(x(SUMS), 2, cu_seqlens=x(STARTS)),
    "chunk_local_cumsum_scalar": lambda x: attnmask.chunk_local_cumsum_scalar(x(SUMS), 2),
    "chunk_local_cumsum_vector": lambda x: attnmask.chunk_local_cumsum_vector(x(QUERY), 2),
    "chunk_local_cumsum_vjp": lambda x: both_ways(
        attnmask.chunk_local_cumsum_vjp(x(SUMS), 2, cu_seqlens=x(STARTS))
    ),
    "chunk_global_cumsum": lambda x: attnmask.chunk_global_cumsum(x(SUMS), cu_seqlens=x(STARTS)),
    "chunk_global_cumsum_scalar": lambda x: attnmask.chunk_global_cumsum_scalar(x(SUMS)),
    "chunk_global_cumsum_vector": lambda x: attnmask.chunk_global_cumsum_vector(x(QUERY)),
    "chunk_global_cumsum_vjp": lambda x: both_ways(attnmask.chunk_global_cumsum_vjp(x(SUMS))),
    "mask_to_segment_ids": lambda x: attnmask.mask_to_segment_ids(x(MASK)),
    "segment_ids_to_mask": lambda x: attnmask.segment_ids_to_mask((x(IDS), x(IDS))),
    "segment_ids_to_qkv_masks": lambda x: attnmask.segment_ids_to_qkv_masks(x(IDS), x(IDS)),
    "segment_ids_to_cu_seqlens": lambda x: attnmask.segment_ids_to_cu_seqlens(x(IDS)),
    "positions_from_segment_ids": lambda x: attnmask.positions_from_segment_ids(x(IDS)),
    "attention_mask_to_padding_segment_ids": lambda x: attnmask.attention_mask_to_padding_segment_ids(
        x(MASK)
    ),
    "attention_mask_to_qkv_cu_seqlens": lambda x: attnmask.attention_mask_to_qkv_cu_seqlens(x(MASK)),
    "qkv_masks_to_cu_seqlens": lambda x: attnmask.qkv_masks_to_cu_seqlens(x(PADDING), x(PADDING)),
    "qkv_cu_seqlens_to_qkv_masks": lambda x: attnmask.qkv_cu_seqlens_to_qkv_masks(
        x(PAIRS), max_q_len=3, cu_seqlens_kv=x(PAIRS), max_kv_len=3
    ),
    "qkv_cu_seqlens_to_attention_mask": lambda x: attnmask.qkv_cu_seqlens_to_attention_mask(
        x(PAIRS), max_q_len=3
    ),
    "cu_seqlens_to_mask": lambda x: attnmask.cu_seqlens_to_mask(x(PAIRS), 3),
    "cu_seqlens_to_pairs": lambda x: attnmask.cu_seqlens_to_pairs(x(STARTS)),
    "pairs_to_cu_seqlens": lambda x: attnmask.pairs_to_cu_seqlens(x(PAIRS)),
    "MaskInfo": lambda x: (
        MaskInfo(x(MASK)).attention_mask,
        MaskInfo.from_segments(x(IDS)).apply_causal(x(np.array([1]))).attention_mask,
        MaskInfo.from_cu_seqlens(x(STARTS), packed=True).attention_mask,
        MaskInfo.from_lengths(x(STARTS)).attention_mask,
        MaskInfo.from_padding_mask(x(PADDING)).attention_mask,
    ),
    "flash_attention": lambda x: attnmask.flash_attention(
        x(QUERY),
        x(KEY),
        x(VALUE),
        x(MASK),
        bias=x(BIAS),
        softmax_aux=x(SINKS),
        causal_offset=x(np.array([0])),
    ),
    "flash_attention_fwd": lambda x: attnmask.flash_attention_fwd(
        x(QUERY[0]), x(KEY[0]), x(VALUE[0]), cum_seqlens_q=x(STARTS), cum_seqlens_k=x(STARTS)
    ),
    "flash_attention_vjp": lambda x: both_ways(
        attnmask.flash_attention_vjp(
            x(QUERY), x(KEY), x(VALUE), q_segment_ids=x(IDS), kv_segment_ids=x(IDS), return_lse=True
        )
    ),
    "flash_attention_bwd": lambda x: attnmask.flash_attention_bwd(
        *map(x, (OUT, QUERY, KEY, VALUE, OUT, LSE)), dlse=x(LSE)
    ),
    "flash_attention_with_kvcache": lambda x: attnmask.flash_attention_with_kvcache(
        x(QUERY[:, :2]), x(KEY), x(VALUE), cache_seqlens=x(STARTS[1:2]), block_table=x(STARTS[None, :1])
    ),
    "write_kvcache": written,
    "quantize_kv": lambda x: attnmask.quantize_kv(x(KEY), "int8", -1),
    "merge_attention_states": lambda x: attnmask.merge_attention_states(*map(x, PARTS)),
    "merge_attention_states_vjp": lambda x: both_ways(
        attnmask.merge_attention_states_vjp([x(part) for part in PARTS[0]], [x(part) for part in PARTS[1]])
    ),
    "short_convolution": lambda x: attnmask.short_convolution(
        x(SUMS), x(CONV), x(CONV[:, 0]), cu_seqlens=x(STARTS), initial_state=x(CONV_STATE)
    ),
    "short_convolution_vjp": lambda x: both_ways(
        attnmask.short_convolution_vjp(x(SUMS), x(CONV), x(CONV[:, 0]), activation="silu")
    ),
    "short_convolution_step": lambda x: attnmask.short_convolution_step(
        x(SUMS[0, :2]), x(CONV), CONV_STATE.copy(), x(CONV[:, 0]), state_indices=x(np.array([1, 0]))
    ),
    "linear_attention": lambda x: attnmask.linear_attention(
        x(KEY),
        x(VALUE),
        x(QUERY),
        decay=x(-BIAS[None, :, :4]),
        beta=x(BIAS[None, :, :4]),
        cu_seqlens=x(STARTS),
    ),
    "linear_attention_vjp": lambda x: both_ways(
        attnmask.linear_attention_vjp(x(KEY), x(VALUE), x(QUERY), decay=x(-BIAS[0, :4]), return_state=True)
    ),
    "linear_attention_step": lambda x: attnmask.linear_attention_step(
        *(x(part[0, :2]) for part in (KEY, VALUE, QUERY)),
        LINEAR_STATE.copy(),
        state_indices=x(np.array([1, 0])),
    ),
    "t5_relative_bias": lambda x: attnmask.t5_relative_bias(x(TABLE), 5, 5)[0],
    "t5_relative_bias_vjp": lambda x: t5_both_ways(attnmask.t5_relative_bias_vjp(x(TABLE), 5, 5), x),
}
NOT_OF_ARRAYS = {
    "AttnmaskWarning",
    "BwdParams",
    "FlashAttentionGrads",
    "FwdParams",
    "KVCache",
    "LinearAttentionGrads",
    "MaskSharding",
    "ShardPlan",
    "ShortConvolutionGrads",
    "__version__",
    "dropout_keep_mask",
    "get_debug_mode",
    "get_num_threads",
    "pack",  # gives back what it is given
    "plan_shards",
    "set_debug_mode",
    "set_num_threads",
    "shard_sequence",  # gives back what it is given
    "show_config",
    "unpack",
    "unshard_sequence",
}


def flat(result) -> list:
    if isinstance(result, (tuple, list)):
        return [array for part in result for array in flat(part)]
    return [result]


def test_nothing_is_left_out():
    assert set(CALLS) | NOT_OF_ARRAYS == set(attnmask.__all__)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("library", ["numpy", "torch", "jax.numpy"])
def test_arrays_of(library, name):
    convert = pytest.importorskip(library).asarray
    right, got = flat(CALLS[name](np.asarray)), flat(CALLS[name](convert))
    assert len(got) == len(right) > 0
    for one, other in zip(got, right, strict=True):
        assert type(one) is type(other)
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("library", ["torch", "jax.numpy"])
def test_bfloat16_of(library):
    module = pytest.importorskip(library)
    wide = [module.asarray(array) for array in (QUERY, KEY, VALUE)]
    narrow = [x.bfloat16() if library == "torch" else x.astype("bfloat16") for x in wide]
    right = attnmask.flash_attention(*(x.astype(ml_dtypes.bfloat16) for x in (QUERY, KEY, VALUE)))
    got = attnmask.flash_attention(*narrow)
    assert got.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(got, right)


def test_bfloat16_without_ml_dtypes(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ImportError, match="key is of bfloat16, for which NumPy needs ml_dtypes"):
        attnmask.flash_attention(QUERY, torch.zeros(1, 5, 2, 8, dtype=torch.bfloat16), VALUE)
