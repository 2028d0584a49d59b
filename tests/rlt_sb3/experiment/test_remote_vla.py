"""Training on a VLA in another process: a lost server ends it with one line and nothing lost, or is waited for."""

import subprocess
import sys
import threading

import numpy as np
import pytest
from run_helpers import NETWORKS, SMALL_RLT, environment, quick, same

pytest.importorskip("websockets")
pytest.importorskip("msgpack")

from remote_env import VLAServer

from rlt_sb3 import RLT
from rlt_sb3.common.errors import RunError
from rlt_sb3.experiment.checkpoints import find_checkpoint
from rlt_sb3.experiment.config import EvalSettings, save_config
from rlt_sb3.experiment.models import load_model
from rlt_sb3.experiment.report import read_evaluations
from rlt_sb3.experiment.train import resume, train

CHUNKS = 120


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    """The report is not what is tested here, and costs more than the training."""
    monkeypatch.setattr("rlt_sb3.experiment.report.write_report", lambda run: None)


@pytest.fixture
def server():
    with VLAServer() as server:
        yield server


def config_of(out, server, patience=60.0, **changes):
    evaluation = EvalSettings(4, 4, 60, videos=False)
    rlt = SMALL_RLT | {"policy_kwargs": NETWORKS}
    config = quick(out, "RemoteLibero-v0", total_chunks=CHUNKS, evaluation=evaluation, rlt=rlt, **changes)
    config.env.vla = f"rlt://127.0.0.1:{server.port}"
    config.env.kwargs = {"patience": patience}
    return config


def at_chunk(number, action, monkeypatch):
    """Do something when so many chunks have been played, once."""
    from rlt_sb3.callbacks.budget import BudgetCallback

    original, done = BudgetCallback._on_step, []

    def on_step(self):
        if self.num_timesteps == number and not done:
            done.append(number)
            action()
        return original(self)

    monkeypatch.setattr(BudgetCallback, "_on_step", on_step)
    return done


def parameters(run):
    return load_model("rlt", run / "model.zip", device="cpu").get_parameters()


@pytest.mark.filterwarnings("ignore:The VLA server")
def test_a_killed_server_ends_the_run_which_can_be_resumed(tmp_path, server, monkeypatch):
    with monkeypatch.context() as patch:
        done = at_chunk(38, server.kill, patch)
        with pytest.raises(RunError) as caught:
            train(config_of(tmp_path, server, patience=0.5))
    run, line = tmp_path / "toy", str(caught.value)
    assert done == [38]
    assert f"No VLA server is at 127.0.0.1:{server.port}" in line and "\n" not in line
    assert line.endswith(f"38 chunks are saved; resume with: rlt train --resume {run}")
    checkpoint = find_checkpoint(run)[1]
    assert checkpoint.chunks == 38
    model = RLT.load(checkpoint.model, device="cpu")
    model.load_replay_buffer(checkpoint.path / "replay_buffer.pkl")
    assert model.num_timesteps == 38 and model.replay_buffer.rows_stored == 38
    server.start()
    result = resume(run)
    assert RLT.load(run / "model.zip", device="cpu").num_timesteps == CHUNKS
    assert [point.chunks for point in result.selection] == [60, 120] and result.best.n == 4


@pytest.mark.filterwarnings("ignore:The VLA server")
def test_a_server_that_is_started_again_in_time_is_not_noticed(tmp_path, server, monkeypatch):
    """The run is, bit for bit, the one on the VLA in this process."""
    config = config_of(tmp_path / "local", server)
    config.env.vla = "fake-vla"
    from rlt_gym.testing import FakeVLA
    from rlt_gym.vla.registry import VLAS, register_vla

    def fake(device):
        return FakeVLA().to(device)

    register_vla("fake-vla", fake)
    try:
        train(config)
    finally:
        VLAS.remove("fake-vla")
    threads = []

    def restart():
        server.kill()
        threads.append(threading.Timer(1.0, server.start))
        threads[0].start()

    done = at_chunk(38, restart, monkeypatch)
    train(config_of(tmp_path / "remote", server))
    threads[0].join()
    assert done == [38]
    assert same(parameters(tmp_path / "local" / "toy"), parameters(tmp_path / "remote" / "toy"))
    local, remote = (read_evaluations(tmp_path / name / "toy") for name in ("local", "remote"))
    assert local["rlt"] == remote["rlt"] and local["fingerprint"] == remote["fingerprint"]


@pytest.mark.filterwarnings("ignore:The VLA server")
def test_a_server_that_is_lost_before_training(tmp_path, server, monkeypatch):
    from rlt_gym.testing import FakeLiberoVectorEnv

    original, steps = FakeLiberoVectorEnv.step, []

    def step(env, actions):
        steps.append(env.init_states)
        if len(steps) == 3:
            server.kill()
        return original(env, actions)

    monkeypatch.setattr(FakeLiberoVectorEnv, "step", step)
    with pytest.raises(RunError, match=r"nothing is trained yet; resume with: rlt train --resume"):
        train(config_of(tmp_path, server, patience=0.2))
    assert set(steps) == {"eval"}


def test_the_command_says_one_line(tmp_path, server):
    """And exits with 1; here the server is away before the environment is made."""
    config = config_of(tmp_path, server)
    config.env.id = "remote_env:RemoteLibero-v0"
    save_config(config, tmp_path / "config.yaml")
    server.kill()
    done = subprocess.run(
        [sys.executable, "-m", "rlt_sb3", "train", "--config", str(tmp_path / "config.yaml")],
        capture_output=True, text=True, timeout=300, env=environment(RLT_ALLOWED_IMPORTS="remote_env"),
    )  # fmt: skip
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(f"rlt train: No VLA server is at 127.0.0.1:{server.port}")
    assert not (tmp_path / "toy").exists()
    server.start()


@pytest.mark.filterwarnings("ignore:The VLA server")
def test_another_vla_on_resume_is_refused(tmp_path, server, monkeypatch):
    """By the fingerprint that the server says."""
    from rlt_gym.testing import FakeVLA
    from rlt_gym.vla.remote.server import PolicyServer, VLAService

    with monkeypatch.context() as patch:
        at_chunk(38, server.kill, patch)
        with pytest.raises(RunError):
            train(config_of(tmp_path, server, patience=0.2))

    class Other(FakeVLA):
        def fingerprint(self):
            return "0" * 64

    with (
        PolicyServer(VLAService(Other()), port=server.port),
        pytest.raises(ValueError, match=r"made with other frozen weights than the environment's: vla .*000000000000"),
    ):
        resume(tmp_path / "toy")


def test_a_chunk_that_is_nan_ends_the_run_with_one_line(tmp_path, monkeypatch):
    from rlt_gym.testing import FakeVLA
    from rlt_gym.vla.remote.server import PolicyServer, VLAService

    class Breaks(FakeVLA):
        def forward(self, obs, tasks, *, seed=None):
            output = super().forward(obs, tasks, seed=seed)
            if len(self.calls) == 40:
                output.chunk[:] = np.nan
            return output

    with (
        PolicyServer(VLAService(Breaks()), port=0) as server,
        pytest.raises(ValueError, match="refuses: The VLA 'fake' breaks the FrozenVLA contract") as caught,
    ):
        train(config_of(tmp_path, server))
    assert "\n" not in str(caught.value)


@pytest.mark.sim
@pytest.mark.expensive
@pytest.mark.filterwarnings("ignore:The VLA server")
def test_on_libero_with_a_large_stochastic_vla(tmp_path, monkeypatch):
    """50 steps, tokens of width 2048 in half precision, 224 exact pixels: 200 chunks, with a crash in between."""
    with VLAServer("foreign_vla:LiberoForeignVLA", "float16") as server:
        config = quick(
            tmp_path, "RLToken-LIBERO-v0", total_chunks=200, evaluation=EvalSettings(2, 2, 200, videos=False)
        )
        config.env.vla, config.env.vla_kwargs = f"rlt://127.0.0.1:{server.port}", {"patience": 1.0}
        config.env.rl_token, config.env.task_ids, config.env.chunk_length = "mean", [1], 8
        config.env.assets = "embedded"
        with monkeypatch.context() as patch:
            at_chunk(90, server.kill, patch)
            with pytest.raises(RunError, match="90 chunks are saved"):
                train(config)
        server.start()
        resume(tmp_path / "toy")
    model = RLT.load(tmp_path / "toy" / "model.zip", device="cpu")
    assert model.num_timesteps == 200 and model.observation_space["z_rl"].shape == (2048,)
