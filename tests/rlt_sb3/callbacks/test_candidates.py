"""The practicing actor's own evaluations are kept and shown beside those of what ``predict`` plays."""

import json
import re

import numpy as np
import pytest
import torch as th
from matplotlib.figure import Figure
from rlt_models import fast, make_model
from run_helpers import small

from rlt_sb3.callbacks.budget import BudgetCallback
from rlt_sb3.callbacks.selection import SelectionCallback, SelectionPoint
from rlt_sb3.evaluation.results import Evaluation, StateResult
from rlt_sb3.experiment.practice import lowest_point, milestones, practicing
from rlt_sb3.experiment.report import write_learning_curve, write_report
from rlt_sb3.experiment.train import summary, train

FILM = {0: [np.zeros((2, 2, 3), np.uint8)]}


def outcome(successes: int, policy: str = "RLT") -> Evaluation:
    return Evaluation(policy, "selection", [StateResult(p, 0, p, p < successes, 5, 1) for p in range(20)], FILM)


def make_callback(folder, evaluate, on_point=None):
    model = make_model(**fast(gate={"share": 0.5, "window": 50}))
    model.learn(60)
    callback = SelectionCallback(evaluate, 20, outcome(10, "VLA"), BudgetCallback(100), folder / "b.zip", on_point)
    callback.init_callback(model)
    return callback


def moved(policy):
    """The practicing actor learns something."""
    with th.no_grad():
        for parameter in policy.training_actor.parameters():
            parameter.add_(0.01)


def test_both_actors_are_evaluated_where_they_differ(tmp_path):
    played, films = [], []
    successes = iter([2, 20, 6])

    def evaluate(player):
        played.append([value.clone() for value in player.policy.actor_deployed.state_dict().values()])
        return outcome(next(successes))

    callback = make_callback(tmp_path, evaluate, lambda point: films.append(point.evaluation.frames))
    policy = callback.model.policy
    actors = []

    def run(move):
        if move:
            moved(policy)
        actors.append([value.clone() for value in policy.training_actor.state_dict().values()])
        return callback.run()

    # the VLA's chunks stay; the actor that beats the VLA is deployed, and practice goes on
    points = [run(True), run(True), run(True)]
    assert [point.evaluation.successes for point in points] == [10, 20, 20]
    assert [point.candidate.successes for point in points] == [2, 20, 6]
    for number, actor in enumerate([actors[0], actors[1], actors[2]]):  # nobody plays twice
        assert all(map(th.equal, played[number], actor)), number
    assert len(played) == 3
    # what was deployed plays again afterwards
    assert all(map(th.equal, policy.actor_deployed.state_dict().values(), actors[1]))
    # films are shown once and not kept
    assert films == [{}, FILM, {}] and not any(p.evaluation.frames or p.candidate.frames for p in callback.points)

    successes = iter([])
    with th.no_grad():
        for value, deployed in zip(policy.training_actor.state_dict().values(), actors[1], strict=True):
            value.copy_(deployed)
    same = run(False)  # the same actor need not play twice
    assert same.evaluation.successes == same.candidate.successes == 20 and len(played) == 3

    written = json.loads(json.dumps(callback.state_dict()))
    assert [SelectionPoint.from_dict(point) for point in written["points"]] == callback.points


def test_what_was_deployed_comes_back_after_an_interrupt(tmp_path):
    calls = []

    def evaluate(player):
        calls.append(player)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return outcome(20)

    callback = make_callback(tmp_path, evaluate)
    moved(callback.model.policy)
    callback.run()
    deployed = [value.clone() for value in callback.model.policy.actor_deployed.state_dict().values()]
    moved(callback.model.policy)
    with pytest.raises(KeyboardInterrupt):
        callback.run()
    assert all(map(th.equal, callback.model.policy.actor_deployed.state_dict().values(), deployed))


def points_of_a_run():
    """Before the first actor is deployed, with it, and with a worse practicing actor."""
    points = [
        SelectionPoint(1200, 9000, 1.0, outcome(10), outcome(4)),
        SelectionPoint(2400, 18000, 2.0, outcome(15), outcome(15)),
        SelectionPoint(3600, 27000, 3.0, outcome(16), outcome(3)),
    ]
    return {
        "selection": [json.loads(json.dumps(point.to_dict())) for point in points],
        "vla_selection": outcome(10).to_dict(),
        "config": {"algorithm": "rlt"},
        "machine": {},
        "minutes": 1.0,
    }


def test_page_and_curve_show_the_practicing_actor(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    drawn, plot, errorbar = {}, Axes.plot, Axes.errorbar
    monkeypatch.setattr(
        Axes, "plot", lambda self, x, y, *a, **kw: (drawn.update({kw.get("label"): y}), plot(self, x, y, *a, **kw))[1]
    )
    monkeypatch.setattr(
        Axes, "errorbar", lambda self, x, y, **kw: (drawn.update({kw["label"]: y}), errorbar(self, x, y, **kw))[1]
    )
    data = points_of_a_run()
    assert lowest_point(data) == "3/20 at 3,600 chunks"
    (tmp_path / "evaluations.json").write_text(json.dumps(data))
    page = write_report(tmp_path).read_text()
    assert "Lowest point of the practicing actor: 3/20 at 3,600 chunks." in page and "robot minutes" not in page
    rows = [
        [cell.split("</td>")[0] for cell in row.split("<td>")[1:]] for row in page.split("<tr>") if "00</td>" in row
    ]
    assert [row[3:6] for row in rows] == [
        ["10/20 (the VLA's chunks)", "4/20", "10/20"],
        ["15/20", "15/20", "10/20"],
        ["16/20", "3/20", "10/20"],
    ]
    assert drawn["practicing actor, selection states (lowest: 3/20 at 3,600 chunks)"] == [0.2, 0.75, 0.15]
    assert drawn["RLT deployed (what predict() plays), selection states"].tolist() == [0.5, 0.5, 0.75, 0.8]


def test_an_actor_that_plays_exactly_like_the_vla_is_shown_as_the_vla(tmp_path):
    data = points_of_a_run()
    data["selection"][0]["candidate"] = data["selection"][0]["evaluation"]
    (tmp_path / "evaluations.json").write_text(json.dumps(data))
    page = re.sub(r">\s+<", "><", write_report(tmp_path).read_text())
    assert "<td>10/20 (the VLA's chunks)</td><td>10/20</td>" in page


def test_practice_is_shown_in_robot_minutes(tmp_path):
    """At 30 Hz: 9,000 control steps are 300 seconds, 18,000 are ten minutes, 27,000 fifteen."""
    data = points_of_a_run()
    data["training"] = {"episodes": 3, "chunks": 3600, "control_steps": 27_900, "minutes": 3.0}
    data["control_frequency"] = 30.0
    assert milestones(data) == [
        "30 points more than the frozen VLA (80%): after 27,000 control steps, 15.0 robot minutes",
        "90 %: not reached",
    ]
    data["selection"][1]["evaluation"] |= {"successes": 18}
    assert milestones(data)[1] == "90 %: after 18,000 control steps, 10.0 robot minutes"
    (tmp_path / "evaluations.json").write_text(json.dumps(data))
    page = write_report(tmp_path).read_text()
    assert milestones(data)[0] in page and "27900 control steps (15.5 robot minutes)" in page
    assert [minutes in page for minutes in ("<td>5.0</td>", "<td>10.0</td>", "<td>15.0</td>")] == [True] * 3
    data["control_frequency"] = None
    assert milestones(data)[1] == "90 %: after 18,000 control steps"
    data["vla_selection"] |= {"successes": 15}  # 75 % and 30 points more are not a rate
    assert milestones(data) == ["90 %: after 18,000 control steps"]


def test_learning_curve_shows_robot_minutes_and_minutes(tmp_path, monkeypatch):
    """24,000 control steps at 20 Hz are 20 robot minutes. A run that has not finished knows no minutes in all."""
    data, figures = points_of_a_run(), []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))
    monkeypatch.setattr("os.replace", lambda *args: None)
    write_learning_curve(tmp_path, data)
    data |= {"control_frequency": 20.0, "training": {"control_steps": 27_900, "minutes": 3.04}}
    write_learning_curve(tmp_path, data)
    labels = [figure.axes[0].get_xlabel() for figure in figures]
    assert labels == ["control steps of training", "control steps of training (3.0 minutes in all)"]
    assert not figures[0].axes[0].child_axes
    (top,) = figures[1].axes[0].child_axes
    figures[1].axes[0].set_xlim(0, 24_000)
    figures[1].canvas.draw()
    assert top.get_xlabel() == "robot minutes" and top.get_xlim() == pytest.approx((0, 20))


def test_milestones_say_whose_they_are(tmp_path):
    """18 of 20 by the practicing actor after 9,000 control steps, 16 of 20 by ``predict()`` after 27,000. VLA: 10."""
    data = points_of_a_run()
    data["selection"][0]["candidate"] |= {"successes": 18}
    data |= {"control_frequency": 20.0}
    early, late = (
        f"30 points more than the frozen VLA (80%): after {steps} robot minutes"
        for steps in ("9,000 control steps, 7.5", "27,000 control steps, 22.5")
    )
    assert milestones(data, practicing) == [early, "90 %: after 9,000 control steps, 7.5 robot minutes"]
    (tmp_path / "evaluations.json").write_text(json.dumps(data))
    page = " ".join(write_report(tmp_path).read_text().split())
    assert f"<code>predict()</code> plays on the selection states: {late}; 90 %: not reached." in page
    assert f"Of the practicing actor itself: {early}; 90 %: after 9,000 control steps, 7.5 robot minutes." in page
    printed = summary(data).splitlines()
    assert f"predict() on the selection states, {late}" in printed
    assert f"practicing actor on the selection states, {early}" in printed
    for point in data["selection"]:
        point["candidate"] = None
    assert "practicing actor on" not in summary(data) and f"predict() on the selection states, {late}" in summary(data)
    (tmp_path / "evaluations.json").write_text(json.dumps(data))
    assert "practicing actor itself" not in write_report(tmp_path).read_text()


def test_without_a_gate_there_is_one_actor(tmp_path):
    data = points_of_a_run()
    for point in data["selection"]:
        point["candidate"] = None
    assert lowest_point(data) == "10/20 at 1,200 chunks"  # of the one actor that there is
    (tmp_path / "evaluations.json").write_text(json.dumps(data))
    page = write_report(tmp_path).read_text()
    assert "Lowest point of the practicing actor: 10/20" in page and "practicing actor</th>" not in page
    assert "<td>16/20</td><td>10/20</td>" in page.replace("\n", "")
    write_learning_curve(tmp_path, data)


def test_a_run_writes_films_of_both_and_says_the_lowest_point(tmp_path, capsys):
    config = small(tmp_path, total_chunks=80, video_every=1)
    config.settings["gate"] = {"share": 0.5, "window": 2}
    config.evaluation.videos = False
    run = train(config).run
    reported = capsys.readouterr().out
    points = json.loads((run / "evaluations.json").read_text())["selection"]
    assert [point["chunks"] for point in points] == [40, 80]
    lowest = min(point["candidate"]["successes"] for point in points)
    assert f"lowest point of the practicing actor, selection states: {lowest}/4 at " in reported
    for point in points:
        start = f"selection-{point['chunks']:08d}"
        shown = {path.stem.removeprefix(start) for path in (run / "videos").glob(f"{start}-*")}
        by_practicing = {name for name in shown if name.startswith("-practicing")}
        for films, key, name in (
            (shown - by_practicing, "evaluation", ""), (by_practicing, "candidate", "-practicing"),
        ):  # fmt: skip
            ends = ["success" if row["success"] else "failure" for row in point[key]["rows"]]
            assert films in (set(), {f"{name}-state-{pair:03d}-{end}" for pair, end in enumerate(ends)})
        assert shown and len(shown) == 4 * (bool(by_practicing) + bool(shown - by_practicing))


def test_a_better_practicing_actor_is_deployed(tmp_path):
    """It must beat the VLA beyond chance, and do better than what is deployed on the same states."""

    def quick(successes):
        return Evaluation("RLT", "selection", [StateResult(p, 0, p, p < successes, 4, 1) for p in range(20)])

    # of each point: the practicing actor, whether it is deployed now
    played = [(outcome(19), True), (outcome(17), False), (outcome(19), True), (quick(19), True), (outcome(19), False),
              (outcome(20), True), (outcome(13), False)]  # fmt: skip
    results = iter([result for result, _ in played])
    callback = make_callback(tmp_path, lambda player: next(results))
    policy = callback.model.policy
    for _, wanted in played:
        moved(policy)
        before = callback.model.gate.approvals
        point = callback.run()
        assert (callback.model.gate.approvals > before) is wanted
        now = all(map(th.equal, policy.actor_deployed.parameters(), policy.training_actor.parameters()))
        assert now is wanted
        if wanted:
            assert point.evaluation.rows == point.candidate.rows
