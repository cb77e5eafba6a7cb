"""`flash_attention` for PyTorch: tensors in and out, and gradients by the package's own backward pass."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

try:
    import torch  # type: ignore[import-not-found, unused-ignore]
    from torch._guards import active_fake_mode  # type: ignore[import-not-found, unused-ignore]
    from torch.autograd import forward_ad  # type: ignore[import-not-found, unused-ignore]
    from torch.fx.experimental.proxy_tensor import get_proxy_mode  # type: ignore[import-not-found, unused-ignore]
except ImportError as _missing:
    raise ImportError("attnmask.torch needs PyTorch, which is not installed: pip install torch") from _missing

from attnmask import _flash as flash
from attnmask._arguments import describe, flag
from attnmask._flash_arguments import LEARNED
from attnmask._flash_backward import flash_attention_bwd

__all__ = ["flash_attention"]

_EARLY = torch._C.DispatchKey.PreDispatch  # where torch.export traces


def _to_tensor(array: NDArray[Any]) -> torch.Tensor:
    """The same memory."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) and value.requires_grad else value


def _is_traced() -> bool:
    """Whether PyTorch makes a graph of the operators that it sees, or has tensors without numbers."""
    if torch._C._is_tracing():
        return True
    modes = torch._C._len_torch_dispatch_stack() or torch._C._dispatch_tls_is_dispatch_key_included(_EARLY)
    return bool(modes) and (get_proxy_mode() is not None or active_fake_mode() is not None)


def _check_recorded(names: Iterable[str], tensors: Iterable[Any]) -> None:
    """PyTorch sees nothing of what happens in the core: where it has to, results would be wrong without an error."""
    if _is_traced():
        raise RuntimeError(
            "attnmask.torch.flash_attention cannot be traced (by make_fx, torch.jit.trace or torch.export, say): "
            "the graph would hold its result as a constant"
        )
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "attnmask.torch.flash_attention cannot be transformed (by grad, jvp, vmap or functionalize of torch.func)"
        )
    # In the forward pass of a function that brings a derivative of its own, tangents are not asked for.
    if forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled():
        for name, x in zip(names, tensors, strict=True):
            if isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call, unused-ignore]
                raise RuntimeError(
                    f"attnmask.torch.flash_attention has no forward-mode derivative: {name} must have no tangent"
                )


def _autocast(tensor: torch.Tensor) -> torch.Tensor:
    """In the type that PyTorch casts to for its own attention."""
    if tensor.is_floating_point() and tensor.dtype != torch.float64:
        return tensor.to(torch.get_autocast_dtype("cpu"))
    return tensor


class _FlashAttention(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """Arguments of which there are gradients, and all others."""

    @staticmethod
    def forward(
        ctx: Any, query: Any, key: Any, value: Any, bias: Any, softmax_aux: Any, more: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        arguments = dict(zip(LEARNED, (query, key, value, bias, softmax_aux), strict=True)) | more
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
        if torch.compiler.is_dynamo_compiling():  # where gradients are compiled, too
            return torch.compiler.disable(_FlashAttention.backward)(ctx, dout, dlse)  # type: ignore[no-untyped-call, no-any-return, unused-ignore]
        if torch.is_grad_enabled():
            raise RuntimeError(
                "attnmask.torch.flash_attention has no second derivative: create_graph must be False"
            )
        _check_recorded(("dout", "dlse"), (dout, dlse))
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
    too; gradients of gradients there are not. Under ``torch.autocast`` `query`, `key` and `value` are cast as by
    ``scaled_dot_product_attention``, and nothing else is. ``torch.compile`` leaves the call out of its graphs; tracers,
    forward-mode differentiation and ``torch.func`` are refused.

    Parameters
    ----------
    query, key, value : Tensor, shape [B, Tq, H, D], [B, Tk, Hkv, D] and [B, Tk, Hkv, Dv]
        Or without B, with `cum_seqlens_q` or `cum_seqlens_k`.
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
    if torch.compiler.is_dynamo_compiling():  # which cannot look into the core, and is imported by now
        return torch.compiler.disable(flash_attention)(  # type: ignore[no-untyped-call, unused-ignore]
            *(query, key, value, attention_mask, bias),
            softmax_aux=softmax_aux,
            return_lse=return_lse,
            **more,
        )
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {describe(tensor)}")
    if "out" in more:
        raise TypeError("flash_attention() of tensors got an unexpected keyword argument 'out'")
    with_lse = flag(return_lse, "return_lse")
    more = {"attention_mask": attention_mask} | {name: _detached(x) for name, x in more.items()}
    inputs = query, key, value, bias, softmax_aux
    _check_recorded(LEARNED, inputs)
    if torch.is_autocast_enabled("cpu"):
        inputs = *map(_autocast, (query, key, value)), bias, softmax_aux
    if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs):
        out, lse = _FlashAttention.apply(*inputs, more)  # type: ignore[no-untyped-call, unused-ignore]
        return (out, lse) if with_lse else out
    query, key, value, bias, softmax_aux = map(_detached, inputs)
    result = flash.flash_attention(
        query, key, value, bias=bias, softmax_aux=softmax_aux, return_lse=with_lse, **more
    )
    return tuple(map(_to_tensor, result)) if with_lse else _to_tensor(result)
