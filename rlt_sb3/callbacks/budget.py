"""Ends training when a budget of chunks, control steps or minutes is used up."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from rlt_sb3.callbacks.base import StatefulCallback
from rlt_sb3.common.chunk_outcome import outcomes_of
from rlt_sb3.common.robot_time import control_frequency, robot_minutes


class BudgetCallback(StatefulCallback):
    """
    Counts control steps and episodes, and ends training when a budget is used up.

    :param total_chunks: budget in transitions
    :param total_control_steps: budget in control steps
    :param max_minutes: budget in minutes of wall time
    :param on_progress: called with the used fraction of the budget that runs out first
    """

    def __init__(
        self,
        total_chunks: int,
        total_control_steps: int | None = None,
        max_minutes: float | None = None,
        on_progress: Callable[[float], None] | None = None,
    ):
        super().__init__()
        self.total_chunks = total_chunks
        self.total_control_steps = total_control_steps
        self.max_minutes = max_minutes
        self.on_progress = on_progress
        self.control_steps = 0
        self.episodes = 0
        #: minutes of earlier parts of a resumed run, and of earlier calls of learn()
        self.minutes_before = 0.0
        self._start = time.monotonic()
        self._latest: float | None = None  # time of the last step, until training ends
        self._frequency: float | None = None  # control steps per second

    @property
    def minutes(self) -> float:
        """Minutes of training so far."""
        return self.minutes_before + (time.monotonic() - self._start) / 60

    @property
    def used(self) -> float:
        """Used fraction of the budget that runs out first."""
        parts = [self.num_timesteps / self.total_chunks]
        if self.total_control_steps is not None:
            parts.append(self.control_steps / self.total_control_steps)
        if self.max_minutes is not None:
            parts.append(self.minutes / self.max_minutes)
        return min(1.0, max(parts))

    def _on_training_start(self) -> None:
        if self._latest is not None:  # Ctrl-C ended an earlier learn(), so _on_training_end() was not called
            self.minutes_before += (self._latest - self._start) / 60
        self._start, self._latest = time.monotonic(), None
        self._frequency = control_frequency(self.training_env)

    def _on_training_end(self) -> None:
        self.minutes_before, self._start = self.minutes, time.monotonic()  # another learn() may follow
        self._latest = None

    def _on_step(self) -> bool:
        outcomes = outcomes_of(self.locals["infos"], self.locals["actions"], self.locals["rewards"])
        self.control_steps += sum(outcome.steps for outcome in outcomes)
        self._latest = time.monotonic()
        self.logger.record("time/control_steps", self.control_steps)
        self.logger.record("time/minutes", self.minutes)
        robot = robot_minutes(self.control_steps, self._frequency)
        if robot is not None:
            self.logger.record("time/robot_minutes", robot)
        if self.on_progress is not None:
            self.on_progress(self.used)
        # Stable-Baselines3 itself stops at total_chunks, after the updates for the last chunks. To stop here would omit
        # these updates, and a run of 200 chunks would differ from a run of 100 that is resumed.
        go_on = self.used < 1.0 or self.num_timesteps >= self.total_chunks
        if go_on:  # as Stable-Baselines3 counts: not those that end with the step that ends training
            self.episodes += int(np.sum(self.locals["dones"]))
        return go_on

    def state_dict(self) -> dict[str, Any]:
        """
        Return what a resumed run needs to know.

        :return: control steps, episodes and minutes of training so far
        """
        # before the first step no minutes have been used: they begin with training
        minutes = self.minutes if self.control_steps else 0.0
        return {"control_steps": self.control_steps, "episodes": self.episodes, "minutes": minutes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Continue counting where the saved run stopped.

        :param state: from :meth:`state_dict`
        """
        self.control_steps, self.episodes = state["control_steps"], state["episodes"]
        self.minutes_before = state["minutes"]
