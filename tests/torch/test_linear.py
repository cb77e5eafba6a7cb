"""Linear attention's functions for tensors give the bits of NumPy's, with gradients, in graphs and under transforms."""

import ml_dtypes
import numpy as np
import pytest

import attnmask
from attnmask._common.arguments import as_array

pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning")
DTYPES = [np.dtype(t) for t in (np.float32, ml_dtypes.bfloat16, np.float16, np.float64)]
F64 = np.dtype(np.float64)
STARTS = np.array([0, 3, 3, 9, 13], np.int32)


def convolution(dtype, packed=False, full=True):
    """Arguments of short_convolution."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.standard_normal(shape).astype(dtype)

    batch, sequences = (1, len(STARTS) - 1) if packed else (3, 3)
    given = {"x": draw(batch, 13, 5), "weight": draw(5, 4)}
    if full:
        given |= {"bias": draw(5), "initial_state": draw(sequences, 5, 3)}
    more = {"activation": "silu"} if full else {}
    return given, more | ({"cu_seqlens": STARTS} if packed else {})


def attention(dtype, packed=False, full=True):
    """Arguments of linear_attention, of all kinds, of those with gradients summed over tokens, or the fewest."""
    rng = np.random.default_rng(0)
    wide = np.dtype(np.float64 if dtype == F64 else np.float32)

    def draw(*shape, dtype=dtype):
        return rng.standard_normal(shape).astype(dtype)

    batch, sequences = (1, len(STARTS) - 1) if packed else (3, 3)
    given = {"query": draw(batch, 13, 2, 3), "key": draw(batch, 13, 2, 3), "value": draw(batch, 13, 4, 5)}
    more = {"cu_seqlens": STARTS} if packed else {}
    if full == "[H]":
        given["decay"] = -np.abs(draw(4, dtype=wide))
    elif full:
        given |= {"decay": -np.abs(draw(batch, 13, 4, 3, dtype=wide)), "beta": draw(batch, 13, 4)}
        given["initial_state"] = draw(sequences, 4, 3, 5, dtype=wide)
        more |= {"scale": 0.7, "normalize_qk": True, "chunk_size": 16}
    return given, more


FUNCTIONS = {"short_convolution": convolution, "linear_attention": attention}
KINDS = [(name, packed, full) for name in FUNCTIONS for packed in (False, True) for full in (True, False)]
KINDS += [("linear_attention", False, "[H]"), ("linear_attention", True, "[H]")]
DEFAULTS = {  # of operands that are no tensors
    "linear_attention": {"normalize_qk": False, "chunk_size": 64},
    "linear_attention_step": {"normalize_qk": False},
}


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0]} {kind[2]}{' packed' * kind[1]}")
def kind(request):
    return request.param


def tensor(torch, x):
    """A copy."""
    return (
        torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
        if x.dtype == DTYPES[1]
        else torch.tensor(x)
    )


def tensors(torch, given, learn=False):
    return {name: tensor(torch, x).requires_grad_(learn) for name, x in given.items()}


def made(torch, kind, dtype=F64, learn=False):
    """The tensors that have gradients, the other arguments, and the function."""
    name, packed, full = kind
    given, more = FUNCTIONS[name](dtype, packed, full)
    return tensors(torch, given, learn), more, getattr(attnmask.torch, name)


def assert_same(got, expected):
    for one, other in zip(got, expected, strict=True):
        array = as_array(one.detach(), "one")
        assert (array.dtype, array.shape) == (other.dtype, other.shape)
        assert array.tobytes() == other.tobytes()


def expected(kind, dtype=F64):
    """NumPy's results and gradients."""
    name, packed, full = kind
    given, more = FUNCTIONS[name](dtype, packed, full)
    results, vjp = getattr(attnmask, f"{name}_vjp")(**given, **more, return_state=True)
    grads = vjp(*map(cotangent, results))._asdict()
    return results, [grads[argument] for argument in given]


def cotangent(x):
    return np.sin(1.0 + np.arange(x.size)).reshape(x.shape).astype(x.dtype)


def gradients(torch, results, inputs):
    cotangents = [tensor(torch, cotangent(as_array(x.detach(), "x"))) for x in results]
    return torch.autograd.grad(results, list(inputs), cotangents)


def test_gradients(torch, kind):
    inputs, more, function = made(torch, kind, learn=True)
    names = list(inputs)

    def call(*values):
        return function(**dict(zip(names, values, strict=True)), **more, return_state=True)

    assert torch.autograd.gradcheck(call, list(inputs.values()))
    for name, x in inputs.items():  # one by one, and of one result
        alone = {key: y.detach() for key, y in inputs.items()} | {name: x}
        out, state = function(**alone, **more, return_state=True)
        both = torch.autograd.grad(out.sum() + 0 * state.sum(), x)[0]
        assert torch.equal(torch.autograd.grad(function(**alone, **more).sum(), x)[0], both)
        _, state = function(**alone, **more, return_state=True)
        if name in ("x", "value"):
            assert torch.autograd.grad(state.sum(), x)[0].abs().sum() > 0


def test_checkpointed(torch, kind):
    """All that a gradient needs goes through the hooks for saved tensors."""
    results, grads = expected(kind)
    inputs, more, function = made(torch, kind, learn=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x) or len(kept) - 1, kept.__getitem__
    ):
        got = function(**inputs, **more, return_state=True)
    assert len(kept) >= len(inputs)
    assert_same(gradients(torch, got, inputs.values()), grads)
    got = torch.utils.checkpoint.checkpoint(
        function, **inputs, **more, return_state=True, use_reentrant=False
    )
    assert_same(got, results)
    assert_same(gradients(torch, got, inputs.values()), grads)


def test_in_place(torch, kind):
    """Tensors are read in place, whatever their strides, and what has changed before the gradient is an error."""
    inputs, more, function = made(torch, kind)
    moved = {name: torch.stack([x, x], -1)[..., 1] for name, x in inputs.items()}
    assert torch.equal(function(**moved, **more), function(**inputs, **more))
    inputs, more, function = made(torch, kind, learn=True)
    inputs = {name: x.clone() for name, x in inputs.items()}
    out = function(**inputs, **more)
    with torch.no_grad():
        next(iter(inputs.values())).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def operands(torch, kind, learn=True):
    """An operator's operands."""
    inputs, more, _ = made(torch, kind, learn=learn)
    described = getattr(attnmask.torch._linear, f"_{kind[0]}")
    given = dict.fromkeys(described.names) | DEFAULTS.get(kind[0], {}) | inputs | more
    return described, attnmask.torch._linear._operands(described.names, given)


def test_the_operators(torch, kind):
    """opcheck traces with shapes that may change, too."""
    described, given = operands(torch, kind)
    torch.library.opcheck(described.operator, given)
    given = [x.detach() if isinstance(x, torch.Tensor) else x for x in given]
    out, state = described.operator(*given)
    wanted = [x is not None for x in given[: described.learned]]
    torch.library.opcheck(described.backward, (out, None, *given, wanted))
    torch.library.opcheck(described.backward, (None, state, *given, wanted))


def test_vmap_folds(torch):
    """Rows that have one weight go into one call."""
    inputs, _, function = made(torch, KINDS[0])
    function = attnmask.torch._linear._short_convolution
    calls = []

    class Counted(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, arguments=(), named=None):
            calls.append(operator)
            return operator(*arguments, **named or {})

    many = torch.stack([inputs["x"]] * 4)
    with Counted():
        torch.func.vmap(lambda x: attnmask.torch.short_convolution(x, inputs["weight"]))(many)
    assert calls.count(function.operator) == 1


def test_autocast(torch, kind):
    inputs, more, function = made(torch, kind, DTYPES[0], learn=True)
    narrow = {name: x.to(torch.bfloat16) if name in function_cast(kind) else x for name, x in inputs.items()}
    right = function(**narrow, **more)
    with torch.autocast("cpu", torch.bfloat16):
        got = function(**inputs, **more)
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)(**inputs, **more)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, right)
    assert torch.equal(compiled, right)
    got.sum().backward()
    assert all(x.grad.dtype == torch.float32 for x in inputs.values())


def function_cast(kind):
    return getattr(attnmask.torch._linear, f"_{kind[0]}").cast


def test_no_forward_derivatives(torch, kind):
    inputs, more, function = made(torch, kind, learn=True)
    first, *_ = inputs
    message = f"attnmask.torch.{kind[0]} has no forward-mode derivative"
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(inputs[first].detach(), torch.ones_like(inputs[first]))
        with pytest.raises(RuntimeError, match=f"{message}: {first} must have no tangent"):
            function(**inputs | {first: dual}, **more)
    x = inputs[first].detach()
    with pytest.raises(RuntimeError, match=message):
        torch.func.jvp(lambda x: function(**inputs | {first: x}, **more), (x,), (x,))


def test_operators_on_other_devices(torch, kind):
    described, given = operands(torch, kind, learn=False)
    meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in given]
    for one, other in zip(described.operator(*meta), described.operator(*given), strict=True):
        assert (one.device.type, one.shape, one.dtype) == ("meta", other.shape, other.dtype)
    with pytest.raises(TypeError, match="must be on meta as"):
        described.operator(meta[0], *given[1:])


# Steps


def convolution_step(dtype, full=True):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.standard_normal(shape).astype(dtype)

    given = {"x": draw(3, 5), "weight": draw(5, 4), "state": draw(6 if full else 3, 5, 3)}
    if full:
        return given | {"bias": draw(5)}, {"activation": "silu", "state_indices": np.array([4, -1, 0])}
    return given, {}


def attention_step(dtype, full=True):
    rng = np.random.default_rng(0)
    wide = np.dtype(np.float64 if dtype == F64 else np.float32)

    def draw(*shape, dtype=dtype):
        return rng.standard_normal(shape).astype(dtype)

    given = {"query": draw(3, 2, 3), "key": draw(3, 2, 3), "value": draw(3, 4, 5)}
    given["state"] = draw(6 if full else 3, 4, 3, 5, dtype=wide)
    if not full:
        return given, {}
    given |= {"decay": -np.abs(draw(3, 4, 3, dtype=wide)), "beta": draw(3, 4)}
    return given, {"scale": 0.7, "normalize_qk": True, "state_indices": np.array([4, -1, 0])}


STEPS = {"short_convolution_step": convolution_step, "linear_attention_step": attention_step}


@pytest.fixture(params=[(name, full) for name in STEPS for full in (True, False)], ids=str)
def step(request):
    return request.param


def made_step(torch, step, dtype=F64):
    name, full = step
    given, more = STEPS[name](dtype, full)
    return tensors(torch, given), more, getattr(attnmask.torch, name)


def expected_step(step, dtype=F64):
    name, full = step
    given, more = STEPS[name](dtype, full)
    return getattr(attnmask, name)(**given, **more), given["state"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_of_numpy_steps(torch, step, dtype):
    inputs, more, function = made_step(torch, step, dtype)
    version = inputs["state"]._version
    out = function(**inputs, **more)
    assert_same((out, inputs["state"]), expected_step(step, dtype))
    assert inputs["state"]._version == version + 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps_of_numpy_update_a_tensor(torch, step, dtype):
    (given, more), function = STEPS[step[0]](dtype, step[1]), getattr(attnmask, step[0])
    state = tensors(torch, {"state": given["state"]})["state"].clone()
    out, (expected, after) = function(**given | {"state": state}, **more), expected_step(step, dtype)
    np.testing.assert_array_equal(out, expected)
    assert_same((state,), (after,))


def test_wrong_states_of_steps_of_numpy(torch, step):
    (given, more), function = STEPS[step[0]](F64, step[1]), getattr(attnmask, step[0])
    first, held = next(iter(given)), given["state"]
    given[first] = held.reshape(-1)[: given[first].size].reshape(given[first].shape)
    with pytest.raises(ValueError, match=f"^state must share no memory with {first}$"):
        function(**given | {"state": torch.from_numpy(held)}, **more)
    with pytest.raises(TypeError, match=r"^state must be a NumPy array or None, got .*list"):
        function(**given | {"state": [1.0]}, **more)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled_steps(torch, step, backend):
    inputs, more, function = made_step(torch, step)
    if "state_indices" in more:
        more["state_indices"] = torch.tensor(more["state_indices"])

    @torch.compile(backend=backend, fullgraph=True)
    def twice(inputs, more):
        before = inputs["state"] * 1
        return function(**inputs, **more), inputs["state"] + 0, before, function(**inputs, **more)

    before = inputs["state"].clone()
    first, after, seen, second = twice(inputs, more)
    out, state = expected_step(step)
    assert_same((first, after, seen), (out, state, before.numpy()))
    again = {name: x.clone() for name, x in made_step(torch, step)[0].items()} | {"state": after}
    assert torch.equal(function(**again, **more), second)
    assert torch.equal(again["state"], inputs["state"])


def test_the_operators_of_steps(torch, step):
    inputs, more, _ = made_step(torch, step)
    described = getattr(attnmask.torch._linear, f"_{step[0]}")
    given = dict.fromkeys(described.names) | DEFAULTS.get(step[0], {}) | inputs | more
    given = attnmask.torch._linear._operands(described.names, given)
    torch.library.opcheck(described.operator, given)
    written = [a.name for a in described.operator._schema.arguments if a.alias_info and a.alias_info.is_write]
    assert written == ["state"]


def test_vmap_of_steps(torch, step):
    inputs, more, function = made_step(torch, step)
    right = {name: x.clone() for name, x in inputs.items()}
    names = list(inputs)
    many = [torch.stack([x, x + 0.25], 1) for x in inputs.values()]

    def call(*values):
        return function(**dict(zip(names, values, strict=True)), **more)

    ones = [[x.select(1, i).clone() for x in many] for i in range(2)]
    got = torch.func.vmap(call, 1)(*many)
    assert torch.equal(got, torch.stack([call(*one) for one in ones]))
    assert torch.equal(
        many[names.index("state")], torch.stack([one[names.index("state")] for one in ones], 1)
    )
    with pytest.raises(RuntimeError, match=r"^state must be mapped"):
        torch.func.vmap(lambda x: call(x, *list(right.values())[1:]), 1)(many[0])


def test_bad_input_of_steps(torch, step):
    inputs, more, function = made_step(torch, step)
    before = inputs["state"].clone()
    for name, x in inputs.items():
        with pytest.raises(
            RuntimeError, match=f"{step[0]} has no gradient, and {name} requires one: .* train with"
        ):
            function(**inputs | {name: x.clone().requires_grad_()}, **more)
    with pytest.raises(ValueError, match=r"^state"):
        function(**inputs | {"state": inputs["state"][..., None]}, **more)
    assert torch.equal(inputs["state"], before)
    if step[0] == "short_convolution_step":
        for dtype in (
            torch.float32,
            torch.float16,
        ):  # a copy of the state would be updated, but not the state
            given = {name: x.to(dtype) for name, x in inputs.items()}
            with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=r"^state must be"):
                function(**given, **more)  # of the type of x, which is bfloat16 then
