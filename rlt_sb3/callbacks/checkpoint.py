"""Runs selection evaluations and checkpoints, and stops after Ctrl-C, between two rollouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlt_sb3.callbacks.base import StatefulCallback
from rlt_sb3.callbacks.selection import SelectionCallback


class RunCheckpointCallback(StatefulCallback):
    """
    Runs selection evaluations, checkpoints and stops after Ctrl-C, which may only happen between two rollouts.

    At the start of a rollout every transition has been stored and every update done. An evaluation uses the simulators
    of training (unless it has separate ones), and a checkpoint cannot hold the state of a simulator. New training
    episodes therefore begin after either of them, so that a run that continues and a run that is resumed from the
    checkpoint do the same. Unlike Stable-Baselines3's ``CheckpointCallback``, this one leaves the contents of a
    checkpoint to ``save``.

    :param selection: asked whether an evaluation is due
    :param restart: starts new training episodes and returns their first observations; its argument counts the restarts
    :param save: writes a checkpoint; ``save(resumable=False)`` one for evaluation only
    :param save_every: chunks between two checkpoints; None for those after selection evaluations only
    :param check_interrupt: raises ``KeyboardInterrupt`` when the run must stop
    """

    def __init__(
        self,
        selection: SelectionCallback,
        restart: Callable[[int], Any],
        save: Callable[..., Any],
        save_every: int | None = None,
        check_interrupt: Callable[[], None] = lambda: None,
    ):
        super().__init__()
        self.selection = selection
        self.restart = restart
        self.save = save
        self.save_every = save_every
        self.check_interrupt = check_interrupt
        self.restarts = 0
        self.saved = 0  # chunks at the last checkpoint

    def _on_rollout_start(self) -> None:
        try:
            self.check_interrupt()
            due = self.selection.due
            if due:
                self.selection.run()
            if self._save_due or (due and not self.selection.separate_eval_envs):
                self.begin_episodes()
                self.checkpoint()
            elif due:
                self.save(resumable=False)
        except KeyboardInterrupt:
            self.finish()
            raise

    @property
    def _save_due(self) -> bool:
        every = self.save_every
        return every is not None and self.model.num_timesteps // every > self.saved // every

    def begin_episodes(self) -> None:
        """Start new training episodes, which no return crosses."""
        self.restarts += 1
        self.restart_episodes()

    def restart_episodes(self) -> None:
        """Start the training episodes that belong to the present number of restarts, as a resumed run does."""
        model: Any = self.model
        model._last_obs = self.restart(self.restarts)
        model._last_episode_starts = np.ones(model.n_envs, dtype=bool)  # on-policy algorithms store it

    def state_dict(self) -> dict[str, Any]:
        """
        Return what a resumed run needs to know.

        :return: how often new episodes were begun, and the chunks at the last checkpoint
        """
        return {"restarts": self.restarts, "saved": self.saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Continue where the saved run stopped.

        :param state: from :meth:`state_dict`
        """
        self.restarts, self.saved = state["restarts"], state["saved"]

    def checkpoint(self) -> None:
        """Write a checkpoint."""
        self.saved = self.model.num_timesteps
        self.save()

    def finish(self) -> None:
        """Write the last checkpoint, if there was anything since the one before; the running episodes are given up."""
        if self.saved < self.model.num_timesteps:
            self.restarts += 1
            self.checkpoint()
