"""Debug mode: log the functions called and the properties read."""

import functools
import os
from typing import Any, TypeVar, cast

from attnmask._common.arguments import describe, flag
from attnmask._common.types import AnyFunction, Arguments

_Member = TypeVar(
    "_Member", bound="AnyFunction | property | classmethod[Any, Any, Any] | staticmethod[Any, Any]"
)

_enabled = os.environ.get("ATTNMASK_DEBUG", "0") not in ("", "0")


def set_debug_mode(enabled: bool) -> None:
    """Start or stop logging calls.

    Each call of a mask function or `MaskInfo` method, and each property read, is logged to ``"attnmask"`` at level
    DEBUG, with the types and shapes of its arguments. The environment variable ``ATTNMASK_DEBUG=1`` starts it at
    import. To see the lines, configure `logging`, for example with ``logging.basicConfig(level=logging.DEBUG)``.

    Parameters
    ----------
    enabled : bool

    See Also
    --------
    get_debug_mode : return whether it is on.

    Examples
    --------
    >>> import logging, sys, attnmask
    >>> logger, handler = logging.getLogger("attnmask"), logging.StreamHandler(sys.stdout)
    >>> logger.addHandler(handler)
    >>> logger.setLevel(logging.DEBUG)
    >>> attnmask.set_debug_mode(True)
    >>> pairs = attnmask.cu_seqlens_to_pairs([0, 3, 5])
    call cu_seqlens_to_pairs([0, 3, 5])
    >>> attnmask.set_debug_mode(False)
    >>> logger.removeHandler(handler)
    """
    global _enabled
    _enabled = flag(enabled, "enabled")


def get_debug_mode() -> bool:
    """Return whether calls are logged; see `set_debug_mode`.

    Returns
    -------
    bool

    Examples
    --------
    >>> import attnmask
    >>> attnmask.get_debug_mode()
    False
    """
    return _enabled


def _short(value: object) -> str:
    """Show an argument as in a call if that is short."""
    if isinstance(value, (list, tuple)):
        if len(value) > 8:
            return f"a {type(value).__name__} of {len(value)}"
        items = ", ".join(map(_short, value))
        return f"[{items}]" if isinstance(value, list) else f"({items}{',' if len(value) == 1 else ''})"
    return value.__name__ if isinstance(value, type) else describe(value)


def _log(what: str, name: str, args: tuple[object, ...], kwargs: Arguments) -> None:
    import logging  # the import takes milliseconds, and most programs do not need it

    logger = logging.getLogger("attnmask")
    if not logger.isEnabledFor(logging.DEBUG):
        return
    shown = [*map(_short, args), *(f"{key}={_short(value)}" for key, value in kwargs.items())]
    logger.debug("%s %s%s", what, name, "" if what == "read" else f"({', '.join(shown)})", stacklevel=3)


def traced(member: _Member) -> _Member:
    """Log a function, method or property in debug mode; otherwise this costs 0.1 µs per call."""
    kind: AnyFunction = type(member)
    function: Any = getattr(member, "fget", None) or getattr(member, "__func__", member)
    name, what = function.__qualname__, "read" if kind is property else "call"
    owner = "" if kind is staticmethod else name.rpartition(".")[0]
    bound = owner != "" and not owner.endswith("<locals>")

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> Any:
        if _enabled:
            _log(what, name, args[bound:], kwargs)
        return function(*args, **kwargs)

    return cast(_Member, call if member is function else kind(call))
