"""Compares masks with NumPy, torch, ejKernel and the block masks of flex attention.

python benchmarks/bench_masks.py [--quick] [--only TEXT] [--threads N]
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from unittest.mock import MagicMock

import harness
import numpy as np
from harness import Call, Times, digits, ejkernel, jax, race, torch

import attnmask
from attnmask import MaskInfo

BATCH, TOKENS, WINDOW = 4, 4096, 1024
SHAPE = (BATCH, 1, TOKENS, TOKENS)
LOWEST = float(np.finfo(np.float32).min)
LONG, LONG_WINDOW = 131_072, 4096
BLOCK = 128  # length of a side of flex attention's blocks

ejkernel_masks = import_module("ejkernel.types.mask") if ejkernel else None
PeerInfo = ejkernel_masks.MaskInfo if ejkernel else None
if isinstance(
    sys.modules.get("triton"), MagicMock
):  # a stand-in for ejKernel, which torch would take for the real one
    del sys.modules["triton"], sys.modules["triton.language"]
flex = harness.optional("torch.nn.attention.flex_attention") if torch else None


def packed_ids(batch: int, tokens: int, mean: float) -> np.ndarray:
    """Segment ids of documents of very different lengths, with some padding at the end of each row."""
    rng = np.random.default_rng(batch * tokens)
    ids = np.full((batch, tokens), -1, np.int32)
    for row in ids:
        lens = rng.lognormal(np.log(mean), 1, tokens).astype(int) + 1
        ends = np.cumsum(lens)
        documents = np.repeat(np.arange(len(lens)), lens)[: ends[ends <= tokens * 0.98][-1]]
        row[: len(documents)] = documents
    return ids


def synchronized(call: Call) -> Call:
    return lambda: jax.block_until_ready(call())


def best_of(times: dict[str, Times], name: str) -> Times | None:
    """The fastest of the forms of one peer, whose names begin with `name`."""
    forms = [t for form, t in times.items() if form.split(":")[0] == name]
    return min(forms, key=lambda t: t.median) if forms else None


def peers_of(times: dict[str, Times]) -> list[Times | None]:
    return [best_of(times, name) for name in ("NumPy", "torch", "ejKernel")]


def check_same(title: str, calls: dict[str, Call], yardstick: str) -> None:
    """Checks that all contenders except the yardstick return the same."""
    results = {name: call() for name, call in calls.items() if name != yardstick}
    expected = as_arrays(results.pop("attnmask"))
    for name, result in results.items():
        for got, wanted in zip(as_arrays(result), expected, strict=True):
            np.testing.assert_array_equal(got, wanted, err_msg=f"{name}: {title}")


def as_arrays(result: object) -> list[np.ndarray]:
    return [np.array(part) for part in (result if isinstance(result, tuple) else (result,))]


# Writing masks out


def band_of(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Causal with a window, for arrays of NumPy or torch."""
    return (keys <= queries) & (keys > queries - WINDOW)


def numpy_masks(ids: np.ndarray, banded: bool, out: np.ndarray | None) -> Call:
    q, k, place = ids[:, None, :, None], ids[:, None, None, :], np.arange(TOKENS, dtype=np.int32)

    def call() -> np.ndarray:
        mask = np.equal(q, np.where(k < 0, -2, k), out=out)
        return np.logical_and(mask, band_of(place[:, None], place), out=mask) if banded else mask

    return call


def numpy_small_masks(ids: np.ndarray, banded: bool, out: np.ndarray | None) -> Call:
    """Compares ids of two bytes, which is faster, if there are few enough."""

    def call() -> np.ndarray:
        assert ids.max() < 2**15
        return numpy_masks(ids.astype(np.int16), banded, out)()

    return call


def torch_masks(ids: np.ndarray, banded: bool, out: np.ndarray | None) -> Call:
    t, place = torch.from_numpy(ids), torch.arange(TOKENS, dtype=torch.int32)
    q, k = t[:, None, :, None], t[:, None, None, :]
    out = None if out is None else torch.from_numpy(out)

    def call() -> object:
        mask = torch.eq(q, torch.where(k < 0, -2, k), out=out)
        return mask.logical_and_(band_of(place[:, None], place)) if banded else mask

    return call


def numpy_biases(ids: np.ndarray, out: np.ndarray | None) -> dict[str, Call]:
    mask = numpy_small_masks(ids, False, None)
    zero, lowest = np.float32(0), np.float32(LOWEST)
    both = np.array([lowest, zero])

    def by_copy() -> np.ndarray:
        bias = np.full(SHAPE, lowest) if out is None else out
        bias.fill(lowest)
        np.copyto(bias, zero, where=mask())
        return bias

    return {
        "NumPy: copyto": by_copy,
        "NumPy: take": lambda: both.take(mask().view(np.int8), out=out, mode="clip"),
        **({"NumPy: where": lambda: np.where(mask(), zero, lowest)} if out is None else {}),
    }


def torch_bias(ids: np.ndarray, out: np.ndarray | None) -> Call:
    mask = torch_masks(ids, False, None)
    zero, lowest = torch.tensor(0.0), torch.tensor(LOWEST)
    out = None if out is None else torch.from_numpy(out)
    return lambda: torch.where(mask(), zero, lowest, out=out)


def jitted(make: Callable[[object], object], ids: np.ndarray) -> Call:
    compiled, placed = jax.jit(make), jax.numpy.asarray(ids)
    return synchronized(lambda: compiled(placed))


def written_cases(ids: np.ndarray, warm: bool) -> dict[str, dict[str, Call]]:
    """The calls that write the mask or the bias, to existing arrays or to new ones."""

    def allocate(dtype: type) -> np.ndarray | None:
        return np.zeros(SHAPE, dtype) if warm else None

    def filled(dtype: type, value: float) -> dict[str, Call]:
        if not warm:
            return {"fill": lambda: np.full(SHAPE, value, dtype)}
        out = np.zeros(SHAPE, dtype)
        return {"fill": lambda: out.fill(value)}

    def contenders(banded: bool) -> dict[str, Call]:
        info, ours = MaskInfo.from_segments(ids), allocate(bool)
        if banded:
            info = info.apply_causal().apply_sliding_window((WINDOW - 1, 0))
        calls = filled(bool, True)
        # A MaskInfo keeps the array that it has computed, so each call uses a new one.
        calls["attnmask"] = (
            (lambda: info.get_or_compute_attention_mask(out=ours))
            if warm
            else (lambda: info.replace().get_or_compute_attention_mask())
        )
        calls["NumPy: int32"] = numpy_masks(ids, banded, allocate(bool))
        calls["NumPy: int16"] = numpy_small_masks(ids, banded, allocate(bool))
        if torch:
            calls["torch"] = torch_masks(ids, banded, allocate(bool))
        if ejkernel and not warm:
            calls["ejKernel"] = jitted(
                lambda ids: (
                    PeerInfo.from_segments(ids)
                    .apply_causal()
                    .apply_sliding_window((WINDOW - 1, 0))
                    .attention_mask
                    if banded
                    else PeerInfo.from_segments(ids).attention_mask
                ),
                ids,
            )
        return calls

    def biases() -> dict[str, Call]:
        info, ours = MaskInfo.from_segments(ids), allocate(np.float32)
        calls = filled(np.float32, LOWEST)
        calls["attnmask"] = (
            (lambda: info.create_bias(out=ours)) if warm else (lambda: info.replace().create_bias())
        )
        calls |= numpy_biases(ids, allocate(np.float32))
        if torch:
            calls["torch"] = torch_bias(ids, allocate(np.float32))
        if ejkernel and not warm:
            calls["ejKernel"] = jitted(lambda ids: PeerInfo.from_segments(ids).bias, ids)
        return calls

    suffix = "out=" if warm else "new"
    return {
        f"segments, bool, {suffix}": lambda: contenders(False),
        f"causal + window over segments, bool, {suffix}": lambda: contenders(True),
        f"segments, float32 bias, {suffix}": biases,
    }


def writing(report: harness.Report, options: object) -> None:
    report.heading(f"Writing out [{', '.join(map(str, SHAPE))}]")
    report.text(
        "`fill`: `ndarray.fill` on an array that is there (`out=`), `np.full` where a new one is made. `× fill`: "
        "attnmask's time in fills; 1.3 is what we allow ourselves."
    )
    report.table("mask", "attnmask", "fill", "× fill", "NumPy", "torch", "ejKernel", "ratio")
    ids = packed_ids(BATCH, TOKENS, 400)
    for warm in (True, False):
        for title, make in written_cases(ids, warm).items():
            if options.only not in title:
                continue
            calls = make()
            check_same(title, calls, "fill")
            times = race(calls, options.seconds)
            mine, fill = times["attnmask"], times["fill"]
            peers = peers_of(times)
            report.row(title, mine, fill, digits(mine.ratio_to(fill)), *peers, ahead(mine, peers))
    report.end_table()


def ahead(mine: Times, peers: list[Times | None]) -> str | None:
    """How many times faster attnmask is than the fastest peer."""
    there = [peer for peer in peers if peer is not None]
    return digits(min(there, key=lambda t: t.median).ratio_to(mine)) if there else None


# Masks to segment ids


def square_masks() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    ids = packed_ids(1, TOKENS, 400)[0]
    place = np.arange(TOKENS)
    near = np.broadcast_to(rng.random(TOKENS) < 0.5, (TOKENS, TOKENS)).copy()
    near[:, -12:] = (
        place[:, None] // 2 >> np.arange(12) & 1
    )  # pairs of rows are equal; others differ only at the end
    return {
        "block-diagonal": (ids[:, None] == ids) & (ids >= 0),
        "causal": place <= place[:, None],
        "random": rng.random((TOKENS, TOKENS)) < 0.5,
        "near-equal rows": near,
    }


def rows_by_dict(mask: np.ndarray) -> np.ndarray:
    """Ids of equal rows in order of first appearance: a dict compares the bytes of packed bits."""
    packed = np.ascontiguousarray(np.packbits(mask, axis=1))
    seen = {bytes(packed.shape[1]): -1}
    return np.array([seen.setdefault(row.tobytes(), len(seen) - 1) for row in packed], np.int32)


def rows_by_unique(mask: np.ndarray) -> np.ndarray:
    packed = np.ascontiguousarray(np.packbits(mask, axis=1))
    rows = packed.view(f"V{packed.shape[1]}")[:, 0]
    _, first, group = np.unique(rows, return_index=True, return_inverse=True)
    empty = ~mask[first].any(axis=1)
    ids = np.empty(len(first), np.int32)
    ids[np.argsort(np.where(empty, len(mask), first))] = np.arange(len(first))
    ids[empty] = -1
    return ids[group]


def grouping(report: harness.Report, options: object) -> None:
    report.heading(f"`mask_to_segment_ids` of [{TOKENS}, {TOKENS}] bool")
    report.text(
        "`× count`: attnmask's time in `np.count_nonzero`s of the mask. We allow ourselves 10, and aim at 5."
    )
    report.table("mask", "attnmask", "count", "× count", "NumPy", "torch", "ejKernel", "ratio")
    for name, mask in square_masks().items():
        if options.only not in f"mask_to_segment_ids {name}":
            continue
        calls: dict[str, Call] = {
            "attnmask": lambda mask=mask: attnmask.mask_to_segment_ids(mask),
            "count": lambda mask=mask: np.count_nonzero(mask),
            "NumPy: dict": lambda mask=mask: (rows_by_dict(mask), rows_by_dict(mask.T)),
            "NumPy: unique": lambda mask=mask: (rows_by_unique(mask), rows_by_unique(mask.T)),
        }
        if ejkernel and not options.quick and name == "block-diagonal":  # a call takes half a minute
            placed = jax.numpy.asarray(mask)
            calls["ejKernel"] = synchronized(lambda placed=placed: ejkernel_masks.mask_to_segment_ids(placed))
        check_same(name, calls, "count")
        times = race(calls, options.seconds)
        mine, count = times["attnmask"], times["count"]
        peers = peers_of(times)
        report.row(name, mine, count, digits(mine.ratio_to(count)), *peers, ahead(mine, peers))
    report.end_table()


# Masks to lengths and padding


def whole_masks() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    ids = packed_ids(BATCH, TOKENS, 400)[:, None]
    return {
        "segments": (ids[..., None] == ids[..., None, :]) & (ids >= 0)[..., None],
        "one pair in 1,000": rng.random(SHAPE, np.float32) < 1e-3,
        "nothing live": np.zeros(SHAPE, bool),
    }


def ends_of(tokens: np.ndarray) -> np.ndarray:
    """The first and the last token of each row, as a range; 0 and 0 where there are none."""
    some = tokens.any(-1)
    return (
        np.stack(
            [
                np.where(some, tokens.argmax(-1), 0),
                np.where(some, tokens.shape[-1] - tokens[:, ::-1].argmax(-1), 0),
            ],
            axis=1,
        )
        .reshape(-1)
        .astype(np.int32)
    )


def numpy_live(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return mask.any((1, 3)), mask.any((1, 2))


def numpy_live_words(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Reads eight keys at a time."""
    words = mask.view(np.uint64)
    return words.any((1, 3)), np.bitwise_or.reduce(words, axis=(1, 2)).view(bool)


def torch_live(mask: object) -> tuple[np.ndarray, np.ndarray]:
    return mask.any(3).any(1).numpy(), mask.any(2).any(1).numpy()


def reducing(report: harness.Report, options: object) -> None:
    report.heading(f"Which tokens take part in [{', '.join(map(str, SHAPE))}] bool")
    report.text("`× count`: attnmask's time in `np.count_nonzero`s of the mask. We allow ourselves 1.5.")
    report.table("function, mask", "attnmask", "count", "× count", "NumPy", "torch", "ejKernel", "ratio")

    def as_ids(live: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, ...]:
        return tuple(tokens.astype(np.int32) - np.int32(1) for tokens in live)

    def as_ends(live: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, ...]:
        return tuple(map(ends_of, live))

    for name, mask in whole_masks().items():
        placed, tensor = (jax.numpy.asarray(mask) if ejkernel else None), torch and torch.from_numpy(mask)
        for function, finish in (
            ("attention_mask_to_padding_segment_ids", as_ids),
            ("attention_mask_to_qkv_cu_seqlens", as_ends),
        ):
            if options.only not in f"{function}, {name}":
                continue
            ours = getattr(attnmask, function)
            calls: dict[str, Call] = {
                "attnmask": lambda ours=ours, mask=mask: ours(mask),
                "count": lambda mask=mask: np.count_nonzero(mask),
                "NumPy: any": lambda finish=finish, mask=mask: finish(numpy_live(mask)),
                "NumPy: words": lambda finish=finish, mask=mask: finish(numpy_live_words(mask)),
            }
            if torch:
                calls["torch"] = lambda finish=finish, tensor=tensor: finish(torch_live(tensor))
            theirs = ejkernel and getattr(ejkernel_masks, function, None)
            if theirs:
                calls["ejKernel"] = synchronized(lambda theirs=theirs, placed=placed: theirs(placed))
            check_same(f"{function}, {name}", calls, "count")
            times = race(calls, options.seconds)
            mine, count = times["attnmask"], times["count"]
            peers = peers_of(times)
            row = f"`{function}`, {name}"
            report.row(row, mine, count, digits(mine.ratio_to(count)), *peers, ahead(mine, peers))
    report.end_table()


# Long packed rows

LONG_INFO = f"info.apply_causal().apply_sliding_window({LONG_WINDOW})"
LONG_CALLS = {  # the limits that attnmask sets itself
    "MaskInfo.from_segments(ids)": None,
    LONG_INFO: "1 ms, 8 MB",
    f"{LONG_INFO}.density()": "20 ms",
    f"{LONG_INFO}.visualize(return_str=True)": "50 ms",
    f"{LONG_INFO}._repr_html_()": None,
}
LONG_MEMORY = """
import sys, tracemalloc
import numpy as np
from attnmask import MaskInfo
from attnmask._masks import render

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1e3 for line in status if line.startswith("VmHWM"))

call = compile(sys.argv[1], "call", "eval")
small = np.zeros((1, 64), np.int32)
eval(call, {"MaskInfo": MaskInfo, "info": MaskInfo.from_segments(small), "ids": small})
ids = np.load(sys.argv[2])
names = {"MaskInfo": MaskInfo, "info": MaskInfo.from_segments(ids), "ids": ids}
before = peak()
kept = eval(call, names)
process = peak() - before
tracemalloc.start()
kept = eval(call, names)
print(tracemalloc.get_traced_memory()[1] / 1e6, process)
"""


def expected_density(ids: np.ndarray) -> float:
    """Counted by document: a token attends to itself and to `LONG_WINDOW` tokens before it."""
    _, lens = np.unique(ids[ids >= 0], return_counts=True)
    width = LONG_WINDOW + 1
    live = sum(n * (n + 1) // 2 - max(0, n - width) * (n - width + 1) // 2 for n in lens.tolist())
    return live / LONG**2


def peak_memory(call: str, ids: np.ndarray) -> list[str | None]:
    """The megabytes that a call takes in a process of its own: for arrays, and in all."""
    if sys.platform != "linux":
        return [None, None]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ids.npy")
        np.save(path, ids)
        command = [sys.executable, "-c", LONG_MEMORY, call, str(path)]
        run = subprocess.run(command, capture_output=True, check=True, text=True)
    return [digits(float(number)) for number in run.stdout.split()]


def long_rows(report: harness.Report, options: object) -> None:
    ids = packed_ids(1, LONG, 2000)
    names = {"MaskInfo": MaskInfo, "info": MaskInfo.from_segments(ids), "ids": ids}
    assert abs(eval(f"{LONG_INFO}.density()", names) - expected_density(ids)) < 1e-12
    report.heading(f"A packed row of {LONG:,} tokens in {ids.max() + 1} documents, causal, with a window")
    report.text(
        "Written out, the mask would take 17 GB. `MB` is what a call takes at its peak, of arrays and, where the "
        "system tells, of the process. No peer draws or counts a mask without writing it out."
    )
    report.table("call", "ms", "we allow", "MB, arrays", "MB, process")
    compiled = {call: compile(call, "call", "eval") for call in LONG_CALLS}
    calls = {call: lambda code=code: eval(code, names) for call, code in compiled.items()}
    for call, t in race(calls, options.seconds).items():
        report.row(f"`{call}`", t, LONG_CALLS[call], *peak_memory(call, ids))
    report.end_table()


# Block masks


def flex_blocks(ids: np.ndarray, compiled: bool) -> Call:
    t = torch.from_numpy(ids)

    def live(b: object, h: object, q: object, k: object) -> object:
        return (t[q] == t[k]) & (t[q] >= 0) & (k <= q) & (k > q - WINDOW)

    return lambda: flex.create_block_mask(
        live, None, None, len(ids), len(ids), device="cpu", BLOCK_SIZE=BLOCK, _compile=compiled
    )


def kinds_of_blocks(result: object) -> np.ndarray:
    """2 for a full block, 1 for a mixed one, 0 for a dead one; from attnmask's counts or flex attention's lists."""
    if isinstance(result, np.ndarray):
        return np.where(result == BLOCK * BLOCK, 2, np.minimum(result, 1))
    blocks = result.kv_indices.shape[-1]
    kinds = np.zeros((blocks, blocks), np.int64)
    for kind, counts, indices in (
        (1, result.kv_num_blocks, result.kv_indices),
        (2, result.full_kv_num_blocks, result.full_kv_indices),
    ):
        listed = np.arange(blocks) < counts[0, 0].numpy()[:, None]
        kinds[np.nonzero(listed)[0], indices[0, 0].numpy()[listed]] = kind
    return kinds


def block_masks(report: harness.Report, options: object) -> None:
    report.heading(f"Which blocks of {BLOCK} × {BLOCK} pairs are dead, mixed or full")
    report.text(
        "Causal, with a window, over segments. attnmask counts the live pairs of each block (`grid`); flex attention "
        "makes a block mask (`create_block_mask`), as it is or compiled (which took some seconds before the first)."
    )
    report.table("tokens", "attnmask", "flex", "flex, compiled", "ratio")
    for tokens in (4096, 8192, LONG):
        if options.only not in f"block masks {tokens}":
            continue
        ids = packed_ids(1, tokens, 400)
        info = MaskInfo.from_segments(ids).apply_causal().apply_sliding_window((WINDOW - 1, 0))
        calls: dict[str, Call] = {"attnmask": lambda info=info: info.grid(0, 0, BLOCK, BLOCK)}
        if flex and tokens < LONG:  # otherwise it would take tens of gigabytes
            calls["flex"] = flex_blocks(ids[0], False)
            if not options.quick:
                calls["flex, compiled"] = flex_blocks(ids[0], True)
        kinds = {name: kinds_of_blocks(call()) for name, call in calls.items()}
        for name, got in kinds.items():
            np.testing.assert_array_equal(got, kinds["attnmask"], err_msg=name)
        times = race(calls, options.seconds)
        theirs = [times.get("flex"), times.get("flex, compiled")]
        report.row(f"{tokens:,}", times["attnmask"], *theirs, ahead(times["attnmask"], theirs))
    report.end_table()


def drawing(report: harness.Report, options: object) -> None:
    report.heading(f"Drawing [{BATCH}, 1, {TOKENS}, {TOKENS}], causal over segments, as text")
    report.table("form", "ms")
    ids = packed_ids(BATCH, TOKENS, 400)
    info = MaskInfo.from_segments(ids).apply_causal()
    dense = MaskInfo.from_attention_mask(info.attention_mask)
    calls: dict[str, Call] = {
        "attnmask, from segments": lambda: info.visualize(return_str=True),
        "attnmask, from an array": lambda: dense.visualize(return_str=True),
    }
    if ejkernel:
        theirs = PeerInfo.from_segments(jax.numpy.asarray(ids)).apply_causal()
        calls["ejKernel"] = lambda: theirs.visualize(return_str=True)
        cells, peers = (
            [line for line in calls[name]().splitlines() if line.endswith("||")]
            for name in ("attnmask, from segments", "ejKernel")
        )
        assert cells == peers
    for name, t in race(calls, options.seconds).items():
        report.row(name, t)
    report.end_table()


def main() -> None:
    options = harness.arguments(__doc__)
    report = harness.Report("masks", "Masks", options)
    report.text(
        "Milliseconds, median over the rounds; `~` marks rounds that differ widely. `NumPy` is the fastest expression "
        "that we could write, `ejKernel` is compiled by `jax.jit` where that is possible. `ratio`: how many times "
        "faster than the best of the peers."
    )
    writing(report, options)
    grouping(report, options)
    reducing(report, options)
    if not options.only:
        long_rows(report, options)
        drawing(report, options)
    block_masks(report, options)
    report.write()


if __name__ == "__main__":
    main()
