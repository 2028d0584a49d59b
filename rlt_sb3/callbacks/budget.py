"""Ends training when a budget of chunks, control steps or minutes is used up."""

from __future__ import annotations

import time
from collections.abc import Callable

from stable_baselines3.common.callbacks import BaseCallback

from rlt_sb3.common.chunk_outcome import outcomes_of


class BudgetCallback(BaseCallback):
    """Counts control steps and ends training when a budget is used up.

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
        #: minutes of earlier parts of a resumed run
        self.minutes_before = 0.0
        self._start = time.monotonic()

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
        self._start = time.monotonic()

    def _on_step(self) -> bool:
        outcomes = outcomes_of(self.locals["infos"], self.locals["actions"], self.locals["rewards"])
        self.control_steps += sum(outcome.steps for outcome in outcomes)
        self.logger.record("time/control_steps", self.control_steps)
        self.logger.record("time/minutes", self.minutes)
        if self.on_progress is not None:
            self.on_progress(self.used)
        # Stable-Baselines3 itself stops at total_chunks, after the updates for the last ones. Stopping here would leave
        # them out, and a run of 200 chunks would differ from one of 100 that is resumed.
        return self.used < 1.0 or self.num_timesteps >= self.total_chunks
