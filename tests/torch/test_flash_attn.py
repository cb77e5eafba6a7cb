"""FlashAttention's functions on the CPU: beside the dense formula, beside attnmask.torch, in graphs, and installed."""

import inspect
import math

import pytest
from environment import import_paths, python

import attnmask

pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning")
OPTIONS = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
STARTS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
SIGNATURES = {  # what has no default, and the defaults
    "flash_attn_func": (("q", "k", "v"), OPTIONS),
    "flash_attn_kvpacked_func": (("q", "kv"), OPTIONS),
    "flash_attn_qkvpacked_func": (("qkv",), OPTIONS),
    "flash_attn_varlen_func": (("q", "k", "v", *STARTS), OPTIONS | {"block_table": None}),
    "flash_attn_varlen_kvpacked_func": (("q", "kv", *STARTS), OPTIONS),
    "flash_attn_varlen_qkvpacked_func": (("qkv", "cu_seqlens", "max_seqlen"), OPTIONS),
    "flash_attn_with_kvcache": (
        ("q", "k_cache", "v_cache"),
        {
            "k": None,
            "v": None,
            "rotary_cos": None,
            "rotary_sin": None,
            "cache_seqlens": None,
            "cache_batch_idx": None,
            "cache_leftpad": None,
            "block_table": None,
            "softmax_scale": None,
            "causal": False,
            "window_size": (-1, -1),
            "softcap": 0.0,
            "rotary_interleaved": True,
            "alibi_slopes": None,
            "num_splits": 0,
            "return_softmax_lse": False,
        },
    ),
}
TERMS = {
    "plain": {},
    "causal": {"causal": True},
    "scale": {"softmax_scale": 0.3, "causal": True},
    "window": {"window_size": (3, 2)},
    "window to the left": {"window_size": (3, -1)},
    "window to the right": {"window_size": (-1, 1)},
    "causal window": {"window_size": (2, 5), "causal": True},
    "soft cap": {"softcap": 1.5, "causal": True},
    "ALiBi": {"alibi_slopes": "heads"},
    "causal ALiBi": {"alibi_slopes": "rows", "causal": True},
}
SIZES = [(1, 1), (5, 5), (1, 7), (4, 9), (9, 4), (70, 131), (3, 0), (0, 3)]


@pytest.fixture
def flash_attn(torch):
    import attnmask.flash_attn

    torch.manual_seed(0)
    return attnmask.flash_attn


def terms_of(torch, name, batch, heads):
    terms = dict(TERMS[name], deterministic=True)
    slopes = torch.rand(batch, heads)
    if "alibi_slopes" in terms:
        terms["alibi_slopes"] = slopes[0] if terms["alibi_slopes"] == "heads" else slopes
    return terms


def dense(
    torch,
    q,
    k,
    v,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    softmax_scale=None,
    **_,
):
    """The formula in float64, and the logsumexp."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    right = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None] - (k.shape[1] - q.shape[1])
    if alibi_slopes is not None:
        slopes = alibi_slopes.double().expand(q.shape[0], q.shape[2])
        logits = logits - slopes[:, :, None, None] * right.abs()
    hidden = (right > 0) & causal
    for size, distance in zip(window_size, (-right, right), strict=True):
        hidden = hidden | ((distance > size) & (size >= 0))
    logits = logits.masked_fill(hidden, -math.inf)
    lse = logits.logsumexp(-1)
    weights = torch.exp(logits - lse.masked_fill(lse == -math.inf, 0)[..., None])
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), lse.masked_fill(lse == -math.inf, math.inf)


def inputs(torch, queries, keys, dtype=None, batch=2, heads=4, kv_heads=2, depth=8):
    sizes = ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    made = [torch.randn(batch, *size, depth, dtype=dtype or torch.float32) for size in sizes]
    return [x.requires_grad_() for x in made]


def near(torch, got, right, tolerance):
    for a, b in zip(got, right, strict=True):
        assert a.shape == b.shape
        finite = b.isfinite()
        assert torch.equal(a.isfinite(), finite)
        assert torch.equal(a[~finite].double(), b[~finite].double())
        error = (a.double() - b)[finite].abs()
        assert error.numel() == 0 or error.max() <= tolerance * max(1, b[finite].abs().max())


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(flash_attn, name):
    required, defaults = SIGNATURES[name]
    given = inspect.signature(getattr(flash_attn, name)).parameters.values()
    assert {x.name: x.default for x in given} == dict.fromkeys(required, inspect.Parameter.empty) | defaults
    assert [x.name for x in given] == [*required, *defaults]
    assert all(x.kind is x.POSITIONAL_OR_KEYWORD for x in given)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", TERMS)
def test_beside_the_formula(torch, flash_attn, name, sizes):
    given, terms = inputs(torch, *sizes), terms_of(torch, name, 2, 4)
    out, lse, weights = flash_attn.flash_attn_func(*given, **terms, return_attn_probs=True)
    right, right_lse = dense(torch, *given, **terms)
    near(torch, (out, lse), (right, right_lse), 1e-5)
    assert weights.shape == (0,)
    assert torch.equal(flash_attn.flash_attn_func(*given, **terms), out)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, given, dout)
    near(torch, found, torch.autograd.grad(right, given, dout.double()), 1e-4)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-5), ("bfloat16", 3e-2), ("float16", 4e-3)]
)
def test_types(torch, flash_attn, dtype, tolerance):
    given = inputs(torch, 33, 65, getattr(torch, dtype))
    found = flash_attn.flash_attn_func(*given, causal=True, return_attn_probs=True)
    near(torch, found[:2], dense(torch, *given, causal=True), tolerance)
    assert found[0].dtype == given[0].dtype
    assert found[1].dtype == (torch.float64 if dtype == "float64" else torch.float32)


def test_nan_is_no_row_without_keys(torch, flash_attn):
    q, k, v = (x.detach() for x in inputs(torch, 3, 2, batch=1, heads=1, kv_heads=1))
    q[0, 1, 0, 0] = math.nan
    _, lse, _ = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (lse[0, 0, 0] == math.inf, lse[0, 0, 1].isnan(), lse[0, 0, 2].isfinite()) == (True, True, True)


@pytest.mark.parametrize("name", TERMS)
def test_the_bits_of_attention(torch, flash_attn, name):
    """Those of `attnmask.torch.flash_attention`, also with keys and values in one tensor, and with all three."""
    from attnmask.torch import flash_attention

    terms = terms_of(torch, name, 2, 4)
    q, k, v = inputs(torch, 40, 40, kv_heads=4)
    ours = {
        "causal": terms.get("causal", False),
        "causal_offset": 0,
        "softmax_scale": terms.get("softmax_scale"),
        "logits_soft_cap": terms.get("softcap"),
        "alibi_slopes": terms.get("alibi_slopes"),
        "sliding_window": [None if x < 0 else x for x in terms.get("window_size", (-1, -1))],
    }
    right = flash_attention(q, k, v, **ours)
    dout = torch.randn_like(right)
    grads = torch.autograd.grad(right, (q, k, v), dout)
    kv, qkv = (torch.stack(x, 2).detach().requires_grad_() for x in ((k, v), (q, k, v)))
    for function, given, gradients in (
        (flash_attn.flash_attn_func, (q, k, v), grads),
        (flash_attn.flash_attn_kvpacked_func, (q, kv), (grads[0], torch.stack(grads[1:], 2))),
        (flash_attn.flash_attn_qkvpacked_func, (qkv,), (torch.stack(grads, 2),)),
    ):
        out = function(*given, **terms)
        assert torch.equal(out, right)
        for got, gradient in zip(torch.autograd.grad(out, given, dout), gradients, strict=True):
            assert torch.equal(got, gradient)


@pytest.mark.parametrize("name", TERMS)
def test_packed(torch, flash_attn, name):
    """Each sequence by itself; one of them is empty, one has queries alone, and one has keys alone."""
    queries, keys = [4, 0, 9, 1, 3, 0], [4, 0, 5, 8, 0, 2]
    cu = [torch.tensor([0, *x]).cumsum(0).int() for x in (queries, keys)]
    terms = terms_of(torch, name, 6, 4)
    q, k, v = (x[0].detach() for x in inputs(torch, sum(queries), sum(keys), batch=1))
    q, kv = q.requires_grad_(), torch.stack((k, v), 1).requires_grad_()
    longest = max(queries), max(keys)
    given = q, *kv.unbind(1), *cu, *longest
    out, lse, _ = flash_attn.flash_attn_varlen_func(*given, **terms, return_attn_probs=True)
    assert lse.shape == (4, sum(queries))
    right, right_lse = [], []
    for i in range(6):
        parts = [x[c[i] : c[i + 1]][None] for x, c in zip(given[:3], (cu[0], cu[1], cu[1]), strict=True)]
        slopes = terms.get("alibi_slopes")
        own = terms | {"alibi_slopes": slopes[i] if slopes is not None and slopes.ndim == 2 else slopes}
        one = dense(torch, *parts, **own)
        right, right_lse = [*right, one[0][0]], [*right_lse, one[1][0]]
    right, right_lse = torch.cat(right), torch.cat(right_lse, 1)
    near(torch, (out, lse), (right, right_lse), 1e-5)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(right, (q, kv), dout.double())
    together = flash_attn.flash_attn_varlen_kvpacked_func(q, kv, *cu, *longest, **terms)
    assert torch.equal(together, out)
    for each in (out, together):
        near(torch, torch.autograd.grad(each, (q, kv), dout), grads, 1e-4)


def test_packed_in_one_tensor(torch, flash_attn):
    cu = torch.tensor([0, 3, 3, 12], dtype=torch.int32)
    qkv = torch.randn(12, 3, 4, 8, requires_grad=True)
    terms = {"causal": True, "window_size": (4, 0)}
    out, lse, _ = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, 9, **terms, return_attn_probs=True)
    right, right_lse, _ = flash_attn.flash_attn_varlen_func(
        *qkv.unbind(1), cu, cu, 9, 9, **terms, return_attn_probs=True
    )
    assert torch.equal(out, right)
    assert torch.equal(lse, right_lse)
    dout = torch.randn_like(out)
    grads = [torch.autograd.grad(x, qkv, dout)[0] for x in (out, right)]
    assert torch.equal(*grads)


def pages_of(torch, x, lengths, size):
    """Tokens [B, T, ...] in pages of any order, and the table of these."""
    count = -(-x.shape[1] // size)
    table = torch.randperm(3 * len(x) * count)[: len(x) * count].reshape(len(x), count).int()
    pages = torch.full((3 * len(x) * count, size, *x.shape[2:]), math.nan)
    for row, length, places in zip(x, lengths, table, strict=True):
        for i in range(length):
            pages[places[i // size], i % size] = row[i]
    return pages, table


@pytest.mark.parametrize("name", TERMS)
def test_keys_in_pages(torch, flash_attn, name):
    """And their gradients, which FlashAttention does not have."""
    queries, keys = [4, 0, 9], [6, 3, 9]
    cu = [torch.tensor([0, *x]).cumsum(0).int() for x in (queries, keys)]
    terms = terms_of(torch, name, 3, 4)
    k, v = (torch.randn(3, 9, 2, 8) for _ in range(2))
    torch.manual_seed(1)
    k_pages, table = pages_of(torch, k, keys, 4)
    torch.manual_seed(1)
    v_pages, _ = pages_of(torch, v, keys, 4)
    q = torch.randn(13, 4, 8)
    packed = [torch.cat([row[:n] for row, n in zip(x, keys, strict=True)]) for x in (k, v)]
    right = flash_attn.flash_attn_varlen_func(q, *packed, *cu, 9, 9, **terms, return_attn_probs=True)
    given = [q, k_pages, v_pages]
    found = flash_attn.flash_attn_varlen_func(
        *given, *cu, 9, 9, **terms, return_attn_probs=True, block_table=table
    )
    near(torch, found[:2], [x.double() for x in right[:2]], 1e-6)
    for x in given:
        x.requires_grad_()
    out = flash_attn.flash_attn_varlen_func(*given, *cu, 9, 9, **terms, block_table=table)
    near(torch, [out], [right[0].double()], 1e-6)
    out.square().sum().backward()
    for x in packed:
        x.requires_grad_()
    flash_attn.flash_attn_varlen_func(q, *packed, *cu, 9, 9, **terms).square().sum().backward()
    whole = k_pages.grad[table.long()].flatten(1, 2)
    found = torch.cat([row[:n] for row, n in zip(whole, keys, strict=True)])
    near(torch, [found], [packed[0].grad.double()], 1e-6)


# Dropout


def test_dropout(torch, flash_attn):
    """PyTorch's generator decides what is dropped, forward and backward; the weights say which."""
    given = inputs(torch, 30, 50)
    torch.manual_seed(5)
    out, lse, weights = flash_attn.flash_attn_func(*given, 0.25, causal=True, return_attn_probs=True)
    torch.manual_seed(5)
    assert torch.equal(flash_attn.flash_attn_func(*given, 0.25, causal=True), out)
    assert not torch.equal(flash_attn.flash_attn_func(*given, 0.25, causal=True), out)
    near(torch, [lse], dense(torch, *given, causal=True)[1:], 1e-5)
    allowed = torch.arange(50) <= torch.arange(30)[:, None] + 20
    dropped = torch.signbit(weights)
    assert 0.2 < dropped[:, :, allowed].float().mean() < 0.3
    near(torch, [weights.abs().sum(-1)], [torch.ones(2, 4, 30).double()], 1e-5)
    assert (weights[:, :, ~allowed] == 0).all()
    values = given[2].repeat_interleave(2, 2)
    right = torch.einsum("bhqk,bkhd->bqhd", weights.clamp(min=0) / 0.75, values)
    near(torch, [out], [right.double()], 1e-5)
    state = torch.get_rng_state()
    flash_attn.flash_attn_func(*given, return_attn_probs=True)
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_of_packed_sequences(torch, flash_attn):
    lengths = torch.tensor([0, 6, 0, 3]), torch.tensor([0, 4, 2, 7])
    cu_q, cu_k = (x.cumsum(0).int() for x in lengths)
    q, k, v = (x[0].detach() for x in inputs(torch, 9, 13, batch=1, kv_heads=4))
    out, _, weights = flash_attn.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 6, 7, dropout_p=0.4, return_attn_probs=True
    )
    assert weights.shape == (3, 4, 6, 7)
    for row, queries, keys in ((0, slice(0, 6), slice(0, 4)), (2, slice(6, 9), slice(6, 13))):
        own = weights[row, :, : queries.stop - queries.start, : keys.stop - keys.start]
        right = torch.einsum("hqk,khd->qhd", own.clamp(min=0) / 0.6, v[keys])
        near(torch, [out[queries]], [right.double()], 1e-5)


# Caches


@pytest.mark.parametrize("place", ["rows", "chosen rows", "pages"])
@pytest.mark.parametrize("new", [0, 1, 3])
@pytest.mark.parametrize("name", TERMS)
def test_caches(torch, flash_attn, name, new, place):
    """Beside the formula; padding at the start of a row is not seen."""
    lengths, terms = [9, 5], terms_of(torch, name, 2, 4)
    del terms["deterministic"]
    caches = [torch.randn(2, 12, 2, 8) for _ in range(2)]
    q = torch.randn(2, 3, 4, 8)
    added = [torch.randn(2, new, 2, 8) for _ in range(2)] if new else [None, None]
    rows = {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32)}
    given, leftpad = caches, [0, 0]
    if place == "chosen rows":
        rows["cache_batch_idx"] = torch.tensor([3, 1], dtype=torch.int32)
        given = [torch.full((5, 12, 2, 8), math.nan) for _ in caches]
        for x, cache in zip(given, caches, strict=True):
            x[[3, 1]] = cache
        leftpad = [2, 4]
        rows["cache_leftpad"] = torch.tensor(leftpad, dtype=torch.int32)
    elif place == "pages":
        given = []
        for cache in caches:
            torch.manual_seed(3)
            pages, rows["block_table"] = pages_of(torch, cache, [12, 12], 4)
            given.append(pages)
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, *given, *added, **rows, **terms, num_splits=3, return_softmax_lse=True
    )
    for i, (length, first) in enumerate(zip(lengths, leftpad, strict=True)):
        parts = [
            torch.cat((cache[i, first:length], more[i])) if new else cache[i, first:length]
            for cache, more in zip(caches, added, strict=True)
        ]
        slopes = terms.get("alibi_slopes")
        own = terms | {"alibi_slopes": slopes[i] if slopes is not None and slopes.ndim == 2 else slopes}
        right = dense(torch, q[i][None], *(x[None] for x in parts), **own)
        near(torch, (out[i][None], lse[i][None]), right, 1e-5)
    if new and place != "pages":
        where = [3, 1] if place == "chosen rows" else [0, 1]
        for cache, more in zip(given, added, strict=True):
            for i, (row, length) in enumerate(zip(where, lengths, strict=True)):
                assert torch.equal(cache[row, length : length + new], more[i])


def test_lengths_of_caches(torch, flash_attn):
    """One for all, or all of the cache."""
    q, cache = torch.randn(2, 1, 2, 8), torch.randn(2, 6, 2, 8)
    for length, tokens in ((4, 4), (None, 6)):
        out = flash_attn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=length)
        assert torch.equal(out, flash_attn.flash_attn_func(q, cache[:, :tokens], cache[:, :tokens]))
        rows = torch.tensor([0, 1])
        same = flash_attn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=length, cache_batch_idx=rows)
        assert torch.equal(out, same)


def rotated(torch, x, angles, interleaved):
    """Pairs of channels as complex numbers, turned by their angles [T, R / 2]."""
    half = angles.shape[-1]
    both = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        if interleaved
        else (slice(half), slice(half, 2 * half))
    )
    turned = (
        torch.complex(*(x[..., part].double() for part in both))
        * torch.polar(torch.ones_like(angles), angles)[:, None]
    )
    found = x.double().clone()
    found[..., both[0]], found[..., both[1]] = turned.real, turned.imag
    return found


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("terms", [{}, {"causal": True}, {"window_size": (4, 1)}])
@pytest.mark.parametrize("length", [[5, 2], 3])
def test_rotary_embeddings(torch, flash_attn, terms, interleaved, length):
    """Queries follow each other only if they see different keys."""
    lengths = length if isinstance(length, list) else [length, length]
    k_cache, v_cache = torch.randn(2, 2, 10, 2, 8)
    q, k, v = torch.randn(2, 4, 4, 8), torch.randn(2, 3, 2, 8), torch.randn(2, 3, 2, 8)
    angles = torch.rand(12, 3, dtype=torch.float64) * 6
    parts = []
    for i, start in enumerate(lengths):
        places = torch.arange(start, start + 4) if terms else torch.tensor([start] * 4)
        turned = rotated(torch, k[i], angles[start : start + 3], interleaved)
        keys, values = torch.cat((k_cache[i, :start], turned)), torch.cat((v_cache[i, :start], v[i]))
        query = rotated(torch, q[i], angles[places], interleaved)
        parts.append((turned, dense(torch, query[None], keys[None], values[None], **terms)[0][0]))
    out = flash_attn.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        angles.cos().float(),
        angles.sin().float(),
        torch.tensor(length) if isinstance(length, list) else length,
        rotary_interleaved=interleaved,
        **terms,
    )
    for i, (start, (turned, right)) in enumerate(zip(lengths, parts, strict=True)):
        near(torch, [k_cache[i, start : start + 3], out[i]], [turned, right], 1e-5)


# Graphs


CALLS = {
    "flash_attn_func": lambda f, q, k, v, cu: f.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)[
        :2
    ],
    "flash_attn_func with dropout": lambda f, q, k, v, cu: f.flash_attn_func(q, k, v, 0.3, causal=True),
    "flash_attn_func with a window": lambda f, q, k, v, cu: f.flash_attn_func(q, k, v, window_size=(3, -1)),
    "flash_attn_func, plain": lambda f, q, k, v, cu: f.flash_attn_func(q, k, v),
    "flash_attn_kvpacked_func": lambda f, q, k, v, cu: f.flash_attn_kvpacked_func(
        q, k_v(k, v, 2), causal=True
    ),
    "flash_attn_qkvpacked_func": lambda f, q, k, v, cu: f.flash_attn_qkvpacked_func(
        k_v(q, q, 2, q), causal=True
    ),
    "flash_attn_varlen_func": lambda f, q, k, v, cu: f.flash_attn_varlen_func(
        q[0], k[0], v[0], cu, cu, 9, 9, causal=True
    ),
    "flash_attn_varlen_kvpacked_func": lambda f, q, k, v, cu: f.flash_attn_varlen_kvpacked_func(
        q[0], k_v(k[0], v[0], 1), cu, cu, 9, 9, softcap=3.0
    ),
    "flash_attn_varlen_qkvpacked_func": lambda f, q, k, v, cu: f.flash_attn_varlen_qkvpacked_func(
        k_v(q[0], q[0], 1, q[0]), cu, 9, causal=True
    ),
    "index_first_axis": lambda f, q, k, v, cu: f.bert_padding.index_first_axis(q[0], cu[:2].long()),
    "pad_input": lambda f, q, k, v, cu: f.bert_padding.pad_input(q[0, :3], cu[:3].long(), 2, 10),
}


def k_v(*given):
    import torch

    first, second, dim, *more = given
    return torch.stack((first, second, *more), dim)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", CALLS)
def test_graphs(torch, flash_attn, name, backend):
    """One graph, with the same bits, and the same gradients."""
    torch._dynamo.reset()
    given, cu = inputs(torch, 12, 12), torch.tensor([0, 3, 12], dtype=torch.int32)

    def call(q, k, v, cu):
        return CALLS[name](flash_attn, q, k, v, cu)

    compiled = torch.compile(call, fullgraph=True, backend=backend)
    found = []
    for function in (call, compiled):
        torch.manual_seed(2)
        results = function(*given, cu)
        out, *lse = results if isinstance(results, tuple) else (results,)
        grads = torch.autograd.grad(out.square().sum(), given, allow_unused=True)
        with torch.no_grad():
            torch.manual_seed(2)
            again = function(*given, cu)
        found.append((out, *lse, *grads, again if torch.is_tensor(again) else again[0]))
    for a, b in zip(*found, strict=True):
        assert (a is b is None) or torch.equal(a, b)


def test_caches_in_graphs(torch, flash_attn):
    torch._dynamo.reset()

    def step(q, k_cache, v_cache, k, v, lengths):
        return flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True, return_softmax_lse=True
        )

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    ours, theirs = ([torch.zeros(2, 9, 2, 8) for _ in range(2)] for _ in range(2))
    for length in range(3):
        given, lengths = torch.randn(3, 2, 1, 2, 8), torch.tensor([length, 2 * length], dtype=torch.int32)
        right = step(given[0], *ours, *given[1:], lengths)
        found = compiled(given[0], *theirs, *given[1:], lengths)
        for a, b in zip((*found, *theirs), (*right, *ours), strict=True):
            assert torch.equal(a, b)


def test_dropped_weights_are_left_out_of_graphs(torch, flash_attn):
    torch._dynamo.reset()

    def call(q, k, v):
        return flash_attn.flash_attn_func(q, k, v, 0.3, return_attn_probs=True)

    given = [x.detach() for x in inputs(torch, 5, 5)]
    with pytest.raises(Exception, match="leave return_attn_probs out with dropout_p"):
        torch.compile(call, fullgraph=True, backend="eager")(*given)


# Padding


@pytest.mark.parametrize("unused", [False, True])
def test_padding(torch, flash_attn, unused):
    padding = flash_attn.bert_padding
    x = torch.randn(3, 5, 2, 4, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [0, 1, 0, 1, 1]])
    more = torch.tensor([[0, 0, 0, 1, 0], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0]]) if unused else None
    packed, indices, cu_seqlens, longest, used = padding.unpad_input(x, mask, more)
    whole = (mask + more if unused else mask).bool()
    assert torch.equal(packed, x[whole])
    assert torch.equal(indices, whole.flatten().nonzero().flatten())
    assert (cu_seqlens.tolist(), cu_seqlens.dtype) == ([0, 4, 4, 8] if unused else [0, 3, 3, 6], torch.int32)
    assert (type(longest), longest) == (int, 4 if unused else 3)
    assert used.tolist() == [3, 0, 3]
    back = padding.pad_input(packed, indices, 3, 5)
    assert torch.equal(padding.pad_input(packed, indices.int(), 3, 5), back)
    assert torch.equal(back, x * whole[..., None, None])
    weights = torch.randn_like(x)
    (gradient,) = torch.autograd.grad(back, x, weights)
    assert torch.equal(gradient, weights * whole[..., None, None])


def test_one_index_twice(torch, flash_attn):
    """Gradients of both are added."""
    x = torch.randn(4, 2, requires_grad=True)
    out = flash_attn.bert_padding.index_first_axis(x, torch.tensor([1, 3, 1]))
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert gradient[:, 0].tolist() == [0, 2, 0, 1]
    put = flash_attn.bert_padding.index_put_first_axis(x, torch.tensor([5, 0, 2, 3]), 6)
    assert torch.equal(put[[5, 0, 2, 3]], x)
    assert (put[[1, 4]] == 0).all()


# Errors


def wrong(torch, f):
    q, k = torch.randn(2, 4, 4, 8), torch.randn(2, 6, 2, 8)
    kv, packed = torch.stack((k, k), 2), torch.randn(7, 4, 8)
    cu, cos = torch.tensor([0, 7], dtype=torch.int32), torch.ones(6, 4)
    cached = {"cache_seqlens": 2}
    fixed, varlen, cache = f.flash_attn_func, f.flash_attn_varlen_func, f.flash_attn_with_kvcache
    return [
        (TypeError, "q must be a tensor, got float32 array", lambda: fixed(q.numpy(), k, k)),
        (ValueError, r"k must be \[B, Tk, Hkv, D\], got float32 tensor of shape", lambda: fixed(q, k[0], k)),
        (ValueError, r"kv must be \[B, Tk, 2, Hkv, D\], got", lambda: f.flash_attn_kvpacked_func(q, k)),
        (
            ValueError,
            r"qkv must be \[B, T, 3, H, D\], got float32 tensor of shape \(2, 6, 2",
            lambda: f.flash_attn_qkvpacked_func(kv),
        ),
        (TypeError, "k must be float32 as q, got float64", lambda: fixed(q, k.double(), k)),
        (ValueError, "v must have 6 tokens and 2 heads as k, got", lambda: fixed(q, k, k[:, :3])),
        (
            TypeError,
            "qkv must have a floating-point dtype|qkv must be",
            lambda: f.flash_attn_qkvpacked_func(torch.zeros(1, 4, 3, 2, 8, dtype=torch.int32)),
        ),
        (
            ValueError,
            "kv must have a number of heads that divides q's 4",
            lambda: f.flash_attn_kvpacked_func(q, torch.zeros(2, 6, 2, 3, 8)),
        ),
        (ValueError, "dropout_p must be at least 0 and below 1, got 1.5", lambda: fixed(q, k, k, 1.5)),
        (TypeError, r"window_size must be \(left, right\)", lambda: fixed(q, k, k, window_size=3)),
        (TypeError, r"window_size must be \(left, right\)", lambda: fixed(q, k, k, window_size=(1, 2, 3))),
        (
            TypeError,
            r"window_size\[1\] must be an integer, got 0.5; write -1 for no limit",
            lambda: fixed(q, k, k, window_size=(1, 0.5)),
        ),
        (TypeError, "causal must be", lambda: fixed(q, k, k, causal="yes")),
        (TypeError, "return_attn_probs must be", lambda: fixed(q, k, k, return_attn_probs=2)),
        (
            ValueError,
            "softcap must be 0.0 with alibi_slopes, got 5.0",
            lambda: fixed(q, k, k, softcap=5.0, alibi_slopes=torch.ones(4)),
        ),
        (
            ValueError,
            r"alibi_slopes must be \[H\] or \[B, H\]",
            lambda: fixed(q, k, k, alibi_slopes=torch.ones(3)),
        ),
        (TypeError, "unexpected keyword argument 'seqused_k'", lambda: fixed(q, k, k, seqused_k=cu)),
        (
            ValueError,
            "cu_seqlens_k must end at 7 tokens, got 6",
            lambda: varlen(packed, packed, packed, cu, cu - torch.tensor([0, 1]), 7, 7),
        ),
        (
            ValueError,
            "cu_seqlens must start at 0, got 1",
            lambda: f.flash_attn_varlen_qkvpacked_func(torch.zeros(7, 3, 4, 8), cu + 1, 7),
        ),
        (ValueError, r"q must be \[B, Tq, H, D\], got", lambda: cache(packed, k, k)),
        (ValueError, "k_cache must be", lambda: cache(q, k[0], k)),
        (
            ValueError,
            "cache_batch_idx must be None with block_table",
            lambda: cache(q, k, k, cache_batch_idx=cu, block_table=cu[:, None]),
        ),
        (ValueError, "rotary_cos needs k and cache_seqlens", lambda: cache(q, k, k, None, None, cos, cos, 2)),
        (
            TypeError,
            "rotary_sin must be a tensor, got None",
            lambda: cache(q, k, k.clone(), k[:, :1], k[:, :1], cos, **cached),
        ),
        (
            ValueError,
            r"rotary_cos must be \[T, R / 2\] with T >= 6, the size of the cache, and R <= 8, .* got",
            lambda: cache(q, k, k.clone(), k[:, :1], k[:, :1], cos[:3], cos[:3], **cached),
        ),
    ]


def test_errors_name_arguments_as_flash_attention_does(torch, flash_attn):
    for kind, message, call in wrong(torch, flash_attn):
        with pytest.raises(kind, match=message):
            call()


# Under FlashAttention's name


def test_install(torch, flash_attn):
    result = python(
        """
import importlib, importlib.metadata, importlib.util, pickle, sys
import attnmask.flash_attn as ours
assert importlib.util.find_spec("flash_attn") is None
for _ in range(2):
    ours.install()
    ours.install()
    import flash_attn
    from flash_attn import flash_attn_func, flash_attn_with_kvcache
    from flash_attn.flash_attn_interface import flash_attn_varlen_qkvpacked_func
    from flash_attn.bert_padding import index_first_axis, index_put_first_axis, pad_input, unpad_input
    assert flash_attn_func is ours.flash_attn_func
    assert pad_input is ours.bert_padding.pad_input
    assert flash_attn.__version__.startswith("2.8.")
    for name in ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn.bert_padding"):
        module, spec = importlib.import_module(name), importlib.util.find_spec(name)
        assert module is sys.modules[name] and module.__name__ == name
        assert spec is module.__spec__ and spec.name == name
    assert flash_attn.bert_padding.unpad_input is unpad_input
    assert sorted(flash_attn.__all__) == sorted(x for x in ours.__all__ if x.startswith("flash"))
    assert pickle.loads(pickle.dumps(flash_attn_func)) is flash_attn_func
    assert importlib.util.find_spec("flash_attn.layers") is None
    try:
        import flash_attn.layers
    except ModuleNotFoundError as error:
        assert error.name == "flash_attn.layers"
    else:
        raise AssertionError
    try:
        importlib.metadata.version("flash_attn")
    except importlib.metadata.PackageNotFoundError:
        pass
    ours.uninstall()
    ours.uninstall()
    assert importlib.util.find_spec("flash_attn") is None
    assert not any(name.partition(".")[0] == "flash_attn" for name in sys.modules)
""",
        **import_paths(),
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("imported", [False, True])
def test_another_one_stays(torch, flash_attn, tmp_path, imported):
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("__version__ = '2.7.4'")
    result = python(
        f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import attnmask.flash_attn
if {imported}:
    import flash_attn
try:
    attnmask.flash_attn.install()
except RuntimeError as error:
    print(error)
attnmask.flash_attn.uninstall()
import flash_attn
assert flash_attn.__version__ == "2.7.4"
""",
        **import_paths(),
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("flash_attn is installed, and stays")


def test_transformers_finds_it(torch, flash_attn):
    """The package, and its version; FlashAttention in models needs a GPU, whatever is installed."""
    pytest.importorskip("transformers")
    result = python(
        """
import attnmask.flash_attn
attnmask.flash_attn.install()
from transformers.utils import import_utils
print(import_utils._is_package_available("flash_attn", return_version=True))
print(import_utils.is_flash_attn_2_available())
from transformers.modeling_flash_attention_utils import _flash_attention_forward
""",
        **import_paths(),
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["(True, '2.8.3')", "False"]


def test_attributes(flash_attn):
    assert set(dir(flash_attn)) == {*SIGNATURES, "install", "uninstall", "bert_padding"}
    assert attnmask.flash_attn is flash_attn
