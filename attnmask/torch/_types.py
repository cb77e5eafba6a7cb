"""Types that several modules use."""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from attnmask._common.types import Arguments
from attnmask.torch._import import torch

Shaped: TypeAlias = tuple[Sequence[int], torch.dtype]  # the shape and type of a result
MaybeTensor: TypeAlias = torch.Tensor | None


class Context(Protocol):
    """The `ctx` of a `torch.autograd.Function`, with the attributes that this package keeps in it."""

    saved_tensors: tuple[torch.Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    names: tuple[str, ...]
    others: Arguments
    more: tuple[object, ...]
    parts: int
    wide: int
    first: int
    types: list[torch.dtype]

    def save_for_backward(self, *tensors: torch.Tensor) -> None: ...
    def save_for_forward(self, *tensors: MaybeTensor) -> None: ...
    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...
