"""What RLT deploys, and what plays its trials."""

import numpy as np
import pytest
import torch as th
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.noise import NormalActionNoise

from rlt_gym.testing import FakeRLTokenVectorEnv
from rlt_sb3 import RLT, GymnasiumVecEnv
from rlt_sb3.common.trials import Sample, Trial


class Watch(BaseCallback):
    """Chunks of the deployed actor and of the actor on trial, on fixed observations."""

    def __init__(self, obs):
        super().__init__()
        self.observations, self.handed_out, self.tried, self.approvals, self.candidates = obs, [], [], [], []

    def _on_step(self) -> bool:
        # a VLA that never succeeds, so that 2 of 4 successes are better
        self.model.gate.baseline = Sample(8, [Trial(0, 16, 0, False) for _ in range(8)])
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
    model = make(gate={"share": 1.0, "window": 2, "level": 0.9})
    obs = model.env.reset()
    watch = Watch(obs)
    model.learn(500, callback=watch)
    assert not np.array_equal(chunks(model.policy.training_actor, model, obs), obs["vla_ref"])
    first = int(np.argmax(np.array(watch.approvals) > 0))
    assert first > 0
    for chunk in watch.handed_out[:first]:
        assert np.array_equal(chunk, obs["vla_ref"])
    for number in range(1, len(watch.approvals)):
        handed_out, tried = watch.handed_out[number], watch.tried[number]
        if watch.approvals[number] > watch.approvals[number - 1]:
            # the very actor that was on trial when the episode ended; the next one has been put on trial since
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
    with th.no_grad():  # the actor that practices goes on meanwhile
        model.policy.training_actor.mu[-1].bias.add_(0.01)
    model.gate.player[:] = ["", "actor"]
    model.gate._fresh[:] = False
    further = NormalActionNoise(np.zeros((4, 7)), np.full((4, 7), 0.1))
    actions, _ = model._sample_action(model.learning_starts, further, n_envs=2)
    on_trial = chunks(model.policy.actor_on_trial, model, model._last_obs)
    assert np.array_equal(actions[1], np.clip(on_trial[1], -1, 1))
    assert not np.array_equal(on_trial[1], chunks(model.policy.training_actor, model, model._last_obs)[1])


def test_without_trials_the_present_actor_is_handed_out():
    model = make(gate=False)
    model.learn(100)
    obs = model.env.reset()
    candidate = chunks(model.policy.training_actor, model, obs)
    assert np.array_equal(model.predict(obs)[0], candidate)
    assert not np.array_equal(candidate, obs["vla_ref"])


def test_what_was_approved_survives_saving(tmp_path):
    model = make(gate={"share": 0.5, "window": 4})
    model.learn(300)
    model.gate.start_trial(model.policy)
    model.gate.pass_trial(model.policy)
    obs = model.env.reset()
    model.save(tmp_path / "model.zip")
    loaded = RLT.load(tmp_path / "model.zip", device="cpu")
    assert np.array_equal(loaded.predict(obs)[0], model.predict(obs)[0])
    assert loaded.gate.state_dict() == model.gate.state_dict() and loaded.gate.approvals > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gate": {"share": 1.5}}, r"gate.share must be in \(0, 1\]"),
        ({"gate": {"window": 1, "level": 0.05}}, "gate.window=1 is too small"),
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
