"""`pack`, `unpack`, `shard_sequence` and `unshard_sequence` for PyTorch.

Outside graphs they are NumPy's, which take tensors. In graphs, NumPy's functions move the numbers of tokens instead, in
operators; PyTorch takes the tokens with these numbers, and has the gradient.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from attnmask._common.arguments import describe
from attnmask._common.docstrings import of_tensors
from attnmask._common.types import AnyFunction
from attnmask._sequences import padding
from attnmask._sharded import shards as sharding
from attnmask._sharded.plan import ShardPlan, check_world
from attnmask.torch._import import torch
from attnmask.torch._operators import check_tensor, needs_operator, operand
from attnmask.torch._states import to_tensor
from attnmask.torch._types import MaybeTensor


def _operator(size: Callable[..., Any]) -> Callable[[AnyFunction], AnyFunction]:
    """Make an operator of a function that returns numbers of tokens: so many as `size` says; None if data decide."""

    def made(function: AnyFunction) -> AnyFunction:
        operator = torch.library.custom_op(f"attnmask::{function.__name__[1:]}", function, mutates_args=())

        @operator.register_fake
        def _(*arguments: Any) -> torch.Tensor:
            count = size(*arguments)
            count = torch.library.get_ctx().new_dynamic_size() if count is None else count
            return torch.empty(count, dtype=torch.int64)

        return operator

    return made


@_operator(lambda *_: None)
def _pack_places(lengths: torch.Tensor, rows: int, tokens: int) -> torch.Tensor:
    return to_tensor(padding.pack(np.arange(rows * tokens).reshape(rows, tokens), lengths)[0])


@_operator(lambda cu_seqlens, total, max_len: total)
def _unpack_places(cu_seqlens: torch.Tensor, total: int, max_len: int) -> torch.Tensor:
    return to_tensor(np.flatnonzero(padding.unpack(np.ones(total, bool), cu_seqlens, max_len)))


def _size_of_shard(starts: object, owners: object, layout: str, length: int, world: int, rank: int) -> Any:
    ranks = [rank] if layout == "contiguous" else [rank, 2 * world - 1 - rank]
    if starts is not None or not 0 <= rank < world:
        return None
    chunks = world * len(ranks)
    return sum(length * (i + 1) // chunks - length * i // chunks for i in ranks)


@_operator(_size_of_shard)
def _shard_places(
    starts: MaybeTensor, owners: MaybeTensor, layout: str, length: int, world: int, rank: int
) -> torch.Tensor:
    plan = _restored(layout, starts, owners, world)
    return to_tensor(sharding.shard_sequence(np.arange(length), world, rank, *plan))


@_operator(lambda starts, owners, layout, lengths: sum(lengths))
def _unshard_places(
    starts: MaybeTensor, owners: MaybeTensor, layout: str, lengths: list[int]
) -> torch.Tensor:
    parts = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    return to_tensor(sharding.unshard_sequence(parts, *_restored(layout, starts, owners, len(lengths))))


def _restored(layout: str, starts: Any, owners: Any, world: int) -> tuple[Any, Any]:
    """Return `layout` and `cu_seqlens` for what an operator has."""
    return (layout, starts) if owners is None else (ShardPlan(starts, owners, world), None)


def _laid_out(layout: str | ShardPlan, cu_seqlens: ArrayLike | None, world: int) -> dict[str, Any]:
    """Return a layout as operators take it: starts of sequences or chunks, owners of chunks, or a name."""
    if isinstance(layout, ShardPlan):
        check_world(layout, world)
        starts, owners = layout._tensors
        return {"starts": starts, "owners": owners, "layout": ""}
    return {"starts": operand(cu_seqlens), "owners": None, "layout": layout}


def _in_graph(tensors: dict[str, Any], *others: object) -> bool:
    """Check tensors, and return whether PyTorch must see what is done with them."""
    for name, x in tensors.items():
        check_tensor(x, name)
    return torch.compiler.is_dynamo_compiling() or needs_operator((*tensors.values(), *others))


def _fill_of(fill: Any, dtype: torch.dtype) -> Any:
    return padding.held(fill, torch.empty(0, dtype=dtype))


_fill_of._dynamo_marked_constant = True  # type: ignore[attr-defined]  # by assume_constant_result, which imports Dynamo


@of_tensors(
    padding.pack,
    """
>>> attnmask.torch.pack(torch.tensor([[1, 2, 0], [3, 0, 0]]), torch.tensor([2, 1]))
(tensor([1, 2, 3]), tensor([0, 2, 3], dtype=torch.int32))
""",
)
def pack(x: torch.Tensor, lengths: "ArrayLike") -> tuple[torch.Tensor, torch.Tensor]:
    if not _in_graph({"x": x}, lengths):
        return padding.pack(x, lengths)  # type: ignore[return-value, unused-ignore]
    if x.ndim < 2:
        raise ValueError(f"x must be [B, T, ...], got {describe(x)}")
    given = operand(lengths)
    places = _pack_places(given, *x.shape[:2])
    counts = (given != 0).sum(1) if given.ndim == 2 else given.long()
    starts = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    return x.flatten(0, 1).index_select(0, places.to(x.device)), starts


@of_tensors(
    padding.unpack,
    """
>>> attnmask.torch.unpack(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3]), max_len=3)
tensor([[1, 2, 0],
        [3, 0, 0]])
""",
)
def unpack(packed: torch.Tensor, cu_seqlens: "ArrayLike", max_len: int, fill: complex = 0) -> torch.Tensor:
    if not _in_graph({"packed": packed}, cu_seqlens):
        return padding.unpack(packed, cu_seqlens, max_len, fill)  # type: ignore[arg-type, unused-ignore]
    if packed.ndim < 1:
        raise ValueError(f"packed must be [total, ...], got {describe(packed)}")
    starts = operand(cu_seqlens)
    places, rows = _unpack_places(starts, len(packed), max_len), starts.numel() - 1
    padded = packed.new_full((rows * max_len, *packed.shape[1:]), _fill_of(fill, packed.dtype))
    padded = padded.index_copy(0, places.to(packed.device), packed)
    return padded.unflatten(0, (rows, max_len))


@of_tensors(
    sharding.shard_sequence,
    """
>>> attnmask.torch.shard_sequence(torch.arange(8), 2, 0)
tensor([0, 1, 6, 7])
""",
)
def shard_sequence(
    x: torch.Tensor,
    world: int,
    rank: int,
    layout: str | ShardPlan = "zigzag",
    cu_seqlens: "ArrayLike | None" = None,
    *,
    axis: int | None = None,
) -> torch.Tensor:
    if not _in_graph({"x": x}, cu_seqlens):
        return sharding.shard_sequence(x, world, rank, layout, cu_seqlens, axis=axis)
    tokens = sharding.token_axis(x, "x", axis)
    given = _laid_out(layout, cu_seqlens, world)
    places = _shard_places(length=x.shape[tokens], world=world, rank=rank, **given)
    return x.index_select(tokens, places.to(x.device))


@of_tensors(
    sharding.unshard_sequence,
    """
>>> attnmask.torch.unshard_sequence([torch.tensor([0, 3]), torch.tensor([1, 2])])
tensor([0, 1, 2, 3])
""",
)
def unshard_sequence(
    shards: Sequence[torch.Tensor],
    layout: str | ShardPlan = "zigzag",
    cu_seqlens: "ArrayLike | None" = None,
    *,
    axis: int | None = None,
) -> torch.Tensor:
    parts = sharding.as_parts(shards)
    if not _in_graph({f"shards[{rank}]": part for rank, part in enumerate(parts)}, cu_seqlens):
        return sharding.unshard_sequence(parts, layout, cu_seqlens, axis=axis)
    tokens = sharding.shared_axis(parts, axis)
    lengths = [part.shape[tokens] for part in parts]
    places = _unshard_places(lengths=lengths, **_laid_out(layout, cu_seqlens, len(parts)))
    return torch.cat(parts, tokens).index_select(tokens, places.to(parts[0].device))
