"""Wrong files and wrong settings: one line, status 2, nothing begun."""

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch as th
import yaml

from rlt_sb3.cli.main import main
from rlt_sb3.experiment.config import config_file, load_config, shipped_configs
from rlt_sb3.experiment.models import resolve_settings


def refused(capsys, *args: str) -> str:
    """:return: the only line of the error"""
    try:
        status = main(list(args))
    except SystemExit as stop:
        status = stop.code
    out, err = capsys.readouterr()
    assert status == 2 and out == "" and err.count("\n") == 1, (out, err)
    assert err.startswith(f"rlt {args[0]}: ")
    return err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rlt: {bc_coef: [\n", r"c\.yaml cannot be read as YAML: .* line 2, column 1"),
        ("- a\n- b\n", r"c\.yaml must hold settings, .* it holds a list"),
        ("nonsense: 3\n", r"'nonsense' is not accepted \(rlt train --help\)"),
        ("env: {num_envs: many}\n", r"env\.num_envs.*int.*many"),
        ("\xff\x00".encode("utf-16"), r"c\.yaml cannot be read as YAML"),
    ],
)
def test_files(tmp_path, capsys, text, message):
    path = tmp_path / "c.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    for option in (["--config", str(path)], [f"--config={path}"]):
        assert re.search(message, refused(capsys, "train", *option, "--out", str(tmp_path / "runs")))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["train", "collect", "train-vla", "pretrain-token", "eval"])
def test_missing_files(command, capsys):
    assert re.search(r"There is no file '.*nowhere\.yaml'", refused(capsys, command, "--config", "nowhere.yaml"))


def test_arguments(capsys):
    assert "unrecognized arguments: --total_chunk" in refused(capsys, "train", "--total_chunk", "3")
    assert "required: run" in refused(capsys, "eval")


WRONG = [
    ({"bc_coef": "abc"}, "bc_coef must be a number or a schedule"),
    ({"bc_coef": {"start": 60, "end": -5}}, "bc_coef must be >= 0"),
    ({"learning_rate": "fast"}, "learning_rate must be a number or a schedule"),
    ({"learning_rate": -1}, "learning_rate must be >= 0"),
    ({"gamma": 1.5}, r"gamma must be in \[0, 1\] \(discount per control step\), got 1.5"),
    ({"gamma": "x"}, "gamma must be in"),
    ({"tau": [1]}, r"tau must be in \(0, 1\]"),
    ({"utd": "two"}, "utd must be > 0"),
    ({"batch_size": 2.5}, "batch_size must be an integer >= 1"),
    ({"buffer_size": "all"}, "buffer_size must be an integer"),
    ({"learning_starts": None}, "learning_starts must be an integer >= 0"),
    ({"train_freq": "often"}, "train_freq must be an integer >= 1"),
    ({"exploration_std": "wide"}, "exploration_std must be >= 0, a number or"),
    ({"action_scale": [1, 1, "x"]}, "action_scale must be > 0"),
    ({"action_scale": [1, 1], "exploration_std": [1, 1, 1]}, "exploration_std must be >= 0, a number or 2 numbers"),
    ({"q_bounds": 3}, "q_bounds must be None or"),
    ({"q_bounds": ["a", "b"]}, "q_bounds must be None or"),
    ({"target_policy_noise": "x"}, "target_policy_noise must be >= 0"),
    ({"gate": {"share": 2}}, r"gate\.share must be in"),
    ({"gate": {"share": "half"}}, r"gate\.share must be in"),
    ({"gate": 0.5}, "gate must be a dict with some of share, window, budget, got 0.5"),
    ({"policy_kwargs": 3}, "policy_kwargs must be a mapping, got 3"),
    ({"policy_kwargs": {"critics": 3}}, "RLT has no setting policy_kwargs.critics; there is"),
    ({"policy_kwargs": {"actor_mode": "soft"}}, "actor_mode must be one of"),
    ({"policy_kwargs": {"net_arch": "big"}}, "policy_kwargs cannot be used"),
    ({"policy_kwargs": {"n_target_critics": "x"}}, "policy_kwargs cannot be used"),
    ({"replay_buffer_kwargs": {"offline_ratio": 2}}, "offline_ratio must be in"),
    ({"replay_buffer_kwargs": {"offline_ratio": "x"}}, "replay_buffer_kwargs cannot be used"),
]


@pytest.mark.parametrize(("section", "message"), WRONG, ids=[str(section) for section, _ in WRONG])
def test_values_of_the_algorithm(tmp_path, capsys, monkeypatch, section, message):
    def started(*args, **kwargs):
        raise AssertionError("simulators were started")

    monkeypatch.setattr("rlt_sb3.experiment.train.make_env", started)
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({"rlt": section, "out": str(tmp_path / "runs")}))
    assert re.search(message, refused(capsys, "train", "--config", str(path)))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", shipped_configs())
def test_shipped_configurations_pass_and_draw_nothing(name):
    settings = load_config(Path(config_file(name))).settings
    before = th.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    resolve_settings("rlt", settings)
    assert th.equal(th.get_rng_state(), before[0]) and random.getstate() == before[2]
    assert np.array_equal(np.random.get_state()[1], before[1])


COMMANDS_WITH_DEVICE = {
    "pretrain-token": ["--demos", '["a.hdf5"]'],
    "encode-demos": ["--demos", '["a.hdf5"]'],
    "train-vla": ["--demos", '["a.hdf5"]', "--output", "vla.safetensors"],
    "eval": ["nowhere"],
}


@pytest.mark.parametrize("command", COMMANDS_WITH_DEVICE)
@pytest.mark.parametrize("device", ["cuda:99", "gpu"])
def test_devices(command, device, capsys):
    line = refused(capsys, command, *COMMANDS_WITH_DEVICE[command], "--device", device)
    assert f"Device '{device}' cannot be used here" in line and "there is ['cpu'" in line


def test_settings_of_the_environment(tmp_path, capsys):
    """What make_vec's environment does not take, without a simulator."""
    arguments = ["--env.id", "RLToken-LIBERO-v0", "--env.kwargs", "{controller: JOINT_POSITION}"]
    line = refused(capsys, "train", "--out", str(tmp_path / "runs"), *arguments)
    assert "env.kwargs {'controller': 'JOINT_POSITION'} do not fit env.id 'RLToken-LIBERO-v0'" in line
    assert "unexpected keyword argument 'controller'; besides its own" in line
    assert not (tmp_path / "runs").exists()


def test_errors_inside_an_environment_stay_errors(tmp_path, monkeypatch):
    def broken(self, *args, **kwargs):
        raise TypeError("can only concatenate str")

    monkeypatch.setattr("rlt_gym.testing.FakeRLTokenVectorEnv.__init__", broken)
    monkeypatch.setenv("RLT_ALLOWED_IMPORTS", "toy_env")
    with pytest.raises(TypeError, match="concatenate"):
        main(["train", "--out", str(tmp_path), "--env.id", "toy_env:FakeRLToken-v0"])
