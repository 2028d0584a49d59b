"""The process that holds a part of a vector environment: a Ray actor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

#: What :class:`~rlt_gym.cluster.vector_env.RayVectorEnv` takes over from its workers' environments, where they have it.
COPIED = (
    "single_observation_space", "single_action_space", "metadata", "render_mode", "autoreset_mode", "chunk_length",
    "obs_stride", "max_episode_steps", "train_episode_steps", "tasks", "init_state_counts", "group_size", "robot",
)  # fmt: skip


class RemoteEnv:
    """
    A vector environment with its frozen VLA in a process of its own, maybe on another machine.

    Making it does nothing yet: an error of :meth:`start` arrives as the exception that it is.

    :param make: Makes the environment.
    """

    def __init__(self, make: Callable[[], VectorEnv]):
        self._make = make
        self._env: Any = None

    def start(self) -> dict[str, Any]:
        """
        Make the environment.

        :return: Those of :data:`COPIED` that it has.
        """
        self._env = self._make()
        levels = (self._env, self._env.unwrapped)
        return {name: next(getattr(at, name) for at in levels if hasattr(at, name)) for name in COPIED
                if any(hasattr(at, name) for at in levels)}  # fmt: skip

    def reset(self, seed: int, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """
        Begin new episodes.

        :param seed: As the environment takes it.
        :param options: Likewise.
        :return: Observations and infos.
        """
        return self._env.reset(seed=seed, options=options)

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        """
        Play one chunk in every environment.

        :param actions: Chunks (k, C, d).
        :return: Observations, rewards, terminations, truncations, infos.
        """
        return self._env.step(np.array(actions))  # Ray's own arrays cannot be written to

    def set_task_weights(self, weights: Sequence[int]) -> None:
        """
        Let some tasks have more training episodes than others.

        :param weights: As the environment takes them.
        """
        self._env.unwrapped.set_task_weights(weights)

    def film(self, envs: Sequence[int]) -> None:
        """
        Draw environments also inside the next chunks.

        :param envs: Indices of the environments.
        """
        self._env.unwrapped.film(envs)

    def render(self) -> Any:
        """
        Draw every environment.

        :return: One frame for each.
        """
        return self._env.render()

    def close(self) -> None:
        """End the simulators."""
        if self._env is not None:
            self._env.close()
