"""A tour of the library, every number computed on the spot: ``python -m attnmask``."""

import timeit
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import numpy as np

import attnmask


def line(name: str, cells: Iterable[object], cu_seqlens: list[int], width: int = 7) -> None:
    """Print one cell a token, and a bar where a sequence begins."""
    padded = [f"{cell!s:>{width}}" for cell in cells]
    sequences = ["".join(padded[begin:end]) for begin, end in pairwise(cu_seqlens)]
    print(f"  {name:14}{' │'.join(sequences)}")


def milliseconds(call: Callable[[], Any]) -> float:
    """Measure the best of nine rounds."""
    return 1e3 * min(timeit.repeat(call, number=1, repeat=9))


def packed_sequences() -> None:
    """Packed sequences: texts of any length laid end to end, the third one empty"""
    words = [text.split() for text in ("the cat sat on the mat", "it purred", "", "nobody minded at all")]
    cu_seqlens = [0, *np.cumsum([len(text) for text in words]).tolist()]
    positions, chunk = attnmask.prepare_position_ids(cu_seqlens), 4
    chunks = attnmask.prepare_chunk_indices(cu_seqlens, chunk)
    labels = iter(f"{sequence}.{number}" for sequence, number in chunks)
    line("tokens", (word for text in words for word in text), cu_seqlens)
    line("positions", positions, cu_seqlens)
    line("sequence ids", attnmask.prepare_sequence_ids(cu_seqlens), cu_seqlens)
    line(f"chunks of {chunk}", (next(labels) if p % chunk == 0 else "·" for p in positions), cu_seqlens)
    print(f"  cu_seqlens {cu_seqlens}, lengths {attnmask.prepare_lens(cu_seqlens).tolist()}, ", end="")
    print(f"chunks begin at {attnmask.prepare_chunk_offsets(cu_seqlens, chunk).tolist()}")


def running_sums() -> None:
    """Running sums: of twelve ones, whole, in chunks of 4, in sequences, and from the other end"""
    ones, whole, packed = np.ones((1, 12, 1)), [0, 12], [0, 7, 12]
    for name, chunk_size, cu_seqlens, reverse in (
        ("global", None, whole, False),
        ("local", 4, whole, False),
        ("packed", None, packed, False),
        ("packed local", 4, packed, False),
        ("  reversed", 4, packed, True),
    ):
        if chunk_size:
            sums = attnmask.chunk_local_cumsum(ones, chunk_size, reverse, cu_seqlens=cu_seqlens)
        else:
            sums = attnmask.chunk_global_cumsum(ones, reverse, cu_seqlens)
        line(name, sums.ravel().astype(int), cu_seqlens, width=4)


def accuracy() -> None:
    """Accuracy: a million steps in float32, the largest error as a share of the sum of absolute values"""
    x = np.random.default_rng(0).standard_normal((1, 1_000_000, 1), np.float32) + np.float32(0.5)
    exact, size = np.cumsum(x, 1, np.float64), np.cumsum(np.abs(x), 1, np.float64)
    for name, sums in (("attnmask", attnmask.chunk_global_cumsum(x)), ("NumPy", np.cumsum(x, 1))):
        print(f"  {name:14}{np.max(np.abs(sums - exact) / size):.1e}")


def speed() -> None:
    """Speed: milliseconds, results compared"""
    rng = np.random.default_rng(0)
    cu_seqlens = np.concatenate([[0], np.sort(rng.integers(0, 1_000_000, 9_999)), [1_000_000]])
    g = rng.random((8, 8192, 32), np.float32)

    def contest(name: str, ours: Callable[[], Any], numpys: Callable[[], Any]) -> None:
        np.testing.assert_allclose(ours(), numpys(), rtol=1e-4)
        here, there = milliseconds(ours), milliseconds(numpys)
        print(f"  {name:41}attnmask {here:6.2f}   NumPy {there:6.2f}{there / here:7.1f} times")

    contest(
        "positions of 1M tokens in 10k sequences",
        lambda: attnmask.prepare_position_ids(cu_seqlens),
        lambda: np.arange(1_000_000) - np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens)),
    )
    contest(
        "float32 [8, 8192, 32], sums over chunks",
        lambda: attnmask.chunk_local_cumsum(g, 64),
        lambda: g.reshape(8, 128, 64, 32).cumsum(2).reshape(g.shape),
    )
    contest("and over all", lambda: attnmask.chunk_global_cumsum(g), lambda: g.cumsum(1))


def main() -> None:
    config = attnmask.show_config(mode="dict") or {}
    print("attnmask {version}, {isa} kernels, threads: {threads}, {compiler}".format_map(config))
    for section in (packed_sequences, running_sums, accuracy, speed):
        print(f"\n{section.__doc__}")
        section()


if __name__ == "__main__":
    main()
