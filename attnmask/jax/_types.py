"""Types that several modules use."""

from typing import TypeAlias

import jax
from numpy.typing import DTypeLike

from attnmask._common.types import Array

AnyArray: TypeAlias = Array | jax.Array
ByName: TypeAlias = dict[str, jax.Array]
Results: TypeAlias = tuple[jax.Array, ...]
AnyByName: TypeAlias = dict[str, AnyArray]
Shaped: TypeAlias = tuple[tuple[int, ...], DTypeLike]  # the shape and type of a result
