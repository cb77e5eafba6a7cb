"""Calls a handler of XLA by its binary interface, as XLA's runtime does."""

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_int, c_int64, c_size_t, c_void_p, cast, sizeof
from typing import Any

import ml_dtypes
import numpy as np

from attnmask import _core

LARGEST = 1 << 24  # bytes of an array, which is copied where it is not dense
OTHERS = {np.complex64: 15, ml_dtypes.bfloat16: 16, ml_dtypes.float8_e5m2: 19, ml_dtypes.float8_e4m3fn: 20}
NUMBERS = {np.dtype(letter): number for number, letter in enumerate("?bhilBHILefd", 1)}
NUMBERS |= {np.dtype(dtype): number for dtype, number in OTHERS.items()}
EXECUTE = 3  # a stage
HEAD = [("struct_size", c_size_t), ("extensions", c_void_p)]


class Buffer(Structure):
    _fields_ = [*HEAD, ("dtype", c_int), ("data", c_void_p), ("rank", c_int64), ("shape", POINTER(c_int64))]


class Buffers(Structure):
    _fields_ = [*HEAD, ("count", c_int64), ("types", POINTER(c_int)), ("buffers", POINTER(POINTER(Buffer)))]


class Array(Structure):
    _fields_ = [("dtype", c_int), ("size", c_size_t), ("data", c_void_p)]


class Name(Structure):
    _fields_ = [("text", c_char_p), ("length", c_size_t)]


class Attributes(Structure):
    _fields_ = [
        *HEAD,
        ("count", c_int64),
        ("types", POINTER(c_int)),
        ("names", POINTER(POINTER(Name))),
        ("values", POINTER(c_void_p)),
    ]


class ErrorArguments(Structure):
    _fields_ = [*HEAD, ("message", c_char_p), ("code", c_int)]


CreateError = ctypes.CFUNCTYPE(c_void_p, POINTER(ErrorArguments))


class Api(Structure):
    _fields_ = [
        *HEAD,
        ("version", c_char_p * 3),  # not looked at
        ("internal", c_void_p),
        ("create_error", CreateError),
    ]


class Frame(Structure):
    _fields_ = [
        *HEAD,
        ("api", POINTER(Api)),
        ("context", c_void_p),
        ("stage", c_int),
        ("arguments", Buffers),
        ("results", Buffers),
        ("attributes", Attributes),
    ]


_errors: list[Exception] = []
RESOURCE_EXHAUSTED = 8


@CreateError
def _create_error(arguments: Any) -> int:
    told = arguments.contents
    kind = MemoryError if told.code == RESOURCE_EXHAUSTED else ValueError
    _errors.append(kind(told.message.decode()))
    return 1


_api = Api(sizeof(Api), None, create_error=_create_error)
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = c_void_p, (ctypes.py_object, c_char_p)
_handlers = {
    name.removeprefix("attnmask_"): ctypes.CFUNCTYPE(c_void_p, POINTER(Frame))(_get_pointer(capsule, None))
    for name, capsule in _core.xla_handlers().items()
}


def _dense(value: Any, name: str) -> np.ndarray:
    """The array, or a copy, as XLA has arrays."""
    try:
        if isinstance(value, np.ndarray):
            plain = np.ndarray.view(value, np.ndarray)
        else:
            plain = np.from_dlpack(value) if hasattr(value, "__dlpack__") else np.asarray(value)
        plain = plain.astype(plain.dtype.newbyteorder("="), copy=False)
    except Exception:
        raise TypeError(f"{name} must be an array") from None
    if plain.dtype not in NUMBERS or plain.nbytes > LARGEST:
        raise ValueError(f"{name} must be a small array of a type that XLA has")
    return np.require(plain, requirements="CA")


def _buffers(arrays: list[np.ndarray]) -> Buffers:
    made = [
        Buffer(
            sizeof(Buffer),
            None,
            NUMBERS[array.dtype],
            array.ctypes.data if array.size else None,
            array.ndim,
            (c_int64 * max(array.ndim, 1))(*array.shape),
        )
        for array in arrays
    ]
    count = max(len(made), 1)
    pointers = (POINTER(Buffer) * count)(*map(ctypes.pointer, made))
    return Buffers(sizeof(Buffers), None, len(made), (c_int * count)(*[1] * len(made)), pointers)


def call_handler(
    name: str, words: Any, arguments: dict[str, Any], results: dict[str, Any]
) -> list[np.ndarray]:
    """Call the handler of this name, which writes to `results`. An argument that is a result is written to in place."""
    handler, words = _handlers[name], _dense(words, "words")
    dense = {name: _dense(value, name) for name, value in (arguments | results).items()}
    for name, value in results.items():
        if not isinstance(value, np.ndarray) or not np.ndarray.flags.__get__(value).writeable:
            raise TypeError(f"{name} must be an array to write to")
        dense[name] = dense[name].copy()  # XLA lets it share no memory with the rest
    array = Array(NUMBERS[words.dtype], words.size, words.ctypes.data)
    frame = Frame(
        struct_size=sizeof(Frame),
        api=ctypes.pointer(_api),
        stage=EXECUTE,
        arguments=_buffers([dense[name] for name in arguments]),
        results=_buffers([dense[name] for name in results]),
        attributes=Attributes(
            sizeof(Attributes),
            None,
            1,
            (c_int * 1)(1),
            (POINTER(Name) * 1)(ctypes.pointer(Name(b"words", 5))),
            (c_void_p * 1)(cast(ctypes.pointer(array), c_void_p)),
        ),
    )
    if handler(ctypes.byref(frame)):
        raise _errors.pop()
    for name, value in results.items():
        np.ndarray.__setitem__(value, ..., dense[name])
    return [dense[name] for name in results]
