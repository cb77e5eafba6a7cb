"""`flash_attention` for PyTorch: tensors in and out, and gradients by the package's own backward pass."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

try:
    import torch  # type: ignore[import-not-found, unused-ignore]
except ImportError as _missing:
    raise ImportError("attnmask.torch needs PyTorch, which is not installed: pip install torch") from _missing

from attnmask import flash
from attnmask.arguments import describe, flag
from attnmask.flash_gradient import flash_attention_bwd

__all__ = ["flash_attention"]

_LEARNED = ("query", "key", "value", "bias", "softmax_aux")


def _to_tensor(array: NDArray[Any]) -> torch.Tensor:
    """The same memory."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) and value.requires_grad else value


class _FlashAttention(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """Arguments of which there are gradients, and all others."""

    @staticmethod
    def forward(
        ctx: Any, query: Any, key: Any, value: Any, bias: Any, softmax_aux: Any, more: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        arguments = dict(zip(_LEARNED, (query, key, value, bias, softmax_aux), strict=True)) | more
        out, lse = map(
            _to_tensor, flash.flash_attention_fwd(**{name: _detached(x) for name, x in arguments.items()})
        )
        tensors = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}
        ctx.names = tuple(tensors)
        ctx.others = {name: x for name, x in arguments.items() if name not in tensors}
        ctx.save_for_backward(*tensors.values(), out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: "torch.Tensor | None", dlse: "torch.Tensor | None") -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "attnmask.torch.flash_attention has no second derivative: create_graph must be False"
            )
        *tensors, out, lse = map(_detached, ctx.saved_tensors)
        grads: tuple[Any, ...] = flash_attention_bwd(
            torch.zeros_like(out) if dout is None else _detached(dout),
            out=out,
            lse=lse,
            dlse=_detached(dlse),
            grad_bias=ctx.needs_input_grad[3],
            grad_softmax_aux=ctx.needs_input_grad[4],
            **dict(zip(ctx.names, tensors, strict=True)),
            **ctx.others,
        )
        wanted = zip(grads, ctx.needs_input_grad, strict=False)
        return *(_to_tensor(grad) if needed else None for grad, needed in wanted), None


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    bias: Any = None,
    *,
    softmax_aux: Any = None,
    return_lse: bool = False,
    **more: Any,
) -> Any:
    """`attnmask.flash_attention` of tensors on the CPU, which share their memory with the package.

    There are gradients of `query`, `key`, `value`, `bias`, `softmax_aux`, and with `return_lse` through the logsumexp,
    too; gradients of gradients there are not.

    Parameters
    ----------
    query, key, value : Tensor, shape [B, Tq, H, D], [B, Tk, Hkv, D] and [B, Tk, Hkv, Dv], or without B
    attention_mask : Tensor, array_like or MaskInfo, optional
    bias, softmax_aux : Tensor or array_like, optional
    return_lse : bool
    **more
        The other arguments of `attnmask.flash_attention` but `out`, by their names.

    Returns
    -------
    Tensor, or tuple of two Tensors if `return_lse`

    Examples
    --------
    >>> import torch
    >>> import attnmask.torch
    >>> query = torch.zeros(1, 3, 1, 8, requires_grad=True)
    >>> value = torch.arange(3.0).reshape(1, 3, 1, 1).requires_grad_()
    >>> out = attnmask.torch.flash_attention(query, query, value, causal=True)
    >>> out.flatten().tolist()
    [0.0, 0.5, 1.0]
    >>> out.sum().backward()
    >>> [round(x, 3) for x in value.grad.flatten().tolist()]
    [1.833, 0.833, 0.333]
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {describe(tensor)}")
    if "out" in more:
        raise TypeError("flash_attention() of tensors got an unexpected keyword argument 'out'")
    with_lse = flag(return_lse, "return_lse")
    more = {"attention_mask": attention_mask} | {name: _detached(x) for name, x in more.items()}
    inputs = query, key, value, bias, softmax_aux
    if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs):
        out, lse = _FlashAttention.apply(*inputs, more)  # type: ignore[no-untyped-call, unused-ignore]
        return (out, lse) if with_lse else out
    query, key, value, bias, softmax_aux = map(_detached, inputs)
    result = flash.flash_attention(
        query, key, value, bias=bias, softmax_aux=softmax_aux, return_lse=with_lse, **more
    )
    return tuple(map(_to_tensor, result)) if with_lse else _to_tensor(result)
