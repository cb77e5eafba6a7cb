"""attnmask.torch.merge_attention_states: what test_every_function.py does not ask of all functions."""

import pytest

torch = pytest.importorskip("torch")
at = pytest.importorskip("attnmask.torch")

TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
TOKENS, PARTS = 9, (slice(0, 4), slice(4, 5), slice(5, 9))


def inputs(dtype, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(2, TOKENS, 2, 16, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for _ in range(3)
    ]


def in_parts(query, key, value):
    parts = [at.flash_attention(query, key[:, part], value[:, part], return_lse=True) for part in PARTS]
    return at.merge_attention_states(*zip(*parts, strict=True))


def backward(results, tensors):
    """The gradients of the tensors, for random gradients of the results."""
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in results]
    return torch.autograd.grad(results, tensors, weights)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_gradients_are_those_of_one_call(dtype):
    one, other = inputs(dtype), inputs(dtype)
    parts = backward(in_parts(*one), one)
    whole = backward(at.flash_attention(*other, return_lse=True), other)
    bound = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}[dtype]
    for a, b in zip(parts, whole, strict=True):
        assert a.dtype == dtype
        assert (a - b).abs().max() <= bound


def test_only_what_is_used_has_a_gradient():
    """A part without keys gets zeros; an unused result gives no gradient of its own."""
    outs = [torch.randn(3, 2, 4, requires_grad=True) for _ in range(2)]
    lses = [torch.randn(2, 3, requires_grad=True), torch.full((2, 3), -torch.inf, requires_grad=True)]
    out, _ = at.merge_attention_states(outs, lses)
    out.sum().backward()
    assert torch.equal(outs[0].grad, torch.ones(3, 2, 4))
    for x in (outs[1], lses[1]):
        assert torch.equal(x.grad, torch.zeros_like(x))


OUT, LSE = torch.zeros(4, 2, 8), torch.zeros(2, 4)
BAD = {
    "no part": (([], []), ValueError, "outs must have at least one part"),
    "no sequence": ((OUT.sum(), [LSE]), TypeError, "outs must be a sequence of tensors"),
    "another number": (([OUT, OUT], [LSE]), ValueError, "lses"),
    "another type": (([OUT, OUT.double()], [LSE, LSE]), TypeError, "outs"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    arguments, error, message = BAD[name]
    with pytest.raises(error, match=message):
        at.merge_attention_states(*arguments)


def test_there_is_no_torch_func():
    outs, lses = torch.randn(5, 2, 4, 2, 8), torch.randn(5, 2, 2, 4)
    with pytest.raises(RuntimeError, match="Batching rule not implemented"):
        torch.func.vmap(at.merge_attention_states)(outs, lses)
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: at.merge_attention_states(x, lses[0])[0].sum())(outs[0])
