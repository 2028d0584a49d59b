"""Copies of LeRobot's policies through which gradients flow, on pictures as an environment shows them."""

from __future__ import annotations

import tempfile
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlt_gym.vla.base import VLAOutput
from rlt_gym.vla.lerobot.checkpoint import build_policy, plain_files, read_config
from rlt_gym.vla.lerobot.policies import ACTReader
from rlt_gym.vla.lerobot.processors import check_gradients, load_processors, precision, see_picture
from rlt_gym.vla.normalization import to_chunk

if TYPE_CHECKING:
    from rlt_gym.vla.lerobot.adapter import LeRobotVLA


class ACTGradients(nn.Module):
    """
    An ACT, see :class:`~rlt_gym.rl_token.trainable_vla.GradientVLA`.

    Its tokens are the encoder's output, so all that follows is its action head: the decoder, which makes a chunk of
    them, and the last layer. The encoder of its VAE, which does not run when it acts, is left out.

    :param architecture: ``files`` (name -> base64: configuration and processors of the checkpoint), ``features``,
        ``orientation``, ``gripper``, ``dtype``, ``config`` and ``trust_image_stats`` as
        :class:`~rlt_gym.vla.lerobot.adapter.LeRobotVLA` has them.
    """

    #: Names of the action head's parameters begin with one of these.
    head = ("policy.model.decoder.", "policy.model.decoder_pos_embed.", "policy.model.action_head.")
    #: Linear layers that get LoRA matrices, a regular expression: those of the feed-forward networks. PyTorch's
    #: attention reads the weights of its layers without calling them, so matrices beside them would have no effect.
    lora = r"policy\.model\.(encoder|decoder)\.layers\.\d+\.linear[12]"

    def __init__(self, architecture: Mapping[str, Any]) -> None:
        super().__init__()
        self.architecture = dict(architecture)
        self._load(torch.device("cpu"))
        self.policy = build_policy(self._config)
        self._reader = GradientReader(self.policy, self._config)
        self.eval()

    @classmethod
    def of(cls, vla: LeRobotVLA) -> ACTGradients:
        """
        Copy a frozen policy.

        :param vla: The policy; it is not changed.
        :return: The copy.
        """
        files = {name: b64encode((vla.folder / name).read_bytes()).decode() for name in plain_files(vla.folder)}
        made = cls({"files": files, **vla.copied})
        state = vla.policy.state_dict()
        made.policy.load_state_dict({name: state[name] for name in made.policy.state_dict()})
        return made.to(vla.device)

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
        device = next(self.policy.parameters()).device
        if device != self._device:  # the processors are no modules
            self._load(device)
        given = self.architecture
        batch: dict[str, Any] = {"task": list(tasks)}
        for camera, key in given["features"].items():
            size = int(self._config.image_features[key].shape[1])
            batch[key] = see_picture(pictures[camera], given["orientation"], size)
        if self._config.robot_state_feature is not None:
            batch["observation.state"] = state
        with precision(self._config, given["dtype"], device):
            reading = self._reader.read(self._pre(batch), seeds)
        chunk = to_chunk(self._post(reading.actions.float()), gripper=given["gripper"], gradients=True).to(device)
        return VLAOutput(reading.tokens, reading.mask, reading.kind, chunk)

    def _load(self, device: torch.device) -> None:
        """Read configuration and processors, for use on a device."""
        given, self._device = self.architecture, device
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for file, text in given["files"].items():
                (folder / Path(file).name).write_bytes(b64decode(text))
            self._config = read_config(folder, device, given["dtype"], given["config"])
            self._config.use_vae = False
            self._pre, self._post = load_processors(folder, self._config, trust_image_stats=given["trust_image_stats"])


class GradientReader(ACTReader):
    """Reads an ACT as :class:`~rlt_gym.vla.lerobot.policies.ACTReader` does, with gradients."""

    def _act(self, batch: dict[str, Any]) -> torch.Tensor:
        """As ``predict_action_chunk`` of LeRobot, which takes gradients away."""
        from lerobot.utils.constants import OBS_IMAGES

        return self.policy.model({**batch, OBS_IMAGES: [batch[key] for key in self.config.image_features]})[0]


#: Type of a LeRobot policy -> its copy with gradients.
GRADIENTS: dict[str, type[nn.Module]] = {"act": ACTGradients}


def gradients_of_type(config: Any, dtype: str | None, hook: str | None) -> type[nn.Module]:
    """
    Find the class of a policy's copy with gradients.

    :param config: The policy's configuration.
    :param dtype: In which type it calculates, as the caller says; ``None`` = as the checkpoint says.
    :param hook: Path of the module whose output its tokens are; ``None`` = the usual ones.
    :return: The class.
    :raises ValueError: If there is none.
    """
    learn = f"policies of LeRobot that can learn by RL are {', '.join(GRADIENTS)}"
    if config.type not in GRADIENTS:
        raise ValueError(
            f"show_pictures is for a VLA that learns, and a {config.type} gives no gradients: {learn}; use one, or "
            "leave out show_pictures and train_vla."
        )
    if hook is not None:
        raise ValueError(f"The tokens of hook {hook!r} give no gradients: {learn}, without a hook; leave hook out.")
    check_gradients(config, dtype)
    return GRADIENTS[config.type]
