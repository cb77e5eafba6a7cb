"""Append new tokens to a KV cache and attend to it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnmask._attention.problem import (
    cap_of,
    distances,
    mask_nodes,
    numbers_of,
    scale_of,
    sinks_of,
    slopes_of,
)
from attnmask._common.arguments import as_array, flag, integer_array, per_row, suit_hint
from attnmask._common.graphs import left_to_python
from attnmask._common.loading import _core
from attnmask._masks.info import MaskInfo
from attnmask._masks.program import Program
from attnmask._masks.terms import dense

__all__ = ["flash_attention_with_kvcache"]


def flash_attention_with_kvcache(
    query: ArrayLike,
    k_cache: NDArray[Any],
    v_cache: NDArray[Any],
    key: ArrayLike | None = None,
    value: ArrayLike | None = None,
    *,
    cache_seqlens: ArrayLike | None = None,
    block_table: ArrayLike | None = None,
    cu_seqlens_q: ArrayLike | None = None,
    k_scale: NDArray[np.float32] | None = None,
    v_scale: NDArray[np.float32] | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    softmax_aux: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    attention_mask: ArrayLike | MaskInfo | None = None,
    return_lse: bool = False,
    out: NDArray[Any] | None = None,
) -> Any:
    """Append keys and values to a cache, and attend to it with the last tokens of each sequence.

    ::

        a contiguous cache                    pages of 4 tokens, block_table [[2, 0], [1, ...]]

        row 0  k k k k k k . .                page 0  k k . .     the end of sequence 0
        row 1  k k k . . . . .                page 1  k k k .     sequence 1
                                              page 2  k k k k     the start of sequence 0

    New keys and values are appended first. Then the queries, which are the last tokens of their sequences, attend to
    everything: query ``i`` of ``Tq`` is token ``length - Tq + i``, and `causal` and the window count from there.
    Sequences may have any lengths. Anything after the end of a sequence, or in pages that none of its queries sees, has
    no influence and is not read.

    Parameters
    ----------
    query : array_like, shape [B, Tq, H, D], or [total, H, D] with `cu_seqlens_q`
    k_cache : ndarray, shape [B, Tmax, Hkv, D], or [pages, page_size, Hkv, D] with `block_table`
        float16, bfloat16, float32, float64, int8, ``ml_dtypes.float8_e4m3fn`` or ``ml_dtypes.float8_e5m2``, with any
        strides. Queries may have another type, but float64 goes only with float64.
    v_cache : ndarray, shape [B, Tmax, Hkv, Dv], or [pages, page_size, Hkv, Dv]
        Same type as `k_cache`.
    key : array_like, shape [B, Tnew, Hkv, D], or [total, Hkv, D], optional
        Written to `k_cache` in place, in its type. Nothing is written if any argument is wrong. With new tokens, no two
        elements of the caches and scales may share memory, nor may they share it with anything that is read.
    value : array_like, shape [B, Tnew, Hkv, Dv], or [total, Hkv, Dv], optional
    cache_seqlens : int or array_like of integers, shape [B], optional
        The number of cached tokens before the call. Defaults to all of a contiguous cache.
    block_table : array_like of integers, shape [B, max_pages], optional
        The pages of each sequence, in order. Entries after its last token are ignored.
    k_scale, v_scale : ndarray of float32, optional
        Both are required for 8-bit caches, whose numbers they multiply: one per token and head, of shape ``[B, Tmax,
        Hkv, 1]`` or ``[pages, page_size, Hkv, 1]``, or one per head and channel, ``[1, 1, Hkv, D]``. The scales of new
        tokens are written in the first case; in the second, new tokens are quantized with the given scales.
    cu_seqlens_q : array_like of integers, shape [B + 1], optional
        Where the queries of each sequence start, and its new keys and values: some sequences may have one token, others
        many.
    softmax_scale : float, optional
        Defaults to ``1 / sqrt(D)``.
    causal : bool
    sliding_window : int or tuple of two, optional
        The number of keys to the left and to the right of a token's own position, or to either side; None means all.
    logits_soft_cap, softmax_aux
        As in `flash_attention`.
    alibi_slopes : array_like, shape [H] or [B, H], optional
        As in `flash_attention`.
    attention_mask : array_like or MaskInfo, broadcasts to [B, H, Tq, Tk], optional
        Its keys are positions in the sequence; there may be more of them than tokens. With `cu_seqlens_q`, it must have
        one batch row and one query per packed token.
    return_lse : bool
        Also return the logsumexp of each row.
    out : ndarray, shape [B, Tq, H, Dv] or [total, H, Dv], optional
        Write the result here, and return it.

    Returns
    -------
    out : ndarray, shape [B, Tq, H, Dv] or [total, H, Dv]
        Same type as the query. A sequence gets the same bits whether its cache is contiguous or paged, and whatever
        else is in the call.
    lse : ndarray, shape [B, H, Tq] or [H, total]
        Only with `return_lse`.

    See Also
    --------
    flash_attention : attend without a cache.
    merge_attention_states : merge attention over parts of the keys, such as a prefix that sequences share.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> k_cache, v_cache = np.zeros((3, 4, 1, 8)), np.full((3, 4, 1, 1), np.nan)  # three pages of four tokens
    >>> table = np.array([[2, 0], [1, 99]])  # of two sequences
    >>> key, value = np.zeros((2, 3, 1, 8)), np.arange(6.0).reshape(2, 3, 1, 1)
    >>> cache = {"k_cache": k_cache, "v_cache": v_cache, "block_table": table}
    >>> out = attnmask.flash_attention_with_kvcache(key, **cache, key=key, value=value, cache_seqlens=0)
    >>> out.reshape(2, 3)  # all weights are the same
    array([[0. , 0.5, 1. ],
           [3. , 3.5, 4. ]])
    >>> last = attnmask.flash_attention_with_kvcache(key[:, :1], **cache, cache_seqlens=[3, 3])
    >>> last.ravel()
    array([1., 4.])
    """
    try:
        return _core.flash_kvcache(
            query,
            k_cache,
            v_cache,
            key,
            value,
            cache_seqlens,
            block_table,
            cu_seqlens_q,
            k_scale,
            v_scale,
            softmax_scale,
            causal,
            sliding_window,
            logits_soft_cap,
            softmax_aux,
            alibi_slopes,
            attention_mask,
            return_lse,
            out,
        )
    except (TypeError, ValueError) as error:
        suit_hint(error, locals())
        raise


left_to_python(
    flash_attention_with_kvcache, "call attnmask.torch.flash_attention_with_kvcache, which goes into graphs"
)


# The core is handed these functions, and asks them for what is seldom given, or has to be said in many words.


def table_of(block_table: NDArray[Any], given: Any) -> NDArray[Any]:
    """Return a table of int32 or int64. Entries after the pages of a sequence may be anything."""
    if block_table.size or isinstance(given, np.ndarray):
        block_table = integer_array(block_table, "block_table")
    if block_table.dtype in (np.int32, np.int64):
        return block_table
    most = min(np.iinfo(block_table.dtype).max, np.iinfo(np.int64).max)
    return block_table.clip(None, most).astype(np.int64)


def tokens_before(cache_seqlens: ArrayLike, batch: int) -> NDArray[np.int64]:
    """Return the number of cached tokens of each sequence."""
    given = per_row(cache_seqlens, "cache_seqlens", batch, 0, broadcast=False)
    return np.full(batch, given, np.int64) if isinstance(given, int) else given


def options(
    query: NDArray[Any],
    softmax_scale: Any,
    causal: Any,
    sliding_window: Any,
    logits_soft_cap: Any,
    softmax_aux: Any,
    alibi_slopes: Any,
    return_lse: Any,
    batch: int,
    heads: int,
    channels: int,
) -> tuple[Any, ...]:
    numbers = numbers_of(query.dtype)
    low, high = distances({"causal": causal, "sliding_window": sliding_window})
    return (
        scale_of(softmax_scale, channels, numbers),
        cap_of(logits_soft_cap, numbers),
        sinks_of(softmax_aux, heads, numbers),
        None if alibi_slopes is None else slopes_of(alibi_slopes, batch, heads, "B"),
        low,
        high,
        flag(return_lse, "return_lse"),
    )


def mask_program(attention_mask: Any, batch: int, heads: int, queries: int, keys: int) -> Program:
    """Return the mask's program; it may have more keys than there are."""
    return mask_nodes(cut(attention_mask, keys), (batch, heads, queries, keys))


def mask_programs(
    attention_mask: Any, sequences: list[tuple[int, int, int]], heads: int, queries: int, longest: int
) -> tuple[Program, list[Program]]:
    """Return the mask of all packed queries, and that of each sequence (first query, end, number of keys).

    Anything but a MaskInfo is read once, so that it cannot turn out wrong after new tokens were written.
    """
    mask = cut(attention_mask, longest)
    whole = mask_nodes(mask, (1, heads, queries, longest))
    programs: list[Program] = []  # in a loop: Python 3.11 loses references where a closure fits no memory
    for begin, end, keys in sequences:
        if isinstance(mask, MaskInfo):
            part = cut(mask[:, :, begin:end, :], keys)
            programs.append(mask_nodes(part, (1, heads, end - begin, keys)))
            continue
        (node,) = whole
        assert isinstance(node, tuple)
        array = node[1]
        programs.append((dense(array if array.shape[2] == 1 else array[:, :, begin:end]),))
    return whole, programs


def cut(mask: ArrayLike | MaskInfo, keys: int) -> ArrayLike | MaskInfo:
    """Return the mask of the first `keys` keys; it may have more."""
    if isinstance(mask, MaskInfo):
        return mask[..., :keys] if mask.kv_len is not None and mask.kv_len > keys else mask
    array = as_array(mask, "attention_mask")
    return array[..., :keys] if array.ndim and array.shape[-1] > max(keys, 1) else array
