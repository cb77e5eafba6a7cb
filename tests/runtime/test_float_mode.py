"""All threads compute in the caller's floating-point mode, and get their own mode back afterwards."""

import ctypes
import platform

import numpy as np
import pytest
from calls import some_calls
from environment import SANITIZED, alarm, compiled, import_paths, python

import attnmask

INTEL = platform.machine().lower() in ("x86_64", "amd64")
SOURCE = """
#include <fenv.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
unsigned get(void) { return _mm_getcsr(); }
void set(unsigned mode) { _mm_setcsr(mode); }
#else
unsigned get(void) { unsigned long mode; __asm__ volatile("mrs %0, fpcr" : "=r"(mode)); return mode; }
void set(unsigned mode) { unsigned long wide = mode; __asm__ volatile("msr fpcr, %0" : : "r"(wide)); }
#endif
int raised(void) { return fetestexcept(FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW | FE_UNDERFLOW); }
void clear(void) { feclearexcept(FE_ALL_EXCEPT); }
void raise_all(void) { feraiseexcept(FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW | FE_UNDERFLOW); }
int trapping(void) {
#if defined(__x86_64__)
    _mm_setcsr(_mm_getcsr() & ~_MM_MASK_INVALID & ~_MM_MASK_DIV_ZERO);
    return 1;
#else
    return 0;
#endif
}
"""
FLUSH, UP, DOWN, TO_ZERO = (0x8040, 0x4000, 0x2000, 0x6000) if INTEL else (1 << 24, 1 << 22, 2 << 22, 3 << 22)


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    """A library that reads and writes the mode of the calling thread."""
    if platform.machine().lower() not in ("x86_64", "amd64", "aarch64", "arm64"):
        pytest.skip("knows the modes of x86-64 and arm64")
    library = compiled(tmp_path_factory.mktemp("mode"), SOURCE, "-O1", "-frounding-math")
    library.get.restype = ctypes.c_uint
    library.set.argtypes = [ctypes.c_uint]
    return library


def in_mode(native, bits: int, call):
    """The result of `call` in a mode with these bits, and whether the mode was unchanged afterwards."""
    before = native.get()
    native.set(before | bits)
    try:
        result = call()
        kept = native.get() & bits == bits
    finally:
        native.set(before)
    return result, kept


def denormals() -> np.ndarray:
    return np.full((4, 20_000, 16), 1e-42, np.float32)


def attention() -> list:
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 512, 4, 64)).astype(np.float32)
    halves = [x.astype(np.float16) for x in (q, k, v)]
    return [
        lambda: attnmask.flash_attention(q, k, v, causal=True),
        lambda: attnmask.flash_attention(*halves),
        lambda: attnmask.flash_attention(q[:, :1], k, v),
        lambda: attnmask.flash_attention_vjp(q, k, v, causal=True)[1](q).key,
    ]


def test_denormals_are_sums_again_after_a_call_that_flushed_them(native, set_threads):
    """The threads of a caller that flushes denormals work for the next caller, who does not."""
    set_threads(3)
    values = denormals()
    expected = attnmask.chunk_local_cumsum(values, 64)
    assert expected.all()
    for _ in range(20):
        flushed, kept = in_mode(native, FLUSH, lambda: attnmask.chunk_local_cumsum(values, 64))
        assert kept
        assert (flushed != expected).any() or not INTEL
        for _ in range(3):
            np.testing.assert_array_equal(attnmask.chunk_local_cumsum(values, 64), expected)


@pytest.mark.parametrize("mode", [0, FLUSH, UP, DOWN, TO_ZERO])
def test_the_same_bits_in_any_mode_for_any_number_of_threads(native, set_threads, mode):
    rng = np.random.default_rng(1)
    values = rng.standard_normal((4, 20_000, 16)).astype(np.float32)
    calls = [
        lambda: attnmask.chunk_local_cumsum(values, 64),
        lambda: attnmask.chunk_global_cumsum(values, softmax_scale=0.3),
        lambda: attnmask.chunk_local_cumsum(denormals(), 64, softmax_scale=0.7),
        *attention(),
    ]
    results = []
    for threads in (1, 2, 5):
        set_threads(threads)
        for _ in range(3):
            got = [in_mode(native, mode, call) for call in calls]
            assert all(kept for _, kept in got)
            results.append([result.tobytes() for result, _ in got])
    assert all(result == results[0] for result in results)


def test_rounding_is_the_callers(native, set_threads):
    """Sums that are rounded up are never less than those that are rounded down, and sometimes more."""
    set_threads(3)
    values = np.full((4, 20_000, 16), 0.1)
    up, _ = in_mode(native, UP, lambda: attnmask.chunk_global_cumsum(values))
    down, _ = in_mode(native, DOWN, lambda: attnmask.chunk_global_cumsum(values))
    assert (up >= down).all()
    assert (up > down).any(axis=(1, 2)).all()


@pytest.mark.parametrize("mode", [FLUSH, UP, DOWN, TO_ZERO])
def test_few_queries_over_bytes_in_any_mode(native, isa, mode):
    """The greatest numbers become the greatest integers, and are rounded no further."""
    rng = np.random.default_rng(2)
    query = rng.standard_normal((40, 1, 4, 64)).astype(np.float16)
    caches = [rng.integers(-127, 128, (40, 100, 2, 64)).astype(np.int8) for _ in range(2)]
    scales = {
        name: rng.uniform(0.005, 0.02, (40, 100, 2, 1)).astype(np.float32) for name in ("k_scale", "v_scale")
    }
    expected = attnmask.flash_attention_with_kvcache(query, *caches, **scales)
    got, kept = in_mode(native, mode, lambda: attnmask.flash_attention_with_kvcache(query, *caches, **scales))
    assert kept
    np.testing.assert_allclose(got, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("mode", [FLUSH, UP, TO_ZERO])
def test_masks_know_no_mode(native, set_threads, mode):
    set_threads(3)
    mask = np.random.default_rng(0).random((1, 1, 1024, 1024)) < 0.5
    info = attnmask.MaskInfo.from_attention_mask(mask).apply_causal()
    expected = info.replace().get_or_compute_attention_mask()
    for dtype in (bool, np.float32):
        got, kept = in_mode(
            native, mode, lambda dtype=dtype: info.replace().get_or_compute_attention_mask(dtype)
        )
        assert kept
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("threads", [1, 3])
def test_flags_are_as_before(native, set_threads, threads):
    """For finite and non-finite inputs, flags that were clear stay clear, and flags that were raised stay raised."""
    set_threads(threads)
    rng = np.random.default_rng(0)
    small = rng.standard_normal((1, 8, 2, 16)).astype(np.float32)
    wild = np.full((1, 300, 2, 64), np.inf, np.float32)
    calls = [
        *some_calls(),
        *attention(),
        lambda: attnmask.flash_attention(small, small, small, causal=True),
        lambda: attnmask.flash_attention(wild, wild, wild),
        lambda: attnmask.chunk_local_cumsum(np.full((1, 64, 2), 3e38, np.float32), 64),
    ]
    for index, call in enumerate(calls):
        call()
        native.clear()
        call()
        assert native.raised() == 0, index
    for index, call in enumerate(
        [*some_calls()[:6], *attention()]
    ):  # the others call NumPy, which clears the flags
        native.raise_all()
        before = native.raised()
        call()
        assert native.raised() == before, index
        native.clear()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("mode", [0, UP])
def test_a_signal_handler_runs_in_the_callers_mode(native, set_threads, mode, threads):
    """Gradients flush denormals; a handler that runs meanwhile does not, and may change the mode."""
    set_threads(threads)
    x = np.zeros((1, 1024, 8, 64), np.float32)
    out, vjp = attnmask.flash_attention_vjp(x, x, x)
    control = 0xFFC0 if INTEL else ~0  # without the flags of what has happened
    tiny, one = 5.18e-318, 1.0
    seen = []

    def handler(*_):
        seen.append((native.get() & control, tiny * one))

    before = native.get()
    expected = (before | mode) & control
    native.set(before | mode)
    try:
        with alarm(handler, 0.03, 0.03):
            for _ in range(1000):
                vjp(out)
                if len(seen) > 20:
                    break
        assert native.get() & control == expected
    finally:
        native.set(before)
    assert set(seen) == {(expected, tiny)}


def test_a_signal_handler_may_set_the_mode(native, set_threads):
    """It is that of the caller then, after the call, and of the next one."""
    set_threads(2)
    x = np.zeros((1, 2048, 8, 64), np.float32)
    out, vjp = attnmask.flash_attention_vjp(x, x, x)
    before = native.get()
    rung = []

    def handler(*_):
        native.set(before | UP)
        rung.append(1)

    try:
        with alarm(handler, 0.02):
            while not rung:
                vjp(out)
        assert native.get() & UP
    finally:
        native.set(before)


TRAPS = """
import ctypes
import numpy as np
import attnmask
native = ctypes.CDLL(LIBRARY)
native.set.argtypes, native.get.restype = [ctypes.c_uint], ctypes.c_uint
attnmask.set_num_threads(3)
x = np.random.default_rng(0).standard_normal((1, 512, 4, 64)).astype(np.float32)
before = native.get()
native.trapping()
trapping = native.get()
out = attnmask.flash_attention(x, x, x, causal=True)
kept = native.get() & 0x1f80 == trapping & 0x1f80
native.set(before)
print(kept, np.isfinite(out).all())
"""


@pytest.mark.skipif(not INTEL or SANITIZED, reason="arm64 need not trap")
def test_a_caller_whose_exceptions_trap(native):
    result = python(TRAPS.replace("LIBRARY", repr(native._name)), **import_paths())
    assert result.stdout.split() == ["True", "True"], (result.returncode, result.stderr)
