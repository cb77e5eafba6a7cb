"""Masks made of masks: by terms that take pairs away or add some, by operators, and with something replaced."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from attnmask import _core
from attnmask.arguments import (
    FARTHEST,
    describe,
    flag,
    frozen,
    integer,
    integers,
    is_pair,
    number_dtype,
    one_of,
    per_row,
    window,
)
from attnmask.mask_answers import MaskAnswers
from attnmask.mask_program import (
    LONGEST,
    Cut,
    PerRow,
    Terms,
    agree,
    band,
    chunk,
    equal,
    extents,
    fill,
    first_keys,
    join,
    same,
)
from attnmask.mask_state import (
    BOOL,
    FLAGS,
    Ids,
    Labels,
    changed,
    chunks_of_segments,
    cut_out,
    flatten,
    padding_of,
)


def _clipped(value: PerRow, low: int, high: int) -> PerRow:
    return min(max(value, low), high) if isinstance(value, int) else np.clip(value, low, high)


def _same_leaves(mine: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return all(
        a is b or (a is not None and b is not None and np.array_equal(a, b))
        for a, b in zip(mine, others, strict=True)
    )


def _is_mask(other: Any) -> bool:
    """Whether it is the other operand of ``&`` or ``|``; arrays are refused by name."""
    if isinstance(other, np.ndarray):
        raise TypeError(
            f"the other operand must be a MaskInfo, got {describe(other)}: MaskInfo.from_attention_mask makes one"
        )
    return isinstance(other, MaskAnswers)


class MaskTerms(MaskAnswers):
    """The second half of `MaskInfo`."""

    __slots__ = ()

    __hash__: ClassVar[None]  # type: ignore[assignment]
    __array_ufunc__ = None  # NumPy leaves operators to this class

    # Masks made of masks

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MaskAnswers):
            return NotImplemented
        mine, others = self._state, other._state
        if mine.base is None or others.base is None:
            return mine.base is others.base and _same_leaves(flatten(mine)[0], flatten(others)[0])
        ((b, h, q, k), left), (other_shape, right) = self._described("compare"), other._described("compare")
        other_b, other_h, other_q, other_k = other_shape
        if (b, q, k) != (other_b, other_q, other_k) or (h != other_h and 1 not in (h, other_h)):
            return False
        if same(left, right):
            return True
        base, terms, _ = join((mine.base, mine.terms), (others.base, others.terms), "xor", other_shape)
        return not _core.mask_count((b, other_h if h == 1 else h, q, k), (base, *terms.nodes)).any()

    def _joined(self, other: MaskAnswers, operator: str, baked: Callable[[bool, bool], bool]) -> Self:
        """The pairs that both have, or that one has; what goes along is this one's, where it has any."""
        mine, others = self._state, other._state
        self._extent("combine masks")
        other_shape = other._extent("combine masks")
        named = (
            (name, (None if b == 1 else b, None if h == 1 else h, q, k))
            for name, (b, h, q, k) in (("the left mask", mine.extent), ("the right mask", others.extent))
        )
        batch, heads, queries, keys = agree(named)
        shape = (1 if batch is None else batch, 1 if heads is None else heads, queries, keys)
        assert mine.base is not None
        assert others.base is not None
        if mine.terms.length == others.terms.length and same(mine.program, others.program):
            base, terms, in_order = mine.base, mine.terms, True
        else:
            base, terms, in_order = join(
                (mine.base, mine.terms), (others.base, others.terms), operator, other_shape
            )
        labels = mine.labels if mine.labels.complete else others.labels
        return self._with(
            base=base,
            terms=terms,
            extent=shape,
            segment_based=mine.segment_based and in_order,
            labels=labels.for_batch(shape[0]),
            dtype=BOOL,
            baked=tuple(map(baked, mine.baked, others.baked)),
            cu_seqlens_q=None,
            cu_seqlens_kv=None,
            q_positions=others.q_positions if mine.q_positions is None else mine.q_positions,
            kv_positions=others.kv_positions if mine.kv_positions is None else mine.kv_positions,
        )

    def __and__(self, other: MaskAnswers) -> Self:
        """Pairs that are live in both; batch rows and heads broadcast.

        Segment ids, positions and mesh axes are those of the left one, where it has them. What either has baked in
        the result has too.

        Examples
        --------
        >>> import attnmask
        >>> causal = attnmask.MaskInfo.from_segments([[0, 0, 0]]).apply_causal()
        >>> (causal & attnmask.MaskInfo.from_segments([[0, 1, 1]])).attention_mask[0, 0].astype(int)
        array([[1, 0, 0],
               [0, 1, 0],
               [0, 1, 1]])
        """
        if not _is_mask(other):
            return NotImplemented
        return self._joined(other, "and", lambda mine, others: mine or others)

    def __or__(self, other: MaskAnswers) -> Self:
        """Pairs that are live in one or the other, or in both; what goes along is as of ``&``.

        It has baked in what both have.

        Examples
        --------
        >>> import attnmask
        >>> pair = attnmask.MaskInfo.from_segments([[0, 0, -1]]) | attnmask.MaskInfo.from_segments([[-1, 0, 0]])
        >>> pair.density() == 7 / 9
        True
        """
        if not _is_mask(other):
            return NotImplemented
        return self._joined(other, "or", lambda mine, others: mine and others)

    __rand__, __ror__ = __and__, __or__  # of arrays, to refuse them

    def __invert__(self) -> Self:
        """The pairs that are dead, padding among them. It holds no segment ids, and has nothing baked in.

        Examples
        --------
        >>> import attnmask
        >>> (~attnmask.MaskInfo.from_segments([[0, 1, -1]])).attention_mask[0, 0].astype(int)
        array([[0, 1, 1],
               [1, 0, 1],
               [1, 1, 1]])
        """
        self._extent("invert it")
        inverted = self._and("not", baked=(False,) * len(FLAGS), labels=Labels(), segment_based=False)
        return inverted

    # Terms

    def apply_causal(self, offset: ArrayLike = 0) -> Self:
        """Let queries attend to keys up to their own place: ``k <= q + offset``.

        ::

            offset 0                   offset 2 = K - Q: the last query sees all

                k 0 1 2 3 4 5              k 0 1 2 3 4 5
              q 0 # . . . . .            q 0 # # # . . .
                1 # # . . . .              1 # # # # . .
                2 # # # . . .              2 # # # # # .
                3 # # # # . .              3 # # # # # #

        Parameters
        ----------
        offset : int or array_like of integers, shape [B]
            How many keys more; negative for fewer.

        Returns
        -------
        MaskInfo

        Examples
        --------
        >>> import attnmask
        >>> info = attnmask.MaskInfo.from_segments([[0] * 4], [[0] * 6])
        >>> info.apply_causal(offset=2).attention_mask[0, 0, 0].astype(int)
        array([1, 1, 1, 0, 0, 0])
        """
        shape = self._extent("apply a causal term")
        return self._and(band(None, 0, per_row(offset, "offset", shape[0])), "and", flag="causal")

    def apply_sliding_window(
        self,
        sliding_window: int | tuple[int | None, int | None],
        *,
        offset: ArrayLike = 0,
        mode: Literal["default", "decode", "prefill"] | None = None,
        index: ArrayLike | None = None,
    ) -> Self:
        """Let queries attend to keys near their own place: ``-left <= k - q - offset <= right``.

        ::

            window 1                   window (2, 0)              window (None, 1)

                k 0 1 2 3 4 5              k 0 1 2 3 4 5              k 0 1 2 3 4 5
              q 0 # # . . . .            q 0 # . . . . .            q 0 # # . . . .
                1 # # # . . .              1 # # . . . .              1 # # # . . .
                2 . # # # . .              2 # # # . . .              2 # # # # . .
                3 . . # # # .              3 . # # # . .              3 # # # # # .

        Parameters
        ----------
        sliding_window : int or (int, int)
            How many keys to either side, or to the left and to the right; None for all on that side.
        offset : int or array_like of integers, shape [B]
            Added to the place of every query.
        mode : {None, "default", "decode", "prefill"}
            With ``"decode"`` only query `index` is kept, and the keys that the window reaches from there:
            ``left + right + 1`` of them from ``index - left`` on, moved inside if that leads out. With ``"prefill"``
            all queries are kept and the last keys, as many as the window is wide: ``left + right + 1``, or
            `sliding_window` if that is one number. Segment ids and positions are taken along.
        index : int or array_like of integers, shape [B], optional
            The query to decode; beyond either end, the last or the first.

        Returns
        -------
        MaskInfo

        Examples
        --------
        >>> import attnmask
        >>> info = attnmask.MaskInfo.from_segments([[0] * 6])
        >>> info.apply_sliding_window((2, 0)).attention_mask[0, 0, 3].astype(int)
        array([0, 1, 1, 1, 0, 0])
        >>> info.apply_sliding_window((2, 0), mode="decode", index=5).shape
        (1, 1, 3)
        """
        left, right = window(sliding_window)
        one_of(mode, "mode", (None, "default", "decode", "prefill"))
        batch, _, queries, keys = self._extent("apply a sliding window")
        shift = per_row(offset, "offset", batch)
        if index is None and mode == "decode":
            raise ValueError("index must be given with mode='decode', got None")
        info = self._and(band(None if left is None else -left, right, shift), "and", flag="sliding_window")
        if mode not in ("decode", "prefill"):
            return info
        width = keys if left is None or right is None else min(left + right + 1, keys)
        if mode == "prefill":
            if not is_pair(sliding_window) and left is not None:
                width = min(left, keys)
            return self._of(cut_out(info._state, Cut(0, queries, keys - width, width)))
        assert index is not None
        if queries == 0:
            raise ValueError("mode must not be 'decode' for a mask without queries")
        query = _clipped(per_row(index, "index", batch, -FARTHEST), 0, queries - 1)
        first = 0 if left is None else _clipped(query - left, 0, keys - width)
        return self._of(cut_out(info._state, Cut(query, 1, first, width)))

    def apply_chunked(self, chunk_size: int, offset: ArrayLike = 0, within_segments: bool = False) -> Self:
        """Let queries attend to keys of their own chunk up to their own place: ``k <= q + offset``.

        ::

            chunks of 2                segments 0 0 0 1 1 1: from the        …, within_segments=True
                                       start of the row
                k 0 1 2 3 4 5              k 0 1 2 3 4 5                         k 0 1 2 3 4 5
              q 0 # . . . . .            q 0 # . . . . .                       q 0 # . . . . .
                1 # # . . . .              1 # # . . . .                         1 # # . . . .
                2 . . # . . .              2 . . # . . .                         2 . . # . . .
                3 . . # # . .              3 . . . # . .                         3 . . . # . .
                4 . . . . # .              4 . . . . # .                         4 . . . # # .
                5 . . . . # #              5 . . . . # #                         5 . . . . . #

        Segment ids become the numbers of the chunks, from 1 on, and stay below 0 for padding.

        Parameters
        ----------
        chunk_size : int
            At least 1.
        offset : int or array_like of integers, shape [B]
            How many keys more; negative for fewer.
        within_segments : bool
            Count chunks from where each segment begins, and not from the first token of the row. The mask has to hold
            segment ids.

        Returns
        -------
        MaskInfo

        Examples
        --------
        >>> import attnmask
        >>> info = attnmask.MaskInfo.from_segments([[0, 0, 0, 1, 1, -1]])
        >>> info.apply_chunked(2).q_segment_ids
        array([[ 1,  1,  2,  2,  3, -1]], dtype=int32)
        >>> info.apply_chunked(2, within_segments=True).q_segment_ids
        array([[ 1,  1,  2,  3,  3, -1]], dtype=int32)
        """
        size = integer(chunk_size, "chunk_size", 1)
        shape, program = self._described("apply chunks")
        up_to = band(None, 0, per_row(offset, "offset", shape[0]))
        labels = self._state.labels
        if flag(within_segments, "within_segments"):
            if not labels.complete:
                raise ValueError(
                    "within_segments must be False for a mask that holds no segment ids, got True"
                )
            q_ids, kv_ids = chunks_of_segments(*self._ids(), size)
            inside = equal(q_ids, kv_ids)
            held = (shape[0], None if shape[1] == 1 else shape[1], *shape[2:])
            heads = agree([("the mask", held), *extents((inside,))])[1]
            extent = (shape[0], shape[1] if heads is None else heads, *shape[2:])
            labels = Labels(q_ids, kv_ids)
            return self._and(inside, "and", up_to, "and", flag="chunked", labels=labels, extent=extent)
        if not labels.complete:
            labels = padding_of(shape, program)

        def numbered(ids: Ids) -> Ids:
            number = np.arange(ids.shape[-1], dtype=np.int32) // np.int32(min(size, 2**31 - 1)) + np.int32(1)
            return frozen(np.where(ids < 0, np.int32(-1), number))

        labels = labels.map(numbered, numbered, shape[2], shape[3])
        return self._and(chunk(size), "and", up_to, "and", flag="chunked", labels=labels)

    def apply_token_type_ids(
        self,
        token_type_ids: ArrayLike | tuple[ArrayLike, ArrayLike],
        *,
        combine: Literal["union", "intersect", "replace"] = "union",
        zero_policy: Literal["q", "kv", "both", "none"] = "q",
        update_segment_ids: bool | None = None,
    ) -> Self:
        """Let queries attend to keys of the same type: also, only, or instead.

        ::

            types 0 1 1 2 2        causal, "union"            causal, "intersect"        "replace"

                                     k 0 1 2 3 4                k 0 1 2 3 4                k 0 1 2 3 4
                                   q 0 # . . . .              q 0 . . . . .              q 0 . . . . .
                                     1 # # # . .                1 . # . . .                1 . # # . .
                                     2 # # # . .                2 . # # . .                2 . # # . .
                                     3 # # # # #                3 . . . # .                3 . . . # #
                                     4 # # # # #                4 . . . # #                4 . . . # #

        Parameters
        ----------
        token_type_ids : array_like of integers, shape [B, T], or a tuple of [B, Q] and [B, K]
            The type of every token, of queries and keys alike or of each. Below 0 is like no other.
        combine : {"union", "intersect", "replace"}
            Pairs of one type are live as well, are all that may be live, or are all that is.
        zero_policy : {"q", "kv", "both", "none"}
            Type 0 is like no other, whether among queries, among keys or on both sides (which comes to the same); or
            with ``"none"`` it is a type of its own.
        update_segment_ids : bool, optional
            Make the types the segment ids, -1 for type 0. By default all but ``"union"`` do.

        Returns
        -------
        MaskInfo

        Examples
        --------
        >>> import attnmask
        >>> info = attnmask.MaskInfo.from_segments([[0] * 5]).apply_causal()
        >>> info.apply_token_type_ids([[0, 1, 1, 2, 2]]).attention_mask[0, 0, 3].astype(int)
        array([1, 1, 1, 1, 1])
        """
        layouts = ("[B, Q]",), ("[B, K]",)
        if isinstance(token_type_ids, tuple):
            if len(token_type_ids) != 2:
                raise ValueError(f"token_type_ids must be an array or two, got {len(token_type_ids)}")
            q_types, kv_types = (
                integers(types, f"token_type_ids[{side}]", layouts[side])
                for side, types in enumerate(token_type_ids)
            )
        else:
            q_types = kv_types = integers(token_type_ids, "token_type_ids", layouts[0])
        one_of(combine, "combine", ("union", "intersect", "replace"))
        one_of(zero_policy, "zero_policy", ("q", "kv", "both", "none"))
        batch, _, queries, keys = self._extent("apply token types")
        for side, (types, length) in enumerate(((q_types, queries), (kv_types, keys))):
            if types.shape != (batch, length):
                name = f"token_type_ids[{side}]" if isinstance(token_type_ids, tuple) else "token_type_ids"
                raise ValueError(
                    f"{name} must be of shape {(batch, length)} for this mask, got {types.shape}"
                )
        term = equal(q_types, kv_types, zero_policy != "none")
        changes: dict[str, Any] = {}
        updates = update_segment_ids
        if combine != "union" if updates is None else flag(updates, "update_segment_ids"):
            q_ids = frozen(np.where(q_types == 0, np.int32(-1), q_types))
            kv_ids = q_ids if kv_types is q_types else frozen(np.where(kv_types == 0, np.int32(-1), kv_types))
            changes["labels"] = Labels(q_ids, kv_ids)
        if combine == "replace":
            changes |= {
                "base": term,
                "terms": Terms(),
                "extent": (batch, 1, queries, keys),
                "segment_based": False,
            }
            return self._and(flag="token_type_ids", **changes)
        return self._and(term, "or" if combine == "union" else "and", flag="token_type_ids", **changes)

    def apply_kv_lengths(
        self, kv_lengths: ArrayLike, *, q_len: int | None = None, sliding_window: int | None = None
    ) -> Self:
        """Let queries attend to the first keys of each row only, and keep the last tokens up to there.

        ::

            causal, 6 tokens           kv_lengths [4]             …, q_len=2, sliding_window=3

                k 0 1 2 3 4 5              k 0 1 2 3 4 5              k 1 2 3
              q 0 # . . . . .            q 0 # . . . . .            q 2 # # .
                1 # # . . . .              1 # # . . . .              3 # # #
                2 # # # . . .              2 # # # . . .
                3 # # # # . .              3 # # # # . .
                4 # # # # # .              4 # # # # . .
                5 # # # # # #              5 # # # # . .

        Parameters
        ----------
        kv_lengths : int or array_like of integers, shape [B]
            How many keys of each row may be live; not negative, and more than there are is all.
        q_len : int, optional
            Keep as many queries, the last one being that at ``kv_lengths - 1``. All if not given.
        sliding_window : int, optional
            Keep as many keys, up to ``kv_lengths``. All if not given, or if there are fewer.

        Returns
        -------
        MaskInfo
            Segment ids and positions are taken along.

        Examples
        --------
        >>> import attnmask
        >>> info = attnmask.MaskInfo.from_segments([[0] * 6] * 2).apply_causal()
        >>> info.apply_kv_lengths([4, 6], q_len=1).attention_mask[:, 0, 0].astype(int)
        array([[1, 1, 1, 1, 0, 0],
               [1, 1, 1, 1, 1, 1]])
        """
        batch, _, queries, keys = self._extent("apply key lengths")
        lengths = per_row(kv_lengths, "kv_lengths", batch, 0)
        kept_queries = queries if q_len is None else integer(q_len, "q_len", 0)
        if kept_queries > queries:
            raise ValueError(
                f"q_len must be at most {queries}, as many queries as there are, got {kept_queries}"
            )
        kept_keys = (
            keys if sliding_window is None else min(integer(sliding_window, "sliding_window", 0), keys)
        )
        info = self._and(first_keys(lengths), "and")
        q_start = (
            0 if kept_queries == queries else _clipped(lengths - kept_queries, 0, queries - kept_queries)
        )
        k_start = 0 if kept_keys == keys else _clipped(lengths - kept_keys, 0, keys - kept_keys)
        if (kept_queries, kept_keys) == (queries, keys):
            return info
        return self._of(cut_out(info._state, Cut(q_start, kept_queries, k_start, kept_keys)))

    @staticmethod
    def create_chunked_attention_mask(
        chunk_size: int,
        q_len: int,
        kv_len: int | None = None,
        offset: int = 0,
        dtype: DTypeLike = np.bool_,
        *,
        out: NDArray[Any] | None = None,
    ) -> NDArray[Any]:
        """The pairs of one chunk with ``k <= q + offset``, as an array; see `apply_chunked`.

        Parameters
        ----------
        chunk_size : int
            At least 1.
        q_len : int
        kv_len : int, optional
            `q_len` if not given.
        offset : int
        dtype : dtype
            bool, an integer or a floating-point type.
        out : ndarray, shape [q_len, kv_len], optional
            Takes the result, and is returned.

        Returns
        -------
        ndarray, shape [q_len, kv_len]

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.create_chunked_attention_mask(2, 4, dtype="int8")
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [0, 0, 1, 0],
               [0, 0, 1, 1]], dtype=int8)
        """
        size, queries = integer(chunk_size, "chunk_size", 1), integer(q_len, "q_len", 0)
        keys = queries if kv_len is None else integer(kv_len, "kv_len", 0)
        for name, length in (("q_len", queries), ("kv_len", keys)):
            if length > LONGEST:
                raise ValueError(f"{name} must be at most 2**56, got {length}")
        program = (chunk(size), band(None, 0, per_row(offset, "offset", 1)), "and")
        wanted = number_dtype(dtype)
        if out is None:
            return fill((1, 1, queries, keys), program, wanted, 1, 0).reshape(queries, keys)
        if not isinstance(out, np.ndarray):
            raise TypeError(f"out must be an array, got {describe(out)}")
        target = np.asarray(out)
        if target.shape != (queries, keys) or target.dtype != wanted:
            raise ValueError(
                f"out must be an array of {wanted} of shape {(queries, keys)}, got {describe(target)}"
            )
        fill((1, 1, queries, keys), program, wanted, 1, 0, target[None, None])
        return out

    # Copies

    def replace(
        self,
        *,
        attention_mask: ArrayLike | None = None,
        q_segment_ids: ArrayLike | None = None,
        kv_segment_ids: ArrayLike | None = None,
        cu_seqlens_q: ArrayLike | None = None,
        cu_seqlens_kv: ArrayLike | None = None,
        **others: Any,
    ) -> Self:
        """A MaskInfo with something else in place of what this one has.

        Parameters
        ----------
        attention_mask : array_like, shape [B, Q, K] or [B, H, Q, K], optional
            The new base, without any terms; segment ids stay, as labels. Not copied.
        q_segment_ids, kv_segment_ids : array_like of integers, [B, Q] or [B, H, Q] ([B, K] or [B, H, K]), optional
            If the base is made of segments, it is made of these from now on, and terms stay. Else they are mere labels.
        cu_seqlens_q, cu_seqlens_kv : array_like of integers, 1-D, optional
            They are dropped where a mask or ids are given without them.
        **others
            Whatever else `MaskInfo` takes: positions, flags, names of mesh axes. Here None counts, and is stored.

        Returns
        -------
        MaskInfo

        Examples
        --------
        >>> import attnmask
        >>> info = attnmask.MaskInfo.from_segments([[0, 0, 0]]).apply_causal()
        >>> info.replace(q_segment_ids=[[0, 0, 1]]).attention_mask[0, 0].astype(int)
        array([[1, 0, 0],
               [1, 1, 0],
               [0, 0, 0]])
        >>> info.replace(batch_axis_name="dp").batch_axis_name
        'dp'
        """
        given = attention_mask, q_segment_ids, kv_segment_ids, cu_seqlens_q, cu_seqlens_kv
        return self._of(changed(self._state, *given, others))
