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


@pytest.mark.parametrize("name", ["GCC", "Clang"])
def test_products_fill_the_pipelines(name):
    """None is spilled, and bfloat16 takes half of the cycles."""
    arm = runpy.run_path(str(SCRIPT))
    mca, compiler = arm["newest"]("llvm-mca"), arm["compilers"]().get(name)
    if not mca or not compiler or not arm["understands"](compiler):
        pytest.skip(f"needs {name} for aarch64 and llvm-mca")
    if int(re.search(r"version (\d+)", arm["run"]([mca, "--version"], ""))[1]) < 17:
        pytest.skip("llvm-mca before version 17 knows no pipelines of Neoverse V1")
    loops = {loop.name: loop for loop in arm["LOOPS"]}
    names = "float32, packed", "linear attention", "neonbf16, packed"
    models = [arm["model"](mca, "neoverse-v1", compiler, loops[name]) for name in names]
    assert all(at.share > 0.9 for at in models), models
    assert models[0].cycles > 1.9 * models[2].cycles, models
