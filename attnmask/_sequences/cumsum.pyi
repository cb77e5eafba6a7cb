"""Written by .ci/make_signatures.py."""
# fmt: off

from numpy.typing import ArrayLike, DTypeLike

from attnmask._common.types import Array
from attnmask._linear.grads import Vjp

def chunk_local_cumsum(
    g: ArrayLike, chunk_size: int, reverse: bool = False, softmax_scale: float | None = None,
    cu_seqlens: ArrayLike | None = None, head_first: bool = False, output_dtype: DTypeLike | None = None, *,
    out: Array | None = None,
) -> Array: ...
def chunk_local_cumsum_scalar(
    g: ArrayLike, chunk_size: int, reverse: bool = False, softmax_scale: float | None = None,
    head_first: bool = False, output_dtype: DTypeLike | None = None, *, cu_seqlens: ArrayLike | None = None,
    out: Array | None = None,
) -> Array: ...
def chunk_local_cumsum_vector(
    g: ArrayLike, chunk_size: int, reverse: bool = False, softmax_scale: float | None = None,
    head_first: bool = False, output_dtype: DTypeLike | None = None, *, cu_seqlens: ArrayLike | None = None,
    out: Array | None = None,
) -> Array: ...
def chunk_local_cumsum_vjp(
    g: ArrayLike, chunk_size: int, reverse: bool = False, softmax_scale: float | None = None,
    cu_seqlens: ArrayLike | None = None, head_first: bool = False, output_dtype: DTypeLike | None = None, *,
    out: Array | None = None,
) -> tuple[Array, Vjp[Array]]: ...
def chunk_global_cumsum(
    s: ArrayLike, reverse: bool = False, cu_seqlens: ArrayLike | None = None,
    softmax_scale: float | None = None, head_first: bool = False, output_dtype: DTypeLike | None = None, *,
    out: Array | None = None,
) -> Array: ...
def chunk_global_cumsum_scalar(
    s: ArrayLike, reverse: bool = False, cu_seqlens: ArrayLike | None = None,
    softmax_scale: float | None = None, head_first: bool = False, output_dtype: DTypeLike | None = None, *,
    out: Array | None = None,
) -> Array: ...
def chunk_global_cumsum_vector(
    s: ArrayLike, reverse: bool = False, cu_seqlens: ArrayLike | None = None,
    softmax_scale: float | None = None, head_first: bool = False, output_dtype: DTypeLike | None = None, *,
    out: Array | None = None,
) -> Array: ...
def chunk_global_cumsum_vjp(
    s: ArrayLike, reverse: bool = False, cu_seqlens: ArrayLike | None = None,
    softmax_scale: float | None = None, head_first: bool = False, output_dtype: DTypeLike | None = None, *,
    out: Array | None = None,
) -> tuple[Array, Vjp[Array]]: ...
