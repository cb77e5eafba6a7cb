"""Each allocation of a call fails in turn, in a build that lets it (csrc/faults.c, `make faults`).

The call then raises MemoryError, or does without and gives the same bits. Nothing that it allocated stays, its
arguments are as they were, and the same call gives the right bits once there is memory. Calls are those that the fuzzer
makes (rows_of_functions.py), and some that are long enough for threads and for every place in C that allocates.
"""

import contextlib
import contextvars
import ctypes
import functools
import gc
import itertools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import attnmask
from attnmask import MaskInfo, _core

from fuzzer import Before, digest  # isort: skip
from schedules import forward_schedule  # isort: skip
from drawing import Arguments, Rng, floats  # isort: skip
from rows_of_functions import CACHES, Target, pulled_back  # isort: skip
from targets import TARGETS  # isort: skip

SEEDS = 3  # of the arguments of each function
CALLS = 12  # of each function of the core
TIMES = 8  # that a failing call is made, so that what one loses shows
EVER = 2**62
# What no call of this file reaches, and what calls it.
BY_OTHERS = {"csrc/bind/xla/buffers.c": "JAX", "csrc/bind/dlpack/tensors.c": "PyTorch"}
# Other functions that allocate, which the build would not see.
UNSEEN = [
    "PyMem_Malloc", "PyMem_Calloc", "PyMem_RawMalloc", "PyObject_Malloc", "aligned_alloc", "strdup", "mmap",
]  # fmt: skip


class Site(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), ("line", ctypes.c_long), ("calls", ctypes.c_long)]

    def __str__(self) -> str:
        return f"{self.file.decode()}:{self.line}"


class Faults(ctypes.Structure):
    """As in csrc/faults.c."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("first", "last", "count", "failed", "blocks", "objects")),
        ("site", ctypes.POINTER(Site)),
        ("sites", ctypes.POINTER(ctypes.POINTER(Site))),
        ("site_count", ctypes.c_long),
        ("handler_changed", ctypes.c_int),
    ]


core = ctypes.PyDLL(_core.__file__)
if not hasattr(core, "am_faults_call"):
    pytest.skip("allocations fail on request only in the build of `make faults`", allow_module_level=True)
faults = Faults.in_dll(core, "am_faults")
core.am_faults_call.restype = ctypes.py_object
core.am_faults_call.argtypes = [ctypes.py_object, ctypes.c_long, ctypes.c_long, ctypes.c_int]


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """Cycles that earlier tests left may hold blocks and arrays, which must not go between two counts."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def run(call: Callable[[], Any], first: int, last: int, objects: bool) -> Any:
    """The result of a call in a context of its own.

    NumPy keeps its allocator in a context variable. Beside another one whose hash begins with the same bits, Python
    loses an object if setting it fails (hamt_node_bitmap_assoc, sub_node).
    """
    return contextvars.Context().run(core.am_faults_call, call, first, last, objects)


def failing(call: Callable[[], Any], first: int, last: int, objects: bool) -> tuple[str | None, Any]:
    """What failed, or None; and the result as something to compare, or None after a MemoryError."""
    result = None
    try:
        result = comparable(run(call, first, last, objects))
    except MemoryError:
        pass
    except SystemError as error:  # some functions of NumPy fail without an exception
        own = error.__traceback__.tb_next
        calls_python = own and own.tb_next and own.tb_next.tb_next
        if not calls_python:
            raise
    assert not faults.handler_changed, "NumPy is left with other functions that allocate"
    if not faults.failed:
        return None, result
    return str(faults.site.contents) if faults.site else "an object", result


def comparable(result: Any) -> Any:
    """Its digest."""
    return "a prepared mask" if type(result).__name__ == "PyCapsule" else without_kept(digest(result))


def without_kept(value: Any) -> Any:
    """A digest without what a mask says that it has kept so far."""
    if isinstance(value, tuple):
        return tuple(without_kept(item) for item in value)
    return re.sub(r", cached=\[[^]]*\]", "", value) if isinstance(value, str) else value


# Calls that are long, or take ways that no call of the fuzzer takes


def tokens(rng: Rng, queries: int, keys: int, heads: tuple[int, int], dtype: Any = np.float32) -> Arguments:
    sizes = {"query": (queries, heads[0]), "key": (keys, heads[1]), "value": (keys, heads[1])}
    return {name: floats(rng, 1, *size, 16, dtype=dtype) for name, size in sizes.items()}


def gradients(rng: Rng) -> Arguments:
    return tokens(rng, 200, 130, (4, 2), np.float16) | {
        "attention_mask": MaskInfo.from_segments(np.arange(200)[None] // 50, np.arange(130)[None] // 40),
        "bias": floats(rng, 1, 200, 130, dtype=np.float16),
        "softmax_aux": floats(rng, 4, 1),
        "grad_bias": True,
        "grad_softmax_aux": True,
        "dropout_prob": 0.25,
        "dropout_seed": 3,
    }


def relative(rng: Rng) -> Arguments:
    bias = {"relative_bias": floats(rng, 2, 9), "relative_low": -4, "grad_relative_bias": True}
    bias |= {"grid_bias": floats(rng, 2, 25, 19), "grad_grid_bias": True}
    return tokens(rng, 130, 130, (2, 2)) | bias


def cache(rng: Rng, rows: tuple[int, ...], pages: int, dtype: Any) -> Arguments:
    """Two sequences, of which each gets tokens on every page."""
    arguments = {
        "query": floats(rng, *rows, 2, 16),
        "key": floats(rng, *rows, 1, 16),
        "value": floats(rng, *rows, 1, 16),
    }
    for name in ("k", "v"):
        arguments[f"{name}_cache"] = (50 * floats(rng, 2 * pages, 2, 1, 16)).astype(dtype)
        arguments[f"{name}_scale"] = rng.random((2 * pages, 2, 1, 1), np.float32)
    table = rng.permutation(2 * pages).reshape(2, pages).astype(np.int32)
    return arguments | {"cache_seqlens": np.array([0, 1], np.int32), "block_table": table}


def packed_cache(rng: Rng) -> Arguments:
    more = {"cu_seqlens_q": np.array([0, 90, 150], np.int32), "attention_mask": np.ones((1, 1, 1, 100), bool)}
    return cache(rng, (150,), 50, np.int8) | more | {"return_lse": True}


def many_segments(rng: Rng) -> Arguments:
    """Runs of ids in disorder, of which there are more than memory is made for at first."""
    return {name: rng.integers(-1, 9, (2, 200), np.int32) for name in ("q_segment_ids", "kv_segment_ids")}


def within_segments(**ids: Any) -> Any:
    mask = MaskInfo.from_segments(**ids).apply_chunked(3, 1, within_segments=True)
    return mask.apply_prefix(2), mask.q_segment_ids


def linear(rng: Rng, heads: int, key_heads: int) -> Arguments:
    """With NaN, for which gradients are found token by token."""
    value = floats(rng, 1, 150, heads, 32)
    value[0, 70] = np.nan
    keys = {name: floats(rng, 1, 150, key_heads, 16) for name in ("query", "key")}
    return keys | {"value": value, "decay": -np.ones(heads, np.float32), "dout": floats(rng, *value.shape)}


def resized(length: int) -> np.ndarray:
    result = attnmask.prepare_position_ids([0, 300_000])
    result.resize(length, refcheck=False)
    return result


use_isa = _core.use_isa  # not one of the calls that core_calls finds


def at_plain(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def at_level(**arguments: Any) -> Any:
        previous = use_isa("plain")
        try:
            return call(**arguments)
        finally:
            use_isa(previous)

    return at_level


flash, kvcache = attnmask.flash_attention, attnmask.flash_attention_with_kvcache
flash_vjp = pulled_back(attnmask.flash_attention_vjp)
linear_vjp = pulled_back(attnmask.linear_attention_vjp)
ids = {"mask": np.arange(600)[:, None] // 50 == np.arange(600) // 50, "per_head": False, "strict": True}
LONG: dict[str, tuple[Callable[..., Any], Callable[[Rng], Arguments]]] = {
    "packed tiles": (flash, lambda rng: tokens(rng, 130, 140, (2, 2))),
    "splits": (flash, lambda rng: tokens(rng, 1, 5000, (2, 1)) | {"return_lse": True}),
    "unequal splits": (flash, lambda rng: tokens(rng, 200, 4000, (1, 1))),
    "gradients": (
        flash_vjp,
        lambda rng: gradients(rng) | {"dout": floats(rng, 1, 200, 4, 16, dtype=np.float16)},
    ),
    "parts of blocks": (
        flash_vjp,
        lambda rng: tokens(rng, 600, 60, (1, 1)) | {"dout": floats(rng, 1, 600, 1, 16)},
    ),
    "plain": (
        at_plain(flash_vjp),
        lambda rng: gradients(rng) | {"dout": floats(rng, 1, 200, 4, 16, dtype=np.float16)},
    ),
    "relative bias": (flash_vjp, lambda rng: relative(rng) | {"dout": floats(rng, 1, 130, 2, 16)}),
    "many pages": (kvcache, lambda rng: cache(rng, (2, 99), 50, ml_dtypes.float8_e4m3fn)),
    "packed cache": (kvcache, packed_cache),
    "schedule": (lambda **a: str(forward_schedule(2, **a)), lambda rng: tokens(rng, 130, 140, (2, 2))),
    "strict ids": (attnmask.mask_to_segment_ids, lambda rng: ids),
    "within segments": (within_segments, many_segments),
    "cumulative sums": (attnmask.chunk_global_cumsum, lambda rng: {"s": floats(rng, 1, 50_000, 6)}),
    "one head": (linear_vjp, lambda rng: linear(rng, 1, 1)),
    "heads that share keys": (linear_vjp, lambda rng: linear(rng, 4, 2)),
    "resized": (resized, lambda rng: {"length": 900_000}),
}
ALL = TARGETS | {name: Target(name, make, call, CACHES) for name, (call, make) in LONG.items()}
del ALL["OperationRegistry.register"]  # registers a new class each time
# Methods of masks are called with all that can be asked of the result.
SHORT = [name for name in TARGETS if name in ALL and not name.startswith("MaskInfo")]


def arguments_of(target: Target, seed: int) -> Arguments:
    return target.arguments(np.random.default_rng(seed))


@pytest.mark.parametrize(("name", "threads"), [*((name, 1) for name in ALL), *((name, 2) for name in LONG)])
@pytest.mark.filterwarnings("ignore")
def test_an_allocation_of_the_core_fails(name, threads, set_threads):
    target = ALL[name]
    set_threads(threads)
    for seed in range(SEEDS if name in SHORT else 1):
        expected = comparable(target.call(**arguments_of(target, seed)))
        for number in itertools.count(1):
            arguments = before = None  # a mask of the last seed has blocks of its own
            blocks = faults.blocks
            arguments = arguments_of(target, seed)
            before = Before(target, arguments)
            failed, result = failing(functools.partial(target.call, **arguments), number, number, False)
            where = seed, number, failed
            assert result in (None, expected), where
            if failed is None:
                break
            # Tokens are in a cache before attention begins, in places that none were in.
            may_change = target.written if "k_cache" in arguments else set()
            assert set(before.changed(result is not None, False)) <= may_change, where
            assert comparable(target.call(**arguments)) == expected, where
            del arguments, before
            assert faults.blocks == blocks, where


STATES = {"linear_attention_step": 3, "short_convolution_step": 2}  # the argument that a step updates


def step(call: Callable[..., Any], memory: memoryview, saved: bytes, *arguments: Any) -> Any:
    """A step from the same state each time, which NumPy could not copy: it crashes if memory for that is missing."""
    memory[:] = saved
    return call(*arguments)


def repeatable(function: Callable[..., Any], arguments: tuple[Any, ...]) -> functools.partial[Any]:
    if function.__name__ not in STATES:
        return functools.partial(function, *arguments)
    state = np.array(arguments[STATES[function.__name__]], order="C")
    given = [state if value is arguments[STATES[function.__name__]] else value for value in arguments]
    return functools.partial(
        step, function, memoryview(state.reshape(-1).view(np.uint8)), state.tobytes(), *given
    )


def core_calls(monkeypatch: pytest.MonkeyPatch) -> list[functools.partial[Any]]:
    """Some calls of each function of the core, which calls of public functions make."""
    counts: Counter[str] = Counter()
    found = []

    def record(function: Callable[..., Any], *arguments: Any) -> Any:
        counts[function.__name__] += 1
        if counts[function.__name__] <= CALLS or function.__name__.startswith("flash_"):
            found.append(repeatable(function, arguments))
        return function(*arguments)

    with monkeypatch.context() as patch:
        for name, function in vars(_core).items():
            if type(function) is BuiltinFunctionType:
                patch.setattr(_core, name, functools.partial(record, function))
        for seed in range(SEEDS):
            for name in [*LONG, *TARGETS]:
                if name in ALL and (seed == 0 or name in TARGETS):
                    ALL[name].call(**arguments_of(ALL[name], seed))
    return found


def loses_objects(*arguments: Any) -> bool:
    """Whether each call that fails loses one. Python and NumPy keep some hundreds that were freed."""
    for _ in range(100):
        before = faults.objects
        for _ in range(TIMES):
            with contextlib.suppress(MemoryError, SystemError):  # which `failing` has looked at
                run(*arguments)
        if faults.objects - before < TIMES:
            return False
    return True


def runs_python(call: Callable[[], Any]) -> bool:
    events = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        call()
    finally:
        sys.setprofile(None)
    return "call" in events  # a call of C would be "c_call"


@pytest.mark.parametrize("objects", [True, False], ids=["one of any", "all later ones of its own"])
@pytest.mark.filterwarnings("ignore")
def test_allocations_of_a_call_of_the_core_fail(objects, monkeypatch):
    """Objects of Python and memory of NumPy, too; but Python itself crashes if it is given no more objects."""
    for call in core_calls(monkeypatch):
        if objects and sys.version_info >= (3, 13) and runs_python(call):  # 3.13 crashes while it runs Python
            continue
        expected = comparable(call())
        arrays = [value for value in call.args if isinstance(value, np.ndarray)]
        references = [sys.getrefcount(array) for array in arrays]
        blocks = faults.blocks
        for number in itertools.count(1):
            last = number if objects else EVER
            failed, result = failing(call, number, last, objects)
            where = call.func.__name__, number, failed
            assert result in (None, expected), where
            assert faults.blocks == blocks, where
            assert [sys.getrefcount(array) for array in arrays] == references, where
            assert result is not None or not loses_objects(call, number, last, objects), where
            if failed is None:
                break
        assert comparable(call()) == expected, call.func.__name__


def test_each_place_that_allocates_is_reached():
    for name, target in ALL.items():
        for seed in range(1 if name in LONG else SEEDS):
            failing(functools.partial(target.call, **arguments_of(target, seed)), EVER, EVER, False)
    sites = [faults.sites[index].contents for index in range(faults.site_count)]
    assert len(sites) > 40
    missing = [str(site) for site in sites if not site.calls and site.file.decode() not in BY_OTHERS]
    assert not missing


def test_the_core_allocates_in_no_other_way():
    names = Path(_core.__file__).read_bytes()
    assert b"\0PyTuple_New\0" in names
    assert not [name for name in UNSEEN if f"\0{name}\0".encode() in names]


def compiled_calls() -> dict[str, functools.partial[Any]]:
    """Calls of functions that JAX has compiled, with arrays that are traced."""
    jax = pytest.importorskip("jax")
    import attnmask.jax

    rng = np.random.default_rng(0)
    attention = gradients(rng) | {"softmax_scale": 0.5, "sliding_window": 60}
    learned = {name: attention.pop(name) for name in ("query", "key", "value", "bias", "softmax_aux")}
    fixed = {name: value for name, value in attention.items() if not name.startswith("grad_")}

    def attend(learned: Any) -> Any:
        return attnmask.jax.flash_attention(**learned, **fixed)

    def pull_back(learned: Any) -> Any:
        out, vjp = jax.vjp(attend, learned)
        return out, vjp(out)

    return {
        "attention": functools.partial(jax.jit(attend), learned),
        "gradients": functools.partial(jax.jit(pull_back), learned),
        "cache": functools.partial(
            jax.jit(lambda a: attnmask.jax.flash_attention_with_kvcache(**a)),
            cache(rng, (2, 99), 50, np.int8),
        ),
    }


@pytest.mark.parametrize("name", ["attention", "gradients", "cache"])
def test_an_allocation_of_a_function_that_jax_compiled_fails(name):
    call = compiled_calls()[name]
    import jax

    def computed() -> Any:
        return [np.asarray(array) for array in jax.tree.leaves(call())]

    expected = digest(computed())
    for number in itertools.count(1):
        blocks = faults.blocks
        try:
            assert digest(core.am_faults_call(computed, number, number, False)) == expected, number
        except (ValueError, jax.errors.JaxRuntimeError) as error:  # which one is up to where it runs
            if "RESOURCE_EXHAUSTED: attention needs more memory than there is" not in str(error):
                raise
        assert faults.blocks == blocks, number
        if not faults.failed:
            break
    assert number > 5
    assert digest(computed()) == expected


def test_an_allocation_of_a_call_of_pytorch_fails():
    torch = pytest.importorskip("torch")
    import attnmask.torch

    x = torch.arange(1120.0).reshape(1, 70, 2, 8) / 1120

    def computed() -> bytes:
        return attnmask.torch.flash_attention(x, x, x, causal=True).numpy().tobytes()

    expected = computed()
    for number in itertools.count(1):
        blocks = faults.blocks
        with contextlib.suppress(MemoryError):
            assert core.am_faults_call(computed, number, number, False) == expected, number
        assert faults.blocks == blocks, number
        if not faults.failed:
            break
    assert number > 3
    assert computed() == expected
