"""Tasks, what a chunk did in one environment, and what the infos of a chunked vector environment say about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlt_gym.core.episodes import Episode

Observation = dict[str, np.ndarray]


@dataclass(frozen=True)
class Task:
    """
    What the infos say about a task.

    :param task_id: Its number in the suite.
    :param instruction: What the robot is told to do.
    """

    task_id: int
    instruction: str


@dataclass
class Played:
    """
    What a chunk did in one environment.

    :param observation: The one after the last executed control step.
    :param step_rewards: float32 (k,), rewards of the executed control steps, 1 <= k <= C.
    :param success: Whether the task is solved, which ends chunk and episode.
    :param inner: Observations at those of the control steps s, 2s, ... < C that lie before step k, in order.
    :param reported: What the hooks reported about the chunk, see :meth:`rlt_gym.workers.hooks.WorkerHooks.end_chunk`.
    :param frames: If the environment is filmed, the frames after control steps 1 to k - 1.
    :param goal_reached: What the simulator says about success, if somebody else decides about it; ``None``: nobody.
    """

    observation: Observation
    step_rewards: np.ndarray
    success: bool
    inner: Sequence[Observation] = ()
    reported: dict[str, Any] = field(default_factory=dict)
    frames: Sequence[np.ndarray] = ()
    goal_reached: bool | None = None


def chunk_info(
    action_shape: tuple[int, int],
    episode: Episode,
    task_id: int,
    instruction: str,
    hooks: dict[str, Any],
    reported: dict[str, Any],
    step_rewards: np.ndarray | None = None,
    success: bool = False,
    actions: np.ndarray | None = None,
    restarted: bool = False,
    restarts: int = 0,
) -> dict[str, Any]:
    """
    Info entries of one env, the same keys at every reset and step.

    :param action_shape: (C, d), control steps of a chunk and numbers of an action.
    :param episode: The episode played.
    :param task_id: Of its task.
    :param instruction: Of its task.
    :param hooks: The environment's hooks by name, ``None`` for those that it does not have.
    :param reported: The hooks' report, see :class:`rlt_gym.workers.hooks.WorkerHooks`; empty if the worker was lost.
    :param step_rewards: Rewards (k,) of the executed control steps; ``None`` where none was executed.
    :param success: Whether the task is solved.
    :param actions: The chunk (C, d) that was asked for; ``None`` at a reset and where the env was lost.
    :param restarted: Whether the env was lost.
    :param restarts: How often so far.
    :return: ``step_rewards`` float32 (C,), zero after step k; ``chunk_steps`` k; ``is_success``; ``episode_steps``;
        ``noise_seed``; ``instruction``; ``task_id``; ``init_index``; ``worker_restarted``; ``worker_restarts``; and
        :func:`hook_info`.
    """
    padded = np.zeros(action_shape[0], dtype=np.float32)
    executed = 0 if step_rewards is None else len(step_rewards)
    if step_rewards is not None:
        padded[:executed] = step_rewards
    return {
        "step_rewards": padded,
        "chunk_steps": executed,
        "is_success": bool(success),
        "episode_steps": episode.steps,
        "noise_seed": episode.noise_seed,
        "instruction": instruction,
        "task_id": task_id,
        "init_index": episode.init_index,
        "worker_restarted": restarted,
        "worker_restarts": int(restarts),
        **hook_info(hooks, action_shape, reported, actions),
    }


def hook_info(
    hooks: dict[str, Any], action_shape: tuple[int, int], reported: dict[str, Any], actions: np.ndarray | None
) -> dict[str, Any]:
    """
    Info entries about hooks, the same keys at every reset and step.

    :param hooks: The environment's hooks by name.
    :param action_shape: (C, d), control steps of a chunk and numbers of an action.
    :param reported: Answer of :class:`rlt_gym.workers.hooks.WorkerHooks`; empty where a worker was lost.
    :param actions: The chunk that was asked for, float32 (C, d); ``None`` at a reset.
    :return: ``executed_actions`` float32 (C, d), from step k on what was asked for; ``intervention`` bool (C,);
        ``critical_chunk`` and ``critical_phase`` bool.
    """
    info: dict[str, Any] = {}
    if hooks.get("intervention") is not None:
        executed = np.zeros(action_shape, np.float32) if actions is None else np.array(actions)
        taken = np.zeros(action_shape[0], dtype=bool)
        done = reported.get("executed_actions", ())
        if len(done):
            executed[: len(done)], taken[: len(done)] = done, reported["intervention"]
        info["executed_actions"], info["intervention"] = executed, taken
    if hooks.get("critical_phase") is not None:
        info["critical_chunk"] = bool(reported.get("critical_chunk", False))
        info["critical_phase"] = bool(reported.get("critical_phase", False))
    return info


def inner_info(
    observation: Mapping[str, np.ndarray],
    shape: tuple[int, int],
    inner: Mapping[int, Sequence[Mapping[str, np.ndarray]]],
) -> dict[str, Any]:
    """
    Info entries about the observations inside the chunks, for all environments.

    :param observation: Any observation of one environment.
    :param shape: (N, n), environments and control steps inside a chunk that are observed.
    :param inner: By environment, the observations that there are.
    :return: ``inner_obs``, a dict of arrays (N, n, ...), zeros where there is none; ``inner_count`` (N,). Nothing if n
        is 0.
    """
    if shape[1] == 0:
        return {}
    arrays = {key: np.zeros((*shape, *value.shape), value.dtype) for key, value in observation.items()}
    count = np.zeros(shape[0], dtype=np.int64)
    for env, observations in inner.items():
        count[env] = len(observations)
        for index, seen in enumerate(observations):
            for key, value in seen.items():
                arrays[key][env, index] = value
    return {"inner_obs": arrays, "inner_count": count}
