"""What the C library refuses: a status and a message in the caller's buffer, and nothing is written."""

import ctypes
import re
import subprocess
import sys
from collections.abc import Callable

import c_library as c
import numpy as np
import pytest
from environment import ROOT

pytestmark = c.needs_make

F32 = np.float32
X = np.ones((2, 8, 2, 16), F32)
IDS = np.zeros((2, 8), np.int32)


def attention(**fields):
    return c.struct("attention", **({"query": X, "key": X, "value": X, "out": X.copy()} | fields))


def broken(given, **fields):
    """The array as the library takes it, with other fields."""
    made = c.array(given)
    for name, value in fields.items():
        if isinstance(value, list):
            getattr(made, name)[: len(value)] = value
        else:
            setattr(made, name, value)
    return made


def sized(made, more: int):
    made.size += more
    return made


def node(kind: int, *operands):
    mask = c.mask([("all",)])
    first = c.STRUCTS["attnmask_node"].from_address(mask.nodes)
    first.kind = kind
    for i, given in enumerate(operands):
        first.operand[i] = given
    return mask


def odd_operand(given: int):
    made = c.operand(3)
    made.given = given
    return made


def cached(**fields):
    cache = np.zeros((2, 16, 2, 16), F32)
    given = {"query": X, "k_cache": cache, "v_cache": cache.copy(), "cache_seqlens": 8, "out": X.copy()}
    return c.struct("cached_attention", **(given | fields))


def linear(**fields):
    return c.struct("linear_attention", **({"query": X, "key": X, "value": X, "out": X.copy()} | fields))


SLOPES = np.ones((1, 2, 1, 1))
SLOTS = np.arange(9, 17)
TABLE = np.array([[0, 1], [0, 1]], np.int32)
WIDE = IDS.astype(np.int64)
HALVES = np.array([0, 4, 8])
CACHE = np.zeros((2, 16, 2, 16), F32)
SCALES = np.ones((2, 16, 2, 1), F32)
STATES = np.zeros((2, 2, 16, 16), F32)
SUMS = {"x": X, "out": X.copy()}
FEW = np.zeros((2, 8, 2, 8), F32)
# The function, how its arguments are made, and words of the message.
CASES: dict[str, tuple[str, Callable[[], list], str]] = {
    "a later size": ("forward", lambda: [sized(attention(), 8)], "call must begin with its size"),
    "no size": ("forward", lambda: [sized(attention(), -ctypes.sizeof(attention()))], "begin with its size"),
    "NULL": ("forward", lambda: [None], "call must be given, got NULL"),
    "no query": ("forward", lambda: [attention(query=None)], "query must be given"),
    "no out": ("forward", lambda: [attention(out=None)], "out must be given"),
    "no data": ("forward", lambda: [attention(key=broken(X, data=None))], "key must have data, got NULL"),
    "no such type": ("forward", lambda: [attention(key=broken(X, type=77))], "key must have a type"),
    "a type below 0": ("forward", lambda: [attention(key=broken(X, type=-1))], "key must have a type"),
    "too many axes": ("forward", lambda: [attention(key=broken(X, axes=6))], "key must have from 0 to 5 axes"),
    "axes below 0": ("forward", lambda: [attention(key=broken(X, axes=-1))], "key must have from 0 to 5 axes"),
    "a length below 0": ("forward", lambda: [attention(key=broken(X, shape=[2, -8]))], "lengths of at least 0"),
    "strides that overflow": (
        "forward", lambda: [attention(key=broken(X, stride=[2**62]))], "strides that fit memory",
    ),
    "strides that overflow together": (
        "forward", lambda: [attention(key=broken(X, shape=[2, 8], stride=[2**62, -(2**60)]))], "strides that fit",
    ),
    "the least stride": ("forward", lambda: [attention(key=broken(X, stride=[-(2**63)]))], "strides that fit"),
    "lengths that overflow": ("forward", lambda: [attention(query=broken(X, shape=[2**62]))], "strides that fit"),
    "odd strides": ("forward", lambda: [attention(key=broken(X, stride=[1026]))], "multiples of 4 bytes"),
    "odd data": ("forward", lambda: [attention(key=broken(X, data=X.ctypes.data + 2))], "multiples of 4 bytes"),
    "another type": ("forward", lambda: [attention(key=X.astype(np.float64))], "key must be float32 as query, got"),
    "fewer keys than values": (
        "forward", lambda: [attention(key=X[:, :5])], r"value must be of shape \(2, 5, 2, Dv\) as key, got float32",
    ),
    "another batch size": ("forward", lambda: [attention(key=X[:1])], "key must have batch size 2 and D = 16 as query"),
    "heads that do not divide": (
        "forward", lambda: [attention(query=X[:, :, :1], out=X[:, :, :1].copy())], "heads that divides query's 1, got",
    ),
    "query of three axes": ("forward", lambda: [attention(query=X[0])], r"query must be \[B, Tq, H, D\], got"),
    "query of integers": ("forward", lambda: [attention(query=IDS)], "query must be of float16, .*, got int32"),
    "out of another shape": ("forward", lambda: [attention(out=X[:, :5])], r"out must be of shape \(2, 8, 2, 16\)"),
    "out of another type": ("forward", lambda: [attention(out=X.astype(np.float64))], "out must be float32"),
    "lse of another shape": ("forward", lambda: [attention(lse=X[0])], r"lse must be of shape \(2, 2, 8\)"),
    "a scale that is no number": ("forward", lambda: [attention(scale=float("nan"))], "scale must be from"),
    "a mask of a later size": ("forward", lambda: [attention(mask=sized(c.mask(), 8))], "mask must begin with"),
    "nodes at NULL": (
        "forward", lambda: [attention(mask=c.struct("mask", node_count=1))], "nodes must be given with node_count 1",
    ),
    "fewer than no nodes": (
        "forward", lambda: [attention(mask=c.struct("mask", node_count=-1))], "node_count must be from 0",
    ),
    "no such node": (
        "forward", lambda: [attention(mask=node(99))], r"nodes\[0\] must have a kind of attnmask_kind, got 99",
    ),
    "an operator without operands": (
        "forward", lambda: [attention(mask=c.mask(["and"]))],
        r"nodes\[0\], ATTNMASK_AND: an operator must have 2 masks",
    ),
    "too many operands": (
        "forward", lambda: [attention(mask=node(c.number("KEYS"), *[c.operand(1)] * 3))],
        r"nodes\[0\], ATTNMASK_KEYS: operand\[2\] must",
    ),
    "an operand of no kind": (
        "forward", lambda: [attention(mask=node(c.number("KEYS"), odd_operand(3)))],
        "begin must be given as 0, 1 or 2, got 3",
    ),
    "an operand at NULL": (
        "forward", lambda: [attention(mask=node(c.number("KEYS"), odd_operand(2)))],
        "begin must have an array, got NULL",
    ),
    "too many terms that wait": ("forward", lambda: [attention(mask=c.mask([("all",)] * 17))], "more than 16"),
    "ids of another length": (
        "forward", lambda: [attention(mask=c.mask([("equal", IDS, IDS[:, :5], 0)]))],
        r"nodes\[0\], ATTNMASK_EQUAL: k_ids must be \[B, 8\]",
    ),
    "a shift out of an array": (
        "forward", lambda: [attention(mask=c.mask([("dense", np.ones((1, 1, 9, 9)), 2, 0)]))],
        "q_shift must be from 0 to 1, got 2",
    ),
    "places of no tile": (
        "forward",
        lambda: [attention(mask=c.mask([
            ("tiles", np.full((1, 1, 1, 1), 5, np.int32), 64, 64, np.zeros((1, 64, 8), np.uint8), 0, 0),
        ]))],
        "places must cover the mask",
    ),
    "starts with several rows": (
        "forward", lambda: [attention(mask=c.mask(cum_seqlens_q=np.array([0, 8])))], "one batch row, got 2",
    ),
    "starts that end early": (
        "forward",
        lambda: [attention(
            query=X[:1], key=X[:1], value=X[:1], out=X[:1].copy(), mask=c.mask(cum_seqlens_q=np.array([0, 7])),
        )],
        "cum_seqlens_q must end at 8 tokens, got 7",
    ),
    "starts that are no integers": (
        "forward", lambda: [attention(mask=c.mask(cum_seqlens_q=np.array([0.0, 8])))], "cum_seqlens_q must be integers",
    ),
    "no such term": (
        "forward", lambda: [attention(**_term(kind=99))], r"terms\[0\] must have a kind of attnmask_term_kind, got 99",
    ),
    "terms at NULL": ("forward", lambda: [attention(term_count=1)], "terms must be given with term_count 1"),
    "fewer than no terms": ("forward", lambda: [attention(term_count=-1)], "term_count must be from 0 to 7, got -1"),
    "a term twice": (
        "forward", lambda: [attention(**c.terms(*[{"kind": "SOFT_CAP", "number": 2.0}] * 2))], "must be given once",
    ),
    "a cap of 0": (
        "forward", lambda: [attention(**c.terms({"kind": "SOFT_CAP"}))], "ATTNMASK_SOFT_CAP must be a number above 0",
    ),
    "a bias that does not fit": (
        "forward", lambda: [attention(**c.terms({"kind": "BIAS", "array": np.ones((2, 2, 8, 7), F32)}))],
        r"ATTNMASK_BIAS must be an array \[B, H, Tq, Tk\] .*, got float32 array",
    ),
    "slopes that are not finite": (
        "forward",
        lambda: [attention(**c.terms({"kind": "ALIBI", "array": np.full((1, 2, 1, 1), np.inf)}))],
        "ATTNMASK_ALIBI must be finite, got inf",
    ),
    "a grid of too few points": (
        "forward",
        lambda: [attention(**c.terms({"kind": "GRID_BIAS", "array": np.ones((1, 2, 1, 9)), "integer": 3}))],
        "ATTNMASK_GRID_BIAS must have a point of its grid for each query and key, got 2 . 2 points",
    ),
    "a mask of numbers": ("fill_mask", lambda: [c.mask(), c.array(X)], "out must be .* of bool or uint8"),
    "no pairs to fill": ("fill_mask", lambda: [c.mask(), None], "out must be given, got NULL"),
    "gradients of NULL": ("backward", lambda: [None], "gradients must be given"),
    "gradients of no call": ("backward", lambda: [c.struct("gradients", d_out=X)], "call must be given"),
    "no logsumexp": ("backward", lambda: [gradients(attention())], "lse must be given"),
    "a gradient of another shape": (
        "backward", lambda: [gradients(with_lse(), d_key=X[:, :5])], r"d_key must be of shape \(2, 8, 2, 16\)",
    ),
    "no gradient of keys": ("backward", lambda: [gradients(with_lse(), d_key=None)], "d_key must be given"),
    "a gradient of a cap": (
        "backward",
        lambda: [gradients(with_lse(**c.terms({"kind": "SOFT_CAP", "number": 1.0, "gradient": X})))],
        "gradient of ATTNMASK_SOFT_CAP must not be given",
    ),
    "a gradient of a bias that is strided": (
        "backward",
        lambda: [gradients(with_lse(**c.terms({
            "kind": "BIAS", "array": np.ones((1, 1, 8, 8), F32), "gradient": np.ones((1, 1, 8, 16), F32)[..., ::2],
        })))],
        "gradient of ATTNMASK_BIAS must be in C order",
    ),
    "tokens that are not there": ("cached_forward", lambda: [cached(cache_seqlens=17)], "cache_seqlens must be tokens"),
    "an offset with a cache": ("cached_forward", lambda: [cached(mask=c.mask(offset=1))], "offset must not be given"),
    "limits of each row with a cache": (
        "cached_forward", lambda: [cached(mask=c.mask(high=np.array([0, 0])))],
        "high must be a number with a cache, got int64",
    ),
    "a chunk below 0": ("cached_forward", lambda: [cached(chunk=-1)], "chunk must be at least 0"),
    "a page that is not there": (
        "cached_forward", lambda: [cached(block_table=np.array([[0], [2]], np.int32))], "must be from 0 to 1",
    ),
    "a prefix without pages": ("cached_forward", lambda: [cached(prefix=8)], "prefix must be 0 without block_table"),
    "a prefix below 0": (
        "cached_forward", lambda: [cached(prefix=-16, block_table=TABLE)], "prefix must be whole pages",
    ),
    "a window with a prefix": (
        "cached_forward",
        lambda: [cached(prefix=16, block_table=TABLE, mask=c.mask(low=-3))],
        "low must not be given with prefix",
    ),
    "slopes with a prefix": (
        "cached_forward",
        lambda: [cached(
            prefix=16, block_table=TABLE, cache_seqlens=24, **c.terms({"kind": "ALIBI", "array": SLOPES}),
        )],
        "terms must add nothing to logits with prefix",
    ),
    "new keys without values": ("cached_forward", lambda: [cached(key=X)], "value must be given with key"),
    "caches of integers": (
        "cached_forward", lambda: [cached(k_cache=IDS.reshape(2, 8, 1, 1))], "k_cache must be of",
    ),
    "a slot that is not there": (
        "write_cache",
        lambda: [c.struct("cache_rows", k_cache=FEW, v_cache=FEW.copy(), key=FEW[0], value=FEW[0], slot_mapping=SLOTS)],
        "slot_mapping must be from -1 to 15, got 16",
    ),
    "no slots": (
        "write_cache", lambda: [c.struct("cache_rows", k_cache=FEW, v_cache=FEW.copy(), key=FEW[0], value=FEW[0])],
        "slot_mapping must be given",
    ),
    "a chunk of 100": ("linear_forward", lambda: [linear(chunk=100)], "chunk must be a power of two from 16 to 256"),
    "a decay of another shape": ("linear_forward", lambda: [linear(decay=X[0])], "decay must be"),
    "a state of another type": (
        "linear_forward", lambda: [linear(initial_state=np.ones((2, 2, 16, 16)))], "initial_state must be float32",
    ),
    "nothing kept": (
        "linear_backward", lambda: [c.struct("linear_gradients", call=linear(), d_out=X)], "kept must be given",
    ),
    "several tokens of a step": ("linear_step", lambda: [linear(), None], "query must have one token"),
    "no shape": ("linear_kept", lambda: [linear(), None], "shape must be given, got NULL"),
    "sums over chunks of 3": ("cumsum", lambda: [c.struct("sums", **SUMS, chunk=3)], "chunk must be a power of two"),
    "sums of bools": ("cumsum", lambda: [c.struct("sums", x=X > 0, out=X)], "x must be of integers or floating"),
    "sums of floats as integers": (
        "cumsum", lambda: [c.struct("sums", x=X, out=X.astype(np.int32))], "out must be of floating-point numbers",
    ),
    "an id beyond the last": (
        "segment_ids_to_cu_seqlens", lambda: [c.array(np.array([0, 3])), c.array(np.zeros(4, np.int32))], "be below 3",
    ),
    "starts of int16": (
        "segment_ids_to_cu_seqlens", lambda: [c.array(IDS), c.array(np.zeros(4, np.int16))], "int32 or int64",
    ),
    "ids of floats": (
        "cu_seqlens_to_segment_ids", lambda: [c.array(np.array([0, 3])), c.array(np.zeros(3))], "int32 or int64",
    ),
    "threads below 0": ("set_threads", lambda: [-1], "threads must be from 0 to 1024, got -1"),
    "too many threads": ("set_threads", lambda: [10**6], "threads must be from 0 to 1024"),
    "a configuration at NULL": ("config", lambda: [None], "configuration must be given, got NULL"),
    "axes that are too long": (
        "forward",
        lambda: [attention(query=broken(X, shape=[2, 2**60], stride=[0, 0]))],
        r"query must be of at most 2\*\*56 along each axis",
    ),
    # Nodes of masks.
    "low that is no integer": (
        "forward", lambda: [attention(mask=c.mask(low=np.array([0.0, 1])))], "low must be integers, got float64",
    ),
    "low of three heads": (
        "forward", lambda: [attention(mask=c.mask(low=np.arange(3)))], "low must be one integer, or",
    ),
    "a chunk of no size": (
        "forward", lambda: [attention(mask=c.mask([("chunk", 0, 0, 0)]))], "size must be a positive integer, got 0",
    ),
    "large ids": (
        "forward", lambda: [attention(mask=c.mask([("equal", WIDE + 2**31, IDS, 0)]))], r"q_ids must be below 2\*\*31",
    ),
    "ids that are no integers": (
        "forward", lambda: [attention(mask=c.mask([("equal", IDS * 1.0, IDS, 0)]))], "q_ids must be integers, got",
    ),
    "diagonals of int64": (
        "forward", lambda: [attention(mask=c.mask([("diagonal", 0, 0, 0, WIDE)]))], "at must be int32, got int64",
    ),
    "starts of nothing": (
        "forward", lambda: [packed(mask=c.mask([("sequences", 1, 2, None, 0, 0)]))],
        "ATTNMASK_SEQUENCES: cum_seqlens_q must be an array",
    ),
    "starts that decrease": (
        "forward", lambda: [packed(mask=c.mask(cum_seqlens_k=np.array([0, 5, 4, 8])))],
        "must never decrease, got 4 after 5",
    ),
    "starts behind 0": (
        "forward", lambda: [packed(mask=c.mask(cum_seqlens_q=np.array([1, 8])))],
        "cum_seqlens_q must start at 0, got 1",
    ),
    "a dense number": (
        "forward", lambda: [attention(mask=c.mask([("dense", 1, 0, 0)]))], "DENSE: array must be an array",
    ),
    "a dense mask of float8": (
        "forward",
        lambda: [attention(mask=c.mask([("dense", broken(np.ones((1, 1, 8, 8), bool), type=13), 0, 0)]))],
        "array must be bool or numbers",
    ),
    "a dense mask of few keys": (
        "forward", lambda: [attention(mask=c.mask([("dense", np.ones((1, 1, 8, 7)), 0, 0)]))],
        r"array must broadcast to \[B, H, Tq, Tk\], got float64",
    ),
    "places of int64": (
        "forward",
        lambda: [attention(mask=c.mask([("tiles", WIDE[None, None], 64, 64, np.zeros((1, 64, 8), np.uint8), 0, 0)]))],
        "ATTNMASK_TILES: places must be int32",
    ),
    "a grid of floats": (
        "forward", lambda: [attention(mask=c.mask([("neighborhood", np.ones((1, 5)), 0, 0)]))], "grid must be integers",
    ),
    "a grid of four columns": (
        "forward", lambda: [attention(mask=c.mask([("neighborhood", np.ones((1, 4), int), 0, 0)]))],
        r"grid must be \[axes, 5\]",
    ),
    "a grid of one point": (
        "forward", lambda: [attention(mask=c.mask([("neighborhood", np.ones((1, 5), int), 0, 0)]))],
        "grid must have a point for each",
    ),
    # Terms.
    "a cap with an array": (
        "forward", lambda: [attention(**c.terms({"kind": "SOFT_CAP", "number": 1.0, "array": SLOPES}))],
        "ATTNMASK_SOFT_CAP must be a number above 0, got float64 array",
    ),
    "dropout of everything": (
        "forward", lambda: [attention(**c.terms({"kind": "DROPOUT", "number": 1.0}))],
        "ATTNMASK_DROPOUT must be a number between 0 and 1, got 1",
    ),
    "no slopes": (
        "forward", lambda: [attention(**c.terms({"kind": "ALIBI"}))],
        r"ATTNMASK_ALIBI must be an array \[B or N, H, 1, 1\] of float32 or float64, .*, got no array",
    ),
    "slopes of one axis": (
        "forward", lambda: [attention(**c.terms({"kind": "ALIBI", "array": np.ones(2)}))],
        "ATTNMASK_ALIBI must be .*, got",
    ),
    "slopes of integers": (
        "forward", lambda: [attention(**c.terms({"kind": "ALIBI", "array": np.ones((1, 2, 1, 1), int)}))],
        "of float32 or float64, .*, got int64 array",
    ),
    "a grid bias of even width": (
        "forward", lambda: [attention(**c.terms({"kind": "GRID_BIAS", "array": np.ones((1, 2, 1, 8)), "integer": 4}))],
        "ATTNMASK_GRID_BIAS must be an array .* with an odd integer that divides",
    ),
    "slopes without data": (
        "forward", lambda: [attention(**c.terms({"kind": "ALIBI", "array": broken(SLOPES, data=None)}))],
        "array of ATTNMASK_ALIBI must have data, got NULL",
    ),
    # Caches.
    "packed queries of four axes": (
        "cached_forward", lambda: [cached(mask=c.mask(cum_seqlens_q=np.array([0, 1, 2])))],
        r"query must be \[total, H, D\] with cum_seqlens_q, got",
    ),
    "packed keys that end early": (
        "cached_forward",
        lambda: [cached(query=X[0], out=X[0].copy(), key=X[0, :5], value=X[0, :5], mask=c.mask(cum_seqlens_q=HALVES))],
        "cum_seqlens_q must end at 5 tokens of key, got 8",
    ),
    "starts of new tokens of other sequences": (
        "cached_forward",
        lambda: [cached(
            query=X[0], out=X[0].copy(), key=X[0], value=X[0], cu_seqlens_k_new=np.array([0, 8]),
            mask=c.mask(cum_seqlens_q=HALVES),
        )],
        "cu_seqlens_k_new must have 3 entries for 2 sequences of queries, got 2",
    ),
    "starts of new tokens that are not there": (
        "cached_forward",
        lambda: [cached(
            query=X[0], out=X[0].copy(), cu_seqlens_k_new=np.zeros(3, int), mask=c.mask(cum_seqlens_q=HALVES),
        )],
        "key must be given with cu_seqlens_k_new, got NULL",
    ),
    "starts that are no integers, of packed queries": (
        "cached_forward", lambda: [cached(mask=c.mask(cum_seqlens_q=HALVES * 1.0))],
        "cum_seqlens_q must be integers, got",
    ),
    "query of three axes over a cache": (
        "cached_forward", lambda: [cached(query=X[0])], r"query must be \[B, T, H, D\], got",
    ),
    "query of float64 over float32": (
        "cached_forward", lambda: [cached(query=X.astype(np.float64))],
        "query must be float32, float16 or bfloat16 with a cache of float32",
    ),
    "query of float32 over float64": (
        "cached_forward", lambda: [cached(k_cache=CACHE.astype(float), v_cache=CACHE.astype(float))],
        "query must be float64 as its cache",
    ),
    "a cache of three axes": (
        "cached_forward", lambda: [cached(k_cache=X[0])],
        r"k_cache must be \[B, Tmax, Hkv, D\] or \[pages, page_size, Hkv, D\]",
    ),
    "values of another type": (
        "cached_forward", lambda: [cached(v_cache=CACHE.astype(float))], "v_cache must be float32 as k_cache",
    ),
    "values of other tokens": (
        "cached_forward", lambda: [cached(v_cache=X)], "v_cache must be of shape .* and Dv as k_cache",
    ),
    "another number of channels": (
        "cached_forward", lambda: [cached(query=FEW)], "query must have D = 16 as its cache, got",
    ),
    "heads that the cache does not divide": (
        "cached_forward", lambda: [cached(query=X[:, :, :1])], "query must have a multiple of its cache's 2 heads, got",
    ),
    "pages without a table": (
        "cached_forward", lambda: [cached(query=X[:1], out=X[:1].copy())],
        "k_cache must have 1 rows, one per sequence, got .*; set block_table if they are pages",
    ),
    "a table of floats": (
        "cached_forward", lambda: [cached(block_table=TABLE * 1.0)], "block_table must be int32 or int64",
    ),
    "a table of one sequence": (
        "cached_forward", lambda: [cached(block_table=TABLE[:1])], r"block_table must be of shape \(2, max_pages\)",
    ),
    "a table without lengths": (
        "cached_forward", lambda: [cached(block_table=TABLE, cache_seqlens=None)],
        "cache_seqlens must be given with block_table, got NULL",
    ),
    "tokens below 0": (
        "cached_forward", lambda: [cached(cache_seqlens=-1)], "cache_seqlens must be at least 0, got -1",
    ),
    "tokens of three sequences": (
        "cached_forward", lambda: [cached(cache_seqlens=np.arange(3))], "cache_seqlens must be one integer, or",
    ),
    "a page that two sequences write": (
        "cached_forward", lambda: [cached(block_table=TABLE, key=X, value=X)],
        "block_table must give each sequence pages of its own to write to, got page 0",
    ),
    "a page that is written twice": (
        "cached_forward",
        lambda: [cached(
            query=X[:1], out=X[:1].copy(), block_table=TABLE[:1] * 0, key=X[:1], value=X[:1], cache_seqlens=12,
        )],
        "block_table must name a page once to write to it, got page 0 twice",
    ),
    "new keys of another batch": (
        "cached_forward", lambda: [cached(key=X[:1], value=X[:1])], "key must have batch size 2 as query",
    ),
    "new keys of other channels": (
        "cached_forward", lambda: [cached(key=FEW, value=X)], "key must have 2 heads of 16 channels as its cache",
    ),
    "fewer new values than keys": (
        "cached_forward", lambda: [cached(key=X, value=X[:, :5])], "value must have 8 tokens as key",
    ),
    "new keys of integers": ("cached_forward", lambda: [cached(key=X.astype(int), value=X)], "key must be of float16,"),
    "a value with a latent cache": (
        "cached_forward", lambda: [latent(value=X[..., :8].copy())],
        "value must be NULL with a latent cache, as key contains the values",
    ),
    "other scales with a latent cache": (
        "cached_forward",
        lambda: [latent(np.int8, k_scale=SCALES, v_scale=SCALES.copy())],
        "v_scale must be NULL or k_scale itself where v_cache is channels of k_cache",
    ),
    "half a group with a latent cache": (
        "cached_forward",
        lambda: [cached(
            query=np.ones((2, 8, 2, 64), F32), **dict(zip(("k_cache", "v_cache"), halves_of_a_group(), strict=True)),
            k_scale=np.ones((2, 16, 2, 1, 2), F32), out=np.ones((2, 8, 2, 32), F32),
        )],
        "v_cache must be whole groups of 64 channels of k_cache, got 32 from channel 16 on",
    ),
    "no scales": (
        "cached_forward", lambda: [quantized(k_scale=None)], "k_scale must be given for a cache of int8, got NULL$",
    ),
    "no scales of groups": (
        "cached_forward",
        lambda: [quantized(np.uint8, query=np.ones((2, 8, 2, 32), F32), k_scale=None)],
        "k_scale must be given for a cache of uint8, got NULL$",
    ),
    "scales of groups of integers": (
        "cached_forward",
        lambda: [quantized(np.uint8, query=np.ones((2, 8, 2, 32), F32), k_scale=TABLE)],
        "k_scale must be float32 or float16 for a cache of uint8",
    ),
    "scales of no groups": (
        "cached_forward",
        lambda: [quantized(np.uint8, query=np.ones((2, 8, 2, 32), F32))],
        r"k_scale must be of shape \(2, 16, 2, 32 / group, 2\) with a group of 32, 64 or 128",
    ),
    "scales of floats": (
        "cached_forward", lambda: [cached(k_scale=SCALES)],
        "k_scale must be NULL for a cache of float32, got float32 array",
    ),
    "scales of float64": (
        "cached_forward", lambda: [quantized(k_scale=SCALES.astype(float))], "k_scale must be float32, got",
    ),
    "scales of another shape": (
        "cached_forward", lambda: [quantized(k_scale=SCALES[:, :5])],
        r"k_scale must be of shape \(2, 16, 2, 1\) or \(1,",
    ),
    "scales that take no tokens": (
        "cached_forward", lambda: [quantized(k_scale=SCALES[:1], key=X, value=X)],
        r"k_scale must be of shape \(2, 16, 2, 1\) to take new tokens",
    ),
    "a scale of 0": (
        "cached_forward", lambda: [quantized(k_scale=np.zeros((1, 1, 2, 16), F32))],
        "k_scale must be finite and positive for each channel, got 0",
    ),
    "low beyond": ("cached_forward", lambda: [cached(mask=c.mask(low=2**60))], r"low must be from -2\*\*59 to 2\*\*59"),
    "a prefix longer than the tokens": (
        "cached_forward", lambda: [cached(prefix=16, block_table=TABLE)],
        "prefix must be tokens that all sequences have in the cache, up to 8 for sequence 0, got 16",
    ),
    "a prefix that is not shared": (
        "cached_forward", lambda: [cached(prefix=16, block_table=TABLE[:, ::-1] * [[1], [0]], cache_seqlens=16)],
        "prefix must be tokens whose pages all sequences share, up to 0 for sequence 1, got 16",
    ),
    "a prefix up to the last query": (
        "cached_forward", lambda: [cached(prefix=16, block_table=TABLE, cache_seqlens=17)],
        "prefix must be tokens before the queries, up to 9 for sequence 0, got 16",
    ),
    "slots of floats": ("write_cache", lambda: [rows(SLOTS * 1.0)], "slot_mapping must be integers, got float64"),
    "slots of fewer tokens": (
        "write_cache", lambda: [rows(SLOTS[:5])], r"slot_mapping must be of shape \(8\), a slot for each token, got",
    ),
    "one slot for two tokens": (
        "write_cache", lambda: [rows(np.array([0, 1, 2, 3, 4, 5, 6, 2]))],
        "slot_mapping must give each token a slot of its own, got 2 at index 2 and 7",
    ),
    "tokens of four axes for slots": (
        "write_cache", lambda: [rows(SLOTS, key=FEW, value=FEW)],
        r"key must be \[total, Hkv, D\] with slot_mapping, got",
    ),
    # Linear attention.
    "packed rows": (
        "linear_forward", lambda: [linear(cum_seqlens=np.array([0, 8]))], "1 when cum_seqlens is given, got 2",
    ),
    "packed tokens that end early": (
        "linear_forward", lambda: [linear(cum_seqlens=np.array([0, 7]))], "cum_seqlens must end at 8 tokens, got 7",
    ),
    "linear attention of integers": (
        "linear_forward", lambda: [linear(query=IDS)],
        "query must be of float16, bfloat16, float32 or float64, got int32",
    ),
    "linear query of three axes": (
        "linear_forward", lambda: [linear(query=X[0])], r"query must be \[B, T, Hk, K\], got",
    ),
    "linear key of fewer tokens": (
        "linear_forward", lambda: [linear(key=X[:, :5])], r"key must be an array of shape \(2, 8, 2, 16\), got",
    ),
    "heads of values that do not divide": (
        "linear_forward", lambda: [linear(value=X[:, :, :1])],
        "value must have a multiple of the 2 heads of key, got 1",
    ),
    "a decay of float64": ("linear_forward", lambda: [linear(decay=np.zeros(2))], "decay must be float32, got float64"),
    "a state of other sequences": (
        "linear_forward", lambda: [linear(initial_state=STATES[:1])], r"initial_state must be \[N, H, K, V\] of shape",
    ),
    "a gradient of nothing": (
        "linear_backward", lambda: [c.struct("linear_gradients", call=kept(), d_out=X, d_decay=np.zeros(2, F32))],
        "d_decay must come with decay",
    ),
    "fewer slots than rows": (
        "linear_step", lambda: [one_token(initial_state=STATES[:1]), None],
        "initial_state must have 2 slots as query has batch rows, or state_indices must be given, got 1",
    ),
    "fewer indices than rows": (
        "linear_step", lambda: [one_token(), c.array(np.arange(1))],
        r"state_indices must be of shape \(2\), got 1 entries",
    ),
    "indices of floats": (
        "linear_step", lambda: [one_token(), c.array(np.zeros(2))], "state_indices must be a 1-D array of",
    ),
    "an index beyond": (
        "linear_step", lambda: [one_token(), c.array(np.arange(1, 3))], "state_indices must be from -1 to 1",
    ),
    "an index twice": (
        "linear_step", lambda: [one_token(), c.array(np.zeros(2, int))],
        "state_indices must name each slot once, got 0",
    ),
    # Tokens.
    "sums of one axis": ("cumsum", lambda: [c.struct("sums", x=X[0, 0, 0], out=X)], r"x must be \[B, T, H\] or"),
    "sums by infinity": ("cumsum", lambda: [c.struct("sums", **SUMS, scale=np.inf)], "scale must be finite, got inf"),
    "packed rows of sums": (
        "cumsum", lambda: [c.struct("sums", **SUMS, cum_seqlens=np.array([0, 8]))],
        "x must have one batch row with cum_seqlens",
    ),
    "no starts to fill": (
        "segment_ids_to_cu_seqlens", lambda: [c.array(IDS), c.array(np.zeros(0, np.int32))],
        "cum_seqlens must have an entry more than segments",
    ),
    "starts of two axes": (
        "segment_ids_to_cu_seqlens", lambda: [c.array(IDS), c.array(IDS.copy())], "cum_seqlens must have one axis, got",
    ),
    "segment ids of floats": (
        "segment_ids_to_cu_seqlens", lambda: [c.array(X[0, 0, 0]), c.array(np.zeros(4, np.int32))],
        "segment_ids must be int",
    ),
    "segment ids of four axes": (
        "segment_ids_to_cu_seqlens", lambda: [c.array(X.astype(int)), c.array(np.zeros(4, np.int32))],
        r"segment_ids must be \[B, T\] or \[T\], got",
    ),
    "segment ids at NULL": ("segment_ids_to_cu_seqlens", lambda: [None, None], "segment_ids must be given, got NULL"),
    "starts at NULL": ("cu_seqlens_to_segment_ids", lambda: [None, None], "cum_seqlens must be given, got NULL"),
    "no starts": (
        "cu_seqlens_to_segment_ids", lambda: [c.array(None), c.array(np.zeros(3, int))],
        "cum_seqlens must be given, got NULL",
    ),
}  # fmt: skip


def packed(**fields):
    return attention(query=X[:1], key=X[:1], value=X[:1], out=X[:1].copy(), **fields)


def quantized(of=np.int8, **fields):
    return cached(
        **(
            {"k_cache": CACHE.astype(of), "v_cache": CACHE.astype(of), "k_scale": SCALES, "v_scale": SCALES}
            | fields
        )
    )


def latent(of=F32, **fields):
    """A call over a cache whose values are the first channels of its keys."""
    cache = CACHE.astype(of)
    return cached(**({"k_cache": cache, "v_cache": cache[..., :8], "key": X, "out": FEW.copy()} | fields))


def halves_of_a_group():
    cache = np.zeros((2, 16, 2, 32), np.uint8)
    return cache, cache[..., 8:24]


def rows(slots, **fields):
    given = {"k_cache": FEW, "v_cache": FEW.copy(), "key": FEW[0], "value": FEW[0], "slot_mapping": slots}
    return c.struct("cache_rows", **(given | fields))


def one_token(**fields):
    one = X[:, :1]
    return linear(
        **(
            {"query": one, "key": one, "value": one, "out": one.copy(), "initial_state": STATES.copy()}
            | fields
        )
    )


def kept():
    call, shape = linear(), (ctypes.c_int64 * 2)()
    c.call("linear_kept", call, shape)
    return linear(kept=np.zeros(tuple(shape), F32))


def _term(**fields):
    made = c.struct("term", **fields)
    return {"terms": made, "term_count": 1}


def with_lse(**fields):
    return attention(lse=np.zeros((2, 2, 8), F32), **fields)


def gradients(call, **fields):
    given = {name: X.copy() for name in ("d_query", "d_key", "d_value")}
    return c.struct("gradients", call=call, **({"d_out": X} | given | fields))


# Names of the header: of what a reader may write, and of what comments call the operands of nodes.
NAMES = {
    name for name in re.findall(r"\w+", re.sub(r"/\*.*?\*/", "", c.TEXT, flags=re.S)) if not name.isdigit()
}
NAMES |= {name for of in c.OPERANDS.values() for name in of} | set(re.findall(r"ATTNMASK_\w+", c.TEXT))
WORDS = {"float8_e4m3fn", "float8_e5m2", "max_pages", "page_size", "an", "operator"}
OF_PYTHON = re.compile(r"None|\bnp\.|numpy|Python|=[\w(]|,\)", re.IGNORECASE)


@pytest.mark.parametrize("case", CASES)
def test_refused(case):
    function, make, words = CASES[case]
    arguments = make()
    before = _memory(arguments)
    with pytest.raises(ValueError, match=f"INVALID: .*{words}") as error:
        c.call(function, *arguments)
    assert _memory(arguments) == before
    message = str(error.value).removeprefix("ATTNMASK_INVALID: ")
    assert not OF_PYTHON.search(message)
    subjects = [re.match(r"\w+", part).group() for part in message.split(": ")[:2] if " must " in message]
    named = {*subjects, *re.findall(r"\b[a-zA-Z0-9]+_\w+", message), *re.findall(r"(\w+) must", message)}
    assert not named - NAMES - WORDS, message


def test_operands_have_the_names_of_the_header():
    """Each kind of node refuses an operand of no kind by its name, and one operand more than it has."""
    for kind, names in c.OPERANDS.items():
        for i, name in enumerate([*names, f"operand[{len(names)}]"]):
            given = [c.operand(None)] * i + [odd_operand(3)]
            with pytest.raises(ValueError, match=re.escape(f"nodes[0], {kind}: {name} must")):
                c.call("forward", attention(mask=node(c.number(kind.removeprefix("ATTNMASK_")), *given)))


def _memory(arguments):
    """The bits of all arrays of these."""
    found = []
    for given in arguments:
        for value in getattr(given, "arrays", {}).values():
            found += [value.tobytes()] if isinstance(value, np.ndarray) else _memory([value])
    return found


def test_the_message_may_be_null():
    assert c.library().attnmask_forward(None, None) == c.number("INVALID")


def test_a_long_message_ends_in_the_buffer():
    message = c.STRUCTS["attnmask_message"]()
    ctypes.memset(ctypes.byref(message), 255, ctypes.sizeof(message))
    assert c.library().attnmask_forward(None, ctypes.byref(message)) == c.number("INVALID")
    assert message.text == b"call must be given, got NULL"


def test_a_level_that_is_not_there():
    code = "import c_library as c; c.call('set_threads', 1)"
    env = {"ATTNMASK_ISA": "nonsense", "PYTHONPATH": f"{ROOT}:{ROOT}/tests/_support", "PATH": "/usr/bin:/bin"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )
    assert "ATTNMASK_ISA must be one of" in result.stderr
    assert "got 'nonsense'" in result.stderr
