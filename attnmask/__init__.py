"""Attention masks, packed sequences, chunked cumulative sums and exact flash attention for NumPy."""

from attnmask._common.loading import _core as _core  # isort: skip  # before all that needs the core

from threading import main_thread
from typing import TYPE_CHECKING

from attnmask._attention.flash_attention import (
    attention_statistics,
    attention_weights,
    flash_attention,
    flash_attention_bwd,
    flash_attention_bwd_vjp,
    flash_attention_fwd,
    flash_attention_jvp,
    flash_attention_vjp,
)
from attnmask._attention.forward import dropout_keep_mask, merge_attention_states, merge_attention_states_vjp
from attnmask._attention.hints import BwdParams, FwdParams
from attnmask._attention.problem import FlashAttentionGrads, FlashAttentionSecondGrads
from attnmask._attention.t5 import t5_relative_bias, t5_relative_bias_vjp
from attnmask._attention.weights import AttentionStatistics
from attnmask._cache import attend
from attnmask._cache.flash_attention_with_kvcache import (
    attention_statistics_with_kvcache,
    flash_attention_with_kvcache,
)
from attnmask._cache.pages import KVCache
from attnmask._cache.quantize import quantize_kv
from attnmask._cache.write_kvcache import write_kvcache
from attnmask._common import arguments
from attnmask._common.debug import get_debug_mode, set_debug_mode
from attnmask._common.pickles import by_public_path
from attnmask._common.pickles import made as _made
from attnmask._common.runtime import __version__, get_num_threads, set_num_threads, show_config
from attnmask._common.warnings import AttnmaskWarning
from attnmask._faces import habits
from attnmask._linear.attention import linear_attention, linear_attention_step, linear_attention_vjp
from attnmask._linear.grads import LinearAttentionGrads, ShortConvolutionGrads
from attnmask._linear.short_convolution import (
    short_convolution,
    short_convolution_step,
    short_convolution_vjp,
)
from attnmask._masks.convert import (
    attention_mask_to_padding_segment_ids,
    attention_mask_to_qkv_cu_seqlens,
    cu_seqlens_to_mask,
    cu_seqlens_to_pairs,
    mask_to_segment_ids,
    pairs_to_cu_seqlens,
    positions_from_segment_ids,
    qkv_cu_seqlens_to_attention_mask,
    qkv_cu_seqlens_to_qkv_masks,
    qkv_masks_to_cu_seqlens,
    segment_ids_to_cu_seqlens,
    segment_ids_to_mask,
    segment_ids_to_qkv_masks,
)
from attnmask._masks.info import MaskInfo
from attnmask._masks.sharding import MaskSharding
from attnmask._sequences.cumsum import (
    chunk_global_cumsum,
    chunk_global_cumsum_scalar,
    chunk_global_cumsum_vector,
    chunk_global_cumsum_vjp,
    chunk_local_cumsum,
    chunk_local_cumsum_scalar,
    chunk_local_cumsum_vector,
    chunk_local_cumsum_vjp,
)
from attnmask._sequences.packed import (
    cdiv,
    identity_dtype_convert,
    prepare_chunk_indices,
    prepare_chunk_offsets,
    prepare_cu_seqlens_from_mask,
    prepare_lens,
    prepare_lens_from_mask,
    prepare_position_ids,
    prepare_sequence_ids,
    prepare_token_indices,
)
from attnmask._sequences.padding import pack, unpack
from attnmask._sharded.shards import ShardPlan, plan_shards, shard_sequence, unshard_sequence

_core.use(  # so that C imports nothing
    main_thread().ident,
    describe=arguments.describe,
    as_array=arguments.as_array,
    mask_array=arguments.mask_array,
    share_memory=arguments.share_memory,
    table_of=attend.table_of,
    tokens_before=attend.tokens_before,
    options=attend.options,
    mask_program=attend.mask_program,
    habit=habits.ask,
)
del arguments, attend, habits, main_thread

__all__ = [
    "AttentionStatistics",
    "AttnmaskWarning",
    "BwdParams",
    "FlashAttentionGrads",
    "FlashAttentionSecondGrads",
    "FwdParams",
    "KVCache",
    "LinearAttentionGrads",
    "MaskInfo",
    "MaskSharding",
    "ShardPlan",
    "ShortConvolutionGrads",
    "__version__",
    "attention_mask_to_padding_segment_ids",
    "attention_mask_to_qkv_cu_seqlens",
    "attention_statistics",
    "attention_statistics_with_kvcache",
    "attention_weights",
    "cdiv",
    "chunk_global_cumsum",
    "chunk_global_cumsum_scalar",
    "chunk_global_cumsum_vector",
    "chunk_global_cumsum_vjp",
    "chunk_local_cumsum",
    "chunk_local_cumsum_scalar",
    "chunk_local_cumsum_vector",
    "chunk_local_cumsum_vjp",
    "cu_seqlens_to_mask",
    "cu_seqlens_to_pairs",
    "dropout_keep_mask",
    "flash_attention",
    "flash_attention_bwd",
    "flash_attention_bwd_vjp",
    "flash_attention_fwd",
    "flash_attention_jvp",
    "flash_attention_vjp",
    "flash_attention_with_kvcache",
    "get_debug_mode",
    "get_num_threads",
    "identity_dtype_convert",
    "linear_attention",
    "linear_attention_step",
    "linear_attention_vjp",
    "mask_to_segment_ids",
    "merge_attention_states",
    "merge_attention_states_vjp",
    "pack",
    "pairs_to_cu_seqlens",
    "plan_shards",
    "positions_from_segment_ids",
    "prepare_chunk_indices",
    "prepare_chunk_offsets",
    "prepare_cu_seqlens_from_mask",
    "prepare_lens",
    "prepare_lens_from_mask",
    "prepare_position_ids",
    "prepare_sequence_ids",
    "prepare_token_indices",
    "qkv_cu_seqlens_to_attention_mask",
    "qkv_cu_seqlens_to_qkv_masks",
    "qkv_masks_to_cu_seqlens",
    "quantize_kv",
    "segment_ids_to_cu_seqlens",
    "segment_ids_to_mask",
    "segment_ids_to_qkv_masks",
    "set_debug_mode",
    "set_num_threads",
    "shard_sequence",
    "short_convolution",
    "short_convolution_step",
    "short_convolution_vjp",
    "show_config",
    "t5_relative_bias",
    "t5_relative_bias_vjp",
    "unpack",
    "unshard_sequence",
    "write_kvcache",
]

_MODULES = ("ejkernel", "flash_attn", "jax", "natten", "operations", "torch", "transformers")


def __dir__() -> list[str]:
    """Return what completion offers."""
    return [*__all__, *_MODULES]


for _name in __all__:  # so that messages, pictures of types and pickles name what users import
    _thing = globals()[_name]
    if isinstance(_thing, type) and not issubclass(_thing, Warning):
        by_public_path(_thing)
    elif hasattr(_thing, "__module__"):
        _thing.__module__ = "attnmask"
_made.__module__, _made.__qualname__ = "attnmask", "_made"
del _name, _thing, by_public_path

if not TYPE_CHECKING:  # a checker would take every name

    def __getattr__(name: str) -> object:
        """Load submodules that need more than NumPy when they are first used."""
        import sys
        from importlib import import_module

        if name in _MODULES:
            return import_module(f"attnmask.{name}")
        raise AttributeError(
            f"module 'attnmask' has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )


del TYPE_CHECKING
