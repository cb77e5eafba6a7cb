"""`attention_weights` and `attention_statistics` for JAX.

Models call them beside a loss, so their gradients are errors only where something asks for them.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from attnmask._attention.arguments import DEFAULTS, LEARNED
from attnmask._attention.backward import of_rows
from attnmask._attention.batch import folded, unfolded
from attnmask._attention.weights import AttentionStatistics, Queries, Statistic, chosen_queries, wanted
from attnmask._common.arguments import one_of, wide_dtype
from attnmask._common.types import Arguments
from attnmask._faces.attention import STATISTICS, WEIGHTS
from attnmask._faces.rows import Row, function, library_doc
from attnmask.jax import _call as call
from attnmask.jax._arguments import check, like, specify
from attnmask.jax._attention import Attention, four_axes
from attnmask.jax._faces import JAX
from attnmask.jax._gradients import without_derivatives
from attnmask.jax._types import AnyByName, ByName, Results

_FACE = JAX._replace(
    types=JAX.types
    | {x.__name__: x for x in (AttentionStatistics, Sequence)}
    | {"Queries": Queries, "Statistic": Statistic},
    named={STATISTICS.name: AttentionStatistics.__name__},
)
_ABOUT = """Apply `attnmask.{}` in JAX: under ``jit`` and ``vmap``, on the CPU.

It has no gradients: they are errors, but only where something asks for them. All arrays except `queries` may be
traced."""


class _Looking(Attention):
    """A function of the weights."""

    def eager(self, arrays: AnyByName, static: Arguments, with_all: bool) -> Any:
        return jax.tree.map(call.to_jax, self.compute(arrays, static, with_all))

    def traced(self, arrays: AnyByName, static: Arguments, with_all: bool) -> Any:
        of, by_key_head = static.get("of"), static.get("heads") == "key"
        names, top = (("weights",), 0) if of is None else wanted(of)
        one_of(static.get("heads", "key"), "heads", ("query", "key"))
        learned = {name: arrays[name] for name in LEARNED if name in arrays}
        learned["value"] = learned["key"][..., :0]
        given = DEFAULTS | static | arrays | learned
        problem, batch = check(given)
        spec, others = specify(given, problem, batch)
        (rows, tokens, heads, _), (_, keys, kv_heads, _) = problem.query.shape, problem.key.shape
        queries, wide = chosen_queries(static["queries"], tokens), wide_dtype(problem.query.dtype)
        rising, moving = np.sort(queries), four_axes(learned, batch)
        if "lse" in arrays:
            of_rows(like(arrays["lse"]), "lse", (*batch, heads, tokens), wide, batch)
            lse = folded(jax.numpy.asarray(arrays["lse"]), batch)
            moving["lse"] = jax.numpy.take(lse, rising, axis=2)
        row = rows, heads, len(queries)
        results = {
            "weights": ((*row, keys), wide),
            "key_sum": ((rows, kv_heads if by_key_head else heads, keys), wide),
            "entropy": (row, wide),
            "max_logit": (row, wide),
            "top_keys": ((*row, top), np.int32),
            "top_weights": ((*row, top), wide),
        }
        names += ("top_weights",) * ("top_keys" in names)
        shapes = {name: shape for name, shape in results.items() if name in names}
        more = {f"array {i}": x for i, x in enumerate(others)}

        def compute(arrays: ByName) -> Results:
            taken = [arrays[name] for name in more]
            return call.weigh(spec, arrays, taken, np.int32(rising), shapes, by_key_head)

        found = without_derivatives(self.row.name, compute)(moving | more) if shapes else ()
        places = np.searchsorted(rising, queries)  # of results, which are in rising order
        told = {
            name: unfolded(x if name == "key_sum" or (queries == rising).all() else x[:, :, places], batch)
            for name, x in zip(shapes, found, strict=True)
        }
        if of is None:
            return told["weights"]
        if "top_keys" in told:
            told["top_keys"] = told["top_keys"].astype(int)
        return AttentionStatistics(**told)


def _face(row: Row) -> Any:
    doc = library_doc(row, _FACE, _ABOUT.format(row.name), "They must be known at compile time.")
    made = function(row, _FACE, _Looking(row), doc)
    made.__module__ = "attnmask.jax"
    return made


attention_weights, attention_statistics = map(_face, (WEIGHTS, STATISTICS))
