"""Terms that are added to logits: biases by the points of a grid, with gradients, and slopes, which have none."""

import numpy as np
import pytest
from reference_terms import points

import attnmask

torch = pytest.importorskip("torch")
pytest.importorskip("attnmask.torch")

import attnmask.torch  # noqa: E402

attend = attnmask.torch.flash_attention


def drawn(*shape):
    return torch.from_numpy(np.random.default_rng(len(shape)).standard_normal(shape))


def plain(query, key, value, grid):
    places = torch.from_numpy(points(query.shape[1], key.shape[1], [0], grid.shape[1:])[0])
    logits = torch.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5 + grid.flatten(1)[:, places]
    return torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), value)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("tokens", "shape"), [(49, (13, 13)), (130, (19, 25)), (6, (1, 11)), (6, (11, 1))])
def test_gradients(tokens, shape, compiled):
    inputs = [drawn(2, tokens, 3, 8), drawn(2, tokens, 3, 8), drawn(2, tokens, 3, 8), drawn(3, *shape)]
    inputs = [x.requires_grad_() for x in inputs]
    call = torch.compile(lambda *x: attend(*x[:3], grid_bias=x[3]), fullgraph=True) if compiled else None
    out = call(*inputs) if call else attend(*inputs[:3], grid_bias=inputs[3])
    right = plain(*inputs)
    torch.testing.assert_close(out, right, rtol=0, atol=1e-12)
    dout = torch.randn_like(out)
    for one, other in zip(
        torch.autograd.grad(out, inputs, dout), torch.autograd.grad(right, inputs, dout), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def test_vmap_of_gradients():
    query, grids = drawn(2, 12, 2, 8), drawn(3, 2, 5, 7)
    slope = torch.func.grad(lambda grid: attend(query, query, query, grid_bias=grid).square().sum())
    together = torch.func.vmap(slope)(grids)
    torch.testing.assert_close(together, torch.stack([slope(grid) for grid in grids]), rtol=0, atol=1e-13)


def test_half_precision():
    inputs = [drawn(4, 49, 2, 16) for _ in "qkv"] + [drawn(2, 13, 13)]
    narrow = [x.bfloat16().requires_grad_() for x in inputs]
    wide = [x.detach().double().requires_grad_() for x in narrow]
    out, right = attend(*narrow[:3], grid_bias=narrow[3]), plain(*wide)
    torch.testing.assert_close(out.double(), right, rtol=0, atol=0.03)
    out.square().sum().backward()
    right.square().sum().backward()
    size = wide[3].grad.abs().max().item()
    assert narrow[3].grad.dtype == torch.bfloat16
    torch.testing.assert_close(narrow[3].grad.double(), wide[3].grad, rtol=0, atol=0.03 * size)


def test_what_to_write_for_the_table_of_swin():
    """The hint is code of PyTorch, and right."""
    x, table = torch.zeros(1, 9, 2, 8), torch.arange(50.0).reshape(25, 2)
    with pytest.raises(ValueError, match="grid_bias must be") as raised:
        attnmask.torch.flash_attention(x, x, x, grid_bias=table)
    code = str(raised.value).partition("; write ")[2].removesuffix(" for the table of Swin")
    assert torch.equal(eval(code, {"table": table, "h": 3, "w": 3})[0].flatten(), table[:, 0].flip(0))


@pytest.mark.parametrize("compiled", [False, True])
def test_slopes_have_no_gradient(compiled):
    """An error where one would be missing, and none where slopes are constants."""
    x = torch.ones(1, 8, 4, 16, requires_grad=True)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0], requires_grad=True)

    def attend(slopes):
        return attnmask.torch.flash_attention(x, x, x, causal=True, alibi_slopes=slopes)

    function = torch.compile(attend, backend="aot_eager") if compiled else attend
    with pytest.raises(RuntimeError, match=r"no gradient of alibi_slopes: write alibi_slopes.detach\(\)"):
        function(slopes)
    with torch.no_grad():
        assert not function(slopes).requires_grad
    function(slopes.detach()).sum().backward()
    assert x.grad is not None
