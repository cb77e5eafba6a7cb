"""What a call costs from within a framework, beside the call from NumPy; and a model with PyTorch's own attention.

python benchmarks/bench_frameworks.py [--quick] [--only TEXT] [--threads N]
"""

import itertools
from typing import Any

import harness
import numpy as np
from harness import Call, race, torch

import attnmask

SIZES = {"short": (1, 16, 4, 32), "long": (1, 1024, 16, 64)}  # B, T, H, D
LAYERS, WIDTH, HEADS, TOKENS, DOCUMENTS = 4, 512, 8, 2048, 16


def arrays(name: str) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(SIZES[name], np.float32) for _ in range(3)]


def torch_calls(given: list[np.ndarray]) -> dict[str, Call]:
    import attnmask.torch

    attend = attnmask.torch.flash_attention
    plain = [torch.from_numpy(x) for x in given]
    learned = [x.clone().requires_grad_() for x in plain]
    compiled = torch.compile(lambda q, k, v: attend(q, k, v, causal=True), fullgraph=True)

    def training() -> object:
        return torch.autograd.grad(attend(*learned, causal=True).sum(), learned)

    return {
        "torch": lambda: attend(*plain, causal=True),
        "torch, compiled": lambda: compiled(*plain),
        "torch, forward and backward": training,
    }


def numpy_calls(given: list[np.ndarray]) -> dict[str, Call]:
    def training() -> object:
        out, vjp = attnmask.flash_attention_vjp(*given, causal=True)
        return vjp(np.ones_like(out))

    return {
        "NumPy": lambda: attnmask.flash_attention(*given, causal=True),
        "NumPy, forward and backward": training,
    }


def calls(report: harness.Report, options: Any) -> None:
    report.heading("Calls")
    report.text("Milliseconds, and how many microseconds more than from NumPy.")
    report.table("call", "ms", "more, µs")
    for size in SIZES:
        if options.only not in size:
            continue
        given = arrays(size)
        contenders = numpy_calls(given) | (torch_calls(given) if torch else {})
        right = contenders["NumPy"]()
        for name in ("torch", "torch, compiled"):
            if torch:
                np.testing.assert_array_equal(contenders[name]().numpy(), right)
        times = race(contenders, options.seconds)
        for name, t in times.items():
            base = times["NumPy, forward and backward" if "backward" in name else "NumPy"]
            more = None if t is base else f"{1e6 * (t.median - base.median):.0f}"
            report.row(f"{size}: {name}", t, more)
    report.end_table()


def model() -> Any:
    """Layers as of Llama, without their positions: attention by `function`."""
    nn = torch.nn

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
            self.project, self.out = (
                nn.Linear(WIDTH, 3 * WIDTH, bias=False),
                nn.Linear(WIDTH, WIDTH, bias=False),
            )
            self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
            self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

        def forward(self, x: Any, attend: Any) -> Any:
            query, key, value = self.project(self.before(x)).unflatten(-1, (3, HEADS, -1)).unbind(-3)
            x = x + self.out(attend(query, key, value).flatten(-2))
            between = self.between(x)
            return x + self.down(nn.functional.silu(self.gate(between)) * self.up(between))

    return nn.ModuleList(Layer() for _ in range(LAYERS))


def models(report: harness.Report, options: Any) -> None:
    import attnmask.torch

    torch.manual_seed(0)
    layers = model()
    x = torch.randn(1, TOKENS, WIDTH)
    ends = [TOKENS * (i + 1) // DOCUMENTS for i in range(DOCUMENTS)]
    starts = torch.tensor([0, *ends])
    ids = torch.repeat_interleave(torch.arange(DOCUMENTS), starts.diff())
    live = (ids[:, None] == ids) & torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def swapped(**more: Any) -> Any:
        return lambda *tensors: sdpa(*(x.transpose(1, 2) for x in tensors), **more).transpose(1, 2)

    def ours(**more: Any) -> Any:
        return lambda *tensors: attnmask.torch.flash_attention(*tensors, causal=True, **more)

    ways = {
        "causal": {"attnmask": ours(), "sdpa": swapped(is_causal=True)},
        f"{DOCUMENTS} documents": {
            "attnmask": ours(cum_seqlens_q=starts, cum_seqlens_k=starts),
            "sdpa": swapped(attn_mask=live[None, None]),
        },
    }

    def run(attend: Any) -> Any:
        y = x
        for layer in layers:
            y = layer(y, attend)
        return y

    def prefill(attend: Any) -> Any:
        with torch.no_grad():
            return run(attend)

    def training(attend: Any) -> Any:
        parameters = list(layers.parameters())
        return lambda: torch.autograd.grad(run(attend).square().mean(), parameters)

    def attention(attend: Any) -> Any:
        tensors = [torch.randn(1, TOKENS, HEADS, WIDTH // HEADS, requires_grad=True) for _ in range(3)]
        return lambda: torch.autograd.grad(attend(*tensors).sum(), tensors)

    makers = {
        "prefill": lambda attend: lambda: prefill(attend),
        "training step": training,
        "attention": attention,
    }
    report.heading(f"A model of {LAYERS} layers, {TOKENS:,} tokens, width {WIDTH}, float32")
    report.text("Milliseconds. `attention` is that of one layer alone, forward and backward.")
    report.table("case", "attnmask", "sdpa", "ratio")
    for (kind, way), what in itertools.product(ways.items(), makers):
        name = f"{kind}: {what}"
        if options.only not in name:
            continue
        torch.testing.assert_close(prefill(way["attnmask"]), prefill(way["sdpa"]), rtol=1e-3, atol=1e-3)
        make = makers[what]
        contenders: dict[str, Call] = {who: make(attend) for who, attend in way.items()}
        times = race(contenders, options.seconds)
        ratio = times["sdpa"].ratio_to(times["attnmask"])
        report.row(name, times["attnmask"], times["sdpa"], f"{ratio:.2f}")
    report.end_table()


def main() -> None:
    options = harness.arguments(__doc__)
    report = harness.Report("frameworks", "Frameworks", options)
    calls(report, options)
    if torch:
        models(report, options)
    report.write()


if __name__ == "__main__":
    main()
