"""A plain ``gymnasium.Env`` view of a vector environment with one member."""

from __future__ import annotations

import sys
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


def _member(observation: Any) -> Any:
    """Of a vector observation, a dict of arrays or an array, that of env 0."""
    return {key: value[0] for key, value in observation.items()} if isinstance(observation, dict) else observation[0]


def arguments_of_one(kwargs: dict[str, Any]) -> dict[str, Any]:
    """
    Make the arguments of the vector environment below a :class:`SingleEnv`.

    Call this first in an entry point of ``gymnasium.make``.

    ``max_episode_steps`` of ``gymnasium.make`` is added to them, so that it counts control steps there as well.
    Gymnasium keeps that argument from entry points and wraps the environment in a ``TimeLimit``, which counts actions,
    that is chunks. The environment ends the episode first, so that wrapper then never does.

    :param kwargs: Of the entry point.
    :return: The same, with the limit.
    :raises ValueError: An argument that only vector environments have.
    """
    for name in ("num_envs", "autoreset_mode"):
        if name in kwargs:
            raise ValueError(
                f"gymnasium.make takes no {name} (got {kwargs[name]!r}): it makes one environment, which its user "
                "resets. Use gymnasium.make_vec for several, or for automatic resets."
            )
    # Gymnasium offers no other way: neither the entry point nor the spec that it leaves in the environment is told.
    caller = sys._getframe(2)
    if (caller.f_globals.get("__name__"), caller.f_code.co_name) != ("gymnasium.envs.registration", "make"):
        return dict(kwargs)
    limit = caller.f_locals.get("max_episode_steps")
    if limit is None:  # the one it was registered with, or that of the spec which is made again
        limit = getattr(caller.f_locals.get("env_spec"), "max_episode_steps", None)
    return dict(kwargs) if limit in (None, -1) else {"max_episode_steps": limit, **kwargs}


class SingleEnv(PickledByArguments, gym.Env):
    """
    The single member of a vector environment.

    :param env: A vector environment with ``num_envs == 1`` and autoreset disabled.
    :raises ValueError: Another one.
    """

    #: What Gymnasium reads before there is an environment; the environment's own metadata say more.
    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, env: VectorEnv):
        if env.num_envs != 1 or env.metadata["autoreset_mode"] != AutoresetMode.DISABLED:
            raise ValueError(f"SingleEnv needs a vector environment with one member and autoreset disabled, got {env}")
        self.vector_env = env
        self.observation_space = env.single_observation_space
        self.action_space = env.single_action_space
        self.metadata = {**env.metadata}
        self.metadata.pop("autoreset_mode")
        self.render_mode = env.render_mode
        self._np_random, self._np_random_seed = seeding.np_random(env.np_random_seed)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        """
        Start the next episode.

        :param seed: The episode is then the first of this seed's sequence; ``None``: the next one.
        :param options: ``init_states`` switches the split and begins its sequence, see
            :meth:`rlt_gym.core.chunk_vector_env.ChunkVectorEnv.reset`.
        :return: Observation and info.
        :raises ValueError: A bad seed or option.
        """
        super().reset(seed=seed)
        if seed is None and not options:
            options = {"reset_mask": np.ones(1, dtype=bool)}  # a reset of all would begin a held-out sequence anew
        observation, info = self.vector_env.reset(seed=seed, options=options)
        return _member(observation), _first(info)

    def step(self, action: np.ndarray):
        """
        Play one chunk.

        :param action: float (C, d), flat (C * d,); clipped to [-1, 1].
        :return: Observation, reward, whether the task is solved, whether the horizon is reached, info.
        :raises ValueError: Wrong shape or non-finite values.
        :raises RuntimeError: The environment must be reset first.
        """
        observation, reward, terminated, truncated, info = self.vector_env.step(np.asarray(action)[None])
        return _member(observation), float(reward[0]), bool(terminated[0]), bool(truncated[0]), _first(info)

    def render(self):
        """
        Draw the environment.

        :return: An upright uint8 frame, or ``None`` without a render mode.
        """
        frames = self.vector_env.render()
        return None if frames is None else frames[0]

    def close(self) -> None:
        """End the worker."""
        self.vector_env.close()
