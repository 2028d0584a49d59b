"""A copy of a MiniVLA through which gradients flow, on pictures as an environment shows them."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from rlt_gym.core.robot_spec import RobotSpec
from rlt_gym.vla.base import VLAOutput
from rlt_gym.vla.mini.model import MiniVLA, MiniVLAConfig, MiniVLANet


class MiniGradients(nn.Module):
    """
    MiniVLA's network, see :class:`~rlt_gym.rl_token.trainable_vla.GradientVLA`.

    :param architecture: Keyword arguments of :class:`~rlt_gym.vla.mini.model.MiniVLAConfig`, and ``robot``, of
        :meth:`RobotSpec.to_dict() <rlt_gym.core.robot_spec.RobotSpec.to_dict>`.
    """

    #: Names of the action head's parameters begin with one of these.
    head = ("net.head.",)
    #: Linear layers that get LoRA matrices, a regular expression.
    lora = r"net\.blocks\.\d+\.(qkv|out|up|down)"

    def __init__(self, architecture: Mapping[str, Any]) -> None:
        super().__init__()
        settings = dict(architecture)
        robot = RobotSpec.from_dict(settings.pop("robot"))
        self.net = MiniVLANet(MiniVLAConfig(**settings), robot)
        self._described = MiniVLA(self.net)

    @classmethod
    def of(cls, vla: MiniVLA) -> "MiniGradients":
        """
        Copy a frozen policy.

        :param vla: The policy; it is not changed.
        :return: The copy.
        """
        made = cls({**asdict(vla.config), "robot": vla.net.robot.to_dict()})
        made.net.load_state_dict(copy.deepcopy(vla.net.state_dict()))
        return made.to(vla.device)

    @property
    def architecture(self) -> dict[str, Any]:
        """What the constructor takes, plain data."""
        return {**asdict(self.net.config), "robot": self.net.robot.to_dict()}

    def forward(
        self, pictures: Mapping[str, torch.Tensor], state: torch.Tensor, tasks: Sequence[str], seeds: Sequence[int]
    ) -> VLAOutput:
        """
        Run the policy.

        :param pictures: For each camera uint8 (B, S, S, 3) as the simulator gives them.
        :param state: (B, P).
        :param tasks: One instruction per row.
        :param seeds: Not used: this policy is deterministic.
        :return: Tokens and chunk, with gradients.
        """
        frames = self.net.normalized([pictures[camera] for camera in self.net.robot.camera_keys])
        return self._described.output(*self.net(frames, state, *self.net.text_batch(tasks)))
