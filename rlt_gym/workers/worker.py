"""The process that owns the simulators of one environment.

Messages are ``(number, command, arguments)`` on a separate socket; answers are ``(number, "ok", value)`` or
``(number, "error", traceback)``. Pictures go through shared memory. Whatever libraries print goes to a log, of which
the environment shows the end when something fails. The process ends with its owner (:mod:`rlt_gym.workers.watchdog`).

It imports numpy, the backend that its settings name (:mod:`rlt_gym.workers.backend`) and modules of this package that
need nothing else, and may run under another interpreter (:mod:`rlt_gym.workers.launch`).
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

from rlt_gym.workers.backend import Choose, Simulator, WorkerSettings, load_backend
from rlt_gym.workers.channel import Channel
from rlt_gym.workers.hooks import WorkerHooks
from rlt_gym.workers.shared_memory import SharedPictures
from rlt_gym.workers.watchdog import watch

#: The log of what libraries print starts over when it has grown beyond this.
_LOG_BYTES = 4 << 20


class Worker:
    """
    Answers the vector environment's messages.

    It keeps the simulator of each task that it has played, since a model takes seconds to build, up to ``resident`` of
    them (some 300 MB each for LIBERO). Simulators that a zygote built before do not count until they are used, since
    their memory is the zygote's.

    :param settings: What the owner says, see :class:`~rlt_gym.workers.backend.WorkerSettings`.
    :param pictures: Where observations are left.
    :param simulators: Simulators built before, by task; those that are used are taken out.
    """

    def __init__(
        self, settings: WorkerSettings, pictures: SharedPictures, simulators: dict[int, Simulator] | None = None
    ):
        self._backend = load_backend(settings["backend"])
        self._pictures = pictures
        #: Those that have played here, the oldest first.
        self._simulators: dict[int, Simulator] = {}
        # The dict itself, not a copy: what is dropped here must not be kept by those who handed it over.
        self._inherited = {} if simulators is None else simulators
        self._resident = settings["resident"]
        self._current: Any = None
        self._hooks = WorkerHooks(**settings["hooks"])

    def _select(self, task_id: int) -> None:
        if task_id not in self._simulators:
            if len(self._simulators) >= self._resident:
                dropped = self._simulators.pop(next(iter(self._simulators)))
                dropped.close()
                if self._current is dropped:
                    self._current = None
                    self._hooks.end_episode()
                del dropped  # its memory is free before the next one is built
            inherited = self._inherited.pop(task_id, None)
            self._simulators[task_id] = self._backend.make(task_id) if inherited is None else inherited
        chosen = self._simulators[task_id]
        leaves = self._current is not None and self._current is not chosen
        if leaves and not getattr(self._current, "rests_open", False):
            self._current.close()
        self._current = chosen

    def build(self, task_id: int) -> None:
        """
        Build a task's simulator ahead of its first episode.

        :param task_id: Number of the task.
        """
        self._select(task_id)

    def reset(self, task_id: int, split: str, index: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """
        Start an episode; its first pictures are left in slot 0.

        :param task_id: Number of the task.
        :param split: Name of the set of initial states.
        :param index: Number of the initial state in it.
        :return: The rest of the observation, and what the hooks say.
        """
        self._select(task_id)
        observation = self._current.reset(split, index)
        seed = self._current.episode_seed(split, index)
        # What a policy can do is measured without help.
        reported = self._hooks.begin_episode(self._current, seed, takeover=split == "train")
        return self._pictures.put(observation, 0), reported

    def step(
        self, actions: np.ndarray, observe_at: tuple[int, ...] = (), film: bool = False, until_success: bool = True
    ) -> tuple[dict[str, np.ndarray], np.ndarray, bool, list[dict[str, np.ndarray]], dict[str, Any], list[np.ndarray]]:
        """
        Play a chunk. The last pictures are left in slot 0, those inside the chunk in slots 1, 2, ...

        :param actions: float (k, A), already cut at the horizon.
        :param observe_at: Control steps (from 1) inside the chunk after which to observe as well.
        :param film: Whether to draw a frame between control steps.
        :param until_success: As for :meth:`~rlt_gym.workers.backend.Simulator.step_chunk`.
        :return: The rest of the last observation, rewards of the executed steps, success, the rests of the inner
            observations, what the hooks say, and the frames after each executed control step but the last.
        """
        frames: list[np.ndarray] = []
        choose = self._hooks.begin_chunk()
        if film:
            choose = self._filming(choose, frames)
        result = self._current.step_chunk(actions, observe_at=observe_at, choose=choose, until_success=until_success)
        reported = self._hooks.end_chunk()
        inner = [self._pictures.put(observation, slot) for slot, observation in enumerate(result.inner, start=1)]
        return self._pictures.put(result.observation, 0), result.step_rewards, result.success, inner, reported, frames

    def _filming(self, choose: Choose | None, frames: list[np.ndarray]) -> Choose:
        """
        Add filming to the function that chooses actions.

        :param choose: Decides about each control step; ``None``: the chunk does.
        :param frames: Gets a frame before each control step but the first.
        :return: To be asked instead of ``choose``.
        """
        begun = False

        def draw_and_choose(action: np.ndarray) -> np.ndarray:
            nonlocal begun
            if begun:
                frames.append(np.array(self._current.frame(len(self._pictures.frame))))
            begun = True
            return action if choose is None else choose(action)

        return draw_and_choose

    def render(self) -> None:
        """Leave an upright picture of the scene in the frame's slot."""
        self._pictures.frame[:] = self._current.frame(len(self._pictures.frame))

    def call(self, function: str, task_id: int, arguments: dict[str, Any]) -> Any:
        """
        Run ``module:name`` on the task's simulator, inside this process.

        :param function: A function of this package, whose first parameter is the simulator.
        :param task_id: Number of the task.
        :param arguments: Its other arguments.
        :return: What the function returned; the environment gets it as a message.
        :raises ValueError: It is not of this package.
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
    channel: Channel,
    pictures: SharedPictures,
    settings: WorkerSettings,
    simulators: dict[int, Simulator] | None = None,
) -> None:
    """
    Answer messages until the other end closes.

    :param channel: This end of the socket.
    :param pictures: Where observations are left.
    :param settings: What the owner says.
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
                worker = Worker(settings, pictures, simulators)
            answer = (number, "ok", getattr(worker, command)(**arguments))
        except Exception:
            answer = (number, "error", traceback.format_exc())
        try:
            try:
                channel.send(answer)
            except TypeError:  # what a function returned is no plain data
                channel.send((number, "error", traceback.format_exc()))
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
    settings: WorkerSettings,
    simulators: dict[int, Simulator] | None = None,
) -> None:
    """
    Run a worker process from beginning to end; does not return.

    :param channel_fd: This end of the socket for messages.
    :param lifeline_fd: This end of the socket that tells of the owner's end.
    :param pictures_fd: Memory for :class:`~rlt_gym.workers.shared_memory.SharedPictures`.
    :param log_fd: File for stdout and stderr.
    :param owner: Id of the process that owns the environment.
    :param slots: How many observations that memory holds.
    :param settings: What the owner says.
    :param simulators: Simulators built before, by task.
    """
    try:
        for stream in (1, 2):
            os.dup2(log_fd, stream)
        faulthandler.enable()  # a crash in the simulator or in GL says where
        # Ctrl-C, and SIGTERM of a batch scheduler, reach the whole process group; the owner decides what happens to the
        # workers, and they do not outlive it (rlt_gym.workers.watchdog).
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        watch(lifeline_fd, owner)
        pictures = SharedPictures(pictures_fd, settings["pictures"], settings["frame_size"], slots)
        serve(Channel(socket.socket(fileno=channel_fd)), pictures, settings, simulators)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)  # GL libraries raise in their destructors at a regular exit


def main(argument: str) -> None:
    """
    Entry of ``launch.py rlt_gym.workers.worker JSON``.

    :param argument: The arguments of :func:`run` as JSON.
    """
    run(**json.loads(argument))
