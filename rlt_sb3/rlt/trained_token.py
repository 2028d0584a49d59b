"""
RL that reaches the RL token: features of RLT whose encoder is trained by the critics.

The environment's own encoder stays frozen. Each network of RLT has a copy of it and reads the VLA's tokens
(``vla_tokens``) instead of ``z_rl``, so an actor that is deployed or saved keeps the encoder it was trained with.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.type_aliases import Schedule
from torch import nn

from rlt_sb3.rlt.features import ProprioLayout, RLTFeatures, TensorDict

TOKENS = "vla_tokens"


class TrainedTokenFeatures(RLTFeatures):
    """
    Computes the RL token from the VLA's tokens, by an encoder with gradients.

    The critics' loss trains the encoder, not the actor's: an actor would change the features until the critics
    overestimate its chunks (as in SAC-AE, arXiv 1910.01741). ``recon_coef`` times the loss of stage 1 keeps the token
    from forgetting what the critics do not need yet. The decoder may begin with random weights: in the critics' warm-up
    only critics and decoder learn.

    :param observation_space: Dict with ``vla_tokens`` (M, H), ``z_rl`` (D,) and ``proprio`` (P,)
    :param token_class: class of encoder and decoder, e.g. ``rlt_gym.rl_token.trainable.TrainableToken``; it has the
        methods ``forward`` and ``reconstruct`` of that one
    :param architecture: its argument
    :param encoder_lr: learning rate of encoder and decoder
    :param recon_coef: weight of the reconstruction loss (mean over tokens and channels) beside the critics' loss
    :param proprio_norm: as in :class:`~rlt_sb3.rlt.features.RLTFeatures`
    :raises ValueError: for settings out of range, or an observation without ``vla_tokens``
    """

    token: Any
    encoder_lr: float
    recon_coef: float

    def __init__(
        self,
        observation_space: spaces.Dict,
        token_class: type[nn.Module],
        architecture: Mapping[str, Any],
        encoder_lr: float = 1e-4,
        recon_coef: float = 1.0,
        proprio_norm: str | tuple[Any, Any] | ProprioLayout = "auto",
    ):
        check_tokens(observation_space)
        super().__init__(observation_space, proprio_norm)
        add_token(self, token_class, architecture, encoder_lr, recon_coef)

    def forward(self, observations: TensorDict) -> th.Tensor:
        """
        Compute the features of observations.

        :param observations: ``vla_tokens`` (B, M, H), ``proprio`` (B, P); or ``features``
        :return: features (B, features_dim)
        """
        if "features" in observations:
            return observations["features"]
        with th.autocast(observations[TOKENS].device.type, enabled=False):
            return super().forward({**observations, "z_rl": self.token(observations[TOKENS])})

    def losses(self, observations: TensorDict, train_encoder: bool) -> tuple[th.Tensor, th.Tensor]:
        """
        Compute features with gradients, and the loss of stage 1.

        :param observations: ``vla_tokens`` (B, M, H), ``proprio`` (B, P)
        :param train_encoder: whether gradients reach the encoder; else only the decoder
        :return: features (B, features_dim); squared error of the standardized tokens, ()
        """
        if self.recon_coef == 0.0:
            with th.set_grad_enabled(train_encoder):
                return self(observations), th.zeros((), device=observations[TOKENS].device)
        z_rl, loss = self.token.reconstruct(observations[TOKENS], train_encoder)
        return super().forward({**observations, "z_rl": z_rl}), loss


class TokenTraining:
    """
    The encoder among the networks of a policy: the critics train it, the others have copies.

    :param policy: of RLT, whose networks have :class:`TrainedTokenFeatures`, or
        :class:`~rlt_sb3.rlt.trained_both.TrainedBothFeatures`
    :param lr_schedule: of the critics, which get an optimizer without the encoder
    """

    def __init__(self, policy: Any, lr_schedule: Schedule):
        self.features: Any = policy.critic.features_extractor
        self._actor: nn.Module = policy.actor.features_extractor
        self._actor.requires_grad_(False)
        mine = {id(parameter) for parameter in self.features.parameters()}
        others = [parameter for parameter in policy.critic.parameters() if id(parameter) not in mine]
        policy.critic.optimizer = policy.optimizer_class(others, lr=lr_schedule(1), **policy.optimizer_kwargs)
        self.optimizer = th.optim.Adam(self.features.token.parameters(), lr=self.features.encoder_lr)
        names = ("actor", "actor_target", "critic", "critic_target", "actor_deployed", "actor_on_trial")
        self._networks = [getattr(policy, name) for name in names if hasattr(policy, name)]

    def start(self, token: nn.Module) -> None:
        """
        Give all networks the weights of an encoder.

        :param token: encoder and decoder
        """
        for network in self._networks:
            network.features_extractor.token.load_state_dict(token.state_dict())

    def copy_to_actor(self) -> None:
        """Give the actor that learns the encoder as it is now."""
        self._actor.load_state_dict(self.features.state_dict())


def add_token(
    features: Any, token_class: type[nn.Module], architecture: Mapping[str, Any], encoder_lr: float, recon_coef: float
) -> None:
    """
    Give features an encoder that learns, and its settings.

    :param features: they get ``token``, ``encoder_lr`` and ``recon_coef``
    :param token_class: class of encoder and decoder
    :param architecture: its argument
    :param encoder_lr: learning rate of encoder and decoder
    :param recon_coef: weight of the reconstruction loss
    :raises ValueError: if a setting is no number >= 0
    """
    for name, value in (("encoder_lr", encoder_lr), ("recon_coef", recon_coef)):
        if not (isinstance(value, int | float) and 0.0 <= value < float("inf")):
            raise ValueError(f"train_token.{name} must be a number >= 0, got {value!r}.")
        setattr(features, name, float(value))
    features.token = token_class(architecture)


def check_tokens(observation_space: spaces.Dict) -> None:
    """
    Refuse an environment that does not show the VLA's tokens.

    :param observation_space: its observations
    :raises ValueError: if ``vla_tokens`` is missing
    """
    if TOKENS not in observation_space.spaces:
        raise ValueError(
            f"train_token needs {TOKENS} in the observations, got {', '.join(observation_space.spaces)}: make the "
            "environment with show_tokens=True (--env.show_tokens true)."
        )


def check_memory(observation_space: spaces.Dict, action_space: spaces.Box, rows: int, vla: int = 0) -> str:
    """
    Say what rows and a second VLA take, and refuse a replay buffer that cannot fit into memory, before it is made.

    :param observation_space: of the rows
    :param action_space: likewise
    :param rows: rows of the buffer
    :param vla: bytes of a copy of the VLA that learns
    :return: one line
    :raises ValueError: if they need more than the machine's memory
    """
    boxes = [box for box in (*observation_space.values(), action_space) if isinstance(box, spaces.Box)]
    row = sum(int(np.prod(box.shape)) * box.dtype.itemsize for box in boxes)
    needed, memory = row * rows + vla, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    copy = f" and {vla / 2**20:.1f} MiB of a second VLA" if vla else ""
    if needed > memory:
        raise ValueError(
            f"The replay buffer needs {needed / 2**30:.1f} GiB ({rows} rows of {row} bytes{copy}), the machine has "
            f"{memory / 2**30:.1f} GiB: lower buffer_size below {max(memory - vla, 0) // row}."
        )
    return f"Memory: {rows} rows of {row} bytes ({row * rows / 2**30:.2f} GiB when full){copy}."
