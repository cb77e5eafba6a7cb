"""Docstrings that several functions share in part."""

import re
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


def of_tensors(original: AnyFunction, example: str) -> Callable[[_Function], _Function]:
    """Document a function of PyTorch's tensors as the one that it applies, with an example of its own."""

    def describe(function: _Function) -> _Function:
        about, heading, _ = (original.__doc__ or "").partition("Examples\n    --------\n")
        if heading:
            known = re.sub(r"(array_like|ndarray), Tensor or jax.Array", "Tensor", about)
            lines = ">>> import torch", ">>> import attnmask.torch", *example.strip().splitlines()
            function.__doc__ = known + heading + "".join(f"    {line}\n" for line in lines) + "    "
        return function

    return describe
