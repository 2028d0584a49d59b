"""GRPO: groups, advantages, losses and divergence against formulas written in NumPy; runs that repeat."""

import numpy as np
import pytest
import torch as th
from rlt_models import make_venv
from run_helpers import same
from stable_baselines3.common.callbacks import BaseCallback

from rlt_sb3.common.chunk_outcome import ChunkOutcome
from rlt_sb3.grpo import GRPO
from rlt_sb3.grpo.groups import GroupCollector, group_advantages
from rlt_sb3.grpo.grpo import clipped_loss, k3

SMALL = {
    "policy_kwargs": {"net_arch": [16], "log_std_init": -1.5}, "group_size": 4, "groups": 2, "batch_size": 16,
    "device": "cpu", "seed": 0,
}  # fmt: skip


def made(num_envs=2, **changes):
    settings = SMALL | changes
    venv = make_venv(num_envs, group_size=settings["group_size"])
    return GRPO("MultiInputPolicy", venv, **settings)


def test_advantages_of_a_group():
    returns = [1.0, 0.0, 0.0, 1.0, 1.0]
    mean = sum(returns) / 5
    std = (sum((value - mean) ** 2 for value in returns) / 5) ** 0.5
    np.testing.assert_allclose(group_advantages(returns), [(value - mean) / std for value in returns])
    assert group_advantages([1.0, 1.0, 1.0]) is None and group_advantages([0.0] * 8) is None
    assert group_advantages([0.0]) is None


def test_losses():
    rng = np.random.default_rng(0)
    log_prob, old, start = (rng.normal(scale=0.5, size=200) for _ in range(3))
    advantages = rng.normal(size=200)
    total = 0.0
    for new, before, advantage in zip(log_prob, old, advantages, strict=True):
        ratio = np.exp(new - before)
        clipped = min(max(ratio, 0.8), 1.2)
        total -= min(ratio * advantage, clipped * advantage)
    tensors = [th.as_tensor(array) for array in (log_prob, old, advantages)]
    assert float(clipped_loss(*tensors, 0.2)) == pytest.approx(total / 200)
    ratio = np.exp(start) / np.exp(log_prob)
    assert float(k3(tensors[0], th.as_tensor(start))) == pytest.approx(np.mean(ratio - 1 - np.log(ratio)))
    assert float(k3(tensors[0], tensors[0])) == 0.0


def test_k3_estimates_the_divergence():
    """Of samples of the present Gaussian, against the closed form."""
    rng = np.random.default_rng(0)
    mean, std = 0.3, 1.1
    x = rng.normal(mean, std, size=400_000)
    present, start = (-0.5 * ((x - m) / s) ** 2 - np.log(s) for m, s in ((mean, std), (0.0, 1.0)))
    exact = np.log(1 / std) + (std**2 + mean**2) / 2 - 0.5
    assert float(k3(th.as_tensor(present), th.as_tensor(start))) == pytest.approx(exact, rel=0.02)


def play(collector, env, state, reward, chunks=1, broken=False, task=0):
    """One episode in one sub-environment; the others stand still (their chunk is broken)."""
    for chunk in range(chunks):
        last = chunk == chunks - 1
        outcomes = [
            ChunkOutcome(
                2, np.array([0.0, reward * last], np.float32), np.zeros((2, 1)), task_id=task,
                broken=broken if i == env else True,
            )
            for i in range(collector.n_envs)
        ]  # fmt: skip
        obs = {"x": np.full((collector.n_envs, 1), 10 * state + chunk)}
        dones = np.array([last and i == env for i in range(collector.n_envs)])
        infos = [{"init_index": state}] * collector.n_envs
        collector.step(obs, np.zeros((collector.n_envs, 2, 1)), np.zeros(collector.n_envs), outcomes, dones, infos)


def test_groups_are_sorted_by_initial_state():
    collector = GroupCollector(2, 2)
    play(collector, 0, state=5, reward=1.0, chunks=3)
    play(collector, 1, state=6, reward=1.0)
    assert collector.complete == []
    play(collector, 1, state=5, reward=0.0, chunks=2)
    ((first, second),) = collector.take()
    assert (first.reward, second.reward) == (1.0, 0.0) and len(first.actions) == 3 and len(second.log_probs) == 2
    assert [one["x"].item() for one in first.observations] == [50, 51, 52]
    assert collector.take() == []
    play(collector, 0, state=6, reward=1.0, broken=True)  # its group is complete without it
    assert [len(group) for group in collector.take()] == [1]
    for state in range(10, 20):  # one sub-environment runs ahead
        play(collector, 0, state, 1.0)
    play(collector, 1, state=10, reward=0.0)
    ((first, second),) = collector.take()
    assert (first.reward, second.reward) == (1.0, 0.0)
    for task, reward in ((1, 1.0), (2, 0.0), (1, 0.0), (2, 1.0)):  # states of two tasks may have the same number
        play(collector, task - 1, 40, reward, task=task)
    assert [[one.reward for one in group] for group in collector.take()] == [[1.0, 0.0], [0.0, 1.0]]
    collector.restart()
    play(collector, 0, state=19, reward=1.0)
    assert collector.take() == []


@pytest.mark.parametrize("num_envs", [1, 3])
def test_a_group_begins_at_one_state(num_envs):
    model = made(num_envs, group_size=3)
    groups = []
    take = model.collector.take
    model.collector.take = lambda: groups.extend(found := take()) or found
    model.learn(60)
    assert len(groups) >= 4 and all(len(group) == 3 for group in groups)
    first = [{episode.observations[0]["z_rl"].tobytes() for episode in group} for group in groups]
    assert all(len(states) == 1 for states in first) and len(set.union(*first)) == len(groups)
    assert len({action.tobytes() for group in groups for episode in group for action in episode.actions[:1]}) > 6


def test_a_rollout_that_is_stopped_gives_the_episodes_up():
    """The simulators are a chunk further than the last observation: groups begin anew with the next learn()."""

    class Stops(BaseCallback):
        def _on_step(self):
            return self.n_calls < 3

    model = made()
    model.learn(80)
    model.learn(80, reset_num_timesteps=False, callback=Stops())
    stopped = model.num_timesteps
    resets, reset = [], model.env.reset
    model.env.reset = lambda: resets.append(len(model.collector.complete)) or reset()
    model.learn(20, reset_num_timesteps=False)
    assert resets == [0] and model.num_timesteps > stopped
    model.learn(20, reset_num_timesteps=False)
    assert len(resets) == 1  # a call that came to its end goes on


def test_one_update():
    """What train() logs for one batch of all rows, from the groups that it takes."""
    model = made(n_epochs=1, batch_size=10_000, kl_coef=0.5, groups=8)
    with th.no_grad():
        model.policy.action_net.bias.add_(0.05 / np.exp(model.policy.log_std_init))  # not the start any more
        model.policy.log_std.add_(0.2)
    taken = []
    take = model.collector.take
    model.collector.take = lambda: taken.append(take()) or taken[-1]
    model.learn(1)
    (groups,) = taken
    assert len(groups) >= 8
    rows, ratio = [], []
    start, present = (np.exp(model.policy.log_std_init + more) for more in (0.0, 0.2))
    for group in groups:
        returns = np.array([episode.reward for episode in group])
        if returns.std() == 0:
            continue
        for episode, advantage in zip(group, (returns - returns.mean()) / returns.std(), strict=True):
            rows += [advantage] * len(episode.actions)
            for obs, action in zip(episode.observations, episode.actions, strict=True):
                u = (action - obs["vla_ref"]).mean(0).astype(np.float64)
                log_start, log_present = (
                    np.sum(-0.5 * ((u - mean) / std) ** 2 - np.log(std))
                    for mean, std in ((0.0, start), (0.05, present))
                )
                ratio.append(log_start - log_present)
    logged = model.logger.name_to_value
    share = np.mean([np.std([episode.reward for episode in group]) > 0 for group in groups])
    assert logged["rollout/groups_with_signal"] == share and 0 < share < 1
    assert logged["train/policy_gradient_loss"] == pytest.approx(-np.mean(rows), abs=1e-5)
    ratio = np.array(ratio)
    divergence = np.mean(np.exp(ratio) - 1 - ratio)
    assert logged["train/kl_to_start"] == pytest.approx(divergence, rel=1e-3)
    assert logged["train/loss"] == pytest.approx(-np.mean(rows) + 0.5 * divergence, rel=1e-3)


def test_groups_without_signal_change_nothing():
    model = made(num_envs=2, groups=1)
    before = {name: value.clone() for name, value in model.policy.state_dict().items()}
    for _ in range(4):
        play(model.collector, 0, state=1, reward=1.0)
    assert len(model.collector.complete) == 1
    model.set_logger(made().learn(1).logger)
    model.train()
    assert model.logger.name_to_value["rollout/groups_with_signal"] == 0.0
    assert same(before, model.policy.state_dict())


def test_trained_twice_and_saved(tmp_path):
    models = [made().learn(80) for _ in range(2)]
    assert same(*(model.get_parameters() for model in models)) and models[0]._n_updates > 0
    models[0].save(tmp_path / "m.zip")
    loaded, obs = GRPO.load(tmp_path / "m.zip", device="cpu"), models[0].env.reset()
    assert np.array_equal(*(model.predict(obs, deterministic=True)[0] for model in (models[0], loaded)))
    goes_on = GRPO.load(tmp_path / "m.zip", env=make_venv(2, group_size=4), device="cpu")
    goes_on.learn(40, reset_num_timesteps=False)
    assert goes_on.num_timesteps >= models[0].num_timesteps + 40


def test_it_learns():
    policy = {"net_arch": [16], "log_std_init": -2.5}
    model = made(8, group_size=8, groups=4, batch_size=64, learning_rate=3e-3, policy_kwargs=policy).learn(4000)
    episodes = model.ep_info_buffer
    assert len(episodes) == 100 and np.mean([episode["is_success"] for episode in episodes]) > 0.75


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 1}, "group_size must be >= 2, got 1"),
        ({"clip_range": 0.0}, r"clip_range must be in \(0, 1\), got 0.0"),
        ({"kl_coef": -1.0}, "kl_coef must be >= 0.0, got -1.0"),
        ({"learning_rate": -1.0}, "learning_rate must be >= 0, got -1.0"),
    ],
)
def test_refuses(settings, message):
    with pytest.raises(ValueError, match=message):
        made(**settings)


def test_refuses_an_environment_with_other_groups():
    with pytest.raises(ValueError, match="group_size is 4, but the environment plays each initial state 1 times"):
        GRPO("MultiInputPolicy", make_venv(), **SMALL)
