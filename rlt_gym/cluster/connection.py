"""Joins or starts a Ray cluster, and says whether workers fit into it."""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlt_gym.workers.processes import WorkerError

#: Environment variables that processes on other machines get from this one, beside those that begin with ``RLT_``.
FORWARDED = ("MUJOCO_GL", "PYOPENGL_PLATFORM", "MUJOCO_EGL_DEVICE_ID")
#: Object store of a Ray that is started here. What is in it at any time are the rows of one vector step and films.
OBJECT_STORE_BYTES = 256 << 20


class ClusterError(WorkerError):
    """The Ray cluster cannot be reached, or has no place for a worker."""


@dataclass
class RayConfig:
    """
    The Ray cluster, and what a worker takes of it: ``pip install 'rlt[ray]'``.

    :param address: of a running cluster, "auto" for the one that this machine belongs to; None: a Ray of this run alone
        starts on this machine, and ends with it
    :param num_cpus: processor cores that a worker reserves; None: one per simulator
    :param num_gpus: GPUs that a worker reserves, also a fraction
    :param timeout: seconds without an answer after which a worker counts as lost, and seconds to wait for a place and
        its start
    """

    address: str | None = None
    num_cpus: float | None = None
    num_gpus: float = 0.0
    timeout: float = 600.0

    def check(self) -> None:
        """
        Refuse what cannot work, before Ray starts.

        :raises ValueError: Names the setting.
        """
        for name, low in (("num_cpus", 0.0), ("num_gpus", 0.0), ("timeout", 1.0)):
            value = getattr(self, name)
            if value is not None and (not math.isfinite(value) or value < low):
                raise ValueError(f"ray.{name} must be {low:g} or more, got {value}.")

    def of_worker(self, simulators: int) -> dict[str, float]:
        """
        Return what one worker reserves.

        :param simulators: How many it has.
        :return: ``num_cpus`` and ``num_gpus``, as Ray takes them.
        """
        return {"num_cpus": simulators if self.num_cpus is None else self.num_cpus, "num_gpus": self.num_gpus}


def import_ray() -> Any:
    """
    Import Ray.

    :return: The module.
    :raises ImportError: It is not installed; names the extra.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would send them to its makers
    try:
        import ray
    except ImportError as error:
        raise ImportError("Workers on a cluster need Ray: pip install 'rlt[ray]'.") from error
    return ray


@contextlib.contextmanager
def connected(config: RayConfig, cpus: float) -> Iterator[Any]:
    """
    Join a Ray cluster or start one; leave it at the end.

    A connection that this process has already is used, and stays.

    :param config: Which cluster.
    :param cpus: Cores that all workers reserve together. A Ray that is started here offers that many, even if there are
        fewer: workers then take turns, as simulators without Ray do.
    :return: The module ``ray``.
    :raises ClusterError: There is no cluster at the address.
    """
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    here: dict[str, Any] = {"address": "local", "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    here["num_cpus"] = max(len(os.sched_getaffinity(0)), math.ceil(cpus))
    arguments = here if config.address is None else {"address": config.address}
    try:
        _check_reachable(config.address)
        ray.init(**arguments, logging_level="warning", runtime_env={"env_vars": forwarded()})
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ClusterError(
            f"There is no Ray cluster at ray.address {config.address!r} ({reason}): start one with `ray start --head`, "
            "or leave the address out."
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_reachable(address: str | None) -> None:
    """Fail at once where Ray itself would try for minutes."""
    host, colon, port = (address or "").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.removeprefix("ray://").strip("[]"), int(port)), timeout=10).close()


def forwarded() -> dict[str, str]:
    """Return the environment variables that decide how a worker draws, where it finds assets, what it may import."""
    kept = {name: value for name, value in os.environ.items() if name in FORWARDED or name.startswith("RLT_")}
    return {name: value for name, value in kept.items() if name != "RLT_SERVE_KEY"}


def check_room(workers: int, needs: dict[str, float]) -> None:
    """
    Refuse workers that the cluster could not hold even if nothing else ran on it.

    :param workers: How many there are to be at the same time.
    :param needs: What each reserves, see :meth:`RayConfig.of_worker`.
    :raises ClusterError: Says what the machines have.
    """
    ray = import_ray()
    names = {"CPU": needs["num_cpus"], "GPU": needs["num_gpus"]}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fits = sum(
        min((int((node.get(name, 0.0) + 1e-9) // amount) for name, amount in names.items() if amount), default=workers)
        for node in nodes
    )
    if fits < workers:
        have = "; ".join(f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes)
        raise ClusterError(
            f"{workers} workers with {names['CPU']:g} CPUs and {names['GPU']:g} GPUs each do not fit: the cluster has "
            f"{len(nodes)} machines ({have or 'none'}). Lower rollout.workers, ray.num_cpus or ray.num_gpus, or add "
            "machines with `ray start --address`."
        )
