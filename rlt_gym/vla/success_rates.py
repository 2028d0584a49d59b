"""Success rates of a frozen VLA on tasks of a benchmark, for the provenance of its weights."""

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import VectorEnv
from tqdm import tqdm

from rlt_gym.vla.base import FrozenVLA, forward_seed


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
    :param env_id: Vector environment with pictures that takes ``suite``, ``task_ids``, ``chunk_length`` and
        ``image_size`` and ``init_states``.
    :param seed: Seed for the noise of a stochastic VLA.
    :param env_kwargs: Further arguments of the environment: assets, render, ...
    :return: For each task its instruction, ``successes``, ``states`` and ``mean_steps`` (control steps to success).
    :raises ValueError: If the VLA needs frames of another size.
    """
    rates = {}
    for task_id in tqdm(task_ids, desc="success rates", unit="task", disable=not progress):
        settings: dict[str, Any] = {"suite": suite, "task_ids": [task_id], "init_states": split}
        settings |= {"chunk_length": vla.spec.horizon, "render": "fast", **env_kwargs}
        settings["image_size"] = vla.spec.check_frame_size(env_kwargs.get("image_size"))
        env = gymnasium.make_vec(env_id, num_envs, **settings)
        try:
            instruction, steps = _play(vla, env, n_states, seed)
        finally:
            env.close()
        solved = [count for count in steps.values() if count is not None]
        rates[f"{suite}/{task_id}"] = {
            "instruction": instruction,
            "successes": len(solved),
            "states": n_states,
            "mean_steps": float(np.mean(solved)) if solved else None,
        }
    return rates


def _play(vla: FrozenVLA, env: VectorEnv, n_states: int, seed: int) -> tuple[str, dict[int, int | None]]:
    """Play a task; return its instruction and each state's control steps to success, ``None`` for a failure."""
    steps: dict[int, int | None] = {}
    obs, infos = env.reset(seed=seed)
    instruction = str(infos["instruction"][0])
    while len(steps) < n_states:
        inputs = {camera: obs[camera] for camera in vla.spec.cameras} | {"state": obs["proprio"]}
        keys = zip(infos["noise_seed"].tolist(), infos["episode_steps"].tolist(), strict=True)
        seeds = [forward_seed(noise_seed, step) for noise_seed, step in keys]
        chunk = vla.forward(inputs, list(infos["instruction"]), seed=seeds).chunk
        obs, _, terminations, truncations, infos = env.step(chunk.cpu().numpy())
        for index in np.flatnonzero(terminations | truncations):
            state = int(infos["final_info"]["init_index"][index])
            if state < n_states:
                steps[state] = int(infos["final_info"]["episode_steps"][index]) if terminations[index] else None
    return instruction, steps
