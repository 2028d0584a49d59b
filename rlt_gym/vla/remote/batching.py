"""
Requests of many clients, joined into few forward passes of a frozen VLA or of several copies of it.

There is no thread here: of those who wait, one runs the VLA for all whose requests fit into its batch, and then wakes
these and the next one to run it, nobody else. On a busy machine each needless waking would delay the VLA.
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
        self.alone = False  # after a failure: it is not joined to others again
        self.vla: FrozenVLA | None = None  # which its thread is to run, for others as well
        self._woken = threading.Event()

    @property
    def done(self) -> bool:
        return self.output is not None or self.error is not None

    def wait(self) -> None:
        """Wait until it is answered, or has a VLA to run."""
        self._woken.wait()

    def lead(self, vla: FrozenVLA) -> None:
        """Let its thread run a VLA."""
        self.vla = vla
        self._woken.set()

    def answer(self, output: VLAOutput | None, error: Exception | None = None) -> None:
        """Give its thread what it waits for."""
        self.output, self.error = output, error
        self._woken.set()


class Batcher:
    """
    Joins requests that wait at the same time.

    A batch that fails is run again request by request, so that an error is told to no other client. Each has its answer
    as soon as it is known.

    :param vlas: The VLA, and its copies, each of which runs one batch at a time.
    :param max_batch: Most rows of a joined batch.
    :param max_wait_ms: Milliseconds for which a batch that is not full waits for more; 0: it has what came while the
        VLA was busy; ``None``: requests are never joined.
    """

    def __init__(self, vlas: Sequence[FrozenVLA], max_batch: int, max_wait_ms: float | None = 0.0) -> None:
        self._free, self._max_batch, self._max_wait_ms = list(vlas), max_batch, max_wait_ms
        self._waiting: list[_Request] = []  # empty while a VLA is free
        self._lock = threading.Lock()
        self._more = threading.Condition(self._lock)  # only batches that are not full wait for it

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
        with self._lock:
            if self._free:
                request.lead(self._free.pop())
            else:
                self._waiting.append(request)
                self._more.notify_all()
        try:
            request.wait()
            if request.vla is not None:
                self._run_batch(request.vla, request)
        finally:
            with self._lock:
                if request in self._waiting:  # an interrupt ends this thread
                    self._waiting.remove(request)
                if request.vla is not None:
                    self._pass_on(request.vla)
        if request.error is not None:
            raise request.error
        assert request.output is not None
        return request.output

    def _pass_on(self, vla: FrozenVLA) -> None:
        """Let the oldest request that waits run a VLA; the lock is held."""
        if self._waiting:
            self._waiting.pop(0).lead(vla)
        else:
            self._free.append(vla)

    def _run_batch(self, vla: FrozenVLA, first: _Request) -> None:
        """Answer a request, and others that are joined to it."""
        batch = [first]
        try:
            self._join(batch)
            try:
                answers = _forward(vla, batch)
            except Exception:
                if len(batch) == 1:
                    raise
                self._separate(batch)
                answers = _forward(vla, batch)
            for request, answer in zip(batch, answers, strict=True):
                request.answer(answer)
        except Exception as error:
            first.answer(None, error)
        except BaseException as error:  # an interrupt ends this thread, and must not leave the others waiting
            for request in batch:
                request.answer(None, RuntimeError(f"The VLA was interrupted: {type(error).__name__}."))
            raise

    def _separate(self, batch: list[_Request]) -> None:
        """Leave only the first request in a batch; the others get passes of their own, before what came later."""
        with self._lock:
            for other in batch[1:]:
                other.alone = True
            self._waiting[:0] = batch[1:]
            for _ in range(min(len(self._free), len(self._waiting))):
                self._pass_on(self._free.pop())
        del batch[1:]

    def _join(self, batch: list[_Request]) -> None:
        """Add what waits to a batch, as far as it fits."""
        if self._max_wait_ms is None or batch[0].alone:
            return
        rows, deadline = len(batch[0].tasks), time.monotonic() + self._max_wait_ms / 1000.0
        with self._lock:
            while True:
                for other in tuple(self._waiting):
                    fits = other.kind == batch[0].kind and rows + len(other.tasks) <= self._max_batch
                    if fits and not other.alone:
                        self._waiting.remove(other)
                        batch.append(other)
                        rows += len(other.tasks)
                left = deadline - time.monotonic()
                if left <= 0 or rows >= self._max_batch:
                    return
                self._more.wait(left)


def _forward(vla: FrozenVLA, batch: Sequence[_Request]) -> list[VLAOutput]:
    """Run the VLA on the rows of all requests; the output of each."""
    obs = {key: np.concatenate([request.obs[key] for request in batch]) for key in batch[0].obs}
    tasks = [task for request in batch for task in request.tasks]
    seeds = None if batch[0].seeds is None else [seed for request in batch for seed in request.seeds or ()]
    output = vla.forward(obs, tasks, seed=seeds).check(vla.spec, len(tasks))
    ends = np.cumsum([len(request.tasks) for request in batch]).tolist()
    return [_rows(output, slice(end - len(r.tasks), end)) for r, end in zip(batch, ends, strict=True)]


def _rows(output: VLAOutput, rows: slice) -> VLAOutput:
    parts: dict[str, Any] = {name: getattr(output, name)[rows] for name in ("tokens", "mask", "kind", "chunk")}
    return VLAOutput(**parts)
