"""What a chunked vector environment plays: a task, and what a chunk did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Observation = dict[str, np.ndarray]


@dataclass(frozen=True)
class Task:
    """
    What the infos say about a task.

    :param task_id: Its number in the suite.
    :param instruction: What the robot is told to do.
    """

    task_id: int
    instruction: str


@dataclass
class Played:
    """
    What a chunk did in one environment.

    :param observation: The one after the last executed control step.
    :param step_rewards: float32 (k,), rewards of the executed control steps, 1 <= k <= C.
    :param success: Whether the task is solved, which ends chunk and episode.
    :param inner: Observations at those of the control steps s, 2s, ... < C that lie before step k, in order.
    :param reported: What the hooks reported about the chunk, see :meth:`rlt_gym.workers.hooks.WorkerHooks.end_chunk`.
    :param frames: If the environment is filmed, the frames after control steps 1 to k - 1.
    """

    observation: Observation
    step_rewards: np.ndarray
    success: bool
    inner: Sequence[Observation] = ()
    reported: dict[str, Any] = field(default_factory=dict)
    frames: Sequence[np.ndarray] = ()
