"""Terms of the logits by distance, and the gradient of a table of them."""

import numpy as np


def distances(queries, keys, offsets) -> np.ndarray:
    """Of each pair, [B, Tq, Tk]."""
    return np.arange(keys) - np.arange(queries)[:, None] - np.asarray(offsets)[:, None, None]


def dense_terms(distance, slopes=None, table=None, low=0) -> np.ndarray:
    """What is added to the logits, [B, H, Tq, Tk]."""
    heads = table.shape[0] if slopes is None else slopes.shape[-1]
    terms = np.zeros((len(distance), heads, *distance.shape[1:]))
    if slopes is not None:
        terms -= np.broadcast_to(slopes, (len(distance), heads))[:, :, None, None] * np.abs(distance)[:, None]
    if table is not None:
        terms += np.moveaxis(table[:, np.clip(distance - low, 0, table.shape[1] - 1)], 0, 1)
    return terms


def table_gradient(dterms, distance, shape, low) -> np.ndarray:
    """Sums of the terms' gradients [B, H, Tq, Tk] over pairs of one distance."""
    sums = np.zeros(shape)
    place = np.clip(distance - low, 0, shape[1] - 1)
    for row, of_row in zip(dterms, place, strict=True):
        for head, of_head in enumerate(row):
            np.add.at(sums[head], of_row, of_head)
    return sums
