"""Train the language model of train_tiny.py on sequences shared by several processes:

    torchrun --nproc-per-node 2 examples/ring_train.py

Each process has a part of every document and all of the parameters. Attention is `attnmask.torch.ring_attention`; every
other layer handles tokens one by one and needs no other process. Parameter gradients are summed over the processes. The
losses match those of one process: ``python examples/ring_train.py``.
"""

import argparse
import importlib.util
import os
from pathlib import Path

import numpy as np

try:
    import torch
except ImportError as error:
    raise SystemExit(f"this example needs PyTorch: pip install torch ({error})") from None

import attnmask
import attnmask.torch

_spec = importlib.util.spec_from_file_location("train_tiny", Path(__file__).with_name("train_tiny.py"))
tiny = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tiny)


def norm(x):
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-5)


def rotate(x, positions):
    """Rotate each pair of channels by its own angle, which grows with the token's position in its document."""
    angles = positions[:, None, None] * 100.0 ** -torch.linspace(0, 1, tiny.DEPTH // 2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1)


def loss_of(params, characters, following, positions, starts, layout):
    """Return the loss in nats, summed over the tokens of this process."""
    x = params["embed"][characters]
    for layer in range(tiny.LAYERS):
        mixed = (norm(x) @ params[f"{layer}.qkv"]).unflatten(-1, (-1, tiny.DEPTH))
        query, key, value = mixed.split([tiny.HEADS, tiny.KV_HEADS, tiny.KV_HEADS], dim=1)
        query, key = rotate(query, positions), rotate(key, positions)
        out = attnmask.torch.ring_attention(
            query[None], key[None], value[None], causal=True, cu_seqlens=starts, layout=layout
        )
        x = x + out[0].flatten(-2) @ params[f"{layer}.project"]
        x = x + torch.relu(norm(x) @ params[f"{layer}.up"]).square() @ params[f"{layer}.down"]
    return torch.nn.functional.cross_entropy(norm(x) @ params["head"], following, reduction="sum")


def train(steps=100, count=8, rate=3e-3, seed=0, planned=False, report=print):
    """Return the loss of each step, in bits per character. With `planned`, documents are dealt out by their work."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    rng = np.random.default_rng(seed)
    params = {name: torch.from_numpy(x).requires_grad_() for name, x in tiny.parameters(rng).items()}
    optimizer = torch.optim.Adam(params.values(), rate, betas=(0.9, 0.98))
    losses = []
    for step in range(1, steps + 1):
        characters, following, starts = tiny.packed(rng, count)  # the same in all processes
        layout = "zigzag"
        if planned:
            mask = attnmask.MaskInfo.from_cu_seqlens(starts, packed=True).apply_causal()
            layout = attnmask.plan_shards(mask, world)
        positions = attnmask.prepare_position_ids(starts)
        mine = [
            attnmask.shard_sequence(torch.from_numpy(x), world, rank, layout, starts)
            for x in (characters, following, positions)
        ]
        loss = loss_of(params, *mine, starts, layout) / len(characters)
        optimizer.zero_grad()
        loss.backward()
        for param in params.values():
            torch.distributed.all_reduce(param.grad)
        optimizer.step()
        whole = loss.detach()
        torch.distributed.all_reduce(whole)
        losses.append(whole.item() * tiny.BITS)
        if rank == 0 and (step == 1 or step % 25 == 0):
            report(
                f"step {step:4}   loss {losses[-1]:.3f} bits   {len(mine[0])} of {len(characters)} characters here"
            )
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a tiny language model over shared sequences.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--planned", action="store_true", help="deal documents out by their work, not by zigzag"
    )
    options = parser.parse_args()
    if "RANK" not in os.environ:  # without torchrun, one process
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    else:
        torch.distributed.init_process_group("gloo")
    try:
        train(options.steps, planned=options.planned)
    finally:
        torch.distributed.destroy_process_group()
