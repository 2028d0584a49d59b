"""
Which part of a practicing actor solves its task: the offset, or the network.

    python benchmarks/actor_parts.py runs/demo
    python benchmarks/actor_parts.py runs/demo --n-states 48 --parts whole offset

An actor of RLT plays the VLA's chunk plus an offset plus the network's correction. For every checkpoint of a run, the
practicing actor plays the first selection states: whole, with the offset alone, with the network alone, and with the
offset and the network only while the VLA's command to the gripper opens it, or closes it. The first row is the frozen
VLA. A minute of CPU time or two for each number.
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
from rlt_sb3.evaluation.evaluate import evaluate
from rlt_sb3.experiment.checkpoints import all_checkpoints
from rlt_sb3.experiment.config import load_config
from rlt_sb3.experiment.environment import make_env
from rlt_sb3.rlt.offset import phase_of
from rlt_sb3.rlt.policies import RLTActor

PARTS = ("whole", "offset", "network", "network while open", "network while closed")


def part_of(actor: RLTActor, part: str) -> Callable[[dict[str, th.Tensor]], th.Tensor]:
    """
    Take a part of an actor.

    :param actor: a residual actor
    :param part: one of :data:`PARTS`
    :return: observations -> chunks, flat (B, C*d)
    """
    bare = copy.deepcopy(actor)
    if part == "network":
        bare.offset.zero_()
        return bare
    last: Any = bare.mu[-1]
    th.nn.init.zeros_(last.weight)
    th.nn.init.zeros_(last.bias)
    if part in ("whole", "offset"):
        return actor if part == "whole" else bare

    def switched(obs: dict[str, th.Tensor]) -> th.Tensor:
        closes = th.as_tensor(phase_of(obs["vla_ref"], actor.gripper)).expand(len(obs["vla_ref"])) == 1
        return th.where((closes == (part == "network while closed"))[:, None], actor(obs), bare(obs))

    return switched


def as_function(model: RLT, part: str) -> Callable[[dict[str, np.ndarray]], np.ndarray]:
    """
    Turn a part of a model's practicing actor into what ``evaluate`` plays.

    :param model: the model
    :param part: one of :data:`PARTS`
    :return: observations -> chunks (B, C, d)
    """
    actor = part_of(model.policy.training_actor, part)

    def act(obs: dict[str, np.ndarray]) -> np.ndarray:
        with th.no_grad():
            chunks = actor(model.policy.obs_to_tensor(obs)[0])
        return chunks.cpu().numpy().reshape(obs["vla_ref"].shape)

    return act


def main() -> None:
    """Play the parts of all checkpoints, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run of RLT")
    parser.add_argument("--n-states", type=int, default=24, help="how many selection states")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    try:
        config = load_config(args.run / "config.yaml")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    checkpoints = [checkpoint for checkpoint in all_checkpoints(args.run) if checkpoint.chunks > 0]
    if config.algorithm != "rlt" or not checkpoints:
        parser.error(f"{args.run} must be a run of rlt with checkpoints: {config.algorithm}, {len(checkpoints)} found.")
    found = []
    env = make_env(config.env, "selection", config.seed)
    try:
        print("| chunks | plays | solved |\n|---|---|---|")
        policies: list[tuple[int, str, Any]] = [(0, "vla", "vla")]
        for checkpoint in checkpoints:
            model = RLT.load(checkpoint.model, device="cpu")
            policies += [(checkpoint.chunks, part, as_function(model, part)) for part in args.parts]
        for chunks, name, policy in policies:
            played = evaluate(policy, env, args.n_states, split="selection", name=name)
            low, high = played.interval
            found.append({"chunks": chunks, "plays": name, "solved": played.successes, "n": played.n})
            print(f"| {chunks} | {name} | {played.successes}/{played.n} ({low:.0%} to {high:.0%}) |", flush=True)
    finally:
        env.close()
    write_json(args, found=found)


if __name__ == "__main__":
    main()
