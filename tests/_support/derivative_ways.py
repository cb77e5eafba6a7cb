"""The ways in which PyTorch computes second derivatives, each along a direction of the inputs."""


def loss(results):
    """A number, from a result or several; the logsumexp of rows without keys is minus infinity."""
    out, *others = results if isinstance(results, tuple) else (results,)
    return out.square().sum() + sum((x.isfinite() * x.nan_to_num(neginf=0).sin()).sum() for x in others)


def gradients(torch, function, inputs):
    return torch.func.grad(lambda *x: loss(function(*x)), argnums=(*range(len(inputs)),))(*inputs)


def double_backward(torch, function, inputs, along):
    inputs = [x.clone().requires_grad_() for x in inputs]
    first = torch.autograd.grad(loss(function(*inputs)), inputs, create_graph=True)
    sum((x * y).sum() for x, y in zip(first, along, strict=True)).backward()
    return [x.grad for x in inputs]


def forward_over_reverse(torch, function, inputs, along):
    return torch.func.jvp(lambda *x: gradients(torch, function, x), tuple(inputs), tuple(along))[1]


def reverse_over_forward(torch, function, inputs, along):
    def tangents(along, *inputs):
        return torch.func.jvp(lambda *x: loss(function(*x)), inputs, along)[1].square()

    argnums = (*range(len(inputs) + 1),)
    of_tangents, *of_inputs = torch.func.grad(tangents, argnums)(tuple(along), *inputs)
    return *of_tangents, *of_inputs


def reverse_over_reverse(torch, function, inputs, along):
    def slope(*inputs):
        return sum((x * y).sum() for x, y in zip(gradients(torch, function, inputs), along, strict=True))

    return torch.func.grad(slope, argnums=(*range(len(inputs)),))(*inputs)


def dual_tensors(torch, function, inputs, along):
    from torch.autograd import forward_ad

    with forward_ad.dual_level():
        pairs = zip(inputs, along, strict=True)
        duals = [forward_ad.make_dual(x.clone().requires_grad_(), y) for x, y in pairs]
        first = torch.autograd.grad(loss(function(*duals)), duals)
        return [forward_ad.unpack_dual(x).tangent for x in first]


WAYS = (double_backward, forward_over_reverse, reverse_over_forward, reverse_over_reverse, dual_tensors)


def near(torch, got, exact, atol=1e-9):
    for one, other in zip(got, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol * max(1, abs(other).max().item()))
