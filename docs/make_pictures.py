"""The pictures of the README and of pages that are read without Sphinx, too: python docs/make_pictures.py"""

import io
import itertools
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from html import escape
from pathlib import Path
from unittest.mock import patch

from attnmask import MaskInfo
from attnmask import __main__ as demo
from attnmask._masks.render import PALETTE, painted

sys.path += [str(Path(__file__).parent), str(Path(__file__).parent.parent / "benchmarks")]

import diagram
import pages
from chart import card

HERE = Path(__file__).parent
PROMPT = "$ python -m attnmask"
COLUMNS = 56  # so that its letters can be read where a telephone shows it 400 pixels wide
TYPED, SHORTEST, LONGEST = 0.8, 0.05, 1.5  # seconds before the first line, and between lines
LETTER, LINE, MARGIN = 7.8, 18, 16  # pixels of a letter's width, of a line's height, and around them
COLOURS = {painted("", colour).removesuffix("\033[39m"): colour for colour in PALETTE}


def mask() -> str:
    """What a notebook shows of the first mask in the README."""
    info = MaskInfo.from_cu_seqlens([0, 9, 14, 32], packed=True).apply_causal().apply_sliding_window((7, 0))
    return on_card(info._repr_html_() or "")


def on_card(picture: str) -> str:
    """A picture on a ground of its own, which is light or dark."""
    width, height = (int(size) + 2 * MARGIN for size in re.findall(r'(?:width|height)="(\d+)"', picture)[:2])
    return card(width, height, picture.replace("<svg ", f'<svg x="{MARGIN}" y="{MARGIN}" ', 1) + "\n")


class Terminal(io.StringIO):
    """Takes text as a terminal does, colours too, and knows when lines began."""

    encoding = "utf-8"

    def __init__(self) -> None:
        super().__init__()
        self.times = [time.monotonic()]

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.times += text.count("\n") * [time.monotonic()]
        return super().write(text)


def spans(line: str) -> Iterator[str]:
    """A line in parts of one colour and weight, each in its place."""
    style, column = "", 0
    for part in re.split("(\033.*?m)", line):
        if part.startswith("\033"):
            style = {"\033[1m": ' font-weight="bold"'}.get(part, "")
            style = f' fill="{COLOURS[part]}"' if part in COLOURS else style
        elif part:
            length = f'{len(part) * LETTER:g}" lengthAdjust="spacingAndGlyphs'  # whatever the font
            yield f'<tspan x="{MARGIN + column * LETTER:g}" textLength="{length}"{style}>{escape(part)}</tspan>'
            column += len(part)


def delays(times: list[float]) -> Iterator[float]:
    """When lines appear, in seconds: as they did, but none at once with the last, and none after a long wait."""
    passed = TYPED
    for last, now in itertools.pairwise([times[0], *times]):
        passed += min(max(now - last, SHORTEST), LONGEST)
        yield passed


def terminal() -> str:
    """What the demo shows of masks and attention, line by line as it did."""
    with (
        patch.dict(os.environ, COLUMNS=str(COLUMNS), TERM="xterm", NO_COLOR=""),
        redirect_stdout(Terminal()) as shown,
    ):
        demo.show((demo.mask, demo.attention))
    lines = shown.getvalue().splitlines()
    body = f'<text y="{MARGIN + 13}">{"".join(spans(PROMPT))}</text>\n'
    for number, (line, delay) in enumerate(zip(lines, delays(shown.times), strict=False), 1):
        if line:
            style = f'style="animation-delay:{delay:.2f}s"'
            body += f'<text class="line" {style} y="{MARGIN + LINE * number + 13}">{"".join(spans(line))}</text>\n'
    # Without animations, or where a reader wants none, all lines are there from the beginning.
    style = "text{white-space:pre}@keyframes appear{from{opacity:0}}.line{animation:appear .01s backwards}"
    style += "@media(prefers-reduced-motion:reduce){.line{animation:none}}"
    font = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
    group = f'<g fill="currentColor" font-family="{font}" font-size="13">\n{body}</g>\n'
    return card(COLUMNS * LETTER + 2 * MARGIN, LINE * (len(lines) + 1) + 2 * MARGIN, group, style)


PICTURES = {
    "mask": mask,
    "path": lambda: on_card(diagram.path()),
    "tables": lambda: on_card(diagram.tables()),
    "pages": lambda: on_card(pages.picture()),
}


def main() -> None:
    for name, picture in {
        name: make() for name, make in PICTURES.items() | {"demo": terminal}.items()
    }.items():
        (HERE / f"{name}.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
