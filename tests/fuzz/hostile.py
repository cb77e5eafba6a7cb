"""What takes the place of a right argument: the same numbers in an odd form, or something that is wrong.

Each maker is called with the random generator, the right value and the case, and returns what to pass.
"""

import ctypes
import datetime
import mmap
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
from drawing import Arguments, Rng, coin, pick

GUARD = 0xA5  # what fills the bytes around an array
MEMMOVE = ctypes.CDLL(None).memmove
MEMMOVE.argtypes, MEMMOVE.restype = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t), ctypes.c_void_p


class Mischief(Exception):
    """What hostile objects raise."""


# The same numbers in another form: the call must give the same result.


def guarded(value: np.ndarray, offset: int, axis_step: int = 1) -> np.ndarray:
    """A copy inside of a larger buffer, every `axis_step` places of it, at this many bytes from an aligned address."""
    bytes_ = (value.size * axis_step + 8) * value.itemsize + offset
    memory = np.full(bytes_ + 64, GUARD, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    wide = memory[start : start + value.size * axis_step * value.itemsize].view(value.dtype)
    copy = wide[::axis_step].reshape(value.shape)
    copy[...] = value
    return copy


def reversed_axes(rng: Rng, value: np.ndarray) -> np.ndarray:
    back = tuple(slice(None, None, -1) if coin(rng) else slice(None) for _ in value.shape)
    return np.ascontiguousarray(value[back])[back]


def every_other(rng: Rng, value: np.ndarray) -> np.ndarray:
    wide = np.full((*value.shape[:-1], value.shape[-1] * 2), 1, value.dtype)
    wide[..., ::2] = value
    return wide[..., ::2]


def turned(rng: Rng, value: np.ndarray) -> np.ndarray:
    order = rng.permutation(value.ndim)
    return np.ascontiguousarray(value.transpose(order)).transpose(np.argsort(order))


def swapped(rng: Rng, value: np.ndarray) -> np.ndarray:
    return value.astype(value.dtype.newbyteorder("S"))


def mapped(rng: Rng, value: np.ndarray) -> np.ndarray:
    with tempfile.TemporaryFile() as file:
        file.truncate(max(value.nbytes, 1))
        memory = mmap.mmap(file.fileno(), max(value.nbytes, 1))
    copy = np.frombuffer(memory, np.uint8, value.nbytes).view(value.dtype).reshape(value.shape)
    copy[...] = value
    return copy


class Subclass(np.ndarray):
    """Answers nothing but what NumPy itself must ask."""

    def _lie(self, *_: Any) -> Any:
        raise Mischief("a method of a subclass")

    __getitem__ = __len__ = __iter__ = __bool__ = view = reshape = astype = copy = _lie
    shape = strides = ndim = size = dtype = flags = property(_lie)

    def __array_function__(self, *_: Any) -> Any:
        raise Mischief("__array_function__ of a subclass")

    def __array_ufunc__(self, *_: Any, **__: Any) -> Any:
        return NotImplemented

    def __array_finalize__(self, parent: Any) -> None:
        pass


def subclass(rng: Rng, value: np.ndarray) -> np.ndarray:
    return np.ndarray.view(value, Subclass)


class ByArray:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.value


class ByInterface:
    def __init__(self, value: np.ndarray) -> None:
        self.value = value
        self.__array_interface__ = value.__array_interface__


class ByDlpack:
    def __init__(self, value: np.ndarray) -> None:
        self.value = value

    def __dlpack__(self, **options: Any) -> Any:
        return self.value.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.value.__dlpack_device__()


class Index:
    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


def read_only(rng: Rng, value: np.ndarray) -> np.ndarray:
    copy = value.copy()
    copy.flags.writeable = False
    return copy


def of_numpy(rng: Rng, value: np.ndarray) -> bool:
    return value.dtype.num < 24  # others have neither DLPack nor the array interface


LAYOUTS: list[Callable[[Rng, np.ndarray], np.ndarray]] = [
    reversed_axes,
    every_other,
    turned,
    mapped,
    subclass,
    lambda rng, value: guarded(value, 0),
    lambda rng, value: guarded(value, 0, 3),
]
INPUTS: list[Callable[[Rng, np.ndarray], Any]] = [
    swapped,
    read_only,
    lambda rng, value: guarded(value, 1),
    lambda rng, value: ByArray(value),
    lambda rng, value: ByInterface(value) if of_numpy(rng, value) else ByArray(value),
    lambda rng, value: ByDlpack(value) if of_numpy(rng, value) else ByArray(value),
    lambda rng, value: (
        memoryview(value) if of_numpy(rng, value) and value.dtype.char != "e" else value.copy()
    ),
]


def disguise(rng: Rng, value: Any, is_written: bool, subclasses: bool = True) -> Any:
    """The same argument in another form; what a call writes to can have other strides alone."""
    if isinstance(value, np.ndarray) and value.ndim:
        maker = pick(rng, LAYOUTS if is_written or coin(rng) else INPUTS)
        return value if maker is subclass and not subclasses else maker(rng, value)
    if isinstance(value, bool):
        return np.bool_(value)
    if isinstance(value, int):
        return pick(rng, [np.int64(value), Index(value), np.min_scalar_type(value).type(value)])
    if isinstance(value, float):
        return np.float64(value)
    if isinstance(value, type) and issubclass(value, np.generic):
        return np.dtype(value)
    if isinstance(value, list) and value and isinstance(value[0], np.ndarray):
        return tuple(value)
    return value


# Wrong ones


def endless_list() -> list[Any]:
    items: list[Any] = []
    items.append(items)
    return items


def deep_list(depth: int = 100) -> list[Any]:
    items: list[Any] = [1]
    for _ in range(depth):
        items = [items]
    return items


class Raises:
    """Raises whatever it is asked."""

    def _raise(self, *_: Any, **__: Any) -> Any:
        raise Mischief("not today")

    __array__ = __dlpack__ = __dlpack_device__ = __index__ = __int__ = __float__ = __len__ = __getitem__ = (
        _raise
    )
    __iter__ = __bool__ = __eq__ = __hash__ = __call__ = __repr__ = __str__ = _raise  # type: ignore[assignment]


class Lies:
    """Has more items than it says, and each is another one."""

    def __init__(self, length: Any, item: Any) -> None:
        self.length, self.item, self.asked = length, item, 0

    def __len__(self) -> Any:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        self.asked += 1
        if self.asked > 50:
            raise IndexError
        return self.item


class Changes:
    """Another number each time."""

    def __init__(self, *values: Any) -> None:
        self.values = list(values)

    def _next(self, *_: Any) -> Any:
        self.values.append(self.values.pop(0))
        return self.values[-1]

    __index__ = __int__ = __len__ = _next

    def __float__(self) -> float:
        return float(self._next())

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self._next()


class Interface:
    def __init__(self, interface: Any) -> None:
        self.__array_interface__ = interface


JUNK: list[Callable[[], Any]] = [
    lambda: None, lambda: "x", lambda: "", lambda: b"x", lambda: "\udc80", lambda: "float32", lambda: 0, lambda: 1,
    lambda: -1, lambda: 2, lambda: 2**31, lambda: -(2**31) - 1, lambda: 2**40, lambda: 2**62, lambda: 2**63 - 1,
    lambda: 2**63, lambda: 2**64, lambda: -(2**63), lambda: 10**400, lambda: -(10**400), lambda: 0.5, lambda: -0.0,
    lambda: float("nan"), lambda: float("inf"), lambda: -float("inf"), lambda: 1e300, lambda: 1j, lambda: object(),
    dict, lambda: {1: 2}, list, lambda: (), lambda: [[]], lambda: [[1], [1, 2]], lambda: set(),
    lambda: endless_list(), lambda: deep_list(), lambda: Ellipsis, lambda: slice(None), lambda: range(3),
    lambda: (i for i in range(3)), lambda: int, lambda: np.float32, lambda: (lambda *a: a), lambda: True,
    lambda: False, lambda: np.float32(1), lambda: np.int8(-1), lambda: np.uint64(2**64 - 1), lambda: np.bool_(True),
    lambda: np.datetime64("2001-01-01"), lambda: np.timedelta64(1, "s"), lambda: datetime.date(2001, 1, 1),
    lambda: np.void(b"abc"), lambda: np.array(3), lambda: np.array(None), lambda: np.array("x"), lambda: np.array([]),
    lambda: np.array([object()]), lambda: np.array(["x"]), lambda: np.zeros(2, [("a", "f4"), ("b", "i8")]),
    lambda: np.zeros(2, complex), lambda: np.zeros(2, "M8[s]"), lambda: np.zeros((2, 2), np.longdouble),
    lambda: np.zeros((0, 3)), lambda: np.zeros((1,) * 64, np.float32), lambda: np.matrix([[1.0, 2.0]]),
    lambda: np.ma.masked_array([1, 2, 3], [0, 1, 0]),
    lambda: np.rec.array([(1, 2.0)], dtype=[("a", int), ("b", float)]),
    lambda: Raises(), lambda: Lies(3, 1), lambda: Lies(-1, 1), lambda: Lies(2**62, 1.0), lambda: Lies("x", 1),
    lambda: Lies(2, Lies(2, 1)), lambda: Changes(1, 5, -3), lambda: Changes(2, "x"), lambda: Index("x"),
    lambda: Changes(np.zeros((1, 4)), np.zeros((2**8, 1))), lambda: ByArray(None), lambda: ByArray("x"),
    lambda: ByArray(np.zeros(3, object)), lambda: ByArray(ByArray(1)), lambda: memoryview(b"abcd"),
    lambda: bytearray(8),
    lambda: Interface({}), lambda: Interface("x"), lambda: Interface({"version": 3, "shape": (-1,), "typestr": "<f4"}),
    lambda: Interface({"version": 3, "shape": (2**62, 2**62), "typestr": "<f4", "data": b"abcd"}),
    lambda: Interface({"version": 3, "shape": (3,), "typestr": "<f4", "data": b"abcd"}), lambda: NotImplemented,
    lambda: Fraction(1, 3), lambda: type("Number", (int,), {"__index__": lambda self: 7})(3), lambda: (2**62, 2**62),
    lambda: (1, 2, 3), lambda: (None, None), lambda: (-1, 0), lambda: (2**63, 1), lambda: ("x",), lambda: [0, 2**63],
    lambda: (2**31, 2**31, 2**31, 2**31), lambda: (2**63 - 1,) * 4, lambda: (-1, 2, 3, 4), lambda: (0, 2**62, 2**62, 2),
]  # fmt: skip

DTYPES = [
    bool, "i1", "u1", "i2", "u4", "i8", "u8", "f2", "f4", "f8", "g", "F", "D", object, "S3", "U2", "V4",
    "M8[s]", "m8[ns]", ">f4", ">i8",
    ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.int4, [("a", "f4")],
]  # fmt: skip


def other_dtype(rng: Rng, value: np.ndarray) -> np.ndarray:
    dtype = np.dtype(pick(rng, DTYPES))
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            return value.astype(dtype)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            return np.zeros(value.shape, dtype)


def other_shape(rng: Rng, value: np.ndarray) -> np.ndarray:
    shape, kind = list(value.shape), int(rng.integers(6))
    axis = int(rng.integers(max(len(shape), 1)))
    if kind == 0 or not shape:
        shape.insert(axis, int(rng.integers(0, 3)))
    elif kind == 1:
        shape.pop(axis)
    else:
        shape[axis] = [0, 1, shape[axis] + 1, max(shape[axis] - 1, 0)][kind - 2]
    return np.resize(value, shape) if value.size else np.zeros(shape, value.dtype)


def huge(rng: Rng, value: np.ndarray) -> np.ndarray:
    """As long as no memory is, one axis or all, by strides of zero; or long in an axis beside one of length 0."""
    shape = [max(size, 1) for size in value.shape] or [1]
    length = pick(rng, [2**20, 2**31, 2**33, 2**40, 2**61])
    if coin(rng, 0.2):
        shape = [length] * len(shape)
    else:
        shape[int(rng.integers(len(shape)))] = length
    if coin(rng, 0.3):
        shape[int(rng.integers(len(shape)))] = 0
    while float(np.prod(np.array([max(size, 1) for size in shape], float))) * value.itemsize >= 2**63:
        longest = int(np.argmax(shape))
        shape[longest] = max(shape[longest] // 2**10, 1)
    one = value.reshape(-1)[:1].copy() if value.size else np.zeros(1, value.dtype)
    return np.ndarray(shape, one.dtype, one, 0, (0,) * len(shape))


def broadcast(rng: Rng, value: np.ndarray) -> np.ndarray:
    """Of the same shape, with overlapping elements."""
    memory = np.resize(value, value.size + 8)
    strides = tuple(int(rng.integers(0, 2)) * value.itemsize for _ in value.shape)
    sizes = sum((size - 1) * stride for size, stride in zip(value.shape, strides, strict=True) if size)
    if sizes + value.itemsize > memory.nbytes or not value.size:
        return value.copy()
    return np.ndarray(value.shape, value.dtype, memory, 0, strides)


def other_values(rng: Rng, value: np.ndarray) -> np.ndarray:
    copy = value.copy()
    if not copy.size or copy.dtype.kind in "OSUVMm":
        return copy
    places = rng.integers(0, copy.size, int(rng.integers(1, 4)))
    if copy.dtype.kind in "iu":
        limits = np.iinfo(copy.dtype)
        numbers = [limits.min, limits.max, limits.max - 1, -1, 0, 1, 127, 128, 2**31 - 1, 2**31, 2**40]
        number = pick(rng, [n for n in numbers if limits.min <= n <= limits.max])
    else:
        number = pick(rng, [np.nan, np.inf, -np.inf, 3e38, -65504.0, 1e-45, -0.0, -1.0, 5.0])
    with np.errstate(all="ignore"):
        copy.reshape(-1)[places] = np.array(number).astype(copy.dtype)
    return copy


ARRAYS: list[Callable[[Rng, np.ndarray], Any]] = [
    other_dtype,
    other_shape,
    other_shape,
    other_values,
    other_values,
    huge,
    broadcast,
    lambda rng, value: value.tolist() if value.size < 1000 else value,
    lambda rng, value: np.ma.masked_array(value),
    lambda rng, value: value.astype(object),
]


# Objects that change another argument while they are read


class Meddles:
    """Is the right value, and changes other arguments, or itself, when it is read."""

    def __init__(self, rng: Rng, value: Any, others: Arguments) -> None:
        self.rng, self.value, self.others = rng, value, others

    def _meddle(self) -> Any:
        arrays = [
            other
            for other in self.others.values()
            if isinstance(other, np.ndarray) and np.ndarray.nbytes.__get__(other) < 1 << 20
        ]
        lists = [other for other in self.others.values() if isinstance(other, list)]
        with warnings.catch_warnings():  # newer NumPy deprecates setting a shape
            warnings.simplefilter("ignore")
            for other in arrays:
                try:
                    pick(self.rng, CHANGES)(self.rng, other)
                except (ValueError, TypeError, AttributeError, RuntimeError, Mischief):
                    continue
        for other in lists:
            pick(self.rng, [other.clear, other.reverse, lambda other=other: other.extend([1] * 100)])()
        return self.value

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.asarray(self._meddle())

    def __index__(self) -> int:
        return self._meddle()

    def __float__(self) -> float:
        return float(self._meddle())

    def __len__(self) -> int:
        return len(self._meddle())

    def __getitem__(self, index: Any) -> Any:
        return self._meddle()[index]

    def __call__(self, *places: Any) -> Any:
        self._meddle()
        return True


def set_shape(rng: Rng, array: np.ndarray) -> None:
    shapes = [(array.size,), (1, array.size), (array.size, 1, 1, 1), (*array.shape[::-1],), (*array.shape, 1)]
    np.ndarray.shape.__set__(array, pick(rng, shapes))


CHANGES: list[Callable[[Rng, np.ndarray], Any]] = [
    set_shape,
    set_shape,
    lambda rng, array: np.ndarray.dtype.__set__(array, np.dtype(pick(rng, ["i1", "f8", "i4", "f2", ">f4"]))),
    lambda rng, array: np.ndarray.strides.__set__(array, (0,) * len(np.ndarray.shape.__get__(array))),
    lambda rng, array: np.ndarray.resize(array, (3,)),  # which NumPy does where nobody else has the array
    lambda rng, array: np.ndarray.fill(array, pick(rng, [0, 1, -1, 100])),
    lambda rng, array: np.ndarray.setflags(array, write=False),
]


# A second thread that writes to arguments


class Racer:
    """Writes to arrays from another thread, without the GIL, as long as the block takes.

    Each array of numbers goes back and forth between what it holds and noise, such as places far outside.
    """

    def __init__(self, rng: Rng, arrays: list[np.ndarray]) -> None:
        self.jobs = []
        for array in arrays:
            array = np.ndarray.view(array, np.ndarray)
            usual = array.flags.c_contiguous and array.flags.writeable and not array.dtype.hasobject
            if usual and 0 < array.nbytes < 1 << 16:
                right = array.tobytes()
                noise = pick(rng, [rng.bytes(array.nbytes), b"\xff" * array.nbytes, b"\x7f" * array.nbytes])
                self.jobs.append((array, array.ctypes.data, right, noise))
        self.thread = threading.Thread(target=self.write, daemon=True)
        self.stopped = threading.Event()

    def write(self) -> None:
        for turn in range(1 << 20):
            for _, address, right, noise in self.jobs:  # ctypes releases the GIL
                MEMMOVE(address, noise if turn % 2 == 0 else right, len(right))
            if self.stopped.is_set():
                return

    def __enter__(self) -> None:
        self.interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        self.thread.start()

    def __exit__(self, *error: Any) -> None:
        self.stopped.set()
        self.thread.join()
        sys.setswitchinterval(self.interval)
        for _, address, right, _ in self.jobs:
            MEMMOVE(address, right, len(right))


# Two arguments that share memory


def overlap(rng: Rng, value: np.ndarray, other: np.ndarray) -> np.ndarray:
    """An array like `value` inside of the memory of `other`, as far as that is large enough."""
    other = np.ndarray.view(other, np.ndarray)
    plain = (
        other.flags.c_contiguous and other.ndim and not other.dtype.hasobject and not value.dtype.hasobject
    )
    memory = other.reshape(-1).view(np.uint8) if plain else None
    if memory is None or not other.flags.writeable or memory.nbytes < value.nbytes or not value.size:
        return other
    start = int(rng.integers(0, (memory.nbytes - value.nbytes) // value.itemsize + 1)) * value.itemsize
    return memory[start : start + value.nbytes].view(value.dtype).reshape(value.shape)


def break_one(rng: Rng, name: str, arguments: Arguments) -> Any:
    """Something in the place of the argument `name`."""
    value, kind = arguments[name], rng.random()
    arrays = [other for key, other in arguments.items() if isinstance(other, np.ndarray) and key != name]
    if kind < 0.08:
        return Meddles(rng, value, arguments)
    if isinstance(value, np.ndarray) and kind < 0.75:
        if arrays and kind < 0.15:
            return overlap(rng, value, pick(rng, arrays))
        broken = pick(rng, ARRAYS)(rng, value)
        again = isinstance(broken, np.ndarray) and 0 < broken.nbytes < 1 << 20 and coin(rng, 0.2)
        return pick(rng, ARRAYS)(rng, broken) if again else broken
    if isinstance(value, (list, tuple)) and value and kind < 0.6:
        items = list(value)
        place = int(rng.integers(len(items)))
        items[place] = break_one(rng, "item", {"item": items[place]})
        return pick(rng, [items, tuple(items), [*items, items[0]], items[:-1]])
    return pick(rng, JUNK)()
