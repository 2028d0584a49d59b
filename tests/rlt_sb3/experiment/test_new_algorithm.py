"""An algorithm of somebody else takes one registration: a run trains, evaluates, reports and resumes it."""

import json
import subprocess
import sys
from importlib.metadata import EntryPoint

import numpy as np
import pytest
import yaml
from run_helpers import quick, same, without_clocks
from toy_algorithms import ON_POLICY, TD3_SETTINGS, WARM_TD3

from rlt_sb3.cli.main import main, parse
from rlt_sb3.experiment import algorithms
from rlt_sb3.experiment.algorithms import Algorithm, algorithm_names, get_algorithm, labels, register_algorithm
from rlt_sb3.experiment.checkpoints import all_checkpoints, resumable_checkpoints
from rlt_sb3.experiment.config import EvalSettings, ReportConfig, TrainConfig, load_config, save_config
from rlt_sb3.experiment.eval_config import EvalConfig
from rlt_sb3.experiment.evaluate_run import evaluate_run
from rlt_sb3.experiment.models import load_model
from rlt_sb3.experiment.report import read_metrics, report
from rlt_sb3.experiment.train import resume, train

SETTINGS = {"warm_td3": TD3_SETTINGS, "a2c": {"n_steps": 5, "policy_kwargs": {"net_arch": [8]}}}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(algorithms, "_registered", dict(algorithms._registered))
    register_algorithm("warm_td3", WARM_TD3)
    register_algorithm("a2c", ON_POLICY)


def config_of(algorithm, out, **changes):
    evaluation = EvalSettings(4, 4, 40, videos=False)
    known = {"algorithm": algorithm, algorithm: SETTINGS[algorithm], "total_chunks": 160, "evaluation": evaluation}
    return quick(out, **(known | changes))


@pytest.mark.parametrize("name", SETTINGS)
def test_it_trains_is_evaluated_reported_and_resumed(tmp_path, name):
    whole = train(config_of(name, tmp_path, name="whole"))
    data = json.loads((whole.run / "evaluations.json").read_text())
    assert data[name]["policy"] == get_algorithm(name).label and data["comparison"]
    assert data["training"]["chunks"] == 160 and data["training"]["episodes"] > 10
    assert f"<td>{get_algorithm(name).label}</td>" in report(ReportConfig(run=str(whole.run))).read_text()
    assert evaluate_run(EvalConfig(run=str(whole.run), progress=False)).rows == whole.best.rows

    parts = train(config_of(name, tmp_path, name="parts", total_chunks=80)).run
    assert resume(parts, total_chunks=160).selection[-1].chunks == 160
    parameters = [load_model(name, run / "model.zip", device="cpu").get_parameters() for run in (whole.run, parts)]
    assert same(*parameters)
    rows = [without_clocks(run / "metrics.csv") for run in (whole.run, parts)]
    for row in rows[0] + rows[1]:
        row.pop("time/iterations", None)  # rollouts of an on-policy algorithm since the start or resume
    assert rows[0] == rows[1] and len(rows[0]) > 4
    episodes = [
        json.loads((run / "evaluations.json").read_text())["training"]["episodes"] for run in (whole.run, parts)
    ]
    assert episodes[0] == episodes[1]


def test_a_checkpoint_without_a_replay_buffer(tmp_path, monkeypatch):
    """It holds no file for one, can be resumed all the same, and the buffer's age is no column."""
    monkeypatch.setattr("rlt_sb3.experiment.report.write_report", lambda run: None)
    run = train(config_of("a2c", tmp_path)).run
    assert not list(run.rglob("replay_buffer.pkl"))
    assert len(all_checkpoints(run)) > len(resumable_checkpoints(run)) == 2
    metrics = read_metrics(run)
    assert not [key for key in metrics if key.startswith("buffer/")]
    assert {"rollout/throughput", "rollout/success_rate", "train/policy_loss"} <= set(metrics)
    # what was played is the sampled action, clipped: |a - vla_ref| <= 2
    distances = metrics["rollout/vla_distance_x"]
    assert 0 < np.nanmax(distances) <= 2


def test_it_is_a_choice_and_a_section(tmp_path, capsys):
    assert algorithm_names() == ["rlt", "dsrl", "grpo", "ppo", "residual_sac", "tqc", "warm_td3", "a2c"]
    assert main(["list"]) == 0
    assert "  warm_td3      Warm TD3" in capsys.readouterr().out.splitlines()
    (tmp_path / "c.yaml").write_text("algorithm: a2c\na2c: {n_steps: 7}\nrlt: {bc_coef: 3}\n")
    config = parse("train", ["--config", str(tmp_path / "c.yaml"), "--a2c.gamma", "0.9", "--tqc.gamma", "0.5"])
    assert config.settings == {"n_steps": 7, "gamma": 0.9}
    assert config.algorithms == {"a2c": config.settings, "rlt": {"bc_coef": 3}, "tqc": {"gamma": 0.5}}
    save_config(config, tmp_path / "d.yaml")
    assert load_config(tmp_path / "d.yaml") == config
    assert parse("train", ["--config", str(tmp_path / "d.yaml")]) == config
    assert yaml.safe_load((tmp_path / "d.yaml").read_text())["a2c"] == config.settings
    with pytest.raises(ValueError, match=r"Unknown A2C setting 'bc_coef'\. Valid settings: learning_rate"):
        train(config_of("a2c", tmp_path, a2c={"bc_coef": 1}))
    with pytest.raises(ValueError, match=r"'a2c' cannot learn with env\.kwargs intervention"):
        config.env.kwargs["intervention"] = "toy_env:x"
        config.check()


def test_a_resumed_run_keeps_its_settings(tmp_path, monkeypatch):
    monkeypatch.setattr("rlt_sb3.experiment.report.write_report", lambda run: None)
    run = train(config_of("a2c", tmp_path, total_chunks=40)).run
    with pytest.raises(ValueError, match=r"must keep a2c: the run has \{'n_steps': 5"):
        resume(run, algorithms=load_config(run / "config.yaml").algorithms | {"a2c": {"n_steps": 6}})


def test_registry_and_settings_import_no_algorithm():
    code = (
        "import sys; from rlt_sb3.experiment.config import TrainConfig; TrainConfig().check();"
        "print({'torch', 'stable_baselines3', 'sb3_contrib'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_registration_refuses_what_cannot_work(monkeypatch):
    with pytest.raises(ValueError, match="There is an algorithm 'a2c' already"):
        register_algorithm("a2c", ON_POLICY)
    with pytest.raises(ValueError, match="must be an identifier such as 'td3', got 'my-own'"):
        register_algorithm("my-own", ON_POLICY)
    with pytest.raises(ValueError, match="Unknown algorithm 'sac'"):
        TrainConfig(algorithms={"sac": {}}).check()


def test_entry_points_are_loaded_when_they_are_used(monkeypatch):
    points = [
        EntryPoint("warm", "toy_algorithms:WARM_TD3", algorithms.GROUP),
        EntryPoint("wrong", "toy_algorithms:TD3_SETTINGS", algorithms.GROUP),
        EntryPoint("absent", "no_such_module:X", algorithms.GROUP),
    ]
    monkeypatch.setattr(
        algorithms, "entry_points", lambda group, name=None: [p for p in points if name in (None, p.name)]
    )
    assert algorithm_names()[-3:] == ["absent", "warm", "wrong"]
    assert parse("train", ["--warm.gamma", "0.5"]).algorithms == {"warm": {"gamma": 0.5}}
    assert get_algorithm("warm") is WARM_TD3
    with pytest.raises(ValueError, match="must be an Algorithm, it is a dict"):
        get_algorithm("wrong")
    points[1:] = []
    assert labels()["warm"] == "Warm TD3" and isinstance(get_algorithm("rlt"), Algorithm)
