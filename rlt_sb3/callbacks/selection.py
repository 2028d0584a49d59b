"""Evaluates the policy on the selection states during training, and keeps the best model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.logger import Logger

from rlt_sb3.callbacks.base import StatefulCallback
from rlt_sb3.callbacks.budget import BudgetCallback
from rlt_sb3.callbacks.metrics import throughput
from rlt_sb3.common.files import replacing
from rlt_sb3.common.gated_policy import same_actors
from rlt_sb3.common.policy_gate import PolicyGate
from rlt_sb3.common.robot_time import control_frequency
from rlt_sb3.common.task_gate import TaskGate
from rlt_sb3.common.trials import Sample
from rlt_sb3.evaluation.compare import compare
from rlt_sb3.evaluation.results import Evaluation


@dataclass(frozen=True)
class SelectionPoint:
    """One selection evaluation during training.

    :param chunks: transitions so far
    :param control_steps: control steps of training so far
    :param minutes: minutes of training so far
    :param evaluation: the outcome of what ``predict`` plays: the deployed actor. Until one is deployed, these are the
        VLA's own chunks: the entry is then a copy of the VLA's evaluation, which is not played again
    :param candidate: the outcome of the practicing actor, the one that learns. None: the model has no gate, so
        ``predict`` plays the practicing actor, and ``evaluation`` is its outcome
    """

    chunks: int
    control_steps: int
    minutes: float
    evaluation: Evaluation
    candidate: Evaluation | None = None

    def to_dict(self) -> dict[str, Any]:
        """
        Convert the point for JSON.

        :return: plain data for JSON
        """
        candidate = None if self.candidate is None else self.candidate.to_dict()
        return {**vars(self), "evaluation": self.evaluation.to_dict(), "candidate": candidate}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SelectionPoint:
        """
        Read a point from JSON.

        :param data: from :meth:`to_dict`
        """
        played = {key: data.get(key) for key in ("evaluation", "candidate")}
        return cls(**(data | {key: entry and Evaluation.from_dict(entry) for key, entry in played.items()}))


class SelectionCallback(StatefulCallback):
    """
    Evaluates the deterministic policy on the selection states and keeps the best model.

    It does nothing by itself, because evaluations may use the simulators of training:
    :class:`~rlt_sb3.callbacks.checkpoint.RunCheckpointCallback` calls :meth:`run` between two rollouts when
    :attr:`due`. Its state holds the evaluations; the best model itself is the file ``best_path``.

    A model with a deployment gate (RLT's ``gate``) has a deployed and a practicing actor. Both are evaluated if they
    differ: the practicing actor's result shows the effect of training before the gate deploys it. It is deployed if it
    passes the gate's test (:meth:`~rlt_sb3.common.policy_gate.PolicyGate.audition`) and is the best actor by the
    evidence so far. A deployed actor plays the states once; if it then is not the best any more, the one before it
    comes back. While the model still plays the VLA's own chunks, the VLA's evaluation is copied, not played again.

    :param evaluate: ``model -> Evaluation`` on the selection states
    :param every: chunks between two evaluations
    :param baseline: the frozen VLA on the same states
    :param budget: counts control steps and minutes of training
    :param best_path: file of the best model
    :param on_point: called after each evaluation, with the films of its episodes
    :param guard: "warn" leaves a policy below the VLA unchanged (``on_point`` reports it), "restore" loads the best
        networks
    :param separate_eval_envs: evaluations use separate simulators, so training episodes and running log averages are
        unaffected (but an actor that is deployed here ends the running trial of the gate)
    """

    def __init__(
        self,
        evaluate: Callable[[Any], Evaluation],
        every: int,
        baseline: Evaluation,
        budget: BudgetCallback,
        best_path: Path,
        on_point: Callable[[SelectionPoint], None] | None = None,
        guard: str = "warn",
        separate_eval_envs: bool = False,
    ):
        super().__init__()
        self.evaluate = evaluate
        self.every = every
        self.baseline = baseline
        self.budget = budget
        self.best_path = best_path
        self.on_point = on_point
        self.guard = guard
        self.separate_eval_envs = separate_eval_envs
        self.points: list[SelectionPoint] = []
        self.best: Evaluation | None = None
        self.best_chunks = 0
        self.played: dict[str, Evaluation] = {}  # of what the gate can deploy, by its name

    @property
    def last(self) -> int:
        """Chunks at the last evaluation."""
        return self.points[-1].chunks if self.points else 0

    @property
    def due(self) -> bool:
        """Whether a multiple of ``every`` has been passed since the last evaluation."""
        # crossings, not equality: num_timesteps moves by num_envs at a time
        return self.model.num_timesteps // self.every > self.last // self.every

    def keep(self, result: Evaluation) -> None:
        """
        Save the present model as the best one.

        :param result: its evaluation
        """
        self.best, self.best_chunks = result, self.model.num_timesteps
        with replacing(self.best_path) as temporary, temporary.open("wb") as file:
            self.model.save(file)

    def run(self) -> SelectionPoint:
        """
        Evaluate now, deploy the practicing actor if it passes, and keep the model if it is the best so far.

        :return: the evaluations
        """
        with set_aside(self.logger) if self.separate_eval_envs else nullcontext():
            result, candidate = self._play()
            budget = self.budget
            point = SelectionPoint(self.model.num_timesteps, budget.control_steps, budget.minutes, result, candidate)
            self.points.append(without_frames(point))  # films of all points would fill the memory
            if self.best is None or _order(result) >= _order(self.best):
                self.keep(replace(result, frames={}))
            self._log(result)
        if self.guard == "restore" and self.below_vla(result):
            self.restore()
        if self.on_point is not None:
            self.on_point(point)
        return point

    def _log(self, result: Evaluation) -> None:
        below = self.below_vla(result)
        paired = compare(self.baseline, result)
        self.logger.record("selection/success_rate", result.rate)
        self.logger.record("selection/vla_success_rate", self.baseline.rate)
        tasks = result.per_task()
        for task, part in tasks.items() if len(tasks) > 1 else ():
            self.logger.record(f"selection/success_rate_task_{task}", part.rate)
        self.logger.record("selection/below_vla", float(below))
        self.logger.record("selection/fixed", paired.fixed)
        self.logger.record("selection/broken", paired.broken)
        frequency = control_frequency(self.model.get_env())
        if frequency is not None:
            self.logger.record("selection/throughput", throughput(result.successes, result.control_steps, frequency))
        if result.successes:
            self.logger.record("selection/steps_to_success", result.steps_to_success)
        if self.guard == "restore":
            self.logger.record("selection/restored", float(below))
        self.logger.dump(self.model.num_timesteps)

    def _play(self) -> tuple[Evaluation, Evaluation | None]:
        """Return the outcome of what ``predict`` plays, and that of the practicing actor (None without a gate)."""
        gate = getattr(self.model, "gate", None)
        policy: Any = self.model.policy
        if gate is None:
            return self.evaluate(self.model), None
        untouched = gate.plays_vla(policy)
        gate.use_states(Sample.of_states(self.baseline.rows))
        deployed = self.baseline if untouched else self._deployed(gate)
        if not untouched and same_actors(policy):
            return deployed, deployed
        before = gate.deployed_name
        practicing, names = gate.audition(policy, lambda: self.evaluate(self.model), self._sample)
        self.played |= {name: replace(practicing, frames={}) for name in names}
        self.logger.record("selection/candidate_success_rate", practicing.rate)
        if untouched:
            deployed = replace(deployed, policy=practicing.policy, frames={})
        if gate.deployed_name in names:
            return practicing, practicing
        return (deployed if gate.deployed_name == before else self._deployed(gate)), practicing

    def _deployed(self, gate: PolicyGate | TaskGate) -> Evaluation:
        """Return the outcome of the best actor so far, which is played if it is not known yet."""
        self.played = {name: result for name, result in self.played.items() if name in gate.names}
        policy: Any = self.model.policy
        gate.adopt_unknown(policy)
        while True:  # once the best is known, another one can be the best
            name = gate.deployed_name
            if name in self.played:
                return self.played[name]
            result = self.evaluate(self.model)
            gate.add_states(policy, self._sample(result))
            self.played[name] = replace(result, frames={})
            if gate.deployed_name == name:
                return result  # with its films

    def _sample(self, result: Evaluation) -> Sample:
        compare(self.baseline, result)  # raises an error for other states
        return Sample.of_states(result.rows)

    def restore(self) -> None:
        """
        Load the best model's networks and optimizers; replay buffer and counters stay as they are.

        If the best is the untrained model, which plays the VLA's chunks, only what plays is loaded: the critics have
        learned since, and an actor that followed untrained ones would only fall again.
        """
        from stable_baselines3.common.save_util import load_from_zip_file

        _, parameters, _ = load_from_zip_file(self.best_path, device=self.model.device)
        assert parameters is not None
        chosen: dict[str, Any] = dict(parameters)
        if self.best_chunks == 0:
            chosen = {name: entry for name, entry in chosen.items() if not name.startswith("critic")}
            policy = chosen["policy"]
            actors = {key: value for key, value in policy.items() if key.startswith("actor")}
            # on-policy policies, PPO's and GRPO's, have no actor apart: there it is all but the value function
            chosen["policy"] = actors or {key: value for key, value in policy.items() if "value_net" not in key}
        self.model.set_parameters(chosen, exact_match=False, device=self.model.device)
        gate = getattr(self.model, "gate", None)
        if gate is not None:
            gate.abandon_trial()  # the actor on trial was put back as well
            gate.adopt(self.model.policy)

    def below_vla(self, result: Evaluation) -> bool:
        """
        Compare an evaluation with the frozen VLA's on the same states.

        :param result: an evaluation
        :return: whether its success rate is below the VLA's interval
        """
        return result.rate < self.baseline.interval[0]

    def state_dict(self) -> dict[str, Any]:
        """
        Return what a resumed run needs to know.

        :return: all evaluations so far, the best one, when it was, and those of the gate's contenders
        """
        return {
            "played": {name: result.to_dict() for name, result in self.played.items()},
            "points": [point.to_dict() for point in self.points],
            "best": None if self.best is None else self.best.to_dict(),
            "best_chunks": self.best_chunks,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Continue where the saved run stopped.

        :param state: from :meth:`state_dict`
        """
        self.points = [SelectionPoint.from_dict(point) for point in state["points"]]
        self.best = None if state["best"] is None else Evaluation.from_dict(state["best"])
        self.best_chunks = state["best_chunks"]
        self.played = {name: Evaluation.from_dict(result) for name, result in state["played"].items()}


def without_frames(point: SelectionPoint) -> SelectionPoint:
    """
    Drop the films of a selection point.

    :param point: its evaluations may hold films
    :return: the same without them
    """
    candidate = point.candidate and replace(point.candidate, frames={})
    return replace(point, evaluation=replace(point.evaluation, frames={}), candidate=candidate)


@contextmanager
def set_aside(logger: Logger) -> Iterator[None]:
    """
    Log a separate row; values that are being averaged are restored afterwards.

    :param logger: of Stable-Baselines3
    """
    pending = {name: getattr(logger, name).copy() for name in ("name_to_value", "name_to_count", "name_to_excluded")}
    for name in pending:
        getattr(logger, name).clear()
    try:
        yield
    finally:
        for name, values in pending.items():
            setattr(logger, name, values)


def _order(evaluation: Evaluation) -> tuple[int, float]:
    """Rank evaluations: more successes are better; among equals, fewer control steps to success."""
    steps = evaluation.steps_to_success
    return evaluation.successes, -np.inf if np.isnan(steps) else -steps
