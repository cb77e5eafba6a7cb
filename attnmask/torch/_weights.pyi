"""Written by .ci/make_signatures.py."""
# fmt: off

from collections.abc import Sequence
from typing import Literal

import torch
from numpy.typing import ArrayLike

from attnmask._attention.arguments import Diagonal
from attnmask._attention.weights import AttentionStatistics, Queries, Statistic
from attnmask._masks.info import MaskInfo
from attnmask.torch._states import MaskTensors

def attention_weights(
    query: torch.Tensor, key: torch.Tensor, attention_mask: ArrayLike | MaskInfo | MaskTensors | None = None,
    *, queries: Queries | None = None, bias: ArrayLike | None = None, softmax_scale: float | None = None,
    causal: bool = False, cum_seqlens_q: ArrayLike | None = None, cum_seqlens_k: ArrayLike | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None, logits_soft_cap: float | None = None,
    softmax_aux: ArrayLike | None = None, q_segment_ids: ArrayLike | None = None,
    kv_segment_ids: ArrayLike | None = None, causal_offset: Diagonal = 0,
    alibi_slopes: ArrayLike | None = None, relative_bias: ArrayLike | None = None, relative_low: int = 0,
    grid_bias: ArrayLike | None = None,
) -> torch.Tensor: ...
def attention_statistics(
    query: torch.Tensor, key: torch.Tensor, attention_mask: ArrayLike | MaskInfo | MaskTensors | None = None,
    *, of: Statistic | Sequence[Statistic], queries: Queries | None = None,
    heads: Literal['query', 'key'] = 'query', lse: ArrayLike | None = None, bias: ArrayLike | None = None,
    softmax_scale: float | None = None, causal: bool = False, cum_seqlens_q: ArrayLike | None = None,
    cum_seqlens_k: ArrayLike | None = None, sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None, softmax_aux: ArrayLike | None = None,
    q_segment_ids: ArrayLike | None = None, kv_segment_ids: ArrayLike | None = None,
    causal_offset: Diagonal = 0, alibi_slopes: ArrayLike | None = None,
    relative_bias: ArrayLike | None = None, relative_low: int = 0, grid_bias: ArrayLike | None = None,
) -> AttentionStatistics: ...
def attention_statistics_with_kvcache(
    query: torch.Tensor, k_cache: torch.Tensor, *, of: Statistic | Sequence[Statistic],
    heads: Literal['query', 'key'] = 'query', lse: ArrayLike | None = None,
    cache_seqlens: ArrayLike | None = None, block_table: ArrayLike | None = None,
    cu_seqlens_q: ArrayLike | None = None, k_scale: ArrayLike | None = None,
    attention_mask: ArrayLike | MaskInfo | MaskTensors | None = None, softmax_scale: float | None = None,
    causal: bool = True, sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None, softmax_aux: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None, relative_bias: ArrayLike | None = None, relative_low: int = 0,
    grid_bias: ArrayLike | None = None, bias: ArrayLike | None = None, attention_chunk: int | None = None,
    rotate: bool = False,
) -> AttentionStatistics: ...
