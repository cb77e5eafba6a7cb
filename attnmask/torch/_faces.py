"""Functions of CPU tensors, made from their rows: with gradients, or steps, which write to a state.

A function is two operators, and a step one::

    out, state = torch.ops.attnmask.linear_attention(query, key, value, ...)
    gradients = torch.ops.attnmask.linear_attention_backward(dout, dstate, query, key, value, ..., wanted)
    out = torch.ops.attnmask.linear_attention_step(query, key, value, state, ...)

Both results are always there. Gradients take nothing but the arguments, from which they compute again what they need:
its size depends on the lengths of sequences, which a graph does not know. `wanted` says of the arguments that have
gradients whether they are to be returned. Plain calls go to C without an operator, and keep what gradients need.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol

from numpy.typing import ArrayLike

from attnmask._common.arguments import describe, flag, integer, one_of, real, suit_hint
from attnmask._common.types import AnyFunction, Arguments, Array
from attnmask._faces.rows import (
    INTEGERS,
    TENSORS,
    Argument,
    Face,
    Kind,
    LayoutError,
    Row,
    function,
    library_doc,
)
from attnmask.torch import _operators as operators
from attnmask.torch._import import torch
from attnmask.torch._operators import check_no_tangents, check_tensor, needs_operator, operand, tensors_among
from attnmask.torch._states import to_tensor
from attnmask.torch._types import Context, MaybeTensor, Shaped

TORCH = Face(
    array="torch.Tensor",
    state="torch.Tensor",
    integers="ArrayLike",
    result="torch.Tensor",
    types={"torch": torch, "ArrayLike": ArrayLike, "Literal": Literal},
    given="Tensor",
    integers_given="Tensor or array_like of integers",
    returned="Tensor",
    imports="torch",
)
_SCHEMAS = {  # the types of operators' arguments
    Kind.SCALE: "float",
    Kind.SIZE: "SymInt",
    Kind.FLAG: "bool",
    Kind.CHOICE: "str",
    Kind.STATE: "Tensor(a!)",
}
_CHECKS: dict[Kind, AnyFunction] = {Kind.SCALE: real, Kind.SIZE: integer, Kind.FLAG: flag}


def _check(argument: Argument) -> AnyFunction:
    """Return what checks an argument that is no tensor, given it and its name."""

    def choice(value: object, name: str, choices: tuple[str | None, ...] = argument.choices) -> object:
        one_of(value, name, choices)
        return value

    return _CHECKS.get(argument.kind, choice)


class _Function:
    """The base of functions of tensors. Operators take tensors first, then integers, then all other arguments."""

    def __init__(self, row: Row) -> None:
        self.row, self.name = row, row.name
        others = (*_CHECKS, Kind.CHOICE)
        operands = [x for kinds in (TENSORS, INTEGERS, others) for x in row.problem if x.kind in kinds]
        self.tensors = [(x.name, x.optional) for x in operands if x.kind in TENSORS]
        self.checks = [(x.name, x.optional, _check(x)) for x in operands if x.kind in others]
        self.integers = {*row.of(*INTEGERS)}
        self.names = tuple(x.name for x in operands)
        self.written = row.of(Kind.STATE)
        self.order = [argument.name for argument in row.problem]
        self.starts = row.of(Kind.STARTS)
        types = (_SCHEMAS.get(x.kind, "Tensor") + "?" * x.optional for x in operands)
        self.schema = ", ".join(map(" ".join, zip(types, self.names, strict=True)))

    def prepared(self, given: Arguments) -> Arguments:
        """Return checked arguments. Under autocast, cast tensors that the row says, and those of 16-bit types that are
        not written to.
        """
        for name, optional in self.tensors:
            x = given[name]
            if x is not None or not optional:
                check_tensor(x, name)
        for name, optional, check in self.checks:
            x = given[name]
            if x is not None or not optional:
                given[name] = check(x, name)
        if not torch.is_autocast_enabled("cpu"):
            return given
        return given | {
            name: operators.autocast(x)
            for name, x in tensors_among(given).items()
            if name in self.row.cast or (x.dtype.itemsize == 2 and name not in self.written)
        }

    def by_name(self, arguments: Iterable[object]) -> Arguments:
        """Return operands by name, in the order of the row."""
        given = dict(zip(self.names, arguments, strict=True))
        return {name: given[name] for name in self.order}

    def call(self, entry: AnyFunction, given: Arguments, more: Arguments) -> Any:
        """Call a function of the core with the problem in `given` and what follows it, tensors in place."""
        try:
            values = [
                operators.in_place(x, name) if isinstance(x, torch.Tensor) else x
                for name, x in (given | more).items()
            ]
            return entry(*values)
        except (TypeError, ValueError) as error:
            suit_hint(error, given)
            raise

    def likes(self, given: Arguments) -> list[Shaped]:
        """Return the shapes and types of the results."""
        shapes = {name: x.shape for name, x in tensors_among(given).items()}
        try:
            found = self.row.shapes(shapes)
        except LayoutError as error:
            name, layout = error.argument.name, error.argument.layout
            raise ValueError(f"{name} must be {layout}, got {describe(given[name])}") from None
        dtype = given[self.names[0]].dtype
        wide = operators.wide_dtype(dtype)
        return [(shape, wide if x.wide else dtype) for shape, x in zip(found, self.row.results, strict=True)]

    def fake(self, *arguments: Any) -> Any:
        check_no_tangents(self.names, arguments, self.name)
        operators.check_devices(self.names, arguments)
        likes = self.likes(self.by_name(arguments))
        made = tuple(arguments[0].new_empty(shape, dtype=dtype) for shape, dtype in likes)
        return made if self.row.all else made[0]

    def ordered(self, given: Arguments) -> list[Any]:
        """Return the operands of operators."""
        return [operand(given[name]) if name in self.integers else given[name] for name in self.names]

    def applied(self, operator: AnyFunction, given: Arguments) -> Any:
        meta = operators.on_meta(given)
        return operators.call_operator(operator, self.ordered(given), meta)


class _Differentiable(_Function):
    def __init__(self, row: Row) -> None:
        super().__init__(row)
        self.learned = len(self.tensors)
        self.backward_names = ("dout", "dstate", *self.names, "wanted")
        backward = f"{row.name}_backward"
        operators.register(
            row.name, self.schema, self.on_cpu, self.fake, results="(Tensor out, Tensor state)"
        )
        operators.register(
            backward,
            f"Tensor? dout, Tensor? dstate, {self.schema}, bool[] wanted",
            self.backward_on_cpu,
            self.backward_fake,
            results="Tensor[]",
        )
        self.operator = getattr(torch.ops.attnmask, row.name).default
        self.backward = getattr(torch.ops.attnmask, backward).default
        rules = operators.Rules(
            row.name,
            self.names,
            self.backward_names,
            self.operator,
            self.backward,
            self.keep,
            self.spread,
            self.in_one_call,
        )
        self.transformed = operators.transformed(rules)
        operators.register_rules(rules, self.on_cpu, self.backward_on_cpu)

    def compute(self, given: Arguments, with_all: bool) -> Any:
        result = self.call(self.row.entry, given, {self.row.all: with_all, "out": None})
        return tuple(map(to_tensor, result)) if with_all else to_tensor(result)

    def remember(self, given: Arguments) -> tuple[Any, ...]:
        """Return the results, and what gradients need."""
        found = self.call(self.row.keep or self.row.entry, given, {self.row.all: True, "out": None})
        return found if self.row.keep else (found,)

    def on_cpu(self, *arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        check_no_tangents(self.names, arguments, self.name)
        return self.compute(self.by_name(arguments), True)

    def differentiate(
        self, dout: MaybeTensor, dstate: MaybeTensor, arguments: Sequence[object], kept: Sequence[object] = ()
    ) -> tuple[Array, ...]:
        check_no_tangents(self.backward_names, (dout, dstate, *arguments), self.name)
        given = self.by_name(arguments)
        if dout is None:
            shape, dtype = self.likes(given)[0]
            dout = torch.zeros(shape, dtype=dtype)
        if self.row.keep and not kept:
            _, *kept = self.remember(given)
        held = dict(zip(("kept",), kept, strict=False))
        return self.call(self.row.backward, given, held | {"dout": dout, "dstate": dstate})

    def backward_on_cpu(self, dout: MaybeTensor, dstate: MaybeTensor, *more: Any) -> list[torch.Tensor]:
        *arguments, wanted = more
        grads = self.differentiate(dout, dstate, arguments)
        return list(map(to_tensor, itertools.compress(grads, wanted)))

    def backward_fake(self, dout: MaybeTensor, dstate: MaybeTensor, *more: Any) -> list[torch.Tensor]:
        *arguments, wanted = more
        operators.check_devices(self.backward_names[:-1], (dout, dstate, *arguments))
        return [x.new_empty(x.shape) for x in itertools.compress(arguments, wanted)]

    def keep(self, ctx: Context, inputs: tuple[Any, ...], output: object) -> None:
        tensors = self.learned + len(self.integers)
        ctx.save_for_backward(*inputs[:tensors])
        ctx.more = inputs[tensors:]
        ctx.set_materialize_grads(False)

    def spread(
        self, operator: AnyFunction, ctx: Context, dout: MaybeTensor, dstate: MaybeTensor
    ) -> tuple[MaybeTensor, ...]:
        wanted = [bool(needed) for needed in ctx.needs_input_grad[: self.learned]]
        grads = operator(dout, dstate, *ctx.saved_tensors, *ctx.more, wanted)
        return *operators.spread(grads, wanted), *[None] * (len(self.names) - self.learned)

    def in_one_call(self, given: Arguments, dims: Arguments, count: int) -> tuple[list[object], int] | None:
        """Fold mapped rows into the batch. Arrays with an entry for each batch row are those of three or more axes."""
        tensors = tensors_among(given)
        by_row = {name for name, x in tensors.items() if x.ndim - (dims[name] is not None) > 2}
        summed = (name not in by_row for name in itertools.compress(self.names, given.get("wanted", ())))
        one_by_one = any(dims[name] is not None for name in tensors.keys() - by_row)
        if one_by_one or any(given[name] is not None for name in self.starts):
            return None
        if any(summed):  # a gradient over the rows of each call
            return None
        folded, rows = dict(given), 0
        for name in by_row:
            x, dim = tensors[name], dims[name]
            x = x.expand(count, *x.shape) if dim is None else x.movedim(dim, 0)
            rows = x.shape[1]
            folded[name] = x.flatten(0, 1)
        return list(folded.values()), rows

    def __call__(self, given: Arguments) -> Any:
        compiling = torch.compiler.is_dynamo_compiling()
        if compiling and torch._C._are_functorch_transforms_active():
            # Operators have no gradients for torch.func.
            return torch.compiler.disable(self.__call__)(given)
        with_all = flag(given.pop(self.row.all), self.row.all)
        given = self.prepared(given)
        if not compiling:
            check_no_tangents(given, given.values(), self.name)
        if compiling or needs_operator(given.values()):
            operator = self.transformed.apply if operators.is_differentiated() else self.operator
            results = self.applied(operator, given)
        elif torch.is_grad_enabled() and any(
            given[name] is not None and given[name].requires_grad for name, _ in self.tensors
        ):
            results = _Learning.apply(self, *self.ordered(given))
        else:
            return self.compute(given, with_all)
        return results if with_all else results[0]


class _Learned(Context, Protocol):
    function: _Differentiable


class _Learning(torch.autograd.Function):
    """A function called without an operator, which keeps what the gradient needs."""

    @staticmethod
    def forward(ctx: _Learned, function: _Differentiable, *arguments: Any) -> tuple[torch.Tensor, ...]:
        results, *kept = function.remember(function.by_name(arguments))
        count = function.learned + len(function.integers)
        ctx.function, ctx.more = function, arguments[count:]
        ctx.save_for_backward(*arguments[:count], *map(to_tensor, kept))
        ctx.set_materialize_grads(False)
        return tuple(map(to_tensor, results))

    @staticmethod
    def backward(ctx: _Learned, dout: MaybeTensor, dstate: MaybeTensor) -> tuple[MaybeTensor, ...]:
        if torch.compiler.is_dynamo_compiling():  # where gradients are compiled, too
            return torch.compiler.disable(_Learning.backward)(ctx, dout, dstate)
        function, tensors = ctx.function, ctx.saved_tensors
        count = function.learned + len(function.integers)
        arguments = *tensors[:count], *ctx.more
        wanted = [bool(needed) for needed in ctx.needs_input_grad[1 : 1 + function.learned]]
        if torch.is_grad_enabled() or needs_operator((dout, dstate, *tensors)):
            grads = operators.spread(function.backward(dout, dstate, *arguments, wanted), wanted)
        else:
            found = function.differentiate(dout, dstate, arguments, tensors[count:])
            grads = [to_tensor(grad) if needed else None for grad, needed in zip(found, wanted, strict=True)]
        return None, *grads, *[None] * (len(function.names) - function.learned)


class _Step(_Function):
    """One token of each sequence: a function that writes to a state, and has no gradient."""

    def __init__(self, row: Row) -> None:
        super().__init__(row)
        (self.state,) = self.written
        operators.register(
            row.name,
            self.schema,
            self.on_cpu,
            self.fake,
            results="Tensor",
            autograd=operators.without_gradient(row.name, self.names, row.trained),
            vmap=self.mapped,
        )
        self.operator = getattr(torch.ops.attnmask, row.name).default

    def compute(self, given: Arguments) -> torch.Tensor:
        out = self.call(self.row.entry, given, {"out": None})
        if not given[self.state].is_inference():
            torch.autograd.graph.increment_version(given[self.state])
        return to_tensor(out)

    def on_cpu(self, *arguments: object) -> torch.Tensor:
        return self.compute(self.by_name(arguments))

    def mapped(
        self, info: operators.Mapped, in_dims: Sequence[object], *arguments: object
    ) -> tuple[torch.Tensor, int]:
        if in_dims[self.names.index(self.state)] is None:
            raise RuntimeError(
                f"{self.state} must be mapped in {self.name} under vmap: all calls would write to the same one"
            )
        count, size = len(self.names), info.batch_size
        calls = [self.operator(*map(operators.chosen, arguments, in_dims, [i] * count)) for i in range(size)]
        return torch.stack(calls), 0

    def __call__(self, given: Arguments) -> torch.Tensor:
        given = self.prepared(given)
        compiling = torch.compiler.is_dynamo_compiling()
        if not compiling:
            operators.check_no_gradient(tensors_among(given), self.name, self.row.trained)
        if compiling or needs_operator(given.values()):
            return self.applied(self.operator, given)
        return self.compute(given)


def torch_face(row: Row) -> Callable[..., Any]:
    """Return the function of tensors of a row."""
    *names, last = (f"`{name}`" for name in row.cast)
    cast = f"{', '.join(names)} and {last}" if names else last
    (state,) = row.of(Kind.STATE) or ("",)
    if state:
        about = f"""Apply `attnmask.{row.name}` to CPU tensors: one token of each sequence, `{state}` updated in place.

It has no gradient: with grad mode on, tensors that require one are an error. In graphs it is one operator, which
declares that it writes to `{state}`. ``torch.autocast`` casts {cast}, but not `{state}`."""
    else:
        about = f"""Apply `attnmask.{row.name}` to CPU tensors, with gradients of all of them and of the state.

``torch.autocast`` casts {cast}."""
    made = function(row, TORCH, _Step(row) if state else _Differentiable(row), library_doc(row, TORCH, about))
    made.__module__ = "attnmask.torch"
    return made
