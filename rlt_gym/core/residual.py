"""Actions that are corrections of the VLA's chunk, for algorithms that know nothing of a VLA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.utils import RecordConstructorArgs
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space

from rlt_gym.core.flat import part_of
from rlt_gym.core.members import MemberAccess
from rlt_gym.core.split_step import SplitStepWrapper


class ResidualAction:
    """
    Plays ``vla_ref + scale * action``, clipped to the range of the environment's actions; action 0 is the VLA's chunk.

    The action is a box from -1 to 1 with the shape of the environment's action. Observations, rewards and infos stay as
    they are. Takes single and vector environments, with ``Dict`` observations and with flat ones (``flat=True``); the
    object is a ``gymnasium.Wrapper`` or a ``gymnasium.vector.VectorWrapper``.

    :param env: Environment whose observation has ``vla_ref``, with the shape of the action.
    :param scale: The largest correction, > 0: a number, or one for each of the d numbers of a control step.
    :raises ValueError: An environment without ``vla_ref``, or a scale that does not fit.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """
        Choose the wrapper for the kind of environment.

        :param args: Of the constructor.
        :param kwargs: Likewise.
        :return: The wrapper, not initialized yet.
        """
        if cls is not ResidualAction:
            return super().__new__(cls)
        env = kwargs["env"] if "env" in kwargs else args[0]
        return super().__new__(_ResidualVectorAction if isinstance(env, VectorEnv) else _ResidualSingleAction)

    def _read(self, env: Any, observation: spaces.Space, action: spaces.Space, scale: float | Sequence[float]) -> None:
        """Check spaces (of one environment) and scale."""
        flat = env.metadata.get("flat")
        space = flat["observation_space"] if flat else observation
        chunk = flat["action_shape"] if flat else action.shape or ()
        if not isinstance(space, spaces.Dict) or "vla_ref" not in space.spaces or space["vla_ref"].shape != chunk:
            raise ValueError(
                f"ResidualAction needs an observation with vla_ref {chunk}, as RLToken-LIBERO-v0; got {space}"
            )
        size = np.asarray(scale, dtype=np.float32)
        if size.shape not in ((), chunk[-1:]) or not (np.isfinite(size).all() and (size > 0).all()):
            raise ValueError(f"scale must be a number > 0, or {chunk[-1]} of them, got {scale!r}")
        assert isinstance(action, spaces.Box)
        self.scale = np.broadcast_to(size, chunk).reshape(action.shape)
        self._part = part_of(space, "vla_ref") if flat else None
        self._low, self._high = action.low, action.high

    def _remember(self, obs: Any) -> None:
        self._reference = np.array(obs["vla_ref"] if self._part is None else obs[..., self._part])

    def _chunk(self, action: Any) -> np.ndarray:
        asked = np.asarray(action, dtype=np.float32)
        if asked.shape != self._reference.shape:
            raise ValueError(f"the action must have shape {self._reference.shape}, got {asked.shape}")
        return np.clip(self._reference + self.scale * np.clip(asked, -1.0, 1.0), self._low, self._high)


class _ResidualVectorAction(ResidualAction, MemberAccess, SplitStepWrapper):
    def __init__(self, env: VectorEnv, scale: float | Sequence[float] = 0.25):
        self._read(env, env.single_observation_space, env.single_action_space, scale)
        super().__init__(env)
        self.autoreset_mode = env.metadata["autoreset_mode"]
        self.single_action_space = spaces.Box(-1.0, 1.0, env.single_action_space.shape, np.float32)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, infos = self.env.reset(seed=seed, options=options)
        self._remember(obs)
        return obs, infos

    def step_async(self, actions: Any) -> None:
        super().step_async(self._chunk(actions))

    def step_wait(self) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        obs, *outcome = super().step_wait()
        self._remember(obs)
        return obs, *outcome


class _ResidualSingleAction(ResidualAction, gym.Wrapper, RecordConstructorArgs):
    def __init__(self, env: gym.Env, scale: float | Sequence[float] = 0.25):
        RecordConstructorArgs.__init__(self, scale=scale)
        gym.Wrapper.__init__(self, env)
        self._read(env, env.observation_space, env.action_space, scale)
        self.action_space = spaces.Box(-1.0, 1.0, env.action_space.shape, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, options=options)
        self._remember(obs)
        return obs, info

    def step(self, action: Any) -> Any:
        obs, *outcome = self.env.step(self._chunk(action))
        self._remember(obs)
        return obs, *outcome
