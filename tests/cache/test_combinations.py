"""Every format of a cache with every option: paged, packed, with new tokens of other numbers, rotated and latent.

`test_attend.py` has more of the floating formats, and the bits of what is written; here options meet formats.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import reference_kvcache as twin
from flash_cases import BF16, F16, F32, F64
from kvcache_cases import (
    KINDS,
    Case,
    arguments_of,
    attend,
    check,
    every_format,
    refused,
    right_of,
)

import attnmask
from attnmask._cache.quantize import rotated

pytestmark = pytest.mark.levels("turns", "amx", "avx512vnni")

H, HKV = 8, 2
# Numbers of heads and of channels on both sides of what kernels of four bits take at a time.
CHANNELS = [
    ((96, 64), (32, 32), None),
    ((64, 160), (64, 32), 2),
    ((160, 256), (32, 128), 16),
    ((640, 128), (128, 128), 6),
]
CHANNELS = [*CHANNELS * 4, ((128, 128), (64, 64), 1)]
HALVES = [
    Case((dtype, "int4"), (2 * heads, 2), depths, 1, (0, 70, 200), page_size=page_size, groups=groups)
    for dtype in (BF16, F16)
    for heads, (depths, groups, page_size) in enumerate(CHANNELS, 1)
]
HALVES += [
    Case((dtype, "int4"), (4, 1), (128, 128), 1, (2990,), groups=(64, 64)) for dtype in (F32, BF16, F16)
]
# Groups of any size, in memory of any strides.
HALVES += [
    Case((dtype, kind), (H, HKV), depths, 3, (0, 70, 200), "as many", 16, layout, groups=(group, group))
    for dtype, kind, depths, group, layout in itertools.product(
        (F32, BF16, F16),
        ("int4", "int4 of float16"),
        ((128, 128), (256, 384), (640, 128)),
        (32, 64, 128),
        ("contiguous", "strided"),
    )
]


@pytest.mark.parametrize(
    "case", [*every_format(), *HALVES], ids=lambda case: str(case.seed) if case.seed else str(case)
)
def test_by_the_twin(isa, set_threads, case):
    set_threads(case.threads)
    check(case, right_of(case), arguments_of(case))


@pytest.mark.parametrize("kind", [F32, F16, BF16, *twin.QUANTIZED, "int4"], ids=str)
@pytest.mark.parametrize("query_type", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("depth", [64, 128])
@pytest.mark.parametrize("rows", [12, 13, 16, 17, 24, 25, 33, 64])
def test_numbers_of_rows_on_both_sides_of_each_bound(isa, kind, query_type, depth, rows):
    """Up to some number of rows keys are read where they lie, and else packed; in pages with the same bits."""
    case = Case((query_type, kind), (2, 2), (depth, depth), rows, (208, 77), page_size=16, window=(150, None))
    check(case, right_of(case), arguments_of(case))
    outs = [attend(arguments_of(replace(case, page_size=size))).tobytes() for size in (None, 16)]
    assert outs[0] == outs[1]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(("queries", "token"), [(1, 190), (2, 199), (20, 190), (70, 190)])
@pytest.mark.parametrize("side", ["k_scale", "v_scale"])
# Of four bits, the scale or the offset of a group.
@pytest.mark.parametrize(
    ("kind", "which"), [*((kind, 0) for kind in twin.QUANTIZED), ("int4", 0), ("int4", 1)], ids=str
)
def test_a_scale_that_is_nan_reaches_what_sees_its_token(isa, kind, which, side, queries, token, dtype):
    case = Case((dtype, kind), (H, HKV), (64, 64), queries, (0, 70, 200), page_size=16, window=(30, 0))
    given = arguments_of(case)
    clean = attend(given)
    page, inside = twin.places(given["k_cache"], given["block_table"], 2, token, token + 1)
    scales = given[side][page[0], inside[0], 1]  # of one head of keys
    scales[..., which if case.halves else 0] = np.nan
    places = 200 - queries + np.arange(queries)
    sees = np.zeros(clean.shape, bool)
    sees[2, (places >= token) & (places <= token + 30), H // HKV :] = True
    out = attend(given)
    assert np.isnan(out[sees].astype(F32)).all()
    assert out[~sees].tobytes() == clean[~sees].tobytes()


# Bad input of every format: nothing is written


def good(kind, rotate) -> dict:
    """A call of two sequences that appends tokens of other numbers to pages."""
    dtype = F64 if kind == F64 else F32
    case = Case((dtype, kind), (H, HKV), (64, 32), 2, (30, 17), "packed", page_size=16, rotate=rotate)
    given = {name: x for name, x in arguments_of(case).items() if x is not None}
    given |= {"block_table": np.array([[0, 1, 2], [5, 4, 3]], np.int32), "cache_seqlens": np.array([30, 7])}
    given["cu_seqlens_k_new"] = np.array([0, 4, 5])
    given |= {"key": np.ones((5, HKV, 64), dtype), "value": np.ones((5, HKV, 32), dtype)}
    return given | {"out": np.full((2, 2, H, 32), 77, dtype)}


WRONG = [
    ({"cache_seqlens": [45, 7]}, ValueError, "cache_seqlens must be tokens .* got 45 and 4 new ones at index 0"),
    ({"cache_seqlens": [30, -1]}, ValueError, "cache_seqlens must be at least 0"),
    ({"block_table": [[0, 1, 9], [5, 4, 3]]}, IndexError, r"block_table must be from 0 to 6, got 9 at index \(0, 2\)"),
    ({"block_table": [[0, 1, 5], [5, 4, 3]]}, ValueError, "block_table must give each sequence pages of its own"),
    ({"cu_seqlens_k_new": [0, 3, 4]}, ValueError, "cu_seqlens_k_new must end at 5 tokens of key"),
    ({"cu_seqlens_k_new": [0, 6, 5]}, ValueError, "cu_seqlens_k_new"),
    ({"cu_seqlens_k_new": [0, 5]}, ValueError, "cu_seqlens_k_new must have 3 entries"),
    ({"bias": np.zeros((1, H, 2, 33), F32)}, ValueError, "bias must broadcast"),
    ({"relative_bias": np.zeros((H - 1, 9), F32)}, ValueError, r"relative_bias must be \[H, L\] with H = 8"),
    ({"relative_low": 3}, ValueError, "relative_low must be 0 without relative_bias"),
    ({"alibi_slopes": np.ones(H + 1)}, ValueError, "alibi_slopes must be"),
    ({"attention_mask": np.ones((2, 33), bool)}, ValueError, "attention_mask must broadcast"),
    ({"sliding_window": (-1, 0)}, ValueError, "sliding_window"),
    ({"softmax_aux": np.ones((3, 2))}, ValueError, "softmax_aux must be"),
    ({"value": None}, ValueError, "value must be given with key"),
    ({"key": None}, ValueError, "key must be given with (value|cu_seqlens_k_new)"),
    ({"key": np.ones((5, HKV, 32), F32)}, ValueError, "key must have 2 heads of 64 channels"),
    ({"value": np.ones((4, HKV, 32), F32)}, ValueError, "cu_seqlens_k_new must end at 4 tokens of value, got 5"),
    ({"out": np.zeros((2, 2, H, 32), np.int8)}, ValueError, "out must be"),
]  # fmt: skip


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_bad_input_writes_nothing(kind, rotate):
    for wrong, error, words in WRONG:
        refused(good(kind, rotate) | wrong, error, words)
    attnmask.flash_attention_with_kvcache(**good(kind, rotate))


def test_latent_caches_are_not_rotated():
    """Some channels of rotated keys are no rotated values; all of them are."""
    rng = np.random.default_rng(0)
    x, cache = (rng.standard_normal((2, 5, heads, 64)).astype(F32) for heads in (H, HKV))
    words = "rotate must be False where v_cache is channels of k_cache, which are rotated together"
    for values in (np.s_[..., :32], np.s_[..., 32:]):
        for new in ({}, {"key": np.ones((2, 1, HKV, 64), F32), "cache_seqlens": 3}):
            before = cache.tobytes()
            with pytest.raises(ValueError, match=words):
                attnmask.flash_attention_with_kvcache(x, cache, cache[values], **new, rotate=True)
            assert cache.tobytes() == before
    got = attnmask.flash_attention_with_kvcache(x, cache, cache, rotate=True)
    wide = rotated(cache)
    right = attnmask.flash_attention_with_kvcache(x, wide, wide)
    np.testing.assert_allclose(got, right, atol=1e-5)
    both = np.stack([cache, cache[..., ::-1]], axis=1)[..., :64]  # keys beside values, of fewer channels
    k_cache, v_cache = both[:, 0], both[:, 1, ..., :32]
    attnmask.flash_attention_with_kvcache(x, k_cache, v_cache, rotate=True)
