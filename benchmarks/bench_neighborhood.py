"""Neighborhood attention of sequences, images and videos beside PyTorch with a mask written out.

python benchmarks/bench_neighborhood.py [--quick] [--only TEXT] [--threads N]
"""

import argparse
from typing import Any, NamedTuple

import harness
from harness import Call, difference, digits, race, torch

import attnmask

BOUND = 1e-4  # for float32
MOST_PAIRS = 2**27  # of a mask that is written out


class Case(NamedTuple):
    shape: tuple[int, ...]
    kernel: int | tuple[int, ...]
    heads: int
    head_dim: int
    gradients: bool = False

    @property
    def name(self) -> str:
        return f"{' x '.join(map(str, self.shape))}, kernel {self.kernel}" + ", gradients" * self.gradients


CASES = [
    Case(*sizes, gradients)
    for sizes in (
        ((8192,), 129, 8, 64),
        ((14, 14), 7, 16, 32),
        ((28, 28), 7, 8, 32),
        ((56, 56), 7, 4, 32),
        ((16, 32, 32), (3, 7, 7), 4, 64),
    )
    for gradients in (False, True)
]


def called(function: Any, inputs: list[Any], gradients: bool) -> Call:
    """Return a call of the result or of the gradients of its inputs."""
    if not gradients:
        return lambda: (function(*inputs),)
    inputs = [x.clone().requires_grad_() for x in inputs]
    return lambda: torch.autograd.grad(function(*inputs).sum(), inputs)


def row(case: Case, options: argparse.Namespace) -> tuple[object, ...]:
    import attnmask.natten as natten

    torch.manual_seed(0)
    shape = (1, *case.shape, case.heads, case.head_dim)
    inputs = [torch.randn(shape) for _ in range(3)]
    along = {1: natten.na1d, 2: natten.na2d, 3: natten.na3d}[len(case.shape)]
    calls = {"attnmask": called(lambda *x: along(*x, case.kernel), inputs, case.gradients)}
    mask = attnmask.MaskInfo.neighborhood(case.shape, case.kernel)
    tokens = mask.q_len
    if tokens**2 <= MOST_PAIRS:
        heads_first = [x.flatten(1, -3).transpose(1, 2).contiguous() for x in inputs]
        pairs = torch.tensor(mask.attention_mask)
        attend = torch.nn.functional.scaled_dot_product_attention
        calls["PyTorch"] = called(lambda *x: attend(*x, attn_mask=pairs), heads_first, case.gradients)
        got, wanted = calls["attnmask"](), calls["PyTorch"]()
        for one, other in zip(got, wanted, strict=True):
            one, other = one.flatten(1, -3).transpose(1, 2).detach().numpy(), other.detach().numpy()
            assert difference(one, other) <= BOUND, case.name
    times = race(calls, options.seconds)
    ratio = digits(times["PyTorch"].ratio_to(times["attnmask"])) if "PyTorch" in times else None
    pairs_seen = mask.density() * tokens**2 * case.heads
    flops = 4 * pairs_seen * case.head_dim * (3.5 if case.gradients else 1)
    return times["attnmask"], digits(flops / times["attnmask"].median / 1e9), times.get("PyTorch"), ratio


def main() -> None:
    options = harness.arguments(__doc__)
    if torch is None:
        raise SystemExit("bench_neighborhood.py compares with PyTorch: pip install torch")
    report = harness.Report("neighborhood", "Neighborhood attention", options)
    report.text(
        "Milliseconds, median over the rounds, float32. `GFLOP/s` counts allowed pairs alone. `PyTorch`: "
        "`scaled_dot_product_attention` with the mask of all pairs, which is left out where that has more than 2^27; "
        "`ratio`: how many times as long it takes."
    )
    report.table("case", "attnmask", "GFLOP/s", "PyTorch", "ratio")
    for case in CASES:
        if options.only in case.name:
            report.row(case.name, *row(case, options))
    report.end_table()
    report.write()


if __name__ == "__main__":
    main()
