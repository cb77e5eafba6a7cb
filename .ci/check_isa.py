"""Checks the objects of a build: instructions that not every x86-64 processor has stay in the kernels made for them.

    python .ci/check_isa.py build/gcc/temp

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

DISASSEMBLE = ("objdump", "--no-show-raw-insn")

# Registers of AVX and AVX-512; mnemonics of AVX, which all begin with v as only verr and verw did before, and of BMI.
REGISTER = re.compile(r"%[yz]mm\d|%k[0-7]\b|%xmm(?:1[6-9]|2\d|3[01])\b")
MNEMONIC = re.compile(
    r"(?:v(?!er[rw])\w+|andn|bextr|bls(?:i|msk|r)|bzhi|mulx|pdep|pext|rorx|s(?:ar|hl|hr)x)\b"
)


def run(*command: str) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def stray_instructions(path: Path) -> list[str]:
    """The lines of the disassembly that only newer processors could run."""
    found = []
    for line in run(*DISASSEMBLE, "--disassemble", str(path)):
        address, tab, instruction = line.partition(":\t")
        if tab and (REGISTER.search(instruction) or MNEMONIC.match(instruction)):
            found.append(f"{address.strip()}: {instruction}")
    return found


PRODUCT = "add_no_prefetch_f32"


def sums_in_memory(path: Path) -> str | None:
    """Tells if the product's function moves more than a little of what it multiplies and adds by the stack."""
    names = [line.split()[-1] for line in run("nm", str(path))]  # compilers add suffixes
    functions = [name for name in names if name.split(".")[0] == PRODUCT and not name.endswith(".cold")]
    lines = [line for name in functions for line in run(*DISASSEMBLE, f"--disassemble={name}", str(path))]
    sums = sum("vfmadd" in line for line in lines)
    moves = sum("(%rsp" in line or "(%rbp" in line for line in lines)
    return (
        None
        if 4 * moves < sums
        else f"{path}: {PRODUCT} has {sums} sums, and touches the stack {moves} times"
    )


def main(folder: str) -> str | None:
    """What is wrong, or None."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        print("check_isa: only x86-64 has several instruction sets; nothing to check")
        return None
    objects = sorted(Path(folder).rglob("*.o"))
    kernels = [path for path in objects if "kernels" in path.parts and path.parent.name != "baseline"]
    if not any(path.parent.name == "baseline" for path in objects):
        return f"no objects of attnmask in {folder}"
    problems = []
    for path in objects:
        if path in kernels:
            names = {line.split()[-1] for line in run("nm", "--defined-only", "--extern-only", str(path))}
            if not all(name.startswith("am_") and name.endswith(f"_{path.parent.name}") for name in names):
                problems.append(f"{path} defines {', '.join(sorted(names))}")
            if not stray_instructions(path):
                problems.append(f"{path} uses no instruction of its own: was it built with its flags?")
            if path.stem == "flash_f32" and (problem := sums_in_memory(path)):
                problems.append(problem)
        elif stray := stray_instructions(path):
            problems += [f"{path}: {len(stray)} instructions that not every processor has", *stray[:5]]
    if not problems:
        print(
            f"check_isa: {len(kernels)} kernels keep to themselves and to registers, "
            f"{len(objects) - len(kernels)} objects run anywhere"
        )
    return "\n".join(problems) or None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
