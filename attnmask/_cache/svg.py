"""Draw the pages of a `KVCache` as SVG, for notebooks.

::

     0 ■■■■■■■□□    6 of 18 pages free
     9 ■■■■□□□□□    ■ sequence 0    ■ sequence 1    ■ shared    □ free

A page has the colour of its sequence, and the stronger the more of it is full. It tells on hovering whose it is. Where
there are too many pages to draw each of them, a cell is several.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from attnmask._cache.step import SequencePages
from attnmask._masks.render import BLANK, FIRST, PALETTE, SEVERAL, cell_count
from attnmask._masks.svg import CELL_LEVELS, Entry, frame, stroke, words_beside

_CELLS = 256  # at most
_COLUMNS = 16
_PIXELS = 16  # of a cell
_NAMED = 8  # sequences that a title names, at most
_STEP = -1  # stands for the open step among the sequences


def _names(owners: Iterable[int]) -> str:
    """Say which sequences have a page."""
    known = sorted(owners)
    names = [str(number) for number in known if number != _STEP]
    if len(names) > _NAMED:
        names = [*names[: _NAMED - 1], f"{len(names) - _NAMED + 1} more"]
    text = f"{'sequence' if len(names) == 1 else 'sequences'} {', '.join(names)}" if names else ""
    step = "the open step" if _STEP in known else ""
    return " and ".join(filter(None, (text, step))) or "free"


@dataclass
class Pages:
    """The pages of a cache: owners of those of each cell, and how many tokens they hold."""

    pages: int
    page_size: int
    sequences: Mapping[int, SequencePages]
    taken: Sequence[int] = ()  # the pages of the open step

    def __post_init__(self) -> None:
        self.each = cell_count(self.pages, _CELLS)  # pages of a cell
        self.ranks = {number: rank for rank, number in enumerate(self.sequences)}
        self.owners: list[set[int]] = [set() for _ in range(0, self.pages, self.each)]
        self.tokens = np.zeros(self.pages, np.int64)
        for number, (held, length, _) in self.sequences.items():
            for place, page in enumerate(held):
                self.owners[page // self.each].add(number)
                there = min(length - place * self.page_size, self.page_size)
                self.tokens[page] = max(self.tokens[page], there)
        for page in self.taken:
            self.owners[page // self.each].add(_STEP)

    def cell(self, number: int) -> tuple[int, int, str]:
        """Return the colour and level of some pages, and what they say on hovering."""
        owners, full = self.owners[number], CELL_LEVELS + 1
        begin, end = number * self.each, min((number + 1) * self.each, self.pages)
        title = f"{f'page {begin}' if end - begin == 1 else f'pages {begin}–{end - 1}'}: {_names(owners)}"
        if not owners:
            return BLANK, full, title
        tokens, room = int(self.tokens[begin:end].sum()), (end - begin) * self.page_size
        colour = SEVERAL
        if len(owners) == 1 and _STEP not in owners:
            colour = self.ranks[next(iter(owners))] % len(PALETTE) + FIRST
        level = full if tokens == room else max(math.ceil(CELL_LEVELS * tokens / room), 1)
        return colour, level, f"{title}; {tokens} of {room} tokens"

    def legend(self, colours: set[int]) -> list[Entry]:
        full = CELL_LEVELS + 1
        entries: list[Entry] = []
        if len(self.ranks) > len(PALETTE):
            squares = [(FIRST + i, full) for i in range(len(PALETTE))]
            entries.append((squares, f"{len(self.ranks)} sequences, colours repeat"))
        else:
            entries += [([(FIRST + rank, full)], f"sequence {number}") for number, rank in self.ranks.items()]
        if SEVERAL in colours:
            several = "several sequences, or the open step" if len(self.taken) else "several sequences"
            entries.append(([(SEVERAL, full)], several))
        if BLANK in colours:
            entries.append(([(BLANK, full)], "free"))
        return entries


def svg(words: list[str], of_cells: Pages) -> str:
    """Return the pages of a cache as an ``<svg>`` element. `words` are the lines beside the picture; the first line is
    its title.
    """
    cells, each = [of_cells.cell(number) for number in range(len(of_cells.owners))], of_cells.each
    rows, columns = cell_count(len(cells), _COLUMNS), min(len(cells), _COLUMNS)
    left, top = math.ceil(12 + 6.4 * len(str((rows - 1) * _COLUMNS * each))), 8
    drawn = "".join(
        stroke(colour, level, f"M{place % _COLUMNS} {place // _COLUMNS}h.9", title)
        for place, (colour, level, title) in enumerate(cells)
    )
    labels = "".join(
        f'<text x="{left - 5}" y="{top + row * _PIXELS + 11}">{row * _COLUMNS * each}</text>'
        for row in range(rows)
    )
    lines = words if each == 1 else [*words, f"a cell is {each} pages"]
    beside, width, height = words_beside(
        lines, of_cells.legend({colour for colour, _, _ in cells}), max(left + columns * _PIXELS, 100) + 24
    )
    return frame(
        math.ceil(width),
        math.ceil(max(top + rows * _PIXELS, height) + 8),
        ", ".join(words),
        f'<g fill="none" stroke="currentColor" stroke-width=".9" transform="translate({left} {top}) '
        f'scale({_PIXELS}) translate(0 .5)">{drawn}</g>'
        f'<g text-anchor="end" fill-opacity=".75">{labels}</g>{beside}',
    )
