"""What was learned from one VLA and RL token is not used with others at the same path."""

import json

import pytest
from gymnasium.vector import VectorWrapper
from run_helpers import quick
from stable_baselines3.common.vec_env import VecMonitor
from toy_env import ToyVectorEnv
from vla_helpers import SHIPPED_VLAS

from rlt_gym.rl_token.encoder import RLTokenConfig, RLTokenEncoder
from rlt_gym.rl_token.env import RLTokenVectorEnv
from rlt_gym.rl_token.io import frozen_fingerprint, load_rl_token, save_rl_token
from rlt_gym.rl_token.untrained import MeanToken
from rlt_gym.testing import FakeLiberoVectorEnv, FakeVLA
from rlt_sb3 import GymnasiumVecEnv
from rlt_sb3.cli.main import main
from rlt_sb3.experiment.eval_config import EvalConfig
from rlt_sb3.experiment.evaluate_run import evaluate_run
from rlt_sb3.experiment.train import resume, train

ONE, OTHER = {"vla": "a" * 64, "rl_token": "b" * 64}, {"vla": "a" * 64, "rl_token": "c" * 64}


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    monkeypatch.setattr("rlt_sb3.experiment.report.write_report", lambda run: None)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A short run on an environment with a fingerprint."""
    monkeypatch.setattr(ToyVectorEnv, "fingerprint", ONE)
    return train(quick(tmp_path, "ToyRLToken-v0", total_chunks=40)).run


# ---------------------------------------------------------------- the environment


def test_environment_names_what_it_looks_through():
    vla = FakeVLA()
    token = RLTokenEncoder(RLTokenConfig(12, max_tokens=5, width=8, heads=1), vla.fingerprint(), "fake")
    env = RLTokenVectorEnv(FakeLiberoVectorEnv(1, chunk_length=4), vla, token)
    assert env.metadata["fingerprint"] == {"vla": vla.fingerprint(), "rl_token": token.fingerprint()}
    # as seen by Stable-Baselines3, through wrappers of both libraries
    venv = VecMonitor(GymnasiumVecEnv(VectorWrapper(env)))
    assert venv.get_attr("metadata")[0]["fingerprint"] == env.metadata["fingerprint"]


def test_fingerprint_of_an_rl_token(tmp_path):
    config = RLTokenConfig(12, max_tokens=5, width=8, heads=1)
    token = RLTokenEncoder(config)
    save_rl_token(tmp_path / "t.safetensors", token)
    assert load_rl_token(tmp_path / "t.safetensors").fingerprint() == token.fingerprint()
    assert RLTokenEncoder(config).fingerprint() != token.fingerprint()
    assert MeanToken(12).fingerprint() == MeanToken(12).fingerprint() != MeanToken(13).fingerprint()


def test_shipped_weights_differ():
    from rlt_gym.vla import load_vla

    found = [frozen_fingerprint(vla, load_rl_token("auto", vla)) for vla in map(load_vla, SHIPPED_VLAS)]
    for name in ("vla", "rl_token"):
        assert len({fingerprint[name] for fingerprint in found}) == len(SHIPPED_VLAS)


# ---------------------------------------------------------------- runs


def test_run_stores_it(run):
    assert json.loads((run / "evaluations.json").read_text())["fingerprint"] == ONE
    (state,) = run.glob("checkpoints/chunk-00000040/state.json")
    assert json.loads(state.read_text())["results"]["fingerprint"] == ONE


def test_run_refuses_other_weights(run, monkeypatch, capsys):
    monkeypatch.setattr(ToyVectorEnv, "fingerprint", OTHER)
    monkeypatch.setattr(ToyVectorEnv, "step", lambda self, actions: pytest.fail("something was played"))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for command in (
        ["train", "--resume", str(run), "--total_chunks", "60"],
        ["eval", str(run)],
        ["eval", str(run), "--model", "vla"],
        ["eval", str(run), "--all-checkpoints"],
        ["eval", str(run), "--shard", "1/2"],
    ):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert f"The run {run} was made with other frozen weights" in error
        assert "rl_token bbbbbbbbbbbb... (here: cccccccccccc...)" in error and "vla" not in error
        assert "Put the run's weights back, or train again." in error
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_run_with_its_weights_goes_on(run):
    assert resume(run, total_chunks=60).run == run
    evaluate_run(EvalConfig(run=str(run), progress=False))


def test_run_without_an_entry_is_not_checked(tmp_path, monkeypatch):
    run = train(quick(tmp_path, "ToyRLToken-v0", total_chunks=40)).run
    assert json.loads((run / "evaluations.json").read_text())["fingerprint"] is None
    monkeypatch.setattr(ToyVectorEnv, "fingerprint", ONE)
    evaluate_run(EvalConfig(run=str(run), progress=False))
    assert resume(run, total_chunks=60).run == run


def test_shards_of_other_weights_are_not_merged(tmp_path, monkeypatch, capsys):
    """The run says nothing, each machine has other weights."""
    run = train(quick(tmp_path, "ToyRLToken-v0", total_chunks=40)).run
    files = [str(tmp_path / f"{k}.json") for k in (1, 2)]
    for k, fingerprint in enumerate((ONE, OTHER)):
        monkeypatch.setattr(ToyVectorEnv, "fingerprint", fingerprint)
        evaluate_run(EvalConfig(run=str(run), shard=f"{k + 1}/2", out=files[k], progress=False))
    capsys.readouterr()
    assert main(["eval", "--merge", *files]) == 1
    assert "fingerprint is" in capsys.readouterr().err
