"""Draws tables of results/ as SVG beside them, each with what it shows as its title: python benchmarks/chart.py

A picture is as wide as half of GitHub's column, so that two stand side by side, and its letters can be read where a
telephone shows it 400 pixels wide.
"""

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
NAMES = {"torch": "PyTorch", "flex": "FlexAttention"}
WIDTH, HEIGHT = 410, 332
LEFT, TOP, WIDE, HIGH = 52, 80, 190, 200  # where curves are
FONT = 'fill="currentColor" font-family="system-ui, sans-serif" font-size="12"'
APART = 15  # pixels between labels
NARROW = 34  # pixels of a number on the axis


@dataclass(frozen=True)
class Claim:
    """The claim in a chart's title: the times of attnmask and of some peers at one place of the axis."""

    suffix: str
    text: str
    place: float
    ours: str
    peers: tuple[str, ...]


CLAIMS = {  # by heading
    "Time by tokens": Claim("tokens", "Causal attention, 8,192 tokens", 8192, "attnmask, causal", ("torch",)),
    "Time by the allowed share of a mask": Claim(
        "share", "A mask 90 % empty", 0.1, "attnmask", ("torch", "flex")
    ),
}
LINEAR = (  # rows of linear.md, and the peer that the title names
    "gated delta rule, 2,048 tokens, 16 heads",
    "KDA, 2,048 tokens, 16 heads",
    "Mamba-2, 2,048 tokens, 32 heads",
)
LINEAR_PEER = "ONNX Runtime"
BEYOND = 300  # milliseconds: longer bars are broken

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


def shown(ms: float) -> str:
    """In a title."""
    return f"{ms:,.0f}" if ms >= 10 else f"{ms:.2g}"


def heads(what: str, times: dict[str, float], below: str) -> str:
    """The claim in two lines, and what it was measured with."""
    unit = " ms" if len(times) < 3 else ""  # there is no room for all
    said = f"{unit}, ".join(f"{NAMES.get(name, name)} {shown(ms)}" for name, ms in times.items()) + " ms"
    return (
        f'<text x="12" y="24" font-size="14" font-weight="bold">{escape(what)}:</text>\n'
        f'<text x="12" y="42" font-size="14" font-weight="bold">{escape(said)}</text>\n'
        f'<text x="12" y="59" font-size="11">{escape(below)}</text>\n'
    )


def spread(places: list[float]) -> list[float]:
    """Heights of labels near the wanted ones, which are in order, so far apart that they can be read."""
    places = list(places)
    for _ in range(200):
        for i in range(len(places) - 1):
            if (lacking := APART - places[i + 1] + places[i]) > 0:
                places[i] -= lacking / 2
                places[i + 1] += lacking / 2
    return places


def curves(axis: str, series: Series) -> str:
    """Curves over a grid, with their names at the right."""
    times = [ms for points in series.values() for _, ms in points]
    low, high = 10.0 ** math.floor(math.log10(min(times))), 10.0 ** math.ceil(math.log10(max(times)))
    places = sorted({place for points in series.values() for place, _ in points})
    x, y = Scale(places[0], places[-1], LEFT, LEFT + WIDE), Scale(low, high, TOP + HIGH, TOP)
    decades = [10.0**n for n in range(round(math.log10(low)), round(math.log10(high)) + 1)]
    grid = "".join(f"M{LEFT} {y.at(ms):.1f}h{WIDE}" for ms in decades)
    grid += "".join(f"M{x.at(place):.1f} {TOP}v{HIGH}" for place in places)
    drawn = f'<path stroke="currentColor" stroke-opacity=".15" d="{grid}"/>\n'
    for ms in decades:
        drawn += f'<text x="{LEFT - 6}" y="{y.at(ms) + 4:.1f}" text-anchor="end">{ms:,g}</text>\n'
    drawn += f'<text x="{LEFT - 6}" y="{TOP + HIGH + 38}" text-anchor="end">ms</text>\n'
    for place in places:
        if 0 < x.at(places[-1]) - x.at(place) < NARROW:
            continue
        name = f"{place:,.0f}" if places[-1] > 1 else f"{place:.0%}"
        drawn += f'<text x="{x.at(place):.1f}" y="{TOP + HIGH + 18}" text-anchor="middle">{name}</text>\n'
    drawn += f'<text x="{LEFT + WIDE / 2}" y="{TOP + HIGH + 38}" text-anchor="middle">{axis}</text>\n'
    ends = sorted((y.at(points[-1][1]), name) for name, points in series.items())
    heights = dict(zip((name for _, name in ends), spread([height for height, _ in ends]), strict=True))
    for name in sorted(series, key=lambda name: name.startswith("attnmask")):  # on top of its peers
        points = series[name]
        colour, width = LINES.get(name, OTHER)
        data = "L".join(f"{x.at(place):.1f} {y.at(ms):.1f}" for place, ms in points)
        drawn += f'<path fill="none" stroke="{colour}" stroke-width="{width}" d="M{data}"/>\n'
        right, height = LEFT + WIDE, heights[name]
        leader = f"M{right + 3} {y.at(points[-1][1]):.1f}L{right + 17} {height:.1f}"
        drawn += f'<path fill="none" stroke="{colour}" d="{leader}"/>\n'
        weight = ' font-weight="bold"' * (name == "attnmask")
        label = escape(NAMES.get(name, name))
        drawn += f'<text x="{right + 20}" y="{height + 4:.1f}"{weight}>{label}</text>\n'
        for place, ms in points:
            drawn += (
                f'<circle cx="{x.at(place):.1f}" cy="{y.at(ms):.1f}" r="{1.2 * width:.1f}" fill="{colour}">'
                f"<title>{escape(name)}, {place:g}: {ms:g} ms</title></circle>\n"
            )
    return drawn


def machine(text: str) -> str:
    """Processor and threads: of the title, where it names one."""
    named = re.search("^# .* on (.+)$", text, re.MULTILINE) or re.search("^([^|#].*?),", text, re.MULTILINE)
    threads = re.search(r"\d+ threads?", text)
    assert named
    assert threads
    return f"{named[1].replace('(R)', '').removesuffix(' Processor')}, {threads[0]}"


def draw(text: str) -> dict[str, str]:
    """A picture for each table of a results file that has a claim, by the claim's suffix."""
    pictures = {}
    for heading, (axis, series) in tables(text).items():
        claim = CLAIMS[heading]
        named = {name: series[name] for name in (claim.ours, *claim.peers) if name in series}
        times = {name: dict(points)[claim.place] for name, points in named.items()}
        times = {"attnmask": times.pop(claim.ours)} | times
        case = re.search(rf"^## {re.escape(heading)}\n\n(.*?float32)", text, re.MULTILINE)
        assert case
        title = heads(claim.text, times, f"{case[1]}; {machine(text)}")
        pictures[claim.suffix] = card(WIDTH, HEIGHT, f"<g {FONT}>\n{title}{curves(axis, series)}</g>\n")
    return pictures


def draw_linear(text: str) -> str:
    """Bars of the first table of linear.md: the milliseconds of each library."""
    (_, *names), _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.split("## One thread")[1].split("\n\n")[1].splitlines()
    )
    drawn, y, claimed = "", 84, {}
    scale = (WIDTH - 112 - 70) / BEYOND  # pixels of a millisecond
    for case, *cells in rows:
        if case not in LINEAR:
            continue
        drawn += f'<text x="12" y="{y}" font-weight="bold">{escape(case[0].upper() + case[1:])}</text>\n'
        times = {
            name: float(number[1])
            for name, cell in zip(names, cells, strict=True)
            if name not in ("error", "of limit") and (number := re.match(r"~?([\d.]+)", cell))
        }
        if case == LINEAR[0]:
            claimed = {name: times[name] for name in ("attnmask", LINEAR_PEER)}
        for name, ms in times.items():
            y += 17
            wide = min(ms, BEYOND) * scale
            ours = name == "attnmask"
            colour = f'fill="{PALETTE[0]}"' if ours else 'fill-opacity=".35"'
            weight = ' font-weight="bold"' * ours
            drawn += f'<text x="12" y="{y}"{weight}>{name}</text>\n'
            drawn += f'<rect x="112" y="{y - 10}" width="{wide:.1f}" height="12" {colour}/>\n'
            if ms > BEYOND:
                drawn += f'<path class="cut" d="M{112 + wide - 24:.1f} {y + 3}l6 -14h5l-6 14z"/>\n'
            drawn += f'<text x="{112 + wide + 5:.1f}" y="{y}"{weight}>{shown(ms)} ms</text>\n'
        y += 26
    title = heads("Gated delta rule, 2,048 tokens", claimed, "Linear attention, float32; Zen 5, 1 thread")
    style = ".cut{fill:#fff}@media(prefers-color-scheme:dark){.cut{fill:#151b23}}"
    return card(WIDTH, y - 10, f"<g {FONT}>\n{title}{drawn}</g>\n", style)


def main() -> None:
    for path in RESULTS.glob("curves*.md"):
        for suffix, picture in draw(path.read_text(encoding="utf-8")).items():
            path.with_name(f"{path.stem}_{suffix}.svg").write_text(picture, encoding="utf-8")
    linear = RESULTS / "linear.md"
    linear.with_suffix(".svg").write_text(draw_linear(linear.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
