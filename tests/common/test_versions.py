"""What is said without other libraries, and with versions of them that are not known."""

import sys

import numpy as np
import pytest
from environment import import_paths, python

import attnmask

CODE = """
import sys, types
{before}
try:
    import attnmask.{module}
except ImportError as error:
    print(error, "attnmask.{module}" in sys.modules)
"""
NEEDED = {"transformers": "torch", "ejkernel": "jax"}  # before these look for their own library
TORCH = "attnmask.torch needs PyTorch"
TRANSFORMERS = "attnmask.transformers needs transformers"
# The module, the version that there seems to be or what else comes before, and how the error begins.
CASES = [
    ("torch", None, f"{TORCH}, which is not installed: pip install torch"),
    *(("torch", x, f"{TORCH} from 2.13 to below 3, got {x}") for x in ("2.12.1", "3.0.0", "1.13.1+cpu")),
    ("jax", None, "attnmask.jax needs JAX, which is not installed: pip install jax"),
    ("jax", "import jax; del jax.enable_x64", "attnmask.jax needs JAX 0.8 or later, got "),
    ("transformers", None, f"{TRANSFORMERS}, which is not installed"),
    *(("transformers", x, f"{TRANSFORMERS} from 5.0 to below 6, got {x}") for x in ("4.57.6", "6.0.0")),
    ("flash_attn", "sys.modules['torch'] = None", f"{TORCH}, which is not installed: pip install torch"),
    ("ejkernel", None, "attnmask.ejkernel needs ejkernel, which cannot be imported"),
    ("ejkernel", "0.0.30", "attnmask.ejkernel needs ejkernel 0.0.31 or later, got 0.0.30"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "before", "error"), CASES)
def test_the_error_says_what_is_needed(module, before, error):
    """And no half-imported module remains."""
    pytest.importorskip("jax" if "jax" in (before or "") else NEEDED.get(module, "numpy"))
    if before is None or before[0].isdigit():
        made = f"types.SimpleNamespace(__version__={before!r})" if before else None
        before = f"sys.modules[{module!r}] = {made}"
    result = python(CODE.format(module=module, before=before), **import_paths())
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(error)
    assert result.stdout.endswith(" False\n")


def test_bfloat16_without_ml_dtypes(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    x = np.zeros((1, 5, 2, 8), np.float32)
    with pytest.raises(ImportError, match="key is of bfloat16, for which NumPy needs ml_dtypes"):
        attnmask.flash_attention(x, torch.zeros(x.shape, dtype=torch.bfloat16), x)
