"""Runs whose training episodes are played by workers on a Ray cluster."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from run_helpers import environment, quick, same, without_clocks
from stable_baselines3.common.save_util import load_from_pkl

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402

from rlt_gym.cluster.connection import RayConfig  # noqa: E402
from rlt_gym.cluster.vector_env import RayVectorEnv  # noqa: E402
from rlt_sb3.cli.main import main  # noqa: E402
from rlt_sb3.experiment.checkpoints import BUFFER, all_checkpoints, find_checkpoint  # noqa: E402
from rlt_sb3.experiment.config import EvalSettings, RolloutConfig, save_config  # noqa: E402
from rlt_sb3.experiment.models import load_model  # noqa: E402
from rlt_sb3.experiment.ray_eval import evaluate_on_ray  # noqa: E402
from rlt_sb3.experiment.train import train  # noqa: E402

RAY = RayConfig(num_cpus=1, timeout=60)


def config(out, **changes):
    evaluation = EvalSettings(4, 4, 50, videos=False)
    changes = {"total_chunks": 160, "save_every": 40, "evaluation": evaluation} | changes
    return quick(out, "toy_env:FakeRLToken-v0", **changes)


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setattr("rlt_sb3.experiment.report.write_report", lambda run: None)
    for name, value in environment().items():
        if name in ("PYTHONPATH", "RLT_ALLOWED_IMPORTS"):
            old = os.environ.get(name)
            monkeypatch.setenv(name, value if name != "PYTHONPATH" or not old else f"{value}:{old}")


def processes_with(mark):
    """Ids of all processes whose environment has a mark."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@pytest.mark.expensive
def test_killed_run_goes_on_and_equals_one_without_ray(tmp_path):
    """SIGKILL for the process that learns: the cluster that it had started ends, too."""
    whole = train(config(tmp_path, name="whole")).run
    ours = config(tmp_path, name="ray", rollout=RolloutConfig(workers=1), ray=RAY)
    save_config(ours, tmp_path / "c.yaml")
    mark = f"RLT_TEST_MARK={tmp_path.name}-{os.getpid()}"
    process = subprocess.Popen(
        [sys.executable, "-m", "rlt_sb3", "train", "--config", str(tmp_path / "c.yaml")],
        env=dict(os.environ) | dict([mark.split("=")]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    run = tmp_path / "ray"
    while process.poll() is None and len(all_checkpoints(run)) < 2:
        time.sleep(0.02)
    assert len(processes_with(mark)) > 3  # Ray's own and the worker
    process.kill()
    assert process.wait() == -signal.SIGKILL
    end = time.monotonic() + 60
    while processes_with(mark) and time.monotonic() < end:
        time.sleep(0.2)
    assert not processes_with(mark)
    assert main(["train", "--resume", str(run)]) == 0
    assert not ray.is_initialized()
    weights = [load_model("rlt", folder / "model.zip", device="cpu").get_parameters() for folder in (run, whole)]
    assert same(*weights)
    rows = without_clocks(run / "metrics.csv")
    assert len(rows) > 10 and rows == without_clocks(whole / "metrics.csv")


@pytest.mark.expensive
def test_a_killed_worker_costs_its_chunks_only(tmp_path, monkeypatch):
    """Its two chunks are counted and not stored, and the run ends as usual."""
    original, steps = RayVectorEnv.step_async, []

    def step_async(self, actions):
        original(self, actions)
        steps.append(self.sequence.split)
        if steps.count("train") == 15 and steps[-1] == "train":
            os.kill(ray.get(self._workers._actors[1].__ray_call__.remote(lambda remote: os.getpid())), signal.SIGKILL)

    monkeypatch.setattr(RayVectorEnv, "step_async", step_async)
    run = train(config(tmp_path, rollout=RolloutConfig(workers=2, envs_per_worker=2), ray=RAY)).run
    assert without_clocks(run / "metrics.csv")[-1]["rollout/worker_restarts"] == "2"
    checkpoint = find_checkpoint(run)[1]
    buffer = load_from_pkl(checkpoint.path / BUFFER)
    assert checkpoint.chunks == 160 and buffer.rows_stored == 160 - 2


@pytest.mark.expensive
def test_an_evaluation_in_parts_is_the_whole_one(tmp_path):
    """Digit for digit, of a run's model and the frozen VLA beside it."""
    run = train(config(tmp_path, total_chunks=40)).run
    arguments = ["eval", str(run), "--n_states", "7", "--progress", "false", "--split", "selection"]
    assert main([*arguments, "--out", str(tmp_path / "whole.json")]) == 0
    assert main([*arguments, "--workers", "3", "--ray.num_cpus", "1"]) == 0
    written = run / "eval-best-selection.json"
    assert json.loads(written.read_text()) == json.loads((tmp_path / "whole.json").read_text())
    assert written.with_suffix(".csv").read_text() == (tmp_path / "whole.csv").read_text()


@pytest.mark.sim
@pytest.mark.expensive
def test_a_vla_in_parts_is_the_whole_one(tmp_path):
    """On LIBERO."""
    arguments = ["eval", "--vla", "mini", "--suites", "libero_goal", "--tasks", "1", "--episodes", "4", "--films", "1"]
    arguments += ["--max_episode_steps", "40", "--num_envs", "2", "--assets", "embedded", "--progress", "false"]
    assert main([*arguments, "--out", str(tmp_path / "whole.json")]) == 0
    assert main([*arguments, "--out", str(tmp_path / "parts.json"), "--workers", "2", "--ray.num_cpus", "1"]) == 0
    whole, parts = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("whole", "parts"))
    assert whole["suites"] == parts["suites"] and whole.keys() == parts.keys()
    assert len(list((tmp_path / "parts-films").iterdir())) == len(list((tmp_path / "whole-films").iterdir())) == 1


def evaluated_by(folder, evaluate, config):
    """Note the machine, and wait for two others; then evaluate."""
    if config.shard is not None:
        (Path(folder) / ray.get_runtime_context().get_node_id()).touch()
        end = time.monotonic() + 120
        while len(list(Path(folder).iterdir())) < 3 and time.monotonic() < end:
            time.sleep(0.1)
    return evaluate(config)


@pytest.mark.sim
@pytest.mark.expensive
def test_a_suite_on_three_machines_is_the_whole_one(tmp_path, monkeypatch):
    """All ten tasks of libero_goal on LIBERO; each machine has room for one part. Nothing is left running."""
    nodes = tmp_path / "nodes"
    nodes.mkdir()
    monkeypatch.setattr(
        "rlt_sb3.experiment.evaluate.evaluate_on_ray",
        lambda config, evaluate: evaluate_on_ray(config, partial(evaluated_by, nodes, evaluate)),
    )
    arguments = ["eval", "--vla", "mini", "--suites", "libero_goal", "--episodes", "1", "--max_episode_steps", "72"]
    arguments += ["--num_envs", "1", "--assets", "embedded", "--progress", "false"]
    assert main([*arguments, "--out", str(tmp_path / "whole.json")]) == 0
    mark = f"{tmp_path.name}-{os.getpid()}"
    monkeypatch.setenv("RLT_TEST_MARK", mark)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80 << 20})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
        parts = [*arguments, "--out", str(tmp_path / "parts.json"), "--workers", "3"]
        assert main([*parts, "--ray.address", cluster.address]) == 0
        assert len(list(nodes.iterdir())) == 3
    finally:
        cluster.shutdown()
    whole, parts = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("whole", "parts"))
    assert whole["suites"] == parts["suites"] and len(whole["suites"]["libero_goal"]["tasks"]) == 10
    assert 0 < whole["suites"]["libero_goal"]["successes"] < 10
    end = time.monotonic() + 60
    while set(processes_with(f"RLT_TEST_MARK={mark}")) - {os.getpid()} and time.monotonic() < end:
        time.sleep(0.2)
    assert not set(processes_with(f"RLT_TEST_MARK={mark}")) - {os.getpid()}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--rollout.envs_per_worker", "2"], "need rollout.workers"),
        (["--rollout.workers", "0"], "rollout.workers must be at least 1, got 0"),
        (["--rollout.workers", "1", "--ray.num_gpus", "-1"], "ray.num_gpus must be 0 or more, got -1"),
        (["--rollout.workers", "1", "--ray.address", "127.0.0.1:1"], "There is no Ray cluster at ray.address"),
        (["--rollout.workers", "1", "--ray.num_gpus", "64"], "1 workers with 2 CPUs and 64 GPUs each do not fit"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(tmp_path, capsys, settings, message):
    save_config(config(tmp_path), tmp_path / "c.yaml")
    assert main(["train", "--config", str(tmp_path / "c.yaml"), *settings]) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert message in line and line.startswith("rlt train: ")
    assert not (tmp_path / "toy").exists()
