"""An untrained replacement of the RL token: the mean of the frozen VLA's picture tokens."""

import torch
from torch import nn
from torch.nn import functional as F

from rlt_gym.rl_token.encoder import select_tokens
from rlt_gym.vla.base import FrozenVLA, VLAOutput, fingerprint


class MeanToken(nn.Module):
    """
    Replaces :class:`~rlt_gym.rl_token.encoder.RLTokenEncoder` (ablation "no RL token").

    The paper's ablation reads a ResNet trained on ImageNet instead of the token; this one averages what the VLA itself
    has computed from the pictures.

    :param token_dim: Width H of the VLA's tokens.
    """

    def __init__(self, token_dim: int) -> None:
        super().__init__()
        self.token_dim = token_dim

    @property
    def z_dim(self) -> int:
        """Width D of ``z_rl``: that of the tokens."""
        return self.token_dim

    def forward(self, output: VLAOutput) -> torch.Tensor:
        """
        Average the picture tokens.

        :param output: What the VLA gave for B observations; any bool mask.
        :return: ``z_rl``, float32 (B, H), normalized to zero mean and unit variance over its H numbers, as an RL
            token is.
        """
        tokens, mask = select_tokens(output, ("image",))
        mean = tokens.sum(1) / mask.sum(1, keepdim=True)
        return F.layer_norm(mean, (self.token_dim,))

    def fingerprint(self) -> str:
        """
        Identify the encoder.

        :return: sha256 over the name and the width: there are no weights.
        """
        return fingerprint({"format": "rlt-mean-token", "token_dim": self.token_dim}, {})

    def check_vla(self, vla: FrozenVLA) -> None:
        """
        Refuse a VLA whose tokens have another width.

        :param vla: The VLA to use it with.
        :raises ValueError: If the VLA's tokens have another width.
        """
        if vla.spec.token_dim != self.token_dim:
            raise ValueError(
                f"This mean token reads tokens of width {self.token_dim}, the VLA {vla.spec.name!r} gives "
                f"{vla.spec.token_dim}; use rl_token='mean'."
            )


def mean_token(vla: FrozenVLA | None) -> MeanToken:
    """
    Make the encoder that averages a VLA's picture tokens.

    :param vla: The VLA.
    :return: The encoder.
    :raises ValueError: Without a VLA.
    """
    if vla is None:
        raise ValueError("rl_token='mean' needs the VLA whose tokens it averages; give vla=.")
    return MeanToken(vla.spec.token_dim)
