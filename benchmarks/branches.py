"""
Whether the critics of a run prefer the better of two chunks, on states from which both were played out.

    python benchmarks/branches.py runs/demo
    python benchmarks/branches.py runs/demo --n-states 48 --at 0,4,8,12 --candidates 3

The last practicing actor plays the first selection states without noise. Before chunk 0, 4 and 8 (``--at``) of each
episode there is a branch point. There the VLA's chunk is played instead of the actor's, and also chunks with noise, as
practice draws them (``--candidates``); the actor plays the rest of the episode. A branch point is reached again by
playing the same chunks from the same initial state, and its observation must be the same to the digit. The actor's own
branch is the episode itself.

The first table compares what each kind of chunk leads to with the critics' values: mean and minimum over the slow
critics, with which practice chooses a chunk and computes targets. A return is discounted for each control step, as in
the run; an episode that ends without success returns 0. The second table asks how the critics rank two chunks of one
branch point: in how many of the pairs with a success and a failure they prefer the success (Wilson's interval), and the
rank correlation of differences in value with differences in return. That one counts each pair in both directions, so
0 is what critics have that know nothing of chunks; its interval is a bootstrap over initial states. Pairs of one
initial state are not independent: Wilson's interval is too narrow where they are many.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
from actor_parts import Observation, as_function, read_run
from branch_tables import VALUES, outcome_table, pairs_of, ranking, ranking_table
from json_file import write_json

from rlt_sb3 import RLT
from rlt_sb3.evaluation.evaluate import check_n_states
from rlt_sb3.experiment.environment import make_env


@dataclass
class Episode:
    """
    One episode: what to play in it, and what came of it.

    :param state: (task_id, initial state)
    :param first: chunks to play before the policy chooses
    :param due: what must be observed before the first chunks
    """

    state: tuple[int, int]
    first: Sequence[np.ndarray] = ()
    due: Sequence[Observation] = ()
    observations: list[Observation] = field(default_factory=list)
    chunks: list[np.ndarray] = field(default_factory=list)
    steps: int = 0
    success: bool = False

    def choose(self, obs: Observation, chunk: np.ndarray) -> np.ndarray:
        """
        Choose the next chunk.

        :param obs: what is observed now
        :param chunk: the policy's
        :return: the chunk to play (C, d)
        :raises RuntimeError: if the observation is not the one that is due
        """
        at = len(self.chunks)
        if at < len(self.due):
            other = [key for key, value in self.due[at].items() if not np.array_equal(value, obs[key])]
            if other:
                raise RuntimeError(
                    f"The same chunks lead to another observation before chunk {at} of (task, initial state) "
                    f"{self.state}: {', '.join(other)} differ. Branches need a deterministic environment and VLA."
                )
        self.observations.append(obs)
        self.chunks.append(np.array(self.first[at] if at < len(self.first) else chunk))
        return self.chunks[-1]

    def returned(self, at: int, gamma: float) -> float:
        """
        Compute the discounted return from a chunk on.

        :param at: number of the chunk
        :param gamma: discount per control step
        """
        return gamma ** (self.steps - at * len(self.chunks[0]) - 1) if self.success else 0.0


def play(env: gym.vector.VectorEnv, act: Callable[[Observation], np.ndarray], episodes: list[Episode]) -> None:
    """
    Play episodes on selection states.

    :param env: a vector environment of this package
    :param act: observations -> chunks (B, C, d)
    :param episodes: they are filled with what happens
    :raises RuntimeError: as of :meth:`Episode.choose`; if a simulator is lost
    """
    waiting = iter(episodes)
    options = {"init_states": "selection", "episodes": [episode.state for episode in episodes]}
    obs, _ = env.reset(options=options)
    playing = [next(waiting, None) for _ in range(env.num_envs)]
    while any(episode is not None for episode in playing):
        chunks = act(obs)
        for row, episode in enumerate(playing):
            if episode is not None:
                chunks[row] = episode.choose({key: value[row].copy() for key, value in obs.items()}, chunks[row])
        obs, _, terminated, truncated, infos = env.step(chunks)
        for row in np.flatnonzero(terminated | truncated).tolist():
            episode, playing[row] = playing[row], next(waiting, None)
            if infos["final_info"]["worker_restarted"][row]:
                raise RuntimeError("A simulator was lost: run the benchmark again.")
            assert episode is not None
            episode.steps, episode.success = int(infos["final_info"]["episode_steps"][row]), bool(terminated[row])


def noisy_chunks(model: RLT, obs: Observation, count: int, rng: np.random.Generator) -> np.ndarray:
    """
    Draw chunks as practice does, before the critics choose.

    :param model: the run's
    :param obs: one observation
    :param count: how many chunks
    :param rng: random numbers
    :return: chunks (count, C, d)
    """
    actor, tensors = model.policy.training_actor, _tensors(model, obs, 1)
    with th.no_grad():
        flat = th.cat([actor(tensors), actor.offsets(tensors)])
    chunk, offset = flat.cpu().numpy().reshape(2, *obs["vla_ref"].shape)
    reference = np.clip(np.clip(obs["vla_ref"], -1.0, 1.0) + offset, -1.0, 1.0)
    share = rng.uniform(*model.correction_range, size=(count, 1, 1))
    noise = rng.normal(size=(count, *reference.shape)) * np.asarray(model.exploration_std) * model.action_unit
    return np.clip(reference + (chunk - reference) * share + noise, -1.0, 1.0).astype(np.float32)


def _tensors(model: RLT, obs: Observation, count: int) -> Any:
    return model.policy.obs_to_tensor({key: np.repeat(value[None], count, 0) for key, value in obs.items()})[0]


def values_of(model: RLT, obs: Observation, chunks: Sequence[np.ndarray]) -> dict[str, list[float]]:
    """
    Ask the slow critics about several chunks.

    :param model: the run's
    :param obs: one observation
    :param chunks: (n, C, d)
    :return: for each of :data:`branch_tables.VALUES`, one number per chunk
    """
    flat = th.as_tensor(np.stack(chunks), dtype=th.float32, device=model.device).flatten(1)
    with th.no_grad():
        values = model.policy.critic_target.q_values(_tensors(model, obs, len(chunks)), flat)
    return {"mean": values.mean(0).tolist(), "min": values.amin(0).tolist()}


def branch(model: RLT, env: gym.vector.VectorEnv, states: list, at: list[int], candidates: int) -> list[dict[str, Any]]:
    """
    Play all branches.

    :param model: the run's, with its last practicing actor
    :param env: a vector environment of this package
    :param states: (task_id, initial state) of each episode
    :param at: before which chunks there are branch points; not after the end of an episode
    :param candidates: chunks with noise at each of them
    :return: for each branch "state", "at", "plays" ("actor", "vla" or "noise"), "success", "return", "mean" and "min"
    """
    rng, act = np.random.default_rng(0), as_function(model, "whole")
    stems = [Episode(state) for state in states]
    play(env, act, stems)
    points = [(stem, k) for k in at for stem in stems if k < len(stem.chunks)]
    branches, rows = [], []
    for stem, k in points:
        obs = stem.observations[k]
        others = [np.clip(obs["vla_ref"], -1.0, 1.0), *noisy_chunks(model, obs, candidates, rng)]
        due = stem.observations[: k + 1]
        branches.append([stem, *(Episode(stem.state, [*stem.chunks[:k], chunk], due) for chunk in others)])
    play(env, act, [episode for group in branches for episode in group[1:]])
    for (stem, k), group in zip(points, branches, strict=True):
        values = values_of(model, stem.observations[k], [episode.chunks[k] for episode in group])
        for number, episode in enumerate(group):
            kind = ("actor", "vla", "noise")[min(number, 2)]
            came = {"success": episode.success, "return": episode.returned(k, model.gamma)}
            row = {"state": list(stem.state), "at": k, "plays": kind, **came}
            rows.append(row | {name: values[name][number] for name in VALUES})
    return rows


def main() -> None:
    """Play the branches, print the two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run of RLT")
    parser.add_argument("--n-states", type=int, default=24, help="how many selection states")
    parser.add_argument("--at", default="0,4,8", help="before which chunks there are branch points")
    parser.add_argument("--candidates", type=int, default=0, help="chunks with noise at each branch point")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    config, checkpoints = read_run(parser, args.run)
    try:
        at = [int(number) for number in args.at.split(",")]
    except ValueError as error:
        parser.error(str(error))
    if min(at) < 0 or args.candidates < 0:
        parser.error(f"--at and --candidates must not be negative, got {args.at} and {args.candidates}.")
    model = RLT.load(checkpoints[-1].model, device="cpu")
    env = make_env(
        replace(config.env, num_envs=min(config.env.num_envs, 2), render_mode=None), "selection", config.seed
    )
    try:
        check_n_states(env, "selection", args.n_states, "--n-states")
        unwrapped: Any = env.unwrapped
        tasks = [task.task_id for task in unwrapped.tasks]
        states = [(tasks[number % len(tasks)], number // len(tasks)) for number in range(args.n_states)]
        rows = branch(model, env, states, at, args.candidates)
    except ValueError as error:
        parser.error(str(error))
    finally:
        env.close()
    print(outcome_table(rows))
    found: list[dict[str, Any]] = []
    for k in [*at, "all"]:
        chosen = [row for row in rows if k in (row["at"], "all")]
        for kinds in (("actor", "vla"), ("actor", "vla", "noise"))[: 1 + bool(args.candidates)]:
            pairs = pairs_of(chosen, kinds)
            about = {"at": k, "kinds": ", ".join(kinds), "pairs": len(pairs)}
            found += [about | {"value": value} | ranking(pairs, value) for value in VALUES]
    print(f"\n{ranking_table(found)}")
    write_json(args, chunks=checkpoints[-1].chunks, branches=rows, rankings=found)


if __name__ == "__main__":
    main()
