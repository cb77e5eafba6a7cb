"""`flash_attention` for JAX, under ``jit``, ``grad`` and ``vmap``, and `MaskInfo` as a pytree.

To import this module is to register `MaskInfo`. From then on a mask may stand wherever JAX takes a tree: `jax.tree.map`
reaches its arrays, and functions under ``jax.jit`` take and return it. Its arrays are the leaves, and everything else
(shape, terms, flags, names of axes) is static: a function is compiled once for all masks that differ in the contents of
their arrays only.

Under ``jax.jit`` the arrays are tracers, and the core, which is no part of JAX, cannot look into them. So a mask that
came in as an argument goes on to `flash_attention`, as it is, or in parts by `tree_flatten`; whatever else reads it,
its shape or a term more included, raises ``TracerArrayConversionError``. Read it before, close over it, or read it in a
``jax.pure_callback``. As any array, one of 64 bits loses half of them on its way through ``jax.jit`` unless
``jax_enable_x64`` is set; only the numbers of batch rows (offsets, lengths) and dense masks may have as many.

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

from collections.abc import Iterable
from inspect import signature
from typing import Any

import numpy as np

try:
    import jax  # type: ignore[import-not-found, unused-ignore]
    from jax.custom_derivatives import SymbolicZero  # type: ignore[import-not-found, unused-ignore]
except ImportError as _missing:
    raise ImportError("attnmask.jax needs JAX, which is not installed: pip install jax") from _missing

from attnmask import _flash as flash
from attnmask._arguments import as_array, describe, flag
from attnmask._flash_arguments import ARRAYS, LEARNED
from attnmask._flash_backward import flash_attention_bwd
from attnmask._keywords import advice
from attnmask._mask_info import MaskInfo

__all__ = ["flash_attention"]

jax.tree_util.register_pytree_node_class(MaskInfo)

_TRACED = (*ARRAYS, "dropout_seed")
_NAMES = frozenset(signature(flash.flash_attention).parameters) - {"out"}


def _on_host(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a callback as `flash_attention` wants them."""
    arrays: dict[str, Any] = {
        name: x if isinstance(x, MaskInfo) else as_array(x, name) for name, x in arguments.items()
    }
    if "dropout_seed" in arrays:
        arrays["dropout_seed"] = int(arrays["dropout_seed"])
    return arrays


def _like(arrays: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays)


def _check(traced: dict[str, Any], static: dict[str, Any]) -> None:
    """What would not be understood where it comes out of a compiled function."""
    for name in LEARNED[:3]:
        if name in static:
            raise TypeError(f"{name} must be an array, got {describe(static[name])}")
        if traced[name].ndim not in (3, 4):
            raise ValueError(f"{name} must have three or four axes, got shape {traced[name].shape}")
    for name, x in static.items():
        if name not in _NAMES:
            hint = advice(name, _NAMES)
            raise TypeError(
                f"flash_attention() of JAX arrays got an unexpected keyword argument {name!r}{hint}"
            )
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x)):
            raise TypeError(f"{name} must be known when a function is compiled, got a traced value")


def flash_attention(
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any = None,
    bias: Any = None,
    *,
    softmax_aux: Any = None,
    return_lse: bool = False,
    **more: Any,
) -> Any:
    """`attnmask.flash_attention` as a function of JAX: it may be compiled, differentiated and mapped.

    There are gradients of `query`, `key`, `value`, `bias` and `softmax_aux`, and with `return_lse` through the
    logsumexp, too; gradients of gradients there are not. It runs on the CPU, in a callback.

    Parameters
    ----------
    query, key, value : array, shape [B, Tq, H, D], [B, Tk, Hkv, D] and [B, Tk, Hkv, Dv]
        Or without B, with `cum_seqlens_q` or `cum_seqlens_k`.
    attention_mask : array or MaskInfo, optional
    bias, softmax_aux : array, optional
    return_lse : bool
    **more
        The other arguments of `attnmask.flash_attention` but `out`, by their names. Segment ids, `cum_seqlens_q`,
        `cum_seqlens_k`, `causal_offset` and `dropout_seed` may be traced; the others are fixed when a function is
        compiled.

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
    with_lse = flag(return_lse, "return_lse")
    given = {
        "query": query,
        "key": key,
        "value": value,
        "attention_mask": attention_mask,
        "bias": bias,
        "softmax_aux": softmax_aux,
        **more,
    }
    traced = {
        name: x if isinstance(x, (MaskInfo, jax.Array)) else np.asarray(x)
        for name, x in given.items()
        if name in _TRACED and not (x is None or isinstance(x, (int, str)))
    }
    static = {name: x for name, x in given.items() if name not in traced}
    _check(traced, static)
    learned = {name: traced.pop(name) for name in LEARNED if name in traced}
    query, key, value = (learned[name] for name in LEARNED[:3])
    rows = (*query.shape[:-3], query.shape[-2], query.shape[-3])
    wide = np.float64 if query.dtype == np.float64 else np.float32
    results = (
        jax.ShapeDtypeStruct((*query.shape[:-1], value.shape[-1]), query.dtype),
        jax.ShapeDtypeStruct(rows, wide),
    )

    def on_host(learned: Any, others: Any) -> Any:
        return flash.flash_attention_fwd(**_on_host(learned | others), **static)

    def gradient_on_host(
        wanted: Any, learned: Any, others: Any, out: Any, lse: Any, dout: Any, dlse: Any
    ) -> Any:
        out, lse, dout = (as_array(x, name) for x, name in ((out, "out"), (lse, "lse"), (dout, "dout")))
        extras = {f"grad_{name}": name in wanted for name in LEARNED[3:]}
        arguments = _on_host(learned | others) | static | extras
        grads = flash_attention_bwd(
            dout, out=out, lse=lse, dlse=None if dlse is None else as_array(dlse, "dlse"), **arguments
        )
        return tuple(getattr(grads, name) for name in wanted)

    @jax.custom_vjp  # type: ignore[untyped-decorator, unused-ignore]
    def attend(learned: Any, others: Any) -> Any:
        return jax.pure_callback(on_host, results, learned, others, vmap_method="sequential")

    def forward(learned: Any, others: Any) -> Any:
        wanted = {
            name: () for name, x in learned.items() if x.perturbed
        }  # its keys, which tracing leaves alone
        learned, others = jax.tree.map(lambda x: x.value, (learned, others))
        both = attend(learned, others)
        return both, (wanted, learned, others, *both)

    def backward(residuals: Any, cotangents: Any) -> Any:
        wanted, learned, others, out, lse = residuals
        dout, dlse = cotangents
        dout = jax.numpy.zeros(out.shape, out.dtype) if isinstance(dout, SymbolicZero) else dout
        dlse = None if isinstance(dlse, SymbolicZero) else dlse
        found = jax.pure_callback(
            lambda *arrays: gradient_on_host(tuple(wanted), *arrays),
            _like(learned[name] for name in wanted),
            *(learned, others, out, lse, dout, dlse),
            vmap_method="sequential",
        )
        grads: dict[str, Any] = dict.fromkeys(learned) | dict(zip(wanted, found, strict=True))
        return grads, None

    attend.defvjp(forward, backward, symbolic_zeros=True)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((learned, traced))):
        both = attend(learned, traced)
    else:  # nothing to compile
        both = jax.tree.map(jax.numpy.asarray, on_host(learned, traced))
    return both if with_lse else both[0]
