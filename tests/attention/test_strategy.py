"""How a section of queries is computed: a line for each decision, on both sides of each bound, for any processor."""

import ctypes

import pytest
from choices import choices_of
from kernel_table import type_of

# One block of few queries over 16 tiles of keys, float32 in vectors of 16 numbers.
USUAL = {
    "queries": 1,
    "q_blocks": 1,
    "tiles": 16,
    "kv_heads": 4,
    "heads_per_kv": 1,
    "head_dim": 64,
    "value_dim": 64,
    "type": "float32",
    "k_type": "float32",
    "panel": 32,
    "size": 4,
    "factor": 0.125,
    "width": 1,
    "packed_alone": False,
    "products_alone": True,
    "packs_rounded": False,
    "queries_readable": True,
    "alone": False,
    "values_readable": True,
}
SUMS = {"products_alone": False}  # logits are more than products: no tile is transposed
BF16 = {"width": 2, "k_type": "bfloat16", **SUMS}
AVX2, SSE = {"panel": 16}, {"panel": 8}
LONG = {"head_dim": 128, "value_dim": 128}


@pytest.fixture(scope="module")
def choose(tmp_path_factory):
    """Returns a section's shape by name, as schedule.c makes it. Its tiles are seen by each block, unless told."""
    core, types, _ = choices_of(tmp_path_factory.mktemp("choices"), "core/attention/plan/strategy")

    def choose(changes, all_tiles=None, most=None):
        numbers = USUAL | changes
        numbers |= {name: type_of(numbers[name]) for name in ("type", "k_type")}
        work = ctypes.byref(types["am_work"](**numbers))
        shape = core.am_choose_shape(work)
        most = numbers["tiles"] if most is None else most
        all_tiles = most * numbers["q_blocks"] if all_tiles is None else all_tiles
        if not (counts := core.am_counts_tiles(work, ctypes.byref(shape))):
            all_tiles = most = numbers["tiles"]
        core.am_choose_splits(work, ctypes.byref(shape), all_tiles, most)
        found = {name: getattr(shape, name) for name, _ in shape._fields_}
        return found | {"strategy": core.am_strategy_name(shape.strategy).decode(), "counts_tiles": counts}

    return choose


STRATEGIES = [
    # Few rows read keys where they lie: more rows where vectors and keys are long.
    ({}, "unpacked"),
    ({"queries": 16, **SUMS}, "unpacked"),
    ({"queries": 17, **SUMS}, "private"),
    ({"queries": 24, **SUMS, **LONG}, "unpacked"),
    ({"queries": 25, **SUMS, **LONG}, "private"),
    ({"queries": 17, **SUMS, **LONG, **AVX2}, "private"),
    ({"queries": 17, **SUMS, "head_dim": 129, "value_dim": 129}, "private"),
    ({"queries": 17, **SUMS, "head_dim": 96, "value_dim": 96}, "private"),
    # Keys that are widened: fewer rows if they are short, or no whole vectors, or vectors have four numbers.
    ({"queries": 16, "k_type": "float16", **SUMS}, "unpacked"),
    ({"queries": 12, "k_type": "float16", "head_dim": 32, **SUMS}, "unpacked"),
    ({"queries": 13, "k_type": "float16", "head_dim": 32, **SUMS}, "private"),
    ({"queries": 13, "k_type": "float16", "head_dim": 65, **SUMS}, "private"),
    ({"queries": 16, "k_type": "float16", "head_dim": 96, "value_dim": 96, **SUMS}, "unpacked"),
    ({"queries": 16, "k_type": "float16", **AVX2, **SUMS}, "unpacked"),
    ({"queries": 13, "k_type": "float16", **SSE, **SUMS}, "private"),
    # Integers are multiplied for any number of rows, but not by bf16x2.
    ({"queries": 64, "k_type": "int8", "packs_rounded": True}, "unpacked"),
    ({"queries": 64, "k_type": "int8"}, "private"),
    ({"queries": 17, "k_type": "int8", "packs_rounded": True, "width": 2}, "private"),
    ({"queries": 13, "k_type": "int8", "packs_rounded": True, "head_dim": 32}, "private"),
    # Formats that no kernel reads: float8_e5m2, and int4 in uint8.
    ({"queries": 12, "k_type": "float8_e5m2", "head_dim": 32}, "unpacked"),
    ({"queries": 13, "k_type": "float8_e5m2", "head_dim": 32}, "private"),
    ({"queries": 16, "k_type": "uint8"}, "unpacked"),
    ({"queries": 64, "k_type": "uint8"}, "private"),
    ({"queries": 64, "k_type": "uint8", "packs_rounded": True}, "unpacked"),
    # float8: short rows are widened at once; as bf16x2 they take longer.
    ({"k_type": "float8_e4m3fn", "head_dim": 1024}, "unpacked"),
    ({"k_type": "float8_e4m3fn", "head_dim": 1025}, "private"),
    ({"queries": 16, "k_type": "float8_e4m3fn"}, "unpacked"),
    ({"queries": 8, "k_type": "float8_e4m3fn", "width": 2}, "unpacked"),
    ({"queries": 9, "k_type": "float8_e4m3fn", "width": 2}, "private"),
    # Tiles of the processor pack sooner.
    ({"queries": 16, **BF16}, "unpacked"),
    ({"queries": 13, **BF16, "packed_alone": True}, "private"),
    # Transposed: rows that fill vectors, of long panels, over more than two tiles.
    ({"queries": 12}, "unpacked"),
    ({"queries": 13}, "unpacked"),
    ({"queries": 14}, "transposed"),
    ({"queries": 16}, "transposed"),
    ({"queries": 17}, "private"),
    ({"queries": 28}, "transposed"),
    ({"queries": 48}, "private"),
    ({"queries": 60}, "transposed"),
    ({"queries": 55}, "private"),
    ({"queries": 16, "tiles": 2}, "unpacked"),
    ({"queries": 32, "tiles": 3}, "transposed"),
    ({"queries": 32, "tiles": 2}, "private"),
    ({"queries": 32, **AVX2}, "private"),
    ({"queries": 32, **SUMS}, "private"),
    ({"queries": 16, "k_type": "float16"}, "unpacked"),
    ({"queries": 32, "k_type": "int8"}, "private"),
    ({"queries": 32, "head_dim": 0}, "private"),
    ({"queries": 32, "width": 2, "k_type": "bfloat16"}, "transposed"),
    ({"queries": 32, "factor": -1.0}, "transposed"),
    ({"queries": 32, "width": 2, "k_type": "bfloat16", "factor": 0.0}, "private"),
    ({"queries": 32, "width": 2, "k_type": "bfloat16", "packed_alone": True}, "private"),
    # The only tile of a section is transposed whatever its logits are: from a quarter of a panel on, up to 56 rows
    # where vectors are short; keys that are converted from more rows on, up to 32, and for one block.
    ({"tiles": 1, "queries": 7}, "unpacked"),
    ({"tiles": 1, "queries": 8}, "transposed"),
    ({"tiles": 1, "queries": 8, **SUMS}, "transposed"),
    ({"tiles": 1, "queries": 17, **SUMS}, "transposed"),
    ({"tiles": 1, "queries": 64}, "transposed"),
    ({"tiles": 1, "queries": 56, **SUMS}, "transposed"),
    ({"tiles": 1, "queries": 57, **SUMS}, "private"),
    ({"tiles": 2, "queries": 8}, "unpacked"),
    ({"tiles": 1, "queries": 3, **AVX2}, "unpacked"),
    ({"tiles": 1, "queries": 4, **AVX2}, "transposed"),
    ({"tiles": 1, "queries": 56, **AVX2}, "transposed"),
    ({"tiles": 1, "queries": 57, **AVX2}, "private"),
    ({"tiles": 1, "queries": 8, **SSE}, "unpacked"),
    ({"tiles": 1, "queries": 8, "k_type": "float16"}, "unpacked"),
    ({"tiles": 1, "queries": 9, "k_type": "float16"}, "transposed"),
    ({"tiles": 1, "queries": 32, "k_type": "float16"}, "transposed"),
    ({"tiles": 1, "queries": 33, "k_type": "float16"}, "private"),
    ({"tiles": 1, "queries": 20, "heads_per_kv": 4, "k_type": "float16"}, "lockstep"),
    ({"tiles": 1, "queries": 20, "heads_per_kv": 4}, "transposed"),
    ({"tiles": 1, "queries": 8, "width": 2, "k_type": "bfloat16", "factor": -1.0}, "transposed"),
    ({"tiles": 1, "queries": 20, "width": 2, "k_type": "bfloat16", "packed_alone": True}, "private"),
    ({"tiles": 1, "queries": 20, "k_type": "int8"}, "private"),
    ({"tiles": 1, "queries": 20, "head_dim": 0}, "private"),
    # Several heads share keys: in one block, or in blocks that take tiles in lockstep.
    ({"heads_per_kv": 16}, "transposed"),
    ({"heads_per_kv": 16, **SUMS}, "unpacked"),
    ({"heads_per_kv": 17, **SUMS}, "private"),
    ({"queries": 32, "heads_per_kv": 2, **SUMS}, "private"),
    ({"queries": 32, "heads_per_kv": 3, **SUMS}, "lockstep"),
    ({"queries": 33, "heads_per_kv": 2, **SUMS}, "lockstep"),
    # More queries than a block has rows.
    ({"queries": 64, "q_blocks": 2}, "shared packing"),
    # Rows that must not depend on others are packed, however few they are.
    ({"alone": True}, "private"),
    ({"alone": True, "heads_per_kv": 16}, "private"),
    ({"alone": True, "queries": 32, "heads_per_kv": 4}, "lockstep"),
    ({"alone": True, "queries": 64, "q_blocks": 2}, "shared packing"),
]


@pytest.mark.parametrize(("changes", "strategy"), STRATEGIES, ids=str)
def test_strategy(choose, changes, strategy):
    assert choose(changes)["strategy"] == strategy


SPLITS = [
    # Unpacked keys: parts of 4 tiles, or of 8 for many rows, until there are 64 items.
    ({}, (4, 4)),
    ({"queries": 12, **SUMS}, (4, 4)),
    ({"queries": 13, **SUMS}, (2, 8)),
    ({"kv_heads": 32}, (2, 8)),
    ({"kv_heads": 64}, (1, 16)),
    ({"tiles": 3}, (1, 3)),
    ({"tiles": 5}, (2, 3)),
    ({"tiles": 0}, (1, 1)),
    # Packed keys: parts of 8 tiles, of 4 where there is much to do, and longer ones for many items.
    ({"queries": 64}, (2, 8)),
    ({"queries": 64, "kv_heads": 16}, (4, 4)),
    ({"queries": 64, "kv_heads": 64}, (1, 16)),
    ({"queries": 64, "q_blocks": 8}, (2, 8)),
    ({"queries": 64, "q_blocks": 128}, (1, 16)),
    ({"queries": 64, "tiles": 17}, (3, 6)),
    ({"queries": 64, "tiles": 17, "kv_heads": 15}, (3, 6)),
    ({"queries": 64, "heads_per_kv": 4}, (4, 4)),
    ({"alone": True, "tiles": 64}, (4, 16)),
    ({"alone": True, "tiles": 64, "kv_heads": 1024}, (4, 16)),
    ({"alone": True, "tiles": 64, "queries": 64, "q_blocks": 16}, (4, 16)),
]


@pytest.mark.parametrize(("changes", "splits"), SPLITS, ids=str)
def test_splits(choose, changes, splits):
    found = choose(changes)
    assert (found["splits"], found["split_tiles"]) == splits


def test_splits_follow_from_what_blocks_see(choose):
    """A causal mask halves what eight blocks see in all; a window leaves little."""
    shape = {"queries": 64, "q_blocks": 8, "tiles": 64, "kv_heads": 1}
    full, causal, window = choose(shape), choose(shape, 260, 64), choose(shape, 16, 2)
    assert [x["split_tiles"] for x in (full, causal, window)] == [8, 5, 2]


@pytest.mark.parametrize(("blocks", "splits"), [(511, 32), (512, 1)])
def test_items_may_differ_if_there_are_many(choose, blocks, splits):
    """One block sees 512 tiles, and each of the others one."""
    shape = {"queries": 64, "q_blocks": blocks, "tiles": 512, "kv_heads": 1}
    assert choose(shape, 1024, 512)["splits"] == splits


BLOCKS = [
    ({"heads_per_kv": 8}, (8, 8, 1)),
    ({"queries": 8, "heads_per_kv": 16}, (64, 8, 2)),
    ({"queries": 32, "heads_per_kv": 8}, (64, 2, 4)),
    ({"queries": 33, "heads_per_kv": 8}, (33, 1, 8)),
    ({"queries": 1, "heads_per_kv": 100}, (64, 64, 2)),
]


@pytest.mark.parametrize(("changes", "expected"), BLOCKS, ids=str)
def test_heads_of_a_block(choose, changes, expected):
    found = choose(changes)
    assert (found["rows"], found["block_heads"], found["head_blocks"]) == expected


FEW = {"queries": 40, "tiles": 2, **SUMS}
FLAGS = [
    # One block over few tiles: keys are scaled, and queries read where they lie.
    (FEW, "scales_keys", True),
    (FEW | {"tiles": 3}, "scales_keys", False),
    (FEW | {"factor": 1.5}, "scales_keys", False),
    (FEW | BF16, "scales_keys", False),
    (FEW, "queries_direct", True),
    (FEW | {"factor": 1.5}, "queries_direct", False),
    (FEW | BF16, "queries_direct", True),
    (FEW | {"queries_readable": False}, "queries_direct", False),
    (FEW | {"queries": 20, "heads_per_kv": 2}, "queries_direct", False),
    (FEW | {"factor": 1.0}, "scales_keys", True),
    # Tiles that blocks see are counted, unless there are many items, or all see the same.
    ({"queries": 64}, "counts_tiles", False),
    ({"queries": 64, "q_blocks": 2}, "counts_tiles", True),
    ({"queries": 64, "q_blocks": 511, "kv_heads": 1}, "counts_tiles", True),
    ({"queries": 64, "q_blocks": 512, "kv_heads": 1}, "counts_tiles", False),
    # Values of one block stay where they are: always with long vectors, else for up to three strips.
    ({"queries": 64, **SUMS}, "values_unpacked", True),
    ({"queries": 64, **SUMS, "values_readable": False}, "values_unpacked", False),
    ({"queries": 25, **SUMS, **AVX2}, "values_unpacked", False),
    ({"queries": 24, **SUMS, **AVX2}, "values_unpacked", True),
    ({"queries": 56, "tiles": 1, **AVX2}, "values_unpacked", True),
    # Rows of the only tile that see different keys are transposed if they are few.
    ({"queries": 17, "tiles": 1}, "one_tile", True),
    ({"queries": 16, "tiles": 1}, "one_mixed_tile", True),
    ({"queries": 17, "tiles": 1}, "one_mixed_tile", False),
    ({"queries": 16, "tiles": 3}, "one_tile", False),
    ({"queries": 16, "tiles": 3}, "one_mixed_tile", False),
    ({"queries": 64, "q_blocks": 2}, "values_unpacked", False),
    ({"queries": 40, **BF16, "packed_alone": True}, "values_unpacked", False),
    # Weights beside bfloat16 stay float32 where memory is what a block waits for.
    ({"queries": 4, **BF16}, "float_weights", True),
    ({"queries": 5, **BF16}, "float_weights", False),
    ({"queries": 12, **BF16, "packed_alone": True}, "float_weights", True),
    ({"queries": 12, **BF16, "k_type": "int8"}, "float_weights", True),
    ({"queries": 8, **BF16, "k_type": "uint8", "packs_rounded": True}, "float_weights", True),
    ({"queries": 9, **BF16, "k_type": "uint8", "packs_rounded": True}, "float_weights", False),
    # int4 beside bfloat16 is widened for more than a few rows.
    ({"queries": 8, **BF16, "k_type": "uint8", "packs_rounded": True}, "widens_rows", False),
    ({"queries": 9, **BF16, "k_type": "uint8", "packs_rounded": True}, "widens_rows", True),
    ({"queries": 12, "k_type": "uint8", "packs_rounded": True}, "widens_rows", False),
    ({"queries": 12, **BF16, "k_type": "int8", "packs_rounded": True}, "widens_rows", False),
    ({"queries": 12, **BF16, "k_type": "uint8"}, "float_weights", False),
    ({"queries": 4, **BF16, "k_type": "float8_e4m3fn"}, "float_weights", False),
    ({"queries": 4}, "float_weights", False),
    ({"queries": 4, "k_type": "int8"}, "float_weights", False),
    ({"queries": 40, **BF16, "k_type": "int8"}, "float_weights", False),
]


@pytest.mark.parametrize(("changes", "flag", "expected"), FLAGS, ids=str)
def test_flags(choose, changes, flag, expected):
    assert choose(changes)[flag] is expected
