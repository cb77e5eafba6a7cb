"""Models how fast the innermost loops of the kernels are on Arm, on a machine that has none.

Compiles them for aarch64 by each compiler that is installed, and asks llvm-mca how long a core takes for the loop that
multiplies most. Nothing is timed: the model knows the core's pipelines, and neither caches nor memory nor the loops
around. It tells whether a change lets a compiler spill or widen one byte at a time, and about by how much.

For each loop and compiler the table has, for a thousand products of two numbers that are added up, instructions,
cycles, and what share of the products the core could start in these cycles if it did nothing else.

    apt install gcc-aarch64-linux-gnu clang llvm
    python benchmarks/arm.py --core neoverse-v1
"""

import argparse
import functools
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

ROOT = Path(__file__).parents[1]
NEEDS = "apt install gcc-aarch64-linux-gnu clang llvm, or newer ones such as clang-19 and llvm-19"
CORES = {  # how many vectors it multiplies and adds in a cycle
    "neoverse-v1": 4,
    "neoverse-n1": 2,
    "neoverse-n2": 2,
    "neoverse-v2": 4,
    "apple-m1": 4,
}
# Instruction -> numbers that it multiplies and adds to others, by the type of its lanes. Two sdot multiply sixteen
# numbers, one by their high bytes and one by the low ones.
PRODUCTS = {"fmla": {"4s": 4, "2d": 2}, "bfdot": {"4s": 8}, "bfmmla": {"4s": 16}, "sdot": {"4s": 8}}
ITERATIONS = 100

F32, I8, F8 = (f"kernels/attention/{name}.h" for name in ("flash_f32", "formats/kv_i8", "formats/kv_f8"))
BF16, BF16X2 = (f"kernels/attention/{name}.h" for name in ("formats/kv_bf16", "flash_bf16x2"))
I16X2 = "kernels/attention/formats/kv_i16x2.c"
BF16X2_KEYS = "kernels/attention/formats/kv_bf16x2.c"
LINEAR, LINEAR_BF16X2 = (f"kernels/linear/{name}" for name in ("linear_f32.h", "linear_bf16x2.c"))


class Loop(NamedTuple):
    """A function of some templates with the arguments that its callers give it."""

    name: str
    header: str
    parameters: str
    call: str
    level: str = "baseline"


def packed(suffix: str, lines: int = 0) -> tuple[str, str]:
    """The product of twelve rows and a packed panel, which prefetches `lines` with each row of the panel."""
    how = f"(reading_{suffix}){{.lines = {lines}, .prefetch = lines}}"
    call = f"x.a_column = 1, product_of_{suffix}(12, 2, x, {how}, true)"
    return f"operands_{suffix} x, prefetch_lines *lines", call


def keys(suffix: str, rows: int, number: int) -> tuple[str, str]:
    """Rows of queries times some unpacked keys."""
    call = f"vf own[32]; multiply_{suffix}({rows}, {number}, x, {number - 1}, own, lines, true)"
    call += f"; UNROLL(64) for (int i = 0; i < {rows * number}; i++) sums[i] = own[i]"
    return f"factors_{suffix} x, vf *sums, prefetch_lines *lines", call


def transposed(suffix: str) -> tuple[str, str]:
    """The same product of columns of the left factor, as in gradients."""
    call = f"product_of_{suffix}(12, 2, x, (reading_{suffix}){{.lines = 0}}, true)"
    return f"operands_{suffix} x", f"x.a_row = 1, x.a_column = 2 * AM_FLASH_TILE, {call}"


def linear(suffix: str) -> tuple[str, str]:
    """A tile of linear attention's products."""
    return "const product_f32 *p, ptrdiff_t end", f"tile_{suffix}(p, 0, 0, 0, end, 6, 4)"


def values(suffix: str, rows: int = 1, vectors: int = 4) -> tuple[str, str]:
    """Rows of weights times unpacked values."""
    how = f"(reading_{suffix}){{.lines = 2, .prefetch = lines, .runs = true}}"
    return (
        f"operands_{suffix} x, prefetch_lines *lines",
        f"x.a_column = 1, product_of_{suffix}({rows}, {vectors}, x, {how}, true)",
    )


LOOPS = [
    Loop("float32, packed", F32, *packed("f32")),
    Loop("float32, prefetching", F32, *packed("f32", 1)),
    Loop("linear attention", LINEAR, *linear("f32")),
    Loop("int8, keys of a query", I8, *keys("i8", 1, 8)),
    Loop("int8, keys of four", I8, *keys("i8", 4, 4)),
    Loop("int8, values", I8, *values("i8")),
    Loop("bfloat16, keys of a query", BF16, *keys("bf16", 1, 8)),
    Loop("bfloat16, keys of four", BF16, *keys("bf16", 4, 4)),
    Loop("bfloat16, values", BF16, *values("bf16")),
    Loop("float8, keys of a query", F8, *keys("f8", 1, 8)),
    Loop("neondot, int8, keys of a query", I16X2, *keys("i16x2", 2, 8), "neondot"),
    Loop("neondot, int8, keys of two", I16X2, *keys("i16x2", 4, 4), "neondot"),
    Loop("neondot, int8, values", I16X2, *values("i16x2", 2), "neondot"),
    Loop("neonbf16, packed", BF16X2, *packed("bf16x2"), "neonbf16"),
    Loop("neonbf16, transposed", BF16X2, *transposed("bf16x2"), "neonbf16"),
    Loop("neonbf16, values of twelve", BF16X2, *values("interleaved", 12, 2), "neonbf16"),
    Loop("neonbf16, linear attention", LINEAR_BF16X2, *linear("bf16x2"), "neonbf16"),
    Loop("neonbf16, keys of a query", BF16X2_KEYS, *keys("bf16x2", 1, 8), "neonbf16"),
]


class Model(NamedTuple):
    """A loop, per product; and of how many a core could start in these cycles the share that it does."""

    instructions: float
    cycles: float
    share: float


def newest(*names: str) -> str | None:
    """The first of some programs that is installed, those with a version's number first."""
    numbered = [f"{name}-{version}" for name in names for version in range(30, 11, -1)]
    return next((found for name in (*numbered, *names) if (found := shutil.which(name))), None)


def compilers() -> dict[str, list[str]]:
    commands = {
        "GCC": [newest("aarch64-linux-gnu-gcc")],
        "Clang": [newest("clang"), "--target=aarch64-linux-gnu"],
    }
    return {name: command for name, command in commands.items() if command[0]}


@functools.cache
def succeeds(*command: str) -> bool:
    return (
        subprocess.run(command, input="#include <string.h>\n", capture_output=True, text=True).returncode == 0
    )


def understands(compiler: list[str], *flags: str) -> bool:
    """Return True if the compiler supports these flags, and finds the C library's headers for Arm."""
    return succeeds(*compiler, *flags, "-Werror", "-x", "c", "-S", "-o", "/dev/null", "-")


def flags_of(compiler: list[str], level: str) -> list[str]:
    """Those of the build."""
    with mock.patch("setuptools.setup"):
        setup = runpy.run_path(str(ROOT / "setup.py"))
    rules = setup["RULES"]
    known = (*rules["FLAGS_ARM"], *rules["FLAGS_NO_PRE"], *rules["FLAGS_ALIGNED"])
    own = [*rules.get(f"FLAGS_{level}", []), f"-DLEVEL={level}", f"-I{ROOT / 'csrc'}"]
    flags = [*rules["CFLAGS_CORE"], *rules["CFLAGS_KERNELS"]]
    return [*flags, "-O2", "-fPIC", *(flag for flag in known if understands(compiler, flag)), *own]


def run(command: list[str], text: str) -> str:
    result = subprocess.run(command, input=text, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"arm: {' '.join(command)}\n{result.stderr}")
    return result.stdout


def assembly(compiler: list[str], loop: Loop) -> str:
    source = f'#include "{loop.header}"\nvoid probe({loop.parameters}) {{ {loop.call}; }}\n'
    return run([*compiler, *flags_of(compiler, loop.level), "-S", "-x", "c", "-o", "-", "-"], source)


def products_of(instruction: str) -> int:
    match = re.match(r"\t(\w+)\s+v\d+\.(\w+)", instruction)
    return PRODUCTS.get(match[1], {}).get(match[2], 0) if match else 0


class Block(NamedTuple):
    """Instructions that run one after the other, and the places of the blocks that may be next."""

    code: list[str]
    next: list[int]


def blocks_of(function: list[str]) -> list[Block]:
    labels: dict[str, int] = {}
    codes: list[list[str]] = [[]]
    for line in (line.split("//")[0].rstrip() for line in function):
        if line.startswith(".L"):
            codes += [[]] if codes[-1] else []
            labels[line.partition(":")[0]] = len(codes) - 1
        elif re.match(r"\t[a-z]", line):
            codes[-1].append(line)
            codes += [[]] if re.match(r"\t(b|b\..*|cbn?z|tbn?z|ret|br)\t?", line) else []
    blocks = []
    for i, code in enumerate(codes):
        last = code[-1] if code else ""
        branch = re.match(r"\t(b|b\.\w+|b\w\w|cbn?z|tbn?z)\t(?:.*, *)?(\.L\w+)", last)
        ends = re.match(r"\t(ret|br|b)(\t|$)", last)
        after = ([labels[branch[2]]] if branch else []) + ([] if ends or i + 1 == len(codes) else [i + 1])
        blocks.append(Block(code, after))
    return blocks


def order_of(blocks: list[Block]) -> dict[int, int]:
    """Numbers such that only ways back lead to a lower one."""
    order: dict[int, int] = {}
    left, seen = [(0, False)], set()
    while left:
        at, is_done = left.pop()
        if is_done:
            order[at] = -len(order)
        elif at not in seen:
            seen.add(at)
            left += [(at, True), *((i, False) for i in blocks[at].next)]
    return order


def loops_of(blocks: list[Block]) -> Iterator[list[str]]:
    """Return the instructions of one iteration: of the loop that multiplies most, or of two such the shorter one."""
    order = order_of(blocks)

    def cost(code: list[str]) -> tuple[int, int]:
        return -sum(map(products_of, code)), len(code)

    @functools.cache
    def best(at: int, first: int) -> list[str] | None:
        """From a block back to the first one of its loop."""
        ways = [[]] if first in blocks[at].next else []
        further = [best(i, first) for i in blocks[at].next if order[i] > order[at]]
        ways += [code for code in further if code is not None]
        return blocks[at].code + min(ways, key=cost) if ways else None

    for first in order:
        if code := best(first, first):
            yield code


def innermost(text: str) -> list[str]:
    """The instructions of the loop that multiplies most for each of them."""
    function = text.partition("\nprobe:")[2].partition("\n\t.size\tprobe")[0].splitlines()
    return max(loops_of(blocks_of(function)), key=lambda code: sum(map(products_of, code)) / len(code))


def model(mca: str, core: str, compiler: list[str], loop: Loop) -> Model:
    code = innermost(assembly(compiler, loop))
    options = [
        "-mtriple=aarch64",
        f"-mcpu={core}",
        "-mattr=+bf16,+i8mm,+dotprod",
        f"-iterations={ITERATIONS}",
    ]
    said = run([mca, *options], "\n".join(code))
    cycles = int(re.search(r"Total Cycles: +(\d+)", said)[1]) / ITERATIONS
    products, at_once = sum(map(products_of, code)), max(map(products_of, code))
    if not products:
        sys.exit(f"arm: no loop of {loop.name} multiplies")
    return Model(len(code) / products, cycles / products, products / (cycles * CORES[core] * at_once))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--core", choices=CORES, default="neoverse-v1")
    core = parser.parse_args().core
    mca = newest("llvm-mca")
    found = {name: command for name, command in compilers().items() if understands(command)}
    if not mca or not found:
        print(f"arm: skipped, as there is no {'compiler for aarch64' if mca else 'llvm-mca'}: {NEEDS}")
        return
    print(f"Modelled by {Path(mca).name} for {core}, not timed; per 1,000 products that are added up.\n")
    print(" " * 30 + "".join(f"{name:>8}: instr.   cycles  of peak" for name in found))
    for loop in LOOPS:
        row = f"{loop.name:30}"
        for compiler in found.values():
            at = model(mca, core, compiler, loop)
            row += f"{at.instructions * 1000:16.0f}{at.cycles * 1000:9.0f}{at.share:9.0%}"
        print(row, flush=True)


if __name__ == "__main__":
    main()
