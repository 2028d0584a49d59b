"""Short trainings in which someone takes over."""

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecMonitor

from rlt_gym.testing import FakeRLTokenVectorEnv
from rlt_sb3 import RLT, GymnasiumVecEnv

C = 4


# without a gate, whose noise-free episodes would repeat chunks, so that rows could not be told apart
SMALL = {
    "policy_kwargs": {"net_arch": [16], "offset_search": {"opening": 2}},
    "batch_size": 8,
    "device": "cpu",
    "seed": 0,
    "learning_starts": 8,
    "gate": False,
}


class Steps(BaseCallback):
    """Keeps what the model saw, asked for and was told, per vector step."""

    def _on_training_start(self):
        self.steps = []

    def _on_step(self):
        obs = {key: value.copy() for key, value in self.model._last_obs.items()}
        self.steps.append((obs, self.locals["actions"].copy(), self.locals["new_obs"], self.locals["infos"]))
        return True


def learn(chunks=60, num_envs=2, wrap=lambda env: env, rlt=None, **env_kwargs):
    env = wrap(FakeRLTokenVectorEnv(num_envs, chunk_length=C, **env_kwargs))
    venv = VecMonitor(GymnasiumVecEnv(env), info_keywords=("is_success",))
    model = RLT(
        "MultiInputPolicy", venv, **(SMALL | {"critic_warmup_updates": 4, "exploration_std": 0.3} | (rlt or {}))
    )
    callback = Steps()
    model.learn(chunks, callback=callback, log_interval=10**6)  # no row: the logger averages over all chunks
    return model, callback.steps


def someone(simulator, proposed, step):
    """Takes over for two control steps out of eight."""
    return np.full(7, 0.3) if step % 8 in (4, 5) else None
