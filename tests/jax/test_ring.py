"""attnmask.jax.ring_attention on several devices: results and gradients of one, what is sent, errors."""

import os
import socket
import subprocess
import sys

import pytest
from environment import ROOT, SANITIZED, import_paths

pytest.importorskip("jax")
pytestmark = pytest.mark.skipif(SANITIZED, reason="programs in Python")
WORKER = ROOT / "tests/_support/jax_ring_worker.py"


def run(*processes):
    """Each is said by the words of its command line."""
    environment = os.environ | import_paths()
    started = [
        subprocess.Popen([sys.executable, WORKER, *words], stdout=-1, stderr=-1, text=True, env=environment)
        for words in processes
    ]
    try:
        said = [process.communicate(timeout=1200) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (out, errors) in zip(started, said, strict=True):
        assert (process.returncode, out.split()[-1:]) == (0, ["done"]), errors  # gloo says something, too


@pytest.mark.long
@pytest.mark.parametrize("scenario", ["same", "edges"])
@pytest.mark.parametrize("world", ["2", "4"])
def test_the_same_as_one_device(world, scenario):
    run((world, scenario))


@pytest.mark.long
def test_devices_of_two_processes():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    run(("4", "shared", port, "0"), ("4", "shared", port, "1"))


@pytest.mark.long
@pytest.mark.parametrize("world", ["2", "4"])
def test_what_is_sent(world):
    run((world, "messages"))


@pytest.mark.long
def test_memory_does_not_grow_with_the_number_of_devices():
    run(("8", "memory"))


def test_errors():
    run(("2", "errors"))
