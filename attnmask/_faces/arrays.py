"""Functions of NumPy arrays, made from their rows."""

from collections.abc import Callable
from copy import copy
from typing import Any

from attnmask._common.arguments import as_array, check_apart, flag, is_floating, wide_dtype
from attnmask._common.types import AnyFunction
from attnmask._faces.rows import ARRAYS, NUMPY, Kind, Row, function, parameters


def numpy_face(row: Row) -> Callable[[AnyFunction], Any]:
    """Return what makes a function of a row from one that is only documented; ``<parameters>`` are the row's."""

    def make(described: AnyFunction) -> Any:
        doc = described.__doc__
        if doc:  # python -OO removes docstrings
            doc = doc.replace("<parameters>", "\n    ".join(parameters(row.arguments, NUMPY)))
        widen = _widening(row) if row.wide in row.of(Kind.LEARNED) and not row.returns_vjp else None
        made = function(row, NUMPY, row.entry, doc, widen)
        made.__module__ = described.__module__
        return made

    return make


def wide_type(x: Any, first: Any) -> Any:
    """Return the type of sums if `x` is of 16 bits, otherwise nothing; `first` is the first array of the call."""
    return wide_dtype(first.dtype) if x.dtype.itemsize == 2 and is_floating(x.dtype) else None


def _widening(row: Row) -> AnyFunction:
    """Return what copies an array of 16 bits to the type of sums, in which the row takes it."""

    def widened(x: Any, first: Any) -> Any:
        if getattr(x, "itemsize", 2) != 2:  # the usual case, decided soon
            return x
        x = as_array(x, row.wide)
        wide = wide_type(x, as_array(first, row.arguments[0].name))
        return x if wide is None else x.astype(wide)

    return widened


def with_gradient(row: Row) -> Row:
    """Return the row of a function that returns the results of `row` and a function for their gradients."""
    arrays = [(i, x.name, x.kind is Kind.STARTS) for i, x in enumerate(row.problem) if x.kind in ARRAYS]
    widened = _widening(row)

    def compute(*arguments: Any) -> tuple[Any, AnyFunction]:
        *problem, out = arguments
        more = [flag(problem.pop(), row.all)] if row.all else []
        if out is not None:
            check_apart(out, ((name, problem[i]) for i, name, _ in arrays))
        for i, name, changes in arrays:
            if problem[i] is not None:
                array = as_array(problem[i], name)
                problem[i] = array.copy() if changes else array  # vjp may be called after they change
        narrow = None
        for i, name, _ in arrays:
            if name == row.wide and problem[i] is not None:
                given, problem[i] = problem[i], widened(problem[i], problem[0])
                narrow = None if problem[i] is given else given.dtype
        results, *kept = row.keep(*problem, *more, out) if row.keep else (row.entry(*problem, *more, out),)

        def in_own_type(*grads: Any) -> Any:
            found = row.grads(*grads)
            if narrow is None:
                return found
            return found._replace(**{row.wide: getattr(found, row.wide).astype(narrow)})

        def vjp(dout: Any) -> Any:
            return in_own_type(*row.backward(*problem, *kept, dout))

        def vjp_with_state(dout: Any, dstate: Any = None) -> Any:
            if dstate is not None and not more[0]:
                raise ValueError(f"dstate must be None without {row.all}=True")
            return in_own_type(*row.backward(*problem, *kept, dout, dstate))

        return results, vjp_with_state if row.all else vjp

    made = copy(row)
    made.name, made.entry, made.returns_vjp = f"{row.name}_vjp", compute, True
    return made
