"""A plain ``gymnasium.Env`` view of a vector environment with one member."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv

from rlt_gym.core.pickling import PickledByArguments


def _first(info: dict[str, Any]) -> dict[str, Any]:
    """Env 0 of a vector info: drop the ``_key`` masks, take index 0 of the rest, as plain Python values."""
    result: dict[str, Any] = {}
    for key, value in info.items():
        if key.startswith("_"):
            continue
        first = _first(value) if isinstance(value, dict) else value[0]
        # SyncVectorEnv makes arrays of bool, int and float of plain values only, and of others arrays of objects
        result[key] = first.item() if isinstance(first, np.generic) else first
    return result


class SingleEnv(PickledByArguments, gym.Env):
    """
    :param env: A vector environment with ``num_envs == 1`` and autoreset disabled.
    """

    #: What Gymnasium reads before there is an environment; the environment's own metadata say more.
    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, env: VectorEnv):
        if env.num_envs != 1 or env.metadata["autoreset_mode"] != AutoresetMode.DISABLED:
            raise ValueError("SingleEnv needs a vector environment with one member and autoreset disabled")
        self.vector_env = env
        self.observation_space = env.single_observation_space
        self.action_space = env.single_action_space
        self.metadata = {**env.metadata}
        self.metadata.pop("autoreset_mode")
        self.render_mode = env.render_mode
        self._np_random, self._np_random_seed = seeding.np_random(env.np_random_seed)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        """Start the next episode; with ``seed`` the first of that seed's sequence."""
        super().reset(seed=seed)
        observation, info = self.vector_env.reset(seed=seed, options=options)
        return {key: value[0] for key, value in observation.items()}, _first(info)

    def step(self, action: np.ndarray):
        """Play one chunk (C, 7)."""
        observation, reward, terminated, truncated, info = self.vector_env.step(np.asarray(action)[None])
        single = {key: value[0] for key, value in observation.items()}
        return single, float(reward[0]), bool(terminated[0]), bool(truncated[0]), _first(info)

    def render(self):
        """
        :return: An upright uint8 frame, or ``None`` without a render mode.
        """
        frames = self.vector_env.render()
        return None if frames is None else frames[0]

    def close(self) -> None:
        """End the worker."""
        self.vector_env.close()
