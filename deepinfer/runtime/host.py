"""What this machine gives to this process: memory and cores, container limits included.

Reads /proc and /sys and owns nothing. The memory plan and the CPU device are built from its
numbers. `root` is another file system root, for tests.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
_UNLIMITED = 2**60  # cgroup v1 writes a number near 2 ** 63 where there is no limit


def available_memory_bytes(root: Path = _ROOT) -> int:
    """Memory that can be had without swapping, and without being killed by a cgroup's limit."""
    available = _meminfo_bytes(root, "MemAvailable")
    for limit, used, reclaimable in _memory_groups(root):
        available = min(available, max(0, limit - max(0, used - reclaimable)))
    return available


def usable_cores(root: Path = _ROOT) -> int:
    """Cores that this process may use at once: its affinity, and its cgroup's share of time."""
    cores = len(os.sched_getaffinity(0))
    for directory in _group_directories(root, "cpu"):
        quota = _cpu_quota(directory)
        if quota is not None:
            cores = min(cores, max(1, round(quota)))
    return cores


def limit_spinning() -> None:
    """Lets torch's OpenMP threads spin only briefly where they wait for each other.

    By default they spin so long that on shared cores a step may take several times its time, and
    if they sleep at once, waking them for each of a step's hundreds of small operations costs a
    third more. Counts when called before the process first imports torch, and only where the
    user has not chosen. For programs that own their process: the command, `LLM`, the tests.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # some 50 microseconds


def return_freed_memory() -> None:
    """Gives the system what is freed but kept by the C library, which loading leaves plenty of.

    Weights are widened and packed in pieces; the holes between what stays are up to a third of a
    model's size. Only glibc has the call; other C libraries keep less.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _meminfo_bytes(root: Path, field: str) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"/proc/meminfo has no {field}; set kv_cache_memory_bytes by hand.")


def _memory_groups(root: Path) -> Iterator[tuple[int, int, int]]:
    """(limit, used, reclaimable) in bytes of this process's cgroup and of those around it."""
    for directory in _group_directories(root, "memory"):
        for limit_name, used_name, cache_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = _number(directory / limit_name), _number(directory / used_name)
            if limit is not None and used is not None and limit < _UNLIMITED:
                yield limit, used, _statistic(directory / "memory.stat", cache_name)


def _group_directories(root: Path, controller: str) -> Iterator[Path]:
    """Directories of this process's cgroup and its ancestors, for version 1 and version 2.

    Inside a container the path may name places that only the host can see; the mounted root, which
    is the container's own group then, always ends the list.
    """
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = mount
        elif controller in controllers.split(","):
            top = mount / controller
        else:
            continue
        directory = top / path.lstrip("/")
        while directory != top and directory.is_relative_to(top):
            yield directory
            directory = directory.parent
        yield top


def _cpu_quota(directory: Path) -> float | None:
    """In cores; `None`: no limit."""
    try:
        quota, period = (directory / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    quota_us = _number(directory / "cpu.cfs_quota_us")
    period_us = _number(directory / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us and quota_us > 0 else None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or the word "max"
        return None


def _statistic(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name + " ")), 0)
