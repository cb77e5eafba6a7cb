"""The processors that this process may use: how many, on how many cores, and what a container allows of them."""

import os
from math import ceil
from pathlib import Path

__all__ = ["container_limit", "describe", "threads_in_container"]


def _read(path: Path) -> str:
    """Return the text of a small file, or an empty one if it cannot be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _quota(text: str) -> float | None:
    """Return the processors that ``"<quota> <period>"`` allows; None for no limit."""
    try:
        quota, period = map(int, text.split())
    except ValueError:  # "max 100000", or nothing
        return None
    return quota / period if quota > 0 and period > 0 else None


def container_limit(root: Path = Path("/")) -> float | None:
    """Return how many processors the control groups of this process may use; None for no limit.

    A limit applies to all groups below it, so the least one counts. Inside a container, the path of the group is often
    the host's, which is not visible there; then the limit is that of the topmost group.
    """
    limits = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / controllers  # version 2 has no controllers in its line
        for group in (base / path.lstrip("/"), *(base / path.lstrip("/")).parents):
            if controllers:
                text = _read(group / "cpu.cfs_quota_us") + " " + _read(group / "cpu.cfs_period_us")
            else:
                text = _read(group / "cpu.max")
            limits.append(_quota(text))
            if group == base:
                break
    return min((limit for limit in limits if limit is not None), default=None)


def threads_in_container(root: Path = Path("/")) -> int | None:
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


def describe(root: Path = Path("/")) -> str:
    """Return a line such as ``16 of 32, on 8 cores of 1 memory node, limited to 4 by the container``."""
    allowed, system = _allowed(), root / "sys/devices/system"
    line = f"{len(allowed)} of {os.cpu_count() or len(allowed)}"
    cores = {_read(system / f"cpu/cpu{number}/topology/thread_siblings_list") for number in allowed}
    nodes = [
        path for path in system.glob("node/node[0-9]*") if any((path / f"cpu{n}").exists() for n in allowed)
    ]
    if "" not in cores:
        line += f", on {_several(len(cores), 'core')}"
        if nodes:
            line += f" of {_several(len(nodes), 'memory node')}"
    limit = container_limit(root)
    return line if limit is None else f"{line}, limited to {limit:g} by the container"
