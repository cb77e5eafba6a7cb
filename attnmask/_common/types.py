"""Types that many modules use."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from jax import Array as JaxArray
    from jax.sharding import PartitionSpec
    from matplotlib.axes import Axes
    from torch.nn.attention.flex_attention import BlockMask
else:  # these need not be installed, and take long to load
    Axes = BlockMask = JaxArray = PartitionSpec = object

__all__ = [
    "Activation",
    "AnyFunction",
    "Arguments",
    "Array",
    "Axes",
    "BlockMask",
    "DType",
    "Given",
    "JaxArray",
    "PartitionSpec",
    "Tree",
]

Activation: TypeAlias = Literal["silu"] | None
Array: TypeAlias = NDArray[Any]
DType: TypeAlias = np.dtype[Any]
AnyFunction: TypeAlias = Callable[..., Any]
Arguments: TypeAlias = dict[str, Any]  # values by name
Given: TypeAlias = Mapping[str, Any]  # the same, to be read
Tree: TypeAlias = tuple[tuple[Any, ...], tuple[Any, ...]]  # a mask: what is static, and its arrays
