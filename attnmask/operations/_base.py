"""What every operator has: settings, the form of its result, and tools for masks, heads and sharding."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from attnmask._attention.terms import dropout_of
from attnmask._common.arguments import (
    AxisName,
    allocate,
    as_array,
    axis_name,
    bfloat16,
    describe,
    fields_in_a_line,
    flag,
    floating_dtype,
    integer,
    mask_array,
    real,
)
from attnmask._common.loading import _core
from attnmask._common.types import Arguments, Array, DType, PartitionSpec
from attnmask._masks.info import MaskInfo
from attnmask._masks.program import fill
from attnmask._masks.sharding import check_axes, mesh_sizes, partition, spec_of
from attnmask._masks.terms import band, dense

_LAYOUTS = {True: "[B, T, H, D]", False: "[B, H, T, D]"}


def _floating(value: DTypeLike, name: str) -> DType:
    if isinstance(value, str) and value == "bfloat16":
        return bfloat16(name)
    return floating_dtype(value, name)


@dataclass(frozen=True, slots=True)
class OperationMetadata:
    """The settings of an operator, made once. Arguments of a call take precedence.

    Parameters
    ----------
    runtime_dtype : dtype, optional
        Convert queries, keys, values and results to this dtype. By default they keep theirs.
    runtime_softmax_dtype : dtype, optional
        The dtype for logits and weights during computation, if wider than float32 (float64 for float64 inputs).
        ``"flash"`` accepts it but does not use a wider one.
    softmax_scale : float, optional
        Defaults to ``1 / sqrt(D)``.
    dropout_prob : float
        The probability that a weight is dropped, at least 0 and below 1.
    backend : str, optional
        The operator's method to use: ``forward_cpu`` for ``"cpu"``, and so on. Defaults to ``"cpu"``.
    mesh : jax.sharding.Mesh or mapping of str to int, optional
        The mesh axes and their sizes; for `OperationImpl.create_stable_sharding`.

    Examples
    --------
    >>> from attnmask.operations import OperationMetadata
    >>> OperationMetadata(runtime_dtype="float16", mesh={"dp": 2}).runtime_dtype
    dtype('float16')
    """

    runtime_dtype: DTypeLike | None = None
    runtime_softmax_dtype: DTypeLike | None = None
    softmax_scale: float | None = None
    dropout_prob: float = 0.0
    backend: str | None = None
    mesh: object = None

    def __post_init__(self) -> None:
        settings: Arguments = {}
        for name in ("runtime_dtype", "runtime_softmax_dtype"):
            if getattr(self, name) is not None:
                settings[name] = _floating(getattr(self, name), name)
        if self.softmax_scale is not None:
            settings["softmax_scale"] = real(self.softmax_scale, "softmax_scale")
        settings["dropout_prob"] = dropout_of(self.dropout_prob, None, ("dropout_prob", ""))[0]
        if not (self.backend is None or isinstance(self.backend, str)):
            raise TypeError(f"backend must be a name or None, got {describe(self.backend)}")
        if self.mesh is not None:
            mesh_sizes(self.mesh)
        for name, value in settings.items():
            object.__setattr__(self, name, value)


class OperationOutput(NamedTuple):
    """What an operator returns. Fields that it does not compute are None.

    Parameters
    ----------
    attention_outputs : ndarray, shape [B, Tq, H, Dv], or [Tq, H, Dv] of packed sequences
    attention_weights : ndarray, shape [B, H, Tq, Tk] or [H, Tq, Tk], optional
        The weights that multiplied the values: normalized and with dropout, if requested.
    lse : ndarray, shape [B, H, Tq] or [H, Tq], optional
        As in `attnmask.flash_attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from attnmask.operations import OperationOutput
    >>> OperationOutput(np.zeros((1, 2, 1, 4))).lse is None
    True
    """

    attention_outputs: Array
    attention_weights: Array | None = None
    lse: Array | None = None

    def __repr__(self) -> str:
        return fields_in_a_line(self)


def _shape(value: object, name: str) -> tuple[int, ...]:
    """Return the shape of an array of which nothing else may be known yet."""
    if isinstance(value, np.ndarray):
        value = np.asarray(value)  # a subclass may override any attribute
    shape = getattr(value, "shape", None)
    return shape if isinstance(shape, tuple) else as_array(value, name).shape


def _four(value: ArrayLike, name: str, layout: str) -> Array:
    array = as_array(value, name)
    if array.ndim != 4:
        raise ValueError(f"{name} must be {layout}, got {describe(array)}")
    return array


def _repeated(array: Array, axis: int, times: int, name: str) -> Array:
    """Repeat the entries of an axis like np.repeat, which does not notice that the result is too large."""
    before, (count, *after) = array.shape[:axis], array.shape[axis:]
    result = allocate((*before, count * times, *after), array.dtype, name)
    if result.size:
        shape = (*before, count, times, *after)
        target, source = result.reshape(shape), np.broadcast_to(np.expand_dims(array, axis + 1), shape)
        for part in _slabs(shape):
            target[part] = source[part]
    return result


def _slabs(shape: tuple[int, ...], most: int = 2**22) -> Iterator[tuple[int | slice, ...]]:
    """Yield indices of consecutive parts of at most `most` entries: NumPy handles no signals within one."""
    axis = 0
    while axis < len(shape) - 1 and math.prod(shape[axis + 1 :]) > most:
        axis += 1
    step = max(1, most // max(1, math.prod(shape[axis + 1 :])))
    for leading in np.ndindex(shape[:axis]):
        for begin in range(0, shape[axis], step):
            yield *leading, slice(begin, begin + step)


def _axis_names(spec: Any, name: str) -> tuple[AxisName, ...]:
    if isinstance(spec, str) or not hasattr(spec, "index"):  # PartitionSpec is no tuple in some versions
        raise TypeError(f"{name} must be a PartitionSpec or a tuple, got {describe(spec)}")
    return tuple(axis_name(entry, f"{name}[{index}]") for index, entry in enumerate(spec))


def _kept(
    names: tuple[AxisName, ...], source: tuple[AxisName, ...], preserved_indices: object
) -> tuple[AxisName, ...]:
    """Return one entry per name: that of `source` where it is preserved, None elsewhere."""
    if isinstance(preserved_indices, np.ndarray):
        preserved_indices = np.asarray(preserved_indices).tolist()
    if not isinstance(preserved_indices, Sequence) or isinstance(preserved_indices, str):
        raise TypeError(f"preserved_indices must be integers or None, got {describe(preserved_indices)}")
    kept: list[AxisName] = [None] * len(names)
    shorter = min(len(names), len(source))
    for entry in preserved_indices:
        index = integer(entry, "preserved_indices")
        if not -shorter <= index < shorter:
            raise IndexError(f"preserved_indices must be of {shorter} dimensions, got {index}")
        kept[index] = source[index]
    return tuple(kept)


class OperationImpl(ABC):
    """Base class of operators: `get_impl_name` returns the name, `forward_native` computes.

    A subclass may add methods for other backends: with ``OperationMetadata(backend="x")``, calls go to ``forward_x``.

    Parameters
    ----------
    metadata : OperationMetadata, optional
        Defaults to ``OperationMetadata()``.

    Examples
    --------
    An operator that gives all keys the same weight:

    >>> import numpy as np
    >>> from attnmask.operations import OperationImpl, OperationOutput
    >>> class Mean(OperationImpl):
    ...     @classmethod
    ...     def get_impl_name(cls):
    ...         return "mean"
    ...
    ...     def forward_native(self, query, key, value, mask=None, bias=None, causal=False, **more):
    ...         return OperationOutput(np.broadcast_to(value.mean(axis=1, keepdims=True), query.shape))
    >>> x = np.arange(4.0).reshape(1, 4, 1, 1)
    >>> Mean()(x, x, x).attention_outputs.ravel()
    array([1.5, 1.5, 1.5, 1.5])
    """

    def __init__(self, metadata: OperationMetadata | None = None) -> None:
        if metadata is None:
            metadata = OperationMetadata()
        if not isinstance(metadata, OperationMetadata):
            raise TypeError(f"metadata must be OperationMetadata or None, got {describe(metadata)}")
        backends = sorted(name.removeprefix("forward_") for name in dir(self) if name.startswith("forward_"))
        if not (metadata.backend is None or metadata.backend in backends):
            names = ", ".join(map(repr, backends))
            raise ValueError(
                f"backend must be one of those of {type(self).__name__}, {names}, got {metadata.backend!r}"
            )
        self.metadata = metadata

    @classmethod
    @abstractmethod
    def get_impl_name(cls) -> str | tuple[str, ...]:
        """Return the name to register under, or several.

        Returns
        -------
        str or tuple of str

        Examples
        --------
        >>> from attnmask.operations import FlashAttention
        >>> FlashAttention.get_impl_name()
        'flash'
        """

    @abstractmethod
    def forward_native(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        mask: ArrayLike | MaskInfo | None = None,
        bias: ArrayLike | None = None,
        causal: bool = False,
        **more: object,
    ) -> OperationOutput:
        """Compute the result of a call, on any machine.

        Parameters
        ----------
        query, key, value, mask, bias, causal, **more
            As in a call.

        Returns
        -------
        OperationOutput

        Examples
        --------
        >>> import numpy as np
        >>> from attnmask.operations import OperationRegistry
        >>> x = np.ones((2, 3, 4, 8), np.float32)
        >>> OperationRegistry.create("vanilla").forward_native(x, x, x).attention_outputs.shape
        (2, 3, 4, 8)
        """

    def forward_cpu(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        mask: ArrayLike | MaskInfo | None = None,
        bias: ArrayLike | None = None,
        causal: bool = False,
        **more: object,
    ) -> OperationOutput:
        """Compute the result on the CPU; calls `forward_native` unless a subclass overrides it.

        Parameters
        ----------
        query, key, value, mask, bias, causal, **more
            As in a call.

        Returns
        -------
        OperationOutput

        Examples
        --------
        >>> import numpy as np
        >>> from attnmask.operations import OperationRegistry
        >>> x = np.ones((2, 3, 4, 8), np.float32)
        >>> OperationRegistry.create("flash").forward_cpu(x, x, x).lse.shape
        (2, 4, 3)
        """
        return self.forward_native(query, key, value, mask, bias, causal, **more)

    def __call__(
        self,
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        mask: ArrayLike | MaskInfo | None = None,
        bias: ArrayLike | None = None,
        causal: bool = False,
        **more: object,
    ) -> OperationOutput:
        """Compute the result with the method for the metadata's backend.

        Parameters
        ----------
        query : array_like, shape [B, Tq, H, D]
        key : array_like, shape [B, Tk, Hkv, D]
        value : array_like, shape [B, Tk, Hkv, Dv]
        mask : array_like or MaskInfo, optional
        bias : array_like, optional
        causal : bool
        **more
            Other arguments of the operator.

        Returns
        -------
        OperationOutput

        Examples
        --------
        >>> import numpy as np
        >>> from attnmask.operations import OperationRegistry
        >>> x = np.ones((2, 3, 4, 8), np.float32)
        >>> OperationRegistry.create("flash")(x, x, x).attention_outputs.shape
        (2, 3, 4, 8)
        """
        forward = getattr(self, f"forward_{self.metadata.backend or 'cpu'}")
        result: OperationOutput = forward(query, key, value, mask, bias, causal, **more)
        return result

    def get_mode(self, query: object, BTHD: bool = True) -> Literal["decode", "train"]:
        """Return "decode" for one query per batch row, otherwise "train".

        Parameters
        ----------
        query : array_like, shape [B, T, H, D], or [B, H, T, D] without `BTHD`
            Only its shape matters.
        BTHD : bool
            True if tokens come before heads.

        Returns
        -------
        {"decode", "train"}

        Examples
        --------
        >>> import numpy as np
        >>> from attnmask.operations import OperationRegistry
        >>> op, query = OperationRegistry.create("flash"), np.zeros((2, 1, 8, 64))
        >>> op.get_mode(query), op.get_mode(query, BTHD=False)
        ('decode', 'train')
        """
        tokens_first, shape = flag(BTHD, "BTHD"), _shape(query, "query")
        if len(shape) != 4:
            raise ValueError(f"query must be {_LAYOUTS[tokens_first]}, got shape {shape}")
        return "decode" if shape[1 if tokens_first else 2] == 1 else "train"

    @staticmethod
    def split_attention_mask(attn_mask: ArrayLike | MaskInfo) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return which queries and which keys have an allowed pair.

        Parameters
        ----------
        attn_mask : array_like, shape [Q, K], [B, Q, K] or [B, H, Q, K], or MaskInfo
            bool or numbers; only the last head counts. A `MaskInfo` is not written out.

        Returns
        -------
        q_mask : ndarray of bool, shape [Q] or [B, Q]
        kv_mask : ndarray of bool, shape [K] or [B, K]

        Examples
        --------
        >>> from attnmask.operations import OperationImpl
        >>> OperationImpl.split_attention_mask([[1, 1, 0], [0, 0, 0]])
        (array([ True, False]), array([ True,  True, False]))
        """
        if isinstance(attn_mask, MaskInfo):
            shape, program = attn_mask._state.described("split attn_mask")
            if shape[1] == 0:
                raise ValueError(f"attn_mask must have a head, got a MaskInfo of shape {shape}")
            q_live, k_live = _core.mask_any(shape, program)
            return q_live[:, -1].copy(), k_live[:, -1].copy()
        pairs = mask_array(attn_mask, "attn_mask", ("[Q, K]", "[B, Q, K]", "[B, H, Q, K]"))
        if pairs.ndim == 4 and pairs.shape[1] == 0:
            raise ValueError(f"attn_mask must have a head, got {describe(pairs)}")
        last_head = pairs[:, -1:] if pairs.ndim == 4 else pairs[(None,) * (3 - pairs.ndim)][:, None]
        q_live, k_live = (live[:, 0] for live in _core.mask_any(last_head.shape, (dense(last_head),)))
        return (q_live[0], k_live[0]) if pairs.ndim == 2 else (q_live.copy(), k_live.copy())

    @staticmethod
    def combine_query_kv_masks(q_mask: ArrayLike, kv_mask: ArrayLike) -> NDArray[np.bool_]:
        """Return the pairs whose query and key both take part.

        Parameters
        ----------
        q_mask : array_like, shape [Q] or [B, Q]
            bool or numbers. With more axes, such as ``[B, H, Q, 1]``, it broadcasts with the pairs as it is.
        kv_mask : array_like, shape [K] or [B, K]
            Likewise, such as ``[B, 1, 1, K]``.

        Returns
        -------
        ndarray of bool, shape [Q, K] or [B, Q, K], or what both broadcast to

        Examples
        --------
        >>> from attnmask.operations import OperationImpl
        >>> OperationImpl.combine_query_kv_masks([[1, 0]], [[1, 1, 0]]).astype(int)
        array([[[1, 1, 0],
                [0, 0, 0]]])
        """
        queries, keys = mask_array(q_mask, "q_mask"), mask_array(kv_mask, "kv_mask")
        for name, tokens in (("q_mask", queries), ("kv_mask", keys)):
            if tokens.ndim == 0:
                raise ValueError(f"{name} must have an axis of tokens, got {describe(tokens)}")
        q_pairs = queries[..., None] if queries.ndim <= 2 else queries
        k_pairs = keys[..., None, :] if keys.ndim <= 2 else keys
        try:
            q_pairs, k_pairs = np.broadcast_arrays(q_pairs, k_pairs)
        except (ValueError, RuntimeError):  # the latter for more than 32 axes
            raise ValueError(
                f"kv_mask must broadcast with q_mask, of shape {queries.shape}, got {describe(keys)}"
            ) from None
        pairs = allocate(q_pairs.shape, np.bool_, "q_mask and kv_mask")
        for part in _slabs(pairs.shape):
            np.logical_and(q_pairs[part] != 0, k_pairs[part] != 0, out=pairs[part])
        return pairs

    @staticmethod
    def create_causal_mask(qseq: int) -> NDArray[np.bool_]:
        """Return the causal mask of `qseq` tokens: each sees itself and the tokens before it.

        Parameters
        ----------
        qseq : int

        Returns
        -------
        ndarray of bool, shape [qseq, qseq]

        Examples
        --------
        >>> from attnmask.operations import OperationImpl
        >>> OperationImpl.create_causal_mask(3).astype(int)
        array([[1, 0, 0],
               [1, 1, 0],
               [1, 1, 1]])
        """
        tokens = integer(qseq, "qseq", 0)
        if tokens >= 2**31:
            raise MemoryError(f"a mask of {tokens} × {tokens} tokens does not fit in memory: qseq")
        mask = fill((1, 1, tokens, tokens), (band(None, 0, 0),), np.dtype(bool), True, False)
        return mask.reshape(tokens, tokens)

    @staticmethod
    def repeat_kv_heads(k: ArrayLike, v: ArrayLike, num_reps: int) -> tuple[Array, Array]:
        """Repeat key and value heads so that each query head has its own.

        Parameters
        ----------
        k : array_like, shape [B, T, Hkv, D]
        v : array_like, shape [B, T, Hkv, Dv]
        num_reps : int
            Query heads per key head: head h of the result is head ``h // num_reps``.

        Returns
        -------
        k : ndarray, shape [B, T, Hkv * num_reps, D]
        v : ndarray, shape [B, T, Hkv * num_reps, Dv]

        Examples
        --------
        >>> import numpy as np
        >>> from attnmask.operations import OperationImpl
        >>> k = np.array([1, 2]).reshape(1, 1, 2, 1)
        >>> OperationImpl.repeat_kv_heads(k, k, 3)[0].ravel()
        array([1, 1, 1, 2, 2, 2])
        """
        keys, values = _four(k, "k", "[B, T, Hkv, D]"), _four(v, "v", "[B, T, Hkv, Dv]")
        times = integer(num_reps, "num_reps", 0)
        return _repeated(keys, 2, times, "num_reps"), _repeated(values, 2, times, "num_reps")

    def handle_kvhead(self, array: ArrayLike | None, num_q_heads: int, num_kv_heads: int) -> Array | None:
        """Repeat the heads of a bias or mask to match the queries.

        Parameters
        ----------
        array : array_like, shape [B, H, Q, K], [B, 1, Q, K] or [B, Hkv, Q, K], optional
        num_q_heads, num_kv_heads : int
            H and Hkv.

        Returns
        -------
        ndarray, shape [B, H, Q, K] or [B, 1, Q, K]
            The array itself if it fits, otherwise with each head repeated ``H // Hkv`` times. None for None.

        Examples
        --------
        >>> import numpy as np
        >>> from attnmask.operations import OperationRegistry
        >>> op = OperationRegistry.create("flash")
        >>> op.handle_kvhead(np.zeros((1, 2, 3, 3)), 8, 2).shape
        (1, 8, 3, 3)
        """
        if array is None:
            return None
        q_heads = integer(num_q_heads, "num_q_heads", 0)
        kv_heads = integer(num_kv_heads, "num_kv_heads", 0)
        pairs = _four(array, "array", "[B, H, Q, K]")
        heads = pairs.shape[1]
        if heads in (1, q_heads):
            return pairs
        if heads != kv_heads:
            raise ValueError(f"array must have {q_heads}, {kv_heads} or 1 heads, got {describe(pairs)}")
        if kv_heads == 0 or q_heads % kv_heads:
            raise ValueError(f"num_q_heads must be a multiple of num_kv_heads, {kv_heads}, got {q_heads}")
        return _repeated(pairs, 1, q_heads // kv_heads, "num_q_heads")

    def create_stable_sharding(
        self,
        state_ps: PartitionSpec | None = None,
        preserved_indices: Sequence[int] | None = None,
        clone_ps: PartitionSpec | None = None,
        dep: object = True,
        tensor: object = None,
    ) -> PartitionSpec | None:
        """Return a sharding spec that keeps only some dimensions of another.

        Parameters
        ----------
        state_ps : jax.sharding.PartitionSpec or tuple, optional
            A mesh axis name, a tuple of names, or None for each dimension.
        preserved_indices : sequence of int, optional
            The dimensions to keep; the others are not divided. Defaults to all.
        clone_ps : jax.sharding.PartitionSpec or tuple, optional
            The spec to take the kept dimensions from, instead of `state_ps`.
        dep : optional
            None for no spec.
        tensor : array_like, optional
            The array to divide. If the metadata has a mesh, a dimension is not divided if its axes do not divide its
            length.

        Returns
        -------
        jax.sharding.PartitionSpec or tuple
            A ``PartitionSpec`` if JAX is installed, otherwise a tuple; `state_ps` itself if nothing changes. None
            without `state_ps` or `dep`.

        Examples
        --------
        >>> from attnmask.operations import OperationMetadata, OperationRegistry
        >>> op = OperationRegistry.create("flash", OperationMetadata(mesh={"dp": 2, "tp": 4}))
        >>> tuple(op.create_stable_sharding(("dp", None, "tp", None), [0]))
        ('dp', None, None, None)
        >>> tuple(op.create_stable_sharding(("dp", None, "tp"), tensor=np.zeros((8, 3, 6))))
        ('dp', None, None)
        """
        if dep is None or state_ps is None:
            return None
        argument, names = "state_ps", _axis_names(state_ps, "state_ps")
        if preserved_indices is not None:
            source = names
            if clone_ps is not None:
                argument, source = "clone_ps", _axis_names(clone_ps, "clone_ps")
            names = _kept(names, source, preserved_indices)
        lengths = None if tensor is None else _shape(tensor, "tensor")
        if lengths is not None and len(lengths) < len(names):
            raise ValueError(f"tensor must have {len(names)} dimensions as state_ps, got shape {lengths}")
        if lengths is None or self.metadata.mesh is None:
            return state_ps if preserved_indices is None else spec_of(names)
        axes = {f"{argument}[{index}]": entry for index, entry in enumerate(names)}
        sizes = mesh_sizes(self.metadata.mesh)
        check_axes(axes, sizes)
        return partition(lengths, axes, sizes)

    _split_attention_mask = split_attention_mask
    _combine_query_kv_masks = combine_query_kv_masks
    _create_causal_mask = create_causal_mask
    _handle_kvhead = handle_kvhead
