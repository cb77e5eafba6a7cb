"""One of several processes that share a sequence: ``ring_worker.py rank world file scenario``; it says "done"."""

import datetime
import itertools
import os
import re
import sys
import time

import numpy as np
import pytest
import torch
from ring_cases import LEARNED, SINKS, ring_cases, sizes

import attnmask
import attnmask.torch
from attnmask import MaskInfo, shard_sequence
from attnmask.torch import _ring as torch_ring

RANK, WORLD, FILE, SCENARIO = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
TIMEOUT = 5 if SCENARIO in ("killed", "late") else 120


def check(
    length,
    layout,
    cu_seqlens=None,
    batch=1,
    heads=(4, 2),
    dtype="float32",
    group=None,
    place=(RANK, WORLD),
    **options,
):
    """The ring's results and gradients are those of one process."""
    (near, grads_near), dtype = sizes(dtype), getattr(torch, dtype)
    generator = torch.Generator().manual_seed(length)
    shapes = (heads[0], 16), (heads[1], 16), (heads[1], 8), (heads[0], 8)
    query, key, value, dout = (
        torch.randn(batch, length, *shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in shapes
    )
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    dlse = torch.randn(batch, heads[0], length, generator=generator, dtype=torch.float64).to(wide)
    learned = {name: torch.tensor(x).requires_grad_() for name, x in options.items() if name in LEARNED}
    tensors = [x.clone().requires_grad_() for x in (query, key, value)]
    starts = {} if cu_seqlens is None else {"cum_seqlens_q": cu_seqlens}
    torch.manual_seed(0)
    out, lse = attnmask.torch.flash_attention(*tensors, **options | learned | starts, return_lse=True)
    finite = torch.where(lse.isfinite(), lse, 0.0)
    ((out * dout).sum() + (finite * dlse).sum()).backward()

    def shard(x):
        return shard_sequence(x, place[1], place[0], layout, cu_seqlens)

    def shard_stats(x):
        return shard(x.transpose(1, 2)[..., None])[..., 0].transpose(1, 2)

    mine = [shard(x).requires_grad_() for x in (query, key, value)]
    my_learned = {name: x.detach().clone().requires_grad_() for name, x in learned.items()}
    torch.manual_seed(place[0])  # the first process draws the seed of dropout for all
    my_out, my_lse = attnmask.torch.ring_attention(
        *mine, group=group, layout=layout, cu_seqlens=cu_seqlens, **options | my_learned, return_lse=True
    )
    assert my_out.dtype == dtype
    my_dlse = shard_stats(dlse)
    my_finite = torch.where(my_lse.isfinite(), my_lse, 0.0)
    ((my_out * shard(dout)).sum() + (my_finite * my_dlse).sum()).backward()

    torch.testing.assert_close(my_out, shard(out.detach()), atol=near, rtol=near)
    right_lse = shard_stats(lse.detach())
    torch.testing.assert_close(my_lse, right_lse, atol=near, rtol=near)
    for name, x, whole in zip("qkv", mine, tensors, strict=True):
        right = shard(whole.grad)
        torch.testing.assert_close(
            x.grad, right, atol=grads_near, rtol=grads_near, msg=lambda m, n=name: f"{n}: {m}"
        )
    for name, x in my_learned.items():
        torch.distributed.all_reduce(x.grad, group=group)
        torch.testing.assert_close(x.grad, learned[name].grad, atol=10 * grads_near, rtol=10 * grads_near)


def plans(length, world):
    rng = np.random.default_rng(length)
    starts = [0, *sorted(rng.integers(0, length + 1, 6)), length]
    return attnmask.ShardPlan(starts, rng.integers(0, world, 7), world)


def same():
    length = 150 + WORLD  # divides by no number of chunks
    cases = ring_cases(length, np.array([0, 40, 40, 43, 110, length]))
    for index, case in enumerate(cases):
        # Calls of few queries and steps of few keys; or all at once.
        torch_ring._QUERIES, torch_ring._KEYS = (20, 5) if index % 3 else (2048, 256)
        layouts = ["zigzag", ("contiguous", plans(length, WORLD))[index % 2]]
        for layout in layouts:
            check(length, layout, **case)
    empty_shards = 0, 1, WORLD, 2 * WORLD - 1
    for length, layout in itertools.product(empty_shards, ("zigzag", "contiguous")):
        mask = MaskInfo.from_segments(np.zeros((1, length), int))
        check(length, layout, causal=True)
        check(length, layout, causal=True, attention_mask=mask, batch=2)
    dead = MaskInfo.from_segments(np.repeat([-1, 0], [60, 90])[None])  # the first process has no live pair
    check(150, "contiguous", attention_mask=dead)
    check(150, "contiguous", attention_mask=dead, softmax_aux=SINKS)
    # With two processes nothing is sent.
    check(150, "contiguous", cu_seqlens=np.array([0, 75, 150]), causal=True)
    garbage()
    compiled()
    groups()


def garbage():
    """NaN in padding and in the future reaches nothing."""
    ids = np.repeat([0, -1], [50, 30])[None]
    x = torch.ones(1, 80, 2, 8)
    x[:, 50:] = torch.nan
    mine = shard_sequence(x, WORLD, RANK).requires_grad_()
    out = attnmask.torch.ring_attention(mine, mine, mine, causal=True, q_segment_ids=ids)
    out[shard_sequence(torch.tensor(ids), WORLD, RANK) == 0].sum().backward()
    assert torch.isfinite(out).all()
    assert torch.isfinite(mine.grad).all()


def compiled():
    """A call ends the graph, and has the same result."""

    def attend(x):
        return 2 * attnmask.torch.ring_attention(x, x, x, causal=True)

    x = shard_sequence(torch.linspace(-1, 1, 60 * 2 * 8).reshape(1, 60, 2, 8), WORLD, RANK)
    torch.testing.assert_close(torch.compile(attend, backend="eager")(x), attend(x))


def groups():
    """Processes that share the batch or the heads beside the sequence, by a mesh."""
    if WORLD != 4:
        return
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("heads", "sequence"))
    length, place = 97 + mesh["heads"].get_local_rank(), (mesh["sequence"].get_local_rank(), 2)
    check(length, "zigzag", group=mesh["sequence"], place=place, causal=True)
    check(length, "zigzag", group=mesh["sequence"].get_group(), place=place, causal=True, sliding_window=20)


def refused(words, kind, x=torch.zeros(1, 8, 4, 16), **change):  # noqa: B008
    given = {"query": x, "key": x, "value": x} | change
    with pytest.raises(kind, match=re.escape(words)):
        attnmask.torch.ring_attention(**given)


def errors():
    total, x = 8 * WORLD, torch.zeros(1, 8, 4, 16)
    mask = MaskInfo.from_segments(np.zeros((1, total), int))
    refused("query must be a tensor, got 3", TypeError, query=3)
    refused("query must be [B, T, H, D]", ValueError, query=x[0])
    refused("key must have 8 tokens as query", ValueError, key=x[:, :5], value=x[:, :5])
    refused("key must be float32 as query", TypeError, key=x.double())
    refused("value must have 8 tokens and 4 heads as key", ValueError, value=x[:, :, :2])
    refused("attention_mask must be a MaskInfo or None", TypeError, attention_mask=torch.ones(total, total))
    refused(f"got (1, 1, {total - 1}, {total})", ValueError, attention_mask=mask[:, :, 1:, :])
    refused("layout must be one of", ValueError, layout="ring")
    refused("cu_seqlens must end at", ValueError, cu_seqlens=[0, 5])
    refused(
        "query must have batch size 1 with cu_seqlens",
        ValueError,
        x.expand(2, -1, -1, -1),
        cu_seqlens=[0, total],
    )
    refused("dropout_prob must be at least 0", ValueError, dropout_prob=1.0)
    refused("causal must be True or False", TypeError, causal=1)
    refused("alibi_slopes must be [H]", ValueError, alibi_slopes=[1.0])
    both = {"attention_mask": mask, "q_segment_ids": np.zeros((1, total), int)}
    refused("q_segment_ids must be None with an attention_mask", ValueError, **both)
    plan = attnmask.ShardPlan([0, 5, total], [1, 0], WORLD)
    refused("query must have the tokens of shard_sequence", ValueError, layout=plan)
    # Of one process only
    if RANK == 1:
        refused("softmax_scale must be a real number", TypeError, softmax_scale="1")
    else:
        refused("ring_attention was refused in process 1 of the group", RuntimeError)
    words = "must be alike in all processes"
    refused(words, ValueError, causal=RANK == 0)
    refused(words, ValueError, alibi_slopes=np.array([0.5 if RANK else 0.4, 0.25, 0.1, 0.2]))
    refused(words, ValueError, cu_seqlens=torch.tensor([0, 9 if RANK else 8, total]))
    refused(words, ValueError, x[:, :, : 1 + RANK])
    check(150, "zigzag", causal=True)  # and it goes on


def broken(stop):
    """The last process stops, in the middle of a call: the others have an error, and do not wait for ever."""
    exchange, begin = torch_ring._exchange, time.monotonic()

    def stopping(*arguments):
        if RANK == WORLD - 1:
            stop()
        return exchange(*arguments)

    torch_ring._exchange = stopping
    x = shard_sequence(torch.ones(1, 64, 2, 8), WORLD, RANK)
    try:
        attnmask.torch.ring_attention(x, x, x, causal=True)
    except RuntimeError:
        assert time.monotonic() - begin < 4 * TIMEOUT
        print("error", flush=True)
        os._exit(0)  # a group that is broken cannot be taken down
    raise AssertionError("no error")


torch.set_num_threads(1)
attnmask.set_num_threads(1)
torch.distributed.init_process_group(
    "gloo",
    init_method=f"file://{FILE}",
    rank=RANK,
    world_size=WORLD,
    timeout=datetime.timedelta(seconds=TIMEOUT),
)
if SCENARIO == "killed":
    broken(lambda: os.kill(os.getpid(), 9))
elif SCENARIO == "late":
    broken(lambda: time.sleep(3 * TIMEOUT))
else:
    {"same": same, "errors": errors}[SCENARIO]()
torch.distributed.destroy_process_group()
print("done")
