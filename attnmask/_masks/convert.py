"""Convert between masks, segment ids, ``cu_seqlens`` and ranges of tokens.

A **mask** says which query may attend to which key. **Segment ids** say it for packed sequences: a pair is allowed if
both ids are equal and not negative. ::

                               k ids  0 0 0 1 1 -1
    mask_to_segment_ids      q ids
    segment_ids_to_mask        0      # # # . . .
                               0      # # # . . .
                               1      . . . # # .
                              -1      . . . . . .

A padded batch needs less: where the tokens of each row start and end. This is the **pair form**, which the functions
here take and return under the name ``cu_seqlens``, like ejKernel. The `prepare_*` functions take the ordinary form, in
which sequences lie end to end::

    row 0   . . # # # .                        one row    a a a b b
    row 1   # # . . . .

    pairs        [2, 5, 0, 2]                  cu_seqlens [0, 3, 5]
                  start, end of each row                   running sum of the lengths

                      pairs_to_cu_seqlens([2, 5, 0, 2]) = [0, 3, 5]
                      cu_seqlens_to_pairs([0, 3, 5]) = [0, 3, 3, 5]

Packing drops the padding. So the first of these loses where the rows began, and the second returns positions in the
packed row.
"""

from __future__ import annotations

from types import FunctionType
from typing import Literal, SupportsIndex, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from attnmask._common.arguments import as_array
from attnmask._common.debug import traced
from attnmask._common.loading import _core
from attnmask._common.types import Array
from attnmask._faces.habits import ask


def mask_to_segment_ids(
    mask: ArrayLike, per_head: bool = False, strict: bool = False
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return segment ids for queries and keys by what they attend to.

    Queries with equal mask rows get the same id, and so do keys with equal columns. Each side counts from 0 in order of
    first appearance. Rows and columns without an allowed pair are padding, -1. ::

        k ids    0 0 1 -1 1
        q ids
          0      # # . . .
          0      # # . . .
          1      . . # . #
         -1      . . . . .

    Parameters
    ----------
    mask : array_like, shape [Q, K], [B, Q, K] or [B, H, Q, K]
        bool, or numbers; nonzero means allowed. Read in place.
    per_head : bool
        Return ids per head of a 4-D mask. Otherwise the first head's ids stand for all.
    strict : bool
        Raise ValueError if the ids do not reproduce the mask in every head: ids equal and valid exactly where it
        allows. They do for packed sequences, but not for a causal mask.

    Returns
    -------
    q_segment_ids, kv_segment_ids : ndarray of int32
        Shapes ``[Q]`` and ``[K]``, ``[B, Q]`` and ``[B, K]``, or with `per_head` ``[B, H, Q]`` and ``[B, H, K]``.

    See Also
    --------
    segment_ids_to_mask : the inverse.
    attention_mask_to_padding_segment_ids : only finds padding, and is faster.

    Notes
    -----
    Rows themselves are compared, not only their hashes: different rows never share an id. Time is proportional to the
    size of the mask, memory to its sides.

    Examples
    --------
    >>> import attnmask
    >>> q_ids, kv_ids = attnmask.mask_to_segment_ids([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 1]])
    >>> q_ids, kv_ids
    (array([0, 0, 1], dtype=int32), array([ 0,  0, -1,  1], dtype=int32))
    """
    return _core.mask_to_segment_ids(mask, per_head, strict)


def _equal_pairs(
    q_ids: NDArray[np.int32],
    kv_ids: NDArray[np.int32],
    names: tuple[str, str],
    dtype: DTypeLike,
    out: Array | None,
) -> Array:
    """Return the mask of ids that were checked one by one."""
    batch, other_batch = len(q_ids), len(kv_ids)
    heads = {ids.shape[1] for ids in (q_ids, kv_ids) if ids.ndim == 3}
    if batch != other_batch or len(heads) > 1:
        raise ValueError(
            f"{names[0]} and {names[1]} must have the same batch and heads, got shapes {q_ids.shape} and {kv_ids.shape}"
        )
    shape = (batch, heads.pop() if heads else 1, q_ids.shape[-1], kv_ids.shape[-1])
    return _core.mask_fill(shape, (("equal", q_ids, kv_ids, False),), dtype, 1, 0, out)


@overload
def segment_ids_to_mask(
    segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike],
    dtype: DTypeLike = ...,
    return_separate_masks: Literal[False] = ...,
    out: Array | None = ...,
) -> Array: ...
@overload
def segment_ids_to_mask(
    segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike],
    dtype: DTypeLike = ...,
    *,
    return_separate_masks: Literal[True],
    out: Array | None = ...,
) -> tuple[Array, Array, Array]: ...
@overload
def segment_ids_to_mask(
    segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike],
    dtype: DTypeLike,
    return_separate_masks: Literal[True],
    out: Array | None = ...,
) -> tuple[Array, Array, Array]: ...
def segment_ids_to_mask(
    segment_ids: ArrayLike | tuple[ArrayLike, ArrayLike],
    dtype: DTypeLike = np.bool_,
    return_separate_masks: bool = False,
    out: Array | None = None,
) -> Array | tuple[Array, Array, Array]:
    """Return the mask in which tokens attend to tokens with the same segment id.

    Parameters
    ----------
    segment_ids : array_like of integers, or a tuple of two
        Shape ``[B, T]`` or ``[B, H, T]`` for both queries and keys, or a tuple of one such array for each. A negative
        id is padding, which neither attends nor is attended to.
    dtype : dtype
        dtype of the mask: bool, or a number type, in which allowed pairs are 1.
    return_separate_masks : bool
        Also return which queries and which keys are not padding.
    out : ndarray, optional
        Write the mask here, and return it. It must have the mask's shape and type, and share no memory with the ids.

    Returns
    -------
    ndarray, shape [B, 1, Q, K] or [B, H, Q, K]
        With `return_separate_masks`, the tuple ``(q_mask, kv_mask, mask)``; the first two have the shapes of the ids.

    See Also
    --------
    mask_to_segment_ids : the inverse.
    MaskInfo.from_segments : the same mask as a description.

    Examples
    --------
    >>> import attnmask
    >>> attnmask.segment_ids_to_mask([[0, 0, 1, -1]])[0, 0].astype(int)
    array([[1, 1, 0, 0],
           [1, 1, 0, 0],
           [0, 0, 1, 0],
           [0, 0, 0, 0]])
    >>> attnmask.segment_ids_to_mask(([[0, 1]], [[1, 1, 0]]), dtype="float32")[0, 0]
    array([[0., 0., 1.],
           [1., 1., 0.]], dtype=float32)
    """
    if not isinstance(return_separate_masks, (bool, np.bool_)):
        raise TypeError(f"return_separate_masks must be a bool, got {return_separate_masks!r:.200}")
    if isinstance(segment_ids, tuple):
        if len(segment_ids) != 2:
            raise ValueError(
                f"segment_ids must be an array or a tuple of two, got a tuple of {len(segment_ids)}"
            )
        names = ("segment_ids[0]", "segment_ids[1]")
        q_ids = _core.segment_ids(segment_ids[0], names[0], out)
        kv_ids = _core.segment_ids(segment_ids[1], names[1], out)
    else:
        names = ("segment_ids", "segment_ids")
        q_ids = kv_ids = _core.segment_ids(segment_ids, "segment_ids", out)
    mask = _equal_pairs(q_ids, kv_ids, names, dtype, out)
    if not return_separate_masks:
        return mask
    valid = _core.segment_ids_to_token_mask
    return valid(q_ids, dtype), valid(kv_ids, dtype), mask


def segment_ids_to_qkv_masks(
    q_segment_ids: ArrayLike,
    kv_segment_ids: ArrayLike | None = None,
    dtype: DTypeLike = np.bool_,
    out: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Return which queries and which keys are not padding, and the mask between them.

    Parameters
    ----------
    q_segment_ids : array_like of integers, shape [B, Q] or [B, H, Q]
        A negative id is padding.
    kv_segment_ids : array_like of integers, shape [B, K] or [B, H, K], optional
        Defaults to those of the queries.
    dtype : dtype
        dtype of all three masks: bool, or a number type of zeros and ones.
    out : ndarray, optional
        Write the attention mask here, and return it. It must have the mask's shape and type, and share no memory with
        the ids.

    Returns
    -------
    q_mask : ndarray, shape of `q_segment_ids`
    kv_mask : ndarray, shape of `kv_segment_ids`
    attention_mask : ndarray, shape [B, 1, Q, K] or [B, H, Q, K]
        As in `segment_ids_to_mask`.

    See Also
    --------
    MaskInfo.get_qkv_masks : the same for a `MaskInfo`.

    Examples
    --------
    >>> import attnmask
    >>> q_mask, kv_mask, attention_mask = attnmask.segment_ids_to_qkv_masks([[0, 1]], [[0, 1, 1, -1]])
    >>> kv_mask
    array([[ True,  True,  True, False]])
    >>> attention_mask[0, 0]
    array([[ True, False, False, False],
           [False,  True,  True, False]])
    """
    q_ids = _core.segment_ids(q_segment_ids, "q_segment_ids", out)
    kv_ids = q_ids if kv_segment_ids is None else _core.segment_ids(kv_segment_ids, "kv_segment_ids", out)
    mask = _equal_pairs(q_ids, kv_ids, ("q_segment_ids", "kv_segment_ids"), dtype, out)
    valid = _core.segment_ids_to_token_mask
    return valid(q_ids, dtype), valid(kv_ids, dtype), mask


def attention_mask_to_padding_segment_ids(
    attention_mask: ArrayLike,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return segment ids that separate tokens from padding: 0 and -1.

    A query is a token if it attends to any key, and a key if any query attends to it, in any head. ::

        k ids    0 0 0 -1
        q ids
          0      # . # .
          0      # # . .
         -1      . . . .

    Parameters
    ----------
    attention_mask : array_like, shape [Q, K], [B, Q, K] or [B, H, Q, K]
        bool, or numbers; nonzero means allowed. Read in place.

    Returns
    -------
    q_segment_ids : ndarray of int32, shape [B, Q]
        0 for tokens, -1 for padding. B is 1 for a 2-D mask.
    kv_segment_ids : ndarray of int32, shape [B, K]
        The same for keys.

    See Also
    --------
    mask_to_segment_ids : also separates segments from each other.

    Examples
    --------
    >>> import attnmask
    >>> attnmask.attention_mask_to_padding_segment_ids([[1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
    (array([[ 0,  0, -1]], dtype=int32), array([[ 0,  0,  0, -1]], dtype=int32))
    """
    return _core.padding_segment_ids(attention_mask)


def qkv_masks_to_cu_seqlens(
    q_mask: ArrayLike, kv_mask: ArrayLike | None = None, *, out_dtype: DTypeLike = np.int32
) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    """Return where the tokens of each row start and end, in pair form.

    Parameters
    ----------
    q_mask : array_like, shape [B, Q]
        bool, or numbers; nonzero marks a token. Read in place.
    kv_mask : array_like, shape [B, K], optional
        Defaults to those of the queries.
    out_dtype : dtype
        An integer type. OverflowError if an end does not fit.

    Returns
    -------
    cu_seqlens_q, cu_seqlens_kv : ndarray, shape [2 B]
        ``[start0, end0, start1, end1, …]``: the first token of a row, and one past its last; 0 and 0 for a row without
        tokens. Masked positions in between count as part of the row.

    See Also
    --------
    qkv_cu_seqlens_to_qkv_masks : the inverse.
    pairs_to_cu_seqlens : turn the result into ordinary ``cu_seqlens``.
    prepare_cu_seqlens_from_mask : both steps at once.

    Examples
    --------
    >>> import attnmask
    >>> cu_seqlens_q, _ = attnmask.qkv_masks_to_cu_seqlens([[0, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
    >>> cu_seqlens_q
    array([1, 4, 0, 2], dtype=int32)
    """
    return _core.qkv_masks_to_cu_seqlens(q_mask, kv_mask, out_dtype)


def attention_mask_to_qkv_cu_seqlens(
    attention_mask: ArrayLike,
    *,
    reduce_heads: Literal["any", "all", "first"] = "any",
    out_dtype: DTypeLike = np.int32,
) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    """Return where the queries and keys of a mask start and end, in pair form.

    If the mask is one rectangle per batch row, as with padding, this describes it completely. ::

          . . . . .
          . # # # .       queries [1, 3), keys [1, 4)
          . # # # .

    Parameters
    ----------
    attention_mask : array_like, shape [B, T], [B, Q, K] or [B, H, Q, K]
        bool, or numbers; nonzero means allowed. A 2-D mask marks tokens, for both queries and keys.
    reduce_heads : {"any", "all", "first"}
        Count a pair if any head allows it, all heads do, or the first does.
    out_dtype : dtype
        An integer type. OverflowError if an end does not fit.

    Returns
    -------
    cu_seqlens_q, cu_seqlens_kv : ndarray, shape [2 B]
        ``[start0, end0, start1, end1, …]``; 0 and 0 for a fully masked batch row.

    See Also
    --------
    qkv_cu_seqlens_to_attention_mask : the inverse.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> mask = np.zeros((1, 3, 5), bool)
    >>> mask[0, 1:3, 1:4] = True
    >>> attnmask.attention_mask_to_qkv_cu_seqlens(mask)
    (array([1, 3], dtype=int32), array([1, 4], dtype=int32))
    """
    return _core.attention_mask_to_qkv_cu_seqlens(attention_mask, reduce_heads, out_dtype)


def _look_at_pairs(**pairs: ArrayLike) -> None:
    arrays = [as_array(x, name) for name, x in pairs.items()]
    if all(array.ndim == 1 and array.dtype.kind in "iu" for array in arrays):
        instead = (
            "For sequences laid end to end in one row, MaskInfo.from_cu_seqlens(cu_seqlens, packed=True) makes the "
            "mask of pairs, and prepare_lens the lengths"
        )
        ask("pairs", *arrays, name=next(iter(pairs)), instead=instead)


def cu_seqlens_to_mask(
    cu_seqlens: ArrayLike, max_len: SupportsIndex, dtype: DTypeLike = np.bool_, out: Array | None = None
) -> Array:
    """Return the token mask of ranges in pair form.

    Parameters
    ----------
    cu_seqlens : array_like of integers, shape [2 B]
        ``[start0, end0, start1, end1, …]``. A range is empty if its end is not above its start, and is clipped to the
        row.
    max_len : int
        Tokens per row.
    dtype : dtype
        dtype of the mask: bool, or a number type, in which tokens are 1.
    out : ndarray, optional
        Write the mask here, and return it. It must have its shape and type, and share no memory with `cu_seqlens`.

    Returns
    -------
    ndarray, shape [B, max_len]

    See Also
    --------
    qkv_masks_to_cu_seqlens : the inverse.

    Examples
    --------
    >>> import attnmask
    >>> attnmask.cu_seqlens_to_mask([2, 5, 0, 2], 6, dtype="uint8")
    array([[0, 0, 1, 1, 1, 0],
           [1, 1, 0, 0, 0, 0]], dtype=uint8)
    """
    _look_at_pairs(cu_seqlens=cu_seqlens)
    return _core.cu_seqlens_to_mask(cu_seqlens, max_len, dtype, out)


def qkv_cu_seqlens_to_qkv_masks(
    cu_seqlens_q: ArrayLike,
    *,
    max_q_len: SupportsIndex,
    cu_seqlens_kv: ArrayLike | None = None,
    max_kv_len: SupportsIndex | None = None,
    dtype: DTypeLike = np.bool_,
) -> tuple[Array, Array]:
    """Return the token masks of queries and keys, from ranges in pair form.

    Parameters
    ----------
    cu_seqlens_q : array_like of integers, shape [2 B]
        ``[start0, end0, start1, end1, …]``, as in `cu_seqlens_to_mask`.
    max_q_len : int
        Queries per row.
    cu_seqlens_kv : array_like of integers, shape [2 B], optional
        Ranges of keys; default to those of the queries.
    max_kv_len : int, optional
        Keys per row; defaults to the number of queries.
    dtype : dtype
        dtype of the masks: bool, or a number type, in which tokens are 1.

    Returns
    -------
    q_mask : ndarray, shape [B, max_q_len]
    kv_mask : ndarray, shape [B, max_kv_len]

    See Also
    --------
    qkv_masks_to_cu_seqlens : the inverse.

    Examples
    --------
    >>> import attnmask
    >>> attnmask.qkv_cu_seqlens_to_qkv_masks([1, 3], max_q_len=3, cu_seqlens_kv=[0, 1], max_kv_len=2)
    (array([[False,  True,  True]]), array([[ True, False]]))
    """
    kv = cu_seqlens_q if cu_seqlens_kv is None else cu_seqlens_kv
    kv_len = max_q_len if max_kv_len is None else max_kv_len
    _look_at_pairs(cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=kv)
    return _core.qkv_cu_seqlens_to_qkv_masks(cu_seqlens_q, max_q_len, kv, kv_len, dtype)


def qkv_cu_seqlens_to_attention_mask(
    cu_seqlens_q: ArrayLike,
    *,
    max_q_len: SupportsIndex,
    cu_seqlens_kv: ArrayLike | None = None,
    max_kv_len: SupportsIndex | None = None,
    dtype: DTypeLike = np.bool_,
    out: Array | None = None,
) -> Array:
    """Return the mask in which each row's queries attend to its keys, from ranges in pair form.

    Parameters
    ----------
    cu_seqlens_q : array_like of integers, shape [2 B]
        ``[start0, end0, start1, end1, …]``, as in `cu_seqlens_to_mask`.
    max_q_len : int
        Queries per row.
    cu_seqlens_kv : array_like of integers, shape [2 B], optional
        Ranges of keys; default to those of the queries.
    max_kv_len : int, optional
        Keys per row; defaults to the number of queries.
    dtype : dtype
        dtype of the mask: bool, or a number type, in which allowed pairs are 1.
    out : ndarray, optional
        Write the mask here, and return it. It must have its shape and type, and share no memory with the ranges.

    Returns
    -------
    ndarray, shape [B, 1, max_q_len, max_kv_len]

    See Also
    --------
    attention_mask_to_qkv_cu_seqlens : the inverse.
    MaskInfo.from_cu_seqlens : the same mask as a description.

    Examples
    --------
    >>> import attnmask
    >>> attnmask.qkv_cu_seqlens_to_attention_mask([1, 3], max_q_len=3, dtype=int)[0, 0]
    array([[0, 0, 0],
           [0, 1, 1],
           [0, 1, 1]])
    """
    kv = cu_seqlens_q if cu_seqlens_kv is None else cu_seqlens_kv
    kv_len = max_q_len if max_kv_len is None else max_kv_len
    _look_at_pairs(cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=kv)
    return _core.qkv_cu_seqlens_to_attention_mask(cu_seqlens_q, max_q_len, kv, kv_len, dtype, out)


def pairs_to_cu_seqlens(pairs: ArrayLike) -> NDArray[np.integer]:
    """Convert the pair form to ordinary ``cu_seqlens``: where rows start once their tokens are packed.

    Parameters
    ----------
    pairs : array_like of integers, shape [2 B]
        ``[start0, end0, start1, end1, …]``. A range is empty if its end is not above its start; whatever lies before
        token 0 does not count.

    Returns
    -------
    ndarray, shape [B + 1]
        Same type as `pairs`. OverflowError if the total does not fit it, or a number does not fit int64.

    See Also
    --------
    cu_seqlens_to_pairs : the inverse.

    Examples
    --------
    >>> import attnmask
    >>> attnmask.pairs_to_cu_seqlens([2, 5, 0, 2])
    array([0, 3, 5])
    """
    return _core.pairs_to_cu_seqlens(pairs)


def cu_seqlens_to_pairs(cu_seqlens: ArrayLike) -> NDArray[np.integer]:
    """Convert ordinary ``cu_seqlens`` to the pair form: start and end of each sequence in the packed row.

    Parameters
    ----------
    cu_seqlens : array_like of integers, shape [sequences + 1]
        Starts at 0 and never decreases.

    Returns
    -------
    ndarray, shape [2 sequences]
        Same type as `cu_seqlens`.

    See Also
    --------
    pairs_to_cu_seqlens : the inverse.

    Examples
    --------
    >>> import attnmask
    >>> attnmask.cu_seqlens_to_pairs([0, 3, 5])
    array([0, 3, 3, 5])
    """
    return _core.cu_seqlens_to_pairs(cu_seqlens)


def segment_ids_to_cu_seqlens(
    segment_ids: ArrayLike, out_dtype: DTypeLike = np.int32, max_segments: SupportsIndex | None = 128
) -> NDArray[np.integer]:
    """Return the running sum of the segments' lengths.

    An id is an index: it keeps its place even if smaller ids are unused. ::

        segment_ids    0 0 0 2 2 -1
        tokens of      0 1 2 3 …
                       3 0 2 0
        result       0 3 3 5 5

    Parameters
    ----------
    segment_ids : array_like of integers, shape [T], [B, T] or [B, H, T]
        Counted over all axes. A negative id is padding. Read in place.
    out_dtype : dtype
        An integer type. OverflowError if the total does not fit.
    max_segments : int, optional
        Ids must be below this. None means the largest id plus one.

    Returns
    -------
    ndarray, shape [max_segments + 1]

    See Also
    --------
    prepare_sequence_ids : the inverse, for sequences end to end.

    Examples
    --------
    >>> import attnmask
    >>> attnmask.segment_ids_to_cu_seqlens([[0, 0, 0, 2, 2, -1]], max_segments=4)
    array([0, 3, 3, 5, 5], dtype=int32)
    """
    return _core.segment_ids_to_cu_seqlens(segment_ids, out_dtype, max_segments)


def positions_from_segment_ids(segment_ids: ArrayLike, *, pad_value: SupportsIndex = -1) -> NDArray[np.int32]:
    """Return the position of each token within its run of equal segment ids.

    Parameters
    ----------
    segment_ids : array_like of integers, shape [B, T] or [B, H, T]
        A negative id is padding. An id that returns after another one, or after padding, counts from 0 again.
    pad_value : int
        The value for padding.

    Returns
    -------
    ndarray of int32, shape of `segment_ids`

    See Also
    --------
    prepare_position_ids : the same from ``cu_seqlens``.

    Examples
    --------
    >>> import attnmask
    >>> attnmask.positions_from_segment_ids([[-1, 0, 0, 0, 1, 1, -1]])
    array([[-1,  0,  1,  2,  0,  1, -1]], dtype=int32)
    """
    return _core.positions_from_segment_ids(segment_ids, pad_value)


for _name, _function in list(globals().items()):  # what is public here is logged in debug mode
    if isinstance(_function, FunctionType) and _function.__module__ == __name__ and _name[0] != "_":
        globals()[_name] = traced(_function)
