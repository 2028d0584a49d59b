"""The page of a run of several tasks has a row and a small curve for each task; that of one task has neither."""

import json
import re
from dataclasses import asdict

import pytest
from matplotlib.figure import Figure
from run_helpers import small, textbook_wilson

from rlt_sb3.evaluation.compare import compare
from rlt_sb3.evaluation.results import Evaluation, StateResult
from rlt_sb3.experiment.config import EnvConfig, ReportConfig
from rlt_sb3.experiment.eval_config import EvalConfig
from rlt_sb3.experiment.evaluate_run import evaluate_run
from rlt_sb3.experiment.report import read_evaluations, report, write_report, write_task_curves
from rlt_sb3.experiment.train import summary, train

#: task -> held-out states, of 20, that the VLA and the policy solve
VLA = {2: range(10), 5: range(10), 7: ()}
POLICY = {2: range(5), 5: range(8, 14), 7: range(12, 20)}


def outcome(policy, split, solved, n, one_task=False):
    """Of n states of each task; with ``one_task`` the same outcomes as of n * T states of task 0."""
    rows = [
        StateResult(n * place + i, 0 if one_task else task, n * place + i if one_task else i, i in states, 40, 5)
        for place, (task, states) in enumerate(solved.items())
        for i in range(n)
    ]
    return Evaluation(policy, split, rows)


def write_run(folder, one_task=False):
    """A finished run with a gate, whose selection states are four of each task."""

    def selection(policy, *counts):
        solved = {task: range(count) for task, count in zip(VLA, counts, strict=True)}
        return outcome(policy, "selection", solved, 4, one_task)

    points = [(9000, (3, 2, 1), (0, 2, 3)), (18_000, (3, 2, 3), (1, 4, 3))]
    vla, policy = (outcome(*known, 20, one_task) for known in (("frozen VLA", "eval", VLA), ("RLT", "eval", POLICY)))
    data = {
        "selection": [
            {"chunks": steps // 8, "control_steps": steps, "minutes": 1.0,
             "evaluation": selection("RLT", *deployed).to_dict(), "candidate": selection("RLT", *candidate).to_dict()}
            for steps, deployed, candidate in points
        ],
        "vla_selection": selection("frozen VLA", 3, 2, 1).to_dict(),
        "vla": vla.to_dict(),
        "rlt": policy.to_dict(),
        "comparison": asdict(compare(vla, policy)),
        "tasks": {"2": "open the <drawer>", "5": "push the plate", "7": "put the wine bottle on the rack"},
        "config": {"algorithm": "rlt"}, "machine": {}, "minutes": 1.0, "control_frequency": 20.0,
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "evaluations.json").write_text(json.dumps(data))
    return data


def table_of(page):
    """The cells of the table below the heading "Each task"."""
    section = page.split("<h2>Each task</h2>")[1].split("</table>")[0]
    return [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL) for row in section.split("<tr>")[1:]]


def percent(k, n):
    low, high = textbook_wilson(k, n)
    return f"{max(low, 0):.0%} to {high:.0%}"  # of 0 successes, rounding makes the lower end negative


def test_the_table_has_a_row_for_each_task(tmp_path):
    """
    Half of 20 states: Wilson's lower bound is 29.9 %. Five solved states are below it, six are not.

    McNemar's p is 2 / 2**5; 2 * (1 + 12 + 66 + 220 + 495) / 2**12; 2 / 2**8.
    """
    data = write_run(tmp_path / "run")
    page = write_report(tmp_path / "run").read_text()
    head, *rows = table_of(page)
    assert head[:3] == ["task", "instruction", "frozen VLA"] and head[4] == "RLT"
    half = percent(10, 20)
    assert half == "30% to 70%"
    mark = "below the VLA's interval"
    assert rows == [
        ["2", "open the &lt;drawer&gt;", "10/20", half, "5/20", percent(5, 20), "0 / 5", "0.062", mark],
        ["5", "push the plate", "10/20", half, "6/20", percent(6, 20), "4 / 8", "0.39", ""],
        ["7", "put the wine bottle on the rack", "0/20", percent(0, 20), "8/20", percent(8, 20), "8 / 0", "0.0078", ""],
    ]
    said = "RLT is below the frozen VLA's 95 % interval in 1 of 3 tasks (task 2)"
    assert f"On the held-out states, {said.replace(chr(39), '&#39;')}." in page
    assert said in summary(data).splitlines()
    # of a run from before instructions were kept
    del data["tasks"]
    (tmp_path / "run" / "evaluations.json").write_text(json.dumps(data))
    head, *rows = table_of(write_report(tmp_path / "run").read_text())
    assert head[:2] == ["task", "frozen VLA"] and [row[:2] for row in rows] == [
        ["2", "10/20"], ["5", "10/20"], ["7", "0/20"],
    ]  # fmt: skip


def test_a_run_without_a_final_evaluation_has_curves_only(tmp_path):
    data = write_run(tmp_path / "run")
    for key in ("vla", "rlt", "comparison"):
        del data[key]
    (tmp_path / "run" / "evaluations.json").write_text(json.dumps(data))
    section = write_report(tmp_path / "run").read_text().split("<h2>Each task</h2>")[1].split("<h2>")[0]
    assert "<table>" not in section and section.count("data:image/png;base64,") == 1
    data["selection"] = []
    (tmp_path / "run" / "evaluations.json").write_text(json.dumps(data))
    assert "Each task" not in write_report(tmp_path / "run").read_text()


def test_each_task_has_a_small_curve(tmp_path, monkeypatch):
    """Of four states; 24,000 control steps at 20 Hz are 20 robot minutes."""
    figures, data = [], write_run(tmp_path / "run")
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))
    monkeypatch.setattr("os.replace", lambda *args: None)
    write_task_curves(tmp_path / "run", data)
    panels = figures[0].axes
    assert [axes.get_title().replace("\n", " ") for axes in panels] == [
        "2 (n=4): open the <drawer>", "5 (n=4): push the plate", "7 (n=4): put the wine bottle on the rack",
    ]  # fmt: skip
    vla, deployed = (0.75, 0.5, 0.25), ([0.75, 0.75], [0.5, 0.5], [0.25, 0.75])
    practicing = ([0, 0.25], [0.5, 1], [0.75, 0.75])
    for axes, rate, played, practiced in zip(panels, vla, deployed, practicing, strict=True):
        drawn = {line.get_label(): line for line in axes.lines}
        assert list(drawn["frozen VLA and its 95 % interval (Wilson)"].get_ydata()) == [rate, rate]
        line = drawn["RLT deployed (what predict() plays)"]
        assert list(line.get_xdata()) == [0, 9000, 18_000] and list(line.get_ydata()) == [rate, *played]
        line = drawn["practicing actor"]
        assert list(line.get_xdata()) == [9000, 18_000] and list(line.get_ydata()) == practiced
        (band,) = axes.patches
        bounds = band.get_y(), band.get_y() + band.get_height()
        assert bounds == pytest.approx(textbook_wilson(round(4 * rate), 4))
        assert axes.get_xlabel() == "control steps of training"
        axes.set_xlim(0, 24_000)
    figures[0].canvas.draw()
    for axes in panels:
        (top,) = axes.child_axes
        assert top.get_xlabel() == "robot minutes" and top.get_xlim() == pytest.approx((0, 20))
    (legend,) = figures[0].legends
    assert len(legend.get_texts()) == 3
    for point in data["selection"]:  # without a gate there is one actor
        point["candidate"] = None
    write_task_curves(tmp_path / "run", data)
    assert [line.get_label() for line in figures[1].axes[0].lines][1:] == ["RLT"]


def test_a_last_row_that_is_not_full_leaves_no_axis_without_numbers(tmp_path, monkeypatch):
    """Six tasks: four above, two below."""
    figures, solved = [], {task: range(task % 5) for task in range(6)}
    evaluation = outcome("RLT", "selection", solved, 4).to_dict()
    point = {"control_steps": 100, "evaluation": evaluation, "candidate": None}
    data = {"selection": [point], "vla_selection": evaluation, "config": {"algorithm": "rlt"}}
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))
    monkeypatch.setattr("os.replace", lambda *args: None)
    write_task_curves(tmp_path, data)
    (figure,) = figures
    assert [axes.get_title() for axes in figure.axes] == [f"{task} (n=4)" for task in range(6)]
    numbered = [axes.xaxis.get_tick_params()["labelbottom"] for axes in figure.axes]
    assert numbered == [False, False, True, True, True, True]
    assert [bool(axes.get_xlabel()) for axes in figure.axes] == numbered
    assert not any(axes.child_axes for axes in figure.axes)  # robot minutes are not known


def test_the_page_of_one_task_is_that_of_several_without_their_section(tmp_path):
    """The same outcomes, byte for byte."""
    several, one = tmp_path / "several" / "run", tmp_path / "one" / "run"
    write_run(several)
    data = write_run(one, one_task=True)
    page = write_report(several).read_text()
    begin, end = page.index("<h2>Each task</h2>"), page.index("<h2>Learning curve</h2>")
    assert write_report(one).read_text() == page[:begin] + page[end:]
    assert not (one / "learning_curve_tasks.png").exists() and (several / "learning_curve_tasks.png").exists()
    assert "tasks" not in summary(data)


def test_a_run_of_two_tasks(tmp_path, capsys):
    """
    Whoever plays says what its tasks are called.

    The toy's VLA solves the episodes with even numbers, those of the first task: 3 of 3 and 0 of 3. Six selection
    states are three of each task.
    """
    env = EnvConfig(id="ToyRLToken-v0", num_envs=2, task_ids=[3, 8])
    config = small(tmp_path, env=env)
    config.evaluation.n_states = config.evaluation.selection_states = 6
    run = train(config).run
    data = read_evaluations(run)
    assert data["tasks"] == {"3": "show the sign", "8": "show the sign"}
    of_policy = {task: part.successes for task, part in Evaluation.from_dict(data["rlt"]).per_task().items()}
    rows = table_of((run / "report.html").read_text())[1:]
    assert [row[:3] for row in rows] == [["3", "show the sign", "3/3"], ["8", "show the sign", "0/3"]]
    assert [row[4] for row in rows] == [f"{of_policy[3]}/3", f"{of_policy[8]}/3"]
    said = "is below the frozen VLA's 95 % interval in 0 of 2 tasks"
    assert f"RLT {said}" in capsys.readouterr().out.splitlines()
    evaluate_run(EvalConfig(run=str(run), progress=False))
    assert f"RLT (best) {said}" in capsys.readouterr().out.splitlines()
    report(ReportConfig(run=str(run)))
    names = ("report.html", "learning_curve.png", "learning_curve_tasks.png")
    assert capsys.readouterr().out.splitlines()[-1] == f"written: {', '.join(str(run / name) for name in names)}"
