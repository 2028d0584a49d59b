"""Chunks per second of a run that learns, by ``rollout.mode``: sync, overlap, Ray workers in step-lock, async.

    python benchmarks/collecting.py --json benchmarks/results/collecting.json     # 1, 2, 4, 8, 16 and 32 simulators
    python benchmarks/collecting.py --envs 4 --seconds 10 --rounds 2 --modes sync,async

RLT's defaults learn on a LIBERO task with the VLA in the loop. "ray" and "async" have ``--workers`` Ray actors on this
machine (one if there is one simulator), each with a VLA and an encoder of its own. Every mode has the same number of
simulators and the same updates per row, and takes its turn ``--rounds`` times.

Wall time is that of the learner's process, part after part: updates (with storing rows), choosing chunks, VLA and
encoder, transport (messages, copies, infos), waiting. In "ray" VLA and encoder run in the workers; in "async" the
workers choose the chunks, too. "sum" is the sum of the parts divided by the wall time; if it is off by more than 5 %
the program ends with status 1. "Staleness" is by how many updates, on average, the actor that chose a row is older than
the learner that stores it.

Start nothing else on the machine. CPU seconds are of all processes of this program, Ray's own included.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import processes
import torch
from json_file import write_json
from throughput import Clocks, For

from rlt_gym.cluster.connection import RayConfig, connected
from rlt_sb3.experiment.config import EnvConfig, EvalSettings, RolloutConfig, TrainConfig
from rlt_sb3.experiment.environment import make_training_env
from rlt_sb3.experiment.models import make_model, make_vec_env

MODES = ("sync", "overlap", "ray", "async")
PARTS = ("updates", "choosing", "VLA and encoder", "transport", "waiting")
#: of the model
PATCHED = {"train": "updates", "_store_transition": "updates", "_sample_action": "choosing"}


def config_of(mode: str, envs: int, arguments: argparse.Namespace) -> TrainConfig:
    """Make the settings of a run."""
    workers = min(arguments.workers, envs) if mode in ("ray", "async") else None
    env = EnvConfig(
        suite=arguments.suite, task_ids=[arguments.task], vla=arguments.vla, assets="embedded", num_envs=envs,
        render_mode=None,
    )  # fmt: skip
    rollout = RolloutConfig(mode if mode != "ray" else "sync", workers, None if workers is None else envs // workers)
    at_once = {"offset_search": {"opening": 0}}  # else the actor is not updated while the search opens
    settings = {"learning_starts": 2 * envs, "critic_warmup_updates": 0, "policy_kwargs": at_once}
    return TrainConfig(
        env=env, rollout=rollout, ray=RayConfig(num_cpus=0.01) if workers else RayConfig(), save_every=1000,
        evaluation=EvalSettings(videos=False), algorithms={"rlt": settings}, torch_threads=1,
    )  # fmt: skip


def make(config: TrainConfig, clocks: Clocks) -> tuple[Any, Any]:
    """Make the environment of a mode and its model, with clocks."""
    if config.rollout.mode == "async":
        from rlt_sb3.experiment.collecting import make_collectors

        venv: Any = make_collectors(config)
        waits, inner = [(venv._workers, "ready"), (venv._workers, "answer")], None
    else:
        env: Any = make_training_env(config, "train")
        venv = make_vec_env("rlt", env)
        inner = env.unwrapped
        waits = [(inner._workers, "answer")] if config.rollout.workers else [(inner._pool, "_ready")]
        if not config.rollout.workers:
            for network in (env.vla, env.encoder):
                clocks.time(network, "forward", "VLA and encoder")
        clocks.time(inner, "step_async", "transport")
        clocks.time(venv, "step_wait", "transport")
    model = make_model("rlt", venv, config.model_settings, 0)
    for owner, method in waits:
        clocks.time(owner, method, "waiting")
    return venv, model


def measure(mode: str, envs: int, arguments: argparse.Namespace, total: dict[str, Any]) -> None:
    """Train for some seconds, and add what was counted."""
    config, clocks = config_of(mode, envs, arguments), Clocks()
    with connected(config.ray, envs) if config.rollout.workers else nullcontext():
        venv, model = make(config, clocks)
        try:
            venv.seed(0)
            model.learn(6 * envs)  # not measured: the first pictures are slow, and collectors fetch the model
            for method, part in PATCHED.items():
                clocks.time(model, method, part)
            before, ages = model.num_timesteps, []
            if mode == "async":
                clocks.time(venv, "collect", "transport")
                name = venv._name_envs

                def counted(model: Any, worker: int, played: Any) -> None:
                    ages.append(model._n_updates - played.orders.counters["_n_updates"])
                    name(model, worker, played)

                venv._name_envs = counted
            cpu = processes.own_cpu_seconds()
            clocks.clear()
            start = Clocks._now()[0]
            model.learn(10**9, callback=For(arguments.seconds), reset_num_timesteps=False)
            wall = Clocks._now()[0] - start
            total["chunks"] = total.get("chunks", 0) + model.num_timesteps - before
            total["wall"] = total.get("wall", 0.0) + wall
            total["cpu"] = total.get("cpu", 0.0) + processes.own_cpu_seconds() - cpu
            for part, seconds in clocks.stop().items():
                total[part] = total.get(part, 0.0) + seconds[0]
            total.setdefault("rates", []).append((model.num_timesteps - before) / wall)
            total.setdefault("ages", []).extend(ages)
        finally:
            venv.close()


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = partial(str.split, sep=",")
    parser.add_argument("--envs", type=lambda text: [int(n) for n in numbers(text)], default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--modes", type=numbers, default=list(MODES))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each mode in each round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--suite", default="libero_spatial")
    parser.add_argument("--task", type=int, default=0)
    parser.add_argument("--vla", default="mini-spatial")
    parser.add_argument("--json", default=None, help="file for the numbers")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "No actor has been on trial")
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    print(f"{arguments.suite} {arguments.task}, {arguments.vla}, {cores} cores, load {load:.1f} at the beginning")
    print("\n| simulators | mode | chunks/s | to sync | chunks per core-second | ", end="")
    print(" | ".join(f"{part}, ms a chunk" for part in PARTS) + " | sum | staleness |\n|" + "---|" * (7 + len(PARTS)))
    results: dict[int, dict[str, Any]] = {}
    for envs in arguments.envs:
        found = results[envs] = {mode: {} for mode in arguments.modes}
        for _ in range(arguments.rounds):
            for mode in arguments.modes:
                measure(mode, envs, arguments, found[mode])
        for mode, row in found.items():
            row["sum"] = sum(row.get(part, 0.0) for part in PARTS) / row["wall"]
            row["staleness"] = float(np.mean(row.pop("ages"))) if row["ages"] else 0.0
            cells = [f"{1000 * row.get(part, 0.0) / row['chunks']:.1f}" for part in PARTS]
            first = found.get("sync", row)["rates"]
            ratio = np.median(np.array(row["rates"]) / np.array(first))
            rates = f"{row['chunks'] / row['wall']:.1f} | {ratio:.2f} | {row['chunks'] / row['cpu']:.1f}"
            print(
                f"| {envs} | {mode} | {rates} | {' | '.join(cells)} | {row['sum']:.1%} | {row['staleness']:.1f} |",
                flush=True,
            )
    write_json(arguments, cores=cores, load=load, results=results)
    off = [f"{n} {mode}" for n, found in results.items() for mode, row in found.items() if abs(row["sum"] - 1.0) > 0.05]
    if off:
        sys.exit(f"The parts do not add up to the wall time within 5 %: {', '.join(off)}.")


if __name__ == "__main__":
    main()
