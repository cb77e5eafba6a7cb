"""Import PyTorch, and check that its version handles operators in the known way."""

from types import CodeType
from typing import Any

try:
    import torch
except ImportError as _missing:
    raise ImportError("attnmask.torch needs PyTorch, which is not installed: pip install torch") from _missing

_version = tuple(int(part) for part in torch.__version__.split(".")[:2])
if not (2, 13) <= _version < (3, 0):
    raise ImportError(f"attnmask.torch needs PyTorch from 2.13 to below 3, got {torch.__version__}")

from torch.utils._python_dispatch import (  # noqa: E402
    _disable_current_modes as without_modes,
)

from attnmask._common.graphs import CODES, left_to_python  # noqa: E402

_SKIP = torch._C._dynamo.eval_frame._FrameAction.SKIP


def _skip(code: CodeType) -> None:
    """`torch.compiler.disable` marks a function alone; what a call skips with all that it calls has no public way."""
    strategy = torch._C._dynamo.eval_frame._FrameExecStrategy(_SKIP, _SKIP)  # and all that it calls
    torch._C._dynamo.eval_frame.set_code_exec_strategy(code, strategy)


def between_graphs(function: Any, instead: str) -> None:
    """Have compiled functions call this one between two graphs, and say `instead` where they may have one alone."""
    left_to_python(function, instead)
    _skip(function.__code__)


for _code in CODES:
    _skip(_code)

__all__ = ["between_graphs", "torch", "without_modes"]
