"""Success rates of a frozen VLA on tasks of a benchmark, for the provenance of its weights."""

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from tqdm import tqdm

from rlt_gym.vla.base import FrozenVLA
from rlt_gym.vla.rollouts import play_episodes


def success_rates(
    vla: FrozenVLA,
    suite: str,
    task_ids: Sequence[int],
    n_states: int,
    num_envs: int = 2,
    split: str = "selection",
    progress: bool = True,
    env_id: str = "LIBERO-v0",
    seed: int = 0,
    **env_kwargs: Any,
) -> dict[str, dict[str, Any]]:
    """
    Play the VLA's own chunks, whole, from the first initial states of a split.

    :param vla: The policy.
    :param suite: Suite of tasks.
    :param task_ids: Tasks of the suite.
    :param n_states: Initial states per task, each played once.
    :param num_envs: Worker processes.
    :param split: Initial states; not ``"eval"`` when anything is chosen by the outcome.
    :param progress: Show a progress bar.
    :param env_id: Vector environment with pictures that takes ``suite``, ``task_ids``, ``chunk_length``,
        ``image_size`` and ``init_states``, and ``render`` if the VLA says how its pictures were drawn.
    :param seed: Seed for the noise of a stochastic VLA.
    :param env_kwargs: Further arguments of the environment: assets, render, ...
    :return: For each task its instruction, ``successes``, ``states`` and ``mean_steps`` (control steps to success).
    :raises ValueError: If the VLA needs other pictures, another state or another action.
    """
    rates = {}
    for task_id in tqdm(task_ids, desc="success rates", unit="task", disable=not progress):
        settings: dict[str, Any] = {"suite": suite, "task_ids": [task_id], "init_states": split}
        settings |= {"chunk_length": vla.spec.horizon, **env_kwargs}
        if vla.spec.render is not None:
            settings["render"] = vla.spec.check_render(env_kwargs.get("render"))
        settings["image_size"] = vla.spec.check_frame_size(env_kwargs.get("image_size"))
        env = gymnasium.make_vec(env_id, num_envs, **settings)
        try:
            episodes = list(play_episodes(vla, env, [(task_id, state) for state in range(n_states)], split, seed))
        finally:
            env.close()
        solved = [episode.steps for episode in episodes if episode.success]
        rates[f"{suite}/{task_id}"] = {
            "instruction": episodes[0].instruction,
            "successes": len(solved),
            "states": n_states,
            "mean_steps": float(np.mean(solved)) if solved else None,
        }
    return rates
