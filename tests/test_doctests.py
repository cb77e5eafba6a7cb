"""Every example runs as printed: in the docstrings of the modules, their functions and classes, and in the README."""

import contextlib
import doctest
import importlib.util
import io
import pkgutil
import re
from pathlib import Path

import numpy as np
import pytest

import attnmask

README = Path(__file__).parent.parent / "README.md"


NOT_HERE = {"attnmask.__main__"} | {
    f"attnmask.{name}" for name in ("jax", "torch") if not importlib.util.find_spec(name)
}


def modules():
    names = [info.name for info in pkgutil.walk_packages(attnmask.__path__, "attnmask.")]
    return [attnmask, *(importlib.import_module(name) for name in names if name not in NOT_HERE)]


def examples():
    """One for each docstring that has any; a module finds its own functions and classes only."""
    for module in modules():
        for test in doctest.DocTestFinder().find(module, extraglobs={"np": np, "attnmask": attnmask}):
            if test.examples:
                yield pytest.param(test, id=test.name)


@pytest.mark.parametrize("test", list(examples()))
def test_docstring(test, set_threads):  # which undoes what an example sets
    report = io.StringIO()
    result = doctest.DocTestRunner().run(test, out=report.write)
    assert not result.failed, report.getvalue()


@pytest.mark.skipif(not README.exists(), reason="the tests run without the README")
def test_readme(set_threads):
    """The lines to paste print what their comments say."""
    for block in re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(block, {})
        expected = re.findall(r"^print\(.*\)  # (.*)$", block, re.M)
        assert printed.getvalue().splitlines() == expected
