"""The parent's end of one worker process."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import weakref
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


class WorkerError(RuntimeError):
    """A worker failed, died or did not answer in time."""


def _terminate(process: subprocess.Popen, connection: Connection) -> None:
    """End a worker: politely by closing its socket, then by force."""
    with contextlib.suppress(OSError):
        connection.close()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a starved machine may take its time to reap it
            process.wait(timeout=30)


class WorkerClient:
    """
    Starts ``python -m rlt_gym.libero.worker`` and talks to it. A plain child process instead of ``multiprocessing``:
    no ``__main__`` guard in the user's script, no fork of a process with threads, a GL context or torch.

    :param settings: Keyword arguments of :class:`rlt_gym.libero.worker.Worker`.
    :param timeout: Seconds to wait for an answer before the worker counts as hung.
    """

    def __init__(self, settings: dict[str, Any], timeout: float = 300.0):
        self._timeout = timeout
        self._waiting = False
        ours, theirs = socket.socketpair()
        environment = dict(os.environ)
        package_parent = str(Path(__file__).parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package_parent, environment.get("PYTHONPATH")]))
        environment["PYTHONUNBUFFERED"] = "1"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rlt_gym.libero.worker", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=environment,
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self._finalizer = weakref.finalize(self, _terminate, self._process, self._connection)
        self.send("init", **settings)

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    def send(self, command: str, **arguments: Any) -> None:
        """Ask; the answer is fetched with :meth:`receive`, so that several workers run at once."""
        if self._waiting:
            self.receive()  # an answer nobody fetched, e.g. after an interrupt
        try:
            self._connection.send((command, arguments))
        except (BrokenPipeError, OSError) as error:
            raise self._dead() from error
        self._waiting = True

    def receive(self) -> Any:
        """
        :return: The answer to the last :meth:`send`.
        :raises WorkerError: The worker raised, died or timed out.
        """
        try:
            if not self._connection.poll(self._timeout):
                self._process.kill()
                raise WorkerError(f"LIBERO worker {self.pid} did not answer within {self._timeout:g} s and was killed")
            status, value = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            raise self._dead() from error
        self._waiting = False
        if status == "error":
            raise WorkerError(f"LIBERO worker {self.pid} failed:\n{value}")
        return value

    def call(self, command: str, **arguments: Any) -> Any:
        """:meth:`send` and :meth:`receive`."""
        self.send(command, **arguments)
        return self.receive()

    def _dead(self) -> WorkerError:
        self._waiting = False
        return WorkerError(
            f"LIBERO worker {self.pid} died (exit code {self._process.poll()}). Its last words are on stderr; "
            "out-of-memory kills show in `dmesg`."
        )

    def close(self) -> None:
        """End the worker. Safe to call twice."""
        self._finalizer()
