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

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, Literal, Never, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from attnmask import _core
from attnmask import _mask_derived as derived
from attnmask import _mask_sources as sources
from attnmask import _mask_transforms as transforms
from attnmask import _mask_tree as tree
from attnmask._arguments import AxisName, Offsets, describe, flag, frozen
from attnmask._debug import traced
from attnmask._graphs import left_to_python
from attnmask._keywords import hides
from attnmask._mask_program import words
from attnmask._mask_sharding import MaskSharding, shardings
from attnmask._mask_state import DETAILS, FLAGS, State, changed, with_details


class MaskInfo:
    """Which query may attend to which key: a description, and what was derived from it.

    Make one with `full`, `causal`, `from_lengths`, `from_padding_mask`, `from_segments`, `from_attention_mask`,
    `from_cu_seqlens`, `from_blocks`, `from_function`, `from_random` or `dynamic_init`, and narrow it down with the
    `apply_*` methods, with ``&``, ``|`` and ``~``, or by slices. But for `from_function`, all of these cost next to
    nothing, whatever the length: pairs are looked at when somebody reads `attention_mask` or `bias`, or asks for a
    dtype. That happens in C, once, and the result is kept.

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

    See Also
    --------
    flash_attention : takes it as `attention_mask`.
    mask_to_segment_ids : segment ids of any array.

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

    __slots__ = ("__weakref__", "_held", "_leaves")

    __hash__ = None  # type: ignore[assignment]
    __iter__ = None  # or Python would take rows by their index until there are no more
    __array_ufunc__ = None  # NumPy leaves operators to this class

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
        self._held: State | None = changed(State(), locals())  # None until the leaves of a tree are read
        self._leaves: tuple[tuple[Any, ...], tuple[Any, ...]] | None = None

    # Constructors. `locals()` passes arguments on by name, so that only the signature lists them.

    @classmethod
    def full(cls, q_len: int, kv_len: int | None = None, batch: int = 1) -> Self:
        """Let all queries attend to all keys: the mask to begin with where there is no padding.

        Parameters
        ----------
        q_len : int
        kv_len : int, optional
            `q_len` if not given.
        batch : int

        Returns
        -------
        MaskInfo
            It holds no array. All tokens of a row are in one segment.

        See Also
        --------
        MaskInfo.from_lengths : rows of different lengths.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.full(3).apply_sliding_window((1, 0)).attention_mask[0, 0].astype(int)
        array([[1, 0, 0],
               [1, 1, 0],
               [0, 1, 1]])
        """
        return cls._of(sources.of_all(q_len, kv_len, batch))

    @classmethod
    def causal(
        cls,
        q_len: int,
        kv_len: int | None = None,
        offset: Offsets | Literal["bottom-right"] = 0,
        batch: int = 1,
    ) -> Self:
        """Let queries attend to keys up to their own place: `full` with `apply_causal`.

        Parameters
        ----------
        q_len : int
        kv_len : int, optional
            `q_len` if not given.
        offset : int, array_like of integers, shape [B], or "bottom-right"
            As in `apply_causal`. ``"bottom-right"`` is for the last queries of all tokens, as in decoding.
        batch : int

        Returns
        -------
        MaskInfo

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.causal(3).attention_mask[0, 0].astype(int)
        array([[1, 0, 0],
               [1, 1, 0],
               [1, 1, 1]])
        >>> attnmask.MaskInfo.causal(2, 4, "bottom-right").attention_mask[0, 0].astype(int)
        array([[1, 1, 1, 0],
               [1, 1, 1, 1]])
        """
        return cls._of(transforms.causal(sources.of_all(q_len, kv_len, batch), offset, False))

    @classmethod
    def from_lengths(cls, lengths: ArrayLike, max_len: int | None = None) -> Self:
        """Describe a padded batch by its lengths: row b has ``lengths[b]`` tokens, and the rest is padding.

        ::

            lengths [2, 3]
                k 0 1 2          k 0 1 2
              q 0 # # .        q 0 # # #
                1 # # .          1 # # #
                2 . . .          2 # # #
                batch row 0      batch row 1

        Parameters
        ----------
        lengths : array_like of integers, shape [B]
            Copied; no array of tokens is held.
        max_len : int, optional
            How many queries and keys there are; the largest of `lengths` if not given. ValueError if a row has more.

        Returns
        -------
        MaskInfo
            All tokens of a row are in one segment.

        See Also
        --------
        MaskInfo.from_padding_mask : the same by a mask of tokens.
        pack : the tokens of such a batch without the padding.

        Examples
        --------
        >>> import attnmask
        >>> info = attnmask.MaskInfo.from_lengths([2, 3], max_len=4)
        >>> info.q_segment_ids
        array([[ 0,  0, -1, -1],
               [ 0,  0,  0, -1]], dtype=int32)
        >>> info.apply_causal().attention_mask[0, 0].astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [0, 0, 0, 0],
               [0, 0, 0, 0]])
        """
        return cls._of(sources.of_lengths(lengths, max_len))

    @classmethod
    def from_padding_mask(cls, padding_mask: ArrayLike) -> Self:
        """Describe a padded batch by a mask of its tokens, as tokenizers return it.

        Parameters
        ----------
        padding_mask : array_like, shape [B, T]
            bool or numbers; not zero for tokens, which attend to each other, and zero for padding. Copied.

        Returns
        -------
        MaskInfo

        See Also
        --------
        MaskInfo.from_attention_mask : a mask of pairs, ``[Q, K]`` as ``mask[None]``.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_padding_mask([[1, 1, 0]]).attention_mask[0, 0].astype(int)
        array([[1, 1, 0],
               [1, 1, 0],
               [0, 0, 0]])
        """
        return cls._of(sources.of_padding_mask(padding_mask))

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

        See Also
        --------
        segment_ids_to_mask : the same mask as an array.

        Examples
        --------
        >>> import attnmask
        >>> info = attnmask.MaskInfo.from_segments([[7, 7, 4]], [[4, 4, 7, -1]])
        >>> info.attention_mask[0, 0].astype(int)
        array([[0, 0, 1, 0],
               [0, 0, 1, 0],
               [1, 1, 0, 0]])
        """
        state = sources.of_segments(q_segment_ids, kv_segment_ids, is_attn_mask)
        return cls._of(with_details(state, locals()))

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
            bool or numbers; not zero means live. ``[B, T]`` is a padding mask: all its tokens attend to each other;
            ``[Q, K]`` comes as ``mask[None]``. Those of pairs are not copied: do not write to them afterwards. Their
            segment ids are 0 for queries and keys with a live pair in any head, and -1 for the rest.
        q_positions, kv_positions, batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name
            As of `MaskInfo`.
        mask_is_valid : bool
            Whether not zero means live; else it means dead.

        Returns
        -------
        MaskInfo

        Warns
        -----
        AttnmaskWarning
            For two axes that look like a causal mask ``[Q, K]``, as ``np.tri(n)`` does.

        Examples
        --------
        >>> import attnmask
        >>> info = attnmask.MaskInfo.from_attention_mask([[[1, 1, 0], [0, 0, 0]]])
        >>> info.q_segment_ids, info.kv_segment_ids
        (array([[ 0, -1]], dtype=int32), array([[ 0,  0, -1]], dtype=int32))
        """
        return cls._of(with_details(sources.of_array(attention_mask, mask_is_valid), locals()))

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
        packed: bool | None = None,
    ) -> Self:
        """A mask by where sequences begin and end: one a batch row, or all in one.

        ::

            packed=False    [0, 2, 1, 4]                  packed=True     [0, 2, 2, 5]

                k 0 1 2 3        k 0 1 2 3                    k 0 1 2 3 4
              q 0 # # . .      q 0 . . . .                  q 0 # # . . .
                1 # # . .        1 . # # #                    1 # # . . .
                2 . . . .        2 . # # #                    2 . . # # #
                3 . . . .        3 . # # #                    3 . . # # #
                batch row 0      batch row 1                  4 . . # # #

        Parameters
        ----------
        cu_seqlens_q : array_like of integers
            If `packed`, ordinary cu_seqlens: the lengths summed up, of shape [sequences + 1], from 0 on. Else pairs:
            ``[start, end]`` of each batch row, one after the other, of shape [2 B]: an end before its start is an empty
            row, and one past the length is cut off.
        max_q_len : int
            How many queries there are. If `packed`, as many as there are tokens, if it is left out; else the rest is
            padding.
        cu_seqlens_kv : array_like of integers, optional
            Those of the keys; the queries' if not given.
        max_kv_len : int, optional
            How many keys there are; `max_q_len` if not given, or if `packed` and with `cu_seqlens_kv`, its tokens.
        q_positions, kv_positions, batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name
            As of `MaskInfo`.
        packed : bool, optional
            True for sequences that lie end to end in one row; segment ids are their numbers. False for pairs, as is
            None.

        Returns
        -------
        MaskInfo

        Warns
        -----
        AttnmaskWarning
            For pairs that could be ordinary cu_seqlens as well, if `packed` is not given.

        See Also
        --------
        prepare_cu_seqlens_from_mask : ``cu_seqlens`` of a padded batch.
        cu_seqlens_to_pairs : from one form to the other.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_cu_seqlens([0, 2, 2, 5], packed=True).q_segment_ids
        array([[0, 0, 2, 2, 2]], dtype=int32)
        >>> attnmask.MaskInfo.from_cu_seqlens([0, 2, 1, 4], max_q_len=4, packed=False).q_lens
        array([2, 3], dtype=int32)
        """
        state = sources.of_cu_seqlens(cu_seqlens_q, max_q_len, cu_seqlens_kv, max_kv_len, packed)
        return cls._of(with_details(state, locals()))

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
        state = sources.of_chance(batch_size, q_len, kv_len, sparsity, seed)
        return cls._of(with_details(state, locals()))

    @classmethod
    def from_blocks(
        cls,
        blocks: ArrayLike,
        block_size: int | tuple[int, int],
        q_len: int | None = None,
        kv_len: int | None = None,
    ) -> Self:
        """A block-sparse mask, by which blocks of pairs are live.

        ::

            blocks     block_size 2        q_len 5, block_size (2, 3)
            1 0 0
            1 1 0          k 0 1 2 3 4 5       k 0 1 2 3 4 5 6 7 8
            0 1 1        q 0 # # . . . .     q 0 # # # . . . . . .
                           1 # # . . . .       1 # # # . . . . . .
                           2 # # # # . .       2 # # # # # # . . .
                           3 # # # # . .       3 # # # # # # . . .
                           4 . . # # # #       4 . . . # # # # # #
                           5 . . # # # #

        Parameters
        ----------
        blocks : array_like, shape [B, H, Q / q_size, K / k_size]
            bool or numbers; not zero means live. Copied, as a number for each block.
        block_size : int or (int, int)
            Queries and keys of a block; 64 and its multiples are the fast ones.
        q_len, kv_len : int, optional
            How many queries and keys there are, if the last blocks are cut; as many as the blocks have if not given.

        Returns
        -------
        MaskInfo

        See Also
        --------
        MaskInfo.grid : how many pairs are live in each block of any mask.

        Examples
        --------
        >>> import attnmask
        >>> info = attnmask.MaskInfo.from_blocks([[[[1, 0], [1, 1]]]], 2, q_len=3)
        >>> info.attention_mask[0, 0].astype(int)
        array([[1, 1, 0, 0],
               [1, 1, 0, 0],
               [1, 1, 1, 1]])
        """
        return cls._of(sources.of_blocks(blocks, block_size, q_len, kv_len))

    @classmethod
    def from_function(
        cls, f: Callable[..., Any], q_len: int, kv_len: int, batch: int = 1, heads: int = 1
    ) -> Self:
        """A mask by a function that says of index arrays which pairs are live; FlexAttention calls it a mask_mod.

        It is asked part by part, so that no array is as large as the mask, and never again: what is kept is a number
        for each tile of 64 x 64 pairs, and 512 bytes for each different tile that is neither dead nor live as a whole.

        Parameters
        ----------
        f : callable
            ``f(b, h, q, k)`` gets index arrays of batch rows, heads, queries and keys, which broadcast against each
            other and are read-only; write ``&`` and ``|`` for ``and`` and ``or``. It returns bools or integers, not
            zero for live pairs, of any shape that broadcasts to that of all four. Where PyTorch is loaded, a function
            that fails with arrays gets tensors.
        q_len, kv_len : int
        batch, heads : int
            How many rows and heads there are. If `f` makes no use of ``h``, all heads share the mask.

        Returns
        -------
        MaskInfo

        See Also
        --------
        MaskInfo.from_blocks : where whole blocks are live or dead.
        MaskInfo.from_block_mask : from a BlockMask of FlexAttention.

        Examples
        --------
        >>> import numpy as np, attnmask
        >>> dilated = attnmask.MaskInfo.from_function(lambda b, h, q, k: (k <= q) & ((q - k) % 2 == 0), 4, 4)
        >>> dilated.attention_mask[0, 0].astype(int)
        array([[1, 0, 0, 0],
               [0, 1, 0, 0],
               [1, 0, 1, 0],
               [0, 1, 0, 1]])
        >>> document = np.array([0, 0, 1, 1])
        >>> attnmask.MaskInfo.from_function(lambda b, h, q, k: document[q] == document[k], 4, 4).density()
        0.5
        """
        return cls._of(sources.of_function(f, q_len, kv_len, batch, heads))

    @classmethod
    def dynamic_init(
        cls,
        *,
        mask_info: MaskInfo | None = None,
        input_ids: ArrayLike | None = None,
        inputs_embeds: ArrayLike | None = None,
        attention_mask: ArrayLike | None = None,
    ) -> MaskInfo:
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
        if input_ids is not None:
            return cls._of(sources.of_tokens(input_ids, "input_ids", "[B, T]"))
        if inputs_embeds is not None:
            return cls._of(sources.of_tokens(inputs_embeds, "inputs_embeds", "[B, T, D]"))
        raise ValueError(
            "mask_info, attention_mask, input_ids or inputs_embeds must be given, got None of them"
        )

    # Inside

    @classmethod
    def _of(cls, state: State) -> Self:
        info = object.__new__(cls)
        info._held, info._leaves = state, None
        return info

    def _made(self, state: State) -> Self:
        """It itself, if that is its state."""
        return self if state is self._state else self._of(state)

    @property
    def _state(self) -> State:
        if self._held is None:
            assert self._leaves is not None
            self._held = tree.restore(*self._leaves)
        return self._held

    def _as_tensors(self) -> Any:
        from attnmask._torch_masks import tensors_of_graphs

        state = self._state
        return None if state.base is None else state.once("tensors", lambda: tensors_of_graphs(self))

    # As tensors of PyTorch, which torch.compile makes inputs of a graph; None if there is no mask.
    _tensors = property(_core.built_in(_as_tensors))

    # The mask as an array

    @property
    def attention_mask(self) -> NDArray[Any]:
        """Which pairs are live, ``[B, H, Q, K]``; one head if all share it.

        bool; or of the type of the array that the mask is, if it came as one or was converted by `to_dtype` or
        `materialize_attention_mask`. ValueError if the MaskInfo has no mask, MemoryError if it is too large.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 0, 1]]).attention_mask.shape
        (1, 1, 3, 3)
        """
        return derived.mask_array(self._state)

    def get_or_compute_attention_mask(
        self, dtype: DTypeLike = np.bool_, *, out: NDArray[Any] | None = None
    ) -> NDArray[Any]:
        """Which pairs are live: 1 or True for those, 0 or False for others.

        Parameters
        ----------
        dtype : dtype
            bool, an integer or a floating-point type.
        out : ndarray, shape [B, H, Q, K], optional
            Takes the result, and is returned.

        Returns
        -------
        ndarray, shape [B, H, Q, K]
            An array that came in is returned as it is, if it has that type.

        Examples
        --------
        >>> import attnmask
        >>> info = attnmask.MaskInfo.from_segments([[0, 1, 0]])
        >>> info.get_or_compute_attention_mask("float32")[0, 0]
        array([[1., 0., 1.],
               [0., 1., 0.],
               [1., 0., 1.]], dtype=float32)
        """
        return derived.mask_of_dtype(self._state, dtype, out)

    def materialize_attention_mask(self, dtype: DTypeLike = np.bool_) -> Self:
        """The same mask as an array instead of a description; all that goes along stays.

        Parameters
        ----------
        dtype : dtype
            Of the array.

        Returns
        -------
        MaskInfo

        Examples
        --------
        >>> import attnmask
        >>> info = attnmask.MaskInfo.from_segments([[0, 0, 1]])
        >>> info.materialize_attention_mask("int8").attention_mask.dtype
        dtype('int8')
        """
        return self._made(transforms.materialized(self._state, dtype))

    def to_dtype(self, dtype: DTypeLike) -> Self:
        """The same mask, with an `attention_mask` of another type.

        Parameters
        ----------
        dtype : dtype
            bool, an integer or a floating-point type.

        Returns
        -------
        MaskInfo
            This one, if it has that type.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 0, 1]]).to_dtype("float32").attention_mask.dtype
        dtype('float32')
        """
        return self._made(transforms.to_dtype(self._state, dtype))

    @property
    def bias(self) -> NDArray[np.float32]:
        """What to add to logits: 0 for live pairs, the lowest float32 for others; see `create_bias`.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 1]]).bias[0, 0, 0]
        array([ 0.0000000e+00, -3.4028235e+38], dtype=float32)
        """
        return derived.bias(self._state, np.float32, None)

    def create_bias(self, dtype: DTypeLike = np.float32, *, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """What to add to logits: 0 for live pairs, the lowest number of a type for others.

        Parameters
        ----------
        dtype : dtype
            float16, bfloat16, float32 or float64.
        out : ndarray, shape [B, H, Q, K], optional
            Takes the result, and is returned.

        Returns
        -------
        ndarray, shape [B, H, Q, K]

        See Also
        --------
        MaskInfo.bias : the same in float32, kept.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 1]]).create_bias("float16")[0, 0, 0].tolist()
        [0.0, -65504.0]
        """
        return derived.bias(self._state, dtype, out)

    # Segment ids, lengths and positions

    @property
    def q_segment_ids(self) -> NDArray[np.int32]:
        """The segment of every query, ``[B, Q]`` or ``[B, H, Q]``; below 0 for padding.

        Those that came in or were given by an operation; else as of `get_or_compute_segment_ids`.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 0, 1]]).q_segment_ids
        array([[0, 0, 1]], dtype=int32)
        """
        return derived.side_ids(self._state, 0)

    @property
    def kv_segment_ids(self) -> NDArray[np.int32]:
        """The segment of every key, ``[B, K]`` or ``[B, H, K]``; below 0 for padding.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 0, 1]]).kv_segment_ids
        array([[0, 0, 1]], dtype=int32)
        """
        return derived.side_ids(self._state, 1)

    def get_or_compute_segment_ids(
        self, per_head: bool = False
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Segment ids of queries and of keys: those that are held, or else as of `mask_to_segment_ids`.

        Parameters
        ----------
        per_head : bool
            Where they are not held: for each head, and not those of the first.

        Returns
        -------
        q_segment_ids, kv_segment_ids : ndarray of int32

        Examples
        --------
        >>> import attnmask
        >>> mask = attnmask.MaskInfo(attention_mask=[[[0, 1, 1, 1], [0, 1, 1, 1], [0, 0, 0, 1]]])
        >>> mask.get_or_compute_segment_ids()
        (array([[0, 0, 1]], dtype=int32), array([[-1,  0,  0,  1]], dtype=int32))
        """
        return derived.segment_ids(self._state, flag(per_head, "per_head"))

    def materialize_segment_ids(self, per_head: bool = False) -> Self:
        """The same mask, holding the segment ids of `get_or_compute_segment_ids`.

        Parameters
        ----------
        per_head : bool
            As there.

        Returns
        -------
        MaskInfo
            This one, if it holds them already.

        Examples
        --------
        >>> import attnmask
        >>> info = attnmask.MaskInfo.from_random(1, 8).materialize_segment_ids()
        >>> info.q_segment_ids.shape
        (1, 8)
        """
        return self._made(transforms.with_segment_ids(self._state, per_head))

    @property
    def q_attention_mask(self) -> NDArray[np.int32]:
        """1 for the queries and 0 for padding, ``[B, Q]``, by the segment ids.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 4, -1]]).q_attention_mask
        array([[1, 1, 0]], dtype=int32)
        """
        return frozen((self.q_segment_ids >= 0).astype(np.int32))

    def get_qkv_masks(self, dtype: DTypeLike = np.bool_) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Which queries and which keys are not padding, and which pairs are of one segment.

        By segment ids alone, whatever terms were applied.

        Parameters
        ----------
        dtype : dtype
            bool, an integer or a floating-point type.

        Returns
        -------
        q_mask : ndarray, shape [B, Q]
        kv_mask : ndarray, shape [B, K]
        attention_mask : ndarray, shape [B, 1, Q, K]
            Of per-head ids all three are per head.

        Examples
        --------
        >>> import attnmask
        >>> q_mask, kv_mask, mask = attnmask.MaskInfo.from_segments([[0, 1, -1]]).get_qkv_masks("int8")
        >>> q_mask, mask[0, 0].diagonal()
        (array([[1, 1, 0]], dtype=int8), array([1, 1, 0], dtype=int8))
        """
        return derived.qkv_masks(self._state, dtype)

    @property
    def is_multi_sequence(self) -> np.bool:
        """Whether the segment ids that are held tell of more than one segment: whether any is above 0.

        Of queries, or of keys if those are all that is held; False if none are.

        Examples
        --------
        >>> import attnmask
        >>> bool(attnmask.MaskInfo.from_segments([[0, 0, 1]]).is_multi_sequence)
        True
        """
        return derived.is_multi_sequence(self._state)

    @property
    def q_lens(self) -> NDArray[np.int32] | None:
        """How many queries each segment has, if there are several, else each batch row; padding not counted.

        Segments are those of all rows together, from 0 to the highest id. Of per-head ids, those of the first head
        count. None if there is nothing to tell it by.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 0, 2, -1]]).q_lens
        array([2, 0, 1], dtype=int32)
        >>> attnmask.MaskInfo.from_segments([[0, 0, 0, -1], [0, -1, -1, -1]]).q_lens
        array([3, 1], dtype=int32)
        """
        return derived.lens(self._state, 0)

    @property
    def kv_lens(self) -> NDArray[np.int32] | None:
        """How many keys each segment has, if there are several, else each batch row; see `q_lens`.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 1]], [[0, 1, 1, -1]]).kv_lens
        array([1, 2], dtype=int32)
        """
        return derived.lens(self._state, 1)

    @property
    def cu_seqlens_q(self) -> NDArray[np.integer]:
        """Where the segments of the queries begin and end; see `get_or_compute_qkv_cu_seqlens`.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 0, 1, -1]]).cu_seqlens_q[:4]
        array([0, 2, 3, 3], dtype=int32)
        """
        return derived.cu_seqlens_of_int32(self._state)[0]

    @property
    def cu_seqlens_kv(self) -> NDArray[np.integer]:
        """Where the segments of the keys begin and end; see `get_or_compute_qkv_cu_seqlens`.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_cu_seqlens([0, 2, 5], packed=True).cu_seqlens_kv
        array([0, 2, 5], dtype=int32)
        """
        return derived.cu_seqlens_of_int32(self._state)[1]

    def get_or_compute_qkv_cu_seqlens(
        self, *, out_dtype: DTypeLike = np.int32, max_segments: int | None = None
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Where the segments of queries and of keys begin and end.

        What came in, if anything did. Else by segment ids that are held: the tokens of segments 0, 1, 2, … summed up,
        padding not counted. Else by the mask: ``[start0, end0, start1, end1, …]``, in each batch row from the first
        token with a live pair to the last.

        Parameters
        ----------
        out_dtype : dtype
            An integer type.
        max_segments : int, optional
            How many segments there is room for; ValueError if there are more. 128 if not given, or as many as there
            are.

        Returns
        -------
        cu_seqlens_q, cu_seqlens_kv : ndarray
            By segment ids, of shape [max_segments + 1].

        Examples
        --------
        >>> import attnmask
        >>> info = attnmask.MaskInfo.from_segments([[0, 0, 1, -1]])
        >>> info.get_or_compute_qkv_cu_seqlens(max_segments=3)[0]
        array([0, 2, 3, 3], dtype=int32)
        >>> info = attnmask.MaskInfo(attention_mask=[[[0, 1, 1], [0, 1, 0], [0, 0, 0]]])
        >>> info.get_or_compute_qkv_cu_seqlens()
        (array([0, 2], dtype=int32), array([1, 3], dtype=int32))
        """
        return derived.cu_seqlens(self._state, out_dtype, max_segments)

    @property
    def q_positions(self) -> NDArray[np.int32] | None:
        """The positions of the queries that came in, or None.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 0]], q_positions=[[5, 6]]).q_positions
        array([[5, 6]], dtype=int32)
        """
        return self._state.q_positions

    @property
    def kv_positions(self) -> NDArray[np.int32] | None:
        """The positions of the keys that came in, or None.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 0]]).kv_positions is None
        True
        """
        return self._state.kv_positions

    @property
    def q_position_ids(self) -> NDArray[np.int32]:
        """The place of every query in its segment, from 0, by the segment ids; -1 for padding.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[-1, 0, 0, 0, 1, 1]]).q_position_ids
        array([[-1,  0,  1,  2,  0,  1]], dtype=int32)
        """
        return derived.position_ids(self._state, 0)

    def get_or_compute_positions(self) -> tuple[NDArray[np.int32] | None, NDArray[np.int32] | None]:
        """Positions of queries and of keys: those that came in, or else their places in their segments.

        Returns
        -------
        q_positions : ndarray of int32 or None
            Padding is at -1. None if there is nothing to tell them by.
        kv_positions : ndarray of int32 or None
            Padding is at 2147483647: later than every query.

        Examples
        --------
        >>> import attnmask
        >>> positions = attnmask.MaskInfo.from_segments([[0, 0, 1, -1]]).get_or_compute_positions()
        >>> [side.tolist() for side in positions]
        [[[0, 1, 0, -1]], [[0, 1, 0, 2147483647]]]
        """
        return derived.positions(self._state)

    # What it is

    @property
    def shape(self) -> tuple[int | None, int | None, int | None]:
        """Batch rows, queries, keys; None for what is not known.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_random(2, 3, 5).shape
        (2, 3, 5)
        """
        batch, _, queries, keys = self._state.extent
        return batch, queries, keys

    @property
    def batch_size(self) -> int | None:
        """How many batch rows there are, or None.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_random(2, 3, 5).batch_size
        2
        """
        return self._state.extent[0]

    @property
    def q_len(self) -> int | None:
        """How many queries there are, or None.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_random(2, 3, 5).q_len
        3
        """
        return self._state.extent[2]

    @property
    def kv_len(self) -> int | None:
        """How many keys there are, or None.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_random(2, 3, 5).kv_len
        5
        """
        return self._state.extent[3]

    @property
    def heads(self) -> int:
        """How many heads have a mask of their own; 1 if all share it.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[[0, 0], [0, 1]]]).heads
        2
        """
        return self._state.shape("tell heads")[1]

    @property
    def causal_mask_baked_in(self) -> bool:
        """Whether `apply_causal` was.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 0]]).apply_causal().causal_mask_baked_in
        True
        """
        return self._state.baked[0]

    @property
    def sliding_window_baked_in(self) -> bool:
        """Whether `apply_sliding_window` was.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 0]]).apply_causal().sliding_window_baked_in
        False
        """
        return self._state.baked[1]

    @property
    def chunked_mask_baked_in(self) -> bool:
        """Whether `apply_chunked` was.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 0]]).apply_chunked(2).chunked_mask_baked_in
        True
        """
        return self._state.baked[2]

    @property
    def token_type_ids_baked_in(self) -> bool:
        """Whether `apply_token_type_ids` was.

        Examples
        --------
        >>> import attnmask
        >>> info = attnmask.MaskInfo.from_segments([[0, 0]])
        >>> info.apply_token_type_ids([[1, 2]]).token_type_ids_baked_in
        True
        """
        return self._state.baked[3]

    @property
    def baked_in_masks(self) -> dict[str, bool]:
        """Which kinds of terms were applied, by name.

        Examples
        --------
        >>> import attnmask
        >>> info = attnmask.MaskInfo.from_segments([[0, 0]]).apply_causal().apply_chunked(2)
        >>> [name for name, applied in info.baked_in_masks.items() if applied]
        ['causal', 'chunked']
        """
        return dict(zip(FLAGS, self._state.baked, strict=True))

    @property
    def batch_axis_name(self) -> AxisName:
        """The mesh axes of batch rows.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 0]]).batch_axis_name
        ('dp', 'fsdp')
        """
        return self._state.axes[0]

    @property
    def qheads_axis_name(self) -> AxisName:
        """The mesh axes of query heads.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 0]]).qheads_axis_name
        'tp'
        """
        return self._state.axes[1]

    @property
    def kvheads_axis_name(self) -> AxisName:
        """The mesh axes of key heads.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 0]]).kvheads_axis_name
        'tp'
        """
        return self._state.axes[2]

    @property
    def sequence_axis_name(self) -> AxisName:
        """The mesh axes of tokens.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 0]]).sequence_axis_name
        'sp'
        """
        return self._state.axes[3]

    def is_self_attention(self) -> bool:
        """Whether queries and keys are the same tokens.

        By the segment ids that are held; else whether there are as many queries as keys; else by cu_seqlens.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 1]]).is_self_attention()
        True
        """
        return derived.is_self_attention(self._state)

    def density(self) -> float:
        """The share of pairs that are live, from 0 to 1, counted without writing out the mask.

        Returns
        -------
        float
            0 if there are no pairs.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 0, 1, 1]]).apply_causal().density()
        0.375
        """
        return derived.density(self._state)

    def grid(self, batch: int, head: int, q_cell: int, k_cell: int) -> NDArray[np.int64]:
        """How many pairs are live in each cell of a grid, as `visualize` draws it.

        Parameters
        ----------
        batch, head : int
            Which plane; IndexError if there is no such.
        q_cell, k_cell : int
            How many queries and keys make a cell, at least 1. The last cells may have fewer.

        Returns
        -------
        ndarray of int64, shape [ceil(Q / q_cell), ceil(K / k_cell)]

        See Also
        --------
        MaskInfo.density : the share of the whole mask.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 0, 0, 0]]).apply_causal().grid(0, 0, 2, 2).tolist()
        [[3, 0], [4, 3]]
        """
        return derived.grid(self._state, batch, head, q_cell, k_cell)

    def labels(self, batch: int, head: int) -> tuple[NDArray[np.int32], NDArray[np.int32]] | None:
        """Segment ids of the queries and of the keys of one plane, as `visualize` shows them.

        Parameters
        ----------
        batch, head : int
            Which plane; IndexError if there is no such.

        Returns
        -------
        (ndarray of int32, ndarray of int32) or None
            Those that are held; else those of rows and columns that are alike, or None if there are too many to look
            through.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 1], [2, 2]]).labels(1, 0)
        (array([2, 2], dtype=int32), array([2, 2], dtype=int32))
        """
        return derived.plane_labels(self._state, batch, head)

    def __repr__(self) -> str:
        try:
            return f"{type(self).__name__}({self._state})"
        except Exception:  # JAX may put other objects than arrays into the leaves
            return f"{type(self).__name__}({len(self._leaves[1]) if self._leaves else 0} leaves)"

    def __str__(self) -> str:
        """The first plane as `visualize` draws it, as wide as the terminal, under a line of words.

        Examples
        --------
        >>> import attnmask
        >>> print(attnmask.MaskInfo.full(0))
        mask [1, 1, 0, 0]: full; no pairs
        """
        try:
            state = self._state
        except Exception:
            return repr(self)
        if state.base is None:
            return f"no mask: {state}"
        from attnmask import _render as render

        base, terms = words(state.program, state.segment_based)
        return render.text(self._drawable(), " ".join([base, *terms]))

    # Masks made of masks

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MaskInfo):
            return NotImplemented
        return derived.are_equal(self._state, other._state)

    def _joined(self, other: Any, operator: str, baked: Callable[[bool, bool], bool]) -> Self:
        if not isinstance(other, MaskInfo):
            if not hasattr(other, "__array__"):
                return NotImplemented  # type: ignore[no-any-return]
            raise TypeError(
                f"the other operand must be a MaskInfo, got {describe(other)}: MaskInfo.from_attention_mask makes one"
            )
        return self._of(transforms.joined(self._state, other._state, operator, baked))

    def __and__(self, other: MaskInfo) -> Self:
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
        return self._joined(other, "and", lambda mine, others: mine or others)

    def __or__(self, other: MaskInfo) -> Self:
        """Pairs that are live in one or the other, or in both; what goes along is as of ``&``.

        It has baked in what both have.

        Examples
        --------
        >>> import attnmask
        >>> first, last = (attnmask.MaskInfo.from_segments([ids]) for ids in ([0, 0, -1], [-1, 0, 0]))
        >>> (first | last).density() == 7 / 9
        True
        """
        return self._joined(other, "or", lambda mine, others: mine and others)

    __rand__, __ror__ = __and__, __or__  # refuse an array on the left side, too

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
        return self._of(transforms.inverted(self._state))

    def __bool__(self) -> bool:
        raise TypeError(
            "a MaskInfo is neither True nor False: use & | ~ for `and`, `or`, `not`, and `is None` for a missing one"
        )

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """`attention_mask` of any type, for NumPy's functions.

        Examples
        --------
        >>> import numpy as np, attnmask
        >>> np.where(attnmask.MaskInfo.from_segments([[0, 1]]), 0, -1)[0, 0]
        array([[ 0, -1],
               [-1,  0]])
        """
        return derived.array_protocol(self._state, dtype, copy)

    def __getitem__(self, index: Any) -> Self:
        """A part of the mask: ``mask[rows, heads, queries, keys]``, as a description still.

        Each index is a slice, which is clipped as that of an array, or an integer, which keeps its axis. ``...`` stands
        for as many as are missing. Heads that share a mask share it still, whichever are asked for. Segment ids and
        positions are taken along.

        Examples
        --------
        >>> import attnmask
        >>> info = attnmask.MaskInfo.from_segments([[0, 0, 0, 1, 1]] * 2).apply_causal()
        >>> info[1, :, 2:4, 1:].attention_mask[0, 0].astype(int)
        array([[1, 1, 0, 0],
               [0, 0, 1, 0]])
        >>> info[..., -1, :].shape
        (2, 1, 5)
        """
        return self._made(transforms.sliced(self._state, index))

    # Terms

    def apply_causal(
        self, offset: Offsets | Literal["bottom-right"] = 0, *, within_segments: bool = False
    ) -> Self:
        """Let queries attend to keys up to their own place: ``k <= q + offset``.

        ::

            offset 0                   "bottom-right", here 2: the last query sees all keys

                k 0 1 2 3 4 5              k 0 1 2 3 4 5
              q 0 # . . . . .            q 0 # # # . . .
                1 # # . . . .              1 # # # # . .
                2 # # # . . .              2 # # # # # .
                3 # # # # . .              3 # # # # # #

            segments 0 0 1 1 and 0 0 0 1 1 1:    …, within_segments=True         …, "bottom-right"
            from the start of the row

                k 0 1 2 3 4 5                        k 0 1 2 3 4 5                   k 0 1 2 3 4 5
              q 0 # . . . . .                      q 0 # . . . . .                 q 0 # # . . . .
                1 # # . . . .                        1 # # . . . .                   1 # # # . . .
                2 . . . . . .                        2 . . . # . .                   2 . . . # # .
                3 . . . # . .                        3 . . . # # .                   3 . . . # # #

        Parameters
        ----------
        offset : int, array_like of integers, shape [B], or "bottom-right"
            How many keys more; negative for fewer. ``"bottom-right"`` aligns the last query with the last key.
        within_segments : bool
            Count places from where each segment begins among the queries and among the keys, not from the first token
            of the row; ``"bottom-right"`` aligns the last query and the last key of each segment. Queries see no key of
            another segment. The mask has to hold segment ids. Where queries and keys are the same tokens, all this
            changes nothing.

        Returns
        -------
        MaskInfo

        Warns
        -----
        AttnmaskWarning
            For packed sequences that begin at other places among the keys, without `within_segments`.

        Examples
        --------
        >>> import attnmask
        >>> info = attnmask.MaskInfo.from_segments([[0] * 4], [[0] * 6])
        >>> info.apply_causal(offset=2).attention_mask[0, 0, 0].astype(int)
        array([1, 1, 1, 0, 0, 0])
        >>> info = attnmask.MaskInfo.from_cu_seqlens([0, 2, 4], cu_seqlens_kv=[0, 3, 6], packed=True)
        >>> info.apply_causal("bottom-right", within_segments=True).attention_mask[0, 0, 2].astype(int)
        array([0, 0, 0, 1, 1, 0])
        """
        return self._of(transforms.causal(self._state, offset, within_segments))

    @hides("more")
    def apply_sliding_window(
        self,
        sliding_window: int | NDArray[np.integer] | tuple[int | ArrayLike | None, int | ArrayLike | None],
        *more: Never,
        offset: Offsets | Literal["bottom-right"] = 0,
        mode: Literal["default", "decode", "prefill"] | None = None,
        index: ArrayLike | None = None,
        within_segments: bool = False,
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
        sliding_window : int, ndarray of integers, shape [H], or a pair
            How many keys to either side, or to the left and to the right; an array has a number for each head. In a
            pair, None is for all on that side.
        offset : int, array_like of integers, shape [B], or "bottom-right"
            Added to the place of every query. ``"bottom-right"`` aligns the last query with the last key.
        mode : {None, "default", "decode", "prefill"}
            With ``"decode"`` only query `index` is kept, and the keys that the window reaches from there:
            ``left + right + 1`` of them from ``index - left`` on, moved inside if that leads out. With ``"prefill"``
            all queries are kept and the last keys, as many as the window is wide: ``left + right + 1``, or
            `sliding_window` if that is one number. Segment ids and positions are taken along.
        index : int or array_like of integers, shape [B], optional
            The query to decode; beyond either end, the last or the first.
        within_segments : bool
            Count places from where each segment begins, as in `apply_causal`.

        Returns
        -------
        MaskInfo

        Warns
        -----
        AttnmaskWarning
            As `apply_causal` does.

        Examples
        --------
        >>> import numpy as np, attnmask
        >>> info = attnmask.MaskInfo.from_segments([[0] * 6])
        >>> info.apply_sliding_window((2, 0)).attention_mask[0, 0, 3].astype(int)
        array([0, 1, 1, 1, 0, 0])
        >>> info.apply_sliding_window((2, 0), mode="decode", index=5).shape
        (1, 1, 3)
        >>> by_head = info.apply_sliding_window((np.array([1, 5]), 0))
        >>> by_head.attention_mask[0, :, 5].astype(int)
        array([[0, 0, 0, 0, 1, 1],
               [1, 1, 1, 1, 1, 1]])
        """
        if more:
            transforms.reject_window((sliding_window, *more))
        state = transforms.sliding_window(self._state, sliding_window, offset, mode, index, within_segments)
        return self._of(state)

    def apply_chunked(self, chunk_size: int, offset: Offsets = 0, within_segments: bool = False) -> Self:
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
            Added to the place of every query, which decides on its chunk, too.
        within_segments : bool
            Count chunks and places from where each segment begins, and not from the first token of the row. The mask
            has to hold segment ids.

        Returns
        -------
        MaskInfo

        Warns
        -----
        AttnmaskWarning
            As `apply_causal` does.

        See Also
        --------
        MaskInfo.create_chunked_attention_mask : the same as an array.

        Examples
        --------
        >>> import attnmask
        >>> info = attnmask.MaskInfo.from_segments([[0, 0, 0, 1, 1, -1]])
        >>> info.apply_chunked(2).q_segment_ids
        array([[ 1,  1,  2,  2,  3, -1]], dtype=int32)
        >>> info.apply_chunked(2, within_segments=True).q_segment_ids
        array([[ 1,  1,  2,  3,  3, -1]], dtype=int32)
        """
        return self._of(transforms.chunked(self._state, chunk_size, offset, within_segments))

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
        state = transforms.token_type_ids(
            self._state, token_type_ids, combine, zero_policy, update_segment_ids
        )
        return self._of(state)

    def apply_prefix(self, lengths: ArrayLike) -> Self:
        """Let all queries of a segment attend to its first tokens as well: the mask of a prefix LM.

        ::

            causal, prefix 3           segments 0 0 0 0 1 1 1: the first
                                       two tokens of each
                k 0 1 2 3 4 5              k 0 1 2 3 4 5 6
              q 0 # # # . . .            q 0 # # . . . . .
                1 # # # . . .              1 # # . . . . .
                2 # # # . . .              2 # # # . . . .
                3 # # # # . .              3 # # # # . . .
                4 # # # # # .              4 . . . . # # .
                5 # # # # # #              5 . . . . # # .
                                           6 . . . . # # #

        What stands before it in the order of terms stays live; terms that come after it apply to the prefix, too.

        Parameters
        ----------
        lengths : int or array_like of integers, shape [B]
            How many tokens of each segment; not negative. Segments are those of the segment ids that are held, and
            padding is in none.

        Returns
        -------
        MaskInfo

        Examples
        --------
        >>> import attnmask
        >>> info = attnmask.MaskInfo.from_segments([[0, 0, 0, 0, 1, 1]]).apply_causal().apply_prefix(2)
        >>> info.attention_mask[0, 0].astype(int)
        array([[1, 1, 0, 0, 0, 0],
               [1, 1, 0, 0, 0, 0],
               [1, 1, 1, 0, 0, 0],
               [1, 1, 1, 1, 0, 0],
               [0, 0, 0, 0, 1, 1],
               [0, 0, 0, 0, 1, 1]])
        """
        return self._of(transforms.prefix(self._state, lengths))

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
        return self._of(transforms.kv_lengths(self._state, kv_lengths, q_len, sliding_window))

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

        The chunk of a query is that of place ``q + offset``.

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
        return transforms.chunked_array(chunk_size, q_len, kv_len, offset, dtype, out)

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
            If the base is made of segments, or of all pairs or lengths, it is made of these from now on, and terms
            stay. Else they are mere labels.
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
        for name in others:
            if name not in DETAILS:
                raise TypeError(f"a MaskInfo has no {name!r} to replace")
        return self._of(changed(self._state, locals() | others))

    # FlexAttention

    def to_block_mask(self, block_size: int | tuple[int, int] = 128) -> Any:
        """The mask as FlexAttention of PyTorch takes it, which must be there.

        Parameters
        ----------
        block_size : int or tuple of two int
            Queries and keys of a block.

        Returns
        -------
        torch.nn.attention.flex_attention.BlockMask
            On the CPU. Its ``mask_mod`` is made of the terms: nothing is as large as the mask.

        Examples
        --------
        >>> import torch
        >>> info = attnmask.MaskInfo.from_segments([[0] * 128 + [1] * 128]).apply_causal()
        >>> block_mask = info.to_block_mask()
        >>> block_mask.shape, block_mask.sparsity()
        ((1, 1, 256, 256), 50.0)
        """
        from attnmask._torch_blocks import to_block_mask

        return to_block_mask(self, block_size)

    @classmethod
    def from_block_mask(cls, block_mask: Any) -> MaskInfo:
        """A mask of a BlockMask of FlexAttention, on the CPU.

        Its ``mask_mod`` is asked for every pair, once, as `from_function` asks.

        Parameters
        ----------
        block_mask : torch.nn.attention.flex_attention.BlockMask

        Returns
        -------
        MaskInfo

        Examples
        --------
        >>> import torch
        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> block_mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 200, 200, device="cpu")
        >>> int(attnmask.MaskInfo.from_block_mask(block_mask).attention_mask.sum())
        20100
        """
        from attnmask._torch_blocks import from_block_mask

        return from_block_mask(block_mask)

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
        return tree.flatten(self._state)

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
        info = object.__new__(cls)
        info._held, info._leaves = None, tree.parts(aux_data, children)
        return info

    def __getstate__(self) -> dict[str, Any]:
        children, aux_data = self.tree_flatten()
        return tree.pickled(aux_data, children)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._held, self._leaves = None, tree.unpickled(state)

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
        return shardings(self._state, sequence_parallel, mesh)

    # Pictures

    def visualize(
        self,
        block_size: int | tuple[int, int] | None = None,
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

        On a terminal, cells have the colour of their segment, unless the environment variable ``NO_COLOR`` is set.

        Parameters
        ----------
        block_size : int or (int, int), optional
            How many queries and keys make a cell. If not given, cells are the smallest that fit `max_rows`, `max_cols`
            and the terminal; without `fit_in_screen`, 32.
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
        >>> attnmask.MaskInfo.causal(4).visualize(show_segments=False)  # doctest: +NORMALIZE_WHITESPACE
        mask [1, 1, 4, 4], batch 0, head 0; 62.5 % live; a cell is 1 × 1 pairs
          ========
        ||██      ||
        ||████    ||
        ||██████  ||
        ||████████||
          ========
        '██' all live, '░░' some live, '  ' none
        """
        from attnmask import _render as render

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
            coloured=not return_str and render.takes_colours(sys.stdout),
        )
        if return_str:
            return drawing
        print(drawing)
        return None

    def plot(self, ax: Any = None) -> Any:
        """Draw the first plane of the mask with matplotlib: the more of a cell is live, the stronger its colour.

        If segments are known, cells inside one of them have its colour.

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
        from attnmask import _render as render

        return render.plot(self._drawable(), ax)

    def _repr_html_(self) -> str | None:
        """A picture for notebooks; None, which leaves them with the words, where there is nothing to draw."""
        from attnmask import _render_svg

        state = self._state
        if state.base is None or 0 in state.extent:
            return None
        return _render_svg.svg(self._drawable())

    def _drawable(self) -> Any:
        self._state.shape("draw it")
        return self


# Every public member is logged in debug mode.
for _name, _member in list(vars(MaskInfo).items()):
    if not _name.startswith("_"):
        setattr(MaskInfo, _name, traced(_member))
    if not _name.startswith("_") or _name in ("__init__", "__getitem__", "__and__", "__or__", "__invert__"):
        _function = getattr(vars(MaskInfo)[_name], "__func__", vars(MaskInfo)[_name])
        if isinstance(_function, FunctionType):
            left_to_python(
                _function,
                "a MaskInfo is made outside of compiled functions: pass it to them, or what "
                "attnmask.torch.mask_tensors makes of it",
            )
