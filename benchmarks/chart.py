"""Draws the tables of results/curves*.md as SVG beside them: python benchmarks/chart.py"""

import math
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

from attnmask._masks.render import PALETTE

RESULTS = Path(__file__).parent / "results"
LINES = {  # colours and widths
    "attnmask": (PALETTE[0], 2.5),
    "attnmask, causal": (PALETTE[0], 2.5),
    "attnmask, window 256": (PALETTE[5], 2.5),
    "attnmask, documents": (PALETTE[2], 2.5),
    "torch": (PALETTE[3], 1.5),
    "flex": (PALETTE[4], 1.5),
    "OpenVINO": (PALETTE[1], 1.5),
}
OTHER = ("currentColor", 1.5)
WIDTH, HEIGHT = 820, 392
LEFT, TOP, WIDE, HIGH, APART = 52, 52, 320, 240, 400  # of a panel, and from one to the next

Series = dict[str, list[tuple[float, float]]]  # by name: places and milliseconds


def card(width: float, height: float, body: str, style: str = "") -> str:
    """A picture on a ground of its own: light, or dark where the reader prefers that."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}">\n'
        "<style>svg{color:#1f2328}.ground{fill:#fff;stroke:#d1d9e0}"
        "@media(prefers-color-scheme:dark){svg{color:#d1d7e0}.ground{fill:#151b23;stroke:#3d444d}}"
        f"{style}</style>\n"
        f'<rect class="ground" x=".5" y=".5" width="{width - 1:g}" height="{height - 1:g}" rx="6"/>\n{body}</svg>\n'
    )


def tables(text: str) -> dict[str, tuple[str, Series]]:
    """By heading: what the first column of a table is, and the others as curves over it."""
    found = {}
    for section in re.split("^## ", text, flags=re.MULTILINE)[1:]:
        (axis, *names), _, *rows = (
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in section.splitlines()
            if line.startswith("|")
        )
        series: Series = {name: [] for name in names}
        for place, *cells in rows:
            for name, cell in zip(names, cells, strict=True):
                if number := re.match(r"~?([\d.]+)", cell):
                    series[name].append((float(place.replace(",", "")), float(number[1])))
        found[section.splitlines()[0]] = axis, {name: points for name, points in series.items() if points}
    return found


@dataclass
class Scale:
    """A logarithmic axis: numbers from `low` to `high` on pixels from `begin` to `end`."""

    low: float
    high: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.begin + share * (self.end - self.begin)


def panel(left: float, title: str, axis: str, series: Series, low: float, high: float) -> str:
    """Curves over a grid; `low` and `high` are powers of ten, of milliseconds."""
    places = sorted({place for points in series.values() for place, _ in points})
    x, y = Scale(places[0], places[-1], left, left + WIDE), Scale(low, high, TOP + HIGH, TOP)
    decades = [10.0**n for n in range(round(math.log10(low)), round(math.log10(high)) + 1)]
    grid = "".join(f"M{left} {y.at(ms):.1f}h{WIDE}" for ms in decades)
    grid += "".join(f"M{x.at(place):.1f} {TOP}v{HIGH}" for place in places)
    drawn = f'<text x="{left}" y="{TOP - 16}" font-weight="bold">{escape(title)}</text>\n'
    drawn += f'<path stroke="currentColor" stroke-opacity=".15" d="{grid}"/>\n'
    for ms in decades:
        drawn += f'<text x="{left - 6}" y="{y.at(ms) + 4:.1f}" text-anchor="end">{ms:g}</text>\n'
    for place in places:
        name = f"{place:,.0f}" if places[-1] > 1 else f"{place:.0%}"
        drawn += f'<text x="{x.at(place):.1f}" y="{TOP + HIGH + 16}" text-anchor="middle">{name}</text>\n'
    drawn += f'<text x="{left + WIDE / 2}" y="{TOP + HIGH + 34}" text-anchor="middle">{axis}</text>\n'
    for name in sorted(series, key=lambda name: name.startswith("attnmask")):  # on top of its peers
        points = series[name]
        colour, width = LINES.get(name, OTHER)
        data = "L".join(f"{x.at(place):.1f} {y.at(ms):.1f}" for place, ms in points)
        drawn += f'<path fill="none" stroke="{colour}" stroke-width="{width}" d="M{data}"/>\n'
        for place, ms in points:
            drawn += (
                f'<circle cx="{x.at(place):.1f}" cy="{y.at(ms):.1f}" r="{1.2 * width:.1f}" fill="{colour}">'
                f"<title>{escape(name)}, {place:g}: {ms:g} ms</title></circle>\n"
            )
    return drawn


def legend(names: list[str]) -> str:
    """Lines and their names: attnmask's, and below them the others."""
    drawn = ""
    for row, ours in enumerate((True, False)):
        x, y = LEFT, TOP + HIGH + 60 + 20 * row
        for name in (name for name in names if name.startswith("attnmask") == ours):
            colour, width = LINES.get(name, OTHER)
            drawn += f'<path stroke="{colour}" stroke-width="{width}" d="M{x} {y}h18"/>\n'
            drawn += f'<text x="{x + 24}" y="{y + 4}">{escape(name)}</text>\n'
            x += 48 + 7 * len(name)
    return drawn


def draw(text: str) -> str:
    """The tables of a results file, one beside the other."""
    panels = tables(text)
    times = [ms for _, series in panels.values() for points in series.values() for _, ms in points]
    low, high = 10.0 ** math.floor(math.log10(min(times))), 10.0 ** math.ceil(math.log10(max(times)))
    body = "".join(
        panel(LEFT + number * APART, f"{title}, milliseconds", axis, series, low, high)
        for number, (title, (axis, series)) in enumerate(panels.items())
    )
    names = dict.fromkeys(name for _, series in panels.values() for name in series if name != "attnmask")
    font = 'fill="currentColor" font-family="system-ui, sans-serif" font-size="12"'
    return card(WIDTH, HEIGHT, f"<g {font}>\n{body}{legend(list(names))}</g>\n")


def main() -> None:
    for path in RESULTS.glob("curves*.md"):
        path.with_suffix(".svg").write_text(draw(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
