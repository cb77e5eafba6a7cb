"""Random arguments of attention and its caches beside the twins, at one level in turn; `make fuzz` tries many more."""

import masked_attention
import pytest
import random_cases
from environment import SANITIZED

pytestmark = [pytest.mark.levels("once"), pytest.mark.filterwarnings("ignore::attnmask.AttnmaskWarning")]

EACH, LEVELS = 50, masked_attention.LEVELS


@pytest.mark.parametrize("first", range(0, 100 if SANITIZED else 800, EACH))
def test_random_cases(first):
    for number in range(first, first + EACH):
        random_cases.check(0, number, [LEVELS[number // len(random_cases.DRAWS) % len(LEVELS)]])
