"""`python -m attnmask` shows what it promises, on terminals of any width, in pipes and in files."""

import contextlib
import io
import os
import pty
import re
import resource
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from environment import ROOT, SANITIZED

import attnmask
from attnmask import __main__ as demo

pytestmark = pytest.mark.levels("once")

COMMAND = [sys.executable, "-m", "attnmask"]
CHANGED = {"COLUMNS", "NO_COLOR", "PYTHONIOENCODING", "PYTHONUNBUFFERED", "TERM"}
TIMEOUT = 600 if SANITIZED else 60
once = pytest.mark.skipif(SANITIZED, reason="one whole run is enough there")


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in CHANGED}
    return kept | {"PYTHONIOENCODING": "utf-8"} | changes


def run(**changes: str) -> str:
    result = subprocess.run(COMMAND, env=environment(**changes), capture_output=True, timeout=TIMEOUT)
    assert (result.returncode, result.stderr) == (0, b"")
    return result.stdout.decode(changes.get("PYTHONIOENCODING", "utf-8"))


def processor_time() -> float:
    """Seconds that children have used, all threads together: other work of the machine adds little."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.fixture(scope="module")
def shown():
    begin = processor_time()
    text = run()
    assert SANITIZED or processor_time() - begin < 40
    return text


def section(text: str, number: int) -> str:
    return re.split(r"^\d\. ", text, flags=re.MULTILINE)[number]


def test_it_is_short_and_plain(shown):
    lines = shown.splitlines()
    assert len(lines) <= 64
    assert max(map(len, lines)) <= 80
    assert not set(shown) & set("\r\033")
    assert [line[0] for line in lines if re.match(r"\d\. ", line)] == list("1234567")


def test_it_draws_the_mask(shown):
    drawing = [re.findall("███|·", line) for line in section(shown, 1).splitlines()[2:12]]
    live = [[cell == "███" for cell in row] for row in drawing]
    texts = np.repeat([0, 1, 2], [5, 2, 3])
    apart = np.subtract.outer(np.arange(10), np.arange(10))
    expected = np.equal.outer(texts, texts) & (apart >= 0) & (apart <= 2)
    np.testing.assert_array_equal(live, expected)
    assert f"{expected.mean():.0%} of all pairs" in " ".join(shown.split())


def test_it_compares_with_numpy(shown):
    attention, nan, gradients, long_context = (section(shown, number) for number in (2, 3, 4, 5))
    ours, numpys = (int(size) for size in re.findall(r"(\d+) MB\n", attention)[:2])
    assert SANITIZED or ours < numpys
    assert float(re.search(r"differ by (\S+)", attention)[1]) < 1e-5
    assert re.findall(r"(\d+) of (\d+)", nan) == [("0", "8"), ("8", "8")]
    for name in ("query", "key", "value"):
        exact, numeric, gap = re.search(rf"^  {name} +(\S+) +(\S+) +(\S+)$", gradients, re.MULTILINE).groups()
        assert float(exact) == pytest.approx(float(numeric), abs=2e-6)
        assert float(gap) < 1e-6
    assert re.search(r"took \d+\.\d s", long_context)


@once
def test_the_picture_in_the_readme():
    """By docs/make_pictures.py: the first two sections, but for numbers and versions."""
    picture = ROOT / "docs" / "demo.svg"
    if not picture.exists():
        pytest.skip("the tests run without the docs")

    def plain(lines):
        without_blanks = [" ".join(line.split()) for line in lines if line and "Version" not in line]
        return [re.sub(r"\d[\d.,]*(e-\d+)?", "0", line) for line in without_blanks]

    prompt, *lines = (
        "".join(text.itertext()) for text in ET.parse(picture).iter("{http://www.w3.org/2000/svg}text")
    )
    assert prompt == "$ python -m attnmask"
    columns = round(
        (float(re.search(r'width="([\d.]+)"', picture.read_text(encoding="utf-8"))[1]) - 32) / 7.8
    )
    assert plain(lines) == plain(run(COLUMNS=str(columns)).split("\n3. ")[0].splitlines())


@once
def test_it_fits_a_narrow_terminal_without_unicode():
    text = run(COLUMNS="40", PYTHONIOENCODING="ascii")
    assert max(map(len, text.splitlines())) <= 40
    assert "  cat   ## ## .  ." in text
    assert "  mask = mask.apply_sliding_window(\n      (2, 0))\n" in text


@once
def test_arguments_are_refused_in_one_line():
    result = subprocess.run([*COMMAND, "--fast"], env=environment(), capture_output=True, timeout=TIMEOUT)
    assert (result.returncode, result.stdout) == (2, b"")
    assert result.stderr == b"python -m attnmask: error: unrecognized arguments: --fast\n"


@once
def test_a_closed_pipe_ends_it_silently():
    with subprocess.Popen(
        COMMAND, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout.readline().startswith(b"attnmask")
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


@once
@pytest.mark.parametrize(
    ("redirection", "code", "message"),
    [(">&-", 2, "there is no output to write to"), (">/dev/full", 1, "No space left on device")],
)
def test_an_output_that_takes_nothing(redirection, code, message):
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full")
    command = ["/bin/sh", "-c", f'exec "$@" {redirection}', "sh", *COMMAND]
    result = subprocess.run(command, env=environment(), stderr=subprocess.PIPE, text=True, timeout=TIMEOUT)
    assert (result.returncode, result.stderr) == (code, f"python -m attnmask: error: {message}\n")


@contextlib.contextmanager
def terminal(**changes: str):
    """A run on a pseudo-terminal, and what reads from it until the end or until something has been shown."""
    master, slave = pty.openpty()
    env = environment(COLUMNS="80", TERM="xterm") | changes
    with subprocess.Popen(COMMAND, env=env, stdin=slave, stdout=slave, stderr=slave) as process:
        os.close(slave)
        seen = b""

        def read(until: bytes | None = None) -> str:
            nonlocal seen
            with contextlib.suppress(OSError):  # which is how Linux tells the end
                while (until is None or until not in seen) and (part := os.read(master, 4096)):
                    seen += part
            return seen.decode()

        try:
            yield process, read
        finally:
            process.kill()
            os.close(master)


@once
def test_a_terminal_shows_how_far_it_is():
    with terminal(NO_COLOR="1") as (process, read):
        text = read()
        assert process.wait() == 0
    assert "\r  head 2 of 6" in text
    assert "\033" not in text
    assert "Traceback" not in text


@once
@pytest.mark.skipif(signal.getsignal(signal.SIGINT) is signal.SIG_IGN, reason="SIGINT is ignored here")
def test_an_interrupt_ends_it():
    with terminal() as (process, read):
        read(until=b"\r  head 2")
        process.send_signal(signal.SIGINT)
        text = read()
        assert process.wait() == 130
    assert "\033[1m1. " in text
    assert "  the   \033[38;5;25m███ \033[39m·" in text
    assert "6. " not in text
    assert "Traceback" not in text


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437", "utf-8"])
@pytest.mark.parametrize("columns", [40, 57, 80, 200])
def test_any_width_and_encoding_will_do(monkeypatch, encoding, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding))
    for part in (demo.mask, demo.nan, demo.gradients, demo.next_steps):
        demo.heading(part.__doc__)
        part()
    sys.stdout.flush()
    lines = written.getvalue().decode(encoding).splitlines()
    assert max(map(len, lines)) <= min(columns, 80)


def test_a_wrong_result_is_not_shown(monkeypatch):
    right = attnmask.flash_attention
    monkeypatch.setattr(attnmask, "flash_attention", lambda *args, **kwargs: right(*args, **kwargs) * 1.01)
    for part in (demo.attention, demo.gradients):
        with pytest.raises(AssertionError):
            part()
    monkeypatch.setattr(
        attnmask, "flash_attention", lambda q, k, v, info: demo.numpy_attention(q, k, v, info.attention_mask)
    )
    with pytest.raises(AssertionError), np.errstate(invalid="ignore"):
        demo.nan()
