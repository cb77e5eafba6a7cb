"""Simulates how well the tasks of attention, forward and backward, keep many threads busy.

The schedule of each shape is made for 1 to 128 threads, and its tasks are dealt out as in the loops of the library:
each thread begins with a part of its own, and then takes tasks of other threads. Costs are measured here, on one
thread. Forward, they are those of a tile and of an item, for the same shape with all of its keys and with half of them.
Backward, they are those of a tile and of the visit of a task to a block, whose sum of d_q is added after those of
earlier keys: a task that is too early waits. Where tasks take splits of the blocks, a loop of its own adds these up.
Shapes with one query are for forward alone.

The tables show the shortest possible makespan, total / threads, relative to the simulated one. With --waking 1, each
loop also takes a microsecond per thread to wake all one by one, as was measured for sleeping threads.
"""

import argparse
import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

import attnmask
from attnmask import _core
from attnmask._attention.arguments import FLASH_ATTENTION
from attnmask._attention.problem import read_problem

THREADS = (1, 2, 8, 16, 64, 128)
ROUNDS = 20
ADD = 0.2  # share of a visit that adds its sum: 0.4 µs of 2, with 64 channels in the second-level cache


def _schedule(threads: int, **arguments: Any) -> dict[str, Any]:
    return _core.attention_schedule(read_problem(FLASH_ATTENTION.bind((), arguments))[0], threads)


def _backward_schedule(threads: int, **arguments: Any) -> dict[str, Any]:
    return _core.backward_schedule(read_problem(FLASH_ATTENTION.bind((), arguments))[0], threads)


@dataclass
class Shape:
    """One call: B rows of queries and keys, or packed sequences of these lengths."""

    name: str
    queries: int | list[int]
    keys: int | list[int]
    heads: tuple[int, int]
    depth: int = 64
    batch: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def arguments(self, part: float = 1.0) -> dict[str, Any]:
        """The arguments of the call, with only this part of the keys."""
        options = dict(self.options)
        if isinstance(self.queries, list):
            keys = [max(1, int(n * part)) for n in self.keys]  # type: ignore[union-attr]
            options["cum_seqlens_q"] = np.cumsum([0, *self.queries])
            options["cum_seqlens_k"] = np.cumsum([0, *keys])
            q_tokens, k_tokens = sum(self.queries), sum(keys)
        else:
            q_tokens, k_tokens = self.queries, max(1, int(self.keys * part))  # type: ignore[operator]
        q = np.zeros((self.batch, q_tokens, self.heads[0], self.depth), np.float32)
        k = np.zeros((self.batch, k_tokens, self.heads[1], self.depth), np.float32)
        return {"query": q, "key": k, "value": k, **options}


CAUSAL = {"causal": True}
DOCUMENTS = [64, 4096, 128, 1000, 2048, 300, 77]
SHAPES = [
    Shape("1 × 512, 8 heads", 512, 512, (8, 8)),
    Shape("1 × 1,024, 1 head", 1024, 1024, (1, 1)),
    Shape("1 × 1,024, 4 heads, causal", 1024, 1024, (4, 4), options=CAUSAL),
    Shape("1 × 2,048, 16 heads", 2048, 2048, (16, 16)),
    Shape("1 × 2,048, 16 heads, causal", 2048, 2048, (16, 16), options=CAUSAL),
    Shape("1 × 2,048, 1 head, causal", 2048, 2048, (1, 1), options=CAUSAL),
    Shape("1 × 4,096, 32/8 heads, causal", 4096, 4096, (32, 8), 128, options=CAUSAL),
    Shape("1 × 8,192, 16 heads, window 256", 8192, 8192, (16, 16), options=CAUSAL | {"sliding_window": (255, 0)}),
    Shape("1 × 8,192, 1 head, window 256", 8192, 8192, (1, 1), options=CAUSAL | {"sliding_window": (255, 0)}),
    Shape("16 documents of 512, 16 heads", [512] * 16, [512] * 16, (16, 16), options=CAUSAL),
    Shape("documents of 64 to 4,096, 8 heads", DOCUMENTS, DOCUMENTS, (8, 8), options=CAUSAL),
    Shape("300 sequences of 20, 8 heads", [20] * 300, [20] * 300, (8, 8), options=CAUSAL),
    Shape("64 × 64, 8 heads", 64, 64, (8, 8), batch=64),
    Shape("8 × 1,000, 2 heads", 1000, 1000, (2, 2), batch=8),
    Shape("1 query, 8,192 keys, 32/8 heads", 1, 8192, (32, 8), 128),
    Shape("1 query, 32,768 keys, 32/8 heads", 1, 32768, (32, 8), 128),
    Shape("1 query, 32,768 keys, 32 heads", 1, 32768, (32, 32), 128),
    Shape("16 queries, 4,096 keys, 8 heads", 16, 4096, (8, 8), 128),
    Shape("31 queries, 1,500 keys, 4 heads × 5", 31, 1500, (4, 4), batch=5),
    Shape("64 queries of 1 to 32,768 keys", [1] * 64, [1 + 520 * i for i in range(64)], (32, 8), 128),
]  # fmt: skip


def seconds(call: Callable[[], Any]) -> float:
    """The shortest of a few calls on one thread."""
    times = []
    for _ in range(ROUNDS + 1):
        begin = perf_counter()
        call()
        times.append(perf_counter() - begin)
    return min(times)


def work_of(schedule: dict[str, Any]) -> tuple[int, int]:
    """The number of items, and the sum of rows × tiles."""
    items = [item for _, some in schedule["tasks"] for item in some]
    return len(items), sum(rows * tiles for rows, tiles in items)


def costs(shape: Shape) -> tuple[float, float]:
    """The cost of an item without its tiles, and that of a row of a tile."""
    attnmask.set_num_threads(1)
    whole, half = shape.arguments(), shape.arguments(0.5)
    items, work = work_of(_schedule(1, **whole))
    _, half_work = work_of(_schedule(1, **half))
    time, half_time = (seconds(lambda a=a: attnmask.flash_attention(**a)) for a in (whole, half))  # type: ignore[misc]
    tile = max(0.0, (time - half_time) / max(1, work - half_work)) or time / work
    item = max(0.0, (time - tile * work) / items)
    return item, (time - item * items) / work


def makespan(times: list[float], row: int, threads: int) -> float:
    """One parallel loop: each thread begins with a part of whole rows, and then takes tasks of other threads."""
    rows = -(-len(times) // row)
    parts = min(threads, rows, 64)
    begins = [i * (rows // parts) + min(i, rows % parts) for i in range(parts + 1)]
    left = [list(range(b * row, min(e * row, len(times))))[::-1] for b, e in pairwise(begins)]
    free = [(0.0, i) for i in range(threads)]
    end = 0.0
    while any(left):
        now, thread = heapq.heappop(free)
        part = next(p for p in (left[(thread + i) % parts] for i in range(parts)) if p)
        now += times[part.pop()]
        end = max(end, now)
        heapq.heappush(free, (now, thread))
    return end


def balance(shape: Shape, threads: int, item: float, tile: float, waking: float = 0) -> float:
    schedule = _schedule(threads, **shape.arguments())
    times = [sum(item + tile * rows * tiles for rows, tiles in some) for _, some in schedule["tasks"]]
    total, begin, span = sum(times), 0, 0.0
    for tasks, row in schedule["waves"]:
        span += makespan(times[begin : begin + tasks], row, threads) + (threads - 1) * waking
        begin += tasks
    return total / threads / span


Place = tuple[int, int, int]  # section, block and head


class Visit(NamedTuple):
    """An ordered addition of a task."""

    tiles: int  # that it computes first
    to: Place  # where it adds
    turn: int
    first: int  # the first turn there


def visits(schedule: dict[str, Any], task: Any, kv_head: int, shared: int) -> list[Visit]:
    """Return the visits of a task in order, from the last block to the first: one per ``sum_tiles`` tiles of keys."""
    found: list[Visit] = []
    _, some, taken, _, splits = task
    for index, begin, end in some:
        section = schedule["sections"][index]
        each = section["sum_tiles"]
        order = [(b, h) for b in range(len(section["blocks"])) for h in reversed(range(shared))]
        if splits:
            order = order[slice(*taken)]
        for block, head in reversed(order):
            first, last = section["blocks"][block]
            for low in range(begin, end, each):
                tiles = min(end, low + each, last) - max(low, first)
                if tiles > 0:
                    to = (index, block, kv_head * shared + head)
                    found.append(Visit(tiles, to, low // each, first // each))
    return found


def splits_makespan(
    schedule: dict[str, Any], kv_heads: int, threads: int, visit: float
) -> tuple[float, float]:
    """Return the time that it takes to add up splits: in all, and until the last is added."""
    times = [
        visit * ADD * (splits - 1) * (end - begin)
        for _, some, _, split, splits in schedule["tasks"] * kv_heads
        for _, begin, end in some
        if splits and split == 0
    ]
    return (sum(times), makespan(times, 1, threads)) if times else (0.0, 0.0)


def backward_makespan(
    schedule: dict[str, Any], heads: tuple[int, int], threads: int, tile: float, visit: float
) -> tuple[float, float]:
    """Return the time that all tasks take together, and when the last one ends if each waits for its turn."""
    shared = heads[0] // heads[1]
    tasks = [visits(schedule, task, head, shared) for task in schedule["tasks"] for head in range(heads[1])]
    row = schedule["row_tasks"] * heads[1]
    rows = len(tasks) // row
    parts = min(threads, rows, 64)
    begins = [(i * (rows // parts) + min(i, rows % parts)) * row for i in range(parts + 1)]
    left = [tasks[b:e][::-1] for b, e in pairwise(begins)]
    turn: dict[Place, int] = {}
    waiting: dict[tuple[Place, int], int] = {}  # threads
    woken: list[int] = []

    def run(thread: int) -> Iterator[float | tuple[Place, int]]:
        """Yield the seconds of each step of a thread, or the turn for which it waits."""
        while any(left):
            queue = next(p for p in (left[(thread + i) % parts] for i in range(parts)) if p)
            for own in queue.pop():
                yield tile * own.tiles + visit * (1 - ADD)
                if turn.setdefault(own.to, own.first) != own.turn:
                    yield own.to, own.turn
                yield visit * ADD
                turn[own.to] = own.turn + 1
                if (own.to, own.turn + 1) in waiting:
                    woken.append(waiting.pop((own.to, own.turn + 1)))

    running = [run(thread) for thread in range(threads)]
    events = [(0.0, thread) for thread in range(threads)]
    total = end = 0.0
    while events:
        now, thread = heapq.heappop(events)
        end = max(end, now)
        step = next(running[thread], None)
        for one in woken:
            heapq.heappush(events, (now, one))
        woken.clear()
        if isinstance(step, tuple):
            waiting[step] = thread
        elif step is not None:
            total += step
            heapq.heappush(events, (now + step, thread))
    added, then = splits_makespan(schedule, heads[1], threads, visit)
    return total + added, end + then


def backward_costs() -> tuple[float, float]:
    """Return the seconds of a tile, and of a visit without its tiles, from one long sequence and many short ones."""
    attnmask.set_num_threads(1)
    work, times = [], []
    for lengths in ([1024], [64] * 64):
        shape = Shape("", lengths, lengths, (4, 4))
        arguments = shape.arguments()
        schedule = _backward_schedule(1, **arguments)
        found = [
            v for task in schedule["tasks"] for head in range(4) for v in visits(schedule, task, head, 1)
        ]
        work.append((sum(v.tiles for v in found), len(found)))
        _, vjp = attnmask.flash_attention_vjp(**arguments)
        times.append(seconds(lambda vjp=vjp, d=arguments["query"]: vjp(d)))  # type: ignore[misc]
    tile, visit = np.linalg.solve(np.array(work, float), np.array(times))
    return float(tile), max(0.0, float(visit))


def backward_balance(shape: Shape, threads: int, tile: float, visit: float, waking: float = 0) -> float:
    schedule = _backward_schedule(threads, **shape.arguments())
    total, end = backward_makespan(schedule, shape.heads, threads, tile, visit)
    return total / threads / (end + 2 * (threads - 1) * waking)  # statistics of rows are a loop of their own


def table(columns: list[str]) -> None:
    print("|", " | ".join(columns), "|")
    print("|", " | ".join(["---"] * len(columns)), "|", flush=True)


def forward_table(shapes: list[Shape], waking: float) -> None:
    table(["forward", "strategy", "tiles", "items", "splits", "scratch, MB", *map(str, THREADS)])
    for shape in shapes:
        schedule = _schedule(64, **shape.arguments())
        sections = schedule["sections"]
        strategies = ", ".join(sorted({g["strategy"] for g in sections}))
        items = [i for _, some in schedule["tasks"] for i in some]
        tiles = sum(t for _, t in items)
        item, tile = costs(shape)
        shares = [f"{balance(shape, n, item, tile, waking):.0%}" for n in THREADS]
        splits = max(g["splits"] for g in sections)
        cells = [shape.name, strategies, tiles, len(items), splits, f"{schedule['scratch'] / 1e6:.1f}"]
        print("|", " | ".join(map(str, cells + shares)), "|", flush=True)


def backward_table(shapes: list[Shape], waking: float) -> None:
    tile, visit = backward_costs()
    print(f"\nBackward: {tile * 1e6:.1f} µs per tile, {visit * 1e6:.1f} µs per visit.\n")
    table(["backward", "tasks", "tiles of a sum", *map(str, THREADS)])
    for shape in shapes:
        if shape.queries == 1 or shape.queries == [1] * 64:
            continue
        schedule = _backward_schedule(64, **shape.arguments())
        shares = [f"{backward_balance(shape, n, tile, visit, waking):.0%}" for n in THREADS]
        cells = [
            shape.name,
            len(schedule["tasks"]) * shape.heads[1],
            max(g["sum_tiles"] for g in schedule["sections"]),
        ]
        print("|", " | ".join(map(str, cells + shares)), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="shapes whose name has it")
    parser.add_argument(
        "--waking", default=0.0, type=float, metavar="MICROSECONDS", help="to wake one thread"
    )
    given = parser.parse_args()
    shapes = [shape for shape in SHAPES if given.only in shape.name]
    forward_table(shapes, given.waking / 1e6)
    backward_table(shapes, given.waking / 1e6)


if __name__ == "__main__":
    main()
