"""The state of a mask as tensors and a specification: the form in which it goes through PyTorch's graphs."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from operator import is_
from typing import Any, NamedTuple

import numpy as np

from attnmask._common.arguments import FLOAT8, as_array, fields_in_a_line, read_only
from attnmask._common.types import Array
from attnmask._masks.program import Leaf, Program, Shape, Terms, hollow, mapped, refill
from attnmask._masks.state import State, fitted
from attnmask._masks.terms import operands
from attnmask.torch._import import torch, without_modes

_OF_ML_DTYPES = {"bfloat16": np.int16} | dict.fromkeys(FLOAT8, np.uint8)  # and how PyTorch reads them
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
    name = array.dtype.type.__name__  # that of the dtype takes a microsecond
    if name in _OF_ML_DTYPES:
        return torch.from_numpy(array.view(_OF_ML_DTYPES[name])).view(getattr(torch, name))
    return torch.from_numpy(array)


def _of_mask(array: Array) -> torch.Tensor:
    """Return a copy, because PyTorch has no read-only tensors."""
    return to_tensor(array.copy())


def tensors_of(state: State) -> MaskTensors:
    shape, program = state.described("take it apart")
    leaves: list[Any] = []
    nodes = mapped(hollow(program, leaves), lambda part: [part.place] if isinstance(part, Leaf) else part)
    return MaskTensors(json.dumps([_FORM, shape, nodes]), tuple(map(_of_mask, leaves)))


def of_graph(array: Array) -> torch.Tensor:
    """Return a copy that is a real tensor also while a graph is traced, and none of inference mode."""
    with without_modes(), torch.inference_mode(False):
        return _of_mask(array)


def tensors_of_graphs(state: State) -> MaskTensors:
    """Return `tensors_of` to be cached: real tensors also while a graph is traced, and none of inference mode."""
    with without_modes(), torch.inference_mode(False):
        made = tensors_of(state)
    if made.tensors:
        held: Any = made.tensors[0]
        held.attnmask_state = made, [x._version for x in made.tensors], replace(state)
    return made


@lru_cache(maxsize=256)
def _read(specification: str) -> tuple[Shape, Program, int]:
    """Return the mask's shape, its program without arrays, and the number of these."""
    try:
        form, *described = json.loads(specification)
        if type(form) is int and form <= _FORM:
            (batch, heads, queries, keys), nodes = described
            program = mapped(nodes, lambda part: Leaf(*part) if isinstance(part, list) else part)
            parts = [part for node in program for _, part in operands(node)]
            count = 1 + max((part.place for part in parts if isinstance(part, Leaf)), default=-1)
            return (batch, heads, queries, keys), program, count
    except (ValueError, TypeError, LookupError):
        form = None
    if type(form) is int:
        raise ValueError(
            f"specification must be of form {_FORM}, got {form}; a later version of attnmask made it: update attnmask"
        )
    raise ValueError(f"specification must be from mask_tensors, got {specification!r:.200}")


def restored_state(specification: str, tensors: Sequence[torch.Tensor]) -> State:
    """Rebuild the mask of `mask_tensors`. The tensors may have changed since, so they are checked, unless a graph has
    them as constants and PyTorch tells that they have not.
    """
    if not tensors:
        return _without_arrays(specification)
    known = getattr(tensors[0], "attnmask_state", None)
    if known is not None:
        made, versions, prepared = known
        same = len(tensors) == len(versions) and all(map(is_, tensors, made.tensors))
        if same and specification == made.specification and versions == [x._version for x in tensors]:
            state: State = prepared
            return state
    return _rebuilt(specification, tensors)


@lru_cache(maxsize=256)
def _without_arrays(specification: str) -> State:
    return _rebuilt(specification, ())


def _rebuilt(specification: str, tensors: Sequence[torch.Tensor]) -> State:
    shape, program, count = _read(specification)
    if len(tensors) != count:
        raise ValueError(f"mask_tensors must be {count} tensors for this specification, got {len(tensors)}")
    leaves = tuple(read_only(as_array(tensor.detach(), "mask_tensors")) for tensor in tensors)
    base, *terms = refill(program, leaves, {})
    batch, heads, queries, keys = (None if size == 1 else size for size in shape)
    state = State(base=base, terms=Terms(*terms))
    return fitted(state, ("the mask", (batch, heads, queries, keys)))


def batch_rows(specification: str) -> int:
    """Return the mask's batch rows; 1 if all rows share it."""
    return _read(specification)[0][0] if specification else 1
