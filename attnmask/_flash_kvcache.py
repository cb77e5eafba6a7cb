"""Attention of new tokens over a cache of keys and values, to which it appends theirs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnmask import _core
from attnmask._arguments import allocate, as_array, describe, flag, integer_array, is_floating, per_row
from attnmask._flash_arguments import (
    Pages,
    Problem,
    Relative,
    cap_of,
    check_apart,
    distances,
    mask_nodes,
    numbers_of,
    scale_of,
    share_memory,
    sinks_of,
    slopes_of,
)
from attnmask._mask_info import MaskInfo
from attnmask._mask_program import Program, Shape
from attnmask._mask_terms import band, first_keys, sequences

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
    """Attention of the last tokens of sequences over all their tokens, whose keys and values are in a cache.

    ::

        a contiguous cache                    pages of 4 tokens, block_table [[2, 0], [1, ...]]

        row 0  k k k k k k . .                page 0  k k . .     the end of sequence 0
        row 1  k k k . . . . .                page 1  k k k .     sequence 1
                                              page 2  k k k k     the begin of sequence 0

    New keys and values are written behind those that are there, and then the queries, which are the last tokens of
    their sequences, attend to all: query ``i`` of ``Tq`` is token ``length - Tq + i``, and `causal` and the window
    count from there. Sequences may be of any lengths. What lies behind the end of one, or in pages that none of its
    queries sees, has no influence and is not read.

    Parameters
    ----------
    query : array_like, shape [B, Tq, H, D], or [total, H, D] with `cu_seqlens_q`
    k_cache : ndarray, shape [B, Tmax, Hkv, D], or [pages, page_size, Hkv, D] with `block_table`
        float16, bfloat16, float32, float64, int8 or ``ml_dtypes.float8_e4m3fn``, with any strides. Queries may be of
        another type, but float64 goes with float64 alone.
    v_cache : ndarray, shape [B, Tmax, Hkv, Dv], or [pages, page_size, Hkv, Dv]
        Of the type of `k_cache`.
    key : array_like, shape [B, Tnew, Hkv, D], or [total, Hkv, D], optional
        Written to `k_cache` in place, in its type. Nothing is written if any argument is wrong.
    value : array_like, shape [B, Tnew, Hkv, Dv], or [total, Hkv, Dv], optional
    cache_seqlens : int or array_like of integers, shape [B], optional
        Tokens that are there before the call. All of a contiguous cache if not given.
    block_table : array_like of integers, shape [B, max_pages], optional
        The pages of each sequence, in order. Entries behind its last token are not looked at.
    k_scale, v_scale : ndarray of float32, optional
        Of a quantized cache, whose numbers they are the factors of: one for each token and head, of shape ``[B, Tmax,
        Hkv, 1]`` or ``[pages, page_size, Hkv, 1]``, or for each head and channel, ``[1, 1, Hkv, D]``. 1 if not given.
        New tokens get scales of their own, which are written, or are quantized by those of the channels.
    cu_seqlens_q : array_like of integers, shape [B + 1], optional
        Where the queries of each sequence begin, and the keys and values with them: some may be one token, and others
        many.
    softmax_scale : float, optional
        ``1 / sqrt(D)`` if not given.
    causal : bool
    sliding_window : int or tuple of two, optional
        How many keys to the left and to the right of a token's own place, or to either side; None for all.
    logits_soft_cap, softmax_aux
        As of `flash_attention`.
    alibi_slopes : array_like, shape [H] or [B, H], optional
        As of `flash_attention`.
    attention_mask : array_like or MaskInfo, broadcasts to [B, H, Tq, Tk], optional
        Its keys are the places in the sequence: there may be more than tokens. With `cu_seqlens_q` of one row, and
        with as many queries as there are in all.
    return_lse : bool
        Return the logsumexp of each row as well.
    out : ndarray, shape [B, Tq, H, Dv] or [total, H, Dv], optional
        Takes the result, and is returned.

    Returns
    -------
    out : ndarray, shape [B, Tq, H, Dv] or [total, H, Dv]
        Of the query's type. A sequence's rows are the same bits whether its cache is contiguous or paged, and whatever
        it is computed with.
    lse : ndarray, shape [B, H, Tq] or [H, total]
        Only with `return_lse`.

    See Also
    --------
    flash_attention : without a cache.
    merge_attention_states : joins attention over parts of the keys, such as a prefix that sequences share.

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
    given = locals()
    q, starts = _tokens(query, "query", "H, D", cu_seqlens_q)
    k, v = _caches(k_cache, v_cache, q)
    scales = _scales(k_scale, k, "k_scale"), _scales(v_scale, v, "v_scale")
    batch = len(q) if starts is None else len(starts) - 1
    new = _new_tokens(key, value, (k, v), cu_seqlens_q, batch)
    counts = np.full(batch, q.shape[1], np.intp) if starts is None else np.diff(starts)
    table = _table(block_table, k, batch)
    before = _before(cache_seqlens, batch, k, block_table is not None)
    more = 0 if new is None else new[0].shape[1] if starts is None else counts
    lengths = before + more
    _check_lengths(lengths, before, table.shape[1] * k.shape[1])
    limits = distances({"causal": causal, "sliding_window": sliding_window})
    offsets = lengths - counts
    used = np.zeros_like(lengths) if limits[0] is None else np.maximum(offsets + limits[0], 0)
    longest = int(lengths.max(initial=0))
    heads, channels = q.shape[2:]
    shape = (len(q), heads, q.shape[1], longest)
    slopes = None if alibi_slopes is None else slopes_of(alibi_slopes, batch, heads, "B")
    apart = attention_mask if starts is not None else None  # whose keys are those of each sequence
    if apart is not None:
        nodes, relative = mask_nodes(_cut(apart, longest), shape), None
        pages = Pages(table, used, lengths, None, longest, *scales)
    elif starts is not None:
        k_starts = np.concatenate([[0], np.cumsum(lengths)])
        nodes = (sequences(starts, k_starts, *(None if end is None else end + offsets for end in limits)),)
        pages = Pages(table, used, lengths, k_starts, int(k_starts[-1]), *scales)
        moved = offsets + k_starts[:-1] - starts[:-1]
        relative = None if slopes is None else Relative(slopes, None, moved, starts, 0)
    else:
        nodes = _row_nodes(attention_mask, shape, lengths, limits, offsets)
        pages = Pages(table, used, lengths, None, longest, *scales)
        relative = None if slopes is None else Relative(slopes, None, offsets, None, 0)
    numbers = numbers_of(q.dtype)
    options = (
        scale_of(softmax_scale, channels, numbers),
        cap_of(logits_soft_cap, numbers),
        sinks_of(softmax_aux, heads, numbers),
    )
    with_lse = flag(return_lse, "return_lse")
    if out is not None:
        _check_out(out, (*q.shape[starts is not None : 3], v.shape[3]), q.dtype)
        check_apart(out, given, _ARRAYS)
    if new is not None or apart is not None:
        _check_pages(k, pages, block_table)
    if new is not None:
        read = {"query": q, "key": new[0], "value": new[1], "block_table": table}
        _check_apart(k, "k_cache", {**read, "v_cache": v})
        _check_apart(v, "v_cache", read)
        for side, cache, scale in (("k", k, scales[0]), ("v", v, scales[1])):
            _check_writeable(given[f"{side}_cache"], cache, f"{side}_cache")
            _check_own_scales(given[f"{side}_scale"], scale, cache, f"{side}_scale")
        if out is None:
            out = allocate((*q.shape[starts is not None : 3], v.shape[3]), q.dtype, "query")
        for cache, tokens, scale in zip((k, v), new, scales, strict=True):
            written = Pages(table, before, lengths, None, longest, scale, None)
            _core.kv_append(_numbers(cache), tokens, written, before, starts)
    if apart is not None and starts is not None:
        attend = partial(
            flash_attention_with_kvcache,
            k_cache=k,
            v_cache=v,
            k_scale=scales[0],
            v_scale=scales[1],
            softmax_scale=softmax_scale,
            causal=causal,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            softmax_aux=softmax_aux,
            return_lse=True,
        )
        target = np.empty((*q.shape[1:3], v.shape[3]), q.dtype) if out is None else out
        rows = _Sequences(q, starts, table, lengths, slopes)
        lses = _one_by_one(attend, rows, apart, target)
        return (target, lses) if with_lse else target
    problem = Problem(q, _numbers(k), _numbers(v), nodes, None, *options, True, 0.0, 0, relative, pages)
    result, lse = _core.flash_forward(*problem, with_lse, out if out is None or starts is None else out[None])
    if starts is not None:
        result, lse = result[0], None if lse is None else lse[0]
    result = result if out is None else out
    return (result, lse) if with_lse else result


_ARRAYS = (
    "query", "k_cache", "v_cache", "key", "value", "cache_seqlens", "block_table", "cu_seqlens_q", "k_scale",
    "v_scale", "softmax_aux", "alibi_slopes", "attention_mask",
)  # fmt: skip


class _Sequences(NamedTuple):
    query: NDArray[Any]  # [1, total, H, D]
    starts: NDArray[np.int64]
    table: NDArray[np.int32]
    lengths: NDArray[np.intp]
    slopes: NDArray[np.float64] | None


def _one_by_one(
    attend: Callable[..., Any], rows: _Sequences, mask: ArrayLike | MaskInfo, target: NDArray[Any]
) -> NDArray[Any]:
    """Attention under a mask of packed queries, whose keys count from the begin of each sequence. Returns the lse."""
    slopes, lses = rows.slopes, []
    for s, (begin, end) in enumerate(pairwise(rows.starts.tolist())):
        _, lse = attend(
            rows.query[:, begin:end],
            cache_seqlens=rows.lengths[s : s + 1],
            block_table=rows.table[s : s + 1],
            alibi_slopes=None if slopes is None else slopes[s % len(slopes)],
            attention_mask=_of_queries(mask, begin, end),
            out=target[None, begin:end],
        )
        lses.append(lse[0])
    heads, dtype = target.shape[1], np.float64 if target.dtype == np.float64 else np.float32
    return np.concatenate(lses, axis=1) if lses else np.empty((heads, 0), dtype)


def _tokens(
    value: ArrayLike, name: str, layout: str, cu_seqlens_q: ArrayLike | None
) -> tuple[NDArray[Any], NDArray[np.int64] | None]:
    """An array of four axes, and where sequences begin if it is packed."""
    array = as_array(value, name)
    expected = f"[B, T, {layout}]" if cu_seqlens_q is None else f"[total, {layout}] with cu_seqlens_q"
    if not is_floating(array.dtype):
        raise TypeError(f"{name} must be of float16, bfloat16, float32 or float64, got {describe(array)}")
    if array.ndim != (4 if cu_seqlens_q is None else 3):
        raise ValueError(f"{name} must be {expected}, got {describe(array)}")
    if cu_seqlens_q is None:
        return array, None
    starts = _core.checked_starts(as_array(cu_seqlens_q, "cu_seqlens_q"), "cu_seqlens_q")
    if starts[-1] != len(array):
        raise ValueError(f"cu_seqlens_q must end at {len(array)} tokens of {name}, got {starts[-1]}")
    return array[None], starts


def _caches(k_cache: ArrayLike, v_cache: ArrayLike, query: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    k, v = as_array(k_cache, "k_cache"), as_array(v_cache, "v_cache")
    heads, channels = query.shape[2:]
    for name, cache in (("k_cache", k), ("v_cache", v)):
        if not (is_floating(cache.dtype) or _is_quantized(cache)):
            expected = "float16, bfloat16, float32, float64, int8 or float8_e4m3fn"
            raise TypeError(f"{name} must be of {expected}, got {describe(cache)}")
        if cache.ndim != 4:
            raise ValueError(
                f"{name} must be [B, Tmax, Hkv, D] or [pages, page_size, Hkv, D], got {describe(cache)}"
            )
    if v.dtype != k.dtype:
        raise TypeError(f"v_cache must be {k.dtype} as k_cache, got {describe(v)}")
    if (k.dtype == np.float64) != (query.dtype == np.float64):
        raise TypeError(f"query must be {k.dtype} as k_cache if either is float64, got {describe(query)}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v_cache must be of shape {k.shape[:3]} and Dv as k_cache, got {describe(v)}")
    if k.shape[3] != channels:
        raise ValueError(f"k_cache must have D = {channels} as query, got {describe(k)}")
    if heads % k.shape[2] if k.shape[2] else heads:
        raise ValueError(f"k_cache must have heads that divide query's {heads}, got {describe(k)}")
    return k, v


def _is_quantized(cache: NDArray[Any]) -> bool:
    return cache.dtype == np.int8 or cache.dtype.type.__name__ == "float8_e4m3fn"


def _numbers(cache: NDArray[Any]) -> NDArray[Any]:
    """The cache as the core takes it: NumPy knows float8 by ml_dtypes alone, and so it goes as bytes."""
    return cache.view(np.uint8) if cache.dtype.itemsize == 1 and cache.dtype != np.int8 else cache


def _is_by_channel(scale: NDArray[np.float32], cache: NDArray[Any]) -> bool:
    return scale.shape[:2] == (1, 1) and (cache.shape[:2] != (1, 1) or scale.shape[3] != 1)


def _scales(scale: ArrayLike | None, cache: NDArray[Any], name: str) -> NDArray[np.float32] | None:
    """Those of a quantized cache: of tokens and heads, or of heads and channels."""
    if scale is None:
        return None
    array = as_array(scale, name)
    if not _is_quantized(cache):
        raise ValueError(f"{name} must be None for a cache of {cache.dtype}, got {describe(array)}")
    if array.dtype != np.float32:
        raise TypeError(f"{name} must be float32, got {describe(array)}")
    fits = array.ndim == 4 and all(
        size in (1, most) for size, most in zip(array.shape, cache.shape, strict=True)
    )
    if not fits or not (array.shape[3] == 1 or _is_by_channel(array, cache)):
        tokens, channels = (*cache.shape[:3], 1), (1, 1, *cache.shape[2:])
        raise ValueError(f"{name} must be of shape {tokens} or {channels}, got {describe(array)}")
    if _is_by_channel(array, cache) and not (np.isfinite(array) & (array > 0)).all():
        wrong = array[~(np.isfinite(array) & (array > 0))][0]
        raise ValueError(f"{name} must be finite and positive for each channel, got {wrong}")
    return array


def _check_own_scales(given: Any, scale: NDArray[np.float32] | None, cache: NDArray[Any], name: str) -> None:
    """New tokens have scales of their own, which are written."""
    if scale is None or _is_by_channel(scale, cache):
        return
    if scale.shape != (*cache.shape[:3], 1):
        raise ValueError(
            f"{name} must be of shape {(*cache.shape[:3], 1)} to take new tokens, got {describe(scale)}"
        )
    _check_writeable(given, scale, name)


def _new_tokens(
    key: ArrayLike | None,
    value: ArrayLike | None,
    caches: tuple[NDArray[Any], NDArray[Any]],
    cu_seqlens_q: ArrayLike | None,
    batch: int,
) -> tuple[NDArray[Any], NDArray[Any]] | None:
    if key is None and value is None:
        return None
    if key is None or value is None:
        missing = "key" if key is None else "value"
        raise ValueError(f"{missing} must be given with {'value' if key is None else 'key'}, got None")
    new = _tokens(key, "key", "Hkv, D", cu_seqlens_q)[0], _tokens(value, "value", "Hkv, Dv", cu_seqlens_q)[0]
    for name, tokens, cache in zip(("key", "value"), new, caches, strict=True):
        if cu_seqlens_q is None and len(tokens) != batch:
            raise ValueError(f"{name} must have batch size {batch} as query, got {describe(tokens)}")
        if tokens.shape[2:] != cache.shape[2:]:
            expected = f"{cache.shape[2]} heads of {cache.shape[3]} channels as its cache"
            raise ValueError(f"{name} must have {expected}, got {describe(tokens)}")
    if new[0].shape[1] != new[1].shape[1]:
        raise ValueError(f"value must have {new[0].shape[1]} tokens as key, got {describe(new[1])}")
    return new


def _table(block_table: ArrayLike | None, cache: NDArray[Any], batch: int) -> NDArray[np.int32]:
    """The pages of each sequence; each row of a contiguous cache is one."""
    if block_table is None:
        if len(cache) != batch:
            hint = "" if len(cache) < batch else "; write block_table= if they are pages"
            raise ValueError(f"k_cache must have {batch} rows, one a sequence, got {describe(cache)}{hint}")
        return np.arange(batch, dtype=np.int32)[:, None]
    table = integer_array(block_table, "block_table")
    if table.ndim != 2 or len(table) != batch:
        raise ValueError(f"block_table must be of shape ({batch}, max_pages), got {describe(table)}")
    if table.dtype != np.int32:  # what is behind the pages of a sequence may be anything
        table = table.clip(-1, np.iinfo(np.int32).max).astype(np.int32)
    return np.ascontiguousarray(table)


def _check_pages(cache: NDArray[Any], pages: Pages, block_table: ArrayLike | None) -> None:
    """Check the entries of the table that are used, before anything is written."""
    try:
        _core.check_pages(_numbers(cache), pages._replace(k_scale=None, v_scale=None))
    except IndexError:
        _name_entry(as_array(block_table, "block_table"), cache, pages)  # type: ignore[arg-type]
        raise


def _name_entry(table: NDArray[Any], cache: NDArray[Any], pages: Pages) -> None:
    """Say what an entry is that does not fit int32."""
    for s, (begin, end) in enumerate(zip(pages.used, pages.lengths, strict=True)):
        for i in range(begin // cache.shape[1], -(-end // cache.shape[1])):
            if len(cache) and not 0 <= table[s, i] < len(cache):
                raise IndexError(
                    f"block_table must be from 0 to {len(cache) - 1}, got {table[s, i]} at index ({s}, {i})"
                ) from None


def _before(
    cache_seqlens: ArrayLike | None, batch: int, cache: NDArray[Any], paged: bool
) -> NDArray[np.intp]:
    """The tokens of each sequence that are there."""
    if cache_seqlens is None and paged:
        raise ValueError("cache_seqlens must be given with block_table, got None")
    given = cache.shape[1] if cache_seqlens is None else per_row(cache_seqlens, "cache_seqlens", batch, 0)
    return np.full(batch, given, np.intp) if isinstance(given, int) else given


def _check_lengths(lengths: NDArray[np.intp], before: NDArray[np.intp], capacity: int) -> None:
    over = lengths > capacity
    if over.any():
        i = int(over.argmax())
        more = f" and {lengths[i] - before[i]} new ones" if lengths[i] != before[i] else ""
        raise ValueError(
            f"cache_seqlens must be tokens that the cache has room for, {capacity} a sequence, "
            f"got {before[i]}{more} at index {i}"
        )


def _cut(mask: ArrayLike | MaskInfo, keys: int) -> ArrayLike | MaskInfo:
    """The mask of the first keys, of which it may have more."""
    if isinstance(mask, MaskInfo):
        return mask[..., :keys] if mask.kv_len is not None and mask.kv_len > keys else mask
    array = as_array(mask, "attention_mask")
    return array[..., :keys] if array.ndim and array.shape[-1] > max(keys, 1) else array


def _of_queries(mask: ArrayLike | MaskInfo, begin: int, end: int) -> ArrayLike | MaskInfo:
    if isinstance(mask, MaskInfo):
        return mask[:, :, begin:end]
    array = as_array(mask, "attention_mask")
    return array[..., begin:end, :] if array.ndim > 1 and array.shape[-2] != 1 else array


def _row_nodes(
    mask: ArrayLike | MaskInfo | None,
    shape: Shape,
    lengths: NDArray[np.intp],
    limits: tuple[int | None, int | None],
    offsets: NDArray[np.intp],
) -> Program:
    """What the queries of each batch row see of the keys of that row."""
    nodes = [] if mask is None else [*mask_nodes(_cut(mask, shape[3]), shape)]
    terms = (
        None if (lengths == shape[3]).all() else first_keys(lengths),
        None if limits == (None, None) else band(*limits, offsets),
    )
    for term in terms:
        if term is not None:
            nodes += (term, "and") if nodes else (term,)
    return tuple(nodes) or (("all",),)


def _check_out(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a NumPy array or None, got {describe(out)}")
    if out.shape != shape or out.dtype != dtype:
        raise ValueError(f"out must be an array of {dtype} of shape {shape}, got {describe(out)}")
    if not out.flags.writeable:
        raise ValueError("out must be writeable, got a read-only array")


def _check_apart(target: Any, name: str, others: Mapping[str, Any]) -> None:
    for other, array in others.items():
        if array is not None and share_memory(target, array):
            raise ValueError(f"{name} must share no memory with {other}")


def _check_writeable(given: Any, cache: NDArray[Any], name: str) -> None:
    if not cache.flags.writeable:
        raise ValueError(f"{name} must be writeable to take new tokens, got a read-only array")
    if cache.size == 0:
        return
    in_place = given is cache or hasattr(given, "__dlpack__")
    if not in_place or (isinstance(given, np.ndarray) and not np.may_share_memory(given, cache)):
        raise ValueError(
            f"{name} must be an aligned array in native byte order to take new tokens, got {describe(given)}"
        )
