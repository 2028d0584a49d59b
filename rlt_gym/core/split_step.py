"""Vector steps in two parts, ``step_async`` and ``step_wait``, as Gymnasium's ``AsyncVectorEnv`` has them."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import VectorEnv, VectorWrapper


def splits_step(env: VectorEnv) -> bool:
    """
    Tell whether the step of an environment has two parts.

    A class (or object) whose ``step`` alone is overridden does something there that the two parts would leave out.

    :param env: Vector environment.
    :return: Whether its ``step`` is ``step_async`` and then ``step_wait``.
    """
    for level in (env, *type(env).__mro__):
        if "step_async" in vars(level):
            return hasattr(level, "step_wait")
        if "step" in vars(level):
            return False
    return False


def real_chunks(actions: Any, shape: tuple[int, ...]) -> np.ndarray:
    """
    Check what a step was given.

    :param actions: Chunks of all environments.
    :param shape: (num_envs, chunk_length, d).
    :return: The chunks as an array.
    :raises ValueError: Another shape, NaN, infinite numbers, or no real numbers.
    """
    array = np.asarray(actions)
    if array.shape != shape:
        raise ValueError(f"actions must have shape {shape} (num_envs, chunk_length, {shape[-1]}), got {array.shape}")
    if array.dtype.kind not in "iuf":
        raise ValueError(f"actions must be finite real numbers, got {array.dtype}; nothing was executed")
    bad = np.flatnonzero(~np.isfinite(array).all((1, 2)))
    if len(bad):
        raise ValueError(
            f"actions must be finite real numbers, got NaN or inf for environments {bad.tolist()}; nothing was executed"
        )
    return array


class StepGuard:
    """Refuses what may not be asked of a vector environment now: it was closed, or a step has begun."""

    closed: bool
    _begun: Any = None

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError(f"this {type(self).__name__} was closed: make a new one")

    def _check_no_step(self, name: str) -> None:
        if self._begun is not None:
            raise AlreadyPendingCallError(f"{name}() during a step: call step_wait() first, or reset() all", name)


class SplitStepWrapper(VectorWrapper):
    """
    A wrapper whose step has two parts; a subclass adds what it does to :meth:`step_async` and :meth:`step_wait`.

    If the step of the environment has no two parts, all of it is done in the second one.

    :param env: Vector environment.
    """

    _actions: Any = None

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """
        Play one step in every environment.

        :param actions: As for :meth:`step_async`, which also says what is raised.
        :return: As of :meth:`step_wait`.
        """
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """
        Begin a step.

        :param actions: As the environment takes them.
        """
        if splits_step(self.env):
            self.env.step_async(actions)  # type: ignore[attr-defined]
        else:
            self._actions = actions

    def step_wait(self) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """
        Wait for the end of the step.

        :return: Observations, rewards, terminations, truncations, infos.
        :raises gymnasium.error.NoAsyncCallError: No step has begun.
        """
        if splits_step(self.env):
            return self.env.step_wait()  # type: ignore[attr-defined]
        actions, self._actions = self._actions, None
        if actions is None:
            raise NoAsyncCallError("call step_async() before step_wait()", "step_wait")
        return self.env.step(actions)
