"""How functions of tensors, made from rows, take part in PyTorch's autograd and in `torch.func`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, Protocol

from attnmask._common.arguments import as_array
from attnmask._common.types import Arguments
from attnmask._masks.info import MaskInfo
from attnmask.torch import _operators as operators
from attnmask.torch._import import torch
from attnmask.torch._operators import (
    NO_FORWARD,
    NO_SECOND,
    check_no_tangents,
    needs_operator,
    tensors_among,
)
from attnmask.torch._states import MaskTensors, to_tensor
from attnmask.torch._types import Context, MaybeTensor


def spread(grads: Iterable[torch.Tensor], wanted: Sequence[bool]) -> list[MaybeTensor]:
    """Return the wanted gradients, and None for the others."""
    rest = iter(grads)
    return [next(rest) if needed else None for needed in wanted]


def transforms(function: Any) -> tuple[Any, Any]:
    """Return the operators of a function for autograd and `torch.func`, which ignores the gradients of operators."""

    def no_tangents(ctx: object, *tangents: object) -> NoReturn:
        raise RuntimeError(NO_FORWARD.format(function.name, "an argument"))

    def no_second(ctx: object, *_: object) -> NoReturn:
        raise RuntimeError(NO_SECOND.format(function.name))

    def keep_none(ctx: object, inputs: object, output: object) -> None:
        """Keep nothing for a second derivative, which there is not."""

    operands, row, count = function.operands, function.row, len(function.row.results)
    first_list, end = operands.tensors, operands.tensors + operands.lists

    def keep(ctx: Context, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        results, wide = output[:count], output[count:]
        ctx.mark_non_differentiable(*wide)
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

    class Backward(torch.autograd.Function):
        setup_context = staticmethod(keep_none)
        backward = staticmethod(no_second)
        jvp = staticmethod(no_tangents)

        @staticmethod
        def forward(*operands: object) -> tuple[torch.Tensor, ...]:
            with operators.below_autograd():
                return function.call_backward(*operands)

        @staticmethod
        def vmap(info: operators.Mapped, in_dims: Sequence[object], *operands: object) -> object:
            rule = operators.mapped(Backward.apply, function.backward_names, tuple, function.folded)
            return rule(info, in_dims, *operands)

    class Forward(torch.autograd.Function):
        setup_context = staticmethod(keep)
        backward = staticmethod(gradients)
        jvp = staticmethod(no_tangents)

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


_FIXED = (torch.Tensor, MaskInfo, MaskTensors, int, float, str, type(None))


def held(function: Any, given: Arguments) -> tuple[Any, ...]:
    """Return the arguments that have gradients, and all others, with arrays copied: they are kept until the gradient
    needs them. PyTorch reports a tensor that has changed by then.
    """
    for name, x in given.items():
        if not isinstance(x, _FIXED) and name in function.operands.arrays:
            given = given | {name: as_array(x, name).copy()}
    learned = function.learned
    return *[given.get(name) for name in learned], given | dict.fromkeys(learned)


class Learning(torch.autograd.Function):
    """A function called without PyTorch's dispatcher, which takes longer than a short call. It keeps what the gradient
    needs.
    """

    @staticmethod
    def forward(ctx: _Learned, function: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
        *learned, others = inputs
        given = others | dict(zip(function.learned, learned, strict=True))
        tensors = tensors_among(given)
        results, kept = function.remember(given, tensors)
        ctx.function, ctx.names, ctx.others = function, tuple(tensors), given | dict.fromkeys(tensors)
        parts: tuple[torch.Tensor, ...] = ()
        for name in function.masks:
            if isinstance(given.get(name), MaskTensors):
                ctx.others[name], parts = given[name].specification, given[name].tensors
        ctx.parts = len(parts)
        ctx.save_for_backward(*parts, *tensors.values(), *kept)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: _Learned, *of_results: MaybeTensor) -> tuple[MaybeTensor, ...]:
        if torch.compiler.is_dynamo_compiling():  # where gradients are compiled, too
            return torch.compiler.disable(Learning.backward)(ctx, *of_results)
        function, saved = ctx.function, ctx.saved_tensors
        end = ctx.parts + len(ctx.names)
        given = ctx.others | dict(zip(ctx.names, saved[ctx.parts : end], strict=True))
        for name in function.masks:
            if isinstance(given.get(name), str):
                given[name] = MaskTensors(given[name], saved[: ctx.parts])
        wanted = [bool(needed) for needed in ctx.needs_input_grad[1 : 1 + len(function.learned)]]
        if torch.is_grad_enabled() or needs_operator((*of_results, *saved)):
            results = saved[end:] if function.row.saved else ()
            grads = spread(
                function.call_backward(*of_results, *results, *function.operands.of(given), wanted), wanted
            )
        else:
            check_no_tangents(function.backward_names, of_results, function.name)
            found: Any = function.differentiate(of_results, given, saved[end:], wanted)
            grads = [to_tensor(grad) if needed else None for grad, needed in zip(found, wanted, strict=True)]
        return None, *grads, None
