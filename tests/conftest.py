"""What the tests share: levels of instruction sets, fixtures, and the profiles of hypothesis."""

import gc
import os
from collections import Counter

# NumPy computes what is expected, in a process for each processor: threads of its own would wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
from environment import ASAN, ISA_LEVELS, SANITIZED
from hypothesis import HealthCheck, settings

import attnmask
from attnmask import _core
from attnmask._common import warnings as attnmask_warnings

# Failures of asserts in these modules are shown in full, as in the tests themselves.
pytest.register_assert_rewrite("flash_expected", "kernel_checks", "kernel_checks_conv", "reference_kernels")

# With ATTNMASK_TEST_LEVELS=turns, and under AddressSanitizer, each case runs at one level of instruction sets, levels
# taking turns. Under AddressSanitizer a test takes three times as long, so some are left out or thinned.
IN_TURN = ASAN or os.environ.get("ATTNMASK_TEST_LEVELS") == "turns"

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


@pytest.fixture(autouse=True)
def _first_warnings():
    """Lets each test get the warnings that are given once per process, whichever tests ran before it."""
    attnmask_warnings.forget()


@pytest.fixture(params=ISA_LEVELS)
def isa(request):
    """Runs the test once at each level of the dispatcher."""
    if request.param not in attnmask.show_config(mode="dict")["isa_available"]:
        pytest.skip(f"{request.param} is not available on this machine")
    previous = _core.use_isa(request.param)
    yield request.param
    _core.use_isa(previous)


# A warning in a test is an error, one of a plugin that happens to be installed is not. `torch.jit` is used by PyTorch
# itself, which warns of it from 2.13 on. Tests make calls of any kind, also those that look like another library's
# habits; tests of habits make errors of these warnings.
WARNINGS = pytest.mark.filterwarnings(
    "error", "ignore:`torch.jit", "ignore::attnmask._common.warnings.AttnmaskWarning"
)


def pytest_itemcollected(item) -> None:
    item.add_marker(WARNINGS, append=False)  # before what a test says of itself


def parameters(item) -> dict:
    return item.callspec.params if hasattr(item, "callspec") else {}


def levels(item) -> tuple[str, ...]:
    """How a test is run, and the levels that alter it though they do not alter most: amx, avx512vnni.

    "turns", unless it says otherwise: in quick runs each case runs at one level, levels taking turns
    "all": at each level in quick runs, too, as tests of the kernels themselves and of all pairs of arguments
    "once": makes no calls that others do not make, such as a program in Python; not under AddressSanitizer
    """
    marker = item.get_closest_marker("levels")
    return marker.args if marker else ("turns",)


def may_differ_from_lower_level(item) -> bool:
    """Whether the level of a test may differ from the one below it: avx512vnni only alters int8 and int4, avx512bf16,
    neonbf16 and amx only bfloat16, amx only in attention. test_kernel looks at the kernels of all types at every level
    but amx and avx512vnni, whose kernels are those of avx512bf16.
    """
    params = parameters(item)
    level, slot = params.get("isa"), params.get("slot")
    dtype = str(params.get("dtype", getattr(params.get("case", params.get("steady")), "dtype", None)))
    if level in ("avx512bf16", "neonbf16"):
        return dtype in ("None", "bfloat16") or slot is not None
    if level == "amx" and ("flash" in slot if slot else level in levels(item)):
        return dtype in ("None", "bfloat16")
    return level not in ("amx", "avx512vnni") or (level == "avx512vnni" and level in levels(item))


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
        if parameters(item).get("isa", "baseline") in available and not (ASAN and levels(item)[0] == "once"):
            cases.setdefault(case_of(item), []).append(item)
    left, seen, kept = [], Counter(), Counter()
    for case in cases.values():
        name = getattr(case[0], "originalname", "")
        seen[name] += 1
        if ASAN and case[0].get_closest_marker("repeats") and seen[name] % 3 > 0:
            continue
        kept[name] += 1
        left += case if levels(case[0])[0] == "all" else [case[(kept[name] + ASAN) % len(case)]]
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
def plain():
    """Runs the test at the level that has no kernels."""
    previous = _core.use_isa("plain")
    yield
    _core.use_isa(previous)


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
