"""`attention_weights`, `attention_statistics` and `attention_statistics_with_kvcache` for PyTorch.

They take part in graphs and transforms as functions with gradients do, but their gradients are errors. Models call
them beside a loss, on tensors that require a gradient, so that the error comes when the backward pass brings one.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from attnmask._attention.arguments import Diagonal
from attnmask._attention.weights import AttentionStatistics, Queries, Statistic, wanted
from attnmask._common.types import Arguments
from attnmask._faces.attention import CACHE_STATISTICS, STATISTICS, WEIGHTS
from attnmask._faces.rows import Row, function, library_doc
from attnmask._masks.info import MaskInfo
from attnmask.torch import _operators as operators
from attnmask.torch._faces import TORCH, Differentiable
from attnmask.torch._import import torch
from attnmask.torch._states import MaskTensors, to_tensor
from attnmask.torch._types import MaybeTensor, Shaped

_FACE = TORCH._replace(
    types=TORCH.types
    | {x.__name__: x for x in (AttentionStatistics, MaskInfo, MaskTensors, Sequence)}
    | {"Diagonal": Diagonal, "Queries": Queries, "Statistic": Statistic},
    named={x.name: AttentionStatistics.__name__ for x in (STATISTICS, CACHE_STATISTICS)},
    mask="MaskInfo | MaskTensors",
)
_ABOUT = """Apply `attnmask.{}` to CPU tensors, without copying them.

It has no gradient: the backward pass is an error if it brings one here, and so are tangents in forward mode.
``torch.autocast`` casts {}."""


class _Looking(Differentiable):
    """A function of the weights. Of results that are not asked for, operators return empty tensors."""

    def rows(self, given: Arguments) -> tuple[Any, ...]:
        """Return the shape of a number for each query."""
        *batch, queries, heads, _ = given["query"].shape
        return *batch, heads, _count(given, queries)

    def keys(self, given: Arguments) -> tuple[Any, ...]:
        """Return the shape of a number for each key, but for its heads."""
        *batch, keys, _, _ = given["key"].shape
        return *batch, keys

    def likes(self, given: Arguments) -> list[Shaped]:
        self.fits(given)
        query, rows = given["query"], self.rows(given)
        wide = operators.wide_dtype(query.dtype)
        if "of" not in given:
            return [((*rows, self.keys(given)[-1]), wide)]
        of = given["of"].split(",")
        found: dict[str, Shaped] = {x.name: ((*query.shape[:-3], 0), wide) for x in self.row.results}
        found |= {x: (rows, wide) for x in of if x in ("entropy", "max_logit")}
        if "key_sum" in of:
            heads = given[self.learned[1] if given["heads"] == "key" else "query"].shape[-2]
            *batch, keys = self.keys(given)
            found["key_sum"] = (*batch, heads, keys), wide
        if "top_keys" in of:
            found["top_keys"] = found["top_weights"] = (*rows, given["top"]), wide
        found["top_keys"] = found["top_keys"][0], torch.int64
        return list(found.values())

    def compute(self, given: Arguments, with_all: bool, tensors: dict[str, torch.Tensor]) -> Any:
        found = self.call(self.row.entry, given, {}, tensors)
        if isinstance(found, np.ndarray):
            return to_tensor(found)
        return tuple(x if x is None else to_tensor(x) for x in found)

    def filled(self, query: torch.Tensor, found: Any) -> Any:
        """Return results of operators, which are tensors."""
        if not isinstance(found, tuple):
            return found
        shape, wide = (*query.shape[:-3], 0), operators.wide_dtype(query.dtype)
        return tuple(
            torch.empty(shape, dtype=torch.int64 if told.name == "top_keys" else wide) if x is None else x
            for told, x in zip(self.row.results, found, strict=True)
        )

    def on_cpu(self, *operands: Any) -> Any:
        return self.filled(operands[0], super().on_cpu(*operands))

    def remember(self, given: Arguments, tensors: dict[str, torch.Tensor]) -> Any:
        results, kept = super().remember(given, tensors)
        return self.filled(given["query"], results), kept

    def differentiate(
        self,
        of_results: Sequence[MaybeTensor],
        given: Arguments,
        kept: Sequence[torch.Tensor],
        wanted: Sequence[bool],
    ) -> list[Any]:
        """Compiled gradients bring zeros where there is no gradient."""
        if any(x is not None and x.any() for x in of_results):
            raise RuntimeError(
                f"attnmask.torch.{self.name} has no gradient: use it in no loss, or write .detach()"
            )
        return [
            np.zeros(given[name].shape, operators.in_numpy(given[name].dtype, name)) if want else None
            for name, want in zip(self.learned, wanted, strict=True)
        ]


class _LookingAtCache(_Looking):
    """A function of the weights of attention to a cache. Key sums end with the longest sequence."""

    def rows(self, given: Arguments) -> tuple[Any, ...]:
        *batch, queries, heads, _ = given["query"].shape
        return *batch, heads, queries

    def keys(self, given: Arguments) -> tuple[Any, ...]:
        starts = given["cu_seqlens_q"]
        sequences = given["query"].shape[0] if starts is None else starts.shape[0] - 1
        return sequences, torch.library.get_ctx().new_dynamic_size()

    def cast(self, given: Arguments) -> Arguments:
        return given | {name: operators.autocast(given[name]) for name in self.row.cast}


def _count(given: Arguments, queries: Any) -> Any:
    """Return how many queries operands choose."""
    chosen, first, end, step = (given[name] for name in ("queries", "first", "end", "step"))
    if chosen is not None:
        return chosen.numel()
    if step is not None and step < 0:  # which slices of tensors do not have
        return len(range(queries)[first:end:step])
    return torch.empty(queries, device="meta")[first:end:step].shape[0]


def _face(row: Row) -> Any:
    look = (_LookingAtCache if row is CACHE_STATISTICS else _Looking)(row)

    def call(given: Arguments) -> Any:
        if "of" not in given:
            return look(given, False)
        found = look(given, True)
        if any(x is None for x in found):
            return AttentionStatistics(*found)
        names, _ = wanted(given["of"])  # operators fill what nobody asks for
        names += ("top_weights",) * ("top_keys" in names)
        told = zip(AttentionStatistics._fields, found, strict=True)
        return AttentionStatistics(*(x if name in names else None for name, x in told))

    made = function(
        row,
        _FACE,
        call,
        library_doc(row, _FACE, _ABOUT.format(row.name, " and ".join(f"`{x}`" for x in row.cast))),
    )
    made.__module__ = "attnmask.torch"
    return made


attention_weights, attention_statistics, attention_statistics_with_kvcache = map(
    _face, (WEIGHTS, STATISTICS, CACHE_STATISTICS)
)
