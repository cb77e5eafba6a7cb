"""bfloat16 of PyTorch and of JAX; test_every_function.py has all other arrays of theirs."""

import sys

import ml_dtypes
import numpy as np
import pytest

import attnmask

RNG = np.random.default_rng(0)
QUERY, KEY, VALUE = (RNG.standard_normal((1, 5, heads, 8)).astype(np.float32) for heads in (4, 2, 2))


@pytest.mark.parametrize("library", ["torch", "jax.numpy"])
def test_bfloat16_of(library):
    module = pytest.importorskip(library)
    wide = [module.asarray(array) for array in (QUERY, KEY, VALUE)]
    narrow = [x.bfloat16() if library == "torch" else x.astype("bfloat16") for x in wide]
    right = attnmask.flash_attention(*(x.astype(ml_dtypes.bfloat16) for x in (QUERY, KEY, VALUE)))
    got = attnmask.flash_attention(*narrow)
    assert got.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(got, right)


def test_bfloat16_without_ml_dtypes(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ImportError, match="key is of bfloat16, for which NumPy needs ml_dtypes"):
        attnmask.flash_attention(QUERY, torch.zeros(1, 5, 2, 8, dtype=torch.bfloat16), VALUE)
