"""benchmarks/actor_parts.py: the parts of an actor add up to what it plays."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch as th
from benchmark_helpers import import_benchmark, run_benchmark
from run_helpers import quick, small

from rlt_sb3.experiment.report import read_evaluations
from rlt_sb3.experiment.train import train
from tests.helpers.rlt_models import make_model, make_venv, random_obs


@pytest.fixture
def actor_parts():
    return import_benchmark("actor_parts")


def test_parts_add_up(actor_parts):
    model = make_model()
    actor = model.policy.training_actor
    with th.no_grad():
        actor.mu[-1].bias += th.linspace(-0.05, 0.05, len(actor.mu[-1].bias))
        actor.offset[0] += th.linspace(0.01, 0.03, actor.offset[0].numel()).view_as(actor.offset[0])
    before = {name: value.clone() for name, value in actor.state_dict().items()}
    obs = random_obs(model, 16)
    obs["vla_ref"] = np.clip(obs["vla_ref"], -0.5, 0.5)  # far from the limits of actions
    reference = obs["vla_ref"]
    played = {part: actor_parts.as_function(model, part)(obs) - reference for part in actor_parts.PARTS}
    closes = reference[..., actor.gripper].mean(1) > 0
    assert 0 < closes.sum() < 16
    due = actor.offset[0].numpy()[closes.astype(int)][:, None]
    np.testing.assert_allclose(played["offset"], np.broadcast_to(due, reference.shape), atol=1e-6)
    np.testing.assert_allclose(
        played["network"].reshape(16, -1), np.tile(actor.mu[-1].bias.detach(), (16, 1)), atol=1e-6
    )
    np.testing.assert_allclose(played["whole"], played["offset"] + played["network"], atol=1e-6)
    for part, where in (("network while closed", closes), ("network while open", ~closes)):
        np.testing.assert_array_equal(played[part][where], played["whole"][where])
        np.testing.assert_array_equal(played[part][~where], played["offset"][~where])
    assert all(th.equal(value, before[name]) for name, value in actor.state_dict().items())


@pytest.mark.parametrize("task", [None, 2])
def test_what_the_network_adds_is_compared_with_the_offset(actor_parts, task):
    """With one bias of all states and control steps, and another one."""
    kwargs = {} if task is None else {"venv": make_venv(2, task_ids=range(3), show_task=True)}
    model = make_model(action_scale=[0.5] * 6 + [1.0], **kwargs)
    actor = model.policy.training_actor
    network, offset = np.array([0.03, 0, 0, 0, 0, 0.04, 0.2]), np.array([[0.03, 0, 0, 0, 0, -0.04, 0], [0.0] * 7])
    with th.no_grad():
        actor.mu[-1].bias += th.tensor(np.tile(network, 4))
        actor.offset[task or 0] += th.tensor(offset)
    obs = random_obs(model, 16)
    obs["vla_ref"] = np.clip(obs["vla_ref"], -0.5, 0.5)
    if task is not None:
        obs["task"] = np.eye(3, dtype=np.float32)[[task] * 16]
    opens, closes = actor_parts.network_beside_offset(model, [obs, obs])
    assert opens["rows"] + closes["rows"] == 32 and (opens["gripper"], closes["gripper"]) == ("opens", "closes")
    for row, cosine in ((opens, (0.03**2 - 0.04**2) / 0.05**2), (closes, 0.0)):
        assert row["mean"] == pytest.approx(0.1, abs=1e-5) and row["spread"] < 1e-5
        assert row["cosine"] == pytest.approx(cosine, abs=1e-4)


def test_a_folder_without_a_run_is_refused_in_one_line(tmp_path):
    done = run_benchmark("actor_parts", tmp_path)
    assert done.returncode == 2 and str(tmp_path) in done.stderr.splitlines()[-1]


def test_films_are_of_the_last_practicing_actor(actor_parts, tmp_path, monkeypatch, capsys):
    """The whole actor solves what it solved when the run evaluated it last, and each film has its outcome's name."""
    config = small(tmp_path)
    config.env = replace(config.env, suite="toys", task_ids=[0])
    run = train(config).run
    words = [str(run), "--n-states", "4", "--parts", "whole", "--last"]
    words += ["--films", str(tmp_path / "films"), "--json", str(tmp_path / "parts.json")]
    monkeypatch.setattr(sys, "argv", ["actor_parts.py", *words])
    actor_parts.main()
    data = read_evaluations(run)
    last = data["selection"][-1]
    actor = last.get("candidate") or last["evaluation"]
    chunks = last["chunks"]
    expected = [(0, "vla", data["vla_selection"]["successes"]), (chunks, "whole", actor["successes"])]
    found = json.loads((tmp_path / "parts.json").read_text())["found"]
    assert [(row["chunks"], row["plays"], row["solved"]) for row in found] == expected
    assert f"| {chunks} | whole | {actor['successes']}/4 (" in capsys.readouterr().out
    films = sorted(path.name for path in (tmp_path / "films" / "videos").iterdir())
    assert len(films) == 8
    for at, plays, solved in expected:
        names = [name for name in films if name.startswith(f"{at}-{plays}-state-")]
        assert len(names) == 4 and sum(name.endswith("-success.mp4") for name in names) == solved


def test_of_several_tasks_one_is_played(actor_parts, tmp_path, monkeypatch, capsys):
    """What is counted is what the run's evaluations say of this task's states. Task 1 of the suite is not played."""
    config = quick(tmp_path)
    config.env.kwargs = {"task_ids": [0, 2], "show_task": True}
    config.evaluation = replace(config.evaluation, selection_states=4)
    run = train(config).run
    data = read_evaluations(run)
    last = data["selection"][-1]
    for task in (0, 2):
        words = [str(run), "--task", str(task), "--n-states", "2", "--parts", "whole", "--last"]
        monkeypatch.setattr(sys, "argv", ["actor_parts.py", *words, "--json", str(tmp_path / "parts.json")])
        actor_parts.main()
        found = json.loads((tmp_path / "parts.json").read_text())["found"]
        evaluations = (data["vla_selection"], last.get("candidate") or last["evaluation"])
        rows = [[row for row in each["rows"] if row["task_id"] == task] for each in evaluations]
        assert [row["n"] for row in found] == [len(each) for each in rows] == [2, 2]
        assert [row["solved"] for row in found] == [sum(row["success"] for row in each) for each in rows]
    monkeypatch.setattr(sys, "argv", ["actor_parts.py", str(run), "--task", "1"])
    with pytest.raises(SystemExit):
        actor_parts.main()
    assert "--task must be one of [0, 2]" in capsys.readouterr().err
