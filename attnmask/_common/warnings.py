"""Warnings for calls that are legal but seldom mean what they say."""

import sys
import warnings

_MESSAGES = {
    "one query": (
        "causal=True lets a single query see only the first key, because its position is 0. Write "
        'causal_offset="bottom-right" if it is the newest token of a cache, or causal_offset=0 if it is the first token'
    ),
    "packed sequences": (
        "packed sequences start at different positions in queries and keys, and the diagonal counts from the start of "
        "the row. Write within_segments=True to count from the start of each sequence, as an argument of apply_causal, "
        "apply_sliding_window or apply_chunked"
    ),
    "pairs": (
        "cu_seqlens_q is read as pairs of start and end, one per batch row, but could also be ordinary cu_seqlens. "
        "Write packed=True for sequences laid end to end in one row, or packed=False for pairs"
    ),
    "heads before tokens": (
        "query and key are read as [B, T, H, D], with few tokens and many heads, and look like [B, H, T, D]. Write "
        "x.swapaxes(1, 2) for heads before tokens; ignore this if there really are that many heads"
    ),
    "causal array": (
        "attention_mask has two axes and is read as a padding mask [B, T], but looks like a causal mask [Q, K]. Write "
        "attention_mask[None, None] for [Q, K]; ignore this if it is padding"
    ),
    "sinks": (
        "softmax_aux has one axis with as many entries as query has heads, and is read as [S]: all heads share them. "
        "Write softmax_aux[:, None] for one sink per head, as in gpt-oss, or softmax_aux[None, :] for shared ones"
    ),
}
# Modules that are given heads before tokens, and put them behind.
_SURE = {"heads before tokens": {"attnmask.torch._install", "attnmask.transformers"}}
_LIBRARIES = {"attnmask", "ejkernel", "jax", "torch", "transformers"}  # whose modules have no line of a user

_not_yet_given = _MESSAGES.copy()


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
    attnmask.AttnmaskWarning: causal=True lets a single query see only the first key, because its position is 0. ...
    >>> attnmask.flash_attention(query, cache, cache, causal=True, causal_offset="bottom-right").shape
    (1, 1, 2, 8)
    """


def forget() -> None:
    """Let each kind of warning be given once more, as the next test expects it."""
    _not_yet_given.update(_MESSAGES)


def warn_once(kind: str) -> None:
    """Warn at the user's line, unless this kind of warning was given before."""
    if kind not in _not_yet_given:
        return
    level, frame = 1, sys._getframe()
    while frame.f_back and (name := frame.f_globals.get("__name__", "")).partition(".")[0] in _LIBRARIES:
        if name in _SURE.get(kind, ()):
            return
        level, frame = level + 1, frame.f_back
    message = _not_yet_given.pop(kind, None)  # a single step, so that one of two threads gets it
    if message is None:
        return
    try:
        warnings.warn(message, AttnmaskWarning, stacklevel=level)
    except AttnmaskWarning:
        _not_yet_given[kind] = message
        raise
