"""Every example runs as printed: in the docstrings of the modules, their functions and classes, and in the README."""

import ast
import contextlib
import doctest
import importlib.util
import inspect
import io
import re
from pathlib import Path

import numpy as np
import pytest
from environment import ROOT
from public_names import NEEDS, modules, public

import attnmask

README = ROOT / "README.md"
PAGES = sorted((README.parent / "docs").glob("*.rst"))


def examples():
    """One for each docstring that has any; a module finds its own functions and classes only."""
    for module in modules():
        for test in doctest.DocTestFinder().find(module, extraglobs={"np": np, "attnmask": attnmask}):
            if test.examples:
                yield pytest.param(test, id=test.name)


@pytest.mark.parametrize("test", list(examples()))
def test_docstring(test, set_threads):  # which undoes what an example sets
    for name in ("matplotlib", "import torch"):
        if name in test.docstring:
            pytest.importorskip(name.removeprefix("import "))
    report = io.StringIO()
    result = doctest.DocTestRunner().run(test, out=report.write)
    assert not result.failed, report.getvalue()


def test_everything_public_has_an_example():
    lacking = [
        f"{module.__name__}.{name}" for module, name, thing in public() if ">>>" not in inspect.getdoc(thing)
    ]
    assert not lacking


@pytest.mark.skipif(not PAGES, reason="the tests run without the documentation")
def test_the_reference_has_everything_public():
    """And nothing twice. Methods have lines of their own where they are in sections, those of MaskInfo."""
    named = []
    for page in PAGES:
        module = None
        for line in page.read_text(encoding="utf-8").splitlines():
            if line.startswith(".. currentmodule:: "):
                module = line.split()[2]
            elif re.match(r"\.\. auto(function|class|method|property):: (?!.*__)", line):
                named.append(f"{module}.{line.split()[2]}")
    offered = {}
    for module in NEEDS:  # read, since a framework may not be installed
        path = Path(attnmask.__path__[0]).joinpath(*module.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        lists = [node.value for node in tree.body if ast.unparse(node).startswith("__all__")]
        offered[module] = ast.literal_eval(lists[0])
    frameworks = {f"attnmask.{module}.{name}" for module, names in offered.items() for name in names}
    expected = frameworks | {
        f"{module.__name__}.{name}"
        for module, name, _ in public()
        if "." not in name or name.startswith("MaskInfo.")
    }
    assert sorted(named) == sorted(expected)


@pytest.mark.skipif(not README.exists(), reason="the tests run without the README")
def test_readme(set_threads):
    """The lines to paste print what their comments say."""
    for block in re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S):
        if "import torch" in block and not importlib.util.find_spec("torch"):
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(block, {})
        expected = re.findall(r"^print\(.*\)  # (.*)$", block, re.M)
        assert printed.getvalue().splitlines() == expected
