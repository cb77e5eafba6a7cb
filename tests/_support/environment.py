"""Where the tests run: the processor, sanitizers, other processes, signals."""

import contextlib
import ctypes
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

import attnmask
from attnmask import _core

ROOT = Path(__file__).parents[2]


X86_LEVELS = ("baseline", "avx2", "avx512", "avx512vnni", "avx512bf16", "amx")
ARM_LEVELS = ("baseline", "neondot", "neonbf16")
ISA_LEVELS = ARM_LEVELS if platform.machine().lower() in ("aarch64", "arm64") else X86_LEVELS
# Sanitizers change times and the use of memory, so neither is tested under them.
ASAN, TSAN = (name in os.environ.get("LD_PRELOAD", "") for name in ("asan", "tsan"))
SANITIZED = ASAN or TSAN
# What tests ask of the core beside what the package calls, which a release lacks (setup.py).
DOORS = ("attention_schedule", "backward_schedule", "best_isa", "chosen_kernels", "kernel_table")
HAS_DOORS = all(hasattr(_core, name) for name in DOORS)
with_doors = pytest.mark.skipif(
    not HAS_DOORS, reason="a release has no doors for tests; builds in place have"
)


def multiplies_bf16(isa) -> bool:
    """Whether a level multiplies bfloat16, as those do that have it, and in builds for tests others too."""
    if not HAS_DOORS:
        return isa in ("avx512bf16", "amx")
    from kernel_table import table_of

    table = table_of(isa)
    return table.flash_bf16x2.panel > 0 or table.flash_amx.panel > 0


CONFIG = attnmask.show_config(mode="dict")
with_threads = pytest.mark.skipif(CONFIG["openmp"] is None, reason="built without OpenMP: one thread")
without_sanitizer = pytest.mark.skipif(SANITIZED, reason="a sanitizer has its own time and memory")


def python(code: str, *flags: str, timeout: float = 60, **environment: str) -> subprocess.CompletedProcess:
    """Runs `code` in a new interpreter, and ends all of its children."""
    own = ("ATTNMASK_ISA", "ATTNMASK_NUM_THREADS", "OMP_NUM_THREADS")
    kept = {name: value for name, value in os.environ.items() if name not in own}
    command = [sys.executable, *flags, "-c", code]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=kept | environment, start_new_session=True, **pipes) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"still running after {timeout} s:\n{code}")
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def compiled(folder: Path, source: str, *flags: str) -> ctypes.CDLL:
    """A library of C. The test is skipped where the compiler does not take these flags."""
    compiler = shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0])
    command = [compiler or "cc", "-shared", "-fPIC", *flags, "library.c", "-o", "library.so", "-lm"]

    def compile_text(text: str) -> subprocess.CompletedProcess:
        (folder / "library.c").write_text(text)
        return subprocess.run(command, cwd=folder, capture_output=True, text=True)

    if not compiler or compile_text("int nothing;\n").returncode:
        pytest.skip(f"needs a C compiler that takes {flags}")
    made = compile_text(source)
    assert made.returncode == 0, made.stderr
    return ctypes.CDLL(str(folder / "library.so"))


def import_paths() -> dict[str, str]:
    """What makes another process find the modules that this one finds."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def run_apart(*functions) -> None:
    """Calls functions of a test file in a process of their own, for what may end it."""
    calls = "; ".join(f"tests[{function.__name__!r}]()" for function in functions)
    file = functions[0].__code__.co_filename
    code = f"import runpy; tests = runpy.run_path({file!r}); {calls}"
    result = python(code, timeout=600, **import_paths())
    assert result.returncode == 0, (result.returncode, result.stderr[-2000:])


class Alarm(Exception):
    pass


def assert_heard(call, after: float = 0.2, within: float = 0.3) -> None:
    """That a signal ends a call, soon after it came: 0.1 s, if the machine has nothing else to do."""

    def ring(*_):
        raise Alarm

    begin = time.perf_counter()
    with alarm(ring, after), pytest.raises(Alarm):
        call()
    late = time.perf_counter() - begin - after
    assert late < within, f"{late:.2f} s late"


@contextlib.contextmanager
def alarm(handler, *seconds: float):
    previous = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, *seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
