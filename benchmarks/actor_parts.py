"""
Which part of a practicing actor solves its task: the offset, or the network.

    python benchmarks/actor_parts.py runs/demo
    python benchmarks/actor_parts.py runs/demo --n-states 48 --parts whole offset
    python benchmarks/actor_parts.py runs/demo --n-states 6 --parts whole --films films
    python benchmarks/actor_parts.py runs/libero_goal_ten --task 5

An actor of RLT plays the VLA's chunk plus an offset plus the network's correction. For every checkpoint of a run, the
practicing actor plays the first selection states: whole, with the offset alone, with the network alone, and with the
offset and the network only while the VLA's command to the gripper opens it, or closes it. The first row is the frozen
VLA. A minute of CPU time or two for each number. With ``--films``, each of these episodes is filmed: a run has no
film of an actor that it has never deployed. Of a run that shows the task, ``--task`` says which one is played.

The second table says what the network adds in the observations of the first part: the norm of its mean over all of them
and over a chunk, in units of ``action_scale``, the norm of the standard deviation over observations, and the cosine
between that mean and the offset. At -1 the network takes back what the offset adds.
"""

import argparse
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch as th
from json_file import write_json

from rlt_sb3 import RLT
from rlt_sb3.common.gated_policy import n_tasks_of, tasks_of
from rlt_sb3.evaluation.evaluate import evaluate
from rlt_sb3.experiment.checkpoints import Checkpoint, all_checkpoints
from rlt_sb3.experiment.config import TrainConfig, load_config
from rlt_sb3.experiment.environment import make_env
from rlt_sb3.experiment.run_dir import RunDir
from rlt_sb3.rlt.offset import phase_of
from rlt_sb3.rlt.policies import RLTActor

Observation = dict[str, np.ndarray]
PARTS = ("whole", "offset", "network", "network while open", "network while closed")


def part_of(actor: RLTActor, part: str) -> Callable[[dict[str, th.Tensor]], th.Tensor]:
    """
    Take a part of an actor.

    :param actor: a residual actor
    :param part: one of :data:`PARTS`
    :return: observations -> chunks, flat (B, C*d)
    """
    if part == "whole":
        return actor
    bare = copy.deepcopy(actor)
    if part == "network":
        bare.offset.zero_()
        return bare
    last: Any = bare.mu[-1]
    th.nn.init.zeros_(last.weight)
    th.nn.init.zeros_(last.bias)
    if part == "offset":
        return bare

    def switched(obs: dict[str, th.Tensor]) -> th.Tensor:
        closes = th.as_tensor(phase_of(obs["vla_ref"], actor.gripper)).expand(len(obs["vla_ref"])) == 1
        return th.where((closes == (part == "network while closed"))[:, None], actor(obs), bare(obs))

    return switched


def as_function(model: RLT, part: str, seen: list[Observation] | None = None) -> Callable[[Observation], np.ndarray]:
    """
    Turn a part of a model's practicing actor into what ``evaluate`` plays.

    :param model: the model
    :param part: one of :data:`PARTS`
    :param seen: a list to which all observations are added; None: they are forgotten
    :return: observations -> chunks (B, C, d)
    """
    actor = part_of(model.policy.training_actor, part)

    def act(obs: Observation) -> np.ndarray:
        if seen is not None:
            seen.append({key: value.copy() for key, value in obs.items()})
        with th.no_grad():
            tensors: Any = model.policy.obs_to_tensor(obs)[0]  # a dictionary, as the observations are
            chunks = actor(tensors)
        return chunks.cpu().numpy().reshape(obs["vla_ref"].shape)

    return act


def network_beside_offset(model: RLT, seen: list[Observation]) -> list[dict[str, Any]]:
    """
    Compare what the network adds with the offset.

    :param model: the model
    :param seen: observations of one task
    :return: for each of the offset's vectors: "gripper" ("opens" or "closes"), "rows", "mean", "spread" and "cosine"
    """
    actor, rows = model.policy.training_actor, []
    free = np.arange(actor.offset.shape[-1]) != (-1 if actor.gripper is None else actor.gripper)
    task = tasks_of(seen[0])[0]
    of_units = (actor.offset[task].cpu().numpy() / model.action_unit)[:, free]
    chunks = [as_function(model, part) for part in ("network", "offset")]
    reference = np.concatenate([obs["vla_ref"] for obs in seen])
    network, offset = (np.concatenate([play(obs) for obs in seen]) - reference for play in chunks)
    inside = np.abs(reference + network + offset) < 1.0  # elsewhere chunks are limited
    corrections = np.where(inside, network, np.nan) / model.action_unit
    phases = np.broadcast_to(phase_of(reference, actor.gripper), len(reference))
    for phase, name in enumerate(("opens", "closes")[: len(of_units)]):
        of_rows = np.nanmean(corrections[phases == phase][..., free], axis=1)
        mean = np.nanmean(of_rows, axis=0)
        sizes = np.linalg.norm(mean), np.linalg.norm(np.nanstd(of_rows, axis=0))
        cosine = mean @ of_units[phase] / max(sizes[0] * np.linalg.norm(of_units[phase]), 1e-12)
        found = {"mean": sizes[0], "spread": sizes[1], "cosine": cosine}
        rows.append({"gripper": name, "rows": len(of_rows), **{key: float(value) for key, value in found.items()}})
    return rows


def read_run(parser: argparse.ArgumentParser, run: Path) -> tuple[TrainConfig, list[Checkpoint]]:
    """
    Read a run of RLT.

    :param parser: ends the program if it is something else
    :param run: its folder
    :return: its configuration, and its checkpoints after the first chunk, in order
    """
    try:
        config = load_config(run / "config.yaml")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    checkpoints = [checkpoint for checkpoint in all_checkpoints(run) if checkpoint.chunks > 0]
    if config.algorithm != "rlt" or not checkpoints:
        parser.error(f"{run} must be a run of rlt with checkpoints: {config.algorithm}, {len(checkpoints)} found.")
    return config, checkpoints


def main() -> None:
    """Play the parts of all checkpoints, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run of RLT")
    parser.add_argument("--n-states", type=int, default=24, help="how many selection states")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--task", type=int, default=0, help="of a run that shows the task: its number in the suite")
    parser.add_argument("--last", action="store_true", help="the last checkpoint only")
    parser.add_argument("--films", type=Path, help="folder; its subfolder videos gets a film of every episode")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    config, checkpoints = read_run(parser, args.run)
    if args.last:
        checkpoints = checkpoints[-1:]
    if args.films:
        args.films.mkdir(parents=True, exist_ok=True)
    found, compared = [], []
    env = make_env(config.env, "selection", config.seed)
    try:
        unwrapped: Any = env.unwrapped
        shown = n_tasks_of(env.single_observation_space) is not None
        tasks = [task.task_id for task in unwrapped.tasks] if shown else [0]
        if args.task not in tasks:
            parser.error(f"--task must be one of {tasks} (the tasks that {args.run} tells apart), got {args.task}.")
        # states of the tasks take turns
        shard, n_states = (tasks.index(args.task), len(tasks)), args.n_states * len(tasks)
        print("| chunks | plays | solved |\n|---|---|---|")

        def play(policy: Any, chunks: int, name: str) -> None:
            filmed = n_states if args.films else 0
            played = evaluate(policy, env, n_states, split="selection", name=name, record_states=filmed, shard=shard)
            if args.films:
                RunDir(args.films).write_films(f"{chunks}-{name.replace(' ', '-')}", played)
            low, high = played.interval
            found.append({"chunks": chunks, "plays": name, "solved": played.successes, "n": played.n})
            print(f"| {chunks} | {name} | {played.successes}/{played.n} ({low:.0%} to {high:.0%}) |", flush=True)

        play("vla", 0, "vla")
        for checkpoint in checkpoints:
            model, seen = RLT.load(checkpoint.model, device="cpu"), list[Observation]()
            for part in args.parts:
                play(as_function(model, part, seen if part == args.parts[0] else None), checkpoint.chunks, part)
            compared += [{"chunks": checkpoint.chunks, **row} for row in network_beside_offset(model, seen)]
    finally:
        env.close()
    print("\n| chunks | gripper | rows | network's mean | spread | cosine with the offset |\n|---|---|---|---|---|---|")
    for row in compared:
        sizes = " | ".join(f"{row[key]:.3f}" for key in ("mean", "spread"))
        print(f"| {row['chunks']} | {row['gripper']} | {row['rows']} | {sizes} | {row['cosine']:.2f} |")
    write_json(args, found=found, compared=compared)


if __name__ == "__main__":
    main()
