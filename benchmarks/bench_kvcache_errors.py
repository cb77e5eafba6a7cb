"""How far attention over quantized caches is off, beside the bytes of a token and head.

python benchmarks/bench_kvcache_errors.py

Queries, keys and values are standard normal, 128 channels of 1,024 tokens. Then channels 5 and 70 of the keys are 8
times as large, and those of the queries 1 / 8, as if a few channels of a model's keys were outliers that its queries
make up for. The error is the root mean square of the difference from float64, over that of the results.
"""

import ml_dtypes
import numpy as np

import attnmask

TOKENS, DEPTH, OUTLIERS, TIMES = 1024, 128, (5, 70), 8
CACHES = {
    "bfloat16": {"dtype": ml_dtypes.bfloat16},
    "int8": {"dtype": np.int8},
    "float8_e4m3fn": {"dtype": ml_dtypes.float8_e4m3fn},
    "float8_e5m2": {"dtype": ml_dtypes.float8_e5m2},
    "int4, groups of 32": {"dtype": "int4", "group": 32},
    "int4, groups of 64": {"dtype": "int4", "group": 64},
    "int4, groups of 128": {"dtype": "int4", "group": 128},
}


def error(inputs: list[np.ndarray], rotate: bool, **options: object) -> tuple[float, int]:
    """Return the error of a cache, and its bytes of a token."""
    cache = attnmask.KVCache(1, DEPTH, pages=TOKENS // 64, rotate=rotate, **options)
    with cache.step([cache.new_sequence()], [TOKENS]) as step:
        out = step.attend(0, *inputs)
    right = attnmask.flash_attention(*(x[None].astype(np.float64) for x in inputs), causal=True)[0]
    held = (cache.k_pages, cache.v_pages, cache.k_scales, cache.v_scales)
    size = sum(x.nbytes for x in held if x is not None) // TOKENS
    return float(np.sqrt(np.mean((out - right) ** 2) / np.mean(right**2))), size


def main() -> None:
    rng = np.random.default_rng(0)
    plain = [rng.standard_normal((TOKENS, 1, DEPTH), np.float32) for _ in range(3)]
    outliers = [x.copy() for x in plain]
    outliers[0][..., OUTLIERS] /= TIMES
    outliers[1][..., OUTLIERS] *= TIMES
    print("| cache | bytes | error | with outliers | rotated |\n| --- | --: | --: | --: | --: |")
    for name, options in CACHES.items():
        errors = [
            error(inputs, turn, **options)
            for inputs, turn in ((plain, False), (outliers, False), (outliers, True))
        ]
        print(f"| {name} | {errors[0][1]} | {' | '.join(f'{100 * x:.2g} %' for x, _ in errors)} |")


if __name__ == "__main__":
    main()
