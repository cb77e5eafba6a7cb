"""The pictures of the README, made anew: python docs/make_pictures.py"""

import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from html import escape
from pathlib import Path
from unittest.mock import patch

from attnmask import MaskInfo
from attnmask import __main__ as demo
from attnmask._masks.render import PALETTE, painted

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

from chart import card

HERE = Path(__file__).parent
PROMPT = "$ python -m attnmask"
LETTER, LINE, MARGIN = 7.8, 18, 16  # pixels of a letter's width, of a line's height, and around them
COLOURS = {painted("", colour).removesuffix("\033[39m"): colour for colour in PALETTE}


def mask() -> str:
    """What a notebook shows of the first mask in the README."""
    info = MaskInfo.from_cu_seqlens([0, 9, 14, 32], packed=True).apply_causal().apply_sliding_window((7, 0))
    picture = info._repr_html_() or ""
    width, height = (int(size) + 2 * MARGIN for size in re.findall(r'(?:width|height)="(\d+)"', picture)[:2])
    return card(width, height, picture.replace("<svg ", f'<svg x="{MARGIN}" y="{MARGIN}" ', 1) + "\n")


class Terminal(io.StringIO):
    """Takes text as a terminal does, colours too."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


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


def terminal() -> str:
    """What the demo shows of masks, attention and NaN."""
    with (
        patch.dict(os.environ, COLUMNS="80", TERM="xterm", NO_COLOR=""),
        redirect_stdout(Terminal()) as shown,
    ):
        demo.show((demo.mask, demo.attention, demo.nan))
    lines = [PROMPT, *shown.getvalue().splitlines()]
    body = "".join(
        f'<text y="{MARGIN + LINE * number + 13}">{"".join(spans(line))}</text>\n'
        for number, line in enumerate(lines)
        if line
    )
    style = "text{white-space:pre}"
    font = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
    group = f'<g fill="currentColor" font-family="{font}" font-size="13">\n{body}</g>\n'
    return card(80 * LETTER + 2 * MARGIN, LINE * len(lines) + 2 * MARGIN, group, style)


def main() -> None:
    for name, picture in {"mask": mask(), "demo": terminal()}.items():
        (HERE / f"{name}.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
