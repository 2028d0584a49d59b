"""Free memory, read from the kernel's files."""

import pytest

from rlt_gym.core import worker_vector_env
from rlt_gym.workers.memory import available_memory

GB = 1 << 30


def machine(root, groups="0::/", **files):
    """A machine with 15 of 19 GB available, 2 of them in no use at all; files by their paths."""
    meminfo = f"MemTotal: {19 * GB >> 10} kB\nMemFree: {2 * GB >> 10} kB\nMemAvailable: {15 * GB >> 10} kB\n"
    contents = {"proc/meminfo": meminfo, "proc/self/cgroup": groups, **files}
    for path, content in contents.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"{content}\n")
    return available_memory(str(root))


def group(folder, limit, use, cache=0, old=False):
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if old else ("memory.max", "memory.current")
    stat = f"anon 5\n{'total_' if old else ''}inactive_file {cache}"
    return {f"{folder}/{names[0]}": limit, f"{folder}/{names[1]}": use, f"{folder}/memory.stat": stat}


CGROUP = "sys/fs/cgroup"


@pytest.mark.parametrize(
    "groups, files, expected",
    [
        ("0::/", {}, 15 * GB),  # a warm page cache is no lack of memory
        ("0::/", group(CGROUP, "max", GB), 15 * GB),
        ("0::/", group(CGROUP, 8 * GB, 3 * GB, cache=GB), 6 * GB),
        ("0::/job", group(f"{CGROUP}/job", 64 * GB, GB), 15 * GB),
        ("0::/job/step", {**group(f"{CGROUP}/job", 4 * GB, GB), **group(f"{CGROUP}/job/step", "max", GB)}, 3 * GB),
        ("0::/of/the/host", group(CGROUP, 2 * GB, GB), GB),
        ("0::/", group(CGROUP, GB, 2 * GB), 0),
        ("3:cpu:/a\n2:memory:/docker/x", group(f"{CGROUP}/memory", 5 * GB, GB, cache=GB, old=True), 5 * GB),
        ("2:memory:/job", group(f"{CGROUP}/memory/job", 1 << 62, GB, old=True), 15 * GB),
    ],
)
def test_what_machine_and_groups_leave(tmp_path, groups, files, expected):
    assert machine(tmp_path, groups, **files) == expected


def test_this_machine_has_some():
    assert 0 < available_memory() < 1 << 50


@pytest.mark.parametrize("free, resident", [(64 * GB, 10), (4 * GB, 2), (GB // 2, 1)])
def test_as_many_tasks_stay_as_fit_into_half_of_it(monkeypatch, free, resident):
    monkeypatch.setattr(worker_vector_env, "available_memory", lambda: free)
    assert worker_vector_env._resident_tasks(10, num_envs=2, task_bytes=400 << 20) == resident
