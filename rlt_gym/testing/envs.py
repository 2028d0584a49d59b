"""Vector environments without a simulator that have the interfaces of the real ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from rlt_gym.core.chunk_vector_env import Task
from rlt_gym.core.episodes import SPLIT_SIZES, Episode, EpisodeSequence
from rlt_gym.core.in_process import InProcessVectorEnv
from rlt_gym.libero.robot import PANDA

#: LIBERO's layout, since the fakes stand in for LIBERO.
FAKE_ROBOT = replace(PANDA, name="fake")

INIT_STATES = tuple(SPLIT_SIZES)


class _CountedSequence(EpisodeSequence):
    """Initial states are counted in every split, none is drawn: episode number p has initial state p, or p // g."""

    def episode(self, number: int) -> Episode:
        place = self.place(number)
        task = self.task_at(place) if self.split == "train" else place % self.num_tasks
        return Episode(number, task, place)

    @property
    def init_state_counts(self) -> dict[str, int]:
        """Without end."""
        return {}


class _FakeVectorEnv(InProcessVectorEnv):
    """
    What the fakes have in common: LIBERO's layout, tasks without meaning, and a random generator per sub-environment.

    :param num_envs: number of sub-environments
    :param observation_space: of one sub-environment
    :param chunk_length: control steps per chunk, C
    :param max_episode_steps: horizon in control steps
    :param task_ids: tasks to cycle through
    :param init_states: "train", "selection" or "eval"
    :param seed: seed used until ``reset`` gets one; 0 by default, so that tests can be repeated, while the real
        environments draw one (``None``)
    :param autoreset_mode: SAME_STEP, NEXT_STEP or DISABLED
    :param render_mode: None or "rgb_array"
    :param obs_stride: control steps between observations inside a chunk, see ``LIBERO-v0``
    :param intervention: ``f(simulator, proposed, step)``, as for ``LIBERO-v0``; the "simulator" has ``env`` and
        ``index``, the number of the sub-environment
    :param critical_phase: ``f(simulator)``, as for ``intervention``
    :param group_size: how often each training initial state is played, see ``LIBERO-v0``
    :raises ValueError: for values that do not fit
    """

    def __init__(
        self,
        num_envs: int,
        observation_space: spaces.Dict,
        chunk_length: int,
        max_episode_steps: int,
        task_ids: Sequence[int],
        init_states: str,
        seed: int | None,
        autoreset_mode: AutoresetMode,
        render_mode: str | None,
        obs_stride: int | None = None,
        intervention: Callable[..., Any] | None = None,
        critical_phase: Callable[..., Any] | None = None,
        group_size: int = 1,
    ):
        super().__init__(
            num_envs,
            [Task(task_id, f"fake task {task_id}") for task_id in task_ids],
            observation_space,
            FAKE_ROBOT,
            chunk_length,
            max_episode_steps,
            init_states,
            seed,
            autoreset_mode,
            render_mode,
            obs_stride,
            hooks={"intervention": intervention, "critical_phase": critical_phase},
            sequence=_CountedSequence,
            group_size=group_size,
        )
        self._rngs = [np.random.default_rng([self.sequence.seed, index]) for index in range(num_envs)]

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """
        Begin new episodes.

        :param seed: one seed s (sub-environment i gets s + i) or the list of them
        :param options: see :class:`~rlt_gym.core.chunk_vector_env.ChunkVectorEnv`
        :return: observations and infos
        """
        seed = self.sequence.base_seed(seed)
        if seed is not None:
            self._rngs = [np.random.default_rng(seed + index) for index in range(self.num_envs)]
        return super().reset(seed=seed, options=options)

    def _begin(self, env: int) -> None:
        """Nothing to do."""

    def _frame(self, env: int) -> np.ndarray:
        shade = (255 * self._steps[env] // self.max_episode_steps).astype(np.uint8)
        return np.full((32, 32, 3), shade, dtype=np.uint8)


class FakeLiberoVectorEnv(_FakeVectorEnv):
    """
    A stand-in with the spaces, infos and automatic resets of ``LIBERO-v0``.

    Observations are counters, so that an error by one shows.

    ``agentview`` is filled with the number of control steps of the episode (mod 256), ``wrist`` with ``init_index``,
    ``proprio`` is (control steps, init_index, sub-environment, 0, ...). Actions do nothing: episodes with an even
    ``init_index`` succeed at control step ``success_step``, the others run into the horizon.

    :param num_envs: number of sub-environments
    :param suite: any name
    :param task_ids: tasks, taken in turn; (0,) by default
    :param chunk_length: control steps per chunk
    :param assets: ignored
    :param init_states: "train", "selection" or "eval"
    :param image_size: edge of the pictures
    :param render: ignored, like ``assets``
    :param max_episode_steps: horizon in control steps; 20 by default
    :param render_mode: None or "rgb_array"
    :param seed: ignored, nothing is random
    :param autoreset_mode: SAME_STEP, NEXT_STEP or DISABLED
    :param success_step: see above
    :param obs_stride: see ``LIBERO-v0``
    :param intervention: ``f(simulator, proposed, step)`` as for ``LIBERO-v0``; "simulator" has ``env`` and ``index``
    :param critical_phase: ``f(simulator)``, as for ``intervention``
    :param group_size: how often each training initial state is played, see ``LIBERO-v0``
    :param perturbations: ignored, there is no scene
    """

    def __init__(
        self,
        num_envs: int = 1,
        suite: str = "fake",
        task_ids: Sequence[int] | None = None,
        chunk_length: int = 8,
        assets: str = "auto",
        init_states: str = "train",
        image_size: int = 16,
        render: str = "exact",
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
        seed: int | None = 0,
        autoreset_mode: AutoresetMode = AutoresetMode.SAME_STEP,
        success_step: int = 13,
        obs_stride: int | None = None,
        intervention: Callable[..., Any] | None = None,
        critical_phase: Callable[..., Any] | None = None,
        group_size: int = 1,
        perturbations: Mapping[str, float] | None = None,
    ):
        image = spaces.Box(0, 255, (image_size, image_size, 3), np.uint8)
        proprio = spaces.Box(-np.inf, np.inf, (FAKE_ROBOT.proprio_size,), np.float32)
        space = spaces.Dict({"agentview": image, "wrist": image, "proprio": proprio})
        tasks = (0,) if task_ids is None else task_ids
        horizon = 20 if max_episode_steps is None else max_episode_steps
        super().__init__(
            num_envs, space, chunk_length, horizon, tasks, init_states, seed, autoreset_mode, render_mode, obs_stride,
            intervention, critical_phase, group_size,
        )  # fmt: skip
        self.suite = suite
        self.success_step = success_step
        self._image_shape = image.shape

    def _control_step(self, env: int, action: np.ndarray) -> tuple[float, bool]:
        solved = bool(self._episode(env).init_index % 2 == 0 and self._steps[env] + 1 >= self.success_step)
        return float(solved), solved

    def _observe(self, env: int) -> dict[str, np.ndarray]:
        steps, init_index = int(self._steps[env]), self._episode(env).init_index
        proprio = np.zeros(FAKE_ROBOT.proprio_size, dtype=np.float32)
        proprio[:3] = steps, init_index, env
        return {
            "agentview": np.full(self._image_shape, steps % 256, dtype=np.uint8),
            "wrist": np.full(self._image_shape, init_index % 256, dtype=np.uint8),
            "proprio": proprio,
        }


class FakeRLTokenVectorEnv(_FakeVectorEnv):
    """
    A small task with the interface of ``RLToken-LIBERO-v0`` that RLT can learn in seconds.

    A point in the plane moves by ``0.1 * action[:2]`` per control step and must come within 0.1 of a goal. The chunk
    of the "VLA" leads straight to a place beside the goal, always to the same side, 0 to 0.24 away: right about half
    of the time. ``z_rl`` is a random linear image of (position, goal, that place), so the mistake can be seen and
    corrected.

    :param num_envs: number of sub-environments
    :param suite: any name
    :param task_ids: tasks, taken in turn (they do not differ); (0,) by default
    :param chunk_length: control steps per chunk
    :param init_states: "train", "selection" or "eval": separate sequences of goals
    :param max_episode_steps: horizon in control steps; 16 by default
    :param render_mode: None or "rgb_array"
    :param seed: seed used until ``reset`` gets one; 0 by default, so that tests can be repeated, while the real
        environments draw one (``None``)
    :param autoreset_mode: SAME_STEP, NEXT_STEP or DISABLED
    :param token_dim: size of ``z_rl``
    :param obs_stride: see ``LIBERO-v0``
    :param intervention: ``f(simulator, proposed, step)`` as for ``LIBERO-v0``; "simulator" has ``env`` and ``index``
    :param critical_phase: ``f(simulator)``, as for ``intervention``
    :param group_size: how often each training initial state is played, see ``LIBERO-v0``
    :param show_task: whether observations have ``task``, as of ``RLToken-LIBERO-v0``
    """

    SPEED = 0.1
    RADIUS = 0.1
    LARGEST_ERROR = 0.24

    def __init__(
        self,
        num_envs: int = 1,
        suite: str = "fake",
        task_ids: Sequence[int] | None = None,
        chunk_length: int = 4,
        init_states: str = "train",
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
        seed: int | None = 0,
        autoreset_mode: AutoresetMode = AutoresetMode.SAME_STEP,
        token_dim: int = 16,
        obs_stride: int | None = None,
        intervention: Callable[..., Any] | None = None,
        critical_phase: Callable[..., Any] | None = None,
        group_size: int = 1,
        show_task: bool = False,
    ):
        space = spaces.Dict(
            {
                "z_rl": spaces.Box(-np.inf, np.inf, (token_dim,), np.float32),
                "vla_ref": spaces.Box(-1.0, 1.0, (chunk_length, FAKE_ROBOT.action_size), np.float32),
                "proprio": spaces.Box(-np.inf, np.inf, (FAKE_ROBOT.proprio_size,), np.float32),
            }
        )
        tasks = (0,) if task_ids is None else task_ids
        if show_task:
            space["task"] = spaces.Box(0.0, 1.0, (1 + max(tasks),), np.float32)
        horizon = 16 if max_episode_steps is None else max_episode_steps
        super().__init__(
            num_envs, space, chunk_length, horizon, tasks, init_states, seed, autoreset_mode, render_mode, obs_stride,
            intervention, critical_phase, group_size,
        )  # fmt: skip
        self.suite = suite
        self._encoder = np.random.default_rng(0).normal(size=(6, token_dim))
        self._position = np.zeros((num_envs, 2))
        self._goal = np.zeros((num_envs, 2))
        self._aim = np.zeros((num_envs, 2))

    def _checked_actions(self, actions: Any) -> np.ndarray:
        chunks = super()._checked_actions(actions)
        for env, reported in enumerate(self._reported):
            if not reported.get("critical_phase", True):  # the "VLA" plays
                chunks[env] = self._observations[env]["vla_ref"]
        return chunks

    def _begin(self, env: int) -> None:
        rng = self._rngs[env]
        if self.init_states != "train":  # fixed states, the same for every model
            rng = np.random.default_rng([INIT_STATES.index(self.init_states), self._episode(env).init_index])
        elif self.group_size > 1:  # the members of a group begin alike, in whatever sub-environment
            rng = np.random.default_rng([self.sequence.seed, self._episode(env).init_index])
        angle = rng.uniform(0.0, 2.0 * np.pi)
        self._position[env] = rng.uniform(-0.1, 0.1, size=2)
        self._goal[env] = rng.uniform(0.4, 0.8) * np.array([np.cos(angle), np.sin(angle)])
        self._aim[env] = self._goal[env] + np.array([self.LARGEST_ERROR * rng.uniform(), 0.0])

    def _control_step(self, env: int, action: np.ndarray) -> tuple[float, bool]:
        self._position[env] += self.SPEED * action[:2]
        solved = bool(np.linalg.norm(self._position[env] - self._goal[env]) < self.RADIUS)
        return float(solved), solved

    def _observe(self, env: int) -> dict[str, np.ndarray]:
        position = self._position[env].copy()
        state = np.concatenate([position, self._goal[env], self._aim[env]])
        chunk = np.zeros((self.chunk_length, FAKE_ROBOT.action_size), dtype=np.float32)
        chunk[:, FAKE_ROBOT.gripper_index] = FAKE_ROBOT.gripper_opens
        for step in range(self.chunk_length):
            move = (self._aim[env] - position) / self.SPEED
            move /= max(1.0, float(np.linalg.norm(move)))
            chunk[step, :2] = move
            position += self.SPEED * move
        proprio = np.zeros(FAKE_ROBOT.proprio_size, dtype=np.float32)
        proprio[:2] = self._position[env]
        observation = {"z_rl": (state @ self._encoder).astype(np.float32), "vla_ref": chunk, "proprio": proprio}
        if "task" in self.single_observation_space.spaces:  # type: ignore[attr-defined]
            observation["task"] = np.eye(self.metadata["n_tasks"], dtype=np.float32)[self.task(env).task_id]
        return observation
