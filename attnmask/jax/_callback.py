"""Attention as a JAX callback into Python, for runtimes that refuse the handlers of `attnmask.jax._call`."""

from collections.abc import Iterable, Sequence

import jax
from numpy.typing import ArrayLike

from attnmask._attention.arguments import LEARNED
from attnmask._attention.flash_attention import flash_attention_bwd, flash_attention_fwd
from attnmask._attention.forward import attend_for_gradients
from attnmask._common.arguments import as_array, wide_dtype
from attnmask._common.types import AnyFunction, Arguments, Array
from attnmask._masks.info import MaskInfo
from attnmask.jax._call import alike, struct_like
from attnmask.jax._types import ByName, Shaped


def on_host(arguments: Arguments) -> Arguments:
    """Return JAX arguments as `attnmask.flash_attention` takes them."""
    arrays: Arguments = {
        name: x if isinstance(x, MaskInfo) else as_array(x, name) for name, x in arguments.items()
    }
    if "dropout_seed" in arrays:
        arrays["dropout_seed"] = int(arrays["dropout_seed"])
    return arrays


def _call(compute: AnyFunction, shapes: Iterable[Shaped], *arguments: object) -> tuple[jax.Array, ...]:
    leaves, structure = jax.tree.flatten(arguments)
    leaves = alike([jax.numpy.asarray(leaf) for leaf in leaves])
    results = tuple(struct_like(shape, dtype, leaves[0]) for shape, dtype in shapes)
    arguments = jax.tree.unflatten(structure, leaves)
    return tuple(jax.pure_callback(compute, results, *arguments, vmap_method="sequential"))


def forward(static: Arguments, learned: ByName, others: Arguments, results: int) -> tuple[jax.Array, ...]:
    """Return what `_call.forward` returns, given all arguments by name."""

    def compute(learned: Arguments, others: Arguments) -> tuple[Array, ...]:
        given = on_host(learned | others) | static
        return attend_for_gradients(given) if results == 3 else flash_attention_fwd(**given)[:results]

    query, value = learned["query"], learned["value"]
    batch, queries, heads, _ = query.shape
    wide = wide_dtype(query.dtype)
    row = batch, queries, heads, value.shape[3]
    shapes = [(row, query.dtype), ((batch, heads, queries), wide), (row, wide)]
    return _call(compute, shapes[:results], learned, others)


def backward(
    static: Arguments,
    learned: ByName,
    others: Arguments,
    wanted: Sequence[str],
    of_result: Sequence[jax.Array],
) -> tuple[jax.Array, ...]:
    """Return what `_call.backward` returns, given all arguments by name."""

    def compute(learned: Arguments, others: Arguments, *of_result: ArrayLike) -> tuple[Array, ...]:
        names = ("dout", "out", "lse", "dlse")
        dout, out, lse, *dlse = (as_array(x, name) for x, name in zip(of_result, names, strict=False))
        extras = {f"grad_{name}": name in wanted for name in LEARNED[3:]}
        arguments = on_host(learned | others) | static | extras
        grads = flash_attention_bwd(dout, out=out, lse=lse, dlse=dlse[0] if dlse else None, **arguments)
        return tuple(getattr(grads, name) for name in wanted)

    shapes = [(learned[name].shape, learned[name].dtype) for name in wanted]
    return _call(compute, shapes, learned, others, *of_result)
