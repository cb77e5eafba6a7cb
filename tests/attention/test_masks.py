"""Masks decide which pairs are live, and rows without a live pair are zero."""

import numpy as np
import pytest
from flash_cases import FLOATS, NO_PAIR, tensors
from flash_expected import attend, expected

import attnmask
from attnmask import _core

pytestmark = pytest.mark.levels("turns", "amx")

# Positions


@pytest.mark.parametrize("offset", [2**31, -(2**31), 2**59, -(2**59)])
@pytest.mark.parametrize("window", [None, (0, 0), (2**63 - 1, 3), (2, 2**63 - 1), 2**62])
@pytest.mark.parametrize("causal", [False, True])
def test_positions_far_away_do_not_wrap(isa, offset, window, causal):
    arguments = tensors(9, 11)
    got = attend(arguments, causal=causal, causal_offset=offset, sliding_window=window)
    left, right = window if isinstance(window, tuple) else (window, window)
    ahead = np.subtract.outer(np.arange(9), np.arange(11)).astype(object) * -1 - offset
    live = np.ones(ahead.shape, bool)
    if causal:
        live &= (ahead <= 0).astype(bool)
    if window is not None:
        live &= ((-left <= ahead) & (ahead <= right)).astype(bool)
    expected(arguments | {"attention_mask": live}, case=(offset, window, causal)).check(*got)


# Tiles


def scattered() -> dict:
    """Of the second block of queries, the last pair lies one tile behind those that the window allows to be."""
    live = np.zeros((1, 1, 72, 72), bool)
    live[0, 0, [63, 64, 64], [63, 40, 64]] = True
    return tensors(72, 72) | {"attention_mask": live, "sliding_window": (4, 2)}


def windows_of_segments() -> dict:
    ids = np.zeros((1, 79), np.int32)
    ids[:, 8:16] = ids[:, 64:72] = 1
    mask = attnmask.MaskInfo.from_segments(ids).apply_sliding_window((5, 19))
    return tensors(79, 79) | {"attention_mask": mask}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("make", [scattered, windows_of_segments])
def test_no_tile_is_left_out(isa, dtype, make):
    """Where one term allows pairs of more tiles than all terms together."""
    arguments = {
        name: x.astype(dtype) if name in ("query", "key", "value") else x for name, x in make().items()
    }
    expected(arguments).check(*attend(arguments))


# Rows without a live pair


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("queries", "heads"), [(20, (8, 8)), (20, (8, 4)), (70, (8, 8)), (1, (8, 8))], ids=str
)
def test_a_batch_row_that_sees_nothing(isa, dtype, queries, heads):
    """Each of the other rows has the same bits as alone, wherever in a cache line it begins."""
    rng = np.random.default_rng(0)

    def tensor(tokens, heads):
        long = rng.standard_normal(8 * tokens * heads * 64 + 64).astype(dtype)
        begin = (16 - long.ctypes.data) % 64 // dtype.itemsize
        return long[begin : begin + 8 * tokens * heads * 64].reshape(8, tokens, heads, 64)

    query, key, value = (tensor(*size) for size in ((queries, heads[0]), (200, heads[1]), (200, heads[1])))
    live = np.ones((8, 1, 1, 200), bool)
    live[[3, 7]] = False
    out, lse = attend({"query": query, "key": key, "value": value, "attention_mask": live})
    for row in range(8):
        part = slice(row, row + 1)
        one = {"query": query[part], "key": key[part], "value": value[part], "attention_mask": live[part]}
        alone = attend(one)
        assert (out[part].tobytes(), lse[part].tobytes()) == (alone[0].tobytes(), alone[1].tobytes()), row
        assert (not out[row].any() and np.isneginf(lse[row]).all()) == (row in (3, 7)), row


@pytest.mark.repeats
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", NO_PAIR)
@pytest.mark.parametrize("more", [{}, {"logits_soft_cap": 3.0}, {"normalize_output": False}], ids=str)
def test_a_row_without_a_live_pair(isa, dtype, kind, more):
    """The expected out is exactly zero, and lse minus infinity, or that of the sinks."""
    for queries, row in ((1, 0), (40, 0), (40, 17), (40, 39)):
        arguments = tensors(queries, 70, dtype=dtype) | NO_PAIR[kind](row, (2, 4, queries, 70)) | more
        sinks = np.array([[0.5, -1.0], [2.0, 3.0], [0, -np.inf], [-5, 1]], dtype)
        for given in (arguments, arguments | {"softmax_aux": sinks}):
            right = expected(given)
            assert not right.out[:, row].any()
            right.check(*attend(given))


PREPARED = {
    "dense": lambda r: attnmask.MaskInfo.from_attention_mask(r.random((1, 1, 70, 90)) < 0.3),
    "segments": lambda r: attnmask.MaskInfo.from_segments(
        r.integers(-1, 3, (1, 70)), r.integers(-1, 3, (1, 90))
    ),
    "joined": lambda r: (
        ~attnmask.MaskInfo.from_segments(r.integers(0, 3, (1, 70)), r.integers(0, 3, (1, 90))).apply_causal()
    ),
}


@pytest.mark.parametrize("make", PREPARED.values(), ids=list(PREPARED))
def test_a_mask_is_prepared_once(make, monkeypatch):
    """It is prepared for the last shape that it was used for, and can be combined with other terms."""
    rng = np.random.default_rng(0)
    mask, shapes = make(rng), []
    prepare = _core.mask_prepare
    monkeypatch.setattr(
        _core, "mask_prepare", lambda shape, nodes: shapes.append(shape) or prepare(shape, nodes)
    )
    live = np.asarray(mask.attention_mask)
    for batch, heads in ((1, 2), (1, 2), (3, 2), (3, 4), (3, 4)):
        q = rng.standard_normal((batch, 70, heads, 8), dtype=np.float32)
        k = rng.standard_normal((batch, 90, heads, 8), dtype=np.float32)
        for more in ({}, {"sliding_window": (20, 5)}, {"causal": True, "causal_offset": "bottom-right"}):
            got = attnmask.flash_attention(q, k, k, attention_mask=mask, return_lse=True, **more)
            wanted = attnmask.flash_attention(q, k, k, attention_mask=live, return_lse=True, **more)
            for a, b in zip(got, wanted, strict=True):
                assert np.allclose(a, b, atol=1e-6)
    assert shapes == [(1, 2, 70, 90), (3, 2, 70, 90), (3, 4, 70, 90)]


def test_a_prepared_mask_has_one_shape():
    prepared = _core.mask_prepare((1, 2, 5, 6), (("all",), ("band", None, 0, 0), "and"))
    for shape in ((2, 2, 5, 6), (1, 1, 5, 6), (1, 2, 4, 6), (1, 2, 5, 7)):
        with pytest.raises(ValueError, match="must have the mask's shape"):
            _core.mask_count(shape, (prepared,))
    deep = (("all",),) * 15 + (prepared, *("and",) * 15)
    with pytest.raises(ValueError, match="too many operands"):
        _core.mask_count((1, 2, 5, 6), deep)
    assert _core.mask_count((1, 2, 5, 6), (prepared, prepared, "xor")).sum() == 0
    assert _core.mask_count((1, 2, 5, 6), (prepared, "not")).sum() == 2 * (30 - 15)
