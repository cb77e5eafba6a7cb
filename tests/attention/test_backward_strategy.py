"""How gradients are divided: a line for each decision, on both sides of each bound, for any processor."""

import ctypes
import sys

import pytest
from choices import choices_of

WHOLE = sys.maxsize  # the visits of the only split
KB = 1 << 10


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    folder = tmp_path_factory.mktemp("choices")
    return choices_of(folder, "core/attention/plan/backward_strategy")


# The tiles that each block of queries sees: from the first one to the end.
def full(blocks, tiles):
    return [(0, tiles)] * blocks


def causal(blocks):
    return [(0, block + 1) for block in range(blocks)]


def window(blocks, tiles):
    return [(max(0, block + 1 - tiles), block + 1) for block in range(blocks)]


def work_of(types, seen, heads=1, kv_heads=None, tiles=None, tile_bytes=90 * KB):
    """The numbers of a section; of eight tiles that stay in the cache, as of float32 with 64 channels."""
    begin, end = min([b for b, _ in seen], default=0), max([e for _, e in seen], default=0)
    work = types["am_backward_work"](
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        tiles=end if tiles is None else tiles,
        tile_bytes=tile_bytes,
        blocks=len(seen),
        most=max([e - b for b, e in seen], default=0),
        begin=begin,
        end=end,
    )
    for n in (1, 2, 4):
        work.visits[n] = sum((e - 1) // n - b // n + 1 for b, e in seen)
    return work


# What the blocks of a section see, other numbers, and the tiles of a sum of d_q.
SUM_TILES = {
    "four, of which there are 32": (full(1, 128), {}, 4),
    "four at most": (full(1, 4096), {}, 4),
    "two, as there would be 31 of four": (full(1, 127), {}, 2),
    "two, of which there are 32": (full(1, 64), {}, 2),
    "one, as there would be 31 of two": (full(1, 63), {}, 1),
    "sums of all key heads": (full(1, 8), {"heads": 16}, 4),
    "sums of heads that share keys": (full(1, 8), {"heads": 32, "kv_heads": 8}, 2),
    "four that stay in the cache": (full(1, 128), {"tile_bytes": 192 * KB}, 4),
    "four that do not": (full(1, 128), {"tile_bytes": 192 * KB + 1}, 2),
    "not even one that does": (full(1, 128), {"tile_bytes": 800 * KB}, 1),
    "causal, 64 tiles": (causal(8), {"heads": 8}, 1),
    "causal, 65 tiles": (causal(65), {}, 2),
    "all blocks see 64 tiles": (full(8, 8), {"heads": 8}, 2),
    "blocks see few of 64 tiles": (window(8, 2), {"heads": 8}, 2),
    "causal, and much padding": (causal(4), {"tiles": 128}, 4),
    "nothing is seen": ([], {}, 1),
}

# The visits of a split of d_k and d_v.
SPLIT_VISITS = {
    "seven visits of a sum": (full(7, 8), {}, 2),
    "six visits of a sum": (full(6, 8), {}, WHOLE),
    "seven heads that share keys": (full(1, 8), {"heads": 7, "kv_heads": 1}, 2),
    "seven heads that do not": (full(1, 8), {"heads": 7}, WHOLE),
    "511 splits of three visits": (full(511, 3), {}, 2),
    "512 splits of three visits": (full(512, 3), {}, 3),
    "512 splits of all heads": (full(64, 3), {"heads": 8}, 3),
    "63 sums": (full(7, 252), {}, 2),
    "64 sums": (full(7, 253), {}, WHOLE),
    "64 sums of one tile, not causal": (full(7, 64), {"tile_bytes": 800 * KB}, WHOLE),
    "64 sums of all key heads": (full(7, 32), {"heads": 8}, WHOLE),
    "causal, 64 sums of one tile": (causal(64), {}, 4),
    "causal, 65 sums of one tile": (causal(65), {"tile_bytes": 800 * KB}, WHOLE),
    "causal, sums of two tiles": (causal(65), {}, 2),
    "causal, 64 sums of two tiles": (causal(127), {"tile_bytes": 200 * KB}, WHOLE),
    "causal, 32 sums of few visits": (causal(8), {"heads": 4}, 4),
    "causal, sums of two tiles and few visits": (causal(9), {"heads": 8}, WHOLE),
    "the most of four blocks see three quarters": (causal(4), {"heads": 16}, 4),
    "three blocks, which see more": (causal(3), {"heads": 21}, WHOLE),
    "a window of seven visits": (window(32, 8), {}, 4),
    "a window of fewer": (window(32, 7), {}, WHOLE),
    "512 splits of a window": (window(63, 40), {"heads": 2, "kv_heads": 1}, 6),
    "padding behind what is seen": (full(7, 8), {"tiles": 4096}, 2),
    "tiles before what is seen": ([(64, 128)] * 7, {}, 2),
    "nothing is seen": ([], {}, WHOLE),
    "no heads": (full(7, 8), {"heads": 0}, WHOLE),
}


@pytest.mark.parametrize(("seen", "numbers", "tiles"), SUM_TILES.values(), ids=SUM_TILES)
def test_tiles_of_a_sum(core, seen, numbers, tiles):
    functions, types, _ = core
    assert functions.am_choose_sums(ctypes.byref(work_of(types, seen, **numbers))).tiles == tiles


@pytest.mark.parametrize(("seen", "numbers", "visits"), SPLIT_VISITS.values(), ids=SPLIT_VISITS)
def test_visits_of_a_split(core, seen, numbers, visits):
    functions, types, _ = core
    assert functions.am_choose_sums(ctypes.byref(work_of(types, seen, **numbers))).split_visits == visits


# The most tiles that a block sees, all tiles of a call, other numbers, and the tiles of a task.
TASK_TILES = {
    "16 at most": (8, 4096, {}, 16),
    "16, of which there are 64": (8, 1024, {}, 16),
    "8, as there would be 63 of 16": (8, 1023, {}, 8),
    "tasks of all key heads": (8, 64, {"heads": 16}, 16),
    "tasks of heads that share keys": (8, 64, {"heads": 16, "kv_heads": 8}, 8),
    "one": (8, 8, {}, 1),
    "16 threads": (8, 1024, {"threads": 16}, 16),
    "17 threads": (8, 1024, {"threads": 17}, 8),
    "17 threads, in order": (8, 1024, {"threads": 17, "in_order": True}, 16),
    "fewer tasks than 64, in order": (8, 1023, {"in_order": True}, 8),
    "blocks see more than stay in the cache": (9, 4096, {}, 4),
    "of which there would be 63": (9, 255, {}, 2),
    "two of them stay": (3, 4096, {"tile_bytes": 300 * KB}, 2),
    "two stay, and blocks see no more": (2, 4096, {"tile_bytes": 300 * KB}, 16),
    "none stays": (1, 4096, {"tile_bytes": 800 * KB}, 1),
}


@pytest.mark.parametrize(("most", "tiles", "numbers", "expected"), TASK_TILES.values(), ids=TASK_TILES)
def test_tiles_of_a_task(core, most, tiles, numbers, expected):
    functions, types, _ = core
    numbers = {"threads": 1, "in_order": False} | numbers
    threads, in_order = numbers.pop("threads"), numbers.pop("in_order")
    work = work_of(types, full(1, most), tiles=tiles, **numbers)
    assert functions.am_choose_task_tiles(ctypes.byref(work), threads, in_order) == expected


@pytest.mark.parametrize(
    ("tasks", "threads", "in_order", "expected"),
    [(127, 64, False, True), (128, 64, False, False), (1, 1, False, True), (127, 64, True, False)],
)
def test_splits_are_tasks(core, tasks, threads, in_order, expected):
    functions, _, _ = core
    assert functions.am_splits_as_tasks(tasks, threads, in_order) == expected
