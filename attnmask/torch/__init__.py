"""Functions of CPU tensors, with gradients, in graphs and under transforms: see `flash_attention`."""

from attnmask.torch._attention import flash_attention, flash_attention_with_kvcache, write_kvcache
from attnmask.torch._handed_back import InstallReport, install_report
from attnmask.torch._install import install, installed, uninstall
from attnmask.torch._linear import (
    chunk_global_cumsum,
    chunk_global_cumsum_scalar,
    chunk_global_cumsum_vector,
    chunk_local_cumsum,
    chunk_local_cumsum_scalar,
    chunk_local_cumsum_vector,
    linear_attention,
    linear_attention_step,
    short_convolution,
    short_convolution_step,
)
from attnmask.torch._masks import mask_tensors
from attnmask.torch._merge import merge_attention_states
from attnmask.torch._pages import KVCache
from attnmask.torch._ring import ring_attention
from attnmask.torch._states import MaskTensors
from attnmask.torch._tokens import pack, shard_sequence, unpack, unshard_sequence
from attnmask.torch._weights import (
    attention_statistics,
    attention_statistics_with_kvcache,
    attention_weights,
)

__all__ = [
    "InstallReport",
    "KVCache",
    "MaskTensors",
    "attention_statistics",
    "attention_statistics_with_kvcache",
    "attention_weights",
    "chunk_global_cumsum",
    "chunk_global_cumsum_scalar",
    "chunk_global_cumsum_vector",
    "chunk_local_cumsum",
    "chunk_local_cumsum_scalar",
    "chunk_local_cumsum_vector",
    "flash_attention",
    "flash_attention_with_kvcache",
    "install",
    "install_report",
    "installed",
    "linear_attention",
    "linear_attention_step",
    "mask_tensors",
    "merge_attention_states",
    "pack",
    "ring_attention",
    "shard_sequence",
    "short_convolution",
    "short_convolution_step",
    "uninstall",
    "unpack",
    "unshard_sequence",
    "write_kvcache",
]
__dir__ = __all__.copy  # what completion offers
