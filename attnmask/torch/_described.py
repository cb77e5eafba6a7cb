"""Tensors that are descriptions: they have a shape, and are written out only if something is computed with them."""

from typing import Any

from attnmask.torch._import import torch

__all__ = ["DescribedTensor"]


class DescribedTensor(torch.Tensor):  # type: ignore[misc, unused-ignore]
    """A tensor that is a description: anything that computes with it makes the tensor it describes first."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def copied(self) -> "DescribedTensor":
        """Return another tensor with the same description."""
        raise NotImplementedError

    def written_out(self) -> torch.Tensor:
        raise NotImplementedError

    def __setitem__(self, *_: Any) -> None:
        raise TypeError(f"a {type(self).__name__} cannot be written to: clone it")

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return args[0].copied()
        if function._schema.is_mutable and isinstance(args[0], cls):
            raise TypeError(f"a {cls.__name__} cannot be written to, as by {function}: clone it")
        args, kwargs = torch.utils._pytree.tree_map(_written_out, (args, kwargs or {}))
        return function(*args, **kwargs)


def _written_out(x: Any) -> Any:
    return x.written_out() if isinstance(x, DescribedTensor) else x
