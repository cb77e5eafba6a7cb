"""Terms of the logits by distance and by point, and the gradients of tables of them."""

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


def points(queries, keys, offsets, shape) -> np.ndarray:
    """Where a table [2h-1, 2w-1] of a grid has the number of each pair, [B, Tq, Tk]."""
    height, width = ((length + 1) // 2 for length in shape)
    query = np.arange(queries)[:, None] + np.asarray(offsets)[:, None, None]
    key = np.arange(keys)
    rows = key // width - query // width + height - 1
    return rows * (2 * width - 1) + key % width - query % width + width - 1


def grid_terms(table, places) -> np.ndarray:
    """What a table of each head, [H, 2h-1, 2w-1], adds to the logits, [B, H, Tq, Tk]."""
    return np.moveaxis(table.reshape(len(table), -1)[:, places], 0, 1)


def grid_gradient(dterms, places, shape) -> np.ndarray:
    """Sums of the terms' gradients [B, H, Tq, Tk] over pairs of one place."""
    sums = np.zeros((shape[0], shape[1] * shape[2]))
    for row, of_row in zip(dterms, places, strict=True):
        for head, of_head in enumerate(row):
            np.add.at(sums[head], of_row, of_head)
    return sums.reshape(shape)
