"""attnmask.torch.flash_attention_with_kvcache gives the bits of NumPy's function, also from graphs."""

import io
import math

import ml_dtypes
import numpy as np
import pytest
from kvcache_bad_input import HKV, TQ, B, D, H, good
from kvcache_cases import BF16, F16, F32, F64, Case, arguments_of
from tensors import tensor

import attnmask
from attnmask import MaskInfo
from attnmask._attention.arguments import FLASH_ATTENTION_WITH_KVCACHE

pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning")
WRITTEN = ("k_cache", "v_cache", "k_scale", "v_scale")
LONG = {"lengths": (65, 1, 64, 0, 130), "new": "as many"}
CASES = {
    "rows": Case(**LONG, queries=3),
    "pages": Case(**LONG, queries=2, page_size=16, types=(BF16, BF16), window=(20, 0), soft_cap=2.0),
    "packed": Case(**LONG, queries=(1, 17, 0, 3), page_size=64, types=(F16, F16), sinks="[H, S]", slopes="[B, H]"),
    "contiguous packed": Case(**LONG, queries=(1, 5), types=(F64, F64), depths=(16, 24), scale=0.3),
    "masked": Case(**LONG, queries=3, page_size=7, mask="[B, H, Tq, K] bool", causal=False, types=(F32, BF16)),
    "MaskInfo": Case(**LONG, queries=3, mask="info of segments [B]", depths=(7, 5)),
    "new packed": Case(lengths=(65, 1, 64), new="packed", queries=2, page_size=16),
    "chunks": Case(**LONG, queries=3, page_size=16, chunk=50),
    "biased": Case(**LONG, queries=3, page_size=16, bias="[B, H, Tq, K]", relative=(30, -20), types=(BF16, BF16)),
    "packed, biased": Case(**LONG, queries=(1, 17, 0, 3), page_size=64, bias="[1, H, 1, K]", relative=(9, -4)),
    "nothing new": Case(lengths=(65, 1, 64), queries=3, page_size=16),
    "both in one": Case(**LONG, queries=1, page_size=16, layout="keys beside values"),
    "heads first": Case(**LONG, queries=1, page_size=16, layout="heads first"),
}  # fmt: skip


def tensors(torch, arguments):
    return {name: tensor(torch, x) for name, x in arguments.items() if x is not None}


WIDE = ("query", "key", "value", "k_cache", "v_cache")


def quantized(dtype, packed, by_channel=False):
    """Arguments of a quantized cache of pages."""
    rng = np.random.default_rng(0)
    arguments = good("packed, paged" if packed else "paged")
    del arguments["out"]
    for name in ("query", "key", "value"):
        arguments[name] = rng.standard_normal(arguments[name].shape, F32)
    if dtype == "int4":
        wide = {
            name: rng.standard_normal((*arguments[name].shape[:-1], 64), F32)
            for name in arguments
            if name in WIDE
        }
        arguments |= wide
        for side in "kv":
            arguments[f"{side}_cache"], arguments[f"{side}_scale"] = attnmask.quantize_kv(
                wide[f"{side}_cache"], dtype
            )
        return arguments
    for side in "kv":
        numbers = rng.standard_normal(arguments[f"{side}_cache"].shape, F32)
        axis = (0, 1) if by_channel else -1
        arguments[f"{side}_cache"], arguments[f"{side}_scale"] = attnmask.quantize_kv(numbers, dtype, axis)
    return arguments


def made(name):
    if name in CASES:
        return {key: x for key, x in arguments_of(CASES[name]).items() if x is not None}
    dtype, *how = name.split()
    return quantized(
        dtype if dtype == "int4" else getattr(ml_dtypes, dtype, dtype), "packed" in how, "channels" in how
    )


NAMES = [
    *CASES, "int8", "int8 packed", "int8 channels", "float8_e4m3fn", "float8_e4m3fn packed", "float8_e4m3fn channels",
    "float8_e5m2", "int4", "int4 packed",
]  # fmt: skip


def bits(x):
    return np.ascontiguousarray(x).tobytes()


def assert_same(torch, results, arguments, name):
    """As NumPy's function, in results and in what is written."""
    expected = made(name)
    right = attnmask.flash_attention_with_kvcache(**expected, return_lse=True)
    for one, other in zip(results, right, strict=True):
        assert isinstance(one, torch.Tensor)
        assert bits(attnmask._common.arguments.as_array(one, "out")) == bits(other)
    for key in WRITTEN:
        if key in expected:
            assert bits(attnmask._common.arguments.as_array(arguments[key], key)) == bits(expected[key]), key


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


def operands(torch, arguments):
    return attnmask.torch._cache._operands(FLASH_ATTENTION_WITH_KVCACHE.bind((), arguments))


def test_the_operator(torch, name):
    """opcheck looks at what is written, and traces with shapes that may change."""
    operator = torch.ops.attnmask.flash_attention_with_kvcache.default
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    if "float8" in name:  # which opcheck cannot compare
        checks = checks[1:3]
    torch.library.opcheck(operator, operands(torch, tensors(torch, made(name))), test_utils=checks)
    arguments = tensors(torch, made(name))
    assert_same(torch, operator(*operands(torch, arguments)), arguments, name)
    written = [a.name for a in operator._schema.arguments if a.alias_info and a.alias_info.is_write]
    assert tuple(written) == WRITTEN


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled(torch, name, backend):
    if backend == "inductor" and name not in ("rows", "packed", "int8", "both in one"):
        pytest.skip("takes long")
    arguments = tensors(torch, made(name))
    if isinstance(arguments.get("attention_mask"), MaskInfo):
        arguments["attention_mask"] = attnmask.torch.mask_tensors(arguments["attention_mask"])

    @torch.compile(backend=backend, fullgraph=True)
    def compiled(arguments):
        return attnmask.torch.flash_attention_with_kvcache(**arguments, return_lse=True)

    assert_same(torch, compiled(arguments), arguments, name)


def test_compiled_with_a_mask(torch):
    arguments = tensors(torch, made("MaskInfo"))

    def function(**arguments):
        return attnmask.torch.flash_attention_with_kvcache(**arguments, return_lse=True)

    results = torch.compile(function, backend="aot_eager", fullgraph=True)(**arguments)
    assert_same(torch, results, arguments, "MaskInfo")


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


class Decoder:
    """A step of a decoder, whose caches are buffers: new tokens are appended at a place that is an input."""

    @staticmethod
    def module(torch):
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
        program = torch.export.export(
            Decoder.module(torch), (x, lengths), dynamic_shapes=shapes, strict=strict
        )
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        eager = Decoder.module(torch)
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

    eager, module = Decoder.module(torch), Decoder.module(torch)
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


def test_autocast(torch):
    """Queries and new tokens are cast, caches are not."""
    arguments = tensors(torch, made("rows"))

    def function(given):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attnmask.torch.flash_attention_with_kvcache(**given)

    def fresh():
        return {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}

    given = fresh()
    for name in ("query", "key", "value"):
        given[name] = given[name].bfloat16()
    right = attnmask.torch.flash_attention_with_kvcache(**given)
    assert right.dtype == torch.bfloat16
    for run in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        got = fresh()
        assert torch.equal(run(got), right)
        assert torch.equal(got["k_cache"].nan_to_num(), given["k_cache"].nan_to_num())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = torch.ops.attnmask.flash_attention_with_kvcache(*operands(torch, fresh()))
    assert torch.equal(out, right)


def test_autograd_knows_of_writes(torch):
    """A cache that a gradient needs may not have been written to in the meantime."""
    weight = torch.ones((), requires_grad=True)
    arguments = tensors(torch, made("rows"))
    loss = (arguments["v_cache"] * weight).sum()
    attnmask.torch.flash_attention_with_kvcache(**arguments)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loss = (arguments["v_cache"] * weight).sum()
    torch.ops.attnmask.flash_attention_with_kvcache(*operands(torch, arguments))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        arguments = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
        attnmask.torch.flash_attention_with_kvcache(**arguments)


def test_out(torch, name):
    """The same bits, in the caller's memory; also in graphs."""
    right = attnmask.torch.flash_attention_with_kvcache(**tensors(torch, made(name)), return_lse=True)

    def attend(out, **arguments):
        return attnmask.torch.flash_attention_with_kvcache(**arguments, out=out, return_lse=True)

    for run in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        arguments = tensors(torch, made(name))
        if isinstance(arguments.get("attention_mask"), MaskInfo):
            arguments["attention_mask"] = attnmask.torch.mask_tensors(arguments["attention_mask"])
        out = torch.full_like(right[0], 77.0)
        result, lse = run(out, **arguments)
        assert result.data_ptr() == out.data_ptr()
        assert torch.equal(out, right[0])
        assert torch.equal(lse, right[1])
        assert_same(torch, (out, lse), arguments, name)


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


@pytest.mark.parametrize("dtype", ["int4", "int8", "int8 packed"])
def test_rotated(torch, dtype):
    """The bits of NumPy's function, also from graphs."""

    def arguments():
        given = made(dtype)
        if "int8" in dtype:  # channels that are a power of two
            v_cache, value = np.zeros((*given["v_cache"].shape[:3], 4), np.int8), given["value"][..., :4]
            given |= {"v_cache": v_cache, "v_scale": np.ones((6, 4, HKV, 1), F32), "value": value}
        return given

    expected = arguments()
    right = attnmask.flash_attention_with_kvcache(**expected, rotate=True)

    def attend(**arguments):
        return attnmask.torch.flash_attention_with_kvcache(**arguments, rotate=True)

    for run in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        given = tensors(torch, arguments())
        assert bits(run(**given)) == bits(right)
        for key in WRITTEN:
            assert bits(given[key]) == bits(expected[key]), key


# Bad input


def test_no_gradient(torch):
    arguments = tensors(torch, made("rows"))
    words = "flash_attention_with_kvcache has no gradient, and {} requires one: call it under torch.no_grad"
    right = attnmask.torch.flash_attention_with_kvcache(**tensors(torch, made("rows")))
    for name in ("query", "key", "value", "k_cache"):
        before = arguments["v_cache"].clone()
        given = arguments | {name: arguments[name].clone().requires_grad_()}
        compiled = torch.compile(
            attnmask.torch.flash_attention_with_kvcache, backend="aot_eager", fullgraph=True
        )
        for run in (attnmask.torch.flash_attention_with_kvcache, compiled):
            with pytest.raises(RuntimeError, match=words.format(name)):
                run(**given)
        with pytest.raises(RuntimeError, match=words.format(name)):
            torch.ops.attnmask.flash_attention_with_kvcache(*operands(torch, given))
        assert torch.equal(arguments["v_cache"].nan_to_num(), before.nan_to_num())
        with torch.no_grad():
            assert torch.equal(attnmask.torch.flash_attention_with_kvcache(**given), right)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(arguments["query"], arguments["query"])
        with pytest.raises(RuntimeError, match="no forward-mode derivative"):
            attnmask.torch.flash_attention_with_kvcache(**arguments | {"query": dual})


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
        ({"block_table": torch.tensor([[5, 6, -1], [0, 4, 2]])}, IndexError, "block_table must be from 0 to 5"),
        ({"query": arguments["query"].double()}, TypeError, "query must be .* bfloat16 with a k_cache of float32"),
        ({"query": arguments["query"].to(torch.float8_e4m3fn)}, TypeError, "query must be of float16, bfloat16"),
        ({"k_cache": arguments["k_cache"].to_sparse()}, TypeError, "k_cache must be a tensor whose memory"),
        ({"k_cache": torch._neg_view(arguments["k_cache"])}, ValueError, "k_cache must be writeable"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            call(**arguments | more)
    operator, given = torch.ops.attnmask.flash_attention_with_kvcache, operands(torch, arguments)
    given[6] = given[6].to("meta")
    with pytest.raises(TypeError, match="block_table must be on cpu as query, got a tensor on meta"):
        operator(*given)
    assert (arguments["k_cache"] == 7).all()
    parameter = torch.nn.Parameter(arguments["k_cache"], requires_grad=False)
    call(**arguments | {"k_cache": parameter})
    assert (parameter == 0).any()


def test_negated_tensors(torch):
    """A bit of a tensor says that its memory holds the other sign."""
    arguments = tensors(torch, made("rows"))
    right = attnmask.torch.flash_attention_with_kvcache(**tensors(torch, made("rows")))
    negated = {name: torch._neg_view(-arguments[name]) for name in ("query", "key", "value")}
    assert torch.equal(attnmask.torch.flash_attention_with_kvcache(**arguments | negated), right)


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
