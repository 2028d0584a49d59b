"""Success rates of the scripted expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlt_gym.libero.suites.tasks import SUITE_HORIZONS, get_tasks
from rlt_gym.workers.backend import SPLITS


@dataclass(frozen=True)
class ExpertResult:
    """
    What the expert did on one task.

    :param task_id: index of the task inside the suite
    :param successes: episodes that reached LIBERO's success predicate
    :param episodes: episodes played
    :param mean_steps: mean number of control steps of the successful ones (nan without any)
    """

    task_id: int
    successes: int
    episodes: int
    mean_steps: float


def run_episode(simulator: Any, expert: Any, rng: np.random.Generator, max_steps: int) -> tuple[bool, int]:
    """
    Let the expert act from the simulator's present state.

    :param simulator: :class:`~rlt_gym.libero.worker.simulator.LiberoSimulator`
    :param expert: :class:`~rlt_gym.libero.experts.ScriptedExpert` of that simulator's problem
    :param rng: the expert's randomness
    :param max_steps: control steps at most
    :return: (LIBERO's success predicate was reached, control steps used)
    """
    expert.reset(rng)
    for step in range(max_steps):
        if simulator.step_chunk(expert.act()[None], observe=False).success:
            return True, step + 1
    return False, max_steps


def evaluate(
    suite: str = "libero_goal",
    tasks: list[int] | None = None,
    episodes: int = 20,
    assets: str = "auto",
    split: str = "eval",
    noise: float = 0.0,
    speed: float = 0.9,
) -> None:
    """
    Print how often the scripted expert solves tasks.

    :param suite: LIBERO suite
    :param tasks: task ids; the whole suite if not given. Tasks that no skill is made for are named as such.
    :param episodes: episodes per task
    :param assets: ``auto``, ``embedded``, ``official`` or a folder
    :param split: initial states: ``train``, ``selection`` or ``eval`` (LIBERO's own)
    :param noise: disturbance of the expert's motion, as a share of the action range
    :param speed: greatest length of the position part of an action
    :raises ValueError: if an argument is not allowed
    """
    chosen = get_tasks(suite, tasks)
    if episodes < 1:
        raise ValueError(f"episodes is {episodes}, must be at least 1")
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}, must be one of {', '.join(SPLITS)}")
    from rlt_gym.libero.assets import resolve_assets
    from rlt_gym.libero.experts.scripted import NoSkillError
    from rlt_gym.libero.worker.libero_import import prepare_libero

    prepare_libero(resolve_assets(assets).path)
    print(f"{'task':<44} {'success':>8} {'mean steps':>11}", flush=True)
    for task in chosen:
        try:
            result = evaluate_task(suite, task.task_id, episodes, split, noise, speed)
        except NoSkillError:
            print(f"{task.task_id:>2} {task.instruction:<41} no skill", flush=True)
            continue
        score = f"{result.successes}/{result.episodes}"
        print(f"{task.task_id:>2} {task.instruction:<41} {score:>8} {result.mean_steps:>11.1f}", flush=True)


def evaluate_task(suite: str, task_id: int, episodes: int, split: str, noise: float, speed: float) -> ExpertResult:
    """
    Play one task's first initial states; call :func:`~rlt_gym.libero.worker.libero_import.prepare_libero` before.

    :param suite: LIBERO suite
    :param task_id: index of the task inside it
    :param episodes: episodes to play
    :param split: initial states
    :param noise: see :class:`~rlt_gym.libero.experts.ScriptedExpert`
    :param speed: see :class:`~rlt_gym.libero.experts.ScriptedExpert`
    :return: successes and control steps
    :raises NoSkillError: if a goal of the task is not supported
    """
    from rlt_gym.libero.experts.scripted import ScriptedExpert
    from rlt_gym.libero.worker.simulator import LiberoSimulator

    simulator = LiberoSimulator(suite, task_id)
    steps = []
    for index in range(episodes):
        simulator.reset(split, index, observe=False)
        expert = ScriptedExpert(simulator.problem, noise=noise, speed=speed)
        success, used = run_episode(simulator, expert, np.random.default_rng(index), SUITE_HORIZONS[suite])
        if success:
            steps.append(used)
    simulator.close()
    return ExpertResult(task_id, len(steps), episodes, float(np.mean(steps)) if steps else float("nan"))
