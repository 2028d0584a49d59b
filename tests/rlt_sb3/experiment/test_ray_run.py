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
from left_over import MARK, left_over, place_of, processes_with
from run_helpers import environment, quick, same, without_clocks
from stable_baselines3.common.save_util import load_from_pkl

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402

from rlt_gym.cluster.connection import RayConfig  # noqa: E402
from rlt_gym.cluster.vector_env import RayVectorEnv  # noqa: E402
from rlt_sb3.cli.main import main  # noqa: E402
from rlt_sb3.collectors.vec_env import CollectorVecEnv  # noqa: E402
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
def toy(monkeypatch, tmp_path):
    """The toy task, and the mark of all that is started; nothing is left running."""
    monkeypatch.setattr("rlt_sb3.experiment.report.write_report", lambda run: None)
    for name, value in environment().items():
        if name in ("PYTHONPATH", "RLT_ALLOWED_IMPORTS"):
            old = os.environ.get(name)
            monkeypatch.setenv(name, value if name != "PYTHONPATH" or not old else f"{value}:{old}")
    mark = f"{tmp_path.name}-{os.getpid()}"
    monkeypatch.setenv(MARK, mark)
    yield mark
    assert not left_over(mark)


@pytest.mark.expensive
def test_killed_run_goes_on_and_equals_one_without_ray(tmp_path, toy):
    """SIGKILL for the process that learns: the cluster that it had started ends, too."""
    whole = train(config(tmp_path, name="whole")).run
    ours = config(tmp_path, name="ray", rollout=RolloutConfig(workers=1), ray=RAY)
    save_config(ours, tmp_path / "c.yaml")
    process = subprocess.Popen(
        [sys.executable, "-m", "rlt_sb3", "train", "--config", str(tmp_path / "c.yaml")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    run = tmp_path / "ray"
    while process.poll() is None and len(all_checkpoints(run)) < 2:
        time.sleep(0.02)
    assert len(processes_with(toy)) > 3  # Ray's own and the worker
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not left_over(toy)
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
            os.kill(place_of(self._workers._actors[1])[1], signal.SIGKILL)

    monkeypatch.setattr(RayVectorEnv, "step_async", step_async)
    run = train(config(tmp_path, rollout=RolloutConfig(workers=2, envs_per_worker=2), ray=RAY)).run
    assert without_clocks(run / "metrics.csv")[-1]["rollout/worker_restarts"] == "2"
    checkpoint = find_checkpoint(run)[1]
    buffer = load_from_pkl(checkpoint.path / BUFFER)
    assert checkpoint.chunks == 160 and buffer.rows_stored == 160 - 2


@pytest.mark.expensive
@pytest.mark.parametrize(
    ("mode", "owner", "method"), [("sync", RayVectorEnv, "step_async"), ("async", CollectorVecEnv, "_next")]
)
def test_a_run_survives_the_end_of_a_machine(tmp_path, monkeypatch, mode, owner, method):
    """It is killed in the midst of practice, with one of two workers; the other machine has room for both."""
    store = 80 << 20
    soon = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 300, "health_check_failure_threshold": 2}
    head = {"num_cpus": 2, "object_store_memory": store, "_system_config": soon}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    original, calls, machines = getattr(owner, method), [], []

    def played(self, *arguments):
        result = original(self, *arguments)
        if mode == "async" or self.sequence.split == "train":
            calls.append(self)
            if len(calls) == 15:
                places = [place_of(actor) for actor in self._workers._actors]
                (pid,) = [pid for node, pid in places if node == machines[0].node_id]
                cluster.remove_node(machines[0], allow_graceful=False)
                while Path(f"/proc/{pid}").exists():  # a toy would end its run before its machine ends it
                    time.sleep(0.05)
        return result

    monkeypatch.setattr(owner, method, played)
    rollout = RolloutConfig(mode, workers=2, envs_per_worker=2)
    try:
        machines.append(cluster.add_node(num_cpus=2, object_store_memory=store))
        run = train(config(tmp_path, rollout=rollout, ray=RayConfig(cluster.address, num_cpus=1, timeout=60))).run
    finally:
        cluster.shutdown()
    log = [row for row in without_clocks(run / "metrics.csv") if row.get("rollout/worker_restarts")][-1]
    assert log["rollout/worker_restarts"] == "2"
    checkpoint = find_checkpoint(run)[1]
    assert checkpoint.chunks == 160 and load_from_pkl(checkpoint.path / BUFFER).rows_stored == 160 - 2


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
    """All ten tasks of libero_goal on LIBERO; each machine has room for one part."""
    nodes = tmp_path / "nodes"
    nodes.mkdir()
    monkeypatch.setattr(
        "rlt_sb3.experiment.evaluate.evaluate_on_ray",
        lambda config, evaluate: evaluate_on_ray(config, partial(evaluated_by, nodes, evaluate)),
    )
    arguments = ["eval", "--vla", "mini", "--suites", "libero_goal", "--episodes", "1", "--max_episode_steps", "72"]
    arguments += ["--num_envs", "1", "--assets", "embedded", "--progress", "false"]
    assert main([*arguments, "--out", str(tmp_path / "whole.json")]) == 0
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
