"""Libraries in processes of their own: threads that spin after a call would take time from the next contender.

A worker answers when its threads have gone to sleep.
"""

import importlib
import math
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

BATCH = 0.003  # seconds that a turn takes at least: short calls are repeated
SPINNING = 0.5  # seconds that threads may spin after a call
PATIENCE = 300.0  # seconds for an answer
CLOCK = os.environ.get("BENCH_CLOCK", "perf_counter")

Call = Callable[[], object]


class WorkerError(Exception):
    """An error in a worker, with its message."""


class Worker:
    """Runs `script`, which calls `serve`, and starts it again if it has died."""

    def __init__(self, script: Path, *arguments: str, **environment: str) -> None:
        self.command = [sys.executable, str(script), *arguments]
        self.environment = os.environ | environment
        self.process: subprocess.Popen[bytes] | None = None
        self.connection: Connection
        self.used = 0.0  # seconds of processor time

    def ask(self, question: str, *arguments: object) -> object:
        if self.process is None:
            self._start()
        try:
            self.connection.send((question, arguments))
            if not self.connection.poll(PATIENCE):
                raise TimeoutError(f"no answer for {PATIENCE:.0f} s")
            error, answer, self.used = self.connection.recv()
        except (OSError, EOFError) as failure:
            self.close()
            raise WorkerError(str(failure) or "died") from None
        if error is not None:
            raise WorkerError(error)
        return answer

    def close(self) -> None:
        if self.process is not None:
            self.connection.close()
            self.process.kill()
            self.process.wait()
            self.process = None
            running.remove(self)

    def _start(self) -> None:
        self.connection, theirs = Pipe()
        command = [*self.command, str(theirs.fileno())]
        self.process = subprocess.Popen(command, env=self.environment, pass_fds=[theirs.fileno()])
        theirs.close()
        running.append(self)


running: list[Worker] = []


def started(workers: dict[str, Worker]) -> dict[str, Worker]:
    """Those whose library is installed; the others are closed."""
    for name, worker in list(workers.items()):
        try:
            worker.ask("start")
        except WorkerError as error:
            print(f"without {name}: {error}", file=sys.stderr)
            worker.close()
            del workers[name]
    return workers


class Remote:
    """A call in a worker, which measures its time."""

    def __init__(self, worker: Worker, *name: str) -> None:
        self.worker, self.name = worker, name

    def __call__(self) -> None:
        self.turn(1, False)

    def turn(self, repeats: int, warm: bool) -> float:
        return self.worker.ask("turn", *self.name, repeats, warm)


def repeats_for(seconds: float) -> int:
    """The number of calls of this duration in a turn."""
    return max(1, min(10_000, math.ceil(BATCH / seconds)))


def used_by_workers() -> float:
    return sum(worker.used for worker in running)


def turn(call: Call, repeats: int, warm: bool) -> float:
    """Seconds per call."""
    if warm:
        call()
    clock = getattr(time, CLOCK)
    begin = clock()
    for _ in range(repeats):
        call()
    return (clock() - begin) / repeats


def others_run() -> bool:
    """Whether another thread of this process runs or waits for a processor."""
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        time.sleep(0.1)
        return False
    own = str(threading.get_native_id())
    for task in tasks.iterdir():
        try:
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # the thread has ended
            continue
        if task.name != own and state == "R":
            return True
    return False


def settle() -> None:
    """Waits until the other threads of this process sleep: those of GNU OpenMP spin for some 10 ms after a call."""
    deadline = time.perf_counter() + SPINNING
    while others_run() and time.perf_counter() < deadline:
        time.sleep(0.001)


# In the worker


def serve(**functions: Callable[..., object]) -> None:
    """Answers questions by calling the functions of these names, until the connection is closed."""
    connection = Connection(int(sys.argv[-1]))
    while True:
        try:
            question, arguments = connection.recv()
        except EOFError:
            return
        error = answer = None
        try:
            answer = functions[question](*arguments)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        settle()
        connection.send((error, answer, time.process_time()))


# Libraries that may be installed


def optional(name: str) -> ModuleType | None:
    """The module, or None if it is not installed or cannot be imported."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError as error:
        print(f"without {name}: {error}", file=sys.stderr)
        return None


def load_ejkernel(name: str = "ejkernel.xla_utils") -> ModuleType | None:
    """Loads its functions for the CPU. It imports triton, which it uses on GPUs only, so an empty module suffices."""
    if importlib.util.find_spec("triton") is None:
        for module in ("triton", "triton.language"):
            sys.modules[module] = MagicMock(__spec__=None)
    return optional(name)
