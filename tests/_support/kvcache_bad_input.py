"""Arguments of attention over caches that must be refused, right ones to combine them with, and what errors say."""

import math

import numpy as np
from flash_cases import F16, F32, F64
from layouts import arrange

from attnmask import MaskInfo

B, TQ, H, HKV, D, DV = 2, 3, 4, 2, 8, 5
KINDS = ("rows", "paged", "packed", "packed, paged")  # of calls; or "int8", "int4": over pages of these


def zeros(*shape, dtype=F32) -> np.ndarray:
    return np.zeros(shape, dtype)


def good(kind: str, new: bool = True) -> dict:
    """Arguments that are right, in which everything that could be written is 7 or 77."""
    if kind in ("int8", "int4"):
        return good_of_integers(kind, new)
    packed, paged = "packed" in kind, "paged" in kind
    tokens = (B * TQ,) if packed else (B, TQ)
    arguments = {"query": zeros(*tokens, H, D), "out": np.full((*tokens, H, DV), 77, F32)}
    for name, depth in (("k_cache", D), ("v_cache", DV)):
        arguments[name] = np.full((6, 4, HKV, depth) if paged else (B, 12, HKV, depth), 7, F32)
    if new:
        arguments |= {"key": zeros(*tokens, HKV, D), "value": zeros(*tokens, HKV, DV)}
    arguments["cache_seqlens"] = np.array([4, 8], np.int32)
    if paged:
        arguments["block_table"] = np.array([[5, 1, -1], [0, 4, 2]], np.int32)
    if packed:
        arguments["cu_seqlens_q"] = np.array([0, 2, B * TQ], np.int32)
    return arguments


def good_of_integers(kind: str, new: bool) -> dict:
    depth, dtype, scales = (8, np.int8, (1,)) if kind == "int8" else (64, np.uint8, (2, 2))
    arguments = {"query": zeros(1, 1, H, depth), "out": np.full((1, 1, H, depth), 77, F32)}
    for side in "kv":
        arguments[f"{side}_cache"] = zeros(3, 4, HKV, 8 if kind == "int8" else 32, dtype=dtype)
        arguments[f"{side}_scale"] = np.ones((3, 4, HKV, *scales), F32)
    x = np.arange(HKV * depth, dtype=F32).reshape(1, 1, HKV, depth)
    arguments |= {"key": x, "value": x} if new else {}
    return arguments | {"cache_seqlens": [3], "block_table": [[1]]}


def table(*rows, dtype=np.int32) -> np.ndarray:
    return np.array(rows, dtype)


def read_only(*shape, dtype=F32) -> np.ndarray:
    array = zeros(*shape, dtype=dtype)
    array.flags.writeable = False
    return array


def ones(*shape, last=1.0) -> np.ndarray:
    """But for one number, that is neither the first nor the last."""
    array = np.ones(shape, F32)
    if last != 1:
        array[..., -1, -4] = last
    return array


NUMBERS = (1, np.int32(1), np.uint8(1), np.array(1, np.int16), 2**63)  # given for a table

# The kind of call, what is wrong in it, the error, and what it says.
BAD = [
    # Queries
    ("rows", {"query": zeros(B, TQ, H, D).tolist()}, TypeError, "query must be .*bfloat16 with a cache"),
    ("rows", {"query": [[1.0], [1.0, 2.0]]}, ValueError, "query must be array_like"),
    ("rows", {"query": zeros(B, TQ, H, D, dtype=F64)}, TypeError, "query must be .*bfloat16 with a cache"),
    # Caches
    ("rows", {"v_cache": zeros(B, 12, HKV, DV, dtype=F16)}, TypeError, "v_cache must be float32 as k_cache, got"),
    ("rows", {"k_cache": zeros(B, 12, HKV, D, dtype=F64)}, TypeError, "v_cache must be float64 as k_cache"),
    ("rows", {"k_cache": zeros(B, 12, 0, D), "v_cache": zeros(B, 12, 0, DV)}, ValueError, "query must have .* 0 heads"),
    ("rows", {"k_cache": zeros(3, 12, HKV, D), "v_cache": zeros(3, 12, HKV, DV)}, ValueError, r"k_cache must"),
    # New keys and values
    ("rows", {"key": None}, ValueError, "key must be given with value, got None"),
    ("rows", {"value": None}, ValueError, "value must be given with key, got None"),
    # Lengths
    ("rows", {"cache_seqlens": [4]}, ValueError,
     r"cache_seqlens must be .* of shape \(2,\), got int64 array of shape \(1,\); write cache_seqlens\[0\]"),
    ("packed, paged", {"cache_seqlens": np.array([4], np.int32)}, ValueError, r"; write cache_seqlens\[0\]"),
    ("rows", {"cache_seqlens": -1}, ValueError, "cache_seqlens must be at least 0, got -1"),
    ("paged", {"cache_seqlens": [4, -3]}, ValueError, "cache_seqlens must be at least 0, got -3 at index 1"),
    ("rows", {"cache_seqlens": [13, 8]}, ValueError, "cache_seqlens must be .* room for, 12 .*, got 13 .* at index 0"),
    ("rows", {"cache_seqlens": [4, 10]}, ValueError, "room for, 12 per sequence, got 10 and 3 new ones at index 1"),
    ("paged", {"cache_seqlens": [4, 10]}, ValueError, "room for, 12 per sequence, got 10 and 3 new ones at index 1"),
    ("packed", {"cache_seqlens": [4, 9]}, ValueError, "room for, 12 per sequence, got 9 and 4 new ones at index 1"),
    ("rows", {"cache_seqlens": None}, ValueError, "room for, 12 per sequence, got 12 and 3 new ones at index 0"),
    ("rows", {"cache_seqlens": 2**59}, ValueError, "cache_seqlens must be tokens that the cache has room for"),
    ("rows", {"cache_seqlens": 2**63}, ValueError, "cache_seqlens must be at most"),
    ("rows", {"cache_seqlens": np.array([4, 2**64 - 1], np.uint64)}, ValueError, "cache_seqlens must be at most"),
    ("rows", {"cache_seqlens": 10**5000}, ValueError, "cache_seqlens must be .* an integer of 16610 bits"),
    ("paged", {"cache_seqlens": None}, ValueError, "cache_seqlens must be given with block_table, got None"),
    # Tables
    *(("paged", {"block_table": number}, ValueError, r"block_table must be of shape \(2, max_pages\), got .*\(\)")
      for number in NUMBERS),
    ("paged", {"block_table": table([5, 6, -1], [0, 4, 2])}, IndexError, r"block_table .* got 6 at index \(0, 1\)"),
    ("paged", {"block_table": table([5, 1, -1], [0, 4, -1])}, IndexError, r"block_table .* got -1 at index \(1, 2\)"),
    ("paged", {"block_table": table([5, 1, -1], [0, 4, 2**31 - 1])}, IndexError,
     r"block_table must .* got 2147483647 at index \(1, 2\)"),
    ("paged", {"block_table": table([6, 1, -1], [0, 4, 2])}, IndexError, r"block_table .* got 6 at index \(0, 0\)"),
    ("paged", {"block_table": table([5, 1, -1], [0, -2, 2])}, IndexError, r"block_table .* got -2 at index \(1, 1\)"),
    ("packed, paged", {"block_table": table([5, 1, -1], [99, 4, 2])}, IndexError,
     r"block_table must .* got 99 at index \(1, 0\)"),
    ("packed, paged", {"block_table": table([5, 1, -1], [99, 4, 2]), "attention_mask": np.ones((1, 1, 6, 12), bool)},
     IndexError, r"block_table must .* got 99 at index \(1, 0\)"),
    ("paged", {"block_table": table([5, 2**40, -1], [0, 4, 2], dtype=np.int64)}, IndexError,
     r"block_table must .* got 1099511627776 at index \(0, 1\)"),
    ("paged", {"block_table": table([-5, 1, -1], [0, 4, 2], dtype=np.int64)}, IndexError,
     r"block_table must .* got -5 at index \(0, 0\)"),
    ("paged", {"block_table": table([99, 1, 5], [0, 4, 2]), "cache_seqlens": 0, "sliding_window": 0,
               "key": zeros(B, 12, HKV, D), "value": zeros(B, 12, HKV, DV)}, IndexError,
     r"block_table must .* got 99 at index \(0, 0\)"),  # written to, and seen by no query
    ("paged", {"block_table": table([5, 2, -1], [0, 4, 2])}, ValueError,
     "block_table must give each sequence pages of its own to write to, got page 2 for sequences 0 and 1"),
    ("packed, paged", {"block_table": table([5, 2, -1], [0, 4, 2])}, ValueError, "block_table must give each sequence"),
    # Where queries begin
    ("rows", {"cu_seqlens_k_new": [0, 3, 6]}, ValueError, r"key must be \[total, Hkv, D\] with cu_seqlens_k_new, got"),
    ("packed", {"cu_seqlens_k_new": [0, 0, 6]}, ValueError, "12 per sequence, got 8 and 6 new ones at index 1"),
    ("packed", {"cu_seqlens_k_new": [0, 2, 6], "key": None, "value": None}, ValueError, "key must be given with"),
    ("rows", {"cu_seqlens_k_new": [0, 3, 6], "key": zeros(6, HKV, D)}, ValueError, r"value must be"),
    # Numbers and flags
    ("rows", {"k_scale": zeros(1, 1, HKV, D)}, ValueError, "k_scale must be None for a cache of float32, got"),
    ("paged", {"v_scale": zeros(6, 4, HKV, 1)}, ValueError, "v_scale must be None for a cache of float32, got"),
    ("rows", {"softmax_scale": math.nan}, ValueError, "softmax_scale must"),
    ("rows", {"softmax_scale": math.inf}, ValueError, "softmax_scale must be finite"),
    ("rows", {"alibi_slopes": np.array([0, 1, math.inf, 0])}, ValueError, "alibi_slopes must be finite, got inf"),
    ("rows", {"bias": zeros(B, TQ, 12)}, ValueError, r"bias must broadcast .*; write bias\[:, None\]"),
    ("rows", {"relative_low": -3}, ValueError, "relative_low must be 0 without relative_bias, got -3"),
    ("rows", {"relative_bias": zeros(H, 5), "relative_low": 2**60}, ValueError, "relative_low must be from"),
    # Masks
    ("rows", {"attention_mask": np.full((TQ, 12), -1e9, F32)}, ValueError, "attention_mask must .*bias"),
    ("packed", {"attention_mask": np.full((6, 12), -np.inf, F32)}, ValueError, "attention_mask must .*bias"),
    ("rows", {"attention_mask": MaskInfo.from_attention_mask(np.ones((B, 1, TQ, 10), bool))}, ValueError,
     "attention_mask must broadcast .* MaskInfo of shape"),
    ("rows", {"attention_mask": MaskInfo.from_segments(np.zeros((B, TQ + 1), int), np.zeros((B, 12), int))}, ValueError,
     "attention_mask must broadcast .* MaskInfo of shape"),
    ("packed", {"attention_mask": MaskInfo.from_segments(np.zeros((B, 6), int), np.zeros((B, 12), int))}, ValueError,
     "attention_mask must broadcast .* MaskInfo of shape"),
    ("rows", {"attention_mask": MaskInfo.from_segments(np.zeros((3, TQ), int), np.zeros((3, 12), int))}, ValueError,
     "its batch rows must be 2, or 1 for all, got 3"),
    # Caches that cannot be written to
    ("rows", {"k_cache": read_only(B, 12, HKV, D)}, ValueError, "k_cache must be writeable to take new tokens"),
    ("paged", {"v_cache": read_only(6, 4, HKV, DV)}, ValueError, "v_cache must be writeable to take new tokens"),
    ("rows", {"k_cache": zeros(B, 12, HKV, D, dtype=">f4")}, ValueError, "k_cache must be .* native byte order"),
    ("rows", {"v_cache": zeros(B, 12, HKV, DV, dtype=">f4")}, ValueError, "v_cache must be .* native byte order"),
    ("rows", {"k_cache": arrange(zeros(B, 12, HKV, D), "misaligned")}, ValueError, "k_cache must be an aligned"),
    ("paged", {"v_cache": arrange(zeros(6, 4, HKV, DV), "misaligned")}, ValueError, "v_cache must be an aligned"),
    # Scales
    ("int8", {"k_scale": None}, ValueError, "k_scale must be given for a cache of int8, got None; write k_scale="),
    ("int8", {"v_scale": None}, ValueError, r"write v_scale=np.ones\(\(1, 1, 2, 8\), np.float32\) for scales of 1"),
    ("int8", {"v_scale": zeros(1, 1, 2, 8)}, ValueError, "finite and positive for each channel, got 0"),
    ("int8", {"k_scale": np.full((1, 1, 2, 8), math.inf, F32)}, ValueError, "finite and positive"),
    ("int8", {"k_scale": ones(1, 1, 2, 8, last=-3)}, ValueError, "for each channel, got -3"),
    ("int8", {"v_scale": ones(1, 1, 2, 16, last=math.nan)[..., ::2]}, ValueError, "for each channel, got nan"),
    ("int8", {"k_scale": ones(3, 1, 2, 1)}, ValueError, "to take new tokens"),
    ("int8", {"query": zeros(1, 1, H, 8, dtype=F64)}, TypeError, "query must be"),
    ("int4", {"k_scale": None}, ValueError, r"k_scale must be given for a cache of uint8, got None; attnmask.qua"),
    ("int4", {"v_scale": None}, ValueError, "v_scale must be given for a cache of uint8"),
    ("int4", {"k_scale": np.ones((3, 4, 2, 2, 2))}, TypeError, "k_scale must be float32 or float16 for a cache of u"),
    ("int4", {"k_scale": ones(3, 4, 2, 1)}, ValueError, r"of shape \(3, 4, 2, 64 / group, 2\)"),
    ("int4", {"k_scale": ones(1, 1, 2, 2, 2)}, ValueError, "k_scale must be of shape"),
    ("int4", {"v_scale": ones(3, 4, 2, 2, 1)}, ValueError, "v_scale must be of shape"),
    ("int4", {"v_scale": ones(3, 4, 2, 4, 2)}, ValueError, "with a group of 32, 64 or 128"),
    ("int4", {"v_scale": ones(3, 4, 2, 0, 2)}, ValueError, "v_scale must be of shape"),
    ("int4", {"k_scale": read_only(3, 4, 2, 2, 2)}, ValueError, "k_scale must be writeable"),
    ("int4", {"k_cache": zeros(3, 4, 2, 64, dtype=np.uint8)}, ValueError, "D = 128 as its cache of 2 channels"),
    ("int4", {"v_cache": zeros(3, 4, 2, 32, dtype=np.int8)}, TypeError, "v_cache must be uint8 as k_cache"),
    ("int4", {"query": zeros(1, 1, H, 64, dtype=F64)}, TypeError, "query must be .* with a cache of uint8"),
    ("int4", {"cache_seqlens": [4]}, ValueError, "cache_seqlens must be tokens that the cache has room for"),
    ("int4", {"block_table": [[3]]}, IndexError, "block_table must be from 0 to 2"),
    # Rotation
    ("int4", {"rotate": True, "k_cache": zeros(3, 4, 2, 48, dtype=np.uint8), "query": zeros(1, 1, H, 96)}, ValueError,
     "the channels of query must be a power of two to be rotated, got 96"),
    ("int4", {"rotate": True, "v_cache": zeros(3, 4, 2, 48, dtype=np.uint8)}, ValueError,
     "the channels of v_cache must be a power of two"),
]  # fmt: skip

# The same for calls without new tokens, of sequences of 4 and of 8 tokens.
BAD_TO_READ = [
    ("rows", {"cache_seqlens": [4, 13]}, ValueError, "room for, 12 per sequence, got 13 at index 1"),
    ("paged", {"cache_seqlens": [13, 4]}, ValueError, "room for, 12 per sequence, got 13 at index 0"),
    ("packed, paged", {"cache_seqlens": [4, -1]}, ValueError, "cache_seqlens must be at least 0, got -1 at index 1"),
    ("paged", {"cache_seqlens": None}, ValueError, "cache_seqlens must be given with block_table, got None"),
    ("paged", {"block_table": table([5, -1, -1], [0, 6, 2])}, IndexError, r"block_table .* got 6 at index \(1, 1\)"),
    ("packed, paged", {"block_table": table([5, -1, -1], [0, -1, 2])}, IndexError,
     r"block_table must .* got -1 at index \(1, 1\)"),
    ("packed, paged", {"block_table": table([5, -1, -1], [0, 99, 2]), "attention_mask": np.ones((6, 12), bool)},
     IndexError, r"block_table must .* got 99 at index \(1, 1\)"),
    ("rows", {"k_scale": zeros(1, 1, HKV, D)}, ValueError, "k_scale must be None for a cache of float32"),
    ("paged", {"k_cache": zeros(0, 4, HKV, D), "v_cache": zeros(0, 4, HKV, DV)}, IndexError, "block_table must"),
]  # fmt: skip
