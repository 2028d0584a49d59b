"""The workers of one environment under supervision."""

from __future__ import annotations

import logging
import select
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlt_gym.workers.backend import WorkerSettings
from rlt_gym.workers.client import Limit, WorkerClient
from rlt_gym.workers.gl import GLChoice, say_no_egl
from rlt_gym.workers.processes import LaunchPlan, WorkerError, WorkerFailure

__all__ = ["WorkerError", "WorkerFailure", "WorkerPool"]

logger = logging.getLogger(__name__)

#: A worker that broke this many times in a row without one answer would break again.
_IN_A_ROW = 3


class WorkerPool:
    """
    The workers of an environment. One that breaks is replaced, as long as that does not happen too often.

    :param num_workers: How many.
    :param plan: How to start them.
    :param settings: What they are to play, and how.
    :param slots: Observations that the shared memory of each holds.
    :param task_ids: Tasks that they will play, the first ones first; a zygote builds those ahead.
    :param timeout: Seconds to wait for an answer before a worker counts as hung.
    :param max_restarts: Restarts of each worker before :meth:`restart` raises.
    :param build_timeout: Seconds that a zygote, and :meth:`ask` with ``building``, may take to build simulators.
    :raises WorkerError: They cannot be started.
    """

    def __init__(
        self,
        num_workers: int,
        plan: LaunchPlan,
        settings: WorkerSettings,
        slots: int,
        task_ids: Sequence[int],
        timeout: float,
        max_restarts: int,
        build_timeout: float,
    ):
        self.restarts = np.zeros(num_workers, dtype=np.int64)
        self._in_a_row = [0] * num_workers
        self._name = settings["name"]
        self._plan = plan
        self._arguments = (settings, slots, task_ids, timeout, build_timeout)
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
                    f"{self._name} worker of env {worker} broke again after {self.restarts[worker]} restarts "
                    f"(max_restarts={self._max_restarts}, {_IN_A_ROW} in a row). The last failure: {failure}"
                ) from failure
            self.restarts[worker] += 1
            logger.warning("restarting the %s worker of env %d: %s", self._name, worker, failure)
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
        self, questions: dict[int, tuple[str, dict[str, Any]]], patience: float = 1.0, building: bool = False
    ) -> tuple[dict[int, Any], dict[int, WorkerFailure]]:
        """
        Ask several workers and wait for all of them, so that none is kept waiting by one that broke.

        Their time runs side by side: however many of them hang, the wait is as long as for one.

        :param questions: Command and arguments by worker.
        :param patience: How many times the usual timeout to wait.
        :param building: Whether they are to build their first simulators, for which ``build_timeout`` counts.
        :return: Answers and failures by worker. Those that failed are to be restarted.
        """
        limits = self._limits(questions, patience, building)
        return self._receive(questions, limits, self._send(questions, limits))

    def begin(self, questions: dict[int, tuple[str, dict[str, Any]]]) -> dict[int, WorkerFailure]:
        """
        Ask several workers without waiting for them; :meth:`finish` fetches their answers.

        :param questions: As for :meth:`ask`. None may be asked anything else before.
        :return: Failures of those that could not be asked, for :meth:`finish`.
        """
        return self._send(questions, self._limits(questions))

    def finish(
        self, questions: dict[int, tuple[str, dict[str, Any]]], unasked: dict[int, WorkerFailure]
    ) -> tuple[dict[int, Any], dict[int, WorkerFailure]]:
        """
        Wait for the answers to what :meth:`begin` asked.

        The usual timeout begins now: whatever the caller did in between is not the workers' fault.

        :param questions: The same.
        :param unasked: What :meth:`begin` returned.
        :return: As of :meth:`ask`.
        """
        return self._receive(questions, self._limits(questions), unasked)

    def _limits(
        self, questions: dict[int, tuple[str, dict[str, Any]]], patience: float = 1.0, building: bool = False
    ) -> dict[int, Limit]:
        return {worker: self.clients[worker].limit(patience, building) for worker in questions}

    def _send(
        self, questions: dict[int, tuple[str, dict[str, Any]]], limits: dict[int, Limit]
    ) -> dict[int, WorkerFailure]:
        failures: dict[int, WorkerFailure] = {}
        for worker, (command, arguments) in questions.items():
            try:
                self.clients[worker].send(command, arguments, limits[worker])
            except WorkerFailure as failure:
                failures[worker] = failure
        return failures

    def _receive(
        self,
        questions: dict[int, tuple[str, dict[str, Any]]],
        limits: dict[int, Limit],
        unasked: dict[int, WorkerFailure],
    ) -> tuple[dict[int, Any], dict[int, WorkerFailure]]:
        answers: dict[int, Any] = {}
        failures = dict(unasked)
        waiting = {worker: limit for worker, limit in limits.items() if worker not in failures}
        while waiting:
            for worker in self._ready(waiting):
                try:
                    answer = self.clients[worker].receive(waiting[worker])
                    if answer is None:
                        continue
                    answers[worker] = answer[0]
                    self._in_a_row[worker] = 0
                except WorkerFailure as failure:
                    failures[worker] = failure
                del waiting[worker]
        # in the order of the questions, not of the answers
        return (
            {w: answers[w] for w in questions if w in answers},
            {w: failures[w] for w in questions if w in failures},
        )

    def _ready(self, waiting: dict[int, Limit]) -> list[int]:
        """Those whose answer can be read or will not come: closed meanwhile by another thread, or overdue."""
        poll = select.poll()
        workers = {}
        for worker in waiting:
            descriptor = self.clients[worker].fileno()
            if descriptor >= 0:
                poll.register(descriptor, select.POLLIN)
                workers[descriptor] = worker
        # not longer than a second: poll does not notice for sure that a descriptor is closed
        left = min(limit.left() for limit in waiting.values()) if len(workers) == len(waiting) else 0.0
        readable = {workers[descriptor] for descriptor, _ in poll.poll(1000.0 * min(1.0, max(0.0, left)))}
        return [
            worker
            for worker, limit in waiting.items()
            if worker in readable or limit.left() <= 0 or self.clients[worker].fileno() < 0
        ]

    def _give_up_egl(self, worker: int, failure: WorkerFailure) -> None:
        """Draw on the CPU from now on if EGL has failed twice in a row."""
        text = str(failure)
        if self._plan.gl.backend == "egl" and self._in_a_row[worker] >= 2 and ("EGL" in text or "GL context" in text):
            say_no_egl(text.strip().splitlines()[-1])
            self._plan = replace(self._plan, gl=GLChoice("osmesa"))

    def close(self) -> None:
        """End all workers. Safe to call twice."""
        self.closed = True
        for client in self.clients:
            client.close()
