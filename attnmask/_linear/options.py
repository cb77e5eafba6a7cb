"""The keyword arguments of linear attention and short convolutions in PyTorch and JAX, by the kind of array."""

from typing import Generic, Literal, TypeAlias, TypedDict, TypeVar

from numpy.typing import ArrayLike

_Array = TypeVar("_Array")
Activation: TypeAlias = Literal["silu"] | None


class LinearOptions(TypedDict, Generic[_Array], total=False):
    decay: _Array | None
    beta: _Array | None
    scale: float | None
    initial_state: _Array | None
    cu_seqlens: ArrayLike | None
    normalize_qk: bool
    chunk_size: int


class ConvolutionOptions(TypedDict, Generic[_Array], total=False):
    activation: Activation
    cu_seqlens: ArrayLike | None
    initial_state: _Array | None
