"""The environment's end of one worker."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlt_gym.workers.backend import WorkerSettings
from rlt_gym.workers.channel import Channel
from rlt_gym.workers.processes import LaunchPlan, WorkerFailure, WorkerProcess, start_worker, tail
from rlt_gym.workers.shared_memory import SharedPictures, anonymous_file


@dataclass(frozen=True)
class Limit:
    """
    How long to wait for an answer.

    :param seconds: Time to wait.
    :param setting: The setting that gives this time, for messages.
    :param began: When the waiting began, in seconds of ``time.monotonic``.
    """

    seconds: float
    setting: str
    began: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """
        How much time is left.

        :return: Seconds, negative when the time is over.
        """
        return self.began + self.seconds - time.monotonic()


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
    :param settings: What it is to play, and how.
    :param slots: Observations that the shared memory holds.
    :param task_ids: Tasks it will play, the first ones first.
    :param timeout: Seconds to wait for an answer before the worker counts as hung.
    :param build_timeout: The same while simulators are built for the first time.
    :raises WorkerFailure: The zygote broke.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        settings: WorkerSettings,
        slots: int,
        task_ids: Sequence[int],
        timeout: float,
        build_timeout: float,
    ):
        self._timeout, self._build_timeout = timeout, build_timeout
        self._number = 0
        self._log = anonymous_file("rlt-worker-log")
        self._name = settings["name"]
        layout = (settings["pictures"], settings["frame_size"], slots)
        memory = anonymous_file("rlt-pictures", SharedPictures.size_for(*layout))
        channel, their_channel = socket.socketpair()
        lifeline, their_lifeline = socket.socketpair()
        try:
            self.pictures = SharedPictures(memory, *layout)
            descriptors = (their_channel.fileno(), their_lifeline.fileno(), memory, self._log)
            process = start_worker(plan, descriptors, settings, slots, task_ids, timeout, build_timeout)
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

    def limit(self, patience: float = 1.0, building: bool = False) -> Limit:
        """
        Compute the time limit of an answer.

        :param patience: How many times the usual timeout to wait.
        :param building: Whether simulators are built for the first time.
        :return: The time that an answer may take from now on.
        """
        if building:
            return Limit(self._build_timeout, "build_timeout")
        times = "" if patience == 1.0 else f"{patience:g} times "
        return Limit(patience * self._timeout, f"{times}worker_timeout")

    def fileno(self) -> int:
        """
        Return what ``select.poll`` watches for an answer.

        :return: Descriptor of the socket, -1 once closed.
        """
        return self._channel.fileno()

    def send(self, command: str, arguments: dict[str, Any], limit: Limit) -> None:
        """
        Ask; the answer is fetched with :meth:`receive`, so that several workers run at once.

        :param command: Name of a method of :class:`rlt_gym.workers.worker.Worker`.
        :param arguments: Its arguments.
        :param limit: How long the worker may take to read.
        :raises WorkerFailure: The worker is dead or does not read.
        """
        self._number += 1
        try:
            self._channel.send((self._number, command, arguments), max(0.001, limit.left()))
        except OSError as error:
            raise self._broken(error, limit) from error

    def receive(self, limit: Limit) -> tuple[Any] | None:
        """
        Read one answer.

        :param limit: How long to wait for it.
        :return: A tuple with the answer to the last :meth:`send`, or ``None`` for one to an earlier question that
            nobody fetched, e.g. after an interrupt.
        :raises WorkerFailure: The worker raised, died or did not answer in time.
        """
        try:
            number, status, value = self._channel.receive(max(0.001, limit.left()))
        except (EOFError, OSError) as error:
            raise self._broken(error, limit) from error
        if number != self._number:
            return None
        if status == "error":
            raise WorkerFailure(f"{self._name} worker {self.pid} failed:\n{value}")
        return (value,)

    def _broken(self, error: Exception, limit: Limit) -> WorkerFailure:
        if self.closed:
            return WorkerFailure(f"{self._name} worker {self.pid} was closed")
        if isinstance(error, TimeoutError):
            what = f"did not answer within {limit.seconds:g} s ({limit.setting})"
        else:
            what = "died; out-of-memory kills show in `dmesg`"
        return WorkerFailure(f"{self._name} worker {self.pid} {what}. {tail(self._log)}".strip())

    def close(self) -> None:
        """End the worker. Safe to call twice and from another thread."""
        self._finalizer()
