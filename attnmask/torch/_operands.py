"""Operands: what PyTorch's operators take for the arguments of a function.

An argument of a type that operators do not have becomes two or three operands (`_PARTS`), such as a mask.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from inspect import Parameter
from typing import Any

import numpy as np

from attnmask._attention.hints import check_hints
from attnmask._attention.weights import as_slice, wanted
from attnmask._common.arguments import (
    TOP_LEFT,
    describe,
    flag,
    integer,
    is_bottom_right,
    one_of,
    real,
    window,
)
from attnmask._common.types import AnyFunction, Arguments
from attnmask._faces.rows import ARRAYS, Argument, Kind, Row
from attnmask._masks.info import MaskInfo
from attnmask.torch._import import torch
from attnmask.torch._masks import mask_tensors, restored
from attnmask.torch._operators import check_tensor, operand, seed
from attnmask.torch._states import MaskTensors
from attnmask.torch._types import MaybeTensor

LEARNED = (Kind.LEARNED, Kind.TERM)
_MUST_BE_TENSORS = (Kind.LEARNED, Kind.STATE)


def _of_mask(given: Arguments, name: str) -> tuple[object, ...]:
    mask = given.get(name)
    mask = mask_tensors(mask) if isinstance(mask, MaskInfo) else mask
    if isinstance(mask, MaskTensors):
        return None, list(mask.tensors), mask.specification
    return operand(mask), [], ""


def _mask(array: MaybeTensor, tensors: Sequence[torch.Tensor], specification: str) -> object:
    return restored(specification, tensors) if specification else array


def _or_number(x: Any, name: str, minimum: int | None) -> tuple[object, object]:
    """Return an array and None, or None and a number."""
    is_number = isinstance(x, (int, torch.SymInt, np.integer)) and not isinstance(x, bool)
    return (None, integer(x, name, minimum)) if is_number else (operand(x), None)


def _of_lengths(given: Arguments, name: str) -> tuple[object, object]:
    return _or_number(given.get(name), name, 0)


def _of_diagonal(given: Arguments, name: str) -> tuple[object, object]:
    offset: Any = given.get(name, TOP_LEFT)
    if offset is TOP_LEFT:
        return None, None
    if is_bottom_right(offset, name):
        starts = [given.get("cum_seqlens_q"), given.get("cum_seqlens_k")]
        if starts == [None, None]:
            return None, given["key"].shape[-3] - given["query"].shape[-3]
        queries, keys = (torch.diff(operand(x if x is not None else y)) for x, y in (starts, starts[::-1]))
        offset = keys - queries
    return _or_number(offset, name, None)


def _diagonal(array: MaybeTensor, number: int | None) -> object:
    return _either(array, TOP_LEFT if number is None else number)


def _either(one: object, other: object) -> object:
    return other if one is None else one


def _of_window(given: Arguments, name: str) -> tuple[int | None, int | None]:
    sides = given.get(name)
    return (None, None) if sides is None else window(sides)


def _window(left: int | None, right: int | None) -> object:
    return None if left is None and right is None else (left, right)


def _of_queries(given: Arguments, name: str) -> tuple[object, ...]:
    queries: Any = given.get(name)
    part = as_slice(queries)
    if part is not None:
        return None, part.start, part.stop, part.step
    is_empty = isinstance(queries, (list, tuple)) and len(queries) == 0
    return operand(np.zeros(0, np.int64) if is_empty else queries), None, None, None


def _queries(array: MaybeTensor, first: int | None, end: int | None, step: int | None) -> object:
    return _either(array, slice(first, end, step))


def _of_statistics(given: Arguments, name: str) -> tuple[str, int]:
    names, top = wanted(given[name])
    return ",".join(names), top


def _statistics(names: str, top: int) -> object:
    return [(name, top) if name == "top_keys" else name for name in names.split(",") if name]


_PARTS: dict[
    Kind, tuple[str, AnyFunction, AnyFunction]
] = {  # operands, what makes them, and what they are made into
    Kind.MASK: ("Tensor? {0}, Tensor[] mask_tensors, str mask_specification", _of_mask, _mask),
    Kind.DIAGONAL: ("Tensor? {0}, SymInt? offset", _of_diagonal, _diagonal),
    Kind.LENGTHS: ("Tensor? {0}, SymInt? cache_length", _of_lengths, _either),
    Kind.WINDOW: ("SymInt? window_left, SymInt? window_right", _of_window, _window),
    Kind.QUERIES: ("Tensor? {0}, SymInt? first, SymInt? end, SymInt? step", _of_queries, _queries),
    Kind.STATISTICS: ("str {0}, SymInt top", _of_statistics, _statistics),
}


_OF_PYTHON = {float: torch.float64, int: torch.int64}


def _to_dtype(value: Any, name: str) -> torch.dtype:
    """Return PyTorch's type of numbers for one of either library."""
    found = _OF_PYTHON.get(value) or getattr(torch, getattr(value, "__name__", str(value)), None)
    if isinstance(value, torch.dtype) or isinstance(found, torch.dtype):
        return value if isinstance(value, torch.dtype) else found
    raise TypeError(f"{name} must be a dtype, got {describe(value)}")


_NUMBERS: dict[Kind, tuple[str, AnyFunction | None]] = {
    Kind.SCALE: ("float", real),
    Kind.NUMBER: ("float", real),
    Kind.CHANCE: ("float", real),
    Kind.SEED: ("SymInt", seed),
    Kind.SIZE: ("SymInt", integer),
    Kind.FLAG: ("bool", flag),
    Kind.CHOICE: ("str", None),
    Kind.DTYPE: ("ScalarType", _to_dtype),
}
# Then numbers: Inductor mixes up a text after a SymInt (PyTorch 2.13).
_IN_ORDER = ("Tensor", "Tensor[]", "str")


def _order(part: str) -> int:
    kind = re.sub(r"\?|\(.*", "", part.split()[0])
    return _IN_ORDER.index(kind) if kind in _IN_ORDER else len(_IN_ORDER)


class Operands:
    """The operands of a row, in the order of its schema: tensors with gradients, other tensors, then the rest.

    Three functions are compiled from text: `check` checks arguments, `of` turns them into operands, and `arguments`
    turns operands back. As loops over the row, they would be slower: ``torch.compile`` guards every attribute that it
    reads while tracing, and evaluates the guards in each call.
    """

    def __init__(self, row: Row) -> None:
        letters = iter("abcdefgh")
        learned_first = sorted(row.problem, key=lambda x: bool(row.backward) and x.kind not in LEARNED)
        schemas = {x.name: list(_schema(x, letters)) for x in learned_first}
        parts = sorted((part for schema in schemas.values() for part in schema), key=_order)
        self.schema = ", ".join(parts)
        self.names = tuple(_name(part) for part in parts)
        self.tensors, self.lists = (sum(_order(part) == place for part in parts) for place in (0, 1))
        self.arrays = {x.name for x in row.problem if x.kind in ARRAYS}
        checks, takes, joins = [], [], []
        self._scope: dict[str, Any] = {
            "check_tensor": check_tensor,
            "operand": operand,
            "check_hints": check_hints,
        }
        for x in row.problem:
            value = (
                f"given[{x.name!r}]"
                if x.default is Parameter.empty
                else f"given.get({x.name!r}, {x.default!r})"
            )
            if x.kind in _MUST_BE_TENSORS:
                checks.append(f"check_tensor(given[{x.name!r}], {x.name!r})")
                if x.optional:
                    checks[-1] = f"if given.get({x.name!r}) is not None: {checks[-1]}"
            if x.kind in _PARTS:
                _, self._scope[f"of_{x.kind.value}"], self._scope[f"as_{x.kind.value}"] = _PARTS[x.kind]
                operands = ", ".join(map(_name, schemas[x.name]))
                takes.append(f"{operands} = of_{x.kind.value}(given, {x.name!r})")
                joins.append(f"{x.name!r}: as_{x.kind.value}({operands})")
                continue
            if x.kind is Kind.HINT:
                continue
            takes.append(f"{x.name} = {value}")
            joins.append(f"{x.name!r}: {x.name}")
            if x.kind is Kind.CHOICE:
                self._scope["one_of"] = one_of
                takes.append(f"one_of({x.name}, {x.name!r}, {x.choices!r})")
            elif x.kind in _NUMBERS:
                self._scope[f"as_{x.kind.value}"] = _NUMBERS[x.kind][1]
                check = f"{x.name} = as_{x.kind.value}({x.name}, {x.name!r})"
                takes.append(f"if {x.name} is not None: {check}" if x.optional else check)
            elif x.kind not in _MUST_BE_TENSORS:
                takes.append(f"{x.name} = operand({x.name})")
        hints = row.of(Kind.HINT)
        if hints:
            takes.append(f"check_hints({{name: given.get(name) for name in {hints!r}}})")
        self.check = self._compiled("given", [*checks, "return given"])
        self.of = self._compiled("given", [*takes, f"return [{', '.join(self.names)}]"])
        self.arguments = self._compiled(", ".join(self.names), [f"return {{{', '.join(joins)}}}"])

    def _compiled(self, parameters: str, lines: list[str]) -> AnyFunction:
        text = "\n    ".join([f"def function({parameters}):", *lines])
        scope = dict(self._scope)
        exec(compile(text, "<attnmask operands>", "exec"), scope)
        function: AnyFunction = scope["function"]
        return function


def _schema(argument: Argument, letters: Iterator[str]) -> Iterator[str]:
    optional = "?" * argument.optional
    if argument.kind in _PARTS:
        yield from _PARTS[argument.kind][0].format(argument.name).split(", ")
    elif argument.kind in _NUMBERS:
        yield f"{_NUMBERS[argument.kind][0]}{optional} {argument.name}"
    elif argument.kind is Kind.STATE:
        yield f"Tensor({next(letters)}!){optional} {argument.name}"
    elif argument.kind is not Kind.HINT:
        yield f"Tensor{optional} {argument.name}"


def _name(part: str) -> str:
    return part.split()[-1]
