"""Compares flash attention with torch, flex attention, ONNX Runtime, OpenVINO, JAX and ejKernel.

python benchmarks/bench_flash.py [--quick] [--only TEXT] [--threads N]
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import harness
import numpy as np
from flash_cases import Case
from harness import Call, Times, difference, digits, percent, race
from workers import Remote, Worker, WorkerError, started

import attnmask

WORKER = Path(__file__).parent / "flash_peers.py"
PEERS = ("torch", "flex", "ONNX Runtime", "OpenVINO", "JAX", "ejKernel")
TOLERANCE = {"float64": 1e-11, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}  # relative to the largest
SHRINK = 8  # times fewer tokens with --quick
GRADIENTS = hasattr(attnmask, "flash_attention_vjp")

LONG = {"tokens": 8192, "heads": 8}
WINDOW = {**LONG, "causal": True, "window": 256}
DOCUMENTS = {**LONG, "causal": True, "documents": 16}
GROUPED = {"tokens": 4096, "heads": 32, "kv_heads": 8, "channels": 128, "causal": True}
DECODE = {"tokens": 8192, "heads": 32, "kv_heads": 8, "channels": 128, "causal": True}
MEMORY = {"tokens": 32768, "heads": 4, "causal": True}


@dataclass
class Outcome:
    """The outcome of one race: times of attnmask under `new` and `out=`, of peers under their names, and of others."""

    case: Case
    times: dict[str, Times]
    forms: dict[str, str]  # the fastest form of each peer
    wrong: set[str]  # peers whose results differ, and which are not timed
    peak: float  # operations of the yardstick

    @property
    def mine(self) -> Times:
        return self.times["new"]

    @property
    def rate(self) -> str:
        return digits(self.case.flops / self.mine.median / 1e9)

    @property
    def of_peak(self) -> str:
        """The share of the yardstick's rate in its best round: in some rounds the yardstick is disturbed."""
        return percent(self.case.flops / self.peak * self.times["peak"].best / self.mine.median)

    @property
    def peers(self) -> list[str | None]:
        cells: list[str | None] = []
        for name in PEERS:
            form = f" ({self.forms[name]})" if self.forms.get(name) else ""
            cells.append(f"{self.times[name]}{form}" if name in self.times else None)
            if name in self.wrong:
                cells[-1] = f"differs{form}"
        return cells

    @property
    def ahead(self) -> str | None:
        """How many times faster attnmask is than the fastest peer."""
        there = [self.times[name] for name in PEERS if name in self.times]
        return digits(min(there, key=lambda t: t.median).ratio_to(self.mine)) if there else None

    @property
    def cells(self) -> tuple[object, ...]:
        """The cells of the columns that most tables share."""
        return self.mine, self.times.get("out="), self.rate, self.of_peak, *self.peers, self.ahead


COLUMNS = ("attnmask", "out=", "GFLOP/s", "of peak", *PEERS, "ratio")


class Bench:
    def __init__(self, description: str, name: str, title: str) -> None:
        self.options = harness.arguments(description)
        self.report = harness.Report(name, title, self.options, ("onnxruntime", "openvino"))
        threads = str(self.options.threads)
        self.mine = Worker(WORKER, "attnmask", threads)
        asked = [peer for peer in PEERS if peer not in self.options.without.split(",")]
        self.peers = {peer: Worker(WORKER, peer, threads) for peer in asked}
        if self.options.quick and not self.options.only:
            self.peers.pop("flex", None)  # its compiler takes about ten seconds a case
        self.peers = started(self.peers)
        self.mistakes: list[str] = []

    def table(
        self,
        title: str,
        text: str,
        columns: tuple[str, ...],
        cases: list[Case],
        row: Callable[[Case], tuple[object, ...]],
    ) -> None:
        """A table with a row for each case that is selected."""
        asked = [case for case in cases if self.options.only in case.name]
        if asked:
            self.report.heading(title)
            self.report.text(text)
            self.report.table("case", *columns)
            for case in asked:
                self.report.row(case.name, *row(case))
            self.report.end_table()

    def sized(self, case: Case) -> Case:
        return case.shrunk(SHRINK) if self.options.quick else replace(case)

    def prepare(self, case: Case, worker: Worker) -> dict[str, Call]:
        names = worker.ask("prepare", replace(case))  # without its cached arrays
        return {name: Remote(worker, case.name, name) for name in names}

    def measure(
        self,
        case: Case,
        beside: dict[str, Case] | None = None,
        yardsticks: dict[str, Call] | None = None,
        mine: Worker | None = None,
        kind: str | None = None,
        share: float = 1.0,
    ) -> Outcome:
        """Races a case against all peers, and with the cases `beside` it; on the worker `mine` alone, if given."""
        case, worker = self.sized(case), mine or self.mine
        peers = {} if mine else self.peers
        for each in (worker, *peers.values()):
            each.ask("forget")
        contenders, forms, wrong = self.prepare(case, worker), {}, set()
        expected = worker.ask("result", *contenders["new"].name)
        for name, peer in peers.items():
            try:
                ((forms[name], call),) = self.prepare(case, peer).items()
                result = peer.ask("result", *call.name)
            except WorkerError as error:
                print(f"{case.name} without {name}: {error}"[:300], file=sys.stderr)
                continue
            error = float(np.max([*map(difference, result, expected)]))
            if error <= TOLERANCE[case.dtype]:
                contenders[name] = call
            else:
                wrong.add(name)
                self.mistakes.append(f"{case.name}, {name} {forms[name]}: differs by {error:.2g}")
                print(self.mistakes[-1], file=sys.stderr)
        for name, other in (beside or {}).items():
            contenders[name] = self.prepare(self.sized(other), worker)["new"]
        kind = kind or {"float16": "float32"}.get(case.dtype, case.dtype)
        peak, operations = harness.multiply(kind, self.options.threads)
        aside = {"peak": peak, **(yardsticks or {})}
        times = race(contenders | aside, share * self.options.seconds, yardsticks=aside)
        return Outcome(case, times, forms, wrong, operations)

    def close(self) -> None:
        for worker in (self.mine, *self.peers.values()):
            worker.close()


# Forward


def forward(bench: Bench) -> None:
    cases = [
        Case(f"{dtype}, D={channels}, {name}", dtype, channels=channels, causal=name == "causal")
        for dtype in ("float32", "bfloat16", "float16", "float64")
        for channels in (64, 128)
        for name in ("full", "causal")
    ]
    text = "2,048 tokens, 16 heads."
    bench.table("Full and causal", text, COLUMNS, cases, lambda case: bench.measure(case).cells)


def shapes(bench: Bench) -> None:
    cases = [Case(f"GQA, causal, {dtype}", dtype, **GROUPED) for dtype in ("float32", "bfloat16")]
    cases.append(Case("small, float32", tokens=64, batch=64, heads=8))
    cases += [
        Case(f"float32, D={channels}, 8 heads", channels=channels, heads=8)
        for channels in (32, 80, 96, 192, 256)
    ]
    text = (
        "GQA: 4,096 tokens, 32 heads of queries and 8 of keys, D=128. Small: 64 batch rows of 64 tokens, "
        "8 heads, D=64. Channels: 2,048 tokens, full."
    )
    bench.table("Shapes", text, COLUMNS, cases, lambda case: bench.measure(case).cells)


def measure_beside_causal(bench: Bench, case: Case) -> tuple[Outcome, str]:
    """The times, and the rate relative to that without window and documents."""
    causal = replace(case, name=f"{case.name}, causal only", window=None, documents=0)
    outcome = bench.measure(case, {"causal": causal})
    faster = outcome.times["causal"].ratio_to(outcome.mine)
    return outcome, percent(outcome.case.flops / bench.sized(causal).flops * faster)


def sparse(bench: Bench) -> None:
    cases = [Case(f"window, {dtype}", dtype, **WINDOW) for dtype in ("float32", "bfloat16")]
    cases.append(Case("documents by cum_seqlens, float32", **DOCUMENTS))
    cases.append(Case("documents by MaskInfo, float32", **DOCUMENTS, by_mask_info=True))
    short = {"tokens": 4096, "heads": 32, "kv_heads": 8, "causal": True, "documents": 100}
    cases += [Case(f"short documents, GQA, {dtype}", dtype, **short) for dtype in ("float32", "bfloat16")]

    def row(case: Case) -> tuple[object, ...]:
        outcome, share = measure_beside_causal(bench, case)
        return (*outcome.cells, share)

    text = (
        "8,192 tokens, 8 heads, D=64, causal. Window: 256 keys for each query. Documents: 16, of very "
        "different lengths; short ones: 100 in 4,096 tokens, 32 heads of queries and 8 of keys. "
        "`of causal`: GFLOP/s as a share of attnmask's without window and documents."
    )
    bench.table("Windows and packed documents", text, (*COLUMNS, "of causal"), cases, row)


def blocks(bench: Bench) -> None:
    full = Case("no mask", tokens=4096, heads=8)
    cases = [full, replace(full, name="dense mask", density=0.1)]
    cases += [
        Case(f"BigBird, {dtype}", dtype, tokens=8192, heads=8, bigbird=True)
        for dtype in ("float32", "bfloat16")
    ]

    def row(case: Case) -> tuple[object, ...]:
        whole = replace(case, name="full", density=None, bigbird=False)
        outcome = bench.measure(case, {"full": whole})
        return (*outcome.cells, digits(outcome.times["full"].ratio_to(outcome.mine)))

    text = (
        "8 heads, D=64. In the dense mask of 4,096 tokens, 90% of the blocks of 128 × 128 pairs are empty. BigBird, of "
        "8,192 tokens, comes as blocks. `× full`: how many times faster than without a mask."
    )
    bench.table("Block masks", text, (*COLUMNS, "× full"), cases, row)


def alibi(bench: Bench) -> None:
    cases = [
        Case(f"ALiBi, {dtype}, {name}", dtype, heads=8, causal="causal" in name, backward="gradient" in name)
        for dtype in ("float32", "bfloat16")
        for name in ("full", "causal", "gradient", "gradient, causal")
    ]

    def row(case: Case) -> tuple[object, ...]:
        case = bench.sized(case)
        bench.mine.ask("forget")
        with_slopes = replace(case, name=f"{case.name}, slopes", alibi=True)
        calls = {each.name: bench.prepare(each, bench.mine)["new"] for each in (case, with_slopes)}
        times = race(calls, bench.options.seconds)
        return (
            times[case.name],
            times[with_slopes.name],
            digits(times[with_slopes.name].ratio_to(times[case.name])),
        )

    text = "2,048 tokens, 8 heads with slopes from 1/2 to 1/256, D=64."
    bench.table("ALiBi", text, ("without", "with", "×"), cases, row)


def decode(bench: Bench) -> None:
    cases = [
        Case(f"decode {queries}, {dtype}", dtype, queries=queries, **DECODE)
        for queries in (1, 8)
        for dtype in ("float32", "bfloat16")
    ]
    packed = DECODE | {"queries": 16, "documents": 16, "causal": False}
    cases += [Case(f"decode 16 packed, {dtype}", dtype, **packed) for dtype in ("float32", "bfloat16")]

    def row(case: Case) -> tuple[object, ...]:
        nbytes = bench.sized(case).key_bytes
        source = np.ones(nbytes, np.uint8)
        outcome = bench.measure(case, yardsticks={"read": harness.read(source, bench.options.threads)})
        mine, read = outcome.mine, outcome.times["read"]
        rates = digits(nbytes / mine.median / 1e9), percent(read.ratio_to(mine))
        return mine, outcome.times["out="], *rates, *outcome.peers, outcome.ahead

    text = (
        "1 or 8 queries at the end of 8,192 keys, or of 16 sequences in them one each; 32 heads of queries and 8 "
        "of keys, D=128. GB/s of keys and values; `of read`: as a share of what plain C reads, of as many bytes."
    )
    columns = ("attnmask", "out=", "GB/s", "of read", *PEERS, "ratio")
    bench.table("Decoding", text, columns, cases, row)


def avx2(bench: Bench) -> None:
    if not attnmask.show_config(mode="dict")["isa"].startswith("avx512"):
        return
    worker = Worker(WORKER, "attnmask", str(bench.options.threads), ATTNMASK_ISA="avx2")
    cases = [Case(f"AVX2, D={channels}, full", channels=channels) for channels in (64, 128)]

    def row(case: Case) -> tuple[object, ...]:
        return bench.measure(case, mine=worker, kind="avx2").cells[:4]

    text = "2,048 tokens, 16 heads, float32; the share is that of AVX2's own peak."
    bench.table("The AVX2 level", text, COLUMNS[:4], cases, row)
    worker.close()


def memory(bench: Bench) -> None:
    if sys.platform != "linux":
        return
    cases = [Case("memory, forward", **MEMORY)]
    cases += [Case("memory, gradient", **MEMORY, backward=True)] if GRADIENTS else []

    def row(case: Case) -> tuple[object, ...]:
        case = bench.sized(case)
        worker = Worker(WORKER, "attnmask", str(bench.options.threads))
        names = worker.ask("prepare", replace(case))
        call = "out=" if "out=" in names else "new"
        taken = worker.ask("memory", case.name, call)
        worker.close()
        results = sum(array.nbytes for array in case.arrays[:3]) if case.backward else 0
        return digits((taken - results) / 1e6), digits(case.key_bytes / 1e6)

    text = (
        "32,768 tokens, 4 heads, D=64, float32, causal: MB that a call takes at its peak beyond inputs and "
        "output, in a process that has not called before. `keys`: keys and values themselves."
    )
    bench.table("Memory", text, ("attnmask", "keys"), cases, row)


# Gradients


def backward(bench: Bench) -> None:
    cases = [
        Case(f"gradient, {dtype}, D={channels}, {name}", dtype, channels=channels, causal=name == "causal")
        for dtype in ("float32", "bfloat16")
        for channels in (64, 128)
        for name in ("full", "causal")
    ]
    cases += [Case(f"gradient, GQA, causal, {dtype}", dtype, **GROUPED) for dtype in ("float32", "bfloat16")]
    cases.append(Case("gradient, window, float32", **WINDOW))
    cases.append(Case("gradient, documents by cum_seqlens, float32", **DOCUMENTS))
    cases = [replace(case, backward=True) for case in cases]

    def row(case: Case) -> tuple[object, ...]:
        if case.window or case.documents:
            outcome, share = measure_beside_causal(bench, case)
        else:
            outcome, share = bench.measure(case), None
        return (outcome.mine, *outcome.cells[2:], share)

    text = (
        "Of queries, keys and values, after the forward: 2,048 tokens and 16 heads; GQA, window and "
        "documents as above."
    )
    bench.table("Gradients", text, ("attnmask", *COLUMNS[2:], "of causal"), cases, row)


def bias_gradient(bench: Bench) -> None:
    cases = [Case("gradient of a bias", bias=True, backward=True)]

    def row(case: Case) -> tuple[object, ...]:
        case = bench.sized(case)
        bench.mine.ask("forget")
        times = race(bench.prepare(case, bench.mine), bench.options.seconds)
        return times["new"], times["d bias"], digits(times["d bias"].ratio_to(times["new"]))

    text = "2,048 tokens, 16 heads, D=64, float32; the bias is [1, 16, 2048, 2048], its gradient asked for or not."
    bench.table("The gradient of a bias", text, ("without", "with", "×"), cases, row)


def threads(bench: Bench) -> None:
    many = bench.options.threads
    workers = {n: Worker(WORKER, "attnmask", str(n)) for n in (1, many)}
    cases = [Case(f"threads, {name}", causal=name == "causal") for name in ("full", "causal")]
    if GRADIENTS:
        cases += [replace(case, name=f"{case.name}, gradient", backward=True) for case in cases]

    def row(case: Case) -> tuple[object, ...]:
        case = bench.sized(case)
        calls = {f"{n}": bench.prepare(case, worker)["new"] for n, worker in workers.items()}
        times = race(calls, bench.options.seconds)
        one, together = times["1"], times[f"{many}"]
        return one, together, digits(one.ratio_to(together))

    if many > 1:
        text = "2,048 tokens, 16 heads, D=64, float32."
        bench.table("Threads", text, ("1 thread", f"{many} threads", "×"), cases, row)
    for worker in workers.values():
        worker.close()


def main() -> None:
    bench = Bench(__doc__, "flash", "Flash attention")
    bench.report.text(
        "Milliseconds, median over the rounds; `~` marks rounds that differ widely. Every library runs in a process "
        "of its own and in the layout that suits it; masks, block masks and copies of keys are made beforehand. "
        "In brackets: by which operator, or how the case was put to it. `out=`: into an array that is there. "
        "GFLOP/s count the products over live pairs, two forward and five backward; `of peak`: as a share of what "
        "independent multiply-adds reach in the best of the same rounds. `ratio`: how many times faster than the "
        "best of the peers, with a new array for the result."
    )
    if not harness.native.fma_bfloat16(1, 1):
        bench.report.text(
            "This processor does not multiply bfloat16: shares are of float32's peak, and OpenVINO computes in "
            "float32 whatever it is told (`f32`)."
        )
    else:
        bench.report.text(
            "`f32` beside OpenVINO: its hint of precision was float32, which was as fast or faster; it multiplies "
            "arrays of bfloat16 as such all the same."
        )
    try:
        for section in (forward, shapes, sparse, blocks, alibi, decode, avx2, memory):
            section(bench)
        if GRADIENTS:
            backward(bench)
            bias_gradient(bench)
        threads(bench)
        bench.report.write()
    finally:
        bench.close()
    if bench.mistakes:
        raise SystemExit("\n".join(["not the same:", *bench.mistakes]))


if __name__ == "__main__":
    main()
