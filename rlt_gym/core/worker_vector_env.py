"""Chunked vector environments whose simulators live in supervised worker processes."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium import spaces

from rlt_gym.core.chunk_vector_env import ChunkVectorEnv, Observation, Played
from rlt_gym.core.hooks import check_hook, check_one_env
from rlt_gym.core.robot_spec import RobotSpec
from rlt_gym.workers.backend import WorkerSettings
from rlt_gym.workers.memory import available_memory
from rlt_gym.workers.named import checked_int
from rlt_gym.workers.options import WorkerOptions
from rlt_gym.workers.pool import WorkerError, WorkerFailure, WorkerPool

#: Side of the frames of ``render()``.
FRAME_SIZE = 256

#: Most tasks whose simulators a worker keeps.
_RESIDENT = 10

#: Arguments of the base class that are passed on as they are.
_CHUNK_SETTINGS = (
    "init_states", "seed", "autoreset_mode", "render_mode", "obs_stride", "train_episode_steps", "group_size"
)  # fmt: skip


def observation_space(robot: RobotSpec, image_size: int) -> spaces.Dict:
    """
    Make the space of a robot's observations.

    :param robot: The robot.
    :param image_size: Side S of the pictures in pixels.
    :return: For each camera uint8 (S, S, 3), and ``proprio`` float32.
    """
    picture = spaces.Box(0, 255, (image_size, image_size, 3), np.uint8)
    proprio = spaces.Box(-np.inf, np.inf, (robot.proprio_size,), np.float32)
    return spaces.Dict([*((key, deepcopy(picture)) for key in robot.camera_keys), ("proprio", proprio)])


class WorkerVectorEnv(ChunkVectorEnv):
    """
    Steps N simulators together, each in a process that gets one message per chunk.

    A subclass says what is simulated: tasks, robot and the backend that makes simulators in the workers. The
    environment supervises its workers. A worker that dies, hangs, raises or loses its GL context is replaced, and its
    episode ends as that of a lost simulator.

    :param simulator: What error messages call the simulator.
    :param backend: Of :func:`~rlt_gym.workers.backend.backend_settings`: what makes simulators in the workers.
    :param task_bytes: Bytes of memory to reckon with for each task that a worker keeps.
    :param num_envs: N.
    :param tasks: As for :class:`~rlt_gym.core.chunk_vector_env.ChunkVectorEnv`.
    :param robot: Likewise; pictures of its first camera stand in for the frames of a lost simulator.
    :param chunk_length: C.
    :param max_episode_steps: Control steps before truncation.
    :param image_size: Side S of the pictures in pixels, 16 to 512.
    :param intervention: Who may take over, ``"module:Class"`` or ``"module:function"``, see
        :mod:`rlt_gym.workers.hooks`; ``None``: nobody.
    :param intervention_kwargs: Keyword arguments of the class or function.
    :param critical_phase: Predicate ``"module:function"``; ``None``: none.
    :param critical_phase_kwargs: Keyword arguments of the predicate.
    :param settings: ``init_states``, ``seed``, ``autoreset_mode``, ``render_mode``, ``obs_stride``,
        ``train_episode_steps`` and ``group_size``, as for :class:`~rlt_gym.core.chunk_vector_env.ChunkVectorEnv`, and
        the fields of :class:`~rlt_gym.workers.options.WorkerOptions`.
    :raises ValueError: A bad argument, before any process starts.
    :raises TypeError: An unknown argument.
    :raises WorkerError: No worker can be started.
    """

    plays_on = True

    def __init__(
        self,
        simulator: str,
        backend: dict[str, Any],
        task_bytes: int,
        num_envs: int,
        tasks: Sequence[Any],
        robot: RobotSpec,
        chunk_length: int,
        max_episode_steps: int,
        image_size: int = 128,
        intervention: str | None = None,
        intervention_kwargs: dict[str, Any] | None = None,
        critical_phase: str | None = None,
        critical_phase_kwargs: dict[str, Any] | None = None,
        **settings: Any,
    ):
        given = {key: settings.pop(key) for key in _CHUNK_SETTINGS if key in settings}
        options = WorkerOptions.checked(type(self).__name__, settings)
        hooks = {
            "intervention": check_hook("intervention", intervention, intervention_kwargs, 3),
            "critical_phase": check_hook("critical_phase", critical_phase, critical_phase_kwargs, 1, False),
        }
        space = observation_space(robot, checked_int("image_size", image_size, 16, 512))
        super().__init__(num_envs, tasks, space, robot, chunk_length, max_episode_steps, hooks=hooks, **given)
        check_one_env(hooks["intervention"], self.num_envs)
        resident_tasks = options.resident_tasks or _resident_tasks(len(self.tasks), self.num_envs, task_bytes)
        #: Envs whose simulator cannot be asked until their next episode starts.
        self._lost: set[int] = set()
        #: Those that could not be sent the chunk of the present step.
        self._unasked: dict[int, WorkerFailure] = {}
        worker: WorkerSettings = {
            "name": simulator,
            "backend": backend,
            "pictures": {key: (image_size, image_size, 3) for key in robot.camera_keys},
            "frame_size": FRAME_SIZE,
            "resident": resident_tasks,
            "hooks": {"action_size": robot.action_size, **self._hooks},
        }
        firsts = [self.sequence.episode(self.sequence.number(env, 0)) for env in range(self.num_envs)]
        first_tasks = [self.tasks[episode.task_index].task_id for episode in firsts]
        ahead = list(dict.fromkeys(first_tasks))[:resident_tasks]
        self._pool = WorkerPool(
            self.num_envs,
            options.plan().with_gl(),
            worker,
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
            raise WorkerError(f"{simulator} workers do not start. {next(iter(failures.values()))}")

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

    def _begin_play(self, chunks: dict[int, np.ndarray]) -> None:
        self._unasked = self._pool.begin(self._questions(chunks))

    def _questions(self, chunks: dict[int, np.ndarray]) -> dict[int, tuple[str, dict[str, Any]]]:
        asked: dict[str, Any] = {"observe_at": self._inner_steps, "until_success": self.until_success}
        return {
            env: ("step", {"actions": chunk, "film": env in self._filmed, **asked})
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
            env: self._pool.clients[env].pictures.frame.copy() if env in answers else self._frame_of(env)
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

    def _frame_of(self, env: int) -> np.ndarray:
        """Take an upright frame from an observation; the simulator that could draw it is gone."""
        camera = self.robot.cameras[0]
        picture = self._observations[env][camera.key][:: -1 if camera.upside_down else 1]
        index = np.arange(FRAME_SIZE) * len(picture) // FRAME_SIZE
        return picture[index][:, index]


def _resident_tasks(num_tasks: int, num_envs: int, task_bytes: int) -> int:
    """How many tasks each worker may keep in half of the memory that is free."""
    return max(1, min(num_tasks, _RESIDENT, available_memory() // 2 // (num_envs * task_bytes)))
