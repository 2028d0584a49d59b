"""Trials: noise-free training episodes decide which actor is handed out."""

import numpy as np
import pytest
import torch as th
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.noise import NormalActionNoise

from rlt_gym.testing import FakeRLTokenVectorEnv
from rlt_sb3 import RLT, GymnasiumVecEnv
from rlt_sb3.callbacks.budget import BudgetCallback
from rlt_sb3.callbacks.selection import SelectionCallback
from rlt_sb3.evaluation.results import Evaluation, StateResult
from rlt_sb3.rlt.trials import Trials

pytestmark = pytest.mark.usefixtures("one_thread")


def episode(trials: Trials, success: bool, steps: int = 3, by_actor: bool = True) -> bool:
    """One episode of the only environment, with the next actor put on trial as RLT does."""
    if by_actor and not trials.open:
        trials.begin()
    for _ in range(steps - 1):
        assert not trials.step(by_actor, np.array([False]), [{}], np.zeros(1))
    return trials.step(by_actor, np.array([True]), [{"is_success": success}], np.array([float(success)]))


def test_an_actor_is_approved_when_it_beats_the_vla_beyond_chance():
    trials = Trials(n_envs=1, share=1.0, window=8)
    for success in [True, False] * 10:
        episode(trials, success, by_actor=False)
    # At least 53 % for 7 of 8 (Wilson), above the VLA's 50 %; 6 of 8 leaves 41 %
    assert [episode(trials, success) for success in [True] * 7 + [False]] == [False] * 7 + [True]
    assert (trials.approvals, trials.candidates, trials.open) == (1, 1, False)


def test_an_actor_is_rejected_as_soon_as_it_cannot_be_approved():
    trials = Trials(n_envs=1, share=1.0, window=8)
    for success in [True, False] * 10:
        episode(trials, success, by_actor=False)
    for success, still_open in [(True, True), (False, True), (True, True), (False, False)]:
        assert not episode(trials, success)
        assert trials.open == still_open
    # the failures were another actor's: the next one has eight trials of its own
    assert [episode(trials, True) for _ in range(8)] == [False] * 7 + [True]
    assert (trials.approvals, trials.candidates) == (1, 2)


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
def test_a_vla_that_is_nearly_perfect_is_replaced_by_a_quicker_actor(successes, steps, approved):
    trials = Trials(n_envs=1, share=1.0, window=8)
    for number, success in enumerate([True, True, True, False] * 5):
        episode(trials, success, by_actor=False, steps=4 + number % 2)
    # 8 of 8 leave 68 % (Wilson), not above the VLA's 75 %: successes alone cannot tell
    outcomes = [episode(trials, *both) for both in zip(successes, steps, strict=True)]
    assert outcomes == [False] * 7 + [approved]


def test_control_steps_are_counted():
    trials = Trials(n_envs=1, share=1.0, window=8)
    for done in (False, True, True):
        trials.step(False, np.array([done]), [{"chunk_steps": 5, "is_success": True}], np.zeros(1))
    assert trials.vla_steps == [10, 5]


def test_noisy_and_mixed_episodes_do_not_count():
    trials = Trials(n_envs=1, share=1.0, window=1)
    episode(trials, False, by_actor=False)  # a VLA that never succeeds: one success is better
    trials.begin()
    trials.noisy[:] = True
    assert not episode(trials, True)
    trials.step(False, np.array([False]), [{}], np.zeros(1))  # the VLA began, the actor goes on
    assert not episode(trials, True)
    trials.step(True, np.array([False]), [{}], np.zeros(1))
    trials.begin()  # another actor goes on
    assert not episode(trials, True)
    assert not trials.recent and episode(trials, True)


def test_broken_simulators_and_takeovers_do_not_count():
    trials, done = Trials(n_envs=1, share=1.0, window=1), np.array([True])
    trials.vla = [False]
    trials.begin()
    trials.step(True, done, [{"worker_restarted": True, "is_success": False}], np.zeros(1))
    trials.step(True, ~done, [{"intervention": np.array([False, True])}], np.zeros(1))  # an expert has helped
    trials.step(True, done, [{"intervention": np.array([False, False]), "is_success": True}], np.ones(1))
    assert not trials.recent and episode(trials, True)


def test_an_episode_cut_off_by_a_restart_does_not_count():
    trials = Trials(n_envs=1, share=1.0, window=1)
    trials.vla = [False]
    trials.step(False, np.array([False]), [{}], np.zeros(1))
    trials.restart(1)
    trials.begin()
    assert episode(trials, True)  # not "both": the VLA's part was in another episode


def test_nobody_beats_a_vla_that_has_not_played():
    trials = Trials(n_envs=1, share=1.0, window=2)
    assert not any(episode(trials, True) for _ in range(4))
    episode(trials, False, by_actor=False)
    assert [episode(trials, True) for _ in range(2)] == [False, True]


def test_share_of_quiet_episodes():
    np.random.seed(0)
    trials, quiet = Trials(n_envs=4, share=0.25, window=10), []
    for _ in range(1000):
        quiet += (~trials.noisy).tolist()
        trials.step(True, np.ones(4, dtype=bool), [{}] * 4, np.zeros(4))
    assert abs(np.mean(quiet) - 0.25) < 0.03
    before = Trials(n_envs=4, share=0.0, window=10)
    before.no_noise()
    assert before.noisy.all()


class Watch(BaseCallback):
    """What is handed out, and what is on trial, on fixed observations."""

    def __init__(self, obs):
        super().__init__()
        self.observations, self.handed_out, self.tried, self.approvals, self.candidates = obs, [], [], [], []

    def _on_step(self) -> bool:
        self.model.trials.vla = [False]  # a VLA that never succeeds, so that one success is better
        self.handed_out.append(self.model.predict(self.observations)[0])
        self.tried.append(chunks(self.model.policy.actor_on_trial, self.model, self.observations))
        self.approvals.append(self.model.trials.approvals)
        self.candidates.append(self.model.trials.candidates)
        return True


def chunks(actor, model: RLT, obs) -> np.ndarray:
    with th.no_grad():
        return actor(model.policy.obs_to_tensor(obs)[0]).numpy().reshape(obs["vla_ref"].shape)


def make(**kwargs) -> RLT:
    venv = GymnasiumVecEnv(FakeRLTokenVectorEnv(2))
    settings = dict(learning_starts=20, critic_warmup_updates=4, batch_size=32, policy_kwargs=dict(net_arch=[32, 32]))
    return RLT("MultiInputPolicy", venv, seed=0, device="cpu", **(settings | kwargs))


def test_predict_is_the_vla_until_an_actor_is_approved_and_then_changes_with_approvals_only():
    model = make(trial_share=0.5, trial_window=1)
    obs = model.env.reset()
    watch = Watch(obs)
    model.learn(300, callback=watch)
    assert not np.array_equal(chunks(model.policy.candidate, model, obs), obs["vla_ref"])
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
    model = make(trial_share=0.5, trial_window=4)
    model.learn(300)
    model.policy.nominate()
    model.trials.begin()
    with th.no_grad():  # the actor that practises goes on meanwhile
        model.policy.candidate.mu[-1].bias.add_(0.01)
    model.trials.noisy[:] = [True, False]
    further = NormalActionNoise(np.zeros((4, 7)), np.full((4, 7), 0.1))
    actions, _ = model._sample_action(model.learning_starts, further, n_envs=2)
    on_trial = chunks(model.policy.actor_on_trial, model, model._last_obs)
    assert np.array_equal(actions[1], np.clip(on_trial[1], -1, 1))
    assert not np.array_equal(on_trial[1], chunks(model.policy.candidate, model, model._last_obs)[1])


def test_without_trials_the_present_actor_is_handed_out():
    model = make()
    model.learn(100)
    obs = model.env.reset()
    candidate = chunks(model.policy.candidate, model, obs)
    assert np.array_equal(model.predict(obs)[0], candidate)
    assert not np.array_equal(candidate, obs["vla_ref"])


def test_what_was_approved_survives_saving(tmp_path):
    model = make(trial_share=0.5, trial_window=4)
    model.learn(300)
    model.policy.nominate()
    model.policy.approve()
    obs = model.env.reset()
    model.save(tmp_path / "model.zip")
    loaded = RLT.load(tmp_path / "model.zip", device="cpu")
    assert np.array_equal(loaded.predict(obs)[0], model.predict(obs)[0])
    for name in ("vla", "vla_steps", "recent", "outcomes", "steps", "open", "candidates", "approvals"):
        assert getattr(loaded.trials, name) == getattr(model.trials, name)


@pytest.mark.parametrize(("name", "value"), [("trial_share", 1.5), ("trial_window", 0), ("learning_starts", 0)])
def test_bad_settings_are_named(name, value):
    with pytest.raises(ValueError, match=name):
        make(**{"trial_share": 0.5, name: value})


# ---------------------------------------------------------------- selection states


def outcome(successes: int) -> Evaluation:
    return Evaluation("x", "selection", [StateResult(p, 0, p, p < successes, 5, 1) for p in range(20)])


def selection(model: RLT, evaluate, tmp_path, **kwargs) -> SelectionCallback:
    callback = SelectionCallback(evaluate, 20, outcome(10), BudgetCallback(100), tmp_path / "best.zip", **kwargs)
    callback.init_callback(model)
    return callback


def test_the_actor_that_practises_plays_the_selection_states_until_one_is_handed_out(tmp_path):
    model = make(trial_share=0.5, trial_window=50)
    model.learn(100)
    obs = model.env.reset()
    results, played = iter([outcome(14), outcome(15), outcome(3)]), []

    def evaluate(player):
        played.append(player.predict(obs)[0])
        return next(results)

    callback = selection(model, evaluate, tmp_path)
    practising = chunks(model.policy.candidate, model, obs)
    assert not np.array_equal(practising, obs["vla_ref"])
    # 14 of 20: at least 48 % (Wilson), not above the VLA's 50 %
    assert callback.run().evaluation == outcome(10)
    assert np.array_equal(played[-1], practising) and np.array_equal(model.predict(obs)[0], obs["vla_ref"])
    # 15 of 20: at least 53 %
    assert callback.run().evaluation == outcome(15)
    assert np.array_equal(model.predict(obs)[0], practising) and model.trials.approvals == 1
    assert np.array_equal(RLT.load(tmp_path / "best.zip", device="cpu").predict(obs)[0], practising)
    model.policy.candidate.mu[-1].bias.data.add_(0.1)
    assert callback.run().evaluation == outcome(3)  # of what is handed out, from now on
    assert np.array_equal(played[-1], practising)


def test_an_untrained_direct_actor_is_not_taken_for_the_vla(tmp_path):
    model = make(trial_share=0.5, actor_mode="direct")
    model.learn(30)
    callback = selection(model, lambda player: outcome(3), tmp_path)
    assert callback.run().evaluation == outcome(3) and model.trials.none_approved


def test_an_interrupt_while_the_practising_actor_plays_hands_nothing_out(tmp_path):
    model = make(trial_share=0.5, trial_window=50)
    model.learn(100)
    obs = model.env.reset()

    def interrupted(player):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        selection(model, interrupted, tmp_path).run()
    assert np.array_equal(model.predict(obs)[0], obs["vla_ref"]) and model.trials.none_approved


def test_networks_that_are_put_back_end_the_running_trial(tmp_path):
    model = make(trial_share=0.5, trial_window=50)
    model.trials.approvals = 1
    model.learn(100)
    results = iter([outcome(18), outcome(1)])
    callback = selection(model, lambda player: next(results), tmp_path, guard="restore")
    callback.run()
    model.trials.begin()
    callback.run()
    assert not model.trials.open
