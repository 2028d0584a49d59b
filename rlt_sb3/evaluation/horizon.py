"""The horizon of training episodes: as long as the frozen VLA's successes take, with a margin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np

from rlt_sb3.evaluation.results import Evaluation

#: the horizon is this many times the control steps within which 90 % of the VLA's successes end
MARGIN, QUANTILE = 1.25, 0.9
#: with fewer successes of a task, its horizon does not become shorter
ENOUGH = 5


def fitting_horizon(vla: Evaluation, present: int, longest: int, chunk_length: int) -> int:
    """
    Choose the horizon of a task's training episodes by the frozen VLA's successes.

    An episode that has gone wrong rarely recovers: the robot stands still until the horizon, and practice waits. If
    the VLA's successes take longer than the horizon, practice never sees them.

    :param vla: what the frozen VLA did on states of the task that are not used for training, with the horizon
        ``longest``
    :param present: horizon of a task with too few successes, in control steps
    :param longest: largest horizon, in control steps
    :param chunk_length: C; the horizon is a multiple of it, or ``longest``
    :return: control steps
    """
    steps = [row.steps for row in vla.rows if row.success]
    needed = MARGIN * float(np.quantile(steps, QUANTILE)) if steps else 0.0
    chunks = math.ceil((needed if len(steps) >= ENOUGH else max(needed, present)) / chunk_length)
    return min(chunks * chunk_length, longest)


def fitting_horizons(env: gym.vector.VectorEnv, vla: Evaluation) -> int | list[int]:
    """
    Choose the horizon of each task that an environment plays.

    :param env: Gymnasium vector environment of this package, e.g. of ``make_vec("RLToken-LIBERO-v0")``
    :param vla: what the frozen VLA did in it on selection states
    :return: control steps, see :func:`fitting_horizon`, as ``train_episode_steps`` takes them: a number for one task, a
        list for several
    :raises ValueError: if the states are not selection states, or if the environment has no horizon of its own
    """
    if vla.split != "selection":
        raise ValueError(
            f"fit_horizon needs what the VLA did on states of the split 'selection', got those of {vla.split!r}: "
            "held-out states must not decide how a model is trained."
        )
    raw: Any = env.unwrapped
    longest = getattr(raw, "max_episode_steps", None)
    if longest is None or not hasattr(raw, "train_episode_steps"):
        raise ValueError(
            f"{type(raw).__name__} has no max_episode_steps and train_episode_steps: give fit_horizon a vector "
            "environment of rlt_gym."
        )
    present = longest if raw.train_episode_steps is None else raw.train_episode_steps
    found = []
    for index, task in enumerate(raw.tasks):
        rows = [row for row in vla.rows if row.task_id == task.task_id]
        of_task = present[index] if isinstance(present, Sequence) else present
        found.append(fitting_horizon(replace(vla, rows=rows), of_task, longest, raw.chunk_length))
    return found if len(found) > 1 else found[0]


def fit_horizon(env: gym.vector.VectorEnv, vla: Evaluation) -> int | list[int]:
    """
    Set the horizon of training episodes as ``rlt train`` does, and begin new training episodes.

    :param env: Gymnasium vector environment of this package, e.g. of ``make_vec("RLToken-LIBERO-v0")``
    :param vla: what the frozen VLA did in it on selection states, ``evaluate("vla", env, 48, split="selection")``
    :return: the horizon in control steps, see :func:`fitting_horizons`
    :raises ValueError: if the states are not selection states, or if the environment has no horizon of its own
    """
    steps = fitting_horizons(env, vla)
    env.reset(options={"init_states": "train", "train_episode_steps": steps})
    return steps
