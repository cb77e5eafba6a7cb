"""Attention to a cache. Type checkers read its signature in the file beside this one, as for `flash_attention`."""

from collections.abc import Sequence  # noqa: F401 (of annotations, as the next ones)
from typing import Literal, SupportsIndex  # noqa: F401

import numpy as np  # noqa: F401
from numpy.typing import ArrayLike, NDArray  # noqa: F401

from attnmask._attention.arguments import (
    ATTENTION_STATISTICS_WITH_KVCACHE,
    FLASH_ATTENTION_WITH_KVCACHE,
    KVCACHE_DEFAULTS,
    KVCACHE_NAMES,
)
from attnmask._attention.backward import of_rows
from attnmask._attention.weights import AttentionStatistics, Statistic, asked  # noqa: F401
from attnmask._cache.quantize import check_not_latent, check_tokens_rotate, check_written, rotated
from attnmask._common.arguments import as_array, flag, suit_hint, wide_dtype
from attnmask._common.loading import _core
from attnmask._common.types import Array  # noqa: F401
from attnmask._masks.info import MaskInfo  # noqa: F401


@FLASH_ATTENTION_WITH_KVCACHE
def flash_attention_with_kvcache(*args, **given):
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
        float16, bfloat16, float32, float64, int8, ``ml_dtypes.float8_e4m3fn``, ``ml_dtypes.float8_e5m2``, or uint8 with
        two numbers of four bits in each, as `quantize_kv` packs them, of shape ``[..., D / 2]``. Any strides. Queries
        may have another type, but float64 goes only with float64.
    v_cache : ndarray, shape [B, Tmax, Hkv, Dv], or [pages, page_size, Hkv, Dv]
        Same type as `k_cache`. In a latent cache, a view of some channels of it, such as ``k_cache[..., :512]``.
    key : array_like, shape [B, Tnew, Hkv, D], or [total, Hkv, D] if packed, optional
        Written to `k_cache` in place, in its type. Nothing is written if any argument is wrong. With new tokens, no two
        elements of the caches and scales may share memory, nor may they share it with anything that is read.
    value : array_like, shape [B, Tnew, Hkv, Dv], or [total, Hkv, Dv] if packed, optional
        None in a latent cache, since `key` has the values.
    cache_seqlens : int or array_like of integers, shape [B], optional
        The number of cached tokens before the call. Defaults to all of a contiguous cache.
    block_table : array_like of integers, shape [B, max_pages], optional
        The pages of each sequence, in order. Entries after its last token are ignored.
    k_scale, v_scale : ndarray of float32, optional
        Both are required for 8-bit caches, whose numbers they multiply: one per token and head, of shape ``[B, Tmax,
        Hkv, 1]`` or ``[pages, page_size, Hkv, 1]``, or one per head and channel, ``[1, 1, Hkv, D]``. The scales of new
        tokens are written in the first case; in the second, new tokens are quantized with the given scales. In a latent
        cache, `k_scale` serves both, and `v_scale` is None. For uint8, scales and offsets of groups, float32 or
        float16, of shape ``[B, Tmax, Hkv, D / group, 2]`` or ``[pages, page_size, Hkv, D / group, 2]`` with a group of
        32, 64 or 128; those of new tokens are written.
    cu_seqlens_q : array_like of integers, shape [B + 1], optional
        Where the queries of each packed sequence start, and its new keys and values unless `cu_seqlens_k_new` is given.
        Some sequences may have one token, others many.
    cu_seqlens_k_new : array_like of integers, shape [B + 1], optional
        Where the new keys and values of each sequence start. They are then packed, whether or not the queries are, and
        their number may differ from that of the queries.
    softmax_scale : float, optional
        Defaults to ``1 / sqrt(D)``.
    causal : bool
        Hide keys that come after their query; True by default, unlike in `flash_attention`. The last query of a
        sequence sees all its tokens.
    sliding_window : int or tuple of two, optional
        The number of keys to the left and to the right of a token's own position, or to either side; None means all.
    attention_chunk : int, optional
        The number of tokens in a chunk, counted from the start of each sequence: queries see only keys of their own
        chunk, as in Llama 4. Pages of earlier chunks are not read.
    logits_soft_cap, softmax_aux
        As in `flash_attention`.
    alibi_slopes : array_like, shape [H] or [B, H], optional
        As in `flash_attention`.
    bias : array_like of floats, broadcasts to [B, H, Tq, Tk], optional
        Added to logits. Its keys are those of `attention_mask`, and so are its queries with `cu_seqlens_q`.
    relative_bias : array_like of floats, shape [H, L], optional
        As in `flash_attention`: a number for each distance from a query to a key, both counted from the start of their
        sequence. `t5_relative_bias` makes one.
    relative_low : int
        The distance that ``relative_bias[:, 0]`` applies to.
    grid_bias : array_like of floats, shape [H, 2h - 1, 2w - 1], optional
        As in `flash_attention`: tokens, counted from the start of their sequence, are the points of a grid.
    attention_mask : array_like or MaskInfo, broadcasts to [B, H, Tq, Tk], optional
        Its keys are positions in the sequence; there may be more of them than tokens. With `cu_seqlens_q`, it must have
        one batch row and one query per packed token.
    return_lse : bool
        Also return the logsumexp of each row.
    out : ndarray, shape [B, Tq, H, Dv] or [total, H, Dv], optional
        Write the result here, and return it.
    prefix : int
        The number of tokens, in whole pages, with which all sequences begin, in the same pages: keys and values of them
        are read once for all queries, as in `flash_attention`. The bits may differ from those without a prefix, but
        depend neither on the other sequences nor on their number. Windows, biases and masks do not go with it.
    rotate : bool
        Multiply queries, new keys, new values and the result by a normalized Hadamard matrix. Products stay the same,
        but outliers of a few channels are spread over all channels, so that quantizing costs less precision. All tokens
        in the cache must have been written with ``rotate=True``. D and Dv must be powers of two.

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
        rotate = given.pop("rotate", False)
        if rotate is not False and flag(rotate, "rotate"):
            whole = FLASH_ATTENTION_WITH_KVCACHE.bind(args, given)
            return _attend_rotated({name: whole[name] for name in KVCACHE_NAMES})
        return _core.flash_kvcache(KVCACHE_NAMES, KVCACHE_DEFAULTS, args, given)
    except (TypeError, ValueError) as error:
        whole = FLASH_ATTENTION_WITH_KVCACHE.bind(args, given)
        if given.keys() <= whole.keys():
            suit_hint(error, whole)
            raise
    return flash_attention_with_kvcache(**whole)  # some had names of another spelling


def _attend_rotated(given):
    """Attend with queries and new tokens rotated, and rotate the result. The core complains about what does not fit."""
    arrays = {
        name: as_array(given[name], name) for name in ("query", "key", "value") if given[name] is not None
    }
    k_cache, v_cache = (as_array(given[name], name) for name in ("k_cache", "v_cache"))
    check_not_latent(k_cache, v_cache)
    if "key" in arrays and "value" not in arrays:
        raise ValueError("value must be given with key and rotate=True, got None")
    check_tokens_rotate(arrays["query"], v_cache)
    check_written(given | arrays)
    turned = given | {name: rotated(x) for name, x in arrays.items()}
    result = _core.flash_kvcache(KVCACHE_NAMES, KVCACHE_DEFAULTS, (), turned)
    out = as_array(result[0] if isinstance(result, tuple) else result, "out")
    out[...] = rotated(out)
    return result


@ATTENTION_STATISTICS_WITH_KVCACHE
def attention_statistics_with_kvcache(*args, **given):
    """Return what the weights of attention to a cache tell. Only keys are read.

    Parameters
    ----------
    query, k_cache, cache_seqlens, block_table, cu_seqlens_q, k_scale, attention_mask, softmax_scale, ..., rotate
        As in `flash_attention_with_kvcache`. The queries are the last tokens of their sequences, whose keys must be in
        the cache already.
    of, heads, lse
        As in `attention_statistics`.

    Returns
    -------
    AttentionStatistics
        `key_sum` is [B, H, Tmax] or [B, Hkv, Tmax], where Tmax is the longest sequence; 0 behind the end of others. All
        else is [B, H, Tq] or, with `cu_seqlens_q`, [H, total], and `top_keys` have one axis more.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> query, k_cache = np.zeros((2, 1, 1, 8)), np.zeros((2, 4, 1, 8))  # all keys weigh the same
    >>> found = attnmask.attention_statistics_with_kvcache(query, k_cache, of="key_sum", cache_seqlens=[2, 4])
    >>> found.key_sum.tolist()
    [[[0.5, 0.5, 0.0, 0.0]], [[0.25, 0.25, 0.25, 0.25]]]
    """
    given = ATTENTION_STATISTICS_WITH_KVCACHE.bind(args, given)
    wanted = asked(given)
    query, k_cache = as_array(given["query"], "query"), as_array(given["k_cache"], "k_cache")
    if flag(given["rotate"], "rotate"):
        check_tokens_rotate(query, k_cache)
        query = rotated(query)
    packed, lse = given["cu_seqlens_q"] is not None, given["lse"]
    if lse is not None and query.ndim == (3 if packed else 4):
        *batch, queries, heads, _ = query.shape
        lse = of_rows(lse, "lse", (*batch, heads, queries), wide_dtype(query.dtype), (1,))
        lse = lse[None] if packed else lse
    call = {name: given[name] for name in KVCACHE_NAMES if name in given}
    call |= {"query": query, "k_cache": k_cache, "v_cache": k_cache[..., :0] if k_cache.ndim else k_cache}
    sums, *found = _core.kvcache_weights(KVCACHE_NAMES, KVCACHE_DEFAULTS, (), call, lse, *wanted)[1:]
    return AttentionStatistics(sums, *(x if x is None or not packed else x[0] for x in found))
