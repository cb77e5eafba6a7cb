"""Mark functions that `torch.compile` leaves to Python: they compute with NumPy and C, which it cannot follow.

By these marks a graph ends before such a function; or, with ``fullgraph=True``, the error says what to do instead. Once
PyTorch is loaded, `attnmask.torch._import` also has it leave alone what the function calls.
"""

from types import CodeType
from typing import Any

__all__ = ["CODES", "left_to_python"]

CODES: list[CodeType] = []


def left_to_python(function: Any, instead: str) -> None:
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = instead
    CODES.append(function.__code__)
