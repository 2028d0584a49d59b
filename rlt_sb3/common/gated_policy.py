"""The policies that a deployment gate controls, and who of their players plays in which environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch as th
from torch import nn


class GatedPolicy(Protocol):
    """A policy that a gate can control: it has the actor that learns, a copy on trial and a deployed copy."""

    @property
    def actor_on_trial(self) -> nn.Module:
        """The copy on trial."""

    @property
    def actor_deployed(self) -> nn.Module:
        """The copy that is deployed."""

    @property
    def training_actor(self) -> nn.Module:
        """The practicing actor, which learns and plays the other training episodes."""

    @property
    def starts_at_vla(self) -> bool:
        """Whether the untrained actor plays the VLA's chunks."""

    def start_trial(self) -> None:
        """Copy the training actor to ``actor_on_trial``."""

    def deploy(self, parameters: Mapping[str, Any]) -> None:
        """
        Give ``actor_deployed``, which ``predict`` plays, these parameters.

        :param parameters: an actor's state dict
        """


def play_seats(
    policy: GatedPolicy, player: np.ndarray, observation: Any, chunks: np.ndarray, reference: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """
    Let the VLA and the actor on trial play where it is their turn.

    :param policy: the policy
    :param player: whose episode each environment plays: "vla", "actor", or "" for practice
    :param observation: as its actors take it, of all environments
    :param chunks: of the training actor (n_envs, ...)
    :param reference: the VLA's own chunks, like ``chunks``
    :return: in which environments no noise may be added (n_envs,), and chunks to play
    """
    by_vla, by_actor = player == "vla", player == "actor"
    chunks = chunks.copy()
    chunks[by_vla] = reference[by_vla]
    if by_actor.any():
        with th.no_grad():
            tried = policy.actor_on_trial(observation).cpu().numpy().reshape(chunks.shape)
        chunks[by_actor] = tried[by_actor]
    return by_vla | by_actor, chunks
