"""Functions of JAX arrays, made from their rows: with gradients, or steps, which return the state that they write.

Compiled functions call C through XLA's foreign function interface; the counterpart is ``csrc/bind/xla/linear.c``.
Eager calls go to the functions of NumPy arrays.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
import numpy as np
import numpy.typing as npt
from jax.typing import ArrayLike

from attnmask._common.arguments import as_array, one_of, real, wide_dtype
from attnmask._common.types import AnyFunction, Arguments, Array
from attnmask._faces.rows import ARRAYS, Argument, Face, Kind, Row, axes_of, function, library_doc
from attnmask.jax import _call as call
from attnmask.jax._arguments import check_known, is_traced, known_flag, like, starts_like
from attnmask.jax._gradients import differentiable
from attnmask.jax._types import AnyArray, AnyByName, ByName, Results, Shaped

JAX = Face(
    array="ArrayLike",
    state="ArrayLike",
    integers="npt.ArrayLike",
    result="jax.Array",
    types={"jax": jax, "ArrayLike": ArrayLike, "npt": npt, "Literal": Literal},
    given="array",
    integers_given="array of integers",
    returned="array",
    imports="jax, jax.numpy as jnp",
    returns_state=True,
)
_FLAGS = call.WORDS["linear"]
_AXES = 4  # of the first result of handlers


def _place(argument: Argument) -> int:
    """Return where handlers take an array: inputs, starts of sequences, states, their slots."""
    of_state = argument.layout.startswith(("[N,", "[slots,"))
    return {Kind.STARTS: 1, Kind.SLOTS: 3}.get(argument.kind, 2 if of_state else 0)


def _integers(x: AnyArray) -> AnyArray:
    return x if is_traced(x) else np.asarray(x, np.int32)


def _flags_of(names: Iterable[str]) -> int:
    return sum(_FLAGS.get(name, 0) for name in names)


def on_copies(row: Row, given: Arguments, writes: bool = True) -> tuple[Any, ByName]:
    """Compute with NumPy on copies of what the function writes to. Return its results and these copies."""
    arrays = {name: as_array(x, name) if isinstance(x, jax.Array) else x for name, x in given.items()}
    states = {
        name: np.array(arrays[name]) for name in row.of(Kind.STATE) if given[name] is not None and writes
    }
    values = arrays | states
    found = row.entry(**values) if row.by_name else row.entry(*values.values(), None)
    return call.to_jax(found), {name: call.to_jax(x) for name, x in states.items()}


class _Function:
    def __init__(self, row: Row) -> None:
        self.row = row
        self.arrays = sorted((x for x in row.problem if x.kind in ARRAYS), key=_place)
        self.static = [x for x in row.problem if x.kind not in ARRAYS]

    def divided(self, given: Arguments) -> tuple[AnyByName, Arguments]:
        """Return the arguments that are arrays and not None, and those that must be known at compile time."""
        static = {argument.name: given[argument.name] for argument in self.static}
        for name, x in static.items():
            check_known(x, name)
        arrays = ((x.name, given[x.name]) for x in self.arrays if given[x.name] is not None)
        return {name: x if isinstance(x, jax.Array) else as_array(x, name) for name, x in arrays}, static

    def placeholder(self, argument: Argument, x: AnyArray, tokens: int) -> Array:
        """Return what stands for an array in checks of types and shapes. What is known stays: its values may count."""
        if argument.kind is Kind.STARTS:
            return starts_like(x, tokens) if is_traced(x) else as_array(x, argument.name)
        if argument.kind is Kind.SLOTS:
            known = not is_traced(x) or x.dtype.kind != "i"
            return as_array(x, argument.name) if known else np.full(x.shape, -1, x.dtype)
        if argument.kind is Kind.STATE:
            return np.zeros(x.shape, x.dtype)
        return like(x) if is_traced(x) else as_array(x, argument.name)

    def check(self, arrays: AnyByName, static: Arguments) -> Any:
        """Check a traced call, and return what the core says of it."""
        first = arrays[self.arrays[0].name]
        tokens = first.shape[1] if first.ndim > 1 else 0
        known = {x.name: self.placeholder(x, arrays[x.name], tokens) for x in self.arrays if x.name in arrays}
        known |= static
        return self.row.check(*(known.get(argument.name) for argument in self.row.problem))

    def on_host(self, arrays: AnyByName, static: Arguments, *more: object) -> Any:
        host = {name: as_array(x, name) for name, x in arrays.items()} | static
        return self.row.entry(*(host.get(argument.name) for argument in self.row.problem), *more)

    def words(self, static: Arguments, flags: int, rows: int) -> npt.NDArray[np.int64]:
        """Return what handlers read beside arrays: VERSION, flags, the bits of the scale, the size of chunks."""
        number, size = 1.0, 64
        for argument in self.static:
            name, x = argument.name, static[argument.name]
            if argument.kind is Kind.SCALE:
                by_default = 1 / math.sqrt(rows) if rows else 1.0  # as the core rounds it
                number = by_default if x is None else real(x, name)
            elif argument.kind is Kind.SIZE:
                size = x
            elif argument.kind is Kind.FLAG:
                flags |= _FLAGS[name] * known_flag(x, name)
            elif x is not None:
                one_of(x, name, argument.choices)
                flags |= _FLAGS[x]
        (bits,) = struct.unpack("q", struct.pack("d", number))
        return np.array([_FLAGS["version"], flags, bits, size], np.int64)

    def shaped(self, arrays: AnyByName) -> tuple[dict[str, int], list[Shaped]]:
        """Return sizes by the names of axes, and the shapes and types of results."""
        shapes, dtype = {name: x.shape for name, x in arrays.items()}, arrays[self.arrays[0].name].dtype
        types = (wide_dtype(dtype) if x.wide else dtype for x in self.row.results)
        return self.row.sizes(shapes), list(zip(self.row.shapes(shapes), types, strict=True))


class _Differentiable(_Function):
    def __call__(self, given: Arguments) -> Any:
        with_all = known_flag(given[self.row.all], self.row.all)
        arrays, static = self.divided(given)
        if not any(map(is_traced, arrays.values())):
            return call.to_jax(self.on_host(arrays, static, with_all, None))
        kept = self.check(arrays, static)
        sizes, results = self.shaped(arrays)
        if kept:
            states, numbers = kept
            if any(is_traced(arrays.get(name)) for name in self.row.of(Kind.STARTS)):
                states += sizes["N"] * sizes["H"]  # each sequence may end with a short chunk
            count = states // sizes["B"] if sizes["B"] else 0
            kept = [((sizes["B"], count, numbers), results[-1][1])]
        shape, dtype = results[0]
        missing = (1,) * (_AXES - len(shape))
        results[0] = (*shape, *missing), dtype
        for argument in self.arrays:
            if argument.layout == self.row.results[0].layout and missing:
                arrays[argument.name] = jax.numpy.asarray(arrays[argument.name]).reshape(*shape, *missing)
        out, *more = self.compute(
            arrays, lambda flags: self.words(static, flags, sizes.get("K", 1)), results, kept or []
        )
        out = out.reshape(shape)
        return (out, *more) if with_all else out

    def compute(
        self,
        arrays: AnyByName,
        words: Callable[[int], npt.NDArray[np.int64]],
        results: Sequence[Shaped],
        kept: Sequence[Shaped],
    ) -> Results:
        """Return the results of handlers that take `arrays` in this order; `kept` is for gradients."""
        call.register()
        order, name = list(arrays), self.row.handler
        others = {name: _integers(arrays[name]) for name in self.row.of(Kind.STARTS) if name in arrays}
        learned = {name: jax.numpy.asarray(x) for name, x in arrays.items() if name not in others}
        no_gradients = f"attnmask.jax.{self.row.name} has gradients, but no gradients of these"

        def run(
            target: str, flags: int, given: ByName, more: Sequence[jax.Array], shapes: Sequence[Shaped]
        ) -> Results:
            first = [given[name] for name in order]
            return call.call_handler(
                f"{name}_{target}", words(flags | _flags_of(given)), [*first, *more], shapes, no_gradients
            )

        def forward(learned: ByName, others: ByName, for_gradients: bool) -> Results:
            more = kept if for_gradients else []
            flags = _FLAGS["kept"] if more else 0
            return run("forward", flags, learned | others, (), [*results, *more])

        def backward(
            learned: ByName,
            others: ByName,
            wanted: tuple[str, ...],
            held: tuple[jax.Array, ...],
            of_results: Sequence[jax.Array | None],
        ) -> list[jax.Array]:
            names = [name for name in order if name in learned]
            shapes = [(learned[name].shape, learned[name].dtype) for name in names]
            given = [x for x in of_results if x is not None]
            flags = _FLAGS["dstate"] if len(given) > 1 else 0
            found = run("backward", flags, learned | others, [*held, *given], shapes)
            grads = dict(zip(names, found, strict=True))
            return [grads[name] for name in wanted]

        return differentiable(forward, backward, len(results))(learned, others)


class _Step(_Function):
    """One token of each sequence, which handlers take with an axis of tokens."""

    def __init__(self, row: Row) -> None:
        super().__init__(row)
        (self.state,) = row.of(Kind.STATE)

    def __call__(self, given: Arguments) -> tuple[jax.Array, jax.Array]:
        arrays, static = self.divided(given)
        if not any(map(is_traced, arrays.values())):
            out, states = on_copies(self.row, {x.name: given[x.name] for x in self.row.problem})
            return out, states[self.state]
        self.check(arrays, static)
        sizes, ((shape, dtype),) = self.shaped(arrays)
        with_token = (shape[0], 1, *shape[1:], *(1,) * (_AXES - 1 - len(shape)))
        taken = {
            argument.name: self.taken(argument, arrays[argument.name], with_token)
            for argument in self.arrays
            if argument.name in arrays
        }
        call.register()
        state = taken[self.state]
        out, state = call.call_handler(
            f"{self.row.handler}_step",
            self.words(static, _flags_of(arrays), sizes.get("K", 1)),
            list(taken.values()),
            [(with_token, dtype), (state.shape, state.dtype)],
            f"attnmask.jax.{self.row.name} has no gradients: {self.row.trained} has them",
            "sequential",  # each call of a mapped function writes to a state of its own
            {list(taken).index(self.state): 1},
        )
        return out.reshape(shape), state

    def taken(self, argument: Argument, x: AnyArray, with_token: tuple[int, ...]) -> AnyArray:
        """Return an array as handlers take it."""
        if argument.kind is Kind.SLOTS:
            return _integers(x)
        if argument.layout == self.row.results[0].layout:
            return jax.numpy.asarray(x).reshape(with_token)
        by_row = any(len(axes) == x.ndim and axes[0] == "B" for axes in axes_of(argument.layout))
        return jax.numpy.asarray(x)[:, None] if by_row else x


def jax_face(row: Row) -> AnyFunction:
    """Return the function of JAX arrays of a row."""
    if row.of(Kind.STATE):
        about = f"""Apply `attnmask.{row.name}` in JAX, and return the states with the token in them.

Compiled functions write to their states in place if ``donate_argnums`` names them or a loop carries them. Otherwise
the states are copied, as in eager calls. Gradients are not supported."""
    else:
        *names, last = (f"`{name}`" for name in row.of(Kind.LEARNED))
        about = f"""Apply `attnmask.{row.name}` in JAX: under ``jit``, ``grad`` and ``vmap``, on the CPU.

{", ".join(names)} and {last} have gradients; higher-order ones are not supported.
All arrays may be traced."""
    doc = library_doc(row, JAX, about, "They must be known at compile time.")
    made = function(row, JAX, _Step(row) if row.of(Kind.STATE) else _Differentiable(row), doc)
    made.__module__ = "attnmask.jax"
    return made
