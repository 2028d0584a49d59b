"""Observations and actions as plain vectors, for libraries that know neither ``Dict`` spaces nor chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space

from rlt_gym.core.members import MemberAccess
from rlt_gym.core.pickling import PickledByArguments
from rlt_gym.core.split_step import SplitStepWrapper


def part_of(space: spaces.Dict, key: str) -> slice:
    """
    Say where an entry of a ``Dict`` observation is in the flat one.

    :param space: The ``Dict`` space, ``env.metadata["flat"]["observation_space"]``.
    :param key: Of the entry.
    :return: Its place in the last axis.
    :raises KeyError: There is no such entry.
    """
    if key not in space.spaces:
        raise KeyError(f"the observation has no {key!r}, only {list(space.spaces)}")
    keys = list(space.spaces)
    start = sum(spaces.flatdim(space[other]) for other in keys[: keys.index(key)])
    return slice(start, start + spaces.flatdim(space[key]))


class FlatVectorEnv(PickledByArguments, MemberAccess, SplitStepWrapper):
    """
    Shows each observation as one float32 vector and takes each chunk as one vector (C * d,).

    The vector has the entries of the ``Dict`` in the order of ``gymnasium.spaces.flatten``: by name. ``final_obs`` has
    such vectors, ``inner_obs`` is an array (num_envs, n, F). All else, also what infos say about the control steps of a
    chunk (``executed_actions``), is the environment's.

    ``metadata["flat"]`` has the ``Dict`` space (``"observation_space"``, for ``gymnasium.spaces.unflatten`` and
    :func:`part_of`) and the shape (C, d) of a chunk (``"action_shape"``).

    ``unwrapped`` is this environment, since libraries look for spaces there. Other attributes are read and set in the
    environment below.

    :param env: Vector environment with a ``Dict`` of float32 boxes as observation and a box as action.
    :raises ValueError: One with other spaces.
    """

    def __init__(self, env: VectorEnv):
        single, action = env.single_observation_space, env.single_action_space
        boxes = single.spaces.values() if isinstance(single, spaces.Dict) else [single]
        if not isinstance(single, spaces.Dict) or any(
            not isinstance(box, spaces.Box) or box.dtype != np.float32 for box in boxes
        ):
            raise ValueError(f"FlatVectorEnv needs a Dict of float32 boxes as observation, got {single}")
        if not isinstance(action, spaces.Box):
            raise ValueError(f"FlatVectorEnv needs a box as action, got {action}")
        super().__init__(env)
        self._keys = list(single.spaces)
        self.metadata = {**env.metadata, "flat": {"observation_space": single, "action_shape": action.shape}}
        self.single_observation_space = spaces.flatten_space(single)
        self.single_action_space = spaces.flatten_space(action)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    @property
    def unwrapped(self) -> FlatVectorEnv:
        """This environment: the ones below have other spaces."""
        return self

    @property
    def spec(self) -> Any:
        """What ``gymnasium.make_vec`` was told."""
        return self.env.unwrapped.spec

    @spec.setter
    def spec(self, value: Any) -> None:
        self.env.unwrapped.spec = value

    def __getattr__(self, name: str) -> Any:
        below = vars(self).get("env")
        for level in () if below is None or name.startswith("_") else (below, below.unwrapped):
            if hasattr(level, name):
                return getattr(level, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}, nor has the environment below.")

    def __setattr__(self, name: str, value: Any) -> None:
        below = vars(self).get("env")
        if below is not None and not name.startswith("_") and not hasattr(type(self), name):
            for level in (below, below.unwrapped):
                if hasattr(level, name):
                    setattr(level, name, value)
                    return
        super().__setattr__(name, value)

    @property
    def per_member(self) -> tuple[str, ...]:  # type: ignore[override]
        """Methods that say something about one member, see :class:`~rlt_gym.core.members.MemberAccess`."""
        return getattr(self.env.unwrapped, "per_member", ())

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """
        Reset the environment.

        :param seed: As the environment takes it.
        :param options: As the environment takes them.
        :return: Vectors (num_envs, F), infos.
        """
        obs, infos = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
        return self._flat(obs, 1), infos

    def step_async(self, actions: Any) -> None:
        """
        Begin a step.

        :param actions: Vectors (num_envs, C * d).
        :raises ValueError: Another shape; nothing has been executed then.
        """
        array = np.asarray(actions)
        if array.shape != self.action_space.shape:
            raise ValueError(f"actions must have shape {self.action_space.shape} (num_envs, C * d), got {array.shape}")
        super().step_async(array.reshape(self.num_envs, *self.metadata["flat"]["action_shape"]))

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """
        Wait for the end of the step.

        :return: Vectors (num_envs, F), rewards, terminations, truncations, infos.
        """
        obs, rewards, terminations, truncations, infos = super().step_wait()
        if "final_obs" in infos:
            final = np.full(self.num_envs, None, dtype=object)
            for i in np.flatnonzero(infos["_final_obs"]):
                final[i] = self._flat(infos["final_obs"][i], 0)
            infos = {**infos, "final_obs": final}
        if "inner_obs" in infos:
            infos = {**infos, "inner_obs": self._flat(infos["inner_obs"], 2)}
        return self._flat(obs, 1), rewards, terminations, truncations, infos

    def _flat(self, obs: dict[str, np.ndarray], lead: int) -> np.ndarray:
        """Vectors of observations that have ``lead`` axes before those of the space."""
        parts = [np.reshape(obs[key], (*np.shape(obs[key])[:lead], -1)) for key in self._keys]
        return np.concatenate(parts, axis=-1, dtype=np.float32)
