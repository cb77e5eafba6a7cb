"""Threads, and what this build and this machine offer."""

from attnmask._common.arguments import one_of
from attnmask._common.loading import _core
from attnmask._common.processors import describe
from attnmask._common.types import Arguments

__version__: str = _core.config()["version"]


def get_num_threads() -> int:
    """Return the number of threads that a large call may use.

    Returns
    -------
    int
        The number set by `set_num_threads` or the environment variable ``ATTNMASK_NUM_THREADS``, otherwise OpenMP's
        (``OMP_NUM_THREADS``, or as many as there are processors for this process, or as its container's CPU quota
        allows if that is less). It is at most what ``OMP_THREAD_LIMIT`` and ``threadpoolctl.threadpool_limits``
        allow, and 1 inside another library's parallel region.

    See Also
    --------
    set_num_threads : change the number.

    Examples
    --------
    >>> import attnmask
    >>> attnmask.get_num_threads() >= 1
    True
    """
    return _core.get_num_threads()


def set_num_threads(n: int) -> None:
    """Let large calls use up to `n` threads; small calls stay on the calling thread.

    Results do not depend on it: the same inputs give the same bits for any number of threads. It applies only to this
    library, not to others that use the same OpenMP runtime.

    Parameters
    ----------
    n : int
        At least 1. Values above 1,024 count as 1,024.

    See Also
    --------
    get_num_threads : return the number.

    Examples
    --------
    >>> import attnmask
    >>> attnmask.set_num_threads(2)
    >>> attnmask.get_num_threads()
    2
    """
    _core.set_num_threads(n)


def show_config(mode: str = "stdout") -> Arguments | None:
    """Print or return how the library was built and what it runs on.

    Parameters
    ----------
    mode : {"stdout", "dict"}
        Print, or return a dictionary.

    Returns
    -------
    dict or None
        With ``mode="dict"``: ``version``; ``compiler``; ``openmp``, the OpenMP runtime in use and its version;
        ``openmp_library``, its file; ``openmp_spin``, how long its idle threads spin before they sleep (these three are
        None if the compiler had no OpenMP); ``threads``; ``processors``, those that this process may use, their cores
        and memory nodes, and the limit of a container; ``isa``, the instruction set of the kernels in use;
        ``isa_available``, those that this build has and this processor runs, best last. The environment variable
        ``ATTNMASK_ISA`` selects one.

    Examples
    --------
    >>> import attnmask
    >>> attnmask.show_config(mode="dict")["isa_available"][0]
    'baseline'
    """
    one_of(mode, "mode", ("stdout", "dict"))
    config: Arguments = {}
    for key, value in _core.config().items():
        config[key] = value
        if key == "threads":
            config["processors"] = describe()
    if mode == "dict":
        return config
    for key, value in config.items():
        print(f"{key + ':':17}{', '.join(value) if isinstance(value, list) else value}")
    return None
