"""Tensors that are descriptions: they have a shape, and are written out only if something is computed with them."""

from typing import Any, Self

from attnmask._common.types import AnyFunction
from attnmask.torch._import import torch

__all__ = ["DescribedTensor"]


class DescribedTensor(torch.Tensor):
    """A tensor that is a description: anything that computes with it makes the tensor it describes first."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def without_memory(cls, shape: tuple[int, ...], dtype: torch.dtype, **description: object) -> Self:
        make: AnyFunction = torch.Tensor._make_wrapper_subclass
        tensor = make(cls, shape, dtype=dtype, device="cpu")
        tensor.__dict__.update(description)
        return tensor

    def written_out(self) -> torch.Tensor:
        raise NotImplementedError

    def __setitem__(self, *_: object) -> None:
        raise TypeError(f"a {type(self).__name__} cannot be written to: clone it")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override, unused-ignore]
        cls, function: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls.without_memory(args[0].shape, args[0].dtype, **vars(args[0]))
        if function._schema.is_mutable and isinstance(args[0], cls):
            raise TypeError(f"a {cls.__name__} cannot be written to, as by {function}: clone it")
        args, kwargs = torch.utils._pytree.tree_map(_written_out, (args, kwargs or {}))
        return function(*args, **kwargs)


def _written_out(x: object) -> object:
    return x.written_out() if isinstance(x, DescribedTensor) else x
