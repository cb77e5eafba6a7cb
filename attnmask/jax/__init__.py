"""`flash_attention` for JAX under ``jit``, ``grad`` and ``vmap``, and `MaskInfo` as a pytree.

Importing this module registers `MaskInfo` as a pytree: `jax.tree.map` reaches its arrays, and functions under
``jax.jit`` take and return masks. The arrays are the leaves. Everything else (shape, terms, flags, axis names) is
static, so masks that differ only in the contents of their arrays share one compilation.

Under ``jax.jit`` the arrays are tracers, which the core cannot read. So pass a traced mask on to `flash_attention`, as
it is or in parts by `tree_flatten`. Anything else that reads it, even its shape or another term, raises a TypeError:
read it before, close over it, or read it in a ``jax.pure_callback``. Like any array, 64-bit ones are truncated to 32
bits by ``jax.jit`` unless ``jax_enable_x64`` is set; only per-row numbers (offsets, lengths) and dense masks may have
64 bits.

Examples
--------
>>> import jax, jax.numpy as jnp
>>> import attnmask.jax
>>> info = attnmask.MaskInfo.from_segments([[0, 0, 1]]).apply_causal()
>>> [leaf.shape for leaf in jax.tree.leaves(info)]
[(1, 3), (1, 3)]
>>> query, value = jnp.zeros((1, 3, 1, 8)), jnp.arange(3.0).reshape(1, 3, 1, 1)
>>> attend = jax.jit(lambda value, mask: attnmask.jax.flash_attention(query, query, value, mask))
>>> attend(value, info).ravel().tolist()
[0.0, 0.5, 2.0]
>>> jax.grad(lambda value: attend(value, info).sum())(value).ravel().tolist()
[1.5, 0.5, 1.0]
"""

from typing import Generic, Literal, Required, TypeVar, Unpack, overload

try:
    import jax
except ImportError as _missing:
    raise ImportError("attnmask.jax needs JAX, which is not installed: pip install jax") from _missing
if not hasattr(jax, "enable_x64"):
    raise ImportError(
        f"attnmask.jax needs JAX 0.8 or later, got {jax.__version__}: pip install --upgrade jax"
    )

from attnmask._masks.info import MaskInfo
from attnmask._sharded.ring import KEYWORDS, RingArguments, arguments_of
from attnmask.jax import _ring as ring
from attnmask.jax._arguments import known_flag
from attnmask.jax._call import register
from attnmask.jax._functions import (
    chunk_global_cumsum,
    chunk_global_cumsum_scalar,
    chunk_global_cumsum_vector,
    chunk_local_cumsum,
    chunk_local_cumsum_scalar,
    chunk_local_cumsum_vector,
    flash_attention,
    flash_attention_with_kvcache,
    linear_attention,
    linear_attention_step,
    short_convolution,
    short_convolution_step,
    write_kvcache,
)
from attnmask.jax._merge import merge_attention_states
from attnmask.jax._statistics import attention_statistics_with_kvcache
from attnmask.jax._types import KVCacheResult
from attnmask.jax._weights import attention_statistics, attention_weights

__all__ = [
    "KVCacheResult",
    "attention_statistics",
    "attention_statistics_with_kvcache",
    "attention_weights",
    "chunk_global_cumsum",
    "chunk_global_cumsum_scalar",
    "chunk_global_cumsum_vector",
    "chunk_local_cumsum",
    "chunk_local_cumsum_scalar",
    "chunk_local_cumsum_vector",
    "flash_attention",
    "flash_attention_with_kvcache",
    "linear_attention",
    "linear_attention_step",
    "merge_attention_states",
    "register",
    "ring_attention",
    "short_convolution",
    "short_convolution_step",
    "write_kvcache",
]
__dir__ = __all__.copy  # what completion offers

jax.tree_util.register_pytree_node_class(MaskInfo)


_Flag = TypeVar("_Flag", bound=bool)


class _RingCall(RingArguments, Generic[_Flag], total=False):
    axis_name: Required[str | tuple[str, ...]]
    return_lse: _Flag


@overload
def ring_attention(
    query: jax.typing.ArrayLike,
    key: jax.typing.ArrayLike,
    value: jax.typing.ArrayLike,
    **more: Unpack[_RingCall[Literal[False]]],
) -> jax.Array: ...
@overload
def ring_attention(
    query: jax.typing.ArrayLike,
    key: jax.typing.ArrayLike,
    value: jax.typing.ArrayLike,
    **more: Unpack[_RingCall[Literal[True]]],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def ring_attention(
    query: jax.typing.ArrayLike,
    key: jax.typing.ArrayLike,
    value: jax.typing.ArrayLike,
    **more: Unpack[_RingCall[bool]],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
@KEYWORDS
def ring_attention(
    query: jax.typing.ArrayLike,
    key: jax.typing.ArrayLike,
    value: jax.typing.ArrayLike,
    *,
    axis_name: str | tuple[str, ...],
    return_lse: bool = False,
    **more: object,
) -> jax.Array | tuple[jax.Array, ...]:
    """Attend over a sequence that is divided along a mesh axis, inside `jax.shard_map`.

    Each device calls it with its shard, as made by `attnmask.shard_sequence`, all of one length. It gets its shard of
    the result of `flash_attention` on the whole sequence, merged in float32. Keys and values travel only to devices
    whose queries see them. `query`, `key`, `value`, `softmax_aux` and `relative_bias` have first-order gradients.

    Parameters
    ----------
    query, key, value : array, shape [B, T of the shard, H, D], [B, T of the shard, Hkv, D (Dv)]
        The shards of this device.
    axis_name : str or tuple of str
        The mesh axis; shards are in the order of its devices.
    layout : {"zigzag", "contiguous"} or ShardPlan
        As in `attnmask.shard_sequence`.
    cu_seqlens : array_like of integers, shape [sequences + 1], optional
        Starts of packed sequences in the whole sequence.
    attention_mask : MaskInfo, optional
        The mask of the whole sequence.
    return_lse : bool
        Also return the logsumexp of each row.
    **more
        As in `attnmask.flash_attention`, for the whole sequence: segment ids are of shape [B, T of the whole sequence],
        slopes with `cu_seqlens` [sequences, H], and sinks count once. `softmax_aux`, `relative_bias` and `dropout_seed`
        may be traced; everything else except query, key and value must be known at compile time.

    Returns
    -------
    array, or tuple of two if `return_lse`
        Shapes [B, T of the shard, H, Dv] and [B, H, T of the shard].

    Examples
    --------
    A mesh of one device; pass ``jax.devices()`` for all:

    >>> from functools import partial
    >>> import jax, jax.numpy as jnp
    >>> import attnmask.jax
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], "ring")
    >>> spec = jax.sharding.PartitionSpec(None, "ring")
    >>> attend = partial(attnmask.jax.ring_attention, axis_name="ring", causal=True)
    >>> attend = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec))
    >>> query, value = jnp.zeros((1, 4, 1, 8)), jnp.arange(4.0).reshape(1, 4, 1, 1)
    >>> attend(query, query, value).ravel().tolist()
    [0.0, 0.5, 1.0, 1.5]
    """
    with_lse = known_flag(return_lse, "return_lse")
    terms, given = arguments_of(ring_attention, {"axis_name": axis_name}, more)
    arrays = {"query": query, "key": key, "value": value} | terms
    learned = {name: jax.numpy.asarray(x) for name, x in arrays.items() if x is not None}
    return ring.attend(learned, given, with_lse)
