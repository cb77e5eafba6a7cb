"""Compares declarations of ours with those of a header that they repeat."""

import shutil
import subprocess

import pytest


def check_declarations(folder, include, headers, structs, values, more=(), beginnings=()) -> None:
    """Sizes, offsets and values, by a compiler that reads both.

    `structs` has, by the name of ours, "theirs; fields", with `ours=theirs` for fields whose names differ. Those in
    `beginnings` have more fields. `values` has their expressions by ours.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    claims = [*more, *(f"(int){ours} == (int){theirs}" for ours, theirs in values.items())]
    for ours, text in structs.items():
        theirs, _, fields = text.partition("; ")
        claims += [f"sizeof({ours}) == sizeof({theirs})"] if ours not in beginnings else []
        for field, _, other in (field.partition("=") for field in fields.split()):
            other = other or field
            claims.append(f"offsetof({ours}, {field}) == offsetof({theirs}, {other})")
            claims.append(f"sizeof((({ours} *)0)->{field}) == sizeof((({theirs} *)0)->{other})")
    lines = ["#include <stddef.h>", *(f"#include {header}" for header in headers)]
    lines += [f'_Static_assert({claim}, "{claim}");' for claim in claims]
    source = folder / "both.c"
    source.write_text("\n".join(lines))
    command = [compiler, "-std=c11", "-fsyntax-only", f"-I{include}", source]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    source.write_text("\n".join(lines).replace("== offsetof(", "== 1 + offsetof("))
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0
