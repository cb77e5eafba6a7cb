"""Masks by functions and by blocks, prefixes, windows by head, and slices."""

import pickle
import signal
import time
import tracemalloc

import numpy as np
import pytest
from environment import SANITIZED
from hypothesis import given
from hypothesis import strategies as st
from mask_programs import programs
from random_masks import every_mask

import attnmask
from attnmask import MaskInfo

pytestmark = pytest.mark.filterwarnings("ignore:packed sequences:attnmask.AttnmaskWarning")

IDS = np.array([[0, 0, 0, 1, 1, 1, 1, -1, -1], [2, 2, 0, 0, 0, 0, 2, 2, -1]])
SEGMENTS = MaskInfo.from_segments(IDS)
DENSE = np.random.default_rng(0).random((2, 3, 9, 9)) < 0.5


KINDS = {  # results of every shape: the mask, and what the function says
    "everything": (MaskInfo.full(9, batch=2), lambda b, h, q, k: True),
    "nothing": (~MaskInfo.full(9, batch=2), lambda b, h, q, k: np.int8(0)),
    "of keys": (MaskInfo.full(9).apply_kv_lengths([4]), lambda b, h, q, k: k < 4),
    "of tokens": (MaskInfo.from_cu_seqlens([0, 4, 4, 9], packed=True), lambda b, h, q, k: (q < 4) == (k < 4)),
    "of rows": (MaskInfo.causal(9, offset=[0, 2], batch=2), lambda b, h, q, k: k <= q + np.array([0, 2])[b]),
    "of heads": (
        MaskInfo.full(9).apply_sliding_window((np.array([2, 0, 9]), 1)),
        lambda b, h, q, k: (k >= q - np.array([2, 0, 9])[h]) & (k <= q + 1),
    ),
    "of all": (MaskInfo.from_attention_mask(DENSE), lambda b, h, q, k: DENSE[b, h, q, k]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_results_of_every_shape(kind):
    mask, f = KINDS[kind]
    made = MaskInfo.from_function(f, 9, 9, batch=mask.batch_size, heads=mask.heads)
    assert made == mask
    assert (made.shape, made.heads) == (mask.shape, mask.heads)
    assert made.density() == mask.density()
    np.testing.assert_array_equal(made.grid(0, 0, 2, 4), mask.grid(0, 0, 2, 4))
    again = pickle.loads(pickle.dumps(made))
    assert again == made
    assert (again.shape, again.heads) == (made.shape, made.heads)


@given(program=programs(), slab=st.sampled_from([1, 2**12, 2**18]))
def test_a_function_of_any_mask(program, slab):
    """The same pairs, in however many parts the function is asked."""
    info, pairs, words = program
    batch, heads, queries, keys = pairs.shape
    if heads == 0:
        return
    asked = np.zeros(pairs.shape, int)

    def f(b, h, q, k):
        asked[b, h, q, k] += 1
        return pairs.live[b, h, q, k]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attnmask._masks.sources, "_SLAB", slab)
        made = MaskInfo.from_function(f, queries, keys, batch, heads)
    assert (asked == 1).all()
    if batch:
        assert made == info, words
        assert made.heads == (heads if pairs.live.size else 1), "nothing is asked of no pairs"


def test_what_all_rows_or_heads_share_is_kept_once():
    def f(b, h, q, k):
        return (k <= q) & (b >= 0 if q.min() >= 64 else True)  # rows show up in the second part only

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attnmask._masks.sources, "_SLAB", 1)
        mask = MaskInfo.from_function(f, 130, 70, batch=3, heads=5)
    assert (mask.shape, mask.heads) == ((3, 130, 70), 1)
    np.testing.assert_array_equal(
        mask.attention_mask, np.broadcast_to(np.tri(130, 70, dtype=bool), (3, 1, 130, 70))
    )
    assert MaskInfo.from_function(lambda b, h, q, k: k <= q, 130, 70, 3, 5) == mask
    assert "2 patterns" in repr(mask), "two tiles along the diagonal"


@pytest.mark.skipif(SANITIZED, reason="says nothing under a sanitizer")
def test_a_long_function_needs_little_time_and_memory():
    document = np.repeat(np.arange(64), 512)
    tokens = len(document)
    tracemalloc.start()
    mask = MaskInfo.from_function(lambda b, h, q, k: document[q] == document[k], tokens, tokens)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40e6
    assert mask == MaskInfo.from_segments(document[None])

    def seconds():
        begin = time.perf_counter()
        MaskInfo.from_function(lambda b, h, q, k: document[q] == document[k], tokens, tokens)
        return time.perf_counter() - begin

    assert min(seconds() for _ in range(3)) < 3


def test_a_slow_function_is_interrupted():
    def f(b, h, q, k):
        time.sleep(0.01)
        return q == k

    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    begin = time.perf_counter()
    try:
        with pytest.raises(KeyboardInterrupt):
            MaskInfo.from_function(f, 2**16, 2**16)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert time.perf_counter() - begin < (10 if SANITIZED else 2)


def raises(b, h, q, k):
    raise LookupError("not today")


def writes(b, h, q, k):
    q += 1
    return q == k


def unlocks(b, h, q, k):
    k.setflags(write=True)
    return q == k


class Refuses:
    def __call__(self, b, h, q, k):
        raise ZeroDivisionError("by what")


BAD_FUNCTIONS = {
    "none": (None, TypeError, "f must be a function of b, h, q and k, got None"),
    "raises": (raises, LookupError, "not today"),
    "writes": (writes, ValueError, "read-only"),
    "unlocks": (unlocks, ValueError, "WRITEABLE"),
    "floats": (lambda b, h, q, k: (q == k) * 1.0, TypeError, "must be bools or integers, got float64 array"),
    "nothing": (lambda b, h, q, k: None, TypeError, "must be bools or integers, got None"),
    "text": (lambda b, h, q, k: "yes", TypeError, "must be bools or integers, got 'yes'"),
    "a row short": (lambda b, h, q, k: (q == k)[:, :, 1:], ValueError,
        r"the result of f must broadcast to shape \(2, 3, 5, 7\), got bool array of shape \(1, 1, 4, 7\)"),
    "an axis too many": (lambda b, h, q, k: (q == k)[None], ValueError, "must broadcast to shape"),
    "too few arguments": (lambda q, k: q == k, TypeError, "takes 2 positional arguments"),
    "an error that is not made of a text": (lambda b, h, q, k: b"\xff".decode(), RuntimeError,
        "<lambda> failed: 'utf-8' codec can't decode byte"),
    "an object": (Refuses(), ZeroDivisionError, "Refuses failed: by what"),
}  # fmt: skip


@pytest.mark.parametrize(("f", "error", "words"), BAD_FUNCTIONS.values(), ids=BAD_FUNCTIONS)
def test_bad_functions(f, error, words):
    with pytest.raises(error, match=words):
        MaskInfo.from_function(f, 5, 7, batch=2, heads=3)


def test_an_error_names_the_function_and_keeps_its_own():
    with pytest.raises(
        LookupError, match=r"raises failed: not today; f\(b, h, q, k\) gets index arrays"
    ) as raised:
        MaskInfo.from_function(raises, 5, 7)
    assert type(raised.value.__cause__) is LookupError
    assert raised.value.__cause__.args == ("not today",)


# Blocks


def test_blocks_that_are_cut():
    blocks = np.array([[[[1, 0, 2], [0, 0.5, 0]]]])
    whole = MaskInfo.from_blocks(blocks, (3, 2))
    assert whole.shape == (1, 6, 6)
    for queries, keys in ((4, 5), (6, 6), (4, 6)):
        cut = MaskInfo.from_blocks(blocks, (3, 2), queries, keys)
        assert cut == whole[:, :, :queries, :keys]
        np.testing.assert_array_equal(cut.grid(0, 0, 3, 2) > 0, blocks[0, 0] > 0)
    blocks[:] = 0  # it is copied
    assert whole.density() == 0.5
    assert MaskInfo.from_blocks(np.zeros((2, 3, 0, 4)), 64).shape == (2, 0, 256)
    huge = MaskInfo.from_blocks(np.ones((1, 1, 2, 2)), 2**40)
    assert huge[..., 2**40 - 5 : 2**40 + 5, -3:].attention_mask.all()


# Windows by head


@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_parts_of_windows_by_head(mode):
    """As wide as the widest of them; what the others do not reach is dead."""
    row = MaskInfo.from_segments(np.zeros((2, 9), int))
    sizes = np.array([3, 0, 2])
    more = {"mode": mode, "index": [4, 8]}
    by_head = row.apply_sliding_window((sizes, 1), **more)
    widest = row.apply_sliding_window((3, 1), **more)
    assert (by_head.shape, by_head.heads) == (widest.shape, 3)
    assert by_head[:, 0, ...] == widest
    assert by_head[:, 1, ...].attention_mask.sum() < widest.attention_mask.sum()
    far = row.apply_sliding_window(np.array([2**62, 1]))
    assert far[:, 0, ...] == row


# Diagonals within segments

Q_STARTS, K_STARTS = [0, 2, 2, 5, 75], [0, 3, 4, 8, 98]  # of packed sequences, one of them without queries


def packed_mask():
    return MaskInfo.from_cu_seqlens(Q_STARTS, cu_seqlens_kv=K_STARTS, packed=True)


def packed_arrays():
    rng = np.random.default_rng(0)
    return (
        rng.standard_normal((1, starts[-1], heads, 16), np.float32)
        for starts, heads in ((Q_STARTS, 4), (K_STARTS, 2), (K_STARTS, 2))
    )


@pytest.mark.parametrize("offset", [0, "bottom-right", 3])
@pytest.mark.parametrize("window", [None, (20, 0), (5, 3)])
def test_packed_sequences_have_their_own_diagonals(isa, offset, window):
    """The bits are those of cum_seqlens_q and cum_seqlens_k, forward and backward."""
    mask = packed_mask()
    causal = window is None
    if causal:
        mask = mask.apply_causal(offset, within_segments=True)
    else:
        mask = mask.apply_sliding_window(window, offset=offset, within_segments=True)
    limits = {"causal": causal, "sliding_window": window, "causal_offset": offset}
    starts = {"cum_seqlens_q": Q_STARTS, "cum_seqlens_k": K_STARTS}
    arrays, results = tuple(packed_arrays()), []
    for more in ({"attention_mask": mask}, limits | starts):
        (out, lse), vjp = attnmask.flash_attention_vjp(*arrays, return_lse=True, **more)
        grads = vjp(np.ones_like(out), np.where(np.isfinite(lse), 1, 0).astype(lse.dtype))
        results.append((out, lse, grads.query, grads.key, grads.value))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_same_tokens_have_the_same_diagonal():
    """Whether it counts within segments, then, makes no difference; nor is there an array for it."""
    for mask in (SEGMENTS, MaskInfo.from_segments(IDS, IDS.copy()), MaskInfo.from_segments(IDS[:, None])):
        for offset in (0, "bottom-right", [1, -1]):
            within = mask.apply_causal(offset, within_segments=True)
            assert within == mask.apply_causal(offset)
            assert "within" not in repr(within)
            assert mask.apply_sliding_window(
                2, offset=offset, within_segments=True
            ) == mask.apply_sliding_window(2, offset=offset)


@pytest.mark.parametrize("apply", ["apply_causal", "apply_sliding_window", "apply_chunked"])
def test_no_segments_to_count_in(apply):
    mask = ~SEGMENTS
    arguments = () if apply == "apply_causal" else (3,)
    with pytest.raises(ValueError, match="within_segments must be False for a mask without segment ids"):
        getattr(mask, apply)(*arguments, within_segments=True)
    getattr(mask, apply)(*arguments)


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("offset", [5, -5, 64, -64, 2**59, -(2**59), [7, -7], [2**59, -(2**59)]])
@pytest.mark.parametrize("size", [1, 8, 70, 2**58, 2**59 + 1, 2**70])
def test_the_chunk_of_a_query_moves_with_its_diagonal(size, offset, within):
    """Slices, which move both sides on, leave it where it is."""
    ids = np.zeros((2, 130), int)
    mask = MaskInfo.from_segments(ids, ids.copy()).apply_chunked(size, offset, within)
    k, q = np.arange(130, dtype=object), np.arange(130, dtype=object)[:, None]
    q = q + np.array(offset, object).reshape(-1, 1, 1)
    pairs = np.broadcast_to((q // size == k // size) & (k <= q), (2, 130, 130)).astype(bool)
    np.testing.assert_array_equal(mask.attention_mask[:, 0], pairs)
    part = mask[..., 9:80, 3:77]
    np.testing.assert_array_equal(part.attention_mask[:, 0], pairs[:, 9:80, 3:77])
    for one in (mask, part):
        children, about = one.tree_flatten()
        assert MaskInfo.tree_unflatten(about, children) == one
    q_ids, kv_ids = mask.q_segment_ids[:, :, None], mask.kv_segment_ids[:, None]
    same = np.broadcast_to(q // size == k // size, (2, 130, 130))
    np.testing.assert_array_equal((q_ids == kv_ids) & (q_ids >= 0), same)
    np.testing.assert_array_equal(kv_ids, np.broadcast_to(k // size + 1, (2, 1, 130)))


# Slices


def test_slices_are_those_of_arrays():
    mask = MaskInfo.from_attention_mask(DENSE).apply_causal([1, -1])
    pairs = mask.attention_mask
    for index in (
        ...,
        (0, ...),
        (-1, ...),
        (np.int64(1), ...),
        (..., 3),
        (1, ..., 2, slice(3, None)),
        (slice(None), 1, ...),
        (slice(5, 2), slice(-2, 99), slice(-3, -1), slice(-99, 4)),
        (slice(0, 1), 2, 8, -9),
        (slice(None, None, 1), ...),
        (slice(0, 1), 2, ..., 8, -9),
    ):
        kept = tuple(  # an integer keeps its axis
            slice(i, i + 1 or None) if isinstance(i, (int, np.integer)) else i
            for i in (index if isinstance(index, tuple) else (index,))
        )
        expected = pairs[kept]
        assert np.array_equal(mask[index].attention_mask, expected), index
    assert mask[...] is mask[:, ...] is mask[:, :, :, :] is mask
    assert mask[..., :9] is mask


def test_a_slice_keeps_numbers_and_shared_heads():
    assert MaskInfo.from_segments(IDS)[:, 7, ...].heads == 1
    floats = MaskInfo(np.arange(12.0).reshape(1, 3, 4))
    assert floats[:, :, 1:, 1:3].attention_mask.tolist() == [[[[5, 6], [9, 10]]]]


@given(program=programs(), data=st.data())
def test_a_slice_of_a_slice(program, data):
    info, _, words = program
    bound = st.integers(0, 9)
    parts = [[slice(*sorted(data.draw(st.tuples(bound, bound)))) for _ in range(4)] for _ in range(2)]
    both = tuple(slice(a.start + b.start, min(a.stop, a.start + b.stop)) for a, b in zip(*parts, strict=True))
    assert info[tuple(parts[0])][tuple(parts[1])] == info[both], words


def test_a_slice_of_no_heads():
    info = MaskInfo.from_segments(np.zeros((2, 3, 4), int)).apply_causal()[:, 3:, ...]
    assert info.attention_mask.shape == (2, 0, 4, 4)
    assert info.q_segment_ids.shape == (2, 0, 4)
    assert info.q_lens.tolist() == [0, 0]
    assert info.density() == 0.0
    for other in (
        info.apply_prefix(1),
        info.apply_sliding_window(1),
        info.apply_causal("bottom-right", within_segments=True),
        info.apply_chunked(2, 1, within_segments=True),
        MaskInfo.from_attention_mask(np.ones((2, 2, 4, 4), bool))[:, 0:0, ...].apply_prefix(1),
    ):
        assert (other.shape, other.heads, other.density()) == ((2, 4, 4), 0, 0)
    query = np.ones((2, 4, 0, 8), np.float32)
    assert attnmask.flash_attention(query, query, query, attention_mask=info).shape == query.shape


# What becomes of them


@pytest.mark.parametrize(("queries", "keys"), [(1, 70), (150, 150), (70, 200)])
@pytest.mark.parametrize("kind", every_mask(1, 1))
def test_attention_skips_and_sees_what_it_should(isa, kind, queries, keys):
    """The bits, forward and backward, of the same mask as an array."""
    rng = np.random.default_rng(1)
    query, key, value = (
        rng.standard_normal((2, tokens, heads, 16), np.float32)
        for tokens, heads in ((queries, 4), (keys, 2), (keys, 2))
    )
    mask = every_mask(queries, keys)[kind]
    results = []
    for given_mask in (mask, mask.attention_mask):
        (out, lse), vjp = attnmask.flash_attention_vjp(query, key, value, given_mask, return_lse=True)
        grads = vjp(np.ones_like(out), np.ones_like(lse))
        results.append([out, lse, grads.query, grads.key, grads.value])
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)
    out, lse = attnmask.flash_attention(query, key, value, mask, return_lse=True)
    dead = ~mask.attention_mask.any(-1)
    assert np.array_equal(np.isneginf(lse), np.broadcast_to(dead, lse.shape))


# Bad input


def of_function(**more):
    return MaskInfo.from_function(lambda b, h, q, k: q >= 0, **{"q_len": 5, "kv_len": 7} | more)


def of_blocks(**more):
    return MaskInfo.from_blocks(**{"blocks": np.ones((1, 1, 2, 3)), "block_size": 4} | more)


def window(sizes):
    return MaskInfo.from_attention_mask(DENSE).apply_sliding_window(sizes)


QUERY = np.zeros((1, 4, 2, 8), np.float32)
BAD = [
    (ValueError, "batch must be at least 0, got -1", lambda: of_function(batch=-1)),
    (ValueError, "heads must be at least 1, got 0", lambda: of_function(heads=0)),
    (MemoryError, "q_len and kv_len", lambda: of_function(q_len=2**40, kv_len=2**40)),
    (MemoryError, "q_len and kv_len", lambda: of_function(q_len=2**70)),
    (ValueError, r"blocks must be \[B, H, Q blocks, K blocks\]", lambda: of_blocks(blocks=np.ones((2, 2)))),
    (ValueError, "pass it as `bias`", lambda: of_blocks(blocks=[[[[-1.0]]]])),
    (ValueError, "q_len must be from 5 to 8, which 2 blocks of 4 cover, got 9", lambda: of_blocks(q_len=9)),
    (ValueError, "kv_len must be from 9 to 12, which 3 blocks of 4 cover, got 8", lambda: of_blocks(kv_len=8)),
    (ValueError, r"q_len must be at most 2\*\*56", lambda: of_blocks(block_size=2**60)),
    (ValueError, "lengths must be at least 0, got -1", lambda: SEGMENTS.apply_prefix(-1)),
    (ValueError, "lengths must be at least 0, got -2 at index 1", lambda: SEGMENTS.apply_prefix([1, -2])),
    (ValueError, r"lengths must be an integer or of shape \(2,\)", lambda: SEGMENTS.apply_prefix([1, 2, 3])),
    (ValueError, r"sliding_window\[1\] must be an integer", lambda: window((None, [1, 2]))),
    (ValueError, "sliding_window must be an integer or", lambda: window(np.ones((1, 3), int))),
    (TypeError, r"sliding_window\[0\] must be integers, got float64", lambda: window((np.array([1.0, 2, 3]), 0))),
    (TypeError, r"MaskInfo\.apply_sliding_window takes a window per head",
     lambda: attnmask.flash_attention(QUERY, QUERY, QUERY, sliding_window=np.array([1, 2]))),
    *(
        (ValueError, f"offset must be an integer or 'bottom-right', got '{offset}'; {hint}",
         lambda apply=apply, offset=offset: apply(offset))
        for apply in (SEGMENTS.apply_causal, lambda offset: SEGMENTS.apply_sliding_window(1, offset=offset))
        for offset, hint in (("top-left", "write 0 for top-left"), ("bottom_right", r"did you mean 'bottom-right'\?"))
    ),
    (ValueError, "cannot slice it", lambda: MaskInfo()[0, ...]),
    *((error, words, lambda index=index: MaskInfo.from_attention_mask(DENSE)[index]) for index, error, words in [
        ((2, ...), IndexError, "the index of rows must be from -2 to 1, got 2"),
        ((0, -4, ...), IndexError, "the index of heads must be from -3 to 2, got -4"),
        ((..., -10), IndexError, "the index of keys must be from -9 to 8, got -10"),
        ((slice(None, None, 2), ...), ValueError, "the step of rows must be 1, got 2"),
        ((..., slice(None, None, -1)), ValueError, "the step of keys must be 1, got -1"),
        ((0, 0, 0, 0, 0), IndexError, r"must be mask\[rows, heads, queries, keys\], got 5 entries"),
        ((0, 0, 0, ..., 0, 0), IndexError, r"must be mask\[rows, heads, queries, keys\], got 6 entries"),
        *(
            (index, ValueError, r"must be mask\[rows, heads, queries, keys\], got \d entries; write \.\.\.")
            for index in (0, slice(None), (), (slice(2, None), slice(2, None)), (0, 0, 0), None, [0, 1], "a")
        ),
        ((..., 0, ...), IndexError, "one ellipsis"),
        ((None, ...), TypeError, "the index of rows must be an integer or a slice, got None"),
        ((0, True, ...), TypeError, "the index of heads must be an integer or a slice, got True"),
        (([0, 1], ...), TypeError, "the index of rows must be an integer or a slice"),
        ((np.array([0, 1]), ...), TypeError, "the index of rows must be an integer or a slice"),
        (("a", ...), TypeError, "the index of rows must be an integer or a slice, got 'a'"),
        ((slice(0.5, None), ...), TypeError, "the start of rows must be an integer, got 0.5"),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("error", "words", "call"), BAD, ids=range(len(BAD)))
def test_bad_input(error, words, call):
    with pytest.raises(error, match=words):
        call()
