"""The documentation: guides, and a reference made from the docstrings. `make docs` builds it."""

import importlib.util
import inspect
import itertools
import json
import re
import sys
import textwrap
from pathlib import Path

import numpy as np
from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx import addnodes
from sphinx.ext.autodoc.mock import _MockObject
from sphinx.util.docutils import SphinxDirective

import attnmask
from attnmask._attention import arguments
from attnmask._masks.svg import thumbnail

sys.path.append(str(Path(__file__).parent))

import gallery

project = "attnmask"
version = release = attnmask.__version__
project_copyright = "the authors of attnmask, Apache-2.0"

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
    "numpydoc",
    "myst_parser",
]
rst_prolog = ".. currentmodule:: attnmask"
default_role = "py:obj"  # `name` is a link where there is such a name, and else stands out
highlight_language = "none"  # drawings of masks are no Python; examples are, with >>>
autosummary_generate = False
autodoc_typehints = "none"  # the sections on parameters say more
autodoc_member_order = "bysource"
autodoc_mock_imports = [
    name for name in ("ejkernel", "jax", "torch", "transformers") if not importlib.util.find_spec(name)
]
# Nor do these have their versions then.
if "ejkernel" in autodoc_mock_imports:
    autodoc_mock_imports.append("attnmask.ejkernel._import")
if "torch" in autodoc_mock_imports:
    autodoc_mock_imports.append("attnmask.torch._import")
if {"torch", "transformers"} & set(autodoc_mock_imports):
    autodoc_mock_imports.append("attnmask.transformers._masks")
# Types of what is not installed stand in unions, as other types do.
_MockObject.__or__ = _MockObject.__ror__ = lambda self, other: self
_MockObject.__setitem__ = lambda self, key, value: None  # rules of JAX are registered in its tables
numpydoc_show_class_members = False

html_theme = "furo"
html_title = f"attnmask {version}"
html_static_path = ["_static"]
html_css_files = ["attnmask.css"]
html_copy_source = html_show_sourcelink = False


HEAD_OF_MASK = re.compile(r"\bk \d( \d)+")


class Mask(Directive):
    """``.. mask:: EXPRESSION`` draws a `MaskInfo` as a notebook does. The content, if any, is the caption."""

    required_arguments = 1
    final_argument_whitespace = True
    has_content = True

    def run(self):
        expression = " ".join(self.arguments[0].split())
        mask = eval(expression, {"np": np, "MaskInfo": attnmask.MaskInfo})
        caption = nodes.caption()
        caption += self.state.inline_text(" ".join(self.content) or f"``{expression}``", self.lineno)[0]
        return [nodes.figure("", nodes.raw("", mask._repr_html_(), format="html"), caption, classes=["mask"])]


class DrawnMasks(Directive):
    """``.. drawn-masks::`` makes pictures of masks that are drawn with ``#`` and ``.`` in a docstring, side by side."""

    has_content = True

    def run(self):
        made, begin, said = [], 0, []
        for head in (i for i, line in enumerate(self.content) if HEAD_OF_MASK.search(line)):
            places = [(match.start(), match.end()) for match in HEAD_OF_MASK.finditer(self.content[head])]
            above = [line for line in self.content[begin:head] if line.strip()]
            begin = head + 1
            for number, (start, end) in enumerate(places):
                cells = itertools.takewhile(
                    lambda row: row and set(row) <= {"#", "."},
                    (line[start + 2 : end].replace(" ", "") for line in self.content[head + 1 :]),
                )
                rows = [[cell == "#" for cell in row] for row in cells]
                begin = max(begin, head + 1 + len(rows))
                left = start - places[0][0]
                right = places[number + 1][0] - places[0][0] if number + 1 < len(places) else None
                words = " ".join(line[left:right].strip() for line in above).strip()
                said[number : number + 1] = [words or (said[number] if number < len(said) else "")]
                picture = nodes.raw("", attnmask.MaskInfo([rows])._repr_html_(), format="html")
                made.append(
                    nodes.figure("", picture, nodes.caption(said[number], said[number]), classes=["mask"])
                )
        return made


class Gallery(Directive):
    """``.. gallery::`` draws the masks of gallery.py: a grid of small pictures, and a section for each."""

    def run(self):
        grid, sections = "", []
        for name, make in vars(gallery).items():
            if not inspect.isfunction(make):
                continue
            title, _, text = inspect.getdoc(make).partition("\n\n")
            code = textwrap.dedent(inspect.getsource(make).split('"""')[2]).strip()
            code, _, shown = code.rpartition("\nreturn ")
            mask = make()
            picture = mask._repr_html_()
            grid += f'<a href="#{nodes.make_id(name)}">{thumbnail(mask)}<span>{title}</span></a>'
            section = nodes.section(ids=[nodes.make_id(name)], names=[name])
            section += nodes.title(title, title)
            section += nodes.paragraph(
                "", "", *self.state.inline_text(" ".join(text.split()), self.lineno)[0]
            )
            section += nodes.literal_block(code, code, language="python")
            caption = [] if shown == "mask" else [nodes.caption("", "", nodes.literal(shown, shown))]
            section += nodes.figure("", nodes.raw("", picture, format="html"), *caption, classes=["mask"])
            sections.append(section)
        return [nodes.raw("", f'<div class="gallery">{grid}</div>', format="html"), *sections]


class Keywords(SphinxDirective):
    """``.. keywords:: WORD, WORDS`` lets a search find a page by what others call its subject."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self):
        words = " ".join(self.arguments[0].split()).split(", ")
        target = nodes.target("", "", ids=[f"keywords-{nodes.make_id(self.env.docname)}"])
        self.state.document.note_explicit_target(target)
        entries = [
            ("single", word, target["ids"][0], "main", None) for word in words
        ]  # before all other hits
        return [
            nodes.meta("", name="keywords", content=", ".join(words)),
            addnodes.index(entries=entries, inline=False),
            target,
        ]


class Arguments(Directive):
    """``.. arguments::`` makes the table of the arguments of attention."""

    def run(self):
        faces = {"ring": arguments.RingOptions, "caches": arguments.CacheOptions}
        rows = [("argument", "default", "meaning", "gradient", "in JAX", *faces)]
        for row in (*arguments.ARGUMENTS, *arguments.OF_CACHES):
            required = row.default is inspect.Parameter.empty
            rows.append(
                (
                    f"``{row.name}``",
                    "" if required else f"``{row.default!r}``",
                    row.about.strip(),
                    "yes" if row.name in arguments.LEARNED else "",
                    "traced" if row.name in arguments.TRACED else "static",
                    *(
                        "yes" if required or row.name in face.__annotations__ else ""
                        for face in faces.values()
                    ),
                )
            )
        return list_table(self, rows, "arguments")


class Levels(Directive):
    """``.. levels:: FILE`` makes tables of what `python -m attnmask.bench --json` has written to benchmarks/results."""

    required_arguments = 1

    def run(self):
        path = Path(__file__).parent.parent / "benchmarks" / "results" / self.arguments[0]
        self.state.document.settings.record_dependencies.add(str(path))
        report = json.loads(path.read_text(encoding="utf-8"))
        made = [
            nodes.paragraph(
                text=f"{report['date'][:10]}, {report['processor']}, {report['system']}, {report['threads']} threads; "
                f"attnmask {report['attnmask']} by {report['compiler']}, Python {report['python']}, "
                f"NumPy {report['numpy']}, PyTorch {report['torch']}."
            )
        ]
        for function, group in itertools.groupby(report["cases"], lambda case: case["function"]):
            cases = list(group)
            rows = [("", *(case["type"] for case in cases))]
            for name in (*report["levels"], "PyTorch"):
                times = [case["times"].get(name) for case in cases]
                if any(times):
                    shown = (
                        f"{row['ms']:#.3g}".rstrip(".") + f" ms, {row['of_peak']:.0%}" if row else "–"
                        for row in times
                    )
                    rows.append((f"**{name}**" if name == report["level"] else name, *shown))
            rows.append(("peak", *(f"{case['times']['peak']['rate']:.0f} {case['unit']}" for case in cases)))
            made.append(nodes.rubric(text=function.capitalize()))
            made.append(nodes.paragraph(text=f"{cases[0]['about'].capitalize()}.".replace(" x ", " × ")))
            made += list_table(self, rows, "levels")
        return made


def list_table(directive, rows, name):
    """A table of cells in reStructuredText, the first row of which is its head."""
    lines = [".. list-table::", f"   :class: {name}", "   :header-rows: 1", ""]
    for row in rows:
        lines += [f"   {'  ' if i else '* '}- {cell}" for i, cell in enumerate(row)]
    table = nodes.Element()
    directive.state.nested_parse(StringList(lines), directive.content_offset, table)
    return table.children


def draw_masks(app, what, name, obj, options, lines):
    """Lets a page show the masks that a docstring draws in letters as pictures."""
    made, block = [], None
    for line in lines:
        if block is None and line.rstrip().endswith("::") and not line.lstrip().startswith(".."):
            block = [line]
        elif block is not None and line.strip() and not line.startswith(" "):
            made += drawn(block)
            block = None
            made.append(line) if not line.rstrip().endswith("::") else None
            block = [line] if line.rstrip().endswith("::") else None
        elif block is not None:
            block.append(line)
        else:
            made.append(line)
    lines[:] = made + drawn(block or [])


def drawn(block):
    """The lines of a literal block, or the directive that draws the masks in it, if there is nothing else."""
    words = [line.replace("#", ".") for line in block[1:] if re.search(r"[#.] [#.]", line)]
    plain = all(re.fullmatch(r"( *(q +)?\d+ +\.( \.)*)+ *", line) for line in words)
    if not words or not plain or not any(HEAD_OF_MASK.search(line) for line in block):
        return block
    before = block[0].strip().removesuffix("::")
    return [*([f"{before}:"] if before else []), "", ".. drawn-masks::", *block[1:]]


def name_types(app, what, name, obj, options, signature, returns):
    """Shows a type that is a default as it is written."""
    return signature and re.sub(r"<class 'numpy\.(\w+)'>", r"np.\1", signature), returns


def find_name(app, env, node, text):
    """Links `name` also in summaries and in docstrings of modules, which are of no class or of an internal module."""
    prefixes = ["attnmask."] + ["attnmask.MaskInfo."] * node["refdoc"].startswith("mask_info")
    found = (
        env.domains["py"].resolve_xref(
            env, node["refdoc"], app.builder, "obj", prefix + node["reftarget"], node, text
        )
        for prefix in prefixes
        if node["refdomain"] == "py"
    )
    return next(filter(None, found), None)


def link_pages(app, doctree):
    """Lets pages link to each other by their files, ``page.rst``, as they must where Sphinx is not."""
    for node in list(doctree.findall(nodes.reference)):
        if re.fullmatch(r"[\w/.]+\.rst", node.get("refuri", "")):
            shown = nodes.inline("", *node.children)
            target = {"reftarget": node["refuri"].removesuffix(".rst"), "refdoc": app.env.docname}
            page = addnodes.pending_xref(
                "", shown, refdomain="std", reftype="doc", refexplicit=True, **target
            )
            node.replace_self(page)


def keep_anchors(app, doctree):
    """Lets old links to members find them in a table of members, where these are described on another page."""
    described = {id for node in doctree.findall(addnodes.desc_signature) for id in node["ids"]}
    tables = [table for table in doctree.findall(nodes.table) if "members" in table["classes"]]
    for name in [name for table in tables for name in table.findall(addnodes.pending_xref)]:
        anchor = f"attnmask.{name['reftarget']}"
        if anchor not in described:
            name.parent.insert(name.parent.index(name), nodes.target("", "", ids=[anchor]))


def setup(app):
    app.add_directive("mask", Mask)
    app.add_directive("drawn-masks", DrawnMasks)
    app.add_directive("gallery", Gallery)
    app.add_directive("arguments", Arguments)
    app.add_directive("keywords", Keywords)
    app.add_directive("levels", Levels)
    app.connect("autodoc-process-signature", name_types)
    app.connect(
        "autodoc-process-docstring", draw_masks, priority=400
    )  # before numpydoc divides it into sections
    app.connect("missing-reference", find_name)
    app.connect("doctree-read", link_pages)
    app.connect("doctree-read", keep_anchors)
