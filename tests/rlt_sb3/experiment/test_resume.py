"""A run that is cut in two and resumed ends where the uninterrupted one ends; what breaks is reported, not lost."""

import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import toy_env
import yaml
from run_helpers import NETWORKS, SMALL_RLT, environment, quick, same, without_clocks

from rlt_gym.testing import FakeRLTokenVectorEnv
from rlt_sb3 import RLT
from rlt_sb3.cli.main import main
from rlt_sb3.experiment.checkpoints import CheckpointError, all_checkpoints, find_checkpoint, resumable_checkpoints
from rlt_sb3.experiment.config import EnvConfig, EvalSettings, RolloutConfig, config_file, load_config, save_config
from rlt_sb3.experiment.models import load_model
from rlt_sb3.experiment.report import read_evaluations, read_metrics
from rlt_sb3.experiment.train import resume, train


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    """The report is not what is tested here, and costs more than the training."""
    monkeypatch.setattr("rlt_sb3.experiment.report.write_report", lambda run: None)


def parameters(path, algorithm):
    """Networks, targets and optimizers."""
    return load_model(algorithm, path, device="cpu").get_parameters()


def assert_same_run(a, b, algorithm="rlt"):
    assert same(parameters(a / "model.zip", algorithm), parameters(b / "model.zip", algorithm))
    rows = without_clocks(a / "metrics.csv")
    assert len(rows) > 10 and rows == without_clocks(b / "metrics.csv")


def config_of_whole(out, **changes):
    """200 chunks; checkpoints at 40, 80, ... and, with evaluations, at 50, 100, ..."""
    evaluation = EvalSettings(4, 4, 50, videos=False)
    return quick(out, **{"total_chunks": 200, "save_every": 40, "evaluation": evaluation} | changes)


def train_until_it_dies(config, chunks, monkeypatch):
    """A run that breaks off after a number of chunks, between two checkpoints."""
    from rlt_sb3.callbacks.budget import BudgetCallback

    original = BudgetCallback._on_step

    def die(self):
        if self.num_timesteps == chunks:
            raise RuntimeError("out of memory")
        return original(self)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
        patch.setattr(BudgetCallback, "_on_step", die)
        train(config)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run without a break."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlt_sb3.experiment.report.write_report", lambda run: None)
        return train(config_of_whole(tmp_path_factory.mktemp("whole"))).run


@pytest.mark.parametrize("algorithm", ["rlt", "tqc"])
def test_200_is_100_plus_100(tmp_path, whole, algorithm):
    one = whole if algorithm == "rlt" else train(config_of_whole(tmp_path, name="one", algorithm=algorithm)).run
    two = train(config_of_whole(tmp_path, name="two", algorithm=algorithm, total_chunks=100)).run
    assert find_checkpoint(two)[1].chunks == 100
    result = resume(two, total_chunks=200)
    assert result.run == two
    assert_same_run(one, two, algorithm)
    assert [point.chunks for point in result.selection] == [50, 100, 150, 200]


def test_shipped_recipe_is_resumed(tmp_path, monkeypatch):
    """Trials, a schedule of the pull, units of action, time-outs as failures: a run that dies on its way goes on."""
    assert load_config(Path(config_file("demo"))).settings == {}  # RLT's own defaults
    settings = SMALL_RLT | {"gate": {"share": 1.0, "window": 2}, "policy_kwargs": NETWORKS}
    one = train(config_of_whole(tmp_path, name="one", rlt=settings)).run

    train_until_it_dies(config_of_whole(tmp_path, name="two", rlt=settings), 70, monkeypatch)
    two = tmp_path / "two"
    assert find_checkpoint(two)[1].chunks == 50
    resume(two)
    assert_same_run(one, two)
    # the cut lies in the midst of the schedule and of the trials
    metrics = read_metrics(two)
    before, after = metrics["time/total_timesteps"] <= 50, metrics["time/total_timesteps"] > 50
    assert np.nanmin(metrics["train/bc_coef"][before]) > np.nanmax(metrics["train/bc_coef"][after]) > 5
    assert 0 < np.nanmax(metrics["rollout/candidates"][before]) < np.nanmax(metrics["rollout/candidates"][after])


def test_run_of_several_tasks_is_resumed(tmp_path, monkeypatch):
    """The weights of the tasks change on its way."""
    settings = SMALL_RLT | {"gate": {"share": 1.0, "window": 2}, "policy_kwargs": NETWORKS}
    env = {"task_ids": [0, 1, 2], "show_task": True}
    changes = {"rlt": settings, "env": EnvConfig(id="FakeRLToken-v0", num_envs=2, render_mode=None, kwargs=env)}
    one = train(config_of_whole(tmp_path, name="one", **changes)).run
    train_until_it_dies(config_of_whole(tmp_path, name="two", **changes), 70, monkeypatch)
    assert find_checkpoint(tmp_path / "two")[1].chunks == 50
    resume(tmp_path / "two")
    assert_same_run(one, tmp_path / "two")
    weights = [RLT.load(one.model).gate.weights_told for one in all_checkpoints(tmp_path / "two")]
    assert len(set(map(tuple, weights))) > 1 and max(max(those) for those in weights) > 1


@pytest.mark.parametrize("apart", [None, 3])
def test_overlapped_run_is_resumed(tmp_path, monkeypatch, apart):
    """Updates that were owed when the checkpoint was written are done in the resumed run's first chunk."""
    gate = {"share": 1.0, "window": 2}
    settings = SMALL_RLT | {"train_freq": [1, "overlap"], "gate": gate, "policy_kwargs": NETWORKS}
    changes = {"rlt": settings, "evaluation": EvalSettings(4, 4, 50, videos=False, num_envs=apart)}
    one = train(config_of_whole(tmp_path, name="one", **changes)).run
    # killed between two checkpoints; and ended, then continued
    train_until_it_dies(config_of_whole(tmp_path, name="two", **changes), 110, monkeypatch)
    two = tmp_path / "two"
    saved = find_checkpoint(two)[1]
    owed = RLT.load(saved.model, device="cpu")._update_credit
    assert saved.chunks == (100 if apart is None else 80) and owed >= 1.0
    resume(two)
    assert_same_run(one, two)
    if apart is None:  # with separate simulators only a multiple of save_every ends where training goes on
        three = train(config_of_whole(tmp_path, name="three", **changes | {"total_chunks": 100})).run
        resume(three, total_chunks=200)
        assert_same_run(one, three)


def test_resumed_run_keeps_overlap(tmp_path):
    run = train(quick(tmp_path, total_chunks=40)).run
    rlt = load_config(run / "config.yaml").algorithms["rlt"] | {"train_freq": [1, "overlap"]}
    with pytest.raises(ValueError, match="A resumed run must keep rlt"):
        resume(run, algorithms={"rlt": rlt}, total_chunks=80)


def test_a_resumed_run_may_name_the_mode_that_the_algorithm_has_by_itself(tmp_path):
    run = train(quick(tmp_path, total_chunks=40)).run
    config = load_config(run / "config.yaml")
    assert config.rollout.mode is None and "train_freq" not in config.settings
    with pytest.raises(ValueError, match=r"must keep rollout\.mode: the run has overlap, given was sync"):
        resume(run, rollout=RolloutConfig("sync"), total_chunks=80)
    resume(run, rollout=RolloutConfig("overlap"), total_chunks=80)
    assert find_checkpoint(run)[1].chunks == 80 and load_config(run / "config.yaml").rollout.mode == "overlap"


def test_evaluations_with_own_simulators_do_not_change_training(tmp_path, monkeypatch):
    """The same networks and rows of metrics.csv as without them; and a run that dies goes on the same way."""
    apart = EvalSettings(4, 4, 50, videos=False, num_envs=3)
    with_them = train(config_of_whole(tmp_path, name="with", evaluation=apart)).run
    never = EvalSettings(4, 4, 10**6, videos=False, num_envs=3)
    without = train(config_of_whole(tmp_path, name="without", evaluation=never)).run

    def training(run):
        rows = [row for row in without_clocks(run / "metrics.csv") if "rollout/success_rate" in row]
        return [{key: value for key, value in row.items() if not key.startswith("selection/")} for row in rows]

    assert len(training(with_them)) > 10 and training(with_them) == training(without)
    assert same(parameters(with_them / "model.zip", "rlt"), parameters(without / "model.zip", "rlt"))
    assert [len(read_evaluations(run)["selection"]) for run in (with_them, without)] == [4, 1]

    train_until_it_dies(config_of_whole(tmp_path, name="two", evaluation=apart), 110, monkeypatch)
    two = tmp_path / "two"
    assert find_checkpoint(two)[1].chunks == 80  # not 100, which is of an evaluation
    resume(two)
    assert_same_run(with_them, two)
    assert (two / "best_model.zip").exists()
    assert same(parameters(with_them / "best_model.zip", "rlt"), parameters(two / "best_model.zip", "rlt"))


def test_checkpoints_at_both_schedules(whole):
    names = [c.chunks for c in all_checkpoints(whole)]
    assert names == [0, 40, 50, 80, 100, 120, 150, 160, 200]
    assert [c.chunks for c in resumable_checkpoints(whole)] == [160, 200]


def test_schedules_fire_at_crossings(tmp_path):
    """Seven environments evaluate and save as often: their chunks meet no multiple of 40 or 30 before 210."""
    config = quick(tmp_path, total_chunks=190, save_every=30)
    config.env.num_envs = 7
    result = train(config)
    # crossings of 40, 80, 120, 160, and the end: ceil(190 / 40)
    evaluated = [42, 84, 126, 161, 196]
    assert [point.chunks for point in result.selection] == evaluated
    # crossings of 30, 60, ... 180: floor(196 / 30)
    saved = [35, 63, 91, 126, 154, 182]
    assert [c.chunks for c in all_checkpoints(result.run)] == sorted({0, *evaluated, *saved})


def test_killed_run_loses_nothing_but_time(tmp_path, whole):
    """SIGKILL at any moment; resumed by the command line from what is on the disk."""
    config = config_of_whole(tmp_path, env_id="toy_env:FakeRLToken-v0")
    save_config(config, tmp_path / "c.yaml")
    command = [sys.executable, "-m", "rlt_sb3", "train"]
    process = subprocess.Popen(
        [*command, "--config", str(tmp_path / "c.yaml")], env=environment(), stdout=subprocess.DEVNULL
    )
    run = tmp_path / "toy"
    while process.poll() is None and len(all_checkpoints(run)) < 3:
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    rows = without_clocks(run / "metrics.csv")
    steps = [int(row["time/total_timesteps"]) for row in rows]
    assert steps and steps == sorted(set(steps))
    done = subprocess.run([*command, "--resume", str(run)], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert_same_run(whole, run)
    assert (run / "report.html").is_file() and not list((run / "checkpoints").glob(".*"))


def test_crash_in_the_midst_of_training(tmp_path, whole, monkeypatch):
    """The status is not 0, no process is left, and the run goes on from its last checkpoint as if nothing had been."""
    save_config(config_of_whole(tmp_path, env_id="toy_env:BreakingRLToken-v0"), tmp_path / "c.yaml")
    process = subprocess.Popen(
        [sys.executable, "-m", "rlt_sb3", "train", "--config", str(tmp_path / "c.yaml")],
        env=environment(TOY_BREAKS_AT="35"),  # two environments: after 68 of 200 chunks
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert "the simulator has exploded" in process.communicate(timeout=300)[1]
        assert process.returncode == 1
        with pytest.raises(ProcessLookupError):  # the group is empty
            os.killpg(process.pid, 0)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    run = tmp_path / "toy"
    assert find_checkpoint(run)[1].chunks == 50 and RLT.load(run / "model.zip", device="cpu").num_timesteps == 68
    monkeypatch.setenv("RLT_ALLOWED_IMPORTS", "toy_env")
    resume(run)
    assert_same_run(whole, run)


def test_interrupted_run_goes_on(tmp_path, monkeypatch, capsys):
    """The first Ctrl-C waits for a safe point, saves and says how to go on; the command exits with 130."""
    from rlt_sb3.callbacks.budget import BudgetCallback

    config = quick(tmp_path, total_chunks=120)
    original = BudgetCallback._on_step

    def press(self):
        if self.num_timesteps == 58:
            signal.raise_signal(signal.SIGINT)
        return original(self)

    monkeypatch.setattr(BudgetCallback, "_on_step", press)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(config)
    assert signal.getsignal(signal.SIGINT) is before
    run = tmp_path / "toy"
    assert f"rlt train --resume {run}" in capsys.readouterr().out
    model = RLT.load(run / "model.zip", device="cpu")
    assert model.num_timesteps == 58 and find_checkpoint(run)[1].chunks == 58
    monkeypatch.undo()
    result = resume(run)
    assert [point.chunks for point in result.selection] == [40, 80, 120]
    assert result.best.n == 4


class Played:
    """Which initial states are played, as one name for each time in a row; Ctrl-C may come in the midst of it."""

    def __init__(self, monkeypatch, press_after=None):
        self.steps, self.press_after, original = [], press_after, FakeRLTokenVectorEnv.step

        def step(env, actions):
            self.steps.append(env.init_states)
            if self.phases == self.press_after:
                self.press_after = None
                signal.raise_signal(signal.SIGINT)
            return original(env, actions)

        monkeypatch.setattr(FakeRLTokenVectorEnv, "step", step)

    @property
    def phases(self):
        return [split for split, _ in groupby(self.steps)]


@pytest.mark.parametrize("interrupted", [["eval"], ["eval", "selection"]])
def test_interrupted_before_training(tmp_path, whole, capsys, interrupted):
    """Evaluations of the VLA that were finished are not played again; training is the same."""
    with pytest.MonkeyPatch.context() as patch:
        played = Played(patch, interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(config_of_whole(tmp_path))
    run = tmp_path / "toy"
    assert played.phases == interrupted and find_checkpoint(run) == (run, None)
    assert f"nothing is trained yet; resume with: rlt train --resume {run}\n" in capsys.readouterr().out
    with pytest.MonkeyPatch.context() as patch:
        played = Played(patch)
        assert main(["train", "--resume", str(run)]) == 0
    left = ["eval", "selection", "train"][len(interrupted) - 1 :]
    assert played.phases[: len(left)] == left
    assert_same_run(whole, run)
    old, new = read_evaluations(whole), read_evaluations(run)
    for key in ("vla", "vla_selection", "rlt", "comparison"):
        assert old[key] == new[key], key


def test_interrupted_in_a_selection_evaluation(tmp_path, capsys):
    """What was trained before it is saved; it is played again, from its beginning."""
    with pytest.MonkeyPatch.context() as patch:
        Played(patch, ["eval", "selection", "train", "selection"])
        with pytest.raises(KeyboardInterrupt):
            train(config_of_whole(tmp_path))
    run = tmp_path / "toy"
    assert f"50 chunks are saved; resume with: rlt train --resume {run}\n" in capsys.readouterr().out
    assert [c.chunks for c in all_checkpoints(run)] == [0, 40, 50]
    assert read_evaluations(run)["selection"] == []
    with pytest.MonkeyPatch.context() as patch:
        played = Played(patch)
        result = resume(run)
    assert played.phases[:3] == ["selection", "train", "selection"]
    assert [point.chunks for point in result.selection] == [50, 100, 150, 200]
    assert all(point.evaluation.n == 4 for point in result.selection)


def test_damaged_checkpoint_names_the_older_one(tmp_path, capsys):
    run = train(quick(tmp_path)).run
    older, newest = resumable_checkpoints(run)
    data = bytearray((newest.path / "replay_buffer.pkl").read_bytes())
    data[len(data) // 2] ^= 1
    (newest.path / "replay_buffer.pkl").write_bytes(data)
    assert main(["train", "--resume", str(run)]) == 1
    error = capsys.readouterr().err
    assert "replay_buffer.pkl is damaged" in error and f"rlt train --resume {older.path}" in error
    capsys.readouterr()
    assert resume(older.path).selection[-1].chunks == 100
    assert f"after that is discarded: {newest.path.name} and" in capsys.readouterr().out
    (newest.path / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        resume(newest.path)


def test_checkpoint_of_another_version_is_refused_in_one_line(tmp_path, capsys):
    """Format 1 had the state of the callbacks in another shape."""
    run = train(quick(tmp_path, total_chunks=40)).run
    manifest = find_checkpoint(run)[1].path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 2', '"format": 1'))
    capsys.readouterr()
    assert main(["train", "--resume", str(run)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"rlt train: Checkpoint {manifest.parent} cannot be read: ") and error.count("\n") == 1
    assert "it has format 1, this version reads 2" in error


def test_full_disk_is_an_error_and_the_older_checkpoint_survives(tmp_path, monkeypatch):
    """The operating system itself refuses to write more (file size limit)."""
    from rlt_sb3.experiment import session as learn

    config = quick(tmp_path, total_chunks=120)
    original = learn.write_checkpoint

    def limited(run, model, *args):
        if model.num_timesteps < 80:
            return original(run, model, *args)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
        try:
            return original(run, model, *args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    monkeypatch.setattr(learn, "write_checkpoint", limited)
    with pytest.raises(CheckpointError, match=r"could not be written.*chunk-00000040 is complete"):
        train(config)
    run = tmp_path / "toy"
    assert [c.chunks for c in all_checkpoints(run)] == [0, 40] and not list((run / "checkpoints").glob(".*"))
    monkeypatch.undo()
    assert resume(run).selection[-1].chunks == 120


def test_what_a_resumed_run_may_change(tmp_path, capsys):
    run = train(quick(tmp_path, total_chunks=40)).run
    with pytest.raises(ValueError, match="must keep seed: the run has 0, given was 1"):
        resume(run, seed=1)
    with pytest.raises(ValueError, match=r"must keep evaluation\.n_states"):
        resume(run, evaluation=EvalSettings(5, 4, 40, videos=False))
    assert main(["train", "--resume", str(run), "--rlt.bc_coef", "3"]) == 2
    assert "must keep rlt" in capsys.readouterr().err
    with pytest.raises(ValueError, match="There is no checkpoint in"):
        find_checkpoint(tmp_path)
    (run / "checkpoints" / "chunk-00000000" / "replay_buffer.pkl").unlink()
    with pytest.raises(ValueError, match="has a model only"):
        find_checkpoint(run / "checkpoints" / "chunk-00000000")
    assert main(["train", "--resume", str(tmp_path / "nothing")]) == 2
    assert "There is nothing to resume" in capsys.readouterr().err


def test_saved_configuration_repeats_the_run(tmp_path, whole):
    config = load_config(whole / "config.yaml")
    config.out = str(tmp_path)
    assert yaml.safe_load((whole / "config.yaml").read_text())["resume"] is None
    assert_same_run(whole, train(config).run)


def test_random_states_round_trip(tmp_path):
    import json
    import random

    import torch

    from rlt_sb3.experiment.checkpoints import rng_state, set_rng_state

    class Model:
        action_space = toy_env.ToyVectorEnv(1).single_action_space

    def draw():
        return random.random(), np.random.normal(), torch.rand(3).tolist(), Model.action_space.sample().tolist()

    np.random.normal()  # leaves half of a pair behind, which is part of the state
    state = json.loads(json.dumps(rng_state(Model)))
    first = draw()
    assert draw() != first
    set_rng_state(state, Model)
    assert draw() == first
