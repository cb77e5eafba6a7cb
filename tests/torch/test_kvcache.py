"""attnmask.torch.flash_attention_with_kvcache gives the bits of NumPy's function, also from graphs."""

import io
import math

import numpy as np
import pytest
from doors import changed, drawn
from kvcache_bad_input import HKV, NUMBERS, TQ, B, D, H, good
from kvcache_cases import F32, Case, arguments_of
from tensors import tensor

import attnmask
from attnmask._common.arguments import as_array

pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning")
LONG = {"lengths": (65, 1, 64, 0, 130), "new": "as many"}
CASES = {
    "rows": Case(**LONG, queries=3),
    "MaskInfo": Case(**LONG, queries=3, mask="info of segments [B]", depths=(7, 5)),
    "both in one": Case(**LONG, queries=1, page_size=16, layout="keys beside values"),
    "heads first": Case(**LONG, queries=1, page_size=16, layout="heads first"),
}  # fmt: skip


def tensors(torch, arguments):
    return {name: tensor(torch, x) for name, x in arguments.items() if x is not None}


def made(name):
    return {key: x for key, x in arguments_of(CASES[name]).items() if x is not None}


def bits(x):
    return np.ascontiguousarray(as_array(x, "x")).tobytes()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled(torch, name, backend):
    """As NumPy's function, in results and in what is written; caches may be views of one tensor."""
    arguments, expected = tensors(torch, made(name)), made(name)

    @torch.compile(backend=backend, fullgraph=True)
    def compiled(arguments):
        return attnmask.torch.flash_attention_with_kvcache(**arguments, return_lse=True)

    results = compiled(arguments)
    right = attnmask.flash_attention_with_kvcache(**expected, return_lse=True)
    for one, other in zip(results, right, strict=True):
        assert bits(one) == bits(other)
    for key in ("k_cache", "v_cache"):
        assert bits(arguments[key]) == bits(expected[key]), key


def test_mask_tensors(torch):
    given, same = (tensors(torch, made("MaskInfo")) for _ in range(2))
    same["attention_mask"] = attnmask.torch.mask_tensors(same["attention_mask"])
    right, got = (attnmask.torch.flash_attention_with_kvcache(**x) for x in (given, same))
    assert torch.equal(got, right)
    out = torch.empty_like(right)
    attnmask.torch.flash_attention_with_kvcache(**tensors(torch, made("MaskInfo")), out=out)
    assert torch.equal(out, right)


def test_functionalized(torch):
    """What is read behind the call, or through another view, is what was written; before it, what was there."""
    arguments = tensors(torch, made("rows"))

    def function(cache, **arguments):
        before = cache.sum()
        out = attnmask.torch.flash_attention_with_kvcache(**arguments, k_cache=cache)
        return before, out, cache[:, :, 0] * 2, cache.sum()

    k_cache, v_cache = (arguments.pop(name).nan_to_num() for name in ("k_cache", "v_cache"))
    results = []
    for run in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        cache = k_cache.clone()
        results.append((*run(cache, v_cache=v_cache.clone(), **arguments), cache))
    assert results[0][0] != results[0][3]
    for got, right in zip(*results, strict=True):
        assert torch.equal(got, right)


def decoder(torch):
    """A step of a decoder, whose caches are buffers: new tokens are appended at a place that is an input."""

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.project = torch.nn.Linear(8, 3 * 8)
            self.register_buffer("k_cache", torch.zeros(2, 32, 1, 8))
            self.register_buffer("v_cache", torch.zeros(2, 32, 1, 8))

        def forward(self, x, lengths):
            query, key, value = self.project(x).unflatten(-1, (3, 1, 8)).unbind(-3)
            return attnmask.torch.flash_attention_with_kvcache(
                query, self.k_cache, self.v_cache, key, value, cache_seqlens=lengths
            )

    torch.manual_seed(0)
    return Module()


@pytest.mark.parametrize("strict", [False, True])
def test_exported(torch, strict):
    """With caches as buffers, of any number of tokens, saved and loaded."""
    x, lengths = torch.randn(2, 4, 8), torch.tensor([0, 3], dtype=torch.int32)
    with torch.no_grad():
        shapes = ({1: torch.export.Dim("tokens", min=2, max=16)}, None)
        program = torch.export.export(decoder(torch), (x, lengths), dynamic_shapes=shapes, strict=strict)
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        eager = decoder(torch)
        exported = [p.module() for p in (program, torch.export.load(file))]
        exported.append(program.run_decompositions().module())
        for tokens, more in ((4, 0), (7, 4)):
            x = torch.randn(2, tokens, 8)
            right = eager(x, lengths + more)
            for module in exported:
                assert torch.equal(module(x, lengths + more), right)
                assert torch.equal(module.k_cache, eager.k_cache)
        assert eager.k_cache.any()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_decoding(torch, dynamic):
    """Lengths that grow do not compile a function anew."""
    compilations = []

    def backend(graph, examples):
        compilations.append(graph)
        return graph

    eager, module = decoder(torch), decoder(torch)
    compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=dynamic)
    lengths = torch.tensor([0, 3], dtype=torch.int32)
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(2, 1, 8)
            assert torch.equal(compiled(x, lengths), eager(x, lengths))
            lengths = lengths + 1
    assert len(compilations) == 1
    assert torch.equal(module.v_cache, eager.v_cache)


def test_an_integer_length(torch):
    arguments = tensors(torch, made("rows"))

    def function(length):
        caches = {name: arguments[name].nan_to_num() for name in ("k_cache", "v_cache")}
        given = arguments | caches | {"cache_seqlens": length}
        return attnmask.torch.flash_attention_with_kvcache(**given)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for length in (2, 3, 7):
        assert torch.equal(compiled(length), function(length))
    with pytest.raises(ValueError, match="cache_seqlens must be at least 0, got -1"):
        function(-1)


@pytest.mark.parametrize(
    "name", ["flash_attention_with_kvcache", "flash_attention_with_kvcache of four bits"]
)
@pytest.mark.parametrize("seed", range(4))
def test_out(torch, name, seed):
    """The same bits, in the caller's memory; also in graphs."""

    def given():
        return changed(drawn(name, seed), lambda x: tensor(torch, x.copy())) | {"return_lse": True}

    def attend(**arguments):
        return attnmask.torch.flash_attention_with_kvcache(**arguments)

    expected = given()
    right = attend(**expected)
    for run in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        arguments, out = given(), torch.full_like(right[0], 77.0)
        result, lse = run(**arguments, out=out)
        assert result.data_ptr() == out.data_ptr()
        assert (bits(out), bits(lse)) == (bits(right[0]), bits(right[1]))
        assert bits(arguments["k_cache"]) == bits(expected["k_cache"])


READ = [
    {},
    {"causal": False},
    {"sliding_window": (9, 0), "logits_soft_cap": 2.0},
    {"alibi_slopes": np.array([0.1, 0.3, 0.5, 1.0]), "softmax_aux": np.zeros((4, 1))},
]


@pytest.mark.parametrize("lengths", [None, 12, [40, 17, 3], "int64", "uint8"])
@pytest.mark.parametrize("more", READ)
def test_derivatives_where_nothing_is_written(torch, more, lengths):
    """They are those of attention to the first keys of each row, in both modes and twice; the result is as before."""
    caches = (torch.randn(3, 40, 2, 16, dtype=torch.double) for _ in range(2))
    inputs = [torch.randn(3, 5, 4, 16, dtype=torch.double), *caches]
    rows = [40, 17, 3]  # the last has fewer keys than queries
    lengths = torch.tensor(rows, dtype=getattr(torch, lengths)) if isinstance(lengths, str) else lengths
    more = more | {"cache_seqlens": lengths}
    if lengths is None or isinstance(lengths, int):
        rows = [lengths or 40] * 3

    def attend(*inputs):
        return attnmask.torch.flash_attention_with_kvcache(*inputs, **more, return_lse=True)

    def by_rows(query, keys, values):
        own = {"causal": True, "return_lse": True} | more
        del own["cache_seqlens"]
        parts = [
            attnmask.torch.flash_attention(
                query[i : i + 1], keys[i : i + 1, :n], values[i : i + 1, :n], **own, causal_offset=n - 5
            )
            for i, n in enumerate(rows)
        ]
        return [torch.cat(x) for x in zip(*parts, strict=True)]

    own, other = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    for a, b in zip(attend(*own), attend(*inputs), strict=True):
        torch.testing.assert_close(a, b)
    slopes = [torch.randn_like(x) for x in attend(*inputs)]
    first, right = (
        torch.autograd.grad(call(*x), x, slopes, create_graph=True)
        for call, x in ((attend, own), (by_rows, other))
    )
    second, right_second = (
        torch.autograd.grad([y.square().sum() for y in grads], x)
        for grads, x in ((first, own), (right, other))
    )
    moved = [torch.func.jvp(call, tuple(inputs), tuple(inputs))[1] for call in (attend, by_rows)]
    for a, b in zip((*first, *second, *moved[0]), (*right, *right_second, *moved[1]), strict=True):
        torch.testing.assert_close(a, b)


def test_derivatives_of_caches_that_are_refused(torch):
    query, cache = torch.ones(1, 2, 4, 16), torch.ones(1, 8, 2, 16)
    learned, attend = query.clone().requires_grad_(), attnmask.torch.flash_attention_with_kvcache
    for lengths in 9, -1, torch.tensor([9]), [9]:
        with pytest.raises(ValueError, match="cache_seqlens must be from 0 to 8, the tokens of k_cache, got"):
            attend(learned, cache, cache, cache_seqlens=lengths)
    scales = {"k_scale": torch.ones(1, 8, 2, 1), "v_scale": torch.ones(1, 8, 2, 1)}
    for without, caches, more in (
        ("key", (cache, cache), {"key": cache[:, :2], "value": cache[:, :2], "cache_seqlens": 0}),
        ("block_table", (cache, cache), {"block_table": [[0]]}),
        ("attention_mask", (cache, cache), {"attention_mask": np.ones((2, 8), bool)}),
        ("bias", (cache, cache), {"bias": np.zeros((2, 8), np.float32)}),
        ("out", (cache, cache), {"out": torch.empty_like(query)}),
        ("a v_cache of float16", (cache, cache.half()), {}),
        ("a k_cache of int8", (cache.to(torch.int8),) * 2, scales),
    ):
        words = f"_kvcache has no gradient with {without}, and query requires one: call it under"
        with pytest.raises(RuntimeError, match=words):
            attend(learned, *caches, **more)
    compiled = torch.compile(lambda *x: attend(*x, cache_seqlens=5), backend="aot_eager", fullgraph=True)
    compiled(learned, cache, cache).sum().backward()
    twin = query.clone().requires_grad_()
    attend(twin, cache, cache, cache_seqlens=5).sum().backward()
    torch.testing.assert_close(learned.grad, twin.grad)


def test_out_by_itself(torch):
    arguments, out = tensors(torch, made("rows")), torch.empty(5, 4, 3, 16).transpose(1, 2)
    assert attnmask.torch.flash_attention_with_kvcache(**arguments, out=out) is out
    assert torch.equal(out, attnmask.torch.flash_attention_with_kvcache(**tensors(torch, made("rows"))))
    with pytest.raises(RuntimeError, match="and out requires one"):
        attnmask.torch.flash_attention_with_kvcache(**arguments, out=out.clone().requires_grad_())
    loss = (out * torch.ones((), requires_grad=True)).sum()
    attnmask.torch.flash_attention_with_kvcache(**arguments, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_out_of_a_wrong_kind_in_a_graph(torch):
    arguments = tensors(torch, good("paged"))
    out = arguments.pop("out")

    @torch.compile(backend="aot_eager", fullgraph=True)
    def attend(out):
        return attnmask.torch.flash_attention_with_kvcache(**arguments, out=out)

    for wrong in (out[..., :4], out.half()):
        with pytest.raises(Exception, match=r"out must be a tensor of float32 of shape \(2, 3, 4, 5\), got"):
            attend(wrong)
        assert (arguments["k_cache"] == 7).all()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not (attend(out.bfloat16()) == 77).any()


# Bad input


def test_bad_values(torch):
    arguments = good("paged")
    out = arguments.pop("out")
    arguments = tensors(torch, arguments)
    call = attnmask.torch.flash_attention_with_kvcache
    for more, error, words in (
        ({"k_scale": np.ones((6, 4, HKV, 1), F32)}, TypeError, "k_scale must be a tensor, got float32 array"),
        ({"return_lse": 1}, TypeError, "return_lse must be True or False, got 1"),
        ({"out": out}, TypeError, "out must be a tensor, got float32 array"),
        ({"out": torch.zeros(out.shape, dtype=torch.float16)}, ValueError, "out must be an array of float32 .* got fl"),
        ({"out": torch.zeros(2, 3, 4, 6)}, ValueError, r"out must be an array of float32 of shape \(2, 3, 4, 5\)"),
        ({"out": torch.zeros(1, 1, 1, 5).expand(out.shape)}, ValueError, "out must (be writeable|not overlap itself)"),
        ({"out": torch._neg_view(torch.zeros(out.shape))}, ValueError, "out must be writeable"),
        ({"out": arguments["v_cache"].view(-1)[:120].view(2, 3, 4, 5)}, ValueError, "out must share no memory with v"),
        ({"rotate": 1}, TypeError, "rotate must be True or False, got 1"),
        ({"rotate": True}, ValueError, "the channels of v_cache must be a power of two to be rotated, got 5"),
        ({"cache_seqlens": None}, ValueError, "cache_seqlens must be given with block_table"),
        ({"cache_seqlens": [4, 10]}, ValueError, "room for, 12 per sequence"),
        *(
            ({"block_table": x}, ValueError, r"block_table must be of shape \(2, max_pages\), got")
            for x in (*NUMBERS, torch.tensor(1, dtype=torch.int16))
        ),
        ({"block_table": torch.tensor([[5, 6, -1], [0, 4, 2]])}, IndexError, "block_table must be from 0 to 5"),
        ({"query": arguments["query"].double()}, TypeError, "query must be .* bfloat16 with a cache of float32"),
        ({"query": arguments["query"].to(torch.float8_e4m3fn)}, TypeError, "query must be of float16, bfloat16"),
        ({"k_cache": arguments["k_cache"].to_sparse()}, TypeError, "k_cache must be a tensor whose memory"),
        ({"k_cache": torch._neg_view(arguments["k_cache"])}, ValueError, "k_cache must be writeable"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            call(**arguments | more)
    assert (arguments["k_cache"] == 7).all()
    parameter = torch.nn.Parameter(arguments["k_cache"], requires_grad=False)
    call(**arguments | {"k_cache": parameter})
    assert (parameter == 0).any()


def test_wrong_shapes_are_told_when_tracing(torch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    arguments = good("rows")
    del arguments["out"]
    arguments = tensors(torch, arguments)
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(x) for name, x in arguments.items()}
        out, lse = attnmask.torch.flash_attention_with_kvcache(**fakes, return_lse=True)
        assert (out.shape, lse.shape) == ((B, TQ, H, fakes["v_cache"].shape[3]), (B, H, TQ))
        for name, x, words in (
            (
                "query",
                fakes["query"][0],
                r"query must be \[B, T, H, D\], got float32 tensor of shape \(3, 4, 8\)",
            ),
            ("k_cache", fakes["k_cache"][0], r"k_cache must be \[B, Tmax, Hkv, D\] or"),
            ("cu_seqlens_q", torch.zeros(3), r"query must be \[total, H, D\] with cu_seqlens_q"),
        ):
            with pytest.raises(ValueError, match=words):
                attnmask.torch.flash_attention_with_kvcache(**fakes | {name: x})
        assert fakes["query"].shape[-1] == D


def misaligned(torch, *shape):
    memory = np.zeros(4 * math.prod(shape) + 1, np.uint8)
    return torch.from_numpy(memory[1:].view(np.float32).reshape(shape))


def test_misaligned_caches_and_states_are_refused(torch):
    """NumPy reads such memory by a copy, to which nothing may be written in its place."""
    x, tokens = torch.ones(1, 1, 1, 8), torch.ones(1, 8)
    for attend in (attnmask.flash_attention_with_kvcache, attnmask.torch.flash_attention_with_kvcache):
        caches = misaligned(torch, 2, 1, 4, 1, 8)
        with pytest.raises(ValueError, match=r"^k_cache must be (an aligned|writeable)"):
            attend(x, *caches, x, x, cache_seqlens=0)
        assert attend(x, *caches, cache_seqlens=1).shape == x.shape
        assert not caches.any()
    for convolve in (attnmask.short_convolution_step, attnmask.torch.short_convolution_step):
        with pytest.raises(ValueError, match=r"^state must be (aligned|writeable)"):
            convolve(tokens, torch.ones(8, 4), misaligned(torch, 1, 8, 3))


def test_finite_keys_have_finite_scales(torch):
    """As in NumPy: float16 cannot hold them."""
    key = torch.linspace(-1, 1, 64).view(1, 1, 1, 64) * 3e38
    caches = torch.zeros(2, 1, 4, 1, 32, dtype=torch.uint8)
    scales = torch.zeros(2, 1, 4, 1, 2, 2, dtype=torch.float16)
    out = attnmask.torch.flash_attention_with_kvcache(
        torch.full_like(key, 1e-38), *caches, key, torch.ones_like(key), cache_seqlens=0,
        k_scale=scales[0], v_scale=scales[1],
    )  # fmt: skip
    assert torch.allclose(out, torch.ones(()))
    assert scales.isfinite().all()
