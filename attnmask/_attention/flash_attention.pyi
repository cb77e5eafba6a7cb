"""Written by .ci/make_signatures.py."""
# fmt: off

from collections.abc import Sequence
from typing import Literal, SupportsIndex, overload

from numpy.typing import ArrayLike, DTypeLike

from attnmask._attention.arguments import Diagonal
from attnmask._attention.backward import Vjp
from attnmask._attention.hints import BwdParams, FwdParams, Precision
from attnmask._attention.problem import FlashAttentionGrads, FlashAttentionSecondGrads
from attnmask._attention.weights import AttentionStatistics, Queries, Statistic
from attnmask._common.types import Array
from attnmask._masks.info import MaskInfo

@overload
def flash_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, attention_mask: ArrayLike | MaskInfo | None = None,
    bias: ArrayLike | None = None, softmax_scale: float | None = None, dropout_prob: float = 0.0,
    causal: bool = False, dropout_seed: SupportsIndex | None = None, cum_seqlens_q: ArrayLike | None = None,
    cum_seqlens_k: ArrayLike | None = None, sliding_window: int | tuple[int | None, int | None] | None = None,
    fwd_params: FwdParams | None = None, bwd_params: BwdParams | None = None,
    logits_soft_cap: float | None = None, softmax_aux: ArrayLike | None = None, normalize_output: bool = True,
    precision: Precision | None = None, logits_dtype: DTypeLike | None = None, *,
    q_segment_ids: ArrayLike | None = None, kv_segment_ids: ArrayLike | None = None,
    causal_offset: Diagonal = 0, alibi_slopes: ArrayLike | None = None,
    relative_bias: ArrayLike | None = None, relative_low: int = 0, grid_bias: ArrayLike | None = None,
    return_lse: Literal[False] = False, out: Array | None = None,
) -> Array: ...
@overload
def flash_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, attention_mask: ArrayLike | MaskInfo | None = None,
    bias: ArrayLike | None = None, softmax_scale: float | None = None, dropout_prob: float = 0.0,
    causal: bool = False, dropout_seed: SupportsIndex | None = None, cum_seqlens_q: ArrayLike | None = None,
    cum_seqlens_k: ArrayLike | None = None, sliding_window: int | tuple[int | None, int | None] | None = None,
    fwd_params: FwdParams | None = None, bwd_params: BwdParams | None = None,
    logits_soft_cap: float | None = None, softmax_aux: ArrayLike | None = None, normalize_output: bool = True,
    precision: Precision | None = None, logits_dtype: DTypeLike | None = None, *,
    q_segment_ids: ArrayLike | None = None, kv_segment_ids: ArrayLike | None = None,
    causal_offset: Diagonal = 0, alibi_slopes: ArrayLike | None = None,
    relative_bias: ArrayLike | None = None, relative_low: int = 0, grid_bias: ArrayLike | None = None,
    return_lse: Literal[True], out: Array | None = None,
) -> tuple[Array, Array]: ...
@overload
def flash_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, attention_mask: ArrayLike | MaskInfo | None = None,
    bias: ArrayLike | None = None, softmax_scale: float | None = None, dropout_prob: float = 0.0,
    causal: bool = False, dropout_seed: SupportsIndex | None = None, cum_seqlens_q: ArrayLike | None = None,
    cum_seqlens_k: ArrayLike | None = None, sliding_window: int | tuple[int | None, int | None] | None = None,
    fwd_params: FwdParams | None = None, bwd_params: BwdParams | None = None,
    logits_soft_cap: float | None = None, softmax_aux: ArrayLike | None = None, normalize_output: bool = True,
    precision: Precision | None = None, logits_dtype: DTypeLike | None = None, *,
    q_segment_ids: ArrayLike | None = None, kv_segment_ids: ArrayLike | None = None,
    causal_offset: Diagonal = 0, alibi_slopes: ArrayLike | None = None,
    relative_bias: ArrayLike | None = None, relative_low: int = 0, grid_bias: ArrayLike | None = None,
    return_lse: bool = False, out: Array | None = None,
) -> Array | tuple[Array, Array]: ...
def flash_attention_fwd(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, attention_mask: ArrayLike | MaskInfo | None = None,
    bias: ArrayLike | None = None, softmax_scale: float | None = None, dropout_prob: float = 0.0,
    causal: bool = False, dropout_seed: SupportsIndex | None = None, cum_seqlens_q: ArrayLike | None = None,
    cum_seqlens_k: ArrayLike | None = None, sliding_window: int | tuple[int | None, int | None] | None = None,
    fwd_params: FwdParams | None = None, bwd_params: BwdParams | None = None,
    logits_soft_cap: float | None = None, softmax_aux: ArrayLike | None = None, normalize_output: bool = True,
    precision: Precision | None = None, logits_dtype: DTypeLike | None = None, *,
    q_segment_ids: ArrayLike | None = None, kv_segment_ids: ArrayLike | None = None,
    causal_offset: Diagonal = 0, alibi_slopes: ArrayLike | None = None,
    relative_bias: ArrayLike | None = None, relative_low: int = 0, grid_bias: ArrayLike | None = None,
    out: Array | None = None,
) -> tuple[Array, Array]: ...
@overload
def flash_attention_vjp(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, attention_mask: ArrayLike | MaskInfo | None = None,
    bias: ArrayLike | None = None, softmax_scale: float | None = None, dropout_prob: float = 0.0,
    causal: bool = False, dropout_seed: SupportsIndex | None = None, cum_seqlens_q: ArrayLike | None = None,
    cum_seqlens_k: ArrayLike | None = None, sliding_window: int | tuple[int | None, int | None] | None = None,
    fwd_params: FwdParams | None = None, bwd_params: BwdParams | None = None,
    logits_soft_cap: float | None = None, softmax_aux: ArrayLike | None = None, normalize_output: bool = True,
    precision: Precision | None = None, logits_dtype: DTypeLike | None = None, *,
    q_segment_ids: ArrayLike | None = None, kv_segment_ids: ArrayLike | None = None,
    causal_offset: Diagonal = 0, alibi_slopes: ArrayLike | None = None,
    relative_bias: ArrayLike | None = None, relative_low: int = 0, grid_bias: ArrayLike | None = None,
    return_lse: Literal[False] = False, grad_bias: bool = False, grad_softmax_aux: bool = False,
    grad_relative_bias: bool = False, grad_grid_bias: bool = False,
) -> tuple[Array, Vjp]: ...
@overload
def flash_attention_vjp(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, attention_mask: ArrayLike | MaskInfo | None = None,
    bias: ArrayLike | None = None, softmax_scale: float | None = None, dropout_prob: float = 0.0,
    causal: bool = False, dropout_seed: SupportsIndex | None = None, cum_seqlens_q: ArrayLike | None = None,
    cum_seqlens_k: ArrayLike | None = None, sliding_window: int | tuple[int | None, int | None] | None = None,
    fwd_params: FwdParams | None = None, bwd_params: BwdParams | None = None,
    logits_soft_cap: float | None = None, softmax_aux: ArrayLike | None = None, normalize_output: bool = True,
    precision: Precision | None = None, logits_dtype: DTypeLike | None = None, *,
    q_segment_ids: ArrayLike | None = None, kv_segment_ids: ArrayLike | None = None,
    causal_offset: Diagonal = 0, alibi_slopes: ArrayLike | None = None,
    relative_bias: ArrayLike | None = None, relative_low: int = 0, grid_bias: ArrayLike | None = None,
    return_lse: Literal[True], grad_bias: bool = False, grad_softmax_aux: bool = False,
    grad_relative_bias: bool = False, grad_grid_bias: bool = False,
) -> tuple[tuple[Array, Array], Vjp]: ...
@overload
def flash_attention_vjp(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, attention_mask: ArrayLike | MaskInfo | None = None,
    bias: ArrayLike | None = None, softmax_scale: float | None = None, dropout_prob: float = 0.0,
    causal: bool = False, dropout_seed: SupportsIndex | None = None, cum_seqlens_q: ArrayLike | None = None,
    cum_seqlens_k: ArrayLike | None = None, sliding_window: int | tuple[int | None, int | None] | None = None,
    fwd_params: FwdParams | None = None, bwd_params: BwdParams | None = None,
    logits_soft_cap: float | None = None, softmax_aux: ArrayLike | None = None, normalize_output: bool = True,
    precision: Precision | None = None, logits_dtype: DTypeLike | None = None, *,
    q_segment_ids: ArrayLike | None = None, kv_segment_ids: ArrayLike | None = None,
    causal_offset: Diagonal = 0, alibi_slopes: ArrayLike | None = None,
    relative_bias: ArrayLike | None = None, relative_low: int = 0, grid_bias: ArrayLike | None = None,
    return_lse: bool = False, grad_bias: bool = False, grad_softmax_aux: bool = False,
    grad_relative_bias: bool = False, grad_grid_bias: bool = False,
) -> tuple[Array | tuple[Array, Array], Vjp]: ...
def flash_attention_bwd(
    dout: ArrayLike, query: ArrayLike, key: ArrayLike, value: ArrayLike, out: ArrayLike, lse: ArrayLike,
    attention_mask: ArrayLike | MaskInfo | None = None, bias: ArrayLike | None = None,
    softmax_scale: float | None = None, dropout_prob: float = 0.0, causal: bool = False,
    dropout_seed: SupportsIndex | None = None, cum_seqlens_q: ArrayLike | None = None,
    cum_seqlens_k: ArrayLike | None = None, sliding_window: int | tuple[int | None, int | None] | None = None,
    fwd_params: FwdParams | None = None, bwd_params: BwdParams | None = None,
    logits_soft_cap: float | None = None, softmax_aux: ArrayLike | None = None, normalize_output: bool = True,
    precision: Precision | None = None, logits_dtype: DTypeLike | None = None, *,
    q_segment_ids: ArrayLike | None = None, kv_segment_ids: ArrayLike | None = None,
    causal_offset: Diagonal = 0, alibi_slopes: ArrayLike | None = None,
    relative_bias: ArrayLike | None = None, relative_low: int = 0, grid_bias: ArrayLike | None = None,
    grad_bias: bool = False, grad_softmax_aux: bool = False, grad_relative_bias: bool = False,
    grad_grid_bias: bool = False, dlse: ArrayLike | None = None,
) -> FlashAttentionGrads: ...
@overload
def flash_attention_jvp(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, query_tangent: ArrayLike | None = None,
    key_tangent: ArrayLike | None = None, value_tangent: ArrayLike | None = None,
    attention_mask: ArrayLike | MaskInfo | None = None, bias: ArrayLike | None = None,
    softmax_scale: float | None = None, dropout_prob: float = 0.0, causal: bool = False,
    dropout_seed: SupportsIndex | None = None, cum_seqlens_q: ArrayLike | None = None,
    cum_seqlens_k: ArrayLike | None = None, sliding_window: int | tuple[int | None, int | None] | None = None,
    fwd_params: FwdParams | None = None, bwd_params: BwdParams | None = None,
    logits_soft_cap: float | None = None, softmax_aux: ArrayLike | None = None, normalize_output: bool = True,
    precision: Precision | None = None, logits_dtype: DTypeLike | None = None, *,
    q_segment_ids: ArrayLike | None = None, kv_segment_ids: ArrayLike | None = None,
    causal_offset: Diagonal = 0, alibi_slopes: ArrayLike | None = None,
    relative_bias: ArrayLike | None = None, relative_low: int = 0, grid_bias: ArrayLike | None = None,
    return_lse: Literal[False] = False, bias_tangent: ArrayLike | None = None,
    softmax_aux_tangent: ArrayLike | None = None,
) -> tuple[Array, Array]: ...
@overload
def flash_attention_jvp(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, query_tangent: ArrayLike | None = None,
    key_tangent: ArrayLike | None = None, value_tangent: ArrayLike | None = None,
    attention_mask: ArrayLike | MaskInfo | None = None, bias: ArrayLike | None = None,
    softmax_scale: float | None = None, dropout_prob: float = 0.0, causal: bool = False,
    dropout_seed: SupportsIndex | None = None, cum_seqlens_q: ArrayLike | None = None,
    cum_seqlens_k: ArrayLike | None = None, sliding_window: int | tuple[int | None, int | None] | None = None,
    fwd_params: FwdParams | None = None, bwd_params: BwdParams | None = None,
    logits_soft_cap: float | None = None, softmax_aux: ArrayLike | None = None, normalize_output: bool = True,
    precision: Precision | None = None, logits_dtype: DTypeLike | None = None, *,
    q_segment_ids: ArrayLike | None = None, kv_segment_ids: ArrayLike | None = None,
    causal_offset: Diagonal = 0, alibi_slopes: ArrayLike | None = None,
    relative_bias: ArrayLike | None = None, relative_low: int = 0, grid_bias: ArrayLike | None = None,
    return_lse: Literal[True], bias_tangent: ArrayLike | None = None,
    softmax_aux_tangent: ArrayLike | None = None,
) -> tuple[tuple[Array, Array], tuple[Array, Array]]: ...
@overload
def flash_attention_jvp(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, query_tangent: ArrayLike | None = None,
    key_tangent: ArrayLike | None = None, value_tangent: ArrayLike | None = None,
    attention_mask: ArrayLike | MaskInfo | None = None, bias: ArrayLike | None = None,
    softmax_scale: float | None = None, dropout_prob: float = 0.0, causal: bool = False,
    dropout_seed: SupportsIndex | None = None, cum_seqlens_q: ArrayLike | None = None,
    cum_seqlens_k: ArrayLike | None = None, sliding_window: int | tuple[int | None, int | None] | None = None,
    fwd_params: FwdParams | None = None, bwd_params: BwdParams | None = None,
    logits_soft_cap: float | None = None, softmax_aux: ArrayLike | None = None, normalize_output: bool = True,
    precision: Precision | None = None, logits_dtype: DTypeLike | None = None, *,
    q_segment_ids: ArrayLike | None = None, kv_segment_ids: ArrayLike | None = None,
    causal_offset: Diagonal = 0, alibi_slopes: ArrayLike | None = None,
    relative_bias: ArrayLike | None = None, relative_low: int = 0, grid_bias: ArrayLike | None = None,
    return_lse: bool = False, bias_tangent: ArrayLike | None = None,
    softmax_aux_tangent: ArrayLike | None = None,
) -> tuple[Array | tuple[Array, Array], Array | tuple[Array, Array]]: ...
def flash_attention_bwd_vjp(
    dout: ArrayLike, query: ArrayLike, key: ArrayLike, value: ArrayLike, out: ArrayLike, lse: ArrayLike,
    query_cotangent: ArrayLike | None = None, key_cotangent: ArrayLike | None = None,
    value_cotangent: ArrayLike | None = None, attention_mask: ArrayLike | MaskInfo | None = None,
    bias: ArrayLike | None = None, softmax_scale: float | None = None, dropout_prob: float = 0.0,
    causal: bool = False, dropout_seed: SupportsIndex | None = None, cum_seqlens_q: ArrayLike | None = None,
    cum_seqlens_k: ArrayLike | None = None, sliding_window: int | tuple[int | None, int | None] | None = None,
    fwd_params: FwdParams | None = None, bwd_params: BwdParams | None = None,
    logits_soft_cap: float | None = None, softmax_aux: ArrayLike | None = None, normalize_output: bool = True,
    precision: Precision | None = None, logits_dtype: DTypeLike | None = None, *,
    q_segment_ids: ArrayLike | None = None, kv_segment_ids: ArrayLike | None = None,
    causal_offset: Diagonal = 0, alibi_slopes: ArrayLike | None = None,
    relative_bias: ArrayLike | None = None, relative_low: int = 0, grid_bias: ArrayLike | None = None,
    dlse: ArrayLike | None = None,
) -> FlashAttentionSecondGrads: ...
def attention_weights(
    query: ArrayLike, key: ArrayLike, attention_mask: ArrayLike | MaskInfo | None = None, *,
    queries: Queries = None, bias: ArrayLike | None = None, softmax_scale: float | None = None,
    causal: bool = False, cum_seqlens_q: ArrayLike | None = None, cum_seqlens_k: ArrayLike | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None, logits_soft_cap: float | None = None,
    softmax_aux: ArrayLike | None = None, q_segment_ids: ArrayLike | None = None,
    kv_segment_ids: ArrayLike | None = None, causal_offset: Diagonal = 0,
    alibi_slopes: ArrayLike | None = None, relative_bias: ArrayLike | None = None, relative_low: int = 0,
    grid_bias: ArrayLike | None = None,
) -> Array: ...
def attention_statistics(
    query: ArrayLike, key: ArrayLike, attention_mask: ArrayLike | MaskInfo | None = None, *,
    of: Statistic | Sequence[Statistic], queries: Queries = None, heads: Literal["query", "key"] = 'query',
    lse: ArrayLike | None = None, bias: ArrayLike | None = None, softmax_scale: float | None = None,
    causal: bool = False, cum_seqlens_q: ArrayLike | None = None, cum_seqlens_k: ArrayLike | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None, logits_soft_cap: float | None = None,
    softmax_aux: ArrayLike | None = None, q_segment_ids: ArrayLike | None = None,
    kv_segment_ids: ArrayLike | None = None, causal_offset: Diagonal = 0,
    alibi_slopes: ArrayLike | None = None, relative_bias: ArrayLike | None = None, relative_low: int = 0,
    grid_bias: ArrayLike | None = None,
) -> AttentionStatistics: ...
