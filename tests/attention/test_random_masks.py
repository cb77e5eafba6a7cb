"""Attention under random masks, at every level, beside dense attention; `make fuzz` tries many more."""

import masked_attention
import pytest
from environment import SANITIZED

pytestmark = pytest.mark.filterwarnings(
    "ignore::attnmask.AttnmaskWarning"
)  # some masks seldom mean what they say

EACH = 100


@pytest.mark.parametrize("first", range(0, 300 if SANITIZED else 3000, EACH))
def test_attention_under_random_masks(first):
    for number in range(first, first + EACH):
        masked_attention.check(0, number)
