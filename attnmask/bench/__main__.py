"""Measure what each instruction set of this processor gives, beside PyTorch: ``python -m attnmask.bench``."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import sys
import textwrap
import time
from concurrent.futures import BrokenExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import attnmask
from attnmask.bench.cases import FUNCTIONS, TOLERANCE, known
from attnmask.bench.race import PEAK, TORCH, Case, Contenders, error, noisy

WIDTH = 96
SECONDS, QUICK_SECONDS = 2.5, 0.3  # a case, about
BUSY = 0.05  # of the processors, by other processes
TELLING = 4  # cases after which the time left is estimated from them
NAME, CELLS = 12, (8, 8, 6)  # widths of columns: the first, and those of each type

Report = dict[str, Any]


def processor() -> str:
    """The name of the processor, with its numbers where Linux has them: virtual machines hide the name."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    except OSError:
        return platform.processor() or platform.machine()
    fields: dict[str, str] = {}
    for field, colon, value in (line.partition(":") for line in first.splitlines()):
        fields[field.strip()] = value.strip() if colon else ""
    numbers = [f"{name} {fields[field]}" for field, name in FIELDS.items() if field in fields]
    name = fields.get("model name", platform.machine())
    return f"{name} ({', '.join(numbers)})" if numbers else name


FIELDS = {
    "cpu family": "family",
    "model": "model",
    "CPU implementer": "implementer",
    "CPU part": "part",
}


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def description(options: argparse.Namespace) -> Report:
    config = attnmask.show_config("dict") or {}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": processor(),
        "processors": config["processors"],
        "system": f"{platform.system()} {platform.machine()}",
        "threads": options.threads,
        "level": config["isa"],
        "levels": config["isa_available"],
        "attnmask": config["version"],
        "compiler": config["compiler"],
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": version_of("torch"),
        "quick": options.quick,
    }


# Measures


def measure(contenders: Contenders, case: Case, level: str, seconds: float) -> Report:
    """Compare the results of a case, and then time it."""
    function = FUNCTIONS[case.function]
    function = function.smaller() if case.quick else function
    prepared = contenders.prepare(case)
    expected = function.expected(*function.arrays(case.type))
    errors = {name: error(results, expected) for name, (results, _) in prepared.items() if name != PEAK}
    wrong = {name for name, size in errors.items() if size > TOLERANCE[case.type]}
    times = contenders.race([name for name in prepared if name not in wrong], seconds)
    best = {name: min(samples) for name, samples in times.items()}
    rates = {name: prepared[name][1] / seconds for name, seconds in best.items()}
    rows: Report = {name: {"error": size, "differs": True} for name, size in errors.items() if name in wrong}
    for name, samples in times.items():
        rows[name] = {
            "ms": 1e3 * best[name],
            "median_ms": 1e3 * float(np.median(samples)),
            "rounds": len(samples),
            "noisy": noisy(samples),
            "rate": rates[name] / 1e9,
            "of_peak": rates[name] / rates[PEAK] if PEAK in rates else None,
            "error": errors.get(name),
        }
    return {
        "function": case.function,
        "about": function.about,
        "type": case.type,
        "unit": function.unit,
        "times": rows,
        "ratio": best[TORCH] / best[level] if {TORCH, level} <= best.keys() else None,
    }


# Tables


def digits(value: float) -> str:
    """At least three significant digits."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


def cells(row: Report | None, name: str) -> tuple[str, str, str]:
    if row is None:
        return "-", "-", "-"
    if row.get("differs"):
        return "differs", "-", "-"
    share = "-" if row["of_peak"] is None else f"{row['of_peak']:.0%}"
    if name == PEAK:
        return "", digits(row["rate"]), ""
    return ("~" if row["noisy"] else "") + digits(row["ms"]), digits(row["rate"]), share


def line(name: str, parts: list[str]) -> str:
    widths = CELLS * (len(parts) // len(CELLS))
    return (
        f"{name:{NAME}}" + "".join(f"{part:>{width}}" for part, width in zip(parts, widths, strict=True))
    ).rstrip()


def table(cases: list[Report], names: list[str]) -> str:
    """Return the table of one function: a column for each type, a line for each contender."""
    first, width = cases[0], sum(CELLS)
    title = textwrap.fill(f"{first['function'].capitalize()}: {first['about']}", WIDTH)
    lines = [title, " " * NAME + "".join(f"{case['type']:>{width}}" for case in cases)]
    lines.append(line("", len(cases) * ["ms", first["unit"], "peak"]))
    for name in names:
        rows = [case["times"].get(name) for case in cases]
        if any(rows):
            lines.append(line(name, [cell for row in rows for cell in cells(row, name)]))
    ratios = [f"{case['ratio']:.2f}x" if case["ratio"] else "-" for case in cases]
    if any(case["ratio"] for case in cases):
        lines.append(line("ratio", [cell for each in ratios for cell in (each, "", "")]))
    return "\n".join(lines)


def heading(report: Report, missing: dict[str, str]) -> str:
    packages = "".join(
        f", {name} {report[key]}" for key, name in (("numpy", "NumPy"), ("torch", TORCH)) if report[key]
    )
    threads = "1 thread" if report["threads"] == 1 else f"{report['threads']} threads"
    texts = [
        f"attnmask {report['attnmask']} by {report['compiler']}, Python {report['python']}{packages}",
        f"{report['processor']}, {report['system']}, processors: {report['processors']}. {threads}. attnmask takes "
        f"{report['level']} here, unless ATTNMASK_ISA names another level.",
        "ms: the best of some rounds in which all take turns; ~: the median is 25% above it. peak: the share of what "
        "independent multiply-adds of the type reach in C (float32's for float16, and where there is no instruction "
        "for bfloat16), or of what C reads; the row peak has the whole rate. ratio: PyTorch's time over that of "
        f"{report['level']}.",
    ]
    texts += [f"Without {name}: {reason}." for name, reason in missing.items()]
    return "\n".join(textwrap.fill(text, WIDTH) for text in texts)


class Others:
    """How much of the processors other processes use, on Linux."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.before = self._others()

    def share(self) -> float | None:
        """Since it was made. Processes that were started since then have to have ended."""
        after = self._others()
        if self.before is None or after is None:
            return None
        return max(0.0, (after - self.before) / (time.perf_counter() - self.begin) / (os.cpu_count() or 1))

    @staticmethod
    def _others() -> float | None:
        """Seconds of processor time, but for this process and its children."""
        try:
            user, nice, system, _, _, irq, softirq, steal = map(
                int, Path("/proc/stat").read_text().split()[1:9]
            )
        except (OSError, ValueError):
            return None
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return busy - sum(os.times()[:4])


class Progress:
    """A line that says how far it is, on a terminal only."""

    def __init__(self, cases: int, seconds: float) -> None:
        self.cases, self.planned, self.begin = cases, seconds, time.perf_counter()
        self.shown = sys.stderr.isatty()

    def say(self, done: int, name: str) -> None:
        if self.shown:
            if not done:
                self.begin = time.perf_counter()
            passed = time.perf_counter() - self.begin
            each = passed / done if done >= TELLING else self.planned
            left = max(each * (self.cases - done), 1)
            text = f"{done + 1} of {self.cases}: {name}, about {left:.0f} s left"
            print(f"\r{text:{WIDTH - 1}}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.shown:
            print("\r" + " " * (WIDTH - 1) + "\r", end="", file=sys.stderr, flush=True)


def run(options: argparse.Namespace) -> Report:
    """Measure and print tables as they are made; return what a report holds."""
    report = description(options)
    seconds = QUICK_SECONDS if options.quick else SECONDS
    cases = [
        Case(name, kind, options.quick)
        for name, function in FUNCTIONS.items()
        for kind in function.types
        if known(kind)
    ]
    progress, others = Progress(len(cases), 1.2 * seconds), Others()
    progress.say(0, "starting")
    with Contenders(report["levels"], bool(report["torch"]), options.threads) as contenders:
        missing = dict(contenders.missing)
        if not known("bfloat16"):
            missing["bfloat16"] = "NumPy needs ml_dtypes for it, pip install ml_dtypes"
        progress.clear()
        print(heading(report, missing), flush=True)
        report["cases"] = []
        for number, case in enumerate(cases):
            progress.say(number, f"{case.function}, {case.type}")
            report["cases"].append(measure(contenders, case, report["level"], seconds))
            made = [each for each in report["cases"] if each["function"] == case.function]
            if case is cases[-1] or cases[number + 1].function != case.function:
                progress.clear()
                print("\n" + table(made, [*report["levels"], TORCH, PEAK]), flush=True)
    report["others"] = others.share()
    if (report["others"] or 0) > BUSY:
        text = (
            f"Other processes used {report['others']:.0%} of the processors meanwhile: times may be too long."
        )
        print("\n" + textwrap.fill(text, WIDTH))
    return report


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m attnmask.bench", description=__doc__.partition(":")[0] + ".")
    parser.add_argument("--quick", action="store_true", help="less work and few rounds: to see that all runs")
    parser.add_argument("--json", metavar="FILE", help="write all numbers to a file, for a report")
    parser.add_argument(
        "--threads", type=int, default=attnmask.get_num_threads(), help="of each library (%(default)s)"
    )
    options = parser.parse_args(arguments)
    if options.threads < 1:
        parser.error(f"--threads must be 1 or more, got {options.threads}")
    if options.json:
        try:
            Path(options.json).touch()  # before a minute of work
        except OSError as problem:
            parser.error(f"--json: cannot write to {options.json}: {problem.strerror}")
    try:
        report = run(options)
        if options.json:
            Path(options.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130  # what a shell reports of a program that SIGINT ended
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at exit
        return 1
    except BrokenExecutor:
        print(
            f"{parser.prog}: error: a process that measures has died, perhaps for want of memory",
            file=sys.stderr,
        )
        return 1
    wrong = [
        f"{case['function']}, {case['type']}, {name}: differs by {row['error']:.1g}"
        for case in report["cases"]
        for name, row in case["times"].items()
        if row.get("differs")
    ]
    print("\n".join(wrong), end="\n" if wrong else "", file=sys.stderr)
    if options.json:
        print(f"\nWritten to {options.json}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
