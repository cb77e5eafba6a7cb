"""Warnings for calls that are legal but seldom mean what they say."""

import sys
import warnings

# Modules that give what another library's function was given, and that know its habits.
_SURE = ("attnmask.torch._install", "attnmask.transformers", "attnmask.ejkernel")
_LIBRARIES = {"attnmask", "ejkernel", "jax", "torch", "transformers"}  # whose modules have no line of a user

_given: dict[str, object] = {}  # by kind, what stands for the call that it was given to


class AttnmaskWarning(UserWarning):
    """A call is legal but seldom means what it says; the message says what to write instead.

    Each kind of warning is given once per process. With a filter that turns warnings into errors, each call raises.

    Examples
    --------
    >>> import warnings, numpy as np, attnmask
    >>> query, cache = np.zeros((1, 1, 2, 8)), np.zeros((1, 5, 2, 8))
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error", attnmask.AttnmaskWarning)
    ...     attnmask.flash_attention(query, cache, cache, causal=True)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    attnmask.AttnmaskWarning: there are fewer queries than keys, and the causal diagonal starts at the first query ...
    >>> attnmask.flash_attention(query, cache, cache, causal=True, causal_offset="bottom-right").shape
    (1, 1, 2, 8)
    """


def forget() -> None:
    """Let each kind of warning be given once more, as the next test expects it."""
    _given.clear()


def warn_once(kind: str, message: str) -> None:
    """Warn at the user's line, unless this kind of warning was given before."""
    if kind in _given:
        return
    level, frame = 1, sys._getframe()
    while frame.f_back and (name := frame.f_globals.get("__name__", "")).partition(".")[0] in _LIBRARIES:
        if name.startswith(_SURE):
            return
        level, frame = level + 1, frame.f_back
    this = object()
    if _given.setdefault(kind, this) is not this:  # a single step, so that one of two threads gives it
        return
    try:
        warnings.warn(message, AttnmaskWarning, stacklevel=level)
    except AttnmaskWarning:
        del _given[kind]
        raise
