"""A process whose devices share a sequence: ``jax_ring_worker.py world scenario [port rank]``; it says "done"."""

import os
import sys

WORLD, SCENARIO, *SHARED = sys.argv[1:]
WORLD, PROCESSES = int(WORLD), 2 if SHARED else 1
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={WORLD // PROCESSES}"
os.environ["JAX_PLATFORMS"] = "cpu"
if SHARED:
    os.environ["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"

import itertools  # noqa: E402
import re  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from ring_cases import LEARNED, SINKS, ring_cases, sizes  # noqa: E402

import attnmask  # noqa: E402
import attnmask.jax  # noqa: E402
from attnmask import MaskInfo, ShardPlan  # noqa: E402

TOKENS, STATS = P("batch", "ring"), P("batch", None, "ring")


def mesh_of(rows=1):
    return jax.make_mesh((rows, WORLD // rows), ("batch", "ring"), axis_types=(AxisType.Auto,) * 2)


def check(
    length, layout="zigzag", cu_seqlens=None, batch=1, heads=(4, 2), dtype="float32", mesh=None, **options
):
    """The ring's results and gradients are those of one device."""
    mesh = mesh_of() if mesh is None else mesh
    world = mesh.shape["ring"]
    rng = np.random.default_rng(length)
    query, key, value, dout = (
        rng.standard_normal((batch, length, *shape)).astype(jnp.dtype(dtype))
        for shape in ((heads[0], 16), (heads[1], 16), (heads[1], 8), (heads[0], 8))
    )
    dlse = rng.standard_normal((batch, heads[0], length)).astype(
        "float64" if dtype == "float64" else "float32"
    )
    learned = {name: options.pop(name) for name in LEARNED if name in options}
    plan = plan_of(layout, length, world, cu_seqlens) if isinstance(layout, str) else layout
    order = np.concatenate([plan.tokens(rank) for rank in range(world)])

    def loss(attend, query, key, value, learned, dout, dlse):
        out, lse = attend(query, key, value, return_lse=True, **options, **learned)
        assert out.dtype == dtype
        wide = out.astype(dlse.dtype) * dout.astype(dlse.dtype)
        return wide.sum() + (jnp.where(jnp.isfinite(lse), lse, 0.0) * dlse).sum(), (out, lse)

    def whole(*given):
        starts = {} if cu_seqlens is None else {"cum_seqlens_q": cu_seqlens}
        return loss(lambda *x, **more: attnmask.jax.flash_attention(*x, **more, **starts), *given)

    def local(*given):
        def attend(*x, **more):
            return attnmask.jax.ring_attention(
                *x, axis_name="ring", layout=layout, cu_seqlens=cu_seqlens, **more
            )

        total, results = loss(attend, *given)
        return jax.lax.psum(total, ("batch", "ring")), results

    def gradients(function):
        return jax.jit(jax.value_and_grad(function, argnums=(0, 1, 2, 3), has_aux=True))

    def placed(x, spec):
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])

    (_, results), grads = gradients(whole)(query, key, value, learned, dout, dlse)
    specs = [*[TOKENS] * 3, P(), TOKENS, STATS]
    ring = jax.shard_map(local, mesh=mesh, in_specs=tuple(specs), out_specs=(P(), (TOKENS, STATS)))
    tensors = [placed(x[:, order], TOKENS) for x in (query, key, value)]
    mine = placed(dout[:, order], TOKENS), placed(dlse[:, :, order], STATS)
    given = jax.tree.map(lambda x: placed(np.asarray(x), P()), learned)
    (_, (out, lse)), my_grads = gradients(ring)(*tensors, given, *mine)

    near, grads_near = sizes(dtype)
    compare(out, np.asarray(results[0])[:, order], near)
    compare(lse, np.asarray(results[1])[:, :, order], near)
    for x, right in zip(my_grads[:3], grads[:3], strict=True):
        compare(x, np.asarray(right)[:, order], grads_near)
    for name, right in grads[3].items():
        compare(my_grads[3][name], np.asarray(right), 10 * grads_near)


def compare(got, right, near):
    """Those parts that this process has."""
    for shard in got.addressable_shards:
        a, b = (np.asarray(x, np.float64) for x in (shard.data, right[shard.index]))
        np.testing.assert_allclose(a, b, atol=near, rtol=near)


def plan_of(layout, length, world, cu_seqlens):
    """The layouts of `shard_sequence`, by their definition."""
    cu_seqlens = [0, length] if cu_seqlens is None else list(cu_seqlens)
    chunks = world if layout == "contiguous" else 2 * world
    starts, owners = [0], []
    for begin, end in itertools.pairwise(cu_seqlens):
        for i in range(chunks):
            starts.append(begin + (end - begin) * (i + 1) // chunks)
            owners.append(i if i < world else 2 * world - 1 - i)
    return ShardPlan(starts, owners, world)


def random_plan(length, world):
    """Chunks of any lengths in any order, as many tokens for each device."""
    rng = np.random.default_rng(length)
    chunks = np.arange(0, length + 1, length // (6 * world))
    return ShardPlan(chunks, rng.permutation(np.repeat(np.arange(world), 6)), world)


def same():
    length, layouts = 144, ("zigzag", "contiguous", random_plan(144, WORLD))
    for index, case in enumerate(ring_cases(length, np.array([0, 40, 40, 48, 104, length]))):
        with jax.enable_x64(case.get("dtype") == "float64"):
            check(length, layouts[index % 3], **case)


def edges():
    length = 144
    dead = MaskInfo.from_segments(np.repeat([-1, 0], [72, 72])[None])  # the first device has no live pair
    check(length, "contiguous", attention_mask=dead, softmax_aux=SINKS)
    check(length, mesh=mesh_of(2), batch=2, causal=True, softmax_aux=SINKS)
    garbage()
    padded()
    seeds()


def shared():
    """What is left to try where devices are those of two processes."""
    check(144, causal=True, batch=2, softmax_aux=SINKS)
    check(144, "contiguous", sliding_window=(20, 0), cu_seqlens=np.array([0, 40, 144]))
    check(144, attention_mask=MaskInfo.from_random(1, 144, sparsity=0.7, seed=3))


def mapped(function, tensors=3, more=(), out=TOKENS):
    return jax.jit(
        jax.shard_map(function, mesh=mesh_of(), in_specs=(TOKENS,) * tensors + more, out_specs=out)
    )


def garbage():
    """NaN in padding and in the future reaches nothing."""
    ids = np.repeat([0, -1], [56, 24])[None]
    order = np.concatenate([plan_of("zigzag", 80, WORLD, None).tokens(rank) for rank in range(WORLD)])
    x = np.where(ids == 0, 1, np.nan)[..., None, None] * np.ones((1, 80, 2, 8), np.float32)
    attend = mapped(
        lambda q, k, v: attnmask.jax.ring_attention(q, k, v, axis_name="ring", causal=True, q_segment_ids=ids)
    )
    live = (ids == 0)[:, order]
    grad = jax.grad(lambda x: jnp.where(live[..., None, None], attend(x, x, x), 0.0).sum())(x[:, order])
    assert np.isfinite(np.asarray(attend(*[x[:, order]] * 3))).all()
    assert np.isfinite(np.asarray(grad)).all()


def padded():
    """Devices have as many tokens each, so a length that they cannot share evenly is padded: as if it were not."""
    length, total = 10 * WORLD + 3, 12 * WORLD
    documents = np.repeat([0, 1], [7, length - 7])[None]
    ids = np.pad(documents, ((0, 0), (0, total - length)), constant_values=-1)
    x = np.random.default_rng(1).standard_normal((2, 1, length, 2, 8)).astype(np.float32)
    order = np.concatenate([attnmask.shard_sequence(np.arange(total), WORLD, r) for r in range(WORLD)])
    attend = mapped(
        lambda q, k, v: attnmask.jax.ring_attention(q, k, v, axis_name="ring", causal=True, q_segment_ids=ids)
    )

    def ring(q, k):
        q, k = (jnp.pad(a, ((0, 0), (0, total - length), (0, 0), (0, 0)))[:, order] for a in (q, k))
        return attend(q, k, k)[:, np.argsort(order)[:length]]

    def whole(q, k):
        return attnmask.jax.flash_attention(q, k, k, causal=True, q_segment_ids=documents)

    out, pull = jax.vjp(ring, *x)
    right, pull_right = jax.vjp(whole, *x)
    np.testing.assert_allclose(out, right, atol=2e-6)
    for gradient, expected in zip(pull(x[0]), pull_right(x[0]), strict=True):
        np.testing.assert_allclose(gradient, expected, atol=2e-5)


def seeds():
    """One compiled function for all seeds."""
    x = np.random.default_rng(0).random((1, 16 * WORLD, 2, 8)).astype(np.float32)

    def local(x, seed):
        more = {"axis_name": "ring", "layout": "contiguous", "dropout_prob": 0.5, "dropout_seed": seed}
        return attnmask.jax.ring_attention(x, x, x, **more)

    attend = mapped(local, 1, (P(),))
    for seed in (1, 2):
        right = attnmask.flash_attention(x, x, x, dropout_prob=0.5, dropout_seed=seed)
        np.testing.assert_allclose(attend(x, seed), right, atol=2e-6)
    assert attend._cache_size() == 1


def messages():
    """What travels: nothing where documents end with shards, and under a window the edges of shards."""
    x = np.ones((1, 64 * WORLD, 2, 8), np.float32)

    def text(**more):
        attend = mapped(lambda q, k, v: attnmask.jax.ring_attention(q, k, v, axis_name="ring", **more))
        return attend.lower(x, x, x).as_text()

    def sent(text):
        return re.findall(r"collective_permute.*?: \(tensor<1x(\d+)x", text)

    starts = np.arange(WORLD + 1) * 64
    assert sent(text(layout=ShardPlan(starts, range(WORLD), WORLD), cu_seqlens=starts, causal=True)) == []
    assert sent(text(layout="contiguous", sliding_window=(10, 0))) == ["10", "10"]
    assert sent(text(layout="contiguous", causal=True)) == ["64"] * 2 * (WORLD - 1)
    assert sent(text()) == ["64"] * 2 * (WORLD - 1)


def memory():
    """Keys and gradients of one round at a time, or of two: what all rounds have would be twice as many shards."""
    x = np.zeros((1, 512 * WORLD, 4, 64), np.float32)
    attend = mapped(lambda q, k, v: attnmask.jax.ring_attention(q, k, v, axis_name="ring", causal=True))
    gradients = jax.jit(jax.grad(lambda *x: (attend(*x) ** 2).sum(), argnums=(0, 1, 2)))
    shards = [
        function.lower(x, x, x).compile().memory_analysis().temp_size_in_bytes / (x.nbytes / WORLD)
        for function in (attend, gradients)
    ]
    assert shards[0] < 10, shards
    assert shards[1] < 19, shards


def errors():
    length = 8 * WORLD
    x = np.zeros((2, length, 4, 16), np.float32)

    def refused(words, kind=ValueError, key=x, **change):
        attend = mapped(
            lambda q, k, v: attnmask.jax.ring_attention(q, k, v, **{"axis_name": "ring"} | change)
        )
        with pytest.raises(kind, match=re.escape(words)):
            attend(x, key, key)

    refused("axis_name must be an axis of the mesh of jax.shard_map, got 'x'", axis_name="x")
    refused("layout must be one of", layout="spiral")
    refused(f"layout must be a plan for {WORLD} processes", layout=ShardPlan([0, length], [0], WORLD + 1))
    refused("query must have shards of equal length", layout=ShardPlan([0, length], [0], WORLD))
    refused("query must have batch size 1 with cu_seqlens, got 2", cu_seqlens=[0, length])
    refused(
        "attention_mask must be a MaskInfo or None", TypeError, attention_mask=np.ones((length, length), bool)
    )
    mask = MaskInfo.from_segments(np.zeros((1, 8), int))
    refused(f"attention_mask must be of 2 batch rows, 4 heads, {length} queries", attention_mask=mask)
    refused("key must have D = 16 as query", key=x[..., :8])
    refused("causal must be True or False", TypeError, causal=1)
    refused("return_lse must be True or False", TypeError, return_lse=1)
    with pytest.raises(ValueError, match="axis_name must be an axis of the mesh"):
        attnmask.jax.ring_attention(x, x, x, axis_name="ring")
    attend = mapped(
        lambda x, slopes: attnmask.jax.ring_attention(x, x, x, axis_name="ring", alibi_slopes=slopes),
        1,
        (P(),),
    )
    with pytest.raises(TypeError, match="alibi_slopes must be known at compile time"):
        attend(x, np.ones(4, np.float32))


if SHARED:
    port, process = SHARED
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process), initialization_timeout=120)
globals()[SCENARIO]()
print("done")
if SHARED:
    jax.distributed.shutdown()
