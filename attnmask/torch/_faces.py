"""Functions of CPU tensors, made from their rows: with gradients, or without, which may write to their arguments.

A function with gradients is two operators, and one without is one::

    out, state = torch.ops.attnmask.linear_attention(query, key, value, ...)
    gradients = torch.ops.attnmask.linear_attention_backward(dout, dstate, query, key, value, ..., wanted)
    out = torch.ops.attnmask.linear_attention_step(query, key, value, state, ...)

Operators return all results. `wanted` is a list of bools: which gradients to return. The gradient's operator
recomputes what it needs from the arguments, or takes the results if the row has them in `saved`. For 16-bit types an
operator named ``…_wide`` then returns the first result a second time, before rounding, and the gradient takes that
one. Calls outside graphs go to C without an operator, and keep what gradients need.

``_operands.py`` describes the operands, and ``_gradients.py`` how functions take part in autograd and ``torch.func``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

from numpy.typing import ArrayLike

from attnmask._common.arguments import describe, flag, suit_hint
from attnmask._common.types import AnyFunction, Arguments
from attnmask._faces.rows import Argument, Face, Kind, LayoutError, Row, function, library_doc
from attnmask.torch import _operators as operators
from attnmask.torch._gradients import Learning, Transforms, held
from attnmask.torch._import import torch
from attnmask.torch._masks import restored
from attnmask.torch._operands import LEARNED, Operands
from attnmask.torch._operators import check_no_tangents, needs_operator, tensors_among, with_tangents
from attnmask.torch._states import MaskTensors, batch_rows, to_tensor
from attnmask.torch._types import MaybeTensor, Shaped

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
    dtype="torch.dtype",
)
_NO_OUT = {"out": None}


class _Function:
    """The base of functions of tensors."""

    operator: Any
    layouts: dict[str, Argument]  # of the operands of both operators, for vmap

    def __init__(self, row: Row) -> None:
        self.row, self.name, self.writes = row, row.name, row.of(Kind.STATE)
        self.operands = Operands(row)
        self.names = self.operands.names
        self.learned = row.of(*LEARNED)
        self.masks, self.dtypes = row.of(Kind.MASK), row.of(Kind.DTYPE)
        self.starts = row.of(Kind.STARTS)
        self.chances, self.seeds = row.of(Kind.CHANCE), row.of(Kind.SEED)

    # Arguments and operands

    def prepared(self, given: Arguments) -> Arguments:
        """Check arguments, and cast them under autocast: those in ``row.cast``, and 16-bit tensors that must have the
        same type.
        """
        given = self.operands.check(given)
        return self.cast(given) if torch.is_autocast_enabled("cpu") else given

    def cast(self, given: Arguments) -> Arguments:
        alike = self.row.of(Kind.LEARNED)
        return given | {
            name: operators.autocast(x)
            for name, x in tensors_among(given).items()
            if name in self.row.cast or (name in alike and x.dtype.itemsize == 2)
        }

    def call(
        self, entry: AnyFunction, given: Arguments, more: Arguments, tensors: dict[str, torch.Tensor]
    ) -> Any:
        """Call a function of the core with arguments and what follows them, `tensors` among both in place."""
        values = given | more
        try:
            for name, x in tensors.items():
                values[name] = operators.in_place(x, name)
            for name in self.masks:
                if isinstance(values.get(name), MaskTensors):
                    values[name] = restored(*values[name])
            for name in self.dtypes:
                if isinstance(values[name], torch.dtype):
                    values[name] = operators.in_numpy(values[name], name)
            return entry(**values) if self.row.by_name else entry(*values.values())
        except (TypeError, ValueError) as error:
            suit_hint(error, given)
            raise

    def likes(self, given: Arguments) -> list[Shaped]:
        """Return the shapes and types of the results."""
        batch: Any = self.fits(given) if self.row.fits else None
        shapes = {
            name: (*x.shape[:-1], 2 * x.shape[-1])
            if name in self.writes and x.dtype == torch.uint8
            else x.shape
            for name, x in tensors_among(given).items()  # a byte of a four-bit cache holds two channels
        }
        several = batch is not None and len(batch) > 1
        if several:
            shapes = {name: (batch[0], *shapes[name][-3:]) for name in self.row.of(Kind.LEARNED)}
        try:
            found = self.row.shapes(shapes)
        except LayoutError as error:
            name, layout = error.argument.name, error.argument.layout
            raise ValueError(f"{name} must be {layout}, got {describe(given[name])}") from None
        found = [(*batch, *shape[1:]) for shape in found] if several else found
        dtype = next((given[x] for x in self.dtypes if given.get(x)), given[self.names[0]].dtype)
        wide = operators.wide_dtype(dtype)
        return [(shape, wide if x.wide else dtype) for shape, x in zip(found, self.row.results, strict=True)]

    def fits(self, given: Arguments) -> Any:
        """Check that shapes and types fit each other, and return the batch axes if there may be several."""
        try:
            return self.row.fits(given, operators.TYPES.__contains__)
        except (TypeError, ValueError) as error:
            suit_hint(error, given)
            raise

    def fake(self, *operands: Any) -> Any:
        check_no_tangents(self.names, operands, self.name)
        operators.check_devices(self.names, operands)
        given = dict(zip(self.names, operands, strict=True))
        made = tuple(operands[0].new_empty(shape, dtype=dtype) for shape, dtype in self.likes(given))
        return made if len(made) > 1 else made[0] if made else None

    def on_autocast(self, *operands: Any) -> Any:
        given = self.cast(dict(zip(self.names, operands, strict=True)))
        with torch.autocast("cpu", enabled=False):
            return self.operator(*given.values())

    def applied(self, operator: AnyFunction, given: Arguments) -> Any:
        meta = operators.on_meta(given)
        return operators.call_operator(operator, self.operands.of(given), meta)

    def drawn(self, given: Arguments, in_graph: bool) -> Arguments:
        """Return the arguments with the seed of what is drawn."""
        for name, seed in zip(self.chances, self.seeds, strict=True):
            if name in given:
                return given | {seed: operators.seed_of(given[name], given.get(seed), in_graph)}
        return given

    # Under vmap

    def folded(self, given: Arguments, dims: Arguments, count: int) -> tuple[list[object], int] | None:
        """Fold mapped rows into the batch, where every batch row is as when called alone."""
        if any(given.get(name) is not None for name in self.starts):
            return None
        if any(given.get(name) for name in self.chances) or any(dims.get("mask_tensors") or ()):
            return None
        if batch_rows(given.get("mask_specification", "")) > 1:
            return None
        first = self.names[0]
        if not self.layouts[first].axes(given[first].ndim - (dims[first] is not None)):
            return None  # several batch axes
        rows = (
            given[first].movedim(dims[first], 0).shape[1]
            if dims[first] is not None
            else given[first].shape[0]
        )
        together = dict(given)
        by_row = set()
        for name, x in tensors_among(given).items():
            argument, dim = self.layouts[name], dims[name]
            axes = argument.axes(x.ndim - (dim is not None))
            if argument.broadcasts or (axes and axes[0] in ("B", "N")):
                alike = name, f"{name}_tangent", name.removesuffix("_tangent")
                shared = all(dims.get(x) is None for x in alike)
                together[name] = _folded(x, dim, argument, count, rows, shared)
                by_row.add(name)
            elif dim is not None:
                return None
        summed = itertools.compress(self.learned, given.get("wanted", ()))
        if any(name not in by_row or self.layouts[name].broadcasts for name in summed):
            return None  # a gradient over the rows of each call
        return list(together.values()), rows


def _folded(
    x: torch.Tensor, dim: int | None, argument: Argument, count: int, rows: int, shared: bool
) -> torch.Tensor:
    """Return as one call of all rows what `count` calls of so many batch rows have."""
    x = x[None] if dim is None else x.movedim(dim, 0)
    if argument.broadcasts:
        missing = len(argument.layout.split(",")) + 1 - x.ndim
        x = x.reshape(x.shape[0], *[1] * missing, *x.shape[1:])
        if shared and x.shape[1] == 1:
            return x[0]
    return x.expand(count, rows, *x.shape[2:]).reshape(count * rows, *x.shape[2:])


class Differentiable(_Function):
    def __init__(self, row: Row) -> None:
        super().__init__(row)
        of_results = [f"d{x.name}" for x in row.results]
        self.grads = len(of_results)
        self.inputs = row.of(Kind.LEARNED)
        self.tangents = tuple(f"{x}_tangent" for x in row.moved)
        self.cotangents = tuple(f"{x}_cotangent" for x in self.inputs)
        self.jvp_names = (*self.names, *self.tangents)
        self.backward_names = (*of_results, *row.saved, *self.names, "wanted")
        self.second_names = (*self.cotangents, *self.backward_names[:-1])
        made = (
            Argument(f"{d}{x.name}", Kind.DATA, x.layout, None, "") for x in row.results for d in ("d", "")
        )
        self.layouts = {x.name: x for x in (*row.problem, *made)}
        self.layouts |= {
            f"{x}_{kind}": self.layouts[x]
            for kind, moved in (("tangent", row.moved), ("cotangent", self.inputs))
            for x in moved
        }
        self.transforms = Transforms(self)
        results = [f"Tensor {x.name}" for x in row.results]
        given = ", ".join(
            (*(f"Tensor? {x}" for x in of_results), *(f"Tensor {x}" for x in row.saved), self.operands.schema)
        )
        rules: Arguments = {
            "Autograd": operators.autograd_kernel(row.name, self.on_cpu, self.learn),
            "AutocastCPU": self.on_autocast if row.cast else None,
        }
        self.operator = self.register(row.name, self.operands.schema, results, self.on_cpu, self.fake, rules)
        self.wide = self.operator
        if row.saved:
            wide = f"{row.name}_wide"
            rules = {"Autograd": operators.autograd_kernel(wide, self.wide_on_cpu, self.learn_wide)}
            results = [*results, "Tensor wide_out"]
            self.wide = self.register(
                wide, self.operands.schema, results, self.wide_on_cpu, self.wide_fake, rules
            )
        if row.all or row.of(Kind.OUT):
            # Without Tag.out: Inductor would take it, and fail where sizes are symbols (PyTorch 2.13).
            into = ", ".join(
                f"Tensor({letter}!) {x.name}" for letter, x in zip("ab", row.results, strict=False)
            )
            operators.register(
                f"{row.name}.out", f"{self.operands.schema}, *, {into}", "()", self.into, self.fake_into
            )
        if row.jvp:
            self.jvp = operators.register(
                f"{row.name}_jvp",
                ", ".join((self.operands.schema, *(f"Tensor? {x}" for x in self.tangents))),
                f"({', '.join(f'Tensor {d}{x.name}' for d in ('', 'd') for x in row.results)})",
                self.jvp_on_cpu,
                self.jvp_fake,
                vmap=operators.mapped(self.call_jvp, self.jvp_names, tuple, self.folded),
            )
        if row.second:
            self.second = operators.register(
                f"{row.name}_bwd_vjp",
                ", ".join((*(f"Tensor? {x}" for x in self.cotangents), given)),
                "Tensor[]",
                self.second_on_cpu,
                self.second_fake,
                vmap=operators.mapped(self.call_second, self.second_names, list, self.folded),
            )
        backward = f"{row.name}_backward"
        self.backward = operators.register(
            backward,
            f"{given}, bool[] wanted",
            "Tensor[]",
            self.backward_on_cpu,
            self.backward_fake,
            Autograd=operators.autograd_kernel(backward, self.backward_on_cpu, self.learn_backward),
            vmap=operators.mapped(self.call_backward, self.backward_names, list, self.folded),
        )

    def register(
        self,
        name: str,
        schema: str,
        results: list[str],
        on_cpu: AnyFunction,
        fake: AnyFunction,
        rules: Arguments,
    ) -> Any:
        def call(*operands: object) -> Any:
            return operator(*operands)

        kind = tuple if len(results) > 1 else torch.Tensor
        vmap = operators.mapped(call, self.names, kind, self.folded)
        returns = f"({', '.join(results)})" if len(results) > 1 else results[0]
        operator = operators.register(name, schema, returns, on_cpu, fake, vmap=vmap, **rules)
        return operator

    # On the CPU

    def compute(self, given: Arguments, with_all: bool, tensors: dict[str, torch.Tensor]) -> Any:
        more: Arguments = {self.row.all: with_all} if self.row.all else {}
        result = self.call(self.row.entry, given, more if self.row.by_name else more | _NO_OUT, tensors)
        return tuple(map(to_tensor, result)) if isinstance(result, tuple) else to_tensor(result)

    def remember(
        self, given: Arguments, tensors: dict[str, torch.Tensor]
    ) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
        """Return the results, and what gradients need."""
        if not self.row.keep:
            found = self.compute(given, True, tensors)
            return found if isinstance(found, tuple) else (found,), []
        more: Arguments = {self.row.all: True} if self.row.all else {}
        more = {} if self.row.by_name else more | _NO_OUT
        found, *kept = self.call(self.row.keep, given, more, tensors)
        found = found if isinstance(found, tuple) else (found,)
        results = tuple(map(to_tensor, found))
        same = dict(zip(map(id, found), results, strict=True))
        return results, [same[id(x)] if id(x) in same else to_tensor(x) for x in kept]

    def on_cpu(self, *operands: object) -> Any:
        check_no_tangents(self.names, operands, self.name)
        given = self.operands.arguments(*operands)
        return self.compute(given, True, tensors_among(given))

    def into(self, *operands: Any, **results: torch.Tensor) -> None:
        if torch.is_grad_enabled() and any(map(_learns, operands)):
            raise RuntimeError(f"attnmask::{self.name}.out has no gradient: no argument may require one")
        self.fake_into(*operands, **results)
        (_, out), *others = results.items()
        given = self.operands.arguments(*operands)
        more: Arguments = ({self.row.all: True} if self.row.all else {}) | {"out": out}
        found = self.call(self.row.entry, given, more, tensors_among(given | more))
        _, *computed = found if isinstance(found, tuple) else (found,)
        for (_, result), x in zip(others, computed, strict=True):
            result.copy_(to_tensor(x))

    def fake_into(self, *operands: Any, **results: torch.Tensor) -> None:
        operators.check_devices((*results, *self.names), (*results.values(), *operands))
        likes = self.likes(dict(zip(self.names, operands, strict=True)))
        for (name, x), (shape, dtype) in zip(results.items(), likes, strict=True):
            if x.shape != tuple(shape) or x.dtype != dtype:
                expected = describe(x.new_empty(shape, dtype=dtype, device="meta"))
                raise ValueError(f"{name} must be a {expected}, got {describe(x)}")

    def wide_on_cpu(self, *operands: object) -> tuple[torch.Tensor, ...]:
        check_no_tangents(self.names, operands, self.name)
        given = self.operands.arguments(*operands)
        results, (wide_out, *_) = self.remember(given, tensors_among(given))
        return *results, wide_out.clone() if wide_out is results[0] else wide_out

    def wide_fake(self, *operands: Any) -> tuple[torch.Tensor, ...]:
        out, *more = self.fake(*operands)
        return out, *more, torch.empty_like(out, dtype=operators.wide_dtype(out.dtype))

    def grads_of(self, of_results: Sequence[MaybeTensor], given: Arguments) -> Arguments:
        """Return the gradients of the results by name, where the first must be given."""
        dout, *more = of_results
        if dout is None:
            (shape, dtype), *_ = self.likes(given)
            dout = torch.zeros(shape, dtype=dtype)
        return dict(zip(self.backward_names[: self.grads], (dout, *more), strict=True))

    def differentiate(
        self,
        of_results: Sequence[MaybeTensor],
        given: Arguments,
        kept: Sequence[torch.Tensor],
        wanted: Sequence[bool],
    ) -> Iterable[Any]:
        if self.row.keep and not kept:
            _, kept = self.remember(given, tensors_among(given))
        held = dict(zip(self.row.saved or ("kept",), kept, strict=False))
        given_grads = self.grads_of(of_results, given)
        extras: Arguments = {}
        if self.row.by_name:
            terms = self.row.of(Kind.TERM)
            extras = {f"grad_{x}": want for x, want in zip(self.learned, wanted, strict=True) if x in terms}
        more_given = held | given_grads | extras
        return self.call(self.row.backward, given, more_given, tensors_among(given | more_given))

    def backward_on_cpu(self, *operands: Any) -> list[torch.Tensor]:
        check_no_tangents(self.backward_names, operands, self.name)
        of_results, rest = operands[: self.grads], operands[self.grads :]
        saved = len(self.row.saved)
        *arguments, wanted = rest[saved:]
        grads = self.differentiate(of_results, self.operands.arguments(*arguments), rest[:saved], wanted)
        return [to_tensor(x) for x in itertools.compress(grads, wanted)]

    def backward_fake(self, *operands: Any) -> list[torch.Tensor]:
        operators.check_devices(self.backward_names, operands)
        *arguments, wanted = operands[self.grads + len(self.row.saved) :]
        return [x.new_empty(x.shape) for x in itertools.compress(arguments, wanted)]

    def jvp_on_cpu(self, *operands: Any) -> tuple[torch.Tensor, ...]:
        check_no_tangents(self.jvp_names, operands, self.name)
        count = len(self.names)
        given = self.operands.arguments(*operands[:count])
        more = dict(zip(self.jvp_names[count:], operands[count:], strict=True)) | {self.row.all: True}
        results, tangents = self.call(self.row.jvp, given, more, tensors_among(given | more))
        return tuple(map(to_tensor, (*results, *tangents)))

    def jvp_fake(self, *operands: Any) -> Any:
        results = operators.several(self.fake(*operands[: len(self.names)]))
        return *results, *map(torch.empty_like, results)

    def call_jvp(self, *operands: Any) -> tuple[torch.Tensor, ...]:
        return tuple(self.jvp(*operands))

    def second_on_cpu(self, *operands: Any) -> list[torch.Tensor]:
        check_no_tangents(self.second_names, operands, self.name)
        begin = len(self.second_names) - len(self.names)
        given = self.operands.arguments(*operands[begin:])
        more = dict(zip(self.second_names, operands[:begin], strict=False))
        of_results = [more[x] for x in self.backward_names[: self.grads]]
        more |= self.grads_of(of_results, given)
        return list(map(to_tensor, self.call(self.row.second, given, more, tensors_among(given | more))))

    def second_fake(self, *operands: Any) -> list[torch.Tensor]:
        begin = len(self.second_names) - len(self.names)
        results = operators.several(self.fake(*operands[begin:]))
        return [x.new_empty(x.shape) for x in (*results, *operands[begin : begin + len(self.inputs)])]

    def call_second(self, *operands: Any) -> tuple[torch.Tensor, ...]:
        return tuple(self.second(*operands))

    # Gradients

    def learn(self, *operands: Any) -> Any:
        if operators.is_moved() and not any(
            map(_learns, operands)
        ):  # of gradients, tangents are asked for later
            moved = with_tangents(self.names, operands)
            if moved and all(name in self.row.moved for name in moved):
                return self.transforms.with_tangents(operands)
        results = self.transforms.forward.apply(*operands)[: self.grads]
        return results if len(results) > 1 else results[0]

    def learn_wide(self, *operands: Any) -> tuple[torch.Tensor, ...]:
        results: tuple[torch.Tensor, ...] = self.transforms.forward.apply(*operands)
        return results if len(results) > self.grads else (*results, results[0].detach().clone())

    def learn_backward(self, *operands: Any) -> list[torch.Tensor]:
        return list(self.transforms.backward.apply(*operands))

    def call_forward(self, *operands: Any) -> tuple[torch.Tensor, ...]:
        narrow = operands[0].dtype.itemsize == 2
        return tuple(operators.several((self.wide if narrow else self.operator)(*operands)))

    def call_backward(self, *operands: Any) -> tuple[torch.Tensor, ...]:
        return tuple(self.backward(*operands))

    def __call__(self, given: Arguments, with_all: bool) -> Any:
        compiling = torch.compiler.is_dynamo_compiling()
        if compiling and operators.are_transforms_active():
            # Operators have no gradients for torch.func.
            return torch.compiler.disable(self.__call__)(given, with_all)
        given = self.prepared(given)
        tensors = tensors_among(given)
        moved = [] if compiling else operators.with_tangents(tensors, tensors.values())
        for name in moved:
            if name not in self.row.moved:
                raise RuntimeError(operators.NO_FORWARD.format(self.name, name))
        in_graph = compiling or bool(moved) or needs_operator(tensors.values())
        given = self.drawn(given, in_graph)
        if in_graph:
            operator = self.learn if operators.is_differentiated() else self.operator
            results = operators.several(self.applied(operator, given))
            return results if with_all else results[0]
        wanting = [name for name, x in tensors.items() if x.requires_grad] if torch.is_grad_enabled() else []
        if not wanting:
            return self.compute(given, with_all, tensors)
        if any(name in self.learned for name in wanting):
            results = Learning.apply(*held(self, given, tensors))
            return results if with_all else results[0]
        tensors |= {name: tensors[name].detach() for name in wanting}
        return self.compute(given, with_all, tensors)


def _learns(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


class _Writing(_Function):
    """A function that writes to its arguments, and has no gradient."""

    def __init__(self, row: Row) -> None:
        super().__init__(row)
        results = [f"Tensor {x.name}" for x in row.results]
        self.operator = operators.register(
            row.name,
            self.operands.schema,
            "Tensor" if len(results) == 1 else f"({', '.join(results)})",
            self.on_cpu,
            self.fake,
            Autograd=self.without_gradient,
            AutocastCPU=self.on_autocast if row.cast else None,
            vmap=self.mapped if results else None,
        )

    def compute(self, given: Arguments, with_all: bool, tensors: dict[str, torch.Tensor]) -> Any:
        more: Arguments = {self.row.all: with_all} if self.row.all else {}
        found = self.call(self.row.entry, given, more if self.row.by_name else _NO_OUT, tensors)
        # Tell autograd what was written to, as any in-place operator does.
        names = (*self.writes, "out") if given.get("key", given) is not None else ("out",)
        written = [tensors[name] for name in names if name in tensors and not tensors[name].is_inference()]
        torch.autograd.graph.increment_version(written)
        if found is None:
            return None
        out, *others = found if isinstance(found, tuple) else (found,)
        out = tensors["out"] if "out" in tensors else to_tensor(out)
        return (out, *map(to_tensor, others)) if with_all else out

    def on_cpu(self, *operands: object) -> Any:
        given = self.operands.arguments(*operands)
        return self.compute(given, bool(self.row.all), tensors_among(given))

    def without_gradient(self, *operands: object) -> Any:
        given = tensors_among(dict(zip(self.names, operands, strict=True)))
        operators.check_no_gradient(given, self.name, self.row.trained)
        with operators.below_autograd():
            return self.operator(*operands)

    def mapped(self, info: operators.Mapped, in_dims: Sequence[object], *operands: object) -> Any:
        for name, x, dim in zip(self.names, operands, in_dims, strict=True):
            if name in self.writes and x is not None and dim is None:
                raise RuntimeError(
                    f"{name} must be mapped in {self.name} under vmap: all calls would write to the same one"
                )
        kind = tuple if len(self.row.results) > 1 else torch.Tensor
        return operators.mapped(self.operator, self.names, kind, lambda *_: None)(info, in_dims, *operands)

    def __call__(self, given: Arguments, with_all: bool = False) -> Any:
        given = self.prepared(given)
        tensors = tensors_among(given)
        compiling = torch.compiler.is_dynamo_compiling()
        if not compiling:
            without = partial(self.row.without, given)
            operators.check_no_gradient(tensors, self.name, self.row.trained, without)
            if not needs_operator(tensors.values()):
                return self.compute(given, with_all, tensors)
        out = given.pop("out", None)
        if out is not None:  # to which a graph copies the result: check it before the caches are written to
            shape, dtype = self.likes(given)[0]
            if out.dtype != dtype or out.shape != tuple(shape):
                expected = f"a tensor of {str(dtype).removeprefix('torch.')} of shape {tuple(shape)}"
                raise ValueError(f"out must be {expected}, got {describe(out)}")
        found = self.applied(self.operator, given)
        results = found if isinstance(found, tuple) else (found,)
        first = results[0] if out is None else out.copy_(results[0])
        return (first, *results[1:]) if with_all else first


def torch_function(row: Row) -> Any:
    """Return what calls the function of a row, given its arguments by name and whether all results are wanted."""
    return (_Writing if row.of(Kind.STATE) else Differentiable)(row)


_NARROW = (torch.float16, torch.bfloat16)


def torch_face(row: Row) -> Callable[..., Any]:
    """Return the function of tensors of a row."""
    *names, last = (f"`{name}`" for name in row.cast or ("",))
    cast = f"``torch.autocast`` casts {', '.join(names)}{' and ' * bool(names)}{last}"
    (state,) = row.of(Kind.STATE) or ("",)
    if state:
        about = f"""Apply `attnmask.{row.name}` to CPU tensors: one token of each sequence, `{state}` updated in place.

It has no gradient: with grad mode on, tensors that require one are an error. In graphs it is one operator, which
declares that it writes to `{state}`. {cast}, but not `{state}`."""
    elif row.cast:
        about = f"""Apply `attnmask.{row.name}` to CPU tensors, with gradients of all of them and of the state.

{cast}."""
    else:
        about = f"""Apply `attnmask.{row.name}` to CPU tensors, with gradients."""
    compute = torch_function(row)

    def call(given: Arguments) -> Any:
        with_all = flag(given.pop(row.all), row.all) if row.all else False
        narrow, first = given.get(row.wide), given[row.arguments[0].name]
        if (
            not isinstance(narrow, torch.Tensor)
            or narrow.dtype not in _NARROW
            or not isinstance(first, torch.Tensor)
        ):
            return compute(given, with_all)
        given[row.wide] = narrow.to(operators.wide_dtype(first.dtype))
        found = compute(given, with_all)
        if state:  # which is written to
            narrow.copy_(given[row.wide])
        return found

    made = function(row, TORCH, call, library_doc(row, TORCH, about))
    made.__module__ = "attnmask.torch"
    return made
