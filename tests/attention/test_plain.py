"""The level `plain` gives what the float64 twins give, and the other levels give what it gives."""

import numpy as np
import pytest
from environment import SANITIZED
from flash_cases import BF16, F16, F32, F64
from flash_expected import CASES, GRADIENT_CASES, name_of
from flash_expected import check as check_case
from fuzzer import arrays_in
from kvcache_cases import CASES as CACHE_CASES
from kvcache_cases import arguments_of, check, right_of
from targets import TARGETS

from attnmask import _core

pytestmark = pytest.mark.levels("turns", "amx", "avx512vnni")

STEP = 20 if SANITIZED else 1


@pytest.mark.parametrize("case", [*CASES[:: 2 * STEP], *GRADIENT_CASES[:: 2 * STEP]], ids=name_of)
def test_results_and_gradients(plain, case):
    check_case(case)


@pytest.mark.parametrize("case", CACHE_CASES[:: 4 * STEP], ids=lambda case: str(case.seed))
def test_caches(plain, case):
    check(case, right_of(case), arguments_of(case))


# The largest error, of the largest number of an array: of results, and of gradients.
ERRORS = {F64: (1e-13, 1e-12), F32: (2e-6, 1e-5), F16: (1e-3, 2e-3), BF16: (1e-2, 2e-2)}
NAMES = (
    "flash_attention", "flash_attention_vjp", "flash_attention_with_kvcache",
    "flash_attention_with_kvcache of four bits", "flash_attention_with_kvcache of a prefix", "linear_attention",
    "linear_attention_vjp", "linear_attention_step",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_other_levels_give_the_same(isa, name):
    """Of any right arguments."""
    for seed in range(0, 80, STEP):
        arguments, results = TARGETS[name].arguments, []
        for level in ("plain", isa):
            _core.use_isa(level)
            results.append(arrays_in(TARGETS[name].call(**arguments(np.random.default_rng(seed)))))
        error = ERRORS[results[0][0].dtype][name.endswith("vjp")]
        error = max(error, 1e-4) if "cache" in name else error
        for one, other in zip(*results, strict=True):
            one, other = (np.nan_to_num(x.astype(np.float64), neginf=-1e4) for x in (one, other))
            assert abs(one - other).max(initial=0) <= error * max(1, abs(one).max(initial=0)), seed
