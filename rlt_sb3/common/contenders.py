"""Actors that have beaten the VLA, the evidence on each of them, and which one is the best so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import torch as th

from rlt_sb3.common.trials import Sample, tables


@dataclass(eq=False)
class Contender:
    """
    An actor that has beaten the VLA, and the episodes that count as evidence on it.

    :param number: of the actor, in the order in which they have passed; from 1
    :param parameters: its state dict, on the CPU
    :param trials: its confirmation; empty if it has played none
    :param states: its episodes on the selection states; empty if it has not played them
    """

    number: int
    parameters: dict[str, th.Tensor]
    trials: Sample = field(default_factory=Sample)
    states: Sample = field(default_factory=Sample)

    def merit(self, vla_trials: Sample, vla_states: Sample) -> tuple[Fraction, float]:
        """
        Compute by how much the actor is better than the VLA, by all of its evidence.

        :param vla_trials: the VLA's baseline
        :param vla_states: the VLA's episodes on the selection states
        :return: gain in success rate, and minus the control steps of a success in units of the VLA's; the greater the
            pair, the better the actor
        """
        evidence = ((self.trials, vla_trials), (self.states, vla_states))
        return gain(evidence), -pace(evidence)

    def to_list(self) -> list[Any]:
        """Return plain data for :meth:`from_list`."""
        parameters = {name: value.tolist() for name, value in self.parameters.items()}
        return [self.number, parameters, self.trials.to_list(), self.states.to_list()]

    @classmethod
    def from_list(cls, data: Sequence[Any]) -> Contender:
        """
        Make a contender from plain data.

        :param data: of :meth:`to_list`
        :return: the contender; floating-point parameters have double precision, which changes none of them
        """
        number, parameters, trials, states = data
        values = {name: th.as_tensor(np.asarray(value)) for name, value in parameters.items()}
        return cls(number, values, Sample.from_list(trials), Sample.from_list(states))


def copied(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """
    Copy a state dict to the CPU.

    :param parameters: a state dict
    :return: the copy, which later updates do not change
    """
    return {name: value.cpu().clone() for name, value in parameters.items()}


def gain(evidence: Sequence[tuple[Sample, Sample]]) -> Fraction:
    """
    Estimate the difference of two success rates over several kinds of episodes (Mantel and Haenszel's estimate).

    Episodes are only compared with episodes of the same kind and task, because one kind can be harder than another.
    The difference of each kind and task has the weight ``n * n0 / (n + n0)``, for n and n0 episodes of the two players.

    :param evidence: for each kind of episodes: sample of a player, sample of the other
    :return: rate of the player less that of the other one, exactly; 0 where nothing can be compared
    """
    strata = [table for sample, reference in evidence for table in tables(sample, reference)]
    weight = sum((Fraction(n * n0, n + n0) for _, n, _, n0 in strata), Fraction(0))
    difference = sum((Fraction(k * n0 - k0 * n, n + n0) for k, n, k0, n0 in strata), Fraction(0))
    return difference / weight if weight else Fraction(0)


def pace(evidence: Sequence[tuple[Sample, Sample]]) -> float:
    """
    Compare the control steps of successful episodes.

    :param evidence: for each kind of episodes: sample of a player, sample of the other
    :return: mean control steps of the player's successes, in units of the other's median in episodes of the same kind
        and task; infinite where nothing can be compared
    """
    paces = []
    for sample, reference in evidence:
        mine, others = ([trial for trial in one.ended() if trial.success] for one in (sample, reference))
        unit = {task: np.median([t.steps for t in others if t.task == task]) for task in {t.task for t in others}}
        paces += [trial.steps / unit[trial.task] for trial in mine if trial.task in unit]
    return float(np.mean(paces)) if paces else float("inf")
