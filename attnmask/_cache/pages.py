"""KV caches for decoding: pages that many sequences share, and 8-bit numbers.

A sequence is a list of pages; the last one may be partly full. Forks share pages, and writing to a shared page copies
it first::

    page_size 4         a of 6 tokens       b = fork(a)         one more token for b

                        a  [0 1 2 3] p0     a  p0 p1            a  p0 p1
                           [4 5 . .] p1     b  p0 p1            b  p0 p2  [4 5 6 .]
"""

from __future__ import annotations

import array
import math
from collections.abc import Callable
from inspect import signature
from itertools import accumulate, islice
from types import TracebackType
from typing import Any, Generic, Literal, NamedTuple, NoReturn, Self, TypeVar, Unpack, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from attnmask._attention.arguments import FLASH_ATTENTION_WITH_KVCACHE, STEP, StepCall
from attnmask._cache.flash_attention_with_kvcache import flash_attention_with_kvcache
from attnmask._cache.quantize import Format, check_rotates, format_of
from attnmask._common.arguments import (
    allocate,
    as_array,
    check_form,
    describe,
    flag,
    integer,
    integer_array,
    per_row,
    place,
)
from attnmask._common.keywords import advises, reject_unknown
from attnmask._common.types import AnyFunction, Arguments, Array

__all__ = ["KVCache", "KVCacheStep"]

_Given = TypeVar("_Given")
_Found = TypeVar("_Found")
_Array = TypeVar("_Array", bound=Array)
_MOST_TOKENS = 2**31 - 1  # lengths are int32
_CACHE_LINE = 64  # bytes


def _zeros_in_lines(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Return `np.zeros` aligned to the lines of the processor's cache, so that rows touch few lines."""
    numbers = np.dtype(dtype)
    size = math.prod(shape) * numbers.itemsize
    memory = np.zeros(size + _CACHE_LINE, np.uint8)
    begin = -memory.__array_interface__["data"][0] % _CACHE_LINE
    return memory[begin : begin + size].view(numbers).reshape(shape)


class _Sequence(NamedTuple):
    """Neither it nor its list changes, so that forks and steps may share the list."""

    pages: array.array[int]
    length: int


def _pages(*numbers: int) -> array.array[int]:
    return array.array("i", numbers)  # of 256 pages, NumPy reads it ten times as fast as a list


def _numbers(ids: ArrayLike) -> list[int]:
    given = integer_array(ids, "ids")
    if given.ndim != 1:
        raise ValueError(f"ids must be [n], got {describe(given)}")
    numbers: list[int] = given.tolist()
    return numbers


def _table(lists: list[array.array[int]]) -> NDArray[np.int32]:
    table = np.full((len(lists), max(map(len, lists), default=0)), -1, np.int32)
    for row, pages in zip(table, lists, strict=True):
        row[: len(pages)] = pages
    return table


_FORM = 1  # of pickles
_HELD = ("k_pages", "v_pages", "k_scales", "v_scales")


class KVCache:
    """Keys and values of many sequences in pages.

    Each step appends the next tokens of some sequences, and their queries attend to all tokens up to their own::

        with cache.step(ids, counts) as step:
            for layer in range(layers):
                ...
                out = step.attend(layer, query, key, value)

    A page may belong to several sequences after `fork`. It is free again when the last of them gives it back, by
    `truncate` or `free`.

    All memory is allocated when the cache is made. Only one thread at a time may use a cache. Outside a step you can
    pickle it, and ``copy.deepcopy`` makes an independent copy with the same sequences and ids.

    Parameters
    ----------
    kv_heads, depth : int
        Hkv and D of the keys.
    layers : int
    pages : int
        The number of pages. A page covers all layers. ``pages * page_size`` is at most ``2**31 - 1``.
    page_size : int
        Tokens per page. Powers of two from 16 to 256 are fast: a few queries read such pages in place, and copy tokens
        of others first.
    dtype : dtype
        float16, bfloat16, float32, float64, int8, ``ml_dtypes.float8_e4m3fn``, ``ml_dtypes.float8_e5m2`` or
        ``"int4"``, or one of PyTorch's. Types of 8 bits have one scale per token and head, and int4 has scales of
        groups, as in `quantize_kv`.
    value_depth : int, optional
        Dv of the values; defaults to `depth`.
    latent : bool
        The values are the first `value_depth` channels of the keys, as in multi-head latent attention (DeepSeek, Kimi):
        steps take no `value`, and one scale serves both.
    group : int, optional
        Channels that share a scale in int4: 32, 64 (the default) or 128. `depth` and `value_depth` must be multiples.
    rotate : bool
        Pass ``rotate=True`` to `flash_attention_with_kvcache`: outliers of a few channels cost less precision.

    Attributes
    ----------
    k_pages, v_pages : ndarray, shape [layers, pages, page_size, kv_heads, depth] (or value_depth)
        For int4 uint8, with half as many elements on the last axis.
    k_scales, v_scales : ndarray of float32, shape [layers, pages, page_size, kv_heads, 1], or None
        Only for quantized caches; for int4 ``[layers, pages, page_size, kv_heads, depth / group, 2]``.
    latent : bool
        If True, `v_pages` is a view of `k_pages`, and `v_scales` is `k_scales`.
    group : int or None
    rotate : bool
    page_size : int

    See Also
    --------
    quantize_kv : quantize to 8 bits.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> cache = attnmask.KVCache(2, 8, pages=16, page_size=4, dtype="float32")
    >>> x = np.ones((6, 2, 8), np.float32)
    >>> prompt = cache.new_sequence()
    >>> with cache.step([prompt], 6) as step:
    ...     out = step.attend(0, x, x, x)
    >>> answers = [cache.fork(prompt) for _ in range(3)]
    >>> with cache.step(answers, [1, 2, 3]) as step:
    ...     out = step.attend(0, x, x, x)
    >>> cache.lengths(answers)
    array([7, 8, 9], dtype=int32)
    >>> cache.block_table(answers)
    array([[ 0,  2, -1],
           [ 0,  3, -1],
           [ 0,  4,  5]], dtype=int32)
    >>> cache.free_pages
    10
    """

    # What differs for arrays of another library, and below in steps.
    _result: Callable[[_Array], _Array] = staticmethod(np.asarray)  # type: ignore[assignment]
    _step_kind: type[KVCacheStep]

    @advises
    def __init__(
        self,
        kv_heads: int,
        depth: int,
        *,
        layers: int = 1,
        pages: int,
        page_size: int = 64,
        dtype: DTypeLike,
        value_depth: int | None = None,
        latent: bool = False,
        group: int | None = None,
        rotate: bool = False,
    ) -> None:
        sizes = {"layers": layers, "pages": pages, "page_size": page_size, "kv_heads": kv_heads}
        shape = tuple(integer(size, name, 1) for name, size in sizes.items())
        k_depth = integer(depth, "depth", 1)
        v_depth = k_depth if value_depth is None else integer(value_depth, "value_depth", 1)
        tokens = shape[1] * shape[2]
        if tokens > _MOST_TOKENS:
            raise ValueError(f"pages * page_size must be at most {_MOST_TOKENS}, got {describe(tokens)}")
        form = format_of(dtype, group, floating=True)

        def zeros(axes: tuple[int, ...], dtype: DTypeLike) -> Array:
            sized = f"{', '.join(sizes)} and depth"
            return self._result(allocate((*shape, *axes), dtype, sized, _zeros_in_lines))

        self.page_size, self.latent = shape[2], flag(latent, "latent")
        self.group, self.rotate = form.group or None, flag(rotate, "rotate")
        if self.latent and v_depth > k_depth:
            raise ValueError(f"value_depth must be at most depth, {k_depth}, if latent, got {v_depth}")
        if self.latent and self.rotate:
            raise ValueError("rotate must be False if latent, got True")
        for channels, name in ((k_depth, "depth"), (v_depth, "value_depth")):
            form.check_channels(channels, name)
            if self.rotate:
                check_rotates(channels, name)
        self.k_pages = zeros((form.elements(k_depth),), form.dtype)
        v_elements = form.elements(v_depth)
        self.v_pages = self.k_pages[..., :v_elements] if latent else zeros((v_elements,), form.dtype)
        self.k_scales: NDArray[np.float32] | None = None
        self.v_scales: NDArray[np.float32] | None = None
        if form.scaled:
            self.k_scales = zeros(form.scales(k_depth), np.float32)
            self.v_scales = self.k_scales if latent else zeros(form.scales(v_depth), np.float32)
        self._returned: list[int] = []  # a stack: the last one is taken first
        self._fresh = range(shape[1])  # pages that were never taken
        self._owners: dict[int, int] = {}  # how many sequences, and open steps, have a page
        self._sequences: dict[int, _Sequence] = {}
        self._next_id = 0
        self._step: _Tokens[Any, Any] | None = None  # which is open

    def __repr__(self) -> str:
        layers, pages, page_size, kv_heads, elements = self.k_pages.shape
        form, v_depth = self._format, self._format.channels(self.v_pages)
        sizes: Arguments = {"kv_heads": kv_heads, "depth": form.channels(self.k_pages)}
        sizes |= {"value_depth": v_depth if self.v_pages.shape[-1] != elements else None}
        sizes |= {"layers": layers, "pages": pages, "page_size": page_size, "dtype": form.name}
        sizes |= {"group": self.group, "rotate": self.rotate or None, "latent": self.latent or None}
        sizes |= {"sequences": len(self._sequences), "free_pages": self.free_pages}
        sizes["nbytes"] = sum(held.nbytes for held in self._held().values())
        shown = ", ".join(f"{name}={size}" for name, size in sizes.items() if size is not None)
        return f"{type(self).__name__}({shown})"

    def _repr_html_(self) -> str:
        """A picture for notebooks: which sequences have each page, and how full it is."""
        from attnmask._cache.svg import Pages, svg
        from attnmask._masks.svg import plural

        layers, pages, page_size, kv_heads, _ = self.k_pages.shape
        words = [
            f"KVCache: {plural(layers, 'layer', 'layers')}, {plural(kv_heads, 'head', 'heads')}",
            f"{plural(pages, 'page', 'pages')} of {plural(page_size, 'token', 'tokens')}, {self.free_pages} free",
            plural(len(self._sequences), "sequence", "sequences"),
        ]
        taken = [] if self._step is None else self._step._taken
        return svg(words, Pages(pages, page_size, self._sequences, taken))

    @property
    def _format(self) -> Format:
        dtype = "int4" if self.group else as_array(self.k_pages, "k_pages").dtype
        return format_of(dtype, self.group, floating=True)

    def __copy__(self) -> NoReturn:
        raise TypeError(
            "a KVCache cannot be copied without its pages: copy.deepcopy(cache) makes an independent one, "
            "cache.fork(id) shares the pages of a sequence"
        )

    def __getstate__(self) -> dict[str, object]:
        self._check_no_step()
        sequences = {number: tuple(sequence) for number, sequence in self._sequences.items()}
        views = {"v_pages": self.v_pages.shape[-1], "v_scales": None} if self.latent else {}
        return vars(self) | self._held() | views | {"version": _FORM, "_sequences": sequences}

    def __setstate__(self, state: Arguments) -> None:
        check_form(state, _FORM, "the KVCache")
        self.latent, self.group, self.rotate = False, None, False  # as before there were others
        vars(self).update((name, value) for name, value in state.items() if name != "version")
        self._sequences = {number: _Sequence(*held) for number, held in state["_sequences"].items()}
        for name, held in self._held().items():
            lines = _zeros_in_lines(held.shape, held.dtype)
            lines[...] = held
            setattr(self, name, self._result(lines))
        if self.latent:
            self.v_pages, self.v_scales = self.k_pages[..., : state["v_pages"]], self.k_scales

    def _held(self) -> dict[str, Array]:
        """Return the arrays that own memory."""
        names = [name for name in _HELD[:: 2 if self.latent else 1] if vars(self)[name] is not None]
        return {name: as_array(vars(self)[name], name) for name in names}

    @property
    def free_pages(self) -> int:
        """The number of free pages.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.KVCache(2, 8, pages=16, dtype="float32").free_pages
        16
        """
        return len(self._returned) + len(self._fresh)

    def new_sequence(self) -> int:
        """Make an empty sequence, and return its id.

        Returns
        -------
        int
            The id. Ids are never reused.

        Examples
        --------
        >>> import attnmask
        >>> cache = attnmask.KVCache(2, 8, pages=16, dtype="float32")
        >>> cache.new_sequence(), cache.new_sequence()
        (0, 1)
        """
        return self._add(_Sequence(_pages(), 0))

    def fork(self, id: int) -> int:
        """Make a sequence with the same tokens that shares its pages until either writes to them.

        Parameters
        ----------
        id : int
            KeyError if there is no such sequence, and RuntimeError if it is in an open step.

        Returns
        -------
        int
            The id of the new sequence.

        Examples
        --------
        >>> import numpy as np, attnmask
        >>> cache = attnmask.KVCache(1, 8, pages=16, dtype="float32")
        >>> a, x = cache.new_sequence(), np.ones((100, 1, 8), np.float32)
        >>> with cache.step([a], 100) as step:
        ...     out = step.attend(0, x, x, x)
        >>> b = cache.fork(a)
        >>> cache.block_table([a, b])
        array([[0, 1],
               [0, 1]], dtype=int32)
        """
        sequence = self._sequence(self._outside_step(id))
        for page in sequence.pages:
            self._owners[page] += 1
        return self._add(sequence)

    def truncate(self, id: int, length: int) -> None:
        """Remove the last tokens of a sequence, such as rejected drafts, and free their pages.

        Parameters
        ----------
        id : int
            KeyError if there is no such sequence, and RuntimeError if it is in an open step.
        length : int
            The number of tokens to keep.

        Examples
        --------
        >>> import numpy as np, attnmask
        >>> cache = attnmask.KVCache(1, 8, pages=16, dtype="float32")
        >>> a, x = cache.new_sequence(), np.ones((100, 1, 8), np.float32)
        >>> with cache.step([a], 100) as step:
        ...     out = step.attend(0, x, x, x)
        >>> cache.truncate(a, 64)
        >>> cache.lengths([a]), cache.free_pages
        (array([64], dtype=int32), 15)
        """
        number, keep = self._outside_step(id), integer(length, "length", 0)
        pages, there = self._sequence(number)
        if keep > there:
            raise ValueError(f"length must be at most the sequence's {there} tokens, got {describe(keep)}")
        used = -(-keep // self.page_size)
        self._sequences[number] = _Sequence(pages[:used], keep)
        self._give_back(pages[used:])

    def free(self, id: int) -> None:
        """Remove a sequence and free its pages.

        Parameters
        ----------
        id : int
            KeyError if there is no such sequence, and RuntimeError if it is in an open step.

        Examples
        --------
        >>> import attnmask
        >>> cache = attnmask.KVCache(2, 8, pages=16, dtype="float32")
        >>> cache.free(cache.new_sequence())
        """
        number = self._outside_step(id)
        self._give_back(self._sequence(number).pages)
        del self._sequences[number]

    def lengths(self, ids: ArrayLike) -> NDArray[np.int32]:
        """Return the number of tokens of sequences, without those of an open step.

        Parameters
        ----------
        ids : array_like of integers, shape [n]
            KeyError if there is no such sequence.

        Returns
        -------
        ndarray of int32, shape [n]

        Examples
        --------
        >>> import attnmask
        >>> cache = attnmask.KVCache(2, 8, pages=16, dtype="float32")
        >>> cache.lengths([cache.new_sequence()])
        array([0], dtype=int32)
        """
        return self._result(np.array([self._sequence(number).length for number in _numbers(ids)], np.int32))

    def block_table(self, ids: ArrayLike) -> NDArray[np.int32]:
        """Return the pages of sequences in token order, without those of an open step.

        Parameters
        ----------
        ids : array_like of integers, shape [n]
            KeyError if there is no such sequence.

        Returns
        -------
        ndarray of int32, shape [n, most pages]
            Padded with -1 after a sequence's pages.

        Examples
        --------
        >>> import numpy as np, attnmask
        >>> cache = attnmask.KVCache(1, 8, pages=16, dtype="float32")
        >>> a, b, x = cache.new_sequence(), cache.new_sequence(), np.ones((101, 1, 8), np.float32)
        >>> with cache.step([a, b], [100, 1]) as step:
        ...     out = step.attend(0, x, x, x)
        >>> cache.block_table([a, b])
        array([[ 0,  1],
               [ 2, -1]], dtype=int32)
        """
        return self._result(_table([self._sequence(number).pages for number in _numbers(ids)]))

    def step(self, ids: ArrayLike, counts: ArrayLike) -> KVCacheStep:
        """Begin a step: the next tokens of some sequences. Use it in a ``with`` block, once, one step at a time.

        When the block begins, it takes all the pages it needs; if too few are free, a MemoryError says how many, and
        nothing has changed. Shared pages that will be written to are copied. When the block ends, the sequences are
        longer. If it raises, or leaves out a layer (a RuntimeError), they are unchanged, and the pages are given back.
        Inside the block you may make, fork, truncate and free other sequences.

        Parameters
        ----------
        ids : array_like of integers, shape [n]
            Each at most once. KeyError if there is no such sequence.
        counts : int or array_like of integers, shape [n]
            The number of tokens per sequence, or one for all; may be 0.

        Returns
        -------
        KVCacheStep

        Examples
        --------
        Some sequences begin with many tokens while others advance by one:

        >>> import numpy as np, attnmask
        >>> cache = attnmask.KVCache(1, 8, layers=2, pages=16, dtype="float32")
        >>> a, b = cache.new_sequence(), cache.new_sequence()
        >>> x = np.ones((6, 1, 8), np.float32)
        >>> with cache.step([a, b], [1, 5]) as step:
        ...     for layer in range(2):
        ...         out = step.attend(layer, x, x, x)
        >>> cache.lengths([a, b])
        array([1, 5], dtype=int32)
        """
        return self._step_kind(self, ids, counts)

    def _add(self, sequence: _Sequence) -> int:
        number, self._next_id = self._next_id, self._next_id + 1
        self._sequences[number] = sequence
        return number

    def _sequence(self, number: int) -> _Sequence:
        sequence = self._sequences.get(number)
        if sequence is None:
            raise KeyError(f"id must be the id of an existing sequence, got {describe(number)}")
        return sequence

    def _outside_step(self, id: object) -> int:
        number = integer(id, "id")
        if self._step is not None and number in self._step._ids:
            raise RuntimeError(
                f"id must not be in the open step, got {number}; wait until its with block ends"
            )
        return number

    def _check_no_step(self) -> None:
        if self._step is not None:
            raise RuntimeError("a step of this cache is open; wait until its with block ends")

    def _next_free(self, needed: int) -> list[int]:
        """Return the pages to take next, in order."""
        free, pages = self.free_pages, self.k_pages.shape[1]
        if needed > free:
            verb = "is" if free == 1 else "are"
            raise MemoryError(
                f"the cache is full: this step needs {describe(needed)} pages and {free} of {pages} {verb} free"
            )
        again = self._returned[: -needed - 1 : -1]
        return [*again, *self._fresh[: needed - len(again)]]

    def _take(self, pages: list[int]) -> None:
        """Take the pages of `_next_free`."""
        again = min(len(pages), len(self._returned))
        del self._returned[len(self._returned) - again :]
        self._fresh = self._fresh[len(pages) - again :]
        self._owners.update(dict.fromkeys(pages, 1))

    def _give_back(self, pages: array.array[int] | list[int]) -> None:
        for page in reversed(pages):  # so that they are taken again in their order
            self._owners[page] -= 1
            if not self._owners[page]:
                del self._owners[page]
                self._returned.append(page)

    def _copy(self, source: int, target: int, tokens: int) -> None:
        for held in self._held().values():
            held[:, target, :tokens] = held[:, source, :tokens]

    def _who_copies(self, rows: list[_Sequence], shared: list[int]) -> list[int]:
        """Return which of the rows that write to a shared page, their last one, need a copy of it.

        If all who have it write, one need not copy it. That is the longest one: it does not write over tokens that
        the others come back to if the block raises.
        """
        left: dict[int, int] = {}
        copying = []
        for i in sorted(shared, key=lambda i: rows[i].length):
            page = rows[i].pages[-1]
            left[page] = left.get(page, self._owners[page])
            if left[page] > 1:
                left[page] -= 1
                copying.append(i)
        return copying


class _Tokens(Generic[_Given, _Found]):
    """`KVCacheStep`, by the kinds of arrays that it takes and returns."""

    _given: Callable[[Any, str], Any] = staticmethod(as_array)
    _with_pages: AnyFunction = staticmethod(flash_attention_with_kvcache)

    __slots__ = (
        "_attended",
        "_batched",
        "_begun",
        "_cache",
        "_counts",
        "_ids",
        "_layouts",
        "_packed",
        "_replaced",
        "_rows",
        "_taken",
    )

    def __init__(self, cache: KVCache, ids: ArrayLike, counts: ArrayLike) -> None:
        cache._check_no_step()
        self._cache, self._begun = cache, False
        self._attended: set[int] = set()  # the layers that have got their tokens
        self._ids = _numbers(ids)
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
        for i, ((pages, length), more) in enumerate(zip(rows, counts, strict=True)):
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
            lists[i] = lists[i][:-1] + _pages(page)
        for i, more in enumerate(added):
            if more:
                lists[i] = lists[i] + _pages(*islice(pool, more))

        self._rows = list(map(_Sequence, lists, ends))
        self._batched: Arguments = {
            "cache_seqlens": cache._result(np.array(lengths, np.int32)),
            "block_table": cache._result(_table(lists)),
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
            The options of `flash_attention_with_kvcache`, `attention_mask` and `out`; all mean the same.

        Returns
        -------
        out : ndarray, shape [total, H, Dv] or [n, c, H, Dv]
            Same type as the query.
        lse : ndarray, shape [H, total] or [n, H, c]
            Only with `return_lse`.

        Examples
        --------
        >>> import numpy as np, attnmask
        >>> cache = attnmask.KVCache(1, 8, pages=16, dtype="float64", value_depth=1)
        >>> a, zeros = cache.new_sequence(), np.zeros((3, 1, 8))  # all keys have the same weight
        >>> with cache.step([a], 3) as step:
        ...     step.attend(0, zeros, zeros, np.array([0.0, 1.0, 2.0]).reshape(3, 1, 1)).ravel()
        array([0. , 0.5, 1. ])
        >>> with cache.step([a], 1) as step:
        ...     step.attend(0, zeros[:1], zeros[:1], np.array([[[5.0]]])).ravel()
        array([2.])
        """
        cache = self._cache
        if cache._step is not self:
            raise RuntimeError("step.attend must be called inside the with block of its step")
        if not more.keys() <= STEP.defaults.keys():
            _refuse(more)
        index = place(layer, "layer", len(cache.k_pages))
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

    def _tokens(self, value: _Given, name: str) -> Any:
        given = self._given(value, name)
        shape = given.shape[:-2]
        if shape not in self._layouts and not any(map(_equal, self._layouts, [shape, shape])):
            expected = " or ".join(
                f"[{', '.join(map(str, layout))}, heads, head_dim]" for layout in self._layouts
            )
            raise ValueError(f"{name} must be {expected}, got {describe(given)}")
        return given


class KVCacheStep(_Tokens[ArrayLike, Array]):
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


KVCache._step_kind = KVCacheStep


def _equal(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Compare sizes number by number, as a graph needs it, where they may be symbols."""
    return len(one) == len(other) and all(a == b for a, b in zip(one, other, strict=True))


def _refuse(more: Arguments) -> NoReturn:
    """Refuse arguments that `KVCacheStep.attend` does not take."""
    unknown = [name for name in more if name not in STEP.defaults]
    if unknown[0] in FLASH_ATTENTION_WITH_KVCACHE.names:
        raise TypeError(
            f"attend() got an unexpected keyword argument {unknown[0]!r}; leave it out, as the cache and the step "
            "have it"
        )
    reject_unknown("attend", unknown, signature(KVCacheStep.attend).parameters)
