"""Derivatives of attention in JAX: both modes, first and second order, under what JAX makes of functions.

They are compared with those of dense attention in float64, which JAX differentiates, and with those of NumPy's
functions, whose masks and terms are tested there.
"""

import itertools
from functools import partial

import numpy as np
import pytest

import attnmask
from attnmask import MaskInfo
from attnmask._attention.jvp import second_gradients

jax = pytest.importorskip("jax")
import attnmask.jax  # noqa: E402

jnp, INPUTS = jax.numpy, ("query", "key", "value")
rng = np.random.default_rng(7)


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def drawn(batch=2, queries=7, keys=9, heads=4, dtype=np.float64):
    """Query, key and value, and directions along which they move."""
    shapes = (batch, queries, heads, 8), (batch, keys, heads // 2, 8), (batch, keys, heads // 2, 6)
    return [tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes) for _ in range(2)]


def dense(query, key, value):
    """Attention with a causal mask at the bottom right, written in operations of JAX."""
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(query.shape[-1])
    queries, keys = logits.shape[-2:]
    logits = jnp.where(jnp.tril(jnp.ones((queries, keys), bool), keys - queries), logits, -jnp.inf)
    out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits, -1), value)
    return out, jax.nn.logsumexp(logits, -1)


def ours(query, key, value, **more):
    more = {"causal": True, "causal_offset": "bottom-right", "return_lse": True} | more
    return attnmask.jax.flash_attention(query, key, value, **more)


def loss(f, *x):
    out, lse = f(*x)
    return (out**3).sum() + jnp.sin(lse).sum()


def dot(one, other):
    return sum((x * y).sum() for x, y in zip(one, other, strict=True))


gradient = lambda f, x: jax.grad(loss, (1, 2, 3))(f, *x)  # noqa: E731
of_gradient = lambda f, x, g: jax.vjp(f, *x)[1](f(*g))  # noqa: E731
DERIVATIVES = {
    "jvp": lambda f, x, t: jax.jvp(f, x, t),
    "jvp of key": lambda f, x, t: jax.jvp(lambda key: f(x[0], key, x[2]), x[1:2], t[1:2]),
    "linearize": lambda f, x, t: jax.linearize(f, *x)[1](*t),
    "grad": lambda f, x, t: gradient(f, x),
    "jvp of grad": lambda f, x, t: jax.jvp(partial(gradient, f), (x,), (t,)),
    "grad of grad": lambda f, x, t: jax.grad(lambda x: dot(gradient(f, x), t))(x),
    "grad of jvp": lambda f, x, t: jax.grad(lambda x: jax.jvp(partial(loss, f), x, t)[1])(x),
    "jvp of the pullback": lambda f, x, t: jax.jvp(partial(of_gradient, f, x), (t,), (x,)),
    "grad of the pullback": lambda f, x, t: jax.grad(lambda g: dot(of_gradient(f, x, g), t))(x),
}
mesh = lambda: jax.sharding.Mesh(jax.devices()[:1], "rows")  # noqa: E731
on_mesh = lambda *shared: [jax.sharding.PartitionSpec(None if x else "rows") for x in shared]  # noqa: E731


def looped(f):
    """A result that each step of a loop feeds into the next."""

    def step(query, _, key, value):
        out, lse = f(query, key, value)
        return query.at[..., :6].add(jnp.tanh(out)), lse

    def loop(query, key, value):
        return jax.lax.scan(partial(step, key=key, value=value), query, None, 2)

    return loop


WAYS = {
    "eager": lambda f: f,
    "jit": lambda f: f,
    "jit inside": jax.jit,
    "vmap": jax.vmap,
    "vmap of the query": lambda f: lambda query, *x: jax.vmap(f, (0, None, None))(query, *(a[0] for a in x)),
    "checkpoint": jax.checkpoint,
    "scan": looped,
    "shard_map": lambda f: jax.shard_map(
        f, mesh=mesh(), in_specs=(*on_mesh(0, 1, 1),), out_specs=(*on_mesh(0, 0),)
    ),
}


def assert_near(got, right, tolerance=1e-9):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(right), strict=True):
        size = np.abs(np.float64(y)).max(initial=1)
        np.testing.assert_allclose(np.float64(x) / size, np.float64(y) / size, atol=tolerance, rtol=0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", DERIVATIVES)
def test_dense(name, way):
    x, t = drawn()
    if way.startswith("vmap"):
        x, t = (tuple(jnp.stack([a, a / 2]) for a in arrays) for arrays in (x, t))
    derivative = lambda f: lambda x, t: DERIVATIVES[name](WAYS[way](f), x, t)  # noqa: E731
    mine = derivative(ours) if way in ("eager", "jit inside") else jax.jit(derivative(ours))
    assert_near(mine(x, t), jax.jit(derivative(dense))(x, t))


JACOBIANS = {
    "jacfwd": lambda f: jax.jacfwd(f, (0, 1, 2)),
    "jacrev": lambda f: jax.jacrev(f, (0, 1, 2)),
    "hessian": lambda f: jax.hessian(partial(loss, f), (0, 1, 2)),
    "jacrev of jacrev": lambda f: jax.jacrev(jax.jacrev(partial(loss, f), 1), (0, 1)),
    "jacrev of jacfwd": lambda f: jax.jacrev(jax.jacfwd(partial(loss, f), 1), (0, 1)),
    "vmap of jvp of grad": lambda f: jax.vmap(
        lambda *x: jax.jvp(partial(gradient, f), (x,), (x,)), in_axes=(None, None, 4)
    ),
}


@pytest.mark.parametrize("name", JACOBIANS)
def test_jacobians(name):
    """Of which the calls share what does not differ."""
    x, _ = drawn(1, 2, 3, 2)
    if name.startswith("vmap"):
        x = *x[:2], jnp.stack([x[2], -x[2]], 4)
    assert_near(jax.jit(JACOBIANS[name](ours))(*x), jax.jit(JACOBIANS[name](dense))(*x))


TERMS = {
    "window": {"sliding_window": (3, 1)},
    "cap": {"logits_soft_cap": 1.5},
    "sinks": {"softmax_aux": rng.standard_normal((4, 2))},
    "dropout": {"dropout_prob": 0.3, "dropout_seed": 4},
    "slopes": {"alibi_slopes": np.linspace(0.1, 0.4, 4)},
    "bias": {"bias": np.where(rng.random((2, 1, 7, 9)) < 0.2, -np.inf, rng.standard_normal((2, 1, 7, 9)))},
    "relative": {"relative_bias": rng.standard_normal((4, 5)), "relative_low": -2},
    "grid": {"grid_bias": rng.standard_normal((4, 5, 5))},
    "segments": {"q_segment_ids": np.repeat([[0, 1, -1]], [3, 3, 1], 1).repeat(2, 0)}
    | {"kv_segment_ids": np.repeat([[0, 1, 2]], [4, 3, 2], 1).repeat(2, 0)},
    "mask": {"attention_mask": rng.random((2, 1, 7, 9)) < 0.6},
}


def compare_with_numpy(x, t, more, tolerance=1e-12):
    """Tangents, those of fixed terms zero, and the gradient of a product with gradients."""
    static = {name: value for name, value in more.items() if not isinstance(value, np.ndarray)}
    arrays = {name: value for name, value in more.items() if name not in static}
    attend = lambda arrays, *x: ours(*x, **static, **arrays)  # noqa: E731
    how = {"causal": True, "causal_offset": "bottom-right"} | more
    out, lse = results = attnmask.flash_attention(*x, **how, return_lse=True)
    given = [np.asarray(rng.standard_normal(y.shape), y.dtype) for y in results]

    @jax.jit
    def compute(x, t, given, arrays):
        pull = lambda given, *x: jax.vjp(partial(attend, arrays), *x)[1](given)  # noqa: E731
        return (
            jax.jvp(partial(attend, arrays), x, t)[1],
            jax.jvp(partial(pull, given), x, t)[1],
            jax.grad(lambda given, *x: dot(pull(given, *x), t), (1, 2, 3, 0))(given, *x),
        )

    tangents, forward, reverse = compute(x, t, tuple(given), arrays)
    _, right = attnmask.flash_attention_jvp(*x, *t, **how, return_lse=True)
    assert_near(tangents, right, tolerance)
    dout, *of_inputs, dlse = second_gradients((given[0], *x, out, lse, *t), how | {"dlse": given[1]})
    assert_near(forward, of_inputs, tolerance)
    assert_near(reverse, (*of_inputs, (dout, dlse)), tolerance)


@pytest.mark.parametrize("pair", [*itertools.combinations(TERMS, 2)], ids="-".join)
def test_terms(pair):
    compare_with_numpy(*drawn(), TERMS[pair[0]] | TERMS[pair[1]])


@pytest.mark.parametrize("lengths", [(0, 3), (3, 0), (1, 1), (63, 65), (65, 63), (130, 130)], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 1e-6)])
def test_lengths(lengths, dtype, tolerance):
    compare_with_numpy(*drawn(2, *lengths, dtype=dtype), {"sliding_window": 20}, tolerance)


def test_packed():
    starts = {"cum_seqlens_q": np.array([0, 3, 3, 7]), "cum_seqlens_k": np.array([0, 4, 6, 9])}
    compare_with_numpy(*drawn(1), starts)


def test_batch_axes():
    x, t = (tuple(a.reshape(2, 3, *a.shape[1:]) for a in arrays) for arrays in drawn(6))
    compare_with_numpy(x, t, {"alibi_slopes": rng.random((2, 3, 4))})


@pytest.mark.parametrize("name", ["jvp", "grad", "jvp of grad", "grad of grad", "grad of jvp"])
def test_merge(name):
    """Attention merged from that over parts of the keys, of which a row sees nothing of some."""

    def merged(query, *x):
        masks = np.array_split(np.arange(9) <= np.arange(7)[:, None] + 2, 6, axis=1)
        parts = zip(*(jnp.array_split(a, 6, axis=1) for a in x), masks, strict=True)
        results = [attnmask.jax.flash_attention(query, *part, return_lse=True) for part in parts]
        return attnmask.jax.merge_attention_states(*zip(*results, strict=True))

    x, t = drawn()
    found = jax.jit(partial(DERIVATIVES[name], merged))(x, t)
    assert_near(found, jax.jit(partial(DERIVATIVES[name], dense))(x, t))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits(dtype):
    x, t = drawn(dtype=dtype)
    for name in ("jvp", "grad", "jvp of grad", "grad of jvp"):
        near = [np.float64(a) for a in x], [np.float64(a) for a in t]
        right = jax.jit(partial(DERIVATIVES[name], dense))(*map(tuple, near))
        assert_near(
            jax.jit(partial(DERIVATIVES[name], ours))(x, t), right, 0.01 if dtype == "float16" else 0.06
        )


def test_nothing_spreads_from_dead_inputs():
    x, t = drawn()
    mask = np.ones((7, 9), bool)
    mask[:, 4] = mask[2] = False
    right = jax.jit(partial(DERIVATIVES["jvp of grad"], partial(ours, attention_mask=mask[None, None])))(x, t)
    (query, key, value), t = ([a.at[:, 4].set(jnp.nan) if i else a for i, a in enumerate(y)] for y in (x, t))
    found = jax.jit(partial(DERIVATIVES["jvp of grad"], partial(ours, attention_mask=mask[None, None])))(
        (query, key, value), tuple(t)
    )
    jax.tree.map(np.testing.assert_array_equal, found, right)


SHAPES = dict(zip(INPUTS, [(2, 7, 4, 8), (2, 9, 2, 8), (2, 9, 2, 6)], strict=True))
SHAPES |= {"bias": (2, 1, 7, 9), "softmax_aux": (2,)}
LEARNED = {name: rng.standard_normal(shape) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("mapped", [("x",), ("t",), ("x", "t")], ids="".join)
@pytest.mark.parametrize("name", LEARNED)
def test_tangents_of_each(name, mapped):
    """Where tangents, what moves, or both are mapped; also by the callback."""
    arrays, direction = LEARNED, rng.standard_normal(SHAPES[name])

    def tangent(x, t, callback=False):
        attend = lambda x: ours(**arrays | {name: x}, callback=callback)  # noqa: E731
        return jax.jvp(attend, (x,), (t,))[1]

    both = {"x": arrays[name], "t": direction}
    both = {key: np.stack([x, x / 2]) if key in mapped else x for key, x in both.items()}
    axes = tuple(0 if key in mapped else None for key in both)
    found = [jax.jit(jax.vmap(partial(tangent, callback=how), axes))(*both.values()) for how in (False, True)]
    for call in range(2):
        one = {key: x[call] if key in mapped else x for key, x in both.items()}
        _, right = attnmask.flash_attention_jvp(
            **arrays | {name: one["x"]},
            **{f"{name}_tangent": one["t"]},
            causal=True,
            causal_offset="bottom-right",
            return_lse=True,
        )
        for results in found:
            assert_near([x[call] for x in results], right, 1e-12)


def test_the_callback():
    x, t = drawn()
    for name in ("jvp", "jvp of grad", "grad of grad"):
        found = [
            jax.jit(partial(DERIVATIVES[name], partial(ours, callback=callback)))(x, t)
            for callback in (False, True)
        ]
        jax.tree.map(np.testing.assert_array_equal, *found)


def calls_in(function, *arguments):
    text = jax.jit(function).lower(*arguments).as_text()
    assert "dense<0.0" not in text  # no tangent that is zero has been made
    names = ("forward", "backward", "jvp", "backward_vjp")
    return [text.count(f"@attnmask_flash_{name}(") for name in names]


def test_calls():
    """What is computed once is computed once, and reverse mode takes no more than it did."""
    x, t = drawn()
    attend = lambda *x: ours(*x, return_lse=False)  # noqa: E731
    assert calls_in(attend, *x) == [1, 0, 0, 0]
    for f in (attend, jax.checkpoint(attend, policy=jax.checkpoint_policies.everything_saveable)):
        assert calls_in(lambda x, t, f=f: jax.vjp(f, *x)[1](t), x, t[0][..., :6]) == [1, 1, 0, 0]
    assert calls_in(lambda x, t: jax.jvp(attend, x, t), x, t) == [1, 0, 1, 0]
    assert calls_in(lambda x, t: jax.jvp(lambda q: attend(q, *x[1:]), x[:1], t[:1]), x, t) == [1, 0, 1, 0]
    pull = lambda x, t: jax.vjp(attend, *x)[1](t[0][..., :6])  # noqa: E731
    assert calls_in(lambda x, t: jax.jvp(lambda x: pull(x, t), (x,), (t,)), x, t) == [1, 1, 0, 1]
    assert calls_in(lambda x, t: jax.grad(lambda x: dot(pull(x, t), t))(x), x, t)[1:] == [0, 0, 1]


def test_what_is_kept():
    """For gradients: inputs, the result and its logsumexp."""
    x, _ = drawn()
    results, pull = jax.vjp(ours, *x)
    kept = {id(a): a.nbytes for a in jax.tree.leaves(pull)}
    assert sum(kept.values()) == sum(a.nbytes for a in (*x, *results))


def test_export():
    x, t = drawn()
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in attnmask.jax.register()]
    product = jax.jit(partial(DERIVATIVES["jvp of grad"], ours))
    exported = jax.export.export(product, disabled_checks=checks)(x, t)
    loaded = jax.export.deserialize(exported.serialize())
    jax.tree.map(np.testing.assert_array_equal, loaded.call(x, t), product(x, t))


def test_traced_masks():
    """Second derivatives where the mask is an argument of the compiled function."""
    x, t = drawn()
    mask = MaskInfo.from_segments(np.array([[0, 0, 0, 1, 1, 1, 1, 1, -1]] * 2)[:, :7], np.zeros((2, 9), int))
    product = lambda mask, x, t: DERIVATIVES["jvp of grad"](  # noqa: E731
        lambda *x: attnmask.jax.flash_attention(*x, mask, return_lse=True), x, t
    )
    jax.tree.map(np.testing.assert_array_equal, jax.jit(product)(mask, x, t), product(mask, x, t))


twice = lambda f, *x: jax.jvp(lambda *x: jax.jvp(f, x, x)[1], x, x)  # noqa: E731
product = lambda f, x: jax.jvp(jax.grad(lambda x: (f(x) ** 2).sum()), (x,), (x,))  # noqa: E731
penalty = lambda f, *x: jax.grad(lambda *x: (jax.grad(lambda *x: (f(*x) ** 2).sum())(*x) ** 2).sum())(*x)  # noqa: E731


@pytest.mark.parametrize("compiled", [False, True])
def test_errors(compiled):
    def refused(match, derivative, *x):
        with pytest.raises(NotImplementedError, match=match):
            (jax.jit(derivative) if compiled else derivative)(*x)

    (query, key, value), _ = drawn()
    bias, sinks, table = *(jnp.asarray(LEARNED[x]) for x in ("bias", "softmax_aux")), jnp.ones((4, 3))
    f = lambda query, **more: ours(query, key, value, **more, return_lse=False)  # noqa: E731
    name = "attnmask.jax.flash_attention"
    refused(f"{name} has no tangents of tangents.*jax.jvp of jax.grad", partial(twice, f), query)
    refused(f"{name} .*none of order three", partial(penalty, lambda x: penalty(f, x)[..., :6]), query)
    f_raw = partial(f, normalize_output=False)
    refused("normalize_output must be True.* no tangents", lambda x: jax.jvp(f_raw, (x,), (x,)), query)
    refused("normalize_output must be True.* no second", partial(penalty, f_raw), query)
    f_table = lambda x: f(query, relative_bias=x)  # noqa: E731
    refused(
        f"relative_bias: {name} has gradients.* no tangents", lambda x: jax.jvp(f_table, (x,), (x,)), table
    )
    grid = jnp.ones((4, 5, 5))
    f_grid = lambda x: f(query, grid_bias=x)  # noqa: E731
    refused(f"grid_bias: {name} has gradients.* no tangents", lambda x: jax.jvp(f_grid, (x,), (x,)), grid)
    terms = {"bias": bias, "softmax_aux": sinks, "relative_bias": table, "grid_bias": grid}
    for argument, x in terms.items():
        g = lambda x, argument=argument: f(query, **{argument: x})  # noqa: E731
        refused(f"{argument}: {name} has gradients.* no (second|tangents)", partial(product, g), x)
        refused(f"{argument}: {name} has gradients.* no second", partial(penalty, g), x)
        moved = lambda y, x=x, argument=argument: jax.grad(lambda x: (f(y, **{argument: x}) ** 2).sum())(x)  # noqa: E731
        refused(f"{argument}: .* no second", lambda y, moved=moved: jax.jvp(moved, (y,), (y,)), query)
        refused(f"{argument}: .* no second", jax.grad(lambda y, moved=moved: moved(y).sum()), query)
    found = jax.grad(lambda y: jax.grad(lambda y, x: (f(y, bias=x) ** 2).sum(), (0, 1))(y, bias)[0].sum())(
        query
    )
    assert np.isfinite(found).all()  # as none of a bias is asked for


@pytest.mark.parametrize("mode", ["grad", "jit", "vmap", "jvp"])
def test_slopes_have_no_gradient(mode):
    """An error, not zeros; and none where slopes are constants."""
    x = jax.numpy.ones((1, 8, 4, 16))
    slopes = jax.numpy.array([0.5, 0.25, 0.125, 0])

    def loss(slopes, x=x):
        return attnmask.jax.flash_attention(x, x, x, causal=True, alibi_slopes=slopes).sum()

    of = {
        "grad": jax.grad,
        "jit": lambda f: jax.jit(jax.grad(f)),
        "vmap": lambda f: lambda s: jax.vmap(jax.grad(f))(s[None]),
        "jvp": lambda f: lambda s: jax.jvp(f, (s,), (s,)),
    }[mode]
    with pytest.raises(
        NotImplementedError, match=r"no gradient of alibi_slopes: write jax.lax.stop_gradient"
    ):
        of(loss)(slopes)
    of(lambda s: loss(jax.lax.stop_gradient(s)))(slopes)
    assert jax.jit(jax.grad(loss, argnums=1))(slopes, x).shape == x.shape


# Caches that are only read


def dense_cache(lengths, window=None, causal=True):
    """Attention of the last tokens of rows of these lengths, where a row without keys is zero, its logsumexp too."""

    def attend(query, key, value):
        key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
        logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(query.shape[-1])
        queries, keys = logits.shape[-2:]
        ends = jnp.asarray(lengths).reshape(-1, 1, 1, 1)
        at, k = jnp.arange(queries)[:, None] + ends - queries, jnp.arange(keys)
        seen = (k < ends) & ((k <= at) | (not causal)) & (k >= at - (keys if window is None else window))
        logits = jnp.where(seen, logits, -1e30)
        largest = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(logits - largest), 0)
        total = weights.sum(-1, keepdims=True)
        safe = jnp.where(total > 0, total, 1)
        lse = jnp.where(total > 0, jnp.log(safe) + largest, 0)
        return jnp.einsum("bhqk,bkhd->bqhd", weights / safe, value), lse[..., 0]

    return attend


def of_cache(query, k_cache, v_cache, **more):
    """The result, and the logsumexp of rows that have keys."""
    found = attnmask.jax.flash_attention_with_kvcache(query, k_cache, v_cache, return_lse=True, **more)
    return found.out, jnp.where(jnp.isfinite(found.lse), found.lse, 0)


CACHES = {
    "ragged": ((9, 4, 1, 0), {}),
    "one length": (5, {}),
    "no tokens": (0, {}),
    "whole": (None, {}),
    "window": ((9, 4, 1, 0), {"sliding_window": (2, 0)}),
    "not causal": ((9, 4, 1, 0), {"causal": False}),
}


def of_dead_rows(arrays, lengths, number):
    """The arrays, where tokens after the end of a row are this number."""
    dead = np.arange(9) >= np.reshape(lengths, (-1, 1))
    return arrays[0], *(jnp.where(dead[..., None, None], number, x) for x in arrays[1:])


@pytest.mark.parametrize(
    ("name", "traced"), [*((name, False) for name in CACHES), ("ragged", True), ("one length", True)]
)
def test_caches(name, traced):
    """All derivatives; what lies after the end of a row has none, even if it is not a number."""
    lengths, more = CACHES[name]
    x, t = drawn(4)
    window, causal = more.get("sliding_window", [None])[0], more.get("causal", True)

    def compute(attend, x, t):
        return [derivative(attend, x, t) for derivative in DERIVATIVES.values()]

    right = jax.jit(partial(compute, dense_cache(9 if lengths is None else lengths, window, causal)))(x, t)
    if lengths is not None:
        x, t = (of_dead_rows(arrays, lengths, jnp.nan) for arrays in (x, t))
        lengths = np.array(lengths, np.uint8 if traced else np.int64)

    def mine(x, t, lengths=lengths):
        return compute(partial(of_cache, cache_seqlens=lengths, **more), x, t)

    assert_near(jax.jit(mine)(x, t, *[lengths] * traced), right)
    if not traced and name == "ragged":
        assert_near(mine(x, t), right)


@pytest.mark.parametrize("way", WAYS)
def test_caches_in_all_ways(way):
    x, t = drawn()
    if way.startswith("vmap"):
        x, t = (tuple(jnp.stack([a, a / 2]) for a in arrays) for arrays in (x, t))
    lengths = np.array([8, 3])

    def compute(f, x, t):
        return [
            DERIVATIVES[name](WAYS[way](f), x, t) for name in ("grad", "jvp", "jvp of grad", "grad of grad")
        ]

    right = jax.jit(partial(compute, dense_cache(lengths)))(x, t)
    if way == "shard_map":  # closed over, lengths are those of all rows
        lengths = 8
        right = jax.jit(partial(compute, dense_cache(lengths)))(x, t)
    mine = partial(compute, partial(of_cache, cache_seqlens=lengths))
    assert_near((mine if way in ("eager", "jit inside") else jax.jit(mine))(x, t), right)


def test_caches_where_lengths_are_mapped():
    x, t = (tuple(jnp.stack([a, a / 2, -a]) for a in arrays) for arrays in drawn())
    lengths = np.array([[9, 2], [0, 5], [1, 1]])

    def product(attend, x, t, lengths):
        return DERIVATIVES["jvp of grad"](attend(lengths), x, t)

    found, right = (
        jax.jit(jax.vmap(partial(product, attend)))(x, t, lengths)
        for attend in (lambda lengths: partial(of_cache, cache_seqlens=lengths), dense_cache)
    )
    assert_near(found, right)


@pytest.mark.parametrize("name", ["hessian", "vmap of jvp of grad"])
def test_jacobians_of_caches(name):
    x, _ = drawn(2, 2, 3, 2)
    if name.startswith("vmap"):
        x = *x[:2], jnp.stack([x[2], -x[2]], 4)
    lengths = np.array([3, 1])
    found = jax.jit(JACOBIANS[name](partial(of_cache, cache_seqlens=lengths)))(*x)
    assert_near(found, jax.jit(JACOBIANS[name](dense_cache(lengths)))(*x))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_caches_of_16_bits(dtype):
    x, t = drawn(4, dtype=dtype)
    near = [tuple(np.float64(a) for a in arrays) for arrays in (x, t)]
    lengths, tolerance = (9, 4, 1, 0), 0.01 if dtype == "float16" else 0.06
    for name in ("jvp", "grad", "jvp of grad", "grad of jvp"):
        found = jax.jit(partial(DERIVATIVES[name], partial(of_cache, cache_seqlens=np.array(lengths))))(x, t)
        right = jax.jit(partial(DERIVATIVES[name], dense_cache(lengths)))(*near)
        assert_near(found, right, tolerance)


OF_CACHES = {
    "several": TERMS["window"] | TERMS["cap"] | TERMS["sinks"] | TERMS["slopes"] | TERMS["relative"],
    "grid": TERMS["grid"],
}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("name", OF_CACHES)
def test_terms_of_caches(name, traced):
    """They are those of attention to the keys of each row. Learned terms have gradients, too."""
    x, t = drawn(3)
    lengths = np.array([9, 8, 7] if name == "grid" else [9, 4, 1])  # each query has a point of the grid
    static = {key: y for key, y in OF_CACHES[name].items() if not isinstance(y, np.ndarray)}
    terms = {key: jnp.asarray(y) for key, y in OF_CACHES[name].items() if key not in static}

    def by_rows(query, key, value, **more):
        how = {"causal": True, "return_lse": True, **more}
        parts = [
            attnmask.jax.flash_attention(
                query[i : i + 1], key[i : i + 1, :n], value[i : i + 1, :n], causal_offset=n - 7, **how
            )
            for i, n in enumerate(map(int, lengths))
        ]
        out, lse = (jnp.concatenate(y) for y in zip(*parts, strict=True))
        return out, jnp.where(jnp.isfinite(lse), lse, 0)

    def compute(f, x, t, terms):
        own = lambda *x: f(*x, **terms, **static)  # noqa: E731
        found = [DERIVATIVES[name](own, x, t) for name in ("jvp", "grad", "jvp of grad", "grad of jvp")]
        learned = {key: y for key, y in terms.items() if key != "alibi_slopes"}
        return found, jax.grad(lambda y: loss(lambda *x: f(*x, **terms | y, **static), *x))(learned)

    attend = partial(of_cache, cache_seqlens=lengths)
    if traced:
        found = jax.jit(partial(compute, attend))(x, t, terms)
    else:
        found = jax.jit(lambda x, t: compute(attend, x, t, terms))(x, t)
    assert_near(found, jax.jit(lambda x, t: compute(by_rows, x, t, terms))(x, t))


def test_caches_as_in_pytorch():
    torch = pytest.importorskip("torch")
    import attnmask.torch

    x, t = drawn(3)
    lengths = [9, 4, 0]
    inputs = [torch.tensor(np.asarray(a)).requires_grad_() for a in x]
    out = attnmask.torch.flash_attention_with_kvcache(*inputs, cache_seqlens=lengths)
    first = torch.autograd.grad((out**3).sum(), inputs, create_graph=True)
    along = [torch.tensor(np.asarray(a)) for a in t]
    second = torch.autograd.grad(sum((a * b).sum() for a, b in zip(first, along, strict=True)), inputs)
    attend = partial(attnmask.jax.flash_attention_with_kvcache, cache_seqlens=np.array(lengths))
    gradient = jax.grad(lambda x: (attend(*x).out ** 3).sum())
    found = jax.jvp(gradient, (x,), (t,))
    assert_near(found, [[a.detach().numpy() for a in grads] for grads in (first, second)], 1e-12)


def test_calls_of_caches():
    """A result that has derivatives has the bits of one without, from the same call, which refuses wrong lengths."""
    x, t = drawn(dtype=np.float32)
    attend = partial(of_cache, cache_seqlens=np.array([8, 3]))
    out = lambda *x: attnmask.jax.flash_attention_with_kvcache(*x, cache_seqlens=np.array([8, 3])).out  # noqa: E731
    pull = lambda x, t: jax.vjp(out, *x)[1](t[0][..., :6])  # noqa: E731
    assert calls_in(out, *x) == [0, 0, 0, 0]
    assert calls_in(pull, x, t) == [0, 1, 0, 0]
    assert calls_in(lambda x, t: jax.jvp(out, x, t), x, t) == [0, 0, 1, 0]
    assert calls_in(lambda x, t: jax.jvp(lambda x: pull(x, t), (x,), (t,)), x, t) == [0, 1, 0, 1]
    plain, (results, _) = jax.jit(attend)(*x), jax.jit(lambda *x: jax.jvp(attend, x, t))(*x)
    jax.tree.map(np.testing.assert_array_equal, plain, results)
    jax.tree.map(np.testing.assert_array_equal, plain, attend(*x))
    found = attnmask.jax.flash_attention_with_kvcache
    of_lengths = jax.jit(jax.grad(lambda x, n: found(*x, cache_seqlens=n).out.sum()))
    for wrong in ([10, 3], [3, -1]):
        with pytest.raises(jax.errors.JaxRuntimeError, match="cache_seqlens must be"):
            jax.block_until_ready(of_lengths(x, np.array(wrong)))


REFUSED = {
    "key": {"key": np.ones((2, 3, 2, 8)), "value": np.ones((2, 3, 2, 6)), "cache_seqlens": 0},
    "block_table": {"block_table": np.array([[0, 1], [1, 0]]), "cache_seqlens": 9},
    "cu_seqlens_q": {"query": np.ones((5, 4, 8)), "cu_seqlens_q": np.array([0, 2, 5])},
    "attention_mask": {"attention_mask": np.ones((7, 9), bool)},
    "bias": {"bias": np.zeros((7, 9))},
    "attention_chunk": {"attention_chunk": 4},
    "rotate": {"rotate": True, "v_cache": np.ones((2, 9, 2, 8))},
    "prefix": {"prefix": 9, "block_table": np.array([[0], [0]]), "cache_seqlens": 9},
    "a k_cache of int8": {f"{x}_cache": np.ones((2, 9, 2, 8), np.int8) for x in "kv"}
    | {f"{x}_scale": np.ones((2, 9, 2, 1), np.float32) for x in "kv"}
    | {"query": np.ones((2, 7, 4, 8), np.float32)},
}  # fmt: skip


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("without", REFUSED)
def test_caches_without_derivatives(without, compiled):
    (query, k_cache, v_cache), _ = drawn()
    given = {"query": query, "k_cache": k_cache, "v_cache": v_cache} | REFUSED[without]
    query = jnp.asarray(given.pop("query"))
    attend = lambda query: attnmask.jax.flash_attention_with_kvcache(query, **given).out  # noqa: E731
    named = "block_table" if without == "prefix" else without
    words = (
        f"attnmask.jax.flash_attention_with_kvcache has no gradients with {named}: flash_attention has them"
    )
    for derivative in (
        jax.grad(lambda x: attend(x).sum()),
        lambda x: jax.jvp(attend, (x,), (x,)),
        lambda x: jax.linearize(attend, x)[1](x),
        jax.grad(lambda x: jax.grad(lambda x: attend(x).sum())(x).sum()),
    ):
        with pytest.raises(NotImplementedError, match=words):
            (jax.jit(derivative) if compiled else derivative)(query)


@pytest.mark.parametrize("compiled", [False, True])
def test_errors_of_caches(compiled):
    (query, *caches), _ = drawn()

    def refused(match, derivative, x):
        with pytest.raises(NotImplementedError, match=match):
            (jax.jit(derivative) if compiled else derivative)(x)

    def f(query, **more):
        return attnmask.jax.flash_attention_with_kvcache(query, *caches, cache_seqlens=8, **more).out

    name = "attnmask.jax.flash_attention"
    refused(f"{name} has no tangents of tangents.*jax.jvp of jax.grad", partial(twice, f), query)
    refused(f"{name} .*none of order three", partial(penalty, lambda x: penalty(f, x)[..., :6]), query)
    third = jax.grad(lambda x: jax.jvp(jax.grad(lambda x: (f(x) ** 2).sum()), (x,), (x,))[1].sum())
    refused(f"{name} .*none of order three", third, query)
    slopes, sinks, table = jnp.ones(4), jnp.ones(2), jnp.ones((4, 3))
    refused("no gradient of alibi_slopes", jax.grad(lambda x: f(query, alibi_slopes=x).sum()), slopes)
    refused("softmax_aux: .* no second", partial(penalty, lambda x: f(query, softmax_aux=x)), sinks)
    tangent = lambda x: jax.jvp(lambda x: f(query, relative_bias=x), (x,), (x,))  # noqa: E731
    refused(f"relative_bias: {name} has gradients.* no tangents", tangent, table)
