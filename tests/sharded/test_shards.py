"""A sequence divided among processes: what each has, what comes back, what is refused, and how even plans are."""

import pickle

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shard_layouts import layouts

from attnmask import MaskInfo, ShardPlan, plan_shards, shard_sequence, unshard_sequence

WORLDS = st.integers(1, 6)


@given(st.data(), st.integers(0, 40), WORLDS)
def test_unsharding_gives_the_sequence_back(data, length, world):
    """Of arrays of one to five axes, whose tokens each process keeps in order."""
    layout, cu_seqlens = data.draw(layouts(length, world))
    for shape, axis in (
        ((length,), None), ((2, length), None), ((2, length, 3), 1), ((2, length, 1, 3), None),
        ((1, length, 1, 1, 2), None), ((length, 2, 3), 0), ((2, length), 1), ((2, 3, length), -1), ((length,), -1),
    ):  # fmt: skip
        x = np.arange(np.prod(shape)).reshape(shape)
        shards = [shard_sequence(x, world, rank, layout, cu_seqlens, axis=axis) for rank in range(world)]
        np.testing.assert_array_equal(unshard_sequence(shards, layout, cu_seqlens, axis=axis), x)
        assert all(shard.flags.c_contiguous and not np.shares_memory(shard, x) for shard in shards)
    tokens = [shard_sequence(np.arange(length), world, rank, layout, cu_seqlens) for rank in range(world)]
    assert all((np.diff(mine) > 0).all() for mine in tokens)
    if isinstance(layout, ShardPlan):
        np.testing.assert_array_equal(layout.lengths, [len(mine) for mine in tokens])


@given(st.data(), WORLDS)
def test_chunks_are_where_they_are_said_to_be(data, world):
    """Token by token, in each sequence by itself."""
    lengths = data.draw(st.lists(st.integers(0, 30), max_size=4))
    cu_seqlens = np.cumsum([0, *lengths])
    for layout in ("zigzag", "contiguous"):
        owners = np.zeros(cu_seqlens[-1], int)
        for start, length in zip(cu_seqlens, lengths, strict=False):
            count = 2 * world if layout == "zigzag" else world
            for i in range(count):
                chunk = slice(start + length * i // count, start + length * (i + 1) // count)
                owners[chunk] = min(i, 2 * world - 1 - i) if layout == "zigzag" else i
        for rank in range(world):
            mine = shard_sequence(np.arange(cu_seqlens[-1]), world, rank, layout, cu_seqlens)
            np.testing.assert_array_equal(mine, np.flatnonzero(owners == rank))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.int8, bool, "S3", ">i4"])
def test_any_type(dtype):
    x = np.arange(14).astype(dtype)
    shards = [shard_sequence(x, 3, rank) for rank in range(3)]
    np.testing.assert_array_equal(unshard_sequence(shards), x)


def test_lists_and_strides():
    assert shard_sequence([5, 6, 7, 8], 2, 0).tolist() == [5, 8]
    x = np.arange(48).reshape(2, 3, 8).swapaxes(1, 2)[:, ::-1]
    np.testing.assert_array_equal(
        unshard_sequence([shard_sequence(x, 2, r, "contiguous") for r in (0, 1)], "contiguous"), x
    )


def test_embeddings_are_divided_along_their_tokens():
    """Arrays of three axes as all others along the second one; packed ones along the first if that is said."""
    x = np.arange(48).reshape(2, 8, 3)
    np.testing.assert_array_equal(shard_sequence(x, 2, 0), x[:, [0, 1, 6, 7]])
    np.testing.assert_array_equal(shard_sequence(x[0], 2, 1, axis=0), x[0, 2:6])
    np.testing.assert_array_equal(
        unshard_sequence([shard_sequence(x, 2, rank, axis=-2) for rank in range(2)], axis=-2), x
    )


def test_tensors():
    torch = pytest.importorskip("torch")
    x = torch.arange(24.0).reshape(1, 12, 2, 1).to(torch.bfloat16).requires_grad_()
    shards = [shard_sequence(x, 2, rank) for rank in range(2)]
    assert all(isinstance(shard, torch.Tensor) and shard.dtype == torch.bfloat16 for shard in shards)
    whole = unshard_sequence(shards)
    assert torch.equal(whole, x)
    (whole * x.detach()).sum().backward()
    assert torch.equal(x.grad, x.detach())
    packed = x.detach()[0]
    assert torch.equal(shard_sequence(packed, 2, 1, axis=0), packed[3:9])
    assert torch.equal(shard_sequence(x.detach()[..., 0], 2, 1), packed[None, 3:9, :, 0])


def test_jax_arrays():
    jax = pytest.importorskip("jax")
    x = jax.numpy.arange(24).reshape(2, 12)
    shards = [shard_sequence(x, 2, rank, cu_seqlens=[0, 5, 12]) for rank in range(2)]
    assert all(isinstance(shard, jax.Array) for shard in shards)
    np.testing.assert_array_equal(shard_sequence(x.T[..., None], 2, 1, axis=0), x.T[3:9, :, None])
    np.testing.assert_array_equal(unshard_sequence(shards, cu_seqlens=[0, 5, 12]), x)
    np.testing.assert_array_equal(jax.jit(lambda x: shard_sequence(x, 2, 1))(x), shard_sequence(x, 2, 1))


def shard(x=range(8), world=2, rank=0, *layout, **more):
    return shard_sequence(x, world, rank, *layout, **more)


ONE, TOKENS = MaskInfo.from_segments([[0]]), MaskInfo.from_segments([[0] * 8])
BAD = [
    (ValueError, "world must be at least 1, got 0", lambda: shard(world=0)),
    (IndexError, "rank must be from 0 to 1, got 2", lambda: shard(rank=2)),
    (IndexError, "rank must be from 0 to 1, got -1", lambda: shard(rank=-1)),
    (ValueError, "layout must be one of 'zigzag', 'contiguous', got 'ring'", lambda: shard(layout="ring")),
    (ValueError, "layout must be a plan for 2 pro.*, got one for 3", lambda: shard(layout=ShardPlan([0, 8], [0], 3))),
    (ValueError, "layout must be a plan for 8 tokens, .* for 7", lambda: shard(layout=ShardPlan([0, 7], [0], 2))),
    (ValueError, r"x must have an axis of tokens, got int64 array of shape \(\)", lambda: shard(3)),
    (ValueError, r"write mask\[:, :, begin:end, :\]", lambda: shard(TOKENS)),
    (ValueError, "world must be at most 1048576 processes, got 1152921504606846976", lambda: shard(world=2**60)),
    (IndexError, "axis must be from -1 to 0 as x has 1, got 1", lambda: shard(axis=1)),
    (IndexError, "axis must be from -3 to 2 as x has 3, got -4", lambda: shard(np.zeros((1, 8, 2)), axis=-4)),
    (ValueError, "shards must hold one array per process, got none", lambda: unshard_sequence([])),
    (ValueError, r"shards\[0\] must have 2 tokens", lambda: unshard_sequence([np.arange(1), np.arange(3)])),
    *(
        (ValueError, r"shards\[1\] must be a int64 array like shards\[0\]", lambda pair=pair: unshard_sequence(pair))
        for pair in (
            [np.arange(2), np.arange(2.0)],
            [np.zeros((1, 2), int), np.zeros((2, 2), int)],
            [np.zeros((1, 2), int), np.zeros(1, int)],
        )
    ),
    (ValueError, r"shards\[1\] must be a int64 array like shards\[0\]",
     lambda: unshard_sequence([np.zeros((2, 2), int), np.zeros((2, 3), int)], axis=0)),
    (IndexError, r"axis must be from", lambda: unshard_sequence([np.arange(2), np.arange(2)], axis=2)),
    (ValueError, "starts must start at 0", lambda: ShardPlan([1, 2], [0], 1)),
    (ValueError, "owners must be from 0 to 1, got 2 at index 1", lambda: ShardPlan([0, 2, 3], [0, 2], 2)),
    (ValueError, "world must be at least 1, got 0", lambda: ShardPlan([0], [], 0)),
    (ValueError, "world must be at most 1048576 processes", lambda: ShardPlan([0], [], 2**63)),
    (ValueError, "cannot plan shards", lambda: plan_shards(MaskInfo(), 2)),
    (ValueError, "mask must have as many", lambda: plan_shards(MaskInfo.from_segments([[0]], [[0, 0]]), 2)),
    (ValueError, "world must be at least 1, got 0", lambda: plan_shards(ONE, 0)),
    (ValueError, "world must be at most 1048576 processes", lambda: plan_shards(ONE, 2**64 - 1)),
]  # fmt: skip


@pytest.mark.parametrize(("error", "words", "call"), BAD, ids=range(len(BAD)))
def test_errors(error, words, call):
    with pytest.raises(error, match=words):
        call()


def test_plans_are_read_only_copies():
    starts = np.array([0, 3, 9])
    plan = ShardPlan(starts, [1, 0], 2)
    starts[1] = 5
    assert plan.starts.tolist() == [0, 3, 9]
    assert not plan.starts.flags.writeable
    assert not plan.owners.flags.writeable
    with pytest.raises(IndexError, match="rank must be from 0 to 1, got 2"):
        plan.tokens(2)


def live_pairs(mask: MaskInfo, plan: ShardPlan) -> np.ndarray:
    rows = np.concatenate([[0], np.cumsum(mask.attention_mask.sum(axis=(0, 1, 3)))])
    return np.array(
        [sum(rows[end] - rows[begin] for begin, end in plan.ranges(r)) for r in range(plan.world)]
    )


@given(st.lists(st.integers(1, 300), min_size=3, max_size=12), st.integers(1, 4), st.booleans())
def test_plans_are_even(lengths, world, causal):
    """No process has much more than the mean and one piece, an eighth of a shard, of which the last one under a causal
    mask has twice the pairs.
    """
    mask = MaskInfo.from_cu_seqlens(np.cumsum([0, *lengths]), packed=True)
    mask = mask.apply_causal() if causal else mask
    plan = plan_shards(mask, world)
    assert plan.length == sum(lengths)
    pairs = live_pairs(mask, plan)
    lengths_squared = np.square(np.array(lengths, float))
    largest = max(lengths_squared / np.maximum(1, np.ceil(np.array(lengths) * 8 * world / sum(lengths)))) * 2
    assert plan.lengths.max() <= 1.5 * sum(lengths) / world + 1
    assert pairs.max() <= 1.5 * pairs.sum() / world + largest


def test_plans_of_short_documents_keep_them_whole():
    rng = np.random.default_rng(0)
    lengths = rng.integers(20, 100, 400)
    mask = MaskInfo.from_cu_seqlens(np.cumsum([0, *lengths]), packed=True).apply_causal()
    plan = plan_shards(mask, 4)
    pairs = live_pairs(mask, plan)
    assert pairs.mean() / pairs.max() > 0.99
    assert plan.lengths.mean() / plan.lengths.max() > 0.99
    starts = np.cumsum([0, *lengths])
    assert {int(begin) for rank in range(4) for begin in plan.ranges(rank)[:, 0]} <= set(starts.tolist())


def test_plans_of_nothing():
    assert plan_shards(MaskInfo.from_segments(np.zeros((1, 0), int)), 3).lengths.tolist() == [0, 0, 0]
    assert plan_shards(MaskInfo.from_segments([[-1] * 6]), 2).lengths.tolist() == [3, 3]


def test_pickles_of_plans():
    plan = ShardPlan([0, 3, 4, 9], [1, 0, 1], world=2)
    made = pickle.loads(pickle.dumps(plan))
    assert (made.starts.tolist(), made.owners.tolist(), made.world) == ([0, 3, 4, 9], [1, 0, 1], 2)
    assert not made.starts.flags.writeable
    with pytest.raises(ValueError, match="owners must be from 0 to 1, got 2 at index 0"):
        made.__setstate__(plan.__getstate__() | {"owners": [2, 0, 1]})
