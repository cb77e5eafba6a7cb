"""Write keys and values to given places of a cache."""

from __future__ import annotations

from typing import Never

from numpy.typing import ArrayLike

from attnmask._cache.quantize import check_written, rotated, rotated_tokens
from attnmask._common.arguments import as_array, flag, integer_array, suit_hint
from attnmask._common.graphs import left_to_python
from attnmask._common.keywords import hides, refuse
from attnmask._common.loading import _core
from attnmask._common.types import Array


@hides("unknown")
def write_kvcache(
    k_cache: Array,
    v_cache: Array,
    key: ArrayLike,
    value: ArrayLike | None,
    slot_mapping: ArrayLike,
    *,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    rotate: bool = False,
    **unknown: Never,
) -> None:
    """Write keys and values to the slots of a cache, one per token, as vLLM's ``reshape_and_cache`` does.

    ::

        pages of 4 tokens      page 0   0  1  2  3      slot = page * 4 + position in the page
                               page 1   4  5  6  7
                               page 2   8  9 10 11      slot_mapping [10, -1, 3]: token 1 is left out

    Use it where a scheduler has chosen the slots. Then attend with `flash_attention_with_kvcache`, without `key`, and
    with `cache_seqlens` that count the new tokens. If new tokens go behind those of their sequences, that function
    writes them itself.

    Parameters
    ----------
    k_cache : ndarray, shape [pages, page_size, Hkv, D] or [B, Tmax, Hkv, D]
        As in `flash_attention_with_kvcache`. In a contiguous cache, token t of row b is slot ``b * Tmax + t``.
    v_cache : ndarray, shape [pages, page_size, Hkv, Dv] or [B, Tmax, Hkv, Dv]
        As in `flash_attention_with_kvcache`.
    key : array_like, shape [total, Hkv, D]
        Written in the type of the cache. Nothing is written if any argument is wrong.
    value : array_like, shape [total, Hkv, Dv], or None
        None in a latent cache, since `key` has the values.
    slot_mapping : array_like of integers, shape [total]
        The slot of each token, or -1 to leave it out. No slot may occur twice. One that the cache does not have is an
        IndexError.
    k_scale, v_scale : ndarray, optional
        As in `flash_attention_with_kvcache`: the scales of the new tokens are written, or those of channels are used.
    rotate : bool
        As in `flash_attention_with_kvcache`.

    See Also
    --------
    flash_attention_with_kvcache : append to sequences and attend.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> k_cache, v_cache = np.zeros((2, 3, 4, 1, 1))
    >>> tokens = np.array([1.0, 2.0, 3.0]).reshape(3, 1, 1)
    >>> attnmask.write_kvcache(k_cache, v_cache, tokens, 10 * tokens, [10, -1, 3])
    >>> v_cache.reshape(3, 4)
    array([[ 0.,  0.,  0., 30.],
           [ 0.,  0.,  0.,  0.],
           [ 0.,  0., 10.,  0.]])
    """
    if unknown:
        refuse(write_kvcache, unknown)
    try:
        slots = integer_array(slot_mapping, "slot_mapping")
        if flag(rotate, "rotate"):
            key, value = as_array(key, "key"), None if value is None else as_array(value, "value")
            written = {"k_cache": k_cache, "v_cache": v_cache, "k_scale": k_scale, "v_scale": v_scale}
            check_written(written | {"key": key, "value": value})
            key, value = rotated_tokens(key, value, rotated)
        _core.write_kvcache(k_cache, v_cache, key, value, k_scale, v_scale, slots)
    except (TypeError, ValueError) as error:
        suit_hint(error, {"k_cache": k_cache, "v_cache": v_cache, "key": key})
        raise


left_to_python(write_kvcache, "call attnmask.torch.write_kvcache, which goes into graphs")
