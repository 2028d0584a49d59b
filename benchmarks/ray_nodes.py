"""What each further node of a Ray cluster costs the learner: its vector steps, beside those of one process.

    python benchmarks/ray_nodes.py --json benchmarks/results/ray_nodes.json
    python benchmarks/ray_nodes.py --nodes 1,2 --steps 20

The nodes are Ray's own test nodes (``ray.cluster_utils``): each has a scheduler, an object store and one worker of its
own, but all are on this machine. So no network is measured, and from the second node on they share the cores. The
simulators are fake ones with the sizes of the shipped VLA, and cost nearly nothing. "one process" is the same number
of them without Ray, measured in the same turn. CPU time is that of the learner's process alone.
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from json_file import write_json
from many_simulators import SIZES

from rlt_gym.cluster.connection import RayConfig, connected
from rlt_gym.cluster.vector_env import RayVectorEnv
from rlt_gym.testing import FakeRLTokenVectorEnv

#: Vector steps that are not measured: they fetch code.
FIRST = 10


def play(env: Any, steps: int) -> tuple[float, float]:
    """Return milliseconds of a vector step: the median by the clock, and the mean CPU time of this process."""
    observation, _ = env.reset(seed=0)
    times = []
    for step in range(FIRST + steps):
        if step == FIRST:
            began = time.process_time()
        start = time.perf_counter()
        observation, *_ = env.step(observation["vla_ref"])
        times.append(time.perf_counter() - start)
    return 1000 * float(np.median(times[FIRST:])), 1000 * (time.process_time() - began) / steps


def measure(nodes: int, simulators: int, steps: int) -> dict[str, float]:
    """Measure a cluster of so many nodes, with one worker on each."""
    from ray.cluster_utils import Cluster

    store: dict[str, Any] = {"object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **store})
    try:
        for _ in range(nodes):
            cluster.add_node(num_cpus=1, **store)
        with connected(RayConfig(cluster.address), nodes):
            start = time.perf_counter()
            env = RayVectorEnv(
                partial(FakeRLTokenVectorEnv, simulators, **SIZES), nodes, simulators, seed=0, needs={"num_cpus": 1}
            )
            ready = time.perf_counter() - start
            try:
                wall, cpu = play(env, steps)
            finally:
                env.close()
    finally:
        cluster.shutdown()
    alone, _ = play(FakeRLTokenVectorEnv(nodes * simulators, **SIZES), steps)
    return {"wall": wall, "cpu": cpu, "one_process": alone, "seconds_to_start": ready}


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4])
    parser.add_argument("--simulators", type=int, default=8, help="of each node")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    arguments = parser.parse_args()
    load, results = os.getloadavg()[0], {}
    print(f"{len(os.sched_getaffinity(0))} cores, load {load:.1f} at the beginning; {arguments.simulators} a node\n")
    print("| nodes | ms of a vector step | one process | learner's CPU ms | of a chunk | seconds to start |")
    print("|---" * 6 + "|")
    for nodes in arguments.nodes:
        found = results[nodes] = measure(nodes, arguments.simulators, arguments.steps)
        chunk = found["cpu"] / (nodes * arguments.simulators)
        cells = (found["wall"], found["one_process"], found["cpu"], chunk, found["seconds_to_start"])
        print(f"| {nodes} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |", flush=True)
    write_json(arguments, load=load, results=results)


if __name__ == "__main__":
    main()
