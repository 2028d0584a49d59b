"""Residual SAC: what is played, densities against NumPy, the warm-up, runs that repeat."""

import itertools

import numpy as np
import pytest
import torch as th
from rlt_models import make_venv
from run_helpers import same

from rlt_sb3.residual_sac import ResidualSAC

SMALL = {
    "policy_kwargs": {"net_arch": [16]}, "learning_starts": 20, "batch_size": 16, "critic_warmup_updates": 5,
    "utd": 1.0, "device": "cpu", "seed": 0,
}  # fmt: skip


def made(**changes):
    settings = SMALL | changes
    settings["policy_kwargs"] = SMALL["policy_kwargs"] | changes.get("policy_kwargs", {})
    return ResidualSAC("MultiInputPolicy", make_venv(), **settings)


def test_untrained_policy_plays_the_reference():
    model = made()
    obs = model.env.reset()
    assert np.array_equal(model.predict(obs, deterministic=True)[0], obs["vla_ref"])
    assert np.abs(model.predict(obs)[0] - obs["vla_ref"]).max() > 0


@pytest.mark.parametrize("parts", [1, 2])
def test_chunk_and_density(parts):
    scale = 0.2
    model = made(policy_kwargs={"parts": parts, "scale": scale})
    with th.no_grad():
        for parameter in model.actor.parameters():
            parameter.add_(0.1 * th.randn_like(parameter))
    obs = model.env.reset()
    obs["vla_ref"] = (0.5 * obs["vla_ref"]).astype(np.float32)  # no number is clipped
    tensors, _ = model.policy.obs_to_tensor(obs)
    with th.no_grad():
        mean, log_std, _ = (
            x.numpy() if isinstance(x, th.Tensor) else x for x in model.actor.get_action_dist_params(tensors)
        )
        actions, log_prob = model.actor.action_log_prob(tensors)
    blocks = (actions.numpy().reshape(2, 4, 7) - obs["vla_ref"]).reshape(2, parts, 4 // parts, 7)
    assert np.ptp(blocks, axis=2).max() < 1e-6
    squashed = blocks[:, :, 0].reshape(2, -1).astype(np.float64) / scale
    u, std = np.arctanh(squashed), np.exp(log_std)
    expected = (-0.5 * ((u - mean) / std) ** 2 - np.log(std) - 0.5 * np.log(2 * np.pi) - np.log(1 - squashed**2)).sum(1)
    np.testing.assert_allclose(log_prob.numpy(), expected, rtol=1e-3, atol=2e-3)
    held = np.tanh(mean).reshape(2, parts, 7).repeat(4 // parts, axis=1)
    played = model.predict(obs, deterministic=True)[0]
    np.testing.assert_allclose(played, obs["vla_ref"] + scale * held, atol=1e-6)
    assert model.target_entropy == -7.0 * parts


def test_warm_up_plays_the_vla_and_trains_critics_alone():
    model = made(learning_starts=20)
    model.learn(20)
    rows = model.replay_buffer.storage
    stored = rows.is_row(np.arange(rows.size))
    assert stored.sum() == 20 and np.array_equal(rows.actions[stored], rows.obs["vla_ref"][stored])
    actor, critic = (
        {name: value.clone() for name, value in module.state_dict().items()} for module in (model.actor, model.critic)
    )
    coefficient = model.log_ent_coef.clone()
    model.train(5, 16)
    assert same(actor, model.actor.state_dict()) and not same(critic, model.critic.state_dict())
    assert th.equal(coefficient, model.log_ent_coef)
    model.train(5, 16)
    assert not same(actor, model.actor.state_dict()) and not th.equal(coefficient, model.log_ent_coef)
    model.learn(20, reset_num_timesteps=False)
    stored = rows.is_row(np.arange(rows.size))
    assert np.abs(rows.actions[stored] - rows.obs["vla_ref"][stored])[20:].max() > 0


def test_an_interrupt_while_the_critics_learn_alone_lets_the_actor_learn_later(monkeypatch):
    model = made()
    coefficient = model.log_ent_coef.item()
    original, calls = model.replay_buffer.sample, itertools.count()

    def interrupted(*args, **kwargs):
        if next(calls) == 3:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(model.replay_buffer, "sample", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.learn(40)
    assert all(parameter.requires_grad for parameter in model.actor.parameters())
    assert model.log_ent_coef.item() == coefficient
    actor = {name: value.clone() for name, value in model.actor.state_dict().items()}
    model.learn(40, reset_num_timesteps=False)
    assert not same(actor, model.actor.state_dict())


def test_trained_twice_and_saved(tmp_path):
    models = [made().learn(60) for _ in range(2)]
    assert same(*(model.get_parameters() for model in models)) and models[0]._n_updates > 30
    models[0].save(tmp_path / "m.zip")
    loaded, obs = ResidualSAC.load(tmp_path / "m.zip", device="cpu"), models[0].env.reset()
    assert np.array_equal(*(model.predict(obs, deterministic=True)[0] for model in (models[0], loaded)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"utd": 0.0}, "utd must be > 0, got 0.0"),
        ({"gamma": 1.5}, r"gamma must be in \[0, 1\]"),
        ({"policy_kwargs": {"parts": 3}}, "parts must be a divisor of the chunk's 4 steps, got 3"),
        ({"policy_kwargs": {"scale": 0.0}}, "scale must be > 0, got 0.0"),
    ],
)
def test_refuses(settings, message):
    with pytest.raises(ValueError, match=message):
        made(**settings)
