"""The level `plain` gives what the float64 twins give, and the other levels give what it gives."""

import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from environment import SANITIZED
from flash_backward_expected import CASES as GRADIENT_CASES
from flash_backward_expected import expected_of as gradients_of
from flash_backward_expected import run as run_gradients
from flash_cases import BF16, F16, F32, F64, all_pairs
from flash_expected import CASES, expected_of, run
from kvcache_cases import FACTORS as CACHE_FACTORS
from kvcache_cases import Case as CacheCase
from kvcache_cases import arguments_of, check, right_of

import attnmask
from attnmask import _core

STEP = 20 if SANITIZED else 1
CACHE_CASES = [CacheCase(**levels, seed=i, order=i) for i, levels in enumerate(all_pairs(CACHE_FACTORS, 0))]
QUANTIZED = ("int8", ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, "int4")


@pytest.fixture
def plain():
    previous = _core.use_isa("plain")
    yield
    _core.use_isa(previous)


@pytest.mark.parametrize("case", CASES[:: 2 * STEP], ids=lambda case: str(case.seed))
def test_results(plain, case):
    expected_of(case).check(*run(case, case.arguments()))


@pytest.mark.parametrize("case", GRADIENT_CASES[:: 2 * STEP], ids=lambda case: str(case.seed))
def test_gradients(plain, case):
    gradients_of(case).check(run_gradients(case, case.arguments()))


@pytest.mark.parametrize("case", CACHE_CASES[:: 4 * STEP], ids=lambda case: str(case.seed))
def test_caches(plain, case):
    check(case, right_of(case), arguments_of(case))


def test_from_the_environment():
    code = "import attnmask; print(attnmask.show_config(mode='dict')['isa'])"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"ATTNMASK_ISA": "plain"},
        capture_output=True,
        text=True,
    )
    assert found.stdout.strip() == "plain", found.stderr


# Other levels, by random calls of many blocks and tiles

# The largest error, of the largest number of an array: of results, and of gradients.
ERRORS = {F64: (1e-13, 1e-12), F32: (2e-6, 1e-5), F16: (1e-3, 2e-3), BF16: (1e-2, 2e-2)}


class Random:
    """Numbers, shapes and terms of a random call."""

    def __init__(self, seed):
        self.rng = rng = np.random.default_rng(seed)
        self.dtype = self.pick(F32, BF16, F16, F64)
        self.kv_heads = self.pick(1, 2, 3)
        self.heads = self.kv_heads * self.pick(1, 2, 5)
        self.depths = self.pick(8, 33, 64, 80), self.pick(16, 24, 64, 129)
        self.batch, self.queries, self.keys = (
            self.pick(1, 2),
            int(rng.integers(1, 250)),
            int(rng.integers(1, 300)),
        )

    def pick(self, *choices):
        return choices[self.rng.integers(len(choices))]

    def maybe(self, **options):
        return {name: make() for name, make in options.items() if self.rng.random() < 0.35}

    def numbers(self, *shape, dtype=None):
        return self.rng.standard_normal(shape).astype(dtype or self.dtype)

    def terms(self):
        return self.maybe(
            logits_soft_cap=lambda: self.pick(2.0, 30.0),
            alibi_slopes=lambda: abs(self.numbers(self.heads, dtype=F32)) * F32.type(0.2),
            softmax_aux=lambda: self.numbers(self.pick(1, 3), dtype=F32),
            softmax_scale=lambda: self.pick(0.1, 0.5),
            sliding_window=lambda: self.pick(3, (20, 0), (0, 9), (70, None)),
        )

    def call(self):
        """Arguments of flash_attention."""
        numbers, (depth, value_depth) = self.numbers, self.depths
        kwargs = self.terms() | self.maybe(
            causal=lambda: True,
            attention_mask=lambda: self.rng.random((self.batch, self.heads, self.queries, self.keys)) < 0.8,
            bias=lambda: numbers(self.pick(1, self.batch), self.pick(1, self.heads), self.queries, self.keys),
            dropout_prob=lambda: 0.2,
        )
        if self.rng.random() < 0.3:
            kwargs |= {"relative_bias": numbers(self.heads, 21, dtype=F32), "relative_low": -10}
        q = numbers(self.batch, self.queries, self.heads, depth)
        k, v = (numbers(self.batch, self.keys, self.kv_heads, count) for count in (depth, value_depth))
        return (q, k, v), kwargs | {"dropout_seed": 7}

    def cache(self):
        """Arguments of flash_attention_with_kvcache, over pages of any format, of which values may be a view."""
        page, per_row = self.pick(2, 16, 48, 64), 6
        queries, pages = self.pick(1, 2, 5, 20, 70), self.batch * per_row + 2
        kind = self.pick(None, "int4", *QUANTIZED) if self.dtype != F64 else None
        if kind == "int4":
            self.depths = self.pick(64, 128), 64
        latent = self.depths[0] >= self.depths[1] and self.rng.random() < 0.5
        caches, scales = [], {}
        for name, count in zip("k" if latent else "kv", self.depths, strict=False):
            numbers = self.numbers(pages, page, self.kv_heads, count, dtype=F32)
            if kind:
                axis, group = (None, 32) if kind == "int4" else (-1, None)
                numbers, scales[f"{name}_scale"] = attnmask.quantize_kv(numbers, kind, axis, group=group)
            caches.append(numbers if kind else numbers.astype(self.dtype))
        if latent:
            caches.append(caches[0][..., : self.depths[1] // (2 if kind == "int4" else 1)])
        table = (
            self.rng.permutation(pages)[: self.batch * per_row].reshape(self.batch, per_row).astype(np.int32)
        )
        lengths = self.rng.integers(min(queries, page * per_row), page * per_row + 1, self.batch).astype(
            np.int32
        )
        q = self.numbers(self.batch, queries, self.heads, self.depths[0])
        more = {"cache_seqlens": lengths, "block_table": table, "causal": True, **scales}
        if self.rng.random() < 0.5:
            q, more["cu_seqlens_q"] = q.reshape(-1, *q.shape[2:]), np.arange(self.batch + 1) * queries
        rows = (1, len(q)) if q.ndim == 3 else q.shape[:2]
        more |= self.maybe(
            bias=lambda: self.numbers(rows[0], self.heads, rows[1], page * per_row),
            relative_bias=lambda: self.numbers(self.heads, 21, dtype=F32),
        )
        return (q, *caches), self.terms() | more


def near(got, want, error, seed):
    for a, b in zip(got, want, strict=True):
        a, b = (np.nan_to_num(np.asarray(x).astype(np.float64), neginf=-1e4) for x in (a, b))
        assert abs(a - b).max(initial=0) <= error * max(1, abs(b).max(initial=0)), seed


def at_both(isa, attend):
    """Results at the level `plain` and at another one."""
    _core.use_isa("plain")
    want = attend()
    _core.use_isa(isa)
    return attend(), want


@pytest.mark.parametrize("seed", range(0, 24, STEP))
def test_other_levels_give_the_same_results(isa, seed):
    r = Random(seed)
    (q, k, v), kwargs = r.call()
    got, want = at_both(isa, lambda: attnmask.flash_attention(q, k, v, return_lse=True, **kwargs))
    near(got, want, ERRORS[r.dtype][0], seed)


@pytest.mark.parametrize("seed", range(100, 124, STEP))
def test_other_levels_give_the_same_gradients(isa, seed):
    r = Random(seed)
    (q, k, v), kwargs = r.call()
    dout = r.numbers(*q.shape[:-1], v.shape[-1])
    wanted = {"bias": "grad_bias", "softmax_aux": "grad_softmax_aux", "relative_bias": "grad_relative_bias"}
    kwargs |= {flag: True for name, flag in wanted.items() if name in kwargs}

    def attend():
        gradients = attnmask.flash_attention_vjp(q, k, v, **kwargs)[1](dout)
        return [x for x in gradients if x is not None]

    near(*at_both(isa, attend), ERRORS[r.dtype][1], seed)


@pytest.mark.parametrize("seed", range(200, 260, STEP))
def test_other_levels_give_the_same_over_caches(isa, seed):
    r = Random(seed)
    arguments, kwargs = r.cache()
    got, want = at_both(
        isa, lambda: attnmask.flash_attention_with_kvcache(*arguments, return_lse=True, **kwargs)
    )
    near(got, want, max(ERRORS[r.dtype][0], 1e-4), seed)
