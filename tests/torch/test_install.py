"""attnmask under PyTorch's own attention."""

import itertools

import pytest
from derivative_ways import WAYS, forward_over_reverse, near, reverse_over_forward, reverse_over_reverse
from environment import import_paths, python

import attnmask
from attnmask._common import warnings as _warnings


@pytest.fixture
def installed(torch):
    import attnmask.torch

    attnmask.torch.install()
    yield
    attnmask.torch.uninstall()


@pytest.fixture
def calls(monkeypatch):
    """How often the core is called."""
    from attnmask.torch import _install as _torch_install

    counted = []
    for module, name in ((_torch_install, "flash_attention_fwd"), (_torch_install, "flash_attention_bwd")):
        function = getattr(module, name)

        def count(*args, _name=name, _function=function, **kwargs):
            counted.append(_name)
            return _function(*args, **kwargs)

        monkeypatch.setattr(module, name, count)
    return counted


def test_install_and_uninstall(torch):
    from torch.nn import attention

    import attnmask.torch

    assert attention.current_flash_attention_impl() is None
    with pytest.raises(RuntimeError, match="attnmask must be installed: call"):
        attnmask.torch.uninstall()
    for _ in range(2):
        attnmask.torch.install()
        assert attention.current_flash_attention_impl() == "attnmask"
        attnmask.torch.install()  # which changes nothing
        assert attention.current_flash_attention_impl() == "attnmask"
        attnmask.torch.uninstall()
        assert attention.current_flash_attention_impl() is None
    attention.activate_flash_attention_impl("attnmask")  # as PyTorch itself does it
    attention.restore_flash_attention_impl()

    class Other:
        def remove(self):
            pass

    attention.register_flash_attention_impl("other", register_fn=Other)
    attention.activate_flash_attention_impl("other")
    with pytest.raises(RuntimeError, match="other is active"):
        attnmask.torch.install()
    with pytest.raises(RuntimeError, match="other is active"), attnmask.torch.installed():
        pass
    attention.restore_flash_attention_impl()


def test_installed(torch):
    """It ends what it has begun, and nothing else."""
    from torch.nn import attention

    from attnmask.torch import install, installed, uninstall

    now = attention.current_flash_attention_impl
    with installed():
        assert now() == "attnmask"
        with installed():
            assert now() == "attnmask"
        assert now() == "attnmask"
    assert now() is None
    install()
    with installed():
        pass
    assert now() == "attnmask"
    uninstall()
    with installed():
        install()
    assert now() == "attnmask"
    uninstall()
    for end in (uninstall, attention.restore_flash_attention_impl):
        with installed():
            end()
            with installed():
                assert now() == "attnmask"
            assert now() is None
        assert now() is None
    with pytest.raises(LookupError), installed():
        raise LookupError
    assert now() is None
    one, other = installed(), installed()  # as of two threads
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert now() == "attnmask"
    other.__exit__(None, None, None)
    assert now() is None


def test_what_is_there_once_it_is_uninstalled(torch, calls):
    """PyTorch's own kernels, and none where it has none."""
    from torch.nn.attention.varlen import varlen_attn

    tensors = inputs(torch)
    right = sdpa(torch, *tensors, scale=0.3)
    with attnmask.torch.installed():
        sdpa(torch, *tensors, scale=0.3)
    assert len(calls) == 2
    for one, other in zip(sdpa(torch, *tensors, scale=0.3), right, strict=True):
        assert torch.equal(one, other)
    (query, key, value), starts = packed(torch, (3, 5), (3, 5), kv_heads=4)
    with pytest.raises(NotImplementedError, match=r"unless attnmask\.torch\.install\(\) was called"):
        varlen_attn(query, key, value, *starts, 5, 5)
    assert len(calls) == 2


WHILE_OTHER_THREADS_ATTEND = """
import threading, time
import torch, attnmask.torch

query, stop, good = torch.randn(1, 4, 64, 16), [], []
right = torch.nn.functional.scaled_dot_product_attention(query, query, query)

def attend():
    while not stop:
        out = torch.nn.functional.scaled_dot_product_attention(query, query, query)
        torch.testing.assert_close(out, right)
    good.append(True)

threads = [threading.Thread(target=attend) for _ in range(4)]
[thread.start() for thread in threads]
end = time.monotonic() + 3
while time.monotonic() < end:
    attnmask.torch.install()
    attnmask.torch.uninstall()
    with attnmask.torch.installed():
        pass
stop.append(True)
[thread.join() for thread in threads]
assert len(good) == 4
"""
NOTHING_IS_INSTALLED_BY_IMPORT = """
import pytest, torch, attnmask.torch

assert torch.nn.attention.current_flash_attention_impl() is None
x = torch.zeros(1, 1, 1, 8)
with pytest.raises(NotImplementedError):
    torch.ops.aten._flash_attention_forward(x, x, x, None, None, 1, 1, 0.0, False, False)
"""


@pytest.mark.parametrize("code", [WHILE_OTHER_THREADS_ATTEND, NOTHING_IS_INSTALLED_BY_IMPORT])
def test_in_a_new_process(code):
    pytest.importorskip("torch")
    result = python(code, timeout=200, **import_paths())
    assert result.returncode == 0, result.stderr


# scaled_dot_product_attention


def sdpa(torch, query, key, value, **more):
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, **more)
    wanting = [x for x in (query, key, value) if x.requires_grad]
    dout = torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out.dtype)
    return out, *torch.autograd.grad(out, wanting, dout)


def inputs(torch, dtype=None, heads=4, kv_heads=4, queries=7, keys=9, channels=8, transposed=False):
    dtype = dtype or torch.float64
    shapes = (heads, queries), (kv_heads, keys), (kv_heads, keys)
    made = [torch.randn(2, tokens, count, channels, dtype=dtype).transpose(1, 2) for count, tokens in shapes]
    return [(x if transposed else x.contiguous()).requires_grad_() for x in made]


ARGUMENTS = {
    "plain": lambda torch: {},
    "causal": lambda torch: {"is_causal": True},
    "scaled": lambda torch: {"scale": 0.3},
    "bool mask": lambda torch: {
        "attn_mask": (torch.rand(2, 1, 7, 9) < 0.7) & (torch.arange(7) != 2)[:, None]
    },
    "float mask": lambda torch: {"attn_mask": torch.randn(7, 9, dtype=torch.float64)},
    "mask of all heads": lambda torch: {"attn_mask": torch.randn(2, 4, 7, 9, dtype=torch.float64)},
    "fewer key heads": lambda torch: {"enable_gqa": True},
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_sdpa(torch, calls, kind, transposed):
    """As PyTorch's own, in values, gradients and layout."""
    import attnmask.torch

    more = ARGUMENTS[kind](torch)
    tensors = inputs(torch, kv_heads=2 if "enable_gqa" in more else 4, transposed=transposed)
    right = sdpa(torch, *tensors, **more)
    assert not calls
    attnmask.torch.install()
    try:
        got = sdpa(torch, *tensors, **more)
    finally:
        attnmask.torch.uninstall()
    assert calls == ["flash_attention_fwd", "flash_attention_bwd"]
    for one, other in zip(got, right, strict=True):
        torch.testing.assert_close(one, other)
        assert one.stride() == other.stride()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        for one, other in zip(got, sdpa(torch, *tensors, **more), strict=True):
            torch.testing.assert_close(one, other)


MASKS = {  # of queries [2, 3, 4, 7, 8]
    "none": lambda torch: None,
    "causal": lambda torch: None,
    "triangle": lambda torch: torch.randn(2, 1, 4, 7, 9, dtype=torch.float64, requires_grad=True),
    "first axis shared": lambda torch: torch.randn(1, 3, 1, 7, 9, dtype=torch.float64, requires_grad=True),
    "pairs": lambda torch: torch.randn(7, 9, dtype=torch.float64),
    "number": lambda torch: torch.tensor(0.5, dtype=torch.float64),
    "bool": lambda torch: (torch.rand(2, 1, 1, 7, 9) < 0.7) & (torch.arange(7) != 2)[:, None],
}


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("kind", MASKS)
def test_sdpa_of_more_axes(torch, kind, kv_heads):
    """As PyTorch's own, with a gradient of the mask, too."""
    served = lambda: attnmask.torch.install_report().served  # noqa: E731
    tensors = [
        torch.randn(2, 3, heads, tokens, 8, dtype=torch.float64, requires_grad=True)
        for heads, tokens in ((4, 7), (kv_heads, 9), (kv_heads, 9))
    ]
    mask = MASKS[kind](torch)
    more = {"attn_mask": mask, "is_causal": kind == "causal", "enable_gqa": kv_heads < 4, "scale": 0.4}
    learned = tensors + ([mask] if mask is not None and mask.requires_grad else [])

    def results():
        out = torch.nn.functional.scaled_dot_product_attention(*tensors, **more)
        return out, *torch.autograd.grad(out.sin().sum(), learned)

    right = results()
    with attnmask.torch.installed():
        assert served() == 0
        got = results()
        assert served() == (kind != "number")
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            results()
        assert served() == (kind != "number"), "PyTorch may not use its own flash attention there"
        with torch.inference_mode():
            got_without = torch.nn.functional.scaled_dot_product_attention(*tensors, **more)
    for one, other in zip((*got, got_without), (*right, right[0]), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("installed")
def test_sdpa_of_more_axes_where_attnmask_does_not_apply(torch):
    """PyTorch computes what it did, and refuses what it did."""
    attend = torch.nn.functional.scaled_dot_product_attention
    query, key = torch.randn(2, 3, 4, 7, 8), torch.randn(1, 3, 1, 9, 8)
    right = attend(query, key.expand(2, 3, 4, 9, 8), key.expand(2, 3, 4, 9, 8))
    torch.testing.assert_close(attend(query, key, key), right)
    assert (attend(query, query, torch.ones_like(query), dropout_p=0.9) != 1).any()
    with pytest.raises(RuntimeError):
        attend(query, query, query, attn_mask=torch.zeros(2, 4, 7, 7))
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(query, query, query), attend(query, query, query))
    mapped = torch.func.vmap(attend)(query[None], query[None], query[None])
    torch.testing.assert_close(mapped[0], attend(query, query, query))
    twice = query.double().requires_grad_()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(twice, torch.ones_like(twice))
        assert torch.autograd.forward_ad.unpack_dual(attend(dual, dual, dual)).tangent is not None


SECOND = {
    "plain": lambda torch: {},
    "causal": lambda torch: {"is_causal": True, "scale": 0.3},
    "bias": lambda torch: {"attn_mask": torch.randn(2, 1, 5, 5, dtype=torch.float64)},
    "mask": lambda torch: {"attn_mask": torch.rand(2, 1, 5, 5) > 0.3},
}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("axes", [4, 5])
@pytest.mark.parametrize("more", SECOND)
@pytest.mark.parametrize("way", WAYS)
def test_second_derivatives_of_sdpa(torch, way, more, axes):
    """Beside PyTorch's formula; without it, PyTorch has none."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    given, batch = SECOND[more](torch), (2, 2)[5 - axes :]
    inputs, along = (
        [torch.randn(*batch, heads, 5, 8, dtype=torch.float64) for heads in (4, 2, 2)] for _ in range(2)
    )

    def call(*inputs):
        return torch.nn.functional.scaled_dot_product_attention(*inputs, enable_gqa=True, **given)

    def mapped(inputs, along):
        return torch.func.vmap(lambda *x: tuple(way(torch, call, x[:3], x[3:])))(*inputs, *along)

    got = way(torch, call, inputs, along)
    with sdpa_kernel(SDPBackend.MATH):
        near(torch, got, way(torch, call, inputs, along))
    if way in (forward_over_reverse, reverse_over_forward, reverse_over_reverse):
        stacked = [[torch.stack([x, x / 2]) for x in part] for part in (inputs, along)]
        got = mapped(*stacked)
        with sdpa_kernel(SDPBackend.MATH):
            near(torch, got, mapped(*stacked))


@pytest.mark.usefixtures("installed")
def test_second_derivatives_of_a_sum_of_sdpa(torch):
    """Whose gradient by the result is constant."""
    inputs = [x.requires_grad_() for x in torch.randn(3, 2, 3, 5, 8, dtype=torch.float64)]
    attend = torch.nn.functional.scaled_dot_product_attention
    first = torch.autograd.grad(attend(*inputs).sum(), inputs, create_graph=True)
    got = torch.autograd.grad(first, inputs, inputs)
    by_function = attnmask.torch.flash_attention(*(x.transpose(1, 2) for x in inputs)).sum()
    first = torch.autograd.grad(by_function, inputs, create_graph=True)
    near(torch, got, torch.autograd.grad(first, inputs, inputs))


@pytest.mark.usefixtures("installed")
def test_tangents_of_sdpa(torch):
    forward_ad = torch.autograd.forward_ad
    query, key, value, tangent = torch.randn(4, 2, 3, 5, 8, dtype=torch.float64)
    attend = torch.nn.functional.scaled_dot_product_attention
    right = attnmask.torch.flash_attention(*(x.transpose(1, 2) for x in (query, key, tangent))).transpose(
        1, 2
    )
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(attend(query, key, forward_ad.make_dual(value, tangent)))
        torch.testing.assert_close(out.tangent, right)
        torch.testing.assert_close(out.primal, attend(query, key, value))
    elsewhere = query.to("meta")
    _, got = torch.func.jvp(lambda x: attend(x, x, x), (elsewhere,), (elsewhere,))
    assert got.shape == query.shape
    bias = torch.zeros(5, 5, dtype=torch.float64)
    _, got = torch.func.jvp(lambda x: attend(query, key, value, attn_mask=x), (bias,), (bias + 1,))
    torch.testing.assert_close(got, torch.zeros_like(query))
    attnmask.torch.uninstall()
    with pytest.raises(NotImplementedError, match="forward AD"):
        torch.func.jvp(lambda x: attend(x, key, value), (query,), (query,))
    attnmask.torch.install()


@pytest.mark.usefixtures("installed")
def test_sdpa_of_many_heads_and_few_tokens(torch):
    """They are not mistaken for tokens and heads, which are read in another order elsewhere."""
    query, key, value = inputs(torch, heads=72, kv_heads=72, queries=9)
    sdpa(torch, query, key, value)
    query, key, value = (x.detach().transpose(1, 2) for x in (query, key, value))
    for more in ({}, {"return_lse": True}):
        _warnings.forget()
        with pytest.warns(attnmask.AttnmaskWarning, match=r"Write x\.swapaxes\(1, 2\)"):
            attnmask.torch.flash_attention(query, key, value, **more)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_sdpa_of_types(torch, calls, dtype):
    dtype = getattr(torch, dtype)
    tensors = [x.detach().to(dtype).requires_grad_() for x in inputs(torch)]
    got = sdpa(torch, *tensors, is_causal=True)
    right = sdpa(torch, *(x.detach().double().requires_grad_() for x in tensors), is_causal=True)
    for one, other in zip(got, right, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=0.02, atol=0.02)
    assert len(calls) == 4


@pytest.mark.usefixtures("installed")
def test_sdpa_where_attnmask_does_not_apply(torch, calls):
    """PyTorch does what it did before."""
    query, key, value = (x.detach() for x in inputs(torch))
    negative = torch.imag(torch.complex(query, -query).conj())  # numbers that are to be negated when read
    assert negative.is_neg()
    got = torch.nn.functional.scaled_dot_product_attention(negative, key, value)
    assert not calls
    assert list(attnmask.torch.install_report().handed_back.values()) == [1]
    torch.testing.assert_close(
        got, torch.nn.functional.scaled_dot_product_attention(negative.clone(), key, value)
    )


@pytest.mark.usefixtures("installed")
def test_encoder(torch, calls):
    """A layer of PyTorch, with padding."""
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    out = layer(x, src_key_padding_mask=padding)
    assert calls
    torch.testing.assert_close(out[1, :3], layer(x[1:, :3])[0])


# varlen_attn


def packed(torch, q_lengths, k_lengths, heads=4, kv_heads=2, dtype=None):
    starts = [
        torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        for lengths in (q_lengths, k_lengths)
    ]
    tensors = [
        torch.randn(sum(lengths), count, 8, dtype=dtype or torch.float64, requires_grad=True)
        for lengths, count in ((q_lengths, heads), (k_lengths, kv_heads), (k_lengths, kv_heads))
    ]
    return tensors, starts


def one_by_one(torch, tensors, starts, window, scale=None):
    """Each sequence by a matrix, with the diagonal at the bottom right, as FlashAttention has it."""
    query, key, value = tensors
    outs, lses = [], []
    for (q0, q1), (k0, k1) in zip(*(itertools.pairwise(s.tolist()) for s in starts), strict=True):
        q, k, v = query[q0:q1], key[k0:k1], value[k0:k1]
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        logits = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
        places = torch.arange(k1 - k0)[None] - torch.arange(q1 - q0)[:, None] - (k1 - k0 - q1 + q0)
        left, right = (float("inf") if side < 0 else side for side in window)
        dead = (places < -left) | (places > right)
        logits = logits.masked_fill(dead, -float("inf"))
        weights = torch.where(dead.all(-1, keepdim=True), 0.0, logits.softmax(-1).nan_to_num(0.0))
        outs.append(torch.einsum("hqk,khd->qhd", weights, v))
        lse = logits.logsumexp(-1)
        lses.append(lse.masked_fill(lse == -float("inf"), float("inf")))
    return torch.cat(outs), torch.cat(lses, 1)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (1, 3), (-1, 2)])
@pytest.mark.parametrize("lengths", [((3, 0, 5), (3, 0, 5)), ((2, 4, 1), (5, 4, 3)), ((5, 2), (3, 6))])
def test_varlen_attn(torch, window, lengths):
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    tensors, starts = packed(torch, *lengths)
    longest = [max(each) for each in lengths]
    out, lse = varlen_attn(
        *tensors,
        *starts,
        *longest,
        window_size=window,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
        scale=0.4,
    )
    right, right_lse = one_by_one(torch, tensors, starts, window, 0.4)
    torch.testing.assert_close(out, right)
    torch.testing.assert_close(lse, right_lse)
    dout = torch.randn_like(out)
    got, expected = (torch.autograd.grad(x, tensors, dout) for x in (out, right))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


USED = (3, 70, 0, 5, 129)


def used_keys(torch, starts, used):
    """Where the first keys of each sequence are, so many as are used."""
    parts = [torch.arange(begin, begin + n) for begin, n in zip(starts.tolist(), used, strict=False)]
    return torch.cat(parts), torch.tensor([0, *itertools.accumulate(used)])


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (9, 0), (2, 3)])
@pytest.mark.parametrize("page_size", [None, 1, 16, 64])
def test_varlen_attn_of_a_cache(torch, monkeypatch, page_size, window):
    """Of each sequence's keys only the first are used, one after the other or in pages, and read where they lie."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn, varlen_attn_out

    from attnmask.torch import _install as _torch_install

    (query, key, value), starts = packed(torch, (1, 2, 1, 7, 70), [192] * 5)
    short, k_starts = used_keys(torch, starts[1], USED)
    right = one_by_one(torch, (query, key[short], value[short]), (starts[0], k_starts), window)
    more = {}
    unused = torch.ones(len(key), dtype=torch.bool)
    unused[short] = False
    key, value = (x.detach().masked_fill(unused[:, None, None], float("nan")) for x in (key, value))
    if page_size is not None:
        count = 192 // page_size
        order = torch.randperm(5 * count)
        key, value = (x.unflatten(0, (5 * count, page_size))[order] for x in (key, value))
        table = order.argsort().reshape(5, count).int()
        for row, length in zip(table, USED, strict=True):
            row[-(-length // page_size) :] = torch.tensor([-1, 2**31 - 1])[len(row) % 2]
        more["block_table"] = table
    seen = []
    for module, name in ((_torch_install, "flash_attention_fwd"),
                         (_torch_install, "flash_attention_with_kvcache")):  # fmt: skip
        function = getattr(module, name)

        def watched(*tensors, _function=function, **given):
            seen.append([x.data_ptr() for x in tensors[1:]])
            return _function(*tensors, **given)

        monkeypatch.setattr(module, name, watched)
    more |= {"window_size": window, "seqused_k": torch.tensor(USED, dtype=torch.int32), "enable_gqa": True}
    more["return_aux"] = AuxRequest(lse=True)
    with torch.no_grad():
        got = varlen_attn(query, key, value, *starts, 70, 192, **more)
        into = torch.full_like(query, 7)
        again = varlen_attn_out(into, query, key, value, *starts, 70, 192, **more)
    for one, other, expected in zip(got, again, right, strict=True):
        torch.testing.assert_close(one, expected)
        assert torch.equal(one, other)
    assert torch.equal(into, got[0])
    assert seen == [[key.data_ptr(), value.data_ptr()]] * 2


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("paged", [False, True])
def test_used_keys_that_there_are_not(torch, paged):
    from torch.nn.attention.varlen import varlen_attn

    (query, key, value), starts = packed(torch, (1, 3), (32, 16), heads=2)
    more, room = {}, (32, 16)
    if paged:
        key, value = (x.unflatten(0, (3, 16)) for x in (key, value))
        more, room = {"block_table": torch.tensor([[0, 1], [2, -1]], dtype=torch.int32)}, (32, 32)
    for used, error, words in (
        ([-1, 2], ValueError, "seqused_k must be from 0 to 32, the keys of its sequence, got -1 at index 0"),
        (
            [2, room[1] + 1],
            ValueError,
            f"seqused_k must be from 0 to {room[1]}, .* got {room[1] + 1} at index 1",
        ),
        ([2], ValueError, r"seqused_k must be of shape \(2,\), got int32 array of shape \(1,\)"),
        ([2, 2, 2], ValueError, r"seqused_k must be of shape \(2,\)"),
        ([[2, 2]], ValueError, r"seqused_k must be \[sequences\]"),
        ([2.0, 2.0], TypeError, "seqused_k must be integers"),
    ):
        with torch.no_grad(), pytest.raises(error, match=words):
            varlen_attn(query, key, value, *starts, 3, 32, seqused_k=torch.tensor(used), **more)
    if not paged:
        with torch.no_grad(), pytest.raises(ValueError, match="cum_seqlens_k must have 3 entries"):
            varlen_attn(
                query, key, value, starts[0], starts[1][[0, 2]], 3, 32, seqused_k=torch.tensor([2, 2])
            )


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("rows", [None, 1, 3])
def test_slopes(torch, rows, paged):
    """ALiBi counts from the bottom right, too."""
    (query, key, value), starts = packed(torch, (1, 3, 5), (16, 16, 32), heads=2)
    used = (9, 16, 20) if paged else (16, 16, 32)
    slopes = torch.rand(2) if rows is None else torch.rand(rows, 2)
    short, k_starts = used_keys(torch, starts[1], used)
    bias = torch.zeros(1, 2, 9, len(short), dtype=torch.float64)
    for s, (q, k) in enumerate(
        zip(*(itertools.pairwise(x.tolist()) for x in (starts[0], k_starts)), strict=True)
    ):
        places = torch.arange(k[1] - k[0]) - torch.arange(k[1] - k[0] - q[1] + q[0], k[1] - k[0])[:, None]
        each = slopes.expand(3, 2)[s]
        bias[0, :, slice(*q), slice(*k)] = -each[:, None, None] * places.abs()
    places = {"cum_seqlens_q": starts[0], "cum_seqlens_k": k_starts}
    args = query.detach(), key.detach()[short], value.detach()[short]
    right = attnmask.torch.flash_attention(*args, bias=bias, **places)
    more = {}
    if paged:
        key, value = (x.unflatten(0, (4, 16)) for x in (key, value))
        more = {"block_table": torch.tensor([[0, -1], [1, -1], [2, 3]]), "seqused_k": torch.tensor(used)}
    forward = torch.ops.aten._flash_attention_forward
    with torch.no_grad():
        out, *_ = forward(query, key, value, *starts, 5, 32, 0.0, False, False, alibi_slopes=slopes, **more)
    torch.testing.assert_close(out, right)
    with pytest.raises(NotImplementedError, match="alibi_slopes have no gradients in PyTorch"):
        forward(query, key, value, *starts, 5, 32, 0.0, False, False, alibi_slopes=slopes, **more)


@pytest.mark.usefixtures("installed")
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("packing", [False, True])
def test_compiled(torch, calls, packing):
    from torch.nn.attention.varlen import varlen_attn

    if packing:
        tensors, starts = packed(torch, (3, 5), (3, 5), kv_heads=4, dtype=torch.float32)
        attend = lambda *x: varlen_attn(*x, *starts, 5, 5, window_size=(-1, 0)) * 2  # noqa: E731
    else:
        tensors = inputs(torch, dtype=torch.float32, transposed=True)
        attend = lambda *x: torch.nn.functional.scaled_dot_product_attention(*x, is_causal=True) * 2  # noqa: E731

    def results(function):
        out = function(*tensors)
        return out, *torch.autograd.grad(out.square().sum(), tensors)

    right = results(attend)
    calls.clear()
    for one, other in zip(
        results(torch.compile(attend, backend="aot_eager", fullgraph=True)), right, strict=True
    ):
        torch.testing.assert_close(one, other)
    assert calls == ["flash_attention_fwd", "flash_attention_bwd"]


@pytest.mark.usefixtures("installed")
def test_what_flash_attention_has_and_attnmask_has_not(torch):
    (query, key, value), starts = packed(torch, (3, 5), (3, 5), kv_heads=4)
    forward = torch.ops.aten._flash_attention_forward
    with pytest.raises(
        NotImplementedError, match=r"dropout_p must be 0 while attnmask is installed, got 0\.5"
    ):
        forward(query, key, value, *starts, 5, 5, 0.5, False, False)
    with torch.no_grad(), pytest.raises(ValueError, match=r"alibi_slopes must be .* with H = 4"):
        forward(query, key, value, *starts, 5, 5, 0.0, False, False, alibi_slopes=torch.ones(5))
    with pytest.raises(ValueError, match="seqused_k must be given with block_table, got None"):
        forward(query, key, value, *starts, 5, 5, 0.0, False, False, block_table=torch.zeros(2, 1))
