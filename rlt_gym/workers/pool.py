"""The environment's end of one worker, and of all of them under supervision."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlt_gym.workers.channel import Channel, SharedPictures, anonymous_file
from rlt_gym.workers.gl import say_no_egl
from rlt_gym.workers.processes import (
    GLChoice,
    LaunchPlan,
    WorkerError,
    WorkerFailure,
    WorkerProcess,
    start_worker,
    tail,
)

__all__ = ["WorkerClient", "WorkerError", "WorkerFailure", "WorkerPool"]

logger = logging.getLogger(__name__)

#: A worker that broke so many times in a row without one answer would do so again.
_IN_A_ROW = 3


def _terminate(process: WorkerProcess, channel: Channel, lifeline: socket.socket, log: int, owner: int) -> None:
    if os.getpid() != owner:  # a fork of the owner must not take the worker from it
        return
    channel.close()
    process.end()  # by force: a worker owns nothing that it would have to put away
    lifeline.close()
    with contextlib.suppress(OSError):
        os.close(log)


class WorkerClient:
    """
    Starts one worker process and talks to it.

    :param plan: How to start it.
    :param settings: Keyword arguments of :class:`rlt_gym.libero.worker.worker.Worker`.
    :param slots: Observations that the shared memory holds.
    :param task_ids: Tasks it will play, the first ones first.
    :param timeout: Seconds to wait for an answer before the worker counts as hung.
    :raises WorkerFailure: The zygote broke.
    """

    def __init__(
        self, plan: LaunchPlan, settings: dict[str, Any], slots: int, task_ids: Sequence[int], timeout: float = 300.0
    ):
        self._timeout = timeout
        self._number = 0
        self._log = anonymous_file("rlt-worker-log")
        memory = anonymous_file("rlt-pictures", SharedPictures.size_for(settings["image_size"], slots))
        channel, their_channel = socket.socketpair()
        lifeline, their_lifeline = socket.socketpair()
        try:
            self.pictures = SharedPictures(memory, settings["image_size"], slots)
            descriptors = (their_channel.fileno(), their_lifeline.fileno(), memory, self._log)
            process = start_worker(plan, descriptors, settings, slots, task_ids, timeout)
        except BaseException:
            channel.close()
            lifeline.close()
            os.close(self._log)
            raise
        finally:
            os.close(memory)
            their_channel.close()
            their_lifeline.close()
        self.pid = process.pid
        self._channel = Channel(channel)
        self._finalizer = weakref.finalize(self, _terminate, process, self._channel, lifeline, self._log, os.getpid())

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return not self._finalizer.alive

    def send(self, command: str, **arguments: Any) -> None:
        """
        Ask; the answer is fetched with :meth:`receive`, so that several workers run at once. Answers that nobody
        fetched, e.g. after an interrupt, are skipped.

        :raises WorkerFailure: The worker is dead or does not read.
        """
        self._number += 1
        try:
            self._channel.send((self._number, command, arguments), self._timeout)
        except OSError as error:
            raise self._broken(error) from error

    def receive(self, patience: float = 1.0) -> Any:
        """
        :param patience: How many times the usual timeout to wait.
        :return: The answer to the last :meth:`send`.
        :raises WorkerFailure: The worker raised, died or did not answer in time.
        """
        while True:
            try:
                number, status, value = self._channel.receive(patience * self._timeout)
            except (EOFError, OSError) as error:
                raise self._broken(error) from error
            if number == self._number:
                break
        if status == "error":
            raise WorkerFailure(f"LIBERO worker {self.pid} failed:\n{value}")
        return value

    def _broken(self, error: Exception) -> WorkerFailure:
        if self.closed:
            return WorkerFailure(f"LIBERO worker {self.pid} was closed")
        if isinstance(error, TimeoutError):
            what = f"did not answer within {self._timeout:g} s (worker_timeout)"
        else:
            what = "died; out-of-memory kills show in `dmesg`"
        return WorkerFailure(f"LIBERO worker {self.pid} {what}. {tail(self._log)}".strip())

    def close(self) -> None:
        """End the worker. Safe to call twice and from another thread."""
        self._finalizer()


class WorkerPool:
    """
    The workers of an environment. One that breaks is replaced, as long as that does not happen too often.

    :param num_workers: How many.
    :param plan: How to start them.
    :param settings: Keyword arguments of :class:`rlt_gym.libero.worker.worker.Worker`.
    :param slots: As for :class:`WorkerClient`, likewise ``task_ids`` and ``timeout``.
    :param max_restarts: Restarts of each worker before :meth:`restart` raises.
    :raises WorkerError: They cannot be started.
    """

    def __init__(
        self,
        num_workers: int,
        plan: LaunchPlan,
        settings: dict[str, Any],
        slots: int,
        task_ids: Sequence[int],
        timeout: float,
        max_restarts: int,
    ):
        self.restarts = np.zeros(num_workers, dtype=np.int64)
        self._in_a_row = [0] * num_workers
        self._plan = plan
        self._arguments = (settings, slots, task_ids, timeout)
        self._max_restarts = max_restarts
        self.closed = False
        self.clients: list[WorkerClient] = []
        try:
            for _ in range(num_workers):
                self.clients.append(self._start())
        except BaseException:
            self.close()
            raise

    def _start(self) -> WorkerClient:
        return WorkerClient(self._plan, *self._arguments)

    def restart(self, worker: int, failure: WorkerFailure) -> None:
        """
        Replace a worker.

        :param worker: Which.
        :param failure: Why.
        :raises WorkerError: It broke too often, or the pool is closed.
        """
        while True:
            if self.closed:
                raise WorkerError("the environment was closed") from failure
            self.clients[worker].close()
            self._in_a_row[worker] += 1
            if self.restarts[worker] >= self._max_restarts or self._in_a_row[worker] > _IN_A_ROW:
                raise WorkerError(
                    f"LIBERO worker of env {worker} broke again after {self.restarts[worker]} restarts "
                    f"(max_restarts={self._max_restarts}, {_IN_A_ROW} in a row). The last failure: {failure}"
                ) from failure
            self.restarts[worker] += 1
            logger.warning("restarting the LIBERO worker of env %d: %s", worker, failure)
            self._give_up_egl(worker, failure)
            try:
                self.clients[worker] = self._start()
            except WorkerFailure as error:
                failure = error
                continue
            if self.closed:  # by another thread, meanwhile
                self.clients[worker].close()
            return

    def ask(
        self, questions: dict[int, tuple[str, dict[str, Any]]], patience: float = 1.0
    ) -> tuple[dict[int, Any], dict[int, WorkerFailure]]:
        """
        Ask several workers and wait for all of them, so that none is kept waiting by one that broke.

        :param questions: Command and arguments by worker.
        :param patience: How many times the usual timeout to wait.
        :return: Answers and failures by worker. Those that failed are to be restarted.
        """
        answers: dict[int, Any] = {}
        failures: dict[int, WorkerFailure] = {}
        for worker, (command, arguments) in questions.items():
            try:
                self.clients[worker].send(command, **arguments)
            except WorkerFailure as failure:
                failures[worker] = failure
        for worker in questions.keys() - failures.keys():
            try:
                answers[worker] = self.clients[worker].receive(patience)
                self._in_a_row[worker] = 0
            except WorkerFailure as failure:
                failures[worker] = failure
        return answers, failures

    def _give_up_egl(self, worker: int, failure: WorkerFailure) -> None:
        """A GL context that cannot be made a second time will not be made a third time."""
        text = str(failure)
        if self._plan.gl.backend == "egl" and self._in_a_row[worker] >= 2 and ("EGL" in text or "GL context" in text):
            say_no_egl(text.strip().splitlines()[-1])
            self._plan = replace(self._plan, gl=GLChoice("osmesa"))

    def close(self) -> None:
        """End all workers. Safe to call twice."""
        self.closed = True
        for client in self.clients:
            client.close()
