"""The deployment gate: noise-free training episodes decide which actor is deployed."""

import json
from collections import deque

import numpy as np
import pytest
import torch as th
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.noise import NormalActionNoise

from rlt_gym.testing import FakeRLTokenVectorEnv
from rlt_sb3 import RLT, GymnasiumVecEnv
from rlt_sb3.callbacks.budget import BudgetCallback
from rlt_sb3.callbacks.selection import SelectionCallback
from rlt_sb3.common.chunk_outcome import ChunkOutcome
from rlt_sb3.common.policy_gate import PolicyGate
from rlt_sb3.evaluation.results import Evaluation, StateResult

pytestmark = pytest.mark.usefixtures("one_thread")


class Copies:
    """A policy of which the gate only sees that copies are made."""

    class Actor:
        def state_dict(self):
            return {}

    actor_on_trial = Actor()

    def start_trial(self):
        pass

    def deploy(self, parameters):
        pass


POLICY = Copies()


def chunk(steps: int = 1, **told) -> ChunkOutcome:
    return ChunkOutcome(steps, np.zeros(8), np.zeros((8, 7)), **told)


def played(gate: PolicyGate, outcomes, dones, ready: bool) -> bool:
    """One vector step; whether an actor was deployed."""
    before = gate.approvals
    gate.step(POLICY, outcomes, np.array(dones), ready)
    return gate.approvals > before


def episode(gate: PolicyGate, success: bool, steps: int = 3, by_actor: bool = True) -> bool:
    """One episode of the only environment, with the next actor put on trial as RLT does."""
    if by_actor and not gate.on_trial:
        gate.start_trial(POLICY)
    for _ in range(steps - 1):
        assert not played(gate, [chunk()], [False], by_actor)
    return played(gate, [chunk(success=success)], [True], by_actor)


def test_actor_is_approved_when_it_beats_the_vla_beyond_chance():
    gate = PolicyGate(share=1.0, window=8)
    for success in [True, False] * 10:
        episode(gate, success, by_actor=False)
    # At least 53 % for 7 of 8 (Wilson), above the VLA's 50 %; 6 of 8 leaves 41 %
    assert [episode(gate, success) for success in [True] * 7 + [False]] == [False] * 7 + [True]
    assert (gate.approvals, gate.candidates, gate.on_trial) == (1, 1, False)


def test_an_actor_is_rejected_as_soon_as_it_cannot_be_approved():
    gate = PolicyGate(share=1.0, window=8)
    for success in [True, False] * 10:
        episode(gate, success, by_actor=False)
    for success, still_open in [(True, True), (False, True), (True, True), (False, False)]:
        assert not episode(gate, success)
        assert gate.on_trial == still_open
    # the failures were another actor's: the next one has eight gate of its own
    assert [episode(gate, True) for _ in range(8)] == [False] * 7 + [True]
    assert (gate.approvals, gate.candidates) == (1, 2)


@pytest.mark.parametrize(
    ("successes", "steps", "approved"),
    [
        ([True] * 8, [2, 3] * 4, True),
        ([True] * 7 + [False], [2, 3] * 4, True),  # 7 of 8 are not fewer than the VLA's 75 %
        ([True] * 7 + [False], [4, 5] * 3 + [4, 1], False),  # a failure's steps do not count
        ([True] * 5 + [False] * 3, [2, 3] * 4, False),
        ([True] * 8, [4, 5] * 4, False),
        ([True] * 8, [4, 5, 3, 4, 5, 3, 4, 5], False),  # quicker, but not beyond chance: p = 0.3
    ],
)
def test_nearly_perfect_vla_is_replaced_by_a_quicker_actor(successes, steps, approved):
    gate = PolicyGate(share=1.0, window=8)
    for number, success in enumerate([True, True, True, False] * 5):
        episode(gate, success, by_actor=False, steps=4 + number % 2)
    # 8 of 8 leave 68 % (Wilson), not above the VLA's 75 %: successes alone cannot tell
    outcomes = [episode(gate, *both) for both in zip(successes, steps, strict=True)]
    assert outcomes == [False] * 7 + [approved]


def test_control_steps_are_counted():
    gate = PolicyGate(share=1.0, window=8)
    for done in (False, True, True):
        played(gate, [chunk(5, success=True)], [done], False)
    assert gate.vla_steps == [10, 5]


def test_noisy_and_mixed_episodes_do_not_count():
    gate = PolicyGate(share=1.0, window=1)
    episode(gate, False, by_actor=False)  # a VLA that never succeeds: one success is better
    gate.start_trial(POLICY)
    gate.noise_free[:] = False
    assert not episode(gate, True)
    played(gate, [chunk()], [False], False)  # the VLA began, the actor goes on
    assert not episode(gate, True)
    played(gate, [chunk()], [False], True)
    gate.start_trial(POLICY)  # another actor goes on
    assert not episode(gate, True)
    assert not gate.recent and episode(gate, True)


def test_broken_simulators_and_takeovers_do_not_count():
    gate = PolicyGate(share=1.0, window=1)
    gate.vla = [False]
    gate.start_trial(POLICY)
    played(gate, [chunk(broken=True)], [True], True)
    played(gate, [chunk(intervention=np.array([False, True]))], [False], True)  # an expert has helped
    played(gate, [chunk(intervention=np.array([False, False]), success=True)], [True], True)
    assert not gate.recent and episode(gate, True)


def test_an_episode_cut_off_by_a_restart_does_not_count():
    gate = PolicyGate(share=1.0, window=1)
    gate.vla = [False]
    played(gate, [chunk()], [False], False)
    gate.restart(1)
    gate.start_trial(POLICY)
    assert episode(gate, True)  # not "both": the VLA's part was in another episode


def test_nobody_beats_a_vla_that_has_not_played():
    gate = PolicyGate(share=1.0, window=2)
    assert not any(episode(gate, True) for _ in range(4))
    episode(gate, False, by_actor=False)
    assert [episode(gate, True) for _ in range(2)] == [False, True]


def test_share_of_quiet_episodes():
    np.random.seed(0)
    gate, quiet = PolicyGate(share=0.25, window=10), []
    gate.restart(4)
    for _ in range(1000):
        quiet += gate.noise_free.tolist()
        played(gate, [chunk()] * 4, [True] * 4, True)
    assert abs(np.mean(quiet) - 0.25) < 0.03
    gate.play_vla()
    assert gate.noise_free.all()


def test_state_goes_on_in_another_gate():
    gate = PolicyGate(share=1.0, window=3)
    for success in (True, False):
        episode(gate, success, by_actor=False)
    episode(gate, True)
    again = PolicyGate(share=1.0, window=3)
    again.load_state_dict(json.loads(json.dumps(gate.state_dict())))
    assert again.state_dict() == gate.state_dict() and again.vla_rate == 0.5 and again.on_trial
    assert [episode(g, True) for _ in range(2) for g in (gate, again)] == [False] * 4  # 3 of 3 leave 44 %
    assert again.state_dict() == gate.state_dict() and again.recent == gate.recent == deque([True] * 3, maxlen=3)


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
    """An actor with flat actions (B, 2), two environments, the second one without noise."""
    gate, policy = PolicyGate(share=1.0, window=2), OtherPolicy()
    gate.restart(2)
    gate.noise_free[:] = [False, True]
    gate.vla = [False] * 10
    observation, chunks = th.ones(2, 2), np.zeros((2, 2), np.float32)
    waiting = gate.choose(policy, observation, chunks, ready=False)
    assert not waiting.any() and not gate.on_trial
    chosen = gate.choose(policy, observation, chunks, ready=True)
    assert not chosen[0].any() and chosen[1] == pytest.approx(0.3 * np.sin(1.0)) and gate.candidates == 1
    policy.training_actor.size.data.fill_(9.0)
    assert np.array_equal(gate.choose(policy, observation, chunks, ready=True), chosen)
    assert gate.plays_vla(policy)
    for _ in range(2):
        gate.noise_free[:] = [False, True]
        gate.step(policy, [chunk(), chunk(success=True)], np.array([False, True]), ready=True)
    assert policy.actor_deployed.size.item() == pytest.approx(0.3) and not gate.plays_vla(policy)


class Watch(BaseCallback):
    """What is handed out, and what is on trial, on fixed observations."""

    def __init__(self, obs):
        super().__init__()
        self.observations, self.handed_out, self.tried, self.approvals, self.candidates = obs, [], [], [], []

    def _on_step(self) -> bool:
        self.model.gate.vla = [False]  # a VLA that never succeeds, so that one success is better
        self.handed_out.append(self.model.predict(self.observations)[0])
        self.tried.append(chunks(self.model.policy.actor_on_trial, self.model, self.observations))
        self.approvals.append(self.model.gate.approvals)
        self.candidates.append(self.model.gate.candidates)
        return True


def chunks(actor, model: RLT, obs) -> np.ndarray:
    with th.no_grad():
        return actor(model.policy.obs_to_tensor(obs)[0]).numpy().reshape(obs["vla_ref"].shape)


def make(**kwargs) -> RLT:
    venv = GymnasiumVecEnv(FakeRLTokenVectorEnv(2))
    settings = dict(learning_starts=20, critic_warmup_updates=4, batch_size=32, policy_kwargs=dict(net_arch=[32, 32]))
    return RLT("MultiInputPolicy", venv, seed=0, device="cpu", **(settings | kwargs))


def test_predict_changes_with_approvals_only():
    model = make(gate={"share": 0.5, "window": 1})
    obs = model.env.reset()
    watch = Watch(obs)
    model.learn(300, callback=watch)
    assert not np.array_equal(chunks(model.policy.training_actor, model, obs), obs["vla_ref"])
    first = int(np.argmax(np.array(watch.approvals) > 0))
    assert first > 0
    for chunk in watch.handed_out[:first]:
        assert np.array_equal(chunk, obs["vla_ref"])
    for number in range(1, len(watch.approvals)):
        handed_out, tried = watch.handed_out[number], watch.tried[number]
        if watch.approvals[number] > watch.approvals[number - 1]:
            # the very actor that was on trial when the episode ended; the next one has been nominated since
            assert np.array_equal(handed_out, watch.tried[number - 1])
        else:
            assert np.array_equal(handed_out, watch.handed_out[number - 1])
        if watch.candidates[number] == watch.candidates[number - 1]:
            assert np.array_equal(tried, watch.tried[number - 1])  # it does not move while it is tried
    assert watch.approvals[-1] >= 2


def test_trials_are_played_by_the_actor_on_trial():
    model = make(gate={"share": 0.5, "window": 4})
    model.learn(300)
    model.gate.start_trial(model.policy)
    with th.no_grad():  # the actor that practises goes on meanwhile
        model.policy.training_actor.mu[-1].bias.add_(0.01)
    model.gate.noise_free[:] = [False, True]
    further = NormalActionNoise(np.zeros((4, 7)), np.full((4, 7), 0.1))
    actions, _ = model._sample_action(model.learning_starts, further, n_envs=2)
    on_trial = chunks(model.policy.actor_on_trial, model, model._last_obs)
    assert np.array_equal(actions[1], np.clip(on_trial[1], -1, 1))
    assert not np.array_equal(on_trial[1], chunks(model.policy.training_actor, model, model._last_obs)[1])


def test_without_trials_the_present_actor_is_handed_out():
    model = make()
    model.learn(100)
    obs = model.env.reset()
    candidate = chunks(model.policy.training_actor, model, obs)
    assert np.array_equal(model.predict(obs)[0], candidate)
    assert not np.array_equal(candidate, obs["vla_ref"])


def test_what_was_approved_survives_saving(tmp_path):
    model = make(gate={"share": 0.5, "window": 4})
    model.learn(300)
    model.gate.start_trial(model.policy)
    model.gate.deploy(model.policy)
    obs = model.env.reset()
    model.save(tmp_path / "model.zip")
    loaded = RLT.load(tmp_path / "model.zip", device="cpu")
    assert np.array_equal(loaded.predict(obs)[0], model.predict(obs)[0])
    assert loaded.gate.state_dict() == model.gate.state_dict() and loaded.gate.approvals > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gate": {"share": 1.5}}, r"gate.share must be in \(0, 1\]"),
        ({"gate": {"share": 0.0}}, "gate.share"),
        ({"gate": {"window": 0}}, "gate.window must be an integer >= 1"),
        ({"gate": {}, "learning_starts": 0}, "learning_starts must be > 0 with a gate"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_a_loaded_model_keeps_its_gate(tmp_path):
    make().save(tmp_path / "model.zip")
    with pytest.raises(ValueError, match=r"gate cannot be changed by load\(\)"):
        RLT.load(tmp_path / "model.zip", gate={"share": 0.5})


# ---------------------------------------------------------------- selection states


def outcome(successes: int) -> Evaluation:
    return Evaluation("x", "selection", [StateResult(p, 0, p, p < successes, 5, 1) for p in range(20)])


def selection(model: RLT, evaluate, tmp_path, **kwargs) -> SelectionCallback:
    callback = SelectionCallback(evaluate, 20, outcome(10), BudgetCallback(100), tmp_path / "best.zip", **kwargs)
    callback.init_callback(model)
    return callback


def test_selection_plays_practicing_actor_until_one_is_approved(tmp_path):
    model = make(gate={"share": 0.5, "window": 50})
    model.learn(100)
    obs = model.env.reset()
    results, played = iter([outcome(14), outcome(15), outcome(3)]), []

    def evaluate(player):
        played.append(player.predict(obs)[0])
        return next(results)

    callback = selection(model, evaluate, tmp_path)
    practising = chunks(model.policy.training_actor, model, obs)
    assert not np.array_equal(practising, obs["vla_ref"])
    # 14 of 20: at least 48 % (Wilson), not above the VLA's 50 %
    assert callback.run().evaluation == outcome(10)
    assert np.array_equal(played[-1], practising) and np.array_equal(model.predict(obs)[0], obs["vla_ref"])
    # 15 of 20: at least 53 %
    assert callback.run().evaluation == outcome(15)
    assert np.array_equal(model.predict(obs)[0], practising) and model.gate.approvals == 1
    assert np.array_equal(RLT.load(tmp_path / "best.zip", device="cpu").predict(obs)[0], practising)
    model.policy.training_actor.mu[-1].bias.data.add_(0.1)
    assert callback.run().evaluation == outcome(3)  # of what is handed out, from now on
    assert np.array_equal(played[-1], practising)


def test_an_untrained_direct_actor_is_not_taken_for_the_vla(tmp_path):
    model = make(gate={"share": 0.5}, policy_kwargs={"actor_mode": "direct"})
    model.learn(30)
    callback = selection(model, lambda player: outcome(3), tmp_path)
    assert callback.run().evaluation == outcome(3) and model.gate.none_deployed


def test_interrupt_while_practicing_actor_plays_deploys_nothing(tmp_path):
    model = make(gate={"share": 0.5, "window": 50})
    model.learn(100)
    obs = model.env.reset()

    def interrupted(player):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        selection(model, interrupted, tmp_path).run()
    assert np.array_equal(model.predict(obs)[0], obs["vla_ref"]) and model.gate.none_deployed


def test_networks_that_are_put_back_end_the_running_trial(tmp_path):
    model = make(gate={"share": 0.5, "window": 50})
    model.gate.approvals = 1
    model.learn(100)
    results = iter([outcome(18), outcome(1)])
    callback = selection(model, lambda player: next(results), tmp_path, guard="restore")
    callback.run()
    model.gate.start_trial(model.policy)
    callback.run()
    assert not model.gate.on_trial
