"""Stable-Baselines3's PPO with a policy around the VLA, against formulas written in NumPy."""

import numpy as np
import pytest
import torch as th
from rlt_models import make_venv
from run_helpers import same
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback

from rlt_sb3.ppo.policies import VLACenteredPolicy

SMALL = {"policy_kwargs": {"net_arch": [16]}, "n_steps": 8, "batch_size": 16, "n_epochs": 1, "device": "cpu", "seed": 0}


def made(**changes):
    settings = SMALL | changes
    settings["policy_kwargs"] = SMALL["policy_kwargs"] | changes.get("policy_kwargs", {})
    return PPO(VLACenteredPolicy, make_venv(), **settings)


def observations(batch, seed=0):
    rng = np.random.default_rng(seed)
    obs = {"z_rl": rng.normal(size=(batch, 16)), "proprio": rng.normal(size=(batch, 8))}
    obs["vla_ref"] = np.clip(1.5 * rng.normal(size=(batch, 4, 7)), -1, 1)
    return {key: value.astype(np.float32) for key, value in obs.items()}


def disturb(policy, seed=0):
    """Make every parameter different from where it began."""
    generator = th.Generator().manual_seed(seed)
    with th.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * th.randn(parameter.shape, generator=generator))


def features_of(policy, obs):
    """What the first layers see, and all weights, in float64."""
    z = obs["z_rl"].astype(np.float64)
    z = (z - z.mean(1, keepdims=True)) / np.sqrt(z.var(1, keepdims=True) + 1e-5)
    x = np.concatenate([z, obs["proprio"], obs["vla_ref"].reshape(len(z), -1)], axis=1)
    return x, {name: value.double().numpy() for name, value in policy.state_dict().items()}


def value_of(policy, obs):
    """The critic, layer by layer."""
    x, weights = features_of(policy, obs)
    x = np.tanh(x @ weights["mlp_extractor.value_net.0.weight"].T + weights["mlp_extractor.value_net.0.bias"])
    return (x @ weights["value_net.weight"].T + weights["value_net.bias"])[:, 0]


def hidden(policy, obs):
    """The actor's mean correction, layer by layer."""
    x, weights = features_of(policy, obs)
    x = np.tanh(x @ weights["mlp_extractor.policy_net.0.weight"].T + weights["mlp_extractor.policy_net.0.bias"])
    mean = x @ weights["action_net.weight"].T + weights["action_net.bias"]
    return np.exp(policy.log_std_init) * mean, np.exp(weights["log_std"])


def test_untrained_policy_plays_the_reference():
    model, obs = made(), observations(5)
    assert np.array_equal(model.predict(obs, deterministic=True)[0], obs["vla_ref"])
    drawn = model.predict(obs)[0]
    assert 0 < np.abs(drawn - obs["vla_ref"]).max() < 6 * np.exp(model.policy.log_std_init)
    disturb(model.policy)
    assert np.abs(model.predict(obs, deterministic=True)[0] - obs["vla_ref"]).max() > 1e-3


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_log_density_of_the_gaussian(parts):
    policy, obs = made(policy_kwargs={"parts": parts}).policy, observations(6)
    disturb(policy)
    with th.no_grad():
        tensors, _ = policy.obs_to_tensor(obs)
        actions, _, log_prob = policy(tensors)
        judged = policy.evaluate_actions(tensors, actions.flatten(1))
        start = policy.start_log_prob(tensors, actions.flatten(1))
    # one correction for each part, held over its control steps
    correction = actions.double().numpy() - obs["vla_ref"]
    blocks = correction.reshape(6, parts, 4 // parts, 7)
    assert np.ptp(blocks, axis=2).max() < 1e-6
    drawn, (mean, std) = blocks[:, :, 0].reshape(6, -1), hidden(policy, obs)

    def density(mean, std):
        return (-0.5 * ((drawn - mean) / std) ** 2 - np.log(std) - 0.5 * np.log(2 * np.pi)).sum(1)

    for found in (log_prob, judged[1]):
        np.testing.assert_allclose(found.numpy(), density(mean, std), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(start.numpy(), density(0.0, np.exp(policy.log_std_init)), rtol=1e-4, atol=1e-4)
    entropy = (0.5 + 0.5 * np.log(2 * np.pi) + np.log(std)).sum()
    np.testing.assert_allclose(judged[2].numpy(), entropy, rtol=1e-5)


def test_pull_is_the_mean_squared_distance():
    policy, obs = made(policy_kwargs={"pull": True, "parts": 2}).policy, observations(6)
    disturb(policy)
    tensors, _ = policy.obs_to_tensor(obs)
    weighed = policy.evaluate_actions(tensors, th.zeros(6, 28))[2]
    mean, _ = hidden(policy, obs)
    np.testing.assert_allclose(-weighed.detach().numpy(), (mean**2).mean(1), rtol=1e-4)
    weighed.sum().backward()
    assert policy.action_net.weight.grad.abs().sum() > 0


def test_pull_keeps_the_policy_at_the_vla():
    """A strong pull: the mean moves less."""
    distance = []
    for ent_coef in (0.0, 1000.0):
        policy = {"pull": True, "log_std_init": -1.0}
        model = made(policy_kwargs=policy, n_steps=32, n_epochs=10, ent_coef=ent_coef, learning_rate=1e-3)
        model.learn(256)
        obs = model.env.reset()
        distance.append(np.abs(model.predict(obs, deterministic=True)[0] - obs["vla_ref"]).mean())
    assert distance[1] < 0.5 * distance[0]


def test_advantages_and_loss_of_ppo(monkeypatch):
    """One rollout and one gradient step: GAE and the losses from the stored rows, written again."""
    gamma, lam = 0.9, 0.8
    model = made(gamma=gamma, gae_lambda=lam)
    disturb(model.policy)
    rows, end, buffer = [], {}, type(model.rollout_buffer)
    add, compute = buffer.add, buffer.compute_returns_and_advantage

    def recorded(self, obs, action, reward, start, value, log_prob):
        rows.append((np.array(reward), np.array(start), value.numpy().ravel()))
        return add(self, obs, action, reward, start, value, log_prob)

    def computed(self, last_values, dones):
        compute(self, last_values, dones)
        end.update(value=last_values.numpy().ravel(), done=dones, advantages=self.advantages.copy())

    monkeypatch.setattr(buffer, "add", recorded)
    monkeypatch.setattr(buffer, "compute_returns_and_advantage", computed)
    model.learn(16)
    rewards, starts, values = (np.array(column, dtype=np.float64) for column in zip(*rows, strict=True))
    assert starts[1:].any()
    following, ended = np.vstack([values[1:], end["value"]]), np.vstack([starts[1:], end["done"]])
    expected, after = np.zeros_like(values), np.zeros(2)
    for t in reversed(range(len(values))):
        delta = rewards[t] + gamma * following[t] * (1 - ended[t]) - values[t]
        after = expected[t] = delta + gamma * lam * (1 - ended[t]) * after
    np.testing.assert_allclose(end["advantages"], expected, atol=1e-5)
    # one batch of all rows: the ratio is 1, the targets of the values are advantage + value
    normalized = (expected - expected.mean()) / (expected.std(ddof=1) + 1e-8)
    logged = model.logger.name_to_value
    assert logged["train/policy_gradient_loss"] == pytest.approx(-normalized.mean(), abs=1e-5)
    assert logged["train/value_loss"] == pytest.approx((expected**2).mean(), rel=1e-4)


def test_the_policy_sees_which_task_is_played():
    venv = make_venv(task_ids=range(3), show_task=True)
    policy = PPO(VLACenteredPolicy, venv, **SMALL).policy
    disturb(policy)
    obs = {key: np.repeat(value, 3, axis=0) for key, value in observations(1).items()} | {"task": np.eye(3)}
    chunks, _ = policy.predict(obs, deterministic=True)
    with th.no_grad():
        values = policy.predict_values(policy.obs_to_tensor(obs)[0]).ravel()
    assert len(set(values.tolist())) == 3 and len({chunk.tobytes() for chunk in chunks}) == 3


def test_a_time_out_is_worth_what_follows_it(monkeypatch):
    """The reward of its row has the value of the last observation of the episode, not of the next one's first."""
    model = made(gamma=0.9, n_steps=32)
    disturb(model.policy)
    stored, expected, cut = [], [], []

    class Look(BaseCallback):
        def _on_step(self):
            rewards = self.locals["rewards"].astype(np.float64)
            for env, info in enumerate(self.locals["infos"]):
                if info["TimeLimit.truncated"]:
                    last = {key: value[None] for key, value in info["terminal_observation"].items()}
                    cut.append(value_of(model.policy, last).item())
                    rewards[env] += 0.9 * cut[-1]
            expected.append(rewards)
            return True

    buffer = type(model.rollout_buffer)
    add = buffer.add

    def recorded(self, obs, action, reward, start, value, log_prob):
        stored.append(np.array(reward))
        return add(self, obs, action, reward, start, value, log_prob)

    monkeypatch.setattr(buffer, "add", recorded)
    model.learn(64, callback=Look())
    assert len(cut) > 3 and np.abs(cut).min() > 1e-3
    np.testing.assert_allclose(stored, expected, atol=1e-5)


def test_the_loss_of_ppo_beyond_its_clip(monkeypatch):
    """Two gradient steps on the same 16 rows: the second one's ratios, some of them clipped, from the densities."""
    model, rows, between = made(n_epochs=2, learning_rate=0.05), [], {}
    disturb(model.policy)
    buffer, train = type(model.rollout_buffer), model.policy.optimizer.step
    add = buffer.add

    def recorded(self, obs, action, reward, start, value, log_prob):
        rows.append(({name: value.copy() for name, value in obs.items()}, action.copy(), log_prob.numpy().copy()))
        return add(self, obs, action, reward, start, value, log_prob)

    def step(*args, **kwargs):
        train(*args, **kwargs)
        between.setdefault("policy", {name: value.clone() for name, value in model.policy.state_dict().items()})

    monkeypatch.setattr(buffer, "add", recorded)
    monkeypatch.setattr(model.policy.optimizer, "step", step)
    model.learn(16)
    advantages = model.rollout_buffer.advantages.reshape(2, 8).T  # get() has put one environment after the other
    advantages = (advantages - advantages.mean()) / (advantages.std(ddof=1) + 1e-8)
    policy = made().policy
    policy.load_state_dict(between["policy"])
    ratios = []
    for obs, action, old in rows:
        drawn = (action.reshape(2, 4, 7) - obs["vla_ref"])[:, 0].astype(np.float64)
        mean, std = hidden(policy, obs)
        density = (-0.5 * ((drawn - mean) / std) ** 2 - np.log(std) - 0.5 * np.log(2 * np.pi)).sum(1)
        ratios.append(np.exp(density - old))
    ratios = np.array(ratios)
    clipped = np.clip(ratios, 0.8, 1.2)
    assert 2 < (clipped != ratios).sum() < 16
    second = -np.minimum(ratios * advantages, clipped * advantages).mean()
    logged = model.logger.name_to_value  # means over both steps; all ratios of the first one are 1
    assert logged["train/policy_gradient_loss"] == pytest.approx((-advantages.mean() + second) / 2, rel=1e-3)
    assert logged["train/clip_fraction"] == pytest.approx((clipped != ratios).mean() / 2)


def test_trained_twice_and_saved(tmp_path):
    models = [made().learn(64) for _ in range(2)]
    assert same(*(model.policy.state_dict() for model in models))
    models[0].save(tmp_path / "m.zip")
    loaded, obs = PPO.load(tmp_path / "m.zip", device="cpu"), observations(3)
    assert np.array_equal(*(model.predict(obs, deterministic=True)[0] for model in (models[0], loaded)))
    models[0].policy.save(tmp_path / "p.zip")
    alone = VLACenteredPolicy.load(tmp_path / "p.zip", device="cpu")
    assert np.array_equal(alone.predict(obs, deterministic=True)[0], loaded.predict(obs, deterministic=True)[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"parts": 3}, "parts must be a divisor of the chunk's 4"), ({"use_sde": True}, "multiple values|use_sde")],
)
def test_refuses(settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        made(policy_kwargs=settings)


def test_refuses_an_environment_without_reference():
    with pytest.raises(ValueError, match="VLACenteredPolicy needs chunks"):
        PPO(VLACenteredPolicy, "Pendulum-v1", device="cpu")
