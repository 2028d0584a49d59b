"""Rollouts of a policy over a frozen VLA as data: pictures of every control step, outcome, who chose each action."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from rlt_gym.core.recording import RecordedEpisode, RecordEpisodes
from rlt_gym.rl_token.env import RLTokenVectorEnv

#: What plays: batched observations of ``RLToken-LIBERO-v0`` -> chunks (N, C, 7).
Policy = Callable[[dict[str, np.ndarray]], np.ndarray]


def play_vla(obs: dict[str, np.ndarray]) -> np.ndarray:
    """
    Play the frozen VLA's own chunks, as a policy.

    :param obs: Observations of ``RLToken-LIBERO-v0``.
    :return: ``vla_ref``, float32 (N, C, 7).
    """
    return obs["vla_ref"].copy()


class RolloutRecorder:
    """
    Plays a policy in an environment, and records the episodes between the simulators and the VLA.

    :param env: ``RLToken-LIBERO-v0`` (or one like it), made with ``obs_stride=1`` unless its chunks have one control
        step. Close it when all is done.
    :param policy: What plays.
    :raises ValueError: If the environment does not observe at each control step.
    """

    def __init__(self, env: RLTokenVectorEnv, policy: Policy = play_vla) -> None:
        self._recorder = RecordEpisodes(env.env)
        self._policy = policy
        #: The environment that is played.
        self.env = RLTokenVectorEnv(self._recorder, env.vla, env.encoder, env.device)

    @property
    def made(self) -> dict[str, Any]:
        """What the environment says about how its episodes are made, of types that JSON can hold."""
        raw: Any = self.env.unwrapped
        return {
            "assets": raw.assets.kind,
            "render": self.env.metadata.get("render"),
            "image_size": raw.single_observation_space["agentview"].shape[0],
            "chunk_length": self.env.chunk_length,
            "max_episode_steps": raw.max_episode_steps,
            "vla_name": self.env.vla.spec.name,
            "fingerprint": dict(self.env.metadata["fingerprint"]),
        }

    def play(self, episodes: Sequence[tuple[int, int]], seed: int = 0) -> Iterator[RecordedEpisode]:
        """
        Play listed training states, each once; whichever simulator is free takes the next one.

        :param episodes: (task_id, initial state) of each, no two alike.
        :param seed: Seed for the noise of a stochastic VLA.
        :return: The episodes as they end.
        """
        left = set(episodes)
        obs, _ = self.env.reset(seed=seed, options={"init_states": "train", "episodes": list(episodes)})
        while left:
            obs, *_ = self.env.step(self._policy(obs))
            for episode in self._recorder.take():
                left.discard((episode.task_id, episode.init_index))
                yield episode
