"""The result, lse and gradients of a sequence have the same bits, whatever it is computed together with.

pytest runs configurations in which any two levels of any two factors occur together. `python
tests/test_batch_invariance.py --seconds 600 --seed 1` draws configurations at random, and counts the results that
differ from those of the same sequence alone.
"""

import argparse
import time
from collections import Counter

import numpy as np
import pytest
from batch_cases import DEPTHS, HEADS, KINDS, MASKS, MORE, Config, comparisons
from conftest import ISA_LEVELS, SANITIZED
from flash_cases import BF16, FLOATS, all_pairs

import attnmask

AVAILABLE = attnmask.show_config(mode="dict")["isa_available"]
LEVELS = [
    (isa, dtype)
    for isa in ISA_LEVELS
    if isa in AVAILABLE
    for dtype in FLOATS
    if isa != "amx" or dtype == BF16
]
LENGTHS = (0, 1, 12, 16, 20, 64, 65, 300, 1000, 5000)
DECODED = (40, 700, 1000, 1500, 2000, 3000)


def of_self(*lengths: int) -> tuple[tuple[int, int], ...]:
    return tuple((length, length) for length in lengths)


GROUPS = (  # numbers of queries and keys of the sequences of a configuration
    of_self(0, 1, 12, 16, 20, 64, 65, 300),
    of_self(16, 12, 16, 20, 64),
    of_self(1000, 64, 12, 1),
    of_self(5000, 16, 300),
    of_self(1500, 1000),
    of_self(300, 20, 0, 300, 65),
    ((17, 40), (16, 700), (64, 2000), (8, 3000)),
    ((1, 40), (3, 700), (4, 1000), (31, 1500), (1, 2000)),
    ((1, 3000), (1, 40), (1, 700), (1, 1500)),
    ((31, 1500), (5, 1500)),
    ((20, 1000), (12, 1500), (28, 2000), (300, 300)),
    ((0, 40), (5, 0), (16, 16), (300, 65)),
)


def drawn(rng: np.random.Generator, seed: int) -> Config:
    """A configuration with a random level of each factor."""

    def one(levels):
        return levels[rng.integers(len(levels))]

    count, kind = int(rng.integers(1, 8)), int(rng.integers(3))
    lengths = one(GROUPS)
    if kind == 1:
        lengths = of_self(*rng.choice(LENGTHS, count).tolist())
    elif kind == 2:
        lengths = tuple((int(rng.integers(1, 65)), one(DECODED)) for _ in range(count))
    more = {name: value for options in MORE if rng.random() < 0.2 for name, value in options.items()}
    isa, dtype = one(LEVELS)
    return Config(lengths, isa, dtype, one(HEADS), one(DEPTHS), one(tuple(MASKS)), tuple(more.items()), seed)


def always_run() -> list[Config]:
    """Configurations in which any two levels of any two factors occur together, and some random ones."""
    factors = {
        "level": tuple(LEVELS), "lengths": GROUPS, "heads": HEADS, "depths": DEPTHS, "mask": tuple(MASKS), "more": MORE,
    }  # fmt: skip
    configs = []
    for seed, row in enumerate(all_pairs(factors, 0)):
        (isa, dtype), more = row.pop("level"), row.pop("more")
        configs.append(Config(isa=isa, dtype=dtype, more=tuple(more.items()), seed=seed, **row))
    rng = np.random.default_rng(0)
    configs += [drawn(rng, len(configs) + number) for number in range(100)]
    return [config.within(5e8) for config in configs[:: 8 if SANITIZED else 1]]


@pytest.mark.parametrize("config", always_run(), ids=str)
def test_a_sequence_gets_the_bits_that_it_gets_alone(config):
    kinds = np.random.default_rng(config.seed).choice(len(KINDS), 6, replace=False)
    found = [c.message for kind in sorted(kinds) for c in comparisons(config, KINDS[kind]) if c.unlike]
    assert not found, "\n".join([f"{len(found)} differ of {config}", *found])


def bounded(length: int) -> str:
    return f"≤{next(most for most in (16, 64, 512, 5000) if length <= most)}"


def sweep(seconds: float, seed: int, shown: int) -> None:
    """Prints how many comparisons differ, by group, and the first few differences of each kind."""
    total, unlike, printed = Counter(), Counter(), Counter()
    end, rng, number = time.monotonic() + seconds, np.random.default_rng(seed), 0
    while time.monotonic() < end:
        config = drawn(rng, seed * 10**6 + number).within(10 ** rng.uniform(7, 10))
        number += 1
        for kind in KINDS:
            for c in comparisons(config, kind):
                length, dtype = "×".join(map(bounded, c.lengths)), str(config.dtype)
                groups = [
                    ("all",),
                    (config.isa,),
                    (c.quantity,),
                    (dtype,),
                    (c.kind,),
                    (length,),
                    (config.mask,),
                ]
                for group in (*groups, (c.quantity, dtype, c.kind, length)):
                    total[group] += 1
                    unlike[group] += c.unlike > 0
                printed[c.kind] += c.unlike > 0
                if c.unlike and printed[c.kind] <= shown:
                    print(f"{c.message}\n    {config}", flush=True)
    print(f"{number} configurations. Of so many comparisons so many differ:")
    for group, count in sorted(total.items(), key=lambda item: (len(item[0]), -unlike[item[0]])):
        if unlike[group] or len(group) == 1:
            print(f"{count:9} {unlike[group]:9}  {', '.join(group)}")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(3, 1, 1, 1), (1, 1, 1, 1), (1, 4, 1, 1), (1, 1, 0, 1)], ids=str)
@pytest.mark.parametrize("lengths", [(300, 65, 20), (130, 130, 130), (128, 256), (385,)], ids=str)
def test_the_gradient_of_a_bias_alters_no_other(dtype, shape, lengths):
    """Batch rows of other lengths, that end with padding, share the bias or not; 0 stands for all queries."""
    rng = np.random.default_rng(1)
    tokens = sum(lengths) + 15
    ids = np.full((3, tokens), -1, np.int32)
    for row, order in enumerate((lengths, lengths[::-1], lengths[:1])):
        ids[row, : sum(order)] = np.repeat(np.arange(len(order)), order)
    q, k, v, dout = (rng.standard_normal((3, tokens, heads, 24)).astype(dtype) for heads in (4, 2, 2, 4))
    bias = rng.standard_normal([*shape[:2], tokens if shape[2] == 0 else 1, tokens]).astype(dtype)

    def gradients(**more):
        _, vjp = attnmask.flash_attention_vjp(
            q, k, v, bias=bias, causal=True, q_segment_ids=ids, kv_segment_ids=ids, **more
        )
        return vjp(dout)

    plain, more = gradients(), gradients(grad_bias=True)
    assert more.bias.shape == bias.shape
    for name in ("query", "key", "value"):
        assert getattr(plain, name).tobytes() == getattr(more, name).tobytes(), name


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shown", type=int, default=1, help="differences of each kind to print")
    options = parser.parse_args()
    sweep(options.seconds, options.seed, options.shown)
