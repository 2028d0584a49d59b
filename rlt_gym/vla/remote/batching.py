"""
Requests of many clients, joined into few forward passes of a frozen VLA or of several copies of it.

There is no thread here: of those who wait, one runs the VLA for all whose requests fit into its batch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlt_gym.vla.base import FrozenVLA, VLAOutput


class _Request:
    """Rows of one client, and what became of them."""

    def __init__(self, obs: Mapping[str, np.ndarray], tasks: list[str], seeds: list[int] | None) -> None:
        self.obs, self.tasks, self.seeds = obs, tasks, seeds
        # only pictures of one size can be stacked
        self.kind = ({name: value.shape[1:] for name, value in obs.items()}, seeds is None)
        self.output: VLAOutput | None = None
        self.error: Exception | None = None
        self.taken = False

    @property
    def done(self) -> bool:
        return self.output is not None or self.error is not None


class Batcher:
    """
    Joins requests that wait at the same time.

    A batch that fails is run again request by request, so that an error is told to no other client.

    :param vlas: The VLA, and its copies, each of which runs one batch at a time.
    :param max_batch: Most rows of a joined batch.
    :param max_wait_ms: Milliseconds for which a batch that is not full waits for more; 0: it has what came while the
        VLA was busy; ``None``: requests are never joined.
    """

    def __init__(self, vlas: Sequence[FrozenVLA], max_batch: int, max_wait_ms: float | None = 0.0) -> None:
        self._free, self._max_batch, self._max_wait_ms = list(vlas), max_batch, max_wait_ms
        self._waiting: list[_Request] = []
        self._changed = threading.Condition()

    def forward(self, obs: Mapping[str, np.ndarray], tasks: list[str], seeds: list[int] | None) -> VLAOutput:
        """
        Run the VLA on rows, perhaps with rows of other threads; from any thread.

        :param obs: Raw observations of B rows, see :data:`~rlt_gym.vla.base.VLAObs`.
        :param tasks: One instruction per row.
        :param seeds: One number per row, or nothing.
        :return: The outputs of these rows.
        :raises Exception: Of the VLA, or ``ValueError`` if its output breaks the contract.
        """
        request = _Request(obs, tasks, seeds)
        with self._changed:
            self._waiting.append(request)
            self._changed.notify_all()
        while not request.done:
            with self._changed:
                self._changed.wait_for(lambda: request.done or (self._free and not request.taken))
                if request.done:
                    break
                vla = self._free.pop()
                batch = self._take()
            try:
                _run(vla, batch)
            finally:
                with self._changed:
                    self._free.append(vla)
                    self._changed.notify_all()
        if request.error is not None:
            raise request.error
        assert request.output is not None
        return request.output

    def _take(self) -> list[_Request]:
        """Take the oldest request, and the others that can be joined to it; the lock is held."""
        batch, rows = [self._waiting.pop(0)], 0
        batch[0].taken, rows = True, len(batch[0].tasks)
        if self._max_wait_ms is None:
            return batch
        deadline = time.monotonic() + self._max_wait_ms / 1000.0
        while True:
            for other in tuple(self._waiting):
                if other.kind == batch[0].kind and rows + len(other.tasks) <= self._max_batch:
                    self._waiting.remove(other)
                    batch.append(other)
                    other.taken, rows = True, rows + len(other.tasks)
            left = deadline - time.monotonic()
            if left <= 0 or rows >= self._max_batch:
                return batch
            self._changed.wait(left)


def _run(vla: FrozenVLA, batch: list[_Request]) -> None:
    """Answer requests, or say what went wrong with each."""
    try:
        obs = {key: np.concatenate([request.obs[key] for request in batch]) for key in batch[0].obs}
        tasks = [task for request in batch for task in request.tasks]
        seeds = None if batch[0].seeds is None else [seed for request in batch for seed in request.seeds or ()]
        output = vla.forward(obs, tasks, seed=seeds).check(vla.spec, len(tasks))
        at = 0
        for request in batch:
            request.output = _rows(output, slice(at, at + len(request.tasks)))
            at += len(request.tasks)
    except Exception as error:
        for request in batch:
            request.output, request.error = None, error if len(batch) == 1 else None
        if len(batch) > 1:
            for request in batch:
                _run(vla, [request])
    except BaseException as error:  # an interrupt ends this thread, and must not leave the others waiting
        for request in batch:
            request.error = RuntimeError(f"The VLA was interrupted: {type(error).__name__}.")
        raise


def _rows(output: VLAOutput, rows: slice) -> VLAOutput:
    parts: dict[str, Any] = {name: getattr(output, name)[rows] for name in ("tokens", "mask", "kind", "chunk")}
    return VLAOutput(**parts)
