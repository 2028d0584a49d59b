"""Runs whose collectors wait neither for each other nor for the learner, on a Ray of their own."""

import json
import os
import signal

import pytest
from left_over import MARK, left_over
from run_helpers import NETWORKS, environment, quick, without_clocks
from stable_baselines3.common.save_util import load_from_pkl

ray = pytest.importorskip("ray")

from rlt_gym.cluster.connection import RayConfig  # noqa: E402
from rlt_sb3.cli.main import main  # noqa: E402
from rlt_sb3.collectors.vec_env import CollectorVecEnv  # noqa: E402
from rlt_sb3.experiment.checkpoints import BUFFER, find_checkpoint  # noqa: E402
from rlt_sb3.experiment.config import EvalSettings, RolloutConfig  # noqa: E402
from rlt_sb3.experiment.train import resume, train  # noqa: E402

RLT = {"learning_starts": 20, "batch_size": 16, "critic_warmup_updates": 5, "gate": {"window": 4},
       "policy_kwargs": NETWORKS}  # fmt: skip


@pytest.fixture(autouse=True)
def toy(monkeypatch, tmp_path):
    """The toy task; nothing is left running."""
    monkeypatch.setattr("rlt_sb3.experiment.report.write_report", lambda run: None)
    for name, value in environment().items():
        if name in ("PYTHONPATH", "RLT_ALLOWED_IMPORTS"):
            old = os.environ.get(name)
            monkeypatch.setenv(name, value if name != "PYTHONPATH" or not old else f"{value}:{old}")
    mark = f"{tmp_path.name}-{os.getpid()}"
    monkeypatch.setenv(MARK, mark)
    yield
    assert not left_over(mark)


def config(out, **changes):
    rollout = RolloutConfig("async", workers=2, envs_per_worker=2)
    changes = {"total_chunks": 160, "save_every": 60, "evaluation": EvalSettings(4, 4, 80, videos=False), "rlt": RLT,
               "rollout": rollout, "ray": RayConfig(num_cpus=1, timeout=60)} | changes  # fmt: skip
    return quick(out, "toy_env:FakeRLToken-v0", **changes)


@pytest.mark.expensive  # test_collectors.py has the parts of it
@pytest.mark.parametrize("tasks", [None, [0, 2]])
def test_a_run_loses_a_collector_ends_and_goes_on(tmp_path, monkeypatch, tasks):
    """Rows of the lost chunks are not stored; a resumed run goes on with gate, counters and buffer."""
    original, calls = CollectorVecEnv.collect, []

    def collect(self, *args):
        calls.append(self)
        if len(calls) == 32:
            actor = self._workers._actors[1]
            os.kill(ray.get(actor.__ray_call__.remote(lambda remote: os.getpid())), signal.SIGKILL)
        return original(self, *args)

    monkeypatch.setattr(CollectorVecEnv, "collect", collect)
    settings = config(tmp_path)
    settings.env.task_ids, settings.env.show_task = tasks, None if tasks is None else True
    run = train(settings).run
    assert not ray.is_initialized()
    log = [row for row in without_clocks(run / "metrics.csv") if "rollout/staleness" in row][-1]
    assert log["rollout/worker_restarts"] == "2" and float(log["rollout/staleness"]) >= 0
    checkpoint = find_checkpoint(run)[1]
    buffer = load_from_pkl(checkpoint.path / BUFFER)
    assert checkpoint.chunks == 160 and buffer.rows_stored == 158 and float(log["rollout/stale_chunks"]) == 0
    results = json.loads((run / "evaluations.json").read_text())
    assert [point["chunks"] for point in results["selection"]] == [80, 160]
    before = find_checkpoint(run)[1].read_state()
    resume(run, total_chunks=240)
    checkpoint = find_checkpoint(run)[1]
    assert checkpoint.chunks == 240 and load_from_pkl(checkpoint.path / BUFFER).rows_stored == 238
    after = checkpoint.read_state()
    assert after["callbacks"]["budget"]["control_steps"] > before["callbacks"]["budget"]["control_steps"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], "rollout.mode 'async' needs rollout.workers"),
        (["--rollout.workers", "2"], "needs save_every"),
        (["--rollout.workers", "2", "--save_every", "9", "--video_every", "3"], "does not film training episodes"),
        (["--rollout.workers", "2", "--rlt.train_freq", "2"], "sets rlt.train_freq itself"),
        (["--rollout.mode", "asinc"], "rollout.mode must be one of overlap, sync, async with rlt, got 'asinc'"),
        (["--algorithm", "tqc"], "rollout.mode must be one of sync with tqc, got 'async'"),
        (
            ["--rollout.workers", "2", "--save_every", "9", "--rlt.policy_kwargs.gripper_flip", "auto"],
            "gripper_flip 'auto' does not work",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(tmp_path, capsys, settings, message):
    arguments = ["--rollout.mode", "async", "--out", str(tmp_path), *settings]
    assert main(["train", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not list(tmp_path.iterdir())
