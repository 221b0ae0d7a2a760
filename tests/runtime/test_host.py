"""Memory and cores as a container sees them."""

import os
from pathlib import Path

import pytest

from deepinfer.runtime.host import (
    available_memory_bytes,
    return_freed_memory,
    usable_cores,
)

MIB = 2**20


@pytest.fixture
def machine(tmp_path):
    """A root file system with 8 GiB available; the returned function writes further files."""

    def write(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
        return tmp_path

    write("proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB")
    write("proc/self/cgroup", "0::/")
    return write


def test_this_machine_has_memory_and_cores():
    assert available_memory_bytes() > 0
    assert 1 <= usable_cores() <= os.cpu_count()


def test_without_limits_what_the_kernel_says_counts(machine):
    root = machine("sys/fs/cgroup/memory.max", "max")
    assert available_memory_bytes(root) == 8192 * MIB
    assert usable_cores(root) == len(os.sched_getaffinity(0))


def test_version_2_limit_less_what_is_used_and_cannot_be_reclaimed(machine):
    group = "sys/fs/cgroup/"
    machine(group + "memory.max", 1000 * MIB)
    machine(group + "memory.current", 700 * MIB)
    root = machine(group + "memory.stat", f"anon 1\ninactive_file {200 * MIB}")
    assert available_memory_bytes(root) == 500 * MIB


def test_the_tightest_group_around_the_process_counts(machine):
    machine("proc/self/cgroup", "0::/outer/inner")
    for group, limit in (("outer", 300), ("outer/inner", 900)):
        machine(f"sys/fs/cgroup/{group}/memory.max", limit * MIB)
        root = machine(f"sys/fs/cgroup/{group}/memory.current", 100 * MIB)
    assert available_memory_bytes(root) == 200 * MIB


def test_version_1(machine):
    machine("proc/self/cgroup", "4:memory:/job\n3:cpu,cpuacct:/job\n0::/")
    machine("sys/fs/cgroup/memory/memory.limit_in_bytes", 9223372036854771712)
    machine("sys/fs/cgroup/memory/memory.usage_in_bytes", 5 * MIB)
    machine("sys/fs/cgroup/memory/job/memory.limit_in_bytes", 400 * MIB)
    machine("sys/fs/cgroup/memory/job/memory.usage_in_bytes", 150 * MIB)
    machine("sys/fs/cgroup/memory/job/memory.stat", f"total_inactive_file {50 * MIB}")
    machine("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", 100_000)
    root = machine("sys/fs/cgroup/cpu/job/cpu.cfs_period_us", 100_000)
    assert available_memory_bytes(root) == 300 * MIB
    assert usable_cores(root) == 1


def test_a_quota_of_less_than_a_core_is_one_core(machine):
    root = machine("sys/fs/cgroup/cpu.max", "20000 100000")
    assert usable_cores(root) == 1


def test_an_exhausted_limit_leaves_nothing(machine):
    machine("sys/fs/cgroup/memory.max", 10 * MIB)
    root = machine("sys/fs/cgroup/memory.current", 12 * MIB)
    assert available_memory_bytes(root) == 0


def anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def test_freed_memory_goes_back_to_the_system():
    """What is freed between allocations that stay is not at the heap's end, so it needs asking."""
    size = 100_000  # below what the C library maps, and so unmaps, by itself
    pairs = [(bytearray(size), bytearray(size)) for _ in range(400)]
    kept = [first for first, _ in pairs]
    del pairs
    before = anonymous_bytes()
    return_freed_memory()
    assert before - anonymous_bytes() > 300 * size
    assert len(kept) == 400
