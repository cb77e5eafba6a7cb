"""Calls of ring attention that workers of PyTorch and JAX compare with calls of one process."""

import numpy as np

from attnmask import MaskInfo

SINKS = np.array([[0.5], [-1.0], [2.0], [0.0]], np.float32)  # of four heads
LEARNED = ("softmax_aux", "relative_bias")


def sizes(dtype: str) -> tuple[float, float]:
    """How far results and gradients may be apart: as far as rounding of parts goes."""
    return {"float64": (1e-11, 1e-10), "float32": (2e-6, 2e-5)}.get(dtype, (2e-2, 6e-2))


def ring_cases(length: int, packed: np.ndarray) -> list[dict]:
    """Arguments of attention of 150 tokens or so, or of five packed sequences, with four heads of queries.

    `dtype`, `batch` and `heads` are those of the arrays: float32, 1 and (4, 2) unless said.
    """
    alone = MaskInfo.from_segments(np.zeros((1, length), int))
    segments = MaskInfo.from_segments(np.repeat([0, 1, -1, 2], [60, 30, 10, length - 100])[None])
    grid = MaskInfo.neighborhood((-(-length // 10), 10), (5, 3))
    dense = MaskInfo.from_random(1, length, sparsity=0.7, seed=3)
    slopes = np.arange(20.0).reshape(5, 4) / 9
    relative = {"relative_bias": np.linspace(-1, 1, 84, dtype=np.float32).reshape(4, 21), "relative_low": -20}
    return [
        {},
        {"causal": True},
        {"causal": True, "dtype": "float64", "softmax_scale": 0.3},
        {"causal": True, "dtype": "bfloat16"},
        {"causal": True, "dtype": "float16", "batch": 2},
        {"causal": True, "batch": 3},
        {"causal": True, "cu_seqlens": packed},
        {"cu_seqlens": packed, "sliding_window": (7, 20), "softmax_aux": SINKS},
        {"sliding_window": (30, 0), "batch": 2},
        {"sliding_window": (None, 3), "heads": (4, 1)},
        {"causal": True, "softmax_aux": SINKS, "heads": (4, 4)},
        {"cu_seqlens": packed, "causal": True, "softmax_aux": np.array([[0.1, -np.inf]], np.float32)},
        {"causal": True, "logits_soft_cap": 3.0},
        {"causal": True, "alibi_slopes": slopes[0]},
        {"causal": True, "batch": 2, "alibi_slopes": slopes[:2]},
        {"causal": True, "cu_seqlens": packed, "alibi_slopes": slopes, **relative},
        {"causal": True, **relative},
        {"causal": True, "q_segment_ids": np.repeat([0, 1, -1], [50, 50, length - 100])[None]},
        {"attention_mask": segments},
        {"attention_mask": dense},
        {"attention_mask": alone.apply_chunked(32)},
        {"attention_mask": grid[..., :length, :length]},
        {"attention_mask": alone.apply_sliding_window(np.array([5, 9, 70, 1]))},
        {"attention_mask": dense, "causal": True, "batch": 2, "alibi_slopes": slopes[:2]},
        {"attention_mask": segments, "cu_seqlens": packed, "sliding_window": 9},
        {"attention_mask": dense, "cu_seqlens": packed, "alibi_slopes": slopes},
        {"dropout_prob": 0.3, "dropout_seed": 5, "causal": True, "batch": 2},
        {"dropout_prob": 0.3, "cu_seqlens": packed, "sliding_window": 20},
        {"dropout_prob": 0.3, "attention_mask": dense, "dtype": "bfloat16"},
    ]
