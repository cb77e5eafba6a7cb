"""Compares chunked cumulative sums with NumPy, torch and ejKernel, and with a copy of the same bytes.

python benchmarks/bench_cumsum.py [--quick] [--only TEXT] [--threads N]
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import harness
import numpy as np
from harness import Call, Times, digits, ejkernel, jax, ml_dtypes, race, torch

import attnmask

CHUNK = 64
SEQUENCES = 16
PEERS_MAY_ERR = (0.05, 0.05)  # relative to the sum, and to the sizes of steps


@dataclass(frozen=True)
class Case:
    """A row of the table. `shape` is [B, T, H] or [B, T, H, S] for both layouts."""

    shape: tuple[int, ...]
    chunk: int | None = CHUNK  # None for global sums
    reverse: bool = False
    packed: bool = False
    head_first: bool = False
    dtype: str = "float32"
    strided: bool = False  # memory has the other layout
    threads: int | None = None  # None for that of the report

    def __str__(self) -> str:
        words = [f"local {self.chunk}" if self.chunk else "global"]
        words += ["reverse"] * self.reverse + ["cu_seqlens"] * self.packed
        words += ["head_first"] * self.head_first + ["strided"] * self.strided
        words += [self.dtype] * (self.dtype != "float32")
        words += [f"{self.threads} thread"] * (self.threads is not None)
        return f"{list(self.arranged)} {', '.join(words)}"

    @property
    def arranged(self) -> tuple[int, ...]:
        b, t, h, *s = self.shape
        if self.packed:
            b, t = 1, b * t
        return (b, h, t, *s) if self.head_first else (b, t, h, *s)

    @property
    def axis(self) -> int:
        return 2 if self.head_first else 1

    @property
    def steps(self) -> int:
        return self.arranged[self.axis]

    @property
    def numpy_dtype(self) -> np.dtype:
        return np.dtype(ml_dtypes.bfloat16 if self.dtype == "bfloat16" else self.dtype)

    def cu_seqlens(self) -> np.ndarray | None:
        if not self.packed:
            return None
        cuts = np.random.default_rng(1).choice(np.arange(1, self.steps), SEQUENCES - 1, replace=False)
        return np.concatenate([[0], np.sort(cuts), [self.steps]])

    def segments(self) -> Iterator[tuple[int, int]]:
        """The range of each sum."""
        cu_seqlens = self.cu_seqlens()
        for begin, end in pairwise([0, self.steps] if cu_seqlens is None else cu_seqlens.tolist()):
            for start in range(begin, end, self.chunk or end - begin):
                yield start, min(end, start + (self.chunk or end - begin))

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """The same ranges, where equal neighbours are one block: its begin, its end, and the length of each."""
        cu_seqlens = self.cu_seqlens()
        for begin, end in pairwise([0, self.steps] if cu_seqlens is None else cu_seqlens.tolist()):
            chunk = self.chunk or end - begin
            whole = begin + (end - begin) // chunk * chunk
            if whole > begin:
                yield begin, whole, chunk
            if end > whole:
                yield whole, end, end - whole

    def data(self) -> np.ndarray:
        values = np.random.default_rng(0).random(self.arranged, np.float32)
        if self.strided:
            values = np.swapaxes(np.ascontiguousarray(np.swapaxes(values, 1, 2)), 1, 2)
        return values.astype(self.numpy_dtype, copy=False)

    def expected(self, g: np.ndarray) -> np.ndarray:
        """The sums in float64, segment by segment."""
        result = np.empty(g.shape)
        time_first, sums = np.moveaxis(g, self.axis, 0), np.moveaxis(result, self.axis, 0)
        step = -1 if self.reverse else 1
        for begin, end in self.segments():
            part = time_first[begin:end][::step].astype(np.float64, copy=False)
            np.cumsum(part, axis=0, out=sums[begin:end][::step])
        return result


def along(case: Case, begin: int, end: int) -> tuple[slice, ...]:
    return (slice(None),) * case.axis + (slice(begin, end),)


def split(case: Case, shape: tuple[int, ...], length: int) -> tuple[int, ...]:
    """The shape with time divided into chunks of `length`."""
    return (*shape[: case.axis], -1, length, *shape[case.axis + 1 :])


def numpy_call(case: Case, g: np.ndarray) -> tuple[Call, np.ndarray]:
    """One accumulate per block, into warm memory; in reverse by negative strides.

    Numbers of 16 bits are summed in 32 bits, as attnmask does.
    """
    wide = np.float32 if g.dtype.itemsize == 2 else g.dtype
    out = np.zeros(g.shape, wide)
    parts = []
    for begin, end, length in case.blocks():
        source, to = g[along(case, begin, end)], out[along(case, begin, end)]
        shape = split(case, source.shape, length)
        source, view = source.reshape(shape), to.reshape(shape, copy=False)
        back = (slice(None),) * (case.axis + 1) + (slice(None, None, -1 if case.reverse else 1),)
        parts.append((source[back], view[back]))

    def call() -> np.ndarray:
        for source, to in parts:
            np.cumsum(source, axis=case.axis + 1, dtype=wide, out=to)
        return out if wide == g.dtype else out.astype(g.dtype)

    return call, out


def torch_call(case: Case, g: np.ndarray) -> Call:
    bfloat16 = case.dtype == "bfloat16"  # torch does not take it from NumPy
    x = torch.from_numpy(g.view(np.int16)).view(torch.bfloat16) if bfloat16 else torch.from_numpy(g)
    out, axis = torch.zeros(g.shape, dtype=x.dtype), case.axis + 1
    parts = []
    for begin, end, length in case.blocks():
        source, to = x[along(case, begin, end)], out[along(case, begin, end)]
        shape = split(case, tuple(source.shape), length)
        parts.append((source.reshape(shape), to.view(shape)))

    def call() -> object:
        for source, to in parts:
            if case.reverse:
                to.copy_(source.flip(axis).cumsum(axis).flip(axis))
            else:
                torch.cumsum(source, axis, out=to)
        return out

    return call


def ejkernel_call(case: Case, g: np.ndarray) -> Call:
    x, cu_seqlens = jax.numpy.asarray(g), case.cu_seqlens()
    starts = None if cu_seqlens is None else jax.numpy.asarray(cu_seqlens)
    cumsum = ejkernel.cumsum
    options = {"reverse": case.reverse, "head_first": case.head_first}
    if not case.chunk:
        return lambda: cumsum.chunk_global_cumsum(x, cu_seqlens=starts, **options).block_until_ready()
    if case.packed:
        return lambda: cumsum.chunk_local_cumsum(
            x, case.chunk, cu_seqlens=starts, **options
        ).block_until_ready()
    form = cumsum.chunk_local_cumsum_scalar if g.ndim == 3 else cumsum.chunk_local_cumsum_vector
    return lambda: form(x, case.chunk, **options).block_until_ready()


def attnmask_call(case: Case, g: np.ndarray, out: np.ndarray | None) -> Call:
    options = {"reverse": case.reverse, "cu_seqlens": case.cu_seqlens(), "head_first": case.head_first}
    if case.chunk:
        return lambda: attnmask.chunk_local_cumsum(g, case.chunk, out=out, **options)
    return lambda: attnmask.chunk_global_cumsum(g, out=out, **options)


def close(result: object, expected: np.ndarray, relative: float, absolute: float = 0) -> bool:
    if torch and isinstance(result, torch.Tensor):
        result = result.to(torch.float64).numpy()
    return bool(np.allclose(np.asarray(result, np.float64), expected, rtol=relative, atol=absolute))


def contenders(case: Case, threads: int) -> dict[str, Call | str]:
    """The call of each contender; or a word why there is none."""
    g, out = case.data(), np.zeros(case.arranged, case.numpy_dtype)
    expected = case.expected(g)
    rounding = {"bfloat16": 2**-8, "float16": 2**-10, "float32": 1e-6, "float64": 1e-14}[case.dtype]
    calls: dict[str, Call | str] = {
        "attnmask": attnmask_call(case, g, out),
        "fresh": attnmask_call(case, g, None),
        "memcpy": harness.memcpy(out, g, threads),
    }
    for name in ("attnmask", "fresh"):
        assert close(calls[name](), expected, rounding), f"{name} is wrong: {case}"
    makers = {"NumPy": lambda: numpy_call(case, g)[0]}
    if torch:
        makers["torch"] = lambda: torch_call(case, g)
    if ejkernel:
        makers["ejKernel"] = lambda: ejkernel_call(case, g)
    for name, make in makers.items():
        try:
            calls[name] = make()
            if not close(calls[name](), expected, *PEERS_MAY_ERR):
                calls[name] = "wrong"
        except Exception as error:
            calls[name] = "fails" if name == "ejKernel" else f"fails: {error}"
    return calls


def measure(case: Case, report: harness.Report, options: object) -> None:
    threads = case.threads or options.threads
    harness.use_threads(threads)
    calls = contenders(case, threads)
    if case.threads and callable(calls.get("ejKernel")):
        del calls["ejKernel"]  # its threads are JAX's own
    times: dict[str, Times] = race({n: c for n, c in calls.items() if callable(c)}, options.seconds)
    harness.use_threads(options.threads)
    peers = [times[name] for name in ("NumPy", "torch", "ejKernel") if name in times]
    best = min(peers, key=lambda t: t.median)
    nbytes = int(np.prod(case.shape)) * case.numpy_dtype.itemsize
    ours = times["attnmask"]
    report.row(
        case,
        ours,
        digits(1e3 * ours.best),
        digits(nbytes / ours.median / 1e9),
        times["memcpy"],
        f"{100 * times['memcpy'].ratio_to(ours):.0f}%",
        times["fresh"],
        *(times.get(name) or calls.get(name) for name in ("NumPy", "torch", "ejKernel")),
        digits(best.ratio_to(ours)),
    )


def tables() -> Iterator[tuple[str, list[Case]]]:
    for shape in ((8, 8192, 32), (2, 4096, 8, 64), (8, 65536, 64)):
        yield (
            f"float32 {list(shape)}: {4 * int(np.prod(shape)) >> 20} MiB to read, as many to write",
            [
                Case(shape, chunk, reverse, packed, head_first)
                for head_first in (False, True)
                for packed in (False, True)
                for chunk in (CHUNK, None)
                for reverse in (False, True)
            ],
        )
    plain = Case((8, 8192, 32))
    yield (
        "16 bits",
        [
            replace(plain, dtype=dtype, chunk=chunk, shape=shape)
            for shape in ((8, 8192, 32), (8, 65536, 64))
            for dtype in ("bfloat16", "float16")
            for chunk in (CHUNK, None)
        ],
    )
    yield (
        "Their neighbours",
        [
            replace(plain, shape=(8, 8192, 7)),
            replace(plain, shape=(8, 8191, 32)),
            replace(plain, shape=(8, 8191, 32), chunk=None, head_first=True),
            replace(plain, strided=True),
            replace(plain, strided=True, head_first=True),
            replace(plain, threads=1),
            replace(plain, threads=1, chunk=None),
            replace(plain, dtype="float64"),
            replace(plain, dtype="float64", chunk=None),
            replace(plain, chunk=16),
            replace(plain, chunk=16, head_first=True),
            replace(plain, shape=(1, 1_000_000, 1), chunk=None),
            replace(plain, shape=(1, 1_000_000, 1), chunk=None, head_first=True),
        ],
    )


def main() -> None:
    options = harness.arguments(__doc__)
    report = harness.Report("cumsum", "Chunked cumulative sums", options)
    report.text(
        "Milliseconds, median over the rounds (`best`: the fastest); `~` marks rounds that differ widely or that "
        "other processes disturbed. `GB/s` counts each byte of the result once. `memcpy` copies the same bytes into "
        "the same `out=` with the same threads; `of memcpy` is the share of its speed. `fresh` is the call without "
        "`out=`. Peers write into a warm array where they can; `wrong` and `fails` are what they do with this case. "
        "`ratio`: how many times faster than the best of them. "
        f"cu_seqlens: {SEQUENCES} sequences of all lengths, batch folded to 1."
    )
    for title, cases in tables():
        chosen = [case for case in cases if options.only in str(case)]
        if not chosen:
            continue
        report.heading(title)
        columns = (
            "attnmask",
            "best",
            "GB/s",
            "memcpy",
            "of memcpy",
            "fresh",
            "NumPy",
            "torch",
            "ejKernel",
            "ratio",
        )
        report.table("case", *columns)
        for case in chosen:
            measure(case, report, options)
        report.end_table()
    report.write()


if __name__ == "__main__":
    main()
