"""The pages of a cache and the tables of its sequences, drawn for guides/decoding_paged.rst."""

from collections.abc import Iterator

import numpy as np
from diagram import FAINT, LINE, rect, text
from diagram import picture as framed

from attnmask import KVCache
from attnmask._masks.render import BLANK, COLOURS, DEAD_OPACITY, FIRST, SEVERAL, STRONGEST

PAGES, PAGE_SIZE, ACROSS = 12, 16, 6  # pages, their tokens, and pages side by side
SLOT, PAGE, CELL = (
    11,
    58,
    22,
)  # pixels of a token, of a page with the gap beside it, and of an entry of a table
LABELS = 206  # pixels of what stands before the tables
BEHIND = 0.4  # opacity of a square with a number on it


def cache() -> KVCache:
    """A cache with two sequences, and a third that was forked from the first."""
    made = KVCache(1, 8, pages=PAGES, page_size=PAGE_SIZE, dtype=np.float32)

    def append(ids: list[int], counts: list[int]) -> None:
        tokens = np.zeros((sum(counts), 1, 8), np.float32)
        with made.step(ids, counts) as step:
            step.attend(0, tokens, tokens, tokens)

    first, second = made.new_sequence(), made.new_sequence()
    append([first, second], [40, 20])
    append([first, second, made.fork(first)], [9, 15, 2])
    return made


def slots(owners: list[set[int]], tokens: list[int]) -> Iterator[str]:
    """Draw the pages, each with a square for each token that it has room for."""
    for page in range(PAGES):
        x, y = PAGE * (page % ACROSS), (PAGE + LINE) * (page // ACROSS)
        yield text(x + 2 * SLOT, y + 11, str(page), 'text-anchor="middle" font-weight="bold"')
        for slot in range(PAGE_SIZE):
            row, column = divmod(slot, 4)
            colour = colour_of(owners[page]) if slot < tokens[page] else BLANK
            yield square(x + SLOT * column, y + LINE + SLOT * row, SLOT - 1, colour)


def colour_of(owners: set[int]) -> int:
    return FIRST + min(owners) if len(owners) == 1 else SEVERAL


def square(x: float, y: float, side: float, colour: int, opacity: float = STRONGEST) -> str:
    shade = ("currentColor", DEAD_OPACITY) if colour == BLANK else (COLOURS[colour], opacity)
    return rect(x, y, side, side, shade[0], f'fill-opacity="{shade[1]}"')


def picture() -> str:
    """Draw tables and pages. What is drawn is what the cache says."""
    shown = cache()
    ids = [0, 1, 2]
    owners: list[set[int]] = [set() for _ in range(PAGES)]
    tokens = [0] * PAGES
    drawn, y = text(0, 11, "block_table: the pages of each sequence", 'font-weight="bold"'), LINE + 4
    rows = list(zip(ids, shown.lengths(ids).tolist(), shown.block_table(ids).tolist(), strict=True))
    for number, length, row in rows:
        for place, page in enumerate(page for page in row if page >= 0):
            owners[page].add(number)
            tokens[page] = max(tokens[page], min(PAGE_SIZE, length - PAGE_SIZE * place))
    for number, length, row in rows:
        fork = ", a fork of 0" if number == 2 else ""
        drawn += text(0, y + 15, f"sequence {number}{fork}: {length} tokens")
        for place, page in enumerate(row):
            x = LABELS + (CELL + 2) * place
            drawn += square(x, y, CELL, colour_of(owners[page]) if page >= 0 else BLANK, BEHIND)
            drawn += text(x + CELL / 2, y + 15, str(page), 'text-anchor="middle" font-weight="bold"')
        y += CELL + 4
    y += LINE
    drawn += text(0, y + 11, f"k_pages, v_pages: {PAGES} pages of {PAGE_SIZE} tokens", 'font-weight="bold"')
    y += LINE + 6
    drawn += f'<g transform="translate(0 {y})">{"".join(slots(owners, tokens))}</g>'
    y += (PAGE + LINE) * (PAGES // ACROSS) + 6
    for colour, words in ((SEVERAL, "shared by sequences 0 and 2"), (BLANK, "free")):
        drawn += square(0, y, 10, colour) + text(16, y + 9, words, FAINT)
        y += LINE
    return framed(y, "Three sequences in the pages of a cache", drawn)
