"""Write the .pyi files of attention from the table of arguments; tests/common/test_signatures.py checks them."""

from inspect import Parameter
from pathlib import Path

from attnmask._attention import arguments as table

PACKAGE = Path(__file__).parents[1] / "attnmask"
ATTENTION = """
from typing import Literal, SupportsIndex, overload

from numpy.typing import ArrayLike, DTypeLike

from attnmask._attention.arguments import Diagonal
from attnmask._attention.backward import Vjp
from attnmask._attention.hints import BwdParams, FwdParams, Precision
from attnmask._attention.problem import FlashAttentionGrads
from attnmask._common.types import Array
from attnmask._masks.info import MaskInfo
"""
CACHE = """
from typing import Literal, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnmask._common.types import Array
from attnmask._masks.info import MaskInfo
"""
STUBS = {  # path: imports, functions
    PACKAGE / "_attention" / "flash_attention.pyi": (
        ATTENTION,
        table.FLASH_ATTENTION,
        table.FLASH_ATTENTION_FWD,
        table.FLASH_ATTENTION_VJP,
        table.FLASH_ATTENTION_BWD,
    ),
    PACKAGE / "_cache" / "flash_attention_with_kvcache.pyi": (CACHE, table.FLASH_ATTENTION_WITH_KVCACHE),
}
RESULT = "Array"


def declared(function: table.Function, lse: bool | None) -> str:
    """Return the signature for ``return_lse=lse``; None leaves the annotation as it is."""
    lines, by_name = [f"def {function.name}("], False
    for row in function.signature.parameters.values():
        annotation, default = row.annotation, "" if row.default is Parameter.empty else f" = {row.default!r}"
        if row.kind is Parameter.KEYWORD_ONLY and not by_name:
            lines.append("    *,")
            by_name = True
        if row.name == "return_lse" and lse is not None:
            annotation, default = f"Literal[{lse}]", "" if lse else default
        lines.append(f"    {row.name}: {annotation}{default},")
    result = function.signature.return_annotation
    both = f"tuple[{RESULT}, {RESULT}]"
    if lse is not None:
        result = result.replace(f"{RESULT} | {both}", both if lse else RESULT)
    return "\n".join([*lines, f") -> {result}: ..."])


def stub(imports: str, *functions: table.Function) -> str:
    texts = ['"""Written by .ci/make_signatures.py."""', imports]
    for function in functions:
        if "return_lse" in function.names:
            texts += [f"@overload\n{declared(function, lse)}" for lse in (False, True, None)]
        else:
            texts.append(declared(function, None))
    return "\n".join(texts) + "\n"


if __name__ == "__main__":
    for path, contents in STUBS.items():
        path.write_text(stub(*contents))
