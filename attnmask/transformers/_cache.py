"""A transformers cache whose keys and values are in the pages of a `KVCache`.

A model passes each layer's new keys and values to ``update`` and gets two ``PagedTensor`` back. This package's
attention appends the new ones and reads the pages in place, in one call. If anything else computes with these tensors,
they become all keys or values, copied end to end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from attnmask._cache.evict import check_no_distances
from attnmask._cache.flash_attention_with_kvcache import flash_attention_with_kvcache
from attnmask._cache.pages import KVCache, KVCacheStep
from attnmask._cache.quantize import dequantized, rotated
from attnmask._common.arguments import check_form, describe, suit_hint
from attnmask._common.keywords import advises
from attnmask._common.types import Arguments, Array
from attnmask._sequences.packed import prepare_position_ids
from attnmask.torch._described import DescribedTensor
from attnmask.torch._import import torch
from attnmask.torch._operators import check_no_gradient, in_place
from attnmask.torch._states import to_tensor
from attnmask.transformers._masks import CACHE, transformers

from transformers.cache_utils import (  # isort: skip
    Cache,
    CacheLayerMixin,
)

__all__ = ["PagedCache", "PagedTensor"]

_KINDS = ("full_attention", "sliding_attention", "chunked_attention")
_NAME, _TRAINED = "flash_attention_with_kvcache", "flash_attention"


@dataclass
class Pages:
    """The pages of one layer's keys and values, and new ones that the first call appends."""

    step: _Step
    held: Arguments  # the pages, their scales, and whether they are rotated
    new: Arguments  # key and value; empty when they have been appended

    def _attend(self, query: Array, **more: Any) -> Array:
        places = self.step.before if self.new else self.step.after
        out = flash_attention_with_kvcache(query, **self.new, **self.held, **places, **more)
        self.new = {}
        return out

    def append(self) -> None:
        """Append with queries of no heads, if nothing has attended."""
        if self.new:
            self._attend(self.new["key"][..., :0, :])

    @torch.compiler.disable
    def attend(self, query: torch.Tensor, **more: object) -> torch.Tensor:
        """Attend with queries [B, H, Tq, D], which are the last tokens; return [B, Tq, H, Dv]."""
        tensors, given = {"query": query}, {"causal": False} | more
        for name, x in more.items():
            if isinstance(x, torch.Tensor):
                tensors[name], given[name] = x, x.detach()
            elif name in ("causal_offset", "q_segment_ids"):  # pages say it
                del given[name]
        check_no_gradient(tensors, _NAME, _TRAINED)
        if self.step._evicted:
            check_no_distances(given)
        rows, packed = in_place(query.detach().transpose(1, 2), "query"), self.step.packed
        try:
            out = self._attend(rows[0] if packed else rows, **given)
        except (TypeError, ValueError) as error:
            suit_hint(error, tensors)
            raise
        return to_tensor(out[None] if packed else out)

    def gathered(self, side: str) -> Array:
        """Return keys or values, [B, T, Hkv, D]."""
        if self.step.packed:
            raise RuntimeError('the model must have attn_implementation="attnmask" in a step of a PagedCache')
        self.append()
        table = self.step.after["block_table"]

        def of(pages: Array) -> Array:
            rows = pages[table]
            joined: Array = rows.reshape(len(table), -1, *rows.shape[3:])
            return joined[:, : self.step.longest]

        scale = self.held[f"{side}_scale"]
        wide = dequantized(of(self.held[f"{side}_cache"]), None if scale is None else of(scale))
        return rotated(wide) if self.held["rotate"] else wide


_FORM = 1  # of pickles


class PagedTensor(DescribedTensor):
    """Keys or values of a layer of a `PagedCache` where a model expects a tensor [B, Hkv, T, D]."""

    pages: Pages
    side: str

    def __new__(cls, pages: Pages, side: str, shape: Sequence[int], dtype: torch.dtype) -> PagedTensor:
        return cls.without_memory(tuple(shape), dtype, pages=pages, side=side)

    def __repr__(self, **_: object) -> str:  # type: ignore[override, unused-ignore]
        return f"PagedTensor({self.side}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def written_out(self) -> torch.Tensor:
        return to_tensor(self.pages.gathered(self.side)).to(self.dtype).transpose(1, 2)


class _Step(KVCacheStep):
    """One call of the model."""

    __slots__ = ("after", "before", "layers", "longest", "packed")

    def __init__(self, kv: KVCache, ids: ArrayLike, counts: ArrayLike, packed: bool) -> None:
        super().__init__(kv, ids, counts)
        self.packed = packed
        self.layers: dict[int, Pages] = {}  # those that have got their keys and values

    def __enter__(self) -> Self:
        """Note where tokens are before and after they are appended."""
        super().__enter__()
        self.before = self._packed if self.packed else self._batched
        ends = self.before["cache_seqlens"] + np.array(self._counts, np.int32)
        self.after = self.before | {"cache_seqlens": ends}
        self.longest = int(ends.max(initial=0))
        return self

    def arrays(self, given: dict[str, torch.Tensor], sizes: dict[str, tuple[int, int]]) -> Arguments:
        """Return new keys and values [B, H, T, D] as arrays [B, T, H, D], or [total, H, D] in a packed step. `sizes`
        are the heads and channels of their cache.
        """
        layout, found = self._layouts[0 if self.packed else 1], {}
        for name, x in given.items():
            rows = in_place(x.detach().transpose(1, 2), name)
            tokens = found[name] = rows[0] if self.packed else rows
            if tokens.shape != layout + sizes[name]:
                self._tokens(tokens, name)
                expected = "{} heads of {} channels as its cache".format(*sizes[name])
                raise ValueError(f"{name} must have {expected}, got {describe(tokens)}")
        return found


class _Store:
    """What the layers of a cache share."""

    def __init__(self, kv: KVCache) -> None:
        self.kv = kv
        held = {"k_cache": kv.k_pages, "v_cache": kv.v_pages, "k_scale": kv.k_scales, "v_scale": kv.v_scales}
        self.held = [  # of each layer, what attention is given
            {name: None if x is None else x[layer] for name, x in held.items()} | {"rotate": kv.rotate}
            for layer in range(len(kv.k_pages))
        ]
        pages = {"key": kv.k_pages, "value": kv.v_pages}
        self.sizes = {name: (x.shape[-2], kv._format.channels(x)) for name, x in pages.items()}
        self.rows: list[int] = []  # the sequences of a batch, if it is one
        self.now: _Step | None = None  # which is open
        self.last: _Step | None = None

    def begin(self, ids: ArrayLike, counts: ArrayLike, packed: bool) -> _Step:
        self.append_all()
        self.now = self.last = _Step(self.kv, ids, counts, packed).__enter__()
        return self.now

    def append_all(self) -> None:
        """Append what nothing has attended to. Pages may be shared, copied and freed afterwards."""
        if self.last is not None:
            for pages in self.last.layers.values():
                if pages.new:
                    pages.append()

    def end(self, error: BaseException | None = None) -> None:
        """End a step: sequences are longer, or unchanged after an error."""
        if self.now is not None:
            step, self.now = self.now, None
            if error is not None:
                self.last = None
            step.__exit__(None if error is None else type(error), error, None)

    def length(self, layer: int) -> int:
        """Return the length of all rows. In a packed step, sequences are described as if each began with it."""
        now = self.now
        if now is not None and now.packed:
            return 0
        there = self.kv._sequence(self.rows[0]).length if self.rows else 0
        return there + (now._counts[0] if now is not None and layer in now.layers else 0)

    def check_complete(self) -> None:
        if self.now is not None and self.now.packed:
            raise RuntimeError("the sequences of a batch cannot be changed inside a step")
        if self.now is not None:
            raise RuntimeError(
                f"the last call of the model has appended to {len(self.now.layers)} of {len(self.held)} layers: "
                "reset() the cache"
            )
        self.append_all()

    def free(self) -> None:
        for row in self.rows:
            self.kv.free(row)
        self.rows, self.last = [], None

    def begin_rows(self, count: int, tokens: int) -> _Step:
        made = not self.rows
        if made:
            self.rows = [self.kv.new_sequence() for _ in range(count)]
        try:
            if len(self.rows) != count:
                raise ValueError(f"the cache has {len(self.rows)} rows, not {count}: call reset()")
            if any(self.kv._sequence(row).evicted for row in self.rows):
                raise ValueError("sequences with evicted tokens must be in a step, not rows of a batch")
            return self.begin(self.rows, tokens, packed=False)
        except BaseException:
            if made:
                self.free()
            raise

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> Pages:
        given = {"key": key, "value": value}
        check_no_gradient(given, _NAME, _TRAINED)
        now = self.now or self.begin_rows(key.shape[0], key.shape[2])
        if layer in now.layers and not now.packed:
            self.check_complete()
        try:
            if layer in now.layers:
                raise RuntimeError("the model must be called once in a step")
            if now.packed and key.shape[0] != 1:
                raise ValueError(f"tokens must be [1, total] in a step, got {key.shape[0]} rows")
            new = now.arrays(given, self.sizes)
        except BaseException as error:
            if not now.packed:  # the block of a step ends it itself
                self.end(error)
                if not self.length(0):
                    self.free()
            raise
        pages = now.layers[layer] = Pages(now, self.held[layer], new)
        now._attended.add(layer)  # which it is by `append_all` at the latest
        if len(now.layers) == len(self.held) and not now.packed:
            self.end()
        return pages


class _PagedLayer(CacheLayerMixin):
    """One layer, as transformers wants it. All tokens are kept, also those before a window."""

    supports_early_init = False
    is_croppable = True

    def __init__(self, store: _Store, index: int) -> None:
        super().__init__()
        self.is_initialized = True
        self._store, self._index = store, index

    def lazy_initialization(self, *_: object) -> None:
        pass

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pages = self._store.append(self._index, key_states, value_states)
        tokens = key_states.shape[2] if pages.step.packed else pages.step.longest
        k, v = [*key_states.shape], [*value_states.shape]
        k[2] = v[2] = tokens
        return PagedTensor(pages, "k", k, key_states.dtype), PagedTensor(pages, "v", v, value_states.dtype)

    @torch.compiler.disable
    def get_seq_length(self) -> int:
        return self._store.length(self._index)

    @torch.compiler.disable
    def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int]:
        # The first versions of transformers give the places of the queries.
        queries = query_length if isinstance(query_length, int) else len(query_length)
        return self.get_seq_length() + queries, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # as the first versions call it


class PagedCache(Cache):
    """A transformers cache on pages.

    ::

        cache = attnmask.transformers.PagedCache(model.config, pages=512)
        model.generate(..., past_key_values=cache)  # cache=cache in later versions of transformers

    With ``attn_implementation="attnmask"``, attention reads the pages in place. Beams share pages. A `step` computes
    sequences of any lengths together, without padding.

    Parameters
    ----------
    config : PreTrainedConfig
        The model's. All its layers must be attention layers with keys of the same shape.
    pages, page_size : int
        As in `attnmask.KVCache`; all memory is allocated when the cache is made.
    dtype : dtype or str, optional
        float16, bfloat16, float32, float64, int8, float8_e4m3fn, float8_e5m2 or int4; defaults to the
        model's.
    group, rotate
        As in `attnmask.KVCache`.

    Attributes
    ----------
    kv : KVCache
        Makes the sequences of steps (``kv.new_sequence()``), forks, truncates and frees them.

    Examples
    --------
    >>> import torch
    >>> import attnmask.transformers
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=9
    ... )
    >>> attnmask.transformers.register()
    >>> model = LlamaForCausalLM._from_config(config, attn_implementation="attnmask").eval()
    >>> cache = attnmask.transformers.PagedCache(model.config, pages=16, page_size=16)
    >>> sequence = cache.kv.new_sequence()
    >>> with torch.no_grad(), cache.step([sequence], [3]) as inputs:
    ...     logits = model(torch.tensor([[3, 1, 4]]), **inputs).logits
    >>> logits.shape, cache.kv.lengths([sequence])
    (torch.Size([1, 3, 9]), array([3], dtype=int32))
    """

    @advises
    def __init__(
        self,
        config: Any,
        *,
        pages: int,
        page_size: int = 64,
        dtype: Any = None,
        group: int | None = None,
        rotate: bool = False,
    ) -> None:
        if not isinstance(config, transformers.PreTrainedConfig):
            raise TypeError(f"config must be a model's config, got {describe(config)}")
        decoder = config.get_text_config(decoder=True)
        layers, heads = decoder.num_hidden_layers, decoder.num_attention_heads
        if config.is_encoder_decoder:  # T5's name for them
            layers = getattr(decoder, "num_decoder_layers", layers)
        if getattr(decoder, "kv_lora_rank", None):
            raise ValueError("config must have keys per head, got latent attention")
        for kind in getattr(decoder, "layer_types", None) or ():
            if kind not in _KINDS:
                raise ValueError(f"config must have only attention layers, got {kind!r:.200}")
        if dtype is None:
            dtype = decoder.dtype or torch.get_default_dtype()
        writers = layers - (getattr(decoder, "num_kv_shared_layers", None) or 0)  # the others read their keys
        kv = KVCache(
            getattr(decoder, "num_key_value_heads", None) or heads,
            getattr(decoder, "head_dim", None) or decoder.hidden_size // heads,
            layers=writers,
            pages=pages,
            page_size=page_size,
            dtype=dtype,
            group=group,
            rotate=rotate,
        )
        self._fill(_Store(kv), layers)

    def _fill(self, store: _Store, layers: int) -> None:
        self._store = store
        super().__init__(layers=[_PagedLayer(store, index) for index in range(layers)])

    def __getstate__(self) -> Arguments:
        """Return the state for copies and pickles, which have all tokens and no step."""
        store = self._store
        store.check_complete()
        more = {name: value for name, value in vars(self).items() if name not in ("_store", "layers")}
        held = {"kv": store.kv, "writers": len(store.held), "rows": store.rows, "layers": len(self.layers)}
        return {"version": _FORM, "more": more, **held}

    def __setstate__(self, state: Arguments) -> None:
        check_form(state, _FORM, "the PagedCache")
        store = _Store(state["kv"])
        store.rows = list(state["rows"])
        self._fill(store, state["layers"])
        self.__dict__.update(state["more"])

    def __repr__(self) -> str:
        return f"PagedCache(layers={len(self.layers)}, rows={len(self._store.rows)}, kv={self.kv!r})"

    @property
    def kv(self) -> KVCache:
        """The pages.

        Examples
        --------
        >>> import attnmask.transformers
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
        >>> attnmask.transformers.PagedCache(config, pages=16).kv.free_pages
        16
        """
        return self._store.kv

    @contextmanager
    def step(self, ids: ArrayLike, counts: ArrayLike) -> Iterator[Arguments]:
        """Begin a step: the next tokens of some sequences of `kv`, in one row without padding.

        Call the model once inside the block. When the block ends, the sequences are longer; if it raises, they are
        unchanged. See `KVCache.step` for more.

        Parameters
        ----------
        ids : array_like of integers, shape [n]
        counts : int or array_like of integers, shape [n]
            The number of tokens each sequence gets.

        Yields
        ------
        dict
            Arguments for the model: token positions and the cache. The model takes tokens ``[1, total]`` and returns
            ``[1, total, …]``: those of the first sequence, then those of the second, and so on. Masks are the model's
            own, causal ones and windows.

        Examples
        --------
        >>> import torch
        >>> import attnmask.transformers
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=9
        ... )
        >>> attnmask.transformers.register()
        >>> model = LlamaForCausalLM._from_config(config, attn_implementation="attnmask").eval()
        >>> cache = attnmask.transformers.PagedCache(model.config, pages=16, page_size=16)
        >>> a, b = cache.kv.new_sequence(), cache.kv.new_sequence()
        >>> with torch.no_grad(), cache.step([a], [3]) as inputs:
        ...     logits = model(torch.tensor([[3, 1, 4]]), **inputs).logits
        >>> with torch.no_grad(), cache.step([a, b], [1, 2]) as inputs:  # b joins
        ...     logits = model(torch.tensor([[1, 5, 2]]), **inputs).logits
        >>> inputs["position_ids"]
        tensor([[3, 0, 1]])
        >>> cache.kv.lengths([a, b])
        array([4, 2], dtype=int32)
        """
        store = self._store
        store.check_complete()
        now = store.begin(ids, counts, packed=True)
        begins = np.repeat(store.kv.positions(now._ids), now._counts)
        positions = prepare_position_ids(now.before["cu_seqlens_q"]) + begins
        try:
            yield {"position_ids": torch.from_numpy(positions.astype(np.int64))[None], CACHE: self}
            if len(now.layers) != len(store.held):
                raise RuntimeError(
                    f"the model must be called in a step, with its arguments: {len(now.layers)} of "
                    f"{len(store.held)} layers have appended"
                )
            store.append_all()
        except BaseException as error:
            store.end(error)
            raise
        store.end()

    def reset(self) -> None:
        """Remove all batch rows, also after a failed model call.

        Examples
        --------
        >>> import torch
        >>> import attnmask.transformers
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
        >>> cache, x = attnmask.transformers.PagedCache(config, pages=8, page_size=4), torch.ones(2, 2, 6, 16)
        >>> keys, values = cache.update(x, x, 0)
        >>> cache.reset()
        >>> cache.get_seq_length(), cache.kv.free_pages
        (0, 8)
        """
        store = self._store
        if store.now is not None and store.now.packed:
            store.check_complete()
        store.end(RuntimeError())
        store.free()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens of all rows.

        Parameters
        ----------
        tokens_to_remove : int
            Negative: ``-3`` removes three tokens. Positive: the number of tokens to keep, as in the first versions of
            transformers.

        Examples
        --------
        >>> import torch
        >>> import attnmask.transformers
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
        >>> cache, x = attnmask.transformers.PagedCache(config, pages=8, page_size=4), torch.ones(2, 2, 6, 16)
        >>> keys, values = cache.update(x, x, 0)
        >>> cache.crop(-3)
        >>> cache.get_seq_length()
        3
        """
        store = self._store
        store.check_complete()
        there = store.length(0)
        keep = min(there, tokens_to_remove) if tokens_to_remove > 0 else max(0, there + tokens_to_remove)
        for row in store.rows:
            store.kv.truncate(row, keep)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Select rows as `batch_select_indices` does, for beam search.

        Parameters
        ----------
        beam_idx : Tensor of integers
            The old row that each new row continues.

        Examples
        --------
        >>> import torch
        >>> import attnmask.transformers
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
        >>> cache, x = attnmask.transformers.PagedCache(config, pages=8, page_size=4), torch.ones(2, 2, 6, 16)
        >>> keys, values = cache.update(x, x, 0)
        >>> cache.reorder_cache(torch.tensor([1, 1]))  # which share pages
        >>> cache.kv.free_pages
        6
        """
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch row; the copies share pages.

        Parameters
        ----------
        repeats : int

        Examples
        --------
        >>> import torch
        >>> import attnmask.transformers
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
        >>> cache, x = attnmask.transformers.PagedCache(config, pages=8, page_size=4), torch.ones(2, 2, 6, 16)
        >>> keys, values = cache.update(x, x, 0)
        >>> cache.batch_repeat_interleave(3)
        >>> cache.kv.free_pages
        4
        """
        rows = range(len(self._store.rows))
        self.batch_select_indices([row for row in rows for _ in range(repeats)])

    def batch_select_indices(self, indices: Sequence[int] | torch.Tensor) -> None:
        """Keep only the chosen batch rows; rows chosen more than once share pages.

        Parameters
        ----------
        indices : Tensor of integers, or of bools for each row

        Examples
        --------
        >>> import torch
        >>> import attnmask.transformers
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
        >>> cache, x = attnmask.transformers.PagedCache(config, pages=8, page_size=4), torch.ones(2, 2, 6, 16)
        >>> keys, values = cache.update(x, x, 0)
        >>> cache.batch_select_indices(torch.tensor([0]))
        >>> cache.kv.free_pages
        6
        """
        store = self._store
        store.check_complete()
        rows = np.arange(len(store.rows))[np.asarray(indices)].tolist()
        if rows == list(range(len(store.rows))):
            return
        chosen = [store.kv.fork(store.rows[row]) for row in rows]
        store.free()
        store.rows = chosen
