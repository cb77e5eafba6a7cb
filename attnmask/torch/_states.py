"""The state of a mask as tensors and a specification: the form in which it goes through PyTorch's graphs."""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from attnmask._common.arguments import as_array, describe, fields_in_a_line, read_only
from attnmask._common.types import Array
from attnmask._masks.program import Leaf, Program, Shape, Terms, hollow, mapped, refill
from attnmask._masks.state import State, fitted
from attnmask.torch._import import torch, without_modes

_FORM = 1  # of specifications, which exported programs have in them


class MaskTensors(NamedTuple):
    """A `MaskInfo` in parts, as returned by `mask_tensors`.

    Parameters
    ----------
    specification : str
        The mask without its arrays, after a format version. Each distinct specification is compiled once.
    tensors : tuple of Tensor
        The arrays.

    Examples
    --------
    >>> import attnmask.torch
    >>> info = attnmask.MaskInfo.from_segments([[0, 0, 1]])
    >>> attnmask.torch.mask_tensors(info).specification
    '[1, [1, 1, 3, 3], [["equal", [0], [0], false]]]'
    """

    specification: str
    tensors: tuple[torch.Tensor, ...]

    def __repr__(self) -> str:
        return fields_in_a_line(self)


def to_tensor(array: Array) -> torch.Tensor:
    """Return a tensor that shares the array's memory."""
    if array.dtype.type.__name__ == "bfloat16":  # `name` takes a microsecond
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _of_mask(array: Array) -> torch.Tensor:
    """Return a copy, because PyTorch has no read-only tensors."""
    return to_tensor(array.copy())


def tensors_of(state: State) -> MaskTensors:
    shape, program = state.described("take it apart")
    leaves: list[Any] = []
    nodes = mapped(hollow(program, leaves), lambda part: [part.place] if isinstance(part, Leaf) else part)
    return MaskTensors(json.dumps([_FORM, shape, nodes]), tuple(map(_of_mask, leaves)))


def tensors_of_graphs(state: State) -> MaskTensors:
    """Return `tensors_of` to be cached: real tensors also while a graph is traced, and none of inference mode."""
    with without_modes(), torch.inference_mode(False):
        return tensors_of(state)


@lru_cache(maxsize=256)
def _read(specification: str) -> tuple[Shape, Program]:
    form, *described = json.loads(specification)
    if type(form) is not int or form > _FORM:
        raise ValueError(
            f"specification must be of form {_FORM}, got {describe(form)}; a later version of attnmask made it: "
            "update attnmask"
        )
    shape, nodes = described
    return tuple(shape), mapped(nodes, lambda part: Leaf(*part) if isinstance(part, list) else part)


def restored_state(specification: str, tensors: Sequence[torch.Tensor]) -> State:
    """Rebuild the mask of `mask_tensors`. The tensors may have changed since, so they are checked."""
    shape, program = _read(specification)
    leaves = tuple(read_only(as_array(tensor.detach(), "mask_tensors")) for tensor in tensors)
    base, *terms = refill(program, leaves, {})
    batch, heads, queries, keys = (None if size == 1 else size for size in shape)
    state = State(base=base, terms=Terms(*terms))
    return fitted(state, ("the mask", (batch, heads, queries, keys)))


def batch_rows(specification: str) -> int:
    """Return the mask's batch rows; 1 if all rows share it."""
    return _read(specification)[0][0] if specification else 1
