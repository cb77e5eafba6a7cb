"""The path of one call, and the tables that the code grows in: drawn for architecture_path.rst."""

from typing import NamedTuple

from attnmask import MaskInfo
from attnmask._masks.render import DEAD_OPACITY, PALETTE, STRONGEST
from attnmask._masks.svg import frame


class Stage(NamedTuple):
    name: str
    boxes: str  # side by side
    lines: tuple[str, ...]
    files: tuple[str, ...]
    tables: tuple[tuple[str, str, str], ...] = ()  # of each: what it has a row for, its name, its file


STAGES = (
    Stage(
        "faces",
        "NumPy PyTorch JAX transformers ejKernel",
        ("Signatures and defaults.", "The mask becomes a program of terms."),
        ("attnmask/_attention/problem.py",),
        (
            ("an argument", "ARGUMENTS", "attnmask/_attention/arguments.py"),
            ("a kind of mask", "KINDS", "attnmask/_masks/terms.py"),
            ("a term of the logits", "TERMS", "attnmask/_attention/terms.py"),
        ),
    ),
    Stage(
        "request",
        "python dlpack xla",
        ("Each door hands over views of arrays.", "They are checked here, once."),
        ("csrc/bind/request_attention.c", "csrc/bind/request_masks.c"),
        (("a kind of mask", "rows", "csrc/bind/request_masks.c"),),
    ),
    Stage(
        "plan",
        "",
        (
            "Sections: queries that share no key.",
            "Strategy, blocks, splits of each.",
            "All are dealt to tasks, for threads.",
        ),
        (
            "csrc/core/attention/plan/partition.c",
            "csrc/core/attention/plan/strategy.c",
            "csrc/core/attention/plan/schedule.c",
        ),
        (("a choice of strategy", "STRATEGIES", "tests/attention/test_strategy.py"),),
    ),
    Stage(
        "tiles",
        "",
        (
            "For each block of up to 64 queries,",
            "each tile of 64 keys that it sees:",
            "live pairs, added terms, dropout,",
            "keys and values, packed or in place.",
        ),
        ("csrc/core/attention/terms/logit_terms.c", "csrc/core/attention/tiles/tiles.c"),
        (
            ("a kind of mask", "am_term_kind", "csrc/core/masks/terms.c"),
            ("a term of the logits", "AM_LOGIT_KINDS", "csrc/core/attention/terms/kinds.h"),
            ("a format of keys and values", "formats", "csrc/core/cache/formats.c"),
        ),
    ),
    Stage(
        "kernels",
        "baseline avx2 avx512 …",
        ("S = Q Kᵀ,  P = exp(S − max),  O += P V",),
        ("csrc/kernels/attention/step_tpl.h",),
        (
            ("an arithmetic", "am_arithmetic_at", "csrc/kernels/table.h"),
            ("an instruction set", "TOPICS", "setup.py"),
        ),
    ),
    Stage(
        "results",
        "",
        ("Splits are merged; then sinks, lse and out.",),
        ("csrc/core/attention/epilogue.c",),
    ),
)
LENGTHS = (256, 96, 352)  # of the packed sequences that are drawn
BLOCK = 64
# Pixels: of a picture, inside a frame, between frames, of a line, a name, a row of boxes and a letter.
WIDTH, PAD, GAP, LINE, HEAD, BOX, LETTER = 348, 10, 22, 15, 22, 28, 6
FAINT = 'fill-opacity=".75"'
MONO = 'font-family="ui-monospace, monospace" font-size="10"'


def rect(x: float, y: float, wide: float, high: float, colour: str, more: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" fill="{colour}" {more}/>'


def text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" {more}>{words}</text>'


def height(stage: Stage) -> int:
    path = BOX * bool(stage.boxes) + LINE * (len(stage.lines) + len(stage.files))
    return HEAD + max(path, (2 * LINE + 6) * len(stage.tables)) + PAD


def sections(x: float, y: float) -> str:
    """Draw the queries of packed sequences, block by block."""
    drawn, begin, scale = "", 0, 6
    for number, length in enumerate(LENGTHS):
        for block in range(0, length, BLOCK):
            wide = min(BLOCK, length - block) / scale - 1
            at = x + (begin + block) / scale
            drawn += rect(at, y, wide, 14, PALETTE[number], f'fill-opacity="{STRONGEST}"')
        middle = x + (begin + length / 2) / scale
        drawn += text(middle, y + 26, str(number), f'text-anchor="middle" font-size="10" {FAINT}')
        begin += length
    return drawn


def tiles(x: float, y: float) -> str:
    """Draw the tiles that the blocks of these sequences see: full, mixed and dead ones."""
    drawn, side = "", 9
    for number, length in enumerate(LENGTHS):
        for row, counts in enumerate(MaskInfo.causal(length).grid(0, 0, BLOCK, BLOCK).tolist()):
            for column, live in enumerate(counts):
                opacity = STRONGEST if row > column else 0.45 if live else DEAD_OPACITY
                colour = PALETTE[number] if live else "currentColor"
                place = x + side * column, y + side * row, side - 1, side - 1
                drawn += rect(*place, colour, f'fill-opacity="{opacity}"')
        x, y = x + side * (column + 1), y + side * (row + 1)
    return drawn


def path() -> str:
    """Draw the path of a call, from the top to the bottom."""
    drawn, y = "", 1
    for number, stage in enumerate(STAGES):
        colour, high = PALETTE[number], height(stage)
        drawn += rect(1, y, WIDTH - 2, high, colour, f'fill-opacity=".1" stroke="{colour}" rx="6"')
        drawn += text(PAD, y + 16, stage.name, 'font-weight="bold"')
        at, x = y + HEAD, float(PAD)
        for name in stage.boxes.split():
            wide = LETTER * len(name) + 14
            drawn += rect(x, at + 2, wide, BOX - 9, colour, 'fill-opacity=".3" rx="4"')
            drawn += text(x + wide / 2, at + 15, name, 'text-anchor="middle"')
            x += wide + 6
        at += BOX * bool(stage.boxes)
        drawn += {"plan": sections, "tiles": tiles}.get(stage.name, lambda *_: "")(WIDTH - 128, y + 12)
        for line in stage.lines:
            drawn += text(PAD, at + 11, line)
            at += LINE
        for file in stage.files:
            drawn += text(PAD, at + 11, file, f"{MONO} {FAINT}")
            at += LINE
        y += high
        if number < len(STAGES) - 1:
            drawn += f'<path d="M{WIDTH / 2:g} {y + 3}v{GAP - 11}h-4l4 5l4 -5h-4" stroke="currentColor"/>'
        y += GAP
    return picture(y - GAP + 1, "The path of one call", drawn)


def tables() -> str:
    """Draw the tables that each stage reads, beside it."""
    drawn, y = "", 1
    for number, stage in enumerate(STAGES):
        colour, at = PALETTE[number], y + HEAD
        if stage.tables:
            drawn += rect(1, y, 3, height(stage), colour, "")
            drawn += text(PAD, y + 16, f"tables of {stage.name}", 'font-weight="bold"')
        for thing, table, file in stage.tables:
            drawn += text(PAD, at + 11, f"{thing}: <tspan {MONO}>{table}</tspan>")
            drawn += text(PAD, at + 11 + LINE, file, f"{MONO} {FAINT}")
            at += 2 * LINE + 6
        y += height(stage) + GAP
    return picture(y - GAP + 1, "The tables that the code grows in", drawn)


def picture(high: int, title: str, drawn: str) -> str:
    return frame(WIDTH, high, title, f'<g font-size="11">{drawn}</g>')
