"""Types that several modules use."""

from typing import NamedTuple, TypeAlias

import jax
from numpy.typing import DTypeLike

from attnmask._common.arguments import fields_in_a_line
from attnmask._common.types import Array

AnyArray: TypeAlias = Array | jax.Array
ByName: TypeAlias = dict[str, jax.Array]
Results: TypeAlias = tuple[jax.Array, ...]
AnyByName: TypeAlias = dict[str, AnyArray]
Shaped: TypeAlias = tuple[tuple[int, ...], DTypeLike]  # the shape and type of a result


class KVCacheResult(NamedTuple):
    """The result of `flash_attention_with_kvcache`, and the updated caches.

    Parameters
    ----------
    out : array, shape [B, Tq, H, Dv] or [total, H, Dv]
        The result.
    lse : array, shape [B, H, Tq] or [H, total], or None
        None without `return_lse`.
    k_cache, v_cache : array
        The caches with the new tokens.
    k_scale, v_scale : array or None
        Their scales; None for caches that have none.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import attnmask.jax
    >>> x, cache = jnp.ones((1, 1, 1, 8)), jnp.zeros((1, 4, 1, 8))
    >>> result = attnmask.jax.flash_attention_with_kvcache(x, cache, cache, x, x, cache_seqlens=2)
    >>> result.k_cache[0, :, 0, 0].tolist(), result.lse
    ([0.0, 0.0, 1.0, 0.0], None)
    """

    out: jax.Array
    lse: jax.Array | None
    k_cache: jax.Array
    v_cache: jax.Array
    k_scale: jax.Array | None
    v_scale: jax.Array | None

    def __repr__(self) -> str:
        return fields_in_a_line(self)
