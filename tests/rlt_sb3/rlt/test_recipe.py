"""The defaults are the recipe behind the results; the unit of action comes from the VLA; the paper's own preset."""

import inspect

import numpy as np
import pytest
import torch as th
from rlt_models import Rows, fast, make_venv, random_obs

from rlt_gym.testing import FakeRLTokenVectorEnv
from rlt_sb3 import RLT, GymnasiumVecEnv
from rlt_sb3.common.replay.buffer import ChunkReplayBuffer
from rlt_sb3.rlt.policies import RLTPolicy
from rlt_sb3.rlt.presets import PAPER

SMALL_NETS = {"net_arch": [16, 16]}


class Narrow(FakeRLTokenVectorEnv):
    """The VLA's chunks are spread 0.05 about 0.1, 0.2, ... in the first dimensions; the last jumps from -1 to 1."""

    spread = np.array([0.05, 0.1, 0.01, 0.2, 0.0, 0.05, 1.0])

    def _narrow(self, obs):
        signs = np.sign(np.sin(np.arange(obs["vla_ref"].size) * 12.9898 + self.calls).reshape(obs["vla_ref"].shape))
        self.calls += 1
        obs["vla_ref"] = (signs * self.spread).astype(np.float32)
        return obs

    def reset(self, **kwargs):
        self.calls = getattr(self, "calls", 0)
        obs, info = super().reset(**kwargs)
        return self._narrow(obs), info

    def step(self, actions):
        obs, *rest = super().step(actions)
        return self._narrow(obs), *rest


def model_of(env=None, **kwargs) -> RLT:
    venv = make_venv(2) if env is None else GymnasiumVecEnv(env)
    policy_kwargs = SMALL_NETS | {"critic_precision": "float32"} | kwargs.pop("policy_kwargs", {})
    return RLT("MultiInputPolicy", venv, policy_kwargs=policy_kwargs, batch_size=16, device="cpu", seed=0, **kwargs)


def test_what_one_types_is_the_recipe():
    """Settings of the published runs (benchmarks/results), written again by hand."""
    defaults = {name: p.default for name, p in inspect.signature(RLT).parameters.items()}
    networks = {name: p.default for name, p in inspect.signature(RLTPolicy).parameters.items()}
    rows = {name: p.default for name, p in inspect.signature(ChunkReplayBuffer).parameters.items()}
    pull = defaults["bc_coef"]
    expected = [max(60 - 45 * chunks / 1200, 15.0) for chunks in range(0, 7200, 30)]
    assert [pull(chunks) for chunks in range(0, 7200, 30)] == pytest.approx(expected, rel=1e-9)
    assert defaults["action_scale"] == "auto" and defaults["gate"] is True
    recipe = dict(
        exploration_std=0.05, correction_range=(0.0, 2.0), reference_dropout=0.5, target_policy_noise=0.0,
        learning_starts=200, utd=2.0, n_steps=3, critic_warmup_updates=500, q_bounds=(0.0, 1.0), gamma=0.99, tau=0.005,
        learning_rate=3e-4, batch_size=256, policy_delay=2, bc_failure_weight=1.0,
        train_freq=(1, "overlap"),
    )  # fmt: skip
    assert {name: defaults[name] for name in recipe} == recipe
    assert networks["critic_precision"] == "auto" and networks["actor_mode"] == "residual"
    assert (networks["n_critics"], networks["actor_q"], networks["act_with"]) == (5, "mean", "target")
    assert networks["gripper_flip"] == 0.0 and networks["offset_search"] is True
    assert rows["timeout_is_failure"] is True
    model = model_of()
    assert (model.gate.share, model.gate.window) == (0.5, 16) and model.policy.gated
    assert model.replay_buffer.handle_timeout_termination is False


def test_timeouts_are_failures_unless_one_says_otherwise():
    dones = {}
    for name, kwargs in {"failure": {}, "goes on": {"replay_buffer_kwargs": {"timeout_is_failure": False}}}.items():
        model = model_of(FakeRLTokenVectorEnv(2, chunk_length=4, max_episode_steps=8), learning_starts=60, **kwargs)
        ends = Rows()
        model.learn(40, callback=ends)
        cut = sum(bool(info.get("TimeLimit.truncated")) for info in ends.infos)
        storage = model.replay_buffer.storage
        dones[name] = int(storage.terminated.sum()), int(storage.truncated.sum())
        assert cut > 4
    assert dones["failure"][1] == 0 and dones["goes on"][1] > 4
    assert dones["failure"][0] == sum(dones["goes on"])


def test_unit_of_action_is_the_spread_of_the_vlas_chunks():
    env = Narrow(2, chunk_length=4)
    model = model_of(env, learning_starts=40, critic_warmup_updates=2, gate=False)
    seen = []
    model.learn(40, callback=lambda scope, _: seen.append(scope["self"]._last_obs["vla_ref"].copy()) is None or True)
    assert model._measured_unit is None  # the VLA plays: nothing needs it yet
    model.learn(60, reset_num_timesteps=False)
    spread = np.concatenate(seen).reshape(-1, 7).std(0)
    assert spread == pytest.approx(env.spread, abs=0.01)
    expected = np.clip(8 * env.spread, 0.2, 1.0)
    assert expected.tolist() == pytest.approx([0.4, 0.8, 0.2, 1.0, 0.2, 0.4, 1.0])
    assert model.action_unit == pytest.approx(expected, abs=0.02)
    assert model.action_scale == "auto"


def test_unit_stays_through_saving_and_further_learning(tmp_path):
    env = Narrow(2, chunk_length=4)
    model = model_of(env, **fast(gate=False))
    model.learn(40)
    unit = model.action_unit
    assert model._measured_unit == unit.tolist()
    model.save(tmp_path / "model.zip")
    env.spread = np.full(7, 0.5)  # another VLA than the one that the critics know would give another unit
    loaded = RLT.load(tmp_path / "model.zip", env=model.env, device="cpu")
    loaded.learn(40)
    model.learn(40, reset_num_timesteps=False)
    assert np.array_equal(loaded.action_unit, unit) and np.array_equal(model.action_unit, unit)
    assert np.array_equal(RLT.load(tmp_path / "model.zip", action_scale=0.3).action_unit, 0.3)


def test_auto_learns_as_the_same_numbers_written_by_hand():
    """The unit reaches noise, targets and pull alike: two runs with equal units are equal bit for bit."""
    runs = []
    for scale in ("auto", None):
        model = model_of(
            Narrow(2, chunk_length=4),
            **fast(target_policy_noise=0.1),
            action_scale=runs[0][1] if scale is None else scale,
        )
        model.learn(80)
        runs.append((model.policy.state_dict(), model.action_unit.tolist()))
    assert all(th.equal(value, runs[1][0][name]) for name, value in runs[0][0].items())
    other = model_of(Narrow(2, chunk_length=4), **fast(target_policy_noise=0.1), action_scale=1.0)
    other.learn(80)
    assert not all(th.equal(value, runs[0][0][name]) for name, value in other.policy.state_dict().items())


def test_before_the_first_row_the_present_chunks_tell():
    model = model_of(Narrow(2, chunk_length=4))
    assert model.action_unit.tolist() == [0.2]  # nobody has played
    model = model_of(Narrow(2, chunk_length=4), learning_starts=0, gate=False)
    model.learn(2)
    assert model.action_unit.shape == (7,) and model.action_unit[2] == 0.2 and model.action_unit[6] > 0.5


def test_the_papers_recipe_is_complete():
    """Equations 3 to 5 of the paper, on a model made with the preset."""
    model = model_of(**(PAPER | {"policy_kwargs": PAPER["policy_kwargs"] | SMALL_NETS}))
    assert model.gate is None and not model.policy.starts_at_vla and model.q_bounds is None
    assert (model.critic.n_critics, model.utd, model.n_steps, model.policy_delay) == (2, 5.0, 1, 2)
    assert model.policy.training_actor is model.actor  # the online actor plays
    assert model.action_unit == 1.0
    obs = {key: th.as_tensor(value) for key, value in random_obs(model, 4000).items()}
    batch = type("Batch", (), dict(next_observations=obs, rewards=th.zeros(4000, 1), dones=th.zeros(4000, 1)))
    batch.discounts = th.ones(4000, 1)
    asked = []
    model.critic_target.target_q = lambda o, a: (asked.append(a), th.zeros(len(a)))[1]
    model._targets(batch)
    inside = model.actor_target(obs).abs() < 0.7
    noise = (asked[0] - model.actor_target(obs))[inside]
    assert noise.std().item() == pytest.approx(0.05, rel=0.03)
    assert noise.abs().max().item() > 3.5 * 0.05  # not cut off


def test_the_actors_loss_judges_sampled_chunks():
    model = model_of(policy_kwargs={"actor_std": 0.05}, action_scale=[1.0, 1.0, 1.0, 0.2, 0.2, 0.2, 1.0], gate=False)
    model.learn(2)
    model.replay_buffer.size()
    asked = []
    real = model.critic.actor_q
    model.critic.actor_q = lambda o, a: (asked.append(a.detach().clone()), real(o, a))[1]
    obs = {key: th.as_tensor(value) for key, value in random_obs(model, 3000).items()}
    obs["vla_ref"] = obs["vla_ref"] * 0.5
    batch = type("Batch", (), dict(observations=obs, bc_target=obs["vla_ref"].flatten(1), successful=th.ones(3000, 1)))
    own = model.actor(obs).detach()
    model._update_actor(batch)
    noise = (asked[0] - own).reshape(-1, 7)
    assert noise.std(0).tolist() == pytest.approx([0.05, 0.05, 0.05, 0.01, 0.01, 0.01, 0.05], rel=0.03)


def test_shipped_configurations_leave_the_algorithm_alone_but_the_papers_has_it_all():
    from pathlib import Path

    from rlt_sb3.experiment.config import config_file, load_config, shipped_configs

    settings = {name: load_config(Path(config_file(name))).settings for name in shipped_configs()}
    paper = settings.pop("paper")
    assert paper | {"correction_range": tuple(paper["correction_range"])} == PAPER  # YAML has lists
    assert load_config(Path(config_file("paper"))).env.kwargs == {"obs_stride": 2}
    quick = {"learning_starts", "critic_warmup_updates", "policy_kwargs"}
    assert settings.pop("demo_quick").keys() <= quick  # it is 300 chunks long
    ten = {"learning_starts": 2000}  # ten tasks' worth of the default
    assert settings.pop("libero_spatial_ten") == ten
    # in its task 9 the VLA does not let go of the bottle
    assert settings.pop("libero_goal_ten") == ten | {"policy_kwargs": {"gripper_flip": 0.02, "gripper_critic": {}}}
    assert len(settings) >= 7 and not any(settings.values())
