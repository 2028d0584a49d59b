"""A fixed number of Ray actors of one kind, each of which is made again where there is room if it is lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlt_gym.cluster.connection import ClusterError, check_room, import_ray

logger = logging.getLogger(__name__)

#: A worker that broke this many times in a row without one answer would break again.
_IN_A_ROW = 3
#: Seconds between two looks at whether a worker that waits for its place can still get one.
_LOOK = 5.0


class LostWorkerError(ClusterError):
    """A worker died, hangs, or its machine is gone; another one can take its place."""


class RayWorkers:
    """
    W Ray actors, spread over the machines of a cluster.

    An actor's class has ``start()`` and ``close()``. Making it does nothing yet; ``start`` does, so that its errors
    arrive as the exceptions that they are.

    :param kind: Class of the actors.
    :param arguments: Of its constructor; picklable.
    :param count: W.
    :param needs: What an actor reserves, ``num_cpus`` and ``num_gpus``.
    :param timeout: Seconds without an answer, or without a place, after which a worker counts as lost.
    :param max_restarts: Restarts of each worker before an error is raised.
    :raises ClusterError: There is no room for them.
    """

    def __init__(
        self,
        kind: type,
        arguments: tuple[Any, ...],
        count: int,
        needs: Mapping[str, float] | None = None,
        timeout: float = 600.0,
        max_restarts: int = 10,
    ):
        self._ray = import_ray()
        self._kind, self._arguments, self.count = kind, arguments, count
        self._needs = {"num_cpus": 1.0, "num_gpus": 0.0} | dict(needs or {})
        self.timeout, self._max_restarts = timeout, max_restarts
        #: How often each worker was replaced, and how often since its last answer.
        self._lost, self._in_a_row = [0] * count, [0] * count
        self._actors: list[Any] = []
        #: What ``start`` has returned, for each worker.
        self.described: list[Any] = []
        check_room(count, self._needs)
        try:
            self._actors = [self._actor() for _ in range(count)]
            started = [actor.start.remote() for actor in self._actors]
            self.described = [self._wait_for_place(reference) for reference in started]
        except BaseException:
            self.close()
            raise

    def _actor(self) -> Any:
        remote = self._ray.remote(self._kind)
        return remote.options(scheduling_strategy="SPREAD", max_restarts=0, **self._needs).remote(*self._arguments)

    def call(self, worker: int, method: str, *arguments: Any) -> Any:
        """
        Call a method of a worker without waiting; calls arrive in their order.

        :param worker: Its number.
        :param method: Name of the method.
        :param arguments: Of the method; what :meth:`put` returned arrives as what was put.
        :return: For :meth:`answer`.
        """
        return getattr(self._actors[worker], method).remote(*arguments)

    def put(self, value: Any) -> Any:
        """
        Store a value once that several calls need.

        :param value: Picklable.
        :return: An argument for :meth:`call`.
        """
        return self._ray.put(value)

    def answer(self, worker: int, reference: Any, timeout: float | None = None) -> Any:
        """
        Wait for an answer.

        :param worker: Who is asked.
        :param reference: Of :meth:`call`.
        :param timeout: Seconds; None: those of the constructor.
        :return: What the method returned.
        :raises LostWorkerError: The worker is lost.
        :raises Exception: What the method raised.
        """
        answer = self._get(reference, self.timeout if timeout is None else timeout)
        self._in_a_row[worker] = 0
        return answer

    def ready(self, references: Sequence[Any], timeout: float) -> Any | None:
        """
        Wait until one of several calls has been answered, or its worker is lost.

        :param references: Of :meth:`call`; the first of them is preferred.
        :param timeout: Seconds.
        :return: One of them; None: there was none in that time.
        """
        done, _ = self._ray.wait(list(references), num_returns=1, timeout=timeout)
        return done[0] if done else None

    def _get(self, reference: Any, timeout: float) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference, timeout=timeout)
        except errors.GetTimeoutError as error:
            raise LostWorkerError(f"no answer within {timeout:g} s") from error
        except errors.RayTaskError as error:
            raise error.cause from None
        except errors.RayError as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            raise LostWorkerError(f"{type(error).__name__}: {lines[0] if lines else ''}") from error

    def _wait_for_place(self, reference: Any) -> Any:
        """Wait until a new worker has its place and has started; an error if it can have none."""
        end = time.monotonic() + self.timeout
        while not self._ray.wait([reference], timeout=_LOOK)[0]:
            check_room(self.count, self._needs)
            if time.monotonic() > end:
                raise ClusterError(
                    f"A worker that needs {self._needs['num_cpus']:g} CPUs and {self._needs['num_gpus']:g} GPUs has "
                    f"not started within ray.timeout={self.timeout:g} s: others use the cluster (`ray status`), or "
                    "the machine is slow."
                )
        return self._get(reference, self.timeout)

    def replace(self, worker: int, failure: Exception, prepare: Callable[[], Any] = lambda: None) -> Any:
        """
        Make a worker again.

        :param worker: Its number.
        :param failure: Why it is lost.
        :param prepare: Called once the new one has started. If that one is lost meanwhile, the next one is made.
        :return: What ``prepare`` returned.
        :raises ClusterError: It breaks again and again, or there is no room for it.
        """
        while True:
            self._lost[worker] += 1
            self._in_a_row[worker] += 1
            if self._lost[worker] > self._max_restarts or self._in_a_row[worker] > _IN_A_ROW:
                raise ClusterError(
                    f"Worker {worker} of the cluster broke again after {self._lost[worker] - 1} restarts. The last "
                    f"failure: {failure}"
                ) from failure
            logger.warning("making worker %d of the cluster again: %s", worker, failure)
            self._ray.kill(self._actors[worker])
            check_room(self.count, self._needs)
            actor = self._actors[worker] = self._actor()
            try:
                self._wait_for_place(actor.start.remote())
                return prepare()
            except LostWorkerError as error:
                failure = error

    def close(self) -> None:
        """End the workers."""
        if self._actors and self._ray.is_initialized():
            # what a worker has started ends with it in any case
            self._ray.wait([actor.close.remote() for actor in self._actors], num_returns=len(self._actors), timeout=3)
            for actor in self._actors:
                self._ray.kill(actor)
        self._actors = []
