"""Gradients of sixteen bits through JAX do not suffer from the rounding of the result, by whatever way they come."""

from functools import partial

import ml_dtypes
import numpy as np
import pytest
from environment import multiplies_bf16

import attnmask

jax = pytest.importorskip("jax")
import attnmask.jax  # noqa: E402

# The root of the mean square of the error of the query's gradient: by products of float32, and of the type. With a
# rounded result it is 0.0025, 0.0031 and 0.0003.
LIMITS = {ml_dtypes.bfloat16: (0.0014, 0.0024), np.float16: (0.00018, 0.00018)}
MORE = {"causal": True}


@pytest.fixture(params=LIMITS)
def given(request):
    """What is query, key, value and the gradient of the result."""
    return np.random.default_rng(0).standard_normal((16, 64, 4, 32)).astype(request.param)


def attend(*arrays, **more):
    return attnmask.jax.flash_attention(*arrays, **MORE, **more)


def gradients(function, x):
    return jax.vjp(function, x, x, x)[1](x)


def check(got, x):
    """The bits are those of flash_attention_vjp."""
    right = attnmask.flash_attention_vjp(x, x, x, **MORE)[1](x)
    for one, other in zip(got, right, strict=False):
        np.testing.assert_array_equal(np.asarray(one), other)


@pytest.mark.parametrize("callback", [False, True])
def test_how_far_they_are_off(isa, given, callback):
    wide = given.astype(float)
    exact = attnmask.flash_attention_vjp(wide, wide, wide, **MORE)[1](wide).query
    for transform in (lambda x: x, jax.jit):
        got = gradients(transform(partial(attend, callback=callback)), jax.numpy.asarray(given))
        check(got, given)
        rms = ((np.asarray(got[0], float) - exact) ** 2).mean() ** 0.5
        assert rms < LIMITS[given.dtype.type][multiplies_bf16(isa)], rms


def test_checkpoints(given):
    check(gradients(jax.jit(jax.checkpoint(attend)), given), given)


def test_a_rounded_result_is_taken(given):
    """As programs that were exported before have it."""
    from attnmask._attention.arguments import DEFAULTS
    from attnmask.jax import _call as call
    from attnmask.jax._arguments import check as look
    from attnmask.jax._arguments import specify

    learned = dict.fromkeys(("query", "key", "value"), jax.numpy.asarray(given))
    known = DEFAULTS | learned | MORE
    spec, others = specify(known, look(known)[0])
    out, lse = attnmask.flash_attention_fwd(given, given, given, **MORE)
    call.registered()
    got = call.backward(spec, learned, others, ("query", "key", "value"), (given, out, lse))
    right = attnmask.flash_attention_bwd(given, given, given, given, out, lse, **MORE)
    for one, other in zip(got, right, strict=False):
        np.testing.assert_array_equal(np.asarray(one), other)


def test_ring(given):
    """Of one device: the error is what it is without a ring."""
    mesh, spec = jax.sharding.Mesh(jax.devices()[:1], ("ring",)), jax.P(None, "ring")
    ring = jax.shard_map(
        partial(attnmask.jax.ring_attention, axis_name="ring", **MORE),
        mesh=mesh,
        in_specs=(spec,) * 3,
        out_specs=spec,
    )
    wide = given.astype(float)
    exact = attnmask.flash_attention_vjp(wide, wide, wide, **MORE)[1](wide)
    plain = attnmask.flash_attention_vjp(given, given, given, **MORE)[1](given)
    got = gradients(jax.jit(ring), jax.numpy.asarray(given))
    for one, other, right in zip(got, plain, exact, strict=False):
        ours, least = (((np.asarray(x, float) - right) ** 2).mean() for x in (one, other))
        assert ours < 1.01 * least
