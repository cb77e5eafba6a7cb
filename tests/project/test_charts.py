"""Charts show the numbers of their results files: by benchmarks/chart.py."""

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
    picture = chart["draw"](TABLES)
    points = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" .*<title>(.*)</title>', picture)
    assert [title for *_, title in points] == [
        "torch, 1024: 5.15 ms",
        "torch, 2048: 17 ms",
        "attnmask, causal, 1024: 1.5 ms",
        "attnmask, causal, 2048: 5.8 ms",
        "attnmask, 0.1: 0.5 ms",
        "attnmask, 1: 50 ms",
    ]
    (torch, _), (_, slow) = ([float(number) for number in point[:2]] for point in (points[0], points[-1]))
    left, top, wide, high, apart = (chart[name] for name in ("LEFT", "TOP", "WIDE", "HIGH", "APART"))
    assert torch == left
    assert slow == pytest.approx(top + high * 0.1003, abs=0.1)  # 50 of 0.1 to 100, by logarithms
    assert float(points[-1][0]) == left + apart + wide


def test_charts_show_their_tables(chart):
    tables = sorted(chart["RESULTS"].glob("curves*.md"))
    assert tables
    for path in tables:
        assert path.with_suffix(".svg").read_text(encoding="utf-8") == chart["draw"](
            path.read_text(encoding="utf-8")
        )
