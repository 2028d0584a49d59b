"""LIBERO's sequence of episodes without a simulator: nothing moves, episodes last until the horizon."""

import numpy as np
from gymnasium import spaces

from rlt_gym.core.chunk_vector_env import Task
from rlt_gym.core.in_process import InProcessVectorEnv
from rlt_gym.libero.robot import PANDA

SPACE = spaces.Dict(proprio=spaces.Box(-np.inf, np.inf, (8,), np.float32))


class Still(InProcessVectorEnv):
    """Observations are the numbers of initial state and control step."""

    def __init__(self, num_envs=1, **settings):
        tasks = [Task(number, f"hold {number}") for number in (1, 8, 5)]
        super().__init__(num_envs, tasks, SPACE, PANDA, **{"chunk_length": 4, "max_episode_steps": 10, **settings})

    def _begin(self, env):
        pass

    def _control_step(self, env, action):
        return 0.0, False

    def _observe(self, env):
        return {"proprio": np.array([self.episodes[env].init_index, self._steps[env], *[0] * 6], dtype=np.float32)}

    def _frame(self, env):
        return np.full((4, 4, 3), env, dtype=np.uint8)
