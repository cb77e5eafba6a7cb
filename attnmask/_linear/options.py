"""The arguments that linear attention and short convolutions take by name, in all libraries."""

from __future__ import annotations

from inspect import signature
from typing import Generic, Literal, TypeAlias, TypedDict, TypeVar

from numpy.typing import ArrayLike

from attnmask._common.keywords import Keywords, types_of
from attnmask._common.types import AnyFunction, Array

_Array = TypeVar("_Array")
_Flag = TypeVar("_Flag", bound=bool)
Activation: TypeAlias = Literal["silu"] | None

PROBLEM = (  # the arguments of linear attention in the order of the core
    "query", "key", "value", "decay", "beta", "scale", "initial_state", "cu_seqlens", "normalize_qk", "chunk_size"
)  # fmt: skip


class _OfTokens(TypedDict, Generic[_Array], total=False):
    decay: _Array | None
    beta: _Array | None
    scale: float | None
    normalize_qk: bool


class LinearOptions(_OfTokens[_Array], Generic[_Array], total=False):
    """Keyword arguments of `linear_attention`, by the kind of array."""

    initial_state: _Array | None
    cu_seqlens: ArrayLike | None
    chunk_size: int


class LinearStepOptions(_OfTokens[_Array], Generic[_Array], total=False):
    state_indices: ArrayLike | None


class ConvolutionOptions(TypedDict, Generic[_Array], total=False):
    """Keyword arguments of `short_convolution`, by the kind of array."""

    activation: Activation
    cu_seqlens: ArrayLike | None
    initial_state: _Array | None


class ConvolutionStepOptions(TypedDict, total=False):
    activation: Activation
    state_indices: ArrayLike | None


# All keyword arguments, by the type of `return_state`, for overloads; with `out`, for NumPy.


class LinearCall(LinearOptions[_Array], Generic[_Array, _Flag], total=False):
    return_state: _Flag


class LinearInto(LinearCall[ArrayLike, _Flag], Generic[_Flag], total=False):
    out: Array | None


class ConvolutionCall(ConvolutionOptions[_Array], Generic[_Array, _Flag], total=False):
    return_state: _Flag


class ConvolutionInto(ConvolutionCall[ArrayLike, _Flag], Generic[_Flag], total=False):
    out: Array | None


def keywords(function: AnyFunction, options: AnyFunction, array: str) -> Keywords:
    """Return those arguments of a function of NumPy arrays that are `options`, for another kind of array."""
    types, rows = types_of(options, array), signature(function).parameters
    return Keywords({name: rows[name].default for name in rows if name in types}, types)
