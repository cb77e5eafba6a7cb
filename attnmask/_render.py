"""Masks as pictures: text for a terminal, SVG for a notebook, an image for matplotlib.

All three look at one plane of a mask, that of a batch row and a head, through a coarse grid: how many pairs of each
cell are live. The C core counts them from the description, so the size of the picture decides what it costs, not the
size of the mask::

    pairs of 4 queries and 8 keys        live ones in cells of 2 × 4

          # # # . . . . .
          . # # # . . . .                          6 0
          . . # # # . . .                          3 3
          . . . # # # . .
"""

import importlib
import math
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from attnmask._arguments import describe, flag, integer, one_of, place

Counts = NDArray[np.int64]
Ids = NDArray[np.int32]

PAD, MIX = -1, -2  # labels of a cell: nothing but padding, several segments (or segments and padding)


class Drawable(Protocol):
    """What can be drawn; `attnmask.MaskInfo` can."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Batch, queries, keys."""

    @property
    def heads(self) -> int:
        """1 if all heads share the mask."""

    def grid(self, batch: int, head: int, q_cell: int, k_cell: int) -> Counts:
        """Live pairs of each cell of `q_cell` × `k_cell` pairs, the last ones cut off."""

    def labels(self, batch: int, head: int) -> tuple[Ids, Ids] | None:
        """Segment ids of the queries and of the keys, if they are known."""


# Arguments


def _places(info: Drawable, batch: Any, head: Any) -> tuple[int, int]:
    return place(batch, "batch", info.shape[0]), place(head, "head", info.heads)


def _block(block_size: Any) -> tuple[int, int]:
    if not isinstance(block_size, (tuple, list)):
        block_size = (block_size, block_size)
    if len(block_size) != 2:
        raise ValueError(f"block_size must be an integer or two of them, got {len(block_size)}")
    return integer(block_size[0], "block_size", 1), integer(block_size[1], "block_size", 1)


# What lies in a cell


def _cells(tokens: int, cell: int) -> int:
    return -(-tokens // cell)


def _whole_tiles(cell: int) -> int:
    """`cell`, or a little more: the core counts whole tiles of 64 × 64 pairs fastest."""
    return cell if cell <= 64 else _cells(cell, 64) * 64


def _grid(info: Drawable, batch: int, head: int, q_cell: int, k_cell: int) -> Counts:
    _, queries, keys = info.shape
    return info.grid(batch, head, min(q_cell, max(queries, 1)), min(k_cell, max(keys, 1)))


def _cell_labels(ids: Ids, cell: int) -> Ids:
    """The one id that a cell holds, or PAD, or MIX. The last cell is filled up with padding."""
    if len(ids) == 0:
        return ids
    ids = np.maximum(ids, PAD)
    starts = np.arange(0, len(ids), min(cell, len(ids)))
    low, high = np.minimum.reduceat(ids, starts), np.maximum.reduceat(ids, starts)
    if len(ids) % cell:
        low[-1] = PAD
    return np.where(low == high, low, np.int32(MIX))


def _shares(counts: Counts, queries: int, keys: int, q_cell: int, k_cell: int) -> NDArray[np.float64]:
    """The live share of each cell; the last ones count as large as they are."""
    rows = np.diff(np.append(np.arange(0, queries, q_cell), queries))
    columns = np.diff(np.append(np.arange(0, keys, k_cell), keys))
    return counts / (rows[:, None].astype(np.float64) * columns)


def _percent(share: float) -> str:
    """Rounded, but never to 0 or 100 where some pairs are live and some not."""
    text = f"{100 * share:.3g}"
    if text == "100" and share < 1:
        return "over 99.9 %"
    return f"{text} %" if share >= 1e-5 or share == 0 else "under 0.001 %"


def _density(counts: Counts, queries: int, keys: int) -> float:
    return int(counts.sum()) / (queries * keys) if queries and keys else 0.0


# Text

_GLYPHS = {"unicode": ("  ", "░░", "██"), "ascii": ("  ", "..", "##")}
_MARGIN = 6  # characters of a label at the left, at least


def _margin_label(label: int) -> str:
    return {PAD: "PAD", MIX: "MIX"}.get(label, str(label))


def _column_label(label: int) -> str:
    return {PAD: "  ", MIX: "??"}.get(label, f"{label % 100:02d}")


def visualize(
    info: Drawable,
    block_size: int | tuple[int, int] = 32,
    batch: int = 0,
    head: int = 0,
    fit_in_screen: bool = True,
    max_rows: int = 32,
    max_cols: int = 64,
    charset: str = "unicode",
    show_segments: bool = True,
) -> str:
    """Draw one plane of a mask with characters: each cell is empty, partly live or full.

    A cell at the edge is as large as the others; what lies beyond the mask counts as dead.

    Parameters
    ----------
    info : MaskInfo
        The mask.
    block_size : int or (int, int)
        Tokens along the sides of a cell: as many queries as keys, or queries and keys.
    batch, head : int
        Which plane. IndexError outside the mask, or if `head` is not 0 in a mask that all heads share.
    fit_in_screen : bool
        Make cells larger, by whole numbers of blocks, so that no more than `max_rows` × `max_cols` are drawn.
    max_rows, max_cols : int
        At least 1.
    charset : {"unicode", "ascii"}
        Shades of grey, or letters that every terminal has.
    show_segments : bool
        Write the segment of the queries to the left of each row of cells and that of the keys above each column, by
        its last two digits. A cell of nothing but padding is ``PAD`` or blank; one with several, ``MIX`` or ``??``.

    Returns
    -------
    str

    Examples
    --------
    >>> from attnmask import MaskInfo, _render as render
    >>> info = MaskInfo.from_segments([[0, 0, 0, 0, 1, 1, -1, -1]]).apply_causal()
    >>> print(render.visualize(info, block_size=2, charset="ascii"))  # doctest: +NORMALIZE_WHITESPACE
    mask [1, 1, 8, 8], batch 0, head 0; 20.3 % live; a cell is 2 x 2 pairs
             000001
            ========
         0 ||..      ||
         0 ||##..    ||
         1 ||    ..  ||
       PAD ||        ||
            ========
    '##' all live, '..' some live, '  ' none
    left: segments of queries, top: of keys; PAD or blank: padding; MIX or ??: several
    """
    batch, head = _places(info, batch, head)
    q_block, k_block = _block(block_size)
    fit_in_screen = flag(fit_in_screen, "fit_in_screen")
    show_segments = flag(show_segments, "show_segments")
    max_rows, max_cols = integer(max_rows, "max_rows", 1), integer(max_cols, "max_cols", 1)
    one_of(charset, "charset", tuple(_GLYPHS))

    batches, queries, keys = info.shape
    q_cell, k_cell = q_block, k_block
    if fit_in_screen:
        q_cell *= max(_cells(_cells(queries, q_block), max_rows), 1)
        k_cell *= max(_cells(_cells(keys, k_block), max_cols), 1)
    counts = _grid(info, batch, head, q_cell, k_cell)
    labels = info.labels(batch, head) if show_segments else None

    glyphs = _GLYPHS[charset]
    rows = np.array(glyphs)[np.where(counts == q_cell * k_cell, 2, np.minimum(counts, 1))]
    times = "×" if charset == "unicode" else "x"
    title = (
        f"mask [{batches}, {info.heads}, {queries}, {keys}], batch {batch}, head {head}; "
        f"{_percent(_density(counts, queries, keys))} live; a cell is {q_cell} {times} {k_cell} pairs"
    )
    if (q_cell, k_cell) != (q_block, k_block):
        title += f", {q_cell // q_block} {times} {k_cell // k_block} blocks"
    lines = [title]
    indent, margins = " " * (_MARGIN if show_segments else 0), [""] * len(rows)
    if labels is not None:
        q_labels, k_labels = (
            _cell_labels(ids, cell) for ids, cell in zip(labels, (q_cell, k_cell), strict=True)
        )
        margins = [_margin_label(label) for label in q_labels.tolist()]
        indent = " " * max(_MARGIN, *map(len, margins), 0)
        lines.append(indent + "   " + "".join(map(_column_label, k_labels.tolist())))
    if show_segments:
        margins = [margin.rjust(len(indent)) + " " for margin in margins]
    edge = indent + "  " + "==" * rows.shape[1] + "  "
    lines.append(edge)
    lines += [f"{margin}||{''.join(row)}||" for margin, row in zip(margins, rows, strict=True)]
    lines.append(edge)
    lines.append(f"'{glyphs[2]}' all live, '{glyphs[1]}' some live, '{glyphs[0]}' none")
    if labels is not None:
        lines.append("left: segments of queries, top: of keys; PAD or blank: padding; MIX or ??: several")
    elif show_segments:
        lines.append("no segments: the mask has none, and is too large to find rows that are alike")
    return "\n".join(lines)


# SVG

_PLOT = 256  # pixels of the longer side, at most
_THIN = 24  # pixels of the shorter side, at least; and of one token, at most
_GAP = 8  # pixels of a token from which on there is a gap between it and the next
_BUDGET = 20_000  # characters for the cells; beyond that they are drawn larger
_LEVELS = 5  # shades of cells that are live in part; their share is rounded up
_DIGIT = 6.4  # pixels of its width in tick labels
_FAINTEST, _RANGE = 0.24, 0.6  # opacity of a cell with next to no live pair, and what is added as they grow
_STRIP = 5  # pixels of the strips that show segments

# Told apart with any kind of colour vision, on white as on black.
_PALETTE = ("#4a7ebb", "#d98c3f", "#3fa796", "#c8607a", "#8f9e3a", "#9a74c2")
_PLAIN = "#4a7ebb"
_MIXED = "#8a929c"
_DEAD = "#eeeeee"  # where the ground is white for sure

# Colours of cells are numbered: those of the palette from 2 on, and then the plain one.
_BLANK, _SEVERAL, _FIRST, _UNTOLD = 0, 1, 2, 2 + len(_PALETTE)
_COLOURS = ("none", _MIXED, *_PALETTE, _PLAIN)

_DECIMAL_STEPS = [digit * 10**i for i in range(19) for digit in (1, 2, 5)]
_BINARY_STEPS = [2**i for i in range(63)]


class _Axis:
    """One side of a picture: its tokens, how many of them make a cell, and the pixels of a cell."""

    def __init__(self, tokens: int, cell: int, pixels: float) -> None:
        self.tokens, self.cell, self.pixels = tokens, cell, pixels
        self.count = _cells(tokens, cell)
        self.length = self.count * pixels

    def at(self, token: int) -> float:
        return token / self.cell * self.pixels

    def ticks(self, apart: float) -> list[int]:
        """Round numbers: of binary lengths binary ones."""
        steps = _DECIMAL_STEPS if self.tokens % 64 else _BINARY_STEPS
        step = next((step for step in steps if self.at(step) >= max(apart, self.length / 5)), self.tokens + 1)
        return list(range(0, self.tokens + 1, step))


def _axes(queries: int, keys: int, coarser: int) -> tuple[_Axis, _Axis]:
    """Cells and pixels of both sides: the same for both, unless one would be too thin to see."""
    longest, shortest = max(queries, keys), min(queries, keys)

    def fit(pixels: int) -> _Axis:
        if longest * pixels <= _PLOT:
            return _Axis(longest, 1, min(_PLOT // max(longest, 1), _THIN))
        return _Axis(longest, _whole_tiles(_cells(longest * pixels, _PLOT)), pixels)

    sizes = [fit(pixels * coarser) for pixels in (2, 3, 4)]
    long = next((axis for axis in sizes if axis.length >= 0.8 * _PLOT), sizes[0])
    short = _Axis(shortest, long.cell, long.pixels)
    if 0 < short.length < _THIN:
        cell = _cells(shortest, 8)
        short = _Axis(shortest, cell, _THIN / _cells(shortest, cell))
    return (long, short) if queries >= keys else (short, long)


class _Segments:
    """Which segments cells hold: from the lowest to the highest, or none if there is only padding (low > high)."""

    def __init__(self, labels: tuple[Ids, Ids], q_cell: int, k_cell: int) -> None:
        self.labels = labels
        ids = np.concatenate(labels)
        self.known = np.unique(ids[ids >= 0])
        self.differ = len(self.known) > 1 or (len(self.known) == 1 and bool((ids < 0).any()))
        self.long = 4 * sum(np.count_nonzero(np.diff(side)) for side in labels) <= len(ids)
        self.queries, self.keys = self._ends(labels[0], q_cell), self._ends(labels[1], k_cell)

    @staticmethod
    def _ends(ids: Ids, cell: int) -> tuple[Ids, Ids]:
        starts = np.arange(0, len(ids), cell)
        low = np.minimum.reduceat(np.where(ids < 0, np.int32(2**31 - 1), ids), starts)
        return low, np.maximum.reduceat(np.maximum(ids, PAD), starts)

    def strip(self, ends: tuple[Ids, Ids]) -> NDArray[np.intp]:
        """The colours of the cells along one side."""
        low, high = ends
        return np.where(low == high, self._ranks(low), np.where(low > high, _BLANK, _SEVERAL))[None]

    def plane(self) -> NDArray[np.intp]:
        """The colour of each cell: its segment's if queries and keys have one in common, and no other."""
        low, high = self.shared
        return np.where(low == high, self._ranks(low), _SEVERAL)

    @property
    def shared(self) -> tuple[Ids, Ids]:
        (q_low, q_high), (k_low, k_high) = self.queries, self.keys
        return np.maximum(q_low[:, None], k_low), np.minimum(q_high[:, None], k_high)

    def _ranks(self, ids: Ids) -> NDArray[np.intp]:
        return np.searchsorted(self.known, ids) % len(_PALETTE) + _FIRST


def _segments(
    info: Drawable, batch: int, head: int, counts: Counts, q_cell: int, k_cell: int
) -> _Segments | None:
    """The segments of a plane, if they are known and say something.

    Where a mask is an array its labels may number rows that are alike: these are segments only if live pairs keep to
    them, as far as cells tell, or if there are at least long runs of equal ones.
    """
    labels = info.labels(batch, head) if counts.size else None
    if labels is None:
        return None
    segments = _Segments(labels, q_cell, k_cell)
    low, high = segments.shared
    return segments if segments.differ and (segments.long or not counts[low > high].any()) else None


def _plural(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _strokes(styles: NDArray[np.intp]) -> dict[int, str]:
    """Path data for every style but 0: a stroke for each run of equal cells in a row. A cell is 1 × 1."""
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


def _coloured(colours: NDArray[np.intp], levels: NDArray[np.intp] | None = None) -> str:
    """Cells as SVG paths. At the highest level they are opaque; at level 0 there is nothing."""
    if levels is None:
        levels = np.full(colours.shape, _LEVELS + 1)
    base = _LEVELS + 2
    drawn = ""
    for style, data in _strokes(
        np.where((levels == 0) | (colours == _BLANK), 0, colours * base + levels)
    ).items():
        colour, level = divmod(style, base)
        opacity = (
            "" if level > _LEVELS else f' stroke-opacity="{_number(_FAINTEST + _RANGE * level / _LEVELS)}"'
        )
        drawn += f'<path stroke="{_COLOURS[colour]}"{opacity} d="{data}"/>'
    return drawn


class _Plane:
    """One plane as SVG: its cells, and strips for its segments along both sides."""

    def __init__(self, info: Drawable, batch: int, head: int, coarser: int) -> None:
        batches, queries, keys = info.shape
        self.q, self.k = q, k = _axes(queries, keys, coarser)
        counts = np.zeros((q.count, k.count), np.int64)
        if batches and info.heads:
            counts = _grid(info, batch, head, q.cell, k.cell)
        shares = _shares(counts, queries, keys, q.cell, k.cell)
        levels = np.where(shares == 1, _LEVELS + 1, np.ceil(shares * _LEVELS)).astype(np.intp)
        colours = np.full(counts.shape, _UNTOLD)
        self.density = _density(counts, queries, keys)
        self.q_strip = self.k_strip = ""
        segments = _segments(info, batch, head, counts, q.cell, k.cell)
        if segments is not None:
            colours = segments.plane()
            self.q_strip = _coloured(segments.strip(segments.queries))
            self.k_strip = _coloured(segments.strip(segments.keys))
        self.cells = _coloured(colours, levels)

    @property
    def size(self) -> int:
        return len(self.cells) + len(self.q_strip) + len(self.k_strip)


def _ticks(axis: _Axis, along: bool, left: int, top: int) -> str:
    """Numbers of tokens beside one side of the cells, which begin at (left, top)."""
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


def _shown(info: Drawable, batch: int, head: int, density: float) -> str:
    """Which plane it is, where there are several, and how much of it is live."""
    batches, queries, keys = info.shape
    places = [f"batch row {batch}"] * (batches > 1) + [f"head {head}"] * (info.heads > 1)
    share = f"{_percent(density)} live" if queries and keys else "no pairs"
    return f"{', '.join(places)}: {share}" if places else share


def svg(info: Drawable, batch: int = 0, head: int = 0) -> str:
    """Draw one plane of a mask as a small SVG picture, for notebooks.

    Queries run down the left, keys along the top. The more of a cell is live, the stronger its colour. If segments
    are known, strips along both sides show them, and cells inside one of them have its colour.

    Parameters
    ----------
    info : MaskInfo
        The mask.
    batch, head : int
        Which plane. IndexError outside the mask, or if `head` is not 0 in a mask that all heads share.

    Returns
    -------
    str
        An ``<svg>`` element of 30 KB at most, whose lines and letters have the colour of the text around it.

    Examples
    --------
    >>> from attnmask import MaskInfo, _render as render
    >>> picture = render.svg(MaskInfo.from_segments([[0, 0, 1, 1]]))
    >>> picture[:5], picture[-6:]
    ('<svg ', '</svg>')
    """
    batches, queries, keys = info.shape
    if batches and info.heads:
        batch, head = _places(info, batch, head)
    coarser = 1
    while (plane := _Plane(info, batch, head, coarser)).size > _BUDGET:
        coarser += 1

    q, k = plane.q, plane.k
    strip = _STRIP + 2 if plane.q_strip or plane.k_strip else 0
    left, top = math.ceil(12 + _DIGIT * len(str(q.ticks(20)[-1]))), 31  # of the strips, or else of the cells
    x, y = left + strip, top + strip

    # Tokens that are large enough have gaps between them, a pixel wide.
    gapped = q.pixels >= _GAP and k.pixels >= _GAP
    thick, dash = (1 - 1 / q.pixels, f"{1 - 1 / k.pixels:.4f} {1 / k.pixels:.4f}") if gapped else (1, "none")
    ground = "".join(f"M0 {row}h{k.count}" for row in range(q.count))
    drawn = (
        (
            x,
            y,
            f"scale({k.pixels:.4g} {q.pixels:.4g})",
            f'<path stroke-opacity=".08" d="{ground}"/>{plane.cells}',
            dash,
        ),
        (left, y, f"scale({_STRIP} {q.pixels:.4g}) matrix(0 1 1 0 0 0)", plane.q_strip, "none"),
        (x, top, f"scale({k.pixels:.4g} {_STRIP})", plane.k_strip, "none"),
    )
    groups = [
        f'<g transform="translate({dx} {dy}) {scale} translate(0 .5)" stroke-dasharray="{dashes}">{paths}</g>'
        for dx, dy, scale, paths, dashes in drawn
        if paths
    ]

    rows, columns = _plural(queries, "query", "queries"), _plural(keys, "key", "keys")
    shape = f"batch {batches}, {_plural(info.heads, 'head', 'heads')}, {rows} × {columns}"
    shown = _shown(info, batch, head, plane.density)
    width = math.ceil(max(320, x + k.length + 6 + _DIGIT * len(str(keys)) / 2, 16 + 6.2 * len(shape)))
    height = math.ceil(y + q.length) + 42
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" fill="currentColor" font-family="system-ui, sans-serif" font-size="10">'
        f"<title>Attention mask: {shape}; {shown}</title>"
        f'<g fill="none" stroke="currentColor" shape-rendering="crispEdges" '
        f'stroke-width="{thick:.4g}">{"".join(groups)}</g>'
        f'<g fill-opacity=".75"><text x="8" y="12">query ↓</text>'
        f'<text x="{_number(max(x + k.length / 2, 76))}" y="12" text-anchor="middle">key →</text>'
        f"{_ticks(q, False, left, y)}{_ticks(k, True, x, top)}</g>"
        f'<text x="8" y="{height - 21}" font-size="11">{shape}</text>'
        f'<text x="8" y="{height - 6}" font-size="11" fill-opacity=".75">{shown}</text></svg>'
    )


# matplotlib

_PIXELS = 512  # of each side, at most
_MOST_BORDERS = 32  # lines between segments along each side; more would hide the mask


def plot(info: Drawable, ax: Any = None, batch: int = 0, head: int = 0) -> Any:
    """Draw one plane of a mask with matplotlib, which has to be installed.

    Parameters
    ----------
    info : MaskInfo
        The mask.
    ax : matplotlib.axes.Axes, optional
        Where to draw; in a new figure if it is left out.
    batch, head : int
        Which plane. IndexError outside the mask, or if `head` is not 0 in a mask that all heads share.

    Returns
    -------
    matplotlib.axes.Axes
        Its coordinates are tokens: key 3 is centred on x = 3, query 3 on y = 3.
    """
    batch, head = _places(info, batch, head)
    try:
        colors, ticker = (importlib.import_module(f"matplotlib.{name}") for name in ("colors", "ticker"))
    except ImportError as error:
        raise ImportError("plot needs matplotlib: pip install matplotlib") from error
    if not (ax is None or hasattr(ax, "imshow")):
        raise TypeError(f"ax must be matplotlib.axes.Axes or None, got {describe(ax)}")
    if ax is None:
        _, ax = importlib.import_module("matplotlib.pyplot").subplots(layout="constrained")

    _, queries, keys = info.shape
    q_cell, k_cell = (_whole_tiles(max(1, _cells(tokens, _PIXELS))) for tokens in (queries, keys))
    counts = _grid(info, batch, head, q_cell, k_cell)
    rows, columns = counts.shape
    if counts.size:
        ax.imshow(
            _shares(counts, queries, keys, q_cell, k_cell),
            cmap=colors.LinearSegmentedColormap.from_list("live", [_DEAD, _PLAIN]),
            vmin=0,
            vmax=1,
            interpolation="nearest",
            extent=(-0.5, columns * k_cell - 0.5, rows * q_cell - 0.5, -0.5),
            aspect="equal" if max(queries, keys) <= 4 * min(queries, keys) else "auto",
        )
    ax.set(xlim=(-0.5, max(keys, 1) - 0.5), ylim=(max(queries, 1) - 0.5, -0.5), xlabel="key", ylabel="query")
    ax.xaxis.set_label_position("top")
    ax.xaxis.tick_top()
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(ticker.MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    ax.set_title(_shown(info, batch, head, _density(counts, queries, keys)), fontsize="medium")
    segments = _segments(info, batch, head, counts, q_cell, k_cell)
    if segments is not None:
        q_borders, k_borders = (np.flatnonzero(np.diff(ids)) + 0.5 for ids in segments.labels)
        if max(len(q_borders), len(k_borders)) <= _MOST_BORDERS:
            style = {"colors": "white", "linewidths": 0.8}
            ax.hlines(q_borders, -0.5, keys - 0.5, **style)
            ax.vlines(k_borders, -0.5, queries - 0.5, **style)
    return ax
