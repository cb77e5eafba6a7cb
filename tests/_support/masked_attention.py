"""Attention under random masks, compared with dense attention in float64.

A case follows from its seed and its number alone. What no allowed pair needs is NaN, which must not reach a result.
Every level of instruction sets computes it: forward, backward, and over a cache. Most calls have terms of the logits,
and arrays of many lie anyhow in memory.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import random_masks
import random_terms
import reference_flash as ref
import reference_kvcache as twin
import reference_terms
from flash_cases import BF16, F16, F32, F64
from layouts import LAYOUTS, arrange

import attnmask
from attnmask import _core

Arrays = dict[str, np.ndarray]
LEVELS = ("plain", *attnmask.show_config(mode="dict")["isa_available"])
LONG = (65, 72, 79, 100, 127, 128, 129, 150, 200, 257)  # of several tiles
HEADS = ((1, 1), (2, 2), (4, 4), (4, 2), (4, 1), (3, 1), (8, 1))  # of queries and keys
DEPTHS = ((1, 1), (4, 4), (16, 16), (16, 40), (24, 24), (33, 7), (56, 20), (64, 64))
FORMATS = ("int8", "float8_e4m3fn", "float8_e5m2", "int4", "of the queries", "of the queries")
# How far results and gradients may be from float64: of the largest number of an array, or of 1. One pair too many or
# too few is farther away, unless its weight is small.
ERRORS = {F64: (1e-11, 1e-10), F32: (1e-4, 3e-4), F16: (4e-3, 1e-2), BF16: (3e-2, 6e-2)}
RESULTS = ("out", "lse", "dquery", "dkey", "dvalue")
QUANTIZED_ERROR = 5e-2  # kernels round queries, too


class Case:
    """The arguments of a call, and which pairs it allows."""

    def __init__(self, seed: int, number: int, levels: Sequence[str] = LEVELS) -> None:
        self.levels = levels
        self.rng = rng = np.random.default_rng([seed, number])
        self.name = f"case {number} of seed {seed}"
        self.dtype = random_masks.any_of(rng, (F32, F32, F64, F16, BF16))
        self.heads, self.kv_heads = random_masks.any_of(rng, HEADS)
        self.depth, self.value_depth = random_masks.any_of(rng, (*DEPTHS, rng.integers(1, 70, 2).tolist()))
        self.batch = int(rng.integers(1, 3))
        self.keys = int(rng.choice(random_masks.any_of(rng, (random_masks.LENGTHS, range(1, 80), LONG))))
        self.queries = random_masks.any_of(
            rng, (self.keys, self.keys, int(rng.choice(random_masks.LENGTHS)), int(rng.integers(1, 20)))
        )
        seeds = [seed, number, 1]
        # Two of them: what a mask computes when it is read must not be what attention takes.
        self.mask, read = (
            random_masks.expression(np.random.default_rng(seeds), self.shape) for _ in range(2)
        )
        self.array = np.broadcast_to(np.asarray(read.attention_mask), self.shape)
        self.dout = self.drawn(self.queries, self.heads, self.value_depth)

    @property
    def shape(self) -> random_masks.Shape:
        return self.batch, self.heads, self.queries, self.keys

    def drawn(self, tokens: int, heads: int, depth: int) -> np.ndarray:
        return self.rng.standard_normal((self.batch, tokens, heads, depth)).astype(self.dtype)

    def drawn_arrays(self) -> Arrays:
        return {
            "query": self.drawn(self.queries, self.heads, self.depth),
            "key": self.drawn(self.keys, self.kv_heads, self.depth),
            "value": self.drawn(self.keys, self.kv_heads, self.value_depth),
        }

    def drawn_limits(self) -> dict[str, Any]:
        """Conditions beside the mask."""
        rng, limits = self.rng, {}
        sides = self.queries, self.keys
        if rng.random() < 0.2:
            limits["sliding_window"] = tuple(rng.integers(0, 60, 2).tolist())
        if rng.random() < 0.2:
            limits |= {"causal": True, "causal_offset": random_masks.any_of(rng, (0, "bottom-right", 9))}
        if rng.random() < 0.15:
            ids = random_masks.types_of(rng, self.shape)
            limits |= dict(zip(("q_segment_ids", "kv_segment_ids"), ids, strict=True))
        if self.batch == 1 and rng.random() < 0.2:
            starts = [[0, *np.sort(rng.integers(0, n + 1, 2)).tolist(), n] for n in sides]
            limits |= dict(zip(("cum_seqlens_q", "cum_seqlens_k"), starts, strict=True))
        return limits

    def drawn_terms(
        self, limits: dict[str, Any], without: Sequence[str] = ()
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        return random_terms.drawn(
            self.rng, self.shape, random_terms.distances_of(self.shape, limits), without
        )

    def laid_out(self, arrays: Arrays) -> Arrays:
        """Copy half of all calls' arrays to another layout in memory."""
        if self.rng.random() < 0.5:
            return arrays
        layouts = *LAYOUTS, "sliced", "transposed", "heads first", "heads first"
        return {name: arrange(x, random_masks.any_of(self.rng, layouts)) for name, x in arrays.items()}

    def at_each_level(self, compute: Callable[[], Arrays], exact: Arrays, told: str, error=None) -> None:
        """Compares what a function computes at each level; of gradients, names begin with d."""
        previous = attnmask.show_config(mode="dict")["isa"]
        try:
            for level in self.levels:
                _core.use_isa(level)
                got = compute()
                for name, right in exact.items():
                    self.near(
                        got[name],
                        right,
                        error or ERRORS[self.dtype][name[0] == "d"],
                        f"{name} at {level}, {told}",
                    )
        finally:
            _core.use_isa(previous)

    def near(self, got: np.ndarray, exact: np.ndarray, error: float, told: str) -> None:
        got, exact = got.astype(np.float64), exact.astype(np.float64)
        error *= max(1.0, abs(exact[np.isfinite(exact)]).max(initial=0))
        with np.errstate(invalid="ignore"):
            wrong = ~((got == exact) | (abs(got - exact) <= error))  # equal: the lse of a row without a pair
        assert not wrong.any(), (
            f"{self.name}: {wrong.sum()} of {wrong.size} numbers are wrong of {told}, the first at "
            f"{np.argwhere(wrong)[0].tolist()}; {self.dtype}, heads {self.heads, self.kv_heads}, "
            f"depths {self.depth, self.value_depth}, {self.mask!r}"
        )


def unseen(live: np.ndarray, kv_heads: int | None = None) -> np.ndarray:
    """Which queries no allowed pair has, or which keys of each of its heads, [B, T, H, 1]."""
    batch, _, _, keys = live.shape
    seen = (
        live.any(axis=3)
        if kv_heads is None
        else live.any(axis=2).reshape(batch, kv_heads, -1, keys).any(axis=2)
    )
    return ~seen.swapaxes(1, 2)[..., None]


def poisoned(arrays: Arrays, live: np.ndarray) -> Arrays:
    """With NaN where no allowed pair needs a number."""
    return {
        name: np.where(unseen(live, None if name in ("query", "dout") else x.shape[2]), np.nan, x).astype(
            x.dtype
        )
        for name, x in arrays.items()
    }


def check_forward(case: Case) -> None:
    """As most calls are, which keep no logsumexp; the mask may come as an array."""
    arrays, limits = case.drawn_arrays(), case.drawn_limits()
    live = ref.live_pairs(case.shape, case.array, **limits)
    terms, dense = case.drawn_terms(limits)
    if case.rng.random() < 0.1:
        terms["normalize_output"] = dense["normalize_output"] = False
    exact = ref.flash_attention(attention_mask=live, **arrays, **dense)
    limits |= terms
    given = case.laid_out(poisoned(arrays, live)) | limits
    given["attention_mask"] = case.array if case.rng.random() < 0.2 else case.mask
    case.at_each_level(
        lambda: {"out": attnmask.flash_attention(**given)}, {"out": exact.out}, f"forward, {limits}"
    )


def by_vjp(given: dict[str, Any], dout: np.ndarray, dlse: np.ndarray):
    """The results and the gradients of query, key and value."""
    (out, lse), vjp = attnmask.flash_attention_vjp(**given, return_lse=True)
    return out, lse, *vjp(dout, dlse)[:3]


def by_bwd(given: dict[str, Any], dout: np.ndarray, dlse: np.ndarray):
    out, lse = attnmask.flash_attention_fwd(**given)
    return out, lse, *attnmask.flash_attention_bwd(dout, out=out, lse=lse, dlse=dlse, **given)[:3]


def check_gradients(case: Case, differentiate: Callable | None = None) -> None:
    """`differentiate` computes what `by_vjp` does."""
    arrays, limits = case.drawn_arrays(), case.drawn_limits()
    live = ref.live_pairs(case.shape, case.array, **limits)
    rows = case.rng.standard_normal(case.shape[:3]).astype(F64 if case.dtype == F64 else F32)
    dlse = np.where(live.any(axis=3), rows, 0)
    terms, dense = case.drawn_terms(limits)
    right = ref.flash_attention(attention_mask=live, **arrays, **dense)
    grads = ref.flash_attention_vjp(case.dout, dlse, attention_mask=live, **arrays, **dense)[0]
    exact = dict(zip(RESULTS, (right.out, right.lse, *grads[:3]), strict=True))
    given = poisoned(arrays | {"dout": case.dout}, live)
    if differentiate is None:
        given = case.laid_out(given)
    dout = given.pop("dout")
    limits |= terms
    given |= {"attention_mask": case.mask, **limits}
    by = differentiate or random_masks.any_of(case.rng, (by_vjp, by_vjp, by_bwd))
    case.at_each_level(
        lambda: dict(zip(RESULTS, by(given, dout, dlse), strict=True)), exact, f"{by.__name__}, {limits}"
    )


def spoil_memory(shape: Sequence[int], dtype: np.dtype) -> None:
    """Fills memory with NaN and frees it, so that results may get it."""
    spoiled = [np.full(shape, np.nan, dtype) for _ in range(4)]
    del spoiled


def check_bias(case: Case) -> None:
    """A bias that may broadcast, may lie anyhow in memory and is -inf for some pairs, with its gradient."""
    rng, arrays, limits = case.rng, case.drawn_arrays(), case.drawn_limits()
    shape = [n if rng.random() < 0.7 else 1 for n in case.shape]
    dtype = random_masks.any_of(rng, (case.dtype, F64 if case.dtype == F64 else F32))
    bias = rng.standard_normal(shape).astype(dtype)
    if rng.random() < 0.5:
        bias[rng.random(shape) < random_masks.any_of(rng, (0.01, 0.5))] = -np.inf
    dense = np.broadcast_to(bias, case.shape)
    live = ref.live_pairs(case.shape, case.array, **limits) & (dense != -np.inf)
    terms, wide = case.drawn_terms(limits)
    limits |= terms
    wide |= arrays | {"attention_mask": live, "bias": np.where(live, dense, 0.0) + wide.get("bias", 0)}
    grads = ref.flash_attention_vjp(case.dout, **wide)[0]
    summed = tuple(i for i in range(4) if shape[i] == 1)
    rounding = np.sqrt(max(dense.size, 1) / max(bias.size, 1))  # grows with the root of how many are summed
    of_bias = grads.bias.sum(summed, keepdims=True) / rounding
    right = ref.flash_attention(**wide).out, *grads[:3], of_bias
    exact = dict(zip(("out", *RESULTS[2:], "dbias"), right, strict=True))
    if bias.shape == case.shape:
        bias = np.where(live | (bias == -np.inf), bias, np.nan).astype(dtype)
    given = case.laid_out(poisoned(arrays | {"dout": case.dout}, live))
    dout, layout = given.pop("dout"), random_masks.any_of(rng, ("contiguous", *LAYOUTS, "transposed"))
    given |= {"attention_mask": case.mask, "bias": arrange(bias, layout), **limits}

    def compute() -> Arrays:
        out, vjp = attnmask.flash_attention_vjp(**given, grad_bias=True)
        spoil_memory(shape, dtype)
        found = vjp(dout)
        return dict(zip(exact, (out, *found[:3], found.bias / rounding), strict=True))

    case.at_each_level(compute, exact, f"a bias {shape} of {dtype}, {layout}, {limits}")


def check_tangents(case: Case) -> None:
    """With tangents of some inputs."""
    arrays, limits = case.drawn_arrays(), case.drawn_limits()
    live = ref.live_pairs(case.shape, case.array, **limits)
    drawn = case.drawn_arrays()
    tangents = {name: drawn[name] for name in drawn if case.rng.random() < 0.7}
    terms, dense = case.drawn_terms(limits)
    right = ref.flash_attention(attention_mask=live, **arrays, **dense)
    d_out, d_lse = ref.flash_attention_jvp(tangents, attention_mask=live, **arrays, **dense)
    exact = {"out": right.out, "lse": right.lse, "dout": d_out, "dlse": d_lse}
    limits |= terms
    given = case.laid_out(poisoned(arrays, live)) | {"attention_mask": case.mask, **limits}
    given |= {f"{name}_tangent": x for name, x in case.laid_out(poisoned(tangents, live)).items()}

    def compute() -> Arrays:
        (out, lse), (d_out, d_lse) = attnmask.flash_attention_jvp(**given, return_lse=True)
        return {"out": out, "lse": lse, "dout": d_out, "dlse": d_lse}

    case.at_each_level(compute, exact, f"tangents of {[*tangents]}, {limits}")


def check_second_derivatives(case: Case) -> None:
    """With cotangents of some gradients."""
    arrays, limits = case.drawn_arrays(), case.drawn_limits()
    live = ref.live_pairs(case.shape, case.array, **limits)
    drawn = case.drawn_arrays()
    cotangents = {name: drawn[name] for name in drawn if case.rng.random() < 0.7}
    names = ("dout", "dquery", "dkey", "dvalue")
    terms, dense = case.drawn_terms(limits)
    exact = ref.flash_attention_bwd_vjp(case.dout, cotangents, attention_mask=live, **arrays, **dense)
    given = case.laid_out(poisoned(arrays | {"dout": case.dout}, live))
    dout = given.pop("dout")
    limits |= terms
    given |= {"attention_mask": case.mask, **limits}
    more = {f"{name}_cotangent": x for name, x in case.laid_out(poisoned(cotangents, live)).items()}

    def compute() -> Arrays:
        out, lse = attnmask.flash_attention_fwd(**given)
        found = attnmask.flash_attention_bwd_vjp(dout, out=out, lse=lse, **given, **more)
        return dict(zip(names, found, strict=True))

    # The rounding error of `out` grows with the factor of dropout.
    error = ERRORS[case.dtype][1] / (1 - terms.get("dropout_prob", 0))
    case.at_each_level(
        compute,
        dict(zip(names, exact, strict=True)),
        f"second derivatives of {[*cotangents]}, {limits}",
        error,
    )


def check_weights(case: Case) -> None:
    """Of all queries, or some of them."""
    arrays, limits = case.drawn_arrays(), case.drawn_limits()
    live = ref.live_pairs(case.shape, case.array, **limits)
    terms, dense = case.drawn_terms(limits, without=("dropout_prob",))
    weights, logits = ref.attention_weights(arrays["query"], arrays["key"], attention_mask=live, **dense)
    limits |= terms
    queries = np.flatnonzero(case.rng.random(case.shape[2]) < random_masks.any_of(case.rng, (0.1, 0.5, 1)))
    weights, top = weights[:, :, queries], random_masks.any_of(case.rng, (1, 5, 80))
    with np.errstate(all="ignore"):
        entropy = -np.where(weights > 0, weights * np.log(weights), 0).sum(axis=3)
    ranked = np.sort(weights, axis=3)[..., ::-1][..., :top]
    exact = {
        "key_sum": weights.sum(axis=2),
        "entropy": entropy,
        "max_logit": logits[:, :, queries].max(axis=3, initial=-np.inf),
        "top_weights": np.pad(ranked, [(0, 0)] * 3 + [(0, top - ranked.shape[3])]),
        "weights": weights,
    }
    given = case.laid_out(poisoned({name: arrays[name] for name in ("query", "key")}, live))
    given |= {"attention_mask": case.mask, "queries": queries, **limits}

    def compute() -> Arrays:
        statistics = attnmask.attention_statistics(
            of=("key_sum", "entropy", "max_logit", ("top_keys", top)), **given
        )._asdict()
        assert (statistics.pop("top_keys") < 0).sum() == np.maximum(
            top - live[:, :, queries].sum(axis=3), 0
        ).sum()
        return statistics | {"weights": attnmask.attention_weights(**given)}

    case.at_each_level(compute, exact, f"weights, {limits}")


def check_cache(case: Case) -> None:
    """Over a cache of any format, contiguous or in pages, of which a sequence may have fewer tokens than the mask."""
    kind = random_masks.any_of(case.rng, FORMATS)
    if kind == "int4":  # a group of channels that share a scale has 32 at least
        case.depth, case.value_depth = random_masks.any_of(case.rng, ((32, 32), (64, 64), (128, 64)))
    if kind != "of the queries" and case.dtype == F64:
        case.dtype = F32
    arrays, limits = case.drawn_arrays(), {"causal": bool(case.rng.integers(2))}
    if case.rng.random() < 0.3:
        limits["sliding_window"] = tuple(case.rng.integers(0, 60, 2).tolist())
    lengths = np.where(
        case.rng.random(case.batch) < 0.5, case.keys, case.rng.integers(0, case.keys + 1, case.batch)
    )
    live, alone = np.zeros(case.shape, bool), case.rng.random() < 0.3  # alone: lengths without a mask
    for row, length in enumerate(lengths.tolist()):
        mask = case.array[row : row + 1, ..., :length] | alone
        live[row, ..., :length] = ref.live_pairs(mask.shape, mask, **limits, causal_offset="bottom-right")[0]

    given, wide = {"query": poisoned(arrays, live)["query"]}, {"query": arrays["query"]}
    size = random_masks.any_of(case.rng, (None, 1, 7, 8, 16, 32, 64))
    pages = case.rng.permutation(case.batch * -(-case.keys // (size or 1)))
    for side in ("key", "value"):
        numbers, scale, wide[side] = stored(arrays[side], kind)
        hidden = unseen(live, case.kv_heads)
        if scale is None:
            numbers = np.where(hidden, np.nan, numbers).astype(case.dtype)
        else:
            scale = np.where(hidden if scale.ndim == 4 else hidden[..., None], np.nan, scale).astype(F32)
            given[f"{side[0]}_scale"] = scale if size is None else in_pages(scale, size, pages)
        given[f"{side[0]}_cache"] = numbers if size is None else in_pages(numbers, size, pages)
    if size is not None:
        given["block_table"] = pages.reshape(case.batch, -1).astype(np.int32)
    given |= {"attention_mask": None if alone else case.mask, "cache_seqlens": lengths, **limits}
    diagonals = reference_terms.distances(case.queries, case.keys, lengths - case.queries)
    terms, dense = random_terms.drawn(case.rng, case.shape, diagonals, without=("dropout_prob",))
    given |= terms
    right = ref.flash_attention(attention_mask=live, **wide, **dense)
    weights, _ = ref.attention_weights(wide["query"], wide["key"], attention_mask=live, **dense)
    of_keys = {name: x for name, x in given.items() if name not in ("v_cache", "v_scale")}
    with np.errstate(all="ignore"):
        entropy = -np.where(weights > 0, weights * np.log(weights), 0).sum(axis=3)

    def compute() -> Arrays:
        out, lse = attnmask.flash_attention_with_kvcache(**given, return_lse=True)
        statistics = attnmask.attention_statistics_with_kvcache(**of_keys, of=("key_sum", "entropy"))
        return {"out": out, "lse": lse, "key_sum": statistics.key_sum, "entropy": statistics.entropy}

    told = f"cache of {kind}, {'without mask, ' * alone}lengths {lengths.tolist()}, pages of {size}, {limits | terms}"
    error = None if kind == "of the queries" else QUANTIZED_ERROR
    sums = weights.sum(axis=2)[..., : lengths.max(initial=0)]
    exact = {"out": right.out, "lse": right.lse, "key_sum": sums, "entropy": entropy}
    case.at_each_level(compute, exact, told, error)


def stored(x: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """As numbers and scales of a format, and what these stand for."""
    if kind == "of the queries":
        return x, None, x
    if kind == "int4":
        numbers, scale = attnmask.quantize_kv(x.astype(F32), kind, group=32)
        return numbers, scale, twin.of_halves(numbers, scale)
    dtype = next(dtype for dtype in twin.QUANTIZED if dtype.name == kind)
    numbers, scale = attnmask.quantize_kv(x.astype(F32), dtype, axis=-1)
    return numbers, scale, numbers.astype(np.float64) * scale


def in_pages(x: np.ndarray, size: int, pages: np.ndarray) -> np.ndarray:
    """The tokens of batch rows in those pages, one row after the other. Behind them is NaN, or a large number."""
    worst = np.nan if x.dtype.kind == "f" or x.dtype == BF16 else 100
    rows = np.full((x.shape[0], len(pages) // x.shape[0] * size, *x.shape[2:]), worst).astype(x.dtype)
    rows[:, : x.shape[1]] = x
    cache = np.empty((len(pages), size, *x.shape[2:]), x.dtype)
    cache[pages] = rows.reshape(cache.shape)
    return cache


CHECKS = (
    check_forward,
    check_gradients,
    check_cache,
    check_tangents,
    check_second_derivatives,
    check_weights,
    check_bias,
)


def check(seed: int, number: int, levels: Sequence[str] = LEVELS) -> None:
    """Compare the case on one thread or two."""
    threads = attnmask.get_num_threads()
    try:
        attnmask.set_num_threads(1 + number // len(CHECKS) % 2)
        CHECKS[number % len(CHECKS)](Case(seed, number, levels))
    finally:
        attnmask.set_num_threads(threads)
