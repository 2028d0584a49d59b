"""
RL that reaches VLA and RL token: a copy of the VLA gives the tokens, and an encoder that learns reads them.

Each has an optimizer of its own. Rows need pictures only: the tokens are computed from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch as th
from gymnasium import spaces
from torch import nn

from rlt_sb3.common.replay.storage import ChunkBatch
from rlt_sb3.rlt.features import ProprioLayout, TensorDict
from rlt_sb3.rlt.trained_token import TOKENS, add_token
from rlt_sb3.rlt.trained_vla import PICTURES, TrainedVLAFeatures, VLATraining


class TrainedBothFeatures(TrainedVLAFeatures):
    """
    Features of the RL token that a learning encoder makes of the tokens of a learning copy of the VLA.

    Until one of them has taken its first step, the row's own ``z_rl`` and ``vla_ref`` are read.

    :param observation_space: as for :class:`~rlt_sb3.rlt.trained_vla.TrainedVLAFeatures`
    :param vla: the copy, shared by all networks
    :param token_class: as for :class:`~rlt_sb3.rlt.trained_token.TrainedTokenFeatures`
    :param architecture: its argument
    :param encoder_lr: learning rate of encoder and decoder
    :param recon_coef: weight of the reconstruction loss beside the critics' loss; the tokens are constants in it
    :param proprio_norm: as in :class:`~rlt_sb3.rlt.features.RLTFeatures`
    :raises ValueError: for settings out of range, or an observation without ``pictures``
    """

    token: Any
    encoder_lr: float
    recon_coef: float

    def __init__(
        self,
        observation_space: spaces.Dict,
        vla: Any,
        token_class: type[nn.Module],
        architecture: Mapping[str, Any],
        encoder_lr: float = 1e-4,
        recon_coef: float = 1.0,
        proprio_norm: str | tuple[Any, Any] | ProprioLayout = "auto",
    ):
        super().__init__(observation_space, vla, proprio_norm)
        add_token(self, token_class, architecture, encoder_lr, recon_coef)

    def look(self, observations: TensorDict) -> tuple[th.Tensor, th.Tensor]:
        """
        Run the copy of the VLA.

        :param observations: with ``pictures``
        :return: tokens (B, N, H), zeros where there is none, and chunk (B, C, d), with gradients
        """
        vla = self._vla[0]
        with th.autocast(observations[PICTURES].device.type, enabled=False):
            tokens, _, chunk = vla.look(observations, dict(zip(vla.moving, self.weights, strict=True)))
        return tokens, chunk

    def run(self, observations: TensorDict) -> tuple[th.Tensor, th.Tensor]:
        """
        Run the copy of the VLA and the encoder.

        :param observations: with ``pictures``
        :return: RL token (B, D) and chunk (B, C, d), with gradients
        """
        tokens, chunk = self.look(observations)
        with th.autocast(tokens.device.type, enabled=False):
            return self.token(tokens), chunk

    def losses(self, observations: TensorDict, train_encoder: bool) -> tuple[th.Tensor, th.Tensor]:
        """
        Compute features with gradients, and the loss of stage 1.

        :param observations: with what :meth:`VLAAndTokenTraining.look` adds
        :param train_encoder: whether gradients reach the encoder; else only the decoder
        :return: features (B, features_dim); squared error of the standardized tokens, ()
        """
        tokens, loss = observations[TOKENS], th.zeros((), device=observations[TOKENS].device)
        if self.recon_coef > 0.0:
            z_rl, loss = self.token.reconstruct(tokens, train_encoder)
        if self.recon_coef == 0.0 or tokens.requires_grad:  # in the reconstruction tokens are constants
            with th.set_grad_enabled(train_encoder):
                z_rl = self.token(tokens)
        return self.of_token(observations, z_rl), loss


class VLAAndTokenTraining(VLATraining):
    """
    The copy of the VLA below an encoder that learns.

    :param policy: of RLT, whose networks have :class:`TrainedBothFeatures`
    :param settings: of the VLA
    :param lr_schedule: of the critics, which get an optimizer without VLA and encoder
    """

    features: TrainedBothFeatures

    def look(self, batch: ChunkBatch, learn: bool) -> None:
        """
        Run the VLA as it is now on the rows, once for all networks.

        :param batch: rows; they get the copy's ``vla_tokens`` and ``vla_ref``, the next observations ``features``
        :param learn: whether :meth:`step` follows; else no gradients reach the VLA
        """
        with th.no_grad():
            batch.next_observations.update(self.features.see(batch.next_observations))
        with th.set_grad_enabled(learn):
            tokens, chunk = self.features.look(batch.observations)
        if learn:
            read, played = tokens.detach().requires_grad_(self.vla.moves_tokens), chunk.detach().requires_grad_()
            self._graph = (tokens, chunk, read, played)
            tokens, chunk = read, played
        batch.observations[TOKENS] = tokens
        if self.features.moved or learn:
            batch.observations["vla_ref"] = chunk
