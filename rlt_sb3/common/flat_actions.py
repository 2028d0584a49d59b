"""Wraps action chunks as plain vectors, for algorithms that know nothing of chunks."""

from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from rlt_sb3.common.chunk_outcome import outcomes_of


class FlatActions(VecEnvWrapper):
    """
    Actions (C, d) become vectors (C * d,); observations, rewards and infos stay as they are.

    :param venv: environment with Box actions
    :raises ValueError: for other actions
    """

    def __init__(self, venv: VecEnv):
        space = venv.action_space
        if not isinstance(space, spaces.Box):
            raise ValueError(f"FlatActions needs Box actions, got {space}.")
        super().__init__(venv, action_space=spaces.Box(space.low.ravel(), space.high.ravel(), dtype=np.float32))
        self.chunk_shape = space.shape

    def reset(self) -> VecEnvObs:
        """Reset the environment and return the first observations."""
        return self.venv.reset()

    def step_async(self, actions: np.ndarray) -> None:
        """Pass vectors (N, C * d) on as chunks."""
        self.venv.step_async(np.reshape(actions, (self.num_envs, *self.chunk_shape)))

    def step_wait(self) -> VecEnvStepReturn:
        """Return the results of the environment's step."""
        return self.venv.step_wait()


class WholeChunkReplayBuffer(DictReplayBuffer):
    """
    Stable-Baselines3's buffer without the chunks that a worker did not finish (``broken`` in their outcome).

    Each transition is added by itself, since those of one vector step cannot be left out there one by one.

    :param buffer_size: number of transitions, over all sub-environments
    :param observation_space: flat Dict space
    :param action_space: Box of vectors
    :param device: where samples go
    :param n_envs: not used
    :param kwargs: further arguments of ``DictReplayBuffer``
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Dict,
        action_space: spaces.Box,
        device: th.device | str = "auto",
        n_envs: int = 1,
        **kwargs: Any,
    ):
        super().__init__(buffer_size, observation_space, action_space, device, n_envs=1, **kwargs)
        self.rows_stored = 0  # ever

    def add(  # type: ignore[override]
        self,
        obs: dict[str, np.ndarray],
        next_obs: dict[str, np.ndarray],
        action: np.ndarray,
        reward: np.ndarray,
        done: np.ndarray,
        infos: list[dict[str, Any]],
    ) -> None:
        """
        Store one vector step.

        :param obs: observations before it
        :param next_obs: observations after it (the final ones where the episode ended)
        :param action: vectors (N, C * d)
        :param reward: (N,)
        :param done: terminated or truncated, (N,)
        :param infos: one of each sub-environment
        """
        for index, (info, outcome) in enumerate(zip(infos, outcomes_of(infos, action, reward), strict=True)):
            if outcome.broken:
                continue
            one = slice(index, index + 1)
            before, after = ({key: value[one] for key, value in batch.items()} for batch in (obs, next_obs))
            super().add(before, after, action[one], reward[one], done[one], [info])
            self.rows_stored += 1
