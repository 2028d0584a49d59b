"""The process that owns one LIBERO simulator.

Messages are ``(number, command, arguments)`` on a socket of their own; answers are ``(number, "ok", value)`` or
``(number, "error", traceback)``. Pictures go through shared memory. Whatever libraries print goes to a log, of which
the environment shows the end when something fails. The process ends with its owner (:mod:`rlt_gym.workers.watchdog`).

It imports LIBERO, numpy and modules of this package that need nothing else, and may run under another interpreter
(:mod:`rlt_gym.workers.launch`).
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import socket
import traceback
from typing import Any

import numpy as np

from rlt_gym.libero.suites.tasks import episode_seed
from rlt_gym.libero.worker.libero_import import prepare_libero
from rlt_gym.workers.channel import FRAME_SIZE, Channel, SharedPictures
from rlt_gym.workers.hooks import WorkerHooks
from rlt_gym.workers.watchdog import watch

#: Six pose deltas and the gripper.
ACTION_SIZE = 7

#: The log of what libraries print starts over when it has grown beyond this.
_LOG_BYTES = 4 << 20


class Worker:
    """
    Answers the vector environment's messages. Keeps the simulator of each task it has played, since a model takes
    seconds to build, up to ``resident`` of them (some 300 MB each).

    :param suite: Name of the suite; ``assets_path``: folder of assets; ``image_size``, ``render``: as in the simulator.
    :param pictures: Where observations are left.
    :param simulators: Simulators built before, by task.
    :param hooks: Of :func:`~rlt_gym.core.hooks.check_hook`, by the arguments of :class:`WorkerHooks`.
    """

    def __init__(
        self,
        suite: str,
        assets_path: str,
        image_size: int,
        render: str,
        pictures: SharedPictures,
        resident: int = 3,
        simulators: dict[int, Any] | None = None,
        hooks: dict[str, Any] | None = None,
    ):
        prepare_libero(assets_path)
        from rlt_gym.libero.worker import simulator  # after prepare_libero, which silences these imports

        self._make = lambda task_id: simulator.LiberoSimulator(suite, task_id, image_size, render)
        self._pictures = pictures
        self._simulators: dict[int, Any] = dict(simulators or {})
        self._resident = resident
        self._current: Any = None
        self._hooks = WorkerHooks(ACTION_SIZE, **(hooks or {}))

    def _select(self, task_id: int) -> None:
        if task_id not in self._simulators:
            if len(self._simulators) >= self._resident:
                self._simulators.pop(next(iter(self._simulators))).close()
            self._simulators[task_id] = self._make(task_id)
        chosen = self._simulators[task_id]
        if self._current is not None and self._current is not chosen:
            self._current.close()  # one GL context alive at a time
        self._current = chosen

    def _leave(self, observation: dict[str, np.ndarray], slot: int = 0) -> dict[str, np.ndarray]:
        # A lost GL context raises nothing, it draws nothing; a scene seen from above is never of one colour.
        picture = observation["agentview"]
        if picture.min() == picture.max():
            raise RuntimeError("the picture is empty: the GL context is lost")
        return self._pictures.put(observation, slot)

    def build(self, task_id: int) -> None:
        """Build a task's simulator ahead of its first episode."""
        self._select(task_id)

    def reset(self, task_id: int, split: str, index: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Start an episode; leaves its first observation in slot 0 and returns what the hooks say as well."""
        self._select(task_id)
        observation = self._current.reset(split, index)
        seed = episode_seed(self._current.task, split, index)
        # What a policy can do is measured without help.
        said = self._hooks.begin_episode(self._current, seed, takeover=split == "train")
        return self._leave(observation), said

    def step(
        self, actions: np.ndarray, observe_at: tuple[int, ...] = ()
    ) -> tuple[dict[str, np.ndarray], np.ndarray, bool, list[dict[str, np.ndarray]], dict[str, Any]]:
        """
        Play a chunk until success; ``actions`` (k, 7) is already cut at the horizon. Leaves the last observation in
        slot 0 and those of the steps ``observe_at`` in slots 1, 2, ...
        """
        result = self._current.step_chunk(actions, observe_at=observe_at, choose=self._hooks.choose)
        said = self._hooks.end_chunk()
        inner = [self._leave(observation, slot) for slot, observation in enumerate(result.inner, start=1)]
        return self._leave(result.observation), result.step_rewards, result.success, inner, said

    def render(self) -> None:
        """Leave an upright picture of the scene in the frame's slot."""
        self._pictures.frame[:] = self._current.pictures({"frame": "agentview"}, FRAME_SIZE)["frame"][::-1]

    def call(self, function: str, task_id: int, arguments: dict[str, Any]) -> Any:
        """
        Run ``module:name`` on the task's simulator, inside this process.

        :param function: A function of this package, whose first parameter is the :class:`LiberoSimulator`.
        """
        module, name = function.split(":")
        if module.split(".")[0] != "rlt_gym":
            raise ValueError(f"A worker only calls functions of rlt_gym, got {function!r}")
        self._select(task_id)
        return getattr(importlib.import_module(module), name)(self._current, **arguments)


def _trim_log() -> None:
    if os.fstat(2).st_size > _LOG_BYTES:
        os.ftruncate(2, 0)


def serve(
    channel: Channel, pictures: SharedPictures, settings: dict[str, Any], simulators: dict[int, Any] | None = None
) -> None:
    """
    Answer messages until the other end closes.

    :param settings: Keyword arguments of :class:`Worker`.
    :param simulators: Simulators built before, by task.
    """
    worker: Worker | None = None
    while True:
        try:
            number, command, arguments = channel.receive()
        except (EOFError, OSError):
            return
        try:
            if worker is None:
                worker = Worker(pictures=pictures, simulators=simulators, **settings)
            answer = (number, "ok", getattr(worker, command)(**arguments))
        except Exception:
            answer = (number, "error", traceback.format_exc())
        try:
            channel.send(answer)
            _trim_log()
        except OSError:
            return


def run(
    channel_fd: int,
    lifeline_fd: int,
    pictures_fd: int,
    log_fd: int,
    owner: int,
    slots: int,
    settings: dict[str, Any],
    simulators: dict[int, Any] | None = None,
) -> None:
    """
    The whole life of a worker process; does not return.

    :param channel_fd: This end of the socket for messages; ``lifeline_fd``: of the one that tells of the owner's end.
    :param pictures_fd: Memory for :class:`SharedPictures` with ``slots`` slots.
    :param log_fd: File for stdout and stderr.
    :param owner: Id of the process that owns the environment.
    :param settings: As for :func:`serve`.
    """
    try:
        for stream in (1, 2):
            os.dup2(log_fd, stream)
        faulthandler.enable()  # a crash in MuJoCo or GL says where
        # Ctrl-C reaches the whole process group; the owner decides what happens to the workers.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        watch(lifeline_fd, owner)
        pictures = SharedPictures(pictures_fd, settings["image_size"], slots)
        serve(Channel(socket.socket(fileno=channel_fd)), pictures, settings, simulators)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)  # GL libraries raise in their destructors at a regular exit


def main(argument: str) -> None:
    """``launch.py rlt_gym.libero.worker.worker JSON`` with the arguments of :func:`run`."""
    run(**json.loads(argument))
