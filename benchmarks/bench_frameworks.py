"""What a call costs from within a framework, beside the call from NumPy; and a model with PyTorch's own attention.

python benchmarks/bench_frameworks.py [--quick] [--only TEXT] [--threads N]
"""

import functools
import itertools
from typing import Any

import harness
import numpy as np
from harness import Call, digits, jax, race, torch
from kvcache_cases import in_lines

import attnmask

# Queries, keys, heads, channels; keys and values of the last take 32 MB each.
SIZES = {"short": (16, 16, 4, 32), "long": (1024, 1024, 16, 64), "one query": (1, 8192, 8, 128)}
IN_A_ROW = "torch, compiled, calls in a row"
ROW = 5
LAYERS, WIDTH, HEADS, TOKENS, DOCUMENTS = 4, 512, 8, 2048, 16


def arrays(name: str) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Query, key and value, which frameworks take where they lie, and the other arguments: the last query sees all
    keys.
    """
    queries, keys, *heads = SIZES[name]
    rng = np.random.default_rng(0)
    given = [
        in_lines(rng.standard_normal((1, tokens, *heads), np.float32)) for tokens in (queries, keys, keys)
    ]
    return given, {"causal": True, "causal_offset": keys - queries}


def torch_calls(given: list[np.ndarray], more: dict[str, Any]) -> dict[str, Call]:
    import attnmask.torch

    attend = functools.partial(attnmask.torch.flash_attention, **more)
    plain = [torch.from_numpy(x) for x in given]
    learned = [x.clone().requires_grad_() for x in plain]
    compiled = torch.compile(lambda q, k, v: attend(q, k, v), fullgraph=True)
    row = torch.compile(
        lambda q, k, v: functools.reduce(lambda x, _: attend(x, k, v), range(ROW), q), fullgraph=True
    )
    little = torch.compile(lambda q, k, v: q + 1, fullgraph=True)

    def training() -> object:
        return torch.autograd.grad(attend(*learned).sum(), learned)

    return {
        "torch": lambda: attend(*plain),
        "torch, compiled": lambda: compiled(*plain),
        IN_A_ROW: lambda: row(*plain),
        "NumPy, then little by torch, compiled": lambda: (
            attnmask.flash_attention(*given, **more),
            little(*plain),
        )[0],
        "torch, forward and backward": training,
    }


def jax_calls(given: list[np.ndarray], more: dict[str, Any]) -> dict[str, Call]:
    import attnmask.jax

    attend = functools.partial(attnmask.jax.flash_attention, **more)
    placed = [jax.device_put(x) for x in given]
    little = jax.jit(lambda q, k, v: q[0, 0])
    calls = {
        "JAX, jit": jax.jit(attend),
        "JAX, jit, callback": jax.jit(functools.partial(attend, callback=True)),
        "JAX, jit, forward and backward": jax.jit(jax.grad(lambda *x: attend(*x).sum(), (0, 1, 2))),
    }
    timed = {name: lambda call=call: jax.block_until_ready(call(*placed)) for name, call in calls.items()}

    def both() -> np.ndarray:
        out = attnmask.flash_attention(*given, **more)
        jax.block_until_ready(little(*placed))
        return out

    return {**timed, "NumPy, then little by JAX, jit": both}


def numpy_calls(given: list[np.ndarray], more: dict[str, Any]) -> dict[str, Call]:
    def training() -> object:
        out, vjp = attnmask.flash_attention_vjp(*given, **more)
        return vjp(np.ones_like(out))

    return {
        "NumPy": lambda: attnmask.flash_attention(*given, **more),
        "NumPy, forward and backward": training,
    }


def calls(report: harness.Report, options: Any) -> None:
    report.heading("Calls")
    report.text(
        "Milliseconds, and how many microseconds more than from NumPy. `short`: 16 causal tokens, 4 heads of 32 "
        "channels; `long`: 1,024, 16 heads of 64; `one query`: over 8,192 keys, 8 heads of 128. float32. `further`: "
        f"each of {ROW} calls in one compiled function but the first, as in the layers of a model. `then little`: "
        "behind NumPy's call a compiled function that takes as many arrays and reads a query alone: the framework's "
        "own way into a function, with caches that attention has filled."
    )
    report.table("call", "ms", "more, µs")
    for size in SIZES:
        if options.only not in size:
            continue
        given = arrays(size)
        contenders = numpy_calls(*given)
        for library, made in ((torch, torch_calls), (jax, jax_calls)):
            if library:
                contenders |= made(*given)
        query, *others = given[0]
        rights = [query]
        for _ in range(ROW):
            rights.append(attnmask.flash_attention(rights[-1], *others, **given[1]))
        for name, call in contenders.items():
            if "backward" not in name:
                right = rights[ROW if name == IN_A_ROW else 1]
                np.testing.assert_array_equal(np.asarray(call()), right)
        times = race(contenders, options.seconds)
        for name, t in times.items():
            base = times["NumPy, forward and backward" if "backward" in name else "NumPy"]
            label, shown, median = name, t, t.median
            if name == IN_A_ROW:
                median = (t.median - times["torch, compiled"].median) / (ROW - 1)
                label, shown = "torch, compiled, further", digits(1e3 * median)
            more = None if t is base else f"{1e6 * (median - base.median):.0f}"
            report.row(f"{size}: {label}", shown, more)
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
