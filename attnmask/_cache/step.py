"""The next tokens of some sequences of a cache: what `KVCache.step` returns."""

from __future__ import annotations

import array
from collections.abc import Callable, Sequence
from inspect import signature
from itertools import accumulate, islice
from types import TracebackType
from typing import Any, Generic, Literal, NamedTuple, NoReturn, Self, TypeVar, Unpack, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnmask._attention.arguments import (
    ATTENTION_STATISTICS_WITH_KVCACHE,
    FLASH_ATTENTION_WITH_KVCACHE,
    STEP,
    StepCall,
)
from attnmask._attention.weights import AttentionStatistics, Statistic
from attnmask._cache.evict import check_no_distances
from attnmask._cache.flash_attention_with_kvcache import (
    attention_statistics_with_kvcache,
    flash_attention_with_kvcache,
)
from attnmask._common.arguments import as_array, describe, integer_array, per_row, place
from attnmask._common.keywords import taken
from attnmask._common.types import AnyFunction, Arguments, Array

__all__ = ["KVCacheStep", "SequencePages", "Tokens", "numbers_of", "page_list", "table_of"]

_Given = TypeVar("_Given")
_Found = TypeVar("_Found")


# Arguments that a step passes on itself.
_OF_STEP = ("query", "k_cache", "cache_seqlens", "block_table", "cu_seqlens_q", "k_scale", "rotate")


class SequencePages(NamedTuple):
    """Neither it nor its list changes, so that forks and steps may share the list."""

    pages: array.array[int]
    length: int
    evicted: int = 0  # tokens, which count for positions


def page_list(*numbers: int) -> array.array[int]:
    return array.array("i", numbers)  # of 256 pages, NumPy reads it ten times as fast as a list


def numbers_of(ids: ArrayLike) -> list[int]:
    given = integer_array(ids, "ids")
    if given.ndim != 1:
        raise ValueError(f"ids must be [n], got {describe(given)}")
    numbers: list[int] = given.tolist()
    return numbers


def table_of(lists: list[array.array[int]]) -> NDArray[np.int32]:
    table = np.full((len(lists), max(map(len, lists), default=0)), -1, np.int32)
    for row, pages in zip(table, lists, strict=True):
        row[: len(pages)] = pages
    return table


class Tokens(Generic[_Given, _Found]):
    """`KVCacheStep`, by the kinds of arrays that it takes and returns."""

    _given: Callable[[Any, str], Any] = staticmethod(as_array)
    _with_pages: AnyFunction = staticmethod(flash_attention_with_kvcache)
    _look: AnyFunction = staticmethod(attention_statistics_with_kvcache)

    __slots__ = (
        "_attended",
        "_batched",
        "_begun",
        "_cache",
        "_counts",
        "_evicted",
        "_ids",
        "_layouts",
        "_packed",
        "_replaced",
        "_rows",
        "_taken",
    )

    def __init__(self, cache: Any, ids: ArrayLike, counts: ArrayLike) -> None:
        # The cache is a `KVCache`, whose module imports this one.
        cache._check_no_step()
        self._cache, self._begun = cache, False
        self._attended: set[int] = set()  # the layers that have got their tokens
        self._ids = numbers_of(ids)
        n = len(self._ids)
        if len(set(self._ids)) != n:
            twice = next(number for number in self._ids if self._ids.count(number) > 1)
            raise ValueError(f"ids must be distinct, got {twice} more than once")
        each = per_row(counts, "counts", n, 0, "id", broadcast=False)
        self._counts: list[int] = [each] * n if isinstance(each, int) else each.tolist()
        self._layouts: list[tuple[int, ...]] = [(sum(self._counts),)]  # all axes but heads and channels
        if isinstance(each, int) or len(set(self._counts)) == 1:
            self._layouts.append((n, each if isinstance(each, int) else self._counts[0]))

    def __repr__(self) -> str:
        cache = self._cache
        state = "open" if cache._step is self else "ended" if self._begun else "not begun"
        done = f"{len(self._attended)} of {len(cache.k_pages)} layers attended"
        return f"KVCacheStep(sequences={len(self._ids)}, tokens={sum(self._counts)}, {state}, {done})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a step cannot be copied or pickled; write another cache.step(ids, counts)")

    def __enter__(self) -> Self:
        cache, counts = self._cache, self._counts
        cache._check_no_step()
        if self._begun:
            raise RuntimeError("a step can be used once; write another cache.step(ids, counts)")
        rows = list(map(cache._sequence, self._ids))
        lists, lengths, ends, added, shared = [], [], [], [], []
        for i, ((pages, length, _), more) in enumerate(zip(rows, counts, strict=True)):
            lists.append(pages)
            lengths.append(length)
            ends.append(length + more)
            added.append(-(-(length + more) // cache.page_size) - len(pages))
            if more and length % cache.page_size and cache._owners[pages[-1]] > 1:
                shared.append(i)
        copying = cache._who_copies(rows, shared) if shared else []
        needed = sum(added) + len(copying)
        self._taken = cache._next_free(needed) if needed else []

        pool, self._replaced = iter(self._taken), []
        for i in copying:
            page = next(pool)
            self._replaced.append(lists[i][-1])
            cache._copy(lists[i][-1], page, lengths[i] % cache.page_size)
            lists[i] = lists[i][:-1] + page_list(page)
        for i, more in enumerate(added):
            if more:
                lists[i] = lists[i] + page_list(*islice(pool, more))

        evicted = [row.evicted for row in rows]
        self._rows, self._evicted = list(map(SequencePages, lists, ends, evicted)), any(evicted)
        self._batched: Arguments = {
            "cache_seqlens": cache._result(np.array(lengths, np.int32)),
            "block_table": cache._result(table_of(lists)),
        }
        starts = cache._result(np.array([0, *accumulate(counts)], np.int32))
        self._packed = self._batched | {"cu_seqlens_q": starts}
        if needed:
            cache._take(self._taken)
        cache._step, self._begun = self, True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        cache = self._cache
        cache._step = None
        layers = range(len(cache.k_pages) if kind is None and any(self._counts) else 0)
        missing = sorted(set(layers) - self._attended)
        if kind is None and not missing:
            cache._sequences.update(zip(self._ids, self._rows, strict=True))
            if self._replaced:
                cache._give_back(self._replaced)
            return
        cache._give_back(self._taken)
        if missing:
            which = f"{'layer' if len(missing) == 1 else 'layers'} {', '.join(map(str, missing))}"
            raise RuntimeError(
                f"every layer must be attended in a step, but {len(missing)} of {len(layers)} were not ({which}); "
                "the cache is unchanged"
            )

    @overload
    def attend(
        self,
        layer: int,
        query: _Given,
        key: _Given,
        value: _Given | None = None,
        **more: Unpack[StepCall[Literal[False]]],
    ) -> _Found: ...
    @overload
    def attend(
        self,
        layer: int,
        query: _Given,
        key: _Given,
        value: _Given | None = None,
        **more: Unpack[StepCall[Literal[True]]],
    ) -> tuple[_Found, _Found]: ...
    @overload
    def attend(
        self,
        layer: int,
        query: _Given,
        key: _Given,
        value: _Given | None = None,
        **more: Unpack[StepCall[bool]],
    ) -> _Found | tuple[_Found, _Found]: ...
    @STEP
    def attend(
        self,
        layer: int,
        query: _Given,
        key: _Given,
        value: _Given | None = None,
        *,
        return_lse: bool = False,
        **more: Any,
    ) -> _Found | tuple[_Found, _Found]:
        """Append keys and values to one layer and attend to all its tokens, with `flash_attention_with_kvcache`.

        Parameters
        ----------
        layer : int
        query : array_like, shape [total, H, D], or [n, c, H, D] where all counts are c
            The tokens of the step's first sequence, then those of the second, and so on.
        key : array_like, shape [total, Hkv, D] or [n, c, Hkv, D]
        value : array_like, shape [total, Hkv, Dv] or [n, c, Hkv, Dv]
            None in a latent cache, whose keys contain the values.
        return_lse : bool
        **more
            The options of `flash_attention_with_kvcache`, `attention_mask`, `out` and `prefix`; all mean the same.

        Returns
        -------
        out : ndarray, shape [total, H, Dv] or [n, c, H, Dv]
            Same type as the query.
        lse : ndarray, shape [H, total] or [n, H, c]
            Only with `return_lse`.

        Examples
        --------
        >>> import numpy as np, attnmask
        >>> cache = attnmask.KVCache(1, 8, pages=16, dtype="float64", value_head_dim=1)
        >>> a, zeros = cache.new_sequence(), np.zeros((3, 1, 8))  # all keys have the same weight
        >>> with cache.step([a], 3) as step:
        ...     step.attend(0, zeros, zeros, np.array([0.0, 1.0, 2.0]).reshape(3, 1, 1)).ravel()
        array([0. , 0.5, 1. ])
        >>> with cache.step([a], 1) as step:
        ...     step.attend(0, zeros[:1], zeros[:1], np.array([[[5.0]]])).ravel()
        array([2.])
        """
        if not more.keys() <= STEP.defaults.keys():
            more = _taken(more)
        cache, index = self._layer(layer, "attend", more)
        q, k = self._tokens(query, "query"), self._tokens(key, "key")
        if value is None and not cache.latent:
            raise TypeError("value must be given, as the cache is not latent, got None")
        v = None if value is None else self._tokens(value, "value")
        places = self._packed if q.ndim == 3 else self._batched
        result: _Found | tuple[_Found, _Found] = self._with_pages(
            q,
            cache.k_pages[index],
            cache.v_pages[index],
            k,
            v,
            k_scale=None if cache.k_scales is None else cache.k_scales[index],
            v_scale=None if cache.v_scales is None else cache.v_scales[index],
            rotate=cache.rotate,
            return_lse=return_lse,
            **places,
            **more,
        )
        self._attended.add(index)
        return result

    def statistics(
        self, layer: int, query: _Given, *, of: Statistic | Sequence[Statistic], **more: Any
    ) -> AttentionStatistics:
        """Return what the weights of one layer tell, with `attention_statistics_with_kvcache`.

        Call it after `attend`, which appends the keys of the layer.

        Parameters
        ----------
        layer : int
        query : array_like, shape [total, H, D] or [n, c, H, D]
            As in `attend`.
        of, **more
            The options of `attention_statistics_with_kvcache` and `attention_mask`; all mean the same.

        Returns
        -------
        AttentionStatistics

        Examples
        --------
        >>> import numpy as np, attnmask
        >>> cache = attnmask.KVCache(1, 8, pages=16, dtype="float32")
        >>> a, x = cache.new_sequence(), np.zeros((3, 1, 8), np.float32)
        >>> with cache.step([a], 3) as step:
        ...     out = step.attend(0, x, x, x)
        ...     found = step.statistics(0, x, of="key_sum")
        >>> found.key_sum.round(2)  # 1 + 1/2 + 1/3, ...
        array([[[1.83, 0.83, 0.33]]], dtype=float32)
        """
        known = ATTENTION_STATISTICS_WITH_KVCACHE.names
        unknown = [name for name in more if name not in known or name in _OF_STEP]
        if unknown:
            more = taken("statistics", more, [name for name in known if name not in _OF_STEP])
        cache, index = self._layer(layer, "statistics", more)
        if index not in self._attended:
            raise RuntimeError(
                f"step.statistics must follow step.attend of layer {index}, which appends its keys"
            )
        q = self._tokens(query, "query")
        places = self._packed if q.ndim == 3 else self._batched
        lengths = cache._result(np.array([row.length for row in self._rows], np.int32))
        found: AttentionStatistics = self._look(
            q,
            cache.k_pages[index],
            of=of,
            k_scale=None if cache.k_scales is None else cache.k_scales[index],
            rotate=cache.rotate,
            **places | {"cache_seqlens": lengths},
            **more,
        )
        return found

    def _layer(self, layer: int, call: str, more: Arguments) -> tuple[Any, int]:
        """Return the cache of an open step, and the index of a layer, for a call with some options."""
        cache = self._cache
        if cache._step is not self:
            raise RuntimeError(f"step.{call} must be called inside the with block of its step")
        if self._evicted:
            check_no_distances(more)
        return cache, place(layer, "layer", len(cache.k_pages))

    def _tokens(self, value: _Given, name: str) -> Any:
        given = self._given(value, name)
        shape = given.shape[:-2]
        if shape not in self._layouts and not any(map(_equal, self._layouts, [shape, shape])):
            expected = " or ".join(
                f"[{', '.join(map(str, layout))}, heads, head_dim]" for layout in self._layouts
            )
            raise ValueError(f"{name} must be {expected}, got {describe(given)}")
        return given


class KVCacheStep(Tokens[ArrayLike, Array]):
    """The next tokens of some sequences of a `KVCache`, as returned by `KVCache.step`.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> cache = attnmask.KVCache(1, 8, pages=16, dtype="float32")
    >>> ids, x = [cache.new_sequence() for _ in range(3)], np.ones((3, 2, 1, 8), np.float32)
    >>> with cache.step(ids, 2) as step:
    ...     step.attend(0, x, x, x).shape
    (3, 2, 1, 8)
    """

    __slots__ = ()


def _equal(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Compare sizes number by number, as a graph needs it, where they may be symbols."""
    return len(one) == len(other) and all(a == b for a, b in zip(one, other, strict=True))


def _taken(more: Arguments) -> Arguments:
    """Return arguments under the names of `KVCacheStep.attend`, or refuse what it does not take."""
    for name in more:
        if name in FLASH_ATTENTION_WITH_KVCACHE.names and name not in STEP.defaults:
            raise TypeError(
                f"attend() got an unexpected keyword argument {name!r}; leave it out, as the cache and the step have it"
            )
    return taken("attend", more, signature(KVCacheStep.attend).parameters)
