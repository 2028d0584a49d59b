"""The objects that the phases of a run share."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlt_gym.core.chunk_vector_env import ChunkVectorEnv
from rlt_sb3.evaluation.evaluate import PolicyFn, Predictor, as_policy, evaluate
from rlt_sb3.evaluation.results import Evaluation, StateResult
from rlt_sb3.experiment.config import TrainConfig
from rlt_sb3.experiment.frozen_vla import KEYS, NAME, known_vla
from rlt_sb3.experiment.interrupt import Interrupt
from rlt_sb3.experiment.progress import Progress
from rlt_sb3.experiment.run_dir import RunDir, machine

if TYPE_CHECKING:
    import gymnasium as gym

    from rlt_sb3.collectors.vec_env import CollectorVecEnv


class Run:
    """What the phases of a run share.

    :param config: its settings
    :param env: the vector environment of training
    :param eval_env: environment of the evaluations: the same, or one with separate simulators
    :param files: its folder
    :param progress: its progress bar
    :param interrupt: asked between chunks whether to stop
    :param data: results so far; written to evaluations.json
    :param collectors: who plays the training episodes, if not ``env`` does
    """

    def __init__(
        self,
        config: TrainConfig,
        env: gym.vector.VectorEnv,
        eval_env: gym.vector.VectorEnv,
        files: RunDir,
        progress: Progress,
        interrupt: Interrupt,
        data: dict[str, Any] | None = None,
        collectors: CollectorVecEnv | None = None,
    ):
        self.config = config
        self.env, self.eval_env, self.collectors = env, eval_env, collectors
        self.files = files
        self.progress = progress
        self.interrupt = interrupt
        self.started = time.monotonic()
        self.data = {"selection": []} if data is None else data
        self.data |= {
            "config": config.to_dict(),
            "machine": machine(),
            "fingerprint": env.metadata.get("fingerprint"),
        }
        if isinstance(env.unwrapped, ChunkVectorEnv):  # others need not know what their tasks are called
            self.data["tasks"] = {str(task.task_id): task.instruction for task in env.unwrapped.tasks}
        self.minutes_before = float(self.data.get("minutes", 0.0))

    def store(self, **entries: Any) -> None:
        """Add results to evaluations.json, so that an interrupted run keeps what it has."""
        minutes = self.minutes_before + (time.monotonic() - self.started) / 60
        self.data.update(entries, minutes=minutes)
        self.files.write_json("evaluations.json", self.data)

    def evaluate(
        self,
        policy: str | Predictor | PolicyFn,
        split: str,
        name: str,
        record_states: int | range = 0,
        n_states: int | None = None,
        counts: bool = True,
    ) -> Evaluation:
        """
        Evaluate a policy, keep the progress bar moving, and stop at once after Ctrl-C.

        :param policy: see :func:`~rlt_sb3.evaluation.evaluate.as_policy`
        :param split: "eval" or "selection"
        :param name: name of the policy, for tables
        :param record_states: which states are filmed, see :func:`~rlt_sb3.evaluation.evaluate.evaluate`
        :param n_states: number of initial states; by default the configuration's
        :param counts: whether the episodes count as progress of the present phase
        :return: the outcome
        """
        if n_states is None:
            n_states = self.config.evaluation.states(split)
        act = as_policy(policy)

        def checked(observations: dict[str, np.ndarray]) -> np.ndarray:
            self.interrupt.check()
            return act(observations)

        def on_episode(row: StateResult) -> None:
            self.progress.advance(1.0 if counts else 0.0)

        return evaluate(
            checked, self.eval_env, n_states, split=split, name=name, on_episode=on_episode, record_states=record_states
        )

    def vla(self, split: str, phase: str) -> Evaluation:
        """
        Play the frozen VLA on a split, or take its results from the run that is resumed or from ``evaluation.vla_of``.

        :param split: "eval" or "selection"
        :param phase: phase of the progress bar
        :return: the outcome
        """
        key = KEYS[split]
        if key in self.data:
            self.progress.skip(phase)
            return Evaluation.from_dict(self.data[key])
        settings, result = self.config.evaluation, None
        if settings.vla_of is not None:
            result = known_vla(Path(settings.vla_of), split, range(settings.states(split)))
        if result is None:
            self.progress.phase(phase)
            result = self.evaluate("vla", split, NAME, self.filmed if split == "eval" else 0)
        else:
            self.progress.skip(phase)
        self.store(**{key: result.to_dict()})
        self.progress.say(f"{phase + ':':<31} {result}")
        return result

    @property
    def filmed(self) -> int:
        """How many held-out states are filmed."""
        settings = self.config.evaluation
        return min(settings.record_states, settings.n_states) if settings.videos else 0
