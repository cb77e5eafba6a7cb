"""Compares caches for decoding: pages of several sizes, and types of eight bits, with a contiguous cache.

python benchmarks/bench_kvcache.py [--quick] [--only TEXT] [--threads N]
"""

import harness
import ml_dtypes
import numpy as np
from harness import Call, race

import attnmask

HEADS, KV_HEADS, DEPTH = 32, 8, 128
TYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int8": np.dtype(np.int8),
    "float8": np.dtype(ml_dtypes.float8_e4m3fn),
}
SIZES = (16, 64, 256)
FORMATS = (("int8", "token"), ("int8", "channel"), ("float8", "token"), ("float8", "channel"))


def paged(cache: np.ndarray, size: int, order: np.ndarray) -> np.ndarray:
    """The same tokens in pages that lie in this order."""
    pages = np.empty((len(order), size, *cache.shape[2:]), cache.dtype)
    pages[order] = cache.reshape(len(order), size, *cache.shape[2:])
    return pages


def pages(batch: int, keys: int, queries: int, name: str, seconds: float) -> list[object]:
    """A row: `flash_attention` over contiguous keys, and the function over a contiguous cache and pages."""
    rng, dtype = np.random.default_rng(0), TYPES[name]
    query = rng.standard_normal((batch, queries, HEADS, DEPTH), np.float32).astype(dtype)
    key, value = (
        rng.standard_normal((batch, keys, KV_HEADS, DEPTH), np.float32).astype(dtype) for _ in range(2)
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
    """A row: tokens a second in each type relative to bfloat16, with a scale for each token, or each channel."""
    rng = np.random.default_rng(0)
    query = rng.standard_normal((batch, 1, HEADS, DEPTH), np.float32).astype(TYPES["bfloat16"])
    key, value = (rng.standard_normal((batch, keys, KV_HEADS, DEPTH), np.float32) for _ in range(2))
    narrow = [x.astype(TYPES["bfloat16"]) for x in (key, value)]
    out = np.empty_like(query)
    calls: dict[str, Call] = {
        "bfloat16": lambda: attnmask.flash_attention_with_kvcache(query, *narrow, out=out)
    }
    exact = calls["bfloat16"]().astype(np.float32)
    for name, scale in FORMATS:
        axis = -1 if scale == "token" else (0, 1)
        (k, k_scale), (v, v_scale) = (attnmask.quantize_kv(x, TYPES[name], axis) for x in (key, value))
        given = {"k_cache": k, "v_cache": v, "k_scale": k_scale, "v_scale": v_scale}
        call = calls[f"{name}, {scale}"] = lambda given=given: attnmask.flash_attention_with_kvcache(
            query, **given, out=out
        )
        assert abs(call().astype(np.float32) - exact).max() < 0.1
    times = race(calls, seconds)
    ratios = [f"{times['bfloat16'].ratio_to(times[name]):.2f}" for name in calls if name != "bfloat16"]
    return [f"{batch} × {keys:,}", times["bfloat16"], *ratios]


def main() -> None:
    options = harness.arguments(__doc__)
    batch, keys = (2, 512) if options.quick else (8, 8192)
    report = harness.Report("kvcache", "Caches of keys and values", options)
    report.text(
        f"{HEADS} heads of queries, {KV_HEADS} of keys, D={DEPTH}, into an array that is there. Milliseconds, median "
        "over the rounds; `~` marks rounds that differ widely."
    )
    report.heading("Pages")
    report.text("Tokens a second relative to the contiguous cache, of shuffled pages of so many tokens.")
    report.table("case", "flash_attention", "contiguous", *map(str, SIZES))
    for name in ("bfloat16", "float32"):
        for rows, queries in ((1, 1), (batch, 1), (batch, 8)):
            if options.only in f"pages {name}":
                report.row(*pages(rows, keys, queries, name, options.seconds))
    report.end_table()
    report.heading("Fewer bits")
    report.text("One query. Tokens a second relative to bfloat16, by the scales of tokens or of channels.")
    report.table("case", "bfloat16", *(f"{name}, {scale}" for name, scale in FORMATS))
    for rows, length in ((1, 512), (batch, keys), (2 * batch, keys)):
        if options.only in "fewer bits":
            report.row(*formats(rows, length, options.seconds))
    report.end_table()
    report.write()


if __name__ == "__main__":
    main()
