"""`merge_attention_states` for PyTorch, and the operators ``attnmask::merge_attention_states`` and ``…_backward``."""

from collections.abc import Sequence

from attnmask._attention import forward as attention
from attnmask._common.arguments import describe, suit_hint
from attnmask._common.loading import _core
from attnmask._common.types import Array
from attnmask.torch._import import torch
from attnmask.torch._operators import (
    NO_SECOND,
    check_devices,
    check_no_tangents,
    check_tensor,
    in_place,
    wide_dtype,
)
from attnmask.torch._states import to_tensor
from attnmask.torch._types import Context

_NAME = "merge_attention_states"


def _arrays(tensors: Sequence[torch.Tensor], name: str) -> tuple[Array, ...]:
    return tuple(in_place(x.detach(), name) for x in tensors)


def _merge(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = attention.merge_attention_states(_arrays(outs, "outs"), _arrays(lses, "lses"))
    return to_tensor(out), to_tensor(lse)


def _merge_backward(
    outs: list[torch.Tensor], lses: list[torch.Tensor], dout: torch.Tensor, dlse: torch.Tensor
) -> list[torch.Tensor]:
    gradients = (in_place(x.detach(), name) for name, x in (("dout", dout), ("dlse", dlse)))
    douts, dlses = _core.merge_backward(_arrays(outs, "outs"), _arrays(lses, "lses"), *gradients)
    return [to_tensor(x) for x in (*douts, *dlses)]


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
    grads = _backward(saved[:n], saved[n:], dout, dlse)
    return grads[:n], [x.to(dtype) for x, dtype in zip(grads[n:], ctx.types, strict=True)]


def _no_second(ctx: object, *grads: object) -> None:
    raise RuntimeError(f"{NO_SECOND.format(_NAME)}: create_graph must be False")


_operator.register_autograd(_gradients, setup_context=_keep)
_backward.register_autograd(_no_second)


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
    one operator. Higher-order gradients, forward mode and ``torch.func`` are not supported.

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
    names = ["outs"] * len(given[0]) + ["lses"] * len(given[1])
    check_no_tangents(names, (*given[0], *given[1]), _NAME)
    try:
        return _operator(*given)
    except (TypeError, ValueError) as error:
        suit_hint(error, {"outs": given[0][0]})
        raise
