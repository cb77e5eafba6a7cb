"""Load the C module, and with it the OpenMP runtime, whose threads should not spin for long.

A thread that has ended its part of a parallel region spins before it sleeps: by default for milliseconds with GNU's
runtime and for 200 with LLVM's. Where other programs keep the processors busy, it spins on the very processor that the
last thread of the region is waiting for. How long is read from the environment, once, when the runtime is loaded.
"""

import os
import sys

from attnmask._common.processors import threads_in_container

# Looking for work 2,000 times takes about as long as waking a thread. Filling a mask of 16 MB is a few parallel regions
# one after the other. It takes 0.171 ms with 2,000 looks or more, and 0.19 ms with 1,000. A setting of the user stays.
_SPIN = {"GOMP_SPINCOUNT": "2000", "KMP_BLOCKTIME": "0"}
_ours = [] if "OMP_WAIT_POLICY" in os.environ else [name for name in _SPIN if name not in os.environ]

os.environ.update({name: _SPIN[name] for name in _ours})
try:
    from attnmask import _core
except ImportError:
    from importlib.util import find_spec

    if find_spec("attnmask._core"):  # which is there and cannot be loaded
        raise
    _folder = os.path.abspath(f"{__file__}/../../..")
    raise ImportError(
        f"attnmask in {_folder} is not built for this Python, {sys.version.split()[0]}: run `pip install -e .` there, "
        "or `make demo`, which builds it in an environment of its own, .venv. If attnmask is installed, run Python in "
        "another folder"
    ) from None
finally:
    for name in _ours:
        del os.environ[name]

# OpenMP starts a thread for each processor, also in a container that may use the time of two of 64.
_given = any(os.environ.get(name) for name in ("ATTNMASK_NUM_THREADS", "OMP_NUM_THREADS"))
if not _given and (_threads := threads_in_container()):
    _core.set_num_threads(_threads)

__all__ = ["_core"]
