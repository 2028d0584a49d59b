"""The choice of algorithm, the baseline, the guard, and what a configuration may import."""

import json
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
import toy_env
from run_helpers import quick, same, small
from stable_baselines3.common.callbacks import CallbackList

from rlt_gym.testing import FakeRLTokenVectorEnv
from rlt_sb3 import RLT, GymnasiumVecEnv
from rlt_sb3.callbacks import BudgetCallback, SelectionCallback
from rlt_sb3.cli.main import main
from rlt_sb3.common.flat_actions import FlatActions, WholeChunkReplayBuffer
from rlt_sb3.evaluation.results import Evaluation, StateResult
from rlt_sb3.experiment.algorithms import algorithm_names, get_algorithm
from rlt_sb3.experiment.config import EnvConfig, EvalSettings, ReportConfig, RolloutConfig, TrainConfig
from rlt_sb3.experiment.environment import make_env
from rlt_sb3.experiment.eval_config import EvalConfig
from rlt_sb3.experiment.evaluate_run import evaluate_run
from rlt_sb3.experiment.imports import check_hooks, check_import, resolve_class, resolve_classes
from rlt_sb3.experiment.models import load_model, make_model, make_vec_env
from rlt_sb3.experiment.report import read_metrics, report, write_report
from rlt_sb3.experiment.train import train


@pytest.mark.parametrize(
    ("algorithm", "mode", "train_freq"),
    [
        ("rlt", None, None), ("rlt", "sync", 1), ("rlt", "overlap", [1, "overlap"]), ("rlt", "async", 1),
        ("tqc", None, None), ("tqc", "sync", None),
    ],
)  # fmt: skip
def test_the_mode_says_when_updates_are_computed(algorithm, mode, train_freq):
    config = TrainConfig(algorithm=algorithm, rollout=RolloutConfig(mode))
    assert config.model_settings.get("train_freq") == train_freq
    config.settings["train_freq"] = 4
    assert mode not in (None, "sync") or config.model_settings["train_freq"] == 4
    if mode is None or algorithm == "tqc":
        config.check()
    else:
        with pytest.raises(ValueError, match=f"rollout.mode '{mode}' sets rlt.train_freq itself"):
            config.check()


def test_registry(tmp_path):
    assert algorithm_names() == ["rlt", "dsrl", "grpo", "ppo", "residual_sac", "tqc"]
    with pytest.raises(
        ValueError, match="Unknown algorithm 'sac'; choose one of rlt, dsrl, grpo, ppo, residual_sac, tqc"
    ):
        get_algorithm("sac")
    with pytest.raises(
        ValueError, match="Unknown algorithm 'sac'; choose one of rlt, dsrl, grpo, ppo, residual_sac, tqc"
    ):
        train(small(tmp_path, algorithm="sac"))
    with pytest.raises(ValueError, match=r"Unknown TQC setting 'bc_coef'\. Valid settings: learning_rate"):
        train(small(tmp_path, algorithm="tqc", tqc={"bc_coef": 1}))
    for key in ("policy_kwargs", "replay_buffer_kwargs", "gate"):
        with pytest.raises(ValueError, match=rf"Unknown RLT setting '{key}\.typo'\. Valid settings: "):
            train(small(tmp_path, rlt={key: {"typo": 1}}))
    with pytest.raises(ValueError, match=r"Unknown RLT setting 'trial_share'\. Valid settings: .*gate"):
        train(small(tmp_path, rlt={"trial_share": 0.5}))
    with pytest.raises(ValueError, match="Unknown guard"):
        train(small(tmp_path, guard="pray"))
    assert list(tmp_path.iterdir()) == []


def test_flat_actions_are_the_same_chunks():
    flat, chunked = (GymnasiumVecEnv(gym.make_vec("FakeRLToken-v0", num_envs=2, seed=1)) for _ in range(2))
    flat = FlatActions(flat)
    assert flat.action_space.shape == (28,) and flat.observation_space == chunked.observation_space
    for venv in (flat, chunked):
        venv.seed(1)
    assert all(np.array_equal(a, b) for a, b in zip(flat.reset().values(), chunked.reset().values(), strict=True))
    rng = np.random.default_rng(0)
    for _ in range(8):
        chunks = rng.uniform(-1, 1, (2, 4, 7)).astype(np.float32)
        one, other = flat.step(chunks.reshape(2, 28)), chunked.step(chunks)
        assert np.array_equal(one[0]["proprio"], other[0]["proprio"])
        assert np.array_equal(one[1], other[1]) and np.array_equal(one[2], other[2])


def test_the_baseline_refuses_what_it_cannot_store(tmp_path):
    for key in ("intervention", "critical_phase"):
        config = small(tmp_path, algorithm="tqc")
        config.env.kwargs[key] = "rlt_gym.libero.critical_phase:gripper_near_object"
        with pytest.raises(ValueError, match=f"'tqc' cannot learn with env.kwargs {key}: it would store"):
            train(config)
    with pytest.raises(ValueError, match=r"tqc.n_steps must be 1, got 3"):
        train(small(tmp_path, algorithm="tqc", tqc={"n_steps": 3}))
    assert list(tmp_path.iterdir()) == []


def test_the_baseline_leaves_out_broken_chunks():
    """Each number is the place of a transition: four of three environments, two of them broken, in room for nine."""
    space = gym.spaces.Dict(z_rl=gym.spaces.Box(-np.inf, np.inf, (1,), np.float32))
    buffer = WholeChunkReplayBuffer(9, space, gym.spaces.Box(-1, 1, (2,), np.float32), device="cpu", n_envs=3)
    for step in range(4):
        numbers = np.arange(3 * step, 3 * step + 3, dtype=np.float32)
        infos = [{"worker_restarted": number in (4, 8), "TimeLimit.truncated": number == 5} for number in numbers]
        obs, after = {"z_rl": numbers[:, None]}, {"z_rl": numbers[:, None] + 0.5}
        buffer.add(obs, after, np.stack([numbers, -numbers], axis=1) / 100, numbers / 10, numbers % 5 == 0, infos)
    assert buffer.rows_stored == 10 and buffer.size() == 9 and buffer.full
    batch = buffer.sample(500)
    seen = batch.observations["z_rl"][:, 0]
    assert set(seen.tolist()) == {1, 2, 3, 5, 6, 7, 9, 10, 11}  # the oldest is overwritten
    assert torch.equal(batch.next_observations["z_rl"][:, 0], seen + 0.5)
    torch.testing.assert_close(batch.actions, torch.stack([seen, -seen], dim=1) / 100)
    torch.testing.assert_close(batch.rewards[:, 0], seen / 10)
    assert torch.equal(batch.dones[:, 0], (seen == 10).float())  # 5 was a time-out


def test_baseline_goes_the_same_way(tmp_path, capsys):
    """TQC: trained, evaluated on the same states, compared with the VLA, and shown beside a run of RLT."""
    evaluation = EvalSettings(6, 4, 40, videos=False)
    tqc = train(small(tmp_path, algorithm="tqc", name="tqc", evaluation=evaluation, total_chunks=60))
    out = capsys.readouterr().out
    assert "TQC" in out and "WARNING: the untrained" not in out
    data = json.loads((tqc.run / "evaluations.json").read_text())
    assert data["tqc"]["n"] == 6 and "rlt" not in data
    model = load_model("tqc", tqc.run / "model.zip", device="cpu")
    assert type(model).__name__ == "TQC" and model.action_space.shape == (6,)
    # SB3's discount is per transition: two control steps here
    assert model.gamma == pytest.approx(0.99**2)
    assert type(model.replay_buffer) is WholeChunkReplayBuffer
    assert evaluate_run(EvalConfig(run=str(tqc.run), progress=False)).rows == tqc.best.rows
    rlt = train(small(tmp_path, name="rlt", evaluation=evaluation, total_chunks=40))
    page = report(ReportConfig(run=str(rlt.run), beside=[str(tqc.run)])).read_text()
    assert page.count("<td>RLT</td>") == 1 and "TQC (run tqc)" in page
    written = capsys.readouterr().out.splitlines()[-1]
    assert written == f"written: {rlt.run / 'report.html'}, {rlt.run / 'learning_curve.png'}"
    other = train(small(tmp_path, name="other", evaluation=EvalSettings(3, 2, 40, videos=False), total_chunks=40))
    with pytest.raises(ValueError, match="same initial states"):
        write_report(rlt.run, [other.run])


@pytest.mark.parametrize("untrained_is_best", [True, False])
def test_guard_restores_networks_and_keeps_the_buffer(tmp_path, untrained_is_best):
    def outcome(successes):
        return Evaluation("x", "selection", [StateResult(p, 0, p, p < successes, 5, 1) for p in range(20)])

    venv = GymnasiumVecEnv(make_env(EnvConfig(id="FakeRLToken-v0", render_mode=None), "train", 0))
    kwargs = {"learning_starts": 10, "batch_size": 8, "critic_warmup_updates": 0, "policy_kwargs": {"net_arch": [8]}}
    kwargs["gate"] = False  # the actor that learns is the one that plays
    model = RLT("MultiInputPolicy", venv, seed=0, device="cpu", **kwargs)
    results = iter([outcome(18), outcome(1)])
    guard = SelectionCallback(
        lambda candidate: next(results), 20, outcome(12), BudgetCallback(100), tmp_path / "best.zip", guard="restore"
    )
    model.learn(2, callback=CallbackList([guard]))
    if untrained_is_best:
        next(results)
        guard.keep(outcome(18))
        guard.best_chunks = 0
    else:
        model.learn(40, reset_num_timesteps=False)
        guard.run()
    kept = {key: value.clone() for key, value in model.policy.state_dict().items()}
    model.learn(40, reset_num_timesteps=False)
    worse = {key: value.clone() for key, value in model.policy.state_dict().items()}
    rows, updates = model.replay_buffer.size(), model._n_updates
    assert not same(kept, worse)
    guard.run()
    now = model.policy.state_dict()
    for key, value in now.items():
        expected = worse if untrained_is_best and key.startswith("critic") else kept
        assert torch.equal(value, expected[key]), key
    assert (model.replay_buffer.size(), model._n_updates) == (rows, updates)
    assert guard.below_vla(outcome(1)) and not guard.below_vla(outcome(9))
    model.learn(10, reset_num_timesteps=False)  # goes on
    venv.close()


@pytest.mark.parametrize(
    "name, settings", [("ppo", {"n_steps": 20, "batch_size": 20}), ("grpo", {"group_size": 2, "groups": 2})]
)
def test_guard_restores_policies_without_an_actor_apart(tmp_path, name, settings):
    """The untrained model is the best one: what plays is put back, the value function stays."""

    def outcome(successes):
        return Evaluation("x", "selection", [StateResult(p, 0, p, p < successes, 5, 1) for p in range(20)])

    venv = make_vec_env(name, FakeRLTokenVectorEnv(2, group_size=settings.get("group_size", 1)))
    model = make_model(name, venv, settings, 0)
    guard = SelectionCallback(
        lambda player: outcome(1), 1000, outcome(18), BudgetCallback(200), tmp_path / "best.zip", guard="restore"
    )
    guard.init_callback(model)
    guard.keep(outcome(18))
    start = {key: value.clone() for key, value in model.policy.state_dict().items()}
    model.learn(200)
    worse = {key: value.clone() for key, value in model.policy.state_dict().items()}
    assert not any(worse[key].equal(start[key]) for key in ("log_std", "action_net.weight"))
    assert name == "grpo" or not worse["value_net.weight"].equal(start["value_net.weight"])
    guard.run()
    for key, value in model.policy.state_dict().items():
        assert value.equal((worse if "value_net" in key else start)[key]), key


@pytest.mark.parametrize("guard, told", [("restore", "the best networks so far are put back"), ("warn", "it goes on")])
def test_a_run_with_the_guard(tmp_path, monkeypatch, capsys, guard, told):
    monkeypatch.setattr("rlt_sb3.experiment.report.write_report", lambda run: None)

    def spoiled(self, observation, *args, **kwargs):
        action = observation["vla_ref"].copy()
        return (-np.ones_like(action) if self.num_timesteps > 40 else action), None

    monkeypatch.setattr(RLT, "predict", spoiled)
    result = train(
        quick(tmp_path, env_id="ToyRLToken-v0", guard=guard, evaluation=EvalSettings(4, 24, 40, videos=False))
    )
    assert capsys.readouterr().out.count(f"the best model so far is kept, {told}.") == 2
    metrics = read_metrics(result.run)
    # as good as the VLA after 40 chunks, without a success after 80 and 100
    played = ~np.isnan(metrics["selection/success_rate"])
    assert metrics["selection/vla_success_rate"][played].tolist() == [0.5, 0.5, 0.5]
    assert metrics["selection/success_rate"][played].tolist() == [0.5, 0.0, 0.0]
    assert metrics["selection/below_vla"][played].tolist() == [0.0, 1.0, 1.0]
    if guard == "restore":
        assert metrics["selection/restored"][played].tolist() == [0.0, 1.0, 1.0]
    else:
        assert "selection/restored" not in metrics


def test_configurations_import_known_packages_only(monkeypatch, tmp_path, capsys):
    assert resolve_class("torch.nn:GELU", "rlt.activation_fn") is torch.nn.GELU
    for bad, message in (
        ("os:system", "names the module 'os'"),
        ("subprocess:Popen", "names the module 'subprocess'"),
        ("torch.nnx:GELU", "names the module 'torch.nnx'"),
        ("rlt_gym.evil:Thing", "there is no"),
        ("torch.nn.functional:relu", "must name a class"),
        ("rlt_sb3.experiment.run_dir:Path", "names the module 'pathlib'"),
        ("torch.nn:init.os", "must be 'module:Class'"),
        ("GELU", "must be 'module:Class'"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve_class(bad, "rlt.x")
    assert resolve_classes({"policy_kwargs": {"activation_fn": "torch.nn:Tanh", "net_arch": [8]}}, "rlt") == {
        "policy_kwargs": {"activation_fn": torch.nn.Tanh, "net_arch": [8]}
    }
    with pytest.raises(ValueError, match=r"rlt.policy_kwargs.optimizer_class names the module 'os'"):
        train(small(tmp_path, rlt={"policy_kwargs": {"optimizer_class": "os:system"}}))
    monkeypatch.delenv("RLT_ALLOWED_IMPORTS", raising=False)
    for setting, value in (("env.id", "os:RLToken-v0"), ("env.vla", "os:system")):
        assert main(["train", f"--{setting}", value, "--out", str(tmp_path)]) == 2
        assert "os" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("RLT_ALLOWED_IMPORTS", "my_package")
    check_import("my_package.envs", "env.id")
    with pytest.raises(ValueError, match="my_packages"):
        check_import("my_packages", "env.id")


def test_configurations_name_hooks_of_known_packages_only(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("RLT_ALLOWED_IMPORTS", raising=False)
    monkeypatch.delitem(sys.modules, "intervention_hooks", raising=False)
    for key in ("intervention", "critical_phase"):
        for bad, message in (
            ("os:system", f"env.kwargs.{key} names the module 'os'"),
            ("intervention_hooks:downwards", "RLT_ALLOWED_IMPORTS=intervention_hooks"),
            ("rlt_gym.workers.hooks:inspect", "names the module"),
            ("rlt_sb3.experiment.run_dir:Path", "names the module 'pathlib'"),
            ("rlt_gym.libero.critical_phase:nothing", "there is no"),
            ("rlt_gym.libero.critical_phase", "must be 'module:name'"),
        ):
            with pytest.raises(ValueError, match=message):
                make_env(EnvConfig(id="FakeRLToken-v0", kwargs={key: bad}), "train", 0)
    assert "intervention_hooks" not in sys.modules
    kwargs = '{"intervention": "os:system"}'
    assert main(["train", "--env.id", "FakeRLToken-v0", "--env.kwargs", kwargs, "--out", str(tmp_path)]) == 2
    assert "env.kwargs.intervention names the module 'os'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    check_hooks({"intervention": "rlt_gym.libero.interventions:ScriptedTakeover"}, "env.kwargs")
    check_hooks({"intervention": lambda *arguments: None, "render": "fast"}, "env.kwargs")  # Python, no configuration
    monkeypatch.setenv("RLT_ALLOWED_IMPORTS", "intervention_hooks")
    check_hooks({"critical_phase": "intervention_hooks:below"}, "env.kwargs")


def test_devices_are_checked_first(tmp_path, monkeypatch):
    monkeypatch.setattr(toy_env.ToyVectorEnv, "__init__", lambda *a, **k: pytest.fail("an environment was made"))
    config = small(tmp_path)
    config.env.device = "cuda:99"
    for bad in (config, small(tmp_path, algorithm="tqc", tqc={"device": "cuda:99"})):
        with pytest.raises(ValueError, match=r"cuda:99.*choose one of cpu"):
            train(bad)
    assert list(tmp_path.iterdir()) == []


def test_settings_name_classes(tmp_path):
    config = quick(tmp_path, total_chunks=30)
    config.settings["policy_kwargs"] = {"net_arch": [8], "activation_fn": "torch.nn:GELU"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlt_sb3.experiment.report.write_report", lambda run: None)
        result = train(config)
    assert RLT.load(result.run / "model.zip", device="cpu").policy.activation_fn is torch.nn.GELU
