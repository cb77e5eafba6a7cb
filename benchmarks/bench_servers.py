"""Scaling over the cores of a server, beside what plain C gains from as many threads, and tiles beside PyTorch.

python benchmarks/bench_servers.py [--quick] [--only TEXT] [--threads N]

Runs all cases with 1, 2, 4, … N threads, and says which bars are met. Each case has a yardstick that runs beside it
with as many threads: multiplying (attention), reading (caches, segments), or copying (sums, masks). Results must have
the same bits for any number of threads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import harness
import numpy as np
from harness import Report, digits, memcpy, multiply, native, percent, race, read, torch, use_threads

import attnmask

BF16 = harness.ml_dtypes.bfloat16 if harness.ml_dtypes else None
BYTES = 64 << 20  # that yardsticks read or copy, for each thread
GAIN, READ, COPY = 0.9, 0.85, 0.8  # bars: of the yardstick's gain from threads; of its rate
TILES, TILES_WITH_GRADIENTS = 0.25, 0.15  # of the peak of tiles
TORCH, TORCH_WITH_GRADIENTS = 1.5, 3.0  # times as fast as PyTorch
rng = np.random.default_rng(0)


@dataclass
class Case:
    name: str
    kind: str  # of its yardstick: float32, bfloat16, read or copy
    bar: float
    make: Callable[[], tuple[Callable[[], Any], float]]  # the call, and what it works: operations or bytes


def inputs(tokens: int, heads: tuple[int, int], depth: int, dtype: Any, batch: int = 1) -> list[np.ndarray]:
    return [
        rng.standard_normal((batch, tokens, h, depth), np.float32).astype(dtype)
        for h in (heads[0], *heads[1:] * 2)
    ]


def attention(
    tokens: int,
    heads: tuple[int, int],
    depth: int,
    dtype: Any,
    live: float,
    gradients: bool = False,
    **options: Any,
) -> Callable[[], tuple[Callable[[], Any], float]]:
    """A call whose share `live` of all pairs is live; 4 operations per channel of each, and 10 more with gradients."""

    def make() -> tuple[Callable[[], Any], float]:
        q, k, v = inputs(tokens, heads, depth, dtype)
        work = (14 if gradients else 4) * depth * heads[0] * live * tokens**2
        if not gradients:
            out = np.empty_like(q)
            return lambda: attnmask.flash_attention(q, k, v, out=out, **options), work

        def both() -> np.ndarray:
            _, vjp = attnmask.flash_attention_vjp(q, k, v, **options)
            return vjp(q).key

        return both, work

    return make


def decode(lengths: Any, page: int = 64) -> Callable[[], tuple[Callable[[], Any], float]]:
    """One query of each cache in pages that lie anywhere: 32 heads that share 8."""

    def make() -> tuple[Callable[[], Any], float]:
        tokens = np.asarray(lengths, np.int32)
        pages = -(-tokens // page)
        ends = np.cumsum(pages)
        k, v = (rng.standard_normal((ends[-1], page, 8, 128), np.float32).astype(BF16) for _ in range(2))
        places = rng.permutation(ends[-1]).astype(np.int32)
        table = np.zeros((len(tokens), pages.max()), np.int32)
        for row, end, count in zip(table, ends, pages, strict=True):
            row[:count] = places[end - count : end]
        q = rng.standard_normal((len(tokens), 1, 32, 128), np.float32).astype(BF16)
        call = lambda: attnmask.flash_attention_with_kvcache(q, k, v, cache_seqlens=tokens, block_table=table)  # noqa: E731
        return call, 2.0 * float(tokens.sum()) * 8 * 128 * 2

    return make


def filled(tokens: int) -> tuple[Callable[[], Any], float]:
    ids = np.repeat(np.arange(16, dtype=np.int32), tokens // 16)[None]
    mask = attnmask.MaskInfo.from_segments(ids).apply_causal()
    out = np.empty((1, 1, tokens, tokens), bool)
    return lambda: mask.get_or_compute_attention_mask(bool, out=out), 2.0 * out.nbytes


def segments(tokens: int) -> tuple[Callable[[], Any], float]:
    dense = np.kron(np.eye(16, dtype=bool), np.ones((tokens // 16,) * 2, bool))[None]
    return lambda: attnmask.mask_to_segment_ids(dense)[0], float(dense.nbytes)


def sums(function: Callable[..., np.ndarray], *more: int) -> tuple[Callable[[], Any], float]:
    array = rng.standard_normal((8, 65536, 64), np.float32)
    out = np.empty_like(array)
    return lambda: function(array, *more, out=out), 2.0 * array.nbytes


def cases(shrink: int) -> list[Case]:
    f32, n, causal = np.float32, 4096 // shrink, {"causal": True}
    cu = np.arange(17, dtype=np.int32) * (8192 // shrink // 16)
    documents = causal | {"cum_seqlens_q": cu, "cum_seqlens_k": cu}
    window = causal | {"sliding_window": (255, 0)}
    found = [
        Case("causal, 16 heads, D=64", "float32", GAIN, attention(n, (16, 16), 64, f32, 0.5, **causal)),
        Case(
            "16 documents, 8 heads", "float32", GAIN, attention(2 * n, (8, 8), 64, f32, 1 / 32, **documents)
        ),
        Case("window of 256, 8 heads", "float32", GAIN, attention(2 * n, (8, 8), 64, f32, 128 / n, **window)),
        Case("one head, causal", "float32", GAIN, attention(2 * n, (1, 1), 64, f32, 0.5, **causal)),
        Case("gradients, causal", "float32", GAIN, attention(n // 2, (16, 16), 64, f32, 0.5, True, **causal)),
        Case(
            "gradients, documents",
            "float32",
            GAIN,
            attention(2 * n, (8, 8), 64, f32, 1 / 32, True, **documents),
        ),
        Case("gradients, one head", "float32", GAIN, attention(2 * n, (1, 1), 64, f32, 0.5, True, **causal)),
        Case("mask of 8,192²", "copy", COPY, lambda: filled(2 * n)),
        Case("mask_to_segment_ids", "read", COPY, lambda: segments(2 * n)),
        Case("chunk_local_cumsum", "copy", COPY, lambda: sums(attnmask.chunk_local_cumsum, 64)),
        Case("chunk_global_cumsum", "copy", COPY, lambda: sums(attnmask.chunk_global_cumsum)),
    ]
    if BF16:
        long, ragged = 32768 // shrink, np.geomspace(64, 16384 // shrink, 32).astype(int)
        gqa = attention(n, (32, 8), 128, BF16, 0.5, **causal)
        found += [
            Case("bfloat16 heads 32/8, D=128", "bfloat16", GAIN, gqa),
            Case("decode, 1 × 32,768", "read", READ, decode([long])),
            Case("decode, 64 × 4,096", "read", READ, decode([n] * 64)),
            Case("decode, 32 × 64 … 16,384", "read", READ, decode(ragged)),
        ]
    return found


def yardstick(kind: str, threads: int) -> tuple[Callable[[], Any], float]:
    """Return a call of plain C with so many threads, and its operations or bytes."""
    if kind in ("read", "copy"):
        source = np.ones(BYTES * threads, np.uint8)
        if kind == "read":
            return read(source, threads), float(source.nbytes)
        return memcpy(np.ones_like(source), source, threads), 2.0 * source.nbytes
    return multiply(kind, threads)


def scaling(report: Report, found: list[Case], counts: list[int], seconds: float) -> None:
    report.heading("Scaling")
    report.text(
        "GFLOP/s of live pairs, or GB/s. Share: of attention, its gain from threads by that of multiplying; else its "
        "rate by that of reading or copying."
    )
    report.table("case", *map(str, counts), "gain", "share", "bar", "met")
    for case in found:
        call, work = case.make()
        rates, shares, wanted = [], [], None
        for threads in counts:
            use_threads(threads)
            bits = np.array(call()).tobytes()
            assert wanted in (None, bits), f"{case.name}: {threads} threads give other bits"
            wanted = bits
            beside, beside_work = yardstick(case.kind, threads)
            times = race({"new": call, "yardstick": beside}, seconds, ["yardstick"])
            rates.append(work / times["new"].median)
            shares.append(rates[-1] / (beside_work / times["yardstick"].median))
        share = shares[-1] / shares[0] if case.bar == GAIN else shares[-1]
        met = share >= case.bar and all(rates[-1] >= 0.98 * rate for rate in rates)
        cells = [*(digits(rate / 1e9) for rate in rates), f"{rates[-1] / rates[0]:.1f}×"]
        report.row(case.name, *cells, percent(share), percent(case.bar), "yes" if met else "no")
    report.end_table()


def tiles(report: Report, shrink: int, threads: int, seconds: float) -> None:
    """Attention in bfloat16 beside the peak of the processor's own products, and PyTorch."""
    report.heading(f"bfloat16, {threads} threads")
    bars = f"Bars, where there are tiles (AMX): {percent(TILES)} of the peak and {TORCH} × PyTorch, with gradients "
    report.text(bars + f"{percent(TILES_WITH_GRADIENTS)} and {TORCH_WITH_GRADIENTS} ×.")
    report.table("case", "GFLOP/s", "of the peak", "× PyTorch")
    use_threads(threads)
    peak, operations = multiply("bfloat16", threads)
    tokens = 4096 // shrink
    for gradients in (False, True):
        for depth in (64, 128):
            for causal in (False, True):
                live = 0.5 if causal else 1.0
                make = attention(tokens, (16, 16), depth, BF16, live, gradients, causal=causal)
                call, work = make()
                calls = {"new": call, "peak": peak}
                if torch:
                    calls["torch"] = beside_torch(tokens, depth, causal, gradients)
                times = race(calls, seconds, ["peak"])
                rate, most = work / times["new"].median, operations / times["peak"].median
                ratio = f"{times['torch'].ratio_to(times['new']):.2f}" if torch else None
                name = f"D={depth}, {'causal' if causal else 'full'}{', with gradients' if gradients else ''}"
                report.row(name, digits(rate / 1e9), percent(rate / most), ratio)
    report.end_table()


def beside_torch(tokens: int, depth: int, causal: bool, gradients: bool) -> Callable[[], Any]:
    q, k, v = (
        torch.randn(1, 16, tokens, depth, dtype=torch.bfloat16).requires_grad_(gradients) for _ in range(3)
    )

    def call() -> Any:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return torch.autograd.grad(out, (q, k, v), torch.ones_like(out)) if gradients else out

    return call


def main() -> None:
    options = harness.arguments(__doc__.splitlines()[0])
    report = Report("servers", "On a server", options)
    for name, value in attnmask.show_config(mode="dict").items():
        if name in ("processors", "cores", "memory_nodes", "isa"):
            report.text(f"{name}: {value}")
    counts = [2**i for i in range(20) if 2**i < options.threads] + [options.threads]
    shrink = 8 if options.quick else 1
    found = [case for case in cases(shrink) if options.only in case.name]
    scaling(report, found, counts, options.seconds / len(counts))
    if BF16 and native and not options.only:
        tiles(report, shrink, options.threads, options.seconds)
    report.write()


if __name__ == "__main__":
    main()
