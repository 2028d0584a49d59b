"""A deployment gate for each of several tasks: each deploys the actor that is best on its own task."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from stable_baselines3.common.vec_env import VecEnv

from rlt_sb3.common.chunk_outcome import ChunkOutcome, envs_of
from rlt_sb3.common.gated_policy import ActorOfTask, GatedPolicy, play_practicing, play_seats, same_actors, tasks_of
from rlt_sb3.common.policy_gate import AnyEvaluation, PolicyGate
from rlt_sb3.common.trials import Sample


class TaskGate:
    """
    One :class:`~rlt_sb3.common.policy_gate.PolicyGate` per task, for observations that say which task is played.

    The practicing actor is one network for all tasks, but it does not get better on all of them at the same time. So
    each task has a baseline, an actor on trial and a deployed actor of its own; until one has passed, the VLA's chunks
    play. Each gate tests as if there were no other task. The gates also decide how often each task is
    practiced (:attr:`weights`).

    The policy's ``actor_on_trial`` and ``actor_deployed`` are :class:`~rlt_sb3.common.gated_policy.TaskActors`.

    :param n_tasks: number of tasks
    :param settings: arguments of each gate
    :raises ValueError: as of :class:`~rlt_sb3.common.policy_gate.PolicyGate`
    """

    def __init__(self, n_tasks: int, **settings: Any):
        self.gates = [PolicyGate(**settings) for _ in range(n_tasks)]
        self._warned = False
        #: the weights that the environments follow; None: they play their tasks as they like
        self.weights_told: list[int] | None = None
        self.restart(1)

    def state_dict(self) -> dict[str, Any]:
        """Return plain data (for JSON), see :meth:`PolicyGate.state_dict`."""
        return {"tasks": [gate.state_dict() for gate in self.gates]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Continue where another gate stopped; new episodes begin.

        :param state: of :meth:`state_dict`
        """
        for gate, its in zip(self.gates, state["tasks"], strict=True):
            gate.load_state_dict(its)
        self._share_seats()

    # ---------------------------------------------------------------- which actor plays

    def begin(self) -> None:
        """Begin a new run, see :meth:`PolicyGate.begin`."""
        for gate in self.gates:
            gate.begin()
        self._warned = False

    def know_vla(self, played: Sample) -> None:
        """
        Count episodes of the VLA that were played before training as its baselines, see :meth:`PolicyGate.know_vla`.

        :param played: its episodes
        """
        for task, gate in enumerate(self.gates):
            gate.know_vla(of_task(played, task))

    def restart(self, n_envs: int) -> None:
        """
        Begin new episodes in all environments; the running ones do not count.

        :param n_envs: number of environments from now on
        """
        for gate in self.gates:
            gate.restart(n_envs)
        self.weights_told = None  # the environments may be others now
        self._share_seats()

    def _share_seats(self) -> None:
        """Let all gates use the first one's arrays: an environment plays one task at a time."""
        first = self.gates[0]
        for gate in self.gates[1:]:
            gate.player, gate._seats, gate._fresh, gate._begun = first.player, first._seats, first._fresh, first._begun

    @property
    def weights(self) -> list[int]:
        """
        Tell how many training episodes of a round each task should have.

        A task that is always solved, or never, teaches nothing. So the weight grows with the variance p (1 - p) of the
        outcome: it is 1 at p = 0 and p = 1, and ``task_weight`` at p = 1/2. p is the
        :attr:`~rlt_sb3.common.policy_gate.PolicyGate.success_rate` of what is deployed. Rutherford et al. ("No
        Regrets", 2024) sample environments by the same variance.
        """
        rates = [gate.success_rate for gate in self.gates]
        most = self.gates[0].task_weight
        return [round(1 + (most - 1) * 4.0 * rate * (1.0 - rate)) for rate in rates]

    def weigh_tasks(self, env: VecEnv | None) -> None:
        """
        Let environments practice the tasks by their :attr:`weights` from the next episodes on, if they can.

        :param env: environments; those of this package have ``tasks`` and ``set_task_weights``. None: there are none
        """
        weights = self.weights
        if env is None or weights == self.weights_told:
            return
        try:
            tasks, set_weights = (env.get_attr(name)[0] for name in ("tasks", "set_task_weights"))
        except AttributeError:
            return
        set_weights([weights[task.task_id] for task in tasks])
        self.weights_told = weights

    @property
    def gives_way(self) -> bool:
        """Whether practice needs more of the episodes, see :class:`PolicyGate`."""
        return self.gates[0].gives_way

    @gives_way.setter
    def gives_way(self, value: bool) -> None:
        """
        Leave practice more of the episodes, or not.

        :param value: whether to
        """
        self.gates[0].gives_way = value

    @property
    def player(self) -> np.ndarray:
        """Whose sample each running episode belongs to, see :class:`PolicyGate`."""
        return self.gates[0].player

    @property
    def noise_free(self) -> np.ndarray:
        """Which environments play without noise in this vector step, (n_envs,)."""
        return self.gates[0].noise_free

    @property
    def none_deployed(self) -> bool:
        """Whether no actor has passed in any task."""
        return all(gate.none_deployed for gate in self.gates)

    def plays_vla(self, policy: GatedPolicy) -> bool:
        """
        Tell whether ``predict`` plays the VLA's chunks in all tasks.

        :param policy: the policy
        :return: whether it does
        """
        return self.none_deployed and policy.starts_at_vla

    def play_vla(self, observation: Mapping[str, np.ndarray]) -> None:
        """
        Play the VLA's own chunks without noise in all environments.

        :param observation: of all environments
        """
        self._take_seats(np.ones(len(self.noise_free), dtype=bool), tasks_of(observation), "vla")
        self.gates[0].noise_free = np.ones(len(self.noise_free), dtype=bool)

    def choose(
        self, policy: GatedPolicy, observation: Any, chunks: np.ndarray, reference: np.ndarray, ready: bool
    ) -> np.ndarray:
        """
        Choose who plays in each environment, see :meth:`PolicyGate.choose`.

        :param policy: the policy
        :param observation: as its actors take it, of all environments
        :param chunks: of the training actor (n_envs, ...)
        :param reference: the VLA's own chunks, like ``chunks``
        :param ready: whether the training actor moves
        :return: chunks to play (n_envs, ...)
        """
        first = self.gates[0]
        for gate, view in self._views(policy):
            gate.try_next(view, ready)
        if first._fresh.any():
            drawn = np.random.random(len(first.player)) < first.share_now
            self._take_seats(drawn, tasks_of(observation), "vla", "actor")
        first.noise_free, chunks = play_seats(policy, first.player, observation, chunks, reference)
        return chunks

    @property
    def trial_numbers(self) -> tuple[int, ...]:
        """Number of the actor on trial in each task, counted from 1; 0: none is."""
        return tuple(number for gate in self.gates for number in gate.trial_numbers)

    def plan(self, policy: GatedPolicy, n: int, warm_up: bool, ready: bool) -> list[tuple[str, ...]]:
        """
        Plan who plays episodes that may begin in other processes, see :meth:`PolicyGate.plan`.

        :param policy: the policy
        :param n: number of environments
        :param warm_up: whether all of them play the VLA's chunks
        :param ready: whether the training actor moves
        :return: for each of them who plays an episode of each task
        """
        for gate, view in self._views(policy):
            gate.try_next(view, ready)
        drawn = np.random.random(n) < (1.0 if warm_up else self.gates[0].share_now)
        return [tuple(gate.next_player() if one else "" for gate in self.gates) for one in drawn]

    def seat(
        self, envs: Sequence[int], tasks: np.ndarray, began: np.ndarray, players: np.ndarray, trials: Sequence[int]
    ) -> None:
        """
        Count the episodes that have begun in other processes, see :meth:`PolicyGate.seat`.

        :param envs: of n environments
        :param tasks: their tasks (n,)
        :param began: (n,) whether an episode has begun
        :param players: who plays it by :meth:`plan` (n,)
        :param trials: :attr:`trial_numbers` at that time
        """
        for task, (gate, trial) in enumerate(zip(self.gates, trials, strict=True)):
            gate.seat(envs, tasks, began & (tasks == task), players, (trial,))

    def _views(self, policy: GatedPolicy) -> list[tuple[PolicyGate, ActorOfTask]]:
        return [(gate, ActorOfTask(policy, task)) for task, gate in enumerate(self.gates)]

    def _take_seats(self, drawn: np.ndarray, tasks: np.ndarray, *players: str) -> None:
        for task, gate in enumerate(self.gates):
            gate.take_seats(drawn & (tasks == task), *players)
        self.gates[0]._fresh[:] = False

    def step(self, policy: GatedPolicy, outcomes: Sequence[ChunkOutcome], dones: np.ndarray) -> None:
        """
        Count one vector step, see :meth:`PolicyGate.step`.

        :param policy: the policy
        :param outcomes: of the n chunks just played
        :param dones: (n,)
        """
        named = [replace(outcome, env=env) for env, outcome in zip(envs_of(outcomes), outcomes, strict=True)]
        for task, (gate, view) in enumerate(self._views(policy)):
            mine = [row for row, outcome in enumerate(named) if outcome.task_id == task]
            gate.step(view, [named[row] for row in mine], np.asarray(dones)[mine])

    # ---------------------------------------------------------------- what others ask for

    @property
    def deployed_name(self) -> str:
        """Name of what is deployed: the number of each task's best actor, 0 for the VLA."""
        return "-".join(str(gate.best.number if gate.best else 0) for gate in self.gates)

    @property
    def names(self) -> list[str]:
        """Names of what can be deployed without a further trial, as far as its evaluation would be used again."""
        return [self.deployed_name]

    def metrics(self) -> dict[str, float]:
        """Return what is logged: sums over the tasks, and the success rate of the latest trials of all of them."""
        every = [gate.metrics() for gate in self.gates]
        summed = {name: sum(its.get(name, 0) for its in every) for name in ("candidates", "approvals")}
        rates = [its["trial_success_rate"] for its in every if "trial_success_rate" in its]
        deployed = sum(not gate.none_deployed for gate in self.gates)
        rate = {"trial_success_rate": float(np.mean(rates))} if rates else {}
        weights = {f"task_weight_{task}": weight for task, weight in enumerate(self.weights_told or ())}
        return summed | rate | {"tasks_deployed": deployed} | weights

    def abandon_trial(self) -> None:
        """End the trials of all tasks without a decision."""
        for gate in self.gates:
            gate.abandon_trial()

    def use_states(self, vla: Sample) -> None:
        """
        Tell the gates how the VLA does on the selection states.

        :param vla: the VLA's episodes, in the order of the states
        """
        for task, gate in enumerate(self.gates):
            gate.use_states(of_task(vla, task))

    def add_states(self, policy: GatedPolicy, states: Sample) -> None:
        """
        Count the episodes of what is deployed on the selection states as evidence; other actors can be the best now.

        :param policy: the policy
        :param states: its episodes, in the order of :meth:`use_states`
        """
        for task, (gate, view) in enumerate(self._views(policy)):
            if gate.best is not None:
                gate.add_states(view, of_task(states, task))

    def adopt_unknown(self, policy: GatedPolicy) -> None:
        """
        Take notice of what is deployed in the tasks in which nothing is known of it.

        :param policy: the policy
        """
        for gate, view in self._views(policy):
            if not gate.none_deployed:
                gate.adopt_unknown(view)

    def adopt(self, policy: GatedPolicy) -> None:
        """
        Take notice of actors that were deployed from outside.

        :param policy: the policy
        """
        for gate, view in self._views(policy):
            if not gate.none_deployed:
                gate.adopt(view)

    def audition(
        self, policy: GatedPolicy, evaluate: Callable[[], AnyEvaluation], sample: Callable[[AnyEvaluation], Sample]
    ) -> tuple[AnyEvaluation, list[str]]:
        """
        Evaluate the training actor on the states of :meth:`use_states`; it passes in tasks in which it beats the VLA.

        :param policy: the policy
        :param evaluate: plays what is deployed
        :param sample: of the evaluation: its episodes, in the order of the states
        :return: evaluation of the training actor; :attr:`deployed_name`, if this actor is deployed in all tasks now
        """
        result = play_practicing(policy, evaluate)
        states = sample(result)
        passed = [
            gate.judge_states(view, of_task(states, task)) for task, (gate, view) in enumerate(self._views(policy))
        ]
        everywhere = any(passed) and same_actors(policy)
        return result, [self.deployed_name] if everywhere else []

    def warn_of_open_baseline(self) -> None:
        """Warn, once, if training has ended before an actor could be put on trial in some of the tasks."""
        late = [gate for gate in self.gates if gate.baseline.trials and gate.waits_for_baseline]
        if late and not self._warned:
            self._warned = True
            warnings.warn(
                f"No actor has been on trial in the tasks {', '.join(str(self.gates.index(gate)) for gate in late)}: "
                f"{late[0].baseline.size} noise-free episodes of the VLA are needed in each (4 * gate.window). Train "
                "for longer, raise learning_starts or gate.share, or lower gate.window.",
                stacklevel=3,
            )


def of_task(sample: Sample, task: int) -> Sample:
    """
    Take the episodes of one task.

    :param sample: of several tasks, complete
    :param task: the task
    :return: its episodes, in their order
    """
    trials = [trial for trial in sample.trials if trial.task == task]
    return Sample(len(trials), trials)
