"""A whole run on the toy environment: what it leaves behind, and that evaluation and training stay apart."""

import csv
import json
from dataclasses import replace
from functools import partialmethod

import numpy as np
import pytest
import toy_env
import yaml
from run_helpers import NETWORKS, SMALL_RLT, small

from rlt_sb3 import RLT
from rlt_sb3.common.files import replacing
from rlt_sb3.evaluation.results import Evaluation
from rlt_sb3.experiment.checkpoints import all_checkpoints
from rlt_sb3.experiment.config import EnvConfig, EvalSettings, load_config, save_config
from rlt_sb3.experiment.environment import make_env
from rlt_sb3.experiment.eval_config import EvalConfig
from rlt_sb3.experiment.evaluate_run import evaluate_run, output_path
from rlt_sb3.experiment.run_dir import RunDir
from rlt_sb3.experiment.train import train


@pytest.fixture
def spied(monkeypatch):
    """The environments that a run makes."""
    made = []
    original = toy_env.ToyVectorEnv.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(toy_env.ToyVectorEnv, "__init__", init)
    return made


def test_run_leaves_everything(tmp_path, spied, capsys):
    result = train(small(tmp_path))
    run = tmp_path / "toy"
    assert result.run == run
    for name in (
        "model.zip best_model.zip config.yaml metrics.csv evaluations.json evaluations.csv learning_curve.png "
        "before.mp4 after.mp4 report.html"
    ).split():
        assert (run / name).stat().st_size > 0, name
    assert list((run / "tensorboard").glob("events*"))
    assert not list(run.glob(".*"))

    # One set of workers served everything, and was closed.
    (env,) = spied
    assert env.closed_workers
    assert (result.vla.successes, result.vla.n) == (3, 6)
    # Every crossing of 40, 80 and the end: ceil(100 / 40)
    assert [point.chunks for point in result.selection] == [40, 80, 100]
    data = json.loads((run / "evaluations.json").read_text())
    assert data["training"]["chunks"] == 100
    assert data["training"]["control_steps"] == 200
    assert Evaluation.from_dict(data["rlt"]).rows == result.best.rows
    assert data["vla_selection"]["successes"] == 2
    with (run / "evaluations.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 6 + 4 + 6

    page = (run / "report.html").read_text()
    assert "3/6" in page and "McNemar" in page and "One picture\nper control step, 20 a second." in page
    assert "http://" not in page and "https://" not in page and 'src="data:video/mp4;base64,' in page
    out = capsys.readouterr().out
    assert "frozen VLA" in out and "3/6" in out and "paired on the same 6 held-out initial states" in out


def test_training_and_evaluation_stay_apart(tmp_path, spied):
    train(small(tmp_path))
    (env,) = spied
    # Only the 50 vector steps of training were played on training states.
    assert env.split_of_steps.count("train") == 50
    runs = [env.split_of_steps[0]]
    for split in env.split_of_steps[1:]:
        if split != runs[-1]:
            runs.append(split)
    assert runs == ["eval", "selection", "train", "selection", "train", "selection", "train", "selection", "eval"]
    # Coming back to training starts other training states each time.
    seeds = [tuple(s) for s, split in zip(env.seeds, env.splits, strict=True) if split == "train"]
    assert len(seeds) == 3 and len(set(seeds)) == 3


def test_training_episodes_are_as_long_as_the_vla_needs(tmp_path, spied, monkeypatch):
    """Six successes after 4, 8, 6, 4, 8 and 6 control steps, nine of ten within 8: so 10, with the margin."""
    given = toy_env.ToyVectorEnv.__init__
    with_default = partialmethod(given, train_episode_steps=6)
    monkeypatch.setattr(toy_env.ToyVectorEnv, "__init__", with_default)
    evaluation = EvalSettings(6, 12, 40, record_states=0, videos=False)
    gated = {"rlt": SMALL_RLT | {"gate": True, "policy_kwargs": NETWORKS}, "evaluation": evaluation}
    result = train(small(tmp_path, **gated, total_chunks=60, save_every=40))
    (env,) = spied
    assert [row.steps for row in result.vla.rows if row.success] == [4, 8, 6]
    assert env.train_episode_steps == json.loads((result.run / "evaluations.json").read_text())["train_episode_steps"]
    assert env.train_episode_steps == 10
    resumed = train(small(tmp_path, **gated, total_chunks=100, save_every=40, resume=str(result.run)))
    assert resumed.run == result.run and spied[-1].train_episode_steps == 10
    setting = EnvConfig(id="ToyRLToken-v0", num_envs=2, kwargs={"train_episode_steps": 7})
    own = train(small(tmp_path, name="own", env=setting, **gated, total_chunks=60))
    assert spied[-1].train_episode_steps == 7
    assert "train_episode_steps" not in json.loads((own.run / "evaluations.json").read_text())
    # The gate knows the VLA's episodes from the beginning on; a success after 8 steps is none within 7.
    baselines = [RLT.load(all_checkpoints(run)[0].model).gate.baseline for run in (result.run, own.run)]
    assert [baseline.count() for baseline in baselines] == [(6, 12), (4, 12)]


def test_evaluations_with_simulators_of_their_own(tmp_path, spied):
    """Three of them; training's two never leave the training states, and start again at checkpoints only."""
    settings = EvalSettings(6, 4, 40, record_states=3, num_envs=3)
    result = train(small(tmp_path, evaluation=settings, save_every=60))
    practice, evaluations = spied
    assert (practice.num_envs, evaluations.num_envs) == (2, 3)
    assert practice.closed_workers and evaluations.closed_workers
    assert set(practice.split_of_steps) == {"train"} and len(practice.split_of_steps) == 50
    assert [split for split in practice.splits if split is not None] == ["train"] * 2  # at the start and at 60
    assert set(evaluations.splits) == {"eval", "selection"}
    assert [point.chunks for point in result.selection] == [40, 80, 100]
    found = {c.chunks: c.resumable for c in all_checkpoints(result.run)}
    assert found == {0: False, 40: False, 60: True, 80: False, 100: True}
    # what shares the simulators of training sees the same
    shared = train(small(tmp_path, name="shared", evaluation=replace(settings, num_envs=None)))
    assert shared.vla.rows == result.vla.rows
    with pytest.raises(ValueError, match=r"evaluation\.num_envs needs save_every, for example 1000"):
        train(small(tmp_path, evaluation=settings))
    assert len(spied) == 3


@pytest.mark.sim
def test_both_have_the_same_frozen_networks():
    """A VLA of billions of weights is not loaded twice; simulators are, and do not disturb each other."""
    config = EnvConfig(num_envs=1, suite="libero_goal", task_ids=[1], assets="embedded", render_mode=None)
    practice = make_env(config, "train", 0)
    evaluations = make_env(replace(config, num_envs=2), "selection", 0, like=practice)
    try:
        assert evaluations.vla is practice.vla and evaluations.encoder is practice.encoder
        assert evaluations.metadata["fingerprint"] == practice.metadata["fingerprint"]
        before = practice.reset(seed=3)[0]
        assert len(evaluations.reset(options={"init_states": "eval"})[0]["z_rl"]) == 2
        evaluations.step(np.zeros(evaluations.action_space.shape, np.float32))
        after = practice.step(before["vla_ref"])[0]
        practice.reset(seed=3)
        for key, value in practice.step(before["vla_ref"])[0].items():
            np.testing.assert_array_equal(value, after[key])
    finally:
        practice.close()
        evaluations.close()


def test_no_return_crosses_an_evaluation(tmp_path, monkeypatch):
    from rlt_sb3 import ChunkReplayBuffer

    cut_at = []
    original = ChunkReplayBuffer.end_trajectories
    monkeypatch.setattr(
        ChunkReplayBuffer, "end_trajectories", lambda self: (cut_at.append(self.size()), original(self))
    )
    train(small(tmp_path))
    # Every transition of the rollout before the evaluation is stored by then.
    assert [size for size in cut_at if size] == [40, 80]


def test_same_seed_same_run(tmp_path):
    from rlt_sb3 import RLT

    models = []
    for _ in range(2):
        result = train(small(tmp_path, evaluation=EvalSettings(4, 2, 40, videos=False)))
        models.append(RLT.load(result.run / "model.zip", device="cpu").policy.state_dict())
    assert result.run == tmp_path / "toy-2"
    assert not (result.run / "before.mp4").exists()
    for key, value in models[0].items():
        np.testing.assert_array_equal(value.numpy(), models[1][key].numpy(), err_msg=key)


def test_budgets(tmp_path):
    result = train(small(tmp_path, total_control_steps=60))
    assert result.selection[-1].control_steps == 60
    result = train(small(tmp_path, max_minutes=1e-6))
    assert result.selection[-1].chunks == 2


def test_best_model_is_never_worse_than_the_vla(tmp_path, monkeypatch, capsys):
    """A model that does everything wrong is warned about and not kept."""
    from rlt_sb3 import RLT

    def spoiled(self, observation, *args, **kwargs):
        action = observation["vla_ref"].copy()
        return (-np.ones_like(action) if self.num_timesteps else action), None

    monkeypatch.setattr(RLT, "predict", spoiled)
    config = small(tmp_path, evaluation=EvalSettings(4, 24, 40, videos=False))
    result = train(config)
    assert all(point.evaluation.successes == 0 for point in result.selection)
    assert "WARNING: RLT is below the frozen VLA's 95 % interval" in capsys.readouterr().out
    best = RLT.load(tmp_path / "toy" / "best_model.zip", device="cpu")
    assert best.num_timesteps == 0


def test_interrupt_saves(tmp_path, monkeypatch, spied):
    from rlt_sb3 import RLT
    from rlt_sb3.callbacks.budget import BudgetCallback

    def interrupt(self):
        if self.num_timesteps >= 60:
            raise KeyboardInterrupt
        return True

    monkeypatch.setattr(BudgetCallback, "_on_step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(small(tmp_path))
    assert RLT.load(tmp_path / "toy" / "model.zip", device="cpu").num_timesteps == 60
    data = json.loads((tmp_path / "toy" / "evaluations.json").read_text())
    assert data["training"]["chunks"] == 60 and len(data["selection"]) == 1 and "rlt" not in data
    assert spied[0].closed_workers
    # What an interrupted run has can still be shown and evaluated.
    from rlt_sb3.experiment.report import write_report

    assert "no final evaluation" in write_report(tmp_path / "toy").read_text()
    evaluate_run(EvalConfig(run=str(tmp_path / "toy"), model="last", progress=False))


def test_evaluate_run_needs_no_settings(tmp_path, capsys):
    result = train(small(tmp_path))
    again = evaluate_run(EvalConfig(run=str(result.run), progress=False))
    assert again.rows == result.best.rows
    vla = evaluate_run(EvalConfig(run=str(result.run), model="vla", num_envs=3, progress=False))
    assert vla.rows == result.vla.rows
    data = json.loads((result.run / "eval-best-eval.json").read_text())
    assert data["per_task"]["7"]["n"] == 6
    assert " fixed, " in capsys.readouterr().out
    with pytest.raises(ValueError, match="There is no model"):
        evaluate_run(EvalConfig(run=str(result.run), model="bset", progress=False))
    with pytest.raises(ValueError, match="A run is the folder"):
        evaluate_run(EvalConfig(run=str(tmp_path / "nothing"), progress=False))
    with pytest.raises(ValueError, match="Unknown split"):
        evaluate_run(EvalConfig(run=str(result.run), split="test", progress=False))


def test_a_run_is_evaluated_on_another_device(tmp_path, monkeypatch):
    """One made on a GPU, where there is none."""
    result, devices = train(small(tmp_path)), []
    config = load_config(result.run / "config.yaml")
    config.env.device = "cuda:99"
    save_config(config, result.run / "config.yaml")
    with pytest.raises(ValueError, match="cuda:99"):
        evaluate_run(EvalConfig(run=str(result.run), progress=False))

    def make(env, *args):
        devices.append(env.device)
        return make_env(replace(env, device=None), *args)  # the toy has none

    monkeypatch.setattr("rlt_sb3.experiment.evaluate_run.make_env", make)
    assert evaluate_run(EvalConfig(run=str(result.run), device="cpu", progress=False)).rows == result.best.rows
    assert devices == ["cpu"]


def test_bad_settings_start_nothing(tmp_path, spied):
    for changes, match in (
        ({"total_chunks": 0}, "total_chunks must be at least 1, got 0"),
        ({"max_minutes": -1}, "max_minutes"),
        ({"name": "a/b"}, "plain folder name"),
        ({"rlt": {"seed": 3}}, "rlt may not contain"),
        ({"rlt": {"bc_coeff": 3}}, "bc_coeff"),
        ({"rlt": {"device": "cuda:99"}}, "cuda:99"),
        ({"rlt": {"bc_coef": lambda left: 20 * left}}, r"rlt contains <function .* cannot be written to config\.yaml"),
        ({"rlt": {"policy_kwargs": {"activation_fn": dict}}}, "rlt contains <class 'dict'>"),
        ({"env": EnvConfig(id="ToyRLToken-v0", kwargs={"n_states": np.int64(3)})}, r"env contains np\.int64\(3\)"),
        ({"env": EnvConfig(id="ToyRLToken-v0", suite="unknown")}, "Unknown suite"),
    ):
        with pytest.raises(ValueError, match=match):
            train(small(tmp_path, **changes))
    assert spied == []
    assert list(tmp_path.iterdir()) == []


def test_more_states_than_there_are_leave_no_folder(tmp_path, spied, monkeypatch):
    """Only the environment knows how many it has."""
    counts = {"eval": 6, "selection": 4}
    monkeypatch.setattr(toy_env.ToyVectorEnv, "init_state_counts", counts, raising=False)
    for settings, message in (
        (EvalSettings(7, 4, 40), r"evaluation\.n_states must be at most 6, as the split 'eval' has no more, got 7"),
        (EvalSettings(6, 5, 40), r"evaluation\.selection_states must be at most 4, .* got 5"),
    ):
        with pytest.raises(ValueError, match=message):
            train(small(tmp_path, evaluation=settings))
    assert len(spied) == 2 and all(env.closed_workers for env in spied)
    assert list(tmp_path.iterdir()) == []


def test_config_round_trip(tmp_path):
    config = small(tmp_path)
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"nam": "x"}))
    with pytest.raises(ValueError, match="nam"):
        load_config(tmp_path / "config.yaml")


def test_files_are_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    assert [RunDir.create(tmp_path / "run").path.name for _ in range(3)] == ["run", "run-2", "run-3"]


def test_the_evaluation_of_a_checkpoint_has_a_file_of_its_own(tmp_path, monkeypatch):
    def name(model):
        return output_path(EvalConfig(run="r", model=model)).as_posix()

    assert name("r/checkpoints/chunk-00000400/model.zip") == "r/eval-chunk-00000400-eval.json"
    assert name("r/checkpoints/chunk-00000800/model.zip") == "r/eval-chunk-00000800-eval.json"
    assert name("elsewhere/mine.zip") == "r/eval-mine-eval.json"
    assert [name(model) for model in ("best", "vla")] == ["r/eval-best-eval.json", "r/eval-vla-eval.json"]
    folder = tmp_path / "checkpoints" / "chunk-00000040"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    assert name("model.zip") == "r/eval-chunk-00000040-eval.json"
