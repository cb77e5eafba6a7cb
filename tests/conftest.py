"""What the tests share: levels of instruction sets, memory layouts, and the profiles of hypothesis."""

import gc
import os
from collections import Counter

# NumPy computes what is expected, in a process for each processor: threads of its own would wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import attnmask
from attnmask import _core

# Failures of asserts in these modules are shown in full, as in the tests themselves.
pytest.register_assert_rewrite(
    "flash_expected", "flash_backward_expected", "kernel_checks", "kernel_checks_conv", "reference_kernels"
)

ISA_LEVELS = ("baseline", "avx2", "avx512", "avx512vnni", "avx512bf16", "amx")

# Sanitizers change times and the use of memory, so neither is tested under them.
ASAN, TSAN = (name in os.environ.get("LD_PRELOAD", "") for name in ("asan", "tsan"))
SANITIZED = ASAN or TSAN

# Under AddressSanitizer a test takes three times as long, so some are left out or thinned. Left out: programs in Python
# and what is asked of texts or of threads, which make the calls that other tests make. ThreadSanitizer goes through the
# tests of threads.
NO_CALLS_OF_THEIR_OWN = (
    "charts",
    "demo",
    "docs",
    "examples",
    "help",
    "make",
    "notebook",
    "reference_flash",
    "signatures",
    "threads",
)
if ASAN:
    collect_ignore = [f"test_{name}.py" for name in NO_CALLS_OF_THEIR_OWN]

# With ATTNMASK_TEST_LEVELS=turns, and under AddressSanitizer, each case runs at one level of instruction sets, levels
# taking turns; but at all levels those of the kernels themselves, and those that go through all pairs of arguments.
IN_TURN = ASAN or os.environ.get("ATTNMASK_TEST_LEVELS") == "turns"
AT_EACH_LEVEL = {"test_kernel", "test_all_pairs_of_arguments"}

# Thinned to every third case: tests that repeat calls with other numbers or threads. What is read and written is up to
# shapes, layouts, types and levels, and test_kernel, test_all_pairs_of_arguments and the tests of sequences go through
# all of these.
THINNED = {
    "test_a_million_tokens",
    "test_a_row_without_a_live_pair",
    "test_a_sequence_gets_the_bits_that_it_gets_alone",
    "test_a_signal_ends_a_long_call",
    "test_any_number_of_threads_gives_the_same_bits",
    "test_batch_rows_that_see_unlike_many_keys",
    "test_dead_pairs_have_no_influence",
    "test_few_queries_give_the_same_bits_in_any_layout",
    "test_float32_over_a_million_steps",
    "test_heads_that_share_keys_meet_them_in_turn",
    "test_live_nan_comes_through",
    "test_over_the_numbers_that_they_stand_for",
    "test_results_larger_than_the_cache",
    "test_sequences_of_any_length",
    "test_tasks_of_many_tiles",
    "test_terms_by_distance",
    "test_the_gradient_of_a_bias_alters_no_other",
}

# Files with attention and int8 caches besides those that are named so.
OF_ATTENTION = ("flash", "latent", "plain")
OF_INT8 = ("quantized", "latent", "plain")

# `pytest --hypothesis-profile=deep` searches for new cases; the default profile runs the same cases every time.
CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
settings.register_profile(
    "quick",
    max_examples=15 if SANITIZED else 60,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=CHECKS,
)
settings.register_profile("deep", max_examples=3000, deadline=None, suppress_health_check=CHECKS)
settings.load_profile("quick")

LAYOUTS = ("contiguous", "fortran", "reversed", "strided", "misaligned", "swapped")
CONSTANT = ("constant along 1", "constant along -1")


@pytest.fixture(params=ISA_LEVELS)
def isa(request):
    """Runs the test once at each level of the dispatcher."""
    if request.param not in attnmask.show_config(mode="dict")["isa_available"]:
        pytest.skip(f"{request.param} is not available on this machine")
    previous = _core.use_isa(request.param)
    yield request.param
    _core.use_isa(previous)


# A warning in a test is an error, one of a plugin that happens to be installed is not. `torch.jit` is used by PyTorch
# itself, which warns of it from 2.13 on.
WARNINGS = pytest.mark.filterwarnings("error", "ignore:`torch.jit")


def pytest_itemcollected(item) -> None:
    item.add_marker(WARNINGS, append=False)  # before what a test says of itself


def multiplies_bf16(isa) -> bool:
    """Whether a level multiplies bfloat16, as those do that have it, and in builds for tests others too."""
    from kernel_table import table_of

    table = table_of(isa)
    return table.flash_bf16x2.panel > 0 or table.flash_amx.panel > 0


def parameters(item) -> dict:
    return item.callspec.params if hasattr(item, "callspec") else {}


def may_differ_from_lower_level(item) -> bool:
    """Whether the level of a test may differ from the one below it: avx512vnni only alters int8, avx512bf16 and amx
    only bfloat16, amx only in attention. test_kernel looks at the kernels of all types at every level but amx and
    avx512vnni, whose kernels are those of avx512bf16.
    """
    params = parameters(item)
    if params.get("isa") == "avx512vnni":
        return any(word in item.path.name for word in OF_INT8)
    dtype = str(params.get("dtype", getattr(params.get("case", params.get("steady")), "dtype", None)))
    if params.get("isa") == "avx512bf16":
        return dtype in ("None", "bfloat16") or "slot" in params
    of_attention = any(word in params.get("slot", item.path.name) for word in OF_ATTENTION)
    return params.get("isa") != "amx" or (of_attention and dtype in ("None", "bfloat16"))


def case_of(item) -> str:
    """What the levels of one case have in common."""
    if "isa" not in parameters(item):
        return item.nodeid
    return f"{item.parent.nodeid} {item.originalname} {parameters(item) | {'isa': None}}"


def in_turn(items: list) -> list:
    """Leaves each case one level; under AddressSanitizer it leaves fewer cases, and begins with another level."""
    available = attnmask.show_config(mode="dict")["isa_available"]
    cases: dict[str, list] = {}
    for item in items:
        draws = "pyplot" in getattr(item, "fixturenames", ())  # in Python, what others have read
        if parameters(item).get("isa", "baseline") in available and not (ASAN and draws):
            cases.setdefault(case_of(item), []).append(item)
    left, seen, kept = [], Counter(), Counter()
    for levels in cases.values():
        name = getattr(levels[0], "originalname", "")
        seen[name] += 1
        if ASAN and name in THINNED and seen[name] % 3 > 0:
            continue
        kept[name] += 1
        left += levels if name in AT_EACH_LEVEL else [levels[(kept[name] + ASAN) % len(levels)]]
    return left


def pytest_collection_modifyitems(config, items) -> None:
    """Puts the levels of one case next to each other, so that their expected result is computed only once."""
    left = [item for item in items if may_differ_from_lower_level(item)]
    left = in_turn(left) if IN_TURN else left
    config.hook.pytest_deselected(items=list(set(items).difference(left)))
    places: dict[str, int] = {}
    items[:] = sorted(left, key=lambda item: places.setdefault(case_of(item), len(places)))


def pytest_collection_finish() -> None:
    """Collecting garbage need not look at thousands of tests each time."""
    gc.freeze()


@pytest.fixture
def each_isa():
    """Sets each level in turn, for tests whose expected result takes longer than their call."""

    def levels():
        for level in attnmask.show_config(mode="dict")["isa_available"]:
            _core.use_isa(level)
            yield level

    previous = attnmask.show_config(mode="dict")["isa"]
    yield levels
    _core.use_isa(previous)


@pytest.fixture
def set_threads():
    """`attnmask.set_num_threads`, undone after the test."""
    previous = attnmask.get_num_threads()
    yield attnmask.set_num_threads
    attnmask.set_num_threads(previous)


@pytest.fixture
def torch():
    """PyTorch, with nothing compiled yet."""
    torch = pytest.importorskip("torch")
    import attnmask.torch  # noqa: F401

    torch.manual_seed(0)
    torch._dynamo.reset()
    return torch


def arrange(values, layout: str) -> np.ndarray:
    """`values` in memory as `layout` says; a constant layout (a stride of zero) alters them."""
    values = np.asarray(values)
    if layout == "fortran":
        return values.copy(order="F")
    if layout == "reversed":
        backwards = (slice(None, None, -1),) * values.ndim
        return values[backwards].copy()[backwards]
    if layout == "strided":
        buffer = np.empty([2 * length + 2 for length in values.shape], values.dtype)
        buffer.view(np.uint8)[...] = 0xA5
        view = buffer[tuple(slice(1, 1 + 2 * length, 2) for length in values.shape)]
        view[...] = values
        return view
    if layout == "misaligned":
        view = np.empty(values.nbytes + 1, np.uint8)[1:].view(values.dtype).reshape(values.shape)
        view[...] = values
        return view
    if layout == "swapped" and values.dtype.kind != "V":  # NumPy has no byte-swapped bfloat16
        return values.astype(values.dtype.newbyteorder("S"))
    if layout == "constant along 1":
        return np.broadcast_to(values[:, :1], values.shape)
    if layout == "constant along -1":
        return np.broadcast_to(values[..., :1], values.shape)
    return values.copy()


def assert_same(got, expected, case) -> None:
    """Equal in type, dtype, shape and every value; and a new C-contiguous array, as all results are."""
    assert type(got) is np.ndarray, case
    assert got.dtype == expected.dtype, (got.dtype, expected.dtype, case)
    assert got.shape == expected.shape, (got.shape, expected.shape, case)
    assert got.flags.c_contiguous, (got.strides, case)
    assert got.flags.writeable, case
    np.testing.assert_array_equal(got, expected, err_msg=repr(case))


def outcome(function, *args, **kwargs):
    """The result of a call, or the type of the arithmetic error that it raised."""
    try:
        return function(*args, **kwargs)
    except OverflowError:
        return OverflowError
