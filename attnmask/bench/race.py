"""Contenders, each in a process of its own, and the rounds in which they take turns.

A contender is a level of instruction sets, PyTorch, or the processor's peak. Each has a process, so that a level can be
chosen and no library's idle threads take time from the next. In a round all take turns in a new order.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from attnmask.bench.cases import FUNCTIONS, Call, Results

PEAK, TORCH = "peak", "PyTorch"
PAUSE = 0.01  # seconds before a turn, in which threads of the last contender go to sleep
BATCH = 0.003  # seconds that a turn takes at least: short calls are repeated
HOPELESS = 0.1  # seconds: a call that takes longer needs no call before it to warm caches
FEWEST, MOST = 3, 100  # rounds
NOISY = 1.25  # how many times as long as the best the median round takes
STEPS = 1_000_000  # of the peak's loop: some milliseconds
THREADS = (
    "ATTNMASK_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
)


class Case(NamedTuple):
    function: str
    type: str
    quick: bool


# In the process of a contender


class _State:
    """The call that is being measured, and the functions of peak.c."""

    call: Call = staticmethod(lambda: None)
    library: ctypes.CDLL | None = None


def begin(contender: str) -> str | None:
    """Load what a contender needs, and return why it cannot take part."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends the others
    if contender == TORCH:
        try:
            import torch
        except ImportError as error:
            return str(error)
        torch.set_num_threads(int(os.environ[THREADS[0]]))
    if contender == PEAK:
        _State.library = compiled(Path(__file__).with_name("peak.c"))
        return None if _State.library else "no C compiler was found for the loop of the peak"
    return None


def compiled(source: Path) -> ctypes.CDLL | None:
    """Build a library for this very processor, if there is a compiler."""
    compiler = os.environ.get("CC", "cc").split()
    with tempfile.TemporaryDirectory() as folder:
        made = f"{folder}/peak.so"
        for native in ("-march=native", "-mcpu=native"):
            command = [*compiler, "-O3", native, "-shared", "-fPIC", "-o", made, str(source)]
            try:
                if subprocess.run(command, capture_output=True).returncode == 0:
                    library = ctypes.CDLL(made)
                    break
            except OSError:
                return None
        else:
            return None
    for kind in ("float32", "float64", "bfloat16"):
        function = getattr(library, f"peak_{kind}")
        function.argtypes, function.restype = [ctypes.c_size_t], ctypes.c_double
    library.read_words.argtypes, library.read_words.restype = (
        [ctypes.c_void_p, ctypes.c_size_t],
        ctypes.c_uint64,
    )
    return library


def prepare(contender: str, case: Case) -> tuple[Results, float] | None:
    """Make the call of a case; return its results and its work, or None if the contender has no such function."""
    _State.call = lambda: None
    gc.collect()
    function = FUNCTIONS[case.function]
    function = function.smaller() if case.quick else function
    work = function.work(case.type)
    if contender == PEAK:
        _State.call, work = peak(case.type, work if function.unit == "GB/s" else 0)
        return [], work
    arrays = function.arrays(case.type)
    call = function.by_torch(*arrays) if contender == TORCH else function.ours(*arrays)
    if call is None:
        return None
    _State.call = call
    return function.sample(call()), work


def peak(kind: str, nbytes: float) -> tuple[Call, float]:
    """Read so many bytes, or multiply and add without memory, in all threads; and the work of that."""
    library, threads = _State.library, int(os.environ[THREADS[0]])
    assert library
    pool = ThreadPoolExecutor(threads)
    calls: Sequence[Callable[[], float]]
    if nbytes:
        parts = np.array_split(np.ones(int(nbytes) // 8, np.int64), threads)
        calls = [
            partial(lambda part: library.read_words(part.ctypes.data, part.size), part) for part in parts
        ]
        return lambda: list(pool.map(lambda call: call(), calls)), nbytes
    multiply = getattr(library, f"peak_{kind}", library.peak_float32)
    multiply = multiply if multiply(1) else library.peak_float32
    calls = threads * [partial(multiply, STEPS)]
    return lambda: list(pool.map(lambda call: call(), calls)), threads * multiply(STEPS)


def turn(repeats: int, warm: bool) -> float:
    """Seconds of a call."""
    call = _State.call
    if warm:
        call()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


# In the first process


class Contenders:
    """Processes by name. Use it in a `with` statement, which ends them."""

    def __init__(self, levels: list[str], torch: bool, threads: int) -> None:
        self.missing: dict[str, str] = {}
        self.pools = {
            name: ProcessPoolExecutor(1, get_context("spawn")) for name in [*levels, *[TORCH] * torch, PEAK]
        }
        ready = {}
        for name, pool in self.pools.items():
            changed = dict.fromkeys(THREADS, str(threads))
            if name in levels:
                changed["ATTNMASK_ISA"] = name
            with patch.dict(os.environ, changed):  # which a new process takes over
                ready[name] = pool.submit(begin, name)
        for name, future in ready.items():
            if reason := future.result():
                self.missing[name] = reason
                self.pools.pop(name).shutdown()

    def __enter__(self) -> Contenders:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self.pools.values():
            pool.shutdown(cancel_futures=True)

    def prepare(self, case: Case) -> dict[str, tuple[Results, float]]:
        """The results and the work of each contender that has such a function."""
        futures = {name: pool.submit(prepare, name, case) for name, pool in self.pools.items()}
        return {name: got for name, future in futures.items() if (got := future.result())}

    def turn(self, name: str, repeats: int, warm: bool) -> float:
        time.sleep(PAUSE)
        return self.pools[name].submit(turn, repeats, warm).result()

    def race(self, names: list[str], seconds: float) -> dict[str, list[float]]:
        """Seconds of a call, round by round, for about so many seconds altogether."""
        start = time.perf_counter()
        first = {name: self.turn(name, 1, False) for name in names}
        repeats = {name: max(1, min(10_000, math.ceil(BATCH / first[name]))) for name in names}
        times: dict[str, list[float]] = {name: [] for name in names}
        turns = [
            *names,
            *[PEAK, PEAK] * (PEAK in names),
        ]  # its best counts, and other processes may disturb it
        for done in range(MOST):
            passed = time.perf_counter() - start
            if done >= FEWEST and passed * (done + 1) / done > seconds:
                break
            for name in random.sample(turns, len(turns)):
                times[name].append(self.turn(name, repeats[name], first[name] < HOPELESS))
        return times


def noisy(samples: list[float]) -> bool:
    return float(np.median(samples)) > NOISY * min(samples)


def error(got: Results, expected: Results) -> float:
    """The largest difference, relative to the largest number of its array; NaN counts as infinite."""
    pairs: list[tuple[Any, Any]] = list(zip(got, expected, strict=True))
    return max(float(np.nan_to_num(np.abs(x - y).max() / np.abs(y).max(), nan=np.inf)) for x, y in pairs)
