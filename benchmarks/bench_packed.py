"""Compares packed sequences with NumPy, torch and ejKernel, and measures the fixed cost of a call.

python benchmarks/bench_packed.py [--quick] [--only TEXT] [--threads N]
"""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import harness
import numpy as np
from harness import Call, digits, ejkernel, jax, race, torch

import attnmask
from attnmask import _core

TOKENS, SEQUENCES, CHUNK = 1_000_000, 10_000, 64
OF_CU_SEQLENS = ("prepare_position_ids", "prepare_sequence_ids", "prepare_token_indices", "prepare_lens")


def data(dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """cu_seqlens, and a padding mask with about as many tokens."""
    rng = np.random.default_rng(0)
    cuts = np.sort(rng.choice(np.arange(1, TOKENS), SEQUENCES - 1, replace=False))
    lens = rng.integers(0, 1001, 1000)
    return np.concatenate([[0], cuts, [TOKENS]]).astype(dtype), np.arange(1000) < lens[:, None]


# The fastest NumPy code that was found; of several candidates the fastest counts.


def numpy_position_ids(cu: np.ndarray) -> dict[str, Call]:
    def by_repeat() -> np.ndarray:
        ids = np.arange(cu[-1], dtype=cu.dtype)
        ids -= np.repeat(cu[:-1], np.diff(cu))
        return ids

    def by_cumsum() -> np.ndarray:  # for sequences of one token and more
        steps = np.ones(cu[-1], cu.dtype)
        steps[0] = 0
        steps[cu[1:-1]] = 1 - np.diff(cu)[:-1]
        return np.cumsum(steps, dtype=cu.dtype, out=steps)

    return {"repeat": by_repeat, "cumsum": by_cumsum}


def numpy_sequence_ids(cu: np.ndarray) -> dict[str, Call]:
    def by_cumsum() -> np.ndarray:  # for sequences of one token and more
        ids = np.zeros(cu[-1], cu.dtype)
        ids[cu[1:-1]] = 1
        return np.cumsum(ids, dtype=cu.dtype, out=ids)

    return {
        "repeat": lambda: np.repeat(np.arange(len(cu) - 1, dtype=cu.dtype), np.diff(cu)),
        "cumsum": by_cumsum,
    }


def numpy_token_indices(cu: np.ndarray) -> dict[str, Call]:
    def by_columns() -> np.ndarray:
        pairs = np.empty((cu[-1], 2), cu.dtype)
        lens = np.diff(cu)
        pairs[:, 0] = np.repeat(np.arange(len(lens), dtype=cu.dtype), lens)
        np.subtract(np.arange(cu[-1], dtype=cu.dtype), np.repeat(cu[:-1], lens), out=pairs[:, 1])
        return pairs

    def by_rows() -> np.ndarray:  # repeats rows (sequence, -start), then adds positions
        lens = np.diff(cu)
        pairs = np.repeat(np.stack([np.arange(len(lens), dtype=cu.dtype), -cu[:-1]], 1), lens, axis=0)
        pairs[:, 1] += np.arange(cu[-1], dtype=cu.dtype)
        return pairs

    return {"columns": by_columns, "rows": by_rows}


def numpy_chunk_offsets(cu: np.ndarray) -> dict[str, Call]:
    def call() -> np.ndarray:
        offsets = np.zeros_like(cu)
        np.cumsum((np.diff(cu) + (CHUNK - 1)) // CHUNK, out=offsets[1:])
        return offsets

    def by_shift() -> np.ndarray:  # CHUNK is a power of two
        offsets = np.zeros_like(cu)
        np.cumsum((np.diff(cu) + (CHUNK - 1)) >> (CHUNK.bit_length() - 1), out=offsets[1:])
        return offsets

    return {"divide": call, "shift": by_shift}


def numpy_chunk_indices(cu: np.ndarray) -> dict[str, Call]:
    offsets = numpy_chunk_offsets(cu)["shift"]
    return {"columns": lambda: numpy_token_indices(offsets())["columns"]()}


def torch_calls(cu: np.ndarray, mask: np.ndarray) -> dict[str, Call]:
    c, m = torch.from_numpy(cu), torch.from_numpy(mask)

    def sequence_ids(c: object) -> object:
        return torch.repeat_interleave(
            torch.arange(len(c) - 1, dtype=c.dtype), c.diff(), output_size=int(c[-1])
        )

    def position_ids(c: object) -> object:
        starts = torch.repeat_interleave(c[:-1], c.diff(), output_size=int(c[-1]))
        return torch.arange(int(c[-1]), dtype=c.dtype).sub_(starts)

    def offsets() -> object:
        return torch.nn.functional.pad(((c.diff() + (CHUNK - 1)) // CHUNK).cumsum(0, dtype=c.dtype), (1, 0))

    def pairs(c: object) -> object:
        return torch.stack([sequence_ids(c), position_ids(c)], 1)

    return {
        "prepare_position_ids": lambda: position_ids(c),
        "prepare_sequence_ids": lambda: sequence_ids(c),
        "prepare_token_indices": lambda: pairs(c),
        "prepare_chunk_indices": lambda: pairs(offsets()),
        "prepare_chunk_offsets": offsets,
        "prepare_lens": lambda: c.diff(),
        "prepare_lens_from_mask": lambda: m.sum(-1, dtype=torch.int32),
        "prepare_cu_seqlens_from_mask": lambda: torch.nn.functional.pad(
            m.sum(-1, dtype=torch.int32).cumsum(0, dtype=c.dtype), (1, 0)
        ),
        "cdiv": lambda: -((-c).div(CHUNK, rounding_mode="floor")),
    }


def ejkernel_calls(cu: np.ndarray, mask: np.ndarray) -> dict[str, Call]:
    c, m = jax.numpy.asarray(cu), jax.numpy.asarray(mask)
    calls = {name: partial(getattr(ejkernel, name), c) for name in OF_CU_SEQLENS}
    calls["prepare_chunk_indices"] = lambda: ejkernel.prepare_chunk_indices(c, CHUNK)
    calls["prepare_chunk_offsets"] = lambda: ejkernel.prepare_chunk_offsets(c, CHUNK)
    calls["prepare_lens_from_mask"] = lambda: ejkernel.prepare_lens_from_mask(m)
    calls["prepare_cu_seqlens_from_mask"] = lambda: ejkernel.prepare_cu_seqlens_from_mask(m, cu.dtype)
    calls["cdiv"] = lambda: ejkernel.cdiv(c, CHUNK)
    return {name: lambda call=call: jax.block_until_ready(call()) for name, call in calls.items()}


def numpy_calls(cu: np.ndarray, mask: np.ndarray) -> dict[str, dict[str, Call]]:
    def cu_seqlens_from_mask() -> np.ndarray:
        result = np.zeros(len(mask) + 1, cu.dtype)
        np.cumsum(np.count_nonzero(mask, axis=1), out=result[1:])
        return result

    return {
        "prepare_position_ids": numpy_position_ids(cu),
        "prepare_sequence_ids": numpy_sequence_ids(cu),
        "prepare_token_indices": numpy_token_indices(cu),
        "prepare_chunk_indices": numpy_chunk_indices(cu),
        "prepare_chunk_offsets": numpy_chunk_offsets(cu),
        "prepare_lens": {"diff": lambda: np.diff(cu), "minus": lambda: cu[1:] - cu[:-1]},
        "prepare_lens_from_mask": {
            "count": lambda: np.count_nonzero(mask, axis=1).astype(np.int32),
            "sum": lambda: mask.sum(-1, dtype=np.int32),
        },
        "prepare_cu_seqlens_from_mask": {"count": cu_seqlens_from_mask},
        "cdiv": {"floor": lambda: -(-cu // CHUNK)},
    }


def attnmask_calls(cu: np.ndarray, mask: np.ndarray) -> dict[str, Call]:
    calls: dict[str, Call] = {name: partial(getattr(attnmask, name), cu) for name in OF_CU_SEQLENS}
    calls["prepare_chunk_indices"] = lambda: attnmask.prepare_chunk_indices(cu, CHUNK)
    calls["prepare_chunk_offsets"] = lambda: attnmask.prepare_chunk_offsets(cu, CHUNK)
    calls["prepare_lens_from_mask"] = lambda: attnmask.prepare_lens_from_mask(mask)
    calls["prepare_cu_seqlens_from_mask"] = lambda: attnmask.prepare_cu_seqlens_from_mask(mask, cu.dtype)
    calls["cdiv"] = lambda: attnmask.cdiv(cu, CHUNK)
    return calls


def whole_calls(report: harness.Report, options: object) -> None:
    report.heading(
        f"{TOKENS:,} tokens in {SEQUENCES:,} sequences, chunks of {CHUNK}, a mask of [1000, 1000] bool"
    )
    report.table("call", "attnmask", "best", "GB/s", "memcpy", "NumPy", "torch", "ejKernel", "ratio")
    for dtype in (np.int32, np.int64):
        cu, mask = data(dtype)
        ours, numpys = attnmask_calls(cu, mask), numpy_calls(cu, mask)
        torchs = torch_calls(cu, mask) if torch else {}
        ejkernels = ejkernel_calls(cu, mask) if ejkernel else {}
        for name, call in ours.items():
            title = f"{name}, {np.dtype(dtype)}"
            if options.only not in title:
                continue
            result = call()
            out = np.zeros_like(result)
            calls = {"attnmask": call, "memcpy": harness.memcpy(out, result.copy(), options.threads)}
            calls |= {f"NumPy {form}": expression for form, expression in numpys[name].items()}
            for peer, theirs in (("torch", torchs), ("ejKernel", ejkernels)):
                calls |= {peer: theirs[name]} if name in theirs else {}
            for peer, theirs in calls.items():
                if peer != "memcpy":
                    np.testing.assert_array_equal(np.asarray(theirs()), result, err_msg=f"{peer}: {title}")
            times = race(calls, options.seconds)
            peers = {peer: t for peer, t in times.items() if peer not in ("attnmask", "memcpy")}
            numpy = min((t for peer, t in peers.items() if peer.startswith("NumPy")), key=lambda t: t.median)
            best = min(peers.values(), key=lambda t: t.median)
            mine = times["attnmask"]
            touched = mask.nbytes if "mask" in name else result.nbytes
            report.row(
                title,
                mine,
                digits(1e3 * mine.best),
                digits(touched / mine.median / 1e9),
                times["memcpy"],
                numpy,
                times.get("torch"),
                times.get("ejKernel"),
                digits(best.ratio_to(mine)),
            )
    report.end_table()


def tiny_calls(report: harness.Report, options: object) -> None:
    cu, mask = np.array([0, 3, 5], np.int32), np.ones((2, 4), bool)
    g, out = np.ones((1, 5, 2), np.float32), np.empty((1, 5, 2), np.float32)
    calls: dict[str, Callable[[], object]] = {
        "empty": _core.get_num_threads,
        "prepare_lens": lambda: attnmask.prepare_lens(cu),
        "prepare_lens of a list": lambda: attnmask.prepare_lens([0, 3, 5]),
        "prepare_position_ids": lambda: attnmask.prepare_position_ids(cu),
        "prepare_token_indices": lambda: attnmask.prepare_token_indices(cu),
        "prepare_chunk_indices": lambda: attnmask.prepare_chunk_indices(cu, 2),
        "prepare_lens_from_mask": lambda: attnmask.prepare_lens_from_mask(mask),
        "cdiv of ints": lambda: attnmask.cdiv(130, 64),
        "chunk_local_cumsum": lambda: attnmask.chunk_local_cumsum(g, 2),
        "chunk_local_cumsum, out=": lambda: attnmask.chunk_local_cumsum(g, 2, out=out),
        "chunk_global_cumsum, cu_seqlens": lambda: attnmask.chunk_global_cumsum(g, cu_seqlens=cu),
        "np.diff": lambda: np.diff(cu),
        "np.cumsum": lambda: np.cumsum(g, axis=1),
    }
    times = race(calls, options.seconds)
    report.heading("A call on tiny input, microseconds above an empty call")
    report.table("call", "above", "in all")
    for name, t in times.items():
        above = t.median - times["empty"].median
        report.row(name, None if name == "empty" else digits(1e6 * above), digits(1e6 * t.median))
    report.end_table()


def import_time(report: harness.Report) -> None:
    code = "import time, numpy; t = time.perf_counter(); import attnmask; print(time.perf_counter() - t)"
    compiled = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}  # as pip installs it
    command = [sys.executable, "-c", code]
    runs = [subprocess.run(command, capture_output=True, check=True, env=compiled) for _ in range(11)]
    report.text(
        f"`import attnmask` after `import numpy`: {1e3 * np.median([float(r.stdout) for r in runs]):.1f} ms."
    )


def main() -> None:
    options = harness.arguments(__doc__)
    report = harness.Report("packed", "Packed sequences", options)
    report.text(
        "Milliseconds, median over the rounds (`best`: the fastest); `~` marks rounds that differ widely or that "
        "other processes disturbed. Every call allocates its result. `GB/s` counts each byte of the result once (of "
        "the mask, where one is read). `memcpy` writes as many bytes into a warm array with as many threads. `NumPy` "
        "is the fastest expression that we could write. `ratio`: how many times faster than the best of the peers."
    )
    whole_calls(report, options)
    if not options.only:
        tiny_calls(report, options)
        import_time(report)
    report.write()


if __name__ == "__main__":
    main()
