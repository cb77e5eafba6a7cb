"""The C library for tests: its header as classes of ctypes, and arrays of NumPy as the library takes them.

Structs, enums and functions are read from include/attnmask.h, so that nothing here repeats it.
"""

import ctypes
import fcntl
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from environment import ROOT

from attnmask._common.types import Array
from attnmask._masks.program import Program

HEADER = ROOT / "include/attnmask.h"
BUILD = ROOT / os.environ.get("ATTNMASK_C_LIBRARY", "build/lib")

needs_make = pytest.mark.skipif(
    not (shutil.which("make") and HEADER.exists() and shutil.which(os.environ.get("CC", "cc"))),
    reason="the C library is built by make and a C compiler, of the sources",
)

TEXT = HEADER.read_text() if HEADER.exists() else ""
_CODE = re.sub(r"/\*.*?\*/|^ *#.*?$(?<!\\)", "", TEXT, flags=re.S | re.M)
_TYPES: dict[str, Any] = {
    "size_t": ctypes.c_size_t,
    "double": ctypes.c_double,
    "char": ctypes.c_char,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
}


def _read_enums() -> dict[str, dict[str, int]]:
    found = re.findall(r"typedef enum \{(.*?)\} (\w+);", _CODE, re.S)
    return {
        name: {one.strip(): i for i, one in enumerate(names.strip(" \n,").split(","))}
        for names, name in found
    }


def _fields(lines: str) -> Iterator[tuple[str, Any]]:
    for line in lines.split(";"):
        if not line.strip():
            continue
        kind, names = re.fullmatch(r"\s*(?:const )?(\w+)(.*)", line, re.S).groups()
        for name in names.split(","):
            pointer, own, length = re.fullmatch(r"\s*(\*?)(\w+)(?:\[(\d+)\])?", name).groups()
            of = (
                ctypes.c_char_p
                if pointer and kind == "char"
                else ctypes.c_void_p
                if pointer
                else _TYPES[kind]
            )
            yield own, of * int(length) if length else of


def _read_structs() -> dict[str, type[ctypes.Structure]]:
    for lines, name in re.findall(r"typedef struct \{(.*?)\} (\w+);", _CODE, re.S):
        _TYPES[name] = type(name, (ctypes.Structure,), {"_fields_": list(_fields(lines))})
    return {name: of for name, of in _TYPES.items() if name.startswith("attnmask_")}


def _read_operands() -> dict[str, list[str]]:
    """Return the names that the header gives to the operands of each kind of node."""
    lines = re.search(r"typedef enum \{([^}]*)\} attnmask_kind;", TEXT)
    found = re.findall(r"(ATTNMASK_\w+), +/\* ((?:\w+, )*\w+):", lines.group(1) if lines else "")
    return {kind: names.split(", ") for kind, names in found}


OPERANDS = _read_operands()
ENUMS = _read_enums()
STRUCTS = _read_structs()
FUNCTIONS = sorted(re.findall(r"ATTNMASK_API \w+ (\w+)\(", _CODE))
_NUMBERS = {name: number for enum in ENUMS.values() for name, number in enum.items()}
_DTYPES = {
    name.removeprefix("ATTNMASK_").lower(): number for name, number in ENUMS.get("attnmask_type", {}).items()
}
_DTYPES |= {"float8_e4m3fn": _DTYPES.get("float8_e4m3")}


def built() -> Path:
    """Builds the library where it is not current, one process at a time, and returns the folder."""
    BUILD.parent.mkdir(exist_ok=True)
    with open(BUILD.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if "ATTNMASK_C_LIBRARY" not in os.environ:
            subprocess.run(["make", "-s", "lib"], cwd=ROOT, check=True, env=os.environ | {"MAKEFLAGS": ""})
    return BUILD


@cache
def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(built() / "libattnmask.so"))


def number(name: str) -> int:
    """The number of a constant of the header, without its prefix."""
    return _NUMBERS[f"ATTNMASK_{name}"]


def struct(name: str, **fields: Any) -> ctypes.Structure:
    """A struct by its name without the prefix, with its size, if it begins with that. Arrays of NumPy become those of
    the library.
    """
    of = STRUCTS[f"attnmask_{name}"]
    made = of()
    made.arrays, made.alive = fields, []
    if of._fields_[0][0] == "size":
        made.size = ctypes.sizeof(of)
    for field, value in fields.items():
        kind = dict(of._fields_)[field]
        if kind is STRUCTS["attnmask_array"]:
            value = array(value)
        elif kind is STRUCTS["attnmask_operand"]:
            value = operand(value)
        elif kind is ctypes.c_void_p and value is not None:
            made.alive.append(value)
            value = ctypes.addressof(value)
        setattr(made, field, value)
        made.alive.append(value)
    return made


def array(given: Array | None) -> ctypes.Structure:
    made = STRUCTS["attnmask_array"]()
    if given is None or isinstance(given, ctypes.Structure):
        return made if given is None else given
    made.data, made.type, made.axes = given.ctypes.data, _DTYPES[given.dtype.name], given.ndim
    made.shape[: given.ndim], made.stride[: given.ndim] = given.shape, given.strides
    made.alive = given
    return made


def operand(given: Any) -> ctypes.Structure:
    made = STRUCTS["attnmask_operand"]()
    if isinstance(given, np.ndarray | ctypes.Structure):
        made.alive = array(given)
        made.given, made.array = 2, ctypes.addressof(made.alive)
    elif given is not None:
        made.given, made.number = 1, int(given)
    return made


def nodes(program: Program) -> tuple[ctypes.Array, int, list[Any]]:
    """The nodes of a program of attnmask._masks, their number, and what they point to."""
    made = (STRUCTS["attnmask_node"] * max(len(program), 1))()
    kept = []
    for node, term in zip(made, program, strict=False):
        kind, *operands = (term,) if isinstance(term, str) else term
        node.kind = number(kind.upper())
        for i, given in enumerate(operands):
            kept.append(operand(given))
            node.operand[i] = kept[-1]
    return made, len(program), kept


def mask(program: Program = (), **fields: Any) -> ctypes.Structure:
    made, count, kept = nodes(program)
    given = struct("mask", node_count=count, **fields)
    given.nodes = ctypes.addressof(made)
    given.alive += [made, kept]
    return given


def terms(*given: dict[str, Any]) -> dict[str, Any]:
    """The fields of a call that hold its terms, each given by its kind and fields."""
    made = [struct("term", **{**term, "kind": number(term["kind"])}) for term in given]
    together = (STRUCTS["attnmask_term"] * max(len(made), 1))(*made)
    together.alive = made
    return {"terms": together, "term_count": len(made)}


def call(function: str, *arguments: Any) -> None:
    """Calls a function, and raises ValueError with the name of the status and the message unless that is OK."""
    message = STRUCTS["attnmask_message"]()
    of = getattr(library(), f"attnmask_{function}")
    status = of(
        *(a if a is None or isinstance(a, int) else ctypes.byref(a) for a in arguments), ctypes.byref(message)
    )
    names = {number: name for name, number in ENUMS["attnmask_status"].items()}
    if status:
        raise ValueError(f"{names[status]}: {message.text.decode()}")
    assert message.text == b""
