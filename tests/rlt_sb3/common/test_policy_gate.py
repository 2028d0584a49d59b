"""The deployment gate: noise-free training episodes decide which actor is deployed."""

import copy
import json
import pickle
import warnings
from collections import deque
from math import comb

import numpy as np
import pytest
import torch as th
from scipy.stats import fisher_exact

from rlt_sb3.common.chunk_outcome import ChunkOutcome
from rlt_sb3.common.contenders import Contender
from rlt_sb3.common.policy_gate import PolicyGate
from rlt_sb3.common.trials import Sample, Trial

PRACTICE, VLA, ACTOR = 0.0, 1.0, 2.0


class Copies:
    """A policy of which the gate only sees that copies are made; the actor on trial plays the chunk 2."""

    class Actor:
        def state_dict(self):
            return {}

        def __call__(self, observation):
            return th.full((len(observation), 1), ACTOR)

    actor_on_trial = actor_deployed = training_actor = Actor()
    starts_at_vla = True

    def start_trial(self):
        pass

    def deploy(self, parameters):
        pass


class World:
    """
    Environments whose episodes follow a script.

    ``script(player, number)`` says success and length in chunks of the number-th episode of a player; episodes are
    numbered in the order of their start. Observes that nobody takes over in the midst of a counted episode.
    """

    def __init__(self, gate, script, n_envs=1):
        self.gate, self.script, self.policy = gate, script, Copies()
        gate.restart(n_envs)
        self.restart()
        self.started = {PRACTICE: 0, VLA: 0, ACTOR: 0}
        self.played: list[np.ndarray] = []

    def restart(self):
        self.dones = np.ones(self.gate.n_envs, bool)
        self.player = np.zeros(self.gate.n_envs)
        self.episodes = [(False, 0)] * self.gate.n_envs

    def step(self, warm_up=False, ready=True, **told):
        """One vector step; whether an actor was deployed."""
        gate, n = self.gate, self.gate.n_envs
        if warm_up:
            gate.play_vla({})
            chunks = np.full((n, 1), VLA)
            assert gate.noise_free.all()
        else:
            chunks = gate.choose(self.policy, np.zeros((n, 1)), np.zeros((n, 1)), np.full((n, 1), VLA), ready)
            assert np.array_equal(gate.noise_free, chunks[:, 0] != PRACTICE)
        for env in np.flatnonzero(self.dones):
            self.player[env] = chunks[env, 0]
            self.episodes[env] = self.script(chunks[env, 0], self.started[chunks[env, 0]])
            self.started[chunks[env, 0]] += 1
        self.played.append(chunks[:, 0])
        left = [length - 1 for _, length in self.episodes]
        self.episodes = [(success, rest) for (success, _), rest in zip(self.episodes, left, strict=True)]
        self.dones = np.array(left) == 0
        outcomes = [chunk(8, success=s and d, **told) for (s, _), d in zip(self.episodes, self.dones, strict=True)]
        before = gate.approvals
        gate.step(self.policy, outcomes, self.dones)
        return gate.approvals > before

    def until(self, condition, limit=2000, **kwargs):
        for _ in range(limit):
            if condition():
                return
            self.step(**kwargs)
        raise AssertionError("did not happen")


def chunk(steps: int = 1, **told) -> ChunkOutcome:
    return ChunkOutcome(steps, np.zeros(8), np.zeros((8, 7)), **told)


def of(successes: int, n: int, steps: int = 24) -> Sample:
    """A sample of which all has ended."""
    return Sample(n, [Trial(0, steps - 1 + number % 3, 0, number < successes) for number in range(n)])


def by_number(outcomes, lengths=(3, 3)):
    """The actor's episodes by their number, of given lengths for failure and success; all others fail."""
    return lambda player, number: (
        (bool(outcomes[number % len(outcomes)]), lengths[bool(outcomes[number % len(outcomes)])])
        if player == ACTOR
        else (False, 3)
    )


def make(window=8, vla=0.5, share=1.0, **settings) -> PolicyGate:
    """A gate whose baseline is complete."""
    gate = PolicyGate(share=share, window=window, **settings)
    gate.baseline = of(round(vla * 4 * window), 4 * window)
    return gate


def approves(gate: PolicyGate, outcomes, n_envs=1, **kwargs) -> bool:
    """Whether the first candidate is deployed."""
    world = World(gate, by_number(outcomes), n_envs)
    world.step()
    world.until(lambda: gate.candidates == 2 or gate.approvals)
    return gate.approvals == 1


def beyond_chance(k: int, n: int, other_k: int, other_n: int, level: float) -> bool:
    return bool(fisher_exact([[k, n - k], [other_k, other_n - other_k]], alternative="greater").pvalue <= level)


# ---------------------------------------------------------------- the level


@pytest.mark.parametrize("successes", range(10, 17))
def test_an_actor_is_deployed_if_its_confirmation_beats_the_vla(successes):
    """8 screening trials that succeed, then ``successes`` of 16, against 16 of 32 of the VLA."""
    expected = beyond_chance(successes, 16, 16, 32, 0.1)
    failures = 16 - successes
    assert approves(make(), [True] * 8 + [False] * failures + [True] * successes) is expected
    assert expected == (successes >= 12)


def test_the_screening_does_not_count_in_the_confirmation():
    # 11 of 16 are not enough; with the screening it were 19 of 24
    assert beyond_chance(19, 24, 16, 32, 0.1) and not approves(make(), [True] * 19 + [False] * 5)


def test_the_level_is_the_same_for_every_copy():
    """12 of 16 pass after any number of failed confirmations, and after an actor has passed."""
    gate = make()
    for _ in range(4):
        assert not approves(gate, [True] * 8 + [False] * 5 + [True] * 11)
        gate.abandon_trial()
        gate.candidates = 0
    assert approves(gate, [True] * 8 + [False] * 4 + [True] * 12) and not gate.on_trial
    gate.candidates = gate.approvals = 0
    assert approves(gate, [True] * 8 + [False] * 4 + [True] * 12)


@pytest.mark.parametrize("level", [0.2, 0.03, 0.003])
def test_the_level_can_be_set(level):
    """8 of 8 pass every screening: where the test could not be passed at all, as many successes are enough."""
    for successes in range(10, 17):
        passed = approves(make(level=level), [True] * 8 + [False] * (16 - successes) + [True] * successes)
        assert passed is beyond_chance(successes, 16, 16, 32, level)


@pytest.mark.parametrize(
    ("actor", "length", "approved"),
    [
        ([True] * 24, 2, True),
        ([True] * 23 + [False], 2, False),  # 15 of 16 < 31 of 32
        ([True] * 24, 3, False),
        ([True] * 24, 4, False),
    ],
)
def test_nearly_perfect_vla_is_replaced_by_a_quicker_actor(actor, length, approved):
    gate = make(vla=31 / 32)
    assert not beyond_chance(16, 16, 31, 32, 0.1)  # successes alone cannot tell
    world = World(gate, by_number(actor, (length, length)))
    world.step()
    world.until(lambda: gate.candidates == 2 or gate.approvals)
    assert bool(gate.approvals) is approved


def test_a_worse_actor_does_not_replace_a_better_one():
    """Not even where the difference can be chance; it passes, but what is deployed stays."""
    slower, quicker = of(11, 16, steps=26), of(11, 16, steps=23)  # than 24 control steps
    cases = (of(16, 16), False), (of(12, 16), False), (quicker, False), (slower, True), (of(10, 16), True)
    for before, replaced in cases:
        gate = make(vla=0.25)
        gate.contenders, gate.passed, gate.approvals = [Contender(1, {}, before)], 1, 1
        world = World(gate, by_number([True] * 8 + [False] * 5 + [True] * 11))
        world.until(lambda gate=gate: gate.passed == 2, limit=200)
        assert (gate.approvals == 2) is replaced
        assert gate.best.number == (2 if replaced else 1)
        assert [one.number for one in gate.contenders] == ([2, 1] if replaced else [1, 2])


# ---------------------------------------------------------------- counting by start


@pytest.mark.parametrize("n_envs", [2, 8, 32, 64])
@pytest.mark.parametrize("warm_up", [0, 3, 16, 60])
def test_the_baseline_are_the_first_episodes_that_start(n_envs, warm_up):
    """Every other episode fails, ten times as slowly as the others succeed: half of what starts succeeds."""
    np.random.seed(0)
    gate = PolicyGate(share=0.5, window=16)
    world = World(gate, lambda player, number: (number % 2 == 0, 2 if number % 2 == 0 else 20), n_envs)
    for _ in range(warm_up):
        world.step(warm_up=True)
    world.until(lambda: gate.baseline.complete)
    assert gate.baseline.count() == (32, 64) and gate.candidates == 0
    # whole episodes, of one player each
    assert [trial.steps for trial in gate.baseline.trials] == [16, 160] * 32
    world.step()
    assert gate.on_trial and gate.candidates == 1


def test_nobody_is_on_trial_before_the_baseline_is_complete():
    np.random.seed(0)
    gate = PolicyGate(share=0.5, window=4)
    world = World(gate, lambda player, number: (True, 3), 4)
    for _ in range(4):
        world.step(warm_up=True)
    for _ in range(5):
        world.step(ready=False)  # only the critics learn
    world.until(lambda: gate.baseline.complete, ready=False)
    world.step(ready=False)
    assert not gate.on_trial and not gate.noise_free.any()  # no slot is wasted meanwhile
    world.step()
    assert gate.on_trial


@pytest.mark.parametrize("n_envs", [1, 4, 32])
def test_trials_count_in_the_order_of_their_start(n_envs):
    """The first trial fails so slowly that it ends last: it counts, and nothing is decided before it has ended."""
    outcomes = [False] + [True] * 6 + [False] + [True] * 16
    gate = make(vla=0.25)
    lengths = {True: 2, False: 30}
    world = World(gate, by_number(outcomes, (lengths[False], lengths[True])), n_envs)
    for _ in range(min(29, 2 * n_envs)):
        assert not world.step() and gate.on_trial and not gate.screened
    world.until(lambda: gate.approvals)
    assert gate.best.trials.count() == (16, 16)  # 6 of 8 have passed the screening
    assert gate.candidates == 1 and len(gate.recent) == 8


def test_only_as_many_trials_as_are_needed_are_free_of_noise():
    np.random.seed(0)
    gate = make(vla=0.0)
    world = World(gate, lambda player, number: (True, 30), 64)
    world.step()
    assert world.started[ACTOR] == 24 and gate.noise_free.sum() == 24
    world.until(lambda: gate.approvals, limit=30)
    assert not gate.noise_free[24:].any()


def test_share_of_trials():
    np.random.seed(0)
    gate, free = make(share=0.25, window=1000), []
    world = World(gate, lambda player, number: (True, 1), 4)
    for _ in range(500):
        world.step()
        free += (world.played[-1] == ACTOR).tolist()
    assert abs(np.mean(free) - 0.25) < 0.03


def test_a_rejected_actor_leaves_its_episodes_to_practice():
    gate = make(vla=0.5)
    world = World(gate, by_number([False] * 20, (4, 4)), 8)
    for _ in range(4):
        world.step()
    assert not gate.on_trial and gate.candidates == 1
    world.step()
    assert gate.on_trial and gate.candidates == 2 and (world.played[-1] == ACTOR).all()
    gate.abandon_trial()
    world.step()  # a third one, whose episodes have not begun
    assert gate.candidates == 3 and not (world.played[-1] == ACTOR).any() and not gate.trials.trials


def test_an_actor_is_rejected_as_soon_as_it_cannot_pass():
    gate = make(vla=0.5)
    needed = min(k for k in range(9) if beyond_chance(k, 8, 16, 32, 0.1))
    world = World(gate, by_number([False] * (9 - needed) + [True] * 30, (1, 1)))
    for failures in range(9 - needed):
        assert failures == 0 or (gate.on_trial and gate.candidates == 1)
        world.step()
    assert not gate.on_trial and not gate.screened


def test_broken_simulators_and_takeovers_are_replaced():
    gate = make(vla=0.0)
    world = World(gate, lambda player, number: (True, 2))
    world.step()
    world.step(broken=True)
    world.step()
    assert len(gate.trials.trials) == 1
    world.step(intervention=np.array([False, True]))  # an expert has helped
    assert not gate.trials.trials and not gate.recent
    for number in range(1, 9):
        world.step()
        world.step(intervention=np.array([False, False]))
        assert len(gate.recent) == number
    assert gate.screened and gate.on_trial
    world.step()
    world.dones[:] = True  # the script's episode is over with its simulator
    gate.step(world.policy, [chunk(broken=True)], np.array([True]))
    world.until(lambda: gate.approvals, limit=33)
    assert gate.best.trials.count() == (16, 16)


def test_restarts_do_not_favour_short_episodes():
    """Environments are reset every 30 vector steps: whatever runs is cut off, which are mostly failures."""
    np.random.seed(0)
    shares = []
    for _ in range(40):
        gate = PolicyGate(share=0.5, window=16)
        world = World(gate, lambda player, number: (True, 2) if np.random.random() < 0.5 else (False, 20), 32)
        for number in range(200):
            if number % 30 == 29:
                gate.restart(32)
                world.restart()
            world.step(warm_up=number < 16)
            if gate.baseline.complete:
                break
        assert gate.baseline.complete
        shares.append(gate.baseline.count()[0] / 64)
    assert abs(np.mean(shares) - 0.5) < 0.03


def test_a_restart_looks_back_as_far_as_episodes_can_be_long():
    """However long those that run have lasted: they are short after successes, which would then count more often."""
    gate = PolicyGate(share=0.5, window=16)
    world = World(gate, lambda player, number: (False, 10) if number == 0 else (True, 2))
    for _ in range(15):
        world.step(warm_up=True)
    assert [trial.start for trial in gate.baseline.trials] == [0, 10, 12, 14]
    gate.restart(1)
    assert [trial.start for trial in gate.baseline.trials] == [0]


def test_an_episode_cut_off_by_a_restart_does_not_count():
    gate = make(vla=0.0)
    world = World(gate, lambda player, number: (True, 3), 2)
    world.step()
    gate.restart(2)
    world.restart()
    assert not gate.trials.trials and gate.on_trial and gate.baseline.complete
    world.until(lambda: gate.recent)
    assert [trial.steps for trial in gate.trials.ended()] == [24, 24]


# ---------------------------------------------------------------- runs and files


def test_a_new_run_asks_the_vla_again():
    gate = make(vla=0.0)
    world = World(gate, lambda player, number: (True, 3), 2)
    world.step()
    gate.contenders = [Contender(5, {"x": th.ones(1)}, of(16, 16), of(9, 20)), Contender(3, {}, of(12, 16))]
    gate.approvals = 1
    gate.begin()
    gate.restart(2)
    assert not gate.on_trial and not gate.baseline.trials
    assert [(one.number, one.parameters) for one in gate.contenders] == [(5, {"x": th.ones(1)})]
    assert not gate.best.trials.trials and not gate.best.states.trials
    assert gate.approvals == 1
    world.restart()
    world.step(warm_up=True)
    world.step()
    assert (world.played[-1] == VLA).all() and len(gate.baseline.trials) == 2


def before_training(successes: int, n: int) -> Sample:
    return Sample(n, [Trial(-1, 24, 0, number < successes) for number in range(n)])


@pytest.mark.parametrize("known", [0, 9, 16, 20])
def test_the_vla_plays_what_is_missing_of_its_baseline(known):
    """No more of its episodes are noise-free than that, and the first trial begins when they have ended."""
    np.random.seed(0)
    gate = PolicyGate(share=1.0, window=4)  # a baseline of 16
    world = World(gate, lambda player, number: (True, 3), 2)
    gate.know_vla(before_training(1, 3))
    gate.know_vla(before_training(5, known))  # in place of the former
    world.until(lambda: gate.on_trial)
    assert world.started[VLA] == max(16 - known, 0) and len(world.played) - 1 == 3 * -(-max(16 - known, 0) // 2)
    assert gate.baseline.count() == (min(5, known) + max(16 - known, 0), max(16, known))


def test_known_episodes_survive_restarts_and_count_in_one_run():
    gate = PolicyGate(share=1.0, window=4)
    world = World(gate, lambda player, number: (True, 3), 2)
    gate.know_vla(before_training(5, 9))
    for _ in range(2):
        world.step(warm_up=True)
    gate.restart(2)  # both running episodes are lost, the known ones are not
    world.restart()
    assert gate.baseline.count() == (5, 9)
    again = PolicyGate(window=4)
    again.load_state_dict(json.loads(json.dumps(gate.state_dict())))
    assert again.baseline.count() == (5, 9)
    gate.begin()  # learn() begins a run
    assert gate.baseline.count() == (5, 9)
    gate.begin()  # the next run may play something else
    assert not gate.baseline.trials and gate.baseline.size == 16
    # a run that has counted episodes of its own goes on with them; the next one has what is known
    world.restart()
    world.until(lambda: gate.baseline.count()[1] >= 2)
    gate.know_vla(before_training(0, 12))
    assert gate.baseline.count()[0] >= 2
    gate.begin()
    assert gate.baseline.count() == (0, 12)


@pytest.mark.parametrize("after", [10, 60, 100, 250])
def test_state_goes_on_in_another_gate(after):
    def world_of(gate):
        return World(gate, lambda player, number: (number % 3 > 0, 2 + number % 4), 4)

    np.random.seed(after)
    world = world_of(PolicyGate(window=4))
    for number in range(after):
        world.step(warm_up=number < 20)
    gate = world.gate
    state = json.loads(json.dumps(gate.state_dict()))
    again = PolicyGate(window=4)
    world_of(again).step(warm_up=True)
    again.load_state_dict(state)
    assert (again.player == "").all() and not again.noise_free.any()  # its running episodes are over
    assert again.state_dict() == gate.state_dict()
    assert (len(gate.baseline.trials) > 0) and (after < 100 or gate.on_trial)
    ends = []
    for one in (copy.deepcopy(gate), pickle.loads(pickle.dumps(gate)), again):
        np.random.seed(0)
        world = world_of(one)  # new episodes, as after a checkpoint
        assert one.state_dict() == gate.state_dict()
        for _ in range(200):
            world.step()
        ends.append((one.state_dict(), np.concatenate(world.played)))
    for state, played in ends[1:]:
        assert state == ends[0][0] and np.array_equal(played, ends[0][1])
    assert again.recent == deque(ends[0][0]["recent"], maxlen=4)


def test_an_open_baseline_is_told_once():
    gate = PolicyGate(share=0.5, window=16)
    world = World(gate, lambda player, number: (True, 3), 2)
    for _ in range(30):
        world.step(warm_up=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gate.warn_of_open_baseline()  # nobody has practiced yet
    world.step()
    with pytest.warns(UserWarning, match=r"No actor has been on trial.*: 20 noise-free episodes .* 64 are needed"):
        gate.warn_of_open_baseline()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gate.warn_of_open_baseline()
        gate.baseline, gate._warned = of(3, 64), False
        gate.warn_of_open_baseline()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"share": 1.5}, r"gate.share must be in \(0, 1\]"),
        ({"share": 0.0}, "gate.share"),
        ({"window": 0}, "gate.window must be an integer >= 1"),
        ({"level": 0.0}, r"gate.level must be in \(0, 1\)"),
        ({"level": 1}, "gate.level"),
        ({"level": "low"}, "gate.level"),
        ({"window": 1, "level": 0.05}, "gate.window=1 is too small for gate.level=0.05: .* Raise gate.window"),
        ({"window": 2, "level": 0.001}, "gate.window=2 is too small"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        PolicyGate(**settings)
    PolicyGate(window=2)


# ---------------------------------------------------------------- auditions


def states(fixed: int, broken: int, both: int = 2, neither: int = 2) -> tuple[Sample, Sample]:
    """The VLA's episodes on selection states, and an actor's."""
    outcomes = [(False, True)] * fixed + [(True, False)] * broken + [(True, True)] * both + [(False, False)] * neither
    vla, actor = (
        Sample(len(outcomes), [Trial(at, 20, 0, pair[who]) for at, pair in enumerate(outcomes)]) for who in (0, 1)
    )
    return vla, actor


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize(("fixed", "broken"), [(4, 0), (3, 0), (6, 1), (7, 2), (6, 2), (9, 4)])
def test_auditions_are_tested_in_pairs(fixed, broken, before):
    """However many have failed before."""
    gate = make()
    vla, actor = states(3, 3)
    gate.use_states(vla)
    for _ in range(before):
        assert gate.audition(Copies(), lambda: "played", lambda result: actor) == ("played", [])
    n = fixed + broken
    p = sum(comb(n, i) for i in range(fixed, n + 1)) / 2**n
    world = World(gate, lambda player, number: (True, 3))
    world.step()
    assert gate.on_trial
    vla, actor = states(fixed, broken)
    gate.use_states(vla)
    passed = gate.audition(Copies(), lambda: "played", lambda result: actor)[1] == ["1"]
    assert passed is (p <= 0.1)
    assert gate.approvals == passed and gate.on_trial is not passed
    if passed:  # the trials of the actor on trial are another's
        assert not gate.best.trials.trials and gate.best.states is actor


class Sine(th.nn.Module):
    """Some actor that is not RLT's."""

    def __init__(self, size: float):
        super().__init__()
        self.size = th.nn.Parameter(th.tensor(size))

    def forward(self, observation):
        return self.size * th.sin(observation)


class OtherPolicy:
    starts_at_vla = True

    def __init__(self):
        self.training_actor, self.actor_on_trial, self.actor_deployed = Sine(0.3), Sine(0.0), Sine(0.0)

    def start_trial(self):
        self.actor_on_trial.load_state_dict(self.training_actor.state_dict())

    def deploy(self, parameters):
        self.actor_deployed.load_state_dict(parameters)


def test_any_policy_with_an_actor_can_be_gated():
    """An actor with flat actions (B, 2), two environments; the actor on trial stays as it is."""
    gate, policy = make(vla=0.0, window=2), OtherPolicy()
    gate.restart(2)
    observation, chunks, reference = th.ones(2, 2), np.zeros((2, 2), np.float32), np.ones((2, 2), np.float32)
    waiting = gate.choose(policy, observation, chunks, reference, ready=False)
    assert not waiting.any() and not gate.on_trial
    gate.restart(2)
    chosen = gate.choose(policy, observation, chunks, reference, ready=True)
    assert chosen == pytest.approx(0.3 * np.sin(1.0)) and gate.candidates == 1
    policy.training_actor.size.data.fill_(9.0)
    assert np.array_equal(gate.choose(policy, observation, chunks, reference, ready=True), chosen)
    assert gate.plays_vla(policy)
    for _ in range(3):
        gate.choose(policy, observation, chunks, reference, ready=True)
        gate.step(policy, [chunk(success=True)] * 2, np.array([True, True]))
    assert policy.actor_deployed.size.item() == pytest.approx(0.3) and not gate.plays_vla(policy)
