"""A run goes on on another machine: device and precision may change, nothing else of the algorithm."""

from dataclasses import replace

import pytest
from run_helpers import NETWORKS, SMALL_SB3, quick, same

from rlt_sb3 import RLT
from rlt_sb3.cli.main import main
from rlt_sb3.experiment.algorithms import get_algorithm
from rlt_sb3.experiment.config import EnvConfig, load_config
from rlt_sb3.experiment.train import _resumed, resume, train


def test_which_settings_are_fixed():
    fixed = get_algorithm("rlt").fixed
    assert fixed({"device": "cuda", "utd": 1.0}) == fixed({"utd": 1.0}) == {"utd": 1.0}
    networks = {"n_critics": 2, "critic_precision": "auto"}
    assert fixed({"policy_kwargs": networks}) == {"policy_kwargs": {"n_critics": 2}}
    # no mapping, and one with the free setting alone
    assert fixed({"policy_kwargs": {"critic_precision": "auto"}}) == fixed({}) == {}
    assert fixed({"policy_kwargs": {"n_critics": 3}}) != fixed({"policy_kwargs": networks})
    assert get_algorithm("tqc").fixed({"device": "cuda", "gamma": 0.9}) == {"gamma": 0.9}


def test_device_and_precision_may_change(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("rlt_sb3.experiment.report.write_report", lambda run: None)
    rlt = {"learning_starts": 20, "batch_size": 16, "critic_warmup_updates": 5, "utd": 1.0, "device": "cpu"}
    networks = NETWORKS | {"critic_precision": "bfloat16"}
    run = train(quick(tmp_path, total_chunks=40, rlt=rlt | {"policy_kwargs": networks})).run
    before = RLT.load(run / "model.zip", device="cpu")
    assert before.critic.precision == "bfloat16"
    changed = rlt | {"device": "auto", "policy_kwargs": networks | {"critic_precision": "float32"}}
    resume(
        run, algorithms={"rlt": changed, "tqc": SMALL_SB3}
    )  # nothing left to do: the model is that of the checkpoint
    after = RLT.load(run / "model.zip", device="cpu")
    assert same(after.get_parameters(), before.get_parameters())
    assert after.critic.precision == after.critic_target.precision == after.policy.critic_precision == "float32"
    assert after.policy_kwargs["critic_precision"] == "float32"
    assert (
        main(["train", "--resume", str(run), "--total_chunks", "60", "--rlt.policy_kwargs.critic_precision", "auto"])
        == 0
    )
    assert RLT.load(run / "model.zip", device="cpu").critic.precision == "auto"
    assert main(["train", "--resume", str(run), "--rlt.policy_kwargs.n_critics", "3"]) == 2
    assert "A resumed run must keep rlt: " in capsys.readouterr().err
    assert main(["train", "--resume", str(run), "--rlt.utd", "2"]) == 2
    with pytest.raises(ValueError, match="must keep env: "):
        _resumed(replace(load_config(run / "config.yaml"), resume=str(run), env=EnvConfig(num_envs=3)))


def test_the_frozen_models_may_move(tmp_path):
    run = train(quick(tmp_path, total_chunks=40)).run
    config = replace(load_config(run / "config.yaml"), resume=str(run))
    assert config.env.device is None
    config.env.device = "cuda"
    assert _resumed(config)[0] == run
