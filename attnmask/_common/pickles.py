"""Pickle instances of public classes by where users import these from: their files may move.

``__module__`` stays that of the file, where `inspect`, IPython and Sphinx look for the source.
"""

from typing import TypeVar

from attnmask._common.types import AnyFunction

_Class = TypeVar("_Class", bound=type)

_REDUCE = "__reduce_ex__"
_classes: dict[str, type] = {}


def made(name: str, *arguments: object) -> object:
    """Return a new instance, which `pickle` gives its state."""
    kind = _classes[name]
    new: AnyFunction = kind.__new__
    return new(kind, *arguments)


def by_public_path(kind: _Class) -> _Class:
    """Let instances be pickled as ``attnmask._made(name, …)``; those of a subclass as ever."""
    reduce: AnyFunction = kind.__reduce_ex__
    _classes[kind.__name__] = kind

    def reduce_ex(self: object, protocol: int) -> tuple[object, ...]:
        function, arguments, *state = reduce(self, max(protocol, 2))
        if type(self) is not kind or function.__name__ != "__newobj__":
            return function, arguments, *state
        return made, (kind.__name__, *arguments[1:]), *state

    setattr(kind, _REDUCE, reduce_ex)
    return kind
