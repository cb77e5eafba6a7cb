"""FlashAttention's functions, made from their rows."""

from typing import Any

from attnmask._faces.flash_attn import ATTENTION, CACHE
from attnmask._faces.rows import Row, function, parameters
from attnmask.flash_attn._compute import attention, cache
from attnmask.torch._faces import TORCH

_FACE = TORCH._replace(integers="torch.Tensor", integers_given="Tensor of integers")


def _made(row: Row) -> Any:
    with_cache = row is CACHE
    lines = [
        f"Attend as FlashAttention 2.8 does, on the CPU: `attnmask.torch.{row.entry.__name__}` under its names.",
        "",
        "Parameters",
        "----------",
        *parameters(row.arguments, _FACE),
        "",
        "Returns",
        "-------",
        f"out : Tensor, shape {row.results[0].layout}",
        f"softmax_lse : Tensor, shape {row.results[1].layout}",
        f"    Only with `{row.all}`: the logsumexp of each row, +inf if a row has no keys.",
    ]
    if not with_cache:
        lines += [
            "S_dmask : Tensor",
            f"    Only with `{row.all}`: with dropout the weights, negative where they are dropped; otherwise empty.",
        ]
    made = function(row, _FACE, (cache if with_cache else attention)(row), "\n    ".join(lines) + "\n    ")
    made.__module__ = "attnmask.flash_attn"
    return made


flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func = map(_made, ATTENTION[:3])
flash_attn_varlen_func, flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func = map(
    _made, ATTENTION[3:]
)
flash_attn_with_kvcache = _made(CACHE)
