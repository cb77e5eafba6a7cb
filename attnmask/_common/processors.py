"""The processors that this process may use: how many, on how many cores, and what a container allows of them."""

import os
from math import ceil

__all__ = ["container_limit", "describe", "threads_in_container"]


def _read(path: str) -> str:
    """Return the text of a small file, or an empty one if it cannot be read. (To import pathlib takes 4 ms.)"""
    try:
        with open(path) as file:
            return file.read()
    except (OSError, UnicodeDecodeError):
        return ""


def _quota(text: str) -> float | None:
    """Return the processors that ``"<quota> <period>"`` allows; None for no limit."""
    try:
        quota, period = map(int, text.split())
    except ValueError:  # "max 100000", or nothing
        return None
    return quota / period if quota > 0 and period > 0 else None


def container_limit(root: str = "/") -> float | None:
    """Return how many processors the control groups of this process may use; None for no limit.

    A limit applies to all groups below it, so the least one counts. Inside a container, the path of the group is often
    the host's, which is not visible there; then the limit is that of the topmost group.
    """
    limits = []
    for line in _read(os.path.join(root, "proc/self/cgroup")).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = os.path.join(root, "sys/fs/cgroup", controllers)  # version 2 has no controllers in its line
        names = [name for name in path.split("/") if name]
        files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
        for depth in range(len(names) + 1):
            group = os.path.join(top, *names[:depth])
            limits.append(_quota(" ".join(_read(os.path.join(group, name)) for name in files)))
    return min((limit for limit in limits if limit is not None), default=None)


def threads_in_container(root: str = "/") -> int | None:
    """Return the number of threads that a container can keep busy; None if it has no limit.

    More threads use up the container's time early, and then all of them wait for the next period.
    """
    limit = container_limit(root)
    return None if limit is None or limit >= (os.cpu_count() or 1) else max(1, ceil(limit))


def _several(count: int, name: str) -> str:
    return f"{count} {name}" if count == 1 else f"{count} {name}s"


def _allowed() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def describe(root: str = "/") -> str:
    """Return a line such as ``16 of 32, on 8 cores of 1 memory node, limited to 4 by the container``."""
    from glob import glob

    allowed, system = _allowed(), os.path.join(root, "sys/devices/system")
    line = f"{len(allowed)} of {os.cpu_count() or len(allowed)}"
    cores = {_read(f"{system}/cpu/cpu{number}/topology/thread_siblings_list") for number in allowed}
    nodes = [
        node
        for node in glob(f"{system}/node/node[0-9]*")
        if any(os.path.exists(f"{node}/cpu{number}") for number in allowed)
    ]
    if "" not in cores:
        line += f", on {_several(len(cores), 'core')}"
        if nodes:
            line += f" of {_several(len(nodes), 'memory node')}"
    limit = container_limit(root)
    return line if limit is None else f"{line}, limited to {limit:g} by the container"
