#!/usr/bin/env python
"""
How often the deployment gate errs: whole runs of the real class, with players that succeed at known rates.

    python benchmarks/gate.py                   # the table of errors in docs/guide/deployment_gate.md
    python benchmarks/gate.py --runs 100        # a quick look
    python benchmarks/gate.py --replacements    # the table of replacements: the best actor so far, or the last one

A run is 7,200 chunks, the first 500 of them the VLA's. A success takes 8 chunks and a failure 20, as in the runs on
LIBERO; the rows on speed have successes of 6, 8 or 10 chunks, or of 4, 6 or 8. Nothing is written.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch as th

from rlt_sb3.common.chunk_outcome import ChunkOutcome
from rlt_sb3.common.gated_policy import GatedPolicy
from rlt_sb3.common.policy_gate import PolicyGate
from rlt_sb3.common.stats import wilson_interval
from rlt_sb3.common.trials import Sample, Trial, more_successes_p

ROWS, WARM_UP, FAILURE = 7200, 500, 20
C = 8  # control steps of a chunk
SLOW, QUICK = (6, 8, 10), (4, 6, 8)


@dataclass(frozen=True)
class Player:
    """Succeeds at a rate, in one of some numbers of chunks."""

    rate: float
    lengths: tuple[int, ...] = (8,)

    def clone(self) -> Player:
        """As a tensor of a network's state has it."""
        return self

    cpu = clone

    def episode(self) -> tuple[bool, int]:
        """Return success, chunks."""
        if np.random.random() >= self.rate:
            return False, FAILURE
        return True, self.lengths[np.random.randint(len(self.lengths))]


class Copies:
    """A policy whose training actor is a :class:`Player` that can change; copies stay as they are."""

    starts_at_vla = True

    def __init__(self, actor: Player):
        self.training = self.on_trial = self.deployed = actor

    def start_trial(self) -> None:
        """Put a copy of the training actor on trial."""
        self.on_trial = self.training

    def deploy(self, parameters: Mapping[str, Any]) -> None:
        """Deploy a player."""
        self.deployed = parameters["player"]

    actor_on_trial: Any = property(lambda self: Actor(self.on_trial))
    actor_deployed: Any = property(lambda self: Actor(self.deployed))
    training_actor: Any = property(lambda self: Actor(self.training))


class Actor:
    """What the gate sees of an actor: here its chunk is the number 2."""

    def __init__(self, player: Player):
        self.player = player

    def __call__(self, observation: th.Tensor) -> th.Tensor:
        """Return the observation; the players only stand for actors."""
        return observation

    def state_dict(self) -> dict[str, Player]:
        """Return the player."""
        return {"player": self.player}


class LastGate(PolicyGate):
    """The rule before: the last actor that has passed is deployed, unless it is worse than the one before it."""

    def _rank(self, policy: GatedPolicy) -> None:
        new, *others = self.contenders
        if new.number == self.passed and others and self._worse(new, others[0]):
            self.contenders = others
        self.contenders = self.contenders[:1]
        policy.deploy(self.contenders[0].parameters)

    @staticmethod
    def _worse(new, old) -> bool:
        """Beyond chance in the trials, or not better on the selection states."""
        both_tried = new.trials.trials and old.trials.trials
        both_on_states = new.states.trials and old.states.trials
        return bool(
            (both_tried and more_successes_p(old.trials, new.trials) <= 0.05)
            or (both_on_states and new.states.count() <= old.states.count())
        )


def on_states(player: Player, states: int) -> Sample:
    """Play the selection states."""
    solved = np.random.random(states) < player.rate
    return Sample(states, [Trial(at, C * 8, 0, bool(success)) for at, success in enumerate(solved)])


def play(
    gate: PolicyGate,
    vla: Player,
    learner: Callable[[float], Player],
    n_envs: int,
    auditions: int = 0,
    states: int = 48,
    rows: int = ROWS,
) -> Iterator[tuple[int, str, Copies]]:
    """
    Play one run.

    :param gate: a new gate
    :param vla: the VLA
    :param learner: the training actor, by the share of the run that is over
    :param n_envs: environments
    :param auditions: selection evaluations, evenly over the run
    :param states: initial states of each
    :param rows: chunks of the run
    :return: after each vector step and each selection evaluation: chunks so far, which of the two, and the policy
    """
    policy = Copies(learner(0.0))
    gate.restart(n_envs)
    gate.use_states(on_states(vla, states))
    observation, noisy, reference = th.full((n_envs, 1), 2.0), np.zeros((n_envs, 1)), np.ones((n_envs, 1))
    playing, left, success = np.full(n_envs, -1.0), np.zeros(n_envs, int), np.zeros(n_envs, bool)
    dones = np.ones(n_envs, bool)
    # all episodes end at multiples of ``unit`` chunks, and nothing happens in between: one vector step stands for them
    unit = math.gcd(FAILURE, *vla.lengths, *learner(0.0).lengths)
    goes_on, fails, succeeds = (
        ChunkOutcome(C * unit, np.zeros(C), np.zeros((C, 7)), success=success) for success in (False, False, True)
    )
    played = 0  # auditions so far
    for chunks in range(0, rows, n_envs * unit):
        progress = chunks / rows
        policy.training = learner(progress)
        if auditions and (auditions + 1) * chunks // rows > played:
            played += 1
            while gate.best is not None and not gate.best.states.trials:
                gate.add_states(policy, on_states(policy.deployed, states))
            gate.audition(policy, lambda: on_states(policy.deployed, states), lambda sample: sample)
            yield chunks, "audition", policy
        if chunks < WARM_UP:
            gate.play_vla({})
            chosen = reference
        else:
            chosen = gate.choose(policy, observation, noisy, reference, ready=True)
        for env in np.flatnonzero(dones):  # who plays when an episode begins decides how it ends
            playing[env] = chosen[env, 0]
            player = {0.0: policy.training, 1.0: vla, 2.0: policy.on_trial}[playing[env]]
            success[env], left[env] = player.episode()
        left -= unit
        dones = left == 0
        outcomes = [(succeeds if s else fails) if d else goes_on for s, d in zip(success, dones, strict=True)]
        gate.step(policy, outcomes, dones)
        yield chunks + n_envs * unit, "trials", policy


def run(vla: Player, learner: Callable[[float], Player], n_envs: int, auditions: int = 0, **settings: Any) -> tuple:
    """
    One run, until the first deployment; see :func:`play`.

    :param settings: of the gate
    :return: chunks up to the first deployment, or None; and who has decided it
    """
    gate = PolicyGate(**settings)
    for chunks, route, _ in play(gate, vla, learner, n_envs, auditions):
        if gate.approvals:
            return chunks, route
    return None, ""


def follow(
    gate: PolicyGate, vla: Player, learner: Callable[[float], Player], n_envs: int, auditions: int
) -> dict[str, float]:
    """
    Follow what is deployed to the end of one run; see :func:`play`.

    :return: from the first deployment on: mean and last success rate of what is deployed, the mean regret (best rate
        of those deployed so far less the present one), the largest regret, and the number of replacements; empty if no
        actor was deployed
    """
    rates: list[float] = []
    for _, route, policy in play(gate, vla, learner, n_envs, auditions):
        if gate.approvals and (route == "trials" or not rates):
            rates.append(policy.deployed.rate)
    if not rates:
        return {}
    deployed = np.array(rates)
    regret = np.maximum.accumulate(deployed) - deployed
    return {
        "mean": deployed.mean(),
        "last": deployed[-1],
        "regret": regret.mean(),
        "worst": regret.max(),
        "replaced": float((np.diff(deployed) != 0).sum()),
    }


def improving(progress: float) -> Player:
    """Return a success rate of 63 % at the start, 20 % after a fifth of the run, and 95 % from three fifths on."""
    return Player(float(np.interp(progress, [0.0, 0.2, 0.6], [0.63, 0.2, 0.95])))


def wandering(start: float, end: float, spread: float, knots: int = 24) -> Callable[[float], Player]:
    """
    Return a training actor that improves over the first half of the run, and goes up and down on the way.

    :param start: success rate at first
    :param end: success rate in the second half, about which it wanders
    :param spread: standard deviation of the log odds at ``knots`` times, between which the rate is interpolated
    """
    at = np.linspace(0.0, 1.0, knots)
    rates = np.interp(at, [0.0, 0.5], [start, end])
    odds = np.log(rates / (1.0 - rates)) + spread * np.random.standard_normal(knots)
    return lambda progress: Player(float(np.interp(progress, at, 1.0 / (1.0 + np.exp(-odds)))))


def constant(player: Player) -> Callable[[float], Player]:
    """Return a training actor that stays as it is."""
    return lambda progress: player


def describe(name: str, n_envs: int, runs: int, **settings) -> str:
    """Return a row of the table."""
    vla, learner, auditions = CASES[name]
    results = [run(vla, learner, n_envs, auditions, **settings) for _ in range(runs)]
    when = [chunks for chunks, _ in results if chunks is not None]
    low, high = wilson_interval(len(when), runs)
    by_audition = sum(route == "audition" for _, route in results)
    median = f"{np.median(when):,.0f}" if when else ""
    share = f"{len(when) / runs:.3f} ({low:.3f} to {high:.3f})"
    return f"| {name} | {n_envs} | {runs} | {share} | {by_audition if auditions else ''} | {median} |"


def _rates(vla: float, actor: float) -> tuple[Player, Callable[[float], Player], int]:
    return Player(vla), constant(Player(actor)), 0


#: name: VLA, training actor, auditions
CASES: dict[str, tuple[Player, Callable[[float], Player], int]] = {
    "63 %, actor 53 %": _rates(0.63, 0.53),
    "63 %, actor 53 %, 6 auditions": (Player(0.63), constant(Player(0.53)), 6),
    "82 %, actor 72 %, 6 auditions": (Player(0.82), constant(Player(0.72)), 6),
    "35 %, actor 25 %, 6 auditions": (Player(0.35), constant(Player(0.25)), 6),
    "63 %, actor 63 %": _rates(0.63, 0.63),
    "63 %, actor 63 %, 6 auditions": (Player(0.63), constant(Player(0.63)), 6),
    "82 %, actor 82 %, 6 auditions": (Player(0.82), constant(Player(0.82)), 6),
    "95 % in 8 chunks, actor the same": (Player(0.95, SLOW), constant(Player(0.95, SLOW)), 0),
    "63 %, actor 73 %": _rates(0.63, 0.73),
    "63 %, actor 73 %, 6 auditions": (Player(0.63), constant(Player(0.73)), 6),
    "82 %, actor 92 %, 6 auditions": (Player(0.82), constant(Player(0.92)), 6),
    "20 %, actor 35 %, 6 auditions": (Player(0.2), constant(Player(0.35)), 6),
    "63 %, actor 95 %": _rates(0.63, 0.95),
    "63 %, actor 95 %, 6 auditions": (Player(0.63), constant(Player(0.95)), 6),
    "63 %, actor from 63 % over 20 % to 95 %": (Player(0.63), improving, 0),
    "95 % in 8 chunks, actor 95 % in 6": (Player(0.95, SLOW), constant(Player(0.95, QUICK)), 0),
}
#: VLA's rate, and :func:`wandering`: rates at first and in the end, spread
WANDERING: dict[str, tuple[float, float, float, float]] = {
    "63 %, actor from 50 % to 85 %, spread 0.5": (0.63, 0.5, 0.85, 0.5),
    "63 %, actor from 50 % to 92 %, spread 1": (0.63, 0.5, 0.92, 1.0),
    "35 %, actor from 30 % to 80 %, spread 1": (0.35, 0.3, 0.8, 1.0),
    "35 %, actor from 30 % to 80 %, spread 0.3": (0.35, 0.3, 0.8, 0.3),
}
RULES = {"last": LastGate, "best": PolicyGate}
#: the cases that the gate is made for
PROMISED = ("63 %, actor 53 %, 6 auditions", "63 %, actor 63 %, 6 auditions", "82 %, actor 92 %, 6 auditions")


def replacements(runs: int, n_envs: int, auditions: int, seed: int, **settings: Any) -> Iterator[str]:
    """Yield the table that compares what is deployed under the two rules."""
    yield "| VLA, actor | auditions | rule | runs | mean rate | last rate | regret | largest regret | replacements |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, (vla, first, last, spread) in WANDERING.items():
        for played in (0, auditions):
            for rule, gate_class in RULES.items():
                results = []
                for number in range(runs):
                    np.random.seed([seed, number, list(WANDERING).index(name)])
                    learner = wandering(first, last, spread)
                    results.append(follow(gate_class(**settings), Player(vla), learner, n_envs, played))
                known = [result for result in results if result]
                if not known:
                    yield f"| {name} | {played} | {rule} | 0 | - | - | - | - | - |"
                    continue
                mean = {key: np.mean([result[key] for result in known]) for key in known[0]}
                yield (
                    f"| {name} | {played} | {rule} | {len(known)} | {mean['mean']:.3f} | {mean['last']:.3f} | "
                    f"{mean['regret']:.3f} | {mean['worst']:.3f} | {mean['replaced']:.1f} |"
                )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000, help="runs of a promised row; a fifth of them of the others")
    parser.add_argument("--num-envs", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="CASE")
    parser.add_argument("--level", type=float, default=0.1)
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replacements", action="store_true", help="the last actor that passes against the best one")
    args = parser.parse_args()
    th.set_num_threads(1)
    if args.replacements:
        runs = -(-args.runs // 5)
        for line in replacements(runs, args.num_envs[0], 6, args.seed, window=args.window, level=args.level):
            print(line, flush=True)
        return
    print("| VLA, actor | envs | runs | deployed (95 % interval) | by an audition | first after, chunks |")
    print("|---|---|---|---|---|---|")
    for name in args.cases:
        for n_envs in args.num_envs:
            np.random.seed([args.seed, n_envs, list(CASES).index(name)])  # a row is the same alone
            runs = args.runs if name in PROMISED else -(-args.runs // 5)
            print(describe(name, n_envs, runs, window=args.window, level=args.level), flush=True)


if __name__ == "__main__":
    main()
