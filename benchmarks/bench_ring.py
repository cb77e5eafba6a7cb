"""Ring attention: how even the work of many processes is, what they send, and how long a few real ones take.

Simulated are 2 to 256 processes, for sequences of 131,072 and 1,048,576 tokens: full causal, a window of 4,096, 16 and
1,000 documents of unequal lengths. The table shows

- balance: the mean number of live pairs of a process, relative to the largest;
- sent: what the busiest of the processes looked at sends, keys and values forward, and with their gradients;
- hidden: the share of the time of messages forward during which the process computes, at 1, 10 and 100 Gb/s. Those of a
  round travel while the last one that had any is computed, at the rate that is measured here for one call of attention.

Real are processes of one thread each, over loopback, against one process of one thread: causal attention over 16,384
tokens, forward alone and with backward, all taking turns. They need PyTorch.

python benchmarks/bench_ring.py [--quick] [--only simulated|real] [--threads N]
"""

import argparse
import datetime
import os
import re
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np

import attnmask
from attnmask._sharded.ring import Conditions, Ring, ring_of

WORLDS = (2, 4, 8, 16, 32, 64, 128, 256)
LENGTHS = (131_072, 1_048_576)
HEADS, KV_HEADS, DEPTH = 32, 8, 128
SAMPLED = 8  # processes whose messages are looked at
GIGABITS = (1, 10, 100)
REAL = (16_384, 4, 64)  # tokens, heads, depth


def documents(length: int, count: int) -> np.ndarray:
    """Where so many documents begin, the longest of which are several times longer than the mean."""
    parts = np.random.default_rng(count).exponential(size=count).cumsum()
    return np.append(0, np.round(parts / parts[-1] * length)).astype(np.int64)


def cases(length: int) -> dict[str, tuple[np.ndarray | None, Conditions]]:
    causal = Conditions(None, 0, False, False)
    return {
        "causal": (None, causal),
        "window 4,096": (None, causal._replace(low=-4095)),
        "16 documents": (documents(length, 16), causal),
        "1,000 documents": (documents(length, 1000), causal),
    }


def rate(seconds: float) -> float:
    """Live pairs of all heads a second, of one call of attention."""
    tokens = 2048
    query, key = (np.ones((1, tokens, heads, DEPTH), np.float32) for heads in (HEADS, KV_HEADS))
    best, end = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        begin = time.perf_counter()
        attnmask.flash_attention(query, key, key, causal=True)
        best = min(best, time.perf_counter() - begin)
    return tokens * (tokens + 1) / 2 / best


def tokens_sent(ring: Ring, queries: int, keys: int) -> int:
    ranges = ring.sent(queries, keys)
    return int((ranges[:, 1] - ranges[:, 0]).sum())


def simulated(ring: Ring, pairs_a_second: float) -> tuple[float, float, float, list[float]]:
    """Balance, bytes sent forward and with backward, and the share that is hidden at each bandwidth."""
    world = ring.shards.world
    pairs = np.array([ring.live_pairs(rank, None) for rank in range(world)])
    sent, waits, messages = [], np.zeros(len(GIGABITS)), np.zeros(len(GIGABITS))
    token = 2 * KV_HEADS * DEPTH * 4  # bytes of a key and a value, float32
    for rank in sorted({world * i // SAMPLED for i in range(SAMPLED)}):
        sources = [(rank - distance) % world for distance in range(1, world)]
        live = [source for source in sources if len(ring.sent(rank, source))]
        work = [ring.live_pairs(rank, source) / pairs_a_second for source in (rank, *live)]
        received = np.array([tokens_sent(ring, rank, source) * token for source in live])
        sent.append(sum(tokens_sent(ring, (rank + i) % world, rank) for i in range(1, world)) * token)
        for index, gigabits in enumerate(GIGABITS):
            travel = received / (gigabits * 1e9 / 8)
            waits[index] += np.maximum(0, travel - work[:-1]).sum()
            messages[index] += travel.sum()
    hidden = [1 - wait / message if message else 1.0 for wait, message in zip(waits, messages, strict=True)]
    return pairs.mean() / max(pairs.max(), 1), max(sent), 3 * max(sent), hidden


def simulate(quick: bool) -> None:
    pairs_a_second = rate(0.1 if quick else 2.0)
    print(
        f"{pairs_a_second * HEADS * 4 * DEPTH / 1e9:.0f} GFLOP/s of live pairs, float32, {HEADS} heads of {DEPTH}\n"
    )
    names = " | ".join(f"hidden at {gigabits} Gb/s" for gigabits in GIGABITS)
    print(f"| tokens | mask | layout | processes | balance | sent forward | with backward | {names} |")
    print("| --- " * (7 + len(GIGABITS)) + "|")
    for length in LENGTHS[:1] if quick else LENGTHS:
        for name, (starts, conditions) in cases(length).items():
            for world in WORLDS[::4] if quick else WORLDS:
                layouts: dict[str, object] = {"zigzag": "zigzag"}
                if starts is not None:
                    mask = attnmask.MaskInfo.from_cu_seqlens(starts, packed=True).apply_causal()
                    layouts["planned"] = attnmask.plan_shards(mask, world)
                for layout, plan in layouts.items():
                    ring = ring_of(plan, length, world, starts, None, conditions)
                    balance, sent, both, hidden = simulated(ring, pairs_a_second)
                    shares = " | ".join(f"{share:.0%}" for share in hidden)
                    print(
                        f"| {length:,} | {name} | {layout} | {world} | {balance:.1%} | {sent / 1e6:,.0f} MB | "
                        f"{both / 1e6:,.0f} MB | {shares} |",
                        flush=True,
                    )


# Real processes


def peak() -> float:
    """The most MiB of this process so far; getrusage would count those of the process that started it."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) / 1024


def worker(rank: int, world: int, store: str) -> None:
    """One of them. For each line, "forward" or "both", it makes a call and prints its seconds and the MiB so far."""
    import torch

    import attnmask.torch

    torch.set_num_threads(1)
    attnmask.set_num_threads(1)
    timeout = datetime.timedelta(minutes=10)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout
    )
    tokens, heads, depth = REAL
    small = [torch.ones(1, 2 * world, 1, depth // world * world, requires_grad=True) for _ in range(3)]
    torch.autograd.grad(attend(attnmask, small, world), small, torch.ones_like(small[0]))  # imports much
    before = peak()
    torch.manual_seed(rank)
    shard = 1, len(attnmask.shard_sequence(np.zeros(tokens), world, rank)), heads, depth
    tensors = [torch.randn(shard, requires_grad=True) for _ in range(3)]
    dout = torch.randn(shard)
    for line in sys.stdin:
        torch.distributed.barrier()
        begin = time.perf_counter()
        if line.strip() == "forward":
            with torch.no_grad():
                attend(attnmask, tensors, world)
        else:
            torch.autograd.grad(attend(attnmask, tensors, world), tensors, dout)
        torch.distributed.barrier()
        seconds = time.perf_counter() - begin
        print(seconds, peak() - before, flush=True)
    torch.distributed.destroy_process_group()


def attend(attnmask, tensors, world):  # type: ignore[no-untyped-def]
    if world == 1:
        return attnmask.torch.flash_attention(*tensors, causal=True)
    return attnmask.torch.ring_attention(*tensors, causal=True)


def start(world: int, store: str) -> list[subprocess.Popen]:
    """So many processes, which share one sequence."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, __file__, "--worker", str(world), store]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    return [subprocess.Popen([*command, str(rank)], **pipes) for rank in range(world)]


def turn(processes: list[subprocess.Popen], what: str) -> tuple[float, float]:
    """The seconds and the MiB of the slowest and the largest of processes that begin together."""
    for process in processes:
        print(what, file=process.stdin, flush=True)
    seconds, memory = zip(
        *(map(float, process.stdout.readline().split()) for process in processes), strict=True
    )
    return max(seconds), max(memory)


def real(quick: bool) -> None:
    tokens, heads, depth = REAL
    print(
        f"\nCausal, {tokens:,} tokens, {heads} heads of {depth}, float32; memory beside the interpreter's. Medians of"
        " calls that take turns, and of how many times faster than one process in the same turn.\n"
    )
    processors = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder:
        groups = {"1": start(1, f"{folder}/1")}
        for world in (2,) if quick else (2, 4):
            name = f"{world}, more than processors" if world > processors else str(world)
            groups[name] = start(world, f"{folder}/{world}")
        alone = "2 with a sequence each"
        groups[alone] = groups["1"] + start(1, f"{folder}/alone")
        rounds: dict[str, dict[str, list[float]]] = {name: {"forward": [], "both": []} for name in groups}
        memory: dict[str, float] = {}
        try:
            count = 1 if quick else 8
            for number in range(count):
                print(f"round {number + 1} of {count}", file=sys.stderr, flush=True)
                for what in "forward", "both":
                    for name, processes in groups.items():
                        seconds, memory[name] = turn(processes, what)
                        rounds[name][what].append(seconds / (2 if name == alone else 1))
        finally:
            for process in {process for processes in groups.values() for process in processes}:
                process.kill()
                process.communicate()
    print("| processes of one thread | forward | with backward | memory of each |\n| --- | --- | --- | --- |")
    for name, times in rounds.items():
        cells = []
        for what in "forward", "both":
            ratios = np.divide(rounds["1"][what], times[what])
            cells.append(f"{np.median(times[what]):.2f} s, {np.median(ratios):.2f}x")
        cells.append(f"{memory[name]:.0f} MB, {memory[name] / memory['1']:.0%}")
        print(f"| {name} | {' | '.join(cells)} |")
    print(
        "\nThe last row is what the processors give to processes that do not wait for each other: the time of both,"
        " a sequence."
    )


if __name__ == "__main__":
    if "--worker" in sys.argv:
        world, store, rank = sys.argv[2:]
        worker(int(rank), int(world), store)
        sys.exit()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few cases, to see that all runs")
    parser.add_argument("--only", default="", choices=["", "simulated", "real"])
    parser.add_argument("--threads", type=int, default=attnmask.get_num_threads())
    options = parser.parse_args()
    attnmask.set_num_threads(options.threads)
    if options.only != "real":
        simulate(options.quick)
    if options.only != "simulated" and find_spec("torch"):
        real(options.quick)
