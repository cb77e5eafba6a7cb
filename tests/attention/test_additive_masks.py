"""Masks of floating-point numbers that look like a bias are refused by every function, before anything is computed."""

import pickle

import ml_dtypes
import numpy as np
import pytest
from layouts import LAYOUTS, arrange

import attnmask
from attnmask import MaskInfo, _core
from attnmask.operations import OperationImpl, OperationRegistry

BF16 = ml_dtypes.bfloat16
DTYPES = [np.float16, BF16, np.float32, np.float64, np.longdouble, ml_dtypes.float8_e5m2]
BAD = [-1.0, -np.inf, np.inf, np.nan, "-tiny"]
SHAPE = (2, 3, 5, 7)


QUERY, KEY = np.ones((2, 5, 3, 4), np.float32), np.ones((2, 7, 3, 4), np.float32)


def attend(mask, function=attnmask.flash_attention):
    return function(QUERY, KEY, KEY, attention_mask=mask)


PAIRS = {  # functions that take a mask of pairs [B, H, Q, K]
    "MaskInfo": MaskInfo,
    "from_attention_mask": MaskInfo.from_attention_mask,
    "from_attention_mask, not valid": lambda mask: MaskInfo.from_attention_mask(mask, mask_is_valid=False),
    "dynamic_init": lambda mask: MaskInfo.dynamic_init(attention_mask=mask),
    "replace": lambda mask: MaskInfo.from_random(2, 5, 7).replace(attention_mask=mask),
    "mask_to_segment_ids": attnmask.mask_to_segment_ids,
    "attention_mask_to_padding_segment_ids": attnmask.attention_mask_to_padding_segment_ids,
    "attention_mask_to_qkv_cu_seqlens": attnmask.attention_mask_to_qkv_cu_seqlens,
    "split_attention_mask": OperationImpl.split_attention_mask,
    "flash_attention": attend,
    "flash_attention_vjp": lambda mask: attend(mask, attnmask.flash_attention_vjp),
    "flash_attention_with_kvcache": lambda mask: attend(mask, attnmask.flash_attention_with_kvcache),
    "from_blocks": lambda mask: MaskInfo.from_blocks(mask, 4),
    "flash": lambda mask: OperationRegistry.create("flash")(QUERY, KEY, KEY, mask),
    "vanilla": lambda mask: OperationRegistry.create("vanilla")(QUERY, KEY, KEY, mask),
}
TOKENS = {  # functions that take a mask of tokens [B, T]
    "from_segments": lambda mask: MaskInfo.from_segments(mask, is_attn_mask=True),
    "from_segments, keys": lambda mask: MaskInfo.from_segments(np.ones((2, 3)), mask, is_attn_mask=True),
    "from_attention_mask": MaskInfo.from_attention_mask,
    "prepare_lens_from_mask": attnmask.prepare_lens_from_mask,
    "prepare_cu_seqlens_from_mask": attnmask.prepare_cu_seqlens_from_mask,
    "qkv_masks_to_cu_seqlens": attnmask.qkv_masks_to_cu_seqlens,
    "qkv_masks_to_cu_seqlens, keys": lambda mask: attnmask.qkv_masks_to_cu_seqlens(np.ones((2, 3)), mask),
    "attention_mask_to_qkv_cu_seqlens": attnmask.attention_mask_to_qkv_cu_seqlens,
    "combine_query_kv_masks": lambda mask: OperationImpl.combine_query_kv_masks(mask, np.ones((2, 3))),
    "combine_query_kv_masks, keys": lambda mask: OperationImpl.combine_query_kv_masks(np.ones((2, 3)), mask),
}


def good(shape, dtype) -> np.ndarray:
    """Zeros of either sign, the smallest and the largest number, and some numbers between them."""
    info = ml_dtypes.finfo(dtype)
    numbers = np.array([0, 0, 1, 0, 2.5], dtype)
    numbers[1] = -numbers[1]
    numbers = np.concatenate([numbers, np.array([info.smallest_subnormal, info.max], dtype)])
    return np.resize(numbers, shape)


def bad(number, dtype):
    return -ml_dtypes.finfo(dtype).smallest_subnormal if isinstance(number, str) else dtype(number)


@pytest.mark.parametrize("name", [*PAIRS, *(f"tokens: {name}" for name in TOKENS)])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_each_function_refuses_what_looks_like_a_bias(name, dtype):
    function = TOKENS[name.removeprefix("tokens: ")] if name.startswith("tokens") else PAIRS[name]
    shape = SHAPE[::3] if name.startswith("tokens") else SHAPE
    function(good(shape, dtype))
    for number in BAD:
        mask = good(shape, dtype)
        mask[(-1,) * len(shape)] = bad(number, dtype)
        with pytest.raises(
            ValueError, match=r"(mask|ids|blocks) must be zero for .* at index .* pass it as `bias`"
        ):
            function(mask)


def test_the_masks_that_models_make():
    """Models use 0 for live pairs and a large negative number for the others, or sums of these."""
    causal = np.where(np.tri(5, 7, dtype=bool), 0, np.finfo(np.float32).min)[None, None].astype(np.float64)
    others = 2 * causal, np.where(causal, -np.inf, 0), np.maximum(causal, -6e4).astype(np.float16)
    for mask in (causal, *others):
        with pytest.raises(ValueError, match=r"got -\S+ at index \(0, 0, 0, 1\)"):
            attend(mask)
    biased = attnmask.flash_attention(QUERY, KEY, KEY, bias=causal.astype(np.float32))
    np.testing.assert_array_equal(biased, attend(causal == 0))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES[:4], ids=lambda dtype: dtype.__name__)
def test_the_first_one_is_told_wherever_it_is(dtype, layout, set_threads):
    rng = np.random.default_rng(0)
    for shape in [(3,), (2, 70_000), (300, 2, 40), (3, 1, 5, 257), (2, 3, 1, 2, 1, 6)]:
        for threads in (1, 2):
            set_threads(threads)
            mask = good(shape, dtype)
            _core.check_mask(arrange(mask, layout), "mask")
            places = sorted(rng.integers(mask.size, size=2).tolist())
            mask.reshape(-1)[places] = bad(rng.choice([-1.0, np.inf, np.nan]), dtype)
            index = np.unravel_index(places[0], shape)
            told = tuple(map(int, index)) if len(shape) > 1 else int(index[0])
            with pytest.raises(ValueError, match=r"mask must be zero") as error:
                _core.check_mask(arrange(mask, layout), "mask")
            assert f"at index {told};" in str(error.value)


def test_shared_axes_are_looked_at_once():
    """The error names the first of the positions that share an element."""
    row = np.ones((1, 1, 1, 2**12), np.float32)
    mask = np.broadcast_to(row, (2**20, 2**10, 2**10, 2**12))
    _core.check_mask(mask, "mask")
    row[..., 7] = -1
    with pytest.raises(ValueError, match=r"got -1.0 at index \(0, 0, 0, 7\)"):
        _core.check_mask(mask, "mask")
    _core.check_mask(np.zeros((0, 3), np.float32), "mask")
    with pytest.raises(ValueError, match=r"got nan at index \(\)"):
        _core.check_mask(np.float32(np.nan), "mask")


def test_integers_and_bools_may_be_anything():
    for dtype in (np.bool_, np.int8, np.int64, np.uint64):
        mask = np.full(SHAPE, -1).astype(dtype)
        for function in PAIRS.values():
            function(mask)
        for function in TOKENS.values():
            function(mask[:, 0, 0])


def test_leaves_of_a_tree():
    """Leaves are checked when the mask is used, as for all properties of leaves."""
    info = MaskInfo(np.ones(SHAPE, np.float32))
    children, aux_data = info.tree_flatten()
    again = MaskInfo.tree_unflatten(aux_data, (-children[0], *children[1:]))
    with pytest.raises(ValueError, match="pass it as `bias`"):
        again.density()
    assert pickle.loads(pickle.dumps(info)) == info
