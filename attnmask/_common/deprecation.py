"""Deprecated names: they work for two more minor versions, and warn."""

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def deprecated(instead: str, *, since: str, removal: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Mark a function: ``@deprecated("MaskInfo.causal(n)", since="0.2", removal="0.4")``."""

    def mark(function: Callable[_P, _R]) -> Callable[_P, _R]:
        message = f"{function.__qualname__} will be removed in attnmask {removal}: write {instead}"

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            return function(*args, **kwargs)

        note = f".. deprecated:: {since}\n   Will be removed in {removal}. Write ``{instead}``."
        call.__doc__ = f"{function.__doc__ or ''}\n\n{note}"
        return call

    return mark
