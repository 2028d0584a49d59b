"""A copy of a MiniVLA that goes on imitating demonstrations while something else learns from its tokens."""

import copy
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from rlt_gym.data.demo_set import DemoSet, load_demo_set
from rlt_gym.data.lerobot import LeRobotSettings
from rlt_gym.vla.base import VLAOutput
from rlt_gym.vla.mini.model import MiniVLA
from rlt_gym.vla.mini.training import Batches, TrainVLAConfig


class MiniLearner:
    """
    A MiniVLA with gradients, and the demonstrations that it imitates.

    :param vla: Where it begins; it is not changed.
    :param demos: Demonstration files, glob patterns or folders.
    :param max_demos: Most demonstrations per task; ``None`` = all.
    :param frame_stride: One observation in this many.
    :param lerobot: How LeRobot datasets are read; ``None`` = with the defaults.
    """

    suffix = ".safetensors"

    def __init__(
        self,
        vla: MiniVLA,
        demos: Sequence[str],
        max_demos: int | None = None,
        frame_stride: int = 1,
        lerobot: LeRobotSettings | None = None,
    ) -> None:
        self.origin = vla
        size = vla.config.image_size
        self.data: DemoSet = load_demo_set(list(demos), size, max_demos, frame_stride, lerobot=lerobot)
        self.net = copy.deepcopy(vla.net).requires_grad_(True)
        config = TrainVLAConfig(demos=list(demos), model=vla.config, device=str(vla.device))
        self._batches = Batches(config, self.data, self.net, np.arange(len(self.data)))

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Return what learns."""
        return self.net.parameters()

    @torch.no_grad()
    def look(self, rows: np.ndarray) -> VLAOutput:
        """
        Run the policy on demonstrations without gradients or augmentation.

        :param rows: Rows of :attr:`data` (B,).
        :return: Tokens and chunk.
        """
        return self.origin.output(*self.net(*self._batches.inputs(rows, None)))

    def forward(self, rows: np.ndarray, rng: np.random.Generator | None = None) -> tuple[VLAOutput, torch.Tensor]:
        """
        Run the policy on demonstrations, with gradients.

        :param rows: Rows of :attr:`data` (B,).
        :param rng: Source of the augmentation of pictures and proprioception; ``None`` = no augmentation.
        :return: Tokens and chunk, and the loss of imitation: mean absolute error of the chunk.
        """
        tokens, chunk = self.net(*self._batches.inputs(rows, rng))
        loss = self._batches.losses(rows, tokens, chunk, None)["action"]
        return self.origin.output(tokens, chunk), loss

    def save(self, path: str | os.PathLike[str], provenance: dict[str, Any]) -> MiniVLA:
        """
        Write the policy as it is now.

        :param path: ``.safetensors`` file; its provenance goes beside it.
        :param provenance: How it was trained. What is known of the pictures is kept; the success rates of the policy
            that it began as are not its own.
        :return: The frozen policy as read back.
        """
        began = {"vla": self.origin.spec.name, "fingerprint": self.origin.fingerprint()}
        kept = {
            key: self.origin.provenance.get(key) for key in ("kind", "assets", "render", "frame_size", "instructions")
        }
        known = kept | {"init": began, "demos": self.data.files, "success_rates": None}
        MiniVLA(copy.deepcopy(self.net), known | provenance).save(path)
        return MiniVLA.load(path)
