"""Write the .pyi files of what is made from tables and rows; tests/common/test_signatures.py checks them."""

from collections.abc import Callable
from inspect import Parameter, Signature
from pathlib import Path

from attnmask._attention import arguments as table
from attnmask._faces import attention, flash_attn, linear, rows, sums
from attnmask._faces.rows import NUMPY, Face, Row

PACKAGE = Path(__file__).parents[1] / "attnmask"
WIDTH = 110
ATTENTION = """
from collections.abc import Sequence
from typing import Literal, SupportsIndex, overload

from numpy.typing import ArrayLike, DTypeLike

from attnmask._attention.arguments import Diagonal
from attnmask._attention.backward import Vjp
from attnmask._attention.hints import BwdParams, FwdParams, Precision
from attnmask._attention.problem import FlashAttentionGrads, FlashAttentionSecondGrads
from attnmask._attention.weights import AttentionStatistics, Queries, Statistic
from attnmask._common.types import Array
from attnmask._masks.info import MaskInfo
"""
CACHE = """
from collections.abc import Sequence
from typing import Literal, SupportsIndex, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnmask._attention.weights import AttentionStatistics, Statistic
from attnmask._common.types import Array
from attnmask._masks.info import MaskInfo
"""
LINEAR = """
from typing import Literal, overload

from numpy.typing import ArrayLike

from attnmask._common.types import Array
from attnmask._linear.grads import {grads}Grads, Vjp, VjpWithState
"""
SUMS = """
from numpy.typing import ArrayLike, DTypeLike

from attnmask._common.types import Array
from attnmask._linear.grads import Vjp
"""
TORCH = """
from typing import Literal, overload

import torch
from numpy.typing import ArrayLike
"""
WEIGHTS = """
from collections.abc import Sequence
from typing import Literal

{library}
from attnmask._attention.arguments import Diagonal
from attnmask._attention.weights import AttentionStatistics, Queries, Statistic
from attnmask._masks.info import MaskInfo
"""
TORCH_WEIGHTS = (
    WEIGHTS.format(library="import torch\nfrom numpy.typing import ArrayLike\n")
    + "from attnmask.torch._states import MaskTensors\n"
)
JAX_WEIGHTS = WEIGHTS.format(
    library="import jax\nimport numpy.typing as npt\nfrom jax.typing import ArrayLike\n"
)
JAX = """
from typing import Generic, Literal, TypeVar, Unpack, overload

import jax
import numpy.typing as npt
from jax.typing import ArrayLike

from attnmask._attention.arguments import Call
from attnmask._masks.info import MaskInfo
from attnmask.jax._types import KVCacheResult

_Flag = TypeVar("_Flag", bound=bool)

class _Call(Call[_Flag], Generic[_Flag], total=False):
    callback: bool

"""
# How the libraries write types, without the libraries.
IN_TORCH = NUMPY._replace(
    array="torch.Tensor",
    state="torch.Tensor",
    result="torch.Tensor",
    dtype="torch.dtype",
    imports="torch",
    named={
        "attention_statistics": "AttentionStatistics",
        "attention_statistics_with_kvcache": "AttentionStatistics",
    },
    mask="MaskInfo | MaskTensors",
)
IN_FLASH_ATTN = IN_TORCH._replace(integers="torch.Tensor")
IN_JAX = NUMPY._replace(
    array="ArrayLike",
    state="ArrayLike",
    integers="npt.ArrayLike",
    result="jax.Array",
    returns_state=True,
    dtype="npt.DTypeLike",
    imports="jax",
    named={
        "flash_attention_with_kvcache": "KVCacheResult",
        "attention_statistics": "AttentionStatistics",
    },
)
IN_FACES = (
    linear.LINEAR_ATTENTION, linear.LINEAR_ATTENTION_STEP, linear.SHORT_CONVOLUTION, linear.SHORT_CONVOLUTION_STEP
)  # fmt: skip
TO_CACHES = attention.CACHE, attention.WRITE
LOOKING = attention.WEIGHTS, attention.STATISTICS
ALL_SUMS = [row for row in vars(sums).values() if isinstance(row, Row)]
SUMMED = [row for row in ALL_SUMS if not row.returns_vjp]
RESULT = "Array"


def declared(
    name: str, signature: Signature, result: str, flag: str = "", value: bool | None = None, more: str = ""
) -> str:
    """Return a signature for ``flag=value``; None leaves the annotation as it is. `more` names arguments by keyword."""
    parts, by_name = [], False
    for row in signature.parameters.values():
        if more and row.kind is Parameter.KEYWORD_ONLY:
            continue
        annotation, default = row.annotation, "" if row.default is Parameter.empty else f" = {row.default!r}"
        required = row.name == flag and value is True  # so that none before it may have a default
        if (row.kind is Parameter.KEYWORD_ONLY or required) and not by_name:
            parts.append("*")
            by_name = True
        if row.name == flag and value is not None:
            annotation, default = f"Literal[{value}]", "" if value else default
        parts.append(f"{row.name}: {annotation}{default}")
    if more:
        parts.append(f"**more: Unpack[{more}[{'bool' if value is None else f'Literal[{value}]'}]]")
    lines = ["   "]
    for part in parts:
        if len(lines[-1]) + len(part) + 2 > WIDTH:
            lines.append("   ")
        lines[-1] += f" {part},"
    return "\n".join([f"def {name}(", *lines, f") -> {result}: ..."])


def overloaded(
    name: str, signature: Signature, flag: str, result: Callable[[bool | None], str], more: str = ""
) -> list[str]:
    """Return a signature for each value of a flag, if there is one."""
    if not flag:
        return [declared(name, signature, result(None))]
    return [
        f"@overload\n{declared(name, signature, result(value), flag, value, more)}"
        for value in (False, True, None)
    ]


def of_function(function: table.Function) -> list[str]:
    def result(lse: bool | None) -> str:
        either, both = function.signature.return_annotation, f"tuple[{RESULT}, {RESULT}]"
        return either if lse is None else either.replace(f"{RESULT} | {both}", both if lse else RESULT)

    flag = "return_lse" if "return_lse" in function.names else ""
    return overloaded(function.name, function.signature, flag, result)


def of_row(row: Row, face: Face, more: str = "") -> list[str]:
    flag = "" if row.name in face.named else row.all
    return overloaded(
        row.name, rows.signature(row, face), flag, lambda every: rows.returned(row, face, every), more
    )


def stub(imports: str, *functions: list[str]) -> str:
    texts = ['"""Written by .ci/make_signatures.py."""\n# fmt: off', imports]
    return "\n".join(texts + [text for function in functions for text in function]) + "\n"


STUBS = {  # path: imports, functions
    PACKAGE / "_attention" / "flash_attention.pyi": (
        ATTENTION,
        *map(
            of_function,
            (
                table.FLASH_ATTENTION,
                table.FLASH_ATTENTION_FWD,
                table.FLASH_ATTENTION_VJP,
                table.FLASH_ATTENTION_BWD,
                table.FLASH_ATTENTION_JVP,
                table.FLASH_ATTENTION_BWD_VJP,
                table.ATTENTION_WEIGHTS,
                table.ATTENTION_STATISTICS,
            ),
        ),
    ),
    PACKAGE / "_cache" / "flash_attention_with_kvcache.pyi": (
        CACHE,
        of_function(table.FLASH_ATTENTION_WITH_KVCACHE),
        of_function(table.ATTENTION_STATISTICS_WITH_KVCACHE),
    ),
    PACKAGE / "_linear" / "attention.pyi": (
        LINEAR.format(grads="LinearAttention"),
        of_row(linear.LINEAR_ATTENTION, NUMPY),
        of_row(linear.LINEAR_ATTENTION_VJP, NUMPY),
        of_row(linear.LINEAR_ATTENTION_STEP, NUMPY),
    ),
    PACKAGE / "_linear" / "short_convolution.pyi": (
        LINEAR.format(grads="ShortConvolution"),
        of_row(linear.SHORT_CONVOLUTION, NUMPY),
        of_row(linear.SHORT_CONVOLUTION_VJP, NUMPY),
        of_row(linear.SHORT_CONVOLUTION_STEP, NUMPY),
    ),
    PACKAGE / "_sequences" / "cumsum.pyi": (
        SUMS,
        *(of_row(row, NUMPY) for row in ALL_SUMS),
    ),
    PACKAGE / "torch" / "_linear.pyi": (TORCH, *(of_row(row, IN_TORCH) for row in (*IN_FACES, *SUMMED))),
    PACKAGE / "torch" / "_weights.pyi": (
        TORCH_WEIGHTS,
        *(of_row(row, IN_TORCH) for row in (*LOOKING, attention.CACHE_STATISTICS)),
    ),
    PACKAGE / "flash_attn" / "_functions.pyi": (
        "\nfrom typing import Literal, overload\n\nimport torch\n",
        *(of_row(row, IN_FLASH_ATTN) for row in (*flash_attn.ATTENTION, flash_attn.CACHE)),
    ),
    PACKAGE / "jax" / "_weights.pyi": (JAX_WEIGHTS, *(of_row(row, IN_JAX) for row in LOOKING)),
    PACKAGE / "jax" / "_functions.pyi": (
        JAX,
        of_row(attention.ATTENTION, IN_JAX, "_Call"),
        *(of_row(row, IN_JAX) for row in (*TO_CACHES, *IN_FACES, *SUMMED)),
    ),
}

if __name__ == "__main__":
    for path, contents in STUBS.items():
        path.write_text(stub(*contents))
