"""Functions of NumPy arrays, made from their rows."""

from collections.abc import Callable
from copy import copy
from typing import Any

from attnmask._common.arguments import as_array, check_apart, flag
from attnmask._common.types import AnyFunction
from attnmask._faces.rows import ARRAYS, NUMPY, Kind, Row, function, parameters


def numpy_face(row: Row) -> Callable[[AnyFunction], Any]:
    """Return what makes a function of a row from one that is only documented; ``<parameters>`` are the row's."""

    def make(described: AnyFunction) -> Any:
        doc = described.__doc__
        if doc:  # python -OO removes docstrings
            doc = doc.replace("<parameters>", "\n    ".join(parameters(row.arguments, NUMPY)))
        made = function(row, NUMPY, row.entry, doc)
        made.__module__ = described.__module__
        return made

    return make


def with_gradient(row: Row) -> Row:
    """Return the row of a function that returns the results of `row` and a function for their gradients."""
    arrays = [(i, x.name, x.kind is Kind.STARTS) for i, x in enumerate(row.problem) if x.kind in ARRAYS]

    def compute(*arguments: Any) -> tuple[Any, AnyFunction]:
        *problem, out = arguments
        more = [flag(problem.pop(), row.all)] if row.all else []
        if out is not None:
            check_apart(out, ((name, problem[i]) for i, name, _ in arrays))
        for i, name, changes in arrays:
            if problem[i] is not None:
                array = as_array(problem[i], name)
                problem[i] = array.copy() if changes else array  # vjp may be called after they change
        results, *kept = row.keep(*problem, *more, out) if row.keep else (row.entry(*problem, *more, out),)

        def vjp(dout: Any) -> Any:
            return row.grads(*row.backward(*problem, *kept, dout))

        def vjp_with_state(dout: Any, dstate: Any = None) -> Any:
            if dstate is not None and not more[0]:
                raise ValueError(f"dstate must be None without {row.all}=True")
            return row.grads(*row.backward(*problem, *kept, dout, dstate))

        return results, vjp_with_state if row.all else vjp

    made = copy(row)
    made.name, made.entry, made.returns_vjp = f"{row.name}_vjp", compute, True
    return made
