"""What a type checker says of calls: nothing of right ones, and of wrong words that they are wrong."""

import subprocess
import sys

import pytest

RIGHT = """
import numpy as np
import attnmask
from attnmask import MaskInfo

mask = MaskInfo.causal(4, offset="bottom-right") & MaskInfo.full(4).apply_causal(np.int64(1))
mask = mask.apply_causal(np.array([1])).apply_causal([1]).apply_sliding_window((1, 0), offset="bottom-right")
lengths: MaskInfo = MaskInfo.from_lengths([1, 2], max_len=4)
padding: MaskInfo = MaskInfo.from_padding_mask(np.ones((2, 3)))
packed, starts = attnmask.pack(np.zeros((2, 3), np.float32), [1, 2])
total = packed.sum() + starts[-1]
padded = attnmask.unpack(packed, starts, 3, fill=-1).mean()
"""
WRONG = """
MaskInfo.causal(4, offset="bottom-rigt")
mask.apply_causal("bottom-rigt")
mask.apply_sliding_window((1, 0), offset="bottom-rigt")
mask.apply_sliding_window((1, 0), mode="decod")
MaskInfo.full("4")
mask.visualize(charset="latin")
mask.apply_token_type_ids([[1]], combine="unio")
"""


def test_checked_by_mypy(tmp_path):
    pytest.importorskip("mypy")
    file = tmp_path / "user.py"
    file.write_text(RIGHT + WRONG)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache", file]
    result = subprocess.run(command, capture_output=True, text=True)
    first = len(RIGHT.splitlines()) + 2
    lines = [int(line.split(":")[1]) for line in result.stdout.splitlines() if ": error:" in line]
    assert lines == list(range(first, first + len(WRONG.splitlines()) - 1)), result.stdout + result.stderr
