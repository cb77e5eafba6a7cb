"""attnmask.torch.ring_attention of several processes: results and gradients of one, and errors that reach all."""

import os
import subprocess
import sys

import numpy as np
import pytest
from environment import ROOT, SANITIZED, import_paths, python

WORKER = ROOT / "tests/_support/ring_worker.py"


@pytest.fixture(autouse=True)
def gloo():
    torch = pytest.importorskip("torch")
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("needs gloo")
    if SANITIZED:
        pytest.skip("programs in Python")


def run(tmp_path, world, scenario):
    """Exit codes, outputs and errors of so many processes."""
    environment = os.environ | import_paths()
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


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 4])
def test_the_same_as_one_process(tmp_path, world):
    for code, out, errors in run(tmp_path, world, "same"):
        assert (code, out) == (0, "done\n"), errors


def test_errors_are_raised_in_all_processes(tmp_path):
    for code, out, errors in run(tmp_path, 2, "errors"):
        assert (code, out) == (0, "done\n"), errors


def test_arguments_are_compared_by_their_numbers():
    """Whatever holds them."""
    import torch

    from attnmask.torch._ring import _digest

    for name, numbers, others in (
        ("alibi_slopes", [0.5, 0.25], [0.1, 0.2]),
        ("q_segment_ids", [[0, 0, 1]], [[0, 1, 1]]),
        ("cu_seqlens", list(range(2000)), [*range(1000), 1000, *range(1001, 1999), 1998]),
    ):
        given = (
            numbers,
            np.array(numbers),
            torch.tensor(numbers, dtype=torch.float64 if name == "alibi_slopes" else None),
        )
        assert len({_digest({name: x}) for x in given}) == 1
        for convert in (list, np.array, torch.tensor):
            assert _digest({name: convert(others)}) != _digest({name: numbers})


@pytest.mark.long
@pytest.mark.parametrize("scenario", ["killed", "late"])
def test_a_process_that_stops_is_an_error_in_the_others(tmp_path, scenario):
    *others, last = run(tmp_path, 3, scenario)
    for code, out, errors in others:
        assert (code, out) == (0, "error\n"), errors
    if scenario == "killed":
        assert last[0] == -9


def test_a_group_that_is_destroyed_has_no_threads_any_more():
    """Whatever an optimizer imports in between: threads that run while Python ends may abort it."""
    program = """
import sys, weakref
import torch
import attnmask.torch

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
group = weakref.ref(torch.distributed.group.WORLD)
torch.optim.Adam([torch.zeros(1, requires_grad=True)])
assert "torch._dynamo" in sys.modules
torch.distributed.destroy_process_group()
assert group() is None
"""
    done = python(program, timeout=600, **import_paths())
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_the_example_has_the_losses_of_one_process():
    """By ``torchrun``, with both layouts."""
    example = ROOT / "examples" / "ring_train.py"
    if not example.exists():
        pytest.skip("the tests run without the examples")
    environment = os.environ | import_paths() | {"OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    losses = []
    for command in ([sys.executable, example], [*torchrun, example], [*torchrun, example, "--planned"]):
        done = subprocess.run(
            [*command, "--steps", "25"], capture_output=True, text=True, env=environment, timeout=600
        )
        assert done.returncode == 0, done.stderr
        losses.append([line.split()[3] for line in done.stdout.splitlines() if line.startswith("step")])
    assert len(losses[0]) == 2
    assert float(losses[0][1]) < float(losses[0][0]) - 1
    for others in losses[1:]:
        assert [float(x) for x in others] == pytest.approx([float(x) for x in losses[0]], abs=2e-3)
