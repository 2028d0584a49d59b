"""LIBERO-v0: a Gymnasium vector environment whose action is a chunk of control steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from rlt_gym.core.chunk_vector_env import ChunkVectorEnv, Observation, Played
from rlt_gym.core.hooks import check_hook, check_one_env
from rlt_gym.libero.assets import resolve_assets
from rlt_gym.libero.robot import PANDA
from rlt_gym.libero.suites.tasks import SUITE_HORIZONS, TRAIN_HORIZONS, episode_seed, get_tasks
from rlt_gym.libero.worker.perturbations import check_perturbations
from rlt_gym.workers.backend import WorkerSettings, backend_settings
from rlt_gym.workers.memory import available_memory
from rlt_gym.workers.named import checked_int
from rlt_gym.workers.options import WorkerOptions
from rlt_gym.workers.pool import WorkerError, WorkerFailure, WorkerPool

RENDER_QUALITIES = ("exact", "fast", "stock")
#: Side of the frames of ``render()``.
FRAME_SIZE = 256

#: Most tasks whose simulators a worker keeps, and bytes to reckon with for each.
_RESIDENT, _RESIDENT_BYTES = 10, 400 << 20


def _observation_space(image_size: int) -> spaces.Dict:
    picture = spaces.Box(0, 255, (image_size, image_size, 3), np.uint8)
    proprio = spaces.Box(-np.inf, np.inf, (PANDA.proprio_size,), np.float32)
    return spaces.Dict([*((key, deepcopy(picture)) for key in PANDA.camera_keys), ("proprio", proprio)])


def _resident_tasks(num_tasks: int, num_envs: int) -> int:
    """How many tasks each worker may keep in half of the memory that is free."""
    return max(1, min(num_tasks, _RESIDENT, available_memory() // 2 // (num_envs * _RESIDENT_BYTES)))


def _frame_of(observation: dict[str, np.ndarray]) -> np.ndarray:
    """Take an upright frame from an observation; the simulator that could draw it is gone."""
    picture = observation["agentview"][::-1]
    index = np.arange(FRAME_SIZE) * len(picture) // FRAME_SIZE
    return picture[index][:, index]


class LiberoVectorEnv(ChunkVectorEnv):
    """
    Steps N LIBERO simulators together, each in a process that gets one message per chunk.

    The observation of each env has ``agentview`` and ``wrist``, uint8 (S, S, 3), upside down as LIBERO gives them, and
    ``proprio``, float32 (8,): gripper position (m), its axis-angle orientation (rad), finger positions (m).
    The action is float32 (C, 7) in [-1, 1], C control steps of 50 ms: six OSC pose deltas and the gripper (-1 opens, +1
    closes). The reward is 1 at success. :class:`~rlt_gym.core.chunk_vector_env.ChunkVectorEnv` describes the infos and
    the ends of chunks and episodes, :class:`~rlt_gym.core.episodes.EpisodeSequence` the order of tasks and initial
    states.

    The environment supervises its workers. A worker that dies, hangs, raises or loses its GL context is replaced, and
    its episode ends as that of a lost simulator.

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
    :param image_size: Side S of the pictures in pixels, at most 512.
    :param render: ``"exact"`` (LIBERO's pictures bit for bit), ``"fast"`` (cheap robot, no multisampling) or
        ``"stock"`` (the pictures of ``"exact"``, drawn without any shortcut, to find the cause of a wrong pixel).
    :param max_episode_steps: Control steps before truncation, in every split; ``None``: the suite's horizon
        (:data:`~rlt_gym.libero.suites.tasks.SUITE_HORIZONS`), and in the training split its shorter one.
    :param train_episode_steps: Control steps before truncation in the training split, at most ``max_episode_steps``,
        which turns the difference off; ``None``: :data:`~rlt_gym.libero.suites.tasks.TRAIN_HORIZONS` of the suite, or
        ``max_episode_steps`` where that is given.
    :param render_mode: ``None`` or ``"rgb_array"`` (:meth:`render` gives upright 256-pixel frames).
    :param seed: Seed until :meth:`reset` is given one; ``None``: drawn from the operating system's entropy.
        ``np_random_seed`` is the present one.
    :param obs_stride: Also observe every s control steps inside a chunk, 1 <= s < C; ``None``: only at its end.
    :param intervention: Who may take over, ``"module:Class"`` or ``"module:function"``, see
        :mod:`rlt_gym.libero.interventions`.
    :param intervention_kwargs: Keyword arguments of the class or function.
    :param critical_phase: Predicate ``"module:function"``, see :mod:`rlt_gym.libero.critical_phase`.
    :param critical_phase_kwargs: Keyword arguments of the predicate.
    :param autoreset_mode: ``SAME_STEP``; ``NEXT_STEP``; or ``DISABLED`` (``reset(options={"reset_mask": ...})``).
    :param compiled: Whether control steps run through the compiled loop or through robosuite's own, which gives the
        same states some four times slower, to find the cause of a wrong state.
    :param perturbations: Strengths (0 to 2) of what changes from episode to episode in all splits, by kind: ``light``,
        ``color``, ``camera``, ``friction``, ``placement``, see :mod:`rlt_gym.libero.worker.perturbations`; ``None``:
        nothing does. ``info["perturbation_seed"]`` has the seed from which an episode's changes follow.
    :param worker_options: ``worker_start``, ``worker_python``, ``worker_timeout``, ``build_timeout``,
        ``max_restarts`` and ``resident_tasks`` (``None``: up to 10, as memory allows), see
        :class:`~rlt_gym.workers.options.WorkerOptions`.
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
        seed: int | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP,
        obs_stride: int | None = None,
        intervention: str | None = None,
        intervention_kwargs: dict[str, Any] | None = None,
        critical_phase: str | None = None,
        critical_phase_kwargs: dict[str, Any] | None = None,
        group_size: int = 1,
        train_episode_steps: int | None = None,
        compiled: bool = True,
        perturbations: Mapping[str, float] | None = None,
        **worker_options: Any,
    ):
        strengths = check_perturbations(perturbations)
        options = WorkerOptions.checked(type(self).__name__, worker_options)
        hooks = {
            "intervention": check_hook("intervention", intervention, intervention_kwargs, 3),
            "critical_phase": check_hook("critical_phase", critical_phase, critical_phase_kwargs, 1, False),
        }
        tasks = get_tasks(suite, task_ids)
        if max_episode_steps is None and train_episode_steps is None:
            train_episode_steps = TRAIN_HORIZONS[suite]
        image_size = checked_int("image_size", image_size, 16, 512)
        if render not in RENDER_QUALITIES:
            raise ValueError(f"render must be one of {RENDER_QUALITIES}, got {render!r}")
        if not isinstance(compiled, bool):
            raise ValueError(f"compiled must be True or False, got {compiled!r}")
        super().__init__(
            num_envs,
            tasks,
            _observation_space(image_size),
            PANDA,
            chunk_length,
            SUITE_HORIZONS[suite] if max_episode_steps is None else max_episode_steps,
            init_states,
            seed,
            autoreset_mode,
            render_mode,
            obs_stride,
            train_episode_steps,
            group_size,
            hooks,
        )
        self.metadata["n_tasks"] = len(get_tasks(suite))
        self.metadata["render"] = render
        self.metadata["perturbations"] = strengths
        check_one_env(hooks["intervention"], self.num_envs)
        resident_tasks = options.resident_tasks or _resident_tasks(len(self.tasks), self.num_envs)
        self.assets = resolve_assets(assets)
        #: Envs whose simulator cannot be asked until their next episode starts.
        self._lost: set[int] = set()
        #: Those that could not be sent the chunk of the present step.
        self._unasked: dict[int, WorkerFailure] = {}
        settings: WorkerSettings = {
            "name": "LIBERO",
            "backend": backend_settings(
                "rlt_gym.libero.worker.backend:LiberoBackend",
                suite=suite,
                assets_path=str(self.assets.path),
                image_size=image_size,
                render=render,
                compiled=compiled,
                perturbations=strengths,
            ),
            "pictures": {key: (image_size, image_size, 3) for key in ("agentview", "wrist")},
            "frame_size": FRAME_SIZE,
            "resident": resident_tasks,
            "hooks": {"action_size": PANDA.action_size, **self._hooks},
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
            float(options.build_timeout),
        )
        self._restarts = self._pool.restarts  # it counts
        # Build the first tasks side by side. A restart does not mend what fails here.
        builds = {env: ("build", {"task_id": task}) for env, task in enumerate(first_tasks)}
        _, failures = self._pool.ask(builds, building=True)
        if failures:
            self.close_extras()
            raise WorkerError(f"LIBERO workers do not start. {next(iter(failures.values()))}")

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers, one per env."""
        return [client.pid for client in self._pool.clients]

    # ------------------------------------------------------------------ what the base class asks for

    def _start_episodes(self, envs: Sequence[int]) -> dict[int, tuple[Observation, dict[str, Any]]]:
        started: dict[int, tuple[Observation, dict[str, Any]]] = {}
        pending = list(envs)
        while pending:
            answers, failures = self._pool.ask({env: ("reset", self._reset_arguments(env)) for env in pending})
            for env, (rest, reported) in answers.items():
                started[env] = self._pool.clients[env].pictures.take(rest, 0), reported
                self._lost.discard(env)
            for env, failure in failures.items():
                self._pool.restart(env, failure)
            pending = list(failures)
        return started

    def _reset_arguments(self, env: int) -> dict[str, Any]:
        index = self._episode(env).init_index
        return {"task_id": self.task(env).task_id, "split": self.init_states, "index": index}

    def _info(self, env: int, played: Played | None = None, restarted: bool = False) -> dict[str, Any]:
        info = super()._info(env, played, restarted)
        if self.metadata["perturbations"]:
            task: Any = self.task(env)
            info["perturbation_seed"] = episode_seed(task, self.init_states, self._episode(env).init_index)
        return info

    def _begin_play(self, chunks: dict[int, np.ndarray]) -> None:
        self._unasked = self._pool.begin(self._questions(chunks))

    def _questions(self, chunks: dict[int, np.ndarray]) -> dict[int, tuple[str, dict[str, Any]]]:
        return {
            env: ("step", {"actions": chunk, "observe_at": self._inner_steps, "film": env in self._filmed})
            for env, chunk in chunks.items()
            if env not in self._lost
        }

    def _end_play(self, chunks: dict[int, np.ndarray]) -> dict[int, Played]:
        answers, failures = self._pool.finish(self._questions(chunks), self._unasked)
        self._replace(failures)
        return {env: self._played(env, answer) for env, answer in answers.items()}

    def _played(self, env: int, answer: tuple[Any, ...]) -> Played:
        """Read a worker's answer to a chunk, and the pictures that it left in shared memory."""
        rest, step_rewards, success, inner, reported, frames = answer
        pictures = self._pool.clients[env].pictures
        observations = [pictures.take(inner_rest, slot) for slot, inner_rest in enumerate(inner, start=1)]
        return Played(pictures.take(rest, 0), step_rewards, success, observations, reported, frames)

    def _draw(self, envs: Sequence[int]) -> dict[int, np.ndarray]:
        """Draw upright frames of 256 pixels; an env that cannot draw any more loses its episode in the next step."""
        answers, failures = self._pool.ask({env: ("render", {}) for env in envs if env not in self._lost})
        self._replace(failures)
        return {
            env: self._pool.clients[env].pictures.frame.copy() if env in answers else _frame_of(self._observations[env])
            for env in envs
        }

    def _replace(self, failures: dict[int, WorkerFailure]) -> None:
        """Replace the workers that broke; the new ones wait for their first episode."""
        for env, failure in failures.items():
            self._pool.restart(env, failure)
            self._lost.add(env)

    # ------------------------------------------------------------------ others

    def call_workers(self, function: str, arguments: Sequence[dict[str, Any]]) -> list[Any]:
        """
        Run a function ``module:name`` of this package on the simulators, e.g. to record a scripted expert.

        The episodes that the simulators were playing are lost: call :meth:`reset` before the next :meth:`step`. A call
        may play a whole episode, so it may take ten times ``worker_timeout``.

        :param function: Its first parameter is the worker's simulator.
        :param arguments: One dict per worker used (at most ``num_envs``): ``task_id`` and ``arguments``.
        :return: What the function returned, in the order of ``arguments``.
        :raises WorkerError: The function raised, or a worker died; those that did are replaced.
        """
        self._check_no_step("call_workers")
        answers, failures = self._pool.ask(
            {env: ("call", {"function": function, **entry}) for env, entry in enumerate(arguments[: self.num_envs])},
            patience=10.0,
        )
        self._replace(failures)
        if failures:
            raise WorkerError(str(next(iter(failures.values()))))
        return [answers[env] for env in sorted(answers)]

    def close_extras(self, **kwargs: Any) -> None:
        """
        End the workers. ``close()`` is idempotent.

        :param kwargs: Ignored; Gymnasium passes the arguments of ``close``.
        """
        if hasattr(self, "_pool"):
            self._pool.close()
