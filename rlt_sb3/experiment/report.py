"""Makes the learning curve and the self-contained HTML page of a run, from the run's files alone."""

from __future__ import annotations

import base64
import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlt_sb3.common.files import replacing
from rlt_sb3.common.robot_time import robot_minutes
from rlt_sb3.evaluation.compare import compare
from rlt_sb3.evaluation.results import Evaluation
from rlt_sb3.experiment.algorithms import algorithm_names, get_algorithm
from rlt_sb3.experiment.config import ReportConfig
from rlt_sb3.experiment.practice import gated, lowest_point, milestones, practicing, training_minutes

#: file of the learning curve, in the folder of a run
CURVE = "learning_curve.png"


def report(config: ReportConfig) -> Path:
    """
    Write the page of a run and say where it is: ``rlt report RUN``.

    :param config: settings of the command
    :return: the page
    """
    page = write_report(Path(config.run), [Path(name) for name in config.beside or []])
    print(f"written: {page}, {page.with_name(CURVE)}")
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
    """Write learning_curve.png and report.html.

    :param run: folder of a run, finished or not
    :param beside: other runs whose policies get a row; they must have played the same held-out states
    :return: the page
    :raises ValueError: if a folder is no run, or one beside played other states
    """
    import jinja2

    data = read_evaluations(run)
    write_learning_curve(run, data)
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
        points=_points(data),
        gated=gated(data),
        lowest=lowest_point(data),
        robot_minutes=training_minutes(data),
        milestones=milestones(data),
        practicing_milestones=milestones(data, practicing),
        curve=_inline(run / CURVE),
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
    # Without pyplot: no global state, no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    metrics = read_metrics(run)
    q_names = [
        name for name in ("train/q_mean", "train/actor_q", "train/target_mean", "train/q_gap") if name in metrics
    ]
    steps = metrics.get("time/control_steps", np.array([]))
    figure = Figure(figsize=(8, 7 if q_names else 5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2 if q_names else 1, 1, sharex=True, squeeze=False)[:, 0]
    axes = panels[0]

    points = [(p["control_steps"], Evaluation.from_dict(p["evaluation"])) for p in data["selection"]]
    if "vla_selection" in data:
        baseline = Evaluation.from_dict(data["vla_selection"])
        axes.axhline(
            baseline.rate, color="tab:gray", linestyle="--", label=f"frozen VLA, selection states (n={baseline.n})"
        )
        axes.axhspan(*baseline.interval, color="tab:gray", alpha=0.15, linewidth=0)
        points = [(0, baseline), *points]
    practiced = [
        (p["control_steps"], Evaluation.from_dict(practicing(p))) for p in data["selection"] if p.get("candidate")
    ]
    label = get_algorithm(data["config"]["algorithm"]).label
    if points:
        x = [step for step, _ in points]
        rates = np.array([e.rate for _, e in points])
        bounds = np.array([e.interval for _, e in points])
        errors = np.abs(bounds.T - rates)
        played = f"{label} deployed (what predict() plays)" if practiced else label
        axes.errorbar(
            x, rates, yerr=errors, marker="o", capsize=3, color="tab:blue", label=f"{played}, selection states"
        )
    if practiced:
        axes.plot(
            [step for step, _ in practiced],
            [evaluation.rate for _, evaluation in practiced],
            marker="x",
            linestyle=":",
            color="tab:red",
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
    frequency = data.get("control_frequency")
    if frequency is not None:
        a_minute = 60.0 * frequency
        top = axes.secondary_xaxis("top", functions=(lambda x: x / a_minute, lambda x: x * a_minute))
        top.set_xlabel("robot minutes", fontsize=9)
    path = run / CURVE
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
    return path
