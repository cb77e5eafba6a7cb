"""What all functions of JAX's arrays have in common: made from the right arguments of each (rows_of_functions.py)."""

from functools import partial

import numpy as np
import pytest
from doors import (
    KNOWN,
    LOOKING,
    NAMES,
    STATES,
    WITH_GRADIENTS,
    WRITTEN,
    drawn,
    function_of,
    is_array,
    learned_of,
    right,
    with_both_results,
)
from fuzzer import arrays_in

jax = pytest.importorskip("jax")
import attnmask.jax  # noqa: E402
from attnmask._attention.arguments import TRACED  # noqa: E402
from attnmask.jax import _call  # noqa: E402

WITHOUT_GRADIENTS = [name for name in NAMES if name not in WITH_GRADIENTS]
NAMES = (*NAMES, *LOOKING)
GRADIENTS_ALONE = [name for name in WITH_GRADIENTS if "flash" not in name and "merge" not in name]


def given(name, seed=0, **more):
    """A function of some arrays, and these arrays: those that have gradients, or all."""
    arguments = drawn(name, seed) | more
    kinds = (
        learned_of(name, arguments)
        if name in WITH_GRADIENTS
        else [key for key, x in arguments.items() if is_array(x) and key not in KNOWN]
    )
    arrays = {key: arguments.pop(key) for key in kinds}
    return lambda arrays: function_of(attnmask.jax, name)(**arguments, **arrays), arrays


EVERY_ARRAY = [(name, seed) for name in LOOKING for seed in range(6)]


def in_float32(name, count):
    """The first seeds whose arrays are not of 64 bits, which JAX has only if it is asked for them."""
    seeds = (
        seed for seed in range(60) if all(x.itemsize < 8 for x in arrays_in([*drawn(name, seed).values()]))
    )
    return [next(seeds) for _ in range(count)]


def assert_near(got, right):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(np.float64(x), np.float64(y), rtol=1e-4, atol=1e-4),
        got,
        right,
    )


def of_one(function, arrays, key, place, x):
    return function(arrays | {key: x})[place]


PLACES = [(name, place) for name in WITH_GRADIENTS for place in range(1 if "cumsum" in name else 2)]


@pytest.mark.parametrize(("name", "place"), PLACES)
def test_only_what_is_wanted(name, place):
    """The gradient of one array alone, and those of one result alone, are those of all."""
    for seed in in_float32(name, 3):
        function, arrays = given(name, seed, **with_both_results(name, {}))
        results, vjp = jax.vjp(function, arrays)
        (right,) = vjp(tuple(x if i == place else 0 * x for i, x in enumerate(results)))
        for key, x in arrays.items():
            alone, vjp = jax.vjp(partial(of_one, function, arrays, key, place), x)
            assert_near(vjp(alone)[0], right[key])


@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_vmap_of_a_pullback(name):
    """As Jacobians take it: the calls share all but the gradient of the result."""
    for seed in in_float32(name, 4):
        function, arrays = given(name, seed)
        first = lambda arrays, function=function: jax.tree.leaves(function(arrays))[0]  # noqa: E731
        out, vjp = jax.vjp(jax.jit(first), arrays)
        weights = np.cos(np.arange(3 * out.size)).reshape(3, *out.shape)
        douts = np.stack([x.astype(out.dtype) for x in weights])
        (found,) = jax.jit(jax.vmap(vjp))(douts)
        for i, dout in enumerate(douts):
            assert_near(jax.tree.map(lambda x, i=i: x[i], found), vjp(dout)[0])


@pytest.mark.parametrize("name", GRADIENTS_ALONE)
def test_no_other_derivatives(name):
    function, arrays = given(name, in_float32(name, 1)[0])
    first = lambda arrays: jax.tree.leaves(function(arrays))[0]  # noqa: E731
    tangent = lambda arrays: jax.jvp(first, (arrays,), (arrays,))  # noqa: E731
    norm = lambda arrays: sum((x**2).sum() for x in jax.tree.leaves(jax.grad(cubes)(arrays)))  # noqa: E731
    cubes = lambda arrays: (first(arrays) ** 3).sum()  # noqa: E731
    for compiled in (jax.jit, lambda f: f):
        with pytest.raises(NotImplementedError, match=f"jax.{name} has gradients, but no tangents"):
            compiled(tangent)(arrays)
        with pytest.raises(NotImplementedError, match=f"jax.{name} has gradients, but no gradients of these"):
            compiled(jax.grad(norm))(arrays)


@pytest.mark.parametrize(("name", "seed"), [(name, 0) for name in WITHOUT_GRADIENTS] + EVERY_ARRAY)
def test_no_gradients(name, seed):
    function, arrays = given(name, in_float32(name, seed + 1)[seed])
    for key, x in arrays.items():
        if np.issubdtype(jax.numpy.asarray(x).dtype, np.floating):
            loss = lambda x, key=key: jax.tree.leaves(function(arrays | {key: x}))[-1].sum()  # noqa: E731
            for differentiate in (jax.grad(loss), jax.jit(jax.grad(loss))):
                with pytest.raises(
                    NotImplementedError, match=rf"{name.partition(' of ')[0]} has no gradients"
                ):
                    differentiate(x)


@pytest.mark.parametrize("name", WITHOUT_GRADIENTS)
def test_what_is_written(name):
    """Donated memory is written in place, other memory is left alone."""
    seeds = [seed for seed in in_float32(name, 9) if {"key", "x"} & drawn(name, seed).keys()]
    for seed in seeds[:3]:
        function, arrays = given(name, seed)
        held = {key: jax.numpy.array(arrays.pop(key)) for key in WRITTEN if key in arrays}
        before = {key: np.asarray(x).tobytes() for key, x in held.items()}
        call = lambda held, arrays, function=function: function(held | arrays)  # noqa: E731
        expected = jax.tree.leaves(call(held, arrays))
        assert {key: np.asarray(x).tobytes() for key, x in held.items()} == before
        places = {x.unsafe_buffer_pointer() for x in held.values()}
        results = jax.tree.leaves(jax.jit(call, donate_argnums=0)(held, arrays))
        assert all(x.is_deleted() for x in held.values())
        assert places <= {x.unsafe_buffer_pointer() for x in results}
        for one, other in zip(results, expected, strict=True):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_where_handlers_are_refused(monkeypatch, name):
    """JAX calls back into Python instead, with the same bits."""
    monkeypatch.setattr(_call, "_accepted", False)
    for seed in in_float32(name, 2):
        function, arrays = given(name, seed)
        assert "attnmask" not in jax.jit(function).lower(arrays).as_text()
        results = jax.jit(function)(arrays), function(arrays)
        for one, other in zip(*map(jax.tree.leaves, results), strict=True):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_array(name):
    """It must be known when a function is compiled, and there is no memory to write to."""
    for argument, arguments in right(name):
        function = partial(function_of(attnmask.jax, name), **arguments)
        if type(arguments[argument]) in (bool, int, float) and argument not in TRACED:
            with pytest.raises(TypeError, match=f"{argument} must be known at compile time"):
                jax.jit(lambda x, argument=argument, function=function: function(**{argument: x}))(
                    arguments[argument]
                )
    with pytest.raises(TypeError, match="unexpected keyword argument 'out'"):
        function(out=1)


@pytest.mark.parametrize("name", ["linear_attention", "short_convolution"])
def test_shard_map(name):
    """Rows on a mesh of one device, with gradients; those of what all devices have are added up."""
    seed = next(seed for seed in in_float32(name, 20) if "cu_seqlens" not in drawn(name, seed))
    function, arrays = given(name, seed, **{STATES[name]: False})
    mesh, rows = jax.sharding.Mesh(jax.devices()[:1], "rows"), jax.sharding.PartitionSpec("rows")
    alike = {key for key, x in arrays.items() if key in ("weight", "bias") or x.ndim == 1}
    specs = {key: jax.sharding.PartitionSpec() if key in alike else rows for key in arrays}
    mapped = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=(specs,), out_specs=rows))
    (out, vjp), (right, expected) = jax.vjp(mapped, arrays), jax.vjp(function, arrays)
    np.testing.assert_array_equal(out, right)
    jax.tree.map(np.testing.assert_array_equal, vjp(right), expected(right))


@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
def test_states_of_16_bits(narrow):
    """They are taken as float32, with a gradient in their own type, as NumPy's function takes them."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((2, 9, 2, 8), np.float32) for _ in range(3)]
    state = jax.numpy.asarray(rng.standard_normal((2, 2, 8, 8), np.float32), narrow)

    def attend(state, of=attnmask.jax.linear_attention):
        return of(*arrays, initial_state=state, return_state=True)

    right, vjp = attend(np.asarray(state), attnmask.linear_attention_vjp)
    for function in (attend, jax.jit(attend)):
        jax.tree.map(partial(np.testing.assert_array_equal, strict=True), function(state), right)
    mapped = jax.vmap(attend)(state[None])
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[0], y), mapped, right)
    out, pull = jax.vjp(attend, state)
    (found,) = jax.jit(pull)(out)
    np.testing.assert_array_equal(found, vjp(*right).initial_state, strict=True)


def test_vmap_of_vmap_and_of_starts():
    rng, starts = np.random.default_rng(0), jax.numpy.array([[0, 3, 70], [0, 30, 70]])
    shapes = {"query": (2, 5), "key": (2, 5), "value": (4, 6), "decay": (4,), "beta": (4,)}
    arrays = {name: -rng.random((1, 70, *shape), np.float32) for name, shape in shapes.items()}
    attend = jax.vmap(
        jax.vmap(lambda x, s: attnmask.jax.linear_attention(**x, cu_seqlens=s), (None, 0)), (0, None)
    )
    twice = {name: np.stack([x, x / 2]) for name, x in arrays.items()}
    out = jax.jit(attend)(twice, starts)
    for i in range(2):
        for j in range(2):
            given = {name: x[i] for name, x in twice.items()}
            expected = attnmask.linear_attention(**given, cu_seqlens=np.asarray(starts[j]))
            np.testing.assert_array_equal(out[i, j], expected)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["linear_attention_step", "short_convolution_step"])
def test_steps_in_a_loop(name, seed):
    """Also where slots are known, and mapped over states alone."""
    rest = drawn(name, seed)
    state, slots = rest.pop("state"), rest.pop("state_indices", None)
    with jax.enable_x64(state.dtype == np.float64):
        arrays = {key: x for key, x in rest.items() if isinstance(x, np.ndarray)}
        step = partial(
            getattr(attnmask.jax, name), **{key: x for key, x in rest.items() if key not in arrays}
        )
        held = state.copy()
        for _ in range(3):
            getattr(attnmask, name)(**rest, state=held, state_indices=slots)
        for known in (slots, None if slots is None else jax.numpy.asarray(slots)):
            looped = jax.jit(
                lambda state, arrays, slots=known: jax.lax.fori_loop(
                    0, 3, lambda _, state: step(**arrays, state=state, state_indices=slots)[1], state
                )
            )
            np.testing.assert_array_equal(looped(state, arrays), held)
            both = jax.vmap(looped, (0, None))(jax.numpy.stack([state, state * 0]), arrays)
            np.testing.assert_array_equal(both[0], held)
