"""Compares each kernel of the table with plain NumPy, level by level, by the checks of `kernel_checks*`."""

import kernel_checks_i4
import numpy as np
import pytest
from environment import ARM_LEVELS, X86_LEVELS, with_doors
from kernel_checks import CHECKS as PLAIN_CHECKS
from kernel_checks import rng_of
from kernel_checks_backward import check_backward, check_find_row_max
from kernel_checks_conv import CHECKS as CONV_CHECKS
from kernel_checks_rows import CHECKS as ROW_CHECKS
from kernel_checks_second import check_backward_tangents
from kernel_checks_step import check_step, check_step_unpacked, check_steps
from kernel_checks_tangents import check_tangent_step
from kernel_checks_weights import check_find_weights, check_rank_keys, check_sum_weights
from kernel_table import CONSTANTS, SLOTS, TYPES, Kernel, table_of

pytestmark = with_doors


# Checks by the type of a kernel, so that a new kernel has a check, or fails.
def check_end_tiles(kernel, rng):
    """Steps configure tiles themselves, whether they are configured or not."""
    table = kernel.table
    for slot in ("flash_amx.step", "flash_amx.steps", "flash_amx.backward"):
        CHECKS[SLOTS[slot]](Kernel(slot, table), rng)
        kernel()
        kernel()


CHECKS = {
    **PLAIN_CHECKS,
    **ROW_CHECKS,
    **CONV_CHECKS,
    "am_end_tiles": check_end_tiles,
    "am_flash_backward_step": check_backward,
    "am_flash_find_row_max": check_find_row_max,
    "am_flash_find_weights": check_find_weights,
    "am_flash_rank_keys": check_rank_keys,
    "am_flash_sum_weights": check_sum_weights,
    "am_flash_step": check_step,
    "am_flash_step_unpacked": check_step_unpacked,
    "am_flash_steps": check_steps,
    "am_flash_backward_tangents": check_backward_tangents,
    "am_flash_tangent_step": check_tangent_step,
}
LEVELS_WITH_I16X2 = (*X86_LEVELS[X86_LEVELS.index("avx2") :], *ARM_LEVELS[1:])
LEVELS_WITH_VNNI = X86_LEVELS[X86_LEVELS.index("avx512vnni") :]
FOUR_BITS_AT = {"flash_f32": LEVELS_WITH_VNNI, "flash_bf16x2": ("avx512bf16",), "flash_amx": ("amx",)}
QUERY_PACKERS = {
    f"flash_f32.kv[{CONSTANTS['AM_INT8']}].pack_queries": LEVELS_WITH_I16X2,
    f"flash_f32.kv[{CONSTANTS['AM_BFLOAT16']}].pack_queries": ("avx512", *LEVELS_WITH_VNNI),
    f"flash_bf16x2.kv[{CONSTANTS['AM_INT8']}].pack_queries": ("avx512bf16",),
    f"flash_bf16x2.kv[{CONSTANTS['AM_FLOAT8_E4M3']}].pack_queries": ("avx512bf16",),
}
FOUR_BITS = {f"{family}.kv[{CONSTANTS['AM_INT4']}]": levels for family, levels in FOUR_BITS_AT.items()}
CHECKS_OF_FOUR_BITS = {
    "am_flash_pack_queries": ROW_CHECKS["am_flash_pack_queries"],
    "am_flash_step_unpacked": kernel_checks_i4.check_step_unpacked,
}
EIGHT_BITS_BY_BF16 = tuple(f"flash_bf16x2.kv[{CONSTANTS[name]}]" for name in ("AM_INT8", "AM_FLOAT8_E4M3"))
# Where bfloat16 is multiplied; builds for tests emulate bf16x2 at other levels.
LEVELS_BY_BF16 = {"flash_bf16x2": ("avx512bf16", "neonbf16"), "flash_amx": ("amx",)}

IN_FLOAT32 = (".tangent_step", ".backward_tangents", ".find_weights", ".sum_weights", ".rank_keys")

# The element types that each arithmetic reads and writes.
UP_TO_FLOAT32 = ("AM_FLOAT16", "AM_BFLOAT16", "AM_FLOAT32")
FORMATS = {
    "cumsum.rows": (*UP_TO_FLOAT32, "AM_FLOAT64"),
    "cumsum.scan": (*UP_TO_FLOAT32, "AM_FLOAT64"),
    "flash_f32.kv": (*UP_TO_FLOAT32, "AM_INT8", "AM_FLOAT8_E4M3", "AM_INT4"),
    "flash_f32.widen": ("AM_INT4",),
    "flash_f32.numbers": UP_TO_FLOAT32,
    "flash_f64.kv": ("AM_FLOAT64",),
    "flash_f64.widen": (),
    "flash_f64.numbers": ("AM_FLOAT64",),
    "flash_bf16x2.kv": ("AM_BFLOAT16", "AM_INT8", "AM_FLOAT8_E4M3", "AM_INT4"),
    "flash_bf16x2.widen": ("AM_INT4",),
    "flash_bf16x2.numbers": UP_TO_FLOAT32,
    "flash_amx.kv": ("AM_BFLOAT16", "AM_INT4"),
    "flash_amx.widen": ("AM_INT4",),
    "flash_amx.numbers": UP_TO_FLOAT32,
    "conv_f32.forward": UP_TO_FLOAT32,
    "conv_f64.forward": ("AM_FLOAT64",),
}
ARITHMETICS = [name for name, kind in TYPES["am_kernels"]._fields_ if kind is TYPES["am_arithmetic"]]
OFFERED = tuple(f"{part}[{CONSTANTS[name]}]" for part, names in FORMATS.items() for name in names)
NOWHERE = [slot for slot in SLOTS if slot.startswith(tuple(FORMATS)) and not slot.startswith(OFFERED)]


def lacks(kernel: Kernel, isa: str) -> str | None:
    """Why a level has no such kernel, or None."""
    slot, arithmetic = kernel.slot, kernel.slot.partition(".")[0]
    levels = LEVELS_BY_BF16.get(arithmetic)
    if levels and isa not in levels and not getattr(kernel.table, arithmetic).panel:
        return f"{isa} does not multiply bfloat16"
    if slot.startswith(tuple(FOUR_BITS)):
        read = isa in FOUR_BITS[slot.rpartition(".")[0]] and SLOTS[slot] in CHECKS_OF_FOUR_BITS
        return None if read else "their rows are widened"
    if slot.endswith(".pack_queries") and isa not in QUERY_PACKERS.get(slot, ()):
        return "queries are read as they are"
    if slot.startswith(EIGHT_BITS_BY_BF16) and isa != "avx512bf16":
        return f"{isa} has no quick products of bfloat16, or none at all"
    if slot.startswith("flash_bf16x2.widen") and isa != "avx512bf16":
        return f"{isa} reads four bits in float32"
    if slot.endswith(IN_FLOAT32) and not slot.startswith("flash_f"):
        return "of bfloat16 these are computed in float32"
    if slot.endswith((".steps", "end_tiles")) and (isa != "amx" or slot.startswith(("flash_f", "flash_b"))):
        return f"{isa} has no tiles, or this arithmetic does not use them"
    return None


@pytest.mark.levels("all")
@pytest.mark.parametrize("slot", [slot for slot in SLOTS if slot not in NOWHERE])
def test_kernel(isa, slot):
    kernel = Kernel(slot, table_of(isa))
    why = lacks(kernel, isa)
    assert bool(kernel.address) == (why is None), why
    if (
        isa == "amx"
        and kernel.address == Kernel(slot.replace("amx", "bf16x2"), table_of("avx512bf16")).address
    ):
        why = "amx takes this kernel from the level below"
    if why:
        pytest.skip(why)
    checks = CHECKS_OF_FOUR_BITS if slot.startswith(tuple(FOUR_BITS)) else CHECKS
    with np.errstate(all="ignore"):
        checks[SLOTS[slot]](kernel, rng_of(kernel))


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_what_an_arithmetic_reads_has_kernels(isa, arithmetic):
    table = table_of(isa)
    for i, kv in enumerate(getattr(table, arithmetic).kv):
        reads, reads_rows = (kv.reading == CONSTANTS[name] for name in ("AM_KV_READ", "AM_KV_ROWS"))
        widens = reads_rows or kv.reading == CONSTANTS["AM_KV_WIDENED"]
        packs = kv.queries != CONSTANTS["AM_QUERY_ROWS"]
        for name in ("pack_keys", "pack_values", "step_unpacked"):
            has = reads or (reads_rows and name == "step_unpacked")
            assert bool(Kernel(f"{arithmetic}.kv[{i}].{name}", table).address) == has, (i, name)
        assert bool(Kernel(f"{arithmetic}.kv[{i}].pack_queries", table).address) == packs, i
        assert bool(Kernel(f"{arithmetic}.widen[{i}]", table).address) == widens, i


def test_other_element_types_have_no_kernels(isa):
    for slot in NOWHERE:
        assert not Kernel(slot, table_of(isa)).address, slot
