"""Checks the objects of a build: instructions that not every processor has stay in the kernels made for them.

    python .ci/check_isa.py build/gcc/temp

The objects may be those of another machine, if its objdump is installed.

One stray vector instruction outside them is a crash on the processors that lack it, and only there. For the same
reason what such a kernel's object offers to others, its table and some functions, has the level in its name: else a
function of that name in another object could be the copy that the linker keeps.

And the sums of the product that attention is made of stay in registers: compilers that put them in memory make it
several times slower, and nothing else tells.
"""

import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple


class Machine(NamedTuple):
    """How to read objects for a processor."""

    name: str
    tools: str  # what the names of programs begin with on other machines
    newer: re.Pattern  # instructions that not every processor has
    sums: re.Pattern  # what multiplies and adds at once
    at_baseline: bool  # whether any processor does
    stack: re.Pattern  # an address on the stack

    def run(self, tool: str, *arguments: str) -> list[str]:
        here = platform.machine().lower()
        prefix = "" if {"amd64": "x86_64", "arm64": "aarch64"}.get(here, here) == self.name else self.tools
        command = (prefix + tool, *arguments)
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()

    def disassemble(self, *arguments: str) -> list[str]:
        return self.run("objdump", "--no-show-raw-insn", *arguments)


# Registers of AVX and AVX-512; mnemonics of AVX, which all begin with v as only verr and verw did before, and of BMI.
AVX = r"(?:v(?!er[rw])\w+|andn|bextr|bls(?:i|msk|r)|bzhi|mulx|pdep|pext|rorx|s(?:ar|hl|hr)x)\b"
AVX += r"|.*(?:%[yz]mm\d|%k[0-7]\b|%xmm(?:1[6-9]|2\d|3[01])\b)"
# Instructions newer than Armv8.0: dot products, bfloat16, float16, atomics, SVE.
NEWER_THAN_V8 = (
    r"(?:bf\w*(?:dot|mlal|mmla|cvt)\w*|[us]{1,2}(?:dot|mmla)|fcadd|fcmla|fmlal2?|cas|ldadd|swp|ptrue)\b"
)
NEWER_THAN_V8 += r"|f(?!cvt|mov\s+[hw])\w+\s+(?:v\d+\.[48]h|h\d)"
MACHINES = {  # by the machine's number in ELF
    0x3E: Machine(
        name="x86_64",
        tools="x86_64-linux-gnu-",
        newer=re.compile(AVX),
        sums=re.compile("vfmadd|vdpbf16"),
        at_baseline=False,
        stack=re.compile(r"\(%r[sb]p"),
    ),
    0xB7: Machine(
        name="aarch64",
        tools="aarch64-linux-gnu-",
        newer=re.compile(NEWER_THAN_V8),
        sums=re.compile("fmla|bfdot|bfmmla"),
        at_baseline=True,
        stack=re.compile(r"\[(?:sp|x29)\b"),
    ),
}


def machine_of(path: Path) -> Machine | None:
    header = path.read_bytes()[:20]
    return MACHINES.get(int.from_bytes(header[18:20], "little")) if header[:4] == b"\x7fELF" else None


def stray_instructions(machine: Machine, path: Path) -> list[str]:
    """The lines of the disassembly that only newer processors could run."""
    found = []
    for line in machine.disassemble("--disassemble", str(path)):
        address, tab, instruction = line.partition(":\t")
        if tab and machine.newer.match(instruction):
            found.append(f"{address.strip()}: {instruction}")
    return found


# Object -> the function of its product.
PRODUCTS = {"flash_f32": "add_no_prefetch_f32", "flash_bf16x2": "add_no_prefetch_bf16x2"}


def sums_in_memory(machine: Machine, path: Path) -> str | None:
    """Tells if the product's function moves more than a little of what it multiplies and adds by the stack."""
    names = [line.split()[-1] for line in machine.run("nm", str(path))]  # compilers add suffixes
    product = PRODUCTS[path.stem]
    functions = [name for name in names if name.split(".")[0] == product and not name.endswith(".cold")]
    lines = [line for name in functions for line in machine.disassemble(f"--disassemble={name}", str(path))]
    sums = sum(machine.sums.search(line) is not None for line in lines)
    moves = sum(machine.stack.search(line) is not None for line in lines)
    return (
        None
        if 4 * moves < sums
        else f"{path}: {product} has {sums} sums, and touches the stack {moves} times"
    )


def main(folder: str) -> str | None:
    """What is wrong, or None."""
    objects = sorted(Path(folder).rglob("*.o"))
    machine = machine_of(objects[0]) if objects else None
    if objects and not machine:
        print("check_isa: nothing is known of this machine's objects; nothing to check")
        return None
    kernels = [path for path in objects if "kernels" in path.parts and path.parent.name != "baseline"]
    if not any(path.parent.name == "baseline" for path in objects):
        return f"no objects of attnmask in {folder}"
    problems = []
    for path in objects:
        if path in kernels:
            names = {
                line.split()[-1] for line in machine.run("nm", "--defined-only", "--extern-only", str(path))
            }
            if not all(name.startswith("am_") and name.endswith(f"_{path.parent.name}") for name in names):
                problems.append(f"{path} defines {', '.join(sorted(names))}")
            if not stray_instructions(machine, path):
                problems.append(f"{path} uses no instruction of its own: was it built with its flags?")
        elif stray := stray_instructions(machine, path):
            problems += [f"{path}: {len(stray)} instructions that not every processor has", *stray[:5]]
        multiplies = path.stem in PRODUCTS and (path in kernels or machine.at_baseline)
        if multiplies and (problem := sums_in_memory(machine, path)):
            problems.append(problem)
    if not problems:
        print(
            f"check_isa: {len(kernels)} kernels keep to themselves and to registers, "
            f"{len(objects) - len(kernels)} objects run anywhere"
        )
    return "\n".join(problems) or None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
