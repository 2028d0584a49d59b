"""A process that has LIBERO imported, compiled code loaded and models built, and forks workers from that state.

A forked worker starts in a fraction of the time and shares with its siblings the memory of all that. The zygote is a
plain subprocess of the training process, so nothing of that one (torch, threads, GL, CUDA) is forked; it has one
thread and no GL context itself. It talks over a socket that keeps message boundaries, on which descriptors travel too,
and ends with its parent; the kernel then ends its workers (:func:`rlt_gym.workers.watchdog.kill_me_with_parent`).
"""

from __future__ import annotations

import array
import gc
import json
import os
import pickle
import select
import signal
import socket
import sys
import time
import traceback
from typing import Any

import numpy as np

from rlt_gym.libero.worker.libero_import import prepare_libero
from rlt_gym.libero.worker.worker import run
from rlt_gym.workers.watchdog import alive_checker, kill_me_with_parent

MESSAGE_BYTES = 1 << 16

#: Simulators kept for the workers to come, some 30 MB each without a GL context.
_KEPT = 6


def _key(settings: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(settings[name] for name in ("suite", "assets_path", "image_size", "render"))


class Zygote:
    """
    :param control: Socket to the process that owns the environments.
    :param owner: Id of that process.
    """

    def __init__(self, control: socket.socket, owner: int):
        self._control = control
        self._owner = owner
        self._owner_lives = alive_checker(owner)
        self._simulators: dict[tuple[Any, ...], dict[int, Any]] = {}
        self._children: dict[int, int | None] = {}

    def serve(self) -> None:
        """Answer until the owner is gone."""
        while self._owner_lives():
            ready, _, _ = select.select([self._control], [], [], 0.5)
            self._reap()
            if not ready:
                continue
            content, descriptors = self._receive()
            if not content:
                return
            command, arguments = pickle.loads(content)
            try:
                answer = ("ok", getattr(self, command)(*descriptors, **arguments))
            except Exception:
                answer = ("error", traceback.format_exc())
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            self._control.send(pickle.dumps(answer, protocol=4))

    def _receive(self) -> tuple[bytes, list[int]]:
        descriptors = array.array("i")
        content, ancillary, _, _ = self._control.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(8 * descriptors.itemsize))
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        return content, list(descriptors)

    def prepare(self, settings: dict[str, Any], task_ids: list[int]) -> None:
        """
        Build simulators, without GL, and play a step so that all code is compiled and loaded.

        :param settings: Of :class:`rlt_gym.libero.worker.worker.Worker`.
        :param task_ids: Their tasks.
        """
        prepare_libero(settings["assets_path"])
        from rlt_gym.libero.rendering.triangles import warm_up
        from rlt_gym.libero.worker.simulator import LiberoSimulator

        warm_up()
        known = self._simulators.setdefault(_key(settings), {})
        for task_id in task_ids:
            if task_id in known or sum(map(len, self._simulators.values())) >= _KEPT:
                continue
            simulator = LiberoSimulator(settings["suite"], task_id, settings["image_size"], settings["render"])
            simulator.reset("train", 0, observe=False)
            simulator.step_chunk(np.zeros((1, 7)), observe=False)
            known[task_id] = simulator

    def fork(self, channel: int, lifeline: int, pictures: int, log: int, settings: dict[str, Any], slots: int) -> int:
        """
        :param channel: Descriptor for :func:`rlt_gym.libero.worker.worker.run`, as the three after it.
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
                simulators = self._simulators.get(_key(settings))
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
        """Kill a worker and wait until it is gone. Only ids of children not yet waited for are safe to kill."""
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
    """``launch.py rlt_gym.workers.zygote JSON`` with ``control_fd`` and ``owner``."""
    arguments = json.loads(argument)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=arguments["control_fd"])
    try:
        Zygote(control, arguments["owner"]).serve()
    except (EOFError, OSError):
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)
