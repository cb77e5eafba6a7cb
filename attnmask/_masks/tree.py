"""The state of a `MaskInfo` as the leaves of a tree, for JAX and pickle."""

from itertools import compress
from typing import Any

import numpy as np

from attnmask._common.arguments import check_form, describe, frozen, read_only, shared_integers
from attnmask._common.types import Arguments, Array, Tree
from attnmask._masks.program import Leaf, Terms, hollow, mapped, refill
from attnmask._masks.state import AXES, FLAGS, POSITIONS, Labels, State, array_extents, fitted

_HELD = {  # every tree has these leaves, after the dense mask
    "q_segment_ids": ("[B, T]", "[B, H, T]"),
    "kv_segment_ids": ("[B, T]", "[B, H, T]"),
    "cu_seqlens_q": ("[entries]",),
    "cu_seqlens_kv": ("[entries]",),
    **POSITIONS,
}
_LEAVES = 1 + len(_HELD)
_AUX = len(AXES) + len(FLAGS) + 6  # entries of the second result of `flatten`


def flatten(state: State) -> Tree:
    leaves: list[Array | None] = [
        state.base_array,
        *state.labels.get(),
        state.cu_seqlens_q,
        state.cu_seqlens_kv,
        state.q_positions,
        state.kv_positions,
    ]
    program = hollow(state.program, leaves)
    batch, _, queries, keys = state.extent
    if any(extent[0] is not None for _, extent in array_extents(state)):
        batch = None  # the arrays tell it, also where they are divided among devices
    baked = (kind in state.baked for kind in FLAGS)
    aux = (*state.axes, *baked, batch, queries, keys, state.dtype, state.segment_based, program)
    return tuple(leaves), aux


_FORM = 1  # of pickles


def pickled(aux: tuple[Any, ...], leaves: tuple[object, ...]) -> Arguments:
    """Return what `flatten` gives, in objects without this package's types."""
    *details, program = aux
    nodes = mapped(program, lambda part: tuple(part) if isinstance(part, Leaf) else part)
    return {"version": _FORM, "aux_data": (*details, nodes), "children": leaves}


def unpickled(state: Arguments) -> Tree:
    check_form(state, _FORM, "the MaskInfo")
    *details, nodes = state["aux_data"]
    program = mapped(nodes, lambda part: Leaf(*part) if isinstance(part, tuple) else part)
    return parts((*details, program), state["children"])


def parts(aux_data: tuple[Any, ...], children: tuple[Any, ...]) -> Tree:
    """Return what `restore` takes, not read yet; arrays must not change until then."""
    for name, given, least in (("aux_data", aux_data, _AUX), ("children", children, _LEAVES)):
        if not isinstance(given, (tuple, list)):
            raise TypeError(f"{name} must be a tuple from tree_flatten, got {describe(given)}")
        if len(given) < least:
            raise ValueError(f"{name} must be of {least} entries from tree_flatten, got {len(given)}")
    return aux_data, tuple(map(_kept, children))


def _kept(leaf: object) -> object:
    if not isinstance(leaf, np.ndarray) or not leaf.flags.writeable:
        return leaf
    return read_only(leaf) if leaf.ndim == 4 else frozen(leaf.copy())  # dense masks are large: no copy


def restore(aux: tuple[Any, ...], leaves: tuple[Any, ...]) -> State:
    """Undo `flatten` with leaves that may be other arrays by now; they are checked like arguments."""
    *details, batch, queries, keys, dtype, segment_based, hollow_program = aux
    checked: dict[int, Any] = {}
    base, *terms = refill(hollow_program, leaves, checked) or (None,)
    for index, (name, layouts) in enumerate(_HELD.items(), 1):
        if leaves[index] is not None and index not in checked:
            checked[index] = shared_integers(leaves[index], name, layouts)
    baked = frozenset(compress(FLAGS, details[len(AXES) :]))
    state = State(
        base=base,
        terms=Terms(*terms),
        segment_based=segment_based,
        dtype=dtype,
        labels=Labels(checked.get(1), checked.get(2), "chunk" if "chunked" in baked else "segment"),
        cu_seqlens_q=checked.get(3),
        cu_seqlens_kv=checked.get(4),
        q_positions=checked.get(5),
        kv_positions=checked.get(6),
        baked=baked,
        axes=tuple(details[: len(AXES)]),
    )
    known = [("the mask", (None if batch == 1 else batch, None, queries, keys))]
    return fitted(state, *known if (batch, queries, keys) != (None, None, None) else ())
