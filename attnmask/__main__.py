"""Show what the library does, with every number computed on the spot: ``python -m attnmask``."""

import argparse
import math
import os
import resource
import shutil
import sys
import textwrap
import time
import timeit
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

import attnmask
from attnmask import MaskInfo
from attnmask._common.types import Array
from attnmask._masks import render

TEXTS = ("the cat sat on it", "it ran", "we all saw")
WORDS = " ".join(TEXTS).split()
CU_SEQLENS = [0, *np.cumsum([len(text.split()) for text in TEXTS]).tolist()]
ASCII = str.maketrans("█·│", "#.|")


# Lines


def width() -> int:
    return max(20, min(80, shutil.get_terminal_size().columns))


def put(line: str, end: str = "\n") -> None:
    try:
        line.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        line = line.translate(ASCII)
    print(line, end=end)


def say(text: str) -> None:
    """Print a paragraph, folded."""
    put(textwrap.fill(text, width(), initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False))


def code(line: str) -> None:
    """Print a call, with its arguments on the next line where one is too short."""
    call, bracket, arguments = line.partition("(")
    for part in [line] if 2 + len(line) <= width() else [call + bracket, "    " + arguments]:
        put("  " + part)


def heading(text: str) -> None:
    bold = render.takes_colours(sys.stdout)
    for line in textwrap.wrap(text, width(), subsequent_indent="   "):
        put(f"\033[1m{line}\033[0m" if bold else line)


def table(*rows: Sequence[str]) -> None:
    """Print names at the left and numbers at the right, or below their names where a line is too short for both."""
    names, *columns = ([len(cell) for cell in column] for column in zip(*rows, strict=True))
    cells = [
        "".join(f"  {cell:>{max(column)}}" for cell, column in zip(row[1:], columns, strict=True))
        for row in rows
    ]
    fits = 2 + max(names) + len(cells[0]) <= width()
    for (name, *_), numbers in zip(rows, cells, strict=True):
        if fits:
            put(f"  {name:{max(names)}}{numbers}")
        else:
            if name:
                say(name)
            put(f"    {numbers}")


# Measures


def numpy_attention(query: Array, key: Array, value: Array, live: NDArray[np.bool_] | bool) -> Array:
    """Softmax attention with all logits at once, worked on in place."""
    query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))  # [B, H, T, D]
    logits = query / math.sqrt(query.shape[-1]) @ key.swapaxes(2, 3)
    np.copyto(logits, -np.inf, where=np.logical_not(live))
    logits -= logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits, out=logits)
    result: Array = weights @ value / weights.sum(axis=-1, keepdims=True)
    return result.swapaxes(1, 2)


def best_ms(call: Callable[[], object]) -> float:
    return 1e3 * min(timeit.repeat(call, number=1, repeat=3))


def memory(field: str) -> int:
    """Bytes that this process holds (VmRSS) or has held at most (VmHWM): on Linux getrusage may tell its parent's."""
    try:
        with open("/proc/self/status") as status:
            return next(1024 * int(line.split()[1]) for line in status if line.startswith(field))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# Sections: a docstring is a heading.


def small_mask() -> MaskInfo:
    return MaskInfo.from_cu_seqlens(CU_SEQLENS, packed=True).apply_causal().apply_sliding_window((2, 0))


def mask() -> None:
    """A mask says which word may attend to which: three texts, packed into one row"""
    info = small_mask()
    live = info.attention_mask[0, 0]
    cell = max(1, min(4, (width() - 8) // len(WORDS)))
    block = max(1, cell - 1)
    put(" " * 8 + "".join(f"{word[:block]:{cell}}" for word in WORDS).rstrip())
    coloured = render.takes_colours(sys.stdout)
    for word, row, text in zip(WORDS, live, info.q_segment_ids[0], strict=True):
        full, empty = "█" * block + " " * (cell - block), f"{'·':{cell}}"
        if coloured:
            full = render.painted(full, render.PALETTE[text])
        put(f"  {word:6}{''.join(full if seen else empty for seen in row).rstrip()}")
    np.testing.assert_equal(live.mean(), info.density())
    code(f"mask = MaskInfo.from_cu_seqlens({CU_SEQLENS}, packed=True)")
    code("mask = mask.apply_causal()")
    code("mask = mask.apply_sliding_window((2, 0))")
    say(
        "█: the word at the left may attend to the word above: of its own text, not ahead (causal), two back at most "
        f"(window). That is {info.density():.0%} of all pairs."
    )


def attention() -> None:
    """Attention over such a mask, beside plain NumPy"""
    tokens, heads = 4096, 4
    query, key, value = np.random.default_rng(0).standard_normal((3, 1, tokens, heads, 64), np.float32)
    info = MaskInfo.from_cu_seqlens([0, 1500, 1600, tokens], packed=True).apply_causal()
    info = info.apply_sliding_window((255, 0))
    live = info.attention_mask
    calls: dict[str, Callable[[], Array]] = {
        "attnmask": lambda: attnmask.flash_attention(query, key, value, info),
        "NumPy": lambda: numpy_attention(query, key, value, live),
    }
    results, added = [], []
    for call in calls.values():  # the lower peak first: it would not show after the higher one
        before = memory("VmRSS")
        results.append(call())
        added.append(f"{(memory('VmHWM') - before) / 1e6:,.0f} MB")
    difference = np.abs(results[0] - results[1]).max()
    np.testing.assert_array_less(difference, 1e-5)
    say(
        f"{tokens:,} tokens in 3 documents, a window of 256, {heads} heads of 64 channels, float32. NumPy "
        "computes all pairs; flash_attention skips what the mask leaves out."
    )
    code("attnmask.flash_attention(query, key, value, mask)")
    table(
        ("", "time", "memory"),
        *(
            (name, f"{best_ms(call):,.1f} ms", size)
            for (name, call), size in zip(calls.items(), added, strict=True)
        ),
    )
    say(
        f"The results differ by {difference:.0e} at most. Memory is what the first call added to the process at its "
        f"peak, with the result of {results[0].nbytes / 1e6:.0f} MB."
    )


def nan() -> None:
    """NaN in one text does not reach the others"""
    info, bad = small_mask(), slice(*CU_SEQLENS[1:3])
    query, key, value = np.random.default_rng(0).standard_normal((3, 1, len(WORDS), 1, 8))
    clean = attnmask.flash_attention(query, key, value, info)
    key[:, bad] = value[:, bad] = np.nan
    ours = attnmask.flash_attention(query, key, value, info)
    with np.errstate(invalid="ignore"):
        numpys = numpy_attention(query, key, value, info.attention_mask)
    clean, ours, numpys = (np.delete(result, bad, axis=1) for result in (clean, ours, numpys))
    np.testing.assert_array_equal(ours, clean)
    lost = [f"{np.isnan(result).any(axis=(2, 3)).sum()} of {result.shape[1]}" for result in (ours, numpys)]
    say(f'Keys and values of "{TEXTS[1]}" are now NaN. Other words whose result is NaN:')
    say(f"attnmask  {lost[0]}, and none has changed at all")
    say(f"NumPy     {lost[1]}, as a weight of zero times NaN is NaN")


def gradients() -> None:
    """Gradients, checked against small steps of the input in float64"""
    info, step, rng = small_mask(), 1e-5, np.random.default_rng(0)
    inputs = dict(zip(("query", "key", "value"), rng.standard_normal((3, 1, len(WORDS), 2, 4)), strict=True))
    out, vjp = attnmask.flash_attention_vjp(**inputs, attention_mask=info)
    dout = rng.standard_normal(out.shape)
    grads = vjp(dout)

    def loss() -> float:
        return float(np.vdot(attnmask.flash_attention(**inputs, attention_mask=info), dout))

    say(
        "flash_attention_vjp returns the result and a gradient function. Here is one number of each gradient, both "
        f"ways, and the largest gap among all {out.size}:"
    )
    rows: list[tuple[str, ...]] = [("", "gradient", "small steps", "gap")]
    for name, array in inputs.items():
        exact, numeric = getattr(grads, name), np.empty_like(array)
        for place, number in np.ndenumerate(array):
            array[place] = number + step
            above = loss()
            array[place] = number - step
            numeric[place] = (above - loss()) / (2 * step)
            array[place] = number
        np.testing.assert_allclose(exact, numeric, rtol=1e-6, atol=1e-8)
        shown = [f"{numbers[0, 2, 0, 0]:.6f}" for numbers in (exact, numeric)]
        rows.append((name, *shown, f"{np.abs(exact - numeric).max():.0e}"))
    table(*rows)


def long_context() -> None:
    """A long context: 32,768 tokens, each attends to the last 4,096"""
    tokens, heads, window = 32768, 6, 4096
    arrays = np.random.default_rng(0).standard_normal((3, 1, tokens, heads, 64), np.float32)
    out, terminal = np.empty_like(arrays[0]), sys.stdout.isatty()
    begin = time.perf_counter()
    for head in range(heads):
        if terminal:
            put(f"\r  head {head + 1} of {heads}, {time.perf_counter() - begin:.1f} s", end="")
            sys.stdout.flush()
        query, key, value = arrays[..., head : head + 1, :]
        result = attnmask.flash_attention(query, key, value, causal=True, sliding_window=(window - 1, 0))
        out[..., head : head + 1, :] = result
    seconds = time.perf_counter() - begin
    for row in (0, window - 1, window, tokens - 1):
        query, key, value = arrays[0][:, row : row + 1], *arrays[1:, :, max(0, row - window + 1) : row + 1]
        np.testing.assert_allclose(out[:, row : row + 1], numpy_attention(query, key, value, True), atol=1e-5)
    if terminal:
        put("\r" + " " * (width() - 1) + "\r", end="")
    say(
        f"{heads} heads with head_dim 64, one by one, took {seconds:.1f} s; sampled rows agree with NumPy. "
        f"All logits at once would need {heads * tokens**2 * 4 / 1e9:.0f} GB."
    )


def by_sequence(cells: Array) -> str:
    """One cell a token, and a bar where a sequence begins."""
    shown = [str(cell) for cell in cells.ravel().astype(int)]
    return " │ ".join(" ".join(shown[begin:end]) for begin, end in pairwise(CU_SEQLENS))


def running_sums() -> None:
    """Positions and running sums within each text, and the speed of such calls"""
    ones = np.ones((1, len(WORDS), 1))
    cells = {
        "positions": attnmask.prepare_position_ids(CU_SEQLENS),
        "sequence ids": attnmask.prepare_sequence_ids(CU_SEQLENS),
        "sums of ones": attnmask.chunk_global_cumsum(ones, cu_seqlens=CU_SEQLENS),
        "in chunks of 2": attnmask.chunk_local_cumsum(ones, 2, cu_seqlens=CU_SEQLENS),
    }
    table(*((name, by_sequence(row)) for name, row in cells.items()))

    x = np.random.default_rng(0).standard_normal((1, 1_000_000, 1), np.float32) + np.float32(0.5)
    exact, size = np.cumsum(x, 1, np.float64), np.cumsum(np.abs(x), 1, np.float64)
    ours, numpys = (
        np.max(np.abs(sums - exact) / size) for sums in (attnmask.chunk_global_cumsum(x), np.cumsum(x, 1))
    )
    np.testing.assert_array_less(ours, 1e-6)

    starts = np.concatenate(
        [[0], np.sort(np.random.default_rng(0).integers(0, 1_000_000, 9_999)), [1_000_000]]
    )
    g = np.random.default_rng(0).random((8, 8192, 32), np.float32)
    races: dict[str, tuple[Callable[[], Array], Callable[[], Array]]] = {
        "positions of 1M tokens in 10k sequences": (
            lambda: attnmask.prepare_position_ids(starts),
            lambda: np.arange(1_000_000) - np.repeat(starts[:-1], np.diff(starts)),
        ),
        "sums of [8, 8192, 32] in chunks of 64": (
            lambda: attnmask.chunk_local_cumsum(g, 64),
            lambda: g.reshape(8, 128, 64, 32).cumsum(2).reshape(g.shape),
        ),
        "sums of [8, 8192, 32] over all tokens": (
            lambda: attnmask.chunk_global_cumsum(g),
            lambda: g.cumsum(1),
        ),
    }
    rows: list[tuple[str, ...]] = [("", "attnmask", "NumPy")]
    for name, calls in races.items():
        np.testing.assert_allclose(calls[0](), calls[1](), rtol=1e-4)
        rows.append((name, *(f"{best_ms(call):.2f} ms" for call in calls)))
    rows.append(("relative error of 1M float32 sums", f"{ours:.0e}", f"{numpys:.0e}"))
    table(*rows)


def next_steps() -> None:
    """What to try next"""
    say(
        "help(attnmask.flash_attention) and help(attnmask.MaskInfo) list all arguments. README.md compares speeds, "
        "examples/ has a tour with pictures and a language model, and `make docs` builds the reference."
    )


SECTIONS = (mask, attention, nan, gradients, long_context, running_sums, next_steps)


def show(sections: Sequence[Callable[[], None]] = SECTIONS) -> None:
    config = attnmask.show_config(mode="dict") or {}
    heading("attnmask: exact attention for NumPy, on the CPU")
    say("Version {version}, {isa} kernels, threads: {threads}, built by {compiler}.".format_map(config))
    for number, section in enumerate(sections, 1):
        put("")
        heading(f"{number}. {section.__doc__}")
        section()
        sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m attnmask", argparse.SUPPRESS, "Show what the library does. It takes no arguments."
    )
    parser.parse_args()
    if sys.stdout is None:
        parser.error("there is no output to write to")
    status = 0
    try:
        try:
            show()
        except KeyboardInterrupt:
            status = 130  # what a shell reports of a program that SIGINT ended
            put("")
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # whose readers have seen what they wanted
            print(f"{parser.prog}: error: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at exit
        status = status or 1
    return status


if __name__ == "__main__":
    sys.exit(main())
