"""The notebook in examples/ runs, and prints what is stored: by `jupyter execute --inplace examples/tour.ipynb`."""

import pytest
from environment import ROOT, SANITIZED

TOUR = ROOT / "examples" / "tour.ipynb"
pytestmark = [
    pytest.mark.levels("once"),
    pytest.mark.skipif(not TOUR.exists(), reason="the tests run without the examples"),
    pytest.mark.skipif(SANITIZED, reason="a notebook's kernel is not for the sanitizer"),
    pytest.mark.filterwarnings("ignore"),  # those of the notebook's machinery
]


def shown(cell):
    """What a cell shows as text; speeds are drawn."""
    outputs = []
    for output in cell.get("outputs", ()):
        data = dict(output.get("data", {}))
        if any(kind.startswith("image/") for kind in data):
            continue
        entry = [output["output_type"], output.get("name"), output.get("text"), data]
        if entry[0] == "stream" and outputs and outputs[-1][:2] == entry[:2]:
            outputs[-1][2] += entry[2]  # what is printed may come in pieces
        else:
            outputs.append(entry)
    return outputs


def test_what_is_printed_may_come_in_pieces():
    def stream(text, name="stdout"):
        return {"output_type": "stream", "name": name, "text": text}

    whole = {"outputs": [stream("True\n"), stream("oh", "stderr")]}
    assert shown({"outputs": [stream("True"), stream("\n"), stream("oh", "stderr")]}) == shown(whole)
    assert shown({"outputs": [stream("True"), stream("oh", "stderr")]}) != shown(whole)


def test_tour(tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    for name in ("ipykernel", "matplotlib"):
        pytest.importorskip(name)
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))  # nobody's own settings and kernels
    for name in ("JUPYTER_PATH", "MPLBACKEND"):
        monkeypatch.delenv(name, raising=False)
    stored = nbformat.read(TOUR, as_version=4)
    fresh = nbformat.read(TOUR, as_version=4)
    for cell in fresh.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbclient.NotebookClient(
        fresh, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    assert sum(bool(shown(cell)) for cell in stored.cells) > 10
    for old, new in zip(stored.cells, fresh.cells, strict=True):
        assert shown(new) == shown(old), old.source
        assert new.get("execution_count") == old.get("execution_count"), "run from top to bottom"


def test_tour_is_small():
    assert TOUR.stat().st_size < 400_000
