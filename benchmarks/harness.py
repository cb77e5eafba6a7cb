"""What the benchmarks share: peers, yardsticks, the race, and the tables.

Rules of the race: Results are compared before anything is timed. Contenders take turns, in a new order each round (the
predecessor makes a difference of up to 12%), each after a pause (in which the threads of the predecessor go to sleep)
and after a call that warms its caches. Rounds during which other processes used the processor are run again. Tables
show the median over the rounds, and ratios are medians of the ratios within a round. So disturbances affect all
contenders alike.

On a machine that is never quiet, `BENCH_CLOCK=process_time` with `--threads 1` counts the time that a process computes
and not what it waits for a processor; no round is run again then.
"""

import argparse
import ctypes
import gc
import math
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from workers import (
    BATCH,
    CLOCK,
    Call,
    Remote,
    load_ejkernel,
    optional,
    repeats_for,
    settle,
    turn,
    used_by_workers,
)

import attnmask

HERE = Path(__file__).parent

PAUSE = 0.005  # seconds, about, between turns: threads of the predecessor go to sleep
SLOW = 20  # times slower than the fastest: such a contender has one call a turn, and no warming call
BLOCK = 0.3  # seconds of rounds that are kept or dropped together
DISTURBED = 0.05  # processors that other processes may have used meanwhile
PATIENCE = 8  # times the planned duration: after that, disturbed rounds count, too
LONGEST = 60.0  # seconds after the planned duration, likewise
HOPELESS = 0.2  # seconds: a contender that takes longer needs no warming call
BEHIND = 3  # times slower than the fastest: if it is hopeless, too, it runs only three times
ENDLESS = 2.0  # seconds: a slower one runs only once
FMA_STEPS = 1_000_000  # a few milliseconds
NOISY = 0.25  # half the distance of the quartiles, relative to the median: marked in tables


def arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--quick", action="store_true", help="few rounds, to see that all runs; nothing is written"
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="cases whose name has it; nothing is written"
    )
    parser.add_argument(
        "--without", default="", metavar="NAMES", help="peers of attention to leave out, with commas between"
    )
    parser.add_argument("--threads", type=int, default=attnmask.get_num_threads())
    parser.add_argument("--seconds", type=float, default=3.0, help="that a case may take, about")
    options = parser.parse_args()
    if options.quick:
        options.seconds = 0.1
    use_threads(options.threads)
    return options


# Peers

torch = optional("torch")
if torch:
    optional("torch._dynamo")  # looks for triton: before ejKernel has an empty module in its place
jax = optional("jax")
ejkernel = load_ejkernel() if jax else None
ml_dtypes = optional("ml_dtypes")
if jax:
    jax.config.update("jax_enable_x64", True)


def use_threads(threads: int) -> None:
    """Sets the threads of attnmask and torch. NumPy has one, JAX one for each core."""
    attnmask.set_num_threads(threads)
    if torch:
        torch.set_num_threads(threads)


# Yardsticks


def compile_native() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "native.so")
        command = [os.environ.get("CC", "cc"), "-O3", "-march=native", "-shared", "-fPIC"]
        command += ["-o", str(library), str(HERE / "native.c")]
        for openmp in (["-fopenmp"], []):
            if subprocess.run(command + openmp, capture_output=True, check=False).returncode == 0:
                break
        else:
            raise SystemExit("the yardsticks need a C compiler")
        loaded = ctypes.CDLL(str(library))
    loaded.copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    loaded.copy.restype = None
    loaded.read_all.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    loaded.read_all.restype = ctypes.c_uint64
    loaded.read_and_change.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    loaded.read_and_change.restype = ctypes.c_uint64
    for name in ("fma_float32", "fma_float64", "fma_bfloat16", "fma_avx2"):
        getattr(loaded, name).argtypes = [ctypes.c_size_t, ctypes.c_int]
        getattr(loaded, name).restype = ctypes.c_double
    return loaded


native = compile_native()


def memcpy(out: np.ndarray, source: np.ndarray, threads: int) -> Call:
    """Copies bytes of `source`, all or as many as `out` can hold, to contiguous `out`."""
    to, start, nbytes = out.ctypes.data, source.ctypes.data, min(out.nbytes, source.nbytes)
    keep = (out, source)  # keeps both alive

    def call() -> object:
        native.copy(to, start, nbytes, threads)
        return keep

    return call


def read(source: np.ndarray, threads: int) -> Call:
    """Reads all bytes of contiguous `source`."""

    def call() -> object:
        native.read_all(source.ctypes.data, source.nbytes, threads)
        return source

    return call


def read_and_change(data: np.ndarray, piece: int) -> Call:
    """Reads so many bytes of contiguous `data` at a time, and then changes them."""

    def call() -> object:
        native.read_and_change(data.ctypes.data, data.nbytes, piece)
        return data

    return call


def multiply(kind: str, threads: int) -> tuple[Call, float]:
    """Products and sums at the processor's peak, and their number of operations.

    `kind` is float32, float64, bfloat16 (float32 where the processor has no instruction for it), or avx2 for float32 in
    vectors of 32 bytes.
    """
    function = getattr(native, f"fma_{kind}")
    if not function(1, threads):
        function = native.fma_float32
    return lambda: function(FMA_STEPS, threads), function(FMA_STEPS, threads)


# The race


class Times:
    """Seconds per call, round by round."""

    def __init__(self, samples: list[float], disturbed: bool = False) -> None:
        self.samples = np.array(samples)
        self.disturbed = disturbed
        self.median = float(np.median(self.samples))
        self.best = float(self.samples.min())

    @property
    def noisy(self) -> bool:
        low, high = np.percentile(self.samples, [25, 75])
        return self.disturbed or len(self.samples) < 2 or (high - low) / 2 > NOISY * self.median

    def ratio_to(self, other: "Times") -> float:
        if len(self.samples) != len(other.samples):
            return self.median / other.median
        return float(np.median(self.samples / other.samples))

    def __format__(self, spec: str) -> str:
        """Milliseconds, with ~ if the rounds differ widely or others used the processor."""
        return ("~" if self.noisy else "") + digits(1e3 * self.median)


def digits(value: float) -> str:
    """At least three significant digits."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


def percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def difference(got: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference, relative to the largest number; NaN if there is a NaN."""
    return float(np.abs(got - wanted).max() / np.abs(wanted).max())


def take_turn(call: Call, repeats: int, warm: bool) -> float:
    settle()
    return call.turn(repeats, warm) if isinstance(call, Remote) else turn(call, repeats, warm)


def other_work() -> float:
    """Seconds of processor time that other processes than this and its workers have used; 0 if that is not known."""
    if CLOCK == "process_time":
        return 0.0
    try:
        user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    except OSError:
        return 0.0
    used = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return used - time.process_time() - used_by_workers()


def shuffled(names: Collection[str]) -> list[str]:
    return random.sample(sorted(names), len(names))


def race(contenders: dict[str, Call], seconds: float, yardsticks: Collection[str] = ()) -> dict[str, Times]:
    """Times all contenders, in turns, for about `seconds`; at least 5 rounds, or 2 when there is no time at all.

    A contender that is slow and much slower than the fastest runs three times or once before the rounds, and not in
    them. The `yardsticks` among them do not count as the fastest.
    """
    tries: dict[str, list[float]] = {}
    for name, call in contenders.items():
        cold = take_turn(call, 1, warm=False)
        more = 2 if cold < ENDLESS else 0
        tries[name] = [take_turn(call, 1, warm=False) for _ in range(more)] or [cold]
    first = {name: min(times) for name, times in tries.items()}
    fastest = min(t for name, t in first.items() if name not in yardsticks)
    slow = {name: t > SLOW * fastest and t > BATCH for name, t in first.items()}
    warm = {name: not slow[name] and t < HOPELESS for name, t in first.items()}
    behind = {name for name, t in first.items() if t > BEHIND * fastest and t > HOPELESS}
    running = {name: call for name, call in contenders.items() if name not in behind}
    repeats = {name: repeats_for(first[name]) for name in running}
    one_round = sum(PAUSE + (repeats[name] + warm[name]) * first[name] for name in running)
    rounds = max(5 if seconds > 1 else 2, min(100, int(seconds / one_round)))
    block = max(1, int(BLOCK / one_round))
    planned = rounds * one_round
    deadline = time.perf_counter() + min(PATIENCE * planned, planned + LONGEST)
    kept: list[dict[str, float]] = []
    disturbed: list[dict[str, float]] = []
    gc.collect()
    gc.disable()
    while len(kept) < rounds and (not disturbed or time.perf_counter() < deadline):
        begin, others = time.perf_counter(), other_work()
        taken = [
            {name: take_turn(running[name], repeats[name], warm[name]) for name in shuffled(running)}
            for _ in range(block)
        ]
        used = (other_work() - others) / (time.perf_counter() - begin)
        (kept if used < DISTURBED else disturbed).extend(taken)
    gc.enable()
    quiet = len(kept) >= min(5, rounds)
    kept += [] if quiet else disturbed
    return {
        name: Times([times[name] for times in kept], not quiet) if name in running else Times(tries[name])
        for name in contenders
    }


# Reports


def processor() -> str:
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def cache() -> str:
    """The size of the largest cache, as Linux reports it."""
    sizes = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    return f", {sizes[-1].read_text().strip()[:-1]} KiB of cache" if sizes else ""


def installed(name: str) -> str | None:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return None


class Report:
    """Tables in markdown, printed as they are made, and written to results/NAME.md at the end."""

    def __init__(
        self, name: str, title: str, options: argparse.Namespace, packages: tuple[str, ...] = ()
    ) -> None:
        self.path = HERE / "results" / f"{name}.md"
        self.keep = not (options.quick or options.only)
        self.lines: list[str] = []
        config = attnmask.show_config(mode="dict")
        names = ("numpy", "torch" if torch else "", "ejkernel" if ejkernel else "", "jax" if jax else "")
        versions = [installed(name) for name in (*names, *packages) if name]
        self.text(f"# {title}")
        threads = "1 thread" if options.threads == 1 else f"{options.threads} threads"
        self.text(
            f"{processor()}, {os.cpu_count()} cores{cache()}, {platform.system()} {platform.machine()}. "
            f"attnmask {config['version']} with {config['isa']} kernels by {config['compiler']}, {threads}; "
            f"Python {platform.python_version()}, {', '.join(filter(None, versions))}."
        )

    def text(self, paragraph: str) -> None:
        self._add(paragraph + "\n")

    def heading(self, text: str) -> None:
        self._add(f"## {text}\n")

    def table(self, *columns: str) -> None:
        self._add("| " + " | ".join(columns) + " |")
        self._add("| " + " | ".join(["---"] + ["---:"] * (len(columns) - 1)) + " |")

    def row(self, *cells: object) -> None:
        self._add("| " + " | ".join("–" if cell is None else f"{cell}" for cell in cells) + " |")

    def end_table(self) -> None:
        self._add("")

    def write(self) -> None:
        if self.keep:
            self.path.parent.mkdir(exist_ok=True)
            self.path.write_text("\n".join(self.lines).rstrip() + "\n", encoding="utf-8")
            print(f"written to {self.path}", file=sys.stderr)

    def _add(self, line: str) -> None:
        self.lines.append(line)
        print(line, flush=True)
