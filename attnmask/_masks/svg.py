"""Draw one plane of a mask as SVG, for notebooks.

::

          key →                  2 heads
        0   4   8                12 queries × 12 keys
       ▔▔▔▔▁▁▁▁▔▔▔▔  segments    head 0: 18 % allowed
    0 ▏█
      ▏██                        █ segment 0
      ▏███                       ▒ segment 1
    4 ▕    ▒                     …

Lines and letters have the colour of the text around the picture, and cells are seen on any ground: so it fits a page
that is light or dark. A row of cells tells on hovering which keys it sees, and the strips which segments they show.

Edges of cells are between two pixels of the screen. A page may draw a picture smaller than it is, so where there are
gaps between tokens, edges are smooth: each gap is as faint as it is narrow, and none is left out. Cells without gaps
have sharp edges, as smooth ones would show seams.
"""

import math
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from attnmask._masks import render
from attnmask._masks.render import BLANK, COLOURS, FIRST, PALETTE, SEVERAL, UNTOLD, Drawable, Ids

_PLOT = 256  # pixels of the longer side, at most
_SMALL = 96  # the same of a thumbnail
_THIN = 24  # pixels of the shorter side, at least; and of one token, at most
_GAP = 8  # pixels of a token from which on there is a gap between it and the next
_BUDGET = 36_000  # characters for cells and titles; beyond that cells are drawn larger
CELL_LEVELS = 5  # shades of cells that are live in part; their share is rounded up
_DIGIT = 6.4  # pixels of its width in tick labels
_LETTER = 6.2  # pixels of its width in the legend, at most on average
_LINE = 16  # pixels of a line of the legend
_STRIP = 5  # pixels of the strips that show segments

_DECIMAL_STEPS = [digit * 10**i for i in range(19) for digit in (1, 2, 5)]
_BINARY_STEPS = [2**i for i in range(63)]


class _Axis:
    """One side of a picture: its tokens, how many of them make a cell, and the pixels of a cell."""

    def __init__(self, tokens: int, cell: int, pixels: float) -> None:
        self.tokens, self.cell, self.pixels = tokens, cell, pixels
        self.count = render.cell_count(tokens, cell)
        self.length = self.count * pixels

    def at(self, token: int) -> float:
        return token / self.cell * self.pixels

    def span(self, begin: int, end: int) -> str:
        """Return the tokens of some cells, including the last."""
        first, last = begin * self.cell, min(end * self.cell, self.tokens) - 1
        return str(first) if first == last else f"{first}–{last}"

    def ticks(self, apart: float) -> list[int]:
        """Return round numbers; binary ones for binary lengths."""
        steps = _DECIMAL_STEPS if self.tokens % 64 else _BINARY_STEPS
        step = next((step for step in steps if self.at(step) >= max(apart, self.length / 5)), self.tokens + 1)
        return list(range(0, self.tokens + 1, step))


def _axes(queries: int, keys: int, coarser: int, room: int) -> tuple[_Axis, _Axis]:
    """Return cells and pixels of both sides: the same for both, unless one would be too thin to see."""
    longest, shortest = max(queries, keys), min(queries, keys)

    def fit(pixels: int) -> _Axis:
        if longest * pixels <= room:
            return _Axis(longest, 1, min(room // max(longest, 1), _THIN))
        return _Axis(longest, render.whole_tiles(render.cell_count(longest * pixels, room)), pixels)

    sizes = [fit(pixels * coarser) for pixels in (2, 3, 4)]
    long = next((axis for axis in sizes if axis.length >= 0.8 * room), sizes[0])
    short = _Axis(shortest, long.cell, long.pixels)
    if 0 < short.length < _THIN:
        cell = render.cell_count(shortest, 8)
        short = _Axis(shortest, cell, _THIN / render.cell_count(shortest, cell))
    return (long, short) if queries >= keys else (short, long)


def plural(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


# Cells: paths in units of a cell


def _strokes(styles: NDArray[np.intp]) -> dict[int, str]:
    """Return path data for every style but 0: a stroke per run of equal cells in a row."""
    if styles.size == 0:
        return {}
    begins = np.ones(styles.shape, bool)
    begins[:, 1:] = styles[:, 1:] != styles[:, :-1]
    rows, columns = np.nonzero(begins)
    ends = np.append(columns[1:], 0)
    ends[ends == 0] = styles.shape[1]
    paths: dict[int, list[str]] = {}
    runs = (rows, columns, ends - columns, styles[rows, columns])
    for row, column, length, style in zip(*(part.tolist() for part in runs), strict=True):
        if style:
            paths.setdefault(style, []).append(f"M{column} {row}h{length}")
    return {style: "".join(paths[style]) for style in sorted(paths)}


def stroke(colour: int, level: int, data: str, title: str = "") -> str:
    """Return a path of one colour. At the highest level it is opaque; BLANK cells look like dead ones."""
    name, shade = (
        COLOURS[colour],
        render.FAINTEST + (render.STRONGEST - render.FAINTEST) * level / CELL_LEVELS,
    )
    if colour == BLANK:
        name, shade = "currentColor", render.DEAD_OPACITY
    opacity = "" if colour != BLANK and level > CELL_LEVELS else f' stroke-opacity="{_number(shade)}"'
    end = f"><title>{title}</title></path>" if title else "/>"
    return f'<path stroke="{name}"{opacity} d="{data}"{end}'


def _coloured(colours: NDArray[np.intp], levels: NDArray[np.intp]) -> str:
    """Return the cells that are partly or wholly live."""
    base = CELL_LEVELS + 2
    strokes = _strokes(np.where(levels == 0, 0, colours * base + levels))
    return "".join(stroke(*divmod(style, base), data) for style, data in strokes.items())


def _strip(segments: render.Segments, ends: tuple[Ids, Ids], axis: _Axis, tokens: str) -> str:
    """Draw the segments along one side; hovering shows their tokens."""
    drawn, begin = "", 0
    cells = zip(segments.strip(ends).tolist(), *(end.tolist() for end in ends), strict=True)
    for (colour, low, high), run in groupby(cells):
        end = begin + sum(1 for _ in run)
        title = f"{tokens} {axis.span(begin, end)}: {segments.named(low, high)}"
        drawn += stroke(colour, CELL_LEVELS + 1, f"M{begin} 0h{end - begin}", title)
        begin = end
    return drawn


class _Plane:
    """One plane as SVG: its cells, and strips for its segments along both sides."""

    def __init__(self, info: Drawable, batch: int, head: int, coarser: int, room: int) -> None:
        batches, queries, keys = info.shape
        self.q, self.k = q, k = _axes(queries, keys, coarser, room)
        self.counts = counts = np.zeros((q.count, k.count), np.int64)
        if batches and info.heads:
            self.counts = counts = render.counted(info, batch, head, q.cell, k.cell)
        shares = render.shares(counts, queries, keys, q.cell, k.cell)
        self.density = render.density(counts, queries, keys)
        self.levels = np.where(shares == 1, CELL_LEVELS + 1, np.ceil(shares * CELL_LEVELS)).astype(np.intp)
        self.segments = segments = render.segments_of(info, batch, head, counts, q.cell, k.cell)
        self.colours = render.cell_colours(counts, segments)
        self.q_strip = self.k_strip = ""
        if segments is not None:
            self.q_strip = _strip(segments, segments.queries, q, "queries")
            self.k_strip = _strip(segments, segments.keys, k, "keys")
        self.ground = "".join(
            f'<path d="M0 {row}h{k.count}"><title>{self._row(row)}</title></path>' for row in range(q.count)
        )
        self.cells = _coloured(self.colours, self.levels)

    @property
    def size(self) -> int:
        return len(self.ground) + len(self.cells) + len(self.q_strip) + len(self.k_strip)

    def _row(self, row: int) -> str:
        """Return what a row of cells says on hovering."""
        q, k, columns = self.q, self.k, np.flatnonzero(self.counts[row]).tolist()
        queries, live = min(q.cell, q.tokens - row * q.cell), int(self.counts[row].sum())
        text = f"{'query' if queries == 1 else 'queries'} {q.span(row, row + 1)}"
        if self.segments is not None:
            low, high = self.segments.queries
            text += f" ({self.segments.named(low[row], high[row])})"
        span = k.span(columns[0], columns[-1] + 1) if columns else ""
        if queries == 1:
            text += f" attends to {live} of {plural(k.tokens, 'key', 'keys')}"
            return f"{text}: {span}" if span else text
        text += f": {render.percent(live / max(queries * k.tokens, 1))} allowed"
        return f"{text}, keys {span}" if span else text

    @property
    def strip(self) -> int:
        """The pixels between the corner of the picture and that of its cells."""
        return 0 if self.segments is None else _STRIP + 2

    def drawn(self, left: int, top: int, gaps: bool) -> str:
        """Draw the strips and the cells, from a corner on. With gaps, these are a pixel wide, at the end of each token,
        if that is large enough.
        """
        q, k = self.q, self.k
        x, y = left + self.strip, top + self.strip
        gapped = gaps and q.pixels >= _GAP and k.pixels >= _GAP
        thick = 1 - 1 / q.pixels if gapped else 1.0
        dash = f' stroke-dasharray="{1 - 1 / k.pixels:.4f} {1 / k.pixels:.4f}"' if gapped else ""
        ground = f'<g stroke-opacity="{render.DEAD_OPACITY}">{self.ground}</g>'
        cells = f'{ground}<g pointer-events="none">{self.cells}</g>'
        on_end = f"scale({_STRIP} {q.pixels:.4g}) matrix(0 1 1 0 0 0)"
        groups = "".join(
            f'<g transform="translate({dx} {dy}) {scale} translate(0 {width / 2:.4g})" '
            f'stroke-width="{width:.4g}"{dashes}>{paths}</g>'
            for dx, dy, scale, paths, width, dashes in (
                (x, y, f"scale({k.pixels:.4g} {q.pixels:.4g})", cells, thick, dash),
                (left, y, on_end, self.q_strip, 1.0, ""),
                (x, top, f"scale({k.pixels:.4g} {_STRIP})", self.k_strip, 1.0, ""),
            )
            if paths
        )
        edges = "" if gapped else ' shape-rendering="crispEdges"'
        return f'<g fill="none" stroke="currentColor"{edges}>{groups}</g>'


def _plane(info: Drawable, batch: int, head: int, room: int) -> _Plane:
    """Return one plane in cells that are as small as its pixels and its characters allow."""
    coarser = 1
    while (plane := _Plane(info, batch, head, coarser, room)).size > _BUDGET:
        coarser += 1
    return plane


# Words


def _ticks(axis: _Axis, along: bool, left: int, top: int) -> str:
    """Draw token numbers beside one side of the cells, which begin at (left, top)."""
    tokens = axis.ticks(12 + _DIGIT * len(str(axis.tokens)) if along else 20)
    shift = 0.0
    lines = ""
    if axis.pixels >= _GAP and axis.cell == 1:  # single tokens: numbers stand at their middle
        tokens, shift = [token for token in tokens if token < axis.tokens], (axis.pixels - 1) / 2
    places = [axis.at(token) + shift for token in tokens]
    if not shift:
        data = "".join(
            f"M{_number(left + at)} {top}v-3" if along else f"M{left} {_number(top + at)}h-3" for at in places
        )
        lines = f'<path stroke="currentColor" stroke-opacity=".5" d="{data}"/>'
    spots = [(left + at, top - 5) if along else (left - 5, top + at + 3.5) for at in places]
    texts = [
        f'<text x="{_number(x)}" y="{_number(y)}">{token}</text>'
        for (x, y), token in zip(spots, tokens, strict=True)
    ]
    return f'{lines}<g text-anchor="{"middle" if along else "end"}">{"".join(texts)}</g>'


Entry = tuple[list[tuple[int, int]], str]  # colours and levels of squares, and what they mean


def _legend(plane: _Plane) -> list[Entry]:
    """Say what the colours in the picture mean."""
    full, live, segments = CELL_LEVELS + 1, plane.levels > 0, plane.segments
    entries: list[Entry] = []
    if segments is not None:
        known = segments.known.tolist()
        squares = [(FIRST + i, full) for i in range(min(len(known), len(PALETTE)))]
        if len(known) > len(PALETTE):
            entries.append((squares, f"{len(known)} {segments.noun}s, colours repeat"))
        else:
            entries += [
                ([square], segments.named(name, name)) for square, name in zip(squares, known, strict=True)
            ]
        sides = (segments.strip(segments.queries), segments.strip(segments.keys))
        if any((colours == SEVERAL).any() for colours in (plane.colours[live], *sides)):
            entries.append(([(SEVERAL, full)], f"several {segments.noun}s"))
    elif live.any():
        entries.append(([(UNTOLD, full)], "allowed"))
    if (plane.levels[live] < full).any():
        colour = UNTOLD if segments is None else FIRST
        entries.append(
            ([(colour, level) for level in (1, CELL_LEVELS // 2 + 1, CELL_LEVELS)], "partly allowed")
        )
    if not live.all():
        padding = segments is not None and segments.padded
        entries.append(([(BLANK, full)], "masked out, or padding" if padding else "masked out"))
    return entries


def words_beside(lines: list[str], entries: list[Entry], x: float) -> tuple[str, float, float]:
    """Return the column at the right, and where it ends."""
    drawn, y, right = "", 12, 0.0
    for number, line in enumerate(lines):
        faint = ' fill-opacity=".75"' if number else ""
        drawn += f'<text x="{_number(x)}" y="{y}"{faint}>{line}</text>'
        right = max(right, x + _LETTER * len(line))
        y += _LINE
    y += _LINE // 2
    for squares, text in entries:
        at = x
        for colour, level in squares:
            drawn += stroke(colour, level, f"M{_number(at)} {y - 4}h10")
            at += 12
        drawn += f'<text x="{_number(at + 4)}" y="{y}">{text}</text>'
        right = max(right, at + 4 + _LETTER * len(text))
        y += _LINE
    return f'<g font-size="11" stroke-width="10">{drawn}</g>', right, y - _LINE


def frame(width: int, height: int, title: str, drawn: str) -> str:
    """Return a picture in the colour of the text around it. Without a title it goes with words that say all."""
    role, named = ('role="img"', f"<title>{title}</title>") if title else ('aria-hidden="true"', "")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {role} width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" fill="currentColor" '
        f'font-family="system-ui, sans-serif" font-size="10">{named}{drawn}</svg>'
    )


def svg(info: Drawable, batch: int = 0, head: int = 0) -> str:
    """Return one plane of a mask as an ``<svg>`` element of 40 KB at most."""
    batches, queries, keys = info.shape
    if batches and info.heads:
        batch, head = render.places(info, batch, head)
    plane = _plane(info, batch, head, _PLOT)
    q, k = plane.q, plane.k
    left, top = math.ceil(12 + _DIGIT * len(str(q.ticks(20)[-1]))), 31  # of the strips, or else of the cells
    x, y = left + plane.strip, top + plane.strip

    sizes = f"batch {batches}, {plural(info.heads, 'head', 'heads')}"
    shape = f"{plural(queries, 'query', 'queries')} × {plural(keys, 'key', 'keys')}"
    shown = render.shown(info, batch, head, plane.density)
    lines = [sizes, shape, shown]
    if max(q.cell, k.cell) > 1:
        lines.append(f"a cell is {q.cell} × {k.cell} pairs")
    legend, width, height = words_beside(lines, _legend(plane), max(x + k.length, 100) + 32)
    width, height = math.ceil(width), math.ceil(max(y + q.length, height) + 8)
    return frame(
        width,
        height,
        f"Attention mask: {sizes}, {shape}; {shown}",
        f'{plane.drawn(left, top, gaps=True)}<g fill-opacity=".75"><text x="8" y="12">query ↓</text>'
        f'<text x="{_number(max(x + k.length / 2, 76))}" y="12" text-anchor="middle">key →</text>'
        f"{_ticks(q, False, left, y)}{_ticks(k, True, x, top)}</g>{legend}",
    )


def thumbnail(info: Drawable) -> str:
    """Return the first plane of a mask as a small square, without words."""
    plane, size = _plane(info, 0, 0, _SMALL), _SMALL + _STRIP + 2
    left, top = ((size - plane.strip - math.ceil(axis.length)) // 2 for axis in (plane.k, plane.q))
    return frame(size, size, "", plane.drawn(left, top, gaps=False))
