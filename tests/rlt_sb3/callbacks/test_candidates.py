"""What the actor that practises was worth is kept, not only what was handed out instead."""

import json

import pytest
from rlt_models import fast, make_model

from rlt_sb3.callbacks.budget import BudgetCallback
from rlt_sb3.callbacks.selection import SelectionCallback, SelectionPoint
from rlt_sb3.evaluation.results import Evaluation, StateResult
from rlt_sb3.experiment.report import write_learning_curve

pytestmark = pytest.mark.usefixtures("one_thread")


def outcome(successes: int) -> Evaluation:
    return Evaluation("x", "selection", [StateResult(p, 0, p, p < successes, 5, 1) for p in range(20)])


def test_candidates_are_kept_and_drawn(tmp_path, monkeypatch):
    model = make_model(**fast(gate={"share": 0.5, "window": 50}))
    model.learn(60)
    results = iter([outcome(2), outcome(18), outcome(3)])
    callback = SelectionCallback(lambda player: next(results), 20, outcome(10), BudgetCallback(100), tmp_path / "b.zip")
    callback.init_callback(model)
    points = [callback.run() for _ in range(3)]
    # handed out: the VLA, the candidate that has beaten it, the actor that is deployed since
    assert [point.evaluation.successes for point in points] == [10, 18, 3]
    assert [point.candidate and point.candidate.successes for point in points] == [2, 18, None]
    written = json.loads(json.dumps(callback.state_dict()))
    assert [SelectionPoint.from_dict(point) for point in written["points"]] == points
    del written["points"][2]["candidate"]  # of an older run
    assert SelectionPoint.from_dict(written["points"][2]) == points[2]

    from matplotlib.axes import Axes

    drawn, plot = {}, Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda self, x, y, **kw: (drawn.update({kw["label"]: y}), plot(self, x, y, **kw)))
    data = {"selection": written["points"], "vla_selection": outcome(10).to_dict(), "config": {"algorithm": "rlt"}}
    write_learning_curve(tmp_path, data)
    assert drawn == {"the actor that practises, before it is deployed (lowest 10%)": [0.1, 0.9]}
