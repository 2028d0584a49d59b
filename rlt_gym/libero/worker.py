"""The process that owns one LIBERO simulator: ``python -m rlt_gym.libero.worker FD``.

Messages are ``(command, arguments)`` tuples on a socket of their own, so that libraries may print what they like to
stdout; answers are ``("ok", value)`` or ``("error", traceback)``. The worker ends when the socket closes, which also
happens when its parent is killed.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from rlt_gym.libero.bootstrap import prepare_libero


class Worker:
    """
    Answers the vector environment's messages. Keeps the simulator of each task it has played, since a model takes
    seconds to build, up to ``resident`` of them (some 300 MB each).
    """

    def __init__(self, suite: str, assets_path: str, image_size: int, render: str, resident: int = 3):
        prepare_libero(assets_path)
        from rlt_gym.libero import simulator  # after prepare_libero, which silences these imports

        self._make = lambda task_id: simulator.LiberoSimulator(suite, task_id, image_size, render)
        self._simulators: dict[int, Any] = {}
        self._resident = resident
        self._current: Any = None

    def _select(self, task_id: int) -> None:
        if task_id not in self._simulators:
            if len(self._simulators) >= self._resident:
                self._simulators.pop(next(iter(self._simulators))).close()
            self._simulators[task_id] = self._make(task_id)
        chosen = self._simulators[task_id]
        if self._current is not None and self._current is not chosen:
            self._current.close()  # one GL context alive at a time
        self._current = chosen

    def build(self, task_id: int) -> None:
        """Build a task's simulator ahead of its first episode."""
        self._select(task_id)

    def reset(self, task_id: int, split: str, index: int) -> dict[str, np.ndarray]:
        """Start an episode and return its first observation."""
        self._select(task_id)
        return self._current.reset(split, index)

    def step(
        self, actions: np.ndarray, observe_at: tuple[int, ...] = ()
    ) -> tuple[dict[str, np.ndarray], np.ndarray, bool, list[dict[str, np.ndarray]]]:
        """Play a chunk until success; ``actions`` (k, 7) is already cut at the horizon."""
        result = self._current.step_chunk(actions, observe_at=observe_at)
        return result.observation, result.step_rewards, result.success, result.inner

    def render(self, camera: str, size: int) -> np.ndarray:
        """
        :return: One upright picture, uint8 (size, size, 3).
        """
        return self._current.pictures({"frame": camera}, size)["frame"][::-1].copy()

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


def serve(connection: Connection) -> None:
    """Answer messages until the other end closes."""
    worker: Worker | None = None
    while True:
        try:
            command, arguments = connection.recv()
        except (EOFError, ConnectionError):
            return
        if command == "close":
            return
        try:
            if command == "init":
                worker, value = Worker(**arguments), None
            else:
                value = getattr(worker, command)(**arguments)
            answer = ("ok", value)
        except Exception:
            answer = ("error", traceback.format_exc())
        try:
            connection.send(answer)
        except (BrokenPipeError, ConnectionError):
            return


def main() -> None:
    # Ctrl-C reaches the whole process group; the parent decides what happens to the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        serve(Connection(int(sys.argv[1])))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # GL libraries raise in their destructors at a regular exit


if __name__ == "__main__":
    main()
