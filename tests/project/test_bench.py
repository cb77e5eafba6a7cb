"""`python -m attnmask.bench` measures what it says, and refuses what is wrong."""

import dataclasses
import json
import os
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest
from environment import SANITIZED

import attnmask
from attnmask.bench import __main__ as bench
from attnmask.bench import race
from attnmask.bench.cases import FUNCTIONS, TOLERANCE, known

pytestmark = [
    pytest.mark.levels("once"),
    pytest.mark.skipif(SANITIZED, reason="benchmarks are not for the sanitizer"),
]
COMMAND = [sys.executable, "-m", "attnmask.bench"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    return subprocess.run(
        [*COMMAND, *arguments], env=environment, capture_output=True, text=True, timeout=300
    )


def tiny(name: str):
    """A function with few tokens, more than a tile of keys has."""
    function = FUNCTIONS[name]
    return dataclasses.replace(
        function, tokens=70, heads=8, **{"batch": 2} if hasattr(function, "batch") else {}
    )


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, function in FUNCTIONS.items() for kind in function.types]
)
def test_results_are_compared(name, kind):
    """What is expected is what attnmask and PyTorch return, and a wrong result is told."""
    if not known(kind):
        pytest.skip("ml_dtypes is not installed")
    function = tiny(name)
    arrays = function.arrays(kind)
    expected = function.expected(*arrays)
    results = function.sample(function.ours(*arrays)())
    assert race.error(results, expected) <= TOLERANCE[kind]
    assert race.error([1.1 * array for array in results], expected) > TOLERANCE[kind]
    assert race.error([np.where(array > 0, np.nan, array) for array in results], expected) == np.inf
    assert 0 < FUNCTIONS[name].smaller().work(kind) < FUNCTIONS[name].work(kind)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_results_of_pytorch_are_compared(name, kind):
    pytest.importorskip("torch")
    function = tiny(name)
    arrays = function.arrays(kind)
    call = function.by_torch(*arrays)
    if name == "linear attention":
        assert call is None
    else:
        assert race.error(function.sample(call()), function.expected(*arrays)) <= TOLERANCE[kind]


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "report.json"
    result = run("--quick", "--threads", "1", "--json", str(path))
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout, json.loads(path.read_text(encoding="utf-8"))


def test_the_report(quick):
    _, report = quick
    config = attnmask.show_config("dict")
    assert report["levels"] == config["isa_available"]
    assert (report["attnmask"], report["threads"], report["quick"]) == (config["version"], 1, True)
    kinds = [(case["function"], case["type"]) for case in report["cases"]]
    assert kinds == [(name, kind) for name, row in FUNCTIONS.items() for kind in row.types if known(kind)]
    for case in report["cases"]:
        assert case["times"].keys() - {"PyTorch", "peak"} == set(report["levels"])
        work = FUNCTIONS[case["function"]].smaller().work(case["type"])
        for name, row in case["times"].items():
            assert 0 < row["ms"] <= row["median_ms"]
            assert row["rounds"] >= race.FEWEST
            if name != "peak":
                assert row["rate"] == pytest.approx(work / row["ms"] / 1e6)
                assert row["error"] <= TOLERANCE[case["type"]]
                if "peak" in case["times"]:
                    assert row["of_peak"] == pytest.approx(row["rate"] / case["times"]["peak"]["rate"])


def test_the_tables(quick):
    text, report = quick
    assert max(map(len, text.splitlines())) <= 100
    assert not set(text) & set("\r\033")
    for name in FUNCTIONS:
        assert f"\n{name.capitalize()}: " in text
    for level in report["levels"]:
        assert text.count(f"\n{level} ") == len(FUNCTIONS)


class Broken:
    """Contenders of which one returns other numbers."""

    def __init__(self, levels, torch, threads) -> None:
        self.levels, self.missing = levels, {}

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        pass

    def prepare(self, case):
        function = FUNCTIONS[case.function].smaller()
        results = function.sample(function.ours(*function.arrays(case.type))())
        prepared = dict.fromkeys(self.levels, (results, 1e9)) | {"peak": ([], 8e9)}
        return prepared | {self.levels[0]: ([2 * array for array in results], 1e9)}

    def race(self, names, seconds):
        return {name: [0.5, 0.25] for name in names}


def test_wrong_results_are_not_timed(monkeypatch, capsys):
    monkeypatch.setattr(bench, "Contenders", Broken)
    monkeypatch.setattr(bench, "FUNCTIONS", {"short sequences": FUNCTIONS["short sequences"]})
    wrong = attnmask.show_config("dict")["isa_available"][0]
    assert bench.main(["--quick"]) == 1
    shown = capsys.readouterr()
    assert f"short sequences, float32, {wrong}: differs by 1\n" in shown.err
    lines = [line for line in shown.out.splitlines() if line.startswith(wrong)]
    assert lines[0].split()[1:4] == ["differs", "-", "-"]
    others = attnmask.show_config("dict")["isa_available"][1:]
    if others:
        line = next(line for line in shown.out.splitlines() if line.startswith(others[0]))
        assert line.split()[1:4] == ["~250", "4.00", "12%"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--json", "/nowhere/report.json"],
            "--json: cannot write to /nowhere/report.json: No such file or directory",
        ),
        (["--threads", "0"], "--threads must be 1 or more, got 0"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_wrong_arguments(arguments, message):
    result = run(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.endswith(f"error: {message}\n")


@pytest.mark.parametrize(
    ("problem", "status", "message"),
    [
        (KeyboardInterrupt(), 130, ""),
        (BrokenProcessPool(), 1, "python -m attnmask.bench: error: a process that measures has died"),
    ],
)
def test_what_ends_it_early(problem, status, message, monkeypatch, capsys):
    def run(options):
        raise problem

    monkeypatch.setattr(bench, "run", run)
    assert bench.main([]) == status
    assert capsys.readouterr().err.strip().startswith(message)


def test_a_terminal_shows_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    progress = bench.Progress(8, 2.0)
    progress.say(0, "one")
    progress.clear()
    shown = capsys.readouterr().err
    assert "\r1 of 8: one, about 16 s left" in shown
    assert max(map(len, shown.split("\r"))) < bench.WIDTH


def test_it_is_not_imported_with_the_package():
    code = "import sys, attnmask; print([name for name in sys.modules if name.startswith('attnmask.bench')])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_there_is_no_peak_without_a_compiler(monkeypatch):
    monkeypatch.setenv("CC", "false")
    assert race.compiled(race.Path(race.__file__).with_name("peak.c")) is None
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert race.compiled(race.Path(race.__file__).with_name("peak.c")) is None
