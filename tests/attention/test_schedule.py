"""How attention forward is divided: the strategy of each shape, and what the division may depend on."""

import runpy
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from environment import ROOT, with_doors
from schedules import backward_schedule, forward_schedule

from attnmask import MaskInfo

BF16 = np.dtype(ml_dtypes.bfloat16)
pytestmark = with_doors
BENCHMARK = ROOT / "benchmarks" / "bench_schedule.py"


def schedule(
    queries, keys, heads=(4, 4), depth=64, *, batch=1, dtype=np.float32, threads=2, **options: Any
) -> dict[str, Any]:
    """The schedule for these numbers of queries and keys; or for packed sequences of these lengths."""
    return forward_schedule(threads, **arguments(queries, keys, heads, depth, batch, dtype), **options)


def arguments(queries, keys, heads=(4, 4), depth=64, batch=1, dtype=np.float32) -> dict[str, Any]:
    given: dict[str, Any] = {}
    if isinstance(queries, list):
        given["cum_seqlens_q"], given["cum_seqlens_k"] = np.cumsum([0, *queries]), np.cumsum([0, *keys])
        queries, keys = sum(queries), sum(keys)
    k = np.zeros((batch, keys, heads[1], depth), dtype)
    return given | {"query": np.zeros((batch, queries, heads[0], depth), dtype), "key": k, "value": k}


def strategies(found: dict[str, Any]) -> set[str]:
    return {section["strategy"] for section in found["sections"]}


# Queries, keys, heads: on both sides of each boundary between two strategies.
TABLE = [
    # Few rows are unpacked, also if they belong to several heads that share keys.
    ((1, 1000, (4, 4)), "unpacked"), ((16, 1000, (4, 4)), "unpacked"), ((17, 1000, (4, 4)), "private"),
    ((1, 1000, (16, 1)), "unpacked"), ((4, 1000, (16, 4)), "unpacked"), ((5, 1000, (16, 4)), "private"),
    ((17, 65, (4, 4)), "private"), ((64, 1000, (4, 4)), "private"), ((32, 1000, (8, 4)), "private"),
    # One group of heads has more rows than a block.
    ((33, 1000, (8, 4)), "lockstep"), ((64, 1000, (8, 1)), "lockstep"),
    # There are more queries than a block has rows.
    ((65, 1000, (4, 4)), "shared packing"), ((1000, 1000, (8, 4)), "shared packing"),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "strategy"), TABLE, ids=str)
def test_strategies(isa, shape, strategy):
    """The soft cap rules out transposed tiles, but where there is one tile."""
    assert strategies(schedule(*shape, logits_soft_cap=9.0)) == {strategy}
    if isa not in ("baseline", "avx2"):  # which have short vectors
        assert strategies(schedule(32, 1000)) == {"transposed"}
    if isa != "baseline":
        assert strategies(schedule(17, 64, logits_soft_cap=9.0)) == {"transposed"}


@pytest.mark.parametrize(("tokens", "window", "heads", "strategy"), [
    (8192, 255, (16, 16), "local packing"),
    (8192, 447, (16, 16), "local packing"),
    (8192, 575, (16, 16), "shared packing"),  # a block sees more tiles than a task keeps
    (8192, 255, (16, 4), "shared packing"),  # heads share keys
    (1024, 255, (1, 1), "shared packing"),  # there are few blocks
])  # fmt: skip
def test_blocks_that_see_few_tiles(tokens, window, heads, strategy):
    assert strategies(schedule(tokens, tokens, heads, causal=True, sliding_window=(window, 0))) == {strategy}


def test_documents_have_a_strategy_each():
    """Documents that share tiles come first, then the others; in both, the longest come first."""
    queries, keys = [20, 1000, 1, 64, 300, 2000], [65, 1000, 1, 128, 300, 2000]
    found = schedule(queries, keys)["sections"]
    assert [g["queries"][1] - g["queries"][0] for g in found] == [2000, 1000, 300, 64, 20, 1]
    assert [g["strategy"] for g in found[3:]] == ["private", "private", "unpacked"]
    assert {g["strategy"] for g in found[:3]} == {"shared packing"}


NEIGHBOURS = [0, 1, 12, 16, 20, 64, 65, 300, 1000, 5000]
FOLLOWS = ("tiles", "strategy", "block_rows", "items", "splits")  # what depends on the section alone


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16, np.float64], ids=str)
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (1, 1)], ids=str)
def test_a_section_is_computed_as_if_it_were_alone(isa, dtype, heads):
    """Whether packing is local or shared depends on the number of blocks, but alters no sum."""
    found = schedule(NEIGHBOURS, NEIGHBOURS, heads, dtype=dtype, causal=True)["sections"]
    assert len(found) == len(NEIGHBOURS) - 1  # the empty sequence has no section
    for section in found:
        begin, end = section["queries"]
        (alone,) = schedule(end - begin, end - begin, heads, dtype=dtype, causal=True)["sections"]
        for one in (section, alone):
            one["strategy"] = one["strategy"].replace("local", "shared")
        assert {name: section[name] for name in FOLLOWS} == {name: alone[name] for name in FOLLOWS}


SHAPES = [
    ((1, 5000, (8, 2)), {}),
    ((31, 1500, (4, 4)), {}),
    ((70, 1500, (4, 2)), {"causal": True, "causal_offset": "bottom-right"}),
    ((2048, 2048, (16, 16)), {"causal": True}),
    ((NEIGHBOURS, NEIGHBOURS, (4, 4)), {"causal": True}),
    ((8192, 8192, (16, 16)), {"causal": True, "sliding_window": (255, 0)}),
]


@pytest.mark.parametrize(("shape", "options"), SHAPES, ids=str)
def test_every_tile_is_in_one_item(shape, options):
    """This holds for any number of threads; waves contain all tasks."""
    work = set()
    for threads in (1, 2, 7, 64):
        found = schedule(*shape, threads=threads, **options)
        sections = found["sections"]
        rows = [0] * len(sections)
        tiles = 0
        for index, items in found["tasks"]:
            for item_rows, item_tiles in items:
                rows[index] += item_rows
                tiles += item_rows * item_tiles
        apart = [1 if sum(rows) == total_rows(sections, shape) else g["splits"] for g in sections]
        for section, count, parts in zip(sections, rows, apart, strict=True):
            assert count == (section["queries"][1] - section["queries"][0]) * shape[2][0] * parts
        assert sum(tasks for tasks, _ in found["waves"]) == len(found["tasks"])
        assert found["scratch"] > 0
        work.add(tiles)
    assert len(work) == 1


def total_rows(sections, shape):
    return sum(g["queries"][1] - g["queries"][0] for g in sections) * shape[2][0]


@pytest.mark.parametrize(("shape", "options"), SHAPES, ids=str)
def test_many_threads_are_kept_busy(shape, options):
    """If there are 256 tiles, 64 threads get about equal work."""
    tasks = schedule(*shape, threads=64, **options)["tasks"]
    work = [sum(rows * tiles for rows, tiles in items) for _, items in tasks]
    if sum(tiles for _, items in tasks for _, tiles in items) < 256:
        pytest.skip("there is not work enough")
    assert len(tasks) >= 56
    assert max(work) <= max(1.25 * sum(work) / 64, 64 * 64)


def lengths_of_caches(kind):
    """64 lengths of 1 to 32,768."""
    rng = np.random.default_rng(0)
    if kind == "one is long":
        return np.array([*[512] * 63, 32768])
    return (
        rng.integers(1, 32769, 64)
        if kind == "even"
        else np.exp(rng.uniform(0, np.log(32768), 64)).astype(int)
    )


@pytest.mark.parametrize("threads", [2, 8, 16, 32, 64])
@pytest.mark.parametrize("kind", ["even", "logarithmic", "one is long"])
def test_caches_of_unequal_lengths_keep_threads_busy(threads, kind):
    """One query for each cache, dealt out as benchmarks/bench_schedule.py deals."""
    if not BENCHMARK.exists():
        pytest.skip("the tests run without the benchmarks")
    makespan = runpy.run_path(str(BENCHMARK))["makespan"]
    lengths = lengths_of_caches(kind)
    mask = MaskInfo.from_segments(np.zeros((64, 1), int), np.zeros((64, 32768), int)).apply_kv_lengths(
        lengths
    )
    q, k = (np.broadcast_to(np.float32(0), (64, *shape)) for shape in ((1, 32, 128), (32768, 8, 128)))
    found = forward_schedule(threads, query=q, key=k, value=k, attention_mask=mask)
    work = [sum(max(tiles, 0) for _, tiles in items) for _, items in found["tasks"]]
    ((_, row),) = found["waves"]
    assert sum(work) / threads >= 0.95 * makespan(work, row, threads)


# --- Backward ---

DOCUMENTS = [64, 4096, 128, 1000, 2048, 300, 77]
WINDOW = {"causal": True, "sliding_window": (255, 0)}
BACKWARD = [
    *SHAPES,
    ((2048, 2048, (16, 16)), {}),
    ((DOCUMENTS, DOCUMENTS, (8, 8)), {"causal": True}),
    ((1000, 1000, (2, 2), 64, 8), {}),
]


@pytest.mark.parametrize(("shape", "options"), BACKWARD, ids=str)
def test_every_sum_of_backward_is_in_one_task(shape, options):
    """How many tiles a sum of d_q has, and how many blocks a split of the sums of keys, does not depend on the number
    of threads. Of a section, tasks begin in the order of keys, and of the same keys in the order of splits. So each
    waits only for one that has begun.
    """
    sums = set()
    for threads in (1, 2, 7, 64, 128):
        found = backward_schedule(threads, **arguments(*shape), **options)
        ends = [0] * len(found["sections"])
        next_split = {}
        for _, task, visits, split, splits in found["tasks"]:
            for section, begin, end in task:
                assert begin % found["sections"][section]["sum_tiles"] == 0
                if split == 0:
                    assert begin == ends[section]
                    ends[section] = end
                if splits:
                    (only,) = task
                    assert only in next_split or split == 0
                    assert next_split.get(only, (0, visits[1])) == (split, visits[1])
                    next_split[only] = split + 1, visits[0]
                    if split + 1 == splits:
                        del next_split[only]
        assert not next_split
        assert ends == [max([0, *(end for _, end in g["blocks"])]) for g in found["sections"]]
        assert len(found["tasks"]) == found["row_tasks"] * (shape[4] if len(shape) > 4 else 1)
        sums.add(tuple((g["sum_tiles"], g["split_visits"]) for g in found["sections"]))
    assert len(sums) == 1


@pytest.mark.parametrize(
    ("shape", "options", "divided"),
    [
        (((1024, 1024, (1, 1))), {}, True),
        (((8192, 8192, (1, 1))), {"causal": True}, True),
        (((8192, 8192, (1, 1))), WINDOW, True),
        (((1024, 1024, (16, 16))), {"causal": True}, False),
        (((256, 8192, (1, 1))), {}, False),
    ],
    ids=str,
)
def test_tasks_take_some_of_the_blocks_where_keys_are_too_few(shape, options, divided):
    """For many threads; each visit of a task to a block and head is in one split."""
    few, many = (backward_schedule(threads, **arguments(*shape), **options) for threads in (2, 64))
    assert not any(splits for *_, splits in few["tasks"])
    assert any(splits for *_, splits in many["tasks"]) == divided
    visits = runpy.run_path(str(BENCHMARK))["visits"] if BENCHMARK.exists() else None
    if not visits:
        pytest.skip("the tests run without the benchmarks")
    heads = shape[2]
    seen = [
        sorted(
            (at, number, tiles)
            for task in found["tasks"]
            for head in range(heads[1])
            for tiles, at, number, *_ in visits(found, task, head, heads[0] // heads[1])
            if tiles
        )
        for found in (few, many)
    ]
    assert seen[0] == seen[1]


@pytest.mark.parametrize("heads", [(1, 1), (6, 3)])
def test_what_sees_no_key_is_not_divided(heads):
    dead = np.zeros((1, 1, 1024, 1024), bool)
    found = backward_schedule(64, **arguments(1024, 1024, heads), attention_mask=dead)
    assert found["sections"]
    assert {g["split_visits"] for g in found["sections"]} == {sys.maxsize}


BUSY = [
    # The share of the time in which threads work, at 16 and at 64 threads.
    ("full", (2048, 2048, (16, 16)), {}, 0.98, 0.98),
    ("causal", (2048, 2048, (16, 16)), {"causal": True}, 0.98, 0.95),
    ("shared keys", (4096, 4096, (32, 8), 128), {"causal": True}, 0.98, 0.97),
    ("documents", ([512] * 16, [512] * 16, (8, 8)), {"causal": True}, 0.98, 0.93),
    ("unequal documents", (DOCUMENTS, DOCUMENTS, (8, 8)), {"causal": True}, 0.98, 0.95),
    ("window", (8192, 8192, (16, 16)), WINDOW, 0.98, 0.97),
    ("batch", (1000, 1000, (2, 2), 64, 8), {}, 0.98, 0.92),
    ("8 heads", (512, 512, (8, 8)), {}, 0.98, 0.97),
    ("8 heads, causal", (512, 512, (8, 8)), {"causal": True}, 0.98, 0.87),
    ("4 heads, causal", (1024, 1024, (4, 4)), {"causal": True}, 0.98, 0.84),
    ("one head", (1024, 1024, (1, 1)), {}, 0.97, 0.91),
    ("one head, causal", (2048, 2048, (1, 1)), {"causal": True}, 0.98, 0.8),
    ("one long head, causal", (8192, 8192, (1, 1)), {"causal": True}, 0.98, 0.87),
    ("one head, window", (8192, 8192, (1, 1)), WINDOW, 0.97, 0.97),
]


@pytest.mark.parametrize(
    ("shape", "options", "of_16", "of_64"), [b[1:] for b in BUSY], ids=[b[0] for b in BUSY]
)
def test_threads_seldom_wait_in_backward(shape, options, of_16, of_64):
    """Simulated as in benchmarks/bench_schedule.py, where a visit of a task to a block takes a sixth of a tile."""
    if not BENCHMARK.exists():
        pytest.skip("the tests run without the benchmarks")
    makespan = runpy.run_path(str(BENCHMARK))["backward_makespan"]
    for threads, share in ((16, of_16), (64, of_64)):
        found = backward_schedule(threads, **arguments(*shape), **options)
        total, end = makespan(found, shape[2], threads, 1.0, 0.16)
        assert total / threads >= share * end


@pytest.mark.parametrize("threads", [-(2**70), -1, 0, 1025, 2**31, 2**32, 2**32 + 2, 2**63, 2**70])
def test_threads_are_bounded(threads):
    with pytest.raises(ValueError, match="threads must be from 1 to 1024, got"):
        schedule(4, 4, threads=threads)


@pytest.mark.parametrize("threads", [1, 1024])
def test_the_most_threads(threads):
    assert schedule(4, 4, threads=threads)["scratch"] > 0
