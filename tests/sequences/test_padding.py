"""`pack` and `unpack`: arrays, tensors and arrays of JAX, there and back, their gradients, and what is refused."""

import re

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts import LAYOUTS, arrange

from attnmask import MaskInfo, flash_attention, pack, unpack

X = np.arange(3 * 5 * 2).reshape(3, 5, 2)
LENGTHS = [3, 0, 5]


@given(
    rows=st.lists(st.integers(0, 7), max_size=5),
    more=st.integers(0, 3),
    axes=st.sampled_from([(), (2,), (2, 3), (0,)]),
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(
        ["int8", ">i4", "float16", "float32", "bool", "complex64", ml_dtypes.bfloat16, "S3"]
    ),
)
def test_there_and_back(rows, more, axes, layout, dtype):
    """Row by row; and of lengths as of the mask that says the same."""
    tokens = max(rows, default=0) + more
    x = arrange(np.random.default_rng(0).integers(0, 2, (len(rows), tokens, *axes)).astype(dtype), layout)
    packed, starts = pack(x, np.array(rows, int))
    expected = [row[:length] for row, length in zip(x, rows, strict=True)]
    np.testing.assert_array_equal(packed, np.concatenate([*expected, x[:0].reshape(0, *axes)]))
    np.testing.assert_array_equal(starts, np.cumsum([0, *rows]))
    assert (packed.dtype, starts.dtype) == (x.dtype.newbyteorder("="), np.int32)
    assert packed.flags.c_contiguous
    assert not np.shares_memory(packed, x)
    mask = np.arange(tokens) < np.reshape(rows, (-1, 1))
    for live in (mask, mask.astype(np.float32), mask.tolist()):
        if mask.size or live is mask:
            for one, other in zip(pack(x, live), (packed, starts), strict=True):
                np.testing.assert_array_equal(one, other)
    if x.dtype.kind == "S":
        return
    for fill in (0, 1):
        back = unpack(packed, starts, tokens, fill)
        live = mask.reshape(*mask.shape, *(1,) * len(axes))
        np.testing.assert_array_equal(back, np.where(live, x, np.array(fill).astype(x.dtype)))
        assert back.dtype == packed.dtype
        assert back.flags.c_contiguous


def test_tokens_of_a_mask_may_be_anywhere():
    packed, starts = pack(X, [[0, 0, 1, 1, 0], [1, 0, 0, 0, 1], [0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(packed, [X[0, 2], X[0, 3], X[1, 0], X[1, 4]])
    np.testing.assert_array_equal(starts, [0, 2, 4, 4])


def test_attention_is_the_same():
    rng = np.random.default_rng(0)
    query = rng.standard_normal((3, 5, 2, 8)).astype(np.float32)
    packed, starts = pack(query, LENGTHS)
    out = flash_attention(packed, packed, packed, cum_seqlens_q=starts, causal=True)
    mask = MaskInfo.from_lengths(LENGTHS, 5).apply_causal()
    np.testing.assert_array_equal(unpack(out, starts, 5), flash_attention(query, query, query, mask))


@pytest.mark.parametrize(("dtype", "fills"), [
    ("bool", (0, 1, True, np.False_)),
    ("int8", (-128, 127, np.int64(5), 3.0)),
    ("uint64", (0, 2**64 - 1)),
    ("float16", (65504, np.nan, -np.inf, 0.1, 1e-30, np.float32(2))),
    ("float32", (2**24 + 1, 3.4e38, np.nan)),
    (ml_dtypes.bfloat16, (np.inf, 0.3, np.array(1))),
    (ml_dtypes.float8_e4m3fn, (448, np.nan, 0.3)),
    ("complex64", (1j, np.inf)),
])  # fmt: skip
def test_fill(dtype, fills):
    for fill in fills:
        got = unpack(np.zeros(1, dtype), [0, 1], 2, fill)[0, 1]
        wide = complex if dtype == "complex64" else np.longdouble
        np.testing.assert_array_equal(got.astype(wide), np.array(fill).astype(dtype).astype(wide))


@pytest.mark.parametrize(("dtype", "fills"), [
    ("bool", (2, -1, 0.5, np.nan)),
    ("int8", (128, -129, 0.5, np.nan, np.inf, 2**70, 1j)),
    ("uint8", (-1, 256)),
    ("uint64", (-1, 2**64)),
    ("float16", (70000, 1e10, 10**400, 1j)),
    ("float32", (1e300, 2**200)),
    (ml_dtypes.float8_e4m3fn, (np.inf, 1e9)),
    ("S3", (0,)),
])  # fmt: skip
def test_fill_that_the_type_does_not_hold(dtype, fills):
    for fill in fills:
        with pytest.raises(ValueError, match=r"^fill must be a number that .* holds, got "):
            unpack(np.zeros(1, dtype), [0, 1], 2, fill)


@pytest.mark.parametrize(("error", "match", "wrong"), [
    (ValueError, r"x must be \[B, T, \.\.\.\], got int64 array of shape \(\)", lambda: pack(5, [3])),
    (ValueError, r"lengths must be of shape \(3,\), or a mask of shape \(3, 5\)", lambda: pack(X, [3, 5])),
    (ValueError, r"lengths must be of shape \(3,\)", lambda: pack(X, 3)),
    (ValueError, r"lengths must be a mask of shape \(3, 5\)", lambda: pack(X, np.ones((3, 4)))),
    (ValueError, "lengths must be at most 5, the tokens of x, got 6 at index 1", lambda: pack(X, [0, 6, 1])),
    (ValueError, "lengths must be at least 0, got -1 at index 2", lambda: pack(X, [0, 1, -1])),
    (ValueError, "bias", lambda: pack(X, np.full((3, 5), -np.inf))),
    (ValueError, r"packed must be \[total, \.\.\.\], got int64 array of shape \(\)", lambda: unpack(4, [0, 1], 3)),
    (ValueError, "cu_seqlens must end at 8 tokens, got 7", lambda: unpack(np.zeros(8), [0, 3, 7], 5)),
    (ValueError, "max_len must be at least 5, the length of sequence 1", lambda: unpack(np.zeros(8), [0, 3, 8], 4)),
    (ValueError, "max_len must be at least 0", lambda: unpack(np.zeros(0), [0, 0], -1)),
    (TypeError, "fill must be a number", lambda: unpack(np.zeros(8), [0, 3, 8], 5, "0")),
    (TypeError, "fill must be a number", lambda: unpack(np.zeros(8), [0, 3, 8], 5, [0])),
    (TypeError, "fill must be a number", lambda: unpack(np.zeros(8), [0, 3, 8], 5, None)),
    (MemoryError, "max_len", lambda: unpack(np.zeros(8), [0, 3, 8], 2**60)),
    (MemoryError, "max_len", lambda: unpack(np.zeros(8), [0, 3, 8], 10**400)),
])  # fmt: skip
def test_wrong_arguments(error, match, wrong):
    with pytest.raises(error, match=match):
        wrong()


# Tensors


def tensors():
    torch = pytest.importorskip("torch")
    return torch, torch.tensor(X, dtype=torch.float64)


def test_tensors():
    torch, x = tensors()
    for lengths in (LENGTHS, torch.tensor(LENGTHS), torch.arange(5) < torch.tensor(LENGTHS)[:, None]):
        packed, starts = pack(x, lengths)
        assert isinstance(packed, torch.Tensor)
        assert starts.dtype is torch.int32
        np.testing.assert_array_equal(packed.numpy(), pack(X, LENGTHS)[0])
        np.testing.assert_array_equal(starts.numpy(), [0, 3, 3, 8])
    back = unpack(packed, starts, 6, -1)
    np.testing.assert_array_equal(back.numpy(), unpack(pack(X, LENGTHS)[0], starts.numpy(), 6, -1))
    for dtype in (torch.bfloat16, torch.float16, torch.int8, torch.bool):
        assert unpack(*pack(x.to(dtype), LENGTHS), 5).dtype is dtype


def test_gradients_of_tensors():
    torch, x = tensors()
    x.requires_grad_()
    packed, starts = pack(x.transpose(0, 1).contiguous().transpose(0, 1), LENGTHS)
    unpack(packed * 2, starts, 7, 3).sum().backward()
    live = np.arange(5) < np.reshape(LENGTHS, (-1, 1))
    np.testing.assert_array_equal(x.grad.numpy(), np.broadcast_to(2.0 * live[..., None], X.shape))
    both = torch.autograd.gradcheck(lambda x: unpack(*pack(x, LENGTHS), 5), x)
    assert both


def test_fill_of_tensors():
    torch, _ = tensors()
    for dtype, fills in ((torch.int8, (128, 0.5, np.nan)), (torch.bfloat16, (1e300,)), (torch.bool, (2,))):
        for fill in fills:
            with pytest.raises(ValueError, match=f"fill must be a number that {str(dtype)[6:]} holds"):
                unpack(torch.zeros(1, dtype=dtype), [0, 1], 2, fill)
    assert unpack(torch.zeros(1, dtype=torch.bfloat16), [0, 1], 2, 0.1)[0, 1].item() == pytest.approx(
        0.1, 1e-2
    )
    assert unpack(torch.zeros(1), [0, 1], 2, float("-inf"))[0, 1].item() == -np.inf
    with pytest.raises(MemoryError, match="does not fit in memory"):
        unpack(torch.zeros(1), [0, 1], 2**60)


def test_hints_for_tensors():
    torch, _ = tensors()
    lengths = torch.tensor([3, 5])
    for wrong, hint in (
        (lengths, "torch.nn.functional.pad(lengths.cumsum(0), (1, 0))"),
        (torch.tensor([0, 3]), "torch.nn.functional.pad(cu_seqlens, (0, 1), value=8)"),
    ):
        with pytest.raises(ValueError, match=f"write {re.escape(hint)}"):
            unpack(torch.zeros(8), wrong, 5)
        right = eval(hint, {"torch": torch, "lengths": lengths, "cu_seqlens": wrong})
        np.testing.assert_array_equal(right, [0, 3, 8])
        assert unpack(torch.zeros(8), right, 5).shape == (2, 5)


# Arrays of JAX


def test_arrays_of_jax():
    jax = pytest.importorskip("jax")
    x = jax.numpy.asarray(X, "float32")
    packed, starts = pack(x, LENGTHS)
    assert isinstance(packed, jax.Array)
    assert isinstance(starts, jax.Array)
    np.testing.assert_array_equal(packed, pack(X, LENGTHS)[0])
    np.testing.assert_array_equal(starts, [0, 3, 3, 8])

    def loss(x):
        packed, starts = pack(x, np.array(LENGTHS))
        return unpack(packed * 2, starts, 7, fill=3).sum()  # which is known where x is traced

    live = np.arange(5) < np.reshape(LENGTHS, (-1, 1))
    expected = np.broadcast_to(2.0 * live[..., None], X.shape)
    np.testing.assert_array_equal(jax.grad(loss)(x), expected)
    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(x), expected)
    with pytest.raises(ValueError, match=r"fill must be a number that int32 holds, got 0\.5"):
        unpack(jax.numpy.zeros(1, "int32"), [0, 1], 2, 0.5)
    with pytest.raises(TypeError, match="lengths must be an array that NumPy can read"):
        jax.jit(pack)(x, np.array(LENGTHS))
    with pytest.raises(MemoryError, match="does not fit in memory"):
        unpack(jax.numpy.zeros(1), [0, 1], 2**60)
