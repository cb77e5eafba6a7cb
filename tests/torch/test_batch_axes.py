"""Several batch axes in PyTorch: beside scaled_dot_product_attention, eager, compiled, mapped and with gradients."""

from functools import partial

import pytest
from batch_axes import BATCH, BIASES, TK, TQ, H

import attnmask


@pytest.fixture
def tensors(torch):
    """Query, key and value."""
    shapes = (TQ, H), (TK, 2), (TK, 2)
    return [torch.randn(*BATCH, *x, 8, dtype=torch.float64, requires_grad=True) for x in shapes]


def by_pytorch(query, key, value, bias=None, **more):
    import torch

    heads_first = (x.transpose(-3, -2) for x in (query, key, value))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(*heads_first, attn_mask=bias, enable_gqa=True, **more).transpose(-3, -2)


def attend(query, key, value, bias=None, **more):
    return attnmask.torch.flash_attention(query, key, value, bias=bias, **more)


def results(function, *tensors, **more):
    import torch

    out = function(*tensors, **more)
    dout = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    return out, *torch.autograd.grad(out, tensors, dout)


def assert_close(got, right) -> None:
    import torch

    for one, other in zip(got, right, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("shape", BIASES.values(), ids=BIASES)
def test_gradients(torch, tensors, shape):
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert_close(results(attend, *tensors, bias), results(by_pytorch, *tensors, bias))
    swapped = [x.swapaxes(0, 1) for x in tensors]
    other = bias.swapaxes(0, 1) if bias.ndim == 5 else bias
    right = results(by_pytorch, *swapped, other)
    assert_close(results(attend, *swapped, other), right)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(torch, tensors, dynamic):
    torch._dynamo.reset()
    bias = torch.randn(2, 1, H, TQ, TK, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    assert_close(results(compiled, *tensors, bias), results(by_pytorch, *tensors, bias))
    given = [x.detach() for x in tensors]
    for more in ({}, {"causal": True, "causal_offset": "bottom-right"}, {"q_segment_ids": ids(torch)}):
        more |= (
            {"kv_segment_ids": torch.zeros(*BATCH, TK, dtype=torch.int32)} if "q_segment_ids" in more else {}
        )
        assert torch.equal(compiled(*given, **more), attend(*given, **more))
    out, lse = attnmask.torch.flash_attention(*(x.to("meta") for x in given), return_lse=True)
    assert (out.shape, lse.shape) == ((*BATCH, TQ, H, 8), (*BATCH, H, TQ))


def ids(torch):
    return (torch.arange(TQ) > 6).int().expand(*BATCH, TQ).contiguous() - 1


def test_mapped(torch, tensors):
    """Over calls with several batch axes, and over those of one, which are several together."""
    from torch.func import grad, vmap

    query, key, value = (x.detach() for x in tensors)
    bias = torch.randn(3, 2, 1, H, TQ, TK, dtype=torch.float64)
    queries = torch.stack([query, 2 * query, -query])

    def loss(function, query, bias):
        return function(query, key, value, bias).sin().sum()

    for function, dims, arrays in (
        (lambda f, q, b: f(q, key, value, b), (0, 0), (queries, bias)),
        (lambda f, q, b: f(q, key, value, b), (0, None), (queries, bias[0])),
        (lambda f, q, b: f(q, key, value, b), (None, 0), (query, bias)),
        (lambda f, q, b: grad(lambda x: loss(f, q, x))(b), (0, 0), (queries, bias)),
    ):
        got, right = (vmap(partial(function, f), dims)(*arrays) for f in (attend, by_pytorch))
        torch.testing.assert_close(got, right)
    rows = vmap(attend)(query, key, value, bias[0])
    torch.testing.assert_close(rows, by_pytorch(query, key, value, bias[0]))


def test_narrow(torch, tensors):
    given = [x.detach().bfloat16().requires_grad_() for x in tensors]
    bias = torch.randn(2, 1, H, TQ, TK, dtype=torch.bfloat16, requires_grad=True)
    wide = [x.detach().double().requires_grad_() for x in (*given, bias)]
    for got, right in zip(results(attend, *given, bias), results(by_pytorch, *wide), strict=True):
        assert (got.dtype, got.shape) == (torch.bfloat16, right.shape)
        torch.testing.assert_close(got.double(), right, rtol=0.03, atol=0.03)


def test_bad_input(torch, tensors):
    """Hints call functions of PyTorch."""
    query, key, value = tensors
    for given, message in (
        ((query, key[:, :1], value), r"key must have batch axes \(2, 3\) .*; write torch.broadcast_to\(key, \(2, 3,"),
        ((query, key, value, torch.zeros(2, TQ, TK, H)), r"; write torch.permute\(bias, \(0, 3, 1, 2\)\)\[:, None\]$"),
        ((query, key, value, torch.zeros(2, H, 3, TQ, TK)), r"; write torch.permute\(bias, \(0, 2, 1, 3, 4\)\)$"),
        ((query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), torch.zeros(2, H, TQ, TK)),
         r"bias must broadcast to \[B, H, Tq, Tk\] = \(6, 4, 9, 11\), got float32 array of shape \(2, 4, 9, 11\)$"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            attend(*given)
