"""Every switch of the paper's ablations takes away what it says, and nothing else; the fake task shows what for."""

import numpy as np
import pytest
import torch as th
from benchmark_helpers import import_benchmark
from rlt_models import Numpy, fast, make_model, make_venv, oracle_model, random_obs, to_numpy
from stable_baselines3.common.callbacks import BaseCallback

from rlt_gym.rl_token.encoder import RLTokenConfig, RLTokenEncoder
from rlt_gym.rl_token.env import RLTokenVectorEnv
from rlt_gym.rl_token.io import load_rl_token, save_rl_token
from rlt_gym.rl_token.untrained import MeanToken
from rlt_gym.testing import FakeLiberoVectorEnv, FakeVLA
from rlt_sb3 import RLT, GymnasiumVecEnv

# ---------------------------------------------------------------- the fake task


def test_practice_on_the_fake_task_reaches_nine_in_ten():
    """
    One seed of ``benchmarks/fake_task.py``: the VLA solves half, the policy starts there, ends above 90 %, and is not
    below the VLA on the way.
    """
    benchmark = import_benchmark("fake_task")
    on_the_way = []

    class Evaluate(BaseCallback):
        def _on_step(self) -> bool:
            if self.num_timesteps in (1200, 2400):
                on_the_way.append(benchmark.successes(self.model, benchmark.CHUNK, 100) / 100)
            return True

    result = benchmark.run("RLT", seed=0, callback=Evaluate())
    assert len(on_the_way) == 2 and min(on_the_way) >= result["before"] / result["states"]
    assert 0.4 <= result["before"] / result["states"] <= 0.65
    assert result["after"] / result["states"] >= 0.9, result
    assert "| RLT | " in benchmark.table([result])


@pytest.mark.expensive
def test_every_variant_of_the_benchmark_gets_the_same_practice():
    benchmark = import_benchmark("fake_task")
    wanted = {"no reference input", "no reference dropout", "no pull (bc_coef 0)", "chunk length 1"}
    wanted |= {"no RL token (proprio only)", "time-outs taken for terminals"}
    assert wanted <= set(benchmark.VARIANTS)
    updates = set()
    for name in benchmark.VARIANTS:
        result = benchmark.run(name, seed=0, control_steps=1920, states=10)
        updates.add(result["updates"])
        # episodes that end inside a chunk make it shorter
        assert 1400 < result["control_steps"] <= 1920
    assert len(updates) == 1 and updates.pop() > 300


# ---------------------------------------------------------------- no RL token


def test_proprio_only():
    model = make_model(policy_kwargs={"token_input": False}, **fast())
    model.learn(40)  # with features prepared for all networks at once
    assert model.critic.features_extractor.features_dim == model.actor.features_dim == 11
    obs = random_obs(model, 6)
    other = obs | {"z_rl": obs["z_rl"][::-1].copy()}
    with th.no_grad():
        for parameter in model.policy.parameters():
            parameter.add_(0.1 * th.randn_like(parameter))
    a, b = (model.policy.obs_to_tensor(x)[0] for x in (obs, other))
    assert th.equal(model.actor(a), model.actor(b))
    actions = th.zeros(6, 28)
    assert th.equal(model.critic.q_values(a, actions), model.critic.q_values(b, actions))
    moved = model.policy.obs_to_tensor(obs | {"proprio": obs["proprio"] + 0.1})[0]
    assert not th.equal(model.actor(a), model.actor(moved))
    merged = make_model(
        policy_kwargs={"token_input": False, "net_arch": [8], "features_extractor_kwargs": {"proprio_norm": "none"}}
    )
    assert merged.critic.features_extractor.features_dim == 8


@pytest.mark.parametrize("mode", ["residual", "direct"])
def test_without_a_token_the_start_is_the_same(mode, tmp_path):
    model = make_model(policy_kwargs=dict(token_input=False, reference_input=False, actor_mode=mode))
    obs = random_obs(model, 5)
    actions, _ = model.predict(obs, deterministic=True)
    assert np.array_equal(actions, obs["vla_ref"]) is (mode == "residual")
    model.save(tmp_path / "model.zip")
    loaded = RLT.load(tmp_path / "model.zip")
    assert np.array_equal(loaded.predict(obs)[0], actions)
    assert loaded.policy.token_input is False and loaded.policy.reference_input is False
    loaded.policy.save(tmp_path / "policy.pt")
    assert np.array_equal(type(loaded.policy).load(tmp_path / "policy.pt").predict(obs)[0], actions)


def test_mean_token_against_numpy():
    """A frozen picture feature: the mean over the valid picture tokens, pads and other kinds left out."""
    vla = FakeVLA(n_tokens=6, token_dim=8)
    rng = np.random.default_rng(0)
    output = vla.forward(
        {
            "agentview": rng.integers(0, 255, (4, 8, 8, 3)).astype(np.uint8),
            "wrist": rng.integers(0, 255, (4, 8, 8, 3)).astype(np.uint8),
            "state": rng.normal(size=(4, 8)).astype(np.float32),
        },
        ["a", "b", "c", "d"],
    )
    output.kind[:, 2] = 2  # a word
    token = load_rl_token("mean", vla)
    z = token(output).numpy()
    for row in range(4):
        keep = [i for i in range(6) if output.mask[row, i] and i != 2]
        mean = output.tokens[row].numpy()[keep].mean(axis=0)
        np.testing.assert_allclose(z[row], (mean - mean.mean()) / np.sqrt(mean.var() + 1e-5), atol=1e-5)
    assert sum(parameter.numel() for parameter in token.parameters()) == 0
    with pytest.raises(ValueError, match="use rl_token='mean'"):
        load_rl_token(MeanToken(5), vla)
    with pytest.raises(ValueError, match="needs the VLA whose tokens it reads"):
        load_rl_token("mean")
    with pytest.raises(ValueError, match="'auto', 'mean'"):
        load_rl_token(3)


def layer_norm(rows: np.ndarray) -> np.ndarray:
    return (rows - rows.mean(-1, keepdims=True)) / np.sqrt(rows.var(-1, keepdims=True) + 1e-5)


def test_untrained_tokens_against_numpy(tmp_path):
    """All tokens' mean, the last valid one, and random weights that are the same each time."""
    vla = FakeVLA(n_tokens=6, token_dim=8)
    frames = np.random.default_rng(0).integers(0, 255, (2, 4, 8, 8, 3)).astype(np.uint8)
    obs = {"agentview": frames[0], "wrist": frames[1], "state": np.zeros((4, 8), np.float32)}
    output = vla.forward(obs, ["a", "b", "c", "d"])
    output.mask[1, 4:] = output.mask[2, 5:] = False
    output.mask[3, 1] = False  # a hole in the middle
    rows = [row[mask] for row, mask in zip(output.tokens.numpy(), output.mask.numpy(), strict=True)]
    mean, last = load_rl_token("mean-all", vla), load_rl_token("last", vla)
    np.testing.assert_allclose(mean(output), layer_norm(np.stack([row.mean(0) for row in rows])), atol=1e-5)
    np.testing.assert_allclose(last(output), layer_norm(np.stack([row[-1] for row in rows])), atol=1e-5)
    assert len({one.fingerprint() for one in (mean, last, load_rl_token("mean", vla))}) == 3
    assert mean.z_dim == last.z_dim == 8
    with pytest.raises(ValueError, match="use rl_token='last'"):
        load_rl_token(last, FakeVLA(n_tokens=6, token_dim=5))

    path = tmp_path / "token.safetensors"
    trained = RLTokenEncoder(RLTokenConfig(8, max_tokens=6, width=8, heads=1), vla.fingerprint(), "fake")
    trained.set_statistics(th.full((8,), 0.25), th.full((8,), 2.0))
    save_rl_token(path, trained)
    random = load_rl_token(f"random:{path}", vla)
    assert random.config == trained.config and random.fingerprint() != trained.fingerprint()
    assert th.equal(random.token_mean, trained.token_mean) and th.equal(random.token_std, trained.token_std)
    assert random.fingerprint() == load_rl_token(f"random:{path}", vla).fingerprint()
    assert random(output).shape == (4, 8) and not th.equal(random.input.weight, trained.input.weight)
    with pytest.raises(ValueError, match="needs the VLA whose tokens it reads"):
        load_rl_token("random:auto")


@pytest.mark.parametrize("rl_token", ["mean", None])
def test_either_token_trains_and_the_vla_stays_frozen(rl_token):
    """What is frozen has the same bits after training as before."""
    vla = FakeVLA(n_tokens=5, token_dim=12)
    token = rl_token or RLTokenEncoder(RLTokenConfig(12, max_tokens=5, width=8, heads=1), vla.fingerprint(), "fake")
    env = RLTokenVectorEnv(FakeLiberoVectorEnv(2, chunk_length=4), vla, token)
    assert env.single_observation_space["z_rl"].shape == (12,)
    before = [parameter.clone() for parameter in env.encoder.parameters()], vla._encoder.copy(), vla.fingerprint()
    small = dict(policy_kwargs={"net_arch": [8]}, batch_size=8, learning_starts=8, critic_warmup_updates=2)
    model = RLT("MultiInputPolicy", GymnasiumVecEnv(env), device="cpu", seed=0, **small)
    model.learn(40)
    assert model._n_updates > 20
    assert all(th.equal(a, b) for a, b in zip(before[0], env.encoder.parameters(), strict=True))
    assert np.array_equal(before[1], vla._encoder) and before[2] == vla.fingerprint()
    assert all(not parameter.requires_grad for parameter in env.encoder.parameters())


# ---------------------------------------------------------------- no reference input


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("mode", ["residual", "direct"])
def test_actor_without_reference_input_against_numpy(mode, dropout):
    """What the network adds depends on the token only; the pull is still to the reference."""
    model, batch = oracle_model(policy_kwargs=dict(actor_mode=mode, reference_input=False), reference_dropout=dropout)
    with th.no_grad():
        batch.observations["vla_ref"].mul_(0.2)
        for parameter in (model.actor.mu[-1].weight, model.actor.mu[-1].bias):
            parameter.mul_(0.1)
    oracle = Numpy(model)
    obs, _, _ = to_numpy(batch)
    reference = obs["vla_ref"].reshape(16, -1)
    hidden = oracle.features("actor", obs)
    for layer in (0, 2):
        hidden = np.maximum(hidden @ oracle.p[f"actor.mu.{layer}.weight"].T + oracle.p[f"actor.mu.{layer}.bias"], 0)
    output = hidden @ oracle.p["actor.mu.4.weight"].T + oracle.p["actor.mu.4.bias"]
    wanted = np.clip(output + reference if mode == "residual" else output, -1, 1)
    with th.no_grad():
        np.testing.assert_allclose(model.actor(batch.observations).numpy(), wanted, atol=1e-5)
    stats = model._update_actor(batch)
    q = oracle.q("critic", obs, wanted).mean(0)
    # dropout takes the reference from the input; without that input it has nothing to take
    assert float(stats[0]) == pytest.approx(-q.mean() + 3.0 * ((wanted - reference) ** 2).mean(), abs=1e-5)


def test_reference_dropout_of_one_hides_the_reference_in_updates():
    """With probability 1 the update sees nothing of the reference, with 0.5 in half of the samples."""
    model, batch = oracle_model(policy_kwargs={"actor_mode": "direct"}, reference_dropout=1.0)
    seen = []
    forward = model.actor.forward

    def watch(obs, keep=None):
        seen.append((keep, forward(obs, keep)))
        return seen[-1][1]

    model.actor.forward = watch
    model._update_actor(batch)
    changed = batch.observations | {"vla_ref": -batch.observations["vla_ref"]}
    state = {key: value.clone() for key, value in model.policy.state_dict().items()}
    model._update_actor(batch._replace(observations=changed))
    model.policy.load_state_dict(state)
    keep, _ = seen[0]
    assert not keep.any()
    with th.no_grad():
        assert th.equal(forward(batch.observations, keep), forward(changed, keep))
        assert not th.equal(forward(batch.observations), forward(changed))  # never in predict
    seen.clear()
    model.reference_dropout = 0.5
    for _ in range(640):
        model._update_actor(batch)
    share = th.cat([keep for keep, _ in seen]).mean().item()
    assert share == pytest.approx(0.5, abs=0.02)


# ---------------------------------------------------------------- chunk length 1, time-outs


def test_chunks_of_one_step():
    model = make_model(venv=make_venv(2, chunk_length=1), **fast())
    model.learn(80)
    assert model.num_control_steps == model.num_timesteps == 80
    rows = model.replay_buffer.storage
    slots = np.flatnonzero(rows.is_row(np.arange(rows.size)))
    assert (rows.chunk_steps[slots] == 1).all() and rows.actions.shape[1:] == (1, 7)
    batch = rows.gather(slots, 3, 0.5, th.device("cpu"))
    ends = rows.terminated[slots] | rows.truncated[slots]
    assert ends.any()
    assert set(np.unique(batch.discounts.numpy())) <= {0.5, 0.25, 0.125}
    assert (batch.discounts.numpy()[ends] == 0.5).all()


def test_time_outs_taken_for_terminals():
    """The rows are those of bootstrapping after time-outs, but nothing is bootstrapped after a time-out."""
    dones = {}
    for handled in (True, False):
        venv = make_venv(2, seed=3, max_episode_steps=8)
        model = make_model(venv=venv, learning_starts=1000, replay_buffer_kwargs={"timeout_is_failure": not handled})
        model.learn(60)
        rows = model.replay_buffer.storage
        slots = np.flatnonzero(rows.is_row(np.arange(rows.size)))
        dones[handled] = rows.gather(slots, 1, 0.9, th.device("cpu")).dones.numpy()[:, 0]
        solved = rows.step_rewards[slots].sum(axis=1) > 0
        if handled:
            assert np.array_equal(dones[True] > 0, solved)
    assert np.all(dones[False] >= dones[True]) and dones[False].sum() > dones[True].sum() > 0
