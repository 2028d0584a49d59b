"""Callbacks of a run: count control steps, stop at the budget, choose the best model on the selection states."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback

from rlt_sb3.evaluation import Evaluation


@dataclass(frozen=True)
class SelectionPoint:
    """One selection evaluation during training.

    :param chunks: transitions so far
    :param control_steps: control steps of training so far
    :param minutes: minutes of training so far
    :param evaluation: the outcome
    """

    chunks: int
    control_steps: int
    minutes: float
    evaluation: Evaluation


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
        self._start = time.monotonic()

    @property
    def minutes(self) -> float:
        """Minutes since training began."""
        return (time.monotonic() - self._start) / 60

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
        # An env that says nothing of partial chunks counts one control step per chunk.
        self.control_steps += int(sum(info.get("chunk_steps", 1) for info in self.locals["infos"]))
        self.logger.record("time/control_steps", self.control_steps)
        self.logger.record("time/minutes", self.minutes)
        if self.on_progress is not None:
            self.on_progress(self.used)
        return self.used < 1.0


class SelectionCallback(BaseCallback):
    """Evaluates the deterministic policy on the selection states every so many chunks and keeps the best model.

    The same workers serve training and evaluation. So it acts at the start of a rollout, when every transition has been
    stored, and afterwards starts new training episodes: no transition crosses an evaluation.

    :param evaluate: ``model -> Evaluation`` on the selection states
    :param restart: puts the env back on its training states and returns the first observations
    :param every: chunks between two evaluations
    :param baseline: the frozen VLA on the same states
    :param budget: the run's :class:`BudgetCallback`
    :param best_path: where the best model is saved
    :param on_point: called after each evaluation
    """

    def __init__(
        self,
        evaluate: Callable[[Any], Evaluation],
        restart: Callable[[], Any],
        every: int,
        baseline: Evaluation,
        budget: BudgetCallback,
        best_path: str,
        on_point: Callable[[SelectionPoint], None] | None = None,
    ):
        super().__init__()
        self.evaluate = evaluate
        self.restart = restart
        self.every = every
        self.baseline = baseline
        self.budget = budget
        self.best_path = best_path
        self.on_point = on_point
        self.points: list[SelectionPoint] = []
        self.best: Evaluation | None = None

    def _on_rollout_start(self) -> None:
        # Counted in crossings of multiples, since num_timesteps moves by num_envs at a time.
        if self.num_timesteps // self.every > len(self.points):
            self.run()
            self.model._last_obs = self.restart()

    def _on_step(self) -> bool:
        return True

    def run(self) -> SelectionPoint:
        """Evaluate now and keep the model if it is the best so far."""
        result = self.evaluate(self.model)
        point = SelectionPoint(self.num_timesteps, self.budget.control_steps, self.budget.minutes, result)
        self.points.append(point)
        if self.best is None or _order(result) >= _order(self.best):
            self.best = result
            self.model.save(self.best_path)
        self.logger.record("selection/success_rate", result.rate)
        self.logger.record("selection/vla_success_rate", self.baseline.rate)
        self.logger.record("selection/below_vla", float(self.below_vla(result)))
        self.logger.dump(self.num_timesteps)
        if self.on_point is not None:
            self.on_point(point)
        return point

    def below_vla(self, result: Evaluation) -> bool:
        """Whether the success rate fell below the frozen VLA's interval on the same states."""
        return result.rate < self.baseline.interval[0]


def _order(evaluation: Evaluation) -> tuple[int, float]:
    """More successes are better; among equals, fewer control steps to success."""
    steps = evaluation.steps_to_success
    return evaluation.successes, -np.inf if np.isnan(steps) else -steps
