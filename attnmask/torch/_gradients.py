"""How functions of tensors, made from rows, take part in PyTorch's autograd and in `torch.func`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, Protocol

from attnmask._common.arguments import as_array
from attnmask._common.types import AnyFunction, Arguments
from attnmask._faces.rows import Kind
from attnmask._masks.info import MaskInfo
from attnmask.torch import _operators as operators
from attnmask.torch._import import torch
from attnmask.torch._operators import (
    NO_FORWARD,
    NO_FORWARD_TWICE,
    NO_SECOND,
    NO_SECOND_OF_TERM,
    NO_THIRD,
    needs_operator,
    primal,
)
from attnmask.torch._states import MaskTensors, to_tensor
from attnmask.torch._types import Context, MaybeTensor


def spread(grads: Iterable[torch.Tensor], wanted: Sequence[bool]) -> list[MaybeTensor]:
    """Return the wanted gradients, and None for the others."""
    rest = iter(grads)
    return [next(rest) if needed else None for needed in wanted]


class Transforms:
    """A function and its derivatives for autograd and `torch.func`, which ignores the gradients of operators::

        forward(*operands)                                      the results
        backward(dout, dlse, out, lse, *operands, wanted)       the wanted gradients
        moved(*tangents, *operands)                             the results, and their tangents
        second(*cotangents, dout, dlse, out, lse, *operands)    the gradients of dout, dlse and the inputs

    Second derivatives are symmetric, so that `second` is also how gradients move along the cotangents. What a result
    has to do with the inputs is in the derivatives of these: it has none of its own.
    """

    def __init__(self, function: Any) -> None:
        row = self.row = function.row
        self.function, self.inputs, self.terms = function, function.inputs, row.of(Kind.TERM)
        self.results, self.saved, self.tangents = len(row.results), len(row.saved), len(row.moved)
        rules: dict[str, Sequence[AnyFunction]] = {
            "forward": (self.keep_results, self.gradients, self.moved_results),
            "backward": (self.keep, self.second_gradients, self.moved_gradients),
            "moved": (self.keep_moved, self.gradients_of_moved, self.no_forward_twice),
            "second": (self.keep_none, self.no_third, self.no_third),
        }
        if not row.second:
            rules |= dict.fromkeys(("backward", "moved"), (self.keep_none, self.no_second, self.no_second))
        names = function.tangents + function.names
        self.forward = self.made(function.call_forward, function.names, *rules["forward"])
        self.backward = self.made(function.call_backward, function.backward_names, *rules["backward"])
        self.moved = self.made(self.call_jvp, names, *rules["moved"])
        self.second = self.made(function.call_second, function.second_names, *rules["second"])

    def made(
        self,
        call: AnyFunction,
        names: Sequence[str],
        keep: AnyFunction,
        rule: AnyFunction,
        rule_of_tangents: AnyFunction,
    ) -> Any:
        """Return what calls an operator, with rules for its gradients and tangents."""
        folded = self.function.folded

        class Made(torch.autograd.Function):
            setup_context, jvp = staticmethod(keep), staticmethod(rule_of_tangents)

            @staticmethod
            def backward(ctx: Context, *of_results: MaybeTensor) -> tuple[MaybeTensor, ...]:
                return rule(ctx, *of_results)  # PyTorch's compiler of gradients wants a function, no method

            @staticmethod
            def forward(*operands: object) -> tuple[torch.Tensor, ...]:
                with operators.below_autograd():
                    return tuple(call(*operands))

            @staticmethod
            def vmap(info: operators.Mapped, in_dims: Sequence[object], *operands: object) -> object:
                return operators.mapped(Made.apply, names, tuple, folded)(info, in_dims, *operands)

        return Made

    def call_jvp(self, *operands: Any) -> tuple[torch.Tensor, ...]:
        tangents, given = operands[: self.tangents], operands[self.tangents :]
        found: tuple[torch.Tensor, ...] = self.function.call_jvp(*given, *tangents)
        return found

    # All operands are kept: first the tensors, then the list of a mask's tensors if there is one, then the rest

    def keep_none(self, ctx: Context, inputs: object, output: object) -> None:
        """Keep nothing, where there is no derivative."""

    def keep(self, ctx: Context, inputs: tuple[Any, ...], output: object) -> None:
        others = (i for i, x in enumerate(inputs) if not (x is None or isinstance(x, torch.Tensor)))
        ctx.first = next(others, len(inputs))
        end = ctx.first + self.function.operands.lists
        tensors = (*inputs[: ctx.first], *itertools.chain(*inputs[ctx.first : end]))
        ctx.more = inputs[end:]
        ctx.save_for_backward(*tensors)
        if operators.in_forward_mode():
            ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    def keep_results(self, ctx: Context, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        results, wide = output[: self.results], output[self.results :]
        ctx.mark_non_differentiable(*wide)
        ctx.wide = len(wide)
        saved = (*(wide or results[:1]), *results[1:]) if self.saved else ()
        self.keep(ctx, (*saved, *inputs), None)

    def keep_moved(self, ctx: Context, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        self.keep(ctx, (*inputs[: self.tangents], *output[: self.saved], *inputs[self.tangents :]), None)

    def kept(self, ctx: Context) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        lists = [list(saved[ctx.first :])] if self.function.operands.lists else []
        return *saved[: ctx.first], *lists, *ctx.more

    # Gradients

    def gradients(self, ctx: Context, *of_results: MaybeTensor) -> tuple[MaybeTensor, ...]:
        function = self.function
        operator = function.learn_backward if operators.is_differentiated() else function.call_backward
        needed = ctx.needs_input_grad
        if all(x is None for x in of_results):  # `backward` has taken a result, which got no gradient there
            return (None,) * len(needed)
        wanted = list(map(bool, needed[: len(function.learned)]))
        grads = operator(*of_results[: self.results], *self.kept(ctx), wanted)
        return *spread(grads, wanted), *[None] * (len(needed) - len(wanted))

    def second_gradients(self, ctx: Context, *cotangents: MaybeTensor) -> tuple[MaybeTensor, ...]:
        *given, wanted = self.kept(ctx)
        needed = ctx.needs_input_grad
        along = dict(zip(self.function.learned, spread(cotangents, wanted), strict=True))
        self.check_terms(along, dict(zip(self.function.backward_names, needed, strict=True)))
        found = self.second.apply(*(along[x] for x in self.inputs), *given)
        return _where(needed, (*found[: self.results], *[None] * self.saved, *found[self.results :]))

    def gradients_of_moved(self, ctx: Context, *grads: MaybeTensor) -> tuple[MaybeTensor, ...]:
        kept, needed, function = self.kept(ctx), ctx.needs_input_grad, self.function
        tangents = dict(zip(self.row.moved, kept, strict=False))
        given = kept[self.tangents :]
        of_results, of_tangents = grads[: self.results], grads[self.results :]
        none: list[MaybeTensor] = [None] * len(function.learned)

        def first(of_some: Sequence[MaybeTensor], needed: Arguments) -> list[MaybeTensor]:
            wanted = [needed.get(name, False) for name in function.learned]
            if not any(wanted) or all(x is None for x in of_some):
                return none
            return spread(function.learn_backward(*of_some, *given, wanted), wanted)

        of_operands = dict(zip(function.names, needed[self.tangents :], strict=True))
        found = first(of_results, of_operands)
        if any(of_operands.values()) and any(x is not None for x in of_tangents):
            self.check_terms(tangents, of_operands)
            second = self.second.apply(*map(tangents.get, self.inputs), *of_tangents, *given)[self.results :]
            found = [_sum(x, y) for x, y in itertools.zip_longest(found, second)]
        of_moved = first(of_tangents, dict(zip(self.row.moved, needed, strict=False)))
        return _where(needed, (*of_moved[: self.tangents], *found))

    # Forward mode

    def moved_results(self, ctx: Context, *of_operands: MaybeTensor) -> tuple[MaybeTensor, ...]:
        moved = {x: y for x, y in zip(self.function.names, of_operands, strict=True) if y is not None}
        for name in moved.keys() - set(self.row.moved):
            raise RuntimeError(NO_FORWARD.format(self.function.name, name))
        given = map(primal, self.kept(ctx)[self.saved :])
        found = self.moved.apply(*map(moved.get, self.row.moved), *given)[self.results :]
        return *found, *[None] * ctx.wide

    def moved_gradients(self, ctx: Context, *moved: MaybeTensor) -> tuple[torch.Tensor, ...]:
        *given, wanted = map(primal, self.kept(ctx))
        function, of_results = self.function, moved[: self.results]
        along = {x: y for x, y in zip(function.backward_names, moved, strict=True) if y is not None}
        known = {*function.backward_names[: self.results + self.saved], *function.learned}
        for name in along.keys() - known:
            raise RuntimeError(NO_FORWARD.format(function.name, name))
        grads: Iterable[Any] = ()
        if any(x is not None for x in of_results):
            grads = self.backward.apply(*of_results, *given[self.results :], wanted)
        if any(name in along for name in function.learned):
            self.check_terms(along, dict(zip(function.learned, wanted, strict=True)))
            found = self.second.apply(*map(along.get, self.inputs), *given)[self.results :]
            grads = [_sum(*pair) for pair in itertools.zip_longest(itertools.compress(found, wanted), grads)]
        return tuple(grads)

    def with_tangents(self, operands: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """Return what `forward` does in forward mode, computed with its tangents in one."""
        pairs = [operators.unpacked(x) for x in operands]
        tangents = dict(zip(self.function.names, (tangent for _, tangent in pairs), strict=True))
        found = self.moved.apply(*map(tangents.get, self.row.moved), *(x for x, _ in pairs))
        return tuple(map(operators.dual, found[: self.results], found[self.results :]))

    # Refusals

    def check_terms(self, along: Arguments, needed: Arguments) -> None:
        """Refuse derivatives by terms, and of their gradients, other than the first."""
        for name in self.terms:
            if along.get(name) is not None or needed.get(name):
                raise RuntimeError(NO_SECOND_OF_TERM.format(self.function.name, name))

    def no_second(self, ctx: object, *_: object) -> NoReturn:
        raise RuntimeError(NO_SECOND.format(self.function.name))

    def no_third(self, ctx: object, *_: object) -> NoReturn:
        raise RuntimeError(NO_THIRD.format(self.function.name))

    def no_forward_twice(self, ctx: object, *_: object) -> NoReturn:
        raise RuntimeError(NO_FORWARD_TWICE.format(self.function.name))


def _sum(one: MaybeTensor, other: MaybeTensor) -> MaybeTensor:
    return one if other is None else other if one is None else one + other


def _where(needed: Sequence[bool], grads: Sequence[MaybeTensor]) -> tuple[MaybeTensor, ...]:
    """Return the gradients that are needed, and None for the others."""
    return tuple(x if need else None for x, need in itertools.zip_longest(grads, needed))


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
        if all(x is None for x in of_results):
            return (None,) * len(ctx.needs_input_grad)
        needed = dict(zip(names, ctx.needs_input_grad[3:], strict=True))
        wanted = [needed.get(name, False) for name in function.learned]
        moved = operators.with_tangents(function.backward_names, of_results)
        if torch.is_grad_enabled() or moved or needs_operator((*of_results, *saved)):
            results = saved[end:] if function.row.saved else ()
            operands = function.operands.of(given)
            grads = spread(function.call_backward(*of_results, *results, *operands, wanted), wanted)
        else:
            found: Any = function.differentiate(of_results, given, saved[end:], wanted)
            grads = [to_tensor(grad) if want else None for grad, want in zip(found, wanted, strict=True)]
        by_name = dict(zip(function.learned, grads, strict=True))
        return None, None, None, *[by_name.get(name) for name in names]
