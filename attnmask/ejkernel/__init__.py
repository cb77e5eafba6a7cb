"""Run ejKernel's attention on attnmask, on CPUs."""

import inspect
from typing import Any

import jax  # type: ignore[import-not-found, unused-ignore]

from attnmask import jax as attnmask_jax
from attnmask._common.arguments import integer
from attnmask.ejkernel._import import kernels

__all__ = ["register"]

_ALGORITHM = "flash_attention"


def _is_ours(spec: Any) -> bool:
    return inspect.unwrap(spec.implementation) is _flash_attention  # later versions wrap what is registered


def _flash_attention(
    *, fwd_params: Any = None, bwd_params: Any = None, block_tables: Any = None, **arguments: Any
) -> Any:
    """Attend as ejKernel calls its kernels. Block sizes are not needed; paged caches are left to ejKernel."""
    if block_tables is None:
        return attnmask_jax.flash_attention(**arguments)
    held = kernels.kernel_registry.list_implementations(_ALGORITHM)
    own = next(spec for spec in held if spec.platform == kernels.Platform.XLA and not _is_ours(spec))
    return own.implementation(
        fwd_params=fwd_params, bwd_params=bwd_params, block_tables=block_tables, **arguments
    )


def register(priority: int = 100) -> None:
    """Make ejKernel compute ``flash_attention`` with attnmask: eagerly, under ``jax.jit``, and in gradients.

    ejKernel chooses among XLA implementations by priority. Registering again has no effect.

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
    held = kernels.kernel_registry.list_implementations(_ALGORITHM)
    if not any(map(_is_ours, held)):
        # Backend.CPU would never be chosen: for XLA ejKernel asks for any backend.
        add = kernels.kernel_registry.register
        add(_ALGORITHM, kernels.Platform.XLA, kernels.Backend.ANY, priority=chosen)(_flash_attention)
