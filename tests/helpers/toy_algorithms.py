"""Two algorithms of somebody else, one with a replay buffer and one without, registered by a line each."""

from stable_baselines3 import A2C, TD3
from stable_baselines3.common.buffers import DictReplayBuffer

from rlt_sb3.experiment.algorithms import Algorithm


class WarmTD3(TD3):
    """TD3 that plays the VLA's chunk until it has learned something."""

    def predict(self, observation, state=None, episode_start=None, deterministic=False):
        """As TD3, but before the first update the reference chunk, as a vector."""
        if self._n_updates == 0:
            return observation["vla_ref"].reshape(len(observation["vla_ref"]), -1).copy(), None
        return super().predict(observation, state, episode_start, deterministic)


TD3_SETTINGS = {"learning_starts": 10, "batch_size": 8, "policy_kwargs": {"net_arch": [8]}, "buffer_size": 200}
WARM_TD3 = Algorithm(
    "Warm TD3",
    "toy_algorithms:WarmTD3",
    lambda n_envs, length: {"device": "cpu", "replay_buffer_class": DictReplayBuffer},
    starts_at_vla=True,
    color="tab:pink",
)
ON_POLICY = Algorithm("A2C", f"{A2C.__module__}:A2C")
