"""What all functions of tensors have in common: made from the right arguments of each (rows_of_functions.py)."""

import contextlib
import functools

import pytest
from doors import (
    LOOKING,
    NAMES,
    WITH_GRADIENTS,
    WRITTEN,
    changed,
    drawn,
    function_of,
    is_array,
    learned_of,
    with_both_results,
)
from tensors import tensor

import attnmask
from attnmask._attention.arguments import MOVED

pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # by forward mode, of PyTorch itself
]
WITHOUT_GRADIENTS = [name for name in NAMES if name not in WITH_GRADIENTS]
NAMES = (*NAMES, *LOOKING)


def made(torch, name, seed=0):
    """The function and right arguments, which are new ones each time."""
    arguments = changed(drawn(name, seed), lambda x: tensor(torch, x.copy()))
    return function_of(attnmask.torch, name), arguments


def leaves(torch, tree):
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def written(given):
    """What a call may write to."""
    return [given[key] for key in WRITTEN if key in given]


def floats(torch, given):
    return [key for key, x in given.items() if isinstance(x, torch.Tensor) and x.dtype.is_floating_point]


def learn(torch, name, given):
    """The tensors that have gradients, all of which are wanted now."""
    learned = leaves(torch, [given[key] for key in learned_of(name, given)])
    return [x.requires_grad_() for x in learned]


def compiled(torch, function, fullgraph=True):
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=fullgraph)


def assert_same(torch, got, right):
    for one, other in zip(leaves(torch, got), leaves(torch, right), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


# Operators


@contextlib.contextmanager
def watched(torch):
    """A list of our operators that are called meanwhile, with their operands."""
    calls = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, operands=(), named=None):
            if operator.namespace == "attnmask":
                calls.append((operator, copies(torch, operands)))
            return operator(*operands, **named or {})

    with Watch():
        yield calls


def calls_of(torch, name, seed):
    """The operators that a call goes to where it is traced, and its gradient."""
    function, given = made(torch, name, seed)
    learned = learn(torch, name, given)
    with watched(torch) as calls:
        results = function(**with_both_results(name, given))
        if learned:
            torch.autograd.grad(results, learned, [0.5 * x.detach() for x in results])
    return calls


def copies(torch, tree):
    copy = lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x  # noqa: E731
    return torch.utils._pytree.tree_map(copy, tree)


@pytest.mark.parametrize("name", NAMES)
def test_operators(torch, name):
    """opcheck looks at what is written, and traces with shapes that may change."""
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for seed in range(3):
        for operator, operands in calls_of(torch, name, seed):
            schema = operator._schema.arguments
            if not operator.name().endswith("backward"):
                learn(torch, name, dict(zip((told.name for told in schema), operands, strict=True)))
            float8 = any("float8" in str(x.dtype) for x in leaves(torch, operands))  # which it cannot compare
            torch.library.opcheck(operator, operands, test_utils=checks[1:3] if float8 else checks)
            told = [told.name for told in schema if told.alias_info and told.alias_info.is_write]
            expected = [told.name for told in schema if told.name in WRITTEN]
            assert told == (expected if name in WITHOUT_GRADIENTS else [])


@pytest.mark.parametrize("name", NAMES)
def test_operators_on_other_devices(torch, name):
    """Only shapes are told there; but PyTorch asks for shapes alone if any tensor is a meta tensor."""
    for operator, operands in calls_of(torch, name, 0):
        flat, spec = torch.utils._pytree.tree_flatten(operands)
        places = [place for place, x in enumerate(flat) if isinstance(x, torch.Tensor)]

        def call(moved, operator=operator, flat=flat, spec=spec):
            given = [x.to("meta") if place in moved else x for place, x in enumerate(flat)]
            return operator(*torch.utils._pytree.tree_unflatten(given, spec))

        for one, other in zip(leaves(torch, call(places)), leaves(torch, call([])), strict=True):
            assert (one.device.type, one.shape, one.dtype) == ("meta", other.shape, other.dtype)
        for place in places[1:]:
            with pytest.raises(TypeError, match=r"^\w+ must be on cpu as \w+, got a tensor on meta"):
                call([place])


NO_TENSORS = {"InstallReport", "KVCache", "MaskTensors", "install", "install_report", "installed", "mask_tensors",
              "uninstall"}  # as arguments  # fmt: skip
ELSEWHERE = {  # test_ring, test_tokens, test_weights, test_statistics
    "ring_attention",
    "pack",
    "unpack",
    "shard_sequence",
    "unshard_sequence",
    "attention_weights",
    "attention_statistics",
    "attention_statistics_with_kvcache",
}


def test_all_functions_are_looked_at(torch):
    functions = {name.partition(" of ")[0] for name in NAMES} | ELSEWHERE
    assert functions | NO_TENSORS == set(attnmask.torch.__all__)


def on_meta(torch, tree):
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.to("meta"), tree)


def assert_shapes(torch, got, right):
    for one, other in zip(leaves(torch, got), leaves(torch, right), strict=True):
        assert (one.device.type, one.shape, one.dtype) == ("meta", other.shape, other.dtype)


@pytest.mark.parametrize("name", NAMES)
def test_shapes_alone(torch, name):
    """On `meta`, of results and gradients; lists and arrays among the arguments are no tensors of another device."""
    for seed in range(12):
        function, given = made(torch, name, seed)
        given = with_both_results(name, given)
        shapes = {
            key: on_meta(torch, x) if key in (*WRITTEN, *floats(torch, given)) or isinstance(x, list) else x
            for key, x in given.items()
        }
        arrays = {key: x.numpy() for key, x in shapes.items() if isinstance(x, torch.Tensor) and x.is_cpu}
        learned, other_learned = learn(torch, name, given), learn(torch, name, shapes)
        right = function(**given)
        for more in (arrays, on_meta(torch, {key: given[key] for key in arrays})):
            got = function(**shapes | more)
            assert_shapes(torch, got, right)
            if learned:
                grads = torch.autograd.grad(right, learned, right, retain_graph=True)
                assert_shapes(torch, torch.autograd.grad(got, other_learned, got), grads)


def test_shapes_of_a_ring(torch):
    query, key = torch.empty(2, 5, 4, 8, device="meta"), torch.empty(2, 5, 2, 8, device="meta")
    value = torch.empty(2, 5, 2, 3, device="meta").requires_grad_()
    out, lse = attnmask.torch.ring_attention(query, key, value, causal=True, return_lse=True)
    assert (out.shape, lse.shape) == ((2, 5, 4, 3), (2, 4, 5))
    (grad,) = torch.autograd.grad(out, value, out)
    assert (grad.device.type, grad.shape) == ("meta", value.shape)
    with pytest.raises(TypeError, match="key must be on meta as query, got a tensor on cpu"):
        attnmask.torch.ring_attention(query, torch.ones(2, 5, 2, 8), value)


def test_an_operator_that_writes_to_out(torch):
    calls = [calls_of(torch, "flash_attention", seed)[0] for seed in range(8)]
    calls = [operands for operator, operands in calls if "wide" not in operator.name()]  # which has none
    assert len(calls) > 2
    operator = torch.ops.attnmask.flash_attention
    for operands in calls:
        right = operator(*operands)
        into = {"out": torch.full_like(right[0], 7), "lse": torch.full_like(right[1], 7)}
        torch.library.opcheck(operator.out, operands, into)
        operator.out(*operands, **into)
        assert_same(torch, into, dict(zip(into, right, strict=True)))


def test_vmap_folds(torch):
    """Where rows do not know of each other, or share a weight, all are computed by one call."""
    weight = torch.randn(5, 4)
    for function, many in (
        (lambda x: attnmask.torch.flash_attention(x, x, x, causal=True), torch.randn(5, 1, 4, 1, 8)),
        (lambda x: attnmask.torch.short_convolution(x, weight), torch.randn(4, 3, 13, 5)),
    ):
        with watched(torch) as calls:
            got = torch.func.vmap(function)(many)
        assert len(calls) == 1
        assert torch.equal(got, torch.stack([function(x) for x in many]))


# Tensors of any kind


@pytest.mark.parametrize("name", NAMES)
def test_strided_and_negated_tensors(torch, name):
    """They are read in place, and a bit of theirs says that memory holds the other sign."""
    function, given = made(torch, name, 2)
    right = copies(torch, given)
    expected = function(**right)
    for key, x in given.items():
        if isinstance(x, torch.Tensor) and key not in WRITTEN and "float8" not in str(x.dtype):
            negated = [torch._neg_view(-x)] if key in floats(torch, given) else []
            for form in (torch.stack([x, x], -1)[..., 1], *negated):
                got = copies(torch, given) | {key: form}
                assert_same(torch, (function(**got), written(got)), (expected, written(right)))


@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_only_what_is_wanted(torch, name):
    """One gradient alone, and those of one result alone, are those of all."""
    for seed in range(4):
        function, given = made(torch, name, seed)
        given, count = with_both_results(name, given), len(learn(torch, name, copies(torch, given)))
        for place in range(1 if "cumsum" in name else 2):
            many = copies(torch, given)
            learned, results = learn(torch, name, many), function(**many)
            slopes = [0.5 * x.detach() if i == place else torch.zeros_like(x) for i, x in enumerate(results)]
            right = torch.autograd.grad(results, learned, slopes)
            for number in range(count):
                few = copies(torch, given)
                x = learn(torch, name, few)[number]
                for other in leaves(torch, few):
                    other.requires_grad_(other is x)
                (got,) = torch.autograd.grad(function(**few)[place], x, slopes[place], materialize_grads=True)
                torch.testing.assert_close(got, right[number], equal_nan=True)


def test_merging(torch):
    """What is asked of its sequences, also by torch.func."""
    merge, (outs, lses) = (
        attnmask.torch.merge_attention_states,
        (torch.randn(5, 2, 4, 2, 8), torch.randn(5, 2, 2, 4)),
    )
    for arguments, error, message in (
        (([], []), ValueError, "outs must have at least one part"),
        ((outs[0, 0, 0, 0, 0], [lses[0]]), TypeError, "outs must be a sequence of tensors"),
        ((outs[:2], lses[:1]), ValueError, "lses"),
        (([outs[0], outs[0].double()], lses[:2]), TypeError, "outs"),
    ):
        for call in (
            merge,
            torch.func.functionalize(merge),
            lambda *x: torch.func.vmap(lambda _: merge(*x))(outs),
        ):
            with pytest.raises(error, match=message):
                call(*arguments)
    for x, y in zip(torch.func.vmap(merge)(outs[None], lses[None]), merge(outs, lses), strict=True):
        torch.testing.assert_close(x[0], y)


# Automatic casts

CAST = {"linear_attention": "query key value", "linear_attention_step": "query key value"}
CAST |= {"short_convolution": "x initial_state", "merge_attention_states": ""}


@pytest.mark.parametrize(
    "name", [name for name in NAMES if not name.startswith(("short_convolution_step", "write_kvcache"))]
)
def test_autocast(torch, name):
    """Queries, keys and values are cast, in graphs too; gradients have the types of their tensors, float64 is left."""
    seen = set()
    for seed in range(12):
        function, given = made(torch, name, seed)
        dtype = leaves(torch, given)[0].dtype
        if dtype not in (torch.float32, torch.float64) or dtype in seen:
            continue
        seen.add(dtype)
        cast = CAST.get(name, "query key value").split() if dtype == torch.float32 else []
        expected = copies(torch, given)
        right = function(**expected | {key: expected[key].bfloat16() for key in cast if key in expected})
        for call in (function, torch.no_grad()(function), compiled(torch, function)):
            got = copies(torch, given)
            learned = learn(torch, name, got)
            with torch.autocast("cpu", torch.bfloat16):
                results = call(**got)
            assert_same(torch, (results, written(got)), (right, written(expected)))
            if leaves(torch, results)[0].requires_grad:
                sum(x.float().sum() for x in leaves(torch, results)).backward()
                assert all(x.grad.dtype == x.dtype for x in learned)
    assert seen


# What there is not


def jvp(torch, function, x):
    return torch.func.jvp(function, (x,), (x,))


TANGENTS = {
    "jvp": jvp,
    "jacfwd": lambda torch, function, x: torch.func.jacfwd(function)(x),
    "linearize": lambda torch, function, x: torch.func.linearize(function, x),
    "compiled": lambda torch, function, x: compiled(torch, functools.partial(jvp, torch, function), False)(x),
}


MAY_HAVE_TANGENTS = {
    "flash_attention": MOVED,  # test_tangents.py
    "merge_attention_states": ("outs", "lses"),  # test_second_derivatives.py
}


@pytest.mark.parametrize("name", NAMES)
def test_no_tangents(torch, name):
    function, given = made(torch, name)
    for key in floats(torch, given):
        if key in MAY_HAVE_TANGENTS.get(name, ()):
            continue

        def call(x, key=key):
            return function(**given | {key: x})

        x = given[key]
        for wanting in (False, True):
            with torch.autograd.forward_ad.dual_level():
                dual = torch.autograd.forward_ad.make_dual(x.clone().requires_grad_(wanting), x)
                with pytest.raises(
                    RuntimeError, match=f"no forward-mode derivative: {key} must have no tangent"
                ):
                    call(dual)
        for transform in TANGENTS.values():
            with pytest.raises(RuntimeError, match="no forward-mode derivative"):
                transform(torch, call, x)


@pytest.mark.parametrize("name", WITHOUT_GRADIENTS)
def test_no_gradient(torch, name):
    """Nor is anything written then, whatever way a call takes."""
    function, given = made(torch, name)
    before = copies(torch, written(given))
    ((operator, operands),) = calls_of(torch, name, 0)
    names = [argument.name for argument in operator._schema.arguments]
    for key in floats(torch, given):
        wrong = given | {key: given[key].clone().requires_grad_()}
        inputs = copies(torch, operands)
        inputs[names.index(key)].requires_grad_()
        words = f"{name.partition(' of ')[0]} has no gradient( with [^,]+)?, and {key} requires one: "
        for call in (
            lambda wrong=wrong: function(**wrong),
            lambda wrong=wrong: compiled(torch, function)(**wrong),
            lambda inputs=inputs: operator(*inputs),
        ):
            with pytest.raises(RuntimeError, match=words):
                call()
        assert_same(torch, written(given), before)
        with torch.no_grad():
            function(**copies(torch, wrong))


@pytest.mark.parametrize("name", WITHOUT_GRADIENTS)
def test_autograd_knows_of_writes(torch, name):
    """A gradient that needs what a cache or state was before is an error then."""
    seed = next(seed for seed in range(30) if {"key", "x"} & drawn(name, seed).keys())
    function, given = made(torch, name, seed)
    ((operator, operands),) = calls_of(torch, name, seed)
    schema = operator._schema.arguments
    declared = [x for x, told in zip(operands, schema, strict=True) if told.alias_info and x is not None]
    for call, tensors in (
        (lambda: function(**given), written(given)),
        (lambda: operator(*operands), declared),
    ):
        versions = [x._version for x in tensors]
        call()
        assert [x._version for x in tensors] == [version + 1 for version in versions]
    with torch.inference_mode():
        function(**copies(torch, given))


@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_what_changes_before_the_gradient(torch, name):
    """That is an error, as with PyTorch's own functions."""
    for key, x in drawn(name, 0).items():
        for number in range(len(x) if isinstance(x, list) else is_array(x)):
            function, given = made(torch, name)
            learn(torch, name, given)
            results = function(**given)
            with torch.no_grad():
                leaves(torch, given[key])[number].add_(0)
            with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
                leaves(torch, results)[0].sum().backward()
