"""Gradients of sixteen bits through PyTorch do not suffer from the rounding of the result, whatever way they come."""

import numpy as np
import pytest
from environment import multiplies_bf16

import attnmask

# The root of the mean square of the error of the query's gradient: by products of float32, and of the type. With a
# rounded result it is 0.0025, 0.0031 and 0.0003.
LIMITS = {"bfloat16": (0.0014, 0.0024), "float16": (0.00018, 0.00018)}
MORE = {"causal": True}


@pytest.fixture(params=LIMITS)
def given(torch, request):
    """Query, key, value and the gradient of the result."""
    numbers = np.random.default_rng(0).standard_normal((4, 16, 64, 4, 32))
    numbers[1:] = numbers[0]
    return list(torch.from_numpy(numbers).to(getattr(torch, request.param)))


def attend(*tensors):
    return attnmask.torch.flash_attention(*tensors, **MORE)


def operands(tensors, **more):
    """Those of the operators."""
    names = "query", "key", "value"
    return attnmask.torch._attention._attend.operands.of(
        dict(zip(names, tensors, strict=True)) | {"attention_mask": None} | more
    )


def step(torch, function, given):
    """The gradients of query, key and value by one pass through `function`."""
    *tensors, dout = given
    tensors = [x.detach().requires_grad_() for x in tensors]
    function(*tensors).backward(dout)
    return [x.grad for x in tensors]


def by_vjp(torch, given, more=MORE):
    arrays = [attnmask._common.arguments.as_array(x, "x") for x in given]
    return attnmask.flash_attention_vjp(*arrays[:3], **more)[1](arrays[3])


def check(torch, got, given):
    """The bits are those of flash_attention_vjp."""
    for one, right in zip(got, by_vjp(torch, given), strict=False):
        assert np.array_equal(one.detach().float().numpy(), np.asarray(right, np.float32))


def test_how_far_they_are_off(torch, isa, given):
    exact = by_vjp(torch, [x.double() for x in given]).query
    got = step(torch, attend, given)
    check(torch, got, given)
    limits = LIMITS[str(given[0].dtype).split(".")[1]]
    rms = ((got[0].double().numpy() - exact) ** 2).mean() ** 0.5
    assert rms < limits[multiplies_bf16(isa)], rms


def test_through_the_operator(torch, given):
    def through(*tensors):
        return torch.ops.attnmask.flash_attention(*operands(tensors, **MORE))[0]

    check(torch, step(torch, through, given), given)


def test_twice(torch, given):
    """What is kept stays as it is."""
    *tensors, dout = given
    tensors = [x.detach().requires_grad_() for x in tensors]
    out = attend(*tensors)
    for _ in range(2):
        check(torch, torch.autograd.grad(out, tensors, dout, retain_graph=True), given)


def test_autocast(torch, given):
    if given[0].dtype != torch.bfloat16:
        pytest.skip("what PyTorch casts to")
    with torch.autocast("cpu"):
        got = step(torch, attend, [*(x.float() for x in given[:3]), given[3]])
    check(torch, got, given)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_operator_of_three_results(torch, dtype):
    operator = torch.ops.attnmask.flash_attention_wide.default
    tensors = [torch.randn(1, 5, 2, 8).to(getattr(torch, dtype)) for _ in range(3)]
    given = operands(tensors)
    out, lse, wide_out = operator(*given)
    assert (wide_out.dtype, wide_out.shape) == (torch.float32, out.shape)
    assert torch.equal(wide_out.to(out.dtype), out)
    assert torch.equal(lse, attnmask.torch.flash_attention(*tensors, return_lse=True)[1])
    assert not operator(*(x.requires_grad_() for x in given[:3]), *given[3:])[2].requires_grad


def test_ring(torch, given):
    """Of one process."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("needs gloo")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        got = step(torch, lambda *x: attnmask.torch.ring_attention(*x, **MORE), given)
    finally:
        distributed.destroy_process_group()
    check_near(torch, got, given)


def check_near(torch, got, given):
    """The error is what it is without a ring."""
    exact = by_vjp(torch, [x.double() for x in given])
    plain = by_vjp(torch, given)
    for one, other, right in zip(got, plain, exact[:3], strict=False):
        ours, least = (((np.asarray(x, float) - right) ** 2).mean() for x in (one.double(), other))
        assert ours < 1.01 * least
