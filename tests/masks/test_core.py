"""Masks in the core: every kind of term at every size and alignment of tiles, and expressions of terms."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_masks import cells, numbers_of_tokens

from attnmask import _core

OPERATORS = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def per_batch(value, batch):
    return np.broadcast_to(np.asarray(value, np.int64), (batch,))


def term_twin(shape, term):
    """The pairs of one term, computed from its definition."""
    batch, heads, queries, keys = shape
    q = np.arange(queries)[:, None]
    k = np.arange(keys)[None, :]
    result = np.zeros(shape, bool)
    for b, h in itertools.product(range(batch), range(heads)):
        name, *parts = term
        if name == "all":
            live = np.ones((queries, keys), bool)
        elif name in ("band", "diagonal"):
            low, high = (part[h] if isinstance(part, np.ndarray) else part for part in parts[:2])
            at = np.arange(queries)
            if name == "diagonal":
                at = parts[3][b % len(parts[3])]
                at = at[h % len(at)] if at.ndim == 2 else at
            distance = k - at.astype(np.int64)[:, None] - per_batch(parts[2], batch)[b]
            live = np.ones((queries, keys), bool)
            if low is not None:
                live &= distance >= low
            if high is not None:
                live &= distance <= high
        elif name == "chunk":
            size, q_shift, k_shift = parts
            live = (q + per_batch(q_shift, batch)[b]) // size == (k + per_batch(k_shift, batch)[b]) // size
        elif name == "keys":
            begin, end = (per_batch(part, batch)[b] for part in parts)
            live = np.broadcast_to((begin <= k) & (k < end), (queries, keys))
        elif name == "sequences":
            q_starts, k_starts, low, high = parts
            live = np.zeros((queries, keys), bool)
            for s, (q_begin, k_begin) in enumerate(zip(q_starts[:-1], k_starts[:-1], strict=True)):
                inside = (q_begin <= q) & (q < q_starts[s + 1]) & (k_begin <= k) & (k < k_starts[s + 1])
                distance = (k - k_begin) - (q - q_begin)
                above = True if low is None else distance >= low[s]
                below = True if high is None else distance <= high[s]
                live |= inside & above & below
        elif name == "equal":
            q_ids, k_ids = (ids[b % len(ids)] for ids in parts[:2])
            q_ids, k_ids = (ids[h % len(ids)] if ids.ndim == 2 else ids for ids in (q_ids, k_ids))
            live = (q_ids[:, None] == k_ids[None, :]) & (q_ids[:, None] >= (1 if parts[2] else 0))
        elif name == "tiles":
            places, q_size, k_size, bits, q_shift, k_shift = parts
            plane = places[b % len(places), h % places.shape[1]]
            wide = np.kron(plane == 1, np.ones((min(q_size, 500), min(k_size, 500)), bool))
            for i, j in np.argwhere(plane > 1):
                tile = np.unpackbits(bits[plane[i, j] - 2], axis=-1, bitorder="little")
                wide[64 * i : 64 * i + 64, 64 * j : 64 * j + 64] = tile
            live = wide[q + per_batch(q_shift, batch)[b], k + per_batch(k_shift, batch)[b]]
        else:
            array, q_shift, k_shift = parts
            plane = array[b % len(array)][h % array.shape[1]].astype(np.float64)
            rows = q if plane.shape[0] == 1 else q + per_batch(q_shift, batch)[b]
            columns = k if plane.shape[1] == 1 else k + per_batch(k_shift, batch)[b]
            live = plane[rows % len(plane), columns % plane.shape[1]] != 0
        result[b, h] = live
    return result


def twin(shape, nodes):
    stack = []
    for node in nodes:
        if node == "not":
            stack.append(~stack.pop())
        elif isinstance(node, str):
            right = stack.pop()
            stack.append(OPERATORS[node](stack.pop(), right))
        else:
            stack.append(term_twin(shape, node))
    (result,) = stack
    return result


def check(shape, nodes):
    """All functions that read a mask agree with the twin."""
    live = twin(shape, nodes)
    queries, keys = _core.mask_any(shape, nodes)
    assert np.array_equal(_core.mask_fill(shape, nodes, bool, True, False, None), live), (shape, nodes)
    assert np.array_equal(_core.mask_count(shape, nodes), live.sum((2, 3))), (shape, nodes)
    assert np.array_equal(queries, live.any(3)), (shape, nodes)
    assert np.array_equal(keys, live.any(2)), (shape, nodes)


LENGTHS = [1, 63, 64, 65, 129]


@pytest.mark.parametrize(
    ("queries", "keys"), [(1, 1), (1, 200), (200, 1), (63, 65), (64, 64), (129, 127), (70, 200)]
)
def test_bands(isa, queries, keys):
    bounds = [None, -300, -65, -64, -1, 0, 1, 64, 300]
    for low, high in itertools.product(bounds, bounds):
        check((1, 1, queries, keys), (("band", low, high, 0),))


@pytest.mark.parametrize("offset", [-(2**62), -65, -1, 3, 64, 2**62, np.array([0, -7, 70])])
def test_band_offsets(isa, offset):
    for low, high in [(None, 0), (-5, 5), (0, None), (-70, -3), (4, 2)]:
        check((3, 2, 130, 140), (("band", low, high, offset),))


@pytest.mark.parametrize("offset", [0, -9, np.array([0, -7, 70])])
def test_bands_by_head(isa, offset):
    far = [2**62, -(2**62), 5]
    for low, high in itertools.product([None, -3, np.array([-70, 0, 4]), np.array(far)], repeat=2):
        check((3, 3, 130, 140), (("band", low, high, offset),))


@pytest.mark.parametrize("lead", [(1,), (3,), (1, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize("offset", [0, np.array([0, -7, 70])])
def test_diagonals(isa, lead, offset):
    """Of queries in any order; some are far beyond the keys."""
    rng = np.random.default_rng(len(lead))
    limits = [None, -70, 0, 3, np.array([-9, 70])]
    for queries, keys in [(1, 1), (64, 64), (130, 140), (70, 200)]:
        for at in (
            np.broadcast_to(np.arange(queries) * 3 // 2, (*lead, queries)),
            np.sort(rng.integers(-90, keys + 90, (*lead, queries)), axis=-1),
            rng.integers(-9, keys + 9, (*lead, queries)),
            rng.choice([-(2**31), -1, 0, 5, 2**31 - 1], (*lead, queries)),
        ):
            for low, high in itertools.product(limits, limits):
                check((3, 2, queries, keys), (("diagonal", low, high, offset, at.astype(np.int32)),))


NO_BITS = np.zeros((0, 64, 8), np.uint8)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 64), (3, 100), (63, 65), (64, 64), (128, 64), (200, 2**55)])
def test_blocks(isa, sizes):
    rng = np.random.default_rng(sum(sizes) % 1000)
    for queries, keys in [(1, 1), (64, 64), (63, 129), (130, 70)]:
        counts = [-(-(length + 9) // size) for length, size in zip((queries, keys), sizes, strict=True)]
        for lead, density in itertools.product([(1, 1), (2, 1), (1, 3), (2, 3)], [0, 0.1, 0.5, 1]):
            places = (rng.random((*lead, *counts)) < density).astype(np.int32)
            for shifts in [(0, 0), (np.array([0, 9]), 5)]:
                check((2, 3, queries, keys), (("tiles", places, *sizes, NO_BITS, *shifts),))


@pytest.mark.parametrize("count", [1, 4])
def test_tiles_with_bits(isa, count):
    rng = np.random.default_rng(count)
    bits = rng.integers(0, 256, (count, 64, 8), np.uint8)
    bits[0] = 255  # as good as live, of which nobody was told
    for queries, keys in [(1, 1), (64, 64), (63, 129), (130, 70)]:
        counts = [-(-(length + 70) // 64) for length in (queries, keys)]
        for lead in [(1, 1), (2, 1), (1, 3), (2, 3)]:
            places = rng.integers(0, 2 + count, (*lead, *counts), np.int32)
            for shifts in [(0, 0), (np.array([0, 70]), 5), (64, np.array([63, 1]))]:
                check((2, 3, queries, keys), (("tiles", places, 64, 64, bits, *shifts),))


@pytest.mark.parametrize("size", [1, 2, 3, 63, 64, 65, 100, 1000, 2**62])
def test_chunks(isa, size):
    for q_shift, k_shift in [(0, 0), (5, 0), (0, 5), (np.array([0, 64, 1]), np.array([3, 0, 130]))]:
        check((3, 1, 130, 129), (("chunk", size, q_shift, k_shift),))


def test_keys(isa):
    edges = [-1, 0, 1, 63, 64, 65, 127, 128, 2**62]
    for begin, end in itertools.product(edges, edges):
        check((1, 1, 65, 128), (("keys", begin, end),))
    check((3, 2, 3, 70), (("keys", np.array([0, 5, 70]), np.array([70, 5, 3])),))


@pytest.mark.parametrize("q_lens", [[5], [0, 5], [5, 0, 0], [1, 63, 64], [64, 1, 0, 65], [0, 0], []], ids=str)
def test_sequences(isa, q_lens):
    """Keys have other lengths than queries; some sequences are empty, and some bounds are beyond both ends."""
    rng = np.random.default_rng(len(q_lens))
    q_starts = np.cumsum([0, *q_lens])
    far = [2**62, -(2**62), 0, -1, 1, 64]
    for k_lens in (q_lens, q_lens[::-1], [64] * len(q_lens), [0] * len(q_lens)):
        k_starts = np.cumsum([0, *k_lens])
        shape = (2, 1, int(q_starts[-1]), int(k_starts[-1]))
        limits = [None, rng.integers(-70, 70, len(q_lens)), rng.choice(far, len(q_lens))]
        for low, high in itertools.product(limits, limits):
            check(shape, (("sequences", q_starts, k_starts, low, high),))


@pytest.mark.parametrize(("queries", "keys"), list(itertools.product(LENGTHS, [1, 64, 129])))
def test_equal_ids(isa, queries, keys):
    rng = np.random.default_rng(queries * 1000 + keys)
    for q_lead, k_lead, exclude_zero in itertools.product(
        [(1,), (2,), (2, 3), (1, 3)], [(2,), (1, 1), (2, 3)], [False, True]
    ):
        for ids in range(4):
            high = [1, 2, 5, 2**31 - 1][ids]
            q_ids = rng.integers(-1, high, (*q_lead, queries), dtype=np.int32)
            k_ids = rng.integers(-1, high, (*k_lead, keys), dtype=np.int32)
            if ids % 2:
                q_ids.sort(-1)
                k_ids.sort(-1)
            check((2, 3, queries, keys), (("equal", q_ids, k_ids, exclude_zero),))


@pytest.mark.parametrize(
    "dtype",
    [bool, np.int8, np.uint16, np.int32, np.uint64, np.float16, ml_dtypes.bfloat16, np.float32, np.float64],
)
@pytest.mark.parametrize("density", [0, 0.001, 0.5, 1])
def test_dense(isa, dtype, density):
    rng = np.random.default_rng(7)
    for queries, keys in [(1, 1), (64, 64), (63, 129), (130, 70)]:
        whole = (rng.random((2, 3, queries + 9, keys + 5)) < density).astype(dtype)
        if whole.dtype.kind == "f":
            whole[whole == 0] = rng.choice([0.0, -0.0], int((whole == 0).sum()))
            whole[..., 3:4, 1:2] = np.nan
        views = [
            (whole[:, :, :queries, :keys], 0, 0),
            (whole[:1, :, :queries, :keys], 0, 0),
            (whole[:, :1, :queries, :keys], 0, 0),
            (whole[:, :, ::-1, ::-1], np.array([0, 9]), np.array([5, 1])),
            (whole, np.array([2, 3]), 4),
            (whole.transpose(0, 1, 3, 2).copy().transpose(0, 1, 3, 2)[:, :, :queries, :keys], 0, 0),
            (np.asfortranarray(whole)[:, :, :queries, :keys], 0, 0),
            (np.broadcast_to(whole[:, :, :1, :keys], (2, 3, queries, keys)), 0, 0),
            (whole[:, :, :queries, :1], 0, 0),
            (whole[:, :, :1, :1], 5, 5),
        ]
        for array, q_shift, k_shift in views:
            check((2, 3, queries, keys), (("dense", array, q_shift, k_shift),))


@st.composite
def expressions(draw):
    shape = (
        draw(st.integers(0, 3)),
        draw(st.integers(0, 3)),
        draw(st.sampled_from([0, 1, 5, 63, 64, 65, 130])),
        draw(st.sampled_from([0, 1, 5, 63, 64, 65, 130])),
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    batch, heads, queries, keys = shape

    def a_term():
        def each():
            return int(rng.integers(0, 9)) if rng.random() < 0.5 else rng.integers(0, 9, batch)

        kinds = ["all", "band", "diagonal", "chunk", "keys", "equal", "dense", "tiles", "sequences"]
        kind = draw(st.sampled_from(kinds))
        if kind in ("band", "diagonal"):
            low, high = (
                [None, int(rng.integers(-80, 80)), rng.integers(-80, 80, heads)][rng.integers(3)]
                for _ in range(2)
            )
            if kind == "band":
                return kind, low, high, each()
            lead = [(batch,), (1,), (batch, heads), (1, heads)][rng.integers(4)]
            at = rng.integers(-5, keys + 5, (*lead, queries), np.int32)
            return kind, low, high, each(), np.sort(at) if rng.random() < 0.5 else at
        if kind == "tiles":
            bits = rng.integers(0, 256, (2 if rng.random() < 0.5 else 0, 64, 8), np.uint8)
            size = (64, 64) if len(bits) else tuple(rng.integers(1, 200, 2).tolist())
            counts = [-(-(length + 9) // each) for length, each in zip((queries, keys), size, strict=True)]
            lead = (1 if rng.random() < 0.5 else batch, 1 if rng.random() < 0.5 else heads)
            places = rng.integers(0, 2 + len(bits), (*lead, *counts), np.int32)
            return kind, places, *size, bits, each(), each()
        if kind == "chunk":
            return (kind, int(rng.integers(1, 90)), each(), each())
        if kind == "keys":
            return (kind, each(), rng.integers(0, keys + 2, batch))
        if kind == "equal":
            lead = [(batch,), (1,), (batch, heads), (1, heads)][rng.integers(4)]
            ids = [np.sort(rng.integers(-1, 4, (*lead, n), dtype=np.int32)) for n in (queries, keys)]
            return (kind, *ids, bool(rng.integers(2)))
        if kind == "sequences":
            cuts = [np.sort(rng.integers(0, n + 1, 3)) for n in (queries, keys)]
            starts = [np.array([0, *cut, n]) for cut, n in zip(cuts, (queries, keys), strict=True)]
            return (kind, *starts, rng.integers(-80, 5, 4), rng.integers(-5, 80, 4))
        if kind == "dense":
            lead = (1 if rng.random() < 0.5 else batch, 1 if rng.random() < 0.5 else heads)
            size = (queries + 8, keys + 8) if rng.random() < 0.5 else (1, keys + 8)
            return (kind, rng.random((*lead, *size)) < rng.choice([0.0, 0.3, 1.0]), each(), each())
        return (kind,)

    def tree(depth):
        if depth == 0 or rng.random() < 0.2:
            return [a_term()]
        operator = draw(st.sampled_from(["not", "and", "or", "xor"]))
        if operator == "not":
            return [*tree(depth - 1), "not"]
        return [*tree(depth - 1), *tree(depth - 1), operator]

    return shape, tuple(tree(draw(st.integers(0, 4))))


@given(expressions())
def test_expressions(isa, case):
    check(*case)


@given(expressions(), st.integers(1, 150), st.integers(1, 150))
def test_grids(case, q_cell, k_cell):
    shape, nodes = case
    live = twin(shape, nodes)
    for b, h in itertools.product(range(shape[0]), range(shape[1])):
        got = _core.mask_grid(shape, nodes, b, h, q_cell, k_cell)
        if 0 in shape:
            assert got.size == 0
        else:
            np.testing.assert_array_equal(got, cells(live[b, h], q_cell, k_cell), str((case, q_cell, k_cell)))


def test_grid_of_keys_beyond_the_end():
    """A band that lies wholly beyond the last key has no live cell."""
    nodes = (("band", 900, 1000, 0),)
    assert not _core.mask_grid((1, 1, 64, 64), nodes, 0, 0, 7, 7).any()
    assert not _core.mask_count((1, 1, 64, 64), nodes).any()


@pytest.mark.parametrize(
    "dtype",
    [bool, np.int8, np.int16, np.int32, np.int64, np.float16, ml_dtypes.bfloat16, np.float32, np.float64],
)
def test_fills_any_type_and_strides(isa, dtype):
    rng = np.random.default_rng(3)
    shape = (2, 2, 70, 5000)
    ids = np.sort(rng.integers(0, 3, (2, 5000), dtype=np.int32))
    nodes = (
        ("equal", ids[:, ::71][:, :70].copy(), ids, False),
        ("dense", rng.random((1, 2, 70, 5000)) < 0.999, 0, 0),
        "and",
    )
    live = twin(shape, nodes)
    for on, off in [(True, False), (3, -2)]:
        dead = np.array(off).astype(dtype)
        expected = np.where(live, np.array(on).astype(dtype), dead)
        got = _core.mask_fill(shape, nodes, dtype, on, off, None)
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, expected)
        room = np.zeros((2, 2, 72, 5003, 2), dtype)
        for out in (
            room[:, :, :70, :5000, 0],
            room[:, :, 71:1:-1, 5002:2:-1, 1],
            np.zeros((5000, 70, 2, 2), dtype).T,
        ):
            assert _core.mask_fill(shape, nodes, dtype, on, off, out) is out
            np.testing.assert_array_equal(out, expected)
        assert not room[:, :, :2, :3, 1].any()
        assert not room[:, :, 70:, 5000:, 0].any()


def test_same_bits_for_any_number_of_threads(set_threads):
    rng = np.random.default_rng(5)
    shape = (2, 3, 700, 900)
    nodes = (("dense", rng.random((2, 1, 700, 900)) < 0.01, 0, 0), ("band", -90, 3, 0), "or")
    results = []
    for threads in (1, 2, 3, 8):
        set_threads(threads)
        both = _core.mask_fill(shape, nodes, np.float32, 0, -1, None), _core.mask_count(shape, nodes)
        results.append(tuple(array.tobytes() for array in both))
    assert len(set(results)) == 1


def ints(*shape, value=0, dtype=np.int32):
    return np.full(shape, value, dtype)


ONE, BITS = (1, 1, 2, 2), np.zeros((1, 64, 8), np.uint8)
NO_TILES = [
    (ints(1, 1, 1, 2), 64, 64, NO_BITS, 0, 0),  # a query too many
    (ints(1, 1, 2, 2), 64, 64, NO_BITS, 0, 59),  # or a key
    (ints(1, 1, 2, 2), 64, 64, NO_BITS, -1, 0), (ints(1, 1, 2, 2), 0, 64, NO_BITS, 0, 0),
    (ints(3, 1, 2, 2), 64, 64, NO_BITS, 0, 0), (ints(1, 3, 2, 2), 64, 64, NO_BITS, 0, 0),
    (ints(2, 2), 64, 64, NO_BITS, 0, 0), (ints(1, 1, 2, 2, value=2), 64, 64, NO_BITS, 0, 0),
    (ints(1, 1, 2, 2, value=-1), 64, 64, NO_BITS, 0, 0), (ints(1, 1, 2, 2, value=2), 64, 35, BITS, 0, 0),
    (ints(1, 1, 2, 2, value=2), 64, 64, BITS[..., :7], 0, 0), (ints(1, 1, 2, 2, value=3), 64, 64, BITS, 0, 0),
]  # fmt: skip
NO_SEQUENCES = [
    ([], [], [], []), ([1, 2], [0, 2], [0], [0]), ([0, 1], [0, 2], [0], [0]), ([0, 2], [0, 3], [0], [0]),
    ([0, 2], [0, 2, 2], [0], [0]), ([0, 3, 2], [0, 2, 2], [0, 0], [0, 0]), ([0, 2], [0, 2], [0, 0], [0]),
    ([0, 2], [0, 2], [0], [[0]]),
]  # fmt: skip
NO_MASKS = [
    *((ONE, nodes) for nodes in (
        (), (("all",), ("all",)), ("not",), (("all",), "and"), (("all",), "nand"), (("sphere",),), ((),), ((3,),),
        (("all",),) * 17 + ("and",) * 16,
    )),
    *((shape, (("all",),)) for shape in ((1, 1, -1, 2), (1, 1, 2**60, 2))),
    *((shape, (tuple(term),)) for shape, *term in (
        (ONE, "band", 0), (ONE, "chunk", 0, 0, 0), (ONE, "chunk", 2, -1, 0),
        ((2, 1, 2, 2), "band", 0, 0, ints(3, dtype=int)), ((2, 1, 2, 2), "band", 0, 0, ints(2, 1, dtype=int)),
        ((1, 2, 2, 2), "band", ints(3, dtype=int), 0, 0), ((1, 2, 2, 2), "band", 0, ints(2, 1, dtype=int), 0),
        (ONE, "diagonal", 0, 0, 0), ((1, 2, 2, 3), "diagonal", 0, 0, 0, ints(1, 3)),
        ((2, 2, 2, 2), "diagonal", 0, 0, 0, ints(1, 3, 2)),
        ((2, 2, 2, 2), "diagonal", 0, 0, ints(3, dtype=int), ints(1, 2)),
        *(((2, 1, 70, 70), "tiles", *parts) for parts in NO_TILES),
        (ONE, "equal", ints(1, 3), ints(1, 2), False), ((2, 1, 2, 2), "equal", ints(3, 2), ints(1, 2), False),
        (ONE, "equal", ints(2), ints(1, 2), False), (ONE, "dense", np.ones((2, 2)), 0, 0),
        (ONE, "dense", np.ones((1, 1, 2, 3)), 0, 2), (ONE, "dense", np.ones((1, 1, 2, 3)), 1, 0),
        ((1, 1, 3, 2), "dense", np.ones((1, 1, 2, 2)), 0, 0),
        *((ONE, "sequences", *map(np.array, parts)) for parts in NO_SEQUENCES),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "nodes"), NO_MASKS, ids=range(len(NO_MASKS)))
def test_descriptions_that_make_no_sense(shape, nodes):
    for call in (_core.mask_count, _core.mask_any):
        with pytest.raises(ValueError, match=r"must|an operator|unknown|shift|many|expression"):
            call(shape, nodes)


def test_long_masks_are_cheap():
    tokens = 131_072
    nodes = (("band", -4096, 0, 0),)
    assert _core.mask_count((1, 1, tokens, tokens), nodes)[0, 0] == sum(
        min(q, 4096) + 1 for q in range(tokens)
    )


def some_ids(rng, shape):
    """In order or not, with runs of one token or several, of few or many ids."""
    ids = rng.choice(
        [[-(2**31), -2, -1, 0, 1, 255], [0, 1, 2, 256, 2**16, 2**31 - 1]][rng.integers(2)], shape
    )
    ids = [ids, np.sort(ids), np.repeat(ids, 5, axis=-1)[..., : shape[-1]]][rng.integers(3)].astype(np.int32)
    return np.ascontiguousarray(ids[..., ::-1])[..., ::-1] if rng.random() < 0.2 else ids


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("seed", range(100))
def test_numbers_of_tokens(seed, threads, set_threads):
    set_threads(threads)
    rng = np.random.default_rng(seed)
    batch, heads, *tokens = (int(rng.choice(sizes)) for sizes in ([0, 1, 3], [0, 1, 2], *2 * [[0, 1, 9, 90]]))
    leads = [[(batch,), (batch, 1), (batch, heads), (1, heads)][kind] for kind in rng.integers(4, size=2)]
    q_ids, kv_ids = (some_ids(rng, (*lead, count)) for lead, count in zip(leads, tokens, strict=True))
    size = int(rng.choice([1, 2, 7, 64, 2**31, 2**62]))
    q_rows, kv_rows = (
        ids[:, None] if ids.ndim == 2 and max(map(len, leads)) == 2 else ids for ids in (q_ids, kv_ids)
    )
    rows = np.broadcast_shapes(q_rows.shape[:-1], kv_rows.shape[:-1])
    shifts = rng.choice([0, 1, -3, 60, 2**59, -(2**59)], rows[0] if rng.random() < 0.5 else 1)
    expected = [np.empty((*rows, tokens[side]), np.int32) for side in (0, 0, 0, 0, 1)]
    q_rows, kv_rows = (np.broadcast_to(ids, (*rows, ids.shape[-1])) for ids in (q_rows, kv_rows))
    for row in np.ndindex(rows):
        shift = int(shifts[row[0] % len(shifts)])
        found = numbers_of_tokens(q_rows[row].tolist(), kv_rows[row].tolist(), size, shift)
        for array, numbers in zip(expected, found, strict=True):
            array[row] = numbers
    aligned = [_core.queries_among_keys(q_ids, kv_ids, last) for last in (False, True)]
    still = np.broadcast_to(np.arange(tokens[0], dtype=np.int32), expected[1].shape)
    for found, positions in zip(aligned, expected[1:3], strict=True):
        assert (found is None) == np.array_equal(positions, still)
        np.testing.assert_array_equal(still if found is None else found, positions, strict=True)
    earlier = _core.count_earlier_tokens(q_ids)
    assert earlier.shape == q_ids.shape
    wide = np.broadcast_to(
        earlier.reshape(*q_ids.shape[:1], *(1,) * (len(rows) + 1 - q_ids.ndim), *q_ids.shape[1:]),
        expected[0].shape,
    )
    np.testing.assert_array_equal(wide, expected[0], strict=True)
    for found, chunks in zip(
        _core.chunks_of_segments(q_ids, kv_ids, size, shifts), expected[3:], strict=True
    ):
        np.testing.assert_array_equal(found, chunks, strict=True)


def test_chunks_of_the_same_ids_are_one_array():
    ids = np.array([[0, 0, 0, 2, 2, -1, 0]], np.int32)
    chunks, same = _core.chunks_of_segments(ids, None, 2, np.zeros(1, np.int64))
    assert chunks is same
    np.testing.assert_array_equal(chunks, [[1, 1, 2, 3, 3, -1, 1]])


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((np.zeros((1, 2)), None, 1, np.zeros(1, np.int64)), TypeError, "q_ids must be an array of integers"),
        ((np.zeros((1, 2), np.int64), None, 1, np.zeros(1, np.int64)), TypeError, "q_ids must be an array of int32"),
        ((np.zeros((2, 2), np.int32), np.zeros((3, 2), np.int32), 1, np.zeros(1, np.int64)), ValueError, "rows as q"),
        ((np.zeros((2, 2), np.int32), None, 1, np.zeros(3, np.int64)), ValueError, "shifts must be int64 of shape"),
        ((np.zeros((2, 2), np.int32), None, 1, np.zeros(2)), ValueError, "shifts must be int64 of shape"),
        ((np.zeros((2, 2), np.int32), None, 0, np.zeros(1, np.int64)), ValueError, "size must be"),
    ],
)  # fmt: skip
def test_ids_without_numbers(arguments, error, words):
    with pytest.raises(error, match=words):
        _core.chunks_of_segments(*arguments)
