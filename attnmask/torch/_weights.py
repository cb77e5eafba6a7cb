"""`attention_weights` and `attention_statistics` for PyTorch.

They take part in graphs and transforms as functions with gradients do, but their gradients are errors. Models call
them beside a loss, on tensors that require a gradient, so that the error comes when the backward pass brings one.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from attnmask._attention.arguments import Diagonal
from attnmask._attention.weights import AttentionStatistics, Queries, Statistic, wanted
from attnmask._common.types import Arguments
from attnmask._faces.attention import STATISTICS, WEIGHTS
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
    named={STATISTICS.name: AttentionStatistics.__name__},
    mask="MaskInfo | MaskTensors",
)
_ABOUT = """Apply `attnmask.{}` to CPU tensors, without copying them.

It has no gradient: the backward pass is an error if it brings one here, and so are tangents in forward mode.
``torch.autocast`` casts `query` and `key`."""


class _Looking(Differentiable):
    """A function of the weights. Of results that are not asked for, operators return empty tensors."""

    def likes(self, given: Arguments) -> list[Shaped]:
        self.fits(given)
        *batch, queries, heads, _ = given["query"].shape
        keys, kv_heads = given["key"].shape[-3:-1]
        rows = heads, _count(given, queries)
        wide = operators.wide_dtype(given["query"].dtype)
        if "of" not in given:
            return [((*batch, *rows, keys), wide)]
        found: dict[str, Shaped] = {x.name: ((*batch, 0), wide) for x in self.row.results}
        shapes = {
            "key_sum": (kv_heads if given["heads"] == "key" else heads, keys),
            "entropy": rows,
            "max_logit": rows,
            "top_keys": (*rows, given["top"]),
        }
        found |= {x: ((*batch, *shapes[x]), wide) for x in given["of"].split(",") if x}
        if "top_keys" in given["of"]:
            found["top_weights"] = found["top_keys"]
        found["top_keys"] = found["top_keys"][0], torch.int64
        return list(found.values())

    def compute(self, given: Arguments, with_all: bool, tensors: dict[str, torch.Tensor]) -> Any:
        found = self.call(self.row.entry, given, {}, tensors)
        if isinstance(found, np.ndarray):
            return to_tensor(found)
        query = given["query"]
        shape, wide = (*query.shape[:-3], 0), operators.wide_dtype(query.dtype)
        return tuple(
            torch.empty(shape, dtype=torch.int64 if name == "top_keys" else wide)
            if x is None
            else to_tensor(x)
            for name, x in found._asdict().items()
        )

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


def _count(given: Arguments, queries: Any) -> Any:
    """Return how many queries operands choose."""
    chosen, first, end, step = (given[name] for name in ("queries", "first", "end", "step"))
    if chosen is not None:
        return chosen.numel()
    if step is not None and step < 0:  # which slices of tensors do not have
        return len(range(queries)[first:end:step])
    return torch.empty(queries, device="meta")[first:end:step].shape[0]


def _face(row: Row) -> Any:
    look = _Looking(row)

    def call(given: Arguments) -> Any:
        if "of" not in given:
            return look(given, False)
        names, _ = wanted(given["of"])
        names += ("top_weights",) * ("top_keys" in names)
        found = zip(AttentionStatistics._fields, look(given, True), strict=True)
        return AttentionStatistics(*(x if name in names else None for name, x in found))

    made = function(row, _FACE, call, library_doc(row, _FACE, _ABOUT.format(row.name)))
    made.__module__ = "attnmask.torch"
    return made


attention_weights, attention_statistics = map(_face, (WEIGHTS, STATISTICS))
