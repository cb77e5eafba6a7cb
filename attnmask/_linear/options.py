"""The arguments of linear attention and short convolutions in PyTorch and JAX."""

from typing import Generic, Literal, TypeAlias, TypedDict, TypeVar

from numpy.typing import ArrayLike

_Array = TypeVar("_Array")
Activation: TypeAlias = Literal["silu"] | None

PROBLEM = (  # the arguments of linear attention in the order of the core
    "query", "key", "value", "decay", "beta", "scale", "initial_state", "cu_seqlens", "normalize_qk", "chunk_size"
)  # fmt: skip


class LinearOptions(TypedDict, Generic[_Array], total=False):
    """Keyword arguments of `linear_attention`, by the kind of array."""

    decay: _Array | None
    beta: _Array | None
    scale: float | None
    initial_state: _Array | None
    cu_seqlens: ArrayLike | None
    normalize_qk: bool
    chunk_size: int


class ConvolutionOptions(TypedDict, Generic[_Array], total=False):
    """Keyword arguments of `short_convolution`, by the kind of array."""

    activation: Activation
    cu_seqlens: ArrayLike | None
    initial_state: _Array | None
