"""The bases of `MaskInfo`: `Held`, which holds its state, and `OtherWays`, members that ejKernel has and for which
`MaskInfo` has shorter forms.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from attnmask._common.arguments import AxisName, describe, flag, frozen
from attnmask._common.loading import _core
from attnmask._common.types import Arguments, Array, Tree
from attnmask._masks import derived, sources, transforms, tree
from attnmask._masks.state import State, with_details


class Held:
    """A state, or the leaves of a JAX pytree, from which the state is read at first use."""

    __slots__ = ("__weakref__", "_held", "_leaves")

    _held: State | None  # None until the leaves are read
    _leaves: Tree | None

    @classmethod
    def _of(cls, state: State) -> Self:
        info = object.__new__(cls)
        info._held, info._leaves = state, None
        return info

    def _made(self, state: State) -> Self:
        """Return self if `state` is already its state."""
        return self if state is self._state else self._of(state)

    @property
    def _state(self) -> State:
        if self._held is None:
            assert self._leaves is not None
            self._held = tree.restore(*self._leaves)
        return self._held

    def _as_tensors(self: Any) -> Any:
        from attnmask.torch._states import tensors_of_graphs

        state = self._state
        return None if state.base is None else state.once("tensors", lambda: tensors_of_graphs(state))

    # The mask as PyTorch tensors, which torch.compile makes inputs of a graph; None if it holds no mask.
    _tensors = property(_core.built_in(_as_tensors))

    def tree_flatten(self) -> Tree:
        """Take the mask apart for JAX: arrays, and the rest.

        Returns
        -------
        children : tuple
            The mask it was made from, segment ids of queries and keys, both cu_seqlens and both positions, each None if
            not held; then the arrays of the terms.
        aux_data : tuple
            Everything that is not an array; hashable.

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
        """Rebuild a mask from the parts of `tree_flatten`.

        Parameters
        ----------
        aux_data : tuple
        children : tuple
            May be anything; they are read and checked when the mask is used.

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

    def __getstate__(self) -> dict[str, object]:
        children, aux_data = self.tree_flatten()
        return tree.pickled(aux_data, children)

    def __setstate__(self, state: Arguments) -> None:
        self._held, self._leaves = None, tree.unpickled(state)


class OtherWays(Held):
    """Members for compatibility with ejKernel."""

    __slots__ = ()

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
        """Allow pairs at random; write ``MaskInfo(np.random.default_rng(seed).random((B, Q, K)) >= sparsity)``.

        Examples
        --------
        >>> import attnmask
        >>> info = attnmask.MaskInfo.from_random(2, 300, 400, sparsity=0.9)
        >>> info.shape, round(info.density(), 2)
        ((2, 300, 400), 0.1)
        """
        state = sources.of_chance(batch_size, q_len, kv_len, sparsity, seed)
        axes = batch_axis_name, qheads_axis_name, kvheads_axis_name, sequence_axis_name
        return cls._of(with_details(state, (q_positions, kv_positions), axes))

    @classmethod
    def dynamic_init(
        cls,
        *,
        mask_info: Self | None = None,
        input_ids: ArrayLike | None = None,
        inputs_embeds: ArrayLike | None = None,
        attention_mask: ArrayLike | None = None,
    ) -> Self:
        """Make a mask from the first that is given; write the constructor for what you have.

        Examples
        --------
        >>> import attnmask
        >>> info = attnmask.MaskInfo.dynamic_init(attention_mask=[[1, 1, 0]])
        >>> info.q_segment_ids
        array([[ 0,  0, -1]], dtype=int32)
        """
        if mask_info is not None:
            if not isinstance(mask_info, Held):
                raise TypeError(f"mask_info must be a MaskInfo, got {describe(mask_info)}")
            return mask_info
        if attention_mask is not None:
            return cls._of(sources.of_array(attention_mask, True))
        if input_ids is not None:
            return cls._of(sources.of_tokens(input_ids, "input_ids", "[B, T]"))
        if inputs_embeds is not None:
            return cls._of(sources.of_tokens(inputs_embeds, "inputs_embeds", "[B, T, D]"))
        raise ValueError(
            "mask_info, attention_mask, input_ids or inputs_embeds must be given, got None of them"
        )

    @staticmethod
    def create_chunked_attention_mask(
        chunk_size: int,
        q_len: int,
        kv_len: int | None = None,
        offset: int = 0,
        dtype: DTypeLike = np.bool_,
        *,
        out: Array | None = None,
    ) -> Array:
        """Return chunks as an array; write ``np.asarray(MaskInfo.full(q_len, kv_len).apply_chunked(size))[0, 0]``.

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

    def get_or_compute_attention_mask(
        self, dtype: DTypeLike = np.bool_, *, out: Array | None = None
    ) -> Array:
        """Return the mask as an array, into `out` if given; write ``np.asarray(mask, dtype)``.

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
        """Return the same mask held as an array; write ``mask.to_dtype(dtype)``.

        Examples
        --------
        >>> import attnmask
        >>> info = attnmask.MaskInfo.from_segments([[0, 0, 1]])
        >>> info.materialize_attention_mask("int8").attention_mask.dtype
        dtype('int8')
        """
        return self._made(transforms.materialized(self._state, dtype))

    @property
    def bias(self) -> NDArray[np.float32]:
        """0 for allowed pairs, the lowest float32 for others; pass ``attention_mask=mask`` instead.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 1]]).bias[0, 0, 0]
        array([ 0.0000000e+00, -3.4028235e+38], dtype=float32)
        """
        return derived.bias(self._state, np.float32, None)

    def create_bias(self, dtype: DTypeLike = np.float32, *, out: Array | None = None) -> Array:
        """Return 0 for allowed pairs, the lowest of `dtype` for others; pass ``attention_mask=mask`` instead.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 1]]).create_bias("float16")[0, 0, 0].tolist()
        [0.0, -65504.0]
        """
        return derived.bias(self._state, dtype, out)

    def get_or_compute_segment_ids(
        self, per_head: bool = False
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return ids, computed by `mask_to_segment_ids` if none are held; write ``mask.q_segment_ids``.

        Examples
        --------
        >>> import attnmask
        >>> mask = attnmask.MaskInfo(attention_mask=[[[0, 1, 1, 1], [0, 1, 1, 1], [0, 0, 0, 1]]])
        >>> mask.get_or_compute_segment_ids()
        (array([[0, 0, 1]], dtype=int32), array([[-1,  0,  0,  1]], dtype=int32))
        """
        return derived.segment_ids(self._state, flag(per_head, "per_head"))

    def materialize_segment_ids(self, per_head: bool = False) -> Self:
        """Return the same mask holding its segment ids; they are kept after the first read anyway.

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
        """1 for queries and 0 for padding, ``[B, Q]``; write ``mask.q_segment_ids >= 0``.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 4, -1]]).q_attention_mask
        array([[1, 1, 0]], dtype=int32)
        """
        return frozen((derived.side_ids(self._state, 0) >= 0).astype(np.int32))

    def get_qkv_masks(self, dtype: DTypeLike = np.bool_) -> tuple[Array, Array, Array]:
        """Return what is not padding, and pairs of the same id; write ``ids >= 0`` and `segment_ids_to_mask`.

        Examples
        --------
        >>> import attnmask
        >>> q_mask, kv_mask, mask = attnmask.MaskInfo.from_segments([[0, 1, -1]]).get_qkv_masks("int8")
        >>> q_mask, mask[0, 0].diagonal()
        (array([[1, 1, 0]], dtype=int8), array([1, 1, 0], dtype=int8))
        """
        return derived.qkv_masks(self._state, dtype)

    def get_or_compute_qkv_cu_seqlens(
        self, *, out_dtype: DTypeLike = np.int32, max_segments: int | None = None
    ) -> tuple[Array, Array]:
        """Return where segments start, or pairs ``[start, end]`` of an array; write ``mask.cu_seqlens_q``.

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
    def q_position_ids(self) -> NDArray[np.int32]:
        """Positions in segments, -1 for padding; write ``positions_from_segment_ids(mask.q_segment_ids)``.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[-1, 0, 0, 0, 1, 1]]).q_position_ids
        array([[-1,  0,  1,  2,  0,  1]], dtype=int32)
        """
        return derived.position_ids(self._state, 0)

    def get_or_compute_positions(self) -> tuple[NDArray[np.int32] | None, NDArray[np.int32] | None]:
        """Return positions as given, or in segments; padding is at -1, and 2147483647 for keys.

        Examples
        --------
        >>> import attnmask
        >>> positions = attnmask.MaskInfo.from_segments([[0, 0, 1, -1]]).get_or_compute_positions()
        >>> [side.tolist() for side in positions]
        [[[0, 1, 0, -1]], [[0, 1, 0, 2147483647]]]
        """
        return derived.positions(self._state)

    @property
    def causal_mask_baked_in(self) -> bool:
        """Write ``mask.baked_in_masks["causal"]``.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 0]]).apply_causal().causal_mask_baked_in
        True
        """
        return "causal" in self._state.baked

    @property
    def sliding_window_baked_in(self) -> bool:
        """Write ``mask.baked_in_masks["sliding_window"]``.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 0]]).apply_causal().sliding_window_baked_in
        False
        """
        return "sliding_window" in self._state.baked

    @property
    def chunked_mask_baked_in(self) -> bool:
        """Write ``mask.baked_in_masks["chunked"]``.

        Examples
        --------
        >>> import attnmask
        >>> attnmask.MaskInfo.from_segments([[0, 0]]).apply_chunked(2).chunked_mask_baked_in
        True
        """
        return "chunked" in self._state.baked

    @property
    def token_type_ids_baked_in(self) -> bool:
        """Write ``mask.baked_in_masks["token_type_ids"]``.

        Examples
        --------
        >>> import attnmask
        >>> info = attnmask.MaskInfo.from_segments([[0, 0]])
        >>> info.apply_token_type_ids([[1, 2]]).token_type_ids_baked_in
        True
        """
        return "token_type_ids" in self._state.baked
