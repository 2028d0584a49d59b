"""Actions that are the noise of the VLA's flow, for algorithms that steer a VLA without touching its weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space

from rlt_gym.core.members import MemberAccess
from rlt_gym.core.split_step import SplitStepWrapper


class NoiseAction(MemberAccess, SplitStepWrapper):
    """
    Plays the chunk that the VLA's flow makes of the action: the action is the noise with which the flow begins.

    The action is a box (m, n) from -``bound`` to ``bound``; the VLA's own noise is standard normal. ``vla_ref`` remains
    the chunk of the VLA's own noise. The infos get ``executed_actions``, the chunk that was played (N, C, d), where the
    environment does not report it.

    :param env: Environment of a VLA that takes noise (``RLToken-LIBERO-v0`` with a SmolVLA, for example).
    :param bound: Largest number of the noise, > 0.
    :param parts: m, the number of equal parts of the flow's steps that have noise of their own: 1 repeats n numbers
        over all steps, as many parts as steps give the whole noise.
    :raises ValueError: An environment or a VLA without noise, or an argument that does not fit.
    """

    def __init__(self, env: VectorEnv, bound: float = 1.5, parts: int = 1):
        self.check_arguments(bound, parts)
        vla = getattr(env, "vla", None)
        if vla is None or not hasattr(env, "chunks_of_noise"):
            raise ValueError(
                f"NoiseAction needs an environment of this process with a VLA, as RLToken-LIBERO-v0; got {env}."
            )
        steps, size = vla.spec.check_noise()
        if steps % parts:
            raise ValueError(f"parts must be a divisor of the VLA's {steps} steps of noise, got {parts}.")
        super().__init__(env)
        self.autoreset_mode = env.metadata["autoreset_mode"]
        self.single_action_space = spaces.Box(-float(bound), float(bound), (parts, size), np.float32)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    @staticmethod
    def check_arguments(bound: float = 1.5, parts: int = 1) -> None:
        """
        Refuse arguments that no environment takes.

        :param bound: As of the constructor.
        :param parts: As of the constructor.
        :raises ValueError: If one does not fit.
        """
        if not 0.0 < bound < np.inf:
            raise ValueError(f"bound must be a number > 0, got {bound!r}.")
        if not isinstance(parts, int) or isinstance(parts, bool) or parts < 1:
            raise ValueError(f"parts must be an integer >= 1, got {parts!r}.")

    def chunks(self, actions: Any) -> np.ndarray:
        """
        Make the chunks of actions, for the observations that were returned last, without playing them.

        :param actions: (N, m, n); beyond the bound they are clipped.
        :return: (N, C, d).
        :raises ValueError: If they have another shape or values that are not finite.
        """
        asked = np.asarray(actions, dtype=np.float32)
        if asked.shape != self.action_space.shape:
            raise ValueError(f"actions must have the shape {self.action_space.shape}, got {asked.shape}.")
        space: Any = self.action_space
        return self.env.chunks_of_noise(np.clip(asked, space.low, space.high))  # type: ignore[attr-defined]

    def step_async(self, actions: Any) -> None:
        """
        Begin to play the chunks of actions.

        :param actions: As for :meth:`chunks`; where the chunks cannot be made, nothing is executed.
        """
        super().step_async(self.chunks(actions).reshape(self.env.action_space.shape or ()))

    def step_wait(self) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """
        Wait until the chunks have been played.

        :return: Observations, rewards, terminations, truncations, infos.
        """
        obs, rewards, terminations, truncations, infos = super().step_wait()
        # where an episode ended and the next one has begun, the chunk is described by final_info
        ended = np.asarray(infos.get("_final_info", np.zeros(self.num_envs, dtype=bool)))
        infos = {**self._executed(infos, ~ended), **infos}
        if "final_info" in infos:
            infos["final_info"] = {**self._executed(infos["final_info"], ended), **infos["final_info"]}
        return obs, rewards, terminations, truncations, infos

    def _executed(self, infos: dict[str, Any], present: np.ndarray) -> dict[str, np.ndarray]:
        """
        Tell what was played.

        :param infos: Of a step.
        :param present: Which environments they describe, bool (N,).
        """
        asked = self.env.asked  # type: ignore[attr-defined]
        return {"executed_actions": asked, "_executed_actions": np.logical_and(present, infos["chunk_steps"] > 0)}
