"""A copy of a LeRobot policy that goes on learning by LeRobot's loss while something else learns from its tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlt_gym.data.demo_set import DemoReader, DemoSet, load_demo_set
from rlt_gym.data.lerobot import LeRobotSettings
from rlt_gym.vla.base import VLAOutput, forward_seed
from rlt_gym.vla.batches import run_vla
from rlt_gym.vla.demos import frame_size
from rlt_gym.vla.lerobot.checkpoint import save_checkpoint
from rlt_gym.vla.lerobot.processors import check_gradients

if TYPE_CHECKING:
    from rlt_gym.vla.lerobot.adapter import LeRobotVLA

#: Types of policies that learn from single observations and chunks of ``chunk_size`` actions.
TYPES = ("act", "smolvla", "pi0", "pi05")


class LeRobotLearner:
    """
    A LeRobot policy with gradients, and the demonstrations that it imitates.

    :param vla: Where it begins; it is not changed.
    :param demos: Demonstration files, glob patterns or folders, also of LeRobot datasets.
    :param max_demos: Most demonstrations per task; ``None`` = all.
    :param frame_stride: One observation in this many.
    :param lerobot: How LeRobot datasets are read; ``None`` = with the defaults.
    :raises ValueError: If the policy is of another type, or calculates in half precision.
    """

    #: A checkpoint is a folder.
    suffix = ""

    def __init__(
        self,
        vla: LeRobotVLA,
        demos: Sequence[str],
        max_demos: int | None = None,
        frame_stride: int = 1,
        lerobot: LeRobotSettings | None = None,
    ) -> None:
        if vla.config.type not in TYPES:
            raise ValueError(
                f"alpha is for a VLA that learns, and a {vla.config.type} policy of LeRobot cannot learn here (these "
                f"can: {', '.join(TYPES)}): set alpha to 0, or fine-tune it with lerobot-train."
            )
        check_gradients(vla.config, vla.dtype)
        self.origin, self._vla = vla, vla.again(vla.folder)
        self.net = self._vla.policy
        for name, parameter in self.net.named_parameters():
            parameter.requires_grad_(name in vla.trained)
        edge = DemoReader(list(demos), max_demos, frame_stride, lerobot=lerobot).edge
        size = frame_size(vla.spec, edge)
        self.data: DemoSet = load_demo_set(list(demos), size, max_demos, frame_stride, lerobot=lerobot)

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return what learns: what LeRobot's trainer trains, too."""
        return [parameter for parameter in self.net.parameters() if parameter.requires_grad]

    def look(self, rows: np.ndarray) -> VLAOutput:
        """
        Run the policy as it acts, without gradients.

        :param rows: Rows of :attr:`data` (B,).
        :return: Tokens and chunk.
        """
        return self._look(rows, *self._given(rows))

    def forward(self, rows: np.ndarray, rng: np.random.Generator | None = None) -> tuple[VLAOutput, torch.Tensor]:
        """
        Run the policy on demonstrations twice: as it acts, and as LeRobot trains it.

        :param rows: Rows of :attr:`data` (B,).
        :param rng: Source of dropout and of the flow's noise; ``None`` = always the same numbers.
        :return: Tokens and chunk without gradients, and LeRobot's loss of imitation with them.
        """
        obs, tasks = self._given(rows)
        chunk, real = self.data.chunks(rows, self.origin.config.chunk_size)
        seed = 0 if rng is None else int(rng.integers(2**62))
        return self._look(rows, obs, tasks), self._vla.imitation_loss(obs, tasks, chunk, real, seed)

    def save(self, path: str | os.PathLike[str], provenance: dict[str, Any]) -> LeRobotVLA:
        """
        Write the policy as it is now.

        :param path: Folder that is not there yet. LeRobot's own programs read it, too.
        :param provenance: How it was trained.
        :return: The frozen policy as read back.
        """
        began = {"vla": str(self.origin.folder), "fingerprint": self.origin.fingerprint()}
        known = {"init": began, "imitated": self.data.files, **provenance}
        save_checkpoint(Path(path), self.origin.folder, self.net, known)
        return self.origin.again(Path(path))

    def _look(self, rows: np.ndarray, obs: dict[str, np.ndarray], tasks: list[str]) -> VLAOutput:
        """Run the policy on observations of rows, with the seeds of a frozen VLA."""
        seeds = [forward_seed(int(self.data.demo[row]), int(self.data.step[row])) for row in rows]
        return run_vla(self._vla, obs, tasks, seeds)

    def _given(self, rows: np.ndarray) -> tuple[dict[str, np.ndarray], list[str]]:
        """Return observations and instructions of rows."""
        pictures = {camera: self.data.pictures[camera][rows] for camera in self.origin.spec.cameras}
        tasks = [self.data.instructions[task] for task in self.data.task[rows]]
        return {**pictures, "state": self.data.proprio[rows]}, tasks
