"""Which kernels a level, type and use get, and which level a processor: all that are known, here or not."""

import pytest
from environment import ARM_LEVELS, ISA_LEVELS, X86_LEVELS, multiplies_bf16, with_doors
from kernel_table import type_of

from attnmask import _core

pytestmark = with_doors
F32, F64, BF16, I8, F8 = "float32", "float64", "bfloat16", "int8", "float8_e4m3fn"
GRADIENTS, PACKED, ROWS = "attention, gradients", "attention, packed keys", "attention, rows of keys"
LINEAR = ("linear attention", "linear attention, gradients", "linear attention, a token")
COMPILED = dict(zip(X86_LEVELS, ("baseline", "avx2", "avx512", "avx512", "avx512", "avx512"), strict=True))
COMPILED |= dict.fromkeys(ARM_LEVELS, "baseline")


def by(topic: str, neonbf16: str | None = None, **others: str) -> dict[str, str]:
    """A topic that is compiled up to avx512, and other kernels from some levels on."""
    kernels = {level: f"{topic} {compiled}" for level, compiled in COMPILED.items()}
    for level, other in others.items():
        kernels |= dict.fromkeys(X86_LEVELS[X86_LEVELS.index(level) :], other)
    return kernels | ({"neonbf16": neonbf16} if neonbf16 else {})


BF16X2, NEON = "flash_bf16x2 avx512bf16", "flash_bf16x2 neonbf16"
LINEAR_BF16X2 = by(
    "linear", "linear_bf16x2 neonbf16", avx512bf16="linear_bf16x2 avx512bf16", amx="linear avx512"
)
BY_I16X2 = by(
    "kv_i8", avx2="kv_i16x2 avx2", avx512="kv_i16x2 avx512", avx512vnni="kv_i16x2 avx512vnni"
) | dict.fromkeys(ARM_LEVELS[1:], "kv_i16x2 neondot")
TABLE = {  # of queries, keys, and use: the kernels at each level
    **{
        (query, key, use): by(topic)
        for query in (F32, "float16")
        for key, use, topic in (
            (query, "attention", "flash_f32"),
            (query, GRADIENTS, "flash_f32"),
            (query, "short convolution", "conv_f32"),
            *((query, use, "linear") for use in LINEAR),
            (F32, PACKED, "kv_f32"),
            (F32, ROWS, "kv_f32"),
            ("float16", PACKED, "kv_f16"),
            ("float16", ROWS, "kv_f16"),
            (F8, ROWS, "kv_f8"),
        )
    },
    **{
        (F64, F64, use): by(topic)
        for use, topic in (
            ("attention", "flash_f64"),
            (GRADIENTS, "flash_f64"),
            (PACKED, "flash_f64"),
            (ROWS, "flash_f64"),
            ("short convolution", "conv_f64"),
            *((use, "linear") for use in LINEAR),
        )
    },
    (F32, I8, ROWS): BY_I16X2,
    (F32, "uint8", ROWS): by("kv_f32"),
    ("float16", "uint8", ROWS): by("kv_f32", avx512vnni="kv_i16x2 avx512vnni"),
    (F32, "float8_e5m2", ROWS): by("kv_f32"),
    (BF16, BF16, "attention"): by("flash_f32", NEON, avx512bf16=BF16X2, amx="flash_amx amx"),
    (BF16, BF16, GRADIENTS): by("flash_f32", NEON, avx512bf16=BF16X2, amx="flash_amx amx"),
    (BF16, BF16, PACKED): by("kv_bf16", "kv_f32 baseline", avx512bf16="kv_f32 avx512"),
    (BF16, BF16, ROWS): by("kv_bf16", "kv_bf16x2 neonbf16", avx512bf16="kv_bf16x2 avx512bf16"),
    (BF16, I8, "attention"): by("flash_f32", avx512bf16=BF16X2, amx="flash_f32 avx512"),
    (BF16, I8, PACKED): by("kv_i8", avx512bf16="kv_f8x2 avx512bf16", amx="kv_i8 avx512"),
    (BF16, I8, ROWS): BY_I16X2,
    (BF16, F8, "attention"): by("flash_f32", avx512bf16=BF16X2, amx="flash_f32 avx512"),
    (BF16, F8, ROWS): by("kv_f8", avx512bf16="kv_f8x2 avx512bf16", amx="kv_f8 avx512"),
    (BF16, "uint8", "attention"): by("flash_f32", avx512bf16=BF16X2, amx="flash_amx amx"),
    (BF16, "uint8", ROWS): by("kv_f32", avx512vnni="kv_i16x2 avx512vnni"),
    # vdpbf16ps is slow where there are tiles, which linear attention does not use.
    (BF16, BF16, LINEAR[0]): LINEAR_BF16X2,
    (BF16, BF16, LINEAR[1]): LINEAR_BF16X2,
    (BF16, BF16, LINEAR[2]): by("linear"),
    (BF16, BF16, "short convolution"): by("conv_f32"),
}


@pytest.mark.parametrize("level", ISA_LEVELS)
def test_kernels_of_a_level(level):
    try:
        _core.best_isa(level, False)
    except ValueError as error:
        pytest.skip(str(error))
    emulates = level == "baseline" and multiplies_bf16("baseline")
    for (query, key, use), kernels in TABLE.items():
        chosen = _core.chosen_kernels(level, type_of(query), type_of(key))
        if not (emulates and query == BF16):
            assert chosen[use] == kernels[level], (query, key, use)
        assert chosen.keys() == {use for _, _, use in TABLE}, "a use has no row here"


def test_all_levels_are_in_the_table():
    assert all(kernels.keys() == COMPILED.keys() >= set(ISA_LEVELS) for kernels in TABLE.values())


@pytest.mark.parametrize("intel", [False, True])
@pytest.mark.parametrize("level", ISA_LEVELS)
def test_the_level_of_a_processor(level, intel):
    """Intel's processors take longer by vdpbf16ps than by float32."""
    try:
        best = _core.best_isa(level, intel)
    except ValueError as error:
        pytest.skip(str(error))
    assert best == ("avx512vnni" if intel and level == "avx512bf16" else level)
