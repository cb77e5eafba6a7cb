"""bfloat16 of PyTorch where NumPy has none; test_every_function.py has all arrays of other libraries."""

import sys

import numpy as np
import pytest

import attnmask


def test_bfloat16_without_ml_dtypes(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    x = np.zeros((1, 5, 2, 8), np.float32)
    with pytest.raises(ImportError, match="key is of bfloat16, for which NumPy needs ml_dtypes"):
        attnmask.flash_attention(x, torch.zeros(x.shape, dtype=torch.bfloat16), x)
