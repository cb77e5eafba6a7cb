"""Right arguments of every public function: one row each, from which the tests and the fuzzer draw.

`TARGETS` has what they call, with the rows of masks, caches and operators, too (rows_of_objects.py), and in
tests/fuzz/targets.py the handlers of XLA.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from drawing import (
    FLAG,
    FLOATS,
    Arguments,
    Draw,
    Rng,
    any_mask,
    coin,
    draw,
    floats,
    ids,
    ids_of,
    integers,
    made,
    mask_of,
    maybe,
    of_row,
    one,
    pick,
    reals,
    starts,
    starts_of,
    wide_of,
    zeros,
)

import attnmask
from attnmask._attention.arguments import DEFAULTS
from attnmask._faces.linear import (
    LINEAR_ATTENTION,
    LINEAR_ATTENTION_STEP,
    SHORT_CONVOLUTION,
    SHORT_CONVOLUTION_STEP,
)
from attnmask._faces.rows import Row


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
CACHES = frozenset({"k_cache", "v_cache", "k_scale", "v_scale"})


def target(name: str, arguments: Callable[[Rng], Arguments], call: Callable[..., Any], **more: Any) -> None:
    assert name not in TARGETS
    TARGETS[name] = Target(name, arguments, call, **more)


def function(name: str, arguments: Callable[[Rng], Arguments], **more: Any) -> None:
    """A target that is called as it is named, but for what follows a comma or "of"."""
    target(name, arguments, getattr(attnmask, name.partition(",")[0].partition(" of ")[0]), **more)


def row(names: str, *rows: Any, call: Callable[..., Any] | None = None, **arguments: Any) -> None:
    """A target for each name, whose arguments are drawn from rows."""
    for name in names.split("; "):
        if call is None:
            function(name, lambda rng: draw(rng, *rows, arguments))
        else:
            target(name, lambda rng: draw(rng, *rows, arguments), call)


def firsts(drawn: Callable[[int], Arguments], kept: Iterable[str] = ()) -> Iterator[tuple[str, Arguments]]:
    """Of arguments that are drawn by seeds the first ones with each of them, by its number of axes, or of each flag."""
    found = set()
    for seed in range(60):
        for argument, value in drawn(seed).items():
            form = argument, getattr(value, "ndim", value if isinstance(value, bool) else None)
            if argument not in kept and form not in found:
                found.add(form)
                yield argument, drawn(seed)


def pulled_back(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that gives a result and a pullback, called with a gradient."""

    def call(dout: Any = None, **arguments: Any) -> Any:
        out, vjp = function(**arguments)
        gradient = vjp(out if dout is None else dout)
        return out, gradient

    return call


# Packed sequences and padded batches

row(
    "prepare_lens; prepare_position_ids; prepare_sequence_ids; prepare_token_indices",
    cu_seqlens=starts_of(20),
)
row("cu_seqlens_to_pairs", cu_seqlens=starts_of(20))
row("prepare_chunk_indices; prepare_chunk_offsets", cu_seqlens=starts_of(20), chunk_size=one(1, 2, 3, 64))
row("pairs_to_cu_seqlens", pairs=made(lambda rng: starts(rng, 20).repeat(2)[1:-1]))
row("prepare_lens_from_mask", mask=mask_of("a, b"))
row("prepare_cu_seqlens_from_mask", mask=mask_of("a, b"), out_dtype=one(np.int32, np.int64))
row(
    "cdiv",
    a=one(
        np.int64(7), np.int32(-7), made(lambda rng: rng.integers(-99, 99, (3, 4))), integers(0, 8, 3, 5, dtype="u1")
    ),
    b=one(np.int64(3), made(lambda rng: rng.integers(1, 9, 4)), np.int16(5)),
)  # fmt: skip
row(
    "identity_dtype_convert",
    dtype=one(*FLOATS),
    x=reals("3"),
    g=reals("3"),
    call=lambda dtype, x, g: attnmask.identity_dtype_convert(dtype).vjp(x)[1](g),
)


def pack_arguments(rng: Rng) -> Arguments:
    rows, tokens = int(rng.integers(0, 4)), int(rng.integers(0, 9))
    lengths = one(made(lambda rng: rng.integers(0, tokens + 1, rows)), mask_of("B, T"))
    return draw(rng, {"x": reals("B, T", "B, T, 2", "B, T, 2, 3"), "lengths": lengths}, B=rows, T=tokens)


def unpack_arguments(rng: Rng) -> Arguments:
    total = int(rng.integers(0, 9))
    packed = floats(rng, total, 2).astype(pick(rng, [np.float32, np.int8]))
    return {"packed": packed, "cu_seqlens": starts(rng, total), "max_len": 9, "fill": pick(rng, [0, -1])}


function("pack", pack_arguments)
function("unpack", unpack_arguments)

# Cumulative sums


def cumsum_arguments(rng: Rng, name: str) -> Arguments:
    local, batch, steps, heads, depth = (
        "local" in name,
        1 if coin(rng) else 2,
        *rng.integers(1, 20, 3).tolist(),
    )
    head_first = coin(rng, 0.3)
    shape = (batch, heads, steps) if head_first else (batch, steps, heads)
    if name.endswith("vector") or (not name.endswith("scalar") and coin(rng)):
        shape = (*shape, depth)
    arguments = {
        "g" if local else "s": floats(rng, *shape, dtype=pick(rng, FLOATS)),
        "head_first": head_first,
    }
    if local:
        arguments["chunk_size"] = pick(rng, [1, 2, 4, 64])
    if batch == 1 and coin(rng):
        arguments["cu_seqlens"] = starts(rng, steps)
    arguments |= draw(rng, {"reverse": True, "softmax_scale": 0.5, "output_dtype": np.float64}, chance=0.25)
    if coin(rng, 0.4):
        arguments["out"] = np.zeros(shape, arguments.get("output_dtype", np.float32))
        arguments["output_dtype"] = arguments["out"].dtype.type
    return arguments | ({"dout": floats(rng, *shape)} if "vjp" in name else {})


for _name in (
    f"chunk_{kind}_cumsum{form}" for kind in ("local", "global") for form in ("", "_scalar", "_vector")
):
    function(_name, lambda rng, name=_name: cumsum_arguments(rng, name), same_bits=False)
for _name in ("chunk_local_cumsum_vjp", "chunk_global_cumsum_vjp"):
    target(
        _name,
        lambda rng, name=_name: cumsum_arguments(rng, name),
        pulled_back(getattr(attnmask, _name)),
        pullback=True,
        same_bits=False,
    )

# Linear attention and short convolutions


def with_dout(rng: Rng, row: Row) -> Arguments:
    arguments = of_row(rng, row)
    arguments.pop(row.all)
    return arguments | {"dout": floats(rng, *arguments["value" if "value" in arguments else "x"].shape)}


for _row in (LINEAR_ATTENTION, SHORT_CONVOLUTION):
    function(_row.name, lambda rng, row=_row: of_row(rng, row))
    _vjp = pulled_back(getattr(attnmask, f"{_row.name}_vjp"))
    target(f"{_row.name}_vjp", lambda rng, row=_row: with_dout(rng, row), _vjp, pullback=True)
for _row in (LINEAR_ATTENTION_STEP, SHORT_CONVOLUTION_STEP):
    function(_row.name, lambda rng, row=_row: of_row(rng, row), written=frozenset({"out", "state"}))

# Masks

row("mask_to_segment_ids", mask=mask_of("a, b", "a, b, c", "a, b, c, d"), per_head=FLAG, strict=False)
row(
    "segment_ids_to_cu_seqlens",
    segment_ids=ids_of("a, b"),
    out_dtype=np.int32,
    max_segments=one(None, 128, 4),
)
row("positions_from_segment_ids", segment_ids=ids_of("a, b"), pad_value=one(-1, 0))
row("attention_mask_to_padding_segment_ids", attention_mask=mask_of("a, b", "a, b, c", "a, b, c, d"))
row(
    "attention_mask_to_qkv_cu_seqlens",
    attention_mask=mask_of("a, b, c, d"),
    reduce_heads=one("any", "all", "first"),
    out_dtype=np.int64,
)
row("qkv_masks_to_cu_seqlens", q_mask=mask_of("2, 5"), kv_mask=mask_of("2, 7"), out_dtype=np.int32)
row(
    "segment_ids_to_mask",
    segment_ids=one(
        ids_of("2, 5"), ids_of("2, 3, 5"), made(lambda rng: (ids(rng, 2, 5), ids(rng, 2, 5)))
    ),
    return_separate_masks=one(False, False, True),
    dtype=maybe(np.float32),
)  # fmt: skip
row("segment_ids_to_mask, out", segment_ids=ids_of("2, 5"), dtype=np.float32, out=zeros("2, 1, 5, 5", "f4"))
row(
    "segment_ids_to_qkv_masks",
    q_segment_ids=ids_of("2, 5"),
    kv_segment_ids=ids_of("2, 7"),
    dtype=np.int32,
    out=zeros("2, 1, 5, 7", "i4"),
)


def pairs(rng: Rng) -> np.ndarray:
    return np.sort(rng.integers(0, 10, 2 * int(rng.integers(1, 4)))).astype(pick(rng, [np.int32, np.int64]))


row(
    "cu_seqlens_to_mask",
    one(
        {"cu_seqlens": made(pairs), "max_len": 9},
        {"cu_seqlens": integers(0, 4, 5, 8), "max_len": 8, "out": zeros("2, 8")},
    ),
    dtype=np.bool_,
)
row(
    "qkv_cu_seqlens_to_qkv_masks; qkv_cu_seqlens_to_attention_mask",
    cu_seqlens_q=integers(0, 4, 5, 8),
    max_q_len=8,
    cu_seqlens_kv=integers(0, 2, 4, 9, dtype=np.int32),
    max_kv_len=9,
    dtype=one(np.bool_, np.float32),
)
row(
    "qkv_cu_seqlens_to_attention_mask, out",
    cu_seqlens_q=integers(0, 4, 5, 8),
    max_q_len=8,
    out=zeros("2, 1, 8, 8"),
)

# Attention: options that a call gives now and then

TK, SIZES = 7, {"H": 4, "Hkv": 2, "D": 8, "Dv": 5}
OPTIONS = {
    "attention_mask": one(
        mask_of("Tq, Tk", "B, H, Tq, Tk"),
        Draw(lambda rng, sizes: any_mask(rng, *(sizes[axis] for axis in ("B", "Tq", "Tk")))),
    ),
    "bias": reals("Tq, Tk", "1, H, 1, Tk", dtype=FLOATS),
    "softmax_scale": 0.5,
    "causal": True,
    "causal_offset": one(1, -2, "bottom-right", integers(2, -1, dtype=np.int32)),
    "sliding_window": one(2, (1, 0), (None, 3), 0),
    "fwd_params": attnmask.FwdParams(16, 32),
    "bwd_params": attnmask.BwdParams(16, 32),
    "logits_soft_cap": 5.0,
    "softmax_aux": reals("H, 1"),
    "normalize_output": FLAG,
    "precision": "highest",
    "logits_dtype": np.float32,
    "alibi_slopes": made(lambda rng: np.linspace(0, 1, SIZES["H"])),
    "relative_bias": reals("H, 5"),
    "grid_bias": reals("H, 15, 21"),  # of 8 × 11 tokens
}
IDS = {"q_segment_ids": ids_of("B, Tq"), "kv_segment_ids": ids_of("B, Tk")}
DROPOUT = {"dropout_prob": 0.25, "dropout_seed": 3}
STARTS = {
    "cum_seqlens_q": Draw(lambda rng, sizes: np.array([0, 2, sizes["Tq"]], np.int32)),
    "cum_seqlens_k": integers(0, 3, TK),
}
TOKENS = {name: reals(f"B, {axes}") for name, axes in
          {"query": "Tq, H, D", "key": "Tk, Hkv, D", "value": "Tk, Hkv, Dv"}.items()}  # fmt: skip
BY_DISTANCE = {"relative_low": -2}
assert {*OPTIONS, *IDS, *DROPOUT, *STARTS, *BY_DISTANCE} == {*DEFAULTS}, "a new argument needs a right value"


def in_type(dtype: Any, arguments: Arguments) -> Arguments:
    return {name: x.astype(dtype) for name, x in arguments.items()}


def attention_arguments(rng: Rng) -> Arguments:
    """Query, key and value, and some of the rest."""
    packed = coin(rng, 0.25)
    sizes = SIZES | {"B": 1 if packed else 2, "Tq": 70 if coin(rng, 0.1) else 6, "Tk": TK}
    arguments = in_type(pick(rng, FLOATS), draw(rng, TOKENS, **sizes))
    if packed or coin(rng, 0.25):
        arguments |= draw(rng, STARTS if packed else IDS, **sizes)
    arguments |= draw(rng, OPTIONS, chance=0.15, **sizes)
    if arguments.get("normalize_output", True) and coin(rng, 0.2):
        arguments |= DROPOUT
    if "grid_bias" in arguments:
        arguments.pop("causal_offset", None)  # by which a query may lie before the grid
    return arguments | (BY_DISTANCE if "relative_bias" in arguments else {})


def result_of(rng: Rng, arguments: Arguments, name: str = "out") -> Arguments:
    query = arguments["query"]
    return {name: floats(rng, *query.shape[:-1], SIZES["Dv"], dtype=query.dtype)}


def forward_arguments(rng: Rng) -> Arguments:
    arguments = attention_arguments(rng)
    return arguments | (result_of(rng, arguments) if coin(rng, 0.3) else {})


def wanted(rng: Rng, arguments: Arguments) -> Arguments:
    names = {"bias", "softmax_aux", "relative_bias", "grid_bias"} & arguments.keys()
    return {f"grad_{name}": True for name in sorted(names) if coin(rng)}


def backward_arguments(rng: Rng) -> Arguments:
    arguments = attention_arguments(rng)
    arguments.pop("softmax_aux", None)
    query = arguments["query"]
    batch, tokens, heads, _ = query.shape
    lse = {"lse": floats(rng, batch, heads, tokens, dtype=wide_of(query.dtype))}
    lse |= {"dlse": lse["lse"].copy()} if coin(rng, 0.3) else {}
    rows = result_of(rng, arguments, "dout") | result_of(rng, arguments) | lse
    return arguments | rows | wanted(rng, arguments)


def vjp_arguments(rng: Rng) -> Arguments:
    arguments = attention_arguments(rng)
    return arguments | wanted(rng, arguments) | result_of(rng, arguments, "dout")


def tangent_arguments(rng: Rng) -> Arguments:
    arguments = attention_arguments(rng)
    if "normalize_output" in arguments:
        arguments["normalize_output"] = True
    names = [name for name in ("query", "key", "value", "bias", "softmax_aux") if name in arguments]
    tangents = {f"{name}_tangent": arguments[name].copy() for name in names if coin(rng, 0.7)}
    return arguments | tangents | {"return_lse": coin(rng)}


def second_arguments(rng: Rng) -> Arguments:
    arguments = {name: x for name, x in backward_arguments(rng).items() if not name.startswith("grad_")}
    if "normalize_output" in arguments:
        arguments["normalize_output"] = True
    names = [name for name in ("query", "key", "value") if coin(rng, 0.7)]
    return arguments | {f"{name}_cotangent": arguments[name].copy() for name in names}


def weights_arguments(rng: Rng) -> Arguments:
    arguments = attention_arguments(rng)
    hidden = {"value", "fwd_params", "bwd_params", "normalize_output", "precision", "logits_dtype", *DROPOUT}
    arguments = {name: x for name, x in arguments.items() if name not in hidden}
    queries = (-2, slice(1, 4), np.array([3, 0]), None)[int(rng.integers(4))]
    return arguments | ({} if queries is None else {"queries": queries})


def statistics_arguments(rng: Rng) -> Arguments:
    of = pick(rng, ["key_sum", "entropy", ("max_logit", ("top_keys", 3)), ("top_keys", 9)])
    arguments = weights_arguments(rng) | {"of": of} | ({"heads": "key"} if coin(rng, 0.3) else {})
    batch, tokens, heads, _ = arguments["query"].shape
    lse = floats(rng, batch, heads, tokens, dtype=wide_of(arguments["query"].dtype))
    return arguments | ({"lse": lse} if coin(rng, 0.3) else {})


function("flash_attention", lambda rng: forward_arguments(rng) | {"return_lse": coin(rng)})
function("flash_attention_fwd", forward_arguments)
function("flash_attention_bwd", backward_arguments, written=frozenset())
function("flash_attention_jvp", tangent_arguments, written=frozenset())
function("attention_weights", weights_arguments, written=frozenset())
function("attention_statistics", statistics_arguments, written=frozenset())
function("flash_attention_bwd_vjp", second_arguments, written=frozenset())
target("flash_attention_vjp", vjp_arguments, pulled_back(attnmask.flash_attention_vjp))
row(
    "dropout_keep_mask",
    seed=one(None, 3),
    prob=0.3,
    shape=(1, 2, 5, 7),
    out=maybe(zeros("1, 2, 5, 7")),
)


def states(rng: Rng) -> Arguments:
    dtype = pick(rng, FLOATS)
    arrays = floats(rng, 3, 2, 5, 4, 8, dtype=dtype), floats(rng, 3, 2, 4, 5, dtype=wide_of(dtype))
    return dict(zip(("outs", "lses"), map(list, arrays) if coin(rng) else arrays, strict=True))


def states_vjp(rng: Rng) -> Arguments:
    arguments = states(rng)
    dlse = floats(rng, 2, 4, 5, dtype=arguments["lses"][0].dtype)
    dout = floats(rng, 2, 5, 4, 8, dtype=arguments["outs"][0].dtype)
    return arguments | {"dout": dout} | ({"dlse": dlse} if coin(rng) else {})


def merge_vjp(outs: Any, lses: Any, dout: Any, dlse: Any = None) -> Any:
    merged, vjp = attnmask.merge_attention_states_vjp(outs, lses)
    return merged, vjp(dout, dlse)


def t5_vjp(d_relative_bias: Any = None, **arguments: Any) -> Any:
    (table, low), vjp = attnmask.t5_relative_bias_vjp(**arguments)
    return (table, low), vjp(table if d_relative_bias is None else d_relative_bias)


function("merge_attention_states", states)
target("merge_attention_states_vjp", states_vjp, merge_vjp)
row("FwdParams; BwdParams", q_blocksize=16, kv_blocksize=64)
T5 = {
    "table": reals("8, 4", dtype=FLOATS),
    "q_len": 5,
    "kv_len": 7,
    "bidirectional": FLAG,
    "max_distance": 32,
}
row("t5_relative_bias", T5)
row("t5_relative_bias_vjp", T5, d_relative_bias=None, call=t5_vjp)

# Caches

LOW = [
    None,
    None,
    *map(np.dtype, (np.int8, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)),
]  # types that have scales
CACHE_OPTIONS = {
    name: OPTIONS[name]
    for name in ("logits_soft_cap", "softmax_aux", "alibi_slopes", "relative_bias", "grid_bias")
} | {
    "softmax_scale": 0.3,
    "causal": False,
    "sliding_window": (3, 0),
    "attention_mask": mask_of("1, 1, 1, 12"),
    "bias": reals("1, H, 1, 12"),
    "attention_chunk": one(1, 5, 64),
    "return_lse": True,
    "prefix": 0,
}
PAGES = {
    "cache_seqlens": integers(4, 8, dtype=np.int32),
    "block_table": integers([5, 1, -1], [0, 4, 2], dtype=np.int32),
}


def caches_of(
    rng: Rng, shape: tuple[int, ...], depths: tuple[int, int], low: Any, dtype: Any, by_channel: bool
) -> Arguments:
    """Both caches, and if their type has scales, these: of tokens, or at times of channels."""
    found: Arguments = {}
    for name, depth in zip("kv", depths, strict=True):
        found[f"{name}_cache"] = (3 * floats(rng, *shape, depth)).astype(low or dtype)
        if low is not None:
            scale = (1, 1, shape[-1], depth) if by_channel and coin(rng, 0.3) else (*shape, 1)
            found[f"{name}_scale"] = rng.random(scale, np.float32) + np.float32(0.5)
    return found


def halves_of(rng: Rng, depths: tuple[int, int], dtype: Any = np.float32) -> Arguments:
    found: Arguments = {}
    for name, depth in zip("kv", depths, strict=True):
        found[f"{name}_cache"] = rng.integers(0, 256, (6, 4, 2, depth // 2), np.uint8)
        found[f"{name}_scale"] = rng.random((6, 4, 2, depth // 32, 2)).astype(dtype)
    return found


def cache_arguments(rng: Rng) -> Arguments:
    low = pick(rng, LOW)
    dtype = pick(rng, FLOATS if low is None else [np.float16, np.float32, ml_dtypes.bfloat16])
    packed, paged = coin(rng), coin(rng)
    rows = "6" if packed else "2, 3"
    tokens = {"query": f"{rows}, H, D", "key": f"{rows}, Hkv, D", "value": f"{rows}, Hkv, Dv"}
    arguments = in_type(dtype, draw(rng, {name: reals(layout) for name, layout in tokens.items()}, **SIZES))
    if coin(rng):
        del arguments["key"], arguments["value"]
    shape = (6, 4, 2) if paged else (2, 12, 2)
    arguments |= caches_of(rng, shape, (SIZES["D"], SIZES["Dv"]), low, dtype, by_channel=True)
    arguments |= draw(rng, PAGES if paged else {"cache_seqlens": PAGES["cache_seqlens"]})
    if packed:
        arguments["cu_seqlens_q"] = np.array([0, 2, 6], np.int32)
        if "key" in arguments and coin(rng):
            arguments["cu_seqlens_k_new"] = np.array([0, 3, 6], np.int32)
    arguments |= draw(rng, CACHE_OPTIONS, {"out": zeros(f"{rows}, H, Dv", dtype)}, chance=0.15, **SIZES)
    return arguments | (BY_DISTANCE if "relative_bias" in arguments else {})


def halves_arguments(rng: Rng) -> Arguments:
    arguments = {"query": floats(rng, 2, 3, 4, 64, dtype=pick(rng, [np.float32, ml_dtypes.bfloat16]))}
    arguments |= halves_of(rng, (64, 64), pick(rng, [np.float32, np.float16])) | draw(rng, PAGES)
    if coin(rng):
        arguments |= {name: floats(rng, 2, 3, 2, 64) for name in ("key", "value")}
    return arguments | draw(rng, {"rotate": True, "return_lse": True}, chance=0.3)


def slots_arguments(rng: Rng, four_bits: bool = False, by_channel: bool = True) -> Arguments:
    low, dtype = pick(rng, [None, *LOW, None, None]), pick(rng, FLOATS)  # so that each type is drawn soon
    depths = (64, 32) if four_bits else (8, 4)
    if four_bits:
        arguments = halves_of(rng, depths)
    else:
        arguments = caches_of(rng, (6, 4, 2), depths, low, dtype, by_channel and low == np.int8)
    arguments |= {
        name: floats(rng, 5, 2, depth) for name, depth in zip(("key", "value"), depths, strict=True)
    }
    arguments["slot_mapping"] = rng.permutation(np.arange(-1, 24))[:5].astype(pick(rng, [np.int32, np.int64]))
    return arguments | draw(rng, {"rotate": maybe(True)})


function("flash_attention_with_kvcache", cache_arguments, written=CACHES | {"out"})
function("flash_attention_with_kvcache of four bits", halves_arguments, written=CACHES)


def prefix_arguments(rng: Rng) -> Arguments:
    arguments = {
        name: floats(rng, 2, 2, heads, 8) for name, heads in (("query", 4), ("key", 2), ("value", 2))
    }
    arguments |= {name: floats(rng, 6, 4, 2, 8) for name in ("k_cache", "v_cache")}
    table = np.array([[5, 1, -1], [5, 4, 2]], np.int32)
    arguments |= {"block_table": table, "cache_seqlens": np.array([4, 9], np.int32), "prefix": 4}
    return arguments | draw(rng, {"return_lse": True, "softmax_scale": 0.3}, chance=0.3)


def cache_statistics_arguments(rng: Rng) -> Arguments:
    hidden = ("v_cache", "v_scale", "key", "value", "cu_seqlens_k_new", "out", "return_lse", "prefix")
    arguments = {name: x for name, x in cache_arguments(rng).items() if name not in hidden}
    arguments["of"] = pick(rng, ["key_sum", ("entropy", ("top_keys", 3))])
    *batch, tokens, heads, _ = arguments["query"].shape
    lse = floats(rng, *batch, heads, tokens, dtype=wide_of(arguments["query"].dtype))
    return arguments | draw(rng, {"heads": "key", "lse": lse, "rotate": True}, chance=0.3)


function("flash_attention_with_kvcache of a prefix", prefix_arguments, written=CACHES)
function("attention_statistics_with_kvcache", cache_statistics_arguments, written=frozenset())
function("write_kvcache", slots_arguments, written=CACHES)
function("write_kvcache of four bits", lambda rng: slots_arguments(rng, True), written=CACHES)
row(
    "quantize_kv",
    x=reals("2, 5, 3, 4", dtype=FLOATS),
    dtype=one(np.int8, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
    axis=one(-1, (0, 1), 2),
)
row("quantize_kv of four bits", x=reals("2, 5, 64", dtype=FLOATS), dtype="int4", group=one(32, 64))

# Sequences that processes share


def shard_arguments(rng: Rng) -> Arguments:
    tokens = int(rng.integers(0, 20))
    layouts = [("2, T", None), ("T", None), ("2, T, 3", 1), ("T, 2, 3", 0), ("2, T", -1)]
    layout, axis = pick(rng, layouts)
    given = {"x": reals(layout), "axis": axis, "world": 3, "rank": one(0, 1, 2)}
    more = {"layout": maybe("contiguous", 0.5), "cu_seqlens": maybe(starts_of(tokens), 0.5)}
    return draw(rng, given, more, T=tokens)


def unshard_arguments(rng: Rng) -> Arguments:
    tokens = int(rng.integers(0, 20))
    shape = {"axis": 1} if coin(rng) else {"cu_seqlens": starts(rng, tokens)} if coin(rng) else {}
    given = {"layout": pick(rng, ["zigzag", "contiguous"])} | shape
    x = floats(rng, 2, tokens)
    return {"shards": [attnmask.shard_sequence(x, 3, rank, **given) for rank in range(3)]} | given


function("shard_sequence", shard_arguments)
function("unshard_sequence", unshard_arguments)
row(
    "plan_shards",
    mask=made(lambda rng: any_mask(rng, 1, 12, 12)),
    world=one(1, 2, 3, 4),
    call=lambda mask, world: attnmask.plan_shards(mask, world).tokens(0),
)
row(
    "ShardPlan",
    starts=integers(0, 3, 3, 9),
    owners=integers(0, 1, 0),
    world=2,
    call=lambda starts, owners, world: attnmask.ShardPlan(starts, owners, world).lengths,
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


row("get_num_threads; get_debug_mode")
row("set_num_threads", n=2, call=with_threads)
row("set_debug_mode", enabled=True, call=with_debug_mode)
row("show_config", mode="dict", call=lambda mode: sorted(attnmask.show_config(mode) or ()))
