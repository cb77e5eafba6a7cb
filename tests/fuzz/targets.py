"""What the fuzzer calls: every public function, method, property and operator, each with a maker of right arguments."""

import contextlib
import copy
import itertools
import math
import operator
import pickle
import re
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from handlers import call_handler

import attnmask
from attnmask import KVCache, MaskInfo, _core, operations

Rng = np.random.Generator
Arguments = dict[str, Any]
FLOATS = [np.float16, np.float32, np.float64, ml_dtypes.bfloat16]


class Target(NamedTuple):
    name: str
    arguments: Callable[[Rng], Arguments]  # right ones
    call: Callable[..., Any]
    written: frozenset[str] = frozenset({"out"})  # what a call that succeeds writes to
    kept: frozenset[str] = frozenset()  # what stays right: it is no argument of the function
    subclasses: bool = True  # whether subclasses of arrays are asked nothing
    same_bits: bool = True  # whether layouts change none
    pullback: bool = False  # a function and then its pullback, which may fail when `out` is written


TARGETS: dict[str, Target] = {}


def target(name: str, arguments: Callable[[Rng], Arguments], call: Callable[..., Any], **more: Any) -> None:
    assert name not in TARGETS
    TARGETS[name] = Target(name, arguments, call, **more)


def function(name: str, arguments: Callable[[Rng], Arguments], **more: Any) -> None:
    """A target that is called as it is named, but for what follows a comma or "of"."""
    target(name, arguments, getattr(attnmask, name.partition(",")[0].partition(" of ")[0]), **more)


# Makers of parts


def coin(rng: Rng, chance: float = 0.5) -> bool:
    return bool(rng.random() < chance)


def pick(rng: Rng, values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def some(rng: Rng, optional: dict[str, Callable[[], Any]], chance: float = 0.25) -> Arguments:
    return {name: make() for name, make in optional.items() if coin(rng, chance)}


def floats(rng: Rng, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def starts(rng: Rng, total: int, dtype: Any = None) -> np.ndarray:
    inner = np.sort(rng.integers(0, total + 1, int(rng.integers(0, 4))))
    return np.array([0, *inner, total], dtype or pick(rng, [np.int32, np.int64, np.uint16]))


def pairs(rng: Rng, length: int) -> np.ndarray:
    return np.sort(rng.integers(0, length + 1, 2 * int(rng.integers(1, 4)))).astype(
        pick(rng, [np.int32, np.int64])
    )


def ids(rng: Rng, *shape: int) -> np.ndarray:
    return np.sort(rng.integers(-1, 4, shape), axis=-1).astype(pick(rng, [np.int32, np.int64, np.int8]))


def mask(rng: Rng, *shape: int) -> np.ndarray:
    return (rng.random(shape) < 0.7).astype(pick(rng, [np.bool_, np.int32, np.float32, np.uint8]))


def sizes(rng: Rng, count: int, largest: int = 9) -> list[int]:
    return [int(size) for size in rng.integers(1, largest, count)]


# Packed sequences

for _name in ("prepare_lens", "prepare_position_ids", "prepare_sequence_ids", "prepare_token_indices"):
    function(_name, lambda rng: {"cu_seqlens": starts(rng, 20)})
for _name in ("prepare_chunk_indices", "prepare_chunk_offsets"):
    function(_name, lambda rng: {"cu_seqlens": starts(rng, 20), "chunk_size": pick(rng, [1, 2, 3, 64])})
function("cu_seqlens_to_pairs", lambda rng: {"cu_seqlens": starts(rng, 20)})
function("pairs_to_cu_seqlens", lambda rng: {"pairs": starts(rng, 20).repeat(2)[1:-1]})
function("prepare_lens_from_mask", lambda rng: {"mask": mask(rng, *sizes(rng, 2))})
function(
    "prepare_cu_seqlens_from_mask",
    lambda rng: {"mask": mask(rng, *sizes(rng, 2)), "out_dtype": pick(rng, [np.int32, np.int64])},
)
function(
    "cdiv",
    lambda rng: {
        "a": pick(
            rng, [np.int64(7), np.int32(-7), rng.integers(-99, 99, (3, 4)), rng.integers(0, 9, 4, np.uint8)]
        ),
        "b": pick(rng, [np.int64(3), rng.integers(1, 9, 4), np.int16(5)]),
    },
)
target(
    "identity_dtype_convert",
    lambda rng: {"dtype": pick(rng, FLOATS), "x": floats(rng, 3), "g": floats(rng, 3)},
    lambda dtype, x, g: attnmask.identity_dtype_convert(dtype).vjp(x)[1](g),
)

# Cumulative sums


def cumsum_arguments(rng: Rng, first: str, kind: str, local: bool) -> Arguments:
    batch, steps, heads, depth = 1 if coin(rng) else 2, *sizes(rng, 3, 20)
    head_first = coin(rng, 0.3)
    shape = (batch, heads, steps) if head_first else (batch, steps, heads)
    if kind == "_vector" or (kind != "_scalar" and coin(rng)):
        shape = (*shape, depth)
    arguments: Arguments = {first: floats(rng, *shape, dtype=pick(rng, FLOATS)), "head_first": head_first}
    if local:
        arguments["chunk_size"] = pick(rng, [1, 2, 4, 64])
    if batch == 1 and coin(rng):
        arguments["cu_seqlens"] = starts(rng, steps)
    arguments |= some(
        rng, {"reverse": lambda: True, "softmax_scale": lambda: 0.5, "output_dtype": lambda: np.float64}
    )
    if coin(rng, 0.4):
        arguments["out"] = np.zeros(shape, arguments.get("output_dtype", np.float32))
        arguments["output_dtype"] = arguments["out"].dtype.type
    return arguments


def pulled_back(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that gives a result and a pullback, called with a gradient."""

    def call(dout: Any = None, **arguments: Any) -> Any:
        out, vjp = function(**arguments)
        gradient = vjp(out if dout is None else dout)
        return out, gradient

    return call


for _kind in ("", "_scalar", "_vector"):
    for _first, _local in (("g", True), ("s", False)):
        _name = f"chunk_{'local' if _local else 'global'}_cumsum{_kind}"
        function(_name, lambda rng, a=(_first, _kind, _local): cumsum_arguments(rng, *a), same_bits=False)
for _name, _first, _local in (("chunk_local_cumsum_vjp", "g", True), ("chunk_global_cumsum_vjp", "s", False)):

    def _with_dout(rng: Rng, a: Any = (_first, "", _local)) -> Arguments:
        arguments = cumsum_arguments(rng, *a)
        return arguments | {"dout": floats(rng, *arguments[a[0]].shape)}

    target(_name, _with_dout, pulled_back(getattr(attnmask, _name)), pullback=True, same_bits=False)

# Linear attention


def linear_arguments(rng: Rng) -> Arguments:
    batch, tokens, key_heads, shared = 1 if coin(rng) else 2, *sizes(rng, 1, 70), *sizes(rng, 2, 3)
    heads, (rows, channels) = key_heads * shared, sizes(rng, 2, 40)
    dtype = pick(rng, FLOATS)
    wide = np.float64 if dtype is np.float64 else np.float32
    arguments: Arguments = {
        "query": floats(rng, batch, tokens, key_heads, rows, dtype=dtype),
        "key": floats(rng, batch, tokens, key_heads, rows, dtype=dtype) / 8,
        "value": floats(rng, batch, tokens, heads, channels, dtype=dtype),
    }
    arguments["key"] = arguments["key"].astype(dtype)
    if coin(rng, 0.2):
        arguments["value"][:, tokens // 2] = np.nan
    if batch == 1 and coin(rng):
        arguments["cu_seqlens"] = starts(rng, tokens)
    sequences = len(arguments["cu_seqlens"]) - 1 if "cu_seqlens" in arguments else batch
    shape = pick(rng, [(heads,), (batch, tokens, heads), (batch, tokens, heads, rows)])
    return arguments | some(
        rng,
        {
            "decay": lambda: -np.abs(floats(rng, *shape, dtype=wide)),
            "beta": lambda: rng.random((batch, tokens, heads)).astype(wide),
            "scale": lambda: 0.5,
            "initial_state": lambda: floats(rng, sequences, heads, rows, channels, dtype=wide),
            "normalize_qk": lambda: True,
            "chunk_size": lambda: pick(rng, [16, 32, 256]),
            "out": lambda: np.zeros((batch, tokens, heads, channels), dtype),
        },
        0.5,
    )


def linear_vjp_arguments(rng: Rng) -> Arguments:
    arguments = linear_arguments(rng)
    return arguments | {"dout": floats(rng, *arguments["value"].shape)}


def linear_step_arguments(rng: Rng) -> Arguments:
    batch, key_heads, shared = sizes(rng, 3, 4)
    heads, (rows, channels) = key_heads * shared, sizes(rng, 2, 40)
    dtype = pick(rng, FLOATS)
    wide = np.float64 if dtype is np.float64 else np.float32
    shape = pick(rng, [(heads,), (batch, heads), (batch, heads, rows)])
    slots = batch + 2 * coin(rng)
    arguments: Arguments = {
        "query": floats(rng, batch, key_heads, rows, dtype=dtype),
        "key": floats(rng, batch, key_heads, rows, dtype=dtype),
        "value": floats(rng, batch, heads, channels, dtype=dtype),
        "state": floats(rng, slots, heads, rows, channels, dtype=wide),
    }
    if slots != batch or coin(rng):
        arguments["state_indices"] = rng.permutation(slots)[:batch]
    return arguments | some(
        rng,
        {
            "decay": lambda: -np.abs(floats(rng, *shape, dtype=wide)),
            "beta": lambda: rng.random((batch, heads)).astype(wide),
            "scale": lambda: 0.5,
            "normalize_qk": lambda: True,
            "out": lambda: np.zeros((batch, heads, channels), dtype),
        },
    )


function("linear_attention", lambda rng: linear_arguments(rng) | {"return_state": coin(rng)})
target(
    "linear_attention_vjp", linear_vjp_arguments, pulled_back(attnmask.linear_attention_vjp), pullback=True
)
function("linear_attention_step", linear_step_arguments, written=frozenset({"out", "state"}))

# Short convolutions


def convolution_arguments(rng: Rng) -> Arguments:
    batch, (tokens, channels), width = 1 if coin(rng) else 2, sizes(rng, 2, 20), pick(rng, [1, 2, 3, 4, 4, 6])
    dtype = pick(rng, FLOATS)
    arguments: Arguments = {
        "x": floats(rng, batch, tokens, channels, dtype=dtype),
        "weight": floats(rng, channels, width, dtype=dtype),
        "activation": pick(rng, [None, "silu"]),
    }
    if batch == 1 and coin(rng):
        arguments["cu_seqlens"] = starts(rng, tokens)
    sequences = len(arguments["cu_seqlens"]) - 1 if "cu_seqlens" in arguments else batch
    return arguments | some(
        rng,
        {
            "bias": lambda: floats(rng, channels, dtype=dtype),
            "initial_state": lambda: floats(rng, sequences, channels, width - 1, dtype=dtype),
            "out": lambda: np.zeros((batch, tokens, channels), dtype),
        },
    )


def step_arguments(rng: Rng) -> Arguments:
    rows, channels, width, dtype = *sizes(rng, 2, 20), pick(rng, [1, 2, 4, 6]), pick(rng, FLOATS)
    by_index = coin(rng)
    slots = rows + 2 if by_index else rows
    arguments: Arguments = {
        "x": floats(rng, rows, channels, dtype=dtype),
        "weight": floats(rng, channels, width, dtype=dtype),
        "state": floats(rng, slots, channels, width - 1, dtype=dtype),
        "activation": pick(rng, [None, "silu"]),
    }
    if by_index:
        arguments["state_indices"] = rng.permutation(slots)[:rows].astype(pick(rng, [np.int32, np.int64]))
    return arguments | some(
        rng,
        {
            "bias": lambda: floats(rng, channels, dtype=dtype),
            "out": lambda: np.zeros((rows, channels), dtype),
        },
    )


function("short_convolution", lambda rng: convolution_arguments(rng) | {"return_state": coin(rng)})
target(
    "short_convolution_vjp",
    lambda rng: (a := convolution_arguments(rng)) | {"dout": floats(rng, *a["x"].shape)},
    pulled_back(attnmask.short_convolution_vjp),
    pullback=True,
)
function("short_convolution_step", step_arguments, written=frozenset({"out", "state"}))

# The handlers of XLA for both, with arrays in their order

FLAGS = {"decay": 1, "beta": 2, "initial_state": 4, "cu_seqlens": 8, "kept": 32, "dstate": 64, "bias": 128}
FLAGS |= {"state_indices": 512}


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


def for_handler(rng: Rng, arguments: Arguments, results: Arguments, flags: int = 0) -> Arguments:
    """Arguments of a handler, in a third of the cases of two calls at once; these may share arguments."""
    flags |= sum(FLAGS.get(name, 0) for name in arguments)
    scale = struct.unpack("q", struct.pack("d", arguments.pop("scale", 0.25)))
    words = np.array([1, flags, *scale, arguments.pop("chunk_size", 64)])
    mapped = coin(rng, 0.3)
    for name, array in arguments.items() if mapped else ():
        calls = 2 if name == "state" else pick(rng, [1, 2])
        arguments[name] = np.repeat(array[None], calls, 0)
    zeros = {name: np.zeros((2,) * mapped + tuple(shape), dtype) for name, (shape, dtype) in results.items()}
    return (
        {"words": words} | arguments | {name: array for name, array in zeros.items() if name not in arguments}
    )


def wide_of(dtype: Any) -> Any:
    return np.float64 if dtype == np.float64 else np.float32


def linear_handler_arguments(rng: Rng, gradients: bool = False) -> Arguments:
    given = linear_arguments(rng)
    given.pop("out", None)
    normalize = 16 if given.pop("normalize_qk", False) else 0
    query, value, starts = given["query"], given["value"], given.get("cu_seqlens")
    batch, sequences = len(query), len(query) if starts is None else len(starts) - 1
    problem = ("query", "key", "value", "decay", "beta", "scale", "initial_state", "cu_seqlens")
    states, numbers = _core.check_linear_attention(
        *map(given.get, problem), bool(normalize), given.get("chunk_size", 64)
    )
    kept = (batch, math.ceil(states / batch), numbers)
    state, wide = (sequences, value.shape[2], query.shape[3], value.shape[3]), wide_of(query.dtype)
    results = {"out": (value.shape, query.dtype), "state": (state, wide)}
    if gradients:
        results = {f"d{name}": (x.shape, x.dtype) for name, x in given.items() if name in LEARNED}
        given |= {
            "kept": floats(rng, *kept, dtype=wide),
            "dout": floats(rng, *value.shape, dtype=query.dtype),
        }
        given |= some(rng, {"dstate": lambda: floats(rng, *state, dtype=wide)}, 0.5)
    elif coin(rng):
        results["kept"], normalize = (kept, wide), normalize | FLAGS["kept"]
    return for_handler(rng, given, results, normalize)


def linear_step_handler_arguments(rng: Rng) -> Arguments:
    given = linear_step_arguments(rng)
    given.pop("out", None)
    normalize = 16 if given.pop("normalize_qk", False) else 0
    for name in {"query", "key", "value", "decay", "beta"} & given.keys():
        given[name] = given[name][:, None] if given[name].ndim > 1 else given[name]
    return for_handler(rng, given, {"out": (given["value"].shape, given["query"].dtype)}, normalize)


def convolution_handler_arguments(rng: Rng, gradients: bool = False) -> Arguments:
    given = convolution_arguments(rng)
    given.pop("out", None)
    silu = 256 if given.pop("activation") else 0
    given["x"] = given["x"][..., None]
    x, (channels, width), starts = given["x"], given["weight"].shape, given.get("cu_seqlens")
    state = (len(x) if starts is None else len(starts) - 1, channels, width - 1)
    results = {"out": (x.shape, x.dtype), "state": (state, x.dtype)}
    if gradients:
        results = {f"d{name}": (given[name].shape, x.dtype) for name in LEARNED if name in given}
        given |= {"dout": floats(rng, *x.shape, dtype=x.dtype)}
        given |= some(rng, {"dstate": lambda: floats(rng, *state, dtype=x.dtype)}, 0.5)
    return for_handler(rng, given, results, silu)


def convolution_step_handler_arguments(rng: Rng) -> Arguments:
    given = step_arguments(rng)
    given.pop("out", None)
    silu = 256 if given.pop("activation") else 0
    given["x"] = given["x"][:, None, :, None]
    return for_handler(rng, given, {"out": (given["x"].shape, given["x"].dtype)}, silu)


LEARNED = ("query", "key", "value", "decay", "beta", "x", "weight", "bias", "initial_state")
LINEAR = "query key value decay beta cu_seqlens initial_state"
CONVOLUTION = "x weight bias cu_seqlens initial_state"
handler("linear_attention", linear_handler_arguments, f"linear_forward: {LINEAR} -> out state kept")
handler(
    "linear_attention, gradients",
    lambda rng: linear_handler_arguments(rng, True),
    f"linear_backward: {LINEAR} kept dout dstate -> dquery dkey dvalue ddecay dbeta dinitial_state",
)
handler(
    "linear_attention_step",
    linear_step_handler_arguments,
    "linear_step: query key value decay beta state state_indices -> out state",
)
handler(
    "short_convolution", convolution_handler_arguments, f"convolution_forward: {CONVOLUTION} -> out state"
)
handler(
    "short_convolution, gradients",
    lambda rng: convolution_handler_arguments(rng, True),
    f"convolution_backward: {CONVOLUTION} dout dstate -> dx dweight dbias dinitial_state",
)
handler(
    "short_convolution_step",
    convolution_step_handler_arguments,
    "convolution_step: x weight bias state state_indices -> out state",
)

# Masks

function(
    "mask_to_segment_ids",
    lambda rng: {
        "mask": mask(rng, *sizes(rng, pick(rng, [2, 3, 4]))),
        "per_head": coin(rng),
        "strict": False,
    },
)
function(
    "segment_ids_to_cu_seqlens",
    lambda rng: {
        "segment_ids": ids(rng, *sizes(rng, 2)),
        "out_dtype": np.int32,
        "max_segments": pick(rng, [None, 128, 4]),
    },
)
function(
    "positions_from_segment_ids",
    lambda rng: {"segment_ids": ids(rng, *sizes(rng, 2)), "pad_value": pick(rng, [-1, 0])},
)
function(
    "attention_mask_to_padding_segment_ids",
    lambda rng: {"attention_mask": mask(rng, *sizes(rng, pick(rng, [2, 3, 4])))},
)
function(
    "attention_mask_to_qkv_cu_seqlens",
    lambda rng: {
        "attention_mask": mask(rng, *sizes(rng, 4)),
        "reduce_heads": pick(rng, ["any", "all", "first"]),
        "out_dtype": np.int64,
    },
)
function(
    "qkv_masks_to_cu_seqlens",
    lambda rng: {"q_mask": mask(rng, 2, 5), "kv_mask": mask(rng, 2, 7), "out_dtype": np.int32},
)
function(
    "segment_ids_to_mask",
    lambda rng: (
        {
            "segment_ids": pick(rng, [ids(rng, 2, 5), (ids(rng, 2, 5), ids(rng, 2, 5)), ids(rng, 2, 3, 5)]),
            "return_separate_masks": coin(rng, 0.3),
        }
        | some(rng, {"dtype": lambda: np.float32})
    ),
)
function(
    "segment_ids_to_mask, out",
    lambda rng: {
        "segment_ids": ids(rng, 2, 5),
        "dtype": np.float32,
        "out": np.zeros((2, 1, 5, 5), np.float32),
    },
)
function(
    "segment_ids_to_qkv_masks",
    lambda rng: {
        "q_segment_ids": ids(rng, 2, 5),
        "kv_segment_ids": ids(rng, 2, 7),
        "dtype": np.int32,
        "out": np.zeros((2, 1, 5, 7), np.int32),
    },
)
function(
    "cu_seqlens_to_mask",
    lambda rng: (
        {"cu_seqlens": pairs(rng, 9), "max_len": 9, "dtype": np.bool_}
        if coin(rng)
        else {
            "cu_seqlens": np.array([0, 4, 5, 8]),
            "max_len": 8,
            "dtype": np.bool_,
            "out": np.zeros((2, 8), bool),
        }
    ),
)
for _name in ("qkv_cu_seqlens_to_qkv_masks", "qkv_cu_seqlens_to_attention_mask"):
    function(
        _name,
        lambda rng: {
            "cu_seqlens_q": np.array([0, 4, 5, 8]),
            "max_q_len": 8,
            "cu_seqlens_kv": np.array([0, 2, 4, 9], np.int32),
            "max_kv_len": 9,
            "dtype": pick(rng, [np.bool_, np.float32]),
        },
    )
function(
    "qkv_cu_seqlens_to_attention_mask, out",
    lambda rng: {"cu_seqlens_q": np.array([0, 4, 5, 8]), "max_q_len": 8, "out": np.zeros((2, 1, 8, 8), bool)},
)

# Attention

B, TQ, TK, H, HKV, D, DV = 2, 6, 7, 4, 2, 8, 5


def attention_arguments(rng: Rng, more: Callable[[Rng, Any, int], Arguments] | None = None) -> Arguments:
    """Query, key and value, and some of the rest."""
    dtype = pick(rng, FLOATS)
    tokens = 70 if coin(rng, 0.1) else TQ
    packed = coin(rng, 0.25)
    arguments: Arguments = {
        "query": floats(rng, 1 if packed else B, tokens, H, D, dtype=dtype),
        "key": floats(rng, 1 if packed else B, TK, HKV, D, dtype=dtype),
        "value": floats(rng, 1 if packed else B, TK, HKV, DV, dtype=dtype),
    }
    batch = 1 if packed else B
    if packed:
        arguments["cum_seqlens_q"] = np.array([0, 2, tokens], np.int32)
        arguments["cum_seqlens_k"] = np.array([0, 3, TK], np.int64)
    elif coin(rng, 0.25):
        arguments["q_segment_ids"] = ids(rng, batch, tokens)
        arguments["kv_segment_ids"] = ids(rng, batch, TK)
    arguments |= some(
        rng,
        {
            "attention_mask": lambda: pick(
                rng,
                [mask(rng, tokens, TK), mask(rng, batch, H, tokens, TK), any_mask(rng, batch, tokens, TK)],
            ),
            "bias": lambda: floats(rng, *pick(rng, [(tokens, TK), (1, H, 1, TK)]), dtype=pick(rng, FLOATS)),
            "softmax_scale": lambda: 0.5,
            "causal": lambda: True,
            "causal_offset": lambda: pick(rng, [1, -2, "bottom-right", np.array([2, -1], np.int32)]),
            "sliding_window": lambda: pick(rng, [2, (1, 0), (None, 3), 0]),
            "fwd_params": lambda: attnmask.FwdParams(16, 32),
            "bwd_params": lambda: attnmask.BwdParams(16, 32),
            "logits_soft_cap": lambda: 5.0,
            "softmax_aux": lambda: floats(rng, H, 1),
            "normalize_output": lambda: coin(rng),
            "precision": lambda: "highest",
            "logits_dtype": lambda: np.float32,
            "alibi_slopes": lambda: np.linspace(0, 1, H),
            "relative_bias": lambda: floats(rng, H, 5),
        },
        0.15,
    )
    if arguments.get("normalize_output", True) and coin(rng, 0.2):
        arguments |= {"dropout_prob": 0.25, "dropout_seed": 3}
    if "relative_bias" in arguments:
        arguments["relative_low"] = -2
    return arguments | (more(rng, arguments, tokens) if more else {})


def any_mask(rng: Rng, batch: int, queries: int, keys: int) -> MaskInfo:
    """A MaskInfo of this shape, of any base, with some terms."""
    info = pick(
        rng,
        [
            lambda: MaskInfo.from_segments(ids(rng, batch, queries), ids(rng, batch, keys)),
            lambda: MaskInfo.from_attention_mask(mask(rng, batch, 1, queries, keys)),
            lambda: MaskInfo.from_random(batch, queries, keys, 0.4, 1),
            lambda: MaskInfo.causal(queries, keys, 2, batch),
            lambda: MaskInfo.from_function(lambda b, h, q, k: (q + k) % 3, queries, keys, batch),
            lambda: MaskInfo.from_blocks(
                mask(rng, batch, 1, -(-queries // 3), -(-keys // 4)), (3, 4), queries, keys
            ),
        ],
    )()
    changes: list[Callable[[MaskInfo], MaskInfo]] = [
        lambda info: info.apply_causal(1),
        lambda info: info.apply_causal("bottom-right", within_segments=info._state.labels.complete),
        lambda info: info.apply_sliding_window((3, 2)),
        lambda info: info.apply_chunked(4),
        lambda info: info.apply_prefix(np.array([2] * batch)),
        lambda info: info.apply_token_type_ids((ids(rng, batch, queries), ids(rng, batch, keys))),
        lambda info: ~info,
    ]
    for change in changes:
        if coin(rng, 0.2):
            with contextlib.suppress(ValueError):  # prefixes are of segments
                info = change(info)
    if coin(rng, 0.2):
        info.get_or_compute_attention_mask()
    return info


def forward_more(rng: Rng, arguments: Arguments, tokens: int) -> Arguments:
    more: Arguments = {}
    if coin(rng, 0.3):
        more["out"] = np.zeros((*arguments["query"].shape[:-1], DV), arguments["query"].dtype)
    return more


def backward_more(rng: Rng, arguments: Arguments, tokens: int) -> Arguments:
    query = arguments["query"]
    arguments.pop("softmax_aux", None)
    more: Arguments = {
        "dout": floats(rng, *query.shape[:-1], DV, dtype=query.dtype),
        "out": floats(rng, *query.shape[:-1], DV, dtype=query.dtype),
        "lse": floats(
            rng, len(query), H, tokens, dtype=np.float64 if query.dtype == np.float64 else np.float32
        ),
    }
    if coin(rng, 0.3):
        more["dlse"] = more["lse"].copy()
    if "bias" in arguments and coin(rng):
        more["grad_bias"] = True
    if "relative_bias" in arguments and coin(rng):
        more["grad_relative_bias"] = True
    return more


def vjp_more(rng: Rng, arguments: Arguments, tokens: int) -> Arguments:
    wants = [
        ("bias", "grad_bias"),
        ("softmax_aux", "grad_softmax_aux"),
        ("relative_bias", "grad_relative_bias"),
    ]
    return {grad: True for name, grad in wants if name in arguments and coin(rng)} | {
        "dout": floats(rng, *arguments["query"].shape[:-1], DV, dtype=arguments["query"].dtype)
    }


function(
    "flash_attention",
    lambda rng: attention_arguments(rng, lambda *a: forward_more(*a) | {"return_lse": coin(rng)}),
)
function("flash_attention_fwd", lambda rng: attention_arguments(rng, forward_more))
function("flash_attention_bwd", lambda rng: attention_arguments(rng, backward_more), written=frozenset())
target(
    "flash_attention_vjp",
    lambda rng: attention_arguments(rng, vjp_more),
    pulled_back(attnmask.flash_attention_vjp),
)
function(
    "dropout_keep_mask",
    lambda rng: (
        {"seed": pick(rng, [None, 3]), "prob": 0.3, "shape": (1, 2, 5, 7)}
        | some(rng, {"out": lambda: np.zeros((1, 2, 5, 7), bool)})
    ),
)


def states(rng: Rng) -> Arguments:
    dtype = pick(rng, FLOATS)
    outs = floats(rng, 3, 2, 5, 4, 8, dtype=dtype)
    lses = floats(rng, 3, 2, 4, 5, dtype=np.float64 if dtype is np.float64 else np.float32)
    return {"outs": list(outs), "lses": list(lses)} if coin(rng) else {"outs": outs, "lses": lses}


def merge_vjp(outs: Any, lses: Any, dout: Any, dlse: Any = None) -> Any:
    merged, vjp = attnmask.merge_attention_states_vjp(outs, lses)
    return merged, vjp(dout, dlse)


function("merge_attention_states", states)
target(
    "merge_attention_states_vjp",
    lambda rng: (
        (a := states(rng))
        | {"dout": floats(rng, 2, 5, 4, 8, dtype=a["outs"][0].dtype)}
        | some(rng, {"dlse": lambda: floats(rng, 2, 4, 5, dtype=a["lses"][0].dtype)}, 0.5)
    ),
    merge_vjp,
)
for _name in ("FwdParams", "BwdParams"):
    function(_name, lambda rng: {"q_blocksize": 16, "kv_blocksize": 64})


def t5_arguments(rng: Rng) -> Arguments:
    return {
        "table": floats(rng, 8, H, dtype=pick(rng, FLOATS)),
        "q_len": 5,
        "kv_len": 7,
        "bidirectional": coin(rng),
        "max_distance": 32,
    }


function("t5_relative_bias", t5_arguments)
target(
    "t5_relative_bias_vjp",
    lambda rng: t5_arguments(rng) | {"d_relative_bias": None},
    lambda d_relative_bias=None, **arguments: (
        (made := attnmask.t5_relative_bias_vjp(**arguments))[0],
        made[1](made[0][0] if d_relative_bias is None else d_relative_bias),
    ),
)

# Caches


# Types of caches that have scales; None: there are none.
LOW = [None, None, *map(np.dtype, (np.int8, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))]


def cache_arguments(rng: Rng) -> Arguments:
    low = pick(rng, LOW)
    dtype = pick(rng, FLOATS if low is None else [np.float16, np.float32, ml_dtypes.bfloat16])
    packed, paged = coin(rng), coin(rng)
    rows = (2 * 3,) if packed else (2, 3)
    arguments: Arguments = {"query": floats(rng, *rows, H, D, dtype=dtype)}
    for name, depth in (("k", D), ("v", DV)):
        shape = (6, 4, HKV, depth) if paged else (2, 12, HKV, depth)
        arguments[f"{name}_cache"] = (3 * floats(rng, *shape)).astype(low or dtype)
        if low is not None:
            scale = (*shape[:3], 1) if coin(rng, 0.8) else (1, 1, HKV, depth)
            arguments[f"{name}_scale"] = rng.random(scale, np.float32) + np.float32(0.5)
    if coin(rng):
        arguments |= {
            "key": floats(rng, *rows, HKV, D, dtype=dtype),
            "value": floats(rng, *rows, HKV, DV, dtype=dtype),
        }
    arguments["cache_seqlens"] = np.array([4, 8], np.int32)
    if paged:
        arguments["block_table"] = np.array([[5, 1, -1], [0, 4, 2]], np.int32)
    if packed:
        arguments["cu_seqlens_q"] = np.array([0, 2, 6], np.int32)
        if "key" in arguments and coin(rng):
            arguments["cu_seqlens_k_new"] = np.array([0, 3, 6], np.int32)
    arguments |= some(
        rng,
        {
            "softmax_scale": lambda: 0.3,
            "causal": lambda: False,
            "sliding_window": lambda: (3, 0),
            "logits_soft_cap": lambda: 9.0,
            "softmax_aux": lambda: floats(rng, H, 1),
            "alibi_slopes": lambda: np.linspace(0, 1, H),
            "attention_mask": lambda: mask(rng, 1, 1, 1, 12),
            "bias": lambda: floats(rng, 1, H, 1, 12),
            "attention_chunk": lambda: pick(rng, [1, 5, 64]),
            "relative_bias": lambda: floats(rng, H, 5),
            "return_lse": lambda: True,
            "out": lambda: np.zeros((*rows, H, DV), dtype),
        },
        0.15,
    )
    if "relative_bias" in arguments:
        arguments["relative_low"] = -2
    return arguments


function(
    "flash_attention_with_kvcache",
    cache_arguments,
    written=frozenset({"out", "k_cache", "v_cache", "k_scale", "v_scale"}),
)
function(
    "quantize_kv",
    lambda rng: {
        "x": floats(rng, 2, 5, 3, 4, dtype=pick(rng, FLOATS)),
        "dtype": pick(rng, [np.int8, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]),
        "axis": pick(rng, [-1, (0, 1), 2]),
    },
)
function(
    "quantize_kv of four bits",
    lambda rng: {
        "x": floats(rng, 2, 5, 64, dtype=pick(rng, FLOATS)),
        "dtype": "int4",
        "group": pick(rng, [32, 64]),
    },
)


def slots_arguments(rng: Rng, four_bits: bool = False) -> Arguments:
    low, dtype = pick(rng, [None, *LOW, None, None]), pick(rng, FLOATS)  # so that each type is drawn soon
    depths = (64, 32) if four_bits else (8, 4)
    arguments: Arguments = {}
    for name, depth in zip("kv", depths, strict=True):
        if four_bits:
            arguments[f"{name}_cache"] = rng.integers(0, 256, (6, 4, HKV, depth // 2), np.uint8)
            arguments[f"{name}_scale"] = rng.random((6, 4, HKV, depth // 32, 2), np.float32)
            continue
        arguments[f"{name}_cache"] = (3 * floats(rng, 6, 4, HKV, depth)).astype(low or dtype)
        if low is not None:
            scale = (6, 4, HKV, 1) if low != np.int8 or coin(rng, 0.5) else (1, 1, HKV, depth)
            arguments[f"{name}_scale"] = rng.random(scale, np.float32) + np.float32(0.5)
    arguments |= {x: floats(rng, 5, HKV, depth) for x, depth in zip(("key", "value"), depths, strict=True)}
    arguments["slot_mapping"] = rng.permutation(np.arange(-1, 24))[:5].astype(pick(rng, [np.int32, np.int64]))
    return arguments | some(rng, {"rotate": lambda: True})


SLOTS = frozenset({"k_cache", "v_cache", "k_scale", "v_scale"})
function("write_kvcache", slots_arguments, written=SLOTS)
function("write_kvcache of four bits", lambda rng: slots_arguments(rng, True), written=SLOTS)


def slots_handler_arguments(rng: Rng) -> Arguments:
    """Of one call, or in a third of the cases of two at once."""
    given, mapped = slots_arguments(rng), coin(rng, 0.3)
    given.pop("rotate", None)
    words = [3, 16 * ("k_scale" in given) | 32 * ("v_scale" in given), 2, 0]  # 2: an array of the words
    for name in ("key", "value"):
        given[name] = given[name][None]
    if given["slot_mapping"].dtype == np.int64:
        given["slot_mapping"] = given["slot_mapping"].view(np.int32).reshape(-1, 2)
        words[2] = 3
    if mapped:
        given = {
            name: np.repeat(x[None], 2 if "_cache" in name or "_scale" in name else pick(rng, [1, 2]), 0)
            for name, x in given.items()
        }
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


def halves_arguments(rng: Rng) -> Arguments:
    arguments: Arguments = {
        "query": floats(rng, 2, 3, H, 64, dtype=pick(rng, [np.float32, ml_dtypes.bfloat16]))
    }
    for name in "kv":
        shape = 6, 4, HKV
        arguments[f"{name}_cache"] = rng.integers(0, 256, (*shape, 32), np.uint8)
        arguments[f"{name}_scale"] = rng.random((*shape, 2, 2)).astype(pick(rng, [np.float32, np.float16]))
    if coin(rng):
        arguments |= {name: floats(rng, 2, 3, HKV, 64) for name in ("key", "value")}
    arguments |= {
        "cache_seqlens": np.array([4, 8], np.int32),
        "block_table": np.array([[5, 1, -1], [0, 4, 2]], np.int32),
    }
    return arguments | some(rng, {"rotate": lambda: True, "return_lse": lambda: True}, 0.3)


function(
    "flash_attention_with_kvcache of four bits",
    halves_arguments,
    written=frozenset({"k_cache", "v_cache", "k_scale", "v_scale"}),
)


def used_cache(dtype: Any = np.float32) -> KVCache:
    """Sequence 0 of six tokens, 1 a fork of it, and 2 that was freed."""
    cache = KVCache(HKV, D, layers=2, pages=8, page_size=4, dtype=dtype, value_depth=DV)
    first = cache.new_sequence()
    rng = np.random.default_rng(0)
    with cache.step([first], [6]) as step:
        for layer in range(2):
            step.attend(layer, *step_tokens(rng, 6).values())
    cache.fork(first)
    cache.free(cache.new_sequence())
    return cache


def step_tokens(rng: Rng, total: int) -> Arguments:
    return {
        "query": floats(rng, total, H, D),
        "key": floats(rng, total, HKV, D),
        "value": floats(rng, total, HKV, DV),
    }


def contents(cache: KVCache) -> Any:
    """What a cache says of itself, which an error must not have changed."""
    return cache.free_pages, cache.lengths([0, 1]), cache.block_table([0, 1])


def step_attend(cache: KVCache, ids: Any, counts: Any, **arguments: Any) -> Any:
    before = contents(cache)
    try:
        with cache.step(ids, counts) as step:
            out = step.attend(**arguments)
            for layer in {0, 1} - step._attended:
                step.attend(layer, **step_tokens(np.random.default_rng(0), sum(step._counts)))
    except Exception:
        for old, new in zip(before, contents(cache), strict=True):
            np.testing.assert_array_equal(old, new)
        raise
    return out, contents(cache)


target(
    "KVCache",
    lambda rng: {
        "kv_heads": HKV, "layers": 2, "pages": 4, "page_size": 4,
    } | pick(
        rng,
        [
            {"depth": D, "dtype": pick(rng, [np.float32, np.int8, "bfloat16"]), "value_depth": pick(rng, [None, 3])},
            {"depth": 64, "dtype": "int4", "group": 32, "rotate": True},
            {"depth": D, "dtype": np.float16, "value_depth": 3, "latent": True},
        ],
    ),
    lambda **a: contents_of_new(KVCache(**a)),
)  # fmt: skip


def contents_of_new(cache: KVCache) -> Any:
    number = cache.new_sequence()
    return cache.lengths([number]), cache.block_table([number]), cache.free_pages


_CACHE = frozenset({"cache"})
for _name, _arguments in {
    "block_table": lambda rng: {"ids": pick(rng, [[0, 1], np.array([1]), [0, 0]])},
    "lengths": lambda rng: {"ids": pick(rng, [[0, 1], np.array([1], np.int8), []])},
    "fork": lambda rng: {"id": pick(rng, [0, 1])},
    "free": lambda rng: {"id": pick(rng, [0, 1])},
    "truncate": lambda rng: {"id": pick(rng, [0, 1]), "length": pick(rng, [0, 3, 6])},
}.items():
    target(
        f"KVCache.{_name}",
        lambda rng, make=_arguments: {"cache": used_cache()} | make(rng),
        lambda cache, name=_name, **a: (getattr(cache, name)(**a), cache.free_pages),
        kept=_CACHE,
    )
target(
    "KVCache.step",
    lambda rng: (
        {"cache": used_cache(), "ids": np.array([1, 0]), "counts": np.array([2, 3])}
        | {"layer": pick(rng, [0, 1])}
        | step_tokens(rng, 5)
        | some(
            rng,
            {
                "softmax_scale": lambda: 0.5,
                "causal": lambda: False,
                "sliding_window": lambda: 3,
                "logits_soft_cap": lambda: 5.0,
                "softmax_aux": lambda: floats(rng, H, 1),
                "alibi_slopes": lambda: np.linspace(0, 1, H),
                "return_lse": lambda: True,
            },
        )
    ),
    step_attend,
    kept=_CACHE,
)

# MaskInfo: constructors, whose result is looked at in every way; and methods

PROPERTIES = sorted(
    name for name in dir(MaskInfo) if name[0] != "_" and isinstance(getattr(MaskInfo, name), property)
)


def look_at(info: MaskInfo) -> Any:
    """All that can be asked of a mask without an argument."""
    seen: list[Any] = [info.shape, info.heads, repr(info)]
    if np.prod([float(size) for size in (*info.shape[:1], info.heads or 1, *info.shape[1:])]) > 1e5:
        return seen
    seen += [str(info), info.density(), info._repr_html_(), info.is_self_attention()]
    if all(info.shape) and info.heads:
        seen.append(info.visualize(return_str=True))
    for name in PROPERTIES:
        try:
            seen.append(getattr(info, name))
        except (ValueError, OverflowError) as error:  # no ids reproduce some masks
            seen.append(str(error))
    seen.append(info == MaskInfo.tree_unflatten(*reversed(info.tree_flatten())))
    with contextlib.suppress(TypeError, AttributeError, pickle.PicklingError):
        seen.append(pickle.loads(pickle.dumps(info)) == info)
    seen.append(copy.copy(info) == info)
    return seen


def constructor(name: str, arguments: Callable[[Rng], Arguments]) -> None:
    target(f"MaskInfo.{name}", arguments, lambda **a: look_at(getattr(MaskInfo, name)(**a)))


AXES = {
    "batch_axis_name": lambda: ("dp", "fsdp"),
    "qheads_axis_name": lambda: "tp",
    "kvheads_axis_name": lambda: None,
    "sequence_axis_name": lambda: "sp",
}


def positions(rng: Rng, queries: int = 5, keys: int = 7) -> Arguments:
    return some(
        rng,
        {
            "q_positions": lambda: np.arange(queries)[None].repeat(2, 0),
            "kv_positions": lambda: np.arange(keys, dtype=np.int32)[None].repeat(2, 0),
        }
        | AXES,
    )


def _mask_info(rng: Rng) -> Arguments:
    given = pick(
        rng,
        [
            lambda: {"attention_mask": mask(rng, 2, 1, 5, 7)},
            lambda: {"q_segment_ids": ids(rng, 2, 5), "kv_segment_ids": ids(rng, 2, 7)},
            lambda: {"attention_mask": mask(rng, 1, 1, 5, 7), "cu_seqlens_q": starts(rng, 5)},
        ],
    )()
    flags = some(rng, {"causal_mask_baked_in": lambda: True, "sliding_window_baked_in": lambda: True})
    if "attention_mask" in given:  # flags are for arrays, and must be true
        given |= {"attention_mask": np.tril(given["attention_mask"])} | flags
    return given | positions(rng)


target("MaskInfo", _mask_info, lambda **a: look_at(MaskInfo(**a)))
constructor("full", lambda rng: {"q_len": 5} | some(rng, {"kv_len": lambda: 7, "batch": lambda: 2}))
constructor(
    "causal",
    lambda rng: (
        {"q_len": 5, "batch": 2}
        | some(
            rng, {"kv_len": lambda: 7, "offset": lambda: pick(rng, [-2, "bottom-right", np.array([1, 2])])}
        )
    ),
)
constructor(
    "from_lengths",
    lambda rng: {"lengths": rng.integers(0, 6, int(rng.integers(4)))} | some(rng, {"max_len": lambda: 6}),
)
constructor("from_padding_mask", lambda rng: {"padding_mask": mask(rng, 2, 5)})
constructor(
    "from_segments",
    lambda rng: (
        {"q_segment_ids": ids(rng, 2, 5), "kv_segment_ids": ids(rng, 2, 7)}
        | some(rng, {"is_attn_mask": lambda: False})
        | positions(rng)
    ),
)
constructor(
    "from_attention_mask",
    lambda rng: (
        {"attention_mask": mask(rng, *pick(rng, [(2, 1, 5, 7), (2, 5, 7), (2, 3, 5, 7)]))}
        | some(rng, {"mask_is_valid": lambda: True})
        | positions(rng)
    ),
)
constructor(
    "from_cu_seqlens",
    lambda rng: pick(
        rng,
        [
            lambda: {"cu_seqlens_q": starts(rng, 9), "packed": True},
            lambda: {"cu_seqlens_q": starts(rng, 9), "packed": True, "max_q_len": 12},
            lambda: {"cu_seqlens_q": np.array([0, 3, 5, 8]), "max_q_len": 9, "packed": False},
            lambda: {
                "cu_seqlens_q": np.array([0, 3, 5, 8]),
                "max_q_len": 9,
                "cu_seqlens_kv": np.array([0, 3, 2, 8]),
                "max_kv_len": 8,
                "packed": None,
            },
        ],
    )(),
)
constructor(
    "from_random",
    lambda rng: {"batch_size": 2, "q_len": 5, "kv_len": 7, "sparsity": 0.3, "seed": [1]} | positions(rng),
)
constructor(
    "dynamic_init",
    lambda rng: pick(
        rng,
        [
            lambda: {"mask_info": any_mask(rng, 2, 5, 5)},
            lambda: {"input_ids": rng.integers(0, 9, (2, 5))},
            lambda: {"inputs_embeds": floats(rng, 2, 5, 3)},
            lambda: {"input_ids": rng.integers(0, 9, (2, 5)), "attention_mask": mask(rng, 2, 5)},
        ],
    )(),
)
constructor(
    "from_blocks",
    lambda rng: {
        "blocks": mask(rng, 2, 1, 2, 3),
        "block_size": pick(rng, [4, (3, 5)]),
        "q_len": 6,
        "kv_len": 11,
    },
)


class Function:
    """A mask as a function of places, whose result can be of any kind."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) if self.result is None else self.result


target(
    "MaskInfo.from_function",
    lambda rng: {"f": None, "q_len": 5, "kv_len": 7, "batch": 2, "heads": pick(rng, [1, 2])},
    lambda f=None, **a: look_at(MaskInfo.from_function(f if callable(f) else Function(f), **a)),
)


def method(
    name: str, arguments: Callable[[Rng], Arguments] = lambda rng: {}, label: str = "", called: Any = None
) -> None:
    """Of a mask of two rows, five queries and seven keys."""

    def call(info: MaskInfo, **a: Any) -> Any:
        result = called(info, **a) if called else getattr(info, name)(**a)
        return look_at(result) if isinstance(result, MaskInfo) else result

    def right(rng: Rng) -> Arguments:
        info = any_mask(rng, 2, 5, 7)
        made = arguments(rng)
        if not info._state.labels.complete:  # there are no segments to count in
            made.pop("within_segments", None)
        return {"info": info} | made

    target(f"MaskInfo.{name}{label}", right, call, kept=frozenset({"info"}))


method(
    "apply_causal",
    lambda rng: {
        "offset": pick(rng, [0, 2, np.array([1, -1]), "bottom-right"]),
        "within_segments": pick(rng, [False, True]),
    },
)
method(
    "apply_sliding_window",
    lambda rng: {
        "sliding_window": pick(rng, [2, (1, None), np.array([2]), (None, np.array([1]))]),
        "offset": pick(rng, [0, np.array([1, -1]), "bottom-right"]),
        "mode": pick(rng, [None, "default"]),
        "within_segments": pick(rng, [False, True]),
    },
)
method(
    "apply_sliding_window",
    lambda rng: {"sliding_window": 2, "mode": pick(rng, ["decode", "prefill"]), "index": np.array([3, 4])},
    ", mode",
)
method(
    "apply_chunked",
    lambda rng: {
        "chunk_size": 3,
        "offset": pick(rng, [0, np.array([1, -2])]),
        "within_segments": pick(rng, [False, True]),
    },
)
method("apply_prefix", lambda rng: {"lengths": np.array([1, 3])})
method(
    "apply_kv_lengths",
    lambda rng: (
        {"kv_lengths": np.array([3, 7])} | some(rng, {"q_len": lambda: 2, "sliding_window": lambda: 3})
    ),
)
method(
    "apply_token_type_ids",
    lambda rng: {
        "token_type_ids": (ids(rng, 2, 5), ids(rng, 2, 7)),
        "combine": pick(rng, ["union", "intersect", "replace"]),
        "zero_policy": pick(rng, ["q", "kv", "both", "none"]),
        "update_segment_ids": coin(rng, 0.8),
    },
)
method("__getitem__", lambda rng: {"index": pick(rng, INDICES)}, called=lambda info, index: info[index])
INDICES = [
    Ellipsis,
    (0, Ellipsis),
    (slice(None), 0, Ellipsis),
    (0, 0, slice(1, 4), slice(2, None)),
    (Ellipsis, slice(-3, None)),
]
for _name, _operator in (("__and__", operator.and_), ("__or__", operator.or_)):
    method(
        _name,
        lambda rng: {"other": any_mask(rng, 2, 5, 7)},
        called=lambda info, other, operator=_operator: operator(info, other),
    )
method("__eq__", lambda rng: {"other": any_mask(rng, 2, 5, 7)})
method("__invert__")
method("create_bias", lambda rng: {"dtype": pick(rng, FLOATS)})
method("create_bias", lambda rng: {"dtype": np.float32, "out": np.zeros((2, 1, 5, 7), np.float32)}, ", out")
method("get_or_compute_attention_mask", lambda rng: {"dtype": pick(rng, [np.bool_, np.int8, np.float16])})
method(
    "get_or_compute_attention_mask",
    lambda rng: {"dtype": np.bool_, "out": np.zeros((2, 1, 5, 7), np.bool_)},
    ", out",
)
method("get_or_compute_positions")
method("get_or_compute_segment_ids", lambda rng: {"per_head": coin(rng)})
method(
    "get_or_compute_qkv_cu_seqlens",
    lambda rng: {"out_dtype": np.int64, "max_segments": pick(rng, [None, 99])},
)
method("get_qkv_masks", lambda rng: {"dtype": pick(rng, [np.bool_, np.int8])})
method(
    "get_shardings",
    lambda rng: {"sequence_parallel": coin(rng), "mesh": {"dp": 2, "tp": 1, "sp": 1, "fsdp": 1}},
)
method("grid", lambda rng: {"batch": 1, "head": 0, "q_cell": 2, "k_cell": 3})
method("labels", lambda rng: {"batch": 1, "head": 0})
method("is_self_attention")
method("density")
method("materialize_attention_mask", lambda rng: {"dtype": pick(rng, [np.bool_, np.int8])})
method("materialize_segment_ids", lambda rng: {"per_head": coin(rng)})
method("to_dtype", lambda rng: {"dtype": pick(rng, [np.bool_, np.float32])})
method("tree_flatten")
method("__reduce__")
method("__repr__")
method("_repr_html_")
for _name in PROPERTIES:
    target(
        f"MaskInfo.{_name}",
        lambda rng: {"info": any_mask(rng, 2, 5, 7)},
        lambda info, name=_name: getattr(info, name),
        kept=frozenset({"info"}),
    )
method(
    "replace",
    lambda rng: pick(
        rng,
        [
            lambda: {"attention_mask": mask(rng, 2, 1, 5, 7)},
            lambda: {"q_segment_ids": ids(rng, 2, 5), "kv_segment_ids": ids(rng, 2, 7)},
            lambda: {"q_positions": np.arange(10).reshape(2, 5), "batch_axis_name": "dp"},
            lambda: {"attention_mask": np.tril(mask(rng, 2, 1, 5, 7)), "causal_mask_baked_in": True},
        ],
    )(),
)
method(
    "visualize",
    lambda rng: {
        "block_size": pick(rng, [2, (1, 3)]), "batch": 1, "head": 0, "fit_in_screen": coin(rng), "max_rows": 4,
        "max_cols": 4, "charset": pick(rng, ["unicode", "ascii"]), "show_segments": coin(rng), "return_str": True,
    },
)  # fmt: skip
target(
    "MaskInfo.create_chunked_attention_mask",
    lambda rng: (
        {"chunk_size": 3, "q_len": 5, "kv_len": 7, "offset": 1, "dtype": np.bool_}
        | some(rng, {"out": lambda: np.zeros((5, 7), bool)})
    ),
    MaskInfo.create_chunked_attention_mask,
)
target("MaskInfo.get_empty_sharding", lambda rng: {}, MaskInfo.get_empty_sharding)
target(
    "MaskInfo.tree_unflatten",
    lambda rng: dict(zip(("children", "aux_data"), any_mask(rng, 2, 5, 7).tree_flatten(), strict=True)),
    lambda children, aux_data: look_at(MaskInfo.tree_unflatten(aux_data, children)),
)

# The operator layer


def operator_arguments(rng: Rng) -> Arguments:
    arguments = {
        name: value for name, value in attention_arguments(rng).items() if name in ("query", "key", "value")
    }
    batch, tokens = arguments["query"].shape[:2]
    return arguments | some(
        rng,
        {
            "mask": lambda: pick(rng, [mask(rng, batch, 1, tokens, TK), any_mask(rng, batch, tokens, TK)]),
            "bias": lambda: floats(rng, 1, H, tokens, TK, dtype=arguments["query"].dtype),
            "causal": lambda: True,
            "sliding_window": lambda: 3,
            "softmax_aux": lambda: floats(rng, H, 1),
        },
    )


for _name in ("flash", "vanilla"):
    target(
        f"operations.{_name}",
        operator_arguments,
        lambda name=_name, **a: operations.OperationRegistry.create(name)(**a),
    )
target(
    "OperationMetadata",
    lambda rng: {
        "runtime_dtype": pick(rng, [None, np.float32]), "runtime_softmax_dtype": None, "softmax_scale": 0.5,
        "dropout_prob": 0.0, "backend": None, "mesh": None, "query": floats(rng, 1, 3, 2, 4),
    },
    lambda query, **a: operations.OperationRegistry.create("vanilla", operations.OperationMetadata(**a))(
        query, query, query
    ),
    kept=frozenset({"query"}),
)  # fmt: skip
target("OperationRegistry.get", lambda rng: {"impl_name": "flash"}, operations.OperationRegistry.get)
target(
    "OperationRegistry.create",
    lambda rng: {"impl_name": "flash", "metadata": None},
    lambda **a: type(operations.OperationRegistry.create(**a)),
)


_numbers = itertools.count()


def new_operation(rng: Rng) -> Arguments:
    name = f"own {next(_numbers)}"
    return {
        "operation": type("Own", (operations.FlashAttention,), {"get_impl_name": staticmethod(lambda: name)})
    }


target(
    "OperationRegistry.register",
    new_operation,
    lambda operation: operations.OperationRegistry.register(operation) is operation,
)
target("OperationRegistry.list", lambda rng: {}, operations.OperationRegistry.list)
_operation = operations.FlashAttention()
for _name, _arguments in {
    "get_mode": lambda rng: {"query": floats(rng, 2, 1, 3, 4), "BTHD": coin(rng)},
    "split_attention_mask": lambda rng: {"attn_mask": pick(rng, [mask(rng, 2, 1, 5, 7), mask(rng, 2, 5, 7)])},
    "combine_query_kv_masks": lambda rng: {"q_mask": mask(rng, 2, 5), "kv_mask": mask(rng, 2, 7)},
    "create_causal_mask": lambda rng: {"qseq": 5},
    "repeat_kv_heads": lambda rng: {"k": floats(rng, 2, 5, 2, 3), "v": floats(rng, 2, 5, 2, 4), "num_reps": 2},
    "handle_kvhead": lambda rng: {
        "array": pick(rng, [None, floats(rng, 2, 2, 5, 7)]), "num_q_heads": 4, "num_kv_heads": 2,
    },
}.items():  # fmt: skip
    target(f"OperationImpl.{_name}", _arguments, getattr(_operation, _name))
target(
    "OperationImpl.create_stable_sharding",
    lambda rng: {"state_ps": ("dp", None, "tp"), "preserved_indices": [0, 2], "clone_ps": None, "dep": True},
    _operation.create_stable_sharding,
)

# Padded batches


def pack_arguments(rng: Rng) -> Arguments:
    rows, tokens = int(rng.integers(0, 4)), int(rng.integers(0, 9))
    lengths = pick(rng, [rng.integers(0, tokens + 1, rows), mask(rng, rows, tokens)])
    return {"x": floats(rng, rows, tokens, *pick(rng, [(), (2,), (2, 3)])), "lengths": lengths}


def unpack_arguments(rng: Rng) -> Arguments:
    total = int(rng.integers(0, 9))
    packed = floats(rng, total, 2).astype(pick(rng, [np.float32, np.int8]))
    return {"packed": packed, "cu_seqlens": starts(rng, total), "max_len": 9, "fill": pick(rng, [0, -1])}


function("pack", pack_arguments)
function("unpack", unpack_arguments)

# Sequences that processes share


def shard_arguments(rng: Rng) -> Arguments:
    tokens = int(rng.integers(0, 20))
    shape, axis = pick(
        rng,
        [
            ((2, tokens), None),
            ((tokens,), None),
            ((2, tokens, 3), None),
            ((tokens, 2, 3), 0),
            ((2, tokens), -1),
        ],
    )
    return {"x": floats(rng, *shape), "axis": axis, "world": 3, "rank": int(rng.integers(3))} | some(
        rng, {"layout": lambda: "contiguous", "cu_seqlens": lambda: starts(rng, tokens)}, 0.5
    )


def unshard_arguments(rng: Rng) -> Arguments:
    x, layout = floats(rng, 2, int(rng.integers(0, 20))), pick(rng, ["zigzag", "contiguous"])
    return {"shards": [attnmask.shard_sequence(x, 3, rank, layout) for rank in range(3)], "layout": layout}


function("shard_sequence", shard_arguments)
function("unshard_sequence", unshard_arguments)
target(
    "plan_shards",
    lambda rng: {"mask": any_mask(rng, 1, 12, 12), "world": int(rng.integers(1, 5))},
    lambda mask, world: attnmask.plan_shards(mask, world).tokens(0),
)
target(
    "ShardPlan",
    lambda rng: {"starts": np.array([0, 3, 3, 9]), "owners": np.array([0, 1, 0]), "world": 2},
    lambda starts, owners, world: attnmask.ShardPlan(starts, owners, world).lengths,
)

# The runtime


def with_threads(n: Any) -> int:
    before = attnmask.get_num_threads()
    try:
        attnmask.set_num_threads(n)
        return attnmask.get_num_threads()
    finally:
        attnmask.set_num_threads(before)


def with_debug_mode(enabled: Any) -> bool:
    try:
        attnmask.set_debug_mode(enabled)
        return attnmask.get_debug_mode()
    finally:
        attnmask.set_debug_mode(False)


target("set_num_threads", lambda rng: {"n": 2}, with_threads)
function("get_num_threads", lambda rng: {})
target("set_debug_mode", lambda rng: {"enabled": True}, with_debug_mode)
function("get_debug_mode", lambda rng: {})
target("show_config", lambda rng: {"mode": "dict"}, lambda mode: sorted(attnmask.show_config(mode) or ()))
