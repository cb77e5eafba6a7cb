"""What a mask tells: as an array, by segment ids, lengths and positions, and about itself.

The first half of `MaskInfo`. Everything here is an answer that follows from the description, found when it is asked for
and then kept; `mask_terms` makes new masks of old ones.
"""

from collections.abc import Callable
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from attnmask import _core, masks, packed
from attnmask.arguments import (
    flag,
    frozen,
    integer,
    is_floating,
    number_dtype,
    place,
)
from attnmask.mask_program import (
    Program,
    Shape,
    Terms,
    dense,
    equal,
    fill,
    words,
)
from attnmask.mask_sharding import AxisName
from attnmask.mask_state import (
    BOOL,
    FLAGS,
    Ids,
    Labels,
    State,
    fitted,
    restore,
)

_T = TypeVar("_T")

_NO_KEY = int(np.iinfo(np.int32).max)  # the position of padding among keys: later than every query
_LOWEST_BFLOAT16 = float.fromhex("-0x1.fep+127")
_SEGMENTS = 128  # that cu_seqlens have room for, or more
_LABELLED_PAIRS = 2**24  # of a plane that is looked through for rows that are alike, for a picture


def _first_head(ids: Ids) -> Ids:
    if ids.ndim == 2:
        return ids
    return ids[:, 0] if ids.shape[1] else np.full((len(ids), ids.shape[2]), -1, np.int32)


class MaskAnswers:
    """A description, and what was derived from it."""

    __slots__ = ("__weakref__", "_cache", "_held", "_leaves")

    _cache: dict[str, Any]
    _held: State | None  # None until somebody looks at what a tree was made of
    _leaves: tuple[tuple[Any, ...], tuple[Any, ...]] | None

    # Inside

    @classmethod
    def _of(cls, state: State) -> Self:
        info = object.__new__(cls)
        info._held, info._leaves, info._cache = state, None, {}
        return info

    def _with(self, **changes: Any) -> Self:
        return self._of(self._state._replace(**changes))

    def _and(self, *nodes: Any, flag: str | None = None, **changes: Any) -> Self:
        """One term more, or several: it is not the mask any more that lengths and a dtype came with."""
        state = self._state
        baked = tuple(is_set or name == flag for name, is_set in zip(FLAGS, state.baked, strict=True))
        changes = {"terms": state.terms.plus(*nodes), "baked": baked, **changes}
        return self._with(**changes, dtype=BOOL, cu_seqlens_q=None, cu_seqlens_kv=None)

    @property
    def _state(self) -> State:
        if self._held is None:
            assert self._leaves is not None
            self._held = restore(*self._leaves)
        return self._held

    def _described(self, to_do: str) -> tuple[Shape, Program]:
        """The mask as the core takes it."""
        return self._extent(to_do), self._state.program

    def _extent(self, to_do: str) -> Shape:
        """The shape of the mask, which there has to be."""
        state = self._state
        if state.base is None:
            raise ValueError(
                f"cannot {to_do}: the MaskInfo must have an attention_mask, or segment ids of queries and keys, "
                f"got {self!r}"
            )
        return state.extent  # type: ignore[return-value]

    def _cached(self, key: str, compute: Callable[[], _T]) -> _T:
        if key not in self._cache:
            self._cache.setdefault(key, compute())  # of two threads that both computed it, one is kept
        value: _T = self._cache[key]
        return value

    def _filled(
        self, dtype: np.dtype[Any], live: float, dead: float, out: NDArray[Any] | None
    ) -> NDArray[Any]:
        shape, program = self._described("write out the mask")
        if out is not None:
            return fill(shape, program, dtype, live, dead, out)
        return frozen(fill(shape, program, dtype, live, dead))

    def _mask_array(self) -> NDArray[Any]:
        array = self._state.array
        if array is not None:
            return array
        return self._cached("attention_mask", lambda: self._filled(self._state.dtype, 1, 0, None))

    def _ids(self, per_head: bool = False) -> tuple[Ids, Ids]:
        """Segment ids that are held, or where they are not, those of rows and columns of the mask that are alike."""
        q_ids, kv_ids = self._state.labels.get()
        if q_ids is None or kv_ids is None:
            self._extent("tell segment ids")
            name = "per-head segment ids" if per_head else "segment ids"
            found = self._cached(name, lambda: self._alike(per_head))
            q_ids = found[0] if q_ids is None else q_ids
            kv_ids = found[1] if kv_ids is None else kv_ids
        return q_ids, kv_ids

    def _alike(self, per_head: bool) -> tuple[Ids, Ids]:
        q_ids, kv_ids = masks.mask_to_segment_ids(self._mask_array(), per_head)
        return frozen(q_ids), frozen(kv_ids)

    def _lens(self, side: int) -> NDArray[np.int32] | None:
        state = self._state
        if state.labels.shapes[side] is None and state.base is None:
            return None
        held = state.labels.get()[side]
        ids = _first_head(self._ids()[side] if held is None else held)
        lens = _core.segment_lens(ids)
        if len(lens) > 1:
            return frozen(lens)
        padding = packed.prepare_lens_from_mask(ids)  # ids are 0 or negative
        return frozen(ids.shape[-1] - padding)

    def _cu_seqlens(
        self, dtype: np.dtype[Any], max_segments: int | None
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        state = self._state
        held = [cu for cu in (state.cu_seqlens_q, state.cu_seqlens_kv) if cu is not None]
        if held:
            for cu in held:
                limits = np.iinfo(dtype)
                if cu.size and not limits.min <= cu.min() <= cu.max() <= limits.max:
                    raise OverflowError(f"cu_seqlens do not fit {dtype}: they are up to {cu.max()}")
            q_cu, kv_cu = (
                cu if cu.dtype == dtype else frozen(cu.astype(dtype)) for cu in (held[0], held[-1])
            )
            return q_cu, kv_cu
        if state.labels.complete:
            both = [_first_head(ids) for ids in self._ids()]
            if max_segments is None:
                max_segments = max(_SEGMENTS, *(int(ids.max(initial=-1)) + 1 for ids in both))
            q_cu, kv_cu = (masks.segment_ids_to_cu_seqlens(ids, dtype, max_segments) for ids in both)
        else:
            live = _core.mask_any(*self._described("tell cu_seqlens"))
            q_cu, kv_cu = masks.qkv_masks_to_cu_seqlens(
                *(tokens.any(axis=1) for tokens in live), out_dtype=dtype
            )
        return frozen(q_cu), frozen(kv_cu)

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
        return self._mask_array()

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
        wanted = number_dtype(dtype)
        if out is None and wanted == self._state.dtype:
            return self._mask_array()
        return self._filled(wanted, 1, 0, out)

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
        >>> attnmask.MaskInfo.from_segments([[0, 0, 1]]).materialize_attention_mask("int8").attention_mask.dtype
        dtype('int8')
        """
        wanted, array = number_dtype(dtype), self._state.array
        if array is not None and array.dtype == wanted:
            return self
        mask = self.get_or_compute_attention_mask(wanted)
        return self._with(base=dense(mask), terms=Terms(), segment_based=False, dtype=wanted)

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
        wanted = number_dtype(dtype)
        self._extent("convert the mask")
        return self if wanted == self._state.dtype else self.materialize_attention_mask(wanted)

    @property
    def bias(self) -> NDArray[np.float32]:
        """What to add to logits: 0 for live pairs, the lowest float32 for others; see `create_bias`.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 1]]).bias[0, 0, 0]
        array([ 0.0000000e+00, -3.4028235e+38], dtype=float32)
        """
        return self._bias(np.dtype(np.float32), None)

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

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 1]]).create_bias("float16")[0, 0, 0].tolist()
        [0.0, -65504.0]
        """
        wanted: np.dtype[Any] | None
        try:
            wanted = number_dtype(dtype)
        except TypeError:
            wanted = None
        if wanted is None or not is_floating(wanted):
            raise TypeError(f"dtype must be float16, bfloat16, float32 or float64, got {dtype!r}")
        return self._bias(wanted, out)

    def _bias(self, dtype: np.dtype[Any], out: NDArray[Any] | None) -> NDArray[Any]:
        lowest = _LOWEST_BFLOAT16 if dtype.kind != "f" else float(np.finfo(dtype).min)
        if out is None and dtype == np.float32:
            return self._cached("bias", lambda: self._filled(dtype, 0.0, lowest, None))
        return self._filled(dtype, 0.0, lowest, out)

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
        q_ids, _ = self._state.labels.get()
        return self._ids()[0] if q_ids is None else q_ids

    @property
    def kv_segment_ids(self) -> NDArray[np.int32]:
        """The segment of every key, ``[B, K]`` or ``[B, H, K]``; below 0 for padding.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 0, 1]]).kv_segment_ids
        array([[0, 0, 1]], dtype=int32)
        """
        _, kv_ids = self._state.labels.get()
        return self._ids()[1] if kv_ids is None else kv_ids

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
        return self._ids(flag(per_head, "per_head"))

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
        each_head = flag(per_head, "per_head")
        if self._state.labels.complete:
            return self
        return self._with(labels=Labels(*self._ids(each_head)), cu_seqlens_q=None, cu_seqlens_kv=None)

    @property
    def q_attention_mask(self) -> NDArray[np.int32]:
        """1 for the queries and 0 for padding, ``[B, Q]``, by the segment ids.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 4, -1]]).q_attention_mask
        array([[1, 1, 0]], dtype=int32)
        """
        q_ids, _ = self._state.labels.get()
        return frozen(((self._ids()[0] if q_ids is None else q_ids) >= 0).astype(np.int32))

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
        wanted = number_dtype(dtype)
        q_ids, kv_ids = self._ids()
        program = (equal(q_ids, kv_ids),)
        extent = fitted(State(base=program[0], labels=Labels(q_ids, kv_ids))).extent
        pairs = frozen(fill(extent, program, wanted, 1, 0))  # type: ignore[arg-type]
        return frozen((q_ids >= 0).astype(wanted)), frozen((kv_ids >= 0).astype(wanted)), pairs

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
        q_ids, kv_ids = self._state.labels.get()
        ids = kv_ids if q_ids is None else q_ids
        return np.bool(ids is not None and _first_head(ids).max(initial=-1) > 0)

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
        return self._lens(0)

    @property
    def kv_lens(self) -> NDArray[np.int32] | None:
        """How many keys each segment has, if there are several, else each batch row; see `q_lens`.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 1]], [[0, 1, 1, -1]]).kv_lens
        array([1, 2], dtype=int32)
        """
        return self._lens(1)

    @property
    def cu_seqlens_q(self) -> NDArray[np.integer]:
        """Where the segments of the queries begin and end; see `get_or_compute_qkv_cu_seqlens`.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 0, 1, -1]]).cu_seqlens_q[:4]
        array([0, 2, 3, 3], dtype=int32)
        """
        return self._cu_seqlens_property()[0]

    @property
    def cu_seqlens_kv(self) -> NDArray[np.integer]:
        """Where the segments of the keys begin and end; see `get_or_compute_qkv_cu_seqlens`.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_cu_seqlens([0, 2, 5], packed=True).cu_seqlens_kv
        array([0, 2, 5], dtype=int32)
        """
        return self._cu_seqlens_property()[1]

    def _cu_seqlens_property(self) -> tuple[NDArray[Any], NDArray[Any]]:
        return self._cached("cu_seqlens", lambda: self._cu_seqlens(np.dtype(np.int32), None))

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
        dtype = number_dtype(out_dtype, "out_dtype")
        if dtype.kind not in "iu":
            raise TypeError(f"out_dtype must be an integer type, got {dtype}")
        if max_segments is not None:
            max_segments = integer(max_segments, "max_segments", 0)
        return self._cu_seqlens(dtype, max_segments)

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
        q_ids, _ = self._state.labels.get()
        return frozen(
            masks.positions_from_segment_ids(self._ids()[0] if q_ids is None else q_ids, pad_value=-1)
        )

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
        >>> attnmask.MaskInfo.from_segments([[0, 0, 1, -1]]).get_or_compute_positions()
        (array([[ 0,  1,  0, -1]], dtype=int32), array([[         0,          1,          0, 2147483647]], dtype=int32))
        """
        state = self._state
        positions, pads = [state.q_positions, state.kv_positions], (-1, _NO_KEY)
        if state.base is not None or state.labels.complete:
            for side, pad in enumerate(pads):
                if positions[side] is None:
                    found = masks.positions_from_segment_ids(self._ids()[side], pad_value=pad)
                    positions[side] = frozen(found)
        return positions[0], positions[1]

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
        return self._extent("tell heads")[1]

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
        state = self._state
        q_ids, kv_ids = state.labels.get()
        if kv_ids is not None and q_ids is not None:
            return q_ids is kv_ids or np.array_equal(q_ids, kv_ids)
        if state.base is not None:
            return state.extent[2] == state.extent[3]
        both = state.cu_seqlens_q, state.cu_seqlens_kv
        return None not in [cu if cu is None else 1 for cu in both] and np.array_equal(*both)  # type: ignore[arg-type]

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
        return self._cached("density", self._density)

    def _density(self) -> float:
        shape, program = self._described("count live pairs")
        pairs = shape[0] * shape[1] * shape[2] * shape[3]
        return int(_core.mask_count(shape, program).sum()) / pairs if pairs else 0.0

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

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 0, 0, 0]]).apply_causal().grid(0, 0, 2, 2).tolist()
        [[3, 0], [4, 3]]
        """
        shape, program = self._described("count live pairs")
        plane = place(batch, "batch", shape[0]), place(head, "head", shape[1])
        cells = integer(q_cell, "q_cell", 1), integer(k_cell, "k_cell", 1)
        return frozen(_core.mask_grid(shape, program, *plane, *cells))

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
        state = self._state
        shape = self._extent("tell segment ids")
        batch, head = place(batch, "batch", shape[0]), place(head, "head", shape[1])
        if not state.labels.complete and shape[1] * shape[2] * shape[3] > _LABELLED_PAIRS:
            return None
        q_ids, kv_ids = (
            ids[batch] if ids.ndim == 2 else ids[batch, min(head, ids.shape[1] - 1)]
            for ids in self._ids(per_head=shape[1] > 1)
        )
        return q_ids, kv_ids

    def __repr__(self) -> str:
        try:
            state = self._state
        except Exception:  # leaves that are no arrays, or not yet: they are JAX's business
            return f"{type(self).__name__}({len(self._leaves[1]) if self._leaves else 0} leaves)"
        words_of: list[str] = [
            f"{name}={size}"
            for name, size in zip(("batch_size", "heads", "q_len", "kv_len"), state.extent, strict=True)
            if size is not None
        ]
        if state.base is not None:
            base, terms = words(state.program, state.segment_based)
            words_of += [f"base={base}", f"terms=[{', '.join(terms)}]"]
            if state.dtype != BOOL:
                words_of.append(f"dtype={state.dtype}")
        q_shape, kv_shape = state.labels.shapes
        holds = {
            "attention_mask": state.base_array,
            "q_segment_ids": q_shape,
            "kv_segment_ids": kv_shape,
            "cu_seqlens_q": state.cu_seqlens_q,
            "cu_seqlens_kv": state.cu_seqlens_kv,
            "q_positions": state.q_positions,
            "kv_positions": state.kv_positions,
        }
        words_of.append(f"holds=[{', '.join(name for name, held in holds.items() if held is not None)}]")
        words_of.append(f"cached=[{', '.join(sorted(self._cache))}]")
        return f"{type(self).__name__}({', '.join(words_of)})"
