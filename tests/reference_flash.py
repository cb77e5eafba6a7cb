"""Flash attention in NumPy, beside `reference`: written to be read, not to be fast.

One head at a time, all of its logits at once, in float64 unless a dtype is asked for. In float32 the same lines are
the naive attention whose error the package is measured by.
"""

from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
from reference_masks import pairwise as equal_ids


class Attention(NamedTuple):
    """What attention gives, and how large the numbers were on the way: rounding errors are a share of these."""

    out: np.ndarray  # like the query, but Dv last
    lse: np.ndarray  # [B, H, Tq], or [H, total]
    out_size: np.ndarray  # like out: the same sum, of the values' sizes
    logit_size: np.ndarray  # like lse: the largest Σ|q·k| × |scale| + |bias| of a live pair


def flash_attention(
    query,
    key,
    value,
    attention_mask=None,
    bias=None,
    softmax_scale=None,
    dropout_prob=0.0,
    causal=False,
    dropout_seed=None,
    cum_seqlens_q=None,
    cum_seqlens_k=None,
    sliding_window=None,
    fwd_params=None,
    bwd_params=None,
    logits_soft_cap=None,
    softmax_aux=None,
    normalize_output=True,
    precision=None,
    logits_dtype=None,
    *,
    q_segment_ids=None,
    kv_segment_ids=None,
    causal_offset=0,
    keep=None,
    dtype=np.float64,
) -> Attention:
    """`keep` is the mask of dropout, [B, H, Tq, Tk]; seeds and hints are of no meaning here."""
    query, key, value = (np.asarray(array).astype(dtype) for array in (query, key, value))
    flat = query.ndim == 3
    if flat:
        query, key, value = query[None], key[None], value[None]
    batch, queries, heads, depth = query.shape
    keys, group, value_depth = key.shape[1], heads // max(key.shape[2], 1), value.shape[3]
    pairs = batch, heads, queries, keys

    live = live_pairs(
        pairs, attention_mask, bias, causal, cum_seqlens_q, cum_seqlens_k, sliding_window,
        q_segment_ids, kv_segment_ids, causal_offset,
    )  # fmt: skip
    bias = np.broadcast_to(np.asarray(0 if bias is None else bias).astype(dtype), pairs)
    sinks = np.zeros((heads, 0)) if softmax_aux is None else np.atleast_2d(np.asarray(softmax_aux))
    sinks = np.broadcast_to(sinks.astype(dtype), (heads, sinks.shape[1]))
    scale = dtype(depth**-0.5 if softmax_scale is None else softmax_scale)
    keep = np.broadcast_to(True if keep is None else keep, pairs)

    result = Attention(
        np.zeros((batch, queries, heads, value_depth), dtype),
        np.zeros((batch, heads, queries), dtype),
        np.zeros((batch, queries, heads, value_depth), dtype),
        np.zeros((batch, heads, queries), dtype),
    )
    for b, h in product(range(batch), range(heads)):
        q, k, v = query[b, :, h], key[b, :, h // group], value[b, :, h // group]
        with np.errstate(all="ignore"):
            logits = (q @ k.T) * scale + bias[b, h]
            sizes = (abs(q) @ abs(k).T) * abs(scale) + abs(bias[b, h])
            if logits_soft_cap is not None:
                logits = dtype(logits_soft_cap) * np.tanh(logits / dtype(logits_soft_cap))
            logits = np.where(live[b, h], logits, dtype(-np.inf))

            top = np.max(logits, axis=1, initial=np.max(sinks[h], initial=-np.inf), keepdims=True)
            top = np.where(top == -np.inf, dtype(0), top)
            weights = np.exp(logits - top)
            total = weights.sum(axis=1, keepdims=True) + np.exp(sinks[h] - top).sum(axis=1, keepdims=True)
            lse = top + np.log(total)

            if normalize_output:
                weights = weights / np.where(total == 0, dtype(1), total)
            if dropout_prob:
                weights = np.where(keep[b, h], weights * dtype(1 / (1 - dropout_prob)), dtype(0))
            result.out[b, :, h] = weighted_sums(weights, v, live[b, h])
            result.out_size[b, :, h] = weighted_sums(weights, abs(v), live[b, h])
        result.lse[b, h] = lse[:, 0]
        result.logit_size[b, h] = np.max(np.where(live[b, h], sizes, dtype(0)), axis=1, initial=0)
    return Attention(*(array[0] for array in result)) if flat else result


def weighted_sums(weights, values, live) -> np.ndarray:
    """weights @ values, without the values that a row has no live pair with: 0 × NaN is NaN."""
    if np.isfinite(values).all():
        return weights @ values
    rows = [row[pairs] @ values[pairs] for row, pairs in zip(weights, live, strict=True)]
    return np.array(rows, values.dtype).reshape(len(weights), values.shape[1])


def live_pairs(
    shape,
    attention_mask=None,
    bias=None,
    causal=False,
    cum_seqlens_q=None,
    cum_seqlens_k=None,
    sliding_window=None,
    q_segment_ids=None,
    kv_segment_ids=None,
    causal_offset=0,
) -> np.ndarray:
    """[B, H, Tq, Tk]: the pairs that every condition allows."""
    batch, _, queries, keys = shape
    live = np.ones(shape, bool)
    if attention_mask is not None:
        live &= np.asarray(getattr(attention_mask, "attention_mask", attention_mask)) != 0
    if bias is not None:
        live &= np.asarray(bias) != -np.inf
    if q_segment_ids is not None:
        live &= equal_ids(q_segment_ids, kv_segment_ids)[:, None]

    near = np.zeros((batch, 1, queries, keys), bool)
    packed = cum_seqlens_q is not None
    sequences = [((0, queries), (0, keys))]
    if packed:
        ends = np.asarray(cum_seqlens_q).tolist(), np.asarray(cum_seqlens_k).tolist()
        sequences = list(zip(pairwise(ends[0]), pairwise(ends[1]), strict=True))
    for row, (index, ((q_start, q_end), (k_start, k_end))) in product(range(batch), enumerate(sequences)):
        lengths = q_end - q_start, k_end - k_start
        offset = offset_of(causal_offset, index if packed else row, *lengths)
        ahead = np.arange(lengths[1])[None, :] - np.arange(lengths[0])[:, None]
        allowed = np.ones(ahead.shape, bool)
        if causal:
            allowed &= ahead <= offset  # a Python integer, which nothing wraps
        if sliding_window is not None:
            left, right = (sliding_window, sliding_window) if np.ndim(sliding_window) == 0 else sliding_window
            allowed &= (offset - int(left) <= ahead) & (ahead <= offset + int(right))
        near[row, 0, q_start:q_end, k_start:k_end] = allowed
    return live & near


def offset_of(causal_offset, index: int, queries: int, keys: int) -> int:
    if isinstance(causal_offset, str):
        assert causal_offset == "bottom-right"
        return keys - queries
    return int(causal_offset if np.ndim(causal_offset) == 0 else causal_offset[index])


def merge_attention_states(outs, lses) -> tuple[np.ndarray, np.ndarray]:
    """Each part counts by its share of the sum of exponentials: out [B, Tq, H, Dv], lse [B, H, Tq]."""
    outs, lses = np.asarray(outs, np.float64), np.asarray(lses, np.float64)
    top = np.max(lses, axis=0, initial=-np.inf)
    shares = np.exp(lses - np.where(top == -np.inf, 0, top))
    total = shares.sum(axis=0)
    shares = np.moveaxis(shares / np.where(total == 0, 1, total), -1, -2)[..., None]
    with np.errstate(divide="ignore"):
        return (shares * outs).sum(axis=0), np.where(top == -np.inf, 0, top) + np.log(total)
