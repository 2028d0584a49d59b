"""Chunked vector environments whose simulators live in this process."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from rlt_gym.core.chunk_vector_env import ChunkVectorEnv, Observation, Played
from rlt_gym.workers.hooks import WorkerHooks


class InProcessVectorEnv(ChunkVectorEnv):
    """
    A vector environment that runs in this process; a subclass says what one control step does.

    It implements :meth:`_begin`, :meth:`_control_step`, :meth:`_observe` and, for a ``render_mode``, :meth:`_frame`.

    :meth:`_begin`, :meth:`_control_step`, :meth:`_observe` and, for a ``render_mode``, :meth:`_frame`.

    Hooks are functions. Their "simulator" has ``env``, this environment, and ``index``, the number of the
    sub-environment: ``intervention(simulator, proposed, step)`` and ``critical_phase(simulator)``.

    The arguments are those of :class:`~rlt_gym.core.chunk_vector_env.ChunkVectorEnv`.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        #: Control steps of the present episodes, also inside a chunk.
        self._steps = np.zeros(self.num_envs, dtype=np.int64)
        self._worker_hooks = [WorkerHooks(self.robot.action_size, **self._hooks) for _ in range(self.num_envs)]

    def _begin(self, env: int) -> None:
        """
        Start the episode ``self.episodes[env]``.

        :param env: Index of the environment.
        """
        raise NotImplementedError

    def _control_step(self, env: int, action: np.ndarray) -> tuple[float, bool]:
        """
        Play one control step in one environment.

        :param env: Index of the environment.
        :param action: (d,) in [-1, 1].
        :return: The reward, and whether the task is solved.
        """
        raise NotImplementedError

    def _observe(self, env: int) -> Observation:
        """
        Observe one environment.

        :param env: Index of the environment.
        :return: Its observation, new arrays.
        """
        raise NotImplementedError

    def _frame(self, env: int) -> np.ndarray:
        """
        Draw one environment.

        :param env: Index of the environment.
        :return: An upright uint8 (H, W, 3) frame.
        """
        raise NotImplementedError(f"{type(self).__name__} draws no frames")

    def _start_episodes(self, envs: Sequence[int]) -> dict[int, tuple[Observation, dict[str, Any]]]:
        started = {}
        for env in envs:
            self._steps[env] = 0
            self._begin(env)
            reported = self._worker_hooks[env].begin_episode(
                SimpleNamespace(env=self, index=env),
                self._episode(env).init_index,
                takeover=self.sequence.split == "train",
            )
            started[env] = self._observe(env), reported
        return started

    def _play(self, chunks: dict[int, np.ndarray]) -> dict[int, Played]:
        return {env: self._play_one(env, chunk) for env, chunk in chunks.items()}

    def _play_one(self, env: int, chunk: np.ndarray) -> Played:
        choose = self._worker_hooks[env].begin_chunk()
        rewards: list[float] = []
        inner: list[Observation] = []
        frames: list[np.ndarray] = []
        success = False
        for action in chunk:
            if rewards and env in self._filmed:
                frames.append(self._frame(env))
            reward, success = self._control_step(env, action if choose is None else choose(action))
            rewards.append(reward)
            self._steps[env] += 1
            if success:
                break
            if len(rewards) in self._inner_steps and len(rewards) < len(chunk):
                inner.append(self._observe(env))
        reported = self._worker_hooks[env].end_chunk()
        return Played(self._observe(env), np.array(rewards, dtype=np.float32), bool(success), inner, reported, frames)

    def _draw(self, envs: Sequence[int]) -> dict[int, np.ndarray]:
        return {env: self._frame(env) for env in envs}
