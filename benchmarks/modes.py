"""Ways to run LIBERO with a VLA in the loop, and what each costs: spawn, persistent, step-lock and Ray.

    python benchmarks/modes.py --envs 16 --json modes.json
    python benchmarks/modes.py --envs 2 --episodes 1 --modes persistent,steplock
    python benchmarks/modes.py --envs 16 --modes steplock,ray --workers 4

- "spawn": each episode has a new simulator process, which ends with it. All environments of a round start at once; the
  VLA answers one at a time.
- "persistent": the processes stay. All simulators play at the same time; the VLA answers one at a time.
- "steplock": the processes stay, and the VLA answers all environments at once. This is ``gymnasium.make_vec``.
- "ray": step-lock in ``--workers`` Ray actors on this machine, each with a VLA of its own. This is ``rlt train
  --rollout.workers``. CPU time is not counted.

Every mode plays the VLA's own chunks in episodes of the same length, resets included, nothing learns. Starting the
processes counts in "spawn" only. The table has control steps per second of wall time and of CPU time (all processes,
and the GPU where there is one is not counted), and the ratio of the rates per second to "spawn".
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import processes
import torch
from json_file import write_json

from rlt_gym.cluster.connection import RayConfig, connected
from rlt_gym.cluster.vector_env import RayVectorEnv
from rlt_gym.libero.make import make_rl_token_libero_vec


def cpu_seconds(envs: list[Any]) -> float:
    """CPU time of this process, of its children that have ended, and of the running workers."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    pids = [pid for env in envs for pid in getattr(env.unwrapped, "worker_pids", ())]
    running = sum(processes.cpu_seconds(pid) for pid in pids)
    return time.process_time() + ended.ru_utime + ended.ru_stime + running


def play(envs: list[Any], chunks: int) -> int:
    """Play one episode of this many chunks in all environments; control steps."""
    observations = [env.reset(options={"init_states": "train"})[0] for env in envs]
    steps = 0
    for _ in range(chunks):
        for env, observation in zip(envs, observations, strict=True):
            env.step_async(observation["vla_ref"])  # all simulators play at the same time
        for number, env in enumerate(envs):
            observations[number], _, _, _, infos = env.step_wait()
            steps += int(np.sum(infos["chunk_steps"]))
    return steps


def measure(mode: str, arguments: argparse.Namespace, make: Callable[[int], Any]) -> dict[str, Any]:
    """Control steps, wall and CPU seconds of a mode."""
    sizes = [arguments.envs] if mode in ("steplock", "ray") else [1] * arguments.envs
    envs: list[Any] = []
    if mode == "ray":
        per_worker = arguments.envs // arguments.workers
        envs = [RayVectorEnv(partial(make, per_worker), arguments.workers, per_worker, seed=0)]
        play(envs, 1)
    elif mode != "spawn":
        envs = [make(size) for size in sizes]
        play(envs, 1)  # not measured: the first pictures are slow
    before, start, steps = cpu_seconds(envs), time.perf_counter(), 0
    for _ in range(arguments.episodes):
        if mode == "spawn":
            envs = [make(size) for size in sizes]
        steps += play(envs, arguments.chunks)
        if mode == "spawn":
            for env in envs:
                env.close()
            envs = []
    cpu = None if mode == "ray" else cpu_seconds(envs) - before
    found = {"steps": steps, "wall": time.perf_counter() - start, "cpu": cpu}
    for env in envs:
        env.close()
    return found


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", type=lambda text: text.split(","), default=["spawn", "persistent", "steplock"])
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--workers", type=int, default=1, help="of the mode ray")
    parser.add_argument("--episodes", type=int, default=2, help="episodes of each environment")
    parser.add_argument("--chunks", type=int, default=12, help="chunks of an episode")
    parser.add_argument("--suite", default="libero_spatial")
    parser.add_argument("--task", type=int, default=0)
    parser.add_argument("--vla", default="mini-spatial")
    parser.add_argument("--assets", default="embedded")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, default=None, help="file for the numbers")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.envs % arguments.workers:
        parser.error(f"--envs {arguments.envs} cannot be divided among --workers {arguments.workers}")

    def make(num_envs: int) -> Any:
        torch.set_num_threads(1)
        return make_rl_token_libero_vec(
            num_envs, arguments.suite, [arguments.task], vla=arguments.vla, assets=arguments.assets,
            device=arguments.device, seed=0,
        )  # fmt: skip

    cores = len(os.sched_getaffinity(0))
    print(f"{arguments.suite} {arguments.task}, {arguments.vla}, {arguments.envs} environments, {cores} cores\n")
    print("| mode | control steps/s | per core-second | to spawn |\n|---|---|---|---|")
    results: dict[str, dict[str, Any]] = {}
    for mode in arguments.modes:
        with connected(RayConfig(), arguments.workers) if mode == "ray" else nullcontext():
            results[mode] = found = measure(mode, arguments, make)
        rate = found["steps"] / found["wall"]
        ratio = ""
        if "spawn" in results:
            ratio = f"{rate / (results['spawn']['steps'] / results['spawn']['wall']):.1f}"
        per_core = f"{found['steps'] / found['cpu']:.1f}" if found["cpu"] else ""
        print(f"| {mode} | {rate:.1f} | {per_core} | {ratio} |", flush=True)
    write_json(arguments, cores=cores, results=results)


if __name__ == "__main__":
    main()
