"""An encoder that goes on learning, beside a decoder: what an algorithm trains that reads ``vla_tokens``."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from rlt_gym.rl_token.decoder import RLTokenDecoder, reconstruction_loss
from rlt_gym.rl_token.encoder import RLTokenConfig, RLTokenEncoder
from rlt_gym.rl_token.io import read_decoder_of


class TrainableToken(nn.Module):
    """
    Encoder and decoder with gradients, on tokens as an environment with ``show_tokens`` shows them.

    :param architecture: Keyword arguments of :class:`~rlt_gym.rl_token.encoder.RLTokenConfig`.
    """

    def __init__(self, architecture: Mapping[str, Any]) -> None:
        super().__init__()
        config = RLTokenConfig(**architecture)
        self.encoder, self.decoder = RLTokenEncoder(config), RLTokenDecoder(config)

    @classmethod
    def of(cls, encoder: Any) -> "TrainableToken":
        """
        Copy an environment's encoder, with the decoder of its file; if there is none, the decoder is a new one.

        :param encoder: The encoder.
        :return: The copy, with gradients.
        :raises ValueError: If it is not an encoder with weights, or its file has changed.
        """
        if not isinstance(encoder, RLTokenEncoder):
            raise ValueError(
                f"An RL token that learns needs an encoder with weights, got {type(encoder).__name__}: set rl_token to "
                "'auto', 'random:auto' or a file."
            )
        token = cls(asdict(encoder.config))
        token.encoder.load_state_dict(encoder.state_dict())
        decoder = read_decoder_of(encoder)
        if decoder is not None:
            token.decoder.load_state_dict(decoder.state_dict())
        return token

    @property
    def architecture(self) -> dict[str, Any]:
        """What the constructor takes, plain data."""
        return asdict(self.encoder.config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """
        Make the RL token. Gradients reach the tokens.

        :param tokens: (B, M, H), valid ones first, zeros where there is none.
        :return: ``z_rl`` (B, D).
        """
        return self.encoder.encode(*self._read(tokens))

    def reconstruct(self, tokens: torch.Tensor, train_encoder: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Make the RL token and compute the loss of stage 1. The tokens are constants.

        :param tokens: (B, M, H), valid ones first, zeros where there is none.
        :param train_encoder: Whether gradients reach the encoder; else only the decoder.
        :return: ``z_rl`` (B, D); the squared error of the standardized tokens, averaged over tokens and channels, ().
        """
        z, mask = self._read(tokens.detach())
        with torch.set_grad_enabled(train_encoder):
            z_rl = self.encoder.encode(z, mask)
        predicted = self.decoder(z_rl, z, self.encoder.config.context_dropout)
        return z_rl, reconstruction_loss(predicted, z, mask)["mean"]

    def _read(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the standardized tokens (B, N, H) and which of them are valid (B, N)."""
        mask = (tokens != 0.0).any(2)
        count = int(mask.sum(1).max())
        return self.encoder.scale(tokens[:, :count]), mask[:, :count]
