"""Docstrings that several functions share in part."""

from collections.abc import Callable
from typing import TypeVar

from attnmask._common.types import AnyFunction

_Function = TypeVar("_Function", bound=AnyFunction)


def with_parameters(parameters: str) -> Callable[[_Function], _Function]:
    """Put `parameters` in place of ``<parameters>`` in a docstring."""

    def describe(function: _Function) -> _Function:
        if function.__doc__:  # python -OO removes docstrings
            function.__doc__ = function.__doc__.replace("    <parameters>", parameters.strip("\n"))
        return function

    return describe
