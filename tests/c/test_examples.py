"""The programs of examples/c build as they say, run, and compute what the package does."""

import re
import runpy
import shutil
import subprocess
import sys
import textwrap

import c_library as c
import numpy as np
import pytest
from environment import ROOT

import attnmask

EXAMPLES = ROOT / "examples/c"
pytestmark = [
    c.needs_make,
    pytest.mark.skipif(not EXAMPLES.exists(), reason="the tests run without the examples"),
    pytest.mark.skipif("address" in c.BUILD.name, reason="programs are built without the sanitizer"),
]


def printed(*command):
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def built_as_it_says(source, folder):
    """The program, by the command in the head of its file, but for where it is written."""
    c.built()
    head = source.read_text()
    command = re.search(r"^\W+((?:cc|rustc) .*)$", head, re.M)[1].split()
    command[command.index("-o") + 1] = str(folder / "program")
    printed(*command)
    return folder / "program"


EMBEDDINGS = (((np.arange(27 * 128) * 104729) % 2001 - 1000).astype(np.float32) / np.float32(2000)).reshape(
    27, 128
)


def turned(token, position):
    i = np.arange(0, 128, 2)
    angle = position * np.float32(1e4) ** (-(i % 32) / np.float32(32))
    pairs = EMBEDDINGS[token].astype(np.float64).reshape(-1, 2)
    x, y = pairs[:, 0], pairs[:, 1]
    return np.stack(
        [x * np.cos(angle) - y * np.sin(angle), x * np.sin(angle) + y * np.cos(angle)], 1
    ).reshape(4, 32)


def written(prompt, steps):
    """What the model writes, with all of the text computed again for each token."""
    tokens = [0 if letter == " " else ord(letter) - 96 for letter in prompt]
    for step in range(steps):
        x = np.stack([turned(token, position) for position, token in enumerate(tokens)])[None]
        out = attnmask.flash_attention(x, x[:, :, :2], x[:, :, :2], causal=True)[0, -1].reshape(-1)
        likeness = EMBEDDINGS @ out
        if step:
            likeness[tokens[-1]] = -np.inf
        tokens.append(int(np.argmax(likeness)))
    return "".join(" " if token == 0 else chr(token + 96) for token in tokens[len(prompt) :])


def test_decoding_in_c(tmp_path):
    source = EXAMPLES / "decode.c"
    assert len(source.read_text().splitlines()) <= 120
    lines = printed(built_as_it_says(source, tmp_path))
    assert lines == [f"{prompt}|{written(prompt, 24)}" for prompt in ("hello", "attention in c")]


@pytest.mark.skipif(not shutil.which("rustc"), reason="no rustc")
def test_decoding_in_rust(tmp_path):
    *lines, last = printed(built_as_it_says(EXAMPLES / "decode.rs", tmp_path))
    i = np.arange(128)
    x = np.stack([((seed * 7919 + i * 104729) % 2001 - 1000) / 500 for seed in range(48)]).astype(np.float32)
    q, k, v = (x[side::3].reshape(1, 16, 4, 32) for side in range(3))
    out = attnmask.flash_attention(q, k, v, causal=True).reshape(16, 128)
    wanted = [(row[0], row[-1]) for row in out]
    np.testing.assert_allclose([list(map(float, line.split())) for line in lines], wanted, atol=2e-6)
    assert last.startswith("token 16: cache_seqlens must be tokens that the cache has room for")


def test_ctypes_without_the_package():
    module = runpy.run_path(str(EXAMPLES / "by_ctypes.py"))
    x = np.cos(np.arange(2 * 9 * 3 * 8)).astype(np.float32).reshape(2, 9, 3, 8)
    numbers = module["array"].array("f", x.tobytes())
    got = module["causal_attention"](c.library(), numbers, x.shape)
    wanted = attnmask.flash_attention(x, x, x, causal=True)
    np.testing.assert_allclose(np.array(got).reshape(x.shape), wanted, atol=1e-6)
    with pytest.raises(ValueError, match="are not of shape"):
        module["array_of"](numbers, 3, 3)
    library = c.built() / "libattnmask.so"
    assert len(printed(sys.executable, "-S", EXAMPLES / "by_ctypes.py", library)) == 6


GUIDE = ROOT / "docs/c.rst"


@pytest.mark.skipif(not GUIDE.exists(), reason="the tests run without the documentation")
def test_the_guide(tmp_path):
    blocks = re.findall(r"^\.\. code-block:: c\n\n((?:   .*\n|\n)+)", GUIDE.read_text(), re.M)
    program, part = (textwrap.dedent(block) for block in blocks)
    own = f"int part(const int32_t *document_of_token)\n{{{part}return mask.nodes != nodes;}}\n"
    (tmp_path / "program.c").write_text(program.replace("int main", f"{own}int main"))
    build = c.built()
    flags = [
        f"-I{ROOT}/include",
        f"-L{build}",
        "-lattnmask",
        f"-Wl,-rpath,{build}",
        "-Wall",
        "-Wextra",
        "-Werror",
    ]
    printed("cc", tmp_path / "program.c", *flags, "-o", tmp_path / "program")
    assert printed(tmp_path / "program") == []
