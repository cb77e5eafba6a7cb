"""Functions of JAX arrays, made from their rows. Some have gradients. Others write to arguments and return them.

The row of a function says which arguments may be traced and which must be known at compile time. It says what stands
for arrays when types and shapes are checked, what is written in place, and what has gradients.

Compiled functions call C through XLA's foreign function interface (``csrc/bind/xla``). Beside arrays, a handler reads
words. They are made here for linear attention, convolutions and sums, and in ``_attention.py`` and ``_cache.py`` for
the other functions. Eager calls go to the functions of NumPy arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt
from jax.typing import ArrayLike

from attnmask._attention import arguments as types
from attnmask._common.arguments import as_array, describe, one_of, real, wide_dtype
from attnmask._common.types import AnyFunction, Arguments
from attnmask._faces.arrays import wide_type
from attnmask._faces.rows import ARRAYS, Argument, Face, Kind, Row, axes_of, function, library_doc
from attnmask._masks.info import MaskInfo
from attnmask.jax import _call as call
from attnmask.jax._arguments import check_known, is_traced, known_flag, stand_ins
from attnmask.jax._gradients import with_derivatives
from attnmask.jax._types import AnyArray, AnyByName, ByName, KVCacheResult, Results, Shaped

JAX = Face(
    array="ArrayLike",
    state="ArrayLike",
    integers="npt.ArrayLike",
    result="jax.Array",
    types=vars(types) | {"jax": jax, "ArrayLike": ArrayLike, "npt": npt, "KVCacheResult": KVCacheResult},
    given="array",
    integers_given="array of integers",
    returned="array",
    imports="jax, jax.numpy as jnp",
    dtype="npt.DTypeLike",
    returns_state=True,
    named={"flash_attention_with_kvcache": "KVCacheResult"},
)
_OR_NUMBERS = (Kind.TERM, Kind.DATA, Kind.LENGTHS, Kind.MASK, Kind.DIAGONAL, Kind.SEED)
_OPERANDS = (Kind.LEARNED, Kind.TERM, Kind.STATE)  # which become arrays of JAX
_AXES = 4  # of the first result of handlers


def _available(dtype: Any) -> Any:
    """Return a type of numbers as JAX has it, which has those of 64 bits only if it is asked for them."""
    try:
        return jax.dtypes.canonicalize_dtype(dtype)
    except (TypeError, ValueError):
        return dtype  # which the core refuses


def _in_jax(x: AnyArray) -> AnyArray:
    try:
        return jax.numpy.asarray(x)
    except TypeError:
        return x  # which the core refuses


class Function:
    """The base of functions of JAX arrays."""

    derivatives = "higher-order ones and forward mode are not supported"
    traced: AnyFunction  # of arrays, of what is known at compile time, and of whether all results are wanted

    def __init__(self, row: Row) -> None:
        self.row = row
        self.kinds = {x.name: x.kind for x in row.arguments}
        self.states, self.seeds = row.of(Kind.STATE), row.of(Kind.SEED)
        self.arrays, self.or_numbers = row.of(*ARRAYS, Kind.SEED), row.of(*_OR_NUMBERS)
        self.required = {x.name for x in row.problem if x.kind in _OPERANDS and not x.optional}
        self.own = [x.name for x in row.own]
        self.defaults = {x.name: x.default for x in (*row.problem, *row.own)}

    def __call__(self, given: Arguments) -> Any:
        with_all = known_flag(given.pop(self.row.all), self.row.all) if self.row.all else False
        arrays, static = self.divided(given)
        if any(map(is_traced, arrays.values())):
            return self.traced(self.operands(arrays), self.defaults | static, with_all)
        return self.eager(arrays, static, with_all)

    def divided(self, given: Arguments) -> tuple[AnyByName, Arguments]:
        """Return the arguments that are arrays, and those that must be known at compile time, but for defaults."""
        arrays: AnyByName = {}
        static: Arguments = {}
        defaults = self.defaults
        for name, x in given.items():
            if x is defaults[name]:
                continue
            if name in self.required and (x is None or isinstance(x, (int, str))):
                raise TypeError(f"{name} must be an array, got {describe(x)}")
            is_number = name in self.or_numbers and isinstance(x, (int, str))
            if x is None or name not in self.arrays or is_number:
                check_known(x, name)
                static[name] = _available(x) if self.kinds[name] is Kind.DTYPE else x
            else:
                as_it_is = isinstance(x, (jax.Array, MaskInfo)) or self.kinds[name] is Kind.SLOTS
                arrays[name] = x if as_it_is else as_array(x, name)
        return arrays, static

    def operands(self, arrays: AnyByName) -> AnyByName:
        return {name: _in_jax(x) if self.kinds[name] in _OPERANDS else x for name, x in arrays.items()}

    def compute(self, arrays: AnyByName, static: Arguments, with_all: bool) -> Any:
        """Compute with NumPy, in place."""
        host = {name: as_array(x, name) if isinstance(x, jax.Array) else x for name, x in arrays.items()}
        for name in self.seeds:
            host |= {name: host[name].item()} if name in host else {}
        more = {self.row.all: with_all} if self.row.all else {}
        if self.row.by_name:
            static = {name: x for name, x in static.items() if name not in self.own}
            return self.row.entry(**host, **static, **more)
        return self.row.entry(*(self.defaults | host | static).values(), *more.values(), None)

    def check(self, known: Arguments) -> Any:
        """Check what stands for arguments, and return what the core says of it."""
        return self.row.check(**known) if self.row.by_name else self.row.check(*known.values())

    def eager(self, arrays: AnyByName, static: Arguments, with_all: bool) -> Any:
        return call.to_jax(self.compute(arrays, static, with_all))


# Linear attention, short convolutions and sums


def _place(argument: Argument) -> int:
    """Return where handlers take an array: inputs, starts of sequences, states, their slots."""
    of_state = argument.layout.startswith(("[N,", "[slots,"))
    return {Kind.STARTS: 1, Kind.SLOTS: 3}.get(argument.kind, 2 if of_state else 0)


def _integers(x: AnyArray) -> AnyArray:
    return x if is_traced(x) else np.asarray(x, np.int32)


class _Linear(Function):
    """The base of functions whose words are VERSION, flags, the bits of a number, and the size of chunks."""

    def __init__(self, row: Row) -> None:
        super().__init__(row)
        self.order = [x.name for x in sorted(row.problem, key=_place)]
        self.flags = call.WORDS["sums" if row.handler == "attnmask_cumsum" else "linear"]

    def in_order(self, arrays: AnyByName) -> AnyByName:
        return {name: arrays[name] for name in self.order if name in arrays}

    def flags_of(self, names: Iterable[str]) -> int:
        return sum(self.flags.get(name, 0) for name in names)

    def words(self, static: Arguments, flags: int, rows: int) -> npt.NDArray[np.int64]:
        number, size = 1.0, 64
        for name, x in static.items():
            kind = self.kinds[name]
            if kind is Kind.SCALE:
                by_default = 1 / math.sqrt(rows) if rows else 1.0  # as the core rounds it
                number = by_default if x is None else real(x, name)
            elif kind is Kind.NUMBER and x is not None:
                number, flags = real(x, name), flags | self.flags[name]
            elif kind is Kind.SIZE:
                size, flags = x, flags | self.flags.get(name, 0)
            elif kind is Kind.FLAG:
                flags |= self.flags[name] * known_flag(x, name)
            elif kind is Kind.CHOICE and x is not None:
                one_of(x, name, self.row.argument(name).choices)
                flags |= self.flags[x]
        return np.array([self.flags["version"], flags, *call.bits_of(number), size], np.int64)

    def shaped(self, arrays: AnyByName, static: Arguments) -> tuple[dict[str, int], list[Shaped]]:
        """Return sizes by the names of axes, and the shapes and types of results."""
        shapes = {name: np.shape(x) for name, x in arrays.items()}
        given = (static[name] for name in self.row.of(Kind.DTYPE) if static[name] is not None)
        dtype = next(given, arrays[self.row.arguments[0].name].dtype)
        types = (wide_dtype(dtype) if x.wide else dtype for x in self.row.results)
        return self.row.sizes(shapes), list(zip(self.row.shapes(shapes), types, strict=True))


class _Differentiable(_Linear):
    def divided(self, given: Arguments) -> tuple[AnyByName, Arguments]:
        arrays, static = super().divided(given)
        x, first = arrays.get(self.row.wide), arrays.get(self.row.arguments[0].name)
        if x is not None and first is not None and (wide := wide_type(x, first)) is not None:
            arrays[self.row.wide] = x.astype(wide)
        return arrays, static

    def traced(self, arrays: AnyByName, static: Arguments, with_all: bool) -> Any:
        arrays = self.in_order(arrays)
        kept = self.check(stand_ins(self.row, static | arrays))
        sizes, results = self.shaped(arrays, static)
        if kept:
            states, numbers = kept
            if any(is_traced(arrays.get(name)) for name in self.row.of(Kind.STARTS)):
                states += sizes["N"] * sizes["H"]  # each sequence may end with a short chunk
            count = states // sizes["B"] if sizes["B"] else 0
            kept = [((sizes["B"], count, numbers), results[-1][1])]
        shape, dtype = results[0]
        missing = (1,) * (_AXES - len(shape))
        results[0] = (*shape, *missing), dtype
        for name, x in arrays.items():
            if missing and self.row.argument(name).layout == self.row.results[0].layout:
                arrays[name] = jax.numpy.reshape(x, (*shape, *missing))
        out, *more = self.call(
            arrays, lambda flags: self.words(static, flags, sizes.get("K", 1)), results, kept or []
        )
        out = out.reshape(shape)
        return (out, *more) if with_all else out

    def call(
        self,
        arrays: AnyByName,
        words: Callable[[int], npt.NDArray[np.int64]],
        results: Sequence[Shaped],
        kept: Sequence[Shaped],
    ) -> Results:
        """Return the results of handlers that take `arrays` in this order; `kept` is for gradients."""
        others = {name: _integers(arrays[name]) for name in self.row.of(Kind.STARTS) if name in arrays}
        learned = {name: x for name, x in arrays.items() if name not in others}

        def run(
            target: str, flags: int, given: ByName, more: Sequence[jax.Array], shapes: Sequence[Shaped]
        ) -> Results:
            said, first = words(flags | self.flags_of(given)), self.in_order(given).values()
            name = f"{self.row.handler}_{target}"
            return call.call_handler(name, said, [*first, *more], shapes, "")

        def forward(learned: ByName, others: ByName, for_gradients: bool) -> Results:
            more = kept if for_gradients else []
            flags = self.flags["kept"] if more else 0
            return run("forward", flags, learned | others, (), [*results, *more])

        def backward(
            learned: ByName, others: ByName, wanted: Sequence[str], held: Results, of_results: Sequence[Any]
        ) -> list[jax.Array]:
            learned = self.in_order(learned)  # JAX has put it in that of names
            shapes = [(x.shape, x.dtype) for x in learned.values()]
            given = [x for x in of_results if x is not None]
            flags = self.flags["dstate"] if len(given) > 1 else 0
            found = run("backward", flags, learned | others, [*held, *given], shapes)
            grads = dict(zip(learned, found, strict=True))
            return [grads[name] for name in wanted]

        compute = with_derivatives(self.row.name, forward, backward, len(results))
        found: Results = compute(learned, others)
        return found


# Functions that write to their arguments


class Call(NamedTuple):
    """A call of a handler that writes to some of its arrays."""

    words: npt.NDArray[np.int64]
    first: AnyByName  # arrays by name
    more: Sequence[AnyArray]
    shapes: Sequence[Shaped]  # of the results
    written: Sequence[str]
    finish: Callable[[Results], Sequence[jax.Array]] = tuple  # what handlers return is made into results


class Writing(Function):
    """A function that returns its results, None for those not asked for, and what it writes to."""

    derivatives = "Gradients are not supported."
    made: AnyFunction = tuple
    call: AnyFunction  # of the same, and of what stands for arguments in checks; it returns a `Call`

    def eager(self, arrays: AnyByName, static: Arguments, with_all: bool) -> Any:
        """Compute on copies."""
        names = [name for name in self.states if name in arrays] if self.written(arrays) else []
        states = {name: np.array(as_array(arrays[name], name)) for name in names}
        found = self.compute(arrays | states, static, with_all)
        results = call.to_jax(found if isinstance(found, tuple) else () if found is None else (found,))
        return self.together(results, arrays | {name: call.to_jax(x) for name, x in states.items()})

    def traced(self, arrays: AnyByName, static: Arguments, with_all: bool) -> Any:
        known = stand_ins(self.row, static | arrays)
        self.check(known)
        static |= {self.row.all: with_all} if self.row.all else {}
        made = self.call(arrays, static, known)
        count = len(made.shapes)
        found = self.found(made, static | arrays)
        states = dict(zip(made.written, found[count:], strict=True))
        return self.together(made.finish(found[:count]), arrays | states)

    def found(self, made: Call, given: Arguments) -> Results:
        """Return the results of a call, and then what it has written to."""
        without, trained = self.row.without(given), self.row.trained
        why = f"attnmask.jax.{self.row.name} has no gradients{without}: {trained} has them"
        return self.handled(made, why)

    def handled(self, made: Call, no_gradients: str) -> Results:
        count = len(made.shapes)
        return call.call_handler(
            self.row.handler,
            made.words,
            [*made.first.values(), *made.more],
            [*made.shapes, *((made.first[name].shape, made.first[name].dtype) for name in made.written)],
            no_gradients,
            "sequential",  # each call of a mapped function writes to memory of its own
            {list(made.first).index(name): count + i for i, name in enumerate(made.written)},
        )

    def together(self, results: Sequence[jax.Array], arrays: Mapping[str, AnyArray]) -> Any:
        missing = [None] * (len(self.row.results) - len(results))
        return self.made((*results, *missing, *map(arrays.get, self.states)))

    def written(self, arrays: AnyByName) -> Sequence[str]:
        """Return the arrays that a call writes to."""
        return self.states


class _Step(Writing, _Linear):
    """One token of each sequence, which handlers take with an axis of tokens."""

    def call(self, arrays: AnyByName, static: Arguments, known: Arguments) -> Call:
        sizes, ((shape, dtype),) = self.shaped(arrays, static)
        with_token = (shape[0], 1, *shape[1:], *(1,) * (_AXES - 1 - len(shape)))
        taken = {name: self.taken(name, x, with_token) for name, x in self.in_order(arrays).items()}
        words = self.words(static, self.flags_of(arrays), sizes.get("K", 1))
        return Call(
            words,
            taken,
            (),
            [(with_token, dtype)],
            self.written(arrays),
            lambda found: [found[0].reshape(shape)],
        )

    def taken(self, name: str, x: AnyArray, with_token: tuple[int, ...]) -> AnyArray:
        """Return an array as handlers take it."""
        layout = self.row.argument(name).layout
        if self.kinds[name] is Kind.SLOTS:
            return _integers(x)
        if layout == self.row.results[0].layout:
            return x.reshape(with_token)
        by_row = any(len(axes) == x.ndim and axes[0] == "B" for axes in axes_of(layout))
        return x[:, None] if by_row else x


def jax_face(row: Row, made: type[Function] | None = None) -> AnyFunction:
    """Return the function of JAX arrays of a row."""
    made = made or (_Step if row.of(Kind.STATE) else _Differentiable)
    if row.of(Kind.STATE):
        about = f"""Apply `attnmask.{row.name}` in JAX, and return what it writes to as it is after the call.

Compiled functions write in place if ``donate_argnums`` names the arrays or a loop carries them. Otherwise these are
copied, as in eager calls. All arrays may be traced; errors in their numbers are then raised when the function runs.
{made.derivatives}"""
    else:
        *others, last = (f"`{name}`" for name in row.of(Kind.LEARNED, Kind.TERM))
        subject = f"{', '.join(others)} and {last} have" if others else f"{last} has"
        about = f"""Apply `attnmask.{row.name}` in JAX: under ``jit``, ``grad`` and ``vmap``, on the CPU.

{subject} gradients;
{made.derivatives}.
All arrays may be traced."""
    doc = library_doc(row, JAX, about, "They must be known at compile time.")
    face = function(row, JAX, made(row), doc)
    face.__module__ = "attnmask.jax"
    return face
