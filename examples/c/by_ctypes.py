"""Call the C library from Python without the package: by ctypes, on memory of the standard library alone.

Build the library with `make lib`, and run::

    python examples/c/by_ctypes.py build/lib/libattnmask.so
"""

import array
import ctypes
import sys
from math import prod

FLOAT32 = 11


class Array(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("type", ctypes.c_int32),
        ("axes", ctypes.c_int32),
        ("shape", ctypes.c_int64 * 5),
        ("stride", ctypes.c_int64 * 5),
    ]


class Operand(ctypes.Structure):
    _fields_ = [("given", ctypes.c_int32), ("number", ctypes.c_int64), ("array", ctypes.POINTER(Array))]


class Mask(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        *((name, Operand) for name in ("low", "high", "offset")),
        *((name, Array) for name in ("cum_seqlens_q", "cum_seqlens_k")),
        ("nodes", ctypes.c_void_p),
        ("node_count", ctypes.c_int64),
    ]


class Attention(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        *((name, Array) for name in ("query", "key", "value")),
        ("scale", ctypes.c_double),
        ("unnormalized", ctypes.c_int32),
        ("mask", ctypes.POINTER(Mask)),
        ("terms", ctypes.c_void_p),
        ("term_count", ctypes.c_int64),
        *((name, Array) for name in ("out", "lse", "wide_out")),
    ]


Message = ctypes.c_char * 512


def array_of(numbers: array.array, *shape: int) -> Array:
    """Return an array in C order over the memory of `numbers`, which must stay."""
    if len(numbers) != prod(shape):
        raise ValueError(f"{len(numbers)} numbers are not of shape {shape}")
    made = Array(numbers.buffer_info()[0], FLOAT32, len(shape))
    for axis, length in enumerate(shape):
        made.shape[axis] = length
        made.stride[axis] = 4 * prod(shape[axis + 1 :])
    return made


def causal_attention(library: ctypes.CDLL, query: array.array, shape: tuple[int, ...]) -> array.array:
    """Return causal attention of [B, T, H, D] numbers to themselves."""
    out = array.array("f", bytes(4 * len(query)))
    mask, message = Mask(ctypes.sizeof(Mask)), Message()
    mask.high = Operand(1, 0)
    call = Attention(ctypes.sizeof(Attention))
    call.query = call.key = call.value = array_of(query, *shape)
    call.mask, call.out = ctypes.pointer(mask), array_of(out, *shape)
    if library.attnmask_forward(ctypes.byref(call), message):
        raise ValueError(message.value.decode())
    return out


def main(path: str) -> None:
    shape = (1, 6, 1, 2)
    query = array.array("f", (i % 5 / 4 for i in range(prod(shape))))
    out = causal_attention(ctypes.CDLL(path), query, shape)
    for t in range(shape[1]):
        print(f"token {t}: {out[2 * t]:.4f} {out[2 * t + 1]:.4f}")


if __name__ == "__main__":
    main(sys.argv[1])
