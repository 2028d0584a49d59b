"""Processes that a test has started on a Ray cluster: where they are, and whether they are gone after it."""

import os
import time
from pathlib import Path

#: Environment variable that Ray hands on to all that it starts.
MARK = "RLT_TEST_MARK"
#: In the command lines of processes that belong to workers, not to Ray.
OURS = (b"ray::RemoteEnv", b"ray::Collector", b"rlt_gym/workers/launch.py")


def place_of(actor):
    """Id of an actor's machine and of its process."""
    import ray

    return ray.get(actor.__ray_call__.remote(lambda self: (ray.get_runtime_context().get_node_id(), os.getpid())))


def processes_with(mark, kinds=()):
    """Ids of all processes whose environment has a mark, and whose command line one of several texts; not this one."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                command = (folder / "cmdline").read_bytes()
                if command and (not kinds or any(kind in command for kind in kinds)):
                    found.append(int(folder.name))
        except OSError:
            continue
    return sorted(set(found) - {os.getpid()})


def left_over(mark, kinds=(), seconds=90):
    """
    Those that are still there after a while.

    When a run is killed, two agents of Ray may wait for their dead cluster for 60 s before they end.
    """
    end = time.monotonic() + seconds
    while (found := processes_with(mark, kinds)) and time.monotonic() < end:
        time.sleep(0.2)
    return found
