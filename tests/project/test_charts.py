"""Charts show the numbers of their results files: by benchmarks/chart.py."""

import itertools
import re
import runpy

import pytest
from environment import ROOT

SCRIPT = ROOT / "benchmarks" / "chart.py"
pytestmark = [
    pytest.mark.skipif(not SCRIPT.exists(), reason="the tests run without the benchmarks"),
    pytest.mark.levels("once"),
]

TABLES = """# Title

## Time by tokens

| tokens | attnmask, causal | torch | OpenVINO |
| --- | ---: | ---: | ---: |
| 1,024 | ~1.5 | 5.15 (by blocks) | – |
| 2,048 | 5.8 | 17 | – |

## Time by share

| share | attnmask |
| --- | ---: |
| 0.1 | 0.5 |
| 1.0 | 50 |
"""


@pytest.fixture(scope="module")
def chart():
    return runpy.run_path(str(SCRIPT))


def test_tables_are_read(chart):
    assert chart["tables"](TABLES) == {
        "Time by tokens": (
            "tokens",
            {"attnmask, causal": [(1024, 1.5), (2048, 5.8)], "torch": [(1024, 5.15), (2048, 17)]},
        ),
        "Time by share": ("share", {"attnmask": [(0.1, 0.5), (1, 50)]}),
    }


def test_every_number_is_drawn_where_it_belongs(chart):
    (_, series), (share, of_shares) = chart["tables"](TABLES).values()
    picture, other = chart["curves"]("tokens", series), chart["curves"](share, of_shares)
    points = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" .*<title>(.*)</title>', picture + other)
    assert [title for *_, title in points] == [
        "torch, 1024: 5.15 ms",
        "torch, 2048: 17 ms",
        "attnmask, causal, 1024: 1.5 ms",
        "attnmask, causal, 2048: 5.8 ms",
        "attnmask, 0.1: 0.5 ms",
        "attnmask, 1: 50 ms",
    ]
    (torch, _), (right, slow) = ([float(number) for number in point[:2]] for point in (points[0], points[-1]))
    left, top, wide, high = (chart[name] for name in ("LEFT", "TOP", "WIDE", "HIGH"))
    assert torch == left
    assert slow == pytest.approx(top + high * 0.1003, abs=0.1)  # 50 of 0.1 to 100, by logarithms
    assert right == left + wide
    assert re.findall(r'<text x="\d+" y="[\d.]+">(PyTorch|attnmask, causal)</text>', picture) == [
        "PyTorch",
        "attnmask, causal",
    ]


def test_labels_are_apart(chart):
    apart = chart["APART"]
    placed = chart["spread"]([100.0, 101.0, 103.0, 200.0])
    assert all(below - above > apart - 0.1 for above, below in itertools.pairwise(placed))
    assert placed[3] == 200
    assert sum(placed[:3]) / 3 == pytest.approx(304 / 3)


def charts(chart):
    """By path: what the chart should be."""
    for path in sorted(chart["RESULTS"].glob("curves*.md")):
        for suffix, picture in chart["draw"](path.read_text(encoding="utf-8")).items():
            yield path.with_name(f"{path.stem}_{suffix}.svg"), picture
    linear = chart["RESULTS"] / "linear.md"
    yield linear.with_suffix(".svg"), chart["draw_linear"](linear.read_text(encoding="utf-8"))


def test_charts_show_their_tables(chart):
    drawn = dict(charts(chart))
    assert len(drawn) == 5
    for path, picture in drawn.items():
        assert path.read_text(encoding="utf-8") == picture
    assert set(drawn) == set(chart["RESULTS"].glob("*.svg"))


def test_titles_claim_what_tables_say(chart):
    tables = (chart["RESULTS"] / "curves_zen5.md").read_text(encoding="utf-8")
    changed = tables.replace("| 8,192 | 89.1 |", "| 8,192 | 1234 |").replace(
        "| 0.1 | 10.9 |", "| 0.1 | 1.23 |"
    )
    assert changed.count("1234") == changed.count("1.23 |") == 1
    pictures = chart["draw"](changed)
    assert ">attnmask 1,234 ms, PyTorch 229 ms<" in pictures["tokens"]
    assert ">attnmask 1.2, PyTorch 232, FlexAttention 23 ms<" in pictures["share"]
    linear = (chart["RESULTS"] / "linear.md").read_text(encoding="utf-8")
    assert ">attnmask 23 ms, ONNX Runtime 58 ms<" in chart["draw_linear"](linear)


def test_the_tables_beside_pytorch_are_those_of_the_results():
    """By benchmarks/summary.py, which takes every time from another table."""
    page = SCRIPT.parent / "results" / "README.md"
    made = runpy.run_path(str(SCRIPT.with_name("summary.py")))
    text = page.read_text(encoding="utf-8")
    assert made["renewed"](text) == text
    assert made["renewed"](text.replace("45.5", "40")) == text


def test_a_ratio_is_that_of_the_fastest_column():
    compared = runpy.run_path(str(SCRIPT.with_name("summary.py")))["compared"]
    row = {"attnmask": "~2.00", "torch": "5.00 (repeated)", "flex": "4.00", "JAX": "1"}
    assert compared(row, ("torch", "flex")) == ("~2.00", "4.00 (flex)", "2.00")
    assert compared(row, ("torch",)) == ("~2.00", "5.00 (repeated)", "2.50")
    assert compared({"attnmask": "3", "torch": "–"}, ("torch",)) == ("3", "–", "–")
