"""The fuzzer: hostile calls of everything (`make fuzz` makes more of them), and that it notices what is wrong."""

import contextlib
import gc
import os
import subprocess
import sys

import numpy as np
import pytest
from environment import ROOT, SANITIZED, import_paths

import attnmask
from attnmask import operations

FUZZ = ROOT / "tests/fuzz"
import fuzzer  # noqa: E402  # isort: skip
from drawing import FLOATS, floats  # noqa: E402  # isort: skip
from rows_of_functions import Target  # noqa: E402  # isort: skip
from targets import TARGETS  # noqa: E402  # isort: skip

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the limits are those of Linux")


@on_linux
@pytest.mark.parametrize("first", range(0, 5000, 1000))
def test_hostile_calls(first):
    """Each has a right result or a documented error; nothing crashes, hangs or is written that should not be."""
    calls = "100" if SANITIZED else "1000"
    command = [sys.executable, str(FUZZ), "--seed", "0", "--first", str(first), "--calls", calls]
    environment = os.environ | import_paths()
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert f"{calls} calls of seed 0" in result.stdout


def test_everything_public_is_called():
    called = {name.partition(",")[0] for name in TARGETS}
    containers = {
        "AttentionStatistics",
        "FlashAttentionGrads",
        "FlashAttentionSecondGrads",
        "LinearAttentionGrads",
        "MaskSharding",
        "ShortConvolutionGrads",
    }  # tuples of what they are given
    functions = {name for name in attnmask.__all__ if callable(getattr(attnmask, name))} - containers
    assert functions - called == {"AttnmaskWarning"}
    # The rest takes no argument, or objects of other libraries.
    methods = {f"MaskInfo.{name}" for name in vars(attnmask.MaskInfo) if name[0] != "_"}
    assert methods - called == {"MaskInfo.plot", "MaskInfo.from_block_mask", "MaskInfo.to_block_mask"}
    methods = {f"KVCache.{name}" for name in vars(attnmask.KVCache) if name[0] != "_"}
    assert methods - called == {"KVCache.free_pages", "KVCache.new_sequence"}
    helpers = {f"OperationImpl.{name}" for name in vars(operations.OperationImpl) if name[0] != "_"}
    forms = {"OperationImpl.get_impl_name", "OperationImpl.forward_native", "OperationImpl.forward_cpu"}
    assert helpers - called == forms  # which an operator is called by


# They call what loses references to types in NumPy itself, such as np.add.at.
OF_NUMPY = ("OperationMetadata", "operations.vanilla", "plan_shards", "t5_relative_bias_vjp")


@pytest.mark.skipif(SANITIZED, reason="a sanitizer has its own memory")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in TARGETS if name != "OperationRegistry.register"])
def test_no_call_and_no_error_loses_objects(name):
    """ATTNMASK_TEST_CALLS right calls, and as many in which each argument in turn is wrong."""
    calls = int(os.environ.get("ATTNMASK_TEST_CALLS", 50))
    target = TARGETS[name]

    def round_of_calls(index: int) -> None:
        arguments = target.arguments(np.random.default_rng(index % 10))
        changes = [{}, *({name: value} for name in arguments for value in (object(), np.zeros(3, complex)))]
        for change in changes:
            with contextlib.suppress(Exception):
                target.call(**arguments | change)

    names = ("int32", "int64", "float32", "float64", "complex", *FLOATS)
    dtypes = [] if name in OF_NUMPY else [np.dtype(name) for name in names]
    grown = []
    for _ in range(20):  # caches of Python and of the library grow for some time
        gc.collect()
        before = np.array([sys.getallocatedblocks(), *map(sys.getrefcount, dtypes)])
        for index in range(calls):
            round_of_calls(index)
        gc.collect()
        grown.append((np.array([sys.getallocatedblocks(), *map(sys.getrefcount, dtypes)]) - before).tolist())
        if max(grown[-1]) < calls // 2:
            return
    pytest.fail(f"objects, and references to types, more after each {calls} rounds: {grown}")


def write(x):
    x[0] = 7


def fail_and_write(x, out):
    out[0] = 7
    raise ValueError("x is wrong")


BAD = {
    "x was changed": lambda x: write(x),
    "out was changed": fail_and_write,
    "gave another result": lambda x: np.ndarray.strides.__get__(x) if isinstance(x, np.ndarray) else 0,
    "are refused": lambda x: (_ for _ in ()).throw(ValueError("x is wrong")),
    "not documented": lambda x: (_ for _ in ()).throw(ZeroDivisionError("x")),
    "names no argument": lambda x: (_ for _ in ()).throw(ValueError("something is wrong")),
    "a hostile object was asked": lambda x: x[0].sum() if type(x).__name__ == "Subclass" else 0,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("problem", BAD)
def test_what_is_wrong_is_noticed(problem, monkeypatch):
    def arguments(rng):
        return {"x": floats(rng, 3, 4)} | ({"out": np.zeros(3)} if problem.startswith("out") else {})

    def call(x, **more):
        right = (
            type(x) is np.ndarray
            and x.flags.c_contiguous
            and x.shape == (3, 4)
            and problem != "x was changed"
        )
        odd = isinstance(x, np.ndarray) and np.ndarray.size.__get__(x) > 100
        return 0 if odd or (right and "out" not in more) else BAD[problem](x, **more)

    monkeypatch.setitem(TARGETS, "bad", Target("bad", arguments, call))
    monkeypatch.setattr(fuzzer, "time_limit", contextlib.nullcontext)
    found = []
    for number in range(60):
        try:
            found += fuzzer.Case(0, number, "bad").problems()
        except (ValueError, ZeroDivisionError):  # of the right arguments
            continue
    assert any(problem in text for text in found), found


CRASH = """
import ctypes, sys
sys.path.insert(0, {folder!r})
import drawing, fuzzer, targets

def call(x):
    if type(x).__name__ != "ndarray" or x.shape != (3, 4):
        {act}

targets.target("bad", lambda rng: {{"x": drawing.floats(rng, 3, 4)}}, call)
fuzzer.STUCK = 1
sys.exit(fuzzer.main())
"""


@on_linux
@pytest.mark.skipif(SANITIZED, reason="a sanitizer reports crashes itself")
@pytest.mark.parametrize(("act", "status"), [
    ("ctypes.string_at(0)", "(-11)"),
    ("while True:\n            try: sum(range(9999))\n            except BaseException: pass", "(-26)"),
])  # fmt: skip
def test_a_crash_and_a_hang_are_told_with_their_call(act, status, tmp_path):
    script = tmp_path / "planted.py"
    script.write_text(CRASH.format(folder=str(FUZZ), act=act))
    environment = os.environ | import_paths()
    command = [sys.executable, str(script), "--target", "bad", "--seed", "0"]
    result = subprocess.run(
        [*command, "--calls", "5"], capture_output=True, text=True, timeout=200, env=environment
    )
    assert result.returncode == 1, result.stderr
    told = [line for line in result.stdout.splitlines() if f"ended the process {status}" in line]
    assert told, result.stdout
    number = told[0].split()[2]
    again = subprocess.run(
        [*command, "--call", number], capture_output=True, text=True, timeout=200, env=environment
    )
    assert f"call {number} of seed 0 ended the process {status}" in again.stdout
    assert "bad, broken: x" in again.stdout
