"""Random calls with the arguments of the tests' cases and sizes of any number, compared with the twins.

The cases have each pair of arguments. A mistake that needs three of them together is found here.
"""

from collections.abc import Sequence
from typing import Any

import flash_cases
import flash_expected
import kvcache_cases
import numpy as np
from flash_cases import BF16, F16, F32, F64
from random_masks import Rng, any_of

import attnmask
from attnmask import _core

FEW, MORE, MANY = 20, 90, 300  # of queries, keys or tokens in a cache
PAGES = (1, 2, 4, 7, 8, 16, 32, 48, 64)
CHANNELS = (
    (64, 64), (128, 128), (32, 32), (96, 64), (80, 80), (16, 40), (33, 7), (24, 24), (256, 256), (1, 1),
)  # fmt: skip


def levels_of(rng: Rng, factors: dict[str, tuple]) -> dict[str, Any]:
    """Draw a level of some factors. The others keep their default."""
    return {name: any_of(rng, levels) for name, levels in factors.items() if rng.random() < 0.4}


def number_of(rng: Rng) -> int:
    return int(rng.integers(0, any_of(rng, (FEW, MORE, MORE, MANY))))


def heads_of(rng: Rng) -> tuple[int, int]:
    kv_heads = int(rng.integers(1, 4))
    return kv_heads * int(rng.integers(1, 9)), kv_heads


def attention_case(rng: Rng, number: int, kind: type, factors: dict[str, tuple]) -> flash_cases.Case:
    drawn = levels_of(rng, factors)
    if str(drawn.get("mask")).endswith("float32"):  # which may be zeros alone, and then is refused
        del drawn["mask"]
    queries = number_of(rng)
    drawn |= {"queries": queries, "keys": any_of(rng, (queries, number_of(rng)))}
    drawn |= {"heads": heads_of(rng), "batch": int(rng.integers(1, 6)), "seed": number}
    if rng.random() < 0.5:
        drawn |= {"depth": int(rng.integers(1, 70)), "value_depth": int(rng.integers(1, 70))}
    return kind(**drawn)


def forward_case(rng: Rng, number: int) -> flash_cases.Case:
    return attention_case(rng, number, flash_cases.Case, flash_cases.FACTORS)


def gradient_case(rng: Rng, number: int) -> flash_cases.Case:
    """Inputs of unit variance: gradients of larger ones may be denormal, which are flushed to 0."""
    factors = {name: levels for name, levels in flash_expected.GRADIENT_FACTORS.items() if name != "spread"}
    return attention_case(rng, number, flash_expected.GradientCase, factors)


def cached_case(rng: Rng, number: int) -> kvcache_cases.Case:
    kind = any_of(rng, kvcache_cases.KINDS)
    factors = any_of(rng, (kvcache_cases.FACTORS, kvcache_cases.EVERY_FORMAT))
    drawn = levels_of(rng, factors)
    for name in ("types", "kind", "query_type"):
        drawn.pop(name, None)
    count, most = int(rng.integers(1, 6)), any_of(rng, (2 * FEW, MORE, MANY))
    drawn |= {"lengths": tuple(rng.integers(1, most, count).tolist()), "heads": heads_of(rng)}
    if rng.random() < 0.6:
        drawn["queries"] = any_of(
            rng, (int(rng.integers(1, FEW)), tuple(rng.integers(0, FEW, count).tolist()))
        )
    if rng.random() < 0.5:
        drawn["page_size"] = any_of(rng, PAGES)
    if rng.random() < 0.5:
        drawn["depths"] = any_of(rng, CHANNELS)
    query_type = F64 if kind == F64 else any_of(rng, (F32, BF16, F16))
    return kvcache_cases.possible(kvcache_cases.Case((query_type, kind), **drawn, seed=number, order=number))


DRAWS = (forward_case, gradient_case, cached_case, cached_case)


def check(seed: int, number: int, levels: Sequence[str]) -> None:
    """Compare the case at each of these levels of instruction sets."""
    case = DRAWS[number % len(DRAWS)](np.random.default_rng([seed, number]), number)
    before = attnmask.show_config(mode="dict")
    level = ""
    try:
        attnmask.set_num_threads(case.threads)
        for level in levels:
            _core.use_isa(level)
            if isinstance(case, kvcache_cases.Case):
                kvcache_cases.check(case, kvcache_cases.right_of(case), kvcache_cases.arguments_of(case))
            else:
                flash_expected.check(case)
    except AssertionError as error:
        raise AssertionError(f"case {number} of seed {seed} at {level}: {error}") from error
    finally:
        _core.use_isa(before["isa"])
        attnmask.set_num_threads(before["threads"])
