"""MaskInfo and the BlockMask of FlexAttention."""

import numpy as np
import pytest
from random_masks import every_mask

import attnmask
from attnmask import MaskInfo


def segments(batch=2):
    return MaskInfo.from_segments(np.array([[0] * 9 + [1] * 20 + [2] * 4 + [-1] * 4, [3] * 37])[:batch])


DOCUMENTS = np.arange(37) // 9


@pytest.mark.parametrize(("mask_mod", "same"), [
    (lambda torch: lambda b, h, q, k: (q - k).abs() < 3, lambda b, h, q, k: abs(q - k) < 3),
    (lambda torch: lambda b, h, q, k: torch.where(q > k, q - k < 4, k < 9),
     lambda b, h, q, k: np.where(q > k, q - k < 4, k < 9)),
    (lambda torch: (lambda b, h, q, k: (torch.tensor(DOCUMENTS)[q] == torch.tensor(DOCUMENTS)[k]) & (q >= k)),
     lambda b, h, q, k: (DOCUMENTS[q] == DOCUMENTS[k]) & (q >= k)),
    (lambda torch: lambda b, h, q, k: (k < torch.tensor([3, 4])[b]) | (q >= k),
     lambda b, h, q, k: (k < np.array([3, 4])[b]) | (q >= k)),
])  # fmt: skip
def test_functions_that_need_tensors(torch, mask_mod, same):
    """As FlexAttention gives them to a mask_mod."""
    assert MaskInfo.from_function(mask_mod(torch), 37, 30, 2) == MaskInfo.from_function(same, 37, 30, 2)


def test_functions_that_fail_with_tensors_too(torch):
    """The error is that of the arrays; one that writes to its arrays, or asks them for one answer, is not helped."""

    def writes(b, h, q, k):
        q += 1
        return q == k

    for function, error, words in (
        (
            lambda b, h, q, k: q.nothing(),
            AttributeError,
            "'numpy.ndarray' object has no attribute 'nothing'; f",
        ),
        (lambda b, h, q, k: q >= k and k > 2, ValueError, "ambiguous.*write & and |, np.abs"),
        (writes, ValueError, "writes failed: output array is read-only; f"),
    ):
        with pytest.raises(error, match=words):
            MaskInfo.from_function(function, 37, 30, 2)


@pytest.mark.parametrize("mask", (masks := every_mask(37, 49, heads=3)).values(), ids=masks)
@pytest.mark.parametrize("size", [4, (16, 8), 128])
def test_there_and_back(torch, mask, size):
    from torch.nn.attention.flex_attention import create_block_mask

    block_mask = mask.to_block_mask(size)
    assert MaskInfo.from_block_mask(block_mask) == mask
    batch, heads, queries, keys = mask.attention_mask.shape
    theirs = create_block_mask(
        block_mask.mask_mod, batch, heads, queries, keys, device="cpu", BLOCK_SIZE=block_mask.BLOCK_SIZE
    )
    assert MaskInfo.from_block_mask(theirs) == mask
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(block_mask, name), getattr(theirs, name))
    assert torch.equal(block_mask.to_dense(), theirs.to_dense())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention(torch):
    from torch.nn.attention.flex_attention import flex_attention

    mask = segments().apply_causal()
    query, key, value = (torch.randn(2, 3, 37, 8, dtype=torch.float64) for _ in range(3))
    flex = flex_attention(query, key, value, block_mask=mask.to_block_mask(16))
    out = attnmask.torch.flash_attention(*(x.transpose(1, 2) for x in (query, key, value)), mask)
    torch.testing.assert_close(flex, out.transpose(1, 2))


def test_a_mask_mod_of_ones_own(torch):
    from torch.nn.attention.flex_attention import create_block_mask

    block_mask = create_block_mask(
        lambda b, h, q, k: (q >= k) & (h != 1), 1, 2, 50, 70, device="cpu", BLOCK_SIZE=16
    )
    expected = np.tri(50, 70, dtype=bool)[None, None] & np.array([True, False])[None, :, None, None]
    np.testing.assert_array_equal(MaskInfo.from_block_mask(block_mask).attention_mask, expected)


def test_bad_input(torch):
    for size, error, words in (
        (0, ValueError, "block_size must be at least 1, got 0"),
        ((1, 2, 3), ValueError, "block_size must be an integer or a pair, got 3 entries"),
        ("a", TypeError, "block_size must be an integer"),
    ):
        with pytest.raises(error, match=words):
            segments().to_block_mask(size)
    with pytest.raises(ValueError, match="the MaskInfo must have an attention_mask"):
        MaskInfo().to_block_mask()
    with pytest.raises(TypeError, match="block_mask must be a BlockMask, got None"):
        MaskInfo.from_block_mask(None)


def test_a_neighborhood_in_a_graph(torch):
    """FlexAttention compiles it: the numbers of its grid are known."""
    from torch.nn.attention.flex_attention import flex_attention

    mask = MaskInfo.neighborhood((12, 16), (3, 5), dilation=(1, 2))
    query = torch.randn(1, 2, 192, 16)
    attend = torch.compile(flex_attention, backend="aot_eager")
    out = attend(query, query, query, block_mask=mask.to_block_mask())
    expected = attnmask.torch.flash_attention(*[query.transpose(1, 2)] * 3, mask).transpose(1, 2)
    torch.testing.assert_close(out, expected)
