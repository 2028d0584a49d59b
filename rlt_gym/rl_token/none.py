"""No RL token at all: ``z_rl`` is a single zero, and a policy sees proprioception and the VLA's chunk."""

import torch

from rlt_gym.vla.base import FrozenVLA, VLAOutput, fingerprint


class NoToken:
    """
    Replaces the RL token of a VLA that gives no hidden states, such as one behind openpi's own server.

    ``z_rl`` stays in the observation, one zero, so that every algorithm, buffer and file keeps its form.

    :param device: Where ``z_rl`` is put.
    """

    #: Width D of ``z_rl``.
    z_dim = 1

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)

    def __call__(self, output: VLAOutput) -> torch.Tensor:
        """
        Make ``z_rl``.

        :param output: What the VLA gave for B observations.
        :return: Zeros, float32 (B, 1).
        """
        return torch.zeros(len(output.chunk), 1, device=self._device)

    def to(self, device: torch.device | str) -> "NoToken":
        """
        Move it.

        :param device: Where ``z_rl`` is put.
        :return: The moved encoder.
        """
        return NoToken(device)

    def fingerprint(self) -> str:
        """
        Identify the encoder.

        :return: sha256 over the name: there are no weights.
        """
        return fingerprint({"format": "rlt-no-token"}, {})

    def check_vla(self, vla: FrozenVLA) -> None:
        """
        Accept every VLA.

        :param vla: The VLA.
        """


def no_token(vla: FrozenVLA | None) -> NoToken:
    """
    Make the encoder.

    :param vla: The VLA; not needed.
    :return: The encoder.
    """
    return NoToken()
