"""LIBERO-v0: a Gymnasium vector environment whose action is a chunk of control steps."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from rlt_gym.core.chunk_info import chunk_info
from rlt_gym.core.episodes import Episode, EpisodeSequence, checked_int
from rlt_gym.core.hooks import check_hook, check_one_env
from rlt_gym.libero.assets import resolve_assets
from rlt_gym.libero.robot import PANDA
from rlt_gym.libero.suites.tasks import SUITE_HORIZONS, get_tasks
from rlt_gym.workers.channel import FRAME_SIZE
from rlt_gym.workers.options import WorkerOptions
from rlt_gym.workers.pool import WorkerError, WorkerPool

RENDER_QUALITIES = ("exact", "fast")

#: Most tasks whose simulators a worker keeps, and bytes to reckon with for each.
_RESIDENT, _RESIDENT_BYTES = 4, 400 << 20


def _resident_tasks(num_tasks: int, num_envs: int) -> int:
    """How many tasks each worker may keep in half of the memory that is free."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(num_tasks, _RESIDENT, available // 2 // (num_envs * _RESIDENT_BYTES)))


def _frame_of(observation: dict[str, np.ndarray]) -> np.ndarray:
    """An upright frame from an observation, where the simulator that could draw it is gone."""
    picture = observation["agentview"][::-1]
    index = np.arange(FRAME_SIZE) * len(picture) // FRAME_SIZE
    return picture[index][:, index]


class LiberoVectorEnv(VectorEnv):
    """
    N LIBERO simulators in N processes, stepped together, one message per chunk.

    Observation (per env): ``agentview`` and ``wrist``, uint8 (S, S, 3) as LIBERO gives them, i.e. upside down, and
    ``proprio``, float32 (8,): gripper position (m), its axis-angle orientation (rad), finger positions (m).
    Action: float32 (C, 7) in [-1, 1], C control steps of 50 ms; six OSC pose deltas and the gripper (-1 opens, +1
    closes). A chunk ends at success or at the horizon after k <= C steps.
    Reward: the sum over the executed steps, 1 at success. ``terminated`` is success, ``truncated`` the horizon.

    Info of every env: ``step_rewards`` float32 (C,), zero after step k; ``chunk_steps`` k; ``is_success``;
    ``episode_steps``; ``instruction``; ``task_id``; ``init_index``; ``worker_restarted``; ``worker_restarts``.
    With a ``render_mode``, ``final_info`` also has ``final_frame``.

    With ``obs_stride=s`` the infos of :meth:`step` also have ``inner_obs``, a dict of arrays (num_envs, n, ...) with
    the observations at control steps s, 2s, ... < C inside the chunk that was just played (n of them, zeros from the
    step at which it ended), and ``inner_count`` (num_envs,), how many are valid: those before step k. Both stand at
    the top level for every env, for those whose episode has just ended too; ``final_info`` does not repeat them.

    Workers are supervised. One that dies, hangs, raises or loses its GL context is replaced, and its episode ends:
    ``truncated``, with ``worker_restarted`` true in its info (under ``SAME_STEP`` in ``final_info`` as well). Nothing
    of the broken chunk counts: reward 0, ``chunk_steps`` 0, and the final observation is the one that was returned
    last. Such a row is no transition and must not be stored. The env then plays the same episode from its start; the
    other envs do not notice. ``worker_restarts`` counts, as info for each env and as attribute for all.

    With an ``intervention`` the infos also have ``executed_actions`` float32 (C, 7), what was done (from step k on: the
    action), and ``intervention`` bool (C,), true at the control steps that someone else chose. Nobody takes over in
    episodes of the selection and evaluation sets: they measure what the policy can do. With a ``critical_phase`` they
    have ``critical_phase``, whether the observation returned lies in it, and ``critical_chunk``, whether the chunk just
    played began in it.

    Episode number p of the whole vector (env i plays p = N-1-i, 2N-1-i, ...) is task ``p % n_tasks`` and, in the
    evaluation and selection splits, initial state ``p // n_tasks``: SB3's ``evaluate_policy(n_eval_episodes=n)``
    thus sees the first n pairs exactly once, whatever N. In the training split the initial state is drawn from
    ``(seed, p)``, so it does not depend on N either. With ``group_size=g`` training episodes come in groups: task and
    initial state of episode p are those that episode ``p // g`` has without groups.

    :param num_envs: Number of simulators.
    :param suite: ``libero_spatial``, ``libero_object``, ``libero_goal``, ``libero_10`` or ``libero_90``.
    :param task_ids: Tasks of the suite; ``None`` for all.
    :param chunk_length: C.
    :param assets: ``"auto"`` (official meshes if present, else the embedded ones), ``"embedded"``, ``"official"`` or
        a folder.
    :param init_states: ``"train"``, ``"selection"`` or ``"eval"`` (LIBERO's own 50 of a task, then sampled ones); also
        ``reset(options={"init_states": ...})``.
    :param group_size: How often each training initial state is played, g episodes in a row over all envs, for methods
        that compare episodes from one state; ``task_id`` and ``init_index`` tell the groups apart. Selection and
        evaluation play each state once all the same.
    :param image_size: Side S of the pictures in pixels, at most 256.
    :param render: ``"exact"`` (LIBERO's pictures bit for bit) or ``"fast"`` (cheap robot, no multisampling).
    :param max_episode_steps: Control steps before truncation; ``None`` for the suite's horizon.
    :param train_episode_steps: The same in the training split, at most ``max_episode_steps``; ``None``: no difference.
        An attempt that has failed early then costs less time, and an evaluation keeps the suite's horizon.
    :param render_mode: ``None`` or ``"rgb_array"`` (:meth:`render` gives upright 256-pixel frames).
    :param seed: Seed until :meth:`reset` is given one.
    :param obs_stride: Also observe every so many control steps inside a chunk, 1 <= s < C; ``None``: only at its end.
    :param intervention: Who may take over, ``"module:Class"`` or ``"module:function"``, see
        :mod:`rlt_gym.libero.interventions`; ``intervention_kwargs``: its keyword arguments.
    :param critical_phase: Predicate ``"module:function"``, see :mod:`rlt_gym.libero.critical_phase`;
        ``critical_phase_kwargs``: its keyword arguments.
    :param autoreset_mode: ``SAME_STEP`` or ``DISABLED`` (``reset(options={"reset_mask": ...})``).
    :param worker_options: ``worker_start``, ``worker_python``, ``worker_timeout``, ``max_restarts`` and
        ``resident_tasks`` (``None``: up to 4, as memory allows), see :class:`~rlt_gym.workers.options.WorkerOptions`.
    :raises ValueError: A bad argument or missing assets, before any process starts.
    :raises TypeError: An unknown argument.
    :raises WorkerError: No worker can be started.
    """

    def __init__(
        self,
        num_envs: int = 1,
        suite: str = "libero_goal",
        task_ids: Sequence[int] | None = None,
        chunk_length: int = 8,
        assets: str = "auto",
        init_states: str = "train",
        image_size: int = 128,
        render: str = "exact",
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
        seed: int = 0,
        autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP,
        obs_stride: int | None = None,
        intervention: str | None = None,
        intervention_kwargs: dict[str, Any] | None = None,
        critical_phase: str | None = None,
        critical_phase_kwargs: dict[str, Any] | None = None,
        group_size: int = 1,
        train_episode_steps: int | None = None,
        **worker_options: Any,
    ):
        options = WorkerOptions.checked(type(self).__name__, worker_options)
        self.num_envs = checked_int("num_envs", num_envs, 1, 1024)
        self.tasks = get_tasks(suite, task_ids)
        self.chunk_length = checked_int("chunk_length", chunk_length, 1, 100)
        if obs_stride is not None:
            if self.chunk_length == 1:
                raise ValueError("obs_stride needs chunks of 2 or more control steps, got chunk_length=1")
            checked_int("obs_stride", obs_stride, 1, self.chunk_length - 1)
        self.obs_stride = obs_stride
        #: Control steps inside a chunk at which it is observed, besides its end.
        self._inner_steps = () if obs_stride is None else tuple(range(obs_stride, self.chunk_length, obs_stride))
        self._hooks = {
            "intervention": check_hook("intervention", intervention, intervention_kwargs, 3),
            "critical_phase": check_hook("critical_phase", critical_phase, critical_phase_kwargs, 1, False),
        }
        check_one_env(self._hooks["intervention"], self.num_envs)
        #: What the hooks of each env said last.
        self._said: list[dict[str, Any]] = [{}] * self.num_envs
        image_size = checked_int("image_size", image_size, 16, 256)
        horizon = SUITE_HORIZONS[suite] if max_episode_steps is None else max_episode_steps
        self.max_episode_steps = checked_int("max_episode_steps", horizon, 1, 100_000)
        if train_episode_steps is not None:
            checked_int("train_episode_steps", train_episode_steps, 1, self.max_episode_steps)
        self.train_episode_steps = train_episode_steps
        self.sequence = EpisodeSequence(self.num_envs, len(self.tasks), init_states, seed, group_size)
        if render not in RENDER_QUALITIES:
            raise ValueError(f"render must be one of {RENDER_QUALITIES}, got {render!r}")
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f"render_mode must be None or 'rgb_array', got {render_mode!r}")
        mode = AutoresetMode(autoreset_mode)
        if mode == AutoresetMode.NEXT_STEP:
            raise ValueError("autoreset_mode must be SAME_STEP or DISABLED: NEXT_STEP would waste a chunk per episode")
        resident_tasks = options.resident_tasks or _resident_tasks(len(self.tasks), self.num_envs)
        self.render_mode = render_mode
        self.metadata = {
            "render_modes": ["rgb_array"],
            "render_fps": PANDA.control_frequency / self.chunk_length,
            "autoreset_mode": mode,
            "robot": PANDA,
        }
        picture = spaces.Box(0, 255, (image_size, image_size, 3), np.uint8)
        proprio = spaces.Box(-np.inf, np.inf, (PANDA.proprio_size,), np.float32)
        self.single_observation_space = spaces.Dict(
            [*((key, deepcopy(picture)) for key in PANDA.camera_keys), ("proprio", proprio)]
        )
        self.single_action_space = spaces.Box(-1.0, 1.0, (self.chunk_length, PANDA.action_size), np.float32)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

        self.assets = resolve_assets(assets)
        self._episodes: list[Episode | None] = [None] * self.num_envs
        self._observations: list[dict[str, np.ndarray]] = [{} for _ in range(self.num_envs)]
        self._dones = np.zeros(self.num_envs, dtype=bool)
        #: Envs whose simulator was lost between two steps.
        self._lost: set[int] = set()
        settings = {
            "suite": suite,
            "assets_path": str(self.assets.path),
            "image_size": image_size,
            "render": render,
            "resident": resident_tasks,
            "hooks": self._hooks,
        }
        numbers = [self.sequence.place(self.sequence.number(env, 0)) for env in range(self.num_envs)]
        first_tasks = [self.tasks[number % len(self.tasks)].task_id for number in numbers]
        ahead = list(dict.fromkeys(first_tasks))[:resident_tasks]
        self._pool = WorkerPool(
            self.num_envs,
            options.plan().with_gl(),
            settings,
            1 + len(self._inner_steps),
            ahead,
            float(options.worker_timeout),
            options.max_restarts,
        )
        # Build the first tasks side by side. What fails here fails for a reason that a restart does not mend.
        _, failures = self._pool.ask({env: ("build", {"task_id": task}) for env, task in enumerate(first_tasks)})
        if failures:
            self.close_extras()
            raise WorkerError(f"LIBERO workers do not start. {next(iter(failures.values()))}")

    @property
    def worker_restarts(self) -> int:
        """How many workers were replaced so far."""
        return int(self._pool.restarts.sum())

    @property
    def init_state_counts(self) -> dict[str, int]:
        """How many initial states the sequences of the selection and evaluation sets have before they begin again."""
        return self.sequence.init_state_counts

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers, one per env."""
        return [client.pid for client in self._pool.clients]

    # ------------------------------------------------------------------ episodes

    def _start_episodes(self, envs: Sequence[int]) -> None:
        for env in envs:
            self._episodes[env] = self.sequence.next(env)
        pending = list(envs)
        while pending:
            answers, failures = self._pool.ask({env: ("reset", self._reset_arguments(env)) for env in pending})
            for env, (rest, said) in answers.items():
                self._observations[env] = self._pool.clients[env].pictures.take(rest, 0)
                self._said[env] = said
                self._dones[env] = False
                self._lost.discard(env)
            for env, failure in failures.items():
                self._pool.restart(env, failure)
            pending = list(failures)

    def _reset_arguments(self, env: int) -> dict[str, Any]:
        episode = self._episodes[env]
        assert episode is not None
        task_id = self.tasks[episode.task_index].task_id
        return {"task_id": task_id, "split": self.sequence.split, "index": episode.init_index}

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """
        :param seed: Base seed of the training split's initial states. A list must hold consecutive integers.
        :param options: ``init_states`` switches the split; ``reset_mask`` (bool (num_envs,)) resets a part;
            ``shard`` (k, n) leaves, from this full reset to the next one, only the episodes k, k + n, k + 2n, ... of
            the sequence, so that n environments can divide an evaluation among them.
        """
        options = dict(options or {})
        mask = options.pop("reset_mask", None)
        split = options.pop("init_states", None)
        shard = options.pop("shard", None)
        if options:
            raise ValueError(f"Unknown reset options {sorted(options)}; known: init_states, reset_mask, shard")
        if shard is not None and not 0 <= shard[0] < shard[1]:
            raise ValueError(f"shard must be (k, n) with 0 <= k < n, got {shard!r}")
        if split is not None:
            split = self.sequence.checked_split(split)
        if mask is None:
            mask = np.ones(self.num_envs, dtype=bool)
        elif not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (self.num_envs,):
            raise ValueError(f"reset_mask must be a bool array of shape ({self.num_envs},), got {mask!r}")
        if not mask.any():
            raise ValueError("reset_mask selects no environment")
        if not mask.all() and split not in (None, self.sequence.split):
            raise ValueError("init_states can only be switched for all environments at once")

        if isinstance(seed, list):
            seed = seed[0] if seed else None
        super().reset(seed=seed)
        if mask.all():
            self.sequence.restart(split, seed, shard)
        elif seed is not None:
            self.sequence.seed = self.sequence.checked_seed(seed)
        envs = np.flatnonzero(mask).tolist()
        self._start_episodes(envs)
        infos: dict[str, Any] = {}
        for env in envs:
            infos = self._add_info(infos, self._info(env), env)
        return self._batch(), infos

    # ------------------------------------------------------------------ steps

    def _checked_actions(self, actions: Any) -> np.ndarray:
        array = np.asarray(actions)
        expected = (self.num_envs, self.chunk_length, PANDA.action_size)
        if array.shape != expected:
            raise ValueError(f"actions must have shape {expected} (num_envs, chunk_length, 7), got {array.shape}")
        if not np.issubdtype(array.dtype, np.number) or not np.isfinite(array).all():
            raise ValueError("actions must be finite numbers, got NaN, inf or another type")
        return np.clip(array, -1.0, 1.0).astype(np.float32)

    @property
    def _horizon(self) -> int:
        """Control steps before truncation in the present split."""
        shorter = self.sequence.split == "train" and self.train_episode_steps is not None
        return self.train_episode_steps if shorter else self.max_episode_steps  # type: ignore[return-value]

    def step(self, actions: Any) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """
        Play one chunk in every environment.

        :param actions: float (num_envs, C, 7); clipped to [-1, 1].
        :raises ValueError: Wrong shape or non-finite values; the environments are untouched.
        """
        array = self._checked_actions(actions)
        if any(episode is None for episode in self._episodes):
            raise RuntimeError("call reset() before step()")
        if self._dones.any():
            raise RuntimeError("a finished environment must be reset before it is stepped (autoreset is disabled)")
        self._asked, self._said = array, [{}] * self.num_envs
        questions = {}
        for env in set(range(self.num_envs)) - self._lost:
            left = self._horizon - self._episodes[env].steps  # type: ignore[union-attr]
            questions[env] = ("step", {"actions": array[env, :left], "observe_at": self._inner_steps})
        answers, failures = self._pool.ask(questions)
        for env, failure in failures.items():
            self._pool.restart(env, failure)
        rewards = np.zeros(self.num_envs, dtype=np.float64)
        terminations = np.zeros(self.num_envs, dtype=bool)
        truncations = np.zeros(self.num_envs, dtype=bool)
        inner_obs, inner_count = self._empty_inner()
        step_infos = []
        for env in range(self.num_envs):
            if env not in answers:
                # Play this episode again, so that an evaluation misses none of its states.
                self.sequence.repeat(env)
                truncations[env] = True
                step_infos.append(self._info(env, restarted=True))
                continue
            step_rewards, success, inner_count[env] = self._take(env, answers[env], inner_obs)
            rewards[env] = step_rewards.sum()
            terminations[env] = success
            truncations[env] = not success and self._episodes[env].steps >= self._horizon  # type: ignore[union-attr]
            step_infos.append(self._info(env, step_rewards, success))
        done = terminations | truncations
        infos: dict[str, Any] = {}
        if self.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP and done.any():
            finished = np.flatnonzero(done).tolist()
            final_obs = np.full(self.num_envs, None, dtype=object)
            final_info: dict[str, Any] = {}
            if self.render_mode is not None:  # the reset below takes the last picture away
                frames = self._frames([env for env in finished if env in answers])
            for env in finished:
                final_obs[env] = self._observations[env]
                if self.render_mode is not None:
                    step_infos[env]["final_frame"] = frames.get(env, _frame_of(self._observations[env]))
                final_info = self._add_info(final_info, step_infos[env], env)
            self._start_episodes(finished)
            for env in finished:
                step_infos[env] = self._info(env, restarted=env not in answers)
            infos = {"final_obs": final_obs, "_final_obs": done.copy(), "final_info": final_info}
            infos["_final_info"] = done.copy()
        else:
            self._dones = done.copy()
        for env, info in enumerate(step_infos):
            infos = self._add_info(infos, info, env)
        if self._inner_steps:
            infos["inner_obs"], infos["inner_count"] = inner_obs, inner_count
        return self._batch(), rewards, terminations, truncations, infos

    def _take(
        self, env: int, answer: tuple[Any, ...], inner_obs: dict[str, np.ndarray]
    ) -> tuple[np.ndarray, bool, int]:
        """Read a worker's answer to a chunk; returns its rewards, whether the goal is reached, number of inner obs."""
        rest, step_rewards, success, inner, self._said[env] = answer
        pictures = self._pool.clients[env].pictures
        self._observations[env] = pictures.take(rest, 0)
        for index, inner_rest in enumerate(inner):
            for key, value in pictures.take(inner_rest, index + 1).items():
                inner_obs[key][env, index] = value
        self._episodes[env].steps += len(step_rewards)  # type: ignore[union-attr]
        return step_rewards, success, len(inner)

    def _empty_inner(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        shape = (self.num_envs, len(self._inner_steps))
        arrays = {key: np.zeros((*shape, *value.shape), value.dtype) for key, value in self._observations[0].items()}
        return arrays, np.zeros(self.num_envs, dtype=np.int64)

    def _info(
        self, env: int, step_rewards: np.ndarray | None = None, success: bool = False, restarted: bool = False
    ) -> dict[str, Any]:
        episode = self._episodes[env]
        assert episode is not None
        task = self.tasks[episode.task_index]
        return chunk_info(
            (self.chunk_length, PANDA.action_size), episode, task.task_id, task.instruction, self._hooks,
            self._said[env], step_rewards, success, None if step_rewards is None else self._asked[env], restarted,
            self._pool.restarts[env],
        )  # fmt: skip

    def _batch(self) -> dict[str, np.ndarray]:
        return {key: np.stack([obs[key] for obs in self._observations]) for key in (*PANDA.camera_keys, "proprio")}

    # ------------------------------------------------------------------ others

    def render(self) -> tuple[np.ndarray, ...] | None:
        """
        :return: One upright uint8 (256, 256, 3) frame per env, or ``None`` without ``render_mode="rgb_array"``.
        """
        if self.render_mode is None:
            return None
        frames = self._frames(range(self.num_envs))
        return tuple(frames.get(env, _frame_of(self._observations[env])) for env in range(self.num_envs))

    def _frames(self, envs: Iterable[int]) -> dict[int, np.ndarray]:
        """Frames of those envs that can draw one; for the others the next step ends the episode."""
        answers, failures = self._pool.ask({env: ("render", {}) for env in envs if env not in self._lost})
        for env, failure in failures.items():
            self._pool.restart(env, failure)
            self._lost.add(env)
        return {env: self._pool.clients[env].pictures.frame.copy() for env in answers}

    def call_workers(self, function: str, arguments: Sequence[dict[str, Any]]) -> list[Any]:
        """
        Run ``module:name`` of this package on the simulators, e.g. to record a scripted expert. The episodes that the
        simulators were playing are lost: call :meth:`reset` before the next :meth:`step`. A call may play a whole
        episode, so it may take ten times ``worker_timeout``.

        :param function: Its first parameter is the worker's simulator.
        :param arguments: One dict per worker used (at most ``num_envs``): ``task_id`` and ``arguments``.
        :raises WorkerError: The function raised, or a worker died; those that did are replaced.
        """
        answers, failures = self._pool.ask(
            {env: ("call", {"function": function, **entry}) for env, entry in enumerate(arguments[: self.num_envs])},
            patience=10.0,
        )
        for env, failure in failures.items():
            self._pool.restart(env, failure)
            self._lost.add(env)
        if failures:
            raise WorkerError(str(next(iter(failures.values()))))
        return [answers[env] for env in sorted(answers)]

    def close_extras(self, **kwargs: Any) -> None:
        """End the workers. ``close()`` is idempotent."""
        if hasattr(self, "_pool"):
            self._pool.close()
