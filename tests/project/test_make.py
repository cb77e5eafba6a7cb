"""What `make` says where a machine lacks something, and what the files at the root say of the package."""

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import environment
import pytest
from environment import ROOT, SANITIZED

import attnmask
from attnmask import _core

pytestmark = pytest.mark.levels("once")

MAKE = shutil.which("make")
with_make = pytest.mark.skipif(not MAKE or SANITIZED, reason="needs make, and programs without a sanitizer")

NO_COMPILER = (
    "attnmask needs a C compiler (gcc or clang), and {} is none: apt install gcc, or xcode-select --install"
)
NO_HEADERS = (
    "attnmask needs the headers of Python (Python.h): apt install python3-dev, or dnf install python3-devel"
)
NO_PYTHON = "attnmask needs Python 3.11 or newer, and {} is none: make PYTHON=python3.12"
NO_GCC = "make sanitize needs gcc and its sanitizers: apt install gcc"
NO_CLANG = "make tsan needs clang and its OpenMP: apt install clang libomp-dev"


def test_a_checkout_that_is_not_built_says_what_to_run(tmp_path):
    shutil.copytree(
        Path(attnmask.__file__).parent,
        tmp_path / "attnmask",
        ignore=shutil.ignore_patterns("*.so", "__pycache__"),
    )
    # Without site-packages, where another checkout may have its C module.
    result = environment.python("import attnmask", "-PBS", PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    said = result.stderr.splitlines()[-1]
    assert said.startswith(
        f"ImportError: attnmask in {tmp_path} is not built for this Python, {platform.python_version()}"
    )
    assert "`pip install -e .`" in said
    assert "`make demo`" in said


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def venv(tmp_path) -> Path:
    """An environment whose packages are there, but for attnmask itself."""
    folder = tmp_path / "venv"
    folder.mkdir()
    (folder / "created").touch()
    script(folder / "bin" / "python", f'exec {sys.executable} "$@"')
    return folder


@pytest.fixture
def no_compiler(tmp_path) -> str:
    """A PATH with what make itself needs, and no more."""
    folder = tmp_path / "path"
    folder.mkdir()
    for name in ("find", "getconf", "touch"):
        (folder / name).symlink_to(shutil.which(name))
    return str(folder)


def last_words(target: str, *variables: str, **environment: str) -> str:
    """What a target that fails says at last, before make says that it has failed."""
    of_make = ("MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS")  # of one that runs the tests
    kept = {name: value for name, value in os.environ.items() if name not in ("CC", *of_make)}
    command = [str(MAKE), "--no-print-directory", target, *variables]
    result = subprocess.run(
        command, cwd=ROOT, env=kept | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert result.returncode == 2, result.stdout
    lines = result.stdout.splitlines()
    assert lines[-1].startswith("make: ***"), result.stdout
    return lines[-2].removeprefix("error: ")


@with_make
def test_make_without_a_compiler(venv, no_compiler):
    pytest.importorskip("setuptools")
    assert last_words("demo", f"VENV={venv}", CC="false") == NO_COMPILER.format("false")
    said = last_words("demo", f"VENV={venv}", PATH=no_compiler)
    assert said == NO_COMPILER.format(re.search("and (.*) is", said)[1])


@with_make
@pytest.mark.skipif(not shutil.which("cc"), reason="needs a compiler")
def test_make_without_the_headers_of_python(venv, tmp_path):
    pytest.importorskip("setuptools")
    compiler = (
        'for arg do shift; case $arg in -I*python*) ;; *) set -- "$@" "$arg";; esac; done; exec cc "$@"'
    )
    cc = script(tmp_path / "blind" / "cc", compiler)
    assert last_words("demo", f"VENV={venv}", CC=str(cc)) == NO_HEADERS


@with_make
def test_make_without_a_new_python(tmp_path):
    old = script(
        tmp_path / "old" / "python", f'exec {sys.executable} -c "import sys; sys.version_info = (3, 10); $2"'
    )
    for python in (str(old), "no-such-python"):
        assert last_words("demo", f"VENV={tmp_path / 'new'}", f"PYTHON={python}") == NO_PYTHON.format(python)


@with_make
@pytest.mark.parametrize(("target", "said"), [("sanitize", NO_GCC), ("tsan", NO_CLANG)])
def test_make_without_a_sanitizer(target, said, venv, no_compiler):
    for name in ("installed", "test.txt"):
        (venv / name).touch()
    assert last_words(target, f"VENV={venv}", PATH=no_compiler) == said
    script(Path(no_compiler) / "gcc", "echo libasan.so")  # which it is called where it is not installed
    assert last_words(target, f"VENV={venv}", PATH=no_compiler) == said


def build(folder: Path, status: int = 1, **environment: str) -> str:
    """What a build in a folder says that ends so."""
    pytest.importorskip("setuptools")
    places = ["--build-temp", str(folder), "--build-lib", str(folder)]
    command = [sys.executable, "setup.py", "--quiet", "build_ext", *places]
    result = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    assert result.returncode == status, result.stderr
    return result.stderr


compiles = pytest.mark.skipif(
    SANITIZED or not shutil.which("cc") or not (ROOT / "setup.py").exists(), reason="needs a compiler"
)
WITHOUT_SOURCES = 'case "$*" in *csrc/*) {} ;; *{}*) exit 1 ;; esac; exec cc "$@"'


@compiles
def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").touch()
    cc = script(tmp_path / "bin" / "cc", WITHOUT_SOURCES.format("exit 0", "nothing"))
    said = build(tmp_path / "file" / "temp", CC=str(cc)).splitlines()[-1]
    assert re.fullmatch(
        r"error: attnmask: cannot write to \S+: Not a directory\. A build needs a folder .* 20 MB", said
    )


@compiles
def test_a_disk_that_is_full(tmp_path):
    full = "echo 'fatal error: error writing to x.o: No space left on device' >&2; exit 1"
    cc = script(tmp_path / "bin" / "cc", WITHOUT_SOURCES.format(full, "nothing"))
    said = build(tmp_path / "temp", CC=str(cc)).splitlines()[-1]
    assert re.fullmatch(r"error: attnmask: cannot write to \S+: No space left on device\. .* 20 MB", said)


@compiles
@pytest.mark.parametrize(("flag", "said"), [
    ("-fopenmp", "the compiler has no OpenMP, so attention will use one thread: apt install libomp-dev"),
    ("-mavx512bf16", "the compiler does not know avx512bf16, amx, so it builds no kernels for that"),
])  # fmt: skip
def test_a_compiler_that_lacks_a_flag(flag, said, tmp_path):
    """It builds what it can."""
    if flag.startswith("-m") and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("the flags of x86-64")
    cc = script(tmp_path / "bin" / "cc", WITHOUT_SOURCES.format("exit 1", flag))
    assert f"attnmask: {said}" in build(tmp_path / "temp", CC=str(cc))


@compiles
@pytest.mark.parametrize("debug", ["", "1"])
def test_a_release_has_no_doors_for_tests(debug, tmp_path):
    compiled = tmp_path / "compiled"
    cc = script(
        tmp_path / "bin" / "cc", f'echo "$*" >> {compiled}\n' + WITHOUT_SOURCES.format("exit 0", "-mno")
    )
    build(tmp_path / "temp", 0, CC=str(cc), ATTNMASK_DEBUG=debug)
    assert "csrc/module.c" in compiled.read_text()
    for part in ("csrc/bind/testing", "AM_FOR_TESTS"):
        assert (part in compiled.read_text()) == bool(debug)


def test_only_a_release_lacks_doors_for_tests():
    """Else tests would be skipped where they should run."""
    released = Path(attnmask.__file__).parents[1].name in ("site-packages", "dist-packages")
    assert {hasattr(_core, name) for name in environment.DOORS} == {not released}


@with_make
def test_make_uses_all_processors():
    """Unless PYTEST_ARGS says otherwise."""

    def command(*variables: str) -> str:
        made = ["VENV=none", "-o", "none/installed", "-o", "none/test.txt", "--no-print-directory", "-n"]
        given = (
            "MAKEFLAGS",
            "MAKELEVEL",
            "MAKEOVERRIDES",
            "PYTEST_ARGS",
            "SLOWEST",
        )  # of one that runs the tests
        kept = {name: value for name, value in os.environ.items() if name not in given}
        result = subprocess.run(
            [str(MAKE), *made, *variables], cwd=ROOT, env=kept, capture_output=True, text=True
        )
        return next(line for line in result.stdout.splitlines() if "pytest" in line)

    assert command("test", "JOBS=3") == "none/bin/pytest --durations=10 -n 3 --dist worksteal"
    assert command("test-quick", "PYTEST_ARGS=-k x", "SLOWEST=20") == "none/bin/pytest --durations=20 -k x"


of_sources = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="the tests run without the sources")


@of_sources
def test_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"\nversion: {project['version']}\n" in (ROOT / "CITATION.cff").read_text()


@of_sources
def test_one_list_of_pythons():
    """Those that the classifiers name are tested, and get wheels."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    workflow = (ROOT / ".github/workflows/tests.yml").read_text()
    named = [name.rpartition(" :: ")[2] for name in settings["project"]["classifiers"]]
    named = [name for name in named if re.fullmatch(r"3\.\d+", name)]
    tested = re.search(r"python: \[(.*)\]", workflow)[1].replace('"', "").split(", ")
    assert [python for python in tested if not python.endswith("t")] == named
    built = settings["tool"]["cibuildwheel"]["build"].split()
    assert built == [f"cp{python.replace('.', '')}-*" for python in tested]


@pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="needs a checkout")
def test_a_source_distribution_holds_all(tmp_path):
    """What git knows, and what setuptools adds."""
    pytest.importorskip("setuptools")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    checkout = tmp_path / "checkout"
    for name in tracked.stdout.splitlines():
        if (ROOT / name).exists():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, checkout / name)
    command = [sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", str(tmp_path)]
    subprocess.run(command, cwd=checkout, check=True, env=os.environ | {"HOME": str(tmp_path)})
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        held = {member.name.partition("/")[2] for member in archive if member.isfile()}
    added = {name for name in held if name.startswith("attnmask.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert held - added == {
        name for name in tracked.stdout.splitlines() if (ROOT / name).exists() and name != ".gitignore"
    }


@of_sources
def test_one_wheel_for_all_pythons():
    """But free-threaded ones: its tag and the C API are of the oldest Python."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    oldest = settings["project"]["requires-python"].removeprefix(">=3.")
    text = (ROOT / "setup.py").read_text()
    assert re.findall(r'"py_limited_api": "cp3(\d+)"', text) == [oldest]
    assert re.findall(r'"Py_LIMITED_API", "0x03(..)0000"', text) == [f"{int(oldest):02X}"]
