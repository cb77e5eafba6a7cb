"""Operators by name."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

from attnmask._common.arguments import describe
from attnmask.operations._base import OperationImpl, OperationMetadata

_Class = TypeVar("_Class", bound=type[OperationImpl])


def _names(operation: type[OperationImpl]) -> tuple[str, ...]:
    said: Any = operation.get_impl_name()
    names = (said,) if isinstance(said, str) else said
    if not (isinstance(names, (tuple, list)) and all(isinstance(name, str) for name in names)):
        raise TypeError(f"get_impl_name must return a name or a tuple of names, got {describe(said)}")
    if not names or "" in names or len(set(names)) < len(names):
        raise ValueError(f"get_impl_name must return a name, or names that differ, got {said!r:.200}")
    return tuple(names)


class OperationRegistry:
    """The registered operators. Any package may add its own.

    Examples
    --------
    >>> from attnmask.operations import OperationRegistry
    >>> OperationRegistry.list()
    ('flash', 'vanilla')
    """

    _operations: dict[str, type[OperationImpl]] = {}  # noqa: RUF012 (there is one registry)

    @classmethod
    def register(cls, operation: _Class) -> _Class:
        """Register an operator under the names that its `get_impl_name` returns. Use it as a decorator.

        Parameters
        ----------
        operation : subclass of OperationImpl

        Returns
        -------
        type
            The class itself.

        Raises
        ------
        ValueError
            If a name is taken, even by the same class.

        Examples
        --------
        >>> from attnmask.operations import FlashAttention, OperationRegistry
        >>> OperationRegistry.register(FlashAttention)
        Traceback (most recent call last):
        ...
        ValueError: operation must have a new name, got 'flash', which is registered to FlashAttention
        """
        if not (isinstance(operation, type) and issubclass(operation, OperationImpl)):
            raise TypeError(f"operation must be a subclass of OperationImpl, got {operation!r:.200}")
        if inspect.isabstract(operation):
            missing = ", ".join(sorted(operation.__abstractmethods__))
            raise TypeError(
                f"operation must have {missing}, got {operation.__name__}, which does not define it"
            )
        names = _names(operation)
        for name in names:
            if name in cls._operations:
                other = cls._operations[name].__name__
                raise ValueError(
                    f"operation must have a new name, got {name!r}, which is registered to {other}"
                )
        cls._operations.update(dict.fromkeys(names, operation))
        return operation

    @classmethod
    def get(cls, impl_name: str) -> type[OperationImpl]:
        """Return the class of an operator.

        Parameters
        ----------
        impl_name : str

        Returns
        -------
        type

        Examples
        --------
        >>> from attnmask.operations import OperationRegistry
        >>> OperationRegistry.get("flash").__name__
        'FlashAttention'
        """
        if not isinstance(impl_name, str):
            raise TypeError(f"impl_name must be a name, got {describe(impl_name)}")
        if impl_name not in cls._operations:
            known = ", ".join(map(repr, cls.list()))
            raise ValueError(f"impl_name must be one of {known}, got {impl_name!r:.200}")
        return cls._operations[impl_name]

    @classmethod
    def create(cls, impl_name: str, metadata: OperationMetadata | None = None) -> OperationImpl:
        """Return an operator, ready to call.

        Parameters
        ----------
        impl_name : str
        metadata : OperationMetadata, optional

        Returns
        -------
        OperationImpl

        Examples
        --------
        >>> from attnmask.operations import OperationMetadata, OperationRegistry
        >>> op = OperationRegistry.create("flash", OperationMetadata(softmax_scale=0.5))
        >>> op.metadata.softmax_scale
        0.5
        """
        return cls.get(impl_name)(metadata)

    @classmethod
    def list(cls) -> tuple[str, ...]:
        """Return the registered names in alphabetical order.

        Returns
        -------
        tuple of str

        Examples
        --------
        >>> from attnmask.operations import OperationRegistry
        >>> "flash" in OperationRegistry.list()
        True
        """
        return tuple(sorted(cls._operations))
