"""attnmask.torch, and tensors where arrays are expected."""

import sys

import ml_dtypes
import numpy as np
import pytest

import attnmask
from attnmask import MaskInfo


def test_without_torch(monkeypatch):
    monkeypatch.delitem(sys.modules, "attnmask.torch", raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"attnmask\.torch needs PyTorch"):
        import attnmask.torch  # noqa: F401


@pytest.fixture
def torch():
    torch = pytest.importorskip("torch")
    import attnmask.torch  # noqa: F401

    torch.manual_seed(0)
    return torch


@pytest.fixture
def inputs(torch):
    """Query, key, value, bias and sinks, of few numbers, that want gradients."""
    shapes = (2, 5, 2, 3), (2, 6, 1, 3), (2, 6, 1, 4), (2, 5, 6), (2, 1)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


ARGUMENTS = {
    "plain": {},
    "causal": {"causal": True, "causal_offset": 1},
    "capped": {"logits_soft_cap": 2.0, "sliding_window": (3, 2)},
    "not normalized": {"normalize_output": False},
    "dropout": {"dropout_prob": 0.4, "dropout_seed": 3},
    "masked": {"attention_mask": MaskInfo.from_random(2, 5, 6, 0.3, 1)},
}


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("more", ARGUMENTS.values(), ids=ARGUMENTS)
def test_gradients_by_differences(torch, inputs, more, return_lse):
    def attend(query, key, value, bias, sinks):
        return attnmask.torch.flash_attention(
            query, key, value, bias=bias, softmax_aux=sinks, return_lse=return_lse, **more
        )

    assert torch.autograd.gradcheck(attend, inputs)


def test_packed(torch, inputs):
    query, key, value = (x[0] for x in inputs[:3])
    more = {"cum_seqlens_q": torch.tensor([0, 2, 5]), "cum_seqlens_k": torch.tensor([0, 4, 6])}
    assert torch.autograd.gradcheck(
        lambda *tensors: attnmask.torch.flash_attention(*tensors, **more), (query, key, value)
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_same_as_arrays(torch, inputs, dtype):
    """To the bit, with a graph and without; and tensors may be transposed."""
    tensors = [x.detach().to(getattr(torch, dtype)) for x in inputs[:3]]
    tensors[0] = tensors[0].transpose(1, 2).contiguous().transpose(1, 2)
    out = attnmask.flash_attention(*tensors)
    assert out.dtype == (ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    for wanting in (False, True):
        got, lse = attnmask.torch.flash_attention(
            *(x.requires_grad_(wanting) for x in tensors), return_lse=True
        )
        assert got.dtype == tensors[0].dtype
        assert got.requires_grad is lse.requires_grad is wanting
        np.testing.assert_array_equal(got.detach().double().numpy(), out.astype(np.float64))
    got.double().sum().backward()
    assert all(x.grad.dtype == x.dtype and x.grad.shape == x.shape for x in tensors)


def test_memory_is_shared(torch):
    """A tensor goes in as it lies: what a mask borrows, it sees change."""
    tensor = torch.ones(1, 1, 2, 3, dtype=torch.bool)
    mask = MaskInfo(tensor)
    assert np.shares_memory(mask.attention_mask, tensor.numpy())
    ids = torch.tensor([[0, 0, 1]])
    assert attnmask.segment_ids_to_mask(ids).tolist() == attnmask.segment_ids_to_mask(ids.numpy()).tolist()
    sums = attnmask.chunk_global_cumsum(torch.ones(1, 4, 2, dtype=torch.bfloat16))
    assert sums[0, :, 0].tolist() == [1, 2, 3, 4]


def test_no_graph(torch, inputs):
    with torch.no_grad():
        assert not attnmask.torch.flash_attention(*inputs[:3]).requires_grad


def test_only_what_is_wanted(torch, inputs):
    query, key, value, bias, _ = inputs
    out = attnmask.torch.flash_attention(query.detach(), key, value.detach(), bias=bias.detach())
    out.sum().backward()
    assert key.grad is not None
    assert query.grad is value.grad is bias.grad is None


def test_a_list_of_sinks(torch, inputs):
    query, key, value, *_ = inputs
    out = attnmask.torch.flash_attention(query, key, value, softmax_aux=[0.5, 1.0])
    same = attnmask.flash_attention(*(x.detach() for x in (query, key, value)), softmax_aux=[0.5, 1.0])
    np.testing.assert_array_equal(out.detach().numpy(), same)


def test_refusals(torch, inputs):
    query, key, value, *_ = inputs
    with pytest.raises(TypeError, match="key must be a tensor, got float64 array"):
        attnmask.torch.flash_attention(query, key.detach().numpy(), value)
    with pytest.raises(TypeError, match="query must be on the CPU, got a tensor on meta"):
        attnmask.torch.flash_attention(query.to("meta"), key, value)
    with pytest.raises(TypeError, match="key must be on the CPU"):
        attnmask.flash_attention(query.detach(), key.to("meta"), value.detach())
    with pytest.raises(TypeError, match="query must be a tensor that needs no gradient"):
        attnmask.flash_attention(query, key, value)
    for more in ({}, {"query": query.detach(), "key": key.detach(), "value": value.detach()}):
        arguments = {"query": query, "key": key, "value": value} | more
        with pytest.raises(TypeError, match="unexpected keyword argument 'out'"):
            attnmask.torch.flash_attention(**arguments, out=np.zeros(1))
    with pytest.raises(TypeError, match="return_lse must be True or False"):
        attnmask.torch.flash_attention(query, key, value, return_lse=1)
    out = attnmask.torch.flash_attention(query, key, value)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(out.sum(), query, create_graph=True)
    for name, array in (
        ("attention_mask", torch.ones(query.shape[1], key.shape[1])),
        ("q_segment_ids", torch.zeros(query.shape[:2], dtype=torch.int32)),
    ):
        more = {} if name == "attention_mask" else {"kv_segment_ids": np.zeros(key.shape[:2], np.int32)}
        out = attnmask.torch.flash_attention(query, key, value, **{name: array}, **more)
        array += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    doubled = query * 2
    out = attnmask.torch.flash_attention(doubled, key, value)
    with torch.no_grad():
        doubled += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
