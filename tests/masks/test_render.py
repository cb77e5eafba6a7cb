"""Masks as text, as SVG and in matplotlib, drawn from stand-ins that hold arrays and from MaskInfo."""

import io
import itertools
import pickle
import re
import sys
import time
import tracemalloc
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from environment import ROOT, SANITIZED
from hypothesis import given
from hypothesis import strategies as st
from random_masks import every_mask
from reference_masks import cells

from attnmask import MaskInfo
from attnmask._masks import render
from attnmask._masks import svg as render_svg

SVG = "{http://www.w3.org/2000/svg}"
GLYPHS = {"unicode": ("  ", "░░", "██"), "ascii": ("  ", "..", "##")}


class Held:
    """What `render` asks of a mask, answered from an array and a pair of ids."""

    def __init__(self, mask, ids=None, noun="segment"):
        self.mask = np.asarray(mask, bool)
        self.mask = self.mask.reshape((1,) * (4 - self.mask.ndim) + self.mask.shape)
        self.shape = (self.mask.shape[0], *self.mask.shape[2:])
        self.heads = self.mask.shape[1]
        self.ids = None if ids is None else tuple(np.asarray(side, np.int32) for side in ids)
        self._noun = noun
        self.asked = []

    def grid(self, batch, head, q_cell, k_cell):
        self.asked.append((batch, head, q_cell, k_cell))
        return cells(self.mask[batch, head], q_cell, k_cell)

    def labels(self, batch, head):
        return self.ids


def causal(queries, keys=None, left=None):
    q, k = np.arange(queries)[:, None], np.arange(queries if keys is None else keys)
    return (k <= q) & (True if left is None else k >= q - left)


def packed(lens, padding=0):
    """Ids of sequences end to end, and the mask within them."""
    ids = np.concatenate([np.repeat(np.arange(len(lens)), lens), np.full(padding, -1)])
    return ids, (ids[:, None] == ids) & (ids >= 0)


# The twin of `visualize`: blocks first, then groups of blocks, as the pictures are described


def cell_kind(block, area):
    return 2 if block.sum() == area else 1 if block.any() else 0


def label_of(ids):
    """One label for a group of ids or of labels."""
    return ids[0] if len(set(ids)) == 1 else "several"


def expected_lines(mask, ids, block, fit, max_rows, max_cols, charset, segments):
    steps = []
    for length, side, most in zip(mask.shape, block, (max_rows, max_cols), strict=True):
        blocks = -(-length // side)
        steps.append(-(-blocks // most) if fit and blocks else 1)
    cells = [side * step for side, step in zip(block, steps, strict=True)]
    padded = np.pad(mask, [(0, -length % cell) for length, cell in zip(mask.shape, cells, strict=True)])
    rows = []
    for top in range(0, len(padded), cells[0]):
        kinds = [
            cell_kind(padded[top : top + cells[0], left : left + cells[1]], cells[0] * cells[1])
            for left in range(0, padded.shape[1], cells[1])
        ]
        rows.append("||" + "".join(GLYPHS[charset][kind] for kind in kinds) + "||")
    edge = "  " + "==" * -(-mask.shape[1] // cells[1]) + "  "
    if not segments:
        return [edge, *rows, edge]
    names = []
    for side_ids, cell in zip(ids, cells, strict=True):
        padded_ids = ["padding" if i < 0 else int(i) for i in side_ids] + ["padding"] * (
            -len(side_ids) % cell
        )
        names.append([label_of(padded_ids[i : i + cell]) for i in range(0, len(padded_ids), cell)])
    left = [f"{ {'padding': 'PAD', 'several': 'MIX'}.get(name, name):>6} " for name in names[0]]
    top = [{"padding": "  ", "several": "??"}.get(name) or f"{name:02d}"[-2:] for name in names[1]]
    return [
        " " * 9 + "".join(top),
        " " * 6 + edge,
        *(label + row for label, row in zip(left, rows, strict=True)),
        " " * 6 + edge,
    ]


def drawn_lines(text, segments):
    """Without the title and the legend."""
    return text.split("\n")[1 : -2 if segments else -1]


@st.composite
def scenes(draw):
    queries, keys = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    if draw(st.booleans()):
        mask = rng.random((queries, keys)) < draw(st.sampled_from([0, 0.02, 0.5, 0.98, 1]))
    else:
        mask = causal(queries, keys, draw(st.sampled_from([None, 0, 5])))
    ids = [
        np.sort(rng.integers(-2, draw(st.sampled_from([0, 1, 3, 400])), n)) * draw(st.sampled_from([1, 7]))
        for n in (queries, keys)
    ]
    return mask, ids


@given(
    scene=scenes(),
    block=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    fit=st.booleans(),
    max_rows=st.integers(1, 9),
    max_cols=st.integers(1, 9),
    charset=st.sampled_from(["unicode", "ascii"]),
    segments=st.booleans(),
)
def test_text_equals_its_twin(scene, block, fit, max_rows, max_cols, charset, segments):
    mask, ids = scene
    held = Held(mask, ids)
    got = render.visualize(held, block, 0, 0, fit, max_rows, max_cols, charset, segments)
    assert drawn_lines(got, segments) == expected_lines(
        mask, ids, block, fit, max_rows, max_cols, charset, segments
    )
    assert len(held.asked) == 1


def test_text_of_causal():
    text = render.visualize(Held(causal(8)), block_size=2, show_segments=False)
    title, *rows, legend = text.split("\n")
    assert rows == [
        "  ========  ",
        "||░░      ||",
        "||██░░    ||",
        "||████░░  ||",
        "||██████░░||",
        "  ========  ",
    ]
    assert title == "mask [1, 1, 8, 8], batch 0, head 0; 56.2 % allowed; a cell is 2 × 2 pairs"
    assert legend == "'██' all allowed, '░░' some allowed, '  ' none"


def test_text_tells_how_blocks_are_joined():
    text = render.visualize(Held(causal(100)), block_size=(2, 3), max_rows=10, max_cols=7)
    assert text.split("\n")[0].endswith("a cell is 10 × 15 pairs, 5 × 5 blocks")
    assert "over 99.9 % allowed" in render.visualize(Held(np.arange(10**5) > 0))


def test_text_without_segments():
    text = render.visualize(Held(causal(4)), 2)
    assert text.split("\n")[1:5] == ["        ====  ", "       ||░░  ||", "       ||██░░||", "        ====  "]
    assert text.split("\n")[-1].startswith("no segments")


def test_text_keeps_large_ids_in_line():
    ids = np.repeat([3, 12_345_678], 4)
    lines = drawn_lines(render.visualize(Held(ids[:, None] == ids, (ids, ids)), 4), True)
    assert lines[2:4] == ["       3 ||██  ||", "12345678 ||  ██||"]
    assert lines[0] == " " * 11 + "0378"


def test_text_of_huge_blocks():
    text = render.visualize(Held(causal(5), (np.zeros(5), np.zeros(5))), 2**70)
    assert "   MIX ||░░||" in text


def test_text_explains_only_what_it_shows():
    legends = {
        (0, 0, 1, 1): "",
        (0, 0, 1, 2): "; MIX or ??: several",
        (0, 0, -1, -1): "; PAD or blank: padding",
        (0, 1, -1, -1): "; PAD or blank: padding; MIX or ??: several",
    }
    for ids, more in legends.items():
        text = MaskInfo.from_segments([ids]).visualize(2, return_str=True)
        assert text.split("\n")[-1] == (
            "left: segments of queries; top: segments of keys, two digits for each column" + more
        )


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_text_of_nothing(shape):
    text = render.visualize(Held(np.ones(shape), [np.zeros(n) for n in shape]), 2)
    assert "█" not in "".join(drawn_lines(text, True))
    assert "0 % allowed" in text


def test_planes():
    mask = np.zeros((3, 2, 4, 4), bool)
    mask[2, 1] = True
    assert "██" in drawn_lines(render.visualize(Held(mask), 4, 2, 1, show_segments=False), False)[1]
    assert "100 % allowed" in render_svg.svg(Held(mask), 2, 1)
    assert "batch row 2, head 1: 100 % allowed" in render_svg.svg(Held(mask), 2, 1)
    assert "batch row 0, head 0: 0 % allowed" in render_svg.svg(Held(mask))


DRAWINGS = {
    "visualize": render.visualize,
    "svg": render_svg.svg,
    "plot": lambda *args, **kwargs: render.plot(*args, ax=None, **kwargs),
}


@pytest.mark.parametrize("drawing", DRAWINGS)
@pytest.mark.parametrize(("place", "error"), [
    ({"batch": 2}, IndexError),
    ({"batch": -1}, IndexError),
    ({"head": 1}, IndexError),
    ({"head": -1}, IndexError),
    ({"batch": 2**80}, IndexError),
    ({"batch": 1.0}, TypeError),
    ({"batch": True}, TypeError),
    ({"head": None}, TypeError),
    ({"head": "0"}, TypeError),
], ids=str)  # fmt: skip
def test_places_outside(drawing, place, error):
    (name,) = place
    with pytest.raises(error, match=rf"^{name} must be .*, got "):
        DRAWINGS[drawing](Held(np.ones((2, 1, 4, 4))), **place)


@pytest.fixture
def terminal(monkeypatch):
    """Sets how many characters and lines it has."""

    def set_size(width, lines=0):
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("LINES", str(lines))

    return set_size


@pytest.mark.parametrize("width", [20, 80, 200])
@pytest.mark.parametrize("tokens", [(1, 1), (7, 90), (33, 33), (1000, 5), (131_072, 131_072)])
@pytest.mark.parametrize("segments", [False, True])
def test_smallest_cells_that_fit(terminal, width, tokens, segments):
    terminal(width)
    info = MaskInfo.causal(*tokens)
    text = render.visualize(info, max_rows=32, max_cols=64, show_segments=segments)
    found = re.search(r"a cell is (\d+) × (\d+) pairs$", text.split("\n  ")[0].replace("\n", " "))
    rows = [line for line in text.split("\n") if line.endswith("||")]
    assert max(map(len, text.split("\n"))) <= width
    limits = 32, min(64, (width - (11 if segments else 4)) // 2)
    cells = tuple(-(-length // limit) for length, limit in zip(tokens, limits, strict=True))
    assert not found or tuple(map(int, found.groups())) == cells
    assert len(rows) == -(-tokens[0] // cells[0])
    assert len(rows[0]) == (11 if segments else 4) + 2 * -(-tokens[1] // cells[1])


def test_cells_fit_the_lines_of_a_terminal(terminal):
    terminal(80, 20)
    assert len(MaskInfo.causal(64).visualize(return_str=True).split("\n")) <= 20
    terminal(80, 3)  # too few for anything
    assert MaskInfo.causal(64).visualize(return_str=True).count("||") == 2
    terminal(80, 20)
    assert MaskInfo.causal(64).visualize(2, return_str=True).count("||\n") == 32  # as they were asked for


def test_cells_without_an_end_are_as_large_as_ever():
    text = MaskInfo.causal(100).visualize(fit_in_screen=False, return_str=True)
    assert "a cell is 32 × 32 pairs" in text


def test_cells_leave_room_for_large_ids(terminal):
    terminal(40)
    text = MaskInfo.from_segments([[123_456_789_0] * 50]).visualize(return_str=True)
    assert max(map(len, text.split("\n"))) <= 40


PRINTED = {
    "causal": (MaskInfo.causal(8), "mask [1, 1, 8, 8]: full & causal; 56.2 % allowed"),
    "batch": (MaskInfo.from_lengths([2, 3]), "mask [2, 1, 3, 3]: lengths & key lengths; batch row 0: 44.4 % allowed"),
    "long": (MaskInfo.causal(131_072), "mask [1, 1, 131072, 131072]: full & causal; 50 % allowed; a cell is "),
    "no queries": (MaskInfo.full(0, 5), "mask [1, 1, 0, 5]: full; no pairs"),
    "no rows": (MaskInfo.full(2, batch=0), "mask [0, 1, 2, 2]: full; no pairs"),
    "no heads": (MaskInfo(np.ones((1, 0, 2, 2))), "mask [1, 0, 2, 2]: dense float64[1, 0, 2, 2]; no pairs"),
    "nothing": (MaskInfo(), "no mask: holds=[], cached=[]"),
    "ids of queries": (MaskInfo(q_segment_ids=[[0, 1]]),
        "no mask: batch_size=1, q_len=2, holds=[q_segment_ids], cached=[]"),
}  # fmt: skip


@pytest.mark.parametrize("name", PRINTED)
@pytest.mark.parametrize("width", [30, 80, 132])
def test_print(terminal, capsys, name, width):
    """The drawing is as wide as the terminal, under a line of words; `repr` stays in one line."""
    terminal(width)
    info, words = PRINTED[name]
    print(info)
    lines = capsys.readouterr().out.split("\n")[:-1]
    title = " ".join(itertools.takewhile(lambda line: "===" not in line and line[:1] != " ", lines))
    assert title.startswith(words)
    if "allowed" in words:
        assert max(map(len, lines)) <= width
    assert ("█" in "".join(lines)) == ("allowed" in words)
    if name == "long" and width > 30:
        assert max(map(len, lines)) >= width - 2
    assert repr(info).startswith("MaskInfo(")
    assert "\n" not in repr(info)
    assert f"{info}" == str(info)


def test_print_numbers_each_row_and_column(terminal):
    terminal(80)
    assert str(MaskInfo.from_segments([[0, 0, 1, 1, 1, -1]]).apply_causal()).split("\n")[1:] == [
        "     0 0 1 1 1 -",
        "    ============",
        "0 ||██          ||",
        "0 ||████        ||",
        "1 ||    ██      ||",
        "1 ||    ████    ||",
        "1 ||    ██████  ||",
        "- ||            ||",
        "    ============",
        "rows: queries; columns: keys; '██' allowed, '  ' masked out",
        "numbers: segments; '-': padding",
    ]
    assert str(MaskInfo.from_segments([[8, 8, 9, 10, 123]], [[123, 9, 8]])).split("\n")[1:] == [
        "       1    ",
        "       2    ",
        "       3 9 8",
        "      ======",
        "  8 ||    ██||",
        "  8 ||    ██||",
        "  9 ||  ██  ||",
        " 10 ||      ||",
        "123 ||██    ||",
        "      ======",
        "rows: queries; columns: keys; '██' allowed, '  ' masked out",
        "numbers: segments, at the top written downwards",
    ]


def test_print_shows_numbers_only_of_segments(terminal):
    """A causal mask has one, and a random one has none, though rows that are alike get ids."""
    terminal(80)
    assert str(MaskInfo.causal(3)).split("\n")[1:] == [
        "  ======",
        "||██    ||",
        "||████  ||",
        "||██████||",
        "  ======",
        "rows: queries; columns: keys; '██' allowed, '  ' masked out",
    ]
    assert "numbers" not in str(MaskInfo(np.random.default_rng(0).random((1, 1, 9, 9)) < 0.5))
    assert "numbers: chunks" in str(MaskInfo.full(9).apply_chunked(3))


def test_print_of_cells_of_several_tokens(terminal):
    """The last cells are full if all that is left for them is allowed."""
    terminal(20)
    mask = MaskInfo.from_segments([[0] * 5 + [1] * 4 + [2] * 4 + [-1] * 4])
    lines = str(mask).split("\n")
    assert lines[4:24] == [
        "     0 * 1 2 2 -",
        "    ============",
        *["0 ||██░░        ||"] * 5,
        *["1 ||  ░░██      ||"] * 4,
        *["2 ||      ██░░  ||"] * 4,
        *["- ||            ||"] * 4,
        "    ============",
    ]
    assert " ".join(lines[24:]).endswith("numbers: segments; '-': padding; '*': several")
    assert set("".join(str(MaskInfo.full(1, 29)).split("||")[1])) == {"█"}


@pytest.mark.parametrize("seed", range(20))
def test_numbers_of_columns_are_read_downwards(terminal, seed):
    terminal(80)
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.integers(-1, rng.integers(1, 130), rng.integers(1, 31))).tolist()
    lines = str(MaskInfo.from_segments([ids])).split("\n")
    edge = next(i for i, line in enumerate(lines) if "==" in line)
    begin, rows = lines[edge].index("="), lines[edge + 1 : edge + 1 + len(ids)]
    top = [line[begin:].ljust(2 * len(ids)) for line in lines[1:edge]]
    written = ["-" if i < 0 else str(i) for i in ids]
    if len(set(ids)) == 1:
        assert top == []
    else:
        assert [
            "".join(line[2 * i : 2 * i + 2] for line in top).replace(" ", "") for i in range(len(ids))
        ] == written
        assert [row.split("||")[0].strip() for row in rows] == written


def test_print_fits_the_lines_of_a_terminal(terminal):
    terminal(80, 20)
    assert len(str(MaskInfo.from_segments([np.repeat([1000, 2000], 40)])).split("\n")) <= 19


def test_print_of_leaves_that_are_no_arrays():
    """As `repr`: JAX puts other objects into trees."""
    children, aux = MaskInfo.from_segments([[0, 0, 1]]).tree_flatten()
    info = MaskInfo.tree_unflatten(aux, (None, object(), object(), *children[3:]))
    assert str(info) == repr(info) == "MaskInfo(7 leaves)"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "no such"])
def test_print_writes_what_standard_output_can(monkeypatch, encoding):
    class Stream(io.StringIO):
        pass

    Stream.encoding = encoding
    monkeypatch.setattr(sys, "stdout", Stream())
    assert str(MaskInfo.causal(4)).isascii()
    monkeypatch.setattr(sys, "stdout", None)
    assert "██" in str(MaskInfo.causal(4))


class Terminal(io.StringIO):
    def isatty(self):
        return True


@given(scene=scenes(), cell=st.integers(1, 5))
def test_text_in_colour_is_the_same_text(scene, cell):
    mask, ids = scene
    plain, coloured = (
        render.visualize(Held(mask, ids), cell, coloured=coloured) for coloured in (False, True)
    )
    assert re.sub(r"\033\[[\d;]*m", "", coloured) == plain
    assert coloured.count("\033[38;5;") == coloured.count("\033[39m")
    assert ("\033" in coloured) == mask.any()


def test_text_has_the_colours_of_the_segments():
    lines = render.visualize(SCENES["packed, small"], 1, coloured=True).split("\n")[3:-3]
    painted = [re.findall(r"\033\[38;5;(\d+)m(.*?)\033\[39m", line) for line in lines]
    assert [[len(text) // 2 for _, text in row] for row in painted] == [
        [n] for length in (5, 4, 3) for n in range(1, length + 1)
    ] + [[], []]
    assert [row[0][0] for row in painted[:12]] == ["25"] * 5 + ["178"] * 4 + ["35"] * 3


@pytest.mark.parametrize(("kind", "changes", "expected"), [
    (Terminal, {}, True),
    (Terminal, {"NO_COLOR": ""}, True),
    (Terminal, {"NO_COLOR": "1"}, False),
    (Terminal, {"TERM": "dumb"}, False),
    (io.StringIO, {}, False),
])  # fmt: skip
def test_a_terminal_shows_colours(monkeypatch, kind, changes, expected):
    for name, value in ({"NO_COLOR": "", "TERM": "xterm"} | changes).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", kind())
    info = MaskInfo.from_segments([[0, 0, 1]])
    info.visualize()
    assert ("\033" in sys.stdout.getvalue()) is expected
    assert "\033" not in info.visualize(return_str=True)


def test_no_standard_output_is_no_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    MaskInfo.from_segments([[0, 0, 1]]).visualize()


# SVG


def segment_masks():
    rng = np.random.default_rng(7)
    ids, mask = packed([70, 3, 41, 86], 20)
    small_ids, small = packed([5, 4, 3], 2)
    empty_row = causal(24)
    empty_row[9] = False
    checkers = np.indices((128, 128)).sum(0) % 2
    yield "causal", Held(causal(64))
    yield "causal, more keys", Held(causal(30, 200))
    yield "window", Held(causal(300, left=20))
    yield "packed", Held(mask & causal(220), (ids, ids))
    yield "packed, small", Held(small & causal(14), (small_ids, small_ids))
    yield "per head", Held(rng.random((2, 3, 150, 150)) < 0.3)
    yield "empty row", Held(empty_row, (np.where(empty_row.any(1), 0, -1), np.zeros(24)))
    yield "checkers", Held(checkers)
    yield "noise", Held(rng.random((500, 500)) < 0.1, (rng.integers(0, 9, 500), rng.integers(0, 9, 500)))
    yield "one", Held(np.ones((1, 1)))
    yield "decode", Held(np.ones((8, 1, 1, 700)))
    yield "tall", Held(causal(700, 3))
    yield "dead", Held(np.zeros((30, 30)))
    yield "all of a row alike", Held(causal(8), (np.arange(8), np.arange(8)))
    yield "no queries", Held(np.ones((0, 6)), (np.zeros(0), np.zeros(6)))
    yield "no keys", Held(np.ones((6, 0)))
    yield "nothing", Held(np.ones((0, 0)))
    yield "no batch", Held(np.ones((0, 1, 4, 4)))


SCENES = dict(segment_masks())


def parts(picture):
    """The groups of cells (on their ground) and of strips."""
    return ET.fromstring(picture).find(f"{SVG}g").findall(f"{SVG}g")


def titles(group):
    return [path.find(f"{SVG}title").text for path in group]


def legend(picture):
    return [text.text for text in ET.fromstring(picture).findall(f"{SVG}g")[-1].iter(f"{SVG}text")]


def strokes(picture):
    """Live cells, by colour and row: [(colour, opacity, row, begin, end)], in cells."""
    found = []
    for path in parts(picture)[0][1]:
        for begin, row, length in re.findall(r"M(\d+) (\d+)h(\d+)", path.get("d")):
            opacity = float(path.get("stroke-opacity", 1))
            found.append((path.get("stroke"), opacity, int(row), int(begin), int(begin) + int(length)))
    return found


@pytest.mark.parametrize("name", SCENES)
def test_svg_is_well_formed_and_small(name):
    picture = render_svg.svg(SCENES[name])
    assert len(picture.encode()) < 40_000
    root = ET.fromstring(picture)
    assert root.tag == f"{SVG}svg"
    assert root.get("role") == "img"
    assert root.find(f"{SVG}title").text.startswith("Attention mask: batch ")
    width, height = float(root.get("width")), float(root.get("height"))
    assert root.get("viewBox") == f"0 0 {width:g} {height:g}"
    assert 200 <= width <= 640
    assert height <= 320
    for text in root.iter(f"{SVG}text"):
        assert 0 <= float(text.get("x")) <= width, text.text
        assert 0 <= float(text.get("y")) <= height, text.text
    assert "id=" not in picture  # ids of two pictures on one page would clash
    for number in re.findall(r"-?\d+\.\d+|NaN|inf", picture):
        assert np.isfinite(float(number))


@pytest.mark.parametrize("name", ["causal", "packed, small", "empty row", "dead"])
def test_svg_draws_the_live_pairs_of_small_masks(name):
    scene = SCENES[name]
    live = np.zeros(scene.shape[1:], bool)
    for _, opacity, row, begin, end in strokes(render_svg.svg(scene)):
        assert opacity == 1
        assert not live[row, begin:end].any()
        live[row, begin:end] = True
    np.testing.assert_array_equal(live, scene.mask[0, 0])


def edges(picture):
    """Pixels at which the rows of cells begin and end, and the columns of the first row."""
    numbers = r"translate\(([\d.]+) ([\d.]+)\) scale\(([\d.]+) ([\d.]+)\) translate\(0 ([\d.]+)\)"
    cells = parts(picture)[0]
    x, y, width, height, middle = map(float, re.fullmatch(numbers, cells.get("transform")).groups())
    thick = float(cells.get("stroke-width"))
    live, gap = map(float, cells.get("stroke-dasharray", "1 0").split())
    assert live + gap == pytest.approx(1)
    rows = [
        (y + height * (row + middle - thick / 2), y + height * (row + middle + thick / 2))
        for row in range(len(cells[0]))
    ]
    columns = int(re.search(r"h(\d+)", cells[0][0].get("d"))[1])
    return rows, [(x + width * column, x + width * (column + live)) for column in range(columns)]


@pytest.mark.parametrize("tokens", range(1, 41))
def test_svg_edges_are_between_pixels(tokens):
    """A line of the grid is a whole pixel: a stroke that reaches the middle of one more fills it."""
    pixels = min(256 // tokens, 24)
    for ends in edges(render_svg.svg(Held(causal(tokens)))):
        assert len(ends) == tokens
        np.testing.assert_allclose(ends, np.round(ends), atol=0.02)
        begins, ends = np.round(ends).T
        np.testing.assert_array_equal(np.diff(begins), pixels)
        np.testing.assert_array_equal(ends - begins, pixels - 1 if pixels >= 8 else pixels)


@pytest.mark.parametrize(("tokens", "smooth"), [(12, True), (32, True), (40, False), (700, False)])
def test_svg_keeps_thin_gaps_where_it_is_drawn_smaller(tokens, smooth):
    """With sharp edges, a gap of less than a pixel is drawn at some tokens and left out at others."""
    rendering = ET.fromstring(render_svg.svg(Held(causal(tokens)))).find(f"{SVG}g").get("shape-rendering")
    assert rendering == (None if smooth else "crispEdges")


@pytest.mark.parametrize("name", [name for name, scene in SCENES.items() if all(scene.mask.shape)])
def test_thumbnails_are_squares_without_words(name):
    picture = render_svg.thumbnail(SCENES[name])
    root = ET.fromstring(picture)
    size = float(root.get("width"))
    assert root.get("viewBox") == f"0 0 {size:g} {size:g}"
    assert root.find(f"{SVG}g").get("shape-rendering") == "crispEdges"
    assert not list(root.iter(f"{SVG}text"))
    for ends in edges(picture):
        begins, ends = np.transpose(ends)
        np.testing.assert_allclose(begins[1:], ends[:-1], atol=0.01)  # no gaps
        assert 0 <= begins[0] < ends[-1] <= size
        assert abs(begins[0] + ends[-1] - size) <= 9  # in the middle, beside a strip


def test_chunks_are_called_chunks():
    packed = MaskInfo.from_segments([[0] * 7 + [1] * 9])
    full = MaskInfo.full(16)
    chunked = [full.apply_chunked(6), packed.apply_chunked(6, within_segments=True)]
    chunked += [chunked[0][..., 4:, 4:], chunked[0] & full, pickle.loads(pickle.dumps(chunked[0]))]
    for mask in chunked:
        picture = mask._repr_html_()
        assert "segment" not in picture
        assert "chunk 2" in legend(picture)
        assert "left: chunks of queries" in mask.visualize(return_str=True)
    many = legend(full.apply_chunked(2)._repr_html_())
    assert "8 chunks, colours repeat" in many
    later = packed & full.apply_chunked(6)
    for mask in (packed, chunked[0].replace(q_segment_ids=np.arange(16)[None] // 8), later):
        picture = mask._repr_html_()
        assert "segment 1" in legend(picture)
        assert "chunk" not in picture


def test_svg_shades_by_share():
    mask = np.zeros((2000, 2000), bool)
    mask[:500, :500] = True
    mask[500:1000, 500:1000] = np.indices((500, 500)).sum(0) % 3 > 0
    mask[1000, 1000] = True
    opacities = {}
    for _, opacity, row, begin, end in strokes(render_svg.svg(Held(mask))):
        opacities.update(((row, column), opacity) for column in range(begin, end))
    assert opacities[0, 0] == 1
    assert 0.5 < opacities[50, 45] < 1  # of 16 × 16 pairs
    assert 0 < min(opacities.values()) < 0.5  # a single pair is seen
    assert len(set(opacities.values())) <= 6


def test_svg_colours_segments():
    colours = {}
    for colour, _, row, begin, end in strokes(render_svg.svg(SCENES["packed, small"])):
        colours.setdefault(colour, set()).update((row, column) for column in range(begin, end))
    ids = SCENES["packed, small"].ids[0]
    assert len(colours) == 3
    for seen in colours.values():
        assert len({int(ids[token]) for cell in seen for token in cell}) == 1
    strips = parts(render_svg.svg(SCENES["packed, small"]))[1:]
    assert len(strips) == 2
    for strip, tokens in zip(strips, ("queries", "keys"), strict=True):
        assert [path.get("d") for path in strip] == ["M0 0h5", "M5 0h4", "M9 0h3", "M12 0h2"]
        assert titles(strip) == [
            f"{tokens} 0–4: segment 0",
            f"{tokens} 5–8: segment 1",
            f"{tokens} 9–11: segment 2",
            f"{tokens} 12–13: padding",
        ]


def test_svg_tells_of_each_row_what_it_sees():
    rows = titles(parts(render_svg.svg(SCENES["packed, small"]))[0][0])
    assert len(rows) == 14
    assert rows[0] == "query 0 (segment 0) attends to 1 of 14 keys: 0"
    assert rows[8] == "query 8 (segment 1) attends to 4 of 14 keys: 5–8"
    assert rows[13] == "query 13 (padding) attends to 0 of 14 keys"
    assert titles(parts(render_svg.svg(SCENES["decode"]))[0][0]) == [
        "query 0 attends to 700 of 700 keys: 0–699"
    ]
    rows = titles(parts(render_svg.svg(Held(causal(1000))))[0][0])
    assert rows[0] == "queries 0–7: 0.45 % allowed, keys 0–7"
    assert rows[-1] == "queries 992–999: 99.7 % allowed, keys 0–999"
    with_blank = titles(parts(render_svg.svg(SCENES["packed"]))[0][0])
    assert with_blank[-1] == "queries 218–219 (padding): 0 % allowed"
    assert "queries 70–71 (segment 1): 0.682 % allowed, keys 70–71" in with_blank


def test_svg_explains_its_colours():
    explained = {
        "causal": ["allowed", "masked out"],
        "window": ["allowed", "partly allowed", "masked out"],
        "packed, small": ["segment 0", "segment 1", "segment 2", "masked out, or padding"],
        "decode": ["allowed"],
        "dead": ["masked out"],
        "one": ["allowed"],
        "nothing": [],
    }
    for name, expected in explained.items():
        words = legend(render_svg.svg(SCENES[name]))
        assert words[len(words) - len(expected) :] == expected
        assert words[len(words) - len(expected) - 1].endswith(("allowed", "no pairs", "pairs"))
    ids, mask = packed([30] * 9 + [1, 1])
    words = legend(render_svg.svg(Held(mask, (ids, ids))))
    assert words[-4:] == ["11 segments, colours repeat", "several segments", "partly allowed", "masked out"]


def test_svg_legend_has_the_colours_of_the_cells():
    root = ET.fromstring(render_svg.svg(SCENES["packed, small"]))
    squares = [path.get("stroke") for path in root.findall(f"{SVG}g")[-1].iter(f"{SVG}path")]
    assert squares == [*render.PALETTE[:3], "currentColor"]


def test_svg_strips_need_segments():
    """Ids that number the rows of a causal mask, all different, say nothing; one id for all neither."""
    for labels in (None, (np.arange(8), np.arange(8)), (np.zeros(8), np.zeros(8))):
        assert len(parts(render_svg.svg(Held(causal(8), labels)))) == 1


def test_svg_draws_live_pairs_across_segments():
    ids, mask = packed([40, 40])
    mask[:, :4] = True
    picture = strokes(render_svg.svg(Held(mask, (ids, ids))))
    assert sum(end - begin for _, _, _, begin, end in picture) == mask.sum()


def test_svg_takes_colours_from_the_page():
    picture = render_svg.svg(SCENES["packed"])
    assert 'fill="currentColor"' in picture
    colours = set(re.findall(r"#[0-9a-f]{3,6}", picture))
    assert not colours & {"#000", "#000000", "#fff", "#ffffff"}


def linear(colour):
    channels = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


@pytest.mark.parametrize("ground", ["#ffffff", "#111111"])
@pytest.mark.parametrize("colour", [*render.PALETTE, render.MIXED])
def test_colours_are_seen(colour, ground):
    light, dark = sorted((linear(x) @ [0.2126, 0.7152, 0.0722] for x in (colour, ground)), reverse=True)
    assert (light + 0.05) / (dark + 0.05) > 2.2


# What linear red, green and blue become without cones of a kind: Machado, Oliveira and Fernandes 2009.
VISION = {
    "all": np.eye(3),
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}  # fmt: skip


def perceived(colour, vision):
    """Its place in Oklab (Ottosson 2020), where distances are as they are seen."""
    cones = [[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740], [0.08830, 0.28172, 0.62998]]
    lightness = [[0.21045, 0.79362, -0.00407], [1.97800, -2.42859, 0.45059], [0.02590, 0.78277, -0.80868]]
    return np.array(lightness) @ np.cbrt(np.array(cones) @ np.clip(np.array(vision) @ linear(colour), 0, 1))


@pytest.mark.parametrize("vision", VISION)
def test_colours_are_told_apart(vision):
    places = [perceived(colour, VISION[vision]) for colour in (*render.PALETTE, render.MIXED)]
    for i, j in itertools.combinations(range(len(places)), 2):
        assert np.linalg.norm(places[i] - places[j]) > 0.07


@given(scene=scenes(), repeat=st.integers(1, 9))
def test_svg_of_anything(scene, repeat):
    mask, ids = scene
    mask, ids = np.repeat(np.repeat(mask, repeat, 0), repeat, 1), [np.repeat(side, repeat) for side in ids]
    picture = render_svg.svg(Held(mask, ids))
    ET.fromstring(picture)
    assert len(picture) < 40_000
    assert bool(strokes(picture)) == bool(mask.any())


# matplotlib


@pytest.fixture
def pyplot():
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    matplotlib.use("Agg")
    module = pytest.importorskip("matplotlib.pyplot")
    yield module
    module.close("all")


def is_live(image):
    """Where cells have a colour; that of dead ones is grey."""
    return np.ptp(image[..., :3], axis=-1) > 0.1


@pytest.mark.levels("once")
@pytest.mark.parametrize("name", [name for name in SCENES if name != "no batch"])
def test_plot(pyplot, name):
    scene = SCENES[name]
    ax = render.plot(scene)
    _, queries, keys = scene.shape
    assert ax.get_xlim() == (-0.5, max(keys, 1) - 0.5)
    assert ax.get_ylim() == (max(queries, 1) - 0.5, -0.5)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("key", "query")
    if queries and keys:
        (image,) = ax.images
        np.testing.assert_array_equal(is_live(image.get_array()), scene.grid(*scene.asked[-1]) > 0)
    ax.figure.canvas.draw()


@pytest.mark.levels("once")
def test_plot_asks_for_axes(pyplot):
    with pytest.raises(TypeError, match=r"ax must be matplotlib\.axes\.Axes or None, got 3"):
        MaskInfo.from_segments([[0]]).plot(ax=3)


@pytest.mark.levels("once")
def test_plot_on_given_axes_and_planes(pyplot):
    mask = np.zeros((2, 2, 4, 4), bool)
    mask[1, 1, 2, 3] = True
    _, axes = pyplot.subplots(1, 2)
    assert render.plot(Held(mask), axes[1], batch=1, head=1) is axes[1]
    assert is_live(axes[1].images[0].get_array()).sum() == 1
    assert not axes[0].images


@pytest.mark.levels("once")
def test_plot_of_many_tokens_is_coarse(pyplot):
    ax = render.plot(Held(causal(700)))
    image = ax.images[0]
    assert image.get_array().shape == (350, 350, 4)
    assert image.get_extent() == [-0.5, 699.5, 699.5, -0.5]
    full, part, dead = image.get_array()[1, [0, 1, 2], 3]
    assert dead < part < full == 1


@pytest.mark.levels("once")
def test_plot_has_the_colours_of_the_segments(pyplot):
    from matplotlib.colors import to_rgb

    ax = render.plot(SCENES["packed, small"])
    image, ids = ax.images[0].get_array(), SCENES["packed, small"].ids[0]
    for row, column in np.argwhere(is_live(image)):
        assert tuple(image[row, column]) == (*to_rgb(render.PALETTE[ids[row]]), 1)
    assert ax.get_title() == "15.8 % allowed; colours are segments"
    assert render.plot(SCENES["causal"]).get_title() == "50.8 % allowed"


def test_plot_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="needs matplotlib"):
        render.plot(Held(causal(4)))


# MaskInfo


INFOS = every_mask(90, 80, heads=3) | {
    "sparse": MaskInfo(np.random.default_rng(3).random((2, 3, 20, 30)) < 0.02),
    "decoding": MaskInfo.from_segments(np.zeros((2, 90), int)).apply_kv_lengths([40, 90], q_len=1),
}


@pytest.mark.levels("once")
@pytest.mark.parametrize("name", INFOS)
def test_info_is_drawn_like_its_array(pyplot, name):
    info = INFOS[name]
    mask = info.attention_mask
    for batch, head in {(0, 0), (len(mask) - 1, 0), (len(mask) - 1, mask.shape[1] - 1)}:
        noun = "chunk" if info.chunked_mask_baked_in and name != "and" else "segment"  # of the left operand
        held = Held(mask != 0, info.labels(batch, head), noun)
        for block_size in (1, 7, 32):
            got = render.visualize(info, block_size, batch, head)
            assert got == render.visualize(held, block_size, batch, head)
        assert render_svg.svg(info, batch, head) == render_svg.svg(held, batch, head)
        got, expected = (render.plot(drawn, batch=batch, head=head) for drawn in (info, held))
        np.testing.assert_array_equal(got.images[0].get_array(), expected.images[0].get_array())
    assert info.visualize(return_str=True) == render.visualize(info)
    assert info.visualize(batch=len(mask) - 1, return_str=True) == render.visualize(info, batch=len(mask) - 1)
    assert info._repr_html_() == render_svg.svg(info)


def test_numbers_without_a_pair_are_drawn():
    """Zeros of floating-point numbers, which look like a bias where a caller passes them."""
    assert "0 % allowed" in (~MaskInfo.full(3)).to_dtype("float32").visualize(return_str=True)


def test_info_is_drawn_without_its_array():
    """131,072² pairs, which would take 17 GB."""
    ids = np.repeat(np.arange(64), 2048)[None]
    info = MaskInfo.from_segments(ids).apply_causal().apply_sliding_window(1024)
    tracemalloc.start()
    seconds = []
    for draw in (render.visualize, render_svg.svg) * 3:
        begin = time.perf_counter()
        draw(info)
        seconds.append(time.perf_counter() - begin)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16e6
    assert SANITIZED or min(seconds) < 0.5


def test_the_picture_in_the_readme():
    """By docs/make_pictures.py, which moves it onto a ground of its own."""
    picture = ROOT / "docs" / "mask.svg"
    if not picture.exists():
        pytest.skip("the tests run without the docs")
    packed = MaskInfo.from_cu_seqlens([0, 9, 14, 32], packed=True).apply_causal().apply_sliding_window((7, 0))
    assert packed._repr_html_().removeprefix("<svg ") in picture.read_text(encoding="utf-8")
