"""Which of the actors that have beaten the VLA is deployed: the best by the evidence so far."""

import copy
import json

import numpy as np
import pytest
import torch as th

from rlt_sb3.common.contenders import Contender, gain, pace
from rlt_sb3.common.policy_gate import PolicyGate
from rlt_sb3.common.trials import Sample, Trial


class Policy:
    """Its actors are layers with one number."""

    starts_at_vla = True

    def __init__(self):
        self.training_actor, self.actor_on_trial, self.actor_deployed = (th.nn.Linear(1, 1, False) for _ in range(3))
        self.set(0.0)
        self.start_trial()
        self.deploy(self.training_actor.state_dict())

    def set(self, number: float) -> None:
        """The training actor is this one from now on."""
        self.training_actor.weight.data.fill_(number)

    def start_trial(self) -> None:
        self.actor_on_trial.load_state_dict(self.training_actor.state_dict())

    def deploy(self, parameters) -> None:
        self.actor_deployed.load_state_dict(parameters)

    @property
    def deployed(self) -> float:
        return self.actor_deployed.weight.item()


def is_deployed(gate, heard) -> bool:
    """Tell whether the actor of an audition is deployed."""
    return gate.deployed_name in heard[1]


def sample(*tasks: tuple[int, int], steps: float = 20) -> Sample:
    """Successes and episodes of each task."""
    trials = [Trial(0, steps, task, at < k) for task, (k, n) in enumerate(tasks) for at in range(n)]
    return Sample(len(trials), trials)


def rates(outcomes: Sample) -> dict[int, tuple[float, int]]:
    """Rate and number of episodes by task, by hand."""
    found = {}
    for trial in outcomes.trials:
        found.setdefault(trial.task, []).append(trial.success)
    return {task: (float(np.mean(values)), len(values)) for task, values in found.items()}


def textbook_gain(*pairs: tuple[Sample, Sample]) -> float:
    """Mantel and Haenszel's risk difference: a mean of differences of rates, weighted by n n0 / (n + n0)."""
    differences, weights = [], []
    for one, other in pairs:
        mine, others = rates(one), rates(other)
        for task in mine.keys() & others.keys():
            (rate, n), (rate0, n0) = mine[task], others[task]
            differences.append(rate - rate0)
            weights.append(1.0 / (1.0 / n + 1.0 / n0))
    return float(np.average(differences, weights=weights)) if weights else 0.0


def test_gain_of_known_tables():
    assert gain([(sample((28, 32)), sample((40, 64)))]) == pytest.approx(28 / 32 - 40 / 64)
    # the player meets the hard task more often: the raw rates are equal, it is better in both tasks
    player, vla = sample((9, 10), (15, 30)), sample((24, 30), (4, 10))
    assert gain([(player, vla)]) == pytest.approx(0.1)
    # trials and selection states: (0.25 * 64/3 + 0.125 * 24) / (64/3 + 24)
    evidence = [(sample((28, 32)), sample((40, 64))), (sample((36, 48)), sample((30, 48)))]
    assert gain(evidence) == pytest.approx((0.25 * 64 / 3 + 0.125 * 24) / (64 / 3 + 24))
    assert gain([(sample((1, 2)), Sample())]) == 0 and gain([]) == 0


def test_gain_agrees_with_the_textbook():
    rng = np.random.default_rng(0)
    for _ in range(50):
        pairs = []
        for _ in range(rng.integers(1, 3)):
            sizes = rng.integers(1, 30, (2, 3))
            pairs.append(tuple(sample(*[(int(rng.integers(0, n + 1)), int(n)) for n in row]) for row in sizes))
        assert float(gain(pairs)) == pytest.approx(textbook_gain(*pairs), abs=1e-12)


def test_pace_is_in_units_of_the_vla_and_of_successes_only():
    vla = Sample(3, [Trial(0, 20, 0, True), Trial(0, 40, 0, True), Trial(0, 99, 0, False)])  # median 30
    player = Sample(3, [Trial(0, 15, 0, True), Trial(0, 30, 0, True), Trial(0, 99, 0, False)])
    assert pace([(player, vla)]) == pytest.approx(0.75)
    assert pace([(player, Sample())]) == float("inf") == pace([(Sample(), vla)])


def test_the_deployed_actor_has_the_best_evidence_at_any_time():
    """Long random histories, beside a list of all that is known of each actor, ranked by hand."""
    changes, returns = np.sum([history(np.random.default_rng(seed)) for seed in range(6)], axis=0)
    assert changes >= 20 and returns >= 5


def history(rng: np.random.Generator) -> tuple[int, int]:
    """How often a new actor was deployed, and how often another one came back."""
    gate, policy = PolicyGate(window=16), Policy()
    gate.KEPT = 100
    gate.baseline = sample((20, 32), (12, 32))
    gate.use_states(sample((14, 24), (10, 24)))
    known: dict[float, dict[str, Sample]] = {}  # of each actor, by its weight

    def merit(number: float) -> float:
        kinds = {"trials": gate.baseline, "states": gate.vla_states}
        return textbook_gain(*[(outcomes, kinds[kind]) for kind, outcomes in known[number].items()])

    changes = returns = 0
    for number in range(1, 30):
        before = policy.deployed
        policy.set(number)
        if rng.random() < 0.7:
            gate.start_trial(policy)
            gate.trials = sample((int(rng.integers(10, 17)), 16), (int(rng.integers(8, 17)), 16))
            known[number] = {"trials": gate.trials}
            gate.pass_trial(policy)
        else:
            outcomes = sample((int(rng.integers(23, 25)), 24), (int(rng.integers(22, 25)), 24))
            passed = gate.passed
            played = []
            heard = gate.audition(policy, lambda p=played: p.append(policy.deployed), lambda _, o=outcomes: o)
            best = is_deployed(gate, heard)
            assert played == [number] and gate.passed == passed + 1  # such actors pass
            known[number] = {"states": outcomes}
            assert best is (policy.deployed == number)
        if policy.deployed != before:
            changes += 1
            assert policy.deployed == number and (before == 0 or merit(number) >= merit(before) - 1e-12)
        assert merit(policy.deployed) == pytest.approx(max(map(merit, known)))
        before = policy.deployed
        if "states" not in known[before] and rng.random() < 0.7:
            known[before]["states"] = sample((int(rng.integers(6, 22)), 24), (int(rng.integers(6, 22)), 24))
            gate.add_states(policy, known[before]["states"])
            returns += policy.deployed != before
        assert merit(policy.deployed) == pytest.approx(max(map(merit, known)))
    assert gate.passed == 29
    return changes, returns


def test_a_better_actor_comes_back():
    """45 of 48, then one with perfect trials that solves 35 of 48."""
    gate, policy = PolicyGate(window=16), Policy()
    gate.baseline = sample((40, 64))
    gate.use_states(sample((30, 48)))
    policy.set(1.0)
    assert is_deployed(gate, gate.audition(policy, lambda: None, lambda _: sample((45, 48)))) and policy.deployed == 1.0
    policy.set(2.0)
    gate.start_trial(policy)
    gate.trials = sample((32, 32))
    gate.pass_trial(policy)
    assert policy.deployed == 2.0 and gate.approvals == 2
    gate.add_states(policy, sample((35, 48)))
    assert policy.deployed == 1.0 and gate.best.number == 1 and gate.approvals == 2
    policy.set(3.0)  # better than the VLA, and worse than 45 of 48
    assert not is_deployed(gate, gate.audition(policy, lambda: None, lambda _: sample((44, 48))))
    assert gate.passed == 3 and policy.deployed == 1.0
    policy.set(4.0)
    assert is_deployed(gate, gate.audition(policy, lambda: None, lambda _: sample((45, 48))))  # as good
    assert policy.deployed == 4.0
    policy.set(5.0)
    assert is_deployed(gate, gate.audition(policy, lambda: None, lambda _: sample((45, 48), steps=19)))  # quicker
    policy.set(6.0)
    assert not is_deployed(gate, gate.audition(policy, lambda: None, lambda _: sample((45, 48), steps=19.5)))
    assert [one.number for one in gate.contenders] == [5, 6, 4] and len(gate.contenders) == gate.KEPT


def test_copies_do_not_follow_the_training_actor():
    gate, policy = PolicyGate(window=16), Policy()
    gate.use_states(sample((10, 48)))
    policy.set(1.0)
    gate.audition(policy, lambda: None, lambda _: sample((40, 48)))
    policy.set(2.0)
    assert policy.deployed == 1.0 and gate.best.parameters["weight"].item() == 1.0


def test_evidence_of_other_states_is_void():
    gate, policy = PolicyGate(window=16), Policy()
    gate.use_states(sample((10, 48)))
    gate.audition(policy, lambda: None, lambda _: sample((40, 48)))
    gate.use_states(sample((10, 48)))
    assert gate.best.states.count() == (40, 48)
    gate.use_states(sample((11, 48)))
    assert not gate.best.states.trials


def test_networks_that_are_put_back_keep_only_what_is_known_of_them():
    gate, policy = PolicyGate(window=16), Policy()
    gate.use_states(sample((10, 48)))
    for number, successes in ((1.0, 40), (2.0, 44)):
        policy.set(number)
        gate.audition(policy, lambda: None, lambda _, k=successes: sample((k, 48)))
    policy.actor_deployed.weight.data.fill_(1.0)
    gate.adopt(policy)
    assert [one.number for one in gate.contenders] == [1] and gate.best.states.count() == (40, 48)
    policy.actor_deployed.weight.data.fill_(7.0)
    gate.adopt(policy)
    assert gate.best.number == 3 and not gate.best.states.trials and len(gate.contenders) == 1
    gate.add_states(policy, sample((45, 48)))
    policy.set(8.0)
    gate.audition(policy, lambda: None, lambda _: sample((44, 48)))
    assert policy.deployed == 7.0 and [one.number for one in gate.contenders] == [3, 4]


def test_state_goes_on_in_another_gate_bit_for_bit():
    gate, policy = PolicyGate(window=16), Policy()
    gate.baseline = sample((40, 64))
    gate.use_states(sample((30, 48)))
    for number, successes in ((1 / 3, 44), (0.1, 47)):
        policy.set(number)
        gate.audition(policy, lambda: None, lambda _, k=successes: sample((k, 48)))
    again, other = PolicyGate(window=16), copy.deepcopy(policy)
    again.load_state_dict(json.loads(json.dumps(gate.state_dict())))
    assert again.state_dict() == gate.state_dict()
    for one, its in ((gate, policy), (again, other)):
        one.contenders[0].states = Sample()
        one.add_states(its, sample((31, 48)))
        assert one.best.number == 1 and th.equal(its.actor_deployed.weight, th.full((1, 1), 1 / 3))
    assert again.state_dict() == gate.state_dict()


def test_a_contender_is_plain_data():
    one = Contender(3, {"w": th.tensor([[0.1, 1e-30]]), "n": th.tensor(7)}, sample((1, 2)), sample((2, 3)))
    again = Contender.from_list(json.loads(json.dumps(one.to_list())))
    assert again.to_list() == one.to_list() and again.parameters["n"].dtype == th.int64
    assert th.equal(again.parameters["w"].float(), one.parameters["w"])
