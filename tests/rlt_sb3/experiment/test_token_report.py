"""``rlt train`` asks the report of an RL token before simulators start; ``gymnasium.make_vec`` does not."""

import json
import warnings

import gymnasium as gym
import pytest
import torch
from run_helpers import quick

import rlt_gym  # noqa: F401
from rlt_gym.rl_token.decoder import RLTokenDecoder
from rlt_gym.rl_token.encoder import RLTokenConfig, RLTokenEncoder
from rlt_gym.rl_token.io import save_rl_token
from rlt_gym.vla.registry import load_vla
from rlt_sb3.cli.main import main
from rlt_sb3.experiment.config import EnvConfig
from rlt_sb3.experiment.token_report import check_token
from rlt_sb3.experiment.train import train


@pytest.fixture
def token(tmp_path):
    """The file of an RL token of ``mini`` with random weights, and a function that writes its report."""
    torch.manual_seed(0)
    vla = load_vla("mini")
    config = RLTokenConfig(vla.spec.token_dim, max_tokens=90, layers=1)
    encoder = RLTokenEncoder(config, vla.fingerprint(), "mini")
    path = tmp_path / "token.safetensors"

    def report(**numbers):
        save_rl_token(path, encoder, RLTokenDecoder(config), {"held_out": numbers})
        return path

    report(explained_by_z_only=0.31, shuffled_gap=1.5)
    return path, report


def said(path, accept=False):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_token(EnvConfig(rl_token=str(path)), accept)
    return [str(warning.message) for warning in caught]


def test_a_token_below_a_limit_is_refused_in_one_line(token):
    path, report = token
    with pytest.raises(ValueError) as error:
        said(path)
    message = str(error.value)
    assert "\n" not in message and "as token.json says" in message
    assert "explained_by_z_only is 0.31, and must be at least 0.5" in message
    assert "shuffled_gap is 1.5, and must be at least 2" in message
    assert "Train it longer" in message and "context dropout" in message
    assert message.endswith("with --accept_poor_token true.")
    (line,) = said(path, accept=True)
    assert "explained_by_z_only is 0.31" in line and "used all the same (accept_poor_token)" in line
    report(explained_by_z_only=0.9, shuffled_gap=20.0)
    assert said(path) == []


def test_a_token_without_a_report_of_its_own_gives_one_warning(token):
    path, _ = token
    content = path.with_suffix(".json").read_text()
    path.with_suffix(".json").write_text(json.dumps(json.loads(content) | {"fingerprint": "f" * 64}))
    (line,) = said(path)
    assert "token.json is of an RL token with fingerprint ffffffffffff..." in line and "it is ignored" in line
    path.with_suffix(".json").unlink()
    (line,) = said(path)
    assert "has no report beside it" in line and f"`rlt probe {path}`" in line
    path.with_name("token_probe.json").write_text(
        json.dumps({"fingerprint": json.loads(content)["fingerprint"], "numbers": {"jump": 0.9}})
    )
    with pytest.raises(ValueError, match=r"as token_probe.json says: jump is 0.9, and must be at most 0.8"):
        said(path)


def test_names_pass_in_silence(tmp_path):
    for name in ("auto", "mean", "none", None, str(tmp_path / "missing.safetensors")):
        assert said(name) == [] if name else check_token(EnvConfig(), False) is None
    config = EnvConfig(kwargs={"rl_token": object()})
    check_token(config, False)


def test_it_is_asked_before_simulators_start(token, tmp_path, monkeypatch, capsys):
    path, _ = token

    def start(*args, **kwargs):
        raise RuntimeError("simulators start")

    monkeypatch.setattr("rlt_gym.libero.vector_env.LiberoVectorEnv.__init__", start)
    words = ["train", "--env.suite", "libero_goal", "--env.task_ids", "1", "--env.rl_token", str(path)]
    words += ["--out", str(tmp_path / "runs"), "--progress", "false"]
    assert main(words) != 0
    assert "explained_by_z_only is 0.31, and must be at least 0.5" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    with pytest.warns(UserWarning, match="explained_by_z_only"), pytest.raises(RuntimeError, match="simulators start"):
        main([*words, "--accept_poor_token", "true"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="simulators start"):
            gym.make_vec("RLToken-LIBERO-v0", suite="libero_goal", task_ids=[1], rl_token=str(path))


def test_a_run_that_was_begun_goes_on(token, tmp_path, monkeypatch):
    """What the report says later does not stop it."""
    asked = []
    monkeypatch.setattr("rlt_sb3.experiment.train.check_token", lambda config, accept: asked.append(accept))
    result = train(quick(tmp_path, accept_poor_token=True))
    assert asked == [True]
    train(quick(tmp_path, resume=str(result.run), total_chunks=120, accept_poor_token=True))
    assert asked == [True]
