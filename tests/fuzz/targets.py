"""What the fuzzer calls: every public function, method, property and operator, and the handlers of XLA."""

import math
import re
import struct
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import rows_of_objects  # noqa: F401
from drawing import FLOATS, Arguments, Rng, coin, floats, of_row, pick, wide_of
from handlers import call_handler
from rows_of_functions import LOW, cumsum_arguments, slots_arguments, states, target
from rows_of_functions import TARGETS as TARGETS

from attnmask import _core
from attnmask._faces.linear import (
    LINEAR_ATTENTION,
    LINEAR_ATTENTION_STEP,
    SHORT_CONVOLUTION,
    SHORT_CONVOLUTION_STEP,
)
from attnmask._faces.rows import Kind, Row


def handling(text: str) -> Callable[..., Any]:
    """A function of the handler's words and arrays, as in "name: what is given -> what it makes"."""
    name, given, made = re.split(": | -> ", text)

    def call(words: Any, **arrays: Any) -> Any:
        chosen = [{name: arrays[name] for name in names.split() if name in arrays} for names in (given, made)]
        return call_handler(name, words, *chosen)

    return call


def handler(name: str, arguments: Callable[[Rng], Arguments], text: str, call: Any = None) -> None:
    made = frozenset(text.partition(" -> ")[2].split())
    target(f"XLA {name}", arguments, call or handling(text), written=made, subclasses=False)


# Linear attention and short convolutions, with arrays in the handlers' order

FLAGS = _core.xla_words()["linear"]
FLAGS["activation"] = FLAGS.pop("silu")  # the one that has a flag


def twice(rng: Rng, arguments: Arguments, *own: str) -> Arguments:
    """Arguments of two calls at once, which may share arguments that are not their own."""
    calls = {name: 2 if name in own else pick(rng, [1, 2]) for name in arguments}
    return {name: np.repeat(x[None], calls[name], 0) for name, x in arguments.items()}


def handler_arguments(rng: Rng, row: Row, gradients: bool = False) -> Arguments:
    """Of one call, or in a third of the cases of two at once."""
    step, given = bool(row.of(Kind.STATE)), of_row(rng, row)
    if "value" in given and coin(rng, 0.2):
        given["value"][:, : given["value"].shape[1] // 2] = np.nan
    for name in ("out", row.all):
        given.pop(name, None)
    arrays = {name: x.shape for name, x in given.items() if isinstance(x, np.ndarray)}
    first = given[row.arguments[0].name]
    results = {
        result.name: (shape, wide_of(first.dtype) if result.wide else first.dtype)
        for result, shape in zip(row.results, row.shapes(arrays), strict=True)
    }
    for name in {*row.of(Kind.LEARNED)} & given.keys():
        alike = name in ("weight", "bias") or given[name].ndim == 1  # of all tokens
        given[name] = given[name] if alike or not step else given[name][:, None]
    if "x" in given:
        given["x"] = given["x"][..., None]
    result = given["x" if "x" in given else "value"]
    results["out"] = result.shape, first.dtype
    kept: Arguments = {}
    if row.keep and not step:
        problem = {x.name: given.get(x.name, x.default) for x in row.problem}
        states, numbers = row.check(*problem.values())
        kept = {"kept": (len(first), math.ceil(states / len(first)), numbers)}
    if gradients:
        state, dtype = results["state"]
        results = {f"d{x}": (given[x].shape, given[x].dtype) for x in row.of(Kind.LEARNED) if x in given}
        given |= {name: floats(rng, *shape, dtype=dtype) for name, shape in kept.items()}
        given["dout"] = floats(rng, *result.shape, dtype=first.dtype)
        given |= {"dstate": floats(rng, *state, dtype=dtype)} if coin(rng) else {}
    elif kept and coin(rng):
        results["kept"] = kept["kept"], wide_of(first.dtype)
    shown = {name for name, x in given.items() if isinstance(x, np.ndarray) or x} | results.keys() & {"kept"}
    scale = struct.unpack("q", struct.pack("d", given.pop("scale", 0.25)))
    flags = sum(flag for name, flag in FLAGS.items() if name in shown)
    words = np.array([FLAGS["version"], flags, *scale, given.pop("chunk_size", 64)])
    given = {name: x for name, x in given.items() if isinstance(x, np.ndarray)}
    mapped = coin(rng, 0.3)
    given = twice(rng, given, "state") if mapped else given
    made = {name: np.zeros((2,) * mapped + tuple(shape), dtype) for name, (shape, dtype) in results.items()}
    return {"words": words} | made | given


LINEAR = "query key value decay beta cu_seqlens initial_state"
CONVOLUTION = "x weight bias cu_seqlens initial_state"
for _row, _text, _gradients in (
    (LINEAR_ATTENTION, f"linear_forward: {LINEAR} -> out state kept", False),
    (
        LINEAR_ATTENTION,
        f"linear_backward: {LINEAR} kept dout dstate -> dquery dkey dvalue ddecay dbeta dinitial_state",
        True,
    ),
    (
        LINEAR_ATTENTION_STEP,
        "linear_step: query key value decay beta state state_indices -> out state",
        False,
    ),
    (SHORT_CONVOLUTION, f"convolution_forward: {CONVOLUTION} -> out state", False),
    (
        SHORT_CONVOLUTION,
        f"convolution_backward: {CONVOLUTION} dout dstate -> dx dweight dbias dinitial_state",
        True,
    ),
    (SHORT_CONVOLUTION_STEP, "convolution_step: x weight bias state state_indices -> out state", False),
):
    handler(
        _row.name + ", gradients" * _gradients,
        lambda rng, row=_row, gradients=_gradients: handler_arguments(rng, row, gradients),
        _text,
    )

# Sums and merges

SUM_FLAGS = _core.xla_words()["sums"]


def bits(number: float) -> int:
    return struct.unpack("q", struct.pack("d", number))[0]


def sum_handler_arguments(rng: Rng, name: str, gradients: bool) -> Arguments:
    """Of one call, or in a third of the cases of two at once."""
    given, first = cumsum_arguments(rng, name), "g" if "local" in name else "s"
    out = given.pop("out", None)
    dtype = given.pop("output_dtype", np.float32) if out is None else out.dtype
    arrays = {first: given.pop(first)}
    arrays |= {"cu_seqlens": given.pop("cu_seqlens").astype(np.int32)} if "cu_seqlens" in given else {}
    flags = sum(
        SUM_FLAGS[name] for name, x in (given | arrays).items() if x is not False and name in SUM_FLAGS
    )
    words = [1, flags, bits(given.get("softmax_scale", 1.0)), given.get("chunk_size", 64)]
    x = arrays[first]
    x = arrays[first] = x.reshape(*x.shape, *(1,) * (4 - x.ndim))
    arrays |= {"dout": floats(rng, *x.shape, dtype=dtype)} if gradients else {}
    mapped = coin(rng, 0.3)
    arrays = twice(rng, arrays, first) if mapped else arrays
    made = np.zeros((2,) * mapped + x.shape, x.dtype if gradients else dtype)
    return {"words": np.array(words), "dx" if gradients else "out": made} | arrays


def merge_handler_arguments(rng: Rng, gradients: bool) -> Arguments:
    given = states(rng)
    outs, lses = list(given["outs"]), list(given["lses"])
    count, wide = len(outs), wide_of(outs[0].dtype)
    arrays = {f"out{i}": x for i, x in enumerate(outs)} | {f"lse{i}": x for i, x in enumerate(lses)}
    of_lse = gradients and coin(rng)
    if gradients:
        arrays["dout"] = floats(rng, *outs[0].shape, dtype=outs[0].dtype)
        arrays |= {"dlse": floats(rng, *lses[0].shape, dtype=wide)} if of_lse else {}
    mapped, parts = coin(rng, 0.3), count if gradients else 1
    arrays = twice(rng, arrays, "out0") if mapped else arrays
    results = {
        name: np.zeros((2,) * mapped + (parts * x.shape[0], *x.shape[1:]), x.dtype)
        for name, x in (("out", outs[0]), ("lse", lses[0]))
    }
    return {"words": np.array([1, SUM_FLAGS["dlse"] * of_lse, count])} | results | arrays


PARTS = " ".join(f"{name}{i}" for name in ("out", "lse") for i in range(3))
for _gradients in (False, True):
    _forward = ("cumsum_forward: g s cu_seqlens -> out", f"merge_forward: {PARTS} -> out lse")
    _backward = (
        "cumsum_backward: g s cu_seqlens dout -> dx",
        f"merge_backward: {PARTS} dout dlse -> out lse",
    )
    _sums, _merge = _backward if _gradients else _forward
    for _name in ("chunk_local_cumsum", "chunk_global_cumsum"):
        handler(
            _name + ", gradients" * _gradients,
            lambda rng, name=_name, gradients=_gradients: sum_handler_arguments(rng, name, gradients),
            _sums,
        )
    handler(
        "merge_attention_states" + ", gradients" * _gradients,
        lambda rng, gradients=_gradients: merge_handler_arguments(rng, gradients),
        _merge,
    )

# Caches

H, HKV = 4, 2


def slots_handler_arguments(rng: Rng) -> Arguments:
    """Of one call, or in a third of the cases of two at once."""
    given, mapped = slots_arguments(rng, by_channel=False), coin(rng, 0.3)
    given.pop("rotate", None)
    words = [3, 16 * ("k_scale" in given) | 32 * ("v_scale" in given), 2, 0]  # 2: an array of the words
    for name in ("key", "value"):
        given[name] = given[name][None]
    if given["slot_mapping"].dtype == np.int64:
        given["slot_mapping"] = given["slot_mapping"].view(np.int32).reshape(-1, 2)
        words[2] = 3
    given = twice(rng, given, "k_cache", "v_cache", "k_scale", "v_scale") if mapped else given
    return {"words": np.array(words)} | given


handler(
    "write_kvcache",
    slots_handler_arguments,
    "write_kvcache: k_cache v_cache key value k_scale v_scale slot_mapping -> k_cache v_cache k_scale v_scale",
)


CACHE_FLAGS = _core.xla_words()["cache"]
NONE, INTEGER, NARROW, WIDE = range(4)  # kinds of operands
STARTS = ("cu_seqlens_q", "cu_seqlens_k_new")


def cache_handler_arguments(rng: Rng) -> Arguments:
    """Two sequences with new tokens or none, a table or none, packed or not, a window, and ALiBi."""
    low = pick(rng, LOW)
    dtype = pick(rng, FLOATS if low is None else [np.float32, ml_dtypes.bfloat16])
    table, packed = coin(rng), coin(rng)
    said = {"return_lse": coin(rng), "cu_seqlens_q": packed, "key": coin(rng)}
    said["cu_seqlens_k_new"] = said["key"] and coin(rng)
    given = {"query": floats(rng, *((1, 5) if packed else (2, 3)), H, 8, dtype=dtype)}
    for name, depth in (("k", 8), ("v", 4)):
        shape = 6 if table else 2, 8, HKV
        given[f"{name}_cache"] = (3 * floats(rng, *shape, depth)).astype(low or dtype)
        if said["key"]:
            new = (1, 5) if packed or said["cu_seqlens_k_new"] else (2, 3)
            given["key" if name == "k" else "value"] = floats(rng, *new, HKV, depth, dtype=dtype)
        if low is not None:
            said[f"{name}_scale"] = True
            given[f"{name}_scale"] = rng.random((*shape, 1), np.float32) + np.float32(0.5)
    operands: Arguments = {name: pick(rng, [None, 0, 4]) for name in ("low", "high", "attention_chunk")}
    lengths = rng.integers(0, 4, 2).astype(pick(rng, [np.int32, np.int64]))
    operands["cache_seqlens"] = pick(rng, [3, lengths])
    operands["block_table"] = rng.permutation(6).astype(np.int32).reshape(2, 3) if table else None
    operands |= {name: np.array([0, rng.integers(0, 6), 5], np.int32) for name in STARTS if said[name]}
    arrays: Arguments = {}

    def operand(name: str, value: Any) -> tuple[int, int]:
        if not isinstance(value, np.ndarray):
            return (NONE, 0) if value is None else (INTEGER, value)
        is_wide = value.dtype.itemsize == 8
        arrays[name] = value.view(np.int32).reshape(*value.shape, 2) if is_wide else value
        return WIDE if is_wide else NARROW, len(arrays) - 1

    flags = sum(CACHE_FLAGS[name] for name, true in said.items() if true)
    words = [3, flags, *struct.unpack("q", struct.pack("d", 0.25))]
    words += [word for named in operands.items() for word in operand(*named)]
    words.append(coin(rng))  # a term of the logits or none
    if words[-1]:
        slopes = operand("alibi_slopes", rng.random((1, H, 1, 1), np.float32))
        words += [_core.term_names().index("alibi_slopes"), 0, NONE, 0, *slopes, 0]
    batch, queries = given["query"].shape[:2]
    results = {"out": np.zeros((batch, queries, H, 4), dtype)}
    if said["return_lse"]:
        results["lse"] = np.zeros((batch, H, queries), wide_of(dtype))
    return {"words": np.array(words)} | given | arrays | results


ATTENDING = (
    "flash_kvcache: query k_cache v_cache key value k_scale v_scale cache_seqlens block_table cu_seqlens_q "
    "cu_seqlens_k_new alibi_slopes -> out lse k_cache v_cache k_scale v_scale"
)
handler(
    "flash_attention_with_kvcache",
    cache_handler_arguments,
    ATTENDING,
    lambda words, **arrays: handling(
        ATTENDING if "key" in arrays else ATTENDING.partition(" lse ")[0] + " lse"
    )(words, **arrays),
)

# Weights

WEIGHT_FLAGS = _core.xla_words()["weights"] | {"lse": _core.xla_words()["attention"]["lse"]}
MASK_OF_ALL, BAND = (_core.mask_nodes().index(kind) for kind in ("all", "band"))


def weights_handler_arguments(rng: Rng) -> Arguments:
    """Of one call, or in a third of the cases of two at once, of all pairs or causal ones."""
    dtype, n, top = pick(rng, FLOATS), int(rng.integers(1, 6)), int(rng.integers(1, 9))
    wide, by_key_head, mapped = wide_of(dtype), coin(rng), coin(rng, 0.3)
    shapes: Arguments = {"query": (2, 5, H, 8), "key": (2, 7, HKV, 8), "value": (2, 7, HKV, 0)}
    given = {name: floats(rng, *shape, dtype=dtype) for name, shape in shapes.items()}
    given["queries"] = np.sort(rng.permutation(5)[:n]).astype(np.int32)
    if coin(rng):
        given["lse"] = floats(rng, 2, H, n, dtype=wide)
    row = 2, H, n
    made = {
        "weights": ((*row, 7), wide),
        "key_sum": ((2, HKV if by_key_head else H, 7, 1), wide),
        "entropy": ((*row, 1), wide),
        "max_logit": ((*row, 1), wide),
        "top_keys": ((*row, top), np.dtype(np.int32)),
        "top_weights": ((*row, top), wide),
    }
    asked = {name for name in (*made,)[:5] if coin(rng)} or {"key_sum"}
    asked |= {"top_weights"} if "top_keys" in asked else set()
    said = {*asked, *given, *(["by_key_head"] if by_key_head else [])}
    mask = [MASK_OF_ALL] if coin(rng) else [BAND, NONE, 0, INTEGER, 0, INTEGER, 2]
    flags = sum(flag for name, flag in WEIGHT_FLAGS.items() if name in said)
    given = twice(rng, given, "query") if mapped else given
    results = {
        name: np.zeros((2,) * mapped + shape, dtype) for name, (shape, dtype) in made.items() if name in asked
    }
    return {"words": np.array([3, 1 | flags, bits(0.25), 3, 0, *mask])} | given | results


handler(
    "attention_statistics",
    weights_handler_arguments,
    "flash_weights: query key value queries lse -> weights key_sum entropy max_logit top_keys top_weights",
)
