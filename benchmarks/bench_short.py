"""Short sequences and pair biases beside PyTorch: a table's features, windows of images, proteins, texts.

python benchmarks/bench_short.py [--quick] [--only TEXT] [--threads N]
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import harness
import numpy as np
from bench_flash import TOLERANCE
from flash_cases import Case, Parts
from harness import Call, difference, digits, percent, race, torch

import attnmask

TOKENS = 12_000  # of all sequences together, about
LENGTHS = (8, 16, 24, 32, 49, 56, 64, 77, 100, 128)
SHRINK = 8  # times fewer sequences with --quick
COLUMNS = ("attnmask", "packed", "GFLOP/s", "of peak", "PyTorch", "ratio", "error", "PyTorch's error")


@dataclass(frozen=True)
class Short(Case):
    """Sequences of as many tokens, or packed ones of the given lengths. A bias is [1, H, T, T], with its gradient."""

    lengths: tuple[int, ...] = ()

    @cached_property
    def starts(self) -> np.ndarray:
        """Where sequences start when they are packed, and where the last one ends."""
        return np.cumsum((0, *(self.lengths or self.batch * (self.tokens,))), dtype=np.int32)

    @cached_property
    def pair_bias(self) -> np.ndarray:
        shape = (1, self.heads, self.tokens, self.tokens)
        drawn = np.random.default_rng(1).standard_normal(shape, np.float32)
        return drawn.astype(self.arrays[0].dtype, copy=False)

    def sized(self, options: argparse.Namespace) -> "Short":
        """A copy, whose arrays live no longer than its race."""
        return replace(self, batch=max(1, self.batch // SHRINK) if options.quick else self.batch)


def of_length(name: str, tokens: int, **more: Any) -> Short:
    return Short(name, tokens=tokens, batch=round(TOKENS / tokens), **{"heads": 6, "channels": 32} | more)


def of_lengths(name: str, lengths: tuple[int, ...], **more: Any) -> Short:
    return Short(name, tokens=sum(lengths), documents=len(lengths), lengths=lengths, **more)


# attnmask


def by_attnmask(case: Short, packed: bool) -> Call:
    """Its call returns the result alone, or the gradients of query, key, value and the bias."""
    settings: dict[str, Any] = {"causal": case.causal}
    arrays = case.arrays
    if packed:
        arrays = [array.reshape(-1, *array.shape[2:]) for array in arrays]
        settings["cum_seqlens_q"] = case.starts
    if case.bias:
        settings["bias"] = case.pair_bias
    if not case.backward:
        return lambda: (attnmask.flash_attention(*arrays, **settings),)
    *inputs, dout = arrays

    def training() -> tuple[np.ndarray, ...]:
        _, vjp = attnmask.flash_attention_vjp(*inputs, **settings, grad_bias=case.bias)
        return vjp(dout)[: 3 + case.bias]

    return training


# PyTorch


class Form(NamedTuple):
    """A way to put a case to PyTorch: a function of query, key, value and the bias, and what it is given."""

    forward: Callable[..., Any]
    inputs: list[Any]
    dout: list[Any]
    read: Callable[[Any], Any]  # arranges a result or gradient as attnmask does

    def call(self) -> Call:
        if not self.dout:
            return torch.no_grad()(lambda: (self.forward(*self.inputs),))
        inputs = [tensor.requires_grad_() for tensor in self.inputs]
        return lambda: torch.autograd.grad(self.forward(*inputs), inputs, self.dout)


def tensor(array: np.ndarray) -> Any:
    return torch.from_numpy(array.view(f"i{array.itemsize}")).view(getattr(torch, array.dtype.name))


def exact(result: Any) -> np.ndarray:
    if isinstance(result, np.ndarray):
        return result.astype(np.float64)
    return result.detach().double().numpy()


def heads_first(case: Short, dtype: Any = None) -> tuple[list[Any], Any, Callable[[Any], Any]]:
    """Contiguous tensors [B, H, T, D], padded to the longest sequence; what hides padding; and the way back."""
    tensors = [tensor(array).to(dtype) for array in case.arrays]
    hidden, there = None, torch.ones(case.batch, case.rows, dtype=torch.bool)
    if case.lengths:
        there = torch.arange(max(case.lengths)) < torch.tensor(case.lengths)[:, None]
        padded = [x.new_zeros(*there.shape, *x.shape[2:]) for x in tensors]
        for into, x in zip(padded, tensors, strict=True):
            into[there] = x[0]
        tensors = padded
        hidden = torch.zeros(there.shape, dtype=tensors[0].dtype).masked_fill(~there, -torch.inf)[
            :, None, None
        ]

    def read(x: Any) -> Any:
        rows = x.transpose(1, 2)[there]
        return rows.unflatten(0, (case.batch, -1))

    return [x.transpose(1, 2).contiguous() for x in tensors], hidden, read


def eager(case: Short, dtype: Any = None) -> Form:
    tensors, hidden, read = heads_first(case, dtype)
    future = torch.full((case.rows, case.rows), -torch.inf, dtype=tensors[0].dtype).triu(1)
    mask = future if case.causal else hidden

    def forward(q: Any, k: Any, v: Any, bias: Any = mask) -> Any:
        if case.group > 1:
            k, v = (x.repeat_interleave(case.group, 1) for x in (k, v))
        logits = (q * case.channels**-0.5) @ k.transpose(-1, -2)
        return torch.softmax(logits if bias is None else logits + bias, -1) @ v

    biases = [tensor(case.pair_bias).to(dtype)] if case.bias else []
    return Form(forward, tensors[:3] + biases, tensors[3:], read)


def sdpa(case: Short) -> Form:
    tensors, hidden, read = heads_first(case)
    settings = {"is_causal": case.causal, "enable_gqa": case.group > 1}

    def forward(q: Any, k: Any, v: Any, bias: Any = hidden) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, bias, **settings)

    return Form(forward, tensors[:3] + [tensor(case.pair_bias)] * case.bias, tensors[3:], read)


def nested(case: Short) -> Form:
    """Packed sequences as a nested tensor, which supports neither causal attention nor groups on the CPU."""
    packed = [tensor(array).flatten(0, 1) for array in case.arrays]
    starts, lengths = torch.from_numpy(case.starts), np.diff(case.starts)
    ends = {"min_seqlen": int(lengths.min()), "max_seqlen": int(lengths.max())}

    def forward(*tensors: Any) -> Any:
        parts = (torch.nested.nested_tensor_from_jagged(x, starts, **ends).transpose(1, 2) for x in tensors)
        return torch.nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).values()

    return Form(forward, packed[:3], packed[3:], lambda x: x.unflatten(0, (case.batch, -1)))


# The race


def error(got: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    """The root mean square of the differences, relative to that of the numbers; of the worst result."""
    pairs = zip(got, wanted, strict=True)
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)


def results(call: Call, read: Callable[[Any], Any] = lambda x: x) -> list[np.ndarray]:
    """The gradient of a bias lies as the bias itself does, and is last."""
    found = call()
    return [exact(read(x)) for x in found[:3]] + [exact(x) for x in found[3:]]


def row(case: Short, options: argparse.Namespace) -> tuple[object, ...]:
    calls = {"attnmask": by_attnmask(case, packed=bool(case.lengths))}
    if not (case.lengths or case.bias):
        calls["packed"] = by_attnmask(case, packed=True)
    exactly = eager(case, torch.float64)
    wanted = results(exactly.call(), exactly.read)
    found: dict[str, Parts] = {}
    for name, call in calls.items():
        got = results(call)
        found[name] = [x.reshape(y.shape) for x, y in zip(got, wanted, strict=True)]
    forms = [eager, sdpa] + [nested] * (not case.bias and not case.causal and case.group == 1)
    for make in forms:
        form, name = make(case), make.__name__
        calls[name] = form.call()
        found[name] = results(calls[name], form.read)
    for name, got in found.items():
        worst = float(np.max([*map(difference, got, wanted)]))
        assert worst <= TOLERANCE[case.dtype], f"{case.name}, {name}: differs by {worst:.2g}"

    kind = {"float16": "float32"}.get(case.dtype, case.dtype)
    if attnmask.show_config(mode="dict")["isa"] == "avx2" and kind != "float64":
        kind = "avx2"
    calls["peak"], operations = harness.multiply(kind, options.threads)
    times = race(calls, options.seconds, yardsticks={"peak"})
    best = min((make.__name__ for make in forms), key=lambda name: times[name].median)
    # Products: two forward, and five more with gradients.
    flops = case.flops * (1.4 if case.backward else 1)
    of_peak = flops / operations * times["peak"].best / times["attnmask"].median
    return (
        times["attnmask"],
        times.get("packed"),
        digits(flops / times["attnmask"].median / 1e9),
        percent(of_peak),
        f"{times[best]} ({best})",
        digits(times[best].ratio_to(times["attnmask"])),
        *(f"{error(found[name], wanted):.1e}" for name in ("attnmask", best)),
    )


# The cases


def sections() -> dict[str, tuple[str, list[Short]]]:
    """Titles, what is to be said, and cases."""
    some = [
        of_length(f"T={tokens}, {dtype}", tokens, dtype=dtype)
        for dtype in ("bfloat16", "float16", "float64")
        for tokens in (8, 24, 49, 100)
    ]
    wide = [
        of_length(f"T={tokens}, D={channels}", tokens, channels=channels)
        for channels in (24, 64, 128)
        for tokens in (16, 49, 128)
    ]
    masked = [of_length(f"T={tokens}, causal", tokens, causal=True) for tokens in (32, 100)]
    masked += [of_length(f"T={tokens}, GQA", tokens, kv_heads=2) for tokens in (32, 100)]
    rng = np.random.default_rng(2)
    columns, words = rng.integers(8, 101, 220).tolist(), rng.integers(16, 513, 32).tolist()
    used = [
        Short("table (TabPFN)", tokens=24, batch=500, heads=6, channels=32),
        of_lengths("tables of 8 to 100 columns", tuple(columns), heads=6, channels=32),
        Short("image windows (Swin)", tokens=49, batch=64, heads=6, channels=32, bias=True),
        Short("pair bias (AlphaFold 3)", tokens=384, channels=24, bias=True),
        Short("triangle attention", tokens=128, batch=128, heads=4, channels=32, bias=True),
        of_lengths("texts (embeddings)", tuple(words), heads=12),
    ]
    return {
        "By tokens": (
            "6 heads, D=32, float32; so many sequences that they have about 12,000 tokens.",
            [of_length(f"T={tokens}", tokens) for tokens in LENGTHS],
        ),
        "Types": ("The same.", some),
        "Channels": ("The same, with other head_dims, in float32.", wide),
        "Masks and groups": ("The same, D=32. GQA: 6 heads of queries and 2 of keys.", masked),
        "As models use them": (
            "A table: 500 rows of 24 features, 6 × 32; tables: 220 rows, packed. Images: 64 windows of 49, 6 × 32. "
            "AlphaFold 3: 384 tokens, 16 × 24. Triangle: N = 128, 4 × 32. Texts: 32 of 16 to 512 tokens, packed, "
            "12 × 64. A bias is `[1, H, T, T]`, and its gradient is among those taken.",
            used,
        ),
    }


def main() -> None:
    options = harness.arguments(__doc__)
    if torch is None:
        raise SystemExit("bench_short.py compares with PyTorch: pip install torch")
    report = harness.Report("short", "Short sequences and pair biases", options)
    report.text(
        "Milliseconds, median over the rounds; `~` marks rounds that differ widely. `gradients`: the forward and all "
        "gradients. `packed`: the same sequences by `cum_seqlens_q`. `of peak`: as a share of what independent "
        "multiply-adds reach in the best of the same rounds. `PyTorch`: the fastest of plain operations (`eager`) and "
        "`scaled_dot_product_attention` (`sdpa`), on contiguous tensors with heads first, padded beforehand, and "
        "nested tensors; `ratio`: how many times as long it takes. Errors are root mean squares relative to "
        "plain operations in float64, whose own are 0."
    )
    for title, (text, cases) in sections().items():
        both = [
            replace(case, name=case.name + ", gradients" * gradients, backward=gradients)
            for case in cases
            for gradients in (False, True)
        ]
        asked = [case for case in both if options.only in case.name]
        if asked:
            report.heading(title)
            report.text(text)
            report.table("case", *COLUMNS)
            for case in asked:
                report.row(case.name, *row(case.sized(options), options))
            report.end_table()
    report.write()


if __name__ == "__main__":
    main()
