"""
A critic of the gripper alone, as in HIL-SERL (arXiv 2410.21845): a choice of two for each chunk.

The critics of RLT judge all numbers of a chunk, few of which are the gripper's. This one sees the observation and one
choice: the gripper does what the chunk says, or the opposite for the whole chunk. The better choice is played.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.type_aliases import Schedule
from torch import nn

from rlt_sb3.common.gated_policy import task_rows
from rlt_sb3.common.replay.storage import ChunkBatch, TensorDict
from rlt_sb3.common.torch_utils import EnsembleMLP, polyak


class GripperCritic(nn.Module):
    """
    An ensemble of Q-functions of the observation and of whether the gripper is reversed.

    :param features_dim: size F of the features of an observation
    :param n_tasks: number T of tasks that observations tell apart; 1 if they tell none
    :param place: of the gripper's command in an action
    :param n_critics: number of members
    :param net_arch: hidden layer sizes of each member
    :param margin: by how much the lowest member has to prefer the reversed gripper to what the mean of the members says
        of the other one
    :raises ValueError: for settings out of range
    """

    active: th.Tensor

    def __init__(
        self,
        features_dim: int,
        n_tasks: int,
        place: int = -1,
        n_critics: int = 5,
        net_arch: Sequence[int] = (128, 128),
        margin: float = 0.02,
    ):
        if not (isinstance(n_critics, int) and n_critics >= 1):
            raise ValueError(f"gripper_critic.n_critics must be an integer >= 1, got {n_critics!r}.")
        if not (isinstance(margin, int | float) and margin >= 0.0):
            raise ValueError(f"gripper_critic.margin must be a number >= 0, got {margin!r}.")
        super().__init__()
        self.place, self.margin = place, margin
        self.ensemble = EnsembleMLP(n_critics, features_dim + 1, net_arch, nn.ReLU)
        # in which tasks; until the critics' warm-up has ended, in none
        self.register_buffer("active", th.zeros(n_tasks, dtype=th.bool))

    def q_values(self, features: th.Tensor, reverse: th.Tensor) -> th.Tensor:
        """
        Compute Q-values of all members.

        :param features: of observations (B, F)
        :param reverse: whether the gripper is reversed, bool (B,)
        :return: Q-values (members, B)
        """
        return self.ensemble(features, actions=reverse[:, None].float() * 2.0 - 1.0)

    def reverses(self, observations: TensorDict, features: th.Tensor) -> th.Tensor:
        """
        Choose where the gripper is reversed.

        :param observations: with ``task`` (B, T) if there are several
        :param features: of the observations (B, F)
        :return: bool (B,)
        """
        with th.no_grad():
            yes = th.ones(len(features), dtype=th.bool, device=features.device)
            better = self.q_values(features, yes).amin(0) > self.q_values(features, ~yes).mean(0) + self.margin
            return better & self.active[task_rows(observations)]

    def command(self, chunks: th.Tensor, observations: TensorDict, features: th.Tensor) -> th.Tensor:
        """
        Reverse the gripper where that is better.

        :param chunks: flat (B, C*d)
        :param observations: with the VLA's chunks ``vla_ref`` (B, C, d), and ``task`` (B, T) if there are several
        :param features: of the observations (B, F)
        :return: chunks, flat (B, C*d), without a gradient of the commands that are reversed
        """
        reference = observations["vla_ref"].float()
        wanted = chunks.view_as(reference).clone()
        opposite = th.where(closes(reference[..., self.place]), -1.0, 1.0)[:, None]
        reverse = self.reverses(observations, features)[:, None]
        wanted[..., self.place] = th.where(reverse, opposite, wanted[..., self.place])
        return wanted.flatten(1)


def closes(commands: th.Tensor) -> th.Tensor:
    """
    Tell where the gripper closes in most of a chunk.

    :param commands: of the gripper (B, C)
    :return: bool (B,)
    """
    return commands.mean(1) > 0.0


class GripperTraining:
    """
    Updates the critic of the gripper that the actor carries, by Q-learning.

    :param policy: of RLT, whose actors have a :class:`GripperCritic`
    :param lr_schedule: of actor and critics
    """

    def __init__(self, policy: Any, lr_schedule: Schedule):
        self.online: GripperCritic = policy.actor.gripper_critic
        self.slow: GripperCritic = policy.actor_target.gripper_critic
        mine = {id(parameter) for parameter in self.online.parameters()}
        others = [parameter for parameter in policy.actor.parameters() if id(parameter) not in mine]
        policy.actor.optimizer = policy.optimizer_class(others, lr=lr_schedule(1), **policy.optimizer_kwargs)
        parameters = list(self.online.parameters())
        self.optimizer = policy.optimizer_class(parameters, lr=lr_schedule(1), **policy.optimizer_kwargs)

    def targets(self, batch: ChunkBatch, next_features: th.Tensor, bounds: tuple[float, float] | None) -> th.Tensor:
        """
        Compute the targets: what follows if the slow copy chooses from the next chunk on.

        :param batch: rows
        :param next_features: of their next observations (B, F)
        :param bounds: ``q_bounds`` of RLT
        :return: targets (B,)
        """
        with th.no_grad():
            chosen = self.slow.reverses(batch.next_observations, next_features)
            next_q = self.slow.q_values(next_features, chosen).amin(0)
            targets = (batch.rewards + (1.0 - batch.dones) * batch.discounts * next_q.unsqueeze(1)).squeeze(1)
            return targets if bounds is None else targets.clamp_(*bounds)

    def step(
        self, batch: ChunkBatch, features: th.Tensor, next_features: th.Tensor, bounds: tuple[float, float] | None
    ) -> th.Tensor:
        """
        Update the critic on one batch.

        :param batch: rows
        :param features: of their observations (B, F)
        :param next_features: of their next observations (B, F)
        :param bounds: ``q_bounds`` of RLT
        :return: loss (summed over the ensemble)
        """
        place = self.online.place
        reference = batch.observations["vla_ref"]
        executed = batch.actions.view_as(reference)
        reverse = closes(executed[..., place]) != closes(reference[..., place])
        targets = self.targets(batch, next_features, bounds)
        loss = (self.online.q_values(features, reverse) - targets).pow(2).mean(1).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def follow(self, tau: float) -> None:
        """
        Move the slow copy, while the actors themselves do not move yet.

        :param tau: weight of the online critic
        """
        polyak(self.online, self.slow, tau)

    def activate(self, in_tasks: np.ndarray) -> None:
        """
        Reverse the gripper from now on where that is better.

        :param in_tasks: in which tasks, bool (T,)
        """
        for critic in (self.online, self.slow):
            critic.active.copy_(th.as_tensor(in_tasks))
