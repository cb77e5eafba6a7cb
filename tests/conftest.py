"""What the tests share: levels of instruction sets, memory layouts, and the profiles of hypothesis."""

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import attnmask
from attnmask import _core

# Failures of asserts in these modules are shown in full, as in the tests themselves.
pytest.register_assert_rewrite(
    "flash_expected", "flash_backward_expected", "kernel_checks", "reference_kernels"
)

ISA_LEVELS = ("baseline", "avx2", "avx512", "avx512bf16", "amx")

# Sanitizers change times and the use of memory, so neither is tested under them.
SANITIZED = any(name in os.environ.get("LD_PRELOAD", "") for name in ("asan", "tsan"))

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


def parameters(item) -> dict:
    return item.callspec.params if hasattr(item, "callspec") else {}


def is_told(item) -> bool:
    """Whether the level of a test may differ from the one below it: amx only alters attention of bfloat16."""
    params = parameters(item)
    dtype = params.get("dtype", getattr(params.get("case"), "dtype", None))
    of_attention = "flash" in params.get("slot", item.path.name)
    return params.get("isa") != "amx" or (of_attention and str(dtype) in ("None", "bfloat16"))


def pytest_collection_modifyitems(config, items) -> None:
    """Puts the levels of one case next to each other, so that their expected result is computed only once."""
    config.hook.pytest_deselected(items=[item for item in items if not is_told(item)])
    items[:] = filter(is_told, items)
    places = {}

    def place(item) -> int:
        params = parameters(item)
        other = item.nodeid
        if "isa" in params:
            other = item.parent.nodeid, item.originalname, repr(params | {"isa": None})
        return places.setdefault(other, len(places))

    items.sort(key=place)


@pytest.fixture
def set_threads():
    """`attnmask.set_num_threads`, undone after the test."""
    previous = attnmask.get_num_threads()
    yield attnmask.set_num_threads
    attnmask.set_num_threads(previous)


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
