"""Attention over a cache as an XLA call that writes new tokens into the cache's memory. Its counterpart is
``csrc/bind/xla/cache.c``.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from attnmask._attention.arguments import KVCACHE_DEFAULTS, KVCACHE_NAMES
from attnmask._attention.problem import mask_nodes
from attnmask._cache import attend as kvcache
from attnmask._cache.quantize import check_tokens_rotate, rotated_tokens
from attnmask._common.arguments import (
    as_array,
    fields_in_a_line,
    integer_array,
    is_floating,
    wide_dtype,
)
from attnmask._common.loading import _core
from attnmask._common.types import Arguments, Given
from attnmask._faces.attention import CACHE
from attnmask._faces.rows import ARRAYS, Kind
from attnmask._masks.info import MaskInfo
from attnmask._masks.program import Program, Shape, mapped
from attnmask.jax import _call as call
from attnmask.jax._arguments import (
    Arrays,
    is_traced,
    known_flag,
    like,
    mask_like,
    mask_terms,
    starts_like,
    term_operands,
)
from attnmask.jax._types import AnyArray, Shaped

__all__ = ["CACHES", "TRACED", "KVCacheResult", "attend", "write"]

_FIRST = ("query", "k_cache", "v_cache", "key", "value", "k_scale", "v_scale")  # in the call's order
CACHES, TRACED = CACHE.of(Kind.STATE), CACHE.of(*ARRAYS)


class KVCacheResult(NamedTuple):
    """What `flash_attention_with_kvcache` returns: the result, and the caches as they are after the call.

    Parameters
    ----------
    out : array, shape [B, Tq, H, Dv] or [total, H, Dv]
        The result.
    lse : array, shape [B, H, Tq] or [H, total], or None
        None without `return_lse`.
    k_cache, v_cache : array
        The caches with the new tokens.
    k_scale, v_scale : array or None
        Their scales; None for caches that have none.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import attnmask.jax
    >>> x, cache = jnp.ones((1, 1, 1, 8)), jnp.zeros((1, 4, 1, 8))
    >>> result = attnmask.jax.flash_attention_with_kvcache(x, cache, cache, x, x, cache_seqlens=2)
    >>> result.k_cache[0, :, 0, 0].tolist(), result.lse
    ([0.0, 0.0, 1.0, 0.0], None)
    """

    out: jax.Array
    lse: jax.Array | None
    k_cache: jax.Array
    v_cache: jax.Array
    k_scale: jax.Array | None
    v_scale: jax.Array | None

    def __repr__(self) -> str:
        return fields_in_a_line(self)


def attend(given: Given) -> KVCacheResult:
    """Attend, given the arguments of `attnmask.flash_attention_with_kvcache` by name, some of them traced."""
    given = dict(given) | {name: jax.numpy.asarray(given[name]) for name in _FIRST if given[name] is not None}
    rotate = known_flag(given.pop("rotate"), "rotate")
    if rotate:
        check_tokens_rotate(given["query"], given["v_cache"])
        tokens = [name for name in ("query", "key", "value") if given[name] is not None]
        given |= {name: _rotated(given[name]) for name in tokens}
    known = {name: _known(name, value, given) for name, value in given.items()}
    # The bias is checked later: its keys depend on lengths.
    _core.check_kvcache(KVCACHE_NAMES, KVCACHE_DEFAULTS, (), known | {"bias": None})
    packed, appends = given["cu_seqlens_q"] is not None, given["key"] is not None
    first = {name: given[name] for name in _FIRST if given[name] is not None}
    if packed:
        first["query"] = first["query"][None]
    if appends and (packed or given["cu_seqlens_k_new"] is not None):
        first |= {name: first[name][None] for name in ("key", "value") if name in first}
    query, k_cache = first["query"], first["k_cache"]
    arrays = Arrays()
    words, with_lse = _words(given, known, query.shape, arrays)

    batch, queries, heads, _ = query.shape
    value_dim = first["v_cache"].shape[3] * (2 if k_cache.dtype == np.uint8 else 1)
    shapes: list[Shaped] = [((batch, queries, heads, value_dim), query.dtype)]
    if with_lse:
        shapes.append(((batch, heads, queries), wide_dtype(query.dtype)))
    results, caches = _call("flash_attention_with_kvcache", words, first, arrays, shapes, appends)
    out, *lse = (x[0] if packed else x for x in results)
    return KVCacheResult(_rotated(out) if rotate else out, lse[0] if with_lse else None, **caches)


def write(given: Given) -> Any:
    """Write, given the arguments of `attnmask.write_kvcache` by name, some of them traced."""
    given = dict(given) | {
        name: jax.numpy.asarray(given[name]) for name in _FIRST[1:] if given[name] is not None
    }
    if known_flag(given.pop("rotate"), "rotate"):
        given["key"], given["value"] = rotated_tokens(given["key"], given["value"], _rotated)
    known = {name: _known(name, x, given) for name, x in given.items()}
    slots = integer_array(known.pop("slot_mapping"), "slot_mapping")
    _core.check_write_kvcache(*[*(known[name] for name in _FIRST[1:]), slots])
    first = {name: given[name] for name in _FIRST[1:] if given[name] is not None}
    first |= {name: first[name][None] for name in ("key", "value")}
    arrays = Arrays()
    place = arrays.place(given["slot_mapping"] if is_traced(given["slot_mapping"]) else slots)
    flags = call.flags_of("cache", {name: name in first for name in ("k_scale", "v_scale")})
    words = np.array([call.VERSION, flags, *call.operand_words(place)], np.int64)
    _, caches = _call("write_kvcache", words, first, arrays, [], True)
    return tuple(caches.values())


_HANDLERS = {
    "flash_attention_with_kvcache": "attnmask_flash_kvcache",
    "write_kvcache": "attnmask_write_kvcache",
}


def _call(
    function: str,
    words: NDArray[np.int64],
    first: Mapping[str, jax.Array],
    arrays: Arrays,
    shapes: list[Shaped],
    writes: bool,
) -> tuple[tuple[jax.Array, ...], Arguments]:
    """Return results of these shapes, and the caches and scales as they are after the call."""
    by_token = (*first["k_cache"].shape[:3], 1)
    caches: Arguments = {name: first.get(name) for name in CACHES}
    scales = [
        name
        for name in CACHES[2:]
        if name in first and (first[name].ndim == 5 or first[name].shape == by_token)  # 5: of groups
    ]
    written = [*CACHES[:2], *scales] if writes else []
    results = call.call_handler(
        _HANDLERS[function],
        words,
        [*first.values(), *arrays.taken],
        [*shapes, *((first[name].shape, first[name].dtype) for name in written)],
        f"attnmask.jax.{function} has no gradients: flash_attention has them",
        "sequential",  # each call of a mapped function writes to a cache of its own
        {list(first).index(name): len(shapes) + i for i, name in enumerate(written)},
    )
    return results[: len(shapes)], caches | dict(zip(written, results[len(shapes) :], strict=True))


def _rotated(x: jax.Array) -> jax.Array:
    """Apply `quantize.rotated` in JAX, with the same sums."""
    if not (x.size and x.ndim and is_floating(x.dtype)) or x.shape[-1] & (x.shape[-1] - 1):
        return x
    channels, half = x.shape[-1], 1
    sums = x.astype(wide_dtype(x.dtype))
    while half < channels:
        pairs = sums.reshape(*x.shape[:-1], -1, 2, half)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        sums = jax.numpy.stack([first + second, first - second], axis=-2)
        half *= 2
    scale = sums.dtype.type(1 / math.sqrt(channels))
    return (sums.reshape(x.shape) * scale).astype(x.dtype)


def _words(
    given: Given, known: Given, shape: tuple[int, int, int, int], arrays: Arrays
) -> tuple[NDArray[np.int64], bool]:
    """Return what the handler is told, and whether the logsumexp is wanted. `shape` is that of the queries."""
    batch, queries, heads, channels = shape
    sequences = batch if given["cu_seqlens_q"] is None else len(known["cu_seqlens_q"]) - 1
    before, table = given["cache_seqlens"], given["block_table"]
    rows = known["k_cache"].shape[1]
    keys = _keys(known, rows if table is None else rows * table.shape[1])
    scale, terms, low, high, chunk, with_lse = kvcache.options(
        known["query"], (batch, heads, queries, keys), sequences, channels, dict(known)
    )
    said = {name: given[name] is not None for name in call.WORDS["cache"]} | {"return_lse": with_lse}
    if is_traced(before):
        before = before.reshape(-1)
    elif before is not None:
        before = kvcache.tokens_before(known["cache_seqlens"], sequences)
    if is_traced(table) and table.dtype != np.int32:
        table = jax.numpy.clip(table, -1, min(np.iinfo(table.dtype).max, 2**31 - 1)).astype(np.int32)
    elif table is not None and not is_traced(table):
        table = kvcache.table_of(as_array(known["block_table"], "block_table"), given["block_table"])
    operands = [low, high, chunk or None, before, table]
    for name in ("cu_seqlens_q", "cu_seqlens_k_new"):
        value = given[name]
        if value is not None:
            operands.append(value if is_traced(value) else _core.checked_starts(value, name))

    words = call.first_words(call.flags_of("cache", said), scale)
    for operand in operands:
        words += call.operand_words(arrays.place(operand))
    if said["attention_mask"] or said["bias"]:
        words.append(keys)
    bias = given["bias"][..., : max(keys, 1)] if is_traced(given["bias"]) else given["bias"]
    words += call.term_words(term_operands({**given, "bias": bias}, terms, arrays))
    if given["attention_mask"] is not None:
        nodes = _mask(given["attention_mask"], known["attention_mask"], (batch, heads, queries, keys))
        words += call.mask_words(mapped(nodes, arrays.place))
    return np.array(words, np.int64), with_lse


def _keys(known: Given, capacity: int) -> int:
    """Return how many keys mask and bias have, at most the cache's capacity."""
    mask, bias = known["attention_mask"], known["bias"]
    counts = [capacity]
    if isinstance(mask, MaskInfo):
        counts += [] if mask.kv_len is None else [mask.kv_len]
        mask = None
    for name, value in (("attention_mask", mask), ("bias", bias)):
        array = None if value is None else as_array(value, name)
        if array is not None and array.ndim and array.shape[-1] != 1:
            counts.append(array.shape[-1])
    return min(counts)


def _mask(mask: MaskInfo | AnyArray, known: Any, shape: Shape) -> Program:
    """Return the terms of the mask, which may have more keys."""
    keys = shape[3]
    if isinstance(mask, MaskInfo) and is_traced(mask) and (known.kv_len or 0) > keys:
        raise ValueError(
            f"attention_mask must have at most the {keys} keys that the cache has room for if it is traced, got "
            f"{known.kv_len}; write attention_mask[..., :{keys}] where it is made"
        )
    known = kvcache.cut(known, "attention_mask", keys)
    if isinstance(mask, MaskInfo) and not is_traced(mask):
        mask = known
    return tuple(term for node in mask_nodes(known, shape) for term in mask_terms(mask, node))


def _known(name: str, value: Any, given: Given) -> Any:
    """Return what stands for an argument when types and shapes are checked: itself unless it is traced."""
    if value is None or not is_traced(value):
        return as_array(value, name) if isinstance(value, jax.Array) else value
    if isinstance(value, MaskInfo):
        return mask_like(value)
    if name in ("cu_seqlens_q", "cu_seqlens_k_new"):
        tokens = given["query" if name == "cu_seqlens_q" else "key"]
        return starts_like(value, tokens.shape[0] if getattr(tokens, "ndim", 0) else 0)
    if name == "slot_mapping" and value.dtype.kind in "iu":
        return np.full(value.shape, -1)  # which may occur twice
    return like(value, 1 if name in ("k_scale", "v_scale", "attention_mask") else 0)
