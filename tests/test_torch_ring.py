"""attnmask.torch.ring_attention of several processes: results and gradients of one, and errors that reach all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import SANITIZED

WORKER = Path(__file__).parent / "ring_worker.py"


@pytest.fixture(autouse=True)
def gloo():
    torch = pytest.importorskip("torch")
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("needs gloo")
    if SANITIZED:
        pytest.skip("programs in Python")


def run(tmp_path, world, scenario):
    """Exit codes, outputs and errors of so many processes."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    processes = [
        subprocess.Popen(
            [sys.executable, WORKER, str(rank), str(world), tmp_path / "store", scenario],
            stdout=-1,
            stderr=-1,
            text=True,
            env=environment,
        )
        for rank in range(world)
    ]
    try:
        said = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(processes, said, strict=True)]


@pytest.mark.parametrize("world", [2, 4])
def test_the_same_as_one_process(tmp_path, world):
    for code, out, errors in run(tmp_path, world, "same"):
        assert (code, out) == (0, "done\n"), errors


def test_errors_are_raised_in_all_processes(tmp_path):
    for code, out, errors in run(tmp_path, 2, "errors"):
        assert (code, out) == (0, "done\n"), errors


@pytest.mark.parametrize("scenario", ["killed", "late"])
def test_a_process_that_stops_is_an_error_in_the_others(tmp_path, scenario):
    *others, last = run(tmp_path, 3, scenario)
    for code, out, errors in others:
        assert (code, out) == (0, "error\n"), errors
    if scenario == "killed":
        assert last[0] == -9
