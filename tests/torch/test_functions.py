"""attnmask.torch, and tensors as arguments of attnmask."""

import gc
import itertools
import weakref

import numpy as np
import pytest
from environment import import_paths, python

import attnmask
from attnmask import MaskInfo
from attnmask._common.arguments import as_array

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit:DeprecationWarning"
)  # by forward mode, of PyTorch itself


@pytest.fixture
def inputs(torch):
    """Query, key, value, bias and sinks: small tensors that require gradients."""
    shapes = (2, 5, 2, 3), (2, 6, 1, 3), (2, 6, 1, 4), (2, 5, 6), (2, 1)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def test_no_graph(torch, inputs):
    with torch.no_grad():
        assert not attnmask.torch.flash_attention(*inputs[:3]).requires_grad


def test_memory_is_shared(torch):
    """A tensor is used in place: a mask that borrows it sees changes."""
    tensor = torch.ones(1, 1, 2, 3, dtype=torch.bool)
    mask = MaskInfo(tensor)
    assert np.shares_memory(mask.attention_mask, tensor.numpy())


@pytest.mark.parametrize("wants_gradient", [False, True])
def test_a_warning_shows_the_line_of_the_user(torch, inputs, wants_gradient):
    query, key, value = (x.detach().requires_grad_(wants_gradient) for x in inputs[:3])
    with pytest.warns(attnmask.AttnmaskWarning, match="bottom-right") as caught:
        attnmask.torch.flash_attention(query[:, :1], key, value, causal=True)
    assert [warning.filename for warning in caught] == [__file__]


def test_refusals(torch, inputs):
    """Of those that want gradients; test_plain.py has other calls."""
    query, key, value, *_ = inputs
    with pytest.raises(TypeError, match="key must be on the CPU"):
        attnmask.flash_attention(query.detach(), key.to("meta"), value.detach())
    for name in ("out", "nonsense"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            attnmask.torch.flash_attention(query, key, value, **{name: None})
    with pytest.raises(TypeError, match="return_lse must be True or False"):
        attnmask.torch.flash_attention(query, key, value, return_lse=1)


HINTS = {
    "query": (lambda torch: torch.zeros(1, 4, 2, 8, dtype=torch.int32), r"write query\.to\(torch\.float32\)"),
    "key": (lambda torch: torch.zeros(1, 4, 2, 8).double(), r"write key\.to\(query\.dtype\)"),
    "bias": (lambda torch: torch.zeros(4, 4, dtype=torch.int32), r"or bias\.to\(torch\.float32\)"),
    "attention_mask": (lambda torch: torch.ones(4, 2, 5, 1), r"write torch\.permute\(attention_mask, \(3, 1, 0, 2\)\)"),
    "q_segment_ids": (lambda torch: torch.zeros(1, 4), r"write torch\.where\(mask, 0, -1\)"),
    "cum_seqlens_q": (lambda torch: torch.tensor([0, 3]), r"torch\.nn\.functional\.pad\(cum_seqlens_q, .*value=4\)"),
    "softmax_aux": (lambda torch: torch.zeros(3, 2), r"write softmax_aux\.T for"),
}  # fmt: skip


@pytest.mark.parametrize("name", HINTS)
def test_hints_for_tensors_speak_of_tensors(torch, name):
    """Those for arrays speak of arrays."""
    x, keys = torch.zeros(1, 4, 2, 8), torch.zeros(1, 5 if name == "attention_mask" else 4, 2, 8)
    make, hint = HINTS[name]
    given = {"query": x, "key": keys, "value": keys} | {name: make(torch)}
    arrays = {key: value.numpy() for key, value in given.items()}
    for call, arguments in (
        (attnmask.torch.flash_attention, given),
        (attnmask.torch.flash_attention, given | {"sliding_window": 2}),
        (attnmask.flash_attention, given),
        (attnmask.flash_attention_vjp, given),
        (attnmask.flash_attention, arrays | {name: given[name]}),
    ):
        with pytest.raises((TypeError, ValueError), match=hint):
            call(**arguments)
    with pytest.raises((TypeError, ValueError), match=r"np\.|\.astype"):
        attnmask.flash_attention(**given | {name: arrays[name]})
    if name == "softmax_aux":
        for module in (attnmask, attnmask.torch):
            with pytest.raises(ValueError, match=hint):
                module.flash_attention_with_kvcache(x, x, x, cache_seqlens=4, softmax_aux=given[name])


# Transformations of functions


@pytest.fixture
def query(torch):
    return torch.randn(1, 4, 1, 8)


def attend(query):
    return attnmask.torch.flash_attention(query, query, query, causal=True)


def test_modes_that_only_look_on(torch, query):
    from torch.utils.flop_counter import FlopCounterMode

    right = attend(query)
    with FlopCounterMode(display=False):
        assert torch.equal(attend(query), right)


def test_tensors_without_memory(torch, query):
    with pytest.raises(TypeError, match="key must be a tensor whose memory NumPy can read"):
        attnmask.torch.flash_attention(query, query.to_sparse(), query)
    for dtype in (torch.float8_e4m3fn, torch.complex64):
        with pytest.raises(TypeError, match="key must be"):
            attnmask.torch.flash_attention(query, query.to(dtype), query)


CALLS = ({}, {"causal": True}, {"sliding_window": 2}, {"return_lse": True})


@pytest.mark.parametrize("more", CALLS, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_tensors_that_say_more_than_their_memory(torch, query, dtype, more):
    """A bit that negates all numbers, and zeros that have no memory."""
    query = query.expand(1, 4, 64, 8).to(getattr(torch, dtype))
    negated, zeros = torch._neg_view(-query), torch._efficientzerotensor(query.shape, dtype=query.dtype)
    for place, (unusual, usual) in itertools.product(
        range(3), ((negated, query), (zeros, torch.zeros_like(query)))
    ):
        given = [[x if i == place else query for i in range(3)] for x in (unusual, usual)]
        for module in (attnmask.torch, attnmask):
            got, right = (module.flash_attention(*tensors, **more) for tensors in given)
            for one, other in zip(got, right, strict=True):
                np.testing.assert_array_equal(*(as_array(x, "x") for x in (one, other)))


def test_gradients_of_tensors_that_say_more_than_their_memory(torch, query):
    def gradient(query, bias, dout):
        query = query.detach().requires_grad_()
        out = attnmask.torch.flash_attention(query, query, query, bias=bias)
        return torch.autograd.grad(out, query, dout)[0]

    bias, dout = torch.randn(4, 4), torch.randn_like(query)
    negated = [torch._neg_view(-x) for x in (query, bias, dout)]
    assert torch.equal(gradient(*negated), gradient(query, bias, dout))


@pytest.mark.parametrize("wanting", [False, True])
@pytest.mark.parametrize("layout", ["strided", "jagged"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors(torch, query, layout, wanting):
    parts = [query[0].clone().requires_grad_(wanting)] * 2
    nested = torch.nested.as_nested_tensor(parts, layout=getattr(torch, layout))
    message = "key must be a tensor of one shape, got a nested tensor; write torch.cat"
    for more in CALLS:
        with pytest.raises(TypeError, match=message):
            attnmask.torch.flash_attention(query, nested, query, **more)
    with pytest.raises(TypeError, match=message):
        attnmask.flash_attention(query, nested.detach(), query)


def test_traced_tensors_as_arrays(torch, query):
    """The functions of NumPy name those that take them."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    def attend_as_array(query):
        return attnmask.flash_attention(query, query, query)

    hint = r"query must be .* attnmask\.torch"
    with FakeTensorMode() as mode, pytest.raises(TypeError, match=hint):
        attend_as_array(mode.from_tensor(query))
    for call in (torch.vmap(attend_as_array), torch.func.grad(lambda x: attend_as_array(x[0]).sum())):
        with pytest.raises(TypeError, match=hint):
            call(query[None])
    with pytest.raises(TypeError, match=hint):
        make_fx(attend_as_array, tracing_mode="fake")(query)
    with pytest.raises(TypeError, match=hint):
        attend_as_array(query.requires_grad_())


def test_a_mask_of_meta_tensors(torch, query):
    mask = attnmask.torch.mask_tensors(MaskInfo.from_segments([[0, 0, 1, 1]]))
    mask = mask._replace(tensors=tuple(x.to("meta") for x in mask.tensors))
    with pytest.raises(TypeError, match="must be on the CPU, got a tensor on meta"):
        attnmask.torch.flash_attention(query, query, query, mask)


def test_tangent_of_a_gradient(torch, inputs):
    """Gradients are linear in those of results."""
    from torch.autograd import forward_ad

    out = attnmask.torch.flash_attention(*inputs[:3], bias=inputs[3])
    with forward_ad.dual_level():
        dout = forward_ad.make_dual(torch.ones_like(out), 2 * torch.ones_like(out))
        grads = torch.autograd.grad(out, inputs[:4], dout)
        for grad in map(forward_ad.unpack_dual, grads):
            torch.testing.assert_close(grad.tangent, 2 * grad.primal)


def test_a_tangent_of_ones_own(torch, query):
    """A function that defines its own forward mode may call attention in it."""
    from torch.autograd import forward_ad

    class Attend(torch.autograd.Function):
        @staticmethod
        def forward(ctx, query):
            return attend(query)

        @staticmethod
        def jvp(ctx, tangent):
            return tangent * 2

    with forward_ad.dual_level():
        primal, tangent = forward_ad.unpack_dual(Attend.apply(forward_ad.make_dual(query, query)))
        assert torch.equal(primal, attend(query))
        assert torch.equal(tangent, query * 2)


# What is saved for the gradient


@pytest.fixture
def kept(torch, inputs):
    """All arguments that may be tensors."""
    names = ("query", "key", "value", "bias", "softmax_aux")
    return dict(zip(names, inputs, strict=True)) | {
        "attention_mask": torch.rand(2, 1, 5, 6) < 0.8,
        "q_segment_ids": torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]], dtype=torch.int32),
        "kv_segment_ids": torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 0, 1]], dtype=torch.int32),
        "causal_offset": torch.tensor([1, 2]),
        "alibi_slopes": torch.rand(2, dtype=torch.float64),
        "relative_bias": torch.randn(2, 3, dtype=torch.float64, requires_grad=True),
        "grid_bias": torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True),
    }


def learned(arguments):
    return [x for x in arguments.values() if x.requires_grad]


KEPT = (
    *("query", "key", "value", "bias", "softmax_aux", "attention_mask", "q_segment_ids", "kv_segment_ids"),
    *("causal_offset", "alibi_slopes", "relative_bias", "grid_bias", "out", "lse"),
)


@pytest.mark.parametrize("changed", [None, *KEPT])
def test_saved_tensors_hooks(torch, kept, changed):
    """All saved tensors pass through the hooks, and the gradient is computed from what they return."""
    out, lse = attnmask.torch.flash_attention(**kept, causal=True, return_lse=True)
    right = {name: x.detach() for name, x in (kept | {"out": out, "lse": lse}).items()}
    packed = []

    def pack(tensor):
        packed.append(tensor.detach().clone())
        return len(packed) - 1

    def other(x):
        if x.dtype == torch.bool:
            return ~x
        return x + 1 if x.dtype.is_floating_point else x.flip(-1)

    def unpack(number):
        (name,) = (name for name, x in right.items() if packed[number].equal(x))
        return other(packed[number]) if name == changed else packed[number].clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out, lse = attnmask.torch.flash_attention(**kept, causal=True, return_lse=True)
    assert len(packed) == len(right)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad((out, lse), learned(kept), (dout, dlse))
    arguments = right if changed is None else right | {changed: other(right[changed])}
    expected = attnmask.flash_attention_bwd(
        dout,
        **arguments,
        causal=True,
        grad_bias=True,
        grad_softmax_aux=True,
        grad_relative_bias=True,
        grad_grid_bias=True,
        dlse=dlse,
    )
    for one, another in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one.numpy(), another)


@pytest.mark.parametrize("name", [name for name in KEPT[3:] if name not in ("out", "lse")])
def test_arrays_that_change_before_the_gradient(torch, kept, name):
    """They are kept as they were, as PyTorch watches nothing but tensors."""
    learning = [kept[name] for name in ("query", "key", "value")]

    def gradients(arrays, change=lambda: None):
        out = attnmask.torch.flash_attention(**kept | arrays, causal=True)
        change()
        return torch.autograd.grad(out, learning, torch.ones_like(out))

    array = kept[name].detach().numpy().copy()
    numbers = array.tolist()
    right = gradients({name: array.copy()})
    for got in (
        gradients({name: array}, lambda: array.fill(1 - array.flat[0])),
        gradients({name: numbers}, numbers.clear),
    ):
        for one, other in zip(got, right, strict=True):
            assert torch.equal(one, other)


def test_a_mask_of_tensors_that_change_before_the_gradient(torch, query):
    query.requires_grad_()
    mask = attnmask.torch.mask_tensors(MaskInfo.from_segments([[0, 0, 1, 1]]))
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x.shape) or x, lambda x: x):
        right = torch.autograd.grad(attnmask.torch.flash_attention(query, query, query, mask).sum(), query)
    assert mask.tensors[0].shape in packed
    out = attnmask.torch.flash_attention(query, query, query, mask)
    assert torch.equal(torch.autograd.grad(out.sum(), query, retain_graph=True)[0], right[0])
    mask.tensors[0].fill_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_packed_away_is_freed(torch, kept):
    """Nothing stays in memory but what the hooks return."""
    arrays = {name: x.detach().numpy().copy() for name, x in kept.items() if name != "bias"}
    alive = [weakref.ref(array) for array in arrays.values()]
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        out = attnmask.torch.flash_attention(
            **{name: torch.from_numpy(arrays.pop(name)) for name in list(arrays)}, bias=kept["bias"]
        )
    gc.collect()
    assert all(ref() is None for ref in alive)
    out.sum().backward()
    assert kept["bias"].grad.count_nonzero()


def test_a_gradient_that_wants_one(torch, inputs):
    query, key, value, *_ = inputs
    out = attnmask.torch.flash_attention(query, key, value)
    dout = torch.ones_like(out, requires_grad=True)
    (got,) = torch.autograd.grad(out, query, dout, retain_graph=True)
    (right,) = torch.autograd.grad(out, query, dout.detach())
    assert torch.equal(got, right)


# Automatic casts


def test_no_autocast(torch, inputs):
    narrow = [x.detach().float() for x in inputs[:3]]
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert attnmask.torch.flash_attention(*narrow).dtype == torch.float32
        with pytest.raises(TypeError, match="key must be bfloat16 as query"):
            attnmask.torch.flash_attention(narrow[0].bfloat16(), *narrow[1:])


def test_the_compiler_is_not_imported():
    """Importing it takes seconds."""
    pytest.importorskip("torch")
    code = (
        "import sys, torch, attnmask.torch\n"
        "x = torch.zeros(1, 1, 1, 8, requires_grad=True)\n"
        "attnmask.torch.flash_attention(x, x, x).sum().backward()\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    result = python(code, **import_paths())
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("dtype", [bool, np.float32, np.int16])
def test_a_mask_as_a_tensor(torch, dtype):
    """A copy of the array of all pairs."""
    mask = attnmask.MaskInfo.from_segments([[0, 0, 1]]).apply_causal().to_dtype(dtype)
    for made in (torch.as_tensor(mask), torch.from_dlpack(mask)):
        assert torch.equal(made, torch.from_numpy(np.array(mask)))
        made.zero_()
    assert np.asarray(mask).any()
