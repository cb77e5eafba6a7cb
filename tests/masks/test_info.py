"""Compares all results of `MaskInfo` with arrays of all pairs."""

import copy
import pickle
import pydoc
import sys
import threading
import time
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import reference_mask_info as ref
from environment import SANITIZED
from hostile import ByDlpack
from hypothesis import given
from hypothesis import strategies as st
from layouts import LAYOUTS, arrange
from mask_programs import bases, programs

from attnmask._masks import program as mask_program
from attnmask._masks import state as mask_state
from attnmask._masks import terms as mask_terms
from attnmask._masks.info import MaskInfo
from attnmask._masks.sharding import MaskSharding

# Of the masks that are drawn, some are packed with sides that differ, or padded as a triangle is.
pytestmark = [
    pytest.mark.filterwarnings("ignore:packed sequences:attnmask.AttnmaskWarning"),
    pytest.mark.filterwarnings("ignore:attention_mask has two axes:attnmask.AttnmaskWarning"),
]

FLOATS = ("float16", "float32", "float64", ml_dtypes.bfloat16)
DTYPES = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", *FLOATS)
FAR = (2**46, 2**61, 2**62, 2**63, 2**70)
NAMES = ("causal", "sliding_window", "chunked", "token_type_ids")
ARRAYS = (
    "attention_mask", "q_segment_ids", "kv_segment_ids", "cu_seqlens_q", "cu_seqlens_kv", "q_lens", "kv_lens",
    "q_attention_mask", "q_position_ids", "bias",
)  # fmt: skip
ANSWERS = (*ARRAYS, "is_multi_sequence", "shape", "batch_size", "q_len", "kv_len", "heads", "baked_in_masks")
METHODS = (
    "density", "is_self_attention", "get_or_compute_positions", "get_or_compute_qkv_cu_seqlens",
    "get_or_compute_segment_ids", "get_qkv_masks", "get_or_compute_attention_mask", "create_bias",
)  # fmt: skip


def answer(info: MaskInfo, name: str):
    value = getattr(info, name)
    return value() if name in METHODS else value


def arrays_of(value) -> list[np.ndarray]:
    """The arrays of a result."""
    if isinstance(value, tuple):
        return [array for part in value for array in arrays_of(part)]
    return [value] if isinstance(value, np.ndarray) else []


def assert_equal(got, expected, case) -> None:
    """Arrays must be equal in dtype, shape and values, and read-only; other results must be equal."""
    if isinstance(expected, tuple):
        assert isinstance(got, tuple), case
        for one, other in zip(got, expected, strict=True):
            assert_equal(one, other, case)
    elif isinstance(expected, np.ndarray):
        assert type(got) is np.ndarray, case
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape), case
        assert not got.flags.writeable, case
        np.testing.assert_array_equal(got, expected, err_msg=repr(case))
    else:
        assert got == expected, case


def expected_answers(pairs: ref.Pairs) -> dict[str, object]:
    batch, heads, queries, keys = pairs.shape
    q_ids, kv_ids = pairs.ids()
    q_lens, kv_lens = pairs.lens()
    cu_q, cu_kv = pairs.cu_seqlens()
    held = pairs.q_ids if pairs.q_ids is not None and pairs.held else np.zeros((1, 1), np.int32)
    first = held[:, 0] if held.ndim == 3 else held
    of_segments = ref.equal_ids(q_ids, kv_ids)
    return {
        "attention_mask": pairs.live,
        "get_or_compute_attention_mask": pairs.live,
        "q_segment_ids": q_ids,
        "kv_segment_ids": kv_ids,
        "get_or_compute_segment_ids": (q_ids, kv_ids),
        "q_lens": q_lens,
        "kv_lens": kv_lens,
        "cu_seqlens_q": cu_q,
        "cu_seqlens_kv": cu_kv,
        "get_or_compute_qkv_cu_seqlens": (cu_q, cu_kv),
        "q_attention_mask": (q_ids >= 0).astype(np.int32),
        "q_position_ids": ref.places(q_ids, -1),
        "get_or_compute_positions": tuple(pairs.positions()),
        "get_qkv_masks": (q_ids >= 0, kv_ids >= 0, of_segments),
        "bias": np.where(pairs.live, np.float32(0), np.finfo(np.float32).min),
        "create_bias": np.where(pairs.live, np.float32(0), np.finfo(np.float32).min),
        "density": pairs.live.mean() if pairs.live.size else 0.0,
        "is_self_attention": np.array_equal(pairs.q_ids, pairs.kv_ids)
        if pairs.q_ids is not None and pairs.held
        else queries == keys,
        "is_multi_sequence": first.max(initial=-1) > 0,
        "shape": (batch, queries, keys),
        "batch_size": batch,
        "heads": heads,
        "q_len": queries,
        "kv_len": keys,
        "baked_in_masks": {name: name in pairs.baked for name in NAMES},
    }


@given(
    program=programs(), order=st.permutations(ANSWERS + METHODS), cells=st.tuples(*[st.integers(1, 4)] * 2)
)
def test_every_answer(program, order, cells):
    """After any operations and in any order: a result must not depend on earlier ones."""
    info, pairs, words = program
    expected = expected_answers(pairs)
    assert repr(info).endswith("cached=[])"), words
    for name in order:
        assert_equal(answer(info, name), expected[name], (words, name, order))
    for positions, held in ((info.q_positions, pairs.q_positions), (info.kv_positions, pairs.kv_positions)):
        assert_equal(positions, held, words)
    for b, h in np.ndindex(pairs.shape[:2]):
        expected = ref.cells(pairs.live[b, h], *cells)
        np.testing.assert_array_equal(info.grid(b, h, *cells), expected, err_msg=repr(words))
        q_ids, kv_ids = info.labels(b, h)
        assert (q_ids.shape, kv_ids.shape) == ((pairs.shape[2],), (pairs.shape[3],)), words


@pytest.mark.parametrize("side", ["queries", "keys"])
def test_what_is_cut_is_not_taken_for_what_lay_there_before(side):
    take = getattr(mask_terms.Crop(1, 20, 22, 3), side)
    # Each array is freed before the next one is made, which then gets its address.
    assert [take(np.full((2, 64), value, np.int32)).max() for value in range(9)] == list(range(9))


@given(program=programs(), other=bases())
def test_equality_and_copies(program, other):
    info, pairs, words = program
    dense = MaskInfo.from_attention_mask(pairs.live)
    assert info == dense, words
    assert (info != dense) is False, words
    spoilt = pairs.live.copy()
    if spoilt.size:
        spoilt[(-1,) * 4] ^= True
        assert info != MaskInfo.from_attention_mask(spoilt), words
    if pairs.shape[1] == 1:
        assert info == MaskInfo.from_attention_mask(np.repeat(pairs.live, 3, axis=1)), words
    other_info, other_pairs, _ = other
    broadcast = 1 in (pairs.shape[1], other_pairs.shape[1]) or pairs.shape[1] == other_pairs.shape[1]
    same_tokens = pairs.shape[:1] + pairs.shape[2:] == other_pairs.shape[:1] + other_pairs.shape[2:]
    alike = same_tokens and broadcast and bool((pairs.live == other_pairs.live).all())
    assert (info == other_info) is alike, words
    expected = expected_answers(pairs)
    children, aux = info.tree_flatten()
    hash(aux)
    # Copies are read-only from the beginning, whatever their arrays were.
    writeable = [child if child is None else child.copy() for child in children]
    tree = MaskInfo.tree_unflatten(aux, writeable)
    assert tree.tree_flatten()[1] == aux
    names = "attention_mask", "q_segment_ids", "kv_segment_ids", "get_or_compute_positions", "baked_in_masks"
    for twin in (*copies_of(info), tree, info.replace()):
        assert twin == info, words
        for name in names:
            assert_equal(answer(twin, name), expected[name], (words, name))
        assert repr(twin.tree_flatten()[1]) == repr(aux), words
    for child in [child for twin in (*copies_of(info), tree) for child in twin.tree_flatten()[0]]:
        assert child is None or not child.flags.writeable, words
    for child in writeable:
        if child is not None and child.ndim < 4:
            child[...] = 1
    assert tree == info, words


def copies_of(info: MaskInfo) -> list[MaskInfo]:
    return [pickle.loads(pickle.dumps(info)), copy.deepcopy(info), copy.copy(info)]


@pytest.mark.parametrize("info", [
    MaskInfo(),
    MaskInfo(cu_seqlens_q=[0, 2, 5]),
    MaskInfo(q_segment_ids=[[0, 1]] * 3),
    MaskInfo(kv_positions=[[0, 1]] * 2),
    MaskInfo.from_segments([[0, 1]] * 3),
    ~MaskInfo.from_function(lambda b, h, q, k: q >= k, 4, 5, batch=2),
    ~MaskInfo.from_function(lambda b, h, q, k: q >= k, 4, 5, batch=0),
    ~MaskInfo.from_segments(np.zeros((3, 4), int))[:1, ...],
], ids=repr)  # fmt: skip
def test_copies_have_the_same_shape(info):
    """Also where no array has its batch."""
    tree = MaskInfo.tree_unflatten(*info.tree_flatten()[::-1])
    for made in (*copies_of(info), tree):
        assert made == info
        assert (made.shape, made.batch_size) == (info.shape, info.batch_size)
        assert repr(made) == repr(info)


def test_a_tree_on_one_of_several_devices():
    children, aux = MaskInfo.from_segments(np.zeros((3, 4), int)).apply_causal().tree_flatten()
    half = [leaf if leaf is None else leaf[:1] for leaf in children]
    assert MaskInfo.tree_unflatten(aux, half).shape == (1, 4, 4)


@given(program=programs(), dtype=st.sampled_from(DTYPES))
def test_dtypes(program, dtype):
    info, pairs, words = program
    dtype = np.dtype(dtype)
    expected = pairs.live.astype(dtype)
    out = np.empty(expected.shape, dtype)
    for converted in (info.to_dtype(dtype), info.materialize_attention_mask(dtype)):
        assert_equal(converted.attention_mask, expected, words)
        assert_equal(converted.q_segment_ids, pairs.ids()[0], words)
        assert converted == info
        assert_equal(converted.apply_causal(999).attention_mask, pairs.live, words)
        assert converted.to_dtype(dtype) is converted
    assert_equal(info.get_or_compute_attention_mask(dtype), expected, words)
    assert info.get_or_compute_attention_mask(dtype, out=out) is out
    np.testing.assert_array_equal(out, expected)
    assert [mask.dtype for mask in info.get_qkv_masks(dtype)] == [dtype] * 3
    if dtype.kind not in "biu":
        lowest = ml_dtypes.finfo(dtype).min
        bias = np.where(pairs.live, dtype.type(0), lowest).astype(dtype)
        assert_equal(info.create_bias(dtype), bias, words)
        assert info.create_bias(dtype, out=out) is out
        np.testing.assert_array_equal(out, bias)


@given(program=programs(), dtype=st.sampled_from([None, "bool", "float32", "complex64", "int16", object]))
def test_as_an_array_of_numpy(program, dtype):
    info, pairs, words = program
    array = np.asarray(info, dtype)
    assert_array = np.testing.assert_array_equal
    assert_array(array, pairs.live.astype(dtype or bool), err_msg=repr(words))
    assert array.dtype == np.dtype(dtype or bool)
    assert_array(np.where(info, 1, 0), np.where(pairs.live, 1, 0))
    assert_array(np.logical_not(np.asarray(info)), ~pairs.live)


def test_copies_of_the_array():
    info = MaskInfo.from_segments([[0, 1, 1]])
    assert np.shares_memory(np.asarray(info), info.attention_mask)
    assert not np.asarray(info).flags.writeable
    copied = np.array(info)
    copied[...] = False  # a copy is the caller's
    assert info.attention_mask.any()
    assert not np.shares_memory(np.array(info, dtype=np.int8), info.attention_mask)
    if np.lib.NumpyVersion(np.__version__) >= "2.0.0":
        assert np.shares_memory(np.asarray(info, copy=False), info.attention_mask)
        with pytest.raises(ValueError, match="copy must be True or None for a mask of bool as int8"):
            np.asarray(info, dtype=np.int8, copy=False)
    numbers = np.array([[[0, 2.5], [1, 0]]])
    assert np.asarray(MaskInfo(numbers)).tolist() == [numbers.tolist()]
    assert np.shares_memory(MaskInfo(ByDlpack(numbers)).attention_mask, numbers)
    assert MaskInfo.from_attention_mask(info) == info
    with pytest.raises(ValueError, match="the MaskInfo must have an attention_mask"):
        np.asarray(MaskInfo())
    with pytest.raises(TypeError):
        np.asarray(info, dtype="text that is no type")


# Constructors


def test_from_segments():
    ids = np.array([[3, 3, 1, -1, -7]])
    info = MaskInfo.from_segments(ids, q_positions=[[4, 5, 6, 7, 8]], kv_positions=np.zeros((1, 5), np.uint8))
    ids[...] = 0  # arguments were copied
    assert_equal(info.q_segment_ids, np.array([[3, 3, 1, -1, -7]], np.int32), "ids")
    assert info.kv_segment_ids is info.q_segment_ids
    assert_equal(info.q_positions, np.array([[4, 5, 6, 7, 8]], np.int32), "positions")
    assert_equal(info.kv_positions, np.zeros((1, 5), np.int32), "positions")
    assert info.attention_mask[0, 0].sum() == 5
    assert info.attention_mask is info.attention_mask
    assert (info.batch_axis_name, info.qheads_axis_name) == (("dp", "fsdp"), "tp")
    assert (info.kvheads_axis_name, info.sequence_axis_name) == ("tp", "sp")
    info = MaskInfo.from_segments(
        ids, batch_axis_name=["a", "b"], qheads_axis_name=None, sequence_axis_name="s"
    )
    assert (info.batch_axis_name, info.qheads_axis_name, info.sequence_axis_name) == (("a", "b"), None, "s")


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_masks(dtype):
    """Every value other than zero is a token."""
    mask = np.array([[1, 3, 0], [1, 1, 1]]).astype(dtype)
    if mask.dtype.kind not in "biu":
        mask[0, 1] = ml_dtypes.finfo(dtype).smallest_subnormal
    expected = np.array([[0, 0, -1], [0, 0, 0]], np.int32)
    for info in (
        MaskInfo.from_segments(mask, is_attn_mask=True),
        MaskInfo.from_attention_mask(mask),
        MaskInfo.from_attention_mask(mask == 0, mask_is_valid=False),
        MaskInfo.dynamic_init(attention_mask=mask),
        MaskInfo.dynamic_init(attention_mask=mask, input_ids=np.zeros((9, 9))),
    ):
        assert_equal(info.q_segment_ids, expected, dtype)
        assert_equal(info.attention_mask, ref.equal_ids(expected, expected), dtype)
    info = MaskInfo.from_segments(mask, mask[:, :2], is_attn_mask=True)
    assert_equal(info.kv_segment_ids, expected[:, :2], dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_from_attention_mask(dtype, layout):
    live = np.random.default_rng(0).random((2, 3, 5, 4)) < 0.4
    mask = arrange((live * 3).astype(dtype), layout)
    info = MaskInfo.from_attention_mask(mask)
    assert_equal(info.attention_mask, mask.astype(mask.dtype.newbyteorder("=")), (dtype, layout))
    if layout not in ("misaligned", "swapped"):
        assert np.shares_memory(info.attention_mask, mask)  # not copied
    expected = ref.Pairs.of_mask(live)
    assert_equal(info.get_or_compute_segment_ids(), (expected.q_ids, expected.kv_ids), (dtype, layout))
    assert_equal(info.apply_causal(9).attention_mask, live, (dtype, layout))
    assert_equal(
        MaskInfo.from_attention_mask(mask, mask_is_valid=False).attention_mask, ~live, (dtype, layout)
    )
    assert_equal(
        MaskInfo.from_attention_mask(mask[:, 0]).apply_causal(9).attention_mask, live[:, :1], (dtype, layout)
    )


def test_masks_that_broadcast():
    keys = np.array([[[[1, 1, 0]]], [[[1, 0, 0]]]], bool)  # [B, 1, 1, K]
    ids = np.zeros((2, 4), np.int32)
    info = MaskInfo(keys, ids, np.zeros((2, 3), np.int32))
    assert info.shape == (2, 4, 3)
    assert_equal(info.attention_mask, np.repeat(keys, 4, axis=2), "keys")
    assert_equal(
        info.apply_causal().attention_mask, np.repeat(keys, 4, axis=2) & np.tri(4, 3, dtype=bool), "causal"
    )
    cut = info.apply_causal().apply_kv_lengths([2, 1], q_len=1, sliding_window=2)
    np.testing.assert_array_equal(cut.attention_mask[:, 0, 0], [[1, 1], [1, 0]])
    shared = MaskInfo(np.broadcast_to(np.tri(5, dtype=bool), (3, 2, 5, 5)))
    assert shared == MaskInfo.from_segments(np.zeros((3, 5), int)).apply_causal()
    many = MaskInfo.from_segments(np.zeros((4, 3), int)).apply_causal([0, 1, 2, 3])
    packed = MaskInfo.from_cu_seqlens([0, 2, 3], packed=True)
    for one_row in (MaskInfo.from_segments([[0, 0, 1]]), packed):
        for both in (one_row & many, many & one_row):
            assert both.shape == (4, 3, 3)
            np.testing.assert_array_equal(both.attention_mask, one_row.attention_mask & many.attention_mask)
            assert both.q_segment_ids.shape == (4, 3)
            decoded = both.apply_sliding_window((1, 0), mode="decode", index=[0, 1, 2, 2])
            assert decoded.q_segment_ids.shape == (4, 1)
            assert decoded.attention_mask[:, 0, 0].sum(axis=1).tolist() == [1, 2, 1, 1]
    assert packed.replace(q_segment_ids=[[0] * 3]) == MaskInfo.from_segments([[0] * 3], [[0, 0, 1]])


def test_from_cu_seqlens_of_rows():
    info = MaskInfo.from_cu_seqlens([0, 2, 1, 9, 3, 1], max_q_len=4)
    assert_equal(info.cu_seqlens_q, np.array([0, 2, 1, 9, 3, 1], np.int32), "as it came")
    expected = np.array([[0, 0, -1, -1], [-1, 0, 0, 0], [-1] * 4], np.int32)
    assert_equal(info.q_segment_ids, expected, "ids")
    assert_equal(info.attention_mask, ref.equal_ids(expected, expected), "mask")
    assert_equal(
        info.apply_causal().cu_seqlens_q[:3], np.array([0, 5, 5], np.int32), "of ids, the mask being another"
    )
    crossed = MaskInfo.from_cu_seqlens([0, 2], max_q_len=2, cu_seqlens_kv=[1, 3], max_kv_len=5)
    np.testing.assert_array_equal(crossed.attention_mask[0, 0], [[0, 1, 1, 0, 0]] * 2)
    assert MaskInfo.from_cu_seqlens([0, 2], max_q_len=2, cu_seqlens_kv=[1, 3]).shape == (1, 2, 2)
    assert MaskInfo.from_cu_seqlens([0, 2], max_q_len=2, max_kv_len=3).shape == (1, 2, 3)
    assert MaskInfo.from_cu_seqlens([], max_q_len=3).shape == (0, 3, 3)
    assert_equal(info.get_or_compute_qkv_cu_seqlens(out_dtype=np.int64)[0].dtype, np.dtype(np.int64), "dtype")
    with pytest.raises(OverflowError, match="int8"):
        MaskInfo.from_cu_seqlens([0, 200], max_q_len=4).get_or_compute_qkv_cu_seqlens(out_dtype=np.int8)


def test_from_packed_cu_seqlens():
    info = MaskInfo.from_cu_seqlens([0, 2, 2, 5], packed=True)
    ids = np.array([[0, 0, 2, 2, 2]], np.int32)
    assert_equal(info.q_segment_ids, ids, "ids")
    assert_equal(info.attention_mask, ref.equal_ids(ids, ids), "mask")
    assert_equal(info.cu_seqlens_kv, np.array([0, 2, 2, 5], np.int32), "as it came")
    assert_equal(info.q_lens, np.array([2, 0, 3], np.int32), "lens")
    assert info.is_multi_sequence
    padded = MaskInfo.from_cu_seqlens([0, 2, 5], packed=True, max_q_len=7)
    assert_equal(padded.q_segment_ids, np.array([[0, 0, 1, 1, 1, -1, -1]], np.int32), "padded")
    crossed = MaskInfo.from_cu_seqlens([0, 1, 2], cu_seqlens_kv=[0, 2, 5], packed=True)
    np.testing.assert_array_equal(crossed.attention_mask[0, 0], [[1, 1, 0, 0, 0], [0, 0, 1, 1, 1]])
    assert MaskInfo.from_cu_seqlens([0], packed=True).shape == (1, 0, 0)
    assert MaskInfo.from_cu_seqlens([0, 2], packed=True, max_q_len=2, max_kv_len=3).shape == (1, 2, 3)


@pytest.mark.parametrize("sparsity", [0, 0.25, 0.9, 1])
def test_from_random(sparsity):
    info = MaskInfo.from_random(3, 200, 700, sparsity, seed=5)
    assert info.attention_mask.shape == (3, 1, 200, 700)
    deviation = (sparsity * (1 - sparsity) / (3 * 200 * 700)) ** 0.5
    assert abs(info.density() - (1 - sparsity)) <= 5 * deviation
    assert info == MaskInfo.from_random(3, 200, 700, sparsity, seed=5)
    if 0 < sparsity < 1:
        assert info != MaskInfo.from_random(3, 200, 700, sparsity, seed=6)
    assert MaskInfo.from_random(2, 0).shape == (2, 0, 0)
    assert MaskInfo.from_random(1, 4, q_positions=[[0, 1, 2, 3]]).q_positions is not None


def test_from_random_of_many_pairs():
    """There are more pairs than are drawn at a time, and all parts are different."""
    mask = MaskInfo.from_random(1, 2048, 1024).attention_mask[0, 0]
    assert (mask[:1024] != mask[1024:]).mean() == pytest.approx(0.5, abs=0.01)


def test_dynamic_init():
    info = MaskInfo.from_segments([[0, 1]])
    assert MaskInfo.dynamic_init(mask_info=info, attention_mask=[[1]]) is info
    for made in (
        MaskInfo.dynamic_init(input_ids=np.ones((2, 3), int), inputs_embeds=np.ones((9, 9, 9))),
        MaskInfo.dynamic_init(inputs_embeds=np.ones((2, 3, 8), np.float32)),
        MaskInfo.dynamic_init(input_ids=[[5, 6, 7], [8, 9, 0]]),
    ):
        assert_equal(made.attention_mask, np.ones((2, 1, 3, 3), bool), "all")
    mask = np.array([[[[2, 0], [1, 1]]]])
    np.testing.assert_array_equal(
        MaskInfo.dynamic_init(attention_mask=mask).apply_causal(9).attention_mask, mask != 0
    )


# Without a mask


def test_nothing():
    info = MaskInfo()
    assert info.shape == (None, None, None)
    assert repr(info) == "MaskInfo(holds=[], cached=[])"
    assert (info.q_lens, info.kv_lens, info.q_positions) == (None, None, None)
    assert info.get_or_compute_positions() == (None, None)
    assert not info.is_multi_sequence
    assert not info.is_self_attention()
    assert info == MaskInfo()
    assert info == pickle.loads(pickle.dumps(info))
    assert info != MaskInfo.from_segments([[0]])
    assert info._repr_html_() is None
    for name in (*ARRAYS, "heads", *METHODS):
        if name not in ("q_lens", "kv_lens", "is_self_attention", "get_or_compute_positions"):
            with pytest.raises(ValueError, match=r"must have an attention_mask.*got MaskInfo\("):
                answer(info, name)
    other = MaskInfo.from_segments([[0]])
    for work in (
        lambda: info.apply_causal(),
        lambda: info.apply_sliding_window(3),
        lambda: info.apply_chunked(3),
        lambda: info.apply_token_type_ids([[0]], combine="replace"),
        lambda: info.apply_kv_lengths([3]),
        lambda: info.materialize_attention_mask(),
        lambda: info.materialize_segment_ids(),
        lambda: info.to_dtype(bool),
        lambda: info.visualize(),
        lambda: info.plot(),
        lambda: info.grid(0, 0, 1, 1),
        lambda: info & other,
        lambda: other | info,
        lambda: ~info,
    ):
        with pytest.raises(ValueError, match="must have an attention_mask"):
            work()


def test_half_of_a_mask():
    info = MaskInfo(q_segment_ids=[[0, 1, 1]])
    assert info.shape == (1, 3, None)
    assert_equal(info.q_segment_ids, np.array([[0, 1, 1]], np.int32), "ids")
    assert_equal(info.q_lens, np.array([1, 2], np.int32), "lens")
    assert_equal(info.q_position_ids, np.array([[0, 0, 1]], np.int32), "positions")
    assert_equal(info.q_attention_mask, np.ones((1, 3), np.int32), "tokens")
    assert info.is_multi_sequence
    assert info.kv_lens is None
    assert info == MaskInfo(q_segment_ids=[[0, 1, 1]])
    assert info != MaskInfo(q_segment_ids=[[0, 1, 2]])
    with pytest.raises(ValueError, match="must have an attention_mask"):
        info.kv_segment_ids  # noqa: B018
    whole = info.replace(kv_segment_ids=[[0, 1]])
    np.testing.assert_array_equal(whole.attention_mask[0, 0], [[1, 0], [0, 1], [0, 1]])
    keys = MaskInfo(kv_segment_ids=[[0, 3]])
    assert keys.is_multi_sequence
    assert keys.shape == (1, None, 2)
    lengths = MaskInfo(cu_seqlens_q=[0, 3, 5])
    assert lengths.batch_size == 2
    assert_equal(lengths.cu_seqlens_kv, np.array([0, 3, 5], np.int32), "of queries, for want of others")
    assert not lengths.is_self_attention()
    assert lengths.replace(cu_seqlens_kv=[0, 3, 5]).is_self_attention()
    assert MaskInfo(cu_seqlens_kv=[0, 3, 5]).batch_size == 2
    # If the labels of one side of an array are given, those of the other side are computed.
    half = MaskInfo(np.eye(3, dtype=bool)[None]).replace(q_segment_ids=[[5, 6, 7]])
    expected = np.array([[5, 6, 7]], np.int32), np.array([[0, 1, 2]], np.int32)
    assert_equal((half.q_segment_ids, half.kv_segment_ids), expected, "half")
    assert_equal(half.get_or_compute_segment_ids(), expected, "half")


# Replacing


def test_replace():
    ids = np.array([[0, 0, 1, 1]], np.int32)
    info = (
        MaskInfo.from_segments(ids, q_positions=[[0, 1, 2, 3]]).apply_causal().replace(cu_seqlens_q=[0, 2, 4])
    )
    assert_equal(info.cu_seqlens_kv, np.array([0, 2, 4], np.int32), "of queries, for want of others")
    # Ids replace the base of a mask of segments, and terms stay.
    other = info.replace(q_segment_ids=[[0, 0, 0, -1]])
    expected = ref.equal_ids(np.array([[0, 0, 0, -1]]), ids) & np.tri(4, dtype=bool)
    assert_equal(other.attention_mask, expected, "base")
    assert_equal(other.kv_segment_ids, ids, "the other side")
    assert len(other.cu_seqlens_q) == 129  # dropped
    assert_equal(
        info.replace(kv_segment_ids=ids, cu_seqlens_kv=[0, 4]).cu_seqlens_q, np.array([0, 4], np.int32), "cu"
    )
    longer = MaskInfo.from_segments(ids).apply_causal().replace(q_segment_ids=[[0] * 6])
    assert longer.shape == (1, 6, 4)
    assert longer.attention_mask.sum() == 1 + 2 * 5
    # An array is a new base without terms, and ids are labels.
    mask = np.array([[[0, 2, 0, 0]] * 4], np.float32)
    dense = info.replace(attention_mask=mask)
    assert_equal(dense.attention_mask, mask[:, None], "array")
    assert_equal(dense.q_segment_ids, ids, "labels")
    assert dense.baked_in_masks["causal"]
    relabelled = dense.apply_causal().replace(q_segment_ids=[[7, 7, 7, 7]])
    assert_equal(relabelled.attention_mask, (mask[:, None] != 0) & np.tri(4, dtype=bool), "array")
    assert_equal(relabelled.q_segment_ids, np.full((1, 4), 7, np.int32), "labels")
    # Ids are labels also if the mask was made from other masks, or from types.
    for made in (~info, info.apply_token_type_ids(ids, combine="replace")):
        again = made.replace(q_segment_ids=[[7, 7, 7, 7]], kv_segment_ids=ids)
        assert_equal(again.attention_mask, made.attention_mask, "made")
    # Other fields, where None is a value.
    bare = info.replace(q_positions=None, batch_axis_name=None)
    assert (bare.q_positions, bare.batch_axis_name) == (None, None)
    assert bare.attention_mask.sum() == info.attention_mask.sum()
    assert info.replace(kv_positions=[[1, 2, 3, 4]]).kv_positions.tolist() == [[1, 2, 3, 4]]
    # A term with arrays of its own fixes the shape.
    fixed = info.apply_token_type_ids(ids)
    assert fixed.replace(q_segment_ids=[[1, 1, 1, 1]]).attention_mask.shape == (1, 1, 4, 4)
    with pytest.raises(ValueError, match="q_segment_ids must have 4 queries"):
        fixed.replace(q_segment_ids=[[1] * 5])


def test_flags_are_true():
    """They speak of an array; a mask of anything else has in it what was applied, and nothing more."""
    lower, ids = np.tri(2, 4, 2, dtype=bool)[None], [[0, 0, 1, 1]]
    told = MaskInfo(lower, causal_mask_baked_in=True, chunked_mask_baked_in=True)
    assert [name for name, baked in told.baked_in_masks.items() if baked] == ["causal", "chunked"]
    assert not told.replace(causal_mask_baked_in=False).causal_mask_baked_in
    assert (
        MaskInfo.from_blocks([[[[1, 0], [1, 1]]]], 1).replace(causal_mask_baked_in=True).causal_mask_baked_in
    )
    with pytest.raises(
        ValueError, match=r"^causal_mask_baked_in must be False .* after their query.*apply_causal"
    ):
        MaskInfo(np.ones((1, 2, 4), bool), causal_mask_baked_in=True)
    for name, kind in (("causal_mask", "causal"), ("token_type_ids", "token_type_ids")):
        with pytest.raises(ValueError, match=f"^{name}_baked_in must be False .*write apply_{kind}"):
            MaskInfo(q_segment_ids=ids, kv_segment_ids=ids, **{f"{name}_baked_in": True})
    with pytest.raises(ValueError, match="sliding_window_baked_in must be False"):
        MaskInfo.full(3).replace(sliding_window_baked_in=True)
    for info in (MaskInfo.causal(3), told.apply_causal(2)):
        assert info.replace(causal_mask_baked_in=True) == info
        with pytest.raises(ValueError, match=r"causal_mask_baked_in must be True .*apply_causal"):
            info.replace(causal_mask_baked_in=False)


def test_help_and_completion_begin_with_short_ways():
    text = pydoc.plain(pydoc.render_doc(MaskInfo))
    places = [
        text.index(f" {name}(") for name in ("from_lengths", "apply_causal", "get_or_compute_segment_ids")
    ]
    assert places[2] == max(places)
    assert text.index("inherited from") < places[2]
    info = MaskInfo.full(2)
    offered = set(dir(info))
    assert {"attention_mask", "apply_causal", "q_segment_ids", "__and__"} <= offered
    others = {"bias", "get_or_compute_attention_mask", "causal_mask_baked_in"}
    assert not others & offered
    assert all(hasattr(info, name) for name in others)


def test_nothing_is_changed():
    info = MaskInfo.from_segments([[0, 0, 1, -1]]).apply_causal()
    before = info.attention_mask.copy(), repr(info.tree_flatten())
    info.apply_sliding_window(1, mode="decode", index=1).attention_mask  # noqa: B018
    info.replace(q_segment_ids=[[1, 1, 1, 1]]).bias  # noqa: B018
    np.testing.assert_array_equal(info.attention_mask, before[0])
    assert repr(info.tree_flatten()) == before[1]
    fields = "attention_mask", "q_segment_ids", "q_positions", "shape", "causal_mask_baked_in"
    for name in (*fields, "batch_axis_name", "something"):
        with pytest.raises(AttributeError):
            setattr(info, name, 1)
    with pytest.raises(TypeError, match="unhashable"):
        hash(info)


@given(program=programs())
def test_arrays_are_read_only(program):
    info, _, words = program
    for name in (*ARRAYS, *METHODS):
        for array in arrays_of(answer(info, name)):
            assert not array.flags.writeable, (words, name)
            if name not in ("attention_mask", "get_or_compute_attention_mask"):  # it may be the caller's
                with pytest.raises(ValueError, match="WRITEABLE"):
                    array.setflags(write=True)


def test_random_seeds():
    """Any seed that NumPy takes, and subclasses of arrays, which its generator does not take."""
    seeds = [3, np.int64(3), np.random.SeedSequence(3), np.random.default_rng(3)]
    masks = [MaskInfo.from_random(1, 9, seed=seed) for seed in seeds]
    assert all(mask == masks[0] for mask in masks)
    masked = np.ma.masked_array([1, 2])
    assert MaskInfo.from_random(1, 9, seed=masked) == MaskInfo.from_random(1, 9, seed=np.array([1, 2]))


def deepest(program) -> int:
    """The most operands on the stack while a program is evaluated."""
    waiting = [0]
    for node in program:
        waiting.append(waiting[-1] + (1 if isinstance(node, tuple) else 0 if node == "not" else -1))
    return max(waiting)


def test_many_terms_are_joined_in_as_many_steps():
    """Joining from the left, from the right and by methods takes linear time, and nothing is recursive."""

    def seconds(count: int) -> float:
        begin = time.perf_counter()
        left = right = chain = terms[0]
        for number in range(1, count):
            left, right = left & terms[number % 7], terms[number % 7] & right
            chain = chain.apply_causal(number % 5)
        assert left.density() == right.density() == terms[0].density()
        assert chain.density() == terms[0].density()
        return time.perf_counter() - begin

    base = MaskInfo.from_segments([[0] * 16])
    terms = [base.apply_causal(offset) for offset in range(7)]
    seconds(10)
    few, many = seconds(2000), seconds(16_000)
    assert many < 8 * few * 2.5, (few, many)
    twin = MaskInfo(base.apply_causal().attention_mask)
    long = terms[0]
    for _ in range(100_000):
        long = long & terms[1]
    assert long == twin
    assert pickle.loads(pickle.dumps(terms[3] & terms[4])) == terms[3]


def test_deep_and_long_programs():
    """The core's stack has 16 operands; masks that are nested deeper become arrays on the way."""
    rng = np.random.default_rng(1)
    leaves = [rng.random((1, 1, 4, 5)) < 0.6 for _ in range(40)]
    infos = [MaskInfo(leaf) for leaf in leaves]
    nested, pairs = infos[0], leaves[0]
    for number, (leaf, info) in enumerate(zip(leaves, infos, strict=True)):
        nested = info & nested if number % 3 else ~info | nested
        pairs = leaf & pairs if number % 3 else ~leaf | pairs
    np.testing.assert_array_equal(nested.attention_mask, pairs)
    assert deepest(nested._state.program) == nested._state.terms.depth <= mask_program.MAX_DEPTH

    def tree(level: int, at: int):
        if level == 0:
            return infos[at % 40], leaves[at % 40]
        (left, left_pairs), (right, right_pairs) = tree(level - 1, at), tree(level - 1, at + 2 ** (level - 1))
        return (
            (left | right, left_pairs | right_pairs)
            if level % 2
            else (left & right, left_pairs & right_pairs)
        )

    balanced, pairs = tree(7, 0)
    np.testing.assert_array_equal(balanced.attention_mask, pairs)
    doubled, pairs = infos[0], leaves[0]
    for number in range(1, 40):  # without the limit the program would double each time
        other = ~doubled & infos[number]
        doubled, pairs = doubled | other, pairs | (~pairs & leaves[number])
        if number == 22:
            break
    np.testing.assert_array_equal(doubled.attention_mask, pairs)
    long = infos[0]
    for _ in range(2000):
        long = long.apply_sliding_window(3)
    assert long == infos[0].apply_sliding_window(3)
    assert "1988 more" in repr(long)
    assert len(repr(long)) < 1000


# Cost


def test_large_masks_cost_nothing_until_they_are_read():
    tokens = 131_072
    starts = np.arange(0, tokens + 1, tokens // 64)
    tracemalloc.start()
    info = MaskInfo.from_cu_seqlens(starts, packed=True).apply_causal().apply_sliding_window(4096)
    decoded = info.apply_kv_lengths([100_000], q_len=1)
    repr(info), info.shape, info.q_lens, info.cu_seqlens_q, info.is_multi_sequence, info.density()
    huge = (
        MaskInfo.from_cu_seqlens([0, 5, 2**31 - 1], packed=True).apply_causal().apply_sliding_window((63, 0))
    )
    assert "q_segment_ids" in repr(huge)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * 2**20
    length = tokens // 64
    assert info.density() == 64 * length * (length + 1) // 2 / tokens**2
    assert decoded.attention_mask.sum() == 100_000 % length


@pytest.mark.skipif(SANITIZED, reason="says nothing under a sanitizer")
def test_chunks_of_many_segments_cost_next_to_nothing():
    starts = np.append(np.sort(np.random.default_rng(0).integers(0, 131_072, 300)), 131_072)
    info = MaskInfo.from_cu_seqlens([0, *starts], packed=True).apply_causal().apply_sliding_window(4096)

    def seconds():
        begin = time.perf_counter()
        info.apply_chunked(256, within_segments=True)
        return time.perf_counter() - begin

    assert min(seconds() for _ in range(20)) < 2e-3  # half the time of sorting the tokens


def test_too_large():
    info = MaskInfo.from_segments(np.zeros((1, 2**21), np.int8)).apply_causal()
    for work in (
        lambda: info.attention_mask,
        lambda: info.bias,
        lambda: info.to_dtype("float64"),
        lambda: info.materialize_attention_mask("int8"),
        lambda: info.create_bias("float16"),
        lambda: (~info).q_segment_ids,
        lambda: info.get_qkv_masks(),
    ):
        with pytest.raises((MemoryError, ValueError)):
            work()
    assert info.q_lens.tolist() == [2**21]
    assert info.apply_kv_lengths([10], q_len=2, sliding_window=4).attention_mask.sum() == 7
    wide = MaskInfo(np.broadcast_to(np.True_, (2**15, 2**15, 2**15, 2**15)))
    assert wide.attention_mask.shape == (2**15,) * 4
    with pytest.raises((MemoryError, ValueError)):
        wide.bias  # noqa: B018
    assert (~wide).labels(0, 0) is None  # too many tokens to find labels


@pytest.mark.skipif(SANITIZED, reason="says nothing under a sanitizer")
def test_many_threads_read_one_mask():
    info = MaskInfo.from_segments(np.repeat(np.arange(8), 64)[None]).apply_causal()
    expected = info.apply_causal(9).attention_mask
    seen: list = []

    def read():
        seen.append((info.attention_mask, info.bias, info.cu_seqlens_q, info.density()))

    threads = [threading.Thread(target=read) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 16
    for mask, bias, cu_seqlens, density in seen:
        assert mask is seen[0][0]
        assert bias is seen[0][1]
        assert cu_seqlens is seen[0][2]
        assert density == expected.mean()
        np.testing.assert_array_equal(mask, expected)


# Segments with many and with huge ids


def test_many_segments():
    ids = np.arange(300)[None]
    info = MaskInfo.from_segments(ids)
    assert_equal(info.cu_seqlens_q, np.arange(301, dtype=np.int32), "it grows")
    assert_equal(info.get_or_compute_qkv_cu_seqlens()[1], np.arange(301, dtype=np.int32), "it grows")
    assert len(info.get_or_compute_qkv_cu_seqlens(max_segments=400)[0]) == 401
    both = MaskInfo.from_segments([[0, 1]], [[0, 200, 1]])
    assert (len(both.cu_seqlens_q), len(both.cu_seqlens_kv)) == (202, 202)
    with pytest.raises(ValueError, match="max_segments"):
        info.get_or_compute_qkv_cu_seqlens(max_segments=299)
    huge = MaskInfo.from_segments([[2**31 - 1, 2**31 - 1, 5, -(2**31)]])
    np.testing.assert_array_equal(huge.attention_mask[0, 0].sum(axis=1), [2, 2, 1, 0])
    assert huge.apply_chunked(1, within_segments=True).q_segment_ids.tolist() == [[2, 3, 1, -1]]


def test_chunks_longer_than_everything():
    info = MaskInfo.from_segments(ids := np.array([[[0, 0, 0, -1], [0, 0, 1, 1]]]))
    one, each = (info.apply_chunked(2**100, within_segments=within) for within in (False, True))
    assert_equal(one.q_segment_ids, np.where(ids < 0, -1, 1).astype(np.int32), "one chunk")
    assert_equal(each.q_segment_ids, np.where(ids < 0, -1, ids + 1).astype(np.int32), "one for each segment")
    assert one == info.apply_causal()


@pytest.mark.parametrize("chunk_size", [1, 3, 4, 2**70])
@pytest.mark.parametrize(("q_len", "kv_len", "offset"), [(8, None, 0), (5, 9, 2), (0, 3, 0), (9, 5, -1)])
def test_create_chunked_attention_mask(chunk_size, q_len, kv_len, offset):
    keys = q_len if kv_len is None else kv_len
    q, k = np.arange(q_len, dtype=object)[:, None], np.arange(keys, dtype=object)[None, :]
    expected = (((q + offset) // chunk_size == k // chunk_size) & (k <= q + offset)).astype(bool)
    for dtype in DTYPES:
        mask = MaskInfo.create_chunked_attention_mask(chunk_size, q_len, kv_len, offset, dtype)
        assert (mask.dtype, mask.shape) == (np.dtype(dtype), expected.shape)
        np.testing.assert_array_equal(mask, expected.astype(dtype))
    out = np.ones((2 * q_len, keys), np.float32)[::2]
    assert (
        MaskInfo.create_chunked_attention_mask(chunk_size, q_len, kv_len, offset, "float32", out=out) is out
    )
    np.testing.assert_array_equal(out, expected)


def test_windows_may_be_arrays():
    info = MaskInfo.from_segments(np.zeros((1, 9), int))
    for pair in ((2, 1), [2, 1], (np.int8(2), np.int64(1))):
        assert info.apply_sliding_window(pair) == info.apply_sliding_window((2, 1))
        assert info.apply_sliding_window(pair, mode="prefill").shape == (1, 9, 4)
    for number in (3, np.int8(3), np.array(3)):
        assert info.apply_sliding_window(number) == info.apply_sliding_window((3, 3))
        assert info.apply_sliding_window(number, mode="prefill").shape == (1, 9, 3)


@pytest.mark.parametrize("far", [2**58, -(2**58), 2**59])
def test_far_offsets(far):
    info = MaskInfo.from_segments(np.zeros((2, 5), int))
    assert info.apply_causal(far).density() == (1 if far > 0 else 0)
    assert info.apply_sliding_window((2**60, None), offset=far).density() == 1
    assert info.apply_sliding_window((10**30, 10**30), offset=far).density() == 1
    assert info.apply_sliding_window((5, 5), offset=[far, 0]).density() == 0.5
    assert info.apply_kv_lengths([2**59, 2], q_len=2).attention_mask[0].all()
    assert info.apply_sliding_window(1, mode="decode", index=[2**59, -(2**59)]).shape == (2, 1, 3)


# Text and pictures


def test_repr():
    info = MaskInfo.from_segments([[0, 0, 1, -1]], q_positions=[[0, 1, 0, 0]])
    assert repr(info) == (
        "MaskInfo(batch_size=1, heads=1, q_len=4, kv_len=4, base=segments, terms=[], "
        "holds=[q_segment_ids, kv_segment_ids, q_positions], cached=[])"
    )
    mask = MaskInfo.from_attention_mask(np.ones((2, 3, 4, 4), np.float32))
    assert "base=dense float32[2, 3, 4, 4], terms=[], dtype=float32, holds=[attention_mask, q_seg" in repr(
        mask
    )
    assert "base=~dense float32" in repr(
        MaskInfo.from_attention_mask(mask.attention_mask, mask_is_valid=False)
    )
    long = (
        info.apply_causal().apply_causal(2).apply_sliding_window((2, None)).apply_sliding_window(3, offset=-1)
    )
    assert "terms=[& causal, & causal(offset=2), & window(2, None), & window(3, 3, offset=-1)]" in repr(long)
    long = info.apply_chunked(3).apply_kv_lengths([3]).apply_token_type_ids([[0, 1, 1, 1]])
    assert "terms=[& chunks(3), & causal, & key lengths, | equal ids]" in repr(long)
    nested = ~(info | info.apply_causal())
    assert "base=~(equal ids | (equal ids & causal)), terms=[]" in repr(nested)
    by_row = MaskInfo.from_segments(np.zeros((2, 3), int)).apply_causal([0, 1])
    assert "causal(offset by row)" in repr(by_row)
    by_row.attention_mask, by_row.bias, by_row.density()
    assert repr(by_row).endswith("cached=[attention_mask, bias, density])")
    ready = by_row.materialize_attention_mask()
    assert "base=dense bool[2, 1, 3, 3], terms=[]" in repr(ready)


def test_visualize(capsys):
    info = MaskInfo.from_segments([[0, 0, 0, 0, 1, 1, 1, -1]] * 2).apply_causal()
    text = info.visualize(block_size=2, batch=1, charset="ascii", return_str=True)
    assert "||##..    ||" in text
    assert info.visualize(block_size=2, batch=1, charset="ascii") is None
    assert capsys.readouterr().out == text + "\n"
    assert MaskInfo.from_segments(np.zeros((1, 0), int))._repr_html_() is None


# Devices

MESH = {"dp": 2, "fsdp": 2, "tp": 2, "sp": 4}


def test_a_sharding_names_an_axis_once():
    """An axis name that is dropped may occur elsewhere."""

    def shard(axes, batch=4):
        info = MaskInfo.from_segments(
            np.zeros((batch, 8), int), batch_axis_name=axes, sequence_axis_name="dp"
        )
        return info.get_shardings(True, mesh=MESH)

    with pytest.raises(ValueError, match=r"^batch_axis_name and sequence_axis_name must .* got 'dp' twice"):
        shard(("fsdp", "dp"))
    with pytest.raises(ValueError, match=r"^batch_axis_name must .* got 'sp' twice"):
        shard(("sp", "sp"), batch=16)
    assert tuple(shard(("fsdp", "dp"), batch=3).q_segment_ids) == (None, "dp")
    assert tuple(shard(("sp", "sp")).q_segment_ids) == (None, "dp")


@pytest.mark.parametrize("jax_there", [False, True])
def test_get_shardings(monkeypatch, jax_there):
    if jax_there:
        jax = pytest.importorskip("jax")
        spec = jax.sharding.PartitionSpec
        mesh = jax.sharding.AbstractMesh(tuple(MESH.values()), tuple(MESH))
    else:
        monkeypatch.setitem(sys.modules, "jax", None)
        monkeypatch.setitem(sys.modules, "jax.sharding", None)
        mesh, spec = MESH, lambda *axes: axes
    batch = ("dp", "fsdp")
    info = MaskInfo.from_segments(
        np.zeros((4, 8), int), np.zeros((4, 6), int), q_positions=np.zeros((4, 8), int)
    )
    shardings = info.get_shardings(mesh=mesh)
    assert type(shardings) is MaskSharding
    assert shardings == (None, spec(batch, None), spec(batch, None), None, None, spec(batch, None), None)
    assert type(shardings.q_segment_ids) is type(spec())
    parallel = info.get_shardings(True, mesh=mesh)
    assert parallel.q_segment_ids == spec(batch, "sp")
    assert parallel.kv_segment_ids == spec(batch, None)  # 6 tokens for 4 devices
    info.attention_mask  # noqa: B018
    assert info.get_shardings(mesh=mesh) == shardings  # the array was computed, but is no leaf
    held = info.materialize_attention_mask().get_shardings(True, mesh=mesh)
    assert held.attention_mask == spec(batch, None, "sp", None)  # one head for 2 devices
    heads = MaskInfo.from_attention_mask(np.ones((3, 4, 8, 8), bool))
    assert heads.get_shardings(mesh=mesh).attention_mask == spec(None, "tp", None, None)
    assert heads.get_shardings(mesh=mesh).q_segment_ids == spec()
    per_head = MaskInfo.from_segments(np.zeros((4, 2, 8), int)).get_shardings(True, mesh=mesh)
    assert per_head.q_segment_ids == spec(batch, "tp", "sp")
    assert MaskInfo().get_shardings(mesh=mesh) == MaskInfo.get_empty_sharding() == (None,) * 7
    named = info.replace(batch_axis_name="dp", qheads_axis_name=None, sequence_axis_name=None)
    assert named.get_shardings(True, mesh=mesh).q_segment_ids == spec("dp", None)
    small = {name: size for name, size in MESH.items() if name != "sp"}
    assert info.get_shardings(mesh=small).q_segment_ids == spec(batch, None)
    for parallel, lacking in ((False, "tp"), (False, "fsdp"), (True, "sp")):
        small = {name: size for name, size in MESH.items() if name != lacking}
        with pytest.raises(ValueError, match=f"must name axes of the mesh.*got '{lacking}'"):
            info.get_shardings(parallel, mesh=small)


def test_shardings_take_a_mesh_of_devices():
    jax = pytest.importorskip("jax")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("dp", "fsdp", "tp"))
    info = MaskInfo.from_segments(np.zeros((4, 8), int))
    assert info.get_shardings(mesh=mesh).q_segment_ids == jax.sharding.PartitionSpec(("dp", "fsdp"), None)


def test_trees():
    ids = np.array([[0, 0, 1, 1], [0, 0, 0, -1]], np.int32)
    info = MaskInfo.from_segments(ids, q_positions=ids).apply_causal([0, 1]).apply_chunked(2)
    children, aux = info.tree_flatten()
    mask, q_ids, kv_ids, cu_q, cu_kv, q_positions, kv_positions, *terms = children
    assert (mask, cu_q, cu_kv, kv_positions) == (None,) * 4
    assert_equal((q_ids, kv_ids), (info.q_segment_ids, info.kv_segment_ids), "ids")
    assert_equal(q_positions, ids, "positions")
    assert [array.tolist() for array in terms] == [ids.tolist(), [0, 1]]  # arrays of the base, and of offsets
    assert aux[:4] == (("dp", "fsdp"), "tp", "tp", "sp")
    assert aux[4:8] == (True, False, True, False)
    # Children of any type come back unchanged; they are checked when the tree is used.
    nonsense = [object() for _ in children]
    tree = MaskInfo.tree_unflatten(aux, nonsense)
    assert tree.tree_flatten() == (tuple(nonsense), aux)
    assert repr(tree) == f"MaskInfo({len(nonsense)} leaves)"
    with pytest.raises(TypeError, match="must be integers"):
        tree.attention_mask  # noqa: B018
    # A selection of batch rows is a mask.
    row = MaskInfo.tree_unflatten(aux, [child if child is None else child[1:] for child in children])
    assert row.shape == (1, 4, 4)
    np.testing.assert_array_equal(row.attention_mask, info.attention_mask[1:])
    lists = MaskInfo.tree_unflatten(aux, [child if child is None else child.tolist() for child in children])
    assert lists == info
    shorter = [child if child is None else child[:, 1:] for child in children[:7]]
    with pytest.raises(ValueError, match="must have 4 queries"):
        MaskInfo.tree_unflatten(aux, [*shorter, *terms]).attention_mask  # noqa: B018
    cut = MaskInfo(np.ones((2, 6, 6), bool)).apply_kv_lengths([2, 5], q_len=2, sliding_window=3)
    children, aux = cut.tree_flatten()
    assert MaskInfo.tree_unflatten(aux, children) == cut
    with pytest.raises(ValueError, match="a shift must be from 0 to 1, got 3"):
        MaskInfo.tree_unflatten(aux, [np.ones((2, 1, 3, 3), bool), *children[1:]]).attention_mask  # noqa: B018
    program = [("dense", [1e300], 0, 0)]  # no array, nor the place of a child
    with pytest.raises(ValueError, match="attention_mask must be"):
        MaskInfo.tree_unflatten((*aux[:-1], program), children).shape  # noqa: B018


# Bad input


IDS = np.zeros((2, 4), np.int32)
INFO = MaskInfo.from_segments(IDS)
MASK = MaskInfo(np.ones((2, 3, 4, 4), bool))
BAD = [
    (TypeError, "the other operand must be a MaskInfo, got bool array", lambda: INFO & (IDS == 0)),
    (TypeError, "the other operand must be a MaskInfo, got int32 array", lambda: INFO | IDS),
    (TypeError, "the other operand must be a MaskInfo, got int32 array", lambda: IDS & INFO),
    (TypeError, "the other operand must be a MaskInfo, got int32 array", lambda: IDS | INFO),
    (TypeError, "unsupported operand", lambda: INFO & 3),
    (TypeError, "unsupported operand", lambda: 3 | INFO),
    (ValueError, "aux_data must be of 14", lambda: MaskInfo.tree_unflatten((), INFO.tree_flatten()[0])),
    (ValueError, "children must be of 7 entries", lambda: MaskInfo.tree_unflatten(INFO.tree_flatten()[1], (None,))),
    (ValueError, "q_segment_ids must be array_like", lambda: MaskInfo.from_segments([[1, 2], [1]])),
    (ValueError, r"q_segment_ids must fit int32", lambda: MaskInfo.from_segments([[0, 2**31]])),
    (ValueError, "the key ids must have 2 heads", lambda: MaskInfo.from_segments(
        np.zeros((1, 2, 4), int), np.zeros((1, 3, 4), int))),
    (ValueError, "q_positions must have 4 queries", lambda: MaskInfo.from_segments(IDS, q_positions=IDS[:, 1:])),
    (ValueError, "kv_positions must", lambda: MaskInfo.from_segments(IDS, kv_positions=np.zeros((3, 4), int))),
    (ValueError, r"attention_mask must be \[B, T\]", lambda: MaskInfo.from_attention_mask(np.ones(3))),
    (ValueError, r"attention_mask must be \[B, T\]", lambda: MaskInfo.from_attention_mask(np.ones((1,) * 5))),
    (ValueError, "q_segment_ids must have 3 batch rows", lambda: MaskInfo(np.ones((3, 4, 4)), IDS)),
    (ValueError, "q_segment_ids must have 5 queries", lambda: INFO.replace(attention_mask=np.ones((2, 5, 4)))),
    (ValueError, "kv_segment_ids must have 3 keys", lambda: INFO.replace(attention_mask=np.ones((1, 1, 4, 3)))),
    (TypeError, "has no 'colour'", lambda: INFO.replace(colour=1)),
    (TypeError, "max_q_len must be given", lambda: MaskInfo.from_cu_seqlens([0, 2])),
    (ValueError, "cu_seqlens_q must be pairs", lambda: MaskInfo.from_cu_seqlens([0, 2, 3], max_q_len=4)),
    (ValueError, r"cu_seqlens_q must be \[2 B\]", lambda: MaskInfo.from_cu_seqlens([[0, 2]], max_q_len=4)),
    (ValueError, "cu_seqlens_kv must have 2 entries",
     lambda: MaskInfo.from_cu_seqlens([0, 2], max_q_len=4, cu_seqlens_kv=[0, 1, 0, 1])),
    (ValueError, "cu_seqlens_kv must", lambda: MaskInfo.from_cu_seqlens([0, 2], cu_seqlens_kv=[1, 2], packed=True)),
    (ValueError, "max_q_len must be at least 3", lambda: MaskInfo.from_cu_seqlens([0, 3], packed=True, max_q_len=2)),
    (ValueError, "cu_seqlens_kv must have 3 entries",
     lambda: MaskInfo.from_cu_seqlens([0, 1, 2], packed=True, cu_seqlens_kv=[0, 2])),
    (ValueError, "sparsity must be from 0 to 1, got 1.5", lambda: MaskInfo.from_random(1, 2, sparsity=1.5)),
    (ValueError, "sparsity must be from 0 to 1, got nan", lambda: MaskInfo.from_random(1, 2, sparsity=np.nan)),
    (ValueError, "must be given, got None of them", lambda: MaskInfo.dynamic_init()),
    (ValueError, r"input_ids must be \[B, T\]", lambda: MaskInfo.dynamic_init(input_ids=IDS[0])),
    (ValueError, r"inputs_embeds must be \[B, T, D\]", lambda: MaskInfo.dynamic_init(inputs_embeds=IDS)),
    (ValueError, r"offset must be an integer or of shape \(2,\)", lambda: INFO.apply_causal([1, 2, 3])),
    (ValueError, "offset must be at most", lambda: INFO.apply_causal(2**62)),
    (ValueError, "offset must be at least .* at index 1", lambda: INFO.apply_causal([0, -(2**62)])),
    (TypeError, r"takes 1 positional argument, got 2; write apply_sliding_window\(\(4, 0\)\)$",
        lambda: INFO.apply_sliding_window(4, 0)),
    (TypeError, r"got 3; write apply_sliding_window\(\(None, 2\)\)$",
        lambda: INFO.apply_sliding_window(None, 2, "decode")),
    (TypeError, "got 2; write offset=, mode= or index=$", lambda: INFO.apply_sliding_window((4, 0), "decode")),
    (ValueError, "index must be given", lambda: INFO.apply_sliding_window(1, mode="decode")),
    (ValueError, "index must be", lambda: INFO.apply_sliding_window(1, mode="decode", index=[1, 2, 3])),
    (ValueError, "mode must not be 'decode'", lambda: MaskInfo.from_segments(
        np.zeros((1, 0), int)).apply_sliding_window(1, mode="decode", index=0)),
    (ValueError, "within_segments must be False", lambda: MASK.apply_chunked(2, within_segments=True)),
    (ValueError, "token_type_ids must be an array or two", lambda: INFO.apply_token_type_ids((IDS,))),
    (ValueError, r"token_type_ids must be of shape \(2, 4\)", lambda: INFO.apply_token_type_ids(IDS[:1])),
    (ValueError, r"token_type_ids\[1\] must be of shape", lambda: INFO.apply_token_type_ids((IDS, IDS[:, 1:]))),
    (ValueError, "kv_lengths must be at least 0, got -1 at index 1", lambda: INFO.apply_kv_lengths([1, -1])),
    (ValueError, "kv_lengths must be", lambda: INFO.apply_kv_lengths([1, 2, 3])),
    (ValueError, "q_len must be at most 4", lambda: INFO.apply_kv_lengths([1, 2], q_len=5)),
    (ValueError, "the right mask must have 4 keys", lambda: INFO & MaskInfo.from_segments(IDS, IDS[:, 1:])),
    (ValueError, "the right mask must have 2 batch rows", lambda: INFO | MaskInfo.from_segments(np.zeros((3, 4), int))),
    (ValueError, "the right mask must have 3 heads", lambda: MASK & MaskInfo(np.ones((2, 2, 4, 4), bool))),
    (ValueError, "max_segments",
     lambda: MaskInfo.from_segments([[0, 5]]).get_or_compute_qkv_cu_seqlens(max_segments=5)),
    (ValueError, "seed must be .*, got -1", lambda: MaskInfo.from_random(1, 2, seed=-1)),
    *((ValueError, rf"q_len must be at most 2\*\*56, got {n}",
       lambda n=n: MaskInfo.create_chunked_attention_mask(2, n)) for n in (2**56 + 1, 2**63, 2**70)),
    (ValueError, r"kv_len must be at most 2\*\*56", lambda: MaskInfo.create_chunked_attention_mask(2, 0, 2**63)),
    (IndexError, "head must be", lambda: MASK.visualize(head=3)),
    (TypeError, r"mesh\['dp'\] must be an integer", lambda: INFO.get_shardings(mesh={"dp": 2.5})),
    (ValueError, "qheads_axis_name must name axes of the mesh", lambda: INFO.get_shardings(mesh={})),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "work"), BAD, ids=range(len(BAD)))
def test_bad_input(error, message, work):
    with pytest.raises(error, match=message):
        work()
    assert MaskInfo.from_segments(IDS) == INFO


# Flags, planes, and labels with other heads than the mask


def test_planes_that_there_are_not():
    info = MaskInfo.from_segments([[0, 1], [2, 2]])
    for ask in (info.labels, lambda batch, head: info.grid(batch, head, 1, 1)):
        for batch, head in ((-1, 0), (2, 0), (0, 1), (0, -1)):
            with pytest.raises(IndexError, match=r"(batch|head) must be from 0 to"):
                ask(batch, head)
        with pytest.raises(TypeError, match="head must be an integer"):
            ask(0, "a")
    assert not info.grid(0, 0, 1, 1).flags.writeable


def test_chunks_within_segments_of_each_head():
    """A mask without heads gets those of its labels; other numbers of heads are refused."""
    ids, types = np.array([[[0, 0, 1], [0, 1, 1]]]), np.array([[1, 1, 2]])
    info = MaskInfo.from_segments(ids)
    alike = info.apply_token_type_ids(types, combine="replace", update_segment_ids=False)
    chunked = alike.apply_chunked(2, within_segments=True)
    same = (types[:, None, :, None] == types[:, None, None]) & np.tri(3, dtype=bool)
    same = same & (ids[..., None] == ids[..., None, :])
    assert chunked.attention_mask.shape == (1, 2, 3, 3)
    np.testing.assert_array_equal(chunked.attention_mask, same)
    three = MaskInfo(attention_mask=np.ones((1, 3, 3, 3)), q_segment_ids=ids, kv_segment_ids=ids)
    with pytest.raises(ValueError, match="the query ids must have 3 heads as the mask, got 2"):
        three.apply_chunked(2, within_segments=True)


@pytest.mark.parametrize("holds", ["ids", "starts", "pairs", "nothing"])
def test_arguments_of_cu_seqlens(holds):
    """Arguments are checked for every representation of the lengths."""
    info = {
        "ids": INFO,
        "starts": MaskInfo.from_cu_seqlens([0, 2, 3], packed=True),
        "pairs": MaskInfo(np.ones((1, 2, 2))),
        "nothing": MaskInfo(),
    }[holds]
    for error, bad in [
        *((TypeError, {"out_dtype": dtype}) for dtype in ("float32", bool, None, "no such type", object)),
        *((TypeError, {"max_segments": count}) for count in (1.5, "a", True)),
        (ValueError, {"max_segments": -1}),
    ]:
        with pytest.raises(error, match=f"^{next(iter(bad))} must be"):
            info.get_or_compute_qkv_cu_seqlens(**bad)
    for swapped in (">i4", "<i4") if holds != "nothing" else ():
        assert info.get_or_compute_qkv_cu_seqlens(out_dtype=swapped)[0].dtype.isnative


# Sizes


ENDLESS = np.broadcast_to(np.int8(0), (2**31, 2**31))


@pytest.mark.parametrize(
    "make",
    [
        lambda **details: MaskInfo.from_segments([[0, 0, 1]], **details),
        lambda **details: MaskInfo.from_cu_seqlens([0, 2, 3], packed=True, **details),
        lambda **details: MaskInfo.from_cu_seqlens([0, 2], max_q_len=3, packed=False, **details),
    ],
)
def test_a_mask_is_fitted_once(make, monkeypatch):
    """Details that nobody gave doubled the time of the constructors."""
    fits = []
    agree = mask_state.agree
    monkeypatch.setattr(mask_state, "agree", lambda named: fits.append(named) or agree(named))
    info = make()
    assert len(fits) == 1
    assert (info.batch_axis_name, info.sequence_axis_name, info.q_len) == (("dp", "fsdp"), "sp", 3)
    given = make(batch_axis_name=["dp", "fsdp"], sequence_axis_name="x", q_positions=[[4, 5, 6]])
    assert (given.batch_axis_name, given.sequence_axis_name) == (("dp", "fsdp"), "x")
    assert given.get_or_compute_positions()[0].tolist() == [[4, 5, 6]]


@pytest.mark.skipif(SANITIZED, reason="a sanitizer has its own memory")
@pytest.mark.parametrize(
    ("names", "make"),
    [
        ("batch_size, q_len and kv_len", lambda: MaskInfo.from_random(2**30, 2**30, 2**30)),
        ("batch_size, q_len and kv_len", lambda: MaskInfo.from_random(0, 2**70)),
        *(("max_q_len", lambda n=n: MaskInfo.from_cu_seqlens([0, 2], packed=True, max_q_len=n)) for n in FAR),
        *(("max_kv_len", lambda n=n: MaskInfo.from_cu_seqlens([0, 2], packed=True, max_kv_len=n)) for n in FAR),
        ("input_ids", lambda: MaskInfo.dynamic_init(input_ids=ENDLESS)),
        ("inputs_embeds", lambda: MaskInfo.dynamic_init(inputs_embeds=ENDLESS[..., None])),
    ],
)  # fmt: skip
def test_sizes_that_no_memory_holds(names, make):
    with pytest.raises(MemoryError, match=f"does not fit in memory: {names}$"):
        make()


@pytest.mark.skipif(SANITIZED, reason="a sanitizer has its own memory")
def test_lengths_take_no_more_memory_than_they_have():
    info = MaskInfo.from_segments([[0, 2**22, 2**22, -1]])
    tracemalloc.start()
    lens = info.q_lens
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.1 * lens.nbytes
    assert lens[[0, -1]].tolist() == [1, 2]
    assert len(lens) - 1 == 2**22
    assert lens.sum() == 3
