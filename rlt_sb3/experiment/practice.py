"""What a run's evaluations say about its practice: lowest point, robot minutes, control steps to a success rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlt_sb3.common.robot_time import robot_minutes


def practicing(point: dict[str, Any]) -> dict[str, Any]:
    """
    Find the practicing actor's evaluation of a selection point.

    :param point: of "selection" in evaluations.json
    :return: its evaluation. A model without a gate has one actor, whose evaluation is the point's
    """
    return point.get("candidate") or point["evaluation"]


def gated(data: dict[str, Any]) -> bool:
    """
    Tell whether a run has a gate: the practicing actor and what ``predict`` plays have evaluations of their own.

    :param data: contents of evaluations.json
    """
    return any(point.get("candidate") for point in data.get("selection") or [])


def lowest(data: dict[str, Any]) -> dict[str, Any] | None:
    """
    Find the practicing actor's worst selection evaluation.

    :param data: contents of evaluations.json
    :return: the first of the points with the fewest successes; None without a selection evaluation
    """
    return min(data.get("selection") or [], key=lambda point: practicing(point)["successes"], default=None)


def lowest_point(data: dict[str, Any]) -> str | None:
    """
    Describe :func:`lowest`.

    :param data: contents of evaluations.json
    :return: successes, states and chunks as words; None without a selection evaluation
    """
    point = lowest(data)
    if point is None:
        return None
    worst = practicing(point)
    return f"{worst['successes']}/{worst['n']} at {point['chunks']:,} chunks"


def training_minutes(data: dict[str, Any]) -> str | None:
    """
    Describe the robot minutes of the training of a run.

    :param data: contents of evaluations.json
    :return: "46.2"; None where they are not known
    """
    minutes = robot_minutes(data.get("training", {}).get("control_steps", 0), data.get("control_frequency"))
    return None if minutes is None or "training" not in data else f"{minutes:.1f}"


def deployed(point: dict[str, Any]) -> dict[str, Any]:
    """
    Find the evaluation of what ``predict`` plays at a selection point.

    :param point: of "selection" in evaluations.json
    :return: its evaluation
    """
    return point["evaluation"]


def steps_to(
    data: dict[str, Any], rate: float, evaluation: Callable[[dict[str, Any]], dict[str, Any]] = deployed
) -> int | None:
    """
    Find when a success rate has been reached on the selection states.

    :param data: contents of evaluations.json
    :param rate: success rate
    :param evaluation: whose rate: :func:`deployed` or :func:`practicing`
    :return: control steps of training at the first selection evaluation with at least this rate; None: there is none
    """
    reached = (
        point["control_steps"]
        for point in data.get("selection", [])
        if evaluation(point)["successes"] >= rate * evaluation(point)["n"] - 1e-9
    )
    return next(reached, None)


def milestones(data: dict[str, Any], evaluation: Callable[[dict[str, Any]], dict[str, Any]] = deployed) -> list[str]:
    """
    Describe when 30 points more than the frozen VLA, and when 90 %, have been reached on the selection states.

    :param data: contents of evaluations.json
    :param evaluation: by whom: :func:`deployed`, which is ``predict()``, or :func:`practicing`
    :return: one sentence for each; none before the first selection evaluation. A rate above 100 % has none
    """
    vla = data.get("vla_selection")
    if not vla or not data.get("selection"):
        return []
    base = vla["successes"] / vla["n"]
    goals = {f"30 points more than the frozen VLA ({base + 0.3:.0%})": base + 0.3, "90 %": 0.9}
    return [
        _reached(data, name, steps_to(data, rate, evaluation)) for name, rate in goals.items() if rate <= 1.0 + 1e-9
    ]


def _reached(data: dict[str, Any], name: str, steps: int | None) -> str:
    if steps is None:
        return f"{name}: not reached"
    minutes = robot_minutes(steps, data.get("control_frequency"))
    return f"{name}: after {steps:,} control steps" + ("" if minutes is None else f", {minutes:.1f} robot minutes")
