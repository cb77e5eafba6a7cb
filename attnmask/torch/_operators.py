"""Shared by all functions of tensors: checks, casts, and the registration of operators."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import numpy as np

from attnmask._common.arguments import as_array, check_kind_of_tensor, describe, integer, real
from attnmask._common.types import AnyFunction, Arguments, Array, Given
from attnmask.torch._import import torch
from attnmask.torch._states import MaskTensors
from attnmask.torch._types import MaybeTensor

_forward_ad = torch.autograd.forward_ad
_EARLY = torch._C.DispatchKey.PreDispatch  # where torch.export traces
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_OF_NUMPY = (torch.float32, torch.float16, torch.float64)
TYPES = (*_OF_NUMPY, torch.bfloat16)
NO_FORWARD = "attnmask.torch.{} has no forward-mode derivative: {} must have no tangent"
NO_SECOND = "attnmask.torch.{} has no second derivative"
NO_THIRD = "attnmask.torch.{} has no third derivative"
NO_SECOND_OF_TERM = (
    "attnmask.torch.{0} has no second derivative with {1}: {1} must require no gradient and have no tangent; "
    "write {1}.detach()"
)
NO_FORWARD_TWICE = (
    "attnmask.torch.{} has no forward-mode derivative of its tangents: write jacfwd(jacrev(...)) for "
    "jacfwd(jacfwd(...)), and a gradient of jvp for a jvp of jvp"
)
_SEEDS = 2**62

_library = torch.library.Library("attnmask", "DEF")


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type of a logsumexp, and of what is summed, for queries of this type."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) and value.requires_grad else value


# No public way tells whether a mode or a transform sees what PyTorch's dispatcher is called with.
_modes = torch._C._len_torch_dispatch_stack
_is_key_included = torch._C._dispatch_tls_is_dispatch_key_included
are_transforms_active = torch._C._are_functorch_transforms_active


def is_traced() -> bool:
    """Return whether PyTorch makes a graph, or a mode sees what its dispatcher is called with."""
    return torch.jit.is_tracing() or _modes() > 0 or _is_key_included(_EARLY)


def are_plain(tensors: Iterable[MaybeTensor]) -> bool:
    """Return whether these are CPU tensors of no other class. Transforms of `torch.func` do not show."""
    return all(x is None or (type(x) in _PLAIN and x.is_cpu) for x in tensors)


def needs_operator(arguments: Iterable[object]) -> bool:
    """Return whether PyTorch must see a call: it traces, transforms a function, or has other kinds of tensors."""
    return (
        torch.jit.is_tracing()
        or _modes() > 0
        or _is_key_included(_EARLY)
        or are_transforms_active()
        or any(isinstance(x, torch.Tensor) and not (type(x) in _PLAIN and x.is_cpu) for x in arguments)
    )


def is_differentiated() -> bool:
    """Return whether `torch.func` transforms a function whose gradient may be needed."""
    if not are_transforms_active():
        return False
    functorch = torch._C._functorch
    return bool(functorch.peek_interpreter_stack().key() != functorch.TransformType.Functionalize)


def transforms() -> list[Any]:
    """Return what `torch.func` differentiates by: `grad` and `jvp`, as often as they are nested.

    It is nothing while graphs are made, which do not know.
    """
    if not are_transforms_active() or torch.compiler.is_dynamo_compiling():
        return []
    kinds = torch._C._functorch.TransformType
    found = (x.key() for x in torch._C._functorch.get_interpreter_stack() or ())
    return [kind for kind in found if kind in (kinds.Grad, kinds.Jvp)]


def is_moved() -> bool:
    """Return whether tangents are those of operands as they are, and not below another transform of `torch.func`."""
    if not in_forward_mode() or not are_transforms_active():
        return in_forward_mode()
    functorch = torch._C._functorch
    return bool(functorch.peek_interpreter_stack().key() == functorch.TransformType.Jvp)


def operand(x: Any) -> Any:
    """Return an operator's argument from any array."""
    return x if x is None or isinstance(x, torch.Tensor) else torch.as_tensor(np.array(x))


def in_numpy(dtype: torch.dtype, name: str) -> Any:
    return as_array(torch.empty(0, dtype=dtype), name).dtype


def in_place(x: torch.Tensor, name: str) -> Array:
    """Return `as_array`, faster for the common case."""
    try:
        if x.dtype in _OF_NUMPY:
            return x.numpy()
    except (RuntimeError, TypeError):  # as_array knows what to do, or to say
        pass
    return as_array(x if torch.is_grad_enabled() else detached(x), name)


# Checks


def in_forward_mode() -> bool:
    """Return whether tensors may have tangents."""
    return bool(_forward_ad._current_level >= 0)


def with_tangents(names: Iterable[str], tensors: Iterable[object]) -> list[str]:
    """Return the names of those that have a tangent."""
    # In the forward pass of a function that brings a derivative of its own, tangents are not asked for.
    if not in_forward_mode() or not torch._C._is_fwd_grad_enabled():
        return []
    return [
        name
        for name, x in zip(names, tensors, strict=False)
        if isinstance(x, torch.Tensor) and _forward_ad.unpack_dual(x).tangent is not None
    ]


def check_no_tangents(names: Iterable[str], tensors: Iterable[object], function: str) -> None:
    """Refuse tangents, which the core ignores: results would silently have none."""
    for name in with_tangents(names, tensors):
        raise RuntimeError(NO_FORWARD.format(function, name))


def primal(x: Any) -> Any:
    return _forward_ad.unpack_dual(x).primal if isinstance(x, torch.Tensor) else x


def unpacked(x: Any) -> tuple[Any, Any]:
    """Return an operand without its tangent, and that."""
    return _forward_ad.unpack_dual(x) if isinstance(x, torch.Tensor) else (x, None)


dual = _forward_ad.make_dual


def tensors_among(given: Given) -> dict[str, torch.Tensor]:
    return {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}


def check_no_gradient(
    tensors: dict[str, torch.Tensor], function: str, trained: str, without: Callable[[], str] = str
) -> None:
    """Refuse tensors that require a gradient. `without` returns the reason, such as " with key"."""
    check_no_tangents(tensors, tensors.values(), function)
    if not torch.is_grad_enabled():
        return
    for name, x in tensors.items():
        if x.requires_grad:
            raise RuntimeError(
                f"{function} has no gradient{without()}, and {name} requires one: "
                f"call it under torch.no_grad(), or train with {trained}"
            )


def check_tensor(x: object, name: str) -> None:
    if type(x) in _PLAIN and x.is_cpu and not x.is_nested:  # type: ignore[attr-defined]
        return
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {describe(x)}")
    if x.is_nested or not x.is_meta:
        check_kind_of_tensor(x, name)


def check_devices(names: Iterable[str], arguments: Iterable[object]) -> None:
    """Check that all tensors are on one device: PyTorch calls the fake implementation if any is a meta tensor."""
    first: tuple[str, torch.device] | None = None
    for name, x in zip(names, arguments, strict=True):
        for tensor in x if isinstance(x, (list, tuple)) else (x,):
            if not isinstance(tensor, torch.Tensor):
                continue
            first = first or (name, tensor.device)
            if tensor.device != first[1]:
                raise TypeError(
                    f"{name} must be on {first[1]} as {first[0]}, got a tensor on {tensor.device}"
                )


def on_meta(given: Given) -> bool:
    """Check tensors, which must be on one device: PyTorch computes no numbers if another one takes part in a call.
    Return whether that is `meta`, where tensors are shapes alone.
    """
    parts = {name: x.tensors if isinstance(x, MaskTensors) else (x,) for name, x in given.items()}
    tensors = [(name, x) for name, several in parts.items() for x in several if isinstance(x, torch.Tensor)]
    for name, x in tensors:
        check_tensor(x, name)
    if not any(x.is_meta for _, x in tensors):
        return False
    check_devices(*zip(*tensors, strict=True))
    return True


def call_operator(operator: AnyFunction, operands: Sequence[object], meta: bool) -> Any:
    """Call an operator; on `meta` with all operands there, also those that were made of arrays."""
    if meta:
        operands = torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.to("meta"), operands)
    return operator(*operands)


# Seeds of dropout


def seed(value: object, name: str) -> int:
    """Return the same 64 bits as a signed integer."""
    number = integer(value, name)
    return number if -(2**63) <= number < 2**63 else (number + 2**63) % 2**64 - 2**63


def seed_of(prob: object, given: object, in_graph: bool = False) -> Any:
    """Return the seed of dropout, drawn from PyTorch's generator if something is dropped and none is given."""
    if given is not None or not real(prob, "dropout_prob"):
        return given
    return torch.ops.attnmask.dropout_seed(torch.empty(0, device="cpu")) if in_graph else _draw()


def _draw(_: object = None) -> int:
    return int(torch.randint(_SEEDS, (), dtype=torch.int64, device="cpu"))


# A number that no graph knows. Inductor asks for a tensor, which tells it the device.
_library.define("dropout_seed(Tensor like) -> SymInt", tags=(torch.Tag.nondeterministic_seeded,))
_library.impl("dropout_seed", _draw, "CompositeExplicitAutograd")
torch.library.register_fake(
    "attnmask::dropout_seed", lambda _: torch.library.get_ctx().new_dynamic_size(max=_SEEDS), lib=_library
)


# Under torch.autocast


def autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Cast as PyTorch's autocast does for its own attention."""
    if tensor.is_floating_point() and tensor.dtype != torch.float64:
        return tensor.to(torch.get_autocast_dtype("cpu"))
    return tensor


# Under torch.vmap

InOneCall: TypeAlias = Callable[[Arguments, Arguments, int], tuple[list[object], int] | None]


def _chosen(x: Any, dim: Any, index: int) -> Any:
    if isinstance(dim, (list, tuple)):
        return [_chosen(*pair, index) for pair in zip(x, dim, strict=True)]
    return x if dim is None else x.select(dim, index)


def _stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack results. Those with a shorter last axis are padded with zeros."""
    longest = max(x.shape[-1] for x in parts) if parts[0].ndim else 0
    return torch.stack(
        [torch.nn.functional.pad(x, (0, longest - x.shape[-1])) if x.ndim else x for x in parts]
    )


class Mapped(Protocol):
    """What PyTorch says of a call under `vmap`."""

    batch_size: int


def mapped(operator: AnyFunction, names: Sequence[str], kind: type, in_one_call: InOneCall) -> AnyFunction:
    """Apply `vmap` to an operator: one call of all batch rows where that is equivalent, otherwise one by one.

    `in_one_call` returns the arguments of that call and the rows of each; or None. Results are a tensor, or several of
    this `kind`.
    """

    def rule(info: Mapped, in_dims: Sequence[object], *arguments: object) -> tuple[Any, Any]:
        given, dims = (dict(zip(names, values, strict=True)) for values in (arguments, in_dims))
        count = info.batch_size
        together = in_one_call(given, dims, count)
        if together:
            operands, rows = together
            results = [x.reshape(count, rows, *x.shape[1:]) for x in several(operator(*operands))]
        else:
            calls = [
                several(operator(*map(_chosen, arguments, in_dims, [i] * len(names)))) for i in range(count)
            ]
            results = [_stacked(parts) for parts in zip(*calls, strict=True)]
        return (results[0], 0) if kind is torch.Tensor else (kind(results), kind([0] * len(results)))

    return rule


def several(results: Any) -> Sequence[torch.Tensor]:
    return (results,) if isinstance(results, torch.Tensor) else results


# Registration

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)  # tensors are read as they lie


def register(
    name: str,
    parameters: str,
    results: str,
    on_cpu: AnyFunction,
    fake: AnyFunction,
    **rules: AnyFunction | None,
) -> Any:
    """Register an operator, with its `rules`: "Autograd", "AutocastCPU" and "vmap", and return it."""
    _library.define(f"{name}({parameters}) -> {results}", tags=_TAGS)
    _library.impl(name, on_cpu, "CPU")
    torch.library.register_fake(f"attnmask::{name}", fake, lib=_library)
    for key, rule in rules.items():
        if key == "vmap" and rule:
            torch.library.register_vmap(f"attnmask::{name}", rule, lib=_library)
        elif rule:
            _library.impl(name, rule, key)
    function, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.attnmask, function), overload or "default")


def autograd_kernel(name: str, on_cpu: AnyFunction, learn: AnyFunction) -> AnyFunction:
    """Return the autograd kernel of an operator: `learn` if a derivative may be needed, otherwise what is below, which
    calls of plain tensors reach without PyTorch's dispatcher.
    """

    def kernel(*arguments: Any) -> Any:
        if torch.is_grad_enabled() and any(
            isinstance(x, torch.Tensor) and x.requires_grad for x in arguments
        ):
            return learn(*arguments)
        if with_tangents(arguments, arguments):
            return learn(*arguments)
        if not needs_operator(arguments):
            return on_cpu(*arguments)
        with below_autograd():
            return getattr(torch.ops.attnmask, name).default(*arguments)

    return kernel


def below_autograd() -> AbstractContextManager[object]:
    """Let operators skip their autograd kernels, as PyTorch's own do when they call what is below."""
    return torch._C._AutoDispatchBelowAutograd()
