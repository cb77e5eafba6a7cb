"""Writes what results/ says of attnmask beside PyTorch into results/README.md: python benchmarks/summary.py

Every time is a cell of a table in results/; a ratio is that of two of them.
"""

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).parent / "results"
BEGIN, END = "## Beside PyTorch\n", "\n## Beside the best peer\n"


class Table(NamedTuple):
    title: str
    about: str
    files: dict[str, str]  # results by the processor that they are of
    pytorch: tuple[str, ...]  # columns of PyTorch; the fastest one counts
    rows: dict[str, str]  # what the table says of a case, and the case


ATTENTION = {
    "float32, D=64, full": "float32, D=64, full",
    "float32, D=64, causal": "float32, D=64, causal",
    "float32, D=128, full": "float32, D=128, full",
    "float32, D=128, causal": "float32, D=128, causal",
    "bfloat16, D=64, full": "bfloat16, D=64, full",
    "bfloat16, D=64, causal": "bfloat16, D=64, causal",
    "bfloat16, D=128, full": "bfloat16, D=128, full",
    "bfloat16, D=128, causal": "bfloat16, D=128, causal",
    "gradients, float32, D=64, full": "gradient, float32, D=64, full",
    "gradients, float32, D=64, causal": "gradient, float32, D=64, causal",
    "gradients, bfloat16, D=64, full": "gradient, bfloat16, D=64, full",
    "gradients, bfloat16, D=64, causal": "gradient, bfloat16, D=64, causal",
    "32 heads on 8, 4,096 tokens, D=128, causal, float32": "GQA, causal, float32",
    "the same, bfloat16": "GQA, causal, bfloat16",
    "window of 256 in 8,192 tokens, 8 heads, causal": "window, float32",
    "16 packed documents in 8,192 tokens, 8 heads, causal": "documents by cum_seqlens, float32",
    "a mask of 4,096², 90 % of its blocks empty, 8 heads": "dense mask",
    "64 batch rows of 64 tokens, 8 heads": "small, float32",
    "one query, 8,192 keys, 32 heads on 8, D=128, float32": "decode 1, float32",
    "the same, bfloat16 ": "decode 1, bfloat16",
}
TABLES = (
    Table(
        "Attention",
        "2,048 tokens and 16 heads, unless stated; two threads of an AMD EPYC (Zen 5, 23 November 2026; Zen 4, 24 "
        "November 2026), PyTorch 2.13. PyTorch is the faster of `scaled_dot_product_attention` and FlexAttention "
        "(flex).",
        {"Zen 5": "flash.md", "Zen 4": "flash_zen4.md"},
        ("torch", "flex"),
        ATTENTION,
    ),
    Table(
        "Short sequences",
        "About 12,000 tokens in sequences of T, 6 heads, D=32, float32, and calls as models make them; one thread of "
        "an AMD EPYC (Zen 4, 30 November 2026), PyTorch 2.13. PyTorch is the fastest of plain operations (eager), "
        "`scaled_dot_product_attention` (sdpa) and nested tensors.",
        {"Zen 4": "short.md"},
        ("PyTorch",),
        {
            f"{name}{more}": f"{case}{more}"
            for name, case in {
                "T=8": "T=8",
                "T=16": "T=16",
                "T=32": "T=32",
                "T=64": "T=64",
                "T=128": "T=128",
                "500 rows of 24 features (TabPFN)": "table (TabPFN)",
                "64 windows of an image (Swin)": "image windows (Swin)",
                "pair bias (AlphaFold 3)": "pair bias (AlphaFold 3)",
                "32 texts of 16 to 512 tokens": "texts (embeddings)",
            }.items()
            for more in ("", ", gradients")
        },
    ),
    Table(
        "Linear attention",
        "Keys and values of 128 channels; one thread of an AMD EPYC (Zen 5, 28 November 2026), transformers 5.24 on "
        "PyTorch 2.13. PyTorch has no linear attention of its own: its column is the PyTorch code in transformers.",
        {"Zen 5": "linear.md"},
        ("transformers",),
        {
            name: name
            for name in (
                "gated delta rule, 2,048 tokens, 16 heads",
                "gated delta rule, 2,048 tokens, 16 heads, bfloat16",
                "gated delta rule, 2,048 tokens, 16 heads, with gradients",
                "gated delta rule, one token, 32 heads",
                "KDA, 2,048 tokens, 16 heads",
                "KDA, 2,048 tokens, 16 heads, with gradients",
                "Mamba-2, 2,048 tokens, 32 heads",
                "Mamba-2, 2,048 tokens, 32 heads, with gradients",
            )
        },
    ),
)


def cases(file: str) -> dict[str, dict[str, str]]:
    """The rows of a file by their first cells; the first of equal ones."""
    found: dict[str, dict[str, str]] = {}
    names: list[str] = []
    for line in (RESULTS / file).read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            names = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not names:
            names = cells
        elif not cells[0].startswith("---"):
            found.setdefault(cells[0], dict(zip(names, cells, strict=True)))
    return found


def milliseconds(cell: str) -> float | None:
    number = re.match(r"~?([\d.]+)", cell)
    return float(number[1]) if number else None


def compared(row: dict[str, str], columns: tuple[str, ...]) -> tuple[str, str, str]:
    """Our cell, PyTorch's, and how many times as long PyTorch takes."""
    ours, theirs = milliseconds(row["attnmask"]), {name: milliseconds(row.get(name, "–")) for name in columns}
    known = {name: ms for name, ms in theirs.items() if ms is not None}
    if not ours or not known:
        return row["attnmask"], "–", "–"
    best = min(known, key=lambda name: known[name])
    cell = row[best].split(",")[0] + (f" ({best})" if best == "flex" else "")
    return row["attnmask"], cell, f"{known[best] / ours:#.3g}".rstrip(".")


def written(table: Table) -> str:
    (first, *others), found = table.files, {processor: cases(file) for processor, file in table.files.items()}
    links = " and ".join(f"`{file}`" for file in table.files.values())
    heads = ["attnmask", "PyTorch", "ratio", *(f"ratio, {processor}" for processor in others)]
    if others:
        heads[:3] = [f"{head}, {first}" for head in heads[:3]]
    lines = [f"| | {' | '.join(heads)} |", f"| --- |{' ---: |' * len(heads)}"]
    for name, case in table.rows.items():
        cells = list(compared(found[first][case], table.pytorch))
        cells += [compared(found[processor][case], table.pytorch)[-1] for processor in others]
        lines.append(f"| {name.strip()} | {' | '.join(cells)} |")
    return "\n".join((filled(f"**{table.title}.** {table.about} From {links}."), "", *lines))


def filled(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def section() -> str:
    about = (
        "Milliseconds, medians over rounds in which all take turns; `~` marks rounds that differ widely. `ratio`: how "
        "many times as long PyTorch takes. The machines are shared: single figures vary by 20 %."
    )
    return "\n\n".join((BEGIN.rstrip(), filled(about), *map(written, TABLES))) + "\n"


def renewed(page: str) -> str:
    """The page with the tables as they are now."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2] if rest else before.partition(END)[2]
    return f"{before.partition(END)[0].rstrip()}\n\n{section()}{END}{after}"


def main() -> None:
    page = RESULTS / "README.md"
    page.write_text(renewed(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
