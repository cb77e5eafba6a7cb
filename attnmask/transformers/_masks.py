"""Turn the masks of transformers models into descriptions, if their mask functions are known."""

from collections.abc import Callable
from inspect import signature
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnmask._common.arguments import frozen, read_only
from attnmask._common.types import AnyFunction, Arguments, Array
from attnmask._masks.info import MaskInfo
from attnmask._masks.program import Program, Terms
from attnmask._masks.state import State
from attnmask._masks.terms import band, dense, equal
from attnmask.torch._described import DescribedTensor
from attnmask.torch._import import torch

try:
    import transformers
except ImportError as _missing:
    raise ImportError(
        "attnmask.transformers needs transformers, which is not installed: pip install transformers"
    ) from _missing

if transformers.__version__.split(".")[0] != "5":
    raise ImportError(
        f"attnmask.transformers needs transformers from 5.0 to below 6, got {transformers.__version__}"
    )

from transformers import masking_utils

__all__ = ["CACHE", "SymbolicMask", "is_traced", "masking_utils", "symbolic_mask", "transformers"]

# What models call a cache among their arguments.
CACHE = "cache" if "cache" in signature(masking_utils.create_causal_mask).parameters else "past_key_values"


def is_traced() -> bool:
    """Return whether a graph is being traced, in which tensors have no numbers."""
    return bool(
        torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack() > 0
    )


class SymbolicMask(DescribedTensor):
    """A `MaskInfo` where a model expects a tensor of bool, of shape [B, 1, Q, K].

    Whatever is computed with it is computed with that tensor, which is made then.

    Parameters
    ----------
    info : MaskInfo
    complete : bool
        Padding or packed sequences are part of it already: positions tell nothing more.
    """

    info: MaskInfo
    complete: bool

    def __new__(cls, info: MaskInfo, complete: bool = False) -> "SymbolicMask":
        shape = info._state.shape("write it out")
        return cls.without_memory(shape, torch.bool, info=info, complete=complete)

    def __repr__(self, **_: object) -> str:  # type: ignore[override, unused-ignore]
        return f"SymbolicMask({self.info!r})"

    def written_out(self) -> torch.Tensor:
        return torch.from_numpy(self.info.attention_mask.copy())


class _Place(NamedTuple):
    """The requested part of a mask: so many queries and keys of each batch row, from these positions on."""

    queries: int
    keys: int
    q_offset: int
    k_offset: int
    evaluate: Callable[[AnyFunction], torch.Tensor]  # a mask function, for all pairs
    sequences: "Array | None" = None  # of packed tokens, [B, T]: pairs of one number only matter
    positions: "Array | None" = None  # of packed tokens in their sequences, if a function is asked for those


_ALL: Program = (("all",),)


class _Unknown(Exception):
    """A mask function that has no symbolic form."""


def _joined(programs: list[Program], operator: str) -> Program:
    rest = [program for program in programs if program is not _ALL]
    if not rest or (operator == "or" and len(rest) < len(programs)):
        return _ALL
    return sum(((*program, operator) for program in rest[1:]), rest[0])


def _int32(ids: Array | torch.Tensor) -> NDArray[np.int32]:
    return frozen(np.array(ids, np.int32, order="C"))


def _numpy(tensor: Any) -> Array:
    while torch._C._functorch.is_gradtrackingtensor(tensor):  # torch.func hides the memory of all tensors
        tensor = torch._C._functorch.get_unwrapped(tensor)
    with torch._C._DisableFuncTorch():
        array: Array = tensor.detach().numpy()
    return array


def _near(low: "int | None", high: "int | None", place: _Place) -> Program:
    # Packed queries and keys are the same tokens, as far from each other as their positions.
    return (band(low, high, place.q_offset - place.k_offset if place.positions is None else 0),)


def _chunks(size: int, left_padding: torch.Tensor, place: _Place) -> Program:
    padding = _numpy(left_padding).astype(np.int64)
    if place.positions is not None and place.sequences is not None:
        chunks = (place.positions - padding[:, None]) // size
        first = np.diff(chunks, prepend=0).astype(bool) | np.diff(place.sequences, prepend=0).astype(bool)
        ids = _int32(first.cumsum(axis=1))
        return (equal(ids, ids),)
    shifts = [frozen(offset + -padding % size) for offset in (place.q_offset, place.k_offset)]  # not negative
    return (("chunk", size, *shifts),)


def _same(ids: Array | torch.Tensor, place: _Place) -> Program:
    """Tokens attend to tokens with the same number; negative numbers attend to nothing."""
    array = _numpy(ids)
    q_ids = array[:, place.q_offset : place.q_offset + place.queries]
    k_ids = array[:, place.k_offset : place.k_offset + place.keys]
    return (equal(_int32(q_ids), _int32(k_ids)),)


def _padding(tokens: torch.Tensor, place: _Place) -> Program:
    """Keys that are tokens, usually one range per row, followed by padding."""
    live = _numpy(tokens)[:, place.k_offset : place.k_offset + place.keys].astype(bool)
    live = np.pad(live, ((0, 0), (0, place.keys - live.shape[1])))
    if live.all():
        return _ALL
    count = live.sum(axis=1)
    begin = live.argmax(axis=1)
    end = np.where(count > 0, place.keys - live[:, ::-1].argmax(axis=1), begin)
    if (end - begin == count).all():
        return (("keys", frozen(begin.astype(np.int64)), frozen(end.astype(np.int64))),)
    return (equal(_int32(np.zeros((1, place.queries))), _int32(np.where(live, 0, -1))),)


def _remapped(function: AnyFunction, positions: torch.Tensor, place: _Place) -> Program:
    """Return the program of a mask function of positions in packed sequences. These increase by one, so that distances
    are the same as in the row.
    """
    array, sequences = _numpy(positions), place.sequences
    if sequences is None or sequences.shape != array.shape:
        raise _Unknown
    if (np.diff(array)[np.diff(sequences) == 0] != 1).any():
        raise _Unknown
    return _program(function, place._replace(positions=array))


def _all_of(functions: tuple[Any, ...], place: _Place) -> Program:
    for name, packing in map(_recognized, functions):
        if name == "packed_sequence_mask_function":
            place = place._replace(sequences=_numpy(*packing))
    return _joined([_program(part, place) for part in functions], "and")


def _any_of(functions: tuple[Any, ...], place: _Place) -> Program:
    return _joined([_program(part, place) for part in functions], "or")


class _Maker(NamedTuple):
    """A function of transformers that makes mask functions."""

    arguments: tuple[Any, ...]  # to call it with
    program: Callable[..., Program]  # of what it was called with, in the order of names, and a place
    at_positions: bool = True  # whether it can be asked for positions of packed tokens


_MAKERS = {
    "and_masks": _Maker((len,), _all_of),
    "or_masks": _Maker((len,), _any_of),
    "sliding_window_overlay": _Maker((1,), lambda size, place: _near(1 - size, None, place)),
    "sliding_window_bidirectional_overlay": _Maker((1,), lambda size, place: _near(-size, size, place)),
    "chunked_overlay": _Maker((1, None), _chunks),
    "remap_positions_for_packed_sequence": _Maker((len, None), _remapped, False),
    "packed_sequence_mask_function": _Maker((None,), _same, False),
    "blockwise_overlay": _Maker((None,), _same, False),
    "padding_mask_function": _Maker((None,), _padding, False),
}
# All that such a maker returns has the same code. The first versions of transformers lack some makers; what later ones
# know of more than these arguments is written out.
_CODES = {
    name: getattr(masking_utils, name)(*maker.arguments).__code__
    for name, maker in _MAKERS.items()
    if hasattr(masking_utils, name)
}
_NAMES = {
    code: name for name, code in _CODES.items() if len(code.co_freevars) == len(_MAKERS[name].arguments)
}
_EVERYTHING = getattr(masking_utils, "bidirectional_mask_function", None)


def _recognized(function: Any) -> "tuple[str | None, list[Any]]":
    """Return the name of what made a mask function, and its arguments in the order of their names."""
    name = _NAMES.get(getattr(function, "__code__", None))
    return name, [] if name is None else [cell.cell_contents for cell in function.__closure__]


def _known(function: AnyFunction, place: _Place) -> Program:
    if function is masking_utils.causal_mask_function:
        return _near(None, 0, place)
    if function is _EVERYTHING:
        return _ALL
    name, held = _recognized(function)
    if name is None or (place.positions is not None and not _MAKERS[name].at_positions):
        raise _Unknown
    return _MAKERS[name].program(*held, place)


def _program(function: AnyFunction, place: _Place) -> Program:
    """Return what a mask function says: symbolic if it is one of transformers' own, otherwise an array."""
    try:
        return _known(function, place)
    except _Unknown:
        if place.positions is not None:
            raise  # the function around this one is evaluated as a whole
        return (dense(read_only(_numpy(place.evaluate(function)))),)


def symbolic_mask(batch_size: int, kv_length: int, given: Arguments) -> SymbolicMask:
    """Return the mask that ``transformers.masking_utils.sdpa_mask`` would make from the same arguments, `given`."""
    tokens = given.get("attention_mask")
    plain = {"attention_mask": None, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}

    def evaluate(function: AnyFunction) -> torch.Tensor:
        mask = masking_utils.sdpa_mask(**given | plain | {"mask_function": function})
        assert mask is not None
        return mask.expand(batch_size, -1, place.queries, place.keys)

    if "cache_position" in given:  # of the first versions
        places = given["cache_position"]
        queries, q_offset = len(places), int(places[0])
    else:
        queries, q_offset = given["q_length"], int(given.get("q_offset", 0))
    place = _Place(queries, kv_length, q_offset, int(given.get("kv_offset", 0)), evaluate)
    function = given.get("mask_function", masking_utils.causal_mask_function)
    program = _program(function, place)
    if tokens is not None:
        program = _joined([program, _padding(tokens, place)], "and")
    state = State(base=program[0], terms=Terms(*program[1:]), extent=(batch_size, 1, queries, kv_length))
    name, held = _recognized(function)
    parts = [part for part, _ in map(_recognized, held[0])] if name in ("and_masks", "or_masks") else []
    return SymbolicMask(MaskInfo._of(state), tokens is not None or "packed_sequence_mask_function" in parts)
