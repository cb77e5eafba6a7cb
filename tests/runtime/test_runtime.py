"""The package as a whole: import, configuration, wrong arguments, threads, fork, signals, leaks."""

import ast
import contextlib
import gc
import inspect
import os
import re
import resource
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from graphlib import TopologicalSorter
from pathlib import Path

import numpy as np
import pytest
from calls import some_calls
from environment import (
    ARM_LEVELS,
    CONFIG,
    ISA_LEVELS,
    ROOT,
    SANITIZED,
    X86_LEVELS,
    Alarm,
    alarm,
    python,
    run_apart,
    with_threads,
    without_sanitizer,
)
from numpy.lib.stride_tricks import as_strided

import attnmask
from attnmask import _core
from attnmask.operations import OperationImpl, OperationRegistry

# Import


@without_sanitizer
def test_import_takes_less_than_half_of_numpys(tmp_path):
    code = """if True:
        from time import process_time
        begin = process_time()
        import numpy
        between = process_time()
        import attnmask
        print(between - begin, process_time() - between)
    """
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}  # as pip installs it
    times = [tuple(map(float, python(code, **compiled).stdout.split())) for _ in range(7)]
    numpys, ours = map(min, zip(*times, strict=True))
    assert ours < numpys / 2  # usually a quarter


def test_import_brings_in_nothing_but_numpy():
    code = "import sys, attnmask; print(*sys.modules)"
    loaded = set(python(code).stdout.split())
    assert "numpy" in loaded
    assert not loaded & {"ml_dtypes", "jax", "torch", "matplotlib", "scipy"}


@pytest.mark.parametrize("name", ["torch", "jax", "operations"])
def test_what_needs_more_is_loaded_on_first_access(name):
    if name != "operations":
        pytest.importorskip(name)
    code = f"""if True:
        import sys, attnmask
        assert not hasattr(attnmask, "nothing")
        assert "attnmask.{name}" not in sys.modules and "{name}" not in sys.modules
        print(attnmask.{name} is sys.modules["attnmask.{name}"])
    """
    assert python(code).stdout == "True\n"


def test_what_there_is_not(monkeypatch):
    with pytest.raises(AttributeError, match="module 'attnmask' has no attribute 'flash_atention'") as caught:
        attnmask.flash_atention  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("flash_atention", attnmask)  # for what Python suggests
    code = """if True:
        import sys
        sys.modules["torch"] = sys.modules["jax"] = None
        import attnmask
        for name in ("torch", "jax"):
            try:
                getattr(attnmask, name)
            except ImportError as error:
                print(error)
    """
    lines = python(code).stdout.splitlines()
    assert lines[0].startswith("attnmask.torch needs PyTorch, which is not installed: pip install torch")
    assert lines[1].startswith("attnmask.jax needs JAX")


# Signatures, docstrings

TAIL = "head_first=False, output_dtype=None, *"
LOCAL = f"(g, chunk_size, reverse=False, softmax_scale=None, cu_seqlens=None, {TAIL}, out=None)"
LOCAL_FORM = f"(g, chunk_size, reverse=False, softmax_scale=None, {TAIL}, cu_seqlens=None, out=None)"
GLOBAL = f"(s, reverse=False, cu_seqlens=None, softmax_scale=None, {TAIL}, out=None)"
SIGNATURES = {
    "cdiv": "(a, b)",
    "prepare_lens": "(cu_seqlens)",
    "prepare_position_ids": "(cu_seqlens)",
    "prepare_sequence_ids": "(cu_seqlens)",
    "prepare_token_indices": "(cu_seqlens)",
    "prepare_chunk_indices": "(cu_seqlens, chunk_size)",
    "prepare_chunk_offsets": "(cu_seqlens, chunk_size)",
    "prepare_lens_from_mask": "(mask)",
    "prepare_cu_seqlens_from_mask": "(mask, out_dtype=np.int32)",
    "identity_dtype_convert": "(dtype)",
    "chunk_local_cumsum": LOCAL,
    "chunk_local_cumsum_scalar": LOCAL_FORM,
    "chunk_local_cumsum_vector": LOCAL_FORM,
    "chunk_local_cumsum_vjp": LOCAL,
    "chunk_global_cumsum": GLOBAL,
    "chunk_global_cumsum_scalar": GLOBAL,
    "chunk_global_cumsum_vector": GLOBAL,
    "chunk_global_cumsum_vjp": GLOBAL,
    "set_num_threads": "(n)",
    "get_num_threads": "()",
    "show_config": "(mode='print')",
}


def test_public_names():
    assert set(SIGNATURES) <= set(attnmask.__all__)
    assert all(hasattr(attnmask, name) for name in attnmask.__all__)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    signature = inspect.signature(getattr(attnmask, name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    text = text.replace("<class 'numpy.int32'>", "np.int32")
    if name == "show_config":  # show_config documents its default of mode= itself
        text = re.sub("mode=[^)]*", "mode='print'", text)
    assert text == SIGNATURES[name]


def test_import_without_docstrings():
    result = python("import attnmask; print(attnmask.cdiv.__doc__)", "-OO")
    assert result.stdout == "None\n", result.stderr


# Configuration


def test_show_config(capsys):
    assert attnmask.show_config() is None
    printed = capsys.readouterr().out
    config = attnmask.show_config(mode="dict")
    assert {"version", "compiler", "openmp", "threads", "isa", "isa_available"} <= set(config)
    assert config["version"] == attnmask.__version__
    assert config["threads"] == attnmask.get_num_threads()
    assert config["isa"] in config["isa_available"]
    assert "baseline" in config["isa_available"]
    assert set(config["isa_available"]) <= set(ISA_LEVELS)
    assert isinstance(config["compiler"], str)
    assert config["compiler"]
    for shown in (config["version"], config["compiler"], config["isa"], *config["isa_available"]):
        assert shown in printed
    assert {line.partition(": ")[0].rstrip() for line in printed.splitlines()} == set(config)


def test_show_config_has_two_modes():
    for mode in ("print", None, np.array(["dict", "stdout"])):
        with pytest.raises(ValueError, match="mode must be one of 'stdout', 'dict', got"):
            attnmask.show_config(mode=mode)


def test_use_isa(isa):
    assert attnmask.show_config(mode="dict")["isa"] == isa
    missing = {*X86_LEVELS, *ARM_LEVELS} - set(CONFIG["isa_available"])
    for name in ("nonsense", "", *missing):
        available = re.escape(f"one of {CONFIG['isa_available']} on this machine, got '{name}'")
        with pytest.raises(ValueError, match=available):
            _core.use_isa(name)
    assert attnmask.show_config(mode="dict")["isa"] == isa


ISA_IN_USE = "import attnmask; print(attnmask.show_config(mode='dict')['isa'])"


@pytest.mark.parametrize("name", [*X86_LEVELS, *ARM_LEVELS[1:], "plain", "nonsense"])
def test_isa_from_the_environment(name):
    available = CONFIG["isa_available"]
    result = python(ISA_IN_USE, ATTNMASK_ISA=name)
    if name in (*available, "plain"):
        assert result.stdout.strip() == name, result.stderr
    else:
        assert result.returncode != 0
        assert re.search("ImportError|ValueError", result.stderr)
        assert "ATTNMASK_ISA" in result.stderr
        assert all(level in result.stderr for level in available), result.stderr


def test_the_best_isa_is_the_default():
    best = max(CONFIG["isa_available"], key=ISA_LEVELS.index)
    info = Path("/proc/cpuinfo")
    if best == "avx512bf16" and info.exists() and "GenuineIntel" in info.read_text():
        best = "avx512vnni"  # which is faster there
    assert python(ISA_IN_USE).stdout.strip() == best


THREADS_IN_USE = "import attnmask; print(attnmask.get_num_threads())"


@with_threads
@pytest.mark.parametrize("variable", ["ATTNMASK_NUM_THREADS", "OMP_NUM_THREADS"])
@pytest.mark.parametrize("threads", ["1", "3"])
def test_threads_from_the_environment(variable, threads):
    assert python(THREADS_IN_USE, **{variable: threads}).stdout.strip() == threads


@pytest.mark.parametrize("threads", ["0", "-2", "many", "1.5", "2 3"])
def test_wrong_threads_in_the_environment(threads):
    result = python(THREADS_IN_USE, ATTNMASK_NUM_THREADS=threads)
    assert result.returncode != 0
    assert re.search("ValueError.*ATTNMASK_NUM_THREADS", result.stderr), result.stderr


@with_threads
def test_set_num_threads_holds_in_every_python_thread(set_threads):
    for threads in (1, 3, 2):
        assert set_threads(threads) is None
        assert attnmask.get_num_threads() == threads
        assert attnmask.show_config(mode="dict")["threads"] == threads
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(attnmask.get_num_threads).result() == threads
    set_threads(np.int64(1))
    assert attnmask.get_num_threads() == 1


def test_more_threads_than_any_machine_has(set_threads):
    with contextlib.suppress(OverflowError, ValueError):
        set_threads(2**70)
    values = np.ones((4, 10_000, 16), np.float32)
    assert (attnmask.chunk_global_cumsum(values)[:, -1] == 10_000).all()


# Sizes


@without_sanitizer
def test_a_count_beyond_int32():
    with pytest.raises(OverflowError):
        attnmask.prepare_lens_from_mask(np.broadcast_to(np.True_, (1, 2**31)))


# Threads and processes


def test_calls_from_many_python_threads(set_threads):
    """Results are as if each thread were alone, also while the number of threads changes and other calls fail."""
    calls = some_calls()
    set_threads(1)
    expected = [call().tobytes() for call in calls]

    def work(seed: int) -> int:
        rng = np.random.default_rng(seed)
        for index in rng.integers(0, len(calls), 12):
            assert calls[index]().tobytes() == expected[index], index
            attnmask.set_num_threads(int(rng.integers(1, 5)))
            with pytest.raises(ValueError, match="cu_seqlens"):
                attnmask.prepare_lens([1, 2])
            with pytest.raises(OverflowError):
                attnmask.chunk_global_cumsum(np.full((1, 3000, 4), 100, np.int8))
        return seed

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(work, range(12))) == list(range(12))


def test_results_that_were_resized():
    """Large blocks of memory are used again for the same size; a block that was resized may not be aligned."""
    calls = some_calls()[:3]  # attention packs keys to memory of the size of the sums
    expected = [call().tobytes() for call in calls]
    for length in (300_000, 700_000, 500_000, 10, 0):
        array = calls[-1]()
        array.resize(length, refcheck=False)
        assert array.tobytes()[: len(expected[-1])] == expected[-1][: 4 * length]
        del array
        assert [call().tobytes() for call in calls] == expected


KEPT = """
import resource
from concurrent.futures import ThreadPoolExecutor
import numpy as np
import attnmask

def result(megabytes):
    return attnmask.chunk_global_cumsum(np.broadcast_to(np.float32(1), (1, megabytes << 18, 1)))

def resident():
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * resource.getpagesize() / 2**20

result(2)
before = resident()
def free(*sizes):
    results = [result(size) for size in sizes]  # of sizes that malloc gives back at once
    del results

for sizes in ([60], [40, 50], [80], [50, 60, 40], [34, 36], [63], [100, 62]):
    free(*sizes)
    print(resident() - before)
for _ in range(3):
    free(36, 26)
    print(resident() - before)
with ThreadPoolExecutor(2) as pool:
    for _ in range(20):
        list(pool.map(free, [60, 60]))
print(resident() - before)
"""


@without_sanitizer
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="says how much memory is in use")
def test_memory_that_is_kept():
    """Memory of the last results is kept, at most 64 MB in all."""
    kept = [float(size) for size in python(KEPT).stdout.split()]
    assert len(kept) == 11, kept
    assert all(30 < size < 68 for size in kept[:7]), kept
    assert all(58 < size < 68 for size in kept[7:10]), kept  # two results
    assert kept[10] < 68, kept


# Long calls. Inputs with strides of zero can be as long as needed without taking memory.


def crossing(size: int) -> np.ndarray:
    """A mask of size² elements in 2 · size bytes."""
    return as_strided(np.zeros(2 * size, bool), (size, size), (1, 1))


def long_calls() -> dict:
    """Calls that take seconds; those that write to `out` leave zeros where they have not arrived."""
    ones = np.float32(1)
    lane = np.broadcast_to(ones, (1, 2**30, 1))
    lanes = np.broadcast_to(ones, (1, 2**27, 8))
    rows = np.broadcast_to(ones, (1, 8, 2**27))
    mask = np.broadcast_to(np.True_, (2**14, 2**22))
    tokens = np.broadcast_to(ones, (1, 2**16, 16, 64))
    lse = np.broadcast_to(ones, (1, 16, 2**16))
    attention = {"query": tokens, "key": tokens, "value": tokens, "causal": True}
    gradient = attention | {"dout": tokens, "out": tokens, "lse": lse}
    few = dict.fromkeys(("query", "key", "value", "dout", "out"), tokens[:, :64, :1]) | {
        "lse": lse[:, :1, :64]
    }
    unseen = few | dict.fromkeys(("key", "value"), lane[:, : 2**27, None]) | {"sliding_window": (0, 0)}
    unseen |= dict.fromkeys(("query", "dout", "out"), tokens[:, :64, :1, :1])
    sinks = {"softmax_aux": np.zeros(2**20), "grad_softmax_aux": True}
    numbers = np.arange(1, 14_001)
    one_row = attnmask.MaskInfo.from_attention_mask(np.broadcast_to(np.True_, (1, 1, 1, 2**40)))
    ids = np.broadcast_to(np.int64(1), (1, 2**30))
    segments = attnmask.MaskInfo.from_segments(np.zeros((1, 2**14 if SANITIZED else 2**16), np.int32))
    windows = as_strided(np.ones(2**20, np.float32), (2**16, 2**16), (4, 4))
    patches = np.lib.stride_tricks.sliding_window_view(np.arange(2**21) % 5 > 0, 2**15)[::4]  # of unlike rows
    row, heads = np.broadcast_to(ones, (1, 2**15, 1, 1)), np.broadcast_to(ones, (1, 2**15, 256, 64))
    operation, vanilla = OperationImpl, OperationRegistry.create("vanilla")
    keys, channels = np.broadcast_to(ones / 16, (1, 2**21, 1, 128)), np.broadcast_to(ones, (1, 500_000, 64))
    linear = {"query": keys, "key": keys, "value": keys[..., :1]}
    return {
        "one lane": lambda out: attnmask.chunk_local_cumsum(lane, 64, out=out.reshape(lane.shape)),
        "lanes": lambda out: attnmask.chunk_global_cumsum(lanes, out=out.reshape(lanes.shape)),
        "head first": lambda out: attnmask.chunk_global_cumsum(
            rows, reverse=True, head_first=True, out=out.reshape(rows.shape)
        ),
        "mask": lambda out: attnmask.prepare_lens_from_mask(mask),
        "attention": lambda out: attnmask.flash_attention(**attention),
        "gradients": lambda out: attnmask.flash_attention_bwd(**gradient),
        "gradients of peaks": lambda out: attnmask.flash_attention_bwd(**gradient, normalize_output=False),
        "gradients of keys that no query sees": lambda out: attnmask.flash_attention_bwd(**unseen),
        "gradients of sinks": lambda out: attnmask.flash_attention_bwd(**few, **sinks),
        "tangents": lambda out: attnmask.flash_attention_jvp(**attention, query_tangent=tokens),
        "second derivatives": lambda out: attnmask.flash_attention_bwd_vjp(
            **gradient, query_cotangent=tokens
        ),
        "weights": lambda out: attnmask.attention_statistics(tokens, tokens, of="key_sum"),
        "linear attention": lambda out: attnmask.linear_attention(**linear, decay=-ones.reshape(1)),
        "gradients of linear attention": lambda out: attnmask.linear_attention_vjp(**linear)[1](
            keys[..., :1]
        ),
        "a long convolution": lambda out: attnmask.short_convolution(
            channels, np.ones((64, 2000), np.float32)
        ),
        "division": lambda out: attnmask.cdiv(numbers[:, None], numbers[None]),
        "one long row of a mask": lambda out: one_row.density(),
        "wide ids": lambda out: attnmask.MaskInfo.from_segments(ids),
        "padding": lambda out: attnmask.MaskInfo.from_attention_mask(ids),
        "lengths of segments": lambda out: attnmask.MaskInfo.from_segments(ids[:, : 2**29]).q_lens,
        "a bias": lambda out: segments.create_bias(),
        "whether a mask is additive": lambda out: attnmask.MaskInfo(windows[None]),
        "heads repeated": lambda out: operation.repeat_kv_heads(heads, row, 4),
        "pairs of tokens": lambda out: operation.combine_query_kv_masks(ids[:, : 2**15], ids[:, : 2**15]),
        "attention in NumPy": lambda out: vanilla(row, row, row),
        "rows grouped": lambda out: attnmask.mask_to_segment_ids(patches),
        "a drawing": lambda out: one_row.visualize(return_str=True),
        "a function of places": lambda out: attnmask.MaskInfo.from_function(
            lambda b, h, q, k: q % 7 == k % 5, 2**18, 2**18
        ),
        "one long row of dropout": lambda out: attnmask.dropout_keep_mask(0, 0.5, (1, 1, 1, 2**31)),
        "segment ids of a mask": lambda out: attnmask.mask_to_segment_ids(crossing(2**18)),
        "segment ids of planes": lambda out: attnmask.mask_to_segment_ids(
            as_strided(np.zeros(2**16 + 600, bool), (2**16, 300, 300), (1, 1, 1))
        ),
        "padding of a mask": lambda out: attnmask.attention_mask_to_padding_segment_ids(crossing(2**19)),
        "extents of a mask": lambda out: attnmask.attention_mask_to_qkv_cu_seqlens(crossing(2**19)[None]),
        "counts of segments": lambda out: attnmask.segment_ids_to_cu_seqlens(
            np.broadcast_to(np.int32(3), (2**10, 2**26))
        ),
    }


@pytest.mark.repeats
@pytest.mark.parametrize("name", long_calls())
def test_a_signal_ends_a_long_call(name):
    """The call soon raises the exception of the signal handler, and the next call works as usual."""

    def handler(*_):
        raise Alarm

    call, out = long_calls()[name], np.zeros(2**30, np.float32)
    late, limit = [], 5 if SANITIZED else 0.1  # sanitizers mark every page of large arrays
    while not late or (late[-1] > limit and len(late) < 5):  # other processes may be busy
        begin = time.perf_counter()
        with pytest.raises(Alarm), alarm(handler, 0.05):  # on a slow machine even before the call
            call(out)
        late.append(time.perf_counter() - begin - 0.05)
    assert late[-1] < limit, late
    assert not out[:: 2**14].all()
    assert attnmask.chunk_global_cumsum(np.ones((1, 100_000, 4)))[0, -1].tolist() == [100_000.0] * 4


def test_a_signal_that_raises_nothing_changes_nothing():
    rings = []
    values = np.broadcast_to(np.float32(1), (1, 2**22, 2))
    with alarm(lambda *_: rings.append(1), 0.002, 0.002):
        deadline = time.perf_counter() + 0.2
        while time.perf_counter() < deadline:
            got = attnmask.chunk_local_cumsum(values, 64)
    assert rings
    assert (got.reshape(-1, 64, 2) == np.arange(1, 65)[:, None]).all()


FORK_BY_SIGNAL = f"""
import os
import signal
import numpy as np
import attnmask

attnmask.set_num_threads(4)
tokens = np.random.default_rng(0).standard_normal((1, {2048 if SANITIZED else 4096}, 8, 64)).astype(np.float32)
_, vjp = attnmask.flash_attention_vjp(tokens, tokens, tokens)
expected = vjp(tokens).query
children = []
signal.signal(signal.SIGALRM, lambda *_: children.append(os.fork()))
signal.setitimer(signal.ITIMER_REAL, 0.05)
try:
    same = np.array_equal(vjp(tokens).query, expected)
except RuntimeError as error:
    assert children == [0] and "forked" in str(error)
    same = np.array_equal(vjp(tokens).query, expected)  # with threads of its own
    os._exit(0 if same else 1)
if children == [0]:
    os._exit(0 if same else 1)
print(same, *[os.waitpid(child, 0)[1] for child in children])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_signal_handler_that_forks_in_the_middle_of_a_call():
    """The parent's call continues; the child, which has no other threads, raises an error and can continue, too."""
    result = python(FORK_BY_SIGNAL, timeout=100)
    assert result.stdout == "True 0\n", (result.returncode, result.stderr)


DAEMON = """
import threading
import time
import numpy as np
import attnmask

class Slow:  # the interpreter takes its time to end
    def __del__(self, sleep=time.sleep):
        sleep(0.3)

attnmask.set_num_threads(4)
tokens = np.zeros((1, 4096, 8, 64), np.float32)

def attend(depth):
    # deep in the stack, most of which goes when the thread does
    if depth:
        sorted([1], key=lambda _: attend(depth - 1) or 1)
    while True:
        attnmask.flash_attention(tokens, tokens, tokens)

threading.Thread(target=attend, args=(40,), daemon=True).start()
slow = Slow()
time.sleep(0.2)
"""


def test_the_interpreter_ends_while_a_daemon_is_in_a_call():
    result = python(DAEMON)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("kind", ["cumsum", "mask"])
def test_other_python_threads_run_during_a_long_call(kind):
    """Another thread must be able to run in the middle of the call, not only at its ends."""
    marks, stop = [], threading.Event()

    def mark():
        while not stop.is_set():
            time.sleep(0.001)  # a wait for an event yields the processor many times where there is no GIL
            marks.append(time.perf_counter())

    def call(size: int) -> tuple[float, float]:
        values = np.broadcast_to(np.float32(1), (1, size, 4))
        mask = np.broadcast_to(np.True_, (size >> 10, 1 << 14))
        out = np.zeros(values.shape, np.float32) if kind == "cumsum" else None
        begin = time.perf_counter()
        if kind == "cumsum":
            attnmask.chunk_local_cumsum(values, 64, out=out)
        else:
            attnmask.prepare_lens_from_mask(mask)
        return begin, time.perf_counter()

    thread = threading.Thread(target=mark)
    thread.start()
    try:
        size = 2**20
        begin, end = call(size)
        while end - begin < 0.2 and size < 2**27:
            size *= 2
            begin, end = call(size)
    finally:
        stop.set()
        thread.join()
    quarter = (end - begin) / 4
    assert sum(begin + quarter < at < end - quarter for at in marks) >= 5, (kind, size, end - begin)


# Leaks


def resident() -> int:
    """Bytes of memory in use now; or if the system does not say that, the most that were ever in use."""
    with contextlib.suppress(OSError), open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@without_sanitizer
def test_no_memory_is_lost(set_threads):
    """Memory of results, of copies of unusual inputs, and of calls that fail half-way is freed."""
    set_threads(2)
    calls = some_calls()
    swapped = np.ones((1, 100_000, 2), np.dtype("float32").newbyteorder("S"))
    ends = np.arange(0, 1_000_001, 10).astype(np.dtype("int32").newbyteorder("S"))
    counts = np.full((1, 100_000, 4), 100, np.dtype("int16").newbyteorder("S"))

    def everything():
        for call in calls:
            call()
        attnmask.chunk_global_cumsum(swapped, cu_seqlens=np.arange(100_001))
        attnmask.prepare_position_ids(ends)
        with pytest.raises(OverflowError):
            attnmask.chunk_global_cumsum(counts)
        with pytest.raises(ValueError, match="cu_seqlens"):
            attnmask.chunk_global_cumsum(swapped, cu_seqlens=ends)

    for _ in range(5):
        everything()
    gc.collect()
    before = resident()
    for _ in range(60):
        everything()
    gc.collect()
    grown = (resident() - before) / 2**20
    assert grown < 10, f"{grown:.0f} MiB more after 60 rounds"


def test_use_needs_all_helpers():
    with pytest.raises(TypeError, match=r"use\(\) needs describe="):
        _core.use(threading.main_thread().ident)
    with pytest.raises(TypeError):
        _core.use("main")


def wrong_answers() -> None:
    """Each helper in turn answers what C cannot read, in a process of its own: helpers stay, and this may crash."""
    from attnmask._cache import attend
    from attnmask._common import arguments
    from attnmask._faces import habits

    x, wide = np.zeros((1, 1, 1, 4), np.float32), np.ones((2, 3), np.longdouble)

    def cached(**more):
        return attnmask.flash_attention_with_kvcache(x, x, x, **more)

    class OfAnotherLibrary:
        def __dlpack__(self): ...

    interleaved = np.zeros((1, 8), np.int32)
    helpers = {
        "describe": (arguments, lambda: _core.cdiv(x, 1)),
        "as_array": (arguments, lambda: _core.cdiv(OfAnotherLibrary(), 1)),
        "mask_array": (arguments, lambda: _core.prepare_lens_from_mask(wide)),
        "share_memory": (
            arguments,
            lambda: _core.segment_ids(interleaved[:, ::2], "ids", interleaved[:, 1::2]),
        ),
        "table_of": (attend, lambda: cached(cache_seqlens=0, block_table=np.zeros((1, 1), np.int16))),
        "tokens_before": (attend, lambda: cached(cache_seqlens=[0])),
        "options": (attend, lambda: cached(cache_seqlens=0, sliding_window=3)),
        "mask_program": (attend, lambda: cached(cache_seqlens=0, attention_mask=np.ones((1, 1), bool))),
    }
    right = {name: getattr(module, name) for name, (module, _) in helpers.items()} | {"habit": habits.ask}
    for name, (_, call) in helpers.items():
        for answer in (np.int64(1), None, 2.5, object()):
            _core.use(threading.main_thread().ident, **right | {name: lambda *_, answer=answer: answer})
            with pytest.raises(TypeError, match=rf"{name}\(\) must return a.*, got an object of type"):
                call()


def test_answers_of_helpers_are_checked():
    run_apart(wrong_answers)


def test_c_imports_nothing():
    sources = [*(ROOT / "csrc").rglob("*.[ch]")]
    if not sources:
        pytest.skip("the tests run without the sources")
    assert not [path for path in sources if "PyImport_" in path.read_text()]


def test_no_module_imports_itself_over_others():
    root = Path(attnmask.__file__).parents[1]
    modules = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (root / "attnmask").rglob("*.py")
    }

    def imported(name: str) -> set[str]:
        nodes = [
            node
            for node in ast.walk(ast.parse(modules[name].read_text()))
            if isinstance(node, ast.ImportFrom)
        ]
        pairs = [(node.module, alias.name) for node in nodes for alias in node.names if alias.name != "_core"]
        return {
            f"{module}.{what}" if f"{module}.{what}" in modules else module for module, what in pairs
        } & modules.keys()

    order = TopologicalSorter({name: imported(name) - {name} for name in modules})
    order.prepare()  # raises CycleError
