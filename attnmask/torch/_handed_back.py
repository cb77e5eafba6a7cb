"""The calls that `install` hands back to PyTorch, and why.

Calls of ``scaled_dot_product_attention`` that PyTorch would compute by its formula go through the table of reasons. To
add a reason, add its row.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from attnmask._attention.batch import broadcasts
from attnmask.torch import _operators as operators
from attnmask.torch._import import torch
from attnmask.torch._types import MaybeTensor


class _Call(NamedTuple):
    tensors: tuple[MaybeTensor, ...]
    query: tuple[int, ...]  # their shapes
    key: tuple[int, ...]
    value: tuple[int, ...]
    dropout: float
    dropout_mask: MaybeTensor
    gqa: bool


def readable(tensors: Iterable[MaybeTensor]) -> bool:
    """Return whether the core can read these in place; a mask among them is a bias."""
    return all(
        x is None or (x.dtype in operators.TYPES and x.layout is torch.strided and not x.is_neg())
        for x in tensors
    )


def _fitting(call: _Call) -> bool:
    query, key, value, _ = call.tensors
    return readable(call.tensors) and query.dtype == key.dtype == value.dtype  # type: ignore[union-attr]


def _sharing(call: _Call) -> bool:
    heads, kv_heads = call.query[-3], call.key[-3]
    return heads == kv_heads or ((call.gqa or kv_heads == 1) and kv_heads > 0 and heads % kv_heads == 0)


def _broadcasting(bias: torch.Tensor, call: _Call) -> bool:
    return 0 < bias.ndim <= len(call.query) and broadcasts(bias.shape, (*call.query[:-1], call.key[-2]))


TYPE = (
    "tensors are of types other than float16, bfloat16, float32 and float64, or query, key and value of several: "
    "cast them (write x.resolve_neg() if x.is_neg())"
)
TRANSFORM = "torch.func or forward mode transforms the call: call attnmask.torch.flash_attention"
_REASONS: dict[str, Callable[[_Call], bool]] = {
    "a mode of PyTorch sees the call, or makes a graph of it: call attnmask.torch.flash_attention": (
        lambda call: operators.is_traced()
    ),
    "tensors are of a subclass, or on another device: pass plain tensors on the CPU": (
        lambda call: not operators.are_plain(call.tensors)
    ),
    "sdpa_kernel excludes flash attention: add SDPBackend.FLASH_ATTENTION": (
        lambda call: not torch.backends.cuda.flash_sdp_enabled()
    ),
    TYPE: lambda call: not _fitting(call),
    "query, key and value do not have equally many axes, three or more: reshape them": (
        lambda call: not 2 < len(call.query) == len(call.key) == len(call.value)
    ),
    "query and key differ in the axes before the heads, or key and value up to the tokens: expand them": (
        lambda call: call.query[:-3] != call.key[:-3] or call.key[:-1] != call.value[:-1]
    ),
    "key has other heads than query: write enable_gqa=True if they are fewer": lambda call: (
        not _sharing(call)
    ),
    "query and key differ in head_dim": lambda call: call.query[-1] != call.key[-1],
    "attn_mask has no axes, or does not broadcast to [..., H, Tq, Tk]: expand it": (
        lambda call: call.tensors[3] is not None and not _broadcasting(call.tensors[3], call)
    ),
    "dropout_p is 1, and the result is 0: write less": lambda call: not 0 <= call.dropout < 1,
    "gradients are batched, or differentiated with an attn_mask that needs a gradient or with three axes: "
    "write attn_mask.detach(), or x[None]": lambda call: call.dropout_mask is not None,
    TRANSFORM: lambda call: operators.in_forward_mode() or operators.are_transforms_active(),
}
SERVED = ""  # no reason
counts = dict.fromkeys((SERVED, *_REASONS), 0)


def reason_of(tensors: tuple[Any, ...], dropout: float, dropout_mask: MaybeTensor, gqa: bool) -> str | None:
    """Return why PyTorch computes a call, if it does."""
    query, key, value = (tuple(x.shape) for x in tensors[:3])
    call = _Call(tensors, query, key, value, dropout, dropout_mask, gqa)
    for reason, applies in _REASONS.items():
        if applies(call):
            return reason
    return None


class InstallReport(NamedTuple):
    """Who has computed ``scaled_dot_product_attention``, as returned by `install_report`. It prints in lines.

    Parameters
    ----------
    served : int
        How many calls ran on attnmask.
    handed_back : dict of str to int
        How many PyTorch computed, by reasons that say what to change.

    Examples
    --------
    >>> print(attnmask.torch.InstallReport(served=2, handed_back={"a tensor is sparse": 1}))
            2  calls ran on attnmask
            1  a tensor is sparse
    """

    served: int
    handed_back: dict[str, int]

    def __str__(self) -> str:
        counts = {"calls ran on attnmask": self.served} | self.handed_back
        return "\n".join(f"{count:9,}  {reason}" for reason, count in counts.items())


def install_report() -> InstallReport:
    """Return how many calls of ``scaled_dot_product_attention`` on the CPU ran on attnmask since the last `install`,
    and how many PyTorch computed, and why.

    Calls that PyTorch takes apart before they reach the CPU do not count: those that a compiled graph does not have as
    one operator, and some under ``torch.vmap``. A call that a compiled graph leaves to PyTorch counts when it is
    traced.

    Examples
    --------
    >>> import torch
    >>> import attnmask.torch
    >>> query = torch.zeros(1, 2, 4, 8)
    >>> with attnmask.torch.installed():
    ...     for dropout_p in (0.0, 0.1, 1.0):
    ...         _ = torch.nn.functional.scaled_dot_product_attention(query, query, query, dropout_p=dropout_p)
    >>> print(attnmask.torch.install_report())
            2  calls ran on attnmask
            1  dropout_p is 1, and the result is 0: write less
    """
    served, *handed_back = counts.items()
    return InstallReport(served[1], {reason: count for reason, count in handed_back if count})
