"""How the arrays of a mask may be divided among devices."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from attnmask._common.arguments import AxisName, describe, flag, integer
from attnmask._common.types import PartitionSpec
from attnmask._masks.state import AXES, State


class MaskSharding(NamedTuple):
    """For each array of a `MaskInfo`, the mesh axes that divide its dimensions; None if there is no array.

    An entry is a ``jax.sharding.PartitionSpec`` if JAX is installed, otherwise a tuple. It has one item per dimension:
    a mesh axis name, a tuple of names, or None for a dimension that is not divided. It is empty if no dimension is.

    Examples
    --------
    >>> import attnmask
    >>> attnmask.MaskInfo.get_empty_sharding().attention_mask is None
    True
    """

    attention_mask: PartitionSpec | None
    q_segment_ids: PartitionSpec | None
    kv_segment_ids: PartitionSpec | None
    cu_seqlens_q: PartitionSpec | None
    cu_seqlens_kv: PartitionSpec | None
    q_positions: PartitionSpec | None
    kv_positions: PartitionSpec | None


def mesh_sizes(mesh: object) -> dict[str, int]:
    """Return the size of each axis of a JAX mesh, or of a mapping."""
    sizes = mesh if isinstance(mesh, Mapping) else getattr(mesh, "shape", None)
    if not isinstance(sizes, Mapping):
        raise TypeError(f"mesh must be a jax.sharding.Mesh or map axis names to sizes, got {describe(mesh)}")
    return {name: integer(size, f"mesh[{name!r}]", 1) for name, size in sizes.items()}


def _each(names: AxisName) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names or ()


def check_axes(axes: Mapping[str, AxisName], sizes: Mapping[str, int]) -> None:
    """Check that every named axis is one of the mesh's."""
    for argument, names in axes.items():
        for name in _each(names):
            if name not in sizes:
                raise ValueError(f"{argument} must name axes of the mesh, {sorted(sizes)}, got {name!r}")


def partition(
    shape: tuple[int, ...], axes: Mapping[str, AxisName], sizes: Mapping[str, int]
) -> PartitionSpec:
    """Return the spec of an array of `shape` whose first dimensions go to `axes`, given by argument.

    What does not divide evenly is dropped. What is left may name no axis twice: JAX refuses it.
    """
    spec: list[AxisName] = [None] * len(shape)
    named: dict[str, str] = {}
    for dimension, (argument, names) in enumerate(axes.items()):
        if shape[dimension] % math.prod(sizes[name] for name in _each(names)):
            continue
        for name in _each(names):
            if name in named:
                both = " and ".join(dict.fromkeys((named[name], argument)))
                raise ValueError(f"{both} must name an axis once, got {name!r} twice")
            named[name] = argument
        spec[dimension] = names
    return spec_of(() if spec.count(None) == len(spec) else tuple(spec))


def spec_of(names: tuple[AxisName, ...]) -> PartitionSpec:
    """Return the names as a JAX spec if JAX is installed, otherwise as they are."""
    try:
        from jax.sharding import PartitionSpec
    except ImportError:
        return names  # type: ignore[return-value, unused-ignore]
    return PartitionSpec(*names)


def shardings(state: State, sequence_parallel: bool, mesh: object) -> MaskSharding:
    sizes = mesh_sizes(mesh)
    batch, heads, _, tokens = zip(AXES, state.axes, strict=True)
    if not flag(sequence_parallel, "sequence_parallel"):
        tokens = (tokens[0], None)
    check_axes(dict((heads, batch, tokens)), sizes)

    def spec(name: str, shape: tuple[int, ...] | None) -> PartitionSpec | None:
        if shape is None or name.startswith("cu_seqlens"):
            return None
        if name == "attention_mask":  # the array may broadcast to this shape
            shape = state.shape("divide it")
        return partition(shape, dict((batch, tokens) if len(shape) == 2 else (batch, heads, tokens)), sizes)

    return MaskSharding(**{name: spec(name, shape) for name, shape in state.held.items()})
