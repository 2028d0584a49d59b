"""Which tasks there is an expert for: those it solved on the embedded and on the official assets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rlt_gym.libero.experts.scripted import NoSkillError, ScriptedExpert
from rlt_gym.libero.suites.tasks import SUITE_HORIZONS

#: Per suite the tasks that the expert was not seen to solve on one of the assets or both; the rates and what goes wrong
#: are in docs/modules/experts.md.
UNSOLVED_TASKS: dict[str, tuple[int, ...]] = {
    "libero_10": (3, 8, 9),
    "libero_90": (6, 32, 33, 35, 40, 42, 73, 78, 81, 83, 86, 88, 89),
}

#: Per suite the tasks that there is an expert for: it solved them from at least one of LIBERO's initial states on the
#: embedded and on the official assets.
SOLVED_TASKS: dict[str, tuple[int, ...]] = {
    suite: tuple(i for i in range(90 if suite == "libero_90" else 10) if i not in UNSOLVED_TASKS.get(suite, ()))
    for suite in SUITE_HORIZONS
}


def check_expert(suite: str, task_ids: Iterable[int]) -> None:
    """
    Refuse tasks that there is no expert for, before anything is started.

    :param suite: LIBERO suite
    :param task_ids: indices of tasks in it
    :raises NoSkillError: if the expert has not been seen to solve one of them
    """
    solved = SOLVED_TASKS.get(suite, ())
    missing = [task_id for task_id in task_ids if task_id not in solved]
    if missing:
        raise NoSkillError(
            f"there is no expert for {suite} {', '.join(map(str, missing))}. It solves "
            + "; ".join(f"{name}: {', '.join(map(str, ids)) or 'none'}" for name, ids in SOLVED_TASKS.items())
            + ". Choose among these, or try others with `python -m rlt_gym.libero.experts`"
        )


def make_expert(simulator: Any, noise: float = 0.0, speed: float = 0.9) -> ScriptedExpert:
    """
    Make the expert for a simulator's task.

    :param simulator: :class:`~rlt_gym.libero.worker.simulator.LiberoSimulator`, reset at least once
    :param noise: see :class:`~rlt_gym.libero.experts.ScriptedExpert`
    :param speed: see :class:`~rlt_gym.libero.experts.ScriptedExpert`
    :return: the expert
    :raises NoSkillError: if there is no expert for the task
    """
    check_expert(simulator.task.suite, [simulator.task.task_id])
    return ScriptedExpert(simulator.problem, noise=noise, speed=speed)
