"""Calls everything with hostile arguments: `python tests/fuzz --seed 0 --calls 5000`, or `--call N` for one of them.

A call is made of its seed and its number alone. It starts from right arguments (targets.py), and either gives all of
them another form, which must not change a bit of the result, or breaks one to three of them (hostile.py). Then it may
succeed or raise a documented exception whose message names an argument. Inputs stay as they were; so does what the call
writes to, if it fails. Some calls race with a second thread that writes to their arguments: these may give any result
or error, but must not crash. Calls run in a child process, so that a crash is seen, within limits of time and memory. A
call that takes long is ended as Ctrl-C would, which must not take long either.
"""

import argparse
import contextlib
import faulthandler
import mmap
import os
import re
import reprlib
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from drawing import Arguments, coin, pick
from hostile import Meddles, Mischief, Racer, break_one, disguise
from numpy.lib.stride_tricks import as_strided
from rows_of_functions import Target
from targets import TARGETS

import attnmask
from attnmask import MaskInfo

DOCUMENTED = (TypeError, ValueError, IndexError, OverflowError, MemoryError, KeyError, RuntimeError)
LONG = 0.3  # seconds of processor time after which a call is ended
LATE = 1.5  # seconds of processor time that it may take to end
STUCK = 20.0  # seconds after which the process is ended
MEMORY = 1 << 30  # bytes beyond those of the process at its start
MOST_PROBLEMS = 25
ALSO_NAMED = {  # arguments of what an argument is handed on to, and of pullbacks
    "operations.flash": ["attention_mask"],
    "operations.vanilla": ["attention_mask"],
    "identity_dtype_convert": ["gradient"],
    "t5_relative_bias_vjp": ["dbias"],
    "qkv_cu_seqlens_to_attention_mask, out": ["cu_seqlens_kv", "max_kv_len"],
    "KVCache.lengths": ["id"],
    "KVCache.positions": ["id"],
    "KVCache.block_table": ["id"],
    "KVCache.step": ["id"],
} | {  # XLA's arrays have no names
    name: ["arguments", "array", "buffer", "gradient", "mask", "softmax_scale", "tokens", "vmap"]
    for name in TARGETS
    if name.startswith("XLA ")
}


class Ended(BaseException):
    """What the alarm raises in a call that takes long."""


def ring(*_: Any) -> None:
    raise Ended


# What must not change


def owner(array: np.ndarray) -> np.ndarray:
    """The array that has the memory of this one."""
    while True:
        base = np.ndarray.base.__get__(array)
        base = getattr(base, "base", None) if type(base).__name__ == "DummyArray" else base
        if not isinstance(base, np.ndarray):
            return array
        array = base


def arrays_in(value: Any, depth: int = 3) -> list[np.ndarray]:
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, (list, tuple)) and depth:
        return [array for item in value for array in arrays_in(item, depth - 1)]
    return arrays_in(vars(value).get("value"), 0) if hasattr(value, "__dict__") else []


def memory(array: np.ndarray) -> bytes | None:
    whole = owner(array)
    plain = np.ndarray.view(whole, np.ndarray)
    return plain.tobytes("A") if plain.nbytes < 1 << 24 and not plain.dtype.hasobject else None


def own_bytes(array: np.ndarray) -> np.ndarray:
    """Which bytes of the memory are elements of the array."""
    whole = np.ndarray.view(owner(array), np.ndarray)
    array = np.ndarray.view(array, np.ndarray)
    low = whole.__array_interface__["data"][0]
    used = np.zeros(whole.nbytes, bool)
    if array.size > 1 << 24:  # as long as no memory is
        return ~used
    if array.size:
        begin = array.__array_interface__["data"][0] - low
        axes = [axis for axis, size in enumerate(array.shape) if size > 1]  # an array may have no axis more
        shape = (*(array.shape[axis] for axis in axes), array.itemsize)
        strides = (*(array.strides[axis] for axis in axes), 1)
        lowest = begin + sum(
            (size - 1) * stride for size, stride in zip(shape, strides, strict=True) if stride < 0
        )
        flipped = tuple(abs(stride) for stride in strides)
        as_strided(used[lowest:], shape, flipped)[...] = True
    return used


class Before:
    """The memory of all arguments before a call."""

    def __init__(self, target: Target, arguments: Arguments) -> None:
        self.target = target
        self.kept = [
            (name, array, before)
            for name, value in arguments.items()
            for array in arrays_in(value)
            if (before := memory(array)) is not None
        ]

    def changed(self, succeeded: bool, ended: bool) -> list[str]:
        written = self.target.written if succeeded or ended or self.target.pullback else frozenset()
        free = [(owner(array), own_bytes(array)) for name, array, _ in self.kept if name in written]
        names = []
        for name, array, before in self.kept:
            after = memory(array)
            if after == before:
                continue
            differs = np.frombuffer(after, np.uint8) != np.frombuffer(before, np.uint8)
            for whole, bytes_ in free:
                if whole is owner(array):
                    differs &= ~bytes_
            if differs.any():
                names.append(name)
        return names


# Results


def digest(value: Any) -> Any:
    """Something to compare a result by, to the bit."""
    if isinstance(value, np.ndarray):
        value = np.ndarray.view(value, np.ndarray)
        return (value.dtype.str, value.dtype.name, value.shape, value.tobytes())
    if isinstance(value, (list, tuple)):
        return tuple(digest(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, digest(item)) for key, item in value.items())
    if isinstance(value, MaskInfo):
        return digest(value.attention_mask)
    if isinstance(value, (float, np.floating)):
        return np.float64(value).tobytes()
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (np.generic, str, bytes, type(None), type)):
        return (type(value).__name__, value)
    return repr(value)


def same(target: Target, expected: Any, result: Any) -> bool:
    if target.same_bits:
        return digest(expected) == digest(result)
    pairs = zip(
        arrays_in(expected), arrays_in(result), strict=True
    )  # sums, of which the order is up to the layout
    return all(
        one.dtype == other.dtype
        and np.allclose(
            one.astype(np.float64), other.astype(np.float64), 1e-5, 0.05 if one.itemsize == 2 else 1e-5
        )
        for one, other in (map(np.asarray, pair) for pair in pairs)
    )


def called(target: Target, arguments: Arguments) -> Any:
    return target.call(**arguments)


@contextlib.contextmanager
def time_limit() -> Any:
    signal.setitimer(signal.ITIMER_VIRTUAL, STUCK)
    signal.setitimer(signal.ITIMER_PROF, LONG)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def shown(value: Any) -> str:
    if isinstance(value, np.ndarray):
        value = np.ndarray.view(value, np.ndarray)
        text = f"{value.dtype} {value.shape} strides {value.strides}"
        return f"<{text}>" if not 0 < value.size <= 12 else f"<{text} {value.tolist()!r:.100}>"
    try:
        return f"{type(value).__name__}: {reprlib.repr(value)}"
    except Exception:  # its repr raises
        return f"a {type(value).__name__}"


def holds_meddler(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)) and len(value) < 1000:
        return any(holds_meddler(item) for item in value if item is not value)
    return isinstance(value, Meddles)


class Case:
    """One call: its arguments, and what is wrong with how it went."""

    def __init__(self, seed: int, number: int, only: str | None = None) -> None:
        rng = np.random.default_rng([seed, number])
        self.key, self.number = [seed, number, 1], number
        name = pick(rng, list(TARGETS))
        self.target = TARGETS[only or name]
        self.arguments = self.right()
        free = [name for name in self.arguments if name not in self.target.kept]
        self.broken: list[str] = []
        self.disguised = coin(rng, 0.2) or not free
        if self.disguised:
            for name in free:
                if coin(rng, 0.6):
                    written = name in self.target.written
                    self.arguments[name] = disguise(
                        rng, self.arguments[name], written, self.target.subclasses
                    )
        else:
            self.broken = [str(name) for name in rng.permutation(free)[: int(rng.integers(1, 4))]]
            for name in self.broken:
                self.arguments[name] = break_one(rng, name, self.arguments)
        race = np.random.default_rng([seed, number, 2])
        self.racer = Racer(race, arrays_in(list(self.arguments.values()))) if coin(race, 0.15) else None
        self.disguised &= self.racer is None
        self.meddled = self.racer is not None or holds_meddler(self.arguments)
        self.outcome, self.late = "", False

    def right(self) -> Arguments:
        return self.target.arguments(np.random.default_rng(self.key))

    def problems(self) -> list[str]:
        expected = called(self.target, self.right()) if self.disguised else None
        before = None if self.meddled else Before(self.target, self.arguments)
        result, error, ended, begin = None, None, False, time.process_time()
        try:
            with time_limit(), self.racer or contextlib.nullcontext():
                result = called(self.target, self.arguments)
        except Ended:
            ended = True
        except Exception as raised:
            error = raised
        taken = time.process_time() - begin
        self.outcome = "ended" if ended else type(error).__name__ if error else "result"
        problems = []
        self.late = taken > LONG + LATE
        if self.late:
            problems.append(f"it took {taken:.1f} s of processor time: {self.outcome}")
        if error is not None:
            problems += self.wrong_error(error)
        if self.disguised and not ended and error is None and not same(self.target, expected, result):
            problems.append("another form of the same arguments gave another result")
        if self.disguised and error is not None:
            problems.append("arguments in another form are refused")
        if before is not None:
            problems += [f"{name} was changed" for name in before.changed(error is None and not ended, ended)]
        if error is not None and self.number % 16 == 0:
            first, second = (digest(called(self.target, self.right())) for _ in range(2))
            if first != second:
                problems.append("the next right call gave another result")
        return problems

    def wrong_error(self, error: Exception) -> list[str]:
        text = "".join(traceback.format_exception(error))
        if isinstance(error, Mischief):
            return [f"a hostile object was asked: {text}"] if self.disguised else []
        if self.meddled:  # an array that changes after it was checked may lead to any error, but to no crash
            return []
        if not isinstance(error, DOCUMENTED) or isinstance(error, RecursionError):
            return [f"an exception that is not documented: {text}"]
        if "f" in self.broken and "of_function" in text and "f(*index)" in text:  # what `f` raises
            return []
        if "__index__ returned non-int" in str(error):  # Python says that
            return []
        if re.search(
            "unsupported operand|does not support ufuncs", str(error)
        ) and self.target.name.startswith("MaskInfo.__"):
            return []
        if (
            self.target.name == "MaskInfo.tree_unflatten"
        ):  # JAX puts anything there, so it is looked at when it is used
            return []
        names = {*self.arguments, "shape", *ALSO_NAMED.get(self.target.name, ())}
        if not isinstance(error, MemoryError) and not names & set(re.findall(r"\w+", str(error))):
            return [f"an error that names no argument: {text}"]
        return []

    def text(self) -> str:
        lines = [
            f"{self.target.name}, {'another form' if self.disguised else 'broken: ' + ', '.join(self.broken)}"
            + (", while a thread writes" if self.racer else "")
        ]
        return "\n".join(
            [*lines, *(f"    {name} = {shown(value)}" for name, value in self.arguments.items())]
        )


# The process that calls


def limit_memory() -> None:
    attnmask.set_num_threads(2)
    attnmask.chunk_global_cumsum(np.ones((4, 100_000, 4), np.float32))  # so that threads have their stacks
    with open("/proc/self/statm") as statm:
        size = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.RLIM_INFINITY))


def child(options: argparse.Namespace) -> int:
    faulthandler.enable()
    signal.signal(signal.SIGPROF, ring)
    faulthandler.register(signal.SIGVTALRM, chain=True)
    warnings.simplefilter("ignore")
    if os.path.exists("/proc/self/statm"):
        limit_memory()
    with open(options.child, "r+b") as file:
        progress = mmap.mmap(file.fileno(), 8)
    outcomes: Counter[str] = Counter()
    for number in range(options.first, options.first + options.calls):
        progress[:] = number.to_bytes(8, "little")
        if number % 64 == 0:
            faulthandler.dump_traceback_later(900, exit=True)  # of the clock: the process may wait for others
        try:
            case = Case(options.seed, number, options.target)
        except MemoryError:
            continue
        if options.show:
            print(case.text())
            continue
        problems = case.problems()
        if case.late:  # perhaps the alarm was, on a busy machine
            case = Case(options.seed, number, options.target)
            problems = case.problems()
        outcomes[f"{case.target.name} {case.outcome}"] += 1
        if problems:
            print(f"-- call {number} of seed {options.seed}: {case.text()}", *problems, sep="\n", flush=True)
        if number % 100 == 99 or number == options.first + options.calls - 1:
            print(*(f"== {count} {name}" for name, count in outcomes.items()), sep="\n", flush=True)
            outcomes.clear()
    return 0


# The process that watches


def watch(options: argparse.Namespace, program: str) -> int:
    """Runs all calls in children, each of which goes on behind the call that ended the one before."""
    first, last = options.first, options.first + options.calls
    outcomes: Counter[str] = Counter()
    problems = 0
    with tempfile.NamedTemporaryFile() as progress:
        progress.write(bytes(8))
        progress.flush()
        while first < last and problems < MOST_PROBLEMS:
            calls = min(last - first, 5000)
            command = [sys.executable, program, "--child", progress.name, "--seed", str(options.seed)]
            command += ["--first", str(first), "--calls", str(calls)]
            command += ["--target", options.target] if options.target else []
            result = subprocess.run(command, capture_output=True, text=True, errors="replace")
            found = [line for line in result.stdout.splitlines() if not line.startswith("== ")]
            problems += sum(line.startswith("-- call ") for line in found)
            print(*found, sep="\n", end="\n" if found else "")
            for line in result.stdout.splitlines():
                if line.startswith("== "):
                    _, count, name = line.split(" ", 2)
                    outcomes[name] += int(count)
            first += calls
            if result.returncode:
                number = int.from_bytes(Path(progress.name).read_bytes(), "little")
                problems += 1
                print(f"-- call {number} of seed {options.seed} ended the process ({result.returncode}):")
                text = subprocess.run(
                    [*command, "--first", str(number), "--calls", "1", "--show"], capture_output=True
                )
                print(text.stdout.decode(errors="replace"), result.stderr[-6000:], sep="\n")
                first = number + 1
            sys.stdout.flush()
    results = sum(count for name, count in outcomes.items() if name.endswith(" result"))
    if options.table:
        for name, count in sorted(outcomes.items()):
            print(f"{count:8} {name}")
    print(f"{first - options.first} calls of seed {options.seed}: {results} results, {problems} problems")
    return int(problems > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description="Calls everything with hostile arguments.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first call")
    parser.add_argument("--call", type=int, help="make this call alone")
    parser.add_argument("--target", help="call this function alone")
    parser.add_argument("--table", action="store_true", help="print how often each function gave what")
    parser.add_argument("--show", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.call is not None:
        options.first, options.calls = options.call, 1
    return child(options) if options.child else watch(options, sys.argv[0])
