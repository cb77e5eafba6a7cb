"""FlashAttention 2.8's functions for CPU tensors, under the names, arguments and meanings that it has."""

from attnmask.flash_attn import bert_padding as bert_padding
from attnmask.flash_attn._functions import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from attnmask.flash_attn._install import install, uninstall

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
    "uninstall",
]
__dir__ = [*__all__, "bert_padding"].copy  # what completion offers
