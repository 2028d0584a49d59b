"""How much memory workers may still take, on this machine and in this process's control group."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Iterator

#: Files of a control group with its limit, its use, and what of its cache can be given back: versions 2 and 1.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_memory(root: str = "/") -> int:
    """
    Bytes that can be had without swapping. The page cache counts as free, since it makes room.

    :param root: Where ``proc`` and ``sys`` are.
    :return: The kernel's ``MemAvailable``, or what the control groups (containers, batch systems) leave, if less.
    """
    base = Path(root)
    machine = _numbers(base / "proc/meminfo").get("MemAvailable:")
    if machine is None:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min([machine * 1024, *_left_in_groups(base)]))


def _left_in_groups(base: Path) -> Iterator[int]:
    """Read what each control group above this process leaves, of those that have a limit."""
    for line in _read(base / "proc/self/cgroup").splitlines():
        _, controllers, path = (line + "::").split(":")[:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = base / "sys/fs/cgroup" / ("memory" if controllers else "")  # version 1 or 2
        group = mount / path.strip("/")
        # A container may see the path outside of it, which it does not have; its own group is then the top.
        for folder in dict.fromkeys([group, *group.parents, mount]):
            if folder != mount and mount not in folder.parents:
                continue
            for limit_file, use_file, cache in _FILES:
                limit, use = _read(folder / limit_file).strip(), _read(folder / use_file).strip()
                if limit.isdigit() and use.isdigit():  # "max" is none
                    yield int(limit) - int(use) + _numbers(folder / "memory.stat").get(cache, 0)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _numbers(path: Path) -> dict[str, int]:
    """Read the lines ``name number ...`` of a file."""
    words = (line.split() for line in _read(path).splitlines())
    return {entry[0]: int(entry[1]) for entry in words if len(entry) > 1 and entry[1].isdigit()}
