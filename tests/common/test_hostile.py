"""Objects that change, or lie about themselves, while a function reads them; and sizes that no machine can hold."""

import contextlib
import signal
import sys
import time
import warnings
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from environment import SANITIZED, alarm, assert_heard, python, run_apart
from hostile import Subclass
from numpy.lib.stride_tricks import as_strided

import attnmask
from attnmask import MaskInfo, _core
from attnmask.operations import OperationImpl, OperationRegistry

F32 = np.float32


def test_an_argument_that_changes_another_one():
    """An object's `__array__` changes an earlier argument: the call gives an error or a result, and no crash."""

    class Meddler:
        def __init__(self, other, shape):
            self.other, self.shape = other, shape

        def __array__(self, *args, **kwargs):
            np.ndarray.shape.__set__(self.other, self.shape)
            return np.ones((1, 64, 2, 8), F32)

    for shape in ((1024,), (2, 32, 16), (64, 1, 1, 16), (1, 1, 1, 1024)):
        for function in (
            lambda other, meddler: attnmask.flash_attention(other, meddler, meddler),
            lambda other, meddler: attnmask.flash_attention(meddler, other, meddler),
            lambda other, meddler: attnmask.flash_attention(meddler, meddler, meddler, out=other),
            lambda other, meddler: attnmask.flash_attention(meddler, meddler, meddler, bias=other),
            lambda other, meddler: attnmask.merge_attention_states([other, meddler], [other, meddler]),
            lambda other, meddler: attnmask.chunk_global_cumsum(meddler, out=other),
            lambda other, meddler: attnmask.flash_attention_bwd(
                other, meddler, meddler, meddler, meddler, np.zeros((1, 2, 64), F32)
            ),
        ):
            other = np.ones((1, 64, 2, 8), F32)
            with warnings.catch_warnings():  # newer NumPy deprecates setting a shape
                warnings.simplefilter("ignore", DeprecationWarning)
                with contextlib.suppress(ValueError, TypeError):
                    function(other, Meddler(other, shape))


def attend_by_tiles_that_change() -> None:
    """The core reads their numbers from memory that somebody writes to, and never leaves the tiles."""
    info = MaskInfo.from_function(lambda b, h, q, k: (q + k) % 3 == 0, 100, 130)
    leaves, aux = info.tree_flatten()
    arrays = [None if leaf is None else np.array(leaf) for leaf in leaves]
    views = [None if array is None else read_only(array) for array in arrays]
    query, key = np.ones((1, 100, 1, 16), F32), np.ones((1, 130, 1, 16), F32)
    for number in (-(10**8), 2, 8, 10**8, 2**31 - 1):
        mask = MaskInfo.tree_unflatten(aux, views)
        expected = attnmask.flash_attention(query, key, key, mask)
        (places,) = (array for array in arrays if array is not None and array.ndim == 4)
        before = places.copy()
        places[...] = number
        attnmask.flash_attention(query, key, key, mask)  # which was read before
        places[...] = before
        np.testing.assert_array_equal(attnmask.flash_attention(query, key, key, mask), expected)


def read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.setflags(write=False)
    return view


def test_tiles_that_change():
    """In a process of its own, since to leave them would be its end."""
    run_apart(attend_by_tiles_that_change)


MEDDLING = """
import sys, warnings
import numpy as np
import attnmask

warnings.simplefilter("ignore")  # newer NumPy deprecates setting a shape
compare = np.shares_memory
for target, attribute, value in {changes}:
    memory = np.random.default_rng(0).standard_normal((1, 512, 2, 128)).astype(np.float32)
    query, out = memory[..., ::2], memory[..., 1::2]  # NumPy has to search to find that they are apart
    key, value_ = query + 1, query[..., :32] - 1
    expected = attnmask.flash_attention(query, key, value_)
    out = out[..., :32]
    arrays = dict(query=query, key=key, value=value_, out=out)
    plain = {{name: array.view() for name, array in arrays.items()}}
    calls = []

    def meddle(*args, **options):
        calls.append(1)
        setattr(arrays[target], attribute, value)
        return compare(*args, **options)

    np.shares_memory = meddle
    assert attnmask.flash_attention(query, key, value_, out=out) is out
    np.shares_memory = compare
    assert calls, target
    np.testing.assert_array_equal(plain["out"], expected, f"{{target}} {{attribute}}")
print("same")
"""


@pytest.mark.parametrize("target", ["query", "key", "value", "out"])
def test_arrays_that_change_while_their_memory_is_compared(target):
    """What was checked is what is read and written, whatever foreign code does to the arrays meanwhile."""
    changes = [(target, "strides", (0, 0, 0, 0)), (target, "dtype", np.dtype("i4").str)]
    if target in ("key", "value"):
        changes += [(target, "shape", (1, 2**14, 2, 2 if target == "key" else 1)), (target, "dtype", "f8")]
    result = python(MEDDLING.format(changes=changes))
    assert result.stdout == "same\n", (result.returncode, result.stderr)


def test_starts_that_change_while_a_later_argument_is_read():
    starts = np.array([0, 2, 5])

    class Size:
        def __index__(self):
            starts.dtype = np.float64
            return 2

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        indices = attnmask.prepare_chunk_indices(starts, Size())
    assert indices.dtype == np.int64
    assert indices.tolist() == [[0, 0], [1, 0], [1, 1]]


def test_ids_that_change_during_a_call(set_threads):
    """A call knows those of its beginning, since it asks them again and again where keys begin and end."""
    set_threads(2)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 4096, 8, 64), np.float32)
    first = np.repeat(np.arange(8, dtype=np.int32), 512)[None]
    expected = attnmask.flash_attention(x, x, x, q_segment_ids=first)
    ids, rings = first.copy(), []

    def ring(*_):
        rings.append(1)
        ids[...] = rng.integers(-1, 3, ids.shape)

    for _ in range(100):
        ids[...] = first
        rings.clear()
        with alarm(ring, 0.003):
            got = attnmask.flash_attention(x, x, x, q_segment_ids=ids)
            rang = bool(rings)
        if rang and (got == expected).all():
            return
        if rang:  # before the call began
            np.testing.assert_array_equal(got, attnmask.flash_attention(x, x, x, q_segment_ids=ids))
    pytest.fail("the alarm never rang during the call")


@pytest.mark.parametrize("head", [False, True])
def test_ids_that_change_while_a_later_term_is_read(head):
    ids = np.zeros((1, 1, 4) if head else (1, 4), np.int32)

    class Dense:
        def __array__(self, dtype=None, copy=None):
            ids[...] = -1
            return np.ones((1, 1, 4, 4), bool)

    nodes = (("equal", ids, ids, False), ("dense", Dense(), 0, 0), "and")
    assert _core.mask_count((1, 1, 4, 4), nodes).tolist() == [[16]]


# Sizes

WIDE = 2**33


def huge(dtype, *shape, value=0) -> np.ndarray:
    return as_strided(np.full(1, value, dtype), shape, (0,) * len(shape))


def attend(depth, value_depth=1, keys=3, dtype="f2", queries=1) -> np.ndarray:
    shapes = (queries, depth), (keys, depth), (keys, value_depth)
    return attnmask.flash_attention(*(huge(dtype, 1, tokens, 1, channels) for tokens, channels in shapes))


def gradients(batch, queries, depth, value_depth, **more) -> attnmask.FlashAttentionGrads:
    shapes = (queries, value_depth), (queries, depth), (3, depth), (3, value_depth), (queries, value_depth)
    arrays = [huge("f2", batch, tokens, 1, channels) for tokens, channels in shapes]
    return attnmask.flash_attention_bwd(*arrays, huge("f4", batch, 1, queries), **more)


@pytest.mark.skipif(SANITIZED, reason="a sanitizer has its own memory")
@pytest.mark.parametrize("call", [
    lambda: MaskInfo.from_segments(huge("i8", 1, WIDE)),
    lambda: MaskInfo.from_segments(huge("u8", 1, 2**40)),
    lambda: MaskInfo(q_segment_ids=huge("i8", 1, WIDE)),
    lambda: MaskInfo(q_positions=huge("i8", 1, WIDE)),
    lambda: MaskInfo.from_attention_mask(huge("f4", 1, 2**40, value=1)),
    lambda: MaskInfo.from_segments(huge("?", 1, 2**40), is_attn_mask=True),
    lambda: MaskInfo.from_cu_seqlens(huge("i8", WIDE), packed=True),
    lambda: MaskInfo.dynamic_init(input_ids=huge("i4", 1, 2**40)),
    lambda: MaskInfo.dynamic_init(attention_mask=huge("i4", 1, 2**40)),
    lambda: MaskInfo.from_segments([[0] * 4]).apply_token_type_ids(huge("i8", 1, WIDE)),
    lambda: attnmask.merge_attention_states(huge("f4", 2**31, 1, 1, 1, 1), huge("f4", 2**31, 1, 1, 1)),
    lambda: attnmask.merge_attention_states_vjp(huge("f4", 2**31, 1, 1, 1, 0), huge("f4", 2**31, 1, 1, 1)),
    lambda: attnmask.flash_attention(*[huge("f4", 1, 4, 4, 8)] * 3, softmax_aux=huge("f4", 2**59)),
    lambda: OperationImpl.repeat_kv_heads(huge("f4", 1, 1, 2**31, 1), huge("f4", 1, 1, 1, 1), 2**10),
    lambda: OperationImpl.combine_query_kv_masks(huge("?", 2**20), huge("?", 2**20)),
    lambda: OperationRegistry.create("vanilla")(*[huge("f4", 1, 2**20, 1, 1)] * 3),
    lambda: attnmask.segment_ids_to_mask(huge("i1", 2, 0, WIDE)),
    lambda: attnmask.cdiv(huge("u1", 2**61), 3),
    lambda: MaskInfo(np.ones((1, 1, 6, 6), bool)).apply_sliding_window(huge("i8", 2**40)),
    lambda: attnmask.t5_relative_bias(np.zeros((8, 2)), 2**63, 2, max_distance=2**62),
    lambda: attnmask.prepare_lens(huge(">i8", 2**58)),
    lambda: MaskInfo.from_cu_seqlens(np.zeros(0, int), max_q_len=2**63 - 1),
    lambda: MaskInfo.from_function(lambda b, h, q, k: True, 5, 7, batch=2**63),
    lambda: MaskInfo.from_segments(huge("i1", 2**61, 0)),
    lambda: attnmask.prepare_lens(huge("i1", 2**61)),
    lambda: attnmask.prepare_sequence_ids(huge("i1", 2**61)),
    lambda: attnmask.chunk_global_cumsum(np.ones((1, 4, 1)), cu_seqlens=huge("i1", 2**61)),
    lambda: attnmask.pairs_to_cu_seqlens(huge("i1", 2**61)),
    lambda: attnmask.cu_seqlens_to_mask(huge("i1", 2**61), 0),
    lambda: attnmask.qkv_masks_to_cu_seqlens(huge("?", 2**59, 1), huge("?", 2**59, 1)),
    lambda: attnmask.attention_mask_to_qkv_cu_seqlens(huge("?", 2**59, 1, 1, 1)),
    lambda: attnmask.segment_ids_to_cu_seqlens(np.array([[2**60]]), max_segments=None),
    lambda: attend(2**60, 4, queries=2),
    lambda: attend(2**59, keys=1, dtype="f8"),
    lambda: attend(2**61, keys=1, dtype=ml_dtypes.bfloat16),
    lambda: attend(2**60, keys=0),
    lambda: attend(2**23, keys=2**38, queries=100),
    lambda: gradients(1, 2, 2**41, 4),
    lambda: gradients(2**4, 2**56, 0, 0, softmax_aux=np.zeros(1), grad_softmax_aux=True),  # of sinks alone
    lambda: attnmask.merge_attention_states([huge("f4", 2**40, 2**15, 1, 0)], [huge("f4", 2**40, 1, 2**15)]),
    lambda: MaskInfo.create_chunked_attention_mask(4, 2**40, 2**40),
    lambda: attnmask.segment_ids_to_mask(huge("i4", 1, 2**24), np.float64),
    lambda: attnmask.dropout_keep_mask(0, 0.5, (1, 1, 2**45, 2**10)),
    lambda: attnmask.dropout_keep_mask(0, 0.5, (2**31, 2**31, 2**31, 2**31)),
    lambda: attnmask.short_convolution(np.zeros((1, 5, 3), F32), huge("f4", 3, 2**40)),
    lambda: attnmask.short_convolution(np.zeros((1, 5, 3), F32), huge("f4", 3, 2**58)),
    *(partial(_core.mask_fill, (1, 1, n, n), (("band", None, 0, 0),), bool, True, False, None) for n in (2**27, 2**40)),
    *(partial(call, n) for call in (  # a size that wraps around would be small
        lambda n: attnmask.qkv_cu_seqlens_to_attention_mask([0, 1] * 100, max_q_len=n, dtype=np.float64),
        lambda n: attnmask.cu_seqlens_to_mask([0, 1] * 2**10, n),
        lambda n: attnmask.segment_ids_to_cu_seqlens([[0]], max_segments=2**20 * n),
        lambda n: attnmask.prepare_position_ids(np.array([0, n])),
        lambda n: attnmask.prepare_sequence_ids(np.array([0, n])),
        lambda n: attnmask.prepare_token_indices(np.array([0, n])),
        lambda n: attnmask.prepare_chunk_indices(np.array([0, n]), 1),
    ) for n in (2**40, 2**45, 2**59, 2**60, 2**61, 2**62, 2**63 - 1)),
])  # fmt: skip
def test_what_fits_no_memory_is_refused_at_once(call):
    begin = time.perf_counter()
    with pytest.raises(MemoryError):
        call()
    assert time.perf_counter() - begin < 1


STACKS, OP = (huge("f4", 2**31), huge("f4", 2**31)), OperationRegistry.create("flash")


@pytest.mark.parametrize(("error", "match", "call"), [
    (ValueError, r"outs must be \[N, B, T, H, D\]", lambda: attnmask.merge_attention_states(*STACKS)),
    (ValueError, r"outs must be \[N, B, T, H, D\]", lambda: attnmask.merge_attention_states_vjp(*STACKS)),
    (TypeError, "max_kv_len must be an integer, got int8 array",
     lambda: MaskInfo.from_cu_seqlens([0, 2], max_q_len=2, max_kv_len=huge("i1", 2**32))),
    (ValueError, r"attention_mask must broadcast to \[B, H, Tq, Tk\]",
     lambda: attnmask.flash_attention(*[np.zeros((1, 2, 1, 4))] * 3, huge("f4", 2**40, 3))),
    (ValueError, r"q_segment_ids must be \[B, Q\]", lambda: MaskInfo.from_segments(huge("i8", WIDE))),
    (ValueError, "kv_mask must", lambda: OperationImpl.combine_query_kv_masks(np.ones((2, 5)), np.ones((1,) * 64))),
    (ValueError, "axis", lambda: attnmask.quantize_kv(np.zeros((2, 3), F32), np.int8, axis=2**62)),
    (ValueError, "axis", lambda: attnmask.quantize_kv(np.zeros((2, 3), F32), np.int8, axis=(-(2**64), 0))),
    (TypeError, "gradient", lambda: attnmask.identity_dtype_convert(F32).vjp(1)[1](np.void(b"abc"))),
    (TypeError, "gradient", lambda: attnmask.identity_dtype_convert(F32).vjp(1)[1](10**1000)),
    (ValueError, "segment_ids must be below max_segments = 128, got 200 at index",  # the last one looked at
     lambda: attnmask.segment_ids_to_cu_seqlens(huge("i4", 2**40, 1, value=200))),
    (OverflowError, r"pairs must", lambda: attnmask.pairs_to_cu_seqlens(np.array([0, 2**64 - 1], np.uint64))),
    (OverflowError, r"pairs must", lambda: attnmask.pairs_to_cu_seqlens(np.array([2**63, 2**63 + 5], np.uint64))),
    (ValueError, "cu_seqlens must be array_like", lambda: attnmask.prepare_lens([[0], [1, 2]])),
    (ValueError, "pairs must be a 1-D array", lambda: attnmask.pairs_to_cu_seqlens([[]])),
    (TypeError, "sparsity", lambda: MaskInfo.from_random(1, 2, sparsity=np.timedelta64(1, "s"))),
    (TypeError, "preserved_indices", lambda: OP.create_stable_sharding(("dp",), np.array(None))),
])  # fmt: skip
def test_wrong_arguments_of_any_size_are_refused_at_once(error, match, call):
    begin = time.perf_counter()
    with pytest.raises(error, match=match):
        call()
    assert time.perf_counter() - begin < 1


def test_what_is_empty_takes_no_time():
    """The inputs have more rows than any loop could visit."""
    ids = np.zeros((2**40, 0), np.int32)
    assert attnmask.positions_from_segment_ids(ids).shape == ids.shape
    assert attnmask.segment_ids_to_cu_seqlens(ids).max() == 0
    many = (2**20, 2**20, 2**20, 0)
    assert attnmask.dropout_keep_mask(0, 0.5, many).shape == many
    x = huge("f2", 1, 2**50, 1, 8)
    assert attnmask.flash_attention(x, x, x[..., :0]).shape == (1, 2**50, 1, 0)
    few, lse, long = huge("f2", 1, 3, 1, 0), huge("f4", 1, 1, 3), huge("f2", 1, 2**50, 1, 0)
    assert attnmask.flash_attention_bwd(few, few, long, long, few, lse).key.shape == long.shape


def linear_gradients(batch, tokens, heads, rows, channels, **more) -> attnmask.LinearAttentionGrads:
    x, value = np.zeros((batch, tokens, heads, rows), F32), np.zeros((batch, tokens, heads, channels), F32)
    return attnmask.linear_attention_vjp(x, x, value, decay=np.zeros(heads, F32), **more)[1](value)


def many_empty_rows() -> None:
    """Rows that take no memory, of which there are more than any loop could visit. Ends like this or not at all."""
    signal.alarm(20)
    for sizes in ((0, 1, 0, 4), (0, 1, 4, 0), (0, 2, 0, 0), (0, 0, 4, 4), (1, 0, 4, 4)):
        assert not linear_gradients(2**40, *sizes).decay.any()
    for rows in (2**30, 2**40):
        x = np.zeros((rows, 0, 4), F32)
        for width in (1, 3):
            gradients = attnmask.short_convolution_vjp(x, np.zeros((4, width), F32))[1](x)
            assert not gradients.weight.any()
        assert attnmask.segment_ids_to_mask(np.zeros((rows, 0), np.int32)).shape == (rows, 1, 0, 0)
    assert attnmask.MaskInfo.dynamic_init(inputs_embeds=x).attention_mask.shape == (2**40, 1, 0, 0)
    query, key = np.zeros((2, 2**40, 0, 4), F32), np.zeros((2, 7, 2, 4), F32)
    assert not attnmask.flash_attention_vjp(query, key, key)[1](query).key.any()


def test_empty_rows_take_no_time():
    run_apart(many_empty_rows)


def interrupted_calls() -> None:
    """Results of gigabytes, and many parts, in pieces: Ctrl-C is heard in between."""
    many = huge("f4", 2**23, 1, 1, 1), huge("f4", 2**23, 1, 1)
    wide = huge("f4", 2**15, 2**15)
    for call in (
        lambda: attnmask.mask_to_segment_ids(np.zeros((2**15, 0, 2**15), np.int8)),
        lambda: attnmask.attention_mask_to_padding_segment_ids(np.zeros((0, 2**30), np.int8)),
        lambda: attnmask.attention_mask_to_padding_segment_ids(huge("?", 2**15, 6, 2**15)),
        lambda: attnmask.merge_attention_states(*many),
        lambda: attnmask.short_convolution_vjp(np.zeros((1, 0, 2**15), F32), wide)[1](
            np.zeros((1, 0, 2**15), F32)
        ),
    ):
        assert_heard(call)


@pytest.mark.skipif(SANITIZED, reason="a sanitizer has its own memory and time")
def test_long_calls_hear_signals():
    run_apart(interrupted_calls)


LONG_AMONG_MANY = """
import attnmask, numpy as np
from numpy.lib.stride_tricks import as_strided

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmPeak"))

count, keys = 20_000, 2**23
tokens = as_strided(np.ones(1, np.float16), (1, 2 * count + keys, 1, 1), (0,) * 4)
starts = np.arange(count + 2)
ends = np.append(2 * starts[:-1], 2 * count + keys)
before = peak()
out = attnmask.flash_attention(tokens[:, : count + 1], tokens, tokens, cum_seqlens_q=starts, cum_seqlens_k=ends)
print((out == 1).all(), (peak() - before) >> 20)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or SANITIZED, reason="asks Linux for the memory of a plain process"
)
def test_a_long_sequence_among_many():
    """Its keys are split, and only this sequence needs accumulators of splits."""
    result = python(LONG_AMONG_MANY)
    assert result.stdout.split() == ["True", "0"], result.stderr  # GB


def test_many_short_segments():
    """The search for the keys of one segment must not visit all segments."""
    ids = np.repeat(np.arange(20_000, dtype=np.int32), 5)[None]
    x = huge("f2", 1, ids.size, 1, 1, value=1)
    assert (attnmask.flash_attention(x, x, x, q_segment_ids=ids, kv_segment_ids=ids) == 1).all()


def test_the_largest_pairs():
    most = np.array([0, 2**63 - 1], np.uint64)
    np.testing.assert_array_equal(attnmask.pairs_to_cu_seqlens(most), most)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_long_rows_of_integers_are_narrowed_in_pieces(threads, set_threads):
    """Numbers are right in every piece, and the error names the first one that does not fit."""
    set_threads(threads)
    wide = np.arange(200_000, dtype=np.int64).reshape(2, 100_000)
    for layout in (
        wide,
        np.asfortranarray(wide),
        wide[:, ::-1],
        wide.astype(np.int32),
        wide.astype(np.int32)[:, ::2],
    ):
        np.testing.assert_array_equal(MaskInfo.from_segments(layout).q_segment_ids, layout)
    wide[0, 70_000] = wide[0, 90_000] = wide[1, 5] = -(2**40)
    with pytest.raises(
        ValueError, match=r"q_segment_ids must fit int32, got -1099511627776 at index \(0, 70000\)"
    ):
        MaskInfo.from_segments(wide)


# What calls with hostile arguments have found (tests/fuzz)


@pytest.mark.parametrize("copy", [np.array, np.asfortranarray])
def test_tiles_that_were_copied_are_restored(copy):
    """As JAX does with the leaves of a tree."""
    for info in (
        MaskInfo.from_blocks(np.eye(3, dtype=bool)[None, None], 4),
        MaskInfo.from_blocks(np.zeros((1, 1, 0, 0), bool), 1),
        MaskInfo.from_function(lambda b, h, q, k: (q + k) % 3, 100, 130, 2),
    ):
        leaves, aux = info.tree_flatten()
        copied = tuple(None if leaf is None else copy(leaf) for leaf in leaves)
        assert MaskInfo.tree_unflatten(aux, copied) == info


def test_a_largest_distance_beyond_all_numbers():
    table = np.arange(16.0).reshape(8, 2)
    far, low = attnmask.t5_relative_bias(table, 5, 7, max_distance=10**400)
    expected, expected_low = attnmask.t5_relative_bias(table, 5, 7, max_distance=2**59)
    np.testing.assert_array_equal(far, expected)
    assert low == expected_low


def test_labels_of_no_heads():
    info = MaskInfo(np.ones((1, 1, 6, 6), bool)).replace(
        q_segment_ids=np.zeros((1, 6), int), kv_segment_ids=np.zeros((1, 0, 6), int)
    )
    assert info.labels(0, 0) is None
    assert info._repr_html_().startswith("<svg ")


def test_the_mode_of_a_subclass():
    assert OperationRegistry.create("flash").get_mode(np.zeros((2, 1, 3, 4)).view(Subclass)) == "decode"
