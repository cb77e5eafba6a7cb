"""Draw masks: text for a terminal, an image for matplotlib, and what they share with SVG (`_render_svg.py`).

All three look at one plane of a mask, that of a batch row and a head, through a coarse grid: how many pairs of each
cell are allowed. The C core counts them from the description, so the size of the picture decides what it costs, not the
size of the mask::

    pairs of 4 queries and 8 keys        allowed ones in cells of 2 × 4

          # # # . . . . .
          . # # # . . . .                          6 0
          . . # # # . . .                          3 3
          . . . # # # . .
"""

import importlib
import os
import shutil
import sys
import textwrap
from itertools import groupby
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from attnmask._common.arguments import block_sizes, describe, flag, integer, one_of, place
from attnmask._common.types import Axes

Counts = NDArray[np.int64]
Ids = NDArray[np.int32]

PAD, MIX = -1, -2  # labels of a cell: nothing but padding, several segments (or segments and padding)

# The colours of segments are those of Okabe and Ito, which are told apart with any kind of colour vision, on white and
# on black. Neighbours here differ most.
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9")
MIXED = "#686868"  # of cells with several segments
PLAIN = PALETTE[0]  # of all live cells, where no segments are known

# Colours of cells are numbers: of nothing, MIXED, the palette from FIRST on, PLAIN.
BLANK, SEVERAL, FIRST, UNTOLD = 0, 1, 2, 2 + len(PALETTE)
COLOURS = ("none", MIXED, *PALETTE, PLAIN)

FAINTEST, STRONGEST = 0.32, 0.86  # opacity of a cell with next to no live pair, and with next to all
DEAD_OPACITY = 0.08  # of cells without live pairs, in the colour of the text


class Drawable(Protocol):
    """What can be drawn; `attnmask.MaskInfo` can."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Batch, queries, keys."""

    @property
    def heads(self) -> int:
        """1 if all heads share the mask."""

    def grid(self, batch: int, head: int, q_cell: int, k_cell: int) -> Counts:
        """Count live pairs in each cell of `q_cell` × `k_cell` pairs; the last ones are cut off."""

    def labels(self, batch: int, head: int) -> tuple[Ids, Ids] | None:
        """Return segment ids of queries and keys, if they are known."""

    @property
    def _noun(self) -> str:
        """Return what an id numbers: "segment" or "chunk"."""


# Arguments


def places(info: Drawable, batch: object, head: object) -> tuple[int, int]:
    return place(batch, "batch", info.shape[0]), place(head, "head", info.heads)


# What lies in a cell


def cell_count(tokens: int, cell: int) -> int:
    return -(-tokens // cell)


def whole_tiles(cell: int) -> int:
    """Return `cell` or a little more: the core counts whole tiles of 64 × 64 pairs fastest."""
    return cell if cell <= 64 else cell_count(cell, 64) * 64


def counted(info: Drawable, batch: int, head: int, q_cell: int, k_cell: int) -> Counts:
    _, queries, keys = info.shape
    return info.grid(batch, head, min(q_cell, max(queries, 1)), min(k_cell, max(keys, 1)))


def _cell_labels(ids: Ids, cell: int) -> Ids:
    """Return the one id that a cell holds, or PAD, or MIX. The last cell is filled up with padding."""
    if len(ids) == 0:
        return ids
    ids = np.maximum(ids, PAD)
    starts = np.arange(0, len(ids), min(cell, len(ids)))
    low, high = np.minimum.reduceat(ids, starts), np.maximum.reduceat(ids, starts)
    if len(ids) % cell:
        low[-1] = PAD
    return np.where(low == high, low, np.int32(MIX))


def shares(counts: Counts, queries: int, keys: int, q_cell: int, k_cell: int) -> NDArray[np.float64]:
    """Return the live share of each cell; the last ones count at their own size."""
    rows = np.diff(np.append(np.arange(0, queries, q_cell), queries))
    columns = np.diff(np.append(np.arange(0, keys, k_cell), keys))
    return counts / (rows[:, None].astype(np.float64) * columns)


def percent(share: float) -> str:
    """Round a share, but never to 0 or 100 where some pairs are live and some not."""
    text = f"{100 * share:.3g}"
    if text == "100" and share < 1:
        return "over 99.9 %"
    return f"{text} %" if share >= 1e-5 or share == 0 else "under 0.001 %"


def density(counts: Counts, queries: int, keys: int) -> float:
    return int(counts.sum()) / (queries * keys) if queries and keys else 0.0


class Segments:
    """Which segments cells hold: from the lowest to the highest, or none if there is only padding (low > high).

    `noun` is what a segment is called.
    """

    def __init__(self, labels: tuple[Ids, Ids], q_cell: int, k_cell: int, noun: str) -> None:
        self.noun = noun
        runs = [ids[np.append(True, ids[1:] != ids[:-1])] for ids in labels]
        ids = np.concatenate(runs)
        self.known = np.unique(ids[ids >= 0])
        self.padded = bool((ids < 0).any())
        self.differ = len(self.known) > 1 or (len(self.known) == 1 and self.padded)
        self.long = 4 * (len(ids) - 2) <= sum(map(len, labels))
        self.queries, self.keys = self._ends(labels[0], q_cell), self._ends(labels[1], k_cell)

    @staticmethod
    def _ends(ids: Ids, cell: int) -> tuple[Ids, Ids]:
        starts = np.arange(0, len(ids), min(cell, len(ids)))
        low = np.minimum.reduceat(np.where(ids < 0, np.int32(2**31 - 1), ids), starts)
        return low, np.maximum.reduceat(np.maximum(ids, PAD), starts)

    def named(self, low: int, high: int) -> str:
        if low > high:
            return "padding"
        return f"{self.noun} {low}" if low == high else f"{self.noun}s {low}–{high}"

    def strip(self, ends: tuple[Ids, Ids]) -> NDArray[np.intp]:
        """Return the colours of the cells along one side."""
        low, high = ends
        return np.where(low == high, self._ranks(low), np.where(low > high, BLANK, SEVERAL))

    def plane(self) -> NDArray[np.intp]:
        """Return the colour of each cell: its segment's if queries and keys share exactly one."""
        low, high = self.shared
        return np.where(low == high, self._ranks(low), SEVERAL)

    @property
    def shared(self) -> tuple[Ids, Ids]:
        (q_low, q_high), (k_low, k_high) = self.queries, self.keys
        return np.maximum(q_low[:, None], k_low), np.minimum(q_high[:, None], k_high)

    def _ranks(self, ids: Ids) -> NDArray[np.intp]:
        return np.searchsorted(self.known, ids) % len(PALETTE) + FIRST


def segments_of(
    info: Drawable, batch: int, head: int, counts: Counts, q_cell: int, k_cell: int
) -> Segments | None:
    """Return the segments of a plane, if they are known and informative.

    If the mask is an array, labels may number rows that are alike. Such labels are segments only if they have long
    runs, or if no cell shows a live pair between two of them.
    """
    labels = info.labels(batch, head) if counts.size else None
    if labels is None:
        return None
    segments = Segments(labels, q_cell, k_cell, info._noun)
    low, high = segments.shared
    return segments if segments.differ and (segments.long or not counts[low > high].any()) else None


def cell_colours(counts: Counts, segments: Segments | None) -> NDArray[np.intp]:
    return np.full(counts.shape, UNTOLD) if segments is None else segments.plane()


def shown(info: Drawable, batch: int, head: int, share: float) -> str:
    """Say which plane is shown, if there are several, and how much of it is live."""
    batches, queries, keys = info.shape
    named = [f"batch row {batch}"] * (batches > 1) + [f"head {head}"] * (info.heads > 1)
    live = f"{percent(share)} allowed" if queries and keys else "no pairs"
    return f"{', '.join(named)}: {live}" if named else live


# Text

_LEVELS = (0, 95, 135, 175, 215, 255)  # of red, green and blue, among the 256 colours of a terminal
_GLYPHS = {"unicode": ("  ", "░░", "██"), "ascii": ("  ", "..", "##")}
_MARGIN = 6  # characters of a label at the left of `visualize`, at least

_AROUND = 4  # characters of a line beside its label and its cells
_OTHER_LINES = 7  # title, edges and legend, and where the next command is written


def _terminal() -> os.terminal_size:
    """Return the terminal's width and lines; 80 characters and 0 lines if there is none."""
    return shutil.get_terminal_size((80, 0))


def _fitting(
    tokens: tuple[int, int], margin: int, max_rows: int, max_cols: int, top: int = 1
) -> tuple[int, int]:
    """Return the smallest cells that are at most `max_rows` × `max_cols` and fit the terminal, beside `margin`
    characters and below `top` lines of labels.
    """
    width, lines = _terminal()
    rows = max(min(max_rows, lines - _OTHER_LINES - top if lines else max_rows), 1)
    columns = max(min(max_cols, (width - margin - _AROUND) // len(_GLYPHS["ascii"][0])), 1)
    return max(cell_count(tokens[0], rows), 1), max(cell_count(tokens[1], columns), 1)


def _wrapped(lines: list[str]) -> list[str]:
    """Wrap lines to the width of the terminal."""
    return [part for line in lines for part in textwrap.wrap(line, max(_terminal().columns, 1))]


def _charset() -> str:
    """Return the character set that standard output can write."""
    try:
        "".join((*_GLYPHS["unicode"], "×")).encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeError, LookupError):
        return "ascii"
    return "unicode"


def _margin_label(label: int) -> str:
    return {PAD: "PAD", MIX: "MIX"}.get(label, str(label))


def _column_label(label: int) -> str:
    return {PAD: "  ", MIX: "??"}.get(label, f"{label % 100:02d}")


def takes_colours(stream: object) -> bool:
    """Return whether the stream is a terminal with colours, and colours are not disabled (see no-color.org)."""
    terminal = getattr(stream, "isatty", bool)()
    return terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def painted(text: str, colour: str) -> str:
    """Return text with the terminal codes of the nearest colour."""
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    red, green, blue = (min(range(6), key=lambda i: abs(_LEVELS[i] - channel)) for channel in channels)
    return f"\033[38;5;{16 + 36 * red + 6 * green + blue}m{text}\033[39m"


def _painted_cells(glyphs: list[str], colours: list[int]) -> str:
    runs = groupby(zip(glyphs, colours, strict=True), key=lambda cell: cell[1])
    texts = (("".join(glyph for glyph, _ in run), COLOURS[colour]) for colour, run in runs)
    return "".join(text if colour == "none" else painted(text, colour) for text, colour in texts)


def visualize(
    info: Drawable,
    block_size: int | tuple[int, int] | None = None,
    batch: int = 0,
    head: int = 0,
    fit_in_screen: bool = True,
    max_rows: int = 32,
    max_cols: int = 64,
    charset: str = "unicode",
    show_segments: bool = True,
    coloured: bool = False,
) -> str:
    """Return the drawing of `MaskInfo.visualize`, `coloured` for a terminal.

    A cell at the edge is as large as the others; pairs beyond the mask count as masked out. A cell of nothing but
    padding has the label PAD or blank; one with several segments, MIX or ??.
    """
    batch, head = places(info, batch, head)
    fit_in_screen = flag(fit_in_screen, "fit_in_screen")
    show_segments = flag(show_segments, "show_segments")
    max_rows, max_cols = integer(max_rows, "max_rows", 1), integer(max_cols, "max_cols", 1)
    one_of(charset, "charset", tuple(_GLYPHS))
    fits_terminal = block_size is None and fit_in_screen
    q_block, k_block = block_sizes(32 if block_size is None else block_size)

    batches, queries, keys = info.shape
    q_cell, k_cell = q_block, k_block
    margin = _MARGIN + 1 if show_segments else 0
    if fits_terminal:
        q_cell, k_cell = q_block, k_block = _fitting((queries, keys), margin, max_rows, max_cols)
    elif fit_in_screen:
        q_cell *= max(cell_count(cell_count(queries, q_block), max_rows), 1)
        k_cell *= max(cell_count(cell_count(keys, k_block), max_cols), 1)
    counts = counted(info, batch, head, q_cell, k_cell)
    labels = info.labels(batch, head) if show_segments else None
    longest = 0 if labels is None else len(str(labels[0].max(initial=0)))
    if fits_terminal and show_segments and longest >= margin:  # which ids seldom are
        q_cell, k_cell = q_block, k_block = _fitting((queries, keys), longest + 1, max_rows, max_cols)
        counts = counted(info, batch, head, q_cell, k_cell)

    glyphs = _GLYPHS[charset]
    rows = np.array(glyphs)[np.where(counts == q_cell * k_cell, 2, np.minimum(counts, 1))]
    times = "×" if charset == "unicode" else "x"
    title = f"mask [{batches}, {info.heads}, {queries}, {keys}], batch {batch}, head {head}; "
    title += f"{percent(density(counts, queries, keys))} allowed; a cell is {q_cell} {times} {k_cell} pairs"
    if (q_cell, k_cell) != (q_block, k_block):
        title += f", {q_cell // q_block} {times} {k_cell // k_block} blocks"
    lines: list[str] = []
    legend = [f"'{glyphs[2]}' all allowed, '{glyphs[1]}' some allowed, '{glyphs[0]}' none"]
    indent, margins = " " * (_MARGIN if show_segments else 0), [""] * len(rows)
    if labels is not None:
        q_labels, k_labels = (
            _cell_labels(ids, cell) for ids, cell in zip(labels, (q_cell, k_cell), strict=True)
        )
        margins = [_margin_label(label) for label in q_labels.tolist()]
        indent = " " * max(_MARGIN, *map(len, margins), 0)
        lines.append(indent + "   " + "".join(map(_column_label, k_labels.tolist())))
        legend.append(
            f"left: {info._noun}s of queries; top: {info._noun}s of keys, two digits for each column"
            + "; PAD or blank: padding" * (PAD in q_labels or PAD in k_labels)
            + "; MIX or ??: several" * (MIX in q_labels or MIX in k_labels)
        )
    elif show_segments:
        legend.append("no segments: the mask has none, and is too large to find rows that are alike")
    if show_segments:
        margins = [margin.rjust(len(indent)) + " " for margin in margins]
    edge = indent + "  " + "==" * rows.shape[1] + "  "
    lines.append(edge)
    texts = ["".join(row) for row in rows]
    if coloured:
        segments = segments_of(info, batch, head, counts, q_cell, k_cell) if show_segments else None
        colours = np.where(counts > 0, cell_colours(counts, segments), BLANK)
        texts = [_painted_cells(*row) for row in zip(rows.tolist(), colours.tolist(), strict=True)]
    lines += [f"{margin}||{text}||" for margin, text in zip(margins, texts, strict=True)]
    lines.append(edge)
    before, after = (_wrapped(part) if fits_terminal else part for part in ([title], legend))
    return "\n".join((*before, *lines, *after))


def _signs(ends: tuple[Ids, Ids]) -> list[str]:
    """Return what is written beside each row, or above each column, of a printed mask."""
    low, high = (side.tolist() for side in ends)
    return [str(i) if i == j else "-" if i > j else "*" for i, j in zip(low, high, strict=True)]


def text(info: Drawable, words: str) -> str:
    """Draw the first plane of a mask as wide as the terminal, below a line that describes the mask.

    A cell counts as full if all of its pairs within the mask are allowed. Segments are shown where they are
    informative; the digits of a key's stand one below the other, so that each column has its own number. A mask without
    pairs gets only the line that describes it.
    """
    batches, queries, keys = info.shape
    title = f"mask [{batches}, {info.heads}, {queries}, {keys}]: {words}; "
    if not all((*info.shape, info.heads)):
        return "\n".join(_wrapped([title + "no pairs"]))
    labels = info.labels(0, 0)
    digits = 1 if labels is None else len(str(max(ids.max() for ids in labels)))
    cells = _fitting((queries, keys), digits + 1, 32, _terminal().columns, digits)
    counts = counted(info, 0, 0, *cells)
    segments = segments_of(info, 0, 0, counts, *cells)

    charset = _charset()
    empty, some, full = _GLYPHS[charset]
    title += shown(info, 0, 0, density(counts, queries, keys))
    legend = [f"rows: queries; columns: keys; '{full}' allowed, '{empty}' masked out"]
    if cells != (1, 1):
        title += f"; a cell is {cells[0]} {'×' if charset == 'unicode' else 'x'} {cells[1]} pairs"
        legend = [f"rows: queries; columns: keys; '{full}' all allowed, '{some}' some, '{empty}' none"]
    left, top = [""] * len(counts), []
    if segments is not None:
        left, signs = _signs(segments.queries), _signs(segments.keys)
        marks, digits = {*left, *signs}, max(map(len, signs))
        top = [" " + " ".join(line) for line in zip(*(sign.rjust(digits) for sign in signs), strict=True)]
        width = max(map(len, left))
        left = [sign.rjust(width) + " " for sign in left]
        legend.append(f"numbers: {segments.noun}s" + ", at the top written downwards" * (digits > 1))
        legend[1] += "; '-': padding" * ("-" in marks) + "; '*': several" * ("*" in marks)
    indent = " " * (len(left[0]) + 2)
    edge = indent + "==" * counts.shape[1]
    levels = (counts > 0).astype(int) + (shares(counts, queries, keys, *cells) == 1)
    rows = ["".join(row) for row in np.array([empty, some, full])[levels]]
    lines = [indent + line for line in top]
    lines += [edge, *(f"{sign}||{row}||" for sign, row in zip(left, rows, strict=True)), edge]
    return "\n".join((*_wrapped([title]), *lines, *_wrapped(legend)))


# matplotlib

_PIXELS = 512  # of each side, at most


def plot(info: Drawable, ax: Axes | None = None, batch: int = 0, head: int = 0) -> Axes:
    """Draw one plane of a mask with matplotlib, which must be installed. Coordinates are tokens: key 3 is centred on
    x = 3, query 3 on y = 3.
    """
    batch, head = places(info, batch, head)
    try:
        colors, ticker = (importlib.import_module(f"matplotlib.{name}") for name in ("colors", "ticker"))
    except ImportError as error:
        raise ImportError("plot needs matplotlib: pip install matplotlib") from error
    if not (ax is None or hasattr(ax, "imshow")):
        raise TypeError(f"ax must be matplotlib.axes.Axes or None, got {describe(ax)}")
    if ax is None:
        _, ax = importlib.import_module("matplotlib.pyplot").subplots(layout="constrained")

    _, queries, keys = info.shape
    q_cell, k_cell = (whole_tiles(max(1, cell_count(tokens, _PIXELS))) for tokens in (queries, keys))
    counts = counted(info, batch, head, q_cell, k_cell)
    rows, columns = counts.shape
    segments = segments_of(info, batch, head, counts, q_cell, k_cell)
    if counts.size:
        palette = colors.to_rgba_array(COLOURS)
        live = shares(counts, queries, keys, q_cell, k_cell)
        image = palette[cell_colours(counts, segments)]
        image[..., 3] = np.where(live == 1, 1, FAINTEST + (STRONGEST - FAINTEST) * live)
        image[live == 0] = colors.to_rgba("gray", 2 * DEAD_OPACITY)  # on a ground of any colour
        ax.imshow(
            image,
            interpolation="nearest",
            extent=(-0.5, columns * k_cell - 0.5, rows * q_cell - 0.5, -0.5),
            aspect="equal" if max(queries, keys) <= 4 * min(queries, keys) else "auto",
        )
    ax.set(xlim=(-0.5, max(keys, 1) - 0.5), ylim=(max(queries, 1) - 0.5, -0.5), xlabel="key", ylabel="query")
    ax.xaxis.set_label_position("top")
    ax.xaxis.tick_top()
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(ticker.MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    title = shown(info, batch, head, density(counts, queries, keys))
    ax.set_title(title if segments is None else f"{title}; colours are {segments.noun}s", fontsize="medium")
    return ax
