"""The lists of ``rlt list`` that come from ``rlt_gym``: shipped VLAs, suites, tasks."""

from __future__ import annotations

import json

from rlt_gym.libero.suites.tasks import SUITE_HORIZONS, get_tasks


def vlas() -> dict[str, str]:
    """
    :return: Shipped VLA -> the tasks that it has learned.
    """
    from rlt_gym.vla.base import SHIPPED, WEIGHTS_DIR

    lines = {}
    for name, file in SHIPPED.items():
        rates = json.loads((WEIGHTS_DIR / file).with_suffix(".json").read_text())["success_rates"]
        tasks: dict[str, list[str]] = {}
        for suite, _, task_id in (key.partition("/") for key in rates if "/" in key):
            tasks.setdefault(suite, []).append(task_id)
        lines[name] = "; ".join(f"{suite} {', '.join(numbers)}" for suite, numbers in tasks.items())
    return lines


def suites() -> dict[str, str]:
    """
    :return: Suite -> number of its tasks and horizon.
    """
    return {
        suite: f"tasks 0 to {len(get_tasks(suite)) - 1}, {horizon} control steps"
        for suite, horizon in SUITE_HORIZONS.items()
    }


def tasks(suite: str) -> dict[str, str]:
    """
    :param suite: Name of the suite.
    :return: Task -> instruction.
    :raises ValueError: Unknown suite.
    """
    return {str(task.task_id): task.instruction for task in get_tasks(suite)}
