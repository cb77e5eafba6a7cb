"""Attention operators by name, behind one call, with shared settings and tools to write your own.

Make an operator by name and call it with arrays ``[B, T, H, D]`` and a mask, an array or a `MaskInfo`::

    op = OperationRegistry.create("flash", OperationMetadata(dropout_prob=0.1))
    out = op(query, key, value, mask=None, bias=None, causal=False, **more).attention_outputs

``"flash"`` is `attnmask.flash_attention`. ``"vanilla"`` is the same in plain NumPy and also returns the weights; it
needs memory for every pair of a query and a key. To add one, subclass `OperationImpl` and decorate it with
`OperationRegistry.register`.

Examples
--------
>>> import numpy as np
>>> from attnmask.operations import OperationRegistry
>>> x = np.zeros((1, 3, 1, 8), np.float32)
>>> OperationRegistry.create("vanilla")(x, x, x, causal=True).attention_weights[0, 0].round(2)
array([[1.  , 0.  , 0.  ],
       [0.5 , 0.5 , 0.  ],
       [0.33, 0.33, 0.33]], dtype=float32)
"""

from attnmask.operations._attention import FlashAttention, VanillaAttention
from attnmask.operations._base import OperationImpl, OperationMetadata, OperationOutput
from attnmask.operations._registry import OperationRegistry

__all__ = [
    "FlashAttention",
    "OperationImpl",
    "OperationMetadata",
    "OperationOutput",
    "OperationRegistry",
    "VanillaAttention",
]
__dir__ = __all__.copy  # what completion offers
