"""Arguments of write_kvcache: caches of every format, what the twin writes to them, and bad input."""

import numpy as np
import reference_kvcache as twin
from flash_cases import BF16, F16, F32, F64
from kvcache_cases import cache_layout

PAGES, SIZE, HKV, D, DV = 5, 4, 2, 64, 32
FORMATS = (F32, F16, BF16, F64, *twin.QUANTIZED, "int4")
NAMES = ("k_cache", "v_cache", "k_scale", "v_scale")


def cache_of(rng, kind, by_channel=False, layout="contiguous", depths=(D, DV)) -> dict:
    """A cache full of numbers, with scales if it has any."""
    shape = PAGES, SIZE, HKV
    if kind == "int4":
        caches = [rng.integers(0, 256, (*shape, depth // 2), np.uint8) for depth in depths]
        scales = [rng.random((*shape, depth // 32, 2)).astype(F16) for depth in depths]
    else:
        caches = [(3 * rng.standard_normal((*shape, depth))).astype(kind) for depth in depths]
        axes = [(1, 1, HKV, depth) if by_channel else (*shape, 1) for depth in depths]
        scales = [rng.random(each, F32) + F32.type(0.5) for each in axes]
    with np.errstate(invalid="ignore"):  # NaN as integers
        made = dict(zip(NAMES, cache_layout(*caches, layout), strict=False))
    if kind == "int4" or kind.name in twin.LARGEST:
        made |= dict(zip(NAMES[2:], scales, strict=True))
    return made


def tokens_of(rng, count, dtype=F32, depths=(D, DV)) -> dict:
    return {
        name: rng.standard_normal((count, HKV, depth)).astype(dtype)
        for name, depth in zip(("key", "value"), depths, strict=True)
    }


def copied(arguments: dict) -> dict:
    return {name: x.copy() if name in NAMES else x for name, x in arguments.items()}


def write_by_twin(key, value, slot_mapping, k_cache, v_cache, k_scale=None, v_scale=None) -> None:
    """Appends each token to what lies before its slot in a page, one after the other."""
    for cache, scale, tokens in ((k_cache, k_scale, key), (v_cache, v_scale, value)):
        for token, slot in zip(tokens, slot_mapping, strict=True):
            if slot >= 0:
                twin.append(cache, scale, None, slot // SIZE, slot % SIZE, token[None])


def good() -> dict:
    return {
        **{
            name: np.full((PAGES, SIZE, HKV, depth), 7, F32)
            for name, depth in (("k_cache", 8), ("v_cache", 4))
        },
        "key": np.zeros((3, HKV, 8), F32),
        "value": np.zeros((3, HKV, 4), F32),
        "slot_mapping": np.array([19, -1, 0]),
    }


def read_only(array):
    array.flags.writeable = False
    return array


SLOTS = [
    ({"slot_mapping": [19, -1, 20]}, IndexError, "slot_mapping must be from -1 to 19, got 20 at index 2"),
    ({"slot_mapping": [-2, -1, 0]}, IndexError, "slot_mapping must be from -1 to 19, got -2 at index 0"),
    ({"slot_mapping": np.array([1, 2**64 - 1, 0], np.uint64)}, IndexError, "slot_mapping .* at index 1"),
    ({"slot_mapping": [2**62, 1, 0]}, IndexError, "slot_mapping must be from -1 to 19, got 4611686018427387904 at"),
    ({"slot_mapping": [3, 5, 3]}, ValueError, "slot_mapping must give each token a slot of its own"),
    ({"slot_mapping": [0, 0, -1]}, ValueError, "slot_mapping must give each token .*, got 0 at index 0 and 1"),
    ({"value": None}, ValueError, "value must be given with key"),
]  # fmt: skip
BAD = [
    *SLOTS,
    ({"cache_seqlens": [4, 8]}, TypeError, "unexpected keyword argument 'cache_seqlens'"),
    ({"block_table": [[4], [8]]}, TypeError, "unexpected keyword argument 'block_table'"),
    ({"v_cache": np.zeros((PAGES, SIZE, HKV, 4), F16)}, TypeError, "v_cache must be float32 as k_cache"),
    ({"k_cache": read_only(np.zeros((PAGES, SIZE, HKV, 8), F32))}, ValueError, "k_cache must be writeable to take"),
    ({"k_cache": np.zeros((PAGES, SIZE, HKV, 8), ">f4")}, ValueError, "k_cache must be .* native byte order"),
    ({"k_cache": np.zeros((PAGES, SIZE, HKV, 8)).tolist()}, TypeError, "v_cache must be float64 as k_cache"),
    ({"k_scale": np.ones((PAGES, SIZE, HKV, 1), F32)}, ValueError, "k_scale must be None for a cache of float32"),
    ({"rotate": True, "key": np.zeros((3, HKV, 6), F32)}, ValueError, "the channels of key must be a power of"),
]  # fmt: skip
