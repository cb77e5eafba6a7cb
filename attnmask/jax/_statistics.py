"""Statistics of the weights of attention to a cache, for JAX. Compiled functions call back to NumPy."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from attnmask._attention.weights import AttentionStatistics, Statistic, asked
from attnmask._cache.flash_attention_with_kvcache import attention_statistics_with_kvcache as in_numpy
from attnmask._common.arguments import as_array, describe, wide_dtype
from attnmask._common.types import Arguments, Array
from attnmask._masks.info import MaskInfo
from attnmask.jax._arguments import is_traced
from attnmask.jax._gradients import without_derivatives
from attnmask.jax._types import ByName, Results

_NAME = "attention_statistics_with_kvcache"


def attention_statistics_with_kvcache(
    query: jax.Array, k_cache: jax.Array, *, of: Statistic | Sequence[Statistic], **more: Any
) -> AttentionStatistics:
    """Apply `attnmask.attention_statistics_with_kvcache` in JAX: under ``jit`` and ``vmap``, on the CPU.

    It has no gradients: they are errors, but only where something asks for them. Compiled functions call back to NumPy.

    Parameters
    ----------
    query, k_cache : array
    of : str, tuple, or sequence of these
    **more
        The other arguments of `attnmask.attention_statistics_with_kvcache` by name; all mean the same. A traced
        `MaskInfo` is not taken.

    Returns
    -------
    AttentionStatistics
        Its fields are arrays. The last axis of `key_sum` is as long as the cache's capacity for a sequence.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import attnmask.jax
    >>> query, k_cache = jnp.zeros((2, 1, 1, 8)), jnp.zeros((2, 4, 1, 8))  # all keys weigh the same
    >>> look = attnmask.jax.attention_statistics_with_kvcache
    >>> look(query, k_cache, of="key_sum", cache_seqlens=[2, 4]).key_sum.tolist()
    [[[0.5, 0.5, 0.0, 0.0]], [[0.25, 0.25, 0.25, 0.25]]]
    """
    given: Arguments = {"heads": "query", "query": query, "k_cache": k_cache, "of": of, **more}
    mask = given.get("attention_mask")
    if isinstance(mask, MaskInfo) and is_traced(mask):
        raise ValueError(f"attention_mask must be an array, or known at compile time, got {describe(mask)}")
    arrays = {name: x for name, x in given.items() if isinstance(x, jax.Array)}
    static = {name: x for name, x in given.items() if name not in arrays}
    shapes = _shapes(given)

    def compute(arrays: ByName) -> Results:
        found: Results = tuple(
            jax.pure_callback(
                lambda arrays: _found(arrays, static, shapes),
                tuple(shapes.values()),
                arrays,
                vmap_method="sequential",
            )
        )
        return found

    if any(map(is_traced, arrays.values())):
        found: Any = without_derivatives(_NAME, compute)(arrays)
    else:
        found = map(jax.numpy.asarray, _found(arrays, static, shapes))
    told = dict(zip(shapes, found, strict=True))
    return AttentionStatistics(**told)


def _found(arrays: ByName, static: Arguments, shapes: dict[str, jax.ShapeDtypeStruct]) -> tuple[Array, ...]:
    """Return the results of these shapes."""
    given: Arguments = static | {name: as_array(x, name) for name, x in arrays.items()}
    found = in_numpy(**given)._asdict()
    if "key_sum" in shapes:
        room = shapes["key_sum"].shape[-1] - found["key_sum"].shape[-1]
        found["key_sum"] = np.pad(found["key_sum"], [(0, 0), (0, 0), (0, room)])
    return tuple(found[name].astype(x.dtype) for name, x in shapes.items())


def _shapes(given: Arguments) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and types of the results that are asked for; NumPy complains about what does not fit."""
    names, top, by_key_head = asked(given)
    names += ("top_weights",) * ("top_keys" in names)
    query, k_cache = (np.shape(given[name]) for name in ("query", "k_cache"))
    starts, table = given.get("cu_seqlens_q"), given.get("block_table")
    for name, shape, axes in (("query", query, 4 if starts is None else 3), ("k_cache", k_cache, 4)):
        if len(shape) != axes:
            raise ValueError(f"{name} must have {axes} axes, got {describe(given[name])}")
    batch, rows = query[0], (*query[:-3], query[-2], query[-3])
    if starts is not None:
        batch = len(starts) - 1
    room = k_cache[1] * (1 if table is None else np.shape(table)[-1])
    wide = wide_dtype(jax.numpy.result_type(given["query"]))
    shapes = {
        "key_sum": ((batch, k_cache[2] if by_key_head else query[-2], room), wide),
        "entropy": (rows, wide),
        "max_logit": (rows, wide),
        "top_keys": ((*rows, top), jax.dtypes.canonicalize_dtype(int)),
        "top_weights": ((*rows, top), wide),
    }
    return {name: jax.ShapeDtypeStruct(*shapes[name]) for name in shapes if name in names}
