"""Import PyTorch, and check that its version handles operators in the known way."""

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

from attnmask._common.graphs import CODES  # noqa: E402

# `torch.compiler.disable` marks a function alone; what a call skips with all that it calls has no public way.
_skip = torch._C._dynamo.eval_frame._FrameAction.SKIP
for _code in CODES:
    torch._C._dynamo.eval_frame.set_code_exec_strategy(
        _code,
        torch._C._dynamo.eval_frame._FrameExecStrategy(_skip, _skip),  # and all that it calls
    )

__all__ = ["torch", "without_modes"]
