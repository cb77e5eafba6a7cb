"""Calls with several batch axes: results and gradients, what shares a bias, masks and numbers by row, and bad input."""

import itertools
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from flash_cases import BF16, F16, F32, F64, worst
from flash_expected import expected, expected_gradients
from layouts import arrange

import attnmask
from attnmask import MaskInfo, _core
from attnmask.operations import OperationRegistry

FUNCTIONS = (attnmask.flash_attention, attnmask.flash_attention_fwd, attnmask.flash_attention_vjp)
BIASES = ("B1HQK", "11HQK", "BNHQK", "1N1QK", "B111K", "BN1Q1", "HQK", "K")
LAYOUTS = ("contiguous", "heads first", "sliced", "strided", "reversed", "fortran")
BATCH, TQ, TK, H = (2, 3), 20, 30, 4
RNG = np.random.default_rng(5)
SHAPES = tuple(itertools.product((1, 2, 3), (1, 2, 3), (1, 7, 48, 65, 130)))


def letters(axes, **sizes) -> tuple[int, ...]:
    return tuple(sizes.get(axis, 1) for axis in axes)


def one_batch(array, count=2) -> np.ndarray:
    return array.reshape(-1, *array.shape[count:])


def inputs(rng, batch, queries, keys, heads, dtype=F32, layout="contiguous", depth=8) -> list[np.ndarray]:
    """Query, key, value and dout."""
    shapes = ((queries, heads[0]), (keys, heads[1]), (keys, heads[1]), (queries, heads[0]))
    return [arrange(rng.standard_normal((*batch, *shape, depth)).astype(dtype), layout) for shape in shapes]


def summed_like(dense, bias, batch) -> np.ndarray:
    """The gradient of a bias from that of all pairs, [rows, H, Q, K]."""
    whole = dense.reshape(*batch, *dense.shape[1:])
    own = (1,) * (whole.ndim - bias.ndim) + bias.shape
    axes = tuple(axis for axis, size in enumerate(own) if size != whole.shape[axis])
    return whole.sum(axis=axes, keepdims=True).reshape(bias.shape)


@pytest.mark.repeats
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_and_gradients(each_isa, set_threads, shape):
    """Beside the float64 twin of one batch axis and a bias that is written out; for any number of threads."""
    first, second, queries = shape
    place = SHAPES.index(shape)
    rng = np.random.default_rng(place)
    keys, heads = queries + place % 3 * 40, ((2, 2), (4, 2), (3, 1))[place % 3]
    dtype, batch = (F32, F64, BF16, F16)[place % 4], (first, second)
    q, k, v, dout = inputs(rng, batch, queries, keys, heads, dtype, LAYOUTS[place % len(LAYOUTS)])
    seen = ({}, {"causal": True, "causal_offset": 3}, {"sliding_window": 30})[place // 4 % 3]
    twin = {"query": q, "key": k, "value": v}
    twin = {name: one_batch(x) for name, x in twin.items()} | seen
    for axes in (BIASES[place % len(BIASES)], "B1HQK"):
        sizes = letters(axes, B=first, N=second, H=heads[0], Q=queries, K=keys)
        bias = rng.standard_normal(sizes).astype((F32, dtype)[place % 2])
        twin["bias"] = one_batch(np.broadcast_to(bias, (*batch, heads[0], queries, keys)))
        right, right_gradients = expected(twin), expected_gradients(twin, one_batch(dout))
        exact, size = (
            summed_like(x.bias, bias, batch) for x in (right_gradients.exact, right_gradients.sizes)
        )
        by_level = {}
        for level in ("plain", *each_isa()):
            _core.use_isa(level)
            for threads in (1, 3):
                set_threads(threads)
                (out, lse), vjp = attnmask.flash_attention_vjp(
                    q, k, v, bias=bias, return_lse=True, grad_bias=True, **seen
                )
                grads = vjp(dout)
                arrays = (out, lse, *grads[:4])
                for x, y in zip(by_level.setdefault(level, arrays), arrays, strict=True):
                    np.testing.assert_array_equal(x, y)
            assert out.shape == q.shape
            assert lse.shape == (*batch, heads[0], queries)
            right.check(one_batch(out), one_batch(lse))
            tokens = [one_batch(x) for x in grads[:3]]
            right_gradients.check(attnmask.FlashAttentionGrads(*tokens))
            assert (grads.bias.shape, grads.bias.dtype) == (bias.shape, bias.dtype)
            allowed = right_gradients.errors.bias + 2 * float(ml_dtypes.finfo(bias.dtype).eps)
            assert worst(grads.bias, exact, size, bias.dtype) <= allowed


@pytest.mark.repeats
@pytest.mark.parametrize("axes", ["B1HQK", "B11QK", "B1H1K", "B1HQ1", "B1111", "1N1QK"])
def test_threads(isa, set_threads, axes):
    """Sums over what neighbours share are the same for any number of threads, and those of one call for each."""
    batch, tokens, heads = (3, 6), 150, 4
    q, k, v, dout = inputs(np.random.default_rng(1), batch, tokens, tokens, (heads, 2), depth=32)
    bias = RNG.standard_normal(letters(axes, B=3, N=6, H=heads, Q=tokens, K=tokens)).astype(F32)
    results = []
    for threads in (1, 2, 3, 7, 3):
        set_threads(threads)
        out, vjp = attnmask.flash_attention_vjp(q, k, v, bias=bias, grad_bias=True)
        results.append((out, *vjp(dout)[:4]))
        for got, right in zip(results[-1], results[0], strict=True):
            np.testing.assert_array_equal(got, right)
    for i in range(3) if axes.startswith("B") else ():
        out, vjp = attnmask.flash_attention_vjp(q[i], k[i], v[i], bias=bias[i], grad_bias=True)
        for got, right in zip(results[0], (out, *vjp(dout[i])[:4]), strict=True):
            np.testing.assert_array_equal(got[i], right)


# Masks, segment ids and other arguments by batch row


def good(seed=0, dtype=F32, batch=BATCH) -> tuple[dict, np.ndarray]:
    q, k, v, dout = inputs(np.random.default_rng(seed), batch, TQ, TK, (H, 2), dtype)
    return {"query": q, "key": k, "value": v}, dout


def rows_of(given) -> dict:
    return {name: one_batch(x) for name, x in given.items()}


OPTIONS = {  # by name: options of the call, and the same for a call with one batch axis
    "mask of rows": ({"attention_mask": RNG.random((*BATCH, 1, 1, TK)) < 0.7}, one_batch),
    "mask of the first axis": (
        {"attention_mask": RNG.random((2, 1, 1, TQ, TK)) < 0.7},
        lambda x: one_batch(np.broadcast_to(x, (*BATCH, 1, TQ, TK))),
    ),
    "mask of the second axis": (
        {"attention_mask": RNG.random((3, H, 1, TK)) < 0.7},
        lambda x: one_batch(np.broadcast_to(x, (*BATCH, H, 1, TK))),
    ),
    "mask of all": ({"attention_mask": RNG.random((TQ, TK)) < 0.7}, lambda x: x),
    "mask info": (
        {"attention_mask": MaskInfo.from_segments(RNG.integers(0, 2, (6, TQ)), RNG.integers(0, 2, (6, TK)))},
        lambda x: x,
    ),
    "mask info of all": (
        {"attention_mask": MaskInfo.from_segments(RNG.integers(0, 2, (1, TQ)), RNG.integers(0, 2, (1, TK)))},
        lambda x: x,
    ),
    "segments": (
        {
            "q_segment_ids": RNG.integers(-1, 2, (*BATCH, TQ)),
            "kv_segment_ids": RNG.integers(-1, 2, (*BATCH, TK)),
        },
        one_batch,
    ),
    "offsets": ({"causal": True, "causal_offset": RNG.integers(0, 9, BATCH)}, one_batch),
    "bottom right": ({"causal": True, "causal_offset": "bottom-right"}, lambda x: x),
    "slopes": ({"alibi_slopes": RNG.random((*BATCH, H))}, one_batch),
    "slopes of all": ({"alibi_slopes": RNG.random(H)}, lambda x: x),
    "sinks, a table and a cap": (
        {
            "softmax_aux": RNG.random((H, 2)),
            "relative_bias": RNG.random((H, 9), np.float32),
            "relative_low": -4,
            "grid_bias": RNG.random((H, 11, 11), np.float32),
            "logits_soft_cap": 3.0,
        },
        lambda x: x,
    ),
    "dropout": ({"dropout_prob": 0.3, "dropout_seed": 7}, lambda x: x),
    "not normalized": ({"normalize_output": False}, lambda x: x),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(isa, name):
    """All functions return what they return for one batch axis, to the bit."""
    options, one = OPTIONS[name]
    same = {key: one(x) if isinstance(x, np.ndarray) else x for key, x in options.items()}
    given, dout = good()
    wanted = {f"grad_{key}": True for key in ("softmax_aux", "relative_bias", "grid_bias") if key in options}
    rows = rows_of(given)
    right, right_lse = attnmask.flash_attention_fwd(**rows, **same)
    right_grads = attnmask.flash_attention_bwd(
        one_batch(dout), **rows, out=right, lse=right_lse, **same, **wanted
    )
    out, lse = attnmask.flash_attention_fwd(**given, **options)
    assert (out.shape, lse.shape) == (given["query"].shape, (*BATCH, H, TQ))
    np.testing.assert_array_equal(one_batch(out), right)
    np.testing.assert_array_equal(one_batch(lse), right_lse)
    np.testing.assert_array_equal(attnmask.flash_attention(**given, **options), out)
    (again, lse), vjp = attnmask.flash_attention_vjp(**given, **options, return_lse=True, **wanted)
    np.testing.assert_array_equal(again, out)
    np.testing.assert_array_equal(one_batch(lse), right_lse)
    backward = attnmask.flash_attention_bwd(dout, **given, out=out, lse=lse, **options, **wanted)
    for grads in (vjp(dout), backward):
        for key, got, exact in zip(grads._fields, grads, right_grads, strict=True):
            if got is None:
                assert exact is None
            elif key in given:
                assert got.shape == given[key].shape
                np.testing.assert_array_equal(one_batch(got), exact)
            else:
                np.testing.assert_array_equal(got, exact)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_more_axes(isa, dtype):
    """Three batch axes, and the gradient of the logsumexp; packed sequences of one row."""
    given, dout = good(1, dtype, (2, 1, 3))
    bias, dlse = RNG.random((2, 1, 1, H, TQ, TK)).astype(dtype), RNG.random((2, 1, 3, H, TQ), np.float32)
    (out, lse), vjp = attnmask.flash_attention_vjp(**given, bias=bias, grad_bias=True, return_lse=True)
    grads = vjp(dout, dlse)
    fewer = {name: x[:, 0] for name, x in given.items()}
    (right, right_lse), right_vjp = attnmask.flash_attention_vjp(
        **fewer, bias=bias[:, 0], grad_bias=True, return_lse=True
    )
    right_results = (right, right_lse, *right_vjp(dout[:, 0], dlse[:, 0])[:4])
    for got, exact in zip((out, lse, *grads[:4]), right_results, strict=True):
        np.testing.assert_array_equal(got[:, 0], exact)
    packed = {name: x[:1, :, :1] for name, x in given.items()}
    starts = {"cum_seqlens_q": [0, 5, TQ], "cum_seqlens_k": [0, 9, TK]}
    out = attnmask.flash_attention(**packed, **starts)
    np.testing.assert_array_equal(
        out[0, 0], attnmask.flash_attention(**{name: x[0, 0] for name, x in packed.items()}, **starts)
    )


@pytest.mark.parametrize("axes", ["B1HQK", "BNHQK", "1N1QK"])
def test_dead_numbers_spread_nowhere(isa, axes):
    given, dout = good(2)
    bias = RNG.standard_normal(letters(axes, B=2, N=3, H=H, Q=TQ, K=TK)).astype(F32)
    bias[..., 0, :, 3] = -np.inf
    kv_ids = np.where(np.arange(TK) < 25, 0, -1) + np.zeros((*BATCH, 1), int)
    options = {"q_segment_ids": np.zeros((*BATCH, TQ), int), "kv_segment_ids": kv_ids, "grad_bias": True}
    out, vjp = attnmask.flash_attention_vjp(**given, bias=bias, **options)
    grads = vjp(dout)
    for name in ("key", "value"):
        given[name][:, :, 25:] = np.nan
    bias[..., 25:] = np.nan
    again, vjp = attnmask.flash_attention_vjp(**given, bias=bias, **options)
    np.testing.assert_array_equal(again, out)
    for got, right in zip(vjp(dout)[:4], grads[:4], strict=True):
        assert np.isfinite(got).all()
        np.testing.assert_array_equal(got, right)
    assert not grads.bias[..., 25:].any()
    assert not grads.bias[..., 0, :, 3].any()


@pytest.mark.parametrize("axes", ["B1HQK", "1N1QK", "11HQK", "BNHQK"])
@pytest.mark.parametrize(
    "sizes", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (0, 0, 3, 4), (2, 3, 0, 0)], ids=str
)
def test_empty_axes(isa, plain_too, axes, sizes):
    first, second, queries, keys = sizes
    q, k, v, dout = inputs(np.random.default_rng(0), (first, second), queries, keys, (2, 1))
    bias = np.ones(letters(axes, B=first, N=second, H=2, Q=queries, K=keys), F32)
    (out, lse), vjp = attnmask.flash_attention_vjp(q, k, v, bias=bias, grad_bias=True, return_lse=True)
    assert (out.shape, lse.shape) == (q.shape, (first, second, 2, queries))
    assert not out.any()
    for got, x in zip(vjp(dout), (q, k, v, bias), strict=False):
        assert got.shape == x.shape
        assert not got.any()


@pytest.fixture(params=[False, True], ids=["", "plain"])
def plain_too(request, isa):
    if request.param:
        _core.use_isa("plain")


# Memory


def peak(function) -> int:
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["one protein, swapped", "several proteins"])
def test_nothing_is_copied(name):
    """Neither tokens whose batch axes one stride can step through, nor a bias that the last batch axes share."""
    first = 1 if name == "one protein, swapped" else 4
    q, k, v, dout = inputs(np.random.default_rng(0), (first, 32), 32, 32, (4, 4), depth=16)
    bias = np.zeros((first, 1, 4, 32, 32), F32)
    if name == "one protein, swapped":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    assert peak(lambda: attnmask.flash_attention(q, k, v, bias=bias)) < 1.1 * q.nbytes + 20_000
    _, vjp = attnmask.flash_attention_vjp(q, k, v, bias=bias, grad_bias=True)
    assert peak(lambda: vjp(dout)) < 1.1 * (3 * q.nbytes + bias.nbytes) + 20_000


def test_out(isa):
    given, _ = good(3)
    right = attnmask.flash_attention(**given)
    for layout in ("contiguous", "heads first", "sliced in tokens"):
        target = arrange(np.full_like(right, 77), layout)
        if layout == "sliced in tokens":
            target = np.full((*BATCH, 2 * TQ, H, 8), 77, F32)[:, :, ::2]
        assert attnmask.flash_attention(**given, out=target) is target
        np.testing.assert_array_equal(target, right)
    target = np.full_like(right, 77).swapaxes(0, 1).copy().swapaxes(0, 1)
    with pytest.raises(
        ValueError, match=r"out must have batch axes \(2, 3\) .*, got strides .*; leave it out"
    ):
        attnmask.flash_attention(**given, out=target)
    assert (target == 77).all()
    with pytest.raises(ValueError, match=r"out must be an array of float32 of shape \(2, 3, 20, 4, 8\), got"):
        attnmask.flash_attention(**given, out=one_batch(right))


def test_operators_in_numpy():
    """`vanilla` writes out what neighbours share."""
    given, _ = good(4)
    for axes in BIASES:
        bias = RNG.standard_normal(letters(axes, B=2, N=3, H=H, Q=TQ, K=TK)).astype(F32)
        flash, vanilla = (
            OperationRegistry.create(name)(*given.values(), bias=bias) for name in ("flash", "vanilla")
        )
        np.testing.assert_allclose(flash.attention_outputs, vanilla.attention_outputs, atol=1e-5)
        assert vanilla.attention_weights.shape == (*BATCH, H, TQ, TK)


# Bad input


def zeros(*shape) -> np.ndarray:
    return np.zeros(shape, F32)


ONE_AXIS = rows_of(good()[0])
BAD = [  # wrong arguments, and what the error says
    ("bias", zeros(2, H, TQ, TK), r"bias must broadcast to \[\*batch, H, Tq, Tk\] = \(2, 3, 4, 20, 30\), got float32 "
     r"array of shape \(2, 4, 20, 30\); write bias\[:, None\]$"),
    ("bias", zeros(2, TQ, TK, H), r"; write np.transpose\(bias, \(0, 3, 1, 2\)\)\[:, None\]$"),
    ("bias", zeros(2, H, 3, TQ, TK), r"; write np.transpose\(bias, \(0, 2, 1, 3, 4\)\)$"),
    ("bias", zeros(2, 1, TQ, TK, H), r"; write np.transpose\(bias, \(0, 1, 4, 2, 3\)\)$"),
    ("bias", zeros(2, 3, TQ, TK), r"; write bias\[:, :, None\]$"),
    ("bias", zeros(2, 2, H, TQ, TK), r"got float32 array of shape \(2, 2, 4, 20, 30\)$"),
    ("bias", zeros(6, H, TQ, TK), r"got float32 array of shape \(6, 4, 20, 30\)$"),
    ("bias", zeros(1, 2, 3, H, TQ, TK), r"; it has more batch axes than query$"),
    ("attention_mask", np.ones((2, 3, TK), bool), r"; write attention_mask\[:, :, None, None, :\]$"),
    ("attention_mask", np.ones((2, 1, 1, TK), bool), r"; write attention_mask\[:, None\]$"),
    ("attention_mask", MaskInfo.from_segments(np.zeros((2, TQ), int), np.zeros((2, TK), int)),
     r"attention_mask must broadcast .*; its batch rows must be 6, or 1 for all, got 2$"),
    ("key", zeros(2, 1, TK, 2, 8), r"key must have batch axes \(2, 3\) as query, got float32 array of shape "
     r"\(2, 1, 30, 2, 8\); write np.broadcast_to\(key, \(2, 3, 30, 2, 8\)\)$"),
    ("key", zeros(3, 2, TK, 2, 8), r"key must have batch axes \(2, 3\) as query, got .* \(3, 2, 30, 2, 8\)$"),
    ("key", zeros(2, TK, 2, 8), r"key must be \[\*batch, Tk, Hkv, D\] with the batch axes \(2, 3\) of query, got .*; "
     r"write np.broadcast_to\(key\[:, None\], \(2, 3, 30, 2, 8\)\)$"),
    ("value", zeros(6, TK, 2, 8), r"value must be \[\*batch, Tk, Hkv, Dv\] with the batch axes \(2, 3\) of query, got"),
    ("value", zeros(2, 3, 2, TK, 8), r"value must have 30 tokens .*; axes are \[\*batch, tokens, heads, head_dim\]: "
     r"write x.swapaxes\(-3, -2\)"),
    ("q_segment_ids", np.zeros((6, TQ), int), r"q_segment_ids must be of shape \(2, 3, 20\), got"),
    ("causal_offset", [1, 2], r"causal_offset must be an integer or of shape \(2, 3\), got"),
    ("causal_offset", np.full(BATCH, 2**60), r"causal_offset must be at most .*, got 1152921504606846976 at index 0$"),
    ("alibi_slopes", zeros(6, H), r"alibi_slopes must be \[H\] or \[\*batch, H\] with H = 4, got"),
    ("cum_seqlens_q", [0, TQ], r"query must have batch size 1 with cum_seqlens_q, got 6"),
]  # fmt: skip
BAD_OF_ONE_AXIS = [
    # A batch axis is never repeated in silence.
    ("bias", zeros(2, H, TQ, TK), r"bias must broadcast to \[B, H, Tq, Tk\] = \(6, 4, 20, 30\), got .*\(2, 4, 20"),
    ("bias", zeros(3, 1, 1, TK), r"bias must broadcast to \[B, H, Tq, Tk\]"),
    ("bias", zeros(2, 1, H, TQ, TK), r"; it has more batch axes than query$"),
    ("key", zeros(2, 3, TK, 2, 8), r"key must be \[B, Tk, Hkv, D\], got float32 array of shape \(2, 3, 30, 2, 8\)$"),
]  # fmt: skip


CALLS = [*((good()[0], *row) for row in BAD), *((ONE_AXIS, *row) for row in BAD_OF_ONE_AXIS)]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("given", "name", "value", "message"), CALLS, ids=range(len(CALLS)))
def test_what_errors_say(function, given, name, value, message):
    more = {"causal": True} if name == "causal_offset" else {}
    more |= {"kv_segment_ids": np.zeros((*BATCH, TK), int)} if name == "q_segment_ids" else {}
    with pytest.raises(ValueError, match=message):
        function(**(given | more | {name: value}))


def test_bad_results():
    given, dout = good()
    out, lse = attnmask.flash_attention_fwd(**given)
    rows = {"dout": dout, "out": out, "lse": lse, "dlse": lse}
    for name, x in rows.items():
        expected_shape = ", ".join(map(str, x.shape))
        with pytest.raises(ValueError, match=rf"{name} must be of shape \({expected_shape}\), got"):
            attnmask.flash_attention_bwd(**given, **(rows | {name: one_batch(x)}))
