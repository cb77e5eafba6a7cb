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

from typing import Any, Generic, Literal, Required, TypeVar, Unpack, overload

import numpy as np

try:
    import jax
except ImportError as _missing:
    raise ImportError("attnmask.jax needs JAX, which is not installed: pip install jax") from _missing
if not hasattr(jax, "enable_x64"):
    raise ImportError(
        f"attnmask.jax needs JAX 0.8 or later, got {jax.__version__}: pip install --upgrade jax"
    )

from attnmask._attention.arguments import (
    DEFAULTS,
    LEARNED,
    OPTIONS,
    TRACED,
    CacheArguments,
    Call,
    cache_keywords,
)
from attnmask._attention.flash_attention import flash_attention as attend_in_numpy
from attnmask._common.arguments import describe
from attnmask._common.keywords import reject_unknown
from attnmask._common.types import Arguments
from attnmask._faces.attention import CACHE, WRITE
from attnmask._masks.info import MaskInfo
from attnmask._sharded.ring import KEYWORDS, RingArguments, arguments_of
from attnmask.jax import _cache as kvcache
from attnmask.jax import _call as call
from attnmask.jax import _callback as in_python
from attnmask.jax import _ring as ring
from attnmask.jax._arguments import check, check_known, is_traced, known_flag, sinks_of, specify
from attnmask.jax._cache import KVCacheResult
from attnmask.jax._call import register, to_jax
from attnmask.jax._faces import on_copies
from attnmask.jax._gradients import differentiable
from attnmask.jax._linear import (
    linear_attention,
    linear_attention_step,
    short_convolution,
    short_convolution_step,
)
from attnmask.jax._types import ByName, Results

__all__ = [
    "KVCacheResult",
    "flash_attention",
    "flash_attention_with_kvcache",
    "linear_attention",
    "linear_attention_step",
    "register",
    "ring_attention",
    "short_convolution",
    "short_convolution_step",
    "write_kvcache",
]
__dir__ = __all__.copy  # what completion offers

jax.tree_util.register_pytree_node_class(MaskInfo)


def _check_kinds(arrays: Arguments, static: Arguments) -> None:
    """Check what has another message here than where attention is computed."""
    for name in LEARNED[:3]:
        if name in static:
            raise TypeError(f"{name} must be an array, got {describe(static[name])}")
        if arrays[name].ndim not in (3, 4):
            raise ValueError(f"{name} must have three or four axes, got shape {arrays[name].shape}")
    for name, x in static.items():
        if name not in DEFAULTS:
            reject_unknown("flash_attention", [name], (*DEFAULTS, "return_lse"))
        check_known(x, name)


def _four_axes(learned: ByName) -> ByName:
    """Arrange learned arrays as the core takes them; JAX carries gradients back by itself."""
    arranged = {name: x if x.ndim == 4 else x[None] for name, x in learned.items() if name in LEARNED[:3]}
    if "bias" in learned:
        bias = learned["bias"]
        arranged["bias"] = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    if "softmax_aux" in learned:
        arranged["softmax_aux"] = sinks_of(learned["softmax_aux"])
    tables = {name: x for name, x in learned.items() if name not in arranged}
    return arranged | {
        name: x if x.dtype.itemsize >= 4 else x.astype(np.float32) for name, x in tables.items()
    }


_Flag = TypeVar("_Flag", bound=bool)


class _Call(Call[_Flag], Generic[_Flag], total=False):
    callback: bool


class _RingCall(RingArguments, Generic[_Flag], total=False):
    axis_name: Required[str | tuple[str, ...]]
    return_lse: _Flag


@overload
def flash_attention(
    query: jax.typing.ArrayLike,
    key: jax.typing.ArrayLike,
    value: jax.typing.ArrayLike,
    attention_mask: jax.typing.ArrayLike | MaskInfo | None = None,
    bias: jax.typing.ArrayLike | None = None,
    **more: Unpack[_Call[Literal[False]]],
) -> jax.Array: ...
@overload
def flash_attention(
    query: jax.typing.ArrayLike,
    key: jax.typing.ArrayLike,
    value: jax.typing.ArrayLike,
    attention_mask: jax.typing.ArrayLike | MaskInfo | None = None,
    bias: jax.typing.ArrayLike | None = None,
    **more: Unpack[_Call[Literal[True]]],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def flash_attention(
    query: jax.typing.ArrayLike,
    key: jax.typing.ArrayLike,
    value: jax.typing.ArrayLike,
    attention_mask: jax.typing.ArrayLike | MaskInfo | None = None,
    bias: jax.typing.ArrayLike | None = None,
    **more: Unpack[_Call[bool]],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
@OPTIONS
def flash_attention(
    query: jax.typing.ArrayLike,
    key: jax.typing.ArrayLike,
    value: jax.typing.ArrayLike,
    attention_mask: jax.typing.ArrayLike | MaskInfo | None = None,
    bias: jax.typing.ArrayLike | None = None,
    *,
    return_lse: bool = False,
    callback: bool = False,
    **more: object,
) -> jax.Array | tuple[jax.Array, ...]:
    """Apply `attnmask.flash_attention` in JAX: under ``jit``, ``grad`` and ``vmap``.

    `query`, `key`, `value`, `bias`, `softmax_aux` and `relative_bias` have gradients, and so has the logsumexp with
    `return_lse`. Higher-order gradients are not supported. It runs on the CPU, where compiled functions call C: types
    and shapes are checked at trace time.

    Parameters
    ----------
    query, key, value : array, shape [B, Tq, H, D], [B, Tk, Hkv, D] and [B, Tk, Hkv, Dv]
        Without B if `cum_seqlens_q` or `cum_seqlens_k` is given.
    attention_mask : array or MaskInfo, optional
        May be traced.
    bias : array, optional
        Added to the logits.
    return_lse : bool
        Also return the logsumexp of each row.
    callback : bool
        Let compiled functions call back into Python, for runtimes that cannot call C. This is slow, and with more
        devices than threads it may hang.
    **more
        The other arguments of `attnmask.flash_attention` by name, except `out`. Segment ids, `cum_seqlens_q`,
        `cum_seqlens_k`, `causal_offset`, `alibi_slopes`, `relative_bias` and `dropout_seed` may be traced; the others
        are fixed at compile time.

    Returns
    -------
    array, or tuple of two if `return_lse`

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import attnmask.jax
    >>> query, value = jnp.zeros((1, 3, 1, 8)), jnp.arange(3.0).reshape(1, 3, 1, 1)
    >>> attend = jax.jit(lambda value: attnmask.jax.flash_attention(query, query, value, causal=True))
    >>> attend(value).ravel().tolist()
    [0.0, 0.5, 1.0]
    >>> [round(x, 3) for x in jax.grad(lambda value: attend(value).sum())(value).ravel().tolist()]
    [1.833, 0.833, 0.333]
    """
    with_lse = known_flag(return_lse, "return_lse")
    own: Arguments = {"query": query, "key": key, "value": value}
    given = own | {"attention_mask": attention_mask, "bias": bias} | more
    arrays = {
        name: x if isinstance(x, (MaskInfo, jax.Array)) else np.asarray(x)
        for name, x in given.items()
        if name in TRACED and not (x is None or isinstance(x, (int, str)))
    }
    static = {name: x for name, x in given.items() if name not in arrays}
    _check_kinds(arrays, static)
    if not any(map(is_traced, arrays.values())):  # nothing to compile
        return to_jax(attend_in_numpy(**in_python.on_host(arrays), **static, return_lse=with_lse))

    learned = {name: jax.numpy.asarray(arrays.pop(name)) for name in LEARNED if name in arrays}
    known = DEFAULTS | static | learned | arrays
    problem, batched = check(known)
    if known_flag(callback, "callback") or not call.registered():
        engine: Any = in_python
        spec: Any = static
        others: Any = arrays
    else:
        engine = call
        spec, others = specify(known, problem)
    count, dtype = 1 + with_lse, learned["query"].dtype

    def forward(learned: ByName, others: Any, for_gradients: bool) -> Results:
        if not for_gradients:
            return tuple(engine.forward(spec, learned, others, count))
        # The result before it is rounded to 16 bits, or it would be the largest error of gradients.
        out, lse, *wide_out = engine.forward(spec, learned, others, 3 if dtype.itemsize == 2 else 2)
        return *(out, lse)[:count], *(wide_out or (out,)), lse

    def backward(
        learned: ByName, others: Any, wanted: tuple[str, ...], kept: Any, of_results: Any
    ) -> Results:
        dout, *dlse = of_results
        given = (dout, *kept, *(x for x in dlse if x is not None))
        found: tuple[jax.Array, ...] = engine.backward(spec, learned, others, wanted, given)
        return found

    results = differentiable(forward, backward, count)(_four_axes(learned), others)
    results = results if batched else tuple(x[0] for x in results)
    return results if with_lse else results[0]


_CACHE = cache_keywords("ArrayLike")


@_CACHE
def flash_attention_with_kvcache(
    query: jax.typing.ArrayLike,
    k_cache: jax.typing.ArrayLike,
    v_cache: jax.typing.ArrayLike,
    key: jax.typing.ArrayLike | None = None,
    value: jax.typing.ArrayLike | None = None,
    *,
    attention_mask: jax.typing.ArrayLike | MaskInfo | None = None,
    return_lse: bool = False,
    **more: Unpack[CacheArguments[jax.typing.ArrayLike]],
) -> KVCacheResult:
    """Apply `attnmask.flash_attention_with_kvcache` in JAX, and return the caches with the new tokens.

    Compiled functions write to their caches in place if ``donate_argnums`` names them or a loop carries them. Otherwise
    the caches are copied, as in eager calls. Gradients are not supported.

    Parameters
    ----------
    query, k_cache, v_cache, key, value : array
        As in `attnmask.flash_attention_with_kvcache`.
    cache_seqlens, block_table, cu_seqlens_q, cu_seqlens_k_new : array, optional
        May be traced, like all arrays. Errors in their numbers are raised when the function runs.
    k_scale, v_scale : array, optional
        The scales of a quantized cache.
    attention_mask : array or MaskInfo, optional
        May be traced.
    return_lse, rotate : bool
        As in `attnmask.flash_attention_with_kvcache`.
    **more
        The other arguments of `attnmask.flash_attention_with_kvcache` by name, except `out`. Arrays may be traced; the
        others, like `return_lse`, must be known at compile time.

    Returns
    -------
    KVCacheResult
        ``out``, ``lse``, and ``k_cache``, ``v_cache``, ``k_scale`` and ``v_scale`` as they are after the call.

    Examples
    --------
    >>> from functools import partial
    >>> import jax, jax.numpy as jnp
    >>> import attnmask.jax
    >>> @partial(jax.jit, donate_argnums=0)
    ... def step(caches, token, length):
    ...     result = attnmask.jax.flash_attention_with_kvcache(token, *caches, token, token, cache_seqlens=length)
    ...     return (result.k_cache, result.v_cache), result.out
    >>> caches = jnp.zeros((1, 64, 1, 8)), jnp.zeros((1, 64, 1, 8))
    >>> for length in range(3):
    ...     caches, out = step(caches, jnp.full((1, 1, 1, 8), length, jnp.float32), length)
    >>> caches[0][0, :4, 0, 0].tolist()
    [0.0, 1.0, 2.0, 0.0]
    """
    own: Arguments = {"query": query, "k_cache": k_cache, "v_cache": v_cache, "key": key, "value": value}
    own |= {"attention_mask": attention_mask, "return_lse": return_lse}
    given = _CACHE.complete(flash_attention_with_kvcache, own, more)
    _check_value(given)
    for name, x in given.items():
        if name not in kvcache.TRACED:
            check_known(x, name)
    if not any(map(is_traced, given.values())):
        found, caches = on_copies(CACHE, given, given["key"] is not None)
        out, lse = found if given["return_lse"] else (found, None)
        return KVCacheResult(out, lse, **{name: given[name] for name in kvcache.CACHES} | caches)
    register()
    return kvcache.attend(given)


def _check_value(given: Arguments) -> None:
    """Refuse keys alone, which NumPy's functions take where the values are a view of the keys' channels."""
    if given["key"] is None or given["value"] is not None:
        return
    v_cache = jax.numpy.asarray(given["v_cache"])
    channels = v_cache.shape[-1] * (2 if v_cache.dtype == np.uint8 else 1) if v_cache.ndim else 0
    raise ValueError(
        "value must be given with key, got None; arrays in JAX share no memory, so that a latent cache has its values "
        f"in an array of their own: write value=key[..., :{channels}]"
    )


def write_kvcache(
    k_cache: jax.typing.ArrayLike,
    v_cache: jax.typing.ArrayLike,
    key: jax.typing.ArrayLike,
    value: jax.typing.ArrayLike,
    slot_mapping: jax.typing.ArrayLike,
    *,
    k_scale: jax.typing.ArrayLike | None = None,
    v_scale: jax.typing.ArrayLike | None = None,
    rotate: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """Apply `attnmask.write_kvcache` in JAX, and return the caches with the new tokens.

    Compiled functions write to their caches in place as `flash_attention_with_kvcache` does.

    Parameters
    ----------
    k_cache, v_cache, key, value : array
        As in `attnmask.write_kvcache`. `value` is required, since arrays in JAX share no memory.
    slot_mapping : array of integers, shape [total]
        May be traced, like all arrays. Errors in its numbers are raised when the function runs.
    k_scale, v_scale : array, optional
        The scales of a quantized cache.
    rotate : bool

    Returns
    -------
    k_cache, v_cache : array
        The caches as they are after the call.
    k_scale, v_scale : array or None
        Their scales; None for caches that have none.

    Examples
    --------
    >>> from functools import partial
    >>> import jax, jax.numpy as jnp
    >>> import attnmask.jax
    >>> @partial(jax.jit, donate_argnums=0)
    ... def write(caches, tokens, slots):
    ...     return attnmask.jax.write_kvcache(*caches, tokens, tokens, slots)[:2]
    >>> caches = jnp.zeros((2, 4, 1, 8)), jnp.zeros((2, 4, 1, 8))
    >>> caches = write(caches, jnp.ones((2, 1, 8)), jnp.array([5, -1]))
    >>> caches[0][:, :, 0, 0].tolist()
    [[0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]
    """
    given: Arguments = {
        "k_cache": k_cache,
        "v_cache": v_cache,
        "key": key,
        "value": value,
        "slot_mapping": slot_mapping,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "rotate": rotate,
    }
    _check_value(given)
    check_known(rotate, "rotate")
    if any(map(is_traced, given.values())):
        register()
        written: tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None] = kvcache.write(given)
        return written
    _, caches = on_copies(WRITE, given)
    return caches["k_cache"], caches["v_cache"], caches.get("k_scale"), caches.get("v_scale")


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
    register()
    return ring.attend(learned, given, with_lse)
