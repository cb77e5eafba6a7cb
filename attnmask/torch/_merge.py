"""`merge_attention_states` for PyTorch, and the operators ``attnmask::merge_attention_states`` and ``…_backward``.

Second derivatives, forward mode and `torch.func` are those of a formula in PyTorch's own operations.
"""

from collections.abc import Sequence
from math import inf

import numpy as np

from attnmask._attention import forward as attention
from attnmask._common.arguments import describe, suit_hint
from attnmask._common.loading import _core
from attnmask._common.types import Array
from attnmask.torch._import import torch
from attnmask.torch._operators import (
    are_transforms_active,
    check_devices,
    check_tensor,
    in_numpy,
    in_place,
    wide_dtype,
    with_tangents,
)
from attnmask.torch._states import to_tensor
from attnmask.torch._types import Context

_NAME = "merge_attention_states"


def _arrays(tensors: Sequence[torch.Tensor], name: str) -> tuple[Array, ...]:
    return tuple(in_place(x.detach(), name) for x in tensors)


def _merge(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = attention.merge_attention_states(_arrays(outs, "outs"), _arrays(lses, "lses"))
    return to_tensor(out), to_tensor(lse)


def _formula(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge by operations that have all derivatives."""
    wide = wide_dtype(outs[0].dtype)
    logs = torch.stack([x.to(wide) for x in lses])
    dead = logs.isinf()
    logs = torch.where(dead, torch.finfo(wide).min / 4, logs)
    lse = logs.logsumexp(0)
    shares = torch.where(dead, 0, (logs - lse).exp()).transpose(-1, -2).unsqueeze(-1)
    parts = torch.where(dead.transpose(-1, -2).unsqueeze(-1), 0, torch.stack(outs).to(wide))
    return (shares * parts).sum(0).to(outs[0].dtype), torch.where(dead.all(0), -inf, lse)


def _merge_backward(
    outs: list[torch.Tensor], lses: list[torch.Tensor], dout: torch.Tensor, dlse: torch.Tensor
) -> list[torch.Tensor]:
    gradients = (in_place(x.detach(), name) for name, x in (("dout", dout), ("dlse", dlse)))
    douts, dlses = _core.merge_backward(_arrays(outs, "outs"), _arrays(lses, "lses"), *gradients)
    return [to_tensor(x) for x in (*douts, *dlses)]


def _names(tensors: Sequence[torch.Tensor]) -> list[str]:
    return [_NAME] * len(tensors)


def _like(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)


_operator = torch.library.custom_op(f"attnmask::{_NAME}", _merge, mutates_args=(), device_types="cpu")
_backward = torch.library.custom_op(
    f"attnmask::{_NAME}_backward", _merge_backward, mutates_args=(), device_types="cpu"
)


@_operator.register_fake
def _(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    check_devices(("outs", "lses"), (outs, lses))
    return _like(outs[0]), _like(lses[0], wide_dtype(outs[0].dtype))


@_backward.register_fake
def _(
    outs: list[torch.Tensor], lses: list[torch.Tensor], dout: torch.Tensor, dlse: torch.Tensor
) -> list[torch.Tensor]:
    check_devices(("outs", "lses", "dout", "dlse"), (outs, lses, dout, dlse))
    return [*map(_like, outs), *(_like(x, wide_dtype(outs[0].dtype)) for x in lses)]


def _keep(ctx: Context, inputs: tuple[list[torch.Tensor], list[torch.Tensor]], output: object) -> None:
    outs, lses = inputs
    ctx.parts, ctx.types = len(outs), [x.dtype for x in lses]
    ctx.save_for_backward(*outs, *lses)


def _gradients(
    ctx: Context, dout: torch.Tensor, dlse: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    saved, n = list(ctx.saved_tensors), ctx.parts
    given = (*saved, dout, dlse)
    if torch.is_grad_enabled() or with_tangents(_names(given), given):
        with torch.enable_grad():
            inputs = [x if x.requires_grad else x.detach().requires_grad_() for x in saved]
            grads = torch.autograd.grad(
                _formula(inputs[:n], inputs[n:]), inputs, (dout, dlse), create_graph=True
            )
    else:
        grads = _backward(saved[:n], saved[n:], dout, dlse)
    return list(grads[:n]), [x.to(dtype) for x, dtype in zip(grads[n:], ctx.types, strict=True)]


_operator.register_autograd(_gradients, setup_context=_keep)


def _like_array(x: torch.Tensor) -> Array:
    with torch._C._DisableFuncTorch():  # which would transform the tensor that NumPy's type is read from
        dtype = in_numpy(x.dtype, "outs")
    return np.broadcast_to(np.zeros((), dtype), x.shape)


def _list(tensors: object, name: str) -> list[torch.Tensor]:
    """Return the tensors of a sequence, or of a stack."""
    if not isinstance(tensors, (list, tuple, torch.Tensor)) or (
        isinstance(tensors, torch.Tensor) and not tensors.ndim
    ):
        raise TypeError(f"{name} must be a sequence of tensors, got {describe(tensors)}")
    parts = list(tensors)
    for x in parts:
        check_tensor(x, name)
    return parts


def merge_attention_states(
    outs: Sequence[torch.Tensor] | torch.Tensor, lses: Sequence[torch.Tensor] | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over parts of the keys into attention over all of them.

    As `attnmask.merge_attention_states`, for CPU tensors and with gradients. ``torch.compile`` and ``torch.export`` see
    one operator. Derivatives of any order, forward mode and ``torch.func`` are supported.

    Parameters
    ----------
    outs : sequence of Tensor, each of shape [B, T, H, D] or [T, H, D]; or a stack of them
    lses : sequence of Tensor, each of shape [B, H, T] or [H, T]; or a stack of them

    Returns
    -------
    out : Tensor, shape [B, T, H, D] or [T, H, D]
    lse : Tensor, shape [B, H, T] or [H, T]

    Examples
    --------
    >>> import torch
    >>> import attnmask.torch
    >>> query, key, value = torch.randn(3, 1, 8, 2, 16)
    >>> parts = [
    ...     attnmask.torch.flash_attention(query, key[:, part], value[:, part], return_lse=True)
    ...     for part in (slice(0, 3), slice(3, 8))
    ... ]
    >>> out, lse = attnmask.torch.merge_attention_states(*zip(*parts))
    >>> torch.allclose(out, attnmask.torch.flash_attention(query, key, value), atol=1e-5)
    True
    """
    given = _list(outs, "outs"), _list(lses, "lses")
    if not given[0]:
        raise ValueError("outs must have at least one part, got none")
    parts = *given[0], *given[1]
    try:
        if are_transforms_active() or with_tangents(_names(parts), parts):
            _core.check_merge(*(tuple(map(_like_array, x)) for x in given))
            return _formula(*given)
        return _operator(*given)
    except (TypeError, ValueError) as error:
        suit_hint(error, {"outs": given[0][0]})
        raise
