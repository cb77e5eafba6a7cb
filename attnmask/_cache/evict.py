"""Which tokens of a sequence are kept, where they move to, and what cannot be asked of such sequences any more.

Tokens keep their order. A page moves as a whole, by its place in the table, if all heads and layers keep it as it is;
the rows of others are copied::

    page_size 4         keep 0 1 6 8 9 10 11        keep 4 5 6 7 9

    p0 [0 1 2 3]        p3 [0 1 6 8]                p1 [4 5 6 7]
    p1 [4 5 6 7]        p4 [9 10 11]                p3 [9]
    p2 [8 9 10 11]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from attnmask._common.arguments import describe, integer_array
from attnmask._common.types import Arguments, Array

Kept = NDArray[np.int64]  # [layers, kv_heads, n]


def kept_tokens(keep: object, layers: int, heads: int, length: int) -> Kept:
    """Return the tokens to keep of each layer and head, in rising order."""
    array = integer_array(keep, "keep")
    shape = layers, heads
    if array.ndim not in (1, 2, 3) or array.shape[:-1] != shape[3 - array.ndim :]:
        raise ValueError(
            f"keep must be [n], [kv_heads, n] or [layers, kv_heads, n], with {heads} kv_heads and {layers} layers, "
            f"got {describe(array)}"
        )
    kept = np.sort(array, axis=-1)  # a copy, which nobody else writes to
    outside = kept[(kept < 0) | (kept >= length)]
    if outside.size:
        raise ValueError(
            f"keep must be at least 0 and below {length}, the sequence's tokens, got {outside[0]}"
        )
    twice = kept[..., 1:][kept[..., 1:] == kept[..., :-1]]
    if twice.size:
        raise ValueError(f"keep must name each token once, got {twice[0]} twice")
    return np.broadcast_to(kept.astype(np.int64), (*shape, kept.shape[-1]))


def staying(kept: Kept, page_size: int) -> NDArray[np.int64]:
    """Return, for each page of the kept tokens, which of the sequence's pages begins with the same rows, or -1."""
    first = kept[..., ::page_size]
    last = kept[..., [*range(page_size - 1, kept.shape[-1], page_size), -1][: first.shape[-1]]]
    begin = first[0, 0]
    rows = np.minimum(kept.shape[-1] - np.arange(len(begin)) * page_size, page_size)
    same = ((first == begin) & (last == begin + rows - 1)).all(axis=(0, 1)) & (begin % page_size == 0)
    return np.where(same, begin // page_size, -1)


def move(held: Sequence[Array], kept: Kept, before: Array, after: Array, moved: NDArray[np.bool_]) -> None:
    """Copy the rows of `moved` pages of the table `after` from the pages of the table `before`.

    Rows of a layer are read before any is written, so that pages may be the same, and memory is found before that.
    """
    layers, pages, page_size, heads = held[0].shape[:4]
    rows = np.flatnonzero(np.repeat(moved, page_size)[: kept.shape[-1]])
    targets = after[rows // page_size] * page_size + rows % page_size
    arrays = [of_layers.reshape(layers, pages * page_size, heads, -1) for of_layers in held]
    buffers = [np.empty((len(rows), *by_token.shape[2:]), by_token.dtype) for by_token in arrays]
    for by_token, read in zip(arrays, buffers, strict=True):
        for layer, tokens in zip(by_token, kept[..., rows], strict=True):
            sources = before[tokens // page_size] * page_size + tokens % page_size
            by_head = layer.reshape(pages * page_size * heads, -1)
            np.take(by_head, sources.T * heads + np.arange(heads), axis=0, out=read, mode="clip")
            layer[targets] = read


def check_no_distances(given: Arguments) -> None:
    """Refuse what depends on distances between queries and keys."""
    window = given.get("sliding_window")
    left = window[0] if isinstance(window, (tuple, list)) and window else window
    asked = given | {"sliding_window": left}
    for name in ("sliding_window", "attention_chunk", "alibi_slopes", "relative_bias", "grid_bias"):
        if asked.get(name) is not None:
            raise ValueError(
                f"{name} must be None after tokens of a sequence were evicted, as distances to the kept ones are not "
                "known; attention_mask and bias have a number for each token that is kept"
            )
