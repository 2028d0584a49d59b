"""A plan for a run with up to 1,000 simulators: what limits it, by the measured cost of the learner's process.

    python benchmarks/many_simulators.py --json benchmarks/results/many_simulators.json
    python benchmarks/many_simulators.py --simulators 8,1024 --steps 3

The simulators are fake ones in ``--workers`` Ray actors on this machine, with observations and chunks of the shipped
VLA's sizes; so this machine can hold 1,000 of them. What is measured is the CPU time of the learner's process per
chunk: transport (Ray's messages, joining observations and infos), choosing chunks, storing rows, and one critic update
of RLT's defaults. Other programs hardly change it. What the workers compute is not counted: in a run they are on other
machines.

The plan assumes that each simulator plays a chunk in ``--chunk-seconds`` (LIBERO with the shipped VLA: 0.1 to 0.25 s),
that the learner has one core, and ``--utd`` updates per row. "Wanted" is what the simulators could play, "process" what
the learner's process could take without updates, "updates" what its updates allow. The smallest one is the bottleneck.
"""

from __future__ import annotations

import argparse
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from json_file import write_json
from throughput import Clocks

from rlt_gym.cluster.connection import RayConfig, connected
from rlt_gym.cluster.vector_env import RayVectorEnv
from rlt_gym.testing import FakeRLTokenVectorEnv
from rlt_sb3 import RLT, GymnasiumVecEnv

PARTS = ("transport", "choosing", "storing", "updates")
#: of the shipped VLA
SIZES: dict[str, Any] = {"chunk_length": 8, "token_dim": 128, "max_episode_steps": 64}
#: Critic updates in each vector step: enough to time them, whatever the number of simulators.
UPDATES = 8


def measure(simulators: int, workers: int, steps: int) -> dict[str, float]:
    """CPU milliseconds of this process: per chunk, and per update."""
    workers = min(workers, simulators)
    env = RayVectorEnv(
        partial(FakeRLTokenVectorEnv, simulators // workers, **SIZES), workers, simulators // workers,
        seed=0, needs={"num_cpus": 0.01},
    )  # fmt: skip
    venv, clocks = GymnasiumVecEnv(env), Clocks()
    try:
        model = RLT(
            "MultiInputPolicy", venv, seed=0, device="cpu", learning_starts=simulators, critic_warmup_updates=0,
            utd=UPDATES / simulators,
        )  # fmt: skip
        model.learn(4 * simulators)  # not measured: it fetches code, and the warm-up has no updates
        clocks.time(env, "step_async", "transport")
        clocks.time(venv, "step_wait", "transport")
        for method, part in (("_sample_action", "choosing"), ("_store_transition", "storing"), ("train", "updates")):
            clocks.time(model, method, part)
        chunks, updates = model.num_timesteps, model._n_updates
        clocks.clear()
        model.learn(steps * simulators, reset_num_timesteps=False)
        spent = {part: 1000 * float(seconds[1]) for part, seconds in clocks.stop().items()}
        counts = dict.fromkeys(PARTS, model.num_timesteps - chunks) | {"updates": model._n_updates - updates}
        return {part: spent[part] / counts[part] for part in PARTS}
    finally:
        venv.close()


def plan(found: dict[str, float], simulators: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Chunks per second that the simulators, the learner's process and its updates allow, and which is the smallest."""
    limits = {
        "wanted": simulators / arguments.chunk_seconds,
        "process": 1000 / sum(found[part] for part in PARTS[:3]),
        "updates": 1000 / (arguments.utd * found["updates"]),
    }
    smallest = min(limits, key=lambda name: limits[name])
    return limits | {"bottleneck": "simulators" if smallest == "wanted" else smallest}


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = partial(str.split, sep=",")
    parser.add_argument("--simulators", type=lambda text: [int(n) for n in numbers(text)], default=[8, 32, 128, 1024])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="vector steps that are measured")
    parser.add_argument("--chunk-seconds", type=float, default=0.2)
    parser.add_argument("--utd", type=float, default=2.0)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "No actor has been on trial")
    load, results = os.getloadavg()[0], {}
    print(f"{len(os.sched_getaffinity(0))} cores, load {load:.1f} at the beginning; milliseconds of CPU time\n")
    print(
        "| simulators | transport, a chunk | choosing | storing | an update | wanted, chunks/s | process | updates ",
        end="",
    )
    print("| bottleneck |\n" + "|---" * 9 + "|")
    with connected(RayConfig(), arguments.workers):
        for simulators in arguments.simulators:
            found = measure(simulators, arguments.workers, arguments.steps)
            limits = plan(found, simulators, arguments)
            results[simulators] = found | limits
            costs = " | ".join(f"{found[part]:.2f}" for part in PARTS)
            rates = " | ".join(f"{limits[name]:.0f}" for name in ("wanted", "process", "updates"))
            print(f"| {simulators} | {costs} | {rates} | {limits['bottleneck']} |", flush=True)
    write_json(arguments, load=load, results=results)


if __name__ == "__main__":
    main()
