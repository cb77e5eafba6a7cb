"""Arguments of attention that must be refused by name, valid ones to combine them with, and the errors they raise."""

import math

import numpy as np
from flash_cases import BF16, F16, F32, F64

from attnmask import MaskInfo

B, TQ, TK, H, HKV, D, DV = 2, 6, 7, 4, 2, 8, 5


def zeros(*shape, dtype=F32) -> np.ndarray:
    return np.zeros(shape, dtype)


GOOD = {"query": zeros(B, TQ, H, D), "key": zeros(B, TK, HKV, D), "value": zeros(B, TK, HKV, DV)}
SEGMENTS = {"q_segment_ids": np.zeros((B, TQ), int), "kv_segment_ids": np.zeros((B, TK), int)}
PACKED = {
    "query": zeros(1, TQ, H, D),
    "key": zeros(1, TK, HKV, D),
    "value": zeros(1, TK, HKV, DV),
    "cum_seqlens_q": np.array([0, 2, TQ]),
    "cum_seqlens_k": np.array([0, 3, TK]),
}
INFO = MaskInfo.from_segments

# For each argument others to combine it with, and values that do not fit these. What fits no call is in
# test_every_function.py.
BAD: dict[str, tuple[dict, list]] = {
    "query": (GOOD, [
        zeros(TQ, H, D), np.float32(1), zeros(B, TQ, 3, D), zeros(B, TQ, 1, D), zeros(B, TQ, H, D, dtype=np.int32),
        zeros(1, TQ, H, D), None,
    ]),
    "key": (GOOD, [
        zeros(B, TK, HKV, D, dtype=F64), zeros(B, TK, HKV, D - 1), zeros(B, TK, 3, D), zeros(B, TK, 8, D),
        zeros(1, TK, HKV, D), zeros(B, TK + 1, HKV, D),
    ]),
    "value": (GOOD, [
        zeros(B, TK, HKV, DV, dtype=F16), zeros(B, TK, HKV, DV, dtype=BF16), zeros(B, TK, HKV + 2, DV),
        zeros(1, TK, HKV, DV),
    ]),
    "attention_mask": (GOOD, [
        np.ones((TQ, TK), complex), np.ones((B, 3, TQ, TK)), np.ones((B, TQ, TK)), np.ones((0, TK)),
        INFO(np.zeros((B, TQ + 1), int), np.zeros((B, TK), int)),
        INFO(np.zeros((B, TQ), int), np.zeros((B, TK - 1), int)),
        INFO(np.zeros((B + 1, TQ), int), np.zeros((B + 1, TK), int)),
        INFO(np.zeros((B, 3, TQ), int), np.zeros((B, 3, TK), int)),
    ]),
    "bias": (GOOD, [np.zeros((TQ, TK), int), np.zeros((TQ, TK), bool), zeros(TQ, TK + 1), zeros(3, TQ, TK)]),
    "softmax_scale": (GOOD, ["x", math.nan, 1e39, -1e39, 10**400]),
    "softmax_aux": (GOOD, [np.zeros(2, complex), zeros(H + 1, 2), zeros(2, 2), zeros(1, H, 2), np.float32(1)]),
    "cum_seqlens_q": (PACKED, [[0, 2, 5], [0, 2, 7], [0, TQ], [0, 1, 2, TQ], [0, 5, 2, TQ]]),
    "cum_seqlens_k": (PACKED, [[0.0, 3.0, 7.0], [1, 3, TK], [0, 3, 6], [0, 3, 8], [0, 9, TK], [0, TK], []]),
    "q_segment_ids": (GOOD | SEGMENTS, [np.zeros((B, TQ)), np.zeros((B, TQ + 1), int), np.zeros(TQ + 1, int), 0]),
    "kv_segment_ids": (GOOD | SEGMENTS, [np.zeros((B, TK)), np.zeros((B, TK - 1), int), np.zeros(TK + 1, int), 0]),
}  # fmt: skip

# Arguments of which one is wrong, and the message: what was expected, and what was given rather than what it was
# converted to.
MESSAGES = [
    (GOOD, "key", zeros(B, TK, HKV, D, dtype=F64), r"key must be float32 as query, got float64 array"),
    (GOOD, "attention_mask", np.ones((B, TK)), r"attention_mask must .*; write attention_mask\[:, None, None, :\]$"),
    (GOOD, "sliding_window", -(10**5000), "sliding_window must be at least 0, got an integer of 16610 bits"),
    (GOOD, "causal", 10**5000, "causal must be True or False, got an integer of 16610 bits"),
    (GOOD, "causal_offset", 10**5000, "causal_offset must be at most .*, got an integer of 16610 bits"),
    (PACKED, "causal_offset", [0.5, 1], "causal_offset must be an integer or one per sequence, got float64"),
    (GOOD | {"cum_seqlens_k": [0, 3, TK]}, "cum_seqlens_q", [0, 2, TQ], r"\b(query|cum_seqlens_q)\b"),
]  # fmt: skip
