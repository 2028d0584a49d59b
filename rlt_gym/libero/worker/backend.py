"""LIBERO as a backend of :mod:`rlt_gym.workers`: makes the simulators of one worker process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rlt_gym.libero.worker.libero_import import prepare_libero

if TYPE_CHECKING:
    from rlt_gym.libero.worker.simulator import LiberoSimulator


class LiberoBackend:
    """
    Makes LIBERO's simulators, see :class:`rlt_gym.workers.backend.Backend`.

    The arguments after the second are those of :class:`~rlt_gym.libero.worker.simulator.LiberoSimulator`.

    :param suite: Name of the suite.
    :param assets_path: Folder laid out like LIBERO's ``assets``.
    :param image_size: Side of the pictures in pixels.
    :param render: ``"exact"``, ``"fast"`` or ``"stock"``.
    :param compiled: Whether control steps run through the compiled loop.
    :param perturbations: Strengths by kind, see :mod:`rlt_gym.libero.worker.perturbations`.
    """

    def __init__(
        self,
        suite: str,
        assets_path: str,
        image_size: int = 128,
        render: str = "exact",
        compiled: bool = True,
        perturbations: dict[str, float] | None = None,
    ):
        prepare_libero(assets_path)
        self._arguments = (image_size, render, compiled, perturbations)
        self._suite = suite

    def make(self, task_id: int) -> LiberoSimulator:
        """
        Build the simulator of a task.

        :param task_id: Task of the suite.
        :return: Its simulator, without a GL context: that is made when it draws for the first time.
        """
        from rlt_gym.libero.worker.simulator import LiberoSimulator  # after prepare_libero, which silences its imports

        return LiberoSimulator(self._suite, task_id, *self._arguments)

    def warm_up(self, task_id: int) -> LiberoSimulator:
        """
        Build the simulator of a task and play a step without drawing.

        :param task_id: Task of the suite.
        :return: Its simulator, which has played a step without drawing: all code is compiled and loaded.
        """
        simulator = self.make(task_id)
        if simulator.render_quality != "stock":
            from rlt_gym.libero.rendering import triangles

            triangles.warm_up()
        simulator.reset("train", 0, observe=False)
        simulator.step_chunk(np.zeros((1, 7)), observe=False)
        return simulator
