"""The pages in docs/: their examples run as printed, they build without a warning, and they fit narrow screens."""

import doctest
import importlib.util
import inspect
import io
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from environment import ROOT, SANITIZED

import attnmask
from attnmask import MaskInfo

DOCS = ROOT / "docs"
PAGES = {str(page.relative_to(DOCS)): page for page in sorted(DOCS.rglob("*.rst"))}
TEXTS = {name: page.read_text(encoding="utf-8") for name, page in PAGES.items()}
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.skipif(not PAGES, reason="the tests run without the documentation"),
    pytest.mark.levels("once"),
]

# Opens each page in frames of some widths, and writes down what is wider than its place and would be scrolled, and the
# arguments whose names are broken.
MEASURE = """<!doctype html><body><script>
const beyond = [];
let frames = 0;
async function measure() {
    for (const page of PAGES) for (const width of WIDTHS) {
        const frame = document.createElement("iframe");
        frame.style.width = width + "px";
        frame.src = page;
        const loaded = new Promise((resolve) => (frame.onload = resolve));
        document.body.append(frame);
        await loaded;
        for (const part of frame.contentDocument.querySelectorAll("html, .content, .table-wrapper"))
            if (part.scrollWidth > part.clientWidth) beyond.push([page, width, part.className || "page"]);
        for (const name of frame.contentDocument.querySelectorAll(".arguments code"))
            if (name.getClientRects().length > 1) beyond.push([page, width, name.textContent]);
        frames++;
        frame.remove();
    }
    document.body.innerHTML = "<pre>" + JSON.stringify([frames, beyond]) + "</pre>";
}
measure();
</script>"""


@pytest.mark.parametrize("name", [name for name, text in TEXTS.items() if ">>>" in text])
def test_examples(name, set_threads):
    for framework in "torch", "jax":
        if f"import {framework}" in TEXTS[name]:
            pytest.importorskip(framework)
    test = doctest.DocTestParser().get_doctest(TEXTS[name], {}, name, name, 0)
    report = io.StringIO()
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.write)
    assert not result.failed, report.getvalue()


def test_pictures():
    """The expressions of `.. mask::` are masks that can be drawn."""
    expressions = [
        expression
        for text in TEXTS.values()
        for expression in re.findall(r"^\.\. mask:: (.+(?:\n +.+)*)", text, re.M)
    ]
    assert len(expressions) > 10
    for expression in expressions:
        mask = eval(" ".join(expression.split()), {"np": np, "MaskInfo": MaskInfo})
        assert mask._repr_html_().startswith("<svg "), expression


def test_gallery(monkeypatch):
    """Each mask of the gallery is drawn, and the words beside it are short."""
    monkeypatch.syspath_prepend(str(DOCS))
    import gallery

    makers = [make for make in vars(gallery).values() if inspect.isfunction(make)]
    assert len(makers) >= 24
    for make in makers:
        mask = make()
        assert mask._repr_html_().startswith("<svg "), make.__name__
        assert 0 < mask.density() <= 1, make.__name__
        lines = inspect.getsource(make).split('"""')[2].strip().splitlines()
        assert len(lines) <= 9, make.__name__
        assert lines[-1].strip().startswith("return mask"), make.__name__


def test_diagram(monkeypatch):
    """The files that the path of a call names are there, and so are the tables in them."""
    monkeypatch.syspath_prepend(str(DOCS))
    import diagram

    root = DOCS.parent
    if not (root / "csrc").exists():
        pytest.skip("the tests run without the sources")
    drawn = diagram.path() + diagram.tables()
    for stage in diagram.STAGES:
        files = [*stage.files, *(file for _, _, file in stage.tables)]
        assert all((root / file).is_file() and f">{file}<" in drawn for file in files), stage.name
        said = re.search(
            rf"^\d\. \*\*{stage.name.title()}\*\*(.*?)^(?=\d\. |\n|\w)",
            TEXTS["architecture_path.rst"],
            re.M | re.S,
        )
        assert all(file.rpartition("/")[2] in said[1] for file in stage.files), stage.name
        for _, table, file in stage.tables:
            assert re.search(rf"\b{table}\b", (root / file).read_text(encoding="utf-8")), table


def test_pictures_are_as_they_would_be_made_now(monkeypatch):
    """Those in files, which a page shows with or without Sphinx; the demo's has the times of a run."""
    monkeypatch.syspath_prepend(str(DOCS))
    monkeypatch.syspath_prepend(str(DOCS.parent / "benchmarks"))
    if not (DOCS.parent / "benchmarks").exists():
        pytest.skip("the tests run without the benchmarks")
    import make_pictures

    shown = "".join(TEXTS.values()) + (DOCS.parent / "README.md").read_text(encoding="utf-8")
    for name, make in make_pictures.PICTURES.items():
        assert (DOCS / f"{name}.svg").read_text(encoding="utf-8") == make(), name
        assert f"{name}.svg" in shown, name


def test_links_between_files():
    """What README, CONTRIBUTING and the like link to is there."""
    root = DOCS.parent
    for page in [*root.glob("*.md"), *root.glob("benchmarks/results/*.md"), *root.glob("examples/*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if not target.startswith(("http", "mailto")):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("name", [name for name in TEXTS if name.startswith("architecture")])
def test_files_that_the_architecture_names(name):
    root = DOCS.parent
    if not (root / "csrc").exists():
        pytest.skip("the tests run without the sources")
    for named in sorted(
        set(re.findall(r"``([\w/.*]*\w\.(?:c|h|py))``|([\w/]+/[\w*]+\.(?:c|h|py))\b", TEXTS[name]))
    ):
        path = "".join(named)
        found = any(
            any(root.glob(f"{folder}{path}")) for folder in ("", "csrc/", "attnmask/", "tests/", "**/")
        )
        assert found or path == "Python.h", path


@pytest.mark.parametrize("name", ["reference.rst", "architecture.rst", "architecture_path.rst"])
def test_pages_that_are_read_without_sphinx(name):
    """They link to files that are there, and need no role or directive that makes text in Sphinx alone."""
    text = TEXTS[name]
    for target in re.findall(r"<([\w/.]+\.rst)>`__", text):
        assert (DOCS / target).exists(), target
    assert "auto" not in " ".join(re.findall(r"^ *\.\. ([\w-]+)::", text, re.M))
    if name != "architecture.rst":
        assert ":doc:" not in text
        assert ":ref:" not in text


def test_the_reference_lists_every_name():
    lists = re.sub(r"\s+", " ", TEXTS["reference.rst"])
    names = [name for name in attnmask.__all__ if name != "__version__"]
    assert not [name for name in names if f"`{name}`" not in lists]


def test_every_argument_has_a_purpose():
    """Each once, in the table before the reference of flash_attention."""
    table = re.search(r":class: purposes(.*?)^:doc:", TEXTS["flash.rst"], re.M | re.S)[1]
    assert sorted(re.findall(r"``(\w+)``", table)) == sorted(
        inspect.signature(attnmask.flash_attention).parameters
    )


def test_drawings_in_docstrings_are_pictures(html):
    page = (html / "flash.html").read_text("utf-8")
    assert page.count("<svg") >= 10 + (html / "masks.html").read_text("utf-8").count("<svg")
    assert ">causal, bottom-right<" in page
    assert "k 0 1 2 3 4" not in page


def test_readme_is_one_screen():
    lines = (DOCS.parent / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert any(line.startswith("![") for line in lines[:25])


def test_no_page_is_long():
    """But the reference and its lists."""
    for name, text in TEXTS.items():
        assert len(text.split()) <= 2500, name


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    """The pages as a browser shows them."""
    if SANITIZED:
        pytest.skip("pages are not for the sanitizer")
    for name in ("sphinx", "numpydoc", "furo"):
        if not importlib.util.find_spec(name):
            pytest.skip(f"{name} is not installed")
    built = tmp_path_factory.mktemp("html")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    result = subprocess.run(
        [*command, "-d", str(built / ".doctrees"), str(DOCS), str(built)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return built


def test_links_of_see_also(html):
    """Whatever a function refers to has a place in the reference."""
    names = [
        name
        for page in html.rglob("*.html")
        for section in re.findall(r'<div class="admonition seealso">.*?</div>', page.read_text("utf-8"), re.S)
        for name in re.findall("<dt>.*?</dt>", section)
    ]
    assert len(names) > 20
    assert not [name for name in names if "<a " not in name]


def test_old_links_to_members_of_masks_arrive(html):
    """All were described on one page, which lists them now."""
    page = (html / "mask_info.html").read_text("utf-8")
    described = " ".join(TEXTS[name] for name in TEXTS if re.fullmatch(r"mask_info(?!_others)\w*\.rst", name))
    names = re.findall(r"^\.\. auto(?:class|method|property):: (\S+)", described, re.M)
    assert len(names) > 50
    assert not [name for name in names if f'id="attnmask.{name}"' not in page]


FOUND = {  # what people search for, and the page that should come first
    "GQA": "flash",
    "MQA": "flash",
    "SDPA": "torch",
    "varlen": "flash_attn",
    "sliding window": "mask_info",
    "KV cache": "cache",
    "continuous batching": "transformers",
    "flex": "guides/moving",
    "FAQ": "questions",
}


def test_a_search_finds_words_of_others(html):
    """Words of `.. keywords::` come before all other hits, which those do that are marked as main."""
    index = json.loads(re.search(r"\((.*)\)", (html / "searchindex.js").read_text("utf-8"), re.S)[1])
    for word, page in FOUND.items():
        ((number, _, main),) = index["indexentries"][word.lower()]
        assert (index["docnames"][number], main) == (page, True), word
        assert re.search(
            rf'<meta content="[^"]*\b{word}\b[^"]*" name="keywords"',
            (html / f"{page}.html").read_text("utf-8"),
        ), word


@pytest.mark.skipif(not BROWSER, reason="there is no Chromium")
def test_no_page_is_wider_than_the_screen(html):
    pages = [f"{name.removesuffix('.rst')}.html" for name in TEXTS]
    script = MEASURE.replace("PAGES", json.dumps(pages)).replace("WIDTHS", "[420, 800, 1200, 1500]")
    (html / "measure.html").write_text(script)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--dump-dom"]
    result = subprocess.run(
        [BROWSER, *flags, "--virtual-time-budget=60000", (html / "measure.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = re.search("<pre>(.*)</pre>", result.stdout)
    assert found, result.stderr
    frames, beyond = json.loads(found[1])
    assert frames == 4 * len(pages)
    assert not beyond
