"""Functions that the core calls to check less common arguments of `flash_attention_with_kvcache`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnmask._attention.arguments import CACHE_DEFAULTS, DEFAULTS
from attnmask._attention.problem import distances, mask_nodes, scale_of
from attnmask._attention.terms import Sizes, numbers_of, terms_of
from attnmask._common.arguments import FARTHEST, as_array, describe, flag, integer, integer_array, per_row
from attnmask._common.types import Arguments, Array, Given
from attnmask._masks.info import MaskInfo
from attnmask._masks.program import Program, Shape

# These depend on positions. Attention to a prefix has none: one problem has the queries of all sequences.
_BY_PLACE = ("sliding_window", "attention_chunk", "alibi_slopes", "bias", "relative_bias", "grid_bias")

_TO_WRITE = ("key", "value", "k_scale", "v_scale", "block_table", "cu_seqlens_q", "cu_seqlens_k_new", "out")
_WITHOUT_GRADIENTS = (*_TO_WRITE, "attention_mask", "bias", "attention_chunk", "prefix", "rotate")


def table_of(block_table: Array, given: object) -> Array:
    """Return the table as int32 or int64. Entries after the pages of a sequence are ignored."""
    if block_table.size or isinstance(given, np.ndarray):
        block_table = integer_array(block_table, "block_table")
    else:  # an empty list, which NumPy takes for float64
        block_table = block_table.astype(np.int64)
    if block_table.dtype in (np.int32, np.int64):
        return block_table
    most = min(np.iinfo(block_table.dtype).max, np.iinfo(np.int64).max)
    return np.asarray(block_table.clip(None, most), np.int64)  # of a table without axes, clip makes a scalar


def tokens_before(cache_seqlens: ArrayLike, batch: int) -> NDArray[np.int64]:
    """Return the number of cached tokens of each sequence."""
    given = per_row(cache_seqlens, "cache_seqlens", batch, 0, broadcast=False)
    return np.full(batch, given, np.int64) if isinstance(given, int) else given


def prefix_of(given: Given) -> int:
    """Return the number of tokens that all sequences share, with which some arguments do not go."""
    prefix = integer(given["prefix"], "prefix", 0)
    for name in ("attention_mask", *_BY_PLACE) if prefix else ():
        if given.get(name) is not None:
            raise ValueError(
                f"{name} must be None with prefix, got {describe(given[name])}; leave prefix out to have both"
            )
    return prefix


# A contiguous cache of floats that is only read holds ordinary keys and values, so that it has their derivatives.


def without_gradients(given: Given) -> str:
    """Return with what a call has no gradients, or nothing."""
    for name in ("k_cache", "v_cache"):
        if given[name].dtype != given["query"].dtype:
            return f" with a {name} of {str(given[name].dtype).removeprefix('torch.')}"
    for name in _WITHOUT_GRADIENTS:
        x = given.get(name)
        if x is not None and x is not False and (name != "prefix" or x):
            return f" with {name}"
    return ""


def as_attention(given: Given) -> Arguments:
    """Return the arguments of `flash_attention` to the keys in a cache. Each row sees the first `cache_seqlens`."""
    named = {name: given[name] for name in CACHE_DEFAULTS if name in DEFAULTS and name != "bias"}
    return named | {"query": given["query"], "key": given["k_cache"], "value": given["v_cache"]}


def options(query: Array, shape: Shape, sequences: int, channels: int, given: Arguments) -> tuple[Any, ...]:
    """Return the scale, the terms of the logits, limits of distances, the tokens of a chunk or 0, and whether the
    logsumexp is wanted.

    `shape` is that of the mask and the bias, which may have more keys.
    """
    numbers, bias, chunk = numbers_of(query.dtype), given["bias"], given["attention_chunk"]
    if given["prefix"]:
        prefix_of(given)
    short = given if bias is None else given | {"bias": cut(bias, "bias", shape[3])}
    terms = terms_of(short, Sizes(shape, (sequences,), "B", numbers))
    return (
        scale_of(given["softmax_scale"], channels, numbers),
        terms if sequences else (),
        *distances(given),
        0 if chunk is None else min(integer(chunk, "attention_chunk", 1), FARTHEST),
        flag(given["return_lse"], "return_lse"),
    )


def mask_program(attention_mask: object, batch: int, heads: int, queries: int, keys: int) -> Program:
    """Return the mask's program for the first `keys` keys; the mask may have more."""
    shape = (batch, heads, queries, keys)
    kept = attention_mask._state.kept if isinstance(attention_mask, MaskInfo) else None
    if kept is not None and kept[0] == shape:  # as in the layer before
        return (kept[1],)
    return mask_nodes(cut(attention_mask, "attention_mask", keys), shape)


def cut(mask: object, name: str, keys: int) -> ArrayLike | MaskInfo:
    """Return the mask or bias of the first `keys` keys; it may have more."""
    if isinstance(mask, MaskInfo):
        length = mask._state.extent[3]
        return mask[..., :keys] if length is not None and length > keys else mask
    array = as_array(mask, name)
    return array[..., :keys] if array.ndim and array.shape[-1] > max(keys, 1) else array
