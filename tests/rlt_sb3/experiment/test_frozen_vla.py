"""The frozen VLA's outcomes, taken from another run: the same run without playing it, and when they do not fit."""

from dataclasses import replace

import imageio.v2 as iio
import pytest
import toy_env
from run_helpers import same, small, without_clocks

from rlt_sb3.experiment.config import EnvConfig, EvalSettings
from rlt_sb3.experiment.context import Run
from rlt_sb3.experiment.frozen_vla import known_vla
from rlt_sb3.experiment.models import load_model
from rlt_sb3.experiment.report import read_evaluations
from rlt_sb3.experiment.train import train

EVALUATION = EvalSettings(n_states=6, selection_states=4, selection_every=40, videos=False)


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    """The report is not what is tested here."""
    monkeypatch.setattr("rlt_sb3.experiment.report.write_report", lambda run: None)


@pytest.fixture
def played(monkeypatch):
    """How often a frozen VLA is played, on which split."""
    splits = []
    original = Run.evaluate

    def evaluate(self, policy, split, name, *args, **kwargs):
        if policy == "vla":
            splits.append((split, kwargs.get("n_states")))
        return original(self, policy, split, name, *args, **kwargs)

    monkeypatch.setattr(Run, "evaluate", evaluate)
    return splits


def parameters(run):
    return load_model("rlt", run / "model.zip", device="cpu").get_parameters()


def test_a_run_that_takes_them_is_the_one_that_plays_it(tmp_path, played):
    """Also what is learned: playing the VLA first uses up nothing that training needs."""
    first = train(small(tmp_path, name="first", evaluation=EVALUATION)).run
    assert played == [("eval", None), ("selection", None)]
    with_it = train(small(tmp_path, name="with", seed=5, evaluation=EVALUATION))
    played.clear()
    fewer = replace(EVALUATION, n_states=5, vla_of=str(first))
    without = train(small(tmp_path, name="without", seed=5, evaluation=fewer))
    assert played == []
    assert same(parameters(with_it.run), parameters(without.run))
    rows = without_clocks(with_it.run / "metrics.csv")
    assert len(rows) > 10 and rows == without_clocks(without.run / "metrics.csv")
    assert without.vla.rows == with_it.vla.rows[:5] and without.best.rows == with_it.best.rows[:5]
    data = read_evaluations(without.run)
    assert data["vla_selection"] == read_evaluations(first)["vla_selection"]
    assert data["config"]["evaluation"]["vla_of"] == str(first)
    # its own outcomes are of use to a third one; the states that are filmed are played, and shown at the same speed
    third = replace(EVALUATION, n_states=5, videos=True, record_states=2, vla_of=str(without.run))
    result = train(small(tmp_path, name="third", evaluation=third))
    assert played == [("eval", 2)] and (result.run / "before.mp4").exists()
    films = [iio.get_reader(result.run / f"{name}.mp4") for name in ("before", "after")]
    assert [film.get_meta_data()["fps"] for film in films] == [20, 20]


def test_outcomes_that_do_not_fit_start_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(toy_env.ToyVectorEnv, "fingerprint", {"vla": "a" * 64, "rl_token": "b" * 64})
    run = train(small(tmp_path, name="first", evaluation=EVALUATION, total_chunks=40)).run
    assert known_vla(run, "eval", range(6)) is not None
    assert known_vla(run, "eval", range(7)) is None and known_vla(run, "train", range(1)) is None
    taken = replace(EVALUATION, vla_of=str(run))
    for changes, match in (
        ({"evaluation": replace(taken, vla_of=str(tmp_path / "none"))}, "none"),
        ({"evaluation": replace(taken, n_states=7)}, "outcomes on 7 states of the split 'eval', and .*first does not"),
        ({"evaluation": replace(taken, selection_states=5)}, "on 5 states of the split 'selection'"),
        (
            {"env": EnvConfig(id="ToyRLToken-v0", num_envs=2, max_episode_steps=9)},
            "first has env.max_episode_steps None, given was 9",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            train(small(tmp_path, **{"evaluation": taken} | changes))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first"]
    # another encoder does not change what the VLA does, other weights of the VLA do
    monkeypatch.setattr(toy_env.ToyVectorEnv, "fingerprint", {"vla": "a" * 64, "rl_token": "c" * 64})
    train(small(tmp_path, name="encoder", evaluation=taken, total_chunks=40))
    monkeypatch.setattr(toy_env.ToyVectorEnv, "fingerprint", {"vla": "d" * 64, "rl_token": "b" * 64})
    with pytest.raises(
        ValueError, match=r"first was made with other frozen weights .*: vla aaa.*Leave evaluation\.vla"
    ):
        train(small(tmp_path, name="weights", evaluation=taken, total_chunks=40))
    assert not (tmp_path / "weights").exists()
