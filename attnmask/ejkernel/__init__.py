"""Run ejKernel's attention and linear attention on attnmask, on CPUs."""

import inspect
from typing import Any

import jax

from attnmask import jax as attnmask_jax
from attnmask._common.arguments import integer
from attnmask._common.types import AnyFunction
from attnmask.ejkernel._import import kernels

__all__ = ["register"]
__dir__ = __all__.copy  # what completion offers


def _is_ours(spec: Any) -> bool:
    # Later versions of ejKernel wrap what is registered.
    return inspect.unwrap(spec.implementation) in _FUNCTIONS.values()


def _of_xla(algorithm: str) -> list[Any]:
    held = kernels.kernel_registry.list_implementations(algorithm)
    return [spec for spec in held if spec.platform == kernels.Platform.XLA]


def _flash_attention(
    *,
    fwd_params: object = None,
    bwd_params: object = None,
    block_tables: jax.Array | None = None,
    **arguments: Any,
) -> jax.Array | tuple[jax.Array, ...]:
    """Attend as ejKernel calls its kernels. Block sizes are not needed; paged caches are left to ejKernel."""
    if block_tables is None:
        return attnmask_jax.flash_attention(**arguments)
    own = _own("flash_attention")
    return own(fwd_params=fwd_params, bwd_params=bwd_params, block_tables=block_tables, **arguments)


def _own(algorithm: str) -> AnyFunction:
    return next(spec.implementation for spec in _of_xla(algorithm) if not _is_ours(spec))


# Linear attention. The parameters are ejKernel's, which computes in float32 and returns it. Later versions add block
# sizes, which are ignored, and segment ids: calls with these go to ejKernel's own kernel.


def _wide(x: jax.Array | None) -> Any:
    return x if x is None or x.dtype == jax.numpy.float64 else x.astype(jax.numpy.float32)


def _gla(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    g: jax.Array | None = None,
    g_gamma: jax.Array | None = None,
    softmax_scale: float | None = None,
    initial_state: jax.Array | None = None,
    reverse: bool = False,
    cu_seqlens: jax.Array | None = None,
    block_k: object = None,
    block_v: object = None,
    num_warps: object = None,
    num_stages: object = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """Gated linear attention. Decays of channels, `g`, and of heads, `g_gamma`, are added."""
    query, key, value, g, initial_state = map(_wide, (query, key, value, g, initial_state))
    shared = query.shape[2] // max(key.shape[2], 1)
    if shared > 1:
        key, value = (jax.numpy.repeat(x, shared, axis=2) for x in (key, value))
    decay = g
    if g_gamma is not None:
        by_head = _wide(g_gamma).reshape(query.shape[2])
        decay = by_head if g is None else g + by_head[:, None]
    starts = cu_seqlens
    if reverse:  # the sequences are in reverse order, too
        query, key, value = (x[:, ::-1] for x in (query, key, value))
        decay = decay if g is None else decay[:, ::-1]
        if starts is not None:
            starts = query.shape[1] - starts[::-1]
            initial_state = None if initial_state is None else initial_state[::-1]
    out, state = attnmask_jax.linear_attention(
        query,
        key,
        value,
        decay=decay,
        scale=softmax_scale,
        initial_state=initial_state,
        cu_seqlens=starts,
        return_state=True,
    )
    if not reverse:
        return out, state
    return out[:, ::-1], state if cu_seqlens is None else state[::-1]


def _lightning_attn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    layer_idx: int,
    num_layers: int,
    softmax_scale: float | None = None,
    initial_state: jax.Array | None = None,
    reverse: bool = False,
    cu_seqlens: jax.Array | None = None,
    block_k: object = None,
    block_v: object = None,
    num_warps: object = None,
    num_stages: object = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """Linear attention with one decay per head, weaker in later layers."""
    heads = query.shape[2]
    slope = -(8 / heads * (1 - layer_idx / num_layers))
    g_gamma = slope * jax.numpy.arange(heads, dtype=jax.numpy.float32)
    return _gla(query, key, value, None, g_gamma, softmax_scale, initial_state, reverse, cu_seqlens)


def _gated_delta_rule(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    beta: jax.Array,
    decay: jax.Array | None = None,
    *,
    softmax_scale: float | None = None,
    chunk_size: int = 64,
    initial_state: jax.Array | None = None,
    use_qk_l2norm: bool = True,
    use_chunked: bool = True,
    seg_ids: jax.Array | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """The delta rule with one decay per token. `chunk_size` and `use_chunked` are ignored."""
    if seg_ids is not None:
        given = {"chunk_size": chunk_size, "initial_state": initial_state, "seg_ids": seg_ids}
        given |= {"use_qk_l2norm": use_qk_l2norm, "use_chunked": use_chunked}
        return _own("gated_delta_rule")(query, key, value, beta, decay, **given)
    query, key, value, beta, decay, state = map(_wide, (query, key, value, beta, decay, initial_state))
    return attnmask_jax.linear_attention(
        query,
        key,
        value,
        decay=decay,
        beta=beta,
        scale=softmax_scale,
        initial_state=state,
        normalize_qk=use_qk_l2norm,
        return_state=True,
    )


_FUNCTIONS: dict[str, AnyFunction] = {
    "flash_attention": _flash_attention,
    "gla": _gla,
    "lightning_attn": _lightning_attn,
    "kernel_delta_attention": _gated_delta_rule,
    "kda": _gated_delta_rule,
    "gated_delta_rule": _gated_delta_rule,
}


def _takes_what_they_do(function: AnyFunction, specs: list[Any]) -> bool:
    """Return whether `function` has all parameters of one of the implementations."""
    ours = inspect.signature(function).parameters
    more = any(parameter.kind is parameter.VAR_KEYWORD for parameter in ours.values())
    return any(
        more or inspect.signature(spec.implementation).parameters.keys() <= ours.keys() for spec in specs
    )


def register(priority: int = 100) -> None:
    """Make ejKernel compute attention and linear attention with attnmask: eagerly, under ``jax.jit``, in gradients.

    It replaces ``flash_attention``, ``gla``, ``lightning_attn``, ``kernel_delta_attention`` and, in versions that have
    it, ``gated_delta_rule``. ejKernel chooses among XLA implementations by priority. Registering again has no effect.

    Parameters
    ----------
    priority : int
        ejKernel's own implementation has priority 0.

    Raises
    ------
    RuntimeError
        If the CPU is not JAX's default backend.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import attnmask.ejkernel
    >>> from ejkernel.modules import flash_attention
    >>> attnmask.ejkernel.register()
    >>> query, value = jnp.zeros((1, 3, 1, 8)), jnp.arange(3.0).reshape(1, 3, 1, 1)
    >>> flash_attention(query, query, value, causal=True, platform="xla").ravel().tolist()
    [0.0, 0.5, 1.0]
    """
    chosen = integer(priority, "priority")
    backend = jax.default_backend()
    if backend != "cpu":
        raise RuntimeError(
            f"attnmask.ejkernel is for CPUs: JAX's default backend must be 'cpu', got {backend!r}"
        )
    add = kernels.kernel_registry.register
    for algorithm, function in _FUNCTIONS.items():
        held = _of_xla(algorithm)
        if not any(map(_is_ours, held)) and _takes_what_they_do(function, held):
            # ejKernel looks XLA kernels up with Backend.ANY, so Backend.CPU would never be chosen.
            add(algorithm, kernels.Platform.XLA, kernels.Backend.ANY, priority=chosen)(function)
