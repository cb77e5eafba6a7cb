"""Attention over a cache as an XLA call that writes new tokens into the cache's memory. Its counterpart is
``csrc/bind/xla/cache.c``.
"""

import math
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from attnmask._attention.arguments import DEFAULTS, LEARNED
from attnmask._attention.problem import mask_nodes
from attnmask._cache import attend as kvcache
from attnmask._cache.quantize import check_tokens_rotate, rotated_tokens
from attnmask._common.arguments import (
    as_array,
    integer_array,
    is_floating,
    wide_dtype,
)
from attnmask._common.loading import _core
from attnmask._common.types import AnyFunction, Arguments, Given
from attnmask._masks.info import MaskInfo
from attnmask._masks.program import Program, Shape, mapped
from attnmask.jax import _call as call
from attnmask.jax._arguments import Arrays, Spec, is_traced, known_flag, mask_terms, term_operands
from attnmask.jax._attention import attended
from attnmask.jax._derivatives import refuse
from attnmask.jax._faces import Call, Writing
from attnmask.jax._gradients import moving
from attnmask.jax._maps import Map
from attnmask.jax._types import AnyArray, AnyByName, ByName, KVCacheResult, Results, Shaped

_FIRST = ("query", "k_cache", "v_cache", "key", "value", "k_scale", "v_scale")  # in the call's order
_NOT_GIVEN = DEFAULTS | {"callback": False}  # to attention without a cache


class _ToCache(Writing):
    """A function that writes new tokens to a cache."""

    rotated: AnyFunction  # returns arrays with rotated tokens

    def __call__(self, given: Arguments) -> Any:
        _check_value(given)
        return super().__call__(given)

    def first(self, arrays: AnyByName) -> AnyByName:
        return {name: arrays[name] for name in _FIRST if name in arrays}

    def traced(self, arrays: AnyByName, static: Arguments, with_all: bool) -> Any:
        rotate = known_flag(static["rotate"], "rotate")
        return super().traced(self.rotated(arrays) if rotate else arrays, static, with_all)

    def written(self, arrays: AnyByName) -> list[str]:
        """Return the caches and the scales of tokens; those of channels stay."""
        if "key" not in arrays:
            return []
        by_token = (*np.shape(arrays["k_cache"])[:3], 1)
        scales = [
            name
            for name in self.states[2:]
            if name in arrays and (arrays[name].ndim == 5 or arrays[name].shape == by_token)  # 5: of groups
        ]
        return [*self.states[:2], *scales]


class Write(_ToCache):
    """The function of `WRITE`."""

    def rotated(self, arrays: AnyByName) -> AnyByName:
        key, value = rotated_tokens(arrays["key"], arrays["value"], _rotated)
        return arrays | {"key": key, "value": value}

    def call(self, arrays: AnyByName, static: Arguments, known: Arguments) -> Call:
        slots, first, more = arrays["slot_mapping"], self.first(arrays), Arrays()
        place = more.place(slots if is_traced(slots) else integer_array(slots, "slot_mapping"))
        flags = call.flags_of("cache", {name: name in first for name in ("k_scale", "v_scale")})
        words = np.array([call.VERSION, flags, *call.operand_words(place)], np.int64)
        first |= {name: first[name][None] for name in ("key", "value")}
        return Call(words, first, more.taken, [], self.written(arrays))


class Attend(_ToCache):
    """The function of `CACHE`."""

    made = KVCacheResult._make
    derivatives = """Where nothing is written to a contiguous cache of floats, `query`, `k_cache` and `v_cache` have the
derivatives that they have in `flash_attention`, and so have learned terms. All else has no gradients."""

    def rotated(self, arrays: AnyByName) -> AnyByName:
        check_tokens_rotate(arrays["query"], arrays["v_cache"])
        tokens = [name for name in ("query", "key", "value") if name in arrays]
        return arrays | {name: _rotated(arrays[name]) for name in tokens}

    def call(self, arrays: AnyByName, static: Arguments, known: Arguments) -> Call:
        given = static | arrays
        packed, first, more = "cu_seqlens_q" in arrays, self.first(arrays), Arrays()
        if packed:
            first["query"] = first["query"][None]
        if packed or "cu_seqlens_k_new" in arrays:
            first |= {name: first[name][None] for name in ("key", "value") if name in first}
        batch, queries, heads, _ = first["query"].shape
        words = _words(given, known, first["query"].shape, more)
        channels = first["v_cache"].shape[3] * (2 if first["v_cache"].dtype == np.uint8 else 1)
        dtype = first["query"].dtype
        shapes: list[Shaped] = [((batch, queries, heads, channels), dtype)]
        if given["return_lse"]:
            shapes.append(((batch, heads, queries), wide_dtype(dtype)))

        def finish(found: Results) -> list[jax.Array]:
            out, *lse = (x[0] if packed else x for x in found)
            return [_rotated(out) if static["rotate"] else out, *lse]

        return Call(words, first, more.taken, shapes, self.written(arrays), finish)

    def found(self, made: Call, given: Arguments) -> Results:
        """Also with derivatives, if there are: those of attention to the keys that each row sees."""
        if self.row.without(given):
            return super().found(made, given)
        traced = {name: x for name, x in given.items() if is_traced(x)}
        learned = made.first | {name: x for name, x in traced.items() if is_floating(x.dtype)}
        fixed = {name: x for name, x in given.items() if name not in learned | traced}

        def compute(residuals: Any, _: ByName) -> Results:
            learned, _, more = residuals
            first = {name: learned[name] for name in made.first}
            return self.handled(made._replace(first=first, more=more), "")

        def forward(spec: Spec, learned: ByName, others: Any, count: int, *more: jax.Array) -> Results:
            first = dict(zip(made.first, (learned[name] for name in LEARNED[:3]), strict=True))
            words = made.words.copy()
            words[1] |= call.WORDS["cache"]["return_lse"] * (count > 1)
            shapes = call.results_like(spec, learned)[: min(count, 2)]
            found = self.handled(Call(words, first, more, shapes, ()), "")
            return found if count < 3 else (*found, call.forward(spec, learned, others, 3)[2])

        def attend(residuals: Any, _: ByName) -> Results:
            learned, others, more = residuals
            return attended(_seen(fixed | others | learned), _NOT_GIVEN, len(made.shapes), more, forward)

        others = {name: x for name, x in traced.items() if name not in learned}
        return tuple(Map(compute, refuse, moving(attend))((learned, others, made.more), {}))


def _seen(given: Given) -> Arguments:
    """Return the arguments of `flash_attention` that have the same result."""
    (batch, queries, *_), tokens = given["query"].shape, given["k_cache"].shape[1]
    seen, lengths = kvcache.as_attention(given), given["cache_seqlens"]
    if lengths is None:
        return seen | {"causal_offset": tokens - queries}
    if is_traced(lengths):
        lengths = jax.numpy.broadcast_to(lengths.reshape(-1).astype(np.int32), batch)
    else:
        lengths = kvcache.tokens_before(lengths, batch)
    keys = np.arange(tokens) < lengths[:, None]
    seen |= {"causal_offset": lengths - queries, "kv_segment_ids": keys.astype(np.int32) - 1}
    return seen | {"q_segment_ids": np.zeros((batch, queries), np.int32)}


def _check_value(given: Given) -> None:
    """Refuse keys alone, which NumPy's functions take where the values are a view of the keys' channels."""
    if given["key"] is None or given["value"] is not None:
        return
    v_cache = jax.numpy.asarray(given["v_cache"])
    channels = v_cache.shape[-1] * (2 if v_cache.dtype == np.uint8 else 1) if v_cache.ndim else 0
    raise ValueError(
        "value must be given with key, got None; arrays in JAX share no memory, so that a latent cache has its values "
        f"in an array of their own: write value=key[..., :{channels}]"
    )


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


def _words(given: Given, known: Given, shape: tuple[int, int, int, int], arrays: Arrays) -> NDArray[np.int64]:
    """Return what the handler is told. `shape` is that of the queries."""
    batch, queries, heads, channels = shape
    sequences = batch if given["cu_seqlens_q"] is None else len(known["cu_seqlens_q"]) - 1
    before, table = given["cache_seqlens"], given["block_table"]
    rows = known["k_cache"].shape[1]
    keys = _keys(known, rows if table is None else rows * np.shape(table)[1])
    prefix = kvcache.prefix_of(given)
    scale, terms, low, high, chunk, _ = kvcache.options(
        known["query"], (batch, heads, queries, keys), sequences, channels, {**given, **known}
    )
    said = {name: given[name] is not None for name in call.WORDS["cache"]} | {
        "return_lse": given["return_lse"],
        "prefix": prefix > 0,
    }
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
    if prefix:
        words.append(prefix)
    if said["attention_mask"] or said["bias"]:
        words.append(keys)
    bias = given["bias"][..., : max(keys, 1)] if is_traced(given["bias"]) else given["bias"]
    words += call.term_words(term_operands({**given, "bias": bias}, terms, arrays))
    if given["attention_mask"] is not None:
        nodes = _mask(given["attention_mask"], known["attention_mask"], (batch, heads, queries, keys))
        words += call.mask_words(mapped(nodes, arrays.place))
    return np.array(words, np.int64)


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
