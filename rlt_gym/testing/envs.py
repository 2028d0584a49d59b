"""Vector environments without a simulator that have the interfaces of the real ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from rlt_gym.core.chunk_info import hook_info
from rlt_gym.libero.robot import PANDA
from rlt_gym.workers.hooks import WorkerHooks

#: LIBERO's layout, since the fakes stand in for LIBERO.
FAKE_ROBOT = replace(PANDA, name="fake")

INIT_STATES = ("train", "selection", "eval")


class _FakeChunkVectorEnv(VectorEnv):
    """
    Everything about action chunks, automatic resets and infos; subclasses say what a control step does.

    :param num_envs: number of sub-environments
    :param observation_space: of one sub-environment
    :param chunk_length: control steps per chunk, C
    :param max_episode_steps: horizon in control steps
    :param task_ids: tasks to cycle through
    :param init_states: "train", "selection" or "eval"
    :param seed: seed used until ``reset`` gets one
    :param autoreset_mode: SAME_STEP or DISABLED
    :param render_mode: None or "rgb_array"
    :param obs_stride: also observe every so many control steps inside a chunk, see ``LIBERO-v0``
    :param intervention: ``f(simulator, proposed, step)``, as for ``LIBERO-v0``; the "simulator" has ``env`` and
        ``index``, the number of the sub-environment
    :param critical_phase: ``f(simulator)``, likewise
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
        seed: int,
        autoreset_mode: AutoresetMode,
        render_mode: str | None,
        obs_stride: int | None = None,
        intervention: Callable[..., Any] | None = None,
        critical_phase: Callable[..., Any] | None = None,
    ):
        for name, value in (("num_envs", num_envs), ("chunk_length", chunk_length), ("horizon", max_episode_steps)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        mode = AutoresetMode(autoreset_mode)
        if mode not in (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED):
            raise ValueError(f"autoreset_mode must be SAME_STEP or DISABLED, got {mode}.")
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f"render_mode must be None or 'rgb_array', got {render_mode!r}.")
        if obs_stride is not None and not 1 <= obs_stride < chunk_length:
            raise ValueError(f"obs_stride must be None or 1..{chunk_length - 1}, got {obs_stride}.")
        self.obs_stride = obs_stride
        self.num_envs = num_envs
        self.chunk_length = chunk_length
        self.max_episode_steps = max_episode_steps
        self.task_ids = tuple(task_ids)
        self.init_states = _check_init_states(init_states)
        self._shard = (0, 1)
        self.render_mode = render_mode
        self.metadata = {"render_modes": ["rgb_array"], "autoreset_mode": mode, "robot": FAKE_ROBOT}
        self.single_observation_space = observation_space
        self.observation_space = batch_space(observation_space, num_envs)
        self.single_action_space = spaces.Box(-1.0, 1.0, (chunk_length, FAKE_ROBOT.action_size), np.float32)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._rngs = [np.random.default_rng([seed, index]) for index in range(num_envs)]
        self._episodes = np.full(num_envs, -1)
        self._steps = np.zeros(num_envs, dtype=np.int64)
        self._finished = np.ones(num_envs, dtype=bool)
        self._hooks = {"intervention": intervention, "critical_phase": critical_phase}
        self._workers = [WorkerHooks(FAKE_ROBOT.action_size, **self._hooks) for _ in range(num_envs)]
        self._said: list[dict[str, Any]] = [{}] * num_envs

    # hooks -----------------------------------------------------------------------------------------------------

    def _begin(self, index: int) -> None:
        """Start an episode in a sub-environment."""

    def _control_step(self, index: int, action: np.ndarray) -> bool:
        """One control step with an action (7,); returns whether the task is solved."""
        raise NotImplementedError

    def _observe(self, index: int) -> dict[str, np.ndarray]:
        """Observation of a sub-environment, new arrays."""
        raise NotImplementedError

    # VectorEnv -------------------------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """
        :param seed: one seed (sub-environment i gets ``seed + i``) or one per sub-environment
        :param options: ``init_states``; in DISABLED mode ``reset_mask`` (bool, (num_envs,)); ``shard`` (k, n): only the
            episodes k, k + n, ... of the sequence
        :return: observations and infos
        """
        options = dict(options or {})
        mask = np.asarray(options.pop("reset_mask", np.ones(self.num_envs, dtype=bool)))
        if mask.shape != (self.num_envs,) or mask.dtype != bool or not mask.any():
            raise ValueError(f"reset_mask must be bool of shape ({self.num_envs},) with at least one True, got {mask}.")
        self.init_states = _check_init_states(options.pop("init_states", self.init_states))
        shard = options.pop("shard", (0, 1))
        if mask.all():
            self._shard = shard
        if seed is not None:
            seeds = [seed + index for index in range(self.num_envs)] if isinstance(seed, int | np.integer) else seed
            if len(seeds) != self.num_envs:
                raise ValueError(f"seed must be an int or a list of {self.num_envs}, got {len(seeds)} seeds.")
            self._rngs = [
                rng if value is None else np.random.default_rng(int(value))
                for rng, value in zip(self._rngs, seeds, strict=True)
            ]
        infos: dict[str, Any] = {}
        for index in np.flatnonzero(mask):
            # every reset of an evaluation set starts the same sequence again
            if seed is not None or self.init_states != "train":
                self._episodes[index] = -1
            self._start(int(index))
            infos = self._add_info(infos, self._info(int(index)), int(index))
        return self._batch([self._observe(index) for index in range(self.num_envs)]), infos

    def step(
        self, actions: np.ndarray
    ) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """
        Run one chunk in every sub-environment.

        :param actions: (num_envs, C, 7)
        :return: observations, rewards, terminations, truncations, infos
        :raises ValueError: for a wrong shape or numbers that are not finite; nothing is executed then
        """
        chunks = np.asarray(actions, dtype=np.float32)
        if chunks.shape != self.action_space.shape:
            raise ValueError(f"Expected actions of shape {self.action_space.shape}, got {chunks.shape}.")
        if not np.isfinite(chunks).all():
            raise ValueError("Actions contain NaN or infinite numbers; no step was made.")
        if self._finished.any():
            raise ValueError("A sub-environment has not been reset since its episode ended: call reset().")
        self._asked = chunks = self._gated(chunks)
        rewards = np.zeros(self.num_envs)
        terminations, truncations = np.zeros(self.num_envs, dtype=bool), np.zeros(self.num_envs, dtype=bool)
        observations: list[dict[str, np.ndarray]] = []
        infos: dict[str, Any] = {}
        inner: list[list[dict[str, np.ndarray]]] = [[] for _ in range(self.num_envs)]
        for index in range(self.num_envs):
            step_rewards = np.zeros(self.chunk_length, dtype=np.float32)
            executed, solved = 0, False
            choose = self._workers[index].choose
            while executed < self.chunk_length and not solved and self._steps[index] < self.max_episode_steps:
                action = np.clip(chunks[index, executed], -1.0, 1.0)
                solved = bool(self._control_step(index, action if choose is None else choose(action)))
                step_rewards[executed] = float(solved)
                executed += 1
                self._steps[index] += 1
                over = solved or executed == self.chunk_length or self._steps[index] >= self.max_episode_steps
                if self.obs_stride and executed % self.obs_stride == 0 and not over:
                    inner[index].append(self._observe(index))
            rewards[index] = step_rewards.sum()
            terminations[index] = solved
            truncations[index] = not solved and self._steps[index] >= self.max_episode_steps
            self._said[index] = self._workers[index].end_chunk()
            info = self._info(index, step_rewards, executed, solved)
            observation = self._observe(index)
            if terminations[index] or truncations[index]:
                if self.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP:
                    infos = self._add_info(infos, {"final_obs": observation, "final_info": info}, index)
                    self._start(index)
                    observation, info = self._observe(index), self._info(index)
                else:
                    self._finished[index] = True
            infos = self._add_info(infos, info, index)
            observations.append(observation)
        if self.obs_stride is not None:
            infos |= self._batch_inner(inner)
        return self._batch(observations), rewards, terminations, truncations, infos

    def render(self) -> tuple[np.ndarray, ...] | None:
        """:return: one picture per sub-environment in "rgb_array" mode"""
        if self.render_mode is None:
            return None
        shade = (255 * self._steps // self.max_episode_steps).astype(np.uint8)
        return tuple(np.full((32, 32, 3), value, dtype=np.uint8) for value in shade)

    # details ---------------------------------------------------------------------------------------------------

    def _start(self, index: int) -> None:
        self._episodes[index] += 1
        self._steps[index] = 0
        self._finished[index] = False
        self._begin(index)
        simulator = SimpleNamespace(env=self, index=index)
        self._said[index] = self._workers[index].begin_episode(
            simulator, self._init_index(index), takeover=self.init_states == "train"
        )

    def _gated(self, chunks: np.ndarray) -> np.ndarray:
        """Before the critical phase the "VLA" acts."""
        chunks = chunks.copy()
        for index, said in enumerate(self._said):
            if not said.get("critical_phase", True) and "vla_ref" in self._observe(index):
                chunks[index] = self._observe(index)["vla_ref"]
        return chunks

    def _init_index(self, index: int) -> int:
        # the sequence of LIBERO-v0: evaluate_policy(n_eval_episodes=n) sees 0..n-1 once each
        number = int((self.num_envs - 1 - index) + self._episodes[index] * self.num_envs)
        return number * self._shard[1] + self._shard[0]

    def _info(
        self, index: int, step_rewards: np.ndarray | None = None, executed: int = 0, solved: bool = False
    ) -> dict[str, Any]:
        init_index = self._init_index(index)
        task_id = self.task_ids[init_index % len(self.task_ids)]
        return {
            "step_rewards": np.zeros(self.chunk_length, dtype=np.float32) if step_rewards is None else step_rewards,
            "chunk_steps": executed,
            "is_success": solved,
            "instruction": f"fake task {task_id}",
            "task_id": task_id,
            "init_index": init_index,
            "episode_steps": int(self._steps[index]),
            **hook_info(
                self._hooks,
                (self.chunk_length, 7),
                self._said[index],
                None if step_rewards is None else self._asked[index],
            ),
        }

    def _batch_inner(self, inner: list[list[dict[str, np.ndarray]]]) -> dict[str, Any]:
        assert self.obs_stride is not None
        number = (self.chunk_length - 1) // self.obs_stride
        arrays = {
            key: np.zeros((self.num_envs, number, *value.shape), value.dtype) for key, value in self._observe(0).items()
        }
        for index, observations in enumerate(inner):
            for place, observation in enumerate(observations):
                for key, value in observation.items():
                    arrays[key][index, place] = value
        return {"inner_obs": arrays, "inner_count": np.array([len(row) for row in inner])}

    def _batch(self, observations: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        return {key: np.stack([obs[key] for obs in observations]) for key in observations[0]}


def _check_init_states(value: str) -> str:
    if value not in INIT_STATES:
        raise ValueError(f"init_states must be one of {INIT_STATES}, got {value!r}.")
    return value


class FakeLiberoVectorEnv(_FakeChunkVectorEnv):
    """
    Has the spaces, infos and automatic resets of ``LIBERO-v0``; observations are counters, so that an error by one
    shows.

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
    :param autoreset_mode: SAME_STEP or DISABLED
    :param success_step: see above
    :param obs_stride: see ``LIBERO-v0``
    :param intervention: ``f(simulator, proposed, step)`` as for ``LIBERO-v0``; "simulator" has ``env`` and ``index``
    :param critical_phase: ``f(simulator)``, likewise
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
        seed: int = 0,
        autoreset_mode: AutoresetMode = AutoresetMode.SAME_STEP,
        success_step: int = 13,
        obs_stride: int | None = None,
        intervention: Callable[..., Any] | None = None,
        critical_phase: Callable[..., Any] | None = None,
    ):
        image = spaces.Box(0, 255, (image_size, image_size, 3), np.uint8)
        space = spaces.Dict(
            {"agentview": image, "wrist": image, "proprio": spaces.Box(-np.inf, np.inf, (8,), np.float32)}
        )
        tasks = (0,) if task_ids is None else task_ids
        horizon = 20 if max_episode_steps is None else max_episode_steps
        super().__init__(
            num_envs, space, chunk_length, horizon, tasks, init_states, seed, autoreset_mode, render_mode, obs_stride,
            intervention, critical_phase,
        )  # fmt: skip
        self.suite = suite
        self.success_step = success_step
        self._image_shape = image.shape

    def _control_step(self, index: int, action: np.ndarray) -> bool:
        return self._init_index(index) % 2 == 0 and self._steps[index] + 1 >= self.success_step

    def _observe(self, index: int) -> dict[str, np.ndarray]:
        steps, init_index = int(self._steps[index]), self._init_index(index)
        proprio = np.zeros(8, dtype=np.float32)
        proprio[:3] = steps, init_index, index
        return {
            "agentview": np.full(self._image_shape, steps % 256, dtype=np.uint8),
            "wrist": np.full(self._image_shape, init_index % 256, dtype=np.uint8),
            "proprio": proprio,
        }


class FakeRLTokenVectorEnv(_FakeChunkVectorEnv):
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
    :param seed: seed used until ``reset`` gets one
    :param autoreset_mode: SAME_STEP or DISABLED
    :param token_dim: size of ``z_rl``
    :param obs_stride: see ``LIBERO-v0``
    :param intervention: ``f(simulator, proposed, step)`` as for ``LIBERO-v0``; "simulator" has ``env`` and ``index``
    :param critical_phase: ``f(simulator)``, likewise
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
        seed: int = 0,
        autoreset_mode: AutoresetMode = AutoresetMode.SAME_STEP,
        token_dim: int = 16,
        obs_stride: int | None = None,
        intervention: Callable[..., Any] | None = None,
        critical_phase: Callable[..., Any] | None = None,
    ):
        space = spaces.Dict(
            {
                "z_rl": spaces.Box(-np.inf, np.inf, (token_dim,), np.float32),
                "vla_ref": spaces.Box(-1.0, 1.0, (chunk_length, 7), np.float32),
                "proprio": spaces.Box(-np.inf, np.inf, (8,), np.float32),
            }
        )
        tasks = (0,) if task_ids is None else task_ids
        horizon = 16 if max_episode_steps is None else max_episode_steps
        super().__init__(
            num_envs, space, chunk_length, horizon, tasks, init_states, seed, autoreset_mode, render_mode, obs_stride,
            intervention, critical_phase,
        )  # fmt: skip
        self.suite = suite
        self._encoder = np.random.default_rng(0).normal(size=(6, token_dim))
        self._position = np.zeros((num_envs, 2))
        self._goal = np.zeros((num_envs, 2))
        self._aim = np.zeros((num_envs, 2))

    def _begin(self, index: int) -> None:
        rng = self._rngs[index]
        if self.init_states != "train":  # fixed states, the same for every model
            rng = np.random.default_rng([INIT_STATES.index(self.init_states), self._init_index(index)])
        angle = rng.uniform(0.0, 2.0 * np.pi)
        self._position[index] = rng.uniform(-0.1, 0.1, size=2)
        self._goal[index] = rng.uniform(0.4, 0.8) * np.array([np.cos(angle), np.sin(angle)])
        self._aim[index] = self._goal[index] + np.array([self.LARGEST_ERROR * rng.uniform(), 0.0])

    def _control_step(self, index: int, action: np.ndarray) -> bool:
        self._position[index] += self.SPEED * action[:2]
        return bool(np.linalg.norm(self._position[index] - self._goal[index]) < self.RADIUS)

    def _observe(self, index: int) -> dict[str, np.ndarray]:
        position = self._position[index].copy()
        state = np.concatenate([position, self._goal[index], self._aim[index]])
        chunk = np.zeros((self.chunk_length, 7), dtype=np.float32)
        chunk[:, 6] = -1.0
        for step in range(self.chunk_length):
            move = (self._aim[index] - position) / self.SPEED
            move /= max(1.0, float(np.linalg.norm(move)))
            chunk[step, :2] = move
            position += self.SPEED * move
        proprio = np.zeros(8, dtype=np.float32)
        proprio[:2] = self._position[index]
        return {"z_rl": (state @ self._encoder).astype(np.float32), "vla_ref": chunk, "proprio": proprio}
