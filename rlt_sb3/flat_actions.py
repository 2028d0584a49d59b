"""Chunks as plain vectors, for algorithms that know nothing of chunks."""

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn


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
        """:return: first observations"""
        return self.venv.reset()

    def step_async(self, actions: np.ndarray) -> None:
        """:param actions: (N, C * d)"""
        self.venv.step_async(np.reshape(actions, (self.num_envs, *self.chunk_shape)))

    def step_wait(self) -> VecEnvStepReturn:
        """:return: as of the environment"""
        return self.venv.step_wait()
