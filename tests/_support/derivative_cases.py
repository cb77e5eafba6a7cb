"""What tests of derivatives of attention have in common."""

import numpy as np
from flash_cases import BF16, F16, F32, F64

import attnmask

TOLERANCE = {F64: 1e-9, F32: 1e-4, F16: 1e-2, BF16: 6e-2}  # of the largest number
LENGTHS = ((0, 3), (3, 0), (1, 1), (1, 70), (63, 65), (64, 64), (65, 63), (130, 130), (300, 129))
TERMS = ("causal", "window", "cap", "bias", "sinks", "dropout", "slopes")
INPUTS = ("query", "key", "value")


def drawn(rng, dtype, queries=70, keys=65, heads=(4, 2), depths=(24, 17), batch=2):
    def array(*shape):
        return rng.standard_normal(shape).astype(dtype)

    return {
        "query": array(batch, queries, heads[0], depths[0]),
        "key": array(batch, keys, heads[1], depths[0]),
        "value": array(batch, keys, heads[1], depths[1]),
    }


def terms(rng, names, dtype, batch, heads, queries, keys):
    """The arguments of some terms, and those that the reference takes in their place."""
    given, right = {}, {}
    if "causal" in names:
        given |= {"causal": True, "causal_offset": 1}
    if "window" in names:
        given |= {"sliding_window": (9, 5), "causal_offset": 1}
    right |= given
    if "cap" in names:
        given["logits_soft_cap"] = right["logits_soft_cap"] = 1.5
    if "bias" in names:
        given["bias"] = rng.standard_normal((batch, 1, queries, keys)).astype(dtype)
        given["bias"][..., ::7] = -np.inf
    bias = given.get("bias", np.zeros(())).astype(np.float64)
    if "slopes" in names:
        given["alibi_slopes"] = np.linspace(0.01, 0.1, heads)
        distance = abs(np.arange(keys) - np.arange(queries)[:, None] - given.get("causal_offset", 0))
        bias = bias - given["alibi_slopes"][:, None, None] * distance
    if bias.ndim:
        right["bias"] = bias
    if "sinks" in names:
        given["softmax_aux"] = right["softmax_aux"] = rng.standard_normal((heads, 2))
    if "dropout" in names:
        given |= {"dropout_prob": 0.3, "dropout_seed": 4}
        keep = attnmask.dropout_keep_mask(4, 0.3, (batch, heads, queries, keys))
        right |= {"dropout_prob": 0.3, "keep": keep}
    return given, right


def tangents_of(arrays):
    return {f"{name}_tangent": x for name, x in arrays.items()}


def near(got, exact, dtype):
    np.testing.assert_allclose(
        got.astype(np.float64), exact, rtol=0, atol=TOLERANCE[dtype] * max(1, abs(exact).max(initial=0))
    )
