"""Check the arguments of attention and arrange them for the core: one mask program, numbers, arrays in place.

Nothing here loops over tokens. Arguments are checked before a batch axis is added, so that messages show the shapes
that were given. The core checks `out`.
"""

from collections.abc import Callable, Iterator, Sequence
from math import e, inf, log2, sqrt
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnmask._attention.arguments import ARRAYS
from attnmask._attention.batch import (
    Batch,
    Pairs,
    folded,
    four_axes,
    heads_first_hint,
    layout_hint,
    one_shape,
)
from attnmask._attention.hints import check_hints
from attnmask._attention.terms import Places, Range, Sizes, Term, numbers_of, terms_of
from attnmask._common.arguments import (
    TOP_LEFT,
    as_array,
    check_apart,
    check_mask_type,
    describe,
    fields_in_a_line,
    flag,
    integer_array,
    is_bottom_right,
    is_floating,
    mask_array,
    per_row,
    real,
    suit_hint,
    window,
)
from attnmask._common.loading import _core
from attnmask._common.types import Array, Given
from attnmask._faces.habits import MANY_HEADS, ask
from attnmask._masks.info import MaskInfo
from attnmask._masks.program import AXES, Program, Shape, arrays
from attnmask._masks.terms import ROWS, Node, PerRow, band, dense, equal, operands, sequences
from attnmask._masks.transforms import have_other_starts

Starts: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64]]  # of the queries and keys of packed sequences
_AXES = (("query", "Tq, H, D"), ("key", "Tk, Hkv, D"), ("value", "Tk, Hkv, Dv"))


class Problem(NamedTuple):
    """A call in the form of the core. `to_problem` in csrc/bind/python/attention.c reads the fields in this order."""

    query: Array
    key: Array
    value: Array
    nodes: Program
    terms: tuple[Term, ...]
    scale: float
    normalize: bool
    places: Places | None  # None without terms
    # Set for a part of a larger problem: the positions of its first query and key there, which dropout needs. 16-bit
    # inputs then give float32 results, which are added to those of the other parts.
    part: tuple[int, int] | None = None

    def term(self, name: str) -> Term | None:
        """Return the term that comes from this argument."""
        return next((term for term in self.terms if term.name == name), None)


class FlashAttentionGrads(NamedTuple):
    """The gradients of `flash_attention`, each in the shape and type of its argument.

    There are seven fields. Take them by name, or unpack the first three: ``dq, dk, dv = vjp(dout)[:3]``.

    Parameters
    ----------
    query, key, value : ndarray
    bias : ndarray or None
        None unless asked for by `grad_bias`. Summed over the axes along which the bias was broadcast.
    softmax_aux : ndarray or None
        None unless asked for by `grad_softmax_aux`. float64 for sinks that are integers.
    relative_bias : ndarray or None
        None unless asked for by `grad_relative_bias`.
    grid_bias : ndarray or None
        None unless asked for by `grad_grid_bias`.

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> x = np.zeros((1, 2, 1, 8), np.float32)
    >>> out, vjp = attnmask.flash_attention_vjp(x, x, x)
    >>> grads = vjp(out)
    >>> grads.query.shape, grads.bias
    ((1, 2, 1, 8), None)
    >>> dq, dk, dv = grads[:3]
    >>> dq is grads.query
    True
    """

    query: Array
    key: Array
    value: Array
    bias: Array | None = None
    softmax_aux: Array | None = None
    relative_bias: Array | None = None
    grid_bias: Array | None = None

    def __repr__(self) -> str:
        return fields_in_a_line(self)


class FlashAttentionSecondGrads(NamedTuple):
    """The gradients of `flash_attention_bwd`, each in the shape and type of its argument.

    Parameters
    ----------
    dout, query, key, value : ndarray

    Examples
    --------
    >>> import numpy as np, attnmask
    >>> x = np.ones((1, 2, 1, 8), np.float32)
    >>> out, lse = attnmask.flash_attention_fwd(x, x, x)
    >>> second = attnmask.flash_attention_bwd_vjp(out, x, x, x, out, lse, query_cotangent=x)
    >>> second.dout.shape
    (1, 2, 1, 8)
    """

    dout: Array
    query: Array
    key: Array
    value: Array

    def __repr__(self) -> str:
        return fields_in_a_line(self)


def scale_of(softmax_scale: object, channels: int, numbers: Range) -> float:
    if softmax_scale is None:
        return 1 / sqrt(channels) if channels else 1.0  # all products are 0 if there are no channels
    scale = real(softmax_scale, "softmax_scale")
    if scale in (inf, -inf):
        raise ValueError(f"softmax_scale must be finite, got {scale}")
    most = numbers.greatest / log2(e)  # the core multiplies it by log2(e), because it takes powers of 2
    if abs(scale) > most:
        raise ValueError(f"softmax_scale must be from {-most:.1e} to {most:.1e}, got {scale}")
    return scale


def _for_all_rows(node: Node) -> Node:
    """Return a term of a one-row mask for any number of rows."""
    if isinstance(node, str):
        return node
    shared = (
        int(operand[0]) if field is ROWS and isinstance(operand, np.ndarray) else operand
        for field, operand in operands(node)
    )
    return (node[0], *shared)


def _shape_hint(given: Shape, shape: Shape) -> str:
    """Return what to change in a MaskInfo that does not broadcast."""
    if given[2:] != shape[2:]:
        sizes = f"{shape[2]} queries and {shape[3]} keys"
        return f"; make it for {sizes}: MaskInfo.from_segments(q_segment_ids, kv_segment_ids)"
    axis = 0 if given[0] not in (1, shape[0]) else 1
    expected = "1" if shape[axis] == 1 else f"{shape[axis]}, or 1 for all"
    return f"; its {AXES[axis]} must be {expected}, got {given[axis]}"


def mask_nodes(attention_mask: object, pairs: Pairs) -> Program:
    shape = one_shape(pairs)
    if not isinstance(attention_mask, MaskInfo):
        array = as_array(attention_mask, "attention_mask")
        check_mask_type(array, "attention_mask")
        if array.ndim == 0:
            ask("axes", 0, "attention_mask", describe(attention_mask))
        mask = four_axes(array, "attention_mask", pairs)  # comes first: to read the numbers may take long
        mask = mask_array(mask, "attention_mask")
        ask("mask", array, shape[0])
        return (dense(mask),)
    given, program = attention_mask._state.described("attend by attention_mask")
    if given[0] not in (1, shape[0]) or given[1] not in (1, shape[1]) or given[2:] != shape[2:]:
        came = f"a MaskInfo of shape {given}{heads_first_hint(given[2:], pairs) or _shape_hint(given, shape)}"
        raise ValueError(f"attention_mask must broadcast to [B, H, Tq, Tk] = {shape}, got {came}")
    if given[0] != shape[0]:
        program = tuple(map(_for_all_rows, program))
    return (attention_mask._state.prepared(shape, program),)


def _ids_of(
    value: object, name: str, shape: tuple[int, ...], packed: bool, pairs: Pairs
) -> NDArray[np.int32]:
    """Return segment ids as int32, in place if they are."""
    array = integer_array(value, name, "; write np.where(mask, 0, -1) for a padding mask")
    expected = shape[-1:] if packed and array.ndim == 1 else shape
    if array.shape != expected:
        hint = heads_first_hint(array.shape[-1:], pairs) if array.ndim == len(shape) else ""
        raise ValueError(f"{name} must be of shape {expected}, got {describe(array)}{hint}")
    return _core.segment_ids(folded(array.reshape(shape), shape[:-1]), name, None)


def _segments(q_segment_ids: object, kv_segment_ids: object, pairs: Pairs, packed: bool) -> Node:
    *batch, _, queries, keys = pairs
    if (q_segment_ids is None or kv_segment_ids is None) and queries != keys:
        missing = "kv_segment_ids" if kv_segment_ids is None else "q_segment_ids"
        raise ValueError(f"{missing} must be given for {queries} queries and {keys} keys, got None")
    if q_segment_ids is None:
        kv_ids = q_ids = _ids_of(kv_segment_ids, "kv_segment_ids", (*batch, keys), packed, pairs)
    else:
        q_ids = _ids_of(q_segment_ids, "q_segment_ids", (*batch, queries), packed, pairs)
        kv_ids = (
            q_ids
            if kv_segment_ids is None
            else _ids_of(kv_segment_ids, "kv_segment_ids", (*batch, keys), packed, pairs)
        )
    return equal(q_ids, kv_ids)


def starts_of(value: object, name: str, tokens: int) -> NDArray[np.int64]:
    """Return where sequences start, and where the last one ends, which is the number of tokens."""
    try:
        starts = _core.checked_starts(as_array(value, name), name)
        if starts[-1] != tokens:
            hint = (
                f"; write np.append({name}, {tokens}) if the rest is padding" if starts[-1] < tokens else ""
            )
            raise ValueError(
                f"{name} must end at {tokens} tokens, got {starts[-1]} at index {len(starts) - 1}{hint}"
            )
    except ValueError as error:
        suit_hint(error, {name: value})
        raise
    return starts


def both_starts(cum_seqlens_q: object, cum_seqlens_k: object, shape: Shape) -> Starts:
    batch, _, queries, keys = shape
    if batch != 1:
        name = "cum_seqlens_k" if cum_seqlens_q is None else "cum_seqlens_q"
        hint = "; pack the rows into one, as query[mask] does with a padding mask [B, Tq]"
        raise ValueError(f"query must have batch size 1 with {name}, got {batch}{hint}")
    if (cum_seqlens_q is None or cum_seqlens_k is None) and queries != keys:
        missing = "cum_seqlens_k" if cum_seqlens_k is None else "cum_seqlens_q"
        raise ValueError(f"{missing} must be given for {queries} queries and {keys} keys, got None")
    if cum_seqlens_q is None:
        k_starts = starts_of(cum_seqlens_k, "cum_seqlens_k", keys)
        return k_starts, k_starts
    q_starts = starts_of(cum_seqlens_q, "cum_seqlens_q", queries)
    if cum_seqlens_k is None or (cum_seqlens_k is cum_seqlens_q and queries == keys):
        return q_starts, q_starts
    k_starts = starts_of(cum_seqlens_k, "cum_seqlens_k", keys)
    if len(k_starts) != len(q_starts):
        raise ValueError(
            f"cum_seqlens_k must have {len(q_starts)} entries as cum_seqlens_q, got {len(k_starts)}"
        )
    return q_starts, k_starts


_DIAGONAL = '; write causal=True, and causal_offset="bottom-right" if the last query sees the last key'


def distances(given: Given) -> tuple[int | None, int | None]:
    """Return how far a key may be from the diagonal, to the left and to the right."""
    causal, sliding_window = flag(given["causal"], "causal", _DIAGONAL), given["sliding_window"]
    left, right = (None, None) if sliding_window is None else window(sliding_window)
    return None if left is None else -left, 0 if causal else right


def _offset(given: Given, starts: Starts | None, pairs: Pairs) -> PerRow:
    """Return `causal_offset`, one for all batch rows or sequences, or one for each."""
    causal_offset = given["causal_offset"]
    if causal_offset is TOP_LEFT:
        return 0
    if is_bottom_right(causal_offset, "causal_offset"):
        return pairs[-1] - pairs[-2] if starts is None else np.diff(starts[1]) - np.diff(starts[0])
    if starts is None:
        return per_row(causal_offset, "causal_offset", pairs[:-3])
    return per_row(causal_offset, "causal_offset", len(starts[0]) - 1, row="sequence")


def _allowed(given: Given, starts: Starts | None, offset: PerRow, pairs: Pairs) -> Node | None:
    """Return what sequences, the diagonal and the window allow; None for everything."""
    low, high = distances(given)
    if low is not None or high is not None:
        mask = given["attention_mask"]
        differ = starts is None and isinstance(mask, MaskInfo) and have_other_starts(mask._state)
        lengths = pairs[-2:] if starts is None else map(np.diff, starts)
        by_default = given["causal"] and given["causal_offset"] is TOP_LEFT
        ask("diagonal", differ, by_default, *lengths, offset="causal_offset")
    elif starts is None:
        return None
    if starts is None:
        return band(low, high, offset)
    limits = (None if end is None else np.full(len(starts[0]) - 1, end + offset) for end in (low, high))
    return sequences(*starts, *limits)


def _program(given: Given, pairs: Pairs, starts: Starts | None, offset: PerRow) -> Program:
    """Return all conditions as one program. Only the first, which may be a MaskInfo, may need many waiting operands."""
    nodes: list[Node] = (
        [] if given["attention_mask"] is None else [*mask_nodes(given["attention_mask"], pairs)]
    )
    q_ids, kv_ids = given["q_segment_ids"], given["kv_segment_ids"]
    terms = (
        None if q_ids is None and kv_ids is None else _segments(q_ids, kv_ids, pairs, starts is not None),
        _allowed(given, starts, offset, pairs),
    )
    for term in terms:
        if term is not None:
            nodes += (term, "and") if nodes else (term,)
    return tuple(nodes) or (("all",),)


def _batch_hint(array: Array, name: str, batch: Batch) -> str:
    """Return how to repeat a key or value along the batch axes that it lacks, or shares with others."""
    own = array.shape[:-3]
    missing = len(batch) - len(own)
    if (
        missing < 0
        or len(batch) == 1
        or any(size not in (1, wanted) for size, wanted in zip(own, batch, strict=False))
    ):
        return ""
    index = f"[{', '.join([':'] * len(own) + ['None'] * missing)}]" if missing else ""
    return f"; write np.broadcast_to({name}{index}, {(*batch, *array.shape[-3:])})"


def _check_fit(query: Array, key: Array, value: Array) -> None:
    batch = query.shape[:-3]
    for name, array in (("key", key), ("value", value)):
        if array.dtype != query.dtype:
            hint = f"; write {name}.astype(query.dtype)"
            raise TypeError(f"{name} must be {query.dtype} as query, got {describe(array)}{hint}")
        if array.shape[:-3] != batch:
            expected = f"batch size {batch[0]}" if len(batch) == 1 else f"batch axes {tuple(batch)}"
            hint = _batch_hint(array, name, batch)
            raise ValueError(f"{name} must have {expected} as query, got {describe(array)}{hint}")
    (heads, channels), (tokens, kv_heads) = query.shape[-2:], key.shape[-3:-1]
    if key.shape[-1] != channels:
        raise ValueError(f"key must have D = {channels} as query, got {describe(key)}")
    if heads % kv_heads if kv_heads else heads:
        expected = f"a number of heads that divides query's {heads}"
        raise ValueError(f"key must have {expected}, got {describe(key)}{layout_hint(key.ndim)}")
    if value.shape[:-1] != key.shape[:-1]:
        hint = layout_hint(value.ndim) if value.shape[-3:-1] == (kv_heads, tokens) else ""
        expected = f"{tokens} tokens and {kv_heads} heads as key"
        raise ValueError(f"value must have {expected}, got {describe(value)}{hint}")


def _rank_hint(array: Array, name: str) -> str:
    """Return how to add the axes that a query, key or value lacks."""
    tokens = "Tq" if name == "query" else "Tk"
    return {
        2: f"; write {name}[None, :, None] for [{tokens}, D]",
        3: f"; write {name}[None] for [{tokens}, H, D], {name}[:, :, None] for [B, {tokens}, D], "
        "or cum_seqlens_q= for packed sequences",
    }.get(array.ndim, "")


def check_layout(arrays: Sequence[Any], packed: bool, is_floating: Callable[..., bool]) -> Batch:
    """Check the axes of query, key and value, as NumPy arrays or others, which have their own types, and return those
    of the batch.
    """
    rank = 3 if packed and arrays[0].ndim == 3 else max(arrays[0].ndim, 4)
    batch: Batch = arrays[0].shape[:-3]
    for array, (name, axes) in zip(arrays, _AXES, strict=True):
        if not is_floating(array.dtype):
            expected = "of float16, bfloat16, float32 or float64"
            numeric = getattr(array.dtype, "kind", "") in ("b", "i", "u", "f")
            hint = f"; write {name}.astype(np.float32)" if numeric else ""
            raise TypeError(f"{name} must be {expected}, got {describe(array)}{hint}")
        if array.ndim != rank:
            several = f"[*batch, {axes}] with the batch axes {tuple(batch)} of query"
            layout = {3: f"[{axes}] as query", 4: f"[B, {axes}]"}.get(rank, several)
            hint = _rank_hint(array, name) if rank <= 4 else _batch_hint(array, name, batch)
            raise ValueError(f"{name} must be {layout}, got {describe(array)}{hint}")
    _check_fit(*arrays)
    return batch


def _batched(query: ArrayLike, key: ArrayLike, value: ArrayLike, packed: bool) -> tuple[list[Array], Batch]:
    """Return the three with one batch axis, and the batch axes that they had. Packed ones may have none."""
    arrays = [as_array(query, "query"), as_array(key, "key"), as_array(value, "value")]
    batch = check_layout(arrays, packed, is_floating)
    if arrays[0].shape[-2] > MANY_HEADS:
        ask("tokens", arrays[0].shape[-3:-1], arrays[1].shape[-3:-1], packed)
    return arrays if len(batch) == 1 else [folded(array, batch) for array in arrays], batch


def read_problem(given: Given) -> tuple[Problem, Batch]:
    """Return the problem of a call, given the arguments of `attnmask.flash_attention` by name, and the batch axes that
    its arrays have.
    """
    try:
        return _read_problem(given)
    except (TypeError, ValueError) as error:
        suit_hint(error, given)
        raise


def _places(starts: Starts | None, offset: PerRow) -> Places:
    if starts is None:
        return Places(np.array(offset, np.intp, ndmin=1), None, None)
    return Places(starts[1][:-1] - starts[0][:-1] + offset, *starts)


def _read_problem(given: Given) -> tuple[Problem, Batch]:
    check_hints(given)
    packed = given["cum_seqlens_q"] is not None or given["cum_seqlens_k"] is not None
    (q, k, v), batch = _batched(given["query"], given["key"], given["value"], packed)
    (_, queries, heads, channels), keys = q.shape, k.shape[1]
    axes = batch or (1,)
    pairs = (*axes, heads, queries, keys)
    starts = both_starts(given["cum_seqlens_q"], given["cum_seqlens_k"], one_shape(pairs)) if packed else None
    offset = _offset(given, starts, pairs)
    nodes = _program(given, pairs, starts, offset)
    rows, row = axes, "B" if len(axes) == 1 else "*batch"
    if starts is not None:
        rows, row = (len(starts[0]) - 1,), "sequences"
    terms = terms_of(given, Sizes(pairs, rows, row, numbers_of(q.dtype)))
    if starts is not None and rows == (0,):
        terms = ()  # of no queries
    problem = Problem(
        q,
        k,
        v,
        nodes,
        terms,
        scale_of(given["softmax_scale"], channels, numbers_of(q.dtype)),
        flag(given["normalize_output"], "normalize_output"),
        _places(starts, offset) if terms else None,
    )
    return problem, batch


def _named_arrays(given: Given) -> Iterator[tuple[str, object]]:
    for name in ARRAYS:
        value = given[name]
        for array in arrays(value._state.program) if isinstance(value, MaskInfo) else (value,):
            yield name, array


def check_out(out: object, given: Given) -> None:
    """Check that `out` is an array that shares no memory with the arguments `given`."""
    if not isinstance(out, np.ndarray):
        hint = "; it takes only the result; the logsumexp is returned as a new array"
        raise TypeError(f"out must be a NumPy array or None, got {describe(out)}{hint}")
    check_apart(out, _named_arrays(given))
