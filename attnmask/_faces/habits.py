"""Habits of other libraries by which a legal call means something else here: one table, which all functions ask.

A function asks for the kinds of habits that it may meet, with what each kind is told by: ``ask("decay", decay)``. The
first row of that kind whose predicate holds raises its error, or warns, once per process. C asks too, by `am_habit`,
where a cheap test finds that there may be a habit; and fast paths leave such calls to Python.

To add a habit, add its row here, and the calls to try it with to tests/common/test_habits.py.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from attnmask._common.types import Array
from attnmask._common.warnings import warn_once

__all__ = ["HABITS", "MANY_HEADS", "Habit", "ask"]


class Habit(NamedTuple):
    name: str
    kind: str  # what it is asked by
    seems: Callable[..., Any]  # of the facts that all habits of a kind are told by
    message: str  # with facts by their numbers, and words of the caller by their names
    error: type[Exception] | None = None  # None: a warning


# Predicates


MANY_HEADS = 64  # with more, they may be tokens


def _heads_first(query: tuple[int, int], key: tuple[int, int], packed: bool) -> bool:
    """Look at tokens and heads, as they are read."""
    (tokens, heads), (keys, kv_heads) = query, key
    may_be = heads > MANY_HEADS and 2 <= tokens <= heads // 2 and not packed
    return may_be and kv_heads == heads and keys > 0 and tokens % keys == 0


def _fewer_queries(starts_differ: bool, is_default: bool, queries: Any, keys: Any) -> Any:
    """Look at the numbers of queries and keys, or of those of each sequence."""
    if not is_default:
        return False
    fewer = (queries >= 1) & (queries < keys)
    return fewer if isinstance(fewer, bool) else fewer.any()


def _future(mask: Any, batch: int) -> Any:
    """Return whether a mask allows keys after their queries alone; it is an array, or the state of a `MaskInfo`."""
    if not isinstance(mask, np.ndarray):
        return mask.allows_future_alone()
    if mask.dtype != bool or mask.ndim < 2 or not mask.size or mask.shape[-1] != mask.shape[-2]:
        return False
    if mask.item(0) or mask.item(-1) or mask[..., -1, :].any() or mask[..., 0].any():  # the usual case
        return False
    return mask.any() and not np.tril(mask).any()


def _padding(mask: Any, batch: int) -> Any:
    """Return whether a mask of queries and keys may be one of batch rows and tokens."""
    if not isinstance(mask, np.ndarray) or mask.ndim != 2 or not 2 <= batch == mask.shape[0] == mask.shape[1]:
        return False
    return not (mask != 0).all() and (np.triu(mask, 1) != 0).any()


def _pairs(tokens: Array) -> Any:
    """Return whether a mask of batch rows and tokens may be one of queries and keys."""
    return 2 <= tokens.shape[0] == tokens.shape[1] and tokens.any() and not tokens.all()


def _starts(*pairs: Array) -> bool:
    """Return whether pairs are also legal starts of sequences; a single pair means the same in either form."""
    return all(len(x) > 2 and len(x) % 2 == 0 and x[0] == 0 and bool((x[1:] >= x[:-1]).all()) for x in pairs)


def _packed_tokens(shape: tuple[int, ...], axis: int | None, starts: Array | None) -> bool:
    """Look at what is divided, and at where its sequences start and end."""
    if axis is not None or len(shape) != 3:
        return False
    end = None if starts is None or starts.ndim != 1 or not starts.size else starts[-1]
    return shape[0] > shape[1] > 0 or bool(end == shape[0] != shape[1])


# The table

HABITS = (
    Habit(
        "heads before tokens",
        "tokens",
        _heads_first,
        "query and key are read as [B, T, H, D], with few tokens and many heads, and look like [B, H, T, D]. Write "
        "x.swapaxes(1, 2) for heads before tokens; ignore this if there really are that many heads",
    ),
    Habit(
        "packed sequences",
        "diagonal",
        lambda starts_differ, *_: starts_differ,
        "packed sequences start at different positions in queries and keys, and the diagonal counts from the start of "
        "the row. Write within_segments=True to count from the start of each sequence, as an argument of apply_causal, "
        "apply_sliding_window or apply_chunked",
    ),
    Habit(
        "causal",
        "diagonal",
        _fewer_queries,
        "there are fewer queries than keys, and the causal diagonal starts at the first query and the first key. Write "
        '{offset}="bottom-right" if the queries are the last tokens, as with a cache, or {offset}=0 if they are the '
        "first",
    ),
    Habit(
        "inverted mask",
        "mask",
        _future,
        "attention_mask allows only keys after their queries, and looks like a causal mask that marks what is masked "
        "out. True means allowed here: write ~attention_mask",
    ),
    Habit(
        "padding mask",
        "mask",
        _padding,
        "attention_mask has two axes and is read as [Q, K], but there are as many batch rows as tokens, and it may be "
        "a padding mask [B, T]. Write attention_mask[:, None, None, :] for padding, or attention_mask[None, None] for "
        "[Q, K]",
    ),
    Habit(
        "mask of pairs",
        "mask of tokens",
        _pairs,
        "attention_mask has two axes and is read as a padding mask [B, T], but is square, and may be a mask [Q, K]. "
        "Write attention_mask[None, None] for [Q, K], or MaskInfo.from_padding_mask(attention_mask) for padding",
    ),
    Habit(
        "mask of zeros",
        "floating mask",
        lambda is_zero, name: is_zero,
        "{1} must not be floating-point zeros alone, which allow nothing as a mask and everything as a bias; if it is "
        "to be added to logits, pass it as `bias`; write a bool mask if nothing may attend",
        ValueError,
    ),
    Habit(
        "graded mask",
        "floating mask",
        lambda is_zero, name: not is_zero,
        "{1} has other numbers than 0 and 1, and is read as a mask: all but 0 are allowed. If it is to be added to "
        "logits, pass it as `bias`; write {1} != 0 for a mask",
    ),
    Habit(
        "dropout as a mask",
        "axes",
        lambda axes, name, came: axes == 0 and name == "attention_mask",
        "attention_mask must have axes, got {2}; write None for no mask, and dropout_prob= for dropout, which is "
        "FlashAttention's fourth argument",
        ValueError,
    ),
    Habit(
        "dropout as a bias",
        "axes",
        lambda axes, name, came: axes == 0,
        "bias must have axes, got {2}; write None for no bias, and dropout_prob= for dropout, which is the fifth "
        "argument of PyTorch's scaled_dot_product_attention",
        ValueError,
    ),
    Habit(
        "dropout without a seed",
        "dropout",
        lambda chance, seed: chance > 0 and seed is None,
        "dropout_seed is not given, and is 0: every call drops the same weights. Write dropout_seed= with another "
        "number in each call, or dropout_seed=0 if this is meant",
    ),
    Habit(
        "sinks",
        "sinks",
        lambda shape, heads: shape == (heads,) and heads > 1,
        "softmax_aux has one axis with as many entries as query has heads, and is read as [S]: all heads share them. "
        "Write softmax_aux[:, None] for one sink per head, as in gpt-oss, or softmax_aux[None, :] for shared ones",
    ),
    Habit(
        "decay",
        "decay",
        lambda decay: decay.size > 0 and (decay > 0).all(),
        "decay has positive numbers alone, under which states grow with each token: it is a logarithm. Write "
        "np.log(decay) for factors from 0 to 1, or -decay for rates",
    ),
    Habit(
        "pairs",
        "pairs",
        _starts,
        "{name} is read as pairs of start and end, one per batch row, but could also be ordinary cu_seqlens. {instead}",
    ),
    Habit(
        "packed tokens",
        "tokens to divide",
        _packed_tokens,
        "axis must be given for x of three axes whose first may be that of tokens, got shape {0}; write axis=0 for "
        "[total, H, D], or axis=1 for [B, T, D]",
        ValueError,
    ),
    Habit(
        "comparison with an array",
        "comparison",
        lambda other: hasattr(other, "__array__") and not isinstance(other, type),
        "other must be a MaskInfo, not an array: write np.array_equal(mask, array) to compare allowed pairs",
        TypeError,
    ),
    Habit(
        "constructor of a mask",
        "constructor",
        lambda name: True,
        "MaskInfo.{0} makes a new mask, and takes nothing from the one that it was called on; write {instead}"
        "MaskInfo.{0}(...) for a new one",
        TypeError,
    ),
)
_BY_KIND = {
    kind: tuple(habit for habit in HABITS if habit.kind == kind)
    for kind in dict.fromkeys(habit.kind for habit in HABITS)
}


def ask(kind: str, *facts: Any, **words: str) -> None:
    """Raise or warn if the facts of a call look like a habit of this kind."""
    for habit in _BY_KIND[kind]:
        if habit.seems(*facts):
            message = habit.message.format(*facts, **words)
            if habit.error:
                raise habit.error(message)
            warn_once(habit.name, message)
            return
