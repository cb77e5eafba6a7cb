"""Threads are those of OpenMP: its conventions, a runtime shared with others, forks, floating-point modes, bits."""

import ctypes
import os
import re
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import numpy as np
import pytest
from environment import CONFIG, SANITIZED, alarm, compiled, import_paths, python, with_threads

import attnmask

pytestmark = [with_threads, pytest.mark.levels("once")]
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads by /proc")
with_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
needs = {
    name: pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed")
    for name in ("torch", "sklearn", "jax", "threadpoolctl")
}


def told(code: str, **environment: str) -> list[str]:
    """The words that `code` prints."""
    result = python(code, **environment)
    assert result.returncode == 0, (result.stdout, result.stderr)
    return result.stdout.split()


# What show_config reports


def test_the_runtime_is_told():
    assert re.fullmatch(r"(GNU libgomp|LLVM libomp), OpenMP \S+ \(20\d{4}\)", CONFIG["openmp"])
    assert re.search("gomp|omp", os.path.basename(CONFIG["openmp_library"]))


SPIN = """
import os, subprocess, sys
before = dict(os.environ)
import attnmask
printed = subprocess.run([sys.executable, "-c", "import os; print(*os.environ)"], capture_output=True, text=True)
inherited = set(names) & set(printed.stdout.split())
same = os.environ == before and inherited == set(names) & set(before)
print(attnmask.show_config("dict")["openmp_spin"], same)
"""
gnu = pytest.mark.skipif("GNU" not in str(CONFIG["openmp"]), reason="of GNU's runtime")


@gnu
@pytest.mark.parametrize(("environment", "spin"), [
    ({}, "GOMP_SPINCOUNT=2000"),
    ({"GOMP_SPINCOUNT": "77"}, "GOMP_SPINCOUNT=77"),
    ({"OMP_WAIT_POLICY": "passive"}, "OMP_WAIT_POLICY=passive"),
    ({"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "5"}, "GOMP_SPINCOUNT=5"),
])  # fmt: skip
def test_the_spin(environment, spin):
    """A setting of the user is kept, and the import does not change the environment."""
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")
    if set(names) & set(os.environ):
        pytest.skip("set for the tests themselves")
    assert told(f"names = {names}" + SPIN, **environment) == [spin, "True"]


@gnu
@pytest.mark.parametrize("spin", ["2000", "31"])
def test_the_runtime_has_taken_the_spin(spin):
    environment = {} if spin == "2000" else {"GOMP_SPINCOUNT": spin}
    result = python("import attnmask", OMP_DISPLAY_ENV="verbose", **environment)
    assert re.search(rf"GOMP_SPINCOUNT = '{spin}'", result.stderr), result.stderr


# How many threads

COUNT = """
import os
import numpy as np
import attnmask
def count():
    return len(os.listdir("/proc/self/task"))
def used(values=np.ones((4, 100_000, 16), np.float32)):
    "Threads more after a call than before."
    before = count()
    attnmask.chunk_global_cumsum(values)
    return count() - before
"""


@on_linux
@pytest.mark.parametrize(("environment", "threads"), [
    ({"OMP_NUM_THREADS": "3"}, 3),
    ({"OMP_NUM_THREADS": "3,2"}, 3),
    ({"OMP_NUM_THREADS": "4", "OMP_THREAD_LIMIT": "2"}, 2),
    ({"OMP_NUM_THREADS": "4", "ATTNMASK_NUM_THREADS": "2"}, 2),
    ({"OMP_NUM_THREADS": "1", "ATTNMASK_NUM_THREADS": "3"}, 3),
    ({"OMP_THREAD_LIMIT": "2", "ATTNMASK_NUM_THREADS": "3"}, 2),
])  # fmt: skip
def test_the_environment_says_how_many(environment, threads):
    assert told(COUNT + "print(attnmask.get_num_threads(), used())", **environment) == [
        str(threads),
        str(threads - 1),
    ]


@on_linux
def test_threads_stay_where_they_are_bound():
    code = (
        COUNT
        + "used(); print(*sorted(len(os.sched_getaffinity(int(t))) for t in os.listdir('/proc/self/task')))"
    )
    assert told(code, OMP_PROC_BIND="true", OMP_PLACES="cores", OMP_NUM_THREADS="2")[:1] == ["1"]


@on_linux
@needs["threadpoolctl"]
def test_threadpool_limits():
    """Limits apply as in any other library of OpenMP, also over a larger number set before, and can be lifted."""
    code = """
import threadpoolctl
runtimes = [r["filepath"] for r in threadpoolctl.threadpool_info() if r["user_api"] == "openmp"]
print(os.path.realpath(attnmask.show_config("dict")["openmp_library"]) in map(os.path.realpath, runtimes))
with threadpoolctl.threadpool_limits(1):
    print(attnmask.get_num_threads(), used())
    attnmask.set_num_threads(3)
    print(attnmask.get_num_threads(), used())
print(attnmask.get_num_threads(), used())
"""
    assert told(COUNT + code, OMP_NUM_THREADS="2") == ["True", "1", "0", "1", "0", "3", "2"]


def test_set_num_threads_is_nobody_elses_business(set_threads):
    runtime = ctypes.CDLL(CONFIG["openmp_library"])
    before = runtime.omp_get_max_threads()
    for threads in (1, 5, 2):
        set_threads(threads)
        attnmask.chunk_global_cumsum(np.ones((4, 50_000, 16), np.float32))
        assert runtime.omp_get_max_threads() == before


REGION = """
#include <omp.h>
void call_in_region(int threads, void (*function)(int))
{
#pragma omp parallel num_threads(threads)
    function(omp_get_thread_num());
}
"""


@on_linux
@pytest.mark.skipif(SANITIZED, reason="the other library is not sanitized")
def test_calls_inside_a_region_of_another_library(tmp_path):
    """As in a callback from C: each thread computes alone, with the same bits."""
    library = compiled(tmp_path, REGION, "-fopenmp")
    code = f"""
import ctypes
region = ctypes.CDLL({library._name!r})
values = np.random.default_rng(0).standard_normal((4, 50_000, 16)).astype(np.float32)
expected = attnmask.chunk_global_cumsum(values).tobytes()
seen = []
@ctypes.CFUNCTYPE(None, ctypes.c_int)
def function(number):
    same = attnmask.chunk_global_cumsum(values).tobytes() == expected
    seen.append((attnmask.get_num_threads(), same))
region.call_in_region(3, function)
before = count()
region.call_in_region(3, function)
print(count() - before, len(seen), set(seen) == {{(1, True)}}, attnmask.get_num_threads())
"""
    shared = told(COUNT + code, OMP_NUM_THREADS="3", LD_PRELOAD=CONFIG["openmp_library"])
    assert shared == ["0", "6", "True", "3"]


# Forks

FORKS = """
import multiprocessing, os, sys, threading, time
import numpy as np
{before}
import attnmask
attnmask.set_num_threads(3)
values = np.random.default_rng(0).standard_normal((8, 50_000, 8)).astype(np.float32)
def call(_=None):
    return attnmask.chunk_global_cumsum(values).tobytes()
def count():
    return len(os.listdir("/proc/self/task"))
expected = call()
def same(_=None):
    return call() == expected
def child(work, depth=1):
    "Forks `depth` times; the last one works."
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if (child(work, depth - 1) if depth > 1 else work()) else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


def forks(code: str, before: str = "", **environment: str) -> list[str]:
    return told(FORKS.replace("{before}", before) + code, **environment)


@with_fork
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_child_of_a_child(depth):
    code = f"print(child(same, {depth}), same(), child(lambda: same() and child(same, {depth}) and same()))"
    assert forks(code) == ["True"] * 3


@on_linux
def test_a_child_has_threads():
    """As many as its parent: the surviving one, the region thread, and the rest of the team."""
    code = "print(count() >= 3, child(lambda: count() == 1 and same() and count() == 3))"
    assert forks(code) == ["True", "True"]


@with_fork
def test_fork_on_a_thread_that_had_no_team():
    code = """
results = []
def forked():
    results.append(child(same))
for _ in range(3):
    thread = threading.Thread(target=forked)
    thread.start()
    thread.join()
print(*results, same())
"""
    assert forks(code) == ["True"] * 4


@with_fork
def test_threads_of_a_child():
    """New threads begin regions themselves, at the same time as the surviving one."""
    code = """
from concurrent.futures import ThreadPoolExecutor
def many():
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(same) for _ in range(40)]
        return all(same() for _ in range(20)) and all(future.result() for future in futures)
print(child(many), many())
"""
    assert forks(code) == ["True"] * 2


@with_fork
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_multiprocessing(method, tmp_path):
    """From a script, which spawned processes import again."""
    script = tmp_path / "script.py"
    body = 'if __name__ == "__main__":\n'
    body += f'    with multiprocessing.get_context("{method}").Pool(2) as pool:\n'
    body += "        print(all(pool.map(same, range(8), 1)), same())\n"
    script.write_text(FORKS.replace("{before}", "") + body)
    environment = os.environ | import_paths()
    command = [sys.executable, "-W", "ignore", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert result.stdout.split() == ["True", "True"], result.stderr


@with_fork
@pytest.mark.skipif(SANITIZED, reason="locks of the sanitizer's allocator stay held in a child")
def test_fork_during_the_call_of_another_thread():
    code = """
over = threading.Event()
def busy():
    while not over.is_set():
        call()
threads = [threading.Thread(target=busy) for _ in range(2)]
for thread in threads:
    thread.start()
results = [child(same, depth) for depth in [1, 2] * 5]
over.set()
for thread in threads:
    thread.join()
print(all(results), same())
"""
    assert forks(code) == ["True", "True"]


@with_fork
def test_a_child_that_is_the_first_to_import():
    """Its parent has used the runtime for something else on the same thread."""
    code = f"""
import ctypes, os, sys
import numpy as np
runtime = ctypes.CDLL({CONFIG["openmp_library"]!r}, mode=ctypes.RTLD_GLOBAL)
if hasattr(runtime, "GOMP_parallel"):
    work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
    runtime.GOMP_parallel(work, None, 3, 0)
pid = os.fork()
if pid == 0:
    import attnmask
    attnmask.set_num_threads(3)
    sums = attnmask.chunk_global_cumsum(np.ones((4, 50_000, 16), np.float32))
    os._exit(0 if (sums[:, -1] == 50_000).all() else 1)
print(os.waitpid(pid, 0)[1])
"""
    assert told(code) == ["0"]


@with_fork
def test_ctrl_c_in_a_child():
    """The surviving thread polls while the region thread runs its region."""
    code = """
import signal
class Alarm(Exception): pass
def ring(*_): raise Alarm
def interrupted():
    signal.signal(signal.SIGALRM, ring)
    lane = np.broadcast_to(np.float32(1), (1, 2**30, 1))
    out = np.zeros((1, 2**30, 1), np.float32)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    begin = time.perf_counter()
    try:
        attnmask.chunk_local_cumsum(lane, 64, out=out)
    except Alarm:
        return time.perf_counter() - begin < 0.6 and not out[0, ::2**14].all() and same()
print(child(interrupted))
"""
    assert forks(code) == ["True"]


# Other libraries

LIBRARIES = {
    "torch": "import torch; x = torch.ones(300, 300)\ndef other(): return float((x @ x + x.exp().cumsum(0)).sum())",
    "sklearn": """
from sklearn.cluster import KMeans
points = np.random.default_rng(0).standard_normal((3000, 4))
def other(): return float(KMeans(3, n_init=1, random_state=0).fit(points).inertia_)
""",
    "jax": "import jax.numpy as jnp; y = jnp.ones((300, 300))\ndef other(): return float((y @ y).sum())",
}


@with_fork
@pytest.mark.skipif(SANITIZED, reason="the other library is not sanitized")
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("library", [pytest.param(name, marks=needs[name]) for name in LIBRARIES])
def test_beside_another_library(library, first):
    """It is imported before or after attnmask, with calls in between, and works in a child of both."""
    code = """
print(all(same() and other() == theirs for _ in range(5)))
print(child(same))
"""
    use = LIBRARIES[library] + "\ntheirs = other()\n"
    result = forks(code, use) if first else forks(use + code)
    assert result == ["True", "True"]


@needs["torch"]
@needs["sklearn"]
@needs["threadpoolctl"]
@pytest.mark.skipif(SANITIZED, reason="the other libraries are not sanitized")
@pytest.mark.parametrize("order", ["tsa", "tas", "ats", "ast", "sat", "sta"])
def test_several_runtimes(order):
    """Each library may load a runtime of its own: limits apply to all of them, and all compute."""
    steps = {
        "t": LIBRARIES["torch"] + "\nother()",
        "s": LIBRARIES["sklearn"] + "\nother()",
        "a": COUNT + "used()",
    }
    code = "import numpy as np\n" + "\n".join(steps[letter] for letter in order)
    code += """
import threadpoolctl
with threadpoolctl.threadpool_limits(1):
    other()
    print(attnmask.get_num_threads())
other()
print(attnmask.get_num_threads(), used())
"""
    assert told(code, OMP_NUM_THREADS="2") == ["1", "2", "0"]


# Simultaneous callers


def test_callers_at_once_share_a_mask(set_threads):
    """Each call has it prepared for its own heads, and keeps that in the place of another's."""
    set_threads(2)
    info = attnmask.MaskInfo.from_segments(np.repeat(np.arange(8), 64)[None]).apply_causal()
    tokens = np.random.default_rng(0).standard_normal((1, 512, 6, 16)).astype(np.float32)

    def attend(heads: int) -> bytes:
        some = tokens[:, :, :heads]
        return attnmask.flash_attention(some, some, some, info).tobytes()

    expected = [attend(heads) for heads in range(1, 7)]
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(attend, [1, 2, 3, 4, 5, 6] * 40))
    assert results == expected * 40


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python has a GIL")
def test_the_gil_stays_off():
    """The import of a module that does not say that it works without would turn it on."""
    assert told("import sys, attnmask; print(sys._is_gil_enabled())", PYTHON_GIL="") == ["False"]


@on_linux
def test_the_threads_of_many_callers_are_bounded():
    """Callers share the threads: the first may have four, the second two, and each other one only itself."""
    code = """
import threading
attnmask.set_num_threads(4)
tokens = np.zeros((1, 1024, 8, 64), np.float32)
threads = [threading.Thread(target=lambda: [attnmask.flash_attention(tokens, tokens, tokens) for _ in range(4)])
           for _ in range(6)]
def running():
    states = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/stat") as stat:
                states.append(stat.read().rpartition(")")[2].split()[0])
        except OSError:
            pass
    return states.count("R")
for thread in threads:
    thread.start()
most = 0
while any(thread.is_alive() for thread in threads):
    most = max(most, running())
print(most <= 4 + 2 + 4 + 2)
"""
    assert told(COUNT + code) == ["True"]


ALONE = """
import os, numpy, attnmask
before = len(os.listdir("/proc/self/task"))
if kind == "sums":
    arrays = [numpy.ones((8, n, 16), numpy.float32) for n in (256, 2048, 65536)]
    calls = [lambda x=x: attnmask.chunk_global_cumsum(x) for x in arrays]
else:
    q, k = (numpy.ones((1, n, 8, 64), numpy.float32) for n in (1, 4096))
    calls = [lambda n=n: attnmask.flash_attention(q, k[:, :n], k[:, :n]) for n in (32, 256, 4096)]
for call in calls:
    call()
    print(len(os.listdir("/proc/self/task")) - before)
"""


@on_linux
@pytest.mark.parametrize("kind", ["sums", "attention"])
@pytest.mark.parametrize(("threads", "others"), [("2", ["0", "1", "1"]), ("48", ["0", "0", "47"])])
def test_threads_that_gain_less_than_waking_them_takes_sleep(kind, threads, others):
    """Sums of 0.25, 2 and 64 MB, of which two threads gain in the second; and queries of 32 to 4,096 keys."""
    assert told(f"kind = {kind!r}\n{ALONE}", ATTNMASK_NUM_THREADS=threads, OMP_NUM_THREADS=threads) == others


@on_linux
def test_threads_may_run_where_they_could_before():
    """The affinity mask of a thread that moves away from the caller's processor is restored."""
    code = """
import subprocess, sys
attnmask.set_num_threads(2)
tokens = np.zeros((1, 256, 8, 64), np.float32)
busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
try:
    for _ in range(300):
        attnmask.flash_attention(tokens, tokens, tokens)
finally:
    for process in busy:
        process.kill()
masks = [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")]
print(len(masks) >= 2, all(mask == os.sched_getaffinity(0) for mask in masks))
"""
    assert told(COUNT + code) == ["True", "True"]


@on_linux
def test_signals_are_not_for_the_threads_of_teams():
    code = (
        COUNT
        + """
import signal, threading
attnmask.set_num_threads(4)
used()
main = threading.get_native_id()
masks = []
for task in os.listdir("/proc/self/task"):
    if int(task) != main:
        with open(f"/proc/self/task/{task}/status") as status:
            masks += [int(line.split()[1], 16) for line in status if line.startswith("SigBlk")]
print(len(masks) >= 3, sum(bool(mask >> (signal.SIGINT - 1) & 1) for mask in masks) >= 3, signal.pthread_sigmask(0, []))
"""
    )
    assert told(code)[:3] == ["True", "True", "set()"]


def test_a_signal_ends_a_call_whose_last_task_is_anothers(set_threads):
    """The calling thread polls while it waits for the last task."""

    class Alarm(Exception):
        pass

    def ring(*_):
        raise Alarm

    set_threads(2)
    mask = np.broadcast_to(np.True_, (3, 2**36))  # three tasks, each of several seconds
    begin = time.perf_counter()
    with pytest.raises(Alarm), alarm(ring, 0.1):
        attnmask.prepare_lens_from_mask(mask)
    assert time.perf_counter() - begin < 0.6


@on_linux
@pytest.mark.skipif(SANITIZED, reason="a sanitizer may have threads of its own")
def test_whether_threads_can_be_created_is_tried_once():
    """Each Python thread has a team of 31 more. Linux numbers threads one by one, those of all processes."""
    code = """
import threading
attnmask.set_num_threads(32)
values, numbers = np.ones((4, 100_000, 4), np.float32), []
def run():
    numbers.append(threading.get_native_id())
    attnmask.chunk_global_cumsum(values)
for _ in range(12):
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
print(min(np.diff(numbers[1:])) < 40)
"""
    assert told(COUNT + code) == ["True"]


# Small stacks


@on_linux
@pytest.mark.skipif(SANITIZED, reason="a sanitizer takes more of the stack")
@pytest.mark.parametrize("isa", attnmask.show_config(mode="dict")["isa_available"])
def test_threads_with_stacks_of_64_kilobytes(isa):
    code = """
import threading
from ml_dtypes import bfloat16
rng, done = np.random.default_rng(0), []
mask = attnmask.MaskInfo.from_segments(np.zeros((1, 120), int)).apply_sliding_window(3)
pairs = np.eye(5000, 50, dtype=bool)[None]
x, cache = rng.standard_normal((1, 200, 2, 64)), np.zeros((2, 1, 600, 2, 64))
def attend(dtype):
    y = x.astype(dtype)
    out, vjp = attnmask.flash_attention_vjp(y, y, y, causal=True)
    vjp(out)
def decode(dtype):
    y = x[:, :1].astype(dtype)
    attnmask.flash_attention_with_kvcache(y, *cache.astype(dtype), y, y, cache_seqlens=500)
calls = [
    lambda: mask.attention_mask,
    lambda: attnmask.mask_to_segment_ids(pairs),
    lambda: attnmask.mask_to_segment_ids(pairs[..., ::2]),
    lambda: attnmask.attention_mask_to_padding_segment_ids(pairs),
    lambda: attnmask.prepare_lens_from_mask(pairs[0, :, ::2]),
]
for dtype in (np.float16, bfloat16, np.float32, np.float64, np.int32):
    calls.append(lambda dtype=dtype: attnmask.chunk_global_cumsum(np.ones((2, 1000, 400), dtype)))
    calls.append(lambda dtype=dtype: attnmask.chunk_global_cumsum(np.ones((2, 1000, 400), dtype)[..., ::2]))
for dtype in (np.float16, bfloat16, np.float32, np.float64):
    calls += [lambda dtype=dtype: attend(dtype), lambda dtype=dtype: decode(dtype)]
threading.stack_size(64 * 1024)
for call in calls:
    thread = threading.Thread(target=lambda: (call(), done.append(call)))
    thread.start()
    thread.join()
print(len(done) == len(calls))
"""
    assert told(COUNT + code, ATTNMASK_ISA=isa) == ["True"]


# Threads that cannot be created


@on_linux
@pytest.mark.skipif(SANITIZED, reason="a sanitizer has its own memory")
@pytest.mark.parametrize("megabytes", [12, 30])
@pytest.mark.parametrize("forked", [False, True])
def test_fewer_threads_where_the_system_creates_no_more(megabytes, forked):
    """No memory is left for their stacks: calls compute with those that there are."""
    code = f"""
import resource
values = np.random.default_rng(0).standard_normal((4, 100_000, 4)).astype(np.float32)
out, expected = np.empty((2, *values.shape), np.float32)
attnmask.set_num_threads(1)
attnmask.chunk_global_cumsum(values, out=expected)
attnmask.set_num_threads({2 if forked else 1})
attnmask.chunk_global_cumsum(values, out=out)
child = os.fork() if {forked} else 0
if child == 0:
    with open("/proc/self/statm") as statm:
        size = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ({megabytes} << 20), resource.RLIM_INFINITY))
    attnmask.set_num_threads(16)
    for _ in range(3):
        out[...] = 0
        attnmask.chunk_global_cumsum(values, out=out)
        assert (out == expected).all()
    attnmask.set_num_threads(2)
    attnmask.chunk_global_cumsum(values, out=out)
    print((out == expected).all(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
    assert told(COUNT + code) == ["True"]
