"""Continuous batching in transformers (``generate_batch``), whose cache has pages of its own.

The first versions of 5 look up ``paged|name``, whose function has to update that cache. Later ones know which names to
let through, and `let_through` adds this package's; the last ones update the cache before they call attention.
"""

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from attnmask._common.types import AnyFunction, Arguments
from attnmask.torch import flash_attention_with_kvcache
from attnmask.torch._import import torch
from attnmask.transformers._masks import transformers

__all__ = ["PREFIX", "attend_to_pages", "let_through", "put_back", "to_the_end", "updated"]

# The prefix of names in the first versions; None in later ones.
PREFIX = "paged|" if "paged|sdpa" in transformers.AttentionInterface._global_mapping else None


def updated(
    module: Any, key: torch.Tensor, value: torch.Tensor, starts: Any, more: Arguments
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Arguments]:
    """Update the cache where models leave that to attention; return all keys and values, and the starts of keys.

    `more` are the other arguments of attention, to which the cache may add its pages.
    """
    cache, more = more["cache"], more | {"cu_seq_lens_k": starts}
    if "kwargs" in inspect.signature(cache.update).parameters:
        key, value = cache.update(key, value, module.layer_idx, kwargs=more)
        return key, value, more.pop("cu_seq_lens_k"), more
    if isinstance(starts, dict):
        starts = starts["sliding_attention" if getattr(module, "sliding_window", None) else "full_attention"]
    places = {name: more[name] for name in ("read_index", "write_index")}
    key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, **places)
    return key.transpose(0, 1)[None], value.transpose(0, 1)[None], starts, more


def to_the_end(starts: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the starts of sequences with one more, which ends with these tokens [1, H, T, D]."""
    return torch.nn.functional.pad(starts, (0, 1), value=tokens.shape[2])


@torch.compiler.disable
def attend_to_pages(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, more: Arguments, given: Arguments
) -> torch.Tensor:
    """Write the new token of each sequence to its pages, and attend to these in place.

    `query`, `key` and `value` are [1, H, sequences, D]; `given` are arguments of `flash_attention`. `k_cache` and
    `v_cache` are overlapping views of one buffer, which no function of caches writes to, so it is written here.
    """
    lengths, table = given.pop("cum_seqlens_k").diff(), more["block_table"]
    del given["cum_seqlens_q"], given["causal_offset"]
    query, key, value = (x.permute(2, 0, 1, 3) for x in (query, key, value))
    pages = more["k_cache"], more["v_cache"]
    rows = lengths.nonzero()[:, 0]  # the others are padding
    last, size = lengths[rows] - 1, pages[0].shape[1]
    place = table[rows, last // size], last % size
    for x, new in zip(pages, (key, value), strict=True):
        x[place] = new[rows, 0]
    out = flash_attention_with_kvcache(query, *pages, block_table=table, cache_seqlens=lengths, **given)
    return out.transpose(0, 1)


def _keep(switch: AnyFunction, names: Collection[str], _: Any) -> AnyFunction:
    """A manager leaves a model's attention as it is."""

    def unless_ours(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if model.config._attn_implementation not in names:
            switch(self, model, *args, **kwargs)

    return unless_ours


def _with_pages(ensure: AnyFunction, names: Collection[str], module: Any) -> AnyFunction:
    """Steps of one token per sequence hand over the pages themselves, where all layers have them."""

    def unless_ours(config: Any, cb_config: Any, *args: Any, **kwargs: Any) -> None:
        kinds = set(module.group_layers_by_attn_type(config))
        if config._attn_implementation not in names or kinds != {"full_attention"}:
            ensure(config, cb_config, *args, **kwargs)

    return unless_ours


class _Gate(NamedTuple):
    """A function of transformers that asks for the name of an implementation."""

    module: str
    owner: str | None  # the class it is a method of
    name: str
    widen: Callable[[AnyFunction, Collection[str], Any], AnyFunction]


_GATES = (
    _Gate("continuous_api", "ContinuousBatchingManager", "switch_to_cb_friendly_attn", _keep),
    _Gate("initialization", None, "ensure_decode_fast_path_is_available", _with_pages),
)


def _owners() -> list[tuple[_Gate, Any, Any]]:
    from transformers.generation import continuous_batching

    modules = [(gate, getattr(continuous_batching, gate.module)) for gate in _GATES]
    return [(gate, module, getattr(module, gate.owner) if gate.owner else module) for gate, module in modules]


def let_through(names: Collection[str]) -> None:
    """Let ``generate_batch`` take models whose attention has one of these names, now or later."""
    if PREFIX is not None:
        return
    for gate, module, owner in _owners():
        original = getattr(owner, gate.name)
        if not hasattr(original, "attnmask_replaces"):
            widened: Any = functools.wraps(original)(gate.widen(original, names, module))
            widened.attnmask_replaces = original
            setattr(owner, gate.name, widened)


def put_back() -> None:
    """Undo `let_through`."""
    if PREFIX is not None:
        return
    for gate, _, owner in _owners():
        original = getattr(owner, gate.name)
        setattr(owner, gate.name, getattr(original, "attnmask_replaces", original))
