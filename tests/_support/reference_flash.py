"""Flash attention in NumPy, which complements `reference`: written to be read, not to be fast.

It computes one head at a time, with all of its logits at once, in float64 unless another dtype is given. In float32 the
same code is the naive attention to which the errors of the package are compared.
"""

from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
from reference_masks import pairwise as equal_ids


class Attention(NamedTuple):
    """The results of attention, and the sizes of what was summed, to which rounding errors are proportional."""

    out: np.ndarray  # like the query, but the last axis is Dv
    lse: np.ndarray  # [B, H, Tq], or [H, total]
    out_size: np.ndarray  # like out: the same sum over absolute values
    logit_size: np.ndarray  # like lse: the largest Σ|q·k| × |scale| + |bias| of a live pair


class Gradients(NamedTuple):
    """A gradient for each argument, of the same shape."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    bias: np.ndarray | None
    softmax_aux: np.ndarray | None
    relative_bias: np.ndarray | None = None  # which these do not compute
    grid_bias: np.ndarray | None = None


class Problem(NamedTuple):
    """The arguments in one dtype, with all axes."""

    query: np.ndarray  # [B, Tq, H, D]
    key: np.ndarray
    value: np.ndarray
    live: np.ndarray  # [B, H, Tq, Tk], like bias and `keep`
    bias: np.ndarray
    sinks: np.ndarray  # [H, S]
    scale: np.floating
    cap: np.floating | None
    normalize: bool
    keep: np.ndarray
    gain: np.floating  # factor of kept weights
    flat: bool

    @property
    def heads(self):
        """For each batch row and head: the row, the head, and the head of its keys."""
        batch, _, heads, _ = self.query.shape
        return [(b, h, h * self.key.shape[2] // heads) for b, h in product(range(batch), range(heads))]


def problem_of(
    query,
    key,
    value,
    bias=None,
    softmax_scale=None,
    dropout_prob=0.0,
    dropout_seed=None,
    logits_soft_cap=None,
    softmax_aux=None,
    normalize_output=True,
    keep=None,
    dtype=np.float64,
    **limits,
) -> Problem:
    """`keep` is the mask of dropout, [B, H, Tq, Tk], and `limits` are arguments of `live_pairs`."""
    query, key, value = (np.asarray(array).astype(dtype) for array in (query, key, value))
    flat = query.ndim == 3
    if flat:
        query, key, value = query[None], key[None], value[None]
    batch, queries, heads, depth = query.shape
    pairs = batch, heads, queries, key.shape[1]
    sinks = np.zeros((heads, 0)) if softmax_aux is None else np.atleast_2d(np.asarray(softmax_aux))
    return Problem(
        query,
        key,
        value,
        live_pairs(pairs, bias=bias, **limits),
        np.broadcast_to(np.asarray(0 if bias is None else bias).astype(dtype), pairs),
        np.broadcast_to(sinks.astype(dtype), (heads, sinks.shape[1])),
        dtype(depth**-0.5 if softmax_scale is None else softmax_scale),
        None if logits_soft_cap is None else dtype(logits_soft_cap),
        normalize_output,
        np.broadcast_to(True if keep is None or not dropout_prob else keep, pairs),
        dtype(1 / (1 - dropout_prob)),
        flat,
    )


class Softmax(NamedTuple):
    """The softmax of one head: rows are queries, columns are keys."""

    logits: np.ndarray  # -inf where the pair is dead
    top: np.ndarray  # largest logit or sink of a row, as a column; 0 without any
    powers: np.ndarray  # e^(logit - top)
    sink_powers: np.ndarray
    total: np.ndarray  # the sum of a row's powers, as a column
    slope: np.ndarray  # the derivative of the soft cap

    @classmethod
    def of(cls, problem: Problem, b: int, h: int, kv: int) -> "Softmax":
        dtype = problem.query.dtype.type
        logits = (problem.query[b, :, h] @ problem.key[b, :, kv].T) * problem.scale + problem.bias[b, h]
        slope = np.ones_like(logits)
        if problem.cap is not None:
            bent = np.tanh(logits / problem.cap)
            logits, slope = problem.cap * bent, 1 - bent * bent
        logits = np.where(problem.live[b, h], logits, dtype(-np.inf))
        sinks = problem.sinks[h]
        top = np.max(logits, axis=1, initial=np.max(sinks, initial=-np.inf), keepdims=True)
        top = np.where(top == -np.inf, dtype(0), top)
        powers, sink_powers = np.exp(logits - top), np.exp(sinks - top)
        total = powers.sum(axis=1, keepdims=True) + sink_powers.sum(axis=1, keepdims=True)
        return cls(logits, top, powers, sink_powers, total, slope)

    @property
    def shares(self) -> np.ndarray:
        return self.powers / np.where(self.total == 0, 1, self.total)

    @property
    def sink_shares(self) -> np.ndarray:
        return self.sink_powers / np.where(self.total == 0, 1, self.total)


def flash_attention(**arguments) -> Attention:
    """Takes the arguments of `problem_of`."""
    problem = problem_of(**arguments)
    (batch, queries, heads, _), dtype = problem.query.shape, problem.query.dtype.type
    shape = batch, queries, heads, problem.value.shape[3]
    result = Attention(
        np.zeros(shape, dtype),
        np.zeros((batch, heads, queries), dtype),
        np.zeros(shape, dtype),
        np.zeros((batch, heads, queries), dtype),
    )
    for b, h, kv in problem.heads:
        q, k, v, live = (
            problem.query[b, :, h], problem.key[b, :, kv], problem.value[b, :, kv], problem.live[b, h]
        )  # fmt: skip
        with np.errstate(all="ignore"):
            softmax = Softmax.of(problem, b, h, kv)
            weights = softmax.shares if problem.normalize else softmax.powers
            weights = np.where(problem.keep[b, h], weights * problem.gain, dtype(0))
            result.out[b, :, h] = weighted_sums(weights, v, live)
            result.out_size[b, :, h] = weighted_sums(weights, abs(v), live)
            result.lse[b, h] = (softmax.top + np.log(softmax.total))[:, 0]
            sizes = (abs(q) @ abs(k).T) * abs(problem.scale) + abs(problem.bias[b, h])
        result.logit_size[b, h] = np.max(np.where(live, sizes, dtype(0)), axis=1, initial=0)
    return Attention(*(array[0] for array in result)) if problem.flat else result


def flash_attention_vjp(
    dout, dlse=None, *, least=0.0, least_out=0.0, **arguments
) -> tuple[Gradients, Gradients]:
    """The gradients of Σ dout · out + Σ dlse · lse, and the sizes of the terms that were summed.

    In the sizes, a weight counts as at least `least`, and an output as at least `least_out`, since their errors do not
    become smaller than that.

    With weights w = shares of the total, or powers where the output is not normalized, a row's output is

        out = Σ w_k kept_k v_k      and so      dw_k = kept_k (dout · v_k)

    A logit changes its own weight, and all weights of the row through the total or the maximum to which they are
    relative:

        dlogit_k = w_k dw_k - moved_k Σ_j w_j dw_j + share_k dlse

    where moved is the share; or without normalization 1 for the largest logit or sink, 1/n each if n are as large.
    """
    problem = problem_of(**arguments)
    dtype = problem.query.dtype.type
    batch, queries, heads, _ = problem.query.shape
    dout = np.asarray(dout).astype(dtype).reshape(batch, queries, heads, problem.value.shape[3])
    dlse = np.asarray(0 if dlse is None else dlse).astype(dtype)
    dlse = (
        dlse.reshape(batch, heads, queries, 1) if dlse.ndim else np.zeros((batch, heads, queries, 1), dtype)
    )

    def nothing():
        return [np.zeros(a.shape, dtype) for a in (problem.query, problem.key, problem.value, problem.bias)]

    (dq, dk, dv, dbias), sizes = nothing(), nothing()
    dsinks, sinks_size = np.zeros((2, *problem.sinks.shape), dtype)
    for b, h, kv in problem.heads:
        q, k, v, live, keep = (
            problem.query[b, :, h], problem.key[b, :, kv], problem.value[b, :, kv], problem.live[b, h],
            problem.keep[b, h],
        )  # fmt: skip
        g, g_lse = dout[b, :, h], dlse[b, h]
        with np.errstate(all="ignore"):
            softmax = Softmax.of(problem, b, h, kv)
            shares, sink_shares = softmax.shares, softmax.sink_shares
            if problem.normalize:
                weights, moved, sinks_moved = shares, shares, sink_shares
            else:
                largest, largest_sinks = softmax.logits == softmax.top, problem.sinks[h] == softmax.top
                largest &= live
                count = largest.sum(axis=1, keepdims=True) + largest_sinks.sum(axis=1, keepdims=True)
                count = np.maximum(count, 1).astype(dtype)
                weights, moved, sinks_moved = softmax.powers, largest / count, largest_sinks / count

            kept = np.where(keep, weights * problem.gain, dtype(0))
            dweights = np.where(live & keep, (g @ v.T) * problem.gain, dtype(0))
            sums = (weights * dweights).sum(axis=1, keepdims=True)
            dlogits = weights * dweights - moved * sums + shares * g_lse
            dlogits = np.where(live, dlogits * softmax.slope, dtype(0))
            dq[b, :, h] = weighted_sums(dlogits, k, live) * problem.scale
            dk[b, :, kv] += weighted_sums(dlogits.T, q, live.T) * problem.scale
            dv[b, :, kv] += weighted_sums(kept.T, g, live.T)
            dbias[b, h] = dlogits
            from_row = sink_shares * g_lse - sinks_moved * sums
            dsinks[h] += np.where(problem.sinks[h] == -np.inf, dtype(0), from_row).sum(axis=0)

            # The same formulas with absolute values.
            least, least_sums = dtype(least), dtype(least_out) * abs(g).sum(axis=1, keepdims=True)
            dweights = np.where(live & keep, (abs(g) @ abs(v).T) * problem.gain, dtype(0))
            sums = (weights * dweights).sum(axis=1, keepdims=True) + least_sums
            dlogits = (weights + least) * dweights + (moved + least) * sums + (shares + least) * abs(g_lse)
            dlogits = np.where(live, dlogits * (2 - softmax.slope), dtype(0))
            sizes[0][b, :, h] = weighted_sums(dlogits, abs(k), live) * abs(problem.scale)
            sizes[1][b, :, kv] += weighted_sums(dlogits.T, abs(q), live.T) * abs(problem.scale)
            sizes[2][b, :, kv] += weighted_sums((kept + least).T, abs(g), live.T)
            sizes[3][b, h] = dlogits
            from_row = (sink_shares + least) * abs(g_lse) + (sinks_moved + least) * sums
            sinks_size[h] += np.where(problem.sinks[h] == -np.inf, dtype(0), from_row).sum(axis=0)

    def in_shape(dq, dk, dv, dbias, dsinks):
        bias, softmax_aux = arguments.get("bias"), arguments.get("softmax_aux")
        dbias = None if bias is None else summed_to(dbias, np.shape(bias))
        dsinks = None if softmax_aux is None else summed_to(dsinks, np.shape(softmax_aux))
        tensors = (dq[0], dk[0], dv[0]) if problem.flat else (dq, dk, dv)
        return Gradients(*tensors, dbias, dsinks)

    return in_shape(dq, dk, dv, dbias, dsinks), in_shape(*sizes, sinks_size)


def flash_attention_jvp(tangents, **arguments) -> tuple[np.ndarray, np.ndarray]:
    """The tangents of out and lse. `tangents` are those of arguments of `problem_of`, by their names; others are 0."""
    problem = problem_of(**arguments)
    dtype = problem.query.dtype.type
    batch, queries, heads, _ = problem.query.shape
    moved = problem_of(**arguments | tangents)
    zeros = problem._replace(
        **{x: np.zeros_like(getattr(problem, x)) for x in ("query", "key", "value", "bias", "sinks")}
    )
    given = {{"softmax_aux": "sinks"}.get(name, name) for name in tangents}
    d = zeros._replace(**{name: getattr(moved, name) for name in given})
    d_out = np.zeros((batch, queries, heads, problem.value.shape[3]), dtype)
    d_lse = np.zeros((batch, heads, queries), dtype)
    for b, h, kv in problem.heads:
        v, live = problem.value[b, :, kv], problem.live[b, h]
        with np.errstate(all="ignore"):
            softmax = Softmax.of(problem, b, h, kv)
            products = d.query[b, :, h] @ problem.key[b, :, kv].T + problem.query[b, :, h] @ d.key[b, :, kv].T
            logits = np.where(live, softmax.slope * (products * problem.scale + d.bias[b, h]), dtype(0))
            of_row = (softmax.shares * logits).sum(axis=1) + softmax.sink_shares @ d.sinks[h]
            kept = np.where(problem.keep[b, h], softmax.shares * problem.gain, dtype(0))
            weights = np.where(live, kept * (logits - of_row[:, None]), dtype(0))
            d_out[b, :, h] = weighted_sums(weights, v, live) + weighted_sums(kept, d.value[b, :, kv], live)
        d_lse[b, h] = of_row
    return (d_out[0], d_lse[0]) if problem.flat else (d_out, d_lse)


def attention_weights(query, key, **arguments) -> tuple[np.ndarray, np.ndarray]:
    """The weights of all pairs, 0 where one is not allowed, and their logits, -inf there."""
    problem = problem_of(query=query, key=key, value=key, **arguments)
    weights, logits = np.zeros((2, *problem.live.shape))
    for b, h, kv in problem.heads:
        with np.errstate(all="ignore"):
            softmax = Softmax.of(problem, b, h, kv)
        weights[b, h], logits[b, h] = np.where(problem.live[b, h], softmax.shares, 0), softmax.logits
    return weights, logits


def flash_attention_bwd_vjp(dout, cotangents, dlse=None, **arguments) -> list[np.ndarray]:
    """The gradients of dout, query, key and value from cotangents of the gradients of the last three, by their names.

    Second derivatives are symmetric, so that these are derivatives of gradients along the cotangents.
    """
    problem = problem_of(**arguments)
    dtype = problem.query.dtype.type
    batch, queries, heads, _ = problem.query.shape
    dout = np.asarray(dout).astype(dtype).reshape(batch, queries, heads, problem.value.shape[3])
    dlse = np.zeros((batch, heads, queries), dtype) if dlse is None else np.asarray(dlse).astype(dtype)
    dlse = dlse.reshape(batch, heads, queries)
    zeros = {name: np.zeros_like(arguments[name]) for name in ("query", "key", "value")}
    along = problem_of(**arguments | zeros | cotangents)
    results = [np.zeros_like(x) for x in (dout, problem.query, problem.key, problem.value)]
    for b, h, kv in problem.heads:
        rows, keys = (b, slice(None), h), (b, slice(None), kv)
        q, k, v, live, g = (
            problem.query[rows],
            problem.key[keys],
            problem.value[keys],
            problem.live[b, h],
            dout[rows],
        )
        dq, dk, dv = along.query[rows], along.key[keys], along.value[keys]

        def of_live(x, live=live):
            return np.where(live, x, dtype(0))

        with np.errstate(all="ignore"):
            softmax = Softmax.of(problem, b, h, kv)
            shares, gain = softmax.shares, np.where(problem.keep[b, h], problem.gain, dtype(0))
            logits = of_live(softmax.slope * problem.scale * (dq @ k.T + q @ dk.T))
            of_shares = shares * (logits - (shares * logits).sum(axis=1, keepdims=True))
            products, of_products = of_live(gain * (g @ v.T)), of_live(gain * (g @ dv.T))
            less = (shares * products).sum(axis=1) - dlse[b, h]
            of_less = (of_shares * products + shares * of_products).sum(axis=1)
            shifted = of_live(products - less[:, None])
            dlogits, of_dlogits = (
                shares * shifted,
                of_shares * shifted + shares * (of_products - of_less[:, None]),
            )
            bend = 0 if problem.cap is None else of_live(-2 * softmax.logits / problem.cap**2 * logits)
            of_dlogits = of_live(of_dlogits * softmax.slope + dlogits * bend) * problem.scale
            dlogits = of_live(dlogits * softmax.slope) * problem.scale
            results[0][rows] = weighted_sums(of_shares * gain, v, live) + weighted_sums(
                shares * gain, dv, live
            )
            results[1][rows] = weighted_sums(of_dlogits, k, live) + weighted_sums(dlogits, dk, live)
            results[2][keys] += weighted_sums(of_dlogits.T, q, live.T) + weighted_sums(dlogits.T, dq, live.T)
            results[3][keys] += weighted_sums((of_shares * gain).T, g, live.T)
    return [x[0] for x in results] if problem.flat else results


def summed_to(array, shape) -> np.ndarray:
    """The gradient of an array that was broadcast, from the gradient of the broadcast array."""
    axes = tuple(axis for axis, length in enumerate(shape) if length == 1)
    with np.errstate(all="ignore"):
        return array.sum(axis=tuple(range(array.ndim - len(shape)))).sum(axis=axes, keepdims=True)


def weighted_sums(weights, values, live) -> np.ndarray:
    """weights @ values, where values without a live pair in a row are left out, since 0 × NaN is NaN."""
    if np.isfinite(values).all():
        return weights @ values
    rows = [row[pairs] @ values[pairs] for row, pairs in zip(weights, live, strict=True)]
    return np.array(rows, values.dtype).reshape(len(weights), values.shape[1])


def live_pairs(
    shape,
    attention_mask=None,
    bias=None,
    causal=False,
    cum_seqlens_q=None,
    cum_seqlens_k=None,
    sliding_window=None,
    q_segment_ids=None,
    kv_segment_ids=None,
    causal_offset=0,
) -> np.ndarray:
    """The pairs that all conditions allow, [B, H, Tq, Tk]."""
    batch, _, queries, keys = shape
    live = np.ones(shape, bool)
    if attention_mask is not None:
        live &= np.asarray(getattr(attention_mask, "attention_mask", attention_mask)) != 0
    if bias is not None:
        live &= np.asarray(bias) != -np.inf
    if q_segment_ids is not None:
        live &= equal_ids(q_segment_ids, kv_segment_ids)[:, None]

    near = np.zeros((batch, 1, queries, keys), bool)
    packed = cum_seqlens_q is not None
    sequences = [((0, queries), (0, keys))]
    if packed:
        ends = np.asarray(cum_seqlens_q).tolist(), np.asarray(cum_seqlens_k).tolist()
        sequences = list(zip(pairwise(ends[0]), pairwise(ends[1]), strict=True))
    for row, (index, ((q_start, q_end), (k_start, k_end))) in product(range(batch), enumerate(sequences)):
        lengths = q_end - q_start, k_end - k_start
        offset = offset_of(causal_offset, index if packed else row, *lengths)
        ahead = np.arange(lengths[1])[None, :] - np.arange(lengths[0])[:, None]
        allowed = np.ones(ahead.shape, bool)
        if causal:
            allowed &= ahead <= offset  # a Python integer cannot overflow
        if sliding_window is not None:
            left, right = (sliding_window, sliding_window) if np.ndim(sliding_window) == 0 else sliding_window
            allowed &= (offset - int(left) <= ahead) & (ahead <= offset + int(right))
        near[row, 0, q_start:q_end, k_start:k_end] = allowed
    return live & near


def offset_of(causal_offset, index: int, queries: int, keys: int) -> int:
    if isinstance(causal_offset, str):
        assert causal_offset == "bottom-right"
        return keys - queries
    return int(causal_offset if np.ndim(causal_offset) == 0 else causal_offset[index])
