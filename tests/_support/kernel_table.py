"""The kernels as functions that Python can call, with signatures read from the header that declares them.

`_core.kernel_table` returns the address of a level's table, and `csrc/kernels/table.h` describes its layout. So a
kernel that is new, or whose arguments change, is known here as soon as it is declared.
"""

import ctypes
import re
from typing import NamedTuple

import numpy as np
import pytest
from environment import ROOT

from attnmask import _core

SCALARS = {
    "bool": ctypes.c_bool,
    "double": ctypes.c_double,
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "ptrdiff_t": ctypes.c_ssize_t,
    "size_t": ctypes.c_size_t,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    "void": None,
}
TYPEDEF = re.compile(
    r"typedef struct \{(?P<members>[^}]*)\} (?P<structure>\w+);"
    r"|typedef (?P<result>\w+) (?P<function>\w+)\((?P<arguments>[^)]*)\);"
    r"|typedef (?P<known>\w+) (?P<alias>\w+);"
    r"|typedef enum \{[^}]*\} (?P<enumeration>\w+);"
)
DECLARATOR = re.compile(r"(?P<pointer>(?:\*(?:const )?)*)(?P<name>\w+)(?:\[(?P<length>.+)\])?")


def read_constants(text: str) -> dict[str, int]:
    """The values of the header's macros and enumerators, by name."""
    constants = {
        name: int(value) for name, value in re.findall(r"#define (\w+) (\d+) *$", text, re.MULTILINE)
    }
    for body in re.findall(r"enum \{([^}]*)\}", text):
        value = -1
        for name, given in re.findall(r"(\w+)(?: = ([^,]+))?", body):
            constants[name] = value = eval(given, {}, constants) if given else value + 1
    return constants


def read_members(members: str, types: dict, constants: dict[str, int]) -> list[tuple[str, type]]:
    fields = []
    for declaration in filter(None, map(str.strip, members.split(";"))):
        base, declarators = re.fullmatch(r"(?:const )?(\w+)\s+(.*)", declaration, re.DOTALL).groups()
        for declarator in declarators.split(","):
            pointer, name, length = DECLARATOR.fullmatch(declarator.strip()).groups()
            is_kernel = issubclass(types.get(base) or object, ctypes._CFuncPtr)
            kind = ctypes.c_void_p if pointer and not is_kernel else types[base]
            if length:
                kind *= eval(length, {}, constants)
            fields.append((name, kind))
    return fields


def named(name: str, signature: type) -> type:
    """The type of functions with the name of its typedef, which ctypes does not give it."""
    own = {key: getattr(signature, key) for key in ("_flags_", "_argtypes_", "_restype_")}
    return type(name, (signature,), own)


def types_of(arguments: str, types: dict) -> list[type]:
    return [
        ctypes.c_void_p if "*" in argument else types[argument.split()[-2]]
        for argument in arguments.split(",")
        if argument != "void"
    ]


def read_types(header: str) -> tuple[dict, dict[str, int]]:
    """ctypes of the header's structures and functions, by name; and its constants."""
    text = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    constants, types = read_constants(text), dict(SCALARS)
    for found in TYPEDEF.finditer(text):
        if found["structure"]:
            fields = read_members(found["members"], types, constants)
            types[found["structure"]] = type(found["structure"], (ctypes.Structure,), {"_fields_": fields})
        elif found["function"]:
            signature = ctypes.CFUNCTYPE(types[found["result"]], *types_of(found["arguments"], types))
            types[found["function"]] = named(found["function"], signature)
        elif found["enumeration"]:
            types[found["enumeration"]] = ctypes.c_int
        else:
            types[found["alias"]] = named(found["alias"], types[found["known"]])
    return types, constants


KERNELS = ROOT / "csrc/kernels"
if not KERNELS.exists():
    pytest.skip("the tests run without the sources in C", allow_module_level=True)
TYPES, CONSTANTS = read_types("".join((KERNELS / name).read_text() for name in ("dtype.h", "table.h")))


def type_of(name: str) -> int:
    """What the core calls the type of keys that NumPy calls so."""
    cached = {"uint8": "int4", "float8_e4m3fn": "float8_e4m3"}
    return CONSTANTS[f"AM_{cached.get(name, name).upper()}"]


def slots_of(kind: type, path: str = "") -> dict[str, str]:
    """The slots of kernels in a type, and the names of their typedefs."""
    if issubclass(kind, ctypes._CFuncPtr):
        return {path: kind.__name__}
    members = []
    if issubclass(kind, ctypes.Structure):
        members = [(f"{path}.{name}".lstrip("."), member) for name, member in kind._fields_]
    if issubclass(kind, ctypes.Array):
        members = [(f"{path}[{i}]", kind._type_) for i in range(kind._length_)]
    return {slot: name for place, member in members for slot, name in slots_of(member, place).items()}


SLOTS = slots_of(TYPES["am_kernels"])


def table_of(level: str):
    address, size = _core.kernel_table(level)
    assert size == ctypes.sizeof(TYPES["am_kernels"]), "the header is not that of the build"
    return TYPES["am_kernels"].from_address(address)


class Kernel(NamedTuple):
    """A kernel of one level. Calling it passes arrays and structures by their addresses."""

    slot: str
    table: ctypes.Structure

    @property
    def function(self):
        """The kernel as a ctypes function; NULL if the level does not have it."""
        found = self.table
        for part in re.findall(r"\w+", self.slot):
            found = found[int(part)] if part.isdigit() else getattr(found, part)
        return found

    @property
    def address(self) -> int | None:
        return ctypes.cast(self.function, ctypes.c_void_p).value

    @property
    def index(self) -> int:
        """The index of an element in an array."""
        return int(re.search(r"\[(\d+)\]", self.slot)[1])

    def __call__(self, *arguments):
        return self.function(*map(passed, arguments))


def address_of(value):
    """The address of an array; anything else is returned as it is."""
    return value.ctypes.data if isinstance(value, np.ndarray) else value


def passed(argument):
    return ctypes.byref(argument) if isinstance(argument, ctypes.Structure) else address_of(argument)


def structure(name: str, **members):
    """One of the header's structures. It holds addresses of arrays, which the caller keeps alive."""
    return TYPES[name](**{key: address_of(value) for key, value in members.items()})


# Memory

GUARD = 256  # bytes
UNTOUCHED = 0xA5


class Memory:
    """Arrays surrounded by bytes that kernels must not change and must not use.

    All bits around inputs and between their rows are set, so that floating-point numbers there are NaN, and others are
    not zero.
    """

    def __init__(self):
        self.arrays = []
        self.kept = []  # structures that others point to

    def place(self, values, step: int | None, shift: int, fill: int, written: bool) -> np.ndarray:
        values = np.asarray(values)
        rows, columns = values.shape if values.ndim == 2 else (1, values.size)
        size = values.itemsize
        step = (columns if step is None else step) * size
        span = max(rows - 1, 0) * abs(step) + columns * size
        memory = np.full(span + 2 * GUARD + 64 + shift * size, fill, np.uint8)
        begin = -memory.ctypes.data % 64 + GUARD + shift * size + max(rows - 1, 0) * max(-step, 0)
        strides = (step, size) if values.ndim == 2 else (size,)
        array = np.ndarray(values.shape, values.dtype, memory, begin, strides)
        array[...] = values
        owned = np.zeros(memory.size, bool)
        np.ndarray((rows, columns * size), bool, owned, begin, (step, 1))[...] = written
        self.arrays.append((memory, memory.copy(), owned))
        return array

    def read(self, values, step: int | None = None, shift: int = 0) -> np.ndarray:
        """An array that a kernel reads: one-dimensional, or rows `step` elements apart.

        It begins `shift` elements after a multiple of 64 bytes.
        """
        return self.place(values, step, shift, 0xFF, False)

    def written(self, values, step: int | None = None, shift: int = 0) -> np.ndarray:
        """The same for an array that a kernel writes."""
        return self.place(values, step, shift, UNTOUCHED, True)

    def check(self, case) -> None:
        for memory, before, owned in self.arrays:
            stray = np.flatnonzero((memory != before) & ~owned)
            assert stray.size == 0, f"wrote to bytes {stray[:8]} of {memory.size} outside its array: {case}"
