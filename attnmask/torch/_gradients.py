"""How functions of tensors, made from rows, take part in PyTorch's autograd and in `torch.func`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, Protocol

from attnmask._common.arguments import as_array
from attnmask._common.types import AnyFunction, Arguments
from attnmask._masks.info import MaskInfo
from attnmask.torch import _operators as operators
from attnmask.torch._import import torch
from attnmask.torch._operators import (
    NO_FORWARD,
    NO_SECOND,
    check_no_tangents,
    needs_operator,
)
from attnmask.torch._states import MaskTensors, to_tensor
from attnmask.torch._types import Context, MaybeTensor


def spread(grads: Iterable[torch.Tensor], wanted: Sequence[bool]) -> list[MaybeTensor]:
    """Return the wanted gradients, and None for the others."""
    rest = iter(grads)
    return [next(rest) if needed else None for needed in wanted]


def transforms(function: Any) -> tuple[Any, Any]:
    """Return the operators of a function for autograd and `torch.func`, which ignores the gradients of operators."""

    def tangents(ctx: Context, *of_operands: MaybeTensor) -> tuple[MaybeTensor, ...]:
        moved = {name: x for name, x in zip(function.names, of_operands, strict=True) if x is not None}
        for name in moved.keys() - set(row.moved):
            raise RuntimeError(NO_FORWARD.format(function.name, name))
        saved = [operators.primal(x) for x in ctx.saved_tensors]
        lists = [saved[first_list:]] if operands.lists else []
        given = (*saved[:first_list], *lists, *ctx.more, *map(moved.get, row.moved))
        return *Tangents.apply(*given), *[None] * ctx.wide

    def no_second(ctx: object, *_: object) -> NoReturn:
        raise RuntimeError(NO_SECOND.format(function.name))

    def keep_none(ctx: object, inputs: object, output: object) -> None:
        """Keep nothing: second derivatives are not supported."""

    operands, row, count = function.operands, function.row, len(function.row.results)
    first_list, end = operands.tensors, operands.tensors + operands.lists

    def keep(ctx: Context, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        results, wide = output[:count], output[count:]
        ctx.mark_non_differentiable(*wide)
        ctx.wide = len(wide)
        if row.jvp and operators.in_forward_mode():
            ctx.save_for_forward(*inputs[:first_list], *itertools.chain(*inputs[first_list:end]))
        saved = (*(wide or results[:1]), *results[1:]) if row.saved else ()
        ctx.more = inputs[end:]
        ctx.save_for_backward(*saved, *inputs[:first_list], *itertools.chain(*inputs[first_list:end]))
        ctx.set_materialize_grads(False)

    def gradients(ctx: Context, *of_results: MaybeTensor) -> tuple[MaybeTensor, ...]:
        operator = Backward.apply if operators.is_differentiated() else function.call_backward
        saved, begin = ctx.saved_tensors, len(row.saved) + first_list
        wanted = [bool(needed) for needed in ctx.needs_input_grad[: len(function.learned)]]
        lists = [list(saved[begin:])] if operands.lists else []
        grads = operator(*of_results[:count], *saved[:begin], *lists, *ctx.more, wanted)
        return *spread(grads, wanted), *[None] * (len(function.names) - len(wanted))

    def derivative(call: AnyFunction, names: Sequence[str]) -> Any:
        """Return what calls an operator that has no derivative itself."""

        class Derivative(torch.autograd.Function):
            setup_context = staticmethod(keep_none)
            backward = staticmethod(no_second)
            jvp = staticmethod(no_second)

            @staticmethod
            def forward(*operands: object) -> tuple[torch.Tensor, ...]:
                with operators.below_autograd():
                    return tuple(call(*operands))

            @staticmethod
            def vmap(info: operators.Mapped, in_dims: Sequence[object], *operands: object) -> object:
                rule = operators.mapped(Derivative.apply, names, tuple, function.folded)
                return rule(info, in_dims, *operands)

        return Derivative

    Backward = derivative(function.call_backward, function.backward_names)
    Tangents = derivative(function.call_jvp, function.jvp_names)

    class Forward(torch.autograd.Function):
        setup_context = staticmethod(keep)
        backward = staticmethod(gradients)
        jvp = staticmethod(tangents)

        @staticmethod
        def forward(*operands: object) -> tuple[torch.Tensor, ...]:
            with operators.below_autograd():
                return function.call_forward(*operands)

        @staticmethod
        def vmap(info: operators.Mapped, in_dims: Sequence[object], *operands: object) -> object:
            rule = operators.mapped(Forward.apply, function.names, tuple, function.folded)
            return rule(info, in_dims, *operands)

    return Forward, Backward


class _Learned(Context, Protocol):
    function: Any


_FIXED = {torch.Tensor, torch.nn.Parameter, MaskInfo, MaskTensors, bool, int, float, str, type(None)}


def held(function: Any, given: Arguments, tensors: dict[str, torch.Tensor]) -> tuple[Any, ...]:
    """Return what `Learning` takes. Arrays are copied, because the gradient needs them as they are now; PyTorch reports
    a tensor that has changed by then.
    """
    others = given | dict.fromkeys(tensors)
    for name, x in others.items():
        if type(x) not in _FIXED and name in function.operands.arrays:
            others[name] = as_array(x, name).copy()
    return function, others, tuple(tensors), *tensors.values()


class Learning(torch.autograd.Function):
    """A function called without PyTorch's dispatcher, which takes longer than a short call. It keeps what the gradient
    needs.
    """

    @staticmethod
    def forward(
        ctx: _Learned, function: Any, others: Arguments, names: tuple[str, ...], *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        tensors = dict(zip(names, inputs, strict=True))
        results, kept = function.remember(others | tensors, tensors)
        ctx.function, ctx.names, ctx.others = function, names, others
        parts: tuple[torch.Tensor, ...] = ()
        for name in function.masks:
            mask = others.get(name)
            if isinstance(mask, MaskTensors):
                others[name], parts = mask.specification, mask.tensors
        ctx.parts = len(parts)
        ctx.save_for_backward(*parts, *inputs, *kept)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: _Learned, *of_results: MaybeTensor) -> tuple[MaybeTensor, ...]:
        if torch.compiler.is_dynamo_compiling():  # where gradients are compiled, too
            return torch.compiler.disable(Learning.backward)(ctx, *of_results)
        function, names, saved = ctx.function, ctx.names, ctx.saved_tensors
        end = ctx.parts + len(names)
        given = ctx.others | dict(zip(names, saved[ctx.parts : end], strict=True))
        for name in function.masks:
            if isinstance(given.get(name), str):
                given[name] = MaskTensors(given[name], saved[: ctx.parts])
        needed = dict(zip(names, ctx.needs_input_grad[3:], strict=True))
        wanted = [needed.get(name, False) for name in function.learned]
        if torch.is_grad_enabled() or needs_operator((*of_results, *saved)):
            results = saved[end:] if function.row.saved else ()
            operands = function.operands.of(given)
            grads = spread(function.call_backward(*of_results, *results, *operands, wanted), wanted)
        else:
            check_no_tangents(function.backward_names, of_results, function.name)
            found: Any = function.differentiate(of_results, given, saved[end:], wanted)
            grads = [to_tensor(grad) if want else None for grad, want in zip(found, wanted, strict=True)]
        by_name = dict(zip(function.learned, grads, strict=True))
        return None, None, None, *[by_name.get(name) for name in names]
