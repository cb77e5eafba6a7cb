"""PyTorch's own tests of attention on the CPU pass with attnmask installed as they pass without it.

PyTorch's wheels do not bring them: ATTNMASK_TORCH_TESTS names the folder ``test`` of its sources, of the version
that is installed. They import expecttest and scipy, too, and take some minutes.
"""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from environment import import_paths

FOLDER = os.environ.get("ATTNMASK_TORCH_TESTS")
RUN = """
import sys
import pytest
if sys.argv[1] == "installed":
    import attnmask.torch
    attnmask.torch.install()
sys.exit(pytest.main(sys.argv[2:]))
"""


def passing(how, report):
    """The names of the tests that pass."""
    options = ["--noconftest", "-c", os.devnull, "-p", "no:cacheprovider", "-q", "-k", "CPU"]
    command = [sys.executable, "-c", RUN, how, str(Path(FOLDER) / "test_transformers.py"), *options]
    done = subprocess.run(
        [*command, f"--junitxml={report}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | import_paths(),
    )
    assert done.returncode in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), done.stdout
    return {
        case.attrib["name"] for case in ElementTree.parse(report).iter("testcase") if not case.findall("*")
    }


@pytest.mark.skipif(not FOLDER, reason="ATTNMASK_TORCH_TESTS, a folder of PyTorch's sources, is not set")
def test_what_passes_without_attnmask_passes_with_it(tmp_path):
    pytest.importorskip("torch")
    own, installed = (passing(how, tmp_path / f"{how}.xml") for how in ("own", "installed"))
    assert len(own) > 100
    assert not own - installed
