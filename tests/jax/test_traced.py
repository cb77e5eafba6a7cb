"""attnmask.jax with everything traced that may be: the bits of the NumPy functions, and their errors."""

import time

import numpy as np
import pytest

import attnmask

jax = pytest.importorskip("jax")
import attnmask.jax  # noqa: E402

B, Q, K, H, HKV = 2, 7, 9, 4, 2
rng = np.random.default_rng(1)


def tensors(batch=B, queries=Q, keys=K, dtype=np.float32):
    shapes = (batch, queries, H, 8), (batch, keys, HKV, 8), (batch, keys, HKV, 5)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


Q_IDS = np.sort(rng.integers(-1, 3, (B, Q))).astype(np.int32)
KV_IDS = np.sort(rng.integers(-1, 3, (B, K))).astype(np.int32)
STARTS_Q, STARTS_K = np.array([0, 2, 2, 7]), np.array([0, 4, 5, 9])


def test_seeds():
    """Traced ones and those of 64 bits; none is compiled anew for."""
    x = tensors()
    compiled = []

    @jax.jit
    def attend(seed):
        compiled.append(seed)
        return attnmask.jax.flash_attention(*x, dropout_prob=0.5, dropout_seed=seed)

    for seed in (0, 5, -1):
        np.testing.assert_array_equal(
            attend(seed), attnmask.flash_attention(*x, dropout_prob=0.5, dropout_seed=seed)
        )
    assert len(compiled) == 1
    large = 2**64 - 3
    right = attnmask.flash_attention(*x, dropout_prob=0.5, dropout_seed=large)
    fixed = jax.jit(
        lambda query: attnmask.jax.flash_attention(query, *x[1:], dropout_prob=0.5, dropout_seed=large)
    )
    np.testing.assert_array_equal(fixed(x[0]), right)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(attend(np.uint64(large)), right)


def test_known_arrays_are_no_part_of_what_is_compiled():
    """Gradients of eager calls with other ids, starts, offsets and seeds compile nothing anew."""
    query, key, value = tensors(1)
    grad = jax.grad(lambda query, **more: attnmask.jax.flash_attention(query, key, value, **more).sum())
    calls = [
        {"cum_seqlens_q": STARTS_Q, "cum_seqlens_k": STARTS_K, "causal_offset": np.array([1, 2, 3])},
        {"q_segment_ids": Q_IDS[:1], "kv_segment_ids": KV_IDS[:1], "dropout_prob": 0.5, "dropout_seed": 3},
    ]
    for more in calls:
        grad(query, **more)
    others = [
        {"cum_seqlens_q": STARTS_Q // 7 * 7, "cum_seqlens_k": STARTS_K, "causal_offset": np.array([0, 2, 4])},
        {
            "q_segment_ids": Q_IDS[1:],
            "kv_segment_ids": KV_IDS[1:],
            "dropout_prob": 0.5,
            "dropout_seed": 2**40,
        },
    ]
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
    for more in others:
        grad(query, **more)
    assert not [name for name in compiled if "backend_compile" in name]
    grad(query, causal=True, sliding_window=3)
    assert [name for name in compiled if "backend_compile" in name]


def test_types_when_traced():
    query, key, value = tensors()
    narrow = [jax.numpy.asarray(x, "float8_e4m3fn") for x in (query, key, value)]
    for attend in (attnmask.jax.flash_attention, jax.jit(attnmask.jax.flash_attention)):
        with pytest.raises(
            TypeError, match="query must be of float16, bfloat16, float32 or float64, got float8"
        ):
            attend(*narrow)
    attend = jax.jit(
        lambda seed: attnmask.jax.flash_attention(query, key, value, dropout_prob=0.1, dropout_seed=seed)
    )
    with pytest.raises(TypeError, match="dropout_seed must be an integer"):
        attend(1.5)
    dims = jax.export.symbolic_shape("b, 7, 4, 8")
    with pytest.raises(ValueError, match="query must have a known shape at trace time"):
        jax.export.export(jax.jit(lambda x: attnmask.jax.flash_attention(x, key, value)))(
            jax.ShapeDtypeStruct(dims, np.float32)
        )


def test_donation():
    """Memory that is given away is read before anything is written to it."""
    query, key, _ = (jax.numpy.asarray(array) for array in tensors())
    attend = jax.jit(lambda query, key: attnmask.jax.flash_attention(query, key, key), donate_argnums=0)
    right = attnmask.flash_attention(query, key, key)
    np.testing.assert_array_equal(attend(query, key), right)
    assert query.is_deleted()


def test_a_program_of_another_version():
    """Words that this version has not made are refused; so is what they do not describe."""
    attnmask.jax.register()
    x = jax.numpy.ones((1, 4, 1, 8))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    good = [attnmask.jax._call.VERSION, 1, 0, 3, 0]
    start, cap = good[:4], [3, int(np.float64(2).view(np.int64)), 0, 0, 0, 0, 0]
    cases = [
        [],
        [1],
        [*start[:3], 9, 0, 0],
        [*start, 99, 0],
        [*start, 1, 99, *cap[1:], 0],
        [*start, 1, 3, 0, *cap[2:], 0],
        [*start, 2, *cap, *cap, 0],
        [*start, 1, 0, 0, 0, 0, 4, 3, 0, 0],
        [*start, 1, 0, 0, 0, 0, 0, 0, 0, 0],
        [*good, 9],
        [*good, 7],
        [*good, 0, 0],
        [*good, 3, 2, 0, 2, 0],
        [*good, 4, 2, 9, 2, 0, 1, 0],
        good[:2],
    ]
    call = jax.ffi.ffi_call("attnmask_flash_forward", shape, vmap_method="expand_dims")
    for words in cases:
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"INVALID_ARGUMENT(?!.*another version)"):
            call(x, x, x, words=np.array(words, np.int64))
    with pytest.raises(jax.errors.JaxRuntimeError, match="another version of attnmask has made them"):
        call(x, x, x, words=np.array([good[0] - 1, *good[1:], 0], np.int64))
    np.testing.assert_array_equal(call(x, x, x, words=np.array([*good, 0], np.int64)), x)


TRANSFORMS = {
    "jit": jax.jit,
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None]),
}
AS_ARRAYS = {
    "flash_attention": lambda x: attnmask.flash_attention(x, x, x),
    "flash_attention_fwd": lambda x: attnmask.flash_attention_fwd(x, x, x)[0],
    "flash_attention_vjp": lambda x: attnmask.flash_attention_vjp(x, x, x)[0],
    "flash_attention_with_kvcache": lambda x: attnmask.flash_attention_with_kvcache(x, x, x, cache_seqlens=4),
    "one argument": lambda x: attnmask.flash_attention(*[np.ones(x.shape, np.float32)] * 3, alibi_slopes=x[0, 0, :, 0]),
}  # fmt: skip


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("function", AS_ARRAYS.values(), ids=AS_ARRAYS)
def test_traced_values_as_arrays_of_numpy(function, transform):
    """The functions of NumPy name those that take them."""
    message = (
        r"(query|alibi_slopes) must be an array that .* got a traced value of JAX; .* such as attnmask\.jax"
    )
    with pytest.raises(TypeError, match=message):
        transform(function)(jax.numpy.ones((1, 4, 2, 8)))


def test_large_inputs_are_not_copied():
    """A compiled call that reads a few of the keys in 64 MB takes a small part of the time that a copy does."""
    query = jax.numpy.ones((1, 1, 2, 64))
    key = jax.numpy.ones((1, 2**16, 2, 64))
    attend = jax.jit(
        lambda *x: attnmask.jax.flash_attention(*x, sliding_window=(9, 0), causal_offset="bottom-right")
    )
    copy = jax.jit(lambda key, value: (key + 1, value + 1))

    def seconds(f, *arguments):
        times = []
        for _ in range(20):
            begin = time.perf_counter()
            jax.block_until_ready(f(*arguments))
            times.append(time.perf_counter() - begin)
        return min(times)

    value = key + 0
    assert seconds(attend, query, key, value) < seconds(copy, key, value) / 4
