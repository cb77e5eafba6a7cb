"""The promises of docs/promises.rst: each names a test that exists, and here are those that no other file has."""

import ast
import os
import re
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import numpy as np
import pytest
from calls import some_calls
from environment import ROOT, SANITIZED, import_paths, python

import attnmask
from attnmask import MaskInfo

TESTS = ROOT / "tests"
PAGE = ROOT / "docs" / "promises.rst"


@pytest.mark.skipif(not PAGE.exists(), reason="the tests run without the documentation")
def test_every_promise_names_a_test_that_exists():
    rows = re.findall(
        r"^   \* - (.*(?:\n       .*)*)\n     - (.*(?:\n       .*)*)$", PAGE.read_text("utf-8"), re.M
    )
    rows = [row for row in rows if row != ("Promise", "Test")]
    assert len(rows) > 25
    known = {
        f"{path.relative_to(TESTS)}::{node.name}"
        for path in TESTS.rglob("test_*.py")
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    for promise, tests in rows:
        named = re.findall(r"``(\S+?::\S+?)``", tests)
        assert named, promise
        assert set(named) <= known, promise


def test_inputs_are_read_in_place():
    """Calls on large inputs of odd strides take no memory but that of their results."""
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((1, 4, 64, 40_000), np.float32).transpose(0, 3, 1, 2)[:, ::-2]
    query, mask = tokens[:, -4:], np.ones((40_000, 2_000), bool).T[::-1, ::2]
    calls = [
        lambda: attnmask.flash_attention(query, tokens, tokens),
        lambda: attnmask.chunk_global_cumsum(tokens, out=sums),
        lambda: attnmask.prepare_lens_from_mask(mask),
        lambda: MaskInfo(mask[None]).density(),
        lambda: attnmask.mask_to_segment_ids(mask),
    ]
    sums = np.empty(tokens.shape, np.float32)
    tracemalloc.start()
    try:
        for index, call in enumerate(calls):
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            call()
            assert tracemalloc.get_traced_memory()[1] - before < 2 << 20, index
    finally:
        tracemalloc.stop()


def test_sixteen_callers_get_the_bits_of_one(set_threads):
    """For some seconds (ATTNMASK_TEST_SECONDS), in any order, with a mask that all of them share."""
    seconds = float(os.environ.get("ATTNMASK_TEST_SECONDS", 3))
    info = MaskInfo.from_segments(np.repeat(np.arange(8), 32)[None]).apply_causal()
    tokens = np.random.default_rng(0).standard_normal((1, 256, 4, 16), np.float32)

    def gradients():
        return attnmask.flash_attention_vjp(tokens, tokens, tokens, info)[1](tokens).key

    calls = [*some_calls(), gradients, lambda: attnmask.flash_attention(tokens, tokens, tokens, info)]
    calls += [
        lambda: (~info).attention_mask,
        lambda: info.apply_sliding_window(9).get_or_compute_attention_mask(),
    ]
    set_threads(1)
    expected = [call().tobytes() for call in calls]
    set_threads(3)
    end = monotonic() + seconds

    def work(seed: int) -> list[int]:
        rng, wrong = np.random.default_rng(seed), []
        while monotonic() < end:
            index = int(rng.integers(len(calls)))
            if calls[index]().tobytes() != expected[index]:
                wrong.append(index)
        return wrong

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(work, range(16))) == [[]] * 16


SUBINTERPRETER = """
import attnmask
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
number = interpreters.create()
code = '''
try:
    import attnmask
except ImportError as error:
    print("refused:", bool(str(error)))
'''
problem = interpreters.run_string(number, code)
print(problem, attnmask.prepare_lens([0, 2]))
"""


@pytest.mark.skipif(SANITIZED, reason="it imports NumPy twice")
def test_a_subinterpreter_gets_an_import_error():
    """NumPy refuses to be loaded a second time; the main interpreter goes on."""
    result = python(SUBINTERPRETER, "-W", "ignore", timeout=200, **import_paths())
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["refused: True", "None [2]"], result.stderr
