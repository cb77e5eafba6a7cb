"""attnmask.jax.flash_attention_with_kvcache in loops, in place, on devices, and what is refused."""

import functools

import numpy as np
import pytest
from flash_cases import BF16, F16, F32
from kvcache_bad_input import NUMBERS
from kvcache_cases import Case, arguments_of

import attnmask
from attnmask import MaskInfo

jax = pytest.importorskip("jax")
import ml_dtypes  # noqa: E402
from jax_processes import run  # noqa: E402

import attnmask.jax  # noqa: E402

FLOATS8 = [np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)]
CACHES = ("k_cache", "v_cache", "k_scale", "v_scale")


def is_array(x) -> bool:
    return isinstance(x, (np.ndarray, jax.Array, MaskInfo))


def compiled(arguments: dict):
    """A compiled function of all arrays, and these arrays."""
    traced = {name: x for name, x in arguments.items() if is_array(x)}
    fixed = {name: x for name, x in arguments.items() if name not in traced}
    return jax.jit(lambda traced: attnmask.jax.flash_attention_with_kvcache(**traced, **fixed)), traced


@pytest.mark.parametrize(("name", "value", "error", "words"), [
    ("v_cache", np.zeros((2, 24, 2, 24), F32), ValueError, "the channels of v_cache must be a power of two"),
    ("query", np.zeros((2, 3, 4, 24), F32), ValueError, "of query must be a power of two to be rotated, got 24"),
    ("rotate", 1, TypeError, "rotate must be True or False, got 1"),
])  # fmt: skip
def test_what_is_not_rotated(name, value, error, words):
    x, cache = np.zeros((2, 3, 4, 32), F32), np.zeros((2, 24, 2, 32), F32)
    arguments = {"query": x, "k_cache": cache, "v_cache": cache, "cache_seqlens": 3, "rotate": True}
    function, traced = compiled(arguments | {name: value})
    with pytest.raises(error, match=words):
        function(traced)


def test_numbers_as_tables():
    """Given as they are, and to a compiled function."""
    x = np.zeros((1, 1, 1, 4), F32)
    for table in (*NUMBERS, jax.numpy.int16(1)):
        arguments = {"query": x, "k_cache": x, "v_cache": x, "cache_seqlens": 0, "block_table": table}
        words = r"block_table must be of shape \(1, max_pages\), got"
        with pytest.raises(ValueError, match=words):
            attnmask.jax.flash_attention_with_kvcache(**arguments)
        if table is not NUMBERS[-1]:
            with pytest.raises(ValueError, match=words):
                jax.jit(lambda given: attnmask.jax.flash_attention_with_kvcache(**given))(arguments)


def test_a_traced_mask_of_too_many_keys():
    arguments = arguments_of(Case(queries=3, lengths=(65, 20)))
    arguments["attention_mask"] = MaskInfo.from_segments(np.zeros((1, 3), int), np.zeros((1, 99), int))
    function, traced = compiled(arguments)
    with pytest.raises(
        ValueError, match=r"at most the 65 keys that the cache has room for .*, got 99; write"
    ):
        function(traced)


# In place


def decoding(dtype=F32, tokens=64):
    """A step of a loop, its caches, and the query, key and value of each token."""
    rng = np.random.default_rng(0)
    depth = 32 if dtype == np.uint8 else 16
    inputs = [rng.standard_normal((tokens, 2, 1, heads, depth)).astype(F32) for heads in (4, 2, 2)]
    caches = {name: jax.numpy.zeros((2, tokens, 2, 16), dtype) for name in CACHES[:2]}
    if dtype == np.uint8:  # two numbers of four bits in each
        caches |= {name: jax.numpy.zeros((2, tokens, 2, 1, 2)) for name in CACHES[2:]}
    if dtype in (np.int8, *FLOATS8):
        caches |= {name: jax.numpy.zeros((2, tokens, 2, 1)) for name in CACHES[2:]}

    def step(caches, inputs):
        length, (query, key, value) = inputs
        result = attnmask.jax.flash_attention_with_kvcache(
            query, key=key, value=value, cache_seqlens=length, **caches
        )
        return {name: getattr(result, name) for name in caches}, result.out

    return step, caches, inputs


DTYPES = [F32, F16, BF16, np.dtype(np.int8), *FLOATS8, np.dtype(np.uint8)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_loop_over_tokens(dtype):
    """Nowhere in the compiled loop is a cache copied, and its results are those of single steps."""
    step, caches, inputs = decoding(dtype)
    loop = jax.jit(functools.partial(jax.lax.scan, step), donate_argnums=0)
    lengths = np.arange(64, dtype=np.int32)
    text = loop.lower(caches, (lengths, inputs)).compile().as_text()
    shape = jax.typeof(caches["k_cache"]).str_short(short_dtypes=True)
    shape = shape.replace("i8[", "s8[").replace("f8_", "f8")
    assert f"{shape}{{3,2,1,0}}" in text
    assert f"= {shape}{{3,2,1,0}} copy(" not in text

    arrays = jax.tree.map(np.array, caches)
    more = {"k_scale": None, "v_scale": None} | arrays
    wanted = [
        attnmask.flash_attention_with_kvcache(q, key=k, value=v, cache_seqlens=int(length), **more)
        for length, q, k, v in zip(lengths, *inputs, strict=True)
    ]
    caches, out = loop(caches, (lengths, inputs))
    np.testing.assert_array_equal(out, np.stack(wanted))
    for name, x in caches.items():
        assert np.asarray(x).tobytes() == arrays[name].tobytes()
    if dtype == F32:
        q, k, v = (np.concatenate(list(x), axis=1) for x in inputs)
        whole = attnmask.flash_attention(q, k, v, causal=True)
        np.testing.assert_allclose(np.concatenate(list(out), axis=1), whole, atol=1e-5)


def test_a_cache_that_is_keys_and_values():
    """One array for both is written to for keys, and a copy of it for values."""
    x = np.random.default_rng(0).random((1, 1, 2, 8)).astype(F32)
    cache = jax.numpy.zeros((1, 4, 2, 8))
    result = jax.jit(
        lambda c: attnmask.jax.flash_attention_with_kvcache(x, c, c, x, 2 * x, cache_seqlens=0),
        donate_argnums=0,
    )(cache)
    np.testing.assert_array_equal(result.out, 2 * x)
    np.testing.assert_array_equal(result.k_cache[:, :1], x)
    np.testing.assert_array_equal(result.v_cache[:, :1], 2 * x)


# Mapped, differentiated, sharded


def test_heads_on_two_devices():
    """In place, too."""
    out = run(
        """
        mesh = jax.make_mesh((2,), ("h",), axis_types=(AxisType.Auto,))
        pages = np.zeros((2, 9, 16, 4, 32), np.float32)
        table = jax.numpy.asarray([[3, 1, 4], [8, 0, 2]])
        heads, shared = P(None, None, "h"), P()

        def step(caches, query, key, value, lengths, table):
            result = attnmask.jax.flash_attention_with_kvcache(
                query, *caches, key, value, cache_seqlens=lengths, block_table=table)
            return (result.k_cache, result.v_cache), result.out

        mapped = jax.shard_map(step, mesh=mesh, in_specs=((heads, heads), heads, heads, heads, shared, shared),
                               out_specs=((heads, heads), heads))
        mapped = jax.jit(mapped, donate_argnums=0)
        caches = tuple(jax.device_put(x, NamedSharding(mesh, heads)) for x in pages)
        places = lambda caches: [s.data.unsafe_buffer_pointer() for x in caches for s in x.addressable_shards]
        first, lengths = places(caches), np.array([0, 3], np.int32)
        for _ in range(5):
            query, key, value = (rng.standard_normal((2, 7, h, 32)).astype(np.float32) for h in (8, 4, 4))
            right = attnmask.flash_attention_with_kvcache(
                query, *pages, key, value, cache_seqlens=lengths, block_table=np.asarray(table))
            caches, out = mapped(caches, query, key, value, lengths, table)
            lengths = lengths + 7
            print(np.array_equal(out, right), all(map(np.array_equal, caches, pages)), places(caches) == first)
        """,
        devices=2,
    )
    assert out == ["True"] * 15


# Bad input


@pytest.mark.parametrize("place", range(3), ids=["low", "high", "chunk"])
@pytest.mark.parametrize("number", [2**59 + 1, -(2**59) - 1, 2**63 - 1, -(2**63)])
def test_a_program_of_limits_that_are_too_far(place, number):
    """Words that no version makes are refused; the furthest limits are none."""
    attnmask.jax.register()
    x = jax.numpy.ones((1, 4, 1, 8))
    call = jax.ffi.ffi_call("attnmask_flash_kvcache", jax.ShapeDtypeStruct(x.shape, x.dtype))
    limits = [-(2**59), 2**59, 2**59]

    def words() -> np.ndarray:
        operands = [*(word for limit in limits for word in (1, limit)), *(0, 0) * 2]
        return np.array([*attnmask.jax._call.first_words(0, 1.0), *operands, 0], np.int64)

    np.testing.assert_array_equal(call(x, x, x, words=words()), x)
    limits[place] = number
    with pytest.raises(jax.errors.JaxRuntimeError, match="words: a number is out of its range"):
        call(x, x, x, words=words())


@pytest.mark.parametrize("missing", ["k_scale", "v_scale"])
def test_scales_that_are_missing(missing):
    x, cache = np.ones((1, 1, 2, 8), F32), np.zeros((1, 4, 2, 8), np.int8)
    scales = {name: np.ones((1, 1, 2, 8), F32) for name in ("k_scale", "v_scale") if name != missing}
    function = jax.jit(lambda scales: attnmask.jax.flash_attention_with_kvcache(x, cache, cache, **scales))
    with pytest.raises(ValueError, match=rf"write {missing}=np.ones\(\(1, 1, 2, 8\), np.float32\) for"):
        function(scales)


@pytest.mark.parametrize("name", ["attention_mask", "bias"])
def test_fewer_keys_than_tokens(name):
    """How many there are is known when lengths are."""
    cache = np.ones((2, 12, 2, 8), F32)
    arguments = {"query": np.ones((2, 3, 4, 8), F32), "k_cache": cache, "v_cache": cache}
    arguments |= {name: np.ones((3, 10), F32), "cache_seqlens": np.array([5, 11])}
    function, traced = compiled(arguments)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=rf"{name} must broadcast to .* = \(2, 4, 3, 11\), got 10 keys"
    ):
        jax.block_until_ready(function(traced))
    function(traced | {"cache_seqlens": np.array([5, 10])})


def test_there_is_no_memory_to_write_to():
    x = np.ones((1, 1, 2, 8), F32)
    with pytest.raises(TypeError, match="argument 'out'; leave it out, as the result is a new array"):
        attnmask.jax.flash_attention_with_kvcache(x, x, x, out=x)


def test_an_error_writes_nothing():
    """A later call on the same memory finds the cache as it was."""
    step, caches, inputs = decoding()
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="cache_seqlens must be tokens that the cache has room for"
    ):
        jax.block_until_ready(jax.jit(step)(caches, (64, [x[0] for x in inputs])))
    assert not any(x.any() for x in caches.values())


@pytest.mark.parametrize("scales", [F16, F32])
def test_finite_keys_have_finite_scales(scales):
    """As in NumPy: float16 cannot hold them."""
    key = np.linspace(-3e38, 3e38, 64, dtype=F32).reshape(1, 1, 1, 64)
    caches = {name: np.zeros((1, 4, 1, 32), np.uint8) for name in CACHES[:2]}
    caches |= {name: np.zeros((1, 4, 1, 2, 2), scales) for name in CACHES[2:]}
    arguments = {
        "query": np.full((1, 1, 1, 64), 1e-38, F32),
        "key": key,
        "value": np.ones_like(key),
        **caches,
    }
    function, traced = compiled(arguments | {"cache_seqlens": 0})
    out, *written = function(traced)
    np.testing.assert_allclose(out, 1, rtol=1e-5)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(written) if x.dtype != np.uint8)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("new", [False, True])
def test_a_prefix(packed, new):
    """With NumPy's bits, compiled or not; and under vmap, where each call has pages of its own."""
    rng = np.random.default_rng(0)
    query = rng.standard_normal((3, 2, 16) if packed else (2, 1, 2, 16), np.float32)
    pages = rng.standard_normal((2, 4, 4, 2, 16), np.float32)
    given = {"block_table": np.array([[3, 1], [3, 2]], np.int32), "cache_seqlens": np.array([6, 7], np.int32)}
    if packed:
        given |= {"cu_seqlens_q": np.array([0, 2, 3], np.int32)}
    if new:
        given |= {"key": query[..., :2, :], "value": query[..., :2, :] + 1}
        given["cache_seqlens"] = given["cache_seqlens"] - 2 if packed else given["cache_seqlens"]
    own = [x.copy() for x in pages]
    out, lse = attnmask.flash_attention_with_kvcache(query, *own, **given, prefix=4, return_lse=True)

    def attend(query, pages, given):
        return attnmask.jax.flash_attention_with_kvcache(query, *pages, **given, prefix=4, return_lse=True)

    for function in (attend, jax.jit(attend)):
        got = function(jax.numpy.asarray(query), jax.numpy.array(pages), given)
        assert np.asarray(got.out).tobytes() == out.tobytes()
        assert np.asarray(got.lse).tobytes() == lse.tobytes()
        if new:
            assert np.asarray(got.k_cache).tobytes() == own[0].tobytes()
    queries, both = np.stack([query, query * 2]), np.stack([pages, pages * 2])
    mapped = jax.jit(jax.vmap(lambda query, pages: attend(query, pages, given).out))(queries, both)
    for got, query, pages in zip(mapped, queries, both, strict=True):
        right = attnmask.flash_attention_with_kvcache(query, *pages.copy(), **given, prefix=4)
        assert np.asarray(got).tobytes() == right.tobytes()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prefix": 3}, "prefix must be whole pages of 4 tokens"),
        ({"prefix": 8}, "prefix must be tokens that all .* up to 6 for sequence 0, got 8"),
        ({"block_table": np.array([[3, 1], [0, 2]], np.int32)}, "prefix must be .* sequences share"),
        ({"attention_mask": np.ones((1, 1, 1, 8), bool)}, "attention_mask must be None with prefix, got"),
        ({"sliding_window": 9}, "sliding_window must be None with prefix, got 9"),
    ],
)  # fmt: skip
def test_a_wrong_prefix(wrong, message):
    query, pages = np.ones((2, 1, 2, 16), np.float32), np.ones((4, 4, 2, 16), np.float32)
    given = {"block_table": np.array([[3, 1], [3, 2]], np.int32), "cache_seqlens": np.array([6, 8], np.int32)}
    given |= {"prefix": 4, **wrong}
    for compiled in (False, True):
        attend = functools.partial(attnmask.jax.flash_attention_with_kvcache, **given)
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=message):
            jax.block_until_ready((jax.jit(attend) if compiled else attend)(query, pages, pages))
