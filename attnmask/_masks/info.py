"""`MaskInfo`: which query may attend to which key, as a description that becomes an array only on request.

A mask has shape ``[B, H, Q, K]``: batch rows, heads, queries and keys; one head stands for all heads that share it. It
starts from a base (segments or an array) and applies terms in order, each of which removes pairs or adds some::

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
from collections.abc import Sequence
from types import FunctionType
from typing import Any, Literal, Never, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from attnmask._common.arguments import TOP_LEFT, AxisName, Offsets, describe, flag
from attnmask._common.debug import traced
from attnmask._common.graphs import left_to_python
from attnmask._common.keywords import hides
from attnmask._common.types import AnyFunction, Arguments, Array, Axes, BlockMask
from attnmask._faces.habits import ask
from attnmask._masks import derived, sources, transforms
from attnmask._masks.neighborhood import of_neighborhood
from attnmask._masks.other_ways import Held, OtherWays
from attnmask._masks.program import words
from attnmask._masks.sharding import MaskSharding, shardings
from attnmask._masks.state import ARRAYS, AXES, DETAILS, FLAGS, POSITIONS, State, changed, with_details


class MaskInfo(OtherWays):
    """Which query may attend to which key, as a description.

    Make one with `full`, `causal`, `from_lengths`, `from_padding_mask`, `from_segments`, `from_cu_seqlens`,
    `from_attention_mask`, `from_blocks`, `neighborhood` or `from_function`. Narrow it with the `apply_*` methods.
    Combine masks with ``&``, ``|`` and ``~``, and slice them. Read `density`, `q_segment_ids` or `q_lens`, and draw it
    with `print` or `visualize`.

    Except for `from_function`, all of these cost next to nothing at any length: pairs are computed only when you read
    `attention_mask` or `bias`, or convert to a dtype. This happens once, in C, and the result is kept.

    A MaskInfo is immutable: methods return new ones, which share arrays, and every array you get from it is read-only.
    Inputs are copied, except masks ``[B, Q, K]`` and ``[B, H, Q, K]``, which are used in place: **do not change them
    afterwards**.

    Two are equal if they allow the same pairs, however they were made; a head shared by many equals that many separate
    heads. They are not hashable.

    Parameters
    ----------
    attention_mask : array_like, shape [B, Q, K] or [B, H, Q, K], optional
        bool or numbers; nonzero means allowed.
    q_segment_ids, kv_segment_ids : array_like of integers, shape [B, Q] or [B, H, Q] ([B, K] or [B, H, K]), optional
        Tokens attend to tokens with the same id; negative ids are padding. With an `attention_mask`, ids are only
        labels.
    cu_seqlens_q, cu_seqlens_kv : array_like of integers, 1-D, optional
        Where sequences start and end, for the properties of that name.
    q_positions, kv_positions : array_like of integers, shape [B, Q] ([B, K]), optional
        Positions of tokens, for the properties of that name.
    token_type_ids_baked_in, chunked_mask_baked_in, sliding_window_baked_in, causal_mask_baked_in : bool
        True if `attention_mask` was already narrowed that way; `baked_in_masks` reports it. Flags mask nothing out: use
        `apply_causal` and the other `apply_*` methods for that. A flag without an `attention_mask` is a ValueError, and
        so is the first one if the mask allows keys after their query.
    batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name : str, tuple of str or None
        Mesh axes, for `get_shardings`.

    See Also
    --------
    flash_attention : takes it as `attention_mask`.
    mask_to_segment_ids : compute segment ids of any array.

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
        arrays = attention_mask, q_segment_ids, kv_segment_ids, cu_seqlens_q, cu_seqlens_kv
        axes = batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name
        values = (*arrays, q_positions, kv_positions, *axes)
        given: Arguments = dict(zip((*ARRAYS, *POSITIONS, *AXES), values, strict=True))
        given |= {
            FLAGS["causal"]: causal_mask_baked_in,
            FLAGS["sliding_window"]: sliding_window_baked_in,
            FLAGS["chunked"]: chunked_mask_baked_in,
            FLAGS["token_type_ids"]: token_type_ids_baked_in,
        }
        self._held, self._leaves = changed(State(), given), None

    # Making one

    @classmethod
    def full(cls, q_len: int, kv_len: int | None = None, batch: int = 1) -> Self:
        """Let every query attend to every key: the usual start if there is no padding.

        Parameters
        ----------
        q_len : int
        kv_len : int, optional
            Defaults to `q_len`.
        batch : int
            The number of batch rows.

        Returns
        -------
        MaskInfo
            It holds no array. All tokens of a row form one segment.

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
        offset: Offsets | Literal["bottom-right"] = TOP_LEFT,
        batch: int = 1,
    ) -> Self:
        """Let queries attend only to keys up to their own position: `full` with `apply_causal`.

        Parameters
        ----------
        q_len : int
        kv_len : int, optional
            Defaults to `q_len`.
        offset : int, array_like of integers, shape [B], or "bottom-right"
            As in `apply_causal`. Use ``"bottom-right"`` if the queries are the last tokens, as in decoding.
        batch : int
            The number of batch rows.

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
            The number of queries and keys; defaults to the largest length. ValueError if a row has more.

        Returns
        -------
        MaskInfo
            All tokens of a row are in one segment.

        See Also
        --------
        MaskInfo.from_padding_mask : the same from a mask of tokens.
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
            bool or numbers; nonzero for tokens, which attend to each other, and zero for padding. Copied.

        Returns
        -------
        MaskInfo

        See Also
        --------
        MaskInfo.from_attention_mask : for a mask of pairs; pass ``[Q, K]`` as ``mask[None]``.

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
        """Make a mask in which tokens attend to tokens of the same segment.

        Parameters
        ----------
        q_segment_ids : array_like of integers, shape [B, Q] or [B, H, Q]
            Negative ids are padding. With `is_attn_mask`, bool or numbers.
        kv_segment_ids : array_like of integers, shape [B, K] or [B, H, K], optional
            Segment ids of the keys; default to those of the queries.
        q_positions, kv_positions, batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name
            As in `MaskInfo`.
        is_attn_mask : bool
            The arguments are padding masks: nonzero marks tokens, all in one segment.

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
        axes = batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name
        return cls._of(with_details(state, (q_positions, kv_positions), axes))

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
        """Make a mask from an array of pairs, or of tokens.

        Parameters
        ----------
        attention_mask : array_like, shape [B, T], [B, Q, K] or [B, H, Q, K]
            bool or numbers; nonzero means allowed. ``[B, T]`` is a padding mask: its tokens all attend to each other.
            Pass ``[Q, K]`` as ``mask[None]``. Arrays of pairs are not copied: do not write to them afterwards. Their
            segment ids are 0 for queries and keys with an allowed pair in any head, and -1 for the rest.
        q_positions, kv_positions, batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name
            As in `MaskInfo`.
        mask_is_valid : bool
            If False, nonzero means masked out.

        Returns
        -------
        MaskInfo

        Warns
        -----
        AttnmaskWarning
            If a mask of two axes is square, and so may be one ``[Q, K]``; `from_padding_mask` leaves no doubt.

        Examples
        --------
        >>> import attnmask
        >>> info = attnmask.MaskInfo.from_attention_mask([[[1, 1, 0], [0, 0, 0]]])
        >>> info.q_segment_ids, info.kv_segment_ids
        (array([[ 0, -1]], dtype=int32), array([[ 0,  0, -1]], dtype=int32))
        """
        state = sources.of_array(attention_mask, mask_is_valid)
        axes = batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name
        return cls._of(with_details(state, (q_positions, kv_positions), axes))

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
        """Make a mask from where sequences start and end: one per batch row, or all in one row.

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
            If `packed`, ordinary cu_seqlens: the running sum of the lengths, of shape [sequences + 1], from 0.
            Otherwise pairs: ``[start, end]`` of each batch row, one after the other, of shape [2 B]. An end before its
            start makes an empty row, and one past the length is clipped.
        max_q_len : int
            The number of queries. If `packed`, it defaults to the number of tokens; the rest is padding.
        cu_seqlens_kv : array_like of integers, optional
            The same for keys; defaults to that of the queries.
        max_kv_len : int, optional
            The number of keys. Defaults to `max_q_len`, or to the number of packed keys if `packed` with
            `cu_seqlens_kv`.
        q_positions, kv_positions, batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name
            As in `MaskInfo`.
        packed : bool, optional
            True for sequences laid end to end in one row; segment ids are their numbers. False or None for pairs.

        Returns
        -------
        MaskInfo

        Warns
        -----
        AttnmaskWarning
            If pairs could also be ordinary cu_seqlens and `packed` is not given.

        See Also
        --------
        prepare_cu_seqlens_from_mask : compute ``cu_seqlens`` of a padded batch.
        cu_seqlens_to_pairs : convert one form to the other.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_cu_seqlens([0, 2, 2, 5], packed=True).q_segment_ids
        array([[0, 0, 2, 2, 2]], dtype=int32)
        >>> attnmask.MaskInfo.from_cu_seqlens([0, 2, 1, 4], max_q_len=4, packed=False).q_lens
        array([2, 3], dtype=int32)
        """
        state = sources.of_cu_seqlens(cu_seqlens_q, max_q_len, cu_seqlens_kv, max_kv_len, packed)
        axes = batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name
        return cls._of(with_details(state, (q_positions, kv_positions), axes))

    @classmethod
    def from_blocks(
        cls,
        blocks: ArrayLike,
        block_size: int | tuple[int, int],
        q_len: int | None = None,
        kv_len: int | None = None,
    ) -> Self:
        """Make a block-sparse mask from which blocks of pairs are allowed.

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
            bool or numbers; nonzero means allowed. Copied, one number per block.
        block_size : int or (int, int)
            Queries and keys per block; 64 and its multiples are fast.
        q_len, kv_len : int, optional
            The number of queries and keys, if the last blocks are cut. Defaults to what the blocks cover.

        Returns
        -------
        MaskInfo

        See Also
        --------
        MaskInfo.grid : count the allowed pairs in each block of any mask.

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
    def neighborhood(
        cls,
        shape: Sequence[int],
        kernel: int | Sequence[int],
        *,
        stride: int | Sequence[int] = 1,
        dilation: int | Sequence[int] = 1,
        causal: bool | Sequence[bool] = False,
        batch: int = 1,
    ) -> Self:
        """Let each point of a grid attend to those near it: neighborhood attention, as NATTEN defines it.

        Tokens are the points in row-major order: of a sequence, an image or a video. A query sees a window of `kernel`
        points along each axis, with itself in the middle. At the borders, the window is moved inside, so that all
        queries see equally many keys. Attention skips most of what is not seen: in an image of 56 x 56 points with a
        kernel of 7, it takes a tenth of the time of all pairs.

        ::

            shape (6,), kernel 3    stride 2           dilation 2         causal
              k 0 1 2 3 4 5       k 0 1 2 3 4 5      k 0 1 2 3 4 5      k 0 1 2 3 4 5
            q 0 # # # . . .     q 0 # # # . . .    q 0 # . # . # .    q 0 # . . . . .
              1 # # # . . .       1 # # # . . .      1 . # . # . #      1 # # . . . .
              2 . # # # . .       2 . . # # # .      2 # . # . # .      2 # # # . . .
              3 . . # # # .       3 . . # # # .      3 . # . # . #      3 . # # # . .
              4 . . . # # #       4 . . . # # #      4 # . # . # .      4 . . # # # .
              5 . . . # # #       5 . . . # # #      5 . # . # . #      5 . . . # # #

        Parameters
        ----------
        shape : tuple of one to three ints
            The points along each axis, such as (56, 56) for an image.
        kernel : int or one for each axis
            Odd for an axis that is not causal. 1 is legal.
        stride : int or one for each axis
            So many neighboring queries share the window of the one in their middle, at most `kernel`.
        dilation : int or one for each axis
            The distance between the keys of a window; `kernel` times this is at most the length of the axis.
        causal : bool or one for each axis
            The window ends with the query itself, and is cut at the first point.
        batch : int
            The number of batch rows.

        Returns
        -------
        MaskInfo
            It holds no array of tokens. All tokens of a row form one segment.

        Examples
        --------
        >>> import attnmask
        >>> info = attnmask.MaskInfo.neighborhood((3, 4), 3)
        >>> info.attention_mask[0, 0, 5].reshape(3, 4).astype(int)  # what the point (1, 1) sees
        array([[1, 1, 1, 0],
               [1, 1, 1, 0],
               [1, 1, 1, 0]])
        """
        grid = {"shape": shape, "kernel": kernel, "stride": stride, "dilation": dilation, "causal": causal}
        return cls._of(of_neighborhood(grid, batch))

    @classmethod
    def from_function(cls, f: AnyFunction, q_len: int, kv_len: int, batch: int = 1, heads: int = 1) -> Self:
        """Make a mask from a function of index arrays, like a mask_mod of FlexAttention.

        It is called part by part, so no array is as large as the mask, and never again. One number is kept per tile of
        64 x 64 pairs, and 512 bytes per distinct mixed tile.

        Parameters
        ----------
        f : callable
            ``f(b, h, q, k)`` gets read-only index arrays of batch rows, heads, queries and keys, which broadcast
            against each other; write ``&`` and ``|`` for ``and`` and ``or``. It returns bools or integers, nonzero for
            allowed pairs, of any shape that broadcasts to that of all four. If PyTorch is loaded, a function that fails
            with arrays gets tensors.
        q_len, kv_len : int
        batch, heads : int
            The number of batch rows and heads. If `f` does not use ``h``, all heads share the mask.

        Returns
        -------
        MaskInfo

        See Also
        --------
        MaskInfo.from_blocks : for blocks that are allowed or masked out as a whole.
        MaskInfo.from_block_mask : convert a BlockMask of FlexAttention.

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
    def from_block_mask(cls, block_mask: object) -> MaskInfo:
        """Make a mask from a BlockMask of FlexAttention on the CPU.

        Its ``mask_mod`` is evaluated once for every pair, as in `from_function`.

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
        from attnmask.torch._blocks import from_block_mask

        return cls._of(from_block_mask(block_mask))

    # Narrowing and combining

    def apply_causal(
        self, offset: Offsets | Literal["bottom-right"] = TOP_LEFT, *, within_segments: bool = False
    ) -> Self:
        """Let queries attend only to keys up to their own position: ``k <= q + offset``.

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
            Additional keys; negative for fewer. ``"bottom-right"`` aligns the last query with the last key.
        within_segments : bool
            Count positions from the start of each segment among the queries and among the keys, not from the start of
            the row; ``"bottom-right"`` then aligns the last query and the last key of each segment. Queries see no key
            of another segment. The mask must hold segment ids. If queries and keys are the same tokens, this makes no
            difference.

        Returns
        -------
        MaskInfo

        Warns
        -----
        AttnmaskWarning
            If there are fewer queries than keys and no `offset`, or if packed sequences start at different positions in
            queries and keys, without `within_segments`.

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
        """Let queries attend only to keys near their own position: ``-left <= k - q - offset <= right``.

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
            The number of keys to either side, or to the left and to the right, beside the token itself: a window of 4
            tokens that ends with it is ``(3, 0)``. An array has one number per head. In a pair, None means all keys
            on that side.
        offset : int, array_like of integers, shape [B], or "bottom-right"
            Added to the position of each query. ``"bottom-right"`` aligns the last query with the last key.
        mode : {None, "default", "decode", "prefill"}
            ``"decode"`` keeps only query `index` and the keys in its window: ``left + right + 1`` of them from ``index
            - left`` on, shifted inside if they leave the mask. ``"prefill"`` keeps all queries and the last keys, as
            many as the window is wide: ``left + right + 1``, or `sliding_window` if that is one number. Segment ids and
            positions are sliced too.
        index : int or array_like of integers, shape [B], optional
            The query to decode, clipped to the first and the last.
        within_segments : bool
            Count positions from the start of each segment, as in `apply_causal`.

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
        """Let queries attend only to keys of their own chunk up to their own position: ``k <= q + offset``.

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

        Segment ids become chunk numbers from 1, and stay negative for padding.

        Parameters
        ----------
        chunk_size : int
            At least 1.
        offset : int or array_like of integers, shape [B]
            Added to the position of each query, which also determines its chunk.
        within_segments : bool
            Count chunks and positions from the start of each segment, not from the start of the row. The mask must hold
            segment ids.

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
        """Let queries attend to keys of the same type: in addition, only, or instead.

        A causal mask becomes, with the types 0 1 1 2 2::

            "union"            "intersect"        "replace"

                k 0 1 2 3 4        k 0 1 2 3 4        k 0 1 2 3 4
              q 0 # . . . .      q 0 . . . . .      q 0 . . . . .
                1 # # # . .        1 . # . . .        1 . # # . .
                2 # # # . .        2 . # # . .        2 . # # . .
                3 # # # # #        3 . . . # .        3 . . . # #
                4 # # # # #        4 . . . # #        4 . . . # #

        Parameters
        ----------
        token_type_ids : array_like of integers, shape [B, T], or a tuple of [B, Q] and [B, K]
            The type of each token, for queries and keys alike or for each. Negative types match nothing.
        combine : {"union", "intersect", "replace"}
            Allow pairs of the same type in addition, allow only these of the pairs so far, or replace the mask by them.
        zero_policy : {"q", "kv", "both", "none"}
            Type 0 matches nothing, whether you name queries, keys or both (the effect is the same). With ``"none"`` it
            is an ordinary type.
        update_segment_ids : bool, optional
            Use the types as segment ids, -1 for type 0. The default is to do so for all but ``"union"``.

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
        """Let all queries of a segment also attend to its first tokens: the mask of a prefix LM.

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

        Pairs that earlier terms allow stay allowed; later terms apply to the prefix too.

        Parameters
        ----------
        lengths : int or array_like of integers, shape [B]
            The number of prefix tokens per segment, not negative. Segments come from the held segment ids; padding is
            in none.

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
        """Let queries attend only to the first keys of each row, and optionally keep only the last tokens before them.

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
            The number of keys allowed in each row, not negative; larger numbers mean all.
        q_len : int, optional
            Keep this many queries, the last one at ``kv_lengths - 1``. Defaults to all.
        sliding_window : int, optional
            Keep this many keys, up to ``kv_lengths``. Defaults to all, also if there are fewer.

        Returns
        -------
        MaskInfo
            Segment ids and positions are sliced too.

        Examples
        --------
        >>> import attnmask
        >>> info = attnmask.MaskInfo.from_segments([[0] * 6] * 2).apply_causal()
        >>> info.apply_kv_lengths([4, 6], q_len=1).attention_mask[:, 0, 0].astype(int)
        array([[1, 1, 1, 1, 0, 0],
               [1, 1, 1, 1, 1, 1]])
        """
        return self._of(transforms.kv_lengths(self._state, kv_lengths, q_len, sliding_window))

    def __and__(self, other: MaskInfo) -> Self:
        """Allow the pairs that both allow; batch rows and heads broadcast.

        Segment ids, positions and mesh axes come from the left mask where it has them. Whatever is baked into either
        is baked into the result.

        Examples
        --------
        >>> import attnmask
        >>> causal = attnmask.MaskInfo.from_segments([[0, 0, 0]]).apply_causal()
        >>> (causal & attnmask.MaskInfo.from_segments([[0, 1, 1]])).attention_mask[0, 0].astype(int)
        array([[1, 0, 0],
               [0, 1, 0],
               [0, 1, 1]])
        """
        return self._joined(other, "and")

    def __or__(self, other: MaskInfo) -> Self:
        """Allow the pairs that either allows; ids, positions and axes are handled as in ``&``.

        Whatever is baked into both is baked into the result.

        Examples
        --------
        >>> import attnmask
        >>> first, last = (attnmask.MaskInfo.from_segments([ids]) for ids in ([0, 0, -1], [-1, 0, 0]))
        >>> (first | last).density() == 7 / 9
        True
        """
        return self._joined(other, "or")

    def __invert__(self) -> Self:
        """Allow exactly the masked pairs, including padding. The result has no segment ids and nothing baked in.

        Examples
        --------
        >>> import attnmask
        >>> (~attnmask.MaskInfo.from_segments([[0, 1, -1]])).attention_mask[0, 0].astype(int)
        array([[0, 1, 1],
               [1, 0, 1],
               [1, 1, 1]])
        """
        return self._of(transforms.inverted(self._state))

    __rand__, __ror__ = __and__, __or__  # refuse an array on the left side, too

    def _joined(self, other: object, operator: str) -> Self:
        if not isinstance(other, MaskInfo):
            if not hasattr(other, "__array__"):
                return NotImplemented  # type: ignore[no-any-return]
            raise TypeError(
                f"the other operand must be a MaskInfo, got {describe(other)}; "
                "write MaskInfo.from_attention_mask(array)"
            )
        return self._of(transforms.joined(self._state, other._state, operator))

    def __getitem__(self, index: object) -> Self:
        """Return a part of the mask, ``mask[rows, heads, queries, keys]``, still as a description.

        Each index is a slice, clipped as in NumPy, or an integer, which keeps its axis. ``...`` stands for all missing
        axes. Heads that share a mask still share it, whichever you select. Segment ids and positions are sliced too.

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

    def replace(
        self,
        *,
        attention_mask: ArrayLike | None = None,
        q_segment_ids: ArrayLike | None = None,
        kv_segment_ids: ArrayLike | None = None,
        cu_seqlens_q: ArrayLike | None = None,
        cu_seqlens_kv: ArrayLike | None = None,
        **others: object,
    ) -> Self:
        """Return a MaskInfo with some parts replaced.

        Parameters
        ----------
        attention_mask : array_like, shape [B, Q, K] or [B, H, Q, K], optional
            The new base, without any terms; segment ids stay, as labels. Not copied.
        q_segment_ids, kv_segment_ids : array_like of integers, [B, Q] or [B, H, Q] ([B, K] or [B, H, K]), optional
            If the base is made of segments, all pairs or lengths, it is rebuilt from these, and terms stay. Otherwise
            they are only labels.
        cu_seqlens_q, cu_seqlens_kv : array_like of integers, 1-D, optional
            Dropped if a mask or ids are given without them.
        **others
            Other arguments of `MaskInfo`: positions, flags, mesh axis names. None is stored as a value here.

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
        arrays = attention_mask, q_segment_ids, kv_segment_ids, cu_seqlens_q, cu_seqlens_kv
        return self._of(changed(self._state, dict(zip(ARRAYS, arrays, strict=True)) | others))

    # Asking

    @property
    def shape(self) -> tuple[int | None, int | None, int | None]:
        """Batch rows, queries, keys; None for unknown ones. A printed mask also shows its heads.

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
        """The number of batch rows, or None.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_random(2, 3, 5).batch_size
        2
        """
        return self._state.extent[0]

    @property
    def q_len(self) -> int | None:
        """The number of queries, or None.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_random(2, 3, 5).q_len
        3
        """
        return self._state.extent[2]

    @property
    def kv_len(self) -> int | None:
        """The number of keys, or None.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_random(2, 3, 5).kv_len
        5
        """
        return self._state.extent[3]

    @property
    def heads(self) -> int:
        """The number of heads with their own mask; 1 if all share one.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[[0, 0], [0, 1]]]).heads
        2
        """
        return self._state.shape("tell heads")[1]

    def density(self) -> float:
        """Return the share of allowed pairs, from 0 to 1, without writing out the mask.

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
        """Count the allowed pairs in each cell of a grid, as `visualize` draws it.

        Parameters
        ----------
        batch, head : int
            The plane; IndexError if it does not exist.
        q_cell, k_cell : int
            Queries and keys per cell, at least 1. The last cells may have fewer.

        Returns
        -------
        ndarray of int64, shape [ceil(Q / q_cell), ceil(K / k_cell)]

        See Also
        --------
        MaskInfo.density : the allowed share of the whole mask.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 0, 0, 0]]).apply_causal().grid(0, 0, 2, 2).tolist()
        [[3, 0], [4, 3]]
        """
        return derived.grid(self._state, batch, head, q_cell, k_cell)

    def labels(self, batch: int, head: int) -> tuple[NDArray[np.int32], NDArray[np.int32]] | None:
        """Return the segment ids of queries and keys of one plane, as `visualize` shows them.

        Parameters
        ----------
        batch, head : int
            The plane; IndexError if it does not exist.

        Returns
        -------
        (ndarray of int32, ndarray of int32) or None
            The held ids, otherwise those of equal rows and columns, or None if there are too many to compare.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 1], [2, 2]]).labels(1, 0)
        (array([2, 2], dtype=int32), array([2, 2], dtype=int32))
        """
        return derived.plane_labels(self._state, batch, head)

    def is_self_attention(self) -> bool:
        """Return whether queries and keys are the same tokens.

        Judged by the held segment ids, otherwise by equal numbers of queries and keys, otherwise by cu_seqlens.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 1]]).is_self_attention()
        True
        """
        return derived.is_self_attention(self._state)

    @property
    def is_multi_sequence(self) -> np.bool:
        """True if the held segment ids name more than one segment: if any is above 0.

        Those of queries, or of keys if only these are held; False if none are.

        Examples
        --------
        >>> import attnmask
        >>> bool(attnmask.MaskInfo.from_segments([[0, 0, 1]]).is_multi_sequence)
        True
        """
        return derived.is_multi_sequence(self._state)

    @property
    def q_segment_ids(self) -> NDArray[np.int32]:
        """The segment id of each query, ``[B, Q]`` or ``[B, H, Q]``; negative for padding.

        The ids that the mask holds, otherwise those of `get_or_compute_segment_ids`.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 0, 1]]).q_segment_ids
        array([[0, 0, 1]], dtype=int32)
        """
        return derived.side_ids(self._state, 0)

    @property
    def kv_segment_ids(self) -> NDArray[np.int32]:
        """The segment id of each key, ``[B, K]`` or ``[B, H, K]``; negative for padding.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 0, 1]]).kv_segment_ids
        array([[0, 0, 1]], dtype=int32)
        """
        return derived.side_ids(self._state, 1)

    @property
    def q_lens(self) -> NDArray[np.int32] | None:
        """The number of queries of each segment, or of each batch row if there is one segment; without padding.

        Segments are counted over all rows together, from 0 to the highest id, by the first head of per-head ids. None
        if it cannot be told.

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
        """The number of keys of each segment, or of each batch row if there is one segment; see `q_lens`.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 1]], [[0, 1, 1, -1]]).kv_lens
        array([1, 2], dtype=int32)
        """
        return derived.lens(self._state, 1)

    @property
    def cu_seqlens_q(self) -> NDArray[np.integer]:
        """Where the segments of the queries start and end; see `get_or_compute_qkv_cu_seqlens`.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 0, 1, -1]]).cu_seqlens_q[:4]
        array([0, 2, 3, 3], dtype=int32)
        """
        return derived.cu_seqlens_of_int32(self._state)[0]

    @property
    def cu_seqlens_kv(self) -> NDArray[np.integer]:
        """Where the segments of the keys start and end; see `get_or_compute_qkv_cu_seqlens`.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_cu_seqlens([0, 2, 5], packed=True).cu_seqlens_kv
        array([0, 2, 5], dtype=int32)
        """
        return derived.cu_seqlens_of_int32(self._state)[1]

    @property
    def q_positions(self) -> NDArray[np.int32] | None:
        """The given positions of the queries, or None.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 0]], q_positions=[[5, 6]]).q_positions
        array([[5, 6]], dtype=int32)
        """
        return self._state.q_positions

    @property
    def kv_positions(self) -> NDArray[np.int32] | None:
        """The given positions of the keys, or None.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 0]]).kv_positions is None
        True
        """
        return self._state.kv_positions

    @property
    def baked_in_masks(self) -> dict[str, bool]:
        """The kinds of terms that were applied, by name.

        Examples
        --------
        >>> import attnmask
        >>> info = attnmask.MaskInfo.from_segments([[0, 0]]).apply_causal().apply_chunked(2)
        >>> [name for name, applied in info.baked_in_masks.items() if applied]
        ['causal', 'chunked']
        """
        return {kind: kind in self._state.baked for kind in FLAGS}

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

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MaskInfo):
            ask("comparison", other)
            return NotImplemented
        return derived.are_equal(self._state, other._state)

    def __bool__(self) -> bool:
        raise TypeError(
            "a MaskInfo is neither True nor False: use & | ~ for `and`, `or`, `not`, and `is None` for a missing one"
        )

    def __dir__(self) -> list[str]:
        """Return what completion offers: the members that no shorter one replaces."""
        return [name for name in super().__dir__() if name[0] == "_" or name not in vars(OtherWays)]

    # Drawing

    def __repr__(self) -> str:
        try:
            return f"{type(self).__name__}({self._state})"
        except Exception:  # JAX may put other objects than arrays into the leaves
            return f"{type(self).__name__}({len(self._leaves[1]) if self._leaves else 0} leaves)"

    def __str__(self) -> str:
        """Draw the first plane as `visualize` does, as wide as the terminal, below a line of text.

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
        from attnmask._masks import render

        base, terms = words(state.program, state.segment_based)
        return render.text(self._drawable(), " ".join([base, *terms]))

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
        """Draw one plane of the mask in text: each cell is empty, mixed or full.

        On a terminal, cells take the colour of their segment unless the environment variable ``NO_COLOR`` is set.

        Parameters
        ----------
        block_size : int or (int, int), optional
            Queries and keys per cell. By default the smallest cells that fit `max_rows`, `max_cols` and the terminal,
            or 32 without `fit_in_screen`.
        batch, head : int
            The plane; IndexError if it does not exist.
        fit_in_screen : bool
            Enlarge cells until there are at most `max_rows` × `max_cols`.
        max_rows, max_cols : int
            At least 1.
        charset : {"unicode", "ascii"}
        show_segments : bool
            Write segment ids along both sides.
        return_str : bool
            Return the drawing instead of printing it.

        Returns
        -------
        str or None

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.causal(4).visualize(show_segments=False)  # doctest: +NORMALIZE_WHITESPACE
        mask [1, 1, 4, 4], batch 0, head 0; 62.5 % allowed; a cell is 1 × 1 pairs
          ========
        ||██      ||
        ||████    ||
        ||██████  ||
        ||████████||
          ========
        '██' all allowed, '░░' some allowed, '  ' none
        """
        from attnmask._masks import render

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

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the first plane of the mask with matplotlib: the more of a cell is allowed, the stronger its colour.

        If segments are known, cells take the colour of their segment.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            Where to draw; defaults to a new figure.

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
        from attnmask._masks import render

        return render.plot(self._drawable(), ax)

    def _repr_html_(self) -> str | None:
        """Return a picture for notebooks, or None if there is nothing to draw; they then show the repr."""
        from attnmask._masks import svg as _render_svg

        state = self._state
        if state.base is None or 0 in state.extent:
            return None
        return _render_svg.svg(self._drawable())

    def _drawable(self) -> Any:
        self._state.shape("draw it")
        return self

    @property
    def _noun(self) -> str:
        return self._state.labels.noun

    # Converting

    @property
    def attention_mask(self) -> Array:
        """The mask as an array ``[B, H, Q, K]``, with one head if all share it.

        Read-only: for PyTorch, where True means allowed as well, write
        ``torch.from_numpy(mask.attention_mask.copy())``. bool, or the type of the array that it was made from or
        converted to by `to_dtype` or `materialize_attention_mask`. ValueError if the MaskInfo has no mask, MemoryError
        if it is too large.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 0, 1]]).attention_mask.shape
        (1, 1, 3, 3)
        """
        return derived.mask_array(self._state)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        """Return `attention_mask` in any dtype, for NumPy functions.

        Examples
        --------
        >>> import numpy as np, attnmask
        >>> np.where(attnmask.MaskInfo.from_segments([[0, 1]]), 0, -1)[0, 0]
        array([[ 0, -1],
               [-1,  0]])
        """
        return derived.array_protocol(self._state, dtype, copy)

    def __dlpack__(self, **given: Any) -> Any:
        """Return a copy of `attention_mask` for other libraries, as in ``torch.as_tensor(mask)``."""
        return np.array(self).__dlpack__(**given)

    def __dlpack_device__(self) -> tuple[int, int]:
        return np.empty(0).__dlpack_device__()

    def to_dtype(self, dtype: DTypeLike) -> Self:
        """Return the same mask with an `attention_mask` of another type.

        Parameters
        ----------
        dtype : dtype
            bool, an integer or a floating-point type.

        Returns
        -------
        MaskInfo
            The mask itself if it already has that type.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 0, 1]]).to_dtype("float32").attention_mask.dtype
        dtype('float32')
        """
        return self._made(transforms.to_dtype(self._state, dtype))

    def to_block_mask(self, block_size: int | tuple[int, int] = 128) -> BlockMask:
        """Return the mask as a BlockMask of FlexAttention. PyTorch must be installed.

        Parameters
        ----------
        block_size : int or tuple of two int
            Queries and keys per block.

        Returns
        -------
        torch.nn.attention.flex_attention.BlockMask
            On the CPU. Its ``mask_mod`` is built from the terms: nothing is as large as the mask.

        Examples
        --------
        >>> import torch
        >>> info = attnmask.MaskInfo.from_segments([[0] * 128 + [1] * 128]).apply_causal()
        >>> block_mask = info.to_block_mask()
        >>> block_mask.shape, block_mask.sparsity()
        ((1, 1, 256, 256), 50.0)
        """
        from attnmask.torch._blocks import to_block_mask

        return to_block_mask(self._state, block_size)

    @staticmethod
    def get_empty_sharding() -> MaskSharding:
        """Return a `MaskSharding` without a sharding for any array.

        Examples
        --------
        >>> import attnmask
        >>> set(attnmask.MaskInfo.get_empty_sharding())
        {None}
        """
        return MaskSharding(*[None] * len(MaskSharding._fields))

    def get_shardings(self, sequence_parallel: bool = False, *, mesh: object) -> MaskSharding:
        """Return how to divide the held arrays among the devices of a mesh, by axis names.

        Parameters
        ----------
        sequence_parallel : bool
            Also divide queries, and the ids and positions of tokens.
        mesh : jax.sharding.Mesh or mapping of str to int
            The axes of the mesh and their sizes.

        Returns
        -------
        MaskSharding
            ``PartitionSpec`` if JAX is installed, otherwise tuples. A dimension is not divided if the axes do not
            divide its length. None for arrays that are not held, and for cu_seqlens.

        Examples
        --------
        >>> import attnmask
        >>> info = attnmask.MaskInfo.from_segments([[0] * 8] * 4)
        >>> tuple(info.get_shardings(mesh={"dp": 2, "fsdp": 2, "tp": 2}).q_segment_ids)
        (('dp', 'fsdp'), None)
        """
        return shardings(self._state, sequence_parallel, mesh)


class _Constructor(classmethod):  # type: ignore[type-arg]
    """A class method that a mask refuses: called on one, it would ignore it."""

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        made = super().__get__(None, MaskInfo if owner is None else owner)
        if instance is None:
            return made
        name = self.__func__.__name__
        instead = "mask.apply_causal(...) to narrow that one, or " if name == "causal" else ""
        return lambda *_, **__: ask("constructor", name, instead=instead)


_LEFT_TO_PYTHON = ("__init__", "__getitem__", "__and__", "__or__", "__invert__")  # and all that is public

# Every public member is logged in debug mode, by the name of this class. `help` shows those of its bases below its own.
for _owner in (Held, OtherWays, MaskInfo):
    for _name, _member in list(vars(_owner).items()):
        _function = getattr(_member, "fget", None) or getattr(_member, "__func__", _member)
        if not isinstance(_function, FunctionType):
            continue
        _function.__qualname__ = f"MaskInfo.{_name}"
        if not _name.startswith("_"):
            _member = traced(_member)
            if isinstance(_member, classmethod) and _name != "tree_unflatten":
                _member = _Constructor(_member.__func__)
            setattr(_owner, _name, _member)
        if not isinstance(_member, property) and (_name[0] != "_" or _name in _LEFT_TO_PYTHON):
            left_to_python(
                getattr(_member, "__func__", _member),
                "a MaskInfo is made outside of compiled functions: pass it to them, or what "
                "attnmask.torch.mask_tensors makes of it",
            )
