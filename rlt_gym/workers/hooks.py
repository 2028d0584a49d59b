"""
What a user may run inside a worker: someone who takes over (interventions) and a predicate (critical phase).

Both are named by ``"module:name"``, which :mod:`rlt_gym.core.hooks` checks in the main process before a worker starts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from rlt_gym.workers.named import load_named


def load_hook(hook: dict[str, Any] | Callable[..., Any]) -> tuple[Any, Callable[..., Any]]:
    """
    Import what a hook names, inside a worker.

    :param hook: Of :func:`rlt_gym.core.hooks.check_hook`, or a function where nothing has to be sent to a process.
    :return: An instance and its ``act`` for a class; ``None`` and the function with its keyword arguments bound.
    """
    if callable(hook):
        return None, hook
    found = load_named(hook)
    if inspect.isclass(found):
        instance: Any = found(**hook["kwargs"])
        return instance, instance.act
    return None, lambda *arguments: found(*arguments, **hook["kwargs"])


class WorkerHooks:
    """
    Asks the hooks of one worker and keeps their answers.

    :param action_size: Numbers in the action of a control step.
    :param intervention: Of :func:`rlt_gym.core.hooks.check_hook`, a function, or ``None``.
    :param critical_phase: Likewise.
    """

    def __init__(
        self,
        action_size: int,
        intervention: dict[str, Any] | Callable[..., Any] | None = None,
        critical_phase: dict[str, Any] | Callable[..., Any] | None = None,
    ):
        self._action_size = action_size
        self._intervenor: Any = None
        self._act: Callable[..., Any] | None = None
        self._predicate: Callable[..., Any] | None = None
        if intervention is not None:
            self._intervenor, self._act = load_hook(intervention)
        if critical_phase is not None:
            _, self._predicate = load_hook(critical_phase)
        self._simulator: Any = None
        self._takes_part = False
        self._steps = 0
        self._critical = False
        self._executed: list[np.ndarray] = []
        self._taken: list[bool] = []

    def begin_episode(self, simulator: Any, seed: int, takeover: bool = True) -> dict[str, Any]:
        """
        Prepare the hooks for an episode.

        :param simulator: The simulator, just reset; hooks get it as their first argument.
        :param seed: Of the episode; the intervenor's randomness comes from it.
        :param takeover: Whether anybody may take over in this episode.
        :return: What the info of the first observation says about hooks.
        """
        self._simulator, self._steps, self._critical = simulator, 0, False
        self._takes_part = takeover and self._act is not None
        if self._takes_part and hasattr(self._intervenor, "reset"):
            self._intervenor.reset(simulator, np.random.default_rng([seed, 1]))
        return self._phase()

    def end_episode(self) -> None:
        """Let go of the simulator, which may be dropped now."""
        self._simulator = None

    def begin_chunk(self) -> Callable[[np.ndarray], np.ndarray] | None:
        """
        Forget the actions of the chunk before.

        :return: What decides about each control step of this chunk; ``None`` if nobody can take over.
        """
        self._executed, self._taken = [], []
        return self._choose if self._takes_part else None

    def _choose(self, proposed: np.ndarray) -> np.ndarray:
        assert self._act is not None
        action = self._act(self._simulator, np.array(proposed), self._steps)
        taken = action is not None
        executed = np.asarray(action if taken else proposed, dtype=np.float32)
        if executed.shape != (self._action_size,) or not np.isfinite(executed).all():
            raise ValueError(
                f"an intervention must return None or {self._action_size} finite numbers in [-1, 1], got {action!r}"
            )
        executed = np.clip(executed, -1.0, 1.0)
        self._steps += 1
        self._executed.append(executed)
        self._taken.append(taken)
        return executed.astype(np.float64)

    def end_chunk(self) -> dict[str, Any]:
        """
        Collect what the hooks did in a chunk.

        :return: What the info says about the chunk just played: ``executed_actions`` (k, 7) and ``intervention`` (k,)
            of the executed steps; ``critical_chunk``, ``critical_phase``.
        """
        result: dict[str, Any] = {}
        if self._takes_part:
            result["executed_actions"] = np.array(self._executed, dtype=np.float32).reshape(-1, self._action_size)
            result["intervention"] = np.array(self._taken, dtype=bool)
        if self._predicate is not None:
            result["critical_chunk"] = self._critical
        return {**result, **self._phase()}

    def _phase(self) -> dict[str, Any]:
        """Once critical, an episode stays so."""
        if self._predicate is None:
            return {}
        self._critical = self._critical or bool(self._predicate(self._simulator))
        return {"critical_phase": self._critical}
