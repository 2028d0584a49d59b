"""What a worker costs to start and to keep: forked from the zygote against a plain subprocess.

    python benchmarks/workers.py --num-envs 4

CPU seconds of each worker until its environment is built, and until its first observation (the OpenGL context is made
then); proportional set size (PSS: shared pages are divided among those who share them) after a few chunks. The zygote's
own cost is paid once.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import numpy as np
import unshadow  # noqa: F401

from rlt_gym.libero.vector_env import LiberoVectorEnv


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def parent_of(pid: int) -> int:
    """Parent of a process; of a forked worker, its zygote."""
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rsplit(")", 1)[1].split()[1])


def pss_mb(pid: int) -> float:
    """Proportional set size."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pss:")) / 1024


def measure(start: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Means over the workers of one environment."""
    env = LiberoVectorEnv(
        arguments.num_envs,
        arguments.suite,
        [arguments.task],
        assets=arguments.assets,
        render=arguments.render,
        worker_start=start,
    )
    built = [cpu_seconds(pid) for pid in env.worker_pids]
    env.reset(seed=0)
    ready = [cpu_seconds(pid) for pid in env.worker_pids]
    for _ in range(3):
        env.step(np.zeros(env.action_space.shape, dtype=np.float32))
    memory = [pss_mb(pid) for pid in env.worker_pids]
    result = {"built": float(np.mean(built)), "ready": float(np.mean(ready)), "pss": float(np.mean(memory))}
    zygote = parent_of(env.worker_pids[0])
    result["zygote_cpu"] = cpu_seconds(zygote) if start == "zygote" else 0.0
    result["zygote_pss"] = pss_mb(zygote) if start == "zygote" else 0.0
    env.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=4)
    parser.add_argument("--suite", default="libero_goal")
    parser.add_argument("--task", type=int, default=1)
    parser.add_argument("--assets", default="embedded")
    parser.add_argument("--render", default="exact", choices=("exact", "fast"))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found: dict[str, Any] = {start: measure(start, arguments) for start in ("zygote", "spawn")}
    if arguments.json:
        print(json.dumps(found))
        return
    zygote, spawn = found["zygote"], found["spawn"]
    print(f"{arguments.num_envs} workers, {arguments.assets} assets, render={arguments.render}, means per worker")
    print("| | zygote | spawn | spawn / zygote |\n|---|---|---|---|")
    for key, label in (("built", "CPU s until built"), ("ready", "CPU s until ready"), ("pss", "PSS, MB")):
        ratio = f"{spawn[key] / zygote[key]:.1f}" if zygote[key] >= 0.05 else "-"  # the clock ticks at 0.01 s
        print(f"| {label} | {zygote[key]:.2f} | {spawn[key]:.2f} | {ratio} |")
    print(f"| the zygote itself, once | {zygote['zygote_cpu']:.2f} s, {zygote['zygote_pss']:.0f} MB | | |")


if __name__ == "__main__":
    main()
