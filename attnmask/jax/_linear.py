"""Linear attention and short convolutions for JAX, with gradients, and their steps.

Compiled functions call C through XLA's foreign function interface; the counterpart is ``csrc/bind/xla/linear.c``.
Eager calls go to the NumPy functions.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias, Unpack, overload

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike
from numpy.typing import NDArray

from attnmask._common.arguments import as_array, real, wide_dtype
from attnmask._common.loading import _core
from attnmask._common.types import AnyFunction, Arguments, Array
from attnmask._linear import attention
from attnmask._linear import short_convolution as convolution
from attnmask._linear.options import (
    PROBLEM,
    ConvolutionCall,
    ConvolutionOptions,
    ConvolutionStepOptions,
    LinearCall,
    LinearOptions,
    LinearStepOptions,
    keywords,
)
from attnmask.jax import _call as call
from attnmask.jax._arguments import check_known, is_traced, known_flag, like, starts_like
from attnmask.jax._types import AnyArray, AnyByName, ByName, Shaped

__all__ = ["linear_attention", "linear_attention_step", "short_convolution", "short_convolution_step"]

# Untyped, because the core and the NumPy functions check their arguments.
_check: Any = _core
_attend: AnyFunction = attention.linear_attention
_attend_step: AnyFunction = attention.linear_attention_step
_convolve: AnyFunction = convolution.short_convolution
_convolve_step: AnyFunction = convolution.short_convolution_step

_FLAGS = call.WORDS["linear"]
_ARRAYS = (  # in the order of handlers
    "query", "key", "value", "x", "weight", "decay", "beta", "bias", "cu_seqlens", "initial_state", "state",
    "state_indices",
)  # fmt: skip


def _divided(given: Arguments) -> tuple[AnyByName, Arguments]:
    """Return the arguments that are arrays and not None, and those that must be known at compile time."""
    static = {name: x for name, x in given.items() if name not in _ARRAYS}
    for name, x in static.items():
        check_known(x, name)
    arrays = ((name, given[name]) for name in _ARRAYS if given.get(name) is not None)
    return {name: x if isinstance(x, jax.Array) else as_array(x, name) for name, x in arrays}, static


def _stand_in(name: str, x: AnyArray, tokens: int) -> Array:
    """Return a placeholder for checks of types and shapes. Known integers stay, since their values are checked."""
    if name == "cu_seqlens":
        return starts_like(x, tokens) if is_traced(x) else as_array(x, name)
    if name == "state_indices":
        return np.full(x.shape, -1, x.dtype) if is_traced(x) and x.dtype.kind == "i" else as_array(x, name)
    return np.zeros(x.shape, x.dtype) if name == "state" else like(x)


def _integers(x: AnyArray) -> AnyArray:
    return x if is_traced(x) else np.asarray(x, np.int32)


def _words(
    flags: int,
    channels: int = 1,
    scale: float | None = None,
    normalize_qk: bool = False,
    chunk_size: int = 64,
) -> NDArray[np.int64]:
    flags |= _FLAGS["normalize_qk"] * known_flag(normalize_qk, "normalize_qk")
    if scale is None:
        scale = 1 / math.sqrt(channels) if channels else 1.0  # as the core rounds it
    number = struct.unpack("q", struct.pack("d", real(scale, "scale")))
    return np.array([_FLAGS["version"], flags, *number, chunk_size], np.int64)


def _flags_of(arrays: Iterable[str]) -> int:
    return sum(_FLAGS.get(name, 0) for name in arrays)


def _on_host(arrays: AnyByName) -> dict[str, Array]:
    return {name: as_array(x, name) for name, x in arrays.items()}


_Residuals: TypeAlias = tuple[ByName, ByName, tuple[jax.Array, ...]]


def _differentiable(
    targets: tuple[str, str],
    words: Callable[[int], NDArray[np.int64]],
    arrays: AnyByName,
    results: Sequence[Shaped],
    kept: Sequence[Shaped],
) -> tuple[jax.Array, jax.Array]:
    """Return the result and the state of handlers that take `arrays` in this order; `kept` is for gradients."""
    call.register()
    order = list(arrays)
    others = {name: _integers(x) for name, x in arrays.items() if name == "cu_seqlens"}
    learned = {name: jax.numpy.asarray(x) for name, x in arrays.items() if name not in others}
    no_gradients = "linear attention and short convolutions have gradients, but no gradients of these"

    def run(
        target: str, flags: int, given: ByName, more: Sequence[jax.Array], shapes: Sequence[Shaped]
    ) -> tuple[jax.Array, ...]:
        first = [given[name] for name in order]
        return call.call_handler(
            target, words(flags | _flags_of(given)), [*first, *more], shapes, no_gradients
        )

    @jax.custom_vjp
    def compute(learned: ByName, others: ByName) -> tuple[jax.Array, ...]:
        return run(targets[0], 0, learned | others, (), results)

    def forward(learned: Any, others: Any) -> tuple[tuple[jax.Array, ...], _Residuals]:
        learned, others = jax.tree.map(lambda x: x.value, (learned, others))
        found = run(targets[0], _FLAGS["kept"] if kept else 0, learned | others, (), [*results, *kept])
        return tuple(found[:2]), (learned, others, found[2:])

    def backward(residuals: _Residuals, cotangents: tuple[Any, Any]) -> tuple[ByName, None]:
        learned, others, held = residuals
        dout, dstate = cotangents
        if isinstance(dout, SymbolicZero):
            dout = jax.numpy.zeros(dout.shape, dout.dtype)
        states = [] if isinstance(dstate, SymbolicZero) else [dstate]
        names = [name for name in order if name in learned]
        shapes = [(learned[name].shape, learned[name].dtype) for name in names]
        flags = _FLAGS["dstate"] if states else 0
        found = run(targets[1], flags, learned | others, [*held, dout, *states], shapes)
        return dict(zip(names, found, strict=True)), None

    compute.defvjp(forward, backward, symbolic_zeros=True)
    leaves, structure = jax.tree.flatten((learned, others))
    out, state = compute(*jax.tree.unflatten(structure, call.alike(leaves)))
    return out, state


def _in_place(
    target: str, words: Callable[[int], NDArray[np.int64]], arrays: AnyByName, result: Shaped, name: str
) -> tuple[jax.Array, jax.Array]:
    """Return the result and the state of a handler that writes to the state."""
    call.register()
    order = {name: _integers(x) if name == "state_indices" else x for name, x in arrays.items()}
    state = order["state"]
    out, state = call.call_handler(
        target,
        words(_flags_of(arrays)),
        list(order.values()),
        [result, (state.shape, state.dtype)],
        f"attnmask.jax.{name} has no gradients: {name.removesuffix('_step')} has them",
        "sequential",  # each call of a mapped function writes to a state of its own
        {list(order).index("state"): 1},
    )
    return out, state


# Linear attention

_ATTENTION = keywords(_attend, LinearOptions, "ArrayLike")
_ATTENTION_STEP = keywords(_attend_step, LinearStepOptions, "ArrayLike")


@overload
def linear_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, **more: Unpack[LinearCall[ArrayLike, Literal[False]]]
) -> jax.Array: ...
@overload
def linear_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    **more: Unpack[LinearCall[ArrayLike, Literal[True]]],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def linear_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, **more: Unpack[LinearCall[ArrayLike, bool]]
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
@_ATTENTION
def linear_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, *, return_state: bool = False, **more: object
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Apply `attnmask.linear_attention` in JAX: under ``jit``, ``grad`` and ``vmap``, on the CPU.

    `query`, `key`, `value`, `decay`, `beta` and `initial_state` have gradients; higher-order ones are not supported.

    Parameters
    ----------
    query, key : array, shape [B, T, Hk, K]
    value : array, shape [B, T, H, V]
    decay : array, shape [H], [B, T, H] or [B, T, H, K], optional
    beta : array, shape [B, T, H], optional
    initial_state : array, shape [N, H, K, V], optional
    cu_seqlens : array of integers, shape [N + 1], optional
        May be traced, like all arrays.
    scale, normalize_qk, chunk_size, return_state
        As in `attnmask.linear_attention`. They must be known at compile time.

    Returns
    -------
    array, or tuple of two if `return_state`

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import attnmask.jax
    >>> query, value = jnp.ones((1, 3, 1, 1)), jnp.array([10.0, 20.0, 30.0]).reshape(1, 3, 1, 1)
    >>> decay = jnp.log(jnp.array([0.5]))
    >>> attend = jax.jit(lambda value: attnmask.jax.linear_attention(query, query, value, decay=decay))
    >>> attend(value).ravel().tolist()
    [10.0, 25.0, 42.5]
    >>> jax.grad(lambda value: attend(value).sum())(value).ravel().tolist()
    [1.75, 1.5, 1.0]
    """
    own = {"query": query, "key": key, "value": value}
    arrays, static = _divided(_ATTENTION.complete(linear_attention, own, more))
    with_state = known_flag(return_state, "return_state")
    if not any(map(is_traced, arrays.values())):
        return call.to_jax(_attend(**_on_host(arrays), **static, return_state=with_state))
    tokens = arrays["query"].shape[1] if arrays["query"].ndim > 1 else 0
    known = {name: _stand_in(name, x, tokens) for name, x in arrays.items()}
    states, numbers = _check.check_linear_attention(*((known | static).get(name) for name in PROBLEM))
    batch, _, heads, columns = arrays["value"].shape
    rows, wide = arrays["query"].shape[3], wide_dtype(arrays["query"].dtype)
    sequences = batch
    if "cu_seqlens" in arrays:
        sequences = arrays["cu_seqlens"].shape[0] - 1
        if is_traced(arrays["cu_seqlens"]):  # each sequence may end with a short chunk
            states += sequences * heads
    out, state = _differentiable(
        ("attnmask_linear_forward", "attnmask_linear_backward"),
        lambda flags: _words(flags, rows, **static),
        arrays,
        [(arrays["value"].shape, arrays["query"].dtype), ((sequences, heads, rows, columns), wide)],
        [((batch, states // batch if batch else 0, numbers), wide)],
    )
    return (out, state) if with_state else out


@_ATTENTION_STEP
def linear_attention_step(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    state: ArrayLike,
    **more: Unpack[LinearStepOptions[ArrayLike]],
) -> tuple[jax.Array, jax.Array]:
    """Apply `attnmask.linear_attention_step` in JAX, and return the states with the token in them.

    Compiled functions write to their states in place if ``donate_argnums`` names them or a loop carries them. Otherwise
    the states are copied, as in eager calls. Gradients are not supported.

    Parameters
    ----------
    query, key : array, shape [B, Hk, K]
    value : array, shape [B, H, V]
    state : array, shape [slots, H, K, V]
    decay : array, shape [H], [B, H] or [B, H, K], optional
    beta : array, shape [B, H], optional
    state_indices : array of integers, shape [B], optional
    scale, normalize_qk
        All of these as in `attnmask.linear_attention_step`. `scale` and `normalize_qk` must be known at compile time.

    Returns
    -------
    out : array, shape [B, H, V]
    state : array, shape [slots, H, K, V]

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import attnmask.jax
    >>> step = jax.jit(lambda *given: attnmask.jax.linear_attention_step(*given, scale=1.0), donate_argnums=3)
    >>> state, key = jnp.zeros((1, 1, 2, 1)), jnp.array([[[1.0, 0.0]]])
    >>> for number in (10.0, 20.0):
    ...     out, state = step(key, key, jnp.full((1, 1, 1), number), state)
    >>> out.item(), state.ravel().tolist()
    (30.0, [30.0, 0.0])
    """
    own = {"query": query, "key": key, "value": value, "state": state}
    arrays, static = _divided(_ATTENTION_STEP.complete(linear_attention_step, own, more))
    if not any(map(is_traced, arrays.values())):
        held = _on_host(arrays)
        held["state"] = np.array(held["state"])
        out = _attend_step(**held, **static)
        return call.to_jax(out), call.to_jax(held["state"])
    known = {name: _stand_in(name, x, 0) for name, x in arrays.items()}
    problem = ("query", "key", "value", "state", "decay", "beta", "scale", "normalize_qk", "state_indices")
    _check.check_linear_attention_step(*((known | static).get(name) for name in problem), None)
    rows = arrays["query"].shape[2]
    by_row = {
        name: x
        if name.startswith("state") or (name == "decay" and x.ndim == 1)
        else jax.numpy.asarray(x)[:, None]
        for name, x in arrays.items()
    }
    out, after = _in_place(
        "attnmask_linear_step",
        lambda flags: _words(flags, rows, **static),
        by_row,
        (by_row["value"].shape, arrays["query"].dtype),
        "linear_attention_step",
    )
    return out[:, 0], after


# Short convolutions

_CONVOLUTION = keywords(_convolve, ConvolutionOptions, "ArrayLike")
_CONVOLUTION_STEP = keywords(_convolve_step, ConvolutionStepOptions, "ArrayLike")


@overload
def short_convolution(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    **more: Unpack[ConvolutionCall[ArrayLike, Literal[False]]],
) -> jax.Array: ...
@overload
def short_convolution(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    **more: Unpack[ConvolutionCall[ArrayLike, Literal[True]]],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def short_convolution(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    **more: Unpack[ConvolutionCall[ArrayLike, bool]],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
@_CONVOLUTION
def short_convolution(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    return_state: bool = False,
    **more: object,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Apply `attnmask.short_convolution` in JAX: under ``jit``, ``grad`` and ``vmap``, on the CPU.

    `x`, `weight`, `bias` and `initial_state` have gradients; higher-order ones are not supported.

    Parameters
    ----------
    x : array, shape [B, T, C]
    weight : array, shape [C, W]
    bias : array, shape [C], optional
    cu_seqlens : array of integers, shape [N + 1], optional
        May be traced, like all arrays.
    initial_state : array, shape [N, C, W - 1], optional
    activation, return_state
        All of these as in `attnmask.short_convolution`.

    Returns
    -------
    array, or tuple of two if `return_state`

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import attnmask.jax
    >>> x, weight = jnp.arange(1.0, 6).reshape(1, 5, 1), jnp.array([[100.0, 10, 1]])
    >>> convolve = jax.jit(lambda weight: attnmask.jax.short_convolution(x, weight, cu_seqlens=[0, 2, 5]))
    >>> convolve(weight).ravel().tolist()
    [1.0, 12.0, 3.0, 34.0, 345.0]
    >>> jax.grad(lambda weight: convolve(weight).sum())(weight).tolist()
    [[3.0, 8.0, 15.0]]
    """
    own = {"x": x, "weight": weight, "bias": bias}
    arrays, static = _divided(_CONVOLUTION.complete(short_convolution, own, more))
    silu, with_state = convolution.is_silu(**static), known_flag(return_state, "return_state")
    if not any(map(is_traced, arrays.values())):
        return call.to_jax(_convolve(**_on_host(arrays), **static, return_state=with_state))
    tokens = arrays["x"].shape[1] if arrays["x"].ndim > 1 else 0
    known = {name: _stand_in(name, given, tokens) for name, given in arrays.items()}
    given = [known.get(name) for name in ("x", "weight", "bias")]
    starts, before = known.get("cu_seqlens"), known.get("initial_state")
    _check.check_short_convolution(*given, silu, starts, before, with_state, None)
    dtype, (channels, width) = arrays["x"].dtype, arrays["weight"].shape
    sequences = arrays["x"].shape[0] if starts is None else starts.shape[0] - 1
    arrays["x"] = jax.numpy.asarray(arrays["x"])[..., None]
    out, state = _differentiable(
        ("attnmask_convolution_forward", "attnmask_convolution_backward"),
        lambda flags: _words(flags | _FLAGS["silu"] * silu),
        arrays,
        [(arrays["x"].shape, dtype), ((sequences, channels, width - 1), dtype)],
        [],
    )
    return (out[..., 0], state) if with_state else out[..., 0]


@_CONVOLUTION_STEP
def short_convolution_step(
    x: ArrayLike,
    weight: ArrayLike,
    state: ArrayLike,
    bias: ArrayLike | None = None,
    **more: Unpack[ConvolutionStepOptions],
) -> tuple[jax.Array, jax.Array]:
    """Apply `attnmask.short_convolution_step` in JAX, and return the states with the token in them.

    Compiled functions write to their states in place if ``donate_argnums`` names them or a loop carries them. Otherwise
    the states are copied, as in eager calls. Gradients are not supported.

    Parameters
    ----------
    x : array, shape [B, C]
    weight : array, shape [C, W]
    state : array, shape [slots, C, W - 1]
    bias : array, shape [C], optional
    state_indices : array of integers, shape [B], optional
    activation
        All of these as in `attnmask.short_convolution_step`.

    Returns
    -------
    out : array, shape [B, C]
    state : array, shape [slots, C, W - 1]

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import attnmask.jax
    >>> weight, state = jnp.array([[100.0, 10, 1]]), jnp.zeros((1, 1, 2))
    >>> for token in (1.0, 2.0, 3.0):
    ...     out, state = attnmask.jax.short_convolution_step(jnp.array([[token]]), weight, state)
    >>> out.item(), state.ravel().tolist()
    (123.0, [2.0, 3.0])
    """
    own = {"x": x, "weight": weight, "bias": bias, "state": state}
    arrays, static = _divided(_CONVOLUTION_STEP.complete(short_convolution_step, own, more))
    silu = convolution.is_silu(**static)
    if not any(map(is_traced, arrays.values())):
        held = _on_host(arrays)
        held["state"] = np.array(held["state"])
        out = _convolve_step(**held, **static)
        return call.to_jax(out), call.to_jax(held["state"])
    known = {name: _stand_in(name, given, 0) for name, given in arrays.items()}
    given = [known.get(name) for name in ("x", "weight", "state", "bias")]
    _check.check_short_convolution_step(*given, silu, known.get("state_indices"), None)
    arrays["x"] = jax.numpy.asarray(arrays["x"])[:, None, :, None]
    out, after = _in_place(
        "attnmask_convolution_step",
        lambda flags: _words(flags | _FLAGS["silu"] * silu),
        arrays,
        (arrays["x"].shape, arrays["x"].dtype),
        "short_convolution_step",
    )
    return out[:, 0, :, 0], after
