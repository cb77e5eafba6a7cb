"""`MaskInfo`: which query may attend to which key, as a description that is an array only once somebody asks for one.

A mask has batch rows, heads, queries and keys: its shape is ``[B, H, Q, K]``, where one head stands for all that share
it. It begins with a base (segments, or an array) and goes on with terms, each of which takes pairs away or adds some::

    segments 0 0 0 1 1 -1       & causal                & window (1, 0)         | token types 0 0 0 0 2 2

       k 0 1 2 3 4 5               k 0 1 2 3 4 5           k 0 1 2 3 4 5           k 0 1 2 3 4 5
    q 0  # # # . . .            q 0  # . . . . .        q 0  # . . . . .        q 0  # . . . . .
      1  # # # . . .              1  # # . . . .          1  # # . . . .          1  # # . . . .
      2  # # # . . .              2  # # # . . .          2  . # # . . .          2  . # # . . .
      3  . . . # # .              3  . . . # . .          3  . . . # . .          3  . . . # . .
      4  . . . # # .              4  . . . # # .          4  . . . # # .          4  . . . # # #
      5  . . . . . .              5  . . . . . .          5  . . . . . .          5  . . . . # #
"""

from types import FunctionType
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike

from attnmask import masks, packed
from attnmask.arguments import (
    as_array,
    describe,
    flag,
    frozen,
    integer,
    integers,
    mask_array,
    rising,
)
from attnmask.debug import traced
from attnmask.mask_answers import MaskAnswers
from attnmask.mask_program import Terms, allocate, dense, fill
from attnmask.mask_sharding import AxisName, MaskSharding, check_axes, mesh_sizes, partition
from attnmask.mask_state import (
    AUX_FIELDS,
    AXIS_FIELDS,
    BOOL,
    FLAG_FIELDS,
    KEY_IDS,
    QUERY_IDS,
    Ids,
    Labels,
    State,
    changed,
    fitted,
    flatten,
    four_dimensions,
    ids_of_tokens,
    kept,
    padding_of,
    segments,
)
from attnmask.mask_terms import MaskTerms

_DRAWN = 2**20  # random numbers at a time


def _padding_ids(mask: ArrayLike, name: str, layouts: tuple[str, ...], valid: bool = True) -> Ids:
    """0 for tokens and -1 for padding, by a mask that is not zero, or zero, for the tokens."""
    tokens = mask_array(mask, name, layouts)
    pairs = (tokens[:, None] if tokens.ndim == 2 else tokens)[:, :, None]  # with one query
    ids = fill(pairs.shape, (dense(pairs),), np.dtype(np.int32), *((0, -1) if valid else (-1, 0)))
    return frozen(ids.reshape(tokens.shape))


def _row_ids(cu_seqlens: ArrayLike, name: str, length: int | None, length_name: str) -> tuple[Ids, Ids]:
    """Pairs of start and end, and ids of 0 from one to the other and -1 elsewhere, a row each."""
    tokens = integer(length, length_name, 0)
    pairs = integers(cu_seqlens, name, ("[2 B]",))
    if len(pairs) % 2:
        raise ValueError(f"{name} must be pairs of start and end, got {describe(pairs)}")
    return pairs, ids_of_tokens(masks.cu_seqlens_to_mask(pairs, tokens))


def _packed_ids(cu_seqlens: ArrayLike, name: str, length: int | None, length_name: str) -> tuple[Ids, Ids]:
    """The starts of sequences, and the number of its sequence for each token of one row."""
    starts = rising(integers(cu_seqlens, name, ("[sequences + 1]",)), name)
    numbers = packed.prepare_sequence_ids(starts)
    tokens = len(numbers) if length is None else integer(length, length_name, 0)
    if tokens < len(numbers):
        raise ValueError(
            f"{length_name} must be at least {len(numbers)}, as many tokens as there are, got {tokens}"
        )
    ids = allocate((1, tokens), np.int32, length_name)
    ids[0, : len(numbers)] = numbers
    ids[0, len(numbers) :] = -1
    return starts, frozen(ids)


def _state_of_segments(q_ids: Ids, kv_ids: Ids) -> State:
    return fitted(State(base=segments(q_ids, kv_ids), segment_based=True, labels=Labels(q_ids, kv_ids)))


class MaskInfo(MaskTerms):
    """Which query may attend to which key: a description, and what was derived from it.

    Make one with `from_segments`, `from_attention_mask`, `from_cu_seqlens`, `from_random` or `dynamic_init`, and narrow
    it down with the `apply_*` methods or with ``&``, ``|`` and ``~``. All of these cost next to nothing, whatever the
    length: pairs are looked at when somebody reads `attention_mask` or `bias`, or asks for a dtype. That happens in C,
    once, and the result is kept.

    A MaskInfo does not change: methods return new ones, which share arrays, and all arrays that it hands out are
    read-only. What comes in is copied, but for masks ``[B, Q, K]`` and ``[B, H, Q, K]``: they are used as they lie in
    memory, **so leave them alone afterwards**.

    Two are equal if the same pairs are live, whatever they are made of; a head that many share is equal to as many
    heads of their own. They cannot be hashed.

    Parameters
    ----------
    attention_mask : array_like, shape [B, Q, K] or [B, H, Q, K], optional
        bool or numbers; where it is not zero a query may attend to a key.
    q_segment_ids, kv_segment_ids : array_like of integers, shape [B, Q] or [B, H, Q] ([B, K] or [B, H, K]), optional
        Tokens may attend to those with the same id; below 0 is padding. With an `attention_mask`, mere labels.
    cu_seqlens_q, cu_seqlens_kv : array_like of integers, 1-D, optional
        Where sequences begin and end, to be told by the properties of that name.
    q_positions, kv_positions : array_like of integers, shape [B, Q] ([B, K]), optional
        Positions of tokens, to be told by the properties of that name.
    token_type_ids_baked_in, chunked_mask_baked_in, sliding_window_baked_in, causal_mask_baked_in : bool
        What `baked_in_masks` tells.
    batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name : str, tuple of str or None
        Mesh axes, for `get_shardings`.

    Examples
    --------
    >>> import attnmask
    >>> info = attnmask.MaskInfo.from_segments([[0, 0, 0, 1, 1, -1]]).apply_causal()
    >>> info.attention_mask[0, 0].astype(int)
    array([[1, 0, 0, 0, 0, 0],
           [1, 1, 0, 0, 0, 0],
           [1, 1, 1, 0, 0, 0],
           [0, 0, 0, 1, 0, 0],
           [0, 0, 0, 1, 1, 0],
           [0, 0, 0, 0, 0, 0]])
    """

    __slots__ = ()

    def __init__(
        self,
        attention_mask: ArrayLike | None = None,
        q_segment_ids: ArrayLike | None = None,
        kv_segment_ids: ArrayLike | None = None,
        cu_seqlens_q: ArrayLike | None = None,
        cu_seqlens_kv: ArrayLike | None = None,
        q_positions: ArrayLike | None = None,
        kv_positions: ArrayLike | None = None,
        causal_mask_baked_in: bool = False,
        sliding_window_baked_in: bool = False,
        chunked_mask_baked_in: bool = False,
        token_type_ids_baked_in: bool = False,
        batch_axis_name: AxisName = ("dp", "fsdp"),
        qheads_axis_name: AxisName = "tp",
        kvheads_axis_name: AxisName = "tp",
        sequence_axis_name: AxisName = "sp",
    ) -> None:
        flags = token_type_ids_baked_in, chunked_mask_baked_in, sliding_window_baked_in, causal_mask_baked_in
        axes = batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name
        others = {
            "q_positions": q_positions,
            "kv_positions": kv_positions,
            **dict(zip(reversed(FLAG_FIELDS), flags, strict=True)),
            **dict(zip(AXIS_FIELDS, axes, strict=True)),
        }
        given = attention_mask, q_segment_ids, kv_segment_ids, cu_seqlens_q, cu_seqlens_kv
        self._held, self._leaves, self._cache = changed(State(), *given, others), None, {}

    # Constructors

    @classmethod
    def from_segments(
        cls,
        q_segment_ids: ArrayLike,
        kv_segment_ids: ArrayLike | None = None,
        q_positions: ArrayLike | None = None,
        kv_positions: ArrayLike | None = None,
        batch_axis_name: AxisName = ("dp", "fsdp"),
        qheads_axis_name: AxisName = "tp",
        kvheads_axis_name: AxisName = "tp",
        sequence_axis_name: AxisName = "sp",
        is_attn_mask: bool = False,
    ) -> Self:
        """A mask under which tokens attend to those of the same segment.

        Parameters
        ----------
        q_segment_ids : array_like of integers, shape [B, Q] or [B, H, Q]
            Below 0 is padding. With `is_attn_mask`, bool or numbers.
        kv_segment_ids : array_like of integers, shape [B, K] or [B, H, K], optional
            Those of the keys; the queries' if not given.
        q_positions, kv_positions, batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name
            As of `MaskInfo`.
        is_attn_mask : bool
            What is given are padding masks: tokens where they are not zero, in one segment.

        Returns
        -------
        MaskInfo

        Examples
        --------
        >>> import attnmask
        >>> info = attnmask.MaskInfo.from_segments([[7, 7, 4]], [[4, 4, 7, -1]])
        >>> info.attention_mask[0, 0].astype(int)
        array([[0, 0, 1, 0],
               [0, 0, 1, 0],
               [1, 1, 0, 0]])
        """
        if flag(is_attn_mask, "is_attn_mask"):
            q_ids = _padding_ids(q_segment_ids, "q_segment_ids", QUERY_IDS)
            kv_ids = (
                q_ids if kv_segment_ids is None else _padding_ids(kv_segment_ids, "kv_segment_ids", KEY_IDS)
            )
        else:
            hint = "; a padding mask goes with is_attn_mask=True"
            q_ids = integers(q_segment_ids, "q_segment_ids", QUERY_IDS, hint)
            kv_ids = (
                q_ids if kv_segment_ids is None else integers(kv_segment_ids, "kv_segment_ids", KEY_IDS, hint)
            )
        axes = batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name
        return cls._new(_state_of_segments(q_ids, kv_ids), q_positions, kv_positions, axes)

    @classmethod
    def from_attention_mask(
        cls,
        attention_mask: ArrayLike,
        q_positions: ArrayLike | None = None,
        kv_positions: ArrayLike | None = None,
        *,
        mask_is_valid: bool = True,
        batch_axis_name: AxisName = ("dp", "fsdp"),
        qheads_axis_name: AxisName = "tp",
        kvheads_axis_name: AxisName = "tp",
        sequence_axis_name: AxisName = "sp",
    ) -> Self:
        """A mask by an array of pairs, or one of tokens.

        Parameters
        ----------
        attention_mask : array_like, shape [B, T], [B, Q, K] or [B, H, Q, K]
            bool or numbers; not zero means live. ``[B, T]`` is a padding mask: all its tokens attend to each other.
            The others are not copied: do not write to them afterwards. Their segment ids are 0 for queries and keys
            with a live pair in any head, and -1 for the rest.
        q_positions, kv_positions, batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name
            As of `MaskInfo`.
        mask_is_valid : bool
            Whether not zero means live; else it means dead.

        Returns
        -------
        MaskInfo

        Examples
        --------
        >>> import attnmask
        >>> info = attnmask.MaskInfo.from_attention_mask([[[1, 1, 0], [0, 0, 0]]])
        >>> info.q_segment_ids, info.kv_segment_ids
        (array([[ 0, -1]], dtype=int32), array([[ 0,  0, -1]], dtype=int32))
        """
        mask = mask_array(attention_mask, "attention_mask", ("[B, T]", "[B, Q, K]", "[B, H, Q, K]"))
        flag(mask_is_valid, "mask_is_valid")
        if mask.ndim == 2:
            ids = _padding_ids(mask, "attention_mask", ("[B, T]",), mask_is_valid)
            state = _state_of_segments(ids, ids)
        else:
            mask = four_dimensions(mask)
            state = State(
                base=dense(mask),
                terms=Terms() if mask_is_valid else Terms("not"),
                dtype=mask.dtype if mask_is_valid else BOOL,
                extent=mask.shape,
            )
            state = state._replace(labels=padding_of(mask.shape, state.program))
        axes = batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name
        return cls._new(state, q_positions, kv_positions, axes)

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens_q: ArrayLike,
        *,
        max_q_len: int | None = None,
        cu_seqlens_kv: ArrayLike | None = None,
        max_kv_len: int | None = None,
        q_positions: ArrayLike | None = None,
        kv_positions: ArrayLike | None = None,
        batch_axis_name: AxisName = ("dp", "fsdp"),
        qheads_axis_name: AxisName = "tp",
        kvheads_axis_name: AxisName = "tp",
        sequence_axis_name: AxisName = "sp",
        packed: bool = False,
    ) -> Self:
        """A mask by where sequences begin and end: one a batch row, or all in one.

        ::

            pairs       [0, 2, 1, 4]                      packed      [0, 2, 2, 5]

                k 0 1 2 3        k 0 1 2 3                    k 0 1 2 3 4
              q 0 # # . .      q 0 . . . .                  q 0 # # . . .
                1 # # . .        1 . # # #                    1 # # . . .
                2 . . . .        2 . # # #                    2 . . # # #
                3 . . . .        3 . # # #                    3 . . # # #
                batch row 0      batch row 1                  4 . . # # #

        Parameters
        ----------
        cu_seqlens_q : array_like of integers
            ``[start, end]`` of each batch row, one after the other, of shape [2 B]: an end before its start is an empty
            row, and one past the length is cut off. If `packed`, the lengths summed up, of shape [sequences + 1]:
            starts at 0, never decreases.
        max_q_len : int
            How many queries there are. If `packed`, as many as there are tokens, if it is left out; else the rest is
            padding.
        cu_seqlens_kv : array_like of integers, optional
            Those of the keys; the queries' if not given.
        max_kv_len : int, optional
            How many keys there are; `max_q_len` if not given, or if `packed` and with `cu_seqlens_kv`, its tokens.
        q_positions, kv_positions, batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name
            As of `MaskInfo`.
        packed : bool
            All sequences lie in one row; segment ids are their numbers.

        Returns
        -------
        MaskInfo

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_cu_seqlens([0, 2, 1, 4], max_q_len=4).q_lens
        array([2, 3], dtype=int32)
        >>> attnmask.MaskInfo.from_cu_seqlens([0, 2, 2, 5], packed=True).q_segment_ids
        array([[0, 0, 2, 2, 2]], dtype=int32)
        """
        if max_q_len is None and not flag(packed, "packed"):
            raise TypeError("max_q_len must be given unless packed=True, got None")
        ids_of = _packed_ids if flag(packed, "packed") else _row_ids
        q_cu, q_ids = ids_of(cu_seqlens_q, "cu_seqlens_q", max_q_len, "max_q_len")
        if max_kv_len is not None:
            max_kv_len = integer(max_kv_len, "max_kv_len", 0)
        if max_kv_len in (None, max_q_len) and cu_seqlens_kv is None:
            kv_cu, kv_ids = q_cu, q_ids
        else:
            given = cu_seqlens_q if cu_seqlens_kv is None else cu_seqlens_kv
            if max_kv_len is None and not packed:
                max_kv_len = max_q_len
            kv_cu, kv_ids = ids_of(given, "cu_seqlens_kv", max_kv_len, "max_kv_len")
        if len(q_cu) != len(kv_cu):
            raise ValueError(
                f"cu_seqlens_kv must have {len(q_cu)} entries as cu_seqlens_q, got {describe(kv_cu)}"
            )
        state = _state_of_segments(q_ids, kv_ids)
        axes = batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name
        return cls._new(state, q_positions, kv_positions, axes)._with(cu_seqlens_q=q_cu, cu_seqlens_kv=kv_cu)

    @classmethod
    def from_random(
        cls,
        batch_size: int,
        q_len: int,
        kv_len: int | None = None,
        sparsity: float = 0.5,
        seed: int = 0,
        q_positions: ArrayLike | None = None,
        kv_positions: ArrayLike | None = None,
        batch_axis_name: AxisName = ("dp", "fsdp"),
        qheads_axis_name: AxisName = "tp",
        kvheads_axis_name: AxisName = "tp",
        sequence_axis_name: AxisName = "sp",
    ) -> Self:
        """A mask whose pairs are live by chance, each for itself.

        Parameters
        ----------
        batch_size, q_len : int
        kv_len : int, optional
            `q_len` if not given.
        sparsity : float
            The chance that a pair is dead, from 0 to 1.
        seed : int
            Of ``numpy.random.default_rng``.
        q_positions, kv_positions, batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name
            As of `MaskInfo`.

        Returns
        -------
        MaskInfo

        Examples
        --------
        >>> import attnmask
        >>> info = attnmask.MaskInfo.from_random(2, 300, 400, sparsity=0.9)
        >>> info.shape, round(info.density(), 2)
        ((2, 300, 400), 0.1)
        """
        batch_size, q_len = integer(batch_size, "batch_size", 0), integer(q_len, "q_len", 0)
        kv_len = q_len if kv_len is None else integer(kv_len, "kv_len", 0)
        if not isinstance(sparsity, (int, float, np.integer, np.floating)):
            raise TypeError(f"sparsity must be a number, got {describe(sparsity)}")
        if not 0 <= sparsity <= 1:
            raise ValueError(f"sparsity must be from 0 to 1, got {sparsity}")
        try:  # a subclass of arrays may be none of what NumPy's generator reckons with
            rng = np.random.default_rng(np.asarray(seed) if isinstance(seed, np.ndarray) else seed)
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"seed must be one that numpy.random.default_rng takes, got {describe(seed)}"
            ) from None
        mask = allocate((batch_size, 1, q_len, kv_len), bool, "batch_size, q_len and kv_len")
        pairs, live = mask.reshape(-1), 1 - sparsity
        for begin in range(0, pairs.size, _DRAWN):
            part = pairs[begin : begin + _DRAWN]
            np.less(rng.random(part.size, np.float32), live, out=part)
        state = State(base=dense(frozen(mask)), extent=mask.shape)
        axes = batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name
        return cls._new(state, q_positions, kv_positions, axes)

    @classmethod
    def dynamic_init(
        cls,
        *,
        mask_info: "MaskInfo | None" = None,
        input_ids: ArrayLike | None = None,
        inputs_embeds: ArrayLike | None = None,
        attention_mask: ArrayLike | None = None,
    ) -> "MaskInfo":
        """A mask by whatever a model was given: the first of these that is there.

        Parameters
        ----------
        mask_info : MaskInfo, optional
            Returned as it is.
        attention_mask : array_like, shape [B, T], [B, Q, K] or [B, H, Q, K], optional
            As of `from_attention_mask`.
        input_ids : array_like, shape [B, T], optional
            Tells the shape only: all tokens attend to each other.
        inputs_embeds : array_like, shape [B, T, D], optional
            Likewise.

        Returns
        -------
        MaskInfo

        Examples
        --------
        >>> import attnmask
        >>> info = attnmask.MaskInfo.dynamic_init(attention_mask=[[1, 1, 0]])
        >>> info.q_segment_ids
        array([[ 0,  0, -1]], dtype=int32)
        """
        if mask_info is not None:
            if not isinstance(mask_info, MaskInfo):
                raise TypeError(f"mask_info must be a MaskInfo, got {describe(mask_info)}")
            return mask_info
        if attention_mask is not None:
            return cls.from_attention_mask(attention_mask)
        for tokens, name, layout in (
            (input_ids, "input_ids", "[B, T]"),
            (inputs_embeds, "inputs_embeds", "[B, T, D]"),
        ):
            if tokens is not None:
                shape = as_array(tokens, name).shape
                if len(shape) != layout.count(",") + 1:
                    raise ValueError(f"{name} must be {layout}, got shape {shape}")
                ids = frozen(allocate(shape[:2], np.int32, name, np.zeros))
                return cls._of(_state_of_segments(ids, ids))
        raise ValueError(
            "mask_info, attention_mask, input_ids or inputs_embeds must be given, got None of them"
        )

    @classmethod
    def _new(
        cls,
        state: State,
        q_positions: ArrayLike | None,
        kv_positions: ArrayLike | None,
        axes: tuple[AxisName, ...],
    ) -> Self:
        """With all that goes along."""
        others = {
            "q_positions": q_positions,
            "kv_positions": kv_positions,
            **dict(zip(AXIS_FIELDS, axes, strict=True)),
        }
        return cls._of(changed(state, None, None, None, None, None, others))

    # Trees

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Take it apart for JAX: arrays, and the rest.

        Returns
        -------
        children : tuple
            The mask it came with, segment ids of queries and keys, both cu_seqlens, both positions, each None if it is
            not held; then the arrays of terms.
        aux_data : tuple
            What is no array; can be hashed.

        Examples
        --------
        >>> import attnmask
        >>> children, aux_data = attnmask.MaskInfo.from_segments([[0, 0, 1]]).tree_flatten()
        >>> children[1]
        array([[0, 0, 1]], dtype=int32)
        """
        if self._held is None and self._leaves is not None:
            aux_data, children = self._leaves
            return children, aux_data
        return flatten(self._state)

    @classmethod
    def tree_unflatten(cls, aux_data: tuple[Any, ...], children: tuple[Any, ...]) -> Self:
        """Put together what `tree_flatten` took apart.

        Parameters
        ----------
        aux_data : tuple
        children : tuple
            May be anything; they are looked at, and checked, when the mask is used.

        Returns
        -------
        MaskInfo

        Examples
        --------
        >>> import attnmask
        >>> info = attnmask.MaskInfo.from_segments([[0, 0, 1]]).apply_causal()
        >>> children, aux_data = info.tree_flatten()
        >>> attnmask.MaskInfo.tree_unflatten(aux_data, children) == info
        True
        """
        for name, parts, least in (("aux_data", aux_data, AUX_FIELDS), ("children", children, 7)):
            if not isinstance(parts, (tuple, list)):
                raise TypeError(f"{name} must be a tuple as of tree_flatten, got {describe(parts)}")
            if len(parts) < least:
                raise ValueError(f"{name} must be of {least} entries as of tree_flatten, got {len(parts)}")
        info = object.__new__(cls)
        info._held, info._leaves, info._cache = None, (aux_data, tuple(map(kept, children))), {}
        return info

    def __reduce__(self) -> tuple[Any, ...]:
        children, aux_data = self.tree_flatten()
        return type(self).tree_unflatten, (aux_data, children)

    # Sharding

    @staticmethod
    def get_empty_sharding() -> MaskSharding:
        """No sharding for any array.

        Examples
        --------
        >>> import attnmask
        >>> set(attnmask.MaskInfo.get_empty_sharding())
        {None}
        """
        return MaskSharding(*[None] * len(MaskSharding._fields))

    def get_shardings(self, sequence_parallel: bool = False, *, mesh: Any) -> MaskSharding:
        """How to divide the arrays that are held among the devices of a mesh, by the names of its axes.

        Parameters
        ----------
        sequence_parallel : bool
            Divide queries, and ids and positions of tokens, too.
        mesh : jax.sharding.Mesh or mapping of str to int
            The axes of the mesh and their sizes.

        Returns
        -------
        MaskSharding
            ``PartitionSpec`` of JAX where it is installed, else tuples. A dimension whose length the axes do not divide
            is not divided. None for an array that is not held, and for cu_seqlens.

        Examples
        --------
        >>> import attnmask
        >>> info = attnmask.MaskInfo.from_segments([[0] * 8] * 4)
        >>> tuple(info.get_shardings(mesh={"dp": 2, "fsdp": 2, "tp": 2}).q_segment_ids)
        (('dp', 'fsdp'), None)
        """
        state, sizes = self._state, mesh_sizes(mesh)
        batch, heads, _, tokens = zip(AXIS_FIELDS, state.axes, strict=True)
        if not flag(sequence_parallel, "sequence_parallel"):
            tokens = (tokens[0], None)
        check_axes(dict((heads, batch, tokens)), sizes)

        def of_tokens(shape: tuple[int, ...] | None) -> Any:
            if shape is None:
                return None
            axes = (batch, tokens) if len(shape) == 2 else (batch, heads, tokens)
            return partition(shape, dict(axes), sizes)

        pairs = None
        if state.base_array is not None:
            pairs = partition(state.extent, dict((batch, heads, tokens)), sizes)  # type: ignore[arg-type]
        q_positions, kv_positions = (
            None if array is None else array.shape for array in (state.q_positions, state.kv_positions)
        )
        return MaskSharding(
            attention_mask=pairs,
            q_segment_ids=of_tokens(state.labels.shapes[0]),
            kv_segment_ids=of_tokens(state.labels.shapes[1]),
            cu_seqlens_q=None,
            cu_seqlens_kv=None,
            q_positions=of_tokens(q_positions),
            kv_positions=of_tokens(kv_positions),
        )

    # Pictures

    def visualize(
        self,
        block_size: int | tuple[int, int] = 32,
        batch: int = 0,
        head: int = 0,
        fit_in_screen: bool = True,
        max_rows: int = 32,
        max_cols: int = 64,
        charset: Literal["unicode", "ascii"] = "unicode",
        show_segments: bool = True,
        return_str: bool = False,
    ) -> str | None:
        """Draw one plane of the mask with characters: each cell is empty, partly live or full.

        Parameters
        ----------
        block_size : int or (int, int)
            How many queries and keys make a cell.
        batch, head : int
            Which plane; IndexError if there is no such.
        fit_in_screen : bool
            Make cells larger, so that there are no more than `max_rows` × `max_cols`.
        max_rows, max_cols : int
            At least 1.
        charset : {"unicode", "ascii"}
        show_segments : bool
            Write segment ids along both sides.
        return_str : bool
            Return the drawing, and do not print it.

        Returns
        -------
        str or None

        Examples
        --------
        >>> import attnmask
        >>> info = attnmask.MaskInfo.from_segments([[0] * 8]).apply_causal()
        >>> drawing = info.visualize(block_size=2, charset="ascii", return_str=True)
        >>> "||##..    ||" in drawing
        True
        """
        from attnmask import render

        flag(return_str, "return_str")
        drawing = render.visualize(
            self._drawable(),
            block_size,
            batch,
            head,
            fit_in_screen,
            max_rows,
            max_cols,
            charset,
            show_segments,
        )
        if return_str:
            return drawing
        print(drawing)
        return None

    def plot(self, ax: Any = None) -> Any:
        """Draw the first plane of the mask with matplotlib.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            Where; a new figure if not given.

        Returns
        -------
        matplotlib.axes.Axes

        Examples
        --------
        >>> import attnmask
        >>> from matplotlib.figure import Figure
        >>> info = attnmask.MaskInfo.from_segments([[0] * 8]).apply_causal()
        >>> info.plot(Figure().add_subplot()).get_xlabel()
        'key'
        """
        from attnmask import render

        return render.plot(self._drawable(), ax)

    def _repr_html_(self) -> str | None:
        """A picture for notebooks; None, which leaves them with the words, where there is nothing to draw."""
        from attnmask import render

        state = self._state
        if state.base is None or 0 in state.extent:
            return None
        return render.svg(self._drawable())

    def _drawable(self) -> Any:
        self._described("draw it")
        return self


def _trace(part: type) -> None:
    """Have every public member logged in debug mode, as one of MaskInfo."""
    for name, member in list(vars(part).items()):
        if name.startswith("_"):
            continue
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if isinstance(function, FunctionType):
            function.__qualname__ = f"MaskInfo.{name}"
            setattr(part, name, traced(member))


for _part in (MaskAnswers, MaskTerms, MaskInfo):
    _trace(_part)
