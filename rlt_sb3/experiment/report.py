"""Makes the learning curve and the self-contained HTML page of a run, from the run's files alone."""

from __future__ import annotations

import base64
import csv
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlt_sb3.common.files import replacing
from rlt_sb3.common.robot_time import robot_minutes
from rlt_sb3.evaluation.compare import compare, describe_tasks_below, tasks_below
from rlt_sb3.evaluation.results import Evaluation
from rlt_sb3.experiment.algorithms import algorithm_names, get_algorithm
from rlt_sb3.experiment.config import ReportConfig
from rlt_sb3.experiment.practice import gated, lowest_point, milestones, practicing, training_minutes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: file of the learning curve, in the folder of a run
CURVE = "learning_curve.png"
#: the same for each task, of a run with several
TASK_CURVES = "learning_curve_tasks.png"
#: how the curve of what ``predict`` plays looks, and that of the practicing actor
PLAYED: dict[str, Any] = {"color": "tab:blue", "marker": "o"}
PRACTICED: dict[str, Any] = {"color": "tab:red", "marker": "x", "linestyle": ":"}


def report(config: ReportConfig) -> Path:
    """
    Write the page of a run and say where it is: ``rlt report RUN``.

    :param config: settings of the command
    :return: the page
    """
    page = write_report(Path(config.run), [Path(name) for name in config.beside or []])
    curves = [path for path in (page.with_name(CURVE), page.with_name(TASK_CURVES)) if path.is_file()]
    print(f"written: {', '.join(map(str, [page, *curves]))}")
    return page


def read_evaluations(run: Path) -> dict[str, Any]:
    """
    Read a run's evaluations.json.

    :param run: folder of the run
    :return: contents of the file
    :raises ValueError: if the folder is no run
    """
    path = run / "evaluations.json"
    if not path.is_file():
        raise ValueError(f"There is no {path}. A run is the folder that `rlt train` wrote, for example runs/demo.")
    return json.loads(path.read_text())


def read_metrics(run: Path) -> dict[str, np.ndarray]:
    """
    Read a run's metrics.csv.

    :param run: folder of the run
    :return: its columns (NaN where a row has no entry); empty if there is none
    """
    path = run / "metrics.csv"
    if not path.is_file():
        return {}
    with path.open() as file:
        rows = list(csv.DictReader(file))
    names = rows[0].keys() if rows else []
    return {name: np.array([_number(row[name]) for row in rows]) for name in names}


def _number(text: str | None) -> float:
    try:
        return float(text) if text else float("nan")
    except ValueError:
        return float("nan")


def write_report(run: Path, beside: Sequence[Path] = ()) -> Path:
    """Write report.html and its learning curves.

    :param run: folder of a run, finished or not
    :param beside: other runs whose policies get a row; they must have played the same held-out states
    :return: the page
    :raises ValueError: if a folder is no run, or one beside played other states
    """
    import jinja2

    data = read_evaluations(run)
    write_learning_curve(run, data)
    task_curves = write_task_curves(run, data)
    rows = [_row(data[key]) for key in ("vla", *algorithm_names()) if key in data]
    for other in beside:
        rows += _rows_beside(data, other)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("rlt_sb3.experiment"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    config_path = run / "config.yaml"
    page = environment.get_template("report.html.j2").render(
        name=run.name,
        data=data,
        label=get_algorithm(data["config"]["algorithm"]).label,
        rows=rows,
        **_tasks(data),
        points=_points(data),
        gated=gated(data),
        lowest=lowest_point(data),
        robot_minutes=training_minutes(data),
        milestones=milestones(data),
        practicing_milestones=milestones(data, practicing),
        curve=_inline(run / CURVE),
        task_curves=None if task_curves is None else _inline(task_curves),
        videos={name: _inline(run / f"{name}.mp4") for name in ("before", "after")},
        config=config_path.read_text() if config_path.is_file() else "",
    )
    path = run / "report.html"
    with replacing(path) as temporary:
        temporary.write_text(page)
    return path


def _row(data: dict[str, Any]) -> dict[str, str]:
    """Make a line of the results table."""
    result = Evaluation.from_dict(data)
    low, high = result.interval
    return {
        "policy": result.policy,
        "successes": f"{result.successes}/{result.n}",
        "rate": f"{result.rate:.0%}",
        "interval": f"{low:.0%} to {high:.0%}",
        "steps": "–" if np.isnan(result.steps_to_success) else f"{result.steps_to_success:.0f}",
        "control_steps": f"{result.control_steps}",
    }


def _tasks(data: dict[str, Any]) -> dict[str, Any]:
    """Make the table of tasks and the sentence below it; nothing for one task, or without a final evaluation."""
    if "comparison" not in data:
        return {}
    vla, policy = (Evaluation.from_dict(data[key]) for key in ("vla", data["config"]["algorithm"]))
    of_vla, of_policy, below = vla.per_task(), policy.per_task(), tasks_below(vla, policy)
    if len(of_vla) < 2:
        return {}
    rows = []
    for task in of_vla:
        paired = compare(of_vla[task], of_policy[task])
        rows.append(
            {
                "number": task,
                "instruction": _instruction(data, task),
                "vla": _row(of_vla[task].to_dict()),
                "policy": _row(of_policy[task].to_dict()),
                "fixed": paired.fixed,
                "broken": paired.broken,
                "p_value": f"{paired.p_value:.2g}",
                "below": task in below,
            }
        )
    return {"tasks": rows, "tasks_below": describe_tasks_below(vla, policy)}


def _instruction(data: dict[str, Any], task: int) -> str | None:
    """Return what the robot is told to do; None where the environment did not say so, and in older runs."""
    return data.get("tasks", {}).get(str(task))


def _points(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Make the lines of the table of selection evaluations; ``practicing`` is None without a gate."""
    return [
        {key: point[key] for key in ("chunks", "control_steps", "minutes")}
        | {
            "robot_minutes": robot_minutes(point["control_steps"], data.get("control_frequency")),
            "played": _solved(point["evaluation"]),
            "by_vla": plays_vla(point, data),
            "practicing": _solved(point["candidate"]) if point.get("candidate") else None,
        }
        for point in data["selection"]
    ]


def plays_vla(point: dict[str, Any], data: dict[str, Any]) -> bool:
    """
    Tell whether a selection evaluation is the frozen VLA's: no actor is deployed, or one that plays exactly like it.

    :param point: a selection evaluation
    :param data: contents of evaluations.json
    :return: whether the gate is on and every episode went as the frozen VLA's did
    """
    gated = point.get("candidate") is not None
    return gated and point["evaluation"]["rows"] == data.get("vla_selection", {}).get("rows")


def _solved(evaluation: dict[str, Any]) -> str:
    return f"{evaluation['successes']}/{evaluation['n']}"


def _rows_beside(data: dict[str, Any], other: Path) -> list[dict[str, str]]:
    """Make the rows of another run's policies, named after the run."""
    theirs = read_evaluations(other)
    rows = []
    for key in algorithm_names():
        if key in theirs:
            if "vla" in data:
                compare(Evaluation.from_dict(data["vla"]), Evaluation.from_dict(theirs[key]))
            row = _row(theirs[key])
            rows.append(row | {"policy": f"{row['policy']} (run {other.name})"})
    if not rows:
        raise ValueError(f"{other} has no final evaluation: finish the run with rlt train --resume {other}.")
    return rows


def _inline(path: Path) -> str | None:
    return base64.b64encode(path.read_bytes()).decode() if path.is_file() else None


def write_learning_curve(run: Path, data: dict[str, Any]) -> Path:
    """Success rate over control steps of training, with the frozen VLA beside it, and what the critic believes below.

    :param run: folder of the run
    :param data: contents of evaluations.json
    :return: the picture
    """
    metrics = read_metrics(run)
    q_names = [
        name for name in ("train/q_mean", "train/actor_q", "train/target_mean", "train/q_gap") if name in metrics
    ]
    steps = metrics.get("time/control_steps", np.array([]))
    figure = _figure(8, 7 if q_names else 5)
    panels = figure.subplots(2 if q_names else 1, 1, sharex=True, squeeze=False)[:, 0]
    axes = panels[0]

    points, practiced = _curves(data)
    if "vla_selection" in data:
        baseline = Evaluation.from_dict(data["vla_selection"])
        _draw_vla(axes, baseline, f"frozen VLA, selection states (n={baseline.n})")
    if points:
        x = [step for step, _ in points]
        rates = np.array([e.rate for _, e in points])
        bounds = np.array([e.interval for _, e in points])
        errors = np.abs(bounds.T - rates)
        axes.errorbar(x, rates, yerr=errors, capsize=3, **PLAYED, label=f"{_played(data)}, selection states")
    if practiced:
        axes.plot(
            [step for step, _ in practiced],
            [evaluation.rate for _, evaluation in practiced],
            **PRACTICED,
            label=f"practicing actor, selection states (lowest: {lowest_point(data)})",
        )
    by_vla = [p["control_steps"] for p in data["selection"] if plays_vla(p, data)]
    if by_vla:
        axes.plot(
            by_vla,
            [baseline.rate] * len(by_vla),
            marker="o",
            linestyle="none",
            color="tab:blue",
            markerfacecolor="white",
            zorder=3,
            label="the VLA's own chunks",
        )
    practice = {
        "rollout/success_rate": ("tab:orange", "training episodes (last 100)"),
        "rollout/trial_success_rate": ("tab:purple", "noise-free trials"),
    }
    for key, (color, name) in practice.items():
        if key in metrics:
            known = ~np.isnan(metrics[key])
            axes.plot(steps[known], metrics[key][known], color=color, alpha=0.8, label=name)
    last = max([step for step, _ in points], default=1) or 1
    for key in ("vla", *algorithm_names()):
        if key in data:
            color = "black" if key == "vla" else get_algorithm(key).color
            result = Evaluation.from_dict(data[key])
            low, high = result.interval
            axes.errorbar(
                [0 if key == "vla" else last],
                [result.rate],
                yerr=[[result.rate - low], [high - result.rate]],
                marker="*",
                markersize=12,
                capsize=5,
                color=color,
                linestyle="none",
                label=f"{result.policy}, held-out states ({result.successes}/{result.n})",
            )
    axes.set_ylim(-0.03, 1.03)
    axes.set_ylabel("success rate")
    figure.suptitle(f"{run.name}: bars and band are Wilson's 95 % intervals", fontsize=10)
    # below the panels, where its many lines hide none of the curves
    figure.legend(*axes.get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=2)
    axes.grid(alpha=0.3)
    if q_names:
        for name in q_names:
            known = ~np.isnan(metrics[name]) & ~np.isnan(steps)
            panels[1].plot(steps[known], metrics[name][known], label=name)
        panels[1].set_ylabel("value")
        panels[1].legend(fontsize=8)
        panels[1].grid(alpha=0.3)
    wall = f" ({data['training']['minutes']:.1f} minutes in all)" if "training" in data else ""
    panels[-1].set_xlabel(f"control steps of training{wall}")
    _draw_robot_minutes(axes, data)
    return _save(figure, run / CURVE)


def write_task_curves(run: Path, data: dict[str, Any]) -> Path | None:
    """Success rate in each task over control steps of training, with the frozen VLA beside it, in a grid.

    :param run: folder of the run
    :param data: contents of evaluations.json
    :return: the picture; None if the run has one task only, or no selection evaluation yet
    """
    baseline = Evaluation.from_dict(data["vla_selection"]).per_task() if "vla_selection" in data else {}
    if len(baseline) < 2 or not data["selection"]:
        return None
    n_columns = min(len(baseline), 4)
    n_rows = -(-len(baseline) // n_columns)
    figure = _figure(8, 2 * n_rows + 1)
    panels = figure.subplots(n_rows, n_columns, sharex=True, sharey=True, squeeze=False).ravel()
    points, practiced = ([(step, evaluation.per_task()) for step, evaluation in curve] for curve in _curves(data))
    for axes, (task, vla) in zip(panels, baseline.items(), strict=False):
        _draw_vla(axes, vla, "frozen VLA and its 95 % interval (Wilson)")
        for curve, look, label in ((points, PLAYED, _played(data)), (practiced, PRACTICED, "practicing actor")):
            if curve:
                steps, rates = [step for step, _ in curve], [parts[task].rate for _, parts in curve]
                axes.plot(steps, rates, **look, markersize=4, linewidth=1, label=label)
        instruction = _instruction(data, task)
        title = f"{task} (n={vla.n})" + (f": {instruction}" if instruction else "")
        axes.set_title(textwrap.fill(title, 30, max_lines=3, placeholder=" ..."), fontsize=8)
        axes.set_ylim(-0.05, 1.05)
        axes.locator_params(axis="x", nbins=3)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
    for axes in panels[:n_columns]:
        _draw_robot_minutes(axes, data, fontsize=7, ticks=7)
    for axes in panels[len(baseline) - n_columns : len(baseline)]:  # nothing is below them
        axes.tick_params(labelbottom=True)
        axes.set_xlabel("control steps of training", fontsize=7)
    for axes in panels[len(baseline) :]:
        axes.remove()
    figure.suptitle(f"{run.name}: success in each task on its n selection states", fontsize=10)
    figure.supylabel("success rate", fontsize=9)
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=3)
    return _save(figure, run / TASK_CURVES)


def _curves(data: dict[str, Any]) -> tuple[list[tuple[int, Evaluation]], list[tuple[int, Evaluation]]]:
    """Return control steps and outcomes of what ``predict`` plays, first the VLA's, and of the practicing actor."""
    played = [(point["control_steps"], Evaluation.from_dict(point["evaluation"])) for point in data["selection"]]
    if "vla_selection" in data:
        played = [(0, Evaluation.from_dict(data["vla_selection"])), *played]
    practiced = [
        (point["control_steps"], Evaluation.from_dict(practicing(point)))
        for point in data["selection"]
        if point.get("candidate")
    ]
    return played, practiced


def _played(data: dict[str, Any]) -> str:
    label = get_algorithm(data["config"]["algorithm"]).label
    return f"{label} deployed (what predict() plays)" if gated(data) else label


def _figure(width: float, height: float) -> Figure:
    # Without pyplot: no global state, no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, path: Path) -> Path:
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
    return path


def _draw_vla(axes: Axes, vla: Evaluation, label: str) -> None:
    axes.axhline(vla.rate, color="tab:gray", linestyle="--", label=label)
    axes.axhspan(*vla.interval, color="tab:gray", alpha=0.15, linewidth=0)


def _draw_robot_minutes(axes: Axes, data: dict[str, Any], fontsize: int = 9, ticks: int | str = "medium") -> None:
    """Add an axis above, where the control frequency is known."""
    frequency = data.get("control_frequency")
    if frequency is not None:
        a_minute = 60.0 * frequency
        top = axes.secondary_xaxis("top", functions=(lambda x: x / a_minute, lambda x: x * a_minute))
        top.set_xlabel("robot minutes", fontsize=fontsize)
        top.tick_params(labelsize=ticks)
