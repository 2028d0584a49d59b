"""What one update of RLT does, against an independent reference in NumPy, and reference dropout."""

import numpy as np
import pytest
import torch as th
from rlt_models import (
    SCALE,
    Numpy,
    compare_gradients,
    make_model,
    oracle_model,
    random_obs,
    to_numpy,
)


@pytest.mark.parametrize(("bounds", "norm"), [(None, True), ((0.05, 0.4), True), (None, False)])
@pytest.mark.parametrize(("smoothing", "scale"), [(0.0, 1.0), (0.3, 1.0), (0.3, SCALE)])
def test_targets_against_numpy(bounds, norm, smoothing, scale):
    model, batch = oracle_model(
        q_bounds=bounds,
        target_policy_noise=smoothing,
        target_noise_clip=0.2,
        action_scale=scale,
        policy_kwargs=dict(layer_norm=norm, net_arch=[32, 32]),
    )
    oracle = Numpy(model)
    _, next_obs, actions = to_numpy(batch)
    th.manual_seed(5)
    targets = model._targets(batch).numpy()
    th.manual_seed(5)
    noise = np.clip(th.randn(*actions.shape).numpy() * smoothing, -0.2, 0.2)
    noise *= np.tile(np.broadcast_to(scale, 7), 4)
    next_actions = np.clip(oracle.actor("actor_target", next_obs) + noise, -1, 1)
    next_q = oracle.q("critic_target", next_obs, next_actions).min(axis=0)
    rewards, dones, discounts = (x.double().numpy()[:, 0] for x in (batch.rewards, batch.dones, batch.discounts))
    expected = rewards + discounts * (1 - dones) * next_q
    if bounds is not None:
        assert (expected < bounds[0]).any() or (expected > bounds[1]).any()
        expected = np.clip(expected, *bounds)
    np.testing.assert_allclose(targets, expected, atol=1e-5)


def adam_first_step(parameter: np.ndarray, gradient: np.ndarray, lr: float) -> np.ndarray:
    return parameter - lr * gradient / (np.abs(gradient) + 1e-8)


def test_one_critic_update_against_numpy():
    """Loss, gradients (by differences in float64) and the parameters after the first Adam step."""
    model, batch = oracle_model(target_policy_noise=0.0)
    oracle = Numpy(model)
    obs, _, actions = to_numpy(batch)
    targets = model._targets(batch).double().numpy()

    def loss() -> float:
        return float(((oracle.q("critic", obs, actions) - targets) ** 2).mean(axis=1).sum())

    stats = model._update_critic(batch)
    assert float(stats[0]) == pytest.approx(loss(), abs=1e-5)
    names = ("ensemble.weights.0", "ensemble.weights.1", "ensemble.weights.2", "ensemble.biases.1")
    for before, gradient, after in compare_gradients(model, oracle, "critic", names, 15, loss):
        expected = adam_first_step(before, gradient, 1e-2)
        clear = np.abs(gradient) > 1e-4  # the sign of smaller ones is rounding
        np.testing.assert_allclose(after[clear], expected[clear], atol=1e-5)


@pytest.mark.parametrize("actor_q", ["mean", "min", "first"])
@pytest.mark.parametrize(("dropout", "scale"), [(0.0, 1.0), (0.5, 1.0), (0.5, SCALE)])
def test_one_actor_update_against_numpy(actor_q, dropout, scale):
    model, batch = oracle_model(policy_kwargs={"actor_q": actor_q}, reference_dropout=dropout, action_scale=scale)
    # interior actions: there the gradient of the loss is the plain derivative (the border has its own test)
    with th.no_grad():
        batch.observations["vla_ref"].mul_(0.2)
        model.actor.mu[-1].weight.mul_(0.1)
        model.actor.mu[-1].bias.mul_(0.1)
    oracle = Numpy(model)
    obs, _, _ = to_numpy(batch)
    reference = obs["vla_ref"].reshape(16, -1)
    th.manual_seed(7)
    keep = (th.rand(16, 1) >= dropout).double().numpy() if dropout else None
    assert np.abs(oracle.actor_raw("actor", obs, keep)).max() < 1.0

    def loss() -> float:
        actions = oracle.actor("actor", obs, keep)
        q = oracle.q("critic", obs, actions)
        q = {"mean": q.mean(0), "min": q.min(0), "first": q[0]}[actor_q]
        # the pull is to the true reference, also where the actor does not see it
        distance = (actions - reference) / np.tile(np.broadcast_to(scale, 7), 4)
        return float(-q.mean() + 3.0 * (distance**2).mean())

    critic_before = [parameter.clone() for parameter in model.critic.parameters()]
    th.manual_seed(7)
    stats = model._update_actor(batch)
    assert float(stats[0]) == pytest.approx(loss(), abs=1e-5)
    assert all(th.equal(a, b) for a, b in zip(critic_before, model.critic.parameters(), strict=True))
    assert all(parameter.requires_grad for parameter in model.critic.parameters())
    compare_gradients(model, oracle, "actor", ("mu.0.weight", "mu.2.weight", "mu.4.weight", "mu.4.bias"), 10, loss)


@pytest.mark.parametrize("actor_tau", [None, 0.1])
def test_targets_move_by_tau(actor_tau):
    """One call with one update that reaches the actor: each slow copy goes its share of the way to the network."""
    model = make_model(
        tau=0.25, policy_delay=1, critic_warmup_updates=0, learning_starts=8, policy_kwargs={"actor_tau": actor_tau}
    )
    model.learn(40)
    pairs = [(model.actor, model.actor_target, actor_tau or 0.25), (model.critic, model.critic_target, 0.25)]
    before = [[p.clone() for p in target.parameters()] for _, target, _ in pairs]
    model.train(gradient_steps=1, batch_size=32)
    for (online, target, tau), old in zip(pairs, before, strict=True):
        for a, b, after in zip(online.parameters(), old, target.parameters(), strict=True):
            assert th.allclose(after, tau * a + (1 - tau) * b, atol=1e-6)


def test_subset_of_target_critics():
    model, batch = oracle_model(policy_kwargs={"n_target_critics": 1}, target_policy_noise=0.0, q_bounds=None)
    lowest, _ = oracle_model(target_policy_noise=0.0, q_bounds=None)
    subset = [model._targets(batch) for _ in range(20)]
    assert len({float(t.sum()) for t in subset}) == 3  # one of three critics each time
    assert all((t >= lowest._targets(batch) - 1e-6).all() for t in subset)


class Spy(th.nn.Module):
    """Stands in front of the actor and notes which references were dropped."""

    def __init__(self, actor):
        super().__init__()
        self.actor, self.kept = actor, []

    def __getattr__(self, name):
        return super().__getattr__(name) if name in ("actor", "kept") else getattr(self.actor, name)

    def forward(self, obs, keep_reference=None):
        self.kept.append(keep_reference)
        return self.actor(obs, keep_reference)


def test_dropout_happens_in_actor_updates_only():
    model = make_model(reference_dropout=0.3, learning_starts=0, critic_warmup_updates=0, batch_size=256)
    model.learn(64)
    actor, target = Spy(model.actor), Spy(model.actor_target)
    model.policy.actor = model.actor = actor
    model.policy.actor_target = model.actor_target = target
    model.train(80, 256)
    assert len(actor.kept) == 40 and len(target.kept) == 80
    assert all(keep is None for keep in target.kept)
    kept = th.cat(actor.kept)
    assert set(kept.unique().tolist()) == {0.0, 1.0} and kept.shape[1] == 1  # whole chunks
    assert kept.mean().item() == pytest.approx(0.7, abs=0.015)
    actor.kept.clear()
    target.kept.clear()
    model.policy.set_training_mode(True)
    model.predict(random_obs(model, 4), deterministic=True)
    model._sample_action(0, None, 2)
    assert target.kept == [None, None] and actor.kept == []  # the slow copy acts, without dropout


def test_dropout_hides_the_reference_only_from_the_network():
    """
    An untrained residual actor plays the VLA's chunk with dropout, too: the pull has nothing to pull at. Where it had,
    the network's first lesson was to make up for a whole chunk, and its first steps led far from the VLA.
    """
    model, batch = oracle_model(reference_dropout=1.0)
    model.actor.load_state_dict(model.policy.make_actor().state_dict())
    reference = batch.observations["vla_ref"].flatten(1).clamp(-1, 1)
    assert th.equal(model.actor(batch.observations, th.zeros(len(reference), 1)), reference)
    model._update_actor(batch, follow_q=False)
    assert th.equal(model.actor(batch.observations), reference)
