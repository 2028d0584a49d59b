"""Success rates of a frozen VLA on LIBERO, for the provenance of its weights."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from rlt_gym.libero.vector_env import LiberoVectorEnv
from rlt_gym.vla.base import FrozenVLA


def success_rates(
    vla: FrozenVLA,
    suite: str,
    task_ids: Sequence[int],
    n_states: int,
    num_envs: int = 2,
    split: str = "selection",
    progress: bool = True,
    **env_kwargs: Any,
) -> dict[str, dict[str, Any]]:
    """
    Play the VLA's own chunks, whole, from the first initial states of a split.

    :param vla: The policy.
    :param suite: LIBERO suite; ``task_ids`` its tasks.
    :param n_states: Initial states per task, each played once.
    :param num_envs: Worker processes.
    :param split: Initial states; not ``"eval"`` when anything is chosen by the outcome.
    :param progress: Show a progress bar.
    :param env_kwargs: Further arguments of ``LIBERO-v0``: assets, render, ...
    :return: For each task its instruction, ``successes``, ``states`` and ``mean_steps`` (control steps to success).
    """
    rates = {}
    for task_id in tqdm(task_ids, desc="success rates", unit="task", disable=not progress):
        env = LiberoVectorEnv(
            num_envs, suite, [task_id], vla.spec.horizon, init_states=split, **{"render": "fast", **env_kwargs}
        )
        try:
            steps = _play(vla, env, n_states)
        finally:
            env.close()
        solved = [count for count in steps.values() if count is not None]
        rates[f"{suite}/{task_id}"] = {
            "instruction": env.tasks[0].instruction,
            "successes": len(solved),
            "states": n_states,
            "mean_steps": float(np.mean(solved)) if solved else None,
        }
    return rates


def _play(vla: FrozenVLA, env: LiberoVectorEnv, n_states: int) -> dict[int, int | None]:
    """Control steps to success of each initial state, ``None`` for a failure."""
    steps: dict[int, int | None] = {}
    obs, infos = env.reset()
    while len(steps) < n_states:
        pictures = {"agentview": obs["agentview"], "wrist": obs["wrist"], "state": obs["proprio"]}
        seeds = (infos["init_index"] * 1000 + infos["episode_steps"]).tolist()
        chunk = vla.forward(pictures, list(infos["instruction"]), seed=seeds).chunk
        obs, _, terminations, truncations, infos = env.step(chunk.cpu().numpy())
        for index in np.flatnonzero(terminations | truncations):
            state = int(infos["final_info"]["init_index"][index])
            if state < n_states:
                steps[state] = int(infos["final_info"]["episode_steps"][index]) if terminations[index] else None
    return steps
