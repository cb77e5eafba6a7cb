"""What FlashAttention's functions compute: how their arguments become those of `attnmask.torch`."""

import re
from collections.abc import Callable
from itertools import pairwise
from math import inf, nan
from typing import Any, TypeAlias

import numpy as np

from attnmask import dropout_keep_mask
from attnmask._common.arguments import describe
from attnmask._common.types import Arguments
from attnmask._faces.rows import Kind, Row, axes_of
from attnmask.torch import attention_weights, flash_attention, flash_attention_with_kvcache
from attnmask.torch._import import between_graphs, torch
from attnmask.torch._operators import check_tensor, seed_of, wide_dtype

Call: TypeAlias = Callable[[Arguments], Any]

_NAMES = {  # what messages call by our names
    "query": "q",
    "key": "k",
    "value": "v",
    "dropout_prob": "dropout_p",
    "sliding_window": "window_size",
    "logits_soft_cap": "softcap",
    "cum_seqlens_q": "cu_seqlens_q",
    "cum_seqlens_k": "cu_seqlens_k",
    "None for no limit": "-1 for no limit",
}
_ALL_IN_ONE = {
    "qkv": ("query", "key", "value"),
    "kv": ("key", "value"),
    "cu_seqlens": ("cum_seqlens_q", "cum_seqlens_k"),
}


def _with_names(row: Row, compute: Call) -> Call:
    """Have errors name arguments as FlashAttention does."""
    names = _NAMES | {"return_lse": row.all}
    for name in row.of(Kind.LEARNED, Kind.STARTS):
        names |= dict.fromkeys(_ALL_IN_ONE.get(name, ()), name)
    ours = re.compile(rf"\b({'|'.join(names)})\b")

    def call(given: Arguments) -> Any:
        try:
            return compute(given)
        except (TypeError, ValueError) as error:
            error.args = (ours.sub(lambda found: names[found[0]], str(error)),)
            raise

    return call


def _terms(given: Arguments) -> Arguments:
    """Return the scale, and what else changes logits or hides them but for `causal`."""
    cap, slopes, window = (given[name] for name in ("softcap", "alibi_slopes", "window_size"))
    found: Arguments = {"softmax_scale": given["softmax_scale"]}
    if not (isinstance(cap, (int, float)) and cap <= 0):
        found["logits_soft_cap"] = cap
        if slopes is not None:
            raise ValueError(
                f"softcap must be 0.0 with alibi_slopes, got {describe(cap)}: FlashAttention adds ALiBi after the cap, "
                "which attnmask adds before it"
            )
    if slopes is not None:
        found["alibi_slopes"] = slopes
    window = window.tolist() if isinstance(window, torch.Tensor) else window
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window_size must be (left, right), with -1 for no limit, got {describe(window)}")
    if tuple(window) != (-1, -1):
        found["sliding_window"] = tuple(
            None if isinstance(x, (int, np.integer)) and x < 0 else x for x in window
        )
    return found


def _without_keys(lse: torch.Tensor) -> torch.Tensor:
    """Return the logsumexp, infinity in rows without keys."""
    return torch.nan_to_num(lse, nan, inf, inf)


def attention(row: Row) -> Call:
    """Return what computes a row of attention."""
    learned = [x for x in row.arguments if x.kind is Kind.LEARNED]
    inputs = [(x.name, x.layout, len(*axes_of(x.layout)), len(_ALL_IN_ONE.get(x.name, "1"))) for x in learned]
    starts = row.of(Kind.STARTS)

    def compute(given: Arguments) -> Any:
        attend: Any = flash_attention
        pages, dropout, returned = given.get("block_table"), given["dropout_p"], given["return_attn_probs"]
        tensors: list[torch.Tensor] = []
        for name, layout, axes, parts in inputs:
            x = given[name]
            check_tensor(x, name)
            if (x.ndim != axes and pages is None) or (parts > 1 and x.shape[-3] != parts):
                raise ValueError(f"{name} must be {layout}, got {describe(x)}")
            tensors += x.unbind(-3) if parts > 1 else (x,)
        if pages is not None and (dropout != 0 or _learns(tensors)):  # caches have neither
            tensors[1:] = (_of_pages(x, pages, given["cu_seqlens_k"]) for x in tensors[1:])
            pages = None
        terms, drawn = _terms(given), {} if dropout == 0 else {"dropout_prob": dropout}
        if pages is not None:
            attend = flash_attention_with_kvcache
            terms |= {"causal": given["causal"], "block_table": pages, "cu_seqlens_q": given["cu_seqlens_q"]}
            terms["cache_seqlens"] = torch.diff(given["cu_seqlens_k"])
        else:
            if given["causal"] is not False:
                terms["causal"] = given["causal"]
            if len(terms) > 1:
                fixed = tensors[1].shape[1] - tensors[0].shape[1]
                terms["causal_offset"] = "bottom-right" if starts else fixed
            if starts:
                terms |= {"cum_seqlens_q": given[starts[0]], "cum_seqlens_k": given[starts[-1]]}
            if drawn and returned is True:
                return _with_dropped(tensors, terms, dropout)
        found = attend(*tensors, **terms, **drawn, return_lse=returned)
        if not returned:
            return found
        out, lse = found
        return out, _without_keys(lse), out.new_empty(0)

    return _with_names(row, compute)


def _learns(tensors: list[torch.Tensor]) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _of_pages(x: torch.Tensor, table: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Return the packed tokens that lie in pages."""
    row = torch.repeat_interleave(torch.diff(cu_seqlens))
    place = torch.arange(len(row)) - cu_seqlens[row]
    page, slot = place // x.shape[1], place % x.shape[1]
    return x[table[row, page].long(), slot]


def _with_dropped(tensors: list[torch.Tensor], terms: Arguments, dropout: float) -> tuple[torch.Tensor, ...]:
    """Return the results with dropout, and the weights, negative where they are dropped."""
    attend: Any = flash_attention
    seed, (query, key, _) = seed_of(dropout, None), tensors
    out, lse = attend(*tensors, **terms, dropout_prob=dropout, dropout_seed=seed, return_lse=True)
    weights = attention_weights(query.detach(), key.detach(), **terms).to(query.dtype)
    weights = weights.reshape(-1, *weights.shape[-3:])
    keep = dropout_keep_mask(seed, dropout, tuple(weights.shape))
    weights = torch.where(torch.from_numpy(keep), weights, -weights)
    return out, _without_keys(lse), weights if query.ndim == 4 else _by_sequence(weights[0], terms)


def _by_sequence(weights: torch.Tensor, terms: Arguments) -> torch.Tensor:
    """Return the weights [sequences, H, Tq, Tk] of packed sequences."""
    queries, keys = (list(pairwise(terms[f"cum_seqlens_{x}"].tolist())) for x in "qk")
    sizes = [max((end - start for start, end in pairs), default=0) for pairs in (queries, keys)]
    found = weights.new_zeros(len(queries), weights.shape[0], *sizes)
    for row, (q, q_end), (k, k_end) in zip(found, queries, keys, strict=True):
        row[:, : q_end - q, : k_end - k] = weights[:, q:q_end, k:k_end]
    return found


between_graphs(_with_dropped, "leave return_attn_probs out with dropout_p, or do not compile its call")


def _rotated(x: torch.Tensor, tables: list[torch.Tensor], places: torch.Tensor, pairs: bool) -> torch.Tensor:
    """Return tokens [B, T, H, D] with the rotary embedding of their `places` [B, T]: of `pairs` of channels, or of both
    halves.
    """
    cos, sin = (table[places][:, :, None].to(wide_dtype(x.dtype)) for table in tables)
    turned, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
    one, other = (turned[..., ::2], turned[..., 1::2]) if pairs else turned.chunk(2, -1)
    both = one * cos - other * sin, one * sin + other * cos
    turned = torch.stack(both, -1).flatten(-2) if pairs else torch.cat(both, -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


def _with_rotary(
    given: Arguments, lengths: object, tokens: int, follows: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `q` and `k` with their rotary embedding. If `q` `follows`, its places are those of `k`."""
    q, k, tables = given["q"], given["k"], [given["rotary_cos"], given["rotary_sin"]]
    if k is None or lengths is None:
        raise ValueError("rotary_cos needs k and cache_seqlens, whose places it is of")
    check_tensor(k, "k")
    for name, table in zip(("rotary_cos", "rotary_sin"), tables, strict=True):
        check_tensor(table, name)
        if table.shape != tables[0].shape or not (
            table.ndim == 2 and table.shape[0] >= tokens and 2 * table.shape[1] <= q.shape[-1]
        ):
            expected = f"[T, R / 2] with T >= {tokens}, the size of the cache, and R <= {q.shape[-1]}"
            raise ValueError(f"{name} must be {expected}, as rotary_cos, got {describe(table)}")
    start = torch.as_tensor(lengths).reshape(-1, 1)
    counts = q.shape[1] if follows else 1, k.shape[1]
    turned = (
        _rotated(x, tables, start + torch.arange(count), given["rotary_interleaved"])
        for x, count in zip((q, k), counts, strict=True)
    )
    return next(turned), next(turned)


def cache(row: Row) -> Call:
    """Return what computes the row of attention to a cache."""

    def compute(given: Arguments) -> Any:
        q, k, caches = given["q"], given["k"], (given["k_cache"], given["v_cache"])
        for name in ("q", "k_cache", "v_cache"):
            check_tensor(given[name], name)
            if given[name].ndim != 4:
                raise ValueError(f"{name} must be {row.argument(name).layout}, got {describe(given[name])}")
        lengths, table, rows = (given[x] for x in ("cache_seqlens", "block_table", "cache_batch_idx"))
        leftpad, tokens, returned = given["cache_leftpad"], caches[0].shape[1], given["return_softmax_lse"]
        terms = _terms(given)
        if rows is not None:  # as pages of whole rows
            if table is not None:
                raise ValueError("cache_batch_idx must be None with block_table, whose pages have no rows")
            table = rows[:, None]
            lengths = tokens if lengths is None else lengths
        tokens *= 1 if table is None else table.shape[1]
        if leftpad is not None:
            terms["attention_mask"] = (torch.arange(tokens) >= leftpad[:, None])[:, None, None]
        if given["rotary_cos"] is not None:
            q, k = _with_rotary(given, lengths, tokens, given["causal"] or "sliding_window" in terms)
        terms |= {"causal": given["causal"], "cache_seqlens": lengths, "block_table": table}
        found = flash_attention_with_kvcache(q, *caches, k, given["v"], **terms, return_lse=returned)
        return (found[0], _without_keys(found[1])) if returned else found

    return _with_names(row, compute)
