"""A process that has the simulator imported, its code compiled and models built, and forks workers from that state.

A forked worker starts in a fraction of the time and shares with its siblings the memory of all that. The zygote is a
plain subprocess of the training process, so nothing of that one (torch, threads, GL, CUDA) is forked; it has one
thread and no GL context itself. It talks over a separate socket and ends with its parent; the kernel then ends its
workers (:func:`rlt_gym.workers.watchdog.kill_me_with_parent`).
"""

from __future__ import annotations

import array
import gc
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from typing import Any

from rlt_gym.workers.backend import WorkerSettings, backend_key, load_backend
from rlt_gym.workers.channel import Channel
from rlt_gym.workers.watchdog import alive_checker, kill_me_with_parent
from rlt_gym.workers.worker import run

#: Simulators kept for the workers to come, for LIBERO some 30 MB each without a GL context.
_KEPT = 6


class Zygote:
    """
    Forks workers on request.

    A question is one byte, with which descriptors travel, and a message ``(number, command, arguments)``. The answer is
    ``(number, "ok", value)`` or ``(number, "error", traceback)``.

    :param control: Socket to the process that owns the environments.
    :param owner: Id of that process.
    """

    def __init__(self, control: socket.socket, owner: int):
        self._control = control
        self._channel = Channel(control)
        self._owner = owner
        self._owner_lives = alive_checker(owner)
        self._simulators: dict[str, dict[int, Any]] = {}
        self._children: dict[int, int | None] = {}

    def serve(self) -> None:
        """Answer until the owner is gone."""
        while self._owner_lives():
            ready, _, _ = select.select([self._control], [], [], 0.5)
            self._reap()
            if not ready:
                continue
            here, descriptors = self._receive_descriptors()
            if not here:
                return
            number, command, arguments = self._channel.receive()
            try:
                answer = (number, "ok", getattr(self, command)(*descriptors, **arguments))
            except Exception:
                answer = (number, "error", traceback.format_exc())
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            self._channel.send(answer)

    def _receive_descriptors(self) -> tuple[bytes, list[int]]:
        descriptors = array.array("i")
        content, ancillary, _, _ = self._control.recvmsg(1, socket.CMSG_SPACE(8 * descriptors.itemsize))
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        return content, list(descriptors)

    def prepare(self, settings: WorkerSettings, task_ids: list[int]) -> None:
        """
        Build simulators ahead and play a step with each, so that all code is compiled and loaded.

        :param settings: Those of the workers to come.
        :param task_ids: Their tasks.
        """
        backend = load_backend(settings["backend"])
        known = self._simulators.setdefault(backend_key(settings["backend"]), {})
        for task_id in task_ids:
            if task_id not in known and sum(map(len, self._simulators.values())) < _KEPT:
                known[task_id] = backend.warm_up(task_id)

    def fork(self, channel: int, lifeline: int, pictures: int, log: int, settings: WorkerSettings, slots: int) -> int:
        """
        Fork a worker.

        :param channel: Descriptor for :func:`rlt_gym.workers.worker.run`.
        :param lifeline: Likewise.
        :param pictures: Likewise.
        :param log: Likewise.
        :param settings: Of the worker.
        :param slots: Observations that its shared memory holds.
        :return: Id of the new worker.
        """
        zygote = os.getpid()
        gc.collect()
        gc.freeze()  # a collection in a worker would write into, and so copy, every page with objects
        child = os.fork()
        if child == 0:
            try:
                kill_me_with_parent(zygote)
                self._control.close()
                simulators = self._simulators.get(backend_key(settings["backend"]))
                run(channel, lifeline, pictures, log, self._owner, slots, settings, simulators)
            finally:
                os._exit(1)
        self._children[child] = None
        return child

    def _reap(self) -> None:
        for child, status in self._children.items():
            if status is None and os.waitpid(child, os.WNOHANG)[0]:
                self._children[child] = 0

    def end(self, child: int) -> None:
        """
        Kill a worker and wait until it is gone. Only ids of children not yet waited for are safe to kill.

        :param child: Its id.
        """
        self._reap()
        if child in self._children and self._children[child] is None:
            os.kill(child, signal.SIGKILL)
            for _ in range(500):
                self._reap()
                if self._children[child] is not None:
                    break
                time.sleep(0.01)
        self._children.pop(child, None)


def main(argument: str) -> None:
    """
    Entry of ``launch.py rlt_gym.workers.zygote JSON``.

    :param argument: ``control_fd`` and ``owner`` as JSON.
    """
    arguments = json.loads(argument)
    for number in (signal.SIGINT, signal.SIGTERM):  # as for its workers
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=arguments["control_fd"])
    try:
        Zygote(control, arguments["owner"]).serve()
    except (EOFError, OSError):
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)
