"""A policy behind openpi's own server, which gives no hidden states: practiced with ``rl_token="none"``."""

import json

import gymnasium as gym
import numpy as np
import pytest
from run_helpers import quick

pytest.importorskip("websockets")
pytest.importorskip("msgpack")

from other_servers import Other, plain_openpi

import rlt_gym  # noqa: F401  (registers the ids)
from rlt_gym.testing import FakeLiberoVectorEnv
from rlt_gym.vla.remote.codec import pack
from rlt_gym.vla.remote.openpi import write_observation
from rlt_sb3.cli.main import main
from rlt_sb3.experiment.algorithms import algorithm_names, get_algorithm
from rlt_sb3.experiment.config import EvalSettings
from rlt_sb3.experiment.serve import RunService
from rlt_sb3.experiment.train import train


@pytest.fixture(scope="module")
def server():
    with Other(pack({}), plain_openpi) as server:
        yield server


def config_of(out, server, **changes):
    config = quick(out, "RLToken-LIBERO-v0", total_chunks=40, **changes)
    config.env.vla, config.env.rl_token = f"openpi://127.0.0.1:{server.port}", "none"
    return config


@pytest.mark.parametrize("algorithm", sorted({*algorithm_names()} - {"dsrl"}))  # which needs a VLA that takes noise
def test_it_is_trained_evaluated_and_served(algorithm, tmp_path, server, monkeypatch):
    """By the ways of a real run, without its simulators."""
    monkeypatch.setattr("rlt_gym.libero.vector_env.LiberoVectorEnv", FakeLiberoVectorEnv)
    monkeypatch.setattr(
        FakeLiberoVectorEnv, "assets", type("Assets", (), {"kind": "official", "path": ""}), raising=False
    )
    monkeypatch.setattr("rlt_sb3.experiment.report.write_report", lambda run: None)
    config = config_of(tmp_path, server, algorithm=algorithm, evaluation=EvalSettings(2, 2, 40, videos=False))
    known = {setting.name for setting in get_algorithm(algorithm).settings()}
    few = {"learning_starts": 20, "critic_warmup_updates": 5}
    config.settings.update({name: value for name, value in few.items() if name in known})
    run = train(config).run
    stored = json.loads((run / "evaluations.json").read_text())["fingerprint"]
    assert stored["vla"].startswith("openpi-") and len(stored["rl_token"]) == 64
    assert main(["eval", str(run), "--n_states", "3", "--progress=false"]) == 0
    service = RunService(run)
    rng = np.random.default_rng(0)
    obs = {camera: rng.integers(0, 256, (1, 256, 256, 3), dtype=np.uint8) for camera in ("agentview", "wrist")}
    sent = write_observation(obs | {"state": np.zeros((1, 8), np.float32)}, "task 0")
    assert service.answer(sent)["actions"].shape == (8, 7)


@pytest.mark.parametrize("rl_token", [None, "mean"])
def test_an_rl_token_is_refused_before_simulators_start(rl_token, tmp_path, server, monkeypatch, capsys):
    monkeypatch.setattr("rlt_gym.libero.vector_env.LiberoVectorEnv", lambda **unused: pytest.fail("a simulator"))
    words = ["--env.vla", f"openpi://127.0.0.1:{server.port}", "--out", str(tmp_path), "--progress=false"]
    words += ["--env.rl_token", rl_token] if rl_token else []
    assert main(["train", "--name", "x", *words]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "openpi's servers send actions and no hidden states" in line and "rl_token='none'" in line


@pytest.mark.sim
def test_on_real_scenes(server):
    arguments = {
        "suite": "libero_goal",
        "task_ids": [1],
        "chunk_length": 4,
        "max_episode_steps": 8,
        "assets": "embedded",
    }
    with pytest.warns(UserWarning, match="trained on official assets"):
        env = gym.make_vec(
            "RLToken-LIBERO-v0", 1, vla=f"openpi://127.0.0.1:{server.port}", rl_token="none", **arguments
        )
    obs, _ = env.reset()
    assert env.unwrapped.single_observation_space["agentview"].shape == (256, 256, 3)
    for _ in range(2):
        # what the server makes of the real state, picture and instruction
        np.testing.assert_allclose(obs["vla_ref"][0, :, 0], np.clip(3 * obs["proprio"][0, 0], -1, 1), atol=1e-6)
        assert obs["z_rl"].tolist() == [[0.0]] and (obs["vla_ref"][0, 0, 1] > 0)
        obs, _, _, truncations, _ = env.step(obs["vla_ref"])
    assert truncations.all()
    env.close()
