"""Ring attention without a framework: what is computed and sent is what the mask says, each live pair once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shard_layouts import layouts

import attnmask
from attnmask import MaskInfo, flash_attention
from attnmask._sharded.plan import places_in
from attnmask._sharded.ring import Conditions, ring_of


def pairs_of(arguments, queries, keys):
    """The pairs that a call of attention with these arguments takes as live."""
    q, k = np.zeros((1, queries, 1, 1)), np.zeros((1, keys, 1, 1))
    return flash_attention(q, k, np.eye(keys)[None, :, None], **arguments)[0, :, 0] > 0


def places_of_keys(ring, queries, keys):
    return ring.shards.tokens(keys) if queries == keys else places_in(ring.sent(queries, keys))


@st.composite
def problems(draw):
    length, world = draw(st.integers(0, 40)), draw(st.integers(1, 5))
    layout, cu_seqlens = draw(layouts(length, world))
    low = draw(st.sampled_from([None, 0, -1, -3, -12]))
    high = draw(st.sampled_from([None, 0, 0, 2, 9]))
    return length, world, layout, cu_seqlens, low, high


def expected(length, cu_seqlens, low, high):
    starts = [0, length] if cu_seqlens is None else cu_seqlens
    document = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    distance = np.arange(length) - np.arange(length)[:, None]
    near = (distance >= -length if low is None else distance >= low) & (
        distance <= (length if high is None else high)
    )
    return (document[:, None] == document) & near


def pairs_are_those_of_parts(ring, queries, keys, whole, count):
    """Whether keys that come in parts have the same live pairs."""
    tokens, step = len(ring.shards.tokens(queries)), 5
    live = np.zeros((2, tokens, count), int)
    for call in whole:
        q, k = (slice(x.start, x.stop) for x in (call.queries, call.keys))
        live[0, q, k] += pairs_of(call.arguments, q.stop - q.start, k.stop - k.start)
    for begin in range(0, count, step):
        part = slice(begin, min(begin + step, count))
        for call in ring.calls(queries, keys, 1, part):
            k = slice(call.keys.start + begin, call.keys.stop + begin)
            live[1, call.queries, k] += pairs_of(
                call.arguments, call.queries.stop - call.queries.start, k.stop - k.start
            )
    return (live[0] == live[1]).all()


def computed(ring, rows=1):
    """How often each pair of each row is computed; and it is checked what is sent."""
    length = ring.shards.length
    count = np.zeros((rows, length, length), int)
    for queries in range(ring.shards.world):
        mine = ring.shards.tokens(queries)
        for keys in range(ring.shards.world):
            theirs = places_of_keys(ring, queries, keys)
            whole = ring.calls(queries, keys, rows)
            assert (
                rows > 1 or whole == [] or pairs_are_those_of_parts(ring, queries, keys, whole, len(theirs))
            )
            for call in (block for of_round in whole for block in of_round.in_blocks(7)):
                row_of_q, row_of_k = (np.repeat(np.arange(rows), len(x)) for x in (mine, theirs))
                q, k = np.tile(mine, rows)[call.queries], np.tile(theirs, rows)[call.keys]
                live = pairs_of(call.arguments, len(q), len(k))
                for_row = row_of_q[call.queries][:, None]
                assert not live[for_row != row_of_k[call.keys]].any()
                np.add.at(count, (for_row, q[:, None], k), live)
            if queries != keys:
                np.testing.assert_array_equal(
                    ring.shards.tokens(keys)[places_in(ring.sent_places(queries, keys))], theirs
                )
    return count


@given(
    problems(),
    st.booleans(),
    st.integers(1, 3),
    st.integers(0, 2**32 - 1),
    st.sampled_from([None, 0.0, 0.02, 0.5]),
)
def test_each_live_pair_is_computed_once(problem, by_distance, rows, seed, density):
    """Of what the arguments say, or of a mask of all pairs as well."""
    length, world, layout, cu_seqlens, low, high = problem
    live, mask = expected(length, cu_seqlens, low, high), None
    if density is not None:
        array = np.random.default_rng(seed).random((1, 1, length, length)) < density
        mask, by_distance, rows = MaskInfo.from_attention_mask(array), False, 1
        live &= array[0, 0]
    conditions = Conditions(low, high, by_distance, mask is not None)
    ring = ring_of(layout, length, world, cu_seqlens, mask, conditions)
    np.testing.assert_array_equal(computed(ring, rows), np.broadcast_to(live, (rows, length, length)))
    for queries in range(world):
        for keys in range(world):
            part = live[np.ix_(ring.shards.tokens(queries), ring.shards.tokens(keys))]
            assert ring.live_pairs(queries, keys) == part.sum()
            sent = set(places_in(ring.sent(queries, keys)).tolist())
            assert set(ring.shards.tokens(keys)[part.any(axis=0)].tolist()) <= sent
            assert bool(sent) == bool(part.any())


@given(problems())
def test_nothing_dead_is_sent(problem):
    """Every key that is sent has a live pair with a query of the one who gets it."""
    length, world, layout, cu_seqlens, low, high = problem
    ring = ring_of(layout, length, world, cu_seqlens, None, Conditions(low, high, False, False))
    live = expected(length, cu_seqlens, low, high)
    for queries in range(world):
        for keys in range(world):
            seen = live[np.ix_(ring.shards.tokens(queries), ring.shards.tokens(keys))].any(axis=0)
            np.testing.assert_array_equal(places_in(ring.sent(queries, keys)), ring.shards.tokens(keys)[seen])


@given(problems())
def test_distances_are_those_of_the_sequence(problem):
    """A bias by distance, which the offsets of calls have to leave as it is."""
    length, world, layout, cu_seqlens, low, high = problem
    ring = ring_of(layout, length, world, cu_seqlens, None, Conditions(low, high, True, False))
    bias = np.arange(2 * length + 1)[None] / 7.0
    for queries in range(world):
        mine = ring.shards.tokens(queries)
        for keys in range(world):
            theirs = places_of_keys(ring, queries, keys)
            for call in ring.calls(queries, keys):
                q, k = mine[call.queries], theirs[call.keys]
                x, y = np.zeros((1, len(q), 1, 1)), np.zeros((1, len(k), 1, 1))
                arguments = call.arguments | {"relative_bias": bias, "relative_low": -length}
                out = flash_attention(x, y, np.eye(len(k))[None, :, None], **arguments)[0, :, 0]
                weights = np.exp((k - q[:, None] + length) / 7.0) * (out > 0)
                total = weights.sum(axis=1, keepdims=True)
                np.testing.assert_allclose(out, weights / np.where(total == 0, 1, total), atol=1e-12)


def test_rounds_of_usual_masks_are_one_call():
    """Causal and full masks, of one sequence and of many, with zigzag shards."""
    for cu_seqlens in (None, np.array([0, 100, 250, 640])):
        for high in (None, 0):
            ring = ring_of("zigzag", 640, 4, cu_seqlens, None, Conditions(None, high, False, False))
            assert {len(ring.calls(queries, keys, 2)) for queries in range(4) for keys in range(4)} == {1}


def test_zigzag_is_even_and_sends_a_quarter_less():
    ring = ring_of("zigzag", 6400, 8, None, None, Conditions(None, 0, False, False))
    pairs = [sum(ring.live_pairs(queries, keys) for keys in range(8)) for queries in range(8)]
    assert min(pairs) == max(pairs)
    sent = [len(places_in(ring.sent(q, k))) for q in range(8) for k in range(8) if q != k]
    assert sum(sent) == 0.75 * 8 * 7 * 800


def test_a_window_reaches_neighbours_only():
    ring = ring_of("contiguous", 6400, 8, None, None, Conditions(-99, 0, False, False))
    for queries in range(8):
        for keys in range(8):
            count = len(places_in(ring.sent(queries, keys)))
            assert count == (800 if queries == keys else 99 if keys == queries - 1 else 0)


def test_plans_are_kept():
    mask = MaskInfo.from_segments([[0] * 8])
    conditions = Conditions(None, 0, False, False)
    for of in (None, mask):
        assert ring_of("zigzag", 8, 2, None, of, conditions) is ring_of("zigzag", 8, 2, None, of, conditions)
    assert "rings" not in repr(MaskInfo.from_segments([[0] * 8]))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_whole_documents_are_not_sent(world):
    lengths = np.random.default_rng(0).integers(20, 60, 200)
    starts = np.cumsum([0, *lengths])
    plan = attnmask.plan_shards(MaskInfo.from_cu_seqlens(starts, packed=True).apply_causal(), world)
    ring = ring_of(plan, int(starts[-1]), world, starts, None, Conditions(None, 0, False, False))
    others = [(q, k) for q in range(world) for k in range(world) if q != k]
    assert not any(len(ring.sent(queries, keys)) for queries, keys in others)
