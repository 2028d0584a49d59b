"""
The base class of vector environments whose action is a chunk of control steps.

Long because resets, the two parts of a step and three modes of autoreset share one state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.error import NoAsyncCallError
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from rlt_gym.core.chunk_info import Observation, Played, Task, chunk_info, inner_info
from rlt_gym.core.drawing import Drawing
from rlt_gym.core.episodes import Episode, EpisodeSequence
from rlt_gym.core.judging import Judging
from rlt_gym.core.members import MemberAccess
from rlt_gym.core.pickling import PickledByArguments
from rlt_gym.core.robot_spec import RobotSpec
from rlt_gym.core.split_step import real_chunks
from rlt_gym.workers.named import checked_int

__all__ = ["ChunkVectorEnv", "Infos", "Observation", "Played", "Task"]

Infos = dict[str, Any]


class ChunkVectorEnv(PickledByArguments, MemberAccess, Drawing, Judging, VectorEnv):
    """
    N environments that play chunks of C control steps together; a subclass adds the simulators.

    A subclass implements :meth:`_start_episodes`, :meth:`_play` and, for a ``render_mode``, :meth:`_draw`, each for
    several environments at once. Simulators that live in this process are simpler to add with
    :class:`~rlt_gym.core.in_process.InProcessVectorEnv`.

    :meth:`step` has two parts, :meth:`step_async` and :meth:`step_wait`. Simulators in other processes play between
    them if the subclass implements :meth:`_begin_play` and :meth:`_end_play` instead of :meth:`_play`.

    The action is float32 (C, d) in [-1, 1]. A chunk ends at success or at the horizon after k <= C steps. The reward is
    the sum over the executed steps. ``terminated`` means success, ``truncated`` means the horizon.

    The info of every env has ``step_rewards`` float32 (C,), zero after step k; ``chunk_steps`` k; ``is_success``;
    ``episode_steps``; ``noise_seed``, the seed for a policy's noise in this episode
    (:meth:`~rlt_gym.core.episodes.EpisodeSequence.noise_seed`); ``instruction``; ``task_id``; ``init_index``;
    ``worker_restarted``; ``worker_restarts``. With a ``render_mode``, ``final_info`` also has ``final_frame``, and
    environments that :meth:`film` names have ``inner_frames``, drawn after control steps 1 to k - 1 of the chunk.

    With ``obs_stride=s`` the infos of :meth:`step` also have ``inner_obs`` and ``inner_count``. ``inner_obs`` is a dict
    of arrays (num_envs, n, ...) with the n observations at control steps s, 2s, ... < C inside the chunk just played.
    ``inner_count`` (num_envs,) says how many are valid, those before step k; the others are zeros. Both are at the top
    level for every env, also for those whose episode has just ended; ``final_info`` does not repeat them.

    Under ``NEXT_STEP`` the :meth:`step` after the end of an episode ignores the action of that env and starts its next
    episode: reward 0, both flags false, ``chunk_steps`` 0. Such a row is no transition and must not be stored.

    If a simulator is lost in a chunk, its episode ends with ``truncated``, and its info has ``worker_restarted`` true
    (under ``SAME_STEP`` also in ``final_info``). Nothing of that chunk counts or may be stored: reward and
    ``chunk_steps`` are 0, and the final observation is the one that was returned last. The env then plays the same
    episode from its start. The other envs are not affected. ``worker_restarts`` counts the restarts, as info for each
    env and as attribute for all.

    With an ``intervention`` the infos also have ``executed_actions`` float32 (C, d), the executed actions (from step k
    on: the action), and ``intervention`` bool (C,), true at control steps that someone else chose. Nobody takes over in
    episodes of the selection and evaluation splits, which measure the policy. With a ``critical_phase`` they have
    ``critical_phase``, whether the returned observation lies in it, and ``critical_chunk``, whether the chunk just
    played began in it.

    :param num_envs: N.
    :param tasks: Tasks, each with ``task_id`` and ``instruction``, e.g. :class:`Task`.
    :param observation_space: Of one environment.
    :param robot: What ``metadata["robot"]`` says.
    :param chunk_length: C.
    :param max_episode_steps: Control steps before truncation.
    :param init_states: The first split: ``"train"``, ``"selection"`` or ``"eval"``.
    :param seed: Seed until :meth:`reset` is given one; ``None``: from the operating system's entropy.
        ``np_random_seed`` is the present one.
    :param autoreset_mode: ``SAME_STEP``; ``NEXT_STEP``; or ``DISABLED`` (``reset(options={"reset_mask": ...})``).
    :param render_mode: ``None`` or ``"rgb_array"``.
    :param obs_stride: Also observe every s control steps inside a chunk, 1 <= s < C; ``None``: only at its end.
    :param train_episode_steps: Horizon of the training split, at most ``max_episode_steps``, or a list with one for
        each task; ``None``: the same.
    :param group_size: How often each training initial state is played, see
        :class:`~rlt_gym.core.episodes.EpisodeSequence`.
    :param hooks: ``intervention`` and ``critical_phase`` for :class:`~rlt_gym.workers.hooks.WorkerHooks`, or ``None``.
    :param sequence: Class of the sequence of episodes.
    :raises ValueError: A bad argument.
    """

    #: Gymnasium reads this before there is an environment, whose own metadata have more entries.
    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012
    per_member = ("task",)

    def __init__(
        self,
        num_envs: int,
        tasks: Sequence[Any],
        observation_space: spaces.Dict,
        robot: RobotSpec,
        chunk_length: int = 8,
        max_episode_steps: int = 300,
        init_states: str = "train",
        seed: int | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP,
        render_mode: str | None = None,
        obs_stride: int | None = None,
        train_episode_steps: int | Sequence[int] | None = None,
        group_size: int = 1,
        hooks: dict[str, Any] | None = None,
        sequence: type[EpisodeSequence] = EpisodeSequence,
    ):
        self.num_envs = checked_int("num_envs", num_envs, 1, 1024)
        self.tasks = list(tasks)
        self.robot = robot
        self.chunk_length = checked_int("chunk_length", chunk_length, 1, 100)
        if obs_stride is not None:
            if self.chunk_length == 1:
                raise ValueError("obs_stride needs chunks of 2 or more control steps, got chunk_length=1")
            checked_int("obs_stride", obs_stride, 1, self.chunk_length - 1)
        self.obs_stride = obs_stride
        #: Control steps inside a chunk at which it is observed, besides its end.
        self._inner_steps = () if obs_stride is None else tuple(range(obs_stride, self.chunk_length, obs_stride))
        self.max_episode_steps = checked_int("max_episode_steps", max_episode_steps, 1, 100_000)
        checked = None if seed is None else EpisodeSequence.checked_seed(seed)
        self._np_random, self._np_random_seed = seeding.np_random(checked)
        self.sequence = sequence(self.num_envs, len(self.tasks), init_states, self._np_random_seed, group_size)
        if train_episode_steps is not None:
            train_episode_steps = self.sequence.checked_horizon(train_episode_steps, self.max_episode_steps)
        self.train_episode_steps = train_episode_steps
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f"render_mode must be None or 'rgb_array', got {render_mode!r}")
        self.render_mode = render_mode
        try:
            mode = AutoresetMode(autoreset_mode)
        except ValueError as error:
            modes = ", ".join(f"{entry.name} ({entry.value!r})" for entry in AutoresetMode)
            raise ValueError(f"autoreset_mode must be one of {modes}, got {autoreset_mode!r}") from error
        #: As ``SyncVectorEnv`` has it.
        self.autoreset_mode = mode
        self.metadata = {
            "render_modes": ["rgb_array"],
            "render_fps": robot.control_frequency / self.chunk_length,
            "autoreset_mode": mode,
            "robot": robot,
            "n_tasks": 1 + max(task.task_id for task in self.tasks),
        }
        self.single_observation_space = observation_space
        self.single_action_space = spaces.Box(
            robot.action_low, robot.action_high, (self.chunk_length, robot.action_size), np.float32
        )
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

        self._hooks = {"intervention": None, "critical_phase": None, **(hooks or {})}
        #: What the hooks of each env reported last.
        self._reported: list[dict[str, Any]] = [{}] * self.num_envs
        #: What each env is playing; ``None`` before the first reset.
        self.episodes: list[Episode | None] = [None] * self.num_envs
        #: The actions of the last step.
        self._asked = np.zeros((self.num_envs, self.chunk_length, robot.action_size), dtype=np.float32)
        self._observations: list[Observation] = [{} for _ in range(self.num_envs)]
        self._dones = np.zeros(self.num_envs, dtype=bool)
        #: Environments that a list of episodes has left without one.
        self._idle: set[int] = set()
        #: Of a step that has begun: the environments that play nothing in it, the chunks of the others.
        self._begun: tuple[set[int], dict[int, np.ndarray]] | None = None
        #: How often the simulator of each env was replaced.
        self._restarts = np.zeros(self.num_envs, dtype=np.int64)

    # ------------------------------------------------------------------ what a subclass says

    def _start_episodes(self, envs: Sequence[int]) -> dict[int, tuple[Observation, dict[str, Any]]]:
        """
        Start the episodes ``self.episodes[env]``.

        :param envs: Indices of the environments; the others are not touched.
        :return: By environment, the first observation and what the hooks reported about it, see
            :meth:`rlt_gym.workers.hooks.WorkerHooks.begin_episode` ({} without hooks).
        """
        raise NotImplementedError

    def _play(self, chunks: dict[int, np.ndarray]) -> dict[int, Played]:
        """
        Play a chunk in every environment.

        :param chunks: By environment, float32 (k, d) in [-1, 1], already cut at the horizon.
        :return: By environment, what happened. One that is not there was lost; a new simulator waits for its episode.
        """
        raise NotImplementedError

    def _begin_play(self, chunks: dict[int, np.ndarray]) -> None:
        """
        Send the chunks of a step to the simulators, without waiting for them; by default nothing is done yet.

        :param chunks: As for :meth:`_play`.
        """

    def _end_play(self, chunks: dict[int, np.ndarray]) -> dict[int, Played]:
        """
        Wait until the simulators have played the chunks; by default they are played now.

        :param chunks: As for :meth:`_play`, those that :meth:`_begin_play` got.
        :return: As of :meth:`_play`.
        """
        return self._play(chunks)

    # ------------------------------------------------------------------ what it plays

    @property
    def init_states(self) -> str:
        """The present split."""
        return self.sequence.split

    @property
    def group_size(self) -> int:
        """How often each training initial state is played."""
        return self.sequence.group_size

    @property
    def init_state_counts(self) -> dict[str, int]:
        """How many initial states the sequences of the selection and evaluation sets have before they begin again."""
        return self.sequence.init_state_counts

    @property
    def worker_restarts(self) -> int:
        """How many simulators were replaced so far."""
        return int(self._restarts.sum())

    def _horizon(self, env: int) -> int:
        """
        Return the horizon of an environment's present episode.

        :param env: Index of the environment.
        :return: Control steps before truncation, unless a subclass overrides this method: the same for all in a
            held-out split, and for all of a task in practice.
        """
        if self.sequence.split == "train" and self.train_episode_steps is not None:
            steps = self.train_episode_steps
            if isinstance(steps, Sequence):
                steps = steps[self._episode(env).task_index]
            return min(steps, self.max_episode_steps)  # set_attr may have changed one of them
        return self.max_episode_steps

    def _episode(self, env: int) -> Episode:
        episode = self.episodes[env]
        assert episode is not None
        return episode

    def task(self, env: int) -> Any:
        """
        Return the task that an environment is playing.

        :param env: Index of the environment.
        :return: One of ``tasks``.
        """
        return self.tasks[self._episode(env).task_index]

    # ------------------------------------------------------------------ resets

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Infos]:
        """
        Begin new episodes in all environments, or in those that ``reset_mask`` selects.

        :param seed: Seed s of the training split's initial states; a list must be s, s + 1, ..., one per environment.
            ``None`` (or a list of it) keeps the present one.
        :param options: ``init_states`` switches the split; ``train_episode_steps`` sets the horizon of the training
            split from now on (a list: of each task); ``reset_mask`` (bool (num_envs,)) resets those that it selects,
            which go on with the sequence, also if it happens to select all of them; ``shard`` (k, n) leaves, from this
            full reset to the next one, only the episodes k, k + n, k + 2n, ... of the sequence, so that n environments
            can divide an evaluation among them; ``turns`` lets each environment leave out that many episodes, to go on
            where others stopped; ``episodes``, a list of (task_id, initial state), takes the sequence's place:
            whichever environment is free plays the next one.
            Once all are given out, an environment without one idles: it keeps its last observation, and its actions
            are ignored (reward 0, both flags false, ``chunk_steps`` 0). Others, which libraries pass to every
            environment (Minari's ``minari_autoseed``), are ignored with a warning.
        :return: Observations and infos of all environments; where a part is reset, infos of that part.
        :raises ValueError: A bad seed or option; the environments are untouched.
        :raises gymnasium.error.ClosedEnvironmentError: The environment was closed.
        """
        self._check_open()
        ids = [task.task_id for task in self.tasks]
        mask, split, shard, turns, episodes, horizon = self.sequence.checked_options(
            options, self.max_episode_steps, ids
        )
        if not mask.all():
            self._check_no_step("reset")
        if any(episode is None for env, episode in enumerate(self.episodes) if not mask[env]):
            raise ValueError(f"reset_mask must select all environments in the first reset, got {mask!r}")
        seed = self.sequence.base_seed(seed)
        whole = (options or {}).get("reset_mask") is None or None in self.episodes
        anew = whole or any(option is not None for option in (split, seed, shard, turns, episodes))
        super().reset(seed=seed)
        self._begun = None
        if horizon is not None:
            self.train_episode_steps = horizon
        if mask.all() and anew:
            self.sequence.restart(split, seed, shard)
            self._idle.clear()
            self.sequence.go_on(turns)
            if episodes is not None:
                self.sequence.play_list(episodes)
        elif seed is not None:
            self.sequence.reseed(seed)
        envs = np.flatnonzero(mask).tolist()
        with self._all_or_none():
            self._begin_episodes(envs)
        infos: Infos = {}
        for env in envs:
            infos = self._add_info(infos, self._info(env), env)
        return self._batch(), infos

    def set_task_weights(self, weights: Sequence[int]) -> None:
        """
        Let some tasks have more training episodes than others, from the next episode on.

        :param weights: How many episodes of a round each of :attr:`tasks` has, see
            :meth:`~rlt_gym.core.episodes.EpisodeSequence.set_task_weights`.
        :raises ValueError: Other than one integer >= 0 per task, or only zeros; nothing changes.
        """
        self.sequence.set_task_weights(weights)

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """
        Demand a reset after an interrupt in the midst of a reset or a step.

        Simulators may then have played what nobody was told, for example a chunk before Ctrl-C.
        """
        try:
            yield
        except BaseException:
            self.episodes = [None] * self.num_envs
            raise

    def _begin_episodes(self, envs: Sequence[int]) -> None:
        begun = []
        for env in envs:
            episode = self.sequence.next(env)
            if episode is None:  # of a list
                self._idle.add(env)
                self._dones[env] = False
                if self.episodes[env] is not None:
                    continue
                episode = replace(self._episode(envs[0]))  # it has never played: something must be seen of it
            self.episodes[env] = episode
            episode.noise_seed = self.sequence.noise_seed(episode, self.tasks[episode.task_index].task_id)
            begun.append(env)
        for env, (observation, reported) in self._start_episodes(begun).items() if begun else ():
            self._observations[env], self._reported[env], self._dones[env] = observation, reported, False

    # ------------------------------------------------------------------ steps

    def _checked_actions(self, actions: Any) -> np.ndarray:
        array = real_chunks(actions, (self.num_envs, self.chunk_length, self.robot.action_size))
        return np.clip(array, self.robot.action_low, self.robot.action_high).astype(np.float32)

    def step(self, actions: Any) -> tuple[Observation, np.ndarray, np.ndarray, np.ndarray, Infos]:
        """
        Play one chunk in every environment.

        :param actions: float (num_envs, C, d); clipped to [-1, 1].
        :return: Observations, rewards, terminations, truncations, infos.
        :raises ValueError: Wrong shape or non-finite values; the environments are untouched.
        :raises RuntimeError: An environment must be reset first.
        :raises gymnasium.error.ClosedEnvironmentError: The environment was closed.
        """
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """
        Begin a step: simulators in other processes play while the caller does something else.

        Until :meth:`step_wait` nothing else may be asked of the environment. A full :meth:`reset` gives the step up.

        :param actions: As for :meth:`step`, which also says what is raised.
        :raises gymnasium.error.AlreadyPendingCallError: A step has begun already.
        """
        self._check_open()
        self._check_no_step("step_async")
        array = self._checked_actions(actions)
        if any(episode is None for episode in self.episodes):
            raise RuntimeError("call reset() before step()")
        if self._dones.any() and self.autoreset_mode == AutoresetMode.DISABLED:
            raise RuntimeError("a finished environment must be reset before it is stepped (autoreset is disabled)")
        self._asked, self._reported = array, [{}] * self.num_envs
        with self._all_or_none():
            begun = np.flatnonzero(self._dones).tolist()  # under NEXT_STEP; their actions are ignored
            if begun:
                self._begin_episodes(begun)
            resting = self._idle.union(begun)
            left = {env: self._horizon(env) - self._episode(env).steps for env in set(range(self.num_envs)) - resting}
            # set_attr may have set a horizon that has passed: nothing is played then
            chunks = {env: array[env, : max(0, left[env])] for env in sorted(left)}
            if chunks:
                self._begin_play(chunks)
            self._begun = (resting, chunks)

    def step_wait(self) -> tuple[Observation, np.ndarray, np.ndarray, np.ndarray, Infos]:
        """
        Wait for the end of the step that :meth:`step_async` began.

        :return: As of :meth:`step`.
        :raises gymnasium.error.NoAsyncCallError: No step has begun.
        """
        self._check_open()
        if self._begun is None:
            raise NoAsyncCallError("call step_async() before step_wait()", "step_wait")
        with self._all_or_none():
            return self._finish_step()

    def _finish_step(self) -> tuple[Observation, np.ndarray, np.ndarray, np.ndarray, Infos]:
        """Wait for the simulators, and tell what they played."""
        assert self._begun is not None
        (resting, chunks), self._begun = self._begun, None
        played = self._judged(self._end_play(chunks)) if chunks else {}
        rewards = np.zeros(self.num_envs, dtype=np.float64)
        terminations = np.zeros(self.num_envs, dtype=bool)
        truncations = np.zeros(self.num_envs, dtype=bool)
        step_infos = []
        for env in range(self.num_envs):
            if env in resting:
                step_infos.append(self._info(env))
                continue
            if env not in played:
                # Play this episode again, so that an evaluation misses none of its states.
                self.sequence.repeat(env)
                truncations[env] = True
                step_infos.append(self._info(env, restarted=True))
                continue
            result = played[env]
            self._observations[env], self._reported[env] = result.observation, result.reported
            self._episode(env).steps += len(result.step_rewards)
            rewards[env] = result.step_rewards.sum()
            terminations[env] = result.success
            truncations[env] = not result.success and self._episode(env).steps >= self._horizon(env)
            step_infos.append(self._info(env, result))
        inner = inner_info(
            self._observations[0],
            (self.num_envs, len(self._inner_steps)),
            {env: result.inner for env, result in played.items()},
        )
        done = terminations | truncations
        infos: Infos = {}
        if self.autoreset_mode == AutoresetMode.SAME_STEP and done.any():
            infos = self._begin_anew(done, step_infos)
        else:
            self._dones = done.copy()
        for env, info in enumerate(step_infos):
            infos = self._add_info(infos, info, env)
        return self._batch(), rewards, terminations, truncations, {**infos, **inner}

    def _begin_anew(self, done: np.ndarray, step_infos: list[dict[str, Any]]) -> Infos:
        """Start the next episodes of those that ended; ``step_infos`` then has the new ones' infos."""
        finished = np.flatnonzero(done).tolist()
        final_obs = np.full(self.num_envs, None, dtype=object)
        final_info: Infos = {}
        frames = {} if self.render_mode is None else self._draw(finished)  # a reset replaces the last picture
        for env in finished:
            final_obs[env] = self._observations[env]
            if self.render_mode is not None:
                step_infos[env]["final_frame"] = frames[env]
            final_info = self._add_info(final_info, step_infos[env], env)
        self._begin_episodes(finished)
        for env in finished:
            step_infos[env] = self._info(env, restarted=step_infos[env]["worker_restarted"])
        return {"final_obs": final_obs, "_final_obs": done.copy(), "final_info": final_info, "_final_info": done.copy()}

    def _info(self, env: int, played: Played | None = None, restarted: bool = False) -> dict[str, Any]:
        task = self.task(env)
        film = {"inner_frames": list(played.frames)} if played is not None and env in self._filmed else {}
        return (
            film
            | self._judge_info(played)
            | chunk_info(
                (self.chunk_length, self.robot.action_size),
                self._episode(env),
                task.task_id,
                task.instruction,
                self._hooks,
                self._reported[env],
                step_rewards=None if played is None else played.step_rewards,
                success=played is not None and played.success,
                actions=None if played is None else self._asked[env],
                restarted=restarted,
                restarts=self._restarts[env],
            )
        )

    def _batch(self) -> Observation:
        return {key: np.stack([obs[key] for obs in self._observations]) for key in self._observations[0]}
