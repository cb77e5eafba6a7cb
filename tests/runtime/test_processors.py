"""What processors this process may use: read from trees of files like those of /proc and /sys."""

import os
from pathlib import Path

import pytest
from environment import python, with_threads

import attnmask
from attnmask._common.processors import container_limit, describe, threads_in_container


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v1(folder: str, quota: int, period: int = 100000) -> dict[str, str]:
    return {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": f"{period}\n"}


LIMITS = {
    "nothing is there": ({}, None),
    "no limit": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
    "the uppermost group of a container": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"},
        1.5),
    "a path of the host's": ({"proc/self/cgroup": "0::/pods/7\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4.0),
    "the tightest of the groups above": (
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/cpu.max": "300000 100000\n",
            "sys/fs/cgroup/a/cpu.max": "200000 100000\n",
        },
        2.0,
    ),
    "the first version": (
        {
            "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/x\n0::/x\n",
            **v1("sys/fs/cgroup/cpu,cpuacct/x", 50000),
        },
        0.5,
    ),
    "the first version without a limit": ({"proc/self/cgroup": "1:cpu:/\n", **v1("sys/fs/cgroup/cpu", -1)}, None),
    "no numbers": ({"proc/self/cgroup": "0::/\nnonsense\n", "sys/fs/cgroup/cpu.max": "many few\n"}, None),
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_container_limit(name, tmp_path):
    files, limit = LIMITS[name]
    assert container_limit(tree(tmp_path, files)) == limit


@pytest.mark.parametrize(("quota", "threads"), [(10000, 1), (100000, 1), (150000, 2), (10**9, None)])
def test_threads_in_container(quota, threads, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{quota} 100000\n"}
    assert threads_in_container(tree(tmp_path, files)) == threads


def test_describe(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4}, raising=False)
    files = {
        f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": f"{n % 4},{n % 4 + 4}\n"
        for n in range(8)
    }
    assert describe(tree(tmp_path, files)) == "3 of 8, on 2 cores"
    files |= {f"sys/devices/system/node/node{n // 4}/cpu{n}/topology": "" for n in range(8)}
    assert describe(tree(tmp_path, files)) == "3 of 8, on 2 cores of 2 memory nodes"
    files |= {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}
    assert describe(tree(tmp_path, files)).endswith(", limited to 2 by the container")
    assert describe(tmp_path / "nothing") == "3 of 8"


def test_show_config_tells_processors():
    assert attnmask.show_config(mode="dict")["processors"].startswith(
        f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} of "
    )


IN_A_CONTAINER = """
import builtins, io, os
read = builtins.open
files = {"/proc/self/cgroup": "0::/", "/sys/fs/cgroup/cpu.max": "250000 100000"}
builtins.open = lambda path, *args: io.StringIO(files[path]) if path in files else read(path, *args)
os.cpu_count = lambda: 64
import attnmask
print(attnmask.get_num_threads())
"""


@with_threads
@pytest.mark.parametrize(
    ("environment", "threads"), [({}, 3), ({"OMP_NUM_THREADS": "5"}, 5), ({"ATTNMASK_NUM_THREADS": "4"}, 4)]
)
def test_a_container_bounds_the_default(environment, threads):
    result = python(IN_A_CONTAINER, **environment)
    assert result.stdout.strip() == str(threads), result.stderr
