"""Callbacks as parts for Stable-Baselines3: their state goes through JSON into new ones, which then go on the same."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import toy_env
from stable_baselines3.common.callbacks import CallbackList
from stable_baselines3.common.vec_env import VecMonitor

from rlt_sb3 import RLT, GymnasiumVecEnv
from rlt_sb3.callbacks import (
    BudgetCallback,
    MetricsCallback,
    RunCheckpointCallback,
    SelectionCallback,
    SelectionPoint,
    StatefulCallback,
    VideoCallback,
)
from rlt_sb3.evaluation.results import Evaluation, StateResult


def outcome(successes):
    return Evaluation("x", "selection", [StateResult(p, 0, p, p < successes, 5, 1) for p in range(4)])


class Run:
    """A model on the toy environment with one callback of each kind."""

    def __init__(self, folder, chunks):
        self.venv = VecMonitor(GymnasiumVecEnv(toy_env.ToyVectorEnv(2, render_mode="rgb_array")))
        settings = {"learning_starts": 4, "batch_size": 4, "policy_kwargs": {"net_arch": [4]}}
        settings["gate"] = False  # what the present actor does must show at once
        self.model = RLT("MultiInputPolicy", self.venv, seed=0, device="cpu", **settings)
        budget = BudgetCallback(chunks)
        selection = SelectionCallback(lambda model: outcome(3), 20, outcome(2), budget, folder / "best.zip")
        self.saved = []
        self.callbacks = {
            "budget": budget,
            "metrics": MetricsCallback(window=5),
            "checkpoints": RunCheckpointCallback(selection, self.restart, self.save),
            "selection": selection,
            "videos": VideoCallback(folder / "videos", 3),
        }

    def restart(self, number):
        self.callbacks["videos"].restart()
        return self.venv.reset()

    def save(self, resumable=True):
        self.saved.append(self.model.num_timesteps)

    def learn(self, chunks):
        callbacks = CallbackList(list(self.callbacks.values()))
        self.model.learn(chunks, callback=callbacks, reset_num_timesteps=False)

    def state(self):
        return {name: callback.state_dict() for name, callback in self.callbacks.items()}


def without_minutes(data):
    if isinstance(data, dict):
        return {key: without_minutes(value) for key, value in data.items() if key != "minutes"}
    return [without_minutes(entry) for entry in data] if isinstance(data, list) else data


@pytest.mark.parametrize("used", [False, True])
def test_state_goes_into_other_callbacks(tmp_path, used):
    """Also into callbacks that have seen something else, which is forgotten."""
    run = Run(tmp_path, 100)
    run.learn(50)
    state = json.loads(json.dumps(run.state()))
    assert run.saved == [20, 40]
    assert (state["budget"]["control_steps"], state["checkpoints"]) == (100, {"restarts": 2, "saved": 40})
    # two environments; in 10, 10 and 5 vector steps their episodes of 2, 3 and 4 chunks end 6, 6 and 3 times
    assert state["budget"]["episodes"] == run.model._episode_num == 15
    assert len(state["metrics"]["episodes"]) == 5 and len(state["metrics"]["stamps"]) == 24
    assert [point["chunks"] for point in state["selection"]["points"]] == [20, 40]
    assert state["selection"]["best_chunks"] == 40 and state["selection"]["best"]["successes"] == 3
    assert state["videos"]["episodes"] > 15

    other = Run(tmp_path / "other", 100)
    if used:
        (tmp_path / "other").mkdir()
        other.learn(30)
    for name, callback in other.callbacks.items():
        assert isinstance(callback, StatefulCallback)
        callback.load_state_dict(state[name])
    assert without_minutes(json.loads(json.dumps(other.state()))) == without_minutes(state)
    assert other.callbacks["budget"].minutes >= state["budget"]["minutes"] > 0
    one, two = run.callbacks["metrics"], other.callbacks["metrics"]
    assert one.episodes == two.episodes and one.tasks == two.tasks and two.episodes.maxlen == 5
    np.testing.assert_array_equal(one._sums, two._sums)
    assert other.callbacks["selection"].points == run.callbacks["selection"].points


def test_budget_goes_on_where_it_was(tmp_path):
    run = Run(tmp_path, 100)
    run.callbacks["budget"].total_control_steps = 60
    run.callbacks["budget"].load_state_dict({"control_steps": 40, "episodes": 3, "minutes": 2.0})
    run.learn(1000)
    assert run.callbacks["budget"].control_steps == 60 and run.model.num_timesteps == 10
    assert run.callbacks["budget"].minutes > 2.0


def test_budget_counts_the_minutes_of_all_calls_of_learn(tmp_path, monkeypatch):
    """But not those between two calls."""
    run, now = Run(tmp_path, 100), 0.0
    monkeypatch.setattr("rlt_sb3.callbacks.budget.time", SimpleNamespace(monotonic=lambda: now))
    budget = run.callbacks["budget"]
    budget.init_callback(run.model)
    for minutes in (5.0, 2.0):
        budget._on_training_start()
        now += 60.0 * minutes
        budget.on_training_end()
        now += 600.0
    budget._on_training_start()
    assert budget.minutes == 7.0


def test_budget_counts_the_minutes_of_a_learn_that_ctrl_c_ended(tmp_path, monkeypatch):
    run, now = Run(tmp_path, 100), 0.0
    monkeypatch.setattr("rlt_sb3.callbacks.budget.time", SimpleNamespace(monotonic=lambda: now))
    budget, step = run.callbacks["budget"], run.callbacks["budget"]._on_step

    def three_minutes_then_ctrl_c():
        nonlocal now
        if budget.control_steps >= 8:
            raise KeyboardInterrupt
        now += 3 * 60.0
        return step()

    monkeypatch.setattr(budget, "_on_step", three_minutes_then_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        run.learn(100)
    used, now = now, now + 600.0
    budget._on_training_start()
    assert 0.0 < used == 60.0 * budget.minutes


def test_verdicts_of_a_reward_model_are_kept():
    metrics, resumed = MetricsCallback(window=3), MetricsCallback(window=3)
    metrics.wrong.extend([True, False, False, True])
    resumed.load_state_dict(json.loads(json.dumps(metrics.state_dict())))
    assert list(resumed.wrong) == [False, False, True] and resumed.wrong.maxlen == 3


def test_new_episodes_are_told_to_the_model(tmp_path):
    """On-policy algorithms keep first observations and marks of episodes' starts between two rollouts."""
    run = Run(tmp_path, 100)
    run.learn(10)
    run.model._last_episode_starts = np.zeros(2, dtype=bool)
    run.callbacks["checkpoints"].begin_episodes()
    assert run.model._last_episode_starts.all() and not run.model._last_obs["proprio"].any()
    assert run.callbacks["checkpoints"].restarts == 1


def test_points_are_plain_data():
    point = SelectionPoint(20, 40, 0.5, outcome(2))
    assert SelectionPoint.from_dict(json.loads(json.dumps(point.to_dict()))) == point
