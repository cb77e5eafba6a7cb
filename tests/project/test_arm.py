"""What benchmarks/arm.py models of the loops on Arm, where compilers and llvm-mca are."""

import re
import runpy
import subprocess
import sys

import pytest
from environment import ROOT

SCRIPT = ROOT / "benchmarks" / "arm.py"
pytestmark = [
    pytest.mark.skipif(not SCRIPT.exists(), reason="the tests run without the benchmarks"),
    pytest.mark.levels("once"),
]


def test_without_the_packages():
    result = subprocess.run(
        [sys.executable, SCRIPT], env={"PATH": "/nonexistent"}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"arm: skipped, as there is no llvm-mca: apt install .*\n", result.stdout)


def models_of(name: str, *loops: str) -> list:
    """The models of some loops by a compiler."""
    arm = runpy.run_path(str(SCRIPT))
    mca, compiler = arm["newest"]("llvm-mca"), arm["compilers"]().get(name)
    if not mca or not compiler or not arm["understands"](compiler):
        pytest.skip(f"needs {name} for aarch64 and llvm-mca")
    if int(re.search(r"version (\d+)", arm["run"]([mca, "--version"], ""))[1]) < 17:
        pytest.skip("llvm-mca before version 17 knows no pipelines of Neoverse V1")
    known = {loop.name: loop for loop in arm["LOOPS"]}
    return [arm["model"](mca, "neoverse-v1", compiler, known[loop]) for loop in loops]


@pytest.mark.parametrize("name", ["GCC", "Clang"])
def test_products_fill_the_pipelines(name):
    """None is spilled, and bfloat16 takes less than 0.4 of the cycles."""
    models = models_of(name, "float32, packed", "linear attention")
    of_bf16 = models_of(
        name,
        *(f"neonbf16, {loop}" for loop in ("packed", "transposed", "values of twelve", "linear attention")),
    )
    assert all(at.share > 0.9 for at in models), models
    assert all(models[0].cycles > 2.5 * at.cycles for at in of_bf16), (models, of_bf16)


@pytest.mark.parametrize("name", ["GCC", "Clang"])
@pytest.mark.parametrize("loop", ["int8, keys of a query", "int8, values"])
def test_dot_products_of_bytes_take_a_fraction(name, loop):
    floats, integers = models_of(name, loop, f"neondot, {loop}")
    assert floats.cycles > 4 * integers.cycles, (floats, integers)
