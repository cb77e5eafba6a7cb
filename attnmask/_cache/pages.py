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
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from attnmask._cache.evict import kept_tokens, move, staying
from attnmask._cache.quantize import Format, check_rotates, format_of
from attnmask._cache.step import KVCacheStep, SequencePages, Tokens, numbers_of, page_list, table_of
from attnmask._common.arguments import (
    allocate,
    as_array,
    check_form,
    describe,
    flag,
    integer,
)
from attnmask._common.keywords import advises
from attnmask._common.types import Arguments, Array

__all__ = ["KVCache", "KVCacheStep"]

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
    `truncate`, `evict` or `free`.

    All memory is allocated when the cache is made. Only one thread at a time may use a cache. Outside a step you can
    pickle it, and ``copy.deepcopy`` makes an independent copy with the same sequences and ids.

    Parameters
    ----------
    kv_heads, head_dim : int
        Hkv and D of the keys.
    layers : int
    pages : int
        The number of pages. A page covers all layers. ``pages * page_size`` is at most ``2**31 - 1``.
    page_size : int
        Tokens per page. 16, 32, 64, 128 and 256 are fast: such pages are read in place, and tokens of others gathered
        first.
    dtype : dtype
        float16, bfloat16, float32, float64, int8, ``ml_dtypes.float8_e4m3fn``, ``ml_dtypes.float8_e5m2`` or
        ``"int4"``, or one of PyTorch's. Types of 8 bits have one scale per token and head, and int4 has scales of
        groups, as in `quantize_kv`.
    value_head_dim : int, optional
        Dv of the values; defaults to `head_dim`.
    latent : bool
        The values are the first `value_head_dim` channels of the keys, as in multi-head latent attention (DeepSeek,
        Kimi): steps take no `value`, and one scale serves both.
    group : int, optional
        Channels that share a scale in int4: 32, 64 (the default) or 128. `head_dim` and `value_head_dim` must be
        multiples.
    rotate : bool
        Pass ``rotate=True`` to `flash_attention_with_kvcache`: outliers of a few channels cost less precision.

    Attributes
    ----------
    k_pages, v_pages : ndarray, shape [layers, pages, page_size, kv_heads, head_dim] (or value_head_dim)
        For int4 uint8, with half as many elements on the last axis.
    k_scales, v_scales : ndarray of float32, shape [layers, pages, page_size, kv_heads, 1], or None
        Only for quantized caches; for int4 ``[layers, pages, page_size, kv_heads, head_dim / group, 2]``.
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

    # Other libraries replace these two; their steps replace how tokens are read and what attends.
    _result: Callable[[_Array], _Array] = staticmethod(np.asarray)  # type: ignore[assignment]
    _step_kind: type[KVCacheStep] = KVCacheStep

    @advises
    def __init__(
        self,
        kv_heads: int,
        head_dim: int,
        *,
        layers: int = 1,
        pages: int,
        page_size: int = 64,
        dtype: DTypeLike,
        value_head_dim: int | None = None,
        latent: bool = False,
        group: int | None = None,
        rotate: bool = False,
    ) -> None:
        sizes = {"layers": layers, "pages": pages, "page_size": page_size, "kv_heads": kv_heads}
        shape = tuple(integer(size, name, 1) for name, size in sizes.items())
        k_dim = integer(head_dim, "head_dim", 1)
        v_dim = k_dim if value_head_dim is None else integer(value_head_dim, "value_head_dim", 1)
        tokens = shape[1] * shape[2]
        if tokens > _MOST_TOKENS:
            raise ValueError(f"pages * page_size must be at most {_MOST_TOKENS}, got {describe(tokens)}")
        form = format_of(dtype, group, floating=True)

        def zeros(axes: tuple[int, ...], dtype: DTypeLike) -> Array:
            sized = f"{', '.join(sizes)} and head_dim"
            return self._result(allocate((*shape, *axes), dtype, sized, _zeros_in_lines))

        self.page_size, self.latent = shape[2], flag(latent, "latent")
        self.group, self.rotate = form.group or None, flag(rotate, "rotate")
        if self.latent and v_dim > k_dim:
            raise ValueError(f"value_head_dim must be at most head_dim, {k_dim}, if latent, got {v_dim}")
        if self.latent and self.rotate:
            raise ValueError("rotate must be False if latent, got True")
        for channels, name in ((k_dim, "head_dim"), (v_dim, "value_head_dim")):
            form.check_channels(channels, name)
            if self.rotate:
                check_rotates(channels, name)
        self.k_pages = zeros((form.elements(k_dim),), form.dtype)
        v_elements = form.elements(v_dim)
        self.v_pages = self.k_pages[..., :v_elements] if latent else zeros((v_elements,), form.dtype)
        self.k_scales: NDArray[np.float32] | None = None
        self.v_scales: NDArray[np.float32] | None = None
        if form.scaled:
            self.k_scales = zeros(form.scales(k_dim), np.float32)
            self.v_scales = self.k_scales if latent else zeros(form.scales(v_dim), np.float32)
        self._returned: list[int] = []  # a stack: the last one is taken first
        self._fresh = range(shape[1])  # pages that were never taken
        self._owners: dict[int, int] = {}  # how many sequences, and open steps, have a page
        self._sequences: dict[int, SequencePages] = {}
        self._next_id = 0
        self._step: Tokens[Any, Any] | None = None  # which is open

    def __repr__(self) -> str:
        layers, pages, page_size, kv_heads, elements = self.k_pages.shape
        form, v_dim = self._format, self._format.channels(self.v_pages)
        sizes: Arguments = {"kv_heads": kv_heads, "head_dim": form.channels(self.k_pages)}
        sizes |= {"value_head_dim": v_dim if self.v_pages.shape[-1] != elements else None}
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
        self._sequences = {number: SequencePages(*held) for number, held in state["_sequences"].items()}
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
        return self._add(SequencePages(page_list(), 0))

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
        pages, there, evicted = self._sequence(number)
        if keep > there:
            raise ValueError(f"length must be at most the sequence's {there} tokens, got {describe(keep)}")
        used = -(-keep // self.page_size)
        self._sequences[number] = SequencePages(pages[:used], keep, evicted)
        self._give_back(pages[used:])

    def evict(self, id: int, keep: ArrayLike) -> None:
        """Remove all tokens of a sequence but some, which each layer and head may choose for itself.

        The tokens that are kept stay in their order, and later ones follow them. Whole pages that all heads and layers
        keep stay where they are; other rows are copied, to free pages if there are enough, but never to shared ones.

        Steps with such a sequence refuse what depends on positions: windows, chunks, ALiBi, relative and grid biases.
        Masks and biases have a number for each token that is kept.

        Parameters
        ----------
        id : int
            KeyError if there is no such sequence, and RuntimeError if it is in an open step.
        keep : array_like of integers, shape [n], [kv_heads, n] or [layers, kv_heads, n]
            Which tokens to keep, counted among those there are now; in any order, each once.

        See Also
        --------
        attention_statistics : how much weight each key gets.

        Examples
        --------
        >>> import numpy as np, attnmask
        >>> cache = attnmask.KVCache(2, 8, pages=16, page_size=16, dtype="float32")
        >>> a, x = cache.new_sequence(), np.ones((100, 2, 8), np.float32)
        >>> with cache.step([a], 100) as step:
        ...     out = step.attend(0, x, x, x)
        >>> cache.evict(a, [[0, 1, 50, 99], [0, 7, 98, 99]])
        >>> cache.lengths([a]), cache.positions([a]), cache.free_pages
        (array([4], dtype=int32), array([100], dtype=int32), 15)
        """
        number = self._outside_step(id)
        pages, length, evicted = self._sequence(number)
        layers, _, _, heads = self.k_pages.shape[:4]
        kept = kept_tokens(keep, layers, heads, length)
        stay = staying(kept, self.page_size)
        before, moved, stays = np.array(pages, np.int64), stay < 0, set(stay.tolist())
        own = [page for i, page in enumerate(pages) if i not in stays and self._owners[page] == 1]
        needed = int(moved.sum())
        # As long as free pages are written to, a call that is interrupted leaves the sequence as it was.
        taken = self._next_free(max(min(needed, self.free_pages), needed - len(own)), "evict")
        after = np.append(before, -1)[stay]
        after[moved] = [*taken, *own][:needed]
        move([*self._held().values()], kept, before, after, moved)
        self._take(taken)
        table, there = page_list(*after.tolist()), kept.shape[-1]
        in_use = set(table)
        self._give_back([page for page in pages if page not in in_use])
        self._sequences[number] = SequencePages(table, there, evicted + length - there)

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
        return self._result(np.array([self._sequence(number).length for number in numbers_of(ids)], np.int32))

    def positions(self, ids: ArrayLike) -> NDArray[np.int32]:
        """Return the position of the next token of sequences, without those of an open step, for rotary embeddings.

        It is the number of tokens, and of those that were evicted. `truncate` takes positions back, one per token.

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
        >>> cache.positions([cache.new_sequence()])
        array([0], dtype=int32)
        """
        rows = map(self._sequence, numbers_of(ids))
        return self._result(np.array([row.length + row.evicted for row in rows], np.int32))

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
        return self._result(table_of([self._sequence(number).pages for number in numbers_of(ids)]))

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

    def _add(self, sequence: SequencePages) -> int:
        number, self._next_id = self._next_id, self._next_id + 1
        self._sequences[number] = sequence
        return number

    def _sequence(self, number: int) -> SequencePages:
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

    def _next_free(self, needed: int, who: str = "this step") -> list[int]:
        """Return the pages to take next, in order."""
        free, pages = self.free_pages, self.k_pages.shape[1]
        if needed > free:
            verb = "is" if free == 1 else "are"
            raise MemoryError(
                f"the cache is full: {who} needs {describe(needed)} pages and {free} of {pages} {verb} free"
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

    def _who_copies(self, rows: list[SequencePages], shared: list[int]) -> list[int]:
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
