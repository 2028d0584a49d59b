"""rlt collect --policy RUN: what the run's model plays, as data."""

import hashlib

import numpy as np
import pytest
import torch
from run_helpers import NETWORKS, SMALL_RLT

from rlt_gym.data.libero_hdf5 import DemoFile
from rlt_gym.libero.collect import CollectConfig
from rlt_sb3.cli.main import main
from rlt_sb3.experiment.collect import collect
from rlt_sb3.experiment.config import EnvConfig, TrainConfig, save_config
from rlt_sb3.experiment.environment import make_env
from rlt_sb3.experiment.models import make_model, make_vec_env

SETTINGS = SMALL_RLT | {"policy_kwargs": NETWORKS}
ENV = EnvConfig(suite="libero_goal", task_ids=[1], assets="embedded", num_envs=1, chunk_length=4, max_episode_steps=10)


@pytest.fixture(scope="module")
def world():
    env = make_env(ENV, "train", 0)
    yield env
    env.close()


@pytest.fixture(scope="module")
def model(world):
    """A model that plays something else than the VLA."""
    model = make_model("rlt", make_vec_env("rlt", world), SETTINGS, 0)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.policy.training_actor.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


@pytest.fixture
def run(model, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    save_config(TrainConfig(env=ENV, algorithms={"rlt": dict(SETTINGS)}), folder / "config.yaml")
    model.save(folder / "model.zip")
    return folder


@pytest.mark.sim
def test_it_records_what_the_model_plays(run, model, world, tmp_path):
    assert main(["collect", "--policy", str(run), "--demos", "1", "--num_envs", "1", "--out", str(tmp_path / "o")]) == 0
    with DemoFile(tmp_path / "o" / "libero_goal_1.hdf5") as file:
        (demo,) = file
        assert len(demo) == 10 and not demo.attrs["success"] and not demo.intervention.any()
        said, index = file.env_args, demo.attrs["init_index"]
        assert said["fingerprint"] == world.metadata["fingerprint"] and said["policy"] == str(run)
        assert (said["model"], said["chunk_length"], said["max_episode_steps"]) == ("model.zip", 4, 10)
        assert said["model_sha256"] == hashlib.sha256((run / "model.zip").read_bytes()).hexdigest()
        obs, _ = world.reset(options={"init_states": "train", "episodes": [(1, index)]})
        for start in (0, 4, 8):
            np.testing.assert_array_equal(obs["proprio"][0], demo.proprio[start])
            chunk, _ = model.predict(obs, deterministic=True)
            assert np.abs(chunk - obs["vla_ref"]).max() > 0.01
            length = min(4, 10 - start)
            np.testing.assert_allclose(demo.actions[start : start + 4], np.clip(chunk[0, :length], -1, 1), atol=1e-5)
            obs, *_ = world.step(chunk)


def test_bad_runs_are_refused_before_simulators_start(run, tmp_path, monkeypatch):
    monkeypatch.setattr("rlt_sb3.experiment.collect.make_env", lambda *a: pytest.fail("simulators were started"))
    config = CollectConfig(policy=str(run))
    for path, message in (("best", "no model .*best_model.zip"), ("x.zip", "no model x.zip")):
        with pytest.raises(ValueError, match=message):
            collect(CollectConfig(policy=str(run), model=path))
    with pytest.raises(ValueError, match="suite cannot be used with policy"):
        CollectConfig(policy=str(run), suite="libero_10")
    with pytest.raises(ValueError, match=r"intervention"):
        collect(CollectConfig(policy=str(run), intervention="no_such_module:Nobody"))
    (run / "model.zip").unlink()
    with pytest.raises(ValueError, match=r"neither best_model\.zip nor model\.zip"):
        collect(config)
    save_config(TrainConfig(env=EnvConfig(id="FakeRLToken-v0")), run / "config.yaml")
    with pytest.raises(ValueError, match="'FakeRLToken-v0'; rollouts are recorded of RLToken-LIBERO-v0 only"):
        collect(config)
