"""The C library gives the bits of the package: attention, gradients, masks, caches, linear attention and sums.

It is called by ctypes here, and by programs of C and C++ in test_programs.py.
"""

from dataclasses import replace

import c_library as c
import numpy as np
import pytest
from flash_cases import BF16, F16, F32, F64
from kvcache_cases import CASES, arguments_of, every_format
from random_masks import every_mask, expression

import attnmask
from attnmask import MaskInfo
from attnmask._attention.problem import distances

pytestmark = [c.needs_make, pytest.mark.usefixtures("level_of_the_library")]

TYPES = (F32, F64, BF16, F16)


def numbers(rng, *shape, dtype=F32):
    return rng.standard_normal(shape).astype(dtype)


def inputs(rng, batch, queries, keys, heads=4, kv_heads=2, dim=16, value_dim=16, dtype=F32):
    return (
        numbers(rng, batch, queries, heads, dim, dtype=dtype),
        numbers(rng, batch, keys, kv_heads, dim, dtype=dtype),
        numbers(rng, batch, keys, kv_heads, value_dim, dtype=dtype),
    )


def wide(dtype):
    return F64 if dtype == F64 else F32


def attend(query, key, value, **fields):
    """The result, its logsumexp and its wide form."""
    shape = (*query.shape[:-1], value.shape[-1])
    out, lse, out_wide = (
        np.full(shape, 7, query.dtype),
        np.full((query.shape[0], query.shape[2], query.shape[1]), 7, wide(query.dtype)),
        np.full(shape, 7, wide(query.dtype)),
    )
    call = c.struct(
        "attention", query=query, key=key, value=value, out=out, lse=lse, wide_out=out_wide, **fields
    )
    c.call("forward", call)
    return call, out, lse, out_wide


def gradients_of(call, d_out, d_lse=None):
    results = [np.full_like(x, 7) for x in (call.arrays[name] for name in ("query", "key", "value"))]
    names = ("d_query", "d_key", "d_value")
    given = c.struct(
        "gradients", call=call, d_out=d_out, d_lse=d_lse, **dict(zip(names, results, strict=True))
    )
    c.call("backward", given)
    return results


def program_of(mask):
    return mask._state.described("compare")[1]


def same(got, wanted):
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    assert got.tobytes() == np.ascontiguousarray(wanted).tobytes()


# Masks


def check_mask(mask, shape, seed):
    rng = np.random.default_rng(seed)
    q, k, v = inputs(rng, shape[0], shape[2], shape[3], shape[1])
    given = c.mask(program_of(mask))
    pairs = np.full(shape, 7, np.uint8)
    c.call("fill_mask", given, c.array(pairs))
    same(pairs.astype(bool), np.broadcast_to(np.asarray(mask.attention_mask, bool), shape))
    call, out, lse, _ = attend(q, k, v, mask=given)
    wanted, vjp = attnmask.flash_attention_vjp(q, k, v, attention_mask=mask)
    same(out, wanted)
    same(lse, attnmask.flash_attention(q, k, v, attention_mask=mask, return_lse=True)[1])
    d_out = numbers(rng, *out.shape)
    for got, right in zip(gradients_of(call, d_out), vjp(d_out)[:3], strict=True):
        same(got, right)


MASKS = list(every_mask(1, 1))


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("tokens", [(70, 130), (1, 65)], ids=str)
def test_every_mask(kind, tokens):
    mask = every_mask(*tokens)[kind]
    check_mask(mask, np.broadcast_shapes(mask.attention_mask.shape, (1, 4, 1, 1)), 0)


@pytest.mark.parametrize("seed", range(40))
def test_random_masks(seed):
    rng = np.random.default_rng(seed)
    shape = (int(rng.integers(1, 4)), 4, *(int(rng.choice([1, 17, 64, 100, 200])) for _ in range(2)))
    check_mask(expression(rng, shape), shape, seed)


def test_nodes_without_an_operator_are_joined():
    mask = c.mask([("band", None, 0, 0), ("keys", 0, 3)])
    pairs = np.zeros((1, 1, 5, 5), bool)
    c.call("fill_mask", mask, c.array(pairs))
    same(pairs[0, 0], np.tri(5, dtype=bool) & (np.arange(5) < 3))


# Attention

SLOPES = np.array([0.5, 0.25, 0.1, 0.0])
TERMS = {
    "bias": (
        {"kind": "BIAS", "array": np.linspace(-2, 2, 2 * 40 * 50, dtype=np.float32).reshape(2, 1, 40, 50)},
        lambda term: {"bias": term["array"]},
    ),
    "alibi": (
        {"kind": "ALIBI", "array": SLOPES.reshape(1, 4, 1, 1)},
        lambda term: {"alibi_slopes": SLOPES},
    ),
    "relative bias": (
        {"kind": "RELATIVE_BIAS", "integer": -9, "array": np.cos(np.arange(4.0 * 20)).reshape(1, 4, 1, 20)},
        lambda term: {"relative_bias": term["array"].reshape(4, 20), "relative_low": -9},
    ),
    "grid bias": (
        {"kind": "GRID_BIAS", "integer": 21, "array": np.sin(np.arange(4.0 * 9 * 21)).reshape(1, 4, 1, 189)},
        lambda term: {"grid_bias": term["array"].reshape(4, 9, 21)},
    ),
    "soft cap": ({"kind": "SOFT_CAP", "number": 1.5}, lambda term: {"logits_soft_cap": 1.5}),
    "dropout": (
        {"kind": "DROPOUT", "number": 0.3, "integer": 5},
        lambda term: {"dropout_prob": 0.3, "dropout_seed": 5},
    ),
    "sinks": (
        {"kind": "SINKS", "array": np.array([0.5, -1, 2, 0]).reshape(1, 4, 1, 1)},
        lambda term: {"softmax_aux": term["array"].reshape(4, 1)},
    ),
}


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", [*TERMS, "all but dropout"])
def test_terms_and_their_gradients(name, dtype):
    rng = np.random.default_rng(1)
    q, k, v = inputs(rng, 2, 40, 50, dtype=dtype)
    names = [name] if name in TERMS else [one for one in TERMS if one != "dropout"]
    given, arguments = [], {"causal": True, "causal_offset": 10}
    for one in names:
        term, to_arguments = TERMS[one]
        given.append(dict(term))
        arguments |= to_arguments(term)
        if one == "bias":
            given[-1]["gradient"] = np.full_like(term["array"], 7)
        elif one in ("relative bias", "grid bias", "sinks"):
            given[-1]["gradient"] = np.full((4, term["array"].shape[-1]), 7.0)
    call, out, lse, out_wide = attend(q, k, v, mask=c.mask(high=0, offset=10), **c.terms(*given))
    learned = {
        f"grad_{one}": one in arguments for one in ("bias", "relative_bias", "grid_bias", "softmax_aux")
    }
    wanted, vjp = attnmask.flash_attention_vjp(q, k, v, **arguments, **learned)
    same(out, wanted)
    same(out_wide.astype(dtype), wanted)
    same(lse, attnmask.flash_attention(q, k, v, **arguments, return_lse=True)[1])
    d_out = numbers(rng, *out.shape, dtype=dtype)
    right = vjp(d_out)
    for got, of in zip(gradients_of(call, d_out), right[:3], strict=True):
        same(got, of)
    fields = {
        "BIAS": right.bias,
        "RELATIVE_BIAS": right.relative_bias,
        "GRID_BIAS": right.grid_bias,
        "SINKS": right.softmax_aux,
    }
    for term in given:
        if "gradient" in term:
            wanted = fields[term["kind"]]
            same(term["gradient"].reshape(wanted.shape).astype(wanted.dtype), wanted)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_packed_sequences(dtype):
    rng = np.random.default_rng(2)
    q, k, v = inputs(rng, 1, 100, 160, value_dim=24, dtype=dtype)
    starts = [np.array([0, 0, 33, 97, 100], np.int32), np.array([0, 5, 60, 160, 160], np.int32)]
    mask = c.mask(
        low=-20, high=0, offset=np.array([1, 2, 3, 4]), cum_seqlens_q=starts[0], cum_seqlens_k=starts[1]
    )
    table = np.sin(np.arange(4.0 * 19 * 31))
    grid = {"kind": "GRID_BIAS", "integer": 31, "array": table.reshape(1, 4, 1, -1)}
    call, out, _, _ = attend(q, k, v, mask=mask, scale=0.2, **c.terms(TERMS["alibi"][0], grid))
    wanted, vjp = attnmask.flash_attention_vjp(
        q, k, v, cum_seqlens_q=starts[0], cum_seqlens_k=starts[1], causal=True, sliding_window=(20, 0),
        causal_offset=[1, 2, 3, 4], softmax_scale=0.2, alibi_slopes=SLOPES, grid_bias=table.reshape(4, 19, 31),
    )  # fmt: skip
    same(out, wanted)
    d_out = numbers(rng, *out.shape, dtype=dtype)
    for got, right in zip(gradients_of(call, d_out), vjp(d_out)[:3], strict=True):
        same(got, right)


def test_strides_and_what_is_not_normalized():
    rng = np.random.default_rng(3)
    q, k, v = (np.swapaxes(numbers(rng, 2, 4, 70, 16), 1, 2) for _ in range(3))
    out = np.swapaxes(np.full((2, 4, 70, 16), 7, F32), 1, 2)[:, ::-1]
    call = c.struct("attention", query=q, key=k[:, ::-1], value=v, out=out, unnormalized=1)
    c.call("forward", call)
    same(out, attnmask.flash_attention(q, k[:, ::-1], v, normalize_output=False))


def test_gradients_of_the_logsumexp():
    rng = np.random.default_rng(4)
    q, k, v = inputs(rng, 2, 40, 50)
    call, out, lse, _ = attend(q, k, v)
    d_out, d_lse = numbers(rng, *out.shape), numbers(rng, *lse.shape)
    wanted = attnmask.flash_attention_bwd(d_out, q, k, v, out, lse, dlse=d_lse)
    for got, right in zip(gradients_of(call, d_out, d_lse), wanted[:3], strict=True):
        same(got, right)


@pytest.mark.parametrize("shape", [(0, 3, 3), (2, 0, 3), (2, 3, 0)], ids=str)
def test_empty(shape):
    rng = np.random.default_rng(5)
    q, k, v = inputs(rng, *shape)
    call, out, lse, _ = attend(q, k, v)
    same(out, np.zeros_like(out))
    same(lse, np.full_like(lse, -np.inf))
    for got in gradients_of(call, out):
        same(got, np.zeros_like(got))


# Caches


def cached_call(case, arguments):
    """A call of the library over the caches of `arguments`, its results, and what keeps its memory alive."""
    low, high = distances({"causal": case.causal, "sliding_window": case.window and _pair(case.window)})
    mask, program = arguments["attention_mask"], ()
    if isinstance(mask, MaskInfo):
        program = program_of(mask)
    elif mask is not None:
        program = [("dense", mask.reshape((1,) * (4 - mask.ndim) + mask.shape), 0, 0)]
    given = []
    if case.soft_cap:
        given.append({"kind": "SOFT_CAP", "number": case.soft_cap})
    if (bias := arguments.get("bias")) is not None:
        given.append({"kind": "BIAS", "array": bias.reshape((1,) * (4 - bias.ndim) + bias.shape)})
    if (slopes := arguments["alibi_slopes"]) is not None:
        given.append({"kind": "ALIBI", "array": slopes.astype(F64).reshape(-1, case.heads[0], 1, 1)})
    if (table := arguments.get("relative_bias")) is not None:
        given.append({
            "kind": "RELATIVE_BIAS", "array": table.astype(F64)[None, :, None], "integer": arguments["relative_low"],
        })  # fmt: skip
    if (table := arguments.get("grid_bias")) is not None:
        flat = table.astype(F64).reshape(1, case.heads[0], 1, -1)
        given.append({"kind": "GRID_BIAS", "array": flat, "integer": table.shape[-1]})
    if (sinks := arguments["softmax_aux"]) is not None:
        given.append({"kind": "SINKS", "array": sinks.astype(F64).reshape(1, -1, 1, sinks.shape[-1])})
    query = arguments["query"]
    shape = (*query.shape[:-1], case.depths[1])
    out = np.full(shape, 7, query.dtype)
    heads_first = (
        (query.shape[1], query.shape[0])
        if query.ndim == 3
        else (query.shape[0], query.shape[2], query.shape[1])
    )
    lse = np.full(heads_first, 7, wide(query.dtype))
    call = c.struct(
        "cached_attention",
        **{name: arguments[name] for name in ("query", "k_cache", "v_cache", "key", "value", "block_table")},
        k_scale=arguments.get("k_scale"),
        v_scale=arguments.get("v_scale"),
        cu_seqlens_k_new=arguments.get("cu_seqlens_k_new"),
        cache_seqlens=np.asarray(arguments["cache_seqlens"], np.int64),
        scale=case.scale or 0,
        mask=c.mask(program, low=low, high=high, cum_seqlens_q=arguments["cu_seqlens_q"]),
        chunk=case.chunk or 0,
        out=out,
        lse=lse,
        **c.terms(*given),
    )
    return call, out, lse


def _pair(window):
    return window if isinstance(window, tuple) else (window, window)


OVER_CACHES = [replace(case, rotate=False) for case in [*CASES[::3], *every_format()]]
# C has aligned arrays alone.
OVER_CACHES = [
    replace(
        case,
        **{
            layout: "contiguous"
            for layout in ("layout", "token_layout")
            if getattr(case, layout) == "misaligned"
        },
    )
    for case in OVER_CACHES
]


@pytest.mark.parametrize("case", OVER_CACHES, ids=lambda case: str(case.seed))
def test_caches(case):
    arguments, own = arguments_of(case), arguments_of(case)
    given = arguments | {"cache_seqlens": np.asarray(arguments["cache_seqlens"])}
    out, lse = attnmask.flash_attention_with_kvcache(**given, return_lse=True)
    call, own_out, own_lse = cached_call(case, own)
    c.call("cached_forward", call)
    same(own_out, out)
    same(own_lse, lse)
    for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
        if arguments.get(name) is not None:
            assert own[name].tobytes() == arguments[name].tobytes(), name


def test_a_prefix_of_all_sequences():
    rng = np.random.default_rng(10)
    query, key = numbers(rng, 3, 2, 4, 16), numbers(rng, 3, 2, 2, 16)
    caches = [numbers(rng, 8, 16, 2, 16) for _ in range(2)]
    table, lengths = np.array([[5, 0, 1], [5, 0, 2], [5, 0, 7]], np.int32), np.array([34, 32, 40])
    own, out = [x.copy() for x in caches], np.full_like(query, 7)
    wanted = attnmask.flash_attention_with_kvcache(
        query, *caches, key, key, cache_seqlens=lengths, block_table=table, causal=True, prefix=32
    )
    call = c.struct(
        "cached_attention", query=query, k_cache=own[0], v_cache=own[1], key=key, value=key, cache_seqlens=lengths,
        block_table=table, mask=c.mask(high=0), prefix=32, out=out,
    )  # fmt: skip
    c.call("cached_forward", call)
    same(out, wanted)
    same(own[0], caches[0])


@pytest.mark.parametrize("kind", ["float32", "int8", "int4"])
def test_writes_to_slots(kind):
    rng = np.random.default_rng(6)
    key, value = numbers(rng, 5, 2, 32), numbers(rng, 5, 2, 32)
    slots = np.array([3, -1, 17, 0, 9])

    def caches():
        if kind == "float32":
            return [np.zeros((3, 8, 2, 32), F32) for _ in range(2)], [None, None]
        channels, scale = (32, (3, 8, 2, 1)) if kind == "int8" else (16, (3, 8, 2, 1, 2))
        dtype = np.int8 if kind == "int8" else np.uint8
        return [np.zeros((3, 8, 2, channels), dtype) for _ in range(2)], [
            np.ones(scale, F32) for _ in range(2)
        ]

    (k, v), (k_scale, v_scale) = caches()
    attnmask.write_kvcache(k, v, key, value, slots, k_scale=k_scale, v_scale=v_scale)
    (own_k, own_v), (own_k_scale, own_v_scale) = caches()
    rows = c.struct(
        "cache_rows", k_cache=own_k, v_cache=own_v, key=key, value=value, slot_mapping=slots, k_scale=own_k_scale,
        v_scale=own_v_scale,
    )  # fmt: skip
    c.call("write_cache", rows)
    for got, wanted in ((own_k, k), (own_v, v), (own_k_scale, k_scale), (own_v_scale, v_scale)):
        assert wanted is None or got.tobytes() == wanted.tobytes()


# Linear attention


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("decay", [None, "[H]", "[B, T, H]", "[B, T, H, K]"])
@pytest.mark.parametrize("beta", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_linear_attention(dtype, decay, beta, packed):
    rng = np.random.default_rng(7)
    batch, tokens, heads, key_heads, key_dim, value_dim = 1 if packed else 2, 90, 4, 2, 16, 24
    q, k = (numbers(rng, batch, tokens, key_heads, key_dim, dtype=dtype) for _ in range(2))
    v = numbers(rng, batch, tokens, heads, value_dim, dtype=dtype)
    shapes = {
        "[H]": (heads,),
        "[B, T, H]": (batch, tokens, heads),
        "[B, T, H, K]": (batch, tokens, heads, key_dim),
    }
    gates = {"decay": None if decay is None else -abs(numbers(rng, *shapes[decay], dtype=dtype)) / 4}
    gates["beta"] = 1 / (1 + np.exp(-numbers(rng, batch, tokens, heads).astype(dtype))) if beta else None
    starts = np.array([0, 30, 30, 90]) if packed else None
    sequences = 3 if packed else batch
    state = numbers(rng, sequences, heads, key_dim, value_dim, dtype=wide(dtype))
    arguments = {
        **gates,
        "initial_state": state,
        "cu_seqlens": starts,
        "normalize_qk": beta,
        "chunk_size": 32,
    }
    (wanted, last), vjp = attnmask.linear_attention_vjp(q, k, v, **arguments, return_state=True)

    out, own_last = np.full_like(v, 7), np.full_like(state, 7)
    fields = {
        "query": q, "key": k, "value": v, **gates, "initial_state": state, "cum_seqlens": starts,
        "normalize_qk": int(beta), "chunk": 32, "out": out, "state": own_last,
    }  # fmt: skip
    shape = (c.ctypes.c_int64 * 2)()
    c.call("linear_kept", c.struct("linear_attention", **fields), shape)
    kept = np.full(tuple(shape), 7, wide(dtype))
    call = c.struct("linear_attention", **fields, kept=kept)
    c.call("linear_forward", call)
    same(out, wanted)
    same(own_last, last)

    d_out, d_state = numbers(rng, *out.shape, dtype=dtype), numbers(rng, *state.shape, dtype=wide(dtype))
    given = {"query": q, "key": k, "value": v, **gates, "initial_state": state}
    results = {name: np.full_like(x, 7) for name, x in given.items() if x is not None}
    right = vjp(d_out, d_state)
    fields = {f"d_{name}": x for name, x in results.items()}
    c.call("linear_backward", c.struct("linear_gradients", call=call, d_out=d_out, d_state=d_state, **fields))
    for name, got in results.items():
        same(got, getattr(right, name))


@pytest.mark.parametrize("slots", [None, np.array([4, -1, 0])], ids=["rows", "slots"])
def test_steps_of_linear_attention(slots):
    rng = np.random.default_rng(8)
    q, k, v = numbers(rng, 3, 2, 16), numbers(rng, 3, 2, 16), numbers(rng, 3, 4, 24)
    decay = -abs(numbers(rng, 3, 4))
    pool = numbers(rng, 3 if slots is None else 5, 4, 16, 24)
    state, own, out = pool.copy(), pool.copy(), np.full_like(v, 7)
    wanted = attnmask.linear_attention_step(q, k, v, state, decay=decay, state_indices=slots)
    call = c.struct(
        "linear_attention", query=q[:, None], key=k[:, None], value=v[:, None], decay=decay[:, None],
        initial_state=own, out=out[:, None],
    )  # fmt: skip
    c.call("linear_step", call, None if slots is None else c.array(slots))
    same(out, wanted)
    same(own, state)


# Tokens


@pytest.mark.parametrize("dtype", [*TYPES, np.dtype(np.int32)], ids=str)
@pytest.mark.parametrize("chunk", [0, 16])
@pytest.mark.parametrize("reverse", [0, 1])
def test_sums(dtype, chunk, reverse):
    rng = np.random.default_rng(9)
    x = (numbers(rng, 1, 100, 3) * 10).astype(dtype)
    starts, out = np.array([0, 33, 100], np.int32), np.full_like(x, 7)
    sums = c.struct("sums", x=x, cum_seqlens=starts, chunk=chunk, reverse=reverse, scale=2.0, out=out)
    c.call("cumsum", sums)
    given = {"reverse": bool(reverse), "softmax_scale": 2.0, "cu_seqlens": starts, "output_dtype": dtype}
    local = attnmask.chunk_local_cumsum(x, 16, **given) if chunk else attnmask.chunk_global_cumsum(x, **given)
    same(out, local)


def test_a_sum_that_does_not_fit():
    x = np.full((1, 3, 1), 100, np.int8)
    with pytest.raises(ValueError, match="OVERFLOW: an integer does not fit"):
        c.call("cumsum", c.struct("sums", x=x, out=x.copy()))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_segments_and_starts(dtype):
    ids = np.array([[0, 0, 2, 2, 2, -1], [1, 5, 5, -1, -1, -1]], np.int16)
    starts = np.full(9, 7, dtype)
    c.call("segment_ids_to_cu_seqlens", c.array(ids), c.array(starts))
    same(starts, attnmask.segment_ids_to_cu_seqlens(ids, max_segments=8).astype(dtype))
    back = np.full(starts[-1], 7, dtype)
    c.call("cu_seqlens_to_segment_ids", c.array(starts), c.array(back))
    same(back, attnmask.prepare_sequence_ids(starts).astype(dtype))
