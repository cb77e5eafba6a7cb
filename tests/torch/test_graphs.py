"""The operators of attnmask.torch: in graphs, under transforms of functions, compiled and exported."""

import io
import itertools
import shutil
import types

import pytest
from random_masks import every_mask

import attnmask
from attnmask import MaskInfo

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute",  # of a tensor on the way; torch hides it, too late
    "ignore:`isinstance.treespec, LeafSpec:FutureWarning",
)


@pytest.fixture
def query(torch):
    return torch.randn(1, 4, 1, 8)


def attend(query, **more):
    return attnmask.torch.flash_attention(query, query, query, causal=True, **more)


def tensors(torch, *shapes, wanting=True):
    return [torch.randn(shape, dtype=torch.float64, requires_grad=wanting) for shape in shapes]


def assert_same(torch, got, right):
    for one, other in zip(got, right, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


# The operators by themselves


def operands(torch, **arguments):
    return attnmask.torch._attention._attend.operands.of({"attention_mask": None} | arguments)


PLAIN = ({}, {"causal": True, "softmax_scale": 0.5, "bias": None}, {"causal": True, "causal_offset": 2})
NOT_PLAIN = (
    {"return_lse": True},
    {"sliding_window": 2},
    {"causal": True, "causal_offset": "bottom-right"},
    {"normalize_output": False},
    {"logits_soft_cap": 2.0},
)


@pytest.mark.parametrize("more", PLAIN + NOT_PLAIN, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_calls_that_ask_for_little(torch, more, dtype):
    """They go to an operator of few arguments, unless a gradient is wanted."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph.code)
        return graph

    class Attention(torch.nn.Module):
        def forward(self, *tensors):
            return attnmask.torch.flash_attention(*tensors, **more)

    attend = Attention()
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=backend)
    for shape in (2, 5, 2, 8), (1, 7, 2, 8):
        given = [x.detach().to(getattr(torch, dtype)) for x in tensors(torch, *[shape] * 3)]
        got, right = compiled(*given), attend(*given)
        assert_same(
            torch, got if more.get("return_lse") else [got], right if more.get("return_lse") else [right]
        )
    assert all(("flash_attention_plain" in code) == (more in PLAIN) for code in graphs)
    graphs.clear()
    given[1].requires_grad_()
    compiled(*given)
    with torch.autocast("cpu"):
        compiled(*given)
    exported = torch.export.export(attend, tuple(x.detach() for x in given), strict=True)
    assert not any("flash_attention_plain" in code for code in (*graphs, exported.graph_module.code))


def test_compiled_calls_with_a_mask_alone(torch):
    """They go to an operator of few arguments, unless more is asked for."""
    graphs, mask = [], attnmask.MaskInfo.from_segments([[0, 0, 1, 1, 1]])
    given = [x.detach() for x in tensors(torch, *[(2, 5, 2, 8)] * 3)]

    def attend(*given, **more):
        return attnmask.torch.flash_attention(*given, mask, **more)

    def backend(graph, _):
        graphs.append(graph.code)
        return graph

    cases = ({}, True), ({"causal": True, "softmax_scale": 0.5}, True), ({"sliding_window": 1}, False)
    for more, few in cases:
        compiled = torch.compile(attend, fullgraph=True, backend=backend)
        assert torch.equal(compiled(*given, **more), attend(*given, **more))
        assert ("flash_attention_masked" in graphs[-1]) == few
    graphs.clear()
    compiled(given[0].clone().requires_grad_(), *given[1:])
    assert not any("flash_attention_masked" in code for code in graphs)
    described = attnmask.torch.mask_tensors(mask)
    operator, plain = torch.ops.attnmask.flash_attention_masked.default, (False, None, None)
    torch.library.opcheck(operator, (*given, [*described.tensors], described.specification, *plain))
    elsewhere = [x.to("meta") for x in described.tensors]
    with pytest.raises(TypeError, match="mask_tensors must be on cpu as query, got a tensor on meta"):
        operator(*given, elsewhere, described.specification, *plain)


def test_compiled_diagonals_of_packed_sequences(torch):
    query, key, value = (x.detach() for x in tensors(torch, (5, 2, 3), (6, 1, 3), (6, 1, 4)))

    def attend(query, *starts):
        more = dict(zip(("cum_seqlens_q", "cum_seqlens_k"), starts, strict=True))
        return attnmask.torch.flash_attention(
            query, key, value, causal=True, causal_offset="bottom-right", **more
        )

    given = query, torch.tensor([0, 2, 5]), torch.tensor([0, 4, 6])
    assert torch.equal(torch.compile(attend, fullgraph=True, backend="eager")(*given), attend(*given))


def test_out_must_fit(torch, query):
    inputs = operands(torch, query=query, key=query, value=query)
    out, lse = torch.ops.attnmask.flash_attention(*inputs)
    into = torch.ops.attnmask.flash_attention.out
    for more, error, words in (
        (
            {"lse": lse.double()},
            ValueError,
            r"lse must be a float32 tensor of shape \(1, 1, 4\), got float64 tensor",
        ),
        ({"out": out[:, :2]}, ValueError, r"out must be a float32 tensor of shape \(1, 4, 1, 8\), got"),
        ({"out": query}, ValueError, "out must share no memory with query"),
        ({"out": out.to("meta")}, TypeError, "lse must be on meta as out, got a tensor on cpu"),
    ):
        with pytest.raises(error, match=words):
            into(*inputs, **{"out": out, "lse": lse} | more)
    with pytest.raises(RuntimeError, match=r"flash_attention\.out has no gradient"):
        into(query.requires_grad_(), *inputs[1:], out=out, lse=lse)
    with pytest.raises(TypeError, match="value must be on cpu as query, got a tensor on meta"):
        torch.ops.attnmask.flash_attention_plain(query, query, query.to("meta"), False, 0, None)


# Graphs


def make_fx(torch, function, query, **more):
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, **more)(query)


def exported(torch, function, query, **more):
    class Module(torch.nn.Module):
        def forward(self, query):
            return function(query)

    return torch.export.export(Module(), (query,), **more).module()


TRACES = {
    "make_fx": make_fx,
    "make_fx of fakes": lambda *args: make_fx(*args, tracing_mode="symbolic"),
    "make_fx before dispatch": lambda *args: make_fx(*args, pre_dispatch=True),
    "jit": lambda torch, function, query: torch.jit.trace(function, query),
    "export": exported,
    "strict export": lambda *args: exported(*args, strict=True),
    "compile": lambda torch, function, query: torch.compile(function, backend="eager", fullgraph=True),
}


@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES)
def test_no_constant_in_a_graph(torch, query, trace):
    """A graph of one query gives the right result for another one."""
    graph = trace(torch, attend, query)
    for other in (query, 2 * query):
        assert torch.equal(graph(other), attend(other))


def test_graph_of_a_gradient(torch, query):
    """Also of the short way that calls outside of graphs take."""
    query.requires_grad_()
    out = attend(query)

    def gradient(dout):
        return torch.autograd.grad(out, query, dout, retain_graph=True)[0]

    graph = make_fx(torch, gradient, torch.ones_like(out))
    dout = torch.randn_like(out)
    assert torch.equal(graph(dout), gradient(dout))


def test_wrong_shapes_are_told_when_tracing(torch, query):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(query)
        for key, error, words in (
            (
                fake[..., :4],
                ValueError,
                r"key must have D = 8 as query, got float32 tensor of shape \(1, 4, 1, 4\)",
            ),
            (fake.double(), TypeError, "key must be .*float32 as query, got float64 tensor"),
            (fake[0], ValueError, "key must be"),
        ):
            with pytest.raises(error, match=words):
                attnmask.torch.flash_attention(fake, key, fake)
        with pytest.raises(TypeError, match="unexpected keyword argument 'causality'"):
            attnmask.torch.flash_attention(fake, fake, fake, causality=True)
        with pytest.raises(TypeError, match="fwd_params must be"):
            attnmask.torch.flash_attention(fake, fake, fake, fwd_params=3)


# torch.func


def test_functionalize(torch, query):
    assert torch.equal(torch.func.functionalize(attend)(query), attend(query))


def test_tangents_for_the_operator(torch, query):
    inputs = [*operands(torch, query=query, key=query, value=query)]
    right = torch.ops.attnmask.flash_attention(*inputs)[0]
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        inputs[2] = forward_ad.make_dual(query, query)
        out, _ = torch.ops.attnmask.flash_attention(*inputs)
        torch.testing.assert_close(forward_ad.unpack_dual(out).tangent, right)


# torch.compile


def test_specifications_have_a_version(torch):
    made = attnmask.torch.mask_tensors(attnmask.MaskInfo.causal(3))
    assert made.specification.startswith("[1, ")
    query = torch.zeros(1, 3, 1, 8)
    later = made._replace(specification="[2" + made.specification[2:])
    with pytest.raises(ValueError, match="must be of form 1, got 2; a later version of attnmask"):
        attnmask.torch.flash_attention(query, query, query, later)


NO_SPECIFICATIONS = """
nonsense
{"a": 1}
[1]
[true, [1, 1, 3, 3], []]
[1, [1, 3, 3], []]
[1, [1, 1, 3, 3], [3]]
[1, [1, 1, 3, 3], [["al"]]]
[1, [1, 1, 3, 3], [["all", 1]]]
[1, [1, 1, 3, 3], [["band", [[]], 0, 0]]]
"""


@pytest.mark.parametrize("specification", NO_SPECIFICATIONS.split("\n")[:-1])
def test_specifications_that_are_none(torch, specification):
    """A right one needs as many tensors as it says."""
    query = torch.zeros(1, 3, 1, 8)
    made = attnmask.torch.mask_tensors(attnmask.MaskInfo.from_segments([[0, 0, 1]]))
    with pytest.raises(ValueError, match=r"^specification must be from mask_tensors, got '"):
        attnmask.torch.flash_attention(query, query, query, made._replace(specification=specification))
    for tensors in ((), made.tensors * 2):
        with pytest.raises(
            ValueError, match=f"^mask_tensors must be 1 tensors for this .*, got {len(tensors)}"
        ):
            attnmask.torch.flash_attention(query, query, query, made._replace(tensors=tensors))
    assert attnmask.torch.flash_attention(query, query, query, made).shape == query.shape


FOLLOWS_LENGTH = {
    "window": lambda t: {"sliding_window": t // 2},
    "sides": lambda t: {"sliding_window": (t // 2, 0), "causal_offset": t // 3},
    "seed": lambda t: {"dropout_prob": 0.5, "dropout_seed": t},
}


@pytest.mark.parametrize("more", FOLLOWS_LENGTH.values(), ids=FOLLOWS_LENGTH)
def test_numbers_that_follow_a_length(torch, more):
    """One graph does for all lengths."""
    graphs = []

    def attend(query):
        return attnmask.torch.flash_attention(query, query, query, **more(query.shape[1]))

    def decode(query):
        given = {
            "cache_seqlens": query.shape[1] // 2,
            "sliding_window": more(query.shape[1]).get("sliding_window"),
        }
        return attnmask.torch.flash_attention_with_kvcache(query, query, query, **given)

    queries = [torch.randn(1, length, 1, 8) for length in (5, 9, 12, 17, 21)]
    for function in (attend, decode):
        graphs.clear()
        compiled = torch.compile(function, dynamic=True, fullgraph=True, backend=counting(graphs))
        for query in queries:
            assert torch.equal(compiled(query), function(query))
        assert len(graphs) == 1
        program = exported(torch, function, queries[2], dynamic_shapes=({1: torch.export.Dim.DYNAMIC},))
        for query in queries:
            assert torch.equal(program(query), function(query))


def test_mask_tensors(torch):
    """Any mask comes back as it was."""
    from attnmask.torch._masks import restored

    for mask in every_mask(6, 5).values():
        assert restored(*attnmask.torch.mask_tensors(mask)) == mask
    with pytest.raises(TypeError, match="mask must be a MaskInfo, got None"):
        attnmask.torch.mask_tensors(None)
    with pytest.raises(ValueError, match="the MaskInfo must have an attention_mask"):
        attnmask.torch.mask_tensors(MaskInfo())


def counting(graphs):
    """A backend that keeps the graphs."""

    def backend(graph, _):
        graphs.append(graph)
        return graph

    return backend


@pytest.mark.parametrize("as_tensors", [False, True])
def test_compiled_with_other_masks(torch, as_tensors):
    """A graph does for all masks that differ in the contents of their arrays, as arguments, attributes or globals."""
    given = attnmask.torch.mask_tensors if as_tensors else lambda mask: mask
    holder, graphs = types.SimpleNamespace(), []
    compiled = torch.compile(
        lambda query, mask: (
            attnmask.torch.flash_attention(query, query, query, mask)
            + attnmask.torch.flash_attention(query, query, query, attnmask.torch.mask_tensors(holder.mask))
        ),
        backend=counting(graphs),
        fullgraph=True,
    )
    query = torch.randn(1, 4, 1, 8)
    for ids in ([[0, 0, 1, 1]], [[0, 1, 1, 1]], [[0, 1, 2, -1]]):
        mask, holder.mask = MaskInfo.from_segments(ids).apply_causal(), MaskInfo.from_segments(ids)
        out, other = (attnmask.torch.flash_attention(query, query, query, x) for x in (mask, holder.mask))
        assert torch.equal(compiled(query, given(mask)), out + other)
    assert len(graphs) == 1
    mask = mask.apply_sliding_window(1)
    right = attnmask.torch.flash_attention(query, query, query, mask)
    assert torch.equal(compiled(query, given(mask)), right + other)
    assert len(graphs) == 2


def test_a_mask_that_was_compiled_without_gradients(torch):
    """What is kept of it in that mode may be saved for gradients."""
    query, mask = torch.randn(1, 4, 1, 8), MaskInfo.from_segments([[0, 0, 1, 1]])
    compiled = torch.compile(
        lambda query: attnmask.torch.flash_attention(query, query, query, mask),
        backend="aot_eager",
        fullgraph=True,
    )
    with torch.inference_mode():
        compiled(query)
    query.requires_grad_()
    right = torch.autograd.grad(attnmask.torch.flash_attention(query, query, query, mask).sum(), query)
    assert torch.equal(torch.autograd.grad(compiled(query).sum(), query)[0], right[0])


MADE_INSIDE = {
    "from_segments": lambda query, mask: MaskInfo.from_segments([[0, 0, 1, 1]]),
    "of tensors": lambda query, mask: MaskInfo.from_segments(query[..., 0, 0] > 0, is_attn_mask=True),
    "__init__": lambda query, mask: MaskInfo(q_segment_ids=[[0] * 4], kv_segment_ids=[[0] * 4]),
    "method": lambda query, mask: mask.apply_sliding_window(1),
    "operator": lambda query, mask: ~(mask & mask) | mask,
    "slice": lambda query, mask: mask[:, :, :4, :],
}


@pytest.mark.parametrize("make", MADE_INSIDE.values(), ids=MADE_INSIDE)
def test_masks_that_are_made_in_compiled_functions(torch, make):
    """The graph ends before; where it must not, the error says what to do."""

    def function(query, mask):
        return attnmask.torch.flash_attention(query * 2, query, query, make(query, mask)) + 1

    arguments = torch.randn(1, 4, 1, 8), MaskInfo.from_segments([[0] * 4])
    assert torch.equal(torch.compile(function, backend="eager")(*arguments), function(*arguments))
    torch._dynamo.reset()
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=r"pass it to them, or what attnmask\.torch\.mask_tensors"
    ):
        torch.compile(function, backend="eager", fullgraph=True)(*arguments)


def test_a_mask_without_pairs(torch):
    query = torch.randn(1, 4, 1, 8)
    with pytest.raises(ValueError, match="the MaskInfo must have an attention_mask"):
        torch.compile(attnmask.torch.flash_attention, backend="eager")(query, query, query, MaskInfo())


def test_functions_of_arrays_in_compiled_functions(torch):
    """The graph ends before; where it must not, the error names the function of tensors."""
    query = torch.randn(1, 4, 1, 8)
    for name, more in (
        ("flash_attention", {}),
        ("flash_attention_fwd", {}),
        ("flash_attention_vjp", {}),
        ("flash_attention_with_kvcache", {"cache_seqlens": 4}),
    ):
        torch._dynamo.reset()

        def function(query, name=name, more=more):
            found = getattr(attnmask, name)(2 * query, query, query, **more)
            return torch.from_numpy(found[0] if isinstance(found, tuple) else found) + 1

        assert torch.equal(torch.compile(function, backend="eager")(query), function(query))
        torch._dynamo.reset()
        instead = "flash_attention_with_kvcache" if "kvcache" in name else "flash_attention"
        with pytest.raises(
            torch._dynamo.exc.Unsupported, match=rf"call attnmask\.torch\.{instead}, which goes into"
        ):
            torch.compile(function, backend="eager", fullgraph=True)(query)


def test_compiled_gradients(torch, query):
    """By PyTorch's own compiler of gradients."""
    query.requires_grad_()
    mask = MaskInfo.from_segments([[0, 0, 1, 1]]).apply_causal()

    def loss():
        return attnmask.torch.flash_attention(query, query, query, mask).sin().sum()

    (right,) = torch.autograd.grad(loss(), query)
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: loss().backward(), backend="eager")()
    assert torch.equal(query.grad, right)


# A transformer of packed documents


def transformer(torch, layers=2, width=16, heads=2, words=11):
    linear = torch.nn.Linear

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.LayerNorm(width)
            self.project, self.out = linear(width, 3 * width), linear(width, width)
            self.more = torch.nn.Sequential(
                linear(width, 2 * width), torch.nn.GELU(), linear(2 * width, width)
            )

        def forward(self, x, starts):
            query, key, value = self.project(self.norm(x)).unflatten(-1, (3, heads, -1)).unbind(-3)
            attended = attnmask.torch.flash_attention(query, key, value, cum_seqlens_q=starts, causal=True)
            x = x + self.out(attended.flatten(-2))
            return x + self.more(x)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(words, width), linear(width, words)
            self.layers = torch.nn.ModuleList(Layer() for _ in range(layers))

        def forward(self, tokens, starts):
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x, starts)
            return self.head(x)

    return Model()


def batch(torch, *lengths):
    tokens = torch.randint(11, (sum(lengths),))
    return tokens, torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def training_step(torch, model, tokens, starts):
    """The loss, and the gradients of all parameters."""
    loss = torch.nn.functional.cross_entropy(model(tokens, starts), tokens.roll(-1))
    return loss, *torch.autograd.grad(loss, model.parameters())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_transformer(torch, backend):
    """Forward and training step, of any number of tokens and documents."""
    if backend == "inductor" and not any(map(shutil.which, ("g++", "clang++"))):
        pytest.skip("needs a C++ compiler")
    model = transformer(torch)
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for lengths in ((7, 5, 8), (12, 9, 2, 4)):
        data = batch(torch, *lengths)
        with torch.no_grad():
            torch.testing.assert_close(compiled(*data), model(*data))
        for one, other in zip(
            training_step(torch, compiled, *data), training_step(torch, model, *data), strict=True
        ):
            torch.testing.assert_close(one, other)


@pytest.mark.long
@pytest.mark.parametrize("strict", [False, True])
def test_exported_transformer(torch, strict):
    model = transformer(torch)
    data = batch(torch, 7, 5, 8)
    count = torch.export.Dim("count", min=2), torch.export.Dim("documents", min=2)
    program = torch.export.export(model, data, dynamic_shapes=tuple({0: dim} for dim in count), strict=strict)
    program = program.run_decompositions()
    names = [str(node.target) for node in program.graph.nodes]
    assert names.count("attnmask.flash_attention.default") == 2
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    other = batch(torch, 3, 9, 1, 8)
    for exported in (program, torch.export.load(file)):
        for one in (data, other):
            torch.testing.assert_close(exported.module()(*one), model(*one))


def test_shapes_unknown_at_export(torch):
    """The number of heads must be known; that of tokens need not be, even if it comes from data."""

    class Module(torch.nn.Module):
        def forward(self, query, keep):
            query = query[keep]
            starts = torch.tensor([0, 0], dtype=torch.int64) + torch.tensor([0, query.shape[0]])
            return attnmask.torch.flash_attention(query, query, query, cum_seqlens_q=starts)

    query, keep = torch.randn(6, 2, 8), torch.tensor([True, False, True, True, False, True])
    exported = torch.export.export(Module(), (query, keep)).module()
    for kept in (keep, ~keep):
        torch.testing.assert_close(exported(query, kept), Module()(query, kept))
