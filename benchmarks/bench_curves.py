"""Flash attention by the number of tokens and by the share of a mask that is allowed, beside its peers, with a chart.

python benchmarks/bench_curves.py [--quick] [--only TEXT] [--threads N]
"""

from collections.abc import Callable
from dataclasses import replace

import chart
from bench_flash import SHRINK, Bench
from flash_cases import Case
from workers import CLOCK

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
SHARES = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
WINDOW, DOCUMENT = 256, 512  # tokens; of documents on average


def curve(
    bench: Bench,
    title: str,
    text: str,
    axis: str,
    places: dict[float, Case],
    label: str,
    beside: Callable[[Case], dict[str, Case]],
) -> None:
    """One race at each place, as a table."""
    if bench.options.only not in title:
        return
    bench.report.heading(title)
    bench.report.text(text)
    names = [label, *beside(next(iter(places.values()))), *bench.peers]
    bench.report.table(axis, *names)
    for place, case in places.items():
        times = bench.measure(case, beside(case), share=0.5).times
        times[label] = times["new"]
        bench.report.row(f"{place:,}", *(times.get(name) for name in names))
    bench.report.end_table()


def lengths(bench: Bench) -> None:
    shrink = SHRINK if bench.options.quick else 1
    places = {n // shrink: Case(f"T={n}", tokens=n, causal=True) for n in LENGTHS}

    def beside(case: Case) -> dict[str, Case]:
        documents = max(1, case.tokens // DOCUMENT)
        return {
            f"attnmask, window {WINDOW}": replace(case, name=f"{case.name}, window", window=WINDOW),
            "attnmask, documents": replace(case, name=f"{case.name}, documents", documents=documents),
        }

    text = (
        f"16 heads, D=64, float32, causal. Documents: of {DOCUMENT} tokens on average. Peers: causal alone."
    )
    curve(bench, "Time by tokens", text, "tokens", places, "attnmask, causal", beside)


def shares(bench: Bench) -> None:
    places = {share: Case(f"share {share}", tokens=4096, density=share) for share in SHARES}
    text = (
        "4,096 tokens, 16 heads, D=64, float32, a dense mask by the allowed share of its blocks of 128 × 128."
    )
    curve(
        bench,
        "Time by the allowed share of a mask",
        text,
        "allowed share",
        places,
        "attnmask",
        lambda case: {},
    )


def main() -> None:
    bench = Bench(__doc__, "curves", "Flash attention by tokens and by the allowed share of a mask")
    unit = "Milliseconds"
    if CLOCK == "process_time":
        unit += " of processor time, on a machine that did other work meanwhile"
    bench.report.text(
        f"{unit}; median over the rounds, in which all take turns; `~` marks rounds that differ widely or that other "
        "processes disturbed. Every library runs in a process of its own and in the layout that suits it."
    )
    bench.report.text(
        "![Time by tokens.](curves_tokens.svg) ![Time by the allowed share of a mask.](curves_share.svg)"
    )
    try:
        lengths(bench)
        shares(bench)
        bench.report.write()
    finally:
        bench.close()
    if bench.mistakes:
        raise SystemExit("\n".join(["not the same:", *bench.mistakes]))
    if bench.report.keep:
        chart.main()


if __name__ == "__main__":
    main()
