"""Tangents, second derivatives, and what weights tell, beside attention itself and beside PyTorch.

python benchmarks/bench_derivatives.py [--quick] [--only TEXT] [--threads N]
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import harness
import numpy as np
from bench_flash import TOLERANCE
from bench_short import exact, tensor
from harness import Call, difference, digits, race, torch

import attnmask

SHRINK = 4  # times fewer tokens with --quick
INPUTS = ("query", "key", "value")


class Case(NamedTuple):
    name: str
    queries: int
    keys: int
    heads: int
    kv_heads: int
    channels: int
    dtype: str = "float32"
    causal: bool = False

    def sized(self, options: argparse.Namespace) -> "Case":
        if not options.quick:
            return self
        return self._replace(queries=max(self.queries // SHRINK, 1), keys=self.keys // SHRINK)

    def drawn(self, seed: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        shapes = (self.queries, self.heads), (self.keys, self.kv_heads), (self.keys, self.kv_heads)
        return {
            name: rng.standard_normal((1, *shape, self.channels), self.dtype)
            for name, shape in zip(INPUTS, shapes, strict=True)
        }

    @property
    def limits(self) -> dict[str, Any]:
        return {"causal": True, "causal_offset": self.keys - self.queries} if self.causal else {}


# In PyTorch, by plain operations


def heads_first(arrays: dict[str, np.ndarray], group: int) -> list[Any]:
    tensors = [tensor(x).transpose(1, 2).contiguous() for x in arrays.values()]
    return [tensors[0], *(x.repeat_interleave(group, 1) for x in tensors[1:])]


def weights_of(case: Case, query: Any, key: Any) -> Any:
    logits = (query * case.channels**-0.5) @ key.transpose(-1, -2)
    if case.causal:
        future = torch.ones(case.queries, case.keys, dtype=torch.bool).triu(case.keys - case.queries + 1)
        logits = logits.masked_fill(future, -torch.inf)
    return torch.softmax(logits, -1)


def plain(case: Case) -> Callable[..., Any]:
    return lambda query, key, value: weights_of(case, query, key) @ value


def heads_last(x: Any) -> np.ndarray:
    return exact(x.transpose(1, 2))


# Derivatives


def derivatives(case: Case, options: argparse.Namespace) -> tuple[object, ...]:
    arrays, along, limits = case.drawn(0), case.drawn(1), case.limits
    dout = np.random.default_rng(2).standard_normal(arrays["query"].shape, case.dtype)
    out, lse = attnmask.flash_attention_fwd(**arrays, **limits)
    tangents = {f"{name}_tangent": x for name, x in along.items()}
    cotangents = {f"{name}_cotangent": x for name, x in along.items()}
    results = {"out": out, "lse": lse, "dout": dout}
    calls: dict[str, Call] = {
        "forward": lambda: attnmask.flash_attention(**arrays, **limits),
        "tangent": lambda: attnmask.flash_attention_jvp(**arrays, **tangents, **limits),
        "of queries": lambda: attnmask.flash_attention_jvp(**arrays, query_tangent=along["query"], **limits),
        "gradients": lambda: attnmask.flash_attention_bwd(**arrays, **results, **limits),
        "second": lambda: attnmask.flash_attention_bwd_vjp(**arrays, **results, **cotangents, **limits),
    }
    inputs, moved = (heads_first(x, 1) for x in (arrays, along))
    function, upstream = plain(case), tensor(dout).transpose(1, 2).contiguous()
    calls["PyTorch's tangent"] = lambda: torch.func.jvp(function, tuple(inputs), tuple(moved))
    learned = [x.clone().requires_grad_() for x in (*inputs, upstream)]
    grads = torch.autograd.grad(function(*learned[:3]), learned[:3], learned[3], create_graph=True)
    calls["PyTorch's second"] = lambda: torch.autograd.grad(grads, learned, moved, retain_graph=True)

    mine, other = calls["tangent"](), calls["PyTorch's tangent"]()
    errors = [difference(exact(x), heads_last(y)) for x, y in zip(mine, other, strict=True)]
    mine, other = calls["second"](), calls["PyTorch's second"]()
    by_name = dict(zip((*INPUTS, "dout"), other, strict=True))
    errors += [difference(exact(x), heads_last(by_name[name])) for name, x in mine._asdict().items()]
    assert max(errors) <= TOLERANCE[case.dtype], f"{case.name}: differs by {max(errors):.2g}"
    times = race(calls, options.seconds)

    def ratio(name: str, to: str) -> str:
        return digits(times[name].ratio_to(times[to]))

    return (
        times["forward"],
        ratio("tangent", "forward"),
        ratio("of queries", "forward"),
        ratio("PyTorch's tangent", "tangent"),
        times["gradients"],
        ratio("second", "gradients"),
        ratio("PyTorch's second", "second"),
        f"{max(errors):.1e}",
    )


# What weights tell


def statistics(case: Case, options: argparse.Namespace) -> tuple[object, ...]:
    arrays, limits = case.drawn(0), case.limits
    query, key = arrays["query"], arrays["key"]
    _, lse = attnmask.flash_attention_fwd(**arrays, **limits)
    tensors = heads_first(arrays, case.heads // case.kv_heads)
    asked = {"key_sum": "key_sum", "entropy": "entropy", "16 top keys": ("top_keys", 16)}

    def found(of: Any, given: Any = lse) -> attnmask.AttentionStatistics:
        return attnmask.attention_statistics(query, key, of=of, lse=given, **limits)

    calls: dict[str, Call] = {"forward": lambda: attnmask.flash_attention(**arrays, **limits)}
    calls |= {name: lambda of=of: found(of) for name, of in asked.items()}
    calls["without lse"] = lambda: found("key_sum", None)
    calls["PyTorch"] = torch.no_grad()(lambda: weights_of(case, *tensors[:2]).sum(-2))
    error = difference(found("key_sum").key_sum, exact(calls["PyTorch"]()))
    assert error <= TOLERANCE[case.dtype], f"{case.name}: differs by {error:.2g}"
    times = race(calls, options.seconds)
    shares = (digits(times[name].ratio_to(times["forward"])) for name in (*asked, "without lse", "PyTorch"))
    return times["forward"], *shares, f"{error:.1e}"


# The tables


def cases() -> list[Case]:
    return [
        Case(
            f"D={channels}, {'causal' if causal else 'full'}, {dtype}",
            tokens,
            tokens,
            4,
            4,
            channels,
            dtype,
            causal,
        )
        for dtype, tokens in (("float32", 2048), ("float64", 1024))
        for channels in (64, 128)
        for causal in (False, True)
    ]


LOOKED = (
    Case("2,048 causal", 2048, 2048, 8, 8, 64, causal=True),
    Case("the last 32 queries of 8,192 keys", 32, 8192, 32, 8, 128, causal=True),
    Case("one query, 8,192 keys", 1, 8192, 32, 8, 128),
)
OF_DERIVATIVES = (
    "forward", "tangent", "of queries", "PyTorch's", "gradients", "second", "PyTorch's second", "difference"
)  # fmt: skip
OF_WEIGHTS = (
    "forward",
    "key sums",
    "entropy",
    "16 top keys",
    "sums without lse",
    "PyTorch's sums",
    "difference",
)


def main() -> None:
    options = harness.arguments(__doc__)
    if torch is None:
        raise SystemExit("bench_derivatives.py compares with PyTorch: pip install torch")
    report = harness.Report("derivatives", "Derivatives, and what weights tell", options)
    report.text(
        "Milliseconds of `flash_attention` and of `flash_attention_bwd`, median over the rounds; `~` marks rounds that "
        "differ widely. All else are ratios within a round. `tangent`, `of queries`: `flash_attention_jvp` with the "
        "tangents of all inputs, and of queries alone, beside the forward; `second`: `flash_attention_bwd_vjp` with "
        "all cotangents, beside the gradients. PyTorch's: plain operations (products and a softmax) under "
        "`torch.func.jvp`, and the second of two calls of `torch.autograd.grad`; how many times as long they take as "
        "attnmask."
    )
    tables = (
        ("Derivatives", "2,048 tokens, in float64 1,024; 4 heads.", OF_DERIVATIVES, derivatives, cases()),
        (
            "What weights tell",
            "Beside the forward of the same queries; `lse` is given. PyTorch's: its softmax, summed. 8 heads of 64, "
            "and 32 heads on 8 of 128.",
            OF_WEIGHTS,
            statistics,
            LOOKED,
        ),
    )
    for title, text, columns, row, all_cases in tables:
        asked = [case for case in all_cases if options.only in case.name]
        if not asked:
            continue
        report.heading(title)
        report.text(text)
        report.table("case", *columns)
        for case in asked:
            report.row(case.name, *row(case.sized(options), options))
        report.end_table()
    report.write()


if __name__ == "__main__":
    main()
