"""Arguments of attention that change no result: how it is cut into blocks, and what is accepted without effect."""

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np

from attnmask._common.arguments import describe, floating_dtype, integer
from attnmask._common.types import Given


class _HasName(Protocol):
    """For example a `jax.lax.Precision`."""

    @property
    def name(self) -> str: ...


Precision: TypeAlias = Literal["default", "high", "highest", "DEFAULT", "HIGH", "HIGHEST"] | int | _HasName
_PRECISIONS = ("default", "high", "highest")


@dataclass(frozen=True, slots=True)
class _Blocks:
    q_blocksize: int | None = None
    kv_blocksize: int | None = None

    def __post_init__(self) -> None:
        for name in ("q_blocksize", "kv_blocksize"):
            size = getattr(self, name)
            if size is not None:
                object.__setattr__(self, name, integer(size, name, 1))


class FwdParams(_Blocks):
    """Hints for how to cut attention into blocks. They may change speed and rounding, nothing else.

    Parameters
    ----------
    q_blocksize, kv_blocksize : int, optional
        Queries and keys per block, at least 1. Chosen for you if not given.

    Examples
    --------
    >>> import attnmask
    >>> attnmask.FwdParams(q_blocksize=64)
    FwdParams(q_blocksize=64, kv_blocksize=None)
    """

    __slots__ = ()


class BwdParams(_Blocks):
    """The same for gradients; see `FwdParams`.

    Parameters
    ----------
    q_blocksize, kv_blocksize : int, optional
        As in `FwdParams`.

    Examples
    --------
    >>> import attnmask
    >>> attnmask.BwdParams(kv_blocksize=128)
    BwdParams(q_blocksize=None, kv_blocksize=128)
    """

    __slots__ = ()


def check_hints(given: Given) -> None:
    """Check arguments that change no result."""
    if given["fwd_params"] is not None:
        _check_blocks(given["fwd_params"], "fwd_params", FwdParams)
    if given["bwd_params"] is not None:
        _check_blocks(given["bwd_params"], "bwd_params", BwdParams)
    if given["precision"] is not None:
        _check_precision(given["precision"])
    dtype = given["logits_dtype"]
    if dtype is not None and not (isinstance(dtype, str) and dtype == "bfloat16"):  # a name of ml_dtypes
        floating_dtype(dtype, "logits_dtype")


def _check_blocks(hint: object, name: str, kind: type[_Blocks]) -> None:
    if not isinstance(hint, kind):
        raise TypeError(f"{name} must be {kind.__name__} or None, got {describe(hint)}")


def _check_precision(precision: Precision) -> None:
    expected = "precision must be None, 'default', 'high', 'highest' or an integer from 0 to 2"
    name = precision if isinstance(precision, str) else getattr(precision, "name", None)
    if isinstance(name, str):
        valid = name.lower() in _PRECISIONS
    elif isinstance(precision, (int, np.integer)) and not isinstance(precision, bool):
        valid = 0 <= int(precision) < len(_PRECISIONS)
    else:
        raise TypeError(f"{expected}, got {describe(precision)}")
    if not valid:
        raise ValueError(f"{expected}, got {describe(precision)}")
