"""The RLT algorithm: where it starts, what one update does, what is counted and what is saved."""

import base64
import json
import warnings
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from rlt_models import (
    Numpy,
    Rows,
    fast,
    make_model,
    make_venv,
    numeric_gradient,
    oracle_model,
    random_obs,
    to_numpy,
)
from stable_baselines3 import TD3
from stable_baselines3.common.buffers import DictReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback, CheckpointCallback, EvalCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.vec_env import VecNormalize

from rlt_sb3 import RLT, ChunkReplayBuffer
from rlt_sb3.common.chunk_outcome import ChunkOutcome
from rlt_sb3.common.noise import HeldNoise
from rlt_sb3.common.torch_utils import AntiWindupClamp
from rlt_sb3.common.value_bias import ValueBias
from rlt_sb3.experiment.models import load_model
from rlt_sb3.rlt.features import rotation_columns
from rlt_sb3.rlt.policies import RLTPolicy

pytestmark = pytest.mark.usefixtures("one_thread")


# -------------------------------------------------------------------------------------------- where it starts


def test_untrained_actor_is_the_vla_bit_for_bit():
    model = make_model()
    obs = random_obs(model, 500)
    for deterministic in (True, False):
        actions, _ = model.predict(obs, deterministic=deterministic)
        assert np.array_equal(actions, obs["vla_ref"])
    single, _ = model.predict({key: value[0] for key, value in obs.items()}, deterministic=True)
    assert np.array_equal(single, obs["vla_ref"][0])


def test_evaluation_at_step_0_equals_the_frozen_vla():
    class Frozen:
        def predict(self, obs, state=None, episode_start=None, deterministic=False):
            return obs["vla_ref"], state

    results = [
        evaluate_policy(policy, make_venv(5, init_states="eval"), n_eval_episodes=30, return_episode_rewards=True)
        for policy in (Frozen(), make_model())
    ]
    assert results[0] == results[1]
    assert 0.3 < np.mean(results[0][0]) < 0.7  # the fake VLA is right about half of the time


def test_direct_mode_starts_elsewhere_and_stays_in_range():
    model = make_model(policy_kwargs={"actor_mode": "direct"})
    obs = random_obs(model, 50)
    actions, _ = model.predict(obs)
    assert not np.allclose(actions, obs["vla_ref"]) and np.abs(actions).max() <= 1.0


@pytest.mark.parametrize("mode", ["residual", "direct"])
def test_warm_up_plays_the_vla_exactly(mode):
    model, rows = make_model(policy_kwargs={"actor_mode": mode}, learning_starts=20, exploration_std=0.3), Rows()
    model.learn(40, callback=rows)
    starts = 20 // model.n_envs
    for obs, actions in zip(rows.obs[:starts], rows.actions[:starts], strict=True):
        assert np.array_equal(obs["vla_ref"], actions)
    assert not np.array_equal(rows.obs[starts]["vla_ref"], rows.actions[starts])
    # what is stored is what was executed
    stored, slots = model.replay_buffer.storage, model.replay_buffer.storage.is_row(np.arange(1000))
    in_order = sorted(map(tuple, np.concatenate(rows.actions).reshape(-1, 28).tolist()))
    assert sorted(map(tuple, stored.actions[:1000][slots].reshape(-1, 28).tolist())) == in_order


SCALE = [1.0, 1.0, 1.0, 0.2, 0.3, 0.4, 2.0]


def noise(chunks, **settings):
    model = make_model(learning_starts=0, **settings)
    model._setup_learn(1)
    model._last_obs["vla_ref"][:] = 0.0
    return np.concatenate([model._sample_action(0, model.action_noise, model.n_envs)[0] for _ in range(chunks)])


def test_exploration_noise():
    drawn = noise(40, num_envs=50, exploration_std=0.05)
    assert drawn.std() == pytest.approx(0.05, rel=0.05)
    assert not np.allclose(drawn[:, :1], drawn)
    one = noise(1, exploration_std=[0.1, 0, 0, 0, 0, 0, 0])
    assert one[..., 0].any() and not one[..., 1:].any()
    scaled = noise(40, num_envs=50, exploration_std=0.05, action_scale=SCALE)
    np.testing.assert_allclose(scaled.std(axis=(0, 1)), 0.05 * np.array(SCALE), rtol=0.05)


def test_held_noise():
    sigma = 0.05 * np.array(SCALE)
    drawn = noise(40, num_envs=50, exploration_std=0.0, action_noise=HeldNoise(4, sigma))
    np.testing.assert_allclose(drawn.std(axis=(0, 1)), sigma, rtol=0.05)
    assert np.array_equal(np.broadcast_to(drawn[:, :1], drawn.shape), drawn)
    assert len(np.unique(drawn[:, 0, 0])) == 40 * 50  # another one in each chunk and environment
    with pytest.raises(ValueError, match="sigma must be one number >= 0 per action dimension"):
        HeldNoise(4, 0.1)
    with pytest.raises(ValueError, match="chunk_length must be >= 1"):
        HeldNoise(0, sigma)


def test_further_action_noise():
    noise = NormalActionNoise(np.full((4, 7), 0.5), np.zeros((4, 7)))
    model = make_model(action_noise=noise, exploration_std=0.0, learning_starts=0)
    model._setup_learn(1)
    model._last_obs["vla_ref"][:] = 0.0
    assert np.allclose(model._sample_action(0, model.action_noise, 2)[0], 0.5)


# -------------------------------------------------------------------------------------------- networks


def test_clamp_keeps_useful_gradients_at_the_border():
    x = th.tensor([-2.0, -1.0, 0.3, 1.0, 2.0])
    for sign, expected in ((1.0, [0, 0, 1, 1, 1]), (-1.0, [-1, -1, -1, 0, 0])):
        leaf = x.clone().requires_grad_()
        out = AntiWindupClamp.apply(leaf)
        assert th.equal(out.detach(), x.clamp(-1, 1))
        (sign * out).sum().backward()
        assert leaf.grad.tolist() == expected


def test_critic_does_not_see_the_reference_but_the_actor_does():
    model = make_model()
    th.nn.init.normal_(model.actor.mu[-1].weight)
    obs = {key: th.as_tensor(value) for key, value in random_obs(model, 8).items()}
    other = obs | {"vla_ref": -obs["vla_ref"]}
    actions = th.rand(8, 28)
    assert th.equal(model.critic.q_values(obs, actions), model.critic.q_values(other, actions))
    direct = make_model(policy_kwargs={"actor_mode": "direct"})
    assert not th.allclose(direct.actor(obs), direct.actor(other))


def test_ensemble_members_are_independent_and_interface_of_sb3():
    model = make_model(policy_kwargs={"n_critics": 3})
    obs = {key: th.as_tensor(value) for key, value in random_obs(model, 6).items()}
    actions = th.rand(6, 28)
    q = model.critic.q_values(obs, actions)
    assert q.shape == (3, 6) and not th.allclose(q[0], q[1])
    outputs = model.critic(obs, actions)
    assert len(outputs) == 3 and outputs[0].shape == (6, 1)
    assert th.allclose(th.cat(outputs, 1).T, q)
    assert th.allclose(model.critic.q1_forward(obs, actions)[:, 0], q[0])
    assert th.allclose(model.critic.q_values(obs, actions, th.tensor([2, 0])), q[[2, 0]])


def test_rotation_has_no_jump_at_pi():
    axis_angle = th.tensor([[np.pi - 1e-4, 0, 0], [-np.pi + 1e-4, 0, 0], [0, 0, 0], [0, 0, np.pi / 2]])
    columns = rotation_columns(axis_angle.float())
    assert th.allclose(columns[0], columns[1], atol=1e-3)
    assert th.allclose(columns[2], th.tensor([1.0, 0, 0, 0, 1, 0]))
    assert th.allclose(columns[3], th.tensor([0.0, 1, 0, -1, 0, 0]), atol=1e-6)


# -------------------------------------------------------------------------------------------- one update


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
    parameters = dict(model.critic.named_parameters())
    rng = np.random.default_rng(0)
    for name in ("ensemble.weights.0", "ensemble.weights.1", "ensemble.weights.2", "ensemble.biases.1"):
        array = oracle.p[f"critic.{name}"]
        indices = [tuple(rng.integers(0, size) for size in array.shape) for _ in range(15)]
        gradient = numeric_gradient(loss, array, indices)
        got = np.array([parameters[name].grad[index].item() for index in indices])
        np.testing.assert_allclose(got, gradient, atol=1e-5)
        after = np.array([parameters[name][index].item() for index in indices])
        expected = adam_first_step(np.array([array[index] for index in indices]), gradient, 1e-2)
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
    parameters = dict(model.actor.named_parameters())
    rng = np.random.default_rng(0)
    for name in ("mu.0.weight", "mu.2.weight", "mu.4.weight", "mu.4.bias"):
        array = oracle.p[f"actor.{name}"]
        indices = [tuple(rng.integers(0, size) for size in array.shape) for _ in range(10)]
        gradient = numeric_gradient(loss, array, indices)
        got = np.array([parameters[name].grad[index].item() for index in indices])
        np.testing.assert_allclose(got, gradient, atol=1e-5)


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


# -------------------------------------------------------------------------------------------- dropout


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


def test_dropout_hides_the_reference_from_the_network_and_not_from_the_sum():
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


def test_predict_is_the_same_in_both_modes_and_repeatable():
    model = make_model(**fast(reference_dropout=0.9))
    model.learn(40)
    obs = random_obs(model, 20)
    results = []
    for mode in (True, False, True):
        model.policy.set_training_mode(mode)
        results.append(model.predict(obs)[0])
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])


# -------------------------------------------------------------------------------------------- counting


@pytest.mark.parametrize(("num_envs", "train_freq"), [(1, 1), (3, 1), (1, 4), (3, 4), (1, (2, "episode"))])
@pytest.mark.parametrize("utd", [0.3, 1.0, 2.5])
def test_updates_per_row_are_exact(num_envs, train_freq, utd):
    model = make_model(num_envs, utd=utd, learning_starts=12, critic_warmup_updates=7, train_freq=train_freq)
    model.learn(60)
    rows = model.num_timesteps - 12
    assert model._n_updates == 7 + int(utd * rows + 1e-6)
    model.learn(30, reset_num_timesteps=False)
    assert model._n_updates == 7 + int(utd * (model.num_timesteps - 12) + 1e-6)


def test_policy_delay_is_counted_over_calls():
    model = make_model(**fast(policy_delay=3, critic_warmup_updates=0))
    model.learn(20)
    calls = []
    original = model._update_actor
    model._update_actor = lambda *args, **kwargs: (calls.append(model._n_updates), original(*args, **kwargs))[1]
    for _ in range(12):
        model.train(1, 32)
    assert calls == [n for n in range(calls[0], calls[0] + 12, 3)] and all(n % 3 == 0 for n in calls)


def test_actor_waits_for_the_critics():
    model, rows = make_model(learning_starts=16, critic_warmup_updates=30, utd=1.0, exploration_std=0.0), Rows()
    start = [p.clone() for p in model.actor.parameters()]
    critic = [p.clone() for p in model.critic.parameters()]
    model.learn(18, callback=rows)
    assert model._n_updates == 32
    model = make_model(learning_starts=16, critic_warmup_updates=30, utd=1e-6)
    model.learn(18)
    assert model._n_updates == 30
    assert all(th.equal(a, b) for a, b in zip(start, model.actor.parameters(), strict=True))
    assert not all(th.equal(a, b) for a, b in zip(critic, model.critic.parameters(), strict=True))
    model.train(2, 32)
    assert not all(th.equal(a, b) for a, b in zip(start, model.actor.parameters(), strict=True))


@pytest.mark.parametrize("act_with", ["target", "online"])
def test_which_actor_acts(act_with):
    model = make_model(policy_kwargs=dict(act_with=act_with), **fast())
    model.learn(40)
    obs = random_obs(model, 6)
    tensors = {key: th.as_tensor(value) for key, value in obs.items()}
    with th.no_grad():
        online, target = model.actor(tensors).numpy(), model.actor_target(tensors).numpy()
    assert not np.array_equal(online, target)
    played = model.predict(obs, deterministic=True)[0].reshape(6, -1)
    assert np.array_equal(played, target if act_with == "target" else online)


def test_direct_actor_is_fitted_to_the_vla_while_it_waits():
    model = make_model(
        policy_kwargs={"actor_mode": "direct"}, learning_starts=64, critic_warmup_updates=600, learning_rate=1e-3
    )
    obs = None
    model.learn(66)
    obs = model.replay_buffer.sample(64).observations
    with th.no_grad():
        error = (model.actor(obs) - obs["vla_ref"].flatten(1)).pow(2).mean().item()
    assert error < 0.05


def test_control_steps_and_n_step_buffer():
    model, rows = make_model(**fast(n_steps=4, gamma=0.95)), Rows()
    model.learn(60, callback=rows)
    assert model.num_control_steps == sum(info["chunk_steps"] for info in rows.infos)
    assert model.replay_buffer.n_steps == 4 and model.replay_buffer.gamma == 0.95 and model.n_steps == 4


def test_time_outs_bootstrap_in_the_stored_rows():
    model = make_model(**fast())
    model.learn(200)
    buffer = model.replay_buffer
    rows = np.flatnonzero(buffer.storage.is_row(np.arange(1000)))
    timed_out, solved = buffer.storage.truncated[rows], buffer.storage.step_rewards[rows].sum(1) > 0
    assert timed_out.any() and solved.any()
    assert np.array_equal(buffer.storage.terminated[rows], solved)
    # the row of a time-out leads to the last observation of its episode, not to the first one of the next
    batch = buffer._gather(rows)
    way = batch.next_observations["proprio"] - batch.observations["proprio"]
    assert way[:, :2].norm(dim=1)[th.as_tensor(timed_out)].max() <= 4 * 0.1 * np.sqrt(2) + 1e-5


def test_learn_twice_cuts_returns():
    model = make_model(learning_starts=1000, n_steps=3)
    model.learn(10)
    model.learn(10)
    rows = model.replay_buffer.storage
    # the observation after the tenth row is no row: the second call began with a reset
    newest = [episode.slot for episode in model.replay_buffer.open_episodes if episode is not None]
    open_ends = {
        int(slot)
        for slot in rows.next_slot[rows.is_row(np.arange(rows.size))]
        if not rows.is_row(slot) and slot not in newest
    }
    finals = {int(slot) for slot, done in zip(rows.next_slot, rows.terminated | rows.truncated, strict=True) if done}
    assert len(open_ends - finals) == 2


# -------------------------------------------------------------------------------------------- logs


def outcome(steps, rewards) -> ChunkOutcome:
    return ChunkOutcome(steps, np.array(rewards, dtype=float), np.zeros((2, 1)))


def test_value_bias():
    tracker = ValueBias(2, gamma=0.5, window=4, patience=3)
    outcomes = [outcome(2, [0, 0]), outcome(1, [1, 0])]
    dones = np.array([False, True])
    tracker.step(outcomes, dones, lambda: np.array([0.5, 0.25]))
    assert tracker.gap == pytest.approx(0.25 - 1.0) and tracker.control_steps == 3
    # env 0 goes on: reward 1 at its fourth control step; env 1's next episode was not promised anything
    outcomes = [outcome(2, [0, 1]), outcome(2, [0, 0])]
    tracker.step(outcomes, np.array([True, True]), None)
    assert list(tracker.gaps) == pytest.approx([-0.75, 0.5 - 0.5**3])
    with pytest.warns(UserWarning, match="over-estimate"):
        for _ in range(8):
            tracker.step([outcome(2, [0, 0])] * 2, np.array([True, True]), lambda: np.ones(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(8):
            tracker.step([outcome(2, [0, 0])] * 2, np.array([True, True]), lambda: np.ones(2))


def test_logs(tmp_path):
    model = make_model(**fast(tensorboard_log=str(tmp_path)))
    values = {}

    class Collect(BaseCallback):
        def _on_step(self) -> bool:
            values.update(self.logger.name_to_value)
            return True

    model.learn(80, callback=Collect(), log_interval=10**6)
    model.dump_logs()
    assert list(tmp_path.glob("RLT_1/events*"))
    wanted = {"critic_loss", "q_mean", "q_std", "target_mean", "target_min", "target_max"}
    wanted |= {"actor_loss", "actor_q", "bc_loss", "bc_distance", "n_updates", "learning_rate"}
    assert {f"train/{name}" for name in wanted} <= values.keys()
    assert 0.0 <= values["train/target_min"] <= values["train/target_max"] <= 1.0
    assert model._value_bias.gap is not None


def test_logged_errors_are_those_of_the_critics():
    model = make_model(policy_kwargs={"n_critics": 3}, **fast(target_policy_noise=0.0))  # no chance in the targets
    model.learn(40)
    model.set_logger(Logger(None, []))
    original, errors = model._update_critic, []

    def watch(batch):
        with th.no_grad():
            errors.append(model.critic.q_values(batch.observations, batch.actions) - model._targets(batch))
        return original(batch)

    model._update_critic = watch
    model.train(5, 32)
    squares = th.stack(errors).pow(2)
    assert squares.shape == (5, 3, 32)
    logged = model.logger.name_to_value
    assert logged["train/td_error"] == pytest.approx(squares.mean().sqrt().item())
    assert logged["train/critic_loss"] == pytest.approx(3 * squares.mean().item())


# -------------------------------------------------------------------------------------------- reproducibility, saving


def test_training_twice_gives_the_same_model():
    def run():
        model = make_model(venv=make_venv(2), **fast())
        model.learn(60)
        return model.policy.state_dict()

    first, second = run(), run()
    assert all(th.equal(first[key], second[key]) for key in first)


OTHER = dict(
    buffer_size=200, gamma=0.97, utd=1.5, n_steps=2, policy_delay=3, target_policy_noise=0.05, target_noise_clip=0.1,
    bc_coef=7.0, reference_dropout=0.2, exploration_std=0.02, critic_warmup_updates=6,
    q_bounds=(-1.0, 2.0), learning_starts=10, tau=0.01, train_freq=2, stats_window_size=7,
    action_scale=[1.0, 1.0, 1.0, 0.2, 0.2, 0.2, 1.0],
)  # fmt: skip
OF_POLICY = dict(
    actor_q="min", n_critics=4, n_target_critics=2, actor_mode="direct", actor_tau=0.02, critic_precision="bfloat16"
)


def test_save_and_load(tmp_path):
    model = make_model(**OTHER, policy_kwargs=OF_POLICY)
    model.learn(60)
    model.save(tmp_path / "model.zip")
    model.save_replay_buffer(tmp_path / "buffer.pkl")
    venv = make_venv(2)
    loaded = RLT.load(tmp_path / "model.zip", env=venv, device="cpu")
    for name, value in OTHER.items():
        if name not in ("train_freq", "stats_window_size"):
            assert getattr(loaded, name) == value, name
    for name, value in OF_POLICY.items():
        assert loaded.policy._get_constructor_parameters()[name] == value, name
    assert loaded.train_freq == model.train_freq and loaded._stats_window_size == 7
    assert loaded.policy.actor_mode == "direct" and loaded.critic.n_critics == 4
    first, second = model.get_parameters(), loaded.get_parameters()
    assert first.keys() == second.keys() == {"policy", "actor.optimizer", "critic.optimizer"}
    assert all(th.equal(first["policy"][key], second["policy"][key]) for key in first["policy"])
    state = [parameters["critic.optimizer"]["state"][0]["exp_avg"] for parameters in (first, second)]
    assert th.equal(*state)
    obs = random_obs(model, 10)
    assert np.array_equal(model.predict(obs)[0], loaded.predict(obs)[0])
    assert loaded._n_updates == model._n_updates and loaded.num_control_steps == model.num_control_steps

    loaded.load_replay_buffer(tmp_path / "buffer.pkl")
    assert isinstance(loaded.replay_buffer, ChunkReplayBuffer) and loaded.replay_buffer.size() == 60
    for name in ("actions", "step_rewards", "chunk_steps", "terminated", "truncated"):
        assert np.array_equal(getattr(model.replay_buffer.storage, name), getattr(loaded.replay_buffer.storage, name))
    updates = loaded._n_updates
    loaded.learn(20, reset_num_timesteps=False)
    assert loaded.num_timesteps == 80 and loaded._n_updates == updates + 30
    with pytest.raises(ValueError, match="2 environments"):
        RLT.load(tmp_path / "model.zip", env=make_venv(3)).load_replay_buffer(tmp_path / "buffer.pkl")


def test_load_without_env_and_with_changed_settings(tmp_path):
    model = make_model()
    model.save(tmp_path / "model.zip")
    obs = random_obs(model, 3)
    assert np.array_equal(RLT.load(tmp_path / "model.zip").predict(obs)[0], obs["vla_ref"])
    assert RLT.load(tmp_path / "model.zip", bc_coef=1.0).bc_coef == 1.0
    with pytest.raises(ValueError, match="bc_coef"):
        RLT.load(tmp_path / "model.zip", bc_coef=-1.0)


def change_data(path, **changes):
    """Rewrite the settings in a saved model; None removes one."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    data = json.loads(parts["data"]) | changes
    parts["data"] = json.dumps({key: value for key, value in data.items() if value is not None}).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)


def test_models_of_other_versions_are_refused_with_one_line(tmp_path):
    path = tmp_path / "model.zip"
    make_model().save(path)
    gone = base64.b64encode(b"crlt_sb3.no_such_module\nGone\n.").decode()  # pickle of a class that has moved
    moved = {":type:": "<class 'type'>", ":serialized:": gone}
    change_data(path, saved_format=None, n_critics=5, actor_mode="residual", trials=moved)
    for file in (path, str(path), str(path)[:-4]):
        with pytest.raises(ValueError, match=r"model.* was saved by another version of rlt.*: train it again") as error:
            RLT.load(file, device="cpu")
        assert "\n" not in str(error.value)
    with path.open("rb") as opened, pytest.raises(ValueError, match="was saved by another version of rlt"):
        RLT.load(opened, device="cpu")
    change_data(path, saved_format=10**6)
    with pytest.raises(ValueError, match="format 1000000"):
        RLT.load(path, device="cpu")
    with pytest.raises(ValueError, match=r"cannot be loaded as a model of RLT .*saved by another version"):
        load_model("rlt", path, device="cpu")
    # of this version, and with old names of arguments
    make_model().save(path)
    with path.open("rb") as opened:
        assert RLT.load(opened, device="cpu").bc_coef == 20.0
    with pytest.raises(ValueError, match=r"RLT has no setting trial_share; there is .*gate"):
        RLT.load(path, device="cpu", trial_share=0.5)
    with pytest.raises(TypeError, match="trial_share"):
        make_model(trial_share=0.5)


def robot_of(*parts):
    return SimpleNamespace(proprio=tuple(SimpleNamespace(**part) for part in parts))


LIBERO_PROPRIO = (
    dict(name="position", size=3, kind="linear", center=(0.0, 0.0, 0.7), scale=(0.15, 0.15, 0.25)),
    dict(name="orientation", size=3, kind="axis_angle", center=(0.0,) * 3, scale=(1.0,) * 3),
    dict(name="fingers", size=2, kind="linear", center=(0.02, -0.02), scale=(0.02, 0.02)),
)


def test_proprio_is_normalized_as_the_robot_says(tmp_path):
    """Two rotations around one linear part: linear parts come first, each minus its center, over its scale."""
    venv = make_venv(2)
    turn = dict(name="wrist", size=3, kind="axis_angle", center=(), scale=())
    linear = dict(name="joints", size=2, kind="linear", center=(1.0, -1.0), scale=(2.0, 4.0))
    venv.unwrapped.env.metadata["robot"] = robot_of(turn, linear, turn)
    model = make_model(venv=venv)
    features = model.actor.features_extractor
    assert features.features_dim == model.observation_space["z_rl"].shape[0] + 2 + 6 + 6
    obs = {key: th.as_tensor(value) for key, value in random_obs(model, 5).items()}
    p = obs["proprio"]
    wanted = [(p[:, 3:5] - th.tensor([1.0, -1.0])) / th.tensor([2.0, 4.0])]
    wanted += [rotation_columns(p[:, :3]), rotation_columns(p[:, 5:])]
    assert th.allclose(features(obs)[:, -14:], th.cat(wanted, dim=1), atol=1e-6)
    model.save(tmp_path / "model.zip")  # which needs no environment any more
    loaded = RLT.load(tmp_path / "model.zip", device="cpu")
    assert th.equal(loaded.actor.features_extractor(obs), features(obs))
    own = make_model(venv=venv, policy_kwargs=dict(features_extractor_kwargs=dict(proprio_norm="none")))
    assert th.equal(own.actor.features_extractor(obs)[:, -8:], p)
    venv.unwrapped.env.metadata["robot"] = robot_of(turn, linear)
    with pytest.raises(ValueError, match="parts of proprio have 5 numbers, the observation has 8"):
        make_model(venv=venv)


def test_the_layout_of_liberos_proprio_is_the_one_without_a_robot():
    venv = make_venv(2)
    venv.unwrapped.env.metadata["robot"] = robot_of(*LIBERO_PROPRIO)
    described, plain = make_model(venv=venv), make_model()
    obs = {key: th.as_tensor(value) for key, value in random_obs(plain, 20).items()}
    assert th.equal(described.actor.features_extractor(obs), plain.actor.features_extractor(obs))


def test_policy_alone_saves_and_loads(tmp_path):
    model = make_model(policy_kwargs=dict(n_critics=2, net_arch=[8], layer_norm=False))
    model.policy.save(tmp_path / "policy.pt")
    loaded = RLTPolicy.load(tmp_path / "policy.pt")
    assert loaded.layer_norm is False and loaded.net_arch == [8]
    obs = random_obs(model, 3)
    assert np.array_equal(model.predict(obs)[0], loaded.predict(obs)[0])


def test_callbacks_and_progress_bar(tmp_path):
    model = make_model(**fast())
    evaluate = EvalCallback(
        make_venv(2, init_states="eval"), n_eval_episodes=4, eval_freq=10, log_path=str(tmp_path), verbose=0,
        best_model_save_path=str(tmp_path / "best"),
    )  # fmt: skip
    checkpoint = CheckpointCallback(20, str(tmp_path), save_replay_buffer=True)
    model.learn(60, callback=[evaluate, checkpoint], progress_bar=True)
    results = np.load(tmp_path / "evaluations.npz")
    assert results["successes"].shape == (3, 4)
    assert (tmp_path / "best" / "best_model.zip").exists() and (tmp_path / "rl_model_40_steps.zip").exists()
    assert isinstance(RLT.load(tmp_path / "best" / "best_model.zip"), TD3)
    assert len(model.ep_success_buffer) > 0


# -------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    "options",
    [
        dict(  # the paper's
            n_steps=1,
            utd=5,
            critic_warmup_updates=0,
            q_bounds=None,
            policy_kwargs=dict(actor_mode="direct", n_critics=2),
        ),
        dict(reference_dropout=0.0, policy_delay=1, policy_kwargs=dict(n_critics=1, actor_q="first")),
        dict(
            action_noise=HeldNoise(4, [0.1] * 7),
            reference_dropout=1.0,
            policy_kwargs=dict(n_target_critics=2, critic_precision="bfloat16"),
        ),
        dict(learning_rate=lambda progress: 1e-3 * progress, train_freq=3, target_policy_noise=0.0),
        dict(policy_kwargs=dict(net_arch=dict(pi=[16], qf=[24, 8]), optimizer_class=th.optim.AdamW, layer_norm=False)),
        dict(policy_kwargs=dict(features_extractor_kwargs=dict(proprio_norm="none"), activation_fn=th.nn.SiLU)),
    ],
)
def test_options_run(options):
    model = make_model(**(fast() | options))
    model.learn(40)
    actions, _ = model.predict(random_obs(model, 5))
    assert actions.shape == (5, 4, 7) and np.isfinite(actions).all()
    assert model._n_updates > 0


def policy(**kwargs) -> dict:
    return dict(policy_kwargs=kwargs)


BAD = [
    (dict(gamma=1.1), "gamma"), (dict(tau=0.0), "tau"), (policy(actor_tau=2.0), "actor_tau"),
    (dict(n_steps=0), "n_steps"), (dict(utd=0.0), "utd"),
    (dict(bc_coef=-1.0), "bc_coef"), (policy(actor_q="max"), "actor_q"),
    (dict(reference_dropout=1.5), "reference_dropout"), (dict(exploration_std=-0.1), "exploration_std"),
    (dict(exploration_std=[0.1, 0.1]), "exploration_std"), (dict(action_scale=[1.0, 0, 1, 1, 1, 1, 1]), "action_scale"),
    (dict(q_bounds=(1.0, 0.0)), "q_bounds"),
    (policy(n_critics=0), "n_critics"), (policy(n_target_critics=6), "n_target_critics"),
    (dict(batch_size=0), "batch_size"), (policy(actor_mode="tanh"), "actor_mode"),
    (dict(policy_delay=0), "policy_delay"),
    (policy(critic_precision="int8"), "critic_precision"), (dict(critic_warmup_updates=-1), "critic_warmup_updates"),
    (dict(target_policy_noise=-0.1), "target_policy_noise"), (dict(learning_starts=-1), "learning_starts"),
    (policy(act_with="best"), "act_with"),
    (policy(n_critic=3), "RLT has no setting policy_kwargs.n_critic; there is .*n_critics"),
    (dict(replay_buffer_kwargs=dict(ratio=1)), "RLT has no setting replay_buffer_kwargs.ratio; .*offline_ratio"),
    (dict(gate=dict(trials=3)), "RLT has no setting gate.trials; there is share, window"),
    (dict(gate=0.5), "gate must be a dict with some of share, window, got 0.5"),
    (dict(replay_buffer_class=DictReplayBuffer), "ChunkReplayBuffer"),
    (dict(policy_kwargs=dict(features_extractor_kwargs=dict(proprio_norm="minmax"))), "proprio_norm"),
    (dict(policy_kwargs=dict(features_extractor_kwargs=dict(proprio_norm=([0.0], [1.0])))), "proprio_norm"),
    (dict(policy_kwargs=dict(features_extractor_kwargs=dict(proprio_norm=([np.nan] * 8, [1.0] * 8)))), "proprio_norm"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_settings(options, message):
    with pytest.raises(ValueError, match=message):
        make_model(**options)


def test_bad_spaces():
    def model_with(change) -> RLT:
        venv = make_venv(1, monitor=False)
        change(venv)
        return make_model(venv=venv)

    def without_reference(venv):
        venv.observation_space = spaces.Dict({k: v for k, v in venv.observation_space.items() if k != "vla_ref"})

    def other_chunk(venv):
        venv.action_space = spaces.Box(-1.0, 1.0, (3, 7), np.float32)

    def wide_actions(venv):
        venv.action_space = spaces.Box(-2.0, 2.0, (4, 7), np.float32)

    def flat_actions(venv):
        venv.action_space = spaces.Box(-1.0, 1.0, (28,), np.float32)

    def token_picture(venv):
        venv.observation_space = spaces.Dict(
            dict(venv.observation_space.items()) | {"z_rl": spaces.Box(-1.0, 1.0, (4, 4), np.float32)}
        )

    for change, message in (
        (without_reference, "vla_ref"),
        (other_chunk, "chunk_length"),
        (wide_actions, r"\[-1, 1\]"),
        (flat_actions, "chunks"),
        (token_picture, "vectors"),
    ):
        with pytest.raises(ValueError, match=message):
            model_with(change)
    with pytest.raises(ValueError, match="VecNormalize"):
        make_model(venv=VecNormalize(make_venv(1), norm_obs_keys=["proprio"]))
    with pytest.raises(ValueError, match="MlpPolicy"):
        RLT("MlpPolicy", make_venv(1))
