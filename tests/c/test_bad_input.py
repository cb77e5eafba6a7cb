"""What the C library refuses: a status and a message in the caller's buffer, and nothing is written."""

import ctypes
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
        "forward", lambda: [attention(mask=c.struct("mask", node_count=1))], "mask must have nodes and their number",
    ),
    "fewer than no nodes": ("forward", lambda: [attention(mask=c.struct("mask", node_count=-1))], "mask must have"),
    "no such node": ("forward", lambda: [attention(mask=node(99))], "node 0 has no kind of attnmask_kind, got 99"),
    "an operator without operands": ("forward", lambda: [attention(mask=c.mask(["and"]))], "lacks operands"),
    "too many operands": (
        "forward", lambda: [attention(mask=node(c.number("KEYS"), *[c.operand(1)] * 3))], "keys takes 2 operands",
    ),
    "an operand of no kind": (
        "forward", lambda: [attention(mask=node(c.number("KEYS"), odd_operand(3)))], "given is 0, 1 or 2",
    ),
    "an operand at NULL": (
        "forward", lambda: [attention(mask=node(c.number("KEYS"), odd_operand(2)))], "nothing, a number or an array",
    ),
    "too many terms that wait": ("forward", lambda: [attention(mask=c.mask([("all",)] * 17))], "operands wait"),
    "ids of another length": (
        "forward", lambda: [attention(mask=c.mask([("equal", IDS, IDS[:, :5], 0)]))], "segment ids must be",
    ),
    "a shift out of an array": (
        "forward", lambda: [attention(mask=c.mask([("dense", np.ones((1, 1, 9, 9)), 2, 0)]))], "leads out of the array",
    ),
    "places of no tile": (
        "forward",
        lambda: [attention(mask=c.mask([
            ("tiles", np.full((1, 1, 1, 1), 5, np.int32), 64, 64, np.zeros((1, 64, 8), np.uint8), 0, 0),
        ]))],
        "tiles must cover the mask",
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
    "no such term": ("forward", lambda: [attention(**_term(kind=99))], "term 0 has no kind of .*, got 99"),
    "terms at NULL": ("forward", lambda: [attention(term_count=1)], "terms must be from 0 to"),
    "a term twice": (
        "forward", lambda: [attention(**c.terms(*[{"kind": "SOFT_CAP", "number": 2.0}] * 2))], "must be given once",
    ),
    "a cap of 0": ("forward", lambda: [attention(**c.terms({"kind": "SOFT_CAP"}))], "logits_soft_cap: .* does not fit"),
    "a bias that does not fit": (
        "forward", lambda: [attention(**c.terms({"kind": "BIAS", "array": np.ones((2, 2, 8, 7), F32)}))], "bias: ",
    ),
    "slopes that are not finite": (
        "forward",
        lambda: [attention(**c.terms({"kind": "ALIBI", "array": np.full((1, 2, 1, 1), np.inf)}))],
        "alibi_slopes must be finite, got inf",
    ),
    "a grid of too few points": (
        "forward",
        lambda: [attention(**c.terms({"kind": "GRID_BIAS", "array": np.ones((1, 2, 1, 9)), "integer": 3}))],
        "grid_bias must have a point of its grid for each query and key, got 2 . 2 points",
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
        "the gradient of logits_soft_cap is none that there is",
    ),
    "a gradient of a bias that is strided": (
        "backward",
        lambda: [gradients(with_lse(**c.terms({
            "kind": "BIAS", "array": np.ones((1, 1, 8, 8), F32), "gradient": np.ones((1, 1, 8, 16), F32)[..., ::2],
        })))],
        "the gradient of bias must be in C order",
    ),
    "tokens that are not there": ("cached_forward", lambda: [cached(cache_seqlens=17)], "cache_seqlens must be tokens"),
    "an offset with a cache": ("cached_forward", lambda: [cached(mask=c.mask(offset=1))], "offset must not be given"),
    "limits of each row with a cache": (
        "cached_forward", lambda: [cached(mask=c.mask(high=np.array([0, 0])))], "low and high must be numbers",
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
        "terms must be caps or sinks with prefix",
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
}  # fmt: skip


def _term(**fields):
    made = c.struct("term", **fields)
    return {"terms": made, "term_count": 1}


def with_lse(**fields):
    return attention(lse=np.zeros((2, 2, 8), F32), **fields)


def gradients(call, **fields):
    given = {name: X.copy() for name in ("d_query", "d_key", "d_value")}
    return c.struct("gradients", call=call, **({"d_out": X} | given | fields))


@pytest.mark.parametrize("case", CASES)
def test_refused(case):
    function, make, words = CASES[case]
    arguments = make()
    before = _memory(arguments)
    with pytest.raises(ValueError, match=f"INVALID: .*{words}"):
        c.call(function, *arguments)
    assert _memory(arguments) == before


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
