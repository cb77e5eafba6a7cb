"""FlashAttention's functions, made from their rows."""

from typing import Any

from attnmask._faces.flash_attn import ATTENTION, CACHE
from attnmask._faces.rows import Row, function, parameters
from attnmask.flash_attn._compute import attention, cache
from attnmask.torch._faces import TORCH

_FACE = TORCH._replace(integers="torch.Tensor", integers_given="Tensor of integers")


def _doc(row: Row) -> str:
    first, *others = row.results
    of_others = {
        "softmax_lse": "The logsumexp of each row, +inf if a row has no keys.",
        "S_dmask": "With dropout the weights, negative where they are dropped; otherwise empty.",
    }
    lines = [
        f"FlashAttention 2.8's function of this name on the CPU, by `attnmask.torch.{row.entry.__name__}`.",
        *("", "Parameters", "----------", *parameters(row.arguments, _FACE)),
        *("", "Returns", "-------", f"out : Tensor, shape {first.layout}"),
        *(
            line
            for x in others
            for line in (f"{x.name} : Tensor, shape {x.layout}", f"    {of_others[x.name]}")
        ),
        *("", "Examples", "--------", ">>> import torch", f">>> from attnmask.flash_attn import {row.name}"),
        *(line for line in row.examples["flash_attn"].splitlines() if line),
    ]
    return "\n    ".join(lines) + "\n    "


def _made(row: Row) -> Any:
    made = function(row, _FACE, (cache if row is CACHE else attention)(row), _doc(row))
    made.__module__ = "attnmask.flash_attn"
    return made


flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func = map(_made, ATTENTION[:3])
flash_attn_varlen_func, flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func = map(
    _made, ATTENTION[3:]
)
flash_attn_with_kvcache = _made(CACHE)
