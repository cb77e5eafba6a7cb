"""attnmask under PyTorch's own attention, where PyTorch would compute its formula."""

import math

import pytest

import attnmask

_handed_back = pytest.importorskip("attnmask.torch._handed_back", exc_type=ImportError)

LEADS = {3: (4,), 4: (2, 4), 5: (2, 3, 4), 6: (2, 1, 3, 4)}
MASKS = {
    "none": None,
    "causal": None,
    "pairs": lambda torch, lead: torch.randn(7, 9),
    "one for all": lambda torch, lead: torch.randn(*[1] * len(lead), 7, 9),
    "keys of each row": lambda torch, lead: torch.randn(*lead[:-1], 1, 1, 9),
    "queries": lambda torch, lead: torch.randn(*lead, 7, 1),
    "all": lambda torch, lead: torch.randn(*lead, 7, 9),
    "rows without keys": lambda torch, lead: torch.randn(7, 9).masked_fill(dead(torch), -math.inf),
    "bool": lambda torch, lead: ~dead(torch),
}


@pytest.fixture
def installed(torch):
    with attnmask.torch.installed():
        yield


def attend(*tensors, **more):
    import torch

    return torch.nn.functional.scaled_dot_product_attention(*tensors, **more)


def dead(torch):
    """Return pairs that are masked out: a row of them, and others."""
    return (torch.arange(7) == 2)[:, None] | (torch.arange(9) > torch.arange(7)[:, None] + 3)


def results(torch, tensors, mask=None, seed=3, **more):
    torch.manual_seed(seed)
    out = attend(*tensors, attn_mask=mask, **more)
    learned = [*tensors, *([mask] if mask is not None and mask.requires_grad else [])]
    dout = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    return out, *torch.autograd.grad(out, learned, dout)


def problem(torch, lead, kv_heads=None, value_channels=8, kind="none", dtype=None):
    dtype = dtype or torch.float64
    kv_lead = (*lead[:-1], kv_heads or lead[-1])
    shapes = (*lead, 7, 8), (*kv_lead, 9, 8), (*kv_lead, 9, value_channels)
    mask = MASKS[kind] and MASKS[kind](torch, lead)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(dtype).requires_grad_()
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes], mask


def kept(torch, shape, chance, seed=3):
    """Return what dropout keeps of pairs [..., H, Tq, Tk] after `torch.manual_seed`."""
    torch.manual_seed(seed)
    number = int(torch.randint(2**62, (), dtype=torch.int64))
    four = (math.prod(shape[:-3]), *shape[-3:])
    return torch.from_numpy(attnmask.dropout_keep_mask(number, chance, four)).reshape(shape)


def formula(torch, tensors, mask, causal=False, scale=None, chance=0.0):
    """Return attention by its formula."""
    query, key, value = tensors
    key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    alive = torch.ones(logits.shape[-2:], dtype=torch.bool)
    if causal:
        alive = alive.tril()
    if mask is not None and mask.dtype == torch.bool:
        alive = alive & mask
    elif mask is not None:
        logits, alive = logits + mask, alive & (mask > -math.inf)
    weights = torch.where(alive, logits, -1e300).softmax(-1) * alive
    if chance:
        weights = weights * kept(torch, weights.shape, chance) / (1 - chance)
    return weights @ value


@pytest.mark.parametrize("chance", [0.0, 0.4])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("axes", LEADS)
@pytest.mark.parametrize("kind", MASKS)
def test_sdpa(torch, kind, axes, kv_heads, chance):
    """As the formula, in values, gradients and layout; and without dropout as PyTorch's own."""
    tensors, mask = problem(torch, LEADS[axes], kv_heads, 8 if axes % 2 else 5, kind)
    causal = kind == "causal"
    more = {"is_causal": causal, "scale": 0.3, "enable_gqa": kv_heads == 2}
    with attnmask.torch.installed():
        got = results(torch, tensors, mask, **more, dropout_p=chance)
        assert attnmask.torch.install_report() == (1, {})
        torch.manual_seed(3)
        with torch.no_grad():
            without = attend(*tensors, attn_mask=mask, **more, dropout_p=chance)
        assert attnmask.torch.install_report() == (2, {})
    assert got[0].is_contiguous()
    out = formula(torch, tensors, mask, causal, 0.3, chance)
    dout = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    learned = [*tensors, *([mask] if mask is not None and mask.requires_grad else [])]
    right = out, *torch.autograd.grad(out, learned, dout)
    for one, other in zip((*got, without), (*right, out), strict=True):
        torch.testing.assert_close(one, other)
    if not chance:
        for one, other in zip(got, results(torch, tensors, mask, **more), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("axes", [3, 4, 5])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_types(torch, dtype, axes):
    dtype = getattr(torch, dtype)
    tensors, mask = problem(torch, LEADS[axes], kind="pairs", dtype=dtype)
    got = results(torch, tensors, mask, dropout_p=0.2)
    wide = [x.detach().double().requires_grad_() for x in (*tensors, mask)]
    right = results(torch, wide[:3], wide[3], dropout_p=0.2)
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    for one, other in zip(got, right, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, **close)
    assert attnmask.torch.install_report() == (2, {})


@pytest.mark.usefixtures("installed")
def test_a_mask_of_other_type(torch):
    tensors, mask = problem(torch, (2, 4), kind="pairs", dtype=torch.bfloat16)
    wide = mask.detach().float().requires_grad_()
    for one, other in zip(
        results(torch, tensors, wide), results(torch, tensors, wide.bfloat16()), strict=False
    ):
        torch.testing.assert_close(one.float(), other.float(), rtol=0.02, atol=0.02)
    attend(*tensors, attn_mask=wide).float().sum().backward()
    assert wide.grad.dtype == torch.float32


@pytest.mark.usefixtures("installed")
def test_dropout(torch):
    """PyTorch's generator decides it, and nothing else."""
    query = torch.zeros(2, 4, 64, 8)
    value = torch.eye(64).expand(2, 4, 64, 64)
    torch.manual_seed(1)
    first, other = (attend(query, query, value, dropout_p=0.25) for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(first, attend(query, query, value, dropout_p=0.25))
    assert not torch.equal(first, other)
    dropped = first == 0
    assert abs(dropped.double().mean() - 0.25) < 0.01
    torch.testing.assert_close(first[~dropped], torch.full_like(first[~dropped], 1 / (64 * 0.75)))
    before = torch.get_rng_state()
    attend(query, query, value)
    assert torch.equal(before, torch.get_rng_state())
    state = torch.random.get_rng_state()
    leaf = query.clone().requires_grad_()
    through = torch.utils.checkpoint.checkpoint(
        lambda x: attend(x, x, value, dropout_p=0.25), leaf, use_reentrant=False
    )
    torch.random.set_rng_state(state)
    assert torch.equal(through, attend(query, query, value, dropout_p=0.25))
    through.square().sum().backward()
    assert leaf.grad is not None


SHAPES = [(2, 4, 0, 8), (0, 4, 5, 8), (2, 0, 5, 8), (2, 4, 5, 0), (0, 5, 8), (2, 0, 8), (2, 0, 3, 5, 8)]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("chance", [0.0, 0.3])
@pytest.mark.parametrize("shape", SHAPES)
def test_empty(torch, shape, chance):
    """PyTorch answers what is empty; its formula does not."""
    tensors = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    query = torch.randn(*shape[:-2], 3, shape[-1], requires_grad=True)
    mask = torch.zeros(3, shape[-2], requires_grad=True)
    for given in (tensors, [query, *tensors[1:]]):
        assert attend(*given, dropout_p=chance).shape == given[0].shape
    assert attnmask.torch.install_report() == (0, {})
    out, _ = torch.ops.aten._scaled_dot_product_attention_math(query, *tensors[1:], mask, chance)
    grads = torch.autograd.grad(out.sum(), [query, *tensors[1:], mask])
    assert not any(x.any() for x in (out, *grads))
    assert [x.shape for x in (out, *grads)] == [x.shape for x in (query, query, *tensors[1:], mask)]
    assert attnmask.torch.install_report() == (1, {})


def seeded(torch, *tensors, **more):
    """Attend with the same dropout in each call."""
    torch.manual_seed(0)
    query, key, value, *mask = tensors
    return attend(query, key, value, attn_mask=mask[0] if mask else None, **more)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("chance", "learns"), [(0.0, True), (0.4, False), (0.4, True)])
@pytest.mark.parametrize("lead", [(4,), (1, 2), (1, 1, 2)])
def test_derivatives(torch, lead, chance, learns):
    """By finite differences: gradients, batched gradients, and gradients of gradients."""
    tensors = [torch.randn(*lead, tokens, 3, dtype=torch.float64) for tokens in (3, 4, 4)]
    tensors += [torch.randn(3, 4, dtype=torch.float64)] * learns
    given = [x.requires_grad_() for x in tensors]
    check = torch.autograd
    assert check.gradcheck(lambda *x: seeded(torch, *x, dropout_p=chance), given, check_batched_grad=True)
    assert check.gradgradcheck(lambda *x: seeded(torch, *x, dropout_p=chance), given)
    if learns and chance:
        assert check.gradgradcheck(
            lambda *x: seeded(torch, *x, dropout_p=chance), given, check_batched_grad=True
        )


@pytest.mark.usefixtures("installed")
def test_second_derivatives_with_fewer_key_heads(torch):
    """And with a mask that has second derivatives, which go on to third ones."""
    tensors, mask = problem(torch, (2, 4), 2, 5, "pairs")

    def third(out):
        (first,) = torch.autograd.grad(out.sin().sum(), mask, create_graph=True)
        (second,) = torch.autograd.grad(first.sin().sum(), mask, create_graph=True)
        return torch.autograd.grad(second.sin().sum(), [*tensors, mask])

    right = third(formula(torch, tensors, mask))
    for one, other in zip(third(attend(*tensors, attn_mask=mask, enable_gqa=True)), right, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("installed")
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:There is a performance drop")
@pytest.mark.parametrize("axes", [3, 4, 5])
def test_where_others_see_the_call(torch, axes):
    """Graphs, transforms and modes get PyTorch's own results."""
    tensors, mask = problem(torch, LEADS[axes], kind="pairs")
    call = lambda *x: attend(*x[:3], attn_mask=x[3])  # noqa: E731
    right = call(*tensors, mask)
    for backend in ("aot_eager", "inductor"):
        compiled = torch.compile(call, backend=backend, fullgraph=True)
        got = compiled(*tensors, mask)
        torch.testing.assert_close(got, right)
        for one, other in zip(
            torch.autograd.grad(got.sin().sum(), [*tensors, mask]),
            torch.autograd.grad(right.sin().sum(), [*tensors, mask], retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(one, other)
        dropped = torch.compile(lambda *x: attend(*x, dropout_p=0.5), backend="aot_eager", fullgraph=True)(
            *tensors
        )
        assert dropped.shape == right.shape
    plain = [x.detach() for x in (*tensors, mask)]
    (grad,) = torch.autograd.grad(right.sum(), mask, retain_graph=True)
    by_transform = torch.func.grad(lambda x: call(*plain[:3], x).sum())(plain[3])
    torch.testing.assert_close(by_transform, grad)
    mapped = torch.func.vmap(call, in_dims=(0, 0, 0, None))(*(x[None] for x in plain[:3]), plain[3])
    torch.testing.assert_close(mapped[0], right)
    _, moved = torch.func.jvp(lambda x: attend(x, *plain[1:3], dropout_p=0.0), (plain[0],), (plain[0],))
    assert moved.shape == right.shape
    exported = torch.export.export(Module(torch), tuple(plain), strict=False)
    torch.testing.assert_close(exported.module()(*plain), right)
    assert not any("attnmask" in str(node.target) for node in exported.graph.nodes)
    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled = torch.compile(lambda *x: torch.autograd.grad(call(*x).sum(), x[3])[0], backend="eager")
        torch.testing.assert_close(compiled(*tensors, mask), grad)


def Module(torch):
    class Attention(torch.nn.Module):
        def forward(self, query, key, value, mask):
            return attend(query, key, value, attn_mask=mask)

    return Attention()


@pytest.mark.usefixtures("installed")
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compiled_backward(torch):
    """Of a call outside of graphs, by PyTorch's compiler of gradients."""
    tensors, mask = problem(torch, (2, 4), kind="pairs")
    right = results(torch, tensors, mask)[1:]
    out = attend(*tensors, attn_mask=mask)
    dout = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    compile_ = lambda graph: torch.compile(graph, backend="eager")  # noqa: E731
    with torch._dynamo.compiled_autograd._enable(compile_):
        out.backward(dout)
    for x, other in zip((*tensors, mask), right, strict=True):
        torch.testing.assert_close(x.grad, other)


# The report

ROWS = {
    "mode": lambda torch, q: attend(q, q, q, dropout_p=0.1),
    "subclass": lambda torch, q: attend(torch.Tensor._make_subclass(Sub(torch), q), q, q, dropout_p=0.1),
    "sdpa_kernel": lambda torch, q: attend(q, q, q),
    "types": lambda torch, q: attend(*[torch.imag(torch.complex(q, -q).conj())] * 3),
    "equally many axes": lambda torch, q: attend(q[0, 0], q[0, 0], q[0, 0]),
    "expand them": lambda torch, q: attend(q, q[:1], q[:1]),
    "enable_gqa": lambda torch, q: attend(q[:, :1], q, q),
    "head_dim": lambda torch, q: attend(q, q[..., :1], q, dropout_p=0.1),
    "attn_mask": lambda torch, q: attend(q, q, q, attn_mask=torch.zeros((), requires_grad=True)),
    "dropout_p": lambda torch, q: attend(q, q, q, dropout_p=1.0),
    "batched": lambda torch, q: torch.autograd.grad(
        attend(q.requires_grad_(), q, q, dropout_p=0.1), q, torch.ones(1, *q.shape), is_grads_batched=True
    ),
    "transforms": lambda torch, q: torch.func.grad(lambda x: attend(x, x, x, dropout_p=0.1).sum())(q),
}


def Sub(torch):
    return type("Sub", (torch.Tensor,), {})


@pytest.mark.parametrize("row", ROWS)
def test_reasons(torch, row):
    from torch.utils.flop_counter import FlopCounterMode

    query = torch.randn(2, 4, 5, 8)
    within = {
        "mode": lambda: FlopCounterMode(display=False),
        "sdpa_kernel": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    }.get(row, torch.enable_grad)
    with attnmask.torch.installed():
        with within():
            try:
                ROWS[row](torch, query)
            except RuntimeError:
                assert row == "head_dim"
        found = attnmask.torch.install_report()
    ((reason, count),) = found.handed_back.items()
    assert row in reason
    assert count == 1
    assert found.served == (row == "batched")
    assert str(found) == f"{found.served:9}  calls ran on attnmask\n{count:9}  {reason}"


def test_every_reason_is_tested():
    reasons = [reason for reason in _handed_back.counts if reason]
    assert len(reasons) == len(ROWS)
    for row, reason in zip(ROWS, reasons, strict=True):
        assert row in reason
        assert ": " in reason or row == "head_dim"


def test_report(torch):
    """It begins anew when attnmask is installed, and stays when it is uninstalled."""
    query = torch.randn(2, 4, 5, 8)
    for count in (1, 3):
        attnmask.torch.install()
        assert attnmask.torch.install_report() == (0, {})
        for _ in range(count):
            attend(query, query, query)
            attend(query[0], query[0], query[0], dropout_p=0.1)
        attnmask.torch.install()  # which changes nothing
        assert attnmask.torch.install_report().served == 2 * count
        attnmask.torch.uninstall()
        attend(query, query, query)
        attend(query, query, query, dropout_p=0.1)
        assert attnmask.torch.install_report() == (2 * count, {})
    with attnmask.torch.installed():
        compiled = torch.compile(lambda x: attend(x, x, x), backend="aot_eager", fullgraph=True)
        for _ in range(3):
            compiled(query)
    assert attnmask.torch.install_report() == (3, {})


# Modules of PyTorch


@pytest.mark.usefixtures("installed")
def test_multihead_attention(torch):
    """In training, with dropout and a float mask that learns."""
    layer = torch.nn.MultiheadAttention(16, 2, dropout=0.3, batch_first=True).double()
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    mask = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)

    def out(mask):
        torch.manual_seed(4)
        return layer(x, x, x, attn_mask=mask, need_weights=False)[0].sin().sum()

    along = torch.randn_like(mask)
    (grad,) = torch.autograd.grad(out(mask), mask)
    assert attnmask.torch.install_report() == (1, {})
    with torch.no_grad():
        slope = (out(mask + 1e-6 * along) - out(mask - 1e-6 * along)) / 2e-6
    torch.testing.assert_close((grad * along).sum(), slope, rtol=1e-6, atol=1e-8)
    layer.eval()
    got = torch.autograd.grad(out(mask), [mask, *layer.parameters()])
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        right = torch.autograd.grad(out(mask), [mask, *layer.parameters()])
    for one, other in zip(got, right, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("installed")
def test_encoder_in_training(torch):
    """It learns, with dropout, and the same again from the same seed."""

    def losses():
        torch.manual_seed(2)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        x, target = torch.randn(4, 6, 16), torch.randn(4, 6, 16)
        padding = torch.arange(6) >= torch.tensor([6, 4, 5, 6])[:, None]
        optimizer = torch.optim.Adam(layer.parameters(), 0.01)
        found = []
        for _ in range(30):
            optimizer.zero_grad()
            loss = (layer(x, src_key_padding_mask=padding) - target)[~padding].square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    one, other = losses(), losses()
    assert one == other
    assert one[-1] < 0.8 * one[0]
    assert attnmask.torch.install_report() == (60, {})
