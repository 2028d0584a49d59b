"""Encoders that nobody trains: what an RL token has to beat."""

import torch
from torch import nn
from torch.nn import functional as F

from rlt_gym.rl_token.encoder import RLTokenEncoder
from rlt_gym.rl_token.io import read_rl_token, shipped_rl_token
from rlt_gym.vla.base import FrozenVLA, VLAOutput, fingerprint
from rlt_gym.vla.tokens import select_tokens


class MeanToken(nn.Module):
    """
    The mean of the frozen VLA's tokens.

    The paper's ablation "no RL token" reads a ResNet trained on ImageNet instead of the token; the mean of the picture
    tokens is what the VLA itself has computed from the pictures.

    :param token_dim: Width H of the VLA's tokens.
    :param kinds: Kinds of tokens that are averaged, ``("all",)`` for every valid token.
    """

    def __init__(self, token_dim: int, kinds: tuple[str, ...] = ("image",)) -> None:
        super().__init__()
        self.token_dim, self.kinds = token_dim, tuple(kinds)

    @property
    def z_dim(self) -> int:
        """Width D of ``z_rl``: that of the tokens."""
        return self.token_dim

    def forward(self, output: VLAOutput) -> torch.Tensor:
        """
        Average the tokens.

        :param output: What the VLA gave for B observations; any bool mask.
        :return: ``z_rl``, float32 (B, H), normalized to zero mean and unit variance over its H numbers, as an RL
            token is.
        """
        tokens, mask = select_tokens(output, self.kinds)
        mean = tokens.sum(1) / mask.sum(1, keepdim=True)
        return F.layer_norm(mean, (self.token_dim,))

    def fingerprint(self) -> str:
        """
        Identify the encoder.

        :return: sha256 over name, width and kinds: there are no weights.
        """
        return fingerprint({"format": "rlt-mean-token", "token_dim": self.token_dim, "kinds": list(self.kinds)}, {})

    def check_vla(self, vla: FrozenVLA) -> None:
        """
        Refuse a VLA whose tokens have another width, or none of these kinds.

        :param vla: The VLA to use it with.
        :raises ValueError: If it is refused.
        """
        if "all" not in self.kinds:
            vla.spec.check_kinds(self.kinds)
        _check_width(vla, self.token_dim, "mean")


class LastToken(nn.Module):
    """
    The last valid token of the frozen VLA, of whatever kind; a VLA with causal attention has read everything there.

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
        Take the last token.

        :param output: What the VLA gave for B observations; any bool mask.
        :return: ``z_rl``, float32 (B, H), normalized to zero mean and unit variance over its H numbers.
        """
        tokens, mask = select_tokens(output, ("all",))
        last = tokens[torch.arange(len(tokens), device=tokens.device), mask.sum(1) - 1]
        return F.layer_norm(last, (self.token_dim,))

    def fingerprint(self) -> str:
        """
        Identify the encoder.

        :return: sha256 over name and width: there are no weights.
        """
        return fingerprint({"format": "rlt-last-token", "token_dim": self.token_dim}, {})

    def check_vla(self, vla: FrozenVLA) -> None:
        """
        Refuse a VLA whose tokens have another width.

        :param vla: The VLA to use it with.
        :raises ValueError: If it is refused.
        """
        _check_width(vla, self.token_dim, "last")


def _check_width(vla: FrozenVLA, token_dim: int, name: str) -> None:
    if vla.spec.token_dim != token_dim:
        raise ValueError(
            f"This {name} token reads tokens of width {token_dim}, the VLA {vla.spec.name!r} gives "
            f"{vla.spec.token_dim}; use rl_token={name!r}."
        )


def _needed(vla: FrozenVLA | None, name: str) -> FrozenVLA:
    if vla is None:
        raise ValueError(f"rl_token={name!r} needs the VLA whose tokens it reads; give vla=.")
    return vla


def mean_token(vla: FrozenVLA | None) -> MeanToken:
    """
    Make the encoder that averages a VLA's picture tokens.

    :param vla: The VLA.
    :return: The encoder.
    :raises ValueError: Without a VLA.
    """
    return MeanToken(_needed(vla, "mean").spec.token_dim)


def mean_of_all(vla: FrozenVLA | None) -> MeanToken:
    """
    Make the encoder that averages all of a VLA's tokens.

    :param vla: The VLA.
    :return: The encoder.
    :raises ValueError: Without a VLA.
    """
    return MeanToken(_needed(vla, "mean-all").spec.token_dim, ("all",))


def last_token(vla: FrozenVLA | None) -> LastToken:
    """
    Make the encoder that takes a VLA's last token.

    :param vla: The VLA.
    :return: The encoder.
    :raises ValueError: Without a VLA.
    """
    return LastToken(_needed(vla, "last").spec.token_dim)


def random_token(like: str, vla: FrozenVLA | None) -> RLTokenEncoder:
    """
    Make an encoder with the architecture and the statistics of a trained one, and random weights.

    :param like: File of the trained one, or "auto", the shipped one of the VLA.
    :param vla: The VLA.
    :return: The encoder, always with the same weights.
    :raises ValueError: Without a VLA, or without such a file.
    """
    vla = _needed(vla, f"random:{like}")
    trained = shipped_rl_token(vla) if like == "auto" else read_rl_token(like, vla)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = RLTokenEncoder(trained.config, trained.vla_fingerprint, trained.vla_name)
    encoder.token_mean.copy_(trained.token_mean)
    encoder.token_std.copy_(trained.token_std)
    return encoder
