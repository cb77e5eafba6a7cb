"""Packed sequences: cdiv, the prepare_* functions, identity_dtype_convert."""

import functools
import math

import ml_dtypes
import numpy as np
import pytest
import reference as ref
from hypothesis import given
from hypothesis import strategies as st
from layouts import CONSTANT, LAYOUTS, arrange, assert_same, outcome

import attnmask

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
INT64_MIN, INT64_MAX, UINT64_MAX = -(2**63), 2**63 - 1, 2**64 - 1

PER_TOKEN = ("prepare_position_ids", "prepare_sequence_ids", "prepare_token_indices")
CHUNKED = ("prepare_chunk_indices", "prepare_chunk_offsets")
PREPARE = ("prepare_lens", *PER_TOKEN, *CHUNKED)


def prepare(module, name: str, cu_seqlens, chunk_size: int = 4):
    more = (chunk_size,) if name in CHUNKED else ()
    return getattr(module, name)(cu_seqlens, *more)


def running(lens) -> list[int]:
    return np.concatenate([[0], np.cumsum(lens, dtype=np.int64)]).tolist()


@st.composite
def packed(draw, longest: int = 40):
    """cu_seqlens of any integer dtype and layout; about a third of the sequences are empty."""
    dtype = draw(st.sampled_from(INTEGERS))
    lens = draw(st.lists(st.one_of(st.just(0), st.integers(1, 3), st.integers(1, longest)), max_size=12))
    room = np.iinfo(dtype).max
    cu_seqlens = [min(end, room) for end in running(lens)]
    return arrange(np.array(cu_seqlens, dtype), draw(st.sampled_from(LAYOUTS)))


@pytest.mark.parametrize("name", PREPARE)
@given(cu_seqlens=packed(), chunk_size=st.one_of(st.integers(1, 20), st.integers(1, 2**70)))
def test_prepare(isa, name, cu_seqlens, chunk_size):
    case = (isa, name, cu_seqlens.tolist(), cu_seqlens.dtype, cu_seqlens.strides, chunk_size)
    before = cu_seqlens.tobytes()
    expected = prepare(ref, name, cu_seqlens, chunk_size)
    assert_same(prepare(attnmask, name, cu_seqlens, chunk_size), expected, case)
    assert cu_seqlens.tobytes() == before, case


@functools.cache
def million(sequences: int, dtype: str, chunk_size: int) -> dict[str, np.ndarray]:
    """A million tokens in sequences of very different lengths, and the expected results of each function."""
    rng = np.random.default_rng(sequences)
    lens = rng.multinomial(1_000_000, rng.dirichlet(np.full(sequences, 0.5)))
    cu_seqlens, indices = np.array(running(lens), dtype), np.arange(sequences, dtype=dtype)
    ids = np.repeat(indices, lens)
    places = np.arange(1_000_000, dtype=dtype) - np.repeat(cu_seqlens[:-1], lens)
    chunks = -(-lens // chunk_size)
    offsets = np.array(running(chunks), dtype)
    chunk_places = np.arange(chunks.sum(), dtype=dtype) - np.repeat(offsets[:-1], chunks)
    return {
        "cu_seqlens": cu_seqlens,
        "prepare_lens": lens.astype(dtype),
        "prepare_position_ids": places,
        "prepare_sequence_ids": ids,
        "prepare_token_indices": np.stack([ids, places], axis=1),
        "prepare_chunk_indices": np.stack([np.repeat(indices, chunks), chunk_places], axis=1),
        "prepare_chunk_offsets": offsets,
    }


@pytest.mark.repeats
@pytest.mark.parametrize("dtype", ["int32", "uint64"])
@pytest.mark.parametrize("sequences", [1, 7, 20_000, 300_000])
def test_a_million_tokens(isa, set_threads, dtype, sequences):
    """Enough for several threads; with 300,000 sequences, a pass over all tokens for each sequence would never end."""
    expected = million(sequences, dtype, 64)
    for threads in (1, 2, 3):
        set_threads(threads)
        for name in PREPARE:
            got = prepare(attnmask, name, expected["cu_seqlens"], 64)
            assert_same(got, expected[name], (isa, name, dtype, sequences, threads))


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint16"])
@pytest.mark.parametrize("sequences", [0, 1, 511, 512, 513, 1025])
def test_counts_of_many_sequences(isa, dtype, sequences):
    """Whole blocks of sequences, and one more or less; in int64 also a sequence longer than 32 bits can express."""
    rng = np.random.default_rng(sequences)
    for lens in (rng.integers(0, 60, sequences), np.where(np.arange(sequences) == 512, 2**40 + 3, 50)):
        cu_seqlens = np.minimum(running(lens), np.iinfo(dtype).max).astype(dtype)
        for array in (cu_seqlens, arrange(cu_seqlens, "strided")):
            for chunk_size in (1, 2, 3, 49, 50, 64, 2**31 - 1, 2**31, 2**32, 2**40, 2**63):
                for name in ("prepare_lens", "prepare_chunk_offsets"):
                    expected = prepare(ref, name, cu_seqlens, chunk_size)
                    assert_same(prepare(attnmask, name, array, chunk_size), expected, (isa, name, chunk_size))


@pytest.mark.parametrize("name", PREPARE)
def test_prepare_only_empty_sequences(isa, name):
    for cu_seqlens in (np.zeros(1, np.int32), np.broadcast_to(np.int32(0), (301,)), np.zeros(301, np.uint8)):
        expected = prepare(ref, name, cu_seqlens)
        assert_same(prepare(attnmask, name, cu_seqlens), expected, (isa, name, cu_seqlens.shape))


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("name", ["prepare_sequence_ids", "prepare_token_indices", "prepare_chunk_indices"])
def test_a_sequence_id_that_does_not_fit(isa, name, dtype):
    room = np.iinfo(dtype).max
    last_that_fits = np.array([0] * (room + 1) + [5], dtype)
    assert_same(prepare(attnmask, name, last_that_fits), prepare(ref, name, last_that_fits), (name, dtype))
    with pytest.raises(OverflowError):
        prepare(attnmask, name, np.array([0] * (room + 2) + [5], dtype))
    with pytest.raises(OverflowError):
        prepare(attnmask, name, np.array([0] * 300 + [1] + [1] * 40, dtype))


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
@pytest.mark.parametrize("chunk_size", [2**61, 2**62 - 1, 2**62, 2**63 - 1, 2**63, 2**64, 10**30])
def test_chunks_of_huge_sequences(dtype, chunk_size):
    """Rounding up by adding before the division would overflow."""
    cu_seqlens = np.array([0, 2**62, 2**62, 2**63 - 1], dtype)
    for name in ("prepare_lens", *CHUNKED):
        got = prepare(attnmask, name, cu_seqlens, chunk_size)
        assert_same(got, prepare(ref, name, cu_seqlens, chunk_size), (name, dtype, chunk_size))


@pytest.mark.parametrize("name", ["prepare_lens", *CHUNKED])
def test_uint64_beyond_int64(name):
    """The result is exact, or the argument is refused by name; numbers never wrap around."""
    cu_seqlens = np.array([0, 5, UINT64_MAX], np.uint64)
    try:
        got = prepare(attnmask, name, cu_seqlens, 2**62)
    except (OverflowError, ValueError) as error:
        assert "cu_seqlens" in str(error)  # noqa: PT017
    else:
        assert_same(got, prepare(ref, name, cu_seqlens, 2**62), name)


MASK_DTYPES = ("bool", *INTEGERS, "float16", ml_dtypes.bfloat16, "float32", "float64", np.longdouble)


@given(
    dtype=st.sampled_from(MASK_DTYPES),
    batch=st.integers(0, 5),
    length=st.integers(0, 150),
    seed=st.integers(0, 2**32),
    out_dtype=st.sampled_from([(), ("int64",), ("uint16",), ("int8",), (np.uint64,)]),
)
@pytest.mark.parametrize("layout", [*LAYOUTS, *CONSTANT])
def test_mask_counts(isa, layout, dtype, batch, length, seed, out_dtype):
    rng = np.random.default_rng(seed)
    if dtype == "bool" or dtype in INTEGERS:
        values = rng.integers(0, 2, (batch, length)) * rng.integers(1, 128, (batch, length))
    else:
        tiny = float(ml_dtypes.finfo(dtype).smallest_subnormal) or 5e-324
        values = rng.choice(np.array([0.0, -0.0, 1.0, 2.5, 3e4, tiny]), (batch, length))
    mask = arrange(values.astype(dtype), layout)
    mask = mask if mask.any() else mask != 0  # floating-point zeros alone are refused
    case = (isa, mask.dtype, mask.shape, mask.strides, mask.tolist(), out_dtype)
    before = mask.tobytes()

    assert_same(attnmask.prepare_lens_from_mask(mask), ref.prepare_lens_from_mask(mask), case)
    got = outcome(attnmask.prepare_cu_seqlens_from_mask, mask, *out_dtype)
    expected = outcome(ref.prepare_cu_seqlens_from_mask, mask, *out_dtype)
    assert (got is OverflowError) == (expected is OverflowError), case
    if expected is not OverflowError:
        assert_same(got, expected, case)
    assert mask.tobytes() == before, case


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_wide_masks(isa, set_threads, threads):
    """Rows longer than 8-bit and 16-bit counters can count, shared among threads."""
    set_threads(threads)
    rng = np.random.default_rng(0)
    mask = rng.random((3, 400_000)) < np.array([[0.5], [1.0], [0.0]])
    expected = mask.sum(axis=1, dtype=np.int32)
    for dtype in ("bool", "uint8", "int16", "float32", "float64", "float16"):
        assert_same(attnmask.prepare_lens_from_mask(mask.astype(dtype)), expected, (isa, dtype, threads))
    tall = np.ascontiguousarray(mask.T)
    assert_same(attnmask.prepare_lens_from_mask(tall), tall.sum(axis=1, dtype=np.int32), (isa, threads))
    assert_same(attnmask.prepare_lens_from_mask(tall.T), expected, (isa, "transposed", threads))


# cdiv


@st.composite
def operands(draw, shape, lowest=INT64_MIN):
    """An array of any integer dtype that includes the limits of its range, or a NumPy scalar."""
    dtype = draw(st.sampled_from(INTEGERS))
    low, high = max(np.iinfo(dtype).min, lowest), np.iinfo(dtype).max
    value = st.one_of(
        st.integers(low, high), st.integers(max(low, -20), 20), st.sampled_from([low, high - 1, high])
    )
    size = math.prod(shape)
    values = np.array(draw(st.lists(value, min_size=size, max_size=size)), dtype).reshape(shape)
    return arrange(values, draw(st.sampled_from(LAYOUTS))) if shape else values[()]


@given(a=st.integers(-(2**80), 2**80), b=st.integers(1, 2**70))
def test_cdiv_of_python_integers(a, b):
    got = attnmask.cdiv(a, b)
    assert type(got) is int
    assert got == ref.cdiv(a, b)
    assert (got - 1) * b < a <= got * b


@given(data=st.data())
@pytest.mark.parametrize("kind", ["two arrays", "a is int", "b is int"])
def test_cdiv_of_arrays(kind, data):
    """Every pair of dtypes, broadcast, with the limits of their ranges; or with any Python integer."""
    shapes = [((), ()), ((4,), ()), ((), (3,)), ((3, 1), (4,)), ((0, 3), (3,)), ((2, 3), (2, 3))]
    a_shape, b_shape = data.draw(st.sampled_from(shapes))
    any_int = st.integers(-300, 300) | st.integers(-(2**70), 2**70)
    positive = st.integers(1, 300) | st.integers(1, 2**70)
    a = data.draw(any_int if kind == "a is int" else operands(a_shape))
    b = data.draw(positive if kind == "b is int" else operands(b_shape, lowest=1))
    case = (a, b)
    if kind == "two arrays" and np.promote_types(a.dtype, b.dtype).kind == "f":
        with pytest.raises(TypeError):
            attnmask.cdiv(a, b)
        return
    got, expected = outcome(attnmask.cdiv, a, b), outcome(ref.cdiv, a, b)
    assert type(got) is type(expected), (got, expected, case)
    if expected is not OverflowError:
        assert got.dtype == expected.dtype, (got.dtype, expected.dtype, case)
        np.testing.assert_array_equal(got, expected, err_msg=repr(case))


@pytest.mark.parametrize(
    ("a", "b"), [([5, 6], 2), ((5, -6), [2, 4]), (np.zeros((0, 3), np.int16), 2)], ids=repr
)
def test_cdiv_of_lists(a, b):
    assert_same(attnmask.cdiv(a, b), ref.cdiv(np.array(a), np.array(b) if isinstance(b, list) else b), (a, b))


@pytest.mark.parametrize("b", [np.int8(3), np.array([3], np.int8), np.array([3, 100], np.int8)], ids=repr)
@pytest.mark.parametrize("a", [1000, -(2**63) - 1, 2**70])
def test_cdiv_does_not_fit(a, b):
    with pytest.raises(OverflowError, match=r"a and b must have quotients that fit int8, got .* at index 0"):
        attnmask.cdiv(a, b)


@pytest.mark.parametrize("axes", [33, 64])
def test_cdiv_of_as_many_axes_as_there_may_be(axes):
    """NumPy's iterators have at most 32 axes."""
    ones = np.ones((1,) * axes, int)
    assert_same(attnmask.cdiv(5, ones), 5 * ones, axes)
    assert_same(
        attnmask.cdiv(7 * ones, np.arange(1, 4)), np.reshape([7, 4, 3], (1,) * (axes - 1) + (3,)), axes
    )


def test_cdiv_tells_the_first_quotient_that_does_not_fit():
    with pytest.raises(OverflowError, match=r"a and b must have quotients that fit int64, got .* at index 2"):
        attnmask.cdiv(2**80, [[2**62, 2**40], [1, 1]])
    assert_same(attnmask.cdiv(2**80, [[2**62, 2**40]]), np.array([[2**18, 2**40]]), "those that fit")


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32", "int16"])
@pytest.mark.parametrize("size", [1, 7, 64, 10_001])
def test_cdiv_of_many(dtype, size):
    """Large arrays: multiples and their neighbours, small numbers and the limits of the range."""
    ends, rng = np.iinfo(dtype), np.random.default_rng(size)
    whole = rng.integers(ends.min, ends.max, size, dtype, endpoint=True)
    a = np.where(rng.random(size) < 0.5, whole, whole >> rng.integers(0, ends.bits, size).astype(dtype))
    each = rng.integers(1, ends.max, size, dtype, endpoint=True)
    each >>= rng.integers(0, ends.bits - 1, size).astype(dtype)
    each[each == 0] = 1
    divisors = [1, 2, 3, 7, 64, 1000, 2**31 - 1, 2**31, 2**48 - 1, 2**48 + 1, 2**53 + 1, 2**63 - 1, 2**64]
    for b in [*divisors, ends.max, np.int8(3), np.uint64(2**63), each]:
        d = b.astype(object) if b is each else int(b)
        near = a.astype(object) // d * d + rng.integers(-1, 2, size)
        for values in (a, np.clip(near, ends.min, ends.max).astype(dtype)):
            for shape in ((size,), (1, size, 1)):
                dividend, divisor = values.reshape(shape), b.reshape(shape) if b is each else b
                if not isinstance(b, int) and np.promote_types(dtype, b.dtype).kind == "f":
                    continue
                got, exact = attnmask.cdiv(dividend, divisor), -(-values.astype(object) // d)
                expected = values.dtype if isinstance(b, int) else np.promote_types(dtype, b.dtype)
                assert_same(got, exact.astype(expected).reshape(shape), (dtype, b))


@pytest.mark.parametrize("dtype", ["int64", "uint64", "int16"])
@pytest.mark.parametrize(("a_shape", "b_shape"), [
    ((301, 1, 113), (7, 113)), ((301, 1, 113), (301, 7, 1)), ((1,), (40_000,)), ((40_000, 1), (1, 3)),
    ((), (5, 3)), ((3, 0, 2), (1, 2)),
])  # fmt: skip
def test_cdiv_of_arrays_that_broadcast(dtype, a_shape, b_shape):
    """Longer than one task, so that tasks begin within rows; with negative and doubled strides, too."""
    ends, rng = np.iinfo(dtype), np.random.default_rng(0)
    a = rng.integers(ends.min, ends.max, (*a_shape, 2), dtype, endpoint=True)[..., 1]
    b = rng.integers(1, 1000, b_shape, dtype)
    b = b[::-1] if b_shape else b
    quotients = a // b
    assert_same(attnmask.cdiv(a, b), quotients + (quotients * b != a).astype(dtype), dtype)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("bad", [0, -1, "lowest"])
def test_cdiv_by_one_bad_of_many(dtype, bad):
    a, b = np.arange(1000, dtype=dtype), np.ones(1000, dtype)
    b[700] = np.iinfo(dtype).min if bad == "lowest" else bad
    with pytest.raises(ValueError, match=rf"b must be positive, got {b[700]} at index 700"):
        attnmask.cdiv(a, b)
    for one in (b[700], int(b[700]), b[700:701].reshape(())):
        with pytest.raises(ValueError, match=f"b must be positive, got {b[700]}"):
            attnmask.cdiv(a, one)


@pytest.mark.parametrize(("b", "index", "value"), [
    (0, "", "0"),
    (np.array([3, 1, -7]), "2", "-7"),
    (np.array([[1, 2], [3, 0]]), "1, 1", "0"),
    ([-2, 0], "0", "-2"),
])  # fmt: skip
def test_the_first_bad_entry_of_b_is_told(b, index, value):
    with pytest.raises(ValueError, match=rf"b must be positive, got {value}\b.*{index}"):
        attnmask.cdiv(5, b)


def test_shapes_that_do_not_broadcast():
    with pytest.raises(ValueError, match=r"\ba\b.*\bb\b"):
        attnmask.cdiv(np.arange(3), np.arange(1, 3))


# identity_dtype_convert


@pytest.mark.parametrize("dtype", ["float32", np.float16, np.dtype("float64"), ml_dtypes.bfloat16, "int32"])
@pytest.mark.parametrize("gradient", [np.array([0.1, -2.5, 1e4]), [1.0, 2.0], 3.5], ids=repr)
def test_identity_dtype_convert(dtype, gradient):
    convert = attnmask.identity_dtype_convert(dtype)
    for x in (np.arange(3.0), [1, 2], "anything", None):
        assert convert(x) is x
        out, pullback = convert.vjp(x)
        assert out is x
        got, expected = pullback(gradient), np.asarray(gradient).astype(dtype)
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)
