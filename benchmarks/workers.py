"""What a worker costs to start and to keep: forked from the zygote against a plain subprocess.

    python benchmarks/workers.py --num-envs 4
    python benchmarks/workers.py --envs 1,2,4,8
    python benchmarks/workers.py --turns 1,3,9 --render fast

CPU seconds of each worker until its environment is built, and until its first observation (the OpenGL context is made
then); proportional set size (PSS: shared pages are divided among those who share them) after a few chunks. The zygote's
own cost is paid once.

With ``--envs`` it measures instead the memory of training with these numbers of environments, VLA and learner included:
host memory (PSS) of the workers, of the zygote and of the training process, and PyTorch's memory on the GPU, if any.

With ``--turns`` it measures what tasks that take turns in one worker cost: CPU seconds per episode of 12 chunks, first
with simulators that are closed when another task's turn comes, then with ones that keep their GL context.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
import processes

from rlt_gym.libero.vector_env import LiberoVectorEnv


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
    built = [processes.cpu_seconds(pid) for pid in env.worker_pids]
    env.reset(seed=0)
    ready = [processes.cpu_seconds(pid) for pid in env.worker_pids]
    for _ in range(3):
        env.step(np.zeros(env.action_space.shape, dtype=np.float32))
    memory = [pss_mb(pid) for pid in env.worker_pids]
    result = {"built": float(np.mean(built)), "ready": float(np.mean(ready)), "pss": float(np.mean(memory))}
    zygote = parent_of(env.worker_pids[0])
    result["zygote_cpu"] = processes.cpu_seconds(zygote) if start == "zygote" else 0.0
    result["zygote_pss"] = pss_mb(zygote) if start == "zygote" else 0.0
    env.close()
    return result


def training_memory(num_envs: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """
    Memory of RLT with its environment after some updates, MB; run this in a separate process.

    :return: ``workers`` (all of them), ``zygote``, ``process`` (PyTorch, VLA, encoder, learner, an almost empty
        buffer) and ``gpu``, the most that was reserved (None without a GPU); ``parameters`` are counts
    """
    import torch

    from rlt_gym.libero.make import make_rl_token_libero_vec
    from rlt_gym.rl_token.encoder import count_parameters
    from rlt_sb3 import RLT, GymnasiumVecEnv

    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    env = make_rl_token_libero_vec(
        num_envs, arguments.suite, [arguments.task], assets=arguments.assets, render=arguments.render, device=device
    )
    settings: dict[str, Any] = {"learning_starts": num_envs, "critic_warmup_updates": 0}
    at_once: dict[str, Any] = {"offset_search": {"opening": 0}}  # else the actor is not updated while the search opens
    model = RLT("MultiInputPolicy", GymnasiumVecEnv(env), device=device, seed=0, policy_kwargs=at_once, **settings)
    model.learn(4 * num_envs)
    raw = env.unwrapped
    assert isinstance(raw, LiberoVectorEnv)
    zygote = parent_of(raw.worker_pids[0])
    vla: Any = env.vla
    modules = {"VLA": vla.net, "RL token": env.encoder, "actor": model.actor, "critics": model.critic}
    found = {
        "workers": sum(pss_mb(pid) for pid in raw.worker_pids),
        "zygote": pss_mb(zygote) if zygote != os.getpid() else 0.0,
        "process": pss_mb(os.getpid()),
        "gpu": torch.cuda.max_memory_reserved() / 2**20 if device == "cuda" else None,
        "parameters": {name: count_parameters(module) for name, module in modules.items()},
    }
    env.close()
    return found


def print_training_memory(sizes: list[int], arguments: argparse.Namespace) -> None:
    """One row per number of environments, each measured in a fresh process."""
    rows: dict[int, dict[str, Any]] = {}
    for size in sizes:
        if len(sizes) == 1 and arguments.json:
            rows[size] = training_memory(size, arguments)
            continue
        same = [f"--{name}={getattr(arguments, name)}" for name in ("suite", "task", "assets", "render")]
        command = [sys.executable, __file__, f"--envs={size}", "--json", *same]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows[size] = json.loads(done.stdout.splitlines()[-1])[str(size)]
    if arguments.json:
        print(json.dumps(rows))
        return
    print(f"MB, {arguments.assets} assets, render={arguments.render}: host (PSS) and GPU (VLA, encoder, learner)\n")
    print("| envs | workers | per env | zygote | training process | host in all | GPU |\n|---|---|---|---|---|---|---|")
    for size, row in rows.items():
        workers, others = row["workers"] or 0.0, [row["zygote"] or 0.0, row["process"] or 0.0]
        gpu = "no GPU" if row["gpu"] is None else f"{row['gpu']:.0f}"
        cells = [workers, workers / size, *others, workers + sum(others)]
        print(f"| {size} | " + " | ".join(f"{cell:.0f}" for cell in cells) + f" | {gpu} |")
    counts = rows[sizes[0]]["parameters"]  # the same for any number of environments
    print("\nparameters: " + ", ".join(f"{name} {count:,}" for name, count in counts.items()))


def print_turns(tasks: list[int], arguments: argparse.Namespace, rounds: int = 3) -> None:
    """CPU seconds of this process for an episode of each task, round after round; the first round is not counted."""
    from rlt_gym.libero.assets import resolve_assets
    from rlt_gym.libero.worker.backend import LiberoBackend

    os.environ.setdefault("MUJOCO_GL", "osmesa")
    backend = LiberoBackend(arguments.suite, str(resolve_assets(arguments.assets).path), render=arguments.render)
    simulators = [backend.make(task) for task in tasks]
    seconds = {}
    for kept in (False, True):
        start = 0.0
        for turn in range(rounds + 1):
            if turn == 1:
                start = time.process_time()
            for simulator in simulators:
                simulator.reset("train", turn)
                for _ in range(12):
                    simulator.step_chunk(np.zeros((8, 7)), until_success=False)
                if not kept:
                    simulator.close()
        seconds[kept] = (time.process_time() - start) / (rounds * len(tasks))
    if arguments.json:
        print(json.dumps({"closed": seconds[False], "kept": seconds[True]}))
        return
    print(f"CPU s per episode of 12 chunks, {len(tasks)} tasks in turn: closed {seconds[False]:.2f}, ", end="")
    print(f"kept open {seconds[True]:.2f}, closed / kept {seconds[False] / seconds[True]:.2f}")


def numbers(text: str) -> list[int]:
    """Of "1,8,32"."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Measure the workers and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=4)
    parser.add_argument("--envs", type=numbers, help="memory of training with 1,8,32 environments")
    parser.add_argument("--turns", type=numbers, help="episodes of tasks 1,3,9 that take turns")
    parser.add_argument("--suite", default="libero_goal")
    parser.add_argument("--task", type=int, default=1)
    parser.add_argument("--assets", default="embedded")
    parser.add_argument("--render", choices=("exact", "fast"), help="exact; with --envs fast, as the VLA needs it")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    arguments.render = arguments.render or ("fast" if arguments.envs else "exact")
    if arguments.envs:
        print_training_memory(arguments.envs, arguments)
        return
    if arguments.turns:
        print_turns(arguments.turns, arguments)
        return
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
