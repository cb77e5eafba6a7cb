"""Second derivatives of attention in PyTorch, in every way that it has them, beside dense attention in float64."""

import itertools

import numpy as np
import pytest
import reference_flash as ref
from derivative_cases import INPUTS, LENGTHS, TERMS, drawn, terms
from derivative_ways import (
    WAYS,
    double_backward,
    forward_over_reverse,
    gradients,
    loss,
    near,
    reverse_over_forward,
    reverse_over_reverse,
)

import attnmask

MAIN = WAYS[:3]  # each has rules of its own
pytestmark = pytest.mark.levels("once")


def attend(*inputs, **given):
    """The result and its logsumexp."""
    return attnmask.torch.flash_attention(*inputs, return_lse=True, **given)


def dense(query, key, value, live=True, bias=None, cap=None, sinks=None, keep=True, gain=1.0):
    """The same in PyTorch's own operations; `live` and `keep` are [B, H, Tq, Tk]."""
    import torch

    key, value = (x.repeat_interleave(query.shape[-2] // x.shape[-2], -2) for x in (key, value))
    logits = torch.einsum("...qhd,...khd->...hqk", query, key) * query.shape[-1] ** -0.5
    live = torch.as_tensor(live).expand(logits.shape)
    logits = logits if bias is None else logits + torch.where(live, bias, 0)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    sinks = torch.zeros(logits.shape[-3], 0) if sinks is None else sinks
    sinks = sinks[:, None].expand(*logits.shape[:-1], sinks.shape[-1]).to(logits.dtype)
    some = live.any(-1) | (sinks.shape[-1] > 0)
    lse = torch.cat([torch.where(live, logits, -1e30), sinks], -1).logsumexp(-1)
    lse = torch.where(some, lse, 0)
    shares = torch.where(live, torch.exp(torch.where(live, logits, 0) - lse[..., None]), 0)
    shares = torch.where(torch.as_tensor(keep), shares * gain, 0)
    out = torch.einsum("...hqk,...khd->...qhd", shares, value)
    return out, torch.where(some, lse, -torch.inf)


def drawn_tensors(torch, **sizes):
    """Inputs and a direction."""
    rng = np.random.default_rng(1)
    return [[torch.from_numpy(x) for x in drawn(rng, np.float64, **sizes).values()] for _ in range(2)]


def compare(torch, ways, sizes, given, right):
    for way in ways:
        got, exact = (
            way(torch, lambda *x, f=f, more=more: f(*x, **more), *drawn_tensors(torch, **sizes))
            for f, more in ((attend, given), (dense, right))
        )
        near(torch, got, exact)


SMALL = {"queries": 7, "keys": 9, "depths": (8, 5)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("heads", [(1, 1), (4, 2)])
def test_every_way(torch, way, heads):
    compare(torch, [way], SMALL | {"heads": heads}, {}, {})


@pytest.mark.parametrize("lengths", [x for x in LENGTHS if 0 not in x])
def test_lengths(torch, lengths):
    sizes = dict(zip(("queries", "keys"), lengths, strict=True)) | {"depths": (8, 5), "batch": 1}
    compare(torch, MAIN, sizes, {}, {})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lengths", [(0, 3), (3, 0)])
def test_without_tokens(torch, way, lengths):
    inputs, along = drawn_tensors(torch, queries=lengths[0], keys=lengths[1])
    for x in way(torch, attend, inputs, along):
        assert not x.any()


@pytest.mark.parametrize("names", [*itertools.combinations(TERMS, 2)], ids="-".join)
def test_terms_by_pairs(torch, names):
    shape = 2, 4, 7, 9
    given, right = terms(np.random.default_rng(2), names, np.float64, *shape)
    limits = {x: right[x] for x in ("causal", "causal_offset", "sliding_window") if x in right}
    bias = right.get("bias", np.zeros(shape))
    exact = {
        "live": torch.from_numpy(ref.live_pairs(shape, bias=bias, **limits)),
        "bias": torch.from_numpy(np.broadcast_to(bias, shape).copy()),
        "cap": right.get("logits_soft_cap"),
        "keep": torch.from_numpy(np.broadcast_to(right.get("keep", True), shape).copy()),
        "gain": 1 / (1 - right.get("dropout_prob", 0)),
        "sinks": torch.from_numpy(right["softmax_aux"]) if "softmax_aux" in right else None,
    }
    given = {x: torch.from_numpy(y) if isinstance(y, np.ndarray) else y for x, y in given.items()}
    compare(torch, MAIN, SMALL, given, exact)


IDS = np.array([[0, 0, 0, 1, 1, 2, 3], [0, 1, 1, 1, 1, -1, 4]]), np.array([[0, 0, 0, 1, 1, 2, 2, 5, 5]] * 2)
ALLOWED = ref.live_pairs((2, 4, 7, 9), q_segment_ids=IDS[0], kv_segment_ids=IDS[1])
MASKS = {
    "segments": lambda torch: {"q_segment_ids": IDS[0], "kv_segment_ids": IDS[1]},
    "MaskInfo": lambda torch: {"attention_mask": attnmask.MaskInfo.from_segments(*IDS)},
    "tensors": lambda torch: {
        "attention_mask": attnmask.torch.mask_tensors(attnmask.MaskInfo.from_segments(*IDS))
    },
    "array": lambda torch: {"attention_mask": torch.from_numpy(ALLOWED)},
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(torch, name):
    """Rows without keys, too; and NaN where no pair needs a number."""
    compare(torch, WAYS, SMALL, MASKS[name](torch), {"live": torch.from_numpy(ALLOWED)})
    (query, key, value), along = drawn_tensors(torch, **SMALL)
    right = double_backward(torch, lambda *x: attend(*x, **MASKS[name](torch)), (query, key, value), along)
    key, value = (x.clone() for x in (key, value))
    key[:, 7:], value[:, 7:] = torch.nan, torch.nan
    got = double_backward(torch, lambda *x: attend(*x, **MASKS[name](torch)), (query, key, value), along)
    near(torch, got, right, 0)


def test_packed(torch):
    starts = torch.tensor([0, 3, 3, 7]), torch.tensor([0, 4, 6, 9])
    ids = [np.repeat(range(3), np.diff(x))[None] for x in starts]
    live = torch.from_numpy(ref.live_pairs((1, 4, 7, 9), q_segment_ids=ids[0], kv_segment_ids=ids[1]))
    inputs, along = ([x[0] for x in part] for part in drawn_tensors(torch, **SMALL, batch=1))
    limits = {"cum_seqlens_q": starts[0], "cum_seqlens_k": starts[1]}
    for way in WAYS:
        got = way(torch, lambda *x: attend(*x, **limits), inputs, along)
        near(torch, got, way(torch, lambda *x: dense(*x, live=live[0]), inputs, along))


def test_several_batch_axes(torch):
    inputs, along = (
        [x.unflatten(0, (2, 3)) for x in part] for part in drawn_tensors(torch, **SMALL, batch=6)
    )
    for way in WAYS:
        near(torch, way(torch, attend, inputs, along), way(torch, dense, inputs, along))


@pytest.mark.parametrize("places", [x for n in (1, 2) for x in itertools.combinations(range(3), n)])
def test_some_inputs(torch, places):
    inputs, along = drawn_tensors(torch, **SMALL)

    def some(function):
        def call(*moved):
            by_place = dict(zip(places, moved, strict=True))
            return function(*(by_place.get(i, x) for i, x in enumerate(inputs)))

        return call

    for way in WAYS:
        got, exact = (
            way(torch, some(f), *([x[i] for i in places] for x in (inputs, along))) for f in (attend, dense)
        )
        near(torch, got, exact)


def test_hessians(torch):
    inputs, _ = drawn_tensors(torch, **SMALL, batch=1)

    def hessians(f):
        for outer in torch.func.jacfwd, torch.func.jacrev:
            yield from outer(torch.func.jacrev(lambda *x: loss(f(*x)), argnums=(0, 2)), argnums=(1, 2))(
                *inputs
            )

    for got, exact in zip(hessians(attend), hessians(dense), strict=True):
        near(torch, got, exact)


@pytest.mark.parametrize("way", [forward_over_reverse, reverse_over_forward, reverse_over_reverse])
@pytest.mark.parametrize("dims", [(0, 0, None), (None, 1, 0), (0, None, None)])
@pytest.mark.parametrize("mask", [None, [[0, 0, 1, 1, 1, 2, 2]] * 2], ids=["in one call", "one by one"])
def test_vmap(torch, way, dims, mask):
    """Of two calls; those with masks of rows are computed one by one."""
    inputs, along = drawn_tensors(torch, **SMALL | {"keys": 7})
    mask = mask and attnmask.MaskInfo.from_segments(mask)
    inputs = [x if dim is None else torch.stack([x, x / 2], dim) for x, dim in zip(inputs, dims, strict=True)]

    def one(*inputs):
        return tuple(way(torch, lambda *x: attend(*x, attention_mask=mask), inputs, along))

    got = torch.func.vmap(one, in_dims=dims)(*inputs)
    for i in range(2):
        each = [x if dim is None else x.select(dim, i) for x, dim in zip(inputs, dims, strict=True)]
        near(torch, [x[i] for x in got], one(*each))


def test_gradgradcheck(torch):
    inputs, _ = drawn_tensors(torch, queries=3, keys=4, heads=(2, 1), depths=(3, 2), batch=1)
    learned = [x.requires_grad_() for x in inputs]
    for more in {}, {"return_lse": True, "causal": True, "logits_soft_cap": 2.0}:

        def call(*x, more=more):
            return attnmask.torch.flash_attention(*x, **more)

        assert torch.autograd.gradgradcheck(call, learned, check_fwd_over_rev=True, check_rev_over_rev=True)


@pytest.mark.parametrize(("name", "error"), [("float32", 1e-4), ("float16", 1e-2), ("bfloat16", 6e-2)])
@pytest.mark.parametrize("way", WAYS)
def test_types(torch, way, name, error):
    narrow = [[x.to(getattr(torch, name)) for x in part] for part in drawn_tensors(torch, **SMALL)]
    got = way(torch, lambda *x: tuple(y.double() for y in attend(*x)), *narrow)
    assert all(x.dtype == getattr(torch, name) for x in got)
    wide = [[x.double() for x in part] for part in narrow]
    near(torch, [x.double() for x in got], way(torch, dense, *wide), error)


@pytest.mark.parametrize("way", WAYS)
def test_merging(torch, way):
    """Attention over parts of the keys; some have none."""
    inputs, along = drawn_tensors(torch, **SMALL)
    live = torch.from_numpy(ALLOWED)

    def merged(query, key, value):
        parts = (slice(0, 2), slice(2, 2), slice(2, 9))
        results = [
            attend(query, key[:, part], value[:, part], attention_mask=live[..., part]) for part in parts
        ]
        return attnmask.torch.merge_attention_states(*zip(*results, strict=True))

    got = way(torch, merged, inputs, along)
    near(torch, got, way(torch, lambda *x: dense(*x, live=live), inputs, along))


def test_first_derivatives_are_the_same(torch):
    """To the bit, whether a graph is made of them or not."""
    inputs = [x.float().requires_grad_() for x in drawn_tensors(torch, **SMALL)[0]]
    first, again = (torch.autograd.grad(loss(attend(*inputs)), inputs, create_graph=x) for x in (False, True))
    assert all(map(torch.equal, first, again))
    (out, lse), grads = attend(*inputs), gradients(torch, attend, [x.detach() for x in inputs])
    of_results = torch.autograd.grad(loss((out, lse)), (out, lse))
    arrays = [x.detach().numpy() for x in (*inputs, out, lse, *of_results)]
    right = attnmask.flash_attention_bwd(arrays[5], *arrays[:5], dlse=arrays[6])
    for one, other, exact in zip(first, grads, right, strict=False):
        np.testing.assert_array_equal(one.numpy(), exact)
        np.testing.assert_array_equal(other.numpy(), exact)


def test_the_operator(torch):
    inputs, along = drawn_tensors(torch, **SMALL)
    out, lse = attend(*inputs)
    given = dict(zip(INPUTS, inputs, strict=True)) | {"attention_mask": None, "causal": True}
    operands = attnmask.torch._attention._attend.operands.of(given)
    operator = torch.ops.attnmask.flash_attention_bwd_vjp.default
    for cotangents in along, [None, along[1], None]:
        for dlse in lse, None:
            call = (*cotangents, out, dlse, out, lse, *operands)
            torch.library.opcheck(operator, call, test_utils=("test_schema", "test_faketensor"))


# What there is not


def hessian(torch, loss, x):
    return torch.func.hessian(loss)(x)


def penalty(torch, loss, x):
    x = x.requires_grad_()
    (first,) = torch.autograd.grad(loss(x), x, create_graph=True)
    first.square().sum().backward()


def of_tangent(torch, loss, x):
    return torch.func.grad(lambda x: torch.func.jvp(loss, (x,), (x,))[1])(x)


LEARNED = {"bias": (4, 7, 9), "softmax_aux": (4, 2), "relative_bias": (4, 3), "grid_bias": (4, 5, 5)}


@pytest.mark.parametrize("name", LEARNED)
def test_no_second_derivatives_of_terms(torch, name):
    inputs, _ = drawn_tensors(torch, **SMALL)
    term = torch.randn(LEARNED[name], dtype=torch.float64)
    message = rf"flash_attention has no second derivative with {name}: .* write {name}\.detach\(\)"

    def slope(x, y):
        return loss(attend(x, *inputs[1:], **{name: y}))

    with pytest.raises(RuntimeError, match=message):
        penalty(torch, lambda x: slope(x, term.clone().requires_grad_()), inputs[0])
    with pytest.raises(RuntimeError, match=message):
        penalty(torch, lambda x: slope(inputs[0].detach(), x), term.clone())
    x = inputs[0].detach()
    for outer, places in itertools.product((torch.func.jacfwd, torch.func.jacrev), ((0, 1), (1, 0), (1, 1))):
        if outer is torch.func.jacfwd and name in ("relative_bias", "grid_bias") and places[0] == 1:
            continue  # which has no tangent
        with pytest.raises(RuntimeError, match=message):
            outer(torch.func.grad(slope, places[1]), places[0])(x, term)
    penalty(torch, lambda x: slope(x, term), x)


def test_what_there_is_not_is_named(torch):
    inputs, _ = drawn_tensors(torch, **SMALL)
    x = inputs[0]

    def slope(x, **more):
        return loss(attend(x, *inputs[1:], **more))

    for make in hessian, penalty, of_tangent:
        with pytest.raises(ValueError, match="normalize_output must be True, got False; flash_attention_"):
            make(torch, lambda x: slope(x, normalize_output=False), x.clone())
    hessian_sum = lambda x: torch.func.hessian(slope)(x).sum()  # noqa: E731
    reverse_sum = lambda x: torch.func.jacrev(torch.func.jacrev(slope))(x).sum()  # noqa: E731
    with pytest.raises(RuntimeError, match="flash_attention has no third derivative"):
        torch.func.grad(hessian_sum)(x)
    for outer in torch.func.grad, torch.func.jacfwd:
        with pytest.raises(RuntimeError, match="flash_attention has no third derivative"):
            outer(reverse_sum)(x)
    with pytest.raises(RuntimeError, match=r"flash_attention has no .* write jacfwd\(jacrev\(\.\.\.\)\)"):
        torch.func.jacfwd(torch.func.jacfwd(slope))(x)
