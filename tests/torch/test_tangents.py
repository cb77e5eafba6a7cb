"""Forward mode: tangents of attention in PyTorch, beside its own attention in float64 and beside gradients."""

import numpy as np
import pytest

import attnmask

pytestmark = pytest.mark.levels("once")


@pytest.fixture
def inputs(torch):
    """Query, key and value, and their tangents."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 9, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8)) * 2
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def attend(*args, **given):
    return attnmask.torch.flash_attention(*args, **given)


def by_torch(torch, query, key, value):
    """PyTorch's formula, which has forward mode."""
    heads_first = (x.transpose(1, 2) for x in (query, key, value))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def jvp(torch, function, arguments, tangents):
    return torch.func.jvp(function, tuple(arguments), tuple(tangents))[1]


def near(torch, got, expected, atol=1e-9):
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


def test_beside_pytorch(torch, inputs):
    got = torch.func.jvp(lambda *x: attend(*x, causal=True), tuple(inputs[:3]), tuple(inputs[3:]))
    expected = torch.func.jvp(lambda *x: by_torch(torch, *x), tuple(inputs[:3]), tuple(inputs[3:]))
    for a, b in zip(got, expected, strict=True):
        near(torch, a, b)


def test_dual_tensors(torch, inputs):
    from torch.autograd import forward_ad

    query, key, value, dquery, _, dvalue = inputs
    expected = jvp(torch, lambda q, v: attend(q, key, v, causal=True), (query, value), (dquery, dvalue))
    for wanting in (False, True):
        with forward_ad.dual_level():
            q = forward_ad.make_dual(query.clone().requires_grad_(wanting), dquery)
            v = forward_ad.make_dual(value, dvalue)
            out, lse = attend(q, key, v, causal=True, return_lse=True)
            out, lse = map(forward_ad.unpack_dual, (out, lse))
            near(torch, out.tangent, expected)
            assert lse.tangent.shape == (2, 4, 9)
            near(torch, out.primal.detach(), attend(query, key, value, causal=True))
        if wanting:
            out.primal.sum().backward()  # of the result, not of its tangent


def test_jacobians(torch, inputs):
    query, key, value = (x[:1, :3, :2] for x in inputs[:3])

    def some(*x):
        return attend(*x, causal=True)[0, 1]

    forward = torch.func.jacfwd(some, argnums=(0, 1, 2))(query, key, value)
    backward = torch.func.jacrev(some, argnums=(0, 1, 2))(query, key, value)
    for a, b in zip(forward, backward, strict=True):
        near(torch, a, b)
    learned = [x.clone().requires_grad_() for x in (query, key, value)]
    assert torch.autograd.gradcheck(attend, learned, check_forward_ad=True)


@pytest.mark.parametrize("shape", [(9, 9), (1, 4, 9, 9), (2, 1, 1, 9)])
def test_terms(torch, inputs, shape):
    """With a bias, sinks and a mask; central differences."""
    generator = torch.Generator().manual_seed(1)
    bias, dbias = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    sinks, dsinks = (torch.randn(4, 2, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = attnmask.torch.mask_tensors(attnmask.MaskInfo.causal(9))

    def call(bias, sinks):
        return attend(*inputs[:3], mask, bias=bias, softmax_aux=sinks, logits_soft_cap=2.0)

    got = jvp(torch, call, (bias, sinks), (dbias, dsinks))
    step = 1e-6
    ahead, behind = (call(bias + s * dbias, sinks + s * dsinks) for s in (step, -step))
    near(torch, got, (ahead - behind) / (2 * step), 1e-7)


@pytest.mark.parametrize("dims", [(0, 0, None), (None, 1, 0), (0, None, None)])
def test_vmap(torch, inputs, dims):
    def one(query, key, value):
        return jvp(torch, lambda q, k: attend(q, k, value), (query, key), (query, key))

    given = [x if dim is None else torch.stack([x, 2 * x], dim) for x, dim in zip(inputs, dims, strict=False)]
    got = torch.func.vmap(one, in_dims=dims)(*given)
    for i in range(2):
        each = [x if dim is None else x.select(dim, i) for x, dim in zip(given, dims, strict=True)]
        near(torch, got[i], one(*each))


def test_vmap_of_tangents_alone(torch, inputs):
    """A bias that all calls share has a tangent in each of them, and the other way around."""
    bias, tangents = inputs[0][0, :, 0, :1], torch.stack([inputs[0][1, :, 0, :1]] * 2)

    def call(bias, tangent):
        return jvp(torch, lambda x: attend(*inputs[:3], bias=x), (bias,), (tangent,))

    right = call(bias, tangents[0])
    for given, dims in ((bias, tangents), (None, 0)), ((torch.stack([bias] * 2), tangents[0]), (0, None)):
        for got in torch.func.vmap(call, dims)(*given):
            near(torch, got, right)


@pytest.mark.parametrize(("name", "error"), [("float32", 1e-4), ("float16", 1e-2), ("bfloat16", 6e-2)])
def test_types(torch, inputs, name, error):
    narrow = [x.to(getattr(torch, name)) for x in inputs]
    got = jvp(torch, attend, narrow[:3], narrow[3:])
    assert got.dtype == getattr(torch, name)
    wide = [x.double() for x in narrow]
    near(torch, got.double(), jvp(torch, attend, wide[:3], wide[3:]), error * 3)


@pytest.mark.parametrize("more", [{"causal": True}, {"dropout_prob": 0.3, "dropout_seed": 2}])
def test_the_same_as_in_numpy(torch, inputs, more):
    out, tangent = torch.func.jvp(lambda q: attend(q, *inputs[1:3], **more), (inputs[0],), (inputs[3],))
    arrays = [x.numpy() for x in inputs]
    expected = attnmask.flash_attention_jvp(*arrays[:3], arrays[3], **more)
    for one, other in zip((out, tangent), expected, strict=True):
        np.testing.assert_array_equal(one.numpy(), other)


def test_what_has_no_tangent_is_named(torch, inputs):
    numbers = torch.randn(4, 3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="relative_bias must have no tangent"):
        jvp(torch, lambda x: attend(*inputs[:3], relative_bias=x), (numbers,), (numbers,))
    grid = torch.randn(4, 7, 7, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="grid_bias must have no tangent"):
        jvp(torch, lambda x: attend(*inputs[:3], grid_bias=x), (grid,), (grid,))
    with pytest.raises(RuntimeError, match="alibi_slopes must have no tangent"):
        jvp(torch, lambda x: attend(*inputs[:3], alibi_slopes=x[:, 0]), (numbers,), (numbers,))
