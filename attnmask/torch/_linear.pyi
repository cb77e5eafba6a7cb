"""Written by .ci/make_signatures.py."""
# fmt: off

from typing import Literal, overload

import torch
from numpy.typing import ArrayLike

@overload
def linear_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, decay: torch.Tensor | None = None,
    beta: torch.Tensor | None = None, scale: float | None = None, initial_state: torch.Tensor | None = None,
    cu_seqlens: ArrayLike | None = None, normalize_qk: bool = False, chunk_size: int = 64,
    return_state: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def linear_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, decay: torch.Tensor | None = None,
    beta: torch.Tensor | None = None, scale: float | None = None, initial_state: torch.Tensor | None = None,
    cu_seqlens: ArrayLike | None = None, normalize_qk: bool = False, chunk_size: int = 64,
    return_state: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def linear_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, decay: torch.Tensor | None = None,
    beta: torch.Tensor | None = None, scale: float | None = None, initial_state: torch.Tensor | None = None,
    cu_seqlens: ArrayLike | None = None, normalize_qk: bool = False, chunk_size: int = 64,
    return_state: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def linear_attention_step(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, state: torch.Tensor, *,
    decay: torch.Tensor | None = None, beta: torch.Tensor | None = None, scale: float | None = None,
    normalize_qk: bool = False, state_indices: ArrayLike | None = None,
) -> torch.Tensor: ...
@overload
def short_convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *,
    activation: Literal['silu'] | None = None, cu_seqlens: ArrayLike | None = None,
    initial_state: torch.Tensor | None = None, return_state: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def short_convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *,
    activation: Literal['silu'] | None = None, cu_seqlens: ArrayLike | None = None,
    initial_state: torch.Tensor | None = None, return_state: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def short_convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *,
    activation: Literal['silu'] | None = None, cu_seqlens: ArrayLike | None = None,
    initial_state: torch.Tensor | None = None, return_state: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def short_convolution_step(
    x: torch.Tensor, weight: torch.Tensor, state: torch.Tensor, bias: torch.Tensor | None = None, *,
    activation: Literal['silu'] | None = None, state_indices: ArrayLike | None = None,
) -> torch.Tensor: ...
def chunk_local_cumsum(
    g: torch.Tensor, chunk_size: int, reverse: bool = False, softmax_scale: float | None = None,
    cu_seqlens: ArrayLike | None = None, head_first: bool = False, output_dtype: torch.dtype | None = None,
) -> torch.Tensor: ...
def chunk_local_cumsum_scalar(
    g: torch.Tensor, chunk_size: int, reverse: bool = False, softmax_scale: float | None = None,
    head_first: bool = False, output_dtype: torch.dtype | None = None, *, cu_seqlens: ArrayLike | None = None,
) -> torch.Tensor: ...
def chunk_local_cumsum_vector(
    g: torch.Tensor, chunk_size: int, reverse: bool = False, softmax_scale: float | None = None,
    head_first: bool = False, output_dtype: torch.dtype | None = None, *, cu_seqlens: ArrayLike | None = None,
) -> torch.Tensor: ...
def chunk_global_cumsum(
    s: torch.Tensor, reverse: bool = False, cu_seqlens: ArrayLike | None = None,
    softmax_scale: float | None = None, head_first: bool = False, output_dtype: torch.dtype | None = None,
) -> torch.Tensor: ...
def chunk_global_cumsum_scalar(
    s: torch.Tensor, reverse: bool = False, cu_seqlens: ArrayLike | None = None,
    softmax_scale: float | None = None, head_first: bool = False, output_dtype: torch.dtype | None = None,
) -> torch.Tensor: ...
def chunk_global_cumsum_vector(
    s: torch.Tensor, reverse: bool = False, cu_seqlens: ArrayLike | None = None,
    softmax_scale: float | None = None, head_first: bool = False, output_dtype: torch.dtype | None = None,
) -> torch.Tensor: ...
