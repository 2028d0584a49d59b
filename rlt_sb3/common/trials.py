"""Samples of episodes, counted in the order of their start, and tests that compare two samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Protocol

import numpy as np

from rlt_sb3.common.stats import fisher_p, mann_whitney_p


@dataclass(eq=False)
class Trial:
    """
    One episode.

    :param start: vector step in which it began; -1: before training
    :param steps: control steps so far
    :param task: its task
    :param success: whether it ended in success; None while it runs
    """

    start: int
    steps: int = 0
    task: int = 0
    success: bool | None = None


class StateRow(Protocol):
    """What an evaluation says about one initial state."""

    @property
    def task_id(self) -> int:
        """The task."""

    @property
    def init_index(self) -> int:
        """Number of the initial state among those of its task."""

    @property
    def steps(self) -> int:
        """Control steps played."""

    @property
    def success(self) -> bool:
        """Whether the episode ended in success."""


class PlayedStates(Protocol):
    """An evaluation."""

    @property
    def split(self) -> str:
        """Name of the set of initial states."""

    @property
    def rows(self) -> Sequence[StateRow]:
        """One per initial state."""


class Sample:
    """
    The first ``size`` episodes that one player has started.

    Successes are shorter than failures, so the first episodes to *finish* are successes too often. The first episodes
    to *start* are a fair sample as soon as all of them have ended.

    :param size: number of episodes wanted
    :param trials: episodes so far, in the order of their start
    """

    def __init__(self, size: int = 0, trials: Iterable[Trial] = ()):
        self.size, self.trials = size, list(trials)

    @classmethod
    def of_states(cls, rows: Iterable[StateRow], horizon: int | Mapping[int, int] | None = None) -> Sample:
        """
        Make a sample of the episodes of an evaluation.

        :param rows: of the evaluation
        :param horizon: control steps after which the episodes are cut off, those of all tasks or of each by its number;
            later successes are failures. None: as they were played
        :return: its episodes, in the order of the tasks and their initial states, before all vector steps of training
        """
        trials = []
        for row in sorted(rows, key=lambda row: (row.task_id, row.init_index)):
            longest = horizon[row.task_id] if isinstance(horizon, Mapping) else horizon
            steps = row.steps if longest is None else min(row.steps, longest)
            trials.append(Trial(-1, steps, row.task_id, row.success and row.steps == steps))
        return cls(len(trials), trials)

    @property
    def wanted(self) -> bool:
        """Whether the next episode to start belongs to the sample."""
        return len(self.trials) < self.size

    @property
    def complete(self) -> bool:
        """Whether all episodes have started and ended."""
        return not self.wanted and all(trial.success is not None for trial in self.trials)

    def start(self, now: int) -> Trial:
        """
        Add an episode that starts now.

        :param now: the vector step
        :return: the episode, to be told what happens
        """
        self.trials.append(Trial(now))
        return self.trials[-1]

    def drop(self, trial: Trial) -> None:
        """
        Remove an episode that does not count; the next one to start takes its place.

        :param trial: the episode
        """
        self.trials.remove(trial)

    def ended(self, n: int | None = None) -> list[Trial]:
        """
        List the episodes that have ended.

        :param n: look only at the first n that have started; None: at all
        :return: the episodes
        """
        return [trial for trial in self.trials[:n] if trial.success is not None]

    def count(self, task: int | None = None) -> tuple[int, int]:
        """
        Count successes and episodes.

        :param task: None: all
        :return: successes, and episodes that have ended
        """
        outcomes = [trial.success for trial in self.ended() if task is None or trial.task == task]
        return sum(map(bool, outcomes)), len(outcomes)

    def until(self, last: int) -> Sample:
        """
        Cut off the running episodes without a bias.

        To drop only the running episodes would keep the short ones, which are successes more often.

        :param last: vector step
        :return: the whole sample if it is complete, else the episodes that started up to ``last``
        """
        return self if self.complete else Sample(self.size, [trial for trial in self.trials if trial.start <= last])

    def to_list(self) -> list[Any]:
        """Return plain data for :meth:`from_list`."""
        return [self.size, *map(list, map(astuple, self.trials))]

    @classmethod
    def from_list(cls, data: Sequence[Any]) -> Sample:
        """
        Make a sample from plain data.

        :param data: of :meth:`to_list`
        :return: the sample
        """
        size, *trials = data
        return cls(size, [Trial(*trial) for trial in trials])


def horizon_by_task(horizon: int | Sequence[int] | None, tasks: Sequence[Any]) -> int | dict[int, int] | None:
    """
    Write an environment's ``train_episode_steps`` as :meth:`Sample.of_states` takes it.

    :param horizon: the horizon of all tasks, or of each
    :param tasks: tasks of the environment
    :return: the same horizon, or those of the tasks by their numbers
    """
    if not isinstance(horizon, Sequence):
        return horizon
    return {task.task_id: steps for task, steps in zip(tasks, horizon, strict=True)}


def is_better(sample: Sample, n: int, reference: Sample, level: float, by_speed: bool) -> bool | None:
    """
    Judge by the first episodes of a sample whether a player is better than another.

    :param sample: of the player
    :param n: number of episodes to judge by
    :param reference: of the other player, complete
    :param level: significance level of the tests
    :param by_speed: whether the player has to be quicker with as many successes. Otherwise it has to succeed more
        often, or as often where not even n successes reach the level
    :return: the verdict; None while it is open. A negative one comes as soon as no further episode can change it
    """
    trials = sample.ended(n)
    successes, episodes = reference.count()
    as_often = by_speed or fisher_p((n, n, successes, episodes)) > level
    if len({trial.task for trial in (*trials, *reference.trials)}) == 1:  # trials to come may be of easier tasks
        best = n - sum(not trial.success for trial in trials)
        if best * episodes < successes * n if as_often else fisher_p((best, n, successes, episodes)) > level:
            return False
    if len(trials) < n:
        return None
    judged = Sample(n, trials)
    enough = as_successful(judged, reference) if as_often else more_successes_p(judged, reference) <= level
    return enough and (not by_speed or quicker_p(judged, reference) <= level)


def tables(sample: Sample, reference: Sample) -> list[tuple[int, int, int, int]]:
    """
    Pair the counts of two samples task by task.

    :param sample: of one player
    :param reference: of another
    :return: for each task that both have played: successes and episodes, of the one and of the other
    """
    tasks = sorted({trial.task for trial in sample.ended()} & {trial.task for trial in reference.ended()})
    return [(*sample.count(task), *reference.count(task)) for task in tasks]


def more_successes_p(sample: Sample, reference: Sample) -> float:
    """
    Test whether a sample has more successes than another.

    :param sample: of one player
    :param reference: of another
    :return: p value for more successes, compared task by task
    """
    return fisher_p(*tables(sample, reference))


def as_successful(sample: Sample, reference: Sample) -> bool:
    """
    Test whether a sample has as many successes as another one's success rates predict.

    :param sample: of one player
    :param reference: of another
    :return: whether it has at least the successes expected from the other's success rate in each task
    """
    by_task = tables(sample, reference)
    return sum(k for k, *_ in by_task) >= sum(n * k0 / n0 for _, n, k0, n0 in by_task) - 1e-9


def worse_on_a_task(sample: Sample, reference: Sample, level: float) -> bool:
    """
    Test whether a sample succeeds less often than another in any one task.

    :param sample: of one player
    :param reference: of another
    :param level: of all tasks together
    :return: whether it succeeds less often in one of the tasks, which a gain in others can hide
    """
    by_task = tables(sample, reference)
    return any(fisher_p((k0, n0, k, n)) <= level / len(by_task) for k, n, k0, n0 in by_task)


def quicker_p(sample: Sample, reference: Sample) -> float:
    """
    Test whether a sample's successful episodes take fewer control steps than another's.

    :param sample: of one player
    :param reference: of another
    :return: p value for fewer control steps in the successful episodes. Steps are in units of the other player's
        median in the same task; tasks that it has not solved do not count
    """
    mine, others = ([t for t in trials.ended() if t.success] for trials in (sample, reference))
    unit = {task: np.median([t.steps for t in others if t.task == task]) for task in {t.task for t in others}}
    return mann_whitney_p(
        [float(t.steps / unit[t.task]) for t in mine if t.task in unit], [float(t.steps / unit[t.task]) for t in others]
    )
