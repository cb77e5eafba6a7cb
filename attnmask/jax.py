"""`MaskInfo` for JAX: to import this module is to register it as a pytree.

From then on a mask may stand wherever JAX takes a tree: `jax.tree.map` reaches its arrays, and functions under
``jax.jit`` take and return it. Its arrays are the leaves, and everything else (shape, terms, flags, names of axes) is
static: a function is compiled once for all masks that differ in the contents of their arrays only.

Under ``jax.jit`` the arrays are tracers, and the core, which is no part of JAX, cannot look into them. So a mask that
came in as an argument goes on as it is, or in parts by `tree_flatten`; whatever reads it, its shape or a term more
included, raises ``TracerArrayConversionError``. Read it before, close over it, or read it in a ``jax.pure_callback``.
As any array, one of 64 bits loses half of them on its way through ``jax.jit`` unless ``jax_enable_x64`` is set; only
the numbers of batch rows (offsets, lengths) and dense masks may have as many.

Examples
--------
>>> import jax
>>> import attnmask.jax
>>> info = attnmask.MaskInfo.from_segments([[0, 0, 1]]).apply_causal()
>>> [leaf.shape for leaf in jax.tree.leaves(info)]
[(1, 3), (1, 3)]
>>> jax.jit(lambda mask: mask)(info) == info
True
>>> pairs = jax.ShapeDtypeStruct((1, 1, 3, 3), bool)
>>> live = jax.jit(lambda mask: jax.pure_callback(lambda mask: mask.attention_mask, pairs, mask).sum())
>>> int(live(info))
4
"""

try:
    from jax.tree_util import register_pytree_node_class  # type: ignore[import-not-found, unused-ignore]
except ImportError as error:
    raise ImportError("attnmask.jax needs JAX, which is not installed: pip install jax") from error

from attnmask.mask_info import MaskInfo

__all__: list[str] = []

register_pytree_node_class(MaskInfo)
