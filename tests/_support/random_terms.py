"""Random terms of the logits, and other arguments that change weights, for a call and for dense attention."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import reference_flash as ref
import reference_terms
from random_masks import Rng, Shape, any_of

import attnmask

Arguments = dict[str, Any]


def distances_of(shape: Shape, limits: Arguments) -> np.ndarray:
    """Return how far each key lies ahead of its query's diagonal, [B, Tq, Tk]; if packed, within its sequence."""
    batch, _, queries, keys = shape
    offset = limits.get("causal_offset", 0)
    if "cum_seqlens_q" not in limits:
        offsets = [ref.offset_of(offset, row, queries, keys) for row in range(batch)]
        return reference_terms.distances(queries, keys, offsets)
    at_query, at_key = np.zeros(queries, int), np.zeros(keys, int)
    for index, ((q, q_end), (k, k_end)) in enumerate(
        zip(pairwise(limits["cum_seqlens_q"]), pairwise(limits["cum_seqlens_k"]), strict=True)
    ):
        at_query[q:q_end] = np.arange(q_end - q) + ref.offset_of(offset, index, q_end - q, k_end - k)
        at_key[k:k_end] = np.arange(k_end - k)
    return (at_key - at_query[:, None])[None]


def dense_bias(given: Arguments, shape: Shape, distances: np.ndarray) -> np.ndarray:
    """Return what terms by distance add to the logits."""
    dense = np.zeros(shape)
    if "alibi_slopes" in given:
        dense += reference_terms.dense_terms(distances, slopes=given["alibi_slopes"])
    if "relative_bias" in given:
        table, low = given["relative_bias"], given["relative_low"]
        dense += reference_terms.dense_terms(distances, table=table, low=low)
    return dense


def drawn(
    rng: Rng, shape: Shape, distances: np.ndarray, without: Sequence[str] = ()
) -> tuple[Arguments, Arguments]:
    """Draw arguments of a call, and return them with those of dense attention. Many calls have none."""
    heads, given = shape[1], {}
    if rng.random() < 0.4:
        return {}, {}
    draw = {
        "softmax_scale": lambda: any_of(rng, (0.05, -0.2, 0.3)),
        "logits_soft_cap": lambda: any_of(rng, (0.7, 5.0)),
        "softmax_aux": lambda: rng.standard_normal((heads, int(rng.integers(1, 4)))),
        "dropout_prob": lambda: any_of(rng, (0.1, 0.6)),
        "alibi_slopes": lambda: rng.random(heads).astype(np.float32),
        "relative_bias": lambda: rng.standard_normal((heads, int(rng.integers(1, 40)))),
    }
    for name in draw:
        if rng.random() < 0.25 and name not in without:
            given[name] = draw[name]()
    known = ("softmax_scale", "logits_soft_cap", "softmax_aux", "dropout_prob")
    dense = {name: given[name] for name in known if name in given}
    if "dropout_prob" in given:
        given["dropout_seed"] = int(rng.integers(1000))
        dense["keep"] = attnmask.dropout_keep_mask(given["dropout_seed"], given["dropout_prob"], shape)
    if "relative_bias" in given:
        given["relative_low"] = int(rng.integers(-30, 20))
    if "alibi_slopes" in given or "relative_bias" in given:
        dense["bias"] = dense_bias(given, shape, distances)
    return given, dense
