"""Records whole episodes of a chunked vector environment: every control step's observation and executed action."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from rlt_gym.core.split_step import SplitStepWrapper


@dataclass(frozen=True)
class RecordedEpisode:
    """
    One episode; row t is the observation *before* action t.

    :param task_id: Its task.
    :param init_index: Its initial state.
    :param instruction: What the robot was told to do.
    :param success: Whether the task was solved.
    :param observations: By key, (T, ...).
    :param actions: Executed actions, whoever chose them, float32 (T, d).
    :param intervention: bool (T,), true at control steps that someone else than the policy chose.
    """

    task_id: int
    init_index: int
    instruction: str
    success: bool
    observations: dict[str, np.ndarray]
    actions: np.ndarray
    intervention: np.ndarray


class RecordEpisodes(SplitStepWrapper):
    """
    Keeps every control step of the running episodes; :meth:`take` hands over those that have ended.

    It stands right around the raw environment, which observes at each control step inside its chunks
    (``obs_stride=1``). Those observations go into the record and not into the infos, so that a VLA around this wrapper
    (:class:`~rlt_gym.rl_token.env.RLTokenVectorEnv`) runs once per chunk. An episode whose simulator was lost is
    not recorded; the environment plays it again.

    :param env: A :class:`~rlt_gym.core.chunk_vector_env.ChunkVectorEnv`, maybe in wrappers, with ``obs_stride=1``, or
        with chunks of one control step.
    :raises ValueError: If it does not observe at each control step, or does not reset by itself in the same step.
    """

    def __init__(self, env: VectorEnv) -> None:
        super().__init__(env)
        length = (env.single_action_space.shape or (0,))[0]
        stride = getattr(env.unwrapped, "obs_stride", None)
        if length > 1 and stride != 1:
            raise ValueError(
                f"Recording needs an observation at each control step, and the environment has chunks of {length} with "
                f"obs_stride={stride}: make it with obs_stride=1."
            )
        if env.metadata.get("autoreset_mode") != AutoresetMode.SAME_STEP:
            raise ValueError(f"Recording needs SAME_STEP, got {env.metadata.get('autoreset_mode')}.")
        self._chunks = np.zeros(0, dtype=np.float32)
        self._rows: list[list[tuple[dict[str, np.ndarray], np.ndarray, bool]]] = []
        self._before: list[dict[str, np.ndarray]] = []
        self._ended: list[RecordedEpisode] = []

    def take(self) -> list[RecordedEpisode]:
        """
        Hand over the episodes that have ended since the last call.

        :return: The episodes, in the order of their end.
        """
        ended, self._ended = self._ended, []
        return ended

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """
        Begin new episodes in all environments; what was being recorded is given up.

        :param seed: As the environment takes it.
        :param options: As the environment takes them, without ``reset_mask``.
        :return: Observations and infos.
        """
        obs, infos = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
        self._ended = []
        self._rows = [[] for _ in range(self.num_envs)]
        self._before = [_row(obs, index) for index in range(self.num_envs)]
        return obs, infos

    def step_async(self, actions: np.ndarray) -> None:
        """
        Begin a step.

        :param actions: Chunks (N, C, d).
        """
        space = self.env.single_action_space
        self._chunks = np.clip(np.asarray(actions, np.float32), space.low, space.high)  # type: ignore[attr-defined]
        super().step_async(actions)

    def step_wait(self) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """
        Wait for the end of the step, and record it.

        :return: Observations, rewards, terminations, truncations, infos without ``inner_obs``.
        """
        obs, rewards, terminations, truncations, infos = super().step_wait()
        inner = infos.get("inner_obs")
        infos = {key: value for key, value in infos.items() if key not in ("inner_obs", "inner_count")}
        done = terminations | truncations
        for index in range(self.num_envs):
            info = _row(infos["final_info"] if done[index] else infos, index)
            self._record(index, info, inner)
            if done[index]:
                self._finish(index, info)
            if done[index] or int(info["chunk_steps"]):
                self._before[index] = _row(obs, index)
        return obs, rewards, terminations, truncations, infos

    def _record(self, index: int, info: Mapping[str, Any], inner: Mapping[str, np.ndarray] | None) -> None:
        """Append the executed control steps of a chunk."""
        steps = int(info["chunk_steps"])
        actions = np.asarray(info.get("executed_actions", self._chunks[index]), dtype=np.float32)
        taken = info.get("intervention", np.zeros(steps, dtype=bool))
        for step in range(steps):
            before = self._before[index]
            if step:
                assert inner is not None
                before = {key: value[index, step - 1].copy() for key, value in inner.items()}
            self._rows[index].append((before, actions[step].copy(), bool(taken[step])))

    def _finish(self, index: int, info: Mapping[str, Any]) -> None:
        rows, self._rows[index] = self._rows[index], []
        if info["worker_restarted"]:
            return
        observations, actions, taken = zip(*rows, strict=True)
        self._ended.append(
            RecordedEpisode(
                int(info["task_id"]),
                int(info["init_index"]),
                str(info["instruction"]),
                bool(info["is_success"]),
                {key: np.stack([row[key] for row in observations]) for key in observations[0]},
                np.stack(actions),
                np.array(taken, dtype=bool),
            )
        )


def _row(arrays: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Take one environment's entries out of batched ones, as copies; masks of infos (``_name``) stay behind."""
    return dict(_entries(arrays, index))


def _entries(arrays: Mapping[str, Any], index: int) -> Iterator[tuple[str, Any]]:
    for key, value in arrays.items():
        if not key.startswith("_") and not isinstance(value, dict):
            yield key, np.array(value[index]) if isinstance(value[index], np.ndarray) else value[index]
