"""Arrays as tensors of PyTorch."""

import ml_dtypes
import numpy as np


def tensor(torch, x):
    """The same memory."""
    if not isinstance(x, np.ndarray):
        return x
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    if x.dtype.name.startswith("float8"):
        return torch.from_numpy(x.view(np.uint8)).view(getattr(torch, x.dtype.name))
    return torch.from_numpy(x)
