"""A public function as one row, from which its faces in NumPy, PyTorch and JAX follow: see `Row`."""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from enum import Enum
from inspect import Parameter, Signature
from itertools import groupby
from sys import intern
from typing import Any, Literal, NamedTuple

from numpy.typing import ArrayLike, DTypeLike

from attnmask._common.arguments import TOP_LEFT
from attnmask._common.keywords import taken
from attnmask._common.types import AnyFunction, Arguments, Array, Given
from attnmask._linear.grads import Vjp, VjpWithState


class Kind(Enum):
    LEARNED = "learned"  # an array that has a gradient if the function has one
    TERM = "term"  # such an array of any type, maybe of NumPy in all faces: a term of the logits
    STATE = "state"  # an array that is written to
    DATA = "data"  # numbers, as an array or in a list
    STARTS = "starts"  # of sequences: integers, maybe in a list
    SLOTS = "slots"  # of rows: integers, maybe in a list
    LENGTHS = "lengths"  # integers, or one for all
    MASK = "mask"  # an array, or a `MaskInfo`
    DIAGONAL = "diagonal"  # integers, one for all, or "bottom-right"
    WINDOW = "window"  # an integer, or two
    QUERIES = "queries"  # an integer for the last ones, a slice, or integers
    STATISTICS = "statistics"  # names, maybe with a number
    SCALE = "scale"  # a number; 1 / sqrt(K) for None
    NUMBER = "number"
    CHANCE = "chance"  # a probability; what is drawn depends on the index of the row
    SEED = "seed"
    SIZE = "size"
    FLAG = "flag"
    CHOICE = "choice"
    DTYPE = "dtype"
    HINT = "hint"  # does not change results beyond rounding
    ALL = "all"  # a flag: whether all results are returned
    OUT = "out"  # takes the result


_MAYBE_ARRAYS = (Kind.LENGTHS, Kind.MASK, Kind.DIAGONAL)
ARRAYS = (Kind.LEARNED, Kind.TERM, Kind.STATE, Kind.DATA, Kind.STARTS, Kind.SLOTS, *_MAYBE_ARRAYS)
_CONSTANTS = {"TOP_LEFT": TOP_LEFT}


class Argument(NamedTuple):
    name: str
    kind: Kind
    layout: str  # such as "[H], [B, T, H] or [B, T, H, K]"
    default: Any  # Parameter.empty if it must be given
    about: str

    @property
    def choices(self) -> tuple[str | None, ...]:
        return literal_eval(self.layout) if self.kind is Kind.CHOICE else ()

    @property
    def optional(self) -> bool:
        return self.default is None or self.layout.endswith("or None")

    @property
    def broadcasts(self) -> bool:
        return "?" in self.layout

    def axes(self, count: int) -> list[str] | None:
        """Return the names of so many axes; None if the argument cannot have that many."""
        layouts = axes_of(self.layout)
        if self.broadcasts and count <= len(layouts[0]):
            return layouts[0][len(layouts[0]) - count :]
        return next((axes for axes in layouts if len(axes) == count), None)


def arguments(text: str) -> tuple[Argument, ...]:
    """Return the arguments of a text with a line for each, and indented lines that describe it::

    query, key : learned [B, T, Hk, K]
        Read in place, whatever their strides.
    chunk_size : size = 64
    """
    found: list[Argument] = []
    for line in text.strip().splitlines():
        if line.startswith(" "):
            last = found.pop()
            found.append(last._replace(about=f"{last.about}{line.strip()}\n"))
            continue
        names, _, rest = line.partition(" : ")
        told, _, default = rest.partition(" = ")
        kind, _, layout = told.partition(" ")
        value = _default(default) if default else Parameter.empty
        # Interned, as names in calls are: the core compares them by their places in memory.
        found += (Argument(intern(name), Kind(kind), layout, value, "") for name in names.split(", "))
    return tuple(found)


def _default(text: str) -> Any:
    return _CONSTANTS[text] if text in _CONSTANTS else literal_eval(text)


class Result(NamedTuple):
    name: str
    layout: str
    wide: bool = False  # float32, or float64 for float64; else of the type of the first argument

    def shape(self, sizes: Mapping[str, Any], place: int) -> tuple[Any, ...]:
        """Return the shape by the layout that goes with the first argument's layout of this place."""
        layouts = axes_of(self.layout)
        return tuple(_size(axis, sizes) for axis in layouts[min(place, len(layouts) - 1)])


class Face(NamedTuple):
    """How a library writes the types of arguments and results, in signatures and in documentation."""

    array: str
    state: str
    integers: str
    result: str
    types: Given  # by the names that signatures use
    given: str
    integers_given: str
    returned: str
    imports: str = ""
    returns_state: bool = False  # a new one, and writes to none
    dtype: str = "DTypeLike"
    named: Mapping[str, str] = {}  # the types of what functions return, by their names
    mask: str = "MaskInfo"

    def type_of(self, argument: Argument) -> str:
        choices = ", ".join(repr(x) for x in argument.choices if x)
        name = _TYPES.get(argument.kind, "bool").format(self, layout=argument.layout, choices=choices)
        return f"{name} | None" if argument.optional else name

    def described(self, argument: Argument) -> str:
        """Return the type of an argument as it is documented."""
        choices = ", ".join(f'"{x}"' if x else "None" for x in argument.choices)
        masks = self.mask.replace(" |", " or")
        name = _WORDS.get(argument.kind, "bool").format(
            self, layout=argument.layout, choices=choices, masks=masks
        )
        shape = f", shape {argument.layout}" if argument.layout.startswith("[") else ""
        shape = "" if argument.broadcasts else shape
        return name + shape + (", optional" if argument.optional and not argument.choices else "")


# How a face, {0}, writes each kind of argument in signatures, and in the documentation. Other kinds are flags.
_TYPES = {
    Kind.LEARNED: "{0.array}",
    Kind.STATE: "{0.state}",
    Kind.STARTS: "{0.integers}",
    Kind.SLOTS: "{0.integers}",
    Kind.SCALE: "float",
    Kind.NUMBER: "float",
    Kind.SIZE: "int",
    Kind.DTYPE: "{0.dtype}",
    Kind.CHOICE: "Literal[{choices}]",
    Kind.OUT: "Array",
    Kind.TERM: "{0.integers}",
    Kind.DATA: "{0.integers}",
    Kind.LENGTHS: "{0.integers}",
    Kind.MASK: "{0.integers} | {0.mask}",
    Kind.DIAGONAL: "Diagonal",
    Kind.WINDOW: "int | tuple[int | None, int | None]",
    Kind.QUERIES: "Queries",
    Kind.STATISTICS: "Statistic | Sequence[Statistic]",
    Kind.CHANCE: "float",
    Kind.SEED: "SupportsIndex",
    Kind.HINT: "{layout}",
}
_WORDS = {
    Kind.LEARNED: "{0.given}",
    Kind.STATE: "{0.returned}",
    Kind.STARTS: "{0.integers_given}",
    Kind.SLOTS: "{0.integers_given}",
    Kind.SCALE: "float",
    Kind.NUMBER: "float",
    Kind.SIZE: "int",
    Kind.SEED: "int",
    Kind.DTYPE: "dtype",
    Kind.CHOICE: "{{{choices}}}",
    Kind.OUT: "{0.returned}",
    Kind.TERM: "{0.given}",
    Kind.DATA: "{0.given}",
    Kind.LENGTHS: "{0.integers_given}",
    Kind.MASK: "{0.given} or {masks}",
    Kind.DIAGONAL: 'int, {0.integers_given}, or "bottom-right"',
    Kind.HINT: "{layout}",
    Kind.CHANCE: "float",
}


NUMPY = Face(
    array="ArrayLike",
    state="Array",
    integers="ArrayLike",
    result="Array",
    types={
        "Array": Array,
        "ArrayLike": ArrayLike,
        "DTypeLike": DTypeLike,
        "Literal": Literal,
        "Vjp": Vjp,
        "VjpWithState": VjpWithState,
    },
    given="array_like",
    integers_given="array_like of integers",
    returned="ndarray",
)


class Row:
    """A public function: its results, and its arguments in the order of its signature and of the core.

    Functions of the core take all arguments by position. `entry` takes those of the NumPy function. `check` computes
    nothing, and takes the arguments of the problem: all but `out` and flags of results. Differentiable functions have
    more functions of the core:

    ``keep(*problem, all results, out)``
        Return what `entry` returns, and what gradients need. None if they need nothing.
    ``backward(*problem, *kept, dout, dstate)``
        Return the gradients, which are `grads`.
    ``jvp(*problem, all results, tangents)``
        Return all results and their tangents. `tangents` are those of the arguments that `moved` names. None if there
        is no forward mode.
    ``second(*problem, *kept, dout, dstate, cotangents)``
        Return the gradients of dout, dstate and the learned arguments. `cotangents` belong to the gradients that
        `backward` returns; terms have none. None if there are no second derivatives.

    `cast`
        the arguments that PyTorch's autocast casts
    `places`
        the number of arguments that may be given by position
    `handler`
        how the names of XLA's handlers begin
    `trained`
        the name of the function that has gradients, if this one has none
    ``without(arguments)``
        Return with which of them the function has no gradients, as " with key". Nothing if it never has, or with none.
    `examples`
        the examples of other libraries
    `by_name`
        The functions of the core above take arguments by name, and `backward` also takes whether the gradient of each
        term is wanted.
    `saved`
        Gradients need the results. `keep` returns them before they are rounded.
    `wide`
        the argument in the type of sums, which may be given in 16 bits; of a step, in PyTorch alone
    ``fits(arguments, is_floating)``
        Refuse shapes and types that do not fit each other, where layouts alone do not tell. Return the batch axes if
        there may be several.
    """

    def __init__(
        self,
        name: str,
        of_arguments: str | Sequence[Argument],
        results: Sequence[Result],
        *,
        places: int,
        entry: AnyFunction,
        check: Any = None,
        keep: Any = None,
        backward: Any = None,
        grads: AnyFunction = tuple,
        jvp: Any = None,
        moved: Sequence[str] = (),
        second: Any = None,
        cast: Sequence[str] = (),
        handler: str = "",
        examples: Given | None = None,
        trained: str = "",
        without: AnyFunction = lambda _: "",
        by_name: bool = False,
        saved: Sequence[str] = (),
        wide: str = "",
        fits: Any = None,
    ) -> None:
        self.name, self.results, self.places = name, tuple(results), places
        self.arguments = arguments(of_arguments) if isinstance(of_arguments, str) else tuple(of_arguments)
        self.entry, self.check, self.keep, self.backward, self.grads = entry, check, keep, backward, grads
        self.jvp, self.moved, self.second = jvp, tuple(moved), second
        self.cast, self.handler, self.examples = cast, handler, examples or {}
        self.trained, self.by_name, self.saved, self.fits = trained, by_name, saved, fits
        self.wide, self.without = wide, without
        self.returns_vjp = False
        self.own: tuple[Argument, ...] = ()  # that only one face has
        self.all = "".join(self.of(Kind.ALL))
        self.problem = tuple(x for x in self.arguments if x.kind not in (Kind.ALL, Kind.OUT))
        for layout in [*(x.layout for x in self.arguments), *(x.layout for x in self.results)]:
            axes_of(layout)

    def with_own(self, text: str) -> Row:
        """Return the row of a face that has more arguments."""
        made = copy(self)
        made.own = arguments(text)
        made.arguments += made.own
        return made

    def of(self, *kinds: Kind) -> tuple[str, ...]:
        return tuple(argument.name for argument in self.arguments if argument.kind in kinds)

    def argument(self, name: str) -> Argument:
        return next(argument for argument in self.arguments if argument.name == name)

    def sizes(self, shapes: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Return the sizes that layouts name, for the shapes of arguments. N is the number of states."""
        found: dict[str, Any] = {}
        sequences = None
        for argument in self.problem:
            shape = shapes.get(argument.name)
            if shape is None or argument.broadcasts or not argument.layout:
                continue
            axes = argument.axes(len(shape))
            if argument.kind is Kind.STARTS:
                sequences = shape[0] - 1
            elif axes is None:
                raise LayoutError(argument)
            else:
                for axis, size in zip(axes, shape, strict=True):
                    found.setdefault(axis, size)
        return found | {"N": found.get("B") if sequences is None else sequences}

    def shapes(self, shapes: Mapping[str, Sequence[Any]]) -> list[tuple[Any, ...]]:
        """Return the shapes of the results, for those of arguments."""
        sizes, first = self.sizes(shapes), self.arguments[0]
        place = axes_of(first.layout).index(first.axes(len(shapes[first.name])) or [])
        return [result.shape(sizes, place) for result in self.results]


class LayoutError(ValueError):
    """An argument has another number of axes."""

    def __init__(self, argument: Argument) -> None:
        super().__init__(argument.name)
        self.argument = argument


_LAYOUTS: dict[str, list[list[str]]] = {}  # read once: compilers of graphs look at it


def axes_of(layout: str) -> list[list[str]]:
    """Return the names of axes, one list for each of the layouts that an argument may have."""
    if layout not in _LAYOUTS:
        found = re.findall(r"\[(.*?)\]", layout)
        _LAYOUTS[layout] = [axes.replace("?", "").split(", ") for axes in found]
    return _LAYOUTS[layout]


def _size(axis: str, sizes: Mapping[str, Any]) -> Any:
    name, _, less = axis.partition(" - ")
    return sizes[name] - int(less) if less else sizes[name]


def parameters(arguments: Iterable[Argument], face: Face) -> list[str]:
    """Return the lines that document arguments; those that follow each other with the same type are one."""
    lines = []
    for kind, group in groupby(arguments, face.described):
        same = list(group)
        lines.append(f"{', '.join(argument.name for argument in same)} : {kind}")
        lines += (f"    {line}" for argument in same for line in argument.about.splitlines())
    return lines


def signature(row: Row, face: Face) -> Signature:
    kinds = [Parameter.POSITIONAL_OR_KEYWORD] * row.places + [Parameter.KEYWORD_ONLY] * len(row.arguments)
    shown = [x for x in row.arguments if face is NUMPY or x.kind is not Kind.OUT]
    return Signature(
        [
            Parameter(x.name, kind, default=x.default, annotation=face.type_of(x))
            for x, kind in zip(shown, kinds, strict=False)
        ],
        return_annotation=returned(row, face),
    )


def returned(row: Row, face: Face, every: bool | None = None) -> str:
    """Return the type of what a call returns: with all results or the first alone, or either."""
    if row.name in face.named:
        return face.named[row.name]
    states = [x for x in row.arguments if x.kind is Kind.STATE and face.returns_state]
    parts = [face.result] * len(row.results) + [face.result + " | None" * x.optional for x in states]
    both = f"tuple[{', '.join(parts)}]" if len(parts) > 1 else face.result
    grads = row.grads.__name__ if row.all else face.result
    ways = [
        (face.result if row.all else both, both),
        (f"Vjp[{grads}]", f"VjpWithState[{grads}]" if row.all else f"Vjp[{grads}]"),
    ]
    found = [" | ".join(dict.fromkeys(way)) if every is None else way[every] for way in ways]
    return f"tuple[{', '.join(found)}]" if row.returns_vjp else found[0]


def function(
    row: Row, face: Face, call: AnyFunction, doc: str | None, widen: AnyFunction | None = None
) -> Any:
    """Return a function of the row's arguments. It gives NumPy's arguments by position to `call`, others in a dict, and
    what ``widen(wide, first)`` returns in place of the row's wide argument.

    It is compiled from text, so that Python itself binds arguments, which nothing written in Python does as fast.
    """
    shown = signature(row, face)
    names = tuple(shown.parameters)
    heads = [
        name if x.default is Parameter.empty else f"{name}=defaults[{name!r}]"
        for name, x in shown.parameters.items()
    ]
    heads[row.places :] = ["*", *heads[row.places :]] if len(heads) > row.places else []
    given = ", ".join(names) if face is NUMPY else f"{{{', '.join(f'{name!r}: {name}' for name in names)}}}"
    lines = (
        f"def {row.name}({', '.join(heads)}, **unknown):",
        "    if unknown:",
        "        return again(locals(), unknown)",
        f"    if {row.wide} is not None: {row.wide} = widen({row.wide}, {names[0]})" if widen else "",
        f"    return call({given})",
    )
    scope: dict[str, Any] = {**face.types, row.grads.__name__: row.grads}
    defaults = {name: x.default for name, x in shown.parameters.items()}

    def again(given: Arguments, unknown: Arguments) -> Any:
        more = {name: x for name, x in given.items() if name in names and x is not defaults[name]}
        return made(**taken(row.name, more | unknown, names))

    scope |= {"call": call, "defaults": defaults, "again": again, "widen": widen}
    exec(compile("\n".join(lines), f"<attnmask {row.name}>", "exec"), scope)
    made = scope[row.name]
    made.__signature__, made.__doc__ = shown, doc
    made.__annotations__ = {name: x.annotation for name, x in shown.parameters.items()}
    made.__annotations__["return"] = shown.return_annotation
    return made


def library_doc(row: Row, face: Face, about: str, static: str = "") -> str:
    """Return the documentation of another library's function: what differs, shapes, and the row's example.

    `static` is what there is to say of arguments that are no arrays.
    """
    kinds = *ARRAYS, Kind.SEED
    arrays = [x._replace(about="") for x in row.problem if x.kind in kinds]
    others = [x.name for x in row.arguments if x.kind not in (*kinds, Kind.OUT) and x not in row.own]
    states = [x for x in arrays if x.kind is Kind.STATE and face.returns_state]
    one = [f"{face.returned}, shape {row.results[0].layout}"] if row.results else []
    if row.name in face.named:
        returned = [face.named[row.name]]
    elif row.all:
        returned = [f"{face.returned}, or tuple of {('two', 'three')[len(row.results) - 2]} if `{row.all}`"]
    elif states:
        returned = [*(f"out : {x}" for x in one), *parameters(states, face)]
    else:
        returned = one
    library = f"attnmask.{face.imports.split(',')[0]}"
    lines = [
        *about.splitlines(),
        *("", "Parameters", "----------", *parameters(arrays, face)),
        *(", ".join(others), f"    All of these as in `attnmask.{row.name}`. {static}".rstrip()),
        *parameters(row.own, face),
        *("", "Returns", "-------", *returned),
        *("", "Examples", "--------", f">>> import {face.imports}", f">>> import {library}"),
        *row.examples[library.partition(".")[2]].strip().splitlines(),
    ]
    return "\n    ".join(lines) + "\n    "
