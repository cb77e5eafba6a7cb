"""Threads are OpenMP's: its conventions, the runtime that others share, forks, floating-point modes, bits."""

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import numpy as np
import pytest
from conftest import SANITIZED
from hypothesis import given
from hypothesis import strategies as st
from test_runtime import alarm, python, some_calls

import attnmask

CONFIG = attnmask.show_config(mode="dict")
pytestmark = pytest.mark.skipif(CONFIG["openmp"] is None, reason="built without OpenMP: one thread")
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads by /proc")
with_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
needs = {
    name: pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed")
    for name in ("torch", "sklearn", "jax", "threadpoolctl")
}


def told(code: str, **environment: str) -> list[str]:
    """The words that `code` prints."""
    result = python(code, **environment)
    assert result.returncode == 0, (result.stdout, result.stderr)
    return result.stdout.split()


# What is told


def test_the_runtime_is_told():
    assert re.fullmatch(r"(GNU libgomp|LLVM libomp), OpenMP \S+ \(20\d{4}\)", CONFIG["openmp"])
    assert re.search("gomp|omp", os.path.basename(CONFIG["openmp_library"]))


def test_without_openmp_the_words_are_none():
    """The three go together."""
    names = ("openmp", "openmp_library", "openmp_spin")
    assert len({CONFIG[name] is None for name in names}) == 1


SPIN = "import os, attnmask; print(attnmask.show_config('dict')['openmp_spin'], os.environ == before)"
SPIN = "import os; before = dict(os.environ);" + SPIN + "; print(os.environb.get(b'GOMP_SPINCOUNT'))"
gnu = pytest.mark.skipif("GNU" not in str(CONFIG["openmp"]), reason="of GNU's runtime")


@gnu
@pytest.mark.parametrize(
    ("environment", "spin"),
    [
        ({}, "GOMP_SPINCOUNT=1000"),
        ({"GOMP_SPINCOUNT": "77"}, "GOMP_SPINCOUNT=77"),
        ({"OMP_WAIT_POLICY": "passive"}, "OMP_WAIT_POLICY=passive"),
        ({"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "5"}, "GOMP_SPINCOUNT=5"),
    ],
)
def test_the_spin(environment, spin):
    """What the user has set holds; and the environment is the same after the import."""
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")
    if set(names) & set(os.environ):
        pytest.skip("set for the tests themselves")
    assert told(SPIN, **environment)[:2] == [spin, "True"]


OPENMP_DISPLAYED = "import attnmask"


@gnu
@pytest.mark.parametrize("spin", ["1000", "31"])
def test_the_runtime_has_taken_the_spin(spin):
    environment = {} if spin == "1000" else {"GOMP_SPINCOUNT": spin}
    result = python("import attnmask", OMP_DISPLAY_ENV="verbose", **environment)
    assert re.search(rf"GOMP_SPINCOUNT = '{spin}'", result.stderr), result.stderr


# How many threads

COUNT = """
import os
import numpy as np
import attnmask
def count():
    return len(os.listdir("/proc/self/task"))
def used(values=np.ones((4, 100_000, 16), np.float32)):
    "Threads more after a call than before."
    before = count()
    attnmask.chunk_global_cumsum(values)
    return count() - before
"""


@on_linux
@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "3,2"}, 3),
        ({"OMP_NUM_THREADS": "4", "OMP_THREAD_LIMIT": "2"}, 2),
        ({"OMP_NUM_THREADS": "4", "ATTNMASK_NUM_THREADS": "2"}, 2),
        ({"OMP_NUM_THREADS": "1", "ATTNMASK_NUM_THREADS": "3"}, 3),
        ({"OMP_THREAD_LIMIT": "2", "ATTNMASK_NUM_THREADS": "3"}, 2),
    ],
)
def test_the_environment_says_how_many(environment, threads):
    assert told(COUNT + "print(attnmask.get_num_threads(), used())", **environment) == [
        str(threads),
        str(threads - 1),
    ]


@on_linux
def test_threads_stay_where_they_are_bound():
    code = COUNT + "used(); print(*sorted(len(os.sched_getaffinity(int(t))) for t in os.listdir('/proc/self/task')))"
    assert told(code, OMP_PROC_BIND="true", OMP_PLACES="cores", OMP_NUM_THREADS="2")[:1] == ["1"]


@on_linux
@needs["threadpoolctl"]
def test_threadpool_limits():
    """They hold here as in any other library of OpenMP, also over a larger number asked for, and end."""
    code = """
import threadpoolctl
runtimes = [r["filepath"] for r in threadpoolctl.threadpool_info() if r["user_api"] == "openmp"]
print(os.path.realpath(attnmask.show_config("dict")["openmp_library"]) in map(os.path.realpath, runtimes))
with threadpoolctl.threadpool_limits(1):
    print(attnmask.get_num_threads(), used())
    attnmask.set_num_threads(3)
    print(attnmask.get_num_threads(), used())
print(attnmask.get_num_threads(), used())
"""
    assert told(COUNT + code, OMP_NUM_THREADS="2") == ["True", "1", "0", "1", "0", "3", "2"]


def test_set_num_threads_is_nobody_elses_business(set_threads):
    runtime = ctypes.CDLL(CONFIG["openmp_library"])
    before = runtime.omp_get_max_threads()
    for threads in (1, 5, 2):
        set_threads(threads)
        attnmask.chunk_global_cumsum(np.ones((4, 50_000, 16), np.float32))
        assert runtime.omp_get_max_threads() == before


REGION = """
#include <omp.h>
void call_in_region(int threads, void (*function)(int))
{
#pragma omp parallel num_threads(threads)
    function(omp_get_thread_num());
}
"""


@on_linux
@pytest.mark.skipif(SANITIZED, reason="the other library is not sanitized")
def test_calls_inside_a_region_of_another_library(tmp_path):
    """As from a callback of C: each thread computes alone, and gets the same bits."""
    compiler = shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0])
    (tmp_path / "region.c").write_text(REGION)
    command = [compiler or "cc", "-shared", "-fPIC", "-fopenmp", "region.c", "-o", "region.so"]
    if not compiler or subprocess.run(command, cwd=tmp_path, capture_output=True).returncode:
        pytest.skip("needs a compiler with OpenMP")
    code = f"""
import ctypes
region = ctypes.CDLL({str(tmp_path / "region.so")!r})
values = np.random.default_rng(0).standard_normal((4, 50_000, 16)).astype(np.float32)
expected = attnmask.chunk_global_cumsum(values).tobytes()
seen = []
@ctypes.CFUNCTYPE(None, ctypes.c_int)
def function(number):
    same = attnmask.chunk_global_cumsum(values).tobytes() == expected
    seen.append((attnmask.get_num_threads(), same))
region.call_in_region(3, function)
before = count()
region.call_in_region(3, function)
print(count() - before, len(seen), set(seen) == {{(1, True)}}, attnmask.get_num_threads())
"""
    shared = told(COUNT + code, OMP_NUM_THREADS="3", LD_PRELOAD=CONFIG["openmp_library"])
    assert shared == ["0", "6", "True", "3"]


@given(st.lists(st.integers(1, 9), min_size=2, max_size=5))
def test_the_same_bits_for_any_number_of_threads(counts):
    calls, previous = some_calls()[:6], attnmask.get_num_threads()
    try:
        results = []
        for threads in counts:
            attnmask.set_num_threads(threads)
            results.append([call().tobytes() for call in calls])
        assert all(result == results[0] for result in results)
    finally:
        attnmask.set_num_threads(previous)
